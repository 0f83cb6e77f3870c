/* One update, as a state machine that never waits: begin -> plan -> import -> ask -> move -> vote.
 * Whatever fails after the coordinator has decided on a version becomes this rank's vote; what the
 * group decides then is the outcome. */
#include "base/clock.h"
#include "base/error.h"
#include "base/json.h"
#include "base/wait.h"
#include "weights/fan.h"
#include "weights/haul.h"
#include "weights/overlay.h"
#include "weights/subscriber.h"

#include <errno.h>
#include <inttypes.h>
#include <jansson.h>
#include <poll.h>
#include <sched.h>
#include <stdlib.h>
#include <string.h>
#include <sys/timerfd.h>

/* A poll copies for about this long. */
#define SLICE_NS (2 * DRAY__MILLISECOND)
/* So long the start of an update looks for a coordinator that went away. */
#define PATIENCE_NS DRAY__SECOND

void dray__update_release(dray_subscriber *s)
{
    dray__steps_end(&s->steps, NULL);
    dray__haul_close(s->haul);
    dray__swap_close(s->swap);
    s->haul = NULL;
    s->swap = NULL;
    s->sources = NULL;
    dray__map_free(&s->partial);
    free(s->compared);
    s->compared = NULL;
    free(s->path);
    s->path = NULL;
}

static void set_timer(dray_subscriber *s, int64_t at_ns)
{
    struct itimerspec spec = {
        .it_value = {.tv_sec = at_ns / DRAY__SECOND, .tv_nsec = at_ns % DRAY__SECOND}};
    timerfd_settime(s->timer_fd, TFD_TIMER_ABSTIME, &spec, NULL);
}

/* Of the coordinator, which answers what is asked now by then. */
static void expect_answer(dray_subscriber *s, int64_t by_ns)
{
    s->answer_by_ns = dray__answer_deadline(by_ns);
    set_timer(s, s->answer_by_ns);
}

static int send_begin(dray_subscriber *s, dray_error *error);

/* Bytes were overwritten, and did not become a version: nothing is known to be right. */
static void forget_written(dray_subscriber *s)
{
    if (s->purpose == DRAY__PREFETCH) {
        s->has_staged = false;
        return;
    }
    free(s->block_sums);
    s->block_sums = NULL;
    s->held_incarnation = 0;
    s->held_disk = 0;
}

/* A peer that was read may have died, or taken its memory back: the publishers, or nobody, are read
 * instead, once. All ranks of the group come to the same end, so all of them begin again. */
static bool begin_again(dray_subscriber *s, const dray_error *outcome)
{
    if (s->source != DRAY__FROM_PEERS || s->retried || s->channel_stuck ||
        outcome->code == DRAY_ECLOSED || s->interrupted || dray__now() >= s->deadline_ns)
        return false;
    dray__haul_close(s->haul);
    s->haul = NULL;
    s->sources = NULL;
    dray__map_free(&s->partial);
    free(s->compared);
    s->compared = NULL;
    s->retried = true;
    s->first_error = *outcome;
    s->announced = s->writing = s->failed = s->moved_any = s->granted = false;
    s->source = DRAY__FROM_PUBLISHERS;
    s->report.retries++;
    if (send_begin(s, NULL))
        return false;
    s->phase = PHASE_BEGIN;
    return true;
}

/* The outcome is there. */
static int end(dray_subscriber *s, const dray_error *outcome)
{
    if (outcome && s->cohort_set)
        dray__fan_board_end(s->destination.board, s->run);
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
    s->report.total_ns = dray__now() - s->started_ns - s->report.wait_ns;
    return DRAY_OK;
}

/* What this rank's memory will be to others, if the vote carries. */
static uint8_t held(dray_subscriber *s, dray__sums *lies)
{
    dray_error error;
    bool as_read = false;
    if (!s->haul || s->load || dray__haul_lies(s->haul, &as_read, lies, &error))
        return DRAY__HELD_UNKNOWN;
    return as_read ? DRAY__HELD_AS_READ : DRAY__HELD_OWN;
}

/* Puts a table of sums, whose form the next one will probably have, too. */
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
    dray__sums sums = {0}, expected = {0}, lies = {0};
    dray_error error;
    dray_error own = {0};
    dray__sums_expect(&sums, s->read_form);
    dray__sums_expect(&lies, s->lies_form);
    if (verdict)
        own = *verdict;
    else if (s->haul && dray__haul_sums(s->haul, &sums, &error))
        own = error;
    else if (s->haul && s->destination.rank == 0 &&
             !dray__sums_join(&expected, &s->sources->stored))
        dray__nomem(&own);
    dray__writer w = {0};
    dray__put_u64(&w, s->key);
    dray__put_u64(&w, s->attempt);
    dray__put_u32(&w, (uint32_t)own.code);
    dray__put_string(&w, own.code ? own.message : "");
    int64_t left = s->deadline_ns - dray__now();
    dray__put_i64(&w, left > 0 ? left : 0);
    put_sums(s, &w, &sums, &s->read_form);
    dray__sums_put_known(&w, &expected, &s->sent);
    dray__put_u8(&w, own.code ? DRAY__HELD_UNKNOWN : held(s, &lies));
    put_sums(s, &w, &lies, &s->lies_form);
    s->failed = own.code != 0;
    s->mark_ns = dray__now();
    expect_answer(s, s->deadline_ns);
    int rc = dray__call_start(s->channel, DRAY__MSG_UPDATE_VOTE, &w, NULL, 0, &error);
    dray__writer_free(&w);
    dray__sums_free(&sums);
    dray__sums_free(&expected);
    dray__sums_free(&lies);
    if (rc)
        return end(s, &error);
    s->phase = PHASE_VOTE;
    dray__weights_step("voted");
    return DRAY_OK;
}

/* ---- phases: DRAY_OK goes on, DRAY_EAGAIN waits; what fails turns into a vote or the end ---- */

/* Takes the reply to the request that was started. false: wait, or the update is over (*rc). */
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
    s->attempt = dray__get_u64(&reply.payload);
    s->report.mode = dray__get_u8(&reply.payload);
    s->report.incarnation = dray__get_u64(&reply.payload);
    s->report.version = dray__get_u64(&reply.payload);
    s->announced = dray__get_u8(&reply.payload) != 0;
    s->source_set = dray__get_u64(&reply.payload);
    s->source_count = dray__get_u32(&reply.payload);
    s->group_set = dray__get_u64(&reply.payload);
    dray__get_u32(&reply.payload);
    uint32_t partial = dray__get_count(&reply.payload, 4);
    bool kept = true;
    for (uint32_t i = 0; i < partial && kept && !reply.payload.failed; i++) {
        char *name = dray__get_string(&reply.payload, DRAY__TENSOR_NAME_MAX);
        kept = reply.payload.failed || dray__map_set(&s->partial, name, 0);
        free(name);
    }
    dray_error error;
    if (!kept) {
        dray__nomem(&error);
        return end(s, &error);
    }
    s->source = dray__get_u8(&reply.payload);
    s->granted = dray__get_u8(&reply.payload) != 0;
    s->cohort_set = dray__get_u64(&reply.payload);
    s->cohort_count = dray__get_u32(&reply.payload);
    s->run = dray__get_u64(&reply.payload);
    s->last = dray__get_u64(&reply.payload);
    rc = dray__reader_finish(&reply.payload, "UPDATE_BEGIN", &error);
    if (!rc && (s->source_count > DRAY__WORLD_MAX || s->cohort_count > DRAY__COHORT_MAX))
        rc = dray__fail(&error, DRAY_EPROTO,
                        "UPDATE_BEGIN: %" PRIu32 " sources, a cohort of %" PRIu32, s->source_count,
                        s->cohort_count);
    if (rc)
        return end(s, &error);
    s->writing = s->granted; /* and has to say so when it fails */
    s->report.source = s->source;
    s->mark_ns = dray__now();
    s->report.wait_ns = s->mark_ns - s->started_ns;
    dray__weights_step("plan");
    s->phase = PHASE_PLAN;
    return DRAY_OK;
}

/* The answer to what preparing asks never came, or the deadline did. A coordinator that is only
 * busy gets the second that other answers have: a subscriber that it left without one is of no use.
 */
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
    dray__weights_step("import");
    s->phase = PHASE_IMPORT;
    return DRAY_OK;
}

static int open_haul(dray_subscriber *s, dray_error *error)
{
    s->target = s->destination;
    if (s->purpose == DRAY__PREFETCH) {
        int rc = dray__stage_open(s, error);
        if (rc)
            return rc;
        s->target.regions = s->staging;
    }
    dray__haul_options options = {
        .load = s->load,
        .strategy = s->options.strategy,
        .bucket_bytes = s->options.bucket_bytes ? s->options.bucket_bytes : DRAY__BUCKET_DEFAULT,
        .verify = s->options.verify >= 0,
        .ctas = s->options.ctas,
        .copy_engines = s->options.copy_engines,
        .attempt = s->attempt,
        .run = s->cohort_set ? s->run : 0,
        .board = s->purpose == DRAY__UPDATE ? s->destination.board : NULL,
        .keys = dray__context_keys(s->context),
        .compared = s->compared,
        .has_base = !s->load && s->purpose == DRAY__UPDATE && s->held_incarnation &&
                    s->held_incarnation == s->report.incarnation,
        .incarnation = s->report.incarnation,
        .base = s->held_version,
        .version = s->report.version,
        .has_disk_base = s->held_disk && !s->load && s->purpose == DRAY__UPDATE &&
                         s->source == DRAY__FROM_DISK && s->sources->sources[0].overlay &&
                         dray__overlay_hold(s->sources->sources[0].overlay, s->held_disk)};
    dray__local_share(s->token, NULL); /* what the last update brought is about to change */
    int rc = dray__haul_open(s->sources, &s->target, &options, &s->haul, error);
    dray__local_began(s->token, options.run);
    if (rc || !dray__haul_fans(s->haul))
        dray__fan_board_end(s->destination.board, options.run); /* nobody waits for this rank */
    return rc ? rc : dray__subscriber_watch(s, dray__haul_fd(s->haul), error);
}

static int ask_to_write(dray_subscriber *s)
{
    dray_error error;
    dray__writer w = {0};
    dray__put_u64(&w, s->key);
    dray__put_u64(&w, s->attempt);
    int64_t lease_ns = s->options.lease_ns ? s->options.lease_ns : DRAY__LEASE_DEFAULT;
    int64_t readers_ns = dray__deadline(lease_ns > 0 ? lease_ns : 0); /* who have it so long */
    dray__put_i64(&w, lease_ns);
    s->mark_ns = dray__now();
    expect_answer(s, readers_ns > s->deadline_ns ? readers_ns : s->deadline_ns);
    int rc = dray__call_start(s->channel, DRAY__MSG_UPDATE_WRITING, &w, NULL, 0, &error);
    dray__writer_free(&w);
    if (rc)
        return end(s, &error);
    s->phase = PHASE_ASK;
    return DRAY_OK;
}

static int start_move(dray_subscriber *s)
{
    s->writing = true;
    if (s->local && s->purpose != DRAY__PREFETCH)
        dray__local_revoke(s->token, s->attempt); /* readers before this update are over */
    s->phase = PHASE_MOVE;
    dray__weights_step("writing");
    return DRAY_OK;
}

static int on_import(dray_subscriber *s)
{
    dray_error error;
    int rc = s->swap ? DRAY_OK : dray__sources_import(s->sources, s->channel, s->key, &error);
    if (rc == DRAY_EAGAIN && (rc = waits_too_long(s, &error)) != DRAY_EAGAIN)
        return end(s, &error);
    if (rc == DRAY_EAGAIN)
        return rc;
    if (rc == DRAY_OK && !s->swap)
        rc = open_haul(s, &error);
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
    s->writing = true;
    s->phase = PHASE_MOVE;
    set_timer(s, s->deadline_ns); /* a lane may wait for longer */
    dray__weights_step("writing");
    return DRAY_OK;
}

/* Who published last was waited for, if nobody was for longer. */
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
        if (s->haul)
            dray__haul_explain(s->haul, &error);
        return vote(s, &error);
    }
    if (!s->moved_any)
        dray__steps_begin(&s->steps, dray__now());
    int rc = s->swap ? dray__swap_step(s->swap, SLICE_NS, &error)
                     : dray__haul_step(s->haul, SLICE_NS, &error);
    if (!s->moved_any)
        dray__weights_step("moving");
    s->moved_any = true;
    if (rc == DRAY_EAGAIN)
        return rc;
    if (rc)
        return vote(s, &error);
    dray__weights_step("moved");
    if (s->swap) {
        dray__swap_report(s->swap, &s->report);
    } else {
        rc = dray__haul_check(s->haul, &error);
        dray__haul_report(s->haul, &s->report);
        note_wait(s);
    }
    dray__steps_end(&s->steps, &s->report);
    s->report.peak_extra_bytes += s->staging_bytes;
    dray__weights_step("verified");
    return vote(s, rc ? &error : NULL);
}

static void tell(dray_subscriber *s)
{
    char fields[1536], json[2048];
    if (dray_update_report_json(&s->report, fields, sizeof fields, NULL))
        return;
    json_t *object = json_loads(fields, 0, NULL);
    if (!object)
        return;
    dray__json_set(&object, "model", json_string(s->model));
    dray__json_set(&object, "group", json_string(s->group));
    size_t size = json_dumpb(object, json, sizeof json - 1, JSON_COMPACT);
    json_decref(object);
    if (size == 0 || size >= sizeof json)
        return;
    json[size] = 0;
    /* Notices: nobody waits for an answer, and what does not get through is lost. */
    dray__writer w = {0};
    dray__put_u64(&w, s->key);
    dray__put_string(&w, json);
    dray__notify(s->channel, DRAY__MSG_UPDATE_REPORT, &w, NULL);
    dray__put_string(&w, "update");
    dray__put_string(&w, json);
    dray__notify(s->channel, DRAY__MSG_REPORT_POST, &w, NULL);
    dray__writer_free(&w);
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
    s->report.verified_tensors = dray__get_u64(&reply.payload);
    s->report.verified_bytes = dray__get_u64(&reply.payload);
    if (dray__reader_finish(&reply.payload, "UPDATE_VOTE", &error))
        return end(s, &error);
    s->report.commit_ns = dray__now() - s->mark_ns;
    if (s->purpose == DRAY__PREFETCH) {
        free(s->staged_sums);
        s->staged_sums = dray__haul_take_blocks(s->haul);
        s->staged_version = s->report.version;
        s->staged_incarnation = s->report.incarnation;
        s->has_staged = true;
    } else {
        free(s->block_sums);
        s->block_sums = s->swap ? s->staged_sums : dray__haul_take_blocks(s->haul);
        s->held_incarnation = s->report.incarnation;
        s->held_version = s->report.version;
        s->held_disk = 0;
        if (s->source == DRAY__FROM_DISK && !s->swap && s->options.verify >= 0 &&
            dray__overlay_sum_of(s->sources->sources[0].layout, &s->sources->stored, &s->held_disk,
                                 NULL))
            s->held_disk = 0; /* out of memory: the next one is read in full */
        s->state = DRAY_GROUP_WHOLE;
        s->mode = s->report.mode;
        s->version = s->report.version;
        s->incarnation = s->report.incarnation;
    }
    if (s->swap) {
        s->staged_sums = NULL;
        s->has_staged = false;
    }
    dray__weights_step("committed");
    end(s, NULL);
    if (s->destination.rank == 0)
        tell(s);
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
    return dray__options_read(out, sizeof *out, dray__end_of(dray_update_options, timeout_ns),
                              given, "dray_update_options", error);
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
    dray__writer w = {0};
    dray__put_u64(&w, s->key);
    dray__put_u8(&w, (uint8_t)s->options.mode);
    dray__put_u64(&w, s->options.min_version);
    dray__put_string(&w, s->path);
    dray__put_u64(&w, s->options.path_version);
    dray__put_u8(&w, s->options.verify >= 0);
    dray__put_i64(&w, s->deadline_ns - dray__now());
    const dray__sources *ready = s->live && s->live->imported ? s->live : NULL;
    dray__put_u8(&w, (uint8_t)s->purpose);
    dray__put_u8(&w, s->options.peers < 0 || s->retried);
    dray__put_u64(&w, ready ? ready->source_set : 0);
    dray__put_u64(&w, ready ? ready->group_set : 0);
    int rc = dray__call_start(s->channel, DRAY__MSG_UPDATE_BEGIN, &w, NULL, 0, error);
    dray__writer_free(&w);
    return rc;
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
    s->purpose = purpose;
    s->source = DRAY__FROM_PUBLISHERS;
    rc = dray__subscriber_ensure(
        s, dray__now() + patience_ns < s->deadline_ns ? dray__now() + patience_ns : s->deadline_ns,
        error);
    dray__weights_step("begin");
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
    while (rc == DRAY_OK && s->phase != PHASE_DONE)
        rc = phases[s->phase](s);
    bool can_move = s->phase == PHASE_MOVE &&
                    !(s->swap ? dray__swap_waits(s->swap) : dray__haul_waits(s->haul));
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
    set_timer(s, 0);
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

/* Of memory on GPUs, whose updates take milliseconds: for so long an answer of the coordinator is
 * looked for before anybody sleeps, because being woken takes a good part of one. */
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
        struct pollfd p = {.fd = s->poll_fd, .events = POLLIN};
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
    dray__stage_drop(s);
    dray__writer w = {0};
    int64_t deadline = dray__context_deadline(s->context, s->timeout_ns);
    int rc = dray__subscriber_ensure(s, deadline, error);
    dray__put_u64(&w, s->key);
    if (rc == DRAY_OK)
        rc = dray__call(s->channel, DRAY__MSG_PREFETCH_DROP, &w, NULL, 0, deadline, NULL, error);
    dray__writer_free(&w);
    return rc;
}

int dray_prefetched(const dray_subscriber *s, uint64_t *version, uint64_t *incarnation,
                    dray_error *error)
{
    if (!s)
        return dray__fail(error, DRAY_EINVALID, "subscriber must be given");
    if (!s->has_staged)
        return dray__fail(error, DRAY_ENOENT, "rank %" PRIu32 " of group %s has prefetched nothing",
                          s->destination.rank, s->group);
    if (version)
        *version = s->staged_version;
    if (incarnation)
        *incarnation = s->staged_incarnation;
    return DRAY_OK;
}

static int update_as(dray_subscriber *s, dray_update_mode mode, const dray_update_options *options,
                     dray_update_report *report, dray_error *error)
{
    dray_update_options own = DRAY_UPDATE_OPTIONS_INIT;
    int rc = read_options(options, &own, error);
    if (rc)
        return rc;
    own.mode = mode;
    return dray_update_weights(s, &own, report, error);
}

int dray_update_weights_from_tensor(dray_subscriber *s, const dray_update_options *options,
                                    dray_update_report *report, dray_error *error)
{
    return update_as(s, DRAY_MODE_TENSOR, options, report, error);
}

int dray_update_weights_from_distributed(dray_subscriber *s, const dray_update_options *options,
                                         dray_update_report *report, dray_error *error)
{
    return update_as(s, DRAY_MODE_DISTRIBUTED, options, report, error);
}

int dray_update_weights_from_disk(dray_subscriber *s, const dray_update_options *options,
                                  dray_update_report *report, dray_error *error)
{
    return update_as(s, DRAY_MODE_DISK, options, report, error);
}

int dray_subscriber_note_step(dray_subscriber *s, int64_t took_ns, dray_error *error)
{
    if (!s || took_ns <= 0)
        return dray__fail(error, DRAY_EINVALID,
                          "subscriber must be given, and how long the step took");
    dray__steps_note(&s->steps, took_ns, dray__now());
    return DRAY_OK;
}
