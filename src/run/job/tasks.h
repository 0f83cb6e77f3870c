/* The tasks of a job and the columns between them. A task is one line of the table here and one
 * line of its program's table (dray__task_work in host.h), which has the functions that turn a
 * claimed batch into its outputs. The loop of the built-in programs (loop.c) does the rest. */
#pragma once

#include "queue/client/training.h"
#include "run/job/job.h"

#include <dray/queue.h>
#include <jansson.h>

/* The built-in program of a role, by its model: the engine, the policy's trainer, the value model's
 * trainer, or the desk, which has no model. */
typedef enum dray__role_program {
    DRAY__PROGRAM_ENGINE = 0,
    DRAY__PROGRAM_TRAINER,
    DRAY__PROGRAM_CRITIC,
    DRAY__PROGRAM_DESK,
    DRAY__PROGRAM_COUNT
} dray__role_program;

typedef struct dray__task_kind {
    const char *name;
    int program;                       /* dray__role_program */
    const char *needs[12], *writes[6]; /* ended by NULL */
    int32_t policy;                    /* dray_policy; `ordered` unless the job sets another */
    bool trains; /* its commits are provisional until a checkpoint covers them */
} dray__task_kind;

enum { DRAY__TASK_COUNT = 10 };
extern const dray__task_kind dray__tasks[DRAY__TASK_COUNT];
/* `score` grades the outputs of `eval`. When no role names it, the built-in program that runs
 * `reward` runs it, or else the built-in program that runs `driver`. */
extern const dray__task_kind dray__task_score;

const dray__task_kind *dray__task_find(const char *name); /* NULL when there is none */
/* Returns whether the job has this task or column. Some depend on settings. */
bool dray__job_has(const dray__job *job, const char *name);
/* Returns the name of the setting that adds the task or column; "" when none does. */
const char *dray__job_has_by(const char *name);
/* Returns whether the program trains a model. A job has one role of each such program. */
static inline bool dray__program_trains(int program)
{
    return program == DRAY__PROGRAM_TRAINER || program == DRAY__PROGRAM_CRITIC;
}
bool dray__task_used(const dray__job *job, const dray__task_kind *kind);
/* Returns whether the task claims rows. `driver` does not. */
static inline bool dray__task_has_rows(const dray__task_kind *kind)
{
    return kind->needs[0] != NULL;
}
/* Gets the built-in tasks that `role` claims for, and returns how many. */
uint32_t dray__tasks_of(const dray__job *job, const dray__job_role *role,
                        const dray__task_kind **out);

/* Opens the job's queue, with its closed set of tasks. */
#define DRAY__QUEUE_NAME "samples"
int dray__job_queue_open(dray_context *context, const dray__job *job, dray_queue **out,
                         dray_error *error);
/* The same with a checkpoint's content (dray_queue_options.restore); NULL for an empty queue. */
int dray__job_queue_restore(dray_context *context, const dray__job *job, const char *path,
                            dray_queue **out, dray_error *error);

/* Reads dray_queue_status as a new JSON object; *out is NULL on failure. */
int dray__queue_state(dray_queue *queue, json_t **out, dray_error *error);
/* Gets the version that the trainer has published, for queues that admit samples by it. */
int dray__queue_version(dray_queue *queue, int64_t *version, dray_error *error);

/* Samples carry the tag "step". */
#define DRAY__TAG_STEP "step"
#define DRAY__TAG_REFILL "refill" /* of samples that replaced lost ones: which one, from 1 */
