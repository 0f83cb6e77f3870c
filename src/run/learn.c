#include "run/learn.h"

#include "base/clock.h"
#include "base/error.h"
#include "run/fault.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

void dray__micro_free(dray__micro *micro)
{
    dray__ragged_free(&micro->prompt);
    dray__ragged_free(&micro->response);
    dray__ragged_free(&micro->rollout);
    dray__ragged_free(&micro->old);
    dray__ragged_free(&micro->reference);
    free(micro->advantages);
    free(micro->rewards);
    *micro = (dray__micro){0};
}

static int same_length(const dray__micro *micro, const dray__ragged *values, const char *column,
                       dray_error *error)
{
    for (uint32_t i = 0; i <= micro->rows; i++)
        if (values->offsets[i] != micro->response.offsets[i])
            return dray__fail(error, DRAY_ESHAPE,
                              "column %s: expected one value for each response token", column);
    return DRAY_OK;
}

typedef struct token_column {
    const char *name;
    dray__ragged *to;
} token_column;

static int read_tokens(dray_batch *batch, bool reference, dray__micro *m, dray_error *error)
{
    const token_column columns[] = {{"rollout_log_prob", &m->rollout},
                                    {"old_log_prob", &m->old},
                                    {"ref_log_prob", &m->reference}};
    int rc = dray__ragged_read(batch, "prompt", DRAY_I32, &m->prompt, error);
    if (!rc)
        rc = dray__ragged_read(batch, "response", DRAY_I32, &m->response, error);
    for (int i = 0; i < (reference ? 3 : 2) && !rc; i++) {
        rc = dray__ragged_read(batch, columns[i].name, DRAY_F32, columns[i].to, error);
        if (!rc)
            rc = same_length(m, columns[i].to, columns[i].name, error);
    }
    return rc;
}

int dray__micro_read(dray_batch *batch, bool reference, dray__micro *out, dray_error *error)
{
    dray__micro m = {.rows = dray_batch_rows(batch)};
    m.advantages = malloc(m.rows * sizeof(float));
    m.rewards = malloc(m.rows * sizeof(float));
    int rc = m.advantages && m.rewards ? DRAY_OK : dray__nomem(error);
    if (!rc)
        rc = read_tokens(batch, reference, &m, error);
    if (!rc)
        rc = dray__scalars_read(batch, "advantage", m.advantages, error);
    if (!rc)
        rc = dray__scalars_read(batch, "reward", m.rewards, error);
    if (rc)
        dray__micro_free(&m);
    else
        *out = m;
    return rc;
}

static int slice(const dray__ragged *from, uint32_t first, uint32_t rows, dray__ragged *out,
                 dray_error *error)
{
    if (!from->offsets) /* no reference */
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

int dray__micro_slice(const dray__micro *from, uint32_t first, uint32_t rows, dray__micro *out,
                      dray_error *error)
{
    dray__micro m = {.rows = rows,
                     .advantages = malloc(rows * sizeof(float)),
                     .rewards = malloc(rows * sizeof(float))};
    const dray__ragged *columns[] = {&from->prompt, &from->response, &from->rollout, &from->old,
                                     &from->reference};
    dray__ragged *to[] = {&m.prompt, &m.response, &m.rollout, &m.old, &m.reference};
    int rc = m.advantages && m.rewards ? DRAY_OK : dray__nomem(error);
    for (size_t i = 0; i < sizeof(to) / sizeof(to[0]) && !rc; i++) /* all of 4 bytes */
        rc = slice(columns[i], first, rows, to[i], error);
    if (rc) {
        dray__micro_free(&m);
        return rc;
    }
    memcpy(m.advantages, from->advantages + first, rows * sizeof(float));
    memcpy(m.rewards, from->rewards + first, rows * sizeof(float));
    *out = m;
    return DRAY_OK;
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

/* Warm-up and decay run over steps of the job, smoothly through the optimiser's steps of each. */
double dray__learning_rate(const dray__job *job, int64_t step, uint32_t optimiser_step)
{
    const dray__job_actor *actor = &job->actor;
    double each = (double)(actor->optimiser_steps * actor->epochs);
    double at = (double)(step - 1) + (double)optimiser_step / each;
    double factor = 1;
    if (actor->warmup_steps > 0)
        factor = fmin(1, (at + 1 / each) / (double)actor->warmup_steps);
    if (actor->decay == DRAY__DECAY_LINEAR)
        factor *= 1 - (1 - actor->final_lr) * at / (double)job->steps;
    return actor->lr * factor;
}

int dray__learner_accumulate(dray__host *host, const dray__micro *micro, dray_error *error)
{
    dray__learner *self = host->state;
    const dray__job_actor *actor = &host->job->actor;
    dray__policy_batch batch = DRAY__POLICY_BATCH_INIT;
    batch.sequences = (dray__sequences){.rows = micro->rows,
                                        .prompt = dray__ragged_tokens(&micro->prompt),
                                        .response = dray__ragged_tokens(&micro->response)};
    batch.temperature = host->job->rollout.temperature;
    batch.advantages = micro->advantages;
    batch.old_logprobs = micro->old.values;
    batch.ref_logprobs = host->job->reference.enabled ? micro->reference.values : NULL;
    batch.clip_low = batch.clip_high = actor->clip;
    batch.kl_coefficient = actor->kl;
    int rc = dray__trainer_accumulate_policy(self->trainer, &batch, error);
    if (!rc)
        dray__fault_at("after_backward", self->step);
    return rc;
}

static void add_stats(dray__step_sums *sums, const dray__step_stats *stats)
{
    double tokens = (double)stats->tokens;
    sums->loss += stats->loss * tokens;
    sums->clip_fraction += stats->clip_fraction * tokens;
    sums->kl += stats->kl * tokens;
    sums->entropy += stats->entropy * tokens;
    sums->gradient_norm += stats->gradient_norm;
    sums->ratio_max = fmax(sums->ratio_max, stats->ratio_max);
    sums->trained_tokens += stats->tokens;
}

int dray__learner_step(dray__host *host, dray_error *error)
{
    dray__learner *self = host->state;
    int64_t begin = dray_trace_now();
    int rc = DRAY_OK;
    if (!self->written) /* engines that still read the published version go first */
        rc = dray_publisher_wait(self->publisher, (uint64_t)(self->step - 1), host->wait_ns, NULL,
                                 error);
    self->written = true;
    dray_trace_span(DRAY_SPAN_WAIT, "wait for readers", begin, dray_trace_now(), self->step);
    begin = dray_trace_now();
    dray__step_stats stats = {0};
    dray__step_options options = DRAY__STEP_OPTIONS_INIT;
    options.learning_rate = dray__learning_rate(host->job, self->step, self->sums.steps);
    options.max_norm = host->job->actor.grad_norm;
    if (!rc)
        rc = dray__trainer_step(self->trainer, &options, &stats, error);
    if (rc)
        return rc;
    add_stats(&self->sums, &stats);
    self->sums.steps++;
    self->sums.learning_rate = options.learning_rate;
    dray__fault_at("after_step", self->step);
    return dray__host_phase(host, "optimiser", self->step, begin, error);
}

int dray__learner_repeat(dray__host *host, dray_error *error)
{
    dray__learner *self = host->state;
    uint32_t part = dray__learner_part(host->job), in = 0;
    int rc = DRAY_OK;
    for (int64_t epoch = 1; epoch < host->job->actor.epochs && !rc; epoch++) {
        for (uint32_t i = 0; i < self->kept_count && !rc; i++) {
            rc = dray__learner_accumulate(host, &self->kept[i], error);
            in += self->kept[i].rows;
            if (!rc && in == part) {
                rc = dray__learner_step(host, error);
                in = 0;
            }
        }
    }
    for (uint32_t i = 0; i < self->kept_count; i++)
        dray__micro_free(&self->kept[i]);
    self->kept_count = 0;
    return rc;
}
