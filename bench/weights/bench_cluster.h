/* A coordinator, trainer ranks and engine ranks, each a process, which update again and again while
 * the parent measures. The limit is a memcpy by the same engine processes from the same memory. An
 * error in any process ends the benchmark with its message. */
#pragma once

#include "bench/rows.h"

#include <dray/weights.h>

typedef struct bench_side {
    dray_layout **layouts; /* one for each rank */
    uint32_t count;
    /* The hosts over which the ranks are spread in equal runs: network namespaces by name, or
     * "~name", which is this machine under another name. A count of 0 means this machine as it
     * is. */
    char **hosts;
    uint32_t host_count;
    /* The GPUs over which the ranks are spread in the same way. A count of 0 means the first
     * GPU. */
    uint32_t *gpus;
    uint32_t gpu_count;
} bench_side;

typedef struct bench_cluster_options {
    bench_side from, to;
    uint32_t engines; /* engines (groups), each with to.count ranks; 0 means 1 */
    bool tied;        /* as in the model's configuration */
    /* Not NULL when engines receive full tensors of this layout, through a bucket of bucket_bytes
     * (0 means the library's default), and cut out the parts that they hold. */
    const dray_layout *load;
    uint64_t bucket_bytes;
    /* Not 0 when the trainers' weights are in private memory, and pass through a staging arena of
     * so many bytes. */
    uint64_t staging;
    bool cuda;     /* both sides are in memory of GPUs */
    bool pinned;   /* with `cuda`: the trainers' side is in pinned host memory instead */
    bool unsummed; /* publishers take no checksums */
    /* Not 0 when one of so many elements changes from version to version. Publishers then send
     * deltas, and destinations are not poisoned between updates. */
    uint64_t every;
    double decode; /* seconds of a step of decoding engines on GPUs; 0 means no decoding */
    /* The kind of memory into which engines on GPUs prefetch; 0 means spare memory of the GPU. */
    dray_region_kind prefetch_into;
    const char *checkpoint; /* the folder that engines read, without trainers; NULL means none */
} bench_cluster_options;

typedef struct bench_cluster bench_cluster;

/* Starts all processes, fills the sources with random values, and publishes version 1. The options
 * are borrowed until stop. */
bench_cluster *bench_cluster_start(bench *b, const bench_cluster_options *options);
/* Poisons the destinations, publishes the next version, and updates all engines to it. Returns the
 * seconds from the last rank's publish to the last rank's commit. */
double bench_cluster_update(bench_cluster *c, const dray_update_options *options);
/* The same, but the engines already wait for the version when it is published. Returns the seconds
 * from the beginning of the last trainer rank's publish, which computes the sums, to the last
 * engine rank's commit. */
double bench_cluster_follow(bench_cluster *c, const dray_update_options *options);
/* Publishes the next version, has all engines prefetch it into their staging, and then poisons the
 * weights that they serve. Returns the seconds of the slowest engine rank's prefetch. */
double bench_cluster_prefetch(bench_cluster *c, const dray_update_options *options);
/* Has all engines commit the prefetched version. Returns the seconds to the last rank's commit. */
double bench_cluster_commit(bench_cluster *c);
/* The seconds of engines' steps, alone before the last prefetch and beside it. The means are those
 * of the rank whose mean grew the most, and the p99 those of the rank whose p99 did. */
typedef struct bench_slowed {
    uint64_t steps;
    double mean, p99, mean_alone, p99_alone;
} bench_slowed;
bench_slowed bench_cluster_slowed(const bench_cluster *c);
/* Returns the seconds that the trainer ranks take to read their weights once, without which the
 * published bytes cannot be summed. */
double bench_cluster_read_sources(bench_cluster *c);
/* Updates all engines to the current version once more, without poison, which measures the cost of
 * an update apart from its bytes. Returns the seconds of the slowest rank. */
double bench_cluster_repeat(bench_cluster *c, const dray_update_options *options);
/* Returns the seconds that the same engine ranks take for the bytes of their last update by bare
 * memcpys, all at once or piece by piece, whichever is faster. With `verified`, a read of the
 * written bytes is included. It finds each piece in the cache, or comes after all copies. */
double bench_cluster_least(bench_cluster *c, bool verified);
/* Returns the seconds that the engine ranks take to read as many bytes of the checkpoint as their
 * last update did, without the page cache. */
double bench_cluster_read(bench_cluster *c);
/* Returns the seconds that TCP between the first hosts of the two sides takes for the bytes that
 * the last update brought into the host that received the most. Returns 0 when no bytes came from
 * another host. *how is a static string that says how TCP was measured; it is not set then. */
double bench_cluster_link(bench_cluster *c, const char **how);
/* Ends the program unless every element of every engine has the value of the last update. */
void bench_cluster_check(bench_cluster *c);
/* Returns the report of the last update over all engine ranks: the sums of bytes, the longest of
 * each time, and the largest peak. */
dray_update_report bench_cluster_report(const bench_cluster *c);
/* Returns an array with an object for each engine rank: the times of its last report in seconds,
 * and when it began and ended, counted from the beginning of the round. The caller owns the
 * array. */
json_t *bench_cluster_time_lines(const bench_cluster *c);
void bench_cluster_stop(bench_cluster *c);

/* From here on, SIGINT and SIGTERM interrupt the program's waits instead of killing it, so that its
 * exit handlers can remove everything that it made. */
void bench_watch_signals(void);
