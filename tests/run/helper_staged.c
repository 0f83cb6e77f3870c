/* Trainer and engine of a job that share one GPU in turns, with their memory in arenas: what a role
 * does around its lease (docs/roles.md). Which of the two it is says $DRAY_ROLE. The "model" is
 * bytes: those of version v are all v + 1, so that each side sees whether what it reads is right.
 * Adds a line "STAGE BYTES" to stages-ROLE in the run's folder wherever memory was taken: of all
 * that is used on the GPU then. $STAGED: "never": nothing is released. */
#include "memory/cuda_library.h"
#include "run/data/samples.h"

#include <dray/gpu.h>
#include <dray/lease.h>
#include <dray/weights.h>
#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>

enum {
    MIB = 1 << 20,
    CHUNK = 2 * MIB, /* what a GPU gives at least */
    WEIGHTS = 4 * MIB,
    KV_CACHE = 12 * MIB,
    OPTIMIZER = 8 * MIB,
    GRADIENTS = 4 * MIB,
    ROWS_MAX = 64,
    NAMES_MAX = 8
};
#define MS INT64_C(1000000)

static dray_error error;

static void must_(int line, const char *what, int status)
{
    if (!status)
        return;
    fprintf(stderr, "error: line %d: %s: %s: %s\n", line, what, dray_error_name(status),
            error.message);
    exit(1);
}
#define MUST(call) must_(__LINE__, #call, (call))
#define CHECK(condition) must_(__LINE__, #condition, (condition) ? DRAY_OK : DRAY_EINTERNAL)

typedef struct block {
    const char *tag;
    uint64_t at, bytes;
    bool released;
} block;

static const char *role;
static dray_context *context;
static dray_queue *queue;
static dray_lease *lease;

/* ---- memory ---------------------------------------------------------------------------------- */

static void note(const char *stage)
{
    char path[4200];
    uint64_t unused, total;
    MUST(dray_gpu_memory(0, &unused, &total, &error));
    snprintf(path, sizeof path, "%.4000s/stages-%s", getenv("DRAY_RUN"), role);
    FILE *file = fopen(path, "a");
    CHECK(file);
    fprintf(file, "%s %llu\n", stage, (unsigned long long)(total - unused));
    fclose(file);
}

static void take_memory(block *b)
{
    dray_arena *arena;
    dray_arena_options options = DRAY_ARENA_OPTIONS_INIT;
    options.tag = b->tag;
    options.chunk_bytes = CHUNK;
    MUST(dray_arena_open(&options, &arena, &error));
    MUST(dray_arena_alloc(arena, b->bytes, &b->at, &error));
    note(b->tag);
}

static bool never_releases(void)
{
    const char *staged = getenv("STAGED");
    return staged && strcmp(staged, "never") == 0;
}

static void release(block *b, bool drop)
{
    dray_arena_release_options options = DRAY_ARENA_RELEASE_OPTIONS_INIT;
    options.drop = drop;
    if (never_releases())
        return;
    MUST(dray_arena_release(b->tag, &options, NULL, &error));
    b->released = true;
}

static void resume(block *b)
{
    if (!b->released)
        return;
    MUST(dray_arena_resume(b->tag, NULL, NULL, &error));
    b->released = false;
    note(b->tag);
}

static void fill(const block *b, uint8_t value)
{
    dray__cuda_device *device;
    MUST(dray__cuda_device_at(0, &device, &error));
    MUST(dray__cuda_enter(device, &error));
    void *bytes = malloc(b->bytes);
    CHECK(bytes);
    memset(bytes, value, b->bytes);
    CHECK(dray__cuda_get(NULL)->cuMemcpyHtoD(b->at, bytes, b->bytes) == CUDA_SUCCESS);
    CHECK(dray__cuda_get(NULL)->cuCtxSynchronize() == CUDA_SUCCESS);
    free(bytes);
    dray__cuda_leave();
}

static void expect(const block *b, uint8_t value)
{
    dray__cuda_device *device;
    MUST(dray__cuda_device_at(0, &device, &error));
    MUST(dray__cuda_enter(device, &error));
    uint8_t *bytes = malloc(b->bytes);
    CHECK(bytes);
    CHECK(dray__cuda_get(NULL)->cuMemcpyDtoH(bytes, b->at, b->bytes) == CUDA_SUCCESS);
    for (uint64_t i = 0; i < b->bytes; i++)
        CHECK(bytes[i] == value);
    free(bytes);
    dray__cuda_leave();
}

static dray_region *region_of(const block *b)
{
    dray_region *region;
    MUST(dray_region_wrap_cuda(b->at, b->bytes, b->tag, &region, &error));
    return region;
}

static dray_layout *layout_of(void)
{
    dray_layout *layout;
    const int64_t shape[] = {WEIGHTS}, start[] = {0};
    dray_region_info info = {.kind = DRAY_REGION_CUDA, .bytes = WEIGHTS, .name = "weights"};
    MUST(dray_layout_new(&layout, &error));
    MUST(dray_layout_add_region(layout, &info, NULL, &error));
    MUST(dray_layout_add_tensor(layout, "weights", DRAY_U8, 1, shape, NULL, &error));
    MUST(dray_layout_add_dense(layout, 0, 0, start, shape, 0, &error));
    return layout;
}

/* ---- turns ----------------------------------------------------------------------------------- */

static void begin_turn(void)
{
    char *names = strdup(getenv("DRAY_LEASES") ? getenv("DRAY_LEASES") : ""), *rest = NULL;
    const char *list[NAMES_MAX];
    uint32_t count = 0;
    dray_lease_options options = DRAY_LEASE_OPTIONS_INIT;
    options.timeout_ns = 60 * 1000 * MS;
    for (char *at = strtok_r(names, ",", &rest); at && count < NAMES_MAX;
         at = strtok_r(NULL, ",", &rest))
        list[count++] = at;
    if (count)
        MUST(dray_lease_acquire(context, list, count, &options, &lease, &error));
    free(names);
}

static void end_turn(void)
{
    MUST(dray_lease_release(lease, &error));
    lease = NULL;
}

/* NULL: nothing came. */
static dray_batch *claim(const char *const *tasks, uint32_t count, uint32_t rows,
                         int64_t timeout_ns, uint32_t *which, bool *ended)
{
    dray_batch *batch = NULL;
    dray_claim_options options[2] = {DRAY_CLAIM_OPTIONS_INIT, DRAY_CLAIM_OPTIONS_INIT};
    for (uint32_t i = 0; i < count; i++) {
        options[i].task = tasks[i];
        options[i].count = rows;
        options[i].policy = strcmp(tasks[i], "eval") == 0 ? DRAY_POLICY_FIFO : DRAY_POLICY_ORDERED;
        options[i].timeout_ns = timeout_ns;
    }
    int status = dray_queue_claim_any(queue, options, count, which, &batch, &error);
    *ended = status == DRAY_EEND;
    if (status != DRAY_EEND && status != DRAY_ETIMEDOUT)
        MUST(status);
    return status ? NULL : batch;
}

/* ---- the trainer ----------------------------------------------------------------------------- */

static void report(const char *kind, int64_t step)
{
    char text[256];
    snprintf(text, sizeof text, "{\"step\": %lld, \"reward_mean\": 0, \"response_length_mean\": 2}",
             (long long)step);
    MUST(dray_report_post(context, kind, text, &error));
}

/* The parameters stay until an engine has read them; then they go, too. */
static void give_up(dray_publisher *publisher, block *weights, uint64_t version)
{
    if (never_releases() ||
        dray_publisher_deliver(publisher, version, NULL, 1, 2000 * MS, &error) ||
        dray_publisher_release(publisher, 2000 * MS, NULL, 0, NULL, &error))
        return; /* nobody wants them yet, or any more: they stay */
    release(weights, false);
}

/* The queue may forget what was trained: there is no checkpoint that anybody could go back to. */
static void cover(uint64_t step)
{
    void *cursor;
    size_t size;
    MUST(dray_queue_cursor(queue, step, &cursor, &size, &error));
    MUST(dray_queue_covered(queue, cursor, size, &error));
    dray_free(cursor);
}

static void train(void)
{
    char path[4200];
    static const char *const tasks[] = {"actor"};
    block weights = {"weights", 0, WEIGHTS, false}, optimizer = {"optimizer", 0, OPTIMIZER, false},
          gradients = {"gradients", 0, GRADIENTS, false};
    uint32_t rows = (uint32_t)atoi(getenv("STAGED_ROWS"));
    dray_layout *layout = layout_of();
    dray_publisher *publisher;
    begin_turn();
    take_memory(&weights);
    take_memory(&optimizer);
    take_memory(&gradients);
    dray_region *region = region_of(&weights);
    dray_publisher_options options = DRAY_PUBLISHER_OPTIONS_INIT;
    options.regions = &region;
    options.no_checksums = 1; /* its bytes are looked at */
    MUST(dray_publisher_open(context, "policy", layout, &options, &publisher, &error));
    snprintf(path, sizeof path, "%.4000s/checkpoints", getenv("DRAY_RUN"));
    CHECK(mkdir(path, 0700) == 0 || errno == EEXIST);
    strcat(path, "/step-000000");
    for (uint64_t step = 0;; step++) {
        fill(&weights, (uint8_t)(step + 1));
        fill(&optimizer, (uint8_t)(step + 101));
        fill(&gradients, 255);
        MUST(dray_publisher_publish(publisher, step, NULL, &error));
        CHECK(step || mkdir(path, 0700) == 0);
        report(step ? "step" : "ready", (int64_t)step);
        release(&gradients, true);
        release(&optimizer, false);
        end_turn();
        give_up(publisher, &weights, step);
        uint32_t which;
        bool ended = false;
        dray_batch *batch = NULL;
        while (!batch && !ended)
            batch = claim(tasks, 1, rows, 1000 * MS, &which, &ended);
        if (ended)
            break;
        begin_turn();
        bool moved = weights.released;
        resume(&weights);
        resume(&optimizer);
        resume(&gradients);
        if (moved)
            MUST(dray_publisher_move(publisher, &region, &error));
        expect(&weights, (uint8_t)(step + 1));
        expect(&optimizer, (uint8_t)(step + 101));
        MUST(dray_publisher_wait(publisher, step, 2000 * MS, NULL, &error));
        MUST(dray_batch_commit(batch, &error));
        dray_batch_free(batch);
        cover(step + 1);
    }
    dray_publisher_close(publisher);
    dray_region_free(region);
    dray_layout_free(layout);
}

/* ---- the engine ------------------------------------------------------------------------------ */

/* Two tokens each: a digit, and the end. */
static void respond(dray_batch *batch, bool evaluates, int64_t version)
{
    uint64_t offsets[ROWS_MAX + 1];
    int32_t tokens[2 * ROWS_MAX], versions[2 * ROWS_MAX];
    float found[2 * ROWS_MAX];
    uint32_t rows = dray_batch_rows(batch);
    CHECK(rows <= ROWS_MAX);
    for (uint32_t i = 0; i < 2 * rows; i++) {
        tokens[i] = i % 2 ? 258 : '0' + (int32_t)i % 10;
        versions[i] = (int32_t)version;
        found[i] = -1;
    }
    for (uint32_t i = 0; i <= rows; i++)
        offsets[i] = 2 * (uint64_t)i;
    const dray_column_data columns[] = {
        dray__ragged_column(evaluates ? "eval_response" : "response", DRAY_I32, offsets, tokens),
        dray__ragged_column("rollout_log_prob", DRAY_F32, offsets, found),
        dray__ragged_column("response_version", DRAY_I32, offsets, versions)};
    for (uint32_t i = 0; i < (evaluates ? 1 : 3); i++)
        MUST(dray_batch_set(batch, &columns[i], &error));
    for (uint32_t i = 0; i < rows; i++)
        MUST(dray_batch_set_tag(batch, i, DRAY_TAG_VERSION, (double)version, &error));
    MUST(dray_batch_commit(batch, &error));
    dray_batch_free(batch);
}

static void generate(void)
{
    static const char *const tasks[] = {"eval", "rollout"};
    block weights = {"weights", 0, WEIGHTS, false}, cache = {"kv_cache", 0, KV_CACHE, false};
    dray_layout *layout = layout_of();
    dray_subscriber *subscriber;
    begin_turn();
    take_memory(&weights);
    take_memory(&cache);
    dray_region *region = region_of(&weights);
    dray_subscriber_options options = DRAY_SUBSCRIBER_OPTIONS_INIT;
    options.regions = &region;
    options.group = "engine";
    MUST(dray_subscriber_open(context, "policy", layout, &options, &subscriber, &error));
    int64_t version = -1;
    for (bool mine = true, ended = false; !ended;) {
        uint32_t which;
        dray_batch *batch = claim(tasks, 2, 4, mine ? 2 * MS : 20 * MS, &which, &ended);
        if (!batch && mine) {
            release(&cache, true);
            MUST(dray_subscriber_leave(subscriber, 2000 * MS, NULL, &error));
            dray_region_unexport(region);
            release(&weights, false);
            end_turn();
            mine = false;
        }
        MUST(
            dray_subscriber_release_mappings(subscriber, &error)); /* what its trainer wants back */
        if (!batch)
            continue;
        int64_t step;
        MUST(dray__batch_step(batch, &step, &error));
        bool evaluates = which == 0;
        int64_t wanted = evaluates ? step : step - 1;
        if (!mine)
            begin_turn();
        mine = true;
        resume(&weights);
        if (version != wanted) {
            dray_update_options update = DRAY_UPDATE_OPTIONS_INIT;
            update.min_version = (uint64_t)wanted;
            update.timeout_ns = 20000 * MS;
            update.no_verify = 1;
            MUST(dray_update_weights(subscriber, &update, NULL, &error));
            MUST(dray_subscriber_release_mappings(subscriber, &error));
            version = wanted;
        }
        expect(&weights, (uint8_t)(version + 1));
        resume(&cache);
        fill(&cache, 0x5C);
        respond(batch, evaluates, version);
    }
    dray_subscriber_close(subscriber);
    dray_region_free(region);
    dray_layout_free(layout);
}

int main(void)
{
    role = getenv("DRAY_ROLE");
    bool trains = strcmp(role, "trainer") == 0;
    dray_options options = DRAY_OPTIONS_INIT;
    options.name = role;
    options.role = trains ? "trainer" : "engine";
    MUST(dray_open(&options, &context, &error));
    dray_queue_options attach = DRAY_QUEUE_OPTIONS_INIT;
    MUST(dray_queue_open(context, getenv("DRAY_QUEUE"), &attach, &queue, &error));
    if (trains)
        train();
    else
        generate();
    MUST(dray_lease_release(lease, &error));
    dray_queue_close(queue);
    dray_close(context);
    return 0;
}
