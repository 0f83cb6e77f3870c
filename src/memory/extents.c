#include "memory/extents.h"

#include "base/arena.h"

#include <stdlib.h>
#include <string.h>

static bool insert(dray__extents *e, uint32_t at, uint64_t offset, uint64_t bytes)
{
    if (!dray__append(&e->list, sizeof *e->list, e->count, &e->capacity))
        return false;
    memmove(e->list + at + 1, e->list + at, (e->count - at) * sizeof *e->list);
    e->list[at] = (struct dray__extent){offset, bytes};
    e->count++;
    return true;
}

bool dray__extents_take(dray__extents *e, uint64_t total, uint64_t bytes, uint64_t *offset)
{
    uint64_t from = 0, best = UINT64_MAX;
    uint32_t at = 0;
    for (uint32_t i = 0; i <= e->count; i++) {
        uint64_t to = i < e->count ? e->list[i].offset : total;
        if (to - from >= bytes && to - from < best) {
            best = to - from;
            *offset = from;
            at = i;
        }
        if (i < e->count)
            from = to + e->list[i].bytes;
    }
    if (best == UINT64_MAX)
        return false;
    if (insert(e, at, *offset, bytes))
        return true;
    *offset = UINT64_MAX;
    return false;
}

uint64_t dray__extents_give(dray__extents *e, uint64_t offset)
{
    uint32_t low = 0, high = e->count;
    while (low < high) {
        uint32_t middle = low + (high - low) / 2;
        if (e->list[middle].offset < offset)
            low = middle + 1;
        else
            high = middle;
    }
    if (low == e->count || e->list[low].offset != offset)
        return 0;
    uint64_t bytes = e->list[low].bytes;
    e->count--;
    memmove(e->list + low, e->list + low + 1, (e->count - low) * sizeof *e->list);
    return bytes;
}

uint64_t dray__extents_bytes(const dray__extents *e)
{
    uint64_t bytes = 0;
    for (uint32_t i = 0; i < e->count; i++)
        bytes += e->list[i].bytes;
    return bytes;
}

bool dray__extents_copy(dray__extents *to, const dray__extents *from)
{
    dray__extents copy = {0};
    if (from->count) {
        copy.list = malloc(from->count * sizeof *copy.list);
        if (!copy.list)
            return false;
        memcpy(copy.list, from->list, from->count * sizeof *copy.list);
        copy.capacity = copy.count = from->count;
    }
    dray__extents_free(to);
    *to = copy;
    return true;
}

void dray__extents_free(dray__extents *e)
{
    free(e->list);
    *e = (dray__extents){0};
}
