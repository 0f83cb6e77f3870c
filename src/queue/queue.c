/* The client's end of a queue: opening it, talking to its controller, coming back to it. */
#include "queue/client.h"

#include "base/clock.h"
#include "base/error.h"
#include "base/hash.h"
#include "base/options.h"
#include "base/wait.h"
#include "base/words.h"
#include "control/context.h"
#include "queue/hook.h"
#include "queue/objects.h"

#include <dray/trace.h>
#include <poll.h>
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

/* May the answer that did not come, or came as an error after all was done, have had chunks for us?
 * Not to be asked while another answer is on its way, which may have them. */
static bool had_chunks(const dray_queue *queue, uint16_t type, int rc)
{
    bool done = rc == DRAY_ETIMEDOUT || rc == DRAY_EFULL || rc == DRAY_ESYS || rc == DRAY_EDEAD ||
                rc == DRAY_ENOMEM;
    return type == DRAY__MSG_QUEUE_CHUNK && done && !queue->started;
}

static int call_once(dray_queue *queue, uint16_t type, int64_t deadline_ns, dray__reply *reply,
                     dray_error *error)
{
    dray__queue_step("asking");
    int rc = dray__call(queue->channel, type, &queue->out, &queue->passed, queue->passed >= 0,
                        dray__answer_deadline(deadline_ns), reply, error);
    dray__queue_step("answered");
    queue->unanswered = rc == DRAY_ETIMEDOUT || rc == DRAY_ECLOSED;
    for (uint32_t i = 0; !rc && i < reply->fd_count; i++)
        close(reply->fds[i]); /* none is ever expected */
    if (rc)                   /* what was not sent was not told */
        dray__storage_untell(&queue->storage, had_chunks(queue, type, rc));
    return rc;
}

/* What names chunks of the past is its caller's to write again; whoever closes need not come back.
 */
static bool can_repeat(uint16_t type)
{
    return type != DRAY__MSG_QUEUE_INSERT && type != DRAY__MSG_QUEUE_CHUNK &&
           type != DRAY__MSG_QUEUE_ROOM && type != DRAY__MSG_QUEUE_CLOSE;
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

void dray__queue_let_go(dray_queue *queue, uint32_t ticket, bool committed)
{
    uint32_t frees = DRAY__WANT_BYTES | (committed ? 0 : DRAY__WANT_ROWS);
    bool ours = queue->storage.pid == dray__channel_pid(); /* a fork has the page, too */
    /* A commit that is still on its way must come first. */
    bool in_turn = !queue->unanswered && !queue->riding;
    if (!ours || !in_turn || !dray__releases_write(queue->releases, ticket, frees))
        dray__queue_release(queue, ticket);
}

int dray__queue_check_fork(const dray_queue *queue, dray_error *error)
{
    if (queue->storage.pid == dray__channel_pid())
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

int dray__queue_command(dray_queue *queue, uint16_t type, dray__reply *reply, dray_error *error)
{
    dray_trace_wait_briefly(DRAY_CAUSE_CONTROLLER, "queue request", -1);
    int rc = dray__queue_call(
        queue, type, dray__context_deadline(queue->context, queue->timeout_ns), reply, error);
    dray_trace_leave();
    return rc;
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

/* Sends the message, with a page for releases; the last one's is another controller's. */
static int call_open(dray_queue *queue, dray__writer *w, int64_t deadline_ns, dray__reply *reply,
                     dray_error *error)
{
    int fd = -1, fds[2];
    uint32_t count = 0;
    dray__releases_free(queue->releases);
    queue->releases = dray__channel_passes_fds(queue->channel) ? dray__releases_new(&fd) : NULL;
    if (fd >= 0)
        fds[count++] = fd;
    if (queue->passed >= 0)
        fds[count++] = queue->passed;
    int rc = dray__queue_check_passing(queue, error);
    if (!rc)
        rc = dray__call(queue->channel, DRAY__MSG_QUEUE_OPEN, w, fds, count, deadline_ns, reply,
                        error);
    if (fd >= 0)
        close(fd);
    return rc;
}

/* What OPEN's answer says of the client; the table follows. Returns the queue's durability. */
static int32_t read_welcome(dray_queue *queue, dray__reader *r)
{
    queue->id = dray__get_u32(r);
    int32_t durability = (int32_t)dray__get_u32(r);
    queue->era = dray__get_u64(r);
    if (!dray__get_u8(r)) { /* nobody reads them */
        dray__releases_free(queue->releases);
        queue->releases = NULL;
    }
    return durability;
}

static int read_table(dray_queue *queue, dray__reader *r, dray_error *error)
{
    queue->durability = read_welcome(queue, r);
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

/* The new controller has reset the keeper, but not what came there afterwards and had been told to
 * the old one. */
static void forget_chunks(dray_queue *queue)
{
    dray__writer pairs = {0};
    uint32_t count = 0;
    for (const dray__written *chunk = queue->storage.chunks; chunk; chunk = chunk->next, count++) {
        dray__put_u64(&pairs, chunk->id);
        dray__put_u64(&pairs, chunk->key);
    }
    if (count)
        dray__keeper_forget(&queue->keeper, count, &pairs, NULL);
    dray__writer_free(&pairs);
}

/* What the queue knew of its controller, which may be the same: that one still needs what was
 * committed of our chunks, and drops the rest itself. */
static void forget_controller(dray_queue *queue, bool same)
{
    dray__keeper_link_break(&queue->keeper);
    if (!same)
        forget_chunks(queue);
    dray__storage_lose(&queue->storage);
    dray__mapping_drop_unused();
    dray__names_retire(&queue->names);
    queue->drops_seen = 0;
    queue->started = 0;
    queue->at_home = false;
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
    rc = call_open(queue, &w, deadline_ns, &reply, error);
    dray__writer_free(&w);
    if (rc)
        return rc;
    uint32_t former = queue->id;
    uint64_t before = queue->era;
    read_welcome(queue, &reply.payload); /* it had a journal, or was not there again */
    bool same = queue->era == before;
    forget_controller(queue, same);
    return dray__objects_reopen(queue, same ? 0 : former, &reply.payload, error);
}

int dray__queue_come_back(dray_queue *queue)
{
    dray_error error;
    int64_t deadline_ns = dray__context_deadline(queue->context, queue->timeout_ns);
    if (queue->durability != DRAY_DURABILITY_JOURNAL || queue->storage.pid != getpid())
        return DRAY_ECLOSED;
    int rc = enter_again(queue, deadline_ns, &error);
    while (rc == DRAY_ECLOSED && dray__now() < deadline_ns &&
           !dray__interrupted()) /* and died again meanwhile */
        rc = enter_again(queue, deadline_ns, &error);
    return rc;
}

/* The message of OPEN, but for the time that is left. */
static int put_opening(dray_queue *queue, const char *name, const dray_queue_options *options,
                       dray_error *error)
{
    dray__writer *w = &queue->out;
    dray__writer_reset(w);
    dray__put_string(w, name);
    uint64_t provisional = 0;
    int rc = put_tasks(w, options, error);
    if (!rc)
        rc = provisional_tasks(options, &provisional, error);
    if (rc)
        return rc;
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
    const char *restore;
    rc = dray__queue_open_saved(queue, options->restore, &restore, error);
    if (!rc)
        dray__put_string(w, restore);
    return rc;
}

/* again: the coordinator went away during a try before. */
static int open_once(dray_queue *queue, const char *name, const dray_queue_options *options,
                     bool again, int64_t deadline_ns, dray__reply *reply, dray_error *error)
{
    int rc = put_opening(queue, name, options, error);
    if (!rc)
        rc = (again ? dray__context_come_back : dray__channel_open_until)(
            queue->context, deadline_ns, &queue->channel, error);
    if (rc)
        return rc;
    int64_t left = deadline_ns - dray__now();
    dray__put_i64(&queue->out, left > 0 ? left : 0);
    rc = call_open(queue, &queue->out, dray__answer_deadline(deadline_ns), reply, error);
    if (rc == DRAY_ECLOSED && !dray__channel_ended(queue->channel)) {
        dray__channel_close(queue->channel);
        queue->channel = NULL;
    }
    return rc;
}

/* Opening says the same however often it is asked: where the coordinator dies meanwhile, the next
 * one is asked. None is waited for where it said that it ends. */
static int open_queue(dray_queue *queue, const char *name, const dray_queue_options *options,
                      dray_error *error)
{
    int64_t deadline = dray__context_deadline(queue->context, queue->timeout_ns);
    dray__reply reply;
    int rc = open_once(queue, name, options, false, deadline, &reply, error);
    while (rc == DRAY_ECLOSED && !queue->channel && !dray__context_ended(queue->context) &&
           dray__now() < deadline && !dray__interrupted()) {
        poll(NULL, 0, 1);
        rc = open_once(queue, name, options, true, deadline, &reply, error);
    }
    dray__queue_close_saved(queue);
    return rc ? rc : read_table(queue, &reply.payload, error);
}

static void queue_free(dray_queue *queue)
{
    dray__queue_close_saved(queue);
    dray__objects_close(queue);
    dray__distant_free(queue->distant);
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
    dray__releases_free(queue->releases);
    dray__arena_free(&queue->spare);
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
    queue->passed = -1;
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
