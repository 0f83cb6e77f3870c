/* Floats by their bits, in the common subset of C17 and CUDA C++: conversions between dtypes
 * (mover/kernels/kernels.h has their rounding). Included by the GPU's kernels, and by the CPU's
 * code that shares its arithmetic with them. */
#ifndef DRAY_MOVER_KERNELS_FLOATS_H
#define DRAY_MOVER_KERNELS_FLOATS_H

#if !defined(__CUDACC_RTC__)
#include <stdint.h>
#endif
#if !defined(__CUDACC__)
#include <string.h>
#endif

typedef uint32_t u32;
typedef uint64_t u64;

/* Dtypes and scale formats by the values of dray/model.h. */
enum { F64 = 1, F32 = 2, BF16 = 3, F16 = 4, E4M3 = 5, E5M2 = 6, UE8M0 = 1 };

#if defined(__CUDACC__)
#define INLINE static __device__ __forceinline__
#define FLOAT_BITS(f) __float_as_uint(f)
#define BITS_FLOAT(b) __uint_as_float(b)
#define DOUBLE_BITS(d) ((u64)__double_as_longlong(d))
#define BITS_DOUBLE(b) __longlong_as_double((long long)(b))
#else
#define INLINE static inline __attribute__((unused))
#define SAME_BITS(name, to, from)                                                                  \
    INLINE to name(from value)                                                                     \
    {                                                                                              \
        to bits;                                                                                   \
        memcpy(&bits, &value, sizeof bits);                                                        \
        return bits;                                                                               \
    }
SAME_BITS(FLOAT_BITS, u32, float)
SAME_BITS(BITS_FLOAT, float, u32)
SAME_BITS(DOUBLE_BITS, u64, double)
SAME_BITS(BITS_DOUBLE, double, u64)
#endif

INLINE u32 size_of(u32 dtype)
{
    return dtype == F64 ? 8 : dtype == F32 ? 4 : dtype <= F16 ? 2 : 1;
}

INLINE u32 quiet(u32 bits)
{
    return (bits & 0x7FFFFFFF) > 0x7F800000 ? bits | 0x400000 : bits;
}

/* To the bits of an f32, exactly. */
INLINE u32 widen(u32 x, u32 from)
{
    if (from == F32)
        return x;
    if (from == BF16)
        return x << 16;
    if (from == F16) {
        u32 sign = (x & 0x8000) << 16, a = x & 0x7FFF;
        u32 normal = (a << 13) + ((127u - 15u) << 23);
        u32 few = FLOAT_BITS((float)(int)a * 5.9604644775390625e-8f); /* 2^-24 */
        u32 special = 0x7F800000 | a << 13 | (a > 0x7C00 ? 0x400000u : 0);
        return sign | (a >= 0x7C00 ? special : a < 0x400 ? few : normal);
    }
    u32 sign = (x & 0x80) << 24, a = x & 0x7F;
    if (from == E4M3) {
        u32 few = FLOAT_BITS((float)(int)a * 0.001953125f); /* 2^-9 */
        return sign | (a == 0x7F ? 0x7FF00000u : a < 8 ? few : (a << 20) + ((127u - 7u) << 23));
    }
    u32 few = FLOAT_BITS((float)(int)a * 1.52587890625e-5f); /* 2^-16 */
    u32 special = 0x7F800000 | (a & 3) << 21 | (a > 0x7C ? 0x400000u : 0);
    return sign | (a >= 0x7C ? special : a < 4 ? few : (a << 21) + ((127u - 15u) << 23));
}

/* From the bits of an f32, to nearest even. */
INLINE u32 narrow(u32 bits, u32 to)
{
    u32 a = bits & 0x7FFFFFFF;
    if (to == F32)
        return bits;
    if (to == BF16)
        return a > 0x7F800000 ? 0x7FC0u : (bits + 0x7FFF + (bits >> 16 & 1)) >> 16;
    if (to == F16) {
        u32 normal = a - ((127u - 15u) << 23);
        normal = (normal + 0xFFF + (normal >> 13 & 1)) >> 13;
        u32 few = FLOAT_BITS(BITS_FLOAT(a) + 0.5f) - 0x3F000000u;
        u32 h = a < 0x38800000 ? few : normal;
        h = a >= 0x47800000 ? 0x7C00 : h;
        h = a > 0x7F800000 ? (0x7E00 | (a >> 13 & 0x3FF)) : h;
        return (bits >> 16 & 0x8000) | h;
    }
    u32 e;
    if (to == E4M3) {
        u32 normal = (a - ((127u - 7u) << 23) + 0x7FFFF + (a >> 20 & 1)) >> 20;
        u32 few = FLOAT_BITS(BITS_FLOAT(a) + 16384.0f) - 0x46800000u; /* 2^14 */
        e = a < 121u << 23 ? few : normal;
        e = e > 0x7E ? 0x7E : e;
    } else {
        u32 normal = (a - ((127u - 15u) << 23) + 0xFFFFF + (a >> 21 & 1)) >> 21;
        u32 few = FLOAT_BITS(BITS_FLOAT(a) + 128.0f) - 0x43000000u; /* 2^7 */
        e = a < 113u << 23 ? few : normal;
        e = e > 0x7C ? 0x7C : e;
    }
    e = a > 0x7F800000 ? 0x7F : e;
    return (bits >> 24 & 0x80) | e;
}

INLINE u64 double_of(u32 f)
{
    if ((f & 0x7FFFFFFF) > 0x7F800000)
        return (u64)(f & 0x80000000) << 32 | 0x7FF8000000000000u | (u64)(f & 0x3FFFFF) << 29;
    return DOUBLE_BITS((double)BITS_FLOAT(f));
}

INLINE u32 float_of(u64 d)
{
    if ((d & 0x7FFFFFFFFFFFFFFFu) > 0x7FF0000000000000u)
        return (u32)(d >> 32 & 0x80000000) | 0x7FC00000 | (u32)(d >> 29 & 0x3FFFFF);
    return FLOAT_BITS((float)BITS_DOUBLE(d));
}

INLINE u64 convert(u64 bits, u32 from, u32 to)
{
    if (from == to)
        return bits;
    u32 f = from == F64 ? float_of(bits) : widen((u32)bits, from);
    return to == F64 ? double_of(f) : narrow(f, to);
}

/* ---- steps: from one value of a dtype to another, in its values' order ------------------------
 */

/* Maps the bits of an element of `size` bytes to a number that grows with its value. Integers stay
 * as they are: differences are taken modulo their width, so that their order needs no mapping. */
INLINE u64 in_order(u64 bits, u32 size, u32 dtype)
{
    u64 sign = (u64)1 << (8 * size - 1), all = sign | (sign - 1);
    if (dtype > E5M2)
        return bits;
    return bits & sign ? ~bits & all : bits | sign;
}

INLINE u64 out_of_order(u64 number, u32 size, u32 dtype)
{
    u64 sign = (u64)1 << (8 * size - 1), all = sign | (sign - 1);
    if (dtype > E5M2)
        return number;
    return number & sign ? number ^ sign : ~number & all;
}

/* Returns how many values `now` is above or below `was`; 0 when they are equal, or more than 127
 * apart. */
INLINE int8_t step_between(u64 was, u64 now, u32 size, u32 dtype)
{
    u64 sign = (u64)1 << (8 * size - 1), all = sign | (sign - 1);
    u64 up = (in_order(now, size, dtype) - in_order(was, size, dtype)) & all, down = (0 - up) & all;
    return (int8_t)(up <= 127 ? (int)up : down <= 127 ? -(int)down : 0);
}

INLINE u64 stepped(u64 was, int8_t step, u32 size, u32 dtype)
{
    u64 sign = (u64)1 << (8 * size - 1), all = sign | (sign - 1);
    u64 number = (in_order(was, size, dtype) + (u64)(int64_t)step) & all;
    return out_of_order(number, size, dtype);
}

#endif
