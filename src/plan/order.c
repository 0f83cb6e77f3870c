/* The last steps of a plan: joins adjacent copies, and sorts all in the order of the source. */
#include "base/error.h"
#include "plan/planner.h"

#include <stdlib.h>

/* Returns whether a and b are between the same memories, and b continues a along dimension d. */
static bool continues(const dray_copy *a, const dray_copy *b, uint32_t d)
{
    if (a->source != b->source || a->source_region != b->source_region ||
        a->destination_region != b->destination_region || a->source_dtype != b->source_dtype)
        return false;
    for (uint32_t i = 0; i < a->ndim; i++) {
        if (a->source_stride[i] != b->source_stride[i] ||
            a->destination_stride[i] != b->destination_stride[i])
            return false;
        if (i != d && (a->start[i] != b->start[i] || a->extent[i] != b->extent[i]))
            return false;
    }
    return b->start[d] == a->start[d] + a->extent[d] &&
           b->source_offset ==
               a->source_offset + (uint64_t)a->extent[d] * (uint64_t)a->source_stride[d] &&
           b->destination_offset ==
               a->destination_offset + (uint64_t)a->extent[d] * (uint64_t)a->destination_stride[d];
}

/* Compares by source, then by position with dimension d last, so that rectangles that continue each
 * other are adjacent. */
static int compare_along(const void *x, const void *y, void *dimension)
{
    const dray_copy *a = x, *b = y;
    uint32_t last = *(const uint32_t *)dimension;
    if (a->source != b->source)
        return a->source < b->source ? -1 : 1;
    if (a->source_region != b->source_region)
        return a->source_region < b->source_region ? -1 : 1;
    for (uint32_t i = 0; i < a->ndim; i++)
        if (i != last && a->start[i] != b->start[i])
            return a->start[i] < b->start[i] ? -1 : 1;
    return a->start[last] < b->start[last] ? -1 : a->start[last] > b->start[last];
}

static size_t merge_along(dray_copy *copies, size_t count, uint32_t d)
{
    qsort_r(copies, count, sizeof *copies, compare_along, &d);
    size_t kept = 0;
    for (size_t i = 1; i < count; i++) {
        if (continues(&copies[kept], &copies[i], d))
            copies[kept].extent[d] += copies[i].extent[d];
        else
            copies[++kept] = copies[i];
    }
    return kept + 1;
}

void dray__plan_merge(dray__copies *copies, size_t from)
{
    size_t count = copies->count - from;
    if (count < 2)
        return;
    dray_copy *items = copies->items + from;
    for (uint32_t d = items->ndim; d-- > 0;)
        count = merge_along(items, count, d);
    copies->count = from + count;
}

typedef struct copy_place {
    uint32_t source, region;
    uint64_t offset, destination;
    size_t index;
} copy_place;

static int compare_places(const void *x, const void *y)
{
    const copy_place *a = x, *b = y;
    if (a->source != b->source)
        return a->source < b->source ? -1 : 1;
    if (a->region != b->region)
        return a->region < b->region ? -1 : 1;
    if (a->offset != b->offset)
        return a->offset < b->offset ? -1 : 1;
    if (a->destination != b->destination)
        return a->destination < b->destination ? -1 : 1;
    return a->index < b->index ? -1 : a->index > b->index;
}

/* Permutes the items along the cycles of the order, which needs no second list. */
static void put_in_order(dray_copy *items, copy_place *places, size_t count)
{
    for (size_t i = 0; i < count; i++) {
        size_t at = i, from = places[i].index;
        if (from == i)
            continue;
        dray_copy first = items[i];
        for (; from != i; from = places[at].index) {
            items[at] = items[from];
            places[at].index = at;
            at = from;
        }
        items[at] = first;
        places[at].index = at;
    }
}

int dray__plan_sort(dray__copies *copies, dray_error *error)
{
    size_t count = copies->count;
    if (!count)
        return DRAY_OK;
    copy_place *places = malloc(count * sizeof *places);
    if (!places)
        return dray__nomem(error);
    for (size_t i = 0; i < count; i++) {
        const dray_copy *c = &copies->items[i];
        places[i] =
            (copy_place){c->source, c->source_region, c->source_offset, c->destination_offset, i};
    }
    qsort(places, count, sizeof *places, compare_places);
    put_in_order(copies->items, places, count);
    free(places);
    dray_copy *exact = realloc(copies->items, count * sizeof *exact);
    if (exact) {
        copies->items = exact;
        copies->capacity = count;
    }
    return DRAY_OK;
}
