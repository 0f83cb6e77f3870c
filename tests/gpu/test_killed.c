/* Tests processes that are killed while one reads the other's memory, for both forms of memory: an
 * arena's, and cudaMalloc's by IPC handle. Memory that a killed engine had mapped is free again,
 * and the other engines finish. After a trainer was killed, engines have the whole version, say
 * that they have the old one, or say that they are torn, and the next trainer repairs them. */
#include "gpu/scene.h"

enum { PUBLISHED, STOPPED, DEAD, UPDATED, GO_ON, ROWS = 1 << 10 };

typedef struct play {
    bool ipc;         /* cudaMalloc's memory */
    const char *step; /* at which the engine is when somebody dies */
    uint64_t bytes, version;
    board *board;
} play;

static play p;

/* ---- memory ---------------------------------------------------------------------------------- */

static uint8_t byte_of(uint64_t at, uint64_t version)
{
    return (uint8_t)(mix(at / 8 % 8191 + (version << 32)) >> at % 8 * 8);
}

enum { PIECE = 8 << 20 };

/* Writes a version, or counts bytes that are not it. */
static uint64_t pass_over(dray_region *region, uint64_t version, bool write)
{
    uint8_t *want = malloc(PIECE), *found = malloc(PIECE);
    uint64_t wrong = 0;
    CHECK(want && found);
    for (uint64_t i = 0; i < PIECE; i++) /* the same in each piece: it is long */
        want[i] = byte_of(i, version);
    for (uint64_t at = 0; at < dray_region_bytes(region); at += PIECE) {
        uint64_t left = dray_region_bytes(region) - at, n = left < PIECE ? left : PIECE;
        if (write) {
            memory_put(region, at, want, n);
            continue;
        }
        memory_get(region, at, found, n);
        if (memcmp(want, found, n) != 0)
            for (uint64_t i = 0; i < n; i++)
                wrong += want[i] != found[i];
    }
    free(want);
    free(found);
    return wrong;
}

static uint64_t used_memory(void)
{
    size_t available, total;
    dray__cuda_device *device;
    MUST(dray__cuda_device_at(0, &device, error));
    MUST(dray__cuda_enter(device, error));
    CHECK(dray__cuda_get(NULL)->cuMemGetInfo(&available, &total) == CUDA_SUCCESS);
    dray__cuda_leave();
    return total - available;
}

static dray_layout *make_layout(void)
{
    dray_layout *layout;
    const int64_t shape[] = {ROWS, (int64_t)(p.bytes / 2 / ROWS)}, start[2] = {0};
    dray_region_info info = {.kind = DRAY_REGION_CUDA, .bytes = p.bytes, .name = "all"};
    MUST(dray_layout_new(&layout, error));
    MUST(dray_layout_add_region(layout, &info, NULL, error));
    MUST(dray_layout_add_tensor(layout, "all", DRAY_BF16, 2, shape, NULL, error));
    MUST(dray_layout_add_dense(layout, 0, 0, start, shape, 0, error));
    return layout;
}

static dray_region *make_region(bool ipc)
{
    dray_region *region;
    if (!ipc) {
        MUST(dray_region_alloc(DRAY_REGION_CUDA, p.bytes, "all", &region, error));
        return region;
    }
    CUdeviceptr own;
    dray__cuda_device *device;
    MUST(dray__cuda_device_at(0, &device, error));
    MUST(dray__cuda_enter(device, error));
    CHECK(dray__cuda_get(NULL)->cuMemAlloc(&own, p.bytes) == CUDA_SUCCESS);
    dray__cuda_leave();
    MUST(dray_region_wrap_cuda(own, p.bytes, "all", &region, error));
    return region;
}

static void free_memory(dray_region *region)
{
    CUdeviceptr own = dray_region_device_address(region);
    dray__cuda_device *device = region->device;
    dray_region_free(region);
    if (!p.ipc)
        return;
    MUST(dray__cuda_enter(device, error));
    CHECK(dray__cuda_get(NULL)->cuMemFree(own) == CUDA_SUCCESS);
    dray__cuda_leave();
}

/* ---- ranks ----------------------------------------------------------------------------------- */

static void open_trainer(trainer *t)
{
    memset(t, 0, sizeof *t);
    see_one(0);
    t->context = fixture_open_at(f.unix_address, "trainer", "trainer", 0);
    t->layout = make_layout();
    t->region[0] = make_region(p.ipc);
    pass_over(t->region[0], p.version, true);
    dray_publisher_options options = DRAY_PUBLISHER_OPTIONS_INIT;
    options.regions = t->region;
    MUST(dray_publisher_open(t->context, MODEL, t->layout, &options, &t->publisher, error));
}

static void open_engine(engine *e, const char *group, uint32_t gpu)
{
    memset(e, 0, sizeof *e);
    see_one(gpu % gpus);
    e->context = fixture_open_at(f.unix_address, group, "engine", 0);
    e->layout = make_layout();
    e->region[0] = make_region(false);
    gpu_poison(e->region[0]);
    engine_subscribe(e, group, 0, 1, 0);
}

/* ---- an engine dies -------------------------------------------------------------------------- */

static void victim(void *user)
{
    engine e;
    (void)user;
    open_engine(&e, "victim", 0);
    die_at_step(p.step);
    dray_update_weights(e.subscriber, NULL, NULL, NULL);
}

static void survivor(void *user)
{
    engine e;
    (void)user;
    open_engine(&e, "survivor", 1);
    MUST(dray_update_weights(e.subscriber, NULL, NULL, error));
    CHECK(pass_over(e.region[0], p.version, false) == 0);
    raise_flag(p.board, UPDATED);
    while (!__atomic_load_n(&p.board->flag[GO_ON], __ATOMIC_SEQ_CST)) {
        MUST(dray_subscriber_release_mappings(e.subscriber, error));
        usleep(2000);
    }
    engine_close(&e);
}

/* Everything that the dead one had mapped is free as soon as this process frees it. Others begin
 * and end on a real GPU meanwhile: they have less. */
static void bereft_trainer(void *user)
{
    trainer t;
    uint32_t count = 9;
    (void)user;
    open_trainer(&t);
    MUST(dray_publisher_publish(t.publisher, 1, NULL, error));
    raise_flag(p.board, PUBLISHED);
    await_flag(p.board, UPDATED);
    await_flag(p.board, DEAD);
    MUST(dray_publisher_wait(t.publisher, 1, 10 * DRAY__SECOND, NULL, error));
    MUST(dray_publisher_release(t.publisher, 20 * DRAY__SECOND, NULL, 0, &count, error));
    CHECK(count == 0);
    uint64_t before = used_memory(), least = gpu_is_real() ? p.bytes / 2 : p.bytes;
    int64_t deadline = dray__now() + 20 * DRAY__SECOND;
    dray_publisher_close(t.publisher);
    free_memory(t.region[0]);
    while (before - used_memory() < least || before < used_memory())
        CHECK(dray__now() < deadline);
    raise_flag(p.board, GO_ON);
    dray_layout_free(t.layout);
    dray_close(t.context);
}

static void engine_dies(const char *step, bool ipc)
{
    p.step = step;
    p.ipc = ipc;
    p.version = 1;
    p.board = board_new();
    pid_t trainer_pid = spawn(bereft_trainer, NULL);
    await_flag(p.board, PUBLISHED);
    pid_t other = spawn(survivor, NULL);
    must_be_killed(spawn(victim, NULL));
    raise_flag(p.board, DEAD);
    must_end_well(trainer_pid);
    must_end_well(other);
    munmap(p.board, sizeof(board));
}

CLUSTER_TEST(test_engine_dies)
{
    engine_dies("moving", false);
    engine_dies("moving", true);
}

/* ---- a trainer dies -------------------------------------------------------------------------- */

static void dying_trainer(void *user)
{
    trainer t;
    (void)user;
    open_trainer(&t);
    MUST(dray_publisher_publish(t.publisher, p.version, NULL, error));
    raise_flag(p.board, PUBLISHED);
    await_flag(p.board, GO_ON);
    trainer_close(&t);
}

static void stop_here(void *user, const char *step)
{
    (void)user;
    if (strcmp(step, p.step) != 0)
        return;
    dray__hook_set(NULL, NULL);
    raise_flag(p.board, STOPPED);
    await_flag(p.board, DEAD);
}

/* The trainer of version 2 dies while it is read; version 3 is another one's. */
static void orphan(void *user)
{
    engine e;
    dray_error said = {0};
    int32_t state;
    uint64_t version;
    (void)user;
    open_engine(&e, "orphan", 1);
    dray__hook_set(stop_here, NULL);
    dray_update_options options = DRAY_UPDATE_OPTIONS_INIT;
    options.timeout_ns = 10 * DRAY__SECOND;
    int rc = dray_update_weights(e.subscriber, &options, NULL, &said);
    dray__hook_set(NULL, NULL);
    MUST(dray_subscriber_version(e.subscriber, &version, NULL, &state, error));
    fprintf(stderr, "trainer's memory %s, killed at %s: %s, engine %s: %s\n",
            p.ipc ? "by IPC handle" : "of an arena", p.step, dray_error_name(rc),
            state == DRAY_GROUP_TORN    ? "torn"
            : state == DRAY_GROUP_WHOLE ? "whole"
                                        : "as before",
            said.message);
    CHECK((rc == DRAY_OK) == (state == DRAY_GROUP_WHOLE));
    if (rc == DRAY_OK)
        CHECK(pass_over(e.region[0], 2, false) == 0);
    else if (state != DRAY_GROUP_TORN)
        CHECK(pass_over(e.region[0], 2, false) > 0);
    raise_flag(p.board, UPDATED);
    options.min_version = 3;
    options.timeout_ns = 30 * DRAY__SECOND;
    MUST(dray_update_weights(e.subscriber, &options, NULL, error));
    CHECK(pass_over(e.region[0], 3, false) == 0);
    MUST(dray_subscriber_verify(e.subscriber, error));
    engine_close(&e);
}

static void trainer_dies(const char *step, bool ipc)
{
    p.step = step;
    p.ipc = ipc;
    p.version = 2;
    p.board = board_new();
    pid_t first = spawn(dying_trainer, NULL);
    await_flag(p.board, PUBLISHED);
    pid_t engine_pid = spawn(orphan, NULL);
    await_flag(p.board, STOPPED);
    kill(first, SIGKILL);
    end_of(first);
    raise_flag(p.board, DEAD);
    await_flag(p.board, UPDATED);
    p.version = 3;
    pid_t second = spawn(dying_trainer, NULL);
    must_end_well(engine_pid);
    raise_flag(p.board, GO_ON);
    must_end_well(second);
    munmap(p.board, sizeof(board));
}

CLUSTER_TEST(test_trainer_dies_arena)
{
    trainer_dies("import", false);
    trainer_dies("moving", false);
    trainer_dies("moved", false);
}

CLUSTER_TEST(test_trainer_dies_ipc)
{
    trainer_dies("import", true);
    trainer_dies("moving", true);
    trainer_dies("moved", true);
}

int main(void)
{
    scenes_begin();
    p.bytes = gpu_is_real() ? (uint64_t)4 << 30 : (uint64_t)16 << 20;
    return cluster_run();
}
