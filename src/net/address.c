/* Sockets by their addresses (address.h). */
#include "net/address.h"

#include "base/clock.h"
#include "base/error.h"

#include <arpa/inet.h>
#include <errno.h>
#include <fcntl.h>
#include <netdb.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <poll.h>
#include <stdlib.h>
#include <string.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <sys/un.h>
#include <unistd.h>

enum { BACKLOG = 512 };

static int parse_unix(const char *path, dray__address *out, dray_error *error)
{
    struct sockaddr_un *un = (struct sockaddr_un *)&out->socket;
    size_t length = strlen(path);
    if (!length || length >= sizeof un->sun_path)
        return dray__fail(error, DRAY_EINVALID,
                          "address unix:%s: a path of 1 to %zu bytes expected, found %zu", path,
                          sizeof un->sun_path - 1, length);
    un->sun_family = AF_UNIX;
    memcpy(un->sun_path, path, length + 1);
    out->size = sizeof *un;
    out->local = true;
    return DRAY_OK;
}

/* Checks a port, because getaddrinfo accepts any number, and truncates it to 16 bits. */
static bool is_port(const char *text)
{
    size_t digits = strspn(text, "0123456789");
    return digits >= 1 && digits <= 5 && !text[digits] && strtoul(text, NULL, 10) <= UINT16_MAX;
}

/* Splits "HOST:PORT" or "[IPV6]:PORT"; for "HOST", "[IPV6]" or "IPV6", *port is NULL. Returns false
 * for other forms. */
static bool split(const char *text, char host[256], const char **port)
{
    const char *colon = strrchr(text, ':'), *end = text + strlen(text);
    *port = NULL;
    if (*text == '[') {
        end = strchr(++text, ']');
        if (!end || (end[1] && end[1] != ':'))
            return false;
        *port = end[1] ? end + 2 : NULL;
    } else if (colon && strchr(text, ':') == colon) {
        end = colon;
        *port = colon + 1;
    }
    size_t length = (size_t)(end - text);
    if (length >= 256 || (*port && !is_port(*port)))
        return false;
    memcpy(host, text, length);
    host[length] = 0;
    return length > 0;
}

/* Returns 0, or the error of getaddrinfo. */
static int find_host(const char *host, const char *port, int flags, dray__address *out)
{
    struct addrinfo *found = NULL,
                    hints = {.ai_socktype = SOCK_STREAM, .ai_flags = AI_NUMERICSERV | flags};
    int code = getaddrinfo(host, port, &hints, &found);
    if (code)
        return code;
    memcpy(&out->socket, found->ai_addr, found->ai_addrlen);
    out->size = found->ai_addrlen;
    freeaddrinfo(found);
    return 0;
}

static int parse_tcp(const char *text, dray__address *out, dray_error *error)
{
    char host[256];
    const char *port;
    if (!split(text, host, &port) || !port)
        return dray__fail(
            error, DRAY_EINVALID,
            "address tcp:%s: HOST:PORT or [IPV6]:PORT expected, the port at most 65535", text);
    /* "localhost" is not looked up, because it may resolve to another address. */
    int code = find_host(strcmp(host, "localhost") == 0 ? "127.0.0.1" : host, port, 0, out);
    return code ? dray__fail(error, code == EAI_MEMORY ? DRAY_ENOMEM : DRAY_ENOENT,
                             "address tcp:%s: %s", text, gai_strerror(code))
                : DRAY_OK;
}

int dray__address_parse_data(const char *text, dray__address *out, dray_error *error)
{
    char host[256];
    const char *port;
    *out = (dray__address){0};
    int code = split(text, host, &port)
                   ? find_host(host, port ? port : "0", AI_NUMERICHOST | AI_PASSIVE, out)
                   : EAI_NONAME;
    return code ? dray__fail(error, DRAY_EINVALID,
                             "data address \"%s\": a numeric address and port expected (%s)", text,
                             gai_strerror(code))
                : DRAY_OK;
}

bool dray__address_host(const struct sockaddr_storage *address, char *out, size_t size,
                        uint16_t *port)
{
    const struct sockaddr_in *v4 = (const void *)address;
    const struct sockaddr_in6 *v6 = (const void *)address;
    bool is4 = address->ss_family == AF_INET;
    if (!is4 && address->ss_family != AF_INET6)
        return false;
    if (port)
        *port = ntohs(is4 ? v4->sin_port : v6->sin6_port);
    return inet_ntop(address->ss_family, is4 ? (const void *)&v4->sin_addr : &v6->sin6_addr, out,
                     (socklen_t)size) != NULL;
}

int dray__address_parse(const char *text, dray__address *out, dray_error *error)
{
    *out = (dray__address){0};
    if (strncmp(text, "unix:", 5) == 0)
        return parse_unix(text + 5, out, error);
    if (strncmp(text, "tcp:", 4) == 0)
        return parse_tcp(text + 4, out, error);
    return dray__fail(error, DRAY_EINVALID, "address '%s': unix:/path or tcp:HOST:PORT expected",
                      text);
}

void dray__address_keep(int fd)
{
    int on = 1, idle = DRAY__LEASE_SECONDS / 3, count = 3, lease_ms = 1000 * DRAY__LEASE_SECONDS;
    setsockopt(fd, IPPROTO_TCP, TCP_NODELAY, &on, sizeof on);
    setsockopt(fd, SOL_SOCKET, SO_KEEPALIVE, &on, sizeof on);
    setsockopt(fd, IPPROTO_TCP, TCP_KEEPIDLE, &idle, sizeof idle);
    setsockopt(fd, IPPROTO_TCP, TCP_KEEPINTVL, &idle, sizeof idle);
    setsockopt(fd, IPPROTO_TCP, TCP_KEEPCNT, &count, sizeof count);
    setsockopt(fd, IPPROTO_TCP, TCP_USER_TIMEOUT, &lease_ms, sizeof lease_ms);
}

int dray__address_socket(const dray__address *address, const char *text, int *out,
                         dray_error *error)
{
    int fd = socket(address->socket.ss_family, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0);
    if (fd < 0)
        return dray__fail_errno(error, errno, "socket for %s", text);
    if (!address->local)
        dray__address_keep(fd);
    *out = fd;
    return DRAY_OK;
}

/* Removes a socket file at which no process listens. */
static int remove_stale(const dray__address *address, const char *text, dray_error *error)
{
    const char *path = ((const struct sockaddr_un *)&address->socket)->sun_path;
    struct stat st;
    if (lstat(path, &st) < 0)
        return errno == ENOENT ? DRAY_OK : dray__fail_errno(error, errno, "%s", text);
    if (!S_ISSOCK(st.st_mode))
        return dray__fail(error, DRAY_EEXIST, "%s: a file that is no socket is there", text);
    int fd = -1;
    int status = dray__address_connect(address, text, dray__deadline(DRAY__SECOND), &fd, NULL);
    if (status == DRAY_OK) {
        close(fd);
        return dray__fail(error, DRAY_EBUSY, "%s: another server listens there", text);
    }
    if (status != DRAY_ECLOSED)
        return dray__fail(error, DRAY_EBUSY, "%s: a server is there, but does not accept", text);
    if (unlink(path) < 0 && errno != ENOENT)
        return dray__fail_errno(error, errno, "removing the stale socket %s", text);
    return DRAY_OK;
}

/* The lock on the folder keeps two servers that start at once from each removing the other's
 * socket as stale. */
static int lock_folder(const char *path, const char *text, int *out, dray_error *error)
{
    char folder[sizeof(((struct sockaddr_un *)0)->sun_path)];
    const char *slash = strrchr(path, '/');
    size_t length = slash ? (size_t)(slash - path) : 0;
    memcpy(folder, slash ? path : ".", slash ? length : 1);
    folder[slash ? length : 1] = 0;
    int fd = open(slash == path ? "/" : folder, O_RDONLY | O_DIRECTORY | O_CLOEXEC);
    if (fd < 0)
        return dray__fail_errno(error, errno, "folder of %s", text);
    int64_t deadline = dray__deadline(5 * DRAY__SECOND);
    while (flock(fd, LOCK_EX | LOCK_NB) < 0) {
        if (errno != EWOULDBLOCK || !dray__left_ms(deadline)) {
            int status = dray__fail_errno(error, errno, "locking the folder of %s", text);
            close(fd);
            return status;
        }
        poll(NULL, 0, 5);
    }
    *out = fd;
    return DRAY_OK;
}

static int bind_socket(int fd, const dray__address *address, const char *text, dray_error *error)
{
    int on = 1;
    /* bind() gives the file the socket's own mode, so other users can never connect. */
    if (address->local && fchmod(fd, S_IRUSR | S_IWUSR) < 0)
        return dray__fail_errno(error, errno, "mode of %s", text);
    if (!address->local)
        setsockopt(fd, SOL_SOCKET, SO_REUSEADDR, &on, sizeof on);
    if (bind(fd, (const struct sockaddr *)&address->socket, address->size) < 0) {
        if (errno == EADDRINUSE)
            return dray__fail(error, DRAY_EBUSY, "%s: address in use", text);
        return dray__fail_errno(error, errno, "binding %s", text);
    }
    return DRAY_OK;
}

int dray__address_listen(const dray__address *address, const char *text, dray__bound_fn bound,
                         void *user, int *out, dray_error *error)
{
    int fd = -1, lock = -1;
    int status = dray__address_socket(address, text, &fd, error);
    if (status)
        return status;
    if (address->local) {
        const char *path = ((const struct sockaddr_un *)&address->socket)->sun_path;
        status = lock_folder(path, text, &lock, error);
        if (!status)
            status = remove_stale(address, text, error);
    }
    if (!status)
        status = bind_socket(fd, address, text, error);
    if (!status && bound)
        status = bound(user, fd, error);
    if (!status && listen(fd, BACKLOG) < 0)
        status = dray__fail_errno(error, errno, "listening at %s", text);
    if (lock >= 0) {
        flock(lock, LOCK_UN); /* a process that was forked meanwhile has the descriptor, too */
        close(lock);
    }
    if (status)
        close(fd);
    else
        *out = fd;
    return status;
}

bool dray__address_met_itself(int fd)
{
    struct sockaddr_storage mine = {0}, theirs = {0};
    socklen_t mine_size = sizeof mine, theirs_size = sizeof theirs;
    return getsockname(fd, (struct sockaddr *)&mine, &mine_size) == 0 &&
           getpeername(fd, (struct sockaddr *)&theirs, &theirs_size) == 0 &&
           mine_size == theirs_size && memcmp(&mine, &theirs, mine_size) == 0;
}

/* Returns whether another user's server listens. In a folder that others can write to (/tmp), it
 * may have taken the name. */
static bool foreign(int fd)
{
    struct ucred peer;
    socklen_t size = sizeof peer;
    return getsockopt(fd, SOL_SOCKET, SO_PEERCRED, &peer, &size) < 0 ||
           (peer.uid != geteuid() && peer.uid != 0 && geteuid() != 0);
}

static int finish_connect(int fd, int64_t deadline_ns)
{
    struct pollfd wait = {.fd = fd, .events = POLLOUT};
    int ready = dray__wait(&wait, 1, deadline_ns);
    if (ready == 0)
        return ETIMEDOUT;
    int code = 0;
    socklen_t size = sizeof code;
    if (ready < 0 || getsockopt(fd, SOL_SOCKET, SO_ERROR, &code, &size) < 0)
        return errno;
    return code ? code : (dray__address_met_itself(fd) ? ECONNREFUSED : 0);
}

int dray__address_begin(const dray__address *address, const char *text, int *out, dray_error *error)
{
    int fd = -1;
    int status = dray__address_socket(address, text, &fd, error);
    if (status)
        return status;
    if (connect(fd, (const struct sockaddr *)&address->socket, address->size) < 0 &&
        errno != EINPROGRESS && errno != EINTR) {
        status = dray__fail_errno(error, errno, "connecting to %s", text);
        close(fd);
        return status;
    }
    *out = fd;
    return DRAY_OK;
}

int dray__address_connect_on(int fd, const dray__address *address, const char *text,
                             int64_t deadline_ns, dray_error *error)
{
    int code = 0;
    if (connect(fd, (const struct sockaddr *)&address->socket, address->size) < 0)
        code = errno == EINTR ? EINPROGRESS : errno;
    if (code == EINPROGRESS)
        code = finish_connect(fd, deadline_ns);
    bool other = !code && address->local && foreign(fd);
    if (!code && !other)
        return DRAY_OK;
    if (other)
        return dray__fail(error, DRAY_EPERM, "%s: another user listens there", text);
    if (code == ENOENT || code == ECONNREFUSED || code == ECONNRESET)
        return dray__fail(error, DRAY_ECLOSED, "%s: nobody listens there", text);
    /* The network may come back. */
    if (code == ENETUNREACH || code == EHOSTUNREACH || code == ENETDOWN)
        return dray__fail(error, DRAY_ETIMEDOUT, "%s: %s", text, strerror(code));
    if (code == ETIMEDOUT || code == EAGAIN) /* EAGAIN means that a Unix socket's backlog is full */
        return dray__fail(error, DRAY_ETIMEDOUT, "%s: does not accept connections", text);
    return dray__fail_errno(error, code, "connecting to %s", text);
}

int dray__address_connect(const dray__address *address, const char *text, int64_t deadline_ns,
                          int *out, dray_error *error)
{
    int fd = -1;
    int status = dray__address_socket(address, text, &fd, error);
    if (status)
        return status;
    status = dray__address_connect_on(fd, address, text, deadline_ns, error);
    if (status)
        close(fd);
    else
        *out = fd;
    return status;
}
