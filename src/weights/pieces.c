/* Ownership: an element that several members (or several blocks) hold counts once, for the first of
 * them in rank order, then block order. Every member derives this from the layouts alone. */
#include "base/array.h"
#include "base/error.h"
#include "base/hash.h"
#include "weights/internal.h"

#include <stdlib.h>

dray__rect dray__rect_of(const dray_layout *layout, uint32_t index)
{
    return dray__block_rect(dray_layout_block(layout, index));
}

static bool push(dray__pieces *pieces, const dray__rect *rect, uint32_t block, bool owned)
{
    return DRAY__PUSH(pieces->items, pieces->count, pieces->capacity,
                      (dray__piece){*rect, block, owned});
}

/* Cuts the owned pieces from `from` on: the parts inside `taken` are no longer owned. */
static bool subtract(dray__pieces *pieces, uint32_t from, const dray__rect *taken)
{
    uint32_t end = pieces->count; /* new pieces do not overlap `taken` */
    for (uint32_t i = from; i < end; i++) {
        dray__rect cross;
        if (!pieces->items[i].owned || !dray__rect_cross(&pieces->items[i].rect, taken, &cross))
            continue;
        dray__rect sides[DRAY__RECT_SIDES];
        uint32_t block = pieces->items[i].block;
        uint32_t count = dray__rect_rest(&pieces->items[i].rect, &cross, sides);
        for (uint32_t k = 0; k < count; k++)
            if (!push(pieces, &sides[k], block, true))
                return false;
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
struct held_block {
    uint32_t member, block;
};

struct index {
    dray__map ids;
    uint32_t *first; /* of each id in `held` */
    struct held_block *held;
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
                    index->held[index->first[id + 1]++] = (struct held_block){m, b};
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
            struct held_block held = index->held[i];
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
