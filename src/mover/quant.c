#include "mover/quant.h"

#include "mover/kernels.h"

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

/* Elements beside each other that have one scale. */
typedef struct run {
    size_t element, count; /* the first, counted in the box */
    size_t cell;           /* counted among those that the box touches */
} run;

typedef struct runs {
    const dray__quant_box *box;
    int64_t first[DRAY_MAX_DIMS], cells[DRAY_MAX_DIMS];
    int64_t at[DRAY_MAX_DIMS]; /* within the box */
    size_t element;
} runs;

static runs runs_of(const dray__quant_box *box)
{
    runs r = {.box = box};
    dray__quant_cells(box, r.first, r.cells);
    return r;
}

static bool next_run(runs *r, run *out)
{
    enum { LAST = DRAY_MAX_DIMS - 1 };
    const dray__quant_box *box = r->box;
    if (r->at[0] == box->extent[0])
        return false;
    size_t cell = 0;
    for (int d = 0; d < DRAY_MAX_DIMS; d++)
        cell = cell * (size_t)r->cells[d] +
               (size_t)((box->start[d] + r->at[d]) / box->cell[d] - r->first[d]);
    int64_t in_cell = (box->start[LAST] + r->at[LAST]) % box->cell[LAST];
    int64_t count = box->cell[LAST] - in_cell, left = box->extent[LAST] - r->at[LAST];
    count = count < left ? count : left;
    *out = (run){r->element, (size_t)count, cell};
    r->element += (size_t)count;
    r->at[LAST] += count;
    for (int d = LAST; d > 0 && r->at[d] == box->extent[d]; d--) {
        r->at[d] = 0;
        r->at[d - 1]++;
    }
    return true;
}

void dray__quant_most(const dray__quant_box *box, const void *values, uint32_t *amax)
{
    const dray__kernels *k = dray__kernels_get();
    size_t size = dray_dtype_size((dray_dtype)box->dtype);
    uint32_t (*most)(const void *, size_t, uint32_t) = size == 2 ? k->most2 : k->most4;
    runs r = runs_of(box);
    for (run one; next_run(&r, &one);)
        amax[one.cell] =
            most((const uint8_t *)values + one.element * size, one.count, amax[one.cell]);
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
    dray__quantise_fn run_fn = quantiser(box);
    size_t size = dray_dtype_size((dray_dtype)box->dtype);
    runs r = runs_of(box);
    for (run one; next_run(&r, &one);)
        run_fn((const uint8_t *)values + one.element * size, quantised + one.element, one.count,
               1.0f / scales[one.cell]);
}

void dray__dequantise(const dray__quant_box *box, const uint8_t *quantised, const float *scales,
                      void *values)
{
    dray__dequantise_fn run_fn = dequantiser(box);
    size_t size = dray_dtype_size((dray_dtype)box->dtype);
    runs r = runs_of(box);
    for (run one; next_run(&r, &one);)
        run_fn(quantised + one.element, (uint8_t *)values + one.element * size, one.count,
               scales[one.cell]);
}
