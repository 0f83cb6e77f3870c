/* Frames on a stream socket: building, sending, receiving and checking them, with descriptors. Both
 * ends use it. Nothing here blocks, and a length from the other side is not trusted before the
 * bytes have arrived. */
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
    const uint8_t *payload; /* points into the inbox; valid until the next fill */
    uint32_t size;
} dray__frame;

/* Appends header and payload to `out`, which records its own failures. Returns 0, or DRAY_EINVALID
 * when the message is too large. */
int dray__frame_put(dray__writer *out, const dray__frame *frame, dray_error *error);
/* Writes and reads the payload of an error reply. Any payload fills *error, even a malformed
 * one. */
void dray__frame_put_error(dray__writer *payload, const dray_error *error);
void dray__frame_get_error(dray__reader payload, dray_error *error);

/* Sends as much as the socket takes now; descriptors travel with the first byte. Returns the bytes
 * sent (at least 1), -EAGAIN when the socket took none, or another -errno. Never raises SIGPIPE. */
ssize_t dray__frame_send(int socket, const uint8_t *data, size_t size, const int *fds,
                         uint32_t fd_count);
/* The same over a connection that may be encrypted (tls not NULL). An encrypted connection cannot
 * pass descriptors. */
ssize_t dray__link_send(int socket, dray__tls *tls, const uint8_t *data, size_t size,
                        const int *fds, uint32_t fd_count);

/* The bytes that have arrived on one connection and were not taken yet. Zero-initialised. */
typedef struct dray__inbox {
    uint8_t *data;
    size_t begin, end, capacity;
    int fds[DRAY__FRAME_FDS];
    uint32_t fd_count;
    uint32_t most;  /* the most payload bytes of a frame; 0 means DRAY__FRAME_MAX */
    dray__tls *tls; /* the TLS connection of the bytes, the caller's; NULL for the socket itself */
} dray__inbox;

void dray__inbox_free(dray__inbox *inbox); /* closes the descriptors that were not taken */
/* Does one recvmsg, or one read from TLS. Returns DRAY_OK when something arrived, DRAY_EAGAIN when
 * nothing did, DRAY_ECLOSED when the other side closed or the connection broke, DRAY_EPROTO when
 * there are more descriptors than a frame may have, or DRAY_ENOMEM. */
int dray__inbox_fill(dray__inbox *inbox, int socket, dray_error *error);
/* Takes the next whole frame and its descriptors (close-on-exec; the caller closes them). Returns
 * 0, DRAY_EAGAIN while the frame is incomplete, or DRAY_EPROTO or DRAY_ECHECKSUM when the stream is
 * unusable. In the last case frame->id is the request's if it could be read, else 0. */
int dray__inbox_take(dray__inbox *inbox, dray__frame *frame, int fds[DRAY__FRAME_FDS],
                     dray_error *error);

void dray__close_fds(int *fds, uint32_t count); /* skips those that are -1; sets all to -1 */
