/* Making rows: a column's values into chunks or a store, and what is there of them told. */
#include "base/clock.h"
#include "base/error.h"
#include "base/options.h"
#include "base/words.h"
#include "control/context.h"
#include "queue/client.h"
#include "queue/hook.h"
#include "queue/objects.h"

#include <stdlib.h>
#include <string.h>
#include <unistd.h>

/* ---- writing values -------------------------------------------------------------------------- */

typedef struct told {
    uint64_t given, size;
} told;

/* Tells the controller of a chunk that we would add, which it may replace by one of ours that is
 * free, or make smaller, and of one that we give up; NULL: of none. */
static int tell_storage(dray_queue *queue, const dray__chunk_wish *add,
                        const dray__written *give_up, told *out, dray_error *error)
{
    dray__writer *w = dray__queue_begin(queue);
    dray__put_u32(w, queue->home);
    dray__put_u32(w, add ? 1 : 0);
    if (add) {
        dray__put_u64(w, add->id);
        dray__put_u64(w, add->key);
        dray__put_u64(w, add->size);
        dray__put_u64(w, add->least);
    }
    dray__put_u32(w, give_up ? 1 : 0);
    if (give_up)
        dray__put_u64(w, give_up->id);
    dray__reply reply;
    int rc = dray__queue_command(queue, DRAY__MSG_QUEUE_CHUNK, &reply, error);
    if (rc)
        return rc;
    dray__queue_read_dropped(queue, &reply.payload);
    told answer = {.given = dray__get_u64(&reply.payload)};
    answer.size = dray__get_u64(&reply.payload);
    if (out)
        *out = answer;
    return dray__reader_finish(&reply.payload, "QUEUE_CHUNK", error);
}

/* Memory of the size that the controller knows of, for the keeper. */
static int make_chunk(dray_queue *queue, const dray__chunk_wish *wish, dray_error *error)
{
    dray__written *chunk = NULL;
    dray__written unmade = {.id = wish->id};
    int fd = -1, rc = dray__storage_make(wish->id, wish->key, wish->size, &chunk, &fd, error);
    if (!rc) {
        queue->keeper.era = queue->era;
        rc = dray__keeper_put(&queue->keeper, chunk->id, chunk->key, chunk->size, fd, error);
        close(fd);
    }
    if (rc)
        tell_storage(queue, NULL, &unmade, NULL, NULL);
    if (rc == DRAY_ECLOSED && queue->era && queue->refused_era == queue->era)
        rc =
            dray__fail(error, DRAY_EGONE,
                       "queue %s: the keeper of this host serves another coordinator", queue->name);
    else if (rc == DRAY_ECLOSED) /* the caller comes back, and tries again */
        queue->refused_era = queue->era;
    dray__queue_step("kept");
    if (rc && chunk)
        dray__storage_unmake(chunk);
    else if (!rc)
        dray__storage_add(&queue->storage, chunk);
    return rc;
}

/* The controller learns of a chunk before there is memory for it, and before the keeper gets it:
 * whenever we die, one of them forgets it for both. The keeper takes none that was told to a
 * controller of the past. */
static int add_chunk(dray_queue *queue, uint64_t bytes, dray_error *error)
{
    dray__chunk_wish wish = {0};
    told answer = {0};
    int rc = dray__queue_find_home(queue, true, error);
    if (!rc && queue->home == DRAY__NONE)
        rc = dray__fail(error, DRAY_EUNSUPPORTED,
                        "queue %s: there is no keeper on this host to hold samples: start one, "
                        "dray keeper",
                        queue->name);
    if (!rc)
        rc = dray__storage_name(&wish.id, &wish.key, error);
    dray__storage_size(&queue->storage, bytes, &wish.least, &wish.size);
    if (!rc)
        rc = tell_storage(queue, &wish, NULL, &answer, error);
    dray__queue_step("told");
    if (!rc && answer.given && !dray__storage_reuse(&queue->storage, answer.given))
        rc = dray__fail(error, DRAY_EINTERNAL, "queue %s: chunk %016llx is none of ours",
                        queue->name, (unsigned long long)answer.given);
    if (rc || answer.given)
        return rc;
    wish.size = answer.size;
    return make_chunk(queue, &wish, error);
}

static int take_room(dray_queue *queue, uint64_t bytes, dray__span *out, dray_error *error)
{
    if (dray__storage_take(&queue->storage, bytes, out))
        return DRAY_OK;
    dray__storage_set_aside(&queue->storage); /* it may be what is given back */
    int rc = add_chunk(queue, bytes, error);
    if (!rc && !dray__storage_take(&queue->storage, bytes, out))
        rc = dray__fail(error, DRAY_EINTERNAL, "no room for %llu bytes in a new chunk",
                        (unsigned long long)bytes);
    return rc;
}

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

/* head: bytes of its offsets, room: of all. */
typedef struct measure {
    uint64_t unit, bytes, head, room;
} measure;

static int measure_column(const dray_column_data *column, const dray__column_spec *spec,
                          uint64_t items, measure *out, dray_error *error)
{
    uint64_t unit = dray__spec_bytes(spec), bytes = 0, end = 0, room = 0, head = 0;
    int rc = DRAY_OK;
    if (spec->ragged) {
        rc = check_offsets(column, items, unit, &bytes, &end, error);
        head = ((items + 1) * 8 + DRAY__ALIGN - 1) / DRAY__ALIGN * DRAY__ALIGN;
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
    *out = (measure){unit, bytes, head, room};
    return rc;
}

int dray__queue_write(dray_queue *queue, const dray_column_data *column,
                      const dray__column_spec *spec, uint64_t items, dray__extent *extent,
                      dray__span *span, dray_error *error)
{
    measure m = {0};
    int rc = dray__queue_check_fork(queue, error);
    if (!rc)
        rc = measure_column(column, spec, items, &m, error);
    uint64_t unit = m.unit, bytes = m.bytes, head = m.head;
    if (!rc && queue->store)
        return dray__objects_write(queue, column, unit, items, head, bytes, extent, span, error);
    if (!rc)
        rc = take_room(queue, m.room, span, error);
    if (rc)
        return rc;
    *extent =
        (dray__extent){.chunk = span->chunk->id, .values = span->offset + head, .bytes = bytes};
    const uint8_t *values = column->values;
    if (spec->ragged) {
        extent->offsets = span->offset;
        uint64_t *offsets = (uint64_t *)(void *)span->at;
        for (uint64_t i = 0; i <= items; i++)
            offsets[i] = column->offsets[i] - column->offsets[0];
        values = bytes ? values + column->offsets[0] * unit : values;
    }
    if (bytes)
        memcpy(span->at + head, values, bytes);
    dray__queue_step("wrote");
    return DRAY_OK;
}

void dray__queue_done(dray_queue *queue, const dray__span *span, bool done, bool maybe)
{
    if (span->object)
        dray__objects_done(queue, span, done);
    else
        dray__storage_done(&queue->storage, span, !done && !maybe);
}

/* ---- insert ---------------------------------------------------------------------------------- */

typedef struct inserted {
    dray__column_spec spec;
    dray__extent extent;
    dray__span span;
} inserted;

static void put_insert(dray_queue *queue, const dray_insert_options *o, const inserted *columns,
                       uint32_t ticket, int64_t wait_ns)
{
    dray__writer *w = dray__queue_begin(queue);
    dray__put_string(w, o->partition);
    dray__put_u32(w, o->rows);
    dray__put_u32(w, o->group_size);
    dray__put_u8(w, o->once_per_group != 0);
    dray__put_u64(w, o->at_slot);
    dray__put_u64(w, o->row_bytes);
    dray__put_u64(w, o->refill);
    dray__put_u32(w, ticket);
    dray__put_i64(w, wait_ns);
    dray__put_u32(w, o->column_count);
    for (uint32_t i = 0; i < o->column_count; i++) {
        dray__put_string(w, o->columns[i].name);
        dray__put_spec(w, &columns[i].spec);
        dray__put_extent(w, &columns[i].extent);
    }
    size_t keys_at = w->size;
    dray__put_u32(w, 0);
    for (uint32_t i = 0; i < o->tag_count; i++)
        dray__put_string(w, o->tags[i].key);
    uint32_t keys = o->tag_count, *key = calloc(o->row_tag_count + 1u, sizeof *key);
    w->failed |= !key;
    for (uint32_t i = 0; i < o->row_tag_count && key; i++) { /* often one key for all rows */
        bool known = i && strcmp(o->row_tags[i].key, o->row_tags[i - 1].key) == 0;
        key[i] = known ? key[i - 1] : keys++;
        if (!known)
            dray__put_string(w, o->row_tags[i].key);
    }
    if (key)
        dray__put_u32_at(w, keys_at, keys);
    dray__put_u32(w, o->tag_count + o->row_tag_count);
    for (uint32_t i = 0; i < o->tag_count; i++) {
        dray__put_u32(w, DRAY__NONE);
        dray__put_u32(w, i);
        dray__put_f64(w, o->tags[i].number);
    }
    for (uint32_t i = 0; i < o->row_tag_count && key; i++) {
        dray__put_u32(w, o->row_tags[i].row);
        dray__put_u32(w, key[i]);
        dray__put_f64(w, o->row_tags[i].number);
    }
    free(key);
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

/* What no task has nobody would ever read: where that is asked for, it is a mistake. */
static int check_column(const dray_queue *queue, const char *name, dray_error *error)
{
    int rc = dray__name_check(name, "column", error);
    const char *known[256];
    uint32_t count = 0;
    for (uint32_t t = 0; !rc && t < queue->task_count; t++)
        for (int writes = 0; writes < 2; writes++) {
            const dray__words *words = writes ? &queue->tasks[t].writes : &queue->tasks[t].needs;
            for (uint32_t i = 0; i < words->count; i++) {
                if (strcmp(words->items[i], name) == 0)
                    return DRAY_OK;
                uint32_t k = 0;
                while (k < count && strcmp(known[k], words->items[i]) != 0)
                    k++;
                if (k == count && count < sizeof known / sizeof *known)
                    known[count++] = words->items[i];
            }
        }
    char hint[300];
    return rc ? rc
              : dray__fail(error, DRAY_EINVALID, "queue %s: no task has a column %s%s", queue->name,
                           name, dray__word_hint_or_all(name, known, count, hint, sizeof hint));
}

static int send_insert(dray_queue *queue, const dray_insert_options *o, const inserted *columns,
                       uint32_t ticket, int64_t deadline, uint32_t *first_slot, dray_error *error)
{
    put_insert(queue, o, columns, ticket, o->timeout_ns ? deadline - dray__now() : 0);
    dray__reply reply;
    int rc = dray__queue_call(queue, DRAY__MSG_QUEUE_INSERT, deadline, &reply, error);
    if (rc == DRAY_ETIMEDOUT)
        dray__queue_release(queue, ticket); /* one that was interrupted waits no more */
    if (rc)
        return rc;
    dray__queue_read_dropped(queue, &reply.payload);
    uint32_t first = dray__get_u32(&reply.payload);
    dray__get_u32(&reply.payload); /* generation: claims tell it */
    rc = dray__reader_finish(&reply.payload, "QUEUE_INSERT", error);
    if (!rc && first_slot)
        *first_slot = first;
    return rc;
}

/* Memory is asked for before it is written, all at once. What fits into the current chunk needs
 * none. */
static int ask_room(dray_queue *queue, const dray_insert_options *o, const uint64_t *rooms,
                    uint64_t values, uint32_t ticket, int64_t deadline, dray_error *error)
{
    uint64_t bytes = 0;
    int rc = dray__storage_ahead(&queue->storage, rooms, o->column_count, &bytes, error);
    if (rc || !bytes || queue->store || o->refill)
        return rc;
    dray__writer *w = dray__queue_begin(queue);
    dray__put_string(w, o->partition);
    dray__put_u32(w, o->rows);
    dray__put_u32(w, o->group_size);
    dray__put_u64(w, o->at_slot);
    dray__put_u64(w, o->row_bytes);
    dray__put_u32(w, ticket);
    dray__put_u64(w, values);
    dray__put_u64(w, bytes);
    dray__put_i64(w, o->timeout_ns ? deadline - dray__now() : 0);
    dray__reply reply;
    rc = dray__queue_call(queue, DRAY__MSG_QUEUE_ROOM, deadline, &reply, error);
    if (rc == DRAY_ETIMEDOUT)
        dray__queue_release(queue, ticket); /* one that was interrupted waits no more */
    if (rc)
        return rc;
    dray__queue_read_dropped(queue, &reply.payload);
    return dray__reader_finish(&reply.payload, "QUEUE_ROOM", error);
}

/* All columns' sizes first: *values without what aligns them. */
static int measure_columns(const dray_insert_options *o, uint32_t items, inserted *columns,
                           uint64_t *rooms, uint64_t *values, dray_error *error)
{
    int rc = DRAY_OK;
    *values = 0;
    for (uint32_t i = 0; !rc && i < o->column_count; i++) {
        measure m = {0};
        rc = dray__spec_of(&o->columns[i], &columns[i].spec, error);
        if (!rc)
            rc = measure_column(&o->columns[i], &columns[i].spec, items, &m, error);
        uint64_t offsets = columns[i].spec.ragged ? ((uint64_t)items + 1) * 8 : 0;
        rooms[i] = m.room;
        if (!rc && (__builtin_add_overflow(*values, m.bytes + offsets, values)))
            rc = dray__fail(error, DRAY_EINVALID, "insert into %s: sizes overflow", o->partition);
    }
    return rc;
}

static int write_columns(dray_queue *queue, const dray_insert_options *o, uint32_t items,
                         inserted *columns, const uint64_t *rooms, uint32_t *done,
                         dray_error *error)
{
    int rc = DRAY_OK;
    for (*done = 0; !rc && *done < o->column_count; *done += rc == DRAY_OK) {
        inserted *column = &columns[*done];
        queue->storage.rooms = rooms + *done;
        queue->storage.room_count = o->column_count - *done;
        rc = dray__queue_write(queue, &o->columns[*done], &column->spec, items, &column->extent,
                               &column->span, error);
    }
    queue->storage.room_count = 0;
    return rc;
}

static void leave_span(const dray_insert_options *o)
{
    dray_trace_samples(o->partition, NULL, o->rows);
    dray_trace_leave();
}

static int insert_once(dray_queue *queue, const dray_insert_options *o, inserted *columns,
                       uint32_t ticket, int64_t deadline, uint32_t *first_slot, dray_error *error)
{
    uint32_t each = o->refill ? o->rows : o->group_size; /* a refill is of one group */
    uint32_t items = o->once_per_group && each ? o->rows / each : o->rows, done = 0;
    uint64_t values, *rooms = calloc(o->column_count + 1u, sizeof *rooms);
    int rc = rooms ? dray__queue_check_fork(queue, error) : dray__nomem(error);
    if (!rc)
        rc = measure_columns(o, items, columns, rooms, &values, error);
    dray_trace_wait(DRAY_CAUSE_CAPACITY, "queue room", -1);
    if (!rc)
        rc = ask_room(queue, o, rooms, values, ticket, deadline, error);
    leave_span(o);
    dray_trace_enter(DRAY_SPAN_TRANSFER, "queue put", -1);
    if (!rc)
        rc = write_columns(queue, o, items, columns, rooms, &done, error);
    leave_span(o);
    free(rooms);
    bool sent = rc == DRAY_OK;
    if (sent) {
        dray_trace_wait(DRAY_CAUSE_CAPACITY, "queue insert", -1);
        rc = send_insert(queue, o, columns, ticket, deadline, first_slot, error);
        leave_span(o);
    }
    /* Without an answer the rows may be there or not: what they hold must stay as it is. So must
     * what is done, but not in the journal yet. */
    bool given_up = rc && !(sent && (rc == DRAY_ETIMEDOUT || rc == DRAY_ECLOSED ||
                                     rc == DRAY_EFULL || rc == DRAY_ESYS || rc == DRAY_ENOMEM));
    for (uint32_t i = 0; i < done; i++)
        dray__queue_done(queue, &columns[i].span, rc == DRAY_OK, !given_up);
    return rc;
}

int dray_queue_insert(dray_queue *queue, const dray_insert_options *options, uint32_t *first_slot,
                      dray_error *error)
{
    dray_insert_options o = DRAY_INSERT_OPTIONS_INIT;
    int rc = dray__options_read(&o, sizeof o, dray__end_of(dray_insert_options, at_slot), options,
                                "dray_insert_options", error);
    if (!rc)
        rc = check_insert(&o, error);
    for (uint32_t i = 0; !rc && o.known_only && i < o.column_count; i++)
        rc = check_column(queue, o.columns[i].name, error);
    if (rc)
        return rc;
    inserted *columns = calloc(o.column_count ? o.column_count : 1, sizeof *columns);
    if (!columns)
        return dray__nomem(error);
    int64_t deadline = dray__context_deadline(queue->context, o.timeout_ns);
    uint32_t ticket = dray__queue_ticket(queue);
    rc = insert_once(queue, &o, columns, ticket, deadline, first_slot, error);
    if (rc == DRAY_EGONE && !queue->store && dray__queue_move(queue, NULL) == DRAY_OK)
        rc = insert_once(queue, &o, columns, ticket, deadline, first_slot, error);
    while (rc == DRAY_ECLOSED && dray__queue_come_back(queue) == DRAY_OK)
        rc = insert_once(queue, &o, columns, ticket, deadline, first_slot, error);
    free(columns);
    if (!rc && dray__storage_has_news(&queue->storage)) /* what is read may be free before long */
        tell_storage(queue, NULL, NULL, NULL, NULL);
    return rc;
}
