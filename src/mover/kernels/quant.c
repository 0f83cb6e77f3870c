#include "mover/kernels/quant.h"

#include "mover/kernels/kernels.h"

#include <string.h>

static dray__quantise_fn quantiser(const dray__quant_box *box)
{
    const dray__quantiser *q = dray__kernels_get()->quantisers;
    while (q->run && (q->from != box->dtype || q->to != box->quant_dtype))
        q++;
    return q->run;
}

static dray__dequantise_fn dequantiser(const dray__quant_box *box)
{
    const dray__dequantiser *q = dray__kernels_get()->dequantisers;
    while (q->run && (q->from != box->quant_dtype || q->to != box->dtype))
        q++;
    return q->run;
}

bool dray__quant_known(int32_t dtype, int32_t quant_dtype)
{
    dray__quant_box box = {.dtype = dtype, .quant_dtype = quant_dtype};
    return quantiser(&box) && dequantiser(&box);
}

uint64_t dray__quant_cells(const dray__quant_box *box, int64_t *start, int64_t *extent)
{
    uint64_t cells = 1;
    for (int d = 0; d < DRAY_MAX_DIMS; d++) {
        start[d] = box->start[d] / box->cell[d];
        extent[d] = (box->start[d] + box->extent[d] - 1) / box->cell[d] + 1 - start[d];
        cells *= (uint64_t)extent[d];
    }
    return cells;
}

/* The part of a box in one cell: rows along the dimension before the last. */
typedef struct cell_piece {
    size_t element; /* the first, counted in the box */
    size_t cell;    /* counted among those that the box touches */
    dray__patch patch;
} cell_piece;

typedef struct pieces {
    dray__quant_box box;
    int64_t first[DRAY_MAX_DIMS], cells[DRAY_MAX_DIMS];
    int64_t at[DRAY_MAX_DIMS]; /* within the box */
} pieces;

/* Moves the dimensions to the end: patches take rows and columns from the last two, but the box of
 * a matrix has its two first. Trailing dimensions of extent 1 are dropped. */
static pieces pieces_of(const dray__quant_box *box)
{
    pieces p = {.box = *box};
    int last = DRAY_MAX_DIMS - 1;
    while (last > 0 && box->extent[last] == 1)
        last--;
    for (int d = DRAY_MAX_DIMS - 1; d >= 0; d--, last--) {
        p.box.start[d] = last >= 0 ? box->start[last] : 0;
        p.box.extent[d] = last >= 0 ? box->extent[last] : 1;
        p.box.cell[d] = last >= 0 ? box->cell[last] : 1;
    }
    dray__quant_cells(&p.box, p.first, p.cells);
    return p;
}

/* Returns the distance along a dimension to the end of the present cell, or of the box. */
static int64_t to_end_of_cell(const pieces *p, int d)
{
    const dray__quant_box *box = &p->box;
    int64_t in_cell = (box->start[d] + p->at[d]) % box->cell[d];
    int64_t count = box->cell[d] - in_cell, left = box->extent[d] - p->at[d];
    return count < left ? count : left;
}

static bool next_piece(pieces *p, cell_piece *out)
{
    enum { COLUMN = DRAY_MAX_DIMS - 1, ROW = COLUMN - 1 };
    const dray__quant_box *box = &p->box;
    if (p->at[0] == box->extent[0])
        return false;
    size_t cell = 0, element = 0;
    for (int d = 0; d < DRAY_MAX_DIMS; d++) {
        cell = cell * (size_t)p->cells[d] +
               (size_t)((box->start[d] + p->at[d]) / box->cell[d] - p->first[d]);
        element = element * (size_t)box->extent[d] + (size_t)p->at[d];
    }
    int64_t rows = to_end_of_cell(p, ROW), count = to_end_of_cell(p, COLUMN);
    *out = (cell_piece){element, cell, {(size_t)rows, (size_t)count, (size_t)box->extent[COLUMN]}};
    p->at[COLUMN] += count;
    for (int d = COLUMN; d > 0 && p->at[d] == box->extent[d]; d--) {
        p->at[d] = 0;
        p->at[d - 1] += d == COLUMN ? rows : 1;
    }
    return true;
}

void dray__quant_most(const dray__quant_box *box, const void *values, uint32_t *amax)
{
    const dray__kernels *k = dray__kernels_get();
    size_t size = dray_dtype_size((dray_dtype)box->dtype);
    uint32_t (*most)(const void *, dray__patch, uint32_t) = size == 2 ? k->most2 : k->most4;
    pieces p = pieces_of(box);
    for (cell_piece one; next_piece(&p, &one);)
        amax[one.cell] =
            most((const uint8_t *)values + one.element * size, one.patch, amax[one.cell]);
}

float dray__quant_scale(const dray__quant_box *box, uint32_t amax, int32_t scale_format)
{
    enum { EXPONENT = 23, MOST_EXPONENT = 254 };
    const uint32_t nan = 0x7FC00000, mantissa = (1u << EXPONENT) - 1;
    const uint16_t half = (uint16_t)amax;
    float largest = box->quant_dtype == DRAY_F8E4M3 ? 448.0f : 57344.0f, scale;
    if (box->dtype == DRAY_F32)
        memcpy(&scale, &amax, sizeof scale);
    else
        dray__cast_find(box->dtype, DRAY_F32)(&half, &scale, 1);
    if (scale < 1e-4f)
        scale = 1e-4f;
    scale /= largest;
    uint32_t bits;
    memcpy(&bits, &scale, sizeof bits);
    if (bits > 0x7F800000)
        bits = nan;
    if (scale_format == DRAY_SCALE_UE8M0) {
        uint32_t exponent = (bits >> EXPONENT) + ((bits & mantissa) != 0);
        exponent = exponent < 1 ? 1 : exponent > MOST_EXPONENT ? MOST_EXPONENT : exponent;
        bits = exponent << EXPONENT;
    }
    memcpy(&scale, &bits, sizeof scale);
    return scale;
}

void dray__quantise(const dray__quant_box *box, const void *values, const float *scales,
                    uint8_t *quantised)
{
    dray__quantise_fn convert = quantiser(box);
    size_t size = dray_dtype_size((dray_dtype)box->dtype);
    pieces p = pieces_of(box);
    for (cell_piece one; next_piece(&p, &one);)
        convert((const uint8_t *)values + one.element * size, quantised + one.element, one.patch,
                1.0f / scales[one.cell]);
}

void dray__dequantise(const dray__quant_box *box, const uint8_t *quantised, const float *scales,
                      void *values)
{
    dray__dequantise_fn convert = dequantiser(box);
    size_t size = dray_dtype_size((dray_dtype)box->dtype);
    pieces p = pieces_of(box);
    for (cell_piece one; next_piece(&p, &one);)
        convert(quantised + one.element, (uint8_t *)values + one.element * size, one.patch,
                scales[one.cell]);
}
