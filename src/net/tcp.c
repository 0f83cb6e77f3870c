/* Bytes over TCP without encryption, on trusted networks and on this host. */
#include "net/carrier.h"

#include "base/error.h"

#include <errno.h>

static int may(const dray__stream_keys *keys, bool trusted, dray_error *error)
{
    return trusted && !keys->always
               ? DRAY_OK
               : dray__fail(error, DRAY_EPERM, "bytes do not go there in the clear");
}

int dray__plain_begin(dray__stream *stream, dray_error *error)
{
    return stream->carrier->may(stream->keys, stream->trusted, error);
}

ssize_t dray__plain_send(dray__stream *stream, const void *data, size_t size, bool more)
{
    int flags = MSG_NOSIGNAL | MSG_DONTWAIT | (more ? MSG_MORE : 0);
    ssize_t n = send(stream->socket, data, size, flags);
    return n < 0 ? -(errno == EINTR ? EAGAIN : errno) : n;
}

ssize_t dray__plain_recv(dray__stream *stream, void *data, size_t size)
{
    ssize_t n = recv(stream->socket, data, size, MSG_DONTWAIT);
    return n < 0 ? -(errno == EINTR ? EAGAIN : errno) : n;
}

short dray__plain_events(const dray__stream *stream, short wanted)
{
    (void)stream;
    return wanted;
}

const dray__carrier dray__carrier_tcp = {
    .name = "tcp", .transport = "stream", .scheme = "tcp", .may = may, DRAY__CARRIER_PLAIN};
