/* The reader's end of a connection to a data server (peer.h). */
#include "net/peer.h"

#include "base/clock.h"
#include "base/error.h"
#include "base/log.h"
#include "net/carrier.h"

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
    uint8_t *in; /* header and head of the next answer */
    size_t in_have;
    dray__answer header;
    bool have_header;
    uint64_t data_have;
    int64_t moved_ns;
    uint64_t wire_bytes;
    uint32_t avoid; /* carriers that failed */
    bool ready;     /* bytes can be sent, */
    bool answered;  /* and some have been received */
};

int dray__peer_new(const char *endpoint, const dray__stream_keys *keys, dray__peer **out,
                   dray_error *error)
{
    dray__peer *peer = calloc(1, sizeof *peer);
    if (peer) {
        peer->keys = keys;
        peer->endpoint = strdup(endpoint);
        peer->in = malloc(DRAY__ANSWER_HEADER + DRAY__HEAD_MAX);
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
    peer->ready = peer->answered = false;
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
    return dray__stream_connect(peer->endpoint, peer->keys, peer->avoid, &peer->stream, error);
}

/* Resets the time of the last progress, after a time without requests. */
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
    return peer->stream ? dray__stream_socket(peer->stream) : -1;
}

bool dray__peer_is_blind(const dray__peer *peer)
{
    return peer->stream && dray__stream_blind(peer->stream);
}

bool dray__peer_encrypts(const dray__peer *peer)
{
    return peer->stream && dray__stream_encrypts(peer->stream);
}

bool dray__peer_settled(const dray__peer *peer)
{
    return peer->ready;
}

dray__stream *dray__peer_reads(const dray__peer *peer)
{
    return peer->ready && dray__stream_carrier(peer->stream)->get ? peer->stream : NULL;
}

short dray__peer_events(const dray__peer *peer)
{
    bool owes = peer->ready && dray__peer_owes(peer);
    return dray__stream_events(peer->stream, owes ? POLLIN | POLLOUT : POLLIN);
}

int64_t dray__peer_moved(const dray__peer *peer)
{
    return peer->moved_ns;
}

void dray__peer_count(dray__peer *peer, uint64_t bytes)
{
    peer->wire_bytes += bytes;
}

uint64_t dray__peer_wire_bytes(const dray__peer *peer)
{
    return peer->wire_bytes;
}

dray__writer *dray__peer_out(dray__peer *peer)
{
    return &peer->out;
}

/* Turns a result of the stream into an error code. */
static int moved(dray__peer *peer, ssize_t n, dray_error *error)
{
    if (n == -EAGAIN)
        return DRAY_EAGAIN;
    if (n < 0)
        dray__stream_avoid(peer->stream, peer->answered, &peer->avoid);
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

static int send_all(dray__peer *peer, dray_error *error)
{
    dray__writer *from = &peer->out;
    if (from->failed)
        return dray__nomem(error);
    while (peer->out_at < from->size) {
        ssize_t n = dray__stream_send(peer->stream, from->data + peer->out_at,
                                      from->size - peer->out_at, false);
        int rc = moved(peer, n, error);
        if (rc)
            return rc;
        peer->out_at += (size_t)n;
    }
    dray__writer_reset(from);
    peer->out_at = 0;
    return DRAY_OK;
}

/* ---- requests and answers -------------------------------------------------------------------- */

/* Goes on with connecting. After a carrier failed, the next connection uses another one, unless the
 * user named the carrier. */
static int get_ready(dray__peer *peer, dray_error *error)
{
    dray_error why = {0};
    int rc = dray__stream_ready(peer->stream, &why);
    if (rc == DRAY_OK)
        peer->moved_ns = dray__now();
    peer->ready = rc == DRAY_OK;
    if (rc == DRAY_OK || rc == DRAY_EAGAIN)
        return rc;
    dray__fail_prefix(&why, rc, "connection to %s: ", peer->endpoint);
    if (dray__stream_avoid(peer->stream, false, &peer->avoid)) {
        dray__log(DRAY_LOG_INFO, "%s; the next one goes over another carrier", why.message);
        why.code = DRAY_ECLOSED;
    }
    if (error)
        *error = why;
    return why.code;
}

int dray__peer_send(dray__peer *peer, dray_error *error)
{
    int rc = peer->ready ? DRAY_OK : get_ready(peer, error);
    if (rc == DRAY_OK)
        rc = send_all(peer, error);
    if (rc)
        return rc;
    int flushed = dray__stream_flush(peer->stream);
    return flushed ? moved(peer, flushed, error) : DRAY_OK;
}

int dray__peer_recv_head(dray__peer *peer, dray__arrival *out, dray_error *error)
{
    if (!peer->ready)
        return DRAY_EAGAIN;
    for (;;) {
        size_t need = DRAY__ANSWER_HEADER;
        if (peer->in_have >= need && !peer->have_header) {
            int rc = dray__answer_get(peer->in, &peer->header, error);
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
        peer->answered = true;
    }
    out->header = peer->header;
    out->head = peer->in + DRAY__ANSWER_HEADER;
    return DRAY_OK;
}

int dray__peer_recv_data(dray__peer *peer, uint8_t *data, dray_error *error)
{
    if (!data && peer->header.data_bytes)
        return dray__fail(error, DRAY_EPROTO, "%s: data that there is no place for",
                          peer->endpoint);
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
