/* The client's end of a queue: opens it, sends requests to its controller, and attaches again after
 * the controller was restarted. */
#include "queue/client/client.h"

#include "base/arena.h"
#include "base/clock.h"
#include "base/error.h"
#include "base/hash.h"
#include "base/hook.h"
#include "base/options.h"
#include "base/words.h"
#include "control/context.h"
#include "queue/client/client.h"

#include <dray/trace.h>
#include <poll.h>
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
    dray__storage_put_closed(&queue->holder.storage, w);
    queue->head = w->size;
    queue->known_at = 0;
    return w;
}

/* Prepares the same request for a controller that the client attached to again, and which has sent
 * it no columns yet. */
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

/* Keeps a copy of the request, because sending a message empties it. */
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

/* Returns true when chunks may have been given back in an answer that was lost, or that was
 * replaced by an error after the request was done. False while another answer is outstanding, which
 * may have them. */
static bool had_chunks(const dray_queue *queue, uint16_t type, int rc)
{
    return type == DRAY__MSG_QUEUE_CHUNK && dray__may_hold(rc) && !queue->started;
}

static int ask_once(dray_queue *queue, uint16_t type, int64_t deadline_ns, dray__reply *reply,
                    dray_error *error)
{
    dray__hook_step("asking");
    int rc = dray__call(queue->channel, type, &queue->out, &queue->passed, queue->passed >= 0,
                        dray__answer_deadline(deadline_ns), reply, error);
    dray__hook_step("answered");
    queue->unanswered = rc == DRAY_ETIMEDOUT || rc == DRAY_ECLOSED;
    for (uint32_t i = 0; !rc && i < reply->fd_count; i++)
        close(reply->fds[i]); /* no answer has descriptors */
    if (rc)                   /* closed chunks are reported again with the next message */
        dray__storage_untell(&queue->holder.storage, had_chunks(queue, type, rc));
    return rc;
}

/* Returns false for messages that name chunks: their callers write them again, because the chunks
 * are new ones then. A queue that is being closed is not attached again. */
static bool can_repeat(uint16_t type)
{
    return type != DRAY__MSG_QUEUE_INSERT && type != DRAY__MSG_QUEUE_CHUNK &&
           type != DRAY__MSG_QUEUE_ROOM && type != DRAY__MSG_QUEUE_CLOSE &&
           type != DRAY__MSG_QUEUE_PUT && type != DRAY__MSG_QUEUE_TAKE;
}

int dray__queue_call(dray_queue *queue, uint16_t type, int64_t deadline_ns, dray__reply *reply,
                     dray_error *error)
{
    dray__reply ignored = {0};
    reply = reply ? reply : &ignored;
    int rc = keep_sent(queue, error);
    if (!rc)
        rc = ask_once(queue, type, deadline_ns, reply, error);
    while (rc == DRAY_ECLOSED && can_repeat(type) && dray__queue_come_back(queue) == DRAY_OK) {
        rc = begin_again(queue, error);
        if (!rc)
            rc = ask_once(queue, type, deadline_ns, reply, error);
    }
    return rc;
}

bool dray__may_count(int rc)
{
    return rc == DRAY_ETIMEDOUT || rc == DRAY_ECLOSED || rc == DRAY_EFULL || rc == DRAY_ESYS ||
           rc == DRAY_ENOMEM;
}

bool dray__may_hold(int rc)
{
    return rc == DRAY_ETIMEDOUT || rc == DRAY_EFULL || rc == DRAY_ESYS || rc == DRAY_ENOMEM ||
           rc == DRAY_EDEAD;
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
        dray__storage_untell(&queue->holder.storage, false);
}

void dray__queue_let_go(dray_queue *queue, uint32_t ticket, bool committed)
{
    uint32_t frees = DRAY__WANT_BYTES | (committed ? 0 : DRAY__WANT_ROWS);
    bool ours = queue->holder.storage.pid == dray__channel_pid(); /* a forked child has the page */
    /* A commit that is still under way must be handled first. */
    bool in_turn = !queue->unanswered && !queue->committing;
    if (!ours || !in_turn || !dray__releases_write(queue->releases, ticket, frees))
        dray__queue_release(queue, ticket);
}

int dray__queue_check_fork(const dray_queue *queue, dray_error *error)
{
    if (queue->holder.storage.pid == dray__channel_pid())
        return DRAY_OK;
    return dray__fail(error, DRAY_ECLOSED, "queue %s belongs to process %d, this is its fork",
                      queue->name, (int)queue->holder.storage.pid);
}

void dray__queue_read_dropped(dray_queue *queue, dray__reader *r)
{
    uint64_t drops = dray__get_u64(r);
    bool all = dray__get_u8(r) != 0;
    uint32_t count = dray__get_count(r, 8);
    for (uint32_t i = 0; i < count; i++) {
        uint64_t id = dray__get_u64(r);
        dray__mapping_drop(id);
        dray__storage_dropped(&queue->holder.storage, id);
    }
    if (r->failed)
        return;
    if (all)
        dray__mapping_drop_unused();
    queue->drops_seen = drops;
}

int dray__queue_command(dray_queue *queue, uint16_t type, const dray__fields *of,
                        const void *message, dray__reply *reply, dray_error *error)
{
    dray__writer *w = dray__queue_begin(queue);
    if (of)
        dray__put_fields(w, of, message);
    if (dray__counts_once(type))
        dray__put_u32(w, dray__queue_ticket(queue));
    DRAY__TRACE(wait_briefly(DRAY_CAUSE_CONTROLLER, "queue request", -1));
    int rc = dray__queue_call(
        queue, type, dray__context_deadline(queue->context, queue->timeout_ns), reply, error);
    DRAY__TRACE(leave());
    return rc;
}

/* ---- the meaning of columns' and keys' numbers ----------------------------------------------- */

/* Grows the array of columns up to this index. */
static int grow_columns(dray__names *names, uint32_t index, dray_error *error)
{
    if (index >= DRAY__COLUMNS_MAX)
        return dray__fail(error, DRAY_EFORMAT, "column number %u: at most %u", index,
                          DRAY__COLUMNS_MAX);
    while (names->column_count <= index) {
        dray__known_column *column = dray__append(&names->columns, sizeof *column,
                                                  names->column_count, &names->column_capacity);
        if (!column)
            return dray__nomem(error);
        *column = (dray__known_column){0};
        names->column_count++;
    }
    return DRAY_OK;
}

int dray__names_read(dray__names *names, dray__reader *r, dray_error *error)
{
    dray__news news;
    dray__get_fields(r, &names->arena, &dray__news_fields, &news);
    int rc = r->failed ? dray__reader_finish(r, "columns", error) : DRAY_OK;
    for (uint32_t i = 0; i < news.column_count && !rc; i++) {
        const dray__known_column *column = &news.columns[i];
        rc = dray__spec_check(&column->spec, column->name, error);
        if (!rc)
            rc = grow_columns(names, column->index, error);
        if (rc)
            break;
        names->columns[column->index] = *column;
        names->columns_known++;
    }
    for (uint32_t i = 0; i < news.key_count && !rc; i++) {
        const char **key =
            dray__append(&names->keys, sizeof *key, names->key_count, &names->key_capacity);
        if (!key)
            return dray__nomem(error);
        *key = news.keys[i];
        names->key_count++;
    }
    return rc;
}

/* Forgets which names the numbers stand for. The names stay allocated. */
static void names_retire(dray__names *names)
{
    dray__names *past = malloc(sizeof *past);
    if (past)
        *past = *names; /* without memory they are leaked, but stay valid */
    *names = (dray__names){.past = past};
}

void dray__names_free(dray__names *names)
{
    if (names->past)
        dray__names_free(names->past);
    free(names->past);
    dray__arena_free(&names->arena);
    free(names->columns);
    free(names->keys);
    *names = (dray__names){0};
}

/* ---- opening --------------------------------------------------------------------------------- */

static int check_names(const char *const *names, uint32_t count, const char *what,
                       dray_error *error)
{
    int rc = DRAY_OK;
    for (uint32_t i = 0; !rc && i < count; i++)
        rc = dray__name_check(names[i], what, error);
    return rc;
}

static int make_tasks(dray_queue *queue, const dray_queue_options *options,
                      const dray__task_names **out, dray_error *error)
{
    dray__task_names *tasks =
        dray__arena_get(&queue->opened, (options->task_count + (size_t)1) * sizeof *tasks);
    int rc = tasks ? DRAY_OK : dray__nomem(error);
    for (uint32_t t = 0; !rc && t < options->task_count; t++) {
        const dray_queue_task *task = &options->tasks[t];
        tasks[t] = (dray__task_names){task->name, task->needs, task->writes, task->needs_count,
                                      task->writes_count};
        rc = check_names(&task->name, 1, "task", error);
        if (!rc)
            rc = check_names(task->needs, task->needs_count, "column", error);
        if (!rc)
            rc = check_names(task->writes, task->writes_count, "column", error);
    }
    *out = tasks;
    return rc;
}

/* Converts the names of provisional tasks to bits, in the order of the tasks. */
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

/* Sends the message with a new page of releases; the previous page belongs to an earlier
 * controller.
 */
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

/* Reads OPEN's answer. */
static int read_welcome(dray_queue *queue, dray__reader *r, dray__arena *arena, dray__welcome *out,
                        dray_error *error)
{
    dray__get_fields(r, arena, &dray__welcome_fields, out);
    int rc = dray__reader_finish(r, "QUEUE_OPEN", error);
    if (rc)
        return rc;
    queue->id = out->client;
    queue->era = out->era;
    if (!out->paged) { /* the controller does not read them */
        dray__releases_free(queue->releases);
        queue->releases = NULL;
    }
    return DRAY_OK;
}

static int open_bytes(dray_queue *queue, const dray__welcome *welcome, dray_error *error)
{
    queue->holder.owner = queue->id;
    queue->holder.storage.capacity = welcome->capacity_bytes;
    return dray__holder_open(&queue->holder, welcome->backend, welcome->address, welcome->space,
                             error);
}

static int read_table(dray_queue *queue, dray__reader *r, dray_error *error)
{
    dray__welcome welcome;
    int rc = read_welcome(queue, r, &queue->opened, &welcome, error);
    if (rc)
        return rc;
    queue->durability = welcome.durability;
    queue->tasks = welcome.tasks;
    queue->task_count = welcome.task_count;
    return open_bytes(queue, &welcome, error);
}

/* Makes the keeper forget chunks that were reported to the old controller, but put to the keeper
 * after the new controller had reset it. */
static void forget_chunks(dray_queue *queue)
{
    dray__chunk_key *pairs = calloc(queue->holder.storage.count + 1, sizeof *pairs);
    uint32_t count = 0;
    for (const dray__written *chunk = queue->holder.storage.chunks; pairs && chunk;
         chunk = chunk->next)
        pairs[count++] = (dray__chunk_key){chunk->id, chunk->key};
    if (count)
        dray__keeper_forget(&queue->holder.keeper, pairs, count, NULL);
    free(pairs);
}

/* Forgets the controller's state. When the next controller is the same one, it still needs the
 * committed bytes in this client's chunks, and drops the other chunks itself. */
static void forget_controller(dray_queue *queue, bool same)
{
    dray__keeper_link_break(&queue->holder.keeper);
    if (!same) {
        forget_chunks(queue);
        dray__distant_free(queue->holder.distant); /* keepers have other numbers now */
        queue->holder.distant = NULL;
    }
    dray__storage_lose(&queue->holder.storage);
    dray__mapping_drop_unused();
    names_retire(&queue->names);
    queue->drops_seen = 0;
    queue->holder.keeper_known = false;
}

/* Attaches to the queue of this name as a new client: chunks, claims and the numbers of columns are
 * no longer valid. */
static int enter_again(dray_queue *queue, int64_t deadline_ns, dray_error *error)
{
    dray__channel *channel;
    int rc = dray__context_come_back(queue->context, deadline_ns, &channel, error);
    if (rc)
        return rc;
    dray__channel_close(queue->channel);
    queue->channel = channel;
    queue->start_lost = queue->started != 0;
    dray__reply reply;
    dray__writer w = {0};
    int64_t left = deadline_ns - dray__now();
    const dray__opening opening = {
        .name = queue->name, .identity = queue->identity, .timeout_ns = left > 0 ? left : 0};
    dray__put_fields(&w, &dray__opening_fields, &opening);
    rc = call_open(queue, &w, deadline_ns, &reply, error);
    dray__writer_free(&w);
    if (rc)
        return rc;
    uint32_t former = queue->id;
    uint64_t before = queue->era;
    dray__arena arena = {0};
    dray__welcome welcome; /* the queue exists only if it had a journal */
    rc = read_welcome(queue, &reply.payload, &arena, &welcome, error);
    if (!rc) {
        bool same = queue->era == before; /* the same controller keeps or drops this client's chunks
                                           * itself */
        forget_controller(queue, same);
        if (!same) /* chunks that were put after the new controller had reset the keeper */
            dray__holder_sweep(&queue->holder, former);
        rc = open_bytes(queue, &welcome, error);
    }
    dray__arena_free(&arena);
    return rc;
}

int dray__queue_come_back(dray_queue *queue)
{
    dray_error error;
    int64_t deadline_ns = dray__context_deadline(queue->context, queue->timeout_ns);
    if (queue->durability != DRAY_DURABILITY_JOURNAL || queue->holder.storage.pid != getpid())
        return DRAY_ECLOSED;
    int rc = enter_again(queue, deadline_ns, &error);
    while (rc == DRAY_ECLOSED && dray__now() < deadline_ns &&
           !dray__interrupted()) /* the controller died again meanwhile */
        rc = enter_again(queue, deadline_ns, &error);
    return rc;
}

static int make_opening(dray_queue *queue, const char *name, const dray_queue_options *options,
                        dray__opening *out, dray_error *error)
{
    *out = (dray__opening){.name = name,
                           .task_count = options->task_count,
                           .identity = queue->identity,
                           .settings = {.capacity_rows = options->capacity_rows,
                                        .capacity_bytes = options->capacity_bytes,
                                        .max_attempts = options->max_attempts,
                                        .on_loss = options->on_loss,
                                        .batch_rows = options->batch_rows,
                                        .open_batches = options->open_batches,
                                        .checkpoint_batches = options->checkpoint_batches,
                                        .row_bytes = options->row_bytes,
                                        .durability = options->durability,
                                        .backend = options->backend,
                                        .backend_address = options->backend_address}};
    int rc = make_tasks(queue, options, &out->tasks, error);
    if (!rc)
        rc = provisional_tasks(options, &out->settings.provisional, error);
    return rc ? rc : dray__queue_open_saved(queue, options->restore, &out->restore, error);
}

/* again: the coordinator died during an earlier attempt. */
static int open_once(dray_queue *queue, const char *name, const dray_queue_options *options,
                     bool again, int64_t deadline_ns, dray__reply *reply, dray_error *error)
{
    dray__opening opening;
    int rc = make_opening(queue, name, options, &opening, error);
    if (!rc && again)
        rc = dray__context_come_back(queue->context, deadline_ns, &queue->channel, error);
    else if (!rc)
        rc = dray__channel_open_until(queue->context, dray__answer_deadline(deadline_ns),
                                      &queue->channel, error);
    if (rc)
        return rc;
    int64_t left = deadline_ns - dray__now();
    opening.timeout_ns = left > 0 ? left : 0;
    dray__writer_reset(&queue->out);
    dray__put_fields(&queue->out, &dray__opening_fields, &opening);
    rc = call_open(queue, &queue->out, dray__answer_deadline(deadline_ns), reply, error);
    if (rc == DRAY_ECLOSED && !dray__channel_ended(queue->channel)) {
        dray__channel_close(queue->channel);
        queue->channel = NULL;
    }
    return rc;
}

/* Opens the queue. OPEN is idempotent, so that it is sent to the next coordinator when this one
 * dies meanwhile. When the coordinator announced its end, the client does not wait for a next one.
 */
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
    if (queue->holder.storage.pid == getpid())
        dray__mapping_drop_unused(); /* there may be no other queue that learns of dropped chunks */
    dray__holder_free(&queue->holder);
    dray__channel_close(queue->channel);
    dray__names_free(&queue->names);
    dray__arena_free(&queue->opened);
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
    int rc = DRAY__OPTIONS_READ(dray_queue_options, timeout_ns, &o, options, error);
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
    queue->passed = -1;
    queue->name = strdup(name);
    int64_t patience = dray__context_deadline(context, queue->timeout_ns) - dray__now();
    rc = dray__holder_init(&queue->holder, &dray__queue_uses, queue, dray__context_keeper(context),
                           patience, error);
    queue->holder.queue = queue->name;
    if (!rc && !queue->name)
        rc = dray__nomem(error);
    if (!rc)
        rc = open_queue(queue, name, &o, error);
    if (rc)
        queue_free(queue);
    else
        *out = queue;
    return rc;
}

void dray_queue_close(dray_queue *queue)
{
    if (!queue)
        return;
    if (queue->holder.kind->close)
        queue->holder.kind->close(&queue->holder);
    dray__queue_command(queue, DRAY__MSG_QUEUE_CLOSE, NULL, NULL, NULL, NULL);
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
