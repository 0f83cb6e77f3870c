/* The families' tables. Names and order: transformers' modeling_llama.py, modeling_qwen2.py,
 * modeling_qwen3.py. Fused parameters and cuts: QKVParallelLinear, MergedColumnParallelLinear,
 * RowParallelLinear and VocabParallelEmbedding, the same in vLLM and SGLang. */
#include "model/family.h"

#include "base/error.h"
#include "base/words.h"

#include <inttypes.h>
#include <math.h>
#include <stdio.h>
#include <string.h>

#define COUNT(array) ((uint32_t)(sizeof(array) / sizeof *(array)))
#define LAYER "model.layers.*."

#define V DRAY__SIZE_VOCAB
#define H DRAY__SIZE_HIDDEN
#define I DRAY__SIZE_INTERMEDIATE
#define Q DRAY__SIZE_QUERY
#define KV DRAY__SIZE_KV
#define D DRAY__SIZE_HEAD

/* Decoders with grouped-query attention, rotary positions and a gated MLP. */
static const dray__parameter dense[] = {
    {.name = "model.embed_tokens.weight", .cut = DRAY__CUT_VOCAB, .shape = {V, H}},
    {.name = LAYER "self_attn.q_proj.weight",
     .fused = LAYER "self_attn.qkv_proj.weight",
     .cut = DRAY__CUT_HEADS,
     .shape = {Q, H}},
    {.name = LAYER "self_attn.q_proj.bias",
     .fused = LAYER "self_attn.qkv_proj.bias",
     .when = DRAY__WHEN_QKV_BIAS,
     .cut = DRAY__CUT_HEADS,
     .shape = {Q}},
    {.name = LAYER "self_attn.k_proj.weight",
     .fused = LAYER "self_attn.qkv_proj.weight",
     .cut = DRAY__CUT_KV_HEADS,
     .shape = {KV, H}},
    {.name = LAYER "self_attn.k_proj.bias",
     .fused = LAYER "self_attn.qkv_proj.bias",
     .when = DRAY__WHEN_QKV_BIAS,
     .cut = DRAY__CUT_KV_HEADS,
     .shape = {KV}},
    {.name = LAYER "self_attn.v_proj.weight",
     .fused = LAYER "self_attn.qkv_proj.weight",
     .cut = DRAY__CUT_KV_HEADS,
     .shape = {KV, H}},
    {.name = LAYER "self_attn.v_proj.bias",
     .fused = LAYER "self_attn.qkv_proj.bias",
     .when = DRAY__WHEN_QKV_BIAS,
     .cut = DRAY__CUT_KV_HEADS,
     .shape = {KV}},
    {.name = LAYER "self_attn.o_proj.weight", .cut = DRAY__CUT_HEADS_ROW, .shape = {H, Q}},
    {.name = LAYER "self_attn.o_proj.bias", .when = DRAY__WHEN_O_BIAS, .shape = {H}},
    {.name = LAYER "self_attn.q_norm.weight", .when = DRAY__WHEN_QK_NORM, .shape = {D}},
    {.name = LAYER "self_attn.k_norm.weight", .when = DRAY__WHEN_QK_NORM, .shape = {D}},
    {.name = LAYER "mlp.gate_proj.weight",
     .fused = LAYER "mlp.gate_up_proj.weight",
     .cut = DRAY__CUT_COLUMN,
     .shape = {I, H}},
    {.name = LAYER "mlp.gate_proj.bias",
     .fused = LAYER "mlp.gate_up_proj.bias",
     .when = DRAY__WHEN_MLP_BIAS,
     .cut = DRAY__CUT_COLUMN,
     .shape = {I}},
    {.name = LAYER "mlp.up_proj.weight",
     .fused = LAYER "mlp.gate_up_proj.weight",
     .cut = DRAY__CUT_COLUMN,
     .shape = {I, H}},
    {.name = LAYER "mlp.up_proj.bias",
     .fused = LAYER "mlp.gate_up_proj.bias",
     .when = DRAY__WHEN_MLP_BIAS,
     .cut = DRAY__CUT_COLUMN,
     .shape = {I}},
    {.name = LAYER "mlp.down_proj.weight", .cut = DRAY__CUT_ROW, .shape = {H, I}},
    {.name = LAYER "mlp.down_proj.bias", .when = DRAY__WHEN_MLP_BIAS, .shape = {H}},
    {.name = LAYER "input_layernorm.weight", .shape = {H}},
    {.name = LAYER "post_attention_layernorm.weight", .shape = {H}},
    {.name = "model.norm.weight", .shape = {H}},
    {.name = "lm_head.weight",
     .tied = "model.embed_tokens.weight",
     .cut = DRAY__CUT_VOCAB,
     .shape = {V, H}},
};

_Static_assert(COUNT(dense) <= DRAY__MOST_PARAMETERS, "");

static const dray__family families[] = {
    {.name = "llama",
     .parameters = dense,
     .count = COUNT(dense),
     .bias_keys = true,
     .mlp_bias_key = true},
    {.name = "qwen2",
     .parameters = dense,
     .count = COUNT(dense),
     .default_kv_heads = 32,
     .qkv_bias = true},
    {.name = "qwen3",
     .parameters = dense,
     .count = COUNT(dense),
     .default_kv_heads = 32,
     .default_head_dim = 128,
     .bias_keys = true,
     .qk_norm = true},
};

const dray__family *dray__family_find(const char *name)
{
    for (uint32_t i = 0; i < COUNT(families); i++)
        if (strcmp(families[i].name, name) == 0)
            return &families[i];
    return NULL;
}

void dray__family_hint(const char *name, char *out, size_t capacity)
{
    const char *names[COUNT(families)];
    for (uint32_t i = 0; i < COUNT(families); i++)
        names[i] = families[i].name;
    dray__word_hint(name, names, COUNT(families), out, capacity);
    size_t at = strlen(out);
    for (uint32_t i = 0; i < COUNT(families) && at < capacity; i++)
        at += (size_t)snprintf(out + at, capacity - at, "%s%s", i ? ", " : " (known: ", names[i]);
    if (at < capacity)
        snprintf(out + at, capacity - at, ")");
}

int dray__config_check(const dray_model_config *config, const dray__family **family,
                       dray_error *error)
{
    /* Limits far above any model, under which no product of sizes overflows. */
    const struct {
        const char *name;
        int64_t value, most;
    } sizes[] = {
        {"vocab_size", config->vocab_size, INT64_C(1) << 30},
        {"hidden_size", config->hidden_size, INT64_C(1) << 24},
        {"intermediate_size", config->intermediate_size, INT64_C(1) << 24},
        {"num_hidden_layers", config->layers, INT64_C(1) << 16},
        {"num_attention_heads", config->heads, INT64_C(1) << 16},
        {"num_key_value_heads", config->kv_heads, INT64_C(1) << 16},
        {"head_dim", config->head_dim, INT64_C(1) << 16},
    };
    if (!memchr(config->family, 0, sizeof config->family))
        return dray__fail(error, DRAY_EINVALID, "model family: not a terminated name");
    const dray__family *found = dray__family_find(config->family);
    if (!found) {
        char hint[160];
        dray__family_hint(config->family, hint, sizeof hint);
        return dray__fail(error, DRAY_EUNSUPPORTED, "model_type '%s' is not supported%s",
                          config->family, hint);
    }
    for (uint32_t i = 0; i < COUNT(sizes); i++)
        if (sizes[i].value < 1 || sizes[i].value > sizes[i].most)
            return dray__fail(error, DRAY_EINVALID, "%s is %" PRId64 ", expected 1 to %" PRId64,
                              sizes[i].name, sizes[i].value, sizes[i].most);
    if (config->heads % config->kv_heads)
        return dray__fail(error, DRAY_EINVALID,
                          "num_attention_heads %" PRId64
                          " is not a multiple of num_key_value_heads %" PRId64,
                          config->heads, config->kv_heads);
    if (!dray_dtype_size((dray_dtype)config->dtype))
        return dray__fail(error, DRAY_EINVALID, "model dtype %d is unknown", config->dtype);
    *family = found;
    return DRAY_OK;
}

static int64_t size_of(dray__size size, const dray_model_config *config)
{
    switch (size) {
    case DRAY__SIZE_VOCAB:
        return config->vocab_size;
    case DRAY__SIZE_HIDDEN:
        return config->hidden_size;
    case DRAY__SIZE_INTERMEDIATE:
        return config->intermediate_size;
    case DRAY__SIZE_QUERY:
        return config->heads * config->head_dim;
    case DRAY__SIZE_KV:
        return config->kv_heads * config->head_dim;
    case DRAY__SIZE_HEAD:
        return config->head_dim;
    case DRAY__SIZE_NONE:
        break;
    }
    return 0;
}

uint32_t dray__parameter_shape(const dray__parameter *parameter, const dray_model_config *config,
                               int64_t *shape)
{
    shape[0] = size_of(parameter->shape[0], config);
    if (parameter->shape[1] == DRAY__SIZE_NONE)
        return 1;
    shape[1] = size_of(parameter->shape[1], config);
    return 2;
}

bool dray__parameter_used(const dray__parameter *parameter, const dray_model_config *config)
{
    switch (parameter->when) {
    case DRAY__WHEN_QKV_BIAS:
        return config->qkv_bias;
    case DRAY__WHEN_O_BIAS:
        return config->o_bias;
    case DRAY__WHEN_MLP_BIAS:
        return config->mlp_bias;
    case DRAY__WHEN_QK_NORM:
        return config->qk_norm;
    case DRAY__WHEN_ALWAYS:
        break;
    }
    return true;
}

bool dray__parameter_tied(const dray__parameter *parameter, const dray_model_config *config)
{
    return parameter->tied && config->tied;
}

bool dray__parameter_in_layer(const dray__parameter *parameter)
{
    return strchr(parameter->name, '*') != NULL;
}

const char *dray__parameter_name(const char *pattern, int64_t layer, char *out)
{
    const char *star = strchr(pattern, '*');
    if (star)
        snprintf(out, DRAY__PARAMETER_NAME, "%.*s%" PRId64 "%s", (int)(star - pattern), pattern,
                 layer, star + 1);
    else
        snprintf(out, DRAY__PARAMETER_NAME, "%s", pattern);
    return out;
}

/* After the last row of a layer: back to its first row while layers are left. */
static void step(dray__walk *walk)
{
    const dray__parameter *rows = walk->family->parameters;
    uint32_t row = walk->next++;
    bool inside = dray__parameter_in_layer(&rows[row]);
    bool last = inside &&
                (walk->next == walk->family->count || !dray__parameter_in_layer(&rows[walk->next]));
    if (!last || ++walk->next_layer >= walk->config->layers)
        return;
    while (row > 0 && dray__parameter_in_layer(&rows[row - 1]))
        row--;
    walk->next = row;
}

const dray__parameter *dray__walk_next(dray__walk *walk)
{
    while (walk->next < walk->family->count) {
        const dray__parameter *parameter = &walk->family->parameters[walk->next];
        walk->row = walk->next;
        walk->layer = dray__parameter_in_layer(parameter) ? walk->next_layer : 0;
        step(walk);
        if (!dray__parameter_used(parameter, walk->config))
            continue;
        dray__parameter_name(parameter->name, walk->layer, walk->name);
        return parameter;
    }
    return NULL;
}

int dray__walk_add(const dray__walk *walk, const dray__parameter *parameter, dray_dtype dtype,
                   dray_layout *layout, uint32_t *tensor, bool *is_alias, dray_error *error)
{
    *is_alias = dray__parameter_tied(parameter, walk->config);
    if (*is_alias) {
        uint32_t target;
        int status = dray_layout_find(layout, parameter->tied, &target, error);
        return status ? status : dray_layout_add_alias(layout, walk->name, target, tensor, error);
    }
    int64_t shape[DRAY_MAX_DIMS];
    uint32_t ndim = dray__parameter_shape(parameter, walk->config, shape);
    return dray_layout_add_tensor(layout, walk->name, dtype, ndim, shape, tensor, error);
}

int dray__builder_defaults(const dray_model_config *config, dray_dtype *dtype,
                           dray_region_kind *kind, dray_error *error)
{
    if (*dtype == DRAY_DTYPE_NONE)
        *dtype = (dray_dtype)config->dtype;
    if (!dray_dtype_size(*dtype))
        return dray__fail(error, DRAY_EINVALID, "unknown dtype %d", *dtype);
    if ((int)*kind == 0)
        *kind = DRAY_REGION_SHARED;
    if (*kind < DRAY_REGION_HOST || *kind >= DRAY_REGION_FILE)
        return dray__fail(error, DRAY_EINVALID,
                          "region kind %d: expected memory (host, shared, pinned, cuda)",
                          (int)*kind);
    return DRAY_OK;
}
