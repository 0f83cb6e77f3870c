/* A rectangle moved and summed in one pass over its source. */
#include "mover/checksum.h"
#include "mover/kernels.h"
#include "mover/rect.h"

#include <string.h>

/* As in checksum.c: column factors are made for a strip of columns and used for all rows. */
enum { COLUMNS = 8192, COLUMNS_OF_ONE_ROW = 2048, CHUNK = 1024 };

typedef uint64_t (*dot_fn)(const uint32_t *columns, const void *data, size_t count);
typedef uint64_t (*copy_fn)(const uint32_t *columns, const void *data, void *out, size_t count);

/* How the elements of a row go from one side to the other. */
typedef struct way {
    size_t from_size, to_size, from_words, to_words; /* words: columns that an element counts as */
    int64_t source_stride, destination_stride;
    dray__cast_fn cast; /* NULL: the bits as they are */
    dray__cast_summed_fn cast_summed;
    dot_fn from_dot, to_dot;
    copy_fn copy;
    int64_t ahead; /* from what is read now to what is read soon, in bytes */
} way;

/* Of one strip of columns; the same twice where elements count alike on both sides. */
typedef struct factors {
    const uint32_t *from, *to;
} factors;

static way way_of(const dray__rect *rect, int64_t source_stride, int64_t destination_stride)
{
    const dray__kernels *k = dray__kernels_get();
    const dot_fn dots[] = {[1] = k->dot1, [2] = k->dot2, [4] = k->dot4, [8] = k->dot4};
    const copy_fn copies[] = {[1] = k->copy1, [2] = k->copy2, [4] = k->copy4, [8] = k->copy4};
    way w = {.from_size = dray_dtype_size((dray_dtype)rect->from),
             .to_size = dray_dtype_size((dray_dtype)rect->to),
             .source_stride = source_stride,
             .destination_stride = destination_stride};
    w.from_words = w.from_size == 8 ? 2 : 1;
    w.to_words = w.to_size == 8 ? 2 : 1;
    w.from_dot = dots[w.from_size];
    w.to_dot = dots[w.to_size];
    w.copy = copies[w.from_size];
    if (rect->from != rect->to) {
        w.cast = dray__cast_find(rect->from, rect->to);
        w.cast_summed = dray__cast_find_summed(rect->from, rect->to);
    }
    return w;
}

/* At most CHUNK elements, through buffers that stay in the first cache. */
static void chunk(const way *w, factors f, const uint8_t *source, uint8_t *destination, size_t n,
                  uint64_t sums[2])
{
    uint64_t gathered[CHUNK], converted[CHUNK]; /* room for elements of 8 bytes */
    if (w->source_stride != (int64_t)w->from_size) {
        dray__elements_move(source, w->source_stride, (uint8_t *)gathered, (int64_t)w->from_size,
                            w->from_size, n);
        source = (const uint8_t *)gathered;
    }
    const uint8_t *bits = source;
    uint64_t before = w->from_dot(f.from, source, n * w->from_words), after = before;
    if (w->cast) {
        w->cast(source, converted, n);
        bits = (const uint8_t *)converted;
        after = w->to_dot(f.to, bits, n * w->to_words);
    }
    if (w->destination_stride == (int64_t)w->to_size)
        memcpy(destination, bits, n * w->to_size);
    else
        dray__elements_move(bits, (int64_t)w->to_size, destination, w->destination_stride,
                            w->to_size, n);
    sums[0] += before;
    sums[1] += after;
}

/* A piece of a row. */
static void piece(const way *w, factors f, const uint8_t *source, uint8_t *destination, size_t n,
                  uint64_t sums[2])
{
    bool dense =
        w->source_stride == (int64_t)w->from_size && w->destination_stride == (int64_t)w->to_size;
    if (dense && !w->cast) {
        uint64_t sum = w->copy(f.from, source, destination, n * w->from_words);
        sums[0] += sum;
        sums[1] += sum;
        return;
    }
    if (dense && w->cast_summed) {
        w->cast_summed(f.from, source, destination, n, w->ahead, sums);
        return;
    }
    for (size_t i = 0; i < n; i += CHUNK) {
        factors at = {f.from + i * w->from_words, f.to + i * w->to_words};
        chunk(w, at, source + (int64_t)i * w->source_stride,
              destination + (int64_t)i * w->destination_stride, n - i < CHUNK ? n - i : CHUNK,
              sums);
    }
}

/* Rows: up to three outer dimensions, padded in front with single ones. */
typedef struct rows {
    int64_t count[3], from[3], to[3]; /* strides in bytes */
    uint64_t first, step[3];          /* flattened row index: of the first row, per dimension */
} rows;

static rows rows_of(const dray__rect *rect, const dray__place *place)
{
    rows out = {.count = {1, 1, 1}};
    uint64_t step = 1;
    for (uint32_t d = place->ndim ? place->ndim - 1 : 0, at = 3; d-- > 0;) {
        at--;
        out.count[at] = rect->extent[d];
        out.from[at] = rect->source_stride[d];
        out.to[at] = rect->destination_stride[d];
        out.step[at] = step;
        out.first += step * (uint64_t)place->start[d];
        step *= (uint64_t)place->shape[d];
    }
    return out;
}

/* As far ahead as memory takes to answer, along the way that the rows of a strip go: the hardware's
 * own guesses end at a page, and a row. */
static int64_t ahead_of(const rows *r, size_t row_bytes)
{
    enum { AHEAD = 8 << 10 };
    if (r->count[2] == 1 || r->from[2] == (int64_t)row_bytes)
        return AHEAD;
    return r->from[2] * (int64_t)(row_bytes < AHEAD ? AHEAD / row_bytes : 1);
}

static void strip(const way *w, factors f, const rows *r, const uint8_t *source,
                  uint8_t *destination, size_t n, uint64_t sums[2])
{
    for (int64_t i = 0; i < r->count[0]; i++)
        for (int64_t j = 0; j < r->count[1]; j++) {
            const uint8_t *from = source + i * r->from[0] + j * r->from[1];
            uint8_t *to = destination + i * r->to[0] + j * r->to[1];
            uint64_t row = r->first + (uint64_t)i * r->step[0] + (uint64_t)j * r->step[1];
            for (int64_t k = 0; k < r->count[2]; k++) {
                uint64_t of_row[2] = {0, 0}, factor = dray__sum_row_factor(row);
                piece(w, f, from, to, n, of_row);
                sums[0] += factor * of_row[0];
                sums[1] += factor * of_row[1];
                from += r->from[2];
                to += r->to[2];
                row += r->step[2];
            }
        }
}

static void move_summed(const dray__rect *rect, const dray__place *place, uint64_t sums[2]);

enum { TILE = 32 << 10 };

/* Sums go along rows: what is turned over is put in order first, or last, tile by tile. */
static void tile_turned(const dray__rect *rect, const dray__place *place, uint64_t sums[2])
{
    uint8_t tile[TILE] __attribute__((aligned(64)));
    uint32_t last = rect->ndim - 1;
    dray__rect first = *rect, second = *rect;
    bool in_order = rect->source_stride[last] == (int64_t)dray_dtype_size((dray_dtype)rect->from);
    if (!in_order) /* the source's bits, then summed and converted */
        first.to = second.from = rect->from;
    else
        second.from = rect->to;
    first = dray__rect_to_dense(&first, tile);
    second = dray__rect_from_dense(&second, tile);
    if (in_order) {
        move_summed(&first, place, sums);
        dray__rect_move(&second);
    } else {
        dray__rect_move(&first);
        move_summed(&second, place, sums);
    }
}

static void move_turned_summed(const dray__rect *rect, const dray__turn *turn,
                               const dray__place *place, uint64_t sums[2])
{
    size_t from = dray_dtype_size((dray_dtype)rect->from);
    size_t to = dray_dtype_size((dray_dtype)rect->to);
    int64_t size[DRAY_MAX_DIMS], at[DRAY_MAX_DIMS] = {0};
    dray__turn_tile(turn, rect->extent, rect->ndim, TILE / (from > to ? from : to), size);
    for (;;) {
        dray__rect part = *rect;
        dray__place where = *place;
        for (uint32_t d = 0; d < rect->ndim; d++) {
            int64_t left = rect->extent[d] - at[d];
            part.extent[d] = left < size[d] ? left : size[d];
            part.source += at[d] * rect->source_stride[d];
            part.destination += at[d] * rect->destination_stride[d];
            where.start[d] += at[d];
        }
        tile_turned(&part, &where, sums);
        uint32_t d = rect->ndim;
        for (; d > 0; d--) {
            at[d - 1] += part.extent[d - 1];
            if (at[d - 1] < rect->extent[d - 1])
                break;
            at[d - 1] = 0;
        }
        if (d == 0)
            return;
    }
}

/* Whether one side lies in the order of the tensor's rows, and the other turned over. */
static bool turns_rows(const dray__rect *rect, const dray__place *place, dray__turn *turn)
{
    return place->ndim == rect->ndim && dray__rect_turns(rect, turn) &&
           (turn->source == rect->ndim - 1 || turn->destination == rect->ndim - 1);
}

void dray__rect_move_summed(const dray__rect *rect, const dray__place *place, uint64_t sums[2])
{
    dray__turn turn;
    if (turns_rows(rect, place, &turn))
        move_turned_summed(rect, &turn, place, sums);
    else
        move_summed(rect, place, sums);
}

static void move_summed(const dray__rect *rect, const dray__place *place, uint64_t sums[2])
{
    const dray__kernels *kernels = dray__kernels_get();
    uint32_t last = place->ndim ? place->ndim - 1 : 0;
    way w = way_of(rect, rect->source_stride[last], rect->destination_stride[last]);
    rows r = rows_of(rect, place);
    uint64_t first = place->ndim ? (uint64_t)place->start[last] : 0;
    uint64_t count = place->ndim ? (uint64_t)rect->extent[last] : 1;
    if (count == 1) { /* of one element the stride says nothing */
        w.source_stride = (int64_t)w.from_size;
        w.destination_stride = (int64_t)w.to_size;
    }
    uint32_t from[COLUMNS], other[COLUMNS];
    bool alike = w.from_words == w.to_words;
    factors f = {from, alike ? from : other};
    size_t words = w.from_words > w.to_words ? w.from_words : w.to_words;
    bool single = r.count[0] * r.count[1] * r.count[2] == 1;
    size_t most = (single ? COLUMNS_OF_ONE_ROW : COLUMNS) / words;
    for (uint64_t c = 0; c < count; c += most) {
        size_t n = count - c < most ? (size_t)(count - c) : most;
        kernels->columns((first + c) * w.from_words, n * w.from_words, from);
        if (!alike)
            kernels->columns((first + c) * w.to_words, n * w.to_words, other);
        w.ahead = ahead_of(&r, n * w.from_size);
        strip(&w, f, &r, rect->source + (int64_t)c * w.source_stride,
              rect->destination + (int64_t)c * w.destination_stride, n, sums);
    }
}
