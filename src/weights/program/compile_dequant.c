/* Dequantisation by GPUs (program.h). The destination's GPU reads elements, and the scales of their
 * cells, from the sources' memory. A box is the part of an op in cells with scales of one source.
 * Boxes that use the same scale each read it.
 *
 * Scales count in the sums like elements: the sum of the scales that the kernel used is compared
 * with that of a separate read of the scales. */
#include "base/error.h"
#include "memory/cuda_memory.h"
#include "mover/kernels/quant.h"
#include "weights/program/compile.h"

static bool on_gpu(const dray__transfer *h, const dray_copy *read)
{
    const dray__source *source = &h->sources->sources[read->source];
    return dray_layout_region(source->layout, read->source_region)->kind == DRAY_REGION_CUDA &&
           !dray__source_remote(source, read->source_region, h->sources->host);
}

bool dray__dequant_fits(const dray__transfer *h, uint64_t index)
{
    const dray__sources *s = h->sources;
    const dray_transform *t = &dray_plan_transforms(s->plan)[index];
    const dray_copy *write = &dray_plan_writes(s->plan)[t->first_write];
    bool fits = t->kind == DRAY_TRANSFORM_DEQUANTISE && t->writes == 1;
    if (!fits || !h->destination->regions[write->destination_region] ||
        dray_region_get_kind(h->destination->regions[write->destination_region]) !=
            DRAY_REGION_CUDA ||
        !dray__quant_known(write->destination_dtype, t->quant_dtype))
        return false;
    for (uint64_t i = s->transform_ops[index]; i < s->transform_ops[index + 1] && fits; i++) {
        const dray__op *op = &s->ops[i];
        fits = on_gpu(h, &op->copy) && !op->prequantised &&
               op->copy.source_dtype == (op->scales ? DRAY_F32 : t->quant_dtype);
    }
    return fits;
}

/* A box in the making. */
struct dequant_box {
    const dray_transform *t;
    const dray_copy *write;
    const dray__op *values, *scales;
    dray__rect rect, cells; /* elements; their cells */
    bool by_cell;           /* a scale for each cell; else one for all */
    uint32_t block;
};

static bool by_cell(const dray__transfer *h, const struct dequant_box *b)
{
    return b->scales->copy.ndim == dray_layout_tensor(h->destination->layout, b->t->tensor)->ndim &&
           !(b->scales->copy.ndim == 1 && b->t->cell[0] >= b->t->start[0] + b->t->extent[0]);
}

/* Computes the elements of one op that have their scales in the other. Returns false when there are
 * none. */
static bool cross(struct dequant_box *b)
{
    dray__rect held = dray__copy_rect(&b->scales->copy), read = dray__copy_rect(&b->values->copy);
    for (uint32_t d = 0; d < DRAY_MAX_DIMS && b->by_cell; d++) {
        held.start[d] *= b->t->cell[d];
        held.extent[d] *= b->t->cell[d];
    }
    if (!b->by_cell)
        held = read;
    if (!dray__rect_cross(&read, &held, &b->rect))
        return false;
    b->cells = b->by_cell ? dray__cells_touched(b->t->cell, &b->rect)
                          : (dray__rect){.extent = {1, 1, 1, 1}};
    return true;
}

static dray__cuda_quant quant_of(const dray__compiler *c, const struct dequant_box *b,
                                 const dray__ends *ends, const dray_copy *from,
                                 const dray_copy *scales)
{
    dray_copy to = dray__copy_cut(b->write, &b->rect);
    dray__cuda_quant q = {.kind = DRAY_TRANSFORM_DEQUANTISE,
                          .dtype = to.destination_dtype,
                          .quant_dtype = b->t->quant_dtype,
                          .scale_format = b->t->scale_format,
                          .tensor = b->t->tensor,
                          .ndim = to.ndim,
                          .source = ends->from->device_address + from->source_offset,
                          .destination = ends->to->device_address + to.destination_offset,
                          .scales = dray__source_region(c, scales)->device_address +
                                    scales->source_offset,
                          .lane = ends->lane};
    for (uint32_t d = 0; d < to.ndim; d++) {
        q.start[d] = b->rect.start[d];
        q.extent[d] = b->rect.extent[d];
        q.cell[d] = b->t->cell[d];
        q.source_stride[d] = from->source_stride[d];
        q.destination_stride[d] = to.destination_stride[d];
        q.scale_stride[d] = b->by_cell ? scales->source_stride[d] : 0;
    }
    return q;
}

/* Returns the source's tensor of scales, which the destination does not have. */
static const dray_tensor_info *scales_tensor(const dray__transfer *h, const struct dequant_box *b)
{
    const dray_layout *layout = h->sources->sources[b->scales->copy.source].layout;
    uint32_t tensor;
    if (dray_layout_find(layout, h->sources->names[b->t->tensor], &tensor, NULL))
        return NULL;
    const dray_quant *quant = dray_layout_quant(layout, tensor);
    return quant ? dray_layout_tensor(layout, quant->scales) : NULL;
}

static int push_box(dray__compiler *c, const struct dequant_box *b, dray_error *error)
{
    const dray__transfer *h = c->transfer;
    dray__ends ends;
    int rc = dray__ends_of(c, &b->values->copy,
                           h->destination->regions[b->write->destination_region], &ends, error);
    dray_copy from = dray__copy_cut(&b->values->copy, &b->rect);
    dray_copy scales = b->by_cell ? dray__copy_cut(&b->scales->copy, &b->cells) : b->scales->copy;
    const dray_region *scales_at = dray__source_region(c, &scales);
    if (rc == DRAY_OK)
        rc = dray__region_reach(scales_at, ends.device, error);
    if (rc)
        return rc;
    dray__cuda_item read = {
        .copy = from, .source_base = ends.from->device_address, .lane = ends.lane};
    dray__cuda_item read_scales = {.copy = scales,
                                   .source_base = scales_at->device_address,
                                   .lane = ends.lane,
                                   .of = scales_tensor(h, b)};
    bool verify = h->options.verify;
    if (verify && !read_scales.of)
        return dray__fail(error, DRAY_EINTERNAL, "tensor %s: its source has no scales",
                          dray_layout_tensor(h->destination->layout, b->t->tensor)->name);
    read_scales.copy.destination_dtype = scales.source_dtype;
    uint32_t sums = verify ? DRAY__CUDA_SUM_SOURCE | DRAY__CUDA_SUM_WRITTEN | DRAY__CUDA_SUM_BACK |
                                 DRAY__CUDA_SUM_SCALES
                           : 0;
    dray__entry entry = {.elements = dray__rect_elements(&b->rect),
                         .block = b->block,
                         .tensor = b->t->tensor,
                         .dtype = (uint8_t)from.source_dtype,
                         .kind = verify ? DRAY__ENTRY_DEQUANTISED : DRAY__ENTRY_UNCHECKED,
                         .owned = b->values->owned,
                         .twice = dray__op_alone(h, b->values)};
    dray__entry of_scales = {.block = b->block, .kind = DRAY__ENTRY_SCALES};
    dray__cuda_quant q = quant_of(c, b, &ends, &from, &scales);
    c->program->bytes += entry.elements * dray_dtype_size((dray_dtype)q.dtype);
    bool pushed =
        dray__draft_add(dray__draft_of(c, ends.device, sums, 0), DRAY__DRAFT_QUANTS, &q, &entry) &&
        (!verify || dray__draft_push(dray__draft_of(c, ends.device, DRAY__CUDA_SUM_SOURCE, 0),
                                     &read_scales, &of_scales)) &&
        dray__draft_read_again(c, ends.device, &read, &entry, 0);
    return pushed ? DRAY_OK : dray__nomem(error);
}

int dray__compile_dequant(dray__compiler *c, uint64_t index, dray_error *error)
{
    const dray__sources *s = c->transfer->sources;
    uint64_t first = s->transform_ops[index], end = s->transform_ops[index + 1];
    struct dequant_box b = {.t = &dray_plan_transforms(s->plan)[index]};
    b.write = &dray_plan_writes(s->plan)[b.t->first_write];
    b.block = s->write_blocks[b.t->first_write];
    int rc = DRAY_OK;
    for (uint64_t i = first; i < end; i++)
        for (uint64_t k = first; k < end && rc == DRAY_OK; k++) {
            b.values = &s->ops[i];
            b.scales = &s->ops[k];
            if (b.values->scales || !b.scales->scales)
                continue;
            b.by_cell = by_cell(c->transfer, &b);
            if (cross(&b))
                rc = push_box(c, &b, error);
        }
    return rc;
}
