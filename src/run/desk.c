/* The desk: reward, score, reference and advantage, and the driver's thread. */
#include "run/desk.h"

#include "base/clock.h"
#include "base/error.h"
#include "engine/generator.h"
#include "run/advantage.h"
#include "run/fault.h"
#include "run/reward.h"
#include "run/samples.h"

#include <stdlib.h>
#include <string.h>

typedef struct desk {
    dray__driver *driver;
    dray__grader *grader;
    dray__generator *reference; /* NULL until the first sample */
} desk;

static int desk_open(dray__host *host, dray_error *error)
{
    desk *self = calloc(1, sizeof(*self));
    if (!self)
        return dray__nomem(error);
    host->state = self;
    int rc = dray__grader_open(host->job, &self->grader, error);
    if (!rc && dray__role_has(host->spec, "driver"))
        rc = dray__driver_start(host, &self->driver, error);
    return rc;
}

static int desk_finish(dray__host *host, dray_error *error)
{
    (void)error;
    desk *self = host->state;
    dray__driver_join(self->driver, false);
    self->driver = NULL;
    return DRAY_OK;
}

static void desk_close(dray__host *host)
{
    desk *self = host->state;
    if (!self)
        return;
    dray__driver_join(self->driver, true);
    dray__generator_close(self->reference);
    dray__grader_close(self->grader);
    free(self);
}

const dray__program_kind dray__desk_program = {
    .open = desk_open, .finish = desk_finish, .close = desk_close};

/* ---- reward and score ------------------------------------------------------------------------ */

static uint32_t at_least(int64_t value, int64_t least)
{
    return (uint32_t)(value > least ? value : least);
}

uint32_t dray__reward_count(const dray__host *host)
{
    return (uint32_t)host->job->reward.micro_batch;
}

/* An evaluation is graded in one piece: its mean is then right however often a host is killed. */
uint32_t dray__score_count(const dray__host *host)
{
    return (uint32_t)host->job->eval.prompts;
}

static int grade_row(const dray__host *host, dray_batch *batch, const char *const columns[3],
                     const dray__ragged *responses, uint32_t row, float *reward, dray_error *error)
{
    desk *self = host->state;
    char *prompt = NULL, *answer = NULL, *response = NULL;
    const int32_t *tokens = responses->values;
    uint64_t from = responses->offsets[row], to = responses->offsets[row + 1];
    dray_column prompts;
    int rc = dray_batch_column(batch, columns[0], &prompts, error);
    if (!rc)
        rc = dray__prompt_text(host->tokenizer, prompts.cells[row], prompts.lengths[row], &prompt,
                               error);
    if (!rc)
        rc = dray__text_read(batch, columns[1], row, &answer, error);
    if (!rc)
        rc = dray__response_text(host->tokenizer, tokens + from, to - from, &response, error);
    if (!rc)
        rc = dray__grade(self->grader, prompt, answer, response, reward, error);
    free(prompt);
    free(answer);
    free(response);
    return rc;
}

/* columns: prompt, answer, response. *rewards is malloc'ed. */
static int grade(dray__host *host, dray_batch *batch, const char *const columns[3], float **rewards,
                 double *mean_length, dray_error *error)
{
    dray__ragged responses;
    int rc = dray__ragged_read(batch, columns[2], DRAY_I32, &responses, error);
    if (rc)
        return rc;
    float *out = malloc(responses.rows * sizeof(*out));
    if (host->pace)
        dray__pace_spend(host->job->clock.reward_seconds * responses.rows);
    rc = out ? DRAY_OK : dray__nomem(error);
    for (uint32_t i = 0; i < responses.rows && !rc; i++)
        rc = grade_row(host, batch, columns, &responses, i, &out[i], error);
    *mean_length = (double)responses.offsets[responses.rows] / responses.rows;
    dray__ragged_free(&responses);
    if (rc)
        free(out);
    else
        *rewards = out;
    return rc;
}

int dray__reward_run(dray__host *host, dray_batch *batch, dray_error *error)
{
    static const char *const columns[] = {"prompt", "answer", "response"};
    int64_t begin = dray_trace_now(), step;
    float *rewards = NULL;
    double length;
    int rc = dray__batch_step(batch, &step, error);
    if (!rc)
        rc = grade(host, batch, columns, &rewards, &length, error);
    if (!rc) {
        dray_column_data column = dray__scalar_column("reward", rewards);
        rc = dray_batch_set(batch, &column, error);
    }
    free(rewards);
    if (!rc)
        dray__fault_at("rewarded", step);
    return rc ? rc : dray__host_phase(host, "reward", step, begin, error);
}

int dray__score_run(dray__host *host, dray_batch *batch, dray_error *error)
{
    static const char *const columns[] = {"eval_prompt", "eval_answer", "eval_response"};
    int64_t begin = dray_trace_now(), step;
    uint32_t rows = dray_batch_rows(batch);
    float *rewards = NULL;
    double length = 0, sum = 0;
    int rc = dray__batch_step(batch, &step, error);
    if (!rc)
        rc = grade(host, batch, columns, &rewards, &length, error);
    if (!rc) {
        dray_column_data column = dray__scalar_column("eval_reward", rewards);
        rc = dray_batch_set(batch, &column, error);
    }
    for (uint32_t i = 0; i < rows && !rc; i++)
        sum += (double)rewards[i];
    free(rewards);
    if (!rc)
        rc = dray__host_report(host, "eval",
                               json_pack("{s:I, s:f, s:I, s:f}", "step", (json_int_t)step,
                                         "accuracy", sum / rows, "prompts", (json_int_t)rows,
                                         "response_length_mean", length),
                               error);
    if (!rc)
        dray__fault_at("scored", step);
    return rc ? rc : dray__host_phase(host, "score", step, begin, error);
}

/* ---- reference ------------------------------------------------------------------------------- */

uint32_t dray__reference_count(const dray__host *host)
{
    return (uint32_t)host->job->reference.micro_batch;
}

/* The frozen model is the one that training started from: checkpoints/step-000000. */
static int open_reference(dray__host *host, dray_error *error)
{
    desk *self = host->state;
    dray_model_config config;
    char path[4096];
    dray__checkpoint_path(host->options.folder, 0, path, sizeof(path));
    int rc = dray__job_model_config(host->job, host->tokenizer, &config, error);
    if (!rc)
        rc = dray__generator_open(&config, NULL, &self->reference, error);
    if (!rc)
        rc = dray__generator_load(self->reference, path, error);
    if (!rc)
        dray__generator_pace(self->reference, host->pace);
    return rc;
}

int dray__reference_run(dray__host *host, dray_batch *batch, dray_error *error)
{
    desk *self = host->state;
    int64_t begin = dray_trace_now(), step;
    dray__ragged prompt = {0}, response = {0};
    int rc = dray__batch_step(batch, &step, error);
    if (!rc && !self->reference)
        rc = open_reference(host, error);
    if (!rc)
        rc = dray__ragged_read(batch, "prompt", DRAY_I32, &prompt, error);
    if (!rc)
        rc = dray__ragged_read(batch, "response", DRAY_I32, &response, error);
    float *logprobs = NULL;
    if (!rc && !(logprobs = malloc((response.offsets[response.rows] + 1) * sizeof(*logprobs))))
        rc = dray__nomem(error);
    if (!rc) {
        dray__sequences sequences = {.rows = prompt.rows,
                                     .prompt = dray__ragged_tokens(&prompt),
                                     .response = dray__ragged_tokens(&response)};
        rc = dray__generator_logprobs(self->reference, &sequences, host->job->rollout.temperature,
                                      logprobs, NULL, error);
    }
    if (!rc) {
        dray_column_data column =
            dray__ragged_column("ref_log_prob", DRAY_F32, response.offsets, logprobs);
        rc = dray_batch_set(batch, &column, error);
    }
    free(logprobs);
    dray__ragged_free(&prompt);
    dray__ragged_free(&response);
    return rc ? rc : dray__host_phase(host, "reference", step, begin, error);
}

/* ---- advantage ------------------------------------------------------------------------------- */

uint32_t dray__advantage_count(const dray__host *host)
{
    int64_t group = host->job->rollout.samples;
    return at_least(host->job->advantage.micro_batch / group * group, group);
}

int dray__advantage_run(dray__host *host, dray_batch *batch, dray_error *error)
{
    int64_t begin = dray_trace_now(), step;
    uint32_t rows = dray_batch_rows(batch), group = (uint32_t)host->job->rollout.samples;
    const dray__advantage *method = &dray__advantages[host->job->advantage.method];
    int rc = dray__batch_step(batch, &step, error);
    if (!rc && rows % group)
        rc = dray__fail(error, DRAY_EINTERNAL, "advantage: %u rows are no whole groups of %u", rows,
                        group);
    float *rewards = malloc(2 * (size_t)rows * sizeof(*rewards));
    if (!rc && !rewards)
        rc = dray__nomem(error);
    if (!rc)
        rc = dray__scalars_read(batch, "reward", rewards, error);
    for (uint32_t i = 0; i < rows && !rc; i += group)
        method->compute(rewards + i, group, host->job->advantage.divide_by_deviation,
                        rewards + rows + i);
    if (!rc) {
        dray_column_data column = dray__scalar_column("advantage", rewards + rows);
        rc = dray_batch_set(batch, &column, error);
    }
    free(rewards);
    return rc ? rc : dray__host_phase(host, "advantage", step, begin, error);
}
