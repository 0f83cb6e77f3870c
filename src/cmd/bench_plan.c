/* dray bench plan: planning time and memory, by default at the scale of a trillion-parameter
 * mixture of experts: 61 layers, 384 experts, 256 trainer ranks (8 pipeline stages x 32-way expert
 * parallelism, the rest sharded over those 32) -> 128 engine ranks (3 experts of every layer each,
 * attention replicated). */
#include "cmd/bench.h"

#include <dray/plan.h>
#include <malloc.h>
#include <stdio.h>
#include <stdlib.h>
#include <time.h>

enum {
    LAYERS = 61,
    EXPERTS = 384,
    STAGES = 8,
    WIDTH = 32,
    SOURCES = STAGES * WIDTH,
    ENGINES = 128,
    HIDDEN = 7168,
    INTERMEDIATE = 2048
};

typedef struct job {
    bench *b;
    dray_plan_member sources[SOURCES], engines[ENGINES];
    dray_layout *layouts[SOURCES + ENGINES];
} job;

static const struct {
    const char *name;
    int64_t rows, columns;
} attention[] = {
    {"self_attn.q_a_proj.weight", 1536, HIDDEN},   {"self_attn.q_b_proj.weight", 24576, 1536},
    {"self_attn.kv_a_proj.weight", 576, HIDDEN},   {"self_attn.kv_b_proj.weight", 32768, 512},
    {"self_attn.o_proj.weight", HIDDEN, 16384},    {"mlp.gate.weight", EXPERTS, HIDDEN},
    {"mlp.shared.gate_proj.weight", 2048, HIDDEN}, {"mlp.shared.up_proj.weight", 2048, HIDDEN},
    {"mlp.shared.down_proj.weight", HIDDEN, 2048}, {"input_layernorm.weight", HIDDEN, 1},
    {"post_attention_layernorm.weight", HIDDEN, 1}};
enum { ATTENTION = sizeof attention / sizeof *attention };

static void add(const bench *b, dray_layout *l, uint64_t *at, const char *name, int64_t rows,
                int64_t columns, int64_t first, int64_t count)
{
    const int64_t shape[2] = {rows, columns}, start[2] = {first, 0}, extent[2] = {count, columns};
    uint32_t tensor;
    dray_error e;
    if (dray_layout_add_tensor(l, name, DRAY_BF16, 2, shape, &tensor, &e) ||
        dray_layout_add_dense(l, tensor, 0, start, extent, *at, &e))
        bench_die(b, "%s", e.message);
    *at += (uint64_t)(count * columns) * 2;
}

static dray_layout *empty(const bench *b)
{
    dray_layout *l;
    uint32_t region;
    dray_error e;
    dray_region_info info = {
        .kind = DRAY_REGION_CUDA, .bytes = (uint64_t)1 << 45, .name = "weights", .device = {1}};
    if (dray_layout_new(&l, &e) || dray_layout_add_region(l, &info, &region, &e))
        bench_die(b, "%s", e.message);
    return l;
}

static void add_experts(const bench *b, dray_layout *l, uint64_t *at, int layer, int first,
                        int count)
{
    static const char *const parts[] = {"gate_proj", "up_proj", "down_proj"};
    char name[96];
    for (int e = first; e < first + count; e++)
        for (int k = 0; k < 3; k++) {
            int64_t rows = k < 2 ? INTERMEDIATE : HIDDEN, columns = k < 2 ? HIDDEN : INTERMEDIATE;
            snprintf(name, sizeof name, "model.layers.%d.mlp.experts.%d.%s.weight", layer, e,
                     parts[k]);
            add(b, l, at, name, rows, columns, 0, rows);
        }
}

static void add_attention(const bench *b, dray_layout *l, uint64_t *at, int layer, int rank,
                          int ranks)
{
    char name[96];
    for (int k = 0; k < ATTENTION; k++) {
        int64_t rows = attention[k].rows / ranks;
        snprintf(name, sizeof name, "model.layers.%d.%s", layer, attention[k].name);
        add(b, l, at, name, attention[k].rows, attention[k].columns, rank * rows, rows);
    }
}

static void build(job *j)
{
    for (int r = 0; r < SOURCES; r++) {
        dray_layout *l = j->layouts[r] = empty(j->b);
        uint64_t at = 0;
        int stage = r / WIDTH, rank = r % WIDTH;
        for (int layer = stage * LAYERS / STAGES; layer < (stage + 1) * LAYERS / STAGES; layer++) {
            add_attention(j->b, l, &at, layer, rank, WIDTH);
            add_experts(j->b, l, &at, layer, rank * EXPERTS / WIDTH, EXPERTS / WIDTH);
        }
        j->sources[r] = (dray_plan_member){.layout = l,
                                           .member = (uint64_t)r,
                                           .host = (uint64_t)r / 8,
                                           .process = (uint64_t)r,
                                           .device = (uint64_t)r + 1};
    }
    for (int r = 0; r < ENGINES; r++) {
        dray_layout *l = j->layouts[SOURCES + r] = empty(j->b);
        uint64_t at = 0;
        for (int layer = 0; layer < LAYERS; layer++) {
            add_attention(j->b, l, &at, layer, 0, 1);
            add_experts(j->b, l, &at, layer, r * EXPERTS / ENGINES, EXPERTS / ENGINES);
        }
        j->engines[r] = (dray_plan_member){.layout = l,
                                           .member = 1000 + (uint64_t)r,
                                           .host = 1000 + (uint64_t)r / 8,
                                           .process = (uint64_t)r,
                                           .device = (uint64_t)r + 1};
    }
}

static dray_plan *plan_rank(const job *j, int rank)
{
    dray_plan *plan;
    dray_error e;
    if (dray_plan_new(j->sources, SOURCES, &j->engines[rank], NULL, &plan, &e))
        bench_die(j->b, "%s", e.message);
    return plan;
}

/* Of the processor, not of the wall: planning waits for nothing, and the machine may be shared. */
static double processor_seconds(void)
{
    struct timespec t;
    clock_gettime(CLOCK_PROCESS_CPUTIME_ID, &t);
    return (double)t.tv_sec + 1e-9 * (double)t.tv_nsec;
}

static double one_rank(void *state)
{
    double begin = processor_seconds();
    dray_plan_free(plan_rank(state, 5));
    return processor_seconds() - begin;
}

static double all_ranks(void *state)
{
    const job *j = state;
    dray_plan_index *index;
    dray_error e;
    double begin = processor_seconds();
    if (dray_plan_index_new(j->sources, SOURCES, &index, &e))
        bench_die(j->b, "%s", e.message);
    for (int r = 0; r < ENGINES; r++) {
        dray_plan *plan;
        if (dray_plan_from_index(index, &j->engines[r], NULL, &plan, &e))
            bench_die(j->b, "%s", e.message);
        dray_plan_free(plan);
    }
    dray_plan_index_free(index);
    return processor_seconds() - begin;
}

/* Bytes that a plan keeps, and the pairs that it finds, so that the figures can be judged. */
static void plan_size(const job *j)
{
    size_t before = mallinfo2().uordblks + mallinfo2().hblkhd;
    dray_plan *plan = plan_rank(j, 5);
    size_t after = mallinfo2().uordblks + mallinfo2().hblkhd;
    bench_row(j->b, "one rank's plan, memory kept", (double)(after - before), "B", 0, 64 << 20);
    bench_row(j->b, "one rank's plan, copies", (double)dray_plan_count(plan), "copies", 0, 0);
    dray_plan_free(plan);
}

/* ---- a model of the caller's choice -----------------------------------------------------------
 */

typedef struct arguments {
    bench_settings settings;
    const char *model, *from, *to;
} arguments;

typedef struct pair {
    bench *b;
    dray_plan_member *sources, *engines;
    dray_layout **from, **to;
    uint32_t source_count, engine_count;
} pair;

static dray_plan_member *members_of(const bench *b, dray_layout **layouts, uint32_t count,
                                    uint64_t first)
{
    dray_plan_member *members = calloc((size_t)count + 1, sizeof *members);
    if (!members)
        bench_die(b, "out of memory");
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
    dray_error e;
    double begin = processor_seconds();
    if (dray_plan_index_new(p->sources, p->source_count, &index, &e))
        bench_die(p->b, "%s", e.message);
    for (uint32_t i = 0; i < p->engine_count; i++) {
        dray_plan *plan;
        if (dray_plan_from_index(index, &p->engines[i], NULL, &plan, &e))
            bench_die(p->b, "%s", e.message);
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

/* targets: seconds of one rank and of all; 0: none. */
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
        bench_die(b, "%s", e.message);
    p.sources = members_of(b, p.from, p.source_count, 0);
    p.engines = members_of(b, p.to, p.engine_count, 1024);
    bench_doing(b, "%s: planning", model);
    snprintf(name, sizeof name, "%s, %s -> %s, one rank", model, from, to);
    bench_row(b, name, bench_median_of(b, plan_first, &p), "s", 0, one_target);
    snprintf(name, sizeof name, "%s, %s -> %s, all %u ranks", model, from, to, p.engine_count);
    bench_row(b, name, bench_median_of(b, plan_pair, &p), "s", 0, all_target);
    free(p.sources);
    free(p.engines);
    free_layouts(p.from, p.source_count);
    free_layouts(p.to, p.engine_count);
}

static void measure_trillion(bench *b)
{
    job *j = calloc(1, sizeof *j);
    if (!j)
        bench_die(b, "out of memory");
    j->b = b;
    bench_doing(b, "a trillion parameters: building layouts");
    build(j);
    bench_doing(b, "a trillion parameters: planning");
    bench_row(b, "1T MoE, 256 -> 1 of 128 ranks", bench_median_of(b, one_rank, j), "s", 0, 0.020);
    bench_row(b, "1T MoE, 256 -> all 128 ranks", bench_median_of(b, all_ranks, j), "s", 0, 1.0);
    plan_size(j);
    for (int i = 0; i < SOURCES + ENGINES; i++)
        dray_layout_free(j->layouts[i]);
    free(j);
}

static error_t parse(int key, char *text, struct argp_state *state)
{
    arguments *a = state->input;
    switch (key) {
    case ARGP_KEY_INIT:
        state->child_inputs[0] = &a->settings;
        return 0;
    case 'm':
        a->model = text;
        return 0;
    case 'f':
        a->from = text;
        return 0;
    case 't':
        a->to = text;
        return 0;
    case ARGP_KEY_END:
        if ((a->model || a->from || a->to) && !(a->model && a->from && a->to))
            argp_error(state, "expected --model, --from and --to together, or none of them");
        return 0;
    default:
        return ARGP_ERR_UNKNOWN;
    }
}

int bench_plan(int argc, char **argv)
{
    static const struct argp_option options[] = {
        {"model", 'm', "MODEL", 0, "A name of the built-in table, or the path of a config.json", 1},
        {"from", 'f', "SPEC", 0, "The first placement, as `dray plan` takes it", 1},
        {"to", 't', "SPEC", 0, "The second one", 1},
        {0}};
    static const struct argp_child children[] = {{&bench_argp, 0, "Options of every part:", 20},
                                                 {0}};
    static const struct argp argp = {
        options,
        parse,
        NULL,
        "Measure planning: processor time of one rank's plan, of all ranks' plans from one index, "
        "and the memory that a plan keeps.\v"
        "Without a model: Qwen2.5-32B, FSDP 4 to TP 4, and a mixture of experts of a trillion "
        "parameters, 256 trainer ranks to 128 engine ranks. Targets: one rank in 20 ms and 64 MiB, "
        "all 128 in 1 s.",
        children,
        NULL,
        NULL};
    arguments a = {0};
    cmd_parse(&argp, argc, argv, &a);
    bench *b = bench_new("plan", &a.settings);
    if (a.model) {
        measure_pair(b, a.model, a.from, a.to, 0, 0);
        return bench_close(b);
    }
    measure_pair(b, "qwen2.5-32b", "fsdp:4", "engine:tp=4", 0, 0.05);
    if (bench_quick(b))
        bench_skip(b, "1T MoE, 256 -> 128 ranks", "--quick");
    else
        measure_trillion(b);
    return bench_close(b);
}
