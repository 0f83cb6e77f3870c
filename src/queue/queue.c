/* The client's end of a queue: opening it, making rows, watching partitions. */
#include "queue/client.h"

#include "base/clock.h"
#include "base/error.h"
#include "base/hash.h"
#include "base/options.h"
#include "base/words.h"
#include "control/context.h"
#include "queue/objects.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/random.h>
#include <unistd.h>

/* ---- messages -------------------------------------------------------------------------------- */

dray__writer *dray__queue_begin(dray_queue *queue)
{
    dray__writer *w = &queue->out;
    dray__writer_reset(w);
    dray__put_u32(w, queue->id);
    dray__put_u64(w, queue->drops_seen);
    dray__storage_put_closed(&queue->storage, w);
    dray__put_u32(w, queue->released_count);
    for (uint32_t i = 0; i < queue->released_count; i++)
        dray__put_u32(w, queue->released[i]);
    queue->head = w->size;
    queue->known_at = 0;
    return w;
}

/* The same request, as who came back. It knows no columns yet. */
static int begin_again(dray_queue *queue, dray_error *error)
{
    size_t head = queue->sent_head, known = queue->sent_known;
    dray__writer *w = dray__queue_begin(queue);
    dray__put_bytes(w, queue->sent.data + head, queue->sent.size - head);
    if (known && !w->failed) {
        queue->known_at = known - head + queue->head;
        dray__put_u32_at(w, queue->known_at, 0);
        dray__put_u32_at(w, queue->known_at + 4, 0);
    }
    return dray__writer_check(w, error);
}

/* Sending a message empties it. */
static int keep_sent(dray_queue *queue, dray_error *error)
{
    dray__writer_reset(&queue->sent);
    if (queue->durability != DRAY_DURABILITY_JOURNAL)
        return DRAY_OK;
    queue->sent_head = queue->head;
    queue->sent_known = queue->known_at;
    dray__put_bytes(&queue->sent, queue->out.data, queue->out.size);
    return dray__writer_check(&queue->sent, error);
}

static int call_once(dray_queue *queue, uint16_t type, int64_t deadline_ns, dray__reply *reply,
                     dray_error *error)
{
    int rc = dray__call(queue->channel, type, &queue->out, NULL, 0,
                        dray__answer_deadline(deadline_ns), reply, error);
    for (uint32_t i = 0; !rc && i < reply->fd_count; i++)
        close(reply->fds[i]); /* none is ever expected */
    if (!rc)                  /* else they are told again, which does no harm */
        queue->released_count = 0;
    if (rc) { /* what was not sent was not told; a lost answer may have had chunks for us */
        bool gives_back = type == DRAY__MSG_QUEUE_INSERT || type == DRAY__MSG_QUEUE_COMMIT ||
                          type == DRAY__MSG_QUEUE_CHUNK;
        dray__storage_untell(&queue->storage, gives_back && rc == DRAY_ETIMEDOUT);
    }
    return rc;
}

/* What names chunks of the past is its caller's to write again; whoever closes need not come back.
 */
static bool can_repeat(uint16_t type)
{
    return type != DRAY__MSG_QUEUE_INSERT && type != DRAY__MSG_QUEUE_CHUNK &&
           type != DRAY__MSG_QUEUE_OPEN && type != DRAY__MSG_QUEUE_CLOSE;
}

int dray__queue_call(dray_queue *queue, uint16_t type, int64_t deadline_ns, dray__reply *reply,
                     dray_error *error)
{
    dray__reply ignored = {0};
    reply = reply ? reply : &ignored;
    int rc = keep_sent(queue, error);
    if (!rc)
        rc = call_once(queue, type, deadline_ns, reply, error);
    while (rc == DRAY_ECLOSED && can_repeat(type) && dray__queue_come_back(queue) == DRAY_OK) {
        rc = begin_again(queue, error);
        if (!rc)
            rc = call_once(queue, type, deadline_ns, reply, error);
    }
    return rc;
}

uint32_t dray__queue_ticket(dray_queue *queue)
{
    if (!++queue->tickets)
        ++queue->tickets;
    return queue->tickets;
}

void dray__queue_release(dray_queue *queue, uint32_t ticket)
{
    dray__writer *w = dray__queue_begin(queue);
    dray__put_u32(w, ticket);
    if (dray__notify(queue->channel, DRAY__MSG_QUEUE_RELEASE, w, NULL))
        dray__storage_untell(&queue->storage, false);
}

int dray__queue_check_fork(const dray_queue *queue, dray_error *error)
{
    if (queue->storage.pid == getpid())
        return DRAY_OK;
    return dray__fail(error, DRAY_ECLOSED, "queue %s belongs to process %d, this is its fork",
                      queue->name, (int)queue->storage.pid);
}

void dray__queue_read_dropped(dray_queue *queue, dray__reader *r)
{
    uint64_t drops = dray__get_u64(r);
    bool all = dray__get_u8(r) != 0;
    uint32_t count = dray__get_count(r, 8);
    for (uint32_t i = 0; i < count; i++) {
        uint64_t id = dray__get_u64(r);
        dray__mapping_drop(id);
        dray__storage_dropped(&queue->storage, id);
    }
    if (r->failed)
        return;
    if (all)
        dray__mapping_drop_unused();
    queue->drops_seen = drops;
}

void dray__queue_read_storage(dray_queue *queue, dray__reader *r)
{
    uint32_t count = dray__get_count(r, 8);
    for (uint32_t i = 0; i < count; i++)
        dray__storage_recycled(&queue->storage, dray__get_u64(r));
    dray__queue_read_dropped(queue, r);
}

int dray__queue_command(dray_queue *queue, uint16_t type, dray__reply *reply, dray_error *error)
{
    return dray__queue_call(queue, type, dray__context_deadline(queue->context, queue->timeout_ns),
                            reply, error);
}

/* ---- opening --------------------------------------------------------------------------------- */

static int put_tasks(dray__writer *w, const dray_queue_options *options, dray_error *error)
{
    dray__put_u32(w, options->task_count);
    for (uint32_t t = 0; t < options->task_count; t++) {
        const dray_queue_task *task = &options->tasks[t];
        int rc = dray__name_check(task->name, "task", error);
        for (uint32_t i = 0; !rc && i < task->needs_count; i++)
            rc = dray__name_check(task->needs[i], "column", error);
        for (uint32_t i = 0; !rc && i < task->writes_count; i++)
            rc = dray__name_check(task->writes[i], "column", error);
        if (rc)
            return rc;
        dray__put_string(w, task->name);
        dray__put_words(w, task->needs, task->needs_count);
        dray__put_words(w, task->writes, task->writes_count);
    }
    return DRAY_OK;
}

/* As bits, in the order in which the tasks are given. */
static int provisional_tasks(const dray_queue_options *options, uint64_t *out, dray_error *error)
{
    for (uint32_t i = 0; i < options->provisional_count; i++) {
        uint32_t t = 0;
        while (t < options->task_count && t < DRAY__TASKS_MAX &&
               strcmp(options->tasks[t].name, options->provisional[i]) != 0)
            t++;
        if (t >= options->task_count || t >= DRAY__TASKS_MAX)
            return dray__fail(error, DRAY_EINVALID, "provisional: there is no task %s",
                              options->provisional[i]);
        *out |= UINT64_C(1) << t;
    }
    return DRAY_OK;
}

static void put_settings(dray__writer *w, const dray__settings *s)
{
    dray__put_u64(w, s->capacity_rows);
    dray__put_u64(w, s->capacity_bytes);
    dray__put_u32(w, s->max_attempts);
    dray__put_u32(w, (uint32_t)s->on_loss);
    dray__put_u64(w, s->provisional);
    dray__put_u32(w, s->batch_rows);
    dray__put_u32(w, s->open_batches);
    dray__put_u32(w, s->checkpoint_batches);
    dray__put_u64(w, s->row_bytes);
    dray__put_u32(w, (uint32_t)s->durability);
    dray__put_u32(w, (uint32_t)s->backend);
    dray__put_string(w, s->backend_address);
}

static int read_table(dray_queue *queue, dray__reader *r, dray_error *error)
{
    queue->id = dray__get_u32(r);
    queue->durability = (int32_t)dray__get_u32(r);
    int opened = dray__objects_open(queue, r, error);
    if (opened)
        return opened;
    uint32_t count = dray__get_count(r, 12);
    queue->tasks = calloc(count ? count : 1, sizeof *queue->tasks);
    if (!queue->tasks)
        return dray__nomem(error);
    for (; queue->task_count < count; queue->task_count++) {
        dray__task_info *task = &queue->tasks[queue->task_count];
        task->name = dray__get_word(r);
        int rc = dray__get_words(r, &task->needs, error);
        if (!rc)
            rc = dray__get_words(r, &task->writes, error);
        if (rc) {
            queue->task_count++;
            return rc;
        }
    }
    return dray__reader_finish(r, "QUEUE_OPEN", error);
}

/* The queue is there again under its name, and this is another client of it: chunks, claims and
 * columns' numbers are those of the past. */
static int enter_again(dray_queue *queue, int64_t deadline_ns, dray_error *error)
{
    dray__channel *channel;
    int rc = dray__context_come_back(queue->context, deadline_ns, &channel, error);
    if (rc)
        return rc;
    dray__channel_close(queue->channel);
    queue->channel = channel;
    dray__keeper_link_break(&queue->keeper);
    dray__storage_lose(&queue->storage);
    dray__mapping_drop_unused();
    dray__names_retire(&queue->names);
    queue->drops_seen = 0;
    queue->released_count = queue->started = 0;
    static const dray__settings any;
    dray__reply reply;
    dray__writer w = {0};
    int64_t left = deadline_ns - dray__now();
    dray__put_string(&w, queue->name);
    dray__put_u32(&w, 0);
    put_settings(&w, &any);
    dray__put_u64(&w, queue->identity);
    dray__put_string(&w, "");
    dray__put_i64(&w, left > 0 ? left : 0);
    rc = dray__call(queue->channel, DRAY__MSG_QUEUE_OPEN, &w, NULL, 0, deadline_ns, &reply, error);
    dray__writer_free(&w);
    if (!rc)
        queue->id = dray__get_u32(&reply.payload);
    return rc;
}

int dray__queue_come_back(dray_queue *queue)
{
    dray_error error;
    int64_t deadline_ns = dray__context_deadline(queue->context, queue->timeout_ns);
    if (queue->durability != DRAY_DURABILITY_JOURNAL || queue->storage.pid != getpid())
        return DRAY_ECLOSED;
    int rc = enter_again(queue, deadline_ns, &error);
    while (rc == DRAY_ECLOSED && dray__now() < deadline_ns) /* and died again meanwhile */
        rc = enter_again(queue, deadline_ns, &error);
    return rc;
}

static int open_queue(dray_queue *queue, const char *name, const dray_queue_options *options,
                      dray_error *error)
{
    dray__writer *w = &queue->out;
    dray__put_string(w, name);
    uint64_t provisional = 0;
    int rc = put_tasks(w, options, error);
    if (!rc)
        rc = provisional_tasks(options, &provisional, error);
    if (rc)
        return rc;
    int64_t deadline = dray__context_deadline(queue->context, queue->timeout_ns);
    dray__settings settings = {.capacity_rows = options->capacity_rows,
                               .capacity_bytes = options->capacity_bytes,
                               .max_attempts = options->max_attempts,
                               .on_loss = options->on_loss,
                               .provisional = provisional,
                               .batch_rows = options->batch_rows,
                               .open_batches = options->open_batches,
                               .checkpoint_batches = options->checkpoint_batches,
                               .row_bytes = options->row_bytes,
                               .durability = options->durability,
                               .backend = options->backend,
                               .backend_address = options->backend_address};
    put_settings(w, &settings);
    dray__put_u64(w, queue->identity);
    dray__put_string(w, options->restore ? options->restore : "");
    dray__put_i64(w, deadline - dray__now());
    rc = dray__channel_open(queue->context, &queue->channel, error);
    dray__reply reply;
    if (!rc)
        rc = dray__queue_call(queue, DRAY__MSG_QUEUE_OPEN, deadline, &reply, error);
    return rc ? rc : read_table(queue, &reply.payload, error);
}

static void queue_free(dray_queue *queue)
{
    dray__objects_close(queue);
    dray__channel_close(queue->channel);
    dray__keeper_link_free(&queue->keeper);
    if (queue->storage.pid == getpid())
        dray__mapping_drop_unused(); /* no queue may be left to hear which chunks are gone */
    dray__storage_free(&queue->storage);
    dray__names_free(&queue->names);
    for (uint32_t t = 0; t < queue->task_count; t++) {
        free(queue->tasks[t].name);
        dray__words_free(&queue->tasks[t].needs);
        dray__words_free(&queue->tasks[t].writes);
    }
    free(queue->tasks);
    free(queue->released);
    free(queue->name);
    dray__writer_free(&queue->out);
    dray__writer_free(&queue->sent);
    free(queue);
}

int dray_queue_open(dray_context *context, const char *name, const dray_queue_options *options,
                    dray_queue **out, dray_error *error)
{
    dray_queue_options o = DRAY_QUEUE_OPTIONS_INIT;
    int rc = dray__options_read(&o, sizeof o, dray__end_of(dray_queue_options, timeout_ns), options,
                                "dray_queue_options", error);
    if (!rc)
        rc = dray__name_check(name, "queue", error);
    if (!rc && o.task_count && !o.backend && o.durability <= DRAY_DURABILITY_NONE && !o.restore)
        rc = dray__backend_default(&o.backend, &o.backend_address, error);
    if (!rc && o.task_count && !o.tasks)
        rc = dray__fail(error, DRAY_EINVALID, "queue %s: %u tasks, but none given", name,
                        o.task_count);
    if (rc)
        return rc;
    if (o.durability < 0 || o.durability > DRAY_DURABILITY_JOURNAL)
        return dray__fail(error, DRAY_EINVALID, "queue %s: durability %d is none", name,
                          o.durability);
    if (o.restore && (o.restore[0] != '/' || strlen(o.restore) > 4000))
        return dray__fail(error, DRAY_EINVALID, "queue %s: '%s' is no absolute path", name,
                          o.restore);
    dray_queue *queue = calloc(1, sizeof *queue);
    if (!queue)
        return dray__nomem(error);
    if (getrandom(&queue->identity, sizeof queue->identity, 0) != (ssize_t)sizeof queue->identity) {
        free(queue);
        return dray__fail(error, DRAY_ESYS, "getrandom");
    }
    queue->context = context;
    queue->timeout_ns = o.timeout_ns ? o.timeout_ns : DRAY_WAIT_DEFAULT;
    queue->storage.pid = getpid();
    queue->name = strdup(name);
    rc = queue->name ? DRAY_OK : dray__nomem(error);
    int64_t patience = dray__context_deadline(context, queue->timeout_ns) - dray__now();
    if (!rc)
        rc = dray__keeper_link_init(&queue->keeper, dray__context_keeper(context), patience, error);
    if (!rc)
        rc = open_queue(queue, name, &o, error);
    if (rc) {
        queue_free(queue);
        return rc;
    }
    *out = queue;
    return DRAY_OK;
}

void dray_queue_close(dray_queue *queue)
{
    if (!queue)
        return;
    dray__objects_close(queue);
    dray__queue_begin(queue);
    dray__queue_command(queue, DRAY__MSG_QUEUE_CLOSE, NULL, NULL);
    queue_free(queue);
}

int dray_queue_fd(const dray_queue *queue)
{
    return dray__channel_fd(queue->channel);
}

int dray__queue_task(const dray_queue *queue, const char *name, uint32_t *task, dray_error *error)
{
    const char *names[64];
    uint32_t count = queue->task_count < 64 ? queue->task_count : 64;
    if (!name)
        return dray__fail(error, DRAY_EINVALID, "queue %s: a task's name expected", queue->name);
    for (uint32_t t = 0; t < count; t++) {
        names[t] = queue->tasks[t].name;
        if (strcmp(name, names[t]) == 0) {
            *task = t;
            return DRAY_OK;
        }
    }
    char hint[300];
    return dray__fail(error, DRAY_ENOENT, "queue %s has no task %s%s", queue->name, name,
                      dray__word_hint(name, names, count, hint, sizeof hint));
}

/* ---- writing values -------------------------------------------------------------------------- */

/* Tells the controller of a chunk that we add, and of one that we give up; NULL: of none. It may
 * have chunks for us that it could not say yet. */
static int tell_storage(dray_queue *queue, const dray__written *add, const dray__written *give_up,
                        dray_error *error)
{
    dray__writer *w = dray__queue_begin(queue);
    dray__put_u32(w, add ? 1 : 0);
    if (add) {
        dray__put_u64(w, add->id);
        dray__put_u64(w, add->key);
        dray__put_u64(w, add->size);
    }
    if (give_up) {
        dray__put_u32(w, 1);
        dray__put_u64(w, give_up->id);
    } else {
        dray__storage_put_surplus(&queue->storage, w);
    }
    dray__reply reply;
    int rc = dray__queue_command(queue, DRAY__MSG_QUEUE_CHUNK, &reply, error);
    if (rc)
        return rc;
    dray__queue_read_storage(queue, &reply.payload);
    return dray__reader_finish(&reply.payload, "QUEUE_CHUNK", error);
}

/* The controller learns of a chunk before the keeper gets it: whenever we die, one of them forgets
 * it for both. */
static int add_chunk(dray_queue *queue, uint64_t bytes, dray_error *error)
{
    dray__written *chunk = NULL;
    int fd = -1, rc = dray__storage_make(&queue->storage, bytes, &chunk, &fd, error);
    if (rc)
        return rc;
    rc = tell_storage(queue, chunk, NULL, error);
    if (!rc) {
        rc = dray__keeper_put(&queue->keeper, chunk->id, chunk->key, chunk->size, fd, error);
        if (rc)
            tell_storage(queue, NULL, chunk, NULL);
    }
    close(fd);
    if (rc)
        dray__storage_unmake(chunk);
    else
        dray__storage_add(&queue->storage, chunk);
    return rc;
}

static int take_room(dray_queue *queue, uint64_t bytes, dray__span *out, dray_error *error)
{
    dray__storage *storage = &queue->storage;
    if (dray__storage_take(storage, bytes, out))
        return DRAY_OK;
    int rc = DRAY_OK;
    if (!dray__storage_reuse(storage, bytes)) {
        if (storage->count)
            rc = tell_storage(queue, NULL, NULL, error);
        if (!rc && !dray__storage_reuse(storage, bytes))
            rc = add_chunk(queue, bytes, error);
    }
    if (!rc && !dray__storage_take(storage, bytes, out))
        rc = dray__fail(error, DRAY_EINTERNAL, "no room for %llu bytes in a new chunk",
                        (unsigned long long)bytes);
    return rc;
}

static int check_offsets(const dray_column_data *column, uint64_t items, uint64_t slice,
                         uint64_t *bytes, dray_error *error)
{
    for (uint64_t i = 0; i < items; i++)
        if (column->offsets[i] > column->offsets[i + 1])
            return dray__fail(error, DRAY_EINVALID,
                              "column %s: offset %llu of row %llu is behind the next, %llu",
                              column->name, (unsigned long long)column->offsets[i],
                              (unsigned long long)i, (unsigned long long)column->offsets[i + 1]);
    uint64_t slices = column->offsets[items] - column->offsets[0], end;
    if (__builtin_mul_overflow(slices, slice, bytes) || *bytes > INT64_MAX ||
        __builtin_mul_overflow(column->offsets[items], slice, &end))
        return dray__fail(error, DRAY_EINVALID, "column %s: %llu slices of %llu bytes overflow",
                          column->name, (unsigned long long)slices, (unsigned long long)slice);
    return DRAY_OK;
}

int dray__queue_write(dray_queue *queue, const dray_column_data *column,
                      const dray__column_spec *spec, uint64_t items, dray__extent *extent,
                      dray__span *span, dray_error *error)
{
    uint64_t unit = dray__spec_bytes(spec), bytes = 0, room = 0, head = 0;
    int rc = dray__queue_check_fork(queue, error);
    if (rc)
        return rc;
    if (spec->ragged) {
        rc = check_offsets(column, items, unit, &bytes, error);
        head = ((items + 1) * 8 + DRAY__ALIGN - 1) / DRAY__ALIGN * DRAY__ALIGN;
    } else if (__builtin_mul_overflow(items, unit, &bytes) || bytes > INT64_MAX) {
        rc = dray__fail(error, DRAY_EINVALID, "column %s: %llu rows of %llu bytes overflow",
                        column->name, (unsigned long long)items, (unsigned long long)unit);
    }
    if (!rc && bytes && !column->values)
        rc = dray__fail(error, DRAY_EINVALID,
                        "column %s: %llu bytes of values expected, found "
                        "none",
                        column->name, (unsigned long long)bytes);
    if (!rc && __builtin_add_overflow(head, bytes, &room))
        rc = dray__fail(error, DRAY_EINVALID, "column %s: sizes overflow", column->name);
    if (!rc && queue->store)
        return dray__objects_write(queue, column, unit, items, head, bytes, extent, span, error);
    if (!rc)
        rc = take_room(queue, room, span, error);
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
    dray__put_u32(w, o->tag_count);
    for (uint32_t i = 0; i < o->tag_count; i++)
        dray__put_string(w, o->tags[i].key);
    dray__put_u32(w, o->tag_count);
    for (uint32_t i = 0; i < o->tag_count; i++) {
        dray__put_u32(w, 0);
        dray__put_u32(w, i);
        dray__put_f64(w, o->tags[i].number);
    }
}

static int check_insert(const dray_insert_options *o, dray_error *error)
{
    int rc = dray__name_check(o->partition, "partition", error);
    for (uint32_t i = 0; !rc && i < o->tag_count; i++)
        rc = o->tags
                 ? dray__name_check(o->tags[i].key, "tag", error)
                 : dray__fail(error, DRAY_EINVALID, "insert: %u tags, none given", o->tag_count);
    if (!rc && o->column_count && !o->columns)
        rc = dray__fail(error, DRAY_EINVALID, "insert: %u columns, none given", o->column_count);
    if (!rc && (!o->rows || (o->group_size && o->rows % o->group_size)))
        rc = dray__fail(error, DRAY_EINVALID,
                        "insert into %s: %u rows are no whole number of groups of %u", o->partition,
                        o->rows, o->group_size);
    return rc;
}

static int send_insert(dray_queue *queue, const dray_insert_options *o, const inserted *columns,
                       uint32_t ticket, int64_t deadline, uint32_t *first_slot, dray_error *error)
{
    put_insert(queue, o, columns, ticket, o->timeout_ns ? deadline - dray__now() : 0);
    dray__reply reply;
    int rc = dray__queue_call(queue, DRAY__MSG_QUEUE_INSERT, deadline, &reply, error);
    if (rc)
        return rc;
    dray__queue_read_storage(queue, &reply.payload);
    uint32_t first = dray__get_u32(&reply.payload);
    dray__get_u32(&reply.payload); /* generation: claims tell it */
    rc = dray__reader_finish(&reply.payload, "QUEUE_INSERT", error);
    if (!rc && first_slot)
        *first_slot = first;
    return rc;
}

static int insert_once(dray_queue *queue, const dray_insert_options *o, inserted *columns,
                       uint32_t ticket, int64_t deadline, uint32_t *first_slot, dray_error *error)
{
    uint32_t items = o->once_per_group && o->group_size ? o->rows / o->group_size : o->rows;
    uint32_t done = 0;
    int rc = DRAY_OK;
    for (; !rc && done < o->column_count; done += rc == DRAY_OK) {
        inserted *column = &columns[done];
        rc = dray__spec_of(&o->columns[done], &column->spec, error);
        if (!rc)
            rc = dray__queue_write(queue, &o->columns[done], &column->spec, items, &column->extent,
                                   &column->span, error);
    }
    bool sent = rc == DRAY_OK;
    if (sent)
        rc = send_insert(queue, o, columns, ticket, deadline, first_slot, error);
    /* Without an answer the rows may be there or not: what they hold must stay as it is. So must
     * what is done, but not in the journal yet. */
    bool given_up = rc && !(sent && (rc == DRAY_ETIMEDOUT || rc == DRAY_ECLOSED ||
                                     rc == DRAY_EFULL || rc == DRAY_ESYS || rc == DRAY_ENOMEM));
    for (uint32_t i = 0; i < done; i++)
        dray__queue_done(queue, &columns[i].span, rc == DRAY_OK, !given_up);
    return rc;
}

int dray_insert(dray_queue *queue, const dray_insert_options *options, uint32_t *first_slot,
                dray_error *error)
{
    dray_insert_options o = DRAY_INSERT_OPTIONS_INIT;
    int rc = dray__options_read(&o, sizeof o, dray__end_of(dray_insert_options, at_slot), options,
                                "dray_insert_options", error);
    if (!rc)
        rc = check_insert(&o, error);
    if (rc)
        return rc;
    inserted *columns = calloc(o.column_count ? o.column_count : 1, sizeof *columns);
    if (!columns)
        return dray__nomem(error);
    int64_t deadline = dray__context_deadline(queue->context, o.timeout_ns);
    uint32_t ticket = dray__queue_ticket(queue);
    rc = insert_once(queue, &o, columns, ticket, deadline, first_slot, error);
    while (rc == DRAY_ECLOSED && dray__queue_come_back(queue) == DRAY_OK)
        rc = insert_once(queue, &o, columns, ticket, deadline, first_slot, error);
    free(columns);
    return rc;
}

/* ---- partitions ------------------------------------------------------------------------------ */

static int begin_named(dray_queue *queue, const char *partition, dray__writer **w,
                       dray_error *error)
{
    int rc = dray__name_check(partition, "partition", error);
    if (rc)
        return rc;
    *w = dray__queue_begin(queue);
    dray__put_string(*w, partition);
    return DRAY_OK;
}

int dray_seal(dray_queue *queue, const char *partition, uint32_t rows, dray_error *error)
{
    dray__writer *w;
    int rc = begin_named(queue, partition, &w, error);
    if (rc)
        return rc;
    dray__put_u32(w, rows);
    return dray__queue_command(queue, DRAY__MSG_QUEUE_SEAL, NULL, error);
}

int dray_clear(dray_queue *queue, const char *partition, dray_error *error)
{
    dray__writer *w;
    int rc = begin_named(queue, partition, &w, error);
    return rc ? rc : dray__queue_command(queue, DRAY__MSG_QUEUE_CLEAR, NULL, error);
}

int dray_queue_end(dray_queue *queue, dray_error *error)
{
    dray__queue_begin(queue);
    return dray__queue_command(queue, DRAY__MSG_QUEUE_END, NULL, error);
}

int dray_queue_wait(dray_queue *queue, const char *partition, const char *task, int64_t timeout_ns,
                    dray_error *error)
{
    uint32_t t = UINT32_MAX;
    dray__writer *w;
    int rc = task ? dray__queue_task(queue, task, &t, error) : DRAY_OK;
    if (!rc)
        rc = begin_named(queue, partition, &w, error);
    if (rc)
        return rc;
    int64_t deadline = dray__context_deadline(queue->context, timeout_ns);
    dray__put_u32(w, t);
    dray__put_i64(w, timeout_ns ? deadline - dray__now() : 0);
    return dray__queue_call(queue, DRAY__MSG_QUEUE_WAIT, deadline, NULL, error);
}

/* ---- asynchronous rollout -------------------------------------------------------------------- */

int dray_queue_admit(dray_queue *queue, const dray_admission *admission, dray_error *error)
{
    dray_admission o = DRAY_ADMISSION_INIT;
    uint32_t task = UINT32_MAX;
    int rc = dray__options_read(&o, sizeof o, dray__end_of(dray_admission, version), admission,
                                "dray_admission", error);
    if (!rc && o.task)
        rc = dray__queue_task(queue, o.task, &task, error);
    if (rc)
        return rc;
    dray__writer *w = dray__queue_begin(queue);
    dray__put_u32(w, task);
    dray__put_u32(w, o.batch_rows);
    dray__put_u32(w, o.staleness);
    dray__put_u32(w, o.concurrency);
    dray__put_u64(w, o.version);
    dray__put_u8(w, o.resume != 0);
    return dray__queue_command(queue, DRAY__MSG_QUEUE_ADMIT, NULL, error);
}

int dray_queue_version(dray_queue *queue, uint64_t version, dray_error *error)
{
    dray__put_u64(dray__queue_begin(queue), version);
    return dray__queue_command(queue, DRAY__MSG_QUEUE_VERSION, NULL, error);
}

/* ---- checkpoints ----------------------------------------------------------------------------- */

#define CURSOR_MAGIC 0x52535243u /* "CRSR" */
#define CURSOR_FORMAT 1u
#define CURSOR_BYTES 44u

int dray_queue_cursor(dray_queue *queue, uint64_t version, void **out, size_t *size,
                      dray_error *error)
{
    dray__queue_begin(queue);
    dray__reply reply;
    int rc = dray__queue_command(queue, DRAY__MSG_QUEUE_CURSOR, &reply, error);
    if (rc)
        return rc;
    uint32_t epoch = dray__get_u32(&reply.payload);
    uint64_t seq = dray__get_u64(&reply.payload);
    rc = dray__reader_finish(&reply.payload, "QUEUE_CURSOR", error);
    dray__writer w = {0};
    dray__put_u32(&w, CURSOR_MAGIC);
    dray__put_u32(&w, CURSOR_FORMAT);
    dray__put_u64(&w, dray__hash(queue->name, strlen(queue->name)));
    dray__put_u32(&w, epoch);
    dray__put_u64(&w, seq);
    dray__put_u64(&w, version);
    dray__put_u64(&w, w.failed ? 0 : dray__hash(w.data, w.size));
    if (!rc)
        rc = dray__writer_check(&w, error);
    if (rc) {
        dray__writer_free(&w);
        return rc;
    }
    *out = w.data;
    *size = w.size;
    return DRAY_OK;
}

typedef struct cursor {
    uint32_t epoch;
    uint64_t seq, version;
} cursor;

static int read_cursor(const dray_queue *queue, const void *data, size_t size, cursor *out,
                       dray_error *error)
{
    dray__reader r = dray__reader_of(data, size);
    uint32_t magic = dray__get_u32(&r), format = dray__get_u32(&r);
    uint64_t name = dray__get_u64(&r);
    out->epoch = dray__get_u32(&r);
    out->seq = dray__get_u64(&r);
    out->version = dray__get_u64(&r);
    uint64_t sum = dray__get_u64(&r);
    if (size != CURSOR_BYTES || magic != CURSOR_MAGIC)
        return dray__fail(error, DRAY_EFORMAT, "cursor: these %zu bytes are none", size);
    if (format != CURSOR_FORMAT)
        return dray__fail(error, DRAY_EVERSION, "cursor: format %u expected, found %u",
                          CURSOR_FORMAT, format);
    if (sum != dray__hash(data, size - 8))
        return dray__fail(error, DRAY_ECHECKSUM, "cursor: it was altered");
    if (name != dray__hash(queue->name, strlen(queue->name)))
        return dray__fail(error, DRAY_EINVALID, "cursor: it is of another queue than %s",
                          queue->name);
    return DRAY_OK;
}

int dray_queue_covered(dray_queue *queue, const void *data, size_t size, dray_error *error)
{
    cursor c;
    int rc = read_cursor(queue, data, size, &c, error);
    if (rc)
        return rc;
    dray__writer *w = dray__queue_begin(queue);
    dray__put_u32(w, c.epoch);
    dray__put_u64(w, c.seq);
    return dray__queue_command(queue, DRAY__MSG_QUEUE_COVER, NULL, error);
}

int dray_queue_resume(dray_queue *queue, const void *data, size_t size, uint32_t *epoch,
                      dray_error *error)
{
    cursor c;
    int rc = read_cursor(queue, data, size, &c, error);
    if (rc)
        return rc;
    dray__writer *w = dray__queue_begin(queue);
    dray__put_u32(w, c.epoch);
    dray__put_u64(w, c.seq);
    dray__put_u64(w, c.version);
    dray__reply reply;
    rc = dray__queue_command(queue, DRAY__MSG_QUEUE_RESUME, &reply, error);
    if (rc)
        return rc;
    uint32_t raised = dray__get_u32(&reply.payload);
    rc = dray__reader_finish(&reply.payload, "QUEUE_RESUME", error);
    if (!rc && epoch)
        *epoch = raised;
    return rc;
}

/* ---- refills --------------------------------------------------------------------------------- */

static void read_refill(const dray_queue *queue, dray__reader *r, dray_refill *out)
{
    out->id = dray__get_u64(r);
    char *partition = dray__get_word(r);
    out->rows = dray__get_u32(r);
    out->slot = dray__get_u32(r);
    out->group = dray__get_u32(r);
    uint32_t task = dray__get_u32(r);
    out->attempts = dray__get_u32(r);
    out->cause = (int32_t)dray__get_u32(r);
    char *reason = dray__get_word(r);
    r->failed |= task >= queue->task_count;
    if (!r->failed) {
        snprintf(out->partition, sizeof out->partition, "%s", partition);
        snprintf(out->task, sizeof out->task, "%s", queue->tasks[task].name);
        snprintf(out->reason, sizeof out->reason, "%s", reason);
    }
    free(partition);
    free(reason);
}

int dray_refill_wait(dray_queue *queue, int64_t timeout_ns, dray_refill *out, dray_error *error)
{
    dray_refill filled = {0};
    int rc = dray__options_check(out, dray__end_of(dray_refill, reason), "dray_refill", error);
    if (rc)
        return rc;
    int64_t deadline = dray__context_deadline(queue->context, timeout_ns);
    dray__put_i64(dray__queue_begin(queue), timeout_ns ? deadline - dray__now() : 0);
    dray__reply reply;
    rc = dray__queue_call(queue, DRAY__MSG_QUEUE_REFILL, deadline, &reply, error);
    if (rc)
        return rc;
    read_refill(queue, &reply.payload, &filled);
    rc = dray__reader_finish(&reply.payload, "QUEUE_REFILL", error);
    if (!rc)
        dray__options_fill(out, &filled, sizeof filled);
    return rc;
}

int dray_refill_decline(dray_queue *queue, uint64_t id, dray_error *error)
{
    dray__put_u64(dray__queue_begin(queue), id);
    return dray__queue_command(queue, DRAY__MSG_QUEUE_DECLINE, NULL, error);
}

int dray_queue_checkpoint(dray_queue *queue, const char *path, dray_error *error)
{
    if (!path || path[0] != '/' || strlen(path) > 4000 || !dray__utf8_valid(path, strlen(path)))
        return dray__fail(error, DRAY_EINVALID, "dray_queue_checkpoint: an absolute path expected");
    dray__put_string(dray__queue_begin(queue), path);
    return dray__queue_command(queue, DRAY__MSG_QUEUE_CHECKPOINT, NULL, error);
}

int dray_queue_status(dray_queue *queue, char **out, dray_error *error)
{
    dray__queue_begin(queue);
    dray__reply reply;
    int rc = dray__queue_command(queue, DRAY__MSG_QUEUE_STATUS, &reply, error);
    if (rc)
        return rc;
    char *text = dray__get_string(&reply.payload, DRAY__FRAME_MAX);
    rc = dray__reader_finish(&reply.payload, "QUEUE_STATUS", error);
    if (rc)
        free(text);
    else
        *out = text;
    return rc;
}
