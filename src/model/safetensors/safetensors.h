/* src/model/safetensors/: checkpoints in the safetensors format, as layouts whose regions are
 * files. The reader checks every field of a file before it uses it. The writer replaces files so
 * that a process that opens the folder at any moment finds the old checkpoint or the new one, never
 * a mixture. */

/* The safetensors format, shared by its reader and writer.
 * https://github.com/huggingface/safetensors#format */
#pragma once

#include <dray/model.h>
#include <jansson.h>

#define DRAY__SAFETENSORS_SINGLE "model.safetensors"
#define DRAY__SAFETENSORS_INDEX "model.safetensors.index.json"
#define DRAY__SAFETENSORS_INDEX_MAX (256 << 20) /* bytes of an index that are read */
/* The reference implementation's limit on headers (MAX_HEADER_SIZE). */
#define DRAY__SAFETENSORS_HEADER_MAX 100000000

typedef struct dray__file_tensor {
    const char *name; /* the header's */
    dray_dtype dtype;
    uint32_t ndim;
    int64_t shape[DRAY_MAX_DIMS];
    uint64_t start, end; /* bytes from the file's start */
} dray__file_tensor;

/* One file's header, checked; tensors are in the order of their data. */
typedef struct dray__stored_file {
    json_t *header;
    dray__file_tensor *tensors;
    uint32_t count;
    uint64_t bytes; /* of the whole file */
} dray__stored_file;

/* Writes "folder/name" followed by the tail to `out` of PATH_MAX bytes. Returns 0, or DRAY_EINVALID
 * when it is too long. */
int dray__safetensors_path(const char *folder, const char *name, const char *tail, char *out,
                           dray_error *error);
/* Fails with `code` unless `metadata`, which the message calls `what`, is an object of strings. */
int dray__safetensors_check_metadata(const json_t *metadata, const char *what, int code,
                                     dray_error *error);
/* Reads and checks a file's header; the data are not read. */
int dray__safetensors_read(const char *path, dray__stored_file *out, dray_error *error);
void dray__stored_file_free(dray__stored_file *file);

/* Returns 1, with the shard's number and the count of shards, for
 * "model-00002-of-00005.safetensors" (with any word for "model"); else 0. */
int dray__safetensors_is_shard(const char *name, unsigned *number, unsigned *count);
