/* src/queue/client/: the queue's public functions (dray/queue.h, dray/steps.h) in the processes
 * that produce and consume samples. queue.c opens a queue, chunks.c finds the keeper of its host,
 * insert.c puts rows, claim.c takes them, batch.c reads and commits a claim's columns, loader.c
 * does so ahead of time, task.c is the loop of a task, training.c and feed.c are a trainer's steps.
 */

/* What the client's files share: queue.c (opening), chunks.c (which host), insert.c, commands.c,
 * claim.c (claiming, reading replies), batch.c (reading and writing a batch's columns, committing),
 * gather.c (rows of a column together). */
#pragma once

#include "base/arena.h"
#include "control/channel.h"
#include "queue/messages.h"
#include "queue/storage/holder.h"
#include "queue/table/table.h"
#include "trace/tracing.h"

#include <dray/queue.h>

/* What the numbers in replies mean. */
typedef struct dray__names {
    dray__known_column *columns; /* by the controller's index; name NULL: not known */
    uint32_t column_count, columns_known;
    uint64_t column_capacity, key_capacity;
    const char **keys;
    uint32_t key_count;
    dray__arena arena;        /* of the names */
    struct dray__names *past; /* of a controller that is gone: batches refer to them */
} dray__names;

struct dray_queue {
    dray_context *context;
    dray__channel *channel;
    dray__values_holder holder; /* of the bytes of columns */
    dray__tls_key samples;      /* shown to data servers of other hosts */
    dray__stream_keys keys;     /* with it */
    char *name;
    uint32_t id;
    int64_t timeout_ns;
    const dray__task_names *tasks;
    uint32_t task_count;
    dray__names names;
    uint64_t drops_seen;
    uint32_t tickets;
    dray__releases *releases;        /* shared with the controller; NULL: it reads none of ours */
    bool unanswered;                 /* the last request was, for all we know */
    uint32_t started, started_count; /* ticket and choices of dray_queue_claim_start; 0: none */
    dray_batch *committing;          /* whose commit went with it; NULL: none */
    dray__arena spare;               /* of a batch that is gone, for the next one */
    dray__arena opened;              /* tasks */
    dray__writer out, sent;          /* sent: a copy, to be sent again */
    int passed;                      /* a checkpoint's file, which goes with messages; -1: none */
    size_t sent_head, sent_known;
    size_t head;       /* bytes of out that say who asks */
    size_t known_at;   /* where out says how many columns and keys are known; 0: nowhere */
    uint64_t identity; /* of this use of the queue, whatever controller serves it */
    int32_t durability;
    uint64_t era, refused_era; /* of its controller; the last one that the keeper did not take */
};

typedef struct dray__buffer dray__buffer;

typedef struct dray__batch_put {
    uint32_t items, count;
    struct dray__batch_extent {
        uint32_t column, home;
        dray__extent extent;
        uint64_t shift;               /* taken off the extent: what was got begins there */
        const dray__column_spec *own; /* of rows with keys; NULL: as the column */
        dray__mapping *mapping;       /* once it was read */
    } * extents;
} dray__batch_put;

typedef struct dray__batch_place {
    uint32_t put, item;
} dray__batch_place;

typedef struct dray__batch_pieces { /* of one row and place, first to last */
    uint32_t place, row, count;
    struct dray__batch_piece {
        dray__batch_place at;
        double version; /* -1: not known */
    } * items;
} dray__batch_pieces;

typedef struct dray__batch_column {
    uint32_t column, place;
    const char *name;
    dray__column_spec spec;
    const dray__column_spec *other; /* that some of its rows have; NULL: all are alike */
    const void **cells;             /* NULL: not read yet */
    uint64_t *lengths;
} dray__batch_column;

typedef struct dray__batch_tag {
    const char *key;
    double value;
} dray__batch_tag;

typedef struct dray__batch_output {
    const char *name; /* NULL: not set yet */
    dray__column_spec spec;
    dray__extent extent;
    dray__storage_room span;
    bool sent; /* with a commit that got no answer: it may have been committed */
} dray__batch_output;

struct dray_batch {
    dray_queue *queue;
    dray__arena arena;
    uint32_t ticket; /* 0: imported */
    bool committed;
    const dray__task_names *task;
    const char *partition;
    uint32_t generation, row_count;
    dray_row *rows;
    dray__batch_put *puts;
    uint32_t put_count;
    dray__batch_column *columns;
    uint32_t column_count;
    dray__batch_place *places; /* of each place, all rows; cell_count in all */
    uint32_t place_count, cell_count;
    dray__batch_pieces *pieces;
    uint32_t pieces_count;
    uint32_t *micro_ends, micro_count; /* count 0: all rows are one */
    uint8_t *own;                      /* [row]; with micro_count only: no padding */
    uint32_t own_count;
    bool bounded;   /* it came late because of the queue's admission */
    uint32_t *open; /* rows that the commit leaves open */
    uint32_t open_count;
    struct dray__batch_numbered { /* tags as they came: ascending rows, keys by number */
        uint32_t row, key;
        double value;
    } * numbered;
    uint32_t tag_count, task_number;
    dray__batch_tag *tags;
    uint32_t *tag_start;         /* [row_count + 1] */
    dray__batch_output *outputs; /* as task->writes */
    const char **set_keys;
    uint32_t set_key_count;
    uint64_t set_key_capacity;
    dray__new_tag *set_tags;
    uint32_t set_tag_count;
    uint64_t set_tag_capacity;
    dray__mapping **mappings;
    uint32_t mapping_count;
    uint64_t mapping_capacity;
    dray__buffer *buffers; /* what was got from a store */
    uint8_t *body;         /* as it came, for dray_batch_export */
    size_t body_size;
    const char **keys; /* of rows with keys; NULL: it is of a claim */
    dray_blob *notes;
};

dray__batch_place dray__batch_place_of(const dray_batch *batch, const dray__batch_column *column,
                                       uint32_t row);
/* The put's extent of the column; NULL: it has none. */
struct dray__batch_extent *dray__batch_extent_of(const dray_batch *batch,
                                                 const dray__batch_column *column, uint32_t put);

static inline const dray__column_spec *dray__batch_spec(const dray__batch_column *column,
                                                        const struct dray__batch_extent *extent)
{
    return extent && extent->own ? extent->own : &column->spec;
}

/* Can what is there not be mapped here? extent: NULL: of what we put ourselves. */
static inline bool dray__batch_elsewhere(const dray_queue *queue,
                                         const struct dray__batch_extent *extent)
{
    const dray__values_holder *holder = &queue->holder;
    return !holder->kind->is_elsewhere ||
           holder->kind->is_elsewhere(holder, extent ? extent->home : holder->home);
}

/* chunks.c: what a holder (queue/storage/holder.h) has its queue do. */
extern const dray__holder_uses dray__queue_uses;
/* Tells the controller of chunks that were closed. */
void dray__chunks_tell(dray_queue *queue);
/* read.c: gets what the batch's rows have of the column where it cannot be mapped: afterwards every
 * extent that they are in has its mapping, in which that much is filled in. What was got already is
 * got again, with its row. DRAY_EGONE: its holder has lost it; the controller was told which rows.
 */
int dray__batch_get(dray_batch *batch, dray__batch_column *column, dray_error *error);
void dray__buffers_free(dray__buffer *buffers);
/* Begins a request in queue->out: the head. */
dray__writer *dray__queue_begin(dray_queue *queue);
/* The controller is gone: waits for the one that goes on with the queue. DRAY_ECLOSED: none will.
 */
int dray__queue_come_back(dray_queue *queue);
uint32_t dray__queue_ticket(dray_queue *queue); /* the next; never 0 */
/* Sends it and takes the reply. timeout_ns: how long the controller may wait. */
int dray__queue_call(dray_queue *queue, uint16_t type, int64_t deadline_ns, dray__reply *reply,
                     dray_error *error);
/* Opens a checkpoint to be restored where it is a path: then it is passed, else named. *name: what
 * the message says of it. */
int dray__queue_open_saved(dray_queue *queue, const char *restore, const char **name,
                           dray_error *error);
void dray__queue_close_saved(dray_queue *queue);
int dray__queue_check_passing(const dray_queue *queue, dray_error *error); /* DRAY_EUNSUPPORTED */
/* The same, with its beginning and these fields (NULL: none), for requests that the controller
 * answers at once. */
int dray__queue_command(dray_queue *queue, uint16_t type, const dray__fields *of,
                        const void *message, dray__reply *reply, dray_error *error);
/* Tells the controller to forget a claim, or a request for one; waits for no answer. */
void dray__queue_release(dray_queue *queue, uint32_t ticket);
/* The same of a claim that was answered, without a message where nobody waits for what it holds:
 * bytes, and unless it is committed, rows. */
void dray__queue_let_go(dray_queue *queue, uint32_t ticket, bool committed);
void dray__queue_read_dropped(dray_queue *queue, dray__reader *r);
int dray__queue_check_fork(const dray_queue *queue, dray_error *error); /* DRAY_ECLOSED */
int dray__queue_task(const dray_queue *queue, const char *name, uint32_t *task, dray_error *error);
/* Puts a column's values for `items` items with the holder. The room is then the caller's. */
int dray__queue_write(dray_queue *queue, const dray_column_data *column,
                      const dray__column_spec *spec, uint64_t items, dray__extent *extent,
                      dray__storage_room *span, dray_error *error);
/* insert.c: what a producer's request says besides the columns, which are written before it goes:
 * each with its place. `rows` is the request of an insert. */
typedef int dray__send_fn(dray_queue *queue, const dray__new_rows *rows, int64_t deadline,
                          void *user, dray_error *error);
typedef struct dray__sending {
    dray__send_fn *send;
    void *user;
    bool memory; /* no rows are asked for, memory alone */
    bool once;   /* it cannot be told from another one like it */
} dray__sending;
int dray__queue_produce(dray_queue *queue, const dray_insert_options *o, const dray__sending *how,
                        dray_error *error);
/* queue.c: reads news (messages.h) into names. */
int dray__names_read(dray__names *names, dray__reader *r, dray_error *error);
void dray__names_free(dray__names *names);
/* The span of a commit that counted, begun at begin_ns. */
/* Leaves a span of the trace, which is about the batch. */
void dray__batch_leave_span(const dray_batch *batch);
/* The parts of the request that commits and claims. put_commit checks that all is set; commit_done
 * takes the answer: rc, and where it is DRAY_OK the reply. */
int dray__batch_put_commit(dray_batch *batch, dray__writer *w, dray_error *error);
void dray__batch_commit_done(dray_batch *batch, int rc, dray__reader *reply);
/* dray_queue_claim_start, with the commit of a batch (NULL: none) in the same message. The batch
 * must live until dray_queue_claim_poll has answered: then batch->committed tells whose error it
 * was. */
int dray__claim_start_after(dray_queue *queue, dray_batch *batch, const dray_claim_options *options,
                            uint32_t count, dray_error *error);
/* DRAY_EPERM, DRAY_EINVALID: nothing can be written to it any more, by the function `what`. */
int dray__batch_check_open(const dray_batch *batch, const char *what, dray_error *error);
/* DRAY_EINVALID: the batch has not that many rows from `first` on. */
int dray__batch_check_rows(const dray_batch *batch, uint32_t first, uint32_t rows,
                           dray_error *error);
/* What a claim's answer says of a batch. */
extern const dray__fields dray__body_fields;
int dray__batch_read(dray_queue *queue, const dray__names *names, uint32_t ticket, dray__reader *r,
                     dray_batch **out, dray_error *error);
