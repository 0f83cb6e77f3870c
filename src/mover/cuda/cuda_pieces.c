/* Converts rectangles to the pieces that the GPU's kernels process: rows and columns, in words as
 * wide as alignment allows, cut into tiles. */
#include "base/error.h"
#include "mover/cuda/cuda_internal.h"
#include "mover/kernels/rect.h"

enum { WORD = 16, SIDE = 64, MOST_EXTENT = 1 << 30 };

/* Both sides and the place in the tensor, dimension by dimension. */
typedef struct dimension {
    int64_t extent, source_stride, destination_stride;
    uint64_t row_step;
} dimension;

typedef struct shape {
    dimension outer[3], columns;
    uint32_t outers;
    uint64_t source, destination, row, column;
} shape;

/* ---- checks -----------------------------------------------------------------------------------
 */

int dray__gpu_check(const dray__cuda_item *item, const dray_tensor_info *tensor, bool sums,
                    uint64_t number, dray_error *error)
{
    const dray_copy *copy = &item->copy;
    int rc = dray__copy_check(copy, number, error);
    for (uint32_t d = 0; !rc && d < copy->ndim; d++)
        if (copy->extent[d] > MOST_EXTENT || copy->source_stride[d] < 0 ||
            copy->destination_stride[d] < 0)
            rc = dray__fail(
                error, DRAY_EINVALID, "copy %llu: dimension %u: extent %lld, strides %lld and %lld",
                (unsigned long long)number, d, (long long)copy->extent[d],
                (long long)copy->source_stride[d], (long long)copy->destination_stride[d]);
    return rc || !sums ? rc : dray__copy_check_place(copy, tensor, number, error);
}

/* ---- shapes -----------------------------------------------------------------------------------
 */

static bool continues(const dimension *outer, const dimension *inner)
{
    return outer->source_stride == inner->source_stride * inner->extent &&
           outer->destination_stride == inner->destination_stride * inner->extent &&
           outer->row_step == inner->row_step * (uint64_t)inner->extent &&
           outer->extent * inner->extent <= MOST_EXTENT;
}

/* Merges dimensions, so that as few outer ones as possible remain. tensor is NULL when no sums are
 * wanted; then rows have no index. */
static shape shape_of(const dray__cuda_item *item, const dray_tensor_info *tensor)
{
    const dray_copy *c = &item->copy;
    uint32_t last = c->ndim - 1;
    bool sink = item->destination_base == 0;
    shape s = {.source = item->source_base + c->source_offset,
               .destination = sink ? 0 : item->destination_base + c->destination_offset,
               .column = (uint64_t)c->start[last],
               .columns = {c->extent[last], c->source_stride[last],
                           sink ? c->source_stride[last] : c->destination_stride[last], 0}};
    dimension all[DRAY_MAX_DIMS];
    uint64_t step = 1;
    for (uint32_t d = last; d-- > 0;) {
        all[d] =
            (dimension){c->extent[d], c->source_stride[d],
                        sink ? c->source_stride[d] : c->destination_stride[d], tensor ? step : 0};
        s.row += all[d].row_step * (uint64_t)c->start[d];
        step *= tensor ? (uint64_t)tensor->shape[d] : 1;
    }
    for (uint32_t d = 0; d < last; d++) {
        dimension *before = s.outers ? &s.outer[s.outers - 1] : NULL;
        if (all[d].extent == 1)
            continue;
        if (before && continues(before, &all[d])) {
            all[d].extent *= before->extent;
            *before = all[d];
        } else {
            s.outer[s.outers++] = all[d];
        }
    }
    return s;
}

/* Moves the dimension whose steps are the tiles' rows to the end. */
static void rows_last(shape *s, uint32_t rows)
{
    dimension d = s->outer[rows];
    for (uint32_t i = rows; i + 1 < s->outers; i++)
        s->outer[i] = s->outer[i + 1];
    s->outer[s->outers - 1] = d;
}

static uint32_t longest(const shape *s)
{
    uint32_t best = 0;
    for (uint32_t d = 1; d < s->outers; d++)
        if (s->outer[d].extent >= s->outer[best].extent)
            best = d;
    return best;
}

/* Returns an outer dimension along which elements are adjacent on one side, or `outers`. */
static uint32_t dense_outer(const shape *s, bool source, int64_t size)
{
    for (uint32_t d = 0; d < s->outers; d++)
        if ((source ? s->outer[d].source_stride : s->outer[d].destination_stride) == size)
            return d;
    return s->outers;
}

static dray__gpu_piece piece_of(const shape *s, int32_t from, int32_t to, uint32_t unit)
{
    dray__gpu_piece p = {.source = s->source,
                         .destination = s->destination,
                         .row = s->row,
                         .column = s->column,
                         .source_step = s->columns.source_stride,
                         .destination_step = s->columns.destination_stride,
                         .extent = {1, 1, 1},
                         .columns = (uint32_t)s->columns.extent,
                         .from = (uint16_t)from,
                         .to = (uint16_t)to,
                         .unit = (uint16_t)unit};
    for (uint32_t d = 0, at = 3 - s->outers; d < s->outers; d++, at++) {
        p.extent[at] = (uint32_t)s->outer[d].extent;
        p.row_step[at] = s->outer[d].row_step;
        p.source_stride[at] = s->outer[d].source_stride;
        p.destination_stride[at] = s->outer[d].destination_stride;
    }
    return p;
}

/* ---- tiles ------------------------------------------------------------------------------------
 */

static uint32_t divide_up(uint64_t n, uint64_t by)
{
    return (uint32_t)((n + by - 1) / by);
}

/* Returns how many of `columns` words, groups or elements a tile has, such that few threads of a
 * block are idle: threads are laid out in whole rows. A narrower tile must save at least a tenth of
 * the steps, and its width is a multiple of LINE. */
static uint32_t tile_width(uint32_t columns)
{
    enum { LINE = 8, MOST_PARTS = 8 };
    const uint32_t one = 1 << 10; /* steps are counted in 1/1024 of a block's pass */
    uint32_t width = columns < DRAY__GPU_THREADS ? columns : DRAY__GPU_THREADS, widest = width;
    uint64_t least = UINT64_MAX;
    for (uint32_t parts = 1; parts <= MOST_PARTS; parts++) {
        uint32_t w = parts == 1 ? widest : divide_up(divide_up(widest, parts), LINE) * LINE;
        uint32_t rest = columns % w;
        uint64_t steps = (uint64_t)(columns / w) * (one / (DRAY__GPU_THREADS / w));
        steps += rest ? one / (DRAY__GPU_THREADS / rest) : 0;
        if (steps < least - least / 10) {
            least = steps;
            width = w;
        }
        if (w <= 2 * LINE)
            break;
    }
    return width;
}

/* Cuts a piece into tiles. per: columns that are moved as one unit; bytes: of a unit; batch: units
 * that a thread loads before it stores. */
static void cut(dray__gpu_piece *p, uint32_t per, uint32_t bytes, uint32_t batch,
                uint64_t tile_bytes)
{
    uint32_t width = tile_width(p->columns / per), down = DRAY__GPU_THREADS / width;
    uint64_t rows = (uint64_t)down * batch, times = tile_bytes / (rows * width * bytes);
    rows *= times ? times : 1;
    if (rows > DRAY__GPU_ROWS)
        rows = DRAY__GPU_ROWS;
    if (rows > p->extent[2])
        rows = p->extent[2];
    p->tile_rows = (uint32_t)rows;
    p->tile_columns = width * per;
    /* A tile of a single row may be as long as tile_bytes. */
    if (rows == 1 && tile_bytes / bytes > width)
        p->tile_columns = (uint32_t)(tile_bytes / bytes < p->columns / per ? tile_bytes / bytes
                                                                           : p->columns / per) *
                          per;
    p->column_tiles = divide_up(p->columns, p->tile_columns);
    p->row_tiles = divide_up(p->extent[2], p->tile_rows);
}

uint64_t dray__gpu_tiles_of(const dray__gpu_piece *p)
{
    return (uint64_t)p->extent[0] * p->extent[1] * p->row_tiles * p->column_tiles;
}

/* ---- ways -------------------------------------------------------------------------------------
 */

/* Returns the largest power of two, at most `most`, that divides all numbers ORed into bits. */
static uint32_t common(uint64_t bits, uint32_t most)
{
    while (most > 1 && bits % most != 0)
        most /= 2;
    return most;
}

static uint64_t stride_bits(const dray__gpu_piece *p)
{
    uint64_t bits = 0;
    for (int d = 0; d < 3; d++)
        if (p->extent[d] > 1)
            bits |= (uint64_t)p->source_stride[d] | (uint64_t)p->destination_stride[d];
    return bits;
}

/* Returns the piece that has `count` of the columns of p. */
static dray__gpu_piece part_of(const dray__gpu_piece *p, uint32_t first, uint32_t count,
                               uint32_t from, uint32_t to)
{
    dray__gpu_piece part = *p;
    part.source += (uint64_t)first * from;
    part.destination += part.destination ? (uint64_t)first * to : 0;
    part.column += first;
    part.columns = count;
    return part;
}

/* Makes pieces of rows that are dense on both sides and not converted: the part that can be moved
 * in whole words, and the parts before and after it. */
static uint32_t copy_pieces(const dray__gpu_piece *p, uint64_t tile_bytes, dray__gpu_piece out[3],
                            int kernels[3])
{
    uint32_t unit = p->unit, n = 0, part[3] = {p->columns, 0, 0};
    bool sink = p->destination == 0;
    uint32_t beside = sink ? WORD : common(p->source - p->destination, WORD);
    uint32_t word = common(stride_bits(p) | beside, WORD);
    uint32_t head = (uint32_t)(-p->source & (word - 1));
    if (word > unit && head % unit == 0 && head < p->columns * (uint64_t)unit) {
        part[0] = head / unit;
        part[2] = (p->columns - part[0]) % (word / unit);
        part[1] = p->columns - part[0] - part[2];
    }
    for (uint32_t i = 0, first = 0; i < 3; first += part[i++]) {
        if (!part[i])
            continue;
        dray__gpu_piece *made = &out[n];
        *made = part_of(p, first, part[i], unit, unit);
        uint32_t width = common(made->source | (sink ? 0 : made->destination) | stride_bits(p) |
                                    (uint64_t)part[i] * unit,
                                WORD);
        made->word = (uint16_t)width;
        kernels[n++] = width != WORD ? DRAY__GPU_dray_narrow
                       : sink        ? DRAY__GPU_dray_sum
                       : unit == 1   ? DRAY__GPU_dray_bytes
                                     : DRAY__GPU_dray_words;
        /* Where words are smaller than elements, tiles have whole elements. */
        if (width > unit)
            cut(made, width / unit, width, 8, tile_bytes);
        else
            cut(made, 1, unit, 8, tile_bytes);
    }
    return n;
}

static bool groups_known(int32_t from, int32_t to)
{
    return from >= DRAY_F32 && from <= DRAY_F16 && to >= DRAY_F32 && to <= DRAY_F16;
}

/* Makes pieces of rows that are dense on both sides and converted: several elements at once, then
 * the rest. */
static uint32_t cast_pieces(const dray__gpu_piece *p, uint32_t to, uint64_t tile_bytes,
                            dray__gpu_piece out[3], int kernels[3])
{
    uint32_t n = 0, group = p->unit == 4 || to == 4 ? 4 : 8, whole = p->columns / group * group;
    if (!groups_known(p->from, p->to) ||
        common(p->source | p->destination | stride_bits(p), WORD) != WORD)
        whole = 0;
    if (whole) {
        out[n] = part_of(p, 0, whole, p->unit, to);
        kernels[n] = DRAY__GPU_dray_cast;
        cut(&out[n++], group, group * (p->unit > to ? p->unit : to), 8, tile_bytes);
    }
    if (whole < p->columns) {
        out[n] = part_of(p, whole, p->columns - whole, p->unit, to);
        kernels[n] = DRAY__GPU_dray_any;
        cut(&out[n], 1, p->unit > to ? p->unit : to, 4, tile_bytes);
        n++;
    }
    return n;
}

static uint32_t strided_piece(shape *s, const dray_copy *c, uint32_t from, uint32_t to,
                              uint64_t tile_bytes, dray__gpu_piece *out, int *kernel)
{
    int32_t dtype = s->destination ? c->destination_dtype : c->source_dtype;
    bool in_columns = s->columns.source_stride == from,
         out_columns = s->columns.destination_stride == to;
    uint32_t other = s->outers;
    if (s->destination && from <= 4 && to <= 4 && in_columns != out_columns)
        other = dense_outer(s, !in_columns, in_columns ? to : from);
    /* Elements that are not aligned to their size are moved one by one. */
    for (uint32_t d = 0; d < s->outers; d++)
        if (s->outer[d].source_stride % from || s->outer[d].destination_stride % to)
            other = s->outers;
    if (s->source % from || s->destination % to || s->columns.source_stride % from ||
        s->columns.destination_stride % to)
        other = s->outers;
    if (other < s->outers) {
        rows_last(s, other);
        *out = piece_of(s, c->source_dtype, dtype, from);
        out->tile_rows = out->extent[2] < SIDE ? out->extent[2] : SIDE;
        out->tile_columns = out->columns < SIDE ? out->columns : SIDE;
        out->row_tiles = divide_up(out->extent[2], out->tile_rows);
        out->column_tiles = divide_up(out->columns, out->tile_columns);
        out->turned = 1;
        *kernel = DRAY__GPU_dray_turn;
        return 1;
    }
    if (s->outers)
        rows_last(s, longest(s));
    *out = piece_of(s, c->source_dtype, dtype, from);
    cut(out, 1, from > to ? from : to, 4, tile_bytes);
    *kernel = DRAY__GPU_dray_any;
    return 1;
}

uint32_t dray__gpu_pieces_of(const dray__cuda_item *item, const dray_tensor_info *tensor,
                             uint64_t tile_bytes, dray__gpu_piece out[3], int kernels[3])
{
    const dray_copy *c = &item->copy;
    shape s = shape_of(item, tensor);
    uint32_t from = (uint32_t)dray_dtype_size((dray_dtype)c->source_dtype);
    uint32_t to = (uint32_t)dray_dtype_size((dray_dtype)c->destination_dtype);
    if (!s.destination)
        to = from;
    bool same = !s.destination || c->source_dtype == c->destination_dtype;
    if (s.columns.extent == 1) { /* its strides do not matter */
        s.columns.source_stride = from;
        s.columns.destination_stride = to;
    }
    if (s.columns.source_stride != from || s.columns.destination_stride != to)
        return strided_piece(&s, c, from, to, tile_bytes, out, kernels);
    if (s.outers)
        rows_last(&s, longest(&s));
    if (!same) {
        dray__gpu_piece p = piece_of(&s, c->source_dtype, c->destination_dtype, from);
        return cast_pieces(&p, to, tile_bytes, out, kernels);
    }
    if (from == 8) { /* two columns of 4 bytes */
        s.column *= 2;
        s.columns.extent *= 2;
        from = 4;
    }
    s.columns.source_stride = s.columns.destination_stride = from;
    dray__gpu_piece p = piece_of(&s, c->source_dtype, c->source_dtype, from);
    return copy_pieces(&p, tile_bytes, out, kernels);
}
