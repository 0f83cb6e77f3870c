/* dray bench compare: every way to bring one model from a trainer to an engine, in one table. */
#include "bench/weights/bench_suite.h"
#include "cmd/bench.h"

#include <string.h>

static const char *const memories[] = {"shared", "cuda", NULL};
static const char *const modes[] = {"auto", "tensor", "distributed", "disk", NULL};
enum { CUDA = 1 };

typedef struct arguments {
    bench_update of;
    int64_t layers, bucket;
    int memory;
    unsigned modes; /* bit set */
} arguments;

/* A way to update, and the options that select it. `today` names a framework that updates so
 * today. */
typedef struct flow {
    const char *mode, *strategy, *today;
    int mode_number, strategy_number;
    bool load;
    uint64_t staging; /* the bytes of the arena of offloaded weights; 0 means not offloaded */
    int32_t prefetch; /* of memory cuda alone: the kind of memory of a prefetch, whose commit is
                         timed; 0 means none */
} flow;

#define STAGING ((uint64_t)4 << 20)

static const flow flows[] = {
    {"tensor", "direct", "-", DRAY_MODE_TENSOR, DRAY_STRATEGY_DIRECT, false, 0, 0},
    {"tensor", "bucket", "slime", DRAY_MODE_TENSOR, DRAY_STRATEGY_BUCKET, false, 0, 0},
    {"tensor", "bucket, offloaded", "slime", DRAY_MODE_TENSOR, DRAY_STRATEGY_BUCKET, false, STAGING,
     0},
    {"tensor", "parameter", "verl", DRAY_MODE_TENSOR, DRAY_STRATEGY_PARAMETER, false, 0, 0},
    {"tensor", "prefetch, commit", "-", DRAY_MODE_TENSOR, DRAY_STRATEGY_DIRECT, false, 0,
     DRAY_REGION_CUDA},
    {"tensor", "prefetch, commit (pinned)", "-", DRAY_MODE_TENSOR, DRAY_STRATEGY_DIRECT, false, 0,
     DRAY_REGION_PINNED},
    {"tensor", "load_weights", "SGLang", DRAY_MODE_TENSOR, DRAY_STRATEGY_DIRECT, true, 0, 0},
    {"distributed", "direct", "-", DRAY_MODE_DISTRIBUTED, DRAY_STRATEGY_DIRECT, false, 0, 0},
    {"distributed", "bucket", "slime", DRAY_MODE_DISTRIBUTED, DRAY_STRATEGY_BUCKET, false, 0, 0},
    {"distributed", "parameter", "OpenRLHF", DRAY_MODE_DISTRIBUTED, DRAY_STRATEGY_PARAMETER, false,
     0, 0},
    {"distributed", "load_weights", "SGLang", DRAY_MODE_DISTRIBUTED, DRAY_STRATEGY_DIRECT, true, 0,
     0},
    {"disk", "direct", "-", DRAY_MODE_DISK, DRAY_STRATEGY_DIRECT, false, 0, 0},
    {"disk", "bucket", "-", DRAY_MODE_DISK, DRAY_STRATEGY_BUCKET, false, 0, 0},
    {"disk", "parameter", "-", DRAY_MODE_DISK, DRAY_STRATEGY_PARAMETER, false, 0, 0},
    {"disk", "load_weights", "AReaL", DRAY_MODE_DISK, DRAY_STRATEGY_DIRECT, true, 0, 0},
};

enum { FLOWS = sizeof(flows) / sizeof(flows[0]), FORMS = 3 };

static const char *const elastic[] = {
    [DRAY_MODE_TENSOR] = "on the trainer's host",
    [DRAY_MODE_DISTRIBUTED] = "joins at any time",
    [DRAY_MODE_DISK] = "any time, no trainer",
};

/* Returns the name of the i-th form of a state dict that a trainer with the SPEC `from` can hand
 * over. NULL when it has no such form. Form 0 is the SPEC itself. For the others, `out` gets the
 * form's SPEC, which keeps the part of `from` that begins with '@'. */
static const char *form_of(int i, const char *from, char *out, size_t capacity)
{
    const char *gpus = strchr(from, '@');
    if (i == 0)
        return strncmp(from, "fsdp:", 5) == 0 ? "sharded" : from;
    if (strncmp(from, "fsdp:", 5) != 0)
        return NULL;
    snprintf(out, capacity, i == 1 ? "fsdp1:%s" : "full%s", i == 1 ? from + 5 : gpus ? gpus : "");
    return i == 1 ? "local" : "full";
}

static void check(const struct argp_state *state, const void *to)
{
    const arguments *a = to;
    const char *specs[] = {a->of.from, a->of.to};
    for (size_t i = 0; i < 2; i++) {
        const char *at = specs[i] ? strchr(specs[i], '@') : NULL;
        if (at && (a->memory != CUDA || at[1] < '0' || at[1] > '9' || strchr(at + 1, '@')))
            argp_error(state, "compare makes its own hosts: expected SPECs without '@', or, with "
                              "--memory cuda, with GPUs behind it, as in fsdp:2@0-1");
    }
}

/* ---- the table ------------------------------------------------------------------------------- */

static void add_row(cmd_table *table, const flow *f, const char *form, const bench_found *found)
{
    cmd_cell(table, "%s", f->mode);
    cmd_cell(table, "%s", f->strategy);
    cmd_cell(table, "%s", form);
    cmd_cell(table, "%s", dray__say_seconds(found->seconds).s);
    cmd_cell(table, "%.2f x %s", found->seconds / found->limit, found->limit_by);
    cmd_cell(table, "%s",
             found->write_seconds > 0 ? dray__say_seconds(found->write_seconds).s : "-");
    cmd_cell(table, "%s", dray__say_seconds(found->pause).s);
    cmd_cell(table, "%s", dray__say_bytes((double)found->report.bytes).s);
    cmd_cell(table, "%s", dray__say_bytes((double)found->report.peak_extra_bytes).s);
    cmd_cell(table, "%s", f->load ? "load_weights" : "its layout");
    cmd_cell(table, "%s", elastic[f->mode_number]);
    cmd_cell(table, "%s", f->today);
}

/* Runs a way to update, and adds its row. In mode distributed, the two hosts are this machine under
 * two names. */
static void run_flow(bench *b, const arguments *a, const flow *f, const char *form,
                     const char *from, cmd_table *table)
{
    char sides[2][256], name[128];
    bench_found found = {0};
    bool remote = f->mode_number == DRAY_MODE_DISTRIBUTED;
    snprintf(sides[0], sizeof sides[0], "%s%s", from, remote ? "@~a" : "");
    snprintf(sides[1], sizeof sides[1], "%s%s", a->of.to, remote ? "@~b" : "");
    bench_job job = {.model = a->of.model,
                     .from = sides[0],
                     .to = sides[1],
                     .layers = a->layers,
                     .modes = 1u << f->mode_number,
                     .strategies = 1u << f->strategy_number,
                     .bucket = (uint64_t)a->bucket,
                     .engines = 1,
                     .load = f->load,
                     .staging = f->staging,
                     .cuda = a->memory == CUDA,
                     .prefetch = f->prefetch != 0,
                     .prefetch_into = f->prefetch == DRAY_REGION_PINNED ? DRAY_REGION_PINNED : 0,
                     .quiet = true,
                     .found = &found};
    bench_run(b, &job);
    snprintf(name, sizeof name, "%s, %s, %s", f->mode, f->strategy, form);
    if (a->of.settings.json)
        bench_row(b, name, found.seconds, "s", found.limit, 0);
    else
        add_row(table, f, form, &found);
}

static void run_all(bench *b, const arguments *a, cmd_table *table)
{
    char text[128];
    for (int i = 0; i < FLOWS; i++)
        for (int form = 0; form < FORMS; form++) {
            if (!(a->modes >> flows[i].mode_number & 1) ||
                (a->memory == CUDA ? flows[i].staging != 0 : flows[i].prefetch != 0))
                continue;
            const char *name = form_of(form, a->of.from, text, sizeof text);
            /* The trainer writes a checkpoint in one form. In the other modes, forms differ only in
             * the copies of the plan, which one strategy shows. */
            bool shown = form == 0 || (!flows[i].load && !flows[i].prefetch &&
                                       flows[i].mode_number == DRAY_MODE_TENSOR &&
                                       flows[i].strategy_number == DRAY_STRATEGY_DIRECT);
            if (name && shown)
                run_flow(b, a, &flows[i], name, form ? text : a->of.from, table);
        }
}

int bench_compare(int argc, char **argv)
{
    static const cmd_option options[] = {
        CMD_GROUP(2, NULL),
        CMD_NUMBER(arguments, layers, "layers", 'L', 1, 1000000, "N",
                   "So many of the layers, and as large a part of the vocabulary"),
        CMD_NUMBER(arguments, bucket, "bucket", 'b', 512 << 10, INT64_MAX, "BYTES",
                   "The ceiling of staging memory (67108864)"),
        CMD_WORD(arguments, memory, "memory", 'M', memories, "kind of memory", "shared|cuda",
                 "Where both sides' weights are: shared memory (the default), or GPUs, which "
                 "@0-3 behind a SPEC names"),
        CMD_WORDS(arguments, modes, "mode", 'o', modes, "mode", "MODE,...",
                  "These alone: tensor, distributed, disk"),
        CMD_END};
    static const cmd_usage usage = {
        .options = options,
        .check = check,
        .also = &bench_update_usage,
        .doc = "Update one model (qwen2.5-0.5b, fsdp:4 to engine:tp=2, unless told otherwise) in "
               "every mode, by every strategy, out of every form of a state dict, and through "
               "load_weights; print what each takes and needs.\vTime is that of an update as `dray "
               "bench weights` measures it, verified and checked; x is that over the limit beside "
               "it. Bytes are what the engine's ranks wrote, memory is the staging that a rank "
               "held at most. Between hosts means between two names of this machine, over its "
               "loopback. Offloaded weights are in memory of the trainers' own and pass through an "
               "arena of 4 MiB of each. On GPUs they "
               "are not offloaded, and two ways more prefetch, into spare memory of the GPU and "
               "into pinned memory: their time is that of the commit. Pause: how long an engine's "
               "weights are between two versions. Written: what the checkpoint took that mode disk "
               "reads, "
               "once for all engines; the run has it as its checkpoint then."};
    static const char *const headings[] = {
        "mode",   "strategy", "state dict",          ">time",   "x limit",  ">written", ">pause",
        ">bytes", ">memory",  "needs of the engine", "elastic", "today in", NULL};
    arguments a = {.of = {.model = "qwen2.5-0.5b", .from = "fsdp:4", .to = "engine:tp=2"},
                   .modes = ~0u};
    cmd_parse(&usage, argc, argv, &a);
    if (a.of.settings.quick && !a.layers)
        a.layers = 1;
    bench *b = bench_new("compare", &a.of.settings);
    cmd_table *table = cmd_table_new(headings);
    run_all(b, &a, table);
    bench_doing(b, NULL);
    if (a.of.settings.json)
        return bench_close(b);
    cmd_table_print(table, stdout);
    return CMD_OK;
}
