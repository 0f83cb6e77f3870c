/* queue.h - a streaming table between the tasks of the RL loop: samples (rows) by task outputs
 * (columns). Producers write columns of the rows that they claimed, consumers claim rows whose
 * columns are there; nobody copies a byte that the consumer does not read.
 *
 * Delivery is at least once; committed output is once per (sample, task). */
#ifndef DRAY_QUEUE_H
#define DRAY_QUEUE_H

#include <dray/dray.h>
#include <dray/model.h>

#ifdef __cplusplus
extern "C" {
#endif

typedef struct dray_queue dray_queue;
typedef struct dray_batch dray_batch;

typedef struct dray_queue_task {
    const char *name;
    const char *const *needs; /* columns that must be committed before a row is ready */
    uint32_t needs_count;
    const char *const *writes; /* columns that the task commits; may be none */
    uint32_t writes_count;
} dray_queue_task;

typedef struct dray_queue_options {
    size_t size;
    const dray_queue_task *tasks; /* the closed set; borrowed for the call */
    uint32_t task_count;
    uint64_t capacity_rows;  /* rows alive at once; 0: 1,000,000 */
    uint64_t capacity_bytes; /* bytes of committed columns alive at once; 0: 4 GiB */
    uint32_t max_attempts;   /* 0: 3 */
    int64_t timeout_ns;      /* 0: the context's */
} dray_queue_options;

#define DRAY_QUEUE_OPTIONS_INIT                                                                    \
    {                                                                                              \
        sizeof(dray_queue_options), NULL, 0, 0, 0, 0, 0                                            \
    }

/* Opens the queue `name`, creating it if it is not there. Tasks may be given by everybody who
 * opens, and must then be equal (DRAY_EEXIST says what differs); task_count 0 attaches to a queue
 * that exists, waiting for it up to the timeout. */
int dray_queue_open(dray_context *context, const char *name, const dray_queue_options *options,
                    dray_queue **out, dray_error *error);
void dray_queue_close(dray_queue *queue);
int dray_queue_fd(const dray_queue *queue); /* readable when a started claim has an answer */

/* ---- columns ------------------------------------------------------------------------------------
 */

typedef enum dray_content {
    DRAY_CONTENT_TENSOR = 0,
    DRAY_CONTENT_STRING, /* UTF-8; dtype U8, ragged */
    DRAY_CONTENT_BYTES   /* dtype U8, ragged */
} dray_content;

/* Values of one column for `count` rows, back to back in row order. */
typedef struct dray_column_data {
    const char *name;
    int32_t dtype;
    int32_t content; /* dray_content */
    uint32_t ndim;   /* dimensions of one row's value; the first is ragged with offsets */
    int64_t shape[DRAY_MAX_DIMS]; /* of one row; shape[0] ignored where ragged */
    const uint64_t *offsets;      /* count + 1, in units of shape[1..] slices; NULL: fixed shape */
    const void *values;
} dray_column_data;

typedef struct dray_tag {
    const char *key;
    double number;
} dray_tag;

typedef struct dray_row {
    uint32_t slot;       /* place within the partition */
    uint32_t generation; /* a stale address is an error, never another sample */
    uint32_t attempt;
    uint32_t group; /* group number within the partition */
    uint64_t id;    /* unique over the life of the queue */
} dray_row;

/* ---- producers ----------------------------------------------------------------------------------
 */

typedef struct dray_insert_options {
    size_t size;
    const char *partition;
    uint32_t rows;
    uint32_t
        group_size; /* rows of one prompt (GRPO's n), consecutive; 0: 1. rows % group_size = 0 */
    int32_t once_per_group; /* columns and tags have one entry a group, not a row */
    const dray_column_data *columns;
    uint32_t column_count;
    const dray_tag *tags; /* tag_count tags, the same for every row of this insert */
    uint32_t tag_count;
    uint64_t row_bytes; /* declared worst case of all columns of a row, reserved now; 0: none */
    int64_t timeout_ns; /* how long to wait for capacity; 0: DRAY_EFULL at once */
    uint64_t at_slot;   /* 0: append; n: the rows must start at slot n - 1 */
} dray_insert_options;

#define DRAY_INSERT_OPTIONS_INIT                                                                   \
    {                                                                                              \
        .size = sizeof(dray_insert_options), .timeout_ns = DRAY_WAIT_DEFAULT                       \
    }

/* Makes rows, all visible or none. first_slot may be NULL. */
int dray_insert(dray_queue *queue, const dray_insert_options *options, uint32_t *first_slot,
                dray_error *error);
/* Fixes the partition's number of rows. DRAY_EINVALID when it holds another number. */
int dray_seal(dray_queue *queue, const char *partition, uint32_t rows, dray_error *error);
/* Hides the partition's rows now, frees them after the last pin. Sealed or not. */
int dray_clear(dray_queue *queue, const char *partition, dray_error *error);
/* Waits until `task` (NULL: all tasks) is done with a sealed partition: every row committed,
 * dropped or dead. */
int dray_queue_wait(dray_queue *queue, const char *partition, const char *task, int64_t timeout_ns,
                    dray_error *error);
/* No more partitions will come: claims that can never be filled end with DRAY_EEND. */
int dray_queue_end(dray_queue *queue, dray_error *error);

/* ---- consumers ----------------------------------------------------------------------------------
 */

typedef enum dray_policy {
    DRAY_POLICY_FIFO = 0, /* in the order in which rows became ready */
    DRAY_POLICY_ORDERED,  /* ascending partition and slot, waiting for the next one */
    DRAY_POLICY_GROUP     /* whole groups only, first complete first */
} dray_policy;

typedef struct dray_claim_options {
    size_t size;
    const char *task;
    const char *partition; /* NULL: any, oldest first; a batch never spans partitions */
    uint32_t count;        /* rows wanted */
    int32_t up_to;         /* 1: any number from 1 to count; 0: exact, short only at the end */
    int32_t policy;        /* dray_policy */
    int64_t timeout_ns;
    int64_t max_hold_ns; /* the claim is taken back after this; 0: it lives as the session */
} dray_claim_options;

#define DRAY_CLAIM_OPTIONS_INIT                                                                    \
    {                                                                                              \
        .size = sizeof(dray_claim_options), .timeout_ns = DRAY_WAIT_DEFAULT                        \
    }

/* Takes rows for a task. Waits, woken, never polling. DRAY_ETIMEDOUT; DRAY_EEND when the named
 * partition is finished for the task, or (no partition named) the queue has ended and nothing can
 * become ready. The batch is the caller's until dray_batch_free. */
int dray_claim(dray_queue *queue, const dray_claim_options *options, dray_batch **out,
               dray_error *error);
/* The first of several claims that can be filled, tried in the order given. *which is its index. */
int dray_claim_any(dray_queue *queue, const dray_claim_options *options, uint32_t count,
                   uint32_t *which, dray_batch **out, dray_error *error);
/* Not blocking: start, then poll (DRAY_EAGAIN until answered) when dray_queue_fd is readable. */
int dray_claim_start(dray_queue *queue, const dray_claim_options *options, uint32_t count,
                     dray_error *error);
int dray_claim_poll(dray_queue *queue, uint32_t *which, dray_batch **out, dray_error *error);

uint32_t dray_batch_rows(const dray_batch *batch);
const char *dray_batch_partition(const dray_batch *batch);
const dray_row *dray_batch_row(const dray_batch *batch, uint32_t index); /* NULL: out of range */
/* DRAY_ENOENT: the row has no such tag. */
int dray_batch_tag(const dray_batch *batch, uint32_t index, const char *key, double *value,
                   dray_error *error);

/* A column of all rows of the batch, read in place: cells[i] points into mapped memory that stays
 * as it is until dray_batch_free, whatever becomes of the claim. */
typedef struct dray_column {
    int32_t dtype, content;
    uint32_t ndim;
    int64_t shape[DRAY_MAX_DIMS]; /* of one row; shape[0] = -1 where ragged */
    const void *const *cells;
    const uint64_t *lengths; /* elements of each row's value */
} dray_column;

int dray_batch_column(dray_batch *batch, const char *name, dray_column *out, dray_error *error);
/* The same, copied back to back into `out` (capacity bytes; DRAY_EFULL names the size needed). */
int dray_batch_gather(dray_batch *batch, const char *name, void *out, size_t capacity,
                      size_t *bytes, dray_error *error);
/* Writes an output column for all rows of the batch, in batch order. Not visible before commit. */
int dray_batch_set(dray_batch *batch, const dray_column_data *column, dray_error *error);
int dray_batch_set_tag(dray_batch *batch, uint32_t index, const char *key, double value,
                       dray_error *error);
/* Outputs, tags and the acknowledgement in one step: all or none. Repeating it succeeds.
 * DRAY_ESTALE: the claim was superseded; DRAY_EINVALID: a column in `writes` was not set. */
int dray_batch_commit(dray_batch *batch, dray_error *error);
/* Gives rows back as failed attempts, with the reason. row_count 0: all of them. Rows that reach
 * max_attempts are dead. */
int dray_batch_fail(dray_batch *batch, const uint32_t *rows, uint32_t row_count, const char *reason,
                    dray_error *error);
/* Renews a claim with max_hold: it is taken back after this many ns from now; 0: it lives as the
 * session. DRAY_ESTALE: too late. */
int dray_batch_hold(dray_batch *batch, int64_t max_hold_ns, dray_error *error);
/* Unpins. A batch neither committed nor failed gives its rows back, not counted as an attempt. */
void dray_batch_free(dray_batch *batch);
/* For the other ranks of a group: describe the batch here, open it read-only there (columns, rows
 * and tags; no commit). *out is malloc'ed. The exporter's batch must outlive the import's reads. */
int dray_batch_export(const dray_batch *batch, void **out, size_t *size, dray_error *error);
int dray_batch_import(dray_queue *queue, const void *data, size_t size, dray_batch **out,
                      dray_error *error);

/* State as JSON: partitions (rows, sealed), depth per column, claims, committed and dead per task,
 * waiters, bytes. *out is malloc'ed. */
int dray_queue_status(dray_queue *queue, char **out, dray_error *error);

#ifdef __cplusplus
}
#endif
#endif
