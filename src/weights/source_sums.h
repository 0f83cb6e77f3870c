/* Sums of what a publisher holds in memory that GPUs reach, taken by the GPUs: compiled once,
 * replayed before every publish. */
#pragma once

#include "memory/cuda_library.h"
#include "weights/internal.h"

typedef struct dray__source_sums dray__source_sums;

/* Is the region's memory summed by a GPU? */
bool dray__sums_by_gpu(const dray_region *region);
/* Of the owned pieces in such regions; the others are left out. The regions are borrowed until
 * free. *out NULL: there is nothing of that kind. */
int dray__source_sums_new(const dray_layout *layout, dray_region *const *regions,
                          const dray__pieces *pieces, dray__source_sums **out, dray_error *error);
/* Adds them by tensor name, of what is there once `ready` (NULL: now) has come. Waits for the GPUs:
 * DRAY_ETIMEDOUT. */
int dray__source_sums_run(dray__source_sums *sums, CUevent ready, int64_t deadline_ns,
                          dray__sums *out, dray_error *error);
/* checksums.c: the owned pieces' sums by tensor name; *gpus: kept from one publish to the next. */
int dray__sum_published(const dray_layout *layout, dray_region *const *regions,
                        const dray__pieces *pieces, dray__source_sums **gpus, CUevent ready,
                        int64_t deadline_ns, dray__sums *out, dray_error *error);
void dray__source_sums_free(dray__source_sums *sums); /* NULL is fine */
