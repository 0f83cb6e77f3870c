/* The forward pass over packed tokens, with or without a KV cache. */
#include "engine/blas.h"
#include "engine/model.h"

#include "base/error.h"

#include <inttypes.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>

/* ---- memory ---------------------------------------------------------------------------------- */

void dray__state_free(dray__state *state)
{
    free(state->memory);
    free(state->layers);
    free(state->scores);
    *state = (dray__state){.keep = state->keep};
}

/* Hands out the layer's matrices from *at, or only counts their floats when *at is NULL. */
static int64_t carve_layer(const dray__model *m, int64_t tokens, dray__layer_state *layer,
                           float *at)
{
    int64_t d = m->config.hidden_size, used = 0;
    const struct {
        float **out;
        int64_t width;
    } parts[] = {
        {&layer->x, d},
        {&layer->normed, d},
        {&layer->qkv, m->qkv_width},
        {&layer->raw, m->config.qk_norm ? m->q_width + m->kv_width : 0},
        {&layer->attended, m->q_width},
        {&layer->middle, d},
        {&layer->middle_normed, d},
        {&layer->gate_up, 2 * m->ffn},
        {&layer->activated, m->ffn},
        {&layer->scale, 1},
        {&layer->middle_scale, 1},
        {&layer->head_scale, m->config.qk_norm ? m->q_heads + m->kv_heads : 0},
        {&layer->log_sum, m->q_heads},
    };
    for (size_t i = 0; i < sizeof parts / sizeof *parts; i++) {
        *parts[i].out = at && parts[i].width > 0 ? at + used : NULL;
        used += (tokens * parts[i].width + 15) / 16 * 16;
    }
    return used;
}

static int reserve(const dray__model *m, dray__state *s, int64_t tokens, dray_error *error)
{
    if (s->memory && tokens <= s->capacity)
        return DRAY_OK;
    dray__state_free(s);
    int64_t d = m->config.hidden_size, kept = s->keep ? m->config.layers : 1;
    dray__layer_state counted;
    int64_t layer = carve_layer(m, tokens, &counted, NULL);
    int64_t row = (tokens * d + 15) / 16 * 16, scales = (tokens + 15) / 16 * 16;
    s->layers = calloc((size_t)m->config.layers, sizeof *s->layers);
    s->memory = aligned_alloc(64, (size_t)(kept * layer + 3 * row + scales) * sizeof(float));
    if (!s->layers || !s->memory) {
        dray__state_free(s);
        return dray__nomem(error);
    }
    int64_t i = 0; /* a model has at least one layer */
    do
        carve_layer(m, tokens, &s->layers[i], s->memory + (s->keep ? i * layer : 0));
    while (++i < m->config.layers);
    float *at = s->memory + kept * layer;
    s->hidden = at;
    s->partial = at + row;
    s->last = s->keep ? at + 2 * row : s->layers[0].x;
    s->last_scale = at + 3 * row;
    s->capacity = tokens;
    return DRAY_OK;
}

static int reserve_scores(const dray__packed *batch, dray__state *s, dray_error *error)
{
    int64_t most = 0;
    for (uint32_t row = 0; row < batch->rows; row++) {
        int64_t n = (int64_t)(batch->offsets[row + 1] - batch->offsets[row]);
        int64_t all = n + (batch->past ? (int64_t)batch->past[row] : 0);
        most = n * all > most ? n * all : most;
    }
    if (most <= s->scores_capacity)
        return DRAY_OK;
    free(s->scores);
    s->scores_capacity = 0;
    s->scores = malloc((size_t)(most + 1) * sizeof(float));
    if (!s->scores)
        return dray__nomem(error);
    s->scores_capacity = most;
    return DRAY_OK;
}

/* ---- the parts of a layer -------------------------------------------------------------------- */

/* Sums a partial result over the tensor-parallel ranks. */
static int reduce(const dray__model *m, float *data, int64_t count, dray_error *error)
{
    if (!m->group)
        return DRAY_OK;
    return dray__group_all_reduce_f32(m->group, data, (uint64_t)count, DRAY_WAIT_DEFAULT, error);
}

static int embed(const dray__model *m, const dray__packed *batch, float *x, dray_error *error)
{
    int64_t d = m->config.hidden_size;
    for (int64_t t = 0; t < batch->tokens; t++) {
        int64_t row = batch->ids[t] - m->vocab_start;
        if (row >= 0 && row < m->vocab_rows)
            memcpy(x + t * d, m->weights.embed + row * d, (size_t)d * sizeof *x);
        else
            memset(x + t * d, 0, (size_t)d * sizeof *x);
    }
    return reduce(m, x, batch->tokens * d, error);
}

/* Applies the norms of the heads (Qwen3) and rotary positions to q and k, in place. */
static void position(const dray__model *m, const dray__packed *batch, const dray__layer *w,
                     dray__layer_state *s)
{
    int64_t width = m->config.head_dim, heads = m->q_heads + m->kv_heads;
    for (uint32_t row = 0; row < batch->rows; row++) {
        int64_t at = batch->past ? (int64_t)batch->past[row] : 0;
        for (uint64_t t = batch->offsets[row]; t < batch->offsets[row + 1]; t++, at++) {
            float *head = s->qkv + (int64_t)t * m->qkv_width;
            if (w->q_norm) {
                float *raw = s->raw + (int64_t)t * heads * width;
                float *scale = s->head_scale + (int64_t)t * heads;
                float epsilon = (float)m->config.rms_norm_eps;
                memcpy(raw, head, (size_t)(heads * width) * sizeof *raw);
                m->kernels->rms_norm(raw, w->q_norm, head, m->q_heads, width, width, width, epsilon,
                                     scale);
                m->kernels->rms_norm(raw + m->q_width, w->k_norm, head + m->q_width, m->kv_heads,
                                     width, width, width, epsilon, scale + m->q_heads);
            }
            const float *cos = m->cos + at * (width / 2), *sin = m->sin + at * (width / 2);
            for (int64_t h = 0; h < heads; h++, head += width)
                m->kernels->rotate(head, cos, sin, width, 1);
        }
    }
}

/* Computes causal softmax(q · kᵀ / sqrt(head_dim)) · v of one head and row. Query i sees keys up to
 * past + i. */
static void attend_head(const dray__model *m, const float *q, const float *k, const float *v,
                        int64_t key_stride, int64_t n, int64_t past, float *scores, float *out,
                        float *log_sum)
{
    int64_t width = m->config.head_dim, all = past + n;
    float scale = 1.0f / sqrtf((float)width);
    dray__gemm_nt(n, all, width, 1, q, m->qkv_width, k, key_stride, 0, scores, all);
    for (int64_t i = 0; i < n; i++) {
        float *row = scores + i * all;
        int64_t seen = past + i + 1;
        float max = scale * m->kernels->max(row, seen);
        float sum = m->kernels->exp_sum(row, scale, max, row, seen);
        memset(row + seen, 0, (size_t)(all - seen) * sizeof *row);
        float inverse = 1.0f / sum;
        for (int64_t j = 0; j < seen; j++)
            row[j] *= inverse;
        log_sum[i * m->q_heads] = max + logf(sum);
    }
    dray__gemm_nn(n, width, all, 1, scores, all, v, key_stride, 0, out, m->q_width);
}

static void attend(const dray__model *m, const dray__packed *batch, int64_t layer,
                   dray__cache *const *caches, dray__layer_state *s, float *scores)
{
    int64_t width = m->config.head_dim, share = m->q_heads / m->kv_heads;
    for (uint32_t row = 0; row < batch->rows; row++) {
        int64_t first = (int64_t)batch->offsets[row];
        int64_t n = (int64_t)batch->offsets[row + 1] - first;
        int64_t past = batch->past ? (int64_t)batch->past[row] : 0;
        const float *q = s->qkv + first * m->qkv_width;
        const float *k = q + m->q_width, *v = k + m->kv_width;
        int64_t stride = m->qkv_width;
        if (caches) {
            dray__cache *cache = caches[row];
            int64_t at = layer * cache->entries * m->kv_width;
            for (int64_t i = 0; i < n; i++) {
                size_t bytes = (size_t)m->kv_width * sizeof(float);
                memcpy(cache->k + at + (past + i) * m->kv_width, k + i * stride, bytes);
                memcpy(cache->v + at + (past + i) * m->kv_width, v + i * stride, bytes);
            }
            k = cache->k + at;
            v = cache->v + at;
            stride = m->kv_width;
        }
        for (int64_t h = 0; h < m->q_heads; h++)
            attend_head(m, q + h * width, k + h / share * width, v + h / share * width, stride, n,
                        past, scores, s->attended + first * m->q_width + h * width,
                        s->log_sum + first * m->q_heads + h);
    }
}

static void add(const float *a, const float *b, float *out, int64_t count)
{
    for (int64_t i = 0; i < count; i++)
        out[i] = a[i] + b[i];
}

static int run_layer(const dray__model *m, const dray__packed *batch, int64_t index,
                     dray__cache *const *caches, dray__state *state, float *out, dray_error *error)
{
    const dray__layer *w = &m->weights.layers[index];
    dray__layer_state *s = &state->layers[index];
    int64_t t = batch->tokens, d = m->config.hidden_size;
    float epsilon = (float)m->config.rms_norm_eps;

    m->kernels->rms_norm(s->x, w->input_norm, s->normed, t, d, d, d, epsilon, s->scale);
    dray__gemm_nt(t, m->qkv_width, d, 1, s->normed, d, w->qkv, d, 0, s->qkv, m->qkv_width);
    if (w->qkv_bias)
        for (int64_t i = 0; i < t; i++)
            m->kernels->axpy(1, w->qkv_bias, s->qkv + i * m->qkv_width, m->qkv_width);
    position(m, batch, w, s);
    attend(m, batch, index, caches, s, state->scores);
    dray__gemm_nt(t, d, m->q_width, 1, s->attended, m->q_width, w->o, m->q_width, 0, state->partial,
                  d);
    int code = reduce(m, state->partial, t * d, error);
    if (code != DRAY_OK)
        return code;
    add(s->x, state->partial, s->middle, t * d);

    m->kernels->rms_norm(s->middle, w->post_norm, s->middle_normed, t, d, d, d, epsilon,
                         s->middle_scale);
    dray__gemm_nt(t, 2 * m->ffn, d, 1, s->middle_normed, d, w->gate_up, d, 0, s->gate_up,
                  2 * m->ffn);
    m->kernels->swiglu(s->gate_up, s->activated, t, m->ffn);
    dray__gemm_nt(t, d, m->ffn, 1, s->activated, m->ffn, w->down, m->ffn, 0, state->partial, d);
    code = reduce(m, state->partial, t * d, error);
    if (code == DRAY_OK)
        add(s->middle, state->partial, out, t * d);
    return code;
}

int dray__forward(const dray__model *m, const dray__packed *batch, dray__cache *const *caches,
                  dray__state *state, dray_error *error)
{
    int64_t d = m->config.hidden_size;
    int code = reserve(m, state, batch->tokens, error);
    if (code == DRAY_OK)
        code = reserve_scores(batch, state, error);
    if (code == DRAY_OK)
        code = embed(m, batch, state->layers[0].x, error);
    for (int64_t i = 0; code == DRAY_OK && i < m->config.layers; i++) {
        float *out = i + 1 < m->config.layers ? state->layers[i + 1].x : state->last;
        code = run_layer(m, batch, i, caches, state, out, error);
    }
    if (code == DRAY_OK)
        m->kernels->rms_norm(state->last, m->weights.norm, state->hidden, batch->tokens, d, d, d,
                             (float)m->config.rms_norm_eps, state->last_scale);
    return code;
}
