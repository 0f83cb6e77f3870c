/* All messages to the coordinator and to the keeper of samples, from sessions of every role, in any
 * order. The first byte: 1: queues may be durable; 2: the coordinator knows its members again after
 * a restart. Then steps, whose first byte is a connection (low 4 bits; from 12 on the keeper's)
 * and:
 *
 *  0  a frame: u16 type (modulo the table of messages, where there is none of that number), u8
 *     descriptors, u16 size, payload, of each descriptor u8 kind, u16 pages. What proves a member
 *     (ATTACH, RETURN) is put right
 *  1  bytes: u16 size, bytes
 *  2  the connection is closed, and opened anew: u8 role
 *  3  time passes
 *  4  the coordinator ends, and another one comes
 *
 * Every request is answered once at most, whoever comes then is served, and what a durable queue
 * has taken can be read again by a coordinator that comes after. */
#include "fuzz/scene.h"

#include "base/clock.h"
#include "base/json.h"
#include "control/internal.h"
#include "control/relay.h"
#include "queue/server/controller.h"
#include "weights/registry/registry.h"

#include <event2/event.h>
#include <fcntl.h>
#include <poll.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/un.h>

const int fuzz_rounds = 20; /* each is a coordinator, and up to some hundred messages */

enum { CONNECTIONS = 16, KEEPERS = 12, STEPS = 400, MEMBERS = 64, DURABLE = 1, RETURNS = 2 };

static const struct {
    uint16_t type;
    const char *name;
} messages[] = {
#define XX(name, value, who) {value, #name},
    DRAY__MESSAGE_MAP(XX)
#undef XX
};
static const uint32_t roles[] = {DRAY__MAY_ALL, DRAY__MAY_TRAINER, DRAY__MAY_ENGINE, DRAY__MAY_TASK,
                                 DRAY__MAY_TOOL};

typedef struct peer {
    int fd; /* 0: closed */
    uint32_t role;
    uint64_t sent, answered; /* ids */
    dray__inbox inbox;
} peer;

static struct world {
    struct event_base *base;
    dray__coordinator *coordinator;
    const char *keeper;
    char socket[96], journals[96], state[96];
    peer peers[CONNECTIONS];
    struct {
        uint64_t member;
        uint8_t token[DRAY__TOKEN];
    } members[MEMBERS];
    uint32_t member_count;
    int flags;
} w;

/* ---- the servers ----------------------------------------------------------------------------- */

static void start_coordinator(void)
{
    dray_error error = {0};
    const dray__coordinator_options options = {.unix_path = w.socket,
                                               .keeper_path = w.keeper,
                                               .state_path = w.flags & RETURNS ? w.state : NULL};
    const char *folder = w.flags & DURABLE ? w.journals : NULL;
    if (dray__coordinator_new(w.base, &options, &w.coordinator, &error) ||
        dray__reports_add(w.coordinator, &error) || dray__registry_add(w.coordinator, &error) ||
        dray__leases_add(w.coordinator, &error) ||
        dray__queue_add(w.coordinator, w.base, w.keeper, folder, NULL, &error) ||
        dray__relay_add(w.coordinator, &error)) {
        fprintf(stderr, "a coordinator cannot begin: %s\n", error.message);
        abort();
    }
}

static void on_late(evutil_socket_t fd, short what, void *user)
{
    (void)fd, (void)what, (void)user;
}

/* Up to 2 ms for what comes from other threads, where it may. */
static void pump(bool wait)
{
    struct timeval late = {.tv_usec = 2000};
    for (int i = 0; i < 4; i++)
        event_base_loop(w.base, EVLOOP_NONBLOCK);
    if (!wait)
        return;
    event_base_once(w.base, -1, EV_TIMEOUT, on_late, NULL, &late);
    event_base_loop(w.base, EVLOOP_ONCE);
}

/* ---- connections ----------------------------------------------------------------------------- */

static void hang_up(peer *p)
{
    if (p->fd)
        close(p->fd);
    dray__inbox_free(&p->inbox);
    *p = (peer){0};
}

static int reach_keeper(void)
{
    struct sockaddr_un name = {.sun_family = AF_UNIX};
    int fd = socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0);
    strcpy(name.sun_path, w.keeper);
    MUST(fd > 0 && connect(fd, (const struct sockaddr *)&name, sizeof name) == 0);
    return fd;
}

static void call(peer *p, uint32_t role)
{
    int pair[2];
    hang_up(p);
    p->role = role;
    if (p >= w.peers + KEEPERS) {
        p->fd = reach_keeper();
        return;
    }
    MUST(socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0, pair) == 0);
    p->fd = pair[0];
    dray__connection_add(&w.coordinator->listeners[0], pair[1]);
}

/* A session may do what its role may, as over TCP. */
static void restrict_sessions(const peer *p)
{
    for (dray__session *s = w.coordinator->sessions; s; s = s->next)
        if (s->member == w.members[(w.member_count - 1) % MEMBERS].member && p->role)
            s->may = roles[p->role];
}

static void remember(dray__reader r)
{
    size_t size;
    dray__get_u32(&r);
    uint64_t member = dray__get_u64(&r);
    dray__get_u64(&r);
    const void *token = dray__get_blob(&r, &size);
    MUST(token && size == DRAY__TOKEN);
    w.members[w.member_count % MEMBERS].member = member;
    memcpy(w.members[w.member_count++ % MEMBERS].token, token, size);
}

/* Takes what has come. */
static void listen_to(peer *p)
{
    int fds[DRAY__FRAME_FDS], rc;
    dray__frame frame;
    dray_error error;
    while ((rc = dray__inbox_fill(&p->inbox, p->fd, NULL)) == DRAY_OK)
        while ((rc = dray__inbox_take(&p->inbox, &frame, fds, NULL)) == DRAY_OK) {
            dray__close_fds(fds, frame.fd_count);
            MUST(frame.flags & DRAY__FRAME_REPLY);
            dray__reader r = dray__reader_of(frame.payload, frame.size);
            p->answered += frame.id != 0;
            MUST(p->answered <= p->sent);
            if (frame.flags & DRAY__FRAME_ERROR) {
                dray__frame_get_error(r, &error);
            } else if (frame.type == DRAY__MSG_HELLO || frame.type == DRAY__MSG_RETURN) {
                remember(r);
                restrict_sessions(p);
            }
        }
    MUST(rc == DRAY_EAGAIN || rc == DRAY_ECLOSED);
    if (rc == DRAY_ECLOSED)
        hang_up(p);
}

/* What is to be safe on the disk first is answered later. */
static void listen_to_all(const peer *asked)
{
    for (int i = 0; i < 2; i++) {
        pump(i);
        for (peer *p = w.peers; p < w.peers + KEEPERS; p++)
            if (p->fd)
                listen_to(p);
        if (!(w.flags & DURABLE) || asked->answered == asked->sent)
            return;
    }
}

/* The keeper answers every request at once. */
static void listen_to_keeper(peer *p)
{
    struct pollfd ready = {.fd = p->fd, .events = POLLIN};
    MUST(poll(&ready, 1, 10000) == 1);
    listen_to(p);
}

/* ---- frames ---------------------------------------------------------------------------------- */

static int make_fd(uint8_t kind, uint16_t pages)
{
    int fd = memfd_create("fuzz", MFD_CLOEXEC | MFD_ALLOW_SEALING), seals = F_SEAL_SHRINK;
    if (kind % 4 == 3) {
        close(fd);
        return open("/dev/null", O_RDWR | O_CLOEXEC);
    }
    /* pages of releases are 384 bytes long */
    MUST(fd >= 0 && ftruncate(fd, pages ? (off_t)(pages % 64) << 12 : 384) == 0);
    if (kind % 4 == 1)
        seals |= F_SEAL_GROW;
    if (kind % 4 == 2)
        seals |= F_SEAL_GROW | F_SEAL_FUTURE_WRITE;
    MUST(fcntl(fd, F_ADD_SEALS, seals) == 0);
    return fd;
}

static uint16_t type_of(uint16_t number)
{
    size_t count = sizeof messages / sizeof *messages;
    for (size_t i = 0; i < count; i++)
        if (messages[i].type == number)
            return number;
    return messages[number % count].type;
}

/* What a member was told when it came, wherever its number stands. */
static void prove(uint8_t *payload, size_t size, uint16_t type)
{
    size_t at = type == DRAY__MSG_ATTACH ? 0 : size - 36, token = size - DRAY__TOKEN;
    uint64_t member;
    if (size < (type == DRAY__MSG_ATTACH ? 28 : 36))
        return;
    memcpy(&member, payload + at, sizeof member);
    for (uint32_t i = 0; i < w.member_count && i < MEMBERS; i++)
        if (w.members[i].member == le64toh(member))
            memcpy(payload + token, w.members[i].token, DRAY__TOKEN);
}

static void send_frame(peer *p, dray__reader *r)
{
    int fds[3];
    uint8_t *payload = NULL;
    dray__writer out = {0};
    dray__frame frame = {.type = type_of(dray__get_u16(r)), .fd_count = dray__get_u8(r) % 4};
    size_t size = dray__get_u16(r);
    size = size < r->size - r->at ? size : r->size - r->at;
    size = r->failed ? 0 : size;
    MUST((payload = malloc(size + 1)));
    if (size)
        memcpy(payload, dray__get_bytes(r, size), size);
    if (frame.type == DRAY__MSG_ATTACH || frame.type == DRAY__MSG_RETURN)
        prove(payload, size, frame.type);
    else if (frame.type == DRAY__MSG_KEEPER_PUT && size == 32)
        memset(payload + 24, 0, 8); /* of any era */
    for (int i = 0; i < frame.fd_count; i++)
        fds[i] = make_fd(dray__get_u8(r), dray__get_u16(r));
    frame.id = ++p->sent;
    frame.payload = payload;
    frame.size = (uint32_t)size;
    MUST(dray__frame_put(&out, &frame, NULL) == 0);
    bool sent = dray__frame_send(p->fd, out.data, out.size, fds, frame.fd_count) > 0;
    p->sent -= !sent;
    dray__close_fds(fds, frame.fd_count);
    dray__writer_free(&out);
    free(payload);
    if (sent && p >= w.peers + KEEPERS)
        listen_to_keeper(p);
}

/* ---- steps ----------------------------------------------------------------------------------- */

static void restart(void)
{
    for (peer *p = w.peers; p < w.peers + KEEPERS; p++)
        hang_up(p);
    pump(false);
    dray__coordinator_free(w.coordinator);
    start_coordinator();
}

static void step(dray__reader *r)
{
    uint8_t what = dray__get_u8(r);
    peer *p = &w.peers[what % CONNECTIONS];
    if (!p->fd && what >> 4 != 2)
        call(p, 0);
    if (what >> 4 == 1) {
        size_t size = dray__get_u16(r);
        size = size < r->size - r->at ? size : r->size - r->at;
        const void *bytes = dray__get_bytes(r, size);
        if (size && p < w.peers + KEEPERS)
            dray__frame_send(p->fd, bytes, size, NULL, 0);
        p->sent = UINT32_MAX; /* they may be whole frames */
    } else if (what >> 4 == 2) {
        call(p, dray__get_u8(r) % 5);
    } else if (what >> 4 == 3) {
        pump(true);
    } else if (what >> 4 == 4) {
        restart();
    } else {
        send_frame(p, r);
    }
    listen_to_all(p);
}

/* Somebody new is told how things are. */
static void check_service(void)
{
    dray__writer payload = {0};
    peer *p = &w.peers[0];
    call(p, 0);
    dray__put_u32(&payload, DRAY__PROTOCOL_OLDEST);
    dray__put_u32(&payload, DRAY__PROTOCOL_VERSION);
    dray__put_string(&payload, "healthy");
    dray__put_string(&payload, "tool");
    dray__put_bytes(&payload, "\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0", 20);
    for (int i = 0; i < 2; i++) {
        dray__writer out = {0};
        const dray__frame frame = {.type = i ? DRAY__MSG_STATUS : DRAY__MSG_HELLO,
                                   .id = ++p->sent,
                                   .payload = payload.data,
                                   .size = i ? 0 : (uint32_t)payload.size};
        MUST(dray__frame_put(&out, &frame, NULL) == 0);
        MUST(dray__frame_send(p->fd, out.data, out.size, NULL, 0) == (ssize_t)out.size);
        dray__writer_free(&out);
        listen_to_all(p);
    }
    dray__writer_free(&payload);
    MUST(p->fd && p->answered == 2);
    json_t *status = dray__coordinator_status(w.coordinator);
    char *text = json_dumps(status, JSON_COMPACT);
    MUST(status && text && json_object_get(status, "queues"));
    free(text);
    json_decref(status);
}

static void begin(int flags)
{
    w.flags = flags;
    w.member_count = 0;
    if (!w.base) {
        w.base = event_base_new();
        w.keeper = scene_keeper();
        snprintf(w.socket, sizeof w.socket, "%s", fuzz_path("socket"));
        snprintf(w.state, sizeof w.state, "%s", fuzz_path("state"));
        snprintf(w.journals, sizeof w.journals, "%s", fuzz_path("journals"));
    }
    MUST(w.base);
    start_coordinator();
}

static void end(void)
{
    for (peer *p = w.peers; p < w.peers + CONNECTIONS; p++)
        hang_up(p);
    pump(false);
    dray__coordinator_free(w.coordinator);
    unlink(w.state);
    if (w.flags & DURABLE) {
        char path[300];
        snprintf(path, sizeof path, "rm -rf '%s'", w.journals);
        start_coordinator(); /* which can read what the last one wrote */
        dray__coordinator_free(w.coordinator);
        MUST(system(path) == 0);
    }
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    dray__reader r = dray__reader_of(data, size);
    begin(dray__get_u8(&r));
    for (int i = 0; i < STEPS && r.at < r.size; i++)
        step(&r);
    check_service();
    end();
    return 0;
}

/* ---- what it begins with --------------------------------------------------------------------- */

typedef struct recording {
    dray__writer steps;
    uint32_t keepers;
} recording;

/* A descriptor, as make_fd() would make one of the kind. */
static void put_fd(dray__writer *out, int fd)
{
    struct stat st;
    int seals = fcntl(fd, F_GET_SEALS);
    MUST(fstat(fd, &st) == 0);
    dray__put_u8(out, seals < 0 ? 3 : seals & F_SEAL_FUTURE_WRITE ? 2 : 1);
    dray__put_u16(out, (uint16_t)(st.st_size >> 12 < 63 ? st.st_size >> 12 : 63));
}

static void record(void *user, scene_link *link, bool answer, const dray__frame *frame,
                   const int *fds)
{
    recording *to = user;
    dray__writer *out = &to->steps;
    uint32_t number = link->number % (link->server ? CONNECTIONS - KEEPERS : KEEPERS);
    if (!answer && frame->size < UINT16_MAX) {
        dray__put_u8(out, (uint8_t)(number + (link->server ? KEEPERS : 0)));
        dray__put_u16(out, frame->type);
        dray__put_u8(out, (uint8_t)frame->fd_count);
        dray__put_u16(out, (uint16_t)frame->size);
        dray__put_bytes(out, frame->payload, frame->size);
        for (uint32_t i = 0; i < frame->fd_count; i++)
            put_fd(out, fds[i]);
    }
    scene_send(link, answer, frame, fds);
}

/* The steps again, from sessions of the role. */
static void put_roles(fuzz_put put, void *user, int flags, const dray__writer *steps)
{
    for (uint8_t role = 0; role < 5; role++) {
        dray__writer all = {0};
        dray__put_u8(&all, (uint8_t)flags);
        for (uint8_t i = 0; i < KEEPERS && role; i++) {
            dray__put_u8(&all, 2 << 4 | i);
            dray__put_u8(&all, role);
        }
        dray__put_bytes(&all, steps->data, steps->size);
        put(user, all.data, all.size);
        dray__writer_free(&all);
    }
}

void fuzz_seeds(fuzz_put put, void *user)
{
    for (int which = 0; which < 5; which++) {
        recording to = {0};
        char journals[96];
        snprintf(journals, sizeof journals, "%s", fuzz_path("recorded"));
        scene *s = scene_start(journals, record, &to);
        if (which < 2)
            scene_queue(scene_address(s), "queue", which ? 3 : 0, 0, true);
        else if (which == 2)
            scene_weights(scene_address(s), "model", true);
        else if (which == 3)
            scene_by_hand(scene_address(s), "model", true);
        else
            scene_leases(scene_address(s), "engine/x", true);
        scene_stop(s);
        if (which == 1)
            fuzz_put_kind(put, user, DURABLE, &to.steps);
        else
            put_roles(put, user, which == 2 ? RETURNS : 0, &to.steps);
        dray__writer_free(&to.steps);
    }
}
