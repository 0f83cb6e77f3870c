/* dray bench arena: the release and the resumption of GPU memory, as by a trainer and an engine
 * that share a GPU. The limit is the rate of large copies between the GPU and pinned host
 * memory. */
#include "cmd/bench.h"

#include <dray/gpu.h>
#include <stdlib.h>
#include <string.h>

enum { WEIGHTS, CACHE, ARENAS };

static const char *const tags[ARENAS] = {"weights", "kv_cache"};

#define BLOCK ((uint64_t)64 << 20)       /* bytes of the pattern */
#define ALLOCATION ((uint64_t)512 << 20) /* bytes of an allocation of the arena */

typedef struct held {
    dray_region *region;
    uint64_t number; /* the number of its first block, which is part of the pattern */
} held;

typedef struct arena_bench {
    bench *b;
    int32_t device;
    uint64_t bytes[ARENAS];
    dray_arena *arenas[ARENAS];
    held *list; /* the weights' regions */
    size_t count;
    uint32_t *noise, *back; /* BLOCK bytes each */
    double out_limit, in_limit;
} arena_bench;

typedef struct arguments {
    bench_settings settings;
    int64_t gigabytes, device;
} arguments;

/* ---- content --------------------------------------------------------------------------------- */

/* Writes the number of a block into each page of the noise. */
static void stamp(const arena_bench *m, uint64_t number)
{
    for (uint64_t at = 0; at < BLOCK; at += 4096)
        m->noise[at / sizeof *m->noise] = (uint32_t)number;
}

typedef int block_fn(const arena_bench *m, const held *h, uint64_t at, uint64_t bytes,
                     dray_error *error);

static int write_block(const arena_bench *m, const held *h, uint64_t at, uint64_t bytes,
                       dray_error *error)
{
    return dray_region_write(h->region, at, m->noise, bytes, error);
}

static int compare_block(const arena_bench *m, const held *h, uint64_t at, uint64_t bytes,
                         dray_error *error)
{
    int rc = dray_region_read(h->region, at, m->back, bytes, error);
    if (rc == DRAY_OK && memcmp(m->back, m->noise, bytes) != 0)
        return cmd_error(error, DRAY_ECHECKSUM,
                         "what came back differs in the 64 MiB from byte %llu of allocation %zu",
                         (unsigned long long)at, (size_t)(h - m->list));
    return rc;
}

static void each_block(const arena_bench *m, block_fn *function)
{
    for (size_t i = 0; i < m->count; i++) {
        const held *h = &m->list[i];
        uint64_t bytes = dray_region_bytes(h->region);
        for (uint64_t at = 0; at < bytes; at += BLOCK) {
            stamp(m, h->number + at / BLOCK);
            BENCH_MUST(m->b, function(m, h, at, bytes - at < BLOCK ? bytes - at : BLOCK, error));
        }
    }
}

/* ---- setting up ------------------------------------------------------------------------------ */

static dray_gpu gpu_of(const arena_bench *m)
{
    dray_gpu gpu = DRAY_GPU_INIT;
    BENCH_MUST(m->b, dray_gpu_get(m->device, &gpu, error));
    return gpu;
}

static void open_arena(arena_bench *m, int which)
{
    dray_arena_options options = DRAY_ARENA_OPTIONS_INIT;
    dray_gpu gpu = gpu_of(m);
    options.tag = tags[which];
    memcpy(options.uuid, gpu.uuid, sizeof options.uuid);
    BENCH_MUST(m->b, dray_arena_open(&options, &m->arenas[which], error));
    for (uint64_t done = 0; done < m->bytes[which]; done += ALLOCATION) {
        uint64_t at, n = m->bytes[which] - done < ALLOCATION ? m->bytes[which] - done : ALLOCATION;
        BENCH_MUST(m->b, dray_arena_alloc(m->arenas[which], n, &at, error));
        if (which != WEIGHTS)
            continue;
        held *h = &m->list[m->count++];
        h->number = done / BLOCK;
        BENCH_MUST(m->b, dray_region_wrap_cuda(at, n, tags[which], &h->region, error));
    }
}

static void choose_sizes(arena_bench *m, const arguments *a)
{
    uint64_t unused, all = bench_quick(m->b) ? (uint64_t)192 << 20 : (uint64_t)60000 << 20;
    BENCH_MUST(m->b, dray_gpu_memory(m->device, &unused, NULL, error));
    if (a->gigabytes)
        all = (uint64_t)a->gigabytes * 1000000000;
    else if (all > unused / 10 * 8)
        all = unused / 10 * 8;
    m->bytes[WEIGHTS] = all / 3 * 2;
    m->bytes[CACHE] = all - m->bytes[WEIGHTS];
}

static void prepare(arena_bench *m, const arguments *a)
{
    choose_sizes(m, a);
    m->noise = bench_alloc(m->b, 1, BLOCK);
    m->back = bench_alloc(m->b, 1, BLOCK);
    m->list = bench_alloc(m->b, m->bytes[WEIGHTS] / ALLOCATION + 1, sizeof *m->list);
    uint64_t x = 88172645463325252u;
    for (size_t i = 0; i < BLOCK / sizeof *m->noise; i++) {
        x ^= x << 13, x ^= x >> 7, x ^= x << 17;
        m->noise[i] = (uint32_t)(x >> 16);
    }
    bench_doing(m->b, "measuring copies to and from pinned memory");
    BENCH_MUST(m->b, dray_gpu_measure(m->device, -1, &m->out_limit, error));
    BENCH_MUST(m->b, dray_gpu_measure(-1, m->device, &m->in_limit, error));
    bench_doing(m->b, "filling %s of the GPU with noise",
                dray__say_bytes((double)m->bytes[WEIGHTS]).s);
    for (int i = 0; i < ARENAS; i++)
        open_arena(m, i);
    each_block(m, write_block);
}

/* ---- turns ----------------------------------------------------------------------------------- */

/* The steps of a turn, for the seconds of each. */
enum { OUT_WEIGHTS, OUT_CACHE, IN_WEIGHTS, IN_CACHE, STEPS };

typedef struct turn {
    double seconds[STEPS];
    uint64_t kept; /* bytes that remained on the GPU although they were released */
} turn;

static double release(const arena_bench *m, int which)
{
    dray_arena_release_options options = DRAY_ARENA_RELEASE_OPTIONS_INIT;
    options.drop = which == CACHE;
    double began = bench_now();
    BENCH_MUST(m->b, dray_arena_release(tags[which], &options, NULL, error));
    return bench_now() - began;
}

static double resume(const arena_bench *m, int which)
{
    double began = bench_now();
    BENCH_MUST(m->b, dray_arena_resume(tags[which], NULL, NULL, error));
    return bench_now() - began;
}

static turn take_turn(const arena_bench *m)
{
    turn t = {{0}, 0};
    uint64_t before, after, bytes = m->bytes[WEIGHTS] + m->bytes[CACHE];
    BENCH_MUST(m->b, dray_gpu_memory(m->device, &before, NULL, error));
    t.seconds[OUT_WEIGHTS] = release(m, WEIGHTS);
    t.seconds[OUT_CACHE] = release(m, CACHE);
    BENCH_MUST(m->b, dray_gpu_memory(m->device, &after, NULL, error));
    t.kept = after - before < bytes ? bytes - (after - before) : 0;
    t.seconds[IN_WEIGHTS] = resume(m, WEIGHTS);
    t.seconds[IN_CACHE] = resume(m, CACHE);
    return t;
}

static void rows(const arena_bench *m, double medians[STEPS], uint64_t kept)
{
    char name[96];
    double weights = (double)m->bytes[WEIGHTS], cache = (double)m->bytes[CACHE];
    snprintf(name, sizeof name, "release %s of weights, content kept", dray__say_bytes(weights).s);
    bench_row(m->b, name, weights / medians[OUT_WEIGHTS], "B/s", m->out_limit, 0.9);
    snprintf(name, sizeof name, "resume %s of weights", dray__say_bytes(weights).s);
    bench_row(m->b, name, weights / medians[IN_WEIGHTS], "B/s", m->in_limit, 0.9);
    snprintf(name, sizeof name, "release %s of kv_cache, dropped", dray__say_bytes(cache).s);
    bench_row(m->b, name, medians[OUT_CACHE], "s", 0, 0);
    snprintf(name, sizeof name, "resume %s of kv_cache", dray__say_bytes(cache).s);
    bench_row(m->b, name, medians[IN_CACHE], "s", 0, 0);
    bench_row(m->b, "not given back (limit: all of it)", (double)kept, "B", weights + cache, 0.02);
}

static void measure(arena_bench *m)
{
    dray_arena_report report = DRAY_ARENA_REPORT_INIT;
    bench_doing(m->b, "pinning host memory");
    BENCH_MUST(m->b, dray_arena_prepare(tags[WEIGHTS], &report, error));
    bench_row(m->b, "pin host memory for the weights, once", (double)report.pin_ns / 1e9, "s", 0,
              0);
    unsigned repeats = bench_repeats(m->b);
    double *seconds[STEPS], medians[STEPS];
    uint64_t kept = 0;
    for (int s = 0; s < STEPS; s++)
        seconds[s] = bench_alloc(m->b, repeats, sizeof(double));
    for (unsigned i = 0; i < repeats; i++) {
        bench_doing(m->b, "turn %u of %u", i + 1, repeats);
        turn t = take_turn(m);
        kept = t.kept > kept ? t.kept : kept;
        for (int s = 0; s < STEPS; s++)
            seconds[s][i] = t.seconds[s];
    }
    for (int s = 0; s < STEPS; s++) {
        medians[s] = bench_percentile(seconds[s], repeats, 0.5);
        free(seconds[s]);
    }
    rows(m, medians, kept);
    bench_doing(m->b, "comparing all of the weights with what was written");
    each_block(m, compare_block);
}

static void end(arena_bench *m)
{
    for (size_t i = 0; i < m->count; i++)
        dray_region_free(m->list[i].region);
    for (int i = 0; i < ARENAS; i++)
        dray_arena_close(m->arenas[i]);
    free(m->list);
    free(m->noise);
    free(m->back);
}

int bench_arena(int argc, char **argv)
{
    static const cmd_option options[] = {
        CMD_GROUP(1, NULL),
        CMD_NUMBER(arguments, device, "device", 'd', 0, 1023, "N",
                   "Which GPU of those that dray doctor lists (0)"),
        CMD_NUMBER(arguments, gigabytes, "gigabytes", 'G', 1, 100000, "N",
                   "How much of its memory (60, or what is there)"),
        CMD_END};
    static const cmd_usage usage = {
        .options = options,
        .also = &bench_usage,
        .doc = "Measure an arena of GPU memory being released, with its content kept in pinned "
               "host memory or dropped, and resumed, as trainer and engine do in turns, against "
               "large copies in the same run.\vContent is noise, and compared in the end. Targets: "
               "0.9 of the copies, both ways; 98 % of the memory is given back."};
    arguments a = {0};
    arena_bench m = {0};
    int32_t count;
    dray_error error;
    cmd_parse(&usage, argc, argv, &a);
    m.b = bench_new("arena", &a.settings);
    m.device = (int32_t)a.device;
    if (dray_gpu_count(&count, NULL, &error)) {
        bench_skip(m.b, "release and resume of GPU memory", error.message);
        return bench_close(m.b);
    }
    prepare(&m, &a);
    measure(&m);
    end(&m);
    return bench_close(m.b);
}
