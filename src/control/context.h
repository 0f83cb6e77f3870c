/* The client's session, as channel.c and context.c share it. */
#pragma once

#include "base/network.h"
#include "base/tls.h"
#include "control/channel.h"
#include "net/address.h"
#include "net/stream.h"

#include <dray/lease.h>
#include <pthread.h>
#include <sys/socket.h>

enum { DRAY__SPARE_CHANNELS = 4 };

/* Reads $DRAY_DATA_ENCRYPT. Returns 0, or DRAY_EINVALID for an unknown word, because bytes in the
 * clear must not be taken for encrypted ones. */
int dray__data_encrypt(bool *always, dray_error *error);
/* Reads $DRAY_DATA_RATE, the bytes a second that a data server sends on each connection at most; 0
 * where it is not set. DRAY_EINVALID. */
int dray__data_rate(uint64_t *rate, dray_error *error);

struct dray_context {
    pthread_mutex_t lock; /* of the fields up to the blank line; no thread waits while holding it */
    pthread_cond_t quiet; /* nobody talks over main any more */
    bool talking;         /* the thread that set it may change main; all others only read it under
                           * the lock */
    dray__channel *main;  /* its connection is the session's life */
    dray__channel *spare[DRAY__SPARE_CHANNELS];
    uint32_t spare_count;
    uint64_t member, epoch; /* these two are atomic, too */
    uint8_t token[16];

    pid_t pid;
    char *address, *keeper, *name, *role;
    uint32_t rank;
    bool takes_back;  /* the next coordinator knows its members again */
    uint64_t returns; /* how often one did; atomic */
    uint64_t host;
    dray__tls_key data;     /* of other members; empty: none */
    dray__networks trusted; /* where bytes need no encryption */
    dray__stream_keys keys; /* both, as the data plane wants them */
    int64_t timeout_ns;
    bool host_named; /* by the options: not this machine's own identity */
    /* The data server that a layer above attaches to the context, and that ends with it. */
    void *server;
    void (*server_free)(void *server);
};

/* Has the coordinator gone? Then waits for the next one, and goes on with the session there.
 * *returned: the context is with another coordinator than it was when the caller failed, or may be.
 */
int dray__context_return_to(dray_context *context, int64_t deadline_ns, bool *returned,
                            dray_error *error);

/* Opens a channel of the session as it is. Returns 0, or DRAY_ECLOSED when the session is over. */
int dray__channel_attach(dray_context *context, int64_t deadline_ns, dray__channel **out,
                         dray_error *error);

/* Where the session's own connection is in a network, or, `peer`, where the coordinator is. false:
 * in no network. */
bool dray__context_find(dray_context *context, bool peer, struct sockaddr_storage *out);

/* Where the context's process listens for other hosts: $DRAY_DATA_ADDRESS, or its own address
 * towards the coordinator. Not *elsewhere: nowhere, and *out is this host's loopback. */
int dray__data_address(dray_context *context, char out[DRAY__STREAM_ADDRESS], bool *elsewhere,
                       dray_error *error);

/* A new channel of the context's, after one broke: of its session, which goes on where the
 * coordinator takes members back, or else of a new session with the one that is there by the
 * deadline. */
int dray__context_come_back(dray_context *context, int64_t deadline_ns, dray__channel **out,
                            dray_error *error);

/* A channel of the context's for one blocking request, so that threads of one context do not wait
 * for each other; given back after it, or closed where it broke. */
int dray__context_borrow(dray_context *context, int64_t deadline_ns, dray__channel **out,
                         dray_error *error);
void dray__context_return(dray_context *context, dray__channel *channel);

/* As dray_report_post and dray_lease_release, but without waiting for the coordinator's answer. */
int dray__report_tell(dray_context *context, const char *kind, const char *json, dray_error *error);
void dray__lease_let_go(dray_lease *lease); /* NULL is fine */
