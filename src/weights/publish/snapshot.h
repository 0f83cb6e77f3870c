/* The copy that a publisher with a snapshot fills at each publish, and that its readers read. What
 * lies in a GPU's memory is copied within that memory, by one compiled job a GPU; all else is
 * copied into shared memory. */
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
/* The copy is made of these regions from now on. Fails with DRAY_EINVALID, and changes nothing,
 * where one is smaller than the layout says. */
int dray__snapshot_move(dray_publisher *p, dray_region *const *regions, dray_error *error);
/* Waits until nobody reads the last published version, then fills the copy. */
int dray__snapshot_take(dray_publisher *p, int64_t deadline_ns, dray_error *error);
/* Frees all of it. Does nothing where the publisher has no snapshot. */
void dray__snapshot_close(dray_publisher *p);
