/* Homes: the keepers of the hosts that samples lie on, as the controller knows them. Home 0 is the
 * coordinator's own keeper; another comes with the session of its process (join.h), gets a number
 * that is never used again, and is forgotten when that session ends: what lay there is lost.
 */
#pragma once

#include "base/tls.h"
#include "control/coordinator.h"
#include "net/stream.h"
#include "queue/messages.h"

#include <pthread.h>

enum { DRAY__HOMES_MAX = 4096 };

typedef struct dray__home {
    uint32_t number;
    uint64_t member, host;
    char *path, *endpoint;
    bool own;
    dray__chunk_key *pairs; /* of chunks to be dropped */
    uint32_t pair_count;
    uint64_t pair_capacity;
    uint64_t told; /* pairs that it has */
    dray__request *waiting;
} dray__home;

typedef struct dray__homes {
    pthread_mutex_t lock; /* of items and what they hold, for other threads than the controller's */
    dray__home **items;
    uint32_t count, numbers;
    uint64_t capacity;
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
