/* Quantising by GPUs (program.h): whole cells that lie in one block of one source are read and
 * quantised where they lie, by the source's GPU if it can; what several sources or blocks share is
 * gathered on the destination's GPU first, through its bucket. Transforms that are more involved
 * are left to placements/convert.c. */
#include "base/error.h"
#include "mover/kernels/quant.h"
#include "weights/program/compile.h"

#include <string.h>

/* Cells so large are not gathered. */
#define GATHERED_CELL ((uint64_t)64 << 10)

/* What a transform writes: its elements, and their scales, each to one place. */
struct target {
    const dray_copy *elements, *scales;
    uint32_t block, scale_block;
};

static bool is_gpu_region(const dray_region *region)
{
    return region && (dray_region_get_kind(region) == DRAY_REGION_CUDA ||
                      dray_region_get_kind(region) == DRAY_REGION_PINNED);
}

static bool find_target(const dray__transfer *h, const dray_transform *t, struct target *out)
{
    const dray_copy *writes = dray_plan_writes(h->sources->plan);
    *out = (struct target){0};
    for (uint64_t w = t->first_write; w < t->first_write + t->writes; w++) {
        bool scales = writes[w].tensor != t->tensor;
        if (scales ? out->scales != NULL : out->elements != NULL)
            return false;
        if (!is_gpu_region(h->destination->regions[writes[w].destination_region]))
            return false;
        if (scales) {
            out->scales = &writes[w];
            out->scale_block = h->sources->write_blocks[w];
        } else {
            out->elements = &writes[w];
            out->block = h->sources->write_blocks[w];
        }
    }
    return out->elements && out->scales && out->scales->destination_dtype == DRAY_F32;
}

static dray__rect all_cells(const dray_transform *t)
{
    dray__rect whole = dray__transform_rect(t);
    return dray__cells_touched(t->cell, &whole);
}

/* Are scales by cell, in the tensor's own dimensions? Else there is one for all. */
static bool by_cell(const dray__transfer *h, const dray_transform *t, const dray_copy *scales)
{
    return scales->ndim == dray_layout_tensor(h->destination->layout, t->tensor)->ndim;
}

bool dray__transform_fits(const dray__transfer *h, const dray_transform *t)
{
    const dray_copy *reads = dray_plan_reads(h->sources->plan) + t->first_read;
    struct target target;
    uint64_t cell = sizeof(float);
    if (t->kind != DRAY_TRANSFORM_QUANTISE || !t->reads || !find_target(h, t, &target))
        return false;
    dray__rect whole = dray__transform_rect(t), held = dray__copy_rect(target.elements);
    dray__rect cells = all_cells(t);
    dray__rect scales = dray__copy_rect(target.scales);
    if (memcmp(&whole, &held, sizeof whole) != 0 ||
        (by_cell(h, t, target.scales) ? memcmp(&scales, &cells, sizeof scales) != 0
                                      : dray__rect_elements(&cells) != 1))
        return false;
    for (uint32_t d = 0; d < DRAY_MAX_DIMS; d++) {
        if (t->start[d] % t->cell[d] != 0)
            return false;
        cell *= (uint64_t)(t->cell[d] < t->extent[d] ? t->cell[d] : t->extent[d]);
    }
    for (uint64_t r = 0; r < t->reads; r++) {
        const dray__source *source = &h->sources->sources[reads[r].source];
        int32_t kind = dray_layout_region(source->layout, reads[r].source_region)->kind;
        if (kind != DRAY_REGION_CUDA || reads[r].source_dtype != reads->source_dtype ||
            dray__source_remote(source, reads[r].source_region, h->sources->host))
            return false;
    }
    return dray__quant_known(reads->source_dtype, t->quant_dtype) &&
           (t->reads == 1 || cell <= GATHERED_CELL);
}

/* ---- boxes -------------------------------------------------------------------------------------
 */

/* What a box of cells becomes, and where. */
struct piece {
    const dray_transform *t;
    const struct target *target;
    dray__rect rect, cells;
    bool owned, twice, gathered;
};

/* The sums of a job that quantises. */
static uint32_t sums_of(const dray__transfer *h)
{
    return h->options.verify ? DRAY__CUDA_SUM_SOURCE | DRAY__CUDA_SUM_WRITTEN |
                                   DRAY__CUDA_SUM_SCALES | DRAY__CUDA_SUM_MOST
                             : 0;
}

static dray_copy elements_copy(const struct piece *p)
{
    return dray__copy_cut(p->target->elements, &p->rect);
}

static dray_copy scales_copy(const dray__transfer *h, const struct piece *p)
{
    return by_cell(h, p->t, p->target->scales) ? dray__copy_cut(p->target->scales, &p->cells)
                                               : *p->target->scales;
}

/* The destination's side of it. */
static dray__cuda_quant quant_of(const dray__transfer *h, const struct piece *p, int32_t dtype)
{
    dray_copy elements = elements_copy(p), scales = scales_copy(h, p);
    const dray_region *to = h->destination->regions[elements.destination_region];
    const dray_region *scales_to = h->destination->regions[scales.destination_region];
    dray__cuda_quant q = {.kind = DRAY_TRANSFORM_QUANTISE,
                          .dtype = dtype,
                          .quant_dtype = p->t->quant_dtype,
                          .scale_format = p->t->scale_format,
                          .tensor = p->t->tensor,
                          .ndim = elements.ndim,
                          .destination = to->device_address + elements.destination_offset,
                          .scales = scales_to->device_address + scales.destination_offset};
    for (uint32_t d = 0; d < elements.ndim; d++) {
        q.start[d] = p->rect.start[d];
        q.extent[d] = p->rect.extent[d];
        q.cell[d] = p->t->cell[d];
        q.destination_stride[d] = elements.destination_stride[d];
        q.scale_stride[d] = by_cell(h, p->t, p->target->scales) ? scales.destination_stride[d] : 0;
    }
    return q;
}

/* Enters the box in a job, and what reads it back in the step after. */
static bool push_piece(dray__compiler *c, const struct piece *p, const dray__ends *ends,
                       dray__cuda_device *device, const dray__cuda_quant *q, uint32_t step)
{
    const dray__transfer *h = c->transfer;
    bool verify = h->options.verify;
    uint32_t sums = sums_of(h);
    dray__entry entry = {.elements = dray__rect_elements(&p->rect),
                         .block = p->target->block,
                         .scale_block = p->target->scale_block,
                         .tensor = p->t->tensor,
                         .dtype = (uint8_t)q->dtype,
                         .kind = !verify       ? DRAY__ENTRY_UNCHECKED
                                 : p->gathered ? DRAY__ENTRY_REQUANTISED
                                               : DRAY__ENTRY_QUANTISED,
                         .owned = p->owned,
                         .twice = p->twice};
    dray_copy elements = elements_copy(p), scales = scales_copy(h, p);
    dray__ends scale_ends = *ends;
    scale_ends.to = h->destination->regions[scales.destination_region];
    c->program->bytes += dray__copy_bytes(&elements) + dray__copy_bytes(&scales);
    if (!dray__draft_add(dray__draft_of(c, device, sums, step), DRAY__DRAFT_QUANTS, q, &entry))
        return false;
    return !verify ||
           (dray__draft_read_back(c, ends, &elements, p->target->block, step + 1) &&
            dray__draft_read_back(c, &scale_ends, &scales, p->target->scale_block, step + 1));
}

/* Cells that lie in one block of one source. */
static int compile_cells(dray__compiler *c, const dray_transform *t, const struct target *target,
                         uint64_t index, const dray__rect *cells, dray_error *error)
{
    const dray__transfer *h = c->transfer;
    const dray__op *op = &h->sources->ops[index];
    struct piece p = {.t = t, .target = target, .owned = op->owned, .twice = dray__op_alone(h, op)};
    dray__ends ends;
    dray__rect whole = dray__transform_rect(t);
    p.rect = dray__cells_elements(t->cell, &whole, cells);
    p.cells = *cells;
    int rc = dray__ends_of(
        c, &op->copy, h->destination->regions[target->elements->destination_region], &ends, error);
    if (rc)
        return rc;
    dray_copy from = dray__copy_cut(&op->copy, &p.rect);
    dray__cuda_quant q = quant_of(h, &p, from.source_dtype);
    dray__cuda_device *pusher = dray__pusher_of(&ends);
    q.source = ends.from->device_address + from.source_offset;
    q.lane = ends.lane;
    memcpy(q.source_stride, from.source_stride, from.ndim * sizeof *from.source_stride);
    dray__entry entry = {.block = target->block, .twice = p.twice};
    dray__cuda_item item = {
        .copy = from, .source_base = ends.from->device_address, .lane = ends.lane};
    dray__cuda_device *mover = pusher ? pusher : ends.device;
    return push_piece(c, &p, &ends, mover, &q, pusher ? ends.lane : 0) &&
                   dray__draft_read_again(c, mover, &item, &entry, 0)
               ? DRAY_OK
               : dray__nomem(error);
}

/* The parts of a box, from all who have some of it, into the bucket, dense. */
static int gather(dray__compiler *c, const struct target *target, const dray__rect *rect,
                  uint64_t first, uint64_t end, const dray__filling *f, dray_error *error)
{
    const dray__transfer *h = c->transfer;
    bool verify = h->options.verify;
    uint32_t sums = sums_of(h);
    for (uint64_t i = first; i < end; i++) {
        const dray__op *op = &h->sources->ops[i];
        dray__rect whole = dray__copy_rect(&op->copy), part;
        dray__ends ends;
        if (!dray__rect_cross(&whole, rect, &part))
            continue;
        int rc = dray__ends_of(c, &op->copy, h->destination->regions[op->copy.destination_region],
                               &ends, error);
        if (rc)
            return rc;
        dray__cuda_item item = {.copy = dray__copy_cut(&op->copy, &part),
                                .source_base = ends.from->device_address,
                                .destination_base = f->address + (f->group & 1) * f->half,
                                .lane = ends.lane,
                                .phase = f->group};
        dray__copy_to_box(&item.copy, rect, item.copy.source_dtype, f->used);
        dray__entry entry = {.block = target->block,
                             .tensor = item.copy.tensor,
                             .dtype = (uint8_t)item.copy.source_dtype,
                             .owned = op->owned,
                             .twice = dray__op_alone(h, op),
                             .kind = verify ? DRAY__ENTRY_SENT : DRAY__ENTRY_UNCHECKED};
        if (!dray__draft_push(dray__draft_of(c, f->device, sums, 0), &item, &entry) ||
            !dray__draft_read_again(c, f->device, &item, &entry, 0))
            return dray__nomem(error);
    }
    return DRAY_OK;
}

/* Cells that nobody has alone. */
static int compile_gathered(dray__compiler *c, uint64_t index, const struct target *target,
                            const dray__rect *cells, dray_error *error)
{
    const dray__transfer *h = c->transfer;
    const dray__sources *s = h->sources;
    const dray_transform *t = &dray_plan_transforms(s->plan)[index];
    uint64_t first = s->transform_ops[index], end = s->transform_ops[index + 1];
    const dray_copy *any = &s->ops[first].copy;
    struct piece p = {.t = t, .target = target, .cells = *cells, .gathered = true};
    dray__ends ends;
    dray__filling *f;
    dray__rect whole = dray__transform_rect(t);
    p.rect = dray__cells_elements(t->cell, &whole, cells);
    int rc = dray__ends_of(c, any, h->destination->regions[target->elements->destination_region],
                           &ends, error);
    if (rc == DRAY_OK)
        rc = dray__bucket_of(c, ends.device, &f, error);
    if (rc)
        return rc;
    uint64_t size = dray_dtype_size((dray_dtype)any->source_dtype);
    uint64_t bytes = dray__rect_elements(&p.rect) * size;
    if (f->used && f->used + bytes > f->half) {
        f->group++;
        f->used = 0;
    }
    rc = gather(c, target, &p.rect, first, end, f, error);
    if (rc)
        return rc;
    dray__cuda_quant q = quant_of(h, &p, any->source_dtype);
    q.source = f->address + (f->group & 1) * f->half + f->used;
    q.phase = f->group + 1;
    q.lane = s->count;
    for (uint32_t d = q.ndim; d-- > 0; size *= (uint64_t)p.rect.extent[d])
        q.source_stride[d] = (int64_t)size;
    f->used = (f->used + bytes + DRAY__BUCKET_ALIGN - 1) / DRAY__BUCKET_ALIGN * DRAY__BUCKET_ALIGN;
    return push_piece(c, &p, &ends, ends.device, &q, 0) ? DRAY_OK : dray__nomem(error);
}

/* In pieces that a half of the bucket holds. */
static int compile_left(dray__compiler *c, uint64_t index, const struct target *target,
                        const dray__rects *left, dray_error *error)
{
    const dray_transform *t = &dray_plan_transforms(c->transfer->sources->plan)[index];
    uint64_t cell = sizeof(float), half = c->program->ceiling / 2 - DRAY__BUCKET_ALIGN;
    int rc = DRAY_OK;
    for (uint32_t d = 0; d < DRAY_MAX_DIMS; d++)
        cell *= (uint64_t)t->cell[d];
    for (size_t i = 0; i < left->count && rc == DRAY_OK; i++) {
        dray__rect slice;
        dray__slicer slicer;
        dray__slicer_start(&slicer, &left->items[i], cell, half);
        for (; rc == DRAY_OK && dray__slicer_peek(&slicer, &slice); dray__slicer_next(&slicer))
            rc = compile_gathered(c, index, target, &slice, error);
    }
    return rc;
}

int dray__compile_transform(dray__compiler *c, uint64_t index, dray_error *error)
{
    const dray__sources *s = c->transfer->sources;
    const dray_transform *t = &dray_plan_transforms(s->plan)[index];
    struct target target;
    dray__rects left = {0};
    dray__rect cells = all_cells(t);
    if (!find_target(c->transfer, t, &target))
        return dray__fail(error, DRAY_EINTERNAL, "a transform that GPUs cannot carry out");
    int rc = dray__rects_add(&left, &cells) ? DRAY_OK : dray__nomem(error);
    for (uint64_t i = s->transform_ops[index]; i < s->transform_ops[index + 1] && rc == DRAY_OK;
         i++) {
        dray__rect whole = dray__transform_rect(t), rect = dray__copy_rect(&s->ops[i].copy);
        if (!dray__cells_inside(t->cell, &whole, &rect, &cells))
            continue;
        rc = compile_cells(c, t, &target, i, &cells, error);
        if (rc == DRAY_OK && !dray__rects_take(&left, &cells))
            rc = dray__nomem(error);
    }
    /* What is quantised whole counts in the source's sums; what lies around it is gathered. */
    if (rc == DRAY_OK)
        rc = compile_left(c, index, &target, &left, error);
    dray__rects_free(&left);
    return rc;
}
