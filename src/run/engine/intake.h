/* The engine's end of the weights: brings the generator's memory to the version that samples need,
 * at a boundary that the engine chooses. When trainer and engine do not take turns, the next
 * version is prefetched into staging memory during the generation, and put in place at the
 * boundary. */
#pragma once

#include "run/host/host.h"

#include <dray/memory.h>
#include <dray/model.h>

typedef struct dray__intake dray__intake;

/* layout and regions are the generator's, and are borrowed. */
int dray__intake_open(dray__host *host, const dray_layout *layout, dray_region *const *regions,
                      dray__intake **out, dray_error *error);
void dray__intake_close(dray__intake *intake);
/* Returns the version in the generator's memory; -1 before the first. */
int64_t dray__intake_version(const dray__intake *intake);
/* Returns the newer version that has been prefetched into this rank's staging memory (in disk mode,
 * the newest one written); -1 when there is none. */
int64_t dray__intake_ready(dray__intake *intake);
/* Waits until this version, or a newer one, is in this rank's staging memory, so that taking it is
 * a copy within the machine. Does nothing when the schedule is exact or no version is held yet. */
void dray__intake_fetch(dray__intake *intake, int64_t version);
/* Brings the generator's memory to this version, or, when the schedule is not exact, to this or a
 * newer one. Called on all ranks. */
int dray__intake_take(dray__intake *intake, int64_t version, dray_error *error);
/* Begins to prefetch the version after the one in the generator's memory. */
void dray__intake_go_ahead(dray__intake *intake);
