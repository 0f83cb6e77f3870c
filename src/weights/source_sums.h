/* Sums of a publisher's memory that GPUs reach, computed by the GPUs. The jobs are compiled once
 * and run at every publish. */
#pragma once

#include "memory/cuda_library.h"
#include "weights/internal.h"

#include <stdatomic.h>

typedef struct dray__source_sums dray__source_sums;

/* Returns true when a GPU sums the region's memory. */
bool dray__sums_by_gpu(const dray_region *region);
/* Makes the jobs for the owned pieces in such regions; other pieces are left out. The regions are
 * borrowed until dray__source_sums_free. *out is NULL when there are no such pieces. */
int dray__source_sums_new(const dray_layout *layout, dray_region *const *regions,
                          const dray__pieces *pieces, dray__source_sums **out, dray_error *error);
/* The time for which a caller waits for sums. */
typedef struct dray__patience {
    int64_t deadline_ns;
    atomic_bool ended; /* set by another thread when the sums are not needed any more */
} dray__patience;
/* Fails with DRAY_ETIMEDOUT after the deadline, and with DRAY_ECANCELED when it was ended. */
int dray__patience_ends(dray__patience *patience, dray_error *error);
/* Starts the jobs on streams of their own, after the event `ready` (NULL: at once). Does not wait
 * for the GPUs, except for earlier jobs that were aborted. */
int dray__source_sums_start(dray__source_sums *sums, CUevent ready, dray__patience *patience,
                            dray_error *error);
/* Waits for the GPUs, and adds the sums by tensor name. */
int dray__source_sums_finish(dray__source_sums *sums, dray__patience *patience, dray__sums *out,
                             dray_error *error);
/* Aborts the jobs that were started. They may read their memory for a moment longer. */
void dray__source_sums_abort(dray__source_sums *sums);
/* Aborts the jobs and waits for their end. Returns whether none of them reads memory any more. */
bool dray__source_sums_end(dray__source_sums *sums, int64_t deadline_ns);
/* checksums.c: returns the owned pieces' sums by tensor name. gpus are the jobs that were started,
 * or NULL. */
int dray__sum_started(const dray_layout *layout, dray_region *const *regions,
                      const dray__pieces *pieces, dray__source_sums *gpus, dray__patience *patience,
                      dray__sums *out, dray_error *error);
void dray__source_sums_free(dray__source_sums *sums); /* NULL is fine */
