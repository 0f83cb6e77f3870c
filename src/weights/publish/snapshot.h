/* The copy that a publisher with a snapshot fills at each publish, and that its readers read.
 * Blocks in a GPU's memory are copied within that memory, by one compiled job for each GPU; all
 * others are copied to shared memory. */
#pragma once

#include "weights/publish/publisher.h"

/* Gives the publisher a copy of `layout`, whose regions are regions of its own, and keeps the
 * caller's `regions` as their origin. The packed layout is appended to `packed`. Fails with
 * DRAY_ENOMEM where a GPU or this host has no room for a second copy. */
int dray__snapshot_open(dray_publisher *p, const dray_layout *layout, dray_region *const *regions,
                        dray__writer *packed, dray_error *error);
/* Allocates the copy's regions, which dray__snapshot_free_regions had freed. */
int dray__snapshot_make_regions(dray_publisher *p, dray_error *error);
void dray__snapshot_free_regions(dray_publisher *p);
/* Makes these regions the origin of later copies. Fails with DRAY_EINVALID, and changes nothing,
 * when one is smaller than the layout requires. */
int dray__snapshot_move(dray_publisher *p, dray_region *const *regions, dray_error *error);
/* Waits until no reader uses the last published version, then fills the copy. */
int dray__snapshot_take(dray_publisher *p, int64_t deadline_ns, dray_error *error);
/* Frees the snapshot. Does nothing when the publisher has none. */
void dray__snapshot_close(dray_publisher *p);
