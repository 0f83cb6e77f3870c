/* Sends changed frames to running processes: `dray serve`, which is coordinator, keeper of samples
 * and their data server, and a trainer with its data server. The messages of our own clients pass
 * through a proxy, which sends changed frames after each: with other bits, numbers, lengths and
 * types, earlier frames and repeated ones, and bytes that are no frame. After each round, an
 * undisturbed client must be served and get right bytes. At the end no process has died, and none
 * holds more memory or descriptors than after the first quarter. */
#include "fuzz/scene.h"
#include "suite.h"

#include "base/clock.h"
#include "base/random.h"
#include "control/channel.h"
#include "net/cells.h"
#include "net/stream.h"
#include "seed.h"
#include "weights/registry/registry.h"
#include "weights/server/pull.h"

#include <dirent.h>
#include <dray/weights.h>
#include <errno.h>
#include <inttypes.h>
#include <poll.h>
#include <signal.h>
#include <stdatomic.h>
#include <sys/prctl.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <time.h>

enum {
    FRAMES = 5000, /* of one DRAY_TEST_SCALE */
    COPIES = 24, /* changed ones of each frame; to keepers, to whom less is said, 5 times as many */
    KEPT = 64,   /* frames of before */
    GROWTH = 96, /* MiB that a process may grow */
    DESCRIPTORS = 64,
    REQUESTS = 100 /* to data servers, a round */
};
#define OURS (UINT64_C(1) << 62) /* set in the ids of changed requests */

static uint64_t seed, drawn;
static atomic_uint sent[SCENE_SERVERS + 1]; /* changed frames; the last: requests to data servers */
static struct {
    pid_t serve, trainer;
    char socket[128], keeper[160], address[160];
    FILE *said; /* what `dray serve` prints */
} live;

static uint64_t below(uint64_t n)
{
    return dray__random_u64(seed, 0, drawn++) % n;
}

/* ---- changing -------------------------------------------------------------------------------- */

/* In place; `size` bytes can be there, `*now` are. */
static void change(uint8_t *data, size_t size, size_t *now)
{
    *now = below(8) ? *now : below(size + 1);
    for (uint64_t k = 1 + below(4); k-- > 0 && *now;) {
        size_t at = below(*now), length = 1 + below(8);
        uint64_t big = UINT64_MAX >> below(64);
        if (below(3))
            data[at] ^= (uint8_t)(1u << below(8));
        else
            memcpy(data + at, &big, length < *now - at ? length : *now - at);
    }
}

static const uint16_t types[] = {
#define XX(name, value, who) value,
    DRAY__MESSAGE_MAP(XX)
#undef XX
};

/* What makes a keeper forget what everybody has, is for this user to say. */
static bool is_left_out(uint16_t type)
{
    /* what ends, or begins anew, all that a client goes on with: now and then */
    if (type == DRAY__MSG_QUEUE_OPEN || type == DRAY__MSG_QUEUE_CLOSE ||
        type == DRAY__MSG_QUEUE_END || type == DRAY__MSG_WEIGHTS_CLOSE)
        return below(200) != 0;
    return type == DRAY__MSG_KEEPER_RESET;
}

typedef struct kept {
    uint16_t type;
    size_t size;
    uint8_t data[2048];
} kept;

static kept before[KEPT]; /* the proxy's thread's alone */
static uint32_t kept_count;

static void keep(const dray__frame *frame)
{
    kept *k = &before[kept_count++ % KEPT];
    if (frame->size > sizeof k->data)
        return;
    k->type = frame->type;
    k->size = frame->size;
    if (frame->size)
        memcpy(k->data, frame->payload, frame->size);
}

static void send_changed(scene_link *link, const dray__frame *frame, const int *fds)
{
    const kept *k = &before[below(kept_count < KEPT ? kept_count : KEPT)];
    bool old = below(4) == 0;
    const uint8_t *from = old ? k->data : frame->payload;
    size_t now = old ? k->size : frame->size, room = now + 16;
    uint8_t *payload = calloc(1, room);
    dray__frame out = {.type = old ? k->type : frame->type, .id = OURS + below(1 << 20)};
    MUST(payload);
    if (now)
        memcpy(payload, from, now);
    if (below(8)) /* else: it is the same once more */
        change(payload, room, &now);
    if (below(16) == 0)
        out.type = types[below(sizeof types / sizeof *types)];
    out.fd_count = below(4) && !old ? frame->fd_count : 0;
    out.payload = payload;
    out.size = (uint32_t)now;
    if (!is_left_out(out.type)) {
        scene_send(link, false, &out, fds);
        sent[link->server]++;
    }
    free(payload);
}

/* A frame whose header is wrong ends the connection. */
static void send_broken(scene_link *link, const dray__frame *frame)
{
    dray__writer w = {0};
    dray__frame copy = *frame;
    copy.fd_count = 0;
    MUST(dray__frame_put(&w, &copy, NULL) == 0);
    size_t now = w.size;
    change(w.data, w.size, &now);
    scene_send_bytes(link, false, w.data, now);
    sent[link->server]++;
    dray__writer_free(&w);
}

static void disturb(void *user, scene_link *link, bool answer, const dray__frame *frame,
                    const int *fds)
{
    const scene *const *proxy = user;
    dray__writer payload = {0};
    dray__frame copy = *frame;
    if (answer && frame->id & OURS)
        return;
    if (answer) {
        scene_put_answer(&payload, frame, scene_path(*proxy, SCENE_KEEPER));
        copy.payload = payload.data;
        copy.size = (uint32_t)payload.size;
    }
    scene_send(link, answer, &copy, fds);
    dray__writer_free(&payload);
    if (answer || frame->type == DRAY__MSG_HELLO)
        return;
    keep(frame);
    for (int i = 0; i < (link->server == SCENE_KEEPER ? 5 * COPIES : COPIES); i++)
        send_changed(link, frame, fds);
    if (below(300) == 0)
        send_broken(link, frame);
}

/* ---- the processes --------------------------------------------------------------------------- */

/* What an address sanitizer keeps of freed memory is none of what a process holds. */
static void forget_early(void)
{
    char options[1024];
    const char *given = getenv("ASAN_OPTIONS");
    snprintf(options, sizeof options, "%s:quarantine_size_mb=4", given ? given : "");
    setenv("ASAN_OPTIONS", options, 1);
}

static void start_serve(const char *folder)
{
    int out[2];
    char line[1024], journal[200], master[200], *program = getenv("DRAY_PROGRAM");
    snprintf(live.socket, sizeof live.socket, "%s/live", folder);
    snprintf(live.keeper, sizeof live.keeper, "%s.keeper", live.socket);
    snprintf(live.address, sizeof live.address, "unix:%s", live.socket);
    snprintf(journal, sizeof journal, "%s/journal", folder);
    snprintf(master, sizeof master, "%s/master", folder);
    assert_int_equal(pipe(out), 0);
    if ((live.serve = fork()) == 0) {
        prctl(PR_SET_PDEATHSIG, SIGKILL);
        forget_early();
        dup2(out[1], 1);
        close(out[0]);
        close(out[1]);
        execl(program, program, "serve", "--json", "--listen", live.address, "--listen",
              "tcp:127.0.0.1:0", "--journal", journal, "--master", master, NULL);
        _exit(1);
    }
    close(out[1]);
    live.said = fdopen(out[0], "r");
    assert_true(live.said && fgets(line, sizeof line, live.said) && strstr(line, "listening"));
}

/* Publishes 4,096 bytes of 7, and lets everybody read them. */
static void train(int ready)
{
    const int64_t shape[1] = {1024};
    const dray_region_info info = {.kind = DRAY_REGION_SHARED, .bytes = 4096, .name = "w"};
    const dray_block block = {.extent = {1024}, .stride = {4}};
    dray_layout *layout;
    dray_region *region;
    dray_context *context;
    dray_publisher *publisher;
    dray_options options = DRAY_OPTIONS_INIT;
    dray_publisher_options o = DRAY_PUBLISHER_OPTIONS_INIT;
    prctl(PR_SET_PDEATHSIG, SIGKILL);
    setenv("DRAY_DATA_ADDRESS", "127.0.0.1", 1);
    options.address = live.address;
    options.role = options.name = "trainer";
    o.regions = &region;
    MUST(dray_layout_new(&layout, NULL) == 0);
    MUST(dray_layout_add_region(layout, &info, NULL, NULL) == 0);
    MUST(dray_layout_add_tensor(layout, "weight", DRAY_F32, 1, shape, NULL, NULL) == 0);
    MUST(dray_layout_add_block(layout, &block, NULL) == 0);
    MUST(dray_regions_for_layout(layout, 1, &region, NULL) == 0);
    memset(dray_region_base(region), 7, 4096);
    MUST(dray_open(&options, &context, NULL) == 0);
    MUST(dray_publisher_open(context, "live", layout, &o, &publisher, NULL) == 0);
    MUST(dray_publisher_publish(publisher, 1, NULL, NULL) == 0);
    MUST(write(ready, "x", 1) == 1);
    pause();
    _exit(0);
}

static void start_trainer(void)
{
    int ready[2];
    char byte;
    assert_int_equal(pipe(ready), 0);
    if ((live.trainer = fork()) == 0)
        train(ready[1]);
    close(ready[1]);
    assert_int_equal(read(ready[0], &byte, 1), 1);
    close(ready[0]);
}

static long resident_mib(pid_t pid)
{
    char path[64];
    long pages = 0, shared = 0;
    snprintf(path, sizeof path, "/proc/%d/statm", (int)pid);
    FILE *file = fopen(path, "r");
    assert_true(file && fscanf(file, "%*d %ld %ld", &pages, &shared) == 2);
    fclose(file);
    return (pages - shared) * 4 / 1024;
}

/* But for samples: a keeper has those that it was given until it is told to drop them. */
static int descriptors(pid_t pid)
{
    char path[64], target[256];
    int count = 0;
    snprintf(path, sizeof path, "/proc/%d/fd", (int)pid);
    DIR *dir = opendir(path);
    for (const struct dirent *entry; dir && (entry = readdir(dir));) {
        ssize_t n = readlinkat(dirfd(dir), entry->d_name, target, sizeof target - 1);
        target[n > 0 ? n : 0] = 0;
        count += strstr(target, "dray-samples") == NULL;
    }
    assert_non_null(dir);
    closedir(dir);
    return count;
}

/* ---- data servers ---------------------------------------------------------------------------- */

typedef struct data_server {
    char endpoint[DRAY__STREAM_ADDRESS];
    dray__tls_key key;
    dray__stream_keys keys;
    dray__writer request; /* a right one */
    uint8_t byte;         /* what all of its answer is; 0: it has no bytes */
} data_server;

static void get_text(dray__reader *r, char *out, size_t capacity)
{
    size_t size;
    const char *text = dray__get_blob(r, &size);
    snprintf(out, capacity, "%.*s", text ? (int)size : 0, text ? text : "");
}

static dray__reader ask(dray__channel *channel, uint16_t type, dray__writer *w)
{
    dray__reply reply;
    dray_error error;
    if (dray__call(channel, type, w, NULL, 0, dray__deadline(20 * DRAY__SECOND), &reply, &error))
        fail_msg("%s: %s", dray__message_name(type), error.message);
    dray__close_fds(reply.fds, reply.fd_count);
    return reply.payload;
}

/* The keeper joins when it finds the coordinator. */
static dray__reader find_keeper(dray__channel *channel)
{
    dray__writer w = {0};
    dray__reply reply;
    dray_error error;
    int rc = DRAY_EUNSUPPORTED;
    for (int i = 0; rc == DRAY_EUNSUPPORTED && i < 4000; i++) {
        dray__put_u32(&w, 0);
        rc = dray__call(channel, DRAY__MSG_QUEUE_KEEPER_FIND, &w, NULL, 0,
                        dray__deadline(20 * DRAY__SECOND), &reply, &error);
        if (rc)
            poll(NULL, 0, 5);
    }
    if (rc)
        fail_msg("%s", error.message);
    dray__writer_free(&w);
    return reply.payload;
}

/* Of samples: nothing is there under the number. */
static void find_samples(dray__channel *channel, const dray__networks *trusted, data_server *out)
{
    char path[512];
    dray__reader r = find_keeper(channel);
    dray__get_u32(&r);
    get_text(&r, path, sizeof path);
    get_text(&r, out->endpoint, sizeof out->endpoint);
    get_text(&r, out->key.identity, sizeof out->key.identity);
    size_t size;
    const void *key = dray__get_blob(&r, &size);
    assert_true(key && size == sizeof out->key.bytes);
    memcpy(out->key.bytes, key, size);
    out->keys = (dray__stream_keys){.key = &out->key, .trusted = trusted, .transport = "stream"};
    dray__cells_request(&out->request, 7, &(dray__cell){1, 0, 64}, 1);
}

static void put_engine(dray__writer *w)
{
    dray_layout *layout;
    void *packed;
    size_t size;
    const int64_t shape[1] = {1024};
    const dray_region_info info = {.kind = DRAY_REGION_HOST, .bytes = 4096};
    const dray_block block = {.extent = {1024}, .stride = {4}};
    MUST(dray_layout_new(&layout, NULL) == 0);
    MUST(dray_layout_add_region(layout, &info, NULL, NULL) == 0);
    MUST(dray_layout_add_tensor(layout, "weight", DRAY_F32, 1, shape, NULL, NULL) == 0);
    MUST(dray_layout_add_block(layout, &block, NULL) == 0);
    MUST(dray_layout_pack(layout, &packed, &size, NULL) == 0);
    dray__put_string(w, "live");
    dray__put_string(w, "reader");
    dray__put_u32(w, 0);
    dray__put_u32(w, 1);
    dray__put_u64(w, 4711);
    dray__put_string(w, "");
    dray__put_u32(w, 0);
    dray__put_u32(w, 0);
    dray__put_blob(w, packed, size);
    free(packed);
    dray_layout_free(layout);
}

/* Begins an update, which gives the right to read. */
static uint64_t begin_update(dray__channel *channel, uint64_t key, uint64_t *set)
{
    dray__writer w = {0};
    dray__put_u64(&w, key);
    dray__put_u8(&w, DRAY_MODE_TENSOR);
    dray__put_u64(&w, 0);
    dray__put_string(&w, "");
    dray__put_u64(&w, 0);
    dray__put_u8(&w, 1);
    dray__put_i64(&w, 10 * DRAY__SECOND);
    dray__put_u8(&w, DRAY__UPDATE);
    dray__put_u8(&w, 0);
    dray__put_u64(&w, 0);
    dray__put_u64(&w, 0);
    dray__reader r = ask(channel, DRAY__MSG_UPDATE_BEGIN, &w);
    uint64_t attempt = dray__get_u64(&r);
    dray__get_bytes(&r, 1 + 8 + 8 + 1);
    *set = dray__get_u64(&r);
    dray__writer_free(&w);
    return attempt;
}

static void find_weights(dray__channel *channel, const dray_context *context, data_server *out)
{
    dray__writer w = {0};
    uint64_t set;
    put_engine(&w);
    dray__reader r = ask(channel, DRAY__MSG_SUBSCRIBER_OPEN, &w);
    uint64_t key = dray__get_u64(&r), attempt = begin_update(channel, key, &set);
    dray__put_u64(&w, key);
    dray__put_u8(&w, DRAY__SOURCES_MEMBERS);
    dray__put_i64(&w, 10 * DRAY__SECOND);
    dray__put_u64(&w, set);
    dray__put_u32(&w, 0);
    r = ask(channel, DRAY__MSG_UPDATE_SOURCES, &w);
    dray__get_bytes(&r, 4 + 8 + 8 + 8 + 8);
    uint64_t token = dray__get_u64(&r);
    get_text(&r, out->endpoint, sizeof out->endpoint);
    assert_false(r.failed);
    out->keys = *dray__context_keys(context);
    const dray__pull_rect rect = {.ndim = 1, .dtype = DRAY_F32, .rect = {{16}, {512, 1, 1, 1}}};
    dray__pull_put_request(&out->request, 7, DRAY__PULL_SUMS, token, attempt, NULL, &rect, 1);
    out->byte = 7;
    dray__writer_free(&w);
}

static bool wait_for(dray__stream *stream, short more)
{
    struct pollfd p = {.fd = dray__stream_fd(stream),
                       .events = dray__stream_events(stream, (short)(POLLIN | more))};
    return dray__stream_pending(stream) || poll(&p, 1, 20000) > 0;
}

static dray__stream *reach(const data_server *d)
{
    dray__stream *stream;
    int rc;
    MUST(dray__stream_connect(d->endpoint, &d->keys, 0, &stream, NULL) == 0);
    while ((rc = dray__stream_ready(stream, NULL)) == DRAY_EAGAIN)
        MUST(wait_for(stream, POLLOUT));
    MUST(rc == 0);
    return stream;
}

/* false: the server has ended the connection. */
static bool say(dray__stream *stream, const uint8_t *data, size_t size)
{
    while (size) {
        ssize_t n = dray__stream_send(stream, data, size, false);
        if (n < 0 && (n != -EAGAIN || !wait_for(stream, POLLOUT)))
            return false;
        data += n > 0 ? n : 0;
        size -= n > 0 ? (size_t)n : 0;
    }
    return dray__stream_flush(stream) != -EPIPE;
}

static bool hear(dray__stream *stream, uint8_t *data, size_t size)
{
    while (size) {
        ssize_t n = dray__stream_recv(stream, data, size);
        if (n == -EAGAIN && wait_for(stream, POLLIN))
            continue;
        if (n <= 0)
            return false;
        data += n;
        size -= (size_t)n;
    }
    return true;
}

/* The answer to the right request. */
static void check_data(const data_server *d)
{
    uint8_t header[DRAY__ANSWER_HEADER], *rest;
    dray__answer answer;
    dray__stream *stream = reach(d);
    MUST(say(stream, d->request.data, d->request.size) && hear(stream, header, sizeof header));
    MUST(dray__answer_get(header, &answer, NULL) == 0 && answer.status == 0);
    MUST((rest = malloc(answer.head_bytes + answer.data_bytes + 1)));
    MUST(hear(stream, rest, answer.head_bytes + answer.data_bytes));
    MUST(!d->byte || answer.data_bytes == 2048);
    for (uint64_t i = 0; i < answer.data_bytes; i++)
        MUST(rest[answer.head_bytes + i] == d->byte);
    free(rest);
    dray__stream_close(stream);
}

/* Changed requests on a few connections; what they are answered is not looked at. */
static void disturb_data(const data_server *d)
{
    dray__stream *stream = NULL;
    uint8_t heard[65536];
    for (int i = 0; i < REQUESTS; i++) {
        size_t now = d->request.size;
        uint8_t *copy = malloc(now);
        MUST(copy);
        memcpy(copy, d->request.data, now);
        if (below(6) == 0)
            change(copy, d->request.size, &now);
        else if (now > DRAY__REQUEST_HEADER) { /* the header stays */
            size_t body = now - DRAY__REQUEST_HEADER, whole = body;
            change(copy + DRAY__REQUEST_HEADER, whole, &body);
        }
        stream = stream ? stream : reach(d);
        bool goes_on = say(stream, copy, now);
        ssize_t n = 1;
        while (goes_on && n > 0)
            n = dray__stream_recv(stream, heard, sizeof heard);
        if (!goes_on || n != -EAGAIN || below(20) == 0) {
            dray__stream_close(stream);
            stream = NULL;
        }
        free(copy);
        sent[SCENE_SERVERS]++;
    }
    dray__stream_close(stream);
}

/* ---- the test -------------------------------------------------------------------------------- */

static void check_health(uint32_t round)
{
    scene_queue(live.address, "healthy", 0, round + 1, true);
    scene_weights(live.address, "healthy", true);
    assert_int_equal(waitpid(live.serve, NULL, WNOHANG), 0);
    assert_int_equal(waitpid(live.trainer, NULL, WNOHANG), 0);
}

static uint32_t all_sent(void)
{
    return sent[0] + sent[1] + sent[SCENE_SERVERS];
}

typedef struct level {
    long memory[2];
    int descriptors[2];
} level;

static level measure(void)
{
    return (level){{resident_mib(live.serve), resident_mib(live.trainer)},
                   {descriptors(live.serve), descriptors(live.trainer)}};
}

static void check_level(const level *first)
{
    level last = measure();
    for (int i = 0; i < 2; i++) {
        print_message("%s: %ld, then %ld MiB; %d, then %d descriptors\n", i ? "trainer" : "serve",
                      first->memory[i], last.memory[i], first->descriptors[i], last.descriptors[i]);
        assert_true(last.memory[i] <= first->memory[i] + GROWTH);
        assert_true(last.descriptors[i] <= first->descriptors[i] + DESCRIPTORS);
    }
}

/* Rounds until so many were sent. */
static void go_on(const scene *proxy, const data_server servers[2], uint32_t until)
{
    static bool (*const all[])(const char *, const char *, bool) = {scene_weights, scene_by_hand};
    static uint32_t round;
    for (; all_sent() < until; round++) {
        char name[64];
        snprintf(name, sizeof name, "disturbed-%u", round % 8);
        if (round % 2)
            scene_queue(scene_address(proxy), name, round % 4 == 1 ? 3 : 0, round + 1, false);
        else
            all[round / 2 % 2](scene_address(proxy), name, false);
        disturb_data(&servers[round % 2]);
        check_data(&servers[0]);
        check_data(&servers[1]);
        check_health(round);
    }
}

static void run(uint32_t wanted)
{
    dray_error error;
    dray_options options = DRAY_OPTIONS_INIT;
    dray_context *context;
    dray__channel *channel;
    data_server servers[2] = {0};
    static const dray__networks none;
    static const scene *proxy;
    const char *const paths[SCENE_SERVERS] = {live.socket, live.keeper};
    scene_patience_ns = DRAY__SECOND / 4;
    proxy = scene_start_at(paths, disturb, &proxy);
    options.address = live.address;
    options.name = options.role = "engine";
    if (dray_open(&options, &context, &error) || dray__channel_open(context, &channel, &error))
        fail_msg("%s", error.message);
    find_samples(channel, &none, &servers[0]);
    find_weights(channel, context, &servers[1]);
    go_on(proxy, servers, wanted / 4);
    level first = measure();
    go_on(proxy, servers, wanted);
    check_level(&first);
    dray__channel_close(channel);
    dray_close(context);
    for (int i = 0; i < 2; i++)
        dray__writer_free(&servers[i].request);
    scene_stop((scene *)(uintptr_t)proxy);
}

TEST(test_mutated)
{
    int status;
    seed = test_seed();
    if (access(getenv("DRAY_PROGRAM") ? getenv("DRAY_PROGRAM") : "", X_OK) < 0)
        skip();
    start_serve(fuzz_folder());
    start_trainer();
    run((uint32_t)test_times(FRAMES));
    print_message("changed: %u frames to the coordinator, %u to its keeper, %u requests for data\n",
                  sent[0], sent[1], sent[SCENE_SERVERS]);
    kill(live.trainer, SIGKILL);
    waitpid(live.trainer, NULL, 0);
    kill(live.serve, SIGTERM);
    assert_int_equal(waitpid(live.serve, &status, 0), live.serve);
    assert_int_equal(status, 0);
    fclose(live.said);
}

SUITE(NULL, NULL)
