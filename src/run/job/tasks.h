/* The tasks of a job and the columns between them. A task is one line of the table here, and one
 * of its program's (dray__task_work in host.h), which turns a claimed batch into its outputs; the
 * loop of the built-in programs (loop.c) does the rest. */
#pragma once

#include "queue/client/training.h"
#include "run/job/job.h"

#include <dray/queue.h>
#include <jansson.h>

/* The model that the built-in program of a role has: an engine, the policy's trainer, the value
 * model's, or none. */
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
    bool trains;                       /* its commits are provisional: a checkpoint covers them */
} dray__task_kind;

enum { DRAY__TASK_COUNT = 10 };
extern const dray__task_kind dray__tasks[DRAY__TASK_COUNT];
/* `score` grades the outputs of `eval`. When no role names it, the one with `reward` has it, or the
 * one with `driver`, when that is the built-in program. */
extern const dray__task_kind dray__task_score;

const dray__task_kind *dray__task_find(const char *name); /* NULL when there is none */
/* Has the job this task, or this column? Some only some jobs have. */
bool dray__job_has(const dray__job *job, const char *name);
/* The name of the setting that adds it; "" when none does. */
const char *dray__job_has_by(const char *name);
/* Does the program train a model? There is one of each such program. */
static inline bool dray__program_trains(int program)
{
    return program == DRAY__PROGRAM_TRAINER || program == DRAY__PROGRAM_CRITIC;
}
bool dray__task_used(const dray__job *job, const dray__task_kind *kind);
/* Does it claim rows? `driver` does not. */
static inline bool dray__task_has_rows(const dray__task_kind *kind)
{
    return kind->needs[0] != NULL;
}
/* The built-in tasks that `role` claims for; returns how many. */
uint32_t dray__tasks_of(const dray__job *job, const dray__job_role *role,
                        const dray__task_kind **out);

/* The job's queue, with its closed set of tasks. */
#define DRAY__QUEUE_NAME "samples"
int dray__job_queue_open(dray_context *context, const dray__job *job, dray_queue **out,
                         dray_error *error);
/* The same with a checkpoint's content (dray_queue_options.restore); NULL for an empty queue. */
int dray__job_queue_restore(dray_context *context, const dray__job *job, const char *path,
                            dray_queue **out, dray_error *error);

/* dray_queue_status, read; *out is the caller's, NULL where it fails. */
int dray__queue_state(dray_queue *queue, json_t **out, dray_error *error);
/* The version that the trainer has published, where the queue admits samples by it. */
int dray__queue_version(dray_queue *queue, int64_t *version, dray_error *error);

/* Samples carry the tag "step". */
#define DRAY__TAG_STEP "step"
#define DRAY__TAG_REFILL "refill" /* of samples that took the place of lost ones: which, from 1 */
