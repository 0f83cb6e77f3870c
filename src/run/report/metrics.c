#include "run/report/metrics.h"

#include "base/callers.h"
#include "base/clock.h"
#include "base/error.h"
#include "base/log.h"
#include "base/network.h"
#include "net/address.h"
#include "run/report/prometheus.h"

#include <arpa/inet.h>
#include <errno.h>
#include <event2/event.h>
#include <event2/util.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <unistd.h>

enum { REQUEST_MAX = 8192, CALLER_SECONDS = 5 };

/* One request and its answer: then it ends, as HTTP lets a server say. */
typedef struct connection {
    struct connection *next, **link;
    dray__metrics *owner;
    dray__caller caller;
    struct event *readable, *writable;
    bool may_ask; /* it comes from a network that is answered */
    int fd;
    char in[REQUEST_MAX];
    size_t have;
    char *out; /* NULL: the request is not whole */
    size_t size, at;
} connection;

struct dray__metrics {
    const dray__coordinator *coordinator;
    struct event_base *base;
    struct event *event, *sweep;
    int fd;
    connection *connections;
    dray__callers callers;
    dray__networks trusted;
    char url[96];
};

/* ---- answers --------------------------------------------------------------------------------- */

static char *print_status(const dray__coordinator *coordinator, size_t *size)
{
    char *text = NULL;
    json_t *status = dray__coordinator_status(coordinator);
    FILE *out = status ? open_memstream(&text, size) : NULL;
    if (out)
        dray__prometheus(status, out);
    json_decref(status);
    if (out && fclose(out) == 0)
        return text;
    free(text);
    return NULL;
}

/* What there is to say, by the request's first line; the answer's body is a copy. */
static const char *judge(const connection *c, char **body, size_t *size)
{
    static const char get[] = "GET ", path[] = "/metrics";
    const char *target = c->in + strlen(get);
    size_t length = strcspn(target, "? \r\n");
    *body = NULL;
    *size = 0;
    if (!c->may_ask)
        return "403 Forbidden";
    if (strlen(c->in) != c->have || c->have == REQUEST_MAX - 1)
        return "400 Bad Request";
    if (strncmp(c->in, get, strlen(get)) != 0)
        return "501 Not Implemented";
    if (length != strlen(path) || strncmp(target, path, length) != 0)
        return "404 Not Found";
    *body = print_status(c->owner->coordinator, size);
    return *body ? "200 OK" : "500 Internal Server Error";
}

static bool answer(connection *c)
{
    char *body;
    size_t size;
    const char *status = judge(c, &body, &size);
    FILE *out = open_memstream(&c->out, &c->size);
    if (out)
        fprintf(out,
                "HTTP/1.1 %s\r\nContent-Type: text/plain; version=0.0.4; charset=utf-8\r\n"
                "Content-Length: %zu\r\nConnection: close\r\n\r\n",
                status, size);
    bool whole = out && fwrite(body ? body : "", 1, size, out) == size;
    whole = out && fclose(out) == 0 && whole;
    free(body);
    return whole;
}

/* ---- connections ----------------------------------------------------------------------------- */

static void end(connection *c)
{
    *c->link = c->next;
    if (c->next)
        c->next->link = c->link;
    dray__callers_leave(&c->owner->callers, &c->caller);
    if (c->readable)
        event_free(c->readable);
    if (c->writable)
        event_free(c->writable);
    close(c->fd);
    free(c->out);
    free(c);
}

static void end_caller(void *metrics, dray__caller *caller)
{
    (void)metrics;
    end(caller->owner);
}

/* What comes after the answer is thrown away until the other side has read it, and closes. */
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
    c->have += n > 0 ? (size_t)n : 0;
    if (n > 0 && !is_whole(c))
        return;
    if (n <= 0 || !answer(c) || event_add(c->writable, NULL))
        end(c);
}

static bool may_ask(const dray__metrics *m, const struct sockaddr *from)
{
    return dray__is_loopback(from) || dray__networks_have(&m->trusted, from);
}

static void begin(dray__metrics *m, int fd, const struct sockaddr *from)
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

/* Callers are not known by name: this limit is for all of them together. */
static void on_sweep(evutil_socket_t fd, short what, void *user)
{
    (void)fd, (void)what;
    dray__metrics *m = user;
    dray__callers_sweep(&m->callers);
    event_add(m->event, NULL); /* it may rest (on_accept) */
}

static void on_accept(evutil_socket_t listener, short what, void *user)
{
    (void)what;
    dray__metrics *m = user;
    struct sockaddr_storage from = {0};
    socklen_t size = sizeof from;
    int fd = accept4(listener, (struct sockaddr *)&from, &size, SOCK_NONBLOCK | SOCK_CLOEXEC);
    if (fd >= 0) {
        begin(m, fd, (const struct sockaddr *)&from);
    } else if (errno != EAGAIN && errno != EINTR && errno != ECONNABORTED) {
        dray__callers_make_room(&m->callers);
        event_del(m->event); /* who comes stays in the backlog until the next sweep */
    }
}

/* ---- listening ------------------------------------------------------------------------------- */

/* "PORT" is this host alone. */
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
    /* libevent takes port 0 as an error where it is written out */
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

static int listen_at(dray__metrics *m, const char *text, dray__address *at, dray_error *error)
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
    snprintf(m->url, sizeof m->url, is4 ? "http://%s:%u/metrics" : "http://[%s]:%u/metrics", host,
             ntohs(is4 ? v4->sin_port : v6->sin6_port));
    return DRAY_OK;
}

static int start(dray__metrics *m, const char *text, dray__address *at, dray_error *error)
{
    static const struct timeval second = {.tv_sec = 1};
    dray__callers_init(&m->callers, "metrics", DRAY__CALLERS_PART_SOME,
                       CALLER_SECONDS * DRAY__SECOND, end_caller, m);
    int rc = dray__networks_parse(getenv("DRAY_TRUSTED_NETWORKS"), &m->trusted, error);
    if (!rc && !dray__is_loopback((const struct sockaddr *)&at->socket) && !m->trusted.count)
        rc = dray__fail(
            error, DRAY_EPERM,
            "metrics at %s: HTTP is not encrypted, and nobody proves who asks: beyond this host "
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

int dray__metrics_new(struct event_base *base, const dray__coordinator *coordinator,
                      const char *address, dray__metrics **out, const char **url, dray_error *error)
{
    dray__address at = {0};
    int rc = parse(address, &at, error);
    dray__metrics *m = rc ? NULL : calloc(1, sizeof *m);
    if (!rc && !m)
        rc = dray__nomem(error);
    if (rc)
        return rc;
    m->fd = -1;
    m->base = base;
    m->coordinator = coordinator;
    rc = start(m, address, &at, error);
    if (rc) {
        dray__metrics_free(m);
        return rc;
    }
    *out = m;
    *url = m->url;
    return DRAY_OK;
}

int dray__metrics_check(const char *address, dray_error *error)
{
    dray__address at = {0};
    return parse(address, &at, error);
}

void dray__metrics_free(dray__metrics *m)
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
