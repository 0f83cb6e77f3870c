/* A connection to a process of another host, as a stream of bytes in both directions. Its carrier
 * (carrier.h) is chosen when it begins: the first in the table that may be used. Nothing here
 * waits; on -EAGAIN wait for dray__stream_events and go on.
 *
 * On a broken connection a call fails within DRAY__LEASE_SECONDS of data that was not acknowledged.
 * The kernel of a stopped peer still acknowledges, so the caller must time the peer's silence. */
#pragma once

#include "base/network.h"
#include "base/tls.h"

#include <stdbool.h>
#include <stddef.h>
#include <sys/types.h>

typedef struct dray__stream dray__stream;
typedef struct dray__carrier dray__carrier;

enum { DRAY__STREAM_ADDRESS = 80 };

/* Borrowed by the streams made with it. */
typedef struct dray__stream_keys {
    const dray__tls_key *key; /* known to both sides; without a key (empty identity) only carriers
                                 without encryption are used */
    const dray__networks *trusted;
    bool always;           /* encrypt on trusted networks, too */
    const char *transport; /* only the carriers of this transport; NULL means all */
    uint64_t rate; /* the most bytes a second that accepted connections send; 0 for no limit */
} dray__stream_keys;

/* Listens at `address`, in the form of dray__address_parse_data, or "unix:/path". endpoint gets
 * "tcp:ADDRESS:PORT", or the path again. *out is a non-blocking, close-on-exec descriptor. */
int dray__stream_listen(const char *address, char endpoint[DRAY__STREAM_ADDRESS], int *out,
                        dray_error *error);
/* Removes the files that listening at a path has made. */
void dray__stream_unlisten(const char *endpoint);
/* Takes the next connection. Returns 0, or DRAY_EAGAIN when none waits. */
int dray__stream_accept(int listener, const dray__stream_keys *keys, dray__stream **out,
                        dray_error *error);
/* Begins to connect to an endpoint. avoid has bits of carriers that failed before
 * (dray__stream_avoid). Returns 0, DRAY_EINVALID, DRAY_EPERM when the network is not trusted and
 * there is no key, DRAY_EUNSUPPORTED, or DRAY_ESYS. */
int dray__stream_connect(const char *endpoint, const dray__stream_keys *keys, uint32_t avoid,
                         dray__stream **out, dray_error *error);
/* Returns DRAY_OK when it is connected and can send bytes, DRAY_EAGAIN while it is not, or an error
 * when it failed. */
int dray__stream_ready(dray__stream *stream, dray_error *error);
/* Returns true when the carrier failed and another one may work, and adds the failed one to *avoid.
 * With `worked`, bytes have come over this carrier before; then one that the user named is tried
 * again. */
bool dray__stream_avoid(const dray__stream *stream, bool worked, uint32_t *avoid);
void dray__stream_close(dray__stream *stream); /* NULL is fine */

const dray__carrier *dray__stream_carrier(const dray__stream *stream); /* NULL until it is known */
bool dray__stream_encrypts(const dray__stream *stream);
/* Returns true when its descriptor cannot be polled with others, and its socket shows only its end.
 * The caller must then look for bytes regularly. */
bool dray__stream_blind(const dray__stream *stream);
int dray__stream_fd(const dray__stream *stream); /* changes when the stream becomes ready */
int dray__stream_socket(const dray__stream *stream);
/* The events to poll the descriptor for, when the caller wants to receive (POLLIN) or to send
 * (POLLOUT). */
short dray__stream_events(const dray__stream *stream, short wanted);
/* Returns true when more bytes have arrived, although the descriptor may not be readable. */
bool dray__stream_pending(const dray__stream *stream);

/* Returns the number of bytes that were taken (at least 1), -EAGAIN when none can be now, -errno on
 * failure. `more` says that other bytes follow at once. */
ssize_t dray__stream_send(dray__stream *stream, const void *data, size_t size, bool more);
/* Returns the number of bytes received (at least 1), 0 when the other side closed, -EAGAIN while
 * there are none, -errno on failure. */
ssize_t dray__stream_recv(dray__stream *stream, void *data, size_t size);
/* Sends the bytes that the carrier has buffered. Returns 0 when all are sent, -EAGAIN while they
 * are not, -errno on failure. */
int dray__stream_flush(dray__stream *stream);
