/* The servers and the proxy of scene.h. */
#include "fuzz/scene.h"

#include "control/coordinator.h"
#include "queue/server/controller.h"
#include "queue/storage/keeper.h"
#include "weights/registry/registry.h"

#include <event2/event.h>
#include <fcntl.h>
#include <poll.h>
#include <string.h>
#include <sys/eventfd.h>
#include <sys/socket.h>
#include <sys/un.h>

struct scene {
    char address[112], paths[SCENE_SERVERS][96], behind[SCENE_SERVERS][96];
    int listeners[SCENE_SERVERS], stop, stops[SCENE_SERVERS]; /* the proxy's; the servers' */
    uint32_t numbers[SCENE_SERVERS];
    bool own;
    scene_watch watch;
    void *user;
    scene_link *links;
    struct event_base *bases[SCENE_SERVERS]; /* who begins a coordinator waits for the keeper */
    dray__coordinator *coordinator;
    dray__keeper *keeper;
    pthread_t servers[SCENE_SERVERS], proxy;
};

/* ---- the servers ----------------------------------------------------------------------------- */

static void on_stop(evutil_socket_t fd, short what, void *user)
{
    (void)fd, (void)what;
    event_base_loopbreak(user);
}

static void serve(scene *s, int server)
{
    struct event_base *base = s->bases[server];
    struct event *stop = event_new(base, s->stops[server], EV_READ, on_stop, base);
    event_add(stop, NULL);
    event_base_dispatch(base);
    event_free(stop);
}

static void *coordinate(void *user)
{
    scene *s = user;
    serve(s, SCENE_COORDINATOR);
    dray__coordinator_free(s->coordinator);
    event_base_free(s->bases[SCENE_COORDINATOR]);
    return NULL;
}

static void *keep(void *user)
{
    serve(user, SCENE_KEEPER);
    return NULL;
}

static void start_servers(scene *s, const char *journals)
{
    const dray__coordinator_options options = {.unix_path = s->behind[SCENE_COORDINATOR],
                                               .keeper_path = s->paths[SCENE_KEEPER]};
    const char *keeper = s->behind[SCENE_KEEPER];
    for (int i = 0; i < SCENE_SERVERS; i++) {
        s->stops[i] = eventfd(0, EFD_CLOEXEC);
        MUST((s->bases[i] = event_base_new()));
    }
    MUST(dray__keeper_new(s->bases[SCENE_KEEPER], keeper, 0, &s->keeper, NULL) == 0);
    MUST(pthread_create(&s->servers[SCENE_KEEPER], NULL, keep, s) == 0);
    struct event_base *base = s->bases[SCENE_COORDINATOR];
    MUST(dray__coordinator_new(base, &options, &s->coordinator, NULL) == 0);
    MUST(dray__reports_add(s->coordinator, NULL) == 0);
    MUST(dray__registry_add(s->coordinator, NULL) == 0);
    MUST(dray__leases_add(s->coordinator, NULL) == 0);
    MUST(dray__queue_add(s->coordinator, base, keeper, journals, NULL, NULL) == 0);
    MUST(pthread_create(&s->servers[SCENE_COORDINATOR], NULL, coordinate, s) == 0);
}

static void say(int event)
{
    uint64_t one = 1;
    MUST(write(event, &one, sizeof one) == sizeof one);
}

/* The keeper last: a coordinator's journal may still read what it holds. */
static void stop_servers(scene *s)
{
    for (int i = 0; i < SCENE_SERVERS; i++) {
        say(s->stops[i]);
        pthread_join(s->servers[i], NULL);
        close(s->stops[i]);
    }
    dray__keeper_free(s->keeper);
    event_base_free(s->bases[SCENE_KEEPER]);
}

static void *keep_for_ever(void *base)
{
    event_base_dispatch(base);
    return NULL;
}

const char *scene_keeper(void)
{
    static char path[96];
    pthread_t thread;
    dray__keeper *keeper;
    if (path[0])
        return path;
    struct event_base *base = event_base_new();
    snprintf(path, sizeof path, "%s", fuzz_path("keeper"));
    MUST(dray__keeper_new(base, path, 64 << 20, &keeper, NULL) == 0);
    MUST(pthread_create(&thread, NULL, keep_for_ever, base) == 0);
    pthread_detach(thread);
    return path;
}

/* ---- the proxy ------------------------------------------------------------------------------- */

static struct sockaddr_un name_of(const char *path)
{
    struct sockaddr_un name = {.sun_family = AF_UNIX};
    MUST(strlen(path) < sizeof name.sun_path);
    strcpy(name.sun_path, path);
    return name;
}

/* A connection that the other side has ended takes nothing more: its reader will see that. */
void scene_send_bytes(scene_link *link, bool answer, const void *data, size_t size)
{
    int to = link->fds[!answer];
    for (const uint8_t *at = data; size;) {
        struct pollfd p = {.fd = to, .events = POLLOUT};
        ssize_t n = dray__frame_send(to, at, size, NULL, 0);
        if (n < 0 && (n != -EAGAIN || poll(&p, 1, 10000) <= 0))
            return;
        if (n > 0) {
            at += n;
            size -= (size_t)n;
        }
    }
}

void scene_send(scene_link *link, bool answer, const dray__frame *frame, const int *fds)
{
    dray__writer w = {0};
    int to = link->fds[!answer];
    struct pollfd p = {.fd = to, .events = POLLOUT};
    ssize_t n = -EAGAIN;
    MUST(dray__frame_put(&w, frame, NULL) == 0);
    while (n == -EAGAIN && poll(&p, 1, 10000) > 0)
        n = dray__frame_send(to, w.data, w.size, fds, frame->fd_count);
    if (n > 0)
        scene_send_bytes(link, answer, w.data + n, w.size - (size_t)n);
    dray__writer_free(&w);
}

void scene_put_answer(dray__writer *w, const dray__frame *frame, const char *keeper)
{
    dray__reader r = dray__reader_of(frame->payload, frame->size);
    size_t length;
    bool hello = frame->type == DRAY__MSG_HELLO;
    bool says = hello || frame->type == DRAY__MSG_QUEUE_KEEPER_FIND;
    dray__get_bytes(&r, hello ? 4 + 8 + 8 : 4);
    if (hello)
        dray__get_blob(&r, &length);
    size_t at = r.at;
    dray__get_blob(&r, &length);
    says = says && !r.failed && !(frame->flags & DRAY__FRAME_ERROR) && length;
    dray__put_bytes(w, frame->payload, says ? at : frame->size);
    if (!says)
        return;
    dray__put_string(w, keeper);
    dray__put_bytes(w, r.data + r.at, r.size - r.at);
}

static void accept_one(scene *s, int server)
{
    const struct sockaddr_un behind = name_of(s->behind[server]);
    scene_link *link = calloc(1, sizeof *link);
    MUST(link);
    link->server = server;
    link->number = s->numbers[server]++;
    link->fds[0] = accept4(s->listeners[server], NULL, NULL, SOCK_CLOEXEC | SOCK_NONBLOCK);
    link->fds[1] = socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0);
    MUST(link->fds[0] >= 0 && link->fds[1] >= 0);
    if (connect(link->fds[1], (const struct sockaddr *)&behind, sizeof behind) < 0)
        shutdown(link->fds[0], SHUT_RDWR);
    MUST(fcntl(link->fds[1], F_SETFL, O_NONBLOCK) == 0);
    link->next = s->links;
    s->links = link;
}

/* false: one side has ended. */
static bool hand_on(scene *s, scene_link *link, bool answer)
{
    int fds[DRAY__FRAME_FDS];
    dray__frame frame;
    int rc = dray__inbox_fill(&link->from[answer], link->fds[answer], NULL);
    if (rc)
        return rc == DRAY_EAGAIN;
    while ((rc = dray__inbox_take(&link->from[answer], &frame, fds, NULL)) == DRAY_OK) {
        s->watch(s->user, link, answer, &frame, fds);
        dray__close_fds(fds, frame.fd_count);
    }
    return rc == DRAY_EAGAIN;
}

static void end_link(scene *s, scene_link *link)
{
    scene_link **at = &s->links;
    while (*at != link)
        at = &(*at)->next;
    *at = link->next;
    for (int i = 0; i < 2; i++) {
        dray__inbox_free(&link->from[i]);
        close(link->fds[i]);
    }
    free(link->user);
    free(link);
}

static nfds_t list_fds(const scene *s, struct pollfd *out)
{
    nfds_t count = 0;
    out[count++] = (struct pollfd){.fd = s->stop, .events = POLLIN};
    for (int i = 0; i < SCENE_SERVERS; i++)
        out[count++] = (struct pollfd){.fd = s->listeners[i], .events = POLLIN};
    for (const scene_link *l = s->links; l; l = l->next)
        for (int i = 0; i < 2; i++)
            out[count++] = (struct pollfd){.fd = l->fds[i], .events = POLLIN};
    return count;
}

static void *hand_all_on(void *user)
{
    scene *s = user;
    struct pollfd fds[1024];
    for (;;) {
        nfds_t count = list_fds(s, fds), at = 1 + SCENE_SERVERS;
        MUST(count + 4 < sizeof fds / sizeof *fds);
        poll(fds, count, -1);
        for (scene_link *l = s->links, *next; l; l = next) {
            bool both = true;
            next = l->next;
            for (int i = 0; i < 2; i++)
                if (fds[at++].revents)
                    both = both && hand_on(s, l, i);
            if (!both)
                end_link(s, l);
        }
        for (int i = 0; i < SCENE_SERVERS; i++)
            if (fds[1 + i].revents & POLLIN)
                accept_one(s, i);
        if (fds[0].revents && !s->links)
            return NULL;
        if (fds[0].revents)
            usleep(1000);
    }
}

static void listen_at(scene *s, int server)
{
    static uint32_t number;
    snprintf(s->paths[server], sizeof s->paths[server], "%s/proxy-%u", fuzz_folder(), ++number);
    snprintf(s->behind[server], sizeof s->behind[server], "%s/real-%u", fuzz_folder(), number);
    const struct sockaddr_un name = name_of(s->paths[server]);
    s->listeners[server] = socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0);
    MUST(bind(s->listeners[server], (const struct sockaddr *)&name, sizeof name) == 0);
    MUST(listen(s->listeners[server], 64) == 0);
}

static scene *start(const char *const behind[SCENE_SERVERS], const char *journals,
                    scene_watch watch, void *user)
{
    scene *s = calloc(1, sizeof *s);
    MUST(s);
    s->watch = watch;
    s->user = user;
    s->stop = eventfd(0, EFD_CLOEXEC);
    for (int i = 0; i < SCENE_SERVERS; i++) {
        listen_at(s, i);
        if (behind)
            snprintf(s->behind[i], sizeof s->behind[i], "%s", behind[i]);
    }
    snprintf(s->address, sizeof s->address, "unix:%s", s->paths[SCENE_COORDINATOR]);
    s->own = !behind;
    if (s->own)
        start_servers(s, journals);
    MUST(pthread_create(&s->proxy, NULL, hand_all_on, s) == 0);
    return s;
}

scene *scene_start(const char *journals, scene_watch watch, void *user)
{
    return start(NULL, journals, watch, user);
}

scene *scene_start_at(const char *const paths[SCENE_SERVERS], scene_watch watch, void *user)
{
    return start(paths, NULL, watch, user);
}

const char *scene_address(const scene *s)
{
    return s->address;
}

const char *scene_path(const scene *s, int server)
{
    return s->paths[server];
}

void scene_stop(scene *s)
{
    say(s->stop);
    if (s->own)
        stop_servers(s);
    pthread_join(s->proxy, NULL);
    for (int i = 0; i < SCENE_SERVERS; i++) {
        close(s->listeners[i]);
        unlink(s->paths[i]);
    }
    close(s->stop);
    free(s);
}
