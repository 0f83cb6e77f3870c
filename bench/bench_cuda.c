/* Measures the GPU mover: on one GPU, from one GPU to another, from half of all GPUs to the other
 * half, and from all GPUs to each; by kernels and by copy engines, in rows of several widths,
 * converted, quantised, and with checksums. The limits are single large copies by a copy engine in
 * the same run, on one GPU and between two. */
#include "bench.h"

#include "mover/cuda/cuda.h"

#include <poll.h>
#include <stdlib.h>
#include <string.h>

enum { MOST_GPUS = 8, MOST_ITEMS = 64 << 10, TIMES = 4 };

typedef struct one {
    dray__cuda_device *device;
    CUdeviceptr from, to;
} one;

static struct {
    bench *b;
    const dray__cuda *cuda;
    one gpus[MOST_GPUS];
    int count;
    uint64_t bytes; /* the bytes that a case reads on each GPU */
    dray_layout *layout;
    dray__cuda_item *items;
    uint32_t blocks;
} at;

static void fine(int rc, const dray_error *e)
{
    if (rc)
        bench_die(at.b, "%s", e->message);
}

static void cuda(CUresult result)
{
    if (result)
        bench_die(at.b, "the CUDA driver says %d", result);
}

/* ---- GPUs ------------------------------------------------------------------------------------ */

static void fill(CUdeviceptr to, uint64_t bytes, uint64_t seed)
{
    enum { PART = 32 << 20 };
    uint64_t *random = malloc(PART), x = seed * 0x9E3779B97F4A7C15u + 1;
    if (!random)
        bench_die(at.b, "out of memory");
    for (size_t i = 0; i < PART / sizeof *random; i++) { /* xorshift64 */
        x ^= x << 13, x ^= x >> 7, x ^= x << 17;
        /* The bits are those of two f32 or four bf16 between 2^-15 and 2, which are finite as
         * weights are. */
        random[i] = (x & 0x87FF87FF87FF87FFu) | 0x3800380038003800u;
    }
    uint64_t first = bytes < PART ? bytes : PART;
    cuda(at.cuda->cuMemcpyHtoD(to, random, first));
    for (uint64_t i = first; i < bytes; i += PART)
        cuda(at.cuda->cuMemcpyDtoD(to + i, to, bytes - i < PART ? bytes - i : PART));
    free(random);
}

static void open_gpus(void)
{
    dray_error e;
    at.cuda = dray__cuda_get(&e);
    if (!at.cuda) {
        bench_skip(at.b, "GPUs", e.message);
        exit(bench_close(at.b));
    }
    at.count = dray__cuda_device_count() < MOST_GPUS ? dray__cuda_device_count() : MOST_GPUS;
    for (int i = 0; i < at.count; i++) {
        one *g = &at.gpus[i];
        fine(dray__cuda_device_at(i, &g->device, &e), &e);
        fine(dray__cuda_enter(g->device, &e), &e);
        cuda(at.cuda->cuMemAlloc(&g->from, 2 * at.bytes + MOST_GPUS * 4096));
        cuda(at.cuda->cuMemAlloc(&g->to, 2 * at.bytes + MOST_GPUS * 4096));
        fill(g->from, 2 * at.bytes + MOST_GPUS * 4096, (uint64_t)i + 1);
        fill(g->to, 2 * at.bytes, (uint64_t)i + 100);
        dray__cuda_leave();
    }
    for (int i = 0; i < at.count; i++)
        for (int k = 0; k < at.count; k++) {
            if (i == k)
                continue;
            fine(dray__cuda_enter(at.gpus[i].device, &e), &e);
            cuda(at.cuda->cuCtxEnablePeerAccess(at.gpus[k].device->context, 0));
            dray__cuda_leave();
        }
}

/* ---- jobs ------------------------------------------------------------------------------------ */

/* A case: the jobs of the GPUs that work at once. */
typedef struct work {
    dray__cuda_job *jobs[MOST_GPUS];
    int count;
    uint64_t bytes; /* of one GPU */
} work;

static void make(work *w, int gpu, uint64_t items, const dray__cuda_job_options *given)
{
    dray__cuda_job_options options = *given;
    dray_error e;
    options.ctas = at.blocks;
    fine(dray__cuda_job_new(at.gpus[gpu].device, at.layout, at.items, items, &options,
                            &w->jobs[w->count], &e),
         &e);
    w->count++;
}

/* Returns the seconds of the slowest GPU, by its own clock. In a real job each GPU has a process of
 * its own, so that the time between the starts of two GPUs does not count. */
static double run(void *state)
{
    const work *w = state;
    int64_t longest = 0;
    dray_error e;
    for (int i = 0; i < w->count; i++)
        fine(dray__cuda_job_start(w->jobs[i], NULL, 0, &e), &e);
    for (int i = 0; i < w->count; i++) {
        int rc;
        while ((rc = dray__cuda_job_poll(w->jobs[i], &e)) == DRAY_EAGAIN) {
            struct pollfd p = {.fd = dray__cuda_job_fd(w->jobs[i]), .events = POLLIN};
            poll(&p, 1, 1000);
        }
        fine(rc, &e);
        dray__cuda_job_times times;
        dray__cuda_job_times_of(w->jobs[i], &times);
        longest = times.device_ns > longest ? times.device_ns : longest;
    }
    return (double)longest * 1e-9;
}

/* Returns the bytes/s of one GPU, and closes the jobs. */
static double rate(work *w)
{
    double seconds = bench_median_of(at.b, run, w);
    for (int i = 0; i < w->count; i++)
        dray__cuda_job_close(w->jobs[i]);
    w->count = 0;
    return (double)w->bytes / seconds;
}

/* ---- shapes ---------------------------------------------------------------------------------- */

/* Returns a copy of rows of `row` bytes, as many as fill `bytes`. They are every second row of the
 * source, or with `dense` all of its rows. */
static dray__cuda_item rows(CUdeviceptr from, CUdeviceptr to, uint64_t bytes, int64_t row,
                            bool dense)
{
    return (dray__cuda_item){.copy = {.ndim = 2,
                                      .source_dtype = DRAY_BF16,
                                      .destination_dtype = DRAY_BF16,
                                      .extent = {(int64_t)bytes / row, row / 2},
                                      .source_stride = {dense ? row : 2 * row, 2},
                                      .destination_stride = {row, 2}},
                             .source_base = from,
                             .destination_base = to};
}

static double one_rate(int gpu, const dray__cuda_item *item, const dray__cuda_job_options *options)
{
    work w = {.bytes = 1};
    for (uint32_t d = 0; d < item->copy.ndim; d++)
        w.bytes *= (uint64_t)item->copy.extent[d];
    w.bytes *= dray_dtype_size((dray_dtype)item->copy.source_dtype);
    at.items[0] = *item;
    make(&w, gpu, 1, options);
    return rate(&w);
}

static const dray__cuda_job_options by_kernel = {.engine_bytes = UINT64_MAX};
static const dray__cuda_job_options by_engine = {.engine_bytes = 1};

static double limit_of(int gpu, CUdeviceptr from, CUdeviceptr to)
{
    dray__cuda_item item = rows(from, to, at.bytes, 16384, true);
    return one_rate(gpu, &item, &by_engine);
}

static void row(const char *what, const char *how, double value, double limit, double target)
{
    char name[128];
    snprintf(name, sizeof name, "%s%s%s", what, *how ? ", " : "", how);
    bench_row(at.b, name, value, "B/s", limit, target);
}

/* Measures one GPU's kernel on rows of several widths. */
static void widths(int gpu, CUdeviceptr from, CUdeviceptr to, const char *what, double limit)
{
    static const int64_t sizes[] = {192, 384, 768, 2560, 4096, 13824, 16384};
    for (size_t i = 0; i < sizeof sizes / sizeof *sizes; i++) {
        char how[64];
        dray__cuda_item item = rows(from, to, at.bytes, sizes[i], false);
        snprintf(how, sizeof how, "rows of %lld B", (long long)sizes[i]);
        row(what, how, one_rate(gpu, &item, &by_kernel), limit, 0.85);
    }
}

static void summed(int gpu, CUdeviceptr from, CUdeviceptr to, const char *what, double limit)
{
    static const struct {
        const char *name;
        uint32_t sums;
    } kinds[] = {{"sums read back", DRAY__CUDA_SUM_BACK},
                 {"sums written", DRAY__CUDA_SUM_WRITTEN},
                 {"all sums", 7}};
    for (size_t i = 0; i < sizeof kinds / sizeof *kinds; i++) {
        dray__cuda_item item = rows(from, to, at.bytes, 2560, false);
        dray__cuda_job_options options = {.engine_bytes = UINT64_MAX, .sums = kinds[i].sums};
        row(what, kinds[i].name, one_rate(gpu, &item, &options), limit, 0.85);
    }
}

/* Measures conversions, in bytes read a second. `limit` is the rate of a plain copy. */
static void converted(int gpu, CUdeviceptr from, CUdeviceptr to, const char *what, double limit)
{
    dray__cuda_item item = rows(from, to, at.bytes, 8192, true);
    item.copy.source_dtype = DRAY_F32;
    item.copy.extent[1] /= 2;
    item.copy.source_stride[1] = 4;
    item.copy.destination_stride[0] /= 2;
    row(what, "f32 -> bf16", one_rate(gpu, &item, &by_kernel), limit, 0.85);
    dray__cuda_job_options all = {.engine_bytes = UINT64_MAX, .sums = 7};
    row(what, "f32 -> bf16, all sums", one_rate(gpu, &item, &all), limit, 0.85);
    item.copy.destination_dtype = DRAY_F16;
    row(what, "f32 -> f16", one_rate(gpu, &item, &by_kernel), limit, 0.85);
    item = rows(from, to, at.bytes, 8192, true);
    item.copy.destination_stride[1] = 2 * item.copy.extent[0];
    item.copy.destination_stride[0] = 2;
    row(what, "turned over", one_rate(gpu, &item, &by_kernel), limit, 0.5);
    item = rows(from + 2, to, at.bytes / 2, 8192, true);
    row(what, "rows that begin 2 B beside words", one_rate(gpu, &item, &by_kernel), limit, 0.25);
}

static void quantised(int gpu, CUdeviceptr from, CUdeviceptr to, const char *what, double limit)
{
    int64_t columns = 8192, lines = (int64_t)at.bytes / 2 / columns;
    dray__cuda_quant q = {.kind = DRAY_TRANSFORM_QUANTISE,
                          .dtype = DRAY_BF16,
                          .quant_dtype = DRAY_F8E4M3,
                          .ndim = 2,
                          .extent = {lines, columns},
                          .cell = {128, 128},
                          .source = from,
                          .destination = to,
                          .source_stride = {2 * columns, 2},
                          .destination_stride = {columns, 1},
                          .scales = to + at.bytes,
                          .scale_stride = {columns / 128 * 4, 4}};
    dray__cuda_job_options options = {.quants = &q, .quant_count = 1};
    work w = {.bytes = at.bytes};
    make(&w, gpu, 0, &options);
    row(what, "bf16 -> FP8 in blocks", rate(&w), limit, 0.85);
    options.sums = 27; /* all but those of what is read back */
    make(&w, gpu, 0, &options);
    row(what, "bf16 -> FP8 in blocks, sums of an update", rate(&w), limit, 0.85);
    q.kind = DRAY_TRANSFORM_DEQUANTISE;
    q.source = to, q.destination = from;
    q.source_stride[0] = columns, q.source_stride[1] = 1;
    q.destination_stride[0] = 2 * columns, q.destination_stride[1] = 2;
    options.sums = 0;
    make(&w, gpu, 0, &options);
    row(what, "FP8 in blocks -> bf16, bytes written", rate(&w), limit, 0.85);
    options.sums = 15;
    make(&w, gpu, 0, &options);
    row(what, "FP8 in blocks -> bf16, all sums, bytes written", rate(&w), limit, 0.85);
}

/* Measures a slot of NCCL. It holds boxes of 15 cells, which the publisher's GPU quantises, and
 * which the engine's GPU copies into its blocks. */
static void slots(int gpu, CUdeviceptr from, CUdeviceptr to, const char *what, double limit)
{
    enum { BOXES = 256, COLUMNS = 15 * 128, BOX = 128 * COLUMNS + 64 };
    dray__cuda_quant boxes[BOXES];
    uint64_t count = at.bytes / (2 * BOX) < BOXES ? at.bytes / (2 * BOX) : BOXES;
    for (uint64_t i = 0; i < count; i++) {
        boxes[i] = (dray__cuda_quant){.kind = DRAY_TRANSFORM_QUANTISE,
                                      .dtype = DRAY_BF16,
                                      .quant_dtype = DRAY_F8E4M3,
                                      .ndim = 2,
                                      .extent = {128, COLUMNS},
                                      .cell = {128, 128},
                                      .source = from + i * 128 * COLUMNS * 2,
                                      .destination = to + i * BOX,
                                      .source_stride = {COLUMNS * 2, 2},
                                      .destination_stride = {COLUMNS, 1},
                                      .scales = to + i * BOX + 128 * COLUMNS,
                                      .scale_stride = {60, 4}};
        at.items[2 * i] = (dray__cuda_item){.copy = {.ndim = 2,
                                                     .source_dtype = DRAY_F8E4M3,
                                                     .destination_dtype = DRAY_F8E4M3,
                                                     .extent = {128, COLUMNS},
                                                     .source_offset = i * BOX,
                                                     .source_stride = {COLUMNS, 1},
                                                     .destination_offset = i * 128 * COLUMNS,
                                                     .destination_stride = {COLUMNS, 1}},
                                            .source_base = from,
                                            .destination_base = to};
        at.items[2 * i + 1] = at.items[2 * i];
        dray_copy *scales = &at.items[2 * i + 1].copy;
        scales->source_dtype = scales->destination_dtype = DRAY_F32;
        scales->extent[0] = 1;
        scales->extent[1] = 15;
        scales->source_offset += 128 * COLUMNS;
        scales->destination_offset = count * BOX + i * 64;
        scales->source_stride[1] = scales->destination_stride[1] = 4;
    }
    dray__cuda_job_options options = {.quants = boxes, .quant_count = count, .sums = 11};
    work w = {.bytes = count * 128 * COLUMNS * 2};
    make(&w, gpu, 0, &options);
    row(what, "a slot of FP8 quantised, bytes read", rate(&w), limit, 0.3);
    options = (dray__cuda_job_options){.sums = 7};
    w.bytes /= 2;
    make(&w, gpu, 2 * count, &options);
    row(what, "a slot of FP8 put into place", rate(&w), limit, 0.3);
}

/* Measures quantisation in groups of a row's elements, with all sums that an update takes. */
static void grouped(int gpu, CUdeviceptr from, CUdeviceptr to, const char *what, double limit)
{
    static const struct {
        const char *name;
        int32_t kind;
        int64_t group, size, elements; /* of the written elements: their size in bytes, and the
                                          number of values in each */
        int64_t scale;                 /* bytes of a scale */
    } kinds[] = {{"bf16 -> MXFP8, all sums", DRAY_QUANT_MXFP8, 32, 1, 1, 1},
                 {"bf16 -> MXFP4, all sums", DRAY_QUANT_MXFP4, 32, 1, 2, 1},
                 {"bf16 -> NVFP4, all sums", DRAY_QUANT_NVFP4, 16, 1, 2, 1},
                 {"bf16 -> INT4, all sums", DRAY_QUANT_INT4, 128, 4, 8, 2},
                 {"bf16 -> INT4 with zero points, all sums", DRAY_QUANT_INT4_ZERO, 128, 4, 8, 2}};
    static const uint32_t most[1] = {0x3F812345}; /* a maximum of about 1 */
    int64_t columns = 8192, lines = (int64_t)at.bytes / 2 / columns;
    for (size_t i = 0; i < sizeof kinds / sizeof *kinds; i++) {
        int64_t row_bytes = columns / kinds[i].elements * kinds[i].size;
        int64_t scale_row = columns / kinds[i].group * kinds[i].scale;
        dray__cuda_quant q = {
            .kind = DRAY_TRANSFORM_QUANTISE,
            .dtype = DRAY_BF16,
            .quant_dtype = DRAY_U8,
            .quant_kind = kinds[i].kind,
            .as = DRAY_BF16,
            .ndim = 2,
            .extent = {lines, columns},
            .cell = {kinds[i].kind == DRAY_QUANT_INT4_ZERO ? 8 : 1, kinds[i].group},
            .source = from,
            .destination = to,
            .source_stride = {2 * columns, 2},
            .destination_stride = {row_bytes, kinds[i].size},
            .scales = to + at.bytes,
            .scale_stride = {scale_row, kinds[i].scale},
            .second = to + at.bytes + (uint64_t)(lines * scale_row),
            .second_stride = {columns / kinds[i].group * 4, 4}};
        dray__cuda_job_options options = {
            .quants = &q, .quant_count = 1, .sums = 31, .most_count = 1};
        work w = {.bytes = at.bytes};
        make(&w, gpu, 0, &options);
        dray__cuda_job_set_most(w.jobs[0], most);
        row(what, kinds[i].name, rate(&w), limit, 0.5);
    }
}

/* Measures the search for a tensor's largest element, which NVFP4 needs before its groups can be
 * quantised. */
static void largest(int gpu, CUdeviceptr from, const char *what, double limit)
{
    int64_t columns = 5120, lines = (int64_t)at.bytes / 2 / columns;
    dray__cuda_quant q = {.kind = DRAY_TRANSFORM_MOST,
                          .dtype = DRAY_BF16,
                          .quant_dtype = DRAY_F8E4M3,
                          .ndim = 2,
                          .extent = {lines, columns},
                          .cell = {1 << 30, 1 << 30},
                          .source = from,
                          .source_stride = {2 * columns, 2},
                          .destination_stride = {0, 1}};
    dray__cuda_job_options options = {.quants = &q, .quant_count = 1, .sums = DRAY__CUDA_SUM_MOST};
    work w = {.bytes = (uint64_t)(lines * columns * 2)};
    make(&w, gpu, 0, &options);
    row(what, "the largest of a tensor of bf16", rate(&w), limit, 1.5);
}

static void sums_alone(void)
{
    dray__cuda_job_options options = {.sums = DRAY__CUDA_SUM_SOURCE};
    static const int64_t sizes[] = {384, 2560, 10240, 55296};
    double limit = 4.8e12;
    for (size_t i = 0; i < sizeof sizes / sizeof *sizes; i++) {
        char how[64];
        dray__cuda_item item = rows(at.gpus[0].from, 0, 2 * at.bytes, sizes[i], true);
        snprintf(how, sizeof how, "bf16 rows of %lld B", (long long)sizes[i]);
        row("checksum alone (of the datasheet's 4.8 TB/s)", how, one_rate(0, &item, &options),
            limit, 0.73);
    }
    dray__cuda_item item = rows(at.gpus[0].from, 0, 2 * at.bytes, 10240, true);
    item.copy.source_dtype = item.copy.destination_dtype = DRAY_F32;
    item.copy.extent[1] /= 2;
    item.copy.source_stride[1] = 4;
    row("checksum alone (of the datasheet's 4.8 TB/s)", "f32 rows of 10240 B",
        one_rate(0, &item, &options), limit, 0.73);
}

/* Measures copies of many runs of one size, by copy engines in a single lane. */
static void batches(int gpu, CUdeviceptr from, CUdeviceptr to, double limit)
{
    static const uint64_t sizes[] = {4 << 20, 1 << 20, 256 << 10, 64 << 10};
    for (size_t i = 0; i < sizeof sizes / sizeof *sizes; i++) {
        char how[64];
        uint64_t count = at.bytes / sizes[i];
        work w = {.bytes = count * sizes[i]};
        for (uint64_t k = 0; k < count; k++)
            at.items[k] = rows(from + k * sizes[i], to + (count - 1 - k) * sizes[i], sizes[i],
                               (int64_t)sizes[i] / 64, true);
        snprintf(how, sizeof how, "runs of %llu KiB", (unsigned long long)sizes[i] >> 10);
        make(&w, gpu, count, &by_engine);
        row("copy engines, one pair", how, rate(&w), limit, 0.85);
    }
}

/* Each GPU of [0, takers) reads from all GPUs of [first, at.count) but itself, in equal shares and
 * in rows of `size` bytes. With `push`, it writes to them instead. It serves all of them at once,
 * or with `turns` one after the other, where each GPU begins with a different one. */
typedef struct exchange {
    int takers, first;
    int64_t size;
    bool push, turns;
} exchange;

static uint64_t exchange_items(const exchange *x, int g, int sources)
{
    uint64_t items = 0, size = (uint64_t)x->size;
    uint64_t share = at.bytes / (uint64_t)sources / size * size;
    for (int i = 0; i < sources; i++) {
        /* The index of the lane does not count GPU g. */
        int lane = x->first ? (g + i) % sources : i;
        int k = x->first ? x->first + lane : (g + 1 + lane) % at.count;
        const one *from = &at.gpus[x->push ? g : k], *to = &at.gpus[x->push ? k : g];
        for (int times = 0; times < TIMES; times++) {
            at.items[items] =
                rows(from->from + (uint64_t)g * 4096,
                     to->to + (uint64_t)(x->push ? g : lane) * share, share, x->size, false);
            at.items[items++].lane = x->turns ? 0 : (uint32_t)lane;
        }
    }
    return items;
}

static void many(const exchange *x, bool engines, uint32_t sums, const char *what, double limit)
{
    char how[96];
    work w = {0};
    dray__cuda_job_options options = {.engine_bytes = engines ? 1 : UINT64_MAX, .sums = sums};
    for (int g = 0; g < x->takers; g++) {
        int sources = at.count - x->first - (g >= x->first);
        if (sources < 1)
            continue;
        uint64_t items = exchange_items(x, g, sources), size = (uint64_t)x->size;
        for (uint64_t i = 0; i < items && engines; i++)
            at.items[i].copy.source_stride[0] = x->size;
        w.bytes = TIMES * (at.bytes / (uint64_t)sources / size * size) * (uint64_t)sources;
        make(&w, g, items, &options);
    }
    snprintf(how, sizeof how, "rows of %lld B%s%s", (long long)x->size, sums ? ", all sums" : "",
             x->turns ? ", in turns" : "");
    row(what, how, rate(&w), limit, 0.85);
}

static void exchanges(double link)
{
    const int half = at.count / 2, all = at.count;
    for (int turns = 0; turns < 2; turns++) {
        many(&(exchange){half, half, 384, false, turns}, false, 0, "half from half", link);
        many(&(exchange){half, half, 16384, false, turns}, false, 0, "half from half", link);
        many(&(exchange){half, half, 16384, false, turns}, false, 7, "half from half", link);
        many(&(exchange){half, half, 16384, true, turns}, false, 0, "half to half", link);
        many(&(exchange){half, half, 16384, false, turns}, true, 0, "half from half, engines",
             link);
        many(&(exchange){all, 0, 384, false, turns}, false, 0, "all from all", link);
        many(&(exchange){all, 0, 16384, false, turns}, false, 0, "all from all", link);
        many(&(exchange){all, 0, 16384, false, turns}, false, 7, "all from all", link);
        many(&(exchange){all, 0, 384, true, turns}, false, 0, "all to all", link);
        many(&(exchange){all, 0, 16384, true, turns}, false, 0, "all to all", link);
        many(&(exchange){all, 0, 16384, false, turns}, true, 0, "all from all, engines", link);
    }
}

int main(int argc, char **argv)
{
    at.b = bench_open(argc, argv, "cuda");
    at.bytes = bench_quick(at.b) ? (uint64_t)4 << 20 : (uint64_t)1 << 30;
    at.items = calloc(MOST_ITEMS, sizeof *at.items);
    const char *blocks = getenv("DRAY_BENCH_BLOCKS");
    const int64_t most[2] = {INT32_MAX, 1 << 20};
    dray_error e;
    at.blocks = blocks ? (uint32_t)atoi(blocks) : 0;
    if (!at.items || dray_layout_new(&at.layout, &e) ||
        dray_layout_add_tensor(at.layout, "w", DRAY_BF16, 2, most, NULL, &e))
        bench_die(at.b, "out of memory");
    open_gpus();
    const one *a = &at.gpus[0], *b = &at.gpus[at.count > 1];
    const char *only = getenv("DRAY_BENCH_ONLY"); /* "one", "pair" or "many"; NULL means all */
    if (!only || strcmp(only, "one") == 0) {
        double local = limit_of(0, a->from, a->to);
        row("copy engine", "on one GPU", local, 0, 0);
        widths(0, a->from, a->to, "on one GPU", local);
        summed(0, a->from, a->to, "on one GPU", local);
        converted(0, a->from, a->to, "on one GPU", local);
        quantised(0, a->from, a->to, "on one GPU", local);
        slots(0, a->from, a->to, "on one GPU", local);
        grouped(0, a->from, a->to, "on one GPU", local);
        largest(0, a->from, "on one GPU", local);
        sums_alone();
    }
    double link = at.count > 1 ? limit_of(0, b->from, a->to) : 0;
    if (at.count > 1 && (!only || strcmp(only, "pair") == 0)) {
        row("copy engine", "from another GPU", link, 0, 0);
        row("copy engine", "to another GPU", limit_of(0, a->from, b->to), 0, 0);
        widths(0, b->from, a->to, "pulled", link);
        widths(0, a->from, b->to, "pushed", link);
        summed(0, b->from, a->to, "pulled", link);
        summed(0, a->from, b->to, "pushed", link);
        converted(0, b->from, a->to, "pulled", link);
        converted(0, a->from, b->to, "pushed", link);
        quantised(0, a->from, b->to, "pushed", link);
        grouped(0, a->from, b->to, "pushed", link);
        batches(0, b->from, a->to, link);
    }
    if (at.count > 1 && (!only || strcmp(only, "many") == 0)) {
        exchanges(link);
    }
    free(at.items);
    dray_layout_free(at.layout);
    return bench_close(at.b);
}
