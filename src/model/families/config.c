/* Model configurations: a table of public models, and Hugging Face's config.json as transformers 4
 * and 5 write it. The family's file maps keys to values. */
#include "model/families/family.h"

#include "base/error.h"
#include "base/json.h"
#include "base/words.h"
#include "model/layout/layout.h"

#include <errno.h>
#include <inttypes.h>
#include <limits.h>
#include <stdio.h>
#include <string.h>
#include <strings.h>
#include <sys/stat.h>
#include <unistd.h>

#define COUNT(array) (sizeof(array) / sizeof *(array))

/* The public table; sizes as in the models' config.json at huggingface.co. */
typedef struct known_model {
    const char *name, *family;
    int64_t vocab, hidden, intermediate, layers, heads, kv_heads, head_dim, positions;
    double eps, theta;
    int tied;
} known_model;

/* Further sizes of models with experts. */
typedef struct sparse {
    const char *name;
    int qkv_bias, qk_norm; /* for families that do not fix them */
    int64_t experts, expert, shared, first_dense, mtp;
    int64_t q_lora, kv_lora, nope, rope, value;
} sparse;

static const known_model models[] = {
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

static int from_table(const known_model *m, dray_model_config *out, dray_error *error)
{
    static const sparse none;
    const dray__family *family;
    int status = dray__family_find(m->family, &family, error);
    const sparse *more = &none;
    for (size_t i = 0; i < COUNT(sparse_models); i++)
        if (strcmp(sparse_models[i].name, m->name) == 0)
            more = &sparse_models[i];
    if (status)
        return status;
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
                               .qkv_bias = more->qkv_bias,
                               .qk_norm = more->qk_norm,
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
    /* values that the family always has */
    for (uint32_t i = 0; i < family->rule_count; i++) {
        const dray__config_rule *rule = &family->rules[i];
        int64_t value;
        if (!rule->keys[0] && rule->absent->steps[0].what == 'n' && rule->absent->count == 1 &&
            dray__evaluate(rule->absent, out, &value, NULL) == DRAY_OK)
            dray__value_set(out, rule->value, value);
    }
    return DRAY_OK;
}

/* The reading of config.json; the first error is kept. */
typedef struct config_reading {
    const char *path;
    json_t *json;
    const json_t *within; /* the object that is searched first; NULL when there is none */
    int status;
    dray_error *error;
} config_reading;

static const char *type_name(const json_t *value)
{
    static const char *const names[] = {"an object", "a list",     "a string",   "an integer",
                                        "a number",  "true/false", "true/false", "null"};
    return names[json_typeof(value)];
}

/* Returns the value of a key; NULL when it is missing or null. */
static json_t *get(const json_t *json, const char *key)
{
    json_t *value = json_object_get(json, key);
    return json_is_null(value) ? NULL : value;
}

/* Returns the value of a key. The family's own object of the file is searched first; "a.b" and ".b"
 * are looked up only as written. */
static json_t *find(const config_reading *r, const char *key)
{
    char outer[64];
    const char *dot = strchr(key, '.');
    if (!dot)
        return json_object_get(r->within, key) ? json_object_get(r->within, key)
                                               : json_object_get(r->json, key);
    snprintf(outer, sizeof outer, "%.*s", (int)(dot - key), key);
    return json_object_get(*outer ? json_object_get(r->json, outer) : r->json, dot + 1);
}

static json_t *found(const config_reading *r, const char *key)
{
    json_t *value = find(r, key);
    return json_is_null(value) ? NULL : value;
}

static void wrong_type(config_reading *r, const char *key, const char *expected,
                       const json_t *found)
{
    if (!r->status)
        r->status = dray__fail(r->error, DRAY_EFORMAT, "%.300s: %s: expected %s, found %s", r->path,
                               key, expected, type_name(found));
}

/* Reads an integer. absent is the value when the key is missing; when it is negative, the key is
 * required. */
static int64_t integer(config_reading *r, const char *key, int64_t absent)
{
    const json_t *value = found(r, key);
    if (value && json_is_integer(value))
        return json_integer_value(value);
    if (value)
        wrong_type(r, key, "an integer", value);
    else if (absent < 0 && !r->status)
        r->status = dray__fail(r->error, DRAY_EFORMAT, "%.300s: %s is missing", r->path, key);
    return absent;
}

static double number(config_reading *r, const json_t *json, const char *key, double absent)
{
    const json_t *value = get(json, key);
    if (!value)
        return absent;
    if (json_is_number(value))
        return json_number_value(value);
    wrong_type(r, key, "a number", value);
    return absent;
}

static bool boolean(config_reading *r, const char *key, bool absent)
{
    const json_t *value = found(r, key);
    if (!value)
        return absent;
    if (!json_is_boolean(value))
        wrong_type(r, key, "true or false", value);
    return json_is_true(value);
}

static const char *string(config_reading *r, const char *key)
{
    const json_t *value = found(r, key);
    if (value && !json_is_string(value))
        wrong_type(r, key, "a string", value);
    return json_string_value(value);
}

/* Reads rope_theta. transformers 5 nests it, in one object or in one for each kind of layer. */
static double rope_theta(config_reading *r, const dray__family *family)
{
    const double absent = family->default_theta;
    double theta =
        number(r, get(r->within, "rope_theta") ? r->within : r->json, "rope_theta", absent);
    const json_t *nested = found(r, "rope_parameters");
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

static dray_dtype checkpoint_dtype(config_reading *r)
{
    const char *key = found(r, "dtype") ? "dtype" : "torch_dtype";
    const char *name = string(r, key);
    dray_dtype dtype = name ? dray_dtype_parse(name) : DRAY_F32;
    if (!dray__is_float((int32_t)dtype) && !r->status)
        r->status = dray__fail(r->error, DRAY_EUNSUPPORTED,
                               "%.300s: %s '%.40s': expected float64, float32, bfloat16 or float16",
                               r->path, key, name);
    return dtype;
}

/* Keys that change a model's tensors, unless they are missing, null, false, 0 or empty. They are
 * refused unless the family's file mentions them. */
static const char *const changes_tensors[] = {
    "compression_config",
    "num_experts",
    "num_local_experts",
    "n_routed_experts",
    "num_nextn_predict_layers",
    "kv_lora_rank",
    "pruned_heads",
    "is_encoder_decoder",
    "add_cross_attention",
    "vision_config",
    "text_config",
    "audio_config",
    "head_dim_list",
    "num_heads_per_layer",
    "block_configs",
};

/* Returns whether the family's file mentions this key, or a key of the object in it. A family with
 * experts mentions every key that has "experts" in its name. */
static bool speaks_of(const dray__family *family, const char *key)
{
    size_t length = strlen(key);
    if ((family->moe && strstr(key, "experts")) ||
        (family->within && strcmp(family->within, key) == 0))
        return true;
    for (uint32_t i = 0; i < family->rule_count; i++)
        for (size_t k = 0; k < COUNT(family->rules->keys) && family->rules[i].keys[k]; k++)
            if (strncmp(family->rules[i].keys[k], key, length) == 0 &&
                strchr(".", family->rules[i].keys[k][length]))
                return true;
    return false;
}

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

/* FP8 keeps the model's tensors and puts scales beside them. For the formats of compressed-tensors,
 * the model is the one that was compressed. */
static int check_quantisation(const config_reading *r)
{
    const json_t *quant = find(r, "quantization_config");
    quant = is_set(quant) ? quant : json_object_get(r->json, "quantization_config");
    const char *method = json_string_value(json_object_get(quant, "quant_method"));
    if (!is_set(quant) ||
        (method && (strcmp(method, "fp8") == 0 || strcmp(method, "compressed-tensors") == 0)))
        return DRAY_OK;
    return dray__fail(
        r->error, DRAY_EUNSUPPORTED,
        "%.300s: quantization_config: quant_method '%.40s' changes the model's tensors "
        "and is not supported; fp8 and compressed-tensors are",
        r->path, method ? method : "");
}

static int check_keys(const config_reading *r, const dray__family *family)
{
    const char *refused = NULL;
    for (size_t i = 0; i < COUNT(changes_tensors) && !refused; i++)
        if (is_set(find(r, changes_tensors[i])) && !speaks_of(family, changes_tensors[i]))
            refused = changes_tensors[i];
    for (size_t i = 0; i < json_array_size(family->refused) && !refused; i++)
        if (is_set(find(r, json_string_value(json_array_get(family->refused, i)))))
            refused = json_string_value(json_array_get(family->refused, i));
    if (refused)
        return dray__fail(r->error, DRAY_EUNSUPPORTED,
                          "%.300s: %s changes the model's tensors and is not supported", r->path,
                          refused);
    int status = check_quantisation(r);
    if (status)
        return status;
    const json_t *every = json_object_get(r->json, "moe_layer_freq");
    if (every && !(json_is_integer(every) && json_integer_value(every) == 1))
        return dray__fail(r->error, DRAY_EUNSUPPORTED, "%.300s: moe_layer_freq: expected 1",
                          r->path);
    return DRAY_OK;
}

/* Reads the number of labels that the head scores; 0 for a language model. A list of their names
 * has precedence; transformers' default is 2. */
static int read_head(config_reading *r, const dray__family *family, int64_t *labels)
{
    const json_t *names = json_object_get(r->json, "architectures");
    const json_t *of = json_object_get(r->json, "id2label");
    const char *name = json_is_array(names) ? json_string_value(json_array_get(names, 0)) : NULL;
    *labels = 0;
    if (!name || dray__ends_with(name, "ForCausalLM") ||
        (family->within && dray__ends_with(name, "ForConditionalGeneration")))
        return DRAY_OK;
    if (!dray__ends_with(name, "ForTokenClassification"))
        return dray__fail(r->error, DRAY_EUNSUPPORTED,
                          "%.300s: architectures: '%.60s': expected one for causal language "
                          "modelling (...ForCausalLM), or one that scores tokens "
                          "(...ForTokenClassification)",
                          r->path, name);
    *labels = json_is_object(of) ? (int64_t)json_object_size(of) : integer(r, "num_labels", 2);
    if (!r->status && *labels < 1)
        r->status =
            dray__fail(r->error, DRAY_EINVALID,
                       "%.300s: num_labels is %" PRId64 ", expected at least 1", r->path, *labels);
    return r->status;
}

static int read_family(config_reading *r, const dray__family **family)
{
    const char *type = string(r, "model_type");
    if (r->status)
        return r->status;
    if (!type)
        return dray__fail(r->error, DRAY_EFORMAT, "%.300s: model_type is missing", r->path);
    int status = dray__family_find(type, family, r->error);
    if (status == DRAY_EUNSUPPORTED)
        return dray__fail_prefix(r->error, status, "%.200s: ", r->path);
    if (!status && (*family)->within)
        r->within = json_object_get(r->json, (*family)->within);
    return status;
}

/* Sets the layer's bit. A number out of range, which only a made-up file has, is an error. */
static void set_layer(config_reading *r, const char *key, uint64_t *layers, json_int_t layer)
{
    enum { MOST = DRAY_MODEL_DENSE_WORDS * 64 };
    if (layer >= 0 && layer < MOST)
        layers[layer / 64] |= UINT64_C(1) << (layer % 64);
    else if (!r->status)
        r->status =
            dray__fail(r->error, DRAY_EUNSUPPORTED, "%.300s: %s: layer %lld, expected 0 to %d",
                       r->path, key, (long long)layer, MOST - 1);
}

static const json_t *list_of(config_reading *r, const char *key)
{
    const json_t *list = key ? found(r, key) : NULL;
    if (list && !json_is_array(list))
        wrong_type(r, key, "a list", list);
    return list;
}

/* Sets the bits of the layers that a list names, or of all others. */
static void read_numbers(config_reading *r, const char *key, bool others, int64_t layers,
                         uint64_t *out)
{
    uint64_t named[DRAY_MODEL_DENSE_WORDS] = {0};
    const json_t *list = list_of(r, key), *item;
    size_t n;
    json_array_foreach(list, n, item)
    {
        if (json_is_integer(item))
            set_layer(r, key, named, json_integer_value(item));
        else
            wrong_type(r, key, "a list of integers", item);
    }
    for (int64_t layer = 0; list && layer < DRAY_MODEL_DENSE_WORDS * 64; layer++)
        if (others ? layer < layers && !(named[layer / 64] >> (layer % 64) & 1)
                   : named[layer / 64] >> (layer % 64) & 1)
            set_layer(r, key, out, layer);
}

/* Returns whether the text is the word or, for "!word", another one. */
static bool is_word(const char *text, const char *word)
{
    return *word == '!' ? strcmp(text, word + 1) != 0 : strcmp(text, word) == 0;
}

static void wrong_length(config_reading *r, const char *key, int64_t layers, size_t found)
{
    if ((int64_t)found != layers && !r->status)
        r->status = dray__fail(r->error, DRAY_EFORMAT,
                               "%.300s: %s: expected one for each of %lld layers, found %zu",
                               r->path, key, (long long)layers, found);
}

/* Reads a list of numbers, one for each layer; those after the last layer are of multi-token
 * prediction. */
static void read_signs(config_reading *r, const dray__kind *kind, const json_t *signs,
                       const dray_model_config *c, uint64_t *out)
{
    const json_t *item;
    size_t n;
    json_array_foreach(signs, n, item)
    {
        char text[24];
        snprintf(text, sizeof text, "%" JSON_INTEGER_FORMAT, json_integer_value(item));
        if (!json_is_integer(item))
            wrong_type(r, kind->signs, "a list of integers", item);
        else if ((int64_t)n < c->layers && is_word(text, kind->sign))
            set_layer(r, kind->signs, out, (json_int_t)n);
    }
    if ((int64_t)json_array_size(signs) < c->layers)
        wrong_length(r, kind->signs, c->layers, json_array_size(signs));
}

/* Reads a list of words, or a text or list of signs. Returns true when the file has one. */
static bool read_words(config_reading *r, const dray__kind *kind, const dray_model_config *c,
                       uint64_t *out)
{
    const json_t *words = list_of(r, kind->each), *item;
    const json_t *listed = kind->signs && !words ? found(r, kind->signs) : NULL;
    if (json_is_array(listed)) {
        read_signs(r, kind, listed, c, out);
        return true;
    }
    const char *signs = listed ? string(r, kind->signs) : NULL;
    size_t n;
    json_array_foreach(words, n, item)
    {
        if (!json_is_string(item))
            wrong_type(r, kind->each, "a list of words", item);
        else if (is_word(json_string_value(item), kind->is))
            set_layer(r, kind->each, out, (json_int_t)n);
    }
    for (n = 0; signs && signs[n] && !r->status; n++)
        if (is_word((char[]){signs[n], 0}, kind->sign))
            set_layer(r, kind->signs, out, (json_int_t)n);
    if (words || signs)
        wrong_length(r, words ? kind->each : kind->signs, c->layers,
                     words ? json_array_size(words) : n);
    return words || signs;
}

static void read_kind(config_reading *r, const dray__family *family, uint32_t i,
                      dray_model_config *c)
{
    const dray__kind *kind = &family->kinds[i];
    bool is_dense = i == DRAY__DENSE_KIND;
    uint64_t *out = is_dense ? c->dense_layers : c->kind_layers[i];
    if (kind->numbers)
        read_numbers(r, kind->numbers, false, c->layers, out);
    if (kind->others)
        read_numbers(r, kind->others, true, c->layers, out);
    bool said = read_words(r, kind, c, out);
    /* a list names all layers, so the older keys for dense layers are ignored */
    if (is_dense && (said || (kind->others && found(r, kind->others))))
        c->first_k_dense = c->sparse_step = 0;
    int64_t every = kind->every && !said ? integer(r, kind->every, kind->absent) : 0;
    /* With 1 there are none, and nothing ends a walk over a number of layers not yet checked. */
    for (int64_t layer = 0; every > 1 && layer < c->layers && !r->status; layer++)
        if ((layer + 1) % every)
            set_layer(r, kind->every, out, layer);
    int64_t first = kind->first && !said ? integer(r, kind->first, kind->absent) : 0;
    for (int64_t layer = 0; layer < first && layer < c->layers && !r->status; layer++)
        set_layer(r, kind->first, out, layer);
}

static void read_value(config_reading *r, const dray__config_rule *rule, dray_model_config *c)
{
    const char *key = rule->keys[0];
    int64_t value = 0;
    for (size_t i = 1; i < COUNT(rule->keys) && rule->keys[i] && !found(r, key); i++)
        if (found(r, rule->keys[i]))
            key = rule->keys[i];
    const json_t *json = key ? find(r, key) : NULL;
    const dray__expression *absent = json && rule->null ? rule->null : rule->absent;
    if (rule->is_list && json_is_array(json))
        value = (int64_t)json_array_size(json);
    else if (rule->is_list && json && !json_is_null(json))
        wrong_type(r, key, "a list", json);
    else if (json && !json_is_null(json))
        value = rule->is_flag ? boolean(r, key, false) : integer(r, key, 0);
    else if (!absent)
        integer(r, key, -1);
    else if (dray__evaluate(absent, c, &value, r->status ? NULL : r->error) && !r->status)
        r->status = dray__fail_prefix(r->error, DRAY_EINVALID, "%.200s: ", r->path);
    dray__value_set(c, rule->value, value);
}

static int read_config(config_reading *r, dray_model_config *out)
{
    const dray__family *family = NULL;
    if (!json_is_object(r->json))
        return dray__fail(r->error, DRAY_EFORMAT, "%.300s: expected an object", r->path);
    int status = read_family(r, &family);
    if (!status)
        status = check_keys(r, family);
    if (status)
        return status;
    dray_model_config c = {
        .rms_norm_eps =
            number(r, get(r->within, "rms_norm_eps") ? r->within : r->json, "rms_norm_eps", 1e-6),
        .rope_theta = rope_theta(r, family)};
    snprintf(c.family, sizeof c.family, "%s", family->name);
    for (uint32_t i = 0; i < family->rule_count && !r->status; i++)
        read_value(r, &family->rules[i], &c);
    for (uint32_t i = 0; i < DRAY__MOST_KINDS && !r->status; i++)
        if (family->kinds[i].name)
            read_kind(r, family, i, &c);
    c.dtype = (int32_t)checkpoint_dtype(r);
    if (r->status)
        return r->status;
    status = read_head(r, family, &c.labels);
    if (status)
        return status;
    if (c.labels) /* such a model in transformers does not have these parameters */
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
    config_reading r = {.path = path, .error = error};
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
            return from_table(&models[i], out, error);
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
