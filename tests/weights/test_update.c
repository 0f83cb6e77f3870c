/* weights: updates between processes. Whatever shardings, dtypes, modes and strategies: engine
 * memory equals the oracle, bit for bit, and the padding between is untouched. */
#include "weights/cluster.h"

#include <setjmp.h>
#include <stdarg.h>
#include <stdint.h>

#include <cmocka.h>

static coordinator_fixture f;

static int start(void **state)
{
    (void)state;
    fixture_fork(&f, dray__registry_add);
    return 0;
}

static int stop(void **state)
{
    (void)state;
    fixture_stop(&f);
    return 0;
}

/* ---- random clusters ---------------------------------------------------------------------------
 */

typedef struct scene {
    dray_model_config config;
    dray_dtype from, to;
    uint32_t world, tp;
    uint64_t seed, bucket;
    char folder[128];
    board *board;
    uint32_t rank;
} scene;

static void run_trainer(void *user)
{
    scene *s = user;
    trainer t;
    trainer_open(&t, f.unix_address, &s->config, s->from, s->rank, s->world, s->seed,
                 DRAY_REGION_SHARED);
    for (uint64_t version = 1; version <= 3; version++) {
        MUST(dray_publish(t.publisher, version, NULL, error));
        CHECK(dray_publisher_incarnation(t.publisher) > 0);
        MUST(dray_barrier(t.context, "updated", s->world + s->tp, DRAY_WAIT_DEFAULT, error));
        uint32_t dropped = 9;
        MUST(dray_publisher_wait(t.publisher, version, DRAY_WAIT_DEFAULT, &dropped, error));
        CHECK(dropped == 0);
        fill(t.layout, t.region, t.tied, s->seed + version); /* for the next version */
    }
    MUST(dray_barrier(t.context, "over", s->world + s->tp, DRAY_WAIT_DEFAULT, error));
    trainer_close(&t);
}

static void update_and_check(const scene *s, engine *e, const dray_update_options *options,
                             uint64_t version, uint64_t seed)
{
    dray_update_report report = DRAY_UPDATE_REPORT_INIT;
    poison(e->layout, e->region);
    MUST(dray_update_weights(e->subscriber, options, &report, error));
    CHECK(report.version == version);
    CHECK(report.bytes == dray_layout_bytes(e->layout));
    uint64_t ceiling = options->bucket_bytes ? options->bucket_bytes : (64u << 20);
    CHECK(report.peak_extra_bytes <= ceiling);
    if (options->strategy == DRAY_STRATEGY_DIRECT && s->from == s->to &&
        report.mode == DRAY_MODE_TENSOR)
        CHECK(report.peak_extra_bytes == 0);
    CHECK(engine_wrong(e, seed) == 0);
    MUST(dray_subscriber_verify(e->subscriber, error));
    char json[2048];
    MUST(dray_update_report_json(&report, json, sizeof json, error));
    json_t *object = json_loads(json, 0, NULL);
    CHECK(object &&
          json_integer_value(json_object_get(object, "bytes")) == (json_int_t)report.bytes);
    json_decref(object);
}

static void run_engine(void *user)
{
    scene *s = user;
    engine e;
    engine_open(&e, f.unix_address, &s->config, s->from, s->to, "engine", s->rank, s->tp);
    for (uint64_t version = 1; version <= 3; version++) {
        dray_update_options options = DRAY_UPDATE_OPTIONS_INIT;
        options.mode = version == 2 ? DRAY_MODE_AUTO : DRAY_MODE_TENSOR;
        options.strategy = (int32_t)(version - 1);
        options.bucket_bytes = options.strategy == DRAY_STRATEGY_DIRECT ? 0 : s->bucket;
        options.min_version = version;
        update_and_check(s, &e, &options, version, s->seed + version - 1);
        MUST(dray_barrier(e.context, "updated", s->world + s->tp, DRAY_WAIT_DEFAULT, error));
    }
    /* what version 1 held is on disk, too, in the trainer's dtype */
    for (int32_t strategy = 0; strategy < 3; strategy++) {
        dray_update_options options = DRAY_UPDATE_OPTIONS_INIT;
        options.mode = DRAY_MODE_DISK;
        options.strategy = strategy;
        options.bucket_bytes = strategy == DRAY_STRATEGY_DIRECT ? 0 : s->bucket;
        options.path = s->folder;
        options.path_version = 40 + (uint64_t)strategy;
        update_and_check(s, &e, &options, options.path_version, s->seed);
    }
    uint64_t version;
    int32_t state;
    MUST(dray_subscriber_version(e.subscriber, &version, NULL, &state, error));
    CHECK(version == 42 && state == DRAY_GROUP_WHOLE);
    MUST(dray_barrier(e.context, "over", s->world + s->tp, DRAY_WAIT_DEFAULT, error));
    engine_close(&e);
}

static void write_checkpoint(const scene *s)
{
    dray_layout *full;
    dray_region *region[1];
    MUST(dray_layout_full(&s->config, s->from, DRAY_REGION_HOST, &full, error));
    MUST(dray_regions_for_layout(full, 1, region, error));
    fill(full, region, s->config.tied, s->seed);
    MUST(dray_checkpoint_write(s->folder, full, region, "{}", error));
    dray_region_free(region[0]);
    dray_layout_free(full);
}

static void remove_folder(const char *folder)
{
    char command[256];
    snprintf(command, sizeof command, "rm -rf '%s'", folder);
    CHECK(system(command) == 0);
}

static void test_random_clusters(void **state)
{
    (void)state;
    static const dray_dtype dtypes[][2] = {
        {DRAY_F32, DRAY_F32}, {DRAY_F32, DRAY_BF16}, {DRAY_BF16, DRAY_BF16}, {DRAY_BF16, DRAY_F32}};
    static const uint32_t tps[] = {1, 2, 4};
    const char *given = getenv("DRAY_TEST_SEED");
    uint64_t seed = given ? (uint64_t)atoll(given) : (uint64_t)getpid();
    for (int i = 0; i < 10 * fixture_scale(); i++, seed++) {
        uint64_t x = mix(seed);
        scene s = {.world = 1 + (uint32_t)(x % 5),
                   .tp = tps[(x >> 8) % 3],
                   .from = dtypes[(x >> 16) % 4][0],
                   .to = dtypes[(x >> 16) % 4][1],
                   .seed = seed * 100,
                   .bucket = 128u * 1024 + (x >> 24) % 100000};
        s.config = small_config((x >> 32) & 1, x >> 40);
        fprintf(stderr, "seed %" PRIu64 ": fsdp %u -> tp %u, %s -> %s%s\n", seed, s.world, s.tp,
                dray_dtype_name(s.from), dray_dtype_name(s.to), s.config.tied ? ", tied" : "");
        snprintf(s.folder, sizeof s.folder, "%s/checkpoint", f.folder);
        write_checkpoint(&s);
        pid_t pids[16];
        uint32_t count = 0;
        for (s.rank = 0; s.rank < s.world; s.rank++)
            pids[count++] = spawn(run_trainer, &s);
        for (s.rank = 0; s.rank < s.tp; s.rank++)
            pids[count++] = spawn(run_engine, &s);
        for (uint32_t k = 0; k < count; k++)
            must_end_well(pids[k]);
        remove_folder(s.folder);
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test_setup_teardown(test_random_clusters, start, stop),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
