/* One name for each construct that CUDA C++ and C17 name differently, so that the kernels are one
 * source for both (cuda_kernels.h shows how they run as C). Then the loads, stores and checksum
 * factors that all kernels use. Included by cuda_kernels.cu and its parts alone. */
#ifndef DRAY_MOVER_CUDA_CUDA_DEVICE_H
#define DRAY_MOVER_CUDA_CUDA_DEVICE_H

#include "mover/cuda/cuda_kernels.h"

#include "mover/kernels/floats.h"

enum { SOURCE = 1, WRITTEN = 2, BACK = 4, SCALES = 8, MOST = 16 }; /* of dray__gpu_launch.wanted */

#if defined(__CUDACC__)

/* blocks: the number that must fit one multiprocessor; it limits the registers of a thread. */
#define KERNEL(blocks) extern "C" __global__ void __launch_bounds__(DRAY__GPU_THREADS, blocks)
#define LAUNCH const __grid_constant__ dray__gpu_launch
#define WATCHING INLINE
#define SHARED __shared__
#define THREAD threadIdx.x
#define THREADS blockDim.x
#define BLOCK blockIdx.x
#define BLOCKS gridDim.x
#define UNROLL _Pragma("unroll")
#define SYNC() __syncthreads()
#define SYNC_OR(flag) __syncthreads_or(flag)
extern __shared__ __align__(16) uint32_t staged[]; /* its size is an argument of the launch */

/* Data are read once, from memory that other processors write between launches, so loads bypass the
 * first-level cache. Reading back loads from the second-level cache, where the stores went. */
INLINE void get16(u64 at, u32 *v)
{
    asm volatile("ld.global.L1::no_allocate.v4.u32 {%0,%1,%2,%3}, [%4];"
                 : "=r"(v[0]), "=r"(v[1]), "=r"(v[2]), "=r"(v[3])
                 : "l"(at));
}
INLINE void get8(u64 at, u32 *v)
{
    asm volatile("ld.global.L1::no_allocate.v2.u32 {%0,%1}, [%2];"
                 : "=r"(v[0]), "=r"(v[1])
                 : "l"(at));
}
INLINE u32 get4(u64 at)
{
    u32 v;
    asm volatile("ld.global.L1::no_allocate.u32 %0, [%1];" : "=r"(v) : "l"(at));
    return v;
}
INLINE u32 get2(u64 at)
{
    uint16_t v;
    asm volatile("ld.global.L1::no_allocate.u16 %0, [%1];" : "=h"(v) : "l"(at));
    return v;
}
INLINE u32 get1(u64 at)
{
    u32 v;
    asm volatile("ld.global.L1::no_allocate.u8 %0, [%1];" : "=r"(v) : "l"(at));
    return v;
}
INLINE void back16(u64 at, u32 *v)
{
    asm volatile("ld.global.cg.v4.u32 {%0,%1,%2,%3}, [%4];"
                 : "=r"(v[0]), "=r"(v[1]), "=r"(v[2]), "=r"(v[3])
                 : "l"(at));
}
INLINE void put16(u64 at, const u32 *v)
{
    asm volatile("st.global.v4.u32 [%0], {%1,%2,%3,%4};" ::"l"(at), "r"(v[0]), "r"(v[1]), "r"(v[2]),
                 "r"(v[3])
                 : "memory");
}
INLINE void put8(u64 at, const u32 *v)
{
    asm volatile("st.global.v2.u32 [%0], {%1,%2};" ::"l"(at), "r"(v[0]), "r"(v[1]) : "memory");
}
INLINE void put4(u64 at, u32 v)
{
    asm volatile("st.global.u32 [%0], %1;" ::"l"(at), "r"(v) : "memory");
}
INLINE void put2(u64 at, u32 v)
{
    asm volatile("st.global.u16 [%0], %1;" ::"l"(at), "h"((uint16_t)v) : "memory");
}
INLINE void put1(u64 at, u32 v)
{
    asm volatile("st.global.u8 [%0], %1;" ::"l"(at), "r"(v) : "memory");
}
/* Store to and load from staged memory. */
INLINE void keep16(u32 *room, const u32 *v)
{
    *(uint4 *)room = make_uint4(v[0], v[1], v[2], v[3]);
}
INLINE void kept16(const u32 *room, u32 *v)
{
    uint4 w = *(const uint4 *)room;
    v[0] = w.x, v[1] = w.y, v[2] = w.z, v[3] = w.w;
}
/* Copies 16 or 8 bytes into shared memory asynchronously. The calling thread sees them after
 * FETCHED, other threads after a SYNC. */
INLINE void fetch16(void *room, const void *from)
{
    asm volatile(
        "cp.async.cg.shared.global [%0], [%1], 16;" ::"r"((u32)__cvta_generic_to_shared(room)),
        "l"(from)
        : "memory");
}
INLINE void fetch8(void *room, const void *from)
{
    asm volatile(
        "cp.async.ca.shared.global [%0], [%1], 8;" ::"r"((u32)__cvta_generic_to_shared(room)),
        "l"(from)
        : "memory");
}
#define FETCHED() asm volatile("cp.async.wait_all;" ::: "memory")
#define AT(type, at) (*(volatile type *)(at))
#define FLAG(at) (*(const volatile u32 *)(at)) /* written while the kernel runs */

/* Returns the sum over all threads of a warp, to the first thread. All threads must call it. */
INLINE u64 warp_sum(u64 value)
{
    UNROLL
    for (int i = 16; i > 0; i /= 2)
        value += __shfl_down_sync(0xFFFFFFFF, value, i);
    return value;
}
INLINE u32 warp_most(u32 value)
{
    return __reduce_max_sync(0xFFFFFFFF, value);
}
#define MOST_OF_HALVES(a, b) __vmaxu2(a, b)
#define MOST_OF_SIGNED_HALVES(a, b) __vmaxs2(a, b)
#define LEAST_OF_HALVES(a, b) __vminu2(a, b)
#define LEAST_OF_SUMS(a, b, c) __viaddmin_u16x2(a, b, c) /* of a + b and c, half by half */
/* Pairs of numbers in one word, the first in the low half. */
#define PAIR(name, instruction)                                                                    \
    INLINE u32 name(float low, float high)                                                         \
    {                                                                                              \
        u32 pair;                                                                                  \
        asm(instruction " %0, %1, %2;" : "=r"(pair) : "f"(high), "f"(low));                        \
        return pair;                                                                               \
    }
PAIR(pair_to_f16, "cvt.rn.f16x2.f32")
PAIR(pair_to_f16_down, "cvt.rz.f16x2.f32") /* rounded towards zero */
PAIR(pair_to_bf16, "cvt.rn.bf16x2.f32")
#undef PAIR
/* Adds pairs of bf16. A sum of zeros of both signs is 0, not -0. */
INLINE u32 add_bf16(u32 a, u32 b)
{
    u32 sum;
    asm("fma.rn.bf16x2 %0, %1, %2, %3;" : "=r"(sum) : "r"(a), "r"(0x3F803F80), "r"(b));
    return sum;
}
INLINE u32 clamp_bf16(u32 a, u32 least, u32 most)
{
    u32 clamped;
    asm("{.reg .b32 t; max.bf16x2 t, %1, %2; min.bf16x2 %0, t, %3;}"
        : "=r"(clamped)
        : "r"(a), "r"(least), "r"(most));
    return clamped;
}
/* Returns 1 / f to within 0.6 units in the last place, of an f from 2^-126 to 2^126. */
INLINE float inverse_of(float f)
{
    float r;
    asm("rcp.approx.f32 %0, %1;" : "=f"(r) : "f"(f));
    return __fmaf_rn(r, __fmaf_rn(-f, r, 1.0f), r);
}
#define MULTIPLY_ADD(a, b, c) __fmaf_rn(a, b, c)    /* rounded once */
#define PACK_HALVES(a, b) __byte_perm(a, b, 0x5410) /* the low halves of two words */
#define PACK_HIGH(a, b) __byte_perm(a, b, 0x7632)
#define LOW_BYTES(a, b) __byte_perm(a, b, 0x5140) /* bytes 0 of both, then bytes 1 */
#define HIGH_BYTES(a, b) __byte_perm(a, b, 0x7362)
#define DOT_BYTES(a, b, c) __dp4a(a, b, c) /* four products of bytes, added to c */
#define KEEP(v) asm volatile("" : "+r"(v)) /* in a register: it is not computed again */
/* Returns a * b + c; written in C, it becomes two instructions. */
INLINE u64 multiply_add(u32 a, u32 b, u64 c)
{
    u64 sum;
    asm("mad.wide.u32 %0, %1, %2, %3;" : "=l"(sum) : "r"(a), "r"(b), "l"(c));
    return sum;
}

INLINE u32 finite_as_bf16(u32 bits)
{
    uint16_t half;
    asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(half) : "f"(BITS_FLOAT(bits)));
    return (u32)half << 16;
}
#define WARP 32
#define OUTLINE static __device__ __noinline__
#define ADD_TO(p, value) atomicAdd((unsigned long long *)(p), (unsigned long long)(value))
#define MOST_TO(p, value) atomicMax((p), (value))
#define TAKE(p) atomicAdd((p), 1u)
#define TAKE_MORE(p, n) atomicAdd((unsigned long long *)(p), (unsigned long long)(n))
#define COUNT_BITS(v) ((u32)__popc(v))
#define LOWEST_BIT(v) ((u32)__ffs((int)(v)) - 1)
/* Returns the sum over the warp's threads up to this one. */
INLINE u64 warp_upto(u64 value)
{
    UNROLL
    for (u32 i = 1; i < 32; i *= 2) {
        u64 other = __shfl_up_sync(0xFFFFFFFF, value, i);
        value += threadIdx.x % 32 >= i ? other : 0;
    }
    return value;
}

#else

#include <string.h>

/* Variables that are set under a condition are used under the same one. Compilers see that only
 * where they unroll the loops. */
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"
#pragma GCC diagnostic ignored "-Wuninitialized"

#define KERNEL(blocks) void
/* Reads memory that another thread writes meanwhile, on purpose. */
#define WATCHING static __attribute__((no_sanitize("thread")))
#define LAUNCH dray__gpu_launch
#define SHARED static _Thread_local
#define THREAD dray__gpu_here.thread
#define THREADS dray__gpu_here.threads
#define BLOCK dray__gpu_here.block
#define BLOCKS dray__gpu_here.blocks
#define UNROLL
#define SYNC() ((void)0)
#define SYNC_OR(flag) (flag)
static _Thread_local __attribute__((unused)) uint32_t staged[DRAY__GPU_CELL];
_Thread_local dray__gpu_spot dray__gpu_here;

/* A misaligned address ends the kernel on a GPU, and everything else in its context. */
INLINE void *aligned(u64 at, u64 width)
{
    if (at % width)
        __builtin_trap();
    return (void *)at;
}
INLINE void get16(u64 at, u32 *v)
{
    memcpy(v, aligned(at, 16), 16);
}
INLINE void get8(u64 at, u32 *v)
{
    memcpy(v, aligned(at, 8), 8);
}
#define back16 get16
#define keep16(room, v) memcpy(room, v, 16)
#define kept16(room, v) memcpy(v, room, 16)
#define get4(at) (*(const u32 *)aligned(at, 4))
#define get2(at) ((u32) * (const uint16_t *)aligned(at, 2))
#define get1(at) ((u32) * (const uint8_t *)(at))
INLINE void put16(u64 at, const u32 *v)
{
    memcpy(aligned(at, 16), v, 16);
}
INLINE void put8(u64 at, const u32 *v)
{
    memcpy(aligned(at, 8), v, 8);
}
INLINE void put4(u64 at, u32 v)
{
    *(u32 *)aligned(at, 4) = v;
}
INLINE void put2(u64 at, u32 v)
{
    *(uint16_t *)aligned(at, 2) = (uint16_t)v;
}
INLINE void put1(u64 at, u32 v)
{
    *(uint8_t *)at = (uint8_t)v;
}
INLINE u32 finite_as_bf16(u32 bits)
{
    return narrow(bits, BF16) << 16;
}
INLINE u32 pair_to_bf16(float low, float high)
{
    return narrow(FLOAT_BITS(low), BF16) | narrow(FLOAT_BITS(high), BF16) << 16;
}
INLINE u32 pair_to_f16(float low, float high)
{
    return narrow(FLOAT_BITS(low), F16) | narrow(FLOAT_BITS(high), F16) << 16;
}
INLINE u32 to_f16_down(float f)
{
    u32 h = narrow(FLOAT_BITS(f), F16), a = FLOAT_BITS(f) & 0x7FFFFFFF;
    return h - ((widen(h, F16) & 0x7FFFFFFF) > a);
}
INLINE u32 pair_to_f16_down(float low, float high)
{
    return to_f16_down(low) | to_f16_down(high) << 16;
}
INLINE u32 add_bf16(u32 a, u32 b)
{
    return pair_to_bf16(BITS_FLOAT(a << 16) + BITS_FLOAT(b << 16),
                        BITS_FLOAT(a & 0xFFFF0000) + BITS_FLOAT(b & 0xFFFF0000));
}
INLINE float clamped(float f, u32 least, u32 most)
{
    float low = BITS_FLOAT(least << 16), high = BITS_FLOAT(most << 16);
    return f < low ? low : f > high ? high : f;
}
INLINE u32 clamp_bf16(u32 a, u32 least, u32 most)
{
    return pair_to_bf16(clamped(BITS_FLOAT(a << 16), least, most),
                        clamped(BITS_FLOAT(a & 0xFFFF0000), least, most));
}
INLINE float inverse_of(float f)
{
    return 1.0f / f;
}
#define MULTIPLY_ADD(a, b, c) __builtin_fmaf(a, b, c)
#define PACK_HALVES(a, b) (((a)&0xFFFF) | (b) << 16)
#define PACK_HIGH(a, b) ((a) >> 16 | ((b)&0xFFFF0000))
#define LOW_BYTES(a, b)                                                                            \
    (((a)&0xFF) | ((b)&0xFF) << 8 | ((a) >> 8 & 0xFF) << 16 | ((b) >> 8 & 0xFF) << 24)
#define KEEP(v) ((void)0)
#define HIGH_BYTES(a, b) LOW_BYTES((a) >> 16, (b) >> 16)
INLINE u32 DOT_BYTES(u32 a, u32 b, u32 c)
{
    for (u32 i = 0; i < 32; i += 8)
        c += (a >> i & 0xFF) * (b >> i & 0xFF);
    return c;
}
INLINE u64 multiply_add(u32 a, u32 b, u64 c)
{
    return (u64)a * b + c;
}
#define OUTLINE INLINE
INLINE void fetch8(void *room, const void *from)
{
    *(u64 *)room = *(const u64 *)from;
}
INLINE void fetch16(void *room, const void *from)
{
    fetch8(room, from);
    fetch8((u64 *)room + 1, (const u64 *)from + 1);
}
#define FETCHED() ((void)0)
#define AT(type, at) (*(volatile type *)(at))
#define FLAG(at) __atomic_load_n(at, __ATOMIC_RELAXED)
INLINE u32 MOST_OF_HALVES(u32 a, u32 b)
{
    u32 low = (a & 0xFFFF) > (b & 0xFFFF) ? a & 0xFFFF : b & 0xFFFF;
    return low | (a >> 16 > b >> 16 ? a >> 16 : b >> 16) << 16;
}
INLINE u32 LEAST_OF_HALVES(u32 a, u32 b)
{
    return ~MOST_OF_HALVES(~a, ~b);
}
INLINE u32 LEAST_OF_SUMS(u32 a, u32 b, u32 c)
{
    return LEAST_OF_HALVES(((a + b) & 0xFFFF) | ((a & 0xFFFF0000) + (b & 0xFFFF0000)), c);
}
INLINE u32 MOST_OF_SIGNED_HALVES(u32 a, u32 b)
{
    return MOST_OF_HALVES(a ^ 0x80008000, b ^ 0x80008000) ^ 0x80008000;
}
#define warp_sum(value) (value)
#define warp_upto(value) (value)
#define TAKE_MORE(p, n) __atomic_fetch_add((p), (n), __ATOMIC_RELAXED)
#define COUNT_BITS(v) ((u32)__builtin_popcount(v))
#define LOWEST_BIT(v) ((u32)__builtin_ctz(v))
#define warp_most(value) (value)
#define WARP 1
#define TAKE(p) __atomic_fetch_add((p), 1u, __ATOMIC_RELAXED)
#define ADD_TO(p, value) ((void)__atomic_fetch_add((p), (value), __ATOMIC_RELAXED))
INLINE void MOST_TO(u32 *p, u32 value)
{
    u32 was = __atomic_load_n(p, __ATOMIC_RELAXED);
    while (was < value &&
           !__atomic_compare_exchange_n(p, &was, value, 0, __ATOMIC_RELAXED, __ATOMIC_RELAXED))
        ;
}

#endif

/* ---- pairs of E4M3 ----------------------------------------------------------------------------
 */

/* Converts two floats, rounded to nearest even; too large numbers become 448, a NaN 0x7F. */
#if defined(__CUDACC__) && __CUDA_ARCH__ >= 890
INLINE u32 pair_to_e4m3(float low, float high)
{
    uint16_t pair;
    asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(pair) : "f"(high), "f"(low));
    return pair;
}
INLINE void pair_of_e4m3(u32 pair, u32 *low, u32 *high)
{
    u32 halves;
    asm("cvt.rn.f16x2.e4m3x2 %0, %1;" : "=r"(halves) : "h"((uint16_t)pair));
    asm("{.reg .f16 l, h; mov.b32 {l, h}, %2; cvt.f32.f16 %0, l; cvt.f32.f16 %1, h;}"
        : "=r"(*low), "=r"(*high)
        : "r"(halves));
}
#else
INLINE u32 to_e4m3(float f)
{
    u32 e = narrow(FLOAT_BITS(f), E4M3);
    return (e & 0x7F) == 0x7F ? 0x7F : e;
}
INLINE u32 pair_to_e4m3(float low, float high)
{
    return to_e4m3(low) | to_e4m3(high) << 8;
}
INLINE void pair_of_e4m3(u32 pair, u32 *low, u32 *high)
{
    *low = widen(pair & 0xFF, E4M3);
    *high = widen(pair >> 8, E4M3);
}
#endif

/* ---- words ------------------------------------------------------------------------------------
 */

typedef struct words {
    u32 v[4]; /* words that are not loaded are 0 */
} words;

/* bytes: 1, 2, 4, 8, 16, a constant where speed matters; the address is a multiple of it. */
INLINE words load(u64 at, u32 bytes)
{
    words w = {{0, 0, 0, 0}};
    if (bytes == 16)
        get16(at, w.v);
    else if (bytes == 8)
        get8(at, w.v);
    else if (bytes == 4)
        w.v[0] = get4(at);
    else if (bytes == 2)
        w.v[0] = get2(at);
    else
        w.v[0] = get1(at);
    return w;
}

INLINE words load_back(u64 at, u32 bytes)
{
    words w = {{0, 0, 0, 0}};
    if (bytes != 16)
        return load(at, bytes);
    back16(at, w.v);
    return w;
}

INLINE void store(u64 at, const words *w, u32 bytes)
{
    if (bytes == 16)
        put16(at, w->v);
    else if (bytes == 8)
        put8(at, w->v);
    else if (bytes == 4)
        put4(at, w->v[0]);
    else if (bytes == 2)
        put2(at, w->v[0]);
    else
        put1(at, w->v[0]);
}

/* An element at any address. */
INLINE u64 load_element(u64 at, u32 size)
{
    u64 bits = 0;
    if (at % size != 0) {
        for (u32 i = 0; i < size; i++)
            bits |= (u64)get1(at + i) << (8 * i);
        return bits;
    }
    words w = load(at, size);
    return (u64)w.v[1] << 32 | w.v[0];
}

INLINE void store_element(u64 at, u64 bits, u32 size)
{
    words w = {{(u32)bits, (u32)(bits >> 32), 0, 0}};
    if (at % size == 0)
        store(at, &w, size);
    else
        for (u32 i = 0; i < size; i++)
            put1(at + i, (u32)(bits >> (8 * i)));
}

/* ---- the checksum (mover/kernels/checksum.h) ------------------------------------------------- */

INLINE u64 row_factor(u64 row)
{
    u64 z = row + 0x9E3779B97F4A7C15u;
    z = (z ^ z >> 30) * 0xBF58476D1CE4E5B9u;
    z = (z ^ z >> 27) * 0x94D049BB133111EBu;
    return (z ^ z >> 31) | 1;
}

INLINE u32 column_factor(u64 column)
{
    u32 x = (u32)column * 0x9E3779B1u ^ (u32)(column >> 32) * 0x85EBCA77u;
    x ^= x >> 15;
    x *= 0x2C1B3C6Du;
    x ^= x >> 12;
    return x | 1;
}

/* Returns one element's part of its row's sum. */
INLINE u64 element_sum(u64 bits, u32 size, u64 column)
{
    if (size == 8)
        return (u64)column_factor(2 * column) * (u32)bits +
               (u64)column_factor(2 * column + 1) * (bits >> 32);
    return (u64)column_factor(column) * (u32)bits;
}

/* A thread's sums of one item. */
typedef struct totals {
    u64 of[DRAY__GPU_SUMS];
    u32 sum;
} totals;

#define NOBODY 0xFFFFFFFFu

/* Adds the totals to the launch's sums, and starts those of item `next`. All threads must call it.
 */
INLINE void flush(const dray__gpu_launch *l, totals *t, u32 next)
{
    if (t->sum == next)
        return;
    for (u32 i = 0; i < DRAY__GPU_SUMS; i++) {
        if (t->sum != NOBODY && (l->wanted >> i & 1)) {
            u64 all = warp_sum(t->of[i]);
            if (THREAD % WARP == 0)
                ADD_TO(&l->sums[i * l->sum_count + t->sum], all);
        }
        t->of[i] = 0;
    }
    t->sum = next;
}

WATCHING u32 stopped(const dray__gpu_launch *l)
{
    return FLAG(l->stop);
}

#define ZEROS                                                                                      \
    {                                                                                              \
        {                                                                                          \
            0, 0, 0, 0, 0, 0, 0, 0                                                                 \
        }                                                                                          \
    }

/* Eight, four or one adjacent elements. */
typedef struct group {
    u32 v[8];
} group;

INLINE group load_group(u64 at, u32 size, u32 elements)
{
    group g = {{0, 0, 0, 0, 0, 0, 0, 0}};
    if (elements == 1) {
        g.v[0] = (u32)load_element(at, size);
    } else if (elements * size == 8) {
        get8(at, g.v);
    } else {
        get16(at, g.v);
        if (elements * size == 32)
            get16(at + 16, g.v + 4);
    }
    return g;
}

INLINE group load_group_back(u64 at, u32 size, u32 elements)
{
    group g = {{0, 0, 0, 0, 0, 0, 0, 0}};
    if (elements == 1 || elements * size == 8)
        return load_group(at, size, elements);
    back16(at, g.v);
    if (elements * size == 32)
        back16(at + 16, g.v + 4);
    return g;
}

INLINE void store_group(u64 at, const group *g, u32 size, u32 elements)
{
    if (elements == 1) {
        store_element(at, g->v[0], size);
    } else if (elements * size == 8) {
        put8(at, g->v);
    } else {
        put16(at, g->v);
        if (elements * size == 32)
            put16(at + 16, g->v + 4);
    }
}

/* i: a constant. */
INLINE u32 pick(const group *g, u32 i, u32 size)
{
    return size == 4   ? g->v[i]
           : size == 2 ? g->v[i / 2] >> 16 * (i % 2) & 0xFFFF
                       : g->v[i / 4] >> 8 * (i % 4) & 0xFF;
}

INLINE void place(group *g, u32 i, u32 bits, u32 size)
{
    if (size == 4)
        g->v[i] = bits;
    else if (size == 2)
        g->v[i / 2] |= bits << 16 * (i % 2);
    else
        g->v[i / 4] |= bits << 8 * (i % 4);
}

INLINE u64 group_sum(const group *g, const u32 *factors, u32 size, u32 elements)
{
    u64 sum = 0;
    UNROLL
    for (u32 i = 0; i < 8; i++)
        if (i < elements)
            sum = multiply_add(factors[i], pick(g, i, size), sum);
    return sum;
}

/* Sums of bytes: the factors of four adjacent columns are turned over, so that word j has byte j of
 * each, and a dot product takes four elements. */
INLINE void turn_factors(u32 *factors)
{
    u32 a = LOW_BYTES(factors[0], factors[1]), b = LOW_BYTES(factors[2], factors[3]);
    u32 c = HIGH_BYTES(factors[0], factors[1]), d = HIGH_BYTES(factors[2], factors[3]);
    factors[0] = PACK_HALVES(a, b);
    factors[1] = PACK_HIGH(a, b);
    factors[2] = PACK_HALVES(c, d);
    factors[3] = PACK_HIGH(c, d);
}

/* Returns the part of `count` words of bytes, at most 64, in their row's sum. */
INLINE u64 bytes_sum(const u32 *v, const u32 *turned, const u32 count)
{
    u32 part[4] = {0, 0, 0, 0};
    UNROLL
    for (u32 i = 0; i < count; i++) {
        UNROLL
        for (u32 j = 0; j < 4; j++)
            part[j] = DOT_BYTES(turned[4 * i + j], v[i], part[j]);
    }
    return multiply_add(part[2] + (part[3] << 8), 1 << 16, part[0] + (part[1] << 8));
}

/* Returns the largest magnitude, as the bits of an f32. */
INLINE u32 group_most(const group *g, u32 from, u32 elements)
{
    u32 most = 0;
    if (from == BF16 && elements == 8) {
        UNROLL
        for (u32 i = 0; i < 4; i++)
            most = MOST_OF_HALVES(most, g->v[i] & 0x7FFF7FFF);
        return most >> 16 > (most & 0xFFFF) ? most & 0xFFFF0000 : most << 16;
    }
    UNROLL
    for (u32 i = 0; i < 8; i++) {
        if (i >= elements)
            break;
        u32 a = widen(pick(g, i, size_of(from)), from) & 0x7FFFFFFF;
        most = a > most ? a : most;
    }
    return most;
}

/* ---- threads and tiles --------------------------------------------------------------------------
 */

/* The columns (of words, groups or elements) and rows of a tile that a thread processes. */
typedef struct stand {
    u32 column, row, across, down; /* its first column and row, and the steps to its next ones */
} stand;

INLINE stand stand_in(u32 columns)
{
    stand s;
    s.across = columns < THREADS ? columns : THREADS;
    s.down = THREADS / s.across;
    s.column = THREAD % s.across;
    s.row = THREAD / s.across;
    if (s.row >= s.down) /* one of the threads left over */
        s.column = columns;
    return s;
}

INLINE group convert_group(const group *in, u32 from, u32 to, u32 elements)
{
    group out = {{0, 0, 0, 0, 0, 0, 0, 0}};
    UNROLL
    for (u32 i = 0; i < 8; i++)
        if (i < elements)
            place(&out, i, narrow(widen(pick(in, i, size_of(from)), from), to), size_of(to));
    return out;
}

#endif
