/* What controller.c (waiters) and steps.c (requests that are answered at once) share. */
#ifndef DRAY_QUEUE_SERVICE_H
#define DRAY_QUEUE_SERVICE_H

#include "control/coordinator.h"
#include "queue/internal.h"

typedef struct dray__controller dray__controller;
typedef struct dray__waiter dray__waiter;

typedef struct dray__line { /* waiters in order of arrival */
    dray__waiter *first, **last;
} dray__line;

typedef struct dray__served { /* a queue */
    struct dray__served *next;
    dray__controller *controller;
    dray__table *table;
    dray__line claims, inserts, waits, refills;
    int64_t hold_due; /* when the next claim is held too long */
} dray__served;

struct dray__controller {
    struct event_base *base;
    struct event *timer;
    dray__served *queues;
    dray__idmap clients; /* id -> dray__client, whose owner is the queue */
    uint32_t client_ids;
    dray__line opens; /* attaching to queues that are not there yet */
    dray__drops drops;
    dray__writer out;
};

/* Reads the head of every request but OPEN: finds the client, closes chunks. */
int dray__read_head(dray__controller *self, dray__request *request, dray__client **client,
                    uint64_t *drops_seen, dray_error *error);
int dray__finish_reading(const dray__request *request, dray_error *error);
/* Answers a request of steps.c. An error is the caller's to send. */
int dray__step(dray__controller *self, dray__request *request, dray_error *error);
/* Sets the timer to the next claim that is held too long. */
void dray__arm_timer(dray__controller *self);
/* What the client waits for ends with DRAY_ECANCELED; ticket DRAY__NONE: all of it. */
void dray__cancel_waiting(dray__served *queue, const dray__client *client, uint32_t ticket);
void dray__end_client(dray__controller *self, dray__client *client, bool died, const char *reason);
dray__waiting dray__count_waiting(const dray__served *queue);

#endif
