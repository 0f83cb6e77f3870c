/* The trainer's forward and backward passes: log-probs, and the gradients of the losses. */
#include "engine/blas.h"
#include "engine/trainer_state.h"

#include "base/error.h"

#include <inttypes.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>

/* ---- which rows a rank takes ----------------------------------------------------------------- */

static uint64_t tokens_before(const dray__sequences *s, uint32_t row)
{
    return s->prompt.offsets[row] - s->prompt.offsets[0] + s->response.offsets[row] -
           s->response.offsets[0];
}

/* Returns the first row of rank `rank`. Rows are divided so that ranks have about equal numbers of
 * tokens. */
static uint32_t first_row(const dray__sequences *s, uint32_t rank, uint32_t world)
{
    uint64_t all = tokens_before(s, s->rows);
    uint32_t row = 0;
    while (row < s->rows && tokens_before(s, row) * world < all * rank)
        row++;
    return row;
}

/* Checks a batch and gets everything ready to compute it. */
static int prepare(dray__trainer *t, const dray__sequences *sequences, dray_error *error)
{
    int code = dray__sequences_check(&t->config, sequences, error);
    if (code == DRAY_OK)
        code = dray__model_reach(&t->model, dray__sequences_longest(sequences), error);
    if (code == DRAY_OK && !t->gathered) {
        code = dray__trainer_gather(t, t->shard, dray_region_base(t->whole_region), error);
        t->gathered = code == DRAY_OK;
    }
    return code;
}

/* Gathers all ranks' parts of an array per response token into `out`. */
static int gather_tokens(dray__trainer *t, const dray__sequences *s, const float *own, float *out,
                         dray_error *error)
{
    uint64_t bytes[DRAY__GROUP_MAX_WORLD];
    for (uint32_t rank = 0; rank < t->world; rank++) {
        uint32_t begin = first_row(s, rank, t->world), end = first_row(s, rank + 1, t->world);
        bytes[rank] = (s->response.offsets[end] - s->response.offsets[begin]) * sizeof *own;
    }
    if (t->group)
        return dray__group_all_gather(t->group, own, bytes, out, DRAY_WAIT_DEFAULT, error);
    memcpy(out, own, bytes[0]);
    return DRAY_OK;
}

/* Computes log-probs, and entropy if it is not NULL, of a language model; or values of a value
 * model. */
static int score(dray__trainer *t, const dray__sequences *sequences, double temperature, float *out,
                 float *entropy, dray_error *error)
{
    int code = prepare(t, sequences, error);
    if (code != DRAY_OK)
        return code;
    uint32_t begin = first_row(sequences, t->rank, t->world);
    uint32_t end = first_row(sequences, t->rank + 1, t->world);
    uint64_t count = sequences->response.offsets[end] - sequences->response.offsets[begin];
    float *own = malloc((2 * count + 1) * sizeof *own);
    if (!own)
        code = dray__nomem(error);
    else if (t->config.labels)
        code = dray__values(&t->model, &t->inference, sequences, begin, end, own, error);
    else
        code = dray__score(&t->model, &t->inference, sequences, begin, end, temperature, own,
                           own + count, error);
    code = dray__trainer_agree(t, code, error);
    if (code == DRAY_OK && own)
        code = gather_tokens(t, sequences, own, out, error);
    if (code == DRAY_OK && own && entropy)
        code = gather_tokens(t, sequences, own + count, entropy, error);
    free(own);
    return code;
}

/* Checks that the model has the head that is needed. */
static int expect_head(const dray__trainer *t, bool value, const char *what, dray_error *error)
{
    return value == (t->config.labels > 0)
               ? DRAY_OK
               : dray__fail(error, DRAY_EINVALID, "%s: expected a %s, found a %s", what,
                            value ? "value model" : "language model",
                            value ? "language model" : "value model");
}

int dray__trainer_logprobs(dray__trainer *t, const dray__sequences *sequences, double temperature,
                           float *logprobs, float *entropy, dray_error *error)
{
    if (!(temperature > 0) || isinf(temperature))
        return dray__fail(error, DRAY_EINVALID, "log-probs: temperature %g", temperature);
    int code = expect_head(t, false, "log-probs", error);
    return code ? code : score(t, sequences, temperature, logprobs, entropy, error);
}

int dray__trainer_values(dray__trainer *t, const dray__sequences *sequences, float *values,
                         dray_error *error)
{
    int code = expect_head(t, true, "values", error);
    return code ? code : score(t, sequences, 1, values, NULL, error);
}

/* ---- losses ---------------------------------------------------------------------------------- */

/* The objective of a micro-batch: a policy or value batch, or the responses themselves
 * (supervised). */
typedef struct objective {
    const dray__sequences *sequences;
    const dray__policy_batch *policy;
    const dray__value_batch *value;
} objective;

/* Adds -log p of one response token. */
static dray__slopes supervised(bool counts, double logprob, double entropy, dray__policy_sums *sums)
{
    if (!counts)
        return (dray__slopes){0};
    sums->loss -= logprob;
    sums->entropy += entropy;
    sums->ratio += 1;
    sums->ratio_max = fmax(sums->ratio_max, 1);
    return (dray__slopes){.logprob = -1};
}

/* Replaces logits by the gradient of the loss by them. Overwrites exps. */
static void differentiate(dray__trainer *t, const dray__row_chunk *chunk, const objective *of,
                          float inverse_temperature, const dray__summary *summaries, float *logits,
                          const float *exps)
{
    int64_t width = t->model.vocab_rows;
    for (int64_t i = 0; i < chunk->targets_count; i++) {
        const dray__summary *s = &summaries[i];
        double normaliser = (double)s->max + log(s->sum);
        double entropy = normaliser - s->weighted / s->sum,
               logprob = (double)s->target - normaliser;
        uint64_t token = chunk->first + (uint64_t)i;
        dray__slopes slopes = of->policy ? dray__policy_token(of->policy, token, chunk->row_of[i],
                                                              logprob, entropy, &t->sums)
                                         : supervised(dray__token_counts(of->sequences, token),
                                                      logprob, entropy, &t->sums);
        float *row = logits + i * width;
        const float *e = exps + i * width;
        float share = (float)(-slopes.logprob / s->sum) * inverse_temperature;
        if (slopes.entropy != 0) { /* the derivative of -entropy by z is p · (log p + entropy) */
            float factor = (float)(-slopes.entropy / s->sum) * inverse_temperature;
            float shift = (float)(entropy - normaliser);
            for (int64_t j = 0; j < width; j++)
                row[j] = e[j] * (share + factor * (row[j] * inverse_temperature + shift));
        } else {
            for (int64_t j = 0; j < width; j++)
                row[j] = e[j] * share;
        }
        row[chunk->targets[i]] += (float)slopes.logprob * inverse_temperature;
    }
}

/* The trunk's output at the positions where response tokens are chosen, and the gradient by it. */
typedef struct reached {
    int64_t count;
    float *hidden, *gradient; /* [count, hidden] */
} reached;

static int differentiate_logits(dray__trainer *t, const dray__row_chunk *chunk, const objective *of,
                                const reached *at, dray_error *error)
{
    dray__model *m = &t->model;
    int64_t count = at->count, d = m->config.hidden_size, width = m->vocab_rows;
    double inverse = of->policy ? 1 / of->policy->temperature : 1;
    float *logits = malloc((size_t)(count * 2 * width) * sizeof *logits);
    dray__summary *summaries = malloc((size_t)count * sizeof *summaries);
    int code = logits && summaries ? DRAY_OK : dray__nomem(error);
    if (logits && summaries) {
        float *exps = logits + count * width;
        dray__head(m, at->hidden, count, logits);
        dray__summarise(m, logits, count, chunk->targets, inverse, exps, summaries);
        differentiate(t, chunk, of, (float)inverse, summaries, logits, exps);
        dray__gemm_tn(width, d, count, 1, logits, width, at->hidden, d, 1, t->gradients.head, d);
        dray__gemm_nn(count, d, width, 1, logits, width, m->weights.head, d, 0, at->gradient, d);
    }
    free(logits);
    free(summaries);
    return code;
}

static void differentiate_values(dray__trainer *t, const dray__row_chunk *chunk,
                                 const dray__value_batch *batch, const reached *at)
{
    int64_t d = t->model.config.hidden_size;
    memset(at->gradient, 0, (size_t)(at->count * d) * sizeof *at->gradient);
    for (int64_t i = 0; i < at->count; i++) {
        const float *hidden = at->hidden + i * d;
        float slope = (float)dray__value_token(batch, chunk->first + (uint64_t)i, chunk->row_of[i],
                                               (double)dray__value(&t->model, hidden), &t->sums);
        t->model.kernels->axpy(slope, hidden, t->gradients.head, d);
        *t->gradients.head_bias += slope;
        t->model.kernels->axpy(slope, t->model.weights.head, at->gradient + i * d, d);
    }
}

static int accumulate_chunk(dray__trainer *t, const dray__row_chunk *chunk, const objective *of,
                            dray_error *error)
{
    dray__model *m = &t->model;
    dray__packed batch = {
        .rows = chunk->rows, .tokens = chunk->tokens, .ids = chunk->ids, .offsets = chunk->offsets};
    int64_t count = chunk->targets_count, d = m->config.hidden_size;
    int code = dray__forward(m, &batch, NULL, &t->training, error);
    if (code != DRAY_OK)
        return code;
    float *hidden = malloc((size_t)((2 * count + chunk->tokens) * d) * sizeof *hidden);
    if (!hidden)
        return dray__nomem(error);
    reached at = {count, hidden, hidden + count * d};
    float *all = at.gradient + count * d; /* of every token */
    dray__pick_rows(t->training.hidden, chunk->positions, count, d, at.hidden);
    if (of->value)
        differentiate_values(t, chunk, of->value, &at);
    else
        code = differentiate_logits(t, chunk, of, &at, error);
    memset(all, 0, (size_t)(chunk->tokens * d) * sizeof *all);
    for (int64_t i = 0; i < count; i++)
        memcpy(all + chunk->positions[i] * d, at.gradient + i * d, (size_t)d * sizeof *all);
    if (code == DRAY_OK)
        code = dray__backward_run(m, &batch, &t->training, all, &t->gradients, &t->backward, error);
    free(hidden);
    return code;
}

/* Returns the batch's divisor, and gets the number of its tokens that count. */
static double divisor_of(const objective *of, uint64_t *tokens)
{
    *tokens = dray__response_tokens(of->sequences);
    if (of->policy)
        return dray__aggregate_divisor(of->policy->aggregate, of->sequences, of->policy->masked,
                                       of->policy->length, tokens);
    if (of->value)
        return dray__aggregate_divisor(of->value->aggregate, of->sequences, of->value->masked,
                                       of->value->length, tokens);
    return (double)*tokens;
}

static int accumulate(dray__trainer *t, objective of, dray_error *error)
{
    const dray__sequences *sequences = of.sequences;
    int code = expect_head(t, of.value != NULL, "gradients", error);
    if (code == DRAY_OK)
        code = prepare(t, sequences, error);
    if (code != DRAY_OK)
        return code;
    uint32_t row = first_row(sequences, t->rank, t->world);
    uint32_t end = first_row(sequences, t->rank + 1, t->world);
    if (t->model.pace) {
        dray__pace_spend(t->model.pace->train_seconds * sequences->rows);
        row = end;
    }
    while (code == DRAY_OK && row < end) {
        dray__row_chunk chunk;
        code = dray__chunk_next(sequences, end, &row, &chunk, error);
        if (code != DRAY_OK)
            break;
        if (chunk.rows > 0)
            code = accumulate_chunk(t, &chunk, &of, error);
        dray__chunk_free(&chunk);
    }
    if (code != DRAY_OK)
        return code;
    uint64_t tokens;
    t->begun |= dray__response_tokens(sequences) > 0;
    t->divisor += divisor_of(&of, &tokens);
    t->tokens += tokens;
    return DRAY_OK;
}

int dray__trainer_accumulate_sft(dray__trainer *t, const dray__sequences *sequences,
                                 dray_error *error)
{
    return accumulate(t, (objective){.sequences = sequences}, error);
}

int dray__trainer_accumulate_policy(dray__trainer *t, const dray__policy_batch *batch,
                                    dray_error *error)
{
    dray__policy_batch policy;
    int code = dray__policy_check(batch, &policy, error);
    return code ? code : accumulate(t, (objective){&batch->sequences, &policy, NULL}, error);
}

int dray__trainer_accumulate_value(dray__trainer *t, const dray__value_batch *batch,
                                   dray_error *error)
{
    int code = dray__value_check(batch, error);
    return code ? code : accumulate(t, (objective){&batch->sequences, NULL, batch}, error);
}
