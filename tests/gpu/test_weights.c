/* Tests weights between processes with memory on GPUs. For any GPUs that the ranks see, and any
 * kinds of memory, dtypes and strategies, the engine's memory equals the oracle, bit for bit. */
#include "gpu/scene.h"
#include "memory/cuda_event.h"

enum { UPDATED = 4, KILLED = 8, FILLED = 10 };

static void check_report(const scene *s, const engine *e, const dray_update_report *report)
{
    uint32_t gpu = s->engine_gpus[s->rank] % gpus;
    bool here = false;
    for (uint32_t i = 0; i < s->world; i++)
        here |= s->trainer_gpus[i] % gpus == gpu;
    CHECK(report->bytes == dray_layout_bytes(e->layout));
    if (s->source == DRAY_REGION_CUDA && s->destination == DRAY_REGION_CUDA)
        CHECK((report->link_bytes[DRAY_LINK_DEVICE] > 0) == here);
    if (!s->no_checksums)
        CHECK(report->verified_tensors > 0);
}

static void run_engine(void *user)
{
    scene *s = user;
    engine e = scene_engine(s);
    for (uint64_t version = 1; version <= s->versions; version++) {
        dray_update_options options = DRAY_UPDATE_OPTIONS_INIT;
        dray_update_report report = DRAY_UPDATE_REPORT_INIT;
        options.min_version = version;
        options.no_peers = 1;
        options.strategy = s->strategies ? (int32_t)((version - 1) % 3) : 0;
        options.bucket_bytes = options.strategy ? 128 << 10 : 0;
        gpu_poison(e.region[0]);
        MUST(dray_update_weights(e.subscriber, &options, &report, error));
        CHECK(gpu_engine_wrong(&e, s->seed + version - 1) == 0);
        MUST(dray_subscriber_verify(e.subscriber, error));
        check_report(s, &e, &report);
        CHECK(report.planned == (version == 1));
        if (options.strategy)
            CHECK(report.peak_extra_bytes > 0 && report.peak_extra_bytes <= options.bucket_bytes);
        meet(e.context, "updated", s);
    }
    meet(e.context, "over", s);
    engine_close(&e);
}

/* ---- tests ------------------------------------------------------------------------------------
 */

/* Trainer and engine ranks share GPUs. */
CLUSTER_TEST(test_colocated)
{
    scene s = plain(11);
    run_scene(&s, run_engine);
    s = plain(12);
    s.from = DRAY_F32;
    run_scene(&s, run_engine);
}

/* Each process sees one GPU, and no rank shares one with the other side. */
CLUSTER_TEST(test_side_by_side)
{
    scene s = plain(13);
    for (int i = 0; i < 4; i++) {
        s.trainer_gpus[i] = 0;
        s.engine_gpus[i] = 1;
    }
    s.world = 4;
    run_scene(&s, run_engine);
}

/* Four trainers that see one GPU each; one engine's ranks are with two of them, the other's are on
 * other GPUs (where there are so many). */
CLUSTER_TEST(test_mixed)
{
    scene s = plain(14);
    s.world = 4;
    s.groups = 2;
    for (uint32_t i = 0; i < 4; i++) {
        s.trainer_gpus[i] = gpus >= 6 ? i : i / 2;
        s.engine_gpus[i] = gpus >= 6 && i >= 2 ? i + 2 : i;
    }
    run_scene(&s, run_engine);
}

/* Each process sees all GPUs: what a cast makes smaller is pushed by the trainer's. */
CLUSTER_TEST(test_pushed)
{
    scene s = plain(32);
    s.from = DRAY_F32;
    s.sees_all = true;
    s.strategies = false;
    for (uint32_t i = 0; i < 2; i++)
        s.engine_gpus[i] = i + 2;
    run_scene(&s, run_engine);
}

/* A prefetch that is spread over a time is not over before, and brings what any other does. */
#define WITHIN 0.25
static void run_prefetching(void *user)
{
    scene *s = user;
    engine e = scene_engine(s);
    for (uint64_t version = 1; version <= s->versions; version++) {
        dray_update_options options = DRAY_UPDATE_OPTIONS_INIT;
        dray_update_report report = DRAY_UPDATE_REPORT_INIT;
        options.min_version = version;
        options.prefetch_seconds = version % 2 ? WITHIN : 0;
        MUST(dray_prefetch_weights(e.subscriber, &options, &report, error));
        CHECK(!options.prefetch_seconds || (double)report.total_ns * 1e-9 > WITHIN / 2);
        options.prefetch_seconds = 0;
        MUST(dray_commit_weights(e.subscriber, &options, &report, error));
        CHECK(gpu_engine_wrong(&e, s->seed + version - 1) == 0);
        options.prefetch_seconds = WITHIN; /* nothing else is spread */
        CHECK(dray_update_weights(e.subscriber, &options, &report, NULL) == DRAY_EINVALID);
        options.prefetch_seconds = -1;
        CHECK(dray_prefetch_weights(e.subscriber, &options, &report, NULL) == DRAY_EINVALID);
        meet(e.context, "updated", s);
    }
    meet(e.context, "over", s);
    engine_close(&e);
}

CLUSTER_TEST(test_prefetch_within)
{
    scene s = plain(37);
    s.config.intermediate_size = 1536; /* several launches */
    s.versions = 3;
    run_scene(&s, run_prefetching);
    s = plain(38);
    s.config.intermediate_size = 1536;
    s.from = DRAY_F32; /* two steps */
    s.sees_all = true;
    s.versions = 1;
    for (uint32_t i = 0; i < 2; i++)
        s.engine_gpus[i] = i + 2;
    run_scene(&s, run_prefetching);
}

CLUSTER_TEST(test_pinned_source)
{
    scene s = plain(15);
    s.source = DRAY_REGION_PINNED;
    run_scene(&s, run_engine);
}

CLUSTER_TEST(test_pinned_destination)
{
    scene s = plain(16);
    s.destination = DRAY_REGION_PINNED;
    s.strategies = false;
    run_scene(&s, run_engine);
}

/* What is not on a GPU, on either side. */
CLUSTER_TEST(test_shared_and_gpu)
{
    scene s = plain(17);
    s.source = DRAY_REGION_SHARED;
    s.strategies = false;
    s.versions = 2;
    run_scene(&s, run_engine);
    s = plain(18);
    s.destination = DRAY_REGION_SHARED;
    s.strategies = false;
    s.versions = 2;
    run_scene(&s, run_engine);
}

CLUSTER_TEST(test_without_sums)
{
    scene s = plain(19);
    s.no_checksums = 1;
    run_scene(&s, run_engine);
}

/* ---- one process -------------------------------------------------------------------------------
 */

/* Publisher and subscriber are threads of one process: read by pointer. */
static void one_process(void *user)
{
    scene *s = user;
    trainer t;
    engine e;
    see_one(0);
    gpu_trainer_open(&t, f.unix_address, &s->config, s->from, 0, 1, s->seed, DRAY_REGION_CUDA, 0);
    gpu_engine_open(&e, f.unix_address, &s->config, s->from, s->to, "engine", 0, 1,
                    DRAY_REGION_CUDA);
    for (uint64_t version = 1; version <= 2; version++) {
        dray_update_report report = DRAY_UPDATE_REPORT_INIT;
        MUST(dray_publisher_publish(t.publisher, version, NULL, error));
        MUST(dray_update_weights(e.subscriber, NULL, &report, error));
        CHECK(report.link_bytes[DRAY_LINK_PROCESS] == report.bytes);
        CHECK(gpu_engine_wrong(&e, s->seed + version - 1) == 0);
        MUST(dray_publisher_wait(t.publisher, version, DRAY_WAIT_DEFAULT, NULL, error));
        gpu_fill(t.layout, t.region[0], t.tied, s->seed + version);
    }
    /* an update that goes on when the publisher closes: it fails, and reads nothing any more */
    MUST(dray_publisher_publish(t.publisher, 3, NULL, error));
    MUST(dray_update_start(e.subscriber, NULL, error));
    dray_error said;
    for (int i = 0; i < 3; i++)
        dray_update_poll(e.subscriber, &said);
    trainer_close(&t);
    while (dray_update_poll(e.subscriber, &said) == DRAY_EAGAIN)
        usleep(200);
    int rc = dray_update_finish(e.subscriber, NULL, &said);
    CHECK(rc != 0 || gpu_engine_wrong(&e, s->seed + 2) == 0);
    engine_close(&e);
}

CLUSTER_TEST(test_one_process)
{
    scene s = plain(20);
    must_end_well(spawn(one_process, &s));
}

/* ---- fences ------------------------------------------------------------------------------------
 */

/* The bytes come with a stream, whose event is the fence: without waiting here, never stale. */
static void fenced_trainer(void *user)
{
    scene *s = user;
    trainer t;
    see_one(0);
    gpu_trainer_open(&t, f.unix_address, &s->config, s->from, 0, 1, s->seed, DRAY_REGION_CUDA,
                     s->no_checksums);
    const dray__cuda *cuda = dray__cuda_get(NULL);
    dray_region *host = mirror_of(t.region[0]);
    dray__event *event;
    CUstream stream;
    MUST(dray__event_new(NULL, &event, error));
    MUST(dray__cuda_enter(t.region[0]->device, error));
    CHECK(cuda->cuStreamCreate(&stream, CU_STREAM_NON_BLOCKING) == CUDA_SUCCESS);
    CHECK(cuda->cuMemHostRegister(dray_region_base(host), dray_region_bytes(host), 0) ==
          CUDA_SUCCESS);
    for (uint64_t version = 1; version <= s->versions; version++) {
        dray_fence fence = DRAY_FENCE_INIT;
        fill(t.layout, &host, t.tied, s->seed + version - 1);
        for (int i = 0; i < 20; i++) /* poison, again and again, then the values */
            CHECK(cuda->cuMemsetD8Async(t.region[0]->device_address, 0x77, t.region[0]->bytes,
                                        stream) == CUDA_SUCCESS);
        CHECK(cuda->cuMemcpyHtoDAsync(t.region[0]->device_address, dray_region_base(host),
                                      t.region[0]->bytes, stream) == CUDA_SUCCESS);
        MUST(dray__event_record(event, stream, error));
        fence.kind = DRAY_FENCE_CUDA_EVENT;
        fence.event = dray__event_handle(event);
        MUST(dray_publisher_publish(t.publisher, version, &fence, error));
        meet(t.context, "updated", s);
        MUST(dray_publisher_wait(t.publisher, version, DRAY_WAIT_DEFAULT, NULL, error));
        CHECK(cuda->cuStreamSynchronize(stream) == CUDA_SUCCESS);
    }
    CHECK(cuda->cuMemHostUnregister(dray_region_base(host)) == CUDA_SUCCESS);
    CHECK(cuda->cuStreamDestroy(stream) == CUDA_SUCCESS);
    dray__cuda_leave();
    dray__event_free(event);
    dray_region_free(host);
    meet(t.context, "over", s);
    trainer_close(&t);
}

CLUSTER_TEST(test_fence)
{
    for (int32_t off = 0; off < 2; off++) {
        scene s = plain(21);
        s.no_checksums = off;
        s.world = 1;
        s.engine_gpus[0] = 1;
        s.versions = 3;
        RUN_ROLES(&s, &s.rank, {fenced_trainer, 1}, {run_engine, 2});
    }
}

/* ---- memory that moves
 * --------------------------------------------------------------------------- */

/* Other memory for the same layout: of an allocation of the driver's, or an arena's. */
static dray_region *elsewhere(const dray_layout *layout, uint64_t turn, CUdeviceptr *own)
{
    uint64_t bytes = dray_layout_region(layout, 0)->bytes;
    dray_region *region;
    *own = 0;
    if (turn % 2) {
        MUST(dray_region_alloc(DRAY_REGION_CUDA, bytes, "moved", &region, error));
        return region;
    }
    dray__cuda_device *device;
    MUST(dray__cuda_device_at(0, &device, error));
    MUST(dray__cuda_enter(device, error));
    CHECK(dray__cuda_get(NULL)->cuMemAlloc(own, bytes) == CUDA_SUCCESS);
    dray__cuda_leave();
    MUST(dray_region_wrap_cuda(*own, bytes, "moved", &region, error));
    return region;
}

static void end_of_region(dray_region *region, CUdeviceptr own)
{
    if (own) {
        MUST(dray__cuda_enter(region->device, error));
        CHECK(dray__cuda_get(NULL)->cuMemFree(own) == CUDA_SUCCESS);
        dray__cuda_leave();
    }
    dray_region_free(region);
}

static void moving_trainer(void *user)
{
    scene *s = user;
    trainer t;
    CUdeviceptr own = 0;
    see_one(0);
    gpu_trainer_open(&t, f.unix_address, &s->config, s->from, 0, 1, s->seed, DRAY_REGION_CUDA, 0);
    for (uint64_t version = 1; version <= s->versions; version++) {
        MUST(dray_publisher_publish(t.publisher, version, NULL, error));
        meet(t.context, "updated", s);
        MUST(dray_publisher_release(t.publisher, 20 * DRAY__SECOND, NULL, 0, NULL, error));
        __atomic_store_n(&s->board->number[0], (int64_t)version, __ATOMIC_SEQ_CST);
        CHECK(dray_publisher_publish(t.publisher, version + 1, NULL, NULL) == DRAY_ESTALE);
        end_of_region(t.region[0], own);
        t.region[0] = elsewhere(t.layout, version, &own);
        gpu_fill(t.layout, t.region[0], t.tied, s->seed + version);
        MUST(dray_publisher_move(t.publisher, t.region, error));
    }
    meet(t.context, "over", s);
    dray_publisher_close(t.publisher);
    end_of_region(t.region[0], own);
    dray_layout_free(t.layout);
    dray_close(t.context);
}

static void following_engine(void *user)
{
    scene *s = user;
    engine e;
    see_one(s->engine_gpus[s->rank] % gpus);
    gpu_engine_open(&e, f.unix_address, &s->config, s->from, s->to, "engine", s->rank, s->tp,
                    DRAY_REGION_CUDA);
    for (uint64_t version = 1; version <= s->versions; version++) {
        dray_update_options options = DRAY_UPDATE_OPTIONS_INIT;
        dray_update_report report = DRAY_UPDATE_REPORT_INIT;
        options.min_version = version;
        MUST(dray_update_weights(e.subscriber, &options, &report, error));
        CHECK(report.planned == 1);
        CHECK(gpu_engine_wrong(&e, s->seed + version - 1) == 0);
        meet(e.context, "updated", s);
        while (__atomic_load_n(&s->board->number[0], __ATOMIC_SEQ_CST) < (int64_t)version) {
            MUST(dray_subscriber_release_mappings(e.subscriber,
                                                  error)); /* unmaps what is taken back */
            usleep(1000);
        }
    }
    meet(e.context, "over", s);
    engine_close(&e);
}

/* Fifty publishes, each from other memory than the one before. */
CLUSTER_TEST(test_moved)
{
    scene s = plain(22);
    s.world = 1;
    s.versions = 50;
    s.board = board_new();
    RUN_ROLES(&s, &s.rank, {moving_trainer, 1}, {following_engine, 2});
    munmap(s.board, sizeof(board));
}

/* ---- processes that die
 * --------------------------------------------------------------------------- */

static const char *deadly_step;

/* Publishes once; one engine dies while it reads. Its memory is free again afterwards. */
static void bereft_trainer(void *user)
{
    scene *s = user;
    trainer t;
    see_one(0);
    gpu_trainer_open(&t, f.unix_address, &s->config, s->from, 0, 1, s->seed, DRAY_REGION_CUDA, 0);
    MUST(dray_publisher_publish(t.publisher, 1, NULL, error));
    await_flag(s->board, UPDATED);
    await_flag(s->board, KILLED);
    MUST(dray_publisher_wait(t.publisher, 1, 10 * DRAY__SECOND, NULL, error));
    raise_flag(s->board, FILLED);
    dray_pin pins[4];
    uint32_t count = 9;
    MUST(dray_publisher_release(t.publisher, 20 * DRAY__SECOND, pins, 4, &count, error));
    CHECK(count == 0);
    trainer_close(&t);
}

static void survivor(void *user)
{
    scene *s = user;
    engine e;
    see_one(1 % gpus);
    gpu_engine_open(&e, f.unix_address, &s->config, s->from, s->to, "survivor", 0, 1,
                    DRAY_REGION_CUDA);
    MUST(dray_update_weights(e.subscriber, NULL, NULL, error));
    CHECK(gpu_engine_wrong(&e, s->seed) == 0);
    raise_flag(s->board, UPDATED);
    await_flag(s->board, FILLED);
    for (int i = 0; i < 100; i++) {
        dray_subscriber_release_mappings(e.subscriber, NULL);
        usleep(5000);
    }
    CHECK(gpu_engine_wrong(&e, s->seed) == 0);
    engine_close(&e);
}

static void victim(void *user)
{
    scene *s = user;
    engine e;
    see_one(s->rank % gpus);
    gpu_engine_open(&e, f.unix_address, &s->config, s->from, s->to, "victim", 0, 1,
                    DRAY_REGION_CUDA);
    die_at_step(deadly_step);
    dray_update_weights(e.subscriber, NULL, NULL, NULL);
}

CLUSTER_TEST(test_killed)
{
    static const char *const steps[] = {"import", "moving", "verified"};
    for (uint32_t i = 0; i < 3; i++) {
        scene s = plain(23 + i);
        pid_t pids[3];
        s.board = board_new();
        s.rank = i % 2;
        deadly_step = steps[i];
        pids[0] = spawn(bereft_trainer, &s);
        pids[1] = spawn(survivor, &s);
        pids[2] = spawn(victim, &s);
        must_be_killed(pids[2]);
        raise_flag(s.board, KILLED);
        must_end_well(pids[0]);
        must_end_well(pids[1]);
        munmap(s.board, sizeof(board));
    }
}

/* ---- a version beside the one that is served
 * ------------------------------------------------------- */

static void prefetching_engine(void *user)
{
    scene *s = user;
    engine e;
    see_one(s->engine_gpus[s->rank] % gpus);
    gpu_engine_open_staged(&e, f.unix_address, &s->config, s->from, s->to, "engine", s->rank, s->tp,
                           DRAY_REGION_CUDA, s->staging);
    for (uint64_t version = 1; version <= s->versions; version++) {
        dray_update_options options = DRAY_UPDATE_OPTIONS_INIT;
        dray_update_report report = DRAY_UPDATE_REPORT_INIT;
        options.min_version = version;
        if (version == 1) {
            MUST(dray_update_weights(e.subscriber, &options, NULL, error));
        } else {
            MUST(dray_prefetch_weights(e.subscriber, &options, &report, error));
            CHECK(report.bytes == dray_layout_bytes(e.layout));
            CHECK(gpu_engine_wrong(&e, s->seed + version - 2) == 0); /* what is served */
            gpu_poison(e.region[0]); /* the commit brings all of it */
            MUST(dray_commit_weights(e.subscriber, NULL, &report, error));
            CHECK(report.bytes == dray_layout_bytes(e.layout));
            CHECK(report.source == DRAY_SOURCE_STAGING);
        }
        CHECK(gpu_engine_wrong(&e, s->seed + version - 1) == 0);
        MUST(dray_subscriber_verify(e.subscriber, error));
        meet(e.context, "updated", s);
    }
    meet(e.context, "over", s);
    engine_close(&e);
}

static void run_prefetch(int32_t staging)
{
    scene s = plain(30);
    s.staging = staging;
    run_with_trainers(&s, 2, prefetching_engine);
}

CLUSTER_TEST(test_prefetch)
{
    run_prefetch(0);
    run_prefetch(DRAY_REGION_PINNED);
}

/* ---- full tensors, in buckets on the GPU
 * ----------------------------------------------------------- */

typedef struct loader {
    const scene *s;
    uint64_t elements, wrong, seed;
} loader;

/* What the bucket holds is the tensor's rows, dense. */
static int load_bucket(void *user, const dray_load_bucket *bucket, dray_error *said)
{
    loader *l = user;
    const dray__cuda *cuda = dray__cuda_get(said);
    uint8_t *host = malloc(bucket->bytes);
    CHECK(cuda && host);
    dray__cuda_device *device;
    MUST(dray__cuda_device_at(0, &device, error));
    MUST(dray__cuda_enter(device, error));
    CHECK(cuda->cuMemcpyDtoH(host, (CUdeviceptr)bucket->data, bucket->bytes) == CUDA_SUCCESS);
    dray__cuda_leave();
    for (uint32_t i = 0; i < bucket->count; i++) {
        const dray_load_tensor *t = &bucket->tensors[i];
        uint64_t hash = name_hash(t->name, l->s->config.tied), row = 1;
        for (uint32_t d = 1; d < t->ndim; d++)
            row *= (uint64_t)t->shape[d];
        for (uint64_t k = 0; k < t->numel; k++) {
            uint64_t index = (uint64_t)t->first_row * row + k;
            uint32_t bits = value_bits(hash, index, l->seed, (int)l->s->from, (int)l->s->to);
            l->wrong += memcmp(host + t->start + k * 2, &bits, 2) != 0;
            l->elements++;
        }
    }
    free(host);
    return 0;
}

static void loading_engine(void *user)
{
    scene *s = user;
    loader l = {.s = s};
    dray_layout *full;
    dray_subscriber *subscriber;
    see_one(s->engine_gpus[1] % gpus);
    dray_context *context = fixture_open_at(f.unix_address, "loader", "engine", 0);
    MUST(dray_layout_full(&s->config, s->to, DRAY_REGION_HOST, &full, error));
    dray_load_options load = DRAY_LOAD_OPTIONS_INIT;
    load.load = load_bucket;
    load.user = &l;
    load.bucket_bytes = 512 << 10;
    load.slices = 1;
    load.memory = DRAY_REGION_CUDA;
    dray_subscriber_options options = DRAY_SUBSCRIBER_OPTIONS_INIT;
    options.group = "loader";
    options.load = &load;
    MUST(dray_subscriber_open(context, MODEL, full, &options, &subscriber, error));
    for (uint64_t version = 1; version <= s->versions; version++) {
        dray_update_options update = DRAY_UPDATE_OPTIONS_INIT;
        update.min_version = version;
        l.seed = s->seed + version - 1;
        l.elements = 0;
        MUST(dray_update_weights(subscriber, &update, NULL, error));
        CHECK(l.wrong == 0 && l.elements * 2 == dray_layout_bytes(full));
        meet(context, "updated", s);
    }
    meet(context, "over", s);
    dray_subscriber_close(subscriber);
    dray_layout_free(full);
    dray_close(context);
}

CLUSTER_TEST(test_load)
{
    scene s = plain(31);
    s.tp = 1;
    s.versions = 2;
    run_with_trainers(&s, 1, loading_engine);
}

/* ---- cells in a small bucket --------------------------------------------------------------------
 */

enum { CELL = 128, CELLS = 8, COLUMNS = CELL * CELLS, BESIDE = 4096 };
static const int64_t origin[2] = {0, 0};

/* Half of the rows of each cell are in one region, and half in another. A tensor in shared memory
 * takes another way, for which a part of bucket_bytes is kept. */
static dray_layout *split_rows(void)
{
    const uint64_t half = CELL / 2 * COLUMNS * sizeof(float), beside = BESIDE * sizeof(float);
    const dray_region_info regions[] = {
        {.kind = DRAY_REGION_CUDA, .bytes = half, .name = "upper"},
        {.kind = DRAY_REGION_CUDA, .bytes = half, .name = "lower"},
        {.kind = DRAY_REGION_SHARED, .bytes = beside, .name = "shared"}};
    const int64_t shape[2] = {CELL, COLUMNS}, extent[2] = {CELL / 2, COLUMNS}, one = BESIDE;
    const int64_t lower[2] = {CELL / 2, 0};
    dray_layout *layout;
    uint32_t tensor;
    MUST(dray_layout_new(&layout, error));
    for (int i = 0; i < 3; i++)
        MUST(dray_layout_add_region(layout, &regions[i], NULL, error));
    MUST(dray_layout_add_tensor(layout, "cells", DRAY_F32, 2, shape, &tensor, error));
    MUST(dray_layout_add_dense(layout, tensor, 0, origin, extent, 0, error));
    MUST(dray_layout_add_dense(layout, tensor, 1, lower, extent, 0, error));
    MUST(dray_layout_add_tensor(layout, "beside", DRAY_F32, 1, &one, &tensor, error));
    MUST(dray_layout_add_dense(layout, tensor, 2, origin, &one, 0, error));
    return layout;
}

enum { SCALES_AT = CELL * COLUMNS, BESIDE_AT = SCALES_AT + 256 };

static dray_layout *in_fp8(void)
{
    const dray_region_info region = {
        .kind = DRAY_REGION_CUDA, .bytes = BESIDE_AT + BESIDE * sizeof(float), .name = "weights"};
    const int64_t shape[2] = {CELL, COLUMNS}, scales[2] = {1, CELLS}, one = BESIDE;
    dray_quant quant = {.kind = DRAY_QUANT_BLOCK, .block = {CELL, CELL}};
    dray_layout *layout;
    uint32_t tensor, beside;
    MUST(dray_layout_new(&layout, error));
    MUST(dray_layout_add_region(layout, &region, NULL, error));
    MUST(dray_layout_add_tensor(layout, "cells", DRAY_F8E4M3, 2, shape, &tensor, error));
    MUST(dray_layout_add_dense(layout, tensor, 0, origin, shape, 0, error));
    MUST(dray_layout_add_tensor(layout, "scales", DRAY_F32, 2, scales, &quant.scales, error));
    MUST(dray_layout_add_dense(layout, quant.scales, 0, origin, scales, SCALES_AT, error));
    MUST(dray_layout_set_quant(layout, tensor, &quant, error));
    MUST(dray_layout_add_tensor(layout, "beside", DRAY_F32, 1, &one, &beside, error));
    MUST(dray_layout_add_dense(layout, beside, 0, origin, &one, BESIDE_AT, error));
    return layout;
}

/* Updates an engine with this bucket. `out` gets its memory. */
static void update_in_fp8(dray_context *context, const char *group, uint64_t bucket, uint8_t *out)
{
    dray_layout *layout = in_fp8();
    dray_region *region;
    dray_subscriber *subscriber;
    dray_subscriber_options options = DRAY_SUBSCRIBER_OPTIONS_INIT;
    dray_update_options update = DRAY_UPDATE_OPTIONS_INIT;
    MUST(dray_regions_for_layout(layout, 1, &region, error));
    options.regions = &region;
    options.group = group;
    update.bucket_bytes = bucket;
    update.no_peers = 1;
    MUST(dray_subscriber_open(context, MODEL, layout, &options, &subscriber, error));
    MUST(dray_update_weights(subscriber, &update, NULL, error));
    MUST(dray_region_read(region, 0, out, dray_region_bytes(region), error));
    dray_subscriber_close(subscriber);
    dray_region_free(region);
    dray_layout_free(layout);
}

static void small_bucket(void *user)
{
    (void)user;
    static float values[CELL / 2 * COLUMNS];
    static uint8_t all[BESIDE_AT + BESIDE * sizeof(float)], small[sizeof all];
    see_one(0);
    dray_context *giver = fixture_open_at(f.unix_address, "trainer-0", "trainer", 0);
    dray_context *taker = fixture_open_at(f.unix_address, "engine-0", "engine", 0);
    dray_layout *layout = split_rows();
    dray_region *regions[3];
    dray_publisher *publisher;
    dray_publisher_options options = DRAY_PUBLISHER_OPTIONS_INIT;
    MUST(dray_regions_for_layout(layout, 1, regions, error));
    for (uint64_t r = 0, seed = 1; r < 3; r++) {
        uint64_t count = dray_region_bytes(regions[r]) / sizeof *values;
        for (uint64_t i = 0; i < count; i++)
            values[i] = (float)(mix(seed++) % 20001) - 10000;
        MUST(dray_region_write(regions[r], 0, values, count * sizeof *values, error));
    }
    options.regions = regions;
    MUST(dray_publisher_open(giver, MODEL, layout, &options, &publisher, error));
    MUST(dray_publisher_publish(publisher, 1, NULL, error));
    update_in_fp8(taker, "large", 0, all);
    update_in_fp8(taker, "small", 128 << 10, small);
    CHECK(memcmp(all, small, sizeof all) == 0);
    dray_publisher_close(publisher);
    for (int r = 0; r < 3; r++)
        dray_region_free(regions[r]);
    dray_layout_free(layout);
    dray_close(taker);
    dray_close(giver);
}

/* A cell is gathered as a whole, also where bucket_bytes is divided among several ways. */
CLUSTER_TEST(test_cells_in_a_small_bucket)
{
    must_end_well(spawn(small_bucket, NULL));
}

int main(void)
{
    scenes_begin();
    return cluster_run();
}
