/* Finds the parameters in the engine layout, and computes the rotary tables. */
#include "engine/model.h"
#include "engine/blas.h"

#include "base/error.h"

#include <inttypes.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>

/* Returns the spec by which the engine layout cuts the model for this rank. */
static dray_engine_spec spec_of(const dray__model *model)
{
    dray_engine_spec spec = DRAY_ENGINE_SPEC_INIT;
    spec.tp = model->world;
    spec.tp_rank = model->rank;
    spec.dtype = DRAY_F32;
    return spec;
}

/* Finds the address of parameter `name`. When `wanted` is false, *out stays NULL. */
static int place(const dray__model *model, void *base, const char *name, bool wanted, float **out,
                 dray_error *error)
{
    *out = NULL;
    if (!wanted)
        return DRAY_OK;
    dray_engine_spec spec = spec_of(model);
    uint64_t offset;
    uint32_t ndim;
    int64_t shape[DRAY_MAX_DIMS];
    int code = dray_engine_parameter(&model->config, &spec, name, &offset, &ndim, shape, error);
    if (code == DRAY_OK)
        *out = (float *)(void *)((char *)base + offset);
    return code;
}

static int place_layer(const dray__model *model, void *base, int64_t index, dray__layer *layer,
                       dray_error *error)
{
    const dray_model_config *config = &model->config;
    const struct {
        const char *name;
        bool wanted;
        float **out;
    } parts[] = {
        {"input_layernorm.weight", true, &layer->input_norm},
        {"self_attn.qkv_proj.weight", true, &layer->qkv},
        {"self_attn.qkv_proj.bias", config->qkv_bias, &layer->qkv_bias},
        {"self_attn.q_norm.weight", config->qk_norm, &layer->q_norm},
        {"self_attn.k_norm.weight", config->qk_norm, &layer->k_norm},
        {"self_attn.o_proj.weight", true, &layer->o},
        {"post_attention_layernorm.weight", true, &layer->post_norm},
        {"mlp.gate_up_proj.weight", true, &layer->gate_up},
        {"mlp.down_proj.weight", true, &layer->down},
    };
    for (size_t i = 0; i < sizeof parts / sizeof *parts; i++) {
        char name[128];
        snprintf(name, sizeof name, "model.layers.%" PRId64 ".%s", index, parts[i].name);
        int code = place(model, base, name, parts[i].wanted, parts[i].out, error);
        if (code != DRAY_OK)
            return code;
    }
    return DRAY_OK;
}

int dray__model_map(const dray__model *model, void *base, dray__weights *weights, dray_error *error)
{
    const dray_model_config *config = &model->config;
    dray__layer *layers = calloc((size_t)config->layers, sizeof *layers);
    if (!layers)
        return dray__nomem(error);
    dray__weights found = {.layers = layers};
    int code = place(model, base, "model.embed_tokens.weight", true, &found.embed, error);
    if (code == DRAY_OK)
        code = place(model, base, "model.norm.weight", true, &found.norm, error);
    if (code == DRAY_OK)
        code = place(model, base, config->labels ? "score.weight" : "lm_head.weight",
                     config->labels || !config->tied, &found.head, error);
    if (code == DRAY_OK)
        code = place(model, base, "score.bias", config->labels > 0, &found.head_bias, error);
    for (int64_t i = 0; code == DRAY_OK && i < config->layers; i++)
        code = place_layer(model, base, i, &layers[i], error);
    if (code != DRAY_OK) {
        free(layers);
        return code;
    }
    if (!found.head)
        found.head = found.embed;
    *weights = found;
    return DRAY_OK;
}

/* Finds the rows of the vocabulary that this rank holds: its share of the padded table, without
 * padding. */
static int find_vocabulary(dray__model *model, dray_error *error)
{
    dray_engine_spec spec = spec_of(model);
    uint64_t offset;
    uint32_t ndim;
    int64_t shape[DRAY_MAX_DIMS];
    int code = dray_engine_parameter(&model->config, &spec, "model.embed_tokens.weight", &offset,
                                     &ndim, shape, error);
    if (code != DRAY_OK)
        return code;
    model->vocab_share = shape[0];
    model->vocab_start = shape[0] * model->rank;
    uint64_t rows[DRAY__GROUP_MAX_WORLD];
    dray__model_shares(model, rows);
    model->vocab_rows = (int64_t)rows[model->rank];
    return DRAY_OK;
}

void dray__model_shares(const dray__model *model, uint64_t *rows)
{
    int64_t left = model->config.vocab_size, share = model->vocab_share;
    for (uint32_t rank = 0; rank < model->world; rank++, left -= share)
        rows[rank] = (uint64_t)(left < 0 ? 0 : left < share ? left : share);
}

int dray__model_open(const dray_model_config *config, dray__group *group, void *base,
                     dray__model *model, dray_error *error)
{
    int rc = dray__blas_open(error);
    if (rc)
        return rc;
    dray__model m = {
        .config = *config, .group = group, .world = 1, .kernels = dray__arithmetic_get()};
    if (group) {
        m.rank = dray__group_rank(group);
        m.world = dray__group_world(group);
    }
    m.q_heads = config->heads / m.world;
    m.kv_heads = m.world > config->kv_heads ? 1 : config->kv_heads / m.world;
    m.q_width = m.q_heads * config->head_dim;
    m.kv_width = m.kv_heads * config->head_dim;
    m.qkv_width = m.q_width + 2 * m.kv_width;
    m.ffn = config->intermediate_size / m.world;
    int code = find_vocabulary(&m, error);
    if (code == DRAY_OK)
        code = dray__model_map(&m, base, &m.weights, error);
    if (code == DRAY_OK)
        *model = m;
    return code;
}

void dray__model_close(dray__model *model)
{
    free(model->weights.layers);
    free(model->cos);
    free(model->sin);
    *model = (dray__model){0};
}

/* RoPE (Su et al., "RoFormer") as transformers computes it, in single precision, because at large
 * positions the rounding of the angle matters. */
int dray__model_reach(dray__model *model, int64_t count, dray_error *error)
{
    if (count <= model->positions)
        return DRAY_OK;
    int64_t half = model->config.head_dim / 2, rows = count + count / 2;
    float *cosines = malloc((size_t)(rows * half) * sizeof(float));
    float *sines = malloc((size_t)(rows * half) * sizeof(float));
    if (!cosines || !sines) {
        free(cosines);
        free(sines);
        return dray__nomem(error);
    }
    for (int64_t i = 0; i < half; i++) {
        float exponent = (float)(2 * i) / (float)model->config.head_dim;
        float frequency = 1.0f / powf((float)model->config.rope_theta, exponent);
        for (int64_t position = 0; position < rows; position++) {
            float angle = (float)position * frequency;
            cosines[position * half + i] = cosf(angle);
            sines[position * half + i] = sinf(angle);
        }
    }
    free(model->cos);
    free(model->sin);
    model->cos = cosines;
    model->sin = sines;
    model->positions = rows;
    return DRAY_OK;
}
