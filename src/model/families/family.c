/* Computes from a family's table: shapes, the layers that have a parameter, and the walk over all
 * parameters. */
#include "model/families/family.h"

#include "base/error.h"

#include <inttypes.h>
#include <stddef.h>
#include <string.h>

#define COUNT(array) ((uint32_t)(sizeof(array) / sizeof *(array)))

/* Limits far above any model, within which no product of sizes overflows. */
#define MOST_ROWS (INT64_C(1) << 24)
#define MOST_COUNT (INT64_C(1) << 16)
#define LARGEST_SIZE (INT64_C(1) << 40)
/* Of all layers together: as many as there is time and memory for. The largest models have some ten
 * thousand. */
#define MOST_EXPERTS (INT64_C(1) << 22)

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

/* Checks that the configuration has experts, latent attention and multi-token prediction only if
 * the family does. */
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
    if (!status && c->experts > MOST_EXPERTS / (c->layers + c->mtp_layers))
        status = dray__fail(error, DRAY_EINVALID,
                            "%" PRId64 " experts in each of %" PRId64
                            " layers: expected at most %" PRId64 " in all",
                            c->experts, c->layers + c->mtp_layers, MOST_EXPERTS);
    return status ? dray__fail_prefix(error, status, "%s: ", family->name) : DRAY_OK;
}

/* Checks every size of every tensor: products of permitted factors may be too large. */
static int check_shapes(const dray_model_config *config, const dray__family *family,
                        dray_error *error)
{
    for (uint32_t i = 0; i < family->count; i++) {
        const dray__parameter *p = &family->parameters[i];
        int64_t size = 0;
        int status = p->each ? dray__evaluate(p->each, config, &size, error) : DRAY_OK;
        if (!status && (size < 0 || size > MOST_COUNT))
            status = dray__fail(error, DRAY_EINVALID, "%s is %" PRId64 ", expected 0 to %" PRId64,
                                p->each->text, size, MOST_COUNT);
        if (!status && p->when)
            status = dray__evaluate(p->when, config, &size, error);
        for (uint32_t d = 0; d < p->ndim && !status && dray__parameter_used(p, config); d++) {
            status = dray__evaluate(p->shape[d], config, &size, error);
            if (!status && (size < 1 || size > LARGEST_SIZE))
                status =
                    dray__fail(error, DRAY_EINVALID, "%s is %" PRId64 ", expected 1 to %" PRId64,
                               p->shape[d]->text, size, LARGEST_SIZE);
        }
        if (status)
            return dray__fail_prefix(error, status, "%s: %s: ", family->name, p->name);
    }
    return DRAY_OK;
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
        /* layers of multi-token prediction share the head of a language model */
        {"num_labels", config->labels, 0, config->mtp_layers ? 0 : MOST_COUNT},
    };
    if (!memchr(config->family, 0, sizeof config->family))
        return dray__fail(error, DRAY_EINVALID, "model family: not a terminated name");
    const dray__family *found;
    int status = dray__family_find(config->family, &found, error);
    if (!status)
        status = check_limits(sizes, COUNT(sizes), error);
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
    status = check_shapes(config, found, error);
    if (!status)
        *family = found;
    return status;
}

/* ---- values ---------------------------------------------------------------------------------- */

#define FIELD(name)                                                                                \
    {                                                                                              \
#name, offsetof(dray_model_config, name), false                                            \
    }
#define FLAG(name)                                                                                 \
    {                                                                                              \
#name, offsetof(dray_model_config, name), true                                             \
    }
static const struct {
    const char *name;
    size_t at;
    bool is_flag;
} fields[] = {
    FIELD(vocab_size),
    FIELD(hidden_size),
    FIELD(intermediate_size),
    FIELD(layers),
    FIELD(heads),
    FIELD(kv_heads),
    FIELD(head_dim),
    FIELD(max_positions),
    FIELD(experts),
    FIELD(shared_experts),
    FIELD(moe_intermediate_size),
    FIELD(first_k_dense),
    FIELD(sparse_step),
    FIELD(q_lora_rank),
    FIELD(kv_lora_rank),
    FIELD(qk_nope_head_dim),
    FIELD(qk_rope_head_dim),
    FIELD(v_head_dim),
    FIELD(mtp_layers),
    FIELD(labels),
    FLAG(qkv_bias),
    FLAG(o_bias),
    FLAG(mlp_bias),
    FLAG(qk_norm),
    FLAG(tied),
};

const char *dray__value_name(uint32_t value)
{
    return value < COUNT(fields) ? fields[value].name : NULL;
}

void dray__value_set(dray_model_config *config, uint32_t value, int64_t number)
{
    char *base = (char *)config;
    if (value >= COUNT(fields))
        config->own[value - COUNT(fields)] = number;
    else if (fields[value].is_flag)
        memcpy(base + fields[value].at, &(int32_t){(int32_t)number}, sizeof(int32_t));
    else
        memcpy(base + fields[value].at, &number, sizeof number);
}

static int64_t value_of(const dray_model_config *config, int64_t value)
{
    const char *base = (const char *)config;
    int64_t number;
    int32_t flag;
    if (value >= (int64_t)COUNT(fields))
        return config->own[value - (int64_t)COUNT(fields)];
    if (!fields[value].is_flag)
        return memcpy(&number, base + fields[value].at, sizeof number), number;
    return memcpy(&flag, base + fields[value].at, sizeof flag), flag;
}

static bool apply(char operator, int64_t a, int64_t b, int64_t *out)
{
    switch (operator) {
    case '+':
        return !__builtin_add_overflow(a, b, out);
    case '-':
        return !__builtin_sub_overflow(a, b, out);
    case '*':
        return !__builtin_mul_overflow(a, b, out);
    default:
        if (b <= 0 || a % b)
            return false;
        *out = a / b;
        return true;
    }
}

int dray__evaluate(const dray__expression *expression, const dray_model_config *config,
                   int64_t *out, dray_error *error)
{
    int64_t stack[DRAY__MOST_STEPS] = {0};
    uint32_t top = 0;
    for (uint32_t i = 0; i < expression->count; i++) {
        char what = expression->steps[i].what;
        int64_t value = expression->steps[i].value;
        if (what == 'n' || what == 'v') {
            stack[top++] = what == 'n' ? value : value_of(config, value);
            continue;
        }
        int64_t a = stack[top - 2], b = stack[top - 1];
        if (!apply(what, a, b, &stack[--top - 1]))
            return dray__fail(error, DRAY_EINVALID,
                              what == '/' ? "%s: %" PRId64 " is not a multiple of %" PRId64
                                          : "%s: %" PRId64 " and %" PRId64 " are too large",
                              expression->text, a, b);
    }
    *out = stack[0];
    return DRAY_OK;
}

/* Evaluates an expression for a configuration that was checked, so it cannot fail. */
static int64_t evaluate(const dray__expression *expression, const dray_model_config *config)
{
    int64_t value = 0;
    dray__evaluate(expression, config, &value, NULL);
    return value;
}

/* ---- parameters ------------------------------------------------------------------------------ */

uint32_t dray__parameter_shape(const dray__parameter *parameter, const dray_model_config *config,
                               int64_t *shape)
{
    for (uint32_t d = 0; d < parameter->ndim; d++)
        shape[d] = evaluate(parameter->shape[d], config);
    return parameter->ndim;
}

bool dray__parameter_used(const dray__parameter *parameter, const dray_model_config *config)
{
    return (!parameter->when || (evaluate(parameter->when, config) == 0) == parameter->unless) &&
           (parameter->layers != DRAY__LAYERS_MTP || config->mtp_layers > 0);
}

int64_t dray__parameter_layers(const dray__parameter *parameter, const dray_model_config *config)
{
    return parameter->each ? evaluate(parameter->each, config) : config->layers;
}

static bool is_in(const uint64_t *layers, int64_t layer)
{
    return layer < DRAY_MODEL_DENSE_WORDS * 64 && layers[layer / 64] >> (layer % 64) & 1;
}

bool dray__layer_is_moe(const dray_model_config *config, int64_t layer)
{
    if (config->experts == 0 || layer < config->first_k_dense)
        return false;
    if (is_in(config->dense_layers, layer))
        return false;
    return config->sparse_step < 2 || (layer + 1) % config->sparse_step == 0;
}

bool dray__parameter_in(const dray__parameter *parameter, const dray_model_config *config,
                        int64_t layer)
{
    if (parameter->each)
        return layer < dray__parameter_layers(parameter, config);
    if (parameter->layers == DRAY__LAYERS_MTP)
        return layer >= config->layers;
    if (parameter->layers >= DRAY__LAYERS_KIND)
        return is_in(config->kind_layers[parameter->kind], layer) ==
               (parameter->layers == DRAY__LAYERS_KIND);
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

/* Writes a number. It is faster than printf, because models have a hundred thousand tensors. */
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

/* Rows of the same layers, and rows of experts, are neighbours. */
static bool same_layers(const dray__parameter *a, const dray__parameter *b)
{
    return dray__parameter_in_layer(a) && dray__parameter_in_layer(b) && a->each == b->each;
}

static bool same_experts(const dray__parameter *a, const dray__parameter *b)
{
    return dray__parameter_of_expert(a) && dray__parameter_of_expert(b);
}

/* Returns the first row of the group that ends with this row. */
static uint32_t group_start(const dray__walk *walk, uint32_t row,
                            bool (*same)(const dray__parameter *, const dray__parameter *))
{
    const dray__parameter *rows = walk->family->parameters;
    while (row > 0 && same(&rows[row - 1], &rows[row]))
        row--;
    return row;
}

static bool ends_group(const dray__walk *walk, uint32_t row,
                       bool (*same)(const dray__parameter *, const dray__parameter *))
{
    const dray__parameter *rows = walk->family->parameters;
    return same(&rows[row], &rows[row]) &&
           (row + 1 == walk->family->count || !same(&rows[row], &rows[row + 1]));
}

/* Advances the walk. After the last row of an expert or a layer it goes back to the first row while
 * more experts or layers are left. After the last row of all it visits the rows of layers again for
 * multi-token prediction. */
static void step(dray__walk *walk)
{
    const dray_model_config *c = walk->config;
    const dray__parameter *rows = walk->family->parameters;
    uint32_t row = walk->next++;
    if (ends_group(walk, row, same_experts)) {
        if (dray__layer_is_moe(c, walk->next_layer) && ++walk->next_expert < c->experts) {
            walk->next = group_start(walk, row, same_experts);
            return;
        }
        walk->next_expert = 0;
    }
    if (ends_group(walk, row, same_layers)) {
        int64_t end = dray__parameter_layers(&rows[row], c) + (walk->beyond ? c->mtp_layers : 0);
        if (++walk->next_layer < end) {
            walk->next = group_start(walk, row, same_layers);
            return;
        }
        walk->next_layer = 0;
        walk->next = walk->beyond ? walk->family->count : walk->next;
    }
    if (walk->next == walk->family->count && c->mtp_layers > 0 && !walk->beyond) {
        walk->beyond = true;
        walk->next_layer = c->layers;
        for (walk->next = 0; !dray__parameter_in_layer(&rows[walk->next]) || rows[walk->next].each;)
            walk->next++;
    }
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
