/* Tests engines that take full named tensors through a callback. The tensors are compared element
 * by element with the oracle, and memory is measured by the kernel's count of resident pages. */
#include "seed.h"
#include "suite.h"
#include "weights/cluster.h"

#include <poll.h>
#include <stdint.h>

static uint64_t seed;

/* ---- a model with everything that matters -----------------------------------------------------
 */

enum { TENSORS = 13, BUCKET = 512 << 10 };

static const struct {
    const char *name;
    uint32_t ndim;
    int64_t shape[3];
} model[TENSORS] = {
    {"model.embed_tokens.weight", 2, {3001, 100}}, /* larger than the bucket */
    {"model.layers.0.self_attn.q_a_proj.weight", 2, {96, 100}},
    {"model.layers.0.input_layernorm.weight", 1, {101}},
    {"model.layers.0.mlp.experts.w", 3, {5, 33, 100}},
    {"model.layers.0.self_attn.kv_a_proj_with_mqa.weight", 2, {31, 100}},
    {"model.layers.0.self_attn.q_a_proj.weight_scale_inv", 2, {1, 1}},
    {"model.layers.1.self_attn.q_a_proj.weight", 2, {96, 100}},
    {"model.layers.1.big.weight", 2, {900, 100}},
    {"model.layers.1.self_attn.kv_a_proj_with_mqa.weight", 2, {31, 100}},
    {"model.layers.1.scalar", 0, {0}},
    {"model.layers.1.empty", 2, {0, 100}},
    {"model.long_bias", 1, {200003}}, /* larger, too, and of one dimension */
    {"model.norm.weight", 1, {77}},
};

/* What the engine wants: every other tensor in another dtype than the trainer has. */
static dray_dtype wanted(uint32_t t)
{
    return t % 2 ? DRAY_F32 : DRAY_BF16;
}

/* In buckets: it lies nowhere. */
static dray_layout *wanted_layout(void)
{
    dray_layout *l;
    MUST(dray_layout_new(&l, error));
    dray_region_info info = {.kind = DRAY_REGION_HOST, .bytes = 8 << 20, .name = "weights"};
    MUST(dray_layout_add_region(l, &info, NULL, error));
    for (uint32_t t = 0; t < TENSORS; t++)
        MUST(dray_layout_add_tensor(l, model[t].name, wanted(t), model[t].ndim, model[t].shape,
                                    NULL, error));
    return l;
}

/* Rows cut over the ranks as torch.chunk does; the scalar on rank 0. */
static dray_layout *shard_layout(dray_region_kind kind, uint32_t rank, uint32_t world)
{
    dray_layout *l;
    uint64_t at = 0;
    MUST(dray_layout_new(&l, error));
    dray_region_info info = {.kind = (int32_t)kind, .bytes = 8 << 20, .name = "weights"};
    MUST(dray_layout_add_region(l, &info, NULL, error));
    for (uint32_t t = 0; t < TENSORS; t++) {
        int64_t start[3] = {0}, extent[3];
        uint32_t index;
        MUST(dray_layout_add_tensor(l, model[t].name, DRAY_F32, model[t].ndim, model[t].shape,
                                    &index, error));
        memcpy(extent, model[t].shape, sizeof extent);
        int64_t step = model[t].ndim ? (extent[0] + world - 1) / world : 0, bytes = 4;
        start[0] = step * rank < extent[0] ? step * rank : extent[0];
        extent[0] = extent[0] - start[0] < step ? extent[0] - start[0] : step;
        for (uint32_t d = 0; d < model[t].ndim; d++)
            bytes *= extent[d];
        if (model[t].ndim == 0 && rank)
            bytes = 0;
        if (bytes)
            MUST(dray_layout_add_dense(l, index, 0, start, extent, at, error));
        at += (uint64_t)(bytes + 60) & ~(uint64_t)63;
    }
    return l;
}

/* ---- what the engine is handed ----------------------------------------------------------------
 */

typedef struct taker {
    uint64_t seed, version, elements, most_bytes;
    uint32_t buckets, fail_at; /* fail_at: the bucket that is refused, from 1; 0: none */
    int64_t rows[TENSORS];     /* handed over of each tensor */
    uint32_t came[TENSORS];    /* in which bucket, from 1 */
    uint64_t wrong;
} taker;

static uint32_t find(const char *name)
{
    for (uint32_t t = 0; t < TENSORS; t++)
        if (strcmp(model[t].name, name) == 0)
            return t;
    CHECK(!"an unknown tensor");
    return 0;
}

static void look_at(taker *k, const dray_load_bucket *b, const dray_load_tensor *t)
{
    uint32_t index = find(t->name);
    uint64_t hash = name_hash(t->name, false), row = 1,
             size = dray_dtype_size((dray_dtype)t->dtype);
    CHECK(t->dtype == (int32_t)wanted(index) && t->ndim == model[index].ndim);
    CHECK(memcmp(t->shape, model[index].shape, t->ndim * sizeof *t->shape) == 0);
    CHECK(t->first_row == k->rows[index]); /* slices in order, nothing twice */
    for (uint32_t d = 1; d < t->ndim; d++)
        row *= (uint64_t)t->shape[d];
    CHECK(t->numel == (uint64_t)t->rows * row && t->end - t->start == t->numel * size);
    CHECK(t->start % 64 == 0 && t->end <= b->bytes);
    for (uint64_t i = 0; i < t->numel; i++) {
        uint32_t bits = 0, right = value_bits(hash, (uint64_t)t->first_row * row + i, k->seed,
                                              DRAY_F32, t->dtype);
        memcpy(&bits, (const uint8_t *)b->data + t->start + i * size, size);
        k->wrong += bits != right;
    }
    k->rows[index] += t->rows;
    k->came[index] = k->buckets;
    k->elements += t->numel;
}

static int take(void *user, const dray_load_bucket *b, dray_error *error)
{
    taker *k = user;
    CHECK(b->index == k->buckets && b->index < b->buckets &&
          b->version + numbers_less() == k->version);
    k->buckets++;
    k->most_bytes = b->bytes > k->most_bytes ? b->bytes : k->most_bytes;
    for (uint32_t i = 0; i < b->count; i++) {
        CHECK(i == 0 || b->tensors[i].start >= b->tensors[i - 1].end);
        look_at(k, b, &b->tensors[i]);
    }
    if (k->buckets != k->fail_at)
        return 0;
    error->code = DRAY_ENOMEM;
    snprintf(error->message, sizeof error->message, "the engine has no room");
    return DRAY_ENOMEM;
}

static void expect(taker *k, uint64_t version, uint64_t values)
{
    uint32_t fail_at = k->fail_at;
    *k = (taker){.seed = values, .version = version, .fail_at = fail_at};
}

static void check_all(const taker *k)
{
    CHECK(k->wrong == 0);
    for (uint32_t t = 0; t < TENSORS; t++)
        CHECK(k->rows[t] == (model[t].ndim ? model[t].shape[0] : 1));
    for (uint32_t t = 0; t < TENSORS; t++)
        CHECK(k->came[t]);
    CHECK(k->came[1] == k->came[4] && k->came[1] == k->came[5] && k->came[6] == k->came[8]);
    CHECK(k->buckets > 3 && k->most_bytes <= BUCKET);
}

/* ---- processes --------------------------------------------------------------------------------
 */

enum { WORLD = 3, RANKS = 2, VERSIONS = 3 };

typedef struct scene {
    uint32_t rank;
    bool remote; /* engines on another host than trainers */
    char folder[64];
} scene;

static dray_publisher *publish_first(dray_context *context, dray_layout *l, dray_region **region,
                                     uint32_t rank, uint32_t world)
{
    dray_publisher_options options = DRAY_PUBLISHER_OPTIONS_INIT;
    dray_publisher *publisher;
    MUST(dray_regions_for_layout(l, 1, region, error));
    options.regions = region;
    options.rank = rank;
    options.world = world;
    MUST(dray_publisher_open(context, MODEL, l, &options, &publisher, error));
    return publisher;
}

static void run_trainer(void *user)
{
    const scene *s = user;
    dray_context *context = fixture_open_at(f.unix_address, "trainer", "trainer", s->rank);
    dray_layout *l = shard_layout(cluster_kind, s->rank, WORLD);
    dray_region *region;
    dray_publisher *publisher = publish_first(context, l, &region, s->rank, WORLD);
    for (uint64_t version = 1; version <= VERSIONS + 2; version++) {
        fill(l, &region, false, seed + version);
        MUST(dray_publisher_publish(publisher, version, NULL, error));
        if (version == VERSIONS + 1 && s->rank == 1) { /* what was summed is no longer there */
            await_sums(context, version);
            memory_flip(region, 1000, 1);
        }
        MUST(dray_barrier(context, "published", WORLD + RANKS, DRAY_WAIT_DEFAULT, error));
        MUST(dray_barrier(context, "updated", WORLD + RANKS, DRAY_WAIT_DEFAULT, error));
        MUST(dray_publisher_wait(publisher, version, DRAY_WAIT_DEFAULT, NULL, error));
    }
    dray_publisher_close(publisher);
    dray_region_free(region);
    dray_layout_free(l);
    dray_close(context);
}

static dray_subscriber *open_loading(dray_context *context, taker *k, uint32_t rank, uint32_t world)
{
    dray_layout *l = wanted_layout();
    dray_load_options load = DRAY_LOAD_OPTIONS_INIT;
    dray_subscriber_options options = DRAY_SUBSCRIBER_OPTIONS_INIT;
    dray_subscriber *s;
    load.load = take;
    load.user = k;
    load.bucket_bytes = BUCKET;
    load.slices = 1;
    options.load = &load;
    options.group = "loaders";
    options.rank = rank;
    options.world = world;
    MUST(dray_subscriber_open(context, MODEL, l, &options, &s, error));
    dray_layout_free(l);
    return s;
}

/* Half of the updates by poll. */
static int update(dray_subscriber *s, const dray_update_options *options, bool polls,
                  dray_update_report *report, dray_error *out)
{
    if (!polls)
        return dray_update_weights(s, options, report, out);
    MUST(dray_update_start(s, options, error));
    while (dray_update_poll(s, out) == DRAY_EAGAIN) {
        struct pollfd p = {.fd = dray_subscriber_fd(s), .events = POLLIN};
        CHECK(poll(&p, 1, 60000) == 1);
    }
    return dray_update_finish(s, report, out);
}

static void update_well(dray_subscriber *s, taker *k, const dray_update_options *options,
                        uint64_t version, bool compared)
{
    dray_update_report report = DRAY_UPDATE_REPORT_INIT;
    MUST(update(s, options, version % 2, &report, error));
    check_all(k);
    CHECK(report.version == version && report.peak_extra_bytes <= BUCKET);
    CHECK(!compared || report.verified_tensors == TENSORS - 1); /* but for the empty one */
    CHECK(dray_subscriber_verify(s, NULL) == DRAY_EUNSUPPORTED);
}

static int32_t state_of(dray_subscriber *s)
{
    int32_t state;
    MUST(dray_subscriber_version(s, NULL, NULL, &state, error));
    return state;
}

static void run_loader(void *user)
{
    const scene *s = user;
    taker k = {0};
    dray_error found;
    fixture_host = s->remote ? "elsewhere" : NULL;
    dray_context *context = fixture_open_at(f.unix_address, "engine", "engine", s->rank);
    dray_subscriber *subscriber = open_loading(context, &k, s->rank, RANKS);
    for (uint64_t version = 1; version <= VERSIONS + 2; version++) {
        dray_update_options options = DRAY_UPDATE_OPTIONS_INIT;
        options.mode = s->remote ? DRAY_MODE_DISTRIBUTED : DRAY_MODE_TENSOR;
        options.min_version = version;
        MUST(dray_barrier(context, "published", WORLD + RANKS, DRAY_WAIT_DEFAULT, error));
        expect(&k, version, seed + version);
        if (version == VERSIONS + 1) {
            CHECK(update(subscriber, &options, false, NULL, &found) == DRAY_ETORN);
            CHECK(state_of(subscriber) == DRAY_GROUP_TORN);
        } else {
            update_well(subscriber, &k, &options, version, true);
        }
        MUST(dray_barrier(context, "updated", WORLD + RANKS, DRAY_WAIT_DEFAULT, error));
    }
    CHECK(state_of(subscriber) == DRAY_GROUP_WHOLE);
    dray_update_options options = DRAY_UPDATE_OPTIONS_INIT;
    options.mode = DRAY_MODE_DISK;
    options.path = s->folder;
    options.path_version = 70;
    expect(&k, 70, seed);
    update_well(subscriber, &k, &options, 70, true);
    /* rank 1's engine refuses its third bucket */
    options.path_version = 71;
    k.fail_at = s->rank == 1 ? 3 : 0;
    expect(&k, 71, seed);
    CHECK(update(subscriber, &options, false, NULL, &found) == DRAY_ETORN);
    CHECK(strstr(found.message, "the engine has no room") && strstr(found.message, "bucket 3 of"));
    k.fail_at = 0;
    expect(&k, 71, seed);
    update_well(subscriber, &k, &options, 71, true);
    dray_subscriber_close(subscriber);
    dray_close(context);
}

static void load_from(bool remote)
{
    scene s[WORLD + RANKS];
    pid_t pids[WORLD + RANKS];
    char folder[64] = "/tmp/dray-test-load-XXXXXX", command[96];
    CHECK(mkdtemp(folder));
    dray_layout *whole = shard_layout(DRAY_REGION_HOST, 0, 1);
    dray_region *region;
    MUST(dray_regions_for_layout(whole, 1, &region, error));
    fill(whole, &region, false, seed);
    MUST(dray_checkpoint_write(folder, whole, &region, NULL, error));
    dray_region_free(region);
    dray_layout_free(whole);
    for (uint32_t i = 0; i < WORLD + RANKS; i++) {
        s[i].rank = i < WORLD ? i : i - WORLD;
        s[i].remote = remote;
        strcpy(s[i].folder, folder);
        pids[i] = spawn(i < WORLD ? run_trainer : run_loader, &s[i]);
    }
    all_end_well(pids, WORLD + RANKS);
    snprintf(command, sizeof command, "rm -r %s", folder);
    CHECK(system(command) == 0);
}

CLUSTER_TEST(test_loading)
{
    load_from(false);
}

CLUSTER_TEST(test_loading_from_other_hosts)
{
    load_from(true);
}

/* ---- memory -----------------------------------------------------------------------------------
 */

static int64_t resident_kb(void)
{
    char line[128];
    int64_t kb = -1;
    FILE *file = fopen("/proc/self/status", "re");
    CHECK(file);
    while (fgets(line, sizeof line, file))
        if (sscanf(line, "RssAnon: %" SCNd64, &kb) == 1)
            break;
    fclose(file);
    return kb;
}

static int measure(void *user, const dray_load_bucket *b, dray_error *error)
{
    (void)b, (void)error;
    int64_t *most = user, now = resident_kb();
    *most = now > *most ? now : *most;
    return 0;
}

enum { LARGE_ROWS = 12000, LARGE_COLUMNS = 1024, CEILING = 4 << 20 };

static dray_layout *large_layout(dray_dtype dtype)
{
    static const int64_t shape[2] = {LARGE_ROWS, LARGE_COLUMNS}, zero[2] = {0};
    dray_layout *l;
    dray_region_info info = {
        .kind = DRAY_REGION_SHARED, .bytes = 4ull * LARGE_ROWS * LARGE_COLUMNS, .name = "weights"};
    MUST(dray_layout_new(&l, error));
    MUST(dray_layout_add_region(l, &info, NULL, error));
    MUST(dray_layout_add_tensor(l, "large", dtype, 2, shape, NULL, error));
    MUST(dray_layout_add_dense(l, 0, 0, zero, shape, 0, error));
    return l;
}

/* A tensor twelve times the bucket: the process grows by the bucket, not by the tensor. */
static void run_measured(void *user)
{
    (void)user;
    int64_t most = 0;
    dray_context *context = fixture_open_at(f.unix_address, "both", "engine", 0);
    dray_layout *source = large_layout(DRAY_F32), *l = large_layout(DRAY_BF16);
    dray_region *region;
    dray_publisher *publisher = publish_first(context, source, &region, 0, 1);
    memset(dray_region_base(region), 1, dray_region_bytes(region));
    MUST(dray_publisher_publish(publisher, 1, NULL, error));
    dray_load_options load = DRAY_LOAD_OPTIONS_INIT;
    load.load = measure;
    load.user = &most;
    load.bucket_bytes = CEILING;
    load.slices = 1;
    dray_subscriber_options options = DRAY_SUBSCRIBER_OPTIONS_INIT;
    options.load = &load;
    options.group = "measured";
    dray_subscriber *subscriber;
    MUST(dray_subscriber_open(context, MODEL, l, &options, &subscriber, error));
    int64_t before = resident_kb();
    dray_update_report report = DRAY_UPDATE_REPORT_INIT;
    MUST(dray_update_weights(subscriber, NULL, &report, error));
    CHECK(report.bytes == 2ull * LARGE_ROWS * LARGE_COLUMNS);
    CHECK(report.peak_extra_bytes <= CEILING);
    int64_t grown = (most - before) * 1024, slack = 1 << 20;
#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
    slack = 64 << 20; /* shadows */
#endif
    if (grown > CEILING + slack)
        fprintf(stderr, "grew by %" PRId64 " bytes\n", grown);
    CHECK(grown <= CEILING + slack && grown >= CEILING / 2);
    CHECK(resident_kb() - before <= slack / 1024); /* given back */
    dray_subscriber_close(subscriber);
    dray_publisher_close(publisher);
    dray_region_free(region);
    dray_layout_free(l);
    dray_layout_free(source);
    dray_close(context);
}

CLUSTER_TEST(test_ceiling)
{
    if (cluster_kind != DRAY_REGION_SHARED)
        skip(); /* what grows is a process's own memory */
    must_end_well(spawn(run_measured, NULL));
}

/* ---- refusals ---------------------------------------------------------------------------------
 */

static int open_with(dray_context *context, const dray_load_options *load, dray_error *error)
{
    dray_layout *l = wanted_layout();
    dray_subscriber_options options = DRAY_SUBSCRIBER_OPTIONS_INIT;
    dray_subscriber *s = NULL;
    options.load = load;
    options.group = "refused";
    int rc = dray_subscriber_open(context, MODEL, l, &options, &s, error);
    dray_subscriber_close(s);
    dray_layout_free(l);
    return rc;
}

CLUSTER_TEST(test_refusals)
{
    dray_context *context = fixture_open(&f, "refused", "engine", 0);
    dray_error error;
    dray_load_options load = DRAY_LOAD_OPTIONS_INIT;
    assert_int_equal(open_with(context, &load, &error), DRAY_EINVALID); /* no function */
    load.load = take;
    load.bucket_bytes = 1000;
    assert_int_equal(open_with(context, &load, &error), DRAY_EINVALID);
    assert_non_null(strstr(error.message, "bucket_bytes 1000"));
    load.bucket_bytes = BUCKET; /* less 131072 of staging: 393216; the embedding has 600200 */
    assert_int_equal(open_with(context, &load, &error), DRAY_EFULL);
    assert_non_null(strstr(error.message, "tensor model.embed_tokens.weight: 600256 bytes"));
    assert_non_null(strstr(error.message, "holds 393216: give at least"));
    assert_non_null(strstr(error.message, "or accept slices"));
    /* what the message says is enough */
    const char *least = strstr(error.message, "at least ");
    load.bucket_bytes = strtoull(least + strlen("at least "), NULL, 10) + 1;
    assert_int_equal(open_with(context, &load, &error), DRAY_EFULL); /* for the next one */
    assert_non_null(strstr(error.message, "model.long_bias"));
    load.bucket_bytes = strtoull(strstr(error.message, "at least ") + 9, NULL, 10);
    assert_int_equal(open_with(context, &load, &error), DRAY_OK);

    const char *const together[] = {"embed_tokens,norm"};
    load.bucket_bytes = BUCKET;
    load.slices = 1;
    load.together = together;
    load.together_count = 1;
    assert_int_equal(open_with(context, &load, &error), DRAY_EFULL);
    assert_non_null(strstr(error.message, "must arrive together"));
    const char *const nothing[] = {""};
    load.together = nothing;
    assert_int_equal(open_with(context, &load, &error), DRAY_EINVALID);
    load.together_count = 0;
    assert_int_equal(open_with(context, &load, &error), DRAY_OK);
    dray_close(context);
}

int main(int argc, char **argv)
{
    setenv("DRAY_DATA_ADDRESS", "127.0.0.1", 1);
    seed = test_seed();
    return cluster_main(argc, argv);
}
