/* Formats whose scales belong to groups of a row's elements, on the CPU. */
#include "mover/kernels/formats.h"
#include "mover/kernels/kernels.h"
#include "mover/kernels/quant.h"

/* The dimensions of a box, the tensor's last one last. */
typedef struct walk {
    int64_t extent[DRAY_MAX_DIMS];
    size_t group, groups; /* elements of a group, groups of a row */
    size_t rows, batch;   /* rows of a matrix; matrices */
    size_t together;      /* rows whose zero points are in one element */
} walk;

static walk walk_of(const dray__quant_box *box)
{
    walk w = {.rows = 1, .batch = 1};
    int last = DRAY_MAX_DIMS - 1;
    while (last > 0 && box->extent[last] == 1 && box->cell[last] == 1)
        last--;
    w.group = (size_t)box->cell[last];
    w.groups = (size_t)box->extent[last] / w.group;
    w.together = last > 0 ? (size_t)box->cell[last - 1] : 1;
    w.rows = last > 0 ? (size_t)box->extent[last - 1] : 1;
    for (int d = 0; d + 1 < last; d++)
        w.batch *= (size_t)box->extent[d];
    return w;
}

bool dray__format_known(int32_t dtype, int32_t kind)
{
    return (dtype == DRAY_F32 || dtype == DRAY_BF16 || dtype == DRAY_F16) &&
           kind >= DRAY_QUANT_MXFP8 && kind <= DRAY_QUANT_INT4_ZERO;
}

uint32_t dray__format_global(uint32_t most, int32_t as)
{
    return global_scale_of(most, (u32)as);
}

uint32_t dray__format_most(int32_t dtype, uint32_t amax)
{
    return widen(amax, (u32)dtype);
}

static void put_element(uint8_t *to, size_t at, u32 value, int32_t dtype)
{
    uint16_t half = (uint16_t)value;
    if (dtype == DRAY_F32)
        memcpy(to + at * 4, &value, 4);
    else if (dtype == DRAY_BF16 || dtype == DRAY_F16)
        memcpy(to + at * 2, &half, 2);
    else
        to[at] = (uint8_t)value;
}

/* Inlined where the format and the dtype are constants, so that the loops have no branches. */
#define EVERYWHERE static inline __attribute__((always_inline))

/* Stores a group: in bytes for MXFP8, else four bits for each element, the first one lowest. */
EVERYWHERE void put_group(const u32 format, const u32 *x, size_t count, const format_scale *s,
                          const u32 as, uint8_t *to)
{
    u32 element[8];
    for (size_t i = 0; i < count; i += 8) {
        u32 packed = 0;
        for (size_t k = 0; k < 8; k++)
            element[k] = format_element(format, x[i + k], s, as);
        for (u32 k = 0; k < 8; k++) {
            if (format == MXFP8)
                to[i + k] = (uint8_t)element[k];
            packed |= element[k] << (4 * k & 31);
        }
        if (format != MXFP8)
            memcpy(to + i / 2, &packed, 4);
    }
}

EVERYWHERE extremes extremes_of(const u32 *x, size_t count)
{
    extremes e = {0, 0};
    for (size_t i = 0; i < count; i++) {
        u32 a = x[i] & 0x7FFFFFFF, below = (u32)0 - (x[i] >> 31); /* all ones: less than 0 */
        e.down = larger(e.down, a & below);
        e.up = larger(e.up, a & ~below);
    }
    return e;
}

enum { MOST_GROUP = 256 };

EVERYWHERE void quantise(const u32 format, const u32 as, const dray__quant_box *box,
                         const void *values, uint32_t global, void *const parts[3])
{
    const size_t size = dray_dtype_size((dray_dtype)box->dtype);
    const dray__cast_fn floats = dray__cast_find(box->dtype, DRAY_F32);
    const walk w = walk_of(box);
    const size_t bytes = format == MXFP8 ? w.group : w.group / 2;
    const int32_t scale = format == NVFP4 ? DRAY_F8E4M3 : format >= INT4 ? box->as : DRAY_U8;
    uint32_t *zeros = format == INT4_ZERO ? parts[2] : NULL;
    const size_t words = (w.rows + w.together - 1) / w.together;
    u32 x[MOST_GROUP];
    if (zeros)
        memset(zeros, 0, w.batch * words * w.groups * sizeof *zeros);
    for (size_t r = 0; r < w.batch * w.rows; r++)
        for (size_t g = 0; g < w.groups; g++) {
            size_t at = r * w.groups + g;
            const void *from = (const uint8_t *)values + at * w.group * size;
            if (floats)
                floats(from, x, w.group);
            else
                memcpy(x, from, w.group * sizeof *x);
            extremes e = extremes_of(x, w.group);
            format_scale s = format_scale_of(format, &e, as, global);
            put_group(format, x, w.group, &s, as, (uint8_t *)parts[0] + at * bytes);
            put_element(parts[1], at, s.stored, scale);
            size_t row = r % w.rows, word = (r / w.rows * words + row / w.together) * w.groups + g;
            if (zeros)
                zeros[word] |= (u32)((int)s.zero + 8) << 4 * (row % w.together);
        }
}

/* XX(format, dtype in which its scales are computed) */
#define WAYS(XX)                                                                                   \
    XX(MXFP8, 0)                                                                                   \
    XX(MXFP4, 0)                                                                                   \
    XX(NVFP4, F32)                                                                                 \
    XX(NVFP4, BF16)                                                                                \
    XX(NVFP4, F16)                                                                                 \
    XX(INT4, F32)                                                                                  \
    XX(INT4, BF16)                                                                                 \
    XX(INT4, F16)                                                                                  \
    XX(INT4_ZERO, F32)                                                                             \
    XX(INT4_ZERO, BF16)                                                                            \
    XX(INT4_ZERO, F16)

void dray__format_quantise(const dray__quant_box *box, const void *values, uint32_t global,
                           void *const parts[3])
{
#define XX(of_kind, of_dtype)                                                                      \
    if (box->kind == of_kind && (of_kind <= MXFP4 || box->as == of_dtype))                         \
        quantise(of_kind, of_dtype, box, values, global, parts);
    WAYS(XX)
#undef XX
}
