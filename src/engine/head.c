/* The heads: logits, log-probs and entropies over a vocabulary that may be spread over several
 * ranks, and values. */
#include "engine/blas.h"
#include "engine/model.h"

#include "base/error.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

void dray__head(const dray__model *m, const float *hidden, int64_t count, float *logits)
{
    int64_t d = m->config.hidden_size;
    dray__gemm_nt(count, m->vocab_rows, d, 1, hidden, d, m->weights.head, d, 0, logits,
                  m->vocab_rows);
}

void dray__pick_rows(const float *from, const int64_t *rows, int64_t count, int64_t width,
                     float *to)
{
    for (int64_t i = 0; i < count; i++)
        memcpy(to + i * width, from + rows[i] * width, (size_t)width * sizeof *to);
}

void dray__summarise(const dray__model *m, const float *logits, int64_t count,
                     const int32_t *targets, double inverse_temperature, float *exps,
                     dray__summary *summaries)
{
    float scale = (float)inverse_temperature;
    for (int64_t i = 0; i < count; i++) {
        const float *row = logits + i * m->vocab_rows;
        float *out = exps + i * m->vocab_rows;
        dray__summary s = {.max = -INFINITY, .target = -INFINITY};
        int64_t target = targets ? targets[i] - m->vocab_start : -1;
        if (target >= 0 && target < m->vocab_rows)
            s.target = scale * row[target];
        if (m->vocab_rows > 0) {
            s.max = scale * m->kernels->max(row, m->vocab_rows);
            s.sum = m->kernels->exp_sum(row, scale, s.max, out, m->vocab_rows);
            s.weighted = scale * m->kernels->dot(out, row, m->vocab_rows);
        }
        summaries[i] = s;
    }
}

int dray__summaries_gather(const dray__model *m, const dray__summary *own, int64_t count,
                           dray__summary *all, dray_error *error)
{
    uint64_t bytes = (uint64_t)count * sizeof *own;
    if (m->group)
        return dray__group_all_gather_equal(m->group, own, bytes, all, DRAY_WAIT_DEFAULT, error);
    memcpy(all, own, bytes);
    return DRAY_OK;
}

dray__summary dray__summary_join(const dray__summary *all, uint32_t world, int64_t count, int64_t i)
{
    dray__summary s = {.max = -INFINITY, .target = -INFINITY};
    for (uint32_t rank = 0; rank < world; rank++)
        s.max = fmaxf(s.max, all[rank * count + i].max);
    for (uint32_t rank = 0; rank < world; rank++) {
        const dray__summary *part = &all[rank * count + i];
        double factor = exp((double)part->max - s.max);
        s.sum += factor * part->sum;
        s.weighted += factor * part->weighted;
        s.target = fmaxf(s.target, part->target);
    }
    return s;
}

/* The computed numbers for each response token of some rows. */
typedef struct scoring {
    dray__model *model;
    dray__state *state;
    double temperature;
    float *logprobs, *entropy; /* entropy may be NULL */
    float *values;             /* used in place of these for a value model */
} scoring;

static int score_targets(const scoring *s, const dray__row_chunk *chunk, uint64_t at,
                         dray_error *error)
{
    const dray__model *m = s->model;
    int64_t count = chunk->targets_count, d = m->config.hidden_size;
    float *hidden = malloc((size_t)(count * (d + 2 * m->vocab_rows)) * sizeof *hidden);
    dray__summary *own = malloc((size_t)count * (m->world + 1) * sizeof *own);
    int code = hidden && own ? DRAY_OK : dray__nomem(error);
    if (hidden && own) {
        float *logits = hidden + count * d, *exps = logits + count * m->vocab_rows;
        dray__pick_rows(s->state->hidden, chunk->positions, count, d, hidden);
        dray__head(m, hidden, count, logits);
        dray__summarise(m, logits, count, chunk->targets, 1 / s->temperature, exps, own);
        code = dray__summaries_gather(m, own, count, own + count, error);
    }
    for (int64_t i = 0; code == DRAY_OK && i < count; i++) {
        dray__summary joined = dray__summary_join(own + count, m->world, count, i);
        double normaliser = (double)joined.max + log(joined.sum);
        s->logprobs[at + (uint64_t)i] = (float)((double)joined.target - normaliser);
        if (s->entropy)
            s->entropy[at + (uint64_t)i] = (float)(normaliser - joined.weighted / joined.sum);
    }
    free(hidden);
    free(own);
    return code;
}

float dray__value(const dray__model *m, const float *hidden)
{
    return m->kernels->dot(m->weights.head, hidden, m->config.hidden_size) + *m->weights.head_bias;
}

static int score_chunk(const scoring *s, const dray__row_chunk *chunk, uint64_t at,
                       dray_error *error)
{
    dray__packed batch = {
        .rows = chunk->rows, .tokens = chunk->tokens, .ids = chunk->ids, .offsets = chunk->offsets};
    int64_t d = s->model->config.hidden_size;
    int code = dray__forward(s->model, &batch, NULL, s->state, error);
    if (code == DRAY_OK && !s->values)
        return score_targets(s, chunk, at, error);
    for (int64_t i = 0; code == DRAY_OK && i < chunk->targets_count; i++)
        s->values[at + (uint64_t)i] =
            dray__value(s->model, s->state->hidden + chunk->positions[i] * d);
    return code;
}

static int score_rows(const scoring *s, const dray__sequences *sequences, uint32_t begin,
                      uint32_t end, dray_error *error)
{
    uint64_t first = sequences->response.offsets[begin];
    int code = DRAY_OK;
    for (uint32_t row = begin; code == DRAY_OK && row < end;) {
        dray__row_chunk chunk;
        code = dray__chunk_next(sequences, end, &row, &chunk, error);
        if (code != DRAY_OK)
            break;
        if (chunk.rows > 0)
            code =
                score_chunk(s, &chunk, chunk.first + sequences->response.offsets[0] - first, error);
        dray__chunk_free(&chunk);
    }
    return code;
}

static void fill(float *to, uint64_t count, float value)
{
    for (uint64_t i = 0; to && i < count; i++)
        to[i] = value;
}

int dray__score(dray__model *m, dray__state *state, const dray__sequences *sequences,
                uint32_t begin, uint32_t end, double temperature, float *logprobs, float *entropy,
                dray_error *error)
{
    scoring s = {m, state, temperature, logprobs, entropy, NULL};
    if (!m->pace)
        return score_rows(&s, sequences, begin, end, error);
    uint64_t count = sequences->response.offsets[end] - sequences->response.offsets[begin];
    dray__pace_spend(m->pace->score_seconds * sequences->rows);
    fill(logprobs, count, -1);
    fill(entropy, count, 0);
    return DRAY_OK;
}

int dray__values(dray__model *m, dray__state *state, const dray__sequences *sequences,
                 uint32_t begin, uint32_t end, float *values, dray_error *error)
{
    scoring s = {.model = m, .state = state, .values = values};
    if (!m->pace)
        return score_rows(&s, sequences, begin, end, error);
    dray__pace_spend(m->pace->score_seconds * sequences->rows);
    fill(values, sequences->response.offsets[end] - sequences->response.offsets[begin], 0);
    return DRAY_OK;
}
