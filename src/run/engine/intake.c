#include "run/engine/intake.h"

#include "base/clock.h"
#include "base/error.h"
#include "base/hook.h"
#include "base/thread.h"
#include "run/fault.h"
#include "run/job/schedule.h"
#include "run/trainer/publication.h"

#include <dray/weights.h>
#include <poll.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <string.h>
#include <sys/prctl.h>
#include <time.h>

/* The time between two looks: of a prefetch, whether it is still needed; and for a version in a
 * file. */
enum { SLICE_MS = 50, LOOK_MS = 5 };

/* A version that is fetched into staging memory by a thread of its own. */
typedef struct prefetch {
    dray__thread thread;
    int64_t version; /* that is fetched, or is in staging; -1 for none */
    atomic_bool abandoned, done;
    int rc;
    dray_update_report report;
} prefetch;

struct dray__intake {
    dray__host *host;
    const dray_layout *layout;
    dray_region *const *regions;
    dray_subscriber *subscribers[DRAY__KEPT_MOST]; /* of publication.h's places */
    uint32_t count;
    int64_t version;
    prefetch ahead;
};

static dray_subscriber *subscriber_of(const dray__intake *self, int64_t version)
{
    return self->subscribers[version % self->count];
}

/* ---- the trace ------------------------------------------------------------------------------- */

static _Thread_local bool waiting;         /* this thread's update waits for its version */
static _Thread_local int64_t swapped = -1; /* the version that this thread's update puts in place */
static _Thread_local bool copying;

static void enter_update(const char *name, int64_t version)
{
    dray_trace_enter(DRAY_SPAN_TRANSFER, name, version);
    dray_trace_wait(DRAY_CAUSE_WEIGHTS, "wait for weights", version);
    waiting = true;
}

static void end_wait(void)
{
    if (waiting)
        dray_trace_leave();
    waiting = false;
}

static void leave_update(void)
{
    end_wait();
    dray_trace_leave();
}

static void enter_swap(int64_t version)
{
    dray_trace_enter(DRAY_SPAN_TRANSFER, "swap weights", version);
    swapped = version;
}

static void set_copying(bool now)
{
    if (copying && !now)
        dray_trace_leave();
    if (!copying && now)
        dray_trace_enter(DRAY_SPAN_TRANSFER, "copy weights", swapped);
    copying = now;
}

static void leave_swap(void)
{
    set_copying(false);
    swapped = -1;
    dray_trace_leave();
}

/* Follows an update's steps for the trace. The plan is made once the version is published. The copy
 * of a swap is a span of its own. */
static void on_step(void *user, const char *step)
{
    (void)user;
    if (strcmp(step, "plan") == 0)
        end_wait();
    if (swapped >= 0)
        set_copying(strcmp(step, "writing") == 0 || strcmp(step, "moving") == 0);
}

/* ---- opening --------------------------------------------------------------------------------- */

static int open_subscriber(dray__intake *self, uint32_t index, dray_error *error)
{
    const dray__host *host = self->host;
    char name[DRAY__MODEL_NAME_BYTES];
    dray__publication_name(host->job, index, name);
    dray_subscriber_options options = DRAY_SUBSCRIBER_OPTIONS_INIT;
    options.regions = self->regions;
    options.group = host->label;
    options.rank = host->options.rank;
    options.world = dray__group_world(host->group);
    options.timeout_ns = host->wait_ns;
    return dray_subscriber_open(host->context, name, self->layout, &options,
                                &self->subscribers[index], error);
}

int dray__intake_open(dray__host *host, const dray_layout *layout, dray_region *const *regions,
                      dray__intake **out, dray_error *error)
{
    dray__intake *self = calloc(1, sizeof(*self));
    if (!self)
        return dray__nomem(error);
    *self = (dray__intake){.host = host,
                           .layout = layout,
                           .regions = regions,
                           .count = (uint32_t)dray__schedule_of(host->job).kept,
                           .version = -1,
                           .ahead.version = -1};
    dray__hook_set(on_step, NULL);
    int rc = DRAY_OK;
    for (uint32_t i = 0; i < self->count && !rc; i++)
        rc = open_subscriber(self, i, error);
    if (rc)
        dray__intake_close(self);
    else
        *out = self;
    return rc;
}

int64_t dray__intake_version(const dray__intake *self)
{
    return self->version;
}

/* ---- ahead ----------------------------------------------------------------------------------- */

static void update_options(const dray__intake *self, int64_t version, dray_update_options *out)
{
    const dray__job_weights *weights = &self->host->job->weights;
    *out = (dray_update_options)DRAY_UPDATE_OPTIONS_INIT;
    bool elsewhere = self->host->job->listen[0] && weights->mode == DRAY_MODE_TENSOR;
    out->mode = elsewhere ? DRAY_MODE_AUTO : weights->mode; /* the trainer may be on another host */
    out->strategy = weights->strategy;
    out->min_version = (uint64_t)version;
    out->bucket_bytes = (uint64_t)weights->bucket_bytes;
    out->no_verify = !weights->verify;
    out->timeout_ns = self->host->wait_ns;
    /* Another subscriber may overwrite the memory that one has filled. */
    out->no_peers = self->count > 1;
}

static void *prefetch_main(void *user)
{
    dray__intake *self = user;
    prefetch *ahead = &self->ahead;
    prctl(PR_SET_NAME, "prefetch"); /* the name of its track in the timeline */
    dray_subscriber *subscriber = subscriber_of(self, ahead->version);
    dray_update_options options;
    update_options(self, ahead->version, &options);
    enter_update("prefetch weights", ahead->version);
    int rc = dray_prefetch_start(subscriber, &options, NULL);
    struct pollfd at = {.fd = dray_subscriber_fd(subscriber), .events = POLLIN};
    while (!rc && !atomic_load(&ahead->abandoned) &&
           dray_update_poll(subscriber, NULL) == DRAY_EAGAIN)
        poll(&at, 1, SLICE_MS);
    if (!rc && atomic_load(&ahead->abandoned))
        rc = DRAY_ECANCELED;
    if (!rc)
        rc = dray_update_finish(subscriber, &ahead->report, NULL);
    leave_update();
    ahead->rc = rc;
    atomic_store(&ahead->done, true);
    return NULL;
}

/* Begins a prefetch. When that fails, the version is fetched when it is needed. */
static void begin_ahead(dray__intake *self, int64_t version)
{
    prefetch *ahead = &self->ahead;
    const dray__job *job = self->host->job;
    if (dray__schedule_of(job).open == 1 || job->weights.mode == DRAY_MODE_DISK ||
        version > job->steps)
        return;
    *ahead = (prefetch){.version = version, .report = DRAY_UPDATE_REPORT_INIT};
    if (dray__thread_start(&ahead->thread, prefetch_main, self, "a prefetch", NULL))
        ahead->version = -1;
}

static void end_ahead(dray__intake *self, bool abandon)
{
    prefetch *ahead = &self->ahead;
    if (!ahead->thread.begun)
        return;
    if (abandon)
        atomic_store(&ahead->abandoned, true);
    dray_trace_wait(DRAY_CAUSE_WEIGHTS, "wait for prefetch", ahead->version);
    dray__thread_join(&ahead->thread);
    dray_trace_leave();
    ahead->version = ahead->rc ? -1 : (int64_t)ahead->report.version;
}

/* Returns the newest version that the trainer has written, which it may soon remove. */
static int64_t newest_written(const dray__intake *self)
{
    char folder[4096], *path = NULL;
    uint64_t version = 0;
    dray__host_path(self->host, folder, sizeof(folder), "weights");
    int rc = dray_checkpoint_latest(folder, &version, &path, NULL);
    dray_free(path);
    return rc ? -1 : (int64_t)version;
}

int64_t dray__intake_ready(dray__intake *self)
{
    prefetch *ahead = &self->ahead;
    if (self->host->job->weights.mode == DRAY_MODE_DISK) {
        int64_t newest = newest_written(self);
        return newest > self->version ? newest : -1;
    }
    if (ahead->thread.begun && atomic_load(&ahead->done))
        end_ahead(self, false);
    return ahead->thread.begun ? -1 : ahead->version;
}

/* Does nothing when the schedule is exact: then the prefetch under way is of the right version, or
 * of one that is not needed any more (settle_ahead). */
void dray__intake_fetch(dray__intake *self, int64_t version)
{
    if (self->version < 0 || dray__schedule_of(self->host->job).exact)
        return;
    end_ahead(self, false);
    if (self->ahead.version < version)
        begin_ahead(self, version);
    end_ahead(self, false);
}

void dray__intake_close(dray__intake *self)
{
    if (!self)
        return;
    end_ahead(self, true);
    for (uint32_t i = 0; i < self->count; i++)
        dray_subscriber_close(self->subscribers[i]);
    free(self);
}

/* Gives up the prefetch, because the engine goes back to an older version for a sample that was
 * lost. The update under way would wait for a step that waits for this sample. Closing its
 * subscriber ends the update. */
static int give_up_ahead(dray__intake *self, dray_error *error)
{
    uint32_t index = (uint32_t)(self->ahead.version % self->count);
    end_ahead(self, true);
    self->ahead.version = -1;
    dray_subscriber_close(self->subscribers[index]);
    self->subscribers[index] = NULL;
    int rc = dray__host_meet(self->host, error);
    return rc ? rc : open_subscriber(self, index, error);
}

/* *ready is true when all ranks have the version, or the same newer one, in their staging
 * memory. */
static int settle_ahead(dray__intake *self, int64_t version, bool *ready, dray_error *error)
{
    bool exact = dray__schedule_of(self->host->job).exact;
    *ready = false;
    if (exact && self->ahead.thread.begun && self->ahead.version > version)
        return give_up_ahead(self, error);
    end_ahead(self, false);
    int64_t all[DRAY__GROUP_MAX_WORLD];
    int rc = dray__host_gather(self->host, &self->ahead.version, sizeof(self->ahead.version), all,
                               error);
    *ready = !rc;
    for (uint32_t i = 0; !rc && i < dray__group_world(self->host->group); i++)
        *ready = *ready && all[i] == (exact ? version : all[0]) && all[i] >= version;
    return rc;
}

/* ---- taking ---------------------------------------------------------------------------------- */

/* In a resumed run, the version before its checkpoint is in the checkpoint's folder. */
static void version_path(const dray__host *host, int64_t version, char *out, size_t capacity)
{
    char checkpoint[4096];
    if (version >= host->options.first_step) {
        dray__host_path(host, out, capacity, "weights/step-%06lld", (long long)version);
        return;
    }
    dray__checkpoint_path(host->options.folder, host->options.first_step, checkpoint,
                          sizeof(checkpoint));
    dray__publication_path(checkpoint, out, capacity);
}

static int update_once(dray__intake *self, int64_t version, dray_update_report *report,
                       dray_error *error)
{
    dray_update_options options;
    char path[4096];
    update_options(self, version, &options);
    int rc = DRAY_OK;
    enter_update("update weights", version);
    if (options.mode == DRAY_MODE_DISK) {
        version_path(self->host, version, path, sizeof(path));
        options.path = path;
        options.path_version = (uint64_t)version;
        if (dray__schedule_of(self->host->job).exact)
            rc = dray__host_wait_file(self->host, path, error);
    }
    if (!rc)
        rc = dray_update_weights(subscriber_of(self, version), &options, report, error);
    leave_update();
    return rc;
}

/* Waits until the trainer has written this version, or a newer one. */
static int await_written(const dray__intake *self, int64_t version, dray_error *error)
{
    const dray__host *host = self->host;
    int64_t deadline = dray__deadline(host->wait_ns);
    dray_trace_wait(DRAY_CAUSE_WEIGHTS, "wait for weights", version);
    while (newest_written(self) < version && dray__now() < deadline)
        nanosleep(&(struct timespec){.tv_nsec = LOOK_MS * DRAY__MILLISECOND}, NULL);
    dray_trace_leave();
    return newest_written(self) >= version
               ? DRAY_OK
               : dray__fail(error, DRAY_ETIMEDOUT, "weights: version %lld: not written in %g s",
                            (long long)version, host->job->limits.wait_seconds);
}

/* Gathers one number from each rank. */
static int tell_all(const dray__intake *self, int64_t mine, int64_t *all, dray_error *error)
{
    return dray__host_gather(self->host, &mine, sizeof(mine), all, error);
}

/* Any newer version is allowed. While one is read, the trainer goes on and removes older versions.
 * So all ranks take the newest version. */
static int update_from_newest(dray__intake *self, int64_t version, dray_update_report *report,
                              dray_error *error)
{
    int64_t all[DRAY__GROUP_MAX_WORLD];
    bool failed = true;
    int rc = DRAY_OK;
    while (failed) {
        failed = false;
        rc = await_written(self, version, error);
        if (!rc)
            rc = tell_all(self, newest_written(self), all, error);
        if (rc)
            return rc;
        version = all[0];
        rc = update_once(self, version, report, error);
        int met = tell_all(self, rc, all, rc ? NULL : error);
        for (uint32_t i = 0; !met && i < dray__group_world(self->host->group); i++)
            failed = failed || all[i] != DRAY_OK;
        if (!met)
            met = tell_all(self, newest_written(self), all, rc ? NULL : error);
        if (met || all[0] <= version)
            return rc ? rc : met;
    }
    return DRAY_OK;
}

static int update(dray__intake *self, int64_t version, dray_update_report *report,
                  dray_error *error)
{
    const dray__job *job = self->host->job;
    bool newest = job->weights.mode == DRAY_MODE_DISK && !dray__schedule_of(job).exact;
    return newest ? update_from_newest(self, version, report, error)
                  : update_once(self, version, report, error);
}

/* Puts the prefetched version in place. The report is that of the prefetch, except for the
 * pause. */
static int swap(dray__intake *self, dray_update_report *report, int64_t *pause, dray_error *error)
{
    int64_t version = self->ahead.version;
    dray_update_options options;
    dray_update_report committed = DRAY_UPDATE_REPORT_INIT;
    update_options(self, version, &options);
    options.mode = DRAY_MODE_AUTO;
    enter_swap(version);
    int rc = dray_commit_weights(subscriber_of(self, version), &options, &committed, error);
    leave_swap();
    *report = self->ahead.report;
    report->version = committed.version;
    *pause = committed.total_ns;
    self->ahead.version = -1;
    return rc;
}

typedef struct update_sums {
    uint64_t bytes;
    int64_t total_ns, wait_ns, pause_ns;
} update_sums;

static int64_t later(int64_t a, int64_t b)
{
    return a > b ? a : b;
}

/* Reports an update: the bytes of all ranks together, and the times of the slowest rank. */
static int report_update(dray__host *host, int64_t version, const dray_update_report *report,
                         int64_t pause, dray_error *error)
{
    uint32_t world = dray__group_world(host->group);
    update_sums mine = {report->bytes, report->total_ns, report->wait_ns, pause},
                all[DRAY__GROUP_MAX_WORLD], sum = {0};
    int rc = dray__host_gather(host, &mine, sizeof(mine), all, error);
    for (uint32_t i = 0; !rc && i < world; i++) {
        sum.bytes += all[i].bytes;
        sum.total_ns = later(sum.total_ns, all[i].total_ns);
        sum.wait_ns = later(sum.wait_ns, all[i].wait_ns);
        sum.pause_ns = later(sum.pause_ns, all[i].pause_ns);
    }
    if (rc || !dray__host_leads(host))
        return rc;
    double second = (double)DRAY__SECOND;
    return dray__host_tell(
        host, "engine_update",
        json_pack("{s:s, s:I, s:I, s:f, s:f, s:f, s:I, s:I}", "role", host->label, "version",
                  (json_int_t)version, "bytes", (json_int_t)sum.bytes, "seconds",
                  (double)sum.total_ns / second, "wait_seconds", (double)sum.wait_ns / second,
                  "pause_seconds", (double)sum.pause_ns / second, "copies",
                  (json_int_t)report->copies, "retries", (json_int_t)report->retries),
        error);
}

/* Checks that the version is the one that was asked for or, when the schedule is not exact, a newer
 * one. */
static int check_taken(const dray__intake *self, int64_t asked, int64_t taken, dray_error *error)
{
    bool exact = dray__schedule_of(self->host->job).exact;
    if (exact ? taken == asked : taken >= asked)
        return DRAY_OK;
    return dray__fail(error, DRAY_EINTERNAL,
                      "weights: expected version %lld%s, found %lld: a step was lost",
                      (long long)asked, exact ? "" : " or a newer one", (long long)taken);
}

int dray__intake_take(dray__intake *self, int64_t version, dray_error *error)
{
    if (self->version == version)
        return DRAY_OK;
    dray__fault_at("updating", version);
    dray_update_report report = DRAY_UPDATE_REPORT_INIT;
    int64_t pause = 0;
    bool ready;
    int rc = settle_ahead(self, version, &ready, error);
    if (!rc && ready) {
        rc = swap(self, &report, &pause, error);
    } else if (!rc) {
        rc = update(self, version, &report, error);
        pause = report.total_ns;
    }
    if (!rc)
        rc = check_taken(self, version, (int64_t)report.version, error);
    if (rc)
        return rc;
    self->version = version = (int64_t)report.version;
    dray__fault_at("updated", version);
    return report_update(self->host, version, &report, pause, error);
}

void dray__intake_go_ahead(dray__intake *self)
{
    if (!self->ahead.thread.begun)
        begin_ahead(self, self->version + 1);
}
