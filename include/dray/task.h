/* task.h - the few calls that a program needs to be a task of a running job: claim, read, set,
 * commit. Where the job's coordinator is, which task this is, of which queue, and its rank among
 * those of the task come from the environment of whoever starts it: DRAY_ADDRESS, DRAY_TASK,
 * DRAY_QUEUE, DRAY_RANK. */
#ifndef DRAY_TASK_H
#define DRAY_TASK_H

#include <dray/queue.h>

#ifdef __cplusplus
extern "C" {
#endif

typedef struct dray_task dray_task;

typedef struct dray_task_options {
    size_t size;
    const char *name;     /* NULL: $DRAY_TASK */
    const char *queue;    /* NULL: $DRAY_QUEUE, else "samples" */
    uint32_t micro_batch; /* rows a claim; 0: 32 */
    int32_t up_to;        /* as in dray_claim_options */
    int32_t policy;       /* dray_policy */
    int64_t timeout_ns;   /* of each dray_task_next, and of opening */
} dray_task_options;

#define DRAY_TASK_OPTIONS_INIT                                                                     \
    {                                                                                              \
        .size = sizeof(dray_task_options), .up_to = 1, .timeout_ns = DRAY_WAIT_DEFAULT             \
    }

/* Opens a session, the queue and the task. reads, writes: NULL-terminated lists of columns,
 * borrowed; checked against the job's table: what is read must be needed there, and what is written
 * must be what is written there (DRAY_EINVALID says what differs); NULL: not checked. options NULL:
 * all from the environment. Blocks up to the timeout. Owner: the caller, until dray_task_close. One
 * thread at a time. Since 0.1. */
int dray_task_open(const char *const *reads, const char *const *writes,
                   const dray_task_options *options, dray_task **out, dray_error *error);
/* The next batch, the task's: it is freed by the next call or by dray_task_close, not by
 * dray_batch_free. DRAY_EEND ends the task. Other errors as of dray_queue_claim. */
int dray_task_next(dray_task *task, dray_batch **out, dray_error *error);
dray_context *dray_task_context(dray_task *task); /* the task's; for barriers and reports */
/* Frees the batch, closes queue and session. NULL is fine. */
void dray_task_close(dray_task *task);

#ifdef __cplusplus
}
#endif
#endif
