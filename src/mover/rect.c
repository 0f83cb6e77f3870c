#include "mover/rect.h"

#include "mover/kernels.h"

#include <string.h>

/* Each size in a loop of its own, so that an element is one load and one store. */
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

void dray__elements_move(const uint8_t *source, int64_t source_stride, uint8_t *destination,
                         int64_t destination_stride, size_t size, size_t count)
{
    if (size == 1)
        move_uint8_t(source, source_stride, destination, destination_stride, count);
    else if (size == 2)
        move_uint16_t(source, source_stride, destination, destination_stride, count);
    else if (size == 4)
        move_uint32_t(source, source_stride, destination, destination_stride, count);
    else
        move_uint64_t(source, source_stride, destination, destination_stride, count);
}

static void swap_dims(dray__rect *r, uint32_t a, uint32_t b)
{
    int64_t extent = r->extent[a], source = r->source_stride[a], dest = r->destination_stride[a];
    r->extent[a] = r->extent[b], r->extent[b] = extent;
    r->source_stride[a] = r->source_stride[b], r->source_stride[b] = source;
    r->destination_stride[a] = r->destination_stride[b], r->destination_stride[b] = dest;
}

/* The same rectangle with as few dimensions as possible, the longest runs of the destination
 * innermost: no dimension of one element, none that continues its neighbour on both sides. */
static dray__rect simplify(const dray__rect *rect)
{
    dray__rect r = *rect;
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

bool dray__rect_is_run(const dray__rect *rect, uint64_t *bytes)
{
    dray__rect r = simplify(rect);
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
    dray__cast_fn cast; /* NULL: the bits as they are */
} run;

enum { CHUNK = 512 };

static void convert_strided(const run *r, const uint8_t *source, uint8_t *destination)
{
    uint64_t in[CHUNK], out[CHUNK]; /* room for the largest elements */
    for (size_t i = 0; i < r->count; i += CHUNK) {
        size_t n = r->count - i < CHUNK ? r->count - i : CHUNK;
        dray__elements_move(source + (int64_t)i * r->source_stride, r->source_stride, (uint8_t *)in,
                            (int64_t)r->from_size, r->from_size, n);
        r->cast(in, out, n);
        dray__elements_move((uint8_t *)out, (int64_t)r->to_size,
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
        dray__elements_move(source, r->source_stride, destination, r->destination_stride,
                            r->from_size, r->count);
    else
        convert_strided(r, source, destination);
}

/* ---- turned over ----------------------------------------------------------------------------- */

/* The dimension along which elements lie beside each other; ndim: none. */
static uint32_t dense_dimension(const dray__rect *rect, const int64_t *stride, size_t size)
{
    uint32_t d = rect->ndim;
    while (d > 0 && (rect->extent[d - 1] == 1 || stride[d - 1] != (int64_t)size))
        d--;
    return d ? d - 1 : rect->ndim;
}

bool dray__rect_turns(const dray__rect *rect, dray__turn *turn)
{
    turn->source =
        dense_dimension(rect, rect->source_stride, dray_dtype_size((dray_dtype)rect->from));
    turn->destination =
        dense_dimension(rect, rect->destination_stride, dray_dtype_size((dray_dtype)rect->to));
    return turn->source < rect->ndim && turn->destination < rect->ndim &&
           turn->source != turn->destination;
}

void dray__turn_tile(const dray__turn *turn, const int64_t *extent, uint32_t ndim,
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

static void dense(const dray__rect *rect, int32_t dtype, int64_t *stride)
{
    int64_t step = (int64_t)dray_dtype_size((dray_dtype)dtype);
    for (uint32_t d = rect->ndim; d-- > 0; step *= rect->extent[d])
        stride[d] = step;
}

dray__rect dray__rect_to_dense(const dray__rect *rect, void *data)
{
    dray__rect r = *rect;
    r.destination = data;
    dense(rect, r.to, r.destination_stride);
    return r;
}

dray__rect dray__rect_from_dense(const dray__rect *rect, const void *data)
{
    dray__rect r = *rect;
    r.source = data;
    dense(rect, r.from, r.source_stride);
    return r;
}

/* Of one plane of a simplified rectangle: converts some of it, then turns that. */
static void turn_converted(const dray__rect *s, const dray__turn *turn, const uint8_t *source,
                           uint8_t *destination, dray__cast_fn cast)
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

/* Plane by plane. */
static void move_turned(const dray__rect *s, const dray__turn *turn)
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

void dray__rect_move(const dray__rect *rect)
{
    dray__rect s = simplify(rect);
    dray__turn turn;
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
