/* Tests updates between processes. For any shardings, dtypes, modes and strategies, engine memory
 * equals the oracle, bit for bit, and the padding between is untouched. */
#include "control/reports.h"
#include "seed.h"
#include "suite.h"
#include "weights/cluster.h"

#include <stdint.h>

/* ---- random clusters ------------------------------------------------------------------------ */

typedef struct scene {
    dray_model_config config;
    dray_dtype from, to;
    uint32_t world, tp;
    uint64_t seed, bucket;
    char folder[128];
    board *board;
    uint32_t rank;
    dray_region_kind kind; /* of a waiting trainer's memory */
} scene;

static void run_trainer(void *user)
{
    scene *s = user;
    trainer t;
    trainer_open(&t, f.unix_address, &s->config, s->from, s->rank, s->world, s->seed, cluster_kind);
    for (uint64_t version = 1; version <= 3; version++) {
        MUST(dray_publisher_publish(t.publisher, version, NULL, error));
        MUST(dray_barrier(t.context, "updated", s->world + s->tp, DRAY_WAIT_DEFAULT, error));
        uint32_t dropped = 9;
        MUST(dray_publisher_wait(t.publisher, version, DRAY_WAIT_DEFAULT, &dropped, error));
        CHECK(dropped == 0);
        fill(t.layout, t.region, t.tied, s->seed + version); /* for the next version */
    }
    MUST(dray_barrier(t.context, "over", s->world + s->tp, DRAY_WAIT_DEFAULT, error));
    trainer_close(&t);
}

/* The group holds the whole model: all of it is compared with what was published. */
static void check_compared(const scene *s, const dray_update_report *report)
{
    dray_layout *full;
    uint64_t tensors = 0;
    MUST(dray_layout_full(&s->config, s->from, DRAY_REGION_HOST, &full, error));
    for (uint32_t t = 0; t < dray_layout_tensor_count(full); t++)
        tensors += dray_layout_tensor(full, t)->alias_of < 0;
    CHECK(report->verified_tensors == tensors);
    CHECK(report->verified_bytes == dray_layout_bytes(full));
    dray_layout_free(full);
}

static void update_and_check(const scene *s, engine *e, const dray_update_options *options,
                             uint64_t version, uint64_t seed)
{
    dray_update_report report = DRAY_UPDATE_REPORT_INIT;
    poison(e->layout, e->region);
    MUST(dray_update_weights(e->subscriber, options, &report, error));
    if (report.mode == DRAY_MODE_TENSOR)
        check_compared(s, &report);
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

CLUSTER_TEST(test_random_clusters)
{
    static const dray_dtype dtypes[][2] = {
        {DRAY_F32, DRAY_F32}, {DRAY_F32, DRAY_BF16}, {DRAY_BF16, DRAY_BF16}, {DRAY_BF16, DRAY_F32}};
    static const uint32_t tps[] = {1, 2, 4};
    uint64_t seed = test_seed();
    for (int i = 0; i < 10 * (1 + test_scale()); i++, seed++) {
        if (cluster_skips((size_t)i))
            continue;
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
        RUN_ROLES(&s, &s.rank, {run_trainer, s.world}, {run_engine, s.tp});
        remove_folder(s.folder);
    }
}

/* ---- one process: private memory, polled without waiting ------------------------------------ */

static void poll_both(engine *e, uint32_t count)
{
    int64_t deadline = dray__deadline(60 * DRAY__SECOND);
    for (uint32_t left = (1u << count) - 1; left;) {
        CHECK(dray__now() < deadline);
        for (uint32_t i = 0; i < count; i++)
            if ((left >> i & 1) && dray_update_poll(e[i].subscriber, NULL) == DRAY_OK)
                left &= ~(1u << i);
    }
}

CLUSTER_TEST_IN_PROCESS(test_one_process_with_private_memory)
{
    dray_model_config config = small_config(true, 7);
    trainer t[2];
    engine e[2];
    for (uint32_t i = 0; i < 2; i++)
        trainer_open(&t[i], f.unix_address, &config, DRAY_F32, i, 2, 11, DRAY_REGION_HOST);
    for (uint32_t i = 0; i < 2; i++)
        engine_open(&e[i], f.unix_address, &config, DRAY_F32, DRAY_BF16, "engine", i, 2);
    for (uint64_t version = 1; version < 4; version++) {
        for (uint32_t i = 0; i < 2; i++)
            MUST(dray_publisher_publish(t[i].publisher, version, NULL, error));
        for (uint32_t i = 0; i < 2; i++) {
            dray_update_options options = DRAY_UPDATE_OPTIONS_INIT;
            options.min_version = version;
            options.strategy = (int32_t)version - 1;
            MUST(dray_update_start(e[i].subscriber, &options, error));
            assert_int_equal(dray_update_start(e[i].subscriber, &options, NULL), DRAY_EBUSY);
        }
        poll_both(e, 2);
        for (uint32_t i = 0; i < 2; i++) {
            dray_update_report report = DRAY_UPDATE_REPORT_INIT;
            MUST(dray_update_finish(e[i].subscriber, &report, error));
            assert_int_equal(report.link_bytes[DRAY_LINK_PROCESS], report.bytes);
            assert_int_equal(report.planned, version == 1);
            assert_int_equal(engine_wrong(&e[i], 10 + version), 0);
        }
        for (uint32_t i = 0; i < 2; i++) {
            MUST(dray_publisher_wait(t[i].publisher, version, DRAY_WAIT_DEFAULT, NULL, error));
            fill(t[i].layout, t[i].region, true, 11 + version);
        }
    }
    /* a publisher that closes under its reader */
    for (uint32_t i = 0; i < 2; i++)
        MUST(dray_publisher_publish(t[i].publisher, 9, NULL, error));
    for (uint32_t i = 0; i < 2; i++)
        MUST(dray_update_start(e[i].subscriber, NULL, error));
    while (dray_update_poll(e[0].subscriber, NULL) == DRAY_EAGAIN) {
        int32_t group;
        MUST(dray_subscriber_version(e[0].subscriber, NULL, NULL, &group, error));
        dray_update_poll(e[1].subscriber, NULL);
        dray_publisher_close(t[0].publisher);
        t[0].publisher = NULL;
    }
    poll_both(e, 2);
    int rc[2];
    for (uint32_t i = 0; i < 2; i++)
        rc[i] = dray_update_finish(e[i].subscriber, NULL, NULL);
    assert_int_equal(rc[0] == DRAY_OK, rc[1] == DRAY_OK);
    for (uint32_t i = 0; i < 2; i++)
        engine_close(&e[i]);
    for (uint32_t i = 0; i < 2; i++)
        trainer_close(&t[i]);
}

/* ---- two engines that are cut differently, on different versions ----------------------------- */

static const char *text_of(const json_t *row, const char *key)
{
    return json_string_value(json_object_get(row, key));
}

static int64_t number_of(const json_t *row, const char *key)
{
    return json_integer_value(json_object_get(row, key));
}

/* What `dray status` says of the two groups. */
static void check_status(dray_context *context)
{
    char *text;
    size_t index;
    json_t *row;
    MUST(dray_context_status(context, &text, error));
    json_t *status = json_loads(text, 0, NULL);
    free(text);
    const json_t *groups = json_object_get(status, "groups");
    assert_int_equal(json_array_size(groups), 2);
    json_array_foreach(groups, index, row)
    {
        bool a = strcmp(text_of(row, "name"), "a") == 0;
        assert_string_equal(text_of(row, "state"), "whole");
        assert_int_equal(number_of(row, "version"), number_given(a ? 1 : 2));
        assert_int_equal(number_of(row, "ranks"), a ? 2 : 4);
        assert_string_equal(text_of(row, "mode"), a ? "distributed" : "tensor");
        assert_true(number_of(row, "update_bytes") > 0);
        assert_true(json_is_real(json_object_get(row, "update_seconds")));
    }
    assert_int_equal(json_array_size(json_object_get(status, "subscribers")), 6);
    assert_int_equal(json_array_size(json_object_get(status, "publishers")), 1);
    row = json_array_get(json_object_get(status, "publishers"), 0);
    assert_int_equal(number_of(row, "published"), number_given(2));
    row = json_array_get(json_object_get(status, "versions"), 0);
    assert_int_equal(number_of(row, "version"), number_given(2));
    assert_true(json_is_true(json_object_get(row, "ready")));
    json_decref(status);
}

CLUSTER_TEST_IN_PROCESS(test_two_groups_on_two_versions)
{
    dray_model_config config = small_config(false, 2);
    trainer t;
    engine a[2], b[4];
    trainer_open(&t, f.unix_address, &config, DRAY_BF16, 0, 1, 1, cluster_kind);
    for (uint32_t i = 0; i < 2; i++)
        engine_open(&a[i], f.unix_address, &config, DRAY_BF16, DRAY_BF16, "a", i, 2);
    for (uint32_t i = 0; i < 4; i++)
        engine_open(&b[i], f.unix_address, &config, DRAY_BF16, DRAY_F32, "b", i, 4);
    dray_update_options options = DRAY_UPDATE_OPTIONS_INIT;
    options.mode = DRAY_MODE_DISTRIBUTED; /* of one host: the same copies */
    MUST(dray_publisher_publish(t.publisher, 1, NULL, error));
    for (uint32_t i = 0; i < 2; i++)
        MUST(dray_update_start(a[i].subscriber, &options, error));
    poll_both(a, 2);
    MUST(dray_publisher_wait(t.publisher, 1, DRAY_WAIT_DEFAULT, NULL, error));
    fill(t.layout, t.region, false, 2);
    MUST(dray_publisher_publish(t.publisher, 2, NULL, error));
    for (uint32_t i = 0; i < 4; i++)
        MUST(dray_update_start(b[i].subscriber, NULL, error));
    poll_both(b, 4);
    for (uint32_t i = 0; i < 6; i++) {
        engine *e = i < 2 ? &a[i] : &b[i - 2];
        uint64_t version;
        int32_t group;
        MUST(dray_update_finish(e->subscriber, NULL, error));
        MUST(dray_subscriber_version(e->subscriber, &version, NULL, &group, error));
        assert_int_equal(version, i < 2 ? 1 : 2);
        assert_int_equal(group, DRAY_GROUP_WHOLE);
        assert_int_equal(engine_wrong(e, version), 0);
    }
    check_status(t.context);
    for (uint32_t i = 0; i < 6; i++)
        engine_close(i < 2 ? &a[i] : &b[i - 2]);
    trainer_close(&t);
}

/* ---- replicas -------------------------------------------------------------------------------- */

/* Two trainers that both hold everything: each element is announced once, and read once. Replicas
 * that differ are found. */
CLUSTER_TEST_IN_PROCESS(test_replicated_trainers)
{
    dray_model_config config = small_config(false, 4);
    dray_layout *layout;
    dray_context *context = fixture_open(&f, "trainer", "trainer", 0);
    dray_region *region[2];
    dray_publisher *publisher[2];
    engine e[2];
    MUST(dray_layout_full(&config, DRAY_F32, cluster_kind, &layout, error));
    for (uint32_t i = 0; i < 2; i++) {
        dray_publisher_options options = DRAY_PUBLISHER_OPTIONS_INIT;
        MUST(dray_regions_for_layout(layout, 1, &region[i], error));
        fill(layout, &region[i], false, 5);
        options.regions = &region[i];
        options.rank = i;
        options.world = 2;
        MUST(dray_publisher_open(context, MODEL, layout, &options, &publisher[i], error));
        engine_open(&e[i], f.unix_address, &config, DRAY_F32, DRAY_F32, "engine", i, 2);
    }
    for (uint64_t version = 1; version <= 2; version++) {
        for (uint32_t i = 0; i < 2; i++)
            MUST(dray_publisher_publish(publisher[i], version, NULL, error));
        for (uint32_t i = 0; i < 2; i++)
            MUST(dray_update_start(e[i].subscriber, NULL, error));
        poll_both(e, 2);
        for (uint32_t i = 0; i < 2; i++) {
            dray_error said;
            int rc = dray_update_finish(e[i].subscriber, NULL, &said);
            assert_int_equal(rc, version == 1 ? DRAY_OK : DRAY_ETORN);
            if (version == 1)
                assert_int_equal(engine_wrong(&e[i], 5), 0);
            else
                assert_non_null(strstr(said.message, "tensors differ"));
        }
        fill(layout, &region[0], false, 6);
        fill(layout, &region[1], false, 7);
    }
    for (uint32_t i = 0; i < 2; i++) {
        engine_close(&e[i]);
        dray_publisher_close(publisher[i]);
        dray_region_free(region[i]);
    }
    dray_layout_free(layout);
    dray_close(context);
}

/* ---- what is refused ------------------------------------------------------------------------ */

/* Publishes once, and waits for its end. */
static void run_waiting_trainer(void *user)
{
    const scene *s = user;
    trainer t;
    trainer_open(&t, f.unix_address, &s->config, DRAY_F32, 0, 1, 1, s->kind);
    MUST(dray_publisher_publish(t.publisher, 1, NULL, error));
    await_flag(s->board, 0);
    trainer_close(&t);
}

CLUSTER_TEST(test_private_memory_of_another_process)
{
    scene s = {.config = small_config(false, 0), .board = board_new(), .kind = DRAY_REGION_HOST};
    pid_t pid = spawn(run_waiting_trainer, &s);
    engine e;
    engine_open(&e, f.unix_address, &s.config, DRAY_F32, DRAY_F32, "engine", 0, 1);
    dray_error said;
    assert_int_equal(dray_update_weights(e.subscriber, NULL, NULL, &said), DRAY_EUNSUPPORTED);
    assert_non_null(strstr(said.message, "shared"));
    int32_t group;
    MUST(dray_subscriber_version(e.subscriber, NULL, NULL, &group, error));
    assert_int_equal(group, DRAY_GROUP_EMPTY);
    raise_flag(s.board, 0);
    must_end_well(pid);
    /* AUTO with a path: nobody publishes, the checkpoint is there */
    scene disk = {.config = s.config, .from = DRAY_F32, .seed = 3};
    snprintf(disk.folder, sizeof disk.folder, "%s/checkpoint", f.folder);
    write_checkpoint(&disk);
    dray_update_options options = DRAY_UPDATE_OPTIONS_INIT;
    dray_update_report report = DRAY_UPDATE_REPORT_INIT;
    options.path = disk.folder;
    options.path_version = 77;
    MUST(dray_update_weights(e.subscriber, &options, &report, error));
    assert_int_equal(report.mode, DRAY_MODE_DISK);
    assert_int_equal(report.version, 77);
    assert_int_equal(engine_wrong(&e, 3), 0);
    remove_folder(disk.folder);
    assert_int_equal(dray_update_weights(e.subscriber, &options, &report, &said), DRAY_ENOENT);
    engine_close(&e);
    munmap(s.board, sizeof(board));
}

static int start_tcp(void **state)
{
    f.tcp = true;
    return cluster_start(state); /* which forks: so does this test */
}

/* Engines elsewhere: said clearly, and nothing is written. */
TEST_WITHIN(test_other_hosts, start_tcp, cluster_stop)
{
    dray_model_config config = small_config(false, 0);
    trainer t;
    trainer_open(&t, f.unix_address, &config, DRAY_F32, 0, 1, 1, cluster_kind);
    MUST(dray_publisher_publish(t.publisher, 1, NULL, error));
    dray_layout *layout;
    dray_region *region;
    dray_engine_spec spec = DRAY_ENGINE_SPEC_INIT;
    MUST(dray_layout_engine(&config, &spec, &layout, error));
    MUST(dray_regions_for_layout(layout, 1, &region, error));
    for (int i = 0; i < 2; i++) {
        dray_options options = DRAY_OPTIONS_INIT;
        options.address = i ? f.unix_address : f.tcp_address;
        options.host = i ? "elsewhere" : NULL;
        dray_context *context;
        MUST(dray_open(&options, &context, error));
        dray_subscriber_options subscriber_options = DRAY_SUBSCRIBER_OPTIONS_INIT;
        dray_subscriber *subscriber;
        subscriber_options.regions = &region;
        subscriber_options.group = "far";
        MUST(dray_subscriber_open(context, MODEL, layout, &subscriber_options, &subscriber, error));
        for (int32_t mode = DRAY_MODE_AUTO; mode <= DRAY_MODE_DISTRIBUTED; mode++) {
            dray_update_options update = DRAY_UPDATE_OPTIONS_INIT;
            update.mode = mode;
            dray_error said;
            int rc = dray_update_weights(subscriber, &update, NULL, &said);
            if (i)
                assert_int_equal(rc, DRAY_EUNSUPPORTED);
            else
                assert_int_equal(rc, DRAY_OK); /* of this process: no descriptor needs to pass */
        }
        dray_subscriber_close(subscriber);
        dray_close(context);
    }
    dray_region_free(region);
    dray_layout_free(layout);
    trainer_close(&t);
}

/* Over TCP no descriptors pass: the memory of another process cannot be reached. */
TEST_WITHIN(test_tcp_cannot_pass_memory, start_tcp, cluster_stop)
{
    scene s = {.config = small_config(false, 0), .board = board_new(), .kind = cluster_kind};
    pid_t pid = spawn(run_waiting_trainer, &s);
    engine e;
    engine_open(&e, f.tcp_address, &s.config, DRAY_F32, DRAY_F32, "engine", 0, 1);
    dray_error said;
    assert_int_equal(dray_update_weights(e.subscriber, NULL, NULL, &said), DRAY_EUNSUPPORTED);
    engine_close(&e);
    raise_flag(s.board, 0);
    must_end_well(pid);
    munmap(s.board, sizeof(board));
}

CLUSTER_TEST_IN_PROCESS(test_wrong_arguments)
{
    dray_model_config config = small_config(false, 0), other = small_config(false, 1);
    trainer t;
    engine e;
    trainer_open(&t, f.unix_address, &config, DRAY_F32, 0, 1, 1, cluster_kind);
    engine_open(&e, f.unix_address, &other, DRAY_F32, DRAY_F32, "engine", 0, 1);
    MUST(dray_publisher_publish(t.publisher, 1, NULL, error));
    dray_update_options options = DRAY_UPDATE_OPTIONS_INIT;
    dray_error said;
    assert_int_equal(dray_update_weights(e.subscriber, NULL, NULL, &said), DRAY_ESHAPE);
    options.bucket_bytes = 1000;
    assert_int_equal(dray_update_weights(e.subscriber, &options, NULL, NULL), DRAY_EINVALID);
    options = (dray_update_options)DRAY_UPDATE_OPTIONS_INIT;
    options.strategy = 3;
    assert_int_equal(dray_update_weights(e.subscriber, &options, NULL, NULL), DRAY_EINVALID);
    options.strategy = 0;
    options.mode = DRAY_MODE_DISK;
    assert_int_equal(dray_update_weights(e.subscriber, &options, NULL, NULL), DRAY_EINVALID);
    options.mode = 9;
    assert_int_equal(dray_update_weights(e.subscriber, &options, NULL, NULL), DRAY_EINVALID);
    options.mode = 0;
    options.size = 3;
    assert_int_equal(dray_update_weights(e.subscriber, &options, NULL, NULL), DRAY_EINVALID);
    options.size = sizeof options;
    options.min_version = 2;
    options.timeout_ns = DRAY__MILLISECOND;
    assert_int_equal(dray_update_weights(e.subscriber, &options, NULL, &said), DRAY_ETIMEDOUT);
    assert_non_null(strstr(said.message, numbers_less() ? "version >= 1" : "version >= 2"));
    assert_int_equal(dray_update_poll(e.subscriber, NULL), DRAY_EINVALID);
    assert_int_equal(dray_update_finish(e.subscriber, NULL, NULL), DRAY_EINVALID);
    assert_int_equal(dray_publisher_publish(t.publisher, 1, NULL, NULL), DRAY_EINVALID);
    assert_int_equal(dray_publisher_wait(t.publisher, 2, 0, NULL, NULL), DRAY_EINVALID);
    engine_close(&e);
    trainer_close(&t);
}

/* ---- names in reports ------------------------------------------------------------------------ */

/* A report has room for a part of a name, whose characters have three bytes each here. */
CLUSTER_TEST(test_a_name_that_is_cut_in_a_report)
{
    char name[128] = "", json[4096];
    dray_model_config config = small_config(false, 3);
    scene_pair p;
    dray_publisher_options options = DRAY_PUBLISHER_OPTIONS_INIT;
    dray_update_report report = DRAY_UPDATE_REPORT_INIT;
    while (strlen(name) < 99)
        strcat(name, "\xe8\xa8\x93");
    pair_open(&p, &config, DRAY_F32, DRAY_BF16, 7, cluster_kind);
    dray_publisher_close(p.t.publisher);
    dray_close(p.t.context);
    p.t.context = fixture_open_at(f.unix_address, name, "trainer", 0);
    options.regions = p.t.region;
    MUST(dray_publisher_open(p.t.context, MODEL, p.t.layout, &options, &p.t.publisher, error));
    MUST(dray_publisher_publish(p.t.publisher, 1, NULL, error));
    MUST(dray_update_weights(p.e.subscriber, NULL, &report, error));
    MUST(dray_update_report_json(&report, json, sizeof json, error));
    json_t *object = json_loads(json, 0, NULL);
    const char *held_by = json_string_value(json_object_get(object, "held_by"));
    CHECK(held_by && strncmp(held_by, name, 63) == 0);
    json_decref(object);
    pair_close(&p);
}

/* Opens both ends of a pair again, with names of 255 bytes each, which JSON doubles. The trainer's
 * is in the report, too, because the engine waits for it. */
static void reopen_with_long_names(scene_pair *p, char name[256])
{
    memset(name, '"', 255);
    name[255] = 0;
    dray_publisher_options publisher = DRAY_PUBLISHER_OPTIONS_INIT;
    dray_subscriber_options subscriber = DRAY_SUBSCRIBER_OPTIONS_INIT;
    dray_publisher_close(p->t.publisher);
    dray_subscriber_close(p->e.subscriber);
    dray_close(p->t.context);
    fixture_host = "trainers";
    p->t.context = fixture_open_at(f.unix_address, name, "trainer", 0);
    fixture_host = NULL;
    publisher.regions = p->t.region;
    subscriber.regions = p->e.region;
    subscriber.group = name;
    MUST(dray_publisher_open(p->t.context, name, p->t.layout, &publisher, &p->t.publisher, error));
    MUST(dray_subscriber_open(p->e.context, name, p->e.layout, &subscriber, &p->e.subscriber,
                              error));
}

/* With a trainer on a GPU, which has a name of its own, the report has more than 2,048 bytes. */
CLUSTER_TEST(test_a_report_with_long_names_is_posted)
{
    char name[256];
    dray_model_config config = small_config(false, 3);
    dray__channel *channel;
    json_t *reports = NULL;
    uint64_t cursor = 0;
    scene_pair p;
    pair_open_apart(&p, &config, DRAY_F32, DRAY_BF16);
    reopen_with_long_names(&p, name);
    MUST(dray_subscriber_note_step(p.e.subscriber, INT64_MAX, error));
    MUST(dray_publisher_publish(p.t.publisher, INT64_MAX, NULL, error));
    MUST(dray_update_weights(p.e.subscriber, NULL, NULL, error));
    MUST(dray__channel_open(p.e.context, &channel, error));
    MUST(dray__reports_watch(channel, "update", &cursor, dray__deadline(5 * DRAY__SECOND), &reports,
                             error));
    const json_t *report = json_array_get(reports, 0);
    CHECK(strcmp(json_string_value(json_object_get(report, "model")), name) == 0);
    CHECK(strcmp(json_string_value(json_object_get(report, "group")), name) == 0);
    json_decref(reports);
    dray__channel_close(channel);
    pair_close(&p);
}

CLUSTER_SUITE
