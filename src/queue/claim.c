/* Claiming: requests for rows, and what a reply says about a batch. */
#include "queue/client.h"

#include "base/clock.h"
#include "base/error.h"
#include "base/options.h"

#include <stdlib.h>
#include <string.h>

/* ---- names ----------------------------------------------------------------------------------- */

static int grow_columns(dray__names *names, uint32_t index, dray_error *error)
{
    if (index < names->column_capacity)
        return DRAY_OK;
    if (index >= DRAY__COLUMNS_MAX)
        return dray__fail(error, DRAY_EFORMAT, "column number %u: at most %u", index,
                          DRAY__COLUMNS_MAX);
    uint32_t capacity = names->column_capacity ? names->column_capacity : 16;
    while (capacity <= index)
        capacity *= 2;
    dray__column_name *columns = realloc(names->columns, capacity * sizeof *columns);
    if (!columns)
        return dray__nomem(error);
    memset(columns + names->column_capacity, 0,
           (capacity - names->column_capacity) * sizeof *columns);
    names->columns = columns;
    names->column_capacity = capacity;
    return DRAY_OK;
}

int dray__names_read(dray__names *names, dray__reader *r, dray_error *error)
{
    uint32_t count = dray__get_count(r, 8 + DRAY__SPEC_WIRE);
    for (uint32_t i = 0; i < count && !r->failed; i++) {
        uint32_t index = dray__get_u32(r);
        char *name = dray__get_word(r);
        dray__column_spec spec = dray__get_spec(r);
        int rc =
            name ? dray__spec_check(&spec, name, error) : dray__reader_finish(r, "columns", error);
        if (!rc)
            rc = grow_columns(names, index, error);
        if (rc) {
            free(name);
            return rc;
        }
        free(names->columns[index].name);
        names->columns[index] = (dray__column_name){.name = name, .spec = spec};
        names->columns_known++;
    }
    dray__words keys;
    int rc = dray__get_words(r, &keys, error);
    char **grown = NULL;
    if (!rc && keys.count) {
        grown = realloc(names->keys, (names->key_count + (size_t)keys.count) * sizeof *grown);
        rc = grown ? DRAY_OK : dray__nomem(error);
    }
    if (grown) {
        names->keys = grown;
        memcpy(grown + names->key_count, keys.items, keys.count * sizeof *grown);
        names->key_count += keys.count;
        keys.count = 0; /* the strings moved */
    }
    dray__words_free(&keys);
    return rc;
}

void dray__names_retire(dray__names *names)
{
    dray__names *past = malloc(sizeof *past);
    if (past)
        *past = *names; /* without memory they are lost, but not wrong */
    *names = (dray__names){.past = past};
}

void dray__names_free(dray__names *names)
{
    if (names->past)
        dray__names_free(names->past);
    free(names->past);
    for (uint32_t i = 0; i < names->column_capacity; i++)
        free(names->columns[i].name);
    for (uint32_t i = 0; i < names->key_count; i++)
        free(names->keys[i]);
    free(names->columns);
    free(names->keys);
    *names = (dray__names){0};
}

/* ---- the body of a claim --------------------------------------------------------------------- */

static void *array(dray_batch *batch, dray__reader *r, size_t count, size_t size)
{
    size_t bytes;
    void *at = NULL;
    if (!__builtin_mul_overflow(count ? count : 1, size, &bytes))
        at = dray__arena_get(&batch->arena, bytes);
    if (at)
        memset(at, 0, bytes);
    else
        r->failed = true;
    return at;
}

static void read_rows(dray_batch *batch, dray__reader *r)
{
    batch->row_count = dray__get_count(r, 16);
    r->failed |= batch->row_count == 0; /* nobody gets an empty batch */
    batch->rows = array(batch, r, batch->row_count, sizeof *batch->rows);
    for (uint32_t i = 0; i < batch->row_count && !r->failed; i++) {
        dray_row *row = &batch->rows[i];
        row->slot = dray__get_u32(r);
        row->attempt = dray__get_u32(r);
        row->group = dray__get_u32(r);
        row->generation = dray__get_u32(r);
        row->id = (uint64_t)row->generation << 32 | row->slot;
    }
}

static void read_puts(dray_batch *batch, dray__reader *r)
{
    batch->put_count = dray__get_count(r, 8);
    batch->puts = array(batch, r, batch->put_count, sizeof *batch->puts);
    for (uint32_t i = 0; i < batch->put_count && !r->failed; i++) {
        dray__batch_put *put = &batch->puts[i];
        put->items = dray__get_u32(r);
        put->count = dray__get_count(r, 8 + DRAY__EXTENT_WIRE);
        put->extents = array(batch, r, put->count, sizeof *put->extents);
        for (uint32_t e = 0; e < put->count && !r->failed; e++) {
            put->extents[e].column = dray__get_u32(r);
            put->extents[e].home = dray__get_u32(r);
            put->extents[e].extent = dray__get_extent(r);
        }
    }
}

static void read_columns(dray_batch *batch, const dray__names *names, dray__reader *r)
{
    batch->column_count = dray__get_count(r, 8);
    batch->columns = array(batch, r, batch->column_count, sizeof *batch->columns);
    for (uint32_t i = 0; i < batch->column_count && !r->failed; i++) {
        dray__batch_column *column = &batch->columns[i];
        column->column = dray__get_u32(r);
        column->place = dray__get_u32(r);
        if (column->column >= names->column_capacity || !names->columns[column->column].name) {
            r->failed = true;
            return;
        }
        column->name = dray__arena_text(&batch->arena, names->columns[column->column].name);
        column->spec = names->columns[column->column].spec;
        r->failed |= !column->name;
    }
}

static bool is_place(const dray_batch *batch, dray__batch_place place)
{
    return place.put < batch->put_count && place.item < batch->puts[place.put].items;
}

static void read_pieces(dray_batch *batch, dray__reader *r)
{
    batch->pieces_count = dray__get_count(r, 12);
    batch->pieces = array(batch, r, batch->pieces_count, sizeof *batch->pieces);
    for (uint32_t i = 0; i < batch->pieces_count && !r->failed; i++) {
        dray__batch_pieces *pieces = &batch->pieces[i];
        pieces->place = dray__get_u32(r);
        pieces->row = dray__get_u32(r);
        pieces->count = dray__get_count(r, 16);
        r->failed |= pieces->place >= batch->place_count || pieces->row >= batch->row_count;
        pieces->items = array(batch, r, pieces->count, sizeof *pieces->items);
        for (uint32_t k = 0; k < pieces->count && !r->failed; k++) {
            pieces->items[k].at.put = dray__get_u32(r);
            pieces->items[k].at.item = dray__get_u32(r);
            pieces->items[k].version = dray__get_f64(r);
            r->failed |= !is_place(batch, pieces->items[k].at);
        }
    }
}

static void read_places(dray_batch *batch, dray__reader *r)
{
    batch->place_count = dray__get_count(r, (size_t)batch->row_count * 8);
    batch->places = array(batch, r, batch->place_count, sizeof(dray__batch_place *));
    for (uint32_t i = 0; i < batch->place_count && !r->failed; i++) {
        batch->places[i] = array(batch, r, batch->row_count, sizeof **batch->places);
        for (uint32_t row = 0; row < batch->row_count && !r->failed; row++) {
            dray__batch_place place = {.put = dray__get_u32(r)};
            place.item = dray__get_u32(r);
            r->failed |= place.put != UINT32_MAX && !is_place(batch, place);
            batch->places[i][row] = place;
        }
    }
    for (uint32_t i = 0; i < batch->column_count; i++)
        r->failed |= batch->columns[i].place >= batch->place_count;
}

static void read_tags(dray_batch *batch, const dray__names *names, dray__reader *r)
{
    uint32_t count = dray__get_count(r, 16), at = 0;
    batch->tags = array(batch, r, count, sizeof *batch->tags);
    batch->tag_start = array(batch, r, (size_t)batch->row_count + 1, sizeof *batch->tag_start);
    for (uint32_t i = 0; i < count && !r->failed; i++) {
        uint32_t row = dray__get_u32(r), key = dray__get_u32(r);
        double value = dray__get_f64(r);
        if (row < at || row >= batch->row_count || key >= names->key_count) {
            r->failed = true; /* ascending rows */
            return;
        }
        while (at < row)
            batch->tag_start[++at] = i;
        batch->tags[i].key = dray__arena_text(&batch->arena, names->keys[key]);
        batch->tags[i].value = value;
        r->failed |= !batch->tags[i].key;
    }
    while (!r->failed && at < batch->row_count)
        batch->tag_start[++at] = count;
}

static void read_micros(dray_batch *batch, dray__reader *r)
{
    batch->micro_count = dray__get_count(r, 4);
    batch->micro_ends = array(batch, r, batch->micro_count, sizeof *batch->micro_ends);
    for (uint32_t i = 0; i < batch->micro_count && !r->failed; i++) {
        batch->micro_ends[i] = dray__get_u32(r);
        r->failed |= batch->micro_ends[i] <= (i ? batch->micro_ends[i - 1] : 0) ||
                     batch->micro_ends[i] > batch->row_count;
    }
    if (!batch->micro_count)
        return;
    batch->own = array(batch, r, batch->row_count, sizeof *batch->own);
    for (uint32_t i = 0; i < batch->row_count && !r->failed; i++)
        batch->own[i] = dray__get_u8(r) != 0;
}

int dray__batch_read(dray_queue *queue, const dray__names *names, uint32_t ticket, dray__reader *r,
                     dray_batch **out, dray_error *error)
{
    dray_batch *batch = calloc(1, sizeof *batch);
    if (!batch)
        return dray__nomem(error);
    *batch = (dray_batch){.queue = queue, .ticket = ticket, .arena = queue->spare};
    queue->spare = (dray__arena){0};
    size_t from = r->at;
    batch->partition = dray__get_word(r);
    batch->generation = dray__get_u32(r);
    uint32_t task = dray__get_u32(r);
    read_rows(batch, r);
    read_puts(batch, r);
    read_columns(batch, names, r);
    read_places(batch, r);
    read_pieces(batch, r);
    read_tags(batch, names, r);
    read_micros(batch, r);
    int rc = dray__reader_finish(r, "batch", error);
    if (!rc && task >= queue->task_count)
        rc = dray__fail(error, DRAY_EFORMAT, "batch: there is no task number %u", task);
    if (!rc) {
        batch->task = &queue->tasks[task];
        batch->outputs = array(batch, r, batch->task->writes.count, sizeof *batch->outputs);
        batch->body_size = r->size - from;
        batch->body = malloc(batch->body_size);
        if (!batch->outputs || !batch->body)
            rc = dray__nomem(error);
        else
            memcpy(batch->body, r->data + from, batch->body_size);
    }
    if (rc) {
        batch->ticket = 0;
        dray_batch_free(batch);
        return rc;
    }
    *out = batch;
    return DRAY_OK;
}

/* ---- claims ---------------------------------------------------------------------------------- */

static void put_rank(dray__writer *w, const dray_claim_options *o)
{
    dray__put_string(w, o->group);
    dray__put_string(w, o->cost ? o->cost : DRAY_TAG_TOKENS);
    dray__put_u64(w, o->group_epoch);
    dray__put_u64(w, o->round);
    dray__put_u64(w, o->token_cap);
    dray__put_u32(w, o->dp_rank);
    dray__put_u32(w, o->dp_size ? o->dp_size : 1);
    dray__put_u32(w, o->peer);
    dray__put_u32(w, o->peers ? o->peers : 1);
    dray__put_u32(w, o->micro_rows);
}

static int put_choice(dray_queue *queue, dray__writer *w, const dray_claim_options *o,
                      dray_error *error)
{
    uint32_t task;
    int rc = dray__queue_task(queue, o->task, &task, error);
    if (!rc && o->partition)
        rc = dray__name_check(o->partition, "partition", error);
    if (!rc && o->group && *o->group)
        rc = dray__name_check(o->group, "consumer group", error);
    if (!rc && o->cost)
        rc = dray__name_check(o->cost, "tag", error);
    if (!rc && !o->count)
        rc = dray__fail(error, DRAY_EINVALID, "claim for %s: at least one row expected", o->task);
    bool leaves = o->policy == DRAY_POLICY_FIFO || o->policy == DRAY_POLICY_GROUP;
    if (!rc &&
        (o->fresh < 0 || o->fresh > DRAY_FRESH_LEFT || (o->fresh == DRAY_FRESH_LEFT && !leaves)))
        rc = dray__fail(error, DRAY_EINVALID,
                        "claim for %s: fresh %d with policy %d: expected 0, 1, or with fifo and "
                        "group 2",
                        o->task, o->fresh, o->policy);
    if (!rc && o->max_hold_ns < 0)
        rc = dray__fail(error, DRAY_EINVALID, "claim for %s: max_hold_ns %lld", o->task,
                        (long long)o->max_hold_ns);
    if (rc)
        return rc;
    dray__put_u32(w, task);
    dray__put_string(w, o->partition);
    dray__put_u32(w, o->count);
    dray__put_u8(w, o->up_to != 0);
    dray__put_u32(w, (uint32_t)o->policy);
    dray__put_i64(w, o->max_hold_ns);
    dray__put_u8(w, (uint8_t)o->fresh);
    dray__put_u32(w, o->staleness);
    dray__put_u64(w, o->version);
    bool ranked = o->policy == DRAY_POLICY_TOKEN_BALANCED || o->policy == DRAY_POLICY_LOCKSTEP;
    dray__put_u8(w, ranked);
    if (ranked)
        put_rank(w, o);
    return DRAY_OK;
}

/* Choice i of the list; `stride` is the size of each, as the caller was compiled. */
static int read_options(const dray_claim_options *list, size_t stride, uint32_t i,
                        dray_claim_options *out, dray_error *error)
{
    const uint8_t *at = (const uint8_t *)list + i * stride;
    if (i && memcmp(at, &stride, sizeof stride) != 0)
        return dray__fail(error, DRAY_EINVALID, "claim: choice %u has another size than the first",
                          i);
    *out = (dray_claim_options)DRAY_CLAIM_OPTIONS_INIT;
    return dray__options_read(out, sizeof *out, dray__end_of(dray_claim_options, max_hold_ns), at,
                              "dray_claim_options", error);
}

/* Adds the request to queue->out, after the head. The first choice's timeout counts. */
static int put_claim(dray_queue *queue, const dray_claim_options *options, uint32_t count,
                     int64_t *deadline, dray_error *error)
{
    if (!options || !count || count > DRAY__TASKS_MAX)
        return dray__fail(error, DRAY_EINVALID, "claim: 1 to %u choices expected, found %u",
                          DRAY__TASKS_MAX, options ? count : 0);
    dray_claim_options o;
    int rc = read_options(options, options->size, 0, &o, error);
    if (rc)
        return rc;
    *deadline = dray__context_deadline(queue->context, o.timeout_ns);
    dray__writer *w = &queue->out;
    dray__put_u32(w, dray__queue_ticket(queue));
    queue->known_at = w->size;
    dray__put_u32(w, queue->names.columns_known);
    dray__put_u32(w, queue->names.key_count);
    dray__put_i64(w, o.timeout_ns ? *deadline - dray__now() : 0);
    dray__put_u32(w, count);
    size_t stride = options->size;
    for (uint32_t i = 0; !rc && i < count; i++) {
        rc = read_options(options, stride, i, &o, error);
        if (!rc)
            rc = put_choice(queue, w, &o, error);
    }
    if (rc)
        dray__storage_untell(&queue->storage, false);
    return rc;
}

static int read_claim(dray_queue *queue, uint32_t ticket, uint32_t count, dray__reply *reply,
                      uint32_t *which, dray_batch **out, dray_error *error)
{
    dray__reader *r = &reply->payload;
    dray__queue_read_dropped(queue, r);
    uint32_t index = dray__get_u32(r);
    int rc = dray__names_read(&queue->names, r, error);
    if (!rc)
        rc = dray__batch_read(queue, &queue->names, ticket, r, out, error);
    if (!rc && index >= count) {
        dray_batch_free(*out);
        *out = NULL;
        return dray__fail(error, DRAY_EPROTO, "claim: choice %u of %u", index, count);
    }
    if (rc)
        dray__queue_release(queue, ticket);
    else if (which)
        *which = index;
    return rc;
}

/* The wait for rows is over; NULL: without any. */
static void leave_claim(const dray_batch *batch)
{
    if (batch)
        dray__batch_leave_span(batch);
    else
        dray_trace_leave();
}

int dray_queue_claim_any(dray_queue *queue, const dray_claim_options *options, uint32_t count,
                         uint32_t *which, dray_batch **out, dray_error *error)
{
    int64_t deadline;
    dray__queue_begin(queue);
    int rc = put_claim(queue, options, count, &deadline, error);
    if (rc)
        return rc;
    uint32_t ticket = queue->tickets;
    dray__reply reply;
    dray_batch *batch;
    dray_trace_wait(DRAY_CAUSE_SAMPLES, "queue claim", -1);
    rc = dray__queue_call(queue, DRAY__MSG_QUEUE_CLAIM, deadline, &reply, error);
    if (rc == DRAY_ETIMEDOUT)
        dray__queue_release(queue, ticket); /* the answer may be on its way */
    if (!rc)
        rc = read_claim(queue, ticket, count, &reply, which, &batch, error);
    leave_claim(rc ? NULL : batch);
    if (!rc)
        *out = batch;
    return rc;
}

/* The claim's part of the answer to a commit with a claim. */
static int read_next(dray_queue *queue, uint32_t ticket, uint32_t count, dray__reply *reply,
                     uint32_t *which, dray_batch **out, dray_error *error)
{
    int code = (int)dray__get_u32(&reply->payload);
    if (!code)
        return read_claim(queue, ticket, count, reply, which, out, error);
    char *message = dray__get_prose(&reply->payload, DRAY__FRAME_MAX);
    int rc = dray__reader_finish(&reply->payload, "QUEUE_NEXT", error);
    if (!rc)
        rc = dray__fail(error, code < 0 ? code : DRAY_EPROTO, "%s", message);
    free(message);
    return rc;
}

int dray_batch_commit_claim(dray_batch *batch, const dray_claim_options *options, uint32_t count,
                            uint32_t *which, dray_batch **out, dray_error *error)
{
    dray_queue *queue = batch->queue;
    if (batch->committed)
        return dray_queue_claim_any(queue, options, count, which, out, error);
    int64_t deadline;
    int rc = dray__batch_put_commit(batch, dray__queue_begin(queue), error);
    if (rc) {
        dray__storage_untell(&queue->storage, false);
        return rc;
    }
    rc = put_claim(queue, options, count, &deadline, error);
    if (rc)
        return rc;
    uint32_t ticket = queue->tickets;
    dray__reply reply;
    dray_batch *next;
    dray_trace_wait(DRAY_CAUSE_SAMPLES, "queue claim", -1);
    rc = dray__queue_call(queue, DRAY__MSG_QUEUE_NEXT, deadline, &reply, error);
    dray__batch_commit_done(batch, rc, &reply.payload);
    if (rc == DRAY_ETIMEDOUT) { /* the answer may be on its way, with chunks that nobody takes */
        dray__queue_release(queue, ticket);
        dray__storage_untell(&queue->storage, true);
    }
    if (!rc)
        rc = read_next(queue, ticket, count, &reply, which, &next, error);
    leave_claim(rc ? NULL : next);
    if (!rc)
        *out = next;
    return rc;
}

int dray_queue_claim(dray_queue *queue, const dray_claim_options *options, dray_batch **out,
                     dray_error *error)
{
    return dray_queue_claim_any(queue, options, 1, NULL, out, error);
}

static int send_start(dray_queue *queue, dray_batch *batch, const dray_claim_options *options,
                      uint32_t count, dray_error *error)
{
    int64_t deadline;
    dray__writer *w = dray__queue_begin(queue);
    int rc = batch ? dray__batch_put_commit(batch, w, error) : DRAY_OK;
    if (!rc)
        rc = put_claim(queue, options, count, &deadline, error);
    if (!rc)
        rc = dray__call_start(queue->channel, batch ? DRAY__MSG_QUEUE_NEXT : DRAY__MSG_QUEUE_CLAIM,
                              &queue->out, NULL, 0, error);
    if (rc)
        dray__storage_untell(&queue->storage, false);
    return rc;
}

int dray__claim_start_after(dray_queue *queue, dray_batch *batch, const dray_claim_options *options,
                            uint32_t count, dray_error *error)
{
    if (queue->started)
        return dray__fail(error, DRAY_EBUSY, "a claim of queue %s is started already", queue->name);
    int rc = send_start(queue, batch, options, count, error);
    if (rc == DRAY_ECLOSED && dray__queue_come_back(queue) == DRAY_OK)
        rc = send_start(queue, batch, options, count, error);
    if (rc)
        return rc;
    queue->started = queue->tickets;
    queue->started_count = count;
    queue->riding = batch;
    return DRAY_OK;
}

int dray_queue_claim_start(dray_queue *queue, const dray_claim_options *options, uint32_t count,
                           dray_error *error)
{
    return dray__claim_start_after(queue, NULL, options, count, error);
}

int dray_queue_claim_poll(dray_queue *queue, uint32_t *which, dray_batch **out, dray_error *error)
{
    if (!queue->started)
        return dray__fail(error, DRAY_EINVALID, "no claim of queue %s is started", queue->name);
    dray__reply reply;
    dray_batch *next, *batch = queue->riding;
    int rc = dray__call_poll(queue->channel, &reply, error);
    if (rc == DRAY_EAGAIN)
        return rc;
    uint32_t ticket = queue->started, count = queue->started_count;
    queue->started = 0;
    queue->riding = NULL;
    if (batch)
        dray__batch_commit_done(batch, rc, &reply.payload);
    if (batch && rc) /* as call_once does, for what comes with a commit's answer */
        dray__storage_untell(&queue->storage, true);
    if (rc)
        return rc;
    rc = batch ? read_next(queue, ticket, count, &reply, which, &next, error)
               : read_claim(queue, ticket, count, &reply, which, &next, error);
    if (!rc)
        *out = next;
    return rc;
}
