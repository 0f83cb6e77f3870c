/* GPUs find the changes of a publisher's blocks in GPU memory (delta.h has the format). The bits
 * published last are kept in GPU memory, too. Entries are written to the store, which is pinned
 * host memory, so that readers on GPUs, on the host and on other hosts share it. */
#pragma once

#include "weights/delta/delta.h"

typedef struct dray__delta_gpu dray__delta_gpu;

/* Returns true when the block is in GPU memory. */
bool dray__delta_by_gpu(const dray_layout *layout, dray_region *const *regions, uint32_t block);
/* Returns the most bytes that the entries of such blocks take; 0 when there are no such blocks. */
uint64_t dray__delta_gpu_room(const dray_layout *layout, dray_region *const *regions,
                              int32_t dtype);
/* table: offset of the first slot in the store; first: the first slice of each block; begin: offset
 * of entries. All arguments are borrowed until free. Fails with DRAY_EUNSUPPORTED when blocks are
 * on several GPUs. */
int dray__delta_gpu_new(const dray_layout *layout, dray_region *const *regions, int32_t dtype,
                        dray_region *store, uint64_t table, const uint64_t *first, uint64_t begin,
                        dray__delta_gpu **out, dray_error *error);
/* Finds the changes since the last call, and waits for the GPU. *used: bytes of entries. Returns
 * DRAY_ETIMEDOUT after the deadline. */
int dray__delta_gpu_find(dray__delta_gpu *gpu, int64_t deadline_ns, uint64_t *used,
                         dray_error *error);
void dray__delta_gpu_free(dray__delta_gpu *gpu); /* NULL is fine */
