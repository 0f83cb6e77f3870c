/* The keepers of all hosts that hold samples, as the controller knows them. Keeper 0 is the
 * coordinator's own. Another keeper is added with the session of its process (join.h), gets a
 * number that is never used again, and is forgotten when that session ends: its samples are
 * lost. */
#pragma once

#include "base/tls.h"
#include "control/coordinator.h"
#include "net/stream.h"
#include "queue/messages.h"

#include <pthread.h>

enum { DRAY__KEEPERS_MAX = 4096 };

typedef struct dray__known_keeper {
    uint32_t number;
    uint64_t member, host;
    char *path, *endpoint;
    bool own;
    dray__chunk_key *pairs; /* of chunks to be dropped */
    uint32_t pair_count;
    uint64_t pair_capacity;
    uint64_t told; /* pairs that the keeper has seen */
    dray__request *waiting;
} dray__known_keeper;

typedef struct dray__keepers {
    pthread_mutex_t lock; /* of the items and their fields, for threads other than the
                           * controller's */
    dray__known_keeper **items;
    uint32_t count, numbers;
    uint64_t capacity;
    dray__tls_key key;
    dray__networks trusted;
    uint64_t era;           /* of this controller (keeper.h) */
    dray__stream_keys keys; /* of `key` and `trusted`, for reading from this process */
} dray__keepers;

/* Returns 0, or DRAY_EINVALID when $DRAY_TRUSTED_NETWORKS or $DRAY_DATA_ENCRYPT is wrong. The
 * caller frees the struct in both cases. */
int dray__keepers_init(dray__keepers *keepers, const dray__coordinator *coordinator,
                       dray_error *error);
void dray__keepers_free(dray__keepers *keepers);
/* Answers, keeps or refuses a KEEPER_JOIN, KEEPER_WAIT or KEEPER_FIND request. */
int dray__keepers_request(dray__keepers *keepers, dray__request *request, dray_error *error);
/* Answers a kept KEEPER_WAIT whose time is over. */
void dray__keepers_expired(dray__keepers *keepers, dray__request *request);
/* Forgets the keepers of the member's session, which ended, and calls `lost` for each but 0. */
void dray__keepers_ended(dray__keepers *keepers, uint64_t member,
                         void (*lost)(void *user, uint32_t keeper), void *user);
/* Makes the keeper drop the chunk; the next flush sends it. Does nothing for an unknown keeper,
 * such as 0 while the coordinator's own keeper has not joined. */
void dray__keepers_drop(dray__keepers *keepers, uint32_t keeper, uint64_t chunk, uint64_t key);
void dray__keepers_flush(dray__keepers *keepers);
bool dray__keepers_alive(const dray__keepers *keepers, uint32_t keeper);
/* Writes the address of the keeper's data server to `out`, from any thread. Returns 0, DRAY_EGONE
 * when the keeper is dead, or DRAY_EUNSUPPORTED when it has no data server. */
int dray__keepers_endpoint(dray__keepers *keepers, uint32_t keeper, char *out, size_t size,
                           dray_error *error);
