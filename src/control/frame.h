/* Frames on a stream socket: building, sending, receiving and checking them, with descriptors.
 * Both ends use it. Nothing here blocks, and no length from the other side is believed before the
 * bytes are there. */
#pragma once

#include "base/tls.h"
#include "base/wire.h"
#include "control/protocol.h"

#include <dray/dray.h>
#include <sys/types.h>

enum { DRAY__FRAME_REPLY = 1, DRAY__FRAME_ERROR = 2 }; /* flags */

typedef struct dray__frame_header {
    uint32_t magic;
    uint16_t type, fd_count;
    uint64_t id;
    uint32_t size, flags;
    uint64_t sum; /* XXH3 of the header, with 0 here, and the payload */
} dray__frame_header;

extern const dray__fields dray__frame_header_fields;

typedef struct dray__frame {
    uint16_t type;
    uint16_t fd_count;
    uint32_t flags;
    uint64_t id;
    const uint8_t *payload; /* in the inbox: valid until the next fill */
    uint32_t size;
} dray__frame;

/* Appends header and payload to `out` (whose failure sticks). DRAY_EINVALID: too large. */
int dray__frame_put(dray__writer *out, const dray__frame *frame, dray_error *error);
/* The payload of an error reply, and back. *error is filled by both, whatever the payload is. */
void dray__frame_put_error(dray__writer *payload, const dray_error *error);
void dray__frame_get_error(dray__reader payload, dray_error *error);

/* Sends what the socket takes now; descriptors travel with the first byte. Returns the bytes sent
 * (at least 1) or -errno (-EAGAIN: nothing was sent). Never raises SIGPIPE. */
ssize_t dray__frame_send(int socket, const uint8_t *data, size_t size, const int *fds,
                         uint32_t fd_count);
/* The same over a connection that may be encrypted (tls not NULL): there nothing is begun before it
 * is taken, and descriptors are none. */
ssize_t dray__link_send(int socket, dray__tls *tls, const uint8_t *data, size_t size,
                        const int *fds, uint32_t fd_count);

/* What has arrived on one connection and was not taken yet. Zero-initialised. */
typedef struct dray__inbox {
    uint8_t *data;
    size_t begin, end, capacity;
    int fds[DRAY__FRAME_FDS];
    uint32_t fd_count;
    uint32_t most;  /* payload bytes of a frame; 0: DRAY__FRAME_MAX */
    dray__tls *tls; /* where the bytes come through; NULL: the socket itself. The caller's */
} dray__inbox;

void dray__inbox_free(dray__inbox *inbox); /* closes the descriptors that nobody took */
/* One recvmsg (or what TLS has). DRAY_OK: something arrived; DRAY_EAGAIN; DRAY_ECLOSED: the other
 * side closed, or the connection broke; DRAY_EPROTO: more descriptors than a frame may have;
 * DRAY_ENOMEM. */
int dray__inbox_fill(dray__inbox *inbox, int socket, dray_error *error);
/* Takes the next whole frame and its descriptors (close-on-exec; now the caller's to close).
 * DRAY_EAGAIN: not there yet. Anything else (DRAY_EPROTO, DRAY_ECHECKSUM): the stream is unusable;
 * frame->id is then the request's where it could be read, else 0. */
int dray__inbox_take(dray__inbox *inbox, dray__frame *frame, int fds[DRAY__FRAME_FDS],
                     dray_error *error);

void dray__close_fds(int *fds, uint32_t count); /* those that are not -1, which they become */
