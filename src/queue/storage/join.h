/* A keeper that other hosts can read. It has a session with the coordinator, and ends with it. It
 * has a data server (net/cells.h), and hears from the controller which chunks to drop (keepers.h).
 * All of this runs in a thread beside the keeper's loop. */
#pragma once

#include "queue/storage/keeper.h"

typedef struct dray__join dray__join;

typedef struct dray__join_options {
    const char *address; /* the coordinator's; NULL means $DRAY_ADDRESS */
    const char *path;    /* the keeper's socket, absolute */
    const char *listen;  /* of the data server, "10.0.0.1"; NULL means the same as for publishers of
                          * weights */
    const char *host;    /* dray_options.host */
    bool own;            /* it is the coordinator's own */
    bool later;          /* the coordinator is not there yet: the thread waits for it */
} dray__join_options;

/* Strings are copied. Without `later` it has joined when this returns, or not: DRAY_EEXIST: another
 * keeper has joined from this host. keeper: must outlive the join. */
int dray__join_start(dray__keeper *keeper, const dray__join_options *options, dray__join **out,
                     dray_error *error);
const char *dray__join_endpoint(const dray__join *join); /* NULL until it listens */
/* From now on it does not look for a coordinator that is gone. */
void dray__join_leave(dray__join *join);
void dray__join_free(dray__join *join); /* NULL is fine */
