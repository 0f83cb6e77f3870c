/* Requests that wait: they are kept in lines, tried again when something changed, and answered
 * once. */
#pragma once

#include "queue/server/service.h"

/* A decoded request. All of its memory is in its arena or in the request's payload. */
struct dray__waiter {
    dray__waiter *next, **link;
    dray__line *line; /* the line in which it waits; NULL when it is in none */
    dray__request *request;
    dray__arena arena;
    dray__served *queue;
    dray__client *client;
    uint64_t drops_seen;
    int64_t timeout_ns, since_ns;
    dray__new_rows rows;        /* INSERT, ROOM */
    dray__insertion *insertion; /* INSERT: the insertion that is under way, which is done in steps;
                                 * NULL before the first */
    bool placed;                /* only dray__insert_end is left to do */
    const char *name;           /* OPEN: the queue's name */
    uint64_t identity;          /* OPEN */
    dray__awaited awaited;      /* WAIT */
    dray__committing commit;    /* NEXT */
    dray__claiming claim;       /* CLAIM, NEXT */
    dray__getting get;          /* GET, TAKE */
    uint64_t change;            /* GET, TAKE: the partition's change number at the last try */
    bool committed;             /* NEXT: its commit is done */
    bool bounded;               /* CLAIM, NEXT: at the last try the admission refused rows */
    uint64_t record;            /* the number of its record in the journal, or 0 */
    bool gone;                  /* its bytes were lost before they were in the journal */
    uint64_t number;            /* held: the record that must be safe before the answer is sent */
    dray__writer answer;
    dray_error why; /* the reason why it waits, from the last try */
};

/* Makes a waiter, which is in no line yet, and reads the request's head. */
int dray__waiter_new(dray__controller *self, dray__request *request, dray__waiter **out,
                     dray_error *error);
void dray__waiter_free(dray__waiter *w);
/* Answers the request with the error, and frees the waiter. */
void dray__waiter_fail(dray__waiter *w, const dray_error *error);

/* Carries out a request. Returns 0, DRAY_EAGAIN while it cannot be done, or another error. */
typedef int (*dray__try_fn)(dray__waiter *w, dray__writer *out, dray_error *error);
int dray__try_insert(dray__waiter *w, dray__writer *out, dray_error *error);
int dray__try_claim(dray__waiter *w, dray__writer *out, dray_error *error);
int dray__try_wait(dray__waiter *w, dray__writer *out, dray_error *error);
int dray__try_get(dray__waiter *w, dray__writer *out, dray_error *error);
int dray__try_refill(dray__waiter *w, dray__writer *out, dray_error *error);

/* Does a step of the insert that is under way. Returns false when there is none. */
bool dray__work_on(dray__served *q);
/* Answers the waiter if that is possible now. Returns false when it must wait on. */
bool dray__waiter_settle(dray__waiter *w, dray__try_fn attempt);
/* Keeps the waiter in the line up to its timeout. Without a timeout, answers it now. */
int dray__waiter_keep(dray__waiter *w, dray__line *at);
void dray__waiter_timed_out(dray__waiter *w, dray_error *error);

/* Wakes the requests of all queues that can go on. */
void dray__pump_all(dray__controller *self);
/* Answers, in order, the requests whose records are safe in the journal. Requests whose records
 * cannot be written get the error. */
void dray__release_held(dray__served *q);
/* Called when the bytes of a record were lost before they were in the journal. Its request is then
 * answered with an error. user: a dray__served. */
void dray__bytes_gone(void *user, uint64_t record);
/* A client has one blocking request at a time. A new request means that the client gave up the
 * last one, and will not read its answer. The chunks that a forgotten insert names may be written
 * again. */
void dray__cancel_forgotten(dray__served *q, const dray__client *client);
/* Returns false for claims and requests that only read: a restart voids them, so that the journal
 * does not need them. */
bool dray__needs_journal(uint16_t type);
const char *dray__message_of(const dray__request *request);
