/* The requests that are answered at once: decode, do, answer. */
#include "queue/service.h"

#include "base/clock.h"
#include "base/error.h"
#include "base/json.h"

#include <stdlib.h>

typedef struct step {
    dray__request *request;
    dray__reader *r;
    dray__arena arena;
    dray__client *client;
    dray__table *table;
    dray__served *queue;
    uint64_t drops_seen;
    dray__writer *out;
} step;

static int do_seal(step *s, dray_error *error)
{
    const char *partition = dray__get_text(s->r, &s->arena);
    uint32_t rows = dray__get_u32(s->r);
    int rc = dray__finish_reading(s->request, error);
    return rc ? rc : dray__table_seal(s->table, partition, rows, error);
}

static int do_clear(step *s, dray_error *error)
{
    const char *partition = dray__get_text(s->r, &s->arena);
    int rc = dray__finish_reading(s->request, error);
    return rc ? rc : dray__table_clear(s->table, partition, error);
}

static int do_end(step *s, dray_error *error)
{
    int rc = dray__finish_reading(s->request, error);
    if (!rc)
        dray__table_end(s->table);
    return rc;
}

static int do_decline(step *s, dray_error *error)
{
    uint64_t id = dray__get_u64(s->r);
    int rc = dray__finish_reading(s->request, error);
    return rc ? rc : dray__table_decline(s->table, id, error);
}

static int do_admit(step *s, dray_error *error)
{
    dray__admission admission = {.task = dray__get_u32(s->r)};
    admission.batch = dray__get_u32(s->r);
    admission.staleness = dray__get_u32(s->r);
    admission.concurrency = dray__get_u32(s->r);
    admission.version = dray__get_u64(s->r);
    bool resume = dray__get_u8(s->r) != 0;
    int rc = dray__finish_reading(s->request, error);
    return rc ? rc : dray__table_admit(s->table, &admission, resume, error);
}

static int do_version(step *s, dray_error *error)
{
    uint64_t version = dray__get_u64(s->r);
    int rc = dray__finish_reading(s->request, error);
    return rc ? rc : dray__table_version(s->table, version, error);
}

static int do_cursor(step *s, dray_error *error)
{
    int rc = dray__finish_reading(s->request, error);
    dray__put_u32(s->out, s->table->epoch);
    dray__put_u64(s->out, s->table->commit_seq);
    return rc;
}

static int do_cover(step *s, dray_error *error)
{
    uint32_t epoch = dray__get_u32(s->r);
    uint64_t seq = dray__get_u64(s->r);
    int rc = dray__finish_reading(s->request, error);
    return rc ? rc : dray__table_cover(s->table, epoch, seq, error);
}

static int do_resume(step *s, dray_error *error)
{
    uint32_t epoch = dray__get_u32(s->r);
    uint64_t seq = dray__get_u64(s->r), version = dray__get_u64(s->r);
    int rc = dray__finish_reading(s->request, error);
    if (!rc)
        rc = dray__table_resume(s->table, epoch, seq, version, error);
    if (!rc)
        dray__put_u32(s->out, s->table->epoch);
    return rc;
}

static int do_commit(step *s, dray_error *error)
{
    uint32_t ticket = dray__get_u32(s->r), generation = dray__get_u32(s->r);
    dray__outputs outputs;
    dray__get_outputs(s->r, &s->arena, &outputs);
    int rc = dray__finish_reading(s->request, error);
    if (!rc)
        rc = dray__claim_commit(s->table, s->client, ticket, generation, &outputs, error);
    if (!rc)
        dray__answer_dropped(s->out, s->table, s->drops_seen);
    return rc;
}

typedef struct failed {
    uint32_t ticket, count;
    uint32_t *items;
    const char *reason;
} failed;

static int read_failed(step *s, failed *out, dray_error *error)
{
    out->ticket = dray__get_u32(s->r);
    out->items = dray__get_array(s->r, &s->arena, 4, sizeof *out->items, &out->count);
    for (uint32_t i = 0; i < out->count; i++)
        out->items[i] = dray__get_u32(s->r);
    out->reason = dray__get_lines(s->r, &s->arena);
    return s->r->failed || out->reason ? DRAY_OK : dray__nomem(error);
}

static int do_fail(step *s, dray_error *error)
{
    failed f;
    int rc = read_failed(s, &f, error);
    if (!rc)
        rc = dray__finish_reading(s->request, error);
    return rc ? rc
              : dray__claim_fail(s->table, s->client, f.ticket, f.items, f.count, f.reason, error);
}

/* What a journal has is put back before it is lost. Where chunks are named, all that lies in them
 * is lost, whoever has claimed it. */
static int do_lost(step *s, dray_error *error)
{
    failed f;
    uint32_t count;
    int rc = read_failed(s, &f, error);
    uint64_t *chunks = dray__get_array(s->r, &s->arena, 8, sizeof *chunks, &count);
    for (uint32_t i = 0; i < count; i++)
        chunks[i] = dray__get_u64(s->r);
    if (!rc)
        rc = dray__finish_reading(s->request, error);
    if (rc)
        return rc;
    dray__table *table = s->table;
    bool known = table->ledger || count;
    if (known)
        dray__claim_mark_lost(table, s->client, f.ticket, f.items, f.count, chunks, count);
    dray__ledger_restore(table->ledger);
    rc = dray__claim_lost(table, s->client, f.ticket, f.items, f.count, f.reason, error);
    if (known)
        dray__table_lose_bytes(table);
    return rc;
}

static int do_release(step *s, dray_error *error)
{
    uint32_t ticket = dray__get_u32(s->r);
    int rc = dray__finish_reading(s->request, error);
    if (!rc && !dray__claim_release(s->table, s->client, ticket))
        dray__cancel_waiting(s->queue, s->client, ticket);
    return rc;
}

static int do_hold(step *s, dray_error *error)
{
    uint32_t ticket = dray__get_u32(s->r);
    int64_t hold = dray__get_i64(s->r);
    int rc = dray__finish_reading(s->request, error);
    if (!rc)
        rc = dray__claim_hold(s->table, s->client, ticket,
                              hold > 0 ? dray__deadline(hold) : INT64_MAX, error);
    s->queue->hold_due = dray__table_expire(s->table, dray__now());
    dray__arm_timer(s->queue->controller);
    return rc;
}

static int do_chunk(step *s, dray_error *error)
{
    int rc = DRAY_OK;
    uint64_t given = 0, size = 0;
    uint32_t home = dray__get_u32(s->r), count = dray__get_count(s->r, 32);
    if (count && !dray__homes_alive(&s->queue->controller->homes, home))
        rc = dray__fail(error, DRAY_EGONE, "the keeper of samples number %u is gone", home);
    if (!rc && count > 1 && !s->queue->cleaner)
        rc = dray__fail(error, DRAY_EINVALID, "one chunk at once expected, found %u", count);
    for (uint32_t i = 0; i < count; i++) {
        dray__chunk_wish wish = {.id = dray__get_u64(s->r), .home = home};
        wish.key = dray__get_u64(s->r);
        wish.size = dray__get_u64(s->r);
        wish.least = dray__get_u64(s->r);
        if (!rc && s->queue->cleaner)
            dray__object_abandoned(s->queue, s->client, wish.id, wish.size);
        else if (!rc)
            rc = dray__chunk_ask(s->table, s->client, &wish, &given, &size, error);
    }
    /* What the client gives up it has given up, also when there is no place for a new one. */
    count = dray__get_count(s->r, 8);
    for (uint32_t i = 0; i < count; i++) {
        int discarded =
            dray__chunk_discard(s->table, s->client, dray__get_u64(s->r), rc ? NULL : error);
        rc = rc ? rc : discarded;
    }
    if (!rc)
        rc = dray__finish_reading(s->request, error);
    if (rc)
        return rc;
    dray__answer_dropped(s->out, s->table, s->drops_seen);
    dray__put_u64(s->out, given);
    dray__put_u64(s->out, size);
    return DRAY_OK;
}

static int do_checkpoint(step *s, dray_error *error)
{
    const char *name = dray__get_line(s->r, &s->arena);
    int rc = dray__finish_reading(s->request, error);
    if (!rc && !s->table->ledger)
        rc = dray__fail(error, DRAY_EUNSUPPORTED,
                        "queue %s: its durability is none, there is nothing to save",
                        s->table->name);
    return rc ? rc
              : dray__durable_save(s->queue->controller, s->table->ledger, name, s->request, error);
}

static int do_status(step *s, dray_error *error)
{
    int rc = dray__finish_reading(s->request, error);
    if (rc)
        return rc;
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

static int do_close(step *s, dray_error *error)
{
    int rc = dray__finish_reading(s->request, error);
    if (!rc)
        dray__end_client(s->queue->controller, s->client, false, "");
    return rc;
}

static int take_step(dray__controller *self, dray__request *request,
                     int (*action)(step *, dray_error *), dray_error *error)
{
    step s = {.request = request, .r = dray__request_payload(request), .out = &self->out};
    int rc = dray__read_head(self, request, &s.client, &s.drops_seen, error);
    if (rc)
        return rc;
    s.queue = s.client->owner;
    s.table = s.queue->table;
    dray__writer_reset(s.out);
    uint64_t before = dray__ledger_added(s.table->ledger);
    rc = action(&s, error);
    dray__arena_free(&s.arena);
    if (rc)
        return rc;
    dray__answer(s.queue, request, s.out, dray__own_record(s.table->ledger, before));
    return DRAY_OK;
}

static const struct handler {
    uint16_t type;
    int (*action)(step *, dray_error *);
} handlers[] = {
    {DRAY__MSG_QUEUE_SEAL, do_seal},       {DRAY__MSG_QUEUE_CLEAR, do_clear},
    {DRAY__MSG_QUEUE_END, do_end},         {DRAY__MSG_QUEUE_COMMIT, do_commit},
    {DRAY__MSG_QUEUE_FAIL, do_fail},       {DRAY__MSG_QUEUE_LOST, do_lost},
    {DRAY__MSG_QUEUE_RELEASE, do_release}, {DRAY__MSG_QUEUE_STATUS, do_status},
    {DRAY__MSG_QUEUE_CHUNK, do_chunk},     {DRAY__MSG_QUEUE_DECLINE, do_decline},
    {DRAY__MSG_QUEUE_CURSOR, do_cursor},   {DRAY__MSG_QUEUE_COVER, do_cover},
    {DRAY__MSG_QUEUE_RESUME, do_resume},   {DRAY__MSG_QUEUE_ADMIT, do_admit},
    {DRAY__MSG_QUEUE_VERSION, do_version}, {DRAY__MSG_QUEUE_CLOSE, do_close},
    {DRAY__MSG_QUEUE_HOLD, do_hold},       {DRAY__MSG_QUEUE_CHECKPOINT, do_checkpoint},
};

int dray__step(dray__controller *self, dray__request *request, dray_error *error)
{
    uint16_t type = dray__request_type(request);
    for (size_t i = 0; i < sizeof handlers / sizeof *handlers; i++)
        if (handlers[i].type == type)
            return take_step(self, request, handlers[i].action, error);
    return dray__fail(error, DRAY_EUNSUPPORTED, "message %04x is none of the queue's", type);
}
