/* Connections and requests: accepting, reading frames, handing them to services, sending replies,
 * and closing what has ended. Nothing is closed or freed inside a service's callback: a connection
 * that must go is marked as doomed, and the reaper closes it from the loop. */
#include "control/coordinator.h"

#include "base/clock.h"
#include "base/error.h"
#include "base/log.h"
#include "control/address.h"
#include "control/internal.h"

#include <errno.h>
#include <event2/event.h>
#include <fcntl.h>
#include <netinet/in.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/un.h>
#include <unistd.h>

enum {
    KEPT_REQUESTS = 4096,      /* unanswered requests of one connection */
    KEPT_BYTES = 256 << 20,    /* and their payloads */
    STRANGER_BYTES = 4 << 10,  /* of a message over TCP before it said who it is */
    STRANGERS = 256,           /* connections over TCP that did not say who they are */
    UNREAD_BYTES = 128 << 20,  /* default of options.unread_bytes */
    ACCEPT_PAUSE_NS = 50000000 /* when there are no descriptors left */
};

#define HANDSHAKE_NS (10 * DRAY__SECOND) /* for TLS */

static struct timeval interval(int64_t ns)
{
    ns = ns < 0 ? 0 : ns;
    int64_t us = ns / 1000 + (ns % 1000 != 0);
    return (struct timeval){.tv_sec = us / 1000000, .tv_usec = us % 1000000};
}

/* ---- sending --------------------------------------------------------------------------------- */

static void doom(dray__connection *connection)
{
    if (connection->doomed)
        return;
    connection->doomed = true;
    event_del(connection->readable);
    event_del(connection->writable);
    event_active(connection->coordinator->reaper, EV_TIMEOUT, 0);
}

static void free_outgoing(dray__outgoing *frame)
{
    dray__close_fds(frame->fds, frame->fd_count);
    free(frame);
}

/* What TLS took, but the socket did not yet. true: nothing is left. */
static bool flush_tls(dray__connection *connection)
{
    int code = connection->tls ? dray__tls_flush(connection->tls) : 0;
    if (code == -EAGAIN)
        event_add(connection->writable, NULL);
    else if (code)
        doom(connection);
    return code == 0;
}

static void flush(dray__connection *connection)
{
    while (connection->out) {
        dray__outgoing *frame = connection->out;
        ssize_t n = dray__link_send(connection->fd, connection->tls, frame->data + frame->at,
                                    frame->size - frame->at, frame->fds, frame->fd_count);
        if (n == -EAGAIN) {
            event_add(connection->writable, NULL);
            return;
        }
        if (n < 0) {
            doom(connection);
            return;
        }
        dray__close_fds(frame->fds, frame->fd_count);
        frame->fd_count = 0;
        frame->at += (size_t)n;
        connection->out_bytes -= (size_t)n;
        if (frame->at < frame->size)
            continue;
        connection->out = frame->next;
        if (!connection->out)
            connection->out_last = &connection->out;
        free_outgoing(frame);
    }
    if (flush_tls(connection))
        event_del(connection->writable);
}

/* Keeps what could not be sent. The descriptors are still the caller's: ours are copies. */
static int enqueue(dray__connection *connection, const uint8_t *data, size_t size, const int *fds,
                   uint32_t fd_count)
{
    dray__outgoing *frame = malloc(sizeof *frame + size);
    if (!frame)
        return -1;
    frame->next = NULL;
    frame->size = size;
    frame->at = 0;
    frame->fd_count = 0;
    memcpy(frame->data, data, size);
    for (uint32_t i = 0; i < fd_count; i++) {
        int copy = fcntl(fds[i], F_DUPFD_CLOEXEC, 0);
        if (copy < 0) {
            free_outgoing(frame);
            return -1;
        }
        frame->fds[frame->fd_count++] = copy;
    }
    *connection->out_last = frame;
    connection->out_last = &frame->next;
    connection->out_bytes += size;
    event_add(connection->writable, NULL);
    return 0;
}

static void send_bytes(dray__connection *connection, const uint8_t *data, size_t size,
                       const int *fds, uint32_t fd_count)
{
    if (!connection->out) {
        ssize_t n = dray__link_send(connection->fd, connection->tls, data, size, fds, fd_count);
        if (n < 0 && n != -EAGAIN) {
            doom(connection);
            return;
        }
        if (n > 0) {
            data += n;
            size -= (size_t)n;
            fd_count = 0;
        }
        if (!size) {
            flush_tls(connection);
            return;
        }
    }
    /* One frame may always wait, whatever its size. */
    if (connection->out && connection->out_bytes + size > connection->coordinator->unread_bytes) {
        dray__log(DRAY_LOG_WARN, "control: closing a connection that leaves %zu bytes unread",
                  connection->out_bytes + size);
        doom(connection);
    } else if (enqueue(connection, data, size, fds, fd_count) < 0) {
        doom(connection);
    }
}

static void send_frame(dray__connection *connection, dray__frame *frame, const int *fds)
{
    if (connection->doomed)
        return;
    dray__writer *out = &connection->coordinator->scratch;
    dray__writer_reset(out);
    if (dray__frame_put(out, frame, NULL) != DRAY_OK) {
        doom(connection);
        return;
    }
    send_bytes(connection, out->data, out->size, fds, frame->fd_count);
    if (out->capacity > 1u << 20)
        dray__writer_free(out);
}

static void send_error(dray__connection *connection, uint16_t type, uint64_t id,
                       const dray_error *error)
{
    dray__writer payload = {0};
    dray__frame_put_error(&payload, error);
    dray__frame frame = {.type = type,
                         .flags = DRAY__FRAME_REPLY | DRAY__FRAME_ERROR,
                         .id = id,
                         .payload = payload.data,
                         .size = (uint32_t)payload.size};
    if (payload.failed)
        doom(connection);
    else
        send_frame(connection, &frame, NULL);
    dray__writer_free(&payload);
}

/* ---- requests -------------------------------------------------------------------------------- */

static void unlink_request(dray__request *request)
{
    dray__connection *connection = request->connection;
    if (!connection)
        return;
    *request->link = request->next;
    if (request->next)
        request->next->link = request->link;
    connection->request_count--;
    connection->request_bytes -= request->size;
    request->connection = NULL;
}

static void free_request(dray__request *request)
{
    unlink_request(request);
    if (request->timer)
        event_free(request->timer);
    dray__close_fds(request->fds, request->fd_count);
    free(request);
}

void dray__request_fail(dray__request *request, const dray_error *error)
{
    if (request->connection && request->id) /* a notification (id 0) wants no answer */
        send_error(request->connection, request->type, request->id, error);
    free_request(request);
}

void dray__request_reply(dray__request *request, dray__writer *payload, const int *fds,
                         uint32_t fd_count)
{
    dray_error error;
    dray__connection *connection = request->connection;
    dray__frame frame = {.type = request->type,
                         .flags = DRAY__FRAME_REPLY,
                         .id = request->id,
                         .fd_count = (uint16_t)fd_count,
                         .payload = payload ? payload->data : NULL,
                         .size = payload ? (uint32_t)payload->size : 0};
    int status = DRAY_OK;
    if (payload && payload->failed)
        status = dray__nomem(&error);
    else if (fd_count > DRAY__FRAME_FDS || (payload && payload->size > DRAY__FRAME_MAX))
        status = dray__fail(&error, DRAY_EINTERNAL, "reply to %s: too large",
                            dray__message_name(request->type));
    else if (fd_count && connection && !connection->local)
        status = dray__fail(&error, DRAY_EUNSUPPORTED,
                            "%s: its answer has descriptors, which only a Unix socket carries",
                            dray__message_name(request->type));
    if (status) {
        dray__request_fail(request, &error);
    } else {
        if (connection && request->id)
            send_frame(connection, &frame, fds);
        free_request(request);
    }
    if (payload)
        dray__writer_reset(payload);
}

static void request_due(evutil_socket_t fd, short what, void *user)
{
    (void)fd, (void)what;
    dray__request *request = user;
    int64_t left = request->deadline_ns - dray__now();
    if (left > 0) { /* libevent counts from the beginning of the loop's turn: a little early */
        struct timeval rest = interval(left);
        event_add(request->timer, &rest);
        return;
    }
    request->service->expired(request->self, request, 0);
}

int dray__request_expire_at(dray__request *request, int64_t deadline_ns)
{
    if (!request->service->expired)
        return DRAY_EINVALID;
    if (!request->timer)
        request->timer = evtimer_new(request->coordinator->base, request_due, request);
    if (!request->timer)
        return DRAY_ENOMEM;
    request->deadline_ns = deadline_ns;
    int64_t left = deadline_ns - dray__now(), most = INT64_C(86400) * DRAY__SECOND;
    struct timeval wait = interval(left < most ? left : most);
    return event_add(request->timer, &wait) < 0 ? DRAY_ENOMEM : DRAY_OK;
}

dray__session *dray__request_session(const dray__request *request)
{
    return request->session;
}

uint16_t dray__request_type(const dray__request *request)
{
    return request->type;
}

dray__reader *dray__request_payload(dray__request *request)
{
    return &request->reader;
}

uint32_t dray__request_fd_count(const dray__request *request)
{
    return request->fd_count;
}

int dray__request_take_fd(dray__request *request, uint32_t index)
{
    if (index >= request->fd_count)
        return -1;
    int fd = request->fds[index];
    request->fds[index] = -1;
    return fd;
}

uint64_t dray__request_channel(const dray__request *request)
{
    return request->connection ? request->connection->id : 0;
}

int64_t dray__request_pid(const dray__request *request)
{
    return request->connection ? request->connection->pid : 0;
}

void dray__request_set_data(dray__request *request, void *data)
{
    request->data = data;
}

void *dray__request_data(const dray__request *request)
{
    return request->data;
}

/* ---- receiving ------------------------------------------------------------------------------- */

static const dray__registered *service_of(const dray__coordinator *coordinator, uint16_t type)
{
    for (uint32_t i = 0; i < coordinator->service_count; i++)
        if (type >= coordinator->services[i].service.first &&
            type <= coordinator->services[i].service.last)
            return &coordinator->services[i];
    return NULL;
}

static int admit(const dray__connection *connection, const dray__frame *frame,
                 const dray__registered *registered, dray_error *error)
{
    if (!registered)
        return dray__fail(error, DRAY_EUNSUPPORTED, "message %04x (%s): not served here",
                          frame->type, dray__message_name(frame->type));
    uint32_t may = connection->session ? connection->session->may : connection->may;
    if (!(may & dray__message_senders(frame->type)))
        return dray__fail(error, DRAY_EPERM, "message %s: a session of the role %s may not send it",
                          dray__message_name(frame->type),
                          connection->session ? connection->session->role : "?");
    bool greets = frame->type == DRAY__MSG_HELLO || frame->type == DRAY__MSG_ATTACH ||
                  frame->type == DRAY__MSG_PING || frame->type == DRAY__MSG_RETURN;
    if (!connection->session && !greets && !connection->coordinator->sessionless)
        return dray__fail(error, DRAY_EPROTO, "message %s: HELLO or ATTACH expected first",
                          dray__message_name(frame->type));
    if (connection->request_count >= KEPT_REQUESTS ||
        frame->size > KEPT_BYTES - connection->request_bytes)
        return dray__fail(error, DRAY_EFULL, "message %s: %zu requests wait for their answers",
                          dray__message_name(frame->type), connection->request_count);
    return DRAY_OK;
}

static void dispatch(dray__connection *connection, const dray__frame *frame, int *fds)
{
    dray_error error;
    const dray__registered *registered = service_of(connection->coordinator, frame->type);
    int status = admit(connection, frame, registered, &error);
    dray__request *request = status ? NULL : malloc(sizeof *request + frame->size);
    if (!status && !request)
        status = dray__nomem(&error);
    if (status) {
        dray__close_fds(fds, frame->fd_count);
        if (frame->id)
            send_error(connection, frame->type, frame->id, &error);
        return;
    }
    *request = (dray__request){.connection = connection,
                               .coordinator = connection->coordinator,
                               .session = connection->session,
                               .next = connection->requests,
                               .link = &connection->requests,
                               .service = &registered->service,
                               .self = registered->self,
                               .id = frame->id,
                               .type = frame->type,
                               .fd_count = frame->fd_count,
                               .size = frame->size};
    memcpy(request->fds, fds, sizeof(int) * frame->fd_count);
    if (frame->size)
        memcpy(request->payload, frame->payload, frame->size);
    request->reader = dray__reader_of(request->payload, frame->size);
    if (request->next)
        request->next->link = &request->next;
    connection->requests = request;
    connection->request_count++;
    connection->request_bytes += frame->size;
    registered->service.handle(registered->self, request);
}

/* The stream cannot be read any further: say why, as far as the socket takes it, and close. */
static void give_up(dray__connection *connection, const dray__frame *frame, const dray_error *error)
{
    dray__log(DRAY_LOG_WARN, "control: closing a connection: %s", error->message);
    send_error(connection, frame->type, frame->id, error);
    doom(connection);
}

static bool find_key(void *user, dray__tls_key *key)
{
    const dray__connection *connection = user;
    return dray__token_answer(&connection->coordinator->master, key);
}

/* Over TCP nothing is read before the other side has proven who it is. true: it has. */
static bool proven(dray__connection *connection)
{
    dray_error error;
    if (connection->may)
        return true;
    int status = dray__tls_handshake(connection->tls, &error);
    if (status == DRAY_OK) {
        connection->may = dray__role_bits(dray__token_role_of(dray__tls_identity(connection->tls)));
    } else if (status == DRAY_EAGAIN) {
        if (dray__tls_unsent(connection->tls))
            event_add(connection->writable, NULL);
        else
            event_del(connection->writable);
    } else {
        dray__log(DRAY_LOG_WARN, "control: closing a connection: %s", error.message);
        doom(connection);
    }
    return connection->may;
}

static void on_readable(evutil_socket_t fd, short what, void *user)
{
    (void)what;
    dray__connection *connection = user;
    dray_error error;
    dray__frame frame = {0};
    int fds[DRAY__FRAME_FDS];
    if (!proven(connection))
        return;
    int status = dray__inbox_fill(&connection->inbox, fd, &error);
    if (status == DRAY_EPROTO)
        give_up(connection, &frame, &error);
    else if (status && status != DRAY_EAGAIN)
        doom(connection);
    while (!status && !connection->doomed) {
        status = dray__inbox_take(&connection->inbox, &frame, fds, &error);
        if (!status && frame.flags) {
            dray__close_fds(fds, frame.fd_count);
            status = dray__fail(&error, DRAY_EPROTO, "frame %s: a request expected, flags are %x",
                                dray__message_name(frame.type), frame.flags);
        }
        if (!status)
            dispatch(connection, &frame, fds);
        else if (status != DRAY_EAGAIN)
            give_up(connection, &frame, &error);
    }
    /* TLS has read further: go on with it after the others' turn. */
    if (!connection->doomed && connection->tls && dray__tls_pending(connection->tls))
        event_active(connection->readable, EV_READ, 0);
}

static void on_writable(evutil_socket_t fd, short what, void *user)
{
    (void)fd, (void)what;
    if (proven(user))
        flush(user);
}

/* ---- connections ----------------------------------------------------------------------------- */

/* Tells the owners of everything that the connection still waits for, and frees it. */
static void close_connection(dray__connection *connection)
{
    dray__coordinator *coordinator = connection->coordinator;
    while (connection->requests) {
        dray__request *request = connection->requests;
        unlink_request(request);
        if (request->timer)
            event_del(request->timer);
        if (request->service->expired)
            request->service->expired(request->self, request, 1);
    }
    bool alone = !connection->session || !connection->session->ended;
    for (uint32_t i = 0; alone && i < coordinator->service_count; i++)
        if (coordinator->services[i].service.channel_ended)
            coordinator->services[i].service.channel_ended(coordinator->services[i].self,
                                                           connection->id);
    dray__connection **link = &coordinator->connections;
    while (*link != connection)
        link = &(*link)->next;
    *link = connection->next;
    event_free(connection->readable);
    event_free(connection->writable);
    dray__tls_goodbye(connection->tls);
    dray__tls_free(connection->tls);
    close(connection->fd);
    dray__inbox_free(&connection->inbox);
    while (connection->out) {
        dray__outgoing *frame = connection->out;
        connection->out = frame->next;
        free_outgoing(frame);
    }
    free(connection);
}

static void end_session(dray__session *session)
{
    dray__coordinator *coordinator = session->coordinator;
    session->ended = true;
    for (dray__connection *c = coordinator->connections, *next; c; c = next) {
        next = c->next;
        if (c->session == session)
            close_connection(c);
    }
    for (uint32_t i = 0; i < coordinator->service_count; i++) {
        const dray__registered *r = &coordinator->services[i];
        if (r->service.session_ended)
            r->service.session_ended(r->self, session);
    }
    dray__session **link = &coordinator->sessions;
    while (*link != session)
        link = &(*link)->next;
    *link = session->next;
    dray__log(DRAY_LOG_INFO, "control: member %llu (%s %s, rank %u) left",
              (unsigned long long)session->member, session->role, session->name, session->rank);
    free(session->name);
    free(session->role);
    free(session);
}

static dray__connection *find_doomed(dray__coordinator *coordinator)
{
    for (dray__connection *c = coordinator->connections; c; c = c->next)
        if (c->doomed)
            return c;
    return NULL;
}

/* Callbacks of services may doom further connections, so the search begins anew each time. */
static void reap(evutil_socket_t fd, short what, void *user)
{
    (void)fd, (void)what;
    dray__connection *connection;
    while ((connection = find_doomed(user))) {
        if (connection->session && connection->session->first == connection)
            end_session(connection->session);
        else
            close_connection(connection);
    }
}

static void sweep(evutil_socket_t fd, short what, void *user)
{
    (void)fd, (void)what;
    const dray__coordinator *coordinator = user;
    int64_t now = dray__now(), hello_ns = coordinator->hello_ns;
    for (dray__connection *c = coordinator->connections; c; c = c->next) {
        int64_t most = !c->may && hello_ns > HANDSHAKE_NS ? HANDSHAKE_NS : hello_ns;
        if (!c->session && now - c->since_ns >= most)
            doom(c);
    }
}

/* Whoever opens connections over TCP and says nothing cannot keep others out: the oldest such one
 * makes room for the newest. */
static void limit_strangers(dray__coordinator *coordinator)
{
    dray__connection *oldest = NULL;
    uint32_t count = 0;
    for (dray__connection *c = coordinator->connections; c; c = c->next)
        if (!c->local && !c->session && !c->doomed) {
            oldest = c; /* the newest comes first in the list */
            count++;
        }
    if (count > STRANGERS)
        doom(oldest);
}

/* Only the user who runs the coordinator, and root, may talk to it over a Unix socket. */
static int check_peer(int fd, int64_t *pid)
{
    struct ucred peer;
    socklen_t size = sizeof peer;
    if (getsockopt(fd, SOL_SOCKET, SO_PEERCRED, &peer, &size) < 0 || size != sizeof peer)
        return -1;
    if (peer.uid != geteuid() && peer.uid != 0) {
        dray__log(DRAY_LOG_WARN, "control: refused a connection of user %u", peer.uid);
        return -1;
    }
    *pid = peer.pid;
    return 0;
}

static void free_connection(dray__connection *connection)
{
    if (connection->readable)
        event_free(connection->readable);
    if (connection->writable)
        event_free(connection->writable);
    dray__tls_free(connection->tls);
    close(connection->fd);
    free(connection);
}

/* What a connection needs besides its memory; -1: it cannot be served. */
static int prepare(dray__connection *connection)
{
    struct event_base *base = connection->coordinator->base;
    int fd = connection->fd;
    if (connection->local) {
        if (check_peer(fd, &connection->pid) < 0)
            return -1;
        connection->may = DRAY__MAY_ALL;
    } else {
        dray__address_keep(fd);
        if (dray__tls_accept(fd, find_key, connection, &connection->tls, NULL))
            return -1;
        connection->inbox.tls = connection->tls;
        connection->inbox.most = STRANGER_BYTES;
    }
    connection->readable = event_new(base, fd, EV_READ | EV_PERSIST, on_readable, connection);
    connection->writable = event_new(base, fd, EV_WRITE | EV_PERSIST, on_writable, connection);
    return connection->readable && connection->writable &&
                   event_add(connection->readable, NULL) == 0
               ? 0
               : -1;
}

static void add_connection(const dray__listener *listener, int fd)
{
    dray__coordinator *coordinator = listener->coordinator;
    dray__connection *connection = calloc(1, sizeof *connection);
    if (!connection) {
        close(fd);
        return;
    }
    connection->coordinator = coordinator;
    connection->id = ++coordinator->connection_ids;
    connection->fd = fd;
    connection->local = listener->local;
    connection->since_ns = dray__now();
    connection->out_last = &connection->out;
    if (prepare(connection) < 0) {
        free_connection(connection);
        return;
    }
    connection->next = coordinator->connections;
    coordinator->connections = connection;
    if (!listener->local)
        limit_strangers(coordinator);
}

/* ---- listening ------------------------------------------------------------------------------- */

static void on_accept(evutil_socket_t fd, short what, void *user)
{
    (void)what;
    dray__listener *listener = user;
    for (;;) {
        int peer = accept4(fd, NULL, NULL, SOCK_NONBLOCK | SOCK_CLOEXEC);
        if (peer >= 0) {
            add_connection(listener, peer);
            continue;
        }
        if (errno == EINTR || errno == ECONNABORTED)
            continue;
        if (errno != EAGAIN && errno != EWOULDBLOCK) {
            /* EMFILE and the like: the connection stays in the backlog; do not spin on it. */
            struct timeval pause = interval(ACCEPT_PAUSE_NS);
            event_del(listener->event);
            event_add(listener->resume, &pause);
        }
        return;
    }
}

static void resume_accept(evutil_socket_t fd, short what, void *user)
{
    (void)fd, (void)what;
    dray__listener *listener = user;
    event_add(listener->event, NULL);
}

/* The master token is there before anybody can connect. */
static int listen_with_token(dray__listener *listener, const dray__address *bound,
                             dray_error *error)
{
    dray__coordinator *coordinator = listener->coordinator;
    dray__token *master = &coordinator->master;
    struct stat st;
    if (coordinator->token_path)
        return dray__token_master(coordinator->token_path, master, error);
    const char *path = dray__token_path(bound, listener->path, sizeof listener->path);
    if (unlink(path) < 0 && errno != ENOENT) /* of a server that was killed */
        return dray__fail_errno(error, errno, "token file %s", path);
    int status = dray__token_draw(master, error);
    if (!status)
        status = dray__token_write(path, master, error);
    if (!status && stat(path, &st) < 0)
        status = dray__fail_errno(error, errno, "token file %s", path);
    if (!status) {
        listener->device = st.st_dev;
        listener->inode = st.st_ino;
    }
    return status;
}

/* Names the listener, with the port that was bound, and makes a TCP listener's token. */
static int on_bound(void *user, int fd, dray_error *error)
{
    dray__listener *listener = user;
    dray__address bound = {.size = sizeof bound.socket};
    struct stat st;
    if (listener->local) {
        snprintf(listener->path, sizeof listener->path, "%s", listener->text + strlen("unix:"));
        if (stat(listener->path, &st) < 0)
            return dray__fail_errno(error, errno, "%s", listener->text);
    } else {
        if (getsockname(fd, (struct sockaddr *)&bound.socket, &bound.size) < 0)
            return dray__fail_errno(error, errno, "%s: getsockname", listener->text);
        const struct sockaddr_in *v4 = (const struct sockaddr_in *)&bound.socket;
        const struct sockaddr_in6 *v6 = (const struct sockaddr_in6 *)&bound.socket;
        int port = ntohs(bound.socket.ss_family == AF_INET ? v4->sin_port : v6->sin6_port);
        char *colon = strrchr(listener->text, ':');
        snprintf(colon, sizeof listener->text - (size_t)(colon - listener->text), ":%d", port);
        return listen_with_token(listener, &bound, error);
    }
    listener->device = st.st_dev;
    listener->inode = st.st_ino;
    return DRAY_OK;
}

static void remove_file(const dray__listener *listener)
{
    struct stat st;
    if (listener->inode && lstat(listener->path, &st) == 0 && st.st_dev == listener->device &&
        st.st_ino == listener->inode)
        unlink(listener->path); /* ours still, not a later server's */
}

static int add_listener(dray__coordinator *coordinator, const char *text, dray_error *error)
{
    dray__address address;
    int status = dray__address_parse(text, &address, error);
    if (status)
        return status;
    dray__listener *listener = &coordinator->listeners[coordinator->listener_count];
    listener->coordinator = coordinator;
    listener->local = address.local;
    snprintf(listener->text, sizeof listener->text, "%s", text);
    status = dray__address_listen(&address, text, on_bound, listener, &listener->fd, error);
    if (status) {
        remove_file(listener);
        return status;
    }
    coordinator->listener_count++; /* from here on free closes it */
    listener->event =
        event_new(coordinator->base, listener->fd, EV_READ | EV_PERSIST, on_accept, listener);
    listener->resume = evtimer_new(coordinator->base, resume_accept, listener);
    if (!listener->event || !listener->resume || event_add(listener->event, NULL) < 0)
        return dray__nomem(error);
    return DRAY_OK;
}

static void free_listener(dray__listener *listener)
{
    if (listener->event)
        event_free(listener->event);
    if (listener->resume)
        event_free(listener->resume);
    remove_file(listener);
    close(listener->fd);
}

/* ---- the coordinator ------------------------------------------------------------------------- */

static int start(dray__coordinator *coordinator, const dray__coordinator_options *options,
                 dray_error *error)
{
    char text[256];
    coordinator->reaper = event_new(coordinator->base, -1, 0, reap, coordinator);
    struct timeval period = interval(coordinator->hello_ns / 2);
    coordinator->sweep = event_new(coordinator->base, -1, EV_PERSIST, sweep, coordinator);
    if (!coordinator->reaper || !coordinator->sweep ||
        (!coordinator->sessionless && event_add(coordinator->sweep, &period) < 0))
        return dray__nomem(error);
    if ((options->keeper_path && !(coordinator->keeper_path = strdup(options->keeper_path))) ||
        (options->token_path && !(coordinator->token_path = strdup(options->token_path))) ||
        (options->state_path && !(coordinator->state_path = strdup(options->state_path))))
        return dray__nomem(error);
    int status = dray__token_data(&coordinator->data, error);
    if (!status)
        status = dray__sessions_add(coordinator, error);
    if (!status && options->unix_path) {
        snprintf(text, sizeof text, "unix:%s", options->unix_path);
        status = add_listener(coordinator, text, error);
    }
    if (!status && options->tcp_address) {
        snprintf(text, sizeof text, "tcp:%s", options->tcp_address);
        status = add_listener(coordinator, text, error);
    }
    return status;
}

/* Only now: whoever finds the address taken leaves the state alone. */
static int take_state(dray__coordinator *coordinator, dray_error *error)
{
    int status = dray__token_state(coordinator->state_path, &coordinator->state,
                                   &coordinator->generation, error);
    if (!status && !dray__token_data_of(&coordinator->state, &coordinator->data))
        status = dray__nomem(error);
    if (!status)
        coordinator->members = (coordinator->generation - 1) << DRAY__GENERATION_SHIFT;
    return status;
}

int dray__coordinator_new(struct event_base *base, const dray__coordinator_options *options,
                          dray__coordinator **out, dray_error *error)
{
    if (!options->unix_path && !options->tcp_address)
        return dray__fail(error, DRAY_EINVALID, "coordinator: an address to listen at expected");
    dray__coordinator *coordinator = calloc(1, sizeof *coordinator);
    if (!coordinator)
        return dray__nomem(error);
    coordinator->base = base;
    coordinator->sessionless = options->sessionless;
    coordinator->unread_bytes = options->unread_bytes ? options->unread_bytes : UNREAD_BYTES;
    coordinator->hello_ns = options->hello_ns ? options->hello_ns : 30 * DRAY__SECOND;
    coordinator->since_ns = dray__now();
    int status = start(coordinator, options, error);
    if (!status && coordinator->state_path)
        status = take_state(coordinator, error);
    if (status)
        dray__coordinator_free(coordinator);
    else
        *out = coordinator;
    return status;
}

int dray__coordinator_add(dray__coordinator *coordinator, const dray__service *service, void *self,
                          dray_error *error)
{
    if (coordinator->service_count == DRAY__SERVICES)
        return dray__fail(error, DRAY_EFULL, "coordinator: more than %d services", DRAY__SERVICES);
    for (uint32_t i = 0; i < coordinator->service_count; i++) {
        const dray__service *other = &coordinator->services[i].service;
        if (service->first <= other->last && other->first <= service->last)
            return dray__fail(error, DRAY_EEXIST, "service %s: its messages are those of %s",
                              service->name, other->name);
    }
    coordinator->services[coordinator->service_count++] =
        (dray__registered){.service = *service, .self = self};
    return DRAY_OK;
}

/* Nobody needs to look for the next coordinator: there will be none. */
static void say_goodbye(dray__coordinator *coordinator)
{
    dray_error error;
    dray__fail(&error, DRAY_ECLOSED, "the coordinator has ended");
    for (dray__connection *c = coordinator->connections; c; c = c->next)
        if (c->session)
            send_error(c, 0, 0, &error);
    unlink(coordinator->state_path);
}

void dray__coordinator_free(dray__coordinator *coordinator)
{
    if (!coordinator)
        return;
    if (coordinator->generation)
        say_goodbye(coordinator);
    while (coordinator->sessions)
        end_session(coordinator->sessions);
    while (coordinator->connections)
        close_connection(coordinator->connections);
    for (uint32_t i = coordinator->service_count; i--;) {
        const dray__registered *r = &coordinator->services[i];
        if (r->service.free)
            r->service.free(r->self);
    }
    for (uint32_t i = 0; i < coordinator->listener_count; i++)
        free_listener(&coordinator->listeners[i]);
    if (coordinator->reaper)
        event_free(coordinator->reaper);
    if (coordinator->sweep)
        event_free(coordinator->sweep);
    dray__map_free(&coordinator->epochs);
    dray__writer_free(&coordinator->scratch);
    free(coordinator->keeper_path);
    free(coordinator->token_path);
    free(coordinator->state_path);
    dray__forget_bytes(coordinator, sizeof *coordinator);
    free(coordinator);
}

uint64_t dray__coordinator_generation(const dray__coordinator *coordinator)
{
    return coordinator->generation;
}

const char *dray__coordinator_tcp(const dray__coordinator *coordinator)
{
    for (uint32_t i = 0; i < coordinator->listener_count; i++)
        if (!coordinator->listeners[i].local)
            return coordinator->listeners[i].text;
    return NULL;
}
