/* The suite of targets, and the checkpoints that mode disk reads. */
#include "bench/weights/bench_suite.h"
#include "bench/parts/bench_model.h"
#include "bench/weights/bench_values.h"

#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

/* ---- checkpoints ----------------------------------------------------------------------------- */

/* The folder of the present checkpoint, which is removed when the program ends early. */
static char kept[64];
static pid_t keeper;

static void on_exit_early(void)
{
    if (kept[0] && getpid() == keeper)
        bench_checkpoint_remove(kept);
}

static void keep(const char *folder)
{
    static bool watched;
    if (!watched)
        atexit(on_exit_early);
    watched = true;
    keeper = getpid();
    snprintf(kept, sizeof kept, "%s", folder);
}

/* Writes a checkpoint. Returns the seconds of writing alone. */
static double write_checkpoint(bench *b, const bench_job *job, dray_dtype dtype, const char *folder)
{
    dray_layout *layout;
    dray_region *region;
    dray_error error;
    if (dray_layout_full(&job->config, dtype, DRAY_REGION_HOST, &layout, &error) ||
        dray_regions_for_layout(layout, 1, &region, &error))
        bench_die(b, "%s", error.message);
    bench_fill(layout, &region, job->config.tied != 0);
    double begin = bench_now();
    if (dray_checkpoint_write(folder, layout, &region, NULL, &error))
        bench_die(b, "%s", error.message);
    return bench_now() - begin;
}

const char *bench_checkpoint_make(bench *b, const bench_job *job, const bench_side *like,
                                  char *folder, double *seconds)
{
    int status, ends[2];
    if (pipe(ends))
        bench_die(b, "pipe: %s", strerror(errno));
    if (!mkdtemp(folder))
        bench_die(b, "%s: %s", folder, strerror(errno));
    keep(folder);
    bench_watch_signals();
    bench_doing(b, "%s: writing a checkpoint", job->model);
    pid_t pid = bench_fork(b);
    if (pid == 0) {
        double taken = write_checkpoint(
            b, job, (dray_dtype)dray_layout_tensor(like->layouts[0], 0)->dtype, folder);
        _exit(write(ends[1], &taken, sizeof taken) != (ssize_t)sizeof taken);
    }
    if (waitpid(pid, &status, 0) != pid || status ||
        read(ends[0], seconds, sizeof *seconds) != (ssize_t)sizeof *seconds)
        bench_die(b, "no checkpoint could be written");
    close(ends[0]);
    close(ends[1]);
    return folder;
}

void bench_checkpoint_remove(const char *folder)
{
    static const char *const names[] = {"model.safetensors", "model.safetensors.partial"};
    char path[128];
    for (size_t i = 0; i < 2; i++) {
        snprintf(path, sizeof path, "%s/%s", folder, names[i]);
        unlink(path);
    }
    rmdir(folder);
    kept[0] = 0;
}

/* ---- targets --------------------------------------------------------------------------------- */

/* A row of the table of targets that needs nothing but this machine's memory. */
typedef struct row {
    const char *name, *model, *from, *to;
    uint32_t engines;
    double target;
} row;

/* The target, in times of a memcpy and a read of the written bytes. */
#define VERIFIED_TARGET 1.15

static const row rows[] = {
    {"update, verified, 0.5B bf16, FSDP 4 -> TP 2", "qwen2.5-0.5b", "fsdp:4", "engine:tp=2", 1,
     VERIFIED_TARGET},
    {"update, verified, 0.5B f32 -> bf16, FSDP 4 -> TP 2", "qwen2.5-0.5b", "fsdp:4,dtype=f32",
     "engine:tp=2", 1, VERIFIED_TARGET},
    {"update, verified, 0.5B f32 FSDP1 4 -> bf16 TP 2", "qwen2.5-0.5b", "fsdp1:4,dtype=f32",
     "engine:tp=2", 1, VERIFIED_TARGET},
    {"update, verified, 30B-A3B shapes, FSDP 4 -> TP 4", "qwen3-30b-a3b", "fsdp:4", "engine:tp=4",
     1, VERIFIED_TARGET},
    {"update, verified, 30B-A3B shapes, FSDP 4 -> EP 4", "qwen3-30b-a3b", "fsdp:4",
     "engine:tp=4,ep=4", 1, VERIFIED_TARGET},
    {"update, verified, 30B-A3B shapes, FSDP 8 -> 2 engines of TP 4", "qwen3-30b-a3b", "fsdp:8",
     "engine:tp=4", 2, VERIFIED_TARGET},
    {"update, verified, 32B shapes, FSDP 4 -> TP 4", "qwen2.5-32b", "fsdp:4", "engine:tp=4", 1,
     VERIFIED_TARGET},
    {"update, verified, 32B shapes, FSDP 8 -> TP 8", "qwen2.5-32b", "fsdp:8", "engine:tp=8", 1,
     VERIFIED_TARGET},
    {"update, verified, 32B shapes, FSDP 8 -> 2 engines of TP 4", "qwen2.5-32b", "fsdp:8",
     "engine:tp=4", 2, VERIFIED_TARGET},
    /* On a CPU, arithmetic and not memory limits this update; bench/bench_mover measures that
     * limit. */
    {"update, verified, 30B-A3B shapes, FSDP 4 -> block FP8, EP 4", "qwen3-30b-a3b", "fsdp:4",
     "engine:tp=4,ep=4,quant=fp8-block", 1, 0},
};

enum { ROWS = sizeof(rows) / sizeof(rows[0]) };

/* Returns the largest number of bytes of weights in a row, so that the suite takes minutes. */
static double cap_of(bench *b)
{
    double cap = bench_quick(b) ? 100e6 : 1e9, part = bench_memory() / 8;
    return part < cap ? part : cap;
}

static void run_row(bench *b, const row *r)
{
    bench_job job = {.name = r->name,
                     .model = r->model,
                     .from = r->from,
                     .to = r->to,
                     .layers = bench_layers_within(b, r->model, cap_of(b)),
                     .modes = 1u << DRAY_MODE_TENSOR,
                     .strategies = 1u << DRAY_STRATEGY_DIRECT,
                     .engines = r->engines,
                     .target = r->target};
    bench_run(b, &job);
}

/* Measures the cost of an update apart from its bytes, with a model of some kilobytes. */
static void measure_control(bench *b)
{
    enum { ROUNDS = 300, WARM = 20 };
    static double seconds[ROUNDS];
    dray_model_config tiny = {.family = "qwen2",
                              .vocab_size = 64,
                              .hidden_size = 64,
                              .intermediate_size = 128,
                              .layers = 2,
                              .heads = 8,
                              .kv_heads = 8,
                              .head_dim = 8,
                              .max_positions = 64,
                              .rms_norm_eps = 1e-6,
                              .rope_theta = 10000,
                              .tied = 1,
                              .dtype = DRAY_BF16};
    bench_cluster_options o = {.engines = 1, .tied = true};
    dray_update_options update = DRAY_UPDATE_OPTIONS_INIT;
    bench_side_open(b, &tiny, "fsdp:8", &o.from);
    bench_side_open(b, &tiny, "engine:tp=8", &o.to);
    bench_doing(b, "updates of next to nothing");
    bench_cluster *c = bench_cluster_start(b, &o);
    for (int i = 0; i < WARM + ROUNDS; i++) {
        double one = bench_cluster_repeat(c, &update);
        if (i >= WARM)
            seconds[i - WARM] = one;
    }
    bench_cluster_stop(c);
    bench_side_close(&o.from);
    bench_side_close(&o.to);
    bench_row(b, "update of next to nothing, 8 + 8 processes, median",
              bench_percentile(seconds, ROUNDS, 0.5), "s", 4 * bench_echo(b, 200), 0);
    bench_row(b, "update of next to nothing, 8 + 8 processes, p99",
              bench_percentile(seconds, ROUNDS, 0.99), "s", 0, 1e-3);
}

/* One side of the comparison: updates with checksums, or without any of them, neither of the
 * published bytes nor of the written ones. */
typedef struct side {
    bool verified;
    bench_cluster_options options;
    bench_cluster *cluster;
    dray_update_options update;
    double *seconds, *limits, value, limit;
} side;

static void open_verification(bench *b, const row *r, const dray_model_config *config, side *s,
                              bool verified)
{
    unsigned turns = bench_repeats(b);
    *s =
        (side){.verified = verified,
               .options = {.engines = r->engines, .tied = config->tied != 0, .unsummed = !verified},
               .update = DRAY_UPDATE_OPTIONS_INIT,
               .seconds = bench_alloc(b, turns, sizeof(double)),
               .limits = bench_alloc(b, turns, sizeof(double))};
    s->update.mode = DRAY_MODE_TENSOR;
    s->update.no_verify = !verified;
    bench_side_open(b, config, r->from, &s->options.from);
    bench_side_open(b, config, r->to, &s->options.to);
    s->cluster = bench_cluster_start(b, &s->options);
    bench_cluster_follow(s->cluster, &s->update);
}

static void close_verification(side *s, unsigned turns)
{
    bench_cluster_follow(s->cluster, &s->update); /* overwrites the bytes of the limit's copies */
    bench_cluster_check(s->cluster);
    bench_cluster_stop(s->cluster);
    bench_side_close(&s->options.from);
    bench_side_close(&s->options.to);
    s->value = bench_percentile(s->seconds, turns, 0.25);
    s->limit = bench_percentile(s->limits, turns, 0.25);
    free(s->seconds);
    free(s->limits);
}

/* Measures the time that verification adds to an update, from its publish to its commit. The limit
 * is the time of the two reads that it cannot avoid: of the published bytes, and of the written
 * bytes. All measurements are interleaved, so that other load affects them alike. */
static void measure_verification(bench *b, const row *r)
{
    const double least = 0.05;
    unsigned turns = bench_repeats(b);
    side sides[2];
    dray_model_config config;
    bench_model(b, r->model, bench_layers_within(b, r->model, cap_of(b) / 2), &config);
    bench_doing(b, "what verification adds");
    for (int i = 0; i < 2; i++)
        open_verification(b, r, &config, &sides[i], i == 0);
    for (unsigned turn = 0; turn < turns; turn++)
        for (int i = 0; i < 2; i++) {
            side *s = &sides[i];
            s->seconds[turn] = bench_cluster_follow(s->cluster, &s->update);
            s->limits[turn] = bench_cluster_least(s->cluster, s->verified) +
                              (s->verified ? bench_cluster_read_sources(s->cluster) : 0);
        }
    for (int i = 0; i < 2; i++)
        close_verification(&sides[i], turns);
    double adds = sides[0].value / sides[1].value - 1, read = sides[0].limit / sides[1].limit - 1;
    bench_row(b, "the same, publish to commit", sides[0].value, "s", sides[0].limit, 0);
    bench_row(b, "the same, no checksums on either side", sides[1].value, "s", sides[1].limit, 0);
    bench_row(b, "verification's part of an update", adds > 0 ? adds : 0, "x",
              read > least ? read : least, 2);
}

void bench_targets(bench *b)
{
    for (int i = 0; i < ROWS; i++) {
        run_row(b, &rows[i]);
        if (i == 0)
            measure_verification(b, &rows[0]);
    }
    measure_control(b);
    bench_skip(b, "two hosts over TCP", "scripts/bench_hosts.sh measures it, as root");
    bench_skip(b, "source offloaded in pinned host memory", "needs a GPU");
}
