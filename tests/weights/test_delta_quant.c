/* Tests deltas of a publisher of floats for an engine of FP8 on another host. The publisher's data
 * server quantises both versions, and sends the codes and scales that differ. After each update the
 * engine's memory is compared with that of an engine that takes all weights for the first time. */
#include "suite.h"
#include "weights/cluster.h"

#include <stdint.h>

enum { TRAINERS = 2, VERSIONS = 9, SKIPPED = 3, STILL = 5, FAR = 6, DAMAGED = 7, ALL = 8 };

/* Of 1000 elements, those that move to the next value of bf16. */
static const uint32_t shares[VERSIONS + 1] = {0, 0, 10, 10, 10, 0, 3, 10, 1000, 10};

typedef struct scene {
    dray_model_config config;
    uint32_t rank;
    bool staged;     /* the engine prefetches and commits */
    bool unverified; /* no sum shows a wrong element */
    uint32_t tp, tp_rank;
    int32_t scale_format;
} scene;

/* Moves elements by one step, and in one version some by more than a delta's entry counts. */
static void change(dray_region *region, uint32_t rank, uint64_t version)
{
    uint8_t *bytes = memory_open(region);
    uint64_t count = dray_region_bytes(region) / 2;
    for (uint64_t i = 0; i < count; i++) {
        uint16_t bits;
        uint64_t drawn = mix(mix(i * 4 + rank) + version);
        memcpy(&bits, bytes + 2 * i, sizeof bits);
        if ((bits & 0x7fff) < 0x80 || (bits & 0x7fff) >= 0x7e00 || drawn % 1000 >= shares[version])
            continue;
        bits = (uint16_t)(bits + (drawn >> 32 & 1 ? 1 : -1));
        if (version == FAR && (drawn >> 33) % 32 == 0 && i < count / 2)
            bits = (uint16_t)(bits + 0x100); /* four times as much: a new scale, too */
        memcpy(bytes + 2 * i, &bits, sizeof bits);
    }
    memory_close(region, bytes, true);
}

static void run_trainer(void *user)
{
    scene *s = user;
    trainer t = {0};
    char name[32];
    snprintf(name, sizeof name, "trainer-%u", s->rank);
    fixture_host = "trainers";
    cluster_choose_gpu(s->rank);
    t.context = fixture_open_at(f.unix_address, name, "trainer", s->rank);
    MUST(
        dray_layout_fsdp(&s->config, DRAY_BF16, s->rank, TRAINERS, cluster_kind, &t.layout, error));
    MUST(dray_regions_for_layout(t.layout, 1, t.region, error));
    dray_publisher_options options = DRAY_PUBLISHER_OPTIONS_INIT;
    options.regions = t.region;
    options.rank = s->rank;
    options.world = TRAINERS;
    options.delta = 1;
    MUST(dray_publisher_open(t.context, MODEL, t.layout, &options, &t.publisher, error));
    fill(t.layout, t.region, t.tied, 1);
    for (uint64_t version = 1; version <= VERSIONS; version++) {
        if (version > 1)
            change(t.region[0], s->rank, version);
        MUST(dray_publisher_publish(t.publisher, version, NULL, error));
        MUST(dray_barrier(t.context, "updated", TRAINERS + 1, DRAY_WAIT_DEFAULT, error));
        MUST(dray_publisher_wait(t.publisher, version, DRAY_WAIT_DEFAULT, NULL, error));
    }
    trainer_close(&t);
}

static void open_quantised(engine *e, const scene *s, const char *name)
{
    memset(e, 0, sizeof *e);
    cluster_choose_gpu(TRAINERS);
    e->context = fixture_open_at(f.unix_address, name, "engine", 0);
    dray_engine_quant quant = {.size = sizeof quant,
                               .kind = DRAY_QUANT_BLOCK,
                               .block = {128, 128},
                               .scale_format = s->scale_format};
    dray_engine_spec spec = DRAY_ENGINE_SPEC_INIT;
    spec.tp = s->tp;
    spec.tp_rank = s->tp_rank;
    spec.kind = cluster_kind;
    spec.quant = &quant;
    MUST(dray_layout_engine(&s->config, &spec, &e->layout, error));
    MUST(dray_regions_for_layout(e->layout, 1, e->region, error));
    poison(e->layout, e->region);
    engine_subscribe(e, name, 0, 1, 0);
}

static void update(engine *e, const scene *s, uint64_t version, dray_update_report *report)
{
    dray_update_options options = DRAY_UPDATE_OPTIONS_INIT;
    options.min_version = version;
    options.no_verify = s->unverified;
    if (!s->staged) {
        MUST(dray_update_weights(e->subscriber, &options, report, error));
        return;
    }
    MUST(dray_prefetch_weights(e->subscriber, &options, report, error));
    MUST(dray_commit_weights(e->subscriber, NULL, NULL, error));
}

static void must_be_whole(engine *e, const scene *s, uint64_t version)
{
    engine alone;
    scene direct = *s;
    char name[32];
    direct.staged = direct.unverified = false;
    snprintf(name, sizeof name, "alone-%llu", (unsigned long long)version);
    open_quantised(&alone, s, name);
    update(&alone, &direct, version, NULL);
    uint8_t *bytes = memory_open(e->region[0]), *others = memory_open(alone.region[0]);
    CHECK(memcmp(bytes, others, dray_region_bytes(e->region[0])) == 0);
    memory_close(e->region[0], bytes, false);
    memory_close(alone.region[0], others, false);
    if (!s->unverified)
        MUST(dray_subscriber_verify(e->subscriber, error));
    engine_close(&alone);
}

static bool is_quantised(const dray_layout *layout, uint32_t block)
{
    uint32_t tensor = dray_layout_block(layout, block)->tensor;
    return dray_layout_tensor(layout, tensor)->dtype == DRAY_F8E4M3;
}

/* Bits of a code change behind dray's back. The wrong rectangle is fetched again, as a whole. */
static void damage(engine *e)
{
    for (uint32_t b = 0; b < dray_layout_block_count(e->layout); b++)
        if (is_quantised(e->layout, b)) {
            memory_flip(e->region[0], dray_layout_block(e->layout, b)->offset + 5, 3);
            return;
        }
    CHECK(!"a quantised block");
}

static void check_report(const dray_update_report *report, uint64_t version)
{
    bool delta = version != 1 && version != SKIPPED + 1 && version != ALL;
    CHECK((report->delta_covered_bytes > 0) == delta);
    if (version == 2 || version == STILL || version == VERSIONS) {
        CHECK(report->delta_covered_bytes * 100 >= report->bytes * 85);
        CHECK(report->delta_bytes * 100 <= report->delta_covered_bytes);
    }
    if (version == 1)
        CHECK(report->wire_bytes >= report->bytes);
    if (version == 2)
        CHECK(report->wire_bytes * 100 <=
              report->bytes * (cluster_kind == DRAY_REGION_CUDA ? 12 : 1));
}

static void run_engine(void *user)
{
    const scene *s = user;
    engine e;
    fixture_host = "engines";
    open_quantised(&e, s, "engine-0");
    for (uint64_t version = 1; version <= VERSIONS; version++) {
        dray_update_report report = DRAY_UPDATE_REPORT_INIT;
        if (version == DAMAGED && !s->staged && !s->unverified)
            damage(&e);
        if (version != SKIPPED) {
            update(&e, s, version, &report);
            check_report(&report, version);
            must_be_whole(&e, s, version);
        }
        MUST(dray_barrier(e.context, "updated", TRAINERS + 1, DRAY_WAIT_DEFAULT, error));
    }
    engine_close(&e);
}

static void run(scene s)
{
    setenv("DRAY_NCCL_LIBRARY", "", 1); /* NCCL brings everything whole */
    scene scenes[TRAINERS + 1];
    pid_t pids[TRAINERS + 1];
    for (uint32_t i = 0; i <= TRAINERS; i++) {
        scenes[i] = s;
        scenes[i].rank = i;
        pids[i] = spawn(i < TRAINERS ? run_trainer : run_engine, &scenes[i]);
    }
    all_end_well(pids, TRAINERS + 1);
}

/* The emulated GPU takes its time under a sanitizer: a short run has fewer elements. */
static dray_model_config config_of(int64_t intermediate)
{
    return test_is_short() ? cell_config(128, 256, intermediate, 1, 4, 4)
                           : cell_config(256, 512, intermediate, 2, 8, 8);
}

CLUSTER_TEST(test_in_place)
{
    run((scene){.config = config_of(1024), .tp = 1});
}

CLUSTER_TEST(test_prefetched)
{
    run((scene){.config = config_of(1024), .tp = 1, .staged = true});
}

CLUSTER_TEST(test_without_sums)
{
    run((scene){.config = config_of(1024), .tp = 1, .unverified = true});
}

/* Scales that are powers of two change less often, and then all codes of their cell do. */
CLUSTER_TEST(test_powers_of_two)
{
    run((scene){.config = config_of(1024), .tp = 1, .scale_format = DRAY_SCALE_UE8M0});
}

/* Trainers' blocks end within cells, which are gathered as floats then, and come as a whole. */
CLUSTER_TEST(test_cut_cells)
{
    run((scene){.config = config_of(768), .tp = 2, .tp_rank = 1});
}

CLUSTER_SUITE
