/* The processes of a benchmark of updates: the coordinator, the trainer ranks and the engine
 * ranks. */
#include "bench/weights/bench_ranks.h"
#include "bench/weights/bench_gpu.h"
#include "bench/weights/bench_gpu_decode.h"
#include "bench/weights/bench_gpu_load.h"
#include "bench/weights/bench_hosts.h"
#include "bench/weights/bench_values.h"
#include "run/supervisor/coordinator.h"

#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <linux/futex.h>
#include <sched.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <unistd.h>

#define MODEL "bench"
#define POLL_SECONDS 0.2

enum {
    POISON = 0xA5,
    WAIT_MS = 100,
    READ_BYTES = 16 << 20,
    PIECE = 256 << 10, /* the size of an update's slices */
};

int bench_get(const int *at)
{
    return __atomic_load_n(at, __ATOMIC_SEQ_CST);
}

void bench_add(int *at)
{
    __atomic_add_fetch(at, 1, __ATOMIC_SEQ_CST);
    syscall(SYS_futex, at, FUTEX_WAKE, INT_MAX, NULL, NULL, 0);
}

void bench_wait_change(int *at, int value)
{
    struct timespec time = {.tv_nsec = WAIT_MS * 1000000L};
    syscall(SYS_futex, at, FUTEX_WAIT, value, &time, NULL, 0);
}

/* Ends a child when `code` is an error. The first child that fails leaves its message for the
 * parent. */
static void must(bench_cluster *c, int code, const char *what, const dray_error *error)
{
    if (!code)
        return;
    bench_cluster_state *b = c->shared;
    if (__atomic_add_fetch(&b->failed, 1, __ATOMIC_SEQ_CST) == 1)
        snprintf(b->message, sizeof b->message, "%s: %s", what, error->message);
    bench_add(&b->ready);
    bench_add(&b->engines.done);
    _exit(1);
}

const char *bench_host_of(const bench_side *side, uint32_t rank)
{
    return side->host_count ? side->hosts[(uint64_t)rank * side->host_count / side->count] : NULL;
}

static void enter(bench_cluster *c, const char *host)
{
    dray_error error;
    if (bench_host_enter(host))
        return;
    snprintf(error.message, sizeof error.message, "%s", strerror(errno));
    must(c, DRAY_ESYS, host, &error);
}

static void on_ready(void *user, const char *unix_address, const char *tcp_address,
                     const char *metrics_url)
{
    (void)unix_address, (void)tcp_address, (void)metrics_url;
    bench_add(&((bench_cluster_state *)user)->ready);
}

void bench_run_coordinator(bench_cluster *c, uint32_t rank)
{
    (void)rank;
    dray_error error;
    dray__serve_options options = {
        .unix_path = c->shared->address + strlen("unix:"), .ready = on_ready, .user = c->shared};
    must(c, dray__serve(&options, &error), "coordinator", &error);
}

static dray_context *open_context(bench_cluster *c, const char *role, const char *host,
                                  uint32_t rank)
{
    dray_error error;
    dray_context *context;
    dray_options options = DRAY_OPTIONS_INIT;
    enter(c, host);
    options.address = c->shared->address;
    options.role = role;
    options.rank = rank;
    options.host = host;
    must(c, dray_open(&options, &context, &error), role, &error);
    return context;
}

/* Waits for the next work of a side and returns it. There is no deadline, because the process is
 * killed when its parent ends. With `polls`, it does not sleep at first, so that the time of an
 * update includes no wake-up. */
static enum bench_work next_work(bench_round *l, int round, bool polls)
{
    double until = bench_now() + POLL_SECONDS;
    while (polls && bench_get(&l->round) < round && bench_now() < until)
        sched_yield();
    while (bench_get(&l->round) < round)
        bench_wait_change(&l->round, round - 1);
    return (enum bench_work)l->work;
}

dray_region **bench_regions_of(const bench_cluster *c, uint32_t rank)
{
    dray_region **regions = c->regions;
    for (uint32_t i = 0; i < rank; i++)
        regions += dray_layout_region_count(c->options->from.layouts[i]);
    return regions;
}

static dray_layout *relaid(bench_cluster *c, const dray_layout *layout, dray_region_kind kind)
{
    dray_layout *out;
    dray_error error;
    must(c, bench_layout_as(layout, kind, &out, &error), dray_region_kind_name(kind), &error);
    return out;
}

/* Returns regions of memory that this process allocates. */
static dray_region **own_regions(bench_cluster *c, const dray_layout *layout)
{
    dray_error error = {.message = "out of memory"};
    dray_region **out = calloc((size_t)dray_layout_region_count(layout) + 1, sizeof *out);
    must(c, out ? 0 : DRAY_ENOMEM, "regions", &error);
    must(c, dray_regions_for_layout(layout, 1, out, &error), "regions", &error);
    return out;
}

/* Returns regions that wrap the memory as if it were private to the trainer, so that the library
 * does not give handles of it to engines. */
static dray_region **wrapped(bench_cluster *c, const dray_layout *layout, dray_region **regions)
{
    uint32_t count = dray_layout_region_count(layout);
    dray_region **out = calloc((size_t)count + 1, sizeof *out);
    dray_error error = {.message = "out of memory"};
    must(c, out ? 0 : DRAY_ENOMEM, "offloaded memory", &error);
    for (uint32_t i = 0; i < count; i++)
        must(c,
             dray_region_wrap(dray_region_base(regions[i]), dray_region_bytes(regions[i]),
                              "offloaded", &out[i], &error),
             "offloaded memory", &error);
    return out;
}

/* Fills the regions with the values of the version that is published next. */
static void fill(bench_cluster *c, const dray_layout *layout, dray_region **regions)
{
    const bench_cluster_options *o = c->options;
    dray_error error;
    bench_values_at((uint64_t)c->shared->version, o->every);
    if (o->cuda)
        must(c, bench_gpu_fill(layout, regions, o->tied, &error), "trainer", &error);
    else
        bench_fill(layout, regions, o->tied);
}

/* Takes the trainer's memory into use. On GPUs, it is allocated here and not by the parent. With
 * staging, the parent's memory is wrapped as private memory. */
static void take_memory(bench_cluster *c, uint32_t rank, dray_layout **layout,
                        dray_region ***regions)
{
    const bench_cluster_options *o = c->options;
    if (o->cuda) {
        bench_gpu_choose(bench_gpu_of(&o->from, rank, o->from.count));
        *layout = relaid(c, *layout, o->pinned ? DRAY_REGION_PINNED : DRAY_REGION_CUDA);
        *regions = own_regions(c, *layout);
        fill(c, *layout, *regions);
        return;
    }
    fill(c, *layout, *regions);
    if (!o->staging)
        return;
    *layout = relaid(c, *layout, DRAY_REGION_HOST);
    *regions = wrapped(c, *layout, *regions);
}

/* Reads each word once, in the machine's widest registers, because that is the fastest way to read
 * bytes. */
static void read_back(const uint8_t *data, uint64_t bytes)
{
    typedef uint64_t wide __attribute__((vector_size(64)));
    enum { AT_ONCE = 4 };
    wide seen[AT_ONCE] = {{0}}, word;
    for (uint64_t i = 0; i + sizeof seen <= bytes; i += sizeof seen)
        for (uint64_t k = 0; k < AT_ONCE; k++) {
            memcpy(&word, data + i + k * sizeof word, sizeof word);
            seen[k] ^= word;
        }
    __asm__ volatile("" : : "m"(seen)); /* keeps the compiler from removing the reads */
}

static void read_regions(const dray_layout *layout, dray_region *const *regions)
{
    for (uint32_t i = 0; i < dray_layout_region_count(layout); i++)
        read_back(dray_region_base(regions[i]), dray_region_bytes(regions[i]));
}

/* The parent made the trainers' regions, except those on GPUs, so that engines can copy from them
 * without the library. */
void bench_run_trainer(bench_cluster *c, uint32_t rank)
{
    const bench_side *side = &c->options->from;
    bench_cluster_state *b = c->shared;
    dray_error error;
    bool own = c->options->staging || c->options->cuda;
    dray_region **regions = c->options->cuda ? NULL : bench_regions_of(c, rank);
    dray_layout *layout = side->layouts[rank];
    take_memory(c, rank, &layout, &regions);
    dray_context *context = open_context(c, "trainer", bench_host_of(side, rank), rank);
    dray_publisher_options options = DRAY_PUBLISHER_OPTIONS_INIT;
    dray_publisher *publisher;
    options.regions = regions;
    options.rank = rank;
    options.world = side->count;
    options.staging_bytes = c->options->staging;
    options.no_checksums = c->options->unsummed;
    options.delta = c->options->every != 0;
    must(c, dray_publisher_open(context, MODEL, layout, &options, &publisher, &error), "trainer",
         &error);
    must(c, dray_publisher_publish(publisher, 1, NULL, &error), "publish", &error);
    bench_add(&b->ready);
    for (int round = 1;; round++) {
        enum bench_work work = next_work(&b->trainers, round, false);
        bench_result *s = &b->results[b->engines.ranks + rank];
        if (work == WORK_END)
            break;
        if (work == WORK_PUBLISH)
            must(c, dray_publisher_wait(publisher, b->version - 1, DRAY_WAIT_DEFAULT, NULL, &error),
                 "publisher wait", &error);
        if (work == WORK_PUBLISH && c->options->every)
            fill(c, layout, regions);
        s->begin = bench_now();
        if (work == WORK_PUBLISH)
            must(c, dray_publisher_publish(publisher, b->version, NULL, &error), "publish", &error);
        else
            read_regions(layout, regions);
        s->end = bench_now();
        bench_add(&b->trainers.done);
    }
    dray_publisher_close(publisher);
    dray_close(context);
    for (uint32_t i = 0; own && i < dray_layout_region_count(layout); i++)
        dray_region_free(regions[i]);
    if (own) {
        free(regions);
        dray_layout_free(layout);
    }
}

uint64_t bench_wanted_bytes(const bench_cluster *c, uint32_t number, uint64_t written)
{
    const bench_side *side = &c->options->to;
    return c->options->load ? dray_layout_bytes(side->layouts[number % side->count]) : written;
}

/* Copies from the trainers' memory into the engine's by memcpy, with the traffic of the update: as
 * many bytes read and written together. (A conversion from f32 to bf16 reads two bytes for each
 * byte that it writes, which is the traffic of a copy of one and a half times the written bytes.)
 * `piece` is the number of bytes that are copied at once. With `back`, as much of each piece as the
 * update writes is then read. */
static void copy_bytes(const bench_cluster *c, dray_region *to, uint32_t rank,
                       const dray_update_report *report, uint64_t piece, bool back)
{
    uint64_t size = dray_region_bytes(to), at = 0;
    uint64_t left = bench_wanted_bytes(c, rank, (report->bytes + report->source_bytes) / 2);
    double written = left ? (double)bench_wanted_bytes(c, rank, report->bytes) / (double)left : 0;
    written = back ? written : 0;
    for (uint32_t i = rank * c->region_count / (c->options->to.count * c->groups); left;
         i = (i + 1) % c->region_count) {
        uint64_t part = dray_region_bytes(c->regions[i]);
        part = part < left ? part : left;
        part = part < size - at ? part : size - at;
        for (uint64_t done = 0, n; done < part; done += n) {
            const uint8_t *from = dray_region_base(c->regions[i]);
            uint8_t *into = (uint8_t *)dray_region_base(to) + at + done;
            n = part - done < piece ? part - done : piece;
            memcpy(into, from + done, n);
            read_back(into, (uint64_t)(written * (double)n));
        }
        at = (at + part) % size;
        left -= part;
    }
}

/* Reads as many bytes as the update did from the checkpoint's first file, without the page cache.
 * Each rank begins at a different offset. */
static void read_bytes(bench_cluster *c, uint32_t rank, uint64_t bytes)
{
    char path[PATH_MAX];
    snprintf(path, sizeof path, "%s/model.safetensors", c->options->checkpoint);
    int fd = open(path, O_RDONLY | O_CLOEXEC | O_DIRECT);
    /* tmpfs has no O_DIRECT, and updates read it through the page cache, too. */
    if (fd < 0 && errno == EINVAL)
        fd = open(path, O_RDONLY | O_CLOEXEC);
    struct stat s = {0};
    void *buffer = NULL;
    dray_error error;
    if (fd < 0 || fstat(fd, &s) || s.st_size < READ_BYTES ||
        posix_memalign(&buffer, 4096, READ_BYTES)) {
        snprintf(error.message, sizeof error.message, "%.300s: too small, or no O_DIRECT", path);
        must(c, DRAY_ESYS, "limit", &error);
    }
    uint64_t pieces = (uint64_t)s.st_size / READ_BYTES;
    for (uint64_t done = 0, i = rank * pieces / (c->options->to.count * c->groups); done < bytes;
         done += READ_BYTES, i = (i + 1) % pieces)
        if (pread(fd, buffer, READ_BYTES, (off_t)(i * READ_BYTES)) != READ_BYTES) {
            snprintf(error.message, sizeof error.message, "%.300s: %s", path, strerror(errno));
            must(c, DRAY_ESYS, "limit", &error);
        }
    free(buffer);
    close(fd);
}

/* The state of an engine rank. */
typedef struct engine {
    uint32_t number;
    dray_layout *layout;
    dray_region **regions;
    dray_subscriber *subscriber;
    bench_decode *decode; /* NULL when nothing runs beside updates */
} engine;

static void poison(bench_cluster *c, const engine *e)
{
    dray_error error;
    for (uint32_t i = 0; i < dray_layout_region_count(e->layout); i++)
        if (c->options->cuda)
            must(c, bench_gpu_poison(e->regions[i], POISON, &error), "poison", &error);
        else
            memset(dray_region_base(e->regions[i]), POISON, dray_region_bytes(e->regions[i]));
}

typedef int update_fn(dray_subscriber *subscriber, const dray_update_options *options,
                      dray_update_report *report, dray_error *error);

static void update(bench_cluster *c, const engine *e, update_fn *how, dray_update_report *report)
{
    dray_error error;
    char who[64];
    snprintf(who, sizeof who, "engine rank %u", e->number);
    *report = (dray_update_report)DRAY_UPDATE_REPORT_INIT;
    must(c, how(e->subscriber, &c->shared->update, report, &error), who, &error);
}

/* Prefetches. An engine that decodes does so alone for ALONE_US before. */
#define ALONE_US 500000
static void prefetch(bench_cluster *c, const engine *e, bench_result *s)
{
    if (e->decode)
        usleep(ALONE_US);
    s->begin = bench_now();
    update(c, e, dray_prefetch_weights, &s->report);
    if (!e->decode)
        return;
    bench_decode_between(e->decode, s->begin - ALONE_US * 1e-6, s->begin, &s->alone);
    bench_decode_between(e->decode, s->begin, bench_now(), &s->beside);
}

static void check(bench_cluster *c, const engine *e, bench_result *s)
{
    const char *first = NULL;
    dray_error error;
    bench_values_at((uint64_t)c->shared->version, c->options->every);
    if (c->options->cuda)
        must(c,
             bench_gpu_wrong(e->layout, e->regions, c->options->tied, c->options->from.layouts,
                             c->options->from.count, &s->wrong, &first, &error),
             "check", &error);
    else
        s->wrong = bench_wrong(e->layout, e->regions, c->options->tied, c->options->from.layouts,
                               c->options->from.count, &first);
    snprintf(s->first, sizeof s->first, "%s", first ? first : "");
}

static void work_engine(bench_cluster *c, const engine *e, enum bench_work work, bench_result *s)
{
    s->begin = bench_now();
    switch (work) {
    case WORK_POISON:
        if (!c->options->every) /* the unchanged elements must stay */
            poison(c, e);
        break;
    case WORK_UPDATE:
        update(c, e, dray_update_weights, &s->report);
        break;
    case WORK_PREFETCH:
        prefetch(c, e, s);
        break;
    case WORK_COMMIT:
        update(c, e, dray_commit_weights, &s->report);
        break;
    case WORK_COPY:
        copy_bytes(c, e->regions[0], e->number, &s->report, UINT64_MAX, false);
        break;
    case WORK_COPY_PIECES:
    case WORK_COPY_AND_READ_BACK:
        copy_bytes(c, e->regions[0], e->number, &s->report, PIECE, work == WORK_COPY_AND_READ_BACK);
        break;
    case WORK_READ_OWN:
        read_regions(e->layout, e->regions);
        break;
    case WORK_READ:
        read_bytes(c, e->number, bench_wanted_bytes(c, e->number, s->report.source_bytes));
        break;
    default:
        check(c, e, s);
    }
    s->end = bench_now();
}

void bench_run_engine(bench_cluster *c, uint32_t number)
{
    const bench_side *side = &c->options->to;
    bench_cluster_state *b = c->shared;
    uint32_t rank = number % side->count;
    char group[32];
    dray_error error;
    engine e = {.number = number, .layout = side->layouts[rank]};
    snprintf(group, sizeof group, "engine%u", number / side->count);
    if (c->options->cuda) {
        bench_gpu_choose(bench_gpu_of(side, number, side->count * c->groups));
        e.layout = relaid(c, e.layout, DRAY_REGION_CUDA);
    }
    e.regions = own_regions(c, e.layout);
    poison(c, &e);
    dray_context *context = open_context(c, "engine", bench_host_of(side, rank), number);
    dray_subscriber_options options = DRAY_SUBSCRIBER_OPTIONS_INIT;
    options.regions = e.regions;
    options.group = group;
    options.rank = rank;
    options.world = side->count;
    options.staging = (int32_t)c->options->prefetch_into;
    dray_load_options load = DRAY_LOAD_OPTIONS_INIT;
    if (c->options->load) {
        bench_loader *loader;
        must(c, bench_loader_new(e.layout, e.regions, c->options->cuda, &loader, &error),
             "load_weights", &error);
        load.load = bench_load;
        load.user = loader;
        load.bucket_bytes = c->options->bucket_bytes;
        load.memory = c->options->cuda ? DRAY_REGION_CUDA : 0;
        load.slices = 1;
        options.load = &load;
    }
    must(c,
         dray_subscriber_open(context, MODEL, c->options->load ? c->options->load : e.layout,
                              &options, &e.subscriber, &error),
         group, &error);
    if (c->options->decode > 0)
        must(c,
             bench_decode_start(e.subscriber, e.regions[0], c->options->decode, &e.decode, &error),
             "decoding", &error);
    bool polls = c->options->cuda && sysconf(_SC_NPROCESSORS_ONLN) >
                                         2 * (int64_t)(b->engines.ranks + b->trainers.ranks);
    bench_add(&b->ready);
    for (int round = 1;; round++) {
        enum bench_work work = next_work(&b->engines, round, polls);
        if (work == WORK_END)
            break;
        work_engine(c, &e, work, &b->results[number]);
        bench_add(&b->engines.done);
    }
    bench_decode_stop(e.decode);
    dray_subscriber_close(e.subscriber);
    dray_close(context);
}
