/* Describes, copies, or gives in place several rows of a column. */
#include "base/error.h"
#include "queue/client/client.h"
#include "queue/storage/own.h"

#include <string.h>

typedef struct gathered_rows {
    dray_column column;
    uint32_t first, end;
    size_t unit, bytes; /* of one element; of all values */
} gathered_rows;

/* Checks that all rows have a value: a batch that was got with `partial` may lack some. */
static int check_whole(dray_batch *batch, const char *name, const gathered_rows *of,
                       dray_error *error)
{
    dray_column_part part;
    for (uint32_t row = of->first; batch->keys && row < of->end; row++) {
        const char *key = batch->keys[row];
        if (!of->column.cells[row] && dray_batch_cell(batch, name, row, &part, NULL) == DRAY_ENOENT)
            return dray__fail(error, DRAY_ENOENT,
                              "batch of %s: column %s: a value in each row expected, row %u%s%s%s "
                              "has none (read it cell by cell, or get without partial)",
                              batch->partition, name, row, *key ? ", key " : "", key,
                              *key ? "," : "");
    }
    return DRAY_OK;
}

static int find_rows(dray_batch *batch, const char *name, uint32_t first, uint32_t count,
                     gathered_rows *out, dray_error *error)
{
    int rc = dray__batch_check_rows(batch, first, count, error);
    if (!rc)
        rc = dray_batch_column(batch, name, &out->column, error);
    if (rc)
        return rc;
    out->first = first;
    out->end = first + count;
    out->unit = dray_dtype_size((dray_dtype)out->column.dtype);
    out->bytes = 0;
    rc = check_whole(batch, name, out, error);
    if (rc)
        return rc;
    for (uint32_t row = first; row < out->end; row++)
        if (__builtin_add_overflow(out->bytes, out->column.lengths[row] * out->unit, &out->bytes))
            return dray__fail(error, DRAY_EFULL, "column %s: more bytes than can be addressed",
                              name);
    return DRAY_OK;
}

static void copy(const gathered_rows *of, uint8_t *at)
{
    for (uint32_t row = of->first; row < of->end; row++) {
        size_t size = of->column.lengths[row] * of->unit;
        if (size)
            memcpy(at, of->column.cells[row], size);
        at += size;
    }
}

int dray_batch_gather(dray_batch *batch, const char *name, void *out, size_t capacity,
                      size_t *bytes, dray_error *error)
{
    return dray_batch_gather_rows(batch, name, 0, batch->row_count, out, capacity, bytes, error);
}

int dray_batch_gather_rows(dray_batch *batch, const char *name, uint32_t first, uint32_t count,
                           void *out, size_t capacity, size_t *bytes, dray_error *error)
{
    gathered_rows found;
    int rc = find_rows(batch, name, first, count, &found, error);
    if (rc)
        return rc;
    if (found.bytes > capacity)
        return dray__fail(error, DRAY_EFULL, "column %s: %zu bytes needed, capacity is %zu", name,
                          found.bytes, capacity);
    copy(&found, out);
    if (bytes)
        *bytes = found.bytes;
    return DRAY_OK;
}

/* Returns the address of the values if they are contiguous; NULL when they are not, or are empty.
 */
static const void *lie_together(const gathered_rows *of)
{
    const uint8_t *begin = NULL, *end = NULL;
    for (uint32_t row = of->first; row < of->end; row++) {
        const uint8_t *cell = of->column.cells[row];
        size_t size = of->column.lengths[row] * of->unit;
        if (!size)
            continue;
        if (begin && cell != end)
            return NULL;
        begin = begin ? begin : cell;
        end = cell + size;
    }
    return begin;
}

/* Returns the mapped chunk that has all of the bytes, or NULL. */
static dray__mapping *mapping_of(const dray_batch *batch, const uint8_t *at, uint64_t bytes)
{
    for (uint32_t i = 0; at && i < batch->mapping_count; i++) {
        dray__mapping *mapping = batch->mappings[i];
        uint64_t offset = (uint64_t)(at - mapping->base);
        if (at >= mapping->base && offset <= mapping->size && bytes <= mapping->size - offset)
            return mapping;
    }
    return NULL;
}

int dray_batch_own(dray_batch *batch, const char *name, uint32_t first, uint32_t count, void **out,
                   dray_error *error)
{
    gathered_rows found;
    *out = NULL;
    int rc = dray__queue_check_fork(batch->queue, error);
    if (!rc)
        rc = find_rows(batch, name, first, count, &found, error);
    if (rc || !batch->roomy)
        return rc;
    const void *at = lie_together(&found);
    dray__mapping *mapping = mapping_of(batch, at, found.bytes);
    if (mapping)
        *out = dray__own(&batch->queue->holder.keeper, mapping, at, found.bytes, batch);
    batch->owns |= *out != NULL;
    return DRAY_OK;
}

static void put_offsets(const gathered_rows *of, int64_t *offsets)
{
    uint64_t slice = 1, at = 0;
    for (uint32_t d = 1; d < of->column.ndim; d++)
        slice *= (uint64_t)of->column.shape[d];
    *offsets++ = 0;
    for (uint32_t row = of->first; row < of->end; row++) {
        at += slice ? of->column.lengths[row] / slice : 0;
        *offsets++ = (int64_t)at;
    }
}

int dray_batch_read(dray_batch *batch, const char *name, uint32_t first, uint32_t count,
                    dray_column_part *out, int64_t *offsets, void *room, size_t capacity,
                    dray_error *error)
{
    gathered_rows found;
    int rc = find_rows(batch, name, first, count, &found, error);
    if (rc)
        return rc;
    const dray_column *column = &found.column;
    *out = (dray_column_part){.dtype = column->dtype,
                              .content = column->content,
                              .ndim = column->ndim,
                              .copied = found.bytes <= capacity,
                              .bytes = found.bytes,
                              .values = lie_together(&found)};
    memcpy(out->shape, column->shape, sizeof out->shape);
    if (column->ndim && column->shape[0] < 0)
        put_offsets(&found, offsets);
    if (out->copied)
        copy(&found, room);
    return DRAY_OK;
}
