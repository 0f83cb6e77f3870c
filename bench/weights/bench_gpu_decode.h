/* Something like decoding beside an update: steps of kernels that do little but read a GPU's
 * memory, one after the other, in a thread of their own, which tells the subscriber what each step
 * took. */
#pragma once

#include <dray/memory.h>
#include <dray/weights.h>

typedef struct bench_decode bench_decode;

/* On the GPU of a region; a step takes about `seconds` while nothing else goes on. The subscriber
 * is borrowed until stop. */
int bench_decode_start(dray_subscriber *subscriber, const dray_region *beside, double seconds,
                       bench_decode **out, dray_error *error);
/* What steps took that ended between two times (bench_now), in seconds. */
typedef struct bench_decoded {
    uint64_t steps;
    double mean, p99;
} bench_decoded;
void bench_decode_between(bench_decode *decode, double begin, double end, bench_decoded *out);
void bench_decode_stop(bench_decode *decode); /* NULL is fine */
