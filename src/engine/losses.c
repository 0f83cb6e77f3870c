/* The trainer's forward and backward passes: log-probs, and the gradients of the losses. */
#include "engine/blas.h"
#include "engine/kernels.h"
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

/* The first row of rank `rank`: rows are cut so that ranks have about equal numbers of tokens. */
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

/* out = all ranks' parts of an array per response token. */
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

int dray__trainer_logprobs(dray__trainer *t, const dray__sequences *sequences, double temperature,
                           float *logprobs, float *entropy, dray_error *error)
{
    if (!(temperature > 0) || isinf(temperature))
        return dray__fail(error, DRAY_EINVALID, "log-probs: temperature %g", temperature);
    int code = prepare(t, sequences, error);
    if (code != DRAY_OK)
        return code;
    uint32_t begin = first_row(sequences, t->rank, t->world);
    uint32_t end = first_row(sequences, t->rank + 1, t->world);
    uint64_t count = sequences->response.offsets[end] - sequences->response.offsets[begin];
    float *own = malloc((2 * count + 1) * sizeof *own);
    if (own)
        code = dray__score(&t->model, &t->inference, sequences, begin, end, temperature, own,
                           own + count, error);
    else
        code = dray__nomem(error);
    code = dray__trainer_agree(t, code, error);
    if (code == DRAY_OK && own)
        code = gather_tokens(t, sequences, own, logprobs, error);
    if (code == DRAY_OK && own && entropy)
        code = gather_tokens(t, sequences, own + count, entropy, error);
    free(own);
    return code;
}

/* ---- losses ---------------------------------------------------------------------------------- */

/* -log p of one response token. */
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

/* logits becomes the gradient of the loss by them; exps is used up. */
static void differentiate(dray__trainer *t, const dray__chunk *chunk,
                          const dray__sequences *sequences, const dray__policy_batch *policy,
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
        dray__slopes slopes =
            policy ? dray__policy_token(policy, token, chunk->row_of[i], logprob, entropy, &t->sums)
                   : supervised(dray__token_counts(sequences, token), logprob, entropy, &t->sums);
        float *row = logits + i * width;
        const float *e = exps + i * width;
        float share = (float)(-slopes.logprob / s->sum) * inverse_temperature;
        if (slopes.entropy != 0) { /* d(-entropy) by z is p · (log p + entropy) */
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

static int accumulate_chunk(dray__trainer *t, const dray__chunk *chunk,
                            const dray__sequences *sequences, const dray__policy_batch *policy,
                            dray_error *error)
{
    dray__model *m = &t->model;
    dray__batch batch = {
        .rows = chunk->rows, .tokens = chunk->tokens, .ids = chunk->ids, .offsets = chunk->offsets};
    int64_t count = chunk->targets_count, d = m->config.hidden_size, width = m->vocab_rows;
    double inverse = policy ? 1 / policy->temperature : 1;
    int code = dray__forward(m, &batch, NULL, &t->training, error);
    if (code != DRAY_OK)
        return code;
    int64_t floats = count * (2 * d + 2 * width) + chunk->tokens * d;
    float *hidden = malloc((size_t)floats * sizeof *hidden);
    dray__summary *summaries = malloc((size_t)count * sizeof *summaries);
    if (hidden && summaries) {
        float *dhidden = hidden + count * d, *logits = dhidden + count * d;
        float *exps = logits + count * width, *dall = exps + count * width;
        dray__pick_rows(t->training.hidden, chunk->positions, count, d, hidden);
        dray__head(m, hidden, count, logits);
        dray__summarise(m, logits, count, chunk->targets, inverse, exps, summaries);
        differentiate(t, chunk, sequences, policy, (float)inverse, summaries, logits, exps);
        dray__gemm_tn(width, d, count, 1, logits, width, hidden, d, 1, t->gradients.head, d);
        dray__gemm_nn(count, d, width, 1, logits, width, m->weights.head, d, 0, dhidden, d);
        memset(dall, 0, (size_t)(chunk->tokens * d) * sizeof *dall);
        for (int64_t i = 0; i < count; i++)
            memcpy(dall + chunk->positions[i] * d, dhidden + i * d, (size_t)d * sizeof *dall);
        code =
            dray__backward_run(m, &batch, &t->training, dall, &t->gradients, &t->backward, error);
    } else {
        code = dray__nomem(error);
    }
    free(hidden);
    free(summaries);
    return code;
}

static int accumulate(dray__trainer *t, const dray__sequences *sequences,
                      const dray__policy_batch *policy, dray_error *error)
{
    int code = prepare(t, sequences, error);
    uint32_t row = first_row(sequences, t->rank, t->world);
    uint32_t end = first_row(sequences, t->rank + 1, t->world);
    if (code == DRAY_OK && t->model.pace) {
        dray__pace_spend(t->model.pace->train_seconds * sequences->rows);
        row = end;
    }
    while (code == DRAY_OK && row < end) {
        dray__chunk chunk;
        code = dray__chunk_next(sequences, end, &row, &chunk, error);
        if (code != DRAY_OK)
            break;
        if (chunk.rows > 0)
            code = accumulate_chunk(t, &chunk, sequences, policy, error);
        dray__chunk_free(&chunk);
    }
    if (code != DRAY_OK)
        return code;
    uint64_t tokens = dray__response_tokens(sequences);
    t->begun |= tokens > 0;
    t->divisor += policy ? dray__policy_divisor(policy, &tokens) : (double)tokens;
    t->tokens += tokens;
    return DRAY_OK;
}

int dray__trainer_accumulate_sft(dray__trainer *t, const dray__sequences *sequences,
                                 dray_error *error)
{
    return accumulate(t, sequences, NULL, error);
}

int dray__trainer_accumulate_policy(dray__trainer *t, const dray__policy_batch *batch,
                                    dray_error *error)
{
    dray__policy_batch policy;
    int code = dray__policy_check(batch, &policy, error);
    return code ? code : accumulate(t, &batch->sequences, &policy, error);
}
