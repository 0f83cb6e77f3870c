/* The engine: the tasks rollout and eval on one generator. A subscriber updates the generator's
 * memory. */
#include "base/clock.h"
#include "base/error.h"
#include "engine/generator.h"
#include "run/data/samples.h"
#include "run/engine/calls.h"
#include "run/engine/engine_turns.h"
#include "run/engine/intake.h"
#include "run/engine/rollout.h"
#include "run/host/host.h"
#include "run/job/schedule.h"

#include <stdlib.h>
#include <time.h>

typedef struct engine {
    dray__generator *generator;
    dray__rollout *rollout;
    dray__intake *intake;
    dray__engine_turns *turns;
    int64_t turned_ns; /* time that turns took since samples were last finished */
    bool due;          /* newer weights have come, and wait for the rows under way */
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
    if (!rc)
        rc = dray__engine_turns_open(host, &self->turns, error);
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
    dray__engine_turns_close(self->turns);
    dray__rollout_close(self->rollout);
    dray__generator_close(self->generator);
    free(self);
}

static bool engine_busy(const dray__host *host)
{
    const engine *self = host->state;
    return self->due || dray__rollout_busy(self->rollout);
}

/* ---- weights --------------------------------------------------------------------------------- */

/* Updates the weights in a span, which is the engine's pause: nothing is generated in it, and
 * nothing is fetched that can be fetched before or after. It sends only messages to the coordinator
 * that need no answer, because each answer would be a wait for a core when there are more processes
 * than cores. */
static int take_version(dray__host *host, int64_t version, dray_error *error)
{
    engine *self = host->state;
    bool begun, leads = dray__host_leads(host);
    dray__intake_fetch(self->intake, version);
    dray_trace_enter(DRAY_SPAN_TRANSFER, "take weights", version);
    dray_trace_queued();
    int rc = leads ? dray__engine_turns_begin(self->turns, true, &begun, error) : DRAY_OK;
    if (!rc)
        rc = dray__intake_take(self->intake, version, error);
    if (!rc)
        dray__rollout_renew(self->rollout, dray__intake_version(self->intake));
    if (!rc && leads)
        dray__engine_turns_end(self->turns, dray__intake_version(self->intake));
    dray_trace_leave();
    if (!rc)
        dray__intake_go_ahead(self->intake);
    return rc;
}

/* Finishes, cuts or restarts the rows under way, and changes the version. While it waits for
 * weights, the engine gives its turn on the devices back. */
static int change_version(dray__host *host, int64_t version, dray_error *error)
{
    engine *self = host->state;
    int64_t held = dray__intake_version(self->intake);
    if (held == version || (held > version && !dray__schedule_of(host->job).exact))
        return DRAY_OK;
    int rc = DRAY_OK; /* an engine with rows under way has its turn on the devices */
    if (host->job->update == DRAY__UPDATE_BOUNDARY)
        rc = dray__rollout_drain(self->rollout, error);
    if (!rc && host->job->update == DRAY__UPDATE_IN_FLIGHT)
        rc = dray__rollout_cut(self->rollout, error);
    if (!rc)
        rc = dray__turn_end(host, error);
    if (!rc)
        rc = take_version(host, version, error);
    if (!rc && host->job->update == DRAY__UPDATE_ANEW)
        rc = dray__rollout_restart(self->rollout, error);
    self->due = false;
    return rc;
}

/* Returns whether newer weights may be taken now. When asking for a turn fails, they may not. Once
 * there is a turn, the engine begins no further rows before the update. */
static bool may_take(engine *self, int64_t version)
{
    bool begun;
    int rc = dray__engine_turns_begin(self->turns, false, &begun, NULL);
    bool may = rc == DRAY_OK && begun;
    if (may && !self->due && dray__rollout_busy(self->rollout)) {
        dray_trace_enter(DRAY_SPAN_BUSY, "last samples", version);
        dray_trace_leave();
    }
    return may;
}

/* Decides between two turns of the sampler whether newer weights that have come are taken now. An
 * engine that begins no new samples until the update holds its update turn during this time, too,
 * because only the other engines begin samples. */
static int64_t engine_decide(dray__host *host)
{
    engine *self = host->state;
    if (dray__schedule_of(host->job).exact)
        return -1;
    int64_t ready = dray__intake_ready(self->intake);
    self->due = ready > dray__intake_version(self->intake) && may_take(self, ready);
    bool now = host->job->update != DRAY__UPDATE_BOUNDARY || !dray__rollout_busy(self->rollout);
    return self->due && now ? ready : -1;
}

/* Returns whether another engine may go on with samples that this one has begun. Where it may have
 * newer weights, only the samples of some jobs may be of two versions. */
static bool may_cut(const dray__job *job)
{
    return dray__schedule_of(job).exact || job->update == DRAY__UPDATE_IN_FLIGHT ||
           job->rollout.partial_tokens > 0;
}

static int engine_turn(dray__host *host, int64_t version, dray_error *error)
{
    engine *self = host->state;
    if (version == DRAY__TURN_LAST) {
        self->due = false; /* nothing is made by newer weights any more */
        if (may_cut(host->job))
            return dray__rollout_cut(self->rollout, error);
        dray__rollout_drop(self->rollout);
        return DRAY_OK;
    }
    int rc = version < 0 ? DRAY_OK : change_version(host, version, error);
    if (!rc && version >= 0)
        rc = dray__turn_begin(host, -1, error);
    if (rc)
        return rc;
    int64_t begin = dray__now();
    uint64_t before = dray__rollout_finished(self->rollout);
    rc = dray__rollout_turn(self->rollout, error);
    self->turned_ns += dray__now() - begin;
    uint32_t made = (uint32_t)(dray__rollout_finished(self->rollout) - before);
    if (made) {
        dray__engine_turns_made(self->turns, made, self->turned_ns);
        self->turned_ns = 0;
    }
    return rc;
}

enum { PUT_BACK = -2, WAIT_MS = 20 };

/* The next version may depend on samples that were lost, and on those that are under way here. A
 * long wait for it would delay these, so the batch is given back from time to time, and at once
 * when there are rows under way. */
static int64_t wait_ready(dray__host *host, int64_t need)
{
    engine *self = host->state;
    int64_t ready = dray__intake_ready(self->intake);
    if (dray__rollout_busy(self->rollout))
        return ready >= need ? ready : PUT_BACK;
    int64_t deadline = dray__deadline(WAIT_MS * DRAY__MILLISECOND);
    dray_trace_wait(DRAY_CAUSE_WEIGHTS, "wait for weights: fresh share", need);
    while ((ready = dray__intake_ready(self->intake)) < need && dray__now() < deadline)
        nanosleep(&(struct timespec){.tv_nsec = DRAY__MILLISECOND / 5}, NULL);
    dray_trace_leave();
    return ready >= need ? ready : PUT_BACK;
}

/* Before rows of the step are begun: rank 0 chooses the version, because only it knows which
 * versions have come. The step's oldest permitted version is published, unless samples were lost
 * and others admitted in their place. Then the engine goes on with the newest version, because the
 * lost samples may wait for it. */
static int choose(dray__host *host, const dray_batch *batch, int64_t step, int64_t *version,
                  dray_error *error)
{
    engine *self = host->state;
    int64_t held = dray__intake_version(self->intake), ready = dray__intake_ready(self->intake),
            published = 0;
    dray_steps_rules rules = dray__schedule_rules(host->job);
    uint64_t least, newest;
    int rc = dray_steps_versions(&rules, batch, &least, &newest, error);
    int64_t need = rc ? 0 : (int64_t)least;
    *version = ready > held && (held < need || may_take(self, ready)) ? ready : held;
    bool late = dray__schedule_of(host->job).first_complete;
    bool ask = *version < need || (late && host->job->fresh_share > 0);
    if (!rc && ask)
        rc = dray__queue_version(host->queue, &published, error);
    if (!rc && ask && published > *version)
        *version = published;
    if (*version < 0)
        *version = dray__schedule_versions(host->job, step).oldest;
    if (!rc && !late && *version < need)
        *version = wait_ready(host, need);
    return rc;
}

static int rollout_prepare(dray__host *host, dray_batch *batch, int64_t step, dray_error *error)
{
    int64_t version = dray__schedule_versions(host->job, step).newest;
    int rc = DRAY_OK;
    if (!dray__schedule_of(host->job).exact) {
        if (dray__host_leads(host))
            rc = choose(host, batch, step, &version, error);
        if (!rc)
            rc = dray__host_broadcast(host, &version, sizeof(version), DRAY_WAIT_DEFAULT, error);
    }
    host->put_back = version == PUT_BACK;
    if (rc || !host->put_back)
        return rc ? rc : change_version(host, version, error);
    const engine *self = host->state; /* otherwise the trainer may need the devices to make it */
    return dray__rollout_busy(self->rollout) ? DRAY_OK : dray__turn_end(host, error);
}

/* ---- tasks ----------------------------------------------------------------------------------- */

static uint32_t rollout_count(const dray__host *host)
{
    const engine *self = host->state;
    return self->due ? 0 : dray__rollout_room(self->rollout);
}

/* An evaluation is made with one version. When it may be any engine's own version, it is claimed at
 * once. */
static uint32_t eval_count(const dray__host *host)
{
    return (uint32_t)(dray__schedule_of(host->job).exact ? host->job->eval.micro_batch
                                                         : host->job->eval.prompts);
}

static int rollout_run(dray__host *host, dray_batch *batch, int64_t step, dray_error *error)
{
    engine *self = host->state;
    int rc = dray__rollout_take(self->rollout, batch, step, error);
    host->kept = !rc && host->job->rollout.batching == DRAY__BATCHING_CONTINUOUS;
    if (rc || host->kept)
        return rc;
    int64_t begin = dray__now();
    rc = dray__rollout_drain(self->rollout, error);
    dray__engine_turns_made(self->turns, dray_batch_rows(batch), dray__now() - begin);
    return rc;
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
    const dray__sampler_options greedy = {.seed = (uint64_t)host->job->seed,
                                          .eos_token = dray__tokenizer_end(host->tokenizer)};
    const dray__sampler_rows rows = {
        .rows = {.rows = prompt.rows, .prompt = dray__ragged_tokens(&prompt)},
        .streams = streams,
        .max_new_tokens = (uint32_t)host->job->rollout.max_new_tokens};
    if (!streams)
        rc = dray__nomem(error);
    else if (host->job->tool.kind != DRAY__TOOL_NONE)
        rc = dray__calls_generate(host, self->generator, &greedy, &rows, step, out, error);
    else
        rc = dray__generate(self->generator, &greedy, &rows, out, error);
    free(streams);
    dray__ragged_free(&prompt);
    return rc;
}

static int eval_prepare(dray__host *host, dray_batch *batch, int64_t step, dray_error *error)
{
    (void)batch;
    return change_version(host, step, error);
}

static int eval_run(dray__host *host, dray_batch *batch, int64_t step, dray_error *error)
{
    engine *self = host->state;
    dray__generation made = {0};
    int rc = answer(host, batch, step, &made, error);
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
    dray__generation_free(&made);
    return rc;
}

static const dray__task_work works[] = {
    {.task = "eval",
     .count = eval_count,
     .prepare = eval_prepare,
     .run = eval_run,
     .spanned = true},
    {.task = "rollout", .count = rollout_count, .prepare = rollout_prepare, .run = rollout_run},
    {.task = NULL}};

const dray__program_kind dray__engine_program = {.open = engine_open,
                                                 .busy = engine_busy,
                                                 .decide = engine_decide,
                                                 .turn = engine_turn,
                                                 .close = engine_close,
                                                 .works = works};
