/* Keeps, tries and answers requests that wait. */
#include "queue/server/waiters.h"

#include "base/clock.h"
#include "base/error.h"
#include "base/hook.h"
#include "control/frame.h"
#include "queue/table/keyed.h"
#include "queue/table/table_inside.h"

#include <dray/trace.h>
#include <stdlib.h>

const char *dray__message_of(const dray__request *request)
{
    return dray__message_name(dray__request_type(request));
}

static void line_add(dray__line *at, dray__waiter *w)
{
    w->line = at;
    w->next = NULL;
    w->link = at->last;
    *at->last = w;
    at->last = &w->next;
}

/* Adds a waiter at the beginning of the line. */
static void line_add_first(dray__line *at, dray__waiter *w)
{
    w->line = at;
    w->next = at->first;
    w->link = &at->first;
    if (at->first)
        at->first->link = &w->next;
    else
        at->last = &w->next;
    at->first = w;
}

static void line_remove(dray__waiter *w)
{
    if (!w->line)
        return;
    *w->link = w->next;
    if (w->next)
        w->next->link = w->link;
    else
        w->line->last = w->link;
    if (w->queue && w->line == &w->queue->inserts)
        w->queue->table->freed = true; /* so that the requests behind it are tried */
    w->line = NULL;
}

void dray__waiter_free(dray__waiter *w)
{
    if (w->insertion)
        dray__insert_abort(w->queue->table, w->insertion);
    free(w->insertion);
    line_remove(w);
    dray__arena_free(&w->arena);
    dray__writer_free(&w->answer);
    free(w);
}

bool dray__needs_journal(uint16_t type)
{
    return type != DRAY__MSG_QUEUE_CLAIM && type != DRAY__MSG_QUEUE_REFILL &&
           type != DRAY__MSG_QUEUE_CHUNK && type != DRAY__MSG_QUEUE_ROOM &&
           type != DRAY__MSG_QUEUE_STATUS && type != DRAY__MSG_QUEUE_HOLD &&
           type != DRAY__MSG_QUEUE_RELEASE && type != DRAY__MSG_QUEUE_SPLIT &&
           type != DRAY__MSG_QUEUE_CLOSE && type != DRAY__MSG_QUEUE_GET;
}

uint64_t dray__own_record(const dray__ledger *ledger, uint64_t before)
{
    uint64_t last = dray__ledger_added(ledger);
    return last > before ? last : 0;
}

void dray__answer(dray__served *q, dray__request *request, dray__writer *out, uint64_t record)
{
    uint16_t type = dray__request_type(request);
    const dray__ledger *ledger = q->table->ledger;
    uint64_t number = dray__needs_journal(type) ? dray__ledger_pending(ledger) : 0;
    if (type == DRAY__MSG_QUEUE_CHECKPOINT)
        number = dray__journal_added(ledger->journal);
    dray_error error;
    if (dray__needs_journal(type) && dray__ledger_check(ledger, &error)) {
        dray__request_fail(request, &error);
        return;
    }
    dray__waiter *w = number ? calloc(1, sizeof *w) : NULL;
    if (!w) {
        if (number) {
            dray__nomem(&error);
            dray__request_fail(request, &error);
        } else {
            dray__request_reply(request, out, NULL, 0);
        }
        return;
    }
    w->request = request;
    w->queue = q;
    w->number = number;
    w->record = record;
    dray__put_bytes(&w->answer, out->data, out->size);
    w->answer.failed |= out->failed;
    dray__request_set_data(request, w);
    line_add(&q->held, w);
}

/* Counts how long the request waited, whether it succeeded or not. */
static void count_wait(const dray__waiter *w)
{
    uint32_t kind = DRAY__WAIT_INSERT;
    if (!w->queue || w->number || w->get.partition)
        return;
    if (w->claim.choices && w->claim.choices[0].want.task >= w->queue->table->task_count)
        return; /* the task does not exist */
    if (w->claim.choices)
        kind = DRAY__WAIT_CLAIM + w->claim.choices[0].want.task;
    else if (dray__request_type(w->request) == DRAY__MSG_QUEUE_WAIT)
        kind = DRAY__WAIT_PARTITION;
    else if (dray__request_type(w->request) == DRAY__MSG_QUEUE_REFILL)
        kind = DRAY__WAIT_REFILL;
    dray__histogram_add(&w->queue->waited.kinds[kind], dray__now() - w->since_ns);
}

static void waiter_answer(dray__waiter *w, dray__writer *out)
{
    dray__request *request = w->request;
    dray__served *q = w->queue;
    uint64_t record = w->record;
    count_wait(w);
    dray__waiter_free(w);
    dray__answer(q, request, out, record);
}

void dray__waiter_fail(dray__waiter *w, const dray_error *error)
{
    dray__request *request = w->request;
    if (w->queue)
        dray__refusals_add(&w->queue->controller->refusals, dray__request_type(request),
                           error->code);
    if (!w->committed)
        count_wait(w);
    if (w->committed) { /* the commit is done */
        dray__writer *out = &w->queue->controller->out;
        dray__writer_reset(out);
        dray__answer_dropped(out, w->queue->table, w->drops_seen);
        dray__frame_put_error(out, error);
        waiter_answer(w, out);
        return;
    }
    dray__waiter_free(w);
    dray__request_fail(request, error);
}

void dray__cancel_forgotten(dray__served *q, const dray__client *client)
{
    dray_error error;
    dray__line *lines[] = {&q->inserts, &q->waits, &q->refills, &q->gets};
    for (size_t i = 0; i < sizeof lines / sizeof *lines; i++) {
        dray__waiter *next;
        for (dray__waiter *w = lines[i]->first; w; w = next) {
            next = w->next;
            if (w->client != client)
                continue;
            dray__fail(&error, DRAY_ECANCELED, "the client went on to another request");
            dray__waiter_fail(w, &error);
        }
    }
}

int dray__waiter_new(dray__controller *self, dray__request *request, dray__waiter **out,
                     dray_error *error)
{
    dray__waiter *w = calloc(1, sizeof *w);
    if (!w)
        return dray__nomem(error);
    w->request = request;
    int rc = dray__read_head(self, request, &w->client, &w->drops_seen, error);
    if (rc) {
        free(w);
        return rc;
    }
    w->queue = w->client->owner;
    w->since_ns = dray__now();
    *out = w;
    return DRAY_OK;
}

/* Returns true for an insert of many rows that makes a partition. It is done in steps, between
 * which other requests are answered. */
static bool is_long(const dray__waiter *w)
{
    const dray__table *table = w->queue->table;
    return w->rows.rows > DRAY__STEP_ROWS && !w->rows.refill &&
           !dray__ledger_told(table->ledger, w->client->identity, w->rows.ticket) &&
           !dray__table_partition(table, w->rows.partition);
}

static int insert_rows(dray__waiter *w, uint32_t *first, uint32_t *generation, dray_error *error)
{
    dray__table *table = w->queue->table;
    dray__insertion in;
    if (w->placed) {
        in = *w->insertion;
        free(w->insertion);
        w->insertion = NULL;
        return dray__insert_end(table, w->client, &w->rows, &in, first, generation, error);
    }
    if (w->insertion)
        return DRAY_EAGAIN;
    if (!is_long(w))
        return dray__table_insert(table, w->client, &w->rows, first, generation, error);
    int rc = dray__insert_begin(table, w->client, &w->rows, &in, error);
    if (rc)
        return rc;
    w->insertion = malloc(sizeof *w->insertion);
    if (!w->insertion) {
        dray__insert_abort(table, &in);
        return dray__nomem(error);
    }
    *w->insertion = in;
    dray__work_soon(w->queue->controller);
    return DRAY_EAGAIN;
}

bool dray__work_on(dray__served *q)
{
    dray__waiter *w = q->inserts.first;
    if (!w || !w->insertion)
        return false;
    w->placed = dray__insert_step(q->table, w->insertion, DRAY__STEP_ROWS);
    if (w->placed)
        dray__waiter_settle(w, dray__try_insert);
    return true;
}

int dray__try_insert(dray__waiter *w, dray__writer *out, dray_error *error)
{
    uint32_t first, generation;
    dray__table *table = w->queue->table;
    if (w->rows.bytes) {
        dray__answer_dropped(out, table, w->drops_seen);
        return dray__table_room(table, w->client, &w->rows, w->rows.values, w->rows.bytes, error);
    }
    uint64_t before = dray__ledger_added(table->ledger);
    int rc = insert_rows(w, &first, &generation, error);
    if (rc)
        return rc;
    w->record = dray__own_record(table->ledger, before);
    dray__answer_dropped(out, table, w->drops_seen);
    dray__put_u32(out, first);
    dray__put_u32(out, generation);
    return DRAY_OK;
}

int dray__try_claim(dray__waiter *w, dray__writer *out, dray_error *error)
{
    dray__table *table = w->queue->table;
    uint32_t ends = 0;
    bool bounded = false;
    for (uint32_t i = 0; i < w->claim.count; i++) {
        dray__claim *claim;
        dray_error why;
        dray__choice *one = &w->claim.choices[i];
        one->want.hold_until = one->hold_ns > 0 ? dray__deadline(one->hold_ns) : INT64_MAX;
        int rc = dray__table_claim(table, w->client, w->claim.ticket, &one->want, &claim, &why);
        if (rc == DRAY_OK) {
            if (claim->hold_until < w->queue->hold_due) {
                w->queue->hold_due = claim->hold_until;
                dray__arm_timer(w->queue->controller);
            }
            if (w->committed) {
                dray__answer_dropped(out, table, w->drops_seen);
                dray__put_u32(out, DRAY_OK);
            }
            dray__answer_dropped(out, table, w->drops_seen);
            dray__answer_claim(out, table, claim, i, w->bounded, w->claim.columns_known,
                               w->claim.keys_known);
            if (!out->failed && out->size <= DRAY__FRAME_MAX)
                return DRAY_OK;
            dray__claim_release(table, w->client, w->claim.ticket);
            return dray__fail(error, DRAY_EFULL, "claim of %u rows: its description is too large",
                              one->want.count);
        }
        bounded |= rc == DRAY_EAGAIN && dray__admission_refuses(table, &one->want);
        if (rc == DRAY_EAGAIN)
            continue;
        ends += rc == DRAY_EEND;
        if (rc != DRAY_EEND || ends == w->claim.count) { /* DRAY_EEND only when all choices ended */
            *error = why;
            return rc;
        }
    }
    w->bounded = bounded;
    return DRAY_EAGAIN;
}

int dray__try_wait(dray__waiter *w, dray__writer *out, dray_error *error)
{
    (void)out;
    return dray__table_wait(w->queue->table, w->awaited.partition, w->awaited.task, error);
}

int dray__try_refill(dray__waiter *w, dray__writer *out, dray_error *error)
{
    dray__demand *demand = NULL;
    int rc = dray__table_demand(w->queue->table, w->client, &demand, error);
    if (!rc)
        dray__answer_demand(out, demand);
    return rc;
}

/* Answers GET and TAKE. TAKE consumes the rows only after the answer was written without an error.
 */
static int get_rows(dray__waiter *w, dray__arena *arena, dray__writer *out, dray_error *error)
{
    dray__table *table = w->queue->table;
    dray__picked picked;
    int rc = dray__keyed_pick(table, &w->get, arena, &picked, error);
    if (!rc)
        rc = dray__keyed_pin(table, w->client, w->get.ticket, &picked, error);
    if (rc)
        return rc;
    dray__answer_dropped(out, table, w->drops_seen);
    rc = dray__answer_rows(out, table, &picked, arena, error);
    if (!rc && (out->failed || out->size > DRAY__FRAME_MAX))
        rc = dray__fail(error, DRAY_EFULL,
                        "get of %u rows: their description is too large (get them in parts)",
                        picked.count);
    uint64_t before = dray__ledger_added(table->ledger);
    if (!rc && dray__request_type(w->request) == DRAY__MSG_QUEUE_TAKE)
        rc = dray__keyed_consume(table, &picked, w->get.task, error);
    w->record = rc ? 0 : dray__own_record(table->ledger, before);
    if (rc)
        dray__claim_release(table, w->client, w->get.ticket);
    return rc;
}

int dray__try_get(dray__waiter *w, dray__writer *out, dray_error *error)
{
    dray__arena arena = {0};
    w->change = dray__keyed_change(w->queue->table, w->get.partition);
    int rc = get_rows(w, &arena, out, error);
    dray__arena_free(&arena);
    return rc;
}

bool dray__waiter_settle(dray__waiter *w, dray__try_fn attempt)
{
    dray__writer *out = &w->queue->controller->out;
    dray__writer_reset(out);
    int rc = attempt(w, out, &w->why);
    if (rc == DRAY_EAGAIN)
        return false;
    dray_error error = w->why;
    if (rc)
        dray__waiter_fail(w, &error);
    else
        waiter_answer(w, out);
    return true;
}

void dray__waiter_timed_out(dray__waiter *w, dray_error *error)
{
    const char *name = dray__message_of(w->request);
    if (w->number) {
        dray__fail(error, DRAY_ETIMEDOUT, "%s: it is done, but not in the journal yet", name);
    } else if (w->get.partition) {
        dray__fail(error, w->timeout_ns <= 0 ? DRAY_EAGAIN : DRAY_ETIMEDOUT, "%s", w->why.message);
    } else if (w->claim.choices) {
        char text[300];
        dray__describe(w->queue->table, &w->claim.choices[0].want, text, sizeof text);
        dray__fail(error, DRAY_ETIMEDOUT, "claim of %u rows for task %s: %s",
                   w->claim.choices[0].want.count,
                   w->queue->table->tasks[w->claim.choices[0].want.task].name, text);
        error->origin = DRAY_ORIGIN_WAIT;
        error->raw = w->bounded ? DRAY_CAUSE_ADMISSION : DRAY_CAUSE_SAMPLES;
    } else if (w->queue) {
        bool insert = w->rows.partition != NULL;
        int code = insert && w->timeout_ns <= 0 ? DRAY_EFULL : DRAY_ETIMEDOUT;
        char holder[300] = "";
        if (insert)
            dray__describe_holder(w->queue->table, holder, sizeof holder);
        dray__fail(error, code, "%s%s%s",
                   w->why.code ? w->why.message : "other inserts wait for capacity",
                   holder[0] ? "; " : "", holder);
    } else {
        dray__fail(
            error, DRAY_ETIMEDOUT,
            "queue %s is not there yet: the first process that opens it with its tasks makes "
            "it",
            w->name);
    }
}

int dray__waiter_keep(dray__waiter *w, dray__line *at)
{
    dray_error error;
    if (w->insertion) { /* its steps need nothing from others */
        dray__request_set_data(w->request, w);
        line_add_first(at, w);
        return DRAY_OK;
    }
    if (w->timeout_ns > 0 &&
        dray__request_expire_at(w->request, dray__deadline(w->timeout_ns)) == DRAY_OK) {
        dray__request_set_data(w->request, w);
        line_add(at, w);
        return DRAY_OK;
    }
    dray__waiter_timed_out(w, &error);
    dray__waiter_fail(w, &error);
    return DRAY_OK;
}

static bool touches(const dray__waiter *w, uint64_t dirty)
{
    for (uint32_t i = 0; i < w->claim.count; i++)
        if (w->claim.choices[i].want.task >= 64 || (dirty >> w->claim.choices[i].want.task & 1))
            return true;
    return false;
}

/* Wakes requests that can go on, until none is left. */
static void settle_all(dray__served *q)
{
    dray__table *table = q->table;
    while (table->dirty || table->finished || table->freed || table->demanded || table->named) {
        uint64_t dirty = table->dirty;
        bool named = table->named;
        table->named = false;
        bool finished = table->finished, freed = table->freed, demanded = table->demanded;
        table->dirty = 0;
        table->finished = table->freed = table->demanded = false;
        dray__waiter *next;
        for (dray__waiter *w = q->claims.first; dirty && w; w = next) {
            next = w->next;
            if (touches(w, dirty))
                dray__waiter_settle(w, dray__try_claim);
        }
        for (dray__waiter *w = q->waits.first; finished && w; w = next) {
            next = w->next;
            dray__waiter_settle(w, dray__try_wait);
        }
        for (dray__waiter *w = q->gets.first; named && w; w = next) {
            next = w->next;
            if (w->change != dray__keyed_change(table, w->get.partition))
                dray__waiter_settle(w, dray__try_get);
        }
        for (dray__waiter *w = q->refills.first; demanded && w; w = next) {
            next = w->next;
            dray__waiter_settle(w, dray__try_refill);
        }
        while (freed && q->inserts.first && dray__waiter_settle(q->inserts.first, dray__try_insert))
            ;
    }
}

/* Tries the queue's waiting requests, and writes on the pages which releases the remaining ones
 * wait for. */
static void pump(dray__served *q)
{
    do
        settle_all(q);
    while (dray__collect_wanted(q));
}

void dray__pump_all(dray__controller *self)
{
    for (dray__served *q = self->queues; q; q = q->next)
        pump(q);
    dray__drops_flush(&self->drops);
    dray__keepers_flush(&self->keepers);
}

static int fail_gone(const dray__waiter *w, dray_error *error)
{
    return dray__fail(error, DRAY_EDEAD,
                      "%s: its bytes were gone before they were in the journal: the keeper or "
                      "store that held them ended, or lost them",
                      dray__message_of(w->request));
}

void dray__bytes_gone(void *user, uint64_t record)
{
    dray__served *q = user;
    dray_error error;
    q->bytes_gone = true;
    for (dray__waiter *w = q->held.first; w; w = w->next)
        w->gone |= w->record == record;
    for (dray__waiter *w = q->claims.first, *next; w; w = next) {
        next = w->next;
        if (w->record != record)
            continue;
        w->committed = false; /* the commit that came with the claim must not be acknowledged */
        fail_gone(w, &error);
        dray__waiter_fail(w, &error);
    }
}

void dray__release_held(dray__served *q)
{
    const dray__ledger *ledger = q->table->ledger;
    dray__waiter *next;
    for (dray__waiter *w = q->held.first; w; w = next) {
        next = w->next;
        dray_error error;
        bool copy = dray__request_type(w->request) == DRAY__MSG_QUEUE_CHECKPOINT;
        int rc = DRAY_OK;
        if (w->number > ledger->safe)
            rc = dray__ledger_check(ledger, &error);
        if (w->number > ledger->safe && !rc)
            return;
        if (copy && ledger->copying && !rc) /* later requests do not wait for the copy */
            continue;
        if (!rc && copy && ledger->copied.code) {
            error = ledger->copied;
            rc = error.code;
        }
        if (!rc && w->gone)
            rc = fail_gone(w, &error);
        if (rc) {
            dray__waiter_fail(w, &error);
            continue;
        }
        dray__request *request = w->request;
        dray__writer answer = w->answer;
        w->answer = (dray__writer){0};
        dray__waiter_free(w);
        dray__hook_step("answering");
        dray__request_reply(request, &answer, NULL, 0);
        dray__writer_free(&answer);
    }
}

void dray__cancel_waiting(dray__served *q, const dray__client *client, uint32_t ticket)
{
    dray_error error;
    dray__line *lines[] = {&q->claims, &q->inserts, &q->waits, &q->refills, &q->gets};
    dray__fail(&error, DRAY_ECANCELED, "the client gave up");
    for (size_t i = 0; i < sizeof lines / sizeof *lines; i++) {
        dray__waiter *next;
        for (dray__waiter *w = lines[i]->first; w; w = next) {
            next = w->next;
            uint32_t own = w->claim.choices    ? w->claim.ticket
                           : w->rows.partition ? w->rows.ticket
                           : w->get.partition  ? w->get.ticket
                                               : 0;
            if (w->client == client && (ticket == DRAY__NONE || (own && own == ticket)))
                dray__waiter_fail(w, &error);
        }
    }
}

dray__waiting dray__count_waiting(const dray__served *q)
{
    dray__waiting waiting = {.waited = &q->waited};
    for (const dray__waiter *w = q->claims.first; w; w = w->next)
        if (w->claim.choices[0].want.task < DRAY__TASKS_MAX)
            waiting.claims[w->claim.choices[0].want.task]++;
    for (const dray__waiter *w = q->inserts.first; w; w = w->next)
        waiting.inserts++;
    for (const dray__waiter *w = q->waits.first; w; w = w->next)
        waiting.waits++;
    for (const dray__waiter *w = q->refills.first; w; w = w->next)
        waiting.refills++;
    for (const dray__waiter *w = q->gets.first; w; w = w->next)
        waiting.gets++;
    return waiting;
}
