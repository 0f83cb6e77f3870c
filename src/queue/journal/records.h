/* Bodies of records, as tables of fields (base/wire.h). A record of a partition has the
 * partition's generation as its owner. END and START have no body; OPEN's is a QUEUE_OPEN message.
 * Records of requests that count once (dray__counts_once) end with the request that asked for them.
 * INSERT, COMMIT and PUT are followed by bytes: for each column its offsets, if it is
 * ragged, and its values. */
#pragma once

#include "queue/messages.h"

enum {
    DRAY__RECORD_OPEN = 1, /* a QUEUE_OPEN message */
    DRAY__RECORD_START,    /* a controller has taken the queue over */
    DRAY__RECORD_STATE,    /* state that does not follow from the records that compaction keeps */
    DRAY__RECORD_INSERT,
    DRAY__RECORD_SEAL,
    DRAY__RECORD_COMMIT,
    DRAY__RECORD_LOSS,
    DRAY__RECORD_DECLINE,
    DRAY__RECORD_CLEAR,
    DRAY__RECORD_END,
    DRAY__RECORD_COVER,
    DRAY__RECORD_RESUME,
    DRAY__RECORD_ADMIT,
    DRAY__RECORD_SPACE, /* which objects of a store are the queue's */
    DRAY__RECORD_PUT,   /* of rows with keys, as the next three; its owner is its own number */
    DRAY__RECORD_DROP,
    DRAY__RECORD_TAKE,
    DRAY__RECORD_RESET,
    DRAY__RECORD_DONE, /* a request was answered and changed nothing */
    DRAY__RECORD_KINDS
};

typedef struct dray__asker { /* the request that a record carries out */
    uint64_t identity;       /* of the client; 0 when no request asked for it */
    uint32_t ticket;
} dray__asker;

typedef struct dray__insert_record {
    uint64_t identity; /* of the client; its request is rows.ticket */
    uint32_t first;    /* slot */
    dray__new_rows rows;
} dray__insert_record;

typedef struct dray__record_row {
    uint32_t slot, generation; /* slot NONE when the claim does not have the row any more */
} dray__record_row;

typedef struct dray__commit_record {
    uint64_t identity, number; /* number: of provisional commits */
    uint32_t ticket, task, row_count;
    const dray__record_row *rows;
    dray__outputs outputs;
} dray__commit_record;

typedef struct dray__loss_record {
    uint32_t slot, generation, task, failures, cause;
    const char *reason;
    uint64_t demand; /* 0 when there is none */
} dray__loss_record;

typedef struct dray__cleared { /* a partition */
    const char *name;
    uint64_t finished; /* tasks */
} dray__cleared;

typedef struct dray__keyed_record { /* PUT */
    uint64_t identity;              /* of the client; its request is put.ticket */
    uint32_t generation;            /* the partition's */
    dray__putting put;              /* named: keys and addresses of all rows */
} dray__keyed_record;

typedef struct dray__used_record { /* DROP, TAKE, RESET */
    const char *task;              /* "" for no task (DROP, TAKE), or all tasks (RESET) */
    dray__named rows;              /* by address; without any, all rows */
} dray__used_record;

typedef struct dray__counted { /* a request that has counted, of a client that may repeat it */
    uint64_t key;              /* of the client and the ticket (ledger.c) */
    uint32_t ticket, first_slot, generation;
} dray__counted;

typedef struct dray__image_row {
    dray__got_row row;
    uint64_t consumed; /* consumers, one bit each */
} dray__image_row;

typedef struct dray__image { /* a keyed partition, without its puts */
    const char *name;
    uint32_t generation;
    const char *const *tasks;
    const dray__image_row *rows;
    uint32_t task_count, row_count;
} dray__image;

typedef struct dray__state_record {
    uint32_t generations, epoch;
    uint64_t commit_seq, resumed_seq;
    bool ended;
    dray__admission admission;
    dray__known_column *columns;
    dray__cleared *cleared; /* oldest first */
    uint32_t column_count, cleared_count;
    uint64_t space; /* of a store's objects */
    dray__image *kept;
    dray__counted *counted;
    uint32_t kept_count, counted_count;
} dray__state_record;

typedef union dray__record_body {
    dray__insert_record insert;
    dray__commit_record commit;
    dray__loss_record loss;
    dray__state_record state;
    dray__keyed_record keyed;
    dray__used_record used;
    dray__admission admission;
    dray__cursor cursor;
    uint64_t number; /* a demand, or a space */
    uint32_t rows;
} dray__record_body;

typedef struct dray__record_kind {
    const char *name;
    const dray__fields *fields; /* NULL when it has none */
    bool bytes;                 /* bytes follow the fields */
    bool asked;                 /* a dray__asker follows the fields */
} dray__record_kind;

extern const dray__fields dray__asker_fields;

extern const dray__record_kind
    dray__record_kinds[DRAY__RECORD_KINDS]; /* name is NULL for an unused kind */
