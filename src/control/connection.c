/* Connections: reading frames, handing them to services, sending replies, and closing connections
 * that have ended. Nothing is closed or freed inside a service's callback: a connection that must
 * go is marked as doomed, and the reaper closes it from the loop. */
#include "base/error.h"
#include "base/log.h"
#include "control/internal.h"

#include <errno.h>
#include <event2/event.h>
#include <fcntl.h>
#include <netinet/in.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <unistd.h>

enum {
    KEPT_REQUESTS = 4096,   /* the most unanswered requests of one connection, */
    KEPT_BYTES = 256 << 20, /* and the most bytes of their payloads */
    /* The most bytes of a message over TCP before the sender has proven its identity. */
    STRANGER_BYTES = 4 << 10
};

struct timeval dray__interval(int64_t ns)
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

/* Sends the bytes that TLS has produced and the socket has not taken yet. Returns true when none
 * are left. */
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

/* Keeps the frame that could not be sent. The caller keeps its descriptors: these are copies. */
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
    /* One frame of any size may always wait. */
    if (connection->out && connection->out_bytes + size > connection->coordinator->unread_bytes) {
        dray__log(DRAY_LOG_WARN, "control: closing a connection that leaves %zu bytes unread",
                  connection->out_bytes + size);
        doom(connection);
    } else if (enqueue(connection, data, size, fds, fd_count) < 0) {
        doom(connection);
    }
}

void dray__connection_send(dray__connection *connection, dray__frame *frame, const int *fds)
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

void dray__connection_fail(dray__connection *connection, uint16_t type, uint64_t id,
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
        dray__connection_send(connection, &frame, NULL);
    dray__writer_free(&payload);
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
            dray__connection_fail(connection, frame->type, frame->id, &error);
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
    if (!registered->service.handlers)
        registered->service.handle(registered->self, request);
    else if (dray__request_handle(request, registered->service.handlers, registered->self, &error))
        dray__request_fail(request, &error);
    connection->caller.busy = connection->session; /* closing it would end the session */
    if (connection->session || connection->coordinator->sessionless)
        dray__callers_heard(&connection->listener->callers, &connection->caller);
}

/* The stream cannot be read any further. Sends the reason, as far as the socket takes it, and
 * closes the connection. */
static void give_up(dray__connection *connection, const dray__frame *frame, const dray_error *error)
{
    dray__log(DRAY_LOG_WARN, "control: closing a connection: %s", error->message);
    dray__connection_fail(connection, frame->type, frame->id, error);
    doom(connection);
}

static bool find_key(void *user, dray__tls_key *key)
{
    const dray__connection *connection = user;
    return dray__token_answer(&connection->coordinator->master, key);
}

/* Over TCP nothing is read before the other side has proven its identity. Returns true when it
 * has. */
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
    /* TLS has read further than this. The connection goes on after the turn of the others. */
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

/* Calls `expired` of the services for each request that the connection still waits for, and frees
 * it. */
void dray__connection_close(dray__connection *connection)
{
    dray__coordinator *coordinator = connection->coordinator;
    while (connection->requests) {
        dray__request *request = connection->requests;
        dray__request_unlink(request);
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
    dray__callers_leave(&connection->listener->callers, &connection->caller);
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

void dray__session_end(dray__session *session)
{
    dray__coordinator *coordinator = session->coordinator;
    session->ended = true;
    for (dray__connection *c = coordinator->connections, *next; c; c = next) {
        next = c->next;
        if (c->session == session)
            dray__connection_close(c);
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

/* Callbacks of services may doom further connections, so the search begins again each time. */
void dray__reap(evutil_socket_t fd, short what, void *user)
{
    (void)fd, (void)what;
    dray__connection *connection;
    while ((connection = find_doomed(user))) {
        if (connection->session && connection->session->first == connection)
            dray__session_end(connection->session);
        else
            dray__connection_close(connection);
    }
}

void dray__sweep_strangers(evutil_socket_t fd, short what, void *user)
{
    (void)fd, (void)what;
    dray__coordinator *coordinator = user;
    for (uint32_t i = 0; i < coordinator->listener_count; i++)
        dray__callers_sweep(&coordinator->listeners[i].callers);
}

void dray__connection_doom(void *listener, dray__caller *caller)
{
    (void)listener;
    doom(caller->owner);
}

/* Only the user who runs the coordinator, and root, may connect to it over a Unix socket. */
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

/* Makes the descriptors that a connection needs. Returns -1 when it cannot be served. */
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

/* Sends the reason to a connection that is refused, as far as the socket takes it. */
static void refuse(dray__coordinator *coordinator, int fd)
{
    dray_error error;
    dray__writer payload = {0};
    dray__writer_reset(&coordinator->scratch);
    dray__fail_errno(&error, EMFILE, "coordinator: the largest number of connections is reached");
    dray__frame_put_error(&payload, &error);
    dray__frame frame = {.flags = DRAY__FRAME_REPLY | DRAY__FRAME_ERROR,
                         .payload = payload.data,
                         .size = (uint32_t)payload.size};
    if (!payload.failed && dray__frame_put(&coordinator->scratch, &frame, NULL) == DRAY_OK)
        dray__frame_send(fd, coordinator->scratch.data, coordinator->scratch.size, NULL, 0);
    dray__writer_free(&payload);
}

void dray__connection_add(dray__listener *listener, int fd)
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
    connection->listener = listener;
    connection->out_last = &connection->out;
    bool room = dray__callers_enter(&listener->callers, &connection->caller, connection);
    if (!room && listener->local)
        refuse(coordinator, fd);
    if (!room || prepare(connection) < 0) {
        dray__callers_leave(&listener->callers, &connection->caller);
        free_connection(connection);
        return;
    }
    connection->next = coordinator->connections;
    coordinator->connections = connection;
}
