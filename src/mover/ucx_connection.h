/* One end of a connection through UCX, as ucx.c (its bytes) and ucx_reads.c (its one-sided reads)
 * see it. */
#ifndef DRAY_MOVER_UCX_CONNECTION_H
#define DRAY_MOVER_UCX_CONNECTION_H

#include "mover/ucx_library.h"

enum { DRAY__UCX_SENDS = 4 /* messages that are under way */ };

struct dray__ucx_header {
    uint64_t nonce, sequence;
};

struct dray__ucx_sending {
    dray__ucx *ucx;
    uint8_t *data;
    size_t capacity;
    struct dray__ucx_header header;
    bool busy;
};

struct dray__ucx_arrived { /* bytes that came before they were asked for */
    struct dray__ucx_arrived *next;
    size_t size, at;
    uint8_t data[];
};

struct dray__ucx {
    const dray__ucx_library *library;
    pid_t pid;
    bool reads;                 /* one-sided reads were agreed on */
    struct dray__ucx_key *keys; /* of the other side, until it is closed */
    ucp_context_h context;
    ucp_worker_h worker;
    ucp_ep_h endpoint;
    ucp_address_t *address;
    size_t address_size;
    int fd;
    int failed; /* -errno */
    bool armed;
    uint64_t nonce, other_nonce, sent, received;
    struct dray__ucx_sending sends[DRAY__UCX_SENDS];
    struct dray__ucx_arrived *first, **last;
    size_t queued;
    uint8_t *want; /* where what comes belongs, while somebody takes it */
    size_t want_size, want_have;
};

/* Lets the worker work. true: it did; false: it is quiet, and its descriptor will show what
 * comes. */
bool dray__ucx_progress(dray__ucx *x);

#endif
