/* The coordinator: its sockets, its parts, and the state that the next one needs. Connections are
 * in connection.c, requests in request.c. */
#include "control/coordinator.h"

#include "base/clock.h"
#include "base/error.h"
#include "control/internal.h"
#include "net/address.h"

#include <errno.h>
#include <event2/event.h>
#include <netinet/in.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/un.h>
#include <unistd.h>

enum {
    UNREAD_BYTES = 128 << 20,  /* default of options.unread_bytes */
    ACCEPT_PAUSE_NS = 50000000 /* pause of accepting when no descriptors are left */
};

#define HANDSHAKE_NS (DRAY__CALLERS_PATIENCE_S * DRAY__SECOND) /* for TLS and HELLO */

/* ---- listening ------------------------------------------------------------------------------- */

static void on_accept(evutil_socket_t fd, short what, void *user)
{
    (void)what;
    dray__listener *listener = user;
    for (;;) {
        int peer = accept4(fd, NULL, NULL, SOCK_NONBLOCK | SOCK_CLOEXEC);
        if (peer >= 0) {
            dray__connection_add(listener, peer);
            continue;
        }
        if (errno == EINTR || errno == ECONNABORTED)
            continue;
        if (errno != EAGAIN && errno != EWOULDBLOCK) {
            if (errno == EMFILE || errno == ENFILE)
                dray__callers_make_room(&listener->callers);
            /* On EMFILE and similar errors the connection stays in the backlog. A pause keeps the
             * loop from spinning. */
            struct timeval pause = dray__interval(ACCEPT_PAUSE_NS);
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

/* Listens only after the master token exists, so that no client connects before. */
static int listen_with_token(dray__listener *listener, const dray__address *bound,
                             dray_error *error)
{
    dray__coordinator *coordinator = listener->coordinator;
    dray__token *master = &coordinator->master;
    struct stat st;
    if (coordinator->token_path)
        return dray__token_master(coordinator->token_path, master, error);
    const char *path = listener->path;
    if (!dray__token_path(bound, listener->path, sizeof listener->path))
        return dray__fail(error, DRAY_ENOENT,
                          "%s: no place for its token: set $XDG_RUNTIME_DIR, or name a file of the "
                          "master token (dray serve --master FILE)",
                          listener->text);
    if (unlink(path) < 0 && errno != ENOENT) /* the socket of a server that was killed */
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
        unlink(listener->path); /* still ours, not a later server's */
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
    bool strict = !address.local && coordinator->hello_ns > HANDSHAKE_NS;
    dray__callers_init(&listener->callers, "control",
                       coordinator->sessionless ? DRAY__CALLERS_PART_SOME : DRAY__CALLERS_PART_MANY,
                       strict ? HANDSHAKE_NS : coordinator->hello_ns, dray__connection_doom,
                       listener);
    snprintf(listener->text, sizeof listener->text, "%s", text);
    status = dray__address_listen(&address, text, on_bound, listener, &listener->fd, error);
    if (status) {
        remove_file(listener);
        return status;
    }
    coordinator->listener_count++; /* from here on dray__coordinator_free closes it */
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
    coordinator->reaper = event_new(coordinator->base, -1, 0, dray__reap, coordinator);
    int64_t half_ns = coordinator->hello_ns / 2;
    struct timeval period = dray__interval(half_ns < DRAY__SECOND ? half_ns : DRAY__SECOND);
    coordinator->sweep =
        event_new(coordinator->base, -1, EV_PERSIST, dray__sweep_strangers, coordinator);
    if (!coordinator->reaper || !coordinator->sweep || event_add(coordinator->sweep, &period) < 0)
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

/* Reads the state. It is called after listening, so that a coordinator that finds the address taken
 * does not change the state. */
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
    int status = dray__limits_parse(options->limits, &coordinator->limits, error);
    if (!status)
        status = start(coordinator, options, error);
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

/* Tells clients that this coordinator has no successor, so that they do not wait for one. */
static void say_goodbye(dray__coordinator *coordinator)
{
    dray_error error;
    dray__fail(&error, DRAY_ECLOSED, "the coordinator has ended");
    for (dray__connection *c = coordinator->connections; c; c = c->next)
        if (c->session)
            dray__connection_fail(c, 0, 0, &error);
    unlink(coordinator->state_path);
}

void dray__coordinator_free(dray__coordinator *coordinator)
{
    if (!coordinator)
        return;
    if (coordinator->generation)
        say_goodbye(coordinator);
    while (coordinator->sessions)
        dray__session_end(coordinator->sessions);
    while (coordinator->connections)
        dray__connection_close(coordinator->connections);
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

void dray__coordinator_give_up(dray__coordinator *coordinator)
{
    if (coordinator && coordinator->generation > 1)
        coordinator->generation = 0; /* no member is told of an end */
    dray__coordinator_free(coordinator);
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
