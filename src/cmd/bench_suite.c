/* The suite of targets, and checkpoints to read. */
#include "cmd/bench_suite.h"
#include "cmd/bench_model.h"
#include "cmd/bench_values.h"

#include <errno.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <unistd.h>

/* ---- checkpoints ----------------------------------------------------------------------------- */

/* The one that is there, which must not stay behind when the program ends early. */
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

static void write_checkpoint(bench *b, const bench_job *job, dray_dtype dtype, const char *folder)
{
    dray_layout *layout;
    dray_region *region;
    dray_error error;
    if (dray_layout_full(&job->config, dtype, DRAY_REGION_HOST, &layout, &error) ||
        dray_regions_for_layout(layout, 1, &region, &error))
        bench_die(b, "%s", error.message);
    bench_fill(layout, &region, job->config.tied != 0);
    if (dray_checkpoint_write(folder, layout, &region, NULL, &error))
        bench_die(b, "%s", error.message);
}

const char *bench_checkpoint_make(bench *b, const bench_job *job, const bench_side *like,
                                  char *folder)
{
    int status;
    if (!mkdtemp(folder))
        bench_die(b, "%s: %s", folder, strerror(errno));
    keep(folder);
    bench_watch_signals();
    bench_doing(b, "%s: writing a checkpoint", job->model);
    fflush(NULL);
    pid_t pid = fork();
    if (pid == 0) {
        prctl(PR_SET_PDEATHSIG, SIGKILL);
        write_checkpoint(b, job, (dray_dtype)dray_layout_tensor(like->layouts[0], 0)->dtype,
                         folder);
        _exit(0);
    }
    if (pid < 0 || waitpid(pid, &status, 0) != pid || status)
        bench_die(b, "no checkpoint could be written");
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

/* ---- targets ----------------------------------------------------------------------------------
 */

/* Rows of the targets table that need nothing but this machine's memory. `cap`: bytes of weights at
 * most, so that a suite takes minutes. */
typedef struct row {
    const char *name, *model, *from, *to;
    uint32_t engines;
    double target;
} row;

static const row rows[] = {
    {"update, verified, 0.5B bf16, FSDP 4 -> TP 2", "qwen2.5-0.5b", "fsdp:4", "engine:tp=2", 1,
     1.25},
    {"update, verified, 0.5B f32 -> bf16, FSDP 4 -> TP 2", "qwen2.5-0.5b", "fsdp:4,dtype=f32",
     "engine:tp=2", 1, 1.3},
    {"update, verified, 0.5B f32 FSDP1 4 -> bf16 TP 2", "qwen2.5-0.5b", "fsdp1:4,dtype=f32",
     "engine:tp=2", 1, 1.3},
    {"update, verified, 30B-A3B shapes, FSDP 4 -> TP 4", "qwen3-30b-a3b", "fsdp:4", "engine:tp=4",
     1, 1.2},
    {"update, verified, 30B-A3B shapes, FSDP 4 -> EP 4", "qwen3-30b-a3b", "fsdp:4",
     "engine:tp=4,ep=4", 1, 1.2},
    {"update, verified, 30B-A3B shapes, FSDP 8 -> 2 engines of TP 4", "qwen3-30b-a3b", "fsdp:8",
     "engine:tp=4", 2, 1.3},
    {"update, verified, 32B shapes, FSDP 4 -> TP 4", "qwen2.5-32b", "fsdp:4", "engine:tp=4", 1,
     1.15},
    {"update, verified, 32B shapes, FSDP 8 -> TP 8", "qwen2.5-32b", "fsdp:8", "engine:tp=8", 1,
     1.3},
    {"update, verified, 32B shapes, FSDP 8 -> 2 engines of TP 4", "qwen2.5-32b", "fsdp:8",
     "engine:tp=4", 2, 1.3},
};

enum { ROWS = sizeof(rows) / sizeof(rows[0]) };

static double cap_of(bench *b)
{
    double cap = bench_quick(b) ? 100e6 : 1e9, part = bench_memory() / 8;
    return part < cap ? part : cap;
}

static void run_row(bench *b, const row *r, int verify, const char *name, double target,
                    double reference, bench_found *found)
{
    bench_job job = {.name = name,
                     .model = r->model,
                     .from = r->from,
                     .to = r->to,
                     .layers = bench_layers_within(b, r->model, cap_of(b)),
                     .modes = 1u << DRAY_MODE_TENSOR,
                     .strategies = 1u << DRAY_STRATEGY_DIRECT,
                     .verify = verify,
                     .engines = r->engines,
                     .target = target,
                     .reference = reference,
                     .found = found};
    bench_run(b, &job);
}

/* What an update costs besides its bytes: a model of some kilobytes. */
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

void bench_targets(bench *b)
{
    bench_found verified, bare;
    for (int i = 0; i < ROWS; i++) {
        run_row(b, &rows[i], 0, rows[i].name, rows[i].target, 0, i ? NULL : &verified);
        if (i == 0) {
            run_row(b, &rows[0], -1, "the same, not verified", 0, 0, &bare);
            bench_row(b, "verification's part of an update",
                      verified.seconds / verified.limit / (bare.seconds / bare.limit) - 1, "x", 0,
                      0.05);
        }
    }
    measure_control(b);
    bench_skip(b, "block FP8 quantised on the way",
               "dray bench weights --to engine:tp=4,quant=fp8-block measures it");
    bench_skip(b, "two hosts over TCP", "scripts/bench_hosts.sh measures it, as root");
    bench_skip(b, "source offloaded in pinned host memory", "needs a GPU");
}
