/* Inserting rows: the holder of bytes gets the columns' values, and the controller gets the
 * request. */
#include "base/clock.h"
#include "base/error.h"
#include "base/options.h"
#include "base/words.h"
#include "queue/client/client.h"

#include <stdlib.h>
#include <string.h>

/* ---- values ---------------------------------------------------------------------------------- */

static int check_offsets(const dray_column_data *column, uint64_t items, uint64_t slice,
                         uint64_t *bytes, uint64_t *end, dray_error *error)
{
    for (uint64_t i = 0; i < items; i++)
        if (column->offsets[i] > column->offsets[i + 1])
            return dray__fail(error, DRAY_EINVALID,
                              "column %s: offset %llu of row %llu is behind the next, %llu",
                              column->name, (unsigned long long)column->offsets[i],
                              (unsigned long long)i, (unsigned long long)column->offsets[i + 1]);
    uint64_t slices = column->offsets[items] - column->offsets[0];
    if (__builtin_mul_overflow(slices, slice, bytes) || *bytes > INT64_MAX ||
        __builtin_mul_overflow(column->offsets[items], slice, end))
        return dray__fail(error, DRAY_EINVALID, "column %s: %llu slices of %llu bytes overflow",
                          column->name, (unsigned long long)slices, (unsigned long long)slice);
    return DRAY_OK;
}

static int measure_column(const dray_column_data *column, const dray__column_spec *spec,
                          uint64_t items, dray__values *out, dray_error *error)
{
    uint64_t unit = dray__spec_bytes(spec), bytes = 0, end = 0, room = 0, head = 0;
    int rc = DRAY_OK;
    if (spec->ragged) {
        rc = check_offsets(column, items, unit, &bytes, &end, error);
        head = dray__round_up((items + 1) * 8, DRAY__ALIGN);
    } else if (__builtin_mul_overflow(items, unit, &bytes) || bytes > INT64_MAX) {
        rc = dray__fail(error, DRAY_EINVALID, "column %s: %llu rows of %llu bytes overflow",
                        column->name, (unsigned long long)items, (unsigned long long)unit);
    }
    end = spec->ragged ? end : bytes;
    uint64_t given = !column->values ? 0 : column->bytes ? column->bytes : UINT64_MAX;
    if (!rc && bytes && end > given)
        rc = dray__fail(error, DRAY_EINVALID,
                        "column %s: %llu bytes of values expected for %llu rows, found %llu",
                        column->name, (unsigned long long)end, (unsigned long long)items,
                        (unsigned long long)given);
    if (!rc && (__builtin_add_overflow(head, bytes, &room) || room > INT64_MAX))
        rc = dray__fail(error, DRAY_EINVALID, "column %s: sizes overflow", column->name);
    uint64_t first = spec->ragged ? column->offsets[0] : 0;
    *out = (dray__values){.column = column->name,
                          .offsets = spec->ragged ? column->offsets : NULL,
                          .first = first,
                          .items = items,
                          .values = bytes ? (const uint8_t *)column->values + first * unit : NULL,
                          .head = head,
                          .bytes = bytes,
                          .room = room};
    return rc;
}

int dray__queue_write(dray_queue *queue, const dray_column_data *column,
                      const dray__column_spec *spec, uint64_t items, dray__extent *extent,
                      dray__storage_room *room, dray_error *error)
{
    dray__values values;
    int rc = dray__queue_check_fork(queue, error);
    if (!rc)
        rc = measure_column(column, spec, items, &values, error);
    return rc ? rc : queue->holder.kind->put(&queue->holder, &values, extent, room, error);
}

/* ---- insert ---------------------------------------------------------------------------------- */

typedef struct inserted {
    const dray__sending *how;
    dray__new_rows rows;
    dray__new_column *columns;
    dray__storage_room *spans;
    uint64_t *rooms;
    const char **keys;
    dray__new_tag *tags;
} inserted;

static void inserted_free(inserted *in)
{
    free(in->columns);
    free(in->spans);
    free(in->rooms);
    free(in->keys);
    free(in->tags);
}

/* Makes the message, without the places of the values, which are known once the values are
 * written. */
static int make_insert(const dray_insert_options *o, inserted *out, dray_error *error)
{
    uint32_t tags = o->tag_count + o->row_tag_count, keys = o->tag_count;
    *out = (inserted){.columns = calloc(o->column_count + 1u, sizeof *out->columns),
                      .spans = calloc(o->column_count + 1u, sizeof *out->spans),
                      .rooms = calloc(o->column_count + 1u, sizeof *out->rooms),
                      .keys = calloc(tags + 1u, sizeof *out->keys),
                      .tags = calloc(tags + 1u, sizeof *out->tags)};
    if (!out->columns || !out->spans || !out->rooms || !out->keys || !out->tags)
        return dray__nomem(error);
    int rc = DRAY_OK;
    for (uint32_t i = 0; !rc && i < o->column_count; i++) {
        out->columns[i].name = o->columns[i].name;
        rc = dray__spec_of(&o->columns[i], &out->columns[i].spec, error);
    }
    for (uint32_t i = 0; i < o->tag_count; i++) {
        out->keys[i] = o->tags[i].key;
        out->tags[i] = (dray__new_tag){DRAY__NONE, i, o->tags[i].number};
    }
    for (uint32_t i = 0; i < o->row_tag_count; i++) { /* often one key for all rows */
        const dray_row_tag *tag = &o->row_tags[i];
        if (!i || strcmp(tag->key, tag[-1].key) != 0)
            out->keys[keys++] = tag->key;
        out->tags[o->tag_count + i] = (dray__new_tag){tag->row, keys - 1, tag->number};
    }
    out->rows = (dray__new_rows){.partition = o->partition,
                                 .rows = o->rows,
                                 .group_size = o->group_size,
                                 .per_group = o->once_per_group != 0,
                                 .at_slot = o->at_slot,
                                 .row_bytes = o->row_bytes,
                                 .refill = o->refill,
                                 .timeout_ns = o->timeout_ns,
                                 .content = {.columns = out->columns,
                                             .column_count = o->column_count,
                                             .keys = out->keys,
                                             .key_count = keys,
                                             .tags = out->tags,
                                             .tag_count = tags}};
    return rc;
}

static int check_insert(const dray_insert_options *o, dray_error *error)
{
    int rc = dray__name_check(o->partition, "partition", error);
    for (uint32_t i = 0; !rc && i < o->tag_count; i++)
        rc = o->tags
                 ? dray__name_check(o->tags[i].key, "tag", error)
                 : dray__fail(error, DRAY_EINVALID, "insert: %u tags, none given", o->tag_count);
    for (uint32_t i = 0; !rc && i < o->row_tag_count; i++)
        rc = o->row_tags ? dray__name_check(o->row_tags[i].key, "tag", error)
                         : dray__fail(error, DRAY_EINVALID, "insert: %u tags of rows, none given",
                                      o->row_tag_count);
    for (uint32_t i = 0; !rc && i < o->row_tag_count; i++)
        if (o->row_tags[i].row >= o->rows)
            rc = dray__fail(error, DRAY_EINVALID, "insert into %s: tag %s of row %u of %u",
                            o->partition, o->row_tags[i].key, o->row_tags[i].row, o->rows);
    if (!rc && o->column_count && !o->columns)
        rc = dray__fail(error, DRAY_EINVALID, "insert: %u columns, none given", o->column_count);
    if (!rc && (!o->rows || (o->group_size && o->rows % o->group_size)))
        rc = dray__fail(error, DRAY_EINVALID,
                        "insert into %s: %u rows are no whole number of groups of %u", o->partition,
                        o->rows, o->group_size);
    return rc;
}

/* A column that no task has would never be read. Where the caller asks for this check, such a
 * column is a mistake. */
static int check_column(const dray_queue *queue, const char *name, dray_error *error)
{
    int rc = dray__name_check(name, "column", error);
    const char *known[256];
    uint32_t count = 0;
    for (uint32_t t = 0; !rc && t < queue->task_count; t++)
        for (int writes = 0; writes < 2; writes++) {
            const dray__task_names *task = &queue->tasks[t];
            const char *const *words = writes ? task->writes : task->needs;
            for (uint32_t i = 0; i < (writes ? task->writes_count : task->needs_count); i++) {
                if (strcmp(words[i], name) == 0)
                    return DRAY_OK;
                uint32_t k = 0;
                while (k < count && strcmp(known[k], words[i]) != 0)
                    k++;
                if (k == count && count < sizeof known / sizeof *known)
                    known[count++] = words[i];
            }
        }
    char hint[300];
    return rc ? rc
              : dray__fail(error, DRAY_EINVALID, "queue %s: no task has a column %s%s", queue->name,
                           name, dray__word_hint_or_all(name, known, count, hint, sizeof hint));
}

/* Sends INSERT or ROOM. The answer begins with the list of dropped chunks. */
static int send_rows(dray_queue *queue, uint16_t type, const dray__fields *of,
                     const dray__new_rows *rows, int64_t deadline, dray__reply *reply,
                     dray_error *error)
{
    dray__new_rows message = *rows;
    message.timeout_ns = rows->timeout_ns ? deadline - dray__now() : 0;
    dray__put_fields(dray__queue_begin(queue), of, &message);
    int rc = dray__queue_call(queue, type, deadline, reply, error);
    if (rc == DRAY_ETIMEDOUT)
        dray__queue_release(queue, rows->ticket); /* ends an interrupted request's wait */
    if (!rc)
        dray__queue_read_dropped(queue, &reply->payload);
    return rc;
}

static int send_insert(dray_queue *queue, const dray__new_rows *rows, int64_t deadline,
                       void *first_slot, dray_error *error)
{
    dray__reply reply;
    int rc = send_rows(queue, DRAY__MSG_QUEUE_INSERT, &dray__insert_fields, rows, deadline, &reply,
                       error);
    if (rc)
        return rc;
    uint32_t first = dray__get_u32(&reply.payload);
    dray__get_u32(&reply.payload); /* generation: not needed, because claims have it */
    rc = dray__reader_finish(&reply.payload, "QUEUE_INSERT", error);
    if (!rc && first_slot)
        *(uint32_t *)first_slot = first;
    return rc;
}

/* Asks for the memory of all values at once, before they are written. Values that fit into the
 * current chunk need none. */
static int ask_room(dray_queue *queue, inserted *in, int64_t deadline, dray_error *error)
{
    dray__values_holder *holder = &queue->holder;
    int rc = holder->kind->ahead
                 ? holder->kind->ahead(holder, in->rooms, in->rows.content.column_count,
                                       &in->rows.bytes, error)
                 : DRAY_OK;
    if (rc || !in->rows.bytes || in->rows.refill)
        return rc;
    dray__reply reply;
    dray__new_rows rows = in->rows;
    rows.rows = in->how->memory ? 0 : rows.rows;
    rc = send_rows(queue, DRAY__MSG_QUEUE_ROOM, &dray__room_fields, &rows, deadline, &reply, error);
    return rc ? rc : dray__reader_finish(&reply.payload, "QUEUE_ROOM", error);
}

/* Measures all columns first: the sizes of their values without alignment. */
static int measure_columns(const dray_insert_options *o, uint32_t items, inserted *in,
                           dray_error *error)
{
    int rc = DRAY_OK;
    in->rows.values = 0;
    for (uint32_t i = 0; !rc && i < o->column_count; i++) {
        dray__values m = {0};
        rc = measure_column(&o->columns[i], &in->columns[i].spec, items, &m, error);
        uint64_t offsets = in->columns[i].spec.ragged ? ((uint64_t)items + 1) * 8 : 0;
        in->rooms[i] = m.room;
        if (!rc && __builtin_add_overflow(in->rows.values, m.bytes + offsets, &in->rows.values))
            rc = dray__fail(error, DRAY_EINVALID, "insert into %s: sizes overflow", o->partition);
    }
    return rc;
}

static int write_columns(dray_queue *queue, const dray_insert_options *o, uint32_t items,
                         inserted *in, uint32_t *done, dray_error *error)
{
    int rc = DRAY_OK;
    for (*done = 0; !rc && *done < o->column_count; *done += rc == DRAY_OK) {
        dray__new_column *column = &in->columns[*done];
        queue->holder.storage.rooms = in->rooms + *done;
        queue->holder.storage.room_count = o->column_count - *done;
        rc = dray__queue_write(queue, &o->columns[*done], &column->spec, items, &column->extent,
                               &in->spans[*done], error);
    }
    queue->holder.storage.room_count = 0;
    return rc;
}

static void leave_span(const dray_insert_options *o)
{
    DRAY__TRACE(samples(o->partition, NULL, o->rows));
    DRAY__TRACE(leave());
}

static int insert_once(dray_queue *queue, const dray_insert_options *o, inserted *in,
                       int64_t deadline, dray_error *error)
{
    uint32_t each = o->refill ? o->rows : o->group_size; /* a refill is of one group */
    uint32_t items = o->once_per_group && each ? o->rows / each : o->rows, done = 0;
    int rc = dray__queue_check_fork(queue, error);
    if (!rc)
        rc = measure_columns(o, items, in, error);
    DRAY__TRACE(wait(DRAY_CAUSE_CAPACITY, "queue room", -1));
    if (!rc)
        rc = ask_room(queue, in, deadline, error);
    leave_span(o);
    DRAY__TRACE(enter(DRAY_SPAN_TRANSFER, "queue put", -1));
    if (!rc)
        rc = write_columns(queue, o, items, in, &done, error);
    leave_span(o);
    bool sent = rc == DRAY_OK;
    if (sent) {
        DRAY__TRACE(wait(DRAY_CAUSE_CAPACITY, "queue insert", -1));
        rc = in->how->send(queue, &in->rows, deadline, in->how->user, error);
        leave_span(o);
    }
    /* Without an answer the rows may be there or not, so their bytes must stay as they are. The
     * same holds for rows that are inserted but not in the journal yet. */
    bool given_up = rc && !(sent && dray__may_count(rc));
    for (uint32_t i = 0; i < done; i++)
        queue->holder.kind->done(&queue->holder, &in->spans[i], rc == DRAY_OK, !given_up);
    return rc;
}

int dray__queue_produce(dray_queue *queue, const dray_insert_options *o, const dray__sending *how,
                        dray_error *error)
{
    inserted in;
    int64_t deadline = dray__context_deadline(queue->context, o->timeout_ns);
    int rc = make_insert(o, &in, error);
    in.how = how;
    in.rows.ticket = dray__queue_ticket(queue);
    if (!rc)
        rc = insert_once(queue, o, &in, deadline, error);
    dray__values_holder *holder = &queue->holder;
    if (rc == DRAY_EGONE && holder->kind->move && holder->kind->move(holder, NULL) == DRAY_OK)
        rc = insert_once(queue, o, &in, deadline, error);
    while (rc == DRAY_ECLOSED && !how->once && dray__queue_come_back(queue) == DRAY_OK)
        rc = insert_once(queue, o, &in, deadline, error);
    if (rc == DRAY_ECLOSED && how->once) /* the next attempt finds the next controller */
        dray__queue_come_back(queue);
    inserted_free(&in);
    if (!rc && dray__storage_has_news(&queue->holder.storage)) /* so that it can be freed */
        dray__chunks_tell(queue);
    return rc;
}

int dray_queue_insert(dray_queue *queue, const dray_insert_options *options, uint32_t *first_slot,
                      dray_error *error)
{
    dray_insert_options o = DRAY_INSERT_OPTIONS_INIT;
    const dray__sending how = {.send = send_insert, .user = first_slot};
    int rc = DRAY__OPTIONS_READ(dray_insert_options, at_slot, &o, options, error);
    if (!rc)
        rc = check_insert(&o, error);
    for (uint32_t i = 0; !rc && o.known_only && i < o.column_count; i++)
        rc = check_column(queue, o.columns[i].name, error);
    return rc ? rc : dray__queue_produce(queue, &o, &how, error);
}
