/* Tests that memory may run out once, at the N-th allocation of the library in a story. The call
 * that needed it fails with a code that says so, or succeeds without it. Nothing crashes, hangs or
 * leaks (a leak checker runs at the end), and the same call succeeds when it is repeated.
 *
 * A story with a coordinator, a keeper and clients in threads of this process is instead repeated
 * as a whole, because the failure may cost a session. Every run tries other N, and with a larger
 * DRAY_TEST_SCALE more of them, up to all. DRAY_TEST_STORY=NAME runs one story alone, and
 * DRAY_TEST_AT=N one N. */
#include "house/no_memory.h"

#include "base/clock.h"
#include "base/error.h"
#include "control/token.h"
#include "fuzz/scene.h"
#include "seed.h"

#include <dray/dray.h>
#include <dray/loader.h>
#include <dray/model.h>
#include <dray/trace.h>
#include <dray/weights.h>
#include <inttypes.h>
#include <signal.h>
#include <string.h>
#include <sys/stat.h>
#include <time.h>

static const char *story_name;
static uint64_t at; /* which allocation fails */
static uint64_t said_nothing;

static void where(void)
{
    fprintf(stderr, "story %s, allocation %" PRIu64 ", at 0x%" PRIx64 "\n", story_name, at,
            no_memory_failed());
}

/* ---- one call that is made again ------------------------------------------------------------- */

static bool says_memory(int rc, const dray_error *error)
{
    return rc == DRAY_ENOMEM || strstr(error->message, "memory") ||
           strstr(error->message, "Cannot allocate");
}

static void refused(int rc, const dray_error *error, const char *call)
{
    if (no_memory_failed() && says_memory(rc, error))
        return;
    where();
    fprintf(stderr, "%s: %s: %s\n", call, dray_error_name(rc), error->message);
    abort();
}

static void must_succeed(int rc, const dray_error *error, const char *call)
{
    if (!rc)
        return;
    where();
    fprintf(stderr, "again: %s: %s: %s\n", call, dray_error_name(rc), error->message);
    abort();
}

#define TRY(call)                                                                                  \
    do {                                                                                           \
        dray_error try_error = {0};                                                                \
        dray_error *error = &try_error;                                                            \
        int try_rc = (call);                                                                       \
        if (try_rc) {                                                                              \
            refused(try_rc, error, #call);                                                         \
            must_succeed((call), error, #call);                                                    \
        }                                                                                          \
    } while (0)

/* ---- stories without a coordinator ----------------------------------------------------------- */

static dray_model_config config_of(bool tied)
{
    dray_model_config c = {.vocab_size = 96,
                           .hidden_size = 32,
                           .intermediate_size = 64,
                           .layers = 1,
                           .heads = 4,
                           .kv_heads = 2,
                           .head_dim = 8,
                           .max_positions = 64,
                           .rms_norm_eps = 1e-6,
                           .rope_theta = 10000,
                           .tied = tied,
                           .dtype = DRAY_F32};
    snprintf(c.family, sizeof c.family, "qwen2");
    return c;
}

static void layouts(void)
{
    static const char *const specs[] = {"full",          "fsdp:2,dtype=bf16", "fsdp1:2",
                                        "megatron:tp=2", "engine:tp=2",       "fsdp1:2,orig=1"};
    const dray_model_config config = config_of(true);
    for (size_t i = 0; i < sizeof specs / sizeof *specs; i++) {
        dray_layout **made = NULL, *back = NULL;
        uint32_t count = 0;
        void *packed = NULL;
        size_t size = 0;
        TRY(dray_layouts_from_spec(&config, specs[i], &made, &count, error));
        TRY(dray_layout_pack(made[0], &packed, &size, error));
        TRY(dray_layout_unpack(packed, size, &back, error));
        dray_layout_free(back);
        free(packed);
        for (uint32_t k = 0; k < count; k++)
            dray_layout_free(made[k]);
        free(made);
    }
}

/* An object that is added to: what failed was not added. */
static void by_hand(void)
{
    dray_layout *layout = NULL;
    const dray_region_info info = {.kind = DRAY_REGION_HOST, .bytes = 1 << 16, .name = "w"};
    TRY(dray_layout_new(&layout, error));
    for (uint32_t i = 0; i < 12; i++) {
        char name[32], alias[32];
        uint32_t region, tensor;
        const int64_t shape[2] = {4, 4};
        snprintf(name, sizeof name, "tensor.%u", i);
        snprintf(alias, sizeof alias, "alias.%u", i);
        TRY(dray_layout_add_region(layout, &info, &region, error));
        TRY(dray_layout_add_tensor(layout, name, DRAY_F32, 2, shape, &tensor, error));
        TRY(dray_layout_add_dense(layout, tensor, region, (int64_t[]){0, 0}, shape, 0, error));
        TRY(dray_layout_add_alias(layout, alias, tensor, NULL, error));
    }
    MUST(dray_layout_region_count(layout) == 12 && dray_layout_tensor_count(layout) == 24 &&
         dray_layout_block_count(layout) == 12);
    dray_layout_free(layout);
}

static void plans(void)
{
    const dray_model_config config = config_of(false);
    dray_layout **from = NULL, **to = NULL;
    uint32_t sources = 0, destinations = 0;
    dray_plan *plan = NULL;
    TRY(dray_layouts_from_spec(&config, "fsdp:2", &from, &sources, error));
    TRY(dray_layouts_from_spec(&config, "engine:tp=2,dtype=bf16", &to, &destinations, error));
    const dray_plan_member trainers[2] = {{.layout = from[0], .member = 1, .process = 1},
                                          {.layout = from[1], .member = 2, .process = 2}};
    for (uint32_t i = 0; i < destinations; i++) {
        const dray_plan_member engine = {.layout = to[i], .member = 3 + i, .process = 3 + i};
        TRY(dray_plan_new(trainers, sources, &engine, NULL, &plan, error));
        dray_plan_free(plan);
        plan = NULL;
    }
    for (uint32_t i = 0; i < 2; i++) {
        dray_layout_free(to[i]);
        dray_layout_free(from[i]);
    }
    free(from);
    free(to);
}

static void regions(void)
{
    uint8_t packed[1024];
    for (int kind = DRAY_REGION_HOST; kind <= DRAY_REGION_SHARED; kind++) {
        dray_region *region = NULL, *other = NULL;
        dray_handle handle = DRAY_HANDLE_INIT;
        TRY(dray_region_alloc((dray_region_kind)kind, 8192, "region", &region, error));
        if (kind == DRAY_REGION_SHARED) {
            TRY(dray_handle_describe(region, &handle, error));
            TRY(dray_handle_pack(&handle, packed, sizeof packed, error));
            TRY(dray_region_import(&handle, dray_region_fd(region), 0, &other, error));
        }
        dray_region_free(other);
        dray_region_free(region);
    }
}

static void checkpoints(void)
{
    const dray_model_config config = config_of(false);
    dray_layout *layout = NULL;
    dray_region *region = NULL;
    char folder[160];
    snprintf(folder, sizeof folder, "%s", fuzz_path("checkpoints"));
    TRY(dray_layout_full(&config, DRAY_F32, DRAY_REGION_HOST, &layout, error));
    TRY(dray_regions_for_layout(layout, 1, &region, error));
    for (uint32_t version = 1; version <= 3; version++) {
        dray_checkpoint_options o = DRAY_CHECKPOINT_OPTIONS_INIT;
        dray_checksums *sums = NULL, *read = NULL;
        uint64_t newest = 0;
        char *path = NULL;
        o.version = version;
        o.keep = 2;
        o.deltas = 2;
        o.config_json = "{}";
        memset(dray_region_base(region), 0x30 + (int)version, 64);
        TRY(dray_checkpoint_save(NULL, folder, layout, &region, &o, error));
        TRY(dray_checkpoint_latest(folder, &newest, &path, error));
        MUST(newest == version);
        TRY(dray_checksums_compute(layout, &region, &sums, error));
        memset(dray_region_base(region), 0, dray_region_bytes(region));
        TRY(dray_checkpoint_read(path, layout, &region, error));
        MUST(*(char *)dray_region_base(region) == 0x30 + (char)version);
        TRY(dray_checksums_of_checkpoint(path, NULL, &read, error));
        dray_checksums_free(read);
        dray_checksums_free(sums);
        dray_free(path);
    }
    dray_region_free(region);
    dray_layout_free(layout);
    fuzz_empty_folder();
}

static void safetensors(void)
{
    const dray_model_config config = config_of(false);
    dray_layout *layout = NULL, *file = NULL;
    dray_region *region = NULL;
    char folder[160], *base = NULL;
    snprintf(folder, sizeof folder, "%s", fuzz_path("model"));
    TRY(dray_layout_full(&config, DRAY_BF16, DRAY_REGION_HOST, &layout, error));
    TRY(dray_regions_for_layout(layout, 1, &region, error));
    TRY(dray_checkpoint_write(folder, layout, &region, "{}", error));
    TRY(dray_layout_safetensors(folder, &file, error));
    dray_layout_free(file);
    file = NULL;
    TRY(dray_checkpoint_layout(folder, &file, &base, error));
    dray_layout_free(file);
    dray_free(base);
    dray_region_free(region);
    dray_layout_free(layout);
    fuzz_empty_folder();
}

static void tokens(void)
{
    dray__token master, engine, again;
    char text[DRAY__TOKEN_TEXT];
    TRY(dray__token_draw(&master, error));
    TRY(dray__token_derive(&master, "engine", &engine, error));
    TRY(dray__token_parse(dray__token_print(&engine, text), "text", &again, error));
}

static void traces(void)
{
    char folder[160], path[192], out[192];
    snprintf(folder, sizeof folder, "%s", fuzz_folder());
    snprintf(path, sizeof path, "%s/trace", folder);
    snprintf(out, sizeof out, "%s/merged", folder);
    TRY(dray_trace_merge(folder, out, error));
    fuzz_empty_folder();
}

/* ---- stories with one ------------------------------------------------------------------------ */

static scene *servers;
static uint32_t told; /* names are new each time */

static void hand_on(void *user, scene_link *link, bool answer, const dray__frame *frame,
                    const int *fds)
{
    (void)user;
    no_memory_spare_thread();
    scene_send(link, answer, frame, fds);
}

static bool queue(bool strict)
{
    char name[32];
    snprintf(name, sizeof name, "queue-%u", ++told);
    return scene_queue(scene_address(servers), name, DRAY_DURABILITY_NONE, 0, strict);
}

static bool durable(bool strict)
{
    char name[32];
    snprintf(name, sizeof name, "durable-%u", ++told);
    return scene_queue(scene_address(servers), name, DRAY_DURABILITY_JOURNAL, 0, strict);
}

static bool weights(bool strict)
{
    return scene_weights(scene_address(servers), "model", strict);
}

static bool messages(bool strict)
{
    return scene_by_hand(scene_address(servers), "by hand", strict);
}

/* ---- telling them ---------------------------------------------------------------------------- */

/* New ones from time to time: a coordinator does not take any number of queues. */
static void have_servers(void)
{
    static uint32_t uses, journals;
    char folder[160], name[32];
    if (servers && ++uses % 100)
        return;
    if (servers)
        scene_stop(servers);
    snprintf(name, sizeof name, "journals-%u", ++journals);
    snprintf(folder, sizeof folder, "%s", fuzz_path(name));
    MUST(mkdir(folder, 0700) == 0);
    servers = scene_start(folder, hand_on, NULL);
}

typedef struct story {
    const char *name;
    void (*alone)(void);
    bool (*served)(bool strict);
} story;

static const story stories[] = {
    {.name = "layouts", .alone = layouts},
    {.name = "by_hand", .alone = by_hand},
    {.name = "plans", .alone = plans},
    {.name = "regions", .alone = regions},
    {.name = "checkpoints", .alone = checkpoints},
    {.name = "safetensors", .alone = safetensors},
    {.name = "tokens", .alone = tokens},
    {.name = "traces", .alone = traces},
    {.name = "queue", .served = queue},
    {.name = "durable", .served = durable},
    {.name = "weights", .served = weights},
    {.name = "messages", .served = messages},
};

enum { SECONDS = 60, ALONE = 60, SERVED = 15 }; /* of each story */

static void on_alarm(int number)
{
    (void)number;
    where();
    fprintf(stderr, "took more than %d s\n", SECONDS);
    abort();
}

static void tell(const story *s, uint64_t number)
{
    at = number;
    story_name = s->name;
    if (s->served)
        have_servers();
    alarm(SECONDS);
    no_memory_at(at);
    if (s->alone) {
        s->alone();
    } else {
        bool good = s->served(false);
        bool failed = no_memory_failed();
        no_memory_at(0);
        said_nothing += good && failed;
        s->served(true);
    }
    alarm(0);
}

/* Some of its allocations, each as likely; with enough `scale` all. How many. */
static uint64_t tell_often(const story *s, uint64_t scale, uint64_t *seed)
{
    tell(s, 0); /* what is made once, in a process or in its servers */
    no_memory_at(0);
    if (s->alone)
        s->alone();
    else
        s->served(true);
    uint64_t all = no_memory_count(), tried = 0, samples = s->alone ? ALONE : SERVED;
    for (uint64_t number = 1; number <= all; number++) {
        *seed = *seed * 6364136223846793005ULL + 1442695040888963407ULL;
        if ((*seed >> 33) % all < samples * scale) {
            tell(s, number);
            tried++;
        }
    }
    printf("%s: %" PRIu64 " of %" PRIu64 " allocations\n", s->name, tried, all);
    return tried;
}

int main(void)
{
    const char *only = getenv("DRAY_TEST_STORY"), *one = getenv("DRAY_TEST_AT"),
               *more = getenv("DRAY_TEST_SCALE");
    uint64_t seed = test_seed(), tried = 0;
    uint64_t scale = more ? strtoull(more, NULL, 10) : 1;
    signal(SIGALRM, on_alarm);
    scene_patience_ns = DRAY__SECOND / 2;
    setvbuf(stdout, NULL, _IOLBF, 0);
    for (size_t i = 0; i < sizeof stories / sizeof *stories; i++) {
        const story *s = &stories[i];
        if (only && strcmp(only, s->name) != 0)
            continue;
        if (one)
            tell(s, strtoull(one, NULL, 10));
        else
            tried += tell_often(s, scale, &seed);
    }
    if (servers)
        scene_stop(servers);
    printf("%" PRIu64 " allocations failed, %" PRIu64 " of them unseen by the client\n", tried,
           said_nothing);
    return 0;
}
