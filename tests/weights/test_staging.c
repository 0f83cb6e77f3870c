/* Tests trainers whose weights lie in an offloaded store (private memory, a file) on the engines'
 * host, and pass through a staging arena: several engines at once, stopped and killed engines,
 * trainers that are killed, and stores that no other process can open. */
#include "suite.h"
#include "weights/cluster.h"

#include <signal.h>
#include <stdint.h>
#include <sys/wait.h>

#include "weights/registry/registry.h"

enum { ROWS = 12000, COLUMNS = 512, WIDE = 70000, ENGINES = 4 };

static int start(void **state)
{
    setenv("DRAY_DATA_ADDRESS", "127.0.0.1", 1);
    cluster_start(state);
    return 0;
}

/* What one test is about, in memory that all its processes share. */
typedef struct scene {
    board *board; /* flags: 0 published, 1 the trainer may go; 5 + i: engine i is in mid-update */
    const char *file; /* the store; NULL: private memory */
    uint64_t staging;
    uint64_t bucket;
    int engine;
    bool halts, verify; /* halts: stays in mid-update until it is killed */
    int expected;       /* what the update must end with */
} scene;

static dray_layout *layout_of(dray_dtype dtype, dray_region_kind kind, const char *name)
{
    static const int64_t matrix[2] = {ROWS, COLUMNS}, wide[1] = {WIDE}, zero[2] = {0};
    uint64_t size = dray_dtype_size(dtype), first = size * ROWS * COLUMNS;
    dray_region_info info = {
        .kind = (int32_t)kind, .bytes = first + size * WIDE, .name = name ? name : "weights"};
    dray_layout *l;
    MUST(dray_layout_new(&l, error));
    MUST(dray_layout_add_region(l, &info, NULL, error));
    MUST(dray_layout_add_tensor(l, "matrix", dtype, 2, matrix, NULL, error));
    MUST(dray_layout_add_tensor(l, "wide", dtype, 1, wide, NULL, error));
    MUST(dray_layout_add_dense(l, 0, 0, zero, matrix, 0, error));
    MUST(dray_layout_add_dense(l, 1, 0, zero, wide, first, error));
    return l;
}

/* The store on disk. */
static void write_store(const char *path)
{
    dray_layout *l = layout_of(DRAY_F32, DRAY_REGION_HOST, NULL);
    dray_region *region;
    MUST(dray_regions_for_layout(l, 1, &region, error));
    fill(l, &region, false, 1);
    FILE *out = fopen(path, "we");
    CHECK(out);
    CHECK(fwrite(dray_region_base(region), 1, dray_region_bytes(region), out) ==
          dray_region_bytes(region));
    CHECK(fclose(out) == 0);
    dray_region_free(region);
    dray_layout_free(l);
}

static void run_trainer(void *user)
{
    const scene *s = user;
    dray_context *context = fixture_open_at(f.unix_address, "trainer", "trainer", 0);
    dray_layout *l = layout_of(DRAY_F32, s->file ? DRAY_REGION_FILE : DRAY_REGION_HOST, s->file);
    dray_region *region;
    dray_publisher_options options = DRAY_PUBLISHER_OPTIONS_INIT;
    dray_publisher *publisher;
    if (s->file) {
        write_store(s->file);
        MUST(dray_region_open(s->file, 0, &region, error));
        CHECK(unlink(s->file) == 0); /* from here on it is this process's alone */
    } else {
        MUST(dray_regions_for_layout(l, 1, &region, error));
        fill(l, &region, false, 1);
    }
    options.regions = &region;
    options.staging_bytes = s->staging;
    MUST(dray_publisher_open(context, MODEL, l, &options, &publisher, error));
    MUST(dray_publisher_publish(publisher, 1, NULL, error));
    raise_flag(s->board, 0);
    await_flag(s->board, 1);
    dray_publisher_close(publisher);
    dray_region_free(region);
    dray_layout_free(l);
    dray_close(context);
}

static void run_engine(void *user)
{
    const scene *s = user;
    char name[32];
    snprintf(name, sizeof name, "engine-%d", s->engine);
    cluster_choose_gpu((uint32_t)s->engine);
    dray_context *context = fixture_open_at(f.unix_address, name, "engine", 0);
    dray_layout *l = layout_of(DRAY_BF16, cluster_kind_or(DRAY_REGION_HOST), NULL);
    dray_region *region;
    dray_subscriber_options options = DRAY_SUBSCRIBER_OPTIONS_INIT;
    dray_subscriber *subscriber;
    dray_update_options update = DRAY_UPDATE_OPTIONS_INIT;
    dray_update_report report = DRAY_UPDATE_REPORT_INIT;
    MUST(dray_regions_for_layout(l, 1, &region, error));
    poison(l, &region);
    options.regions = &region;
    options.group = name;
    MUST(dray_subscriber_open(context, MODEL, l, &options, &subscriber, error));
    await_flag(s->board, 0);
    update.bucket_bytes = s->bucket;
    update.no_verify = !s->verify;
    MUST(dray_update_start(subscriber, &update, error));
    int rc = DRAY_EAGAIN;
    bool halted = false;
    uint8_t first[4], now[4];
    memory_get(region, 0, first, sizeof first);
    while (rc == DRAY_EAGAIN) {
        rc = dray_update_poll(subscriber, NULL);
        if (rc != DRAY_EAGAIN || halted)
            continue;
        memory_get(region, 0, now, sizeof now);
        if (!memcmp(first, now, sizeof first))
            continue;
        halted = true;
        raise_flag(s->board, 5 + s->engine);
        while (s->halts && s->board->flag[5 + s->engine])
            usleep(1000);
    }
    rc = dray_update_finish(subscriber, &report, NULL);
    if (rc != s->expected)
        fprintf(stderr, "%s: %s, not %s\n", name, dray_error_name(rc),
                dray_error_name(s->expected));
    CHECK(rc == s->expected);
    if (rc == DRAY_OK) {
        CHECK(report.bytes == dray_layout_bytes(l));
        CHECK(report.wire_bytes == 0);
        CHECK(wrong_elements(l, &region, false, 1, DRAY_F32) == 0);
        CHECK(!s->bucket || report.peak_extra_bytes <= s->bucket);
        CHECK(report.peak_extra_bytes <= s->staging);
    }
    dray_subscriber_close(subscriber);
    dray_region_free(region);
    dray_layout_free(l);
    dray_close(context);
}

static scene scene_of(uint64_t staging)
{
    return (scene){.board = board_new(), .staging = staging, .verify = true};
}

static void end_scene(scene *s, pid_t source)
{
    raise_flag(s->board, 1);
    must_end_well(source);
    munmap(s->board, sizeof *s->board);
}

static pid_t start_engine(scene *s, int number)
{
    s->engine = number;
    return spawn(run_engine, s);
}

/* More engines than its four slots serve at once, in either memory. */
TEST_WITHIN(several_engines, start, cluster_stop)
{
    char file[] = "/tmp/dray-test-staging-XXXXXX";
    (void)state;
    close(mkstemp(file));
    for (int i = 0; i < 4; i++) {
        scene s = scene_of(i == 1 ? (uint64_t)8 << 20 : (uint64_t)128 << 10);
        pid_t readers[ENGINES], source;
        s.file = i >= 2 ? file : NULL;
        s.verify = i != 3;
        s.bucket = i == 0 ? (uint64_t)128 << 10 : 0;
        source = spawn(run_trainer, &s);
        for (int e = 0; e < ENGINES; e++)
            readers[e] = start_engine(&s, e);
        all_end_well(readers, ENGINES);
        end_scene(&s, source);
    }
}

static void kill_hard(pid_t pid)
{
    CHECK(kill(pid, SIGKILL) == 0);
    CHECK(waitpid(pid, NULL, 0) == pid);
}

/* Their slots come back, or the last engine would find none. */
TEST_WITHIN(engines_that_die, start, cluster_stop)
{
    scene s = scene_of((uint64_t)128 << 10);
    pid_t source = spawn(run_trainer, &s);
    s.halts = true;
    for (int e = 0; e < 6; e++) {
        pid_t reader = start_engine(&s, e);
        await_flag(s.board, 5 + e);
        kill_hard(reader);
    }
    s.halts = false;
    must_end_well(start_engine(&s, 6));
    end_scene(&s, source);
}

/* It has two slots of four. */
TEST_WITHIN(an_engine_that_is_stopped, start, cluster_stop)
{
    scene s = scene_of((uint64_t)128 << 10);
    pid_t source = spawn(run_trainer, &s);
    s.halts = true;
    pid_t stopped = start_engine(&s, 0);
    await_flag(s.board, 5);
    s.halts = false;
    pid_t readers[2] = {start_engine(&s, 1), start_engine(&s, 2)};
    must_end_well(readers[0]);
    must_end_well(readers[1]);
    kill_hard(stopped);
    end_scene(&s, source);
}

TEST_WITHIN(a_trainer_that_dies, start, cluster_stop)
{
    scene s = scene_of((uint64_t)128 << 10);
    pid_t source = spawn(run_trainer, &s);
    s.expected = DRAY_ETORN;
    s.halts = true;
    pid_t reader = start_engine(&s, 0);
    await_flag(s.board, 5);
    kill_hard(source);
    s.board->flag[0] = 0;
    s.board->flag[5] = 0; /* it goes on */
    must_end_well(reader);
    s.expected = DRAY_OK;
    s.halts = false;
    source = spawn(run_trainer, &s);
    must_end_well(start_engine(&s, 0));
    end_scene(&s, source);
}

TEST_WITHIN(sizes_are_checked, start, cluster_stop)
{
    dray_context *context = fixture_open_at(f.unix_address, "trainer", "trainer", 0);
    dray_layout *l = layout_of(DRAY_F32, DRAY_REGION_HOST, NULL);
    dray_region *region;
    dray_publisher *publisher;
    dray_error why;
    MUST(dray_regions_for_layout(l, 1, &region, error));
    static const uint64_t wrong[] = {1, (128 << 10) - 1, ((uint64_t)1 << 30) + 1, UINT64_MAX};
    for (size_t i = 0; i < sizeof wrong / sizeof *wrong; i++) {
        dray_publisher_options options = DRAY_PUBLISHER_OPTIONS_INIT;
        options.regions = &region;
        options.staging_bytes = wrong[i];
        assert_int_equal(dray_publisher_open(context, MODEL, l, &options, &publisher, &why),
                         DRAY_EINVALID);
        assert_non_null(strstr(why.message, "staging_bytes"));
    }
    dray_publisher_options options = DRAY_PUBLISHER_OPTIONS_INIT;
    options.regions = &region;
    options.staging_bytes = 1 << 20;
    options.snapshot = 1;
    assert_int_equal(dray_publisher_open(context, MODEL, l, &options, &publisher, &why),
                     DRAY_EINVALID);
    dray_region_free(region);
    dray_layout_free(l);
    dray_close(context);
}

CLUSTER_SUITE
