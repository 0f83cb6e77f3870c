/* src/queue/: the queue of samples. Its server half runs in the coordinator: the table of rows and
 * columns (table/), the requests to it (server/) and its journal (journal/). Its client half is in
 * the processes that produce and consume samples (client/). The bytes of samples are in chunks of
 * shared memory that keepers hold, or in Redis (storage/). This folder has the parts that both
 * halves share: columns and their places, messages (messages.h), and pages of releases. */

/* The messages between client and controller: a struct for each, and a table of its fields
 * (messages.c). docs/wire.md lists them.
 *
 * Every request but OPEN begins with a head:
 *     u32 client, u64 drops seen, u32 n, n * u64 chunks that the client closes
 * Answers to INSERT, ROOM, COMMIT, CHUNK, CLAIM, PUT, GET and TAKE begin with
 *     u64 drops so far, u8 forget all, u32 n, n * u64 chunks dropped since
 *
 * OPEN has the descriptor of a page of releases (below), or none, and the descriptor of the
 * checkpoint to restore, unless that is given by name. ROOM is sent before values are written; the
 * INSERT that follows it is served before other inserts. The answer to INSERT: u32 first slot, u32
 * generation; to RESUME: u32 epoch; to STATUS: str JSON. REFILL has i64 timeout, DECLINE u64 id,
 * VERSION u64, CLEAR str partition. END, CURSOR, STATUS and CLOSE have a head alone.
 *
 * The answer to CLAIM: u32 index of the choice that was met; u8 1 if the claim waited for the
 * queue's admission (when it was tried last, more rows were ready than may be begun); new names of
 * columns and keys; the batch (client.h). Pieces are listed, first to last, for rows that have
 * several. Marks of padding are there only with micro-batches. NEXT has the fields of COMMIT, then
 * those of CLAIM. Its answer is that of COMMIT, then either u32 0 and the answer to CLAIM, or an
 * error as in error replies (control/frame.h). A claim whose time is over is answered with an error
 * of DRAY_ORIGIN_WAIT. RELEASE has u32 ticket, of a claim or of a CLAIM that still waits; it has no
 * answer.
 *
 * FAIL without items and reason gives all rows back, without counting an attempt. LOST names rows
 * whose bytes their holder has lost; without chunks, it is not known which chunks. CHUNK has at
 * most one wish; with a store's objects it names all objects that were not committed, or may not
 * have been. CHECKPOINT has the name of a file in the coordinator's folder, or DRAY__PASSED: the
 * file is the message's last descriptor, of a regular file. No message has a path.
 *
 * SEAL, CLEAR, DECLINE, COVER, RESUME, ADMIT, VERSION, DROP and RESET end with u32 ticket: the
 * request's number of its client's. A client repeats a request that got no answer with the same
 * ticket, and it counts once (dray__counts_once).
 *
 * PUT, GET, TAKE, DROP and RESET are for rows with keys. The answer to PUT begins as INSERT's, then
 * u32 n and n addresses in the order of the request. The answers to GET and TAKE are those of
 * CLAIM. ROOM without rows asks for memory alone. */
#pragma once

#include "base/tls.h"
#include "base/wire.h"

#include <dray/queue.h>
#include <stdbool.h>
#include <stdint.h>

#define DRAY__NONE UINT32_MAX
#define DRAY__PASSED "/" /* no file has this name */

/* ---- columns and their places ---------------------------------------------------------------- */

/* The description of a column, and the place of a put of it. */

#define DRAY__WORD_MAX 255u /* bytes of a queue's, partition's, task's, column's or tag's name */
#define DRAY__TASKS_MAX 64u /* of a queue: one bit each in a u64 */
#define DRAY__COLUMNS_MAX 4096u  /* of a queue */
#define DRAY__TAG_KEYS_MAX 1024u /* of a queue */
#define DRAY__ROWS_MAX (1u << 26)
#define DRAY__REASON_MAX 200u                /* bytes kept of the reason why a row failed */
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

/* The place of the values of one column of one put. Fixed: items * row bytes at `values`. Ragged:
 * u64 offsets[items + 1] at `offsets`, in slices of shape[1..]. */
typedef struct dray__extent {
    uint64_t chunk;
    uint64_t values, bytes; /* offset in the chunk; bytes of values */
    uint64_t offsets;       /* offset in the chunk; ragged only, else 0 */
} dray__extent;

/* Makes the description of a caller's column. Refuses unknown dtypes and contents, and impossible
 * shapes. */
int dray__spec_of(const dray_column_data *column, dray__column_spec *out, dray_error *error);
int dray__spec_check(const dray__column_spec *spec, const char *name, dray_error *error);
/* Returns 0 when both are the same, else DRAY_EDTYPE or DRAY_ESHAPE with both in the message. */
int dray__spec_same(const dray__column_spec *column, const dray__column_spec *found,
                    const char *name, dray_error *error);
/* Elements and bytes of one row's value (ragged: of one slice of it). Checked specs only. */
uint64_t dray__spec_elements(const dray__column_spec *spec);
uint64_t dray__spec_bytes(const dray__column_spec *spec);
/* Returns 0 when the extent holds `items` items and is within a chunk of `size` bytes, else
 * DRAY_EFORMAT. */
int dray__extent_check(const dray__extent *extent, const dray__column_spec *spec, uint64_t items,
                       uint64_t size, const char *name, dray_error *error);
/* Bytes of the extent's offsets and values. Checked extents only. */
uint64_t dray__extent_bytes(const dray__extent *extent, const dray__column_spec *spec,
                            uint64_t items);

extern const dray__fields dray__spec_fields, dray__extent_fields;

/* Checks that a name is 1..DRAY__WORD_MAX bytes of UTF-8. `what` is the object's kind, for the
 * message. */
int dray__name_check(const char *name, const char *what, dray_error *error);

/* ---- parts of several messages and records --------------------------------------------------- */

typedef struct dray__new_column {
    const char *name;
    dray__column_spec spec;
    dray__extent extent;
} dray__new_column;

typedef struct dray__new_tag {
    uint32_t item; /* in inserts, DRAY__NONE means every item */
    uint32_t key;  /* index into the content's keys */
    double value;
} dray__new_tag;

/* The columns and tags of a put. */
typedef struct dray__content {
    const dray__new_column *columns;
    const char *const *keys; /* each once */
    const dray__new_tag *tags;
    uint32_t column_count, key_count, tag_count;
} dray__content;

/* How much asynchronous rollout may be under way. */
typedef struct dray__admission {
    uint32_t batch; /* rows of a step; 0 when rollout is not bounded */
    uint32_t task;  /* NONE when rows are counted as they are inserted */
    uint32_t staleness, concurrency;
    uint64_t version, accepted;
} dray__admission;

typedef struct dray__settings { /* as opened; 0 is the default, or in a comparison any value */
    uint64_t capacity_rows, capacity_bytes;
    uint32_t max_attempts;
    int32_t on_loss;      /* dray_on_loss */
    uint64_t provisional; /* tasks */
    /* The job's needs: rows of a batch, batches open at once, batches from one checkpoint to the
     * next, bytes of a row. */
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
    uint64_t identity;   /* of the client, for as long as it has the queue open */
    const char *restore; /* a checkpoint; "" when there is none */
    int64_t timeout_ns;
} dray__opening;

typedef struct dray__welcome { /* OPEN's answer; the table's tasks follow */
    uint32_t client;
    int32_t durability;
    uint64_t era; /* keeper.h */
    bool paged;   /* the controller reads the page of releases */
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
    uint64_t refill; /* id of the demand that the rows answer; 0 when there is none */
    uint32_t ticket; /* of the client's request; 0 when it has none */
    int64_t timeout_ns;
    uint64_t values, bytes; /* ROOM: bytes of the rows' values, and of new chunks for them */
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
    const char *partition; /* NULL means any */
    bool up_to;
    int32_t policy;
    int64_t hold_until; /* INT64_MAX: until the session ends */
    int32_t fresh;      /* dray_fresh */
    uint32_t staleness;
    uint64_t version;
    /* token_balanced and lockstep: the consumer group, the rank that claims, and its share. */
    const char *group, *cost; /* cost is the tag with the number of tokens of a row */
    uint64_t group_epoch, round, token_cap;
    uint32_t dp_rank, dp_size, peer, peers, micro_rows;
} dray__want;

typedef struct dray__choice {
    dray__want want; /* hold_until is set at each try */
    int64_t hold_ns;
    bool ranked; /* want has a group, and the fields after it */
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
    int64_t hold_ns; /* 0: until the session ends */
} dray__holding;

typedef struct dray__chunk_wish { /* `least` bytes are enough */
    uint64_t id, key, size, least;
    uint32_t keeper;
} dray__chunk_wish;

typedef struct dray__saving { /* CHECKPOINT */
    const char *name;
} dray__saving;

typedef struct dray__storing { /* CHUNK */
    uint32_t keeper;           /* of the new one (keepers.h) */
    const dray__chunk_wish *wishes;
    const uint64_t *given_up;
    uint32_t wish_count, given_up_count;
} dray__storing;

typedef struct dray__stored { /* its answer: a chunk given back for writing, or a new one's size */
    uint64_t given, size;
} dray__stored;

/* ---- rows with keys (table/keyed.h) ---------------------------------------------------------- */

typedef struct dray__row_at {
    uint32_t slot, generation, version; /* the version is ignored where a row is named */
} dray__row_at;

typedef struct dray__named { /* rows, by key or by address, or none */
    const char *const *keys; /* "": the row has none; in records only */
    const dray__row_at *at;
    uint32_t key_count, at_count;
} dray__named;

typedef struct dray__note { /* a row's tag of bytes */
    bool given;
    const void *data;
    size_t size;
} dray__note;

typedef struct dray__putting { /* PUT; its answer has an address for each row */
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
    const char *task; /* "": for no task */
    uint32_t count;   /* 0 means all */
    int64_t timeout_ns;
} dray__getting;

typedef struct dray__got_row {
    dray__row_at at;
    const char *key; /* "" when it has none */
    dray__note note;
} dray__got_row;

typedef struct dray__got_column { /* column: index into the answer's columns */
    uint32_t column, keeper;
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
    bool roomy; /* the queue has room for batches that are kept long */
} dray__got;

typedef struct dray__dropping { /* DROP */
    const char *partition;
    dray__named named;
} dray__dropping;

typedef struct dray__resetting {  /* RESET */
    const char *partition, *task; /* task "": all */
} dray__resetting;

/* ---- keepers (storage/keeper.h, storage/keepers.h) ------------------------------------------ */

typedef struct dray__chunk_key {
    uint64_t id, key;
} dray__chunk_key;

typedef struct dray__chunk_keys { /* KEEPER_DROP; KEEPER_WAIT's answer: chunks to drop */
    const dray__chunk_key *items;
    uint32_t count;
} dray__chunk_keys;

typedef struct dray__keeping { /* KEEPER_PUT. KEEPER_GET has the id, and its answer the bytes */
    uint64_t id, key, bytes, era;
} dray__keeping;

typedef struct dray__keeper_join { /* KEEPER_JOIN */
    const char *path;              /* of its socket, for clients of its host */
    const char *endpoint; /* of its data server, where "0.0.0.0" or "::" stands for the address at
                           * which the reader finds the coordinator */
    bool own;             /* it is keeper 0 */
} dray__keeper_join;

typedef struct dray__keeper_wait { /* KEEPER_WAIT; pairs are sent again until they are seen */
    uint32_t number;
    uint64_t seen; /* pairs so far */
    int64_t timeout_ns;
} dray__keeper_wait;

/* The answers to KEEPER_JOIN and KEEPER_FIND (u32 number; NONE asks for the keeper of this
 * session's host). */
typedef struct dray__keeper_told {
    uint32_t number;             /* NONE when its host has no keeper */
    const char *path, *endpoint; /* KEEPER_FIND */
    const char *identity;        /* with key: shared by data servers of samples and their readers */
    const void *key;
    size_t key_size;
    uint64_t era; /* KEEPER_JOIN */
} dray__keeper_told;

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
    dray__chunk_keys_fields, dray__keeping_fields, dray__keeper_join_fields,
    dray__keeper_joined_fields, dray__keeper_wait_fields, dray__keeper_found_fields;

/* Copies the key that readers of samples use. `what` is the object's kind, for the message. */
int dray__keeper_key(const dray__keeper_told *told, const char *what, dray__tls_key *out,
                     dray_error *error);
/* Returns true for changes that name their object instead of a claim or new rows. Such a request
 * ends with a ticket, by which it counts once when it is repeated. */
bool dray__counts_once(uint16_t type);
/* Reads an opening, and checks the values that its table of fields does not check. */
int dray__opening_read(dray__reader *r, dray__arena *arena, dray__opening *out, dray_error *error);
/* Checks a checkpoint's name, which must be that of a file in a folder. Fails with DRAY_EINVALID.
 */
int dray__saved_name_check(const char *name, dray_error *error);

/* ---- releases -------------------------------------------------------------------------------- */

/* A release that no other client waits for needs no message: the client writes the ticket onto a
 * page of memory that it shares with the controller. The controller reads the pages of a queue's
 * clients before it handles any request of the queue, and a client's page before that client ends.
 * So the result is the same as if a message had been sent, but the controller is not woken for it.
 * Without requests, the controller reads the pages at intervals, so that memory is freed.
 * While a request waits for rows or memory that a release would free, the pages say so, and clients
 * send messages.
 *
 * The client is the only writer of its page, and the controller trusts nothing on it except the
 * client's own releases. */

#define DRAY__RELEASES 64u /* tickets on a page; when it is full, a message is sent */

/* The things that requests may wait for: */
#define DRAY__WANT_BYTES 1u /* bytes that are pinned */
#define DRAY__WANT_ROWS 2u  /* rows that are claimed */

typedef struct dray__releases {
    uint32_t written; /* tickets so far, by the client */
    uint32_t tickets[DRAY__RELEASES];
    _Alignas(64) uint32_t read; /* tickets read; only the controller writes this and `wanted` */
    uint32_t wanted;
} dray__releases;

/* Returns the client's page, and its descriptor for the controller, which the caller closes.
 * Returns NULL when the system gives none; messages do the same work then. */
dray__releases *dray__releases_new(int *fd);
/* Returns the controller's view of the page, or NULL when the descriptor is not of such a page. The
 * descriptor stays the caller's. */
dray__releases *dray__releases_map(int fd);
void dray__releases_free(dray__releases *page); /* NULL is fine */

/* Writes a ticket. Returns false when the caller must send a message, because there is no page
 * (NULL), no room on it, or a request waits for something that the release frees (`frees`: bits
 * of DRAY__WANT). The ticket may be on the page, too, which does no harm. */
bool dray__releases_write(dray__releases *page, uint32_t ticket, uint32_t frees);
/* Returns the tickets that were written after the first *read ones, and adds their number to *read.
 */
uint32_t dray__releases_read(dray__releases *page, uint32_t *read, uint32_t out[DRAY__RELEASES]);
/* Writes the DRAY__WANT bits of waiting requests on the page. Later releases are sent as messages;
 * the caller reads the page once more after this call. */
void dray__releases_want(dray__releases *page, uint32_t wanted);
