/* A batch: its columns read in place, its outputs written, committed or given back. */
#include "queue/client/client.h"
#include "queue/storage/own.h"

#include "base/arena.h"
#include "base/clock.h"
#include "base/error.h"
#include "base/words.h"

#include <poll.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

uint32_t dray_batch_rows(const dray_batch *batch)
{
    return batch->row_count;
}

const char *dray_batch_partition(const dray_batch *batch)
{
    return batch->partition;
}

dray_wait_cause dray_batch_waited_for(const dray_batch *batch)
{
    return batch->bounded ? DRAY_CAUSE_ADMISSION : DRAY_CAUSE_SAMPLES;
}

const dray_row *dray_batch_row(const dray_batch *batch, uint32_t index)
{
    return index < batch->row_count ? &batch->rows[index] : NULL;
}

uint32_t dray_batch_micros(const dray_batch *batch)
{
    return batch->micro_count ? batch->micro_count : 1;
}

int dray_batch_micro(const dray_batch *batch, uint32_t index, uint32_t *first, uint32_t *rows,
                     dray_error *error)
{
    if (index >= dray_batch_micros(batch))
        return dray__fail(error, DRAY_EINVALID, "micro-batch %u of %u", index,
                          dray_batch_micros(batch));
    *first = index ? batch->micro_ends[index - 1] : 0;
    *rows = (batch->micro_count ? batch->micro_ends[index] : batch->row_count) - *first;
    return DRAY_OK;
}

double dray_batch_weight(const dray_batch *batch, uint32_t index)
{
    return index < batch->row_count && (!batch->micro_count || batch->own[index]) ? 1 : 0;
}

static int check_row(const dray_batch *batch, uint32_t index, dray_error *error)
{
    if (index < batch->row_count)
        return DRAY_OK;
    return dray__fail(error, DRAY_EINVALID, "row %u of a batch of %u", index, batch->row_count);
}

static int check_open_rows(const dray_batch *batch, const char *function, const uint32_t *rows,
                           uint32_t count, dray_error *error)
{
    int rc = dray__batch_check_open(batch, function, error);
    for (uint32_t i = 0; !rc && i < count; i++)
        rc = check_row(batch, rows[i], error);
    return rc;
}

int dray__batch_check_rows(const dray_batch *batch, uint32_t first, uint32_t rows,
                           dray_error *error)
{
    if (first <= batch->row_count && rows <= batch->row_count - first)
        return DRAY_OK;
    return dray__fail(error, DRAY_EINVALID, "%u rows from %u of a batch of %u", rows, first,
                      batch->row_count);
}

int dray_batch_weights(const dray_batch *batch, uint32_t first, uint32_t rows, double *weights,
                       dray_error *error)
{
    int rc = dray__batch_check_rows(batch, first, rows, error);
    for (uint32_t i = 0; !rc && i < rows; i++)
        weights[i] = dray_batch_weight(batch, first + i);
    return rc;
}

static const dray__batch_tag *find_tag(const dray_batch *batch, uint32_t index, const char *key)
{
    for (uint32_t i = batch->tag_start[index + 1]; i > batch->tag_start[index]; i--)
        if (strcmp(batch->tags[i - 1].key, key) == 0)
            return &batch->tags[i - 1];
    return NULL;
}

int dray_batch_tag(const dray_batch *batch, uint32_t index, const char *key, double *value,
                   dray_error *error)
{
    int rc = check_row(batch, index, error);
    if (!rc)
        rc = dray__name_check(key, "tag", error);
    if (rc)
        return rc;
    const dray__batch_tag *tag = find_tag(batch, index, key);
    if (tag) {
        *value = tag->value;
        return DRAY_OK;
    }
    return dray__fail(error, DRAY_ENOENT, "row %u of partition %s has no tag %s",
                      batch->rows[index].slot, batch->partition, key);
}

int dray_batch_tags(const dray_batch *batch, const char *key, uint32_t first, uint32_t rows,
                    double *values, dray_error *error)
{
    int rc = dray__batch_check_rows(batch, first, rows, error);
    if (!rc)
        rc = dray__name_check(key, "tag", error);
    for (uint32_t i = 0; !rc && i < rows; i++) {
        const dray__batch_tag *tag = find_tag(batch, first + i, key);
        values[i] = tag ? tag->value : values[i];
    }
    return rc;
}

/* ---- reading --------------------------------------------------------------------------------- */

dray__batch_place dray__batch_place_of(const dray_batch *batch, const dray__batch_column *column,
                                       uint32_t row)
{
    return batch->places[(size_t)column->place * batch->row_count + row];
}

struct dray__batch_extent *dray__batch_extent_of(const dray_batch *batch,
                                                 const dray__batch_column *column, uint32_t put)
{
    const dray__batch_put *p = &batch->puts[put];
    for (uint32_t e = 0; e < p->count; e++)
        if (p->extents[e].column == column->column)
            return &p->extents[e];
    return NULL;
}

const dray__column_spec *dray__batch_spec(const dray__batch_column *column,
                                          const struct dray__batch_extent *extent)
{
    return extent && extent->own ? extent->own : &column->spec;
}

bool dray__batch_elsewhere(const dray_queue *queue, const struct dray__batch_extent *extent)
{
    const dray__values_holder *holder = &queue->holder;
    return !holder->kind->is_elsewhere ||
           holder->kind->is_elsewhere(holder, extent ? extent->keeper : holder->keeper_number);
}

/* Returns true when the keeper may come back: the coordinator's own may, together with the
 * coordinator, when there is a journal. The controller then reports which chunks are left. The
 * keeper of another host ends with its session. */
static bool keeper_may_return(const dray_queue *queue)
{
    if (queue->holder.keeper_number)
        return false;
    return dray__channel_alive(queue->channel) ||
           (queue->durability == DRAY_DURABILITY_JOURNAL && !dray__channel_ended(queue->channel));
}

static int get_mapping(dray_queue *queue, uint64_t chunk, dray__mapping **out, dray_error *error)
{
    int64_t deadline = dray__context_deadline(queue->context, queue->timeout_ns);
    int rc = dray__mapping_get(&queue->holder.keeper, chunk, out, error);
    while (rc == DRAY_ECLOSED && keeper_may_return(queue) && dray__now() < deadline &&
           !dray__interrupted()) {
        poll(NULL, 0, 5);
        rc = dray__mapping_get(&queue->holder.keeper, chunk, out, error);
    }
    return rc;
}

static int map_chunk(dray_batch *batch, uint64_t chunk, dray__mapping **out, dray_error *error)
{
    for (uint32_t i = 0; i < batch->mapping_count; i++)
        if (batch->mappings[i]->id == chunk) {
            *out = batch->mappings[i];
            return DRAY_OK;
        }
    if (!dray__append(&batch->mappings, sizeof *batch->mappings, batch->mapping_count,
                      &batch->mapping_capacity))
        return dray__nomem(error);
    int rc = dray__queue_check_fork(batch->queue, error);
    if (!rc)
        rc = get_mapping(batch->queue, chunk, out, error);
    if (!rc)
        batch->mappings[batch->mapping_count++] = *out;
    return rc;
}

/* The keeper of this host was started again without the chunk. Tells the controller which rows of
 * the batch were in the chunk. */
static void report_gone(dray_batch *batch, const dray__batch_column *column, uint64_t chunk)
{
    dray_queue *queue = batch->queue;
    uint32_t count = 0;
    if (!batch->ticket)
        return;
    uint32_t *rows = dray__arena_get(&batch->arena, batch->row_count * sizeof *rows);
    for (uint32_t row = 0; rows && row < batch->row_count; row++) {
        uint32_t put = dray__batch_place_of(batch, column, row).put;
        for (uint32_t e = 0; put != UINT32_MAX && e < batch->puts[put].count; e++)
            if (batch->puts[put].extents[e].extent.chunk == chunk) {
                rows[count++] = row;
                break;
            }
    }
    const dray__failing lost = {.ticket = batch->ticket,
                                .items = rows,
                                .count = count,
                                .reason = "the keeper of this host ended, and its bytes with it",
                                .chunks = &chunk,
                                .chunk_count = 1};
    if (rows)
        dray__queue_command(queue, DRAY__MSG_QUEUE_LOST, &dray__losing_fields, &lost, NULL, NULL);
}

/* Finds the put's extent of the column, maps it, and checks that it fits its mapping. */
static int find_extent(dray_batch *batch, const dray__batch_column *column,
                       const dray__batch_put *put, struct dray__batch_extent **out,
                       dray_error *error)
{
    struct dray__batch_extent *found =
        dray__batch_extent_of(batch, column, (uint32_t)(put - batch->puts));
    if (!found)
        return dray__fail(error, DRAY_EFORMAT, "column %s: a row's values are missing",
                          column->name);
    *out = found;
    if (found->mapping)
        return DRAY_OK;
    dray__mapping *mapping;
    int rc = map_chunk(batch, found->extent.chunk, &mapping, error);
    if (rc == DRAY_EGONE)
        report_gone(batch, column, found->extent.chunk);
    if (rc)
        return dray__fail_prefix(error, rc, "column %s: ", column->name);
    rc = dray__extent_check(&found->extent, dray__batch_spec(column, found), put->items,
                            mapping->size, column->name, error);
    if (!rc)
        found->mapping = mapping;
    return rc;
}

/* The producer may still change its offsets, so each is read once, and the value read is checked.
 */
static int ragged_cell(const struct dray__batch_extent *extent, const dray__batch_column *column,
                       uint32_t item, const void **cell, uint64_t *length, dray_error *error)
{
    const uint8_t *base = extent->mapping->base;
    const uint64_t *offsets = (const uint64_t *)(const void *)(base + extent->extent.offsets);
    uint64_t from = __atomic_load_n(&offsets[item], __ATOMIC_RELAXED);
    uint64_t to = __atomic_load_n(&offsets[item + 1], __ATOMIC_RELAXED), end;
    const dray__column_spec *spec = dray__batch_spec(column, extent);
    uint64_t unit = dray__spec_bytes(spec);
    if (from > to || __builtin_mul_overflow(to, unit, &end) || end > extent->extent.bytes)
        return dray__fail(error, DRAY_EFORMAT,
                          "column %s: item %u at slices %llu to %llu is outside its %llu bytes",
                          column->name, item, (unsigned long long)from, (unsigned long long)to,
                          (unsigned long long)extent->extent.bytes);
    *cell = base + extent->extent.values + from * unit;
    *length = (to - from) * dray__spec_elements(spec);
    return DRAY_OK;
}

static int piece_cell(dray_batch *batch, const dray__batch_column *column, dray__batch_place at,
                      const void **cell, uint64_t *length, dray_error *error)
{
    struct dray__batch_extent *extent = NULL;
    int rc = find_extent(batch, column, &batch->puts[at.put], &extent, error);
    if (!rc && !column->spec.ragged)
        rc = dray__fail(error, DRAY_EFORMAT, "column %s: pieces of a fixed shape", column->name);
    return rc ? rc : ragged_cell(extent, column, at.item, cell, length, error);
}

/* Returns the pieces of one row as one value. Pieces that are adjacent are used in place, others
 * are copied. */
static int join(dray_batch *batch, const dray__batch_column *column,
                const dray__batch_pieces *pieces, const void **cell, uint64_t *length,
                dray_error *error)
{
    size_t unit = dray_dtype_size((dray_dtype)column->spec.dtype);
    const uint8_t *first = NULL, *end = NULL;
    uint64_t total = 0;
    bool together = true;
    for (uint32_t i = 0; i < pieces->count; i++) {
        const void *at;
        uint64_t count;
        int rc = piece_cell(batch, column, pieces->items[i].at, &at, &count, error);
        if (rc)
            return rc;
        if (!count)
            continue;
        together &= !first || end == at;
        first = first ? first : at;
        end = (const uint8_t *)at + count * unit; /* within its chunk: checked */
        total += count;
    }
    *cell = first;
    *length = total;
    if (together)
        return DRAY_OK;
    uint8_t *copy = dray__arena_get(&batch->arena, total * unit);
    if (!copy)
        return dray__nomem(error);
    *cell = copy;
    for (uint32_t i = 0; i < pieces->count; i++) {
        const void *at;
        uint64_t count, room = total - (uint64_t)(copy - (const uint8_t *)*cell) / unit;
        int rc = piece_cell(batch, column, pieces->items[i].at, &at, &count, error);
        if (!rc && count > room) /* the producer has changed it since the first read */
            rc = dray__fail(error, DRAY_EFORMAT, "column %s: its offsets change", column->name);
        if (rc)
            return rc;
        if (count)
            memcpy(copy, at, count * unit);
        copy += count * unit;
    }
    *length = (uint64_t)(copy - (const uint8_t *)*cell) / unit;
    return DRAY_OK;
}

/* Returns true when parts of the column must be fetched, or it is not known yet which keepers'
 * memory can be mapped here. */
static bool any_elsewhere(const dray_batch *batch, const dray__batch_column *column)
{
    for (uint32_t put = 0; put < batch->put_count; put++)
        if (dray__batch_elsewhere(batch->queue, dray__batch_extent_of(batch, column, put)))
            return true;
    return false;
}

static int read_column(dray_batch *batch, dray__batch_column *column, dray_error *error)
{
    const void **cells = dray__arena_get(&batch->arena, batch->row_count * sizeof *cells);
    uint64_t *lengths = dray__arena_get(&batch->arena, batch->row_count * sizeof *lengths);
    if (!cells || !lengths)
        return dray__nomem(error);
    int got = dray__queue_check_fork(batch->queue, error);
    if (!got && any_elsewhere(batch, column))
        got = dray__batch_get(batch, column, error);
    if (got)
        return got;
    struct dray__batch_extent *extent = NULL;
    const dray__column_spec *spec = &column->spec;
    uint64_t unit = dray__spec_bytes(spec), elements = dray__spec_elements(spec);
    uint32_t last = UINT32_MAX;
    for (uint32_t row = 0; row < batch->row_count; row++) {
        dray__batch_place place = dray__batch_place_of(batch, column, row);
        int rc = DRAY_OK;
        cells[row] = NULL;
        lengths[row] = 0;
        if (place.put == UINT32_MAX) /* this task has not begun the row */
            continue;
        if (!extent || place.put != last)
            rc = find_extent(batch, column, &batch->puts[place.put], &extent, error);
        if (rc)
            return rc;
        if (place.put != last && dray__batch_spec(column, extent) != spec) {
            spec = dray__batch_spec(column, extent);
            unit = dray__spec_bytes(spec);
            elements = dray__spec_elements(spec);
        }
        last = place.put;
        cells[row] = extent->mapping->base + extent->extent.values + place.item * unit;
        lengths[row] = elements;
        if (spec->ragged)
            rc = ragged_cell(extent, column, place.item, &cells[row], &lengths[row], error);
        if (rc)
            return rc;
    }
    for (uint32_t i = 0; i < batch->pieces_count; i++) {
        const dray__batch_pieces *pieces = &batch->pieces[i];
        int rc = DRAY_OK;
        if (pieces->place == column->place)
            rc = join(batch, column, pieces, &cells[pieces->row], &lengths[pieces->row], error);
        if (rc)
            return rc;
    }
    column->cells = cells;
    column->lengths = lengths;
    return DRAY_OK;
}

void dray__batch_leave_span(const dray_batch *batch)
{
    DRAY__TRACE(samples(batch->partition, batch->task->name, batch->row_count));
    DRAY__TRACE(leave());
}

static int read_traced(dray_batch *batch, dray__batch_column *column, dray_error *error)
{
    DRAY__TRACE(enter(DRAY_SPAN_TRANSFER, "queue read", -1));
    int rc = read_column(batch, column, error);
    dray__batch_leave_span(batch);
    return rc;
}

static int find_column(dray_batch *batch, const char *name, dray__batch_column **out,
                       dray_error *error)
{
    int rc = dray__name_check(name, "column", error);
    if (rc)
        return rc;
    for (uint32_t i = 0; i < batch->column_count; i++)
        if (strcmp(batch->columns[i].name, name) == 0) {
            *out = &batch->columns[i];
            return (*out)->cells ? DRAY_OK : read_traced(batch, *out, error);
        }
    char hint[300];
    if (batch->keys)
        return dray__fail(error, DRAY_ENOENT, "get of %s: column %s was not asked for",
                          batch->partition, name);
    return dray__fail(
        error, DRAY_ENOENT, "task %s does not need a column %s%s", batch->task->name, name,
        dray__word_hint(name, batch->task->needs, batch->task->needs_count, hint, sizeof hint));
}

int dray_batch_column(dray_batch *batch, const char *name, dray_column *out, dray_error *error)
{
    dray__batch_column *column = NULL;
    int rc = find_column(batch, name, &column, error);
    if (!rc && column->other)
        rc = dray__spec_same(&column->spec, column->other, name, error);
    if (rc)
        return rc;
    *out = (dray_column){.dtype = column->spec.dtype,
                         .content = column->spec.content,
                         .ndim = column->spec.ndim,
                         .cells = column->cells,
                         .lengths = column->lengths};
    memcpy(out->shape, column->spec.shape, sizeof out->shape);
    if (column->spec.ragged)
        out->shape[0] = -1;
    return DRAY_OK;
}

int dray_batch_cell(dray_batch *batch, const char *name, uint32_t index, dray_column_part *out,
                    dray_error *error)
{
    dray__batch_column *column = NULL;
    int rc = check_row(batch, index, error);
    if (!rc)
        rc = find_column(batch, name, &column, error);
    if (rc)
        return rc;
    uint32_t put = dray__batch_place_of(batch, column, index).put;
    if (put == UINT32_MAX)
        return dray__fail(error, DRAY_ENOENT, "row %u of partition %s has no column %s",
                          batch->rows[index].slot, batch->partition, name);
    const dray__column_spec *spec =
        dray__batch_spec(column, dray__batch_extent_of(batch, column, put));
    uint64_t slice = dray__spec_elements(spec), length = column->lengths[index];
    *out = (dray_column_part){.dtype = spec->dtype,
                              .content = spec->content,
                              .ndim = spec->ndim,
                              .bytes = length * dray_dtype_size((dray_dtype)spec->dtype),
                              .values = length ? column->cells[index] : NULL};
    memcpy(out->shape, spec->shape, sizeof out->shape);
    if (spec->ragged)
        out->shape[0] = (int64_t)(slice ? length / slice : 0);
    return DRAY_OK;
}

const char *dray_batch_column_name(const dray_batch *batch, uint32_t index)
{
    return index < batch->column_count ? batch->columns[index].name : NULL;
}

const char *dray_batch_key(const dray_batch *batch, uint32_t index)
{
    return batch->keys && index < batch->row_count ? batch->keys[index] : NULL;
}

dray_blob dray_batch_row_tag(const dray_batch *batch, uint32_t index)
{
    return batch->keys && index < batch->row_count ? batch->notes[index] : (dray_blob){NULL, 0};
}

int dray_batch_pieces(dray_batch *batch, const char *name, uint32_t index, dray_piece *out,
                      uint32_t capacity, uint32_t *count, dray_error *error)
{
    dray__batch_column *column = NULL;
    int rc = check_row(batch, index, error);
    if (!rc)
        rc = find_column(batch, name, &column, error);
    if (rc)
        return rc;
    const dray__batch_pieces *pieces = NULL;
    for (uint32_t i = 0; i < batch->pieces_count && !pieces; i++)
        if (batch->pieces[i].place == column->place && batch->pieces[i].row == index)
            pieces = &batch->pieces[i];
    if (!pieces) { /* one commit, or none */
        double version = -1;
        dray_batch_tag(batch, index, DRAY_TAG_VERSION, &version, NULL);
        *count = column->lengths[index] ? 1 : 0;
        if (*count && capacity)
            *out = (dray_piece){.elements = column->lengths[index], .version = version};
        return DRAY_OK;
    }
    for (uint32_t i = 0; i < pieces->count && i < capacity; i++) {
        const void *cell;
        rc = piece_cell(batch, column, pieces->items[i].at, &cell, &out[i].elements, error);
        if (rc)
            return rc;
        out[i].version = pieces->items[i].version;
    }
    *count = pieces->count;
    return DRAY_OK;
}

/* ---- writing --------------------------------------------------------------------------------- */

int dray__batch_check_open(const dray_batch *batch, const char *what, dray_error *error)
{
    if (!batch->ticket)
        return dray__fail(error, DRAY_EPERM, "%s: the batch was imported: it is read-only", what);
    if (batch->keys)
        return dray__fail(error, DRAY_EPERM, "%s: the batch was got, not claimed: it is read-only",
                          what);
    if (batch->committed)
        return dray__fail(error, DRAY_EINVALID, "%s: the batch is committed", what);
    return DRAY_OK;
}

static int find_output(dray_batch *batch, const char *name, dray__batch_output **out,
                       dray_error *error)
{
    const dray__task_names *task = batch->task;
    for (uint32_t i = 0; i < task->writes_count; i++)
        if (strcmp(task->writes[i], name) == 0) {
            *out = &batch->outputs[i];
            return DRAY_OK;
        }
    char hint[300];
    return dray__fail(error, DRAY_EINVALID, "task %s does not write a column %s%s",
                      batch->task->name, name,
                      dray__word_hint(name, task->writes, task->writes_count, hint, sizeof hint));
}

int dray_batch_set(dray_batch *batch, const dray_column_data *column, dray_error *error)
{
    dray__column_spec spec;
    dray__batch_output *output = NULL, fresh = {0};
    int rc = dray__batch_check_open(batch, "dray_batch_set", error);
    if (!rc)
        rc = dray__spec_of(column, &spec, error);
    if (!rc)
        rc = find_output(batch, column->name, &output, error);
    if (rc)
        return rc;
    DRAY__TRACE(enter(DRAY_SPAN_TRANSFER, "queue put", -1));
    do
        rc = dray__queue_write(batch->queue, column, &spec, batch->row_count, &fresh.extent,
                               &fresh.span, error);
    while (rc == DRAY_ECLOSED && dray__queue_come_back(batch->queue) == DRAY_OK);
    dray__batch_leave_span(batch);
    if (rc)
        return rc;
    if (output->name)
        batch->queue->holder.kind->done(&batch->queue->holder, &output->span, false, output->sent);
    fresh.spec = spec;
    fresh.name = batch->task->writes[output - batch->outputs];
    *output = fresh;
    return DRAY_OK;
}

int dray_batch_set_tag(dray_batch *batch, uint32_t index, const char *key, double value,
                       dray_error *error)
{
    return dray_batch_set_tags(batch, key, index, 1, &value, error);
}

static int set_key(dray_batch *batch, const char *key, uint32_t *out, dray_error *error)
{
    for (*out = 0; *out < batch->set_key_count; ++*out)
        if (strcmp(batch->set_keys[*out], key) == 0)
            return DRAY_OK;
    const char **at = dray__append(&batch->set_keys, sizeof *at, *out, &batch->set_key_capacity);
    if (!at || !(*at = dray__arena_text(&batch->arena, key)))
        return dray__nomem(error);
    batch->set_key_count++;
    return DRAY_OK;
}

int dray_batch_set_tags(dray_batch *batch, const char *key, uint32_t first, uint32_t rows,
                        const double *values, dray_error *error)
{
    uint32_t number = 0, count = batch->set_tag_count;
    int rc = dray__batch_check_open(batch, "dray_batch_set_tag", error);
    if (!rc)
        rc = dray__batch_check_rows(batch, first, rows, error);
    if (!rc)
        rc = dray__name_check(key, "tag", error);
    if (!rc)
        rc = set_key(batch, key, &number, error);
    if (!rc && rows > UINT32_MAX - count)
        rc = dray__nomem(error);
    for (uint32_t i = 0; i < rows && !rc; i++) {
        dray__new_tag *tag = dray__append(&batch->set_tags, sizeof *tag, count + (uint64_t)i,
                                          &batch->set_tag_capacity);
        if (!tag)
            return dray__nomem(error);
        *tag = (dray__new_tag){first + i, number, values[i]};
    }
    batch->set_tag_count = rc ? count : count + rows;
    return rc;
}

int dray_batch_leave_open(dray_batch *batch, const uint32_t *rows, uint32_t row_count,
                          dray_error *error)
{
    int rc = check_open_rows(batch, "dray_batch_leave_open", rows, row_count, error);
    if (rc)
        return rc;
    uint32_t count = row_count ? row_count : batch->row_count;
    uint32_t *open = dray__arena_get(&batch->arena, count * sizeof *open);
    if (!open)
        return dray__nomem(error);
    for (uint32_t i = 0; i < count; i++)
        open[i] = row_count ? rows[i] : i;
    batch->open = open;
    batch->open_count = count;
    return DRAY_OK;
}

static void outputs_done(dray_batch *batch, bool given_up)
{
    for (uint32_t i = 0; batch->task && batch->outputs && i < batch->task->writes_count; i++) {
        dray__batch_output *output = &batch->outputs[i];
        if (output->name)
            batch->queue->holder.kind->done(&batch->queue->holder, &output->span, !given_up,
                                            output->sent);
        output->name = NULL;
    }
}

int dray__batch_put_commit(dray_batch *batch, dray__writer *w, dray_error *error)
{
    int rc = dray__batch_check_open(batch, "dray_batch_commit", error);
    if (rc)
        return rc;
    for (uint32_t i = 0; i < batch->task->writes_count; i++)
        if (!batch->outputs[i].name)
            return dray__fail(error, DRAY_EINVALID, "commit of task %s: column %s was not set",
                              batch->task->name, batch->task->writes[i]);
    uint32_t count = batch->task->writes_count;
    dray__new_column *columns = dray__arena_get(&batch->arena, (count + 1u) * sizeof *columns);
    if (!columns)
        return dray__nomem(error);
    for (uint32_t i = 0; i < count; i++) {
        const dray__batch_output *output = &batch->outputs[i];
        columns[i] = (dray__new_column){output->name, output->spec, output->extent};
    }
    const dray__committing message = {.ticket = batch->ticket,
                                      .generation = batch->generation,
                                      .outputs = {.content = {.columns = columns,
                                                              .column_count = count,
                                                              .keys = batch->set_keys,
                                                              .key_count = batch->set_key_count,
                                                              .tags = batch->set_tags,
                                                              .tag_count = batch->set_tag_count},
                                                  .open = batch->open,
                                                  .open_count = batch->open_count}};
    dray__put_fields(w, &dray__committing_fields, &message);
    return DRAY_OK;
}

void dray__batch_commit_done(dray_batch *batch, int rc, dray__reader *reply)
{
    /* Without an answer the commit may have happened, so the outputs' bytes must stay as they
     * are. */
    for (uint32_t i = 0; i < batch->task->writes_count; i++)
        batch->outputs[i].sent |= dray__may_count(rc);
    /* The commit was superseded, so nothing refers to the outputs. Other errors leave the batch as
     * it was. */
    if (rc == DRAY_ESTALE || rc == DRAY_EGONE)
        outputs_done(batch, true);
    dray__values_holder *holder = &batch->queue->holder;
    if (rc == DRAY_EGONE && holder->kind->move) /* the outputs are set again, with another keeper */
        holder->kind->move(holder, NULL);
    if (rc)
        return;
    dray__queue_read_dropped(batch->queue, reply);
    batch->committed = true;
    outputs_done(batch, false);
}

int dray_batch_commit(dray_batch *batch, dray_error *error)
{
    if (batch->committed)
        return DRAY_OK;
    int rc = dray__batch_put_commit(batch, dray__queue_begin(batch->queue), error);
    if (rc) {
        dray__storage_untell(&batch->queue->holder.storage, false);
        return rc;
    }
    dray__reply reply;
    int64_t deadline = dray__context_deadline(batch->queue->context, batch->queue->timeout_ns);
    DRAY__TRACE(wait(DRAY_CAUSE_CONTROLLER, "queue commit", -1));
    rc = dray__queue_call(batch->queue, DRAY__MSG_QUEUE_COMMIT, deadline, &reply, error);
    dray__batch_leave_span(batch);
    dray__batch_commit_done(batch, rc, &reply.payload);
    return rc ? rc : dray__reader_finish(&reply.payload, "QUEUE_COMMIT", error);
}

static int give_back(dray_batch *batch, const uint32_t *rows, uint32_t row_count,
                     const char *reason, dray_error *error)
{
    const dray__failing message = {
        .ticket = batch->ticket, .items = rows, .count = row_count, .reason = reason};
    return dray__queue_command(batch->queue, DRAY__MSG_QUEUE_FAIL, &dray__failing_fields, &message,
                               NULL, error);
}

int dray_batch_fail(dray_batch *batch, const uint32_t *rows, uint32_t row_count, const char *reason,
                    dray_error *error)
{
    int rc = check_open_rows(batch, "dray_batch_fail", rows, row_count, error);
    if (rc)
        return rc;
    size_t length = reason ? strlen(reason) : 0;
    if (!length || !dray__utf8_valid(reason, length))
        return dray__fail(error, DRAY_EINVALID, "dray_batch_fail: a reason in UTF-8 expected");
    while (length > DRAY__REASON_MAX || !dray__utf8_valid(reason, length))
        length--; /* cut between characters */
    char cut[DRAY__REASON_MAX + 1];
    snprintf(cut, sizeof cut, "%.*s", (int)length, reason);
    return give_back(batch, rows, row_count, cut, error);
}

int dray_batch_give_back(dray_batch *batch, dray_error *error)
{
    int rc = dray__batch_check_open(batch, "dray_batch_give_back", error);
    return rc ? rc : give_back(batch, NULL, 0, "", error);
}

int dray_batch_hold(dray_batch *batch, int64_t max_hold_ns, dray_error *error)
{
    int rc = dray__batch_check_open(batch, "dray_batch_hold", error);
    if (!rc && max_hold_ns < 0)
        rc = dray__fail(error, DRAY_EINVALID, "dray_batch_hold: %lld ns", (long long)max_hold_ns);
    if (rc)
        return rc;
    const dray__holding message = {batch->ticket, max_hold_ns};
    return dray__queue_command(batch->queue, DRAY__MSG_QUEUE_HOLD, &dray__holding_fields, &message,
                               NULL, error);
}

void dray_batch_free(dray_batch *batch)
{
    if (!batch)
        return;
    outputs_done(batch, true);
    if (batch->owns)
        dray__owned_leave(batch);
    if (batch->queue->holder.storage.pid ==
        dray__channel_pid()) /* a forked child does not count in the mappings' users */
        for (uint32_t i = 0; i < batch->mapping_count; i++)
            dray__mapping_put(batch->mappings[i]);
    if (batch->buffers)
        dray__buffers_free(batch->buffers);
    if (batch->ticket)
        dray__queue_let_go(batch->queue, batch->ticket, batch->committed || batch->keys);
    dray__arena_free(&batch->queue->spare);
    dray__arena_reset(&batch->arena);
    batch->queue->spare = batch->arena;
    free(batch->set_keys);
    free(batch->set_tags);
    free(batch->mappings);
    free(batch->body);
    free(batch);
}
