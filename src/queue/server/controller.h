/* The queue's service in the coordinator. It finds tables by name, and keeps requests that wait
 * until something changes. The tables themselves (table.h) use no sockets. */
#pragma once

#include "control/coordinator.h"

struct event_base;

/* Adds the queue's controller to a coordinator. base is the coordinator's loop (it gets a timer for
 * claims with max_hold). keeper_path is the keeper's socket (copied), where unused chunks are
 * dropped. It is NULL when there is no keeper; chunks then live as long as their keeper. folder is
 * where durable queues are kept. Those that are there are served again, and the keeper forgets its
 * chunks. It is NULL when queues cannot be durable. stores are strings "redis:ADDRESS", with NULL
 * at the end, or NULL when there are none. Queues may have their bytes in these stores and in the
 * one that $DRAY_QUEUE_BACKEND names. The coordinator never connects to any other address, even
 * when a client, a journal or a checkpoint names one. */
int dray__queue_add(dray__coordinator *coordinator, struct event_base *base,
                    const char *keeper_path, const char *folder, const char *const *stores,
                    dray_error *error);
