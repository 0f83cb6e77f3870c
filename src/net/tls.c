/* Bytes over TCP inside TLS 1.3 (base/tls.h), under the session's data key. */
#include "base/error.h"
#include "net/carrier.h"

#include <poll.h>
#include <string.h>
#include <unistd.h>

enum { BUFFER = 256 << 10, HANDSHAKE = 0x16 /* the first byte of a TLS connection */ };

static int may(const dray__stream_keys *keys, bool trusted, dray_error *error)
{
    if (trusted && !keys->always)
        return dray__fail(error, DRAY_EUNSUPPORTED, "bytes need no encryption there");
    return keys->key->identity[0] ? DRAY_OK
                                  : dray__fail(error, DRAY_EPERM,
                                               "peer: an address in a trusted network expected, as "
                                               "this session has no key to encrypt with");
}

static bool find_key(void *user, dray__tls_key *key)
{
    const dray__tls_key *own = user;
    if (!own->identity[0] || strcmp(own->identity, key->identity) != 0)
        return false;
    memcpy(key->bytes, own->bytes, sizeof key->bytes);
    return true;
}

static int begin(dray__stream *stream, dray_error *error)
{
    const dray__tls_key *key = stream->keys->key;
    dray__tls *tls = NULL;
    int rc = stream->server ? dray__tls_accept(stream->socket, find_key, (void *)key, &tls, error)
                            : dray__tls_connect(stream->socket, key, &tls, error);
    stream->state = tls;
    return rc ? rc : dray__tls_buffer(tls, BUFFER, error);
}

static ssize_t send_some(dray__stream *stream, const void *data, size_t size, bool more)
{
    (void)more;
    return dray__tls_send(stream->state, data, size);
}

static ssize_t recv_some(dray__stream *stream, void *data, size_t size)
{
    return dray__tls_recv(stream->state, data, size);
}

static int flush(dray__stream *stream)
{
    return dray__tls_flush(stream->state);
}

static short events(const dray__stream *stream, short wanted)
{
    return (short)(wanted | (dray__tls_events(stream->state) & POLLOUT));
}

static bool pending(const dray__stream *stream)
{
    return dray__tls_pending(stream->state);
}

static void end(dray__stream *stream)
{
    if (stream->pid != getpid()) { /* a forked child must not end its parent's connection */
        close(stream->socket);
        stream->socket = -1;
    }
    dray__tls_free(stream->state);
}

const dray__carrier dray__carrier_tls = {.name = "tls",
                                         .transport = "stream",
                                         .scheme = "tcp",
                                         .first = HANDSHAKE,
                                         .encrypts = true,
                                         .may = may,
                                         .connect = begin,
                                         .accept = begin,
                                         .send = send_some,
                                         .recv = recv_some,
                                         .flush = flush,
                                         .events = events,
                                         .pending = pending,
                                         .close = end};
