/* Tests GPU memory between two hosts over NCCL: with the fake driver and a fake NCCL or, with
 * DRAY_TEST_CUDA=real and two GPUs, with real ones. Bits and sums are right. Transfers that NCCL
 * refuses go over the stream instead. A failure fails the update, and the next one works. */
#include "weights/cluster.h"

#include "gpu/spin.h"
#include "mover/cuda/nccl.h"
#include "weights/server/nccl.h"

#define LONG (60 * DRAY__SECOND)

enum { PUBLISHED, ASKED, RETRY, OVER = 8, AGAIN = 9 }; /* PUBLISHED + 4, AGAIN + 1: of rank 1 */

typedef struct scene {
    dray_model_config config;
    dray_dtype from, to;
    uint64_t bucket, nccl_bytes;
    /* The engine's tensors are FP8 in cells of so many rows and 128 columns; 0: they are not. */
    uint32_t cell_rows;
    int32_t scale_format;
    bool unverified;
    const char *log;           /* of the fake: FAKE_NCCL_LOG in the engine */
    const char *fails;         /* of the fake: FAKE_NCCL_FAIL in the engine */
    const char *trainers_fail; /* the same in the trainers */
    bool first_fails, trainer_without, one_gpu;
    board *board;
} scene;

static scene s;

/* Returns true for real GPUs, with which no fault can be caused, and for the run from version 0, in
 * which faults of transfers would be the same. */
static bool is_left_out(void)
{
    return gpu_is_real() || numbers_less();
}

static int start(void **state)
{
    setenv("DRAY_DATA_ADDRESS", "127.0.0.1", 1);
    setenv("DRAY_TRUSTED_NETWORKS", "127.0.0.0/8", 1);
    cluster_start(state);
    s = (scene){
        .config = small_config(false, 3), .from = DRAY_F32, .to = DRAY_F32, .board = board_new()};
    return 0;
}

static int stop(void **state)
{
    munmap(s.board, sizeof(board));
    return cluster_stop(state);
}

/* ---- ranks ----------------------------------------------------------------------------------- */

static void run_trainer(void *user)
{
    uint32_t rank = *(uint32_t *)user;
    trainer t;
    fixture_host = "here";
    setenv("FAKE_CUDA_HOST", "here", 1);
    setenv("CUDA_VISIBLE_DEVICES", "0", 1);
    if (s.trainer_without)
        setenv("DRAY_NCCL_LIBRARY", "", 1);
    if (s.trainers_fail)
        setenv("FAKE_NCCL_FAIL", s.trainers_fail, 1);
    trainer_open(&t, f.unix_address, &s.config, s.from, rank, 2, 5, DRAY_REGION_CUDA);
    MUST(dray_publisher_publish(t.publisher, 1, NULL, error));
    raise_flag(s.board, PUBLISHED + (int)rank * 4);
    await_flag(s.board, RETRY);
    MUST(dray_publisher_wait(t.publisher, 1, LONG, NULL, error));
    fill(t.layout, t.region, t.tied, 6);
    MUST(dray_publisher_publish(t.publisher, 2, NULL, error));
    raise_flag(s.board, AGAIN + (int)rank);
    await_flag(s.board, OVER);
    trainer_close(&t);
}

/* As engine_open, in the scene's format. */
static void open_engine(engine *e, const char *group, uint32_t rank, uint32_t world, uint32_t tp)
{
    char name[64];
    if (!s.cell_rows) {
        engine_open(e, f.unix_address, &s.config, s.from, s.to, group, rank, world);
        return;
    }
    snprintf(name, sizeof name, "%s-%u", group, rank);
    memset(e, 0, sizeof *e);
    e->context = fixture_open_at(f.unix_address, name, "engine", rank);
    dray_engine_quant quant = {.size = sizeof quant,
                               .kind = DRAY_QUANT_BLOCK,
                               .block = {s.cell_rows, 128},
                               .scale_format = s.scale_format};
    dray_engine_spec spec = DRAY_ENGINE_SPEC_INIT;
    spec.tp = tp;
    spec.tp_rank = tp == world ? rank : (uint32_t)(group[0] - '0');
    spec.kind = cluster_kind;
    spec.quant = &quant;
    MUST(dray_layout_engine(&s.config, &spec, &e->layout, error));
    MUST(dray_regions_for_layout(e->layout, 1, e->region, error));
    poison(e->layout, e->region);
    engine_subscribe(e, group, rank, world, 0);
}

/* Does the engine hold what is published? seed: of the trainer's numbers. What is quantised is
 * compared with an engine on the trainers' host, which reads their memory itself. */
static bool holds(const engine *e, uint64_t seed, uint32_t rank, uint32_t tp)
{
    if (!s.cell_rows)
        return engine_wrong(e, seed) == 0;
    char group[32];
    engine alone;
    dray_update_options options = DRAY_UPDATE_OPTIONS_INIT;
    dray_update_report report = DRAY_UPDATE_REPORT_INIT;
    options.timeout_ns = LONG;
    fixture_host = "here";
    setenv("FAKE_CUDA_HOST", "here", 1);
    snprintf(group, sizeof group, "%u-alone-%llu", rank, (unsigned long long)seed);
    open_engine(&alone, group, 0, 1, tp);
    MUST(dray_update_weights(alone.subscriber, &options, &report, error));
    CHECK(report.nccl_bytes == 0);
    uint8_t *bytes = memory_open(e->region[0]), *others = memory_open(alone.region[0]);
    bool same = memcmp(bytes, others, dray_region_bytes(e->region[0])) == 0;
    memory_close(e->region[0], bytes, false);
    memory_close(alone.region[0], others, false);
    engine_close(&alone);
    fixture_host = "there";
    setenv("FAKE_CUDA_HOST", "there", 1);
    return same;
}

static void run_engine(void *user)
{
    (void)user;
    engine e;
    fixture_host = "there";
    if (!s.one_gpu && !gpu_is_real())
        setenv("FAKE_CUDA_HOST", "there", 1);
    else if (s.one_gpu)
        setenv("FAKE_CUDA_HOST", "here", 1);
    setenv("CUDA_VISIBLE_DEVICES", gpu_is_real() && !s.one_gpu ? "1" : "0", 1);
    if (s.fails)
        setenv("FAKE_NCCL_FAIL", s.fails, 1);
    if (s.log)
        setenv("FAKE_NCCL_LOG", s.log, 1);
    await_flag(s.board, PUBLISHED);
    await_flag(s.board, PUBLISHED + 4);
    open_engine(&e, "engine", 0, 1, 1);
    dray_update_options options = DRAY_UPDATE_OPTIONS_INIT;
    dray_update_report report = DRAY_UPDATE_REPORT_INIT;
    options.timeout_ns = LONG;
    options.strategy = s.bucket ? DRAY_STRATEGY_BUCKET : DRAY_STRATEGY_DIRECT;
    options.bucket_bytes = s.bucket;
    options.nccl_bytes = s.nccl_bytes;
    options.no_verify = s.unverified;
    dray_error said = {0};
    int rc = dray_update_weights(e.subscriber, &options, &report, &said);
    unsetenv("FAKE_NCCL_LOG");
    s.board->number[0] = rc;
    s.board->number[1] = (int64_t)report.nccl_bytes;
    s.board->number[2] = (int64_t)report.bytes;
    s.board->number[3] = (int64_t)report.peak_extra_bytes;
    if (rc == DRAY_OK)
        CHECK(holds(&e, 5, 0, 1));
    else
        fprintf(stderr, "said: %s\n", said.message);
    raise_flag(s.board, RETRY);
    options.min_version = 2;
    MUST(dray_update_weights(e.subscriber, &options, &report, error));
    CHECK(holds(&e, 6, 0, 1));
    if (!s.unverified)
        MUST(dray_subscriber_verify(e.subscriber, error));
    engine_close(&e);
}

static void run_all(void)
{
    uint32_t ranks[] = {0, 1};
    if (gpu_is_real() && !s.cell_rows)
        s.config.hidden_size = 96;
    pid_t trainers[2];
    for (int i = 0; i < 2; i++)
        trainers[i] = spawn(run_trainer, &ranks[i]);
    must_end_well(spawn(run_engine, NULL));
    raise_flag(s.board, OVER);
    all_end_well(trainers, 2);
}

/* Over the data server's connections went requests and sums alone. */
static bool went_over_nccl(void)
{
    return s.board->number[1] == s.board->number[2];
}

/* ---- tests ----------------------------------------------------------------------------------- */

TEST_WITHIN(test_bits_and_sums, start, stop)
{
    run_all();
    assert_int_equal(s.board->number[0], DRAY_OK);
    assert_true(went_over_nccl());
}

TEST_WITHIN(test_converted_in_small_slots, start, stop)
{
    s.to = DRAY_BF16;
    s.bucket = 1 << 20;
    run_all();
    assert_int_equal(s.board->number[0], DRAY_OK);
    assert_true(went_over_nccl());
}

/* What the fake wrote down: how many groups there were, of how many operations and bytes the
 * largest ones were, and how many that communicator began which began the fewest. */
typedef struct groups {
    uint32_t count, operations, fewest;
    uint64_t bytes;
} groups;

static groups read_log(const char *path)
{
    groups out = {0};
    FILE *log = fopen(path, "re");
    void *comms[8] = {NULL}, *comm;
    uint32_t begun[8] = {0};
    unsigned operations;
    size_t bytes;
    assert_non_null(log);
    while (fscanf(log, "%p %u %zu", &comm, &operations, &bytes) == 3) {
        int i = 0;
        while (i < 7 && comms[i] && comms[i] != comm)
            i++;
        comms[i] = comm;
        begun[i]++;
        out.operations = operations > out.operations ? operations : out.operations;
        out.bytes = bytes > out.bytes ? bytes : out.bytes;
        out.count++;
    }
    out.fewest = UINT32_MAX;
    for (int i = 0; i < 8 && comms[i]; i++)
        out.fewest = begun[i] < out.fewest ? begun[i] : out.fewest;
    fclose(log);
    unlink(path);
    return out;
}

/* Groups are bounded, whatever there is to send; so is the memory, and the report says how much it
 * was. */
TEST_WITHIN(test_groups_and_memory, start, stop)
{
    char path[] = "/tmp/dray-test-nccl-XXXXXX";
    close(mkstemp(path));
    s.config.intermediate_size = 1536; /* more than all slots hold */
    s.nccl_bytes = 1 << 20;
    s.log = gpu_is_real() ? NULL : path;
    run_all();
    assert_int_equal(s.board->number[0], DRAY_OK);
    assert_true(went_over_nccl());
    assert_true(s.board->number[3] >= 1 << 20);
    assert_true(s.board->number[3] <= (1 << 20) + (64 << 20));
    if (gpu_is_real()) {
        unlink(path);
        return;
    }
    groups found = read_log(path);
    uint64_t slot = (1 << 20) / (2 * DRAY__NCCL_SLOTS);
    assert_int_equal(found.operations, DRAY__NCCL_OPERATIONS);
    assert_true(found.bytes <= slot);
    assert_true(found.count >= (uint64_t)s.board->number[1] / slot);
}

/* As many requests are under way as there are slots, and no more: of a publisher whose first
 * transfer never ends, so many are received and never another one. */
TEST_WITHIN(test_pipeline, start, stop)
{
    char path[] = "/tmp/dray-test-nccl-XXXXXX";
    if (is_left_out())
        skip();
    close(mkstemp(path));
    s.config.intermediate_size = 1536; /* more than all slots hold */
    s.nccl_bytes = 1 << 20;
    s.log = path;
    s.fails = "hang:1";
    run_all();
    assert_int_equal(s.board->number[0], DRAY_ETORN);
    groups found = read_log(path);
    assert_int_equal(found.fewest, DRAY__NCCL_SLOTS);
}

TEST_WITHIN(test_trainers_without, start, stop)
{
    s.trainer_without = true;
    run_all();
    assert_int_equal(s.board->number[0], DRAY_OK);
    assert_false(went_over_nccl());
}

/* NCCL takes no GPU twice. */
TEST_WITHIN(test_one_gpu, start, stop)
{
    s.one_gpu = true;
    run_all();
    assert_int_equal(s.board->number[0], DRAY_OK);
    assert_false(went_over_nccl());
}

TEST_WITHIN(test_failing_transfers, start, stop)
{
    static const char *const ways[] = {"send:1", "send:2", "flip:1", "init:1", "register:1"};
    (void)state;
    if (is_left_out())
        skip();
    for (size_t i = 0; i < sizeof ways / sizeof *ways; i++) {
        memset((void *)s.board, 0, sizeof *s.board);
        s.fails = ways[i];
        s.first_fails = strncmp(ways[i], "init", 4) && strncmp(ways[i], "register", 8);
        run_all();
        assert_int_equal(s.board->number[0], s.first_fails ? DRAY_ETORN : DRAY_OK);
        if (!s.first_fails)
            assert_true(s.board->number[1] < s.board->number[2]); /* without NCCL, in part */
    }
}

/* A data server that could not register its staging is not asked to do so again. */
TEST_WITHIN(test_trainers_that_cannot_register, start, stop)
{
    (void)state;
    if (is_left_out())
        skip();
    s.trainers_fail = "register:1";
    s.first_fails = true;
    run_all();
    assert_int_equal(s.board->number[0], DRAY_ETORN);
}

/* Silence: it ends by itself, and the message says who was silent. */
TEST_WITHIN(test_hanging_transfer, start, stop)
{
    if (is_left_out())
        skip();
    s.fails = "hang:1";
    s.first_fails = true;
    run_all();
    assert_int_equal(s.board->number[0], DRAY_ETORN);
}

/* A publisher that closes does not wait for readers who do not take what it sends. */
static void run_closing_trainer(void *user)
{
    trainer t;
    (void)user;
    fixture_host = "here";
    setenv("FAKE_CUDA_HOST", "here", 1);
    setenv("FAKE_NCCL_FAIL", "enter:1", 1);
    trainer_open(&t, f.unix_address, &s.config, s.from, 0, 1, 5, DRAY_REGION_CUDA);
    MUST(dray_publisher_publish(t.publisher, 1, NULL, error));
    raise_flag(s.board, PUBLISHED);
    await_flag(s.board, ASKED);
    usleep(1500000);
    int64_t begin = dray__now();
    trainer_close(&t);
    CHECK(dray__now() - begin < 5 * DRAY__SECOND); /* the reader gives up after 10 */
    raise_flag(s.board, OVER);
}

static void run_asking_engine(void *user)
{
    engine e;
    (void)user;
    fixture_host = "there";
    setenv("FAKE_CUDA_HOST", "there", 1);
    await_flag(s.board, PUBLISHED);
    engine_open(&e, f.unix_address, &s.config, s.from, s.to, "engine", 0, 1);
    dray_update_options options = DRAY_UPDATE_OPTIONS_INIT;
    options.timeout_ns = LONG;
    raise_flag(s.board, ASKED);
    CHECK(dray_update_weights(e.subscriber, &options, NULL, NULL) != DRAY_OK);
    await_flag(s.board, OVER);
    engine_close(&e);
}

TEST_WITHIN(test_close_does_not_wait, start, stop)
{
    if (is_left_out())
        skip();
    RUN_ROLES(NULL, NULL, {run_closing_trainer, 1}, {run_asking_engine, 1});
}

/* A rank of TP2 on one host, whose communicators take longer than a silent member is waited for. */
static void run_slow_joiner(void *user)
{
    uint32_t rank = *(uint32_t *)user;
    engine e;
    fixture_host = "there";
    setenv("FAKE_CUDA_HOST", "there", 1);
    setenv("CUDA_VISIBLE_DEVICES", "0", 1);
    setenv("FAKE_NCCL_INIT_MS", "5500", 1);
    await_flag(s.board, PUBLISHED);
    await_flag(s.board, PUBLISHED + 4);
    open_engine(&e, "engine", rank, 2, 2);
    dray_update_options options = DRAY_UPDATE_OPTIONS_INIT;
    dray_update_report report = DRAY_UPDATE_REPORT_INIT;
    options.timeout_ns = LONG;
    MUST(dray_update_weights(e.subscriber, &options, &report, error));
    CHECK(report.retries == 0);
    CHECK(report.nccl_bytes > 0 && report.link_bytes[DRAY_LINK_HOST] > 0);
    CHECK(report.verified_tensors > 0 && holds(&e, 5, rank, 2));
    engine_close(&e);
}

static void run_cohort(void)
{
    uint32_t ranks[] = {0, 1};
    pid_t trainers[2], engines[2];
    for (int i = 0; i < 2; i++) {
        trainers[i] = spawn(run_trainer, &ranks[i]);
        engines[i] = spawn(run_slow_joiner, &ranks[i]);
    }
    all_end_well(engines, 2);
    raise_flag(s.board, RETRY);
    for (int i = 0; i < 2; i++)
        await_flag(s.board, AGAIN + i);
    raise_flag(s.board, OVER);
    all_end_well(trainers, 2);
}

/* Ranks that take from each other what each fetches over NCCL wait until communicators are made. */
TEST_WITHIN(test_cohort_waits_for_communicators, start, stop)
{
    if (is_left_out())
        skip();
    run_cohort();
}

/* ---- what is quantised on the way ------------------------------------------------------------ */

/* Matrices that end in the middle of cells, and whose rows the two trainers do not share by cells.
 */
static dray_model_config quantised_config(void)
{
    return cell_config(256, 320, 512, 1, 4, 4);
}

/* The publishers' GPUs quantise it, and bits and sums are those of data servers' CPUs. */
TEST_WITHIN(test_quantised, start, stop)
{
    static const struct {
        uint32_t rows;
        int32_t scale_format;
        bool unverified;
        int least; /* percent of the bytes over NCCL; cells that the trainers share go without it */
    } kinds[] = {{128, DRAY_SCALE_F32, false, 90},
                 {4, DRAY_SCALE_UE8M0, true, 90},
                 {1, DRAY_SCALE_F32, false, 0},
                 {256, DRAY_SCALE_F32, false, 50}};
    (void)state;
    s.config = quantised_config();
    s.from = DRAY_BF16;
    for (size_t i = 0; i < sizeof kinds / sizeof *kinds; i++) {
        if (test_is_short() && cluster_skips(i))
            continue;
        memset((void *)s.board, 0, sizeof *s.board);
        s.cell_rows = kinds[i].rows;
        s.scale_format = kinds[i].scale_format;
        s.unverified = kinds[i].unverified;
        run_all();
        assert_int_equal(s.board->number[0], DRAY_OK);
        int64_t share = s.board->number[1] * 100 / s.board->number[2];
        print_message("cells of %u rows: %d %% over NCCL\n", s.cell_rows, (int)share);
        assert_true(share >= kinds[i].least);
        assert_true(s.cell_rows > 1 || share < 50); /* cells that are too small for it */
    }
}

TEST_WITHIN(test_quantised_in_small_slots, start, stop)
{
    s.config = quantised_config();
    s.from = DRAY_F32;
    s.cell_rows = 128;
    s.nccl_bytes = 2 * DRAY__NCCL_SLOTS * (64 << 10);
    run_all();
    assert_int_equal(s.board->number[0], DRAY_OK);
    assert_true(s.board->number[1] * 10 >= s.board->number[2] * 9);
}

TEST_WITHIN(test_quantised_and_damaged, start, stop)
{
    if (is_left_out())
        skip();
    s.config = quantised_config();
    s.from = DRAY_BF16;
    s.cell_rows = 128;
    s.fails = "flip:1";
    run_all();
    assert_int_equal(s.board->number[0], DRAY_ETORN);
}

TEST_WITHIN(test_quantised_for_a_cohort, start, stop)
{
    if (is_left_out())
        skip();
    s.config = quantised_config();
    s.from = DRAY_BF16;
    s.cell_rows = 128;
    run_cohort();
}

/* ---- threads that must not wait for transfers ------------------------------------------------ */

/* The spinning kernel stands for a transfer whose reader receives only once it was told something
 * by the thread that copies here. */
static void run_copy_beside_a_transfer(void *user)
{
    (void)user;
    dray_region *region;
    uint8_t id[DRAY__NCCL_ID], first[64], second[64];
    dray__nccl_pair *pair;
    CUstream stream;
    const int64_t extent = sizeof first, stride = 1;
    const dray__cuda_place place = {
        .dtype = DRAY_U8, .ndim = 1, .extent = &extent, .stride = &stride};
    MUST(dray_region_alloc(DRAY_REGION_CUDA, 1 << 20, "copied", &region, error));
    for (size_t i = 0; i < sizeof first; i++)
        first[i] = (uint8_t)(3 * i);
    memory_put(region, 0, first, sizeof first);
    dray__cuda_device *device = dray__nccl_device_of(region);
    CHECK(device);
    MUST(dray__nccl_id(id, error));
    MUST(dray__nccl_open(device, id, 0, DRAY__NCCL_SLOT_MIN, 1, &pair, error));
    const dray__cuda *cuda = memory_enter(region);
    CHECK(cuda->cuStreamCreate(&stream, CU_STREAM_NON_BLOCKING) == CUDA_SUCCESS);
    dray__cuda_leave();
    spin(cuda, device, stream, 3000);
    int64_t begun = dray__now();
    MUST(dray__cuda_bounce(region, &place, second, false, error));
    CHECK(dray__now() - begun < 2 * DRAY__SECOND);
    CHECK(memcmp(first, second, sizeof first) == 0);
    dray__nccl_close(pair, NULL);
    dray_region_free(region);
}

/* A pair has allocated what copies by the CPU need: an allocation would wait for the GPU. */
TEST_WITHIN(test_copies_beside_transfers, start, stop)
{
    must_end_well(spawn(run_copy_beside_a_transfer, NULL));
}

int main(int argc, char **argv)
{
    cluster_kind = DRAY_REGION_CUDA;
    if (!gpu_is_real())
        setenv("DRAY_NCCL_LIBRARY", getenv("DRAY_FAKE_NCCL") ? getenv("DRAY_FAKE_NCCL") : "", 1);
    else if (gpu_real_count() < 2)
        return 77;
    return cluster_main(argc, argv);
}
