/* Writes blocks in memory to the files of a checkpoint: in the order of the files, through a
 * staging buffer, with direct I/O, many ranges at once (mover/disk.h). */
#pragma once

#include "weights/internal.h"

#include <dray/plan.h>

/* Carries out those copies of the plan into `files` that read source member `self`, whose regions
 * are memory. files' regions are open for writing. Adds the checksums of the written bytes to
 * `sums` (by tensor). Does not sync. Blocks. */
int dray__deposit(const dray_plan *plan, uint32_t self, dray_region *const *regions,
                  const dray_layout *files, dray_region *const *opened, dray__sums *sums,
                  dray_error *error);

/* ---- checkpoint.c */
/* Lays out the files, with room for the sums of their tensors. */
int dray__checkpoint_begin(const char *directory, const dray_layout *layout, dray_layout **files,
                           dray_error *error);
/* Writes and syncs a file beside the tensors. It appears only when it is complete. */
int dray__checkpoint_file(const char *directory, const char *name, const void *data, size_t size,
                          dray_error *error);
