/* The client's end of a connection. The socket is non-blocking; waiting is poll(2) with the
 * deadline. Requests are numbered, so that a reply that comes after its caller gave up is dropped.
 *
 * A forked child must not keep its parent's connections: the coordinator takes a closed connection
 * for a death, and a copy in a child would hide the parent's. So all channels are in one list, and
 * fork closes them in the child. */
#include "control/channel.h"

#include "base/clock.h"
#include "base/error.h"
#include "base/spin.h"
#include "control/context.h"
#include "control/frame.h"
#include "control/messages.h"
#include "control/token.h"
#include "net/address.h"

#include <errno.h>
#include <poll.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/eventfd.h>
#include <unistd.h>

enum { RETRY_MS = 50 };

struct dray__channel {
    dray__channel *next, **link; /* its place in the list of all channels */
    int fd;
    dray__tls *tls; /* NULL over a Unix socket */
    char role[64];  /* the role of the token; "" over a Unix socket */
    pid_t pid;
    char *address;
    int64_t timeout_ns; /* of dray__notify */
    uint64_t last_id;
    dray_error broken; /* why the channel is unusable; code 0 while it is usable */
    bool ended;        /* the server announced its end */
    dray__writer out;  /* the frame that is being sent, */
    size_t out_at;     /* and how many of its bytes were sent */
    dray__inbox inbox;

    /* The request of dray__call_start. When another call receives its reply, it is put aside
     * here. */
    uint64_t started; /* 0 when there is none */
    bool put_aside;
    dray__frame aside;
    uint8_t *aside_payload;
    int aside_fds[DRAY__FRAME_FDS];
    uint8_t *reply_payload; /* the payload in `aside` that call_poll last returned */

    dray__spin looks; /* how long to poll for a reply that arrives within microseconds */

    /* For callers that wait: an epoll of the socket and of an event, which is set when a reply was
     * put aside. */
    int waiting, event;
    bool waits_output, event_set;
};

/* ---- all channels of the process ------------------------------------------------------------- */

static pthread_mutex_t list_lock = PTHREAD_MUTEX_INITIALIZER;
static pthread_once_t list_once = PTHREAD_ONCE_INIT;
static dray__channel *all;

static void before_fork(void)
{
    pthread_mutex_lock(&list_lock);
}

static void after_fork(void)
{
    pthread_mutex_unlock(&list_lock);
}

static void close_descriptors(dray__channel *channel)
{
    int *fds[] = {&channel->fd, &channel->waiting, &channel->event};
    for (size_t i = 0; i < sizeof fds / sizeof *fds; i++)
        dray__close_fds(fds[i], 1);
}

/* getpid(2) without the system call, which is a hundredth of a claim. */
static atomic_int self_pid;

pid_t dray__channel_pid(void)
{
    pid_t pid = atomic_load_explicit(&self_pid, memory_order_relaxed);
    return pid ? pid : getpid();
}

static void in_child(void)
{
    atomic_store_explicit(&self_pid, getpid(), memory_order_relaxed);
    for (dray__channel *channel = all; channel; channel = channel->next)
        close_descriptors(channel);
    pthread_mutex_unlock(&list_lock);
}

static void watch_forks(void)
{
    atomic_store_explicit(&self_pid, getpid(), memory_order_relaxed);
    pthread_atfork(before_fork, after_fork, in_child);
}

static void list_add(dray__channel *channel)
{
    pthread_once(&list_once, watch_forks);
    pthread_mutex_lock(&list_lock);
    channel->next = all;
    channel->link = &all;
    if (all)
        all->link = &channel->next;
    all = channel;
    pthread_mutex_unlock(&list_lock);
}

static void list_remove(dray__channel *channel)
{
    pthread_mutex_lock(&list_lock);
    *channel->link = channel->next;
    if (channel->next)
        channel->next->link = channel->link;
    pthread_mutex_unlock(&list_lock);
}

/* ---- opening --------------------------------------------------------------------------------- */

/* Makes one attempt to connect. The channel, which is in the list, always has the socket, so that
 * no forked child keeps a copy of it. */
static int connect_once(dray__channel *channel, const dray__address *address, int64_t deadline_ns,
                        dray_error *error)
{
    pthread_mutex_lock(&list_lock);
    int status = dray__address_socket(address, channel->address, &channel->fd, error);
    pthread_mutex_unlock(&list_lock);
    if (status)
        return status;
    status = dray__address_connect_on(channel->fd, address, channel->address, deadline_ns, error);
    if (status) {
        pthread_mutex_lock(&list_lock);
        dray__close_fds(&channel->fd, 1);
        pthread_mutex_unlock(&list_lock);
    }
    return status;
}

/* Connects, and tries again while no server listens, because servers and clients start in any
 * order. With `known` it fails at once: the server was there before, so it is gone. */
static int connect_until(dray__channel *channel, bool known, int64_t deadline_ns, dray_error *error)
{
    dray__address address;
    int status = dray__address_parse(channel->address, &address, error);
    if (status)
        return status;
    for (int pause_ms = 1;; pause_ms = pause_ms < RETRY_MS ? 2 * pause_ms : RETRY_MS) {
        status = connect_once(channel, &address, deadline_ns, error);
        int left = dray__left_ms(deadline_ns);
        if ((status != DRAY_ECLOSED || known) && status != DRAY_ETIMEDOUT)
            return status;
        if (!left || dray__interrupted())
            return status;
        poll(NULL, 0, pause_ms < left ? pause_ms : left);
    }
}

/* Over TCP both sides prove that they know the token. */
static int secure(dray__channel *channel, int64_t deadline_ns, dray_error *error)
{
    dray__address address;
    dray__token token;
    int status = dray__address_parse(channel->address, &address, error);
    if (status || address.local)
        return status;
    status = dray__token_find(&address, &token, error);
    if (!status) {
        snprintf(channel->role, sizeof channel->role, "%s", dray__token_role_of(token.identity));
        status = dray__tls_connect(channel->fd, &token, &channel->tls, error);
        dray__forget_bytes(&token, sizeof token);
    }
    channel->inbox.tls = channel->tls;
    while (!status && (status = dray__tls_handshake(channel->tls, error)) == DRAY_EAGAIN) {
        struct pollfd p = {.fd = channel->fd, .events = dray__tls_events(channel->tls)};
        status = DRAY_OK;
        if (dray__wait(&p, 1, deadline_ns) == 0)
            status = dray__fail(error, DRAY_ETIMEDOUT, "no TLS handshake before the deadline");
    }
    return status ? dray__fail_prefix(error, status, "%s: ", channel->address) : DRAY_OK;
}

static int new_channel(const char *address, bool known, int64_t deadline_ns, dray__channel **out,
                       dray_error *error)
{
    dray__channel *channel = calloc(1, sizeof *channel);
    if (!channel)
        return dray__nomem(error);
    channel->fd = channel->waiting = channel->event = -1;
    channel->pid = getpid();
    channel->timeout_ns = 60 * DRAY__SECOND;
    channel->address = strdup(address);
    list_add(channel);
    int status =
        channel->address ? connect_until(channel, known, deadline_ns, error) : dray__nomem(error);
    if (!status)
        status = secure(channel, deadline_ns, error);
    if (status)
        dray__channel_close(channel);
    else
        *out = channel;
    return status;
}

int dray__channel_connect(const char *address, int64_t deadline_ns, dray__channel **out,
                          dray_error *error)
{
    return new_channel(address, false, deadline_ns, out, error);
}

int dray__channel_attach(dray_context *context, int64_t deadline_ns, dray__channel **out,
                         dray_error *error)
{
    dray__channel *channel;
    int status = new_channel(context->address, true, deadline_ns, &channel, error);
    if (status)
        return status;
    channel->timeout_ns = context->timeout_ns;
    uint8_t token[sizeof context->token];
    pthread_mutex_lock(&context->lock);
    const dray__session_claim claim = {
        .member = context->member, .token = token, .token_size = sizeof token};
    memcpy(token, context->token, sizeof token);
    pthread_mutex_unlock(&context->lock);
    status = dray__ask(channel, DRAY__MSG_ATTACH, &dray__attach_fields, &claim, deadline_ns, NULL,
                       NULL, NULL, error);
    if (status)
        dray__channel_close(channel);
    else
        *out = channel;
    return status;
}

int dray__channel_open_until(dray_context *context, int64_t deadline_ns, dray__channel **out,
                             dray_error *error)
{
    if (context->pid != getpid())
        return dray__fail(error, DRAY_ECLOSED,
                          "the context belongs to process %d, this is its fork %d", context->pid,
                          getpid());
    int status;
    while ((status = dray__channel_attach(context, deadline_ns, out, error)) == DRAY_ECLOSED) {
        bool returned;
        int went = dray__context_return_to(context, deadline_ns, &returned, error);
        if (went)
            return went;
        if (!returned || dray__now() >= deadline_ns)
            return status;
        poll(NULL, 0, 1);
    }
    return status;
}

int dray__channel_open(dray_context *context, dray__channel **out, dray_error *error)
{
    return dray__channel_open_until(context, dray__deadline(context->timeout_ns), out, error);
}

void dray__channel_close(dray__channel *channel)
{
    if (!channel)
        return;
    list_remove(channel);
    if (channel->fd >= 0) /* -1 after the connection broke, and in a forked child */
        dray__tls_goodbye(channel->tls);
    dray__tls_free(channel->tls);
    close_descriptors(channel);
    dray__inbox_free(&channel->inbox);
    dray__writer_free(&channel->out);
    if (channel->put_aside)
        dray__close_fds(channel->aside_fds, channel->aside.fd_count);
    free(channel->aside_payload);
    free(channel->reply_payload);
    free(channel->address);
    free(channel);
}

/* ---- state ----------------------------------------------------------------------------------- */

static int usable(const dray__channel *channel, dray_error *error)
{
    if (channel->pid != dray__channel_pid())
        return dray__fail(error, DRAY_ECLOSED,
                          "the connection to %s belongs to process %d, this is its fork %d",
                          channel->address, channel->pid, getpid());
    if (channel->broken.code)
        return dray__fail(error, DRAY_ECLOSED, "%s", channel->broken.message);
    return DRAY_OK;
}

const char *dray__channel_role(const dray__channel *channel)
{
    return channel->role;
}

bool dray__channel_broken(const dray__channel *channel)
{
    return usable(channel, NULL) != DRAY_OK;
}

/* Remembers the error that made the connection unusable. Later calls return the same error. */
static int break_off(dray__channel *channel, dray_error *error)
{
    char reason[DRAY_ERROR_MESSAGE_MAX];
    memcpy(reason, channel->broken.message, sizeof reason);
    dray__fail(&channel->broken, DRAY_ECLOSED, "connection to %s: %s", channel->address, reason);
    dray__close_fds(&channel->fd, 1);
    return dray__fail(error, DRAY_ECLOSED, "%s", channel->broken.message);
}

/* Makes the descriptor of dray__channel_fd poll for the present needs. */
static void update_waiting(dray__channel *channel)
{
    if (channel->waiting < 0)
        return;
    bool unsent = channel->out.size > 0;
    if (unsent != channel->waits_output && channel->fd >= 0) {
        struct epoll_event wanted = {.events = unsent ? EPOLLIN | EPOLLOUT : EPOLLIN};
        epoll_ctl(channel->waiting, EPOLL_CTL_MOD, channel->fd, &wanted);
        channel->waits_output = unsent;
    }
    /* A closed socket leaves the epoll by itself, but its end must still be noticed. */
    bool came = channel->tls && channel->started && dray__tls_pending(channel->tls);
    bool ready = channel->put_aside || channel->broken.code || came;
    if (ready != channel->event_set) {
        uint64_t count = 1;
        ssize_t n = ready ? write(channel->event, &count, sizeof count)
                          : read(channel->event, &count, sizeof count);
        (void)n;
        channel->event_set = ready;
    }
}

bool dray__channel_passes_fds(const dray__channel *channel)
{
    int domain = 0;
    socklen_t size = sizeof domain;
    return getsockopt(channel->fd, SOL_SOCKET, SO_DOMAIN, &domain, &size) == 0 && domain == AF_UNIX;
}

int dray__channel_socket(const dray__channel *channel)
{
    return channel->fd;
}

int dray__channel_fd(dray__channel *channel)
{
    if (channel->waiting >= 0 || channel->pid != dray__channel_pid())
        return channel->waiting;
    struct epoll_event input = {.events = EPOLLIN};
    channel->waiting = epoll_create1(EPOLL_CLOEXEC);
    channel->event = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
    if (channel->waiting < 0 || channel->event < 0 ||
        epoll_ctl(channel->waiting, EPOLL_CTL_ADD, channel->event, &input) < 0 ||
        (channel->fd >= 0 && epoll_ctl(channel->waiting, EPOLL_CTL_ADD, channel->fd, &input) < 0)) {
        dray__close_fds(&channel->waiting, 1);
        dray__close_fds(&channel->event, 1);
        return -1;
    }
    update_waiting(channel);
    return channel->waiting;
}

/* The server's last message explains more than the error of sending. */
static int broke_sending(dray__channel *channel, int code, dray_error *error)
{
    dray__frame frame;
    int fds[DRAY__FRAME_FDS];
    dray__fail_errno(&channel->broken, code, "sending");
    while (dray__inbox_fill(&channel->inbox, channel->fd, NULL) == DRAY_OK)
        continue;
    while (dray__inbox_take(&channel->inbox, &frame, fds, NULL) == DRAY_OK) {
        dray__close_fds(fds, frame.fd_count);
        if (frame.id == 0 && frame.flags & DRAY__FRAME_ERROR)
            dray__frame_get_error(dray__reader_of(frame.payload, frame.size), &channel->broken);
    }
    return break_off(channel, error);
}

/* ---- sending --------------------------------------------------------------------------------- */

/* Sends as much as the socket takes. Returns DRAY_EAGAIN when some of it is left. */
static int push(dray__channel *channel, const int *fds, uint32_t fd_count, dray_error *error)
{
    while (channel->out_at < channel->out.size) {
        ssize_t n = dray__link_send(channel->fd, channel->tls, channel->out.data + channel->out_at,
                                    channel->out.size - channel->out_at, fds, fd_count);
        if (n == -EAGAIN)
            return DRAY_EAGAIN;
        if (n == -ETOOMANYREFS || n == -EBADF)
            return dray__fail_errno(error, (int)-n, "passing %u descriptors to %s", fd_count,
                                    channel->address);
        if (n < 0)
            return broke_sending(channel, (int)-n, error);
        channel->out_at += (size_t)n;
        fd_count = 0;
    }
    int rest = channel->tls && channel->out.size ? dray__tls_flush(channel->tls) : 0;
    if (rest == -EAGAIN)
        return DRAY_EAGAIN;
    if (rest)
        return broke_sending(channel, -rest, error);
    dray__writer_reset(&channel->out);
    channel->out_at = 0;
    return DRAY_OK;
}

static int fill(dray__channel *channel, dray_error *error)
{
    int status = dray__inbox_fill(&channel->inbox, channel->fd, &channel->broken);
    if (status == DRAY_OK || status == DRAY_EAGAIN)
        return status;
    return break_off(channel, error);
}

/* Polls for a short time for a reply that arrives at once. Returns DRAY_EAGAIN when none did. */
static int look(dray__channel *channel, int64_t deadline_ns, dray_error *error)
{
    int status;
    if (!dray__spin_begin(&channel->looks, deadline_ns))
        return DRAY_EAGAIN;
    do
        status = fill(channel, error);
    while (status == DRAY_EAGAIN && dray__spin_again(&channel->looks));
    dray__spin_end(&channel->looks, status == DRAY_EAGAIN ? 0 : dray__now());
    return status;
}

/* Waits until the socket takes more of the unsent bytes, or has something to read. It reads in
 * any case, so that two full buffers never wait for each other. */
static int wait_for(dray__channel *channel, int64_t deadline_ns, dray_error *error)
{
    if (channel->tls && dray__tls_pending(channel->tls)) {
        int status = fill(channel, error);
        if (status != DRAY_EAGAIN)
            return status;
    }
    bool unsent = channel->out.size > 0;
    if (!unsent && !channel->tls) {
        int status = look(channel, deadline_ns, error);
        if (status != DRAY_EAGAIN)
            return status;
    }
    struct pollfd p = {.fd = channel->fd, .events = unsent ? POLLIN | POLLOUT : POLLIN};
    int ready = dray__wait(&p, 1, deadline_ns);
    if (ready < 0) {
        dray__fail_errno(&channel->broken, errno, "poll");
        return break_off(channel, error);
    }
    if (ready == 0)
        return DRAY_ETIMEDOUT;
    if (ready > 0 && (p.revents & ~POLLOUT)) {
        int status = fill(channel, error);
        return status == DRAY_EAGAIN ? DRAY_OK : status;
    }
    return DRAY_OK;
}

static int timed_out(const dray__channel *channel, uint16_t type, dray_error *error)
{
    return dray__fail(error, DRAY_ETIMEDOUT, "%s: no answer from %s before the deadline",
                      dray__message_name(type), channel->address);
}

/* Finishes a frame that an earlier call had to leave unfinished. */
static int push_rest(dray__channel *channel, uint16_t type, int64_t deadline_ns, dray_error *error)
{
    int status;
    while ((status = push(channel, NULL, 0, error)) == DRAY_EAGAIN) {
        status = wait_for(channel, deadline_ns, error);
        if (status)
            return status == DRAY_ETIMEDOUT ? timed_out(channel, type, error) : status;
    }
    return status;
}

static int prepare(dray__channel *channel, uint16_t type, dray__writer *payload, uint32_t fd_count,
                   uint64_t id, dray_error *error)
{
    if (payload && payload->size > DRAY__FRAME_MAX)
        return dray__fail(error, DRAY_EINVALID, "message %s: %zu bytes, at most %u expected",
                          dray__message_name(type), payload->size, DRAY__FRAME_MAX);
    if (fd_count && strncmp(channel->address, "unix:", 5) != 0)
        return dray__fail(error, DRAY_EUNSUPPORTED,
                          "message %s: descriptors pass over Unix sockets only, not %s",
                          dray__message_name(type), channel->address);
    if (payload && payload->failed)
        return dray__nomem(error);
    dray__frame frame = {.type = type,
                         .id = id,
                         .fd_count = (uint16_t)(fd_count > UINT16_MAX ? UINT16_MAX : fd_count),
                         .payload = payload ? payload->data : NULL,
                         .size = payload ? (uint32_t)payload->size : 0};
    int status = dray__frame_put(&channel->out, &frame, error);
    if (status)
        dray__writer_reset(&channel->out);
    return status;
}

/* Sends a request. At the deadline, a frame that was not begun is taken back. A frame that was
 * begun is finished by the next call. */
static int send_request(dray__channel *channel, uint16_t type, dray__writer *payload,
                        const int *fds, uint32_t fd_count, int64_t deadline_ns, uint64_t id,
                        dray_error *error)
{
    int status = push_rest(channel, type, deadline_ns, error);
    if (!status)
        status = prepare(channel, type, payload, fd_count, id, error);
    while (!status && channel->out.size) {
        uint32_t with = channel->out_at ? 0 : fd_count;
        status = push(channel, fds, with, error);
        if (status == DRAY_EAGAIN)
            status = wait_for(channel, deadline_ns, error);
    }
    if (status && !channel->out_at)
        dray__writer_reset(&channel->out);
    return status == DRAY_ETIMEDOUT ? timed_out(channel, type, error) : status;
}

/* ---- receiving ------------------------------------------------------------------------------- */

static int put_aside(dray__channel *channel, const dray__frame *frame, int *fds, dray_error *error)
{
    channel->aside_payload = malloc(frame->size + 1u);
    if (!channel->aside_payload) {
        dray__close_fds(fds, frame->fd_count);
        dray__nomem(&channel->broken);
        return break_off(channel, error);
    }
    if (frame->size)
        memcpy(channel->aside_payload, frame->payload, frame->size);
    channel->aside = *frame;
    memcpy(channel->aside_fds, fds, sizeof(int) * frame->fd_count);
    channel->put_aside = true;
    return DRAY_OK;
}

/* Takes the reply to `id` from the bytes that have arrived. Other replies are put aside or dropped.
 * Returns DRAY_EAGAIN when it has not arrived. */
static int take(dray__channel *channel, uint64_t id, dray__frame *frame, int *fds,
                dray_error *error)
{
    for (;;) {
        int status = dray__inbox_take(&channel->inbox, frame, fds, &channel->broken);
        if (status == DRAY_EAGAIN)
            return status;
        if (!status && frame->id == 0) { /* The server's reason for closing the connection. */
            dray__frame_get_error(dray__reader_of(frame->payload, frame->size), &channel->broken);
            channel->ended = channel->broken.code == DRAY_ECLOSED;
            dray__close_fds(fds, frame->fd_count);
            status = DRAY_EPROTO;
        }
        if (!status && !(frame->flags & DRAY__FRAME_REPLY)) {
            dray__close_fds(fds, frame->fd_count);
            status = dray__fail(&channel->broken, DRAY_EPROTO, "a reply expected");
        }
        if (status)
            return break_off(channel, error);
        if (frame->id == id)
            return DRAY_OK;
        if (frame->id != channel->started || channel->put_aside)
            dray__close_fds(fds, frame->fd_count);
        else if ((status = put_aside(channel, frame, fds, error)))
            return status;
    }
}

/* The reply to a started request may have arrived together with this reply, and a caller that
 * waits on dray__channel_fd must notice it. This reads nothing, so the reply's payload stays
 * where it is. */
static void look_behind(dray__channel *channel)
{
    dray__frame frame;
    int fds[DRAY__FRAME_FDS];
    if (channel->started && !channel->put_aside)
        take(channel, UINT64_MAX, &frame, fds, NULL);
}

static int deliver(const dray__frame *frame, int *fds, dray__reply *reply, dray_error *error)
{
    if (frame->flags & DRAY__FRAME_ERROR) {
        dray_error told;
        dray__frame_get_error(dray__reader_of(frame->payload, frame->size), &told);
        dray__close_fds(fds, frame->fd_count);
        if (error)
            *error = told;
        return told.code;
    }
    if (!reply) {
        dray__close_fds(fds, frame->fd_count);
        return DRAY_OK;
    }
    reply->payload = dray__reader_of(frame->payload, frame->size);
    reply->fd_count = frame->fd_count;
    memcpy(reply->fds, fds, sizeof(int) * frame->fd_count);
    return DRAY_OK;
}

bool dray__channel_alive(dray__channel *channel)
{
    dray__frame frame;
    int fds[DRAY__FRAME_FDS], status = usable(channel, NULL);
    while (!status)
        status = fill(channel, NULL);
    /* The server's last message explains more than the error of the connection. */
    if (channel->pid == getpid() && (!channel->broken.code || !channel->ended)) {
        int taken = take(channel, UINT64_MAX, &frame, fds, NULL);
        status = status == DRAY_EAGAIN ? taken : status;
    }
    update_waiting(channel);
    return status == DRAY_EAGAIN;
}

bool dray__channel_ended(const dray__channel *channel)
{
    return channel->ended;
}

/* ---- calls ----------------------------------------------------------------------------------- */

int dray__call(dray__channel *channel, uint16_t type, dray__writer *payload, const int *fds,
               uint32_t fd_count, int64_t deadline_ns, dray__reply *reply, dray_error *error)
{
    dray__frame frame;
    int got[DRAY__FRAME_FDS];
    int status = usable(channel, error);
    uint64_t id = 0;
    if (!status) {
        id = ++channel->last_id;
        status = send_request(channel, type, payload, fds, fd_count, deadline_ns, id, error);
    }
    if (payload)
        dray__writer_reset(payload);
    if (status) {
        update_waiting(channel);
        return status;
    }
    while ((status = take(channel, id, &frame, got, error)) == DRAY_EAGAIN) {
        status = wait_for(channel, deadline_ns, error);
        if (status == DRAY_ETIMEDOUT)
            status = timed_out(channel, type, error);
        if (status)
            break;
    }
    if (!status)
        look_behind(channel);
    update_waiting(channel);
    return status ? status : deliver(&frame, got, reply, error);
}

int dray__ask(dray__channel *channel, uint16_t type, const dray__fields *of, const void *message,
              int64_t deadline_ns, dray__arena *texts, const dray__fields *answer_of, void *answer,
              dray_error *error)
{
    dray__writer w = {0};
    dray__reply reply;
    dray__put_fields(&w, of, message);
    int rc = dray__call(channel, type, &w, NULL, 0, deadline_ns, answer_of ? &reply : NULL, error);
    dray__writer_free(&w);
    if (rc || !answer_of)
        return rc;
    dray__close_fds(reply.fds, reply.fd_count); /* The reply to such a request is never expected. */
    dray__get_fields(&reply.payload, texts, answer_of, answer);
    return dray__reader_finish(&reply.payload, dray__message_name(type), error);
}

int dray__ask_start(dray__channel *channel, uint16_t type, const dray__fields *of,
                    const void *message, dray_error *error)
{
    dray__writer w = {0};
    dray__put_fields(&w, of, message);
    int rc = dray__call_start(channel, type, &w, NULL, 0, error);
    dray__writer_free(&w);
    return rc;
}

void dray__tell(dray__channel *channel, uint16_t type, const dray__fields *of, const void *message)
{
    dray__writer w = {0};
    dray__put_fields(&w, of, message);
    dray__notify(channel, type, &w, NULL);
    dray__writer_free(&w);
}

int dray__call_start(dray__channel *channel, uint16_t type, dray__writer *payload, const int *fds,
                     uint32_t fd_count, dray_error *error)
{
    int status = usable(channel, error);
    if (!status && channel->started)
        status = dray__fail(error, DRAY_EBUSY, "%s: a started request has no answer yet",
                            dray__message_name(type));
    if (!status)
        status = push(channel, NULL, 0, error);
    if (!status)
        status = prepare(channel, type, payload, fd_count, channel->last_id + 1, error);
    bool prepared = !status; /* otherwise the frame in `out` is that of an earlier call */
    if (prepared)
        status = push(channel, fds, fd_count, error);
    if (prepared && status == DRAY_EAGAIN && channel->out_at)
        status = DRAY_OK; /* call_poll sends the rest. */
    if (status && !channel->out_at)
        dray__writer_reset(&channel->out);
    if (status == DRAY_EAGAIN)
        dray__fail(error, status, "%s: %s takes nothing now", dray__message_name(type),
                   channel->address);
    if (!status)
        channel->started = ++channel->last_id;
    if (payload)
        dray__writer_reset(payload);
    update_waiting(channel);
    return status;
}

static int take_started(dray__channel *channel, dray__frame *frame, int *fds, dray_error *error)
{
    int status = channel->put_aside ? DRAY_OK : usable(channel, error);
    if (!status && !channel->put_aside) {
        status = push(channel, NULL, 0, error);
        if (status == DRAY_EAGAIN)
            status = DRAY_OK;
        while (!status &&
               (status = take(channel, channel->started, frame, fds, error)) == DRAY_EAGAIN) {
            status = fill(channel, error);
            if (status)
                return status;
        }
        return status;
    }
    if (status)
        return status;
    *frame = channel->aside;
    frame->payload = channel->reply_payload = channel->aside_payload;
    channel->aside_payload = NULL;
    memcpy(fds, channel->aside_fds, sizeof(int) * frame->fd_count);
    channel->put_aside = false;
    return DRAY_OK;
}

int dray__call_poll(dray__channel *channel, dray__reply *reply, dray_error *error)
{
    if (!channel->started)
        return dray__fail(error, DRAY_EINVALID, "no request was started");
    dray__frame frame;
    int fds[DRAY__FRAME_FDS];
    free(channel->reply_payload);
    channel->reply_payload = NULL;
    int status = take_started(channel, &frame, fds, error);
    if (status == DRAY_EAGAIN) {
        update_waiting(channel);
        return dray__fail(error, status, "no answer yet");
    }
    channel->started = 0;
    update_waiting(channel);
    return status ? status : deliver(&frame, fds, reply, error);
}

int dray__notify(dray__channel *channel, uint16_t type, dray__writer *payload, dray_error *error)
{
    int status = usable(channel, error);
    if (!status)
        status = send_request(channel, type, payload, NULL, 0, dray__deadline(channel->timeout_ns),
                              0, error);
    if (payload)
        dray__writer_reset(payload);
    update_waiting(channel);
    return status;
}

int64_t dray__context_deadline(const dray_context *context, int64_t timeout_ns)
{
    return dray__deadline(timeout_ns == DRAY_WAIT_DEFAULT ? context->timeout_ns : timeout_ns);
}

int64_t dray__answer_deadline(int64_t deadline_ns)
{
    int64_t now = dray__now(), from = deadline_ns > now ? deadline_ns : now;
    return from > INT64_MAX - DRAY__SECOND ? INT64_MAX : from + DRAY__SECOND;
}
