/* Rectangles that a data server quantises before it sends them. */
#include "weights/server/pull_quant.h"

#include "base/error.h"
#include "mover/kernels/checksum.h"
#include "mover/kernels/quant.h"
#include "mover/mover.h"

#include <string.h>

/* An answer's elements as f32, then the largest of each cell, then the answer of the version
 * before.
 */
enum {
    FLOATS = DRAY__PULL_QUANT_MAX * 4,
    BEFORE = FLOATS + DRAY__PULL_QUANT_MAX,
    ROOM = BEFORE + DRAY__PULL_QUANT_MAX
};

static dray__quant_box box_of(const dray__pull_quant *quant, int32_t dtype, const dray__rect *rect)
{
    dray__quant_box box = {.dtype = dtype, .quant_dtype = quant->dtype};
    memcpy(box.start, rect->start, sizeof box.start);
    memcpy(box.extent, rect->extent, sizeof box.extent);
    memcpy(box.cell, quant->cell, sizeof box.cell);
    return box;
}

uint64_t dray__pull_quant_cell(const dray__pull_quant *quant)
{
    uint64_t elements = 1;
    for (int d = 0; d < DRAY_MAX_DIMS; d++)
        if (__builtin_mul_overflow(elements, (uint64_t)quant->cell[d], &elements))
            return UINT64_MAX;
    return elements <= UINT64_MAX - sizeof(float) ? elements + sizeof(float) : UINT64_MAX;
}

uint64_t dray__pull_quant_scales_at(const dray__rect *rect)
{
    return dray__round_up(dray__rect_elements(rect), DRAY__PULL_QUANT_ALIGN);
}

/* Returns the end of the scales. */
static uint64_t end_of(const dray__pull_quant *quant, const dray__rect *rect)
{
    dray__rect cells = dray__cells_touched(quant->cell, rect);
    return dray__pull_quant_scales_at(rect) + dray__rect_elements(&cells) * sizeof(float);
}

uint64_t dray__pull_quant_bytes(const dray__pull_quant *quant, const dray__rect *rect)
{
    return dray__round_up(end_of(quant, rect), DRAY__PULL_QUANT_ALIGN);
}

static uint64_t dense_sum(uint32_t ndim, const int64_t *shape, int32_t dtype,
                          const dray__rect *rect, const void *data)
{
    int64_t stride[DRAY_MAX_DIMS], next = (int64_t)dray_dtype_size((dray_dtype)dtype);
    for (uint32_t d = ndim; d-- > 0;) {
        stride[d] = next;
        next *= rect->extent[d];
    }
    dray__sum_of of = {dtype, ndim, shape, rect->start, rect->extent, stride, data};
    return dray__sum(&of);
}

uint64_t dray__pull_quant_sum(const dray_tensor_info *tensor, const dray__pull_quant *quant,
                              const dray__rect *rect, const void *data)
{
    int64_t shape[DRAY_MAX_DIMS] = {0};
    dray__rect cells = dray__cells_touched(quant->cell, rect);
    for (uint32_t d = 0; d < tensor->ndim; d++)
        shape[d] = (tensor->shape[d] - 1) / quant->cell[d] + 1;
    return dense_sum(tensor->ndim, tensor->shape, quant->dtype, rect, data) +
           dense_sum(tensor->ndim, shape, DRAY_F32, &cells,
                     (const uint8_t *)data + dray__pull_quant_scales_at(rect));
}

void dray__pull_put_quant(dray__writer *w, const dray__pull_quant *quant, uint32_t ndim)
{
    for (uint32_t d = 0; d < ndim; d++)
        dray__put_i64(w, quant->cell[d]);
    dray__put_u8(w, (uint8_t)quant->scale_format);
}

/* Reads the cells. Returns true when the rectangle consists of whole cells. */
static bool get_cells(dray__reader *in, const dray_tensor_info *tensor, const dray__rect *rect,
                      int32_t dtype, dray__pull_quant *out)
{
    *out = (dray__pull_quant){.dtype = dtype, .cell = {1, 1, 1, 1}};
    bool whole = true;
    for (uint32_t d = 0; d < tensor->ndim; d++) {
        int64_t cell = out->cell[d] = dray__get_i64(in), end = rect->start[d] + rect->extent[d];
        whole = whole && cell > 0 && rect->start[d] % cell == 0 &&
                (end == tensor->shape[d] || end % cell == 0);
    }
    out->scale_format = dray__get_u8(in);
    return whole && !in->failed &&
           (out->scale_format == DRAY_SCALE_F32 || out->scale_format == DRAY_SCALE_UE8M0);
}

int dray__pull_get_quant(dray__reader *in, const dray_tensor_info *tensor, const dray__rect *rect,
                         int32_t dtype, dray__pull_quant *out, dray_error *error)
{
    if (!get_cells(in, tensor, rect, dtype, out) || !dray__quant_known(tensor->dtype, dtype))
        return dray__fail(error, DRAY_EINVALID,
                          "tensor %s: whole cells of floats expected, to be quantised",
                          tensor->name);
    return DRAY_OK;
}

/* Does the tensor have scales for such cells? */
static bool has_scales(const dray_layout *layout, const dray_tensor_info *tensor,
                       const dray_quant *held, const dray__pull_quant *asked)
{
    if (!held || held->scale_format != asked->scale_format || tensor->dtype != asked->dtype)
        return false;
    const dray_tensor_info *scales = dray_layout_tensor(layout, held->scales);
    bool same = scales->dtype == DRAY_F32 && scales->ndim == tensor->ndim;
    for (uint32_t d = 0; d < tensor->ndim && same; d++)
        same = scales->shape[d] == (tensor->shape[d] - 1) / asked->cell[d] + 1;
    return same;
}

int dray__pull_get_held(dray__reader *in, const dray_layout *layout, uint32_t index,
                        const dray__rect *rect, int32_t dtype, uint64_t at, dray__pull_quant *out,
                        dray_copy *scales, dray_error *error)
{
    const dray_tensor_info *tensor = dray_layout_tensor(layout, index);
    const dray_quant *held = dray_layout_quant(layout, index);
    bool known = get_cells(in, tensor, rect, dtype, out) && has_scales(layout, tensor, held, out);
    dray__rect cells = known ? dray__cells_touched(out->cell, rect) : *rect;
    dray__blocks holding = dray__blocks_of(layout, known ? held->scales : index, &cells);
    while (known && dray__blocks_next(&holding)) {
        if (!holding.all)
            continue;
        *scales = (dray_copy){.tensor = held->scales, .ndim = tensor->ndim};
        memcpy(scales->start, cells.start, sizeof scales->start);
        memcpy(scales->extent, cells.extent, sizeof scales->extent);
        dray__copy_from_block(scales, layout, holding.index);
        dray__copy_to_dense(scales, DRAY_F32, at);
        return DRAY_OK;
    }
    return dray__fail(error, DRAY_EINVALID,
                      "tensor %s: whole cells of its own quantisation expected", tensor->name);
}

void dray__pull_quant_fill(const dray__pull_quant *quant, const dray__rect *rect, uint8_t *data)
{
    uint64_t elements = dray__rect_elements(rect), end = end_of(quant, rect);
    memset(data + elements, 0, dray__pull_quant_scales_at(rect) - elements);
    memset(data + end, 0, dray__pull_quant_bytes(quant, rect) - end);
}

dray__cuda_quant dray__pull_quant_work(const dray_copy *copy, const dray__pull_quant *quant,
                                       uint64_t source, uint64_t slot)
{
    dray__rect rect = dray__copy_rect(copy), cells = dray__cells_touched(quant->cell, &rect);
    dray__cuda_quant work = {.kind = DRAY_TRANSFORM_QUANTISE,
                             .dtype = copy->source_dtype,
                             .quant_dtype = quant->dtype,
                             .scale_format = quant->scale_format,
                             .quant_kind = DRAY_QUANT_BLOCK,
                             .tensor = copy->tensor,
                             .ndim = copy->ndim,
                             .source = source + copy->source_offset,
                             .destination = slot + copy->destination_offset,
                             .scales = slot + copy->destination_offset +
                                       dray__pull_quant_scales_at(&rect)};
    int64_t next = sizeof(float);
    for (uint32_t d = copy->ndim; d-- > 0;) {
        work.start[d] = rect.start[d];
        work.extent[d] = rect.extent[d];
        work.cell[d] = quant->cell[d];
        work.source_stride[d] = copy->source_stride[d];
        work.destination_stride[d] = copy->destination_stride[d];
        work.scale_stride[d] = next;
        next *= cells.extent[d];
    }
    return work;
}

/* Quantises the dense floats at the beginning of the scratch memory. Returns the number of cells.
 */
static uint64_t quantise(const dray__quant_box *box, int32_t scale_format, uint8_t *floats,
                         const dray__rect *rect, uint8_t *to)
{
    int64_t start[DRAY_MAX_DIMS], extent[DRAY_MAX_DIMS];
    uint64_t cells = dray__quant_cells(box, start, extent);
    uint32_t *amax = (uint32_t *)(void *)(floats + FLOATS);
    float *scales = (float *)(void *)(floats + FLOATS);
    memset(amax, 0, cells * sizeof *amax);
    dray__quant_most(box, floats, amax);
    for (uint64_t i = 0; i < cells; i++) {
        uint32_t most;
        memcpy(&most, &amax[i], sizeof most);
        float scale = dray__quant_scale(box, most, scale_format);
        memcpy(&scales[i], &scale, sizeof scale);
    }
    dray__quantise(box, floats, scales, to);
    memcpy(to + dray__pull_quant_scales_at(rect), scales, cells * sizeof *scales);
    return cells;
}

int dray__pull_quantise(const dray_layout *layout, const dray_region *region, dray_region **scratch,
                        const dray_copy *copy, const dray__pull_quant *quant, dray_region *staging,
                        uint64_t *source_sum, uint64_t *sum, dray_error *error)
{
    dray__rect rect = dray__copy_rect(copy);
    dray_copy gather = *copy;
    dray__move_options options = {.layout = layout, .source_sums = sum ? source_sum : NULL};
    uint64_t written = 0; /* sum of the floats, which is not used */
    options.sums = sum ? &written : NULL;
    int rc =
        *scratch ? DRAY_OK : dray_region_alloc(DRAY_REGION_HOST, ROOM, "floats", scratch, error);
    dray__copy_to_dense(&gather, copy->source_dtype, 0);
    if (rc == DRAY_OK)
        rc = dray__move_all(region, *scratch, &gather, 1, &options, error);
    if (rc)
        return rc;
    dray__quant_box box = box_of(quant, copy->source_dtype, &rect);
    uint8_t *to = (uint8_t *)dray_region_base(staging) + copy->destination_offset;
    quantise(&box, quant->scale_format, dray_region_base(*scratch), &rect, to);
    dray__pull_quant_fill(quant, &rect, to);
    if (sum)
        *sum = dray__pull_quant_sum(dray_layout_tensor(layout, copy->tensor), quant, &rect, to);
    return DRAY_OK;
}

size_t dray__pull_quant_changes(dray__delta_coder *coder, const dray__delta_view *view,
                                uint32_t block, const dray_region *scratch, const dray_copy *copy,
                                const dray__pull_quant *quant, const dray_region *staging,
                                uint8_t *out, size_t limit)
{
    dray__rect rect = dray__copy_rect(copy);
    uint64_t elements = dray__rect_elements(&rect), scales_at = dray__pull_quant_scales_at(&rect);
    uint8_t *floats = dray_region_base(scratch), *before = floats + BEFORE;
    const uint8_t *now = (const uint8_t *)dray_region_base(staging) + copy->destination_offset;
    uint32_t codes = 0;
    if (limit <= sizeof codes || elements > DRAY__DELTA_SLICE ||
        !dray__delta_undo(view, block, copy, floats))
        return 0;
    dray__quant_box box = box_of(quant, copy->source_dtype, &rect);
    uint64_t cells = quantise(&box, quant->scale_format, floats, &rect, before);
    uint8_t *to = out + sizeof codes;
    limit -= sizeof codes;
    codes =
        (uint32_t)dray__delta_encode_between(coder, before, now, elements, quant->dtype, to, limit);
    size_t scales = codes ? dray__delta_encode_between(coder, before + scales_at, now + scales_at,
                                                       cells, DRAY_F32, to + codes, limit - codes)
                          : 0;
    memcpy(out, &codes, sizeof codes);
    return scales ? sizeof codes + codes + scales : 0;
}

int dray__pull_quant_apply(dray__delta_coder *coder, const uint8_t *data, size_t size,
                           const dray_copy *elements, const dray_copy *scales, void *base,
                           dray_error *error)
{
    uint32_t codes = 0;
    if (size > sizeof codes)
        memcpy(&codes, data, sizeof codes);
    if (size <= sizeof codes || codes > size - sizeof codes)
        return dray__fail(error, DRAY_EFORMAT,
                          "changes of quantised elements: %u bytes of codes in an answer of %zu",
                          codes, size);
    data += sizeof codes;
    int rc = dray__delta_decode(coder, data, codes, elements, base, error);
    return rc ? rc
              : dray__delta_decode(coder, data + codes, size - sizeof codes - codes, scales, base,
                                   error);
}
