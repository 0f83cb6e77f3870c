/* Random weights, and the conversions by definition that results are compared with
 * (bench_values.h). */
#include "bench/weights/bench_values.h"

#include "bench/weights/bench_formats.h"
#include <math.h>
#include <stdlib.h>
#include <string.h>

uint64_t bench_hash_of(const char *name, bool tied)
{
    if (tied && strcmp(name, "lm_head.weight") == 0)
        name = "model.embed_tokens.weight";
    uint64_t hash = 14695981039346656037u;
    for (; *name; name++)
        hash = (hash ^ (uint8_t)*name) * 1099511628211u;
    return hash;
}

/* The version of the values, and the number of elements for each one that changes. */
static struct {
    uint64_t version, every;
} now;

void bench_values_at(uint64_t version, uint64_t every)
{
    now.version = version;
    now.every = every;
}

void bench_values_now(uint64_t *version, uint64_t *every)
{
    *version = now.version;
    *every = now.every;
}

static uint64_t scrambled(uint64_t x)
{
    x = (x ^ x >> 30) * 0xBF58476D1CE4E5B9u;
    return x ^ x >> 31;
}

static uint64_t mixed(uint64_t hash, uint64_t index)
{
    uint64_t x = scrambled(hash + (index + 1) * 0x9E3779B97F4A7C15u);
    uint64_t changes = now.every ? (now.version + x % now.every) / now.every : 0;
    return changes ? scrambled(x + changes * 0x9E3779B97F4A7C15u) : x;
}

/* Returns the bits of an f32 of either sign, whose magnitude is from 2^-27 to 2^23. */
static uint32_t bits_f32(uint64_t x)
{
    return ((uint32_t)x & 0x807fffffu) | (uint32_t)(100 + (x >> 40) % 50) << 23;
}

/* Returns the bits of the element as a source of this dtype holds it. */
static uint64_t bits_of(dray_dtype dtype, uint64_t x)
{
    switch (dtype) {
    case DRAY_F32:
        return bits_f32(x);
    case DRAY_BF16:
        return bits_f32(x) >> 16;
    case DRAY_F16:
        return (x & 0x83ff) | (1 + (x >> 40) % 29) << 10;
    default:
        return x & 0x3f3f3f3f3f3f3f3fu; /* neither infinite nor NaN in any of the others */
    }
}

/* ---- conversions, by definition -------------------------------------------------------------- */

static double value_of(dray_dtype dtype, uint64_t bits)
{
    float f;
    double d;
    uint32_t word = (uint32_t)bits;
    switch (dtype) {
    case DRAY_F64:
        memcpy(&d, &bits, sizeof d);
        return d;
    case DRAY_BF16:
        word <<= 16;
        break;
    case DRAY_F16: {
        int exponent = (int)(bits >> 10 & 31);
        double mantissa = (double)(bits & 1023);
        d = exponent ? ldexp(1024 + mantissa, exponent - 25) : ldexp(mantissa, -24);
        return bits & 0x8000 ? -d : d;
    }
    default:
        break;
    }
    memcpy(&f, &word, sizeof f);
    return (double)f;
}

double bench_value_of(dray_dtype dtype, uint64_t bits)
{
    return value_of(dtype, bits);
}

double bench_value_at(uint64_t hash, uint64_t index, dray_dtype dtype)
{
    return value_of(dtype, bits_of(dtype, mixed(hash, index)));
}

/* Rounds a value to the nearest one of a format that has `digits` bits after the first and the
 * least exponent `least`, ties to even. Values beyond `most` become infinite. */
static double rounded(double value, int digits, int least, double most)
{
    int exponent;
    frexp(value, &exponent);
    exponent = exponent - 1 < least ? least : exponent - 1;
    double unit = ldexp(1, exponent - digits), result = nearbyint(value / unit) * unit;
    return fabs(result) > most ? copysign(INFINITY, value) : result;
}

/* Returns whether `bits` of dtype `to` is the value that `from_bits` of dtype `from` converts
 * to. */
static bool converted(dray_dtype from, uint64_t from_bits, dray_dtype to, uint64_t bits)
{
    if (from == to)
        return bits == from_bits;
    double value = value_of(from, from_bits);
    if (to == DRAY_BF16)
        value = rounded(value, 7, -126, 3.3895313892515355e38);
    else if (to == DRAY_F16)
        value = rounded(value, 10, -14, 65504);
    else if (to == DRAY_F32)
        value = (double)(float)value;
    if (isinf(value) && to == DRAY_F16)
        return bits == (value > 0 ? 0x7c00 : 0xfc00);
    return value_of(to, bits) == value && (value != 0 || bits == 0 || value_of(to, bits) == 0);
}

/* ---- walking the blocks, row by row ---------------------------------------------------------- */

/* The scales of a quantised tensor, as this member holds them. */
typedef struct scale_view {
    const dray_layout *layout;
    dray_region *const *regions;
    const dray_quant *quant;
    const uint32_t *blocks; /* of the tensor of scales */
    uint32_t count;
    int64_t rows, columns; /* of the quantised tensor's last two dimensions */
} scale_view;

typedef struct row {
    const scale_view *scales; /* NULL when it is not quantised */
    uint8_t *at;
    int64_t step; /* bytes between neighbours */
    uint64_t first, count, hash;
    dray_dtype dtype;
} row;

typedef uint64_t (*row_fn)(const row *r, dray_dtype from);

/* Returns the sum of the results of `fn` for all rows of a block. */
static uint64_t each_row(const dray_layout *layout, dray_region *const *regions,
                         const dray_block *block, uint64_t hash, dray_dtype from,
                         const scale_view *scales, row_fn fn)
{
    const dray_tensor_info *t = dray_layout_tensor(layout, block->tensor);
    uint32_t inner = t->ndim ? t->ndim - 1 : 0;
    int64_t at[DRAY_MAX_DIMS] = {0};
    row r = {.scales = scales,
             .step = t->ndim ? block->stride[inner] : 0,
             .count = t->ndim ? (uint64_t)block->extent[inner] : 1,
             .hash = hash,
             .dtype = (dray_dtype)t->dtype};
    uint64_t sum = 0;
    for (bool more = true; more;) {
        uint64_t offset = block->offset;
        r.first = 0;
        for (uint32_t d = 0; d < t->ndim; d++) {
            r.first = r.first * (uint64_t)t->shape[d] + (uint64_t)(block->start[d] + at[d]);
            offset += (uint64_t)at[d] * (uint64_t)block->stride[d];
        }
        r.at = (uint8_t *)dray_region_base(regions[block->region]) + offset;
        sum += fn(&r, from);
        more = false;
        for (uint32_t d = inner; d-- > 0 && !more;) {
            more = ++at[d] < block->extent[d];
            at[d] = more ? at[d] : 0;
        }
    }
    return sum;
}

static uint64_t fill_row(const row *r, dray_dtype from)
{
    size_t size = dray_dtype_size(r->dtype);
    (void)from;
    for (uint64_t i = 0; i < r->count; i++) {
        uint64_t bits = bits_of(r->dtype, mixed(r->hash, r->first + i));
        memcpy(r->at + (int64_t)i * r->step, &bits, size);
    }
    return 0;
}

static uint64_t check_row(const row *r, dray_dtype from)
{
    size_t size = dray_dtype_size(r->dtype);
    uint64_t wrong = 0;
    for (uint64_t i = 0; i < r->count; i++) {
        uint64_t bits = 0;
        memcpy(&bits, r->at + (int64_t)i * r->step, size);
        uint64_t keep = size < 8 ? ((uint64_t)1 << 8 * size) - 1 : UINT64_MAX;
        uint64_t source = bits_of(from, mixed(r->hash, r->first + i));
        wrong +=
            from == r->dtype ? bits != (source & keep) : !converted(from, source, r->dtype, bits);
    }
    return wrong;
}

/* Returns the scale of the element with this global index; NaN when this member does not hold
 * it. */
static double scale_of(const scale_view *v, uint64_t index)
{
    int64_t at[DRAY_MAX_DIMS] = {0};
    bool whole = v->quant->kind == DRAY_QUANT_TENSOR;
    const dray_tensor_info *t = dray_layout_tensor(v->layout, v->quant->scales);
    uint64_t plane = index / (uint64_t)v->columns / (uint64_t)v->rows;
    for (uint32_t d = t->ndim; d-- > 0 && !whole;) {
        if (d + 1 == t->ndim)
            at[d] = (int64_t)(index % (uint64_t)v->columns) / v->quant->block[1];
        else if (d + 2 == t->ndim)
            at[d] =
                (int64_t)(index / (uint64_t)v->columns % (uint64_t)v->rows) / v->quant->block[0];
        else {
            at[d] = (int64_t)(plane % (uint64_t)t->shape[d]);
            plane /= (uint64_t)t->shape[d];
        }
    }
    for (uint32_t i = 0; i < v->count; i++) {
        const dray_block *block = dray_layout_block(v->layout, v->blocks[i]);
        uint64_t offset = block->offset;
        bool inside = true;
        for (uint32_t d = 0; d < t->ndim; d++) {
            inside &= at[d] >= block->start[d] && at[d] < block->start[d] + block->extent[d];
            offset += (uint64_t)(at[d] - block->start[d]) * (uint64_t)block->stride[d];
        }
        float scale;
        if (!inside)
            continue;
        memcpy(&scale, (uint8_t *)dray_region_base(v->regions[block->region]) + offset,
               sizeof scale);
        return (double)scale;
    }
    return NAN;
}

static double value_e4m3(uint8_t bits)
{
    int exponent = bits >> 3 & 15, mantissa = bits & 7;
    double value = exponent ? ldexp(8 + mantissa, exponent - 10) : ldexp(mantissa, -9);
    return bits & 0x80 ? -value : value;
}

/* Counts the wrong elements of a row. The product of a value and its scale may differ from the
 * source by about half of the value's last place. */
static uint64_t check_quantised_row(const row *r, dray_dtype from)
{
    uint64_t wrong = 0;
    double scale = 0;
    int64_t width = r->scales->quant->kind == DRAY_QUANT_TENSOR ? 0 : r->scales->quant->block[1];
    for (uint64_t i = 0; i < r->count; i++) {
        uint64_t index = r->first + i;
        if (i == 0 || (width && index % (uint64_t)r->scales->columns % (uint64_t)width == 0))
            scale = scale_of(r->scales, index);
        double source = value_of(from, bits_of(from, mixed(r->hash, index)));
        double found = value_e4m3(*(r->at + (int64_t)i * r->step)) * scale;
        wrong += !(fabs(found - source) <= fabs(source) / 15 + scale / 1000);
    }
    return wrong;
}

void bench_fill(const dray_layout *layout, dray_region *const *regions, bool tied)
{
    for (uint32_t b = 0; b < dray_layout_block_count(layout); b++) {
        const dray_block *block = dray_layout_block(layout, b);
        const char *name = dray_layout_tensor(layout, block->tensor)->name;
        each_row(layout, regions, block, bench_hash_of(name, tied), 0, NULL, fill_row);
    }
}

dray_dtype bench_source_dtype(const dray_tensor_info *tensor, bool tied,
                              dray_layout *const *sources, uint32_t count)
{
    uint32_t index;
    const char *name = tensor->name;
    for (uint32_t i = 0; i < count; i++)
        if (dray_layout_find(sources[i], name, &index, NULL) == DRAY_OK)
            return (dray_dtype)dray_layout_tensor(sources[i], index)->dtype;
    if (tied && count && strcmp(name, "lm_head.weight") == 0) {
        dray_tensor_info embedding = *tensor;
        embedding.name = "model.embed_tokens.weight";
        return bench_source_dtype(&embedding, false, sources, count);
    }
    return (dray_dtype)tensor->dtype;
}

uint32_t *bench_blocks_by_tensor(const dray_layout *layout, uint32_t **first)
{
    uint32_t blocks = dray_layout_block_count(layout);
    uint32_t *at = calloc((size_t)dray_layout_tensor_count(layout) + 2, sizeof *at);
    uint32_t *order = calloc((size_t)blocks + 1, sizeof *order);
    if (!at || !order)
        abort();
    for (uint32_t b = 0; b < blocks; b++)
        at[dray_layout_block(layout, b)->tensor + 2]++;
    for (uint32_t t = 0; t < dray_layout_tensor_count(layout); t++)
        at[t + 2] += at[t + 1];
    for (uint32_t b = 0; b < blocks; b++)
        order[at[dray_layout_block(layout, b)->tensor + 1]++] = b;
    *first = at;
    return order;
}

bool *bench_scales_of(const dray_layout *layout)
{
    uint32_t count = dray_layout_tensor_count(layout);
    bool *scales = calloc((size_t)count + 1, sizeof *scales);
    if (!scales)
        abort();
    for (uint32_t t = 0; t < count; t++) {
        const dray_quant *quant = dray_layout_quant(layout, t);
        if (quant)
            scales[quant->scales] = true;
        if (bench_is_formatted(layout, t))
            scales[quant->values] = scales[quant->second ? quant->second : quant->scales] = true;
    }
    return scales;
}

static bool read_host(void *user, uint32_t region, uint64_t offset, uint64_t bytes, uint64_t *bits)
{
    dray_region *const *regions = user;
    memcpy(bits, (const uint8_t *)dray_region_base(regions[region]) + offset, bytes);
    return true;
}

uint64_t bench_wrong(const dray_layout *layout, dray_region *const *regions, bool tied,
                     dray_layout *const *sources, uint32_t count, const char **first)
{
    uint64_t wrong = 0;
    uint32_t *starts, *blocks = bench_blocks_by_tensor(layout, &starts);
    bool *scales = bench_scales_of(layout);
    *first = NULL;
    for (uint32_t b = 0; b < dray_layout_block_count(layout); b++) {
        const dray_block *block = dray_layout_block(layout, b);
        const dray_tensor_info *t = dray_layout_tensor(layout, block->tensor);
        const dray_quant *quant = dray_layout_quant(layout, block->tensor);
        dray_dtype from = bench_source_dtype(t, tied, sources, count);
        scale_view view = {.layout = layout, .regions = regions, .quant = quant};
        if (scales[block->tensor])
            continue;
        if (quant) {
            view.blocks = blocks + starts[quant->scales];
            view.count = starts[quant->scales + 1] - starts[quant->scales];
            view.columns = t->ndim ? t->shape[t->ndim - 1] : 1;
            view.rows = t->ndim > 1 ? t->shape[t->ndim - 2] : 1;
        }
        bool converts = quant && from != (dray_dtype)t->dtype;
        uint64_t here =
            each_row(layout, regions, block, bench_hash_of(t->name, tied), from,
                     converts ? &view : NULL, converts ? check_quantised_row : check_row);
        if (here && !*first)
            *first = t->name;
        wrong += here;
    }
    free(starts);
    free(blocks);
    free(scales);
    wrong += bench_formats_wrong(layout, tied, sources, count, read_host,
                                 (void *)(uintptr_t)regions, first);
    return wrong;
}
