/* The data server (server.h): one thread, an epoll, a state for each connection. A request is read,
 * its answer is put into a buffer and sent, and only then is the next one read, except for requests
 * that the service takes. So a reader that does not receive its answers holds only one buffer and
 * its own socket, one with many requests waits for its turn, and no client can make the server's
 * memory grow past its limit. */
#include "net/server.h"

#include "base/clock.h"
#include "base/error.h"
#include "base/log.h"
#include "base/thread.h"

#include <errno.h>
#include <poll.h>
#include <stdlib.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/eventfd.h>
#include <unistd.h>

enum { BUFFERS_MAX = 64, EVENTS = 64, TICK_MS = 1000 };
#define STUCK_NS (30 * DRAY__SECOND) /* in the middle of a request or an answer */

struct connection {
    /* The service's view of the connection; it must be the first member. */
    dray__data_reader reader;
    dray__caller caller;
    /* The header and body of the request that is being read, and then the next header. */
    uint8_t *in;
    size_t in_have;
    uint64_t out_at;
    /* The bytes of the next header that were read after a request that waits in line. */
    size_t ahead;
    /* `full`: a whole request has arrived; `answering`: its answer is being sent. */
    bool full, answering;
    int64_t moved_ns, began_ns; /* when the request that is being read began */
    int fd;                     /* the epoll watches it for `events` */
    short events;
};

struct dray__server {
    dray__thread thread;
    pid_t pid;
    int listener, poll, stop, wake;
    char endpoint[DRAY__STREAM_ADDRESS];
    dray__data_reader *readers;
    /* The work of one connection may end another one (dray__callers_heard), which must then be
     * left out where the thread would come to it: */
    struct epoll_event events[EVENTS]; /* of the present batch, */
    int event_count;
    dray__data_reader *next; /* and of the pass over all connections */
    dray__callers callers;
    dray_region *buffers[BUFFERS_MAX]; /* free ones */
    uint32_t free_buffers, made_buffers;
    const dray__stream_keys *keys;
    dray__data_service service;
    bool deaf; /* Descriptors ran out: the listener is not watched until the next tick. */
};

static struct connection *connection_of(dray__data_reader *reader)
{
    return (struct connection *)reader;
}

/* ---- connections ----------------------------------------------------------------------------- */

static void give_buffer(dray__server *s, dray_region *buffer)
{
    if (buffer)
        s->buffers[s->free_buffers++] = buffer;
}

bool dray__server_buffer(dray__data_reader *r)
{
    dray__server *s = r->server;
    if (s->free_buffers) {
        r->data = s->buffers[--s->free_buffers];
        return true;
    }
    if (s->made_buffers == BUFFERS_MAX ||
        dray_region_alloc(DRAY_REGION_HOST, DRAY__DATA_MAX, "answer", &r->data, NULL))
        return false;
    s->made_buffers++;
    return true;
}

static void end(dray__server *s, struct connection *c)
{
    dray__data_reader *r = &c->reader;
    for (int i = 0; i < s->event_count; i++)
        if (s->events[i].data.ptr == c)
            s->events[i].data.ptr = NULL;
    if (s->next == r)
        s->next = r->next;
    *r->link = r->next;
    if (r->next)
        r->next->link = r->link;
    dray__callers_leave(&s->callers, &c->caller);
    give_buffer(s, r->data);
    if (s->service.end)
        s->service.end(s->service.user, r);
    dray__stream_close(r->stream); /* Closing the descriptor removes it from the epoll. */
    dray__writer_free(&r->head);
    free(r->state);
    free(c->in);
    free(c);
}

static void end_caller(void *server, dray__caller *caller)
{
    end(server, caller->owner);
}

static void begin(dray__server *s, dray__stream *stream)
{
    struct connection *c = calloc(1, sizeof *c);
    uint8_t *in = malloc(2 * DRAY__REQUEST_HEADER + DRAY__REQUEST_MAX);
    void *state = calloc(1, s->service.state_bytes + 1);
    struct epoll_event event = {.events = EPOLLIN, .data.ptr = c};
    bool entered = c && in && state && dray__callers_enter(&s->callers, &c->caller, c);
    if (!entered || epoll_ctl(s->poll, EPOLL_CTL_ADD, dray__stream_fd(stream), &event)) {
        if (entered)
            dray__callers_leave(&s->callers, &c->caller);
        dray__stream_close(stream);
        free(state);
        free(in);
        free(c);
        return;
    }
    c->reader = (dray__data_reader){
        .next = s->readers, .link = &s->readers, .server = s, .stream = stream, .state = state};
    c->in = in;
    c->fd = dray__stream_fd(stream);
    c->events = POLLIN;
    c->moved_ns = dray__now();
    if (s->readers)
        s->readers->link = &c->reader.next;
    s->readers = &c->reader;
}

static void accept_all(dray__server *s)
{
    dray__stream *stream;
    int rc;
    while ((rc = dray__stream_accept(s->listener, s->keys, &stream, NULL)) == DRAY_OK)
        begin(s, stream);
    /* The new connection stays in the backlog, so the listener stays readable. The loop must not
     * spin on it. */
    if (rc != DRAY_EAGAIN)
        dray__callers_make_room(&s->callers);
    if (rc != DRAY_EAGAIN && epoll_ctl(s->poll, EPOLL_CTL_DEL, s->listener, NULL) == 0)
        s->deaf = true;
}

/* ---- one request ----------------------------------------------------------------------------- */

/* The functions below return 0 to go on, -EAGAIN when they have to wait, or another -errno when
 * the connection is over. */

static int take_told(const dray__server *s, struct connection *c, const dray__data_request *told)
{
    c->moved_ns = dray__now();
    return s->service.told ? s->service.told(s->service.user, &c->reader, told) : -EPROTO;
}

/* Reads messages that need no answer while a request waits in line. */
static int read_ahead(const dray__server *s, struct connection *c)
{
    uint8_t *next = c->in + c->in_have;
    dray__data_request request;
    while (c->ahead < DRAY__REQUEST_HEADER) {
        ssize_t n =
            dray__stream_recv(c->reader.stream, next + c->ahead, DRAY__REQUEST_HEADER - c->ahead);
        if (n <= 0)
            return n ? (int)n : -ECONNRESET;
        c->ahead += (size_t)n;
        if (c->ahead < DRAY__REQUEST_HEADER)
            continue;
        if (dray__request_get(next, &request, NULL))
            return -EPROTO;
        if (dray__request_asks(request.type))
            break; /* It is handled in its turn. */
        int rc = take_told(s, c, &request);
        if (rc)
            return rc;
        c->ahead = 0;
    }
    return -EAGAIN;
}

static int receive(const dray__server *s, struct connection *c)
{
    dray__data_request *request = &c->reader.request;
    while (!c->full) {
        size_t need = DRAY__REQUEST_HEADER;
        if (c->in_have >= need) {
            if (dray__request_get(c->in, request, NULL))
                return -EPROTO;
            need += request->body_bytes;
        }
        c->full = c->in_have == need && need > DRAY__REQUEST_HEADER;
        if (c->full)
            break;
        if (c->in_have == need) { /* The whole message has arrived, and it needs no answer. */
            int rc = take_told(s, c, request);
            if (rc)
                return rc;
            c->in_have = 0;
            continue;
        }
        ssize_t n = dray__stream_recv(c->reader.stream, c->in + c->in_have, need - c->in_have);
        if (n <= 0)
            return n ? (int)n : -ECONNRESET;
        c->moved_ns = dray__now();
        if (!c->in_have)
            c->began_ns = c->moved_ns;
        c->in_have += (size_t)n;
    }
    c->reader.body = c->in + DRAY__REQUEST_HEADER;
    return 0;
}

/* Makes room for the next request. */
static void drop_request(struct connection *c)
{
    c->full = false;
    memmove(c->in, c->in + c->in_have, c->ahead);
    c->in_have = c->ahead;
    c->ahead = 0;
    c->moved_ns = c->began_ns = dray__now();
}

static int begin_answer(struct connection *c)
{
    if (c->reader.head.failed)
        return -ENOMEM;
    c->answering = true;
    c->out_at = 0;
    c->moved_ns = dray__now();
    return 0;
}

static void reset_answer(dray__data_reader *r)
{
    dray__writer_reset(&r->head);
    r->data_bytes = 0;
}

static int answer(const dray__server *s, struct connection *c)
{
    dray__data_reader *r = &c->reader;
    reset_answer(r);
    r->waits = DRAY__WAITS_FOR_BUFFER;
    int rc = s->service.answer(s->service.user, r);
    if (rc == -ENOTSUP) {
        dray_error error;
        dray__fail(&error, DRAY_EUNSUPPORTED, "requests of type %u are not answered here",
                   r->request.type);
        dray__answer_refuse(&r->head, r->request.id, &error);
        rc = 0;
    }
    if (rc == 0)
        rc = begin_answer(c);
    if (rc == 0 || rc == -EINPROGRESS)
        drop_request(c);
    if (rc != -EINPROGRESS)
        return rc;
    r->taken++;
    return 0;
}

/* Sends the answer of the oldest request that the service took, if it is ready. */
static int answer_taken(const dray__server *s, struct connection *c)
{
    dray__data_reader *r = &c->reader;
    if (!r->taken || c->answering)
        return 0;
    reset_answer(r);
    int rc = s->service.later(s->service.user, r);
    if (rc == -EAGAIN)
        return 0;
    r->taken--;
    return rc ? rc : begin_answer(c);
}

static int transmit(dray__server *s, struct connection *c)
{
    dray__data_reader *r = &c->reader;
    uint64_t end_at = r->head.size + r->data_bytes;
    while (c->out_at < end_at) {
        bool in_head = c->out_at < r->head.size;
        const uint8_t *from =
            in_head ? r->head.data + c->out_at
                    : (uint8_t *)dray_region_base(r->data) + (c->out_at - r->head.size);
        size_t size = (size_t)((in_head ? r->head.size : end_at) - c->out_at);
        ssize_t n = dray__stream_send(r->stream, from, size, in_head && r->data_bytes);
        if (n < 0)
            return (int)n;
        c->out_at += (uint64_t)n;
        c->moved_ns = dray__now();
    }
    give_buffer(s, r->data);
    r->data = NULL;
    c->answering = false;
    return 0;
}

/* Handles at most one request, so that every connection gets its turn. */
static int work(dray__server *s, struct connection *c)
{
    int rc = c->answering ? transmit(s, c) : 0;
    if (rc == 0)
        rc = answer_taken(s, c);
    if (rc == 0 && !c->answering)
        rc = receive(s, c);
    if (rc == 0 && c->full) {
        dray__callers_heard(&s->callers, &c->caller);
        rc = answer(s, c);
        if (rc == -EAGAIN && c->reader.waits == DRAY__WAITS_IN_LINE)
            rc = read_ahead(s, c);
    }
    if (rc == 0 && c->answering)
        rc = transmit(s, c);
    if (rc == 0 || rc == -EAGAIN) {
        int flushed = dray__stream_flush(c->reader.stream);
        return flushed == -EAGAIN ? 0 : flushed;
    }
    return rc;
}

/* The events that the connection waits for. */
static bool arm(const dray__server *s, struct connection *c)
{
    const int waits = c->reader.waits;
    bool later = c->full && (waits == DRAY__WAITS_FOR_BUFFER ||
                             (waits == DRAY__WAITS_IN_LINE && c->ahead == DRAY__REQUEST_HEADER));
    short events = dray__stream_events(c->reader.stream, c->answering ? POLLOUT
                                                         : later      ? 0
                                                                      : POLLIN);
    int fd = dray__stream_fd(c->reader.stream);
    if (events == c->events && fd == c->fd)
        return true;
    struct epoll_event event = {.events = (uint32_t)events, .data.ptr = c};
    if (fd != c->fd)
        epoll_ctl(s->poll, EPOLL_CTL_DEL, c->fd, NULL);
    if (epoll_ctl(s->poll, fd == c->fd ? EPOLL_CTL_MOD : EPOLL_CTL_ADD, fd, &event))
        return false;
    c->fd = fd;
    c->events = events;
    return true;
}

static bool enter(const dray__server *s, const dray__data_reader *r)
{
    return !s->service.enter || s->service.enter(r);
}

static void leave(const dray__server *s)
{
    if (s->service.leave)
        s->service.leave();
}

static void turn(dray__server *s, struct connection *c)
{
    bool ends = true;
    if (enter(s, &c->reader)) {
        ends = work(s, c) || !arm(s, c);
        c->caller.busy = c->full || c->answering || c->reader.taken;
        leave(s);
    }
    if (ends)
        end(s, c);
}

/* ---- the thread ------------------------------------------------------------------------------ */

/* Returns true when the connection has work that its descriptor does not show. */
static bool ready(const dray__server *s, struct connection *c)
{
    if (c->reader.taken && !c->answering && s->service.ready(s->service.user, &c->reader))
        return true;
    if (c->full && !c->answering && c->reader.waits != DRAY__WAITS_FOR_BUFFER)
        return s->service.ready(s->service.user, &c->reader);
    if (c->full && !c->answering)
        return s->free_buffers || s->made_buffers < BUFFERS_MAX;
    return !c->answering && dray__stream_pending(c->reader.stream);
}

/* Serves connections that wait for the server, or whose next request is already in a carrier's
 * own buffer. Returns true when some may have more work. */
static bool others(dray__server *s)
{
    bool more = false;
    for (dray__data_reader *r = s->readers; r; r = s->next) {
        s->next = r->next;
        if (ready(s, connection_of(r)))
            turn(s, connection_of(r));
    }
    for (dray__data_reader *r = s->readers; r && !more; r = r->next)
        more = ready(s, connection_of(r));
    return more;
}

static void drop_stuck(dray__server *s)
{
    int64_t now = dray__now();
    for (dray__data_reader *r = s->readers, *next; r; r = next) {
        next = r->next;
        struct connection *c = connection_of(r);
        bool over = !enter(s, r);
        if (!over)
            leave(s);
        over |= s->service.overdue && s->service.overdue(r, now);
        over |= c->in_have && !c->full && now - c->began_ns > STUCK_NS;
        over |= (c->in_have || c->answering || r->taken) && now - c->moved_ns > STUCK_NS;
        if (over)
            end(s, c);
    }
}

static int watch(const dray__server *s, int *fd)
{
    struct epoll_event event = {.events = EPOLLIN, .data.ptr = fd};
    return epoll_ctl(s->poll, EPOLL_CTL_ADD, *fd, &event);
}

static void drain(int fd)
{
    uint64_t count;
    ssize_t n = read(fd, &count, sizeof count);
    (void)n; /* There is no connection: another process accepted it first. */
}

static void *serve(void *user)
{
    dray__server *s = user;
    bool more = false;
    for (int64_t tick = 0;;) {
        bool come = false;
        s->event_count = epoll_wait(s->poll, s->events, EVENTS, more ? 0 : TICK_MS);
        for (int i = 0; i < s->event_count; i++) {
            const struct epoll_event *event = &s->events[i];
            if (event->data.ptr == &s->stop)
                return NULL;
            if (event->data.ptr == &s->listener)
                come = true; /* after the others, which may be closed for the new one */
            else if (event->data.ptr == &s->wake)
                drain(s->wake);
            else if (event->data.ptr && event->events & (EPOLLHUP | EPOLLERR))
                /* A connection that waits for a buffer would not notice it. */
                end(s, event->data.ptr);
            else if (event->data.ptr)
                turn(s, event->data.ptr);
        }
        s->event_count = 0;
        if (come)
            accept_all(s);
        more = others(s);
        if (dray__now() - tick > TICK_MS * DRAY__MILLISECOND) {
            drop_stuck(s);
            dray__callers_sweep(&s->callers);
            s->deaf = s->deaf && watch(s, &s->listener);
            tick = dray__now();
        }
    }
}

/* ---- beginning and ending -------------------------------------------------------------------- */

void dray__server_free(dray__server *s)
{
    if (!s)
        return;
    bool own = s->pid == getpid(); /* A forked child does not have this thread. */
    uint64_t one = 1;
    if (own && s->thread.begun && write(s->stop, &one, sizeof one) == (ssize_t)sizeof one)
        dray__thread_join(&s->thread);
    while (s->readers)
        end(s, connection_of(s->readers));
    for (uint32_t i = 0; i < s->free_buffers; i++)
        dray_region_free(s->buffers[i]);
    if (own)
        dray__stream_unlisten(s->endpoint);
    int fds[] = {s->listener, s->poll, s->stop, s->wake};
    for (size_t i = 0; i < 4; i++)
        if (fds[i] >= 0)
            close(fds[i]);
    free(s);
}

static int start(dray__server *s, const char *address, dray_error *error)
{
    int rc = dray__stream_listen(address, s->endpoint, &s->listener, error);
    if (rc)
        return rc;
    s->poll = epoll_create1(EPOLL_CLOEXEC);
    s->stop = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
    s->wake = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
    if (s->poll < 0 || s->stop < 0 || s->wake < 0 || watch(s, &s->stop) || watch(s, &s->wake) ||
        watch(s, &s->listener))
        return dray__fail_errno(error, errno, "descriptors of a data server");
    rc = dray__thread_start(&s->thread, serve, s, "a data server", error);
    if (!rc)
        dray__log(DRAY_LOG_INFO, "data server at %s", s->endpoint);
    return rc;
}

int dray__server_new(const char *address, const dray__stream_keys *keys,
                     const dray__data_service *service, dray__server **out, dray_error *error)
{
    dray__server *s = calloc(1, sizeof *s);
    if (!s)
        return dray__nomem(error);
    s->pid = getpid();
    dray__callers_init(&s->callers, "data server", DRAY__CALLERS_PART_SOME,
                       DRAY__CALLERS_PATIENCE_S * DRAY__SECOND, end_caller, s);
    s->keys = keys;
    s->service = *service;
    s->listener = s->poll = s->stop = s->wake = -1;
    int rc = start(s, address, error);
    if (rc)
        dray__server_free(s);
    else
        *out = s;
    return rc;
}

const char *dray__server_endpoint(const dray__server *s)
{
    return s->endpoint;
}

dray__data_reader *dray__server_readers(const dray__server *s)
{
    return s->readers;
}

int dray__server_wake(const dray__server *s)
{
    return s->wake;
}
