/* The actor's steps when a step trains the samples that are complete first, in whole groups of any
 * step's prompts. Samples are copied out of the queue and committed at once, so that the rest of
 * the queue is for the next step. The actor itself computes the samples' log-probs by the
 * parameters with which the step begins, as the samples come: the proximal policy of the decoupled
 * objective (Hilton et al. 2022, arXiv 2110.00641; AReaL, Fu et al. 2025, arXiv 2505.24298). It
 * also computes the advantages over all samples of the step, once all are there.
 *
 * With a value model two learners train the same samples in a step. The task `value` claims them
 * first, as many as a step trains, and not before policy and value model have both made the
 * previous step. So the samples that have values and are not trained by both models are those of
 * the step. */
#include "base/error.h"
#include "run/desk/advantage.h"
#include "run/trainer/learn.h"

#include <stdlib.h>
#include <string.h>

static uint32_t batch_of(const dray__host *host)
{
    return (uint32_t)dray__job_batch(host->job);
}

/* ---- claims ---------------------------------------------------------------------------------- */

bool dray__late_newest(const dray__host *host)
{
    const dray__learner *self = host->state;
    return dray__rules_newest_only(&self->rules, self->step, self->old);
}

uint32_t dray__late_bind(const dray__host *host, uint32_t most, uint32_t left)
{
    const dray__learner *self = host->state;
    return self->stopped ? 0 : dray__rules_bind(&self->rules, self->step, self->old, most, left);
}

bool dray__late_binds(const dray__host *host)
{
    const dray__learner *self = host->state;
    bool value = self->what == &dray__learned_value;
    return self->late && dray__job_has(host->job, "critic") == value;
}

static json_int_t count_of(const json_t *partition, const char *table, const char *name)
{
    const json_t *entry = json_object_get(json_object_get(partition, table), name);
    return json_integer_value(json_is_object(entry) ? json_object_get(entry, "committed") : entry);
}

/* Asks the queue for the bound samples, because it also knows which were lost. */
int dray__late_left(const dray__host *host, uint32_t *left, dray_error *error)
{
    const dray__learner *self = host->state;
    json_t *status = NULL, *partition;
    json_int_t bound = self->rows;
    size_t i;
    int rc = dray__queue_state(host->queue, &status, error);
    json_array_foreach(json_object_get(status, "partitions"), i, partition)
    {
        bound += count_of(partition, "columns", "value") - count_of(partition, "tasks", "critic");
    }
    json_decref(status);
    *left = rc || bound >= batch_of(host) ? 0 : batch_of(host) - (uint32_t)bound;
    return rc;
}

uint32_t dray__late_count(const dray__host *host)
{
    const dray__learner *self = host->state;
    uint32_t most = dray__learner_micro(host->job), left = batch_of(host) - self->rows;
    if (self->what == &dray__learned_policy && dray__late_binds(host))
        return dray__late_bind(host, most, left);
    return self->stopped ? 0 : dray__rules_groups(&self->rules, most, left);
}

void dray__late_bound(dray__learner *self, const dray_batch *batch)
{
    self->old += dray__rules_count_old(self->step, batch);
}

/* ---- learning -------------------------------------------------------------------------------- */

int dray__late_proximal(dray__host *host, dray__micro *micro, dray_error *error)
{
    dray__learner *self = host->state;
    if (host->job->actor.old_log_prob == DRAY__OLD_ROLLOUT)
        return DRAY_OK;
    dray__sequences sequences = dray__micro_sequences(micro);
    int rc = dray__ragged_like(&micro->response, &micro->old, error);
    return rc ? rc
              : dray__trainer_logprobs(self->trainer, &sequences, host->job->rollout.temperature,
                                       micro->old.values, NULL, error);
}

/* Keeps the micro-batch in pieces that each belong to one optimiser step. */
static int keep(dray__host *host, const dray__micro *whole, dray_error *error)
{
    dray__learner *self = host->state;
    uint32_t part = dray__learner_part(host->job), most = dray__learner_micro(host->job);
    int rc = DRAY_OK;
    for (uint32_t first = 0, rows; first < whole->rows && !rc; first += rows) {
        uint32_t left = part - self->rows % part;
        dray__micro piece = {0};
        rows = whole->rows - first;
        rows = rows < left ? rows : left;
        rows = rows < most ? rows : most;
        rc = dray__micro_slice(whole, first, rows, &piece, error);
        if (!rc)
            rc = dray__learner_keep(host, &piece, error);
        dray__micro_free(&piece);
        self->rows += rc ? 0 : rows;
    }
    return rc;
}

static bool computes_advantages(const dray__host *host)
{
    return dray__advantages[host->job->advantage.method].whole;
}

/* The method's inputs, from all kept micro-batches. */
typedef struct whole_step {
    float *rewards, *advantages;
    uint64_t *offsets;
    bool *excluded;
} whole_step;

static void collect(const dray__host *host, const whole_step *to)
{
    const dray__learner *self = host->state;
    bool exclude = host->job->actor.overlong == DRAY__OVERLONG_EXCLUDE;
    uint32_t at = 0;
    to->offsets[0] = 0;
    for (uint32_t i = 0; i < self->kept_count; i++)
        for (uint32_t row = 0; row < self->kept[i].rows; row++, at++) {
            const dray__micro *micro = &self->kept[i];
            dray__sequences sequences = dray__micro_sequences(micro);
            to->rewards[at] = micro->rewards[row];
            to->offsets[at + 1] = to->offsets[at] + dray__row_tokens(&sequences, row);
            to->excluded[at] =
                exclude && dray__response_cut(host->tokenizer, &micro->response, row);
        }
}

static int hand_out(dray__learner *self, const float *advantages, dray_error *error)
{
    for (uint32_t i = 0; i < self->kept_count; i++) {
        dray__micro *micro = &self->kept[i];
        micro->advantages = malloc(micro->rows * sizeof(*micro->advantages));
        if (!micro->advantages)
            return dray__nomem(error);
        memcpy(micro->advantages, advantages, micro->rows * sizeof(*advantages));
        advantages += micro->rows;
    }
    return DRAY_OK;
}

static int add_advantages(dray__host *host, dray_error *error)
{
    uint32_t rows = batch_of(host);
    whole_step of = {.rewards = malloc(rows * sizeof(*of.rewards)),
                     .advantages = malloc(rows * sizeof(*of.advantages)),
                     .offsets = malloc((rows + (size_t)1) * sizeof(*of.offsets)),
                     .excluded = malloc(rows * sizeof(*of.excluded))};
    bool there = of.rewards && of.advantages && of.offsets && of.excluded;
    if (there) {
        collect(host, &of);
        dray__rewarded in = {.rows = rows,
                             .group = (uint32_t)host->job->rollout.samples,
                             .rewards = of.rewards,
                             .offsets = of.offsets,
                             .excluded = of.excluded};
        dray__advantages[host->job->advantage.method].compute(&in, of.advantages, NULL);
    }
    int rc = there ? hand_out(host->state, of.advantages, error) : dray__nomem(error);
    free(of.rewards);
    free(of.advantages);
    free(of.offsets);
    free(of.excluded);
    return rc;
}

/* Accumulates the kept micro-batches, and takes the optimiser's steps. Before all are there, it
 * accumulates only those of the first optimiser step, because the log-probs of the others must be
 * computed with the parameters before it. When advantages are over all samples, it accumulates none
 * before all are there. */
static int learn(dray__host *host, dray_error *error)
{
    dray__learner *self = host->state;
    uint32_t part = dray__learner_part(host->job), in = 0;
    bool all = self->rows == batch_of(host), whole = computes_advantages(host);
    if (whole && !all)
        return DRAY_OK;
    int rc = whole ? add_advantages(host, error) : DRAY_OK;
    for (uint32_t i = 0; i < self->learned; i++)
        in += self->kept[i].rows;
    while (!rc) {
        bool due = in / part > self->sums.steps;
        if (due ? !all : self->learned == self->kept_count)
            break;
        if (due) {
            rc = dray__learner_step(host, error);
        } else {
            rc = dray__learner_accumulate(host, &self->kept[self->learned], error);
            in += self->kept[self->learned++].rows;
        }
    }
    return rc;
}

int dray__late_run(dray__host *host, dray_batch *batch, dray_error *error)
{
    dray__learner *self = host->state;
    dray__micro whole = {0};
    dray_trace_enter(DRAY_SPAN_BUSY, self->what->task, self->step);
    int rc = dray__rules_check(&self->rules, self->step, batch, error);
    if (!rc && self->feed)
        rc = dray__feed_take(self->feed, &self->rules, batch, error);
    if (!rc)
        rc = dray__micro_read(batch, host->job, self->what->task, &whole, error);
    if (!rc && self->what->complete)
        rc = self->what->complete(host, &whole, error);
    if (!rc) {
        if (self->what == &dray__learned_policy)
            dray__late_bound(self, batch);
        self->what->measure(host, &whole);
        rc = keep(host, &whole, error);
    }
    dray__micro_free(&whole);
    if (!rc)
        rc = learn(host, error);
    dray_trace_leave();
    return rc;
}
