/* The kernel that quantises in groups of a row's elements (formats.h has the arithmetic): a
 * part of cuda_kernels.cu, included by it alone. A thread processes eight elements,
 * and the threads of a group are adjacent in a warp; as C, one thread processes a whole group. */
#ifndef DRAY_MOVER_CUDA_CUDA_GROUPS_H
#define DRAY_MOVER_CUDA_CUDA_GROUPS_H

#include "mover/cuda/cuda_device.h"
#include "mover/kernels/formats.h"

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
OUTLINE u64 define_eight(group g, u32 format, u32 from, format_scale s, u32 as)
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

#if defined(__CUDACC__)
/* Converts eight elements of bf16, times a power of two, to E2M1, two at once. An f16 that is 2^14
 * times smaller has E2M1's bits and 9 more bits of fraction. Near a tie it is exact, because bf16
 * has 8 bits of precision. */
INLINE u32 eight_e2m1(const group *g, float by)
{
    const float small = by * 6.103515625e-5f; /* 2^-14 */
    u32 out = 0;
    UNROLL
    for (u32 i = 0; i < 8; i += 2) {
        u32 pair = pair_to_f16(BITS_FLOAT(widen(pick(g, i, 2), BF16)) * small,
                               BITS_FLOAT(widen(pick(g, i + 1, 2), BF16)) * small);
        u32 r = pair & 0x7FFF7FFF;
        u32 codes = (r + 0x00FF00FF + (r >> 9 & 0x00010001)) >> 9 & 0x007F007F;
        codes = LEAST_OF_HALVES(codes, 0x00070007) | (pair >> 12 & 0x00080008);
        out |= (codes | codes >> 12) << 4 * i & 0xFFu << 4 * i;
    }
    return out;
}
#endif

/* Returns the same as define_eight for finite numbers, with multiplications instead of divisions.
 * Where the quotient's code may differ from the product's, it calls define_eight. */
INLINE u64 format_eight(const group *g, const u32 format, const u32 from, const format_scale *s,
                        const format_inverse *v, const u32 as)
{
    const u32 in = size_of(from);
    u64 out = 0;
#if defined(HAS_E4M3)
    if (format == MXFP8) {
        const float by = BITS_FLOAT(s->by);
        UNROLL
        for (u32 i = 0; i < 8; i += 2)
            out |= (u64)pair_to_e4m3(BITS_FLOAT(widen(pick(g, i, in), from)) * by,
                                     BITS_FLOAT(widen(pick(g, i + 1, in), from)) * by)
                   << 8 * i;
        return out;
    }
#endif
#if defined(__CUDACC__)
    if (format == MXFP4 && from == BF16)
        return eight_e2m1(g, BITS_FLOAT(s->by));
#endif
    u32 codes = 0, doubt = format > MXFP4 && v->by == 0;
    UNROLL
    for (u32 i = 0; i < 8; i++) {
        u32 x = widen(pick(g, i, in), from), code;
        if (format > MXFP4 && as != from)
            x = finite_as(x, as);
        u32 f = FLOAT_BITS(BITS_FLOAT(x) * BITS_FLOAT(format > MXFP4 ? v->by : s->by));
        if (format == MXFP8) {
            out |= (u64)format_code(format, f, s, as) << 8 * i;
            continue;
        }
        if (format > MXFP4)
            doubt |= format_may_differ(format, f, v);
        else if (from == F32) /* fractions of bf16 and f16 are too short for it */
            doubt |= ((f + 4) & 0xFFFFF) <= 8;
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
    if (format == MXFP8)
        return out;
    return doubt ? define_eight(*g, format, from, *s, as) : codes;
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

/* Returns the part of eight numbers in their row's sum. factors: of their columns. */
INLINE u64 sum_of_eight(u64 eight, const u32 format, const u32 *factors)
{
    u64 sum = 0;
    UNROLL
    for (u32 i = 0; i < 8; i++)
        if (i < stored_of_eight(format))
            sum += (u64)factors[i] *
                   (stored_size(format) == 4 ? (u32)eight : (u32)(eight >> 8 * i) & 0xFF);
    return sum;
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

/* Returns the same as format_scale_of. For MXFP8, the scale's exponent is that of most / 448,
 * rounded up. 448 is 1.75 * 2^8, and no quotient that is not a power of two is rounded to one. */
INLINE format_scale near_scale(const u32 format, const extremes *e, const u32 as, u32 global)
{
    if (format != MXFP8 || e->up < 0x06000000 || e->up >= INFINITE)
        return format_scale_of(format, e, as, global);
    format_scale s = {(e->up >> 23) - 8 + ((e->up & 0x7FFFFF) > 0x600000), 0, 0};
    s.by = (254 - s.stored) << 23;
    return s;
}

/* Stores a scale in its dtype. In views, its address may be unaligned. */
INLINE void store_scale(u64 at, u32 stored, const u32 format, const u32 as)
{
    if (format < INT4)
        AT(uint8_t, at) = (uint8_t)stored;
    else
        store_element(at, stored, size_of(as));
}

/* ---- tiles -------------------------------------------------------------------------------------
 */

/* Quantises the rows of one tile; `together` of them share a word of zero points. fast: elements
 * and codes are contiguous and aligned, and the compiler knows the dtypes. */
INLINE void quantise_groups(const dray__gpu_launch *l, const dray__gpu_quant *q, const matrix *m,
                            const u64 *factors, u32 global, totals *t, const u32 fast,
                            const u32 format, const u32 from, const u32 as)
{
    const u32 wanted = l->wanted, together = format == INT4_ZERO ? 8 : 1;
    const u32 eights = (u32)q->cell[3] / 8, in = size_of(from), per = stored_of_eight(format);
#if defined(__CUDACC__)
    const u32 own = 1, lanes = eights;
#else
    const u32 own = eights, lanes = 1;
#endif
    const u32 columns = (u32)(q->extent[3] / (8 * own));
    const u64 in_step = fast ? in : (u64)q->source_stride[3];
    const u64 out_step = fast ? stored_size(format) : (u64)q->destination_stride[3];
    stand at = stand_in(columns);
    /* All threads make the same number of iterations, also those without elements. */
    for (u32 c = at.column, left = columns; left > 0;
         c += at.across, left -= left < at.across ? left : at.across) {
        u64 eight = (u64)c * own, column = q->start[3] / 8 + eight, scale = eight / eights;
        u64 scale_column = q->start[3] / q->cell[3] + scale;
        u32 read[8 * MOST_EIGHTS], written[8 * MOST_EIGHTS], leads = eight % eights == 0;
        u32 scale_factor = column_factor(scale_column);
        UNROLL
        for (u32 i = 0; i < 8 * MOST_EIGHTS; i++) {
            if (i < 8 * own)
                read[i] = column_factor(column * 8 + i);
            if (i < per * own)
                written[i] = per == 8 ? read[i] : column_factor(column * per + i);
        }
        const u64 source = m->source + eight * 8 * in_step;
        const u64 destination = m->destination + eight * per * out_step;
        const u64 scales = m->scale + scale * (u64)m->scale_step;
        for (u32 next = m->first; next < m->last; next += at.down * together) {
            u32 begin = next + at.row * together, word = 0;
            for (u32 b = begin; b < begin + together; b++) {
                const u32 there = c < columns && b < m->last;
                group g[MOST_EIGHTS];
                extremes e = {0, 0};
                UNROLL
                for (u32 k = 0; k < MOST_EIGHTS; k++) {
                    if (k >= own || !there)
                        break;
                    u64 from_at = source + b * (u64)m->source_row + k * 8 * in_step;
                    g[k] = fast ? load_group(from_at, in, 8) : load_eight(q, from_at, from);
                }
                UNROLL
                for (u32 k = 0; k < MOST_EIGHTS; k++)
                    if (k < own && there)
                        add_extremes(&e, &g[k], format, from);
                e.up = lanes_most(e.up, lanes);
                if (format == INT4_ZERO)
                    e.down = lanes_most(e.down, lanes);
                if (!there)
                    continue;
                u64 row = factors[b - m->first], sums[2] = {0, 0};
                format_scale s = near_scale(format, &e, as, global);
                format_inverse v = format_inverse_of(format, &s, as);
                u32 finite = larger(e.up, e.down) < INFINITE;
                u64 to = destination + b * (u64)m->destination_row;
                UNROLL
                for (u32 k = 0; k < MOST_EIGHTS; k++) {
                    if (k >= own)
                        break;
                    u64 out = fast && finite ? format_eight(&g[k], format, from, &s, &v, as)
                                             : define_eight(g[k], format, from, s, as);
                    if (fast)
                        put_eight(to + k * per * out_step, out, format);
                    else
                        store_eight(q, to + k * per * out_step, out, format);
                    if (wanted & SOURCE)
                        sums[0] += group_sum(&g[k], read + 8 * k, in, 8);
                    if (wanted & WRITTEN)
                        sums[1] += sum_of_eight(out, format, written + per * k);
                }
                t->of[0] += row * sums[0];
                t->of[1] += row * sums[1];
                word |= (u32)((int)s.zero + 8) << 4 * (b - begin);
                if (!leads)
                    continue;
                store_scale(scales + b * (u64)m->scale_row, s.stored, format, as);
                if (wanted & SCALES)
                    t->of[3] += row * ((u64)scale_factor * s.stored);
            }
            if (format != INT4_ZERO || !leads || c >= columns || begin >= m->last)
                continue;
            u64 second = m->second + begin / 8 * (u64)q->second_stride[2];
            store_element(second + scale * (u64)q->second_stride[3], word, 4);
            if (wanted & MOST)
                t->of[4] += row_factor(m->zero_row + begin / 8) * scale_factor * word;
        }
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
INLINE void each_tile(const dray__gpu_launch *l, u64 *factors, const u32 format)
{
    totals t = {{0, 0, 0, 0, 0}, NOBODY};
    for (u32 i = BLOCK; i < l->count; i += BLOCKS) {
        const dray__gpu_quant *q = &l->quants[l->tiles[i].piece];
        matrix m = matrix_of(q, l->tiles[i].index);
        u32 fast = q->word == 8 && q->packed;
        u32 global = format == NVFP4 ? global_scale_of(l->most[q->first_most], q->as) : 0;
        if (SYNC_OR((int)stopped(l))) /* and no thread uses the last tile's factors any more */
            break;
        flush(l, &t, q->sum);
        for (u32 r = THREAD; r < m.last - m.first; r += THREADS)
            factors[r] = row_factor(m.row + m.first + r);
        SYNC();
#define XX(of_format, of_from, of_as)                                                              \
    if (fast && format == of_format && q->from == of_from && (of_as == 0 || q->as == of_as))       \
        quantise_groups(l, q, &m, factors, global, &t, 1, of_format, of_from, of_as);              \
    else
        GROUP_WAYS(XX)
#undef XX
        quantise_groups(l, q, &m, factors, global, &t, 0, format, q->from, q->as);
    }
    if (l->wanted)
        flush(l, &t, NOBODY);
}

#define GROUPS(name, format)                                                                       \
    KERNEL(3) name(LAUNCH l)                                                                       \
    {                                                                                              \
        SHARED u64 factors[DRAY__GPU_GROUP_ROWS];                                                  \
        each_tile(&l, factors, format);                                                            \
    }
GROUPS(dray_mxfp8, MXFP8)
GROUPS(dray_mxfp4, MXFP4)
GROUPS(dray_nvfp4, NVFP4)
GROUPS(dray_int4, INT4)
GROUPS(dray_int4_zero, INT4_ZERO)

#endif
