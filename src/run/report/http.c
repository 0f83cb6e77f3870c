#include "run/report/http.h"

#include "base/callers.h"
#include "base/clock.h"
#include "base/error.h"
#include "base/log.h"
#include "base/network.h"
#include "net/address.h"

#include <arpa/inet.h>
#include <errno.h>
#include <event2/event.h>
#include <event2/util.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <strings.h>
#include <sys/socket.h>
#include <unistd.h>

enum { REQUEST_MAX = 8192, CALLER_SECONDS = 5, STREAMS_MOST = 16, BEHIND_MOST = 1 << 22 };

/* A connection for one request and its answer, closed after it ("Connection: close"); or a stream,
 * which goes on until its reader leaves or falls behind. */
typedef struct connection {
    struct connection *next, **link;
    dray__http *owner;
    dray__caller caller;
    struct event *readable, *writable;
    bool may_ask; /* it comes from a network that may be answered */
    bool streams;
    bool asked_all; /* the other side will send no more, and may still read */
    int fd;
    char in[REQUEST_MAX];
    size_t have;
    char *out; /* NULL while the request is incomplete */
    size_t size, at;
} connection;

struct dray__http {
    const dray__http_options *options;
    struct event_base *base;
    struct event *event, *sweep;
    int fd;
    connection *connections;
    dray__callers callers;
    dray__networks trusted;
    uint32_t streams;
    char url[96], host[96], name[32]; /* the permitted values of a request's Host */
};

/* ---- answers --------------------------------------------------------------------------------- */

/* Returns the value of a header, terminated in place; NULL when the request does not have it. */
static char *header_of(char *request, const char *name)
{
    size_t length = strlen(name);
    for (char *line = strchr(request, '\n'); line; line = strchr(line, '\n')) {
        line++;
        if (strncasecmp(line, name, length) != 0 || line[length] != ':')
            continue;
        char *value = line + length + 1 + strspn(line + length + 1, " \t");
        value[strcspn(value, " \t\r\n")] = 0;
        return value;
    }
    return NULL;
}

/* Returns whether the request's Host is one of ours. A page of another site may reach this server
 * by a name of its own that resolves to it (DNS rebinding); the browser then sends that name. */
static bool knows_host(const connection *c, char *request)
{
    const char *host = header_of(request, "Host");
    return !c->owner->options->check_host ||
           (host && (strcmp(host, c->owner->host) == 0 || strcmp(host, c->owner->name) == 0));
}

/* Makes the answer to the request. */
static void judge(connection *c, dray__http_answer *out)
{
    static const char get[] = "GET ";
    bool whole = strlen(c->in) == c->have && c->have < REQUEST_MAX - 1;
    char target[REQUEST_MAX] = "";
    snprintf(target, sizeof target, "%.*s", (int)strcspn(c->in + strlen(get), "? \r\n"),
             whole && c->have > strlen(get) ? c->in + strlen(get) : "");
    if (!c->may_ask || (whole && !knows_host(c, c->in)))
        out->status = "403 Forbidden";
    else if (!whole)
        out->status = "400 Bad Request";
    else if (strncmp(c->in, get, strlen(get)) != 0)
        out->status = "501 Not Implemented";
    else
        c->owner->options->answer(c->owner->options->user, target, out);
    if (out->stream && c->owner->streams == STREAMS_MOST) {
        out->status = "503 Service Unavailable";
        out->stream = false;
    }
}

static bool answer(connection *c)
{
    dray__http_answer is = {.status = "404 Not Found", .type = "text/plain; charset=utf-8"};
    judge(c, &is);
    FILE *out = open_memstream(&c->out, &c->size);
    if (out && is.stream)
        fprintf(out,
                "HTTP/1.1 %s\r\nContent-Type: %s\r\nCache-Control: no-store\r\n"
                "Connection: close\r\n\r\n",
                is.status, is.type);
    else if (out)
        fprintf(out,
                "HTTP/1.1 %s\r\nContent-Type: %s\r\n"
                "Content-Length: %zu\r\nConnection: close\r\n\r\n",
                is.status, is.type, is.size);
    bool whole = out && fwrite(is.body ? is.body : "", 1, is.size, out) == is.size;
    whole = out && fclose(out) == 0 && whole;
    free(is.body);
    if (whole && is.stream) { /* a stream may stay as long as it reads */
        c->streams = true;
        c->owner->streams++;
        dray__callers_heard(&c->owner->callers, &c->caller);
        c->caller.busy = true;
    }
    return whole;
}

/* ---- connections ----------------------------------------------------------------------------- */

static void end(connection *c)
{
    *c->link = c->next;
    if (c->next)
        c->next->link = c->link;
    c->owner->streams -= c->streams;
    dray__callers_leave(&c->owner->callers, &c->caller);
    if (c->readable)
        event_free(c->readable);
    if (c->writable)
        event_free(c->writable);
    close(c->fd);
    free(c->out);
    free(c);
}

static void end_caller(void *http, dray__caller *caller)
{
    (void)http;
    end(caller->owner);
}

/* Discards bytes after the answer until the other side has read the answer, and closes. */
static void on_writable(evutil_socket_t fd, short what, void *user)
{
    (void)what;
    connection *c = user;
    ssize_t n = send(fd, c->out + c->at, c->size - c->at, MSG_NOSIGNAL | MSG_DONTWAIT);
    if (n < 0 && errno != EAGAIN && errno != EINTR) {
        end(c);
        return;
    }
    c->at += n > 0 ? (size_t)n : 0;
    if (c->at == c->size) {
        event_del(c->writable);
        if (c->asked_all)
            end(c);
        else if (!c->streams)
            shutdown(fd, SHUT_WR);
    }
}

static bool is_whole(const connection *c)
{
    return c->have == REQUEST_MAX - 1 || memmem(c->in, c->have, "\r\n\r\n", 4) ||
           memmem(c->in, c->have, "\n\n", 2);
}

static void on_readable(evutil_socket_t fd, short what, void *user)
{
    (void)what;
    connection *c = user;
    char waste[REQUEST_MAX];
    bool over = c->out != NULL;
    ssize_t n = recv(fd, over ? waste : c->in + c->have,
                     over ? sizeof waste : REQUEST_MAX - 1 - c->have, MSG_DONTWAIT);
    if (n < 0 && (errno == EAGAIN || errno == EINTR))
        return;
    if (n > 0 && over)
        return;
    if (n == 0 && over && !c->streams && c->at < c->size) {
        c->asked_all = true;
        event_del(c->readable);
        return;
    }
    c->have += n > 0 ? (size_t)n : 0;
    if (n > 0 && !is_whole(c))
        return;
    if (n <= 0 || !answer(c) || event_add(c->writable, NULL))
        end(c);
}

static bool may_ask(const dray__http *m, const struct sockaddr *from)
{
    return dray__is_loopback(from) || dray__networks_have(&m->trusted, from);
}

static void begin(dray__http *m, int fd, const struct sockaddr *from)
{
    connection *c = calloc(1, sizeof *c);
    if (!c || !dray__callers_enter(&m->callers, &c->caller, c)) {
        close(fd);
        free(c);
        return;
    }
    c->owner = m;
    c->fd = fd;
    c->may_ask = may_ask(m, from);
    c->link = &m->connections;
    if ((c->next = m->connections))
        c->next->link = &c->next;
    m->connections = c;
    c->readable = event_new(m->base, fd, EV_READ | EV_PERSIST, on_readable, c);
    c->writable = event_new(m->base, fd, EV_WRITE | EV_PERSIST, on_writable, c);
    if (!c->readable || !c->writable || event_add(c->readable, NULL))
        end(c);
}

/* Callers are anonymous, so this limit is for all of them together. */
static void on_sweep(evutil_socket_t fd, short what, void *user)
{
    (void)fd, (void)what;
    dray__http *m = user;
    dray__callers_sweep(&m->callers);
    event_add(m->event, NULL); /* on_accept may have suspended it */
}

static void on_accept(evutil_socket_t listener, short what, void *user)
{
    (void)what;
    dray__http *m = user;
    struct sockaddr_storage from = {0};
    socklen_t size = sizeof from;
    int fd = accept4(listener, (struct sockaddr *)&from, &size, SOCK_NONBLOCK | SOCK_CLOEXEC);
    if (fd >= 0) {
        begin(m, fd, (const struct sockaddr *)&from);
    } else if (errno != EAGAIN && errno != EINTR && errno != ECONNABORTED) {
        dray__callers_make_room(&m->callers);
        event_del(m->event); /* new connections stay in the backlog until the next sweep */
    }
}

/* ---- listening ------------------------------------------------------------------------------- */

/* Parses an address. "PORT" alone means loopback. */
static int parse(const char *text, dray__address *out, dray_error *error)
{
    char whole[96];
    snprintf(whole, sizeof whole, strchr(text, ':') ? "%s" : "127.0.0.1:%s", text);
    const char *port = strrchr(whole, ':');
    char *end;
    long number = strtol(port + 1, &end, 10);
    int size = sizeof out->socket;
    if (strlen(text) > 80 || port[1] < '0' || port[1] > '9' || *end || number > 65535)
        return dray__fail(error, DRAY_EINVALID,
                          "metrics address '%.80s': PORT, or a numeric HOST:PORT expected", text);
    /* libevent refuses port 0 when it is written out */
    char host[96];
    snprintf(host, sizeof host, "%.*s", (int)(port - whole), whole);
    if (evutil_parse_sockaddr_port(host, (struct sockaddr *)&out->socket, &size))
        return dray__fail(error, DRAY_EINVALID,
                          "metrics address '%.80s': PORT, or a numeric HOST:PORT expected", text);
    out->size = (socklen_t)size;
    if (out->socket.ss_family == AF_INET)
        ((struct sockaddr_in *)&out->socket)->sin_port = htons((uint16_t)number);
    else
        ((struct sockaddr_in6 *)&out->socket)->sin6_port = htons((uint16_t)number);
    return DRAY_OK;
}

static int listen_at(dray__http *m, const char *text, dray__address *at, dray_error *error)
{
    char host[INET6_ADDRSTRLEN] = "", name[128];
    snprintf(name, sizeof name, "metrics at %.80s", text);
    int rc = dray__address_listen(at, name, NULL, NULL, &m->fd, error);
    if (rc)
        return rc == DRAY_EBUSY ? dray__fail_errno(error, EADDRINUSE, "%s", name) : rc;
    if (getsockname(m->fd, (struct sockaddr *)&at->socket, &at->size))
        return dray__fail_errno(error, errno, "%s: getsockname", name);
    const struct sockaddr_in *v4 = (const struct sockaddr_in *)&at->socket;
    const struct sockaddr_in6 *v6 = (const struct sockaddr_in6 *)&at->socket;
    bool is4 = at->socket.ss_family == AF_INET;
    inet_ntop(at->socket.ss_family, is4 ? (const void *)&v4->sin_addr : &v6->sin6_addr, host,
              sizeof host);
    unsigned port = ntohs(is4 ? v4->sin_port : v6->sin6_port);
    snprintf(m->host, sizeof m->host, is4 ? "%s:%u" : "[%s]:%u", host, port);
    snprintf(m->name, sizeof m->name, "localhost:%u", port);
    snprintf(m->url, sizeof m->url, "http://%.64s%.16s", m->host, m->options->path);
    return DRAY_OK;
}

static int start(dray__http *m, const char *text, dray__address *at, dray_error *error)
{
    static const struct timeval second = {.tv_sec = 1};
    dray__callers_init(&m->callers, "metrics", DRAY__CALLERS_PART_SOME,
                       CALLER_SECONDS * DRAY__SECOND, end_caller, m);
    int rc = dray__networks_parse(getenv("DRAY_TRUSTED_NETWORKS"), &m->trusted, error);
    if (!rc && !dray__is_loopback((const struct sockaddr *)&at->socket) && !m->trusted.count)
        rc = dray__fail(
            error, DRAY_EPERM,
            "metrics at %s: HTTP is neither encrypted nor authenticated: beyond this host "
            "only networks in $DRAY_TRUSTED_NETWORKS are answered, and it names none",
            text);
    if (!rc)
        rc = listen_at(m, text, at, error);
    if (rc)
        return rc;
    m->event = event_new(m->base, m->fd, EV_READ | EV_PERSIST, on_accept, m);
    m->sweep = event_new(m->base, -1, EV_PERSIST, on_sweep, m);
    if (!m->event || !m->sweep || event_add(m->event, NULL) || event_add(m->sweep, &second))
        return dray__nomem(error);
    dray__log(DRAY_LOG_INFO, "metrics at %s", m->url);
    return DRAY_OK;
}

int dray__http_new(struct event_base *base, const char *address, const dray__http_options *options,
                   dray__http **out, const char **url, dray_error *error)
{
    dray__address at = {0};
    int rc = parse(address, &at, error);
    dray__http *m = rc ? NULL : calloc(1, sizeof *m);
    if (!rc && !m)
        rc = dray__nomem(error);
    if (rc)
        return rc;
    m->fd = -1;
    m->base = base;
    m->options = options;
    rc = start(m, address, &at, error);
    if (rc) {
        dray__http_free(m);
        return rc;
    }
    *out = m;
    *url = m->url;
    return DRAY_OK;
}

/* Closes readers that are too far behind. */
void dray__http_push(dray__http *m, const char *data, size_t size)
{
    for (connection *c = m->connections, *next; c; c = next) {
        next = c->next;
        if (!c->streams)
            continue;
        size_t left = c->size - c->at;
        char *out = left + size < BEHIND_MOST ? malloc(left + size + 1) : NULL;
        if (!out) {
            end(c);
            continue;
        }
        memcpy(out, c->out + c->at, left);
        memcpy(out + left, data, size);
        free(c->out);
        c->out = out;
        c->at = 0;
        c->size = left + size;
        event_add(c->writable, NULL);
    }
}

int dray__http_check(const char *address, dray_error *error)
{
    dray__address at = {0};
    return parse(address, &at, error);
}

void dray__http_free(dray__http *m)
{
    if (!m)
        return;
    while (m->connections)
        end(m->connections);
    if (m->event)
        event_free(m->event);
    if (m->sweep)
        event_free(m->sweep);
    if (m->fd >= 0)
        close(m->fd);
    free(m);
}
