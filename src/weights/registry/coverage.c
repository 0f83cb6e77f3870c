#include "weights/registry/coverage.h"

#include "base/arena.h"
#include "base/array.h"
#include "base/error.h"
#include "model/layout/layout.h"
#include "plan/rects.h"

#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

/* The coordinator counts in the thread that serves all requests, so this takes well below a second.
 */
enum { MOST_STEPS = 1 << 27 };

typedef struct box {
    uint32_t item;
    int64_t start[DRAY_MAX_DIMS], extent[DRAY_MAX_DIMS]; /* 0 and 1 beyond the tensor's dims */
} box;

typedef struct builder {
    dray__coverage *out;
    dray__map names; /* each name of a source's tensor -> its item */
    box *boxes;
    uint64_t count, capacity, steps;
} builder;

static void forget_form(dray__coverage_of_form *of)
{
    dray__sums_form_drop(of->form);
    free(of->at);
    *of = (dray__coverage_of_form){0};
}

void dray__coverage_free(dray__coverage *coverage)
{
    for (uint32_t i = 0; i < coverage->count; i++)
        free(coverage->items[i].name);
    free(coverage->items);
    dray__map_free(&coverage->by_name);
    forget_form(&coverage->announced);
    forget_form(&coverage->found);
    free(coverage->pairs);
    *coverage = (dray__coverage){0};
}

/* Gives the item of exactly this name, and adds it if it is new. Returns false when out of memory.
 */
static bool item_of(dray__coverage *c, const char *name, int32_t dtype, uint32_t *index)
{
    if (dray__map_get(&c->by_name, name, index))
        return true;
    dray__covered *new = dray__append(&c->items, sizeof *new, c->count, &c->capacity);
    char *copy = new ? strdup(name) : NULL;
    if (!copy || !dray__map_set(&c->by_name, name, c->count)) {
        free(copy);
        return false;
    }
    *new = (dray__covered){.name = copy, .dtype = dtype};
    *index = c->count++;
    return true;
}

/* Maps a source's name to an item. A name belongs to the first source that uses it. */
static bool name_item(builder *b, const char *name, uint32_t item)
{
    uint32_t other;
    return dray__map_get(&b->names, name, &other) || dray__map_set(&b->names, name, item);
}

static bool push(builder *b, const dray_block *block, uint32_t item)
{
    box *new = dray__append(&b->boxes, sizeof *new, b->count, &b->capacity);
    if (!new)
        return false;
    dray__rect rect = dray__block_rect(block);
    new->item = item;
    memcpy(new->start, rect.start, sizeof new->start);
    memcpy(new->extent, rect.extent, sizeof new->extent);
    b->count++;
    return true;
}

/* ---- elements in at least one of the boxes --------------------------------------------------- */

static int by_start(const void *a, const void *b, void *dimension)
{
    uint32_t d = *(uint32_t *)dimension;
    int64_t x = (*(const box *const *)a)->start[d], y = (*(const box *const *)b)->start[d];
    return x < y ? -1 : x > y;
}

static int count_union(builder *b, const box **list, size_t n, uint32_t d, uint64_t *out,
                       dray_error *error);

/* Cuts dimension d at the edges of all boxes: between two adjacent edges the set of boxes is
 * constant. */
static int count_slabs(builder *b, const box **list, size_t n, uint32_t d, int64_t *edges,
                       const box **open, uint64_t *out, dray_error *error)
{
    for (size_t i = 0; i < n; i++) {
        edges[2 * i] = list[i]->start[d];
        edges[2 * i + 1] = list[i]->start[d] + list[i]->extent[d];
    }
    qsort(edges, 2 * n, sizeof *edges, dray__by_i64);
    qsort_r(list, n, sizeof *list, by_start, &d);
    size_t next = 0, opened = 0;
    *out = 0;
    for (size_t e = 0; e + 1 < 2 * n; e++) {
        if (edges[e] == edges[e + 1])
            continue;
        size_t kept = 0;
        for (size_t i = 0; i < opened; i++)
            if (open[i]->start[d] + open[i]->extent[d] > edges[e])
                open[kept++] = open[i];
        opened = kept;
        for (; next < n && list[next]->start[d] <= edges[e]; next++)
            open[opened++] = list[next];
        uint64_t inside = 0;
        b->steps += opened + 1;
        /* The callee sorts its array, so it gets a copy behind the open ones. */
        memcpy(open + n, open, opened * sizeof *open);
        int rc = count_union(b, open + n, opened, d + 1, &inside, error);
        if (rc)
            return rc;
        *out += inside * (uint64_t)(edges[e + 1] - edges[e]);
    }
    return DRAY_OK;
}

static int count_union(builder *b, const box **list, size_t n, uint32_t d, uint64_t *out,
                       dray_error *error)
{
    if (n <= 1 || d == DRAY_MAX_DIMS) {
        *out = n ? 1 : 0;
        for (; n && d < DRAY_MAX_DIMS; d++)
            *out *= (uint64_t)list[0]->extent[d];
        return DRAY_OK;
    }
    if (b->steps > MOST_STEPS)
        return dray__fail(error, DRAY_EUNSUPPORTED,
                          "tensor %s: its blocks overlap in too many ways to be counted",
                          b->out->items[list[0]->item].name);
    bool same = true;
    for (size_t i = 1; i < n && same; i++)
        same = list[i]->start[d] == list[0]->start[d] && list[i]->extent[d] == list[0]->extent[d];
    b->steps += n;
    if (same) {
        int rc = count_union(b, list, n, d + 1, out, error);
        *out *= (uint64_t)list[0]->extent[d];
        return rc;
    }
    int64_t *edges = calloc(2 * n, sizeof *edges);
    const box **open = calloc(2 * n, sizeof(const box *));
    int rc =
        edges && open ? count_slabs(b, list, n, d, edges, open, out, error) : dray__nomem(error);
    free(edges);
    free(open);
    return rc;
}

static int by_item(const void *a, const void *b)
{
    const box *x = a, *y = b;
    return x->item < y->item ? -1 : x->item > y->item;
}

/* Adds the elements of the boxes to the items, and clears the boxes. */
static int settle(builder *b, bool covered, dray_error *error)
{
    if (b->count)
        qsort(b->boxes, b->count, sizeof *b->boxes, by_item);
    const box **list = calloc(b->count + 1, sizeof(const box *));
    int rc = list ? DRAY_OK : dray__nomem(error);
    for (size_t from = 0, to; from < b->count && rc == DRAY_OK; from = to) {
        for (to = from; to < b->count && b->boxes[to].item == b->boxes[from].item; to++)
            list[to - from] = &b->boxes[to];
        dray__covered *item = &b->out->items[b->boxes[from].item];
        rc = count_union(b, list, to - from, 0, covered ? &item->covered : &item->held, error);
    }
    free(list);
    b->count = 0;
    return rc;
}

/* ---- the two sides --------------------------------------------------------------------------- */

static bool add_source(builder *b, const dray_layout *layout)
{
    for (uint32_t t = 0; t < dray_layout_tensor_count(layout); t++) {
        const dray_tensor_info *tensor = dray_layout_tensor(layout, t), *real = tensor;
        uint32_t item;
        if (tensor->alias_of >= 0)
            real = dray_layout_tensor(layout, (uint32_t)tensor->alias_of);
        if (!item_of(b->out, real->name, real->dtype, &item) || !name_item(b, tensor->name, item))
            return false;
    }
    for (uint32_t i = 0; i < dray_layout_block_count(layout); i++) {
        const dray_block *block = dray_layout_block(layout, i);
        const dray_tensor_info *tensor = dray_layout_tensor(layout, block->tensor);
        uint32_t item;
        if (!item_of(b->out, tensor->name, tensor->dtype, &item) || !push(b, block, item))
            return false;
        b->out->items[item].mixed |= b->out->items[item].dtype != tensor->dtype;
    }
    return true;
}

static const char *find_name(const void *user, const char *name)
{
    const builder *b = user;
    uint32_t item;
    return dray__map_get(&b->names, name, &item) ? b->out->items[item].name : NULL;
}

void dray__names_resolve(const dray_layout *layout, dray__find_name find, const void *user,
                         const char **names)
{
    uint32_t count = dray_layout_tensor_count(layout);
    for (uint32_t t = 0; t < count; t++)
        names[t] = find(user, dray_layout_tensor(layout, t)->name);
    for (uint32_t t = 0; t < count; t++) {
        int32_t target = dray_layout_tensor(layout, t)->alias_of;
        if (target >= 0 && names[t] && !names[target])
            names[target] = names[t];
    }
    for (uint32_t t = 0; t < count; t++)
        if (!names[t])
            names[t] = dray_layout_tensor(layout, t)->name;
}

/* Adds the box of the elements in a block. packed: the elements that its packed ones stand for. */
static bool push_elements(builder *b, const dray_layout *layout, const dray_block *block,
                          bool packed, uint32_t item)
{
    uint32_t tensor;
    int part;
    if (!push(b, block, item))
        return false;
    if (!packed || !dray__layout_part_of(layout, block->tensor, &tensor, &part))
        return true;
    const dray_tensor_info *info = dray_layout_tensor(layout, tensor);
    box *last = &b->boxes[b->count - 1];
    int64_t cell[DRAY_MAX_DIMS];
    dray__quant_part_cell(info, dray_layout_quant(layout, tensor), part, cell);
    for (uint32_t d = 0; d < info->ndim; d++) { /* no overflow: a block is in its tensor */
        int64_t end = last->start[d] + last->extent[d];
        last->start[d] *= cell[d];
        end = end == (info->shape[d] - 1) / cell[d] + 1 ? info->shape[d] : end * cell[d];
        last->extent[d] = end - last->start[d];
    }
    return true;
}

/* Notes the names of one tensor of the rank that are two tensors of the sources. */
static void find_ties(builder *b, const dray_layout *layout)
{
    for (uint32_t t = 0; t < dray_layout_tensor_count(layout); t++) {
        const dray_tensor_info *alias = dray_layout_tensor(layout, t);
        uint32_t other, item;
        if (alias->alias_of < 0 || !dray__layout_first_block(layout, (uint32_t)alias->alias_of))
            continue;
        const char *name = dray_layout_tensor(layout, (uint32_t)alias->alias_of)->name;
        if (!dray__map_get(&b->names, alias->name, &other) ||
            !dray__map_get(&b->names, name, &item) || other == item)
            continue;
        b->out->items[other].tie = item + 1;
        b->out->tied = true;
    }
}

static bool add_rank(builder *b, const dray_layout *layout)
{
    const char **names = calloc((size_t)dray_layout_tensor_count(layout) + 1, sizeof *names);
    if (!names)
        return false;
    dray__names_resolve(layout, find_name, b, names);
    find_ties(b, layout);
    bool added = true;
    for (uint32_t i = 0; i < dray_layout_block_count(layout) && added; i++) {
        const dray_block *block = dray_layout_block(layout, i);
        int32_t dtype = dray_layout_tensor(layout, block->tensor)->dtype;
        uint32_t item;
        uint32_t of = block->tensor;
        int part;
        bool computed = dray__layout_part_of(layout, block->tensor, &of, &part) &&
                        !dray__map_get(&b->names, names[block->tensor], &item);
        if (computed && part != DRAY__PART_VALUES)
            continue; /* elements that no source has are computed, not read */
        added = item_of(b->out, names[computed ? of : block->tensor], dtype, &item) &&
                push_elements(b, layout, block, computed, item);
    }
    free(names);
    return added;
}

static int add_all(builder *b, const dray__packed_layout *packed, uint32_t count,
                   bool (*add)(builder *b, const dray_layout *layout), dray_error *error)
{
    for (uint32_t i = 0; i < count; i++) {
        dray_layout *layout;
        int rc = dray_layout_unpack(packed[i].data, packed[i].size, &layout, error);
        if (rc)
            return rc;
        bool added = add(b, layout);
        dray_layout_free(layout);
        if (!added)
            return dray__nomem(error);
    }
    return DRAY_OK;
}

static int finish(builder *b, const dray__packed_layout *group, uint32_t group_count, int rc,
                  dray__coverage *out, dray_error *error)
{
    if (rc == DRAY_OK)
        rc = add_all(b, group, group_count, add_rank, error);
    if (rc == DRAY_OK)
        rc = settle(b, true, error);
    free(b->boxes);
    dray__map_free(&b->names);
    for (uint32_t i = 0; rc == DRAY_OK && i < b->out->count; i++)
        b->out->partial += !dray__coverage_whole(&b->out->items[i]);
    if (rc)
        dray__coverage_free(b->out);
    else
        *out = *b->out;
    return rc;
}

int dray__coverage_of_layouts(const dray__packed_layout *sources, uint32_t source_count,
                              const dray__packed_layout *group, uint32_t group_count,
                              dray__coverage *out, dray_error *error)
{
    dray__coverage coverage = {0};
    builder b = {.out = &coverage};
    int rc = add_all(&b, sources, source_count, add_source, error);
    if (rc == DRAY_OK)
        rc = settle(&b, false, error);
    return finish(&b, group, group_count, rc, out, error);
}

int dray__coverage_of_sums(const dray__sums *sources, const dray__packed_layout *group,
                           uint32_t group_count, dray__coverage *out, dray_error *error)
{
    dray__coverage coverage = {0};
    builder b = {.out = &coverage};
    const dray__named_sum *sums = dray__sums_items(sources);
    int rc = sums || !sources->count ? DRAY_OK : dray__nomem(error);
    for (uint32_t i = 0; i < sources->count && rc == DRAY_OK; i++) {
        const dray__named_sum *sum = &sums[i];
        uint32_t item;
        if (!item_of(&coverage, sum->name, sum->dtype, &item) || !name_item(&b, sum->name, item))
            rc = dray__nomem(error);
        else
            coverage.items[item].held = sum->elements;
    }
    return finish(&b, group, group_count, rc, out, error);
}

/* ---- comparing ------------------------------------------------------------------------------- */

/* Checks the elements of an item in both tables. want and got are NULL when a table lacks it. */
static int check_counts(const dray__covered *item, const dray__named_sum *want,
                        const dray__named_sum *got, dray_error *error)
{
    uint64_t read = got ? got->elements : 0, announced = want ? want->elements : 0;
    if (read != item->covered)
        return dray__fail(error, DRAY_ECHECKSUM,
                          "tensor %s: the group's ranks say that they compared %" PRIu64
                          " elements, their layouts hold %" PRIu64,
                          item->name, read, item->covered);
    if (announced != item->held)
        return dray__fail(error, DRAY_ECHECKSUM,
                          "tensor %s: sums of %" PRIu64 " elements were announced, the publishers' "
                          "layouts hold %" PRIu64,
                          item->name, announced, item->held);
    if (got && got->mixed && !item->mixed)
        return dray__fail(
            error, DRAY_ECHECKSUM,
            "tensor %s: the group's ranks read it in several dtypes, it was published "
            "in one",
            item->name);
    return DRAY_OK;
}

bool dray__coverage_whole(const dray__covered *item)
{
    return !item->mixed && item->covered == item->held;
}

/* Computes the indices of the items in a table, unless it has the same form as the last table. */
static int align(dray__coverage *coverage, dray__sums *sums, dray__coverage_of_form *of,
                 dray_error *error)
{
    dray__sums_form *form = dray__sums_form_of(sums);
    if (form && form == of->form)
        return DRAY_OK;
    forget_form(of);
    coverage->counted = false;
    of->at = calloc((size_t)coverage->count + 1, sizeof *of->at);
    if (!form || !of->at)
        return dray__nomem(error);
    of->form = dray__sums_form_keep(form);
    for (uint32_t i = 0; i < coverage->count; i++)
        of->at[i] = dray__sums_form_find(form, coverage->items[i].name);
    uint32_t at;
    for (uint32_t i = 0; i < sums->count && !of->unknown; i++)
        if (!dray__map_get(&coverage->by_name, dray__sums_form_item(form, i)->name, &at))
            of->unknown = dray__sums_form_item(form, i)->name;
    return DRAY_OK;
}

static const dray__named_sum *aligned(const dray__coverage_of_form *of, uint32_t item)
{
    return of->at[item] < dray__sums_form_count(of->form)
               ? dray__sums_form_item(of->form, of->at[item])
               : NULL;
}

/* Checks the two forms, and lists the items whose sums must be compared. The result is kept for
 * these two forms. */
static int check_forms(dray__coverage *coverage, dray_error *error)
{
    if (coverage->found.unknown)
        return dray__fail(error, DRAY_ECHECKSUM,
                          "tensor %s: the group's ranks say that they compared it, no layout has "
                          "it",
                          coverage->found.unknown);
    if (coverage->counted)
        return DRAY_OK;
    coverage->whole = (dray__compared){0};
    coverage->pair_count = 0;
    if (!coverage->pairs)
        coverage->pairs = calloc((size_t)coverage->count + 1, sizeof *coverage->pairs);
    if (!coverage->pairs)
        return dray__nomem(error);
    for (uint32_t i = 0; i < coverage->count; i++) {
        const dray__covered *item = &coverage->items[i];
        const dray__named_sum *want = aligned(&coverage->announced, i);
        const dray__named_sum *got = aligned(&coverage->found, i);
        int rc = check_counts(item, want, got, error);
        if (rc)
            return rc;
        if (!dray__coverage_whole(item) || !want || !got)
            continue;
        coverage->pairs[coverage->pair_count++] = (dray__coverage_pair){
            i, coverage->announced.at[i], coverage->found.at[i], want->dtype != got->dtype};
        coverage->whole.tensors++;
        coverage->whole.bytes += item->held * dray_dtype_size((dray_dtype)item->dtype);
    }
    coverage->counted = true;
    return DRAY_OK;
}

/* Fails when two tensors that the group holds as one have different values. */
static int check_ties(const dray__coverage *coverage, const dray__sums *announced,
                      const char *origin, dray_error *error)
{
    const dray__coverage_of_form *of = &coverage->announced;
    for (uint32_t i = 0; coverage->tied && i < coverage->count; i++) {
        uint32_t tie = coverage->items[i].tie;
        const dray__named_sum *a = tie ? aligned(of, i) : NULL;
        const dray__named_sum *b = tie ? aligned(of, tie - 1) : NULL;
        if (!a || !b || a->mixed || b->mixed || a->dtype != b->dtype ||
            a->elements != b->elements ||
            dray__sums_at(announced, of->at[i]) == dray__sums_at(announced, of->at[tie - 1]))
            continue;
        return dray__fail(error, DRAY_ECHECKSUM,
                          "tensors %.160s and %.160s are one in the group's memory, and have "
                          "different values in %s",
                          b->name, a->name, origin);
    }
    return DRAY_OK;
}

int dray__coverage_compare(dray__coverage *coverage, dray__sums *announced, dray__sums *found,
                           const char *origin, dray__compared *out, dray_error *error)
{
    const dray__coverage_pair *first = NULL;
    uint32_t wrong = 0;
    char names[240] = "";
    int rc = align(coverage, announced, &coverage->announced, error);
    if (rc == DRAY_OK)
        rc = align(coverage, found, &coverage->found, error);
    if (rc == DRAY_OK)
        rc = check_forms(coverage, error);
    if (rc == DRAY_OK)
        rc = check_ties(coverage, announced, origin, error);
    if (rc)
        return rc;
    for (uint32_t i = 0; i < coverage->pair_count; i++) {
        const dray__coverage_pair *p = &coverage->pairs[i];
        if (!p->differs && dray__sums_at(announced, p->announced) == dray__sums_at(found, p->found))
            continue;
        first = first ? first : p;
        size_t used = strlen(names);
        if (wrong++ < 4)
            snprintf(names + used, sizeof names - used, "%s%s", used ? ", " : "",
                     coverage->items[p->item].name);
    }
    if (!first) {
        *out = coverage->whole;
        return DRAY_OK;
    }
    const dray__named_sum *form = aligned(&coverage->announced, first->item);
    return dray__fail(error, DRAY_ECHECKSUM,
                      "%" PRIu32 " tensors differ from %s (%s%s); %s: announced %016" PRIx64
                      ", read %016" PRIx64 " over %" PRIu64 " elements",
                      wrong, origin, names, wrong > 4 ? ", ..." : "", form->name,
                      dray__sums_at(announced, first->announced),
                      dray__sums_at(found, first->found), form->elements);
}
