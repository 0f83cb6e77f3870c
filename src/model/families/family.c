/* What follows from a family's table: shapes, which layers have a parameter, the walk over all. */
#include "model/families/family.h"

#include "base/error.h"
#include "base/words.h"

#include <inttypes.h>
#include <stdio.h>
#include <string.h>

#define COUNT(array) ((uint32_t)(sizeof(array) / sizeof *(array)))

const dray__family *dray__family_find(const char *name)
{
    for (uint32_t i = 0; i < dray__family_count; i++)
        if (strcmp(dray__families[i].name, name) == 0)
            return &dray__families[i];
    return NULL;
}

void dray__family_hint(const char *name, char *out, size_t capacity)
{
    const char *names[DRAY__MOST_FAMILIES] = {NULL};
    for (uint32_t i = 0; i < dray__family_count; i++)
        names[i] = dray__families[i].name;
    dray__word_hint(name, names, dray__family_count, out, capacity);
    size_t at = strlen(out);
    for (uint32_t i = 0; i < dray__family_count && at < capacity; i++)
        at += (size_t)snprintf(out + at, capacity - at, "%s%s", i ? ", " : " (known: ", names[i]);
    if (at < capacity)
        snprintf(out + at, capacity - at, ")");
}

/* Limits far above any model, under which no product of sizes overflows. */
#define MOST_ROWS (INT64_C(1) << 24)
#define MOST_COUNT (INT64_C(1) << 16)

typedef struct limit {
    const char *name;
    int64_t value, least, most;
} limit;

static int check_limits(const limit *limits, uint32_t count, dray_error *error)
{
    for (uint32_t i = 0; i < count; i++)
        if (limits[i].value < limits[i].least || limits[i].value > limits[i].most)
            return dray__fail(error, DRAY_EINVALID,
                              "%s is %" PRId64 ", expected %" PRId64 " to %" PRId64, limits[i].name,
                              limits[i].value, limits[i].least, limits[i].most);
    return DRAY_OK;
}

/* Experts, latent attention and multi-token prediction: the family has them or it does not. */
static int check_parts(const dray_model_config *c, const dray__family *family, dray_error *error)
{
    const limit experts[] = {
        {"the number of experts", c->experts, 1, MOST_COUNT},
        {"moe_intermediate_size", c->moe_intermediate_size, 1, MOST_ROWS},
        {"n_shared_experts", c->shared_experts, 0, MOST_COUNT},
        {"first_k_dense_replace", c->first_k_dense, 0, MOST_COUNT},
        {"decoder_sparse_step", c->sparse_step, 0, MOST_COUNT},
    };
    const limit latent[] = {
        {"q_lora_rank", c->q_lora_rank, 0, MOST_ROWS},
        {"kv_lora_rank", c->kv_lora_rank, 1, MOST_ROWS},
        {"qk_nope_head_dim", c->qk_nope_head_dim, 1, MOST_COUNT},
        {"qk_rope_head_dim", c->qk_rope_head_dim, 1, MOST_COUNT},
        {"v_head_dim", c->v_head_dim, 1, MOST_COUNT},
    };
    const limit mtp[] = {{"num_nextn_predict_layers", c->mtp_layers, 0, MOST_COUNT}};
    const limit none[] = {{"the number of experts", c->experts, 0, 0},
                          {"kv_lora_rank", c->kv_lora_rank, 0, 0},
                          {"num_nextn_predict_layers", c->mtp_layers, 0, 0}};
    int status = family->moe ? check_limits(experts, COUNT(experts), error)
                             : check_limits(&none[0], 1, error);
    if (!status && family->moe && c->shared_experts > MOST_ROWS / c->moe_intermediate_size)
        status = dray__fail(error, DRAY_EINVALID,
                            "n_shared_experts %" PRId64 " times moe_intermediate_size %" PRId64
                            ": expected at most %" PRId64,
                            c->shared_experts, c->moe_intermediate_size, MOST_ROWS);
    if (!status)
        status = family->latent ? check_limits(latent, COUNT(latent), error)
                                : check_limits(&none[1], 1, error);
    if (!status && family->latent && c->head_dim != c->qk_nope_head_dim + c->qk_rope_head_dim)
        status = dray__fail(error, DRAY_EINVALID,
                            "head_dim is %" PRId64 ", expected qk_nope_head_dim %" PRId64
                            " + qk_rope_head_dim %" PRId64,
                            c->head_dim, c->qk_nope_head_dim, c->qk_rope_head_dim);
    if (!status)
        status = family->mtp ? check_limits(mtp, 1, error) : check_limits(&none[2], 1, error);
    return status ? dray__fail_prefix(error, status, "%s: ", family->name) : DRAY_OK;
}

int dray__config_check(const dray_model_config *config, const dray__family **family,
                       dray_error *error)
{
    const limit sizes[] = {
        {"vocab_size", config->vocab_size, 1, INT64_C(1) << 30},
        {"hidden_size", config->hidden_size, 1, MOST_ROWS},
        {"intermediate_size", config->intermediate_size, 1, MOST_ROWS},
        {"num_hidden_layers", config->layers, 1, MOST_COUNT},
        {"num_attention_heads", config->heads, 1, MOST_COUNT},
        {"num_key_value_heads", config->kv_heads, 1, MOST_COUNT},
        {"head_dim", config->head_dim, 1, MOST_COUNT * 2},
        /* what layers of multi-token prediction share is the head of a language model */
        {"num_labels", config->labels, 0, config->mtp_layers ? 0 : MOST_COUNT},
    };
    if (!memchr(config->family, 0, sizeof config->family))
        return dray__fail(error, DRAY_EINVALID, "model family: not a terminated name");
    const dray__family *found = dray__family_find(config->family);
    if (!found) {
        char hint[DRAY__FAMILY_HINT];
        dray__family_hint(config->family, hint, sizeof hint);
        return dray__fail(error, DRAY_EUNSUPPORTED, "model_type '%s' is not supported%s",
                          config->family, hint);
    }
    int status = check_limits(sizes, COUNT(sizes), error);
    if (!status)
        status = check_parts(config, found, error);
    if (status)
        return status;
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

static int64_t size_of(dray__size size, const dray_model_config *c)
{
    const int64_t sizes[] = {
        [DRAY__SIZE_VOCAB] = c->vocab_size,
        [DRAY__SIZE_HIDDEN] = c->hidden_size,
        [DRAY__SIZE_INTERMEDIATE] = c->intermediate_size,
        [DRAY__SIZE_QUERY] = c->heads * c->head_dim,
        [DRAY__SIZE_KV] = c->kv_heads * c->head_dim,
        [DRAY__SIZE_HEAD] = c->head_dim,
        [DRAY__SIZE_EXPERTS] = c->experts,
        [DRAY__SIZE_EXPERT] = c->moe_intermediate_size,
        [DRAY__SIZE_SHARED] = c->shared_experts * c->moe_intermediate_size,
        [DRAY__SIZE_Q_LORA] = c->q_lora_rank,
        [DRAY__SIZE_KV_LORA] = c->kv_lora_rank,
        [DRAY__SIZE_KV_A] = c->kv_lora_rank + c->qk_rope_head_dim,
        [DRAY__SIZE_KV_B] = c->heads * (c->qk_nope_head_dim + c->v_head_dim),
        [DRAY__SIZE_VALUE] = c->heads * c->v_head_dim,
        [DRAY__SIZE_TWICE] = c->hidden_size * 2,
        [DRAY__SIZE_LABELS] = c->labels,
    };
    return sizes[size];
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
    const bool holds[] = {
        [DRAY__WHEN_ALWAYS] = true,
        [DRAY__WHEN_QKV_BIAS] = config->qkv_bias,
        [DRAY__WHEN_O_BIAS] = config->o_bias,
        [DRAY__WHEN_MLP_BIAS] = config->mlp_bias,
        [DRAY__WHEN_QK_NORM] = config->qk_norm,
        [DRAY__WHEN_Q_LORA] = config->q_lora_rank > 0,
        [DRAY__WHEN_NO_Q_LORA] = config->q_lora_rank == 0,
        [DRAY__WHEN_SHARED] = config->shared_experts > 0,
        [DRAY__WHEN_LANGUAGE] = config->labels == 0,
        [DRAY__WHEN_LABELS] = config->labels > 0,
    };
    return holds[parameter->when] &&
           (parameter->layers != DRAY__LAYERS_MTP || config->mtp_layers > 0);
}

bool dray__layer_is_moe(const dray_model_config *config, int64_t layer)
{
    if (config->experts == 0 || layer < config->first_k_dense)
        return false;
    if (layer < DRAY_MODEL_DENSE_WORDS * 64 && config->dense_layers[layer / 64] >> (layer % 64) & 1)
        return false;
    return config->sparse_step < 2 || (layer + 1) % config->sparse_step == 0;
}

bool dray__parameter_in(const dray__parameter *parameter, const dray_model_config *config,
                        int64_t layer)
{
    if (parameter->layers == DRAY__LAYERS_MTP)
        return layer >= config->layers;
    return parameter->layers == DRAY__LAYERS_ALL ||
           dray__layer_is_moe(config, layer) == (parameter->layers == DRAY__LAYERS_MOE);
}

bool dray__parameter_tied(const dray__parameter *parameter, const dray_model_config *config)
{
    return parameter->tied && (config->tied || parameter->layers == DRAY__LAYERS_MTP);
}

bool dray__parameter_in_layer(const dray__parameter *parameter)
{
    return strchr(parameter->name, '*') != NULL;
}

bool dray__parameter_of_expert(const dray__parameter *parameter)
{
    const char *star = strchr(parameter->name, '*');
    return star && strchr(star + 1, '*');
}

dray_dtype dray__parameter_dtype(const dray__parameter *parameter, dray_dtype dtype)
{
    return parameter->dtype != DRAY_DTYPE_NONE ? parameter->dtype : dtype;
}

/* Models have a hundred thousand tensors: faster than printing. */
static char *put_number(char *at, int64_t number)
{
    char digits[20];
    uint32_t count = 0;
    do
        digits[count++] = (char)('0' + number % 10);
    while (number /= 10);
    while (count)
        *at++ = digits[--count];
    return at;
}

const char *dray__parameter_name(const char *pattern, int64_t layer, int64_t expert, char *out)
{
    int64_t numbers[] = {layer, expert};
    uint32_t star = 0;
    char *at = out, *end = out + DRAY__PARAMETER_NAME - 21; /* room for a number and the end */
    for (; *pattern && at < end; pattern++) {
        if (*pattern == '*' && star < COUNT(numbers))
            at = put_number(at, numbers[star++]);
        else
            *at++ = *pattern;
    }
    *at = 0;
    return out;
}

const char *dray__read_number(const char *text, int64_t *out)
{
    const char *at = text;
    for (*out = 0; *at >= '0' && *at <= '9' && *out < INT64_C(1) << 32; at++)
        *out = *out * 10 + (*at - '0');
    return at == text || (*text == '0' && at > text + 1) ? NULL : at;
}

bool dray__name_matches(const char *pattern, const char *name, int64_t *numbers)
{
    for (uint32_t star = 0; *pattern; pattern++) {
        if (*pattern != '*') {
            if (*name++ != *pattern)
                return false;
            continue;
        }
        name = dray__read_number(name, &numbers[star++]);
        if (!name)
            return false;
    }
    return !*name;
}

/* Behind the last row of a group of neighbours: its first row. */
static uint32_t group_start(const dray__walk *walk, uint32_t row,
                            bool (*inside)(const dray__parameter *))
{
    while (row > 0 && inside(&walk->family->parameters[row - 1]))
        row--;
    return row;
}

static bool ends_group(const dray__walk *walk, uint32_t row,
                       bool (*inside)(const dray__parameter *))
{
    const dray__parameter *rows = walk->family->parameters;
    return inside(&rows[row]) && (row + 1 == walk->family->count || !inside(&rows[row + 1]));
}

/* After the last row of an expert or a layer: back to its first row while more are left. After the
 * last row of all: to the layers' rows again, for those of multi-token prediction. */
static void step(dray__walk *walk)
{
    const dray_model_config *c = walk->config;
    uint32_t row = walk->next++;
    bool beyond = walk->next_layer >= c->layers; /* in a layer of multi-token prediction */
    if (ends_group(walk, row, dray__parameter_of_expert)) {
        bool more = dray__layer_is_moe(c, walk->next_layer) && ++walk->next_expert < c->experts;
        if (more) {
            walk->next = group_start(walk, row, dray__parameter_of_expert);
            return;
        }
        walk->next_expert = 0;
    }
    if (ends_group(walk, row, dray__parameter_in_layer)) {
        int64_t end = beyond ? c->layers + c->mtp_layers : c->layers;
        if (++walk->next_layer < end)
            walk->next = group_start(walk, row, dray__parameter_in_layer);
        else if (beyond)
            walk->next = walk->family->count;
        return;
    }
    if (walk->next == walk->family->count && c->mtp_layers > 0)
        for (walk->next = 0; !dray__parameter_in_layer(&walk->family->parameters[walk->next]);)
            walk->next++;
}

const dray__parameter *dray__walk_next(dray__walk *walk)
{
    while (walk->next < walk->family->count) {
        const dray__parameter *parameter = &walk->family->parameters[walk->next];
        bool inside = dray__parameter_in_layer(parameter);
        walk->row = walk->next;
        walk->layer = inside ? walk->next_layer : 0;
        walk->expert = walk->next_expert;
        step(walk);
        if (!dray__parameter_used(parameter, walk->config) ||
            (inside && !dray__parameter_in(parameter, walk->config, walk->layer)))
            continue;
        dray__parameter_name(parameter->name, walk->layer, walk->expert, walk->name);
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
    return dray_layout_add_tensor(layout, walk->name, dray__parameter_dtype(parameter, dtype), ndim,
                                  shape, tensor, error);
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
