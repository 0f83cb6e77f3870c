/* A join makes a keeper readable for other hosts. It has a session with the coordinator and a data
 * server (net/cells.h). The controller sends it the chunks to drop (keepers.h). When the session
 * ends, so does the join. All of this runs in a thread beside the keeper's loop. */
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
    bool later;          /* the coordinator is not started yet: the thread waits for it */
} dray__join_options;

/* Joins before it returns, or with `later` in the thread. Strings are copied. The keeper must
 * outlive the join. Returns DRAY_EEXIST when another keeper has joined from this host. */
int dray__join_start(dray__keeper *keeper, const dray__join_options *options, dray__join **out,
                     dray_error *error);
const char *dray__join_endpoint(const dray__join *join); /* NULL until it listens */
/* Makes it stop looking for a new coordinator when its own is gone. */
void dray__join_leave(dray__join *join);
void dray__join_free(dray__join *join); /* NULL is fine */
