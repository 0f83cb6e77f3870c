/* dray bench disk: writing and reading checkpoints, in turns with direct I/O of as many bytes in
 * the same folder by fio, or dd where there is no fio: shared disks change their speed by the
 * minute. */
#include "cmd/bench.h"
#include "cmd/bench_model.h"
#include "cmd/bench_values.h"

#include <dray/weights.h>
#include <fcntl.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

typedef struct arguments {
    bench_settings settings;
    const char *model, *folder;
    int64_t megabytes;
} arguments;

typedef struct disk_bench {
    bench *b;
    char folder[256], checkpoint[300], plain[300];
    dray_layout *layout, *shard;
    dray_region *region, *shard_region;
    double bytes, shard_bytes;
    bool fio;
} disk_bench;

static void must(const disk_bench *d, int status, const dray_error *error)
{
    if (status)
        bench_die(d->b, "%s", error->message);
}

/* ---- the limit ------------------------------------------------------------------------------- */

/* Bytes a second that fio says. */
static double run_fio(const disk_bench *d, bool write, const char *path)
{
    char command[1200], text[65536];
    snprintf(command, sizeof command,
             "fio --name=limit --filename='%s' --size=%.0f --rw=%s --bs=4M --direct=1 "
             "--ioengine=libaio --iodepth=8 %s --output-format=json 2>/dev/null",
             path, d->bytes, write ? "write" : "read", write ? "--end_fsync=1" : "--readonly");
    FILE *pipe = popen(command, "r");
    size_t n = pipe ? fread(text, 1, sizeof text - 1, pipe) : 0;
    int status = pipe ? pclose(pipe) : -1;
    text[n] = 0;
    const char *begin = strchr(text, '{');
    json_t *said = begin ? json_loads(begin, JSON_DISABLE_EOF_CHECK, NULL) : NULL;
    json_t *side =
        json_object_get(json_array_get(json_object_get(said, "jobs"), 0), write ? "write" : "read");
    double rate = json_number_value(json_object_get(side, "bw_bytes"));
    json_decref(said);
    if (status || rate <= 0)
        bench_die(d->b, "fio ended with %d", status);
    return rate;
}

static double run_dd(const disk_bench *d, bool write, const char *path)
{
    char command[1000];
    double blocks = d->bytes / (4 << 20), begin = bench_now();
    if (write)
        snprintf(command, sizeof command,
                 "dd if=/dev/zero of='%s' bs=4M count=%.0f oflag=direct conv=fsync 2>/dev/null",
                 path, blocks);
    else
        snprintf(command, sizeof command,
                 "dd if='%s' of=/dev/null bs=4M count=%.0f iflag=direct 2>/dev/null", path, blocks);
    if (system(command))
        bench_die(d->b, "dd could not use %s directly", d->folder);
    return d->bytes / (bench_now() - begin);
}

/* A fresh file each time, as a checkpoint's are. */
static double limit(const disk_bench *d, bool write)
{
    if (write)
        unlink(d->plain);
    return d->fio ? run_fio(d, write, d->plain) : run_dd(d, write, d->plain);
}

/* ---- what is measured ------------------------------------------------------------------------ */

static double write_once(const disk_bench *d)
{
    dray_error error;
    char command[400];
    snprintf(command, sizeof command, "rm -rf '%s'", d->checkpoint);
    if (system(command))
        bench_die(d->b, "cannot remove %s", d->checkpoint);
    double begin = bench_now();
    must(d, dray_checkpoint_write(d->checkpoint, d->layout, &d->region, NULL, &error), &error);
    return d->bytes / (bench_now() - begin);
}

static double read_once(const disk_bench *d, const dray_layout *layout, dray_region *region,
                        double bytes)
{
    dray_error error;
    double begin = bench_now();
    must(d, dray_checkpoint_read(d->checkpoint, layout, &region, &error), &error);
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
    dray_error error;
    dray_model_config config;
    dray_engine_spec spec = DRAY_ENGINE_SPEC_INIT;
    double most = bench_quick(d->b) ? 64e6 : (double)a->megabytes * 1e6;
    const char *model = a->model ? a->model : bench_quick(d->b) ? "qwen2.5-1.5b" : "qwen2.5-7b";
    bench_model(d->b, model, bench_layers_within(d->b, model, most), &config);
    must(d, dray_layout_full(&config, DRAY_BF16, DRAY_REGION_HOST, &d->layout, &error), &error);
    must(d, dray_regions_for_layout(d->layout, 1, &d->region, &error), &error);
    bench_fill(d->layout, &d->region, false);
    spec.tp = 4;
    spec.tp_rank = 1;
    spec.dtype = DRAY_BF16;
    must(d, dray_layout_engine(&config, &spec, &d->shard, &error), &error);
    must(d, dray_regions_for_layout(d->shard, 1, &d->shard_region, &error), &error);
    bench_fill(d->shard, &d->shard_region, false); /* touched */
    d->bytes = bytes_of(d->region);
    d->shard_bytes = bytes_of(d->shard_region);
    snprintf(d->folder, sizeof d->folder, "%.200s/dray-bench-XXXXXX",
             a->folder ? a->folder : "/tmp");
    if (!mkdtemp(d->folder))
        bench_die(d->b, "cannot make %s", d->folder);
    snprintf(d->checkpoint, sizeof d->checkpoint, "%s/checkpoint", d->folder);
    snprintf(d->plain, sizeof d->plain, "%s/plain", d->folder);
    d->fio = system("fio --version >/dev/null 2>&1") == 0;
}

static void end(disk_bench *d)
{
    char command[400];
    snprintf(command, sizeof command, "rm -rf '%s'", d->folder);
    if (system(command))
        fprintf(stderr, "%s was left behind\n", d->folder);
    dray_region_free(d->region);
    dray_region_free(d->shard_region);
    dray_layout_free(d->layout);
    dray_layout_free(d->shard);
}

static error_t parse(int key, char *text, struct argp_state *state)
{
    arguments *a = state->input;
    switch (key) {
    case ARGP_KEY_INIT:
        a->megabytes = 3000;
        state->child_inputs[0] = &a->settings;
        return 0;
    case 'm':
        a->model = text;
        return 0;
    case 'd':
        a->folder = text;
        return 0;
    case 'M':
        a->megabytes = cmd_number(state, "--megabytes", text, 16, 1000000000);
        return 0;
    default:
        return ARGP_ERR_UNKNOWN;
    }
}

int bench_disk(int argc, char **argv)
{
    static const struct argp_option options[] = {
        {"model", 'm', "MODEL", 0, "A name of the built-in table, or the path of a config.json", 1},
        {"folder", 'd', "DIR", 0, "Where the disk is that is measured (/tmp)", 1},
        {"megabytes", 'M', "N", 0, "As many layers of the model as have at most so much (3000)", 1},
        {0}};
    static const struct argp_child children[] = {{&bench_argp, 0, "Options of every part:", 20},
                                                 {0}};
    static const struct argp argp = {
        options,
        parse,
        NULL,
        "Measure writing and reading a checkpoint, and reading an engine rank's part of it, each "
        "in "
        "turns with fio (or dd) writing and reading as many bytes past the page cache.\v"
        "Sums are made and compared on the way. Targets: 0.9 of the plain disk, both ways.",
        children,
        NULL,
        NULL};
    arguments a = {0};
    disk_bench d = {0};
    cmd_parse(&argp, argc, argv, &a);
    d.b = bench_new("disk", &a.settings);
    prepare(&d, &a);
    measure(&d);
    end(&d);
    return bench_close(d.b);
}
