/* The data server (serve.h): one thread, an epoll, a state for each connection: a request is read,
 * packed into a staging buffer, sent, and only then is the next one looked at. So a reader that
 * does not take its answers holds one buffer and its own socket, one that asks for much waits its
 * turn behind the others, and what the server needs is bounded whatever anybody sends.
 *
 * Readers on this host may have the answer in the publisher's staging arena instead (arena.h). Who
 * waits for a slot of it stands in line: the one that came first has the next one. */
#include "weights/serve.h"

#include "base/callers.h"
#include "base/clock.h"
#include "base/error.h"
#include "base/log.h"
#include "control/context.h"
#include "mover/stream.h"
#include "weights/arena.h"
#include "weights/cells.h"
#include "weights/exports.h"
#include "weights/nccl.h"
#include "weights/offer.h"
#include "weights/pull.h"

#include <errno.h>
#include <poll.h>
#include <pthread.h>
#include <stdlib.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/eventfd.h>
#include <unistd.h>

enum { BUFFERS_MAX = 64, EVENTS = 64, TICK_MS = 1000 };
#define STUCK_NS (30 * DRAY__SECOND) /* in the middle of a request or an answer */

/* A slot of an arena in which an answer lies. */
struct held {
    dray__arena *arena; /* NULL: none */
    dray_region *slot;
    uint32_t id;
    int64_t since_ns;
};

struct connection {
    struct connection *next, **link;
    dray__caller caller;
    dray__stream *stream;
    dray__offer offer;        /* of UCX */
    dray__ucx *ucx;           /* what the stream goes on with after this answer */
    dray__nccl_session *nccl; /* what sends over NCCL; NULL: nothing */
    dray__export *export;     /* what its reader reads one-sidedly; NULL: nothing yet */
    uint8_t *in; /* header and body of the request that is being read, and the next header */
    size_t in_have;
    dray__writer head; /* header and head of the answer, */
    dray_region *data; /* and its data; NULL: none is being sent */
    uint64_t data_bytes, out_at;
    struct held held[DRAY__ARENA_HELD];
    uint64_t place;             /* in the line for a slot; 0: not in it */
    size_t ahead;               /* bytes of the next header, read behind a request in the line */
    bool full, answering;       /* a whole request is here; its answer is being sent */
    int64_t moved_ns, began_ns; /* began: the request that is being read */
    int fd;                     /* that the epoll has */
    short events;
};

struct server {
    pthread_t thread;
    pid_t pid;
    int listener, poll, stop, wake; /* wake: a session of NCCL's has an answer */
    char endpoint[DRAY__STREAM_ADDRESS];
    struct connection *connections;
    dray__callers callers;
    dray_region *buffers[BUFFERS_MAX]; /* free ones */
    uint32_t free_buffers, made_buffers;
    dray__packer *packer;
    const dray__stream_keys *keys;
    dray__cells cells; /* read NULL: it has none */
    uint64_t last_place;
    bool deaf; /* the listener is not watched until the next tick: no descriptors were left */
};

/* ---- connections ----------------------------------------------------------------------------- */

static void give_buffer(struct server *s, dray_region *buffer)
{
    if (buffer)
        s->buffers[s->free_buffers++] = buffer;
}

static dray_region *take_buffer(struct server *s)
{
    dray_region *buffer;
    if (s->free_buffers)
        return s->buffers[--s->free_buffers];
    if (s->made_buffers == BUFFERS_MAX ||
        dray_region_alloc(DRAY_REGION_HOST, DRAY__PULL_DATA_MAX, "answer", &buffer, NULL))
        return NULL;
    s->made_buffers++;
    return buffer;
}

static void give_slot(struct held *held)
{
    if (held->arena)
        dray__arena_give(held->arena, held->slot);
    *held = (struct held){0};
}

static void end(struct server *s, struct connection *c)
{
    *c->link = c->next;
    if (c->next)
        c->next->link = c->link;
    dray__callers_leave(&s->callers, &c->caller);
    give_buffer(s, c->data);
    for (size_t i = 0; i < DRAY__ARENA_HELD; i++)
        give_slot(&c->held[i]);
    dray__nccl_session_free(c->nccl);
    dray__export_free(c->export);
    dray__ucx_close(c->ucx);
    dray__stream_close(c->stream); /* leaves the epoll with its descriptor */
    dray__writer_free(&c->head);
    free(c->in);
    free(c);
}

static void end_caller(void *server, dray__caller *caller)
{
    end(server, caller->owner);
}

static void begin(struct server *s, dray__stream *stream)
{
    struct connection *c = calloc(1, sizeof *c);
    uint8_t *in = malloc(2 * DRAY__PULL_REQUEST_HEADER + DRAY__PULL_BODY_MAX);
    struct epoll_event event = {.events = EPOLLIN, .data.ptr = c};
    bool entered = c && in && dray__callers_enter(&s->callers, &c->caller, c);
    if (!entered || epoll_ctl(s->poll, EPOLL_CTL_ADD, dray__stream_fd(stream), &event)) {
        if (entered)
            dray__callers_leave(&s->callers, &c->caller);
        dray__stream_close(stream);
        free(in);
        free(c);
        return;
    }
    c->stream = stream;
    c->in = in;
    c->fd = dray__stream_fd(stream);
    c->events = POLLIN;
    c->moved_ns = dray__now();
    c->next = s->connections;
    c->link = &s->connections;
    if (c->next)
        c->next->link = &c->next;
    s->connections = c;
}

static void accept_all(struct server *s)
{
    dray__stream *stream;
    int rc;
    while ((rc = dray__stream_accept(s->listener, s->keys, &stream, NULL)) == DRAY_OK)
        begin(s, stream);
    /* Who comes stays in the backlog, and the listener readable: do not spin on it. */
    if (rc != DRAY_EAGAIN)
        dray__callers_make_room(&s->callers);
    if (rc != DRAY_EAGAIN && epoll_ctl(s->poll, EPOLL_CTL_DEL, s->listener, NULL) == 0)
        s->deaf = true;
}

/* ---- one request ----------------------------------------------------------------------------- */

/* Below, 0: go on; -EAGAIN: not now; another -errno: the connection is over. */

/* What has no body and no answer: the reader copied out what was put into the arena, or reads no
 * more one-sidedly. */
static int notice(struct connection *c, const dray__pull_header *header)
{
    if (header->body_bytes)
        return -EPROTO;
    c->moved_ns = dray__now();
    if (header->flags == DRAY__PULL_DONE && c->export) {
        dray__export_done(c->export);
        return 0;
    }
    for (size_t i = 0; i < DRAY__ARENA_HELD && header->flags == DRAY__PULL_TAKEN; i++)
        if (c->held[i].arena && c->held[i].id == header->id) {
            give_slot(&c->held[i]);
            return 0;
        }
    return -EPROTO;
}

static bool is_notice(const dray__pull_header *header)
{
    return header->flags == DRAY__PULL_TAKEN || header->flags == DRAY__PULL_DONE;
}

/* While a request waits for a slot: what has been taken meanwhile. */
static int read_ahead(struct connection *c)
{
    uint8_t *next = c->in + c->in_have;
    dray__pull_header header;
    while (c->ahead < DRAY__PULL_REQUEST_HEADER) {
        ssize_t n =
            dray__stream_recv(c->stream, next + c->ahead, DRAY__PULL_REQUEST_HEADER - c->ahead);
        if (n <= 0)
            return n ? (int)n : -ECONNRESET;
        c->ahead += (size_t)n;
        if (c->ahead < DRAY__PULL_REQUEST_HEADER)
            continue;
        if (dray__pull_get_request(next, &header, NULL))
            return -EPROTO;
        if (!is_notice(&header))
            break; /* looked at in its turn */
        int rc = notice(c, &header);
        if (rc)
            return rc;
        c->ahead = 0;
    }
    return -EAGAIN;
}

static int receive(struct connection *c)
{
    while (!c->full) {
        size_t need = DRAY__PULL_REQUEST_HEADER;
        dray__pull_header header;
        if (c->in_have >= need) {
            if (dray__pull_get_request(c->in, &header, NULL))
                return -EPROTO;
            need += header.body_bytes;
            if (is_notice(&header)) {
                int rc = notice(c, &header);
                if (rc)
                    return rc;
                c->in_have = 0;
                continue;
            }
        }
        if (c->in_have == need && need > DRAY__PULL_REQUEST_HEADER) {
            c->full = true;
            break;
        }
        if (c->in_have == need) /* a request without a body */
            return -EPROTO;
        ssize_t n = dray__stream_recv(c->stream, c->in + c->in_have, need - c->in_have);
        if (n <= 0)
            return n ? (int)n : -ECONNRESET;
        c->moved_ns = dray__now();
        if (!c->in_have)
            c->began_ns = c->moved_ns;
        c->in_have += (size_t)n;
    }
    return 0;
}

static uint64_t token_of(const struct connection *c)
{
    dray__reader in =
        dray__reader_of(c->in + DRAY__PULL_REQUEST_HEADER, c->in_have - DRAY__PULL_REQUEST_HEADER);
    return dray__get_u64(&in);
}

static bool is_first_in_line(const struct server *s, const struct connection *c)
{
    for (const struct connection *o = s->connections; o; o = o->next)
        if (o != c && o->place && (!c->place || o->place < c->place) && token_of(o) == token_of(c))
            return false;
    return true;
}

/* A slot for the answer to the connection's request; -EAGAIN: stand in line; *held NULL: there is
 * no such arena (any more), which is the answer. */
static int take_slot(struct server *s, struct connection *c, const dray__pull_header *header,
                     struct held **held, uint64_t *at)
{
    struct held *own = c->held;
    while (own < c->held + DRAY__ARENA_HELD && own->arena)
        own++;
    if (own == c->held + DRAY__ARENA_HELD)
        return -EPROTO;
    dray__local *local;
    dray__arena *arena =
        dray__pull_arena(c->in + DRAY__PULL_REQUEST_HEADER, header->body_bytes, &local);
    if (arena && is_first_in_line(s, c))
        own->slot = dray__arena_take(arena, at);
    bool waits = arena && !own->slot;
    if (waits && !c->place)
        c->place = ++s->last_place;
    if (!waits)
        c->place = 0;
    if (own->slot)
        *own = (struct held){arena, own->slot, header->id, dray__now()};
    dray__local_release(local);
    *held = own->slot ? own : NULL;
    return waits ? -EAGAIN : 0;
}

static int answer_request(struct server *s, struct connection *c, const dray__pull_header *header)
{
    struct held *held = NULL;
    uint64_t at = 0;
    int rc = header->flags & DRAY__PULL_ARENA ? take_slot(s, c, header, &held, &at) : 0;
    if (rc)
        return rc;
    if (!held)
        c->data = take_buffer(s);
    if (!held && !c->data)
        return -EAGAIN; /* until another connection gives one back */
    const uint8_t *body = c->in + DRAY__PULL_REQUEST_HEADER;
    bool done = header->flags == DRAY__PULL_CELLS
                    ? dray__cells_answer(s->cells.read ? &s->cells : NULL, header, body, c->data,
                                         &c->head, &c->data_bytes)
                    : dray__pull_answer(s->packer, header, body, held ? held->slot : c->data, at,
                                        &c->head, &c->data_bytes);
    if (!done)
        return -ENOMEM;
    if (held && !c->data_bytes) /* it could not be read */
        give_slot(held);
    if (held)
        c->data_bytes = 0;
    return 0;
}

static int answer_offer(const struct server *s, struct connection *c,
                        const dray__pull_header *header)
{
    if (dray__stream_uses_ucx(c->stream))
        return -EPROTO;
    c->data_bytes = 0;
    return dray__offer_answer(&c->offer, s->keys, c->stream, header,
                              c->in + DRAY__PULL_REQUEST_HEADER, &c->head, &c->ucx)
               ? 0
               : -ENOMEM;
}

/* What is answered with data of its own: keys for one-sided reads, or how to reach regions. */
static int answer_access(struct server *s, struct connection *c, const dray__pull_header *header)
{
    dray_error error;
    dray__writer data = {0};
    const uint8_t *body = c->in + DRAY__PULL_REQUEST_HEADER;
    dray__reader in = dray__reader_of(body, header->body_bytes);
    dray__ucx *ucx = dray__stream_ucx(c->stream);
    bool keys = header->flags == DRAY__PULL_KEYS;
    uint64_t token = dray__get_u64(&in), attempt = keys ? dray__get_u64(&in) : 0;
    if (in.failed || (keys && (!ucx || !c->offer.reads)))
        return -EPROTO;
    c->data = take_buffer(s);
    if (!c->data)
        return -EAGAIN;
    dray__writer_reset(&c->head);
    c->data_bytes = 0;
    int rc =
        keys
            ? dray__export_give(&c->export, ucx, token, attempt, DRAY__PULL_DATA_MAX, &data, &error)
            : dray__pull_regions(body, header->body_bytes, DRAY__PULL_DATA_MAX, &data, &error);
    if (rc) {
        dray__pull_put_refusal(&c->head, header->id, &error);
    } else {
        memcpy(dray_region_base(c->data), data.data, data.size);
        c->data_bytes = data.size;
        dray__pull_put_answer(&c->head, 0, header->id, 0, data.size);
    }
    dray__writer_free(&data);
    return c->head.failed ? -ENOMEM : 0;
}

/* The session does it on a thread of its own. */
static int answer_nccl(const struct server *s, struct connection *c,
                       const dray__pull_header *header)
{
    dray_error error;
    c->data_bytes = 0;
    if (dray__stream_encrypts(c->stream)) {
        dray__fail(&error, DRAY_EUNSUPPORTED, "NCCL does not encrypt");
        dray__writer_reset(&c->head);
        dray__pull_put_refusal(&c->head, header->id, &error);
        return 0;
    }
    if (!c->nccl)
        c->nccl = dray__nccl_session_new(s->wake);
    if (!c->nccl)
        return -ENOMEM;
    if (!dray__nccl_session_asked(c->nccl) &&
        !dray__nccl_session_ask(c->nccl, header, c->in + DRAY__PULL_REQUEST_HEADER))
        return -ENOMEM;
    return dray__nccl_session_answer(c->nccl, &c->head) ? 0 : -EAGAIN;
}

static int answer(struct server *s, struct connection *c)
{
    dray__pull_header header;
    dray__pull_get_request(c->in, &header, NULL);
    bool access = header.flags == DRAY__PULL_KEYS || header.flags == DRAY__PULL_REGIONS;
    int rc = header.flags == DRAY__PULL_UCX    ? answer_offer(s, c, &header)
             : header.flags == DRAY__PULL_NCCL ? answer_nccl(s, c, &header)
             : access                          ? answer_access(s, c, &header)
                                               : answer_request(s, c, &header);
    if (rc)
        return rc;
    c->full = false;
    memmove(c->in, c->in + c->in_have, c->ahead);
    c->in_have = c->ahead;
    c->ahead = 0;
    c->answering = true;
    c->out_at = 0;
    c->moved_ns = dray__now();
    return 0;
}

static int transmit(struct server *s, struct connection *c)
{
    uint64_t end_at = c->head.size + c->data_bytes;
    while (c->out_at < end_at) {
        bool in_head = c->out_at < c->head.size;
        const uint8_t *from =
            in_head ? c->head.data + c->out_at
                    : (uint8_t *)dray_region_base(c->data) + (c->out_at - c->head.size);
        size_t size = (size_t)((in_head ? c->head.size : end_at) - c->out_at);
        ssize_t n = dray__stream_send(c->stream, from, size, in_head && c->data_bytes);
        if (n < 0)
            return (int)n;
        c->out_at += (uint64_t)n;
        c->moved_ns = dray__now();
    }
    give_buffer(s, c->data);
    c->data = NULL;
    c->answering = false;
    dray__ucx *ucx = c->ucx;
    c->ucx = NULL;
    return ucx && dray__stream_use_ucx(c->stream, ucx, NULL) ? -EIO : 0;
}

/* A reader of NCCL's waits for each answer: what comes before is its end. */
static int nothing_more(struct connection *c)
{
    uint8_t byte;
    return dray__stream_recv(c->stream, &byte, 1) == -EAGAIN ? -EAGAIN : -EPROTO;
}

/* One request at most, so that all connections have their turn. */
static int work(struct server *s, struct connection *c)
{
    int rc = c->answering ? transmit(s, c) : 0;
    if (rc == 0 && !c->answering)
        rc = receive(c);
    if (rc == 0 && c->full) {
        dray__callers_heard(&s->callers, &c->caller);
        rc = answer(s, c);
    }
    if (rc == -EAGAIN && c->place)
        rc = read_ahead(c);
    if (rc == -EAGAIN && c->full && c->nccl)
        rc = nothing_more(c);
    if (rc == 0 && c->answering)
        rc = transmit(s, c);
    if (rc == 0 || rc == -EAGAIN) {
        int flushed = dray__stream_flush(c->stream);
        return flushed == -EAGAIN ? 0 : flushed;
    }
    return rc;
}

/* What the connection waits for. UCX's descriptor is readable for either. */
static bool arm(struct server *s, struct connection *c)
{
    short events = dray__stream_events(c->stream);
    if (c->answering && !dray__stream_uses_ucx(c->stream))
        events = (short)((events & ~POLLIN) | POLLOUT);
    else if (c->full && !c->answering && !c->nccl &&
             (!c->place || c->ahead == DRAY__PULL_REQUEST_HEADER))
        events = (short)(events & ~POLLIN); /* it waits for a buffer, or a slot */
    int fd = dray__stream_fd(c->stream);
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

static void turn(struct server *s, struct connection *c)
{
    bool ends = true;
    if (dray__export_enter(c->export)) {
        ends = work(s, c) || !arm(s, c);
        c->caller.busy = c->full || c->answering;
        dray__export_leave();
    }
    if (ends)
        end(s, c);
}

/* ---- the thread ------------------------------------------------------------------------------ */

static bool has_slot(const struct server *s, const struct connection *c)
{
    dray__local *local;
    dray__arena *arena = dray__pull_arena(c->in + DRAY__PULL_REQUEST_HEADER,
                                          (uint32_t)c->in_have - DRAY__PULL_REQUEST_HEADER, &local);
    bool has = !arena || (is_first_in_line(s, c) && dray__arena_has_free(arena));
    dray__local_release(local);
    return has;
}

/* Has something to do that its descriptor does not show? */
static bool ready(const struct server *s, const struct connection *c)
{
    if (c->place)
        return has_slot(s, c);
    if (c->full && !c->answering && c->nccl)
        return dray__nccl_session_answered(c->nccl);
    if (c->full && !c->answering)
        return s->free_buffers || s->made_buffers < BUFFERS_MAX;
    return !c->answering && dray__stream_pending(c->stream);
}

/* Those that wait for a buffer, or whose next request lies in TLS's own buffer. true: some may have
 * more. */
static bool others(struct server *s)
{
    bool more = false;
    for (struct connection *c = s->connections, *next; c; c = next) {
        next = c->next;
        if (ready(s, c))
            turn(s, c);
    }
    for (struct connection *c = s->connections; c && !more; c = c->next)
        more = ready(s, c);
    return more;
}

static void drop_stuck(struct server *s)
{
    int64_t now = dray__now();
    for (struct connection *c = s->connections, *next; c; c = next) {
        next = c->next;
        bool keeps = false; /* a slot, or what was revoked */
        for (size_t i = 0; i < DRAY__ARENA_HELD; i++)
            keeps |= c->held[i].arena && now - c->held[i].since_ns > DRAY__ARENA_RECLAIM_NS;
        keeps |= !dray__export_enter(c->export);
        if (!keeps)
            dray__export_leave();
        bool slow = c->in_have && !c->full && now - c->began_ns > STUCK_NS;
        if (keeps || slow || ((c->in_have || c->answering) && now - c->moved_ns > STUCK_NS))
            end(s, c);
    }
}

static int watch(struct server *s, int *fd)
{
    struct epoll_event event = {.events = EPOLLIN, .data.ptr = fd};
    return epoll_ctl(s->poll, EPOLL_CTL_ADD, *fd, &event);
}

static void drain(int fd)
{
    uint64_t count;
    ssize_t n = read(fd, &count, sizeof count);
    (void)n; /* nothing: somebody was quicker */
}

/* Its reader is: who waits for a buffer would not see it, and be woken again and again. */
static bool is_gone(const struct connection *c, uint32_t events)
{
    return events & (EPOLLHUP | EPOLLERR) && !dray__stream_uses_ucx(c->stream);
}

static void *serve(void *user)
{
    struct server *s = user;
    bool more = false;
    for (int64_t tick = 0;;) {
        struct epoll_event events[EVENTS];
        bool come = false;
        int n = epoll_wait(s->poll, events, EVENTS, more ? 0 : TICK_MS);
        for (int i = 0; i < n; i++) {
            if (events[i].data.ptr == &s->stop)
                return NULL;
            if (events[i].data.ptr == &s->listener)
                come = true; /* for whom others may end, of whom there may be events here */
            else if (events[i].data.ptr == &s->wake)
                drain(s->wake);
            else if (is_gone(events[i].data.ptr, events[i].events))
                end(s, events[i].data.ptr);
            else
                turn(s, events[i].data.ptr);
        }
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

/* ---- the context's --------------------------------------------------------------------------- */

static void server_free(void *server)
{
    struct server *s = server;
    bool own = s->pid == getpid(); /* a forked child has no such thread */
    uint64_t one = 1;
    if (own && s->thread && write(s->stop, &one, sizeof one) == (ssize_t)sizeof one)
        pthread_join(s->thread, NULL);
    while (s->connections)
        end(s, s->connections);
    for (uint32_t i = 0; i < s->free_buffers; i++)
        dray_region_free(s->buffers[i]);
    int fds[] = {s->listener, s->poll, s->stop, s->wake};
    for (size_t i = 0; i < 4; i++)
        if (fds[i] >= 0)
            close(fds[i]);
    dray__packer_free(s->packer);
    free(s);
}

static int start(struct server *s, const char *address, dray_error *error)
{
    s->packer = dray__packer_new();
    if (!s->packer)
        return dray__nomem(error);
    int rc = dray__stream_listen(address, s->endpoint, &s->listener, error);
    if (rc)
        return rc;
    s->poll = epoll_create1(EPOLL_CLOEXEC);
    s->stop = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
    s->wake = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
    if (s->poll < 0 || s->stop < 0 || s->wake < 0 || watch(s, &s->stop) || watch(s, &s->wake) ||
        watch(s, &s->listener))
        return dray__fail_errno(error, errno, "descriptors of a data server");
    int failed = pthread_create(&s->thread, NULL, serve, s);
    if (failed) {
        s->thread = 0;
        return dray__fail_errno(error, failed, "thread of a data server");
    }
    dray__log(DRAY_LOG_INFO, "data server at %s", s->endpoint);
    return DRAY_OK;
}

static int server_new(const char *address, const dray__stream_keys *keys, const dray__cells *cells,
                      struct server **out, dray_error *error)
{
    struct server *s = calloc(1, sizeof *s);
    if (!s)
        return dray__nomem(error);
    s->pid = getpid();
    dray__callers_init(&s->callers, "data server", DRAY__CALLERS_PART_SOME,
                       DRAY__CALLERS_PATIENCE_S * DRAY__SECOND, end_caller, s);
    s->keys = keys;
    if (cells)
        s->cells = *cells;
    s->listener = s->poll = s->stop = s->wake = -1;
    int rc = start(s, address, error);
    if (rc) {
        server_free(s);
        return rc;
    }
    *out = s;
    return DRAY_OK;
}

int dray__data_address(dray_context *context, char out[DRAY__STREAM_ADDRESS], bool *elsewhere,
                       dray_error *error)
{
    struct sockaddr_storage own;
    const char *given = getenv("DRAY_DATA_ADDRESS");
    if (given && strlen(given) >= DRAY__STREAM_ADDRESS)
        return dray__fail(error, DRAY_EINVALID,
                          "$DRAY_DATA_ADDRESS \"%.20s...\": at most %d bytes expected, not %zu",
                          given, DRAY__STREAM_ADDRESS - 1, strlen(given));
    *elsewhere = true;
    if (given && given[0]) {
        strcpy(out, given);
    } else if (!dray__context_find(context, false, &own) || !dray__stream_print(&own, out)) {
        strcpy(out, "127.0.0.1");
        *elsewhere = context->host_named;
    }
    return DRAY_OK;
}

int dray__serve_start(dray_context *context, bool needed, const char **endpoint, dray_error *error)
{
    char address[DRAY__STREAM_ADDRESS];
    bool elsewhere;
    struct server *s = NULL;
    int rc = dray__data_address(context, address, &elsewhere, error);
    if (rc)
        return rc;
    pthread_mutex_lock(&context->lock);
    if (!context->server && (elsewhere || needed)) {
        rc = server_new(address, &context->keys, NULL, &s, error);
        if (rc == DRAY_OK) {
            context->server = s;
            context->server_free = server_free;
        }
    }
    s = context->server;
    pthread_mutex_unlock(&context->lock);
    if (rc)
        return rc;
    *endpoint = s ? s->endpoint : NULL;
    return DRAY_OK;
}

int dray__cells_serve(const char *address, const dray__stream_keys *keys, const dray__cells *cells,
                      dray__server **out, const char **endpoint, dray_error *error)
{
    int rc = server_new(address, keys, cells, out, error);
    if (!rc)
        *endpoint = (*out)->endpoint;
    return rc;
}

void dray__server_end(dray__server *server)
{
    if (server)
        server_free(server);
}
