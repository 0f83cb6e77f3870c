/* The GPU's kernels (cuda_kernels.h says what they are given), in the common subset of CUDA C++ and
 * C17: NVRTC or nvcc compiles them, and, where there is no GPU, a C compiler for tests.
 *
 * Blocks take tiles as they come; of boxes, every BLOCKS-th. A block's threads stand side by side
 * along a tile's columns, as many rows of them as there is room for, so that each meets the same
 * columns in all of its rows: column factors are made once a tile and stay in registers; row
 * factors are made once a tile by all threads together. Right for any number of blocks and, on a
 * GPU, any of whole warps.
 */
#include "mover/cuda_device.h"

/* Loads under way in a thread before the first of them is used. */
#define BATCH 8
#define STRIP_BATCH 4
#define LINE_BATCH 4

/* ---- tiles of pieces --------------------------------------------------------------------------
 */

typedef struct spot {
    u64 source, destination, row, row_step, column;
    int64_t source_stride, destination_stride;
    u32 rows, columns;
    u32 wanted; /* sums */
} spot;

INLINE spot spot_of(const dray__gpu_launch *l, const dray__gpu_piece *p, u32 index)
{
    u32 c = index % p->column_tiles * p->tile_columns;
    index /= p->column_tiles;
    u32 r = index % p->row_tiles * p->tile_rows;
    index /= p->row_tiles;
    u32 i = index % p->extent[1], j = index / p->extent[1];
    spot at;
    at.source = p->source + (u64)(j * p->source_stride[0] + i * p->source_stride[1] +
                                  r * p->source_stride[2] + c * p->source_step);
    at.destination = p->destination;
    if (at.destination)
        at.destination += (u64)(j * p->destination_stride[0] + i * p->destination_stride[1] +
                                r * p->destination_stride[2] + c * p->destination_step);
    at.wanted = at.destination ? l->wanted : l->wanted & SOURCE;
    at.row = p->row + j * p->row_step[0] + i * p->row_step[1] + r * p->row_step[2];
    at.row_step = p->row_step[2];
    at.column = p->column + c;
    at.source_stride = p->source_stride[2];
    at.destination_stride = p->destination_stride[2];
    at.rows = p->extent[2] - r < p->tile_rows ? p->extent[2] - r : p->tile_rows;
    at.columns = p->columns - c < p->tile_columns ? p->columns - c : p->tile_columns;
    return at;
}

/* Where a thread stands among `columns` (of words, groups or elements). */
typedef struct stand {
    u32 column, row, across, down; /* its first ones, and how far it is to the next */
} stand;

INLINE stand stand_in(u32 columns)
{
    stand s;
    s.across = columns < THREADS ? columns : THREADS;
    s.down = THREADS / s.across;
    s.column = THREAD % s.across;
    s.row = THREAD / s.across;
    if (s.row >= s.down) /* one of those who are too many */
        s.column = columns;
    return s;
}

WATCHING u32 stopped(const dray__gpu_launch *l)
{
    return FLAG(l->stop);
}

/* A block takes the next tile that nobody has: how fast tiles go depends on where they come from.
 * The first thread asks for one more ahead, so that nobody waits for the answer. Two slots, and two
 * tables of row factors, take turns, so that no thread overwrites what a slower one still reads. */
typedef struct taker {
    u32 ahead; /* the first thread's */
    u32 turn;
} taker;

INLINE u32 take_first(const dray__gpu_launch *l, taker *t, u32 *slots)
{
    t->turn = 0;
    t->ahead = 0;
    if (THREAD == 0) {
        slots[0] = TAKE(l->cursor);
        t->ahead = TAKE(l->cursor);
    }
    SYNC();
    return slots[0];
}

INLINE u32 take_next(taker *t, const u32 *slots)
{
    t->turn ^= 1;
    return slots[t->turn];
}

/* The tile's row factors. False: to be stopped, for all threads alike. */
INLINE u32 begin_tile(const dray__gpu_launch *l, const spot *at, taker *t, u32 *slots, u64 *factors)
{
    if (THREAD == 0) {
        slots[t->turn ^ 1] = t->ahead;
        t->ahead = TAKE(l->cursor);
    }
    for (u32 r = THREAD; r < at->rows && l->wanted; r += THREADS)
        factors[r] = row_factor(at->row + r * at->row_step);
    return !SYNC_OR((int)stopped(l));
}

/* ---- rows of words: nothing is converted ------------------------------------------------------
 */

/* Σ of a word's elements; shift: of a word that is less than an element. */
INLINE u64 word_sum(const words *w, const u32 *factors, u32 bytes, u32 unit, u32 shift)
{
    u64 sum = 0;
    if (unit > bytes)
        return (u64)factors[0] * (w->v[0] << shift);
    UNROLL
    for (u32 i = 0; i < 4; i++) {
        if (4 * i >= bytes)
            break;
        if (unit == 4) {
            sum += (u64)factors[i] * w->v[i];
        } else if (unit == 2) {
            sum += (u64)factors[2 * i] * (w->v[i] & 0xFFFF);
            if (bytes > 2)
                sum += (u64)factors[2 * i + 1] * (w->v[i] >> 16);
        } else {
            UNROLL
            for (u32 k = 0; k < 4; k++)
                if (k < bytes)
                    sum += (u64)factors[4 * i + k] * (w->v[i] >> 8 * k & 0xFF);
        }
    }
    return sum;
}

/* A tile of one row: its columns are met once each. */
INLINE void move_line(const spot *at, const u64 *factors, totals *t, const u32 bytes,
                      const u32 unit)
{
    const u32 per_word = bytes > unit ? bytes / unit : 1;
    u32 columns = at->columns * unit / bytes;
    u64 sum = 0, back = 0;
    for (u32 first = THREAD; first < columns; first += LINE_BATCH * THREADS) {
        words w[LINE_BATCH];
        UNROLL
        for (u32 i = 0; i < LINE_BATCH; i++)
            if (first + i * THREADS < columns)
                w[i] = load(at->source + (u64)(first + i * THREADS) * bytes, bytes);
        UNROLL
        for (u32 i = 0; i < LINE_BATCH; i++) {
            u32 c = first + i * THREADS, column[16],
                shift = unit > bytes ? c * bytes % unit * 8 : 0;
            u64 to = at->destination + (u64)c * bytes;
            if (c >= columns)
                break;
            if (at->destination)
                store(to, &w[i], bytes);
            if (!at->wanted)
                continue;
            UNROLL
            for (u32 k = 0; k < 16; k++)
                if (k < per_word)
                    column[k] = column_factor(at->column + (u64)c * bytes / unit + k);
            sum += word_sum(&w[i], column, bytes, unit, shift);
            if (at->wanted & BACK) {
                w[i] = load_back(to, bytes);
                back += word_sum(&w[i], column, bytes, unit, shift);
            }
        }
    }
    if (!at->wanted)
        return;
    t->of[0] += factors[0] * sum;
    t->of[2] += factors[0] * back;
}

/* sink: nothing is written; more threads then do less each. */
INLINE void move_words(const spot *at, const u64 *factors, totals *t, const u32 bytes,
                       const u32 unit, const u32 sink)
{
    const u32 batch = sink ? BATCH / 2 : BATCH, per_word = bytes > unit ? bytes / unit : 1;
    u32 wanted = sink ? SOURCE : at->wanted, columns = at->columns * unit / bytes;
    stand s = stand_in(columns);
    if (at->rows == 1) {
        move_line(at, factors, t, bytes, unit);
        t->of[1] = t->of[0];
        return;
    }
    for (u32 c = s.column; c < columns; c += s.across) {
        u32 column[16], shift = unit > bytes ? c * bytes % unit * 8 : 0;
        if (wanted) {
            UNROLL
            for (u32 i = 0; i < 16; i++)
                if (i < per_word)
                    column[i] = column_factor(at->column + (u64)c * bytes / unit + i);
        }
        u64 from = at->source + (u64)c * bytes + (u64)(s.row * at->source_stride);
        u64 to = at->destination + (u64)c * bytes + (u64)(s.row * at->destination_stride);
        int64_t from_step = s.down * at->source_stride, to_step = s.down * at->destination_stride;
        for (u32 r = s.row; r < at->rows; r += batch * s.down) {
            words w[BATCH];
            UNROLL
            for (u32 i = 0; i < batch; i++)
                if (r + i * s.down < at->rows)
                    w[i] = load(from + (u64)(i * from_step), bytes);
            UNROLL
            for (u32 i = 0; i < batch; i++) {
                if (r + i * s.down >= at->rows)
                    break;
                if (!sink && at->destination)
                    store(to + (u64)(i * to_step), &w[i], bytes);
                if (wanted & (SOURCE | WRITTEN))
                    t->of[0] +=
                        factors[r + i * s.down] * word_sum(&w[i], column, bytes, unit, shift);
            }
            if (wanted & BACK) {
                UNROLL
                for (u32 i = 0; i < batch; i++)
                    if (r + i * s.down < at->rows)
                        w[i] = load_back(to + (u64)(i * to_step), bytes);
                UNROLL
                for (u32 i = 0; i < batch; i++)
                    if (r + i * s.down < at->rows)
                        t->of[2] +=
                            factors[r + i * s.down] * word_sum(&w[i], column, bytes, unit, shift);
            }
            from += (u64)(batch * from_step);
            to += (u64)(batch * to_step);
        }
    }
    t->of[1] = t->of[0]; /* the same bits */
}

KERNEL(2) dray_words(LAUNCH l)
{
    SHARED u64 factors[2][DRAY__GPU_ROWS];
    SHARED u32 slots[2];
    totals t = {{0, 0, 0, 0}, NOBODY};
    taker turns;
    for (u32 i = take_first(&l, &turns, slots); i < l.count; i = take_next(&turns, slots)) {
        const dray__gpu_piece *p = &l.pieces[l.tiles[i].piece];
        spot at = spot_of(&l, p, l.tiles[i].index);
        if (!begin_tile(&l, &at, &turns, slots, factors[turns.turn]))
            break;
        flush(&l, &t, p->sum);
        if (p->unit == 2)
            move_words(&at, factors[turns.turn], &t, 16, 2, 0);
        else if (p->unit == 4)
            move_words(&at, factors[turns.turn], &t, 16, 4, 0);
        else
            move_words(&at, factors[turns.turn], &t, 16, 1, 0);
    }
    if (l.wanted)
        flush(&l, &t, NOBODY);
}

KERNEL(3) dray_sum(LAUNCH l)
{
    SHARED u64 factors[2][DRAY__GPU_ROWS];
    SHARED u32 slots[2];
    totals t = {{0, 0, 0, 0}, NOBODY};
    taker turns;
    for (u32 i = take_first(&l, &turns, slots); i < l.count; i = take_next(&turns, slots)) {
        const dray__gpu_piece *p = &l.pieces[l.tiles[i].piece];
        spot at = spot_of(&l, p, l.tiles[i].index);
        if (!begin_tile(&l, &at, &turns, slots, factors[turns.turn]))
            break;
        flush(&l, &t, p->sum);
        if (p->unit == 2)
            move_words(&at, factors[turns.turn], &t, 16, 2, 1);
        else if (p->unit == 4)
            move_words(&at, factors[turns.turn], &t, 16, 4, 1);
        else
            move_words(&at, factors[turns.turn], &t, 16, 1, 1);
    }
    if (l.wanted)
        flush(&l, &t, NOBODY);
}

KERNEL(2) dray_narrow(LAUNCH l)
{
    SHARED u64 factors[2][DRAY__GPU_ROWS];
    SHARED u32 slots[2];
    totals t = {{0, 0, 0, 0}, NOBODY};
    taker turns;
    for (u32 i = take_first(&l, &turns, slots); i < l.count; i = take_next(&turns, slots)) {
        const dray__gpu_piece *p = &l.pieces[l.tiles[i].piece];
        spot at = spot_of(&l, p, l.tiles[i].index);
        if (!begin_tile(&l, &at, &turns, slots, factors[turns.turn]))
            break;
        flush(&l, &t, p->sum);
        if (p->word == 8)
            move_words(&at, factors[turns.turn], &t, 8, p->unit, 0);
        else if (p->word == 4)
            move_words(&at, factors[turns.turn], &t, 4, p->unit, 0);
        else if (p->word == 2)
            move_words(&at, factors[turns.turn], &t, 2, p->unit, 0);
        else
            move_words(&at, factors[turns.turn], &t, 1, p->unit, 0);
    }
    if (l.wanted)
        flush(&l, &t, NOBODY);
}

/* ---- rows of elements that are converted ------------------------------------------------------
 */

INLINE group convert_group(const group *in, u32 from, u32 to, u32 elements)
{
    group out = {{0, 0, 0, 0, 0, 0, 0, 0}};
    UNROLL
    for (u32 i = 0; i < 8; i++)
        if (i < elements)
            place(&out, i, narrow(widen(pick(in, i, size_of(from)), from), to), size_of(to));
    return out;
}

/* As many elements at once as fill 16 bytes on the wider side: then neighbours in a warp read, and
 * write, what lies beside each other. */
INLINE void cast_rows(const spot *at, const u64 *factors, totals *t, const u32 from, const u32 to)
{
    const u32 in = size_of(from), out = size_of(to), each = in == 4 || out == 4 ? 4 : 8;
    u32 wanted = at->wanted, columns = at->columns / each;
    stand s = stand_in(columns);
    for (u32 c = s.column; c < columns; c += s.across) {
        u32 column[8];
        if (wanted) {
            UNROLL
            for (u32 i = 0; i < 8; i++)
                if (i < each)
                    column[i] = column_factor(at->column + (u64)c * each + i);
        }
        u64 source = at->source + (u64)c * each * in;
        u64 destination = at->destination + (u64)c * each * out;
        for (u32 r = s.row; r < at->rows; r += BATCH * s.down) {
            group g[BATCH];
            UNROLL
            for (u32 i = 0; i < BATCH; i++)
                if (r + i * s.down < at->rows)
                    g[i] =
                        load_group(source + (u64)((r + i * s.down) * at->source_stride), in, each);
            UNROLL
            for (u32 i = 0; i < BATCH; i++) {
                u32 row = r + i * s.down;
                if (row >= at->rows)
                    break;
                u64 put = destination + (u64)(row * at->destination_stride);
                group h = convert_group(&g[i], from, to, each);
                store_group(put, &h, out, each);
                if (wanted & SOURCE)
                    t->of[0] += factors[row] * group_sum(&g[i], column, in, each);
                if (wanted & WRITTEN)
                    t->of[1] += factors[row] * group_sum(&h, column, out, each);
            }
            if (!(wanted & BACK))
                continue;
            UNROLL
            for (u32 i = 0; i < BATCH; i++) {
                u32 row = r + i * s.down;
                if (row >= at->rows)
                    break;
                group h =
                    load_group_back(destination + (u64)(row * at->destination_stride), out, each);
                t->of[2] += factors[row] * group_sum(&h, column, out, each);
            }
        }
    }
}

/* XX(from, to): conversions that updates make; the others go element by element. */
#define GROUP_CASTS(XX)                                                                            \
    XX(F32, BF16) XX(BF16, F32) XX(F32, F16) XX(F16, F32) XX(BF16, F16) XX(F16, BF16)

KERNEL(2) dray_cast(LAUNCH l)
{
    SHARED u64 factors[2][DRAY__GPU_ROWS];
    SHARED u32 slots[2];
    totals t = {{0, 0, 0, 0}, NOBODY};
    taker turns;
    for (u32 i = take_first(&l, &turns, slots); i < l.count; i = take_next(&turns, slots)) {
        const dray__gpu_piece *p = &l.pieces[l.tiles[i].piece];
        spot at = spot_of(&l, p, l.tiles[i].index);
        if (!begin_tile(&l, &at, &turns, slots, factors[turns.turn]))
            break;
        flush(&l, &t, p->sum);
#define XX(a, b)                                                                                   \
    if (p->from == (a) && p->to == (b))                                                            \
        cast_rows(&at, factors[turns.turn], &t, a, b);
        GROUP_CASTS(XX)
#undef XX
    }
    if (l.wanted)
        flush(&l, &t, NOBODY);
}

/* ---- element by element -----------------------------------------------------------------------
 */

KERNEL(3) dray_any(LAUNCH l)
{
    SHARED u64 factors[2][DRAY__GPU_ROWS];
    SHARED u32 slots[2];
    totals t = {{0, 0, 0, 0}, NOBODY};
    taker turns;
    for (u32 i = take_first(&l, &turns, slots); i < l.count; i = take_next(&turns, slots)) {
        const dray__gpu_piece *p = &l.pieces[l.tiles[i].piece];
        spot at = spot_of(&l, p, l.tiles[i].index);
        if (!begin_tile(&l, &at, &turns, slots, factors[turns.turn]))
            break;
        flush(&l, &t, p->sum);
        /* What is not converted may have a dtype that is only known by its size. */
        const u32 in = p->unit, out = p->from == p->to ? p->unit : size_of(p->to);
        stand s = stand_in(at.columns);
        for (u32 c = s.column; c < at.columns; c += s.across)
            for (u32 r = s.row; r < at.rows; r += s.down) {
                u64 from = at.source + (u64)(r * at.source_stride + c * p->source_step);
                u64 to =
                    at.destination + (u64)(r * at.destination_stride + c * p->destination_step);
                u64 bits = load_element(from, in), made = convert(bits, p->from, p->to);
                if (at.destination)
                    store_element(to, made, out);
                if (at.wanted & SOURCE)
                    t.of[0] += factors[turns.turn][r] * element_sum(bits, in, at.column + c);
                if (at.wanted & WRITTEN)
                    t.of[1] += factors[turns.turn][r] * element_sum(made, out, at.column + c);
                if (at.wanted & BACK)
                    t.of[2] += factors[turns.turn][r] *
                               element_sum(load_element(to, out), out, at.column + c);
            }
    }
    if (l.wanted)
        flush(&l, &t, NOBODY);
}

/* ---- turned over ------------------------------------------------------------------------------
 */

/* Of a tile; in shared memory its rows are one longer, so that a column meets all banks. */
enum { SIDE = 64, TURN_BATCH = 8 };

/* What a thread's k-th element of a tile is, counted along the dimension that is dense on the side
 * that is read, or written. False: the tile, at the tensor's edge, has none there. */
INLINE u32 turn_element(const spot *at, u32 by_column, u32 k, u32 *row, u32 *column)
{
    *row = by_column ? k / SIDE : k % SIDE;
    *column = by_column ? k % SIDE : k / SIDE;
    return *row < at->rows && *column < at->columns;
}

INLINE void turn_in(const dray__gpu_piece *p, const spot *at, u32 by_column, u32 (*tile)[SIDE + 1],
                    const u64 *factors, const u32 *columns, totals *t, const u32 in)
{
    u32 v[TURN_BATCH], r, c;
    for (u32 first = THREAD; first < SIDE * SIDE; first += TURN_BATCH * THREADS) {
        UNROLL
        for (u32 i = 0; i < TURN_BATCH; i++)
            if (turn_element(at, by_column, first + i * THREADS, &r, &c))
                v[i] =
                    load(at->source + (u64)(r * at->source_stride + c * p->source_step), in).v[0];
        UNROLL
        for (u32 i = 0; i < TURN_BATCH; i++) {
            if (!turn_element(at, by_column, first + i * THREADS, &r, &c))
                continue;
            u32 made = (u32)convert(v[i], p->from, p->to);
            tile[r][c] = made;
            if (at->wanted & SOURCE)
                t->of[0] += factors[r] * columns[c] * v[i];
            if (at->wanted & WRITTEN)
                t->of[1] += factors[r] * columns[c] * made;
        }
    }
}

/* Elements are at most 4 bytes, and lie at multiples of that. */
KERNEL(4) dray_turn(LAUNCH l)
{
    SHARED u64 factors[SIDE];
    SHARED u32 columns[SIDE], tile[SIDE][SIDE + 1];
    totals t = {{0, 0, 0, 0}, NOBODY};
    for (u32 i = BLOCK; i < l.count; i += BLOCKS) {
        const dray__gpu_piece *p = &l.pieces[l.tiles[i].piece];
        spot at = spot_of(&l, p, l.tiles[i].index);
        const u32 in = p->unit, out = p->from == p->to ? p->unit : size_of(p->to);
        u32 by_column = p->source_step == (int64_t)in, r, c;
        SYNC(); /* the tile before is written */
        for (u32 k = THREAD; k < SIDE && at.wanted; k += THREADS) {
            factors[k] = row_factor(at.row + k * at.row_step);
            columns[k] = column_factor(at.column + k);
        }
        if (SYNC_OR((int)stopped(&l)))
            break;
        flush(&l, &t, p->sum);
        if (in == 2)
            turn_in(p, &at, by_column, tile, factors, columns, &t, 2);
        else if (in == 4)
            turn_in(p, &at, by_column, tile, factors, columns, &t, 4);
        else
            turn_in(p, &at, by_column, tile, factors, columns, &t, 1);
        SYNC();
        for (u32 k = THREAD; k < SIDE * SIDE; k += THREADS) {
            if (!turn_element(&at, !by_column, k, &r, &c))
                continue;
            u64 to = at.destination + (u64)(r * at.destination_stride + c * p->destination_step);
            words w = {{tile[r][c], 0, 0, 0}};
            store(to, &w, out);
            if (at.wanted & BACK)
                t.of[2] += factors[r] * columns[c] * load(to, out).v[0];
        }
    }
    if (l.wanted)
        flush(&l, &t, NOBODY);
}

/* ---- boxes that are quantised -----------------------------------------------------------------
 */

/* A strip of a cell: some of its rows, which are all dimensions but the last. */
typedef struct strip {
    u64 source, destination, scale, cell; /* cell: its number */
    u64 start[4];                         /* global */
    u64 scale_row, scale_column;
    u64 row;                    /* the cell's first, in the tensor */
    u32 extent[4], first, last; /* rows */
    u32 flat;                   /* rows go along one dimension */
} strip;

INLINE strip strip_of(const dray__gpu_quant *q, u32 index)
{
    strip s;
    u32 part = index % q->strips;
    u64 rest = index / q->strips, at[4];
    s.cell = rest;
    UNROLL
    for (int d = 3; d >= 0; d--) {
        at[d] = rest % q->cells[d];
        rest /= q->cells[d];
    }
    s.source = q->source;
    s.destination = q->destination;
    s.scale = q->scales;
    s.scale_row = s.scale_column = 0;
    UNROLL
    for (int d = 0; d < 4; d++) {
        u64 number = q->start[d] / q->cell[d] + at[d], low = number * q->cell[d];
        u64 high = low + q->cell[d], end = q->start[d] + q->extent[d];
        s.start[d] = low > q->start[d] ? low : q->start[d];
        s.extent[d] = (u32)((high < end ? high : end) - s.start[d]);
        s.source += (s.start[d] - q->start[d]) * (u64)q->source_stride[d];
        s.destination += (s.start[d] - q->start[d]) * (u64)q->destination_stride[d];
        s.scale += at[d] * (u64)q->scale_stride[d];
        if (d < 3)
            s.scale_row = s.scale_row * q->scale_shape[d] + number;
        else
            s.scale_column = number;
    }
    s.row = (s.start[0] * q->shape[1] + s.start[1]) * q->shape[2] + s.start[2];
    s.flat = s.extent[0] == 1 && s.extent[1] == 1;
    u32 rows = s.extent[0] * s.extent[1] * s.extent[2];
    u32 each = (rows + q->strips - 1) / q->strips;
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

/* The largest of all threads' values, for all of them; `room` has one for each warp. */
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

/* mover/quant.h has the arithmetic. */
INLINE u32 scale_of(u32 most, u32 to, u32 format)
{
    float scale = BITS_FLOAT(most);
    if (scale < 1e-4f)
        scale = 1e-4f;
    scale = scale / (to == E4M3 ? 448.0f : 57344.0f);
    u32 bits = FLOAT_BITS(scale);
    if ((bits & 0x7FFFFFFF) > 0x7F800000)
        bits = 0x7FC00000;
    if (format == UE8M0) {
        u32 exponent = (bits >> 23) + ((bits & 0x7FFFFF) != 0);
        exponent = exponent < 1 ? 1 : exponent > 254 ? 254 : exponent;
        bits = exponent << 23;
    }
    return bits;
}

/* Stages what it reads (keep), and says how large the largest is. */
INLINE u32 read_strip(const dray__gpu_quant *q, const strip *s, u32 keep, const u32 from,
                      const u32 elements)
{
    const u32 in = size_of(from), held = elements == 1 ? 1 : in * 8 / 4;
    u32 columns = s->extent[3] / elements, most = 0;
    stand at = stand_in(columns);
    for (u32 c = at.column; c < columns; c += at.across)
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
    return most;
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

/* All elements of a group, multiplied with the scale, or its inverse. */
INLINE group scale_group(const group *g, float factor, u32 from, u32 to, u32 elements)
{
    const u32 in = size_of(from), out = size_of(to);
    group h = {{0, 0, 0, 0, 0, 0, 0, 0}};
#if defined(HAS_E4M3)
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
#endif
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

/* Multiplies a strip with `factor` and writes it. kept: it is staged. */
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

/* The largest elements of cells that are read twice. */
KERNEL(2) dray_most(LAUNCH l)
{
    SHARED u32 room[DRAY__GPU_THREADS];
    for (u32 i = BLOCK; i < l.count; i += BLOCKS) {
        const dray__gpu_quant *q = &l.quants[l.tiles[i].piece];
        strip s = strip_of(q, l.tiles[i].index);
        if (SYNC_OR((int)stopped(&l)))
            break;
        u32 most = block_most(q->word == 8 && q->from == BF16  ? read_strip(q, &s, 0, BF16, 8)
                              : q->word == 8 && q->from == F32 ? read_strip(q, &s, 0, F32, 8)
                                                               : read_strip(q, &s, 0, q->from, 1),
                              room);
        if (THREAD == 0)
            MOST_TO(&l.most[q->first_most + s.cell], most);
    }
}

KERNEL(3) dray_quantise(LAUNCH l)
{
    SHARED u32 room[DRAY__GPU_THREADS];
    totals t = {{0, 0, 0, 0}, NOBODY};
    for (u32 i = BLOCK; i < l.count; i += BLOCKS) {
        const dray__gpu_quant *q = &l.quants[l.tiles[i].piece];
        strip s = strip_of(q, l.tiles[i].index);
        u32 once = q->strips == 1, to = q->to, most;
        /* Eight elements at once for what updates have, else one by one. */
        u32 fast = q->word == 8 && to == E4M3 && (q->from == BF16 || q->from == F32);
        if (SYNC_OR((int)stopped(&l)))
            break;
        flush(&l, &t, q->sum);
        if (!once)
            most = l.most[q->first_most + s.cell];
        else if (fast)
            most = block_most(q->from == BF16 ? read_strip(q, &s, 1, BF16, 8)
                                              : read_strip(q, &s, 1, F32, 8),
                              room);
        else
            most = block_most(read_strip(q, &s, 1, q->from, 1), room);
        u32 scale = scale_of(most, to, q->scale_format);
        float factor = 1.0f / BITS_FLOAT(scale);
        if (THREAD == 0 && s.first == 0) {
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
    }
    if (l.wanted)
        flush(&l, &t, NOBODY);
}

KERNEL(4) dray_dequantise(LAUNCH l)
{
    totals t = {{0, 0, 0, 0}, NOBODY};
    for (u32 i = BLOCK; i < l.count; i += BLOCKS) {
        const dray__gpu_quant *q = &l.quants[l.tiles[i].piece];
        strip s = strip_of(q, l.tiles[i].index);
        if (SYNC_OR((int)stopped(&l)))
            break;
        flush(&l, &t, q->sum);
        float scale = BITS_FLOAT(AT(const u32, s.scale));
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
