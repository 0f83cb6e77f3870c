/* Tests which quantization_configs, expert maps and SPECs of engines are read, and which are
 * refused. */
#include <dray/model.h>

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "model/config_file.h"

#define FP8 "{\"quantization_config\": {\"quant_method\": \"fp8\""

TEST(reads_quantization_config)
{
    dray_engine_quant *q = (dray_engine_quant *)folder;
    assert_int_equal(dray_engine_quant_load(config_file("{}"), &q, NULL), DRAY_OK);
    assert_null(q);
    const char *text = FP8 ", \"fmt\": \"e4m3\", \"weight_block_size\": [128, 64], \"scale_fmt\": "
                           "\"ue8m0\", \"modules_to_not_convert\": [\"lm_head\", \"a.b\"]}}";
    config_file(text);
    assert_int_equal(dray_engine_quant_load(folder, &q, NULL), DRAY_OK);
    assert_int_equal(q->kind, DRAY_QUANT_BLOCK);
    assert_int_equal(q->scale_format, DRAY_SCALE_UE8M0);
    assert_int_equal(q->block[0], 128);
    assert_int_equal(q->block[1], 64);
    assert_int_equal(q->ignore_count, 2);
    assert_string_equal(q->ignore[1], "a.b");
    dray_engine_quant_free(q);
    text = FP8 ", \"ignored_layers\": [\"x\"], \"modules_to_not_convert\": null}}";
    assert_int_equal(dray_engine_quant_load(config_file(text), &q, NULL), DRAY_OK);
    assert_int_equal(q->kind, DRAY_QUANT_TENSOR);
    assert_int_equal(q->ignore_count, 1);
    dray_engine_quant_free(q);
    text = "{\"text_config\": " FP8 "}}}"; /* of a model of text and images */
    assert_int_equal(dray_engine_quant_load(config_file(text), &q, NULL), DRAY_OK);
    assert_non_null(q);
    dray_engine_quant_free(q);
}

#define PACKED                                                                                     \
    "{\"quantization_config\": {\"quant_method\": \"compressed-tensors\", \"ignore\": "            \
    "[\"lm_head\"], "
#define GROUP "\"config_groups\": {\"group_0\": {\"targets\": [\"Linear\"], \"weights\": {"

#define LINEAR "\"targets\": [\"Linear\"]"
#define INT4                                                                                       \
    "\"format\": \"pack-quantized\", \"config_groups\": {\"group_0\": {\"weights\": {"             \
    "\"num_bits\": 4, \"type\": \"int\", "

TEST(reads_compressed_tensors_config)
{
    static const struct {
        const char *text;
        int32_t kind;
        int64_t group;
    } configs[] = {
        {PACKED
         "\"format\": \"nvfp4-pack-quantized\", " GROUP
         "\"num_bits\": 4, \"type\": \"float\", \"group_size\": 16, \"symmetric\": true}}}}}",
         DRAY_QUANT_NVFP4, 16},
        {PACKED "\"format\": \"mxfp4-pack-quantized\", " GROUP
                "\"num_bits\": 4, \"type\": \"float\", \"group_size\": 32}}}}}",
         DRAY_QUANT_MXFP4, 32},
        {PACKED "\"format\": \"mxfp8-quantized\", " GROUP
                "\"num_bits\": 8, \"type\": \"float\", \"group_size\": 32}}}}}",
         DRAY_QUANT_MXFP8, 32},
        {PACKED "\"format\": \"pack-quantized\", " GROUP
                "\"num_bits\": 4, \"type\": \"int\", \"group_size\": 64}}}}}",
         DRAY_QUANT_INT4, 64},
        {PACKED
         "\"format\": \"pack-quantized\", " GROUP
         "\"num_bits\": 4, \"type\": \"int\", \"group_size\": 128, \"symmetric\": false}}}}}",
         DRAY_QUANT_INT4_ZERO, 128},
        {PACKED "\"sparsity_config\": {\"format\": \"dense\"}, \"transform_config\": {}, " INT4
                "\"group_size\": 64, \"actorder\": \"weight\"}, " LINEAR "}}}}",
         DRAY_QUANT_INT4, 64},
    };
    for (size_t i = 0; i < sizeof configs / sizeof *configs; i++) {
        dray_engine_quant *q = NULL;
        dray_error e = {0};
        if (dray_engine_quant_load(config_file(configs[i].text), &q, &e))
            fail_msg("case %zu: %s", i, e.message);
        assert_int_equal(q->kind, configs[i].kind);
        assert_int_equal(q->block[1], configs[i].group);
        assert_int_equal(q->ignore_count, 1);
        dray_engine_quant_free(q);
    }
}

TEST(refuses_other_quantisation)
{
    static const struct {
        const char *text;
        int code;
        const char *says;
    } bad[] = {
        {"{\"quantization_config\": {\"quant_method\": \"awq\"}}", DRAY_EUNSUPPORTED, "'awq'"},
        {"{\"quantization_config\": {}}", DRAY_EUNSUPPORTED, "quant_method ''"},
        {"{\"quantization_config\": 4}", DRAY_EFORMAT, "an object"},
        {FP8 ", \"fmt\": \"e5m2\"}}", DRAY_EUNSUPPORTED, "e5m2"},
        {PACKED "\"format\": \"pack-quantized\"}}", DRAY_EUNSUPPORTED, "one group of weights"},
        {PACKED "\"format\": \"pack-quantized\", " GROUP
                "\"num_bits\": 8, \"type\": \"int\", \"group_size\": 64}}}}}",
         DRAY_EUNSUPPORTED, "in 4 bits"},
        {PACKED "\"format\": \"nvfp4-pack-quantized\", " GROUP
                "\"num_bits\": 4, \"type\": \"float\", \"group_size\": 32}}}}}",
         DRAY_EUNSUPPORTED, "'nvfp4-pack-quantized'"},
        {"{\"quantization_config\": {\"quant_method\": \"compressed-tensors\", \"ignore\": "
         "[\"re:.*gate$\"]}}",
         DRAY_EUNSUPPORTED, "is a pattern"},
        {PACKED INT4 "\"group_size\": 64}, \"targets\": [\"re:.*mlp.*\"]}}}}", DRAY_EUNSUPPORTED,
         "targets: expected all Linear modules"},
        {PACKED INT4 "\"group_size\": 64}, \"targets\": [\"Linear\", \"Embedding\"]}}}}",
         DRAY_EUNSUPPORTED, "targets"},
        {PACKED INT4 "\"group_size\": 64}, \"targets\": []}}}}", DRAY_EUNSUPPORTED, "targets"},
        {PACKED INT4 "\"group_size\": 64, \"actorder\": \"group\"}, " LINEAR "}}}}",
         DRAY_EUNSUPPORTED, "actorder"},
        {PACKED INT4 "\"group_size\": 64, \"actorder\": true}, " LINEAR "}}}}", DRAY_EUNSUPPORTED,
         "actorder"},
        {PACKED "\"sparsity_config\": {\"format\": \"sparse-24-bitmask\"}, " INT4
                "\"group_size\": 64}, " LINEAR "}}}}",
         DRAY_EUNSUPPORTED, "sparsity_config"},
        {PACKED "\"transform_config\": {\"config_groups\": {\"R1\": {}}}, " INT4
                "\"group_size\": 64}, " LINEAR "}}}}",
         DRAY_EUNSUPPORTED, "transform_config"},
        {FP8 ", \"weight_block_size\": [128]}}", DRAY_EFORMAT, "two sizes"},
        {FP8 ", \"weight_block_size\": [128, 0]}}", DRAY_EFORMAT, "two sizes"},
        {FP8 ", \"weight_block_size\": 128}}", DRAY_EFORMAT, "two sizes"},
        {FP8 ", \"ignore\": [4]}}", DRAY_EFORMAT, "a list of names"},
        {FP8 ", \"ignored_layers\": \"lm_head\"}}", DRAY_EFORMAT, "a list of names"},
    };
    for (size_t i = 0; i < sizeof bad / sizeof *bad; i++) {
        dray_engine_quant *q = NULL;
        dray_error e = {0};
        int status = dray_engine_quant_load(config_file(bad[i].text), &q, &e);
        if (status != bad[i].code || !strstr(e.message, bad[i].says) || q)
            fail_msg("case %zu: %s '%s'", i, dray_error_name(status), e.message);
    }
}

/* One row, of layer 0, of a model whose layers all have 128 experts. */
static void refuse_map(int32_t *experts, uint32_t slots, uint32_t redundant, const char *says)
{
    dray_model_config c;
    dray_error e = {0};
    dray_layout *l = NULL;
    assert_int_equal(dray_model_config_load("qwen3-30b-a3b", &c, NULL), DRAY_OK);
    dray_expert_map map = DRAY_EXPERT_MAP_INIT;
    map.version = 12;
    map.layers = experts ? 1 : 0;
    map.slots = slots;
    map.experts = experts;
    dray_engine_spec spec = DRAY_ENGINE_SPEC_INIT;
    spec.tp = spec.ep = 2;
    spec.redundant = redundant;
    spec.experts = &map;
    assert_int_equal(dray_layout_engine(&c, &spec, &l, &e), DRAY_EINVALID);
    if (!strstr(e.message, says))
        fail_msg("'%s' lacks '%s'", e.message, says);
}

TEST(maps_must_hold_every_expert)
{
    int32_t row[130];
    for (int32_t i = 0; i < 130; i++)
        row[i] = i % 128;
    refuse_map(row, 127, 0, "map 12 has 127 slots, expected 128 experts");
    refuse_map(row, 130, 4, "130 slots, expected 128 experts and 4 redundant");
    refuse_map(row, 129, 0, "129 slots of experts (128 experts and 1 redundant)");
    row[5] = 128;
    refuse_map(row, 130, 0, "slot 5 has expert 128 of 128");
    row[5] = -1;
    refuse_map(row, 130, 0, "slot 5 has expert -1 of 128");
    row[5] = row[7] = 3;
    refuse_map(row, 130, 2, "layer 0: expert 5 and 1 others are in none of 130 slots");
}

/* However many slots one of them has. */
TEST(maps_may_repeat_experts)
{
    enum { SLOTS = 127 + 256 };
    dray_model_config c;
    assert_int_equal(dray_model_config_load("qwen3-30b-a3b", &c, NULL), DRAY_OK);
    c.layers = 1;
    int32_t row[SLOTS];
    for (int32_t i = 0; i < SLOTS; i++)
        row[i] = i < 128 ? i : 0;
    dray_expert_map map = DRAY_EXPERT_MAP_INIT;
    map.layers = 1;
    map.slots = SLOTS;
    map.experts = row;
    dray_engine_spec spec = DRAY_ENGINE_SPEC_INIT;
    spec.experts = &map;
    dray_layout *l = NULL;
    dray_error e = {0};
    if (dray_layout_engine(&c, &spec, &l, &e))
        fail_msg("%s", e.message);
    dray_layout_free(l);
}

TEST(maps_move_experts)
{
    dray_model_config c;
    assert_int_equal(dray_model_config_load("qwen3-30b-a3b", &c, NULL), DRAY_OK);
    int32_t row[128];
    for (int32_t i = 0; i < 128; i++)
        row[i] = 127 - i;
    dray_expert_map map = DRAY_EXPERT_MAP_INIT;
    map.version = 3;
    map.layers = 1;
    map.slots = 128;
    map.experts = row;
    dray_engine_spec spec = DRAY_ENGINE_SPEC_INIT;
    spec.tp = spec.ep = 4;
    dray_layout *plain, *moved;
    uint32_t at;
    assert_int_equal(dray_layout_engine(&c, &spec, &plain, NULL), DRAY_OK);
    spec.experts = &map;
    assert_int_equal(dray_layout_engine(&c, &spec, &moved, NULL), DRAY_OK);
    assert_string_equal(dray_layout_region(moved, 0)->name, "weights, expert map 3");
    assert_true(dray_layout_region(moved, 0)->bytes == dray_layout_region(plain, 0)->bytes);
    const char *first = "model.layers.0.mlp.experts.0.up_proj.weight";
    const char *last = "model.layers.0.mlp.experts.127.up_proj.weight";
    assert_int_equal(dray_layout_find(plain, first, &at, NULL), DRAY_OK);
    assert_int_equal(dray_layout_find(plain, last, &at, NULL), DRAY_ENOENT);
    assert_int_equal(dray_layout_find(moved, first, &at, NULL), DRAY_ENOENT);
    assert_int_equal(dray_layout_find(moved, last, &at, NULL), DRAY_OK);
    dray_layout_free(plain);
    dray_layout_free(moved);
}

TEST(refuses_what_does_not_fit)
{
    static const struct {
        const char *model, *spec, *says;
    } bad[] = {
        {"qwen3-30b-a3b", "engine:tp=4,ep=3", "tp 4 is not divisible by ep 3"},
        {"qwen3-30b-a3b", "engine:tp=4,dp=3", "tp 4 is not divisible by dp 3"},
        {"qwen3-30b-a3b", "engine:tp=4,ep=4,redundant=3", "131 slots of experts"},
        {"qwen3-30b-a3b", "engine:tp=1,pp=49", "48 layers are fewer than pp 49 stages"},
        {"qwen3-30b-a3b", "engine:tp=1,fused=1", "one shared expert, found 0"},
        {"qwen3-8b", "engine:tp=2,ep=2", "qwen3 has no experts: ep 2"},
        {"qwen3-30b-a3b", "engine:tp=16,quant=fp8-block", "48 of 768 rows on a rank"},
        {"deepseek-v3", "engine:tp=128,ep=128,dp=1,quant=fp8-block", "192 of 24576 rows"},
        {"deepseek-v3", "engine:tp=2,pp=2,draft=copies", "one of 2 pipeline stages"},
        {"deepseek-v3", "engine:tp=2,quant=fp4", "int4 or int4-zero, found"},
        {"deepseek-v3", "engine:tp=2,like=trt", "expected sglang or vllm, found 'trt'"},
        {"deepseek-v3", "engine:tp=2,transposed=2", "expected 0 or 1, found '2'"},
        {"deepseek-v3", "engine:tp=2,w13=up_gate", "expected gate-up or up-gate, found 'up_gate'"},
        {"deepseek-v3", "engine:tp=2,redundnat=2", "did you mean 'redundant'?"},
    };
    for (size_t i = 0; i < sizeof bad / sizeof *bad; i++) {
        dray_model_config c;
        dray_layout **all = NULL;
        uint32_t count = 0;
        dray_error e = {0};
        assert_int_equal(dray_model_config_load(bad[i].model, &c, NULL), DRAY_OK);
        int status = dray_layouts_from_spec(&c, bad[i].spec, &all, &count, &e);
        if (!status || all || !strstr(e.message, bad[i].says))
            fail_msg("%s: %s '%s' lacks '%s'", bad[i].spec, dray_error_name(status), e.message,
                     bad[i].says);
    }
}

SUITE(make_folder, remove_folder)
