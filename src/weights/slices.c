/* Cuts rectangles of any shape into slices that fit a cache, a file buffer or a bucket. A slice has
 * the last dimensions as a whole, one dimension in part, and an extent of 1 in the first ones. */
#include "model/layout/layout.h"
#include "mover/mover.h"
#include "weights/internal.h"

#include <string.h>

void dray__slicer_start(dray__slicer *slicer, const dray__rect *whole, uint64_t element_bytes,
                        uint64_t limit)
{
    *slicer = (dray__slicer){.whole = *whole};
    uint64_t bytes = element_bytes ? element_bytes : 1;
    for (uint32_t d = DRAY_MAX_DIMS; d-- > 0;) {
        uint64_t fit = limit / bytes, extent = (uint64_t)whole->extent[d];
        uint64_t take = fit < 1 ? 1 : fit < extent ? fit : extent;
        slicer->tile[d] = (int64_t)take;
        slicer->at[d] = whole->start[d];
        /* The next dimension has an extent above 1 only if this one is whole. */
        bytes = take == extent ? bytes * take : UINT64_MAX;
    }
}

void dray__slicer_start_copy(dray__slicer *slicer, const dray_copy *copy, uint64_t limit)
{
    dray__rect whole = dray__copy_rect(copy);
    size_t from = dray_dtype_size((dray_dtype)copy->source_dtype);
    size_t to = dray_dtype_size((dray_dtype)copy->destination_dtype), size = from > to ? from : to;
    int64_t tile[DRAY_MAX_DIMS];
    dray__slicer_start(slicer, &whole, size, limit);
    if (dray__copy_turn_tile(copy, limit / size, tile))
        memcpy(slicer->tile, tile, copy->ndim * sizeof *tile);
}

bool dray__slicer_peek(const dray__slicer *slicer, dray__rect *out)
{
    if (slicer->done)
        return false;
    for (uint32_t d = 0; d < DRAY_MAX_DIMS; d++) {
        int64_t left = slicer->whole.start[d] + slicer->whole.extent[d] - slicer->at[d];
        out->start[d] = slicer->at[d];
        out->extent[d] = left < slicer->tile[d] ? left : slicer->tile[d];
    }
    return true;
}

void dray__slicer_next(dray__slicer *slicer)
{
    for (uint32_t d = DRAY_MAX_DIMS; d-- > 0;) {
        slicer->at[d] += slicer->tile[d];
        if (slicer->at[d] < slicer->whole.start[d] + slicer->whole.extent[d])
            return;
        slicer->at[d] = slicer->whole.start[d];
    }
    slicer->done = true;
}

dray__rect dray__copy_rect(const dray_copy *copy)
{
    dray__rect rect;
    for (uint32_t d = 0; d < DRAY_MAX_DIMS; d++) {
        rect.start[d] = d < copy->ndim ? copy->start[d] : 0;
        rect.extent[d] = d < copy->ndim ? copy->extent[d] : 1;
    }
    return rect;
}

dray_copy dray__copy_cut(const dray_copy *copy, const dray__rect *rect)
{
    dray_copy part = *copy;
    for (uint32_t d = 0; d < copy->ndim; d++) {
        uint64_t skip = (uint64_t)(rect->start[d] - copy->start[d]);
        part.start[d] = rect->start[d];
        part.extent[d] = rect->extent[d];
        part.source_offset += skip * (uint64_t)copy->source_stride[d];
        part.destination_offset += skip * (uint64_t)copy->destination_stride[d];
    }
    return part;
}

uint64_t dray__copy_to_box(dray_copy *copy, const dray__rect *box, int32_t dtype, uint64_t offset)
{
    uint64_t stride = dray_dtype_size((dray_dtype)dtype);
    copy->destination_region = 0;
    copy->destination_dtype = dtype;
    copy->destination_offset = offset;
    for (uint32_t d = copy->ndim; d-- > 0;) {
        copy->destination_stride[d] = (int64_t)stride;
        copy->destination_offset += (uint64_t)(copy->start[d] - box->start[d]) * stride;
        stride *= (uint64_t)box->extent[d];
    }
    return stride;
}

uint64_t dray__copy_to_dense(dray_copy *copy, int32_t dtype, uint64_t offset)
{
    dray__rect box = dray__copy_rect(copy);
    return dray__copy_to_box(copy, &box, dtype, offset);
}

void dray__copy_from_box(dray_copy *copy, const dray__rect *box, int32_t dtype, uint64_t offset)
{
    dray_copy there = *copy;
    dray__copy_to_box(&there, box, dtype, offset);
    copy->source_region = 0;
    copy->source_dtype = dtype;
    copy->source_offset = there.destination_offset;
    memcpy(copy->source_stride, there.destination_stride, sizeof copy->source_stride);
}

void dray__copy_from_block(dray_copy *copy, const dray_layout *layout, uint32_t index)
{
    const dray_block *block = dray_layout_block(layout, index);
    copy->source_region = block->region;
    copy->source_dtype = dray_layout_tensor(layout, block->tensor)->dtype;
    copy->source_offset = block->offset;
    for (uint32_t d = 0; d < DRAY_MAX_DIMS; d++) {
        bool real = d < dray_layout_tensor(layout, block->tensor)->ndim;
        copy->source_stride[d] = real ? block->stride[d] : 0;
        if (real)
            copy->source_offset +=
                (uint64_t)(copy->start[d] - block->start[d]) * (uint64_t)block->stride[d];
    }
}

static bool meets(const dray_copy *copy, uint64_t at, const int64_t *stride,
                  const dray_block *block, const dray__rect *part)
{
    uint64_t block_at = block->offset;
    for (uint32_t d = 0; d < copy->ndim; d++) {
        at += (uint64_t)(part->start[d] - copy->start[d]) * (uint64_t)stride[d];
        block_at += (uint64_t)(part->start[d] - block->start[d]) * (uint64_t)block->stride[d];
        if (part->extent[d] > 1 && stride[d] != block->stride[d])
            return false;
    }
    return at == block_at;
}

bool dray__copy_reads(const dray_copy *copy, const dray_block *block, const dray__rect *part)
{
    return copy->source_region == block->region &&
           meets(copy, copy->source_offset, copy->source_stride, block, part);
}

bool dray__copy_fills(const dray_copy *copy, const dray_block *block, const dray__rect *part)
{
    return copy->destination_region == block->region &&
           meets(copy, copy->destination_offset, copy->destination_stride, block, part);
}

dray__blocks dray__blocks_of(const dray_layout *layout, uint32_t tensor, const dray__rect *rect)
{
    return (dray__blocks){
        .layout = layout, .next = dray__layout_first_block(layout, tensor), .rect = *rect};
}

bool dray__blocks_next(dray__blocks *h)
{
    while ((h->block = h->next)) {
        h->next = dray__layout_next_block(h->layout, h->block);
        h->index = dray__layout_block_index(h->layout, h->block);
        dray__rect held = dray__rect_of(h->layout, h->index);
        if (!dray__rect_cross(&h->rect, &held, &h->cross))
            continue;
        h->all = dray__rect_elements(&h->cross) == dray__rect_elements(&h->rect);
        return true;
    }
    return false;
}

dray_copy dray__copy_onwards(const dray_copy *copy, const dray_copy *in)
{
    dray_copy out = *copy;
    out.source_dtype = copy->destination_dtype;
    out.source_offset = in->destination_offset;
    memcpy(out.source_stride, in->destination_stride, sizeof out.source_stride);
    return out;
}

uint64_t dray__tensor_elements(const dray_tensor_info *tensor)
{
    uint64_t elements = 1;
    for (uint32_t d = 0; d < tensor->ndim; d++)
        elements *= (uint64_t)tensor->shape[d];
    return elements;
}

bool dray__tensor_like(const dray_tensor_info *a, const dray_tensor_info *b)
{
    return a->dtype == b->dtype && a->ndim == b->ndim &&
           memcmp(a->shape, b->shape, a->ndim * sizeof *a->shape) == 0;
}

/* ---- cells ----------------------------------------------------------------------------------- */

dray__rect dray__transform_rect(const dray_transform *transform)
{
    dray__rect rect;
    memcpy(rect.start, transform->start, sizeof rect.start);
    memcpy(rect.extent, transform->extent, sizeof rect.extent);
    return rect;
}

dray__rect dray__cells_touched(const int64_t *cell, const dray__rect *rect)
{
    dray__rect cells;
    for (uint32_t d = 0; d < DRAY_MAX_DIMS; d++) {
        cells.start[d] = rect->start[d] / cell[d];
        cells.extent[d] = (rect->start[d] + rect->extent[d] - 1) / cell[d] + 1 - cells.start[d];
    }
    return cells;
}

bool dray__cells_inside(const int64_t *cell, const dray__rect *whole, const dray__rect *rect,
                        dray__rect *out)
{
    for (uint32_t d = 0; d < DRAY_MAX_DIMS; d++) {
        int64_t end = rect->start[d] + rect->extent[d];
        bool last = end == whole->start[d] + whole->extent[d];
        int64_t from = rect->start[d] / cell[d] + (rect->start[d] % cell[d] != 0);
        int64_t to = last ? (end - 1) / cell[d] + 1 : end / cell[d];
        if (to <= from)
            return false;
        out->start[d] = from;
        out->extent[d] = to - from;
    }
    return true;
}

dray__rect dray__cells_elements(const int64_t *cell, const dray__rect *whole,
                                const dray__rect *cells)
{
    dray__rect rect;
    for (uint32_t d = 0; d < DRAY_MAX_DIMS; d++) {
        int64_t last = (cells->start[d] + cells->extent[d] - 1) * cell[d];
        int64_t left = whole->start[d] + whole->extent[d] - last;
        rect.start[d] = cells->start[d] * cell[d];
        rect.extent[d] = last + (left < cell[d] ? left : cell[d]) - rect.start[d];
    }
    return rect;
}
