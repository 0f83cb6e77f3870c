/* Sums of what a publisher holds in memory that GPUs reach, taken by the GPUs: compiled once,
 * replayed before every publish. */
#pragma once

#include "memory/cuda_library.h"
#include "weights/internal.h"

#include <stdatomic.h>

typedef struct dray__source_sums dray__source_sums;

/* Is the region's memory summed by a GPU? */
bool dray__sums_by_gpu(const dray_region *region);
/* Of the owned pieces in such regions; the others are left out. The regions are borrowed until
 * free. *out NULL: there is nothing of that kind. */
int dray__source_sums_new(const dray_layout *layout, dray_region *const *regions,
                          const dray__pieces *pieces, dray__source_sums **out, dray_error *error);
/* For how long somebody waits for sums. */
typedef struct dray__patience {
    int64_t deadline_ns;
    atomic_bool ended; /* by another thread: the sums are not wanted any more */
} dray__patience;
/* DRAY_ETIMEDOUT, DRAY_ECANCELED: it has come to its end. */
int dray__patience_ends(dray__patience *patience, dray_error *error);
/* Puts them into streams of the GPUs' own, of what is there once `ready` (NULL: now) has come. Does
 * not wait for the GPUs, but for sums that somebody gave up on. */
int dray__source_sums_start(dray__source_sums *sums, CUevent ready, dray__patience *patience,
                            dray_error *error);
/* Waits for the GPUs, and adds the sums by tensor name. */
int dray__source_sums_finish(dray__source_sums *sums, dray__patience *patience, dray__sums *out,
                             dray_error *error);
/* Nobody waits for what was started. */
void dray__source_sums_abort(dray__source_sums *sums);
/* checksums.c: the owned pieces' sums by tensor name. gpus: started; NULL: there are none. */
int dray__sum_started(const dray_layout *layout, dray_region *const *regions,
                      const dray__pieces *pieces, dray__source_sums *gpus, dray__patience *patience,
                      dray__sums *out, dray_error *error);
void dray__source_sums_free(dray__source_sums *sums); /* NULL is fine */
