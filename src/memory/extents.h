/* The used parts of a range: disjoint extents, sorted by offset. Made for a few thousand of
 * them. */
#pragma once

#include <dray/dray.h>
#include <stdbool.h>

typedef struct dray__extents {
    struct dray__extent {
        uint64_t offset, bytes;
    } * list;
    uint32_t count;
    uint64_t capacity;
} dray__extents;

/* Takes `bytes` (a multiple of the alignment that offsets shall have) in the smallest gap with room
 * in a range of `total`. Returns false when there is no room; *offset is UINT64_MAX when there is
 * no memory for the list. */
bool dray__extents_take(dray__extents *e, uint64_t total, uint64_t bytes, uint64_t *offset);
/* Gives back the extent that begins at this offset. Returns its bytes, or 0 when there is none. */
uint64_t dray__extents_give(dray__extents *e, uint64_t offset);
uint64_t dray__extents_bytes(const dray__extents *e);
/* Returns false when out of memory. */
bool dray__extents_copy(dray__extents *to, const dray__extents *from);
void dray__extents_free(dray__extents *e);
