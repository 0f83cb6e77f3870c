/* The engine: rollout and eval on one generator, whose memory is a subscriber's. */
#include "base/error.h"
#include "engine/generator.h"
#include "run/fault.h"
#include "run/host.h"
#include "run/intake.h"
#include "run/rollout.h"
#include "run/samples.h"
#include "run/schedule.h"
#include "run/turns.h"

#include <stdlib.h>

typedef struct engine {
    dray__generator *generator;
    dray__rollout *rollout;
    dray__intake *intake;
} engine;

static int engine_open(dray__host *host, dray_error *error)
{
    engine *self = calloc(1, sizeof(*self));
    if (!self)
        return dray__nomem(error);
    host->state = self;
    dray_model_config config;
    int rc = dray__job_model_config(host->job, host->tokenizer, &config, error);
    if (!rc)
        rc = dray__generator_open(&config, host->group, &self->generator, error);
    if (!rc)
        rc = dray__rollout_open(host, self->generator, &self->rollout, error);
    if (rc)
        return rc;
    dray__generator_pace(self->generator, host->pace);
    return dray__intake_open(host, dray__generator_layout(self->generator),
                             dray__generator_regions(self->generator), &self->intake, error);
}

static void engine_close(dray__host *host)
{
    engine *self = host->state;
    if (!self)
        return;
    dray__intake_close(self->intake);
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

/* Rows under way are finished with the weights that they began with. Who waits for weights lets
 * others have the devices. */
static int change_version(dray__host *host, int64_t version, dray_error *error)
{
    engine *self = host->state;
    if (dray__intake_version(self->intake) == version)
        return DRAY_OK;
    int rc = DRAY_OK;
    if (dray__rollout_busy(self->rollout))
        rc = dray__turn_begin(host, -1, error);
    if (!rc)
        rc = dray__rollout_drain(self->rollout, error);
    if (!rc)
        rc = dray__turn_end(host, error);
    if (!rc)
        rc = dray__intake_take(self->intake, version, error);
    if (!rc)
        dray__rollout_renew(self->rollout, version);
    return rc;
}

int dray__rollout_prepare(dray__host *host, dray_batch *batch, dray_error *error)
{
    int64_t step;
    int rc = dray__batch_step(batch, &step, error);
    return rc ? rc : change_version(host, dray__schedule_versions(host->job, step).newest, error);
}

int dray__rollout_run(dray__host *host, dray_batch *batch, dray_error *error)
{
    engine *self = host->state;
    int64_t step;
    int rc = dray__batch_step(batch, &step, error);
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
    dray__sampler_rows rows = {.rows = {.rows = prompt.rows, .prompt = options.prompt},
                               .streams = streams,
                               .max_new_tokens = options.max_new_tokens};
    if (!streams)
        rc = dray__nomem(error);
    else if (host->job->tool.kind != DRAY__TOOL_NONE)
        rc = dray__turns_generate(host, self->generator, &rows, step, out, error);
    else
        rc = dray__generate(self->generator, &options, out, error);
    free(streams);
    dray__ragged_free(&prompt);
    return rc;
}

int dray__eval_prepare(dray__host *host, dray_batch *batch, dray_error *error)
{
    int64_t step;
    int rc = dray__batch_step(batch, &step, error);
    return rc ? rc : change_version(host, step, error);
}

int dray__eval_run(dray__host *host, dray_batch *batch, dray_error *error)
{
    engine *self = host->state;
    int64_t step;
    dray__generation made = {0};
    int rc = dray__batch_step(batch, &step, error);
    dray_trace_enter(DRAY_SPAN_BUSY, "eval", rc ? -1 : step);
    if (!rc)
        rc = answer(host, batch, step, &made, error);
    if (!rc && dray__host_leads(host)) {
        dray_column_data response =
            dray__ragged_column("eval_response", DRAY_I32, made.offsets, made.tokens);
        rc = dray_batch_set(batch, &response, error);
        for (uint32_t i = 0; i < made.rows && !rc; i++)
            rc = dray_batch_set_tag(batch, i, DRAY_TAG_VERSION,
                                    (double)dray__intake_version(self->intake), error);
    }
    if (!rc)
        dray_trace_worked(made.rows, (int64_t)made.offsets[made.rows]);
    dray_trace_leave();
    dray__generation_free(&made);
    return rc;
}
