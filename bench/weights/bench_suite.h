/* Cases of `dray bench weights`, given by its arguments or by a suite. */
#pragma once

#include "bench/weights/bench_gpu.h"

typedef struct bench_found { /* of the last case measured */
    double seconds, limit;
    const char *limit_by;
    double write_seconds; /* that the checkpoint took which it reads; 0: it reads none */
    double pause; /* in which an engine's weights are between two versions: from its first byte
                     that may be written to its commit */
    dray_update_report report; /* over all ranks */
} bench_found;

typedef struct bench_job {
    const char *name; /* of the row; NULL: made of the rest */
    const char *model, *from, *to;
    int64_t layers;             /* 0: all */
    unsigned modes, strategies; /* bit sets */
    bool unverified;            /* as no_verify of dray_update_options */
    uint64_t bucket, nccl;      /* as in dray_update_options */
    uint64_t every;             /* one of so many elements changes in each version; 0: none does */
    uint64_t staging;           /* staging: not 0: weights are offloaded */
    uint32_t engines;
    bool cuda, pinned; /* memory of GPUs; but the trainers' pinned host memory */
    bool prefetch;     /* what is timed is the commit of what was prefetched */
    dray_region_kind prefetch_into;
    double decode; /* seconds of a step of what engines do meanwhile; 0: nothing */
    double within; /* seconds over which a prefetch is spread; 0: as fast as it can */
    uint32_t ctas; /* as in dray_update_options */
    int32_t copy_engines;
    bool load;  /* engines take full tensors through load_weights and cut them themselves */
    bool quiet; /* no row: the caller makes one of *found */
    double target;
    bench_found *found; /* may be NULL */
    /* set by bench_run */
    dray_model_config config;
    const char *cut, *limit_by;
    bench_gpu_rates rates;
    double limit; /* of memory cuda */
} bench_job;

void bench_run(bench *b, const bench_job *job);
void bench_targets(bench *b);

/* Writes the model as a checkpoint of one file, random as a side holds it, into a new folder whose
 * name is made of `folder`, in a process that ends before this returns. Returns folder; *seconds:
 * what writing took. */
const char *bench_checkpoint_make(bench *b, const bench_job *job, const bench_side *like,
                                  char *folder, double *seconds);
void bench_checkpoint_remove(const char *folder);
