/* The kernel that quantises in groups of a row's elements (formats.h has the arithmetic): a
 * part of cuda_kernels.cu, included by it alone. Eight elements are one thread's, so that the
 * threads of a group stand beside each other in a warp; as C one thread has all of a group. */
#ifndef DRAY_MOVER_CUDA_CUDA_GROUPS_H
#define DRAY_MOVER_CUDA_CUDA_GROUPS_H

#include "mover/cuda/cuda_device.h"
#include "mover/kernels/formats.h"

#if defined(__CUDACC__)
#define OWN_EIGHTS 1 /* that a thread has of a group */
/* The largest of the `lanes` threads that have a group. */
INLINE u32 lanes_most(u32 value, u32 lanes)
{
    u32 all = lanes == 32 ? 0xFFFFFFFF : ((1u << lanes) - 1) << (threadIdx.x % 32 & ~(lanes - 1));
    for (u32 i = lanes / 2; i > 0; i /= 2)
        value = larger(value, __shfl_xor_sync(all, value, (int)i));
    return value;
}
#else
#define OWN_EIGHTS (DRAY__GPU_GROUP / 8)
INLINE u32 lanes_most(u32 value, u32 lanes)
{
    (void)lanes;
    return value;
}
#endif

/* One row of one part, as the sums count it. */
typedef struct grouped {
    u64 source, destination, scale; /* addresses of the row's first element */
    u64 row;                        /* in the tensor, flattened */
} grouped;

/* A row's place in each of the three dimensions that rows have. */
typedef struct row_place {
    u32 j, i, k;
} row_place;

/* `row` counts all dimensions but the last. Rows fit 32 bits (cuda_program.c sees to it): a
 * division of 64 bits takes a GPU as long as all else that it does with eight elements. */
INLINE row_place place_of_row(const dray__gpu_quant *q, u32 row)
{
    row_place p = {0, 0, row};
    if (!q->flat) {
        u32 rest = row / (u32)q->extent[2];
        p.j = rest / (u32)q->extent[1];
        p.i = rest - p.j * (u32)q->extent[1];
        p.k = row - rest * (u32)q->extent[2];
    }
    return p;
}

INLINE grouped grouped_row(const dray__gpu_quant *q, u32 row)
{
    const row_place p = place_of_row(q, row);
    const u32 k = p.k, i = p.i, j = p.j;
    grouped g;
    g.source = q->source + k * (u64)q->source_stride[2];
    g.destination = q->destination + k * (u64)q->destination_stride[2];
    g.scale = q->scales + k * (u64)q->scale_stride[2];
    g.row = (q->start[0] * q->shape[1] + q->start[1]) * q->shape[2] + q->start[2] + k;
    if (q->flat)
        return g;
    g.source += j * (u64)q->source_stride[0] + i * (u64)q->source_stride[1];
    g.destination += j * (u64)q->destination_stride[0] + i * (u64)q->destination_stride[1];
    g.scale += j * (u64)q->scale_stride[0] + i * (u64)q->scale_stride[1];
    g.row += (j * q->shape[1] + i) * q->shape[2];
    return g;
}

/* A word of zero points: those of eight rows from `row` on, or of those up to the tensor's edge. */
INLINE u64 zero_place(const dray__gpu_quant *q, u32 row, u64 column, u64 *sum_row)
{
    const row_place p = place_of_row(q, row);
    const u32 k = p.k / 8, i = p.i, j = p.j;
    *sum_row = ((q->start[0] + j) * q->shape[1] + q->start[1] + i) * ((q->shape[2] - 1) / 8 + 1) +
               q->start[2] / 8 + k;
    return q->second + j * (u64)q->second_stride[0] + i * (u64)q->second_stride[1] +
           k * (u64)q->second_stride[2] + column * (u64)q->second_stride[3];
}

INLINE group load_eight(const dray__gpu_quant *q, u64 at, u32 from)
{
    group g = {{0, 0, 0, 0, 0, 0, 0, 0}};
    if (q->word == 8)
        return load_group(at, size_of(from), 8);
    UNROLL
    for (u32 i = 0; i < 8; i++)
        place(&g, i, (u32)load_element(at + i * (u64)q->source_stride[3], size_of(from)),
              size_of(from));
    return g;
}

/* The largest magnitudes of eight elements; of formats without a zero point, those below 0 count
 * with the others. */
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

/* What eight elements become: eight bytes, or four bits each. */
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
    u32 x[8], f[8], divide = format > MXFP4 && v->by == 0;
    UNROLL
    for (u32 i = 0; i < 8; i++) {
        u32 bits = widen(pick(g, i, in), from);
        x[i] = format > MXFP4 && as != from ? round_as(bits, as) : bits;
        f[i] = FLOAT_BITS(BITS_FLOAT(x[i]) * BITS_FLOAT(format > MXFP4 ? v->by : s->by));
        if (format > MXFP4)
            divide |= format_may_differ(format, f[i], v);
    }
    UNROLL
    for (u32 i = 0; i < 8; i++)
        if (divide)
            f[i] = FLOAT_BITS(BITS_FLOAT(x[i]) / BITS_FLOAT(s->by));
    UNROLL
    for (u32 i = 0; i < 8; i++)
        out |= (u64)format_code(format, f[i], s, as) << (format == MXFP8 ? 8 : 4) * i;
    return out;
}

/* Elements of the values' dtype that eight numbers are: bytes, bytes of two, or one word. */
INLINE u32 stored_of_eight(const u32 format)
{
    return format == MXFP8 ? 8 : format >= INT4 ? 1 : 4;
}

/* Returns their sum; factors: of their columns. */
INLINE u64 store_eight(const dray__gpu_quant *q, u64 at, u64 eight, const u32 format,
                       const u32 *factors, u32 wanted)
{
    const u32 size = format >= INT4 ? 4 : 1, count = stored_of_eight(format);
    u64 sum = 0;
    if (q->packed) { /* they lie beside each other, and are aligned */
        u32 v[2] = {(u32)eight, (u32)(eight >> 32)};
        if (format == MXFP8)
            put8(at, v);
        else
            AT(u32, at) = v[0];
    }
    UNROLL
    for (u32 i = 0; i < 8; i++) {
        if (i >= count)
            break;
        u32 element = size == 4 ? (u32)eight : (u32)(eight >> 8 * i) & 0xFF;
        if (!q->packed)
            store_element(at + i * (u64)q->destination_stride[3], element, size);
        if (wanted & WRITTEN)
            sum += (u64)factors[i] * element;
    }
    return sum;
}

/* The rows of one tile, `together` of which have their zero points in one word. */
INLINE void quantise_groups(const dray__gpu_launch *l, const dray__gpu_quant *q, u32 first,
                            u32 last, u32 global, totals *t, const u32 format, const u32 from,
                            const u32 as)
{
    const u32 wanted = l->wanted, together = format == INT4_ZERO ? 8 : 1;
    const u32 eights = (u32)q->cell[3] / 8, lanes = OWN_EIGHTS == 1 ? eights : 1;
    const u32 own = OWN_EIGHTS == 1 ? 1 : eights, per = stored_of_eight(format);
    const u32 in = size_of(from), columns = (u32)(q->extent[3] / (8 * own));
    stand at = stand_in(columns);
    for (u32 c = at.column; c < columns; c += at.across) {
        u64 eight = (u64)c * own, column = q->start[3] / 8 + eight, scale = eight / eights;
        u64 scale_column = q->start[3] / q->cell[3] + scale;
        u32 read[8 * OWN_EIGHTS], written[8 * OWN_EIGHTS], leads = eight % eights == 0;
        u32 scale_factor = column_factor(scale_column);
        UNROLL
        for (u32 i = 0; i < 8 * OWN_EIGHTS; i++) {
            if (i < 8 * own)
                read[i] = column_factor(column * 8 + i);
            if (i < per * own)
                written[i] = per == 8 ? read[i] : column_factor(column * per + i);
        }
        for (u64 r = first + at.row * together; r < last; r += at.down * together) {
            u32 begin = (u32)r, end = last - begin < together ? last : begin + together, word = 0;
            for (u32 b = begin; b < end; b++) {
                grouped n = grouped_row(q, b);
                group g[OWN_EIGHTS];
                extremes e = {0, 0};
                for (u32 k = 0; k < OWN_EIGHTS; k++) {
                    if (k >= own)
                        break;
                    g[k] =
                        load_eight(q, n.source + (eight + k) * 8 * (u64)q->source_stride[3], from);
                    add_extremes(&e, &g[k], format, from);
                }
                e.up = lanes_most(e.up, lanes);
                if (format == INT4_ZERO)
                    e.down = lanes_most(e.down, lanes);
                format_scale s = format_scale_of(format, &e, as, global);
                format_inverse v = format_inverse_of(format, &s, as);
                u64 row = wanted ? row_factor(n.row) : 0;
                for (u32 k = 0; k < OWN_EIGHTS; k++) {
                    if (k >= own)
                        break;
                    u64 to = n.destination + (eight + k) * per * (u64)q->destination_stride[3];
                    u64 out = format_eight(&g[k], format, from, &s, &v, as);
                    u64 sum = store_eight(q, to, out, format, written + per * k, wanted);
                    if (wanted & WRITTEN)
                        t->of[1] += row * sum;
                    if (wanted & SOURCE)
                        t->of[0] += row * group_sum(&g[k], read + 8 * k, in, 8);
                }
                word |= (u32)((int)s.zero + 8) << 4 * (b - begin);
                if (!leads)
                    continue;
                store_element(n.scale + scale * (u64)q->scale_stride[3], s.stored, q->scale_size);
                if (wanted & SCALES)
                    t->of[3] += row * scale_factor * s.stored;
            }
            if (format != INT4_ZERO || !leads)
                continue;
            u64 sum_row, to = zero_place(q, begin, scale, &sum_row);
            store_element(to, word, 4);
            if (wanted & MOST)
                t->of[4] += row_factor(sum_row) * scale_factor * word;
        }
    }
}

/* XX(format, dtype of the source, dtype in which scales are computed): known to the compiler */
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

KERNEL(3) dray_groups(LAUNCH l)
{
    totals t = {{0, 0, 0, 0, 0}, NOBODY};
    for (u32 i = BLOCK; i < l.count; i += BLOCKS) {
        const dray__gpu_quant *q = &l.quants[l.tiles[i].piece];
        u32 rows = (u32)(q->extent[0] * q->extent[1] * q->extent[2]);
        u32 first = l.tiles[i].index * q->tile_rows, left = rows - first;
        u32 last = first + (left < q->tile_rows ? left : q->tile_rows);
        u32 global = q->format == NVFP4 ? global_scale_of(l.most[q->first_most], q->as) : 0;
        if (SYNC_OR((int)stopped(&l)))
            break;
        flush(&l, &t, q->sum);
#define XX(of_format, of_from, of_as)                                                              \
    if (q->format == of_format && q->from == of_from && (of_as == 0 || q->as == of_as))            \
        quantise_groups(&l, q, first, last, global, &t, of_format, of_from, of_as);                \
    else
        GROUP_WAYS(XX)
#undef XX
        quantise_groups(&l, q, first, last, global, &t, q->format, q->from, q->as);
    }
    if (l.wanted)
        flush(&l, &t, NOBODY);
}

#endif
