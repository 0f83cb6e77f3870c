/* Tests a publication that comes with a stream of the trainer's. Only processes that need its bytes
 * wait for it, nothing is read before the stream's work is complete, and reports say which rank was
 * waited for. */
#include "gpu/scene.h"
#include "gpu/spin.h"
#include "memory/cuda_event.h"
#include "mover/cuda/cuda.h"

enum { LATE_MS = 300, LATE_NS = 200000000, ENDED = 1, ASKED = 2, TRIED = 3 };

typedef struct source {
    trainer t;
    const dray__cuda *cuda;
    dray_region *host; /* what the values are copied from */
    CUstream stream;
} source;

static source open_source(const scene *s)
{
    source o = {0};
    choose(s, s->trainer_gpus[s->rank]);
    gpu_trainer_open(&o.t, f.unix_address, &s->config, s->from, s->rank, s->world, s->seed,
                     DRAY_REGION_CUDA, s->no_checksums);
    o.cuda = dray__cuda_get(NULL);
    o.host = mirror_of(o.t.region[0]);
    MUST(dray__cuda_enter(o.t.region[0]->device, error));
    CHECK(o.cuda->cuStreamCreate(&o.stream, CU_STREAM_NON_BLOCKING) == CUDA_SUCCESS);
    CHECK(o.cuda->cuMemHostRegister(dray_region_base(o.host), dray_region_bytes(o.host), 0) ==
          CUDA_SUCCESS);
    dray__cuda_leave();
    return o;
}

/* Poison at once; the values come with the stream, late. */
static void write_late(source *o, uint64_t seed, uint64_t milliseconds)
{
    dray_region *to = o->t.region[0];
    MUST(dray__cuda_enter(to->device, error));
    CHECK(o->cuda->cuStreamSynchronize(o->stream) == CUDA_SUCCESS); /* the last values went */
    dray__cuda_leave();
    fill(o->t.layout, &o->host, o->t.tied, seed);
    gpu_poison(to);
    spin(o->cuda, to->device, o->stream, milliseconds);
    MUST(dray__cuda_enter(to->device, error));
    CHECK(o->cuda->cuMemcpyHtoDAsync(to->device_address, dray_region_base(o->host), to->bytes,
                                     o->stream) == CUDA_SUCCESS);
    dray__cuda_leave();
}

static void close_source(source *o)
{
    MUST(dray__cuda_enter(o->t.region[0]->device, error));
    CHECK(o->cuda->cuStreamSynchronize(o->stream) == CUDA_SUCCESS);
    CHECK(o->cuda->cuMemHostUnregister(dray_region_base(o->host)) == CUDA_SUCCESS);
    dray__cuda_leave();
    trainer_close(&o->t);
    dray_region_free(o->host);
}

/* The only rank of an engine. */
static void open_engine(engine *e, const scene *s)
{
    choose(s, s->engine_gpus[0]);
    gpu_engine_open(e, f.unix_address, &s->config, s->from, s->to, "engine", 0, 1,
                    DRAY_REGION_CUDA);
}

static void late_trainer(void *user)
{
    scene *s = user;
    source o = open_source(s);
    dray__event *event;
    MUST(dray__event_new(NULL, &event, error));
    for (uint64_t version = 1; version <= s->versions; version++) {
        dray_fence fence = DRAY_FENCE_INIT;
        /* versions in turns: the stream itself, an event on it */
        write_late(&o, s->seed + version - 1, s->rank == 0 ? LATE_MS : 1);
        fence.kind = DRAY_FENCE_CUDA_STREAM;
        fence.event = o.stream;
        if (version % 2 == 0) {
            MUST(dray__event_record(event, o.stream, error));
            fence.kind = DRAY_FENCE_CUDA_EVENT;
            fence.event = dray__event_handle(event);
        }
        int64_t begin = dray__now();
        MUST(dray_publisher_publish(o.t.publisher, version, &fence, error));
        /* it waits for nothing of the GPU's */
        if (s->rank == 0 && version > 1)
            CHECK(dray__now() - begin < LATE_NS);
        meet(o.t.context, "updated", s);
        MUST(dray_publisher_wait(o.t.publisher, version, DRAY_WAIT_DEFAULT, NULL, error));
    }
    meet(o.t.context, "over", s);
    dray__event_free(event);
    close_source(&o);
}

static void held_engine(void *user)
{
    scene *s = user;
    engine e;
    int late = 0;
    choose(s, s->engine_gpus[s->rank]);
    gpu_engine_open(&e, f.unix_address, &s->config, s->from, s->to, "engine", s->rank, s->tp,
                    s->destination);
    for (uint64_t version = 1; version <= s->versions; version++) {
        dray_update_options options = DRAY_UPDATE_OPTIONS_INIT;
        dray_update_report report = DRAY_UPDATE_REPORT_INIT;
        options.min_version = version;
        if (e.region[0]->device_address)
            gpu_poison(e.region[0]);
        MUST(dray_update_weights(e.subscriber, &options, &report, error));
        CHECK(gpu_engine_wrong(&e, s->seed + version - 1) == 0);
        if (version > 1) { /* the first one's plans take a while */
            if (report.held_ns < LATE_NS / 2 || strncmp(report.held_by, "trainer-0 on GPU-", 17))
                fprintf(stderr, "waited %.3f s for %s\n", (double)report.held_ns * 1e-9,
                        report.held_by);
            CHECK(report.held_ns >= LATE_NS / 2);
            CHECK(strncmp(report.held_by, "trainer-", 8) == 0);
            late += strncmp(report.held_by, "trainer-0 on GPU-", 17) == 0;
        }
        meet(e.context, "updated", s);
    }
    CHECK(late > 0); /* a busy machine may hold the other trainer up in one of the versions */
    meet(e.context, "over", s);
    engine_close(&e);
}

static void run_late(scene *s)
{
    RUN_ROLES(s, &s->rank, {late_trainer, 2}, {held_engine, 2});
}

/* One of each. */
static void run_pair(scene *s, void (*trainer_body)(void *scene), void (*engine_body)(void *scene))
{
    s->world = s->tp = 1;
    s->board = board_new();
    RUN_ROLES(s, NULL, {trainer_body, 1}, {engine_body, 1});
    munmap(s->board, sizeof(board));
}

/* Each process sees one GPU alone, or all. */
CLUSTER_TEST(test_without_sums)
{
    scene s = plain(51);
    s.no_checksums = 1;
    s.versions = 3;
    run_late(&s);
    s.seed = 52;
    s.sees_all = true;
    s.engine_gpus[0] = 2;
    s.engine_gpus[1] = 3;
    run_late(&s);
}

CLUSTER_TEST(test_with_sums)
{
    scene s = plain(53);
    s.versions = 3;
    run_late(&s);
}

/* Memory that no GPU writes waits as well. */
CLUSTER_TEST(test_into_shared_memory)
{
    scene s = plain(54);
    s.no_checksums = 1;
    s.versions = 2;
    s.destination = DRAY_REGION_SHARED;
    run_late(&s);
}

/* Publisher and subscriber in one process. */
static void in_one_process(void *user)
{
    scene *s = user;
    source o = open_source(s);
    engine e;
    gpu_engine_open(&e, f.unix_address, &s->config, s->from, s->to, "engine", 0, 1,
                    DRAY_REGION_CUDA);
    for (uint64_t version = 1; version <= 2; version++) {
        dray_fence fence = {sizeof fence, DRAY_FENCE_CUDA_STREAM, o.stream};
        dray_update_report report = DRAY_UPDATE_REPORT_INIT;
        write_late(&o, s->seed + version, LATE_MS);
        MUST(dray_publisher_publish(o.t.publisher, version, &fence, error));
        MUST(dray_update_weights(e.subscriber, NULL, &report, error));
        CHECK(gpu_engine_wrong(&e, s->seed + version) == 0);
        MUST(dray_publisher_wait(o.t.publisher, version, DRAY_WAIT_DEFAULT, NULL, error));
    }
    engine_close(&e);
    close_source(&o);
}

CLUSTER_TEST(test_one_process)
{
    scene s = plain(55);
    s.world = 1;
    s.no_checksums = 1;
    must_end_well(spawn(in_one_process, &s));
}

/* ---- a fence that cannot be opened -------------------------------------------------------------
 */

static void refused_trainer(void *user)
{
    scene *s = user;
    source o = open_source(s);
    dray_fence fence = {sizeof fence, DRAY_FENCE_CUDA_STREAM, o.stream};
    await_flag(s->board, ASKED);
    write_late(&o, s->seed, 2000);
    MUST(dray_publisher_publish(o.t.publisher, 1, &fence, error));
    await_flag(s->board, TRIED);
    close_source(&o);
}

/* The driver refuses to open the publisher's event during the first update. The second one has the
 * memory mapped already, and waits for the fence all the same. */
static void refused_engine(void *user)
{
    scene *s = user;
    engine e;
    dray_error said;
    open_engine(&e, s);
    MUST(dray__cuda_bounce_reserve(e.region[0]->device, error)); /* compiles the kernels */
    CHECK(gpu_fail("cuIpcOpenEventHandle:1+:999"));
    raise_flag(s->board, ASKED);
    CHECK(dray_update_weights(e.subscriber, NULL, NULL, &said) == DRAY_ESYS);
    CHECK(strstr(said.message, "the fence of a publisher without checksums"));
    gpu_fail(NULL);
    MUST(dray_update_weights(e.subscriber, NULL, NULL, error));
    CHECK(gpu_engine_wrong(&e, s->seed) == 0);
    raise_flag(s->board, TRIED);
    engine_close(&e);
}

CLUSTER_TEST(test_fence_is_refused)
{
    if (gpu_is_real())
        return;
    scene s = plain(59);
    s.no_checksums = 1;
    run_pair(&s, refused_trainer, refused_engine);
}

/* ---- a deadline -------------------------------------------------------------------------------
 */

static void very_late_trainer(void *user)
{
    scene *s = user;
    source o = open_source(s);
    dray_fence fence = {sizeof fence, DRAY_FENCE_CUDA_STREAM, o.stream};
    MUST(dray_publisher_publish(o.t.publisher, 1, NULL, error)); /* compiles what there is */
    await_flag(s->board, ASKED);
    MUST(dray_publisher_wait(o.t.publisher, 1, DRAY_WAIT_DEFAULT, NULL, error));
    write_late(&o, s->seed, 1500);
    MUST(dray_publisher_publish(o.t.publisher, 2, &fence, error));
    await_flag(s->board, TRIED);
    close_source(&o);
}

static void impatient_engine(void *user)
{
    scene *s = user;
    engine e;
    dray_error said;
    dray_update_options options = DRAY_UPDATE_OPTIONS_INIT;
    open_engine(&e, s);
    MUST(dray_update_weights(e.subscriber, NULL, NULL, error));
    gpu_poison(e.region[0]);
    raise_flag(s->board, ASKED);
    options.min_version = 2;
    options.timeout_ns = DRAY__SECOND;
    int rc = dray_update_weights(e.subscriber, &options, NULL, &said);
    if (rc) {
        CHECK(rc == DRAY_ETIMEDOUT || rc == DRAY_ETORN);
        CHECK(strstr(said.message, "trainer-0 on GPU-"));
    }
    options.timeout_ns = 0;
    MUST(dray_update_weights(e.subscriber, &options, NULL, error));
    CHECK(gpu_engine_wrong(&e, s->seed) == 0);
    raise_flag(s->board, TRIED);
    engine_close(&e);
}

CLUSTER_TEST(test_deadline)
{
    for (int32_t off = 0; off < 2; off++) {
        scene s = plain(56);
        s.no_checksums = off;
        run_pair(&s, very_late_trainer, impatient_engine);
    }
}

/* A source whose versions have a deadline of a second. */
static source open_hasty(const scene *s)
{
    source o = open_source(s);
    dray_publisher_options options = DRAY_PUBLISHER_OPTIONS_INIT;
    dray_publisher_close(o.t.publisher);
    options.regions = o.t.region;
    options.timeout_ns = DRAY__SECOND;
    MUST(dray_publisher_open(o.t.context, MODEL, o.t.layout, &options, &o.t.publisher, error));
    return o;
}

/* A version whose fence does not come in time is withdrawn, which the next call says; the next one
 * is as if it had not been. */
static void hasty_trainer(void *user)
{
    scene *s = user;
    source o = open_hasty(s);
    dray_error said = {0};
    dray_fence fence = {sizeof fence, DRAY_FENCE_CUDA_STREAM, o.stream};
    write_late(&o, s->seed, 1500);
    MUST(dray_publisher_publish(o.t.publisher, 1, &fence, error));
    CHECK(dray_publisher_publish(o.t.publisher, 2, &fence, &said) == DRAY_ETIMEDOUT);
    CHECK(strstr(said.message, "fence") || strstr(said.message, "deadline"));
    int64_t deadline = dray__deadline(30 * DRAY__SECOND);
    int rc = DRAY_ETIMEDOUT;
    while (rc == DRAY_ETIMEDOUT && dray__now() < deadline)
        rc = dray_publisher_publish(o.t.publisher, 2, &fence, &said);
    if (rc)
        fprintf(stderr, "%s\n", said.message);
    CHECK(rc == 0);
    raise_flag(s->board, ASKED);
    await_flag(s->board, TRIED);
    close_source(&o);
}

static void patient_engine(void *user)
{
    scene *s = user;
    engine e;
    open_engine(&e, s);
    await_flag(s->board, ASKED);
    MUST(dray_update_weights(e.subscriber, NULL, NULL, error));
    CHECK(gpu_engine_wrong(&e, s->seed) == 0);
    raise_flag(s->board, TRIED);
    engine_close(&e);
}

CLUSTER_TEST(test_late_sums)
{
    scene s = plain(58);
    run_pair(&s, hasty_trainer, patient_engine);
}

/* Work that keeps a GPU for itself may let the sums end late: nobody commits what has none at the
 * deadline. */
static void sleep_once_summed(void *user, const char *step)
{
    bool *slept = user;
    if (strcmp(step, "summed") || *slept)
        return;
    *slept = true;
    usleep(1200000);
}

static void late_summer(void *user)
{
    scene *s = user;
    source o = open_hasty(s);
    dray_error said = {0};
    bool slept = false;
    fill(o.t.layout, o.t.region, o.t.tied, s->seed);
    dray__hook_set(sleep_once_summed, &slept);
    MUST(dray_publisher_publish(o.t.publisher, 1, NULL, error));
    CHECK(dray_publisher_wait(o.t.publisher, 1, 5 * DRAY__SECOND, NULL, &said) == DRAY_ETIMEDOUT);
    CHECK(slept && strstr(said.message, "until the deadline"));
    MUST(dray_publisher_publish(o.t.publisher, 2, NULL, error));
    raise_flag(s->board, ASKED);
    await_flag(s->board, TRIED);
    close_source(&o);
}

CLUSTER_TEST(test_sums_after_the_deadline)
{
    scene s = plain(59);
    run_pair(&s, late_summer, patient_engine);
}

/* ---- a stream that waits for readers -----------------------------------------------------------
 */

static void sleep_while_writing(void *user, const char *step)
{
    const scene *s = user;
    if (strcmp(step, "writing") == 0 && !s->board->flag[TRIED]) {
        raise_flag(s->board, TRIED);
        usleep(LATE_MS * 1000);
    }
}

/* The next values are enqueued while the last ones are read. */
static void eager_trainer(void *user)
{
    scene *s = user;
    source o = open_source(s);
    dray_fence fence = {sizeof fence, DRAY_FENCE_CUDA_STREAM, o.stream};
    dray_region *to = o.t.region[0];
    CHECK(dray_publisher_wait_stream(o.t.publisher, 1, o.stream, 0, NULL) == DRAY_EINVALID);
    MUST(dray_publisher_publish(o.t.publisher, 1, NULL, error));
    await_flag(s->board, TRIED);
    fill(o.t.layout, &o.host, o.t.tied, s->seed + 1);
    int64_t begin = dray__now();
    MUST(dray_publisher_wait_stream(o.t.publisher, 1, o.stream, DRAY_WAIT_DEFAULT, error));
    CHECK(dray__now() - begin < LATE_NS);
    MUST(dray__cuda_enter(to->device, error));
    CHECK(o.cuda->cuMemcpyHtoDAsync(to->device_address, dray_region_base(o.host), to->bytes,
                                    o.stream) == CUDA_SUCCESS);
    CHECK(o.cuda->cuStreamQuery(o.stream) == CUDA_ERROR_NOT_READY);
    dray__cuda_leave();
    MUST(dray_publisher_publish(o.t.publisher, 2, &fence, error));
    await_flag(s->board, ENDED);
    MUST(dray_publisher_wait_stream(o.t.publisher, 2, o.stream, DRAY_WAIT_DEFAULT, error));
    close_source(&o);
}

static void slow_engine(void *user)
{
    scene *s = user;
    engine e;
    open_engine(&e, s);
    dray__hook_set(sleep_while_writing, s);
    for (uint64_t version = 1; version <= 2; version++) {
        dray_update_options options = DRAY_UPDATE_OPTIONS_INIT;
        options.min_version = version;
        MUST(dray_update_weights(e.subscriber, &options, NULL, error));
        CHECK(gpu_engine_wrong(&e, s->seed + version - 1) == 0);
    }
    raise_flag(s->board, ENDED);
    engine_close(&e);
}

CLUSTER_TEST(test_wait_on_a_stream)
{
    for (int32_t off = 0; off < 2; off++) {
        scene s = plain(58);
        s.no_checksums = off;
        run_pair(&s, eager_trainer, slow_engine);
    }
}

/* A publisher that closes while the stream has not come to its wait yet. */
static void leaving_trainer(void *user)
{
    scene *s = user;
    source o = open_source(s);
    dray__cuda_device *device = o.t.region[0]->device;
    fill(o.t.layout, o.t.region, o.t.tied, s->seed);
    for (uint64_t version = 1; version <= 2; version++) {
        MUST(dray_publisher_publish(o.t.publisher, version, NULL, error));
        if (version == 2) /* the first wait takes memory, for which the driver waits for the GPU */
            spin(o.cuda, device, o.stream, 8 * LATE_MS);
        MUST(
            dray_publisher_wait_stream(o.t.publisher, version, o.stream, DRAY_WAIT_DEFAULT, error));
    }
    dray_publisher_close(o.t.publisher);
    o.t.publisher = NULL;
    MUST(dray__cuda_enter(device, error));
    if (!gpu_is_real()) /* whose driver may wait for the GPU when memory is freed */
        CHECK(o.cuda->cuStreamQuery(o.stream) == CUDA_ERROR_NOT_READY);
    CHECK(o.cuda->cuStreamSynchronize(o.stream) == CUDA_SUCCESS);
    dray__cuda_leave();
    close_source(&o);
}

CLUSTER_TEST(test_a_stream_that_outlives_its_publisher)
{
    scene s = plain(60);
    s.world = s.tp = 1;
    s.no_checksums = 1;
    RUN_ROLES(&s, NULL, {leaving_trainer, 1});
}

/* ---- beside a trainer that computes ------------------------------------------------------------
 */

/* Kernels of 100 ms follow each other on the GPU that the engine is on, before and after the
 * publish and while the engine updates. */
static void busy_trainer(void *user)
{
    scene *s = user;
    source o = open_source(s);
    dray__cuda_device *device = o.t.region[0]->device;
    for (uint64_t version = 1; version <= s->versions; version++) {
        dray_fence fence = {sizeof fence, DRAY_FENCE_CUDA_STREAM, o.stream};
        CUstream other;
        write_late(&o, s->seed + version - 1, 100);
        MUST(dray__cuda_enter(device, error));
        CHECK(o.cuda->cuStreamCreate(&other, CU_STREAM_NON_BLOCKING) == CUDA_SUCCESS);
        dray__cuda_leave();
        MUST(dray_publisher_publish(o.t.publisher, version, &fence, error));
        for (int i = 0; i < 4; i++)
            spin(o.cuda, device, other, 100);
        meet(o.t.context, "updated", s);
        MUST(dray_publisher_wait(o.t.publisher, version, DRAY_WAIT_DEFAULT, NULL, error));
        MUST(dray__cuda_enter(device, error));
        CHECK(o.cuda->cuStreamSynchronize(other) == CUDA_SUCCESS);
        CHECK(o.cuda->cuStreamDestroy(other) == CUDA_SUCCESS);
        dray__cuda_leave();
    }
    meet(o.t.context, "over", s);
    close_source(&o);
}

static void beside_engine(void *user)
{
    scene *s = user;
    engine e;
    open_engine(&e, s);
    for (uint64_t version = 1; version <= s->versions; version++) {
        dray_update_options options = DRAY_UPDATE_OPTIONS_INIT;
        dray_update_report report = DRAY_UPDATE_REPORT_INIT;
        options.min_version = version;
        options.timeout_ns = 20 * DRAY__SECOND;
        gpu_poison(e.region[0]);
        MUST(dray_update_weights(e.subscriber, &options, &report, error));
        CHECK(gpu_engine_wrong(&e, s->seed + version - 1) == 0);
        CHECK(strncmp(report.held_by, "trainer-0 on GPU-", 17) == 0 || report.held_ns == 0);
        if (gpu_is_real())
            fprintf(stderr, "beside kernels of 100 ms: waited %.1f ms for %s, moved in %.1f ms\n",
                    (double)report.held_ns * 1e-6, report.held_by, (double)report.move_ns * 1e-6);
        meet(e.context, "updated", s);
    }
    meet(e.context, "over", s);
    engine_close(&e);
}

CLUSTER_TEST(test_busy_trainer)
{
    for (int32_t off = 0; off < 2; off++) {
        scene s = plain(57);
        s.no_checksums = off;
        s.versions = 2;
        run_pair(&s, busy_trainer, beside_engine);
    }
}

int main(void)
{
    scenes_begin();
    return cluster_run();
}
