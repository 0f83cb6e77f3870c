/* load.h - the callback for engines that cannot describe their layout. Such an engine gets whole
 * named tensors, bucket by bucket, and cuts out its own part. Since 0.1. */
#ifndef DRAY_LOAD_H
#define DRAY_LOAD_H

#include <dray/model.h>

#ifdef __cplusplus
extern "C" {
#endif

/* One tensor of a bucket, or a slice of its rows. */
typedef struct dray_load_tensor {
    const char *name;
    int32_t dtype;
    uint32_t ndim;
    int64_t shape[DRAY_MAX_DIMS]; /* of the whole tensor */
    int64_t first_row, rows;      /* the rows that are here, along dimension 0; a scalar: 0 and 1 */
    uint64_t start, end;          /* bytes from the bucket's start; dense, in C order */
    uint64_t numel;               /* elements that are here */
} dray_load_tensor;

typedef struct dray_load_bucket {
    size_t size;
    uint64_t version;
    const void *data; /* each tensor is aligned to 64 bytes, and padding between them is undefined;
                         a device address where the options ask for GPU memory */
    uint64_t bytes;
    const dray_load_tensor *tensors;
    uint32_t count;
    uint32_t index, buckets; /* number of this bucket, from 0, and of all buckets of the update */
} dray_load_bucket;

/* The engine's load_weights. The bucket and all that it points to are valid during the call: copies
 * out of it must be complete when it returns. It returns 0, or a DRAY_E... code with which the
 * update fails, and fills *error; the group is then torn, unless it was the first bucket. It must
 * not use the subscriber. */
typedef int (*dray_load_fn)(void *user, const dray_load_bucket *bucket, dray_error *error);

typedef struct dray_load_options {
    size_t size;
    dray_load_fn load;
    void *user;
    uint64_t bucket_bytes; /* most memory that an update holds here, >= 512 KiB; 0 means 64 MiB */
    int32_t slices; /* 1: a tensor that is larger than a bucket comes in slices of rows, in order;
                     * 0: opening fails with DRAY_EFULL, and the message has the tensor's size */
    /* Tensors that must arrive in one call. An entry "a,b" says that tensors whose names are equal
     * but for ".a." and ".b." come together. NULL: "q_a_proj,kv_a_proj_with_mqa", which engines
     * fuse. A list with together_count 0: none. Borrowed for the call. */
    const char *const *together;
    uint32_t together_count;
    /* The memory of buckets. 0: host memory. DRAY_REGION_CUDA: memory of the GPU whose context is
     * current in the thread that updates, else of the first GPU; its content is complete when
     * `load` is called. */
    int32_t memory;
} dray_load_options;

#define DRAY_LOAD_OPTIONS_INIT                                                                     \
    {                                                                                              \
        sizeof(dray_load_options), NULL, NULL, 0, 0, NULL, 0, 0                                    \
    }

#ifdef __cplusplus
}
#endif
#endif
