/* src/queue/table/: the state of a queue. A table is partitions of rows by columns, tasks, claims,
 * puts and the chunks that hold their bytes (table.h). partitions.c inserts rows and clears
 * partitions, puts.c keeps the columns of inserts and commits, chunks.c has the places of their
 * bytes, ready.c finds the rows that are ready, policy.c picks among them, claims.c and commits.c
 * are a consumer's two steps, rounds.c divides a claim among DP ranks, and loss.c replaces samples
 * that are lost. */

/* The queue's state machine: partitions of rows, columns' committed bits, tasks' taken and done
 * bits, claims, puts and chunks. It uses no socket, no clock and no thread. The controller
 * (controller.c) calls it for each request, and then reads which parts of it have changed.
 *
 * One bit of its column says that a cell is committed. For a row and a task there are the bits
 * taken (a claim holds the row) and done (the task has committed it), and for a row the bit dead. A
 * row is ready for a task when all the columns that the task needs are committed and the row is
 * neither taken, done nor dead:
 *     ready = AND of columns' words AND NOT (taken OR done OR dead)
 * dray__refresh computes this a word at a time, for words that changed, so that a claim looks only
 * at ready rows. A row is settled for a task when it is done or dead. A partition ends when its
 * rows are settled for all tasks, and the bytes of settled rows are freed. The commits of a
 * provisional task (a trainer) free nothing until a checkpoint covers them, and can be undone.
 *
 * A row that is lost (it failed too often, or is too old) is vacant until a producer refills its
 * slot. Until then it is neither ready nor settled for any task. The new row has a new row
 * generation.
 *
 * A journal keeps one record for each change, with the arguments of the functions below. Clients
 * are not in it, as their chunks and claims end with them.
 *   insert   partition, partition's generation, first slot, rows, group size, row_bytes, columns
 *            with their bytes, tags; a refill: the demand's id and its columns and tags
 *   seal     partition, rows
 *   commit   generation, task, {slot, row's generation} of every row that counted, columns with
 *            their bytes, tags; which of the rows stay open (a partial commit); of a provisional
 *            task: the commit's sequence number
 *   loss     generation, {slot, row's generation}, task, cause, reason; the demand's id
 *   decline  the demand's id
 *   clear    partition        end
 *   cover    sequence number: commits of provisional tasks up to it are in a checkpoint
 *   resume   sequence number, version: later commits and later versions' rows are undone
 *   admit    the admission as it is now (its count `accepted` follows from commits and losses)
 * Claims, attempts and pins are not kept. A restart of the coordinator voids them. */
#pragma once

#include "base/hash.h"
#include "control/limits.h"
#include "queue/messages.h"
#include "queue/table/bits.h"

#define DRAY__CAPACITY_ROWS UINT64_C(1000000) /* the capacity when none is given */
#define DRAY__CAPACITY_BYTES (UINT64_C(4) << 30)
#define DRAY__RANKS_MAX 1024u           /* the ranks of a consumer group */
#define DRAY__CONSUMER_GROUPS_MAX 4096u /* consumer groups that a table keeps */
#define DRAY__CAUSES 4u                 /* the values of dray_loss_cause */

typedef struct dray__table dray__table;
typedef struct dray__client dray__client;
typedef struct dray__partition dray__partition;
typedef struct dray__put dray__put;
typedef struct dray__round dray__round;
typedef struct dray__consumer_group dray__consumer_group;
typedef struct dray__keyed dray__keyed;
typedef struct dray__ledger dray__ledger;
typedef struct dray__told dray__told;

/* ---- columns and tasks ----------------------------------------------------------------------- */

typedef struct dray__col {
    char *name;
    bool defined; /* the first put has fixed its spec */
    dray__column_spec spec;
    uint64_t readers;           /* the tasks that need it, a bit each */
    uint64_t rows_in, bytes_in; /* committed so far */
    int writer;                 /* the task that writes it; -1: only inserts write it */
} dray__col;

typedef struct dray__qtask {
    char *name;
    uint32_t *needs, *writes; /* column indices */
    uint32_t needs_count, writes_count;
    struct dray__task_counts { /* since the table was made */
        uint64_t claims, rows;
        uint64_t bytes; /* that claims read; of a ragged column the average of its put */
        uint64_t committed, failed, given_back; /* rows */
    } counts;
} dray__qtask;

/* ---- partitions ------------------------------------------------------------------------------ */

/* The state of a row for one task. */
typedef struct dray__row_state {
    uint32_t next, prev; /* the list of ready rows, in the order in which they became ready */
    uint32_t attempt;    /* how often the row was claimed */
    uint32_t failures;   /* how many of these claims failed */
} dray__row_state;

typedef struct dray__link {
    uint32_t next, prev;
} dray__link;

typedef struct dray__track { /* the state of a partition for one task */
    uint64_t *taken, *done, *ready;
    dray__row_state *rows;
    uint32_t head, tail; /* the list of ready rows */
    uint32_t ready_count, taken_count, done_count, settled_count, dead_count;
    uint32_t taken_dead; /* rows that died while the task had taken them; they are settled, too */
    uint32_t cut_count;  /* rows with a partial commit that no claim holds */
    uint32_t open_from;  /* no row before it is open (neither taken nor settled) */
    uint64_t floor;      /* no open row has an older version; UINT64_MAX when none has a version */
    /* The groups whose members are all ready or settled, at least one of them ready, in the order
     * in which they became so. */
    uint64_t *whole;
    dray__link *groups;
    uint32_t group_head, group_tail;
} dray__track;

typedef struct dray__place { /* the place of the columns that one writer committed for a row */
    uint32_t put, item;      /* the put's index in partition->puts, and an item of it */
} dray__place;

/* A commit of a row to which the same task has appended another commit. */
typedef struct dray__segment {
    dray__place place;
    uint32_t previous; /* index in partition->segments; NONE for the first */
} dray__segment;

typedef struct dray__group_range {
    uint32_t first, count;
} dray__group_range;

typedef struct dray__death {
    uint32_t slot, generation, task, failures;
    int32_t cause; /* dray_loss_cause */
    bool refilled; /* its slot has another sample, or waits for one */
    char reason[DRAY__REASON_MAX + 1];
} dray__death;

/* Slots of one group that wait for another sample. */
typedef struct dray__demand {
    uint64_t id; /* also the row generation of the sample that will fill them */
    dray__partition *partition;
    uint32_t *slots;
    uint32_t count, task, failures;
    int32_t cause;
    dray__client *holder; /* the producer that has the demand; NULL when none has it */
    char reason[DRAY__REASON_MAX + 1];
    struct dray__demand *next;
} dray__demand;

struct dray__partition {
    char *name;
    uint64_t hash;
    uint32_t generation; /* 1, 2, ... in order of creation; never used again */
    uint32_t rows, row_capacity;
    uint32_t coming; /* rows of the first insert, while its steps are carried out */
    bool sealed;
    bool clearing;         /* it will be cleared when a checkpoint covers it */
    uint32_t uncovered;    /* the number of rows' commits that no checkpoint covers yet */
    uint64_t **commit_seq; /* [task][row]: the number of the commit that is not covered; 0: none;
                              NULL: the task is not provisional, or has committed nothing */
    uint64_t *dead, *vacant;
    uint64_t *away; /* the rows whose bytes are being put back from the journal, a bit each */
    bool some_away;
    uint32_t dead_count, vacant_count;
    uint32_t *row_generations; /* [row]: the partition's generation, or that of the refill */
    uint64_t *oldest, *newest; /* [row]: 1 + the version of its oldest and newest token; 0: not
                                  known; NULL: no row has a version */
    uint32_t lost[DRAY__CAUSES], refilled; /* rows, since the partition was made */
    uint64_t **columns;                    /* [column]: committed bits; NULL when there are none */
    uint32_t *committed;
    uint32_t column_capacity;
    dray__track *tracks;  /* [task] */
    dray__place **places; /* [1 + task], [0] = insert; NULL when the writer has put nothing */
    uint32_t **earlier;   /* [task][row]: its last segment but one; NULL when no row has two */
    dray__segment *segments;
    uint32_t segment_count, segment_capacity;
    uint32_t *group_of;
    dray__group_range *groups;
    uint32_t group_size; /* the size of every group */
    uint32_t group_count, group_capacity;
    dray__put **puts; /* entries may be NULL */
    uint32_t put_count, put_capacity;
    uint64_t reserved, live;     /* bytes that inserts declared; that are committed, not freed */
    uint64_t memory, tag_memory; /* the most bytes of the coordinator's memory that its rows, and
                                    of them their tags, take */
    dray__death *deaths;         /* the first few, for status reports */
    uint32_t death_count, death_capacity;
};

/* ---- storage --------------------------------------------------------------------------------- */

typedef struct dray__chunk {
    uint64_t id, key, size;
    uint32_t keeper;      /* the keeper that holds it (keepers.h) */
    dray__client *owner;  /* the client that writes it; NULL when that client has ended */
    uint32_t live;        /* the number of extents that are not freed */
    uint64_t live_bytes;  /* the bytes of these extents, at most size */
    bool closed;          /* its owner puts nothing into it until it gets it back */
    bool spare;           /* it is free, and in its owner's list `recycled` */
    uint64_t spare_since; /* table->asked when it became spare */
    bool named;           /* dray__claim_mark_lost looks for it at the moment */
    bool retired;         /* it must not be written again */
    bool lost;            /* its keeper is gone, and its bytes with it */
    struct dray__chunk *next;
} dray__chunk;

typedef struct dray__put_column {
    uint32_t column;
    dray__extent extent;
    dray__chunk *chunk;            /* NULL when its bytes are freed */
    const dray__column_spec *spec; /* the spec of a keyed put; NULL when it is that of the column */
} dray__put_column;

typedef struct dray__put_tag {
    uint32_t item; /* DRAY__NONE when the tag is of every item */
    uint32_t key;
    double value;
} dray__put_tag;

struct dray__put {
    uint64_t seq;
    uint32_t index;             /* its index in partition->puts */
    uint64_t record;            /* the record of the journal that has its bytes; 0 when there is
                                 * none */
    uint64_t restored;          /* table->restores when its bytes were read from there again */
    bool restoring;             /* its bytes are being read from there, or will be */
    dray__partition *partition; /* NULL when it was cleared, or is keyed */
    uint32_t *cells;     /* keyed: [column] the number of rows with their value here; NULL when not
                          * keyed */
    uint64_t cell_count; /* the sum of `cells` */
    uint32_t number;     /* keyed: the put's number, the generation of the rows that it made */
    uint32_t items;
    uint32_t pins;
    uint64_t open_tasks; /* the tasks with rows of this put that are not settled, a bit each */
    uint64_t goes_on;    /* the task that will append to rows of it, and then reads it; a bit */
    uint32_t *unsettled; /* [task]: the number of these rows */
    dray__put_column *columns;
    uint32_t column_count;
    dray__put_tag *tags; /* by item; the tags of every item come last */
    uint32_t *tag_start; /* [items + 1]; NULL when all tags are of every item */
    uint32_t tag_count;
    uint64_t mark;       /* the number of the claim that met it last */
    uint64_t mark_bytes; /* the bytes that this claim reads of an item */
    uint32_t mark_index; /* its place among the claim's pins */
};

/* ---- clients and claims ---------------------------------------------------------------------- */

enum { DRAY__TOLD = 16 };

struct dray__client {
    uint32_t id;
    uint64_t session;  /* its member id at the coordinator */
    uint64_t channel;  /* its connection */
    uint64_t identity; /* stays the same when the client attaches again */
    /* The last of its requests that changed the queue, if there is a ledger. There are several,
     * because one may be made while an earlier one has no answer. */
    struct dray__told {
        uint32_t ticket; /* 0 when there is none */
        uint32_t first_slot, generation;
    } told[DRAY__TOLD];
    uint32_t told_count;
    char *name;
    void *owner;                            /* a pointer of the controller */
    dray__chunk *recycled, **recycled_tail; /* its spare chunks, the one spare longest first */
    uint64_t promised;                      /* bytes of chunks that it asked for and may take */
    bool asked_room;                        /* it has asked for the memory of its next insert */
    dray__client *next;
};

typedef enum dray__claim_state {
    DRAY__CLAIM_ACTIVE,
    DRAY__CLAIM_COMMITTED,
    DRAY__CLAIM_FAILED, /* its rows were given back, or have moved to other claims */
    DRAY__CLAIM_STALE,  /* it was held too long, and its rows were taken back */
    DRAY__CLAIM_GONE    /* its partition was cleared */
} dray__claim_state;

typedef struct dray__claim {
    uint64_t id; /* client << 32 | ticket */
    dray__client *client;
    uint32_t task;
    dray__claim_state state;
    dray__partition *partition; /* NULL once GONE */
    uint32_t generation;
    uint32_t *slots; /* DRAY__NONE when the row was given back as failed, or has moved to a claim */
    uint32_t count, active;
    int64_t hold_until;              /* INT64_MAX: until the session ends */
    uint64_t restores;               /* table->restores when it was made */
    uint64_t newest;                 /* newer versions no longer exist; UINT64_MAX when all exist */
    dray__consumer_group *consumers; /* the group whose rank's share it is; NULL when there is
                                      * none */
    bool read;                       /* it is a get of rows with keys, and holds only puts */
    uint64_t memory;                 /* its bytes of table->memory, until it is released */
    bool lockstep;   /* the claims of its round are committed together or not at all */
    bool follower;   /* another rank, the leader, commits the rows */
    uint32_t *reads; /* the rows that it reads: its own, and padding, which it does not commit;
                        NULL: the same as slots */
    uint32_t *micro_ends, micro_count; /* the micro-batches, as items of the claim; NULL when there
                                        * is one */
    dray__put **pins;
    uint32_t pin_count;
    struct dray__claim *next, *prev;
} dray__claim;

typedef struct dray__former_partition { /* a partition that was cleared */
    char *name;
    uint64_t hash;
    uint64_t finished; /* tasks that had finished it */
} dray__former_partition;

typedef struct dray__quota { /* the limits of all clients with one token */
    char who[32];            /* the token's name */
    dray__limits limits;
    dray__table *tables;
    struct dray__quota *next;
} dray__quota;

#define DRAY__FORMER 4096u
#define DRAY__DROPS 1024u

struct dray__table {
    char *name;
    dray__qtask *tasks;
    uint32_t task_count;
    dray__col *columns;
    uint32_t column_count, column_capacity;
    dray__map column_names;
    uint32_t *defined; /* columns in the order in which they were defined */
    uint32_t defined_count;
    char **keys; /* the keys of tags */
    uint32_t key_count, key_capacity;
    dray__map key_names;

    dray__partition **partitions; /* in order of creation */
    uint32_t partition_count, partition_capacity;
    uint32_t generations;
    dray__keyed *keyed;             /* partitions whose rows have keys (keyed.h) */
    dray__former_partition *former; /* a ring of DRAY__FORMER */
    uint32_t former_at;
    bool ended;

    dray__client *clients;
    uint32_t client_ids;
    dray__demand *demands, **demands_tail; /* oldest first */
    dray__round *rounds;                   /* rounds with shares that no rank has claimed yet */
    dray__consumer_group *consumer_groups;
    dray__claim *claims;
    dray__idmap claim_ids;
    dray__idmap chunks;
    uint64_t put_seq, marks, changes; /* changes: the number of changes of keyed partitions */
    uint32_t claim_count, put_count;

    dray__settings settings;
    const struct dray__bytes_kind *bytes; /* chunks, or objects of a store (table_inside.h) */
    bool objects;                         /* a store holds the bytes, as objects */
    dray__admission admission;
    dray__ledger *ledger; /* the journal of changes; NULL when there is none */
    uint32_t restarts;    /* how many controllers have taken the queue over */
    uint32_t epoch;       /* raised by every resume */
    uint64_t commit_seq;  /* the number of the last provisional commit */
    uint64_t resumed_seq; /* the number of the commit that the last resume went back to */
    uint32_t priority_key;
    uint32_t version_key; /* the key of the tag with the version that made a row */
    uint64_t rows;
    uint64_t charged;     /* bytes that count against the capacity, of all partitions */
    uint64_t hidden;      /* bytes of pinned puts whose partitions were cleared */
    uint64_t kept;        /* bytes of keyed partitions */
    uint64_t chunk_bytes; /* bytes of all chunks */
    uint64_t spare_bytes; /* bytes of spare chunks */
    uint64_t promised;    /* bytes of chunks that clients may still take */
    uint64_t asked;       /* how often clients have asked for a chunk */
    uint64_t memory;      /* bytes of the coordinator's memory, of all partitions */
    dray__quota *quota;   /* NULL when the capacity is its only limit */
    dray__table *quota_next;
    uint64_t restores; /* how often bytes were read from the journal again */
    uint64_t space;    /* the space of its objects in the store; 0 when not known yet, or without a
                        * store */
    uint64_t inserted, refilled, lost[DRAY__CAUSES]; /* rows so far */

    uint64_t drops[DRAY__DROPS]; /* ids of chunks that are gone, a ring */
    uint64_t drop_count;
    void (*drop)(void *user, uint32_t keeper, uint64_t chunk, uint64_t key); /* may be NULL */
    void *user;

    /* Changes since the controller cleared these, which it does when it has tried the requests
     * that wait. */
    uint64_t dirty; /* tasks that may have new rows to claim, or have come to an end; a bit each */
    bool finished;  /* some partition finished for a task, or was cleared */
    bool freed;     /* there is more capacity, or less to wait for */
    bool demanded;  /* a slot waits for another sample, or no slot will ever wait again */
    bool named;     /* rows with keys were put, dropped, or forgotten by a consumer */
};

/* Makes a table. Checks the tasks: their names, that no column is written by two tasks, and that
 * none is needed and written by the same task. */
int dray__table_new(const char *name, const dray__task_names *tasks, uint32_t task_count,
                    const dray__settings *settings, dray__table **out, dray_error *error);
void dray__table_free(dray__table *table);
void dray__table_count_anew(dray__table *table); /* sets all statistics to 0 */
/* Compares a table with tasks and settings. Limits of 0 are not compared. DRAY_EEXIST names the
 * difference. */
int dray__table_same(const dray__table *table, const dray__task_names *tasks, uint32_t task_count,
                     const dray__settings *settings, dray_error *error);
int dray__table_task(const dray__table *table, const char *name, uint32_t *task, dray_error *error);
dray__partition *dray__table_partition(const dray__table *table, const char *name);

dray__client *dray__client_new(dray__table *table, uint64_t session, const char *name,
                               dray_error *error);
/* Ends a client. died: its open claims count as failed attempts (reason), and chunks that it had
 * pinned are never written again. Otherwise its claims are given back without being counted. */
void dray__client_end(dray__table *table, dray__client *client, bool died, const char *reason);

/* ---- storage ---- */

int dray__chunk_add(dray__table *table, dray__client *client, uint32_t keeper, uint64_t id,
                    uint64_t key, uint64_t size, dray_error *error);
/* Closes a chunk, into which its owner puts nothing more. Closing it again gives the chunk back
 * again, as the first answer may have been lost. Ids of chunks that are gone are ignored. Fails
 * with DRAY_EINVALID for another client's chunk. */
int dray__chunk_close(dray__table *table, dray__client *client, uint64_t id, dray_error *error);
/* Marks the chunks of a keeper that is gone as lost. Nothing can be put into them any more
 * (DRAY_EGONE), and their bytes are lost (dray__table_lose_bytes). */
void dray__chunks_lose(dray__table *table, uint32_t keeper);
/* Drops a free chunk that its owner does not want back. */
int dray__chunk_discard(dray__table *table, dray__client *client, uint64_t id, dray_error *error);

/* ---- how much memory (held.c) ---- */

/* Gives the client memory: one of its spare chunks (*given is its id; *size 0), or the new chunk
 * of the wish, with *size bytes (*given 0). */
int dray__chunk_ask(dray__table *table, dray__client *client, const dray__chunk_wish *wish,
                    uint64_t *given, uint64_t *size, dray_error *error);
/* Cancels the rest of the client's promise of memory. */
void dray__promise_end(dray__table *table, dray__client *client);
/* Writes which client holds most of the memory, in words; "" when none holds any. */
void dray__describe_holder(dray__table *table, char *out, size_t size);
/* Adds a free chunk to its owner's spare ones. */
void dray__chunk_set_spare(dray__table *table, dray__chunk *chunk);
/* Takes the client's chunk that has been spare longest; NULL when there is none. */
dray__chunk *dray__chunk_take_spare(dray__table *table, dray__client *client);
/* Removes the chunk from the table, and tells its keeper and its readers to drop it. */
void dray__chunk_forget(dray__table *table, dray__chunk *chunk);

/* ---- limits (quota.c) ---- */

typedef struct dray__quota_use {
    uint64_t queues, rows, bytes, table_bytes;
} dray__quota_use;

dray__quota_use dray__quota_used(const dray__quota *quota);
void dray__quota_join(dray__quota *quota, dray__table *table);
void dray__quota_leave(dray__table *table);
/* Has the requests that wait in any queue of the table's quota tried again. */
void dray__quota_freed(dray__table *table);
/* Checks that the quota has room for so many rows and so much of the coordinator's memory. Fails
 * with DRAY_EAGAIN when there may be room later, and with DRAY_EFULL when there never is. */
int dray__quota_rows(const dray__table *table, uint64_t rows, uint64_t memory, dray_error *error);
int dray__quota_bytes(const dray__table *table, uint64_t bytes, dray_error *error); /* DRAY_EFULL */
/* Returns true while the queue holds at most a quarter of its capacity, in chunks of at most half
 * of it: then a batch may be kept long. Such batches together hold no more than that. */
bool dray__table_roomy(const dray__table *table);
uint64_t dray__rows_memory(const dray__table *table, uint32_t rows, uint32_t group);

/* ---- producers ---- */

/* Inserts rows. Fails with DRAY_EAGAIN when there is no room now (the message says how much is
 * missing), and with DRAY_EFULL when there never is. */
int dray__table_insert(dray__table *table, dray__client *client, const dray__new_rows *rows,
                       uint32_t *first_slot, uint32_t *generation, dray_error *error);
/* An insert in steps, so that a large one does not hold up other requests. Only an insert that
 * makes its partition (fresh) takes more than one step. No request finds the partition before the
 * last step. */
typedef struct dray__insertion {
    dray__partition *partition;
    dray__put *put;
    uint64_t reserve;
    uint32_t first, rows, group, divisor;
    uint32_t placed, word; /* the rows that are placed; then the words of bits that are computed */
    bool fresh, begun;
} dray__insertion;

enum { DRAY__STEP_ROWS = 8192 }; /* the rows of one step */

int dray__insert_begin(dray__table *table, const dray__client *client, const dray__new_rows *rows,
                       dray__insertion *in, dray_error *error);
/* Inserts at most `most` further rows. Returns true after the last one. */
bool dray__insert_step(dray__table *table, dray__insertion *in, uint32_t most);
/* Ends an insert after its last step. dray__insert_abort undoes it before that. */
int dray__insert_end(dray__table *table, dray__client *client, const dray__new_rows *rows,
                     dray__insertion *in, uint32_t *first_slot, uint32_t *generation,
                     dray_error *error);
void dray__insert_abort(dray__table *table, dray__insertion *in);
uint64_t dray__tags_memory(const dray__content *content, uint32_t items);
/* Checks that these rows, with `bytes` bytes of values, can be inserted now. Fails as
 * dray__table_insert does. */
int dray__insert_check(const dray__table *table, const dray__client *client,
                       const dray__new_rows *rows, uint64_t bytes, dray_error *error);
/* Does the same before the client writes the values, and promises it chunks of `bytes` bytes. */
int dray__table_room(dray__table *table, dray__client *client, const dray__new_rows *rows,
                     uint64_t values, uint64_t bytes, dray_error *error);
int dray__table_seal(dray__table *table, const char *partition, uint32_t rows, dray_error *error);
int dray__table_clear(dray__table *table, const char *partition, dray_error *error);
void dray__table_end(dray__table *table);
/* Returns DRAY_OK when the partition is finished for the task (DRAY__NONE: for all tasks),
 * DRAY_EAGAIN when it is not yet, DRAY_EGONE when it was cleared before it was finished. */
int dray__table_wait(const dray__table *table, const char *partition, uint32_t task,
                     dray_error *error);

/* ---- loss ---- */

/* Ends a row that failed its task too often, or that is dropped. Depending on settings.on_loss, the
 * row dies, or its group dies with it, or their slots become vacant and wait for another sample (a
 * demand). */
void dray__lose(dray__table *table, dray__partition *p, uint32_t task, uint32_t slot, int32_t cause,
                const char *reason);
/* Returns the oldest demand that the client holds, else the oldest that no client holds, which the
 * client then holds. Returns 0, DRAY_EAGAIN when there is none, or DRAY_EEND when the queue has
 * ended, and there will be none. */
int dray__table_demand(dray__table *table, dray__client *client, dray__demand **out,
                       dray_error *error);
/* Answers a demand without another sample: the rows die. Repeating the call succeeds. */
int dray__table_decline(dray__table *table, uint64_t id, dray_error *error);
/* Answers a demand with another sample. */
int dray__table_refill(dray__table *table, dray__client *client, const dray__new_rows *rows,
                       uint32_t *first_slot, uint32_t *generation, dray_error *error);
/* Returns true when a task still needs bytes of the row that are lost and are not being put back.
 */
bool dray__needs_lost(const dray__table *table, const dray__partition *p, uint32_t slot,
                      uint32_t *task);
/* Returns true when a task needs bytes of the row that are being put back. */
bool dray__awaits_bytes(const dray__table *table, const dray__partition *p, uint32_t slot);
/* Loses the rows of which some task still needs bytes in lost chunks (DRAY_LOSS_BYTES). */
void dray__table_lose_bytes(dray__table *table);
/* Forgets the demands of the partition (NULL: all demands). */
void dray__demands_clear(dray__table *table, const dray__partition *p);
/* Gives the demands that the client holds to other producers. */
void dray__demands_let_go(dray__table *table, const dray__client *client);

/* ---- checkpoints (cursor.c) ---- */

/* Refuses settings with which a batch can never be complete; the message has the arithmetic. */
int dray__settings_check(const char *name, const dray__settings *settings, dray_error *error);
/* Allocates the memory for provisional commits of the task. */
int dray__provisional_prepare(const dray__table *table, dray__partition *p, uint32_t task,
                              dray_error *error);
/* Returns true when the task's commit of the row is not covered by a checkpoint yet. */
bool dray__is_provisional(const dray__partition *p, uint32_t task, uint32_t slot);
/* Marks the commit as covered. Returns false when it was so already. The caller frees the bytes
 * that are settled by it. */
bool dray__provisional_end(dray__partition *p, uint32_t task, uint32_t slot);
/* Covers the provisional commits up to cursor->seq, which a checkpoint holds, and frees the bytes
 * that were kept for them. Fails with DRAY_ESTALE when a resume has undone some of them. */
int dray__table_cover(dray__table *table, const dray__cursor *cursor, dray_error *error);
/* Clears the partitions that are to be cleared and have no uncovered commit any more. */
void dray__clear_covered(dray__table *table);
/* Undoes the commits after cursor->seq, loses rows of versions after its version, and raises the
 * epoch. */
int dray__table_resume(dray__table *table, const dray__cursor *cursor, dray_error *error);

/* ---- versions (versions.c) ---- */

/* Checks the value of a tag `version`: a whole number from 0 to 2^53. */
int dray__version_check(const char *key, double value, dray_error *error);
/* Allocates the memory for the versions of the partition's rows. */
int dray__versions_prepare(dray__partition *p, dray_error *error);
/* Records the versions that a put's tags give to rows; arguments as for dray__put_rows. */
void dray__versions_note(const dray__table *table, dray__partition *p, const dray__put *put,
                         const uint32_t *slots, uint32_t first, uint32_t from, uint32_t to,
                         uint32_t divisor);
/* Returns true when the row is too old for the claim, and the claim leaves such rows in the queue
 * (DRAY_FRESH_LEFT). */
bool dray__is_left(const dray__partition *p, const dray__want *want, uint32_t slot);
/* Returns the number of ready rows that the claim leaves. */
uint32_t dray__count_left(const dray__partition *p, const dray__want *want);
/* Loses the ready rows that are too old for the claim. */
void dray__drop_stale(dray__table *table, dray__partition *p, const dray__want *want);
/* Checks an admission: its task, and numbers that a queue can reach. */
int dray__admission_check(const dray__table *table, const dray__admission *a, dray_error *error);
/* Sets the admission. Its version may be smaller than before only with `resume`, which sets
 * accepted to version * batch. */
int dray__table_admit(dray__table *table, const dray__admission *admission, bool resume,
                      dray_error *error);
int dray__table_version(dray__table *table, uint64_t version, dray_error *error);
/* Returns the number of further rows that may be begun; INT64_MAX when any number may. Rows that
 * are begun already may be claimed again. */
int64_t dray__admission_room(const dray__table *table);
/* Returns the number of rows that are begun and not finished: those in claims, and those with a
 * partial commit. */
uint64_t dray__admission_running(const dray__table *table);
/* Returns true when a claim gets no rows because of the admission, and not because none are ready.
 */
bool dray__admission_refuses(const dray__table *table, const dray__want *want);
/* Changes the admission's number of accepted rows, if the task is the admission's. */
void dray__admission_note(dray__table *table, uint32_t task, int64_t by);

/* ---- consumers ---- */

/* Claims rows. Fails with DRAY_EAGAIN when there are not enough (the message says how many). */
int dray__table_claim(dray__table *table, dray__client *client, uint32_t ticket,
                      const dray__want *want, dray__claim **out, dray_error *error);
dray__claim *dray__table_find_claim(const dray__table *table, const dray__client *client,
                                    uint32_t ticket);
int dray__claim_commit(dray__table *table, dray__client *client, uint32_t ticket,
                       uint32_t generation, const dray__outputs *outputs, dray_error *error);
/* Makes the claim of a commit that is read from a journal, with ticket 1 and these rows (a slot of
 * DRAY__NONE is not one of them). Fails with DRAY_EFORMAT when one of them cannot be claimed. */
int dray__claim_again(dray__table *table, dray__client *client, uint32_t task, dray__partition *p,
                      const uint32_t *slots, uint32_t count, dray__claim **out, dray_error *error);
/* Gives rows of a claim back, as failed. items: their places in the claim; count 0: all rows that
 * are left. Rows that were given back before are skipped. */
int dray__claim_fail(dray__table *table, dray__client *client, uint32_t ticket,
                     const uint32_t *items, uint32_t count, const char *reason, dray_error *error);
/* Records that a reader did not find bytes of the rows: the chunks that the task reads of them are
 * lost, unless their bytes were put back after the claim. chunks: only these chunks are lost;
 * chunk_count 0: all of them. */
void dray__claim_mark_lost(const dray__table *table, const dray__client *client, uint32_t ticket,
                           const uint32_t *items, uint32_t count, const uint64_t *chunks,
                           uint32_t chunk_count);
/* Loses rows of a claim whose bytes are gone, however often they were tried. If there is a journal,
 * rows whose bytes are there (again) are given back instead, without being counted. */
int dray__claim_lost(dray__table *table, dray__client *client, uint32_t ticket,
                     const uint32_t *items, uint32_t count, const char *reason, dray_error *error);
/* Moves these rows of the claim, in this order, to a new claim `part`, which reads no columns. */
int dray__claim_split(dray__table *table, dray__client *client, uint32_t ticket, uint32_t part,
                      const uint32_t *items, uint32_t count, dray_error *error);
int dray__claim_hold(dray__table *table, dray__client *client, uint32_t ticket, int64_t until,
                     dray_error *error);
/* Unpins a claim's puts and forgets the claim. Rows that it still holds are given back without
 * being counted. Returns false when there is no such claim. */
bool dray__claim_release(dray__table *table, dray__client *client, uint32_t ticket);
/* Takes back the claims that were held too long. Returns the time when the next one is due, or
 * INT64_MAX. */
int64_t dray__table_expire(dray__table *table, int64_t now);
/* Takes a claim's rows back without counting them. Its commit fails with DRAY_ESTALE. */
void dray__claim_void(dray__table *table, dray__claim *claim);
