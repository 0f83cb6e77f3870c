/* src/queue/: the queue of samples. Its server half runs in the coordinator: the table of rows and
 * columns (table/), the requests to it (server/) and its journal (journal/). Its client half is in
 * the processes that produce and consume samples (client/). The bytes of samples are in chunks of
 * shared memory that keepers hold on to, or in Redis (storage/). In this folder: what both halves
 * share, which is columns and their places, messages (messages.h), and pages of releases. */

/* The queue's messages, as client and controller both write and read them: a struct each, and a
 * table of its fields (messages.c), which docs/wire.md lists.
 *
 * Every request but OPEN begins with a head:
 *     u32 client, u64 drops seen, u32 n, n * u64 chunks that the client closes
 * Answers to INSERT, ROOM, COMMIT, CHUNK, CLAIM, PUT, GET and TAKE begin with
 *     u64 drops so far, u8 forget all, u32 n, n * u64 chunks dropped since
 *
 * OPEN comes with the descriptor of a page of releases (below), or none, and that of the
 * checkpoint to restore, where that is not named. ROOM comes before values are written; the INSERT
 * that follows it comes before others. INSERT's answer: u32 first slot, u32 generation; RESUME's:
 * u32 epoch; STATUS's: str JSON. REFILL says i64 timeout, DECLINE u64 id, VERSION u64, CLEAR str
 * partition. END, CURSOR, STATUS and CLOSE have a head alone.
 *
 * CLAIM's answer: u32 which choice, u8 1 if it waited for the queue's admission (rows were ready,
 * and more of them than may be begun, when it was tried last before), news of columns and keys, and
 * the batch (client.h). Pieces are of rows that have several, first to last; marks of padding are
 * there with micro-batches only. NEXT is as COMMIT, then as CLAIM; its answer as COMMIT's, then u32
 * 0 and as CLAIM's, or an error as in error replies (control/frame.h). A claim whose time is over
 * is answered with an error of DRAY_ORIGIN_WAIT. RELEASE says u32 ticket, of a claim, or of a CLAIM
 * that still waits; no answer is wanted.
 *
 * FAIL without items and reason gives everything back, which counts as no attempt. LOST: who holds
 * bytes of these rows has lost them; without chunks it is not known which. CHUNK: at most one wish,
 * but of a store's objects all that were not committed, or maybe were. CHECKPOINT says a name in
 * the coordinator's folder, or DRAY__PASSED: the message's last descriptor, of a regular file. No
 * client says a path.
 *
 * PUT, GET, TAKE, DROP and RESET are of rows with keys. PUT's answer begins as INSERT's, then u32
 * n, n * an address, in the order of the request; GET's and TAKE's as CLAIM's. ROOM without rows
 * asks for memory alone. */
#pragma once

#include "base/tls.h"
#include "base/wire.h"

#include <dray/queue.h>
#include <stdbool.h>
#include <stdint.h>

#define DRAY__NONE UINT32_MAX
#define DRAY__PASSED "/" /* no name is that */

/* ---- columns and their places ---------------------------------------------------------------- */

/* What a column holds, and where a put of it lies: the words that client and controller share. */

#define DRAY__WORD_MAX 255u /* bytes of a queue's, partition's, task's, column's or tag's name */
#define DRAY__TASKS_MAX 64u /* of a queue: one bit each in a u64 */
#define DRAY__COLUMNS_MAX 4096u  /* of a queue */
#define DRAY__TAG_KEYS_MAX 1024u /* of a queue */
#define DRAY__ROWS_MAX (1u << 26)
#define DRAY__REASON_MAX 200u                /* bytes kept of why a row failed */
#define DRAY__LINES_MAX 4096u                /* bytes sent of it */
#define DRAY__ADDRESS_MAX 4096u              /* bytes of a backend's address */
#define DRAY__OBJECT_MAX (UINT64_C(1) << 40) /* bytes of an object */
#define DRAY__ALIGN 64u                      /* of values within a chunk */

typedef struct dray__column_spec {
    int32_t dtype, content;
    uint32_t ndim;
    bool ragged;
    int64_t shape[DRAY_MAX_DIMS]; /* of one row; shape[0] = 0 where ragged */
} dray__column_spec;

/* One column of one put: where its values lie. Fixed: items * row bytes at `values`. Ragged: u64
 * offsets[items + 1] at `offsets`, in slices of shape[1..]. */
typedef struct dray__extent {
    uint64_t chunk;
    uint64_t values, bytes; /* offset in the chunk; bytes of values */
    uint64_t offsets;       /* offset in the chunk; ragged only, else 0 */
} dray__extent;

/* From what a caller gave; refuses unknown dtypes, contents and impossible shapes. */
int dray__spec_of(const dray_column_data *column, dray__column_spec *out, dray_error *error);
int dray__spec_check(const dray__column_spec *spec, const char *name, dray_error *error);
/* DRAY_EDTYPE or DRAY_ESHAPE, naming both. */
int dray__spec_same(const dray__column_spec *column, const dray__column_spec *found,
                    const char *name, dray_error *error);
/* Elements and bytes of one row's value (ragged: of one slice of it). Checked specs only. */
uint64_t dray__spec_elements(const dray__column_spec *spec);
uint64_t dray__spec_bytes(const dray__column_spec *spec);
/* That the extent holds `items` items and lies within a chunk of `size` bytes. DRAY_EFORMAT. */
int dray__extent_check(const dray__extent *extent, const dray__column_spec *spec, uint64_t items,
                       uint64_t size, const char *name, dray_error *error);
/* Bytes of the extent's offsets and values. Checked extents only. */
uint64_t dray__extent_bytes(const dray__extent *extent, const dray__column_spec *spec,
                            uint64_t items);

extern const dray__fields dray__spec_fields, dray__extent_fields;

/* A name is 1..DRAY__WORD_MAX bytes of UTF-8. `what` is for the message. */
int dray__name_check(const char *name, const char *what, dray_error *error);

/* ---- what several messages and records have -------------------------------------------------- */

typedef struct dray__new_column {
    const char *name;
    dray__column_spec spec;
    dray__extent extent;
} dray__new_column;

typedef struct dray__new_tag {
    uint32_t item; /* DRAY__NONE, of inserts: every item */
    uint32_t key;  /* of the content's */
    double value;
} dray__new_tag;

/* What a put brings. */
typedef struct dray__content {
    const dray__new_column *columns;
    const char *const *keys; /* each once */
    const dray__new_tag *tags;
    uint32_t column_count, key_count, tag_count;
} dray__content;

/* How much asynchronous rollout may be under way. */
typedef struct dray__admission {
    uint32_t batch; /* rows of a step; 0: rollout is not bounded */
    uint32_t task;  /* NONE: rows are counted as they are inserted */
    uint32_t staleness, concurrency;
    uint64_t version, accepted;
} dray__admission;

typedef struct dray__settings { /* as opened; 0: the default, or when comparing, whatever it is */
    uint64_t capacity_rows, capacity_bytes;
    uint32_t max_attempts;
    int32_t on_loss;      /* dray_on_loss */
    uint64_t provisional; /* tasks */
    /* What the job will need: rows of a batch, batches open at once, batches from one checkpoint to
     * the next, bytes of a row. */
    uint32_t batch_rows, open_batches, checkpoint_batches;
    uint64_t row_bytes;
    int32_t durability;          /* dray_durability */
    int32_t backend;             /* dray_queue_backend */
    const char *backend_address; /* the table's own copy */
} dray__settings;

typedef struct dray__task_names {
    const char *name;
    const char *const *needs, *const *writes;
    uint32_t needs_count, writes_count;
} dray__task_names;

typedef struct dray__cursor { /* of provisional commits */
    uint32_t epoch;
    uint64_t seq, version;
} dray__cursor;

/* ---- requests and answers -------------------------------------------------------------------- */

typedef struct dray__opening {
    const char *name;
    const dray__task_names *tasks;
    uint32_t task_count;
    dray__settings settings;
    uint64_t identity;   /* of who opens, for as long as it has the queue open */
    const char *restore; /* a checkpoint; "": none */
    int64_t timeout_ns;
} dray__opening;

typedef struct dray__welcome { /* OPEN's answer; the table's tasks follow */
    uint32_t client;
    int32_t durability;
    uint64_t era; /* keeper.h */
    bool paged;   /* the page of releases is read */
    int32_t backend;
    const char *address;
    uint64_t space, capacity_bytes;
    const dray__task_names *tasks;
    uint32_t task_count;
} dray__welcome;

typedef struct dray__new_rows {
    const char *partition;
    uint32_t rows, group_size;
    bool per_group;
    uint64_t at_slot, row_bytes;
    uint64_t refill; /* id of the demand that the rows answer; 0: none */
    uint32_t ticket; /* of the client's request; 0: none */
    int64_t timeout_ns;
    uint64_t values, bytes; /* ROOM: of the rows' values; of new chunks for them */
    dray__content content;  /* INSERT */
} dray__new_rows;

typedef struct dray__sealing {
    const char *partition;
    uint32_t rows;
} dray__sealing;

typedef struct dray__awaited {
    const char *partition;
    uint32_t task;
    int64_t timeout_ns;
} dray__awaited;

typedef struct dray__refilling { /* REFILL's answer */
    uint64_t id;
    const char *partition, *reason;
    uint32_t rows, slot, group, task, attempts;
    int32_t cause;
} dray__refilling;

typedef struct dray__admitting {
    dray__admission admission;
    bool resume;
} dray__admitting;

typedef struct dray__want {
    uint32_t task, count;
    const char *partition; /* NULL: any */
    bool up_to;
    int32_t policy;
    int64_t hold_until; /* INT64_MAX: as long as the session */
    int32_t fresh;      /* dray_fresh */
    uint32_t staleness;
    uint64_t version;
    /* token_balanced and lockstep: who of which consumer group asks, for what share. */
    const char *group, *cost; /* cost: the tag that says how many tokens a row has */
    uint64_t group_epoch, round, token_cap;
    uint32_t dp_rank, dp_size, peer, peers, micro_rows;
} dray__want;

typedef struct dray__choice {
    dray__want want; /* hold_until is set at each try */
    int64_t hold_ns;
    bool ranked; /* want has a group, and what follows it */
} dray__choice;

typedef struct dray__claiming {
    uint32_t ticket, columns_known, keys_known;
    int64_t timeout_ns;
    dray__choice *choices;
    uint32_t count;
} dray__claiming;

typedef struct dray__outputs {
    dray__content content;
    const uint32_t *open; /* places in the claim of rows that the task will append to */
    uint32_t open_count;
} dray__outputs;

typedef struct dray__committing {
    uint32_t ticket, generation;
    dray__outputs outputs;
} dray__committing;

typedef struct dray__failing { /* FAIL, LOST */
    uint32_t ticket, count, chunk_count;
    const uint32_t *items;
    const char *reason;
    const uint64_t *chunks; /* LOST */
} dray__failing;

typedef struct dray__splitting {
    uint32_t ticket, part, count;
    const uint32_t *items;
} dray__splitting;

typedef struct dray__holding {
    uint32_t ticket;
    int64_t hold_ns; /* 0: as long as the session */
} dray__holding;

typedef struct dray__chunk_wish { /* `least` bytes are enough */
    uint64_t id, key, size, least;
    uint32_t home;
} dray__chunk_wish;

typedef struct dray__saving { /* CHECKPOINT */
    const char *name;
} dray__saving;

typedef struct dray__storing { /* CHUNK */
    uint32_t home;             /* of the new one (homes.h) */
    const dray__chunk_wish *wishes;
    const uint64_t *given_up;
    uint32_t wish_count, given_up_count;
} dray__storing;

typedef struct dray__stored { /* and its answer: a chunk given back to be written; a new one's size
                               */
    uint64_t given, size;
} dray__stored;

/* ---- rows with keys (table/keyed.h) ---------------------------------------------------------- */

typedef struct dray__row_at {
    uint32_t slot, generation, version; /* of a row that is named the version does not count */
} dray__row_at;

typedef struct dray__named { /* rows: either of these, or none */
    const char *const *keys; /* "": none, of rows in records */
    const dray__row_at *at;
    uint32_t key_count, at_count;
} dray__named;

typedef struct dray__note { /* a row's tag of bytes */
    bool given;
    const void *data;
    size_t size;
} dray__note;

typedef struct dray__putting { /* PUT; its answer says addresses, as many as rows */
    const char *partition;
    uint32_t rows, ticket;
    dray__named named;
    const dray__note *notes; /* [rows], or none */
    uint32_t note_count, column_count;
    const dray__new_column *columns;
} dray__putting;

typedef struct dray__getting { /* GET; TAKE, which consumes */
    const char *partition;
    uint32_t ticket;
    dray__named named;
    const char *const *columns;
    uint32_t column_count;
    bool all_columns, partial, up_to;
    const char *task; /* "": nobody */
    uint32_t count;   /* 0: all */
    int64_t timeout_ns;
} dray__getting;

typedef struct dray__got_row {
    dray__row_at at;
    const char *key; /* "": none */
    dray__note note;
} dray__got_row;

typedef struct dray__got_column { /* column: of the answer's */
    uint32_t column, home;
    dray__extent extent;
    dray__column_spec spec;
} dray__got_column;

typedef struct dray__got_put {
    uint32_t items, column_count;
    const dray__got_column *columns;
} dray__got_put;

typedef struct dray__got_cell {
    uint32_t put, item; /* put NONE: the row has no value */
} dray__got_cell;

typedef struct dray__got { /* their answer; the cells of the first column come first */
    const dray__got_row *rows;
    const dray__got_put *puts;
    const char *const *columns;
    const dray__got_cell *cells;
    uint32_t row_count, put_count, column_count, cell_count;
} dray__got;

typedef struct dray__dropping { /* DROP */
    const char *partition;
    dray__named named;
} dray__dropping;

typedef struct dray__resetting {  /* RESET */
    const char *partition, *task; /* task "": all */
} dray__resetting;

/* ---- keepers (storage/keeper.h) and homes (storage/homes.h) ------------------------------------
 */

typedef struct dray__chunk_key {
    uint64_t id, key;
} dray__chunk_key;

typedef struct dray__chunk_keys { /* KEEPER_DROP; HOME_WAIT's answer: not needed any more */
    const dray__chunk_key *items;
    uint32_t count;
} dray__chunk_keys;

typedef struct dray__keeping { /* KEEPER_PUT. KEEPER_GET: its id, answered by its bytes */
    uint64_t id, key, bytes, era;
} dray__keeping;

typedef struct dray__home_join { /* HOME_JOIN */
    const char *path;            /* of its socket, for clients of its host */
    const char *endpoint; /* of its data server, where "0.0.0.0" or "::" stands for the address at
                           * which the reader finds the coordinator */
    bool own;             /* it is home 0 */
} dray__home_join;

typedef struct dray__home_wait { /* HOME_WAIT; answered again until they were seen */
    uint32_t number;
    uint64_t seen; /* pairs so far */
    int64_t timeout_ns;
} dray__home_wait;

/* The answers to HOME_JOIN and HOME_FIND (u32 number; NONE: where this session's samples go). */
typedef struct dray__home_told {
    uint32_t number;             /* NONE: there is no keeper on its host */
    const char *path, *endpoint; /* HOME_FIND */
    const char *identity;        /* and key: what data servers of samples and readers share */
    const void *key;
    size_t key_size;
    uint64_t era; /* HOME_JOIN */
} dray__home_told;

typedef struct dray__known_column {
    uint32_t index;
    const char *name;
    dray__column_spec spec;
} dray__known_column;

typedef struct dray__news { /* columns and keys that the client does not know yet */
    const dray__known_column *columns;
    const char *const *keys;
    uint32_t column_count, key_count;
} dray__news;

extern const dray__fields dray__content_fields, dray__task_fields, dray__settings_fields,
    dray__admission_fields, dray__cover_fields, dray__cursor_fields, dray__opening_fields,
    dray__welcome_fields, dray__insert_fields, dray__room_fields, dray__sealing_fields,
    dray__awaited_fields, dray__refilling_fields, dray__admitting_fields, dray__claiming_fields,
    dray__committing_fields, dray__failing_fields, dray__losing_fields, dray__splitting_fields,
    dray__holding_fields, dray__storing_fields, dray__stored_fields, dray__known_column_fields,
    dray__putting_fields, dray__getting_fields, dray__row_at_fields, dray__got_fields,
    dray__got_row_fields, dray__named_fields, dray__note_fields, dray__dropping_fields,
    dray__resetting_fields, dray__news_fields, dray__tag_fields, dray__saving_fields,
    dray__chunk_keys_fields, dray__keeping_fields, dray__home_join_fields, dray__home_joined_fields,
    dray__home_wait_fields, dray__home_found_fields;

/* Takes the key that samples are read with. */
int dray__home_key(const dray__home_told *told, const char *what, dray__tls_key *out,
                   dray_error *error);
/* Reads an opening, and checks what no table does. */
int dray__opening_read(dray__reader *r, dray__arena *arena, dray__opening *out, dray_error *error);
/* A checkpoint's name: what can be one of a file that lies in a folder. DRAY_EINVALID. */
int dray__saved_name_check(const char *name, dray_error *error);

/* ---- releases -------------------------------------------------------------------------------- */

/* Releases that nobody waits for need no message: the client writes the ticket onto a page of
 * memory that it shares with the controller. The controller reads the pages of a queue's clients
 * before it looks at any request of the queue's, and a client's before that client ends: so
 * everybody sees what they would see if a message had come at once, but nobody is woken for it.
 * While nobody asks, it reads them now and then, so that memory goes.
 * While somebody waits for what releases free, the pages say so, and clients send messages.
 *
 * A page has one writer, and neither side trusts it further than its own releases. */

#define DRAY__RELEASES 64u /* tickets on a page; where it is full, a message has it read */

/* What is waited for: */
#define DRAY__WANT_BYTES 1u /* bytes that are pinned */
#define DRAY__WANT_ROWS 2u  /* rows that are claimed */

typedef struct dray__releases {
    uint32_t written; /* tickets so far, by the client */
    uint32_t tickets[DRAY__RELEASES];
    _Alignas(64) uint32_t read; /* of them by the controller, which alone writes from here on */
    uint32_t wanted;
} dray__releases;

/* The client's page, and its descriptor for the controller, which is the caller's to close. NULL:
 * the system gives none, and messages do as well. */
dray__releases *dray__releases_new(int *fd);
/* The controller's view of it; the descriptor stays the caller's. NULL: it is no such page. */
dray__releases *dray__releases_map(int fd);
void dray__releases_free(dray__releases *page); /* NULL is fine */

/* Writes a ticket. false: send a message instead, or (which does no harm) as well, as there is no
 * page (NULL), or no room, or what the release frees (`frees`: of the above) is waited for. */
bool dray__releases_write(dray__releases *page, uint32_t ticket, uint32_t frees);
/* What was written after the first *read tickets, which then are as many more. */
uint32_t dray__releases_read(dray__releases *page, uint32_t *read, uint32_t out[DRAY__RELEASES]);
/* Says what is waited for. What is written later is told by a message; read the page after it. */
void dray__releases_want(dray__releases *page, uint32_t wanted);
