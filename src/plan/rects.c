#include "plan/rects.h"

#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

dray__box dray__box_of(const dray_block *block)
{
    dray__box box;
    memcpy(box.start, block->start, sizeof box.start);
    memcpy(box.extent, block->extent, sizeof box.extent);
    return box;
}

bool dray__box_intersect(const dray__box *a, const dray__box *b, dray__box *out)
{
    for (int d = 0; d < DRAY_MAX_DIMS; d++) {
        int64_t start = a->start[d] > b->start[d] ? a->start[d] : b->start[d];
        int64_t end_a = a->start[d] + a->extent[d], end_b = b->start[d] + b->extent[d];
        int64_t end = end_a < end_b ? end_a : end_b;
        if (start >= end)
            return false;
        out->start[d] = start;
        out->extent[d] = end - start;
    }
    return true;
}

uint64_t dray__box_volume(const dray__box *box)
{
    uint64_t volume = 1;
    for (int d = 0; d < DRAY_MAX_DIMS; d++)
        volume *= (uint64_t)box->extent[d];
    return volume;
}

char *dray__box_text(const dray__box *box, uint32_t ndim, char *out)
{
    size_t at = (size_t)snprintf(out, DRAY__BOX_TEXT, "[");
    for (uint32_t d = 0; d < ndim; d++)
        at += (size_t)snprintf(out + at, DRAY__BOX_TEXT - at, "%s%" PRId64 ":%" PRId64,
                               d ? ", " : "", box->start[d], box->start[d] + box->extent[d]);
    snprintf(out + at, DRAY__BOX_TEXT - at, "]");
    return out;
}

bool dray__boxes_add(dray__boxes *boxes, const dray__box *box)
{
    if (boxes->count == boxes->capacity) {
        size_t capacity = boxes->capacity ? boxes->capacity * 2 : 16;
        dray__box *items = realloc(boxes->items, capacity * sizeof *items);
        if (!items)
            return false;
        boxes->items = items;
        boxes->capacity = capacity;
    }
    boxes->items[boxes->count++] = *box;
    return true;
}

bool dray__boxes_add_rest(dray__boxes *boxes, const dray__box *whole, const dray__box *part)
{
    dray__box rest = *whole; /* shrinks to `part` as slabs are cut off, the outermost first */
    for (int d = 0; d < DRAY_MAX_DIMS; d++) {
        int64_t before = part->start[d] - rest.start[d];
        int64_t after = rest.extent[d] - before - part->extent[d];
        dray__box slab = rest;
        slab.extent[d] = before;
        if (before > 0 && !dray__boxes_add(boxes, &slab))
            return false;
        slab.start[d] = part->start[d] + part->extent[d];
        slab.extent[d] = after;
        if (after > 0 && !dray__boxes_add(boxes, &slab))
            return false;
        rest.start[d] = part->start[d];
        rest.extent[d] = part->extent[d];
    }
    return true;
}

void dray__boxes_free(dray__boxes *boxes)
{
    free(boxes->items);
    *boxes = (dray__boxes){0};
}
