#include "plan/index.h"

#include "base/arena.h"
#include "base/error.h"
#include "model/layout/layout.h"

#include <stdlib.h>
#include <string.h>

#define NONE DRAY__NO_PLACE

/* ---- names ----------------------------------------------------------------------------------- */

/* Where no hash is the same the tensor is not looked at: of most of a large model's it would be the
 * only look. */
static bool same_name(const void *names, uint32_t id, const void *tensor)
{
    return strcmp(((const char *const *)names)[id], ((const dray_tensor_info *)tensor)->name) == 0;
}

/* NONE: not there, or, with `add`, out of memory. */
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

/* The scales of quantised tensors that are known by now: a destination of floats does not name
 * them. */
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

/* A holder with its name, in the order of reading. */
typedef struct found {
    uint32_t name;
    dray__plan_holder holder;
} found;

typedef struct scan {
    dray_plan_index *index;
    found *found;
    size_t found_count, found_capacity;
} scan;

static found *next_found(scan *s)
{
    if (!dray__append(&s->found, sizeof *s->found, s->found_count, &s->found_capacity))
        return NULL;
    return &s->found[s->found_count++];
}

/* An alias is a second name of the tensor that it stands for. Of a tensor that nobody asks for no
 * more is looked at than the hash of its name: a rank of a large model has thousands. */
static bool scan_source(scan *s, uint32_t source)
{
    const dray_layout *layout = s->index->sources[source].layout;
    const uint64_t *hashes = dray__layout_hashes(layout);
    for (uint32_t t = 0; t < dray_layout_tensor_count(layout); t++) {
        const dray_tensor_info *info = dray_layout_tensor(layout, t);
        uint32_t id = name_id(s->index, info, hashes[t], false);
        if (id == NONE)
            continue;
        uint32_t holder = info->alias_of < 0 ? t : (uint32_t)info->alias_of;
        const dray_block *block = dray__layout_first_block(layout, holder);
        for (; block; block = dray__layout_next_block(layout, block)) {
            found *one = next_found(s);
            if (!one)
                return false;
            *one = (found){id, {source, holder, block}};
        }
    }
    return true;
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

static bool collect(scan *s)
{
    dray_plan_index *index = s->index;
    for (uint32_t i = 0; i < index->source_count; i++)
        if (!scan_source(s, i))
            return false;
    index->first = calloc((size_t)index->names.count + 2, sizeof *index->first);
    index->holders = malloc((s->found_count ? s->found_count : 1) * sizeof *index->holders);
    if (!index->first || !index->holders)
        return false;
    /* Counting sort: first[id + 1] is where the next holder of id goes, and, at the end, where
     * those of id + 1 begin. */
    for (size_t i = 0; i < s->found_count; i++)
        index->first[s->found[i].name + 2]++;
    for (uint32_t id = 0; id < index->names.count; id++)
        index->first[id + 1] += index->first[id];
    for (size_t i = 0; i < s->found_count; i++)
        index->holders[index->first[s->found[i].name + 1]++] = s->found[i].holder;
    for (uint32_t id = 0; s->found_count && id < index->names.count; id++)
        sort_holders(index->holders + index->first[id], index->first[id + 1] - index->first[id]);
    return true;
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
    for (uint32_t i = 0; ok && !only && i < count; i++)
        ok = add_names_of(index, sources[i].layout);
    for (uint32_t i = 0; ok && only && i < count; i++)
        ok = add_scales_of(index, sources[i].layout);
    scan s = {.index = index};
    ok = ok && collect(&s);
    free(s.found);
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
