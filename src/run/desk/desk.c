/* The desk: reward, score, reference and advantage, and the driver's thread. */
#include "run/desk/desk.h"

#include "base/error.h"
#include "engine/generator.h"
#include "run/data/samples.h"
#include "run/desk/advantage.h"
#include "run/desk/reward.h"
#include "run/fault.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

enum { REWARDS_MAX = 16 }; /* as the table of settings has it */

typedef struct desk {
    dray__driver *driver;
    dray__job_reward rewards[REWARDS_MAX];
    double weights[REWARDS_MAX];
    dray__grader *graders[REWARDS_MAX];
    uint32_t reward_count;
    dray__generator *reference; /* NULL until the first sample */
} desk;

/* Opens the rewards of the job: `reward`, or the list. */
static int open_graders(const dray__job *job, desk *self, dray_error *error)
{
    uint32_t count = job->reward_count ? job->reward_count : 1;
    int rc = DRAY_OK;
    for (uint32_t i = 0; i < count && !rc; i++) {
        self->rewards[i] = job->reward;
        self->weights[i] = 1;
        if (job->reward_count) {
            self->rewards[i].rule = job->rewards[i].rule;
            self->rewards[i].command = job->rewards[i].command;
            self->weights[i] = job->rewards[i].weight;
        }
        rc = dray__grader_open(&self->rewards[i], &self->graders[i], error);
        self->reward_count += !rc;
    }
    return rc;
}

static int desk_open(dray__host *host, dray_error *error)
{
    desk *self = calloc(1, sizeof(*self));
    if (!self)
        return dray__nomem(error);
    host->state = self;
    int rc = open_graders(host->job, self, error);
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
    for (uint32_t i = 0; i < self->reward_count; i++)
        dray__grader_close(self->graders[i]);
    free(self);
}

/* ---- reward and score ------------------------------------------------------------------------ */

static uint32_t at_least(int64_t value, int64_t least)
{
    return (uint32_t)(value > least ? value : least);
}

static uint32_t reward_count(const dray__host *host)
{
    return (uint32_t)host->job->reward.micro_batch;
}

/* An evaluation is graded in one batch, so that its mean is right even if a host is killed and the
 * batch repeated. */
static uint32_t score_count(const dray__host *host)
{
    return (uint32_t)host->job->eval.prompts;
}

static uint64_t length_of(const dray__ragged *tokens, uint32_t row)
{
    return tokens->offsets[row + 1] - tokens->offsets[row];
}

static const int32_t *tokens_of(const dray__ragged *tokens, uint32_t row)
{
    return (const int32_t *)tokens->values + tokens->offsets[row];
}

/* each gets the row's number for every reward. */
static int grade_row(const dray__host *host, dray_batch *batch, const char *column,
                     const dray__ragged *prompts, const dray__ragged *responses, uint32_t row,
                     float *each, dray_error *error)
{
    desk *self = host->state;
    char *prompt = NULL, *answer = NULL, *response = NULL;
    int rc = dray__prompt_text(host->tokenizer, tokens_of(prompts, row), length_of(prompts, row),
                               &prompt, error);
    if (!rc)
        rc = dray__text_read(batch, column, row, &answer, error);
    if (!rc)
        rc = dray__response_text(host->tokenizer, tokens_of(responses, row),
                                 length_of(responses, row), &response, error);
    for (uint32_t i = 0; i < self->reward_count && !rc; i++)
        rc = dray__grade(self->graders[i], prompt, answer, response, &each[i], error);
    free(prompt);
    free(answer);
    free(response);
    return rc;
}

/* Adds up the row's rewards, each times its weight. Each is finite, but their sum may not be. */
static int add_rewards(const desk *self, const float *each, float *out, dray_error *error)
{
    double sum = 0;
    for (uint32_t i = 0; i < self->reward_count; i++)
        sum += self->weights[i] * (double)each[i];
    *out = (float)sum;
    return isfinite(*out)
               ? DRAY_OK
               : dray__fail(error, DRAY_EFORMAT,
                            "rewards: expected a sum, each times its weight, that is a finite "
                            "number (single precision), found %g",
                            sum);
}

/* A batch's rewards: `sums` has one number for each row, `each` one for each row and reward. Both
 * are in one allocation. */
typedef struct graded {
    float *sums, *each;
    double mean_length;
} graded;

/* columns are prompt, answer and response. out->sums is malloc'ed. */
static int grade(dray__host *host, dray_batch *batch, const char *const columns[3], graded *out,
                 dray_error *error)
{
    desk *self = host->state;
    dray__ragged prompts = {0}, responses;
    int rc = dray__ragged_read(batch, columns[2], DRAY_I32, &responses, error);
    if (rc)
        return rc;
    uint32_t rows = responses.rows, count = self->reward_count;
    float *sums = malloc((size_t)rows * (1 + count) * sizeof(*sums));
    float *each = sums ? sums + rows : NULL;
    if (host->pace)
        dray__pace_spend(host->job->clock.reward_seconds * rows);
    rc =
        sums ? dray__ragged_read(batch, columns[0], DRAY_I32, &prompts, error) : dray__nomem(error);
    for (uint32_t i = 0; i < rows && !rc; i++) {
        rc = grade_row(host, batch, columns[1], &prompts, &responses, i, each + (size_t)i * count,
                       error);
        if (!rc)
            rc = add_rewards(self, each + (size_t)i * count, &sums[i], error);
    }
    double length = (double)responses.offsets[rows] / rows;
    dray__ragged_free(&prompts);
    dray__ragged_free(&responses);
    if (rc)
        free(sums);
    else
        *out = (graded){sums, each, length};
    return rc;
}

static int set_scalars(dray_batch *batch, const char *column, const float *values,
                       dray_error *error)
{
    dray_column_data data = dray__scalar_column(column, values);
    return dray_batch_set(batch, &data, error);
}

static int reward_run(dray__host *host, dray_batch *batch, int64_t step, dray_error *error)
{
    static const char *const columns[] = {"prompt", "answer", "response"};
    graded rewards = {0};
    int rc = grade(host, batch, columns, &rewards, error);
    if (!rc)
        rc = set_scalars(batch, "reward", rewards.sums, error);
    if (!rc && host->job->reward_count) {
        dray_column_data column = dray__scalar_column("rewards", rewards.each);
        column.ndim = 1;
        column.shape[0] = host->job->reward_count;
        rc = dray_batch_set(batch, &column, error);
    }
    free(rewards.sums);
    if (!rc)
        dray__fault_at("rewarded", step);
    dray_trace_worked(dray_batch_rows(batch), -1);
    return rc;
}

static int score_run(dray__host *host, dray_batch *batch, int64_t step, dray_error *error)
{
    static const char *const columns[] = {"eval_prompt", "eval_answer", "eval_response"};
    uint32_t rows = dray_batch_rows(batch);
    graded rewards = {0};
    double sum = 0, version = -1;
    int rc = dray_batch_tag(batch, 0, DRAY_TAG_VERSION, &version, error);
    if (!rc)
        rc = grade(host, batch, columns, &rewards, error);
    if (!rc)
        rc = set_scalars(batch, "eval_reward", rewards.sums, error);
    for (uint32_t i = 0; i < rows && !rc; i++)
        sum += (double)rewards.sums[i];
    free(rewards.sums);
    if (!rc)
        rc = dray__host_report(host, "eval",
                               json_pack("{s:I, s:I, s:f, s:I, s:f}", "step", (json_int_t)step,
                                         "version", (json_int_t)version, "accuracy", sum / rows,
                                         "prompts", (json_int_t)rows, "response_length_mean",
                                         rewards.mean_length),
                               error);
    if (!rc)
        dray__fault_at("scored", step);
    dray_trace_worked(rows, -1);
    return rc;
}

/* ---- reference ------------------------------------------------------------------------------- */

static uint32_t reference_count(const dray__host *host)
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

static int score_reference(dray__host *host, const dray__sequences *sequences, float *out,
                           dray_error *error)
{
    const desk *self = host->state;
    return dray__generator_logprobs(self->reference, sequences, host->job->rollout.temperature, out,
                                    NULL, error);
}

static int reference_run(dray__host *host, dray_batch *batch, int64_t step, dray_error *error)
{
    const desk *self = host->state;
    int rc = self->reference ? DRAY_OK : open_reference(host, error);
    (void)step;
    return rc ? rc : dray__host_score(host, batch, "ref_log_prob", score_reference, error);
}

/* ---- advantage ------------------------------------------------------------------------------- */

static const dray__advantage *method_of(const dray__job *job)
{
    return &dray__advantages[job->advantage.method];
}

static uint32_t advantage_count(const dray__host *host)
{
    const dray__job *job = host->job;
    int64_t group = job->rollout.samples;
    return method_of(job)->whole ? (uint32_t)dray__job_batch(job)
                                 : at_least(job->advantage.micro_batch / group * group, group);
}

/* Replaces the offsets of responses by those that count only tokens that the model made. */
static int count_made(dray_batch *batch, dray__ragged *response, dray_error *error)
{
    dray__ragged mask;
    int rc = dray__ragged_read(batch, "response_mask", DRAY_I32, &mask, error);
    if (rc)
        return rc;
    const int32_t *made = mask.values;
    for (uint32_t i = 0; i < mask.rows; i++) {
        uint64_t count = 0;
        for (uint64_t t = mask.offsets[i]; t < mask.offsets[i + 1]; t++)
            count += made[t] != 0;
        response->offsets[i + 1] = response->offsets[i] + count;
    }
    dray__ragged_free(&mask);
    return DRAY_OK;
}

/* The method's inputs, copied out of the batch, and its results. */
typedef struct graded_rows {
    dray__ragged response, values, mask;
    bool *excluded;
    float *rewards, *advantages, *returns;
    dray__rewarded in;
} graded_rows;

static void graded_free(graded_rows *g)
{
    free(g->excluded);
    free(g->rewards);
    free(g->advantages);
    free(g->returns);
    dray__ragged_free(&g->response);
    dray__ragged_free(&g->values);
    dray__ragged_free(&g->mask);
}

/* Reads a column of one value for each response token. */
static int read_tokens(dray_batch *batch, const char *column, dray_dtype dtype,
                       const dray__ragged *response, dray__ragged *out, dray_error *error)
{
    int rc = dray__ragged_read(batch, column, dtype, out, error);
    if (!rc && memcmp(out->offsets, response->offsets,
                      ((size_t)out->rows + 1) * sizeof(*out->offsets)) != 0)
        rc = dray__fail(error, DRAY_ESHAPE, "column %s: expected one value for each response token",
                        column);
    return rc;
}

static int read_values(const dray__job *job, dray_batch *batch, graded_rows *g, dray_error *error)
{
    int rc = read_tokens(batch, "value", DRAY_F32, &g->response, &g->values, error);
    if (!rc && dray__job_has(job, "response_mask"))
        rc = read_tokens(batch, "response_mask", DRAY_I32, &g->response, &g->mask, error);
    g->in.values = g->values.values;
    g->in.mask = g->mask.values;
    g->in.gamma = job->advantage.gamma;
    g->in.lambda = job->advantage.lambda;
    return rc;
}

static int read_graded(const dray__host *host, dray_batch *batch, graded_rows *g, dray_error *error)
{
    const dray__job *job = host->job;
    const dray__advantage *method = method_of(job);
    uint32_t rows = dray_batch_rows(batch), group = (uint32_t)job->rollout.samples;
    if (rows % group || (method->whole && rows != dray__job_batch(job)))
        return dray__fail(error, DRAY_EINTERNAL, "advantage: %u rows are no whole %s of %lld", rows,
                          method->whole ? "step" : "groups",
                          (long long)(method->whole ? dray__job_batch(job) : group));
    int rc = dray__ragged_read(batch, "response", DRAY_I32, &g->response, error);
    if (rc)
        return rc;
    bool exclude = job->actor.overlong == DRAY__OVERLONG_EXCLUDE;
    size_t count = (method->by_token ? (size_t)g->response.offsets[rows] : rows) + 1;
    g->excluded = exclude ? dray__responses_cut(host->tokenizer, &g->response) : NULL;
    if (method->by_token)
        rc = read_values(job, batch, g, error);
    else if (dray__job_has(job, "response_mask"))
        rc = count_made(batch, &g->response, error);
    if (rc)
        return rc;
    g->rewards = malloc(rows * sizeof(*g->rewards));
    g->advantages = malloc(count * sizeof(*g->advantages));
    g->returns = malloc(count * sizeof(*g->returns));
    if ((exclude && !g->excluded) || !g->rewards || !g->advantages || !g->returns)
        return dray__nomem(error);
    g->in.rows = rows;
    g->in.group = group;
    g->in.rewards = g->rewards;
    g->in.offsets = g->response.offsets;
    g->in.excluded = g->excluded;
    g->in.divide = job->advantage.divide_by_deviation;
    return dray__scalars_read(batch, "reward", g->rewards, error);
}

static int set_advantages(const graded_rows *g, bool by_token, dray_batch *batch, dray_error *error)
{
    dray_column_data columns[] = {
        dray__scalar_column("advantage", g->advantages),
        dray__ragged_column("returns", DRAY_F32, g->response.offsets, g->returns)};
    if (by_token)
        columns[0] = dray__ragged_column("advantage", DRAY_F32, g->response.offsets, g->advantages);
    int rc = dray_batch_set(batch, &columns[0], error);
    return rc || !by_token ? rc : dray_batch_set(batch, &columns[1], error);
}

static int advantage_run(dray__host *host, dray_batch *batch, int64_t step, dray_error *error)
{
    const dray__advantage *method = method_of(host->job);
    graded_rows g = {0};
    (void)step;
    int rc = read_graded(host, batch, &g, error);
    if (!rc) {
        method->compute(&g.in, g.advantages, g.returns);
        rc = set_advantages(&g, method->by_token, batch, error);
    }
    graded_free(&g);
    dray_trace_worked(dray_batch_rows(batch), -1);
    return rc;
}

static const dray__task_work works[] = {
    {.task = "reward", .count = reward_count, .run = reward_run, .spanned = true},
    {.task = "score", .count = score_count, .run = score_run, .spanned = true},
    {.task = "reference", .count = reference_count, .run = reference_run, .spanned = true},
    {.task = "advantage", .count = advantage_count, .run = advantage_run, .spanned = true},
    {.task = NULL}};

const dray__program_kind dray__desk_program = {
    .open = desk_open, .finish = desk_finish, .close = desk_close, .works = works};
