/* The GPU's kernels (cuda_kernels.h has their arguments), in the common subset of CUDA C++ and C17.
 * NVRTC or nvcc compiles them; for tests without a GPU, a C compiler.
 *
 * A thread block takes the next free tile of pieces, and every BLOCKS-th tile of boxes. Its threads
 * are laid out along a tile's columns, in as many rows as fit, so that a thread processes the same
 * columns in all of its rows. Column factors are computed once a tile and stay in registers. All
 * threads together compute the row factors, once a tile. The result does not depend on the number
 * of blocks, nor, on a GPU, on the number of whole warps in a block.
 */
#include "mover/cuda/cuda_device.h"
#include "mover/cuda/cuda_delta.h"
#include "mover/cuda/cuda_groups.h"
#include "mover/cuda/cuda_quant.h"

/* Loads under way in a thread before the first of them is used. */
#define BATCH 8
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

/* A block takes the next free tile, because the time of a tile depends on where its source is.
 * Descriptors of later tiles are fetched while the present one is moved, one step ahead each, so
 * that no thread waits for them: the number of the third tile from now, the descriptor of the
 * second, and the piece of the next one. */
typedef struct room { /* in shared memory */
    dray__gpu_piece piece[2];
    dray__gpu_tile tile[4];
    u32 number[4]; /* in the launch; count or more when there is no tile left */
    u64 factors[DRAY__GPU_ROWS];
} room;

typedef struct taker {
    u32 turn, ahead, stop; /* only the first thread uses the latter two */
} taker;

enum { PARTS = sizeof(dray__gpu_piece) / 16 };

INLINE void fetch_tile(const dray__gpu_launch *l, room *m, u32 slot, u32 number)
{
    m->number[slot] = number;
    if (number < l->count)
        fetch8(&m->tile[slot], &l->tiles[number]);
}

INLINE void fetch_piece(const dray__gpu_launch *l, room *m, u32 turn)
{
    if (m->number[turn & 3] >= l->count)
        return;
    const uint8_t *from = (const uint8_t *)&l->pieces[m->tile[turn & 3].piece];
    for (u32 i = THREAD; i < PARTS; i += THREADS)
        fetch16((uint8_t *)&m->piece[turn & 1] + 16 * i, from + 16 * i);
}

INLINE void begin_tiles(const dray__gpu_launch *l, room *m, taker *t)
{
    t->turn = t->ahead = t->stop = 0;
    if (THREAD == 0) {
        fetch_tile(l, m, 0, TAKE(l->cursor));
        fetch_tile(l, m, 1, TAKE(l->cursor));
        t->ahead = TAKE(l->cursor);
    }
    FETCHED();
    SYNC();
    fetch_piece(l, m, 0);
    FETCHED();
    SYNC();
}

/* Gives the present tile, and starts to fetch the next ones. Returns false when none is left. */
INLINE u32 this_tile(const dray__gpu_launch *l, room *m, taker *t, spot *at)
{
    if (m->number[t->turn & 3] >= l->count)
        return 0;
    *at = spot_of(l, &m->piece[t->turn & 1], m->tile[t->turn & 3].index);
    fetch_piece(l, m, t->turn + 1);
    if (THREAD == 0) {
        fetch_tile(l, m, (t->turn + 2) & 3, t->ahead);
        t->ahead = TAKE(l->cursor);
        t->stop = stopped(l);
    }
    return 1;
}

/* Goes to the next tile. Returns false, to all threads alike, when the job is aborted. */
INLINE u32 next_tile(taker *t)
{
    t->turn++;
    FETCHED();
    return !SYNC_OR((int)t->stop);
}

/* Computes the tile's row factors, by all threads together. */
INLINE void make_factors(const dray__gpu_launch *l, const spot *at, room *m)
{
    if (!l->wanted)
        return;
    for (u32 r = THREAD; r < at->rows; r += THREADS)
        m->factors[r] = row_factor(at->row + r * at->row_step);
    SYNC();
}

/* The loop of all kernels of pieces: the arguments are the code that moves the tile `at` of `p`. */
#define TILES(...)                                                                                 \
    SHARED room m;                                                                                 \
    totals t = {{0, 0, 0, 0, 0}, NOBODY};                                                          \
    taker taken;                                                                                   \
    spot at;                                                                                       \
    begin_tiles(&l, &m, &taken);                                                                   \
    while (this_tile(&l, &m, &taken, &at)) {                                                       \
        const dray__gpu_piece *p = &m.piece[taken.turn & 1];                                       \
        flush(&l, &t, p->sum);                                                                     \
        __VA_ARGS__                                                                                \
        if (!next_tile(&taken))                                                                    \
            break;                                                                                 \
    }                                                                                              \
    if (l.wanted)                                                                                  \
        flush(&l, &t, NOBODY);

/* ---- rows of words: nothing is converted ------------------------------------------------------
 */

/* Returns the sum of a word's elements. shift: the word's place in its element, where words are
 * smaller than elements. */
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

/* Moves a tile of one row, which uses each column once. */
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

/* Loads words of up to `batch` rows, from row r on. */
INLINE void load_rows(const spot *at, const stand *s, u32 c, u32 r, words *w, const u32 batch,
                      const u32 bytes)
{
    u64 from = at->source + (u64)c * bytes;
    UNROLL
    for (u32 i = 0; i < batch; i++)
        if (r + i * s->down < at->rows)
            w[i] = load(from + (u64)((r + i * s->down) * at->source_stride), bytes);
}

/* sink: nothing is written; then more threads do less work each. Row factors are computed while the
 * first loads are under way. */
INLINE void move_words(const dray__gpu_launch *l, const spot *at, room *m, totals *t,
                       const u32 bytes, const u32 unit, const u32 sink)
{
    const u32 batch = sink ? BATCH / 2 : BATCH, per_word = bytes > unit ? bytes / unit : 1;
    const u64 *factors = m->factors;
    u32 wanted = sink ? SOURCE : at->wanted, columns = at->columns * unit / bytes;
    u32 column[16], shift = 0;
    words w[BATCH];
    stand s = stand_in(columns);
    if (at->rows == 1) {
        make_factors(l, at, m);
        move_line(at, factors, t, bytes, unit);
        t->of[1] = t->of[0];
        return;
    }
    u32 c = s.column, r = s.row;
    if (c < columns)
        load_rows(at, &s, c, r, w, batch, bytes);
    make_factors(l, at, m);
    while (c < columns) {
        u64 to = at->destination + (u64)c * bytes;
        if (r == s.row && wanted) {
            shift = unit > bytes ? c * bytes % unit * 8 : 0;
            UNROLL
            for (u32 i = 0; i < 16; i++)
                if (i < per_word)
                    column[i] = column_factor(at->column + (u64)c * bytes / unit + i);
        }
        UNROLL
        for (u32 i = 0; i < batch; i++) {
            u32 row = r + i * s.down;
            if (row >= at->rows)
                break;
            if (!sink && at->destination)
                store(to + (u64)(row * at->destination_stride), &w[i], bytes);
            if (wanted & (SOURCE | WRITTEN))
                t->of[0] += factors[row] * word_sum(&w[i], column, bytes, unit, shift);
        }
        if (wanted & BACK) {
            UNROLL
            for (u32 i = 0; i < batch; i++)
                if (r + i * s.down < at->rows)
                    w[i] = load_back(to + (u64)((r + i * s.down) * at->destination_stride), bytes);
            UNROLL
            for (u32 i = 0; i < batch; i++)
                if (r + i * s.down < at->rows)
                    t->of[2] +=
                        factors[r + i * s.down] * word_sum(&w[i], column, bytes, unit, shift);
        }
        r += batch * s.down;
        if (r >= at->rows) {
            r = s.row;
            c += s.across;
        }
        if (c < columns)
            load_rows(at, &s, c, r, w, batch, bytes);
    }
    t->of[1] = t->of[0]; /* the same bits */
}

KERNEL(2) dray_words(LAUNCH l)
{
    TILES(if (p->unit == 2) move_words(&l, &at, &m, &t, 16, 2, 0);
          else move_words(&l, &at, &m, &t, 16, 4, 0);)
}

KERNEL(2) dray_bytes(LAUNCH l)
{
    TILES(move_words(&l, &at, &m, &t, 16, 1, 0);)
}

KERNEL(3) dray_sum(LAUNCH l)
{
    TILES(if (p->unit == 2) move_words(&l, &at, &m, &t, 16, 2, 1);
          else if (p->unit == 4) move_words(&l, &at, &m, &t, 16, 4, 1);
          else move_words(&l, &at, &m, &t, 16, 1, 1);)
}

KERNEL(2) dray_narrow(LAUNCH l)
{
    TILES(if (p->word == 8) move_words(&l, &at, &m, &t, 8, p->unit, 0);
          else if (p->word == 4) move_words(&l, &at, &m, &t, 4, p->unit, 0);
          else if (p->word == 2) move_words(&l, &at, &m, &t, 2, p->unit, 0);
          else move_words(&l, &at, &m, &t, 1, p->unit, 0);)
}

/* ---- rows of elements that are converted ------------------------------------------------------
 */

/* Moves as many elements at once as fill 16 bytes on the wider side, so that adjacent threads of a
 * warp read and write adjacent memory. */
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

INLINE void cast_tile(const dray__gpu_piece *p, const spot *at, const u64 *factors, totals *t)
{
#define XX(a, b)                                                                                   \
    if (p->from == (a) && p->to == (b))                                                            \
        cast_rows(at, factors, t, a, b);
    GROUP_CASTS(XX)
#undef XX
}

KERNEL(2) dray_cast(LAUNCH l)
{
    TILES(make_factors(&l, &at, &m); cast_tile(p, &at, m.factors, &t);)
}

/* ---- element by element -----------------------------------------------------------------------
 */

INLINE void any_tile(const dray__gpu_piece *p, const spot *at, const u64 *factors, totals *t)
{
    /* Elements that are not converted may have any dtype; only their size is known. */
    const u32 in = p->unit, out = p->from == p->to ? p->unit : size_of(p->to);
    stand s = stand_in(at->columns);
    for (u32 c = s.column; c < at->columns; c += s.across)
        for (u32 r = s.row; r < at->rows; r += s.down) {
            u64 from = at->source + (u64)(r * at->source_stride + c * p->source_step);
            u64 to = at->destination + (u64)(r * at->destination_stride + c * p->destination_step);
            u64 bits = load_element(from, in), made = convert(bits, p->from, p->to);
            if (at->destination)
                store_element(to, made, out);
            if (at->wanted & SOURCE)
                t->of[0] += factors[r] * element_sum(bits, in, at->column + c);
            if (at->wanted & WRITTEN)
                t->of[1] += factors[r] * element_sum(made, out, at->column + c);
            if (at->wanted & BACK)
                t->of[2] += factors[r] * element_sum(load_element(to, out), out, at->column + c);
        }
}

KERNEL(3) dray_any(LAUNCH l)
{
    TILES(make_factors(&l, &at, &m); any_tile(p, &at, m.factors, &t);)
}

/* ---- transposed -------------------------------------------------------------------------------
 */

/* Side of a tile. In shared memory its rows are one element longer, so that a column uses all
 * banks. */
enum { SIDE = 64, TURN_BATCH = 8 };

/* Gives the row and column of element k of a tile, counted along the dimension that is dense on the
 * side that is read, or written. Returns false when the tile, at the tensor's edge, has no such
 * element. */
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

/* Elements have at most 4 bytes and are aligned to their size. */
KERNEL(4) dray_turn(LAUNCH l)
{
    SHARED u64 factors[SIDE];
    SHARED u32 columns[SIDE], tile[SIDE][SIDE + 1];
    totals t = {{0, 0, 0, 0, 0}, NOBODY};
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
