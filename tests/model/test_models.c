/* Tests the public table of models, config.json, and the whole-model builders. */
#include <dray/model.h>

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "model/config_file.h"

/* Parameter counts that the models' own pages and index files give (what is tied counted once:
 * DeepSeek-V3's 671,026,419,200 and 11.6 billion of its layer of multi-token prediction). */
static const struct {
    const char *name;
    uint64_t parameters;
} published[] = {
    {"qwen2.5-0.5b", 494032768},       {"qwen2.5-1.5b", 1543714304},
    {"qwen2.5-3b", 3085938688},        {"qwen2.5-7b", 7615616512},
    {"qwen2.5-14b", 14770033664},      {"qwen2.5-32b", 32763876352},
    {"qwen2.5-72b", 72706203648},      {"llama-3.1-8b", 8030261248},
    {"llama-3.1-70b", 70553706496},    {"llama-3.2-1b", 1235814400},
    {"llama-3.2-3b", 3212749824},      {"qwen3-0.6b", 596049920},
    {"qwen3-1.7b", 1720574976},        {"qwen3-4b", 4022468096},
    {"qwen3-8b", 8190735360},          {"qwen3-14b", 14768307200},
    {"qwen3-32b", 32762123264},        {"qwen3-30b-a3b", 30532122624},
    {"qwen3-235b-a22b", 235093634560}, {"mixtral-8x7b", 46702792704},
    {"deepseek-v3", 682636487424},     {"kimi-k2", 1026408232448},
    {"glm-4.5", 356785898816},
};

enum { PUBLISHED = sizeof published / sizeof *published };

static uint64_t elements(const dray_layout *l)
{
    uint64_t sum = 0;
    for (uint32_t i = 0; i < dray_layout_tensor_count(l); i++) {
        const dray_tensor_info *t = dray_layout_tensor(l, i);
        uint64_t product = t->alias_of < 0;
        for (uint32_t d = 0; d < t->ndim; d++)
            product *= (uint64_t)t->shape[d];
        sum += product;
    }
    return sum;
}

TEST(the_table_has_the_published_sizes)
{
    for (uint32_t i = 0; i < PUBLISHED; i++) {
        dray_model_config c;
        dray_layout *l;
        assert_int_equal(dray_model_config_load(published[i].name, &c, NULL), DRAY_OK);
        assert_int_equal(c.dtype, DRAY_BF16);
        assert_int_equal(dray_layout_full(&c, DRAY_DTYPE_NONE, DRAY_REGION_HOST, &l, NULL), 0);
        if (elements(l) != published[i].parameters)
            fail_msg("%s: %llu parameters, %llu published", published[i].name,
                     (unsigned long long)elements(l), (unsigned long long)published[i].parameters);
        dray_layout_free(l);
    }
    uint32_t n = 0;
    while (dray_model_name(n))
        n++;
    assert_int_equal(n, PUBLISHED);
}

TEST(unknown_models_get_the_nearest)
{
    dray_model_config c;
    dray_error e;
    assert_int_equal(dray_model_config_load("qwen2.5-23b", &c, &e), DRAY_ENOENT);
    assert_non_null(strstr(e.message, "did you mean 'qwen2.5-"));
    assert_int_equal(dray_model_config_load("QWEN3-8B", &c, &e), DRAY_OK);
    assert_int_equal(dray_model_config_load("/nowhere/config.json", &c, &e), DRAY_ENOENT);
}

static uint64_t shares(const dray_model_config *c, uint32_t world, uint32_t *blocks)
{
    uint64_t bytes = 0;
    *blocks = 0;
    for (uint32_t rank = 0; rank < world; rank++) {
        dray_layout *l;
        assert_int_equal(dray_layout_fsdp(c, DRAY_F32, rank, world, DRAY_REGION_HOST, &l, NULL), 0);
        bytes += dray_layout_bytes(l);
        *blocks += dray_layout_block_count(l);
        for (uint32_t i = 0; i < dray_layout_block_count(l); i++)
            assert_int_equal(dray_layout_block(l, i)->offset % 256, 0);
        dray_layout_free(l);
    }
    return bytes;
}

TEST(fsdp_shards_are_the_model)
{
    dray_model_config c;
    uint32_t blocks;
    assert_int_equal(dray_model_config_load("qwen2.5-0.5b", &c, NULL), DRAY_OK);
    for (uint32_t world = 1; world <= 9; world += 2)
        assert_true(shares(&c, world, &blocks) == UINT64_C(494032768) * 4);
    c.layers = 1;
    c.hidden_size = 3; /* fewer rows than ranks: empty shards */
    shares(&c, 8, &blocks);
    assert_true(blocks > 0);
    dray_layout *l = NULL;
    dray_error e;
    assert_int_equal(dray_layout_fsdp(&c, 0, 2, 2, DRAY_REGION_HOST, &l, &e), DRAY_EINVALID);
    assert_int_equal(dray_layout_fsdp(&c, 0, 0, 0, DRAY_REGION_HOST, &l, &e), DRAY_EINVALID);
    assert_int_equal(dray_layout_fsdp(&c, 0, 0, 2, DRAY_REGION_FILE, &l, &e), DRAY_EINVALID);
    assert_int_equal(dray_layout_full(&c, (dray_dtype)40, DRAY_REGION_HOST, &l, &e), DRAY_EINVALID);
    assert_null(l);
}

/* Sizes that the limits allow, and sums of which are more than numbers go. */
TEST(sizes_that_overflow_are_refused)
{
    dray_model_config c;
    dray_layout *l = NULL;
    dray_error e;
    assert_int_equal(dray_model_config_load("qwen3-30b-a3b", &c, NULL), DRAY_OK);
    c.layers = 1;
    c.experts = 1 << 14;
    c.hidden_size = c.moe_intermediate_size = 1 << 24;
    for (int orig = 0; orig < 2; orig++) {
        dray_fsdp1_spec spec = DRAY_FSDP1_SPEC_INIT;
        spec.world = 3;
        spec.use_orig_params = orig;
        assert_int_equal(dray_layout_fsdp1(&c, &spec, &l, &e), DRAY_EINVALID);
        assert_non_null(strstr(e.message, "too large"));
    }
    assert_int_equal(dray_model_config_load("deepseek-v3", &c, NULL), DRAY_OK);
    c.qk_nope_head_dim = INT64_MAX;
    assert_int_equal(dray_layout_full(&c, 0, DRAY_REGION_HOST, &l, &e), DRAY_EINVALID);
    assert_non_null(strstr(e.message, "qk_nope_head_dim is"));
    c.qk_nope_head_dim = 120;
    assert_int_equal(dray_layout_full(&c, 0, DRAY_REGION_HOST, &l, &e), DRAY_EINVALID);
    assert_non_null(strstr(e.message, "head_dim is 192, expected qk_nope_head_dim 120 + "));
    assert_int_equal(dray_model_config_load("deepseek-v3", &c, NULL), DRAY_OK);
    c.layers = c.experts = 65536; /* each is possible, but nobody waits for so many names */
    assert_int_equal(dray_layout_full(&c, 0, DRAY_REGION_HOST, &l, &e), DRAY_EINVALID);
    assert_non_null(strstr(e.message, "65536 experts in each of 65537 layers"));
    c.layers = c.mtp_layers = 65536;
    c.experts = 33;
    assert_int_equal(dray_layout_full(&c, 0, DRAY_REGION_HOST, &l, &e), DRAY_EINVALID);
    assert_non_null(strstr(e.message, "33 experts in each of 131072 layers"));
    const int64_t layers[][2] = {{INT64_MIN, 0}, {0, INT64_MIN}, {INT64_MAX, INT64_MAX}, {62, 0}};
    assert_int_equal(dray_model_config_load("deepseek-v3", &c, NULL), DRAY_OK);
    for (size_t i = 0; i < sizeof layers / sizeof *layers; i++) {
        dray_megatron_spec spec = DRAY_MEGATRON_SPEC_INIT;
        spec.pp = 4;
        spec.first_stage_layers = layers[i][0];
        spec.last_stage_layers = layers[i][1];
        assert_int_equal(dray_layout_megatron(&c, &spec, &l, &e), DRAY_EINVALID);
        assert_non_null(strstr(e.message, "of 61 layers"));
    }
    assert_null(l);
}

TEST(tied_heads_are_aliases)
{
    dray_model_config c;
    assert_int_equal(dray_model_config_load("qwen3-0.6b", &c, NULL), DRAY_OK);
    dray_engine_spec spec = DRAY_ENGINE_SPEC_INIT;
    dray_layout *l[3];
    assert_int_equal(dray_layout_full(&c, 0, DRAY_REGION_HOST, &l[0], NULL), DRAY_OK);
    assert_int_equal(dray_layout_fsdp(&c, 0, 1, 4, DRAY_REGION_HOST, &l[1], NULL), DRAY_OK);
    assert_int_equal(dray_layout_engine(&c, &spec, &l[2], NULL), DRAY_OK);
    for (int i = 0; i < 3; i++) {
        uint32_t head, embed;
        assert_int_equal(dray_layout_find(l[i], "lm_head.weight", &head, NULL), DRAY_OK);
        assert_int_equal(dray_layout_find(l[i], "model.embed_tokens.weight", &embed, NULL), 0);
        assert_int_equal(dray_layout_tensor(l[i], head)->alias_of, embed);
        dray_layout_free(l[i]);
    }
    uint64_t head_at, embed_at;
    uint32_t ndim;
    int64_t shape[DRAY_MAX_DIMS];
    assert_int_equal(
        dray_engine_parameter(&c, &spec, "lm_head.weight", &head_at, &ndim, shape, NULL), 0);
    assert_int_equal(dray_engine_parameter(&c, &spec, "model.embed_tokens.weight", &embed_at, &ndim,
                                           shape, NULL),
                     0);
    assert_int_equal(head_at, embed_at);
}

TEST(engine_refuses_what_cannot_be_cut)
{
    static const struct {
        const char *model;
        uint32_t tp, rank;
        int64_t vocab;
        const char *says;
    } bad[] = {
        {"qwen2.5-0.5b", 4, 0, 0, "num_attention_heads 14 is not divisible by tp 4"},
        {"qwen2.5-7b", 3, 0, 0, "num_attention_heads 28 is not divisible by tp 3"},
        {"qwen2.5-0.5b", 2, 2, 0, "tp rank 2 of 2"},
        {"qwen2.5-0.5b", 2, 0, -1, "multiple -1"},
        {"qwen2.5-0.5b", 7, 0, 0, "151936 padded to 151936 (a multiple of 64)"},
        {"qwen2.5-0.5b", 14, 0, 448, "not divisible by tp 14"},
        {"qwen3-32b", 16, 0, 0, NULL},
        {"qwen2.5-32b", 8, 7, 0, NULL},
    };
    for (size_t i = 0; i < sizeof bad / sizeof *bad; i++) {
        dray_model_config c;
        dray_layout *l = NULL;
        dray_error e;
        assert_int_equal(dray_model_config_load(bad[i].model, &c, NULL), DRAY_OK);
        dray_engine_spec spec = DRAY_ENGINE_SPEC_INIT;
        spec.tp = bad[i].tp;
        spec.tp_rank = bad[i].rank;
        spec.vocab_multiple = bad[i].vocab;
        int status = dray_layout_engine(&c, &spec, &l, &e);
        if (!bad[i].says) {
            assert_int_equal(status, DRAY_OK);
            dray_layout_free(l);
            continue;
        }
        assert_int_equal(status, DRAY_EINVALID);
        if (!strstr(e.message, bad[i].says))
            fail_msg("case %zu: '%s' lacks '%s'", i, e.message, bad[i].says);
    }
    dray_model_config c;
    dray_engine_spec spec = DRAY_ENGINE_SPEC_INIT;
    dray_error e;
    uint64_t at;
    uint32_t ndim;
    int64_t shape[DRAY_MAX_DIMS];
    assert_int_equal(dray_model_config_load("qwen2.5-0.5b", &c, NULL), DRAY_OK);
    static const char *const unknown[] = {
        "model.layers.24.self_attn.qkv_proj.weight", "model.layers.00.self_attn.qkv_proj.weight",
        "model.layers.0.self_attn.q_proj.weight",    "model.layers..self_attn.qkv_proj.weight",
        "model.layers.0.self_attn.q_norm.weight",    "model.layers.99999999999999999999.mlp.x",
    };
    for (size_t i = 0; i < sizeof unknown / sizeof *unknown; i++)
        assert_int_equal(dray_engine_parameter(&c, &spec, unknown[i], &at, &ndim, shape, &e),
                         DRAY_ENOENT);
    spec.size = 3;
    dray_layout *l;
    assert_int_equal(dray_layout_engine(&c, &spec, &l, &e), DRAY_EINVALID);
}

#define CORE                                                                                       \
    "\"vocab_size\": 100, \"hidden_size\": 32, \"intermediate_size\": 64, "                        \
    "\"num_hidden_layers\": 2, \"num_attention_heads\": 4"

TEST(config_json_of_both_generations)
{
    dray_model_config c;
    assert_int_equal(
        dray_model_config_load(
            config_file("{\"model_type\": \"llama\", " CORE ", \"torch_dtype\": \"bfloat16\", "
                        "\"rope_theta\": 5e5, \"rms_norm_eps\": 1e-05, \"attention_bias\": true, "
                        "\"mlp_bias\": true, \"head_dim\": null, "
                        "\"architectures\": [\"LlamaForCausalLM\"], \"pruned_heads\": {}}"),
            &c, NULL),
        DRAY_OK);
    assert_int_equal(c.kv_heads, 4); /* silent: as many as heads */
    assert_int_equal(c.head_dim, 8);
    assert_int_equal(c.dtype, DRAY_BF16);
    assert_true(c.rope_theta == 5e5 && c.rms_norm_eps == 1e-5);
    assert_true(c.qkv_bias && c.o_bias && c.mlp_bias && !c.qk_norm && !c.tied);
    assert_int_equal(dray_model_config_load(
                         config_file("{\"model_type\": \"qwen2\", " CORE ", \"dtype\": \"float16\","
                                     " \"num_key_value_heads\": 2, \"attention_bias\": false, "
                                     "\"rope_parameters\": {\"rope_type\": \"default\", "
                                     "\"rope_theta\": 1000000.0}, \"tie_word_embeddings\": true}"),
                         &c, NULL),
                     DRAY_OK);
    assert_int_equal(c.dtype, DRAY_F16);
    assert_true(c.rope_theta == 1e6);
    assert_true(c.qkv_bias && !c.o_bias && !c.mlp_bias && c.tied);
    assert_int_equal(
        dray_model_config_load(config_file("{\"model_type\": \"qwen3\", " CORE
                                           ", \"num_key_value_heads\": 2, \"rope_parameters\": "
                                           "{\"full_attention\": {\"rope_theta\": 7}}}"),
                               &c, NULL),
        DRAY_OK);
    assert_int_equal(c.head_dim, 128); /* the family's default */
    assert_int_equal(c.dtype, DRAY_F32);
    assert_true(c.qk_norm && c.rope_theta == 7);
    assert_int_equal(dray_model_config_load(folder, &c, NULL), DRAY_OK); /* its folder */
    assert_string_equal(c.family, "qwen3");
}

#define LATENT                                                                                     \
    "{\"model_type\": \"deepseek_v3\", " CORE ", \"n_routed_experts\": 2, "                        \
    "\"moe_intermediate_size\": 2, \"kv_lora_rank\": 8, \"qk_nope_head_dim\": 8, "                 \
    "\"qk_rope_head_dim\": 8, \"v_head_dim\": 8"

/* As transformers' DeepseekV3Config has them, and what the engines make of null. */
TEST(missing_and_null_are_not_the_same)
{
    dray_model_config c;
    assert_int_equal(dray_model_config_load(config_file(LATENT "}"), &c, NULL), DRAY_OK);
    assert_int_equal(c.q_lora_rank, 1536);
    assert_int_equal(c.shared_experts, 1);
    const char *text = LATENT ", \"q_lora_rank\": null, \"n_shared_experts\": null}";
    assert_int_equal(dray_model_config_load(config_file(text), &c, NULL), DRAY_OK);
    assert_int_equal(c.q_lora_rank, 0);
    assert_int_equal(c.shared_experts, 0);
}

TEST(labels_are_named_or_counted)
{
    static const struct {
        const char *more;
        int64_t labels;
    } heads[] = {
        {"", 2},
        {", \"num_labels\": 1", 1},
        {", \"id2label\": null, \"num_labels\": 3", 3},
        {", \"id2label\": {\"0\": \"value\"}", 1},
        {", \"id2label\": {\"0\": \"value\"}, \"num_labels\": 5", 1},
    };
    for (size_t i = 0; i < sizeof heads / sizeof *heads; i++) {
        char text[512];
        dray_model_config c;
        snprintf(text, sizeof text,
                 "{\"model_type\": \"llama\", " CORE
                 ", \"architectures\": [\"LlamaForTokenClassification\"]%s}",
                 heads[i].more);
        assert_int_equal(dray_model_config_load(config_file(text), &c, NULL), DRAY_OK);
        assert_int_equal(c.labels, heads[i].labels);
    }
}

TEST(config_json_errors)
{
    static const struct {
        const char *text;
        int code;
        const char *says;
    } bad[] = {
        {"[1]", DRAY_EFORMAT, "expected an object"},
        {"{", DRAY_EFORMAT, "line 1"},
        {"{" CORE "}", DRAY_EFORMAT, "model_type is missing"},
        {"{\"model_type\": 3, " CORE "}", DRAY_EFORMAT, "model_type: expected a string"},
        {"{\"model_type\": \"qwen4\", " CORE "}", DRAY_EUNSUPPORTED, "did you mean 'qwen"},
        {"{\"model_type\": \"gpt2\", " CORE "}", DRAY_EUNSUPPORTED, "dray.weights.record()"},
        {"{\"model_type\": \"deepseek_v3\", " CORE "}", DRAY_EFORMAT,
         "n_routed_experts is missing"},
        {"{\"model_type\": \"deepseek_v3\", " CORE ", \"attention_bias\": true}", DRAY_EUNSUPPORTED,
         "attention_bias"},
        {"{\"model_type\": \"glm4_moe\", " CORE ", \"moe_layer_freq\": 2}", DRAY_EUNSUPPORTED,
         "moe_layer_freq"},
        {"{\"model_type\": \"mixtral\", " CORE "}", DRAY_EFORMAT, "num_local_experts is missing"},
        {"{\"model_type\": \"mixtral\", " CORE ", \"num_local_experts\": 0}", DRAY_EINVALID,
         "the number of experts is 0"},
        {"{\"model_type\": \"mixtral\", " CORE ", \"kv_lora_rank\": 8}", DRAY_EUNSUPPORTED,
         "kv_lora_rank"},
        {"{\"model_type\": \"qwen3_moe\", " CORE ", \"num_experts\": 8}", DRAY_EFORMAT,
         "moe_intermediate_size is missing"},
        {"{\"model_type\": \"qwen3_moe\", " CORE
         ", \"num_experts\": 8, \"moe_intermediate_size\": 8, "
         "\"num_key_value_heads\": 4, \"mlp_only_layers\": [900]}",
         DRAY_EUNSUPPORTED, "layer 900"},
        {"{\"model_type\": \"deepseek_v3\", " CORE ", \"kv_lora_rank\": 8, \"v_head_dim\": 8, "
         "\"n_routed_experts\": 2, \"moe_intermediate_size\": 2, "
         "\"qk_nope_head_dim\": 9223372036854775807, \"qk_rope_head_dim\": 1}",
         DRAY_EINVALID, "qk_nope_head_dim + qk_rope_head_dim"},
        {"{\"model_type\": \"glm4_moe\", " CORE ", \"n_routed_experts\": 8, "
         "\"num_key_value_heads\": 4, \"moe_intermediate_size\": 16777216, \"n_shared_experts\": "
         "2}",
         DRAY_EINVALID, "n_shared_experts 2 times moe_intermediate_size 16777216"},
        {"{\"model_type\": \"llama\", \"vocab_size\": 3}", DRAY_EFORMAT, "hidden_size is missing"},
        {"{\"model_type\": \"llama\", " CORE ", \"vocab_size\": 3}", DRAY_EFORMAT, "duplicate"},
        {"{\"model_type\": \"llama\", " CORE ", \"head_dim\": \"8\"}", DRAY_EFORMAT,
         "head_dim: expected an integer, found a string"},
        {"{\"model_type\": \"llama\", " CORE ", \"head_dim\": -8}", DRAY_EINVALID,
         "head_dim is -8"},
        {"{\"model_type\": \"llama\", " CORE ", \"head_dim\": 0}", DRAY_EINVALID, "head_dim is 0"},
        {"{\"model_type\": \"llama\", " CORE ", \"num_key_value_heads\": 3}", DRAY_EINVALID,
         "not a multiple of num_key_value_heads 3"},
        {"{\"model_type\": \"llama\", " CORE ", \"num_key_value_heads\": 0}", DRAY_EINVALID,
         "num_key_value_heads is 0"},
        {"{\"model_type\": \"llama\", " CORE ", \"quantization_config\": {\"bits\": 4}}",
         DRAY_EUNSUPPORTED, "quantization_config"},
        {"{\"model_type\": \"llama\", " CORE ", \"num_experts\": 8}", DRAY_EUNSUPPORTED,
         "num_experts"},
        {"{\"model_type\": \"llama\", " CORE
         ", \"architectures\": [\"LlamaForSequenceClassification\"]}",
         DRAY_EUNSUPPORTED, "architectures"},
        {"{\"model_type\": \"llama\", " CORE
         ", \"architectures\": [\"LlamaForTokenClassification\"], \"num_labels\": 0}",
         DRAY_EINVALID, "num_labels is 0"},
        {"{\"model_type\": \"llama\", " CORE
         ", \"architectures\": [\"LlamaForTokenClassification\"], \"num_labels\": \"1\"}",
         DRAY_EFORMAT, "num_labels: expected an integer"},
        {"{\"model_type\": \"qwen3_vl\", \"vision_config\": {}, \"text_config\": {" CORE
         ", \"quantization_config\": {\"quant_method\": \"awq\"}}}",
         DRAY_EUNSUPPORTED, "quant_method 'awq'"},
        {"{\"model_type\": \"qwen3_vl\", \"vision_config\": {}, \"text_config\": {" CORE
         ", \"quantization_config\": null}, \"quantization_config\": {\"quant_method\": \"awq\"}}",
         DRAY_EUNSUPPORTED, "quant_method 'awq'"},
        {"{\"model_type\": \"qwen3_5_text\", \"vocab_size\": 100, \"hidden_size\": 32, "
         "\"intermediate_size\": 64, \"num_hidden_layers\": 9000000000000000, "
         "\"num_attention_heads\": 4, \"linear_num_key_heads\": 1, \"linear_key_head_dim\": 1, "
         "\"linear_num_value_heads\": 1, \"linear_value_head_dim\": 1, "
         "\"full_attention_interval\": 1}",
         DRAY_EINVALID, "num_hidden_layers is 9000000000000000"},
        {"{\"model_type\": \"llama\", " CORE ", \"torch_dtype\": \"int8\"}", DRAY_EUNSUPPORTED,
         "torch_dtype 'int8'"},
        {"{\"model_type\": \"llama\", " CORE ", \"attention_bias\": 1}", DRAY_EFORMAT,
         "attention_bias: expected true or false"},
        {"{\"model_type\": \"llama\", " CORE ", \"rope_theta\": \"x\"}", DRAY_EFORMAT,
         "rope_theta: expected a number"},
        {"{\"model_type\": \"llama\", " CORE ", \"rope_parameters\": 4}", DRAY_EFORMAT,
         "rope_parameters: expected an object"},
        {"{\"model_type\": \"llama\", \"vocab_size\": 100, \"hidden_size\": 33, "
         "\"intermediate_size\": 64, \"num_hidden_layers\": 2, \"num_attention_heads\": 4}",
         DRAY_EINVALID, "hidden_size / heads: 33 is not a multiple of 4"},
        {"{\"model_type\": \"llama\", \"vocab_size\": 99999999999999, \"hidden_size\": 32, "
         "\"intermediate_size\": 64, \"num_hidden_layers\": 2, \"num_attention_heads\": 4}",
         DRAY_EINVALID, "vocab_size is 99999999999999"},
    };
    for (size_t i = 0; i < sizeof bad / sizeof *bad; i++) {
        dray_model_config c;
        dray_error e = {0};
        int status = dray_model_config_load(config_file(bad[i].text), &c, &e);
        if (status != bad[i].code || !strstr(e.message, bad[i].says))
            fail_msg("case %zu: %s '%s', expected %s '%s'", i, dray_error_name(status), e.message,
                     dray_error_name(bad[i].code), bad[i].says);
    }
}

SUITE(make_folder, remove_folder)
