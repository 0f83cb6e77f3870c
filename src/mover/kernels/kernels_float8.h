/* Part of kernels_body.h: the two forms of 8-bit floats (Micikevicius et al., "FP8 formats for deep
 * learning", 2022), their conversions, and quantisation's loops (quant.h has the arithmetic). */

/* Rounding is one addition. Let m be the number of mantissa bits, and e the exponent of the number
 * or the format's least one. Near 2^(e + 23 - m) the spacing of f32 is 2^(e - m), that of the
 * format near the number. So the addition of that power rounds, and the difference of the sum's
 * bits to the power's is the mantissa; the format's exponent is e + bias. Numbers above `most`
 * count as `most`. */
static inline uint32_t to_float8(uint32_t bits, uint32_t mantissa, uint32_t bias, uint32_t most)
{
    const uint32_t least = (128u - bias) << 23, up = 23 - mantissa;
    uint32_t a = bits & 0x7FFFFFFF, clamped = a < most ? a : most;
    uint32_t exponent = clamped & 0x7F800000;
    uint32_t power = (exponent > least ? exponent : least) + (up << 23);
    uint32_t steps = bits_of(float_of(clamped) + float_of(power)) - power;
    uint32_t e = (power >> up) + steps - ((127u + up - bias + 1u) << mantissa);
    e = a > 0x7F800000 ? 0x7F : e;
    return (bits >> 24 & 0x80) | e;
}

static inline uint32_t to_e4m3(uint32_t bits)
{
    return to_float8(bits, 3, 7, 0x43E00000); /* 448: E4M3 has no infinity */
}

static inline uint32_t to_e5m2(uint32_t bits)
{
    return to_float8(bits, 2, 15, 0x47800000); /* 2^16, which is its infinity */
}

static inline uint32_t from_e4m3(uint32_t value)
{
    uint32_t a = value & 0x7F, normal = (a << 20) + ((127u - 7u) << 23);
    uint32_t f = a < 8 ? bits_of((float)(int32_t)a * 0x1p-9f) : normal;
    return (value & 0x80) << 24 | (a == 0x7F ? 0x7FF00000 : f);
}

static inline uint32_t from_e5m2(uint32_t value)
{
    uint32_t a = value & 0x7F, normal = (a << 21) + ((127u - 15u) << 23);
    uint32_t f = a < 4 ? bits_of((float)(int32_t)a * 0x1p-16f) : normal;
    uint32_t special = 0x7F800000 | (a & 3) << 21 | (a > 0x7C ? 0x400000 : 0);
    return (value & 0x80) << 24 | (a >= 0x7C ? special : f);
}

/* XX(name, from, to, element types, expression of x) */
#define FLOAT8_CASTS(XX)                                                                           \
    XX(f32_e4m3, F32, F8E4M3, u32_any, uint8_t, (uint8_t)to_e4m3(x))                               \
    XX(f32_e5m2, F32, F8E5M2, u32_any, uint8_t, (uint8_t)to_e5m2(x))                               \
    XX(bf16_e4m3, BF16, F8E4M3, u16_any, uint8_t, (uint8_t)to_e4m3(from_bf16(x)))                  \
    XX(bf16_e5m2, BF16, F8E5M2, u16_any, uint8_t, (uint8_t)to_e5m2(from_bf16(x)))                  \
    XX(e4m3_f32, F8E4M3, F32, uint8_t, u32_any, from_e4m3(x))                                      \
    XX(e5m2_f32, F8E5M2, F32, uint8_t, u32_any, from_e5m2(x))                                      \
    XX(e4m3_bf16, F8E4M3, BF16, uint8_t, u16_any, to_bf16(from_e4m3(x)))                           \
    XX(e5m2_bf16, F8E5M2, BF16, uint8_t, u16_any, to_bf16(from_e5m2(x)))

FLOAT8_CASTS(EACH_ELEMENT)

/* XX(name, from, to, up to f32, its bytes, down from f32, its bytes) */
#define FLOAT8_THROUGH_F32(XX)                                                                     \
    XX(f16_e4m3, F16, F8E4M3, f16_f32, 2, f32_e4m3, 1)                                             \
    XX(f16_e5m2, F16, F8E5M2, f16_f32, 2, f32_e5m2, 1)                                             \
    XX(f64_e4m3, F64, F8E4M3, f64_f32, 8, f32_e4m3, 1)                                             \
    XX(f64_e5m2, F64, F8E5M2, f64_f32, 8, f32_e5m2, 1)                                             \
    XX(e4m3_f16, F8E4M3, F16, e4m3_f32, 1, f32_f16, 2)                                             \
    XX(e5m2_f16, F8E5M2, F16, e5m2_f32, 1, f32_f16, 2)                                             \
    XX(e4m3_f64, F8E4M3, F64, e4m3_f32, 1, f32_f64, 8)                                             \
    XX(e5m2_f64, F8E5M2, F64, e5m2_f32, 1, f32_f64, 8)                                             \
    XX(e4m3_e5m2, F8E4M3, F8E5M2, e4m3_f32, 1, f32_e5m2, 1)                                        \
    XX(e5m2_e4m3, F8E5M2, F8E4M3, e5m2_f32, 1, f32_e4m3, 1)

FLOAT8_THROUGH_F32(THROUGH_F32)

/* ---- quantisation ---------------------------------------------------------------------------- */

/* Magnitudes compare as integers: a NaN is larger than everything. */
#define MOST(size, type, element, mask)                                                            \
    static uint32_t most##size(const void *source, dray__patch p, uint32_t most)                   \
    {                                                                                              \
        enum { LANES = 64 / (size) }; /* independent maxima, joined at the end */                  \
        element lanes[LANES] = {0}, m = (element)most;                                             \
        const type *in = source;                                                                   \
        for (size_t r = 0; r < p.rows; r++, in += p.stride) {                                      \
            size_t i = 0;                                                                          \
            for (; i + LANES <= p.count; i += LANES)                                               \
                for (size_t k = 0; k < LANES; k++) {                                               \
                    element a = in[i + k] & (mask);                                                \
                    lanes[k] = a > lanes[k] ? a : lanes[k];                                        \
                }                                                                                  \
            for (; i < p.count; i++) {                                                             \
                element a = in[i] & (mask);                                                        \
                m = a > m ? a : m;                                                                 \
            }                                                                                      \
        }                                                                                          \
        for (size_t k = 0; k < LANES; k++)                                                         \
            m = lanes[k] > m ? lanes[k] : m;                                                       \
        return m;                                                                                  \
    }
MOST(2, u16_any, uint16_t, 0x7FFF)
MOST(4, u32_any, uint32_t, 0x7FFFFFFF)

/* A NaN has no sign here: the sign of a product that is NaN depends on the machine. */
static inline uint32_t without_sign_of_nan(uint32_t e, uint32_t inf)
{
    return (e & 0x7F) > inf ? 0x7F : e;
}

/* XX(name, from, to, element type, bits of f32 from x, narrowing, largest code that is no NaN) */
#define QUANTISERS(XX)                                                                             \
    XX(quantise_f32_e4m3, F32, E4M3, u32_any, x, to_e4m3, 0x7E)                                    \
    XX(quantise_f32_e5m2, F32, E5M2, u32_any, x, to_e5m2, 0x7C)                                    \
    XX(quantise_bf16_e4m3, BF16, E4M3, u16_any, from_bf16(x), to_e4m3, 0x7E)                       \
    XX(quantise_bf16_e5m2, BF16, E5M2, u16_any, from_bf16(x), to_e5m2, 0x7C)

/* The same as `to_e4m3` and `to_e5m2` for sixteen products at once; a NaN has no sign. */
#if defined(__AVX512F__)
enum { AT_ONCE = 16 };
static inline __m128i narrow_vec(__m512 product, uint32_t bits, uint32_t least, uint32_t most)
{
    const __m512i up = _mm512_set1_epi32((int)((23 - bits) << 23));
    const __m512i bias = _mm512_set1_epi32((int)(((least >> 23) - 1 + 23 - bits + 1) << bits));
    __m512i v = _mm512_castps_si512(product);
    __m512i a = _mm512_and_si512(v, _mm512_set1_epi32(INT32_MAX));
    __m512i clamped = _mm512_min_epu32(a, _mm512_set1_epi32((int)most));
    __m512i exponent = _mm512_and_si512(clamped, _mm512_set1_epi32(0x7F800000));
    __m512i power = _mm512_max_epu32(exponent, _mm512_set1_epi32((int)least));
    power = _mm512_add_epi32(power, up);
    __m512 sum = _mm512_add_ps(_mm512_castsi512_ps(clamped), _mm512_castsi512_ps(power));
    __m512i steps = _mm512_sub_epi32(_mm512_castps_si512(sum), power);
    __m512i e = _mm512_add_epi32(_mm512_srli_epi32(power, 23 - bits), steps);
    e = _mm512_sub_epi32(e, bias);
    __m512i sign = _mm512_and_si512(_mm512_srli_epi32(v, 24), _mm512_set1_epi32(0x80));
    __mmask16 nan = _mm512_cmpgt_epu32_mask(a, _mm512_set1_epi32(0x7F800000));
    e = _mm512_mask_mov_epi32(_mm512_or_si512(e, sign), nan, _mm512_set1_epi32(0x7F));
    return _mm512_cvtepi32_epi8(e);
}
#define VEC_OF_BF16(in)                                                                            \
    _mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i_u *)(in))), 16)
#define VEC_OF_F32(in) _mm512_loadu_si512(in)
#define NARROW_E4M3(product) narrow_vec(product, 3, 121u << 23, 0x43E00000)
#define NARROW_E5M2(product) narrow_vec(product, 2, 113u << 23, 0x47800000)
#define EACH_NARROW_VEC(from, to)                                                                  \
    for (; i + AT_ONCE <= p.count; i += AT_ONCE)                                                   \
        _mm_storeu_si128((__m128i_u *)(out + i),                                                   \
                         NARROW_##to(_mm512_mul_ps(_mm512_castsi512_ps(VEC_OF_##from(in + i)),     \
                                                   _mm512_set1_ps(factor))));
#else
#define EACH_NARROW_VEC(from, to)
#endif

#define XX(name, from, to, type, value, narrow, inf)                                               \
    static void name(const void *source, uint8_t *restrict out, dray__patch p, float factor)       \
    {                                                                                              \
        const type *restrict in = source;                                                          \
        for (size_t r = 0; r < p.rows; r++, in += p.stride, out += p.stride) {                     \
            size_t i = 0;                                                                          \
            EACH_NARROW_VEC(from, to)                                                              \
            for (; i < p.count; i++) {                                                             \
                type x = in[i];                                                                    \
                uint32_t product = bits_of(float_of(value) * factor);                              \
                out[i] = (uint8_t)without_sign_of_nan(narrow(product), inf);                       \
            }                                                                                      \
        }                                                                                          \
    }
QUANTISERS(XX)
#undef XX

#define XX(name, next)                                                                             \
    static void name(const void *source, uint8_t *out, dray__patch p, float factor)                \
    {                                                                                              \
        float chunk[CHUNK];                                                                        \
        const u16_any *in = source;                                                                \
        for (size_t r = 0; r < p.rows; r++, in += p.stride, out += p.stride)                       \
            for (size_t i = 0, n; i < p.count; i += n) {                                           \
                n = p.count - i < CHUNK ? p.count - i : CHUNK;                                     \
                f16_f32(in + i, chunk, n);                                                         \
                next(chunk, out + i, (dray__patch){1, n, n}, factor);                              \
            }                                                                                      \
    }
XX(quantise_f16_e4m3, quantise_f32_e4m3)
XX(quantise_f16_e5m2, quantise_f32_e5m2)
#undef XX

static const dray__quantiser quantisers[] = {
    {DRAY_F16, DRAY_F8E4M3, quantise_f16_e4m3},
    {DRAY_F16, DRAY_F8E5M2, quantise_f16_e5m2},
#define XX(name, from, to, type, value, narrow, inf) {DRAY_##from, DRAY_F8##to, name},
    QUANTISERS(XX)
#undef XX
        {0, 0, NULL},
};

/* XX(name, from, to, widening, element type, expression of the product's bits p) */
#define DEQUANTISERS(XX)                                                                           \
    XX(dequantise_e4m3_f32, F8E4M3, F32, from_e4m3, u32_any, p)                                    \
    XX(dequantise_e5m2_f32, F8E5M2, F32, from_e5m2, u32_any, p)                                    \
    XX(dequantise_e4m3_bf16, F8E4M3, BF16, from_e4m3, u16_any, to_bf16(p))                         \
    XX(dequantise_e5m2_bf16, F8E5M2, BF16, from_e5m2, u16_any, to_bf16(p))

#define XX(name, from, to, widen, type, value)                                                     \
    static void name(const uint8_t *restrict in, void *destination, dray__patch patch,             \
                     float scale)                                                                  \
    {                                                                                              \
        type *restrict out = destination;                                                          \
        for (size_t r = 0; r < patch.rows; r++, in += patch.stride, out += patch.stride)           \
            for (size_t i = 0; i < patch.count; i++) {                                             \
                uint32_t p = bits_of(float_of(widen(in[i])) * scale);                              \
                p = (p & 0x7FFFFFFF) > 0x7F800000 ? 0x7FC00000 : p;                                \
                out[i] = value;                                                                    \
            }                                                                                      \
    }
DEQUANTISERS(XX)
#undef XX

#define XX(name, first)                                                                            \
    static void name(const uint8_t *in, void *destination, dray__patch p, float scale)             \
    {                                                                                              \
        float chunk[CHUNK];                                                                        \
        u16_any *out = destination;                                                                \
        for (size_t r = 0; r < p.rows; r++, in += p.stride, out += p.stride)                       \
            for (size_t i = 0, n; i < p.count; i += n) {                                           \
                n = p.count - i < CHUNK ? p.count - i : CHUNK;                                     \
                first(in + i, chunk, (dray__patch){1, n, n}, scale);                               \
                f32_f16(chunk, out + i, n);                                                        \
            }                                                                                      \
    }
XX(dequantise_e4m3_f16, dequantise_e4m3_f32)
XX(dequantise_e5m2_f16, dequantise_e5m2_f32)
#undef XX

static const dray__dequantiser dequantisers[] = {
    {DRAY_F8E4M3, DRAY_F16, dequantise_e4m3_f16},
    {DRAY_F8E5M2, DRAY_F16, dequantise_e5m2_f16},
#define XX(name, from, to, widen, type, value) {DRAY_##from, DRAY_##to, name},
    DEQUANTISERS(XX)
#undef XX
        {0, 0, NULL},
};
