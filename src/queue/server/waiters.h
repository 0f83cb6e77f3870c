/* Requests that wait: kept in lines, tried again when something changed, answered once. */
#pragma once

#include "queue/server/service.h"

/* A decoded request. All of it lies in its arena or in the request's payload. */
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
    bool placed;                /* all is done but its end */
    const char *name;           /* OPEN: the queue's name */
    uint64_t identity;          /* OPEN */
    dray__awaited awaited;      /* WAIT */
    dray__committing commit;    /* NEXT */
    dray__claiming claim;       /* CLAIM, NEXT */
    dray__getting get;          /* GET, TAKE */
    uint64_t change;            /* GET, TAKE: its partition's, at the last try */
    bool committed;             /* NEXT: its commit is done */
    bool bounded;               /* CLAIM, NEXT: at the last try the admission refused rows */
    uint64_t record;            /* its own in the journal; 0 when it has none */
    bool gone;                  /* its bytes were gone before they were kept */
    uint64_t number;            /* held: the journal's number that must be safe before, */
    dray__writer answer;
    dray_error why; /* it could not be answered at the last try */
};

/* Reads the request's head. The waiter waits nowhere yet. */
int dray__waiter_new(dray__controller *self, dray__request *request, dray__waiter **out,
                     dray_error *error);
void dray__waiter_free(dray__waiter *w);
/* Answers the request with the error; the waiter is gone then. */
void dray__waiter_fail(dray__waiter *w, const dray_error *error);

/* Carries out a request. Returns 0, DRAY_EAGAIN while it cannot be done, or another error. */
typedef int (*dray__try_fn)(dray__waiter *w, dray__writer *out, dray_error *error);
int dray__try_insert(dray__waiter *w, dray__writer *out, dray_error *error);
int dray__try_claim(dray__waiter *w, dray__writer *out, dray_error *error);
int dray__try_wait(dray__waiter *w, dray__writer *out, dray_error *error);
int dray__try_get(dray__waiter *w, dray__writer *out, dray_error *error);
int dray__try_refill(dray__waiter *w, dray__writer *out, dray_error *error);

/* A step of the insert that is worked off. false: there is none. */
bool dray__work_on(dray__served *q);
/* Answers the waiter if it can be now. false: it must wait on. */
bool dray__waiter_settle(dray__waiter *w, dray__try_fn attempt);
/* Keeps it in the line up to its timeout; answers it now where it has none. */
int dray__waiter_keep(dray__waiter *w, dray__line *at);
void dray__waiter_timed_out(dray__waiter *w, dray_error *error);

/* Wakes the requests of all queues that can go on. */
void dray__pump_all(dray__controller *self);
/* Answers, in order, the requests whose records are safe in the journal. Requests whose records
 * cannot be written get the error. */
void dray__release_held(dray__served *q);
/* The bytes of the record (of user, a dray__served) were gone before they were in the journal: its
 * request must not be acknowledged, but answered with that. */
void dray__bytes_gone(void *user, uint64_t record);
/* A client has one blocking request at a time. A new request means that the client gave up the
 * last one, and will not read its answer. The chunks that a forgotten insert names may be written
 * again. */
void dray__cancel_forgotten(dray__served *q, const dray__client *client);
/* Claims and requests that only read change nothing that must be safe: a restart voids them. */
bool dray__needs_journal(uint16_t type);
const char *dray__message_of(const dray__request *request);
