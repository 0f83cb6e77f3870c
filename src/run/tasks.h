/* The tasks of a job and the columns between them. A task is one line of the table here and one
 * function that turns a claimed batch into its outputs; the loop of the built-in programs (host.c)
 * does the rest. */
#ifndef DRAY_RUN_TASKS_H
#define DRAY_RUN_TASKS_H

#include "run/job.h"

#include <dray/queue.h>
#include <jansson.h>

typedef struct dray__host dray__host;

/* What the built-in program of a role holds: an engine, the policy's trainer, the value model's, or
 * neither. */
typedef enum dray__program {
    DRAY__PROGRAM_ENGINE = 0,
    DRAY__PROGRAM_TRAINER,
    DRAY__PROGRAM_CRITIC,
    DRAY__PROGRAM_DESK,
    DRAY__PROGRAM_COUNT
} dray__program;

typedef struct dray__task_kind {
    const char *name;
    int program;                       /* dray__program */
    const char *needs[12], *writes[6]; /* ended by NULL */
    int32_t policy;                    /* dray_policy; ordered: unless the job says otherwise */
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
    int (*prepare)(dray__host *host, dray_batch *batch, dray_error *error);
    /* Computes the batch's outputs, on all ranks; rank 0 sets them. The loop commits. */
    int (*run)(dray__host *host, dray_batch *batch, dray_error *error);
    /* After the commit, on all ranks; NULL: nothing to do. */
    int (*after)(dray__host *host, dray_error *error);
} dray__task_kind;

enum { DRAY__TASK_COUNT = 10 };
extern const dray__task_kind dray__tasks[DRAY__TASK_COUNT];
/* `score` grades what `eval` generated; where no role names it, the one with `reward` has it, or
 * the one with `driver`, where that is the built-in program. */
extern const dray__task_kind dray__task_score;

const dray__task_kind *dray__task_find(const char *name); /* NULL: none */
/* Has the job this task, or this column? Some only some jobs have. */
bool dray__job_has(const dray__job *job, const char *name);
/* The setting that says so; "": none does. */
const char *dray__job_has_by(const char *name);
/* Does the program train a model? There is one of each such program. */
static inline bool dray__program_trains(int program)
{
    return program == DRAY__PROGRAM_TRAINER || program == DRAY__PROGRAM_CRITIC;
}
bool dray__task_used(const dray__job *job, const dray__task_kind *kind);
/* Its commits are provisional: a checkpoint covers them. */
static inline bool dray__task_trains(const dray__task_kind *kind)
{
    return kind->after != NULL;
}
/* The built-in tasks that `role` claims for; returns how many. */
uint32_t dray__tasks_of(const dray__job *job, const dray__job_role *role,
                        const dray__task_kind **out);

/* The job's queue, with its closed set of tasks. */
#define DRAY__QUEUE_NAME "samples"
int dray__job_queue_open(dray_context *context, const dray__job *job, dray_queue **out,
                         dray_error *error);
/* The same as a checkpoint says that it was (dray_queue_options.restore); NULL: empty. */
int dray__job_queue_restore(dray_context *context, const dray__job *job, const char *path,
                            dray_queue **out, dray_error *error);

/* dray_queue_status, read; *out is the caller's, NULL where it fails. */
int dray__queue_state(dray_queue *queue, json_t **out, dray_error *error);
/* The version that the trainer has published, where the queue admits samples by it. */
int dray__queue_version(dray_queue *queue, int64_t *version, dray_error *error);

/* What a host claims next for the task: `rows` rows. */
void dray__task_claim(const dray__host *host, const dray__task_kind *kind, uint32_t rows,
                      dray_claim_options *out);

/* Partitions: "step-000007" and "eval-000007". Samples carry the tag "step". */
enum { DRAY__PARTITION_BYTES = 32 };
void dray__partition_name(const char *kind, int64_t step, char out[DRAY__PARTITION_BYTES]);
/* -1: not a partition of that kind. */
int64_t dray__partition_step(const char *kind, const char *name);

#define DRAY__TAG_STEP "step"
#define DRAY__TAG_REFILL "refill" /* of samples that took the place of lost ones: which, from 1 */

/* engine.c, trainer.c, critic.c, desk.c */
uint32_t dray__rollout_count(const dray__host *host);
int dray__rollout_prepare(dray__host *host, dray_batch *batch, dray_error *error);
int dray__rollout_run(dray__host *host, dray_batch *batch, dray_error *error);
uint32_t dray__eval_count(const dray__host *host);
int dray__eval_prepare(dray__host *host, dray_batch *batch, dray_error *error);
int dray__eval_run(dray__host *host, dray_batch *batch, dray_error *error);
uint32_t dray__old_log_prob_count(const dray__host *host);
int dray__old_log_prob_run(dray__host *host, dray_batch *batch, dray_error *error);
uint32_t dray__value_count(const dray__host *host);
int dray__value_run(dray__host *host, dray_batch *batch, dray_error *error);
uint32_t dray__actor_count(const dray__host *host);
int64_t dray__trainer_version(const dray__host *host);
bool dray__actor_newest(const dray__host *host);
const char *dray__trainer_partition(const dray__host *host);
int dray__actor_run(dray__host *host, dray_batch *batch, dray_error *error);
int dray__actor_after(dray__host *host, dray_error *error);
uint32_t dray__reward_count(const dray__host *host);
int dray__reward_run(dray__host *host, dray_batch *batch, dray_error *error);
uint32_t dray__score_count(const dray__host *host);
int dray__score_run(dray__host *host, dray_batch *batch, dray_error *error);
uint32_t dray__reference_count(const dray__host *host);
int dray__reference_run(dray__host *host, dray_batch *batch, dray_error *error);
uint32_t dray__advantage_count(const dray__host *host);
int dray__advantage_run(dray__host *host, dray_batch *batch, dray_error *error);

#endif
