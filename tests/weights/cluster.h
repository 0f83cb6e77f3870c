/* Trainers and engines as processes, and the oracle for their memory. Every element is a function
 * of its tensor's name, its global index and a seed. The planner is not part of the oracle. */
#pragma once

#include "control/fixture.h"
#include "gpu/memory.h"
#include "mover/mover.h"
#include "seed.h"
#include "suite.h"
#include "weights/internal.h"
#include "weights/numbers.h"
#include "weights/registry/registry.h"

#include <dray/weights.h>
#include <inttypes.h>
#include <stdint.h>
#include <sys/mman.h>
#include <sys/prctl.h>

#define MODEL "test-model"

/* ---- failing in any process ------------------------------------------------------------------ */

#define MUST(call)                                                                                 \
    do {                                                                                           \
        dray_error must_error = {0};                                                               \
        dray_error *error = &must_error;                                                           \
        int must_code = (call);                                                                    \
        if (must_code) {                                                                           \
            fprintf(stderr, "%s:%d: %s: %s: %s\n", __FILE__, __LINE__, #call,                      \
                    dray_error_name(must_code), must_error.message);                               \
            abort();                                                                               \
        }                                                                                          \
    } while (0)

#define CHECK(condition)                                                                           \
    do {                                                                                           \
        if (!(condition)) {                                                                        \
            fprintf(stderr, "%s:%d: %s\n", __FILE__, __LINE__, #condition);                        \
            abort();                                                                               \
        }                                                                                          \
    } while (0)

/* ---- the coordinator ------------------------------------------------------------------------- */

static coordinator_fixture f;

/* Starts the coordinator in a process of its own. */
static inline int cluster_start(void **state)
{
    (void)state;
    fixture_fork(&f, dray__registry_add);
    return 0;
}

static inline int cluster_start_thread(void **state)
{
    (void)state;
    fixture_start(&f, dray__registry_add);
    return 0;
}

/* Ends the coordinator, and resets everything that tests set for a time: hooks, faults, the host's
 * name. */
static inline int cluster_stop(void **state)
{
    (void)state;
    dray__hook_set(NULL, NULL);
    dray__mover_faults(NULL, NULL);
    fixture_stop(&f);
    fixture_host = NULL;
    return 0;
}

#define CLUSTER_TEST(name) TEST_WITHIN(name, cluster_start, cluster_stop)
#define CLUSTER_TEST_IN_PROCESS(name) TEST_WITHIN(name, cluster_start_thread, cluster_stop)

/* ---- kinds of memory ------------------------------------------------------------------------- */

/* The kind of trainers' and engines' regions, in suites that run for several kinds. The program's
 * argument is its name. */
static dray_region_kind cluster_kind = DRAY_REGION_SHARED;

/* Returns that kind, or `own` when the suite runs for no kind in particular. */
static inline dray_region_kind cluster_kind_or(dray_region_kind own)
{
    return cluster_kind == DRAY_REGION_SHARED ? own : cluster_kind;
}

/* The number of GPUs that are dealt to rank processes. Each process sees one of them, so that the
 * number of a GPU differs between processes. */
static int cluster_gpus; /* 0 means that the suite needs none */

static inline void cluster_choose_gpu(uint32_t rank)
{
    char text[16];
    if (!cluster_gpus)
        return;
    snprintf(text, sizeof text, "%u", rank % (uint32_t)cluster_gpus);
    setenv("CUDA_VISIBLE_DEVICES", text, 0); /* the first rank of a process chooses */
}

/* Runs a test in a process of its own. A process that called the driver cannot fork ranks that call
 * it. Returns 0 when the test passed. */
static inline int cluster_run_apart(const struct CMUnitTest *test)
{
    int status = 0;
    fflush(NULL);
    pid_t child = fork();
    if (child == 0) {
        prctl(PR_SET_PDEATHSIG, SIGKILL);
        const struct CMUnitTest tests[] = {*test};
        exit(cmocka_run_group_tests(tests, NULL, NULL));
    }
    if (child < 0 || waitpid(child, &status, 0) != child || status)
        fprintf(stderr, "%s failed: 0x%x\n", test->name, (unsigned)status);
    return child < 0 || status;
}

/* Leaves out two of three cases of a long list on real GPUs, unless $DRAY_TEST_ALL is set.
 * Processes begin there one after the other, 0.2 s each. The same holds for short runs (seed.h).
 * The seed chooses the cases that are left out. */
static inline bool cluster_skips(size_t number)
{
    static size_t first;
    bool slow = test_is_short() || (cluster_gpus && gpu_is_real());
    if (!slow || getenv("DRAY_TEST_ALL"))
        return false;
    if (!first)
        first = 3 + test_seed() % 3;
    return (number + first) % 3 != 0;
}

/* Returns whether a test is in the part of the suite that $DRAY_TEST_PART names. "1/4" is the
 * second of four parts, which run side by side. */
static inline bool cluster_has(size_t index)
{
    const char *part = getenv("DRAY_TEST_PART");
    unsigned which = 0, parts = 1;
    if (part && (sscanf(part, "%u/%u", &which, &parts) != 2 || parts == 0))
        abort();
    return index % parts == which;
}

/* Runs each test in a process of its own. Returns the number of tests that failed. */
static inline int cluster_run(void)
{
    int failed = 0;
    for (size_t i = 0; i < suite_count; i++)
        failed += cluster_has(i) ? cluster_run_apart(&suite_tests[i]) : 0;
    return failed;
}

static inline int cluster_main(int argc, char **argv)
{
    for (int kind = DRAY_REGION_HOST; argc > 1 && kind <= DRAY_REGION_FILE; kind++)
        if (strcmp(dray_region_kind_name((dray_region_kind)kind), argv[1]) == 0)
            cluster_kind = (dray_region_kind)kind;
    if (cluster_kind == DRAY_REGION_CUDA || cluster_kind == DRAY_REGION_PINNED) {
        gpu_begin(gpu_is_real() ? 1 : 2);
        cluster_gpus = gpu_is_real() ? gpu_real_count() : 2;
    }
    return cluster_run();
}

#define CLUSTER_SUITE                                                                              \
    int main(int argc, char **argv)                                                                \
    {                                                                                              \
        return cluster_main(argc, argv);                                                           \
    }

/* ---- values ---------------------------------------------------------------------------------- */

/* Inlines a function of the oracle into its caller, with the caller's sanitizers. */
#define ORACLE __attribute__((always_inline))

ORACLE static inline uint64_t mix(uint64_t x)
{
    x ^= x >> 33;
    x *= 0xff51afd7ed558ccdULL;
    x ^= x >> 33;
    x *= 0xc4ceb9fe1a85ec53ULL;
    return x ^ (x >> 33);
}

static inline uint64_t name_hash(const char *name, bool tied)
{
    if (tied && strcmp(name, "lm_head.weight") == 0)
        name = "model.embed_tokens.weight";
    uint64_t hash = 14695981039346656037ULL;
    for (; *name; name++)
        hash = (hash ^ (uint8_t)*name) * 1099511628211ULL;
    return hash;
}

/* Returns the bits of a finite f32 of moderate size. */
ORACLE static inline uint32_t value_f32(uint64_t hash, uint64_t index, uint64_t seed)
{
    uint64_t x = mix(hash ^ mix(index + 1) ^ mix(seed * 77));
    return (uint32_t)(x & 0x807fffff) | (uint32_t)(100 + (x >> 40) % 50) << 23;
}

ORACLE static inline uint16_t round_to_bf16(uint32_t bits)
{
    return (uint16_t)((bits + 0x7fff + ((bits >> 16) & 1)) >> 16);
}

/* Returns the bits of the element that a source of dtype `from` holds, converted to dtype `to` (f32
 * or bf16). */
ORACLE static inline uint32_t value_bits(uint64_t hash, uint64_t index, uint64_t seed, int from,
                                         int to)
{
    uint32_t bits = value_f32(hash, index, seed);
    if (from == DRAY_BF16)
        bits &= 0xffff0000u;
    return to == DRAY_BF16 ? round_to_bf16(bits) : bits;
}

/* Returns the seed of an element's value, for tests in which only some elements change. NULL means
 * the given seed. */
static uint64_t (*element_seed)(uint64_t hash, uint64_t index, uint64_t seed);

/* Adjacent elements in a tensor's last dimension: their addresses, and their right values. */
typedef struct value_row {
    const char *tensor;
    uint8_t *at;
    int64_t stride;
    size_t size; /* of an element */
    uint64_t count;
    const uint8_t *right; /* without gaps, whatever the stride is */
} value_row;

/* The thread sanitizer need not check each value as it is made. It checks rows where they are
 * written. */
__attribute__((no_sanitize("thread"))) static inline void make_row(uint8_t *out, const value_row *r,
                                                                   uint64_t hash, uint64_t index,
                                                                   uint64_t seed, int from, int to)
{
    for (uint64_t i = 0; i < r->count; i++) {
        uint64_t of = element_seed ? element_seed(hash, index + i, seed) : seed;
        uint32_t bits = value_bits(hash, index + i, of, from, to);
        if (r->size == 2)
            ((uint16_t *)(void *)out)[i] = (uint16_t)bits;
        else
            ((uint32_t *)(void *)out)[i] = bits;
    }
}

typedef void (*row_fn)(void *user, const value_row *r);

static inline void each_row_of(const dray_block *block, const dray_tensor_info *t, uint8_t *base,
                               bool tied, uint64_t seed, int from, row_fn fn, void *user)
{
    uint64_t hash = name_hash(t->name, tied);
    uint32_t last = t->ndim ? t->ndim - 1 : 0; /* a tensor without dimensions is a row of one */
    int64_t at[DRAY_MAX_DIMS] = {0};
    value_row r = {.tensor = t->name, .size = dray_dtype_size((dray_dtype)t->dtype)};
    r.stride = t->ndim ? block->stride[last] : (int64_t)r.size;
    r.count = t->ndim ? (uint64_t)block->extent[last] : 1;
    CHECK(r.size == 2 || r.size == 4);
    uint8_t *right = malloc(r.count * r.size);
    CHECK(right);
    r.right = right;
    for (bool more = true; more;) {
        uint64_t index = 0, offset = block->offset;
        for (uint32_t d = 0; d < t->ndim; d++) {
            index = index * (uint64_t)t->shape[d] + (uint64_t)(block->start[d] + at[d]);
            offset += (uint64_t)at[d] * (uint64_t)block->stride[d];
        }
        r.at = base + offset;
        make_row(right, &r, hash, index, seed, from ? from : t->dtype, t->dtype);
        fn(user, &r);
        more = false;
        for (uint32_t d = last; d-- > 0 && !more;) {
            if (++at[d] < block->extent[d])
                more = true;
            else
                at[d] = 0;
        }
    }
    free(right);
}

/* Calls `fn` for each row. `bases` has the bytes of each region, at addresses of the host. */
static inline void each_row(const dray_layout *layout, uint8_t *const *bases, bool tied,
                            uint64_t seed, int from, row_fn fn, void *user)
{
    for (uint32_t b = 0; b < dray_layout_block_count(layout); b++) {
        const dray_block *block = dray_layout_block(layout, b);
        each_row_of(block, dray_layout_tensor(layout, block->tensor), bases[block->region], tied,
                    seed, from, fn, user);
    }
}

static inline void put_row(void *user, const value_row *r)
{
    (void)user;
    if (r->stride == (int64_t)r->size) {
        memcpy(r->at, r->right, r->count * r->size);
        return;
    }
    for (uint64_t i = 0; i < r->count; i++)
        memcpy(r->at + (int64_t)i * r->stride, r->right + i * r->size, r->size);
}

enum { CLUSTER_REGIONS = 16 };

/* Fills the regions. `from` is the dtype that the values had before they were converted to the
 * layout's; 0 means the layout's own. */
static inline void fill_from(const dray_layout *layout, dray_region *const *regions, bool tied,
                             uint64_t seed, int from)
{
    uint8_t *bases[CLUSTER_REGIONS] = {0};
    uint32_t count = dray_layout_region_count(layout);
    CHECK(count <= CLUSTER_REGIONS);
    for (uint32_t i = 0; i < count; i++)
        bases[i] = memory_open(regions[i]);
    each_row(layout, bases, tied, seed, from, put_row, NULL);
    for (uint32_t i = 0; i < count; i++)
        memory_close(regions[i], bases[i], true);
}

static inline void fill(const dray_layout *layout, dray_region *const *regions, bool tied,
                        uint64_t seed)
{
    fill_from(layout, regions, tied, seed, 0);
}

static inline void poison(const dray_layout *layout, dray_region *const *regions)
{
    for (uint32_t i = 0; i < dray_layout_region_count(layout); i++) {
        uint8_t *bytes = memory_open(regions[i]);
        memset(bytes, 0xA5, dray_region_bytes(regions[i]));
        memory_close(regions[i], bytes, true);
    }
}

typedef struct compare {
    uint64_t wrong;
    const char *first;
    uint8_t *expected; /* a copy of region 0 as it must be */
    uint8_t *base;
} compare;

static inline void check_row(void *user, const value_row *r)
{
    compare *c = user;
    bool dense = r->stride == (int64_t)r->size;
    if (!dense || memcmp(r->at, r->right, r->count * r->size) != 0)
        for (uint64_t i = 0; i < r->count; i++)
            if (memcmp(r->at + (int64_t)i * r->stride, r->right + i * r->size, r->size) != 0 &&
                c->wrong++ == 0)
                c->first = r->tensor;
    value_row expected = *r;
    expected.at = c->expected + (r->at - c->base);
    put_row(NULL, &expected);
}

/* Counts the wrong elements of a layout with one region. Bytes outside all blocks (padding) must
 * still be poison. */
static inline uint64_t wrong_elements(const dray_layout *layout, dray_region *const *regions,
                                      bool tied, uint64_t seed, int from)
{
    size_t size = dray_region_bytes(regions[0]);
    compare c = {.base = memory_open(regions[0]), .expected = malloc(size)};
    memset(c.expected, 0xA5, size);
    each_row(layout, &c.base, tied, seed, from, check_row, &c);
    if (c.wrong)
        fprintf(stderr, "%" PRIu64 " elements are wrong, first in %s\n", c.wrong, c.first);
    if (!c.wrong && memcmp(c.expected, c.base, size) != 0) {
        fprintf(stderr, "bytes outside all blocks were written\n");
        c.wrong = 1;
    }
    memory_close(regions[0], c.base, false);
    free(c.expected);
    return c.wrong;
}

/* ---- processes ------------------------------------------------------------------------------- */

/* Memory that all processes of a test share, with which parent and children signal each other. */
typedef struct board {
    volatile int flag[16];
    volatile int64_t number[16];
} board;

static inline board *board_new(void)
{
    void *at = mmap(NULL, sizeof(board), PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    CHECK(at != MAP_FAILED);
    return at;
}

static inline void raise_flag(board *b, int i)
{
    __atomic_store_n(&b->flag[i], 1, __ATOMIC_SEQ_CST);
}

static inline void await_flag(board *b, int i)
{
    int64_t deadline = dray__deadline(60 * DRAY__SECOND);
    while (!__atomic_load_n(&b->flag[i], __ATOMIC_SEQ_CST)) {
        CHECK(dray__now() < deadline);
        usleep(500);
    }
}

/* Runs body(user) in a child. Its exit status is 0 when the body returns. */
static inline pid_t spawn(void (*body)(void *user), void *user)
{
    fflush(NULL);
    pid_t pid = fork();
    CHECK(pid >= 0);
    if (pid == 0) {
        prctl(PR_SET_PDEATHSIG, SIGKILL);
        body(user);
        fflush(NULL);
        exit(0);
    }
    return pid;
}

static inline int end_of(pid_t pid)
{
    int status;
    CHECK(waitpid(pid, &status, 0) == pid);
    return status;
}

static inline void must_end_well(pid_t pid)
{
    int status = end_of(pid);
    if (!WIFEXITED(status) || WEXITSTATUS(status) != 0) {
        fprintf(stderr, "process %d ended with status 0x%x\n", (int)pid, (unsigned)status);
        abort();
    }
}

static inline void all_end_well(const pid_t *pids, uint32_t count)
{
    for (uint32_t i = 0; i < count; i++)
        must_end_well(pids[i]);
}

static inline void must_be_killed(pid_t pid)
{
    int status = end_of(pid);
    CHECK(WIFSIGNALED(status) && WTERMSIG(status) == SIGKILL);
}

static inline void kill_at(void *step, const char *at)
{
    if (strcmp(step, at) == 0)
        kill(getpid(), SIGKILL);
}

/* Has this process killed when it reaches the step. */
static inline void die_at_step(const char *step)
{
    dray__hook_set(kill_at, (void *)step);
}

/* A role of a scene: `ranks` processes that run the body. */
typedef struct scene_role {
    void (*body)(void *user);
    uint32_t ranks;
} scene_role;

/* Runs all ranks of all roles, each as a process, until all have ended well. *rank is the process's
 * rank within its role; `rank` may be NULL. */
static inline void run_roles(void *user, uint32_t *rank, const scene_role *roles, size_t count)
{
    pid_t pids[16];
    uint32_t started = 0;
    for (size_t r = 0; r < count; r++)
        for (uint32_t i = 0; i < roles[r].ranks; i++) {
            CHECK(started < sizeof pids / sizeof *pids);
            if (rank)
                *rank = i;
            pids[started++] = spawn(roles[r].body, user);
        }
    all_end_well(pids, started);
}
#define RUN_ROLES(user, rank, ...)                                                                 \
    run_roles(user, rank, (const scene_role[]){__VA_ARGS__},                                       \
              sizeof((const scene_role[]){__VA_ARGS__}) / sizeof(scene_role))

/* ---- ranks ----------------------------------------------------------------------------------- */

typedef struct trainer {
    dray_context *context;
    dray_layout *layout;
    dray_region *region[1];
    dray_publisher *publisher;
    bool tied;
} trainer;

typedef struct engine {
    dray_context *context;
    dray_layout *layout;
    dray_region *region[1];
    dray_subscriber *subscriber;
    bool tied;
    int from;
} engine;

static inline dray_model_config small_config(bool tied, uint64_t variant)
{
    dray_model_config c = {.vocab_size = 97 + (int64_t)(variant % 5) * 16,
                           .hidden_size = 48,
                           .intermediate_size = 72 + (int64_t)(variant % 3) * 4,
                           .layers = 2,
                           .heads = 4,
                           .kv_heads = 2,
                           .head_dim = 12,
                           .max_positions = 64,
                           .rms_norm_eps = 1e-6,
                           .rope_theta = 10000,
                           .qkv_bias = 1,
                           .tied = tied,
                           .dtype = DRAY_F32};
    snprintf(c.family, sizeof c.family, "qwen2");
    return c;
}

/* Returns a model without biases, for weights that are quantised in cells of up to 128. */
static inline dray_model_config cell_config(int64_t vocab, int64_t hidden, int64_t intermediate,
                                            int64_t layers, int64_t heads, int64_t kv_heads)
{
    dray_model_config c = {.vocab_size = vocab,
                           .hidden_size = hidden,
                           .intermediate_size = intermediate,
                           .layers = layers,
                           .heads = heads,
                           .kv_heads = kv_heads,
                           .head_dim = 64,
                           .max_positions = 64,
                           .rms_norm_eps = 1e-6,
                           .rope_theta = 10000,
                           .dtype = DRAY_BF16};
    snprintf(c.family, sizeof c.family, "qwen2");
    return c;
}

/* Returns a model like small_config, but with wide matrices and a tensor of 4 MiB. */
static inline dray_model_config wide_config(void)
{
    dray_model_config c = small_config(false, 3);
    c.hidden_size = 256;
    c.head_dim = 64;
    c.intermediate_size = 512;
    c.vocab_size = 4096;
    return c;
}

static inline void trainer_open(trainer *t, const char *address, const dray_model_config *config,
                                dray_dtype dtype, uint32_t rank, uint32_t world, uint64_t seed,
                                dray_region_kind kind)
{
    char name[32];
    snprintf(name, sizeof name, "trainer-%u", rank);
    memset(t, 0, sizeof *t);
    t->tied = config->tied;
    cluster_choose_gpu(rank);
    t->context = fixture_open_at(address, name, "trainer", rank);
    MUST(dray_layout_fsdp(config, dtype, rank, world, kind, &t->layout, error));
    MUST(dray_regions_for_layout(t->layout, 1, t->region, error));
    fill(t->layout, t->region, t->tied, seed);
    dray_publisher_options options = DRAY_PUBLISHER_OPTIONS_INIT;
    options.regions = t->region;
    options.rank = rank;
    options.world = world;
    MUST(dray_publisher_open(t->context, MODEL, t->layout, &options, &t->publisher, error));
}

/* Waits until all ranks have summed the version. Changes of its weights after that are found. */
static inline void await_sums(dray_context *context, uint64_t version)
{
    uint64_t found = version + 1;
    while (found != version) {
        dray_checksums *sums;
        int rc = dray_checksums_fetch(context, MODEL, &found, &sums, NULL);
        CHECK(rc == DRAY_OK || rc == DRAY_ENOENT); /* no rank, or not all have published it */
        if (rc == DRAY_OK)
            dray_checksums_free(sums);
    }
}

static inline void trainer_close(trainer *t)
{
    dray_publisher_close(t->publisher);
    dray_region_free(t->region[0]);
    dray_layout_free(t->layout);
    dray_close(t->context);
}

/* `staging` is that of dray_subscriber_options. */
static inline void engine_subscribe(engine *e, const char *group, uint32_t rank, uint32_t world,
                                    int32_t staging)
{
    dray_subscriber_options options = DRAY_SUBSCRIBER_OPTIONS_INIT;
    options.regions = e->region;
    options.group = group;
    options.rank = rank;
    options.world = world;
    options.staging = staging;
    MUST(dray_subscriber_open(e->context, MODEL, e->layout, &options, &e->subscriber, error));
}

static inline void engine_open(engine *e, const char *address, const dray_model_config *config,
                               dray_dtype from, dray_dtype dtype, const char *group, uint32_t rank,
                               uint32_t tp)
{
    char name[64];
    snprintf(name, sizeof name, "%s-%u", group, rank);
    memset(e, 0, sizeof *e);
    e->tied = config->tied;
    e->from = (int)from;
    cluster_choose_gpu(rank + 1);
    e->context = fixture_open_at(address, name, "engine", rank);
    dray_engine_spec spec = DRAY_ENGINE_SPEC_INIT;
    spec.tp = tp;
    spec.tp_rank = rank;
    spec.dtype = (int32_t)dtype;
    spec.kind = cluster_kind;
    MUST(dray_layout_engine(config, &spec, &e->layout, error));
    MUST(dray_regions_for_layout(e->layout, 1, e->region, error));
    poison(e->layout, e->region);
    engine_subscribe(e, group, rank, tp, 0);
}

static inline uint64_t engine_wrong(const engine *e, uint64_t seed)
{
    return wrong_elements(e->layout, e->region, e->tied, seed, e->from);
}

static inline void engine_close(engine *e)
{
    dray_subscriber_close(e->subscriber);
    dray_region_free(e->region[0]);
    dray_layout_free(e->layout);
    dray_close(e->context);
}

/* A trainer and an engine of one rank each, in this process. */
typedef struct scene_pair {
    trainer t;
    engine e;
} scene_pair;

static inline void pair_open(scene_pair *p, const dray_model_config *config, dray_dtype from,
                             dray_dtype to, uint64_t seed, dray_region_kind kind)
{
    trainer_open(&p->t, f.unix_address, config, from, 0, 1, seed, kind);
    engine_open(&p->e, f.unix_address, config, from, to, "engine", 0, 1);
}

/* Opens the same pair on two hosts. */
static inline void pair_open_apart(scene_pair *p, const dray_model_config *config, dray_dtype from,
                                   dray_dtype to)
{
    fixture_host = "trainers";
    trainer_open(&p->t, f.unix_address, config, from, 0, 1, 7, cluster_kind_or(DRAY_REGION_HOST));
    fixture_host = "engines";
    engine_open(&p->e, f.unix_address, config, from, to, "engine", 0, 1);
    fixture_host = NULL;
}

static inline void pair_close(scene_pair *p)
{
    engine_close(&p->e);
    trainer_close(&p->t);
}
