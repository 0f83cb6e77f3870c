/* Streams (stream.h): sockets, and the carriers that are used once they are connected. */
#include "net/stream.h"

#include "base/error.h"
#include "base/log.h"
#include "net/address.h"
#include "net/carrier.h"

#include <errno.h>
#include <poll.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

/* ---- sockets --------------------------------------------------------------------------------- */

static const char *scheme_of(int family)
{
    return family == AF_UNIX ? "unix" : "tcp";
}

static int stream_new(int fd, const struct sockaddr_storage *other, const dray__stream_keys *keys,
                      dray__stream **out, dray_error *error)
{
    dray__stream *stream = calloc(1, sizeof *stream);
    if (!stream) {
        close(fd);
        return dray__nomem(error);
    }
    stream->socket = fd;
    stream->pid = getpid();
    stream->keys = keys;
    stream->trusted = other->ss_family == AF_UNIX || dray__is_loopback((const void *)other) ||
                      dray__networks_have(keys->trusted, (const void *)other);
    *out = stream;
    return DRAY_OK;
}

int dray__stream_listen(const char *address, char endpoint[DRAY__STREAM_ADDRESS], int *out,
                        dray_error *error)
{
    dray__address at;
    int fd = -1, rc = strncmp(address, "unix:", 5) == 0
                          ? dray__address_parse(address, &at, error)
                          : dray__address_parse_data(address, &at, error);
    if (rc == DRAY_OK)
        rc = dray__address_listen(&at, address, NULL, NULL, &fd, error);
    if (rc)
        return dray__fail_prefix(error, rc, "data server: ");
    char host[DRAY__STREAM_ADDRESS];
    uint16_t port;
    int length = snprintf(endpoint, DRAY__STREAM_ADDRESS, "%s", address);
    if (!at.local && !getsockname(fd, (struct sockaddr *)&at.socket, &at.size) &&
        dray__address_host(&at.socket, host, sizeof host, &port))
        length = snprintf(endpoint, DRAY__STREAM_ADDRESS,
                          strchr(host, ':') ? "tcp:[%.60s]:%u" : "tcp:%.60s:%u", host, port);
    if (length >= DRAY__STREAM_ADDRESS) {
        close(fd);
        return dray__fail(error, DRAY_EINVALID, "data server at %s: at most %d bytes expected",
                          address, DRAY__STREAM_ADDRESS - 1);
    }
    *out = fd;
    return DRAY_OK;
}

void dray__stream_unlisten(const char *endpoint)
{
    if (strncmp(endpoint, "unix:", 5) == 0)
        unlink(endpoint + 5);
}

int dray__stream_accept(int listener, const dray__stream_keys *keys, dray__stream **out,
                        dray_error *error)
{
    struct sockaddr_storage other = {0};
    socklen_t size = sizeof other;
    int fd = accept4(listener, (struct sockaddr *)&other, &size, SOCK_NONBLOCK | SOCK_CLOEXEC);
    if (fd < 0)
        return errno == EAGAIN || errno == EINTR || errno == ECONNABORTED
                   ? DRAY_EAGAIN
                   : dray__fail_errno(error, errno, "accept");
    if (other.ss_family != AF_UNIX)
        dray__address_keep(fd);
    if (keys->rate && other.ss_family != AF_UNIX &&
        setsockopt(fd, SOL_SOCKET, SO_MAX_PACING_RATE, &keys->rate, sizeof keys->rate) < 0)
        dray__log(DRAY_LOG_WARN, "data server: a connection has no limit of its rate: %s",
                  strerror(errno));
    int rc = stream_new(fd, &other, keys, out, error);
    if (rc == DRAY_OK)
        (*out)->server = true;
    return rc;
}

int dray__stream_connect(const char *endpoint, const dray__stream_keys *keys, uint32_t avoid,
                         dray__stream **out, dray_error *error)
{
    dray__address to;
    uint32_t index;
    int fd = -1, rc = DRAY_OK;
    if (strncmp(endpoint, "tcp:", 4) == 0)
        rc = dray__address_parse_data(endpoint + 4, &to, error);
    else
        rc = dray__address_parse(endpoint, &to, error);
    if (rc == DRAY_OK)
        rc = dray__address_begin(&to, endpoint, &fd, error);
    dray__stream *stream = NULL;
    if (rc == DRAY_OK)
        rc = stream_new(fd, &to.socket, keys, &stream, error);
    if (rc)
        return rc;
    rc = dray__carrier_choose(scheme_of(to.socket.ss_family), keys, stream->trusted, avoid, &index,
                              error);
    if (rc) {
        dray__stream_close(stream);
        return dray__fail_prefix(error, rc, "%s: ", endpoint);
    }
    stream->carrier = dray__carrier_at(index);
    stream->connecting = true;
    *out = stream;
    return DRAY_OK;
}

void dray__stream_close(dray__stream *stream)
{
    if (!stream)
        return;
    if (stream->state)
        stream->carrier->close(stream);
    if (stream->socket >= 0)
        close(stream->socket);
    free(stream);
}

/* ---- getting ready --------------------------------------------------------------------------- */

static int connect_done(dray__stream *stream, dray_error *error)
{
    struct pollfd p = {.fd = stream->socket, .events = POLLOUT};
    if (poll(&p, 1, 0) == 0)
        return DRAY_EAGAIN;
    int failed = 0;
    socklen_t size = sizeof failed;
    if (getsockopt(stream->socket, SOL_SOCKET, SO_ERROR, &failed, &size))
        failed = errno;
    if (!failed && dray__address_met_itself(stream->socket))
        failed = ECONNREFUSED; /* nobody else listens there */
    stream->connecting = failed != 0;
    return failed ? dray__fail_errno(error, failed, "connecting") : DRAY_OK;
}

/* Recognises the carrier of an accepted connection by its first bytes. */
static int recognise(dray__stream *stream, dray_error *error)
{
    uint8_t first;
    struct sockaddr_storage own;
    socklen_t size = sizeof own;
    ssize_t n = recv(stream->socket, &first, 1, MSG_PEEK | MSG_DONTWAIT);
    if (n < 0 && (errno == EAGAIN || errno == EINTR))
        return DRAY_EAGAIN;
    if (n <= 0 || getsockname(stream->socket, (struct sockaddr *)&own, &size))
        return dray__fail_errno(error, n ? errno : ECONNRESET, "a new connection");
    stream->carrier = dray__carrier_of(scheme_of(own.ss_family), first);
    return stream->carrier && stream->carrier->accept
               ? DRAY_OK
               : dray__fail(error, DRAY_EPROTO, "a connection that begins with the byte %u", first);
}

int dray__stream_ready(dray__stream *stream, dray_error *error)
{
    if (stream->open)
        return DRAY_OK;
    int rc = stream->connecting ? connect_done(stream, error) : DRAY_OK;
    if (rc == DRAY_OK && !stream->carrier)
        rc = recognise(stream, error);
    if (rc == DRAY_OK && !stream->started) {
        rc = stream->server ? stream->carrier->accept(stream, error)
                            : stream->carrier->connect(stream, error);
        stream->started = rc == DRAY_OK;
    }
    if (rc == DRAY_OK && stream->carrier->ready)
        rc = stream->carrier->ready(stream, error);
    stream->open = rc == DRAY_OK;
    return rc;
}

/* The same, but returns -errno, for sending and receiving. */
static int get_ready(dray__stream *stream)
{
    dray_error error;
    int rc = dray__stream_ready(stream, &error);
    if (rc == DRAY_OK || rc == DRAY_EAGAIN)
        return rc ? -EAGAIN : 0;
    if (error.origin == DRAY_ORIGIN_ERRNO)
        return -(int)error.raw;
    return rc == DRAY_EPERM ? -EPERM : rc == DRAY_ENOMEM ? -ENOMEM : -EPROTO;
}

bool dray__stream_avoid(const dray__stream *stream, bool worked, uint32_t *avoid)
{
    uint32_t wider = *avoid, other;
    if (!stream->unfit || (worked && stream->keys->transport))
        return false;
    for (uint32_t i = 0; dray__carrier_at(i); i++)
        wider |= dray__carrier_at(i) == stream->carrier ? 1u << i : 0;
    if (dray__carrier_choose(stream->carrier->scheme, stream->keys, stream->trusted, wider, &other,
                             NULL))
        return false;
    *avoid = wider;
    return true;
}

/* ---- properties of a stream ------------------------------------------------------------------ */

const dray__carrier *dray__stream_carrier(const dray__stream *stream)
{
    return stream->carrier;
}

bool dray__stream_encrypts(const dray__stream *stream)
{
    return stream->carrier && stream->carrier->encrypts;
}

bool dray__stream_blind(const dray__stream *stream)
{
    return stream->open && stream->carrier->blind;
}

int dray__stream_fd(const dray__stream *stream)
{
    return stream->started && stream->carrier->fd ? stream->carrier->fd(stream) : stream->socket;
}

int dray__stream_socket(const dray__stream *stream)
{
    return stream->socket;
}

short dray__stream_events(const dray__stream *stream, short wanted)
{
    if (stream->connecting)
        return POLLOUT;
    return stream->started ? stream->carrier->events(stream, wanted) : POLLIN;
}

bool dray__stream_pending(const dray__stream *stream)
{
    return stream->started && stream->carrier->pending && stream->carrier->pending(stream);
}

/* ---- bytes ----------------------------------------------------------------------------------- */

static ssize_t check(dray__stream *stream, ssize_t rc)
{
    stream->unfit |= stream->open && rc < 0 && rc != -EAGAIN;
    return rc;
}

ssize_t dray__stream_send(dray__stream *stream, const void *data, size_t size, bool more)
{
    int rc = stream->open ? 0 : get_ready(stream);
    return rc ? rc : check(stream, stream->carrier->send(stream, data, size, more));
}

ssize_t dray__stream_recv(dray__stream *stream, void *data, size_t size)
{
    int rc = stream->open ? 0 : get_ready(stream);
    return rc ? rc : check(stream, stream->carrier->recv(stream, data, size));
}

int dray__stream_flush(dray__stream *stream)
{
    int rc = stream->open ? 0 : get_ready(stream);
    return rc || !stream->carrier->flush ? rc : (int)check(stream, stream->carrier->flush(stream));
}
