/* Functions that the files of the table call of each other: for rows that become ready or are
 * settled, puts and their places, claims, rounds. The files that answer requests (answers.c,
 * status.c, waiters.c) use some of them, too. The controller's functions are in table.h.
 *
 * These files call each other in a circle, because each operation may cause others: a commit
 * settles rows, settled rows free bytes and end partitions, and a loss makes rows of earlier tasks
 * ready again. Reading a journal repeats all of these operations. */
#pragma once

#include "queue/table/table.h"

/* The writer of a put of rows with keys. */
#define DRAY__ANYBODY (-2)

bool dray__finished(const dray__partition *p, uint32_t task);
/* Returns how many rows are neither taken nor settled. */
uint32_t dray__open_rows(const dray__partition *p, uint32_t task);
/* Recomputes word w of the task's ready bits. settled: rows of the word were settled, too. */
void dray__refresh(dray__table *table, dray__partition *p, uint32_t task, uint32_t w, bool settled);
void dray__refresh_all_tasks(dray__table *table, dray__partition *p, uint32_t w, bool settled);
/* Sets *items to `capacity` items of `size` bytes, the new ones zero. DRAY_ENOMEM. */
int dray__grow(void *items, size_t old_capacity, size_t capacity, size_t size, dray_error *error);
/* Doubles the memory of *items when all of *capacity items are in use. */
int dray__grow_full(void *items, uint32_t used, uint32_t *capacity, size_t size, dray_error *error);
void dray__partition_free(const dray__table *table, dray__partition *p); /* p may be NULL */
/* Returns the bytes of the partition that count against the capacity. */
uint64_t dray__partition_charge(const dray__partition *p);
/* Returns the index of a tag's key, which is added if it is new. */
int dray__table_key(dray__table *table, const char *key, uint32_t *out, dray_error *error);
/* Fixes the spec of a column, for a journal that no longer has the put that fixed it. */
int dray__table_define(dray__table *table, const dray__new_column *column, dray_error *error);
/* Records that a partition of that name was cleared. */
int dray__table_add_former(dray__table *table, const char *name, uint64_t finished,
                           dray_error *error);
/* Returns the index of a column, which is added if it is new. */
int dray__table_column(dray__table *table, const char *name, uint32_t *out, dray_error *error);
/* Checks columns and tags of a put. Nothing is changed. *bytes: the bytes of all extents. */
int dray__put_check(const dray__table *table, const dray__client *client, int writer,
                    const dray__content *content, uint32_t items, uint64_t *bytes,
                    dray_error *error);
/* Allocates all memory that a checked put needs, so that applying it cannot fail. *out is NULL when
 * the put has neither columns nor tags. */
int dray__put_prepare(dray__table *table, dray__partition *p, int writer,
                      const dray__content *content, uint32_t items, dray__put **out,
                      dray_error *error);
void dray__put_discard(dray__table *table, dray__put *put);
/* Does the same for a keyed put, which has columns alone. *out is NULL when it has none. */
int dray__put_prepare_keyed(dray__table *table, const dray__content *content, uint32_t items,
                            uint32_t number, dray__put **out, dray_error *error);
/* Counts the bytes of a prepared keyed put against the capacity. */
void dray__put_keep(dray__table *table, dray__put *put);
/* Called when one row less has its value of the column in this put. Frees the column's bytes when
 * no row has its value there and they are not pinned. */
void dray__put_leave(dray__table *table, dray__put *put, uint32_t column);
/* Moves a column of the put to another extent of the same size, in a chunk or object of its client.
 */
int dray__put_move(dray__table *table, dray__put *put, uint32_t column, const dray__extent *to,
                   dray_error *error);
/* Records the put for rows: places, columns' bits, bytes. Row i is slots[i] (DRAY__NONE is
 * skipped), or first + i when slots is NULL; its values are item i / divisor. stays[i] is true when
 * the row's columns are not complete yet; NULL when all rows' are. Cannot fail. */
void dray__put_apply(dray__table *table, dray__partition *p, int writer, dray__put *put,
                     const uint32_t *slots, uint32_t first, uint32_t count, uint32_t divisor,
                     const bool *stays);
/* Do the same in parts. dray__put_rows records rows [from, to), and returns how many of them are
 * complete; `rows` of dray__put_finish is the sum of these. */
void dray__put_begin(dray__table *table, dray__partition *p, dray__put *put);
uint32_t dray__put_rows(dray__table *table, dray__partition *p, int writer, dray__put *put,
                        const uint32_t *slots, uint32_t first, uint32_t from, uint32_t to,
                        uint32_t divisor, const bool *stays);
void dray__put_finish(dray__table *table, dray__partition *p, dray__put *put, uint32_t rows);
/* Allocates the memory for `rows` further commits of the task to rows that have one already. open:
 * there will be such rows later. */
int dray__segments_prepare(dray__partition *p, uint32_t task, uint32_t rows, bool open,
                           dray_error *error);
/* Returns true when the row has commits of the task and is not complete. */
bool dray__is_partial(const dray__partition *p, uint32_t task, uint32_t slot);
/* Adds `by` (1 or -1) to the task's cut_count, if the row, which no claim holds, has a partial
 * commit and is not dead. */
void dray__count_cut(dray__partition *p, uint32_t task, uint32_t slot, int by);
/* Steps through the places that a writer (a task, or -1) committed for the row, the last one first.
 * The caller begins with *at = DRAY__NONE and *place NULL. Returns false after the first one. */
bool dray__next_place(const dray__partition *p, int writer, uint32_t slot, uint32_t *at,
                      const dray__place **place);
/* Called when the row was settled for the task. Frees the bytes that no other task needs. */
void dray__put_settled(dray__table *table, dray__partition *p, uint32_t task, uint32_t slot);
void dray__put_unpin(dray__table *table, dray__put *put, bool retire);
/* Frees the puts of a partition that is cleared. A pinned put is freed with its last unpin. */
void dray__puts_clear(dray__table *table, dray__partition *p);

/* ---- chunks, or objects of a store (chunks.c) ---- */

typedef struct dray__bytes_kind {
    /* Checks that the client may put the column at its extent. *size: the chunk's or object's. */
    int (*check)(const dray__table *table, const dray__client *client,
                 const dray__new_column *column, uint64_t *size, dray_error *error);
    /* Checks column `at` against the other columns of its put, each of which has passed `check`. */
    int (*check_beside)(const dray__table *table, const dray__new_column *columns, uint32_t count,
                        uint32_t at, uint32_t items, dray_error *error);
    /* Returns the chunk or object that has a checked column's bytes. */
    int (*take)(dray__table *table, const dray__extent *extent, dray__chunk **out,
                dray_error *error);
    /* Undoes `take` for a put that is discarded. */
    void (*discard)(dray__table *table, dray__chunk *chunk);
    /* Called when a chunk or object is removed. Notes its id if clients have to unmap it. */
    void (*forget)(dray__table *table, const dray__chunk *chunk);
} dray__bytes_kind;

extern const dray__bytes_kind dray__bytes_chunks, dray__bytes_objects;

/* Frees the chunk if it is empty and its owner puts nothing more into it. */
void dray__chunk_check_free(dray__table *table, dray__chunk *chunk);
/* Called when a client ends: its chunks have no owner any more. */
void dray__chunks_orphan(dray__table *table, dray__client *client);

/* Returns the row's tag of that key, as committed last. Returns false when it has none. */
bool dray__row_tag(const dray__table *table, const dray__partition *p, uint32_t slot, uint32_t key,
                   double *value);
/* Adds a copy of `made` as the client's claim `ticket`, without pins. */
int dray__claim_add(dray__table *table, dray__client *client, uint32_t ticket,
                    const dray__claim *made, dray__claim **out, dray_error *error);
/* Returns the client's claim. Fails with DRAY_ESTALE, DRAY_EGONE or DRAY_EPERM when it does not
 * hold its rows. */
int dray__claim_active(const dray__table *table, const dray__client *client, uint32_t ticket,
                       dray__claim **out, dray_error *error);
/* Marks the rows as claimed, and counts an attempt of each. */
void dray__take_rows(dray__table *table, dray__partition *p, uint32_t task, const uint32_t *slots,
                     uint32_t count);
/* Ends the claim of a row that was not committed. */
void dray__untake_row(dray__table *table, dray__partition *p, uint32_t task, uint32_t slot);

/* ---- rounds (rounds.c) ---- */

typedef struct dray__share { /* the rows of one DP rank */
    uint32_t *slots, count;  /* its own rows, then padding */
    uint32_t own;            /* the number of its own rows */
    uint32_t *micro_ends, micro_count;
    uint64_t given; /* the peers that have claimed it, a bit each */
    bool lost;      /* one of its rows was lost after its leader had claimed it */
} dray__share;

struct dray__round {
    uint64_t number;
    dray__consumer_group *consumers;
    dray__partition *partition;
    dray__share *shares;
    uint32_t size, peers;
    bool lockstep;
    dray__put **pins; /* the puts that padding reads, kept whichever batch commits a row first */
    uint32_t pin_count;
    dray__round *next;
};

struct dray__consumer_group { /* a consumer group of a task */
    char *name;
    uint32_t task;
    uint64_t epoch, next_round;
    bool voided; /* a member of a lockstep group is gone: its epoch must rise */
    bool in_use; /* marks the groups to keep while others are forgotten */
    dray__consumer_group *next;
};

/* Returns the round that has a share for the rank that asks. Fails with DRAY_EAGAIN when a round
 * has to be made first, and with DRAY_ESTALE when the group is at a later round, or void. */
int dray__round_find(dray__table *table, const dray__want *want, bool lockstep, dray__round **out,
                     dray_error *error);
/* Divides the rows among the ranks, and marks them as claimed. */
int dray__round_new(dray__table *table, dray__partition *p, const dray__want *want, bool lockstep,
                    const uint32_t *slots, uint32_t count, dray__round **out, dray_error *error);
/* Records that a peer has claimed its share. The round is freed after the last peer. */
void dray__round_given(dray__table *table, dray__round *round, const dray__want *want);
/* Gives back the rows of shares that no rank has claimed; in lockstep, those of claimed shares,
 * too. */
void dray__consumers_void(dray__table *table, dray__consumer_group *consumers);
/* Frees the rounds of a partition. With NULL, frees all rounds, and the consumer groups. */
void dray__rounds_clear(dray__table *table, const dray__partition *p);
/* Called when a row is lost. Ends the rounds with a share that has the row and that its leader has
 * not claimed. When the leader has claimed such a share, the peers that have not claimed it get no
 * rows for it, because they would read another sample. */
void dray__rounds_lose(dray__table *table, const dray__partition *p, uint32_t task, uint32_t slot);

/* Writes the rows that there are for the task, for messages: "16 rows (sealed), 3 ready, ...". */
void dray__describe(const dray__table *table, const dray__want *want, char *out, size_t size);
/* Writes ", 2 wait for another sample (refill): slots 3, 7", or nothing. Returns the length, as
 * snprintf does. */
int dray__describe_vacant(const dray__partition *p, char *out, size_t size);

/* Returns DRAY_OK when no partition of that name was cleared, DRAY_EEND when one was cleared after
 * it was finished for the task, and otherwise DRAY_EGONE. */
int dray__table_cleared(const dray__table *table, const char *partition, uint32_t task,
                        dray_error *error);

/* A policy picks at most `limit` of the ready rows, in its order. */
typedef struct dray__pick {
    uint32_t *slots; /* room for as many rows as the claim wants */
    uint32_t count;
    uint32_t weight; /* count, and the settled members of groups that were picked */
} dray__pick;
typedef void dray__policy_fn(const dray__table *table, const dray__partition *p,
                             const dray__want *want, uint32_t limit, dray__pick *out);
dray__policy_fn *dray__policy_find(int32_t policy); /* NULL when there is no such policy */
