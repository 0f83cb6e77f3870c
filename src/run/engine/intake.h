/* The engine's end of the weights: brings the generator's memory to the version that samples need,
 * at a boundary that the engine chooses. When trainer and engine do not take turns, the next
 * version is prefetched into staging memory during the generation, and put in place at the
 * boundary. */
#pragma once

#include "run/host/host.h"

#include <dray/memory.h>
#include <dray/model.h>

typedef struct dray__intake dray__intake;

/* layout, regions: the generator's; borrowed. */
int dray__intake_open(dray__host *host, const dray_layout *layout, dray_region *const *regions,
                      dray__intake **out, dray_error *error);
void dray__intake_close(dray__intake *intake);
/* Held; -1: none yet. */
int64_t dray__intake_version(const dray__intake *intake);
/* A newer version that came meanwhile, and is in this rank's staging; -1: there is none. */
int64_t dray__intake_ready(dray__intake *intake);
/* Waits until this version, or a newer one, is in this rank's staging, so that taking it is a
 * copy within the machine; does nothing where it cannot be there. */
void dray__intake_fetch(dray__intake *intake, int64_t version);
/* Brings the memory to this version; where the schedule is not exact, to this or a newer one. On
 * all ranks. */
int dray__intake_take(dray__intake *intake, int64_t version, dray_error *error);
/* Begins to fetch the version after the one that is held. */
void dray__intake_go_ahead(dray__intake *intake);
