/* Reading columns that cannot be mapped, from a store or another host, into buffers that are kept
 * and used again. */
#include "base/error.h"
#include "queue/client/client.h"

#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/mman.h>

#define BUFFER_MIN (UINT64_C(64) << 10)
#define POOLED_MAX (UINT64_C(64) << 20)  /* most bytes of a buffer that is kept */
#define POOL_BYTES (UINT64_C(256) << 20) /* most bytes of all kept buffers */
#define GAP (4u << 10) /* unneeded bytes that are fetched to avoid another range, at most */

/* ---- buffers --------------------------------------------------------------------------------- */

struct dray__buffer {
    dray__buffer *next;
    uint64_t size;
};

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static dray__buffer *pool;
static uint64_t pool_bytes;

/* Takes a kept buffer, whose pages are allocated already. */
static dray__buffer *from_pool(uint64_t size)
{
    pthread_mutex_lock(&lock);
    dray__buffer **at = &pool;
    while (*at && (*at)->size != size)
        at = &(*at)->next;
    dray__buffer *buffer = *at;
    if (buffer) {
        *at = buffer->next;
        pool_bytes -= size;
    }
    pthread_mutex_unlock(&lock);
    return buffer;
}

static uint8_t *buffer_get(dray__buffer **list, uint64_t bytes)
{
    uint64_t size = BUFFER_MIN;
    while (size < INT64_MAX / 2 && size - DRAY__ALIGN < bytes)
        size *= 2;
    if (size - DRAY__ALIGN < bytes)
        return NULL;
    dray__buffer *buffer = from_pool(size);
    if (!buffer) {
        void *fresh = mmap(NULL, size, PROT_READ | PROT_WRITE,
                           MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
        if (fresh == MAP_FAILED)
            return NULL;
        buffer = fresh;
        buffer->size = size;
    }
    buffer->next = *list;
    *list = buffer;
    return (uint8_t *)buffer + DRAY__ALIGN;
}

void dray__buffers_free(dray__buffer *buffers)
{
    while (buffers) {
        dray__buffer *buffer = buffers;
        buffers = buffer->next;
        pthread_mutex_lock(&lock);
        bool keep = buffer->size <= POOLED_MAX && pool_bytes + buffer->size <= POOL_BYTES;
        if (keep) {
            buffer->next = pool;
            pool = buffer;
            pool_bytes += buffer->size;
        }
        pthread_mutex_unlock(&lock);
        if (!keep)
            munmap(buffer, buffer->size);
    }
}

/* ---- reading --------------------------------------------------------------------------------- */

typedef struct wanted_cell { /* an item of a row of the batch that cannot be mapped */
    uint32_t put, item;
} wanted_cell;

typedef struct reading {
    dray_batch *batch;
    const dray__batch_column *column;
    wanted_cell *cells;
    uint32_t count;
    dray__range *ranges;
    uint32_t *puts; /* [range] */
    uint32_t range_count;
    bool *lost; /* [put] */
} reading;

static int by_place(const void *a, const void *b)
{
    const wanted_cell *x = a, *y = b;
    if (x->put != y->put)
        return (x->put > y->put) - (x->put < y->put);
    return (x->item > y->item) - (x->item < y->item);
}

static struct dray__batch_extent *extent_of(const reading *r, uint32_t put)
{
    return dray__batch_extent_of(r->batch, r->column, put);
}

static bool is_elsewhere(const reading *r, uint32_t put)
{
    return dray__batch_elsewhere(r->batch->queue, extent_of(r, put));
}

static int list_cells(reading *r, dray_error *error)
{
    const dray_batch *batch = r->batch;
    const dray__batch_place *places = batch->places + (size_t)r->column->place * batch->row_count;
    uint64_t capacity = batch->row_count;
    for (uint32_t i = 0; i < batch->pieces_count; i++)
        if (batch->pieces[i].place == r->column->place)
            capacity += batch->pieces[i].count;
    r->cells = calloc(capacity, sizeof *r->cells);
    r->ranges = calloc(capacity, sizeof *r->ranges);
    r->puts = calloc(capacity, sizeof *r->puts);
    r->lost = calloc(batch->put_count ? batch->put_count : 1, sizeof *r->lost);
    if (!r->cells || !r->ranges || !r->puts || !r->lost)
        return dray__nomem(error);
    uint32_t count = 0;
    for (uint32_t row = 0; row < batch->row_count; row++)
        if (places[row].put != UINT32_MAX && is_elsewhere(r, places[row].put))
            r->cells[count++] = (wanted_cell){places[row].put, places[row].item};
    for (uint32_t i = 0; i < batch->pieces_count; i++)
        for (uint32_t k = 0;
             batch->pieces[i].place == r->column->place && k < batch->pieces[i].count; k++) {
            dray__batch_place at = batch->pieces[i].items[k].at;
            if (is_elsewhere(r, at.put))
                r->cells[count++] = (wanted_cell){at.put, at.item};
        }
    if (count)
        qsort(r->cells, count, sizeof *r->cells, by_place);
    for (uint32_t i = 0; i < count; i++)
        if (!i || by_place(&r->cells[i], &r->cells[i - 1]) != 0)
            r->cells[r->count++] = r->cells[i];
    return DRAY_OK;
}

static bool first_of_put(const reading *r, uint32_t i)
{
    return !i || r->cells[i].put != r->cells[i - 1].put;
}

/* Computes the size of an extent, which begins with its offsets or else its values, as an object
 * does. Returns false when its sizes are impossible. */
static bool extent_size(struct dray__batch_extent *found, const dray__column_spec *spec,
                        uint32_t items, uint64_t *size)
{
    dray__extent *e = &found->extent;
    uint64_t head = 0;
    e->values += found->shift; /* undoes the shift of an earlier read */
    e->offsets += spec->ragged ? found->shift : 0;
    if (__builtin_add_overflow(e->values, e->bytes, size) ||
        __builtin_add_overflow(e->offsets, ((uint64_t)items + 1) * 8, &head))
        return false;
    found->shift = spec->ragged && e->offsets < e->values ? e->offsets : e->values;
    e->values -= found->shift;
    e->offsets -= spec->ragged ? found->shift : 0;
    *size = (spec->ragged && head > *size ? head : *size) - found->shift;
    return *size <= INT64_MAX / 2;
}

/* Reserves room for the extents at their full sizes. Pages that are never fetched are never
 * touched. */
static int map_extents(reading *r, dray_error *error)
{
    uint64_t total = 0;
    for (uint32_t i = 0; i < r->count; i++) {
        if (!first_of_put(r, i))
            continue;
        const dray__batch_put *put = &r->batch->puts[r->cells[i].put];
        struct dray__batch_extent *found = extent_of(r, r->cells[i].put);
        uint64_t size = 0;
        if (!found)
            return dray__fail(error, DRAY_EFORMAT, "column %s: a row's values are missing",
                              r->column->name);
        if (!extent_size(found, dray__batch_spec(r->column, found), put->items, &size))
            return dray__fail(error, DRAY_EFORMAT, "column %s: impossible sizes", r->column->name);
        int rc = dray__extent_check(&found->extent, dray__batch_spec(r->column, found), put->items,
                                    size, r->column->name, error);
        if (!rc && __builtin_add_overflow(total, dray__round_up(size, DRAY__ALIGN), &total))
            rc = dray__fail(error, DRAY_EFULL, "column %s: more bytes than can be addressed",
                            r->column->name);
        if (rc)
            return rc;
    }
    uint8_t *base = buffer_get(&r->batch->buffers, total);
    if (!base)
        return dray__fail(error, DRAY_ENOMEM, "column %s: a buffer of %llu bytes", r->column->name,
                          (unsigned long long)total);
    for (uint32_t i = 0; i < r->count; i++) {
        if (!first_of_put(r, i))
            continue;
        struct dray__batch_extent *found = extent_of(r, r->cells[i].put);
        dray__mapping *mapping = dray__arena_get(&r->batch->arena, sizeof *mapping);
        if (!mapping)
            return dray__nomem(error);
        uint64_t size = found->extent.values + found->extent.bytes;
        uint64_t head =
            found->extent.offsets + ((uint64_t)r->batch->puts[r->cells[i].put].items + 1) * 8;
        size = dray__batch_spec(r->column, found)->ragged && head > size ? head : size;
        *mapping = (dray__mapping){.id = found->extent.chunk, .base = base, .size = size};
        found->mapping = mapping;
        base += dray__round_up(size, DRAY__ALIGN);
    }
    return DRAY_OK;
}

/* Adds a range of the put's object. Extends the last range when the gap to it is small. */
static void want(reading *r, uint32_t put, uint64_t offset, uint64_t bytes)
{
    const struct dray__batch_extent *extent = extent_of(r, put);
    dray__range *last = r->range_count ? &r->ranges[r->range_count - 1] : NULL;
    uint8_t *at = extent->mapping->base + offset;
    offset += extent->shift;
    if (!bytes)
        return;
    if (last && r->puts[r->range_count - 1] == put && offset >= last->offset) {
        uint64_t end = last->offset + last->bytes, to = offset + bytes;
        if (offset <= end + GAP) {
            last->bytes = (to > end ? to : end) - last->offset;
            return;
        }
    }
    r->puts[r->range_count] = put;
    r->ranges[r->range_count++] = (dray__range){.object = extent->extent.chunk,
                                                .offset = offset,
                                                .bytes = bytes,
                                                .at = at,
                                                .keeper = extent->keeper};
}

static int get_ranges(reading *r, int64_t deadline, dray_error *error)
{
    dray_queue *queue = r->batch->queue;
    int rc = DRAY_OK;
    if (r->range_count)
        rc = queue->holder.kind->get(&queue->holder, r->ranges, r->range_count, deadline, error);
    for (uint32_t i = 0; !rc && i < r->range_count; i++)
        r->lost[r->puts[i]] |= r->ranges[i].lost;
    r->range_count = 0;
    return rc ? dray__fail_prefix(error, rc, "column %s: ", r->column->name) : DRAY_OK;
}

static void want_values(reading *r)
{
    for (uint32_t i = 0; i < r->count; i++) {
        const struct dray__batch_extent *extent = extent_of(r, r->cells[i].put);
        const dray__column_spec *spec = dray__batch_spec(r->column, extent);
        uint64_t unit = dray__spec_bytes(spec);
        uint64_t from = r->cells[i].item, to = from + 1, end;
        if (r->lost[r->cells[i].put])
            continue;
        if (spec->ragged) {
            const uint8_t *head = extent->mapping->base + extent->extent.offsets;
            const uint64_t *offsets = (const uint64_t *)(const void *)head;
            from = offsets[r->cells[i].item];
            to = offsets[r->cells[i].item + 1];
        }
        if (from > to || __builtin_mul_overflow(to, unit, &end) || end > extent->extent.bytes)
            continue; /* reading the cell reports the error */
        want(r, r->cells[i].put, extent->extent.values + from * unit, (to - from) * unit);
    }
}

static bool row_is_lost(const reading *r, uint32_t row)
{
    const dray_batch *batch = r->batch;
    dray__batch_place place = dray__batch_place_of(batch, r->column, row);
    if (place.put == UINT32_MAX)
        return false;
    bool lost = r->lost[place.put];
    for (uint32_t i = 0; i < batch->pieces_count; i++)
        if (batch->pieces[i].place == r->column->place && batch->pieces[i].row == row)
            for (uint32_t k = 0; k < batch->pieces[i].count; k++)
                lost |= r->lost[batch->pieces[i].items[k].at.put];
    return lost;
}

/* Reports the loss to the controller, which asks for other samples where they are needed, and to
 * the reader of the batch. */
static int report_lost(reading *r, dray_error *error)
{
    dray_batch *batch = r->batch;
    dray_queue *queue = batch->queue;
    char reason[DRAY__REASON_MAX];
    uint32_t count = 0, *rows = dray__arena_get(&batch->arena, batch->row_count * sizeof *rows);
    if (!rows)
        return dray__nomem(error);
    for (uint32_t row = 0; row < batch->row_count; row++) {
        if (row_is_lost(r, row))
            rows[count++] = row;
    }
    if (!count)
        return DRAY_OK;
    for (uint32_t i = 0; i < r->count; i++) /* so that the next read looks for them again */
        extent_of(r, r->cells[i].put)->mapping = NULL;
    snprintf(reason, sizeof reason, "%s lost the bytes of column %.100s", queue->holder.name,
             r->column->name);
    if (batch->ticket) {
        const dray__failing message = {
            .ticket = batch->ticket, .items = rows, .count = count, .reason = reason};
        dray__queue_command(queue, DRAY__MSG_QUEUE_LOST, &dray__losing_fields, &message, NULL,
                            NULL);
    }
    return dray__fail(error, DRAY_EGONE,
                      "partition %s: %u of %u rows (the first: %u) are lost: %s%s",
                      batch->partition, count, batch->row_count, batch->rows[rows[0]].slot, reason,
                      queue->holder.kind->lost);
}

static int read_cells(reading *r, dray_error *error)
{
    int64_t deadline =
        dray__context_deadline(r->batch->queue->context, r->batch->queue->timeout_ns);
    for (uint32_t i = 0; i < r->count; i++) {
        const struct dray__batch_extent *extent = extent_of(r, r->cells[i].put);
        if (dray__batch_spec(r->column, extent)->ragged)
            want(r, r->cells[i].put, extent->extent.offsets + r->cells[i].item * UINT64_C(8), 16);
    }
    int rc = get_ranges(r, deadline, error);
    if (rc)
        return rc;
    want_values(r);
    rc = get_ranges(r, deadline, error);
    return rc ? rc : report_lost(r, error);
}

int dray__batch_get(dray_batch *batch, dray__batch_column *column, dray_error *error)
{
    reading r = {.batch = batch, .column = column};
    int rc = dray__queue_check_fork(batch->queue, error);
    dray__values_holder *holder = &batch->queue->holder;
    if (!rc && holder->kind->prepare)
        rc = holder->kind->prepare(holder, error);
    if (!rc)
        rc = list_cells(&r, error);
    if (!rc && r.count)
        rc = map_extents(&r, error);
    if (!rc)
        rc = read_cells(&r, error);
    free(r.cells);
    free(r.ranges);
    free(r.puts);
    free(r.lost);
    return rc;
}
