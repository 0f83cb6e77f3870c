/* What a coordinator and a keeper, or who stands in their place, answer to our clients. The first
 * byte says which client: 0 tasks of a queue, 1 trainers and engines, 2 raw messages. Then answers:
 * u16 type, u8 flags (1: an error; 2: bytes that are no frame come first; 4: none comes, the
 * connection ends), u8 kind of a descriptor (0: none), u16 size, payload. A request gets the next
 * one of its type, or, where there is none any more, an error.
 *
 * Whatever is answered, every call of the client returns, and all that it has is freed. */
#include "fuzz/scene.h"

#include "base/clock.h"
#include "base/error.h"

#include <fcntl.h>
#include <poll.h>
#include <sys/eventfd.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <sys/un.h>

const int fuzz_rounds = 20;

enum { LINKS = 32, ANSWERS = 512 };

typedef struct entry {
    uint16_t type;
    uint8_t flags, fd;
    const uint8_t *payload;
    size_t size;
    bool used;
} entry;

static struct server {
    int listener, stop;
    char path[96], address[112];
    struct {
        int fd; /* 0: none */
        dray__inbox inbox;
    } links[LINKS];
    entry answers[ANSWERS];
    uint32_t count;
} s;

/* ---- the server ------------------------------------------------------------------------------ */

static void hang_up(uint32_t link)
{
    close(s.links[link].fd);
    s.links[link].fd = 0;
    dray__inbox_free(&s.links[link].inbox);
}

static int make_fd(uint8_t kind)
{
    int fd = memfd_create("fuzz", MFD_CLOEXEC | MFD_ALLOW_SEALING);
    MUST(fd >= 0 && ftruncate(fd, kind % 8 ? (kind % 8) << 12 : 1 << 20) == 0);
    MUST(kind >> 7 ||
         fcntl(fd, F_ADD_SEALS, F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_FUTURE_WRITE) == 0);
    return fd;
}

static void reply(uint32_t link, const dray__frame *asked, const entry *a)
{
    dray__writer payload = {0}, out = {0};
    int fd = a && a->fd ? make_fd(a->fd) : -1;
    dray__frame frame = {.type = asked->type,
                         .id = asked->id,
                         .fd_count = fd >= 0,
                         .flags =
                             DRAY__FRAME_REPLY | (a && !(a->flags & 1) ? 0 : DRAY__FRAME_ERROR)};
    if (a) { /* the keeper is this server, too */
        frame.payload = a->payload;
        frame.size = (uint32_t)a->size;
        scene_put_answer(&payload, &frame, s.path);
    } else {
        dray_error error;
        dray__fail(&error, DRAY_EINVALID, "no");
        dray__frame_put_error(&payload, &error);
    }
    frame.payload = payload.data;
    frame.size = (uint32_t)payload.size;
    MUST(dray__frame_put(&out, &frame, NULL) == 0);
    if (a && a->flags & 2)
        dray__frame_send(s.links[link].fd, a->payload, a->size, NULL, 0);
    dray__frame_send(s.links[link].fd, out.data, out.size, &fd, fd >= 0);
    if (fd >= 0)
        close(fd);
    dray__writer_free(&payload);
    dray__writer_free(&out);
}

/* false: the connection is to end. */
static bool handle(uint32_t link, const dray__frame *frame)
{
    entry *found = NULL;
    for (uint32_t i = 0; i < s.count && !found; i++)
        if (s.answers[i].type == frame->type && !s.answers[i].used)
            found = &s.answers[i];
    if (found)
        found->used = true;
    if (found && found->flags & 4)
        return false;
    reply(link, frame, found);
    return true;
}

static void read_link(uint32_t link)
{
    int fds[DRAY__FRAME_FDS], rc;
    dray__frame frame;
    dray__inbox *inbox = &s.links[link].inbox;
    bool goes_on = dray__inbox_fill(inbox, s.links[link].fd, NULL) == DRAY_OK;
    while (goes_on && (rc = dray__inbox_take(inbox, &frame, fds, NULL)) != DRAY_EAGAIN) {
        MUST(rc == DRAY_OK); /* our client says what it should */
        dray__close_fds(fds, frame.fd_count);
        goes_on = handle(link, &frame);
    }
    if (!goes_on)
        hang_up(link);
}

static void accept_one(void)
{
    int fd = accept4(s.listener, NULL, NULL, SOCK_CLOEXEC);
    for (uint32_t i = 0; fd >= 0 && i < LINKS; i++)
        if (!s.links[i].fd) {
            s.links[i].fd = fd;
            return;
        }
    close(fd);
}

static void *serve(void *user)
{
    for (;;) {
        struct pollfd fds[LINKS + 2] = {{.fd = s.stop, .events = POLLIN},
                                        {.fd = s.listener, .events = POLLIN}};
        for (uint32_t i = 0; i < LINKS; i++)
            fds[i + 2] =
                (struct pollfd){.fd = s.links[i].fd ? s.links[i].fd : -1, .events = POLLIN};
        poll(fds, LINKS + 2, -1);
        if (fds[0].revents)
            return user;
        for (uint32_t i = 0; i < LINKS; i++)
            if (fds[i + 2].revents)
                read_link(i);
        if (fds[1].revents)
            accept_one();
    }
}

static void make(void)
{
    struct sockaddr_un name = {.sun_family = AF_UNIX};
    snprintf(s.path, sizeof s.path, "%s", fuzz_path("server"));
    snprintf(s.address, sizeof s.address, "unix:%s", s.path);
    strcpy(name.sun_path, s.path);
    s.listener = socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0);
    MUST(bind(s.listener, (const struct sockaddr *)&name, sizeof name) == 0);
    MUST(listen(s.listener, 64) == 0);
    s.stop = eventfd(0, EFD_CLOEXEC);
}

/* ---- inputs ---------------------------------------------------------------------------------- */

static void read_answers(dray__reader *r)
{
    s.count = 0;
    while (r->at < r->size && s.count < ANSWERS) {
        entry *a = &s.answers[s.count++];
        *a = (entry){.type = dray__get_u16(r)};
        a->flags = dray__get_u8(r);
        a->fd = dray__get_u8(r);
        a->size = dray__get_u16(r);
        a->size = a->size < r->size - r->at ? a->size : r->size - r->at;
        a->payload = dray__get_bytes(r, a->size);
        a->size = a->payload ? a->size : 0;
        a->used = a->type == DRAY__MSG_QUEUE_KEEPER_FIND; /* nobody reads far away */
    }
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    uint64_t one = 1;
    pthread_t thread;
    dray__reader r = dray__reader_of(data, size);
    int who = dray__get_u8(&r) % 3;
    if (!s.address[0])
        make();
    read_answers(&r);
    MUST(pthread_create(&thread, NULL, serve, NULL) == 0);
    if (who == 0)
        scene_queue(s.address, "queue", 0, 0, false);
    else if (who == 1)
        scene_weights(s.address, "model", false);
    else
        scene_by_hand(s.address, "model", false);
    MUST(write(s.stop, &one, sizeof one) == sizeof one);
    pthread_join(thread, NULL);
    MUST(read(s.stop, &one, sizeof one) == sizeof one);
    for (uint32_t i = 0; i < LINKS; i++)
        if (s.links[i].fd)
            hang_up(i);
    return 0;
}

/* ---- what it begins with --------------------------------------------------------------------- */

static void record(void *user, scene_link *link, bool answer, const dray__frame *frame,
                   const int *fds)
{
    dray__writer *out = user;
    if (answer && frame->size < UINT16_MAX && frame->flags) {
        dray__put_u16(out, frame->type);
        dray__put_u8(out, frame->flags & DRAY__FRAME_ERROR ? 1 : 0);
        dray__put_u8(out, frame->fd_count ? 8 : 0);
        dray__put_u16(out, (uint16_t)frame->size);
        dray__put_bytes(out, frame->payload, frame->size);
    }
    scene_send(link, answer, frame, fds);
}

void fuzz_seeds(fuzz_put put, void *user)
{
    for (uint8_t who = 0; who < 3; who++) {
        dray__writer answers = {0};
        scene *servers = scene_start(NULL, record, &answers);
        if (who == 0)
            scene_queue(scene_address(servers), "queue", 0, 0, true);
        else if (who == 1)
            scene_weights(scene_address(servers), "model", true);
        else
            scene_by_hand(scene_address(servers), "model", true);
        scene_stop(servers);
        fuzz_put_kind(put, user, who, &answers);
        dray__writer_free(&answers);
    }
}
