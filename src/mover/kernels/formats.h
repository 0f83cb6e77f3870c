/* The arithmetic of formats whose scales belong to groups of a row's elements (docs/formats.md), in
 * the common subset of C17 and CUDA C++, so that the CPU and GPUs give the same bits. All numbers
 * are bits of f32; `as` is the dtype in which the packages compute, to which every step is rounded.
 *
 *   MXFP8      torchao 0.18, to_mx(float8_e4m3fn, 32, RCEIL)
 *   MXFP4      torchao 0.18, to_mx(float4_e2m1fn_x2, 32, EVEN); of numbers of at least 2^-124
 *              compressed-tensors has the same
 *   NVFP4, INT4, INT4_ZERO
 *              compressed-tensors 0.20: generate_gparam, calculate_qparams, quantize, pack_...
 */
#ifndef DRAY_MOVER_KERNELS_FORMATS_H
#define DRAY_MOVER_KERNELS_FORMATS_H

#include "mover/kernels/floats.h"

/* Kinds by the values of dray/model.h. */
enum { DEEPGEMM = 3, MXFP8, MXFP4, NVFP4, INT4, INT4_ZERO };

#define INFINITE 0x7F800000u
#define NOT_A_NUMBER 0x7FC00000u

/* The largest magnitudes of a group: of its elements from 0 on, and of those below. A NaN is larger
 * than infinity. */
typedef struct extremes {
    u32 up, down;
} extremes;

/* A group's scale, as it is stored, and the factor or divisor of its elements; and its zero point,
 * -8 to 7. */
typedef struct format_scale {
    u32 stored, by;
    float zero;
} format_scale;

/* Rounds to `as`. All NaNs become the same one, because processors make different ones. */
INLINE u32 round_as(u32 bits, u32 as)
{
    if ((bits & 0x7FFFFFFF) > INFINITE)
        return NOT_A_NUMBER;
    return as == F32 ? bits : widen(narrow(bits, as), as);
}

INLINE u32 quotient(u32 a, u32 b, u32 as)
{
    return round_as(FLOAT_BITS(BITS_FLOAT(a) / BITS_FLOAT(b)), as);
}

INLINE u32 larger(u32 a, u32 b)
{
    return a > b ? a : b;
}

INLINE void add_extreme(extremes *e, u32 bits)
{
    u32 a = bits & 0x7FFFFFFF;
    if (bits >> 31)
        e->down = larger(e->down, a);
    else
        e->up = larger(e->up, a);
}

/* ---- elements -------------------------------------------------------------------------------- */

/* Rounds to nearest even among 0, 0.5, 1, 1.5, 2, 3, 4, 6; larger numbers become 6. From 1 on the
 * code is the exponent and one bit of the fraction, below 1 it is a multiple of 0.5. */
INLINE u32 e2m1_magnitude(u32 a)
{
    u32 below = FLOAT_BITS(BITS_FLOAT(a) + 6291456.0f) & 7; /* 1.5 * 2^22: in units of 0.5 */
    u32 above = ((a + 0x1FFFFF + (a >> 22 & 1)) >> 22) - 2 * 127 + 2;
    u32 code = a < 0x3F800000 ? below : above;
    return code < 7 ? code : 7;
}

/* Clamps a number to -8..7, rounds it to nearest even, and adds 8. */
INLINE u32 four_bits(float x)
{
    x = x < -8.0f ? -8.0f : x > 7.0f ? 7.0f : x;
    return (FLOAT_BITS(x + 12582912.0f) + 8) & 15; /* 1.5 * 2^23: the last bits are the number */
}

/* Returns the stored bits of a number that was already multiplied by, or divided by, s->by. */
INLINE u32 format_code(u32 format, u32 f, const format_scale *s, u32 as)
{
    u32 a = f & 0x7FFFFFFF;
    if (format == MXFP8) {
        u32 e = narrow(f, E4M3);
        return (e & 0x7F) == 0x7F ? 0x7F : e;
    }
    if (format == MXFP4)
        return a > INFINITE ? 3 : e2m1_magnitude(a) | f >> 31 << 3;
    if (format == NVFP4)
        return a > INFINITE || a == 0 ? 0 : e2m1_magnitude(a) | f >> 31 << 3;
    f = round_as(f, as);
    if (format == INT4_ZERO)
        f = round_as(FLOAT_BITS(BITS_FLOAT(f) + s->zero), as);
    return (f & 0x7FFFFFFF) > INFINITE ? 8 : four_bits(BITS_FLOAT(f));
}

INLINE u32 format_element(u32 format, u32 bits, const format_scale *s, u32 as)
{
    float by = BITS_FLOAT(s->by);
    u32 f = format <= MXFP4 ? FLOAT_BITS(BITS_FLOAT(bits) * by)
                            : FLOAT_BITS(BITS_FLOAT(round_as(bits, as)) / by);
    return format_code(format, f, s, as);
}

/* ---- elements without a division each -----------------------------------------------------------
 *
 * A product with the inverse is within three units in the last place of the rounded quotient. Both
 * have the same code unless a number at which the code changes is as near: these are the numbers
 * whose last bits, those of `mask`, are `tie`. In that case, or when the inverse is not exact
 * enough, the quotient itself must be taken. */
typedef struct format_inverse {
    u32 by; /* 0 means divide */
    u32 mask, tie;
} format_inverse;

INLINE format_inverse format_inverse_of(u32 format, const format_scale *s, u32 as)
{
    u32 normal = s->by - 0x00800000 < 0x7E800000 - 0x00800000; /* 2^-126 to 2^126 */
    format_inverse v = {normal ? FLOAT_BITS(1.0f / BITS_FLOAT(s->by)) : 0, 0xFFFFF, 0};
    if (format >= INT4 && as != F32) { /* codes change at numbers that `as` can represent */
        v.mask = as == BF16 ? 0xFFFF : 0x1FFF;
        v.tie = as == BF16 ? 0x8000 : 0x1000;
    }
    if (format == INT4_ZERO && as == F32) /* a sum with a zero point rounds anywhere */
        v.by = 0;
    return v;
}

/* May the quotient have another code than `product`? NVFP4's codes do not change below 1/4 (and
 * 1/8 is far enough from it), except that zero and its sign must come from the quotient. */
INLINE u32 format_may_differ(u32 format, u32 product, const format_inverse *v)
{
    u32 near = ((product - v->tie + 4) & v->mask) <= 8;
    if (format != NVFP4)
        return near;
    return (near && (product & 0x7FFFFFFF) > 0x3E000000) || 2 * product - 1 < 0x1B000000;
}

/* ---- scales ---------------------------------------------------------------------------------- */

INLINE format_scale scale_of_mxfp8(u32 most)
{
    format_scale s = {255, NOT_A_NUMBER, 0};
    u32 d = FLOAT_BITS(BITS_FLOAT(most) / 448.0f);
    if (most > INFINITE)
        return s;
    s.stored = d == INFINITE  ? 254
               : d < 0x800000 ? (u32)(d > 0x400000)
                              : (d >> 23) + ((d & 0x7FFFFF) != 0);
    s.by = s.stored == 254 ? 0x400000 : s.stored ? (254 - s.stored) << 23 : 0x3F800000;
    return s;
}

INLINE format_scale scale_of_mxfp4(u32 most)
{
    format_scale s = {255, 0, 0}; /* x * 0, which equals x / infinity */
    u32 e = (most + 0x200000) >> 23;
    if (most > INFINITE)
        return s;
    s.stored = e > 2 ? e - 2 : 0;
    s.by = (254 - larger(s.stored, 1)) << 23;
    return s;
}

/* Returns the global scale of tensors whose largest magnitude is `most`. */
INLINE u32 global_scale_of(u32 most, u32 as)
{
    u32 m = round_as(most, as), least = as == F16 ? 0x38800000 : 0x800000; /* the least normal */
    if (m > INFINITE)
        return 0x3F800000;
    u32 inverse = quotient(0x3F800000, larger(m, least), as);
    u32 g = round_as(FLOAT_BITS(BITS_FLOAT(inverse) * (448.0f * 6.0f)), as);
    return g >= INFINITE ? 0x3F800000 : g;
}

INLINE format_scale scale_of_nvfp4(u32 most, u32 as, u32 global)
{
    format_scale s = {0x7F, NOT_A_NUMBER, 0};
    u32 local = quotient(round_as(most, as), 0x40C00000, as);
    u32 scaled = FLOAT_BITS(BITS_FLOAT(global) * BITS_FLOAT(local));
    if ((scaled & 0x7FFFFFFF) > INFINITE)
        return s;
    s.stored = narrow(scaled, E4M3);
    if (s.stored == 0)
        s.stored = 0x20; /* 0.125 */
    s.by = FLOAT_BITS(BITS_FLOAT(widen(s.stored, E4M3)) / BITS_FLOAT(global));
    return s;
}

INLINE u32 epsilon_of(u32 as)
{
    return as == BF16 ? 0x3C000000 : as == F16 ? 0x3A800000 : 0x34000000;
}

INLINE format_scale scale_of_int4(u32 most, u32 as)
{
    format_scale s = {0, 0, 0};
    u32 by = quotient(round_as(most, as), 0x40F00000, as); /* 7.5 */
    s.by = by ? by : epsilon_of(as);
    s.stored = narrow(s.by, as);
    return s;
}

INLINE format_scale scale_of_int4_zero(const extremes *e, u32 as)
{
    format_scale s = {0, 0, 0};
    u32 up = round_as(e->up, as), down = round_as(e->down, as);
    u32 width = round_as(FLOAT_BITS(BITS_FLOAT(up) + BITS_FLOAT(down)), as);
    u32 by = quotient(width, 0x41700000, as); /* 15 */
    u32 z = quotient(down | 0x80000000, by, as);
    z = round_as(FLOAT_BITS(-8.0f - BITS_FLOAT(z)), as);
    if ((z & 0x7FFFFFFF) <= INFINITE)
        s.zero = (float)(int)four_bits(BITS_FLOAT(z)) - 8.0f;
    s.by = by ? by : epsilon_of(as);
    s.stored = narrow(s.by, as);
    return s;
}

INLINE format_scale format_scale_of(u32 format, const extremes *e, u32 as, u32 global)
{
    u32 most = larger(e->up, e->down);
    if (format == MXFP8)
        return scale_of_mxfp8(most);
    if (format == MXFP4)
        return scale_of_mxfp4(most);
    if (format == NVFP4)
        return scale_of_nvfp4(most, as, global);
    return format == INT4 ? scale_of_int4(most, as) : scale_of_int4_zero(e, as);
}

#endif
