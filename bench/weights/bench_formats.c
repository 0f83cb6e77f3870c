/* Decodes a sample of the tensors that an engine holds in its formats, by the formats' definitions,
 * and compares it with the floats that it was made from, to within the formats' rounding.
 * (tests/weights/test_formats_torch.py compares bits.) */
#include "bench/weights/bench_formats.h"

#include "bench/weights/bench_values.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

/* The numbers of tensors of a rank that are sampled at most, and of columns at either end of a
 * row. */
enum { MOST_TENSORS = 64, COLUMNS = 64 };

typedef struct view {
    const dray_layout *layout;
    const uint32_t *blocks, *starts; /* by tensor */
    bench_read_fn read;
    void *user;
} view;

/* Reads an element of a tensor from a block that holds it. Returns false when no block does, or
 * when reading fails. */
static bool element(const view *v, uint32_t tensor, const int64_t *at, uint64_t *bits)
{
    const dray_tensor_info *t = dray_layout_tensor(v->layout, tensor);
    for (uint32_t i = v->starts[tensor]; i < v->starts[tensor + 1]; i++) {
        const dray_block *block = dray_layout_block(v->layout, v->blocks[i]);
        uint64_t offset = block->offset;
        bool inside = true;
        for (uint32_t d = 0; d < t->ndim; d++) {
            inside &= at[d] >= block->start[d] && at[d] < block->start[d] + block->extent[d];
            offset += (uint64_t)(at[d] - block->start[d]) * (uint64_t)block->stride[d];
        }
        *bits = 0;
        if (inside)
            return v->read(v->user, block->region, offset, dray_dtype_size((dray_dtype)t->dtype),
                           bits);
    }
    return false;
}

enum part { VALUES, SCALES, SECOND };

/* Sets `cell` to the rows and columns for which an element of a part stands; 0 means all. */
static void cell_of(const dray_quant *q, enum part part, int64_t cell[2])
{
    bool pairs = q->kind == DRAY_QUANT_MXFP4 || q->kind == DRAY_QUANT_NVFP4;
    bool eights = q->kind == DRAY_QUANT_INT4 || q->kind == DRAY_QUANT_INT4_ZERO;
    cell[0] = part == SECOND ? q->kind == DRAY_QUANT_INT4_ZERO ? 8 : 0 : 1;
    if (part == VALUES)
        cell[1] = pairs ? 2 : eights ? 8 : 1;
    else if (part == SECOND && cell[0] == 0)
        cell[1] = 0;
    else
        cell[1] = q->block[1] ? q->block[1] : q->kind == DRAY_QUANT_NVFP4 ? 16 : 32;
}

/* Reads the element of a part that stands for the tensor's element `at`. */
static bool part_element(const view *v, uint32_t tensor, enum part part, const int64_t *at,
                         uint64_t *bits)
{
    const dray_quant *q = dray_layout_quant(v->layout, tensor);
    const uint32_t parts[] = {q->values, q->scales, q->second};
    uint32_t row = dray_layout_tensor(v->layout, tensor)->ndim - 2;
    int64_t cell[2], own[DRAY_MAX_DIMS] = {0};
    cell_of(q, part, cell);
    for (uint32_t d = 0; d < row + 2 && cell[0]; d++)
        own[d] = d < row ? at[d] : at[d] / cell[d - row];
    return element(v, parts[part], own, bits);
}

static double value_e4m3(uint64_t bits)
{
    int exponent = (int)(bits >> 3 & 15), mantissa = (int)(bits & 7);
    double value = exponent ? ldexp(1 + mantissa / 8.0, exponent - 7) : ldexp(mantissa / 8.0, -6);
    return bits & 0x80 ? -value : value;
}

static double value_e2m1(uint64_t bits)
{
    static const double values[] = {0, 0.5, 1, 1.5, 2, 3, 4, 6};
    return bits & 8 ? -values[bits & 7] : values[bits & 7];
}

/* The largest difference between a value and its source that is right: the sum of a fraction of the
 * source and a fraction of the scale. */
static const struct {
    double itself, scale;
} tolerances[] = {
    [DRAY_QUANT_DEEPGEMM] = {1 / 15.0, 1e-3},
    [DRAY_QUANT_MXFP8] = {1 / 15.0, 2e-3},
    [DRAY_QUANT_MXFP4] = {0.26, 0.26},
    [DRAY_QUANT_NVFP4] = {0.4, 0.3}, /* its scales are rounded, too */
    [DRAY_QUANT_INT4] = {0, 0.6},
    [DRAY_QUANT_INT4_ZERO] = {0, 1.3}, /* its zero points are rounded, too */
};

/* Returns whether the element is the value that `source` converts to, to within the tolerance. */
static bool is_right(const view *v, uint32_t tensor, const int64_t *at, double source)
{
    const dray_quant *q = dray_layout_quant(v->layout, tensor);
    uint32_t last = dray_layout_tensor(v->layout, tensor)->ndim - 1;
    uint64_t code, bits, second = 0;
    double scale, value;
    if (!part_element(v, tensor, VALUES, at, &code) || !part_element(v, tensor, SCALES, at, &bits))
        return false;
    if (q->second && !part_element(v, tensor, SECOND, at, &second))
        return false;
    int32_t dtype = dray_layout_tensor(v->layout, q->scales)->dtype;
    scale = dtype == DRAY_U8       ? ldexp(1, (int)bits - 127)
            : dtype == DRAY_F8E4M3 ? value_e4m3(bits)
                                   : bench_value_of((dray_dtype)dtype, bits);
    if (q->kind == DRAY_QUANT_NVFP4)
        scale /= bench_value_of(DRAY_F32, second);
    if (q->kind == DRAY_QUANT_MXFP4 || q->kind == DRAY_QUANT_NVFP4)
        value = value_e2m1(code >> 4 * (at[last] % 2) & 15);
    else if (q->kind >= DRAY_QUANT_INT4)
        value = (double)(code >> 4 * (at[last] % 8) & 15) - 8;
    else
        value = value_e4m3(code);
    if (q->kind == DRAY_QUANT_INT4_ZERO)
        value -= (double)(second >> 4 * (at[last - 1] % 8) & 15) - 8;
    return fabs(value * scale - source) <=
           fabs(source) * tolerances[q->kind].itself + scale * tolerances[q->kind].scale;
}

/* Counts the wrong elements in the columns at either end of a row of the tensor. */
static uint64_t wrong_of_row(const view *v, uint32_t tensor, int64_t *at, int64_t first,
                             int64_t end, uint64_t hash, dray_dtype from)
{
    const dray_tensor_info *t = dray_layout_tensor(v->layout, tensor);
    uint64_t wrong = 0;
    for (int64_t c = first; c < end; c++) {
        if (c == first + COLUMNS && end - c > COLUMNS)
            c = end - COLUMNS;
        uint64_t index = 0;
        at[t->ndim - 1] = c;
        for (uint32_t d = 0; d < t->ndim; d++)
            index = index * (uint64_t)t->shape[d] + (uint64_t)at[d];
        wrong += !is_right(v, tensor, at, bench_value_at(hash, index, from));
    }
    return wrong;
}

/* Counts the wrong elements in the first, the middle and the last row of each block of values. */
static uint64_t wrong_of_tensor(const view *v, uint32_t tensor, uint64_t hash, dray_dtype from)
{
    const dray_tensor_info *t = dray_layout_tensor(v->layout, tensor);
    const dray_quant *q = dray_layout_quant(v->layout, tensor);
    int64_t cell[2];
    uint64_t wrong = 0;
    cell_of(q, VALUES, cell);
    for (uint32_t i = v->starts[q->values]; i < v->starts[q->values + 1]; i++) {
        const dray_block *block = dray_layout_block(v->layout, v->blocks[i]);
        uint32_t row = t->ndim - 2, column = t->ndim - 1;
        for (int64_t k = 0; k < 3; k++) {
            int64_t at[DRAY_MAX_DIMS] = {0};
            memcpy(at, block->start, sizeof at);
            at[row] += (block->extent[row] - 1) * k / 2;
            int64_t first = block->start[column] * cell[1];
            int64_t end = first + block->extent[column] * cell[1];
            wrong += wrong_of_row(v, tensor, at, first,
                                  end < t->shape[column] ? end : t->shape[column], hash, from);
        }
    }
    return wrong;
}

uint64_t bench_formats_wrong(const dray_layout *layout, bool tied, dray_layout *const *sources,
                             uint32_t count, bench_read_fn read, void *user, const char **first)
{
    uint32_t *starts, *blocks = bench_blocks_by_tensor(layout, &starts);
    view v = {layout, blocks, starts, read, user};
    uint32_t tensors = dray_layout_tensor_count(layout), formatted = 0, turn = 0;
    uint64_t wrong = 0;
    for (uint32_t t = 0; t < tensors; t++)
        formatted += bench_is_formatted(layout, t);
    for (uint32_t t = 0; t < tensors; t++) {
        const dray_tensor_info *info = dray_layout_tensor(layout, t);
        if (!bench_is_formatted(layout, t) ||
            turn++ % ((formatted + MOST_TENSORS - 1) / MOST_TENSORS))
            continue;
        dray_dtype from = bench_source_dtype(info, tied, sources, count);
        uint64_t here = wrong_of_tensor(&v, t, bench_hash_of(info->name, tied), from);
        if (here && !*first)
            *first = info->name;
        wrong += here;
    }
    free(starts);
    free(blocks);
    return wrong;
}

bool bench_is_formatted(const dray_layout *layout, uint32_t tensor)
{
    const dray_quant *q = dray_layout_quant(layout, tensor);
    return q && dray_layout_tensor(layout, tensor)->alias_of < 0 && q->kind > DRAY_QUANT_TENSOR;
}
