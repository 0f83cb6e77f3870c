/* src/queue/server/: the queue's service in the coordinator. controller.c takes requests, steps.c
 * answers those that never wait, waiters.c keeps those that may, answers.c writes replies, and
 * collect.c reads the pages of releases. durable.c starts and saves journals, store.c knows the
 * stores of a coordinator, drops.c sends keepers the chunks to be dropped, and status.c makes the
 * status. */

/* The declarations that controller.c, waiters.c (requests that wait) and steps.c (requests that are
 * answered at once) share. */
#pragma once

#include "control/coordinator.h"
#include "queue/journal/ledger.h"
#include "queue/messages.h"
#include "queue/server/counts.h"
#include "queue/server/internal.h"
#include "queue/storage/cleaner.h"
#include "queue/storage/keepers.h"
#include "queue/storage/stores.h"

typedef struct dray__controller dray__controller;
typedef struct dray__waiter dray__waiter;
typedef struct dray__served dray__served;

typedef struct dray__line { /* a queue of waiters, in order of arrival */
    dray__waiter *first, **last;
} dray__line;

/* At most this many of a queue's clients have pages of releases, because all of their pages are
 * read at every request. */
#define DRAY__PAGES 64u

typedef struct dray__page {
    dray__client *client;
    dray__releases *releases;
    uint32_t read;
} dray__page;

/* The work of the service, besides the table's, for the bytes that clients put. */
typedef struct dray__served_bytes {
    /* The client asks for a chunk, or names objects that it put without knowing whether they are
     * committed. Those that are not committed are dropped. */
    int (*wish)(dray__served *queue, dray__client *client, const dray__storing *message,
                dray__stored *out, dray_error *error);
    /* The client died. */
    void (*died)(dray__served *queue, uint32_t client);
} dray__served_bytes;

extern const dray__served_bytes dray__served_chunks;

struct dray__served { /* a queue */
    dray__served *next;
    dray__controller *controller;
    dray__table *table;
    const dray__served_bytes *bytes;
    uint64_t space;         /* the space of the queue's objects, where a store holds them */
    dray__cleaner *cleaner; /* of them */
    dray__line claims, inserts, waits, refills, gets;
    dray__line held;    /* answers about changes that are not safe in the journal yet */
    struct event *safe; /* fires when the journal has progressed */
    bool bytes_gone;    /* a record's bytes were lost before they were in the journal */
    int64_t hold_due;   /* when the next claim will have been held too long */
    dray__waits waited; /* the waits of the answered requests so far */
    dray__page pages[DRAY__PAGES];
    uint32_t page_count, wanted; /* the number of pages, and the bits that are written on them */
};

struct dray__controller {
    struct event_base *base;
    struct event *timer;
    struct event *work;  /* the next step of work that is done in steps */
    struct event *sweep; /* the timer that reads the pages when no requests arrive */
    int64_t sweep_ns;    /* the time after which it fires, counted from the last time; 0 when it is
                          * off */
    dray__served *queues;
    dray__idmap clients; /* id -> dray__client, whose owner is the queue */
    uint32_t client_ids;
    dray__line opens; /* clients that attach to queues that do not exist yet */
    dray__drops drops;
    dray__keepers keepers;
    const dray__coordinator *coordinator;
    dray__quota *quotas; /* by token; the first token's name is "master" */
    dray__refusals refusals;
    dray__writer out;
    char **stores; /* "redis:unix:/path": the only stores that may hold queues' bytes */
    uint32_t store_count;
    uint64_t store_capacity;
    dray__stores *cleaned;  /* NULL when there is no folder */
    char *folder;           /* of journals and checkpoints; NULL when there is none */
    int folder_fd, lock_fd; /* -1: none */
    char *keeper_path;      /* NULL when there is no keeper */
};

/* Reads the head of every request but OPEN: it finds the client and closes chunks. */
int dray__read_head(dray__controller *self, dray__request *request, dray__client **client,
                    uint64_t *drops_seen, dray_error *error);
int dray__finish_reading(const dray__request *request, dray_error *error);
/* Sends the reply, at once or when the changes of the queue are safe in the journal. `record` is
 * the request's own record in the journal; 0 when it has none. */
void dray__answer(dray__served *queue, dray__request *request, dray__writer *out, uint64_t record);
/* Returns the record that was added when the last one before was `before`; 0 when none was. */
uint64_t dray__own_record(const dray__ledger *ledger, uint64_t before);
/* Answers a request of steps.c. The caller sends the error, if there is one. */
int dray__step(dray__controller *self, dray__request *request, dray_error *error);
/* Starts the work that is done in steps. */
void dray__work_soon(dray__controller *self);
/* Sets the timer to the moment when the next claim has been held too long. */
void dray__arm_timer(dray__controller *self);
/* Ends the client's waiting requests with DRAY_ECANCELED; ticket DRAY__NONE: all of them. */
void dray__cancel_waiting(dray__served *queue, const dray__client *client, uint32_t ticket);
/* Takes over the list of stores ("redis:ADDRESS", NULL at the end), and adds the store in
 * $DRAY_QUEUE_BACKEND. Fails with DRAY_EINVALID when one is not the address of a store. */
int dray__store_list(dray__controller *self, const char *const *stores, dray_error *error);
void dray__store_list_free(dray__controller *self);
/* Checks that a store named by a client, a journal or a checkpoint is in the list. When no
 * address was given, the list's only store is taken. Fails with DRAY_EPERM or DRAY_EINVALID. */
int dray__store_settle(const dray__controller *self, dray__settings *settings, const char *queue,
                       dray_error *error);
/* When the table's settings name a store, gives it a space of its own there. The space is noted in
 * the folder before anything is put into it. */
int dray__store_draw(const dray__controller *self, dray__table *table, dray_error *error);
/* Notes also the space that its journal names, which may come from another coordinator. */
int dray__store_former(const dray__controller *self, const dray__table *table, dray_error *error);
/* Gives a cleaner to the queue that has such a table. */
int dray__store_use(dray__served *queue, dray_error *error);
/* Drops the objects that killed coordinators left in stores. */
int dray__store_clean(dray__controller *self, dray_error *error);
void dray__end_client(dray__controller *self, dray__client *client, bool died, const char *reason);
dray__waiting dray__count_waiting(const dray__served *queue);

/* ---- collect.c ---- */

/* Takes the client's page, if the descriptor is a page and there is room. The caller keeps the
 * descriptor. */
bool dray__page_add(dray__served *queue, dray__client *client, int fd);
/* Reads the client's last releases from its page, if it has one, and forgets the page. */
void dray__page_remove(dray__served *queue, const dray__client *client);
void dray__pages_free(dray__served *queue);
/* Applies the releases that clients have written on their pages. Returns true when there were
 * some. */
bool dray__collect(dray__served *queue);
/* Writes on the pages which releases the queue waits for now. Returns true when that led to
 * releases. */
bool dray__collect_wanted(dray__served *queue);
/* A request was handled: pages are read soon, and then less often until the next request. */
void dray__sweep_soon(dray__controller *self);
int dray__sweep_init(dray__controller *self, dray_error *error);

/* ---- durable.c ---- */

/* Makes the queue's table as its durability requires: new, or from the checkpoint that is named. */
int dray__durable_new(dray__controller *self, const dray__opening *o, dray__request *request,
                      dray__table **out, dray_error *error);
/* Saves the queue in the file that the request names (messages.h). */
int dray__durable_save(dray__controller *self, dray__ledger *ledger, const char *name,
                       dray__request *request, dray_error *error);
/* Calls `serve` for every queue that has a journal in the folder. */
int dray__durable_recover(dray__controller *self,
                          int (*serve)(dray__controller *, dray__table *, dray_error *),
                          dray_error *error);
