/* loader.h - batches for a loop. A loader claims batches ahead of the loop, balances them by the
 * claim's policy, returns them whole or as micro-batches, and commits them when the loop has
 * finished them.
 *
 * A loader has no thread: it sends requests before the loop asks for their answers. While the loop
 * works on one batch, the claim of the next batch is under way or answered. Finished batches are
 * committed in the same message as the next claim.
 *
 *     while (!(status = dray_loader_next(loader, DRAY_WAIT_DEFAULT, &load, &error))) {
 *         ... dray_batch_column(load.batch, ...), dray_batch_set(load.batch, ...) ...
 *         status = dray_loader_done(loader, &load, &error);
 *     }                                    (DRAY_EEND: all is done, and committed)
 *
 * Ranks of a consumer group (data parallel, and with lockstep also tensor and pipeline parallel)
 * have a loader each, whose claims differ in dp_rank and peer only.
 *
 * Threads: a loader belongs to its queue, and both to one thread at a time. After fork() the child
 * gets DRAY_ECLOSED. Since 0.1. */
#ifndef DRAY_LOADER_H
#define DRAY_LOADER_H

#include <dray/queue.h>

#ifdef __cplusplus
extern "C" {
#endif

typedef struct dray_loader dray_loader;

typedef struct dray_loader_options {
    size_t size;
    /* The claim that is repeated; borrowed for the call. Its timeout_ns is the default of
     * dray_loader_next. Its round is that of the first claim; later claims in lockstep count on
     * from it. Its max_hold_ns counts from when a batch is returned; a batch that was taken back
     * before is left out. */
    const dray_claim_options *claim;
    uint32_t ahead; /* batches that may wait to be handed out; 0 means 1 */
    uint32_t
        ahead_rows; /* no claim ahead where it would exceed these; 0: no bound. With less than */
    uint64_t
        ahead_bytes; /* one batch no claim is made ahead. Bytes are those of the columns that the
                        task needs; the next batch is assumed to be as large as the last one */
    int32_t micro;   /* 1: hands out micro-batches, one after the other */
} dray_loader_options;

#define DRAY_LOADER_OPTIONS_INIT                                                                   \
    {                                                                                              \
        sizeof(dray_loader_options), NULL, 0, 0, 0, 0                                              \
    }

/* A batch, or one micro-batch of it, on which the loop works. */
typedef struct dray_load {
    size_t size;            /* sizeof(dray_load), set by the caller */
    dray_batch *batch;      /* the loader's; valid until all its loads are done or failed */
    uint64_t number;        /* of the batch, counted from 0 */
    uint32_t first, rows;   /* places in the batch */
    uint32_t micro, micros; /* which of how many of the batch; 0 of 1 without `micro` */
} dray_load;

#define DRAY_LOAD_INIT                                                                             \
    {                                                                                              \
        sizeof(dray_load), NULL, 0, 0, 0, 0, 0                                                     \
    }

/* queue is borrowed until dray_loader_close. A queue has only one loader, and no
 * dray_queue_claim_start beside it. Claims nothing yet. DRAY_EINVALID, DRAY_ENOENT: as
 * dray_queue_claim. Owner: the caller. Does not block. */
int dray_loader_open(dray_queue *queue, const dray_loader_options *options, dray_loader **out,
                     dray_error *error);
/* Commits the loads that the loop has finished, gives the rest back, and ends a claim that is under
 * way. Call dray_loader_flush before to learn of commits that fail. NULL is fine. Blocks for
 * answers, up to the queue's timeout. */
void dray_loader_close(dray_loader *loader);

/* Returns the next load. Waits for one up to timeout_ns (DRAY_WAIT_DEFAULT: the claim's). With 0 it
 * returns DRAY_EAGAIN while there is none; ask again when dray_queue_fd is readable.
 * DRAY_ETIMEDOUT: the message has the cause of the claim's wait; the claim goes on, and the next
 * call may succeed. DRAY_EEND: as of a claim; everything that the loop had finished is committed. A
 * partition ends only when the loop has finished all of its loads.
 *
 * DRAY_ESTALE, DRAY_EGONE: a batch that the loop had finished could not be committed, because its
 * rows were taken back or cleared. Its outputs are dropped (another attempt makes them again), and
 * the loader goes on: call again. The same codes of a claim (a lockstep group that is void; a
 * partition that was cleared) and its other errors come with every further call. DRAY_ECLOSED: the
 * connection is gone; rows that were not committed are given back. */
int dray_loader_next(dray_loader *loader, int64_t timeout_ns, dray_load *out, dray_error *error);
/* Says that the loop has finished the load. When the last load of a batch is finished, the batch is
 * committed in the message of the next claim, which this call sends if a claim is due, and
 * otherwise the next dray_loader_next. Of peers (lockstep) only the first commits. DRAY_EINVALID:
 * the load is none of this loader's, or was finished before; or, with the last load, an output was
 * not set (the loop still has the load then). Does not wait for an answer. */
int dray_loader_done(dray_loader *loader, const dray_load *load, dray_error *error);
/* Says that the loop could not process the load: its rows are given back as a failed attempt, as by
 * dray_batch_fail. The batch's other rows are committed as usual. Blocks for one answer. */
int dray_loader_fail(dray_loader *loader, const dray_load *load, const char *reason,
                     dray_error *error);
/* dray_loader_hold keeps the memory that the load's batch reads mapped after the load is finished,
 * for arrays that still point there; each call needs one dray_loader_unhold. Batches that are held
 * when the loader is closed belong to the caller, who ends them with dray_batch_free before the
 * queue is closed. DRAY_EINVALID: as of dray_loader_done. Both do not block. */
int dray_loader_hold(dray_loader *loader, const dray_load *load, dray_error *error);
void dray_loader_unhold(dray_loader *loader, const dray_batch *batch);
/* Commits the batches that the loop has finished. Errors as of dray_loader_next. Blocks for one
 * answer a batch. */
int dray_loader_flush(dray_loader *loader, dray_error *error);

typedef struct dray_loader_counts {
    size_t size;
    uint64_t batches, rows;     /* handed out */
    uint64_t committed, lost;   /* batches; lost ones were stale, or their partition was cleared */
    uint64_t waits;             /* times that dray_loader_next found nothing ready, */
    int64_t waited_ns;          /* and how long it waited then */
    uint32_t ready, unfinished; /* batches: claimed ahead, in the loop's hands */
} dray_loader_counts;

#define DRAY_LOADER_COUNTS_INIT                                                                    \
    {                                                                                              \
        sizeof(dray_loader_counts), 0, 0, 0, 0, 0, 0, 0, 0                                         \
    }

/* Does not block. */
int dray_loader_count(const dray_loader *loader, dray_loader_counts *out, dray_error *error);

#ifdef __cplusplus
}
#endif
#endif
