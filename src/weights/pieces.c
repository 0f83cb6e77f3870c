/* Ownership: an element that several members (or several blocks) hold counts once, for the first of
 * them in rank order, then block order. Every member derives this from the layouts alone. */
#include "base/error.h"
#include "base/hash.h"
#include "weights/internal.h"

#include <stdlib.h>
#include <string.h>

dray__rect dray__rect_of(const dray_layout *layout, uint32_t index)
{
    const dray_block *block = dray_layout_block(layout, index);
    uint32_t ndim = dray_layout_tensor(layout, block->tensor)->ndim;
    dray__rect rect;
    for (uint32_t d = 0; d < DRAY_MAX_DIMS; d++) {
        rect.start[d] = d < ndim ? block->start[d] : 0;
        rect.extent[d] = d < ndim ? block->extent[d] : 1;
    }
    return rect;
}

uint64_t dray__rect_elements(const dray__rect *rect)
{
    uint64_t elements = 1;
    for (uint32_t d = 0; d < DRAY_MAX_DIMS; d++)
        elements *= (uint64_t)rect->extent[d];
    return elements;
}

bool dray__rect_cross(const dray__rect *a, const dray__rect *b, dray__rect *out)
{
    for (uint32_t d = 0; d < DRAY_MAX_DIMS; d++) {
        int64_t start = a->start[d] > b->start[d] ? a->start[d] : b->start[d];
        int64_t a_end = a->start[d] + a->extent[d], b_end = b->start[d] + b->extent[d];
        int64_t end = a_end < b_end ? a_end : b_end;
        if (end <= start)
            return false;
        out->start[d] = start;
        out->extent[d] = end - start;
    }
    return true;
}

static bool push(dray__pieces *pieces, const dray__rect *rect, uint32_t block, bool owned)
{
    if (pieces->count == pieces->capacity) {
        uint32_t capacity = pieces->capacity ? pieces->capacity * 2 : 64;
        dray__piece *items = realloc(pieces->items, capacity * sizeof *items);
        if (!items)
            return false;
        pieces->items = items;
        pieces->capacity = capacity;
    }
    pieces->items[pieces->count++] = (dray__piece){*rect, block, owned};
    return true;
}

/* Cuts the owned pieces from `from` on: what crosses `taken` is no longer owned. */
static bool subtract(dray__pieces *pieces, uint32_t from, const dray__rect *taken)
{
    uint32_t end = pieces->count; /* new pieces do not cross it */
    for (uint32_t i = from; i < end; i++) {
        dray__rect cross;
        if (!pieces->items[i].owned || !dray__rect_cross(&pieces->items[i].rect, taken, &cross))
            continue;
        dray__rect rest = pieces->items[i].rect;
        uint32_t block = pieces->items[i].block;
        for (uint32_t d = 0; d < DRAY_MAX_DIMS; d++) {
            dray__rect side = rest;
            int64_t end_rest = rest.start[d] + rest.extent[d];
            int64_t end_cross = cross.start[d] + cross.extent[d];
            side.extent[d] = cross.start[d] - rest.start[d];
            if (side.extent[d] > 0 && !push(pieces, &side, block, true))
                return false;
            side.start[d] = end_cross;
            side.extent[d] = end_rest - end_cross;
            if (side.extent[d] > 0 && !push(pieces, &side, block, true))
                return false;
            rest.start[d] = cross.start[d];
            rest.extent[d] = cross.extent[d];
        }
        pieces->items[i].rect = cross;
        pieces->items[i].owned = false;
    }
    return true;
}

static const char *name_of(const dray__holder *holder, uint32_t tensor)
{
    return holder->names ? holder->names[tensor] : dray_layout_tensor(holder->layout, tensor)->name;
}

/* The blocks of all members up to self, sorted by tensor (counting sort: members and blocks stay in
 * order), for the tensors that self has. */
struct held {
    uint32_t member, block;
};

struct index {
    dray__map ids;
    uint32_t *first; /* of each id in `held` */
    struct held *held;
};

static void index_free(struct index *index)
{
    dray__map_free(&index->ids);
    free(index->first);
    free(index->held);
}

static bool index_make(const dray__holder *members, uint32_t self, struct index *index)
{
    const dray_layout *own = members[self].layout;
    uint32_t ids = 0;
    for (uint32_t t = 0; t < dray_layout_tensor_count(own); t++) {
        uint32_t id;
        if (!dray__map_get(&index->ids, name_of(&members[self], t), &id) &&
            !dray__map_set(&index->ids, name_of(&members[self], t), ids++))
            return false;
    }
    index->first = calloc((size_t)ids + 2, sizeof *index->first);
    if (!index->first)
        return false;
    for (int pass = 0; pass < 2; pass++) {
        for (uint32_t m = 0; m <= self; m++)
            for (uint32_t b = 0; b < dray_layout_block_count(members[m].layout); b++) {
                uint32_t id, tensor = dray_layout_block(members[m].layout, b)->tensor;
                if (!dray__map_get(&index->ids, name_of(&members[m], tensor), &id))
                    continue;
                if (pass == 0)
                    index->first[id + 2]++;
                else
                    index->held[index->first[id + 1]++] = (struct held){m, b};
            }
        if (pass == 1)
            break;
        for (uint32_t id = 0; id < ids; id++)
            index->first[id + 2] += index->first[id + 1];
        index->held = calloc((size_t)index->first[ids + 1] + 1, sizeof *index->held);
        if (!index->held)
            return false;
    }
    return true;
}

static bool cut(const dray__holder *members, uint32_t self, const struct index *index,
                dray__pieces *out)
{
    const dray_layout *own = members[self].layout;
    uint32_t blocks = dray_layout_block_count(own);
    out->first = calloc((size_t)blocks + 1, sizeof *out->first);
    if (!out->first)
        return false;
    for (uint32_t b = 0; b < blocks; b++) {
        uint32_t id = 0, from = out->count;
        out->first[b] = from;
        dray__rect rect = dray__rect_of(own, b);
        if (!push(out, &rect, b, true))
            return false;
        dray__map_get(&index->ids, name_of(&members[self], dray_layout_block(own, b)->tensor), &id);
        for (uint32_t i = index->first[id]; i < index->first[id + 1]; i++) {
            struct held held = index->held[i];
            if (held.member == self && held.block >= b)
                break;
            dray__rect other = dray__rect_of(members[held.member].layout, held.block), cross;
            if (dray__rect_cross(&rect, &other, &cross) && !subtract(out, from, &other))
                return false;
        }
    }
    out->first[blocks] = out->count;
    return true;
}

int dray__pieces_make(const dray__holder *members, uint32_t self, dray__pieces *out,
                      dray_error *error)
{
    struct index index = {0};
    dray__pieces pieces = {0};
    bool made = index_make(members, self, &index) && cut(members, self, &index, &pieces);
    index_free(&index);
    if (!made) {
        dray__pieces_free(&pieces);
        return dray__nomem(error);
    }
    *out = pieces;
    return DRAY_OK;
}

void dray__pieces_free(dray__pieces *pieces)
{
    free(pieces->items);
    free(pieces->first);
    *pieces = (dray__pieces){0};
}
