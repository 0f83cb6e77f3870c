/* Measures how fast one core moves bytes between two regions: dense, in rows, with the checksum,
 * converted, transposed, and quantised. It also measures the checksum alone. The limit is a memcpy
 * of the same bytes. */
#include "bench.h"

#include "mover/kernels/checksum.h"
#include "mover/kernels/quant.h"
#include "mover/mover.h"

#include <string.h>

typedef struct job {
    const bench *b;
    dray_region *from, *to;
    dray_layout *layout;
    dray_copy copy;
    bool summed;
} job;

static void move(void *state)
{
    const job *j = state;
    uint64_t sum = 0;
    dray__move_options options = {.sums = j->summed ? &sum : NULL, .layout = j->layout};
    dray_error e;
    if (dray__move_all(j->from, j->to, &j->copy, 1, &options, &e))
        bench_die(j->b, "%s", e.message);
}

static void sum_alone(void *state)
{
    const job *j = state;
    dray__sum_of of = {.dtype = j->copy.source_dtype,
                       .ndim = 2,
                       .shape = j->copy.extent,
                       .start = j->copy.start,
                       .extent = j->copy.extent,
                       .stride = j->copy.source_stride,
                       .data = dray_region_base(j->from)};
    volatile uint64_t sum = dray__sum(&of);
    (void)sum;
}

/* Sets the job's copy to rows of `columns` elements, which are adjacent in the source, and `gap`
 * bytes apart in the destination. */
static void shape(job *j, uint64_t bytes, int64_t columns, int32_t from, int32_t to, int64_t gap)
{
    int64_t in = (int64_t)dray_dtype_size((dray_dtype)from);
    int64_t out = (int64_t)dray_dtype_size((dray_dtype)to);
    uint64_t row = (uint64_t)(columns * (in > out ? in : out) + gap);
    j->copy = (dray_copy){.ndim = 2,
                          .source_dtype = from,
                          .destination_dtype = to,
                          .extent = {(int64_t)(bytes / row), columns},
                          .source_stride = {columns * in, in},
                          .destination_stride = {columns * out + gap, out}};
}

static double rate(const bench *b, job *j, void (*run)(void *), bool summed)
{
    uint64_t bytes = dray_dtype_size((dray_dtype)j->copy.source_dtype) *
                     (uint64_t)j->copy.extent[0] * (uint64_t)j->copy.extent[1];
    j->summed = summed;
    return (double)bytes / bench_median(b, run, j);
}

/* Transposes the copy: the destination's rows are the source's columns. */
static void transpose(job *j)
{
    j->copy.destination_stride[1] = j->copy.extent[0] * j->copy.destination_stride[1];
    j->copy.destination_stride[0] = j->copy.destination_stride[1] / j->copy.extent[0];
}

/* The boxes have the size that updates use. A box of 128 x 1024 elements is gathered, and then
 * quantised in the cache. */
enum { ROWS = 128, COLUMNS = 1024, CELLS = COLUMNS / 128 };

static const dray__quant_box quant_box = {.dtype = DRAY_BF16,
                                          .quant_dtype = DRAY_F8E4M3,
                                          .extent = {1, 1, ROWS, COLUMNS},
                                          .cell = {1, 1, 128, 128}};

static size_t boxes_of(const job *j)
{
    return dray_region_bytes(j->from) / (ROWS * COLUMNS * 2);
}

static uint8_t staging[ROWS * COLUMNS * 2], result[ROWS * COLUMNS];

static void quantise_box(uint8_t *to)
{
    uint32_t amax[CELLS] = {0};
    float scales[CELLS];
    dray__quant_most(&quant_box, staging, amax);
    for (int c = 0; c < CELLS; c++)
        scales[c] = dray__quant_scale(&quant_box, amax[c], DRAY_SCALE_F32);
    dray__quantise(&quant_box, staging, scales, to);
}

static void quantise(void *state)
{
    const job *j = state;
    const uint8_t *from = dray_region_base(j->from);
    uint8_t *to = dray_region_base(j->to);
    for (size_t i = 0; i < boxes_of(j); i++, from += ROWS * COLUMNS * 2, to += ROWS * COLUMNS) {
        memcpy(staging, from, sizeof staging);
        quantise_box(to);
    }
}

/* Quantises without reading or writing memory outside the cache. */
static void quantise_in_cache(void *state)
{
    for (size_t i = 0; i < boxes_of(state); i++)
        quantise_box(result);
}

static const float scales[CELLS] = {1, 2, 3, 4, 5, 6, 7, 8};

static void dequantise(void *state)
{
    const job *j = state;
    const uint8_t *from = dray_region_base(j->from);
    uint8_t *to = dray_region_base(j->to);
    for (size_t i = 0; i < boxes_of(j); i++, from += ROWS * COLUMNS, to += ROWS * COLUMNS * 2) {
        memcpy(result, from, ROWS * COLUMNS);
        dray__dequantise(&quant_box, result, scales, to);
    }
}

static void dequantise_in_cache(void *state)
{
    for (size_t i = 0; i < boxes_of(state); i++)
        dray__dequantise(&quant_box, result, scales, staging);
}

/* Returns bytes/s that are comparable with those of memcpy. memcpy reads a byte for every byte that
 * it writes, and its rate counts only one of the two. Therefore half of the bytes that are read and
 * written count here. */
static double rate_of_boxes(const bench *b, job *j, void (*run)(void *))
{
    double bytes = (double)boxes_of(j) * ROWS * COLUMNS * (2 + 1) / 2;
    return bytes / bench_median(b, run, j);
}

/* Returns the rate of two passes over the same bytes, one after the other. */
static double both(double a, double b)
{
    return 1 / (1 / a + 1 / b);
}

int main(int argc, char **argv)
{
    bench *b = bench_open(argc, argv, "mover");
    uint64_t bytes = bench_quick(b) ? 4u << 20 : 256u << 20;
    job j = {.b = b};
    const int64_t most[2] = {INT32_MAX, 8192};
    dray_error e;
    if (dray_region_alloc(DRAY_REGION_SHARED, bytes, "from", &j.from, &e) ||
        dray_region_alloc(DRAY_REGION_SHARED, bytes, "to", &j.to, &e) ||
        dray_layout_new(&j.layout, &e) ||
        dray_layout_add_tensor(j.layout, "w", DRAY_BF16, 2, most, NULL, &e))
        bench_die(b, "%s", e.message);
    memset(dray_region_base(j.from), 0x3C, bytes);
    memset(dray_region_base(j.to), 0, bytes);
    double limit = bench_memcpy_shared(b, bytes);
    shape(&j, bytes, 4096, DRAY_BF16, DRAY_BF16, 0);
    bench_row(b, "bf16, dense", rate(b, &j, move, false), "B/s", limit, 0.8);
    bench_row(b, "bf16, dense, checksum", rate(b, &j, move, true), "B/s", limit, 0.5);
    bench_row(b, "checksum alone, bf16", rate(b, &j, sum_alone, false), "B/s", limit, 0.9);
    shape(&j, bytes, 2048, DRAY_BF16, DRAY_BF16, 4096);
    bench_row(b, "bf16, rows of 4 KiB", rate(b, &j, move, false), "B/s", limit, 0.5);
    shape(&j, bytes, 96, DRAY_BF16, DRAY_BF16, 192);
    bench_row(b, "bf16, rows of 192 B", rate(b, &j, move, false), "B/s", limit, 0.3);
    shape(&j, bytes, 4096, DRAY_F32, DRAY_BF16, 0);
    bench_row(b, "f32 -> bf16, bytes read", rate(b, &j, move, false), "B/s", limit, 0.8);
    bench_row(b, "f32 -> bf16, checksum", rate(b, &j, move, true), "B/s", limit, 0.5);
    shape(&j, bytes, 7168, DRAY_BF16, DRAY_BF16, 0);
    transpose(&j);
    bench_row(b, "bf16, turned over", rate(b, &j, move, false), "B/s", limit, 0.5);
    bench_row(b, "bf16, turned over, checksum", rate(b, &j, move, true), "B/s", limit, 0.25);
    shape(&j, bytes, 7168, DRAY_F32, DRAY_BF16, 0);
    transpose(&j);
    bench_row(b, "f32 -> bf16, turned over", rate(b, &j, move, false), "B/s", limit, 0.5);
    double arithmetic = rate_of_boxes(b, &j, quantise_in_cache);
    bench_row(b, "bf16 -> FP8 in blocks, in cache", arithmetic, "B/s", limit, 0);
    bench_row(b, "bf16 -> FP8 in blocks", rate_of_boxes(b, &j, quantise), "B/s",
              both(limit, arithmetic), 0.8);
    arithmetic = rate_of_boxes(b, &j, dequantise_in_cache);
    bench_row(b, "FP8 in blocks -> bf16, in cache", arithmetic, "B/s", limit, 0);
    bench_row(b, "FP8 in blocks -> bf16", rate_of_boxes(b, &j, dequantise), "B/s",
              both(limit, arithmetic), 0.8);
    dray_region_free(j.from);
    dray_region_free(j.to);
    dray_layout_free(j.layout);
    return bench_close(b);
}
