/* src/run/host/: a process of a built-in program. loop.c opens the parts that every program needs
 * and claims batches for its tasks, one after the other, on all ranks; host.c has the functions
 * that programs call, and turn.c lets programs that share devices compute in turns. The programs'
 * work on a batch is in desk/, engine/ and trainer/, as their dray__program_kind names it.
 *
 * A host: one process of a built-in program (one rank of an instance of a role). `dray run` starts
 * it as `dray host`. Its role comes from the environment (contract.h), its settings from the run's
 * config.yaml. */
#pragma once

#include "engine/engine.h"
#include "group/group.h"
#include "run/host/turn.h"
#include "run/job/contract.h"
#include "run/job/model.h"
#include "run/job/tasks.h"
#include "run/paths.h"

#include <dray/queue.h>
#include <dray/trace.h>
#include <jansson.h>

struct dray__host {
    const dray__job *job;
    const dray__job_role *spec;
    dray__host_options options;
    char label[48]; /* the name of the instance (contract.h) */
    dray_context *context;
    dray_queue *queue;
    dray__group *group;
    dray__turn *turn; /* NULL when it shares no device (turn.h) */
    dray__tokenizer *tokenizer;
    int64_t wait_ns;
    dray__pace paced;
    const dray__pace *pace; /* &paced with clock.enabled; NULL when the work is computed */
    /* A task's `run` sets these on all ranks. */
    bool put_back; /* the batch is given back unchanged */
    bool kept;     /* the program owns rank 0's batch now, and commits and frees it later */
    /* The step of the checkpoint that is being written; -1 for none (checkpoint.c). */
    _Atomic int64_t saving;
    void *state; /* the program's */
};

/* The functions of a program for one of its tasks. */
typedef struct dray__task_work {
    const char *task; /* NULL at the end of a program's list */
    /* Returns how many rows to claim now, or 0. Called on rank 0. NULL when the task claims nothing
     * (driver). */
    uint32_t (*count)(const dray__host *host);
    /* Returns the version that consumes the samples; samples that are too old for it are dropped
     * (queue.staleness). NULL when none are dropped. */
    int64_t (*version)(const dray__host *host);
    /* Returns true when only samples of the newest version are claimed and older ones are left.
     * NULL when samples of all versions are claimed. */
    bool (*newest)(const dray__host *host);
    /* Returns the partition to claim from. NULL, or a returned NULL, means any partition. */
    const char *(*partition)(const dray__host *host);
    /* Does the work that needs no turn on the role's devices (turn.h), on all ranks, before the
     * wait for the turn. NULL when there is none. */
    int (*prepare)(dray__host *host, dray_batch *batch, int64_t step, dray_error *error);
    /* Computes the batch's outputs on all ranks; rank 0 sets them. The loop commits the batch. */
    int (*run)(dray__host *host, dray_batch *batch, int64_t step, dray_error *error);
    bool spanned; /* whether each run is a span with the task's name in the trace */
    /* Returns true when the next claim depends on this commit, or on its effects. NULL when it does
     * not. */
    bool (*commits_alone)(const dray__host *host);
    /* Runs after the commit, on all ranks. NULL when there is nothing to do. */
    int (*after)(dray__host *host, dray_error *error);
} dray__task_work;

enum { DRAY__TURN_LAST = -2 };

/* The programs of engine.c, trainer.c and desk.c, as the loop sees them. */
typedef struct dray__program_kind {
    int (*open)(dray__host *host, dray_error *error);
    /* Called on all ranks when no more batches will come. NULL when there is nothing to do. */
    int (*finish)(dray__host *host, dray_error *error);
    /* For tasks that keep batches. `busy` returns true when there are any. `turn` does a piece of
     * the work on all of them, on all ranks. The loop claims more between two calls of `turn`. NULL
     * when no task keeps batches. `decide`, on rank 0, returns a number that the other ranks cannot
     * know, or -1. `turn` gets that number on all ranks. It gets TURN_LAST when no more batches
     * will come, and ends or drops the work under way: the loop calls it with nothing else until
     * `busy` returns false. */
    bool (*busy)(const dray__host *host);
    int64_t (*decide)(dray__host *host);
    int (*turn)(dray__host *host, int64_t decision, dray_error *error);
    void (*close)(dray__host *host);
    const dray__task_work *works;
} dray__program_kind;

extern const dray__program_kind dray__engine_program, dray__trainer_program, dray__critic_program,
    dray__desk_program;

/* Runs the process until the queue ends, and then returns DRAY_OK. */
int dray__host_main(const dray__host_options *options, dray_error *error);

/* Describes the next claim for the task: `rows` rows. */
void dray__task_claim(const dray__host *host, const dray__task_kind *kind,
                      const dray__task_work *work, uint32_t rows, dray_claim_options *out);

/* ---- for the tasks --------------------------------------------------------------------------- */

static inline bool dray__host_leads(const dray__host *host)
{
    return host->options.rank == 0;
}

/* Puts one number for each response token of the batch into a column of this name. Called on all
 * ranks; rank 0 sets the column. */
typedef int dray__score_fn(dray__host *host, const dray__sequences *sequences, float *out,
                           dray_error *error);
int dray__host_score(dray__host *host, dray_batch *batch, const char *column, dray__score_fn *score,
                     dray_error *error);
/* Takes `object`; NULL fails with DRAY_ENOMEM. */
int dray__host_report(dray__host *host, const char *kind, json_t *object, dray_error *error);
/* The same, without waiting for the coordinator's answer. */
int dray__host_tell(dray__host *host, const char *kind, json_t *object, dray_error *error);
/* Barrier and all-gather among the ranks of the instance. The trace records how long this rank
 * waited. */
int dray__host_meet(dray__host *host, dray_error *error);
int dray__host_gather(dray__host *host, const void *in, uint64_t bytes, void *out,
                      dray_error *error);
/* Copies rank 0's value to all ranks. */
int dray__host_broadcast(dray__host *host, void *data, uint64_t bytes, int64_t timeout_ns,
                         dray_error *error);
/* Makes a path below the run's folder. */
void dray__host_path(const dray__host *host, char *out, size_t capacity, const char *format, ...)
    __attribute__((format(printf, 4, 5)));
/* Waits until a file or folder exists that another trainer renames into place once it is whole. */
int dray__host_wait_file(const dray__host *host, const char *path, dray_error *error);
/* Returns true when the run is to end after the current step, because its folder has a file
 * `stop`. */
bool dray__host_stopping(const dray__host *host);
/* Asks the queue whether it has ended. Returns false when there is no answer. */
bool dray__host_queue_ended(const dray__host *host);
