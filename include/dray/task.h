/* task.h - the few calls that a program needs to be a task of a running job. The environment, which
 * `dray run` sets, says where the coordinator is, which task of which queue the program is, and its
 * rank: DRAY_ADDRESS, DRAY_TASK, DRAY_QUEUE, DRAY_RANK, and DRAY_ROLE for messages. Since 0.1. */
#ifndef DRAY_TASK_H
#define DRAY_TASK_H

#include <dray/queue.h>

#ifdef __cplusplus
extern "C" {
#endif

typedef struct dray_task dray_task;

typedef struct dray_task_options {
    size_t size;
    const char *name;     /* NULL means $DRAY_TASK */
    const char *queue;    /* NULL means $DRAY_QUEUE, else "samples" */
    uint32_t micro_batch; /* rows a claim; 0 means 32 */
    int32_t exact;        /* 1: no fewer rows, as without up_to in dray_claim_options */
    int32_t policy;       /* dray_policy */
    int64_t timeout_ns;   /* of each dray_task_next, and of opening */
} dray_task_options;

#define DRAY_TASK_OPTIONS_INIT                                                                     \
    {                                                                                              \
        sizeof(dray_task_options), NULL, NULL, 0, 0, 0, DRAY_WAIT_DEFAULT                          \
    }

/* Opens a session, the queue and the task. reads, writes: NULL-terminated lists of columns,
 * borrowed for the call. They are compared with the queue's table: the task must need every column
 * that it reads, and write exactly the columns of the table. A list that is NULL is not compared.
 * options NULL: all from the environment. The caller ends *out with dray_task_close. DRAY_EINVALID:
 * the columns differ; the message names them. One thread at a time. Blocks up to the timeout. */
int dray_task_open(const char *const *reads, const char *const *writes,
                   const dray_task_options *options, dray_task **out, dray_error *error);
/* Claims the next batch. The task owns it: the next call, or dray_task_close, frees it. DRAY_EEND:
 * the task has no more rows. Other errors as of dray_queue_claim. Blocks up to the timeout. */
int dray_task_next(dray_task *task, dray_batch **out, dray_error *error);
/* Frees the batch, closes queue and session. NULL is fine. */
void dray_task_close(dray_task *task);

#ifdef __cplusplus
}
#endif
#endif
