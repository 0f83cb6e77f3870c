/* The processes of a benchmark of updates: the state that they share, and the body of each. The
 * functions of the parent are in bench_cluster.h. */
#pragma once

#include "bench/weights/bench_cluster.h"
#include "bench/weights/bench_gpu_decode.h"

#include <sys/types.h>

enum bench_work {
    WORK_PUBLISH,
    WORK_READ_OWN,
    WORK_POISON,
    WORK_UPDATE,
    WORK_PREFETCH,
    WORK_COMMIT,
    WORK_COPY,
    WORK_COPY_PIECES,
    WORK_COPY_AND_READ_BACK,
    WORK_READ,
    WORK_CHECK,
    WORK_END
};

/* The ranks of one side. The parent sets `work` and increments `round`. Each rank does the work and
 * increments `done`. */
typedef struct bench_round {
    int round, done, work;
    uint32_t ranks;
} bench_round;

typedef struct bench_result { /* of a rank */
    double begin, end;
    dray_update_report report;
    double began, ended; /* seconds from the beginning of the round of the last update or commit */
    bench_decoded alone, beside; /* steps before the last prefetch, and beside it */
    uint64_t wrong;
    char first[128]; /* the first wrong tensor */
} bench_result;

/* The memory that all processes share. */
typedef struct bench_cluster_state {
    int ready, failed;
    bench_round trainers, engines;
    uint64_t version;
    dray_update_options update;
    char address[160], message[DRAY_ERROR_MESSAGE_MAX + 64];
    bench_result results[]; /* the engines', then the trainers' */
} bench_cluster_state;

struct bench_cluster {
    bench *b;
    const bench_cluster_options *options;
    bench_cluster_state *shared;
    size_t shared_bytes;
    dray_region **regions; /* the trainers', from which the engines copy for the limit */
    uint32_t region_count; /* of all trainers together; each has as many as its layout says */
    uint32_t groups;
    bench_cluster *next; /* the next one of the running clusters */
    pid_t *pids;
    uint32_t pid_count;
    char folder[32];
};

/* ---- futexes --------------------------------------------------------------------------------- */

int bench_get(const int *at);
/* Increments *at and wakes the processes that wait for it. */
void bench_add(int *at);
/* Waits until *at differs from `value`, for at most 100 ms. */
void bench_wait_change(int *at, int value);

/* ---- hosts, regions and bytes ---------------------------------------------------------------- */

/* Returns the host of a rank of a side; NULL means this machine as it is. */
const char *bench_host_of(const bench_side *side, uint32_t rank);
/* Returns the regions of a trainer rank, among those that the parent made. */
dray_region **bench_regions_of(const bench_cluster *c, uint32_t rank);
/* Returns the bytes that an engine rank needs from an update: `written`, or for an engine that
 * loads full tensors, the bytes of its own layout. The same holds for the bytes that are read. */
uint64_t bench_wanted_bytes(const bench_cluster *c, uint32_t number, uint64_t written);

/* ---- bodies of processes --------------------------------------------------------------------- */

void bench_run_coordinator(bench_cluster *c, uint32_t rank);
void bench_run_trainer(bench_cluster *c, uint32_t rank);
void bench_run_engine(bench_cluster *c, uint32_t number);
