/* Moves a rectangle, moves and sums it in one pass over its source, or only sums it. */
#include "mover/kernels/rect.h"

#include "base/error.h"
#include "model/layout/layout.h"
#include "mover/kernels/checksum.h"
#include "mover/kernels/kernels.h"

#include <string.h>

/* Each element size has its own loop, so that an element is one load and one store. */
#define XX(type)                                                                                   \
    static void move_##type(const uint8_t *source, int64_t source_stride, uint8_t *destination,    \
                            int64_t destination_stride, size_t count)                              \
    {                                                                                              \
        for (size_t i = 0; i < count; i++) {                                                       \
            memcpy(destination, source, sizeof(type));                                             \
            source += source_stride;                                                               \
            destination += destination_stride;                                                     \
        }                                                                                          \
    }
XX(uint8_t)
XX(uint16_t)
XX(uint32_t)
XX(uint64_t)
#undef XX

/* Copies `count` elements of `size` bytes (1, 2, 4, 8) from and to any strides. */
static void elements_move(const uint8_t *source, int64_t source_stride, uint8_t *destination,
                          int64_t destination_stride, size_t size, size_t count)
{
    static void (*const moves[])(const uint8_t *, int64_t, uint8_t *, int64_t, size_t) = {
        [1] = move_uint8_t, [2] = move_uint16_t, [4] = move_uint32_t, [8] = move_uint64_t};
    moves[size](source, source_stride, destination, destination_stride, count);
}

static void swap_dims(dray__rect_copy *r, uint32_t a, uint32_t b)
{
    int64_t extent = r->extent[a], source = r->source_stride[a], dest = r->destination_stride[a];
    r->extent[a] = r->extent[b], r->extent[b] = extent;
    r->source_stride[a] = r->source_stride[b], r->source_stride[b] = source;
    r->destination_stride[a] = r->destination_stride[b], r->destination_stride[b] = dest;
}

/* Returns the same rectangle with as few dimensions as possible, the smallest strides of the
 * destination innermost. Dimensions of one element are dropped; a dimension that continues its
 * neighbour on both sides is merged with it. */
static dray__rect_copy simplify(const dray__rect_copy *rect)
{
    dray__rect_copy r = *rect;
    r.ndim = 0;
    for (uint32_t d = 0; d < rect->ndim; d++) {
        if (rect->extent[d] == 1)
            continue;
        uint32_t at = r.ndim++;
        r.extent[at] = rect->extent[d];
        r.source_stride[at] = rect->source_stride[d];
        r.destination_stride[at] = rect->destination_stride[d];
        for (; at > 0 && r.destination_stride[at - 1] < r.destination_stride[at]; at--)
            swap_dims(&r, at - 1, at);
    }
    uint32_t kept = 0;
    for (uint32_t d = 1; d < r.ndim; d++) {
        if (r.source_stride[kept] == r.source_stride[d] * r.extent[d] &&
            r.destination_stride[kept] == r.destination_stride[d] * r.extent[d]) {
            r.extent[d] *= r.extent[kept];
        } else {
            kept++;
        }
        r.extent[kept] = r.extent[d];
        r.source_stride[kept] = r.source_stride[d];
        r.destination_stride[kept] = r.destination_stride[d];
    }
    r.ndim = r.ndim ? kept + 1 : 0;
    return r;
}

bool dray__rect_is_run(const dray__rect_copy *rect, uint64_t *bytes)
{
    dray__rect_copy r = simplify(rect);
    int64_t size = (int64_t)dray_dtype_size((dray_dtype)r.from);
    if (r.from != r.to || r.ndim > 1 ||
        (r.ndim == 1 && (r.source_stride[0] != size || r.destination_stride[0] != size)))
        return false;
    *bytes = (uint64_t)(r.ndim ? r.extent[0] * size : size);
    return true;
}

/* One run of elements of a simplified rectangle. */
typedef struct run {
    size_t count, from_size, to_size;
    int64_t source_stride, destination_stride;
    dray__cast_fn cast; /* NULL for the bits as they are */
} run;

enum { CONVERTED = 512 };

static void convert_strided(const run *r, const uint8_t *source, uint8_t *destination)
{
    uint64_t in[CONVERTED], out[CONVERTED]; /* room for the largest elements */
    for (size_t i = 0; i < r->count; i += CONVERTED) {
        size_t n = r->count - i < CONVERTED ? r->count - i : CONVERTED;
        elements_move(source + (int64_t)i * r->source_stride, r->source_stride, (uint8_t *)in,
                      (int64_t)r->from_size, r->from_size, n);
        r->cast(in, out, n);
        elements_move((uint8_t *)out, (int64_t)r->to_size,
                      destination + (int64_t)i * r->destination_stride, r->destination_stride,
                      r->to_size, n);
    }
}

static void move_run(const run *r, const uint8_t *source, uint8_t *destination)
{
    bool dense =
        r->source_stride == (int64_t)r->from_size && r->destination_stride == (int64_t)r->to_size;
    if (dense && !r->cast)
        memcpy(destination, source, r->count * r->from_size);
    else if (dense)
        r->cast(source, destination, r->count);
    else if (!r->cast)
        elements_move(source, r->source_stride, destination, r->destination_stride, r->from_size,
                      r->count);
    else
        convert_strided(r, source, destination);
}

/* ---- transposed ------------------------------------------------------------------------------ */

/* Returns the dimension along which elements are adjacent, or ndim. */
static uint32_t dense_dimension(const dray__rect_copy *rect, const int64_t *stride, size_t size)
{
    uint32_t d = rect->ndim;
    while (d > 0 && (rect->extent[d - 1] == 1 || stride[d - 1] != (int64_t)size))
        d--;
    return d ? d - 1 : rect->ndim;
}

bool dray__rect_turns(const dray__rect_copy *rect, dray__rect_turn *turn)
{
    turn->source =
        dense_dimension(rect, rect->source_stride, dray_dtype_size((dray_dtype)rect->from));
    turn->destination =
        dense_dimension(rect, rect->destination_stride, dray_dtype_size((dray_dtype)rect->to));
    return turn->source < rect->ndim && turn->destination < rect->ndim &&
           turn->source != turn->destination;
}

void dray__turn_tile(const dray__rect_turn *turn, const int64_t *extent, uint32_t ndim,
                     uint64_t elements, int64_t *tile)
{
    enum { RUN = 512 }; /* elements of the source that are read in one go */
    for (uint32_t d = 0; d < ndim; d++)
        tile[d] = 1;
    uint64_t most = elements ? elements : 1, beside = (uint64_t)extent[turn->source];
    if (beside > RUN)
        beside = RUN;
    if (beside > most)
        beside = most;
    uint64_t rows = most / beside;
    if (rows > (uint64_t)extent[turn->destination])
        rows = (uint64_t)extent[turn->destination];
    tile[turn->source] = (int64_t)beside;
    tile[turn->destination] = (int64_t)rows;
}

dray__rect_copy dray__rect_to_dense(const dray__rect_copy *rect, void *data)
{
    dray__rect_copy r = *rect;
    r.destination = data;
    dray__dense_strides((dray_dtype)r.to, r.ndim, r.extent, r.destination_stride);
    return r;
}

dray__rect_copy dray__rect_from_dense(const dray__rect_copy *rect, const void *data)
{
    dray__rect_copy r = *rect;
    r.source = data;
    dray__dense_strides((dray_dtype)r.from, r.ndim, r.extent, r.source_stride);
    return r;
}

/* Transposes one plane of a simplified rectangle: converts a part of it, then transposes the part.
 */
static void turn_converted(const dray__rect_copy *s, const dray__rect_turn *turn,
                           const uint8_t *source, uint8_t *destination, dray__cast_fn cast)
{
    enum { ROWS = 64, BYTES = 16 << 10 };
    uint8_t converted[BYTES] __attribute__((aligned(64)));
    size_t from = dray_dtype_size((dray_dtype)s->from), to = dray_dtype_size((dray_dtype)s->to);
    size_t columns = (size_t)s->extent[turn->source], rows = (size_t)s->extent[turn->destination];
    size_t beside = BYTES / ROWS / to;
    for (size_t r = 0; r < rows; r += ROWS)
        for (size_t c = 0; c < columns; c += beside) {
            size_t n = rows - r < ROWS ? rows - r : ROWS;
            size_t k = columns - c < beside ? columns - c : beside;
            const uint8_t *at =
                source + (int64_t)r * s->source_stride[turn->destination] + c * from;
            for (size_t i = 0; i < n; i++, at += s->source_stride[turn->destination])
                cast(at, converted + i * k * to, k);
            dray__kernels_get()->turn[to](
                converted, (int64_t)(k * to),
                destination + (int64_t)c * s->destination_stride[turn->source] + r * to,
                s->destination_stride[turn->source], n, k);
        }
}

/* Transposes a rectangle plane by plane. */
static void move_turned(const dray__rect_copy *s, const dray__rect_turn *turn)
{
    dray__cast_fn cast = s->from == s->to ? NULL : dray__cast_find(s->from, s->to);
    size_t size = dray_dtype_size((dray_dtype)s->from);
    int64_t n[2] = {1, 1}, from[2] = {0}, to[2] = {0};
    for (uint32_t d = 0, at = 0; d < s->ndim; d++) {
        if (d == turn->source || d == turn->destination)
            continue;
        n[at] = s->extent[d];
        from[at] = s->source_stride[d];
        to[at++] = s->destination_stride[d];
    }
    for (int64_t i = 0; i < n[0]; i++)
        for (int64_t j = 0; j < n[1]; j++) {
            const uint8_t *source = s->source + i * from[0] + j * from[1];
            uint8_t *destination = s->destination + i * to[0] + j * to[1];
            if (cast)
                turn_converted(s, turn, source, destination, cast);
            else
                dray__kernels_get()->turn[size](source, s->source_stride[turn->destination],
                                                destination, s->destination_stride[turn->source],
                                                (size_t)s->extent[turn->destination],
                                                (size_t)s->extent[turn->source]);
        }
}

void dray__rect_move(const dray__rect_copy *rect)
{
    dray__rect_copy s = simplify(rect);
    dray__rect_turn turn;
    if (dray__rect_turns(&s, &turn)) {
        move_turned(&s, &turn);
        return;
    }
    run r = {.count = s.ndim ? (size_t)s.extent[s.ndim - 1] : 1,
             .from_size = dray_dtype_size((dray_dtype)s.from),
             .to_size = dray_dtype_size((dray_dtype)s.to),
             .cast = s.from == s.to ? NULL : dray__cast_find(s.from, s.to)};
    r.source_stride = s.ndim ? s.source_stride[s.ndim - 1] : (int64_t)r.from_size;
    r.destination_stride = s.ndim ? s.destination_stride[s.ndim - 1] : (int64_t)r.to_size;
    /* The outer dimensions, padded in front to exactly three. */
    int64_t n[3] = {1, 1, 1}, from[3] = {0}, to[3] = {0};
    for (uint32_t outer = s.ndim ? s.ndim - 1 : 0, d = 0; d < outer; d++) {
        n[3 - outer + d] = s.extent[d];
        from[3 - outer + d] = s.source_stride[d];
        to[3 - outer + d] = s.destination_stride[d];
    }
    for (int64_t i = 0; i < n[0]; i++)
        for (int64_t j = 0; j < n[1]; j++) {
            const uint8_t *source = s.source + i * from[0] + j * from[1];
            uint8_t *destination = s.destination + i * to[0] + j * to[1];
            for (int64_t k = 0; k < n[2]; k++, source += from[2], destination += to[2])
                move_run(&r, source, destination);
        }
}

/* ---- summed ---------------------------------------------------------------------------------- */

/* Column factors are computed once for COLUMNS columns and used for all rows. Most tensors' rows
 * are shorter; they are then read whole, one after the other, which is faster than strips of rows.
 * Elements that must be gathered or converted first go through smaller buffers. Rows of fewer
 * elements than ROWS_FROM are summed one by one. */
enum { COLUMNS = 8192, COLUMNS_OF_ONE_ROW = 2048, CHUNK = 1024, ROWS_FROM = 256 };

typedef uint64_t (*dot_fn)(const uint32_t *columns, const void *data, size_t count);
typedef uint64_t (*copy_fn)(const uint32_t *columns, const void *data, void *out, size_t count);

/* How the elements of a row are moved. */
typedef struct row_way {
    size_t from_size, to_size, from_words, to_words; /* words: columns that an element counts as */
    int64_t source_stride, destination_stride;
    dray__cast_fn cast; /* NULL for the bits as they are */
    dray__cast_summed_fn cast_summed;
    dot_fn from_dot, to_dot;
    copy_fn copy;
    bool sinks; /* nothing is written, nor converted */
    /* Four rows at once, when nothing is written; NULL for one by one. */
    void (*four)(const uint32_t *columns, const void *data, int64_t stride, size_t count,
                 uint64_t sums[4]);
    int64_t ahead; /* bytes from the present read address to the one to prefetch */
} row_way;

/* Column factors of one strip; `from` and `to` are equal where elements have the same number of
 * words on both sides. */
typedef struct factors {
    const uint32_t *from, *to;
} factors;

static row_way way_of(const dray__rect_copy *rect, bool sinks, int64_t source_stride,
                      int64_t destination_stride)
{
    const dray__kernels *k = dray__kernels_get();
    const dot_fn dots[] = {[1] = k->dot1, [2] = k->dot2, [4] = k->dot4, [8] = k->dot4};
    const copy_fn copies[] = {[1] = k->copy1, [2] = k->copy2, [4] = k->copy4, [8] = k->copy4};
    row_way w = {.from_size = dray_dtype_size((dray_dtype)rect->from),
                 .to_size = dray_dtype_size((dray_dtype)rect->to),
                 .sinks = sinks,
                 .source_stride = source_stride,
                 .destination_stride = destination_stride};
    w.from_words = w.from_size == 8 ? 2 : 1;
    w.to_words = w.to_size == 8 ? 2 : 1;
    w.from_dot = dots[w.from_size];
    w.to_dot = dots[w.to_size];
    w.copy = copies[w.from_size];
    if (sinks && w.from_size == 2 && source_stride == 2)
        w.four = k->dot2_rows;
    if (rect->from != rect->to) {
        w.cast = dray__cast_find(rect->from, rect->to);
        w.cast_summed = dray__cast_find_summed(rect->from, rect->to);
    }
    return w;
}

/* Moves at most CHUNK elements, through buffers that fit the first-level cache. */
static void chunk(const row_way *w, factors f, const uint8_t *source, uint8_t *destination,
                  size_t n, uint64_t sums[2])
{
    uint64_t gathered[CHUNK], converted[CHUNK]; /* room for elements of 8 bytes */
    if (w->source_stride != (int64_t)w->from_size) {
        elements_move(source, w->source_stride, (uint8_t *)gathered, (int64_t)w->from_size,
                      w->from_size, n);
        source = (const uint8_t *)gathered;
    }
    const uint8_t *bits = source;
    uint64_t before = w->from_dot(f.from, source, n * w->from_words), after = before;
    sums[0] += before;
    if (w->sinks)
        return;
    if (w->cast) {
        w->cast(source, converted, n);
        bits = (const uint8_t *)converted;
        after = w->to_dot(f.to, bits, n * w->to_words);
    }
    if (w->destination_stride == (int64_t)w->to_size)
        memcpy(destination, bits, n * w->to_size);
    else
        elements_move(bits, (int64_t)w->to_size, destination, w->destination_stride, w->to_size, n);
    sums[1] += after;
}

/* Moves a part of a row. */
static void piece(const row_way *w, factors f, const uint8_t *source, uint8_t *destination,
                  size_t n, uint64_t sums[2])
{
    bool dense = w->source_stride == (int64_t)w->from_size;
    if (dense && w->sinks) {
        sums[0] += w->from_dot(f.from, source, n * w->from_words);
        return;
    }
    dense = dense && w->destination_stride == (int64_t)w->to_size;
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

static rows rows_of(const dray__rect_copy *rect, const dray__rect_place *place)
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

/* Returns how far ahead to prefetch, in the order in which the rows of a strip are read. The
 * hardware's prefetcher stops at the end of a page and of a row. */
static int64_t ahead_of(const rows *r, size_t row_bytes)
{
    enum { AHEAD = 8 << 10 };
    if (r->count[2] == 1 || r->from[2] == (int64_t)row_bytes)
        return AHEAD;
    return r->from[2] * (int64_t)(row_bytes < AHEAD ? AHEAD / row_bytes : 1);
}

static void strip(const row_way *w, factors f, const rows *r, const uint8_t *source,
                  uint8_t *destination, size_t n, uint64_t sums[2])
{
    for (int64_t i = 0; i < r->count[0]; i++)
        for (int64_t j = 0; j < r->count[1]; j++) {
            const uint8_t *from = source + i * r->from[0] + j * r->from[1];
            uint8_t *to = destination + i * r->to[0] + j * r->to[1];
            uint64_t row = r->first + (uint64_t)i * r->step[0] + (uint64_t)j * r->step[1];
            int64_t k = 0;
            for (; w->four && n >= ROWS_FROM && k + 4 <= r->count[2]; k += 4) {
                uint64_t of[4];
                w->four(f.from, from, r->from[2], n, of);
                for (int q = 0; q < 4; q++, row += r->step[2])
                    sums[0] += dray__sum_row_factor(row) * of[q];
                from += 4 * r->from[2];
            }
            for (; k < r->count[2]; k++) {
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

static void move_summed(const dray__rect_copy *rect, const dray__rect_place *place, bool sinks,
                        uint64_t sums[2]);

enum { TILE = 32 << 10 };

/* Moves and sums a transposing rectangle, tile by tile. Sums need the order of rows, so the tile is
 * transposed before or after summing. */
static void tile_turned(const dray__rect_copy *rect, const dray__rect_place *place, bool sinks,
                        uint64_t sums[2])
{
    uint8_t tile[TILE] __attribute__((aligned(64)));
    uint32_t last = rect->ndim - 1;
    dray__rect_copy first = *rect, second = *rect;
    bool in_order = rect->source_stride[last] == (int64_t)dray_dtype_size((dray_dtype)rect->from);
    if (!in_order) /* transposes the source's bits, then sums and converts them */
        first.to = second.from = rect->from;
    else
        second.from = rect->to;
    first = dray__rect_to_dense(&first, tile);
    second = dray__rect_from_dense(&second, tile);
    if (in_order) {
        move_summed(&first, place, false, sums);
        dray__rect_move(&second);
    } else {
        dray__rect_move(&first);
        move_summed(&second, place, sinks, sums);
    }
}

static void move_turned_summed(const dray__rect_copy *rect, const dray__rect_turn *turn,
                               const dray__rect_place *place, bool sinks, uint64_t sums[2])
{
    size_t from = dray_dtype_size((dray_dtype)rect->from);
    size_t to = dray_dtype_size((dray_dtype)rect->to);
    int64_t size[DRAY_MAX_DIMS], at[DRAY_MAX_DIMS] = {0};
    dray__turn_tile(turn, rect->extent, rect->ndim, TILE / (from > to ? from : to), size);
    for (;;) {
        dray__rect_copy part = *rect;
        dray__rect_place where = *place;
        for (uint32_t d = 0; d < rect->ndim; d++) {
            int64_t left = rect->extent[d] - at[d];
            part.extent[d] = left < size[d] ? left : size[d];
            part.source += at[d] * rect->source_stride[d];
            part.destination += at[d] * rect->destination_stride[d];
            where.start[d] += at[d];
        }
        tile_turned(&part, &where, sinks, sums);
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

/* Returns true when one side is in the order of the tensor's rows and the other is transposed. */
static bool turns_rows(const dray__rect_copy *rect, const dray__rect_place *place,
                       dray__rect_turn *turn)
{
    return place->ndim == rect->ndim && dray__rect_turns(rect, turn) &&
           (turn->source == rect->ndim - 1 || turn->destination == rect->ndim - 1);
}

static void sum(const dray__rect_copy *rect, const dray__rect_place *place, bool sinks,
                uint64_t sums[2])
{
    dray__rect_turn turn;
    if (turns_rows(rect, place, &turn))
        move_turned_summed(rect, &turn, place, sinks, sums);
    else
        move_summed(rect, place, sinks, sums);
}

void dray__rect_move_summed(const dray__rect_copy *rect, const dray__rect_place *place,
                            uint64_t sums[2])
{
    sum(rect, place, false, sums);
}

/* Returns the source's checksum; the destination is ignored. */
static uint64_t rect_sum(const dray__rect_copy *rect, const dray__rect_place *place)
{
    uint64_t sums[2] = {0, 0};
    uint8_t nowhere; /* an address to count from */
    dray__rect_copy sink = dray__rect_to_dense(rect, &nowhere);
    sum(&sink, place, true, sums);
    return sums[0];
}

static void move_summed(const dray__rect_copy *rect, const dray__rect_place *place, bool sinks,
                        uint64_t sums[2])
{
    const dray__kernels *kernels = dray__kernels_get();
    uint32_t last = place->ndim ? place->ndim - 1 : 0;
    row_way w = way_of(rect, sinks, rect->source_stride[last], rect->destination_stride[last]);
    rows r = rows_of(rect, place);
    uint64_t first = place->ndim ? (uint64_t)place->start[last] : 0;
    uint64_t count = place->ndim ? (uint64_t)rect->extent[last] : 1;
    if (count == 1) { /* for one element the stride does not matter */
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

uint64_t dray__sum_row_factor(uint64_t row)
{
    uint64_t z = row + UINT64_C(0x9E3779B97F4A7C15);
    z = (z ^ z >> 30) * UINT64_C(0xBF58476D1CE4E5B9);
    z = (z ^ z >> 27) * UINT64_C(0x94D049BB133111EB);
    return (z ^ z >> 31) | 1;
}

uint64_t dray__sum(const dray__sum_of *r)
{
    dray__rect_copy rect = {.ndim = r->ndim, .from = r->dtype, .to = r->dtype, .source = r->data};
    dray__rect_place place = {.ndim = r->ndim, .shape = r->shape};
    if (r->ndim) {
        memcpy(rect.extent, r->extent, r->ndim * sizeof *r->extent);
        memcpy(rect.source_stride, r->stride, r->ndim * sizeof *r->stride);
        memcpy(place.start, r->start, r->ndim * sizeof *r->start);
    }
    return rect_sum(&rect, &place);
}

/* ---- checks ---------------------------------------------------------------------------------- */

int dray__copy_check(const dray_copy *copy, uint64_t number, dray_error *error)
{
    unsigned long long n = number;
    dray_dtype from = (dray_dtype)copy->source_dtype, to = (dray_dtype)copy->destination_dtype;
    if (!dray_dtype_size(from) || !dray_dtype_size(to) || copy->ndim < 1 ||
        copy->ndim > DRAY_MAX_DIMS)
        return dray__fail(error, DRAY_EINVALID, "copy %llu: dtypes %d and %d, %u dimensions", n,
                          (int)from, (int)to, (unsigned)copy->ndim);
    if (from != to && !dray__cast_find(copy->source_dtype, copy->destination_dtype))
        return dray__fail(error, DRAY_EDTYPE, "copy %llu: %s cannot be converted to %s", n,
                          dray_dtype_name(from), dray_dtype_name(to));
    for (uint32_t d = 0; d < copy->ndim; d++)
        if (copy->extent[d] < 1)
            return dray__fail(error, DRAY_EINVALID, "copy %llu: extent[%u] is %lld", n, d,
                              (long long)copy->extent[d]);
    return DRAY_OK;
}

int dray__copy_check_place(const dray_copy *copy, const dray_tensor_info *tensor, uint64_t number,
                           dray_error *error)
{
    unsigned long long n = number;
    if (!tensor || copy->ndim != (tensor->ndim ? tensor->ndim : 1))
        return dray__fail(error, DRAY_EINVALID,
                          "copy %llu: is of tensor %u with %u dimensions, which the layout lacks",
                          n, (unsigned)copy->tensor, (unsigned)copy->ndim);
    for (uint32_t d = 0; d < tensor->ndim; d++)
        if (copy->start[d] < 0 || copy->start[d] > tensor->shape[d] - copy->extent[d])
            return dray__fail(error, DRAY_EINVALID, "tensor %s: copy %llu is outside its shape",
                              tensor->name, n);
    return DRAY_OK;
}
