/* The inner loops, in plain C that the compiler vectorises. Each instruction set has a file that
 * includes this one, is compiled for the set, and defines KERNELS (the table) and KERNELS_NAME.
 * Intrinsics are used for conversions between f32 and f16, for which there are instructions, and
 * for the checksum's 32-bit products, for which compilers emit 64-bit multiplications. */
#include "mover/kernels/kernels.h"

#include <string.h>

#if defined(__SSE2__)
#include <immintrin.h>
#endif

/* ---- checksum (the formula is in checksum.h) ------------------------------------------------- */

static void columns(uint64_t first, size_t count, uint32_t *out)
{
    while (count > 0) {
        /* The high half is the same up to the next multiple of 2^32. */
        uint64_t room = (UINT64_C(1) << 32) - (first & UINT32_MAX);
        size_t n = count < room ? count : (size_t)room;
        uint32_t low = (uint32_t)first, high = (uint32_t)(first >> 32) * 0x85EBCA77u;
        for (size_t i = 0; i < n; i++) {
            uint32_t x = (low + (uint32_t)i) * 0x9E3779B1u ^ high;
            x ^= x >> 15;
            x *= 0x2C1B3C6Du;
            x ^= x >> 12;
            out[i] = x | 1;
        }
        out += n;
        first += n;
        count -= n;
    }
}

/* Elements at any alignment. */
typedef uint16_t u16_any __attribute__((aligned(1), may_alias));
typedef uint32_t u32_any __attribute__((aligned(1), may_alias));
typedef float f32_any __attribute__((aligned(1), may_alias));
typedef double f64_any __attribute__((aligned(1), may_alias));

/* A vector of 32-bit words, made of elements of 1, 2 or 4 bytes; products of its even words. RAWn:
 * the same number of elements, of n bytes, as they are in memory. */
#if defined(__AVX512F__)
typedef __m512i vec;
typedef __m128i raw1;
typedef __m256i raw2;
enum { WORDS = 16 };
#define VEC_ZERO() _mm512_setzero_si512()
#define VEC_LOAD(p) _mm512_loadu_si512(p)
#define VEC_MUL(a, b) _mm512_mul_epu32(a, b)
#define VEC_ADD(a, b) _mm512_add_epi64(a, b)
#define VEC_ODD(a) _mm512_srli_epi64(a, 32)
#define RAW4_STORE(p, r) _mm512_storeu_si512(p, r)
#define RAW2_LOAD(p) _mm256_loadu_si256((const __m256i_u *)(p))
#define RAW2_STORE(p, r) _mm256_storeu_si256((__m256i_u *)(p), r)
#define RAW2_WIDEN(r) _mm512_cvtepu16_epi32(r)
#define RAW1_LOAD(p) _mm_loadu_si128((const __m128i_u *)(p))
#define RAW1_STORE(p, r) _mm_storeu_si128((__m128i_u *)(p), r)
#define RAW1_WIDEN(r) _mm512_cvtepu8_epi32(r)
#elif defined(__AVX2__)
typedef __m256i vec;
typedef __m128i raw1;
typedef __m128i raw2;
enum { WORDS = 8 };
#define VEC_ZERO() _mm256_setzero_si256()
#define VEC_LOAD(p) _mm256_loadu_si256((const __m256i_u *)(p))
#define VEC_MUL(a, b) _mm256_mul_epu32(a, b)
#define VEC_ADD(a, b) _mm256_add_epi64(a, b)
#define VEC_ODD(a) _mm256_srli_epi64(a, 32)
#define RAW4_STORE(p, r) _mm256_storeu_si256((__m256i_u *)(p), r)
#define RAW2_LOAD(p) _mm_loadu_si128((const __m128i_u *)(p))
#define RAW2_STORE(p, r) _mm_storeu_si128((__m128i_u *)(p), r)
#define RAW2_WIDEN(r) _mm256_cvtepu16_epi32(r)
#define RAW1_LOAD(p) _mm_loadl_epi64((const __m128i_u *)(p))
#define RAW1_STORE(p, r) _mm_storel_epi64((__m128i_u *)(p), r)
#define RAW1_WIDEN(r) _mm256_cvtepu8_epi32(r)
#elif defined(__SSE2__)
typedef __m128i vec;
typedef __m128i raw1;
typedef __m128i raw2;
enum { WORDS = 4 };
#define VEC_ZERO() _mm_setzero_si128()
#define VEC_LOAD(p) _mm_loadu_si128((const __m128i_u *)(p))
#define VEC_MUL(a, b) _mm_mul_epu32(a, b)
#define VEC_ADD(a, b) _mm_add_epi64(a, b)
#define VEC_ODD(a) _mm_srli_epi64(a, 32)
#define RAW4_STORE(p, r) _mm_storeu_si128((__m128i_u *)(p), r)
#define RAW2_LOAD(p) _mm_loadl_epi64((const __m128i_u *)(p))
#define RAW2_STORE(p, r) _mm_storel_epi64((__m128i_u *)(p), r)
#define RAW2_WIDEN(r) _mm_unpacklo_epi16(r, VEC_ZERO())
#define RAW1_LOAD(p) _mm_cvtsi32_si128((int)*(const u32_any *)(p))
#define RAW1_STORE(p, r) (*(u32_any *)(p) = (uint32_t)_mm_cvtsi128_si32(r))
#define RAW1_WIDEN(r) _mm_unpacklo_epi16(_mm_unpacklo_epi8(r, VEC_ZERO()), VEC_ZERO())
#endif

#if defined(__SSE2__)
typedef vec raw4;
#define RAW4_LOAD(p) VEC_LOAD(p)
#define RAW4_WIDEN(r) (r)

/* Returns the sum of all lanes. It uses registers only: gcc 12's ASan misaligns vectors on the
 * stack. */
static inline uint64_t total(vec a, vec b)
{
    vec both = VEC_ADD(a, b);
#if defined(__AVX512F__)
    __m256i quarter =
        _mm256_add_epi64(_mm512_castsi512_si256(both), _mm512_extracti64x4_epi64(both, 1));
#elif defined(__AVX2__)
    __m256i quarter = both;
#endif
#if defined(__AVX2__)
    __m128i half =
        _mm_add_epi64(_mm256_castsi256_si128(quarter), _mm256_extracti128_si256(quarter, 1));
#else
    __m128i half = both;
#endif
    return (uint64_t)_mm_cvtsi128_si64(half) +
           (uint64_t)_mm_cvtsi128_si64(_mm_unpackhi_epi64(half, half));
}
/* Adds the products of b's and v's words. */
#define VEC_DOT(even, odd, b, v)                                                                   \
    do {                                                                                           \
        even = VEC_ADD(even, VEC_MUL(b, v));                                                       \
        odd = VEC_ADD(odd, VEC_MUL(VEC_ODD(b), VEC_ODD(v)));                                       \
    } while (0)
/* The same where v's words have at most 20 bits: a product then fits the 52 bits that IFMA adds. */
#if defined(__AVX512IFMA__)
#define VEC_EVEN(a) _mm512_and_si512(a, _mm512_set1_epi64(UINT32_MAX))
#define VEC_ADD_PRODUCT(sum, b, v) _mm512_madd52lo_epu64(sum, b, v)
#else
#define VEC_EVEN(a) (a) /* only the even words are multiplied */
#define VEC_ADD_PRODUCT(sum, b, v) VEC_ADD(sum, VEC_MUL(b, v))
#endif
#define VEC_DOT_NARROW(even, odd, b, v)                                                            \
    do {                                                                                           \
        even = VEC_ADD_PRODUCT(even, VEC_EVEN(b), VEC_EVEN(v));                                    \
        odd = VEC_ADD_PRODUCT(odd, VEC_ODD(b), VEC_ODD(v));                                        \
    } while (0)
#define VEC_DOT1 VEC_DOT_NARROW
#define VEC_DOT2 VEC_DOT_NARROW
#define VEC_DOT4 VEC_DOT
#define ONE_VEC(size, STORE, at)                                                                   \
    do {                                                                                           \
        raw##size r = RAW##size##_LOAD(x + (at));                                                  \
        vec b = VEC_LOAD(columns + (at)), v = RAW##size##_WIDEN(r);                                \
        STORE(size, at);                                                                           \
        VEC_DOT##size(even, odd, b, v);                                                            \
    } while (0)
#define EACH_VEC(size, STORE)                                                                      \
    vec even = VEC_ZERO(), odd = VEC_ZERO();                                                       \
    for (; i + 2 * WORDS <= count; i += 2 * WORDS) {                                               \
        ONE_VEC(size, STORE, i);                                                                   \
        ONE_VEC(size, STORE, i + WORDS);                                                           \
    }                                                                                              \
    sum = total(even, odd);
#else
#define EACH_VEC(size, STORE)
#endif
#define NO_STORE(size, at)
#define STORE_RAW(size, at) RAW##size##_STORE(y + (at), r)

#define DOT(size, type)                                                                            \
    static uint64_t dot##size(const uint32_t *columns, const void *data, size_t count)             \
    {                                                                                              \
        const type *x = data;                                                                      \
        uint64_t sum = 0;                                                                          \
        size_t i = 0;                                                                              \
        EACH_VEC(size, NO_STORE)                                                                   \
        for (; i < count; i++)                                                                     \
            sum += (uint64_t)columns[i] * (uint64_t)x[i];                                          \
        return sum;                                                                                \
    }                                                                                              \
    static uint64_t copy##size(const uint32_t *columns, const void *data, void *out, size_t count) \
    {                                                                                              \
        const type *x = data;                                                                      \
        type *y = out;                                                                             \
        uint64_t sum = 0;                                                                          \
        size_t i = 0;                                                                              \
        EACH_VEC(size, STORE_RAW)                                                                  \
        for (; i < count; i++) {                                                                   \
            type value = x[i];                                                                     \
            y[i] = value;                                                                          \
            sum += (uint64_t)columns[i] * (uint64_t)value;                                         \
        }                                                                                          \
        return sum;                                                                                \
    }
DOT(1, uint8_t)
DOT(2, u16_any)
DOT(4, u32_any)

/* Four rows share the work on their columns. No vector is in an array: see `total`. */
#define EACH_ROW(XX) XX(0) XX(1) XX(2) XX(3)
static void dot2_rows(const uint32_t *columns, const void *data, int64_t stride, size_t count,
                      uint64_t sums[4])
{
    const u16_any *row[4];
    size_t i = 0;
    for (int k = 0; k < 4; k++) {
        row[k] = (const u16_any *)((const uint8_t *)data + k * stride);
        sums[k] = 0;
    }
#if defined(__SSE2__)
#define XX(k) vec even##k = VEC_ZERO(), odd##k = VEC_ZERO();
    EACH_ROW(XX)
#undef XX
    for (; i + WORDS <= count; i += WORDS) {
        vec b = VEC_LOAD(columns + i), b_even = VEC_EVEN(b), b_odd = VEC_ODD(b), v;
#define XX(k)                                                                                      \
    v = RAW2_WIDEN(RAW2_LOAD(row[k] + i));                                                         \
    even##k = VEC_ADD_PRODUCT(even##k, b_even, VEC_EVEN(v));                                       \
    odd##k = VEC_ADD_PRODUCT(odd##k, b_odd, VEC_ODD(v));
        EACH_ROW(XX)
#undef XX
    }
#define XX(k) sums[k] = total(even##k, odd##k);
    EACH_ROW(XX)
#undef XX
#endif
    for (; i < count; i++)
        for (int k = 0; k < 4; k++)
            sums[k] += (uint64_t)columns[i] * (uint64_t)row[k][i];
}
#undef EACH_ROW

/* ---- conversions ----------------------------------------------------------------------------- */

static inline uint32_t bits_of(float value)
{
    uint32_t bits;
    memcpy(&bits, &value, sizeof bits);
    return bits;
}

static inline float float_of(uint32_t bits)
{
    float value;
    memcpy(&value, &bits, sizeof value);
    return value;
}

static inline uint16_t to_bf16(uint32_t bits)
{
    uint32_t rounded = (bits + 0x7FFF + (bits >> 16 & 1)) >> 16;
    return (uint16_t)((bits & 0x7FFFFFFF) > 0x7F800000 ? 0x7FC0 : rounded);
}

static inline uint32_t from_bf16(uint16_t value)
{
    return (uint32_t)value << 16;
}

static inline uint16_t to_f16(uint32_t bits)
{
    uint32_t sign = bits >> 16 & 0x8000, a = bits & 0x7FFFFFFF;
    uint32_t normal =
        a - ((127u - 15u) << 23); /* a carry out of the mantissa is right, up to inf */
    normal = (normal + 0xFFF + (normal >> 13 & 1)) >> 13;
    /* Below 2^-14 a half counts in steps of 2^-24, which is the value of one bit of 0.5f. */
    uint32_t small = bits_of(float_of(a) + 0.5f) - bits_of(0.5f);
    uint32_t h = a < 0x38800000 ? small : normal;
    h = a >= 0x47800000 ? 0x7C00 : h;
    h = a > 0x7F800000 ? (0x7E00 | (a >> 13 & 0x3FF)) : h;
    return (uint16_t)(sign | h);
}

static inline uint32_t from_f16(uint16_t value)
{
    uint32_t sign = (uint32_t)(value & 0x8000) << 16, a = value & 0x7FFF;
    uint32_t normal = (a << 13) + ((127u - 15u) << 23);
    uint32_t small = bits_of((float)(int32_t)a * 0x1p-24f);
    uint32_t special = 0x7F800000 | a << 13 | (a > 0x7C00 ? 0x400000 : 0);
    uint32_t f = a < 0x400 ? small : normal;
    return sign | (a >= 0x7C00 ? special : f);
}

/* XX(name, from, to, element types, expression of x): conversions whose elements are one
 * expression. */
#define CASTS(XX)                                                                                  \
    XX(bf16_f32, BF16, F32, u16_any, u32_any, from_bf16(x))                                        \
    XX(f32_f64, F32, F64, f32_any, f64_any, (double)x)                                             \
    XX(f64_f32, F64, F32, f64_any, f32_any, (float)x)                                              \
    XX(bf16_f64, BF16, F64, u16_any, f64_any, (double)float_of(from_bf16(x)))                      \
    XX(f64_bf16, F64, BF16, f64_any, u16_any, to_bf16(bits_of((float)x)))

#define EACH_ELEMENT(name, from, to, from_type, to_type, expression)                               \
    static void name(const void *source, void *destination, size_t count)                          \
    {                                                                                              \
        const from_type *restrict in = source;                                                     \
        to_type *restrict out = destination;                                                       \
        for (size_t i = 0; i < count; i++) {                                                       \
            from_type x = in[i];                                                                   \
            out[i] = expression;                                                                   \
        }                                                                                          \
    }
CASTS(EACH_ELEMENT)
EACH_ELEMENT(f32_bf16, F32, BF16, u32_any, u16_any, to_bf16(x))
EACH_ELEMENT(f32_f16_each, F32, F16, u32_any, u16_any, to_f16(x))
EACH_ELEMENT(f16_f32_each, F16, F32, u16_any, u32_any, from_f16(x))

/* The conversion that most updates make, with the sums of both sides, in one pass: the sum takes
 * the rounded elements while they are 32-bit words. */
static void f32_bf16_summed(const uint32_t *columns, const void *source, void *destination,
                            size_t count, int64_t ahead, uint64_t sums[2])
{
    const u32_any *in = source;
    u16_any *out = destination;
    uint64_t before = 0, after = 0;
    size_t i = 0;
#if defined(__AVX512F__)
    vec even = VEC_ZERO(), odd = VEC_ZERO(), even_after = VEC_ZERO(), odd_after = VEC_ZERO();
    enum { QUIET = 0x01, SIGNALLING = 0x80 }; /* the NaNs of fpclass */
    const vec one = _mm512_set1_epi32(1), half = _mm512_set1_epi32(0x7FFF);
    const vec nan = _mm512_set1_epi32(0x7FC0);
    for (; i + WORDS <= count; i += WORDS) {
        vec b = VEC_LOAD(columns + i), v = VEC_LOAD(in + i);
        _mm_prefetch((const char *)(in + i) + ahead, _MM_HINT_T0);
        vec up = _mm512_add_epi32(_mm512_and_si512(_mm512_srli_epi32(v, 16), one), half);
        vec r = _mm512_srli_epi32(_mm512_add_epi32(v, up), 16);
        __mmask16 is_nan = _mm512_fpclass_ps_mask(_mm512_castsi512_ps(v), QUIET | SIGNALLING);
        r = _mm512_mask_mov_epi32(r, is_nan, nan);
        _mm256_storeu_si256((__m256i_u *)(out + i), _mm512_cvtepi32_epi16(r));
        VEC_DOT(even, odd, b, v);
        VEC_DOT_NARROW(even_after, odd_after, b, r);
    }
    before = total(even, odd);
    after = total(even_after, odd_after);
#elif defined(__AVX2__)
    vec even = VEC_ZERO(), odd = VEC_ZERO(), even_after = VEC_ZERO(), odd_after = VEC_ZERO();
    const vec one = _mm256_set1_epi32(1), half = _mm256_set1_epi32(0x7FFF);
    const vec size = _mm256_set1_epi32(0x7FFFFFFF), inf = _mm256_set1_epi32(0x7F800000);
    const vec nan = _mm256_set1_epi32(0x7FC0);
    for (; i + WORDS <= count; i += WORDS) {
        vec b = VEC_LOAD(columns + i), v = VEC_LOAD(in + i);
        if (i % (2 * WORDS) == 0) /* once a line */
            _mm_prefetch((const char *)(in + i) + ahead, _MM_HINT_T0);
        vec up = _mm256_add_epi32(_mm256_and_si256(_mm256_srli_epi32(v, 16), one), half);
        vec r = _mm256_srli_epi32(_mm256_add_epi32(v, up), 16);
        r = _mm256_blendv_epi8(r, nan, _mm256_cmpgt_epi32(_mm256_and_si256(v, size), inf));
        vec packed = _mm256_permute4x64_epi64(_mm256_packus_epi32(r, r), 0x08);
        _mm_storeu_si128((__m128i_u *)(out + i), _mm256_castsi256_si128(packed));
        VEC_DOT(even, odd, b, v);
        VEC_DOT(even_after, odd_after, b, r);
    }
    before = total(even, odd);
    after = total(even_after, odd_after);
#else
    (void)ahead;
#endif
    for (; i < count; i++) {
        uint32_t bits = in[i];
        uint16_t rounded = to_bf16(bits);
        out[i] = rounded;
        before += (uint64_t)columns[i] * bits;
        after += (uint64_t)columns[i] * rounded;
    }
    sums[0] += before;
    sums[1] += after;
}

static void f32_f16(const void *source, void *destination, size_t count)
{
    size_t i = 0;
    const u32_any *in = source;
    u16_any *out = destination;
#if defined(__F16C__)
    for (; i + 8 <= count; i += 8)
        _mm_storeu_si128(
            (__m128i_u *)(out + i),
            _mm256_cvtps_ph(_mm256_castsi256_ps(_mm256_loadu_si256((const __m256i_u *)(in + i))),
                            _MM_FROUND_TO_NEAREST_INT));
#endif
    f32_f16_each(in + i, out + i, count - i);
}

static void f16_f32(const void *source, void *destination, size_t count)
{
    size_t i = 0;
    const u16_any *in = source;
    u32_any *out = destination;
#if defined(__F16C__)
    for (; i + 8 <= count; i += 8)
        _mm256_storeu_si256(
            (__m256i_u *)(out + i),
            _mm256_castps_si256(_mm256_cvtph_ps(_mm_loadu_si128((const __m128i_u *)(in + i)))));
#endif
    f16_f32_each(in + i, out + i, count - i);
}

enum { CHUNK = 256 };

/* All other conversions go through f32, a chunk at a time: the first is exact, the second rounds.
 * Only f64 is rounded twice, as in PyTorch. */
static void through_f32(dray__cast_fn up, size_t from_size, dray__cast_fn down, size_t to_size,
                        const void *source, void *destination, size_t count)
{
    const uint8_t *in = source;
    uint8_t *out = destination;
    float chunk[CHUNK];
    for (size_t i = 0; i < count; i += CHUNK) {
        size_t n = count - i < CHUNK ? count - i : CHUNK;
        up(in + i * from_size, chunk, n);
        down(chunk, out + i * to_size, n);
    }
}

/* XX(name, from, to, up to f32, its bytes, down from f32, its bytes) */
#define CASTS_THROUGH_F32(XX)                                                                      \
    XX(bf16_f16, BF16, F16, bf16_f32, 2, f32_f16, 2)                                               \
    XX(f16_bf16, F16, BF16, f16_f32, 2, f32_bf16, 2)                                               \
    XX(f16_f64, F16, F64, f16_f32, 2, f32_f64, 8)                                                  \
    XX(f64_f16, F64, F16, f64_f32, 8, f32_f16, 2)

#define THROUGH_F32(name, from, to, up, up_bytes, down, down_bytes)                                \
    static void name(const void *source, void *destination, size_t count)                          \
    {                                                                                              \
        through_f32(up, up_bytes, down, down_bytes, source, destination, count);                   \
    }
CASTS_THROUGH_F32(THROUGH_F32)

#include "mover/kernels/kernels_float8.h"
#include "mover/kernels/kernels_turn.h"

#define ROW(name, from, to, ...) {DRAY_##from, DRAY_##to, name, NULL},
static const dray__cast casts[] = {
    {DRAY_F32, DRAY_BF16, f32_bf16, f32_bf16_summed},
    {DRAY_F32, DRAY_F16, f32_f16, NULL},
    {DRAY_F16, DRAY_F32, f16_f32, NULL},
    CASTS(ROW) CASTS_THROUGH_F32(ROW) FLOAT8_CASTS(ROW) FLOAT8_THROUGH_F32(ROW){0, 0, NULL, NULL},
};
#undef ROW

const dray__kernels KERNELS = {.name = KERNELS_NAME,
                               .columns = columns,
                               .dot1 = dot1,
                               .dot2 = dot2,
                               .dot4 = dot4,
                               .dot2_rows = dot2_rows,
                               .copy1 = copy1,
                               .copy2 = copy2,
                               .copy4 = copy4,
                               .casts = casts,
                               .most2 = most2,
                               .most4 = most4,
                               .quantisers = quantisers,
                               .dequantisers = dequantisers,
                               .turn = {[1] = turn1, [2] = turn2, [4] = turn4, [8] = turn8}};
