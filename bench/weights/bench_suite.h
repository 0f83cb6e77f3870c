/* The cases of `dray bench weights`, which its arguments or a suite define. */
#pragma once

#include "bench/weights/bench_gpu.h"

typedef struct bench_found { /* of the last case measured */
    double seconds, limit;
    const char *limit_by;
    double write_seconds; /* of the checkpoint that it reads; 0 when it reads none */
    double pause; /* seconds in which an engine's weights are between two versions: from the first
                     byte that may be written to its commit */
    dray_update_report report; /* over all ranks */
} bench_found;

typedef struct bench_job {
    const char *name; /* the row's; NULL means that it is made from the other members */
    const char *model, *from, *to;
    int64_t layers;             /* 0 means all */
    unsigned modes, strategies; /* bit sets */
    bool unverified;            /* as no_verify of dray_update_options */
    uint64_t bucket, nccl;      /* as in dray_update_options */
    uint64_t every;   /* one of so many elements changes in each version; 0 means that none does */
    uint64_t staging; /* bytes of the arena of offloaded weights; 0 means not offloaded */
    uint32_t engines;
    bool cuda, pinned; /* memory of GPUs; the trainers' is pinned host memory */
    bool prefetch;     /* the commit of prefetched weights is timed */
    dray_region_kind prefetch_into;
    double decode; /* seconds of a step of decoding engines; 0 means no decoding */
    double within; /* seconds over which a prefetch is spread; 0 means as fast as possible */
    uint32_t ctas; /* as in dray_update_options */
    int32_t copy_engines;
    bool load;  /* engines receive full tensors through load_weights and cut out their parts */
    bool quiet; /* adds no row, because the caller makes one from *found */
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

/* Writes the model as a checkpoint of one file, with random values in the dtype of the side `like`,
 * into a new folder, in a process that ends before this returns. `folder` is the template of the
 * folder's name (mkdtemp), and becomes the name. Returns `folder`; *seconds is the time of writing
 * alone. */
const char *bench_checkpoint_make(bench *b, const bench_job *job, const bench_side *like,
                                  char *folder, double *seconds);
void bench_checkpoint_remove(const char *folder);
