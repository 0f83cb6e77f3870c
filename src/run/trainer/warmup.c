/* Warm-up: supervised training on right answers, until the model samples right answers often enough
 * to learn from rewards. */
#include "base/error.h"
#include "run/data/data.h"
#include "run/engine/calls.h"
#include "run/fault.h"
#include "run/trainer/learn.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

enum { PROBE_ROWS = 256 };
#define PROBE_FIRST (UINT64_C(1) << 40) /* far from the prompts that are trained on */

static int append(dray__ragged *to, const int32_t *tokens, uint64_t count, dray_error *error)
{
    uint64_t at = to->offsets[to->rows];
    int32_t *values = realloc(to->values, (at + count) * sizeof(*values));
    if (!values)
        return dray__nomem(error);
    memcpy(values + at, tokens, count * sizeof(*values));
    to->values = values;
    to->offsets[++to->rows] = at + count;
    return DRAY_OK;
}

/* Prompts, right answers, and a mask of the answers' tokens that a tool would have given. */
typedef struct pairs {
    dray__ragged prompt, response, mask;
} pairs;

static void pairs_free(pairs *p)
{
    dray__ragged_free(&p->prompt);
    dray__ragged_free(&p->response);
    dray__ragged_free(&p->mask);
}

static dray__sequences sequences_of(const pairs *p)
{
    return (dray__sequences){.rows = p->prompt.rows,
                             .prompt = dray__ragged_tokens(&p->prompt),
                             .response = dray__ragged_tokens(&p->response),
                             .mask = p->mask.values};
}

static int add_mask(const dray__host *host, dray__ragged *to, const int32_t *answer, uint64_t count,
                    dray_error *error)
{
    int32_t *mask = malloc(count * sizeof(*mask));
    int rc = mask ? dray__calls_mask(host->job, host->tokenizer, answer, count, mask, error)
                  : dray__nomem(error);
    if (!rc)
        rc = append(to, mask, count, error);
    free(mask);
    return rc;
}

static int add_pair(const dray__host *host, const dray__data *data, uint64_t index, pairs *to,
                    dray_error *error)
{
    char *question, *answer;
    int32_t *tokens = NULL;
    uint64_t count;
    int rc = dray__data_get(data, DRAY__SPLIT_WARMUP, index, &question, &answer, error);
    if (rc)
        return rc;
    rc = dray__prompt_tokens(host->tokenizer, question, &tokens, &count, error);
    if (!rc)
        rc = append(&to->prompt, tokens, count, error);
    free(tokens);
    tokens = NULL;
    if (!rc)
        rc = dray__answer_tokens(host->tokenizer, answer, &tokens, &count, error);
    if (!rc)
        rc = append(&to->response, tokens, count, error);
    if (!rc)
        rc = add_mask(host, &to->mask, tokens, count, error);
    free(tokens);
    free(question);
    free(answer);
    return rc;
}

/* Takes the last pair away if the model has too few positions for it. No sample can be its answer.
 * A job whose rewards come from a command may have such pairs. */
static void take_away_long(pairs *p, int64_t positions)
{
    uint32_t last = p->prompt.rows - 1;
    uint64_t tokens = p->prompt.offsets[last + 1] - p->prompt.offsets[last] +
                      p->response.offsets[last + 1] - p->response.offsets[last];
    if (tokens > (uint64_t)positions)
        p->prompt.rows = p->response.rows = p->mask.rows = last;
}

/* Makes a batch of the `rows` pairs from `first` on, without those that are too long. */
static int make_batch(const dray__host *host, const dray__data *data, int64_t positions,
                      uint64_t first, uint32_t rows, pairs *out, dray_error *error)
{
    dray__ragged *const parts[] = {&out->prompt, &out->response, &out->mask};
    int rc = DRAY_OK;
    for (size_t i = 0; i < sizeof(parts) / sizeof(*parts); i++) {
        *parts[i] = (dray__ragged){.offsets = calloc((size_t)rows + 1, sizeof(uint64_t))};
        rc = parts[i]->offsets ? rc : dray__nomem(error);
    }
    for (uint32_t i = 0; i < rows && !rc; i++) {
        rc = add_pair(host, data, first + i, out, error);
        if (!rc)
            take_away_long(out, positions);
    }
    return rc;
}

/* Computes the mean probability of the right answer, end token included. It is the expected reward
 * of samples, without the noise of drawing some. Pairs that were too long have probability 0. */
static int probe(dray__host *host, const pairs *right, double *reward, dray_error *error)
{
    dray__learner *self = host->state;
    dray__sequences sequences = sequences_of(right);
    const uint64_t *offsets = sequences.response.offsets;
    float *logprobs = malloc((offsets[sequences.rows] + 1) * sizeof(*logprobs));
    if (!logprobs)
        return dray__nomem(error);
    int rc = sequences.rows
                 ? dray__trainer_logprobs(self->trainer, &sequences, host->job->rollout.temperature,
                                          logprobs, NULL, error)
                 : DRAY_OK;
    double sum = 0;
    for (uint32_t row = 0; row < sequences.rows && !rc; row++) {
        double logprob = 0;
        for (uint64_t i = offsets[row]; i < offsets[row + 1]; i++)
            logprob += dray__token_counts(&sequences, i) ? (double)logprobs[i] : 0;
        sum += exp(logprob);
    }
    free(logprobs);
    if (!rc)
        *reward = sum / PROBE_ROWS;
    return rc;
}

static int train(dray__host *host, const dray__data *data, int64_t positions, int64_t step,
                 dray_error *error)
{
    dray__learner *self = host->state;
    const dray__job_warmup *warmup = &host->job->warmup;
    pairs right;
    uint32_t rows = (uint32_t)warmup->batch;
    int rc = make_batch(host, data, positions, (uint64_t)step * rows, rows, &right, error);
    dray__sequences sequences = sequences_of(&right);
    if (!rc)
        rc = dray__trainer_accumulate_sft(self->trainer, &sequences, error);
    const dray__step_options options = {.learning_rate = warmup->lr, .max_norm = 1};
    if (!rc)
        rc = dray__trainer_step(self->trainer, &options, NULL, error);
    pairs_free(&right);
    dray__fault_at("in_warmup", step);
    return rc;
}

static int tell(dray__host *host, int64_t step, double reward, bool done, dray_error *error)
{
    if (!dray__host_leads(host))
        return DRAY_OK;
    return dray__host_report(host, "warmup",
                             json_pack("{s:I, s:f, s:b}", "warmup_step", (json_int_t)step,
                                       "reward_mean", reward, "done", done),
                             error);
}

static int warm(dray__host *host, const dray__data *data, int64_t positions, const pairs *right,
                dray_error *error)
{
    const dray__job_warmup *warmup = &host->job->warmup;
    double reward = 0;
    for (int64_t step = 0;; step++) {
        int rc = DRAY_OK;
        if (step % warmup->check_every == 0 || step == warmup->max_steps) {
            rc = probe(host, right, &reward, error);
            bool done = reward >= warmup->reward;
            if (!rc)
                rc = tell(host, step, reward, done, error);
            if (rc || done)
                return rc;
        }
        if (step == warmup->max_steps)
            return dray__fail(error, DRAY_EINVALID,
                              "warmup: reward %.3f after %lld steps (warmup.max_steps), expected "
                              "%.3f (warmup.reward)",
                              reward, (long long)step, warmup->reward);
        rc = train(host, data, positions, step, error);
        if (rc)
            return rc;
    }
}

int dray__warmup(dray__host *host, double *reward, double *length, dray_error *error)
{
    dray__data *data = NULL;
    dray_model_config config = {0};
    pairs right = {0};
    int rc = dray__job_model_config(host->job, host->tokenizer, &config, error);
    if (!rc)
        rc = dray__data_open(host->job, &data, error);
    if (!rc)
        rc = make_batch(host, data, config.max_positions, PROBE_FIRST, PROBE_ROWS, &right, error);
    dray_trace_enter(DRAY_SPAN_BUSY, "warm up", -1);
    if (!rc && !reward)
        rc = warm(host, data, config.max_positions, &right, error);
    dray__sequences sequences = sequences_of(&right);
    if (!rc && reward)
        rc = probe(host, &right, reward, error);
    dray_trace_leave();
    uint64_t tokens = 0;
    for (uint32_t row = 0; !rc && row < sequences.rows; row++)
        tokens += dray__row_tokens(&sequences, row);
    if (!rc && reward)
        *length = sequences.rows ? (double)tokens / sequences.rows : 0;
    pairs_free(&right);
    dray__data_close(data);
    return rc;
}
