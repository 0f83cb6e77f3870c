/* src/queue/table/: the state of a queue. A table is partitions of rows by columns, tasks, claims,
 * puts and the chunks that they lie in (table.h). partitions.c inserts rows and clears partitions,
 * puts.c keeps what inserts and commits brought, chunks.c where its bytes are, ready.c says which
 * rows are ready, policy.c picks among them, claims.c and commits.c are a consumer's two steps,
 * rounds.c divides a claim among DP ranks, and loss.c replaces samples that are lost. */

/* The queue's state machine: partitions of rows, columns' committed bits, tasks' taken and done
 * bits, claims, puts and chunks. It knows no socket, no clock and no thread: the controller
 * (controller.c) feeds it requests and asks afterwards what changed.
 *
 * The truth about a cell is one bit of its column; about a row and a task, the bits taken (a claim
 * holds it) and done (committed), and the row's dead bit. A row is ready for a task when all the
 * columns that it needs are committed and the row is neither taken, done nor dead:
 *     ready = AND of columns' words AND NOT (taken OR done OR dead)
 * which dray__refresh computes a word at a time for words that changed, so that a claim looks only
 * at ready rows. Settled (done or dead) is what ends a partition and frees bytes; but what a
 * provisional task (a trainer) has done frees nothing before a checkpoint covers it, and can be
 * undone.
 *
 * A row that is lost (it failed too often, or is too old) is vacant until a producer refills its
 * slot: neither ready nor settled for anybody, under a new row generation afterwards.
 *
 * What a journal has to keep is one record a change, as the functions below take them (clients are
 * only who holds chunks and claims, which end with them):
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
 *   admit    the admission as it is now (its accepted follows from commits and losses)
 * Claims, attempts and pins are not kept: a restart voids them. */
#pragma once

#include "base/hash.h"
#include "control/limits.h"
#include "queue/messages.h"
#include "queue/table/bits.h"

#define DRAY__CAPACITY_ROWS UINT64_C(1000000) /* where none is given */
#define DRAY__CAPACITY_BYTES (UINT64_C(4) << 30)
#define DRAY__RANKS_MAX 1024u           /* of a consumer group */
#define DRAY__CONSUMER_GROUPS_MAX 4096u /* consumer groups that are known */
#define DRAY__CAUSES 4u                 /* of dray_loss_cause */

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
    bool defined; /* a first put fixed its spec */
    dray__column_spec spec;
    uint64_t readers;           /* tasks that need it */
    uint64_t rows_in, bytes_in; /* committed so far */
    int writer;                 /* the task that writes it; -1: only inserts may */
} dray__col;

typedef struct dray__qtask {
    char *name;
    uint32_t *needs, *writes; /* column indices */
    uint32_t needs_count, writes_count;
    struct dray__task_counts { /* so far: claims; rows of them, and bytes (of ragged columns their
                                  put's average); what became of the rows */
        uint64_t claims, rows, bytes, committed, failed, given_back;
    } counts;
} dray__qtask;

/* ---- partitions ------------------------------------------------------------------------------ */

/* A row as one task sees it: its place in the list of ready rows (in the order in which they became
 * ready), how often it was claimed, and how often that failed. */
typedef struct dray__row_state {
    uint32_t next, prev;
    uint32_t attempt, failures;
} dray__row_state;

typedef struct dray__link {
    uint32_t next, prev;
} dray__link;

typedef struct dray__track { /* one task's view of one partition */
    uint64_t *taken, *done, *ready;
    dray__row_state *rows;
    uint32_t head, tail; /* ready rows */
    uint32_t ready_count, taken_count, done_count, settled_count, dead_count;
    uint32_t taken_dead; /* rows that died while this task had taken them: settled, too */
    uint32_t cut_count;  /* rows that it has begun and nobody holds: they are claimed again */
    uint32_t open_from;  /* no row before it is open (neither taken nor settled) */
    uint64_t floor;      /* no open row is of an older version; UINT64_MAX: none has one */
    /* Groups whose members are all ready or settled, at least one ready; in order of completion. */
    uint64_t *whole;
    dray__link *groups;
    uint32_t group_head, group_tail;
} dray__track;

typedef struct dray__place { /* where the columns that one writer committed for a row lie */
    uint32_t put, item;      /* index in partition->puts; item of that put */
} dray__place;

/* A commit of a row that a later one of the same task was appended to. */
typedef struct dray__segment {
    dray__place place;
    uint32_t previous; /* index in partition->segments; NONE: it is the first */
} dray__segment;

typedef struct dray__group_range {
    uint32_t first, count;
} dray__group_range;

typedef struct dray__death {
    uint32_t slot, generation, task, failures;
    int32_t cause; /* dray_loss_cause */
    bool refilled; /* its slot was given to another sample, or waits for one */
    char reason[DRAY__REASON_MAX + 1];
} dray__death;

/* Slots of one group that wait for another sample. */
typedef struct dray__demand {
    uint64_t id; /* also the generation of the rows that will answer it */
    dray__partition *partition;
    uint32_t *slots;
    uint32_t count, task, failures;
    int32_t cause;
    dray__client *holder; /* a producer that was told; NULL: nobody, or it has gone */
    char reason[DRAY__REASON_MAX + 1];
    struct dray__demand *next;
} dray__demand;

struct dray__partition {
    char *name;
    uint64_t hash;
    uint32_t generation; /* 1, 2, ... in order of creation; never used again */
    uint32_t rows, row_capacity;
    uint32_t coming; /* rows of the insert that makes it, before it is there */
    bool sealed;
    bool clearing;         /* it will be cleared when a checkpoint covers it */
    uint32_t uncovered;    /* commits of rows that no checkpoint covers yet */
    uint64_t **commit_seq; /* [task]: of each row the commit that is not covered; 0: none;
                              NULL: the task is not provisional, or has committed nothing */
    uint64_t *dead, *vacant;
    uint64_t *away; /* rows whose bytes are being put back */
    bool some_away;
    uint32_t dead_count, vacant_count;
    uint32_t *row_generations; /* the partition's, or that of the refill */
    uint64_t *oldest, *newest; /* 1 + version of the row's oldest and newest token; 0: not known;
                                  NULL: no row has a version */
    uint32_t lost[DRAY__CAUSES], refilled; /* rows, over the partition's life */
    uint64_t **columns;                    /* [column]: committed bits; NULL: none yet */
    uint32_t *committed;
    uint32_t column_capacity;
    dray__track *tracks;  /* [task] */
    dray__place **places; /* [1 + task], [0] = insert; NULL: nothing put yet */
    uint32_t **earlier;   /* [task]: of each row, its last segment but one; NULL: none has two */
    dray__segment *segments;
    uint32_t segment_count, segment_capacity;
    uint32_t *group_of;
    dray__group_range *groups;
    uint32_t group_size; /* of every group of the partition */
    uint32_t group_count, group_capacity;
    dray__put **puts; /* entries may be NULL */
    uint32_t put_count, put_capacity;
    uint64_t reserved, live;     /* bytes: declared by inserts; committed and not freed */
    uint64_t memory, tag_memory; /* bytes that its rows may take here: with those of tags */
    dray__death *deaths;         /* the first few, for people */
    uint32_t death_count, death_capacity;
};

/* ---- storage --------------------------------------------------------------------------------- */

typedef struct dray__chunk {
    uint64_t id, key, size;
    uint32_t home;        /* the keeper that holds it (homes.h) */
    dray__client *owner;  /* NULL: gone, nobody writes it again */
    uint32_t live;        /* extents that are not freed, */
    uint64_t live_bytes;  /* and their bytes: at most size */
    bool closed;          /* its owner will put nothing more in before it got it back */
    bool spare;           /* free: in the owner's list, which gets it when it asks for memory */
    uint64_t spare_since; /* table->asked */
    bool named;           /* while dray__claim_mark_lost looks for it */
    bool retired;         /* must never be rewritten */
    bool lost;            /* its keeper is gone, and its bytes */
    struct dray__chunk *next;
} dray__chunk;

typedef struct dray__put_column {
    uint32_t column;
    dray__extent extent;
    dray__chunk *chunk;            /* NULL: freed */
    const dray__column_spec *spec; /* of a keyed put, its own; NULL: the column's */
} dray__put_column;

typedef struct dray__put_tag {
    uint32_t item; /* DRAY__NONE: every item */
    uint32_t key;
    double value;
} dray__put_tag;

struct dray__put {
    uint64_t seq;
    uint32_t index;             /* in partition->puts */
    uint64_t record;            /* of the journal, with its bytes; 0: none */
    uint64_t restored;          /* table->restores when they were read from there again */
    bool restoring;             /* they are being read, or will be */
    dray__partition *partition; /* NULL: cleared, or keyed */
    uint32_t *cells;     /* keyed: [column] rows that have their value here; NULL: it is not */
    uint64_t cell_count; /* of all columns */
    uint32_t number;     /* keyed: the put's; the generation of the rows that it made */
    uint32_t items;
    uint32_t pins;
    uint64_t open_tasks; /* tasks with rows of this put that are not settled */
    uint64_t goes_on;    /* the task that will append to rows of it, and reads it then */
    uint32_t *unsettled; /* [task]: how many */
    dray__put_column *columns;
    uint32_t column_count;
    dray__put_tag *tags; /* by item; those of every item last */
    uint32_t *tag_start; /* [items + 1]; NULL: all tags are of every item */
    uint32_t tag_count;
    uint64_t mark;       /* the claim that met it last, and its place among that claim's pins */
    uint64_t mark_bytes; /* that it reads of an item */
    uint32_t mark_index;
};

/* ---- clients and claims ---------------------------------------------------------------------- */

struct dray__client {
    uint32_t id;
    uint64_t session;    /* the coordinator's member id */
    uint64_t channel;    /* and connection */
    uint64_t identity;   /* the same when it comes back, to this controller or the next */
    struct dray__told {  /* of its requests the last that counted, where there is a ledger */
        uint32_t ticket; /* 0: none has */
        uint32_t first_slot, generation;
    } told;
    char *name;
    void *owner;                            /* the controller's */
    dray__chunk *recycled, **recycled_tail; /* free, longest first */
    uint64_t promised;                      /* bytes of chunks that it asked for and may take */
    bool asked_room;                        /* for an insert that comes next */
    dray__client *next;
};

typedef enum dray__claim_state {
    DRAY__CLAIM_ACTIVE,
    DRAY__CLAIM_COMMITTED,
    DRAY__CLAIM_FAILED, /* all its rows were given back, or are other claims' */
    DRAY__CLAIM_STALE,  /* held too long: its rows were taken back */
    DRAY__CLAIM_GONE    /* its partition was cleared */
} dray__claim_state;

typedef struct dray__claim {
    uint64_t id; /* client << 32 | ticket */
    dray__client *client;
    uint32_t task;
    dray__claim_state state;
    dray__partition *partition; /* NULL once GONE */
    uint32_t generation;
    uint32_t *slots; /* DRAY__NONE: given back as failed, or another claim's */
    uint32_t count, active;
    int64_t hold_until;              /* INT64_MAX: as long as the session */
    uint64_t restores;               /* of the table when it was made */
    uint64_t newest;                 /* versions beyond it no longer exist; UINT64_MAX: all do */
    dray__consumer_group *consumers; /* whose rank's share it is; NULL: nobody's */
    bool read;                       /* rows with keys: nothing is held but puts */
    uint64_t memory;                 /* that it takes of the table's, for as long as it is there */
    bool lockstep, follower;         /* all of a round or none; the leader commits */
    uint32_t *reads; /* what it reads: with padding, which is not its to commit; NULL: slots */
    uint32_t *micro_ends, micro_count; /* micro-batches, as items of the claim; NULL: one */
    dray__put **pins;
    uint32_t pin_count;
    struct dray__claim *next, *prev;
} dray__claim;

typedef struct dray__former_partition { /* a partition that was cleared */
    char *name;
    uint64_t hash;
    uint64_t finished; /* tasks that had finished it */
} dray__former_partition;

typedef struct dray__quota { /* of those who show one token */
    char who[32];
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
    char **keys; /* tag keys */
    uint32_t key_count, key_capacity;
    dray__map key_names;

    dray__partition **partitions; /* in order of creation */
    uint32_t partition_count, partition_capacity;
    uint32_t generations;
    dray__keyed *keyed;             /* partitions whose rows have keys (keyed.h) */
    dray__former_partition *former; /* a ring */
    uint32_t former_at;
    bool ended;

    dray__client *clients;
    uint32_t client_ids;
    dray__demand *demands, **demands_tail; /* oldest first */
    dray__round *rounds;                   /* with shares that nobody has asked for yet */
    dray__consumer_group *consumer_groups;
    dray__claim *claims;
    dray__idmap claim_ids;
    dray__idmap chunks;
    uint64_t put_seq, marks, changes; /* changes: of keyed partitions */
    uint32_t claim_count, put_count;

    dray__settings settings;
    const struct dray__bytes_kind *bytes; /* chunks, or objects of a store (table_inside.h) */
    bool objects;                         /* a store's */
    dray__admission admission;
    dray__ledger *ledger; /* where changes are written down; NULL: nowhere */
    uint32_t restarts;    /* controllers that took the queue over */
    uint32_t epoch;       /* raised by every resume */
    uint64_t commit_seq,
        resumed_seq; /* of provisional commits; that the last resume went back to */
    uint32_t priority_key;
    uint32_t version_key;                        /* of the tag that says which weights made a row */
    uint64_t rows, charged, hidden;              /* hidden: cleared but pinned */
    uint64_t kept;                               /* bytes of keyed partitions */
    uint64_t chunk_bytes, spare_bytes, promised; /* of all chunks; of those that are spare; of
                                                     those that will be added */
    uint64_t asked;                              /* how often somebody wanted a chunk */
    uint64_t memory;                             /* of all partitions, bytes */
    dray__quota *quota;                          /* NULL: nothing limits it but its capacity */
    dray__table *quota_next;
    uint64_t restores; /* how often bytes were read from the journal again */
    uint64_t space;    /* of its objects, where a store holds the bytes; 0: not known yet */
    uint64_t inserted, refilled, lost[DRAY__CAUSES]; /* rows so far */

    uint64_t drops[DRAY__DROPS]; /* ids of chunks that are gone, a ring */
    uint64_t drop_count;
    void (*drop)(void *user, uint32_t home, uint64_t chunk, uint64_t key); /* may be NULL */
    void *user;

    /* What changed since these were last cleared, for the controller's waiters. */
    uint64_t dirty; /* tasks that may have something new to claim, or an end to see */
    bool finished;  /* some partition finished for a task, or was cleared */
    bool freed;     /* there is more capacity, or less to wait for */
    bool demanded;  /* a slot waits for another sample, or none ever will */
    bool named;     /* rows with keys were put, dropped, or forgotten by a consumer */
};

/* Tasks are checked: names, no column written by two, none needed and written by the same. */
int dray__table_new(const char *name, const dray__task_names *tasks, uint32_t task_count,
                    const dray__settings *settings, dray__table **out, dray_error *error);
void dray__table_free(dray__table *table);
void dray__table_count_anew(dray__table *table); /* nothing was done so far */
/* DRAY_EEXIST says what differs. Zero limits are not compared. */
int dray__table_same(const dray__table *table, const dray__task_names *tasks, uint32_t task_count,
                     const dray__settings *settings, dray_error *error);
int dray__table_task(const dray__table *table, const char *name, uint32_t *task, dray_error *error);
dray__partition *dray__table_partition(const dray__table *table, const char *name);

dray__client *dray__client_new(dray__table *table, uint64_t session, const char *name,
                               dray_error *error);
/* died: its open claims count as failed attempts (reason), and what it had pinned is never
 * rewritten; else they are simply given back. */
void dray__client_end(dray__table *table, dray__client *client, bool died, const char *reason);

/* ---- storage ---- */

int dray__chunk_add(dray__table *table, dray__client *client, uint32_t home, uint64_t id,
                    uint64_t key, uint64_t size, dray_error *error);
/* The owner will put nothing more in. Saying so again gives the chunk back again, should the first
 * answer have been lost. Ids of chunks that are gone are ignored, others': DRAY_EINVALID. */
int dray__chunk_close(dray__table *table, dray__client *client, uint64_t id, dray_error *error);
/* The keeper is gone with all that it held: nothing can be put into its chunks any more
 * (DRAY_EGONE), and what is in them is lost (dray__table_lose_bytes). */
void dray__chunks_lose(dray__table *table, uint32_t home);
/* The owner does not want it back (it must be free). */
int dray__chunk_discard(dray__table *table, dray__client *client, uint64_t id, dray_error *error);

/* ---- how much memory (held.c) ---- */

/* Memory for the client: one of its chunks that are free (*given; *size 0), or the new one, whose
 * size is then *size (*given 0). */
int dray__chunk_ask(dray__table *table, dray__client *client, const dray__chunk_wish *wish,
                    uint64_t *given, uint64_t *size, dray_error *error);
/* No more is taken of what was promised. */
void dray__promise_end(dray__table *table, dray__client *client);
/* Who holds most of the memory, in words; "": nobody holds any. */
void dray__describe_holder(dray__table *table, char *out, size_t size);
/* The chunk is free. */
void dray__chunk_set_spare(dray__table *table, dray__chunk *chunk);
/* Takes the chunk that is free longest; NULL: none is. */
dray__chunk *dray__chunk_take_spare(dray__table *table, dray__client *client);
void dray__chunk_forget(dray__table *table, dray__chunk *chunk);

/* ---- limits (quota.c) ---- */

typedef struct dray__quota_use {
    uint64_t queues, rows, bytes, table_bytes;
} dray__quota_use;

dray__quota_use dray__quota_used(const dray__quota *quota);
void dray__quota_join(dray__quota *quota, dray__table *table);
void dray__quota_leave(dray__table *table);
/* Requests that wait in any of its queues are tried again. */
void dray__quota_freed(dray__table *table);
/* DRAY_EAGAIN: not now; DRAY_EFULL: never. */
int dray__quota_rows(const dray__table *table, uint64_t rows, uint64_t memory, dray_error *error);
int dray__quota_bytes(const dray__table *table, uint64_t bytes, dray_error *error); /* DRAY_EFULL */
uint64_t dray__rows_memory(const dray__table *table, uint32_t rows, uint32_t group);

/* ---- producers ---- */

/* DRAY_EAGAIN: there is no room now (the message says how much is missing); DRAY_EFULL: never. */
int dray__table_insert(dray__table *table, dray__client *client, const dray__new_rows *rows,
                       uint32_t *first_slot, uint32_t *generation, dray_error *error);
/* An insert in steps. What it makes is of no partition that there is yet (fresh), or takes one step
 * alone: nobody sees anything of it before its end. */
typedef struct dray__insertion {
    dray__partition *partition;
    dray__put *put;
    uint64_t reserve;
    uint32_t first, rows, group, divisor;
    uint32_t placed, word; /* how far it is: rows; then words of them */
    bool fresh, begun;
} dray__insertion;

enum { DRAY__STEP_ROWS = 8192 }; /* of an insert that is not done at once */

int dray__insert_begin(dray__table *table, const dray__client *client, const dray__new_rows *rows,
                       dray__insertion *in, dray_error *error);
/* At most so many rows. true: there are no more. */
bool dray__insert_step(dray__table *table, dray__insertion *in, uint32_t most);
/* After the last step; instead of it: abort. */
int dray__insert_end(dray__table *table, dray__client *client, const dray__new_rows *rows,
                     dray__insertion *in, uint32_t *first_slot, uint32_t *generation,
                     dray_error *error);
void dray__insert_abort(dray__table *table, dray__insertion *in);
uint64_t dray__tags_memory(const dray__content *content, uint32_t items);
/* May these rows, with so many bytes of values, be inserted? The same errors. */
int dray__insert_check(const dray__table *table, const dray__client *client,
                       const dray__new_rows *rows, uint64_t bytes, dray_error *error);
/* The same before anything is written: chunks of `bytes` are promised to the client. */
int dray__table_room(dray__table *table, dray__client *client, const dray__new_rows *rows,
                     uint64_t values, uint64_t bytes, dray_error *error);
int dray__table_seal(dray__table *table, const char *partition, uint32_t rows, dray_error *error);
int dray__table_clear(dray__table *table, const char *partition, dray_error *error);
void dray__table_end(dray__table *table);
/* DRAY_OK: finished (task DRAY__NONE: for all); DRAY_EAGAIN; DRAY_EGONE: cleared before it was. */
int dray__table_wait(const dray__table *table, const char *partition, uint32_t task,
                     dray_error *error);

/* ---- loss ---- */

/* The row fails its task for good, or is dropped: as settings.on_loss says, it dies, its group dies
 * with it, or their slots become vacant and a demand for another sample is made. */
void dray__lose(dray__table *table, dray__partition *p, uint32_t task, uint32_t slot, int32_t cause,
                const char *reason);
/* The oldest demand that the client was told of and has not answered, else the oldest that nobody
 * holds, which it then does. DRAY_EAGAIN; DRAY_EEND: the queue has ended and nothing can be lost.
 */
int dray__table_demand(dray__table *table, dray__client *client, dray__demand **out,
                       dray_error *error);
/* No other sample will come: the slots' rows are dead. Repeating it succeeds. */
int dray__table_decline(dray__table *table, uint64_t id, dray_error *error);
int dray__table_refill(dray__table *table, dray__client *client, const dray__new_rows *rows,
                       uint32_t *first_slot, uint32_t *generation, dray_error *error);
/* Does a task still need bytes of the row that are lost, and not being put back? */
bool dray__needs_lost(const dray__table *table, const dray__partition *p, uint32_t slot,
                      uint32_t *task);
/* Does one need bytes that are being put back? */
bool dray__awaits_bytes(const dray__table *table, const dray__partition *p, uint32_t slot);
/* Rows of which some task still needs bytes in chunks that are lost are lost, too
 * (DRAY_LOSS_BYTES). */
void dray__table_lose_bytes(dray__table *table);
/* Demands of the partition (NULL: all) are forgotten. */
void dray__demands_clear(dray__table *table, const dray__partition *p);
void dray__demands_let_go(dray__table *table, const dray__client *client);

/* ---- checkpoints (cursor.c) ---- */

/* Refuses a job whose batches cannot fit, with the arithmetic. */
int dray__settings_check(const char *name, const dray__settings *settings, dray_error *error);
/* Room for provisional commits of the task. */
int dray__provisional_prepare(const dray__table *table, dray__partition *p, uint32_t task,
                              dray_error *error);
/* The task's commit of the row, if it waits for a checkpoint. */
bool dray__is_provisional(const dray__partition *p, uint32_t task, uint32_t slot);
/* It waits no longer: true if it did. What it would free is the caller's to free. */
bool dray__provisional_end(dray__partition *p, uint32_t task, uint32_t slot);
/* A checkpoint holds the provisional commits up to cursor->seq: what they kept is freed.
 * DRAY_ESTALE: a resume has undone some of them. */
int dray__table_cover(dray__table *table, const dray__cursor *cursor, dray_error *error);
/* Clears what was to be cleared and waits for no checkpoint any more. */
void dray__clear_covered(dray__table *table);
/* Undoes the commits after cursor->seq, loses rows of versions after its version, and raises the
 * epoch. */
int dray__table_resume(dray__table *table, const dray__cursor *cursor, dray_error *error);

/* ---- versions (versions.c) ---- */

/* DRAY_EINVALID: a tag `version` that is no whole number from 0 to 2^53. */
int dray__version_check(const char *key, double value, dray_error *error);
/* Room for the versions of the partition's rows. */
int dray__versions_prepare(dray__partition *p, dray_error *error);
void dray__versions_note(const dray__table *table, dray__partition *p, const dray__put *put,
                         const uint32_t *slots, uint32_t first, uint32_t from, uint32_t to,
                         uint32_t divisor);
/* Loses the rows that are ready for the claim but too old for it. */
/* Whether the claim leaves the row for others (DRAY_FRESH_LEFT). */
bool dray__is_left(const dray__partition *p, const dray__want *want, uint32_t slot);
/* How many rows are ready, and left because of that. */
uint32_t dray__count_left(const dray__partition *p, const dray__want *want);
void dray__drop_stale(dray__table *table, dray__partition *p, const dray__want *want);
/* DRAY_EINVALID: no such task, or numbers that no queue gets to. */
int dray__admission_check(const dray__table *table, const dray__admission *a, dray_error *error);
/* DRAY_EINVALID: the version goes back without `resume`. resume: accepted = version * batch. */
int dray__table_admit(dray__table *table, const dray__admission *admission, bool resume,
                      dray_error *error);
int dray__table_version(dray__table *table, uint64_t version, dray_error *error);
/* How many more rows may be begun; INT64_MAX: no bound. Those that are begun are admitted. */
int64_t dray__admission_room(const dray__table *table);
/* Rows that are begun and not finished, whether somebody holds them or they wait to be claimed
 * again. */
uint64_t dray__admission_running(const dray__table *table);
/* Of a claim that gets no rows now: there are more that could be begun for it than may be. */
bool dray__admission_refuses(const dray__table *table, const dray__want *want);
/* The task has let go of rows (by): +1 accepted each, -1 dropped each, 0 given back. */
void dray__admission_note(dray__table *table, uint32_t task, int64_t by);

/* ---- consumers ---- */

/* DRAY_EAGAIN: not now (the message says what there is). */
int dray__table_claim(dray__table *table, dray__client *client, uint32_t ticket,
                      const dray__want *want, dray__claim **out, dray_error *error);
dray__claim *dray__table_find_claim(const dray__table *table, const dray__client *client,
                                    uint32_t ticket);
int dray__claim_commit(dray__table *table, dray__client *client, uint32_t ticket,
                       uint32_t generation, const dray__outputs *outputs, dray_error *error);
/* The claim of a commit that a journal holds: ticket 1, of these rows (NONE: not its).
 * DRAY_EFORMAT: one of them could not have been claimed. */
int dray__claim_again(dray__table *table, dray__client *client, uint32_t task, dray__partition *p,
                      const uint32_t *slots, uint32_t count, dray__claim **out, dray_error *error);
/* items: places in the claim; count 0: all that are left. Items given back before are skipped. */
int dray__claim_fail(dray__table *table, dray__client *client, uint32_t ticket,
                     const uint32_t *items, uint32_t count, const char *reason, dray_error *error);
/* A reader says that it did not find bytes of the rows: what the task reads of them is lost, if it
 * was not restored since it was claimed. chunks: only what lies in these; none: everywhere. */
void dray__claim_mark_lost(const dray__table *table, const dray__client *client, uint32_t ticket,
                           const uint32_t *items, uint32_t count, const uint64_t *chunks,
                           uint32_t chunk_count);
/* Bytes of the rows are gone: they are lost, however often they were tried. Where there is a
 * journal, those that are there (again) are given back, uncounted. */
int dray__claim_lost(dray__table *table, dray__client *client, uint32_t ticket,
                     const uint32_t *items, uint32_t count, const char *reason, dray_error *error);
/* These rows of the claim, in this order, become a claim `part` that reads nothing; the rest of the
 * claim stays as it is. */
int dray__claim_split(dray__table *table, dray__client *client, uint32_t ticket, uint32_t part,
                      const uint32_t *items, uint32_t count, dray_error *error);
int dray__claim_hold(dray__table *table, dray__client *client, uint32_t ticket, int64_t until,
                     dray_error *error);
/* Unpins and forgets; rows still held are given back, not counted. false: no such claim. */
bool dray__claim_release(dray__table *table, dray__client *client, uint32_t ticket);
/* Takes back what was held too long. Returns when the next one is due, or INT64_MAX. */
int64_t dray__table_expire(dray__table *table, int64_t now);
/* Takes its rows back, not counted; what it commits is stale. */
void dray__claim_void(dray__table *table, dray__claim *claim);
