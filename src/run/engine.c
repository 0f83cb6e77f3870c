/* The engine: rollout and eval on one generator, whose memory is a subscriber's. */
#include "base/clock.h"
#include "base/error.h"
#include "engine/generator.h"
#include "run/fault.h"
#include "run/host.h"
#include "run/rollout.h"
#include "run/samples.h"

#include <dray/weights.h>
#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/stat.h>
#include <time.h>

typedef struct engine {
    dray__generator *generator;
    dray__rollout *rollout;
    dray_subscriber *subscriber;
    int64_t version; /* held; -1: none yet */
} engine;

static int engine_open(dray__host *host, dray_error *error)
{
    engine *self = calloc(1, sizeof(*self));
    if (!self)
        return dray__nomem(error);
    host->state = self;
    self->version = -1;
    dray_model_config config;
    int rc = dray__job_model_config(host->job, host->tokenizer, &config, error);
    if (!rc)
        rc = dray__generator_open(&config, host->group, &self->generator, error);
    if (!rc)
        rc = dray__rollout_open(host, self->generator, &self->rollout, error);
    if (rc)
        return rc;
    dray__generator_pace(self->generator, host->pace);
    dray_subscriber_options options = DRAY_SUBSCRIBER_OPTIONS_INIT;
    options.regions = dray__generator_regions(self->generator);
    options.group = host->spec->name;
    options.rank = host->options.rank;
    options.world = dray__group_world(host->group);
    options.timeout_ns = host->wait_ns;
    return dray_subscriber_open(host->context, DRAY__MODEL_NAME,
                                dray__generator_layout(self->generator), &options,
                                &self->subscriber, error);
}

static void engine_close(dray__host *host)
{
    engine *self = host->state;
    if (!self)
        return;
    dray_subscriber_close(self->subscriber);
    dray__rollout_close(self->rollout);
    dray__generator_close(self->generator);
    free(self);
}

static bool engine_busy(const dray__host *host)
{
    const engine *self = host->state;
    return dray__rollout_busy(self->rollout);
}

static int engine_turn(dray__host *host, dray_error *error)
{
    engine *self = host->state;
    return dray__rollout_turn(self->rollout, error);
}

const dray__program_kind dray__engine_program = {
    .open = engine_open, .busy = engine_busy, .turn = engine_turn, .close = engine_close};

/* ---- weights --------------------------------------------------------------------------------- */

/* disk mode: the trainer renames the folder into place when it is whole. */
static int wait_for_folder(const dray__host *host, const char *path, dray_error *error)
{
    int64_t deadline = dray__deadline(host->wait_ns);
    struct stat st;
    while (stat(path, &st) < 0) {
        if (errno != ENOENT)
            return dray__fail_errno(error, errno, "%s", path);
        if (dray__now() > deadline)
            return dray__fail(error, DRAY_ETIMEDOUT, "%s: not written in %g s", path,
                              host->job->limits.wait_seconds);
        nanosleep(&(struct timespec){.tv_nsec = 5 * DRAY__MILLISECOND}, NULL);
    }
    return DRAY_OK;
}

typedef struct update_sums {
    uint64_t bytes;
    int64_t total_ns, wait_ns;
} update_sums;

/* Bytes of all ranks together, and the slowest rank's time. */
static int report_update(dray__host *host, int64_t version, const dray_update_report *report,
                         dray_error *error)
{
    uint32_t world = dray__group_world(host->group);
    update_sums mine = {report->bytes, report->total_ns, report->wait_ns},
                all[DRAY__GROUP_MAX_WORLD], sum = {0};
    int rc = dray__group_all_gather_equal(host->group, &mine, sizeof(mine), all, DRAY_WAIT_DEFAULT,
                                          error);
    for (uint32_t i = 0; !rc && i < world; i++) {
        sum.bytes += all[i].bytes;
        sum.total_ns = all[i].total_ns > sum.total_ns ? all[i].total_ns : sum.total_ns;
        sum.wait_ns = all[i].wait_ns > sum.wait_ns ? all[i].wait_ns : sum.wait_ns;
    }
    if (rc || !dray__host_leads(host))
        return rc;
    return dray__host_report(
        host, "engine_update",
        json_pack("{s:s, s:I, s:I, s:f, s:f, s:I, s:I}", "role", host->spec->name, "version",
                  (json_int_t)version, "bytes", (json_int_t)sum.bytes, "seconds",
                  (double)sum.total_ns / (double)DRAY__SECOND, "wait_seconds",
                  (double)sum.wait_ns / (double)DRAY__SECOND, "copies", (json_int_t)report->copies,
                  "retries", (json_int_t)report->retries),
        error);
}

/* Brings the generator to exactly `version`: in `sync` the trainer waits with the next one. */
static int need_version(dray__host *host, int64_t version, dray_error *error)
{
    engine *self = host->state;
    if (self->version == version)
        return DRAY_OK;
    dray__fault_at("updating", version);
    const dray__job_weights *weights = &host->job->weights;
    dray_update_options options = DRAY_UPDATE_OPTIONS_INIT;
    dray_update_report report = DRAY_UPDATE_REPORT_INIT;
    char path[4096];
    options.mode = weights->mode;
    options.strategy = weights->strategy;
    options.min_version = (uint64_t)version;
    options.bucket_bytes = (uint64_t)weights->bucket_bytes;
    options.verify = weights->verify ? 0 : -1;
    options.timeout_ns = host->wait_ns;
    int rc = DRAY_OK;
    if (weights->mode == DRAY_MODE_DISK) {
        dray__host_path(host, path, sizeof(path), "weights/step-%06lld", (long long)version);
        options.path = path;
        options.path_version = (uint64_t)version;
        rc = wait_for_folder(host, path, error);
    }
    int64_t begin = dray_trace_now();
    if (!rc)
        rc = dray_update_weights(self->subscriber, &options, &report, error);
    dray_trace_span(DRAY_SPAN_WAIT, "wait for weights", begin, begin + report.wait_ns, version);
    dray_trace_span(DRAY_SPAN_TRANSFER, "update weights", begin + report.wait_ns, dray_trace_now(),
                    version);
    if (!rc && report.version != (uint64_t)version)
        rc = dray__fail(error, DRAY_EINTERNAL,
                        "weights: expected version %lld, found %llu: a step was lost",
                        (long long)version, (unsigned long long)report.version);
    if (rc)
        return rc;
    self->version = version;
    dray__fault_at("updated", version);
    return report_update(host, version, &report, error);
}

/* ---- tasks ----------------------------------------------------------------------------------- */

uint32_t dray__rollout_count(const dray__host *host)
{
    const engine *self = host->state;
    return dray__rollout_room(self->rollout);
}

uint32_t dray__eval_count(const dray__host *host)
{
    return (uint32_t)host->job->eval.micro_batch;
}

/* Rows under way are finished with the weights that they began with. */
static int change_version(dray__host *host, int64_t version, dray_error *error)
{
    engine *self = host->state;
    if (self->version == version)
        return DRAY_OK;
    int rc = dray__rollout_drain(self->rollout, error);
    if (!rc)
        rc = need_version(host, version, error);
    if (!rc)
        dray__rollout_renew(self->rollout, version);
    return rc;
}

int dray__rollout_run(dray__host *host, dray_batch *batch, dray_error *error)
{
    engine *self = host->state;
    int64_t step;
    int rc = dray__batch_step(batch, &step, error);
    if (!rc)
        rc = change_version(host, step - 1, error);
    if (!rc)
        rc = dray__rollout_take(self->rollout, batch, step, error);
    host->kept = !rc && host->job->rollout.batching == DRAY__BATCHING_CONTINUOUS;
    return rc || host->kept ? rc : dray__rollout_drain(self->rollout, error);
}

static int answer(dray__host *host, dray_batch *batch, int64_t step, dray__generation *out,
                  dray_error *error)
{
    engine *self = host->state;
    dray__ragged prompt;
    int rc = dray__ragged_read(batch, "eval_prompt", DRAY_I32, &prompt, error);
    if (rc)
        return rc;
    uint64_t *streams = dray__rollout_streams(batch, step);
    dray__generate_options options = DRAY__GENERATE_OPTIONS_INIT;
    options.rows = prompt.rows;
    options.prompt = dray__ragged_tokens(&prompt);
    options.streams = streams;
    options.seed = (uint64_t)host->job->seed;
    options.temperature = 0;
    options.max_new_tokens = (uint32_t)host->job->rollout.max_new_tokens;
    options.eos_token = dray__tokenizer_end(host->tokenizer);
    rc = streams ? dray__generate(self->generator, &options, out, error) : dray__nomem(error);
    free(streams);
    dray__ragged_free(&prompt);
    return rc;
}

int dray__eval_run(dray__host *host, dray_batch *batch, dray_error *error)
{
    engine *self = host->state;
    int64_t step, begin;
    dray__generation made = {0};
    int rc = dray__batch_step(batch, &step, error);
    if (!rc)
        rc = change_version(host, step, error);
    if (!rc)
        rc = dray__rollout_pause(self->rollout, error);
    begin = dray_trace_now();
    if (!rc)
        rc = answer(host, batch, step, &made, error);
    if (!rc && dray__host_leads(host)) {
        dray_column_data response =
            dray__ragged_column("eval_response", DRAY_I32, made.offsets, made.tokens);
        rc = dray_batch_set(batch, &response, error);
    }
    dray__generation_free(&made);
    return rc ? rc : dray__host_phase(host, "eval", step, begin, error);
}
