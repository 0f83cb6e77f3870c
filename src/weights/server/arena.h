/* A staging arena: bounded shared memory through which readers on the same host get the weights
 * that a publisher keeps in private memory or in files. The arena is exported once. The data server
 * fills a slot and names it in its answer. The slot is free again when the reader says that it has
 * copied the data, when the reader's connection ends, or when the reader has had it too long. */
#pragma once

#include "base/clock.h"
#include "weights/server/pull.h"

#include <stdbool.h>

#define DRAY__ARENA_MIN ((uint64_t)128 << 10)
#define DRAY__ARENA_MAX ((uint64_t)1 << 30)
enum {
    DRAY__ARENA_SLOT_MAX = 512 << 10,
    DRAY__ARENA_HELD = 2 /* the slots of one reader: one is being filled, one copied out */
};
/* A reader may use a slot for this long, counted from its request. The server fills the slot again
 * only after the longer time DRAY__ARENA_RECLAIM_NS. */
#define DRAY__ARENA_LEASE_NS (20 * DRAY__SECOND)
#define DRAY__ARENA_RECLAIM_NS (30 * DRAY__SECOND)

typedef struct dray__staging dray__staging;

/* Makes an arena of `bytes` bytes, divided into slots. */
int dray__arena_new(uint64_t bytes, dray__staging **out, dray_error *error);
/* Releases the publisher's hold on the arena. It is freed when no slot is taken any more. NULL is
 * fine. */
void dray__arena_release(dray__staging *arena);
dray_region *dray__arena_region(const dray__staging *arena); /* the region of the whole arena */
uint64_t dray__arena_slot_bytes(const dray__staging *arena);
/* Takes a free slot, as a region of its own. *at is its offset in the arena. NULL when no slot is
 * free. Threads: any. */
dray_region *dray__arena_take(dray__staging *arena, uint64_t *at);
bool dray__arena_has_free(dray__staging *arena);
void dray__arena_give(dray__staging *arena, dray_region *slot);
