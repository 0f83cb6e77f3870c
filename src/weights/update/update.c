/* One update, as a state machine that never waits: begin -> plan -> import -> ask -> move -> vote.
 * A failure after the coordinator has decided on a version becomes this rank's vote; the group's
 * decision is then the outcome. */
#include "base/clock.h"
#include "base/error.h"
#include "base/json.h"
#include "base/log.h"
#include "memory/cuda_memory.h"
#include "store/deadline.h"
#include "store/store.h"
#include "weights/checkpoint/overlay.h"
#include "weights/sources/upload.h"
#include "weights/transfer/transfer.h"
#include "weights/update/subscriber.h"

#include <inttypes.h>
#include <jansson.h>
#include <poll.h>
#include <sched.h>
#include <stdlib.h>
#include <string.h>

/* A poll copies for about this long. */
#define SLICE_NS (2 * DRAY__MILLISECOND)
/* The longest time that the start of an update tries to reach a new coordinator. */
#define PATIENCE_NS DRAY__SECOND

/* Drops the transfer and its progress. */
static void drop_read(dray_subscriber *s)
{
    dray__transfer_close(s->transfer);
    s->transfer = NULL;
    s->sources = NULL;
    dray__map_free(&s->partial);
    free(s->compared);
    s->compared = NULL;
}

void dray__update_release(dray_subscriber *s)
{
    dray__steps_end(&s->steps, NULL);
    drop_read(s);
    free(s->path);
    s->path = NULL;
}

/* Sets the time by which the coordinator must answer the current request. */
static void expect_answer(dray_subscriber *s, int64_t by_ns)
{
    s->answer_by_ns = dray__answer_deadline(by_ns);
    dray__waker_at(&s->waker, s->answer_by_ns);
}

static int send_begin(dray_subscriber *s, dray_error *error);

/* Called when bytes were overwritten without a commit: forgets the version of that memory. */
static void forget_written(dray_subscriber *s)
{
    if (s->purpose == DRAY__PREFETCH) {
        s->has_staged = false;
        s->staged_incarnation = 0;
        return;
    }
    free(s->block_sums);
    s->block_sums = NULL;
    s->held_incarnation = 0;
    s->held_disk = 0;
}

/* Begins again, once, after an update from peers failed, because a peer may have died or taken its
 * memory back. The second attempt reads publishers only. All ranks of the group get the same
 * outcome, so all of them begin again. */
static bool begin_again(dray_subscriber *s, const dray_error *outcome)
{
    if (s->source != DRAY__FROM_PEERS || s->retried || s->channel_stuck ||
        outcome->code == DRAY_ECLOSED || s->interrupted || dray__now() >= s->deadline_ns)
        return false;
    drop_read(s);
    s->retried = true;
    s->first_error = *outcome;
    s->announced = s->writing = s->failed = s->moved_any = s->granted = s->refills = false;
    s->source = DRAY__FROM_PUBLISHERS;
    s->report.retries++;
    if (send_begin(s, NULL))
        return false;
    s->phase = PHASE_BEGIN;
    return true;
}

/* Ends the update with this outcome. */
static int end(dray_subscriber *s, const dray_error *outcome)
{
    if (outcome && s->cohort_set && s->destination.progress)
        dray__progress_end(s->destination.progress, s->run);
    if (outcome && s->exchanged && dray__stage_exchange(s, NULL)) {
        dray__log(DRAY_LOG_WARN, "group %s: a commit that failed could not be taken back",
                  s->group);
        s->has_staged = false;
        s->after_rc = DRAY_ESTALE; /* the next update must not use this staging */
    }
    if (outcome && s->writing)
        forget_written(s);
    if (outcome && outcome->code == DRAY_ETORN)
        s->held_incarnation = s->held_disk = 0;
    if (outcome && s->purpose != DRAY__PREFETCH && (s->writing || outcome->code == DRAY_ETORN))
        s->state = DRAY_GROUP_TORN;
    if (outcome && begin_again(s, outcome))
        return DRAY_OK;
    s->outcome = (dray_error){0};
    if (outcome && s->retried && outcome->code == DRAY_ETIMEDOUT)
        s->outcome = s->first_error;
    else if (outcome)
        s->outcome = *outcome;
    if (s->outcome.code == DRAY_ECLOSED && s->state == DRAY_GROUP_TORN && s->writing &&
        dray__context_takes_back(s->context))
        dray__fail(&s->outcome, DRAY_ETORN,
                   "group %s is torn (bytes may be overwritten already): %.300s", s->group,
                   outcome->message);
    s->phase = PHASE_DONE;
    int64_t now = dray__now();
    s->report.total_ns = now - s->started_ns - s->report.wait_ns;
    s->report.pause_ns = s->pause_ns ? now - s->pause_ns : 0;
    return DRAY_OK;
}

/* Returns true for the commit of a prefetched version, for which publishers are not needed. */
static bool commits(const dray_subscriber *s)
{
    return s->purpose == DRAY__COMMIT;
}

/* Returns the state of this rank's memory after the commit, for the vote (enum dray__held). */
static uint8_t held(dray_subscriber *s, dray__sums *resident)
{
    dray_error error;
    bool as_read = false;
    if (commits(s) && s->exchanged)
        return DRAY__HELD_MOVED;
    if (!s->transfer || s->load || commits(s) ||
        dray__transfer_resident(s->transfer, &as_read, resident, &error))
        return DRAY__HELD_UNKNOWN;
    return as_read ? DRAY__HELD_AS_READ : DRAY__HELD_OWN;
}

/* Writes a table of sums, and keeps its form, which the next table probably has, too. */
static void put_sums(dray_subscriber *s, dray__writer *w, dray__sums *sums, dray__sums_form **last)
{
    dray__sums_put_known(w, sums, &s->sent);
    if (!sums->form || sums->form == *last)
        return;
    dray__sums_form_drop(*last);
    *last = dray__sums_form_keep(sums->form);
}

static int vote(dray_subscriber *s, const dray_error *verdict)
{
    dray__sums sums = {0}, expected = {0}, resident = {0};
    dray_error error;
    dray_error own = {0};
    bool reads = s->transfer && !commits(s);
    dray__sums_expect(&sums, s->read_form);
    dray__sums_expect(&resident, s->resident_form);
    if (verdict)
        own = *verdict;
    else if (reads && dray__transfer_sums(s->transfer, &sums, &error))
        own = error;
    else if (reads && s->destination.rank == 0 && !dray__sums_join(&expected, &s->sources->stored))
        dray__nomem(&own);
    dray__writer w = {0};
    const dray__voting message = {s->key, s->attempt, own.code, own.code ? own.message : "",
                                  (int64_t)dray__left(s->deadline_ns)};
    dray__put_fields(&w, &dray__voting_fields, &message);
    put_sums(s, &w, &sums, &s->read_form);
    dray__sums_put_known(&w, &expected, &s->sent);
    dray__put_u8(&w, own.code ? DRAY__HELD_UNKNOWN : held(s, &resident));
    put_sums(s, &w, &resident, &s->resident_form);
    s->failed = own.code != 0;
    s->mark_ns = dray__now();
    expect_answer(s, s->deadline_ns);
    int rc = dray__call_start(s->channel, DRAY__MSG_UPDATE_VOTE, &w, NULL, 0, &error);
    dray__writer_free(&w);
    dray__sums_free(&sums);
    dray__sums_free(&expected);
    dray__sums_free(&resident);
    if (rc)
        return end(s, &error);
    s->phase = PHASE_VOTE;
    dray__hook_step("voted");
    return DRAY_OK;
}

/* ---- phases: after DRAY_OK the next one begins, DRAY_EAGAIN waits; a failure becomes a vote,
 * or ends the update ---- */

/* Takes the reply to the request that was started. Returns false when there is none yet, or the
 * update has ended; *rc says which. */
static bool answered(dray_subscriber *s, dray__reply *reply, int *rc)
{
    dray_error error;
    int code = dray__call_poll(s->channel, reply, &error);
    if (code == DRAY_OK)
        return true;
    *rc = DRAY_EAGAIN;
    if (code != DRAY_EAGAIN) {
        if (s->phase == PHASE_VOTE && s->source == DRAY__FROM_DISK && !s->failed)
            dray__fail_prefix(&error, code, "checkpoint %.200s: ", s->path);
        *rc = end(s, &error);
    } else if (s->interrupted || dray__now() >= s->answer_by_ns) {
        s->channel_stuck = true;
        dray__fail(&error, DRAY_ETIMEDOUT, "update of group %s: no answer from %s", s->group,
                   dray__context_address(s->context));
        *rc = end(s, &error);
    }
    return false;
}

static int on_begin(dray_subscriber *s)
{
    dray__reply reply;
    int rc;
    if (!answered(s, &reply, &rc))
        return rc;
    dray_error error;
    dray__update_begun told;
    dray__arena texts = {0};
    dray__get_fields(&reply.payload, &texts, &dray__update_begun_fields, &told);
    rc = dray__reader_finish(&reply.payload, "UPDATE_BEGIN", &error);
    for (uint32_t i = 0; i < told.partial_count && !rc; i++)
        if (!dray__map_set(&s->partial, told.partial[i], 0))
            rc = dray__nomem(&error);
    dray__arena_free(&texts);
    s->attempt = told.attempt;
    s->report.mode = told.mode;
    s->report.incarnation = told.incarnation;
    s->report.version = told.version;
    s->announced = told.compared;
    s->source_set = told.source_set;
    s->source_count = told.sources;
    s->group_set = told.group_set;
    s->source = told.source;
    s->granted = told.granted;
    s->cohort_set = told.cohort_set;
    s->cohort_count = told.cohort;
    s->run = told.run;
    s->last = told.last;
    if (!rc && (s->source_count > DRAY__WORLD_MAX || s->cohort_count > DRAY__COHORT_MAX))
        rc = dray__fail(&error, DRAY_EPROTO,
                        "UPDATE_BEGIN: %" PRIu32 " sources, a cohort of %" PRIu32, s->source_count,
                        s->cohort_count);
    if (rc)
        return end(s, &error);
    s->writing = s->granted; /* then a failure must be reported by a vote */
    s->report.source = s->source;
    s->mark_ns = dray__now();
    s->report.wait_ns = s->mark_ns - s->started_ns;
    dray__hook_step("plan");
    s->phase = PHASE_PLAN;
    return DRAY_OK;
}

/* Fails when an answer that the preparation needs is late, or at the deadline. A busy coordinator
 * gets the extra time that other answers have, because a subscriber with an open request cannot be
 * used any more. */
static int waits_too_long(dray_subscriber *s, dray_error *error)
{
    int64_t until = s->sources->asked ? s->answer_by_ns : s->deadline_ns;
    if (!s->interrupted && dray__now() < until)
        return DRAY_EAGAIN;
    s->channel_stuck = s->sources->asked != 0;
    return dray__fail(error, DRAY_ETIMEDOUT, "update of group %s: no answer from %s", s->group,
                      dray__context_address(s->context));
}

static int on_plan(dray_subscriber *s)
{
    dray_error error;
    int rc = dray__update_plan(s, &error);
    if (rc == DRAY_EAGAIN && (rc = waits_too_long(s, &error)) != DRAY_EAGAIN)
        return end(s, &error);
    if (rc == DRAY_EAGAIN)
        return rc;
    int64_t now = dray__now();
    s->report.plan_ns = now - s->mark_ns;
    s->mark_ns = now;
    if (rc)
        return vote(s, &error);
    dray__hook_step("import");
    s->phase = PHASE_IMPORT;
    return DRAY_OK;
}

/* Returns a number that changes when memory of this rank loses its content. */
static uint64_t content_of(const dray_subscriber *s)
{
    uint64_t all = 0;
    for (uint32_t i = 0; i < dray_layout_region_count(s->destination.layout) && !s->load; i++)
        all = 31 * all + dray__region_content(s->destination.regions[i]);
    return all;
}

/* Returns true when the memory to be written holds the engine's version, or can get it by a copy.
 */
static bool has_base(dray_subscriber *s)
{
    if (s->load || !s->held_incarnation || s->held_incarnation != s->report.incarnation)
        return false;
    return s->purpose == DRAY__UPDATE ? s->held_content == content_of(s) : dray__stage_has_base(s);
}

static int open_transfer(dray_subscriber *s, dray_error *error)
{
    s->target = s->destination;
    if (s->purpose == DRAY__PREFETCH) {
        int rc = dray__stage_open(s, error);
        if (rc)
            return rc;
        s->target.regions = s->staging;
    }
    dray__transfer_options options = {
        .load = s->load,
        .strategy = s->options.strategy,
        .bucket_bytes = s->options.bucket_bytes ? s->options.bucket_bytes : DRAY__BUCKET_DEFAULT,
        .nccl_bytes = dray__nccl_bytes(s),
        .verify = !s->options.no_verify,
        .ctas = s->options.ctas,
        .copy_engines = s->options.copy_engines,
        .within_ns = (int64_t)(s->options.prefetch_seconds * 1e9),
        .attempt = s->attempt,
        .run = s->cohort_set ? s->run : 0,
        .progress = s->purpose == DRAY__UPDATE ? s->destination.progress : NULL,
        .keys = dray__context_keys(s->context),
        .compared = s->compared,
        .has_base = has_base(s),
        .incarnation = s->report.incarnation,
        .base = s->held_version,
        .version = s->report.version,
        .has_disk_base =
            s->held_disk && !s->load && s->purpose == DRAY__UPDATE &&
            s->source == DRAY__FROM_DISK && dray__overlay_of(&s->sources->sources[0]) &&
            dray__overlay_hold(dray__overlay_of(&s->sources->sources[0]), s->held_disk)};
    dray__local_share(s->token, NULL); /* this memory is about to change */
    int rc = dray__transfer_open(s->sources, &s->target, &options, &s->transfer, error);
    dray__local_began(s->token, options.run);
    if (s->destination.progress && (rc || !dray__transfer_uploads(s->transfer)))
        dray__progress_end(s->destination.progress, options.run); /* no rank waits for this one */
    return rc ? rc : dray__waker_add(&s->waker, dray__transfer_fd(s->transfer), error);
}

static int ask_to_write(dray_subscriber *s)
{
    dray_error error;
    int64_t lease_ns = s->options.lease_ns ? s->options.lease_ns : DRAY__LEASE_DEFAULT;
    int64_t readers_ns = dray__deadline(lease_ns > 0 ? lease_ns : 0); /* the time until which
                                                                       * readers may keep it */
    s->mark_ns = dray__now();
    expect_answer(s, readers_ns > s->deadline_ns ? readers_ns : s->deadline_ns);
    int rc = dray__ask_start(s->channel, DRAY__MSG_UPDATE_WRITING, &dray__writing_fields,
                             &(dray__writing){s->key, s->attempt, lease_ns}, &error);
    if (rc)
        return end(s, &error);
    s->phase = PHASE_ASK;
    return DRAY_OK;
}

/* Notes that the engine's memory may change from now on. */
static void begin_pause(dray_subscriber *s)
{
    s->writing = true;
    if (s->purpose == DRAY__UPDATE)
        s->pause_ns = dray__now();
}

static int start_move(dray_subscriber *s)
{
    begin_pause(s);
    if (s->local && s->purpose != DRAY__PREFETCH)
        dray__local_revoke(s->token, s->attempt); /* ends readers of earlier updates */
    s->phase = PHASE_MOVE;
    dray__hook_step("writing");
    return DRAY_OK;
}

static int on_import(dray_subscriber *s)
{
    dray_error error;
    int rc = commits(s) || s->sources->ready
                 ? DRAY_OK
                 : dray__sources_import(s->sources, s->channel, s->key, &error);
    if (rc == DRAY_EAGAIN && (rc = waits_too_long(s, &error)) != DRAY_EAGAIN)
        return end(s, &error);
    if (rc == DRAY_EAGAIN)
        return rc;
    if (rc == DRAY_OK && !commits(s))
        rc = open_transfer(s, &error);
    s->report.prepare_ns = dray__now() - s->mark_ns;
    if (rc)
        return vote(s, &error);
    return s->granted ? start_move(s) : ask_to_write(s);
}

static int on_ask(dray_subscriber *s)
{
    dray__reply reply;
    int rc;
    if (!answered(s, &reply, &rc))
        return rc;
    s->report.prepare_ns += dray__now() - s->mark_ns;
    begin_pause(s);
    s->phase = PHASE_MOVE;
    dray__waker_at(&s->waker, s->deadline_ns); /* routes may wait longer than the deadline */
    dray__hook_step("writing");
    return DRAY_OK;
}

/* Notes the publisher that was last in the report, if no other wait was longer. */
static void note_wait(dray_subscriber *s)
{
    for (uint32_t i = 0; s->last && s->report.wait_ns > s->report.held_ns && i < s->sources->count;
         i++)
        if (s->sources->sources[i].member == s->last) {
            s->report.held_ns = s->report.wait_ns;
            dray__source_who(&s->sources->sources[i], s->report.held_by, sizeof s->report.held_by);
        }
}

static int on_move(dray_subscriber *s)
{
    dray_error error;
    if (s->interrupted || dray__now() >= s->deadline_ns) {
        dray__fail(&error, DRAY_ETIMEDOUT, "the deadline passed while bytes were moved");
        if (s->transfer)
            dray__transfer_explain(s->transfer, &error);
        return vote(s, &error);
    }
    bool first = !s->moved_any;
    if (first)
        dray__steps_begin(&s->steps, dray__now());
    s->moved_any = true;
    int rc = s->exchanges && !s->exchanged ? dray__stage_exchange(s, &error)
             : s->refills                  ? dray__stage_refill(s, &error)
                                           : DRAY_OK;
    if (rc == DRAY_OK)
        rc = dray__transfer_step(s->transfer, SLICE_NS, &error);
    if (first)
        dray__hook_step("moving");
    if (rc == DRAY_EAGAIN)
        return rc;
    if (rc)
        return vote(s, &error);
    dray__hook_step("moved");
    rc = dray__transfer_check(s->transfer, &error);
    if (rc == DRAY_OK && commits(s))
        rc = dray__transfer_compare(s->transfer, s->staged_sums, &error);
    dray__transfer_report(s->transfer, &s->report);
    note_wait(s);
    dray__steps_end(&s->steps, &s->report);
    s->report.peak_extra_bytes += s->staging_bytes;
    s->report.spare_bytes = s->staging_bytes;
    s->report.spare_waste_bytes = dray__exchange_waste_bytes(s->exchange);
    s->report.exchanged_bytes = s->exchanged ? dray__exchange_bytes(s->exchange) : 0;
    s->report.bytes += s->report.exchanged_bytes;
    dray__hook_step("verified");
    return vote(s, rc ? &error : NULL);
}

static void tell(dray_subscriber *s)
{
    json_t *object = dray__report_object(&s->report);
    dray__json_set(&object, "model", json_string(s->model));
    dray__json_set(&object, "group", json_string(s->group));
    char *json = dray__report_text(object);
    /* A notice without an answer; if it is lost, it is not sent again. */
    if (json)
        dray__tell(s->channel, DRAY__MSG_UPDATE_REPORT, &dray__update_told_fields,
                   &(dray__update_told){s->key, json});
    free(json);
}

static int on_vote(dray_subscriber *s)
{
    dray__reply reply;
    int rc;
    if (!answered(s, &reply, &rc))
        return rc;
    dray_error error;
    if (s->failed) {
        dray__fail(&error, DRAY_EPROTO, "a vote against the update was committed");
        return end(s, &error);
    }
    dray__committed told;
    dray__get_fields(&reply.payload, NULL, &dray__committed_fields, &told);
    s->report.verified_tensors = told.tensors;
    s->report.verified_bytes = told.bytes;
    if (dray__reader_finish(&reply.payload, "UPDATE_VOTE", &error))
        return end(s, &error);
    s->report.commit_ns = dray__now() - s->mark_ns;
    if (s->purpose == DRAY__PREFETCH) {
        free(s->staged_sums);
        s->staged_sums = dray__transfer_take_blocks(s->transfer);
        s->staged_version = s->report.version;
        s->staged_incarnation = s->report.incarnation;
        s->has_staged = true;
        s->spare_is_old = false;
    } else {
        free(s->block_sums);
        s->block_sums = dray__transfer_take_blocks(s->transfer);
        for (uint32_t b = 0;
             s->exchanged && s->block_sums && b < dray_layout_block_count(s->destination.layout);
             b++)
            if (dray__exchange_blocks(s->exchange)[b])
                s->block_sums[b] = s->staged_sums[b];
        s->held_incarnation = s->report.incarnation;
        s->held_version = s->report.version;
        s->held_content = content_of(s);
        s->held_disk = 0;
        if (s->source == DRAY__FROM_DISK && !commits(s) && !s->options.no_verify &&
            dray__overlay_sum_of(s->sources->sources[0].layout, &s->sources->stored, &s->held_disk,
                                 NULL))
            s->held_disk = 0; /* out of memory: the next checkpoint is read in full */
        s->state = DRAY_GROUP_WHOLE;
        s->mode = s->report.mode;
        s->version = s->report.version;
        s->incarnation = s->report.incarnation;
    }
    if (commits(s)) {
        free(s->staged_sums);
        s->staged_sums = NULL;
        s->has_staged = false;
        s->spare_is_old = s->exchanged;
    }
    dray__hook_step("committed");
    end(s, NULL);
    if (s->destination.rank == 0)
        tell(s);
    if (s->exchanged)
        dray__stage_after(s);
    s->exchanged = false;
    return DRAY_OK;
}

static int (*const phases[])(dray_subscriber *s) = {
    [PHASE_BEGIN] = on_begin, [PHASE_PLAN] = on_plan, [PHASE_IMPORT] = on_import,
    [PHASE_ASK] = on_ask,     [PHASE_MOVE] = on_move, [PHASE_VOTE] = on_vote,
};

/* ---- the public calls ----------------------------------------------------------------------- */

static int read_options(const dray_update_options *given, dray_update_options *out,
                        dray_error *error)
{
    return DRAY__OPTIONS_READ(dray_update_options, timeout_ns, out, given, error);
}

static int check_report(const dray_update_report *report, dray_error *error)
{
    return report ? dray__options_check(report, DRAY__REPORT_FIRST, "dray_update_report", error)
                  : DRAY_OK;
}

static int check(const dray_subscriber *s, enum dray__purpose purpose,
                 const dray_update_options *options, dray_error *error)
{
    if (!s)
        return dray__fail(error, DRAY_EINVALID, "subscriber must be given");
    if (options->mode < DRAY_MODE_AUTO || options->mode > DRAY_MODE_DISK)
        return dray__fail(error, DRAY_EINVALID, "mode %d", options->mode);
    if (options->strategy < DRAY_STRATEGY_DIRECT || options->strategy > DRAY_STRATEGY_PARAMETER)
        return dray__fail(error, DRAY_EINVALID, "strategy %d", options->strategy);
    if (options->copy_engines != 0 && options->copy_engines != 1)
        return dray__fail(error, DRAY_EINVALID, "copy_engines %d: 0 or 1 expected",
                          options->copy_engines);
    if (options->timeout_ns < 0 || options->lease_ns < 0)
        return dray__fail(error, DRAY_EINVALID, "timeout_ns %" PRId64 ", lease_ns %" PRId64,
                          options->timeout_ns, options->lease_ns);
    if (options->mode == DRAY_MODE_DISK && !(options->path && options->path[0]))
        return dray__fail(error, DRAY_EINVALID, "mode disk needs the path of a checkpoint");
    if (options->bucket_bytes && options->bucket_bytes < DRAY__BUCKET_MIN)
        return dray__fail(error, DRAY_EINVALID,
                          "bucket_bytes %" PRIu64 ": 0 or at least %" PRIu64 " expected",
                          options->bucket_bytes, DRAY__BUCKET_MIN);
    if (options->nccl_bytes && options->nccl_bytes < DRAY__NCCL_MIN)
        return dray__fail(error, DRAY_EINVALID,
                          "nccl_bytes %" PRIu64 ": 0 or at least %" PRIu64 " expected",
                          options->nccl_bytes, DRAY__NCCL_MIN);
    if (!(options->prefetch_seconds >= 0 && options->prefetch_seconds <= DRAY__WITHIN_MAX))
        return dray__fail(error, DRAY_EINVALID, "prefetch_seconds %g: 0 to %d expected",
                          options->prefetch_seconds, DRAY__WITHIN_MAX);
    if (options->prefetch_seconds > 0 && purpose != DRAY__PREFETCH)
        return dray__fail(error, DRAY_EINVALID,
                          "prefetch_seconds %g: a prefetch alone can be spread over a time",
                          options->prefetch_seconds);
    if (purpose != DRAY__UPDATE && s->load)
        return dray__fail(error, DRAY_EUNSUPPORTED,
                          "group %s takes tensors by load_weights: nothing of it can be prefetched",
                          s->group);
    if (s->phase != PHASE_IDLE)
        return dray__fail(error, DRAY_EBUSY, "an update of group %s is in progress", s->group);
    return DRAY_OK;
}

static int send_begin(dray_subscriber *s, dray_error *error)
{
    const dray__sources *ready = s->live && s->live->imported ? s->live : NULL;
    const dray__update_wish wish = {.key = s->key,
                                    .mode = (uint8_t)s->options.mode,
                                    .min_version = s->options.min_version,
                                    .path = s->path,
                                    .path_version = s->options.path_version,
                                    .verify = !s->options.no_verify,
                                    .timeout_ns = s->deadline_ns - dray__now(),
                                    .purpose = (uint8_t)s->purpose,
                                    .publishers_only = s->options.no_peers || s->retried,
                                    .ready_source = ready ? ready->source_set : 0,
                                    .ready_group = ready ? ready->group_set : 0};
    return dray__ask_start(s->channel, DRAY__MSG_UPDATE_BEGIN, &dray__update_wish_fields, &wish,
                           error);
}

static int start(dray_subscriber *s, enum dray__purpose purpose, const dray_update_options *given,
                 int64_t patience_ns, dray_error *error)
{
    dray_update_options own = DRAY_UPDATE_OPTIONS_INIT, *options = &own;
    int rc = read_options(given, options, error);
    if (rc == DRAY_OK)
        rc = check(s, purpose, options, error);
    if (rc)
        return rc;
    if (s->channel_stuck && dray__channel_alive(s->channel))
        return dray__fail(error, DRAY_ECLOSED,
                          "group %s: the coordinator left an earlier request unanswered; open the "
                          "subscriber again",
                          s->group);
    dray__stage_join(s);
    s->options = *options;
    s->path = strdup(options->path ? options->path : "");
    if (!s->path)
        return dray__nomem(error);
    s->started_ns = dray__now();
    s->deadline_ns = options->timeout_ns ? dray__deadline(options->timeout_ns)
                     : s->timeout_ns == DRAY_WAIT_DEFAULT
                         ? dray__context_deadline(s->context, DRAY_WAIT_DEFAULT)
                         : dray__deadline(s->timeout_ns);
    s->report = (dray_update_report)DRAY_UPDATE_REPORT_INIT;
    s->report.strategy = options->strategy;
    s->announced = s->writing = s->failed = s->moved_any = false;
    s->retried = s->granted = s->interrupted = false;
    s->exchanges = s->exchanged = s->refills = false;
    s->pause_ns = purpose == DRAY__COMMIT ? s->started_ns : 0;
    s->purpose = purpose;
    s->source = DRAY__FROM_PUBLISHERS;
    int64_t until = dray__now() + patience_ns;
    until = until < s->deadline_ns ? until : s->deadline_ns;
    rc = dray__subscriber_ensure(s, until, error);
    if (rc == DRAY_OK && purpose != DRAY__PREFETCH) /* a prefetch does not need the memory */
        dray__subscriber_put_again(s, until);
    dray__hook_step("begin");
    if (rc == DRAY_OK)
        rc = send_begin(s, error);
    if (rc) {
        dray__update_release(s);
        return rc;
    }
    s->phase = PHASE_BEGIN;
    expect_answer(s, s->deadline_ns);
    return DRAY_OK;
}

int dray_update_start(dray_subscriber *s, const dray_update_options *options, dray_error *error)
{
    return start(s, DRAY__UPDATE, options, PATIENCE_NS, error);
}

int dray_prefetch_start(dray_subscriber *s, const dray_update_options *options, dray_error *error)
{
    return start(s, DRAY__PREFETCH, options, PATIENCE_NS, error);
}

int dray_commit_start(dray_subscriber *s, const dray_update_options *options, dray_error *error)
{
    return start(s, DRAY__COMMIT, options, PATIENCE_NS, error);
}

int dray_update_poll(dray_subscriber *s, dray_error *error)
{
    if (!s || s->phase == PHASE_IDLE)
        return dray__fail(error, DRAY_EINVALID, "no update was started");
    int rc = DRAY_OK;
    dray__store_until(s->deadline_ns);
    while (rc == DRAY_OK && s->phase != PHASE_DONE)
        rc = phases[s->phase](s);
    dray__store_until(0);
    bool can_move = s->phase == PHASE_MOVE && (s->refills ? dray__now() >= s->refill_due_ns
                                                          : !dray__transfer_waits(s->transfer));
    dray__subscriber_signal(s, can_move || s->phase == PHASE_DONE);
    return s->phase == PHASE_DONE ? DRAY_OK : DRAY_EAGAIN;
}

int dray_update_finish(dray_subscriber *s, dray_update_report *report, dray_error *error)
{
    if (!s || s->phase == PHASE_IDLE)
        return dray__fail(error, DRAY_EINVALID, "no update was started");
    if (s->phase != PHASE_DONE)
        return dray__fail(error, DRAY_EAGAIN, "the update of group %s goes on", s->group);
    int rc = check_report(report, error);
    if (rc)
        return rc;
    s->phase = PHASE_IDLE;
    dray__waker_at(&s->waker, 0);
    dray__subscriber_signal(s, false);
    dray__update_release(s);
    if (s->outcome.code) {
        if (error)
            *error = s->outcome;
        return s->outcome.code;
    }
    if (report)
        dray__options_fill(report, &s->report, sizeof s->report);
    return DRAY_OK;
}

/* For GPU memory, of which updates take milliseconds: the thread polls for the coordinator's answer
 * for this time before it sleeps, because waking takes a good part of a millisecond. */
#define LOOK_NS DRAY__MILLISECOND

static bool answer_is_near(const dray_subscriber *s, int64_t waited_ns)
{
    bool asked = s->phase == PHASE_BEGIN || s->phase == PHASE_ASK || s->phase == PHASE_VOTE;
    return asked && s->live && s->live->device && waited_ns < LOOK_NS;
}

static int run(dray_subscriber *s, enum dray__purpose purpose, const dray_update_options *options,
               dray_update_report *report, dray_error *error)
{
    int rc = check_report(report, error);
    if (rc == DRAY_OK)
        rc = start(s, purpose, options, INT64_MAX / 4, error);
    if (rc)
        return rc;
    int64_t since = dray__now();
    for (int phase = s->phase; dray_update_poll(s, error) == DRAY_EAGAIN;) {
        struct pollfd p = {.fd = s->waker.fd, .events = POLLIN};
        int64_t now = dray__now();
        since = phase == (int)s->phase ? since : now;
        phase = (int)s->phase;
        if (answer_is_near(s, now - since)) {
            sched_yield();
            continue;
        }
        dray__wait(&p, 1, s->answer_by_ns + DRAY__MILLISECOND);
        s->interrupted = dray__interrupted();
    }
    return dray_update_finish(s, report, error);
}

int dray_update_weights(dray_subscriber *s, const dray_update_options *options,
                        dray_update_report *report, dray_error *error)
{
    return run(s, DRAY__UPDATE, options, report, error);
}

int dray_prefetch_weights(dray_subscriber *s, const dray_update_options *options,
                          dray_update_report *report, dray_error *error)
{
    return run(s, DRAY__PREFETCH, options, report, error);
}

int dray_commit_weights(dray_subscriber *s, const dray_update_options *options,
                        dray_update_report *report, dray_error *error)
{
    return run(s, DRAY__COMMIT, options, report, error);
}

int dray_prefetch_drop(dray_subscriber *s, dray_error *error)
{
    if (!s)
        return dray__fail(error, DRAY_EINVALID, "subscriber must be given");
    if (s->phase != PHASE_IDLE)
        return dray__fail(error, DRAY_EBUSY, "an update of group %s is in progress", s->group);
    dray__stage_join(s);
    dray__stage_drop(s);
    int64_t deadline = dray__context_deadline(s->context, s->timeout_ns);
    int rc = dray__subscriber_ensure(s, deadline, error);
    return rc ? rc
              : dray__ask(s->channel, DRAY__MSG_PREFETCH_DROP, &dray__u64_fields, &s->key, deadline,
                          NULL, NULL, NULL, error);
}

int dray_subscriber_note_step(dray_subscriber *s, int64_t took_ns, dray_error *error)
{
    if (!s || took_ns <= 0)
        return dray__fail(error, DRAY_EINVALID,
                          "subscriber must be given, and how long the step took");
    dray__steps_note(&s->steps, took_ns, dray__now());
    return DRAY_OK;
}
