/* What changed in a publisher's blocks that lie in GPU memory, found by the GPU (delta.h has the
 * format): the bits published last are kept there, too, and entries go into the store, which is
 * pinned host memory, so that readers on GPUs, on the host and on other hosts have the same one. */
#pragma once

#include "weights/delta/delta.h"

typedef struct dray__delta_gpu dray__delta_gpu;

/* Is the block's memory a GPU's alone? */
bool dray__delta_by_gpu(const dray_layout *layout, dray_region *const *regions, uint32_t block);
/* Bytes that the entries of such blocks may take; 0: there are none. */
uint64_t dray__delta_gpu_room(const dray_layout *layout, dray_region *const *regions,
                              int32_t dtype);
/* table: offset of the first slot within the store; first: of each block, its first slice; begin:
 * where entries go. All is borrowed until free. DRAY_EUNSUPPORTED: blocks on several GPUs. */
int dray__delta_gpu_new(const dray_layout *layout, dray_region *const *regions, int32_t dtype,
                        dray_region *store, uint64_t table, const uint64_t *first, uint64_t begin,
                        dray__delta_gpu **out, dray_error *error);
/* Finds what changed since the last time, and waits for it; *used: bytes of entries. */
int dray__delta_gpu_find(dray__delta_gpu *gpu, uint64_t *used, dray_error *error);
void dray__delta_gpu_free(dray__delta_gpu *gpu); /* NULL is fine */
