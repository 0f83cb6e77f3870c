/* The kernels of a benchmark on GPUs. */
#pragma once

#include <stdint.h>

/* A block as the kernels bench_fill(blocks, count) and bench_check(blocks, count, wrong) read it;
 * it is `block` in their source. bench_check sets `wrong` to the number of wrong elements and the
 * first block that has one. */
typedef struct bench_gpu_block {
    uint64_t at, hash, scales, version, every;
    int64_t shape[4], start[4], extent[4], stride[4];
    int64_t cell[2], scale_start[2], scale_stride[2];
    int32_t ndim, dtype, from, quantised;
} bench_gpu_block;

extern const char bench_gpu_source[]; /* CUDA C++ */
