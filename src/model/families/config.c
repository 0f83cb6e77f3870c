/* Model configurations: a table of public models, and Hugging Face's config.json as transformers 4
 * and 5 write it (configuration_llama.py, configuration_qwen2.py, configuration_qwen3.py,
 * configuration_qwen3_moe.py, configuration_mixtral.py, configuration_deepseek_v3.py,
 * configuration_glm4_moe.py). */
#include "model/families/family.h"

#include "base/error.h"
#include "base/json.h"
#include "base/words.h"
#include "model/layout/layout.h"

#include <errno.h>
#include <limits.h>
#include <stdio.h>
#include <string.h>
#include <strings.h>
#include <sys/stat.h>
#include <unistd.h>

#define COUNT(array) (sizeof(array) / sizeof *(array))

/* The public table; sizes as in the models' config.json at huggingface.co. */
typedef struct known {
    const char *name, *family;
    int64_t vocab, hidden, intermediate, layers, heads, kv_heads, head_dim, positions;
    double eps, theta;
    int tied;
} known;

/* What more there is to say of models with experts. */
typedef struct sparse {
    const char *name;
    int qkv_bias, qk_norm; /* where the family leaves them open */
    int64_t experts, expert, shared, first_dense, mtp;
    int64_t q_lora, kv_lora, nope, rope, value;
} sparse;

static const known models[] = {
    {"qwen2.5-0.5b", "qwen2", 151936, 896, 4864, 24, 14, 2, 64, 32768, 1e-6, 1e6, 1},
    {"qwen2.5-1.5b", "qwen2", 151936, 1536, 8960, 28, 12, 2, 128, 131072, 1e-6, 1e6, 1},
    {"qwen2.5-3b", "qwen2", 151936, 2048, 11008, 36, 16, 2, 128, 32768, 1e-6, 1e6, 1},
    {"qwen2.5-7b", "qwen2", 152064, 3584, 18944, 28, 28, 4, 128, 131072, 1e-6, 1e6, 0},
    {"qwen2.5-14b", "qwen2", 152064, 5120, 13824, 48, 40, 8, 128, 131072, 1e-5, 1e6, 0},
    {"qwen2.5-32b", "qwen2", 152064, 5120, 27648, 64, 40, 8, 128, 131072, 1e-5, 1e6, 0},
    {"qwen2.5-72b", "qwen2", 152064, 8192, 29568, 80, 64, 8, 128, 131072, 1e-5, 1e6, 0},
    {"llama-3.1-8b", "llama", 128256, 4096, 14336, 32, 32, 8, 128, 131072, 1e-5, 5e5, 0},
    {"llama-3.1-70b", "llama", 128256, 8192, 28672, 80, 64, 8, 128, 131072, 1e-5, 5e5, 0},
    {"llama-3.2-1b", "llama", 128256, 2048, 8192, 16, 32, 8, 64, 131072, 1e-5, 5e5, 1},
    {"llama-3.2-3b", "llama", 128256, 3072, 8192, 28, 24, 8, 128, 131072, 1e-5, 5e5, 1},
    {"qwen3-0.6b", "qwen3", 151936, 1024, 3072, 28, 16, 8, 128, 40960, 1e-6, 1e6, 1},
    {"qwen3-1.7b", "qwen3", 151936, 2048, 6144, 28, 16, 8, 128, 40960, 1e-6, 1e6, 1},
    {"qwen3-4b", "qwen3", 151936, 2560, 9728, 36, 32, 8, 128, 40960, 1e-6, 1e6, 1},
    {"qwen3-8b", "qwen3", 151936, 4096, 12288, 36, 32, 8, 128, 40960, 1e-6, 1e6, 0},
    {"qwen3-14b", "qwen3", 151936, 5120, 17408, 40, 40, 8, 128, 40960, 1e-6, 1e6, 0},
    {"qwen3-32b", "qwen3", 151936, 5120, 25600, 64, 64, 8, 128, 40960, 1e-6, 1e6, 0},
    {"qwen3-30b-a3b", "qwen3_moe", 151936, 2048, 6144, 48, 32, 4, 128, 40960, 1e-6, 1e6, 0},
    {"qwen3-235b-a22b", "qwen3_moe", 151936, 4096, 12288, 94, 64, 4, 128, 40960, 1e-6, 1e6, 0},
    {"mixtral-8x7b", "mixtral", 32000, 4096, 14336, 32, 32, 8, 128, 32768, 1e-5, 1e6, 0},
    {"deepseek-v3", "deepseek_v3", 129280, 7168, 18432, 61, 128, 128, 192, 163840, 1e-6, 1e4, 0},
    {"kimi-k2", "kimi_k2", 163840, 7168, 18432, 61, 64, 64, 192, 131072, 1e-6, 5e4, 0},
    {"glm-4.5", "glm4_moe", 151552, 5120, 12288, 92, 96, 8, 128, 131072, 1e-5, 1e6, 0},
};

static const sparse sparse_models[] = {
    {"qwen3-30b-a3b", 0, 0, 128, 768, 0, 0, 0, 0, 0, 0, 0, 0},
    {"qwen3-235b-a22b", 0, 0, 128, 1536, 0, 0, 0, 0, 0, 0, 0, 0},
    {"mixtral-8x7b", 0, 0, 8, 14336, 0, 0, 0, 0, 0, 0, 0, 0},
    {"deepseek-v3", 0, 0, 256, 2048, 1, 3, 1, 1536, 512, 128, 64, 128},
    {"kimi-k2", 0, 0, 384, 2048, 1, 1, 0, 1536, 512, 128, 64, 128},
    {"glm-4.5", 1, 1, 160, 1536, 1, 3, 1, 0, 0, 0, 0, 0},
};

const char *dray_model_name(uint32_t index)
{
    return index < COUNT(models) ? models[index].name : NULL;
}

static void from_table(const known *m, dray_model_config *out)
{
    static const sparse none;
    const dray__family *family = dray__family_find(m->family);
    const sparse *more = &none;
    for (size_t i = 0; i < COUNT(sparse_models); i++)
        if (strcmp(sparse_models[i].name, m->name) == 0)
            more = &sparse_models[i];
    *out = (dray_model_config){.vocab_size = m->vocab,
                               .hidden_size = m->hidden,
                               .intermediate_size = m->intermediate,
                               .layers = m->layers,
                               .heads = m->heads,
                               .kv_heads = m->kv_heads,
                               .head_dim = m->head_dim,
                               .max_positions = m->positions,
                               .rms_norm_eps = m->eps,
                               .rope_theta = m->theta,
                               .qkv_bias = family->qkv_bias || more->qkv_bias,
                               .qk_norm = family->qk_norm || more->qk_norm,
                               .tied = m->tied,
                               .dtype = DRAY_BF16,
                               .experts = more->experts,
                               .moe_intermediate_size = more->expert,
                               .shared_experts = more->shared,
                               .first_k_dense = more->first_dense,
                               .q_lora_rank = more->q_lora,
                               .kv_lora_rank = more->kv_lora,
                               .qk_nope_head_dim = more->nope,
                               .qk_rope_head_dim = more->rope,
                               .v_head_dim = more->value,
                               .mtp_layers = more->mtp};
    snprintf(out->family, sizeof out->family, "%s", m->family);
}

/* config.json being read; the first error stays. */
typedef struct reading {
    const char *path;
    json_t *json;
    int status;
    dray_error *error;
} reading;

static const char *type_name(const json_t *value)
{
    static const char *const names[] = {"an object", "a list",     "a string",   "an integer",
                                        "a number",  "true/false", "true/false", "null"};
    return names[json_typeof(value)];
}

/* The value of a key; NULL where it is missing or null. */
static json_t *get(const json_t *json, const char *key)
{
    json_t *value = json_object_get(json, key);
    return json_is_null(value) ? NULL : value;
}

static void wrong_type(reading *r, const char *key, const char *expected, const json_t *found)
{
    if (!r->status)
        r->status = dray__fail(r->error, DRAY_EFORMAT, "%.300s: %s: expected %s, found %s", r->path,
                               key, expected, type_name(found));
}

/* absent: the value where the key is missing; negative: it must be there. */
static int64_t integer(reading *r, const char *key, int64_t absent)
{
    const json_t *value = get(r->json, key);
    if (value && json_is_integer(value))
        return json_integer_value(value);
    if (value)
        wrong_type(r, key, "an integer", value);
    else if (absent < 0 && !r->status)
        r->status = dray__fail(r->error, DRAY_EFORMAT, "%.300s: %s is missing", r->path, key);
    return absent;
}

static double number(reading *r, const json_t *json, const char *key, double absent)
{
    const json_t *value = get(json, key);
    if (!value)
        return absent;
    if (json_is_number(value))
        return json_number_value(value);
    wrong_type(r, key, "a number", value);
    return absent;
}

static bool boolean(reading *r, const char *key, bool absent)
{
    const json_t *value = get(r->json, key);
    if (!value)
        return absent;
    if (!json_is_boolean(value))
        wrong_type(r, key, "true or false", value);
    return json_is_true(value);
}

static const char *string(reading *r, const char *key)
{
    const json_t *value = get(r->json, key);
    if (value && !json_is_string(value))
        wrong_type(r, key, "a string", value);
    return json_string_value(value);
}

/* transformers 5 nests it, in one object or in one for each kind of layer. */
static double rope_theta(reading *r, const dray__family *family)
{
    /* RotaryEmbeddingConfigMixin.default_theta */
    const double absent = family->default_theta > 0 ? family->default_theta : 10000;
    double theta = number(r, r->json, "rope_theta", absent);
    const json_t *nested = get(r->json, "rope_parameters");
    if (nested && !json_is_object(nested)) {
        wrong_type(r, "rope_parameters", "an object", nested);
        return absent;
    }
    const char *key;
    json_t *value;
    json_object_foreach((json_t *)nested, key, value)
    {
        if (json_is_object(value) && get(value, "rope_theta"))
            return number(r, value, "rope_theta", theta);
    }
    return number(r, nested, "rope_theta", theta);
}

static dray_dtype checkpoint_dtype(reading *r)
{
    const char *key = get(r->json, "dtype") ? "dtype" : "torch_dtype";
    const char *name = string(r, key);
    dray_dtype dtype = name ? dray_dtype_parse(name) : DRAY_F32;
    if (!dray__is_float((int32_t)dtype) && !r->status)
        r->status = dray__fail(r->error, DRAY_EUNSUPPORTED,
                               "%.300s: %s '%.40s': expected float64, float32, bfloat16 or float16",
                               r->path, key, name);
    return dtype;
}

/* Keys that give a model other tensors, unless they are missing, null, false, 0 or empty, or the
 * family has what they speak of. */
static const struct {
    const char *key;
    enum { FOR_NONE, FOR_MOE, FOR_LATENT, FOR_MTP } known_to;
} changes_tensors[] = {
    {"compression_config", FOR_NONE},
    {"num_experts", FOR_MOE},
    {"num_local_experts", FOR_MOE},
    {"n_routed_experts", FOR_MOE},
    {"num_nextn_predict_layers", FOR_MTP},
    {"kv_lora_rank", FOR_LATENT},
    {"pruned_heads", FOR_NONE},
    {"is_encoder_decoder", FOR_NONE},
    {"add_cross_attention", FOR_NONE},
    {"vision_config", FOR_NONE},
    {"text_config", FOR_NONE},
    {"head_dim_list", FOR_NONE},
    {"num_heads_per_layer", FOR_NONE},
    {"block_configs", FOR_NONE},
};

static bool is_set(const json_t *value)
{
    if (json_is_object(value))
        return json_object_size(value) > 0;
    if (json_is_array(value))
        return json_array_size(value) > 0;
    if (json_is_number(value))
        return json_number_value(value) != 0;
    return value && !json_is_null(value) && !json_is_false(value);
}

/* FP8 keeps the model's tensors and puts scales beside them. */
static int check_quantisation(const reading *r)
{
    const json_t *quant = json_object_get(r->json, "quantization_config");
    const char *method = json_string_value(json_object_get(quant, "quant_method"));
    if (!is_set(quant) || (method && strcmp(method, "fp8") == 0))
        return DRAY_OK;
    return dray__fail(
        r->error, DRAY_EUNSUPPORTED,
        "%.300s: quantization_config: quant_method '%.40s' changes the model's tensors "
        "and is not supported; fp8 is",
        r->path, method ? method : "");
}

static int check_keys(const reading *r, const dray__family *family)
{
    const bool has[] = {[FOR_NONE] = false,
                        [FOR_MOE] = family->moe,
                        [FOR_LATENT] = family->latent,
                        [FOR_MTP] = family->mtp};
    for (size_t i = 0; i < COUNT(changes_tensors); i++)
        if (!has[changes_tensors[i].known_to] &&
            is_set(json_object_get(r->json, changes_tensors[i].key)))
            return dray__fail(r->error, DRAY_EUNSUPPORTED,
                              "%.300s: %s changes the model's tensors and is not supported",
                              r->path, changes_tensors[i].key);
    int status = check_quantisation(r);
    if (status)
        return status;
    const json_t *every = json_object_get(r->json, "moe_layer_freq");
    if (every && !(json_is_integer(every) && json_integer_value(every) == 1))
        return dray__fail(r->error, DRAY_EUNSUPPORTED, "%.300s: moe_layer_freq: expected 1",
                          r->path);
    if (family->latent && is_set(json_object_get(r->json, "attention_bias")))
        return dray__fail(r->error, DRAY_EUNSUPPORTED,
                          "%.300s: attention_bias is not supported with latent attention", r->path);
    return DRAY_OK;
}

/* How many labels the head scores; 0: it is a language model's. transformers' default is 2. */
static int read_head(const reading *r, int64_t *labels)
{
    const json_t *names = json_object_get(r->json, "architectures");
    const json_t *of = json_object_get(r->json, "id2label");
    const char *name = json_is_array(names) ? json_string_value(json_array_get(names, 0)) : NULL;
    *labels = 0;
    if (!name || dray__ends_with(name, "ForCausalLM"))
        return DRAY_OK;
    if (!dray__ends_with(name, "ForTokenClassification"))
        return dray__fail(r->error, DRAY_EUNSUPPORTED,
                          "%.300s: architectures: '%.60s': expected one for causal language "
                          "modelling (...ForCausalLM), or one that scores tokens "
                          "(...ForTokenClassification)",
                          r->path, name);
    *labels = json_is_object(of) ? (int64_t)json_object_size(of) : 2;
    return DRAY_OK;
}

static int read_family(reading *r, const dray__family **family)
{
    const char *type = string(r, "model_type");
    if (r->status)
        return r->status;
    if (!type)
        return dray__fail(r->error, DRAY_EFORMAT, "%.300s: model_type is missing", r->path);
    *family = dray__family_find(type);
    if (*family)
        return DRAY_OK;
    char hint[DRAY__FAMILY_HINT];
    dray__family_hint(type, hint, sizeof hint);
    return dray__fail(
        r->error, DRAY_EUNSUPPORTED,
        "%.200s: model_type '%.60s' is not supported%s (dray.weights.record() of Python "
        "lays out any model, by its engine's own loader)",
        r->path, type, hint);
}

/* mlp_only_layers: numbers of layers. */
static void read_dense_layers(reading *r, dray_model_config *c)
{
    enum { MOST = DRAY_MODEL_DENSE_WORDS * 64 };
    const json_t *list = get(r->json, "mlp_only_layers"), *item;
    size_t i;
    if (list && !json_is_array(list))
        wrong_type(r, "mlp_only_layers", "a list", list);
    json_array_foreach(list, i, item)
    {
        json_int_t layer = json_integer_value(item);
        if (!json_is_integer(item))
            wrong_type(r, "mlp_only_layers", "a list of integers", item);
        else if (layer < 0 || layer >= MOST)
            r->status = r->status ? r->status
                                  : dray__fail(r->error, DRAY_EUNSUPPORTED,
                                               "%.300s: mlp_only_layers: layer %lld, expected 0 to "
                                               "%d",
                                               r->path, (long long)layer, MOST - 1);
        else
            c->dense_layers[layer / 64] |= UINT64_C(1) << (layer % 64);
    }
}

static void read_experts(reading *r, const dray__family *family, dray_model_config *c)
{
    const char *count = family->experts_keys[0], *other = family->experts_keys[1];
    if (!family->moe)
        return;
    c->experts =
        integer(r, other && !get(r->json, count) && get(r->json, other) ? other : count, -1);
    c->moe_intermediate_size =
        family->expert_size_key ? integer(r, family->expert_size_key, -1) : c->intermediate_size;
    if (family->first_dense_key) {
        c->first_k_dense = integer(r, "first_k_dense_replace", family->default_first_dense);
        c->shared_experts = integer(r, "n_shared_experts", 1);
    }
    if (family->dense_keys) {
        c->sparse_step = integer(r, "decoder_sparse_step", 1);
        read_dense_layers(r, c);
    }
    if (family->mtp)
        c->mtp_layers = integer(r, "num_nextn_predict_layers", 0);
}

static void read_latent(reading *r, dray_model_config *c)
{
    c->q_lora_rank = integer(r, "q_lora_rank", 0); /* null: one step */
    c->kv_lora_rank = integer(r, "kv_lora_rank", -1);
    c->qk_nope_head_dim = integer(r, "qk_nope_head_dim", -1);
    c->qk_rope_head_dim = integer(r, "qk_rope_head_dim", -1);
    c->v_head_dim = integer(r, "v_head_dim", -1);
    c->kv_heads = c->heads;
    if (!r->status &&
        __builtin_add_overflow(c->qk_nope_head_dim, c->qk_rope_head_dim, &c->head_dim))
        r->status =
            dray__fail(r->error, DRAY_EINVALID,
                       "%.300s: qk_nope_head_dim %lld and qk_rope_head_dim %lld are too "
                       "large",
                       r->path, (long long)c->qk_nope_head_dim, (long long)c->qk_rope_head_dim);
}

/* Heads of grouped-query attention. */
static int read_heads(reading *r, const dray__family *family, dray_model_config *c)
{
    /* null says "as many as heads" to every family; a missing key is the family's default. */
    bool silent = !json_object_get(r->json, "num_key_value_heads");
    c->kv_heads = integer(r, "num_key_value_heads",
                          silent && family->default_kv_heads ? family->default_kv_heads
                                                             : (c->heads < 0 ? 0 : c->heads));
    c->head_dim = integer(r, "head_dim", 0);
    if (!get(r->json, "head_dim")) {
        c->head_dim = family->default_head_dim;
        if (!c->head_dim && c->heads > 0 && c->hidden_size % c->heads)
            return dray__fail(r->error, DRAY_EINVALID,
                              "%.300s: hidden_size %lld is not a multiple of num_attention_heads "
                              "%lld, and there is no head_dim",
                              r->path, (long long)c->hidden_size, (long long)c->heads);
        if (!c->head_dim && c->heads > 0)
            c->head_dim = c->hidden_size / c->heads;
    }
    return DRAY_OK;
}

static int read_config(reading *r, dray_model_config *out)
{
    const dray__family *family = NULL;
    if (!json_is_object(r->json))
        return dray__fail(r->error, DRAY_EFORMAT, "%.300s: expected an object", r->path);
    int status = read_family(r, &family);
    if (!status)
        status = check_keys(r, family);
    if (status)
        return status;
    dray_model_config c = {.vocab_size = integer(r, "vocab_size", -1),
                           .hidden_size = integer(r, "hidden_size", -1),
                           .intermediate_size = integer(r, "intermediate_size", -1),
                           .layers = integer(r, "num_hidden_layers", -1),
                           .heads = integer(r, "num_attention_heads", -1)};
    if (r->status)
        return r->status;
    snprintf(c.family, sizeof c.family, "%s", family->name);
    if (family->latent)
        read_latent(r, &c);
    else
        status = read_heads(r, family, &c);
    if (status)
        return status;
    read_experts(r, family, &c);
    c.max_positions = integer(r, "max_position_embeddings", 2048);
    c.rms_norm_eps = number(r, r->json, "rms_norm_eps", 1e-6);
    c.rope_theta = rope_theta(r, family);
    c.tied = boolean(r, "tie_word_embeddings", false);
    bool bias = family->bias_key && boolean(r, "attention_bias", false);
    c.qkv_bias = family->qkv_bias || bias;
    c.o_bias = bias && family->o_bias_key;
    c.mlp_bias = family->mlp_bias_key && boolean(r, "mlp_bias", false);
    c.qk_norm = family->qk_norm || (family->qk_norm_key && boolean(r, "use_qk_norm", false));
    c.dtype = (int32_t)checkpoint_dtype(r);
    if (r->status)
        return r->status;
    status = read_head(r, &c.labels);
    if (status)
        return status;
    if (c.labels) /* what transformers leaves out of such a model */
        c.mtp_layers = 0;
    status = dray__config_check(&c, &family, r->error);
    if (status)
        return dray__fail_prefix(r->error, status, "%.200s: ", r->path);
    *out = c;
    return DRAY_OK;
}

int dray__config_path(const char *path, char *out, dray_error *error)
{
    struct stat st;
    bool folder = stat(path, &st) == 0 && S_ISDIR(st.st_mode);
    int n = snprintf(out, PATH_MAX, "%s%s", path, folder ? "/config.json" : "");
    if (n < 0 || n >= PATH_MAX)
        return dray__fail(error, DRAY_EINVALID, "%.300s...: path too long", path);
    return DRAY_OK;
}

static int load_file(const char *path, dray_model_config *out, dray_error *error)
{
    enum { LARGEST = 16 << 20 };
    reading r = {.path = path, .error = error};
    int status = dray__json_load(path, LARGEST, &r.json, error);
    if (!status)
        status = read_config(&r, out);
    json_decref(r.json);
    return status;
}

int dray_model_config_load(const char *name_or_path, dray_model_config *out, dray_error *error)
{
    const char *names[COUNT(models)];
    for (size_t i = 0; i < COUNT(models); i++) {
        if (strcasecmp(models[i].name, name_or_path) == 0) {
            from_table(&models[i], out);
            return DRAY_OK;
        }
        names[i] = models[i].name;
    }
    char path[PATH_MAX], hint[128];
    if (access(name_or_path, F_OK) == 0) {
        int status = dray__config_path(name_or_path, path, error);
        return status ? status : load_file(path, out, error);
    }
    if (errno != ENOENT && errno != ENOTDIR)
        return dray__fail_errno(error, errno, "%.300s", name_or_path);
    return dray__fail(error, DRAY_ENOENT,
                      "'%.200s' is neither a known model nor a config.json nor a folder with one%s",
                      name_or_path,
                      dray__word_hint(name_or_path, names, COUNT(models), hint, sizeof hint));
}
