/* The processes of a benchmark of updates: what all of them see, and what each does
 * (bench_cluster.h is what the parent does with them). */
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

/* One side's ranks: the parent sets the work and counts `round` up; each rank does it and counts
 * `done` up. */
typedef struct bench_round {
    int round, done, work;
    uint32_t ranks;
} bench_round;

typedef struct bench_result { /* of a rank */
    double begin, end;
    dray_update_report report;
    double began, ended;         /* of the last update, counted from its beginning */
    bench_decoded alone, beside; /* steps before the last prefetch, and beside it */
    uint64_t wrong;
    char first[128]; /* the tensor that is wrong */
} bench_result;

/* What all processes see. */
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
    dray_region **regions; /* the trainers', which the engines copy from for the limit */
    uint32_t region_count; /* of all trainers; each has as many as its layout says */
    uint32_t groups;
    bench_cluster *next; /* of those that run */
    pid_t *pids;
    uint32_t pid_count;
    char folder[32];
};

/* ---- futexes */

int bench_get(const int *at);
/* One more, and whoever waits for it wakes. */
void bench_add(int *at);
/* Until *at differs from value, or for a moment. */
void bench_wait_change(int *at, int value);

/* ---- where things are */

/* "~name" is this machine's own network under another name. NULL: this machine as it is. */
const char *bench_host_of(const bench_side *side, uint32_t rank);
/* The trainer's, of those that the parent made. */
dray_region **bench_regions_of(const bench_cluster *c, uint32_t rank);
/* What an engine rank must get at least: what an update wrote, or of full tensors the part that it
 * wants. The latter's source bytes are as many. */
uint64_t bench_wanted_bytes(const bench_cluster *c, uint32_t number, uint64_t written);

/* ---- bodies of processes */

void bench_run_coordinator(bench_cluster *c, uint32_t rank);
void bench_run_trainer(bench_cluster *c, uint32_t rank);
void bench_run_engine(bench_cluster *c, uint32_t number);
