/* Quantised tensors. Elements that cannot be copied are quantised from floats, or converted to
 * floats, in boxes of whole cells (elements that share a scale). Each box is read once. */
#include "base/arena.h"
#include "base/array.h"
#include "base/error.h"
#include "model/layout/layout.h"
#include "plan/planner.h"

#include <stdlib.h>
#include <string.h>

/* ---- the dtypes of sources ------------------------------------------------------------------- */

static bool can_be_quantised(int32_t dtype)
{
    return dtype == DRAY_F32 || dtype == DRAY_BF16 || dtype == DRAY_F16;
}

/* An f32 can hold any scale that is a power of two. */
static bool quantised_alike(const dray_quant *from, const dray_quant *to)
{
    return from->kind == to->kind && memcmp(from->block, to->block, sizeof to->block) == 0 &&
           (from->scale_format == to->scale_format || to->scale_format == DRAY_SCALE_F32);
}

/* Returns how the tensor to which this one belongs is quantised, or NULL when it is part of no
 * quantised tensor. */
static const dray_quant *quant_of_part(const dray_layout *layout, uint32_t tensor)
{
    int part;
    return dray__layout_part_of(layout, tensor, &tensor, &part) ? dray_layout_quant(layout, tensor)
                                                                : NULL;
}

bool dray__plan_accepts(const planner *p, const dray__plan_holder *holder)
{
    const dray_layout *layout = p->index->sources[holder->source].layout;
    const dray_quant *from = dray_layout_quant(layout, holder->tensor);
    int32_t dtype = dray_layout_tensor(layout, holder->tensor)->dtype;
    if (p->reading == DRAY__AS_SCALES)
        return dtype == DRAY_F32 && !from;
    if (p->reading == DRAY__AS_FLOATS)
        return can_be_quantised(dtype);
    if (p->reading == DRAY__AS_QUANTISED)
        return from && dtype == p->wanted_dtype && quantised_alike(from, p->wanted);
    const dray_quant *to = quant_of_part(p->destination->layout, p->block->tensor);
    const dray_quant *of = quant_of_part(layout, holder->tensor);
    if (to) /* a checkpoint does not say how its tensors of this dtype are quantised */
        return dtype == p->tensor->dtype && (!of || quantised_alike(of, to));
    return !from || !can_be_quantised(p->tensor->dtype);
}

/* Returns true when any source holds the tensor as floats. */
static bool floats_held(const planner *p, uint32_t tensor)
{
    const dray__plan_holder *holders;
    size_t count = dray__plan_holders(
        p->index, dray_layout_tensor(p->destination->layout, tensor)->name, &holders);
    for (size_t i = 0; i < count; i++) {
        const dray_layout *layout = p->index->sources[holders[i].source].layout;
        if (can_be_quantised(dray_layout_tensor(layout, holders[i].tensor)->dtype))
            return true;
    }
    return false;
}

/* Returns the first holder from which floats of the current tensor can be made, or NULL. */
static const dray__plan_holder *quantised_holder(const planner *p)
{
    const dray__plan_holder *holders;
    size_t count = dray__plan_holders(p->index, p->tensor->name, &holders);
    for (size_t i = 0; i < count; i++) {
        const dray_quant *quant =
            dray_layout_quant(p->index->sources[holders[i].source].layout, holders[i].tensor);
        if (quant && quant->kind <= DRAY_QUANT_TENSOR)
            return &holders[i];
    }
    return NULL;
}

/* ---- boxes and cells ------------------------------------------------------------------------- */

static int64_t shape_of(const dray_tensor_info *tensor, int d)
{
    return (uint32_t)d < tensor->ndim ? tensor->shape[d] : 1;
}

static dray__rect cells_of(const dray__rect *elements, const int64_t *cell)
{
    dray__rect cells;
    for (int d = 0; d < DRAY_MAX_DIMS; d++) {
        int64_t end = elements->start[d] + elements->extent[d];
        cells.start[d] = elements->start[d] / cell[d];
        cells.extent[d] = (end - 1) / cell[d] + 1 - cells.start[d];
    }
    return cells;
}

static dray__rect elements_of(const dray__rect *cells, const int64_t *cell,
                              const dray_tensor_info *tensor)
{
    dray__rect elements;
    for (int d = 0; d < DRAY_MAX_DIMS; d++) {
        int64_t last = cells->start[d] + cells->extent[d] - 1, begin = last * cell[d];
        /* The end of the last cell; it cannot overflow. */
        int64_t left = shape_of(tensor, d) - begin;
        elements.start[d] = cells->start[d] * cell[d];
        elements.extent[d] = begin + (left < cell[d] ? left : cell[d]) - elements.start[d];
    }
    return elements;
}

/* ---- one transform --------------------------------------------------------------------------- */

static dray_transform *transform_next(dray_plan *plan)
{
    if (!dray__append(&plan->transforms, sizeof *plan->transforms, plan->transform_count,
                      &plan->transform_capacity))
        return NULL;
    return &plan->transforms[plan->transform_count++];
}

/* Reads a box of a tensor that has no memory of its own on this side. */
static int read_box(planner *p, uint32_t tensor, const dray_tensor_info *info,
                    const dray__rect *box, dray__reading reading, uint64_t *first, uint64_t *count,
                    dray_error *error)
{
    size_t from = p->plan->reads.count;
    p->own = (dray_block){.tensor = tensor};
    memcpy(p->own.start, box->start, sizeof p->own.start);
    memcpy(p->own.extent, box->extent, sizeof p->own.extent);
    p->block = &p->own;
    p->tensor = info;
    p->reading = reading;
    p->sink = &p->plan->reads;
    p->repeated = false;
    p->open.count = 0;
    if (!dray__rects_add(&p->open, box))
        return dray__nomem(error);
    int rc = reading == DRAY__AS_SCALES ? dray__plan_fill_from_name(p, info->name, error)
                                        : dray__plan_fill(p, error);
    if (!rc && p->open.count)
        rc = dray__plan_hole(p, error);
    if (!rc && p->repeated)
        dray__plan_merge(&p->plan->reads, from);
    *first = from;
    *count = p->plan->reads.count - from;
    return rc;
}

/* Returns the part of a destination block that is in the box, both in the block's own
 * coordinates. */
static bool write_box(planner *p, const dray_block *block, const dray__rect *box)
{
    dray__rect whole = dray__block_rect(block), part;
    if (!dray__rect_cross(&whole, box, &part))
        return true;
    dray_copy *copy = dray__copies_next(&p->plan->writes);
    if (!copy)
        return false;
    const dray_tensor_info *tensor = dray_layout_tensor(p->destination->layout, block->tensor);
    *copy = (dray_copy){.destination_region = block->region,
                        .tensor = block->tensor,
                        .ndim = tensor->ndim ? tensor->ndim : 1,
                        .source_dtype = tensor->dtype,
                        .destination_dtype = tensor->dtype,
                        .destination_offset = block->offset};
    memcpy(copy->start, part.start, sizeof copy->start);
    memcpy(copy->extent, part.extent, sizeof copy->extent);
    memcpy(copy->destination_stride, block->stride, sizeof copy->destination_stride);
    for (int d = 0; d < DRAY_MAX_DIMS; d++)
        copy->destination_offset +=
            (uint64_t)(part.start[d] - block->start[d]) * (uint64_t)block->stride[d];
    return true;
}

/* ---- floats from quantised tensors ----------------------------------------------------------- */

static int dequantise_box(planner *p, const dray_block *block, const dray__plan_holder *like,
                          const dray__rect *box, dray_error *error)
{
    const dray_layout *source = p->index->sources[like->source].layout;
    const dray_tensor_info *info = dray_layout_tensor(p->destination->layout, block->tensor);
    const dray_quant *quant = dray_layout_quant(source, like->tensor);
    dray_transform t = {.kind = DRAY_TRANSFORM_DEQUANTISE,
                        .tensor = block->tensor,
                        .quant_dtype = dray_layout_tensor(source, like->tensor)->dtype,
                        .scale_format = quant->scale_format,
                        .quant_kind = quant->kind,
                        .first_write = p->plan->writes.count};
    memcpy(t.start, box->start, sizeof t.start);
    memcpy(t.extent, box->extent, sizeof t.extent);
    dray__quant_cell(info, quant, t.cell);
    dray__rect cells = cells_of(box, t.cell);
    p->wanted = quant;
    p->wanted_dtype = t.quant_dtype;
    int rc =
        read_box(p, block->tensor, info, box, DRAY__AS_QUANTISED, &t.first_read, &t.reads, error);
    if (!rc)
        rc = read_box(p, block->tensor, dray_layout_tensor(source, quant->scales), &cells,
                      DRAY__AS_SCALES, &t.first_scale_read, &t.scale_reads, error);
    if (rc)
        return rc;
    dray_transform *slot = transform_next(p->plan);
    if (!slot || !write_box(p, block, box))
        return dray__nomem(error);
    t.writes = p->plan->writes.count - t.first_write;
    *slot = t;
    return DRAY_OK;
}

/* Fills the open rectangles of the current block from holders that have it quantised. */
static int dequantise_open(planner *p, dray_error *error)
{
    const dray_block *block = p->block;
    const dray__plan_holder *like = quantised_holder(p);
    if (!like)
        return DRAY_OK;
    dray__rects open = p->open;
    p->open = (dray__rects){0};
    int rc = DRAY_OK;
    for (size_t i = 0; !rc && i < open.count; i++)
        rc = dequantise_box(p, block, like, &open.items[i], error);
    dray__rects_free(&open);
    p->block = block;
    p->tensor = dray_layout_tensor(p->destination->layout, block->tensor);
    p->reading = DRAY__AS_THEY_ARE;
    p->sink = &p->plan->copies;
    return rc;
}

/* ---- quantised tensors from floats ----------------------------------------------------------- */

static bool remember(planner *p, uint32_t tensor, int part)
{
    return DRAY__PUSH(p->pending, p->pending_count, p->pending_capacity,
                      (dray__pending){tensor, part, p->block});
}

/* Removes the copies from index `from` on. */
static void forget(planner *p, size_t from)
{
    dray__copies *copies = &p->plan->copies;
    for (; copies->count > from; copies->count--) {
        const dray_copy *copy = &copies->items[copies->count - 1];
        uint64_t bytes = dray_dtype_size((dray_dtype)copy->source_dtype);
        for (int d = 0; d < DRAY_MAX_DIMS; d++)
            bytes *= (uint64_t)copy->extent[d];
        p->load[copy->source] -= bytes;
    }
}

int dray__plan_fill_quant(planner *p, dray_error *error)
{
    const dray_layout *layout = p->destination->layout;
    size_t from = p->plan->copies.count;
    uint32_t tensor = p->block->tensor;
    int part;
    bool of_quantised = dray__layout_part_of(layout, tensor, &tensor, &part);
    int rc = dray__plan_fill(p, error);
    if (rc || !p->open.count || !p->cast_quant)
        return rc;
    if (!of_quantised)
        return can_be_quantised(p->tensor->dtype) ? dequantise_open(p, error) : DRAY_OK;
    if (!floats_held(p, tensor))
        return DRAY_OK;
    forget(p, from);
    p->open.count = 0;
    return remember(p, tensor, part) ? DRAY_OK : dray__nomem(error);
}

/* Returns the number of the last transform that looks for the largest element of the tensors
 * that share it, or 0. */
static uint32_t most_of(const planner *p, uint32_t shared)
{
    for (size_t i = p->plan->transform_count; i-- > 0;) {
        const dray_transform *t = &p->plan->transforms[i];
        if (t->kind == DRAY_TRANSFORM_MOST &&
            dray_layout_quant(p->destination->layout, t->tensor)->shared == shared)
            return (uint32_t)i + 1;
    }
    return 0;
}

/* A scale for the whole tensor has a transform of its own, and does not belong to the cells of a
 * box. */
static bool is_global(const dray_quant *quant, int part)
{
    return quant->kind == DRAY_QUANT_NVFP4 && part == DRAY__PART_SECOND;
}

static int quantise_box(planner *p, const dray__pending *of, size_t count, const dray__rect *box,
                        dray_error *error)
{
    const dray_layout *layout = p->destination->layout;
    const dray_tensor_info *info = dray_layout_tensor(layout, of->tensor);
    const dray_quant *quant = dray_layout_quant(layout, of->tensor);
    dray_transform t = {.kind = DRAY_TRANSFORM_QUANTISE,
                        .tensor = of->tensor,
                        .quant_dtype = dray_layout_tensor(layout, quant->values)->dtype,
                        .scale_format = quant->scale_format,
                        .quant_kind = quant->kind,
                        .first_write = p->plan->writes.count};
    memcpy(t.start, box->start, sizeof t.start);
    memcpy(t.extent, box->extent, sizeof t.extent);
    dray__quant_cell(info, quant, t.cell);
    if (quant->kind == DRAY_QUANT_NVFP4)
        t.most = most_of(p, quant->shared);
    int rc = read_box(p, of->tensor, info, box, DRAY__AS_FLOATS, &t.first_read, &t.reads, error);
    for (size_t i = 0; !rc && i < count; i++) {
        int64_t cell[DRAY_MAX_DIMS];
        if (is_global(quant, of[i].part))
            continue;
        dray__quant_part_cell(info, quant, of[i].part, cell);
        dray__rect part = cells_of(box, cell);
        if (!write_box(p, of[i].block, &part))
            rc = dray__nomem(error);
    }
    dray_transform *slot = rc ? NULL : transform_next(p->plan);
    if (!slot)
        return rc ? rc : dray__nomem(error);
    t.writes = p->plan->writes.count - t.first_write;
    *slot = t;
    return DRAY_OK;
}

/* Adds the parts of the box that are in none of the first `known` boxes. */
static bool add_new(dray__rects *boxes, const dray__rect *box)
{
    size_t known = boxes->count, from = known;
    if (!dray__rects_add(boxes, box))
        return false;
    for (size_t k = 0; k < known; k++)
        for (size_t i = from; i < boxes->count;) {
            dray__rect whole = boxes->items[i], part, taken = boxes->items[k];
            if (!dray__rect_cross(&whole, &taken, &part)) {
                i++;
                continue;
            }
            boxes->items[i] = boxes->items[--boxes->count];
            if (!dray__rects_add_rest(boxes, &whole, &part))
                return false;
        }
    return true;
}

/* Handles all blocks of one tensor. */
static int quantise_tensor(planner *p, const dray__pending *of, size_t count, dray_error *error)
{
    const dray_layout *layout = p->destination->layout;
    const dray_tensor_info *info = dray_layout_tensor(layout, of->tensor);
    const dray_quant *quant = dray_layout_quant(layout, of->tensor);
    int64_t cell[DRAY_MAX_DIMS], own[DRAY_MAX_DIMS];
    dray__quant_cell(info, quant, cell);
    dray__rects boxes = {0};
    int rc = DRAY_OK;
    for (size_t i = 0; !rc && i < count; i++) {
        dray__rect box = dray__block_rect(of[i].block);
        if (is_global(quant, of[i].part))
            continue;
        dray__quant_part_cell(info, quant, of[i].part, own);
        box = elements_of(&box, own, info);
        box = cells_of(&box, cell);
        if (!add_new(&boxes, &box))
            rc = dray__nomem(error);
    }
    for (size_t i = 0; !rc && i < boxes.count; i++) {
        dray__rect box = elements_of(&boxes.items[i], cell, info);
        rc = quantise_box(p, of, count, &box, error);
    }
    dray__rects_free(&boxes);
    return rc;
}

/* Writes the global scales of all tensors that share one, when the last of them was read. */
static int write_globals(planner *p, uint32_t shared, dray_error *error)
{
    const dray_layout *layout = p->destination->layout;
    dray_transform *last = &p->plan->transforms[p->plan->transform_count - 1];
    const dray__rect one = {.extent = {1, 1, 1, 1}};
    last->first_write = p->plan->writes.count;
    for (size_t i = 0; i < p->pending_count; i++) {
        const dray_quant *quant = dray_layout_quant(layout, p->pending[i].tensor);
        if (is_global(quant, p->pending[i].part) && quant->shared == shared &&
            !write_box(p, p->pending[i].block, &one))
            return dray__nomem(error);
    }
    last->writes = p->plan->writes.count - last->first_write;
    return DRAY_OK;
}

/* All tensors that share a global scale are read whole, because the largest element of any of
 * them decides the scale. */
static int find_most(planner *p, uint32_t shared, dray_error *error)
{
    const dray_layout *layout = p->destination->layout;
    for (uint32_t i = shared; i < dray_layout_tensor_count(layout); i++) {
        const dray_tensor_info *info = dray_layout_tensor(layout, i);
        const dray_quant *quant = info->alias_of < 0 ? dray_layout_quant(layout, i) : NULL;
        if (!quant || quant->kind != DRAY_QUANT_NVFP4 || quant->shared != shared)
            continue;
        dray_transform t = {.kind = DRAY_TRANSFORM_MOST,
                            .tensor = i,
                            .quant_kind = DRAY_QUANT_NVFP4,
                            .first_write = p->plan->writes.count,
                            .extent = {1, 1, 1, 1},
                            .cell = {1, 1, 1, 1}};
        dray__rect whole = {.extent = {1, 1, 1, 1}};
        memcpy(whole.extent, info->shape, info->ndim * sizeof *info->shape);
        memcpy(t.extent, whole.extent, sizeof t.extent);
        int rc = read_box(p, i, info, &whole, DRAY__AS_FLOATS, &t.first_read, &t.reads, error);
        dray_transform *slot = rc ? NULL : transform_next(p->plan);
        if (!slot)
            return rc ? rc : dray__nomem(error);
        *slot = t;
    }
    return write_globals(p, shared, error);
}

static int compare_pending(const void *x, const void *y)
{
    const dray__pending *a = x, *b = y;
    if (a->tensor != b->tensor)
        return a->tensor < b->tensor ? -1 : 1;
    return a->block < b->block ? -1 : a->block > b->block;
}

int dray__plan_quantise(planner *p, dray_error *error)
{
    const dray_layout *layout = p->destination->layout;
    int rc = DRAY_OK;
    if (p->pending_count)
        qsort(p->pending, p->pending_count, sizeof *p->pending, compare_pending);
    for (size_t i = 0, n; !rc && i < p->pending_count; i += n) {
        const dray_quant *quant = dray_layout_quant(layout, p->pending[i].tensor);
        for (n = 1; i + n < p->pending_count && p->pending[i + n].tensor == p->pending[i].tensor;)
            n++;
        if (quant->kind == DRAY_QUANT_NVFP4 && !most_of(p, quant->shared))
            rc = find_most(p, quant->shared, error);
        if (!rc)
            rc = quantise_tensor(p, &p->pending[i], n, error);
    }
    return rc;
}

/* ---- totals ---------------------------------------------------------------------------------- */

static dray__rect copy_box(const dray_copy *copy)
{
    dray__rect box;
    memcpy(box.start, copy->start, sizeof box.start);
    memcpy(box.extent, copy->extent, sizeof box.extent);
    return box;
}

static dray_link read_link(const planner *p, const dray_copy *read)
{
    const dray_layout *layout = p->index->sources[read->source].layout;
    if (dray_layout_region(layout, read->source_region)->kind == DRAY_REGION_FILE)
        return DRAY_LINK_FILE;
    return (dray_link)p->plan->source_link[read->source];
}

/* Writes the parts of the elements that one read brings. A part that stands for several elements
 * is written with the read of the first of them. */
static uint64_t written_of(const planner *p, const dray_transform *t, const dray_copy *read,
                           const dray_copy *write)
{
    const dray_layout *layout = p->destination->layout;
    dray__rect from = copy_box(read), to = copy_box(write), both;
    size_t size = dray_dtype_size((dray_dtype)write->destination_dtype);
    int64_t cell[DRAY_MAX_DIMS] = {1, 1, 1, 1};
    uint32_t tensor;
    int part;
    if (t->kind == DRAY_TRANSFORM_MOST)
        memcpy(cell, t->extent, sizeof cell);
    else if (dray__layout_part_of(layout, write->tensor, &tensor, &part))
        dray__quant_part_cell(dray_layout_tensor(layout, tensor), dray_layout_quant(layout, tensor),
                              part, cell);
    for (int d = 0; d < DRAY_MAX_DIMS; d++) {
        int64_t first = (from.start[d] + cell[d] - 1) / cell[d];
        int64_t last = (from.start[d] + from.extent[d] - 1) / cell[d];
        if (last < first)
            return 0;
        from.start[d] = first;
        from.extent[d] = last - first + 1;
    }
    return dray__rect_cross(&from, &to, &both) ? dray__rect_elements(&both) * size : 0;
}

static void total_transform(const planner *p, const dray_transform *t)
{
    dray_plan *plan = p->plan;
    const dray_copy *reads = plan->reads.items, *writes = plan->writes.items;
    uint64_t written = 0;
    for (uint64_t r = t->first_read; r < t->first_read + t->reads; r++)
        for (uint64_t w = t->first_write; w < t->first_write + t->writes; w++) {
            uint64_t bytes = written_of(p, t, &reads[r], &writes[w]);
            plan->link_bytes[read_link(p, &reads[r])] += bytes;
            written += bytes;
        }
    plan->total_bytes += written;
    if (written > plan->largest)
        plan->largest = written;
}

void dray__plan_total_transforms(planner *p)
{
    for (size_t i = 0; i < p->plan->reads.count; i++) {
        const dray_copy *read = &p->plan->reads.items[i];
        dray__rect box = copy_box(read);
        p->plan->source_bytes[read->source] +=
            dray__rect_elements(&box) * dray_dtype_size((dray_dtype)read->source_dtype);
    }
    for (size_t i = 0; i < p->plan->transform_count; i++)
        total_transform(p, &p->plan->transforms[i]);
}
