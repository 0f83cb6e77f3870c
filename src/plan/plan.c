/* The planner. It walks the destination's blocks, keeps the rectangles of each that are not
 * filled yet, and takes them from the nearest holders, the least loaded first. */
#include "base/arena.h"
#include "base/array.h"
#include "base/error.h"
#include "base/hash.h"
#include "base/options.h"
#include "model/layout/layout.h"
#include "plan/planner.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define DEFAULT_STRIPE ((uint64_t)4 << 20)

typedef dray__hit hit;

const char *dray_link_name(dray_link link)
{
    static const char *const names[DRAY_LINK_COUNT] = {"process", "device", "host", "network",
                                                       "file"};
    return (unsigned)link < DRAY_LINK_COUNT ? names[link] : "?";
}

const char *dray__member_text(const dray_plan_member *member, char *out, size_t capacity)
{
    if (member->name)
        snprintf(out, capacity, "%.60s", member->name);
    else
        snprintf(out, capacity, "member %llu", (unsigned long long)member->member);
    return out;
}

dray_copy *dray__copies_next(dray__copies *copies)
{
    if (!dray__append(&copies->items, sizeof *copies->items, copies->count, &copies->capacity))
        return NULL;
    return &copies->items[copies->count++];
}

/* ---- links ----------------------------------------------------------------------------------- */

static bool only_files(const dray_layout *layout)
{
    uint32_t count = dray_layout_region_count(layout);
    for (uint32_t i = 0; i < count; i++)
        if (dray_layout_region(layout, i)->kind != DRAY_REGION_FILE)
            return false;
    return count > 0;
}

static dray_link link_between(const dray_plan_member *a, const dray_plan_member *b)
{
    if (only_files(a->layout))
        return DRAY_LINK_FILE;
    if (a->host != b->host)
        return DRAY_LINK_NETWORK;
    if (a->process == b->process)
        return DRAY_LINK_PROCESS;
    return a->device && a->device == b->device ? DRAY_LINK_DEVICE : DRAY_LINK_HOST;
}

static int32_t holder_link(const planner *p, const dray__plan_holder *holder)
{
    const dray_layout *layout = p->index->sources[holder->source].layout;
    if (dray_layout_region(layout, holder->block->region)->kind == DRAY_REGION_FILE)
        return DRAY_LINK_FILE;
    return p->plan->source_link[holder->source];
}

/* ---- one copy -------------------------------------------------------------------------------- */

static uint64_t offset_of(const dray_block *block, const int64_t *start)
{
    uint64_t offset = block->offset;
    for (int d = 0; d < DRAY_MAX_DIMS; d++)
        offset += (uint64_t)(start[d] - block->start[d]) * (uint64_t)block->stride[d];
    return offset;
}

static bool emit(planner *p, const dray__rect *box, const dray__plan_holder *holder)
{
    dray_copy *copy = dray__copies_next(p->sink);
    if (!copy)
        return false;
    const dray_layout *layout = p->index->sources[holder->source].layout;
    *copy = (dray_copy){.source = holder->source,
                        .source_region = holder->block->region,
                        .destination_region = p->block->region,
                        .tensor = p->block->tensor,
                        .ndim = p->tensor->ndim ? p->tensor->ndim : 1,
                        .source_dtype = dray_layout_tensor(layout, holder->tensor)->dtype,
                        .destination_dtype = p->tensor->dtype,
                        .source_offset = offset_of(holder->block, box->start),
                        .destination_offset = offset_of(p->block, box->start)};
    memcpy(copy->start, box->start, sizeof copy->start);
    memcpy(copy->extent, box->extent, sizeof copy->extent);
    memcpy(copy->source_stride, holder->block->stride, sizeof copy->source_stride);
    memcpy(copy->destination_stride, p->block->stride, sizeof copy->destination_stride);
    if (p->reading != DRAY__AS_THEY_ARE)
        copy->destination_dtype = copy->source_dtype;
    p->repeated |= p->last_block[holder->source] == p->block;
    p->last_block[holder->source] = p->block;
    p->load[holder->source] +=
        dray__rect_elements(box) * dray_dtype_size((dray_dtype)copy->source_dtype);
    return true;
}

/* Less loaded sources come first. Equal ones keep the order in which this destination's rotation
 * sees them. */
static bool before(const planner *p, const dray__plan_holder *a, const dray__plan_holder *b)
{
    if (p->load[a->source] != p->load[b->source])
        return p->load[a->source] < p->load[b->source];
    uint32_t n = p->index->source_count;
    uint32_t x = (a->source + n - p->rotation) % n, y = (b->source + n - p->rotation) % n;
    return x != y ? x < y : a->block < b->block;
}

/* Returns the outermost dimension that can be cut into `parts`, else the longest one. */
static int stripe_dimension(const dray__rect *box, size_t parts)
{
    int longest = 0;
    for (int d = 0; d < DRAY_MAX_DIMS; d++) {
        if ((uint64_t)box->extent[d] >= parts)
            return d;
        if (box->extent[d] > box->extent[longest])
            longest = d;
    }
    return longest;
}

/* Takes one open rectangle from equal holders: from the least loaded one, or striped over
 * several. */
static bool take(planner *p, const dray__rect *box, const dray__plan_holder **near, size_t count)
{
    uint64_t bytes = dray__rect_elements(box) * dray_dtype_size((dray_dtype)p->tensor->dtype);
    uint64_t wanted = (bytes + p->stripe_bytes - 1) / p->stripe_bytes;
    size_t parts = wanted < count ? (size_t)wanted : count;
    int dim = stripe_dimension(box, parts);
    int64_t extent = box->extent[dim];
    if ((uint64_t)extent < parts)
        parts = (size_t)extent;
    for (size_t i = 0; i < parts; i++) { /* Selects the first `parts` of the order in place. */
        size_t best = i;
        for (size_t j = i + 1; j < count; j++)
            if (before(p, near[j], near[best]))
                best = j;
        const dray__plan_holder *chosen = near[best];
        near[best] = near[i];
        near[i] = chosen;
        dray__rect part = *box;
        int64_t from = (int64_t)((uint64_t)extent * i / parts);
        part.start[dim] += from;
        part.extent[dim] = (int64_t)((uint64_t)extent * (i + 1) / parts) - from;
        if (!emit(p, &part, chosen))
            return false;
    }
    return true;
}

/* ---- one destination block ------------------------------------------------------------------- */

/* When nothing is quantised, every holder is acceptable. */
static bool usable(const planner *p, const dray__plan_holder *holder)
{
    return !p->quants || dray__plan_accepts(p, holder);
}

static int check_holder(const planner *p, const dray__plan_holder *holder, dray_error *error)
{
    const dray_plan_member *source = &p->index->sources[holder->source];
    const dray_tensor_info *from = dray_layout_tensor(source->layout, holder->tensor);
    const dray_tensor_info *to = p->tensor;
    char a[80], b[80];
    if (from->ndim != to->ndim ||
        memcmp(from->shape, to->shape, to->ndim * sizeof *to->shape) != 0) {
        char x[DRAY__SHAPE_TEXT], y[DRAY__SHAPE_TEXT];
        return dray__fail(error, DRAY_ESHAPE, "tensor %.160s: %s expects %s, %s holds %s", to->name,
                          dray__member_text(p->destination, a, sizeof a),
                          dray__shape_text(to->ndim, to->shape, x),
                          dray__member_text(source, b, sizeof b),
                          dray__shape_text(from->ndim, from->shape, y));
    }
    if (p->reading == DRAY__AS_THEY_ARE && from->dtype != to->dtype &&
        !(p->cast_floats && dray__is_float(from->dtype) && dray__is_float(to->dtype)))
        return dray__fail(
            error, DRAY_EDTYPE, "tensor %.160s: %s wants %s, which cannot be made of the %s of %s",
            to->name, dray__member_text(p->destination, a, sizeof a),
            dray_dtype_name((dray_dtype)to->dtype), dray_dtype_name((dray_dtype)from->dtype),
            dray__member_text(source, b, sizeof b));
    return DRAY_OK;
}

static bool add_hit(planner *p, const dray__plan_holder *first, size_t count, const dray__rect *box)
{
    return DRAY__PUSH(p->hits, p->hit_count, p->hit_capacity, (hit){first, count, *box, 0});
}

/* Finds all holders of a part of the block, and joins equal rectangles into one hit. *links
 * receives the links that occur, as bits. */
static int find_hits(planner *p, const dray__plan_holder *holders, size_t count, unsigned *links,
                     dray_error *error)
{
    dray__rect block = dray__block_rect(p->block);
    p->hit_count = 0;
    *links = 0;
    for (size_t i = 0, n; i < count; i += n) {
        for (n = 1; i + n < count && dray__same_box(holders[i].block, holders[i + n].block);)
            n++;
        if (holders[i].block->start[0] >= block.start[0] + block.extent[0])
            break; /* Hits are sorted by start, so all others come later. */
        dray__rect box = dray__block_rect(holders[i].block);
        if (!dray__rect_cross(&box, &block, &box))
            continue;
        bool any = false;
        for (size_t j = i; j < i + n; j++) {
            if (!usable(p, &holders[j]))
                continue;
            int rc = check_holder(p, &holders[j], error);
            if (rc)
                return rc;
            *links |= 1u << holder_link(p, &holders[j]);
            any = true;
        }
        if (any && !add_hit(p, &holders[i], n, &box))
            return dray__nomem(error);
    }
    return DRAY_OK;
}

/* Puts the holders of a hit with one link into p->near. The count is 0 also when memory is out
 * (*failed). */
static size_t near_holders(planner *p, const hit *h, int32_t link, bool *failed)
{
    if (h->count > p->near_capacity) {
        const dray__plan_holder **grown = realloc(p->near, h->count * sizeof *grown);
        if (!grown) {
            *failed = true;
            return 0;
        }
        p->near = grown;
        p->near_capacity = h->count;
    }
    size_t count = 0;
    for (size_t i = 0; i < h->count; i++)
        if (holder_link(p, &h->first[i]) == link && usable(p, &h->first[i]))
            p->near[count++] = &h->first[i];
    return count;
}

static bool fill_from_hit(planner *p, const hit *h, int32_t link)
{
    bool failed = false;
    size_t count = near_holders(p, h, link, &failed);
    if (failed)
        return false;
    if (!count)
        return true;
    p->left.count = 0;
    for (size_t i = 0; i < p->open.count; i++) {
        dray__rect part, open = p->open.items[i];
        if (!dray__rect_cross(&open, &h->box, &part)) {
            if (!dray__rects_add(&p->left, &open))
                return false;
            continue;
        }
        if (!take(p, &part, p->near, count) || !dray__rects_add_rest(&p->left, &open, &part))
            return false;
    }
    dray__rects swap = p->open;
    p->open = p->left;
    p->left = swap;
    return true;
}

/* Returns the load of a hit's least loaded holder with the link, or UINT64_MAX when it has none. */
static uint64_t hit_load(const planner *p, const hit *h, int32_t link)
{
    uint64_t least = UINT64_MAX;
    for (size_t i = 0; i < h->count; i++)
        if (p->load[h->first[i].source] < least && holder_link(p, &h->first[i]) == link &&
            usable(p, &h->first[i]))
            least = p->load[h->first[i].source];
    return least;
}

/* Returns true when different rectangles with one link overlap each other. Then their order
 * matters. */
static bool hits_overlap(const planner *p, int32_t link)
{
    dray__rect block = dray__block_rect(p->block);
    uint64_t volume = dray__rect_elements(&block), sum = 0;
    for (size_t i = 0; i < p->hit_count; i++)
        if (hit_load(p, &p->hits[i], link) != UINT64_MAX)
            sum += dray__rect_elements(&p->hits[i].box);
    return sum > volume;
}

static int compare_hits(const void *a, const void *b)
{
    const hit *x = a, *y = b;
    if (x->load != y->load)
        return x->load < y->load ? -1 : 1;
    return x->first < y->first ? -1 : x->first > y->first;
}

static bool fill_from_link(planner *p, int32_t link)
{
    /* The least loaded come first. Equal loads keep the order of position. */
    if (hits_overlap(p, link)) {
        for (size_t i = 0; i < p->hit_count; i++)
            p->hits[i].load = hit_load(p, &p->hits[i], link);
        qsort(p->hits, p->hit_count, sizeof *p->hits, compare_hits);
    }
    for (size_t i = 0; i < p->hit_count && p->open.count; i++)
        if (!fill_from_hit(p, &p->hits[i], link))
            return false;
    return true;
}

int dray__plan_fill_from_name(planner *p, const char *name, dray_error *error)
{
    const dray__plan_holder *holders;
    size_t count = dray__plan_holders(p->index, name, &holders);
    unsigned links;
    int rc = count ? find_hits(p, holders, count, &links, error) : DRAY_OK;
    if (rc || !count)
        return rc;
    for (int32_t link = 0; link < DRAY_LINK_COUNT && p->open.count; link++)
        if (links >> link & 1 && !fill_from_link(p, link))
            return dray__nomem(error);
    return DRAY_OK;
}

/* ---- holes ----------------------------------------------------------------------------------- */

/* Returns the distance between two ranges in elements, summed over the dimensions. */
static uint64_t distance(const dray__rect *a, const dray__rect *b)
{
    uint64_t sum = 0;
    for (int d = 0; d < DRAY_MAX_DIMS; d++) {
        int64_t gap = a->start[d] > b->start[d] ? a->start[d] - (b->start[d] + b->extent[d])
                                                : b->start[d] - (a->start[d] + a->extent[d]);
        sum += gap > 0 ? (uint64_t)gap : 0;
    }
    return sum;
}

/* No source knows the name. Finds the most similar name in the first source. */
static void unknown_text(const planner *p, char *out, size_t capacity)
{
    dray_error error = {0};
    const char *hint = NULL;
    uint32_t index;
    if (p->index->source_count &&
        dray_layout_find(p->index->sources[0].layout, p->tensor->name, &index, &error))
        hint = strstr(error.message, "; nearest: ");
    snprintf(out, capacity, "no member has a tensor of that name%s", hint ? hint : "");
}

/* Lists the holders of the elements nearest to the hole, for the message. */
static void nearest_text(const planner *p, const dray__rect *hole, char *out, size_t capacity)
{
    const dray__plan_holder *holders, *best = NULL;
    size_t count = dray__plan_holders(p->index, p->tensor->name, &holders), same = 0;
    uint64_t least = UINT64_MAX;
    for (size_t i = 0; i < count; i++) {
        dray__rect box = dray__block_rect(holders[i].block);
        uint64_t d = distance(hole, &box);
        if (d < least) {
            least = d;
            best = &holders[i];
            same = 0;
        }
        if (best && dray__same_box(holders[i].block, best->block))
            same++;
    }
    if (!best) {
        unknown_text(p, out, capacity);
        return;
    }
    dray__rect box = dray__block_rect(best->block);
    char name[80], text[DRAY__RECT_TEXT], others[48] = "";
    if (same > 1)
        snprintf(others, sizeof others, " and %zu more hold", same - 1);
    snprintf(out, capacity, "nearest: %s%s %s",
             dray__member_text(&p->index->sources[best->source], name, sizeof name),
             same > 1 ? others : " holds", dray__rect_text(&box, p->tensor->ndim, text));
}

/* Returns a holder that has it in a form that cannot be converted, or NULL when there is none or
 * another holder has it in a usable form. */
static const dray__plan_holder *refused_holder(const planner *p)
{
    const dray__plan_holder *holders;
    size_t count = dray__plan_holders(p->index, p->tensor->name, &holders);
    for (size_t i = 0; i < count; i++)
        if (usable(p, &holders[i]))
            return NULL;
    return count ? holders : NULL;
}

static int refused(const planner *p, const dray__plan_holder *holder, dray_error *error)
{
    char a[80], b[80];
    const dray_plan_member *source = &p->index->sources[holder->source];
    dray_dtype dtype = (dray_dtype)dray_layout_tensor(source->layout, holder->tensor)->dtype;
    bool quantised = dray_layout_quant(source->layout, holder->tensor);
    return dray__fail(
        error, DRAY_EDTYPE, "tensor %.160s: %s wants %s%s, which cannot be made of the %s%s of %s",
        p->tensor->name, dray__member_text(p->destination, a, sizeof a),
        dray_layout_quant(p->destination->layout, p->block->tensor) ? "quantised " : "",
        dray_dtype_name((dray_dtype)p->tensor->dtype), quantised ? "otherwise quantised " : "",
        dray_dtype_name(dtype), dray__member_text(source, b, sizeof b));
}

int dray__plan_hole(const planner *p, dray_error *error)
{
    const dray__plan_holder *wrong = p->quants ? refused_holder(p) : NULL;
    if (wrong)
        return refused(p, wrong, error);
    const dray__rect *box = &p->open.items[0];
    char name[80], text[DRAY__RECT_TEXT], nearest[300];
    nearest_text(p, box, nearest, sizeof nearest);
    return dray__fail(error, DRAY_EHOLE,
                      "tensor %.140s: elements %s, which %s needs, are held by none of %u members "
                      "(%s)",
                      p->tensor->name, dray__rect_text(box, p->tensor->ndim, text),
                      dray__member_text(p->destination, name, sizeof name), p->index->source_count,
                      nearest);
}

/* ---- the plan -------------------------------------------------------------------------------- */

int dray__plan_fill(planner *p, dray_error *error)
{
    const dray_layout *layout = p->destination->layout;
    int rc = dray__plan_fill_from_name(p, p->tensor->name, error);
    /* Elements that no source holds under their own name may exist under another name of the
     * tensor. */
    for (uint32_t t = 0; !rc && p->open.count && t < dray_layout_tensor_count(layout); t++) {
        const dray_tensor_info *alias = dray_layout_tensor(layout, t);
        if (alias->alias_of >= 0 && (uint32_t)alias->alias_of == p->block->tensor)
            rc = dray__plan_fill_from_name(p, alias->name, error);
    }
    return rc;
}

static int fill_block(planner *p, const dray_block *block, dray_error *error)
{
    size_t from = p->plan->copies.count;
    dray__rect box = dray__block_rect(block);
    p->block = block;
    p->tensor = dray_layout_tensor(p->destination->layout, block->tensor);
    p->reading = DRAY__AS_THEY_ARE;
    p->sink = &p->plan->copies;
    p->repeated = false;
    p->open.count = 0;
    if (!dray__rects_add(&p->open, &box))
        return dray__nomem(error);
    int rc = p->quants ? dray__plan_fill_quant(p, error) : dray__plan_fill(p, error);
    if (!rc && p->open.count)
        rc = dray__plan_hole(p, error);
    if (!rc && p->repeated && p->sink == &p->plan->copies)
        dray__plan_merge(&p->plan->copies, from);
    return rc;
}

static void total(dray_plan *plan, const dray_plan_index *index, const dray_layout *destination)
{
    for (size_t i = 0; i < plan->copies.count; i++) {
        const dray_copy *copy = &plan->copies.items[i];
        uint64_t elements = 1;
        for (uint32_t d = 0; d < copy->ndim; d++)
            elements *= (uint64_t)copy->extent[d];
        uint64_t bytes = elements * dray_dtype_size((dray_dtype)copy->destination_dtype);
        const dray_layout *source = index->sources[copy->source].layout;
        bool file =
            dray_layout_region(source, copy->source_region)->kind == DRAY_REGION_FILE ||
            dray_layout_region(destination, copy->destination_region)->kind == DRAY_REGION_FILE;
        plan->link_bytes[file ? DRAY_LINK_FILE : plan->source_link[copy->source]] += bytes;
        plan->source_bytes[copy->source] +=
            elements * dray_dtype_size((dray_dtype)copy->source_dtype);
        plan->total_bytes += bytes;
        if (bytes > plan->largest)
            plan->largest = bytes;
    }
}

static int fill_plan(planner *p, dray_error *error)
{
    const dray_layout *layout = p->destination->layout;
    dray__copies *copies = &p->plan->copies;
    int rc = dray__plan_check_memory(p->destination, error);
    if (!rc && !dray__array_room(&copies->items, sizeof *copies->items,
                                 dray_layout_block_count(layout), &copies->capacity))
        rc = dray__nomem(error);
    for (uint32_t b = 0; !rc && b < dray_layout_block_count(layout); b++)
        rc = fill_block(p, dray_layout_block(layout, b), error);
    if (!rc)
        rc = dray__plan_quantise(p, error);
    if (!rc)
        rc = dray__plan_sort(copies, error);
    if (!rc)
        total(p->plan, p->index, layout);
    if (!rc)
        dray__plan_total_transforms(p);
    return rc;
}

static bool allocate(planner *p)
{
    uint32_t n = p->index->source_count;
    p->load = calloc((size_t)n + 1, sizeof *p->load);
    p->plan = calloc(1, sizeof *p->plan);
    p->last_block = calloc((size_t)n + 1, sizeof *p->last_block);
    if (!p->load || !p->plan || !p->last_block)
        return false;
    p->plan->source_count = n;
    p->plan->source_bytes = calloc((size_t)n + 1, sizeof *p->plan->source_bytes);
    p->plan->source_link = calloc((size_t)n + 1, sizeof *p->plan->source_link);
    if (!p->plan->source_bytes || !p->plan->source_link)
        return false;
    for (uint32_t i = 0; i < n; i++)
        p->plan->source_link[i] = (int32_t)link_between(&p->index->sources[i], p->destination);
    if (n)
        p->rotation = (uint32_t)(dray__hash(&p->destination->member, sizeof(uint64_t)) % n);
    return true;
}

int dray_plan_from_index(const dray_plan_index *index, const dray_plan_member *destination,
                         const dray_plan_options *options, dray_plan **out, dray_error *error)
{
    dray_plan_options own = DRAY_PLAN_OPTIONS_INIT;
    int rc = DRAY__OPTIONS_READ(dray_plan_options, allow_cast, &own, options, error);
    if (rc)
        return rc;
    uint32_t casts = own.allow_cast ? own.allow_cast : DRAY_CAST_DEFAULT;
    if (casts & ~(uint32_t)(DRAY_CAST_NONE | DRAY_CAST_FLOAT | DRAY_CAST_QUANT))
        return dray__fail(error, DRAY_EINVALID, "plan options: allow_cast has unknown bits 0x%x",
                          casts);
    planner p = {.index = index,
                 .destination = destination,
                 .stripe_bytes = own.stripe_bytes ? own.stripe_bytes : DEFAULT_STRIPE,
                 .cast_floats = casts & DRAY_CAST_FLOAT,
                 .cast_quant = casts & DRAY_CAST_QUANT,
                 .quants = index->quants || dray__layout_quantised(destination->layout)};
    rc = allocate(&p) ? fill_plan(&p, error) : dray__nomem(error);
    free(p.load);
    free(p.last_block);
    free(p.hits);
    free(p.near);
    free(p.pending);
    dray__rects_free(&p.open);
    dray__rects_free(&p.left);
    if (rc)
        dray_plan_free(p.plan);
    else
        *out = p.plan;
    return rc;
}

int dray_plan_new(const dray_plan_member *sources, uint32_t source_count,
                  const dray_plan_member *destination, const dray_plan_options *options,
                  dray_plan **out, dray_error *error)
{
    dray_plan_index *index;
    int rc = dray__plan_index_new(sources, source_count, destination->layout, &index, error);
    if (rc)
        return rc;
    rc = dray_plan_from_index(index, destination, options, out, error);
    dray_plan_index_free(index);
    return rc;
}

void dray_plan_free(dray_plan *plan)
{
    if (!plan)
        return;
    free(plan->copies.items);
    free(plan->reads.items);
    free(plan->writes.items);
    free(plan->transforms);
    free(plan->source_bytes);
    free(plan->source_link);
    free(plan);
}

uint64_t dray_plan_count(const dray_plan *plan)
{
    return plan->copies.count;
}

const dray_copy *dray_plan_copies(const dray_plan *plan)
{
    return plan->copies.items;
}

uint64_t dray_plan_transform_count(const dray_plan *plan)
{
    return plan->transform_count;
}

const dray_transform *dray_plan_transforms(const dray_plan *plan)
{
    return plan->transforms;
}

const dray_copy *dray_plan_reads(const dray_plan *plan)
{
    return plan->reads.items;
}

const dray_copy *dray_plan_writes(const dray_plan *plan)
{
    return plan->writes.items;
}

uint64_t dray_plan_source_bytes(const dray_plan *plan, uint32_t source)
{
    return source < plan->source_count ? plan->source_bytes[source] : 0;
}

uint64_t dray_plan_bytes(const dray_plan *plan, dray_link link)
{
    return (unsigned)link < DRAY_LINK_COUNT ? plan->link_bytes[link] : 0;
}

uint64_t dray_plan_total_bytes(const dray_plan *plan)
{
    return plan->total_bytes;
}

uint64_t dray_plan_largest_copy(const dray_plan *plan)
{
    return plan->largest;
}

dray_link dray_plan_source_link(const dray_plan *plan, uint32_t source)
{
    return source < plan->source_count ? (dray_link)plan->source_link[source] : DRAY_LINK_NETWORK;
}
