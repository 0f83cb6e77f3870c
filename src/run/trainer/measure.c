/* The measures of a step's samples and losses, as a row of metrics.jsonl (docs/run.md has the
 * table). */
#include "run/trainer/learn.h"

#include <math.h>

/* Measures the staleness of each token, and the difference between the engine's and the trainer's
 * log-prob. */
static void measure_tokens(dray__learner *self, const dray__micro *m)
{
    dray__step_sums *s = &self->sums;
    const float *rollout = m->rollout.values, *old = m->old.values;
    const int32_t *versions = m->versions.values;
    dray__sequences sequences = dray__micro_sequences(m);
    for (uint64_t i = 0; i < m->response.offsets[m->rows]; i++) {
        if (!dray__token_counts(&sequences, i))
            continue;
        bool first = s->tokens++ == 0;
        if (first || versions[i] < s->oldest_version)
            s->oldest_version = versions[i];
        if (first || versions[i] > s->newest_version)
            s->newest_version = versions[i];
        int64_t staleness = self->step - 1 - versions[i];
        uint32_t bin = staleness < 0                      ? 0
                       : staleness < DRAY__STALENESS_BINS ? (uint32_t)staleness
                                                          : DRAY__STALENESS_BINS - 1;
        double gap = old ? fabs((double)old[i] - (double)rollout[i]) : NAN;
        s->histogram[bin]++;
        s->staleness += (double)staleness;
        s->staleness_max = fmax(s->staleness_max, (double)staleness);
        s->gap += gap;
        s->gap_max = old ? fmax(s->gap_max, gap) : NAN;
    }
}

/* Counts the answers of the tool. Each is a run of tokens that the model did not make. */
static uint64_t count_turns(const dray__micro *m)
{
    uint64_t turns = 0;
    for (uint32_t row = 0; m->mask.values && row < m->rows; row++)
        turns += dray__mask_turns((const int32_t *)m->mask.values + m->response.offsets[row],
                                  m->response.offsets[row + 1] - m->response.offsets[row]);
    return turns;
}

void dray__learner_measure(dray__host *host, const dray__micro *m)
{
    dray__learner *self = host->state;
    dray__step_sums *s = &self->sums;
    const float *each = m->each.values;
    uint32_t rewards = host->job->reward_count;
    for (uint32_t i = 0; i < m->rows; i++) {
        s->reward += (double)m->rewards[i];
        s->cut += dray__response_cut(host->tokenizer, &m->response, i);
        for (uint32_t j = 0; j < rewards; j++)
            s->each[j] += (double)each[(size_t)i * rewards + j];
    }
    measure_tokens(self, m);
    s->samples += m->rows;
    s->turns += count_turns(m);
}

bool dray__row_add(json_t *row, const char *key, double value)
{
    return json_object_set_new(row, key, isfinite(value) ? json_real(value) : json_null()) == 0;
}

static bool add_histogram(json_t *row, const dray__step_sums *s)
{
    uint32_t count = DRAY__STALENESS_BINS;
    while (count > 1 && !s->histogram[count - 1])
        count--;
    json_t *list = json_array();
    bool ok = json_object_set_new(row, "staleness_tokens", list) == 0;
    for (uint32_t i = 0; i < count && ok; i++)
        ok = json_array_append_new(list, json_integer((json_int_t)s->histogram[i])) == 0;
    return ok;
}

static bool add_rewards(json_t *row, const dray__job *job, const dray__step_sums *s)
{
    if (!job->reward_count)
        return true;
    json_t *means = json_object();
    bool ok = json_object_set_new(row, "rewards", means) == 0;
    for (uint32_t i = 0; i < job->reward_count && ok; i++)
        ok = dray__row_add(means, job->rewards[i].name, s->each[i] / (double)s->samples);
    return ok;
}

json_t *dray__learner_row(const dray__host *host)
{
    const dray__learner *self = host->state;
    const dray__step_sums *s = &self->sums;
    double samples = (double)s->samples, tokens = (double)s->tokens, used = (double)s->used_tokens,
           trained = (double)s->trained_tokens;
    const struct {
        const char *key;
        double value;
    } reals[] = {
        {"reward_mean", s->reward / samples},
        {"response_length_mean", tokens / samples},
        {"cut_fraction", (double)s->cut / samples},
        {"staleness_mean", s->staleness / tokens},
        {"staleness_max", s->staleness_max},
        {"optimiser_steps_behind_mean", s->behind / used},
        {"optimiser_steps_behind_max", s->behind_max},
        {"loss", s->loss / s->steps},
        {"grad_norm", s->gradient_norm / s->steps},
        {"clip_fraction", s->clip_fraction / trained},
        {"dual_clip_fraction", s->dual_clip_fraction / trained},
        {"truncated_fraction", s->truncated_fraction / trained},
        {"kl_to_reference", s->kl / trained},
        {"entropy", s->entropy / trained},
        {"ratio_max", s->ratio_max},
        {"behaviour_ratio_mean", s->behaviour / trained},
        {"behaviour_ratio_max", s->behaviour_max},
        /* (Σw)² / (N Σw²): Kish, "Survey Sampling", 1965 */
        {"behaviour_ratio_ess", s->behaviour * s->behaviour / (trained * s->behaviour_square)},
        {"rollout_gap_mean", s->gap / tokens},
        {"rollout_gap_max", s->gap_max},
        {"learning_rate", s->learning_rate}};
    json_t *row = json_pack("{s:I, s:I, s:I, s:I, s:I}", "step", (json_int_t)self->step, "tokens",
                            (json_int_t)s->tokens, "samples", (json_int_t)s->samples,
                            "weight_version", (json_int_t)s->newest_version, "weight_version_min",
                            (json_int_t)s->oldest_version);
    bool ok = row && add_histogram(row, s) && add_rewards(row, host->job, s);
    if (ok && dray__job_has(host->job, "response_mask"))
        ok = dray__row_add(row, "turns_mean", (double)s->turns / samples);
    for (size_t i = 0; i < sizeof(reals) / sizeof(reals[0]) && ok; i++)
        ok = dray__row_add(row, reals[i].key, reals[i].value);
    if (!ok) {
        json_decref(row);
        row = NULL;
    }
    return row;
}
