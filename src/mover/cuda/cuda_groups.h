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

/* `row` counts all dimensions but the last. */
INLINE grouped grouped_row(const dray__gpu_quant *q, u64 row)
{
    u64 k = row, i = 0, j = 0;
    grouped g;
    if (!q->flat) {
        u64 rest = row / q->extent[2];
        k = row % q->extent[2], i = rest % q->extent[1], j = rest / q->extent[1];
    }
    g.source = q->source + j * (u64)q->source_stride[0] + i * (u64)q->source_stride[1] +
               k * (u64)q->source_stride[2];
    g.destination = q->destination + j * (u64)q->destination_stride[0] +
                    i * (u64)q->destination_stride[1] + k * (u64)q->destination_stride[2];
    g.scale = q->scales + j * (u64)q->scale_stride[0] + i * (u64)q->scale_stride[1] +
              k * (u64)q->scale_stride[2];
    g.row = ((q->start[0] + j) * q->shape[1] + q->start[1] + i) * q->shape[2] + q->start[2] + k;
    return g;
}

/* A word of zero points: those of eight rows from `row` on, or of those up to the tensor's edge. */
INLINE u64 zero_place(const dray__gpu_quant *q, u64 row, u64 column, u64 *sum_row)
{
    u64 extent2 = q->extent[2], extent1 = q->extent[1];
    u64 k = row % extent2 / 8, rest = row / extent2, i = rest % extent1, j = rest / extent1;
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

/* What eight elements become: eight bytes, or four bits each. */
INLINE u64 format_eight(const group *g, u32 format, u32 from, const format_scale *s, u32 as)
{
    u64 out = 0;
    UNROLL
    for (u32 i = 0; i < 8; i++)
        out |= (u64)format_element(format, widen(pick(g, i, size_of(from)), from), s, as)
               << (format == MXFP8 ? 8 : 4) * i;
    return out;
}

/* Elements of the values' dtype: of MXFP8 eight, of U8 four, of I32 one. */
INLINE u64 store_eight(const dray__gpu_quant *q, u64 at, u64 eight, u32 format, u64 column,
                       u32 wanted)
{
    u32 size = format >= INT4 ? 4 : 1, count = format == MXFP8 ? 8 : format >= INT4 ? 1 : 4;
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
            sum += (u64)column_factor(column + i) * element;
    }
    return sum;
}

/* The rows of one tile, `together` of which have their zero points in one word. */
INLINE void quantise_groups(const dray__gpu_launch *l, const dray__gpu_quant *q, u64 first,
                            u64 last, u32 global, totals *t, const u32 from)
{
    const u32 format = q->format, as = q->as, wanted = l->wanted;
    const u32 eights = (u32)q->cell[3] / 8, lanes = OWN_EIGHTS == 1 ? eights : 1;
    const u32 own = OWN_EIGHTS == 1 ? 1 : eights, together = format == INT4_ZERO ? 8 : 1;
    const u32 per = format == MXFP8 ? 8 : format >= INT4 ? 1 : 4;
    const u64 in = size_of(from);
    stand at = stand_in((u32)(q->extent[3] / (8 * own)));
    for (u64 c = at.column; c < q->extent[3] / (8 * own); c += at.across) {
        u64 eight = c * own, column = q->start[3] / 8 + eight, scale = eight / eights;
        u64 scale_column = q->start[3] / q->cell[3] + scale;
        u32 factors[8 * OWN_EIGHTS], leads = eight % eights == 0;
        for (u32 i = 0; i < 8 * OWN_EIGHTS && wanted & SOURCE; i++)
            if (i < 8 * own)
                factors[i] = column_factor(column * 8 + i);
        for (u64 r = first + (u64)at.row * together; r < last; r += (u64)at.down * together) {
            u64 end = r + together < last ? r + together : last;
            u32 word = 0;
            for (u64 b = r; b < end; b++) {
                grouped n = grouped_row(q, b);
                group g[OWN_EIGHTS];
                extremes e = {0, 0};
                for (u32 k = 0; k < OWN_EIGHTS; k++) {
                    if (k >= own)
                        break;
                    g[k] =
                        load_eight(q, n.source + (eight + k) * 8 * (u64)q->source_stride[3], from);
                    UNROLL
                    for (u32 i = 0; i < 8; i++)
                        add_extreme(&e, widen(pick(&g[k], i, (u32)in), from));
                }
                e.up = lanes_most(e.up, lanes);
                e.down = lanes_most(e.down, lanes);
                format_scale s = format_scale_of(format, &e, as, global);
                u64 row = row_factor(n.row);
                for (u32 k = 0; k < OWN_EIGHTS; k++) {
                    if (k >= own)
                        break;
                    u64 to = n.destination + (eight + k) * per * (u64)q->destination_stride[3];
                    u64 sum = store_eight(q, to, format_eight(&g[k], format, from, &s, as), format,
                                          (column + k) * per, wanted);
                    if (wanted & WRITTEN)
                        t->of[1] += row * sum;
                    if (wanted & SOURCE)
                        t->of[0] += row * group_sum(&g[k], factors + 8 * k, (u32)in, 8);
                }
                word |= (u32)((int)s.zero + 8) << 4 * (u32)(b - r);
                if (!leads)
                    continue;
                store_element(n.scale + scale * (u64)q->scale_stride[3], s.stored, q->scale_size);
                if (wanted & SCALES)
                    t->of[3] += row * column_factor(scale_column) * s.stored;
            }
            if (format != INT4_ZERO || !leads)
                continue;
            u64 sum_row, to = zero_place(q, r, scale, &sum_row);
            store_element(to, word, 4);
            if (wanted & MOST)
                t->of[4] += row_factor(sum_row) * column_factor(scale_column) * word;
        }
    }
}

KERNEL(3) dray_groups(LAUNCH l)
{
    totals t = {{0, 0, 0, 0, 0}, NOBODY};
    for (u32 i = BLOCK; i < l.count; i += BLOCKS) {
        const dray__gpu_quant *q = &l.quants[l.tiles[i].piece];
        u64 rows = q->extent[0] * q->extent[1] * q->extent[2];
        u64 first = (u64)l.tiles[i].index * q->tile_rows, last = first + q->tile_rows;
        u32 global = q->format == NVFP4 ? global_scale_of(l.most[q->first_most], q->as) : 0;
        if (SYNC_OR((int)stopped(&l)))
            break;
        flush(&l, &t, q->sum);
        last = last < rows ? last : rows;
        if (q->from == BF16)
            quantise_groups(&l, q, first, last, global, &t, BF16);
        else if (q->from == F32)
            quantise_groups(&l, q, first, last, global, &t, F32);
        else
            quantise_groups(&l, q, first, last, global, &t, F16);
    }
    if (l.wanted)
        flush(&l, &t, NOBODY);
}

#endif
