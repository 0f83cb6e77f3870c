/* Claims: requests for rows, and the batch that a reply describes. */
#include "queue/client/client.h"

#include "base/clock.h"
#include "base/error.h"
#include "base/options.h"
#include "control/frame.h"
#include "queue/policies.h"

#include <stdlib.h>
#include <string.h>

/* The batch in the answer to a claim. */
static const dray__fields row_fields =
    DRAY__FIELDS(dray_row, DRAY__NUMBERS(dray_row, slot, generation, attempt, group));
static const dray__fields extent_fields = DRAY__FIELDS(
    struct dray__batch_extent, DRAY__NUMBERS(struct dray__batch_extent, column, keeper),
    DRAY__FIELD_STRUCT(struct dray__batch_extent, extent, dray__extent_fields));
static const dray__fields put_fields =
    DRAY__FIELDS(dray__batch_put, DRAY__NUMBERS(dray__batch_put, items),
                 DRAY__FIELD_LIST(dray__batch_put, extents, count, extent_fields));
static const dray__fields column_fields =
    DRAY__FIELDS(dray__batch_column, DRAY__NUMBERS(dray__batch_column, column, place));
static const dray__fields place_fields =
    DRAY__FIELDS(dray__batch_place, DRAY__NUMBERS(dray__batch_place, put, item));
static const dray__fields piece_fields = DRAY__FIELDS(
    struct dray__batch_piece, DRAY__NUMBERS(struct dray__batch_piece, at.put, at.item, version));
static const dray__fields pieces_fields =
    DRAY__FIELDS(dray__batch_pieces, DRAY__NUMBERS(dray__batch_pieces, place, row),
                 DRAY__FIELD_LIST(dray__batch_pieces, items, count, piece_fields));
static const dray__fields tag_fields = DRAY__FIELDS(
    struct dray__batch_numbered, DRAY__NUMBERS(struct dray__batch_numbered, row, key, value));
const dray__fields dray__body_fields =
    DRAY__FIELDS(dray_batch, DRAY__FIELD_TEXT(dray_batch, partition, DRAY__WORD_MAX),
                 DRAY__NUMBERS(dray_batch, generation, task_number),
                 DRAY__FIELD_LIST(dray_batch, rows, row_count, row_fields),
                 DRAY__FIELD_LIST(dray_batch, puts, put_count, put_fields),
                 DRAY__FIELD_LIST(dray_batch, columns, column_count, column_fields),
                 DRAY__FIELD_LIST(dray_batch, places, cell_count, place_fields),
                 DRAY__FIELD_LIST(dray_batch, pieces, pieces_count, pieces_fields),
                 DRAY__FIELD_LIST(dray_batch, numbered, tag_count, tag_fields),
                 DRAY__FIELD_LIST(dray_batch, micro_ends, micro_count, dray__u32_fields),
                 DRAY__FIELD_LIST(dray_batch, own, own_count, dray__u8_fields));

static bool is_place(const dray_batch *batch, dray__batch_place place)
{
    return place.put < batch->put_count && place.item < batch->puts[place.put].items;
}

static bool name_columns(dray_batch *batch, const dray__names *names)
{
    for (uint32_t i = 0; i < batch->column_count; i++) {
        dray__batch_column *column = &batch->columns[i];
        if (column->column >= names->column_count || !names->columns[column->column].name ||
            column->place >= batch->place_count)
            return false;
        column->name = dray__arena_text(&batch->arena, names->columns[column->column].name);
        column->spec = names->columns[column->column].spec;
        if (!column->name)
            return false;
    }
    return true;
}

static bool name_tags(dray_batch *batch, const dray__names *names)
{
    uint32_t at = 0;
    batch->tags = dray__arena_get(&batch->arena, (batch->tag_count + 1u) * sizeof *batch->tags);
    batch->tag_start =
        dray__arena_get(&batch->arena, (batch->row_count + 1u) * sizeof *batch->tag_start);
    if (!batch->tags || !batch->tag_start)
        return false;
    batch->tag_start[0] = 0;
    for (uint32_t i = 0; i < batch->tag_count; i++) {
        const struct dray__batch_numbered *tag = &batch->numbered[i];
        if (tag->row < at || tag->row >= batch->row_count || tag->key >= names->key_count)
            return false;
        while (at < tag->row)
            batch->tag_start[++at] = i;
        batch->tags[i].key = dray__arena_text(&batch->arena, names->keys[tag->key]);
        batch->tags[i].value = tag->value;
        if (!batch->tags[i].key)
            return false;
    }
    while (at < batch->row_count)
        batch->tag_start[++at] = batch->tag_count;
    return true;
}

static bool check_places(const dray_batch *batch)
{
    for (uint32_t i = 0; i < batch->cell_count; i++)
        if (batch->places[i].put != UINT32_MAX && !is_place(batch, batch->places[i]))
            return false;
    for (uint32_t i = 0; i < batch->pieces_count; i++) {
        const dray__batch_pieces *pieces = &batch->pieces[i];
        if (pieces->place >= batch->place_count || pieces->row >= batch->row_count)
            return false;
        for (uint32_t k = 0; k < pieces->count; k++)
            if (!is_place(batch, pieces->items[k].at))
                return false;
    }
    for (uint32_t i = 0; i < batch->micro_count; i++)
        if (batch->micro_ends[i] <= (i ? batch->micro_ends[i - 1] : 0) ||
            batch->micro_ends[i] > batch->row_count)
            return false;
    return batch->own_count == (batch->micro_count ? batch->row_count : 0);
}

/* Checks the numbers of the body against each other. */
static bool check_body(dray_batch *batch, const dray__names *names)
{
    if (!batch->row_count || batch->cell_count % batch->row_count) /* a batch is never empty */
        return false;
    batch->place_count = batch->cell_count / batch->row_count;
    for (uint32_t i = 0; i < batch->row_count; i++)
        batch->rows[i].id = (uint64_t)batch->rows[i].generation << 32 | batch->rows[i].slot;
    return check_places(batch) && name_columns(batch, names) && name_tags(batch, names);
}

static int open_outputs(dray_batch *batch, const uint8_t *body, dray_error *error)
{
    dray_queue *queue = batch->queue;
    if (batch->task_number >= queue->task_count)
        return dray__fail(error, DRAY_EFORMAT, "batch: there is no task number %u",
                          batch->task_number);
    batch->task = &queue->tasks[batch->task_number];
    size_t bytes = (batch->task->writes_count + 1u) * sizeof *batch->outputs;
    batch->outputs = dray__arena_get(&batch->arena, bytes);
    if (!batch->outputs)
        return dray__nomem(error);
    memset(batch->outputs, 0, bytes); /* before anything fails: dray_batch_free reads them */
    batch->body = malloc(batch->body_size);
    if (!batch->body)
        return dray__nomem(error);
    memcpy(batch->body, body, batch->body_size);
    return DRAY_OK;
}

int dray__batch_read(dray_queue *queue, const dray__names *names, uint32_t ticket, dray__reader *r,
                     dray_batch **out, dray_error *error)
{
    dray_batch *batch = calloc(1, sizeof *batch);
    if (!batch)
        return dray__nomem(error);
    *batch = (dray_batch){.queue = queue, .ticket = ticket, .arena = queue->spare};
    queue->spare = (dray__arena){0};
    const uint8_t *body = r->data + r->at;
    batch->body_size = r->size - r->at;
    dray__get_fields(r, &batch->arena, &dray__body_fields, batch);
    r->failed |= !r->failed && !check_body(batch, names);
    int rc = dray__reader_finish(r, "batch", error);
    if (!rc)
        rc = open_outputs(batch, body, error);
    if (rc) {
        batch->ticket = 0;
        dray_batch_free(batch);
        return rc;
    }
    *out = batch;
    return DRAY_OK;
}

/* ---- claims ---------------------------------------------------------------------------------- */

static int make_choice(const dray_queue *queue, const dray_claim_options *o, dray__choice *out,
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
    unsigned traits = dray__policy_traits(o->policy);
    if (!rc && (o->fresh < 0 || o->fresh > DRAY_FRESH_LEFT ||
                (o->fresh == DRAY_FRESH_LEFT && !(traits & DRAY__POLICY_LEAVES))))
        rc = dray__fail(error, DRAY_EINVALID,
                        "claim for %s: fresh %d with policy %d: expected 0, 1, or with fifo and "
                        "group 2",
                        o->task, o->fresh, o->policy);
    if (!rc && o->max_hold_ns < 0)
        rc = dray__fail(error, DRAY_EINVALID, "claim for %s: max_hold_ns %lld", o->task,
                        (long long)o->max_hold_ns);
    if (rc)
        return rc;
    *out = (dray__choice){.hold_ns = o->max_hold_ns,
                          .ranked = traits & DRAY__POLICY_ROUNDS,
                          .want = {.task = task,
                                   .count = o->count,
                                   .partition = o->partition,
                                   .up_to = o->up_to != 0,
                                   .policy = o->policy,
                                   .fresh = o->fresh,
                                   .staleness = o->staleness,
                                   .version = o->version,
                                   .group = o->group,
                                   .cost = o->cost ? o->cost : DRAY_TAG_TOKENS,
                                   .group_epoch = o->group_epoch,
                                   .round = o->round,
                                   .token_cap = o->token_cap,
                                   .dp_rank = o->dp_rank,
                                   .dp_size = o->dp_size ? o->dp_size : 1,
                                   .peer = o->peer,
                                   .peers = o->peers ? o->peers : 1,
                                   .micro_rows = o->micro_rows}};
    return DRAY_OK;
}

/* Reads choice i of the list. `stride` is the caller's size of a choice. */
static int read_options(const dray_claim_options *list, size_t stride, uint32_t i,
                        dray_claim_options *out, dray_error *error)
{
    const uint8_t *at = (const uint8_t *)list + i * stride;
    if (i && memcmp(at, &stride, sizeof stride) != 0)
        return dray__fail(error, DRAY_EINVALID, "claim: choice %u has another size than the first",
                          i);
    *out = (dray_claim_options)DRAY_CLAIM_OPTIONS_INIT;
    return DRAY__OPTIONS_READ(dray_claim_options, max_hold_ns, out, at, error);
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
    dray__choice choices[DRAY__TASKS_MAX];
    const dray__claiming claiming = {.ticket = dray__queue_ticket(queue),
                                     .columns_known = queue->names.columns_known,
                                     .keys_known = queue->names.key_count,
                                     .timeout_ns = o.timeout_ns ? *deadline - dray__now() : 0,
                                     .choices = choices,
                                     .count = count};
    for (uint32_t i = 0; !rc && i < count; i++) {
        rc = read_options(options, options->size, i, &o, error);
        if (!rc)
            rc = make_choice(queue, &o, &choices[i], error);
    }
    queue->known_at = queue->out.size + sizeof claiming.ticket;
    if (!rc)
        dray__put_fields(&queue->out, &dray__claiming_fields, &claiming);
    return rc;
}

/* Makes a CLAIM, or, after the commit of a batch, a NEXT. */
static int put_request(dray_queue *queue, dray_batch *batch, const dray_claim_options *options,
                       uint32_t count, int64_t *deadline, dray_error *error)
{
    dray__writer *w = dray__queue_begin(queue);
    int rc = batch ? dray__batch_put_commit(batch, w, error) : DRAY_OK;
    if (!rc)
        rc = put_claim(queue, options, count, deadline, error);
    if (rc)
        dray__storage_untell(&queue->holder.storage, false);
    return rc;
}

static int read_claim(dray_queue *queue, uint32_t ticket, uint32_t count, dray__reply *reply,
                      uint32_t *which, dray_batch **out, dray_error *error)
{
    dray__reader *r = &reply->payload;
    dray__queue_read_dropped(queue, r);
    uint32_t index = dray__get_u32(r);
    bool bounded = dray__get_u8(r) != 0;
    int rc = dray__names_read(&queue->names, r, error);
    if (!rc)
        rc = dray__batch_read(queue, &queue->names, ticket, r, out, error);
    if (!rc)
        (*out)->bounded = bounded;
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

/* Ends the wait for rows. batch is NULL when the claim got none. */
static void leave_claim(const dray_batch *batch, const dray_error *error)
{
    if (batch) {
        DRAY__TRACE(waited_for(dray_batch_waited_for(batch)));
        dray__batch_leave_span(batch);
        return;
    }
    if (error->origin == DRAY_ORIGIN_WAIT)
        DRAY__TRACE(waited_for((dray_wait_cause)error->raw));
    DRAY__TRACE(leave());
}

/* The claim's part of the answer to a commit with a claim. */
static int read_next(dray_queue *queue, uint32_t ticket, uint32_t count, dray__reply *reply,
                     uint32_t *which, dray_batch **out, dray_error *error)
{
    dray__reader refusal = reply->payload;
    if (!dray__get_u32(&reply->payload) && !reply->payload.failed)
        return read_claim(queue, ticket, count, reply, which, out, error);
    dray_error why;
    dray__frame_get_error(refusal, &why);
    if (error)
        *error = why;
    return why.code;
}

static int claim_now(dray_queue *queue, dray_batch *batch, const dray_claim_options *options,
                     uint32_t count, uint32_t *which, dray_batch **out, dray_error *error)
{
    int64_t deadline;
    dray_error scratch = {0};
    error = error ? error : &scratch;
    int rc = put_request(queue, batch, options, count, &deadline, error);
    if (rc)
        return rc;
    uint32_t ticket = queue->tickets;
    dray__reply reply;
    dray_batch *next = NULL;
    DRAY__TRACE(wait(DRAY_CAUSE_SAMPLES, "queue claim", -1));
    rc = dray__queue_call(queue, batch ? DRAY__MSG_QUEUE_NEXT : DRAY__MSG_QUEUE_CLAIM, deadline,
                          &reply, error);
    if (batch)
        dray__batch_commit_done(batch, rc, &reply.payload);
    if (dray__may_hold(rc))
        dray__queue_release(queue, ticket);
    if (dray__may_hold(rc) && batch) /* the answer may have given chunks back */
        dray__storage_untell(&queue->holder.storage, true);
    if (!rc)
        rc = (batch ? read_next : read_claim)(queue, ticket, count, &reply, which, &next, error);
    leave_claim(rc ? NULL : next, error);
    if (!rc)
        *out = next;
    return rc;
}

int dray_queue_claim_any(dray_queue *queue, const dray_claim_options *options, uint32_t count,
                         uint32_t *which, dray_batch **out, dray_error *error)
{
    return claim_now(queue, NULL, options, count, which, out, error);
}

int dray_batch_commit_claim(dray_batch *batch, const dray_claim_options *options, uint32_t count,
                            uint32_t *which, dray_batch **out, dray_error *error)
{
    return claim_now(batch->queue, batch->committed ? NULL : batch, options, count, which, out,
                     error);
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
    int rc = put_request(queue, batch, options, count, &deadline, error);
    if (rc)
        return rc;
    rc = dray__call_start(queue->channel, batch ? DRAY__MSG_QUEUE_NEXT : DRAY__MSG_QUEUE_CLAIM,
                          &queue->out, NULL, 0, error);
    if (rc)
        dray__storage_untell(&queue->holder.storage, false);
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
    queue->committing = batch;
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
    dray_batch *next, *batch = queue->committing;
    int rc = queue->start_lost
                 ? dray__fail(error, DRAY_ECLOSED, "queue %s: the connection of the claim ended",
                              queue->name)
                 : dray__call_poll(queue->channel, &reply, error);
    if (rc == DRAY_EAGAIN)
        return rc;
    uint32_t ticket = queue->started, count = queue->started_count;
    queue->started = 0;
    queue->start_lost = false;
    queue->committing = NULL;
    if (batch)
        dray__batch_commit_done(batch, rc, &reply.payload);
    if (batch && rc) /* as ask_once does, for the claim in a commit's answer */
        dray__storage_untell(&queue->holder.storage, true);
    if (dray__may_hold(rc))
        dray__queue_release(queue, ticket);
    if (rc)
        return rc;
    rc = (batch ? read_next : read_claim)(queue, ticket, count, &reply, which, &next, error);
    if (!rc)
        *out = next;
    return rc;
}
