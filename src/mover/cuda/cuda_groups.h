/* The kernel that quantises in groups of a row's elements (formats.h has the arithmetic): a
 * part of cuda_kernels.cu, included by it alone. A thread processes eight elements,
 * and the threads of a group are adjacent in a warp; as C, one thread processes a whole group. */
#ifndef DRAY_MOVER_CUDA_CUDA_GROUPS_H
#define DRAY_MOVER_CUDA_CUDA_GROUPS_H

#include "mover/cuda/cuda_device.h"
#include "mover/kernels/formats.h"

#define MOST_ROWS 2 /* rows that a thread has under way at once */

#if defined(__CUDACC__)
#define MOST_EIGHTS 1 /* eights of a group that one thread processes */
/* Returns the largest value among the `lanes` threads of a group. All threads of a warp must call
 * it. */
INLINE u32 lanes_most(u32 value, u32 lanes)
{
    UNROLL
    for (u32 i = 16; i > 0; i /= 2)
        if (i < lanes)
            value = larger(value, __shfl_xor_sync(0xFFFFFFFF, value, (int)i));
    return value;
}
#else
#define MOST_EIGHTS (DRAY__GPU_GROUP / 8)
INLINE u32 lanes_most(u32 value, u32 lanes)
{
    (void)lanes;
    return value;
}
#endif

/* The matrix (the last two dimensions) that a tile's rows belong to. Addresses are those of its
 * first element; row and zero_row are the indices of its first row in sums. */
typedef struct matrix {
    u64 source, destination, scale, second;
    int64_t source_row, destination_row, scale_row, scale_step;
    u64 row, zero_row;
    u32 first, last;
} matrix;

INLINE matrix matrix_of(const dray__gpu_quant *q, u32 index)
{
    matrix m;
    u32 number = index / q->strips, rows = (u32)q->extent[2];
    u32 j = number / (u32)q->extent[1], i = number - j * (u32)q->extent[1];
    m.source = q->source + j * (u64)q->source_stride[0] + i * (u64)q->source_stride[1];
    m.destination =
        q->destination + j * (u64)q->destination_stride[0] + i * (u64)q->destination_stride[1];
    m.scale = q->scales + j * (u64)q->scale_stride[0] + i * (u64)q->scale_stride[1];
    m.second = q->second + j * (u64)q->second_stride[0] + i * (u64)q->second_stride[1];
    m.source_row = q->source_stride[2];
    m.destination_row = q->destination_stride[2];
    m.scale_row = q->scale_stride[2];
    m.scale_step = q->scale_stride[3];
    u64 of = (q->start[0] + j) * q->shape[1] + q->start[1] + i;
    m.row = of * q->shape[2] + q->start[2];
    m.zero_row = of * ((q->shape[2] - 1) / 8 + 1) + q->start[2] / 8;
    m.first = (index - number * q->strips) * q->tile_rows;
    m.last = rows - m.first < q->tile_rows ? rows : m.first + q->tile_rows;
    return m;
}

/* ---- eight elements ----------------------------------------------------------------------------
 */

INLINE group load_eight(const dray__gpu_quant *q, u64 at, u32 from)
{
    group g = {{0, 0, 0, 0, 0, 0, 0, 0}};
    UNROLL
    for (u32 i = 0; i < 8; i++)
        place(&g, i, (u32)load_element(at + i * (u64)q->source_stride[3], size_of(from)),
              size_of(from));
    return g;
}

/* Adds the largest magnitudes of eight elements. In formats without a zero point, negative elements
 * count together with the others. */
INLINE void add_extremes(extremes *e, const group *g, const u32 format, const u32 from)
{
    if (format != INT4_ZERO) {
        e->up = larger(e->up, group_most(g, from, 8));
        return;
    }
    if (from == BF16) {
        u32 up = 0, down = 0; /* the bits of a negative number exceed those of all others */
        UNROLL
        for (u32 i = 0; i < 4; i++) {
            up = MOST_OF_SIGNED_HALVES(up, g->v[i]);
            down = MOST_OF_HALVES(down, g->v[i]);
        }
        up = larger(up << 16, up & 0xFFFF0000);
        down = larger(down << 16, down & 0xFFFF0000);
        e->up = larger(e->up, up);
        e->down = larger(e->down, down >> 31 ? down & 0x7FFFFFFF : 0);
        return;
    }
    UNROLL
    for (u32 i = 0; i < 8; i++)
        add_extreme(e, widen(pick(g, i, size_of(from)), from));
}

INLINE u32 bits_of_code(const u32 format)
{
    return format == MXFP8 ? 8 : 4;
}

/* Returns the codes of eight elements, of eight or four bits each, by the format's definition, with
 * divisions. */
INLINE u64 define_eight(group g, u32 format, u32 from, format_scale s, u32 as)
{
    u64 out = 0;
    UNROLL
    for (u32 i = 0; i < 8; i++)
        out |= (u64)format_element(format, widen(pick(&g, i, size_of(from)), from), &s, as)
               << bits_of_code(format) * i;
    return out;
}

/* Returns the magnitude of E2M1 that is nearest to a finite number. After a multiplication by
 * 2^-126 the f32 has the same bits as E2M1, for subnormals and normals, with 22 more bits of
 * fraction; one integer rounding remains. The product itself is inexact only for numbers within two
 * units in the last place of a tie, which the callers check. */
INLINE u32 near_e2m1(u32 f)
{
    u32 r = FLOAT_BITS(BITS_FLOAT(f & 0x7FFFFFFF) * 1.17549435e-38f); /* 2^-126 */
    u32 code = (r + 0x1FFFFF + (r >> 22 & 1)) >> 22;
    return code < 7 ? code : 7;
}

/* Rounds a finite number to `as`. */
INLINE u32 finite_as(u32 bits, const u32 as)
{
    return as == BF16 ? finite_as_bf16(bits) : round_as(bits, as);
}

/* ---- eight numbers of bf16, two at once -------------------------------------------------------
 */

#define SMALL 6.103515625e-5f /* 2^-14 */

/* Does this way of quantising process bf16 in pairs? */
INLINE u32 in_pairs(const u32 format, const u32 from, const u32 as)
{
    return format <= MXFP4 ? from == BF16 : as == BF16;
}

/* Returns eight elements as bf16. */
INLINE group as_bf16(const group *g, const u32 from)
{
    group h = *g;
    if (from != F32)
        return h;
    UNROLL
    for (u32 i = 0; i < 4; i++)
        h.v[i] = pair_to_bf16(BITS_FLOAT(g->v[2 * i]), BITS_FLOAT(g->v[2 * i + 1]));
    return h;
}

/* The codes of E2M1 of a pair of f16 that are 2^-14 of the numbers: these have E2M1's bits and nine
 * more bits of fraction. `half` is added to them, so that they are rounded. */
INLINE u32 pair_e2m1(u32 pair, u32 half)
{
    return LEAST_OF_HALVES(((pair & 0x7FFF7FFF) + half) >> 9 & 0x007F007F, 0x00070007);
}

/* The four-bit codes of a pair of bf16: clamped to -8..7 and rounded to nearest even by adding
 * 1.5 * 2^7, whose last bit counts as 1. */
INLINE u32 pair_int4(u32 pair)
{
    u32 n = add_bf16(clamp_bf16(pair, 0xC100C100, 0x40E040E0), 0x43404340);
    return (n + 0x00080008) & 0x000F000F;
}

/* How near products are to numbers at which their codes change, because codes are those of
 * quotients: the bits below a code's, shifted to the top of a word, with four units in the last
 * place added. Where these are at most eight units, the quotient must decide. */
enum { TIE_E2M1 = 11, TIE_BF16 = 16 };

INLINE u32 nearer(u32 near, float product, const u32 format)
{
    u32 bits = FLOAT_BITS(product);
    bits = format == NVFP4 ? (bits << TIE_E2M1) + (4u << TIE_E2M1)
                           : (bits << TIE_BF16) + (0x8004u << TIE_BF16);
    return bits < near ? bits : near;
}

/* Are there numbers of bf16 other than 0 among these eight that are less than 2^-100? */
INLINE u32 has_tiny(const group *g)
{
    u32 least = ~0u;
    UNROLL
    for (u32 i = 0; i < 4; i++)
        least = LEAST_OF_SUMS(g->v[i] & 0x7FFF7FFF, 0xFFFFFFFF, least);
    least = LEAST_OF_HALVES(least, least >> 16 | least << 16);
    return (least & 0xFFFF) < 0x0D80 - 1;
}

/* Returns the codes of eight finite numbers. by: their factor; for E2M1 2^-14 of it. Sets *doubt if
 * the quotients must decide. */
INLINE u64 pairs_codes(const group *g, const u32 format, float by, float zero, u32 *doubt)
{
    const u32 tie = format == NVFP4 ? TIE_E2M1 : TIE_BF16;
    u32 near = ~0u, codes[4], zeros = pair_to_bf16(zero, zero);
    UNROLL
    for (u32 i = 0; i < 4; i++) {
        u32 v = g->v[i], pair;
        float low = BITS_FLOAT(v << 16), high = BITS_FLOAT(v & 0xFFFF0000);
        /* A product of 0 is no tie: it becomes a number that is none, and far too small to matter.
         */
        low = format == NVFP4 ? MULTIPLY_ADD(low, by, 1e-30f) : low * by;
        high = format == NVFP4 ? MULTIPLY_ADD(high, by, 1e-30f) : high * by;
        if (format > MXFP4)
            near = nearer(nearer(near, low, format), high, format);
        if (format == MXFP8) {
            codes[i] = pair_to_e4m3(low, high);
        } else if (format == MXFP4) {
            pair = pair_to_f16(low, high); /* exact near a tie: bf16 has 8 bits of precision */
            codes[i] =
                pair_e2m1(pair, 0x00FF00FF + (pair >> 9 & 0x00010001)) | (pair >> 12 & 0x00080008);
        } else if (format == NVFP4) {
            /* No product is a tie, or it is in doubt. Zero has no sign. */
            pair = pair_to_f16_down(low, high);
            codes[i] = pair_e2m1(pair, 0x01000100) | (add_bf16(v, 0) >> 12 & 0x00080008);
        } else if (format > NVFP4) {
            pair = pair_to_bf16(low, high);
            codes[i] = pair_int4(format == INT4_ZERO ? add_bf16(pair, zeros) : pair);
        }
    }
    *doubt = format > MXFP4 && near <= 8u << tie;
    if (format == NVFP4) /* a quotient may be 0, and then has no sign */
        *doubt |= has_tiny(g);
    if (format == MXFP8)
        return PACK_HALVES(codes[0], codes[1]) | (u64)PACK_HALVES(codes[2], codes[3]) << 32;
    u32 first = codes[0] + (codes[1] << 8), second = codes[2] + (codes[3] << 8);
    return PACK_HALVES(first + (first >> 12), second + (second >> 12));
}

/* ---- eight numbers one by one ------------------------------------------------------------------
 */

/* Returns the same as define_eight for finite numbers, with multiplications instead of divisions.
 * Sets *doubt if a quotient's code may differ from the product's. */
INLINE u64 format_eight(const group *g, const u32 format, const u32 from, const format_scale *s,
                        const format_inverse *v, const u32 as, u32 *doubt)
{
    const u32 in = size_of(from);
    u64 out = 0;
    if (format == MXFP8) {
        const float by = BITS_FLOAT(s->by);
        UNROLL
        for (u32 i = 0; i < 8; i += 2)
            out |= (u64)pair_to_e4m3(BITS_FLOAT(widen(pick(g, i, in), from)) * by,
                                     BITS_FLOAT(widen(pick(g, i + 1, in), from)) * by)
                   << 8 * i;
        *doubt = 0;
        return out;
    }
    u32 codes = 0;
    *doubt = format > MXFP4 && v->by == 0;
    UNROLL
    for (u32 i = 0; i < 8; i++) {
        u32 x = widen(pick(g, i, in), from), code;
        if (format > MXFP4 && as != from)
            x = finite_as(x, as);
        u32 f = FLOAT_BITS(BITS_FLOAT(x) * BITS_FLOAT(format > MXFP4 ? v->by : s->by));
        if (format > MXFP4)
            *doubt |= format_may_differ(format, f, v);
        else if (from == F32) /* fractions of bf16 and f16 are too short for it */
            *doubt |= ((f + 4) & 0xFFFFF) <= 8;
        if (format == MXFP4) {
            code = near_e2m1(f) | (f >> 28 & 8);
        } else if (format == NVFP4) {
            u32 a = f & 0x7FFFFFFF; /* zero has no sign */
            code = near_e2m1(f) | ((f & (0 - a)) >> 28 & 8);
        } else {
            f = finite_as(f, as);
            if (format == INT4_ZERO)
                f = finite_as(FLOAT_BITS(BITS_FLOAT(f) + s->zero), as);
            code = four_bits(BITS_FLOAT(f));
        }
        codes |= code << 4 * i;
    }
    return codes;
}

/* Returns how many elements of the values' dtype hold eight numbers: 8 bytes, 4 bytes with two
 * numbers each, or one word. */
INLINE u32 stored_of_eight(const u32 format)
{
    return format == MXFP8 ? 8 : format >= INT4 ? 1 : 4;
}

INLINE u32 stored_size(const u32 format)
{
    return format >= INT4 ? 4 : 1;
}

/* Returns the part of eight numbers in their row's sum. factors: of their columns, turned over
 * where elements are bytes. */
INLINE u64 sum_of_eight(u64 eight, const u32 format, const u32 *factors)
{
    u32 v[2] = {(u32)eight, (u32)(eight >> 32)};
    if (stored_size(format) == 4)
        return (u64)factors[0] * v[0];
    return bytes_sum(v, factors, stored_of_eight(format) / 4);
}

/* Stores the elements one by one. */
INLINE void store_eight(const dray__gpu_quant *q, u64 at, u64 eight, const u32 format)
{
    for (u32 i = 0; i < stored_of_eight(format); i++)
        store_element(at + i * (u64)q->destination_stride[3],
                      stored_size(format) == 4 ? (u32)eight : (u32)(eight >> 8 * i) & 0xFF,
                      stored_size(format));
}

/* Stores the elements at once: they are adjacent and aligned. */
INLINE void put_eight(u64 at, u64 eight, const u32 format)
{
    u32 v[2] = {(u32)eight, (u32)(eight >> 32)};
    if (format == MXFP8)
        put8(at, v);
    else
        put4(at, v[0]);
}

/* ---- scales ------------------------------------------------------------------------------------
 */

/* Returns MXFP8's scale of a usual magnitude. Its exponent is that of most / 448, rounded up. 448
 * is 1.75 * 2^8, and no quotient that is not a power of two is rounded to one. */
INLINE format_scale scale_near_mxfp8(u32 most)
{
    format_scale s = {(most >> 23) - 8 + ((most & 0x7FFFFF) > 0x600000), 0, 0};
    s.by = (254 - s.stored) << 23;
    return s;
}

/* Magnitudes of which sixths and the like are far from the least and the largest f32. */
INLINE u32 is_usual(u32 most)
{
    return most - 0x10000000 < 0x6F000000 - 0x10000000; /* 2^-95 to 2^95 */
}

/* Fills *s for elements that are processed in pairs, and returns their factor, or 0 where quotients
 * must decide. A number of bf16, multiplied by the inverse of 6, 7.5 or 15 and rounded to bf16, is
 * the rounded quotient: no quotient is near a tie without being exact. Of NVFP4's scales only the
 * stored form is filled in; `inverses` has their factors. */
INLINE float pairs_scale(format_scale *s, const extremes *e, const u32 format, u32 global,
                         const u32 *inverses)
{
    u32 most = larger(e->up, e->down), usual;
    if (format <= MXFP4) {
        usual = format == MXFP8 ? is_usual(most) : most < INFINITE;
        *s = format == MXFP8 ? scale_near_mxfp8(most) : scale_of_mxfp4(most);
        return usual ? BITS_FLOAT(s->by) * (format == MXFP8 ? 1.0f : SMALL) : 0;
    }
    if (format == INT4_ZERO)
        most = finite_as_bf16(FLOAT_BITS(BITS_FLOAT(e->up) + BITS_FLOAT(e->down)));
    usual = is_usual(most);
    if (format == NVFP4) {
        u32 local = finite_as_bf16(FLOAT_BITS(BITS_FLOAT(most) * (1.0f / 6)));
        u32 stored = pair_to_e4m3(BITS_FLOAT(global) * BITS_FLOAT(local), 0) & 0x7F;
        s->stored = stored ? stored : 0x20; /* as scale_of_nvfp4 */
        return usual ? BITS_FLOAT(inverses[s->stored]) : 0;
    }
    s->by = finite_as_bf16(FLOAT_BITS(BITS_FLOAT(most) * (format == INT4 ? 2.0f / 15 : 1.0f / 15)));
    s->stored = s->by >> 16;
    float inverse = inverse_of(BITS_FLOAT(s->by));
    if (format == INT4_ZERO) {
        float zero = BITS_FLOAT(e->down) * inverse;
        usual &= nearer(~0u, zero, format) > 8u << TIE_BF16;
        zero = BITS_FLOAT(finite_as_bf16(FLOAT_BITS(zero))) - 8.0f;
        s->zero = (float)(int)four_bits(BITS_FLOAT(finite_as_bf16(FLOAT_BITS(zero)))) - 8.0f;
    }
    return usual ? inverse : 0;
}

/* Returns the factor of elements of NVFP4 whose scale is stored as `stored`, for pairs_codes, or 0
 * where it is not exact, or might make an element 0. */
INLINE u32 inverse_of_nvfp4(u32 stored, u32 global)
{
    float by = BITS_FLOAT(widen(stored, E4M3)) / BITS_FLOAT(global);
    /* From 2^-100 to 2^40: numbers of at least 2^-100 have no quotient of 0. */
    return by >= 7.8886091e-31f && by <= 1.0995116e12f ? FLOAT_BITS(1.0f / by * SMALL) : 0;
}

/* The codes of eight elements and their scale, by the formats' definitions. */
typedef struct defined {
    u64 codes;
    format_scale s;
} defined;

OUTLINE defined define_all(group g, u32 format, u32 from, extremes e, u32 as, u32 global)
{
    defined d;
    d.s = format_scale_of(format, &e, as, global);
    d.codes = define_eight(g, format, from, d.s, as);
    return d;
}

/* Returns the bytes of a scale. */
INLINE u32 scale_bytes(const u32 format, const u32 as)
{
    return format < INT4 ? 1 : size_of(as);
}

INLINE void keep_scale(uint8_t *kept, u32 stored, const u32 format, const u32 as)
{
    if (scale_bytes(format, as) == 1)
        *kept = (uint8_t)stored;
    else if (scale_bytes(format, as) == 2)
        *(uint16_t *)kept = (uint16_t)stored;
    else
        *(u32 *)kept = stored;
}

/* Stores a scale in its dtype. In views, its address may be unaligned. */
INLINE void store_scale(u64 at, u32 stored, const u32 format, const u32 as)
{
    if (format < INT4)
        put1(at, stored);
    else
        store_element(at, stored, size_of(as));
}

/* ---- tiles -------------------------------------------------------------------------------------
 */

/* Returns the elements of a group as packages have them. */
INLINE u32 usual_group(const u32 format)
{
    return format == NVFP4 ? 16 : 32;
}

/* What a thread knows of the eights that it processes in a tile, of which each row has one (as C,
 * those of a group). Addresses are of row 0 of the matrix. */
typedef struct column_of_eights {
    u64 source, destination, scale, in_step; /* in_step: bytes from element to element */
    u32 read[8 * MOST_EIGHTS], written[8 * MOST_EIGHTS]; /* factors of columns */
    u32 scale_factor, leads;                             /* leads: it stores the groups' scales */
    u32 own, group; /* eights; index of the group in the tile's row */
} column_of_eights;

/* A row that a thread has under way. */
typedef struct row_of_eights {
    group g[MOST_EIGHTS];
    u64 out[MOST_EIGHTS];
    extremes e;
    format_scale s;
    u32 there, doubt;
} row_of_eights;

INLINE void load_row(row_of_eights *r, const dray__gpu_quant *q, const matrix *m,
                     const column_of_eights *c, u32 b, const u32 fast, const u32 from)
{
    UNROLL
    for (u32 k = 0; k < MOST_EIGHTS; k++) {
        if (k >= c->own)
            break;
        u64 at = c->source + b * (u64)m->source_row + k * 8 * c->in_step;
        group g = ZEROS;
        r->g[k] = g;
        if (r->there)
            r->g[k] = fast ? load_group(at, size_of(from), 8) : load_eight(q, at, from);
    }
}

/* Finds the extremes of the row's group, together with the group's other threads. */
INLINE void find_extremes(row_of_eights *r, const column_of_eights *c, const u32 lanes,
                          const u32 pairs, const u32 format, const u32 from)
{
    r->e.up = r->e.down = 0;
    UNROLL
    for (u32 k = 0; k < MOST_EIGHTS; k++) {
        if (k >= c->own)
            break;
        group h = pairs ? as_bf16(&r->g[k], from) : r->g[k];
        add_extremes(&r->e, &h, format, pairs ? BF16 : from);
    }
    r->e.up = lanes_most(r->e.up, lanes);
    if (format == INT4_ZERO)
        r->e.down = lanes_most(r->e.down, lanes);
}

/* Computes the row's codes without a branch, or sets `doubt`. */
INLINE void find_codes(row_of_eights *r, const column_of_eights *c, u32 global, const u32 *inverses,
                       const u32 fast, const u32 format, const u32 from, const u32 as)
{
    format_scale s = {0, 0, 0};
    r->s = s;
    r->doubt = 1;
    if (!fast)
        return;
    if (in_pairs(format, from, as)) {
        float by = pairs_scale(&r->s, &r->e, format, global, inverses);
        r->doubt = by == 0;
        UNROLL
        for (u32 k = 0; k < MOST_EIGHTS; k++) {
            u32 doubt;
            if (k >= c->own)
                break;
            group h = as_bf16(&r->g[k], from);
            r->out[k] = pairs_codes(&h, format, by, r->s.zero, &doubt);
            r->doubt |= doubt;
        }
        return;
    }
    r->s = format == MXFP8 && is_usual(r->e.up) ? scale_near_mxfp8(r->e.up)
                                                : format_scale_of(format, &r->e, as, global);
    format_inverse v = format_inverse_of(format, &r->s, as);
    r->doubt = larger(r->e.up, r->e.down) >= INFINITE;
    UNROLL
    for (u32 k = 0; k < MOST_EIGHTS; k++) {
        u32 doubt;
        if (k >= c->own)
            break;
        r->out[k] = format_eight(&r->g[k], format, from, &r->s, &v, as, &doubt);
        r->doubt |= doubt;
    }
}

/* Stores a row's codes and scale, and adds their sums. keeps: the scale is kept in `room`, in the
 * tile's row `in_tile`. */
INLINE void store_row(const dray__gpu_launch *l, const dray__gpu_quant *q, const matrix *m,
                      const column_of_eights *c, const row_of_eights *r, u32 b, u64 row_factor,
                      u32 keeps, uint8_t *kept, totals *t, const u32 fast, const u32 format,
                      const u32 from, const u32 as)
{
    const u32 in = size_of(from), per = stored_of_eight(format);
    const u64 out_step = fast ? stored_size(format) : (u64)q->destination_stride[3];
    u64 to = c->destination + b * (u64)m->destination_row;
    UNROLL
    for (u32 k = 0; k < MOST_EIGHTS; k++) {
        if (k >= c->own)
            break;
        if (fast)
            put_eight(to + k * per * out_step, r->out[k], format);
        else
            store_eight(q, to + k * per * out_step, r->out[k], format);
    }
    if (c->leads && keeps)
        keep_scale(kept, r->s.stored, format, as);
    else if (c->leads)
        store_scale(c->scale + b * (u64)m->scale_row, r->s.stored, format, as);
    if (!l->wanted)
        return;
    u64 sums[2] = {0, 0};
    UNROLL
    for (u32 k = 0; k < MOST_EIGHTS; k++) {
        if (k >= c->own)
            break;
        sums[0] += group_sum(&r->g[k], c->read + 8 * k, in, 8);
        sums[1] += sum_of_eight(r->out[k], format, c->written + per * k);
    }
    t->of[0] += row_factor * sums[0];
    t->of[1] += row_factor * sums[1];
    if (c->leads)
        t->of[3] += row_factor * ((u64)c->scale_factor * r->s.stored);
}

/* The scales of some adjacent groups in all rows of a tile, kept in shared memory. */
typedef struct kept_scales {
    uint8_t *room;
    u32 bytes; /* of a row */
} kept_scales;

/* Writes the kept scales to memory, in words of four bytes where these are aligned. `scales` is the
 * address of the first one. */
INLINE void write_kept(const kept_scales *k, const matrix *m, u64 scales)
{
    const u32 wide = (scales | (u64)m->scale_row | k->bytes) % 4 == 0 ? 4 : 1;
    const u32 count = k->bytes / wide, rows = m->last - m->first;
    SYNC();
    for (u32 i = THREAD; i < rows * count; i += THREADS) {
        u32 r = i / count, w = i - r * count;
        u64 to = scales + (m->first + r) * (u64)m->scale_row + w * wide;
        const uint8_t *from = k->room + r * k->bytes + w * wide;
        if (wide == 4)
            put4(to, *(const u32 *)from);
        else
            put1(to, *from);
    }
    SYNC();
}

/* Quantises the rows of one tile; `together` of them share a word of zero points. A thread has
 * several rows under way. fast: elements and codes are contiguous and aligned, and the compiler
 * knows the dtypes. */
INLINE void quantise_groups(const dray__gpu_launch *l, const dray__gpu_quant *q, const matrix *m,
                            const u64 *factors, u32 global, const u32 *inverses, uint8_t *room,
                            totals *t, const u32 fast, const u32 format, const u32 from,
                            const u32 as)
{
    const u32 together = format == INT4_ZERO ? 8 : 1, in = size_of(from);
    const u32 batch = fast ? MOST_ROWS : 1;
    const u32 rows = together > batch ? together : batch; /* of a thread in a turn */
    const u32 eights = (u32)q->cell[3] / 8, per = stored_of_eight(format);
    const u32 pairs = fast && in_pairs(format, from, as), scale_size = scale_bytes(format, as);
#if defined(__CUDACC__)
    const u32 own = 1, lanes = fast && format < INT4 ? usual_group(format) / 8 : eights;
#else
    const u32 own = eights, lanes = 1;
#endif
    const u32 columns = (u32)(q->extent[3] / (8 * own));
    const u64 out_step = fast ? stored_size(format) : (u64)q->destination_stride[3];
    stand at = stand_in(columns);
    /* All threads make the same number of iterations, also those without elements. */
    for (u32 c = at.column, left = columns, first = 0; left > 0;
         c += at.across, first += at.across, left -= left < at.across ? left : at.across) {
        u64 eight = (u64)c * own, column = q->start[3] / 8 + eight, scale = eight / eights;
        u32 wide = left < at.across ? left : at.across;
        kept_scales kept = {room, wide / lanes * scale_size};
        column_of_eights mine;
        mine.own = own;
        mine.in_step = fast ? in : (u64)q->source_stride[3];
        UNROLL
        for (u32 i = 0; i < 8 * MOST_EIGHTS; i++) {
            if (i < 8 * own)
                mine.read[i] = column_factor(column * 8 + i);
            if (i < per * own)
                mine.written[i] = per == 8 ? mine.read[i] : column_factor(column * per + i);
            if (per > 1 && i < per * own && i % 4 == 3)
                turn_factors(&mine.written[i - 3]);
        }
        UNROLL
        for (u32 i = 0; i < 8 * MOST_EIGHTS; i++)
            if (i < per * own)
                KEEP(mine.written[i]);
        mine.scale_factor = column_factor(q->start[3] / q->cell[3] + scale);
        mine.leads = eight % eights == 0;
        mine.group = at.column / lanes;
        mine.source = m->source + eight * 8 * (fast ? in : (u64)q->source_stride[3]);
        mine.destination = m->destination + eight * per * out_step;
        mine.scale = m->scale + scale * (u64)m->scale_step;
        u32 keeps = fast && m->scale_step == scale_size &&
                    kept.bytes * (m->last - m->first) <= DRAY__GPU_KEPT;
        for (u32 next = m->first; next < m->last; next += at.down * rows) {
            /* Rows that share a word of zero points are adjacent, others are `down` apart. */
            const u32 step = together > 1 ? 1 : at.down;
            u32 begin = next + at.row * (together > 1 ? rows : 1), word = 0;
            for (u32 done = 0; done < rows; done += batch) {
                row_of_eights r[MOST_ROWS];
                u32 doubts = 0;
                UNROLL
                for (u32 i = 0; i < batch; i++) {
                    u32 b = begin + (done + i) * step;
                    r[i].there = c < columns && b < m->last;
                    load_row(&r[i], q, m, &mine, b, fast, from);
                }
                UNROLL
                for (u32 i = 0; i < batch; i++)
                    find_extremes(&r[i], &mine, lanes, pairs, format, from);
                UNROLL
                for (u32 i = 0; i < batch; i++) {
                    find_codes(&r[i], &mine, global, inverses, fast, format, from, as);
                    doubts |= (r[i].doubt & r[i].there) << i;
                }
                UNROLL
                for (u32 i = 0; i < batch; i++) {
                    UNROLL
                    for (u32 k = 0; k < MOST_EIGHTS; k++) {
                        if (k >= own || !(doubts >> i & 1))
                            break;
                        defined d = define_all(r[i].g[k], format, from, r[i].e, as, global);
                        r[i].out[k] = d.codes;
                        r[i].s = d.s;
                    }
                }
                UNROLL
                for (u32 i = 0; i < batch; i++) {
                    u32 b = begin + (done + i) * step, in_tile = b - m->first;
                    if (!r[i].there)
                        continue;
                    store_row(l, q, m, &mine, &r[i], b, factors[in_tile], keeps,
                              room + in_tile * kept.bytes + mine.group * scale_size, t, fast,
                              format, from, as);
                    word |= (u32)((int)r[i].s.zero + 8) << 4 * (done + i);
                }
            }
            if (format != INT4_ZERO || !mine.leads || c >= columns || begin >= m->last)
                continue;
            u64 second = m->second + begin / 8 * (u64)q->second_stride[2];
            store_element(second + scale * (u64)q->second_stride[3], word, 4);
            if (l->wanted & MOST)
                t->of[4] += row_factor(m->zero_row + begin / 8) * mine.scale_factor * word;
        }
        if (keeps)
            write_kept(&kept, m, m->scale + (u64)first * own / eights * (u64)m->scale_step);
    }
}

/* XX(format, dtype of the source, dtype in which scales are computed): compiled specially */
#define GROUP_WAYS(XX)                                                                             \
    XX(MXFP8, BF16, 0)                                                                             \
    XX(MXFP8, F32, 0)                                                                              \
    XX(MXFP4, BF16, 0)                                                                             \
    XX(MXFP4, F32, 0)                                                                              \
    XX(NVFP4, BF16, BF16)                                                                          \
    XX(NVFP4, F32, BF16)                                                                           \
    XX(NVFP4, F32, F32)                                                                            \
    XX(INT4, BF16, BF16)                                                                           \
    XX(INT4, F32, BF16)                                                                            \
    XX(INT4, F32, F32)                                                                             \
    XX(INT4_ZERO, BF16, BF16)                                                                      \
    XX(INT4_ZERO, F32, BF16)                                                                       \
    XX(INT4_ZERO, F32, F32)

/* There is a kernel for each format, so that none uses registers for another format. */
INLINE void each_tile(const dray__gpu_launch *l, u64 *factors, u32 *inverses, uint8_t *room,
                      const u32 format)
{
    totals t = {{0, 0, 0, 0, 0}, NOBODY};
    for (u32 i = BLOCK; i < l->count; i += BLOCKS) {
        const dray__gpu_quant *q = &l->quants[l->tiles[i].piece];
        matrix m = matrix_of(q, l->tiles[i].index);
        u32 fast =
            q->word == 8 && q->packed && (format >= INT4 || q->cell[3] == usual_group(format));
        u32 global = format == NVFP4 ? global_scale_of(l->most[q->first_most], q->as) : 0;
        if (SYNC_OR((int)stopped(l))) /* and no thread uses the last tile's factors any more */
            break;
        flush(l, &t, q->sum);
        for (u32 r = THREAD; r < m.last - m.first; r += THREADS)
            factors[r] = row_factor(m.row + m.first + r);
        for (u32 k = THREAD; k < 128 && format == NVFP4; k += THREADS)
            inverses[k] = inverse_of_nvfp4(k, global);
        SYNC();
#define XX(of_format, of_from, of_as)                                                              \
    if (fast && format == of_format && q->from == of_from && (of_as == 0 || q->as == of_as))       \
        quantise_groups(l, q, &m, factors, global, inverses, room, &t, 1, of_format, of_from,      \
                        of_as);                                                                    \
    else
        GROUP_WAYS(XX)
#undef XX
        quantise_groups(l, q, &m, factors, global, inverses, room, &t, 0, format, q->from, q->as);
    }
    if (l->wanted)
        flush(l, &t, NOBODY);
}

#define GROUPS(name, format)                                                                       \
    KERNEL(3) name(LAUNCH l)                                                                       \
    {                                                                                              \
        SHARED u64 factors[DRAY__GPU_GROUP_ROWS], room[DRAY__GPU_KEPT / 8];                        \
        SHARED u32 inverses[128];                                                                  \
        each_tile(&l, factors, inverses, (uint8_t *)room, format);                                 \
    }
GROUPS(dray_mxfp8, MXFP8)
GROUPS(dray_mxfp4, MXFP4)
GROUPS(dray_nvfp4, NVFP4)
GROUPS(dray_int4, INT4)
GROUPS(dray_int4_zero, INT4_ZERO)

#endif
