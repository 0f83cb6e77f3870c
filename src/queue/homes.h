/* Homes: the keepers of the hosts that samples lie on, as the controller knows them. Home 0 is the
 * coordinator's own keeper; another comes with the session of its process (join.h), gets a number
 * that is never used again, and is forgotten when that session ends: what lay there is lost.
 *
 *  HOME_JOIN  str path, str endpoint, u8 own -> u32 number, str identity, blob key,
 *             u64 era (keeper.h)
 *             path: of its socket, for clients of its host; endpoint: of its data server, where
 *             "0.0.0.0" or "::" stands for the address at which the reader finds the coordinator;
 *             own: it is home 0. The key is what data servers of samples and their readers share.
 *  HOME_WAIT  u32 number, u64 pairs seen so far, i64 timeout -> u32 n, n * {u64 chunk, u64 key}:
 * not needed any more; told again until they were seen HOME_FIND  u32 number (NONE: where this
 * session's samples go) -> u32 number (NONE: there is no keeper on its host), str path, str
 * endpoint, str identity, blob key DRAY_EGONE: it is dead */
#ifndef DRAY_QUEUE_HOMES_H
#define DRAY_QUEUE_HOMES_H

#include "base/tls.h"
#include "control/coordinator.h"
#include "mover/stream.h"

#include <pthread.h>

enum { DRAY__HOMES_MAX = 4096 };

typedef struct dray__home {
    uint32_t number;
    uint64_t member, host;
    char *path, *endpoint;
    bool own;
    dray__writer pairs; /* chunks to be dropped */
    uint32_t pair_count;
    uint64_t told; /* pairs that it has */
    dray__request *waiting;
} dray__home;

typedef struct dray__homes {
    pthread_mutex_t lock; /* of items and what they hold, for other threads than the controller's */
    dray__home **items;
    uint32_t count, capacity, numbers;
    dray__tls_key key;
    dray__networks trusted;
    uint64_t era;           /* of this controller (keeper.h) */
    dray__stream_keys keys; /* with both, for reading from this process */
} dray__homes;

/* DRAY_EINVALID: $DRAY_TRUSTED_NETWORKS or $DRAY_DATA_ENCRYPT is wrong. Free it in any case. */
int dray__homes_init(dray__homes *homes, const dray__coordinator *coordinator, dray_error *error);
void dray__homes_free(dray__homes *homes);
/* Answers, keeps or refuses one of the three requests above. */
int dray__homes_request(dray__homes *homes, dray__request *request, dray_error *error);
/* A kept HOME_WAIT ends. */
void dray__homes_expired(dray__homes *homes, dray__request *request);
/* The session's homes are dead. Calls `lost` for each. */
void dray__homes_ended(dray__homes *homes, uint64_t member, void (*lost)(void *user, uint32_t home),
                       void *user);
/* The home's keeper is told with the next flush. 0 is not one of these, if it is not `own`. */
void dray__homes_drop(dray__homes *homes, uint32_t home, uint64_t chunk, uint64_t key);
void dray__homes_flush(dray__homes *homes);
bool dray__homes_alive(const dray__homes *homes, uint32_t home);
/* From any thread: where its data server is. DRAY_EGONE; DRAY_EUNSUPPORTED: it has none. */
int dray__homes_endpoint(dray__homes *homes, uint32_t home, char *out, size_t size,
                         dray_error *error);

#endif
