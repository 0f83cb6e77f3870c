/* The safetensors format, shared by its reader and writer.
 * https://github.com/huggingface/safetensors#format */
#ifndef DRAY_MODEL_SAFETENSORS_H
#define DRAY_MODEL_SAFETENSORS_H

#include <dray/model.h>
#include <jansson.h>

#define DRAY__SAFETENSORS_SINGLE "model.safetensors"
#define DRAY__SAFETENSORS_INDEX "model.safetensors.index.json"
#define DRAY__SAFETENSORS_INDEX_MAX (256 << 20) /* bytes of an index that are read */
/* The reference implementation's limit on headers (MAX_HEADER_SIZE). */
#define DRAY__SAFETENSORS_HEADER_MAX 100000000

typedef struct dray__stored {
    const char *name; /* the header's */
    dray_dtype dtype;
    uint32_t ndim;
    int64_t shape[DRAY_MAX_DIMS];
    uint64_t start, end; /* bytes from the file's start */
} dray__stored;

/* One file's header, checked; tensors in the order in which they lie. */
typedef struct dray__stored_file {
    json_t *header;
    dray__stored *tensors;
    uint32_t count;
    uint64_t bytes; /* of the whole file */
} dray__stored_file;

/* Reads and checks a file's header; the data are not read. */
int dray__safetensors_read(const char *path, dray__stored_file *out, dray_error *error);
void dray__stored_file_free(dray__stored_file *file);

/* 1 and the shard's number and their count for "model-00002-of-00005.safetensors", with any word in
 * front; else 0. */
int dray__safetensors_is_shard(const char *name, unsigned *number, unsigned *count);

#endif
