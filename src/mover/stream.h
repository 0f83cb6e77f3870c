/* A stream of bytes to another host: TCP, inside TLS 1.3 (base/tls.h) unless the other side's
 * address is of a trusted network, or of this machine's loopback; there UCX may take it over, once
 * both sides agreed over the socket. Nothing here waits: on -EAGAIN
 * wait for dray__stream_events and go on.
 *
 * A broken link shows as a failed call within STREAM_TIMEOUT of data that nobody acknowledged; a
 * peer that is stopped acknowledges, so that its silence is for the caller to time. */
#ifndef DRAY_MOVER_STREAM_H
#define DRAY_MOVER_STREAM_H

#include "base/network.h"
#include "base/tls.h"
#include "mover/ucx.h"

#include <stdbool.h>
#include <stddef.h>
#include <sys/socket.h>
#include <sys/types.h>

typedef struct dray__stream dray__stream;

enum { DRAY__STREAM_ADDRESS = 80 };

/* What carries the bytes where the network is trusted: $DRAY_TRANSPORT, or dray_options'. */
enum { DRAY__TRANSPORT_AUTO, DRAY__TRANSPORT_STREAM, DRAY__TRANSPORT_UCX };

/* Borrowed by the streams made with it. */
typedef struct dray__stream_keys {
    const dray__tls_key *key; /* that both sides know; an empty identity: none, plain ones only */
    const dray__networks *trusted;
    bool always; /* encrypt on trusted networks, too */
    int transport;
} dray__stream_keys;

/* Listens at `address`, "10.0.0.1", "10.0.0.1:7000" or "[::1]:7000" (port 0 or none: any).
 * endpoint: gets "tcp:ADDRESS:PORT". *out: a non-blocking, close-on-exec descriptor. */
int dray__stream_listen(const char *address, char endpoint[DRAY__STREAM_ADDRESS], int *out,
                        dray_error *error);
/* The next connection; DRAY_EAGAIN: none waits. */
int dray__stream_accept(int listener, const dray__stream_keys *keys, dray__stream **out,
                        dray_error *error);
/* Begins to connect to an endpoint. DRAY_EINVALID; DRAY_EPERM: not a trusted network, and no key;
 * DRAY_ESYS. */
int dray__stream_connect(const char *endpoint, const dray__stream_keys *keys, dray__stream **out,
                         dray_error *error);
bool dray__stream_encrypts(const dray__stream *stream);
/* 0: it is connected, and says who may read it; -EAGAIN; -errno. */
int dray__stream_ready(dray__stream *stream);
/* May UCX carry its bytes? Not where they are to be encrypted. */
bool dray__stream_may_ucx(const dray__stream *stream);
/* From now on UCX does; the socket stays, for its end to be noticed. The descriptor changes. Takes
 * `ucx` over, whatever becomes of it. */
int dray__stream_use_ucx(dray__stream *stream, dray__ucx *ucx, dray_error *error);
bool dray__stream_uses_ucx(const dray__stream *stream);
dray__ucx *dray__stream_ucx(const dray__stream *stream); /* NULL: it does not */
void dray__stream_close(dray__stream *stream);           /* NULL is fine */

/* The host part of a socket's address: "10.0.0.1", "fd00::1". false: not a network's. */
bool dray__stream_print(const struct sockaddr_storage *address, char out[DRAY__STREAM_ADDRESS]);

int dray__stream_fd(const dray__stream *stream);
/* Its socket, which under UCX shows the end alone, for those who look at UCX by the clock: UCX's
 * descriptors hold further ones, and few may be put into each other. */
int dray__stream_socket(const dray__stream *stream);
short dray__stream_events(const dray__stream *stream); /* POLLIN, and POLLOUT where it must write */
/* More bytes are here already, although the descriptor may not be readable. */
bool dray__stream_pending(const dray__stream *stream);

/* How many bytes were taken (at least 1), or -errno; -EAGAIN. more: others follow at once. */
ssize_t dray__stream_send(dray__stream *stream, const void *data, size_t size, bool more);
/* How many came (at least 1); 0: the other side closed; -errno; -EAGAIN. */
ssize_t dray__stream_recv(dray__stream *stream, void *data, size_t size);
/* Bytes that TLS took and the socket did not: 0 when all are out, -EAGAIN, -errno. */
int dray__stream_flush(dray__stream *stream);

#endif
