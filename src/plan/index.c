#include "plan/index.h"

#include "base/arena.h"
#include "base/error.h"
#include "model/layout/layout.h"

#include <stdlib.h>
#include <string.h>

#define NONE DRAY__NO_PLACE

/* ---- names ----------------------------------------------------------------------------------- */

/* Is called only for equal hashes, so that most tensors of a large model are never read. */
static bool same_name(const void *names, uint32_t id, const void *tensor)
{
    return strcmp(((const char *const *)names)[id], ((const dray_tensor_info *)tensor)->name) == 0;
}

/* Returns NONE when the name is not there, or, with `add`, when out of memory. */
static uint32_t name_id(dray_plan_index *index, const dray_tensor_info *of, uint64_t hash, bool add)
{
    uint32_t id = dray__index_find(&index->names, hash, same_name, index->name, of);
    if (id != NONE || !add)
        return id;
    const char **name =
        dray__append(&index->name, sizeof *name, index->names.count, &index->name_capacity);
    if (!name || !dray__index_add(&index->names, hash))
        return NONE;
    *name = of->name;
    return index->names.count - 1;
}

static bool add_names_of(dray_plan_index *index, const dray_layout *layout)
{
    const uint64_t *hashes = dray__layout_hashes(layout);
    for (uint32_t t = 0; t < dray_layout_tensor_count(layout); t++)
        if (name_id(index, dray_layout_tensor(layout, t), hashes[t], true) == NONE)
            return false;
    return true;
}

/* Adds the scales of quantised tensors that the index has, because a destination of floats does not
 * name them. */
static bool add_scales_of(dray_plan_index *index, const dray_layout *layout)
{
    const uint64_t *hashes = dray__layout_hashes(layout);
    if (!dray__layout_quantised(layout))
        return true;
    for (uint32_t t = 0; t < dray_layout_tensor_count(layout); t++) {
        const dray_quant *quant = dray_layout_quant(layout, t);
        if (quant && name_id(index, dray_layout_tensor(layout, t), hashes[t], false) != NONE &&
            name_id(index, dray_layout_tensor(layout, quant->scales), hashes[quant->scales],
                    true) == NONE)
            return false;
    }
    return true;
}

/* ---- holders --------------------------------------------------------------------------------- */

/* Returns the ids of the names of all tensors, source after source; NULL when out of memory.
 * Without `all`, a name that the index lacks is NONE. Then only the hash of its name is read, which
 * matters for large models. */
static uint32_t *ids_of(dray_plan_index *index, bool all)
{
    size_t count = 0, at = 0;
    for (uint32_t i = 0; i < index->source_count; i++)
        count += dray_layout_tensor_count(index->sources[i].layout);
    uint32_t *ids = malloc((count + 1) * sizeof *ids);
    bool ok = ids;
    for (uint32_t i = 0; ok && i < index->source_count; i++) {
        const dray_layout *layout = index->sources[i].layout;
        const uint64_t *hashes = dray__layout_hashes(layout);
        for (uint32_t t = 0; ok && t < dray_layout_tensor_count(layout); t++, at++) {
            ids[at] = name_id(index, dray_layout_tensor(layout, t), hashes[t], all);
            ok = ids[at] != NONE || !all;
        }
    }
    if (ok)
        return ids;
    free(ids);
    return NULL;
}

/* Counts the holders of each id in first[id + 2] or, with `put`, stores them at first[id + 1],
 * where the next holder of id goes. An alias is a second name of the tensor that it stands for. */
static void each_holder(dray_plan_index *index, const uint32_t *ids, bool put)
{
    for (uint32_t i = 0; i < index->source_count; i++) {
        const dray_layout *layout = index->sources[i].layout;
        for (uint32_t t = 0; t < dray_layout_tensor_count(layout); t++) {
            uint32_t id = *ids++;
            if (id == NONE)
                continue;
            int32_t alias_of = dray_layout_tensor(layout, t)->alias_of;
            uint32_t holder = alias_of < 0 ? t : (uint32_t)alias_of;
            const dray_block *block = dray__layout_first_block(layout, holder);
            for (; block; block = dray__layout_next_block(layout, block)) {
                size_t at = index->first[id + (put ? 1 : 2)]++;
                if (put)
                    index->holders[at] = (dray__plan_holder){i, holder, block};
            }
        }
    }
}

bool dray__same_box(const dray_block *a, const dray_block *b)
{
    return memcmp(a->start, b->start, sizeof a->start) == 0 &&
           memcmp(a->extent, b->extent, sizeof a->extent) == 0;
}

static int compare_holders(const void *a, const void *b)
{
    const dray__plan_holder *x = a, *y = b;
    for (int d = 0; d < DRAY_MAX_DIMS; d++)
        /* The analyser does not see that the counting sort fills every holder. */
        /* NOLINTNEXTLINE(clang-analyzer-core.NullDereference) */
        if (x->block->start[d] != y->block->start[d])
            return x->block->start[d] < y->block->start[d] ? -1 : 1;
    for (int d = 0; d < DRAY_MAX_DIMS; d++)
        if (x->block->extent[d] != y->block->extent[d])
            return x->block->extent[d] < y->block->extent[d] ? -1 : 1;
    if (x->source != y->source)
        return x->source < y->source ? -1 : 1;
    return x->block < y->block ? -1 : x->block > y->block;
}

static void sort_holders(dray__plan_holder *holders, size_t count)
{
    for (size_t i = 1; i < count; i++)
        if (compare_holders(&holders[i - 1], &holders[i]) > 0) {
            qsort(holders, count, sizeof *holders, compare_holders);
            return;
        }
}

static bool collect(dray_plan_index *index, bool all)
{
    uint32_t *ids = ids_of(index, all), names = index->names.count;
    index->first = calloc((size_t)names + 2, sizeof *index->first);
    if (!ids || !index->first) {
        free(ids);
        return false;
    }
    each_holder(index, ids, false);
    for (uint32_t id = 0; id < names; id++)
        index->first[id + 1] += index->first[id];
    size_t count = index->first[names] + index->first[names + 1];
    index->holders = malloc((count + 1) * sizeof *index->holders);
    if (index->holders)
        each_holder(index, ids, true);
    for (uint32_t id = 0; index->holders && id < names; id++)
        sort_holders(index->holders + index->first[id], index->first[id + 1] - index->first[id]);
    free(ids);
    return index->holders;
}

int dray__plan_index_new(const dray_plan_member *sources, uint32_t count, const dray_layout *only,
                         dray_plan_index **out, dray_error *error)
{
    dray_plan_index *index = calloc(1, sizeof *index);
    if (!index)
        return dray__nomem(error);
    index->sources = sources;
    index->source_count = count;
    for (uint32_t i = 0; i < count; i++)
        index->quants |= dray__layout_quantised(sources[i].layout);
    bool ok = !only || add_names_of(index, only);
    for (uint32_t i = 0; ok && only && i < count; i++)
        ok = add_scales_of(index, sources[i].layout);
    ok = ok && collect(index, !only);
    if (!ok) {
        dray_plan_index_free(index);
        return dray__nomem(error);
    }
    *out = index;
    return DRAY_OK;
}

int dray_plan_index_new(const dray_plan_member *sources, uint32_t count, dray_plan_index **out,
                        dray_error *error)
{
    return dray__plan_index_new(sources, count, NULL, out, error);
}

void dray_plan_index_free(dray_plan_index *index)
{
    if (!index)
        return;
    dray__index_free(&index->names);
    free(index->name);
    free(index->first);
    free(index->holders);
    free(index);
}

size_t dray__plan_holders(const dray_plan_index *index, const char *name,
                          const dray__plan_holder **out)
{
    const dray_tensor_info of = {.name = name};
    uint32_t id =
        dray__index_find(&index->names, dray__name_hash(name), same_name, index->name, &of);
    if (id == NONE)
        return 0;
    *out = index->holders + index->first[id];
    return index->first[id + 1] - index->first[id];
}
