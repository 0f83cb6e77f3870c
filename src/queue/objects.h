/* A client's ends of a backend that is a store (backend.h), and of other hosts' chunks: outputs
 * written into a store, columns read from it, or from another host, into buffers that are kept and
 * used again. */
#ifndef DRAY_QUEUE_OBJECTS_H
#define DRAY_QUEUE_OBJECTS_H

#include "queue/client.h"

/* What the answer to OPEN says: u32 backend, str address, u64 space. */
int dray__objects_open(dray_queue *queue, dray__reader *r, dray_error *error);
/* The same of a controller that was started anew: its objects are others. former: our number there
 * before; 0: it is the same controller, and what we had put there its own to keep or drop. */
int dray__objects_reopen(dray_queue *queue, uint32_t former, dray__reader *r, dray_error *error);
/* Tells what was given up. */
void dray__objects_close(dray_queue *queue);
/* As dray__queue_write, whose checks are done: `head` bytes of offsets, padded, then `bytes`. */
int dray__objects_write(dray_queue *queue, const dray_column_data *column, uint64_t unit,
                        uint64_t items, uint64_t head, uint64_t bytes, dray__extent *extent,
                        dray__span *span, dray_error *error);
void dray__objects_done(dray_queue *queue, const dray__span *span, bool done);
/* Gets what the batch's rows have of the column where it cannot be mapped: afterwards every extent
 * that they are in has its mapping, in which that much is filled in. DRAY_EGONE: the store has lost
 * it; the controller was told which rows. */
int dray__objects_read(dray_batch *batch, dray__batch_column *column, dray_error *error);
void dray__buffers_free(dray__buffer *buffers);

#endif
