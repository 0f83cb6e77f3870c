/* Tests arenas: allocations, release and resume, other processes that have them mapped, and
 * PyTorch's entry points. They use the fake driver or, with DRAY_TEST_CUDA=real, a GPU. */
#include "memory/gpu_memory.h"
#include "seed.h"

#include <pthread.h>

enum { CHUNK = 8 * MIB };

static dray_arena *open_arena(const char *tag)
{
    dray_arena *a;
    dray_arena_options options = DRAY_ARENA_OPTIONS_INIT;
    options.tag = tag;
    options.chunk_bytes = CHUNK;
    OK(dray_arena_open(&options, &a, &error));
    return a;
}

static dray_arena_status status_of(dray_arena *a)
{
    dray_arena_status s = DRAY_ARENA_STATUS_INIT;
    OK(dray_arena_get_status(a, &s, &error));
    return s;
}

/* ---- allocations ----------------------------------------------------------------------------- */

enum { SLOTS = 40, STEPS = 400 };

/* Against a list of what is out: nothing overlaps, everything lies in the arena's addresses. */
static void allocate_at_random(void)
{
    start(NULL);
    uint64_t before = free_bytes(), at[SLOTS] = {0}, bytes[SLOTS] = {0};
    dray_arena *a = open_arena("weights");
    srandom((unsigned)test_seed());
    for (int step = 0; step < STEPS; step++) {
        int s = (int)(random() % SLOTS);
        if (at[s]) {
            OK(dray_arena_free(a, at[s], &error));
            GIVES(DRAY_ENOENT, dray_arena_free(a, at[s], &error));
            at[s] = 0;
            continue;
        }
        bytes[s] = (uint64_t)random() % (step % 7 == 0 ? 3 * CHUNK : MIB);
        OK(dray_arena_alloc(a, bytes[s], &at[s], &error));
        CHECK(at[s] % 512 == 0);
        dray_arena_status st = status_of(a);
        CHECK(at[s] >= st.base && at[s] + bytes[s] <= st.base + st.address_bytes);
        CHECK(st.used_bytes <= st.resident_bytes);
        for (int o = 0; o < SLOTS; o++)
            CHECK(o == s || !at[o] || at[o] + bytes[o] <= at[s] || at[s] + bytes[s] <= at[o]);
    }
    uint32_t out = 0;
    for (int s = 0; s < SLOTS; s++)
        out += at[s] != 0;
    CHECK(status_of(a).allocations == out);
    GIVES(DRAY_ENOENT, dray_arena_free(a, status_of(a).base + 1, &error));
    for (int s = 0; s < SLOTS; s++)
        if (at[s])
            OK(dray_arena_free(a, at[s], &error));
    CHECK(status_of(a).resident_bytes == 0 && status_of(a).used_bytes == 0);
    GIVES(DRAY_EFULL, dray_arena_alloc(a, UINT64_MAX, &at[0], &error));
    CHECK(gpu_is_real() || free_bytes() == before);
    dray_arena_close(a);
    dray_arena_close(NULL);
}

TEST(allocations_do_not_touch)
{
    alone(allocate_at_random);
}

static void refuse_options(void)
{
    start(NULL);
    dray_arena *a = NULL;
    char tag[80];
    memset(tag, 'x', sizeof tag);
    tag[64] = 0;
    dray_arena_options o = DRAY_ARENA_OPTIONS_INIT;
    o.tag = tag;
    GIVES(DRAY_EINVALID, dray_arena_open(&o, &a, &error));
    o.tag = "";
    GIVES(DRAY_EINVALID, dray_arena_open(&o, &a, &error));
    o.tag = NULL;
    o.address_bytes = UINT64_MAX;
    GIVES(DRAY_EINVALID, dray_arena_open(&o, &a, &error));
    o.address_bytes = 0;
    memset(o.uuid, 0x77, sizeof o.uuid);
    GIVES(DRAY_ENOENT, dray_arena_open(&o, &a, &error));
    CHECK(!a);
    GIVES(DRAY_ENOENT, dray_arena_release("none", NULL, NULL, &error));
    GIVES(DRAY_ENOENT, dray_arena_resume("none", NULL, NULL, &error));
    GIVES(DRAY_ENOENT, dray_arena_prepare(NULL, NULL, &error));
    GIVES(DRAY_EINVALID, dray_torch_use("", &error));
}

TEST(bad_options_are_refused)
{
    alone(refuse_options);
}

/* ---- release and resume ---------------------------------------------------------------------- */

typedef struct held {
    uint64_t at, bytes;
    uint32_t seed;
} held;

static void fill(const held *h)
{
    draw(h->seed);
    for (uint64_t done = 0; done < h->bytes; done += BYTES)
        put(h->at + done, pattern, h->bytes - done < BYTES ? h->bytes - done : BYTES);
}

static bool whole(const held *h)
{
    draw(h->seed);
    for (uint64_t done = 0; done < h->bytes; done += BYTES)
        if (!has(h->at + done, pattern, h->bytes - done < BYTES ? h->bytes - done : BYTES))
            return false;
    return true;
}

static void release_and_resume(void)
{
    start(NULL);
    uint64_t empty = free_bytes();
    dray_arena *weights = open_arena("weights"), *cache = open_arena("kv_cache");
    /* Several chunks, neighbours and holes, one larger than a chunk. */
    held out[6] = {{0, 3 * MIB, 1}, {0, MIB + 512, 2},     {0, 700, 3},
                   {0, 3 * MIB, 4}, {0, 2 * CHUNK + 5, 5}, {0, 2 * MIB, 6}};
    for (int i = 0; i < 6; i++) {
        OK(dray_arena_alloc(weights, out[i].bytes, &out[i].at, &error));
        fill(&out[i]);
    }
    OK(dray_arena_free(weights, out[1].at, &error)); /* a hole */
    held kept = {0, 4 * MIB, 9};
    OK(dray_arena_alloc(cache, kept.bytes, &kept.at, &error));
    fill(&kept);
    uint64_t resident = status_of(weights).resident_bytes, at;
    dray_arena_report report = DRAY_ARENA_REPORT_INIT;
    OK(dray_arena_prepare("weights", &report, &error));
    CHECK(report.arenas == 1 && status_of(weights).pinned_bytes >= status_of(weights).used_bytes);
    for (int turn = 0; turn < 3; turn++) {
        uint64_t before = free_bytes();
        OK(dray_arena_release("weights", NULL, &report, &error));
        CHECK(report.arenas == 1 && report.bytes == resident);
        CHECK(report.copied_bytes == status_of(weights).used_bytes);
        CHECK(status_of(weights).released && status_of(weights).resident_bytes == 0);
        CHECK(gpu_is_real() || free_bytes() == before + resident); /* others may use a real one */
        CHECK(cu->cuMemcpyDtoH(found, out[0].at, 4) != 0);
        GIVES(DRAY_EBUSY, dray_arena_alloc(weights, 1, &at, &error));
        CHECK(whole(&kept)); /* the other tag is untouched */
        OK(dray_arena_release("weights", NULL, &report, &error));
        CHECK(report.arenas == 0);
        dray_arena_resume_options o = DRAY_ARENA_RESUME_OPTIONS_INIT;
        o.free_pinned = turn == 1;
        OK(dray_arena_resume("weights", &o, &report, &error));
        CHECK(report.arenas == 1 && report.bytes == resident);
        CHECK((status_of(weights).pinned_bytes == 0) == (turn == 1));
        for (int i = 0; i < 6; i++)
            CHECK(i == 1 || whole(&out[i]));
        out[0].seed += 10; /* the trainer's next step */
        fill(&out[0]);
    }
    dray_arena_release_options drop = DRAY_ARENA_RELEASE_OPTIONS_INIT;
    drop.drop = 1;
    OK(dray_arena_release(NULL, &drop, &report, &error));
    CHECK(report.arenas == 2 && report.copied_bytes == 0);
    OK(dray_arena_free(cache, kept.at, &error)); /* while it is released */
    OK(dray_arena_resume("weights", NULL, &report, &error));
    OK(dray_arena_resume("kv_cache", NULL, &report, &error));
    CHECK(report.chunks == 0 && status_of(cache).chunks == 0);
    fill(&out[4]);
    CHECK(whole(&out[4]));
    dray_arena_close(weights);
    dray_arena_close(cache);
    CHECK(gpu_is_real() || free_bytes() == empty);
}

TEST(released_memory_comes_back)
{
    alone(release_and_resume);
}

/* The driver fails in the middle: what was released comes back whole, and a resume is all or none.
 */
static void fail_in_the_middle(void)
{
    static const struct {
        const char *call;
        bool resume;
    } cases[] = {{"cuMemcpyDtoHAsync:2:999", false}, {"cuMemHostRegister:1:2", false},
                 {"cuEventQuery:2:999", false},      {"cuMemCreate:2:2", true},
                 {"cuMemMap:2:999", true},           {"cuMemcpyHtoDAsync:2:999", true},
                 {"cuEventQuery:1:999", true}};
    start(NULL);
    for (size_t c = 0; c < sizeof cases / sizeof *cases; c++) {
        dray_arena *a = open_arena("weights");
        held out[3] = {{0, 6 * MIB, 1}, {0, 7 * MIB, 2}, {0, 5 * MIB, 3}};
        for (int i = 0; i < 3; i++) {
            OK(dray_arena_alloc(a, out[i].bytes, &out[i].at, &error));
            fill(&out[i]);
        }
        if (cases[c].resume)
            OK(dray_arena_release("weights", NULL, NULL, &error));
        uint64_t before = free_bytes();
        if (!gpu_fail(cases[c].call))
            return;
        CHECK((cases[c].resume ? dray_arena_resume("weights", NULL, NULL, &error)
                               : dray_arena_release("weights", NULL, NULL, &error)) < 0);
        gpu_fail(NULL);
        CHECK(!cases[c].resume || free_bytes() == before);
        OK(dray_arena_resume("weights", NULL, NULL, &error));
        for (int i = 0; i < 3; i++)
            CHECK(whole(&out[i]));
        CHECK(!status_of(a).released);
        dray_arena_close(a);
    }
}

/* What a release that failed left resident goes with the next one, and all of it comes back. */
static void release_once_more(void)
{
    static const char *const calls[] = {"cuMemHostRegister:3:2", "cuMemcpyDtoHAsync:3:999"};
    start(NULL);
    for (size_t c = 0; c < 2 * sizeof calls / sizeof *calls; c++) {
        dray_arena_release_options how = DRAY_ARENA_RELEASE_OPTIONS_INIT;
        dray_arena_report report = DRAY_ARENA_REPORT_INIT;
        dray_arena *a = open_arena("weights");
        held out[4] = {{0, 5 * MIB, 1}, {0, 5 * MIB, 2}, {0, 4 * MIB, 3}, {0, MIB, 4}};
        for (int i = 0; i < 4; i++) {
            OK(dray_arena_alloc(a, out[i].bytes, &out[i].at, &error));
            fill(&out[i]);
        }
        if (!gpu_fail(calls[c / 2]))
            return;
        CHECK(dray_arena_release("weights", &how, NULL, &error) < 0);
        gpu_fail(NULL);
        uint64_t left = status_of(a).resident_bytes;
        CHECK(status_of(a).released && left > 0);
        how.drop = c % 2;
        OK(dray_arena_release("weights", &how, &report, &error));
        CHECK(report.arenas == 1 && report.bytes == left);
        CHECK(status_of(a).resident_bytes == 0);
        OK(dray_arena_release("weights", &how, &report, &error));
        CHECK(report.arenas == 0);
        OK(dray_arena_resume("weights", NULL, &report, &error));
        CHECK(!status_of(a).released && report.chunks == status_of(a).chunks);
        for (int i = 0; i < 4 && !how.drop; i++)
            CHECK(whole(&out[i]));
        dray_arena_close(a);
    }
}

TEST(what_is_left_is_released_later)
{
    alone(release_once_more);
}

/* Memory is freed that a release which was too late still copies. */
static void free_what_is_copied(void)
{
    start(NULL);
    dray_arena_release_options how = DRAY_ARENA_RELEASE_OPTIONS_INIT;
    dray_arena *a = open_arena("weights");
    how.timeout_ns = 1;
    for (int i = 0; i < 4; i++) {
        uint64_t at;
        OK(dray_arena_alloc(a, 128 * MIB, &at, &error));
        GIVES(DRAY_ETIMEDOUT, dray_arena_release("weights", &how, NULL, &error));
        OK(dray_arena_free(a, at, &error));
        CHECK(status_of(a).resident_bytes == 0 && !status_of(a).released);
    }
    dray_arena_close(a);
}

TEST(late_copies_end_before_memory_is_freed)
{
    alone(free_what_is_copied);
}

TEST(failures_lose_nothing)
{
    alone(fail_in_the_middle);
}

/* ---- with others ----------------------------------------------------------------------------- */

static void owner_of_arena(void)
{
    start(NULL);
    dray_arena *a = open_arena("weights");
    held first = {0, 2 * MIB, 1}, second = {0, 3 * MIB, 2};
    OK(dray_arena_alloc(a, first.bytes, &first.at, &error));
    OK(dray_arena_alloc(a, second.bytes, &second.at, &error));
    fill(&first);
    fill(&second);
    dray_region *r, *s;
    OK(dray_region_wrap_cuda(first.at, first.bytes, "r", &r, &error));
    OK(dray_region_wrap_cuda(second.at, second.bytes, "s", &s, &error));
    hand(r);
    hand(s);
    CHECK(dray_region_fd(r) >= 0 && dray_region_fd(r) == dray_region_fd(s)); /* one of a chunk */
    signed_();
    GIVES(DRAY_EBUSY, dray_arena_release("weights", NULL, NULL, &error));
    SAYS("2 regions");
    CHECK(whole(&first));
    dray_region_unexport(r);
    GIVES(DRAY_EBUSY, dray_arena_release("weights", NULL, NULL, &error));
    dray_region_unexport(s);
    uint64_t before = free_bytes();
    OK(dray_arena_release("weights", NULL, NULL, &error));
    CHECK(gpu_is_real() || free_bytes() >= before + CHUNK); /* nobody else holds it */
    GIVES(DRAY_ESTALE, dray_region_check(r, &error));
    dray_handle h = DRAY_HANDLE_INIT;
    GIVES(DRAY_ESTALE, dray_handle_describe(r, &h, &error));
    OK(dray_arena_resume("weights", NULL, NULL, &error));
    OK(dray_region_check(r, &error)); /* at the same address as before, and exportable again */
    CHECK(dray_region_device_address(r) == first.at);
    hand(r);
    signed_();
    /* By force: the other one keeps what it has, and who described the region is told. */
    const dray_handle old = described(r);
    dray_arena_release_options force = DRAY_ARENA_RELEASE_OPTIONS_INIT;
    force.force = 1;
    OK(dray_arena_release("weights", &force, NULL, &error));
    OK(dray_arena_resume("weights", NULL, NULL, &error));
    GIVES(DRAY_ESTALE, dray_region_check(r, &error));
    CHECK(dray_region_fd(r) == -1);
    dray_region *same;
    GIVES(DRAY_ESTALE, dray_region_import(&old, -1, 0, &same, &error));
    dray_region_unexport(r);
    OK(dray_region_check(r, &error));
    CHECK(whole(&first) && whole(&second));
    sign();
    signed_();
    dray_arena_close(a);
    GIVES(DRAY_ESTALE, dray_region_check(s, &error));
    dray_region_free(r);
    dray_region_free(s);
}

static void importer_of_arena(void)
{
    start(NULL);
    int fd, fd2;
    dray_region *r, *s;
    dray_handle h = handed(&fd), k = handed(&fd2);
    CHECK(h.allocation == k.allocation && memcmp(h.key, k.key, sizeof h.key) == 0);
    OK(dray_region_import(&h, fd, 0, &r, &error));
    OK(dray_region_import(&k, fd2, 0, &s, &error));
    close(fd);
    close(fd2);
    CHECK(dray_region_device_address(s) - dray_region_device_address(r) ==
          k.base_offset - h.base_offset);
    held first = {dray_region_device_address(r), 2 * MIB, 1};
    held second = {dray_region_device_address(s), 3 * MIB, 2};
    CHECK(whole(&first) && whole(&second));
    dray_region_free(r);
    dray_region_free(s);
    sign();
    dray_handle again = handed(&fd); /* after the resume */
    CHECK(again.allocation != h.allocation && memcmp(again.key, h.key, sizeof h.key) != 0);
    OK(dray_region_import(&again, fd, 0, &r, &error));
    close(fd);
    first.at = dray_region_device_address(r);
    CHECK(whole(&first));
    sign();
    signed_();
    CHECK(whole(&first)); /* released by force: still here */
    dray_region_free(r);
    sign();
}

TEST(others_unmap_first)
{
    together(owner_of_arena, importer_of_arena);
}

/* ---- PyTorch's entry points ------------------------------------------------------------------ */

static void *other_thread(void *user)
{
    (void)user;
    OK(dray_torch_use("kv_cache", &error));
    void *memory = dray_torch_malloc(2 * MIB, 0, NULL);
    CHECK(memory);
    return memory;
}

static void log_line(void *user, dray_log_level level, const char *line)
{
    (void)level;
    snprintf(user, 256, "%s", line);
}

static void allocate_for_torch(void)
{
    start(NULL);
    static char line[256];
    dray_arena *weights, *cache, *same;
    struct {
        dray_arena_options known;
        uint64_t unknown;
    } newer = {DRAY_ARENA_OPTIONS_INIT, 1}; /* of a later library */
    newer.known.size = sizeof newer;
    newer.known.chunk_bytes = CHUNK;
    GIVES(DRAY_EVERSION, dray_torch_arena("weights", 0, &newer.known, &weights, &error));
    newer.unknown = 0;
    OK(dray_torch_arena("weights", 0, &newer.known, &weights, &error));
    void *first = dray_torch_malloc(20 * MIB, 0, NULL), *second;
    CHECK(first);
    pthread_t thread;
    CHECK(pthread_create(&thread, NULL, other_thread, NULL) == 0);
    CHECK(pthread_join(thread, &second) == 0);
    OK(dray_torch_use("weights", &error)); /* this thread's own; others' last was kv_cache */
    void *third = dray_torch_malloc(2 * MIB, 0, NULL);
    OK(dray_torch_arena("weights", 0, NULL, &same, &error));
    OK(dray_torch_arena("kv_cache", 0, NULL, &cache, &error));
    CHECK(same == weights && cache != weights);
    CHECK(status_of(weights).allocations == 2 && status_of(cache).allocations == 1);
    OK(dray_arena_release("kv_cache", NULL, NULL, &error));
    CHECK(status_of(cache).released && !status_of(weights).released);
    dray_set_log(log_line, line, DRAY_LOG_ERROR);
    OK(dray_torch_use("kv_cache", &error));
    CHECK(!dray_torch_malloc(MIB, 0, NULL) && strstr(line, "released"));
    CHECK(!dray_torch_malloc(MIB, 99, NULL));
    CHECK(!dray_torch_malloc(-1, 0, NULL));
    line[0] = 0;
    dray_torch_free((char *)first + 512, 1, 0, NULL);
    CHECK(strstr(line, "no allocation"));
    line[0] = 0;
    dray_torch_free(line, 1, 0, NULL);
    CHECK(strstr(line, "no arena"));
    dray_torch_free(first, 20 * MIB, 0, NULL);
    dray_torch_free(second, 2 * MIB, 0, NULL);
    dray_torch_free(third, 2 * MIB, 0, NULL);
    CHECK(status_of(weights).resident_bytes == 0);
}

TEST(torch_allocates_by_tag)
{
    alone(allocate_for_torch);
}

/* ---- threads --------------------------------------------------------------------------------- */

static void *use_arena(void *arena)
{
    for (int i = 0; i < 60; i++) {
        uint64_t at;
        dray_region *r;
        dray_error e;
        int rc = dray_arena_alloc(arena, (uint64_t)(i % 5 + 1) * MIB, &at, &e);
        if (rc == DRAY_EBUSY)
            continue;
        check_(__LINE__, rc, DRAY_OK, &e);
        /* It may be released by now. */
        rc = dray_region_wrap_cuda(at, 512, "r", &r, &e);
        if (rc == DRAY_OK)
            dray_region_free(r);
        check_(__LINE__, rc, rc == DRAY_ESTALE ? rc : DRAY_OK, &e);
        check_(__LINE__, dray_arena_free(arena, at, &e), DRAY_OK, &e);
    }
    return NULL;
}

static void share_arena(void)
{
    start(NULL);
    pthread_t threads[3];
    dray_arena *a = open_arena("weights");
    for (int i = 0; i < 3; i++)
        CHECK(pthread_create(&threads[i], NULL, use_arena, a) == 0);
    for (int i = 0; i < 10; i++) {
        OK(dray_arena_release("weights", NULL, NULL, &error));
        OK(dray_arena_resume("weights", NULL, NULL, &error));
    }
    for (int i = 0; i < 3; i++)
        CHECK(pthread_join(threads[i], NULL) == 0);
    CHECK(status_of(a).used_bytes == 0 && status_of(a).resident_bytes == 0);
    dray_arena_close(a);
}

TEST(threads_share_an_arena)
{
    alone(share_arena);
}

int main(void)
{
    gpu_begin(1);
    return suite_run(NULL, NULL);
}
