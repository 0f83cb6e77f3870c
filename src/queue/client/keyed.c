/* Rows with keys: put, got, cleared. Their columns are written as an insert's are (insert.c), and
 * read as a claim's (batch.c). */
#include "base/clock.h"
#include "base/error.h"
#include "base/options.h"
#include "queue/client/client.h"

#include <stdlib.h>
#include <string.h>

/* ---- which rows ------------------------------------------------------------------------------ */

/* Describes rows by their keys or addresses. The caller frees the addresses. */
static int name_rows(const char *what, const char *const *keys, const dray_row *rows,
                     uint32_t count, dray__named *out, dray_error *error)
{
    int rc = DRAY_OK;
    *out = (dray__named){0};
    if (keys && rows)
        return dray__fail(error, DRAY_EINVALID, "%s: keys or addresses expected, found both", what);
    if (keys) {
        *out = (dray__named){.keys = keys, .key_count = count};
        for (uint32_t i = 0; !rc && i < count; i++)
            rc = dray__name_check(keys[i], "key", error);
        return rc;
    }
    dray__row_at *at = rows ? calloc(count + 1u, sizeof *at) : NULL;
    if (rows && !at)
        return dray__nomem(error);
    for (uint32_t i = 0; rows && i < count; i++)
        at[i] = (dray__row_at){.slot = rows[i].slot, .generation = rows[i].generation};
    *out = (dray__named){.at = at, .at_count = rows ? count : 0};
    return rc;
}

static void unname(const dray__named *named)
{
    free((void *)(uintptr_t)named->at);
}

static dray_row row_of(const dray__row_at *at)
{
    return (dray_row){.slot = at->slot,
                      .generation = at->generation,
                      .attempt = at->version,
                      .id = (uint64_t)at->generation << 32 | at->slot};
}

/* ---- put ------------------------------------------------------------------------------------- */

typedef struct put_call {
    dray__putting message;
    dray_row *rows; /* the caller's array for addresses, or NULL */
} put_call;

static int read_rows(const put_call *p, dray__reply *reply, dray_error *error)
{
    dray__arena arena = {0};
    dray__named told = {0};
    dray__get_fields(&reply->payload, &arena, &dray__named_fields, &told);
    reply->payload.failed |= told.at_count != p->message.rows || told.key_count;
    int rc = dray__reader_finish(&reply->payload, "QUEUE_PUT", error);
    for (uint32_t i = 0; !rc && p->rows && i < told.at_count; i++)
        p->rows[i] = row_of(&told.at[i]);
    dray__arena_free(&arena);
    return rc;
}

static int send_put(dray_queue *queue, const dray__new_rows *rows, int64_t deadline, void *user,
                    dray_error *error)
{
    put_call *p = user;
    dray__reply reply;
    p->message.ticket = rows->ticket;
    p->message.columns = rows->content.columns;
    p->message.column_count = rows->content.column_count;
    dray__put_fields(dray__queue_begin(queue), &dray__putting_fields, &p->message);
    int rc = dray__queue_call(queue, DRAY__MSG_QUEUE_PUT, deadline, &reply, error);
    if (rc)
        return rc;
    dray__queue_read_dropped(queue, &reply.payload);
    return read_rows(p, &reply, error);
}

static int note_rows(const dray_put_options *o, dray__putting *m, dray_error *error)
{
    dray__note *notes = o->tags ? calloc(o->rows, sizeof *notes) : NULL;
    if (o->tags && !notes)
        return dray__nomem(error);
    m->notes = notes;
    m->note_count = o->tags ? o->rows : 0;
    for (uint32_t i = 0; o->tags && i < o->rows; i++) {
        const dray_blob *tag = &o->tags[i];
        if (tag->size > DRAY_ROW_TAG_MAX || (tag->size && !tag->data))
            return dray__fail(error, DRAY_EINVALID,
                              "put into %s: tag %u of at most %u bytes expected, found %llu%s",
                              o->partition, i, DRAY_ROW_TAG_MAX, (unsigned long long)tag->size,
                              tag->data ? "" : " at NULL");
        notes[i] = (dray__note){tag->data != NULL, tag->data, tag->size};
    }
    return DRAY_OK;
}

static int check_put(const dray_put_options *o, dray_error *error)
{
    int rc = dray__name_check(o->partition, "partition", error);
    if (!rc && (!o->rows || o->rows > DRAY_PUT_ROWS_MAX))
        rc = dray__fail(error, DRAY_EINVALID, "put into %s: 1 to %u rows expected, found %u",
                        o->partition, DRAY_PUT_ROWS_MAX, o->rows);
    if (!rc && o->column_count && !o->columns)
        rc = dray__fail(error, DRAY_EINVALID, "put into %s: %u columns, none given", o->partition,
                        o->column_count);
    return rc;
}

int dray_queue_put(dray_queue *queue, const dray_put_options *options, dray_row *rows,
                   dray_error *error)
{
    dray_put_options o = DRAY_PUT_OPTIONS_INIT;
    put_call p = {.rows = rows};
    int rc = DRAY__OPTIONS_READ(dray_put_options, timeout_ns, &o, options, error);
    if (!rc)
        rc = check_put(&o, error);
    if (rc)
        return rc;
    p.message.partition = o.partition;
    p.message.rows = o.rows;
    rc = name_rows("put", o.keys, o.at, o.rows, &p.message.named, error);
    if (!rc)
        rc = note_rows(&o, &p.message, error);
    dray_insert_options in = DRAY_INSERT_OPTIONS_INIT;
    in.partition = o.partition;
    in.rows = o.rows;
    in.columns = o.columns;
    in.column_count = o.column_count;
    in.timeout_ns = o.timeout_ns;
    const dray__sending how = {
        .send = send_put, .user = &p, .memory = true, .once = !o.keys && !o.at};
    if (!rc)
        rc = dray__queue_produce(queue, &in, &how, error);
    unname(&p.message.named);
    free((void *)(uintptr_t)p.message.notes);
    return rc;
}

/* ---- get ------------------------------------------------------------------------------------- */

static bool take_names(dray_batch *batch, const dray__got *got)
{
    batch->rows = dray__arena_get(&batch->arena, got->row_count * sizeof *batch->rows);
    batch->keys = dray__arena_get(&batch->arena, got->row_count * sizeof *batch->keys);
    batch->notes = dray__arena_get(&batch->arena, got->row_count * sizeof *batch->notes);
    size_t starts = (got->row_count + 1u) * sizeof *batch->tag_start;
    batch->tag_start = dray__arena_get(&batch->arena, starts);
    if (!batch->rows || !batch->keys || !batch->notes || !batch->tag_start)
        return false;
    memset(batch->tag_start, 0, starts);
    for (uint32_t i = 0; i < got->row_count; i++) {
        const dray__note *note = &got->rows[i].note;
        uint8_t *copy = note->given ? dray__arena_get(&batch->arena, note->size + 1) : NULL;
        if (note->given && !copy)
            return false;
        if (note->given && note->size)
            memcpy(copy, note->data, note->size);
        batch->rows[i] = row_of(&got->rows[i].at);
        batch->keys[i] = got->rows[i].key;
        batch->notes[i] = (dray_blob){copy, note->given ? note->size : 0};
    }
    batch->row_count = got->row_count;
    return true;
}

static bool take_puts(dray_batch *batch, const dray__got *got)
{
    batch->puts = dray__arena_get(&batch->arena, (got->put_count + 1u) * sizeof *batch->puts);
    for (uint32_t i = 0; batch->puts && i < got->put_count; i++) {
        const dray__got_put *put = &got->puts[i];
        struct dray__batch_extent *extents =
            dray__arena_get(&batch->arena, (put->column_count + 1u) * sizeof *extents);
        if (!extents)
            return false;
        for (uint32_t c = 0; c < put->column_count; c++)
            extents[c] = (struct dray__batch_extent){.column = put->columns[c].column,
                                                     .keeper = put->columns[c].keeper,
                                                     .extent = put->columns[c].extent,
                                                     .own = &put->columns[c].spec};
        batch->puts[i] = (dray__batch_put){put->items, put->column_count, extents};
    }
    batch->put_count = got->put_count;
    return batch->puts != NULL;
}

/* The specs that a GET answers are checked in the same way as those that a producer writes. */
static int check_specs(const dray__got *got, dray_error *error)
{
    int rc = DRAY_OK;
    for (uint32_t i = 0; i < got->put_count; i++)
        for (uint32_t c = 0; !rc && c < got->puts[i].column_count; c++) {
            const dray__got_column *column = &got->puts[i].columns[c];
            if (column->column >= got->column_count)
                return dray__fail(error, DRAY_EFORMAT, "get: column %u of %u", column->column,
                                  got->column_count);
            rc = dray__spec_check(&column->spec, got->columns[column->column], error);
        }
    return rc;
}

/* The column's spec is that of its first row, also when other rows have others. */
static void take_column(dray_batch *batch, const dray__got *got, uint32_t c)
{
    dray__batch_column *column = &batch->columns[c];
    const dray__column_spec *first = NULL;
    uint32_t last = UINT32_MAX;
    *column = (dray__batch_column){.column = c, .place = c, .name = got->columns[c]};
    for (uint32_t row = 0; row < batch->row_count && !column->other; row++) {
        uint32_t put = batch->places[(size_t)c * batch->row_count + row].put;
        if (put == UINT32_MAX || put == last)
            continue;
        const struct dray__batch_extent *extent = dray__batch_extent_of(batch, column, put);
        last = put;
        if (!first && extent)
            first = extent->own;
        else if (extent && dray__spec_same(first, extent->own, column->name, NULL))
            column->other = extent->own;
    }
    if (first)
        column->spec = *first;
    else
        column->spec.dtype = DRAY_U8; /* no row has a value, so any dtype will do */
}

static bool take_cells(dray_batch *batch, const dray__got *got)
{
    uint64_t cells = (uint64_t)got->row_count * got->column_count;
    if (!got->row_count || got->cell_count != cells) /* a batch is never empty */
        return false;
    batch->places = dray__arena_get(&batch->arena, (cells + 1) * sizeof *batch->places);
    batch->columns =
        dray__arena_get(&batch->arena, (got->column_count + 1u) * sizeof *batch->columns);
    if (!batch->places || !batch->columns)
        return false;
    for (uint32_t i = 0; i < cells; i++) {
        const dray__got_cell *cell = &got->cells[i];
        if (cell->put != UINT32_MAX &&
            (cell->put >= got->put_count || cell->item >= got->puts[cell->put].items))
            return false;
        batch->places[i] = (dray__batch_place){cell->put, cell->item};
    }
    batch->cell_count = got->cell_count;
    batch->place_count = batch->column_count = got->column_count;
    for (uint32_t c = 0; c < got->column_count; c++)
        take_column(batch, got, c);
    return true;
}

static int read_batch(dray_queue *queue, const char *partition, uint32_t ticket, dray__reader *r,
                      dray_batch **out, dray_error *error)
{
    static const dray__task_names nobody = {.name = "get"};
    dray_batch *batch = calloc(1, sizeof *batch);
    dray__got got;
    if (!batch)
        return dray__nomem(error);
    *batch = (dray_batch){.queue = queue, .ticket = ticket, .arena = queue->spare, .task = &nobody};
    queue->spare = (dray__arena){0};
    dray__get_fields(r, &batch->arena, &dray__got_fields, &got);
    batch->partition = dray__arena_text(&batch->arena, partition);
    batch->roomy = got.roomy;
    int rc = r->failed ? DRAY_OK : check_specs(&got, error);
    if (!rc && !r->failed)
        r->failed = !batch->partition || !take_names(batch, &got) || !take_puts(batch, &got) ||
                    !take_cells(batch, &got);
    if (!rc)
        rc = dray__reader_finish(r, "batch", error);
    if (!rc) {
        *out = batch;
        return rc;
    }
    batch->ticket = 0;
    dray_batch_free(batch);
    return rc;
}

static int make_get(const dray_get_options *o, dray__getting *out, dray_error *error)
{
    int rc = dray__name_check(o->partition, "partition", error);
    if (!rc && o->task)
        rc = dray__name_check(o->task, "task", error);
    if (!rc && (o->column_count || o->all_columns) && (!o->columns == !o->all_columns))
        rc = dray__fail(error, DRAY_EINVALID,
                        "get of %s: a list of columns, or all_columns, expected, found %s",
                        o->partition, o->columns ? "both" : "neither");
    for (uint32_t i = 0; !rc && o->columns && i < o->column_count; i++)
        rc = dray__name_check(o->columns[i], "column", error);
    if (!rc && (o->keys || o->at ? !o->rows || o->count : o->rows))
        rc = dray__fail(error, DRAY_EINVALID,
                        "get of %s: rows that are named, or a count, expected, found %u rows by "
                        "%s, count %u",
                        o->partition, o->rows,
                        o->keys ? "keys"
                        : o->at ? "addresses"
                                : "nothing",
                        o->count);
    if (!rc && !o->task && (o->count || o->up_to || o->peek))
        rc = dray__fail(error, DRAY_EINVALID,
                        "get of %s: count, up_to and peek with a task expected, found none",
                        o->partition);
    *out = (dray__getting){.partition = o->partition,
                           .columns = o->columns,
                           .column_count = o->columns ? o->column_count : 0,
                           .all_columns = o->all_columns != 0,
                           .partial = o->partial != 0,
                           .up_to = o->up_to != 0,
                           .task = o->task ? o->task : "",
                           .count = o->count};
    return rc ? rc : name_rows("get", o->keys, o->at, o->rows, &out->named, error);
}

static int ask(dray_queue *queue, const dray__getting *message, bool take, int64_t deadline,
               dray_batch **out, dray_error *error)
{
    dray__reply reply;
    dray__put_fields(dray__queue_begin(queue), &dray__getting_fields, message);
    DRAY__TRACE(wait(DRAY_CAUSE_SAMPLES, "queue get", -1));
    int rc = dray__queue_call(queue, take ? DRAY__MSG_QUEUE_TAKE : DRAY__MSG_QUEUE_GET, deadline,
                              &reply, error);
    DRAY__TRACE(samples(message->partition, *message->task ? message->task : NULL, -1));
    DRAY__TRACE(leave());
    /* Rows that TAKE found, but could not record as consumed, are still pinned. */
    if (rc == DRAY_ETIMEDOUT || (take && dray__may_hold(rc)))
        dray__queue_release(queue, message->ticket);
    if (rc == DRAY_ECLOSED && take) /* rows may be consumed, so it is not repeated; the next
                                     * call attaches again */
        dray__queue_come_back(queue);
    if (rc)
        return rc;
    dray__queue_read_dropped(queue, &reply.payload);
    rc = read_batch(queue, message->partition, message->ticket, &reply.payload, out, error);
    if (rc)
        dray__queue_release(queue, message->ticket);
    return rc;
}

int dray_queue_get(dray_queue *queue, const dray_get_options *options, dray_batch **out,
                   dray_error *error)
{
    dray_get_options o = DRAY_GET_OPTIONS_INIT;
    dray__getting message = {0};
    int rc = DRAY__OPTIONS_READ(dray_get_options, timeout_ns, &o, options, error);
    if (!rc)
        rc = dray__queue_check_fork(queue, error);
    if (!rc)
        rc = make_get(&o, &message, error);
    int64_t deadline =
        dray__context_deadline(queue->context, o.timeout_ns ? o.timeout_ns : queue->timeout_ns);
    int64_t left = deadline - dray__now();
    message.timeout_ns = !o.timeout_ns ? 0 : left > 0 ? left : 1; /* 0 would mean none was given */
    message.ticket = rc ? 0 : dray__queue_ticket(queue);
    if (!rc)
        rc = ask(queue, &message, o.task && !o.peek, deadline, out, error);
    unname(&message.named);
    return rc;
}

/* ---- clear, reset ---------------------------------------------------------------------------- */

int dray_queue_clear_rows(dray_queue *queue, const char *partition, const char *const *keys,
                          const dray_row *at, uint32_t rows, dray_error *error)
{
    dray__dropping message = {.partition = partition};
    int rc = dray__name_check(partition, "partition", error);
    if (!rc && !keys && !at)
        rc = dray__fail(error, DRAY_EINVALID,
                        "clear rows of %s: keys or addresses expected, found neither", partition);
    if (rc || !rows)
        return rc;
    rc = name_rows("clear rows", keys, at, rows, &message.named, error);
    if (!rc)
        rc = dray__queue_command(queue, DRAY__MSG_QUEUE_DROP, &dray__dropping_fields, &message,
                                 NULL, error);
    unname(&message.named);
    return rc;
}

int dray_queue_reset(dray_queue *queue, const char *partition, const char *task, dray_error *error)
{
    const dray__resetting message = {partition, task ? task : ""};
    int rc = dray__name_check(partition, "partition", error);
    if (!rc && task)
        rc = dray__name_check(task, "task", error);
    return rc ? rc
              : dray__queue_command(queue, DRAY__MSG_QUEUE_RESET, &dray__resetting_fields, &message,
                                    NULL, error);
}
