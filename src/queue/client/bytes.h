/* Who holds the bytes of a queue's columns, as its client sees it: chunks of shared memory, which
 * keepers hold (chunks.c), or a store of objects (objects.c), which any backend.h is. read.c reads
 * what cannot be mapped. */
#pragma once

#include "queue/client/client.h"

/* A column's values for `items` items: `head` bytes of offsets, padded, then `bytes`. */
typedef struct dray__values {
    const dray_column_data *column;
    uint64_t items, unit, head, bytes;
    uint64_t room; /* all of them */
} dray__values;

struct dray__bytes {
    int (*put)(dray_queue *queue, const dray__values *values, dray__extent *extent,
               dray__storage_room *room, dray_error *error);
    /* Nothing more is done with what was put: it was committed (done), or not, or maybe. */
    void (*done)(dray_queue *queue, const dray__storage_room *room, bool done, bool maybe);
    /* How many bytes of memory columns of these rooms need that is not there yet. NULL: none. */
    int (*ahead)(dray_queue *queue, const uint64_t *rooms, uint32_t count, uint64_t *bytes,
                 dray_error *error);
    /* What was put is gone with its holder: learns who holds what comes. NULL: nobody else does. */
    int (*move)(dray_queue *queue, dray_error *error);
    /* Before anything is read. NULL: nothing is to be done. */
    int (*prepare)(dray_queue *queue, dray_error *error);
    /* Must it be got, because it cannot be mapped here? Then as a backend's get. NULL: always. What
     * was got already is got again, with its row. */
    bool (*is_elsewhere)(const dray_queue *queue, uint32_t home);
    int (*get)(dray_queue *queue, dray__range *ranges, uint32_t count, int64_t deadline_ns,
               dray_error *error);
    void (*close)(dray_queue *queue); /* tells what was given up; NULL: nothing */
    const char *holder, *lost;        /* who has lost bytes (NULL: the store), how that may be */
};

static inline bool dray__bytes_elsewhere(const dray_queue *queue,
                                         const struct dray__batch_extent *extent)
{
    return !queue->bytes->is_elsewhere ||
           queue->bytes->is_elsewhere(queue, extent ? extent->home : queue->home);
}

extern const dray__bytes dray__bytes_chunks, dray__bytes_objects;

/* As the answer to OPEN says. former: our number at a controller that is gone, whose objects are
 * others; 0: it is the same controller, and what we had put there its own to keep or drop. */
int dray__bytes_open(dray_queue *queue, uint32_t former, const dray__welcome *welcome,
                     dray_error *error);
/* Writes the values' offsets, which begin at 0. */
void dray__values_offsets(const dray__values *values, uint64_t *to);
/* Tells the controller of chunks that were closed, if there are any. */
void dray__chunks_tell(dray_queue *queue);
/* Gets what the batch's rows have of the column where it cannot be mapped: afterwards every extent
 * that they are in has its mapping, in which that much is filled in. DRAY_EGONE: its holder has
 * lost it; the controller was told which rows. */
int dray__batch_get(dray_batch *batch, dray__batch_column *column, dray_error *error);
void dray__buffers_free(dray__buffer *buffers);
