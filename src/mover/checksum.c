#include "mover/checksum.h"

#include "base/error.h"
#include "mover/kernels.h"
#include "mover/rect.h"

#include <string.h>

/* Column factors are made once for this many columns and used for all rows. Most tensors' rows are
 * shorter: then rows are read one after the other, which memory likes better than strips of them.
 * Elements that must be gathered or converted first go through smaller buffers. */
/* Rows of fewer elements are read one by one. */
enum { COLUMNS = 8192, COLUMNS_OF_ONE_ROW = 2048, CHUNK = 1024, ROWS_FROM = 256 };

uint64_t dray__sum_row_factor(uint64_t row)
{
    uint64_t z = row + UINT64_C(0x9E3779B97F4A7C15);
    z = (z ^ z >> 30) * UINT64_C(0xBF58476D1CE4E5B9);
    z = (z ^ z >> 27) * UINT64_C(0x94D049BB133111EB);
    return (z ^ z >> 31) | 1;
}

uint32_t dray__sum_column_factor(uint64_t column)
{
    uint32_t factor;
    dray__kernels_get()->columns(column, 1, &factor);
    return factor;
}

/* How a piece of a row becomes a number. */
typedef struct piece {
    size_t from_size, to_size;
    int64_t stride;
    dray__cast_fn cast; /* NULL: the bits as they are */
    uint64_t (*dot)(const uint32_t *columns, const void *data, size_t count);
    size_t words; /* columns that one element counts as */
    /* Four rows at once; NULL: one by one. */
    void (*rows)(const uint32_t *columns, const void *data, int64_t stride, size_t count,
                 uint64_t sums[4]);
} piece;

/* At most CHUNK elements that are not there as they are summed. */
static uint64_t sum_chunk(const piece *p, const uint32_t *columns, const uint8_t *data, size_t n)
{
    uint64_t gathered[CHUNK], converted[CHUNK]; /* room for elements of 8 bytes */
    if (p->stride != (int64_t)p->from_size) {
        dray__elements_move(data, p->stride, (uint8_t *)gathered, (int64_t)p->from_size,
                            p->from_size, n);
        data = (const uint8_t *)gathered;
    }
    if (p->cast) {
        p->cast(data, converted, n);
        data = (const uint8_t *)converted;
    }
    return p->dot(columns, data, n * p->words);
}

static uint64_t sum_piece(const piece *p, const uint32_t *columns, const uint8_t *data, size_t n)
{
    if (!p->cast && p->stride == (int64_t)p->from_size)
        return p->dot(columns, data, n * p->words);
    uint64_t sum = 0;
    for (size_t i = 0; i < n; i += CHUNK)
        sum += sum_chunk(p, columns + i * p->words, data + (int64_t)i * p->stride,
                         n - i < CHUNK ? n - i : CHUNK);
    return sum;
}

/* Rows: up to three outer dimensions, padded in front with single ones. */
typedef struct row_range {
    int64_t count[3], stride[3]; /* bytes */
    uint64_t first, step[3];     /* flattened row index: of the first row, per dimension */
} row_range;

static row_range rows_of(const dray__sum_of *r)
{
    row_range out = {.count = {1, 1, 1}};
    uint64_t step = 1;
    for (uint32_t d = r->ndim ? r->ndim - 1 : 0, at = 3; d-- > 0;) {
        at--;
        out.count[at] = r->extent[d];
        out.stride[at] = r->stride[d];
        out.step[at] = step;
        out.first += step * (uint64_t)r->start[d];
        step *= (uint64_t)r->shape[d];
    }
    return out;
}

static uint64_t sum_columns(const piece *p, const row_range *rows, const uint32_t *columns,
                            const uint8_t *data, size_t n)
{
    uint64_t sum = 0;
    for (int64_t i = 0; i < rows->count[0]; i++)
        for (int64_t j = 0; j < rows->count[1]; j++) {
            const uint8_t *at = data + i * rows->stride[0] + j * rows->stride[1];
            uint64_t row = rows->first + (uint64_t)i * rows->step[0] + (uint64_t)j * rows->step[1];
            int64_t k = 0;
            for (; p->rows && n >= ROWS_FROM && k + 4 <= rows->count[2]; k += 4) {
                uint64_t of_row[4];
                p->rows(columns, at, rows->stride[2], n, of_row);
                for (int r = 0; r < 4; r++, row += rows->step[2])
                    sum += dray__sum_row_factor(row) * of_row[r];
                at += 4 * rows->stride[2];
            }
            for (; k < rows->count[2]; k++) {
                sum += dray__sum_row_factor(row) * sum_piece(p, columns, at, n);
                at += rows->stride[2];
                row += rows->step[2];
            }
        }
    return sum;
}

static uint64_t sum_all(const dray__sum_of *r, int32_t to, dray__cast_fn cast)
{
    const dray__kernels *kernels = dray__kernels_get();
    piece p = {.from_size = dray_dtype_size((dray_dtype)r->dtype),
               .to_size = dray_dtype_size((dray_dtype)to),
               .cast = cast,
               .words = 1};
    p.dot = p.to_size == 1 ? kernels->dot1 : p.to_size == 2 ? kernels->dot2 : kernels->dot4;
    p.words = p.to_size == 8 ? 2 : 1;
    p.stride = r->ndim ? r->stride[r->ndim - 1] : (int64_t)p.from_size;
    if (!cast && p.from_size == 2 && p.stride == 2)
        p.rows = kernels->dot2_rows;
    uint64_t first = r->ndim ? (uint64_t)r->start[r->ndim - 1] : 0;
    uint64_t count = r->ndim ? (uint64_t)r->extent[r->ndim - 1] : 1;
    row_range outer = rows_of(r);
    uint32_t columns[COLUMNS];
    uint64_t sum = 0;
    bool single = outer.count[0] * outer.count[1] * outer.count[2] == 1;
    size_t most = (single ? COLUMNS_OF_ONE_ROW : COLUMNS) / p.words;
    for (uint64_t c = 0; c < count; c += most) {
        size_t n = count - c < most ? (size_t)(count - c) : most;
        kernels->columns((first + c) * p.words, n * p.words, columns);
        sum +=
            sum_columns(&p, &outer, columns, (const uint8_t *)r->data + (int64_t)c * p.stride, n);
    }
    return sum;
}

/* Rows that are not dense, of columns that are: put in order tile by tile. */
static uint64_t sum_turned(const dray__sum_of *r, const dray__turn *turn)
{
    enum { TILE = 32 << 10 };
    uint8_t tile[TILE] __attribute__((aligned(64)));
    int64_t size[DRAY_MAX_DIMS], at[DRAY_MAX_DIMS] = {0}, start[DRAY_MAX_DIMS];
    uint64_t sum = 0;
    dray__turn_tile(turn, r->extent, r->ndim, TILE / dray_dtype_size((dray_dtype)r->dtype), size);
    for (uint32_t d = r->ndim; d > 0;) {
        dray__rect part = {.ndim = r->ndim, .from = r->dtype, .to = r->dtype, .source = r->data};
        for (d = 0; d < r->ndim; d++) {
            int64_t left = r->extent[d] - at[d];
            part.extent[d] = left < size[d] ? left : size[d];
            part.source_stride[d] = r->stride[d];
            part.source += at[d] * r->stride[d];
            start[d] = r->start[d] + at[d];
        }
        part = dray__rect_to_dense(&part, tile);
        dray__rect_move(&part);
        dray__sum_of ordered = {
            r->dtype, r->ndim, r->shape, start, part.extent, part.destination_stride, tile};
        sum += sum_all(&ordered, r->dtype, NULL);
        for (; d > 0; d--) {
            at[d - 1] += part.extent[d - 1];
            if (at[d - 1] < r->extent[d - 1])
                break;
            at[d - 1] = 0;
        }
    }
    return sum;
}

uint64_t dray__sum(const dray__sum_of *r)
{
    dray__rect whole = {.ndim = r->ndim, .from = r->dtype, .to = r->dtype, .source = r->data};
    dray__turn turn;
    if (r->ndim < 2 || r->stride[r->ndim - 1] == (int64_t)dray_dtype_size((dray_dtype)r->dtype))
        return sum_all(r, r->dtype, NULL);
    memcpy(whole.extent, r->extent, r->ndim * sizeof *r->extent);
    memcpy(whole.source_stride, r->stride, r->ndim * sizeof *r->stride);
    whole = dray__rect_to_dense(&whole, NULL);
    return dray__rect_turns(&whole, &turn) && turn.destination == r->ndim - 1
               ? sum_turned(r, &turn)
               : sum_all(r, r->dtype, NULL);
}

int dray__sum_as(const dray__sum_of *rectangle, int32_t to, uint64_t *sum, dray_error *error)
{
    dray__cast_fn cast = NULL;
    if (rectangle->dtype != to) {
        cast = dray__cast_find(rectangle->dtype, to);
        if (!cast)
            return dray__fail(error, DRAY_EDTYPE, "checksum: %s cannot be converted to %s",
                              dray_dtype_name((dray_dtype)rectangle->dtype),
                              dray_dtype_name((dray_dtype)to));
    }
    *sum = sum_all(rectangle, to, cast);
    return DRAY_OK;
}
