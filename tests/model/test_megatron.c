/* Tests the builders megatron and module with random sizes for models of every family. All ranks
 * together hold every element, so that a whole model can be planned from them, and the entry by
 * name gives the same as the whole-model builder. test_reshard.py checks which elements they
 * are. */
#include <dray/plan.h>

#include "base/random.h"
#include "seed.h"
#include "suite.h"

#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

enum { CASES = 2000, MOST_RANKS = 256 };

static uint64_t seed, drawn;

static int64_t draw(uint64_t below)
{
    return (int64_t)(dray__random_u64(seed, 0, drawn++) % below);
}

static int64_t one_of(const int64_t *values, uint64_t count)
{
    return values[draw(count)];
}
#define ONE_OF(...)                                                                                \
    one_of((const int64_t[]){__VA_ARGS__}, sizeof(int64_t[]){__VA_ARGS__} / sizeof(int64_t))

static dray_model_config random_config(void)
{
    static const char *const families[] = {"llama",   "qwen2",       "qwen3",   "qwen3_moe",
                                           "mixtral", "deepseek_v3", "kimi_k2", "glm4_moe"};
    int family = (int)draw(8);
    int64_t kv = ONE_OF(1, 2, 4);
    dray_model_config c = {.vocab_size = 1 + draw(300),
                           .hidden_size = 4 * (1 + draw(3)),
                           .intermediate_size = 4 * (1 + draw(3)),
                           .layers = 1 + draw(6),
                           .heads = kv * ONE_OF(1, 2, 4),
                           .kv_heads = kv,
                           .head_dim = 4,
                           .qkv_bias = (int32_t)draw(2),
                           .qk_norm = (int32_t)draw(2),
                           .tied = (int32_t)draw(2),
                           .dtype = DRAY_BF16};
    snprintf(c.family, sizeof c.family, "%s", families[family]);
    if (family < 3)
        return c;
    c.experts = ONE_OF(1, 2, 4, 8);
    c.moe_intermediate_size = 4 * (1 + draw(2));
    c.sparse_step = family == 3 ? draw(3) : 0;
    if (family < 5)
        return c;
    c.first_k_dense = draw((uint64_t)c.layers + 1);
    c.shared_experts = draw(3);
    c.mtp_layers = draw(3);
    if (family == 7)
        return c;
    c.kv_heads = c.heads;
    c.q_lora_rank = ONE_OF(0, 4);
    c.kv_lora_rank = 4;
    c.qk_nope_head_dim = 3;
    c.qk_rope_head_dim = 1;
    c.v_head_dim = 2;
    return c;
}

static dray_megatron_spec random_spec(void)
{
    dray_megatron_spec s = DRAY_MEGATRON_SPEC_INIT;
    s.tp = (uint32_t)ONE_OF(0, 1, 1, 2, 4);
    s.cp = (uint32_t)ONE_OF(1, 1, 2);
    s.ep = (uint32_t)ONE_OF(1, 1, 2, 4);
    s.etp = (uint32_t)ONE_OF(0, 1, 1, 2);
    s.dp = (uint32_t)ONE_OF(1, 2, 4);
    s.pp = (uint32_t)ONE_OF(1, 1, 2, 3);
    s.vpp = (uint32_t)ONE_OF(1, 1, 1, 2);
    s.experts = (int32_t)draw(3);
    s.kind = DRAY_REGION_HOST;
    s.vocab_multiple = ONE_OF(0, 1, 16);
    return s;
}

static bool same_layout(const dray_layout *a, const dray_layout *b)
{
    void *x, *y;
    size_t nx, ny;
    assert_int_equal(dray_layout_pack(a, &x, &nx, NULL), DRAY_OK);
    assert_int_equal(dray_layout_pack(b, &y, &ny, NULL), DRAY_OK);
    bool same = nx == ny && memcmp(x, y, nx) == 0;
    free(x);
    free(y);
    return same;
}

/* The layout again, parameter by parameter. */
static void check_by_name(const dray_model_config *c, const dray_megatron_spec *s,
                          const dray_layout *layout)
{
    dray_megatron_parameter *list;
    uint32_t count;
    dray_layout *again;
    dray_error e = {0};
    assert_int_equal(dray_megatron_parameters(c, s, &list, &count, &e), DRAY_OK);
    assert_int_equal(dray_layout_new(&again, NULL), DRAY_OK);
    assert_int_equal(dray_layout_add_region(again, dray_layout_region(layout, 0), NULL, NULL), 0);
    for (uint32_t i = 0; i < count; i++)
        if (dray_layout_add_megatron(again, c, s, list[i].vp_stage, list[i].name,
                                     (dray_dtype)list[i].dtype, list[i].ndim, list[i].shape, 0,
                                     list[i].offset, &e))
            fail_msg("%s: %s", list[i].name, e.message);
    assert_true(same_layout(layout, again));
    dray_layout_free(again);
    free(list);
}

/* true: the sizes were taken, and a whole model can be had from all ranks. */
static bool check_world(const dray_model_config *c, dray_megatron_spec *s)
{
    dray_plan_member members[MOST_RANKS + 1] = {{0}};
    uint32_t world = 0, made = 0;
    dray_error e = {0};
    int status = dray_megatron_place(s, 0, &world, &e);
    for (; !status && made < world; made += !status) {
        dray_layout *l;
        assert_int_equal(dray_megatron_place(s, made, NULL, &e), DRAY_OK);
        status = dray_layout_megatron(c, s, &l, &e);
        if (status)
            break;
        members[made] = (dray_plan_member){.layout = l, .member = made + 1, .process = made + 1};
        if (draw(8) == 0)
            check_by_name(c, s, l);
    }
    assert_true(status == DRAY_OK || (status == DRAY_EINVALID && e.message[0]));
    if (!status) {
        dray_layout *whole;
        dray_plan *plan;
        assert_int_equal(dray_layout_full(c, 0, DRAY_REGION_HOST, &whole, NULL), DRAY_OK);
        const dray_plan_member to = {.layout = whole, .member = 1000, .process = 1000};
        if (dray_plan_new(members, world, &to, NULL, &plan, &e))
            fail_msg("%s tp %u ep %u etp %u pp %u vpp %u: %s", c->family, s->tp, s->ep, s->etp,
                     s->pp, s->vpp, e.message);
        assert_true(dray_plan_total_bytes(plan) == dray_layout_bytes(whole));
        dray_plan_free(plan);
        dray_layout_free(whole);
    }
    while (made > 0)
        dray_layout_free((dray_layout *)members[--made].layout);
    return !status;
}

TEST(all_ranks_hold_the_model)
{
    int taken = 0;
    for (int i = 0; i < CASES; i++) {
        dray_model_config c = random_config();
        dray_megatron_spec s = random_spec();
        taken += check_world(&c, &s);
    }
    assert_true(taken > CASES / 20 && taken < CASES);
}

/* The region ends between gate and up: gate's tensor and block are taken out again, and its name is
 * free. */
TEST(what_fails_half_way_leaves_nothing)
{
    static const char name[] = "decoder.layers.0.mlp.linear_fc1.weight";
    const int64_t shape[] = {2 * 4864, 896};
    const dray_region_info region = {.kind = DRAY_REGION_HOST, .bytes = UINT64_C(3) * 4864 * 896};
    dray_model_config c;
    dray_layout *l, *before;
    dray_error e;
    uint32_t index;
    assert_int_equal(dray_model_config_load("qwen2.5-0.5b", &c, NULL), DRAY_OK);
    for (int i = 0; i < 2; i++) {
        dray_layout **made = i ? &before : &l;
        const int64_t norm[] = {896};
        assert_int_equal(dray_layout_new(made, NULL), DRAY_OK);
        assert_int_equal(dray_layout_add_region(*made, &region, NULL, NULL), DRAY_OK);
        assert_int_equal(dray_layout_add_megatron(*made, &c, NULL, 0,
                                                  "decoder.final_layernorm.weight", DRAY_BF16, 1,
                                                  norm, 0, 0, NULL),
                         DRAY_OK);
    }
    for (int i = 0; i < 40; i++)
        assert_int_equal(
            dray_layout_add_megatron(l, &c, NULL, 0, name, DRAY_BF16, 2, shape, 0, 0, &e),
            DRAY_EINVALID);
    assert_non_null(strstr(e.message, "up_proj"));
    assert_true(same_layout(l, before));
    assert_true(dray_layout_bytes(l) == 896 * 2);
    assert_int_equal(dray_layout_find(l, "model.norm.weight", &index, NULL), DRAY_OK);
    assert_int_equal(dray_layout_find(l, "model.layers.0.mlp.gate_proj.weight", &index, NULL),
                     DRAY_ENOENT);
    const int64_t gate[] = {4864, 896};
    assert_int_equal(dray_layout_add_tensor(l, "model.layers.0.mlp.gate_proj.weight", DRAY_BF16, 2,
                                            gate, &index, NULL),
                     DRAY_OK);
    dray_layout_free(l);
    dray_layout_free(before);
}

/* Experts packed into one parameter, cut over two ranks in all three ways. */
TEST(packed_modules_are_the_experts)
{
    static const char *const names[] = {"model.layers.1.mlp.experts.gate_up_proj",
                                        "model.layers.1.mlp.experts.down_proj"};
    dray_model_config c;
    dray_layout *l;
    assert_int_equal(dray_model_config_load("qwen3-30b-a3b", &c, NULL), DRAY_OK);
    for (int32_t dim = 0; dim < 3; dim++) {
        const dray_region_info region = {.kind = DRAY_REGION_HOST, .bytes = (uint64_t)1 << 40};
        uint64_t bytes = 0;
        assert_int_equal(dray_layout_new(&l, NULL), DRAY_OK);
        assert_int_equal(dray_layout_add_region(l, &region, NULL, NULL), DRAY_OK);
        const dray_mesh mesh = {
            .ndim = 1, .shape = {2}, .placements = {{.kind = DRAY_SHARD, .dim = dim}}};
        for (int64_t rank = 0; rank < 2; rank++)
            for (int n = 0; n < 2; n++) {
                int64_t local[DRAY_MAX_DIMS];
                assert_int_equal(dray_layout_add_module(l, &c, names[n], DRAY_BF16, 0, bytes, &mesh,
                                                        &rank, local, NULL),
                                 DRAY_OK);
                bytes += (uint64_t)(local[0] * local[1] * local[2]) * 2;
            }
        assert_int_equal(dray_layout_tensor_count(l), 128 * 3);
        assert_true(dray_layout_bytes(l) == bytes);
        assert_true(bytes == UINT64_C(128) * 3 * 768 * 2048 * 2);
        dray_layout_free(l);
    }
}

int main(void)
{
    seed = test_seed();
    return suite_run(NULL, NULL);
}
