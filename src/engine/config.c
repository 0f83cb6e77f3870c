/* The part of a model's config.json that the engine computes, and the config.json that it
 * writes. */
#include "engine/engine.h"

#include "base/error.h"
#include "base/json.h"

#include <inttypes.h>
#include <limits.h>
#include <stdbool.h>
#include <stdio.h>
#include <string.h>
#include <strings.h>
#include <sys/stat.h>

#define COUNT(array) (sizeof(array) / sizeof *(array))

/* Keys that change the computation and that the engine has no code for, with the only value that
 * they may have besides being absent or null. */
enum expected { ABSENT, FALSE, ZERO, ONE, SILU };

static const struct {
    const char *key;
    enum expected expected;
    const char *text;
} keys[] = {
    {"hidden_act", SILU, "\"silu\""},
    {"use_sliding_window", FALSE, "false"},
    {"attention_bias", FALSE, "false"},
    {"mlp_bias", FALSE, "false"},
    {"attention_dropout", ZERO, "0"},
    {"partial_rotary_factor", ONE, "1"},
    {"quantization_config", ABSENT, "none"},
    {"attn_logit_softcapping", ABSENT, "none"},
    {"final_logit_softcapping", ABSENT, "none"},
    {"query_pre_attn_scalar", ABSENT, "none"},
    {"clip_qkv", ABSENT, "none"},
    {"embedding_multiplier", ONE, "1"},
    {"residual_multiplier", ONE, "1"},
    {"attention_multiplier", ABSENT, "none"},
    {"logits_scaling", ONE, "1"},
    {"logit_scale", ONE, "1"},
};

static bool as_expected(const json_t *value, enum expected expected)
{
    if (!value || json_is_null(value))
        return true;
    switch (expected) {
    case ABSENT:
        return false;
    case FALSE:
        return json_is_false(value);
    case ZERO:
        return json_is_number(value) && json_number_value(value) == 0;
    case ONE:
        return json_is_number(value) && json_number_value(value) == 1;
    case SILU:
        return json_is_string(value) && strcmp(json_string_value(value), "silu") == 0;
    }
    return false;
}

static int unsupported(const char *path, const char *key, const json_t *value, const char *expected,
                       dray_error *error)
{
    char found[80];
    size_t size = json_dumpb(value, found, sizeof found - 1, JSON_ENCODE_ANY | JSON_COMPACT);
    if (size > sizeof found - 1)
        memcpy(found, "...", size = 3);
    found[size] = 0;
    return dray__fail(error, DRAY_EUNSUPPORTED,
                      "%.200s: the engine does not compute %s = %s (expected %s)", path, key, found,
                      expected);
}

/* Checks rope_scaling (transformers 4) and rope_parameters (5): only the plain rotary embedding is
 * computed. */
static int check_rope(const char *path, const char *key, const json_t *value, dray_error *error)
{
    if (!json_is_object(value))
        return value && !json_is_null(value) ? unsupported(path, key, value, "null", error)
                                             : DRAY_OK;
    const char *name;
    json_t *entry;
    json_object_foreach((json_t *)value, name, entry)
    {
        bool type = strcmp(name, "rope_type") == 0 || strcmp(name, "type") == 0;
        bool plain =
            type && json_is_string(entry) && strcmp(json_string_value(entry), "default") == 0;
        bool whole = strcmp(name, "partial_rotary_factor") == 0 && as_expected(entry, ONE);
        if (!plain && !whole && strcmp(name, "rope_theta") != 0)
            return unsupported(path, key, value, "rope_type \"default\"", error);
    }
    return DRAY_OK;
}

/* Checks sliding_window, which is in use unless use_sliding_window is present and false (Qwen
 * writes both). */
static int check_window(const char *path, const json_t *json, dray_error *error)
{
    const json_t *window = json_object_get(json, "sliding_window");
    if (window && !json_is_null(window) && !json_object_get(json, "use_sliding_window"))
        return unsupported(path, "sliding_window", window, "null", error);
    const json_t *types = json_object_get(json, "layer_types");
    for (size_t i = 0; i < json_array_size(types); i++) {
        const char *type = json_string_value(json_array_get(types, i));
        if (!type || strcmp(type, "full_attention") != 0)
            return unsupported(path, "layer_types", types, "full_attention alone", error);
    }
    return DRAY_OK;
}

static int check_keys(const char *path, const json_t *json, dray_error *error)
{
    for (size_t i = 0; i < COUNT(keys); i++) {
        const json_t *value = json_object_get(json, keys[i].key);
        if (!as_expected(value, keys[i].expected))
            return unsupported(path, keys[i].key, value, keys[i].text, error);
    }
    int code = check_rope(path, "rope_scaling", json_object_get(json, "rope_scaling"), error);
    if (code == DRAY_OK)
        code = check_rope(path, "rope_parameters", json_object_get(json, "rope_parameters"), error);
    return code == DRAY_OK ? check_window(path, json, error) : code;
}

static bool is_table_name(const char *name)
{
    for (uint32_t i = 0; dray_model_name(i); i++)
        if (strcasecmp(dray_model_name(i), name) == 0)
            return true;
    return false;
}

int dray__engine_config_load(const char *path, dray_model_config *out, dray_error *error)
{
    dray_model_config config;
    int code = dray_model_config_load(path, &config, error);
    if (code == DRAY_OK && !is_table_name(path)) {
        char file[PATH_MAX];
        struct stat status;
        bool folder = stat(path, &status) == 0 && S_ISDIR(status.st_mode);
        json_t *json = NULL;
        snprintf(file, sizeof file, "%s%s", path, folder ? "/config.json" : "");
        code = dray__json_load(file, 16 << 20, &json, error);
        if (code == DRAY_OK)
            code = check_keys(file, json, error);
        json_decref(json);
    }
    if (code == DRAY_OK)
        code = dray__engine_config_check(&config, error);
    if (code == DRAY_OK)
        *out = config;
    return code;
}

/* Classes of transformers with a head for the next token, and with one for labels. */
static const struct {
    const char *family, *language, *labels;
} families[] = {{"llama", "LlamaForCausalLM", "LlamaForTokenClassification"},
                {"qwen2", "Qwen2ForCausalLM", "Qwen2ForTokenClassification"},
                {"qwen3", "Qwen3ForCausalLM", "Qwen3ForTokenClassification"}};

static const char *architecture_of(const dray_model_config *c)
{
    for (size_t i = 0; i < COUNT(families); i++)
        if (strcmp(families[i].family, c->family) == 0)
            return c->labels ? families[i].labels : families[i].language;
    return NULL;
}

int dray__engine_config_check(const dray_model_config *c, dray_error *error)
{
    const struct {
        const char *name;
        int64_t value;
    } sizes[] = {{"vocab_size", c->vocab_size},
                 {"hidden_size", c->hidden_size},
                 {"intermediate_size", c->intermediate_size},
                 {"num_hidden_layers", c->layers},
                 {"num_attention_heads", c->heads},
                 {"num_key_value_heads", c->kv_heads},
                 {"head_dim", c->head_dim},
                 {"max_position_embeddings", c->max_positions}};
    for (size_t i = 0; i < COUNT(sizes); i++)
        if (sizes[i].value < 1 || sizes[i].value > INT32_MAX)
            return dray__fail(error, DRAY_EINVALID,
                              "the engine expects %s of 1..2^31, found %" PRId64, sizes[i].name,
                              sizes[i].value);
    if (c->heads % c->kv_heads)
        return dray__fail(error, DRAY_EINVALID,
                          "num_attention_heads %" PRId64
                          " is not a multiple of num_key_value_heads %" PRId64,
                          c->heads, c->kv_heads);
    if (c->head_dim % 2)
        return dray__fail(error, DRAY_EINVALID, "head_dim %" PRId64 " is odd", c->head_dim);
    if (!memchr(c->family, 0, sizeof c->family) || !architecture_of(c))
        return dray__fail(error, DRAY_EUNSUPPORTED, "the engine does not compute family '%.31s'",
                          c->family);
    if (c->labels < 0 || c->labels > 1)
        return dray__fail(error, DRAY_EUNSUPPORTED,
                          "the engine computes one number a token, found %" PRId64 " labels",
                          c->labels);
    if (c->o_bias)
        return dray__fail(error, DRAY_EUNSUPPORTED,
                          "the engine does not compute attention_bias on o_proj");
    if (c->mlp_bias)
        return dray__fail(error, DRAY_EUNSUPPORTED, "the engine does not compute mlp_bias");
    if (c->qkv_bias != (strcmp(c->family, "qwen2") == 0) ||
        c->qk_norm != (strcmp(c->family, "qwen3") == 0))
        return dray__fail(error, DRAY_EINVALID,
                          "family %s with qkv_bias %d, qk_norm %d: no such model in transformers",
                          c->family, c->qkv_bias, c->qk_norm);
    return DRAY_OK;
}

int dray__engine_config_json(const dray_model_config *c, int32_t eos_token, char **out,
                             dray_error *error)
{
    int code = dray__engine_config_check(c, error);
    if (code != DRAY_OK)
        return code;
    json_t *json = json_pack(
        "{s:[s], s:s, s:s, s:b, s:I, s:I, s:I, s:I, s:I, s:I, s:I, s:I, s:f, s:f, s:f, s:s}",
        "architectures", architecture_of(c), "model_type", c->family, "hidden_act", "silu",
        "tie_word_embeddings", c->tied, "vocab_size", (json_int_t)c->vocab_size, "hidden_size",
        (json_int_t)c->hidden_size, "intermediate_size", (json_int_t)c->intermediate_size,
        "num_hidden_layers", (json_int_t)c->layers, "num_attention_heads", (json_int_t)c->heads,
        "num_key_value_heads", (json_int_t)c->kv_heads, "head_dim", (json_int_t)c->head_dim,
        "max_position_embeddings", (json_int_t)c->max_positions, "rms_norm_eps", c->rms_norm_eps,
        "rope_theta", c->rope_theta, "initializer_range", 0.02, "torch_dtype", "float32");
    bool whole = json != NULL;
    /* transformers' defaults for Llama are begin and end tokens that this vocabulary does not
     * have */
    json_t *eos = eos_token >= 0 ? json_integer(eos_token) : json_null();
    whole = whole && json_object_set_new(json, "eos_token_id", eos) == 0 &&
            json_object_set_new(json, "bos_token_id", json_null()) == 0;
    if (c->labels) /* transformers derives the number of labels from this map */
        whole = whole &&
                json_object_set_new(json, "id2label", json_pack("{s:s}", "0", "value")) == 0 &&
                json_object_set_new(json, "label2id", json_pack("{s:i}", "value", 0)) == 0;
    char *text = whole ? json_dumps(json, JSON_INDENT(2) | JSON_REAL_PRECISION(17)) : NULL;
    json_decref(json);
    if (!text)
        return dray__nomem(error);
    *out = text;
    return DRAY_OK;
}
