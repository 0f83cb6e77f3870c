/* The reader's end of a connection to a data server (peer.h). */
#include "weights/peer.h"

#include "base/clock.h"
#include "base/error.h"
#include "base/log.h"
#include "weights/offer.h"

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
    bool offering; /* to go on over UCX: nothing else is sent until that is answered */
    bool begun;    /* a greeting was made */
    bool offered;  /* all of it, or of the offer, is out */
    bool answered; /* something came, since UCX was agreed on over it */
    bool without_reads;
    bool plain; /* UCX failed, and nobody asked for it by name: not again */
    dray__ucx *ucx;
    dray__offer offer;
    dray__writer offer_out;
    size_t offer_at;
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
    dray__ucx_close(peer->ucx);
    peer->ucx = NULL;
    peer->stream = NULL;
    peer->offering = peer->begun = peer->offered = peer->answered = false;
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
    dray__writer_free(&peer->offer_out);
    free(peer->endpoint);
    free(peer->in);
    free(peer);
}

int dray__peer_open(dray__peer *peer, dray_error *error)
{
    if (peer->stream)
        return DRAY_OK;
    peer->moved_ns = dray__now();
    int rc = dray__stream_connect(peer->endpoint, peer->keys, &peer->stream, error);
    if (rc == DRAY_OK && !peer->plain)
        rc = dray__offer_wanted(peer->keys, peer->stream, &peer->offering, error);
    if (rc && peer->stream) {
        dray__peer_drop(peer);
        dray__fail_prefix(error, rc, "%s: ", peer->endpoint);
    }
    return rc;
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
    return peer->stream ? dray__stream_socket(peer->stream) : -1;
}

bool dray__peer_is_blind(const dray__peer *peer)
{
    return peer->stream && dray__stream_uses_ucx(peer->stream);
}

bool dray__peer_encrypts(const dray__peer *peer)
{
    return peer->stream && dray__stream_encrypts(peer->stream);
}

bool dray__peer_settled(const dray__peer *peer)
{
    return peer->stream && !peer->offering;
}

dray__ucx *dray__peer_reads(const dray__peer *peer)
{
    return dray__peer_settled(peer) && peer->offer.reads ? dray__stream_ucx(peer->stream) : NULL;
}

short dray__peer_events(const dray__peer *peer)
{
    short events = dray__stream_events(peer->stream);
    if (dray__stream_uses_ucx(peer->stream))
        return POLLIN;
    if (peer->offering)
        return peer->offered ? events : (short)(events | POLLOUT);
    return peer->out_at < peer->out.size ? (short)(events | POLLOUT) : events;
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

/* What a call of the stream means. */
static int moved(dray__peer *peer, ssize_t n, dray_error *error)
{
    if (n == -EAGAIN)
        return DRAY_EAGAIN;
    bool blind = dray__peer_is_blind(peer);
    if (n < 0 && blind && peer->offer.reads && !peer->answered)
        peer->without_reads = true; /* it may be that RDMA alone does not lead there */
    else if (n < 0 && blind)
        peer->plain = peer->keys->transport != DRAY__TRANSPORT_UCX;
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

static int send_all(dray__peer *peer, dray__writer *from, size_t *at, dray_error *error)
{
    if (from->failed)
        return dray__nomem(error);
    while (*at < from->size) {
        ssize_t n = dray__stream_send(peer->stream, from->data + *at, from->size - *at, false);
        int rc = moved(peer, n, error);
        if (rc)
            return rc;
        *at += (size_t)n;
    }
    dray__writer_reset(from);
    *at = 0;
    return DRAY_OK;
}

static int read_head(dray__peer *peer, dray__arrival *out, dray_error *error)
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
        peer->answered = true;
    }
    out->header = peer->header;
    out->head = peer->in + DRAY__PULL_ANSWER_HEADER;
    return DRAY_OK;
}

/* ---- UCX ------------------------------------------------------------------------------------- */

static int begin_offer(dray__peer *peer, dray_error *error)
{
    int ready = dray__stream_ready(peer->stream);
    if (ready)
        return moved(peer, ready, error);
    peer->offer_at = 0;
    peer->begun = true;
    return dray__offer_greet(&peer->offer, dray__ucx_wants_reads() && !peer->without_reads,
                             &peer->offer_out, error);
}

/* The data server greeted back: UCX is opened for what it said, and offered. */
static int make_offer(dray__peer *peer, const dray__arrival *answer, dray_error *error)
{
    int rc = dray__offer_greeted(&peer->offer, answer->head, answer->header.head_bytes, error);
    if (rc)
        return rc;
    rc = dray__ucx_open(dray__stream_socket(peer->stream), peer->offer.reads, &peer->ucx, error);
    if (rc && peer->offer.reads) { /* once more without, over another connection */
        peer->without_reads = true;
        return dray__fail_prefix(error, DRAY_ECLOSED, "%s: ", peer->endpoint);
    }
    if (rc && peer->keys->transport != DRAY__TRANSPORT_UCX) {
        peer->plain = true;
        peer->offering = false;
        return DRAY_OK;
    }
    peer->offered = false;
    return rc ? rc : dray__offer_put(&peer->offer, peer->keys, peer->ucx, &peer->offer_out, error);
}

/* Where nobody asked for UCX by name, the socket does as well. */
static int refused(dray__peer *peer, const dray__arrival *answer, dray_error *error)
{
    dray__reader in = dray__reader_of(answer->head, answer->header.head_bytes);
    char *message = dray__get_prose(&in, DRAY__PULL_HEAD_MAX);
    int rc = DRAY_OK;
    if (peer->keys->transport == DRAY__TRANSPORT_UCX)
        rc = dray__fail(error, answer->header.status, "%s: %s", peer->endpoint,
                        message ? message : "it refused UCX");
    else
        dray__log(DRAY_LOG_INFO, "no UCX to %s: %s", peer->endpoint, message ? message : "?");
    free(message);
    dray__ucx_close(peer->ucx);
    peer->ucx = NULL;
    return rc;
}

/* What the data server says to the greeting, or the offer. */
static int next_step(dray__peer *peer, dray__arrival *answer, dray_error *error)
{
    int rc = DRAY_OK;
    if (!peer->offered)
        rc = send_all(peer, &peer->offer_out, &peer->offer_at, error);
    if (rc)
        return rc;
    peer->offered = true;
    rc = read_head(peer, answer, error);
    if (rc)
        return rc;
    peer->in_have = 0;
    peer->have_header = false;
    return answer->header.data_bytes
               ? dray__fail(error, DRAY_EPROTO, "%s: data in answer to an offer", peer->endpoint)
               : DRAY_OK;
}

static int go_over(dray__peer *peer, const dray__arrival *answer, dray_error *error)
{
    int rc = dray__offer_taken(&peer->offer, peer->keys, answer->head, answer->header.head_bytes,
                               peer->ucx, error);
    if (rc && peer->keys->transport != DRAY__TRANSPORT_UCX) { /* the other side went on already */
        peer->plain = true;
        return dray__fail_prefix(error, DRAY_ECLOSED, "%s: ", peer->endpoint);
    }
    if (rc)
        return rc;
    dray__ucx *ucx = peer->ucx;
    peer->ucx = NULL;
    peer->answered = false;
    return dray__stream_use_ucx(peer->stream, ucx, error);
}

/* Comes to an agreement with the data server on what goes on. */
static int agree(dray__peer *peer, dray_error *error)
{
    dray__arrival answer;
    int rc = peer->begun ? DRAY_OK : begin_offer(peer, error);
    while (rc == DRAY_OK && peer->offering) {
        rc = next_step(peer, &answer, error);
        if (rc)
            return rc;
        bool greeted = peer->offer.greeted;
        peer->offering = !greeted && !answer.header.status;
        if (answer.header.status)
            return refused(peer, &answer, error);
        if (greeted)
            return go_over(peer, &answer, error);
        rc = make_offer(peer, &answer, error);
    }
    return rc;
}

/* ---- requests and answers -------------------------------------------------------------------- */

int dray__peer_send(dray__peer *peer, dray_error *error)
{
    int rc = peer->offering ? agree(peer, error) : DRAY_OK;
    if (rc == DRAY_OK)
        rc = send_all(peer, &peer->out, &peer->out_at, error);
    if (rc)
        return rc;
    int flushed = dray__stream_flush(peer->stream);
    return flushed ? moved(peer, flushed, error) : DRAY_OK;
}

int dray__peer_recv_head(dray__peer *peer, dray__arrival *out, dray_error *error)
{
    return peer->offering ? DRAY_EAGAIN : read_head(peer, out, error);
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
