/* The kernels that quantise boxes of tensors in cells, and dequantise them. Included by
 * cuda_kernels.cu alone. A thread block processes one strip of a cell at a time. */
#ifndef DRAY_MOVER_CUDA_CUDA_QUANT_H
#define DRAY_MOVER_CUDA_CUDA_QUANT_H

#include "mover/cuda/cuda_device.h"
#include "mover/kernels/formats.h"

/* Loads under way in a thread before the first of them is used. */
#define STRIP_BATCH 4
#define BYTES DRAY__GPU_BYTES

/* A strip of a cell: some of its rows, which are all dimensions but the last. */
typedef struct strip {
    u64 source, destination, scale, cell; /* cell: its index */
    u64 start[4];                         /* global */
    u64 scale_row, scale_column;
    u64 row;                    /* the cell's first row in the tensor */
    u32 extent[4], first, last; /* rows */
    u32 flat;                   /* all rows are along one dimension */
} strip;

INLINE strip strip_of(const dray__gpu_quant *q, u32 index)
{
    strip s;
    /* Each thread does this for each strip, so divisions are of 32 bits, and left out where the
     * divisor is 1. */
    u32 strips = q->strips, rest = strips == 1 ? index : index / strips, at[4];
    u32 part = index - rest * strips;
    s.cell = rest;
    UNROLL
    for (int d = 3; d >= 0; d--) {
        u32 cells = (u32)q->cells[d], next = cells == 1 ? rest : rest / cells;
        at[d] = rest - next * cells;
        rest = next;
    }
    s.source = q->source;
    s.destination = q->destination;
    s.scale = q->scales;
    s.scale_row = s.scale_column = 0;
    UNROLL
    for (int d = 0; d < 4; d++) {
        u64 number = q->first_cell[d] + at[d], low = number * q->cell[d];
        u64 high = low + q->cell[d], end = q->start[d] + q->extent[d];
        s.start[d] = low > q->start[d] ? low : q->start[d];
        s.extent[d] = (u32)((high < end ? high : end) - s.start[d]);
        s.source += (s.start[d] - q->start[d]) * (u64)q->source_stride[d];
        s.destination += (s.start[d] - q->start[d]) * (u64)q->destination_stride[d];
        /* Scales of one byte are per row: the strip's begin with the cell's first row. */
        s.scale += (q->scale_format == BYTES && d < 3 ? s.start[d] - q->start[d] : at[d]) *
                   (u64)q->scale_stride[d];
        if (d < 3)
            s.scale_row = s.scale_row * q->scale_shape[d] + number;
        else
            s.scale_column = number;
    }
    s.row = (s.start[0] * q->shape[1] + s.start[1]) * q->shape[2] + s.start[2];
    s.flat = s.extent[0] == 1 && s.extent[1] == 1;
    u32 rows = s.extent[0] * s.extent[1] * s.extent[2];
    u32 each = strips == 1 ? rows : (rows + strips - 1) / strips;
    s.first = part * each < rows ? part * each : rows;
    s.last = rows - s.first < each ? rows : s.first + each;
    return s;
}

/* A row of a strip. */
typedef struct line {
    u64 source, destination, row;
} line;

INLINE line line_of(const dray__gpu_quant *q, const strip *s, u32 row)
{
    line n;
    u32 at = s->flat ? row : row % s->extent[2];
    n.source = s->source + at * (u64)q->source_stride[2];
    n.destination = s->destination + at * (u64)q->destination_stride[2];
    n.row = s->row + at;
    if (!s->flat) {
        u32 i = row / s->extent[2] % s->extent[1], j = row / s->extent[2] / s->extent[1];
        n.source += i * (u64)q->source_stride[1] + j * (u64)q->source_stride[0];
        n.destination += i * (u64)q->destination_stride[1] + j * (u64)q->destination_stride[0];
        n.row += (j * q->shape[1] + i) * q->shape[2];
    }
    return n;
}

/* Returns the largest of all threads' values, to all threads; `room` has one for each warp. */
INLINE u32 block_most(u32 value, u32 *room)
{
    value = warp_most(value);
    if (THREAD % WARP == 0)
        room[THREAD / WARP] = value;
    SYNC();
    for (u32 i = 0; i < (THREADS + WARP - 1) / WARP; i++)
        value = room[i] > value ? room[i] : value;
    return value;
}

/* mover/kernels/quant.h has the arithmetic. */
INLINE u32 scale_of(u32 most, u32 to, u32 format)
{
    float scale = BITS_FLOAT(most);
    if (scale < 1e-4f)
        scale = 1e-4f;
    scale = scale / (to == E4M3 ? 448.0f : 57344.0f);
    u32 bits = FLOAT_BITS(scale);
    if ((bits & 0x7FFFFFFF) > 0x7F800000)
        bits = 0x7FC00000;
    if (format != 0) {
        u32 exponent = (bits >> 23) + ((bits & 0x7FFFFF) != 0);
        exponent = exponent < 1 ? 1 : exponent > 254 ? 254 : exponent;
        bits = exponent << 23;
    }
    return bits;
}

/* Reads a strip and returns its largest magnitude. With `keep` the elements are staged in shared
 * memory, else they are summed if that is wanted. */
INLINE u32 read_strip(const dray__gpu_launch *l, const dray__gpu_quant *q, const strip *s, u32 keep,
                      totals *t, const u32 from, const u32 elements)
{
    const u32 in = size_of(from), held = elements == 1 ? 1 : in * 8 / 4;
    u32 columns = s->extent[3] / elements, most = 0;
    stand at = stand_in(columns);
    for (u32 c = at.column; c < columns; c += at.across) {
        u32 column[8];
        if (!keep && l->wanted & MOST) {
            UNROLL
            for (u32 i = 0; i < 8; i++)
                if (i < elements)
                    column[i] = column_factor(s->start[3] + (u64)c * elements + i);
        }
        for (u32 r = s->first + at.row; r < s->last; r += STRIP_BATCH * at.down) {
            group g[STRIP_BATCH];
            UNROLL
            for (u32 i = 0; i < STRIP_BATCH; i++)
                if (r + i * at.down < s->last) {
                    line n = line_of(q, s, r + i * at.down);
                    g[i] = load_group(n.source + (u64)(c * (int64_t)elements * q->source_stride[3]),
                                      in, elements);
                }
            UNROLL
            for (u32 i = 0; i < STRIP_BATCH; i++)
                if (r + i * at.down < s->last) {
                    u32 a = group_most(&g[i], from, elements);
                    most = a > most ? a : most;
                    if (!keep && l->wanted & MOST)
                        t->of[4] += row_factor(line_of(q, s, r + i * at.down).row) *
                                    group_sum(&g[i], column, in, elements);
                    u32 *room = staged + ((r + i * at.down - s->first) * columns + c) * held;
                    if (keep && held == 1) {
                        room[0] = g[i].v[0];
                    } else if (keep) {
                        keep16(room, g[i].v);
                        if (held == 8)
                            keep16(room + 4, g[i].v + 4);
                    }
                }
        }
    }
    return most;
}

/* The same. With `fast`, eight elements are read at once and the compiler knows the types; else
 * they are read one by one. */
INLINE u32 strip_most(const dray__gpu_launch *l, const dray__gpu_quant *q, const strip *s, u32 keep,
                      totals *t, u32 fast)
{
    if (fast)
        return q->from == BF16 ? read_strip(l, q, s, keep, t, BF16, 8)
                               : read_strip(l, q, s, keep, t, F32, 8);
    return read_strip(l, q, s, keep, t, q->from, 1);
}

INLINE u32 quantised(u32 bits, float factor, u32 to)
{
    u32 e = narrow(FLOAT_BITS(BITS_FLOAT(bits) * factor), to);
    return (e & 0x7F) > (to == E4M3 ? 0x7Eu : 0x7Cu) ? 0x7F : e;
}

INLINE u32 dequantised(u32 bits, float scale, u32 to)
{
    u32 f = FLOAT_BITS(BITS_FLOAT(bits) * scale);
    return narrow((f & 0x7FFFFFFF) > 0x7F800000 ? 0x7FC00000 : f, to);
}

/* Returns all elements of a group multiplied by the scale, or by its inverse. */
INLINE group scale_group(const group *g, float factor, u32 from, u32 to, u32 elements)
{
    const u32 in = size_of(from), out = size_of(to);
    group h = {{0, 0, 0, 0, 0, 0, 0, 0}};
    if (to == E4M3 && elements == 8) {
        UNROLL
        for (u32 i = 0; i < 8; i += 2)
            h.v[i / 4] |= pair_to_e4m3(BITS_FLOAT(widen(pick(g, i, in), from)) * factor,
                                       BITS_FLOAT(widen(pick(g, i + 1, in), from)) * factor)
                          << 8 * (i % 4);
        return h;
    }
    if (from == E4M3 && elements == 8) {
        UNROLL
        for (u32 i = 0; i < 8; i += 2) {
            u32 low, high;
            pair_of_e4m3(g->v[i / 4] >> 8 * (i % 4) & 0xFFFF, &low, &high);
            place(&h, i, dequantised(low, factor, to), out);
            place(&h, i + 1, dequantised(high, factor, to), out);
        }
        return h;
    }
    UNROLL
    for (u32 i = 0; i < 8; i++) {
        if (i >= elements)
            break;
        u32 f = widen(pick(g, i, in), from);
        place(&h, i,
              to == E4M3 || to == E5M2 ? quantised(f, factor, to) : dequantised(f, factor, to),
              out);
    }
    return h;
}

/* Multiplies a strip by `factor` and writes it. kept: the strip is staged in shared memory. */
INLINE void write_strip(const dray__gpu_launch *l, const dray__gpu_quant *q, const strip *s,
                        u32 kept, float factor, totals *t, const u32 from, const u32 to,
                        const u32 elements)
{
    const u32 in = size_of(from), out = size_of(to), held = elements == 1 ? 1 : in * 8 / 4;
    u32 columns = s->extent[3] / elements, wanted = l->wanted;
    stand at = stand_in(columns);
    for (u32 c = at.column; c < columns; c += at.across) {
        u32 column[8];
        if (wanted) {
            UNROLL
            for (u32 i = 0; i < 8; i++)
                if (i < elements)
                    column[i] = column_factor(s->start[3] + (u64)c * elements + i);
        }
        for (u32 r = s->first + at.row; r < s->last; r += at.down) {
            line n = line_of(q, s, r);
            u64 put = n.destination + (u64)(c * (int64_t)elements * q->destination_stride[3]);
            group g = {{0, 0, 0, 0, 0, 0, 0, 0}};
            const u32 *room = staged + ((r - s->first) * columns + c) * held;
            if (kept && held == 1) {
                g.v[0] = room[0];
            } else if (kept) {
                kept16(room, g.v);
                if (held == 8)
                    kept16(room + 4, g.v + 4);
            } else {
                g = load_group(n.source + (u64)(c * (int64_t)elements * q->source_stride[3]), in,
                               elements);
            }
            group h = scale_group(&g, factor, from, to, elements);
            store_group(put, &h, out, elements);
            if (!wanted)
                continue;
            u64 row = row_factor(n.row);
            if (wanted & SOURCE)
                t->of[0] += row * group_sum(&g, column, in, elements);
            if (wanted & WRITTEN)
                t->of[1] += row * group_sum(&h, column, out, elements);
            if (wanted & BACK) {
                h = load_group_back(put, out, elements);
                t->of[2] += row * group_sum(&h, column, out, elements);
            }
        }
    }
}

/* Finds the largest elements of cells that are read twice. */
KERNEL(2) dray_most(LAUNCH l)
{
    SHARED u32 room[DRAY__GPU_THREADS];
    totals t = {{0, 0, 0, 0, 0}, NOBODY};
    for (u32 i = BLOCK; i < l.count; i += BLOCKS) {
        const dray__gpu_quant *q = &l.quants[l.tiles[i].piece];
        strip s = strip_of(q, l.tiles[i].index);
        u32 fast = q->word == 8 && (q->from == BF16 || q->from == F32);
        if (SYNC_OR((int)stopped(&l)))
            break;
        flush(&l, &t, q->sum);
        u32 most = block_most(strip_most(&l, q, &s, 0, &t, fast), room);
        if (THREAD == 0)
            MOST_TO(&l.most[q->first_most + s.cell], most);
    }
    if (l.wanted)
        flush(&l, &t, NOBODY);
}

/* Writes the exponent of a cell's scale for each row of the strip. */
INLINE void put_exponents(const dray__gpu_launch *l, const dray__gpu_quant *q, const strip *s,
                          u32 scale, totals *t)
{
    u32 exponent = scale >> 23;
    for (u32 r = s->first + THREAD; r < s->last; r += THREADS) {
        u32 k = r % s->extent[2], i = r / s->extent[2] % s->extent[1];
        u32 j = r / s->extent[2] / s->extent[1];
        AT(uint8_t, s->scale + j * (u64)q->scale_stride[0] + i * (u64)q->scale_stride[1] +
                        k * (u64)q->scale_stride[2]) = (uint8_t)exponent;
        if (l->wanted & SCALES)
            t->of[3] +=
                row_factor(line_of(q, s, r).row) * column_factor(s->scale_column) * exponent;
    }
}

/* Are the box's elements contiguous in memory, in the order of its rows? */
INLINE u32 lies_dense(const dray__gpu_quant *q)
{
    u64 step = size_of(q->from);
    UNROLL
    for (int d = 3; d >= 0; d--) {
        if (q->extent[d] != 1 && (u64)q->source_stride[d] != step)
            return 0;
        step *= q->extent[d];
    }
    return 1;
}

/* Returns the largest magnitude in a tile of a dense box, eight elements at once. */
INLINE u32 dense_most(const dray__gpu_quant *q, u32 index, const u32 from)
{
    enum { BATCH = 8 };
    u64 eights = q->extent[0] * q->extent[1] * q->extent[2] * q->extent[3] / 8;
    u64 each = (eights + q->strips - 1) / q->strips, first = index * each;
    u64 last = first + each < eights ? first + each : eights;
    u32 most = 0;
    for (u64 i = first + THREAD; i < last; i += BATCH * THREADS) {
        group g[BATCH];
        UNROLL
        for (u32 k = 0; k < BATCH; k++)
            if (i + k * THREADS < last)
                g[k] =
                    load_group(q->source + (i + k * THREADS) * 8 * size_of(from), size_of(from), 8);
        UNROLL
        for (u32 k = 0; k < BATCH; k++)
            if (i + k * THREADS < last)
                most = larger(most, group_most(&g[k], from, 8));
    }
    return most;
}

/* Sets the sum MOST of a box, which is one cell, to its largest magnitude, as the bits of an f32.
 */
KERNEL(2) dray_largest(LAUNCH l)
{
    SHARED u32 room[DRAY__GPU_THREADS];
    totals t = {{0, 0, 0, 0, 0}, NOBODY};
    dray__gpu_launch quiet = l;
    quiet.wanted = 0;
    for (u32 i = BLOCK; i < l.count; i += BLOCKS) {
        const dray__gpu_quant *q = &l.quants[l.tiles[i].piece];
        u32 fast = q->word == 8 && (q->from == BF16 || q->from == F32), most;
        if (SYNC_OR((int)stopped(&l)))
            break;
        if (fast && lies_dense(q)) {
            most = q->from == BF16 ? dense_most(q, l.tiles[i].index, BF16)
                                   : dense_most(q, l.tiles[i].index, F32);
        } else {
            strip s = strip_of(q, l.tiles[i].index);
            most = strip_most(&quiet, q, &s, 0, &t, fast);
        }
        most = block_most(most, room);
        if (THREAD == 0)
            MOST_TO((u32 *)&l.sums[4 * l.sum_count + q->sum], most);
        SYNC(); /* before `room` is used again */
    }
}

/* Writes global scales, computed from the maxima in `most`. */
KERNEL(1) dray_globals(LAUNCH l)
{
    for (u32 i = BLOCK; i < l.count; i += BLOCKS) {
        const dray__gpu_quant *q = &l.quants[l.tiles[i].piece];
        if (THREAD != 0)
            continue;
        u32 scale = global_scale_of(l.most[q->first_most], q->as);
        AT(u32, q->destination) = scale;
        if (l.wanted & WRITTEN)
            ADD_TO(&l.sums[1 * l.sum_count + q->sum], row_factor(0) * column_factor(0) * scale);
    }
}

KERNEL(3) dray_quantise(LAUNCH l)
{
    SHARED u32 room[DRAY__GPU_THREADS];
    totals t = {{0, 0, 0, 0, 0}, NOBODY};
    for (u32 i = BLOCK; i < l.count; i += BLOCKS) {
        const dray__gpu_quant *q = &l.quants[l.tiles[i].piece];
        strip s = strip_of(q, l.tiles[i].index);
        u32 once = q->strips == 1, to = q->to, most;
        /* Eight elements at once for the types that updates use, else one by one. */
        u32 fast = q->word == 8 && to == E4M3 && (q->from == BF16 || q->from == F32);
        if (SYNC_OR((int)stopped(&l)))
            break;
        flush(&l, &t, q->sum);
        if (!once)
            most = l.most[q->first_most + s.cell];
        else
            most = block_most(strip_most(&l, q, &s, 1, &t, fast), room);
        u32 scale = scale_of(most, to, q->scale_format);
        float factor = 1.0f / BITS_FLOAT(scale);
        if (q->scale_format == BYTES) {
            put_exponents(&l, q, &s, scale, &t);
        } else if (THREAD == 0 && s.first == 0) {
            AT(u32, s.scale) = scale;
            if (l.wanted & SCALES)
                t.of[3] += row_factor(s.scale_row) * column_factor(s.scale_column) * scale;
        }
        if (fast && q->from == BF16)
            write_strip(&l, q, &s, once, factor, &t, BF16, E4M3, 8);
        else if (fast)
            write_strip(&l, q, &s, once, factor, &t, F32, E4M3, 8);
        else
            write_strip(&l, q, &s, once, factor, &t, q->from, to, 1);
        if (once) /* the maxima were taken from the bits read */
            t.of[4] = t.of[0];
    }
    if (l.wanted)
        flush(&l, &t, NOBODY);
}

/* ---- cells in registers -----------------------------------------------------------------------
 */

#if defined(__CUDACC__)
#define HELD DRAY__GPU_HELD /* eights that each thread holds, at most */
#define HOLDING             /* in registers */
#define ONE_COLUMN 1
#else
#define HELD (DRAY__GPU_CELL / 8)
#define HOLDING static _Thread_local
#define ONE_COLUMN 0
#endif

/* A cell of a matrix of bf16. Addresses are of its first element, and of its scale. */
typedef struct held_cell {
    u64 source, destination, scale;
    u64 row, column, scale_row, scale_column; /* in the tensor, and in its scales */
    u32 rows, columns;                        /* columns: of eights */
} held_cell;

INLINE held_cell cell_of(const dray__gpu_quant *q, u32 index)
{
    held_cell c;
    u32 at[2], bytes = q->scale_format == BYTES;
    at[0] = index / (u32)q->cells[3];
    at[1] = index - at[0] * (u32)q->cells[3];
    u64 start[2], skipped[2], extent[2];
    UNROLL
    for (int d = 0; d < 2; d++) {
        u64 low = (q->first_cell[2 + d] + at[d]) * q->cell[2 + d], high = low + q->cell[2 + d];
        u64 end = q->start[2 + d] + q->extent[2 + d];
        start[d] = low > q->start[2 + d] ? low : q->start[2 + d];
        extent[d] = (high < end ? high : end) - start[d];
        skipped[d] = start[d] - q->start[2 + d];
    }
    c.source = q->source + skipped[0] * (u64)q->source_stride[2] + skipped[1] * 2;
    c.destination = q->destination + skipped[0] * (u64)q->destination_stride[2] + skipped[1];
    /* Scales of one byte are per row. */
    c.scale = q->scales + (bytes ? skipped[0] : at[0]) * (u64)q->scale_stride[2] +
              at[1] * (u64)q->scale_stride[3];
    u64 outer = q->start[0] * q->shape[1] + q->start[1];
    u64 scales = (q->start[0] / q->cell[0]) * q->scale_shape[1] + q->start[1] / q->cell[1];
    c.row = outer * q->shape[2] + start[0];
    c.column = start[1];
    c.scale_row = scales * q->scale_shape[2] + q->first_cell[2] + at[0];
    c.scale_column = q->first_cell[3] + at[1];
    c.rows = (u32)extent[0];
    c.columns = (u32)extent[1] / 8;
    return c;
}

/* A thread's place in a cell. On a GPU it is in the same column in all of its rows. */
typedef struct held_spot {
    u32 row, column, down;
} held_spot;

INLINE held_spot held_at(const held_cell *c, u32 i)
{
#if defined(__CUDACC__)
    (void)i;
    held_spot s = {THREAD / c->columns, THREAD % c->columns, THREADS / c->columns};
    if (s.row >= s.down) /* one of the threads left over */
        s.row = c->rows;
#else
    held_spot s = {i / c->columns, i % c->columns, 0};
#endif
    return s;
}

/* Each thread holds the eights of its column, reads them once, and multiplies them by the inverse
 * of the scale, which all threads find together. */
KERNEL(3) dray_cells(LAUNCH l)
{
    SHARED u64 factors[DRAY__GPU_ROWS];
    SHARED u32 columns[DRAY__GPU_ROWS], turned[DRAY__GPU_ROWS];
    SHARED u32 room[DRAY__GPU_THREADS];
    totals t = {{0, 0, 0, 0, 0}, NOBODY};
    const u32 wanted = l.wanted;
    for (u32 n = BLOCK; n < l.count; n += BLOCKS) {
        const dray__gpu_quant *q = &l.quants[l.tiles[n].piece];
        held_cell c = cell_of(q, l.tiles[n].index);
        held_spot at = held_at(&c, 0);
        u64 in = (u64)q->source_stride[2], out = (u64)q->destination_stride[2];
        HOLDING u32 held[HELD][4];
        u32 most = 0;
        UNROLL
        for (u32 i = 0; i < HELD; i++) {
            at = ONE_COLUMN ? at : held_at(&c, i);
            u32 r = at.row + i * at.down;
            held[i][0] = held[i][1] = held[i][2] = held[i][3] = 0;
            if (r < c.rows)
                get16(c.source + r * in + (u64)at.column * 16, held[i]);
            else if (!ONE_COLUMN)
                break;
        }
        /* No thread uses the last cell's factors any more, and the loads are under way. */
        if (SYNC_OR((int)stopped(&l)))
            break;
        flush(&l, &t, q->sum);
        for (u32 k = THREAD; k < c.rows && wanted; k += THREADS)
            factors[k] = row_factor(c.row + k);
        for (u32 k = THREADS - 1 - THREAD; k < c.columns * 2 && wanted; k += THREADS) {
            for (u32 j = 0; j < 4; j++)
                turned[4 * k + j] = columns[4 * k + j] = column_factor(c.column + 4 * k + j);
            turn_factors(turned + 4 * k);
        }
        UNROLL
        for (u32 i = 0; i < HELD; i++) {
            if (!ONE_COLUMN && i >= c.rows * c.columns)
                break;
            UNROLL
            for (u32 k = 0; k < 4; k++)
                most = MOST_OF_HALVES(most, held[i][k] & 0x7FFF7FFF);
        }
        most = block_most(larger(most << 16, most & 0xFFFF0000), room);
        u32 scale = scale_of(most, E4M3, q->scale_format);
        float factor = 1.0f / BITS_FLOAT(scale);
        if (q->scale_format == BYTES) {
            u32 exponent = scale >> 23;
            u64 part = (u64)column_factor(c.scale_column) * exponent;
            for (u32 r = THREAD; r < c.rows; r += THREADS) {
                put1(c.scale + r * (u64)q->scale_stride[2], exponent);
                if (wanted & SCALES)
                    t.of[3] += row_factor(c.row + r) * part;
            }
        } else if (THREAD == 0) {
            put4(c.scale, scale);
            if (wanted & SCALES)
                t.of[3] += row_factor(c.scale_row) * column_factor(c.scale_column) * scale;
        }
        UNROLL
        for (u32 i = 0; i < HELD; i++) {
            at = ONE_COLUMN ? at : held_at(&c, i);
            u32 r = at.row + i * at.down;
            if (r >= c.rows)
                break;
            group g = ZEROS;
            UNROLL
            for (u32 k = 0; k < 4; k++)
                g.v[k] = held[i][k];
            group h = scale_group(&g, factor, BF16, E4M3, 8);
            put8(c.destination + r * out + (u64)at.column * 8, h.v);
            if (wanted & SOURCE)
                t.of[0] += factors[r] * group_sum(&g, columns + at.column * 8, 2, 8);
            if (wanted & WRITTEN)
                t.of[1] += factors[r] * bytes_sum(h.v, turned + at.column * 8, 2);
        }
        t.of[4] = t.of[0]; /* the maxima were taken from the bits read */
    }
    if (wanted)
        flush(&l, &t, NOBODY);
}

/* Returns the strip's part of the sum of scales. The cell's first strip adds the scale's checksum.
 * The others add 0, unless the scale in memory is not the one that they used. */
INLINE u64 used_scale(const strip *s, u32 scale)
{
    if (s->first == 0)
        return row_factor(s->scale_row) * column_factor(s->scale_column) * scale;
    return AT(const u32, s->scale) ^ scale;
}

/* One thread reads the scale for all threads, so that the scale summed is the one used. */
KERNEL(4) dray_dequantise(LAUNCH l)
{
    SHARED u32 scales[2];
    totals t = {{0, 0, 0, 0, 0}, NOBODY};
    u32 turn = 0;
    for (u32 i = BLOCK; i < l.count; i += BLOCKS, turn ^= 1) {
        const dray__gpu_quant *q = &l.quants[l.tiles[i].piece];
        strip s = strip_of(q, l.tiles[i].index);
        if (THREAD == 0)
            scales[turn] = AT(const u32, s.scale);
        if (SYNC_OR((int)stopped(&l)))
            break;
        flush(&l, &t, q->sum);
        if (THREAD == 0 && l.wanted & SCALES)
            t.of[3] += used_scale(&s, scales[turn]);
        float scale = BITS_FLOAT(scales[turn]);
        if (q->word == 8 && q->from == E4M3 && q->to == BF16)
            write_strip(&l, q, &s, 0, scale, &t, E4M3, BF16, 8);
        else if (q->word == 8 && q->from == E4M3 && q->to == F32)
            write_strip(&l, q, &s, 0, scale, &t, E4M3, F32, 8);
        else
            write_strip(&l, q, &s, 0, scale, &t, q->from, q->to, 1);
    }
    if (l.wanted)
        flush(&l, &t, NOBODY);
}

#endif
