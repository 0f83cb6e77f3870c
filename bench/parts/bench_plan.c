/* dray bench plan: planning time and memory. By default the scale is that of a mixture of experts
 * with a trillion parameters: Kimi-K2, with 61 layers of 384 experts, and a plan from 256 trainer
 * ranks to 128 engine ranks. */
#include "cmd/bench.h"

#include <dray/plan.h>
#include <malloc.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#define MOST_BYTES (64 << 20) /* of one rank's plan at that scale */

/* Returns processor seconds, and not those of the clock, because planning waits for nothing and the
 * machine may be shared. */
static double processor_seconds(void)
{
    struct timespec t;
    clock_gettime(CLOCK_PROCESS_CPUTIME_ID, &t);
    return (double)t.tv_sec + 1e-9 * (double)t.tv_nsec;
}

/* ---- a model of the caller's choice ---------------------------------------------------------- */

typedef struct pair {
    bench *b;
    dray_plan_member *sources, *engines;
    dray_layout **from, **to;
    uint32_t source_count, engine_count;
} pair;

static dray_plan_member *members_of(const bench *b, dray_layout **layouts, uint32_t count,
                                    uint64_t first)
{
    dray_plan_member *members = bench_alloc(b, count, sizeof *members);
    for (uint32_t i = 0; i < count; i++)
        members[i] = (dray_plan_member){.layout = layouts[i],
                                        .member = first + i,
                                        .host = (first + i) / 8,
                                        .process = first + i,
                                        .device = first + i + 1};
    return members;
}

static double plan_pair(void *state)
{
    const pair *p = state;
    dray_plan_index *index;
    double begin = processor_seconds();
    BENCH_MUST(p->b, dray_plan_index_new(p->sources, p->source_count, &index, error));
    for (uint32_t i = 0; i < p->engine_count; i++) {
        dray_plan *plan;
        BENCH_MUST(p->b, dray_plan_from_index(index, &p->engines[i], NULL, &plan, error));
        dray_plan_free(plan);
    }
    dray_plan_index_free(index);
    return processor_seconds() - begin;
}

static double plan_first(void *state)
{
    pair one = *(const pair *)state;
    one.engine_count = 1;
    return plan_pair(&one);
}

static void free_layouts(dray_layout **layouts, uint32_t count)
{
    for (uint32_t i = 0; i < count; i++)
        dray_layout_free(layouts[i]);
    free(layouts);
}

/* Returns the bytes of the heap that are in use, modulo 4 GiB. The counts of mallinfo2 do not wrap,
 * but only glibc 2.33 and later have it. */
#pragma GCC diagnostic ignored "-Wdeprecated-declarations"
static uint32_t heap_bytes(void)
{
    struct mallinfo heap = mallinfo();
    return (uint32_t)heap.uordblks + (uint32_t)heap.hblkhd;
}

/* Measures the bytes that a plan keeps, and the number of its copies, which helps to judge the
 * other figures. The last part of `name` is replaced. */
static void measure_memory(const pair *p, char *name, size_t capacity, double target)
{
    dray_plan *plan;
    uint32_t before = heap_bytes();
    BENCH_MUST(p->b,
               dray_plan_new(p->sources, p->source_count, &p->engines[0], NULL, &plan, error));
    uint32_t after = heap_bytes();
    size_t used = strlen(name);
    for (; used && name[used - 1] != ','; used--)
        ;
    snprintf(name + used, capacity - used, " one rank's memory");
    bench_row(p->b, name, (uint32_t)(after - before), "B", 0, target);
    snprintf(name + used, capacity - used, " one rank's copies");
    bench_row(p->b, name, (double)dray_plan_count(plan), "copies", 0, 0);
    dray_plan_free(plan);
}

/* The targets are seconds of one rank and of all ranks; 0 means none. */
static void measure_pair(bench *b, const char *model, const char *from, const char *to,
                         double one_target, double all_target)
{
    dray_model_config config;
    pair p = {.b = b};
    dray_error e;
    char name[256];
    bench_doing(b, "%s: building layouts", model);
    if (dray_model_config_load(model, &config, &e) ||
        dray_layouts_from_spec(&config, from, &p.from, &p.source_count, &e) ||
        dray_layouts_from_spec(&config, to, &p.to, &p.engine_count, &e))
        bench_refuse(b, "%s", e.message);
    p.sources = members_of(b, p.from, p.source_count, 0);
    p.engines = members_of(b, p.to, p.engine_count, 1024);
    bench_doing(b, "%s: planning", model);
    snprintf(name, sizeof name, "%s, %s -> %s, one rank", model, from, to);
    bench_row(b, name, bench_median_of(b, plan_first, &p), "s", 0, one_target);
    snprintf(name, sizeof name, "%s, %s -> %s, all %u ranks", model, from, to, p.engine_count);
    bench_row(b, name, bench_median_of(b, plan_pair, &p), "s", 0, all_target);
    measure_memory(&p, name, sizeof name, one_target > 0 ? MOST_BYTES : 0);
    free(p.sources);
    free(p.engines);
    free_layouts(p.from, p.source_count);
    free_layouts(p.to, p.engine_count);
}

static void check(const struct argp_state *state, const void *to)
{
    const bench_update *a = to;
    if ((a->model || a->from || a->to) && !(a->model && a->from && a->to))
        argp_error(state, "expected --model, --from and --to together, or none of them");
}

int bench_plan(int argc, char **argv)
{
    static const cmd_option options[] = {CMD_END};
    static const cmd_usage usage = {
        .options = options,
        .check = check,
        .also = &bench_update_usage,
        .doc = "Measure planning: processor time of one rank's plan, of all ranks' plans from one "
               "index, and the memory that a plan keeps.\vWithout a model: Qwen2.5-32B, FSDP 4 to "
               "TP 4, and Kimi-K2, a trillion parameters, from 256 ranks of Megatron (8 stages of "
               "32-way expert parallelism) to 128 engine ranks with 3 experts each. Targets: one "
               "rank in 20 ms and 64 MiB, all 128 in 1 s."};
    bench_update a = {0};
    cmd_parse(&usage, argc, argv, &a);
    bench *b = bench_new("plan", &a.settings);
    if (a.model) {
        measure_pair(b, a.model, a.from, a.to, 0, 0);
        return bench_close(b);
    }
    measure_pair(b, "qwen2.5-32b", "fsdp:4", "engine:tp=4", 0, 0.05);
    if (bench_quick(b))
        bench_skip(b, "kimi-k2, 256 -> 128 ranks", "--quick");
    else
        measure_pair(b, "kimi-k2", "megatron:pp=8,ep=32,dp=32,first=7,last=6",
                     "engine:tp=128,ep=128,dp=128", 0.020, 1.0);
    return bench_close(b);
}
