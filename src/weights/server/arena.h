/* A staging arena: the bounded, shared memory through which a publisher's private or stored weights
 * leave its process for readers on the same host. It is exported once and never the store itself;
 * the data server fills a slot, names it in its answer, and has it back when the reader says that
 * it copied it out, when the reader's connection ends, or when it held it too long.
 *
 * Whatever memory weights wait in, this is where they pass: an arena that is pinned and registered
 * with a GPU is the one from which an engine uploads, slot by slot, while the next is filled. Then
 * dray__arena_new allocates another kind of region, and the reader's lane empties slots with a copy
 * engine instead of a core; requests, slots and their leases stay as they are. */
#pragma once

#include "base/clock.h"
#include "weights/server/pull.h"

#include <stdbool.h>

#define DRAY__ARENA_MIN ((uint64_t)128 << 10)
#define DRAY__ARENA_MAX ((uint64_t)1 << 30)
enum {
    DRAY__ARENA_SLOT_MAX = DRAY__DATA_MAX,
    DRAY__ARENA_HELD = 2 /* slots that one reader may have: one is filled, one copied out */
};
/* A reader that had a slot for longer, counted from before it asked, may not use what is in it: the
 * server waits longer than that until it fills it anew. */
#define DRAY__ARENA_LEASE_NS (20 * DRAY__SECOND)
#define DRAY__ARENA_RECLAIM_NS (30 * DRAY__SECOND)

typedef struct dray__staging dray__staging;

/* Shared memory of `bytes`, in slots. */
int dray__arena_new(uint64_t bytes, dray__staging **out, dray_error *error);
/* The last one frees it: the publisher's, and one for each slot that is taken. NULL is fine. */
void dray__arena_release(dray__staging *arena);
dray_region *dray__arena_region(const dray__staging *arena); /* the arena's */
uint64_t dray__arena_slot_bytes(const dray__staging *arena);
/* A free slot, as a region of its own, and where it lies in the arena's; NULL: none is free. Any
 * thread. */
dray_region *dray__arena_take(dray__staging *arena, uint64_t *at);
bool dray__arena_has_free(dray__staging *arena);
void dray__arena_give(dray__staging *arena, dray_region *slot);
