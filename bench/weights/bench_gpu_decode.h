/* A load that resembles decoding beside an update. A thread launches steps of kernels that do
 * little but read a GPU's memory, one step after the other, and reports the time of each step to
 * the subscriber. */
#pragma once

#include <dray/memory.h>
#include <dray/weights.h>

typedef struct bench_decode bench_decode;

/* Starts steps on the GPU of the region `beside`. A step takes about `seconds` while nothing else
 * runs. The subscriber is borrowed until stop. */
int bench_decode_start(dray_subscriber *subscriber, const dray_region *beside, double seconds,
                       bench_decode **out, dray_error *error);
/* The number of steps whose middle was between two times (bench_now), and their seconds. */
typedef struct bench_decoded {
    uint64_t steps;
    double mean, p99;
} bench_decoded;
void bench_decode_between(bench_decode *decode, double begin, double end, bench_decoded *out);
void bench_decode_stop(bench_decode *decode); /* NULL is fine */
