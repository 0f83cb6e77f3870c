/* src/run/host/: a process of a built-in program. loop.c opens what every program needs and claims
 * batches for its tasks, one after the other, on all ranks; host.c is what programs call, and
 * turn.c lets programs that share devices compute in turns. What a program does with a batch is in
 * desk/, engine/ and trainer/, as its dray__program_kind names it.
 *
 * A host: one process of a built-in program (one rank of an instance of a role). `dray run` starts
 * it as `dray host`; what it is comes from the environment (contract.h), what it does from the
 * run's config.yaml. */
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
    char label[48]; /* of the instance (contract.h) */
    dray_context *context;
    dray_queue *queue;
    dray__group *group;
    dray__turn *turn; /* NULL: it shares no device (turn.h) */
    dray__tokenizer *tokenizer;
    int64_t wait_ns;
    dray__pace paced;
    const dray__pace *pace; /* with clock.enabled: paced; NULL: work is computed */
    /* Set by a task's run, on all ranks. */
    bool put_back; /* the batch is given back as it was */
    bool kept;     /* rank 0's batch is the program's now, which commits and frees it later */
    _Atomic int64_t saving; /* the checkpoint that is being written; -1: none (checkpoint.c). Steps
                               of all threads are looked at */
    void *state;            /* the program's */
};

/* What a program does for one of its tasks. */
typedef struct dray__task_work {
    const char *task; /* NULL: the end of a program's */
    /* Rows to claim now; 0: none. Asked on rank 0. NULL: the task claims nothing (driver). */
    uint32_t (*count)(const dray__host *host);
    /* The version that consumes: older samples are dropped (queue.staleness). NULL: none are. */
    int64_t (*version)(const dray__host *host);
    /* Samples of that version alone are claimed, and older ones left. NULL: never. */
    bool (*newest)(const dray__host *host);
    /* The partition that is claimed from; NULL, or one that returns NULL: any. */
    const char *(*partition)(const dray__host *host);
    /* What needs no turn on the role's devices (turn.h): before that is waited for, on all ranks.
     * NULL: nothing. */
    int (*prepare)(dray__host *host, dray_batch *batch, int64_t step, dray_error *error);
    /* Computes the batch's outputs, on all ranks; rank 0 sets them. The loop commits. */
    int (*run)(dray__host *host, dray_batch *batch, int64_t step, dray_error *error);
    bool spanned; /* the timeline gets a span of the task's name around each run */
    /* Whether what may be claimed next depends on this commit, or on what follows it. NULL: no. */
    bool (*commits_alone)(const dray__host *host);
    /* After the commit, on all ranks; NULL: nothing to do. */
    int (*after)(dray__host *host, dray_error *error);
} dray__task_work;

enum { DRAY__TURN_LAST = -2 };

/* What engine.c, trainer.c and desk.c give the loop. */
typedef struct dray__program_kind {
    int (*open)(dray__host *host, dray_error *error);
    /* Nothing more will come; NULL: nothing to do. On all ranks. */
    int (*finish)(dray__host *host, dray_error *error);
    /* Where tasks keep batches: whether there are any, and a piece of the work on all of them, on
     * all ranks. The loop claims more between two turns. NULL: no task does. `decide`, on rank 0,
     * says what the others cannot know: its number, -1 where there is nothing to say, is what
     * `turn` gets on all ranks; or TURN_LAST: the run was stopped, and does not need what is under
     * way. */
    bool (*busy)(const dray__host *host);
    int64_t (*decide)(dray__host *host);
    int (*turn)(dray__host *host, int64_t decision, dray_error *error);
    void (*close)(dray__host *host);
    const dray__task_work *works;
} dray__program_kind;

extern const dray__program_kind dray__engine_program, dray__trainer_program, dray__critic_program,
    dray__desk_program;

/* Runs until the queue ends. DRAY_OK: it ended. */
int dray__host_main(const dray__host_options *options, dray_error *error);

/* What is claimed next for the task: `rows` rows. */
void dray__task_claim(const dray__host *host, const dray__task_kind *kind,
                      const dray__task_work *work, uint32_t rows, dray_claim_options *out);

/* ---- for the tasks --------------------------------------------------------------------------- */

static inline bool dray__host_leads(const dray__host *host)
{
    return host->options.rank == 0;
}

/* One number a response token of the batch, into a column of this name: on all ranks; rank 0 sets
 * the column. */
typedef int dray__score_fn(dray__host *host, const dray__sequences *sequences, float *out,
                           dray_error *error);
int dray__host_score(dray__host *host, dray_batch *batch, const char *column, dray__score_fn *score,
                     dray_error *error);
/* Takes `object`; NULL is DRAY_ENOMEM. */
int dray__host_report(dray__host *host, const char *kind, json_t *object, dray_error *error);
/* The same, where the coordinator's answer is not waited for. */
int dray__host_tell(dray__host *host, const char *kind, json_t *object, dray_error *error);
/* Barrier and gathering among the ranks of the instance; the trace says what this one waited. */
int dray__host_meet(dray__host *host, dray_error *error);
int dray__host_gather(dray__host *host, const void *in, uint64_t bytes, void *out,
                      dray_error *error);
/* Rank 0's, on all ranks. */
int dray__host_broadcast(dray__host *host, void *data, uint64_t bytes, int64_t timeout_ns,
                         dray_error *error);
/* Path below the run's folder. */
void dray__host_path(const dray__host *host, char *out, size_t capacity, const char *format, ...)
    __attribute__((format(printf, 4, 5)));
/* Until a file or folder is there that another trainer renames into place when it is whole. */
int dray__host_wait_file(const dray__host *host, const char *path, dray_error *error);
/* The run is to end after the step that is made: there is a file `stop` in its folder. */
bool dray__host_stopping(const dray__host *host);
