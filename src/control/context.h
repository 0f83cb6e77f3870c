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

/* Reads $DRAY_DATA_ENCRYPT. Returns 0, or DRAY_EINVALID for an unknown word, so that a misspelt
 * word does not turn encryption off. */
int dray__data_encrypt(bool *always, dray_error *error);
/* Reads $DRAY_DATA_RATE, the most bytes per second that a data server sends on each connection; 0
 * when it is not set. Returns 0, or DRAY_EINVALID. */
int dray__data_rate(uint64_t *rate, dray_error *error);

struct dray_context {
    /* Protects the fields up to the blank line; no thread waits while holding it. */
    pthread_mutex_t lock;
    pthread_cond_t quiet; /* signalled when `talking` becomes false */
    bool talking;         /* the thread that set it may change main; all others only read it under
                           * the lock */
    dray__channel *main;  /* the session ends with this connection */
    dray__channel *spare[DRAY__SPARE_CHANNELS];
    uint32_t spare_count;
    uint64_t member, epoch; /* these two are also atomic */
    uint8_t token[16];

    pid_t pid;
    char *address, *keeper, *name, *role;
    uint32_t rank;
    bool takes_back;  /* the next coordinator will know this one's members */
    uint64_t returns; /* the number of times that one did; atomic */
    uint64_t host;
    dray__tls_key data;     /* the key that members show each other; empty when there is none */
    dray__networks trusted; /* networks on which bytes need no encryption */
    dray__stream_keys keys; /* both of these, in the form that data connections take */
    int64_t timeout_ns;
    bool host_named; /* the options gave the host's identity, so it may differ from the machine's
                        own */
    /* The data server that a layer above attaches to the context, and that ends with it. */
    void *server;
    void (*server_free)(void *server);
};

/* When the coordinator is gone, waits for the next one and goes on with the session there.
 * *returned is true when the context is, or may be, with another coordinator than when the caller
 * failed. */
int dray__context_return_to(dray_context *context, int64_t deadline_ns, bool *returned,
                            dray_error *error);

/* Opens a channel of the present session. Returns 0, or DRAY_ECLOSED when the session is over. */
int dray__channel_attach(dray_context *context, int64_t deadline_ns, dray__channel **out,
                         dray_error *error);

/* Gets the network address of this end of the session's connection or, with `peer`, of the
 * coordinator's end. Returns false when the connection is not over a network. */
bool dray__context_find(dray_context *context, bool peer, struct sockaddr_storage *out);

/* Gets the address at which the context's process listens for other hosts: $DRAY_DATA_ADDRESS, or
 * its own address towards the coordinator. When there is none, *elsewhere is false and *out is the
 * loopback address. */
int dray__data_address(dray_context *context, char out[DRAY__STREAM_ADDRESS], bool *elsewhere,
                       dray_error *error);

/* Opens a new channel after one broke. It belongs to the same session when the coordinator takes
 * members back, otherwise to a new session with the coordinator that answers before the
 * deadline. */
int dray__context_come_back(dray_context *context, int64_t deadline_ns, dray__channel **out,
                            dray_error *error);

/* Takes a channel for one blocking request, so that threads of one context do not wait for each
 * other. dray__context_return gives it back, or closes it when it is broken. */
int dray__context_borrow(dray_context *context, int64_t deadline_ns, dray__channel **out,
                         dray_error *error);
void dray__context_return(dray_context *context, dray__channel *channel);

/* As dray_report_post and dray_lease_release, but without waiting for the coordinator's answer. */
int dray__report_tell(dray_context *context, const char *kind, const char *json, dray_error *error);
void dray__lease_let_go(dray_lease *lease); /* NULL is fine */
