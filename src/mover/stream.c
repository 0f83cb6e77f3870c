/* TCP connections of the data plane (stream.h), and what they hand on to UCX. */
#include "mover/stream.h"

#include "base/error.h"

#include <arpa/inet.h>
#include <errno.h>
#include <inttypes.h>
#include <netdb.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <poll.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/epoll.h>
#include <unistd.h>

enum { STREAM_TIMEOUT_MS = 10000, BACKLOG = 512 };

enum { TLS_BUFFER = 256 << 10, TLS_HANDSHAKE = 0x16 /* the first byte of a TLS connection */ };

struct dray__stream {
    int fd;
    pid_t pid;
    bool connecting;
    bool unknown;   /* accepted, and nothing seen of it yet */
    bool encrypted; /* tls is made when it is connected */
    bool trusted;   /* may be plain */
    const dray__stream_keys *keys;
    dray__tls *tls;
    dray__ucx *ucx; /* NULL: the socket carries the bytes */
    int both;       /* with ucx: readable when it is, or the socket */
};

/* ---- addresses ------------------------------------------------------------------------------- */

/* getaddrinfo takes any number, and cuts it to 16 bits. */
static bool is_port(const char *text)
{
    size_t digits = strspn(text, "0123456789");
    return digits >= 1 && digits <= 5 && !text[digits] && strtoul(text, NULL, 10) <= UINT16_MAX;
}

/* "HOST", "HOST:PORT", "[V6]:PORT". */
static int parse(const char *text, struct sockaddr_storage *out, socklen_t *size, dray_error *error)
{
    char host[DRAY__STREAM_ADDRESS], *port = NULL;
    snprintf(host, sizeof host, "%s", text);
    char *begin = host, *colon = strrchr(host, ':');
    bool whole = strlen(text) < sizeof host;
    if (*begin == '[') {
        char *end = strchr(++begin, ']');
        whole = whole && end && (!end[1] || end[1] == ':');
        if (whole) {
            port = end[1] ? end + 2 : NULL;
            *end = 0;
        }
    } else if (colon && strchr(host, ':') == colon) {
        port = colon + 1;
        *colon = 0;
    }
    struct addrinfo hints = {.ai_socktype = SOCK_STREAM,
                             .ai_flags = AI_NUMERICHOST | AI_NUMERICSERV | AI_PASSIVE},
                    *found = NULL;
    int rc = whole && (!port || is_port(port))
                 ? getaddrinfo(begin, port ? port : "0", &hints, &found)
                 : EAI_NONAME;
    if (rc)
        return dray__fail(error, DRAY_EINVALID,
                          "data address \"%s\": a numeric address and port expected (%s)", text,
                          gai_strerror(rc));
    memcpy(out, found->ai_addr, found->ai_addrlen);
    *size = found->ai_addrlen;
    freeaddrinfo(found);
    return DRAY_OK;
}

/* "10.0.0.1", "::1"; port: where it goes. */
static bool print_host(const struct sockaddr_storage *socket, char out[DRAY__STREAM_ADDRESS],
                       uint16_t *port)
{
    const struct sockaddr_in *v4 = (const void *)socket;
    const struct sockaddr_in6 *v6 = (const void *)socket;
    bool is4 = socket->ss_family == AF_INET;
    if (!is4 && socket->ss_family != AF_INET6)
        return false;
    *port = ntohs(is4 ? v4->sin_port : v6->sin6_port);
    return inet_ntop(socket->ss_family, is4 ? (const void *)&v4->sin_addr : &v6->sin6_addr, out,
                     DRAY__STREAM_ADDRESS) != NULL;
}

bool dray__stream_print(const struct sockaddr_storage *address, char out[DRAY__STREAM_ADDRESS])
{
    uint16_t port;
    return print_host(address, out, &port);
}

/* ---- sockets --------------------------------------------------------------------------------- */

/* A link that is cut, or a host that is switched off, must not look like a slow one. */
static void tune(int fd)
{
    static const struct {
        int level, name, value;
    } options[] = {
        {IPPROTO_TCP, TCP_NODELAY, 1},   {IPPROTO_TCP, TCP_USER_TIMEOUT, STREAM_TIMEOUT_MS},
        {SOL_SOCKET, SO_KEEPALIVE, 1},   {IPPROTO_TCP, TCP_KEEPIDLE, 5},
        {IPPROTO_TCP, TCP_KEEPINTVL, 2}, {IPPROTO_TCP, TCP_KEEPCNT, 3},
    };
    for (size_t i = 0; i < sizeof options / sizeof *options; i++)
        setsockopt(fd, options[i].level, options[i].name, &options[i].value, sizeof(int));
}

static int stream_new(int fd, const struct sockaddr_storage *other, const dray__stream_keys *keys,
                      dray__stream **out, dray_error *error)
{
    dray__stream *stream = calloc(1, sizeof *stream);
    if (!stream) {
        close(fd);
        return dray__nomem(error);
    }
    tune(fd);
    stream->fd = fd;
    stream->both = -1;
    stream->pid = getpid();
    stream->keys = keys;
    stream->trusted = dray__is_loopback((const void *)other) ||
                      dray__networks_have(keys->trusted, (const void *)other);
    *out = stream;
    return DRAY_OK;
}

int dray__stream_listen(const char *address, char endpoint[DRAY__STREAM_ADDRESS], int *out,
                        dray_error *error)
{
    struct sockaddr_storage at;
    socklen_t size;
    int rc = parse(address, &at, &size, error);
    if (rc)
        return rc;
    int fd = socket(at.ss_family, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0), one = 1;
    if (fd < 0)
        return dray__fail_errno(error, errno, "socket");
    setsockopt(fd, SOL_SOCKET, SO_REUSEADDR, &one, sizeof one);
    char host[DRAY__STREAM_ADDRESS];
    uint16_t port;
    if (bind(fd, (struct sockaddr *)&at, size) || listen(fd, BACKLOG) ||
        getsockname(fd, (struct sockaddr *)&at, &size) || !print_host(&at, host, &port)) {
        rc = dray__fail_errno(error, errno, "data server at %s", address);
        close(fd);
        return rc;
    }
    snprintf(endpoint, DRAY__STREAM_ADDRESS, strchr(host, ':') ? "tcp:[%.60s]:%u" : "tcp:%.60s:%u",
             host, port);
    *out = fd;
    return DRAY_OK;
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
    int rc = stream_new(fd, &other, keys, out, error);
    if (rc == DRAY_OK)
        (*out)->unknown = true;
    return rc;
}

int dray__stream_connect(const char *endpoint, const dray__stream_keys *keys, dray__stream **out,
                         dray_error *error)
{
    struct sockaddr_storage to;
    socklen_t size;
    if (strncmp(endpoint, "tcp:", 4) != 0)
        return dray__fail(error, DRAY_EINVALID, "endpoint \"%s\": tcp:ADDRESS:PORT expected",
                          endpoint);
    int rc = parse(endpoint + 4, &to, &size, error);
    if (rc)
        return rc;
    int fd = socket(to.ss_family, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0);
    if (fd < 0)
        return dray__fail_errno(error, errno, "socket");
    if (connect(fd, (struct sockaddr *)&to, size) && errno != EINPROGRESS) {
        rc = dray__fail_errno(error, errno, "connect to %s", endpoint);
        close(fd);
        return rc;
    }
    dray__stream *stream;
    rc = stream_new(fd, &to, keys, &stream, error);
    if (rc)
        return rc;
    stream->connecting = true;
    stream->encrypted = !stream->trusted || keys->always;
    if (stream->encrypted && !keys->key->identity[0]) {
        dray__stream_close(stream);
        return dray__fail(
            error, DRAY_EPERM,
            "%s is in no trusted network, and this session has no key to encrypt with", endpoint);
    }
    *out = stream;
    return DRAY_OK;
}

void dray__stream_close(dray__stream *stream)
{
    if (!stream)
        return;
    if (stream->both >= 0)
        close(stream->both);
    dray__ucx_close(stream->ucx);
    if (stream->pid == getpid())
        dray__tls_free(stream->tls);
    close(stream->fd);
    if (stream->pid != getpid()) /* a forked child must not say goodbye in its parent's name */
        dray__tls_free(stream->tls);
    free(stream);
}

int dray__stream_fd(const dray__stream *stream)
{
    return stream->ucx ? stream->both : stream->fd;
}

int dray__stream_socket(const dray__stream *stream)
{
    return stream->fd;
}

short dray__stream_events(const dray__stream *stream)
{
    if (stream->connecting)
        return POLLOUT;
    if (stream->ucx)
        return POLLIN;
    return stream->tls ? dray__tls_events(stream->tls) : POLLIN;
}

bool dray__stream_encrypts(const dray__stream *stream)
{
    return stream->encrypted;
}

bool dray__stream_pending(const dray__stream *stream)
{
    return stream->ucx ? dray__ucx_pending(stream->ucx)
                       : stream->tls && dray__tls_pending(stream->tls);
}

/* ---- UCX ------------------------------------------------------------------------------------- */

bool dray__stream_may_ucx(const dray__stream *stream)
{
    return stream->trusted && !stream->encrypted && !stream->keys->always;
}

bool dray__stream_uses_ucx(const dray__stream *stream)
{
    return stream->ucx != NULL;
}

dray__ucx *dray__stream_ucx(const dray__stream *stream)
{
    return stream->ucx;
}

int dray__stream_use_ucx(dray__stream *stream, dray__ucx *ucx, dray_error *error)
{
    int fds[] = {dray__ucx_fd(ucx), stream->fd};
    int both = epoll_create1(EPOLL_CLOEXEC);
    for (size_t i = 0; i < 2 && both >= 0; i++) {
        struct epoll_event event = {.events = EPOLLIN};
        if (epoll_ctl(both, EPOLL_CTL_ADD, fds[i], &event)) {
            close(both);
            both = -1;
        }
    }
    if (both < 0) {
        dray__ucx_close(ucx);
        return dray__fail_errno(error, errno, "descriptors of a connection");
    }
    stream->both = both;
    stream->ucx = ucx;
    return DRAY_OK;
}

/* Nothing comes over the socket any more, but that it ended. */
static ssize_t silence(const dray__stream *stream)
{
    uint8_t byte;
    ssize_t n = recv(stream->fd, &byte, 1, MSG_PEEK | MSG_DONTWAIT);
    return n < 0 ? -(errno == EINTR ? EAGAIN : errno) : n > 0 ? -EPROTO : 0;
}

/* ---- bytes ----------------------------------------------------------------------------------- */

static bool find_key(void *user, dray__tls_key *key)
{
    const dray__tls_key *own = user;
    if (!own->identity[0] || strcmp(own->identity, key->identity) != 0)
        return false;
    memcpy(key->bytes, own->bytes, sizeof key->bytes);
    return true;
}

static int start_tls(dray__stream *stream, bool server)
{
    dray_error error;
    const dray__tls_key *key = stream->keys->key;
    int rc = server ? dray__tls_accept(stream->fd, find_key, (void *)key, &stream->tls, &error)
                    : dray__tls_connect(stream->fd, key, &stream->tls, &error);
    if (rc == DRAY_OK)
        rc = dray__tls_buffer(stream->tls, TLS_BUFFER, &error);
    return rc ? -ENOMEM : 0;
}

/* What an accepted connection begins with says what it is. */
static int recognise(dray__stream *stream)
{
    uint8_t first;
    ssize_t n = recv(stream->fd, &first, 1, MSG_PEEK | MSG_DONTWAIT);
    if (n <= 0)
        return n == 0 ? -ECONNRESET : -errno;
    stream->unknown = false;
    stream->encrypted = first == TLS_HANDSHAKE;
    if (!stream->encrypted && (!stream->trusted || stream->keys->always))
        return -EPERM;
    return 0;
}

static int connect_done(dray__stream *stream)
{
    if (!stream->connecting)
        return 0;
    struct pollfd p = {.fd = stream->fd, .events = POLLOUT};
    if (poll(&p, 1, 0) == 0)
        return -EAGAIN;
    int failed = 0;
    socklen_t size = sizeof failed;
    if (getsockopt(stream->fd, SOL_SOCKET, SO_ERROR, &failed, &size))
        return -errno;
    stream->connecting = failed != 0;
    return -failed;
}

/* 0: bytes can go. */
static int connected(dray__stream *stream)
{
    bool server = stream->unknown;
    int rc = connect_done(stream);
    if (rc == 0 && stream->unknown)
        rc = recognise(stream);
    if (rc == 0 && stream->encrypted && !stream->tls)
        rc = start_tls(stream, server);
    return rc;
}

int dray__stream_ready(dray__stream *stream)
{
    return connected(stream);
}

ssize_t dray__stream_send(dray__stream *stream, const void *data, size_t size, bool more)
{
    if (stream->ucx) {
        ssize_t taken = dray__ucx_send(stream->ucx, data, size);
        ssize_t over = taken == -EAGAIN ? silence(stream) : taken;
        return over ? over : -ECONNRESET;
    }
    int rc = connected(stream);
    if (rc)
        return rc;
    if (stream->tls)
        return dray__tls_send(stream->tls, data, size);
    ssize_t n = send(stream->fd, data, size, MSG_NOSIGNAL | MSG_DONTWAIT | (more ? MSG_MORE : 0));
    return n < 0 ? -(errno == EINTR ? EAGAIN : errno) : n;
}

ssize_t dray__stream_recv(dray__stream *stream, void *data, size_t size)
{
    if (stream->ucx) {
        ssize_t came = dray__ucx_recv(stream->ucx, data, size);
        return came == -EAGAIN ? silence(stream) : came;
    }
    int rc = connected(stream);
    if (rc)
        return rc;
    if (stream->tls)
        return dray__tls_recv(stream->tls, data, size);
    ssize_t n = recv(stream->fd, data, size, MSG_DONTWAIT);
    return n < 0 ? -(errno == EINTR ? EAGAIN : errno) : n;
}

int dray__stream_flush(dray__stream *stream)
{
    if (stream->ucx)
        return dray__ucx_flush(stream->ucx);
    int rc = connected(stream);
    return rc == 0 && stream->tls ? dray__tls_flush(stream->tls) : rc;
}
