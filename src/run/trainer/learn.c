#include "run/trainer/learn.h"

#include "base/error.h"
#include "run/desk/advantage.h"
#include "run/fault.h"

#include <math.h>
#include <stddef.h>
#include <stdlib.h>
#include <string.h>

typedef struct token_column {
    const char *name;
    size_t at; /* offset of its dray__ragged */
    dray_dtype dtype;
} token_column;

/* All have values of 4 bytes. */
static const token_column prompts = {"prompt", offsetof(dray__micro, prompt), DRAY_I32};
static const token_column rewards = {"rewards", offsetof(dray__micro, each), DRAY_F32};
static const token_column responses[] = {
    {"response", offsetof(dray__micro, response), DRAY_I32},
    {"rollout_log_prob", offsetof(dray__micro, rollout), DRAY_F32},
    {"response_version", offsetof(dray__micro, versions), DRAY_I32},
    {"response_mask", offsetof(dray__micro, mask), DRAY_I32},
    {"old_log_prob", offsetof(dray__micro, old), DRAY_F32},
    {"ref_log_prob", offsetof(dray__micro, reference), DRAY_F32},
    {"value", offsetof(dray__micro, values), DRAY_F32},
    {"returns", offsetof(dray__micro, returns), DRAY_F32},
    {"advantage", offsetof(dray__micro, token_advantages), DRAY_F32}};
enum { RESPONSES = sizeof(responses) / sizeof(responses[0]) };

static dray__ragged *place(dray__micro *micro, const token_column *column)
{
    return (dray__ragged *)(void *)((char *)micro + column->at);
}

static const dray__ragged *values_of(const dray__micro *micro, const token_column *column)
{
    return (const dray__ragged *)(const void *)((const char *)micro + column->at);
}

void dray__micro_free(dray__micro *micro)
{
    dray__ragged_free(place(micro, &prompts));
    dray__ragged_free(place(micro, &rewards));
    for (int i = 0; i < RESPONSES; i++)
        dray__ragged_free(place(micro, &responses[i]));
    free(micro->advantages);
    free(micro->rewards);
    *micro = (dray__micro){0};
}

static int same_length(const dray__micro *micro, const token_column *column, dray_error *error)
{
    const dray__ragged *values = values_of(micro, column);
    for (uint32_t i = 0; i <= micro->rows; i++)
        if (values->offsets[i] != micro->response.offsets[i])
            return dray__fail(error, DRAY_ESHAPE,
                              "column %s: expected one value for each response token",
                              column->name);
    return DRAY_OK;
}

/* The column is another role's, which may have another number of rewards a row than the job. */
static int check_rewards(const dray__micro *micro, const dray__job *job, dray_error *error)
{
    const uint64_t *offsets = micro->each.offsets;
    for (uint32_t i = 0; offsets && i < micro->rows; i++)
        if (offsets[i + 1] - offsets[i] != job->reward_count)
            return dray__fail(error, DRAY_ESHAPE,
                              "column %s: expected %u numbers a row, found %llu", rewards.name,
                              job->reward_count, (unsigned long long)(offsets[i + 1] - offsets[i]));
    return DRAY_OK;
}

/* Return whether the task reads this column, whether it reads it in this job, and whether the
 * column has one value for each row. */
static bool needs(const char *task, const char *column)
{
    const char *const *at = dray__task_find(task)->needs;
    while (*at && strcmp(*at, column) != 0)
        at++;
    return *at != NULL;
}

static bool takes(const dray__job *job, const char *task, const char *column)
{
    return needs(task, column) && dray__job_has(job, column);
}

static bool by_row(const dray__job *job, const char *column)
{
    return strcmp(column, "advantage") == 0 && !dray__advantages[job->advantage.method].by_token;
}

static int read_tokens(dray_batch *batch, const dray__job *job, const char *task, dray__micro *m,
                       dray_error *error)
{
    int rc = dray__ragged_read(batch, prompts.name, prompts.dtype, &m->prompt, error);
    if (!rc && takes(job, task, rewards.name))
        rc = dray__ragged_read(batch, rewards.name, rewards.dtype, &m->each, error);
    if (!rc)
        rc = check_rewards(m, job, error);
    for (int i = 0; i < RESPONSES && !rc; i++) {
        const token_column *column = &responses[i];
        if (!takes(job, task, column->name) || by_row(job, column->name))
            continue;
        rc = dray__ragged_read(batch, column->name, column->dtype, place(m, column), error);
        if (!rc)
            rc = same_length(m, column, error);
    }
    return rc;
}

/* When the job has no column of versions, all tokens are of the version in the sample's tag. */
static int read_version_tags(const dray_batch *batch, dray__micro *m, dray_error *error)
{
    const dray__ragged *tokens = &m->response;
    int rc = dray__ragged_like(tokens, &m->versions, error);
    int32_t *values = m->versions.values;
    for (uint32_t i = 0; i < m->rows && !rc; i++) {
        double version = 0;
        rc = dray_batch_tag(batch, i, DRAY_TAG_VERSION, &version, error);
        for (uint64_t at = tokens->offsets[i]; at < tokens->offsets[i + 1]; at++)
            values[at] = (int32_t)version;
    }
    return rc;
}

static int read_scalars(dray_batch *batch, const dray__job *job, const char *task,
                        const char *column, float **out, dray_error *error)
{
    if (!takes(job, task, column))
        return DRAY_OK;
    *out = malloc(dray_batch_rows(batch) * sizeof(**out));
    return *out ? dray__scalars_read(batch, column, *out, error) : dray__nomem(error);
}

int dray__micro_read(dray_batch *batch, const dray__job *job, const char *task, dray__micro *out,
                     dray_error *error)
{
    dray__micro m = {.rows = dray_batch_rows(batch)};
    int rc = read_tokens(batch, job, task, &m, error);
    if (!rc && by_row(job, "advantage"))
        rc = read_scalars(batch, job, task, "advantage", &m.advantages, error);
    if (!rc)
        rc = read_scalars(batch, job, task, "reward", &m.rewards, error);
    if (!rc && needs(task, "response_version") && !dray__job_has(job, "response_version"))
        rc = read_version_tags(batch, &m, error);
    if (rc)
        dray__micro_free(&m);
    else
        *out = m;
    return rc;
}

static int slice(const dray__ragged *from, uint32_t first, uint32_t rows, dray__ragged *out,
                 dray_error *error)
{
    if (!from->offsets) /* the job does not have this column */
        return DRAY_OK;
    uint64_t begin = from->offsets[first], end = from->offsets[first + rows];
    *out = (dray__ragged){.rows = rows,
                          .offsets = malloc(((size_t)rows + 1) * sizeof(uint64_t)),
                          .values = malloc((end - begin) * 4 + 1)};
    if (!out->offsets || !out->values)
        return dray__nomem(error);
    for (uint32_t i = 0; i <= rows; i++)
        out->offsets[i] = from->offsets[first + i] - begin;
    memcpy(out->values, (const char *)from->values + begin * 4, (end - begin) * 4);
    return DRAY_OK;
}

static int slice_scalars(const float *from, uint32_t first, uint32_t rows, float **out,
                         dray_error *error)
{
    if (!from)
        return DRAY_OK;
    *out = malloc(rows * sizeof(**out));
    if (!*out)
        return dray__nomem(error);
    memcpy(*out, from + first, rows * sizeof(**out));
    return DRAY_OK;
}

int dray__micro_slice(const dray__micro *from, uint32_t first, uint32_t rows, dray__micro *out,
                      dray_error *error)
{
    dray__micro m = {.rows = rows};
    int rc = slice_scalars(from->advantages, first, rows, &m.advantages, error);
    if (!rc)
        rc = slice_scalars(from->rewards, first, rows, &m.rewards, error);
    if (!rc)
        rc = slice(&from->prompt, first, rows, &m.prompt, error);
    if (!rc)
        rc = slice(&from->each, first, rows, &m.each, error);
    for (int i = 0; i < RESPONSES && !rc; i++)
        rc = slice(values_of(from, &responses[i]), first, rows, place(&m, &responses[i]), error);
    if (rc)
        dray__micro_free(&m);
    else
        *out = m;
    return rc;
}

uint32_t dray__learner_part(const dray__job *job)
{
    return (uint32_t)(dray__job_batch(job) / job->actor.optimiser_steps);
}

uint32_t dray__learner_micro(const dray__job *job)
{
    uint32_t part = dray__learner_part(job);
    return job->actor.micro_batch < (int64_t)part ? (uint32_t)job->actor.micro_batch : part;
}

/* Warm-up and decay run over the job's steps, and change with each optimiser step. */
double dray__learning_rate(const dray__job *job, const dray__learned *what, int64_t step,
                           uint32_t optimiser_step)
{
    const dray__job_actor *actor = &job->actor;
    double each = (double)(actor->optimiser_steps * what->epochs(job));
    double at = (double)(step - 1) + (double)optimiser_step / each;
    double factor = 1;
    if (actor->warmup_steps > 0)
        factor = fmin(1, (at + 1 / each) / (double)actor->warmup_steps);
    if (actor->decay == DRAY__DECAY_LINEAR)
        factor *= 1 - (1 - actor->final_lr) * at / (double)job->steps;
    return what->rate(job) * factor;
}

dray__sequences dray__micro_sequences(const dray__micro *micro)
{
    return (dray__sequences){.rows = micro->rows,
                             .prompt = dray__ragged_tokens(&micro->prompt),
                             .response = dray__ragged_tokens(&micro->response),
                             .mask = micro->mask.values};
}

/* Counts the optimiser steps between the policy that made each token and its training. */
static void count_behind(dray__learner *self, const dray__job *job, const dray__micro *micro)
{
    int64_t each_version = job->actor.optimiser_steps * job->actor.epochs;
    const int32_t *versions = micro->versions.values;
    dray__sequences sequences = dray__micro_sequences(micro);
    for (uint64_t i = 0; i < micro->response.offsets[micro->rows]; i++) {
        if (!dray__token_counts(&sequences, i))
            continue;
        double behind = (double)((self->step - 1 - versions[i]) * each_version + self->sums.steps);
        self->sums.behind += behind;
        self->sums.behind_max = fmax(self->sums.behind_max, behind);
        self->sums.used_tokens++;
    }
}

static dray__policy_batch policy_batch(const dray__job *job, const dray__micro *micro,
                                       const bool *masked)
{
    const dray__job_actor *actor = &job->actor;
    dray__policy_batch batch = {.sequences = dray__micro_sequences(micro)};
    batch.temperature = job->rollout.temperature;
    batch.token_advantages = micro->token_advantages.values != NULL;
    batch.advantages = batch.token_advantages ? micro->token_advantages.values : micro->advantages;
    batch.behaviour_logprobs = micro->rollout.values;
    batch.old_logprobs =
        actor->old_log_prob == DRAY__OLD_ROLLOUT ? micro->rollout.values : micro->old.values;
    batch.ref_logprobs = job->reference.enabled ? micro->reference.values : NULL;
    batch.masked = masked;
    batch.loss = actor->loss;
    batch.aggregate = actor->aggregate;
    batch.length = (double)job->rollout.max_new_tokens;
    batch.truncate = actor->truncate;
    batch.clip_low = actor->clip;
    batch.clip_high = actor->clip_high > 0 ? actor->clip_high : actor->clip;
    batch.dual_clip = actor->dual_clip;
    batch.kl_coefficient = actor->kl;
    batch.entropy_coefficient = actor->entropy;
    return batch;
}

int dray__learner_accumulate_policy(dray__host *host, const dray__micro *micro, const bool *masked,
                                    dray_error *error)
{
    dray__learner *self = host->state;
    dray__policy_batch batch = policy_batch(host->job, micro, masked);
    int rc = dray__trainer_accumulate_policy(self->trainer, &batch, error);
    if (!rc)
        count_behind(self, host->job, micro);
    return rc;
}

int dray__learner_accumulate(dray__host *host, const dray__micro *micro, dray_error *error)
{
    dray__learner *self = host->state;
    bool mask = host->job->actor.overlong != DRAY__OVERLONG_TRAIN;
    bool *masked = mask ? dray__responses_cut(host->tokenizer, &micro->response) : NULL;
    int rc =
        mask && !masked ? dray__nomem(error) : self->what->accumulate(host, micro, masked, error);
    free(masked);
    if (!rc) {
        dray_trace_worked(micro->rows, (int64_t)micro->response.offsets[micro->rows]);
        dray__fault_at("after_backward", self->step);
    }
    return rc;
}

static void add_stats(dray__step_sums *sums, const dray__step_stats *stats)
{
    double tokens = (double)stats->tokens;
    sums->loss += stats->loss;
    sums->gradient_norm += stats->gradient_norm;
    sums->clip_fraction += stats->clip_fraction * tokens;
    sums->dual_clip_fraction += stats->dual_clip_fraction * tokens;
    sums->truncated_fraction += stats->truncated_fraction * tokens;
    sums->kl += stats->kl * tokens;
    sums->entropy += stats->entropy * tokens;
    sums->ratio_max = fmax(sums->ratio_max, stats->ratio_max);
    sums->behaviour += stats->behaviour_mean * tokens;
    sums->behaviour_square += stats->behaviour_square * tokens;
    sums->behaviour_max = fmax(sums->behaviour_max, stats->behaviour_max);
    sums->trained_tokens += stats->tokens;
}

int dray__learner_step(dray__host *host, dray_error *error)
{
    dray__learner *self = host->state;
    int rc = DRAY_OK;
    if (!self->written) /* waits for engines that still read the published version */
        rc = dray__publication_release(self->publication, self->step - 1, error);
    self->written = true;
    dray_trace_enter(DRAY_SPAN_BUSY, self->what->optimiser, self->step);
    dray__step_stats stats = {0};
    const dray__step_options options = {
        dray__learning_rate(host->job, self->what, self->step, self->sums.steps),
        host->job->actor.grad_norm};
    if (!rc)
        rc = dray__trainer_step(self->trainer, &options, &stats, error);
    if (rc)
        return rc;
    add_stats(&self->sums, &stats);
    self->sums.steps++;
    self->sums.learning_rate = options.learning_rate;
    dray__fault_at("after_step", self->step);
    dray_trace_leave();
    return DRAY_OK;
}

int dray__learner_repeat(dray__host *host, dray_error *error)
{
    dray__learner *self = host->state;
    uint32_t part = dray__learner_part(host->job), in = 0;
    int rc = DRAY_OK;
    dray_trace_enter(DRAY_SPAN_BUSY, self->what->task, self->step);
    for (int64_t epoch = 1; epoch < self->what->epochs(host->job) && !rc; epoch++) {
        for (uint32_t i = 0; i < self->kept_count && !rc; i++) {
            rc = dray__learner_accumulate(host, &self->kept[i], error);
            in += self->kept[i].rows;
            if (!rc && in == part) {
                rc = dray__learner_step(host, error);
                in = 0;
            }
        }
    }
    dray_trace_leave();
    for (uint32_t i = 0; i < self->kept_count; i++)
        dray__micro_free(&self->kept[i]);
    self->kept_count = 0;
    return rc;
}
