/* dray bench weights: updates from one placement to another, in which each rank is a process. The
 * limit is a memcpy by the same engine processes of as many bytes as the update reads and writes,
 * and a read of the written bytes where the update is verified. Updates and limit are interleaved.
 * Other load disturbs both, so that for each the least disturbed quarter counts. GPUs are not
 * shared, so that for them the median counts, and the trainers' sums are part of the time. */
#include "bench/parts/bench_model.h"
#include "bench/weights/bench_suite.h"
#include "cmd/bench.h"

#include <stdlib.h>

static const char *const modes[] = {"auto", "tensor", "distributed", "disk", NULL};
static const char *const strategies[] = {"direct", "bucket", "parameter", NULL};
static const char *const memories[] = {"shared", "offloaded", "cuda", NULL};
static const char *const origins[] = {"cuda", "pinned", NULL};
static const char *const stagings[] = {"device", "pinned", NULL};
static const char *const switches[] = {"off", "on", NULL};
static const char *const suites[] = {"targets", NULL};
enum { MODES = 4, STRATEGIES = 3, OFFLOADED = 1, CUDA, PINNED = 1, OFF = 0 };

#define STAGING ((uint64_t)4 << 20)

/* The words are indices into the tables above. */
typedef struct arguments {
    bench_update of;
    unsigned modes, strategies; /* bit sets */
    int64_t layers, engines, bucket, nccl, decode_ms, within_ms, ctas, every;
    int memory, origin, verify;
    int prefetch, suite; /* -1: not given */
    bool copy_engines;
} arguments;

/* ---- arguments ------------------------------------------------------------------------------- */

static void check(const struct argp_state *state, const void *to)
{
    const arguments *a = to;
    if (a->suite < 0 && !(a->of.model && a->of.from && a->of.to))
        argp_error(state,
                   "expected --model, --from and --to, or --suite targets; as in\n"
                   "  dray bench weights --model qwen2.5-0.5b --from fsdp:4 --to engine:tp=2");
    if ((a->origin == PINNED || a->prefetch >= 0 || a->decode_ms) && a->memory != CUDA)
        argp_error(state, "--source pinned, --prefetch and --decode go with --memory cuda");
    if (a->within_ms && a->prefetch < 0)
        argp_error(state, "--within goes with --prefetch");
}

static const cmd_option options[] = {
    CMD_GROUP(2, NULL),
    CMD_NUMBER(arguments, layers, "layers", 'L', 1, 1000000, "N",
               "So many of the layers, and as large a part of the vocabulary"),
    CMD_NUMBER(arguments, engines, "engines", 'e', 1, 1024, "N",
               "So many engines, which update at the same time (1)"),
    CMD_GROUP(3, NULL),
    CMD_WORD(arguments, memory, "memory", 'M', memories, "kind of memory", "KIND",
             "Where the trainers' weights are: shared (the default), offloaded: private memory, "
             "through an arena of 4 MiB; cuda: both sides' on GPUs"),
    CMD_WORD(arguments, origin, "source", 'O', origins, "source", "KIND",
             "Of memory cuda, where the trainers' weights are: cuda (the default), pinned host "
             "memory"),
    CMD_WORD(arguments, prefetch, "prefetch", 'p', stagings, "place of what is prefetched",
             "device|pinned",
             "Of memory cuda: prefetch into spare memory of the GPUs, or pinned memory; the time "
             "is that of the commit, the limit a local copy, or one out of pinned memory"),
    CMD_NUMBER(arguments, decode_ms, "decode", 'D', 1, 1000, "MS",
               "Of memory cuda: engines decode meanwhile, or something like it, in steps of so "
               "many milliseconds; the report says what they take beside what moves"),
    CMD_NUMBER(arguments, within_ms, "within", 'w', 1, 3600000, "MS",
               "With --prefetch: it is spread over so many milliseconds (prefetch_seconds of the "
               "update options); 1000 is a second"),
    CMD_NUMBER(arguments, ctas, "ctas", 'C', 0, 1 << 20, "N",
               "Of memory cuda: kernels have at most so many thread blocks at once"),
    CMD_FLAG(arguments, copy_engines, "copy-engines", 'E',
             "Of memory cuda: copy engines move what they can"),
    CMD_WORDS(arguments, modes, "mode", 'o', modes, "mode", "MODE,...",
              "tensor (the default), distributed, disk, auto"),
    CMD_WORDS(arguments, strategies, "strategy", 'g', strategies, "strategy", "NAME,...",
              "direct (the default), bucket, parameter"),
    CMD_NUMBER(arguments, bucket, "bucket", 'b', 128 << 10, INT64_MAX, "BYTES",
               "The ceiling of staging memory (67108864)"),
    CMD_NUMBER(arguments, nccl, "nccl", 'N', 1 << 20, INT64_MAX, "BYTES",
               "Of memory cuda between hosts: the ceiling of what NCCL has (1073741824)"),
    CMD_NUMBER(
        arguments, every, "changed", 'c', 2, 1 << 20, "N",
        "One of N elements changes from version to version, by chance (100: 1 %); publishers "
        "send deltas"),
    CMD_WORD(arguments, verify, "verify", 'v', switches, "--verify", "on|off",
             "Checksums, of what is published and of what was written (on); off: on neither side"),
    CMD_GROUP(4, NULL),
    CMD_WORD(arguments, suite, "suite", 'S', suites, "suite", "targets",
             "The project's own targets, at sizes that fit this machine"),
    CMD_END};

static const char doc[] =
    "Update an engine's weights from a trainer's, each rank a process of its own, and compare the "
    "time with that of a memcpy of as many bytes by the same processes, and of a read of what was "
    "written where updates are verified, measured in turns with it.\vThe weights are random, the "
    "destination is poisoned before each update, and the last one is checked element by element. "
    "Time counts from the last rank's publish to the last rank's commit; of N runs the best "
    "quarter's worst is taken, for the update and for its limit. Of memory cuda, time counts from "
    "the beginning of the last rank's publish, so that its sums are part of it, and medians are "
    "taken; engine_seconds of the JSON is the engines' part. Ratio = time / limit.\n\n"
    "SPEC: as `dray plan` takes it. SPEC@HOST,HOST,... puts the ranks into network namespaces of "
    "these names (ip netns list), in equal runs; @~NAME is this machine under another name; @0-7 "
    "are GPUs (@0-3@~NAME: on such a host), for memory cuda, whose limit is what the plan asks of "
    "the busiest link at the rate that a large copy reaches there in the same run. Mode disk "
    "writes the model as a checkpoint first and reads it around the page cache; its limit is "
    "direct I/O.\n\n"
    "Example: dray bench weights --model qwen2.5-0.5b --from fsdp:4 --to engine:tp=2 --strategy "
    "direct,bucket --json";

/* ---- one model, one pair of placements ------------------------------------------------------- */

static void need_memory(bench *b, const bench_job *job, const bench_cluster_options *o)
{
    double groups = o->engines ? o->engines : 1;
    double need = bench_side_bytes(&o->from) + groups * bench_side_bytes(&o->to);
    double there = 0.9 * bench_memory();
    if (need <= there)
        return;
    int64_t layers = (int64_t)((double)job->config.layers * there / need);
    bench_die(b,
              "%s needs %s for both sides, %s are free here; --layers %lld would fit (%lld of %lld "
              "layers, the vocabulary in proportion)",
              job->model, dray__say_bytes(need).s, dray__say_bytes(there).s,
              (long long)(layers ? layers : 1), (long long)(layers ? layers : 1),
              (long long)job->config.layers);
}

static json_t *describe(const bench_job *job, const bench_cluster *c, const double *all,
                        unsigned count)
{
    char text[4096];
    dray_update_report report = bench_cluster_report(c);
    json_t *object =
        json_pack("{s:s, s:I, s:s, s:s, s:s, s:s, s:b, s:I}", "model", job->model, "layers",
                  (json_int_t)job->config.layers, "from", job->from, "to", job->to, "mode",
                  modes[report.mode], "strategy", strategies[report.strategy], "verify",
                  !job->unverified, "engines", (json_int_t)job->engines);
    json_t *runs = json_array();
    for (unsigned i = 0; i < count; i++)
        json_array_append_new(runs, json_real(all[i]));
    if (dray_update_report_json(&report, text, sizeof text, NULL) == DRAY_OK)
        json_object_set_new(object, "report", json_loads(text, 0, NULL));
    json_object_set_new(object, "seconds", runs);
    json_object_set_new(object, "ranks", bench_cluster_time_lines(c));
    return object;
}

/* Returns the seconds of the last update's limit: that of the busiest link of GPUs, of the link
 * between hosts, of the disk, or of memory. *how says which. */
static double limit_of(const bench_job *job, bench_cluster *c, const char **how)
{
    dray_update_report report = bench_cluster_report(c);
    if (job->cuda && report.mode != DRAY_MODE_DISK) {
        *how = job->limit_by;
        return job->limit;
    }
    if (report.mode == DRAY_MODE_DISTRIBUTED && report.link_bytes[DRAY_LINK_NETWORK])
        return bench_cluster_link(c, how);
    bool disk = report.mode == DRAY_MODE_DISK, read = !disk && !job->unverified;
    *how = disk ? "direct I/O" : read ? "memcpy + read" : "memcpy";
    return disk ? bench_cluster_read(c) : bench_cluster_least(c, read);
}

/* Adds the rates that the limit of an update on GPUs is made of, and the engines' part of the
 * time. */
static void add_gpu(const bench_job *job, json_t *more, double *engines, unsigned turns)
{
    json_object_set_new(more, "engine_seconds", json_real(bench_percentile(engines, turns, 0.5)));
    json_object_set_new(more, "rates",
                        json_pack("{s:f, s:f, s:f}", "link", job->rates.link, "local",
                                  job->rates.local, "pinned", job->rates.pinned));
    json_object_set_new(more, "source", json_string(job->pinned ? "pinned" : "cuda"));
}

/* Prefetches, and their effect on the engines' steps, in the repeat that slowed them down the
 * most. */
typedef struct prefetched {
    double seconds;            /* of the fastest one */
    dray_update_report report; /* of the last one */
    bench_slowed slowed;
} prefetched;

/* Brings a new version into the engines. Returns the seconds of the update, or with `prefetch`
 * those of the commit. In the latter case the prefetch before it is added to *before. */
static double bring_version(const bench_job *job, bench_cluster *c,
                            const dray_update_options *update, prefetched *before)
{
    if (!job->prefetch)
        return bench_cluster_update(c, update);
    dray_update_options ahead = *update;
    ahead.prefetch_seconds = job->within;
    double seconds = bench_cluster_prefetch(c, &ahead);
    before->report = bench_cluster_report(c);
    bench_slowed s = bench_cluster_slowed(c), *worst = &before->slowed;
    before->seconds = before->seconds > 0 && before->seconds < seconds ? before->seconds : seconds;
    if (s.mean * worst->mean_alone >= worst->mean * s.mean_alone) {
        worst->mean = s.mean;
        worst->mean_alone = s.mean_alone;
    }
    if (s.p99 * worst->p99_alone >= worst->p99 * s.p99_alone) {
        worst->p99 = s.p99;
        worst->p99_alone = s.p99_alone;
    }
    worst->steps += s.steps;
    return bench_cluster_commit(c);
}

static double ratio(double part, double whole)
{
    return whole > 0 ? part / whole : 0;
}

/* Returns an object with the slowdown of the engines' steps. */
static json_t *slowed(const bench_slowed *s)
{
    return json_pack("{s:I, s:f, s:f, s:f, s:f, s:f, s:f}", "steps", (json_int_t)s->steps,
                     "step_seconds", s->mean, "step_before_seconds", s->mean_alone, "slowdown",
                     ratio(s->mean, s->mean_alone), "p99_seconds", s->p99, "p99_before_seconds",
                     s->p99_alone, "p99_slowdown", ratio(s->p99, s->p99_alone));
}

/* Returns the pause of the slowest rank in the last update or commit, in seconds. */
static double pause_of(const bench_cluster *c)
{
    return (double)bench_cluster_report(c).pause_ns * 1e-9;
}

/* Adds a row for the mean of the steps, and a row for their p99. */
static void add_slowed_rows(bench *b, const char *name, const bench_slowed *s)
{
    char row[320];
    snprintf(row, sizeof row, "%s: step beside the prefetch, mean", name);
    bench_row(b, row, s->mean, "s", s->mean_alone, 0);
    snprintf(row, sizeof row, "%s: step beside the prefetch, p99", name);
    bench_row(b, row, s->p99, "s", s->p99_alone, 0);
}

static void measure(bench *b, const bench_job *job, bench_cluster *c, int mode, int strategy,
                    double write_seconds)
{
    unsigned turns = bench_repeats(b);
    double *seconds = bench_alloc(b, 4 * (size_t)turns, sizeof *seconds);
    char name[256];
    const char *how;
    bool follows = job->cuda && !job->prefetch && mode != DRAY_MODE_DISK;
    double *limits = seconds + turns, *engines = limits + turns, *pauses = engines + turns;
    prefetched first = {0}, before = {0};
    dray_update_options update = DRAY_UPDATE_OPTIONS_INIT;
    update.mode = mode;
    update.strategy = strategy;
    update.no_verify = job->unverified;
    update.bucket_bytes = job->bucket;
    update.ctas = job->ctas;
    update.copy_engines = job->copy_engines;
    bench_doing(b, "%s: first update: plans, touches memory", job->model);
    update.nccl_bytes = job->nccl;
    bring_version(job, c, &update, &first);
    limit_of(job, c, &how);
    for (unsigned i = 0; i < turns; i++) {
        bench_doing(b, "%s, %s, %s: update %u of %u", job->model, modes[mode], strategies[strategy],
                    i + 1, turns);
        limits[i] = limit_of(job, c, &how);
        seconds[i] = follows ? bench_cluster_follow(c, &update) : 0;
        engines[i] = bring_version(job, c, &update, &before);
        seconds[i] = follows ? seconds[i] : engines[i];
        pauses[i] = pause_of(c);
    }
    bench_doing(b, "%s: checking every element", job->model);
    bench_cluster_check(c);
    json_t *more = describe(job, c, seconds, turns);
    json_object_set_new(more, "limit_by", json_string(how));
    if (job->decode > 0)
        json_object_set_new(more, "decoding", slowed(&before.slowed));
    json_object_set_new(more, "load_weights", json_boolean(job->load));
    if (job->prefetch)
        json_object_update_missing_new(
            more,
            json_pack("{s:f, s:I, s:I}", "prefetch_seconds", before.seconds, "prefetch_delta_bytes",
                      (json_int_t)before.report.delta_bytes, "prefetch_delta_covered_bytes",
                      (json_int_t)before.report.delta_covered_bytes));
    else if (job->cuda)
        add_gpu(job, more, engines, turns);
    double part = job->cuda ? 0.5 : 0.25, pause = bench_percentile(pauses, turns, part);
    json_object_set_new(more, "pause_seconds", json_real(pause));
    *job->found = (bench_found){.seconds = bench_percentile(seconds, turns, part),
                                .limit = bench_percentile(limits, turns, part),
                                .limit_by = how,
                                .write_seconds = write_seconds,
                                .pause = pause,
                                .report = bench_cluster_report(c)};
    bench_more(b, more);
    if (!job->quiet)
        bench_spread(b, seconds, turns);
    free(seconds);
    if (job->quiet)
        return;
    snprintf(name, sizeof name, "%s%s, %s -> %s, %s, %s%s%s", job->model, job->cut, job->from,
             job->to, modes[mode], strategies[strategy], job->unverified ? ", not verified" : "",
             job->prefetch ? ", commit" : "");
    bench_row(b, job->name ? job->name : name, job->found->seconds, "s", job->found->limit,
              job->target);
    if (job->decode > 0 && job->prefetch)
        add_slowed_rows(b, name, &before.slowed);
}

static void measure_mode(bench *b, const bench_job *job, bench_cluster_options *o, int mode)
{
    char folder[] = "/tmp/dray-bench-checkpoint-XXXXXX";
    double written = 0;
    if (mode == DRAY_MODE_DISK)
        o->checkpoint = bench_checkpoint_make(b, job, &o->from, folder, &written);
    bench_cluster *c = bench_cluster_start(b, o);
    for (int strategy = 0; strategy < STRATEGIES; strategy++)
        if (job->strategies & 1u << strategy)
            measure(b, job, c, mode, strategy, written);
    bench_cluster_stop(c);
    if (mode == DRAY_MODE_DISK)
        bench_checkpoint_remove(folder);
    o->checkpoint = NULL;
}

void bench_run(bench *b, const bench_job *given)
{
    bench_job job = *given;
    bench_found found = {0};
    char cut[64] = "";
    dray_model_config whole;
    job.found = job.found ? job.found : &found;
    bench_model(b, job.model, 0, &whole);
    bench_model(b, job.model, job.layers, &job.config);
    if (job.config.layers < whole.layers)
        snprintf(cut, sizeof cut, " (%lld of %lld layers)", (long long)job.config.layers,
                 (long long)whole.layers);
    job.cut = cut;
    bench_cluster_options o = {.engines = job.engines,
                               .tied = job.config.tied != 0,
                               .cuda = job.cuda,
                               .pinned = job.pinned,
                               .unsummed = job.unverified,
                               .every = job.every,
                               .prefetch_into = job.prefetch_into,
                               .decode = job.decode};
    bench_side_open(b, &job.config, job.from, &o.from);
    bench_side_open(b, &job.config, job.to, &o.to);
    if (job.cuda) {
        job.rates = bench_gpu_measure(b, &o);
        job.limit = job.prefetch ? bench_gpu_commit_limit(&o, &job.rates, &job.limit_by)
                                 : bench_gpu_limit(b, &o, &job.rates, &job.limit_by);
    } else {
        need_memory(b, &job, &o);
    }
    dray_layout *full = NULL;
    dray_error error;
    if (job.load &&
        dray_layout_full(&job.config, (dray_dtype)dray_layout_tensor(o.to.layouts[0], 0)->dtype,
                         DRAY_REGION_HOST, &full, &error))
        bench_die(b, "%s", error.message);
    o.load = full;
    o.bucket_bytes = job.bucket;
    o.staging = job.staging;
    for (int mode = 0; mode < MODES; mode++)
        if (job.modes & 1u << mode)
            measure_mode(b, &job, &o, mode);
    bench_side_close(&o.from);
    bench_side_close(&o.to);
    dray_layout_free(full);
}

int bench_weights(int argc, char **argv)
{
    static const cmd_usage usage = {
        .options = options, .check = check, .doc = doc, .also = &bench_update_usage};
    arguments a = {.modes = 1u << DRAY_MODE_TENSOR,
                   .strategies = 1u << DRAY_STRATEGY_DIRECT,
                   .engines = 1,
                   .verify = !OFF,
                   .prefetch = -1,
                   .suite = -1};
    cmd_parse(&usage, argc, argv, &a);
    bench *b = bench_new("weights", &a.of.settings);
    if (a.suite >= 0) {
        bench_targets(b);
        return bench_close(b);
    }
    bench_job job = {.model = a.of.model,
                     .from = a.of.from,
                     .to = a.of.to,
                     .layers = a.layers              ? a.layers
                               : a.of.settings.quick ? 1
                                                     : 0,
                     .modes = a.modes,
                     .strategies = a.strategies,
                     .unverified = a.verify == OFF,
                     .bucket = (uint64_t)a.bucket,
                     .nccl = (uint64_t)a.nccl,
                     .every = (uint64_t)a.every,
                     .within = (double)a.within_ms * 1e-3,
                     .staging = a.memory == OFFLOADED ? STAGING : 0,
                     .cuda = a.memory == CUDA,
                     .pinned = a.origin == PINNED,
                     .prefetch = a.prefetch >= 0,
                     .prefetch_into = a.prefetch == PINNED ? DRAY_REGION_PINNED : 0,
                     .decode = (double)a.decode_ms * 1e-3,
                     .ctas = (uint32_t)a.ctas,
                     .copy_engines = a.copy_engines,
                     .engines = (uint32_t)a.engines};
    bench_run(b, &job);
    return bench_close(b);
}
