/* Tests updates from checkpoints that are deltas. The engine's memory is compared with the oracle
 * of every element, and the report has the bytes that were read. */
#include "suite.h"
#include "weights/cluster.h"

#include <stdint.h>

static char folder[128];

static int start(void **state)
{
    cluster_start(state);
    snprintf(folder, sizeof folder, "/tmp/dray-test-XXXXXX");
    assert_non_null(mkdtemp(folder));
    return 0;
}

static int stop(void **state)
{
    char command[256];
    cluster_stop(state);
    snprintf(command, sizeof command, "rm -rf '%s'", folder);
    return system(command);
}

enum { ENGINES = 2, VERSIONS = 4 };

/* 1 % changes with each version. */
static uint64_t changed_by(uint64_t hash, uint64_t index, uint64_t version)
{
    while (version > 1 && mix(hash ^ mix(index * 31 + version)) % 100 >= 1)
        version--;
    return version;
}

static dray_model_config config_of(void)
{
    dray_model_config config = small_config(false, 3);
    config.vocab_size = 1500;
    return config;
}

static void save_all(void)
{
    dray_model_config config = config_of();
    dray_layout *layout;
    dray_region *region;
    MUST(dray_layout_full(&config, DRAY_BF16, DRAY_REGION_HOST, &layout, error));
    MUST(dray_regions_for_layout(layout, 1, &region, error));
    for (uint64_t version = 1; version <= VERSIONS; version++) {
        dray_checkpoint_options options = DRAY_CHECKPOINT_OPTIONS_INIT;
        options.version = version;
        options.deltas = 2; /* 1 and 4 are whole */
        fill(layout, &region, false, version);
        MUST(dray_checkpoint_save(NULL, folder, layout, &region, &options, error));
    }
    dray_region_free(region);
    dray_layout_free(layout);
}

static int update(engine *e, uint64_t version, dray_update_report *report, dray_error *said)
{
    char path[256];
    dray_update_options options = DRAY_UPDATE_OPTIONS_INIT;
    snprintf(path, sizeof path, "%s/step-%06" PRIu64, folder, version);
    options.mode = DRAY_MODE_DISK;
    options.path = path;
    options.path_version = version;
    *report = (dray_update_report)DRAY_UPDATE_REPORT_INIT;
    return dray_update_weights(e->subscriber, &options, report, said);
}

/* levels: so many deltas lead from what is held to the version; 0: it is read in full. */
static void must_update(engine *e, uint64_t version, uint64_t levels, bool same)
{
    dray_update_report report;
    bool by_delta = levels > 0;
    MUST(update(e, version, &report, error));
    CHECK((report.delta_covered_bytes > 0) == (by_delta && same));
    if (by_delta && same) {
        CHECK(report.delta_covered_bytes * 10 >= report.bytes * 9); /* but for replicas */
        /* Of columns, each rank reads the whole rows' entries. */
        uint64_t all = report.delta_covered_bytes * ENGINES;
        CHECK(report.delta_bytes * 100 <= all * 3 * levels);
        CHECK(report.delta_bytes * 1000 >= report.delta_covered_bytes * 12 * levels);
    }
    CHECK(engine_wrong(e, version) == 0);
    MUST(dray_subscriber_verify(e->subscriber, error));
}

typedef struct scene {
    uint32_t rank;
    dray_dtype dtype;
} scene;

static void run_engine(void *user)
{
    scene *s = user;
    engine e;
    dray_model_config config = config_of();
    /* memory of GPUs takes no deltas yet: it gets base and delta, as what is converted does */
    bool same = s->dtype == DRAY_BF16 && cluster_kind != DRAY_REGION_CUDA;
    engine_open(&e, f.unix_address, &config, DRAY_BF16, s->dtype, "engine", s->rank, ENGINES);
    must_update(&e, 2, 0, same); /* holds nothing */
    must_update(&e, 1, 0, same); /* an older one */
    must_update(&e, 2, 1, same);
    must_update(&e, 3, 1, same); /* holds 2: the newer delta alone */
    must_update(&e, 2, 0, same);
    must_update(&e, 4, 0, same); /* whole */
    must_update(&e, 1, 0, same);
    must_update(&e, 3, 2, same); /* missed 2 */
    must_update(&e, 1, 0, same);
    if (same) { /* a base in memory that is not what it was */
        dray_update_report report;
        dray_error why = {0};
        memory_flip(e.region[0], dray_layout_block(e.layout, 0)->offset, 4);
        CHECK(update(&e, 2, &report, &why) == DRAY_ETORN);
        must_update(&e, 2, 0, same); /* in full */
    }
    engine_close(&e);
}

static void run(dray_dtype dtype)
{
    scene scenes[ENGINES];
    pid_t pids[ENGINES];
    element_seed = changed_by;
    save_all();
    for (uint32_t i = 0; i < ENGINES; i++) {
        scenes[i] = (scene){i, dtype};
        pids[i] = spawn(run_engine, &scenes[i]);
    }
    all_end_well(pids, ENGINES);
}

TEST_WITHIN(test_same_dtype, start, stop)
{
    run(DRAY_BF16);
}

/* Converted on the way: base and delta are read. */
TEST_WITHIN(test_converted, start, stop)
{
    run(DRAY_F32);
}

CLUSTER_SUITE
