/* GPUs of a benchmark: which one a process has, memory and random values on it, what the links
 * between them carry, and what an update could take at best. Nothing here opens the driver before a
 * process is forked for it: a child cannot use what its parent opened. */
#pragma once

#include "bench/weights/bench_cluster.h"

/* "0-7", "0,2,4-5": GPUs as this process would count them. NULL with *count 0: it says no such. */
uint32_t *bench_gpus_parse(bench *b, const char *text, uint32_t *count);
/* In a child, before the driver is opened: it counts this GPU first. All stay visible. */
void bench_gpu_choose(uint32_t gpu);

/* The same layout in regions of this kind. */
int bench_layout_as(const dray_layout *layout, dray_region_kind kind, dray_layout **out,
                    dray_error *error);
/* As bench_fill, memset and bench_wrong do it (bench_values.h), by a kernel of this benchmark's own
 * where NVRTC is there, else by way of host memory. */
int bench_gpu_fill(const dray_layout *layout, dray_region *const *regions, bool tied,
                   dray_error *error);
int bench_gpu_poison(dray_region *region, int value, dray_error *error);
int bench_gpu_wrong(const dray_layout *layout, dray_region *const *regions, bool tied,
                    dray_layout *const *sources, uint32_t count, uint64_t *wrong,
                    const char **first, dray_error *error);

/* One of the benchmark's own kernels (a CUfunction), in the current context, of a GPU of this
 * architecture; NULL: it cannot be had here. */
void *bench_gpu_kernel(int arch, const char *name);

/* Bytes/s; 0: not measured. */
typedef struct bench_gpu_rates {
    double link;   /* from GPU to GPU, one large copy by a copy engine, all pairs at once */
    double local;  /* one way, within a GPU */
    double pinned; /* from pinned host memory, all GPUs at once */
} bench_gpu_rates;

/* Measured by a process of its own on the GPUs of both sides. */
bench_gpu_rates bench_gpu_measure(bench *b, const bench_cluster_options *options);
/* What the plans of all engine ranks ask of each GPU, and the seconds of the one that has most to
 * do. *how: by what. */
double bench_gpu_limit(bench *b, const bench_cluster_options *options, const bench_gpu_rates *rates,
                       const char **how);

/* What a commit of what was prefetched takes at least: a copy within each GPU, or out of pinned
 * memory. */
double bench_gpu_commit_limit(const bench_cluster_options *options, const bench_gpu_rates *rates,
                              const char **how);

/* Of a side: the GPU of its rank-th of `ranks` ranks. */
uint32_t bench_gpu_of(const bench_side *side, uint32_t rank, uint32_t ranks);
