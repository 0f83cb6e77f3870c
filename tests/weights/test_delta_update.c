/* Tests updates by delta between processes, in place and staged. A version changes a share of all
 * elements, and the oracle knows each changed element and its value. */
#include "suite.h"
#include "weights/cluster.h"

#include <stdint.h>

enum { TRAINERS = 3, ENGINES = 2, VERSIONS = 9 };

/* Of 1000 elements, those that change with each version. */
static const uint64_t shares[VERSIONS + 1] = {0, 1000, 10, 10, 0, 1000, 3, 10, 100, 10};

/* The last version that changed the element. */
static uint64_t changed_by(uint64_t hash, uint64_t index, uint64_t version)
{
    while (version > 1 && mix(hash ^ mix(index * 31 + version)) % 1000 >= shares[version])
        version--;
    return version;
}

typedef struct scene {
    dray_model_config config;
    dray_dtype from, to, sent; /* sent: of deltas */
    uint32_t rank;
    bool apart;  /* trainers and engines on two hosts */
    bool staged; /* engines prefetch and commit */
} scene;

static dray_model_config config_of(void)
{
    dray_model_config config = small_config(true, 3);
    config.vocab_size = 1500; /* more than a slice */
    return config;
}

static void run_trainer(void *user)
{
    scene *s = user;
    trainer t;
    memset(&t, 0, sizeof t);
    char name[32];
    snprintf(name, sizeof name, "trainer-%u", s->rank);
    t.tied = s->config.tied;
    fixture_host = s->apart ? "trainers" : NULL;
    cluster_choose_gpu(s->rank);
    t.context = fixture_open_at(f.unix_address, name, "trainer", s->rank);
    MUST(dray_layout_fsdp(&s->config, s->from, s->rank, TRAINERS, cluster_kind, &t.layout, error));
    MUST(dray_regions_for_layout(t.layout, 1, t.region, error));
    dray_publisher_options options = DRAY_PUBLISHER_OPTIONS_INIT;
    options.regions = t.region;
    options.rank = s->rank;
    options.world = TRAINERS;
    options.delta = 1;
    options.delta_dtype = (int32_t)s->sent;
    MUST(dray_publisher_open(t.context, MODEL, t.layout, &options, &t.publisher, error));
    for (uint64_t version = 1; version <= VERSIONS; version++) {
        fill(t.layout, t.region, t.tied, version);
        MUST(dray_publisher_publish(t.publisher, version, NULL, error));
        MUST(dray_barrier(t.context, "updated", TRAINERS + ENGINES, DRAY_WAIT_DEFAULT, error));
        MUST(dray_publisher_wait(t.publisher, version, DRAY_WAIT_DEFAULT, NULL, error));
    }
    trainer_close(&t);
}

/* By delta in every version but the first, that after a missed one, and that after damage. */
static void check_report(const scene *s, const dray_update_report *report, uint64_t version)
{
    bool delta =
        version != 1 && version != 4 && version != 5 && (version != 7 || s->apart || s->staged);
    if (s->staged && version == 9 && cluster_kind != DRAY_REGION_CUDA)
        delta = false; /* version 8 was taken in place, and is not in the staging */
    if ((s->sent ? s->sent : s->from) != s->to || (!s->apart && s->from != s->to))
        delta = false;
    CHECK((report->delta_covered_bytes > 0) == delta);
    if (delta && shares[version] <= 10)
        CHECK(report->delta_bytes * 100 <= report->delta_covered_bytes * (s->apart ? 2 : 3));
    if (delta && version != 8 && s->from == DRAY_BF16)
        CHECK(report->delta_covered_bytes * 10 >= report->bytes * 9); /* but for replicas */
    if (!s->apart)
        return;
    /* What went over the wire, requests and answers' heads included. */
    uint64_t full = report->bytes;
    if (delta && shares[version] <= 10 && version != 7)
        CHECK(report->wire_bytes * 100 <= full * 3 + 100 * 40000);
    CHECK(report->wire_bytes * 100 <= full * 102 + 100 * 40000);
}

/* Damage of the base is found, and repaired by a full update. */
static void damage_and_update(engine *e, const dray_update_options *options, uint32_t rank,
                              bool damaged)
{
    dray_error why = {0};
    if (rank == 0) {
        uint32_t tensor;
        MUST(dray_layout_find(e->layout, "model.layers.1.mlp.down_proj.weight", &tensor, error));
        for (uint32_t b = 0; b < dray_layout_block_count(e->layout); b++) {
            const dray_block *block = dray_layout_block(e->layout, b);
            if (block->tensor == tensor)
                memory_flip(e->region[0], block->offset, 4);
        }
    }
    if (damaged)
        return; /* a rectangle that is wrong afterwards is fetched again */
    CHECK(dray_update_weights(e->subscriber, options, NULL, &why) == DRAY_ETORN);
    CHECK(strstr(why.message, "down_proj"));
}

/* What the engine has is not touched by a prefetch: the commit exchanges or copies. */
static void prefetch_and_commit(engine *e, const dray_update_options *options,
                                dray_update_report *report, uint64_t version)
{
    dray_update_report after = DRAY_UPDATE_REPORT_INIT;
    uint64_t before = version == 4 ? 2 : version - 1;
    MUST(dray_prefetch_weights(e->subscriber, options, report, error));
    if (before)
        CHECK(engine_wrong(e, before) == 0);
    MUST(dray_commit_weights(e->subscriber, NULL, &after, error));
    CHECK((after.exchanged_bytes > 0) == (cluster_kind == DRAY_REGION_CUDA));
}

static void run_engine(void *user)
{
    scene *s = user;
    engine e;
    fixture_host = s->apart ? "engines" : NULL;
    engine_open(&e, f.unix_address, &s->config, s->from, s->to, "engine", s->rank, ENGINES);
    for (uint64_t version = 1; version <= VERSIONS; version++) {
        dray_update_options options = DRAY_UPDATE_OPTIONS_INIT;
        dray_update_report report = DRAY_UPDATE_REPORT_INIT;
        options.strategy = (int32_t)(version % 3);
        options.min_version = version;
        options.nccl_bytes = 1 << 20; /* too little for slots: data servers answer */
        if (version == 7 && s->from == s->to && !s->sent && !s->staged)
            damage_and_update(&e, &options, s->rank, s->apart);
        if (version != 3) {
            if (s->staged && version != 8)
                prefetch_and_commit(&e, &options, &report, version);
            else
                MUST(dray_update_weights(e.subscriber, &options, &report, error));
            check_report(s, &report, version);
            CHECK(engine_wrong(&e, version) == 0);
            MUST(dray_subscriber_verify(e.subscriber, error));
        }
        MUST(dray_barrier(e.context, "updated", TRAINERS + ENGINES, DRAY_WAIT_DEFAULT, error));
    }
    engine_close(&e);
}

static void run(dray_dtype from, dray_dtype to, dray_dtype sent, bool apart, bool staged)
{
    scene scenes[TRAINERS + ENGINES];
    pid_t pids[TRAINERS + ENGINES];
    element_seed = changed_by;
    for (uint32_t i = 0; i < TRAINERS + ENGINES; i++) {
        bool trains = i < TRAINERS;
        scenes[i] = (scene){config_of(), from, to, sent, trains ? i : i - TRAINERS, apart, staged};
        pids[i] = spawn(trains ? run_trainer : run_engine, &scenes[i]);
    }
    all_end_well(pids, TRAINERS + ENGINES);
}

CLUSTER_TEST(test_bf16)
{
    run(DRAY_BF16, DRAY_BF16, DRAY_DTYPE_NONE, false, false);
}

CLUSTER_TEST(test_f32)
{
    run(DRAY_F32, DRAY_F32, DRAY_DTYPE_NONE, false, false);
}

/* What is converted on the way is copied as a whole. */
CLUSTER_TEST(test_converted)
{
    run(DRAY_F32, DRAY_BF16, DRAY_BF16, false, false);
    run(DRAY_F32, DRAY_F32, DRAY_BF16, false, false);
}

CLUSTER_TEST(test_staged)
{
    run(DRAY_BF16, DRAY_BF16, DRAY_DTYPE_NONE, false, true);
    run(DRAY_F32, DRAY_BF16, DRAY_BF16, true, true);
}

CLUSTER_TEST(test_apart)
{
    run(DRAY_BF16, DRAY_BF16, DRAY_DTYPE_NONE, true, false);
    run(DRAY_F32, DRAY_BF16, DRAY_BF16, true, false);
    run(DRAY_F32, DRAY_BF16, DRAY_DTYPE_NONE, true, false); /* the other dtype's are of no use */
}

/* ---- publishes that fail --------------------------------------------------------------------- */

static void alone_open(trainer *t, const dray_model_config *config)
{
    *t = (trainer){.tied = config->tied};
    cluster_choose_gpu(0);
    t->context = fixture_open_at(f.unix_address, "trainer-0", "trainer", 0);
    MUST(dray_layout_fsdp(config, DRAY_BF16, 0, 1, cluster_kind, &t->layout, error));
    MUST(dray_regions_for_layout(t->layout, 1, t->region, error));
    dray_publisher_options options = DRAY_PUBLISHER_OPTIONS_INIT;
    options.regions = t->region;
    options.delta = 1;
    MUST(dray_publisher_open(t->context, MODEL, t->layout, &options, &t->publisher, error));
}

static void meet(dray_context *context)
{
    MUST(dray_barrier(context, "updated", 2, DRAY_WAIT_DEFAULT, error));
}

/* Version 2 is refused, because it has the number of version 1. */
static void run_refused_trainer(void *user)
{
    trainer t;
    (void)user;
    dray_model_config config = config_of();
    alone_open(&t, &config);
    for (uint64_t version = 1; version <= 4; version++) {
        fill(t.layout, t.region, t.tied, version);
        if (version == 2) {
            CHECK(dray_publisher_publish(t.publisher, 1, NULL, NULL) == DRAY_EINVALID);
            continue;
        }
        MUST(dray_publisher_publish(t.publisher, version, NULL, error));
        meet(t.context);
        MUST(dray_publisher_wait(t.publisher, version, DRAY_WAIT_DEFAULT, NULL, error));
    }
    trainer_close(&t);
}

/* Version 3 comes as a whole, since no engine has the bits that were kept of version 2. */
static void run_refused_engine(void *user)
{
    engine e;
    (void)user;
    dray_model_config config = config_of();
    engine_open(&e, f.unix_address, &config, DRAY_BF16, DRAY_BF16, "engine", 0, 1);
    for (uint64_t version = 1; version <= 4; version++) {
        if (version == 2)
            continue;
        dray_update_options options = DRAY_UPDATE_OPTIONS_INIT;
        dray_update_report report = DRAY_UPDATE_REPORT_INIT;
        options.min_version = version;
        options.no_verify = 1;
        MUST(dray_update_weights(e.subscriber, &options, &report, error));
        CHECK(engine_wrong(&e, version) == 0);
        CHECK((report.delta_covered_bytes > 0) == (version == 4));
        meet(e.context);
    }
    engine_close(&e);
}

CLUSTER_TEST(test_refused)
{
    element_seed = changed_by;
    RUN_ROLES(NULL, NULL, {run_refused_trainer, 1}, {run_refused_engine, 1});
}

/* What stands before the delta fails: the publish fails with that. */
static void run_freed(void *user)
{
    trainer t;
    dray_error why = {0};
    (void)user;
    dray_model_config config = config_of();
    alone_open(&t, &config);
    fill(t.layout, t.region, t.tied, 1);
    MUST(dray_publisher_publish(t.publisher, 1, NULL, error));
    MUST(dray_publisher_wait(t.publisher, 1, DRAY_WAIT_DEFAULT, NULL, error));
    dray_region_free(t.region[0]);
    CHECK(dray_publisher_publish(t.publisher, 2, NULL, &why) == DRAY_ESTALE);
    CHECK(strstr(why.message, "was freed since it was registered"));
    t.region[0] = NULL;
    trainer_close(&t);
}

CLUSTER_TEST(test_freed)
{
    RUN_ROLES(NULL, NULL, {run_freed, 1});
}

CLUSTER_SUITE
