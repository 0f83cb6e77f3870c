/* What the files of the table say to each other: rows that become ready or are settled, puts and
 * their places, claims, rounds; and to those who answer for it (answers.c, status.c, waiters.c).
 * What the controller asks of a table is in table.h.
 *
 * These files call each other in a circle, because each operation may set off others: a commit
 * settles rows, settled rows free bytes and end partitions, a loss makes rows of earlier tasks
 * ready again, and a journal that is read back repeats all of it. */
#pragma once

#include "queue/table/table.h"

/* The writer of a put of rows with keys. */
#define DRAY__ANYBODY (-2)

bool dray__finished(const dray__partition *p, uint32_t task);
/* Rows that are neither taken nor settled. */
uint32_t dray__open_rows(const dray__partition *p, uint32_t task);
/* Recomputes word w of the task's ready bits; settled: rows of it were settled, too. */
void dray__refresh(dray__table *table, dray__partition *p, uint32_t task, uint32_t w, bool settled);
void dray__refresh_all_tasks(dray__table *table, dray__partition *p, uint32_t w, bool settled);
/* Sets *items to `capacity` items of `size` bytes, the new ones zero. DRAY_ENOMEM. */
int dray__grow(void *items, size_t old_capacity, size_t capacity, size_t size, dray_error *error);
/* The same, doubling, when all of *capacity items are in use. */
int dray__grow_full(void *items, uint32_t used, uint32_t *capacity, size_t size, dray_error *error);
/* NULL is fine. */
void dray__partition_free(const dray__table *table, dray__partition *p);
uint64_t dray__partition_charge(const dray__partition *p);
/* Index of the tag's key, interned. */
int dray__table_key(dray__table *table, const char *key, uint32_t *out, dray_error *error);
/* The column has this spec, from a put whose rows are gone. */
int dray__table_define(dray__table *table, const dray__new_column *column, dray_error *error);
/* A partition of that name was there. */
int dray__table_add_former(dray__table *table, const char *name, uint64_t finished,
                           dray_error *error);
/* Finds or adds. */
int dray__table_column(dray__table *table, const char *name, uint32_t *out, dray_error *error);
/* Checks columns and tags of a put before anything changes. bytes: of all extents. */
int dray__put_check(const dray__table *table, const dray__client *client, int writer,
                    const dray__content *content, uint32_t items, uint64_t *bytes,
                    dray_error *error);
/* Makes everything that a checked put needs, so that applying it cannot fail. *out is NULL when
 * there is nothing to record. */
int dray__put_prepare(dray__table *table, dray__partition *p, int writer,
                      const dray__content *content, uint32_t items, dray__put **out,
                      dray_error *error);
void dray__put_discard(dray__table *table, dray__put *put);
/* The same of a keyed put that was checked: columns alone. *out is NULL where there are none. */
int dray__put_prepare_keyed(dray__table *table, const dray__content *content, uint32_t items,
                            uint32_t number, dray__put **out, dray_error *error);
/* Its bytes count from now on. */
void dray__put_keep(dray__table *table, dray__put *put);
/* A row has its value of the column elsewhere now, or nowhere. Frees what nobody needs any more. */
void dray__put_leave(dray__table *table, dray__put *put, uint32_t column);
/* A column of the put lies elsewhere now, with as many bytes: in this client's chunk, or object. */
int dray__put_move(dray__table *table, dray__put *put, uint32_t column, const dray__extent *to,
                   dray_error *error);
/* Records the put for rows: places, columns' bits, bytes. Row i is slots[i] (DRAY__NONE: skipped),
 * or first + i where slots is NULL; it has item i / divisor. stays[i]: the row's columns are not
 * complete yet; NULL: all are. Cannot fail. */
void dray__put_apply(dray__table *table, dray__partition *p, int writer, dray__put *put,
                     const uint32_t *slots, uint32_t first, uint32_t count, uint32_t divisor,
                     const bool *stays);
/* The same in parts: rows [from, to), of which it returns how many are complete; `rows` is how many
 * are in all. */
void dray__put_begin(dray__table *table, dray__partition *p, dray__put *put);
uint32_t dray__put_rows(dray__table *table, dray__partition *p, int writer, dray__put *put,
                        const uint32_t *slots, uint32_t first, uint32_t from, uint32_t to,
                        uint32_t divisor, const bool *stays);
void dray__put_finish(dray__table *table, dray__partition *p, dray__put *put, uint32_t rows);
/* Room for `rows` further commits of the task to rows that have some already; open: there will be
 * such rows. */
int dray__segments_prepare(dray__partition *p, uint32_t task, uint32_t rows, bool open,
                           dray_error *error);
/* The row has commits of the task, and is not complete. */
bool dray__is_partial(const dray__partition *p, uint32_t task, uint32_t slot);
/* The row, which nobody holds, comes to those that are begun and wait (by: 1), or leaves them (-1);
 * does nothing for one that is not begun, or dead. */
void dray__count_cut(dray__partition *p, uint32_t task, uint32_t slot, int by);
/* Steps through what a writer (a task, or -1) committed for the row, last first: starts with
 * *at = DRAY__NONE and place NULL; false: there is no more. */
bool dray__next_place(const dray__partition *p, int writer, uint32_t slot, uint32_t *at,
                      const dray__place **place);
/* The row was settled for the task: what only it still needed is freed. */
void dray__put_settled(dray__table *table, dray__partition *p, uint32_t task, uint32_t slot);
void dray__put_unpin(dray__table *table, dray__put *put, bool retire);
/* The partition is going: its puts are freed, or hidden until their last unpin. */
void dray__puts_clear(dray__table *table, dray__partition *p);

/* ---- what holds bytes (chunks.c) ---- */

typedef struct dray__bytes_kind {
    /* May the client put the column where it says? *size: of the chunk, or object. */
    int (*check)(const dray__table *table, const dray__client *client,
                 const dray__new_column *column, uint64_t *size, dray_error *error);
    /* May column `at` be there beside the others of its put, each of which was checked? */
    int (*check_beside)(const dray__table *table, const dray__new_column *columns, uint32_t count,
                        uint32_t at, uint32_t items, dray_error *error);
    /* What a put's column, which was checked, is in. */
    int (*take)(dray__table *table, const dray__extent *extent, dray__chunk **out,
                dray_error *error);
    /* The put that took it never came to be. */
    void (*discard)(dray__table *table, dray__chunk *chunk);
    /* Clients are told where they have to know that it is gone. */
    void (*forget)(dray__table *table, const dray__chunk *chunk);
} dray__bytes_kind;

extern const dray__bytes_kind dray__bytes_chunks, dray__bytes_objects;

/* Frees the chunk if nothing is in it and nothing will be put there any more. */
void dray__chunk_check_free(dray__table *table, dray__chunk *chunk);
void dray__chunks_orphan(dray__table *table, dray__client *client);

/* The row's tag of that key, as committed last. false: it has none. */
bool dray__row_tag(const dray__table *table, const dray__partition *p, uint32_t slot, uint32_t key,
                   double *value);
/* `made` as the client's claim `ticket`, which reads nothing yet. */
int dray__claim_add(dray__table *table, dray__client *client, uint32_t ticket,
                    const dray__claim *made, dray__claim **out, dray_error *error);
/* The client's claim, whose rows are its own: DRAY_ESTALE, DRAY_EGONE, DRAY_EPERM. */
int dray__claim_active(const dray__table *table, const dray__client *client, uint32_t ticket,
                       dray__claim **out, dray_error *error);
/* Marks the rows as claimed: one attempt more. */
void dray__take_rows(dray__table *table, dray__partition *p, uint32_t task, const uint32_t *slots,
                     uint32_t count);
/* The row is not claimed any more, and was not committed. */
void dray__untake_row(dray__table *table, dray__partition *p, uint32_t task, uint32_t slot);

/* ---- rounds (rounds.c) ---- */

typedef struct dray__share { /* of one DP rank */
    uint32_t *slots, count;  /* with padding */
    uint32_t own;            /* the first of them are its own */
    uint32_t *micro_ends, micro_count;
    uint64_t given; /* peers that have it */
    bool lost;      /* one of its rows is, since its leader has it */
} dray__share;

struct dray__round {
    uint64_t number;
    dray__consumer_group *consumers;
    dray__partition *partition;
    dray__share *shares;
    uint32_t size, peers;
    bool lockstep;
    dray__put **pins; /* what padding reads, whichever batch commits that row first */
    uint32_t pin_count;
    dray__round *next;
};

struct dray__consumer_group { /* a consumer group of a task */
    char *name;
    uint32_t task;
    uint64_t epoch, next_round;
    bool voided; /* a member of a lockstep group is gone: its epoch must rise */
    bool in_use; /* while some are forgotten */
    dray__consumer_group *next;
};

/* The share that is waiting for who asks. DRAY_EAGAIN: a round has to be made first; DRAY_ESTALE:
 * the group has gone on, or is void. */
int dray__round_find(dray__table *table, const dray__want *want, bool lockstep, dray__round **out,
                     dray_error *error);
/* Divides the rows among the ranks. Takes them. */
int dray__round_new(dray__table *table, dray__partition *p, const dray__want *want, bool lockstep,
                    const uint32_t *slots, uint32_t count, dray__round **out, dray_error *error);
/* The peer has its share: frees the round once everybody has. */
void dray__round_given(dray__table *table, dray__round *round, const dray__want *want);
/* Shares that nobody has are given back; in lockstep, so are those that are claimed. */
void dray__consumers_void(dray__table *table, dray__consumer_group *consumers);
void dray__rounds_clear(dray__table *table,
                        const dray__partition *p); /* NULL: all, and consumer_groups */
/* The row is lost: so are the rounds with shares that have it, and that nobody has asked for. Of
 * others the peers that have not asked yet get nothing: they would read another sample. */
void dray__rounds_lose(dray__table *table, const dray__partition *p, uint32_t task, uint32_t slot);

/* What there is for the task, for messages: "16 rows (sealed), 3 ready, ...". */
void dray__describe(const dray__table *table, const dray__want *want, char *out, size_t size);
/* ", 2 wait for another sample (refill): slots 3, 7", or nothing; its length, as snprintf. */
int dray__describe_vacant(const dray__partition *p, char *out, size_t size);

/* DRAY_OK: the name was never cleared; DRAY_EEND: it was finished for the task; DRAY_EGONE. */
int dray__table_cleared(const dray__table *table, const char *partition, uint32_t task,
                        dray_error *error);

/* A policy picks rows that are ready, in its order: at most `limit` of them. */
typedef struct dray__pick {
    uint32_t *slots; /* room for `want` */
    uint32_t count;
    uint32_t weight; /* rows that they stand for: a group with dead members counts whole */
} dray__pick;
typedef struct dray__policy_fn {
    const char *name;
    void (*pick)(const dray__table *table, const dray__partition *p, const dray__want *want,
                 uint32_t limit, dray__pick *out);
    bool in_order; /* no later partition before an earlier one is used up */
    bool by_group; /* the count must be a multiple of the group's size */
    bool rounds;   /* what is picked is divided among the ranks of a group */
    bool lockstep; /* and each rank gets as many micro-batches */
} dray__policy_fn;
/* NULL: there is no such policy. */
const dray__policy_fn *dray__policy_find(int32_t policy);
