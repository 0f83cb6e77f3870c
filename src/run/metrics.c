#include "run/metrics.h"

#include "base/error.h"
#include "base/log.h"
#include "base/network.h"
#include "run/prometheus.h"

#include <arpa/inet.h>
#include <errno.h>
#include <event2/buffer.h>
#include <event2/event.h>
#include <event2/http.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>

enum { HEADERS_MAX = 8192, BODY_MAX = 1024, PATIENCE_S = 5 };

struct dray__metrics {
    const dray__coordinator *coordinator;
    struct evhttp *http;
    dray__networks trusted;
    char url[96];
};

static bool may_ask(const dray__metrics *m, struct evhttp_request *request)
{
    char *address = NULL;
    ev_uint16_t port;
    struct sockaddr_in6 v6 = {.sin6_family = AF_INET6};
    struct sockaddr_in v4 = {.sin_family = AF_INET};
    evhttp_connection_get_peer(evhttp_request_get_connection(request), &address, &port);
    const struct sockaddr *from = NULL;
    if (address && inet_pton(AF_INET, address, &v4.sin_addr) == 1)
        from = (const struct sockaddr *)&v4;
    else if (address && inet_pton(AF_INET6, address, &v6.sin6_addr) == 1)
        from = (const struct sockaddr *)&v6;
    return from && (dray__is_loopback(from) || dray__networks_have(&m->trusted, from));
}

static void answer(struct evhttp_request *request, void *user)
{
    const dray__metrics *m = user;
    if (!may_ask(m, request)) {
        evhttp_send_error(request, 403, "not from this network");
        return;
    }
    char *text = NULL;
    size_t size = 0;
    json_t *status = dray__coordinator_status(m->coordinator);
    FILE *out = status ? open_memstream(&text, &size) : NULL;
    if (out)
        dray__prometheus(status, out);
    json_decref(status);
    struct evbuffer *body = evbuffer_new();
    bool whole = out && !fclose(out) && body && !evbuffer_add(body, text, size);
    if (whole) {
        struct evkeyvalq *headers = evhttp_request_get_output_headers(request);
        evhttp_add_header(headers, "Content-Type", "text/plain; version=0.0.4; charset=utf-8");
        evhttp_send_reply(request, HTTP_OK, "OK", body);
    } else {
        evhttp_send_error(request, HTTP_INTERNAL, "out of memory");
    }
    if (body)
        evbuffer_free(body);
    free(text);
}

static void refuse(struct evhttp_request *request, void *user)
{
    (void)user;
    evhttp_send_error(request, HTTP_NOTFOUND, "there is /metrics alone");
}

/* "PORT" is this host alone. */
static int parse(const char *text, struct sockaddr_storage *out, int *size, dray_error *error)
{
    char whole[96];
    snprintf(whole, sizeof whole, strchr(text, ':') ? "%s" : "127.0.0.1:%s", text);
    const char *port = strrchr(whole, ':');
    char *end;
    long number = strtol(port + 1, &end, 10);
    *size = sizeof *out;
    if (strlen(text) > 80 || port[1] < '0' || port[1] > '9' || *end || number > 65535)
        return dray__fail(error, DRAY_EINVALID,
                          "metrics address '%.80s': PORT, or a numeric HOST:PORT expected", text);
    /* libevent takes port 0 as an error where it is written out */
    char host[96];
    snprintf(host, sizeof host, "%.*s", (int)(port - whole), whole);
    if (evutil_parse_sockaddr_port(host, (struct sockaddr *)out, size))
        return dray__fail(error, DRAY_EINVALID,
                          "metrics address '%.80s': PORT, or a numeric HOST:PORT expected", text);
    if (out->ss_family == AF_INET)
        ((struct sockaddr_in *)(void *)out)->sin_port = htons((uint16_t)number);
    else
        ((struct sockaddr_in6 *)(void *)out)->sin6_port = htons((uint16_t)number);
    return DRAY_OK;
}

static int listen_at(dray__metrics *m, const struct sockaddr_storage *at, dray_error *error)
{
    char host[INET6_ADDRSTRLEN] = "";
    bool v4 = at->ss_family == AF_INET;
    const void *bytes = v4 ? (const void *)&((const struct sockaddr_in *)(const void *)at)->sin_addr
                           : &((const struct sockaddr_in6 *)(const void *)at)->sin6_addr;
    unsigned port = ntohs(v4 ? ((const struct sockaddr_in *)(const void *)at)->sin_port
                             : ((const struct sockaddr_in6 *)(const void *)at)->sin6_port);
    inet_ntop(at->ss_family, bytes, host, sizeof host);
    struct evhttp_bound_socket *bound =
        evhttp_bind_socket_with_handle(m->http, host, (ev_uint16_t)port);
    if (!bound)
        return dray__fail_errno(error, errno, "metrics at %s port %u", host, port);
    struct sockaddr_storage own;
    socklen_t size = sizeof own;
    if (getsockname(evhttp_bound_socket_get_fd(bound), (struct sockaddr *)&own, &size) == 0)
        port = ntohs(v4 ? ((struct sockaddr_in *)(void *)&own)->sin_port
                        : ((struct sockaddr_in6 *)(void *)&own)->sin6_port);
    snprintf(m->url, sizeof m->url, v4 ? "http://%s:%u/metrics" : "http://[%s]:%u/metrics", host,
             port);
    return DRAY_OK;
}

int dray__metrics_new(struct event_base *base, const dray__coordinator *coordinator,
                      const char *address, dray__metrics **out, const char **url, dray_error *error)
{
    struct sockaddr_storage at = {0};
    int size, rc = parse(address, &at, &size, error);
    dray__metrics *m = rc ? NULL : calloc(1, sizeof *m);
    if (!rc && !m)
        rc = dray__nomem(error);
    if (!rc)
        rc = dray__networks_parse(getenv("DRAY_TRUSTED_NETWORKS"), &m->trusted, error);
    if (!rc && !dray__is_loopback((const struct sockaddr *)&at) && !m->trusted.count)
        rc = dray__fail(error, DRAY_EPERM,
                        "metrics at %s: HTTP is not encrypted, and nobody proves who asks: beyond "
                        "this host only networks in $DRAY_TRUSTED_NETWORKS are answered, and it "
                        "names none",
                        address);
    if (!rc && !(m->http = evhttp_new(base)))
        rc = dray__nomem(error);
    if (!rc) {
        m->coordinator = coordinator;
        evhttp_set_allowed_methods(m->http, EVHTTP_REQ_GET);
        evhttp_set_max_headers_size(m->http, HEADERS_MAX);
        evhttp_set_max_body_size(m->http, BODY_MAX);
        evhttp_set_timeout(m->http, PATIENCE_S);
        evhttp_set_gencb(m->http, refuse, NULL);
        evhttp_set_cb(m->http, "/metrics", answer, m);
        rc = listen_at(m, &at, error);
    }
    if (!rc)
        dray__log(DRAY_LOG_INFO, "metrics at %s", m->url);
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
    struct sockaddr_storage at = {0};
    int size;
    return parse(address, &at, &size, error);
}

void dray__metrics_free(dray__metrics *m)
{
    if (m && m->http)
        evhttp_free(m->http);
    free(m);
}
