/* src/queue/client/: the queue's public functions (dray/queue.h, dray/steps.h) in the processes
 * that produce and consume samples. queue.c opens a queue, chunks.c finds the keeper of its host,
 * insert.c puts rows, claim.c takes them, batch.c reads and commits a claim's columns, loader.c
 * does so ahead of time, task.c is the loop of a task, training.c and feed.c are a trainer's steps.
 */

/* The declarations that the client's files share: queue.c (opening), chunks.c (keepers), insert.c,
 * commands.c, claim.c (claiming, reading replies), batch.c (reading and writing a batch's columns,
 * committing), gather.c (rows of a column together). */
#pragma once

#include "base/arena.h"
#include "control/channel.h"
#include "queue/messages.h"
#include "queue/storage/holder.h"
#include "queue/table/table.h"
#include "trace/tracing.h"

#include <dray/queue.h>

/* The names of columns and keys, which replies refer to by number. */
typedef struct dray__names {
    dray__known_column *columns; /* by the controller's index; name is NULL when it is not known */
    uint32_t column_count, columns_known;
    uint64_t column_capacity, key_capacity;
    const char **keys;
    uint32_t key_count;
    dray__arena arena;        /* of the names */
    struct dray__names *past; /* the names of a former controller, to which batches still refer */
} dray__names;

struct dray_queue {
    dray_context *context;
    dray__channel *channel;
    dray__values_holder holder; /* holds the bytes of columns */
    dray__tls_key samples;      /* the key that is shown to data servers of other hosts */
    dray__stream_keys keys;     /* made of `samples` */
    char *name;
    uint32_t id;
    int64_t timeout_ns;
    const dray__task_names *tasks;
    uint32_t task_count;
    dray__names names;
    uint64_t drops_seen;
    uint32_t tickets;
    /* The page of releases shared with the controller; NULL when there is none. */
    dray__releases *releases;
    bool unanswered; /* the last request may not have been answered */
    /* The ticket and the choices of dray_queue_claim_start; ticket 0: none. */
    uint32_t started, started_count;
    bool start_lost;        /* the connection of that claim ended, which the next poll returns */
    dray_batch *committing; /* the batch that the same message commits, or NULL */
    dray__arena spare;      /* the memory of a freed batch, for the next one */
    dray__arena opened;     /* tasks */
    dray__writer out, sent; /* sent: a copy of the request, to send it again */
    /* The descriptor of a checkpoint's file, passed with messages, or -1. */
    int passed;
    size_t sent_head, sent_known;
    size_t head;       /* bytes of `out` with the client's number */
    size_t known_at;   /* the place in `out` of the numbers of known columns and keys; 0 when it has
                        * none */
    uint64_t identity; /* the number of this use of the queue, the same for all controllers that
                        * serve it */
    int32_t durability;
    /* The number of its controller, and that of the last one that the keeper refused. */
    uint64_t era, refused_era;
};

typedef struct dray__buffer dray__buffer;

typedef struct dray__batch_put {
    uint32_t items, count;
    struct dray__batch_extent {
        uint32_t column, keeper;
        dray__extent extent;
        /* The fetched bytes begin at this offset; it is subtracted from the extent's. */
        uint64_t shift;
        const dray__column_spec *own; /* for rows with keys; NULL when it is the column's spec */
        dray__mapping *mapping;       /* set once it was read */
    } * extents;
} dray__batch_put;

typedef struct dray__batch_place {
    uint32_t put, item;
} dray__batch_place;

typedef struct dray__batch_pieces { /* the pieces of one row and place, first to last */
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
    /* The specs that some of its rows have; NULL when all rows have the same. */
    const dray__column_spec *other;
    const void **cells; /* NULL until they are read */
    uint64_t *lengths;
} dray__batch_column;

typedef struct dray__batch_tag {
    const char *key;
    double value;
} dray__batch_tag;

typedef struct dray__batch_output {
    const char *name; /* NULL until it is set */
    dray__column_spec spec;
    dray__extent extent;
    dray__storage_room span;
    bool sent; /* put with a commit that got no answer, so that it may have been committed */
} dray__batch_output;

struct dray_batch {
    dray_queue *queue;
    dray__arena arena;
    uint32_t ticket; /* 0 for an imported batch */
    bool committed;
    const dray__task_names *task;
    const char *partition;
    uint32_t generation, row_count;
    dray_row *rows;
    dray__batch_put *puts;
    uint32_t put_count;
    dray__batch_column *columns;
    uint32_t column_count;
    /* The places of all rows, one place after the other; cell_count in all. */
    dray__batch_place *places;
    uint32_t place_count, cell_count;
    dray__batch_pieces *pieces;
    uint32_t pieces_count;
    uint32_t *micro_ends, micro_count; /* count 0: all rows are one micro-batch */
    uint8_t *own;                      /* [row], only with micro_count: the row is not padding */
    uint32_t own_count;
    bool bounded;   /* the claim waited for the queue's admission */
    uint32_t *open; /* the rows that the commit leaves open */
    uint32_t open_count;
    /* The tags as they arrived: rows in ascending order, keys by number. */
    struct dray__batch_numbered {
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
    dray__buffer *buffers; /* the bytes that were fetched from a store */
    bool roomy;            /* the queue has room for batches that are kept long */
    bool owns;             /* dray_batch_own was called, and its mappings may still exist */
    uint8_t *body;         /* the answer as it arrived, for dray_batch_export */
    size_t body_size;
    const char **keys; /* for rows with keys; NULL when the batch is of a claim */
    dray_blob *notes;
};

dray__batch_place dray__batch_place_of(const dray_batch *batch, const dray__batch_column *column,
                                       uint32_t row);
/* Returns the put's extent of the column, or NULL when the put has none. */
struct dray__batch_extent *dray__batch_extent_of(const dray_batch *batch,
                                                 const dray__batch_column *column, uint32_t put);

/* Returns the spec of the values at the extent: its own, or the column's. */
const dray__column_spec *dray__batch_spec(const dray__batch_column *column,
                                          const struct dray__batch_extent *extent);
/* Returns true when the bytes at the extent cannot be mapped here. extent is NULL for bytes that
 * this client put. */
bool dray__batch_elsewhere(const dray_queue *queue, const struct dray__batch_extent *extent);

/* chunks.c: the functions that a holder (queue/storage/holder.h) calls for its queue. */
extern const dray__holder_uses dray__queue_uses;
/* Tells the controller about chunks that were closed. */
void dray__chunks_tell(dray_queue *queue);
/* read.c: fetches the column's values of the batch's rows where they cannot be mapped.
 * Afterwards each of their extents has a mapping, in which these values are filled in. Values
 * that were fetched before are fetched again, with their row. Fails with DRAY_EGONE when the
 * holder has lost them; the controller was then told about the rows. */
int dray__batch_get(dray_batch *batch, dray__batch_column *column, dray_error *error);
void dray__buffers_free(dray__buffer *buffers);
/* Begins a request in queue->out with its head. */
dray__writer *dray__queue_begin(dray_queue *queue);
/* The controller is gone: waits for its successor. Fails with DRAY_ECLOSED when there will be
 * none. */
int dray__queue_come_back(dray_queue *queue);
uint32_t dray__queue_ticket(dray_queue *queue); /* the next ticket, never 0 */
/* Sends the request and takes the reply. timeout_ns is how long the controller may wait. */
int dray__queue_call(dray_queue *queue, uint16_t type, int64_t deadline_ns, dray__reply *reply,
                     dray_error *error);
/* Opens the checkpoint to be restored when it is a path, and then passes its descriptor instead of
 * the name. *name is the name for the message. */
int dray__queue_open_saved(dray_queue *queue, const char *restore, const char **name,
                           dray_error *error);
void dray__queue_close_saved(dray_queue *queue);
int dray__queue_check_passing(const dray_queue *queue, dray_error *error); /* DRAY_EUNSUPPORTED */
/* Begins a request, writes these fields (NULL: none), and sends it, for requests that the
 * controller answers at once. */
int dray__queue_command(dray_queue *queue, uint16_t type, const dray__fields *of,
                        const void *message, dray__reply *reply, dray_error *error);
/* Returns true when a change whose request failed with `rc` may have been made, or may count later:
 * there was no answer, or it could not be kept in the journal yet. */
bool dray__may_count(int rc);
/* Returns true when rows may be held under the ticket of a request for rows that failed with `rc`.
 */
bool dray__may_hold(int rc);
/* Tells the controller to forget a claim, or a request for one. There is no answer. */
void dray__queue_release(dray_queue *queue, uint32_t ticket);
/* The same for a claim that was answered. Writes to the page of releases instead of sending a
 * message when no request waits for the claim's bytes or, unless it is committed, its rows. */
void dray__queue_let_go(dray_queue *queue, uint32_t ticket, bool committed);
void dray__queue_read_dropped(dray_queue *queue, dray__reader *r);
int dray__queue_check_fork(const dray_queue *queue, dray_error *error); /* DRAY_ECLOSED */
int dray__queue_task(const dray_queue *queue, const char *name, uint32_t *task, dray_error *error);
/* Puts a column's values for `items` items with the holder. The caller then owns the room. */
int dray__queue_write(dray_queue *queue, const dray_column_data *column,
                      const dray__column_spec *spec, uint64_t items, dray__extent *extent,
                      dray__storage_room *span, dray_error *error);
/* insert.c: the parts of a producer's request besides the columns, which are written first, each
 * with its place. `rows` is the request of an insert. */
typedef int dray__send_fn(dray_queue *queue, const dray__new_rows *rows, int64_t deadline,
                          void *user, dray_error *error);
typedef struct dray__sending {
    dray__send_fn *send;
    void *user;
    bool memory; /* the request is for memory alone, not for rows */
    bool once;   /* the server cannot tell it from another request like it */
} dray__sending;
int dray__queue_produce(dray_queue *queue, const dray_insert_options *o, const dray__sending *how,
                        dray_error *error);
/* queue.c: reads the new names of a reply (messages.h). */
int dray__names_read(dray__names *names, dray__reader *r, dray_error *error);
void dray__names_free(dray__names *names);
/* Records the span of the trace that describes the batch. */
void dray__batch_leave_span(const dray_batch *batch);
/* The parts of the request that commits and claims. put_commit checks that every column is set.
 * commit_done takes the answer: rc, and the reply when rc is DRAY_OK. */
int dray__batch_put_commit(dray_batch *batch, dray__writer *w, dray_error *error);
void dray__batch_commit_done(dray_batch *batch, int rc, dray__reader *reply);
/* dray_queue_claim_start, with the commit of a batch (NULL: none) in the same message. The batch
 * must live until dray_queue_claim_poll has answered. batch->committed then says which of the
 * two an error belongs to. */
int dray__claim_start_after(dray_queue *queue, dray_batch *batch, const dray_claim_options *options,
                            uint32_t count, dray_error *error);
/* Returns 0, or DRAY_EPERM or DRAY_EINVALID when the batch cannot be written to any more.
 * `what` is the name of the calling function, for the message. */
int dray__batch_check_open(const dray_batch *batch, const char *what, dray_error *error);
/* Fails with DRAY_EINVALID when the batch has fewer rows from `first` on. */
int dray__batch_check_rows(const dray_batch *batch, uint32_t first, uint32_t rows,
                           dray_error *error);
/* The part of a claim's answer that describes a batch. */
extern const dray__fields dray__body_fields;
int dray__batch_read(dray_queue *queue, const dray__names *names, uint32_t ticket, dray__reader *r,
                     dray_batch **out, dray_error *error);
