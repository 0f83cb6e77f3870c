/* Rectangles cut into slices that fit a cache, a file buffer or a bucket, whatever their shape: the
 * last dimensions whole, one dimension in part, the first ones singly. */
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
        /* Only a whole dimension lets the next one be more than one thick. */
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

uint64_t dray__copy_to_dense(dray_copy *copy, int32_t dtype, uint64_t offset)
{
    uint64_t stride = dray_dtype_size((dray_dtype)dtype);
    copy->destination_region = 0;
    copy->destination_dtype = dtype;
    copy->destination_offset = offset;
    for (uint32_t d = copy->ndim; d-- > 0;) {
        copy->destination_stride[d] = (int64_t)stride;
        stride *= (uint64_t)copy->extent[d];
    }
    return stride;
}

dray_copy dray__copy_onwards(const dray_copy *copy, const dray_copy *in)
{
    dray_copy out = *copy;
    out.source_dtype = copy->destination_dtype;
    out.source_offset = in->destination_offset;
    memcpy(out.source_stride, in->destination_stride, sizeof out.source_stride);
    return out;
}
