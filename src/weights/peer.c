/* The reader's end of a connection to a data server (peer.h). */
#include "weights/peer.h"

#include "base/clock.h"
#include "base/error.h"

#include <errno.h>
#include <poll.h>
#include <stdlib.h>
#include <string.h>

struct dray__peer {
    char *endpoint;
    const dray__stream_keys *keys;
    dray__stream *stream;
    dray__writer out;
    size_t out_at;
    uint8_t *in; /* header and head of the answer that is coming */
    size_t in_have;
    dray__answer_header header;
    bool have_header;
    uint64_t data_have;
    int64_t moved_ns;
    uint64_t wire_bytes;
};

int dray__peer_new(const char *endpoint, const dray__stream_keys *keys, dray__peer **out,
                   dray_error *error)
{
    dray__peer *peer = calloc(1, sizeof *peer);
    if (peer) {
        peer->keys = keys;
        peer->endpoint = strdup(endpoint);
        peer->in = malloc(DRAY__PULL_ANSWER_HEADER + DRAY__PULL_HEAD_MAX);
    }
    if (!peer || !peer->endpoint || !peer->in) {
        dray__peer_free(peer);
        return dray__nomem(error);
    }
    *out = peer;
    return DRAY_OK;
}

void dray__peer_drop(dray__peer *peer)
{
    dray__stream_close(peer->stream);
    peer->stream = NULL;
    dray__writer_reset(&peer->out);
    peer->out_at = peer->in_have = 0;
    peer->have_header = false;
    peer->data_have = 0;
}

void dray__peer_free(dray__peer *peer)
{
    if (!peer)
        return;
    dray__peer_drop(peer);
    dray__writer_free(&peer->out);
    free(peer->endpoint);
    free(peer->in);
    free(peer);
}

int dray__peer_open(dray__peer *peer, dray_error *error)
{
    if (peer->stream)
        return DRAY_OK;
    peer->moved_ns = dray__now();
    return dray__stream_connect(peer->endpoint, peer->keys, &peer->stream, error);
}

/* It is asked again after a time in which nothing was expected of it. */
void dray__peer_touch(dray__peer *peer)
{
    peer->moved_ns = dray__now();
}

bool dray__peer_is_open(const dray__peer *peer)
{
    return peer->stream != NULL;
}

int dray__peer_fd(const dray__peer *peer)
{
    return peer->stream ? dray__stream_fd(peer->stream) : -1;
}

short dray__peer_events(const dray__peer *peer)
{
    short events = dray__stream_events(peer->stream);
    return peer->out_at < peer->out.size ? (short)(events | POLLOUT) : events;
}

int64_t dray__peer_moved(const dray__peer *peer)
{
    return peer->moved_ns;
}

uint64_t dray__peer_wire_bytes(const dray__peer *peer)
{
    return peer->wire_bytes;
}

dray__writer *dray__peer_out(dray__peer *peer)
{
    return &peer->out;
}

/* What a call of the stream means. */
static int moved(dray__peer *peer, ssize_t n, dray_error *error)
{
    if (n == -EAGAIN)
        return DRAY_EAGAIN;
    if (n == 0)
        return dray__fail(error, DRAY_ECLOSED, "%s closed the connection", peer->endpoint);
    if (n < 0)
        return dray__fail_errno(error, (int)-n, "connection to %s", peer->endpoint);
    peer->moved_ns = dray__now();
    peer->wire_bytes += (uint64_t)n;
    return DRAY_OK;
}

bool dray__peer_owes(const dray__peer *peer)
{
    return peer->out_at < peer->out.size;
}

int dray__peer_send(dray__peer *peer, dray_error *error)
{
    if (peer->out.failed)
        return dray__nomem(error);
    while (peer->out_at < peer->out.size) {
        ssize_t n = dray__stream_send(peer->stream, peer->out.data + peer->out_at,
                                      peer->out.size - peer->out_at, false);
        int rc = moved(peer, n, error);
        if (rc)
            return rc;
        peer->out_at += (size_t)n;
    }
    dray__writer_reset(&peer->out);
    peer->out_at = 0;
    int flushed = dray__stream_flush(peer->stream);
    return flushed ? moved(peer, flushed, error) : DRAY_OK;
}

int dray__peer_recv_head(dray__peer *peer, dray__arrival *out, dray_error *error)
{
    for (;;) {
        size_t need = DRAY__PULL_ANSWER_HEADER;
        if (peer->in_have >= need && !peer->have_header) {
            int rc = dray__pull_get_answer(peer->in, &peer->header, error);
            if (rc)
                return rc;
            peer->have_header = true;
        }
        if (peer->have_header)
            need += peer->header.head_bytes;
        if (peer->have_header && peer->in_have == need)
            break;
        ssize_t n = dray__stream_recv(peer->stream, peer->in + peer->in_have, need - peer->in_have);
        int rc = moved(peer, n, error);
        if (rc)
            return rc;
        peer->in_have += (size_t)n;
    }
    out->header = peer->header;
    out->head = peer->in + DRAY__PULL_ANSWER_HEADER;
    return DRAY_OK;
}

int dray__peer_recv_data(dray__peer *peer, uint8_t *data, dray_error *error)
{
    while (peer->data_have < peer->header.data_bytes) {
        ssize_t n = dray__stream_recv(peer->stream, data + peer->data_have,
                                      (size_t)(peer->header.data_bytes - peer->data_have));
        int rc = moved(peer, n, error);
        if (rc)
            return rc;
        peer->data_have += (uint64_t)n;
    }
    peer->in_have = 0;
    peer->have_header = false;
    peer->data_have = 0;
    return DRAY_OK;
}
