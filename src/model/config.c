/* Model configurations: a table of public models, and Hugging Face's config.json as transformers 4
 * and 5 write it (configuration_llama.py, configuration_qwen2.py, configuration_qwen3.py). */
#include "model/family.h"

#include "base/error.h"
#include "base/json.h"
#include "base/words.h"

#include <errno.h>
#include <limits.h>
#include <stdio.h>
#include <string.h>
#include <strings.h>
#include <sys/stat.h>

#define COUNT(array) (sizeof(array) / sizeof *(array))

/* The public table; sizes as in the models' config.json at huggingface.co. */
typedef struct known {
    const char *name, *family;
    int64_t vocab, hidden, intermediate, layers, heads, kv_heads, head_dim, positions;
    double eps, theta;
    int tied;
} known;

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
};

const char *dray_model_name(uint32_t index)
{
    return index < COUNT(models) ? models[index].name : NULL;
}

static void from_table(const known *m, dray_model_config *out)
{
    const dray__family *family = dray__family_find(m->family);
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
                               .qkv_bias = family->qkv_bias,
                               .qk_norm = family->qk_norm,
                               .tied = m->tied,
                               .dtype = DRAY_BF16};
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
static double rope_theta(reading *r)
{
    const double absent = 10000; /* RotaryEmbeddingConfigMixin.default_theta */
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
    bool floating =
        dtype == DRAY_F64 || dtype == DRAY_F32 || dtype == DRAY_BF16 || dtype == DRAY_F16;
    if (!floating && !r->status)
        r->status = dray__fail(r->error, DRAY_EUNSUPPORTED,
                               "%.300s: %s '%.40s': expected float64, float32, bfloat16 or float16",
                               r->path, key, name);
    return dtype;
}

/* Keys that give a model other tensors, unless they are missing, null, false, 0 or empty. */
static const char *const changes_tensors[] = {
    "quantization_config", "compression_config",       "num_experts",   "num_local_experts",
    "n_routed_experts",    "num_nextn_predict_layers", "kv_lora_rank",  "pruned_heads",
    "is_encoder_decoder",  "add_cross_attention",      "vision_config", "text_config",
    "head_dim_list",       "num_heads_per_layer",      "block_configs",
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

static int check_keys(const reading *r)
{
    for (size_t i = 0; i < COUNT(changes_tensors); i++)
        if (is_set(json_object_get(r->json, changes_tensors[i])))
            return dray__fail(r->error, DRAY_EUNSUPPORTED,
                              "%.300s: %s changes the model's tensors and is not supported",
                              r->path, changes_tensors[i]);
    const json_t *names = json_object_get(r->json, "architectures");
    const json_t *first = json_is_array(names) ? json_array_get(names, 0) : NULL;
    const char *name = json_string_value(first), *tail = name ? strstr(name, "ForCausalLM") : NULL;
    if (name && (!tail || tail[strlen("ForCausalLM")]))
        return dray__fail(r->error, DRAY_EUNSUPPORTED,
                          "%.300s: architectures: '%.60s': expected one for causal language "
                          "modelling (...ForCausalLM)",
                          r->path, name);
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
    char hint[160];
    dray__family_hint(type, hint, sizeof hint);
    return dray__fail(r->error, DRAY_EUNSUPPORTED, "%.200s: model_type '%.60s' is not supported%s",
                      r->path, type, hint);
}

static int read_config(reading *r, dray_model_config *out)
{
    const dray__family *family = NULL;
    if (!json_is_object(r->json))
        return dray__fail(r->error, DRAY_EFORMAT, "%.300s: expected an object", r->path);
    int status = read_family(r, &family);
    if (!status)
        status = check_keys(r);
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
    /* null says "as many as heads" to every family; a missing key is the family's default. */
    bool silent = !json_object_get(r->json, "num_key_value_heads");
    c.kv_heads = integer(r, "num_key_value_heads",
                         silent && family->default_kv_heads ? family->default_kv_heads
                                                            : (c.heads < 0 ? 0 : c.heads));
    c.head_dim = integer(r, "head_dim", 0);
    if (!get(r->json, "head_dim")) {
        c.head_dim = family->default_head_dim;
        if (!c.head_dim && c.heads > 0 && c.hidden_size % c.heads)
            return dray__fail(r->error, DRAY_EINVALID,
                              "%.300s: hidden_size %lld is not a multiple of num_attention_heads "
                              "%lld, and there is no head_dim",
                              r->path, (long long)c.hidden_size, (long long)c.heads);
        if (!c.head_dim && c.heads > 0)
            c.head_dim = c.hidden_size / c.heads;
    }
    c.max_positions = integer(r, "max_position_embeddings", 2048);
    c.rms_norm_eps = number(r, r->json, "rms_norm_eps", 1e-6);
    c.rope_theta = rope_theta(r);
    c.tied = boolean(r, "tie_word_embeddings", false);
    bool bias = family->bias_keys && boolean(r, "attention_bias", false);
    c.qkv_bias = family->qkv_bias || bias;
    c.o_bias = bias;
    c.mlp_bias = family->mlp_bias_key && boolean(r, "mlp_bias", false);
    c.qk_norm = family->qk_norm;
    c.dtype = (int32_t)checkpoint_dtype(r);
    if (r->status)
        return r->status;
    status = dray__config_check(&c, &family, r->error);
    if (status)
        return dray__fail_prefix(r->error, status, "%.200s: ", r->path);
    *out = c;
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
    struct stat st;
    char path[PATH_MAX], hint[128];
    if (stat(name_or_path, &st) == 0) {
        int n = snprintf(path, sizeof path, "%s%s", name_or_path,
                         S_ISDIR(st.st_mode) ? "/config.json" : "");
        if (n < 0 || (size_t)n >= sizeof path)
            return dray__fail(error, DRAY_EINVALID, "%.300s...: path too long", name_or_path);
        return load_file(path, out, error);
    }
    if (errno != ENOENT && errno != ENOTDIR)
        return dray__fail_errno(error, errno, "%.300s", name_or_path);
    return dray__fail(error, DRAY_ENOENT,
                      "'%.200s' is neither a known model nor a config.json nor a folder with one%s",
                      name_or_path,
                      dray__word_hint(name_or_path, names, COUNT(models), hint, sizeof hint));
}
