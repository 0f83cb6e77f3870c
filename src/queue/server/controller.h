/* The queue's service of the coordinator: tables by name, requests that wait, woken when something
 * changed. The tables themselves (table.h) know no socket. */
#pragma once

#include "control/coordinator.h"

struct event_base;

/* Adds the queue's controller to a coordinator. base: the coordinator's loop (it gets a timer for
 * claims with max_hold). keeper_path: the keeper's socket, copied, where chunks that nobody needs
 * any more are dropped; NULL: there is none, chunks live as long as their keeper would have.
 * folder: where durable queues are kept; those that are there are served again, and the keeper
 * forgets what it holds. NULL: queues cannot be durable. stores: "redis:ADDRESS" each, NULL at the
 * end, where queues may have their bytes besides what $DRAY_QUEUE_BACKEND names; NULL: none. No
 * other address is ever connected to, whatever a client, a journal or a checkpoint says. */
int dray__queue_add(dray__coordinator *coordinator, struct event_base *base,
                    const char *keeper_path, const char *folder, const char *const *stores,
                    dray_error *error);
