/* Models that are cut down to the machine's memory, and the sides of an update (bench_model.h). */
#include "bench/parts/bench_model.h"
#include "bench/weights/bench_gpu.h"
#include "bench/weights/bench_hosts.h"

#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { VOCABULARY_STEP = 1024 }; /* divisible by any sensible number of ranks, padded or not */

static double checkpoint_bytes(bench *b, const dray_model_config *config)
{
    dray_layout *layout;
    BENCH_MUST(b, dray_layout_full(config, DRAY_DTYPE_NONE, DRAY_REGION_HOST, &layout, error));
    double bytes = (double)dray_layout_bytes(layout);
    dray_layout_free(layout);
    return bytes;
}

void bench_model(bench *b, const char *name, int64_t layers, dray_model_config *out)
{
    BENCH_MUST(b, dray_model_config_load(name, out, error));
    if (layers <= 0 || layers >= out->layers)
        return;
    int64_t vocabulary = out->vocab_size / out->layers * layers;
    vocabulary = (vocabulary + VOCABULARY_STEP - 1) / VOCABULARY_STEP * VOCABULARY_STEP;
    out->vocab_size = vocabulary < out->vocab_size ? vocabulary : out->vocab_size;
    out->layers = layers;
}

int64_t bench_layers_within(bench *b, const char *name, double bytes)
{
    dray_model_config config;
    bench_model(b, name, 0, &config);
    for (int64_t layers = config.layers; layers > 1; layers--) {
        bench_model(b, name, layers, &config);
        if (checkpoint_bytes(b, &config) <= bytes)
            return layers;
    }
    return 1;
}

static void read_hosts(bench *b, char *text, bench_side *out)
{
    char *rest = text;
    for (char *host = strsep(&rest, ","); host; host = strsep(&rest, ",")) {
        out->hosts = reallocarray(out->hosts, out->host_count + 1, sizeof *out->hosts);
        if (!out->hosts || !(out->hosts[out->host_count++] = strdup(host)))
            bench_die(b, "out of memory");
    }
    bench_hosts_check(b, out->hosts, out->host_count);
}

void bench_side_open(bench *b, const dray_model_config *model, const char *spec, bench_side *out)
{
    char *own = strdup(spec);
    dray_error error;
    if (!own)
        bench_die(b, "out of memory");
    *out = (bench_side){0};
    char *rest = own;
    strsep(&rest, "@");
    for (char *where = strsep(&rest, "@"); where; where = strsep(&rest, "@")) {
        bool gpus = *where >= '0' && *where <= '9';
        if (gpus ? out->gpu_count : out->host_count)
            bench_refuse(b, "%s: GPUs once and hosts once, as in fsdp:2@0-1@~name", spec);
        if (gpus)
            out->gpus = bench_gpus_parse(b, where, &out->gpu_count);
        else
            read_hosts(b, where, out);
    }
    if (dray_layouts_from_spec(model, own, &out->layouts, &out->count, &error))
        bench_refuse(b, "%s", error.message);
    free(own);
}

void bench_side_close(bench_side *side)
{
    for (uint32_t i = 0; i < side->count; i++)
        dray_layout_free(side->layouts[i]);
    for (uint32_t i = 0; i < side->host_count; i++)
        free(side->hosts[i]);
    free(side->layouts);
    free(side->hosts);
    free(side->gpus);
    *side = (bench_side){0};
}

double bench_side_bytes(const bench_side *side)
{
    double bytes = 0;
    for (uint32_t i = 0; i < side->count; i++)
        for (uint32_t r = 0; r < dray_layout_region_count(side->layouts[i]); r++)
            bytes += (double)dray_layout_region(side->layouts[i], r)->bytes;
    return bytes;
}

double bench_memory(void)
{
    char line[128];
    double kilobytes = 0;
    FILE *file = fopen("/proc/meminfo", "re");
    while (file && fgets(line, sizeof line, file))
        if (sscanf(line, "MemAvailable: %lf", &kilobytes) == 1)
            break;
    if (file)
        fclose(file);
    return kilobytes * 1024;
}
