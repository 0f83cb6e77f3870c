/* A coordinator, trainer ranks and engine ranks, each a process, that update again and again while
 * the parent measures; and the limit, a memcpy by the same engine processes out of the same memory.
 * Whatever fails in any of them ends the benchmark with its message. */
#pragma once

#include "bench/rows.h"

#include <dray/weights.h>

typedef struct bench_side {
    dray_layout **layouts; /* one a rank */
    uint32_t count;
    /* Hosts that the ranks are spread over in equal runs: network namespaces by name, or "~name",
     * this machine under another name. None: this machine as it is. Borrowed. */
    char **hosts;
    uint32_t host_count;
    /* GPUs that the ranks are spread over in the same way. None: the first. */
    uint32_t *gpus;
    uint32_t gpu_count;
} bench_side;

typedef struct bench_cluster_options {
    bench_side from, to;
    uint32_t engines; /* how many engines (groups) of to.count ranks each; 0: 1 */
    bool tied;        /* of the model */
    /* Not NULL: engines take full tensors of this layout, through a bucket of bucket_bytes (0: the
     * library's default), and cut out what they want. */
    const dray_layout *load;
    uint64_t bucket_bytes;
    /* Not 0: the trainers' weights are in private memory, and pass through a staging arena of so
     * many bytes. */
    uint64_t staging;
    bool cuda;      /* both sides are memory of GPUs, */
    bool pinned;    /* but the trainers' is pinned host memory */
    bool unsummed;  /* publishers take no checksums */
    uint64_t every; /* not 0: one of so many elements changes from version to version, and
                       publishers send deltas; destinations are not poisoned between updates */
    double decode;  /* seconds of a step of what engines on GPUs do meanwhile; 0: nothing */
    dray_region_kind prefetch_into; /* where engines on GPUs prefetch to; 0: spare GPU memory */
    const char *checkpoint; /* folder: engines read it, and there are no trainers; NULL: none */
} bench_cluster_options;

typedef struct bench_cluster bench_cluster;

/* Starts all processes, fills the sources with random values, and publishes version 1. The options
 * are borrowed until stop. */
bench_cluster *bench_cluster_start(bench *b, const bench_cluster_options *options);
/* Poisons the destinations, publishes the next version, and updates all engines to it. Seconds from
 * the last rank's publish to the last rank's commit. */
double bench_cluster_update(bench_cluster *c, const dray_update_options *options);
/* The same, but engines wait for the version already: seconds from the beginning of the last
 * trainer rank's publish, with its sums, to the last engine rank's commit. */
double bench_cluster_follow(bench_cluster *c, const dray_update_options *options);
/* A new version into the engines' staging, from the last rank's publish on; then what the engines
 * served is poisoned. */
double bench_cluster_prefetch(bench_cluster *c, const dray_update_options *options);
/* It takes the place of what they served. */
double bench_cluster_commit(bench_cluster *c);
/* Of the last prefetch: what steps of engines took alone before it, and beside it; of means and p99
 * those of the rank that was slowed down most. Seconds. */
typedef struct bench_slowed {
    uint64_t steps;
    double mean, p99, mean_alone, p99_alone;
} bench_slowed;
bench_slowed bench_cluster_slowed(const bench_cluster *c);
/* Seconds that the trainer ranks take to read their weights once: the least that summing what is
 * published takes. */
double bench_cluster_read_sources(bench_cluster *c);
/* The version that is there, once more, without poison: what an update costs besides its bytes.
 * Seconds of the slowest rank. */
double bench_cluster_repeat(bench_cluster *c, const dray_update_options *options);
/* The least that the same engine ranks take for their last update by bare memcpys, all at once or
 * piece by piece; verified: and for one read of what was written, out of the cache that still has
 * each piece, or afterwards. */
double bench_cluster_least(bench_cluster *c, bool verified);
/* Seconds that the engine ranks take to read as many bytes of the checkpoint as their last update
 * did, around the page cache. */
double bench_cluster_read(bench_cluster *c);
/* Seconds that TCP takes between the first hosts of the two sides for the bytes that the last
 * update brought into the host that got the most; 0: none came from another host. */
double bench_cluster_link(bench_cluster *c, const char **how);
/* Dies unless every element of every engine is what it must be after the last update. */
void bench_cluster_check(bench_cluster *c);
/* Of the last update, over all engine ranks: sums of bytes, the longest of each time, the largest
 * peak. */
dray_update_report bench_cluster_report(const bench_cluster *c);
/* The same of each engine rank, in seconds, and when it began and ended, counted from the last
 * rank's publish: where the time goes. An array of objects. */
json_t *bench_cluster_time_lines(const bench_cluster *c);
void bench_cluster_stop(bench_cluster *c);

/* From here on SIGINT and SIGTERM end what waits, so that nothing stays behind. */
void bench_watch_signals(void);
