/* Tests updates between the layouts of models with experts and latent attention: experts in several
 * slots, on one rank or many, ranks that hold other tensors than their neighbours, copies that a
 * draft model keeps, transposed storage, flat parameters. Memory equals the oracle, and the whole
 * model is verified. */
#include "suite.h"
#include "weights/cluster.h"

#include <stdint.h>

typedef struct scene {
    dray_model_config config;
    const char *from, *to; /* SPECs */
    dray_dtype source;     /* what the engine's values were; NONE: the same as its own */
    bool whole;            /* the engine takes all of the model */
    uint32_t trainers, engines, rank;
    uint64_t seed;
} scene;

static dray_model_config moe_config(const char *family)
{
    bool latent = strcmp(family, "deepseek_v3") == 0;
    dray_model_config c = {.vocab_size = 70,
                           .hidden_size = 32,
                           .intermediate_size = 48,
                           .layers = 3,
                           .heads = 4,
                           .kv_heads = latent ? 4 : 2,
                           .head_dim = 12,
                           .max_positions = 64,
                           .rms_norm_eps = 1e-6,
                           .rope_theta = 10000,
                           .qk_norm = !latent,
                           .dtype = DRAY_BF16,
                           .experts = 8,
                           .moe_intermediate_size = 16};
    if (latent) {
        c.shared_experts = c.first_k_dense = c.mtp_layers = 1;
        c.q_lora_rank = 24;
        c.kv_lora_rank = 16;
        c.qk_nope_head_dim = 8;
        c.qk_rope_head_dim = 4;
        c.v_head_dim = 8;
    }
    snprintf(c.family, sizeof c.family, "%s", family);
    return c;
}

/* The rank's layout of a SPEC; *count: how many ranks it has. */
static dray_layout *layout_of(const dray_model_config *config, const char *spec, uint32_t rank,
                              uint32_t *count)
{
    dray_layout **all;
    MUST(dray_layouts_from_spec(config, spec, &all, count, error));
    dray_layout *mine = NULL;
    for (uint32_t i = 0; i < *count; i++) {
        if (i == rank)
            mine = all[i];
        else
            dray_layout_free(all[i]);
    }
    free(all);
    if (!mine || cluster_kind == DRAY_REGION_SHARED)
        return mine;
    dray_layout *moved;
    MUST(dray__layout_in(mine, cluster_kind, NULL, &moved, error));
    dray_layout_free(mine);
    return moved;
}

static void run_trainer(void *user)
{
    scene *s = user;
    trainer t = {0};
    uint32_t world;
    cluster_choose_gpu(s->rank);
    t.context = fixture_open_at(f.unix_address, "trainer", "trainer", s->rank);
    t.layout = layout_of(&s->config, s->from, s->rank, &world);
    MUST(dray_regions_for_layout(t.layout, 1, t.region, error));
    fill(t.layout, t.region, false, s->seed);
    dray_publisher_options options = DRAY_PUBLISHER_OPTIONS_INIT;
    options.regions = t.region;
    options.rank = s->rank;
    options.world = world;
    MUST(dray_publisher_open(t.context, MODEL, t.layout, &options, &t.publisher, error));
    MUST(dray_publisher_publish(t.publisher, 1, NULL, error));
    MUST(dray_barrier(t.context, "over", s->trainers + s->engines, DRAY_WAIT_DEFAULT, error));
    trainer_close(&t);
}

static uint64_t tensors_of(const dray_model_config *config)
{
    dray_layout *full;
    uint64_t tensors = 0;
    MUST(dray_layout_full(config, DRAY_DTYPE_NONE, DRAY_REGION_HOST, &full, error));
    for (uint32_t t = 0; t < dray_layout_tensor_count(full); t++)
        tensors += dray_layout_tensor(full, t)->alias_of < 0;
    dray_layout_free(full);
    return tensors;
}

static void run_engine(void *user)
{
    scene *s = user;
    engine e = {.from = (int)s->source};
    uint32_t world;
    dray_update_report report = DRAY_UPDATE_REPORT_INIT;
    cluster_choose_gpu(s->rank + 1);
    e.context = fixture_open_at(f.unix_address, "engine", "engine", s->rank);
    e.layout = layout_of(&s->config, s->to, s->rank, &world);
    MUST(dray_regions_for_layout(e.layout, 1, e.region, error));
    dray_subscriber_options options = DRAY_SUBSCRIBER_OPTIONS_INIT;
    options.regions = e.region;
    options.group = "engine";
    options.rank = s->rank;
    options.world = world;
    MUST(dray_subscriber_open(e.context, MODEL, e.layout, &options, &e.subscriber, error));
    for (int32_t strategy = 0; strategy < 3; strategy++) {
        dray_update_options update = DRAY_UPDATE_OPTIONS_INIT;
        update.mode = DRAY_MODE_TENSOR;
        update.strategy = strategy;
        update.min_version = 1;
        poison(e.layout, e.region);
        MUST(dray_update_weights(e.subscriber, &update, &report, error));
        CHECK(report.bytes == dray_layout_bytes(e.layout));
        CHECK(!s->whole || report.verified_tensors == tensors_of(&s->config));
        CHECK(engine_wrong(&e, s->seed) == 0);
        MUST(dray_subscriber_verify(e.subscriber, error));
    }
    MUST(dray_barrier(e.context, "over", s->trainers + s->engines, DRAY_WAIT_DEFAULT, error));
    engine_close(&e);
}

static void run(const char *family, const char *from, const char *to, dray_dtype source, bool whole)
{
    scene s = {.config = moe_config(family), .from = from, .to = to, .source = source, .seed = 11};
    s.whole = whole;
    scene each[16];
    pid_t children[16];
    dray_layout_free(layout_of(&s.config, from, 0, &s.trainers));
    dray_layout_free(layout_of(&s.config, to, 0, &s.engines));
    assert_true(s.trainers + s.engines <= 16);
    for (uint32_t i = 0; i < s.trainers + s.engines; i++) {
        each[i] = s;
        each[i].rank = i < s.trainers ? i : i - s.trainers;
        children[i] = spawn(i < s.trainers ? run_trainer : run_engine, &each[i]);
    }
    for (uint32_t i = 0; i < s.trainers + s.engines; i++)
        must_end_well(children[i]);
}

CLUSTER_TEST(test_experts_by_rank)
{
    run("qwen3_moe", "fsdp:3", "engine:tp=4,ep=2", DRAY_DTYPE_NONE, true);
}

CLUSTER_TEST(test_redundant_slots_of_one_rank)
{
    run("qwen3_moe", "fsdp1:2", "engine:tp=1,redundant=5", DRAY_DTYPE_NONE, true);
}

CLUSTER_TEST(test_redundant_slots_of_many)
{
    run("qwen3_moe", "full", "engine:tp=4,ep=4,dp=4,redundant=8,transposed=1", DRAY_DTYPE_NONE,
        true);
}

CLUSTER_TEST(test_draft_with_copies)
{
    run("deepseek_v3", "fsdp1:3,dtype=f32", "engine:tp=2,ep=2,fused=1,draft=copies", DRAY_F32,
        true);
}

CLUSTER_TEST(test_stages)
{
    run("deepseek_v3", "fsdp:2", "engine:tp=2,pp=2,like=vllm,dp=2", DRAY_DTYPE_NONE, true);
}

CLUSTER_TEST(test_no_draft)
{
    run("deepseek_v3", "fsdp1:2,orig=1", "engine:tp=2,draft=none,transposed=1", DRAY_DTYPE_NONE,
        false);
}

CLUSTER_SUITE
