/* dray bench disk: writing and reading checkpoints. The limit is direct I/O of as many bytes in the
 * same folder by fio, or by dd where fio is not installed. Both are interleaved, because the speed
 * of a shared disk changes from minute to minute. */
#include "bench/parts/bench_model.h"
#include "bench/weights/bench_values.h"
#include "cmd/bench.h"

#include <dray/weights.h>
#include <errno.h>
#include <fcntl.h>
#include <ftw.h>
#include <spawn.h>
#include <stdarg.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

typedef struct arguments {
    bench_settings settings;
    const char *model, *folder;
    int64_t megabytes;
} arguments;

typedef struct disk_bench {
    bench *b;
    char *folder, *checkpoint, *plain;
    dray_layout *layout, *shard;
    dray_region *region, *shard_region;
    double bytes, shard_bytes;
    bool fio;
} disk_bench;

static int remove_entry(const char *path, const struct stat *st, int kind, struct FTW *ftw)
{
    (void)st, (void)kind, (void)ftw;
    return remove(path);
}

static int remove_tree(const char *path)
{
    return nftw(path, remove_entry, 16, FTW_DEPTH | FTW_PHYS) && errno != ENOENT;
}

static const char *left_behind;

static void remove_left(void)
{
    if (left_behind && remove_tree(left_behind))
        fprintf(stderr, "%s was left behind\n", left_behind);
    left_behind = NULL;
}

/* ---- the limit ------------------------------------------------------------------------------- */

/* Runs a program by its name, without a shell. Its output goes to `text`, if that is not NULL.
 * Returns its exit status, or -1 when it did not run or was killed. */
static int run_program(char **words, char *text, size_t capacity)
{
    int ends[2], status = -1;
    pid_t child;
    posix_spawn_file_actions_t actions;
    if (pipe2(ends, O_CLOEXEC))
        return -1;
    posix_spawn_file_actions_init(&actions);
    posix_spawn_file_actions_adddup2(&actions, ends[1], STDOUT_FILENO);
    posix_spawn_file_actions_addopen(&actions, STDERR_FILENO, "/dev/null", O_WRONLY, 0);
    int failed = posix_spawnp(&child, words[0], &actions, NULL, words, environ);
    posix_spawn_file_actions_destroy(&actions);
    close(ends[1]);
    char rest[4096] = {0};
    size_t used = 0;
    for (ssize_t n = 1; !failed && n > 0;) {
        bool keeps = used + 1 < capacity;
        n = read(ends[0], keeps ? text + used : rest, keeps ? capacity - used - 1 : sizeof rest);
        used += keeps && n > 0 ? (size_t)n : 0;
    }
    if (capacity)
        text[used] = 0;
    close(ends[0]);
    if (failed || waitpid(child, &status, 0) != child || !WIFEXITED(status))
        return -1;
    return WEXITSTATUS(status);
}

/* Returns an argument of a program, such as "--size=4096". The caller frees it. */
static char *word(const disk_bench *d, const char *format, ...)
{
    char *made;
    va_list values;
    va_start(values, format);
    if (vasprintf(&made, format, values) < 0)
        bench_die(d->b, "out of memory");
    va_end(values);
    return made;
}

/* Returns the bytes/s that fio reports. */
static double run_fio(const disk_bench *d, bool write, const char *path)
{
    char text[65536];
    char *named = word(d, "--filename=%s", path), *sized = word(d, "--size=%.0f", d->bytes);
    char *words[] = {"fio",
                     "--name=limit",
                     named,
                     sized,
                     write ? "--rw=write" : "--rw=read",
                     "--bs=4M",
                     "--direct=1",
                     "--ioengine=libaio",
                     "--iodepth=8",
                     write ? "--end_fsync=1" : "--readonly",
                     "--output-format=json",
                     NULL};
    int status = run_program(words, text, sizeof text);
    const char *begin = status ? NULL : strchr(text, '{');
    json_t *said = begin ? json_loads(begin, JSON_DISABLE_EOF_CHECK, NULL) : NULL;
    json_t *side =
        json_object_get(json_array_get(json_object_get(said, "jobs"), 0), write ? "write" : "read");
    double rate = json_number_value(json_object_get(side, "bw_bytes"));
    json_decref(said);
    free(named);
    free(sized);
    if (status || rate <= 0)
        bench_die(d->b, "fio ended with %d", status);
    return rate;
}

static double run_dd(const disk_bench *d, bool write, const char *path)
{
    double begin = bench_now();
    char *from = word(d, "if=%s", write ? "/dev/zero" : path);
    char *to = word(d, "of=%s", write ? path : "/dev/null");
    char *blocks = word(d, "count=%.0f", d->bytes / (4 << 20));
    char *words[] = {"dd",
                     from,
                     to,
                     blocks,
                     "bs=4M",
                     write ? "oflag=direct" : "iflag=direct",
                     write ? "conv=fsync" : NULL,
                     NULL};
    if (run_program(words, NULL, 0))
        bench_die(d->b, "dd could not use %s directly", d->folder);
    free(from);
    free(to);
    free(blocks);
    return d->bytes / (bench_now() - begin);
}

/* Returns the bytes/s of direct I/O. Writing uses a fresh file each time, as checkpoints do. */
static double limit(const disk_bench *d, bool write)
{
    if (write)
        unlink(d->plain);
    return d->fio ? run_fio(d, write, d->plain) : run_dd(d, write, d->plain);
}

/* ---- the measurements ------------------------------------------------------------------------ */

static double write_once(const disk_bench *d)
{
    if (remove_tree(d->checkpoint))
        bench_die(d->b, "cannot remove %s", d->checkpoint);
    double begin = bench_now();
    BENCH_MUST(d->b, dray_checkpoint_write(d->checkpoint, d->layout, &d->region, NULL, error));
    return d->bytes / (bench_now() - begin);
}

static double read_once(const disk_bench *d, const dray_layout *layout, dray_region *region,
                        double bytes)
{
    double begin = bench_now();
    BENCH_MUST(d->b, dray_checkpoint_read(d->checkpoint, layout, &region, error));
    return bytes / (bench_now() - begin);
}

static void measure(disk_bench *d)
{
    enum { FIGURES = 5, MOST = 100 };
    double values[FIGURES][MOST];
    unsigned repeats = bench_repeats(d->b) < MOST ? bench_repeats(d->b) : MOST;
    for (unsigned i = 0; i < repeats; i++) {
        bench_doing(d->b, "run %u of %u", i + 1, repeats);
        values[0][i] = limit(d, true);
        values[1][i] = write_once(d);
        values[2][i] = limit(d, false);
        values[3][i] = read_once(d, d->layout, d->region, d->bytes);
        values[4][i] = read_once(d, d->shard, d->shard_region, d->shard_bytes);
    }
    for (int f = 0; f < FIGURES; f++)
        values[f][0] = bench_percentile(values[f], repeats, 0.5);
    bench_row(d->b, "write a checkpoint", values[1][0], "B/s", values[0][0], 0.9);
    bench_row(d->b, "read it", values[3][0], "B/s", values[2][0], 0.9);
    bench_row(d->b, "read a quarter (TP 4)", values[4][0], "B/s", values[2][0], 0);
}

/* ---- the command ----------------------------------------------------------------------------- */

static double bytes_of(const dray_region *region)
{
    return (double)dray_region_bytes(region);
}

static void prepare(disk_bench *d, const arguments *a)
{
    dray_model_config config;
    dray_engine_spec spec = DRAY_ENGINE_SPEC_INIT;
    double most = bench_quick(d->b) ? 64e6 : (double)a->megabytes * 1e6;
    const char *model = a->model ? a->model : bench_quick(d->b) ? "qwen2.5-1.5b" : "qwen2.5-7b";
    bench_model(d->b, model, bench_layers_within(d->b, model, most), &config);
    BENCH_MUST(d->b, dray_layout_full(&config, DRAY_BF16, DRAY_REGION_HOST, &d->layout, error));
    BENCH_MUST(d->b, dray_regions_for_layout(d->layout, 1, &d->region, error));
    bench_fill(d->layout, &d->region, false);
    spec.tp = 4;
    spec.tp_rank = 1;
    spec.dtype = DRAY_BF16;
    BENCH_MUST(d->b, dray_layout_engine(&config, &spec, &d->shard, error));
    BENCH_MUST(d->b, dray_regions_for_layout(d->shard, 1, &d->shard_region, error));
    bench_fill(d->shard, &d->shard_region, false); /* touches its pages */
    d->bytes = bytes_of(d->region);
    d->shard_bytes = bytes_of(d->shard_region);
    d->folder = word(d, "%s/dray-bench-XXXXXX", a->folder ? a->folder : "/tmp");
    if (!mkdtemp(d->folder))
        bench_die(d->b, "cannot make %s: %s", d->folder, strerror(errno));
    left_behind = d->folder; /* removed at exit, whatever the cause */
    atexit(remove_left);
    d->checkpoint = word(d, "%s/checkpoint", d->folder);
    d->plain = word(d, "%s/plain", d->folder);
    d->fio = run_program((char *[]){"fio", "--version", NULL}, NULL, 0) == 0;
}

static void end(disk_bench *d)
{
    remove_left();
    free(d->folder);
    free(d->checkpoint);
    free(d->plain);
    dray_region_free(d->region);
    dray_region_free(d->shard_region);
    dray_layout_free(d->layout);
    dray_layout_free(d->shard);
}

int bench_disk(int argc, char **argv)
{
    static const cmd_option options[] = {
        CMD_GROUP(1, NULL),
        CMD_TEXT(arguments, model, "model", 'm', "MODEL",
                 "A name of the built-in table, or the path of a config.json"),
        CMD_TEXT(arguments, folder, "folder", 'd', "DIR",
                 "Where the disk is that is measured (/tmp)"),
        CMD_NUMBER(arguments, megabytes, "megabytes", 'M', 16, 1000000000, "N",
                   "As many layers of the model as have at most so much (3000)"),
        CMD_END};
    static const cmd_usage usage = {
        .options = options,
        .also = &bench_usage,
        .doc = "Measure writing and reading a checkpoint, and reading an engine rank's part of it, "
               "each in turns with fio (or dd) writing and reading as many bytes past the page "
               "cache.\vSums are made and compared on the way. Targets: 0.9 of the plain disk, "
               "both ways."};
    arguments a = {.megabytes = 3000};
    disk_bench d = {0};
    cmd_parse(&usage, argc, argv, &a);
    d.b = bench_new("disk", &a.settings);
    prepare(&d, &a);
    measure(&d);
    end(&d);
    return bench_close(d.b);
}
