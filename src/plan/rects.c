#include "plan/rects.h"

#include "base/array.h"

#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

dray__rect dray__block_rect(const dray_block *block)
{
    dray__rect box;
    memcpy(box.start, block->start, sizeof box.start);
    memcpy(box.extent, block->extent, sizeof box.extent);
    return box;
}

bool dray__rect_cross(const dray__rect *a, const dray__rect *b, dray__rect *out)
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

uint64_t dray__rect_elements(const dray__rect *box)
{
    uint64_t volume = 1;
    for (int d = 0; d < DRAY_MAX_DIMS; d++)
        volume *= (uint64_t)box->extent[d];
    return volume;
}

char *dray__rect_text(const dray__rect *box, uint32_t ndim, char *out)
{
    size_t at = (size_t)snprintf(out, DRAY__RECT_TEXT, "[");
    for (uint32_t d = 0; d < ndim; d++)
        at += (size_t)snprintf(out + at, DRAY__RECT_TEXT - at, "%s%" PRId64 ":%" PRId64,
                               d ? ", " : "", box->start[d], box->start[d] + box->extent[d]);
    snprintf(out + at, DRAY__RECT_TEXT - at, "]");
    return out;
}

bool dray__rects_add(dray__rects *boxes, const dray__rect *box)
{
    return DRAY__PUSH(boxes->items, boxes->count, boxes->capacity, *box);
}

uint32_t dray__rect_rest(const dray__rect *whole, const dray__rect *part,
                         dray__rect out[DRAY__RECT_SIDES])
{
    dray__rect rest = *whole; /* shrinks to `part` as slabs are cut off, the outermost first */
    uint32_t count = 0;
    for (int d = 0; d < DRAY_MAX_DIMS; d++) {
        int64_t before = part->start[d] - rest.start[d];
        int64_t after = rest.extent[d] - before - part->extent[d];
        dray__rect slab = rest;
        slab.extent[d] = before;
        if (before > 0)
            out[count++] = slab;
        slab.start[d] = part->start[d] + part->extent[d];
        slab.extent[d] = after;
        if (after > 0)
            out[count++] = slab;
        rest.start[d] = part->start[d];
        rest.extent[d] = part->extent[d];
    }
    return count;
}

bool dray__rects_add_rest(dray__rects *boxes, const dray__rect *whole, const dray__rect *part)
{
    if (!dray__array_room(&boxes->items, sizeof *boxes->items, boxes->count + DRAY__RECT_SIDES,
                          &boxes->capacity))
        return false;
    boxes->count += dray__rect_rest(whole, part, boxes->items + boxes->count);
    return true;
}

bool dray__rects_take(dray__rects *boxes, const dray__rect *taken)
{
    bool kept = true;
    for (size_t i = 0, end = boxes->count; i < end && kept;) {
        dray__rect box = boxes->items[i], part;
        if (!dray__rect_cross(&box, taken, &part)) {
            i++;
            continue;
        }
        boxes->items[i] = boxes->items[--end];
        boxes->items[end] = boxes->items[--boxes->count];
        kept = dray__rects_add_rest(boxes, &box, &part);
    }
    return kept;
}

void dray__rects_free(dray__rects *boxes)
{
    free(boxes->items);
    *boxes = (dray__rects){0};
}
