/* A host: one process of a built-in program (one rank of an instance of a role). `dray run` starts
 * it as `dray host`; what it is comes from the environment (contract.h), what it does from the
 * run's config.yaml. */
#ifndef DRAY_RUN_HOST_H
#define DRAY_RUN_HOST_H

#include "engine/pace.h"
#include "engine/tokenizer.h"
#include "group/group.h"
#include "run/job.h"
#include "run/tasks.h"
#include "run/turn.h"

#include <dray/queue.h>
#include <dray/trace.h>
#include <jansson.h>
#include <limits.h>

typedef struct dray__host_options {
    const char *folder;  /* the run's */
    const char *name;    /* of the role, as in the job file */
    const char *address; /* of the coordinator */
    const char *leases;  /* of devices that other roles have, too; NULL, "": none */
    uint32_t instance, rank, epoch;
    int group_fd;       /* -1: one rank alone */
    int64_t first_step; /* the step before the first one to make: 0, or what is resumed from */
    int64_t eval_from;  /* held-out accuracy from this version on is still to be measured */
} dray__host_options;

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
    bool put_back;  /* the batch is given back as it was */
    bool kept;      /* rank 0's batch is the program's now, which commits and frees it later */
    int64_t saving; /* the checkpoint that is being written; -1: none (checkpoint.c) */
    void *state;    /* the program's */
};

enum { DRAY__TURN_LAST = -2 };

/* What engine.c, trainer.c and desk.c give the loop. */
typedef struct dray__program_kind {
    int (*open)(dray__host *host, dray_error *error);
    /* Nothing more will come; NULL: nothing to do. On all ranks. */
    int (*finish)(dray__host *host, dray_error *error);
    /* Where tasks keep batches: whether there are any, and a piece of the work on all of them, on
     * all ranks. The loop claims more between two turns. NULL: no task does. `decide`, on rank 0,
     * says what the others cannot know: its number, -1 where there is nothing to say, is what
     * `turn` gets on all ranks; or TURN_LAST: the run was stopped, and nobody wants what is under
     * way. */
    bool (*busy)(const dray__host *host);
    int64_t (*decide)(dray__host *host);
    int (*turn)(dray__host *host, int64_t decision, dray_error *error);
    void (*close)(dray__host *host);
} dray__program_kind;

extern const dray__program_kind dray__engine_program, dray__trainer_program, dray__critic_program,
    dray__desk_program;

/* Runs until the queue ends. DRAY_OK: it ended. */
int dray__host_main(const dray__host_options *options, dray_error *error);

/* ---- for the tasks --------------------------------------------------------------------------- */

static inline bool dray__host_leads(const dray__host *host)
{
    return host->options.rank == 0;
}

/* Takes `object`; NULL is DRAY_ENOMEM. */
int dray__host_report(dray__host *host, const char *kind, json_t *object, dray_error *error);
/* Barrier and gathering among the ranks of the instance; the trace says what this one waited. */
int dray__host_meet(dray__host *host, dray_error *error);
int dray__host_gather(dray__host *host, const void *in, uint64_t bytes, void *out,
                      dray_error *error);
/* How long work takes where it is slept; false: it is computed (clock.c). */
bool dray__job_pace(const dray__job *job, dray__pace *out);
/* Path below the run's folder. */
void dray__host_path(const dray__host *host, char *out, size_t capacity, const char *format, ...)
    __attribute__((format(printf, 4, 5)));
/* Until a file or folder is there that another trainer renames into place when it is whole. */
int dray__host_wait_file(const dray__host *host, const char *path, dray_error *error);
/* The run is to end after the step that is made: there is a file `stop` in its folder. */
bool dray__host_stopping(const dray__host *host);

/* The file that the job's tokenizer is read from; false: its tokens are bytes. */
bool dray__job_tokenizer_path(const dray__job *job, char path[PATH_MAX]);
/* The tokenizer of the job: model.tokenizer; else the checkpoint's, if it has one; else bytes. */
int dray__job_tokenizer(const dray__job *job, dray__tokenizer **out, dray_error *error);
/* The model of the job: the checkpoint's configuration, or the sizes of the job file. The
 * tokenizer's vocabulary must fit the checkpoint's, and is that of a model from scratch; NULL: it
 * is not looked at, and bytes are taken. */
int dray__job_model_config(const dray__job *job, const dray__tokenizer *tokenizer,
                           dray_model_config *out, dray_error *error);

/* snprintf for paths; run folders are short enough (folder.c) that none is cut. */
void dray__path(char *out, size_t capacity, const char *format, ...)
    __attribute__((format(printf, 3, 4)));
/* A checkpoint's folder below the run's: "checkpoints/step-000007". */
void dray__checkpoint_path(const char *folder, int64_t step, char *out, size_t capacity);

#endif
