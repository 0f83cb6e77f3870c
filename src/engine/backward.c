/* The backward pass of forward.c, for one rank and no cache. */
#include "engine/blas.h"
#include "engine/model.h"

#include "base/error.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

void dray__backward_free(dray__backward *b)
{
    free(b->memory);
    free(b->scores);
    *b = (dray__backward){0};
}

static int reserve(const dray__model *m, const dray__packed *batch, dray__backward *b,
                   dray_error *error)
{
    int64_t tokens = batch->tokens, d = m->config.hidden_size, longest = 0;
    for (uint32_t row = 0; row < batch->rows; row++) {
        int64_t n = (int64_t)(batch->offsets[row + 1] - batch->offsets[row]);
        longest = n > longest ? n : longest;
    }
    if (tokens > b->capacity) {
        free(b->memory);
        b->capacity = 0;
        int64_t widths[] = {d, d, d, m->qkv_width, m->q_width, 2 * m->ffn, m->ffn}, total = 0;
        float **const outs[] = {&b->dx,        &b->dmiddle,  &b->dnormed,   &b->dqkv,
                                &b->dattended, &b->dgate_up, &b->dactivated};
        for (size_t i = 0; i < sizeof widths / sizeof *widths; i++)
            total += tokens * widths[i];
        b->memory = malloc((size_t)(total + 1) * sizeof(float));
        if (!b->memory)
            return dray__nomem(error);
        float *at = b->memory;
        for (size_t i = 0; i < sizeof widths / sizeof *widths; at += tokens * widths[i], i++)
            *outs[i] = at;
        b->capacity = tokens;
    }
    if (2 * longest * longest > b->scores_capacity) {
        free(b->scores);
        b->scores_capacity = 0;
        b->scores = malloc((size_t)(2 * longest * longest) * sizeof(float) + 1);
        if (!b->scores)
            return dray__nomem(error);
        b->scores_capacity = 2 * longest * longest;
    }
    return DRAY_OK;
}

/* Computes one head of one row. The probabilities are not kept, but computed again from the scores
 * and their log-sums (Dao et al., FlashAttention, Algorithm 4). Adds to dk and dv, which the heads
 * of one group share; sets dq. */
static void attend_head_backward(const dray__model *m, const float *q, const float *k,
                                 const float *v, const float *out, const float *log_sum,
                                 const float *dout, int64_t n, float *p, float *ds, float *dq,
                                 float *dk, float *dv)
{
    int64_t width = m->config.head_dim, stride = m->qkv_width;
    float scale = 1.0f / sqrtf((float)width);
    dray__gemm_nt(n, n, width, 1, q, stride, k, stride, 0, p, n);
    dray__gemm_nt(n, n, width, 1, dout, m->q_width, v, stride, 0, ds, n);
    for (int64_t i = 0; i < n; i++) {
        float *pi = p + i * n, *dsi = ds + i * n;
        m->kernels->exp_sum(pi, scale, log_sum[i * m->q_heads], pi, i + 1);
        memset(pi + i + 1, 0, (size_t)(n - i - 1) * sizeof *pi);
        memset(dsi + i + 1, 0, (size_t)(n - i - 1) * sizeof *dsi);
        float mean = m->kernels->dot(dout + i * m->q_width, out + i * m->q_width, width);
        for (int64_t j = 0; j <= i; j++)
            dsi[j] = pi[j] * (dsi[j] - mean);
    }
    dray__gemm_tn(n, width, n, 1, p, n, dout, m->q_width, 1, dv, stride);
    dray__gemm_nn(n, width, n, scale, ds, n, k, stride, 0, dq, stride);
    dray__gemm_tn(n, width, n, scale, ds, n, q, stride, 1, dk, stride);
}

static void attend_backward(const dray__model *m, const dray__packed *batch,
                            const dray__layer_state *s, dray__backward *b)
{
    int64_t width = m->config.head_dim, share = m->q_heads / m->kv_heads;
    memset(b->dqkv, 0, (size_t)(batch->tokens * m->qkv_width) * sizeof(float));
    for (uint32_t row = 0; row < batch->rows; row++) {
        int64_t first = (int64_t)batch->offsets[row];
        int64_t n = (int64_t)batch->offsets[row + 1] - first;
        const float *q = s->qkv + first * m->qkv_width, *k = q + m->q_width, *v = k + m->kv_width;
        float *dq = b->dqkv + first * m->qkv_width, *dk = dq + m->q_width, *dv = dk + m->kv_width;
        for (int64_t h = 0; h < m->q_heads; h++) {
            int64_t at = first * m->q_width + h * width, shared = h / share * width;
            attend_head_backward(m, q + h * width, k + shared, v + shared, s->attended + at,
                                 s->log_sum + first * m->q_heads + h, b->dattended + at, n,
                                 b->scores, b->scores + n * n, dq + h * width, dk + shared,
                                 dv + shared);
        }
    }
}

/* Goes back through the rotary positions and the heads' norms, in place in dqkv. */
static void position_backward(const dray__model *m, const dray__packed *batch, const dray__layer *w,
                              const dray__layer_state *s, dray__layer *g, dray__backward *b)
{
    int64_t width = m->config.head_dim, heads = m->q_heads + m->kv_heads;
    for (uint32_t row = 0; row < batch->rows; row++)
        for (uint64_t t = batch->offsets[row]; t < batch->offsets[row + 1]; t++) {
            int64_t at = (int64_t)(t - batch->offsets[row]) * (width / 2);
            float *dhead = b->dqkv + (int64_t)t * m->qkv_width;
            for (int64_t h = 0; h < heads; h++)
                m->kernels->rotate(dhead + h * width, m->cos + at, m->sin + at, width, -1);
            if (!w->q_norm)
                continue;
            const float *raw = s->raw + (int64_t)t * heads * width;
            const float *scale = s->head_scale + (int64_t)t * heads;
            float *dy = b->dattended; /* not used any more, and wide enough for one head */
            for (int64_t h = 0; h < heads; h++) {
                bool query = h < m->q_heads;
                memcpy(dy, dhead + h * width, (size_t)width * sizeof *dy);
                memset(dhead + h * width, 0, (size_t)width * sizeof *dy);
                m->kernels->rms_norm_backward(
                    raw + h * width, query ? w->q_norm : w->k_norm, scale + h, dy,
                    dhead + h * width, query ? g->q_norm : g->k_norm, 1, width, width, width);
            }
        }
}

/* dx is the gradient of the layer's output at first, and of its input afterwards. */
static void layer_backward(const dray__model *m, const dray__packed *batch, const dray__layer *w,
                           const dray__layer_state *s, dray__layer *g, dray__backward *b)
{
    int64_t t = batch->tokens, d = m->config.hidden_size, ffn = m->ffn;
    dray__gemm_tn(d, ffn, t, 1, b->dx, d, s->activated, ffn, 1, g->down, ffn);
    dray__gemm_nn(t, ffn, d, 1, b->dx, d, w->down, ffn, 0, b->dactivated, ffn);
    m->kernels->swiglu_backward(s->gate_up, b->dactivated, b->dgate_up, t, ffn);
    dray__gemm_tn(2 * ffn, d, t, 1, b->dgate_up, 2 * ffn, s->middle_normed, d, 1, g->gate_up, d);
    dray__gemm_nn(t, d, 2 * ffn, 1, b->dgate_up, 2 * ffn, w->gate_up, d, 0, b->dnormed, d);
    memcpy(b->dmiddle, b->dx, (size_t)(t * d) * sizeof(float));
    m->kernels->rms_norm_backward(s->middle, w->post_norm, s->middle_scale, b->dnormed, b->dmiddle,
                                  g->post_norm, t, d, d, d);

    dray__gemm_tn(d, m->q_width, t, 1, b->dmiddle, d, s->attended, m->q_width, 1, g->o, m->q_width);
    dray__gemm_nn(t, m->q_width, d, 1, b->dmiddle, d, w->o, m->q_width, 0, b->dattended,
                  m->q_width);
    attend_backward(m, batch, s, b);
    position_backward(m, batch, w, s, g, b);
    dray__gemm_tn(m->qkv_width, d, t, 1, b->dqkv, m->qkv_width, s->normed, d, 1, g->qkv, d);
    if (g->qkv_bias)
        for (int64_t i = 0; i < t; i++)
            m->kernels->axpy(1, b->dqkv + i * m->qkv_width, g->qkv_bias, m->qkv_width);
    dray__gemm_nn(t, d, m->qkv_width, 1, b->dqkv, m->qkv_width, w->qkv, d, 0, b->dnormed, d);
    memcpy(b->dx, b->dmiddle, (size_t)(t * d) * sizeof(float));
    m->kernels->rms_norm_backward(s->x, w->input_norm, s->scale, b->dnormed, b->dx, g->input_norm,
                                  t, d, d, d);
}

int dray__backward_run(const dray__model *m, const dray__packed *batch, const dray__state *state,
                       const float *dhidden, dray__weights *gradients, dray__backward *b,
                       dray_error *error)
{
    int code = reserve(m, batch, b, error);
    if (code != DRAY_OK)
        return code;
    int64_t t = batch->tokens, d = m->config.hidden_size;
    memset(b->dx, 0, (size_t)(t * d) * sizeof(float));
    m->kernels->rms_norm_backward(state->last, m->weights.norm, state->last_scale, dhidden, b->dx,
                                  gradients->norm, t, d, d, d);
    for (int64_t i = m->config.layers; i-- > 0;)
        layer_backward(m, batch, &m->weights.layers[i], &state->layers[i], &gradients->layers[i],
                       b);
    for (int64_t i = 0; i < t; i++)
        m->kernels->axpy(1, b->dx + i * d, gradients->embed + batch->ids[i] * d, d);
    return DRAY_OK;
}
