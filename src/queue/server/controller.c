/* Takes requests. Every handler either answers its request, keeps it as a waiter (waiters.c), or
 * returns an error, which is the answer. */
#include "queue/server/controller.h"

#include "base/arena.h"
#include "base/clock.h"
#include "base/error.h"
#include "base/hook.h"
#include "queue/server/waiters.h"

#include <errno.h>
#include <event2/event.h>
#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/random.h>
#include <unistd.h>

/* ---- reading --------------------------------------------------------------------------------- */

/* Reads the head of every request but OPEN: finds the client and its queue, and closes chunks. */
int dray__read_head(dray__controller *self, dray__request *request, dray__client **client,
                    uint64_t *drops_seen, dray_error *error)
{
    dray__reader *r = dray__request_payload(request);
    uint32_t id = dray__get_u32(r);
    uint64_t seen = dray__get_u64(r), member = 0;
    uint32_t count = dray__get_count(r, 8);
    const dray__session *session = dray__request_session(request);
    if (session)
        member = dray__session_member(session);
    if (r->failed)
        return dray__fail(error, DRAY_EFORMAT, "%s: short message", dray__message_of(request));
    dray__client *found = dray__idmap_get(&self->clients, id);
    if (!found || found->session != member)
        return dray__fail(error, DRAY_ENOENT, "%s: this session has no open queue number %u",
                          dray__message_of(request), id);
    dray__served *q = found->owner;
    uint16_t type = dray__request_type(request);
    dray__cancel_forgotten(q, found);
    if (type != DRAY__MSG_QUEUE_CHUNK)
        dray__promise_end(q->table, found);
    if (type != DRAY__MSG_QUEUE_CHUNK && type != DRAY__MSG_QUEUE_INSERT)
        found->asked_room = false;
    dray__collect(q); /* the client wrote its releases before this request */
    int rc = DRAY_OK;
    for (uint32_t i = 0; i < count; i++) {
        uint64_t chunk = dray__get_u64(r);
        if (!rc)
            rc = dray__chunk_close(q->table, found, chunk, error);
    }
    *client = found;
    *drops_seen = seen;
    if (!rc && dray__needs_journal(type))
        rc = dray__ledger_check(q->table->ledger, error);
    return rc;
}

int dray__finish_reading(const dray__request *request, dray_error *error)
{
    dray__request *r = (dray__request *)request;
    return dray__reader_finish(dray__request_payload(r), dray__message_of(request), error);
}

void dray__arm_timer(dray__controller *self)
{
    int64_t due = INT64_MAX, now = dray__now();
    for (dray__served *q = self->queues; q; q = q->next)
        due = q->hold_due < due ? q->hold_due : due;
    if (due == INT64_MAX)
        return;
    int64_t left = due > now ? (due - now) / 1000 + 1 : 0;
    struct timeval wait = {.tv_sec = left / 1000000, .tv_usec = left % 1000000};
    event_add(self->timer, &wait);
}

static void on_safe(evutil_socket_t fd, short what, void *user)
{
    (void)fd, (void)what;
    dray__served *q = user;
    dray__ledger_poll(q->table->ledger);
    if (q->bytes_gone || q->table->ledger->restored)
        dray__table_lose_bytes(q->table);
    q->bytes_gone = q->table->ledger->restored = false;
    dray__release_held(q);
    dray__pump_all(q->controller);
}

static void on_timer(evutil_socket_t fd, short what, void *user)
{
    (void)fd, (void)what;
    dray__controller *self = user;
    for (dray__served *q = self->queues; q; q = q->next) {
        dray__collect(q);
        q->hold_due = dray__table_expire(q->table, dray__now());
    }
    dray__pump_all(self);
    dray__arm_timer(self);
}

/* Does one step of each queue's work. New requests are answered before the next step. */
static void on_work(evutil_socket_t fd, short what, void *user)
{
    (void)fd, (void)what;
    dray__controller *self = user;
    bool more = false;
    for (dray__served *q = self->queues; q; q = q->next)
        more |= dray__work_on(q);
    dray__pump_all(self);
    if (more)
        dray__work_soon(self);
}

void dray__work_soon(dray__controller *self)
{
    struct timeval now = {0};
    event_add(self->work, &now);
}

/* ---- OPEN ------------------------------------------------------------------------------------ */

static dray__served *find_queue(const dray__controller *self, const char *name)
{
    for (dray__served *q = self->queues; q; q = q->next)
        if (strcmp(q->table->name, name) == 0)
            return q;
    return NULL;
}

/* Has the keeper drop the chunk, and drops this process's mapping, which the journal may have made.
 */
static void drop_chunk(void *user, uint32_t keeper, uint64_t chunk, uint64_t key)
{
    dray__controller *self = user;
    dray__mapping_drop(chunk);
    if (keeper)
        dray__keepers_drop(&self->keepers, keeper, chunk, key);
    else
        dray__drops_add(&self->drops, keeper, chunk, key);
}

/* Adds a queue with this table, and takes ownership of the table, also after a failure. */
static int serve(dray__controller *self, dray__table *table, dray_error *error)
{
    dray__served *q = calloc(1, sizeof *q);
    if (q && table->ledger) {
        q->safe =
            event_new(self->base, dray__ledger_fd(table->ledger), EV_READ | EV_PERSIST, on_safe, q);
    }
    if (!q || (table->ledger && (!q->safe || event_add(q->safe, NULL) < 0))) {
        if (q && q->safe)
            event_free(q->safe);
        free(q);
        dray__ledger_end_of(table);
        dray__table_free(table);
        return dray__nomem(error);
    }
    q->table = table;
    q->controller = self;
    if (table->ledger) {
        dray__ledger_reach(table->ledger, &self->keepers);
        table->ledger->gone = dray__bytes_gone;
        table->ledger->user = q;
    }
    dray__table_count_anew(table);
    q->claims.last = &q->claims.first;
    q->inserts.last = &q->inserts.first;
    q->waits.last = &q->waits.first;
    q->refills.last = &q->refills.first;
    q->gets.last = &q->gets.first;
    q->held.last = &q->held.first;
    q->hold_due = INT64_MAX;
    q->bytes = &dray__served_chunks;
    table->drop = drop_chunk;
    table->user = self;
    if (dray__store_use(q, error)) {
        if (q->safe)
            event_free(q->safe);
        free(q);
        dray__ledger_end_of(table);
        dray__table_free(table);
        return error->code;
    }
    q->next = self->queues;
    self->queues = q;
    return DRAY_OK;
}

/* Serves a queue that was read from a journal. A journal does not name the token of its queue. */
static int serve_again(dray__controller *self, dray__table *table, dray_error *error)
{
    int rc = serve(self, table, error);
    if (!rc)
        dray__quota_join(self->quotas, self->queues->table);
    return rc;
}

/* Returns the quota of a token; NULL when out of memory. */
static dray__quota *find_quota(dray__controller *self, const char *who)
{
    dray__quota **at = &self->quotas;
    while (*at && strcmp((*at)->who, who) != 0)
        at = &(*at)->next;
    if (!*at && (*at = calloc(1, sizeof **at)) != NULL) {
        snprintf((*at)->who, sizeof(*at)->who, "%s", who);
        (*at)->limits = *dray__coordinator_limits(self->coordinator);
    }
    return *at;
}

static int create(dray__controller *self, const dray__opening *o, dray__request *request,
                  dray__served **out, dray_error *error)
{
    dray__table *table = NULL;
    const dray__session *session = dray__request_session(request);
    dray__quota *quota = find_quota(self, session ? dray__session_token(session) : "master");
    if (!quota)
        return dray__nomem(error);
    uint64_t queues = dray__quota_used(quota).queues;
    if (queues >= quota->limits.queues)
        return dray__fail(error, DRAY_EFULL,
                          "queue %s: the token %s has %llu queues, the coordinator allows %llu",
                          o->name, quota->who, (unsigned long long)queues,
                          (unsigned long long)quota->limits.queues);
    int rc = dray__durable_new(self, o, request, &table, error);
    if (!rc)
        rc = serve(self, table, error);
    if (rc)
        return rc;
    dray__quota_join(quota, self->queues->table);
    *out = self->queues;
    return DRAY_OK;
}

static json_t *quotas_json(const dray__controller *self)
{
    json_t *list = json_array();
    for (const dray__quota *q = self->quotas; q; q = q->next) {
        dray__quota_use use = dray__quota_used(q);
        uint64_t sessions = dray__coordinator_sessions(self->coordinator, q->who);
        json_array_append_new(
            list, json_pack("{s:s, s:I, s:I, s:I, s:I, s:I, s:I, s:I, s:I, s:I, s:I}", "token",
                            q->who, "sessions", (json_int_t)sessions, "most_sessions",
                            (json_int_t)q->limits.sessions, "queues", (json_int_t)use.queues,
                            "most_queues", (json_int_t)q->limits.queues, "rows",
                            (json_int_t)use.rows, "most_rows", (json_int_t)q->limits.rows, "bytes",
                            (json_int_t)use.bytes, "most_bytes", (json_int_t)q->limits.bytes,
                            "table_bytes", (json_int_t)use.table_bytes, "most_table_bytes",
                            (json_int_t)q->limits.table_bytes));
    }
    return list;
}

/* Ends the former client of this identity: it has come back over another connection, even if the
 * end of the former one was not seen. */
static void supersede(dray__served *q, uint64_t identity)
{
    char reason[DRAY__REASON_MAX];
    for (dray__client *client = q->table->clients, *next; client; client = next) {
        next = client->next;
        if (!identity || client->identity != identity)
            continue;
        snprintf(reason, sizeof reason, "%.100s came back over another connection", client->name);
        dray__end_client(q->controller, client, true, reason);
    }
}

static const char *const *names_of(const dray__table *table, dray__arena *arena,
                                   const uint32_t *columns, uint32_t count)
{
    const char **names = dray__arena_get(arena, (count + 1u) * sizeof *names);
    for (uint32_t i = 0; names && i < count; i++)
        names[i] = table->columns[columns[i]].name;
    return names;
}

static void put_welcome(dray__writer *w, const dray__served *q, const dray__client *client,
                        bool paged)
{
    const dray__table *table = q->table;
    dray__arena arena = {0};
    dray__task_names tasks[DRAY__TASKS_MAX];
    for (uint32_t t = 0; t < table->task_count; t++) {
        const dray__qtask *task = &table->tasks[t];
        tasks[t] =
            (dray__task_names){.name = task->name,
                               .needs = names_of(table, &arena, task->needs, task->needs_count),
                               .writes = names_of(table, &arena, task->writes, task->writes_count),
                               .needs_count = task->needs_count,
                               .writes_count = task->writes_count};
        w->failed |= !tasks[t].needs || !tasks[t].writes;
    }
    dray__welcome welcome = {.client = client->id,
                             .durability = table->settings.durability,
                             .era = q->controller->keepers.era,
                             .paged = paged,
                             .backend = table->settings.backend,
                             .address = table->settings.backend_address,
                             .space = q->space,
                             .capacity_bytes = table->settings.capacity_bytes,
                             .tasks = tasks,
                             .task_count = table->task_count};
    if (!w->failed)
        dray__put_fields(w, &dray__welcome_fields, &welcome);
    dray__arena_free(&arena);
}

/* Makes a client of the queue and answers OPEN. */
static int welcome(dray__served *q, dray__request *request, uint64_t identity, dray_error *error)
{
    dray__controller *self = q->controller;
    dray__session *session = dray__request_session(request);
    uint64_t member = session ? dray__session_member(session) : 0;
    supersede(q, identity);
    if (q->table->client_ids < self->client_ids) /* the reader of a journal has a number, too */
        q->table->client_ids = self->client_ids;
    dray__client *client =
        dray__client_new(q->table, member, session ? dray__session_name(session) : "?", error);
    if (!client)
        return DRAY_ENOMEM;
    self->client_ids = q->table->client_ids;
    client->owner = q;
    client->identity = identity;
    client->channel = dray__request_channel(request);
    if (!dray__idmap_set(&self->clients, client->id, client)) {
        dray__client_end(q->table, client, false, "");
        return dray__nomem(error);
    }
    int fd = dray__request_take_fd(request, 0);
    bool paged = dray__page_add(q, client, fd);
    if (fd >= 0)
        close(fd);
    dray__writer_reset(&self->out);
    put_welcome(&self->out, q, client, paged);
    dray__answer(q, request, &self->out, 0);
    return DRAY_OK;
}

static void welcome_waiting(dray__served *q)
{
    dray__waiter *next;
    for (dray__waiter *w = q->controller->opens.first; w; w = next) {
        next = w->next;
        if (strcmp(w->name, q->table->name) != 0)
            continue;
        dray_error error;
        dray__request *request = w->request;
        uint64_t identity = w->identity;
        dray__waiter_free(w);
        if (welcome(q, request, identity, &error))
            dray__request_fail(request, &error);
    }
}

static int on_open(dray__controller *self, dray__request *request, dray_error *error)
{
    dray__waiter *w = calloc(1, sizeof *w);
    if (!w)
        return dray__nomem(error);
    w->request = request;
    dray__opening o = {0};
    int rc = dray__opening_read(dray__request_payload(request), &w->arena, &o, error);
    w->timeout_ns = o.timeout_ns;
    dray__served *q = rc ? NULL : find_queue(self, o.name);
    if (!rc && !q && o.task_count)
        rc = dray__store_settle(self, &o.settings, o.name, error);
    if (!rc && !q && !o.task_count) {
        w->name = o.name;
        w->identity = o.identity;
        return dray__waiter_keep(w, &self->opens);
    }
    bool fresh = !rc && !q;
    if (fresh)
        rc = create(self, &o, request, &q, error);
    else if (!rc && o.task_count)
        rc = dray__table_same(q->table, o.tasks, o.task_count, &o.settings, error);
    uint64_t identity = o.identity;
    dray__waiter_free(w);
    if (!rc)
        rc = welcome(q, request, identity, error);
    if (!rc && fresh)
        welcome_waiting(q);
    return rc;
}

/* ---- the other requests ---------------------------------------------------------------------- */

static int check_insert(dray__waiter *w, dray_error *error)
{
    (void)error;
    w->timeout_ns = w->rows.timeout_ns;
    return DRAY_OK;
}

/* Returns true when the insert must wait for earlier requests. The exceptions are refills, and rows
 * whose memory was promised by ROOM. */
static bool insert_waits(dray__waiter *w)
{
    const dray__waiter *before = w->queue->inserts.first;
    bool next = w->rows.refill || (w->client->asked_room && !(before && before->insertion));
    w->client->asked_room = false;
    return before && !next;
}

static int check_room(dray__waiter *w, dray_error *error)
{
    w->timeout_ns = w->rows.timeout_ns;
    return w->rows.bytes
               ? DRAY_OK
               : dray__fail(error, DRAY_EINVALID, "room for at least a byte expected, found 0");
}

static bool room_waits(dray__waiter *w)
{
    return w->queue->inserts.first != NULL;
}

static int check_claim(dray__waiter *w, dray_error *error)
{
    w->timeout_ns = w->claim.timeout_ns;
    for (uint32_t i = 0; i < w->claim.count; i++)
        if (!*w->claim.choices[i].want.partition)
            w->claim.choices[i].want.partition = NULL;
    if (w->claim.count && w->claim.count <= DRAY__TASKS_MAX)
        return DRAY_OK;
    return dray__fail(error, DRAY_EINVALID, "claim: 1 to %u choices, found %u", DRAY__TASKS_MAX,
                      w->claim.count);
}

/* Does the commit of a NEXT. It counts even when the claim that follows it fails. */
static int check_next(dray__waiter *w, dray_error *error)
{
    dray__table *table = w->queue->table;
    uint64_t before = dray__ledger_added(table->ledger);
    int rc = check_claim(w, error);
    if (!rc)
        rc = dray__claim_commit(table, w->client, w->commit.ticket, w->commit.generation,
                                &w->commit.outputs, error);
    if (rc)
        return rc;
    w->committed = true;
    w->record = dray__own_record(table->ledger, before);
    return DRAY_OK;
}

static int check_wait(dray__waiter *w, dray_error *error)
{
    w->timeout_ns = w->awaited.timeout_ns;
    if (w->awaited.task == DRAY__NONE || w->awaited.task < w->queue->table->task_count)
        return DRAY_OK;
    return dray__fail(error, DRAY_EINVALID, "wait: there is no task number %u", w->awaited.task);
}

static int check_refill(dray__waiter *w, dray_error *error)
{
    (void)w, (void)error;
    return DRAY_OK;
}

static int check_get(dray__waiter *w, dray_error *error)
{
    uint32_t named = w->get.named.key_count | w->get.named.at_count; /* one of them is 0 */
    w->timeout_ns = w->get.timeout_ns;
    if (named > DRAY_GET_ROWS_MAX)
        return dray__fail(error, DRAY_EINVALID,
                          "get of %s: at most %u named rows expected, found %u (get them in parts, "
                          "or all rows)",
                          w->get.partition, DRAY_GET_ROWS_MAX, named);
    if (*w->get.task || dray__request_type(w->request) != DRAY__MSG_QUEUE_TAKE)
        return DRAY_OK;
    return dray__fail(error, DRAY_EINVALID, "take of %s: a task expected, found none",
                      w->get.partition);
}

static const dray__fields insert_fields =
    DRAY__FIELDS(dray__waiter, DRAY__FIELD_STRUCT(dray__waiter, rows, dray__insert_fields));
static const dray__fields room_fields =
    DRAY__FIELDS(dray__waiter, DRAY__FIELD_STRUCT(dray__waiter, rows, dray__room_fields));
static const dray__fields claim_fields =
    DRAY__FIELDS(dray__waiter, DRAY__FIELD_STRUCT(dray__waiter, claim, dray__claiming_fields));
static const dray__fields next_fields =
    DRAY__FIELDS(dray__waiter, DRAY__FIELD_STRUCT(dray__waiter, commit, dray__committing_fields),
                 DRAY__FIELD_STRUCT(dray__waiter, claim, dray__claiming_fields));
static const dray__fields wait_fields =
    DRAY__FIELDS(dray__waiter, DRAY__FIELD_STRUCT(dray__waiter, awaited, dray__awaited_fields));
static const dray__fields get_fields =
    DRAY__FIELDS(dray__waiter, DRAY__FIELD_STRUCT(dray__waiter, get, dray__getting_fields));
static const dray__fields refill_fields =
    DRAY__FIELDS(dray__waiter, DRAY__NUMBERS(dray__waiter, timeout_ns));

/* Requests that wait where they cannot be answered at once. */
static const struct kept {
    uint16_t type;
    const dray__fields *fields;
    int (*check)(dray__waiter *w, dray_error *error);
    bool (*waits)(dray__waiter *w); /* whether earlier requests must be served first; NULL when it
                                     * is tried at once */
    dray__try_fn attempt;
    size_t line; /* of dray__served */
} kept[] = {
    {DRAY__MSG_QUEUE_INSERT, &insert_fields, check_insert, insert_waits, dray__try_insert,
     offsetof(dray__served, inserts)},
    {DRAY__MSG_QUEUE_ROOM, &room_fields, check_room, room_waits, dray__try_insert,
     offsetof(dray__served, inserts)},
    {DRAY__MSG_QUEUE_CLAIM, &claim_fields, check_claim, NULL, dray__try_claim,
     offsetof(dray__served, claims)},
    {DRAY__MSG_QUEUE_NEXT, &next_fields, check_next, NULL, dray__try_claim,
     offsetof(dray__served, claims)},
    {DRAY__MSG_QUEUE_WAIT, &wait_fields, check_wait, NULL, dray__try_wait,
     offsetof(dray__served, waits)},
    {DRAY__MSG_QUEUE_GET, &get_fields, check_get, NULL, dray__try_get,
     offsetof(dray__served, gets)},
    {DRAY__MSG_QUEUE_TAKE, &get_fields, check_get, NULL, dray__try_get,
     offsetof(dray__served, gets)},
    {DRAY__MSG_QUEUE_REFILL, &refill_fields, check_refill, NULL, dray__try_refill,
     offsetof(dray__served, refills)},
};

static const struct kept *find_kept(uint16_t type)
{
    for (size_t i = 0; i < sizeof kept / sizeof *kept; i++)
        if (kept[i].type == type)
            return &kept[i];
    return NULL;
}

static int settle_or_keep(dray__controller *self, dray__request *request, const struct kept *kind,
                          dray_error *error)
{
    dray__waiter *w = NULL;
    int rc = dray__waiter_new(self, request, &w, error);
    if (rc)
        return rc;
    dray__get_fields(dray__request_payload(request), &w->arena, kind->fields, w);
    rc = dray__finish_reading(request, error);
    if (!rc)
        rc = kind->check(w, error);
    if (rc) {
        dray__waiter_free(w);
        return rc;
    }
    if (!(kind->waits && kind->waits(w)) && dray__waiter_settle(w, kind->attempt))
        return DRAY_OK;
    return dray__waiter_keep(w, (dray__line *)(void *)((char *)w->queue + kind->line));
}

void dray__end_client(dray__controller *self, dray__client *client, bool died, const char *reason)
{
    dray__served *q = client->owner;
    dray__cancel_waiting(q, client, DRAY__NONE);
    dray__idmap_remove(&self->clients, client->id);
    uint32_t id = client->id;
    dray__page_remove(q, client);
    dray__client_end(q->table, client, died, reason);
    if (died)
        q->bytes->died(q, id);
}

static void handle(void *user, dray__request *request)
{
    dray__controller *self = user;
    dray_error error;
    uint16_t type = dray__request_type(request);
    const struct kept *kind = find_kept(type);
    dray__hook_step("handling");
    int rc;
    if (type >= DRAY__MSG_QUEUE_KEEPER_JOIN && type <= DRAY__MSG_QUEUE_KEEPER_FIND)
        rc = dray__keepers_request(&self->keepers, request, &error);
    else if (type == DRAY__MSG_QUEUE_OPEN)
        rc = on_open(self, request, &error);
    else
        rc = kind ? settle_or_keep(self, request, kind, &error) : dray__step(self, request, &error);
    if (rc) {
        dray__refusals_add(&self->refusals, type, rc);
        dray__request_fail(request, &error);
    }
    dray__hook_step("handled");
    dray__pump_all(self);
    dray__sweep_soon(self);
}

static void expired(void *user, dray__request *request, int channel_gone)
{
    dray__controller *self = user;
    dray_error error;
    dray__waiter *w = dray__request_data(request);
    if (dray__request_type(request) == DRAY__MSG_QUEUE_KEEPER_WAIT) {
        dray__keepers_expired(&self->keepers, request);
        return;
    }
    if (channel_gone)
        dray__fail(&error, DRAY_ECLOSED, "the client is gone");
    else
        dray__waiter_timed_out(w, &error);
    dray__waiter_fail(w, &error);
    event_active(self->timer, EV_TIMEOUT, 0); /* others may go on, but not in this callback */
}

static void channel_ended(void *user, uint64_t channel)
{
    dray__controller *self = user;
    for (dray__served *q = self->queues; q; q = q->next) {
        for (dray__client *client = q->table->clients; client; client = client->next) {
            if (client->channel != channel)
                continue;
            char reason[DRAY__REASON_MAX];
            snprintf(reason, sizeof reason, "connection of %.100s broke", client->name);
            dray__end_client(self, client, true, reason);
            event_active(self->timer, EV_TIMEOUT, 0); /* others may go on, not in this callback */
            return;                                   /* a connection has one client */
        }
    }
}

static void keeper_lost(void *user, uint32_t keeper)
{
    dray__controller *self = user;
    for (dray__served *q = self->queues; q; q = q->next) {
        dray__chunks_lose(q->table, keeper);
        dray__ledger_restore(q->table->ledger);
        dray__table_lose_bytes(q->table);
    }
}

static void session_ended(void *user, dray__session *session)
{
    dray__controller *self = user;
    uint64_t member = dray__session_member(session);
    char reason[DRAY__REASON_MAX];
    snprintf(reason, sizeof reason, "session of %s (pid %lld) ended", dray__session_name(session),
             (long long)dray__session_pid(session));
    for (dray__served *q = self->queues; q; q = q->next) {
        dray__client *next;
        for (dray__client *client = q->table->clients; client; client = next) {
            next = client->next;
            if (client->session == member)
                dray__end_client(self, client, true, reason);
        }
    }
    dray__keepers_ended(&self->keepers, member, keeper_lost, self);
    dray__pump_all(self);
}

static void status(void *user, json_t *object)
{
    dray__controller *self = user;
    json_t *queues = json_array();
    for (dray__served *q = self->queues; q; q = q->next) {
        dray__collect(q);
        dray__waiting waiting = dray__count_waiting(q);
        json_array_append_new(queues, dray__table_json(q->table, &waiting));
    }
    json_object_set_new(object, "queues", queues);
    json_object_set_new(object, "quotas", quotas_json(self));
    json_object_set_new(object, "queue_refusals", dray__refusals_json(&self->refusals));
}

static void controller_free(void *user)
{
    dray__controller *self = user;
    while (self->queues) {
        dray__served *q = self->queues;
        self->queues = q->next;
        if (q->safe)
            event_free(q->safe);
        while (q->held.first) {
            dray_error error;
            dray__fail(&error, DRAY_ECLOSED, "the coordinator ends");
            dray__waiter_fail(q->held.first, &error);
        }
        dray__pages_free(q);
        q->table->drop = NULL; /* the keeper outlives the controller */
        dray__ledger_end_of(q->table);
        dray__table_free(q->table);
        dray__cleaner_free(q->cleaner);
        free(q);
    }
    for (dray__quota *quota; (quota = self->quotas) != NULL;) {
        self->quotas = quota->next;
        free(quota);
    }
    if (self->timer)
        event_free(self->timer);
    if (self->work)
        event_free(self->work);
    if (self->sweep)
        event_free(self->sweep);
    dray__idmap_free(&self->clients);
    dray__drops_free(&self->drops);
    dray__keepers_free(&self->keepers);
    dray__writer_free(&self->out);
    dray__stores_free(self->cleaned);
    dray__store_list_free(self);
    if (self->folder_fd >= 0)
        close(self->folder_fd);
    if (self->lock_fd >= 0)
        close(self->lock_fd);
    free(self->folder);
    free(self->keeper_path);
    free(self);
}

int dray__queue_add(dray__coordinator *coordinator, struct event_base *base,
                    const char *keeper_path, const char *folder, const char *const *stores,
                    dray_error *error)
{
    static const dray__service service = {.name = "queue",
                                          .first = 0x0300,
                                          .last = 0x03FF,
                                          .handle = handle,
                                          .expired = expired,
                                          .channel_ended = channel_ended,
                                          .session_ended = session_ended,
                                          .status = status,
                                          .free = controller_free};
    dray__controller *self = calloc(1, sizeof *self);
    if (!self)
        return dray__nomem(error);
    self->base = self->drops.base = base;
    self->folder_fd = self->lock_fd = -1;
    self->coordinator = coordinator;
    self->opens.last = &self->opens.first;
    self->timer = evtimer_new(base, on_timer, self);
    self->work = evtimer_new(base, on_work, self);
    int rc = dray__keepers_init(&self->keepers, coordinator, error);
    if (!rc)
        rc = dray__store_list(self, stores, error);
    if (!rc)
        rc = dray__sweep_init(self, error);
    if (!rc && (!self->timer || !self->work || !find_quota(self, "master")))
        rc = dray__nomem(error);
    if (!rc && folder && getrandom(&self->keepers.era, sizeof self->keepers.era, 0) < 0)
        rc = dray__fail_errno(error, errno, "getrandom");
    self->keepers.era |= folder != NULL;
    if (!rc && keeper_path && asprintf(&self->drops.address, "unix:%s", keeper_path) < 0) {
        self->drops.address = NULL;
        rc = dray__nomem(error);
    }
    if (!rc && ((folder && !(self->folder = strdup(folder))) ||
                (keeper_path && !(self->keeper_path = strdup(keeper_path)))))
        rc = dray__nomem(error);
    if (!rc && folder)
        rc = dray__durable_recover(self, serve_again, error);
    if (!rc)
        rc = dray__coordinator_add(coordinator, &service, self, error);
    if (rc)
        controller_free(self);
    return rc;
}
