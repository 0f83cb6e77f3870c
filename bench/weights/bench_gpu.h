/* GPUs of a benchmark: the GPU of each process, memory and random values on it, the rates of the
 * links between GPUs, and the lower bounds of an update's time. Nothing here opens the driver
 * before a process is forked for it, because a child cannot use a driver that its parent opened. */
#pragma once

#include "bench/weights/bench_cluster.h"

/* Returns the GPUs of a list such as "0-7" or "0,2,4-5", by the numbers that this process has for
 * them. The caller frees it. A wrong list ends the program. */
uint32_t *bench_gpus_parse(bench *b, const char *text, uint32_t *count);
/* Makes this GPU the first that the driver counts in this process, in which all stay visible. It
 * must be called in a child, before the driver is opened. */
void bench_gpu_choose(uint32_t gpu);

/* Makes a copy of the layout whose regions are of this kind. The caller frees it. */
int bench_layout_as(const dray_layout *layout, dray_region_kind kind, dray_layout **out,
                    dray_error *error);
/* Do the same as bench_fill, memset and bench_wrong (bench_values.h) for memory on GPUs. Filling
 * and checking are done by this benchmark's own kernels where NVRTC is available, and otherwise
 * through host memory. */
int bench_gpu_fill(const dray_layout *layout, dray_region *const *regions, bool tied,
                   dray_error *error);
int bench_gpu_poison(dray_region *region, int value, dray_error *error);
int bench_gpu_wrong(const dray_layout *layout, dray_region *const *regions, bool tied,
                    dray_layout *const *sources, uint32_t count, uint64_t *wrong,
                    const char **first, dray_error *error);

/* Returns one of the benchmark's own kernels (a CUfunction), loaded in the current context of a GPU
 * of this architecture. NULL when it cannot be compiled or loaded here. */
void *bench_gpu_kernel(int arch, const char *name);

/* Bytes/s; 0 means not measured. */
typedef struct bench_gpu_rates {
    double link;   /* from GPU to GPU: one large copy by a copy engine, all pairs at once */
    double local;  /* within a GPU, each byte counted once */
    double pinned; /* from pinned host memory, all GPUs at once */
} bench_gpu_rates;

/* Measures the rates of the GPUs of both sides, in a process of its own. */
bench_gpu_rates bench_gpu_measure(bench *b, const bench_cluster_options *options);
/* Adds up the traffic that the plans of all engine ranks cause on each GPU. Returns the seconds of
 * its busiest part at these rates. *how is that part's name, static. */
double bench_gpu_limit(bench *b, const bench_cluster_options *options, const bench_gpu_rates *rates,
                       const char **how);

/* Returns the seconds of the copies that a commit of prefetched weights cannot avoid: within each
 * GPU, or out of pinned memory. *how says which, static. */
double bench_gpu_commit_limit(const bench_cluster_options *options, const bench_gpu_rates *rates,
                              const char **how);

/* Returns the GPU of a side's rank number `rank` of `ranks`. */
uint32_t bench_gpu_of(const bench_side *side, uint32_t rank, uint32_t ranks);
