/* Compares the memory that an update holds, as the kernel counts it (resident private pages), with
 * the report, when one tensor is many times larger than the bucket. Both sides are measured: the
 * engine that reads, and the trainer whose weights lie offloaded in private memory and pass through
 * bounded staging, which is the data server's, or an arena of a declared size. */
#include "suite.h"
#include "weights/cluster.h"

#include <stdint.h>

enum { ROWS = 10000, COLUMNS = 1024, SMALL = 300 }; /* 41 MB of f32, 20 MB of bf16 */

#define BUCKET ((uint64_t)2 << 20)
/* The data server's buffers (64 of 512 KiB), however many readers there are. */
#define SERVER ((uint64_t)32 << 20)
#if defined(__SANITIZE_THREAD__)
#define SLACK ((int64_t)1 << 30) /* several bytes of shadow for each that was touched */
#elif defined(__SANITIZE_ADDRESS__)
#define SLACK ((int64_t)96 << 20) /* shadows */
#else
#define SLACK ((int64_t)1 << 20)
#endif

static int start(void **state)
{
    setenv("DRAY_DATA_ADDRESS", "127.0.0.1", 1);
    cluster_start(state);
    return 0;
}

/* Of a process: bytes that are its own and resident; of_shared: and those in shared memory. */
static int64_t resident(pid_t pid, bool of_shared)
{
    char line[128], path[64];
    int64_t kb = -1;
    snprintf(path, sizeof path, "/proc/%d/status", (int)pid);
    FILE *file = fopen(path, "re");
    CHECK(file);
    while (fgets(line, sizeof line, file))
        if (sscanf(line, "RssAnon: %" SCNd64, &kb) == 1)
            break;
    for (int64_t shared; of_shared && fgets(line, sizeof line, file);)
        if (sscanf(line, "RssShmem: %" SCNd64, &shared) == 1)
            kb += shared;
    fclose(file);
    return kb * 1024;
}

static dray_layout *layout_of(dray_dtype dtype, dray_region_kind kind)
{
    static const int64_t large[2] = {ROWS, COLUMNS}, small[1] = {SMALL}, zero[2] = {0};
    uint64_t size = dray_dtype_size(dtype), first = size * ROWS * COLUMNS;
    dray_region_info info = {
        .kind = (int32_t)kind, .bytes = first + size * SMALL, .name = "weights"};
    dray_layout *l;
    MUST(dray_layout_new(&l, error));
    MUST(dray_layout_add_region(l, &info, NULL, error));
    MUST(dray_layout_add_tensor(l, "large", dtype, 2, large, NULL, error));
    MUST(dray_layout_add_tensor(l, "small", dtype, 1, small, NULL, error));
    MUST(dray_layout_add_dense(l, 0, 0, zero, large, 0, error));
    MUST(dray_layout_add_dense(l, 1, 0, zero, small, first, error));
    return l;
}

typedef struct scene {
    dray_region_kind store; /* HOST: offloaded, private; SHARED: resident */
    uint64_t staging;       /* of the arena; 0: none */
    const char *folder;     /* a checkpoint; NULL: from the trainer */
    board *board;           /* flags: 0 published, 1 read; number 0: the trainer's process */
} scene;

static void run_trainer(void *user)
{
    const scene *s = user;
    dray_context *context = fixture_open_at(f.unix_address, "trainer", "trainer", 0);
    dray_layout *l = layout_of(DRAY_F32, s->store);
    dray_region *region;
    dray_publisher_options options = DRAY_PUBLISHER_OPTIONS_INIT;
    dray_publisher *publisher;
    MUST(dray_regions_for_layout(l, 1, &region, error));
    fill(l, &region, false, 1);
    options.regions = &region;
    options.staging_bytes = s->staging;
    MUST(dray_publisher_open(context, MODEL, l, &options, &publisher, error));
    MUST(dray_publisher_publish(publisher, 1, NULL, error));
    s->board->number[0] = getpid();
    raise_flag(s->board, 0);
    await_flag(s->board, 1);
    dray_publisher_close(publisher);
    dray_region_free(region);
    dray_layout_free(l);
    dray_close(context);
}

/* Looks at both processes between the slices of an update. */
static void update_watched(dray_subscriber *subscriber, const dray_update_options *options,
                           pid_t source, bool of_shared, dray_update_report *report,
                           int64_t grown[2])
{
    int64_t before[2] = {resident(getpid(), of_shared), source ? resident(source, of_shared) : 0};
    grown[0] = grown[1] = 0;
    MUST(dray_update_start(subscriber, options, error));
    for (int rc = DRAY_EAGAIN; rc == DRAY_EAGAIN;) {
        rc = dray_update_poll(subscriber, NULL);
        int64_t now[2] = {resident(getpid(), of_shared), source ? resident(source, of_shared) : 0};
        for (int i = 0; i < 2; i++)
            grown[i] = now[i] - before[i] > grown[i] ? now[i] - before[i] : grown[i];
    }
    MUST(dray_update_finish(subscriber, report, error));
}

/* What the trainer's side may hold. */
static uint64_t most_of(const scene *s)
{
    return s->staging ? s->staging : s->store == DRAY_REGION_HOST ? SERVER : 0;
}

static void run_engine(void *user)
{
    const scene *s = user;
    dray_context *context = fixture_open_at(f.unix_address, "engine", "engine", 0);
    dray_layout *l = layout_of(DRAY_BF16, DRAY_REGION_HOST);
    dray_region *region;
    dray_subscriber_options options = DRAY_SUBSCRIBER_OPTIONS_INIT;
    dray_subscriber *subscriber;
    MUST(dray_regions_for_layout(l, 1, &region, error));
    options.regions = &region;
    options.group = "engine";
    MUST(dray_subscriber_open(context, MODEL, l, &options, &subscriber, error));
    if (!s->folder)
        await_flag(s->board, 0);
    for (int32_t strategy = DRAY_STRATEGY_BUCKET; strategy <= DRAY_STRATEGY_PARAMETER; strategy++) {
        dray_update_options update = DRAY_UPDATE_OPTIONS_INIT;
        dray_update_report report = DRAY_UPDATE_REPORT_INIT;
        int64_t grown[2];
        poison(l, &region);
        update.strategy = strategy;
        update.bucket_bytes = BUCKET;
        update.path = s->folder;
        update.path_version = 1;
        update.mode = s->folder ? DRAY_MODE_DISK : DRAY_MODE_AUTO;
        update_watched(subscriber, &update, (pid_t)s->board->number[0], s->staging != 0, &report,
                       grown);
        CHECK(report.bytes == dray_layout_bytes(l));
        CHECK(wrong_elements(l, &region, false, 1, DRAY_F32) == 0);
        fprintf(stderr,
                "strategy %d: %" PRIu64 " bytes said, engine grew by %" PRId64
                ", trainer by %" PRId64 "\n",
                strategy, report.peak_extra_bytes, grown[0], grown[1]);
        CHECK(report.peak_extra_bytes <= BUCKET);
        CHECK(grown[0] <= (int64_t)BUCKET + SLACK);
        CHECK(grown[1] <= (int64_t)most_of(s) + SLACK);
    }
    raise_flag(s->board, 1);
    dray_subscriber_close(subscriber);
    dray_region_free(region);
    dray_layout_free(l);
    dray_close(context);
}

static void run(dray_region_kind store, uint64_t staging, const char *folder)
{
    scene s = {.store = store, .staging = staging, .folder = folder, .board = board_new()};
    pid_t source = folder ? 0 : spawn(run_trainer, &s), reader = spawn(run_engine, &s);
    must_end_well(reader);
    if (source)
        must_end_well(source);
    munmap(s.board, sizeof *s.board);
}

TEST(resident_weights)
{
    run(DRAY_REGION_SHARED, 0, NULL);
}

TEST(offloaded_weights)
{
    run(DRAY_REGION_HOST, 0, NULL);
}

TEST(staged_weights)
{
    run(DRAY_REGION_HOST, BUCKET, NULL);
}

static void write_checkpoint(void *user)
{
    dray_layout *l = layout_of(DRAY_F32, DRAY_REGION_HOST);
    dray_region *region;
    MUST(dray_regions_for_layout(l, 1, &region, error));
    fill(l, &region, false, 1);
    MUST(dray_checkpoint_write(user, l, &region, NULL, error));
    dray_region_free(region);
    dray_layout_free(l);
}

TEST(checkpoints)
{
    char folder[] = "/tmp/dray-test-ceilings-XXXXXX", command[64];
    CHECK(mkdtemp(folder));
    must_end_well(spawn(write_checkpoint, folder));
    run(DRAY_REGION_SHARED, 0, folder);
    snprintf(command, sizeof command, "rm -r %s", folder);
    CHECK(system(command) == 0);
}

SUITE(start, cluster_stop)
