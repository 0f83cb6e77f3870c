/* The requests that are answered at once: decode, do, answer. */
#include "queue/server/service.h"

#include "base/clock.h"
#include "base/error.h"
#include "base/json.h"
#include "queue/table/keyed.h"

#include <stdlib.h>
#include <string.h>

typedef struct step {
    dray__request *request;
    dray__client *client;
    dray__table *table;
    dray__served *queue;
    uint64_t drops_seen;
    dray__writer *out;
} step;

static int do_seal(step *s, const void *message, dray_error *error)
{
    const dray__sealing *sealing = message;
    return dray__table_seal(s->table, sealing->partition, sealing->rows, error);
}

static int do_clear(step *s, const void *message, dray_error *error)
{
    const char *const *partition = message;
    return dray__table_clear(s->table, *partition, error);
}

static int do_put(step *s, const void *message, dray_error *error)
{
    const dray__putting *m = message;
    dray__row_at *at = calloc(m->rows && m->rows <= DRAY_PUT_ROWS_MAX ? m->rows : 1, sizeof *at);
    int rc = at ? dray__keyed_put(s->table, s->client, m, at, error) : dray__nomem(error);
    const dray__named rows = {.at = at, .at_count = m->rows};
    if (!rc) {
        dray__answer_dropped(s->out, s->table, s->drops_seen);
        dray__put_fields(s->out, &dray__named_fields, &rows);
    }
    free(at);
    return rc;
}

static int do_drop(step *s, const void *message, dray_error *error)
{
    const dray__dropping *m = message;
    if (!m->named.key_count && !m->named.at_count)
        return dray__fail(error, DRAY_EINVALID, "clear rows of %s: at least one row expected",
                          m->partition);
    return dray__keyed_drop(s->table, m->partition, &m->named, error);
}

static int do_reset(step *s, const void *message, dray_error *error)
{
    const dray__resetting *m = message;
    return dray__keyed_reset(s->table, m->partition, m->task, error);
}

static int do_end(step *s, const void *message, dray_error *error)
{
    (void)message, (void)error;
    dray__table_end(s->table);
    return DRAY_OK;
}

static int do_decline(step *s, const void *message, dray_error *error)
{
    const uint64_t *id = message;
    return dray__table_decline(s->table, *id, error);
}

static int do_admit(step *s, const void *message, dray_error *error)
{
    const dray__admitting *admitting = message;
    return dray__table_admit(s->table, &admitting->admission, admitting->resume, error);
}

static int do_version(step *s, const void *message, dray_error *error)
{
    const uint64_t *version = message;
    return dray__table_version(s->table, *version, error);
}

static int do_cursor(step *s, const void *message, dray_error *error)
{
    (void)message, (void)error;
    const dray__cursor cursor = {.epoch = s->table->epoch, .seq = s->table->commit_seq};
    dray__put_fields(s->out, &dray__cover_fields, &cursor);
    return DRAY_OK;
}

static int do_cover(step *s, const void *message, dray_error *error)
{
    return dray__table_cover(s->table, message, error);
}

static int do_resume(step *s, const void *message, dray_error *error)
{
    return dray__table_resume(s->table, message, error);
}

static int do_commit(step *s, const void *message, dray_error *error)
{
    const dray__committing *c = message;
    int rc = dray__claim_commit(s->table, s->client, c->ticket, c->generation, &c->outputs, error);
    if (!rc)
        dray__answer_dropped(s->out, s->table, s->drops_seen);
    return rc;
}

static int do_fail(step *s, const void *message, dray_error *error)
{
    const dray__failing *f = message;
    return dray__claim_fail(s->table, s->client, f->ticket, f->items, f->count, f->reason, error);
}

/* Bytes that a journal has are put back instead of being lost. When chunks are named, all bytes in
 * them are lost, including those of other clients' claims. */
static int do_lost(step *s, const void *message, dray_error *error)
{
    const dray__failing *f = message;
    dray__table *table = s->table;
    bool known = table->ledger || f->chunk_count;
    if (known)
        dray__claim_mark_lost(table, s->client, f->ticket, f->items, f->count, f->chunks,
                              f->chunk_count);
    dray__ledger_restore(table->ledger);
    int rc = dray__claim_lost(table, s->client, f->ticket, f->items, f->count, f->reason, error);
    if (known)
        dray__table_lose_bytes(table);
    return rc;
}

static int do_release(step *s, const void *message, dray_error *error)
{
    const uint32_t *ticket = message;
    (void)error;
    if (!dray__claim_release(s->table, s->client, *ticket))
        dray__cancel_waiting(s->queue, s->client, *ticket);
    return DRAY_OK;
}

static int do_split(step *s, const void *message, dray_error *error)
{
    const dray__splitting *m = message;
    return dray__claim_split(s->table, s->client, m->ticket, m->part, m->items, m->count, error);
}

static int do_hold(step *s, const void *message, dray_error *error)
{
    const dray__holding *m = message;
    int rc = dray__claim_hold(s->table, s->client, m->ticket,
                              m->hold_ns > 0 ? dray__deadline(m->hold_ns) : INT64_MAX, error);
    s->queue->hold_due = dray__table_expire(s->table, dray__now());
    dray__arm_timer(s->queue->controller);
    return rc;
}

static int ask_chunk(dray__served *q, dray__client *client, const dray__storing *m,
                     dray__stored *out, dray_error *error)
{
    dray__chunk_wish wish = m->wishes[0];
    wish.keeper = m->keeper;
    if (!dray__keepers_alive(&q->controller->keepers, m->keeper))
        return dray__fail(error, DRAY_EGONE, "the keeper of samples number %u is gone", m->keeper);
    if (m->wish_count > 1)
        return dray__fail(error, DRAY_EINVALID, "one chunk at once expected, found %u",
                          m->wish_count);
    return dray__chunk_ask(q->table, client, &wish, &out->given, &out->size, error);
}

/* Nothing to do: the table finds the client's chunks by their owner. */
static void forget_nothing(dray__served *q, uint32_t client)
{
    (void)q, (void)client;
}

const dray__served_bytes dray__served_chunks = {ask_chunk, forget_nothing};

/* Handles CHUNK. The chunk that the client gives up is dropped even when there is no room for a new
 * one. */
static int do_chunk(step *s, const void *message, dray_error *error)
{
    const dray__storing *m = message;
    dray__stored stored = {0};
    int rc =
        m->wish_count ? s->queue->bytes->wish(s->queue, s->client, m, &stored, error) : DRAY_OK;
    for (uint32_t i = 0; i < m->given_up_count; i++) {
        int discarded = dray__chunk_discard(s->table, s->client, m->given_up[i], rc ? NULL : error);
        rc = rc ? rc : discarded;
    }
    if (rc)
        return rc;
    dray__answer_dropped(s->out, s->table, s->drops_seen);
    dray__put_fields(s->out, &dray__stored_fields, &stored);
    return DRAY_OK;
}

static int do_checkpoint(step *s, const void *message, dray_error *error)
{
    const dray__saving *saving = message;
    if (!s->table->ledger)
        return dray__fail(error, DRAY_EUNSUPPORTED,
                          "queue %s: its durability is none, there is nothing to save",
                          s->table->name);
    return dray__durable_save(s->queue->controller, s->table->ledger, saving->name, s->request,
                              error);
}

static int do_status(step *s, const void *message, dray_error *error)
{
    (void)message;
    dray__waiting waiting = dray__count_waiting(s->queue);
    json_t *json = dray__table_json(s->table, &waiting);
    char *text = json ? dray__json_text(json, JSON_COMPACT) : NULL;
    json_decref(json);
    if (!text)
        return dray__nomem(error);
    dray__put_string(s->out, text);
    free(text);
    return DRAY_OK;
}

static int do_close(step *s, const void *message, dray_error *error)
{
    (void)message, (void)error;
    dray__end_client(s->queue->controller, s->client, false, "");
    return DRAY_OK;
}

static const struct handler {
    uint16_t type;
    const dray__fields *fields; /* NULL when it has none */
    int (*action)(step *, const void *message, dray_error *);
} handlers[] = {
    {DRAY__MSG_QUEUE_SEAL, &dray__sealing_fields, do_seal},
    {DRAY__MSG_QUEUE_CLEAR, &dray__name_fields, do_clear},
    {DRAY__MSG_QUEUE_END, NULL, do_end},
    {DRAY__MSG_QUEUE_COMMIT, &dray__committing_fields, do_commit},
    {DRAY__MSG_QUEUE_FAIL, &dray__failing_fields, do_fail},
    {DRAY__MSG_QUEUE_LOST, &dray__losing_fields, do_lost},
    {DRAY__MSG_QUEUE_RELEASE, &dray__u32_fields, do_release},
    {DRAY__MSG_QUEUE_STATUS, NULL, do_status},
    {DRAY__MSG_QUEUE_CHUNK, &dray__storing_fields, do_chunk},
    {DRAY__MSG_QUEUE_DECLINE, &dray__u64_fields, do_decline},
    {DRAY__MSG_QUEUE_CURSOR, NULL, do_cursor},
    {DRAY__MSG_QUEUE_COVER, &dray__cover_fields, do_cover},
    {DRAY__MSG_QUEUE_RESUME, &dray__cursor_fields, do_resume},
    {DRAY__MSG_QUEUE_ADMIT, &dray__admitting_fields, do_admit},
    {DRAY__MSG_QUEUE_VERSION, &dray__u64_fields, do_version},
    {DRAY__MSG_QUEUE_CLOSE, NULL, do_close},
    {DRAY__MSG_QUEUE_HOLD, &dray__holding_fields, do_hold},
    {DRAY__MSG_QUEUE_CHECKPOINT, &dray__saving_fields, do_checkpoint},
    {DRAY__MSG_QUEUE_SPLIT, &dray__splitting_fields, do_split},
    {DRAY__MSG_QUEUE_PUT, &dray__putting_fields, do_put},
    {DRAY__MSG_QUEUE_DROP, &dray__dropping_fields, do_drop},
    {DRAY__MSG_QUEUE_RESET, &dray__resetting_fields, do_reset},
};

/* The decoded message of these fields. */
typedef union message {
    dray__sealing sealing;
    dray__committing committing;
    dray__failing failing;
    dray__storing storing;
    dray__cursor cursor;
    dray__admitting admitting;
    dray__holding holding;
    dray__splitting splitting;
    dray__saving saving;
    dray__putting putting;
    dray__dropping dropping;
    dray__resetting resetting;
    const char *name;
    uint64_t number;
} message;

/* ticket: of a request that counts once, else 0. */
static int act(step *s, const struct handler *handler, const void *body, uint32_t ticket,
               dray_error *error)
{
    dray__ledger *ledger = ticket ? s->table->ledger : NULL;
    dray__ledger_ask(ledger, s->client, ticket);
    int rc = handler->action(s, body, error);
    dray__ledger_asked(ledger, !rc);
    return rc;
}

static int take_step(dray__controller *self, dray__request *request, const struct handler *handler,
                     dray_error *error)
{
    step s = {.request = request, .out = &self->out};
    int rc = dray__read_head(self, request, &s.client, &s.drops_seen, error);
    if (rc)
        return rc;
    s.queue = s.client->owner;
    s.table = s.queue->table;
    dray__writer_reset(s.out);
    uint64_t before = dray__ledger_added(s.table->ledger);
    dray__arena arena = {0};
    message m;
    memset(&m, 0, sizeof m);
    if (handler->fields)
        dray__get_fields(dray__request_payload(request), &arena, handler->fields, &m);
    bool once = dray__counts_once(handler->type);
    uint32_t ticket = once ? dray__get_u32(dray__request_payload(request)) : 0;
    rc = dray__finish_reading(request, error);
    if (!rc && !(once && dray__ledger_told(s.table->ledger, s.client->identity, ticket)))
        rc = act(&s, handler, &m, ticket, error);
    if (handler->type == DRAY__MSG_QUEUE_RESUME)
        dray__put_u32(s.out, s.table->epoch);
    dray__arena_free(&arena);
    if (rc)
        return rc;
    dray__answer(s.queue, request, s.out, dray__own_record(s.table->ledger, before));
    return DRAY_OK;
}

int dray__step(dray__controller *self, dray__request *request, dray_error *error)
{
    uint16_t type = dray__request_type(request);
    for (size_t i = 0; i < sizeof handlers / sizeof *handlers; i++)
        if (handlers[i].type == type)
            return take_step(self, request, &handlers[i], error);
    return dray__fail(error, DRAY_EUNSUPPORTED, "message %04x is none of the queue's", type);
}
