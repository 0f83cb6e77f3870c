/* Tests that control does not trust what it receives: mutated frames, descriptors, clients that do
 * not read or that write byte by byte, many clients, and a coordinator that hangs. */
#include "control/fixture.h"
#include "suite.h"

#include "base/hash.h"
#include "base/random.h"
#include "control/channel.h"
#include "control/frame.h"
#include "control/token.h"
#include "net/address.h"
#include "seed.h"

#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <poll.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <time.h>

static coordinator_fixture f;
static uint64_t seed, drawn;
static int baseline; /* descriptors of the coordinator when nobody is connected */

static uint64_t draw(uint64_t below)
{
    return dray__random_u64(seed, 0, drawn++) % below;
}

/* 0x7001 echoes payload and descriptors, 0x7002 leaves the descriptors lying, 0x7003 is kept
 * for a moment, 0x7004 for longer than the test. */
static void handle(void *self, dray__request *request)
{
    (void)self;
    int fds[DRAY__FRAME_FDS];
    uint32_t count = 0;
    uint16_t type = dray__request_type(request);
    if (type == 0x7003) {
        dray__request_expire_at(request, dray__deadline((int64_t)draw(1000) * 1000));
        return;
    }
    if (type == 0x7004) {
        dray__request_expire_at(request, dray__deadline(600 * DRAY__SECOND));
        return;
    }
    if (type == 0x7001)
        for (; count < dray__request_fd_count(request); count++)
            fds[count] = dray__request_take_fd(request, count);
    dray__reader *r = dray__request_payload(request);
    dray__writer w = {0};
    dray__put_bytes(&w, r->data, r->size);
    dray__request_reply(request, &w, fds, count);
    dray__writer_free(&w);
    dray__close_fds(fds, count);
}

static void expired(void *self, dray__request *request, int channel_gone)
{
    (void)self, (void)channel_gone;
    dray__request_reply(request, NULL, NULL, 0);
}

static int add_service(dray__coordinator *coordinator, dray_error *error)
{
    static const dray__service service = {
        .name = "test", .first = 0x7001, .last = 0x7004, .handle = handle, .expired = expired};
    return dray__coordinator_add(coordinator, &service, NULL, error);
}

static int count_fds(pid_t pid)
{
    char path[64];
    snprintf(path, sizeof path, "/proc/%d/fd", pid);
    DIR *folder = opendir(path);
    assert_non_null(folder);
    int count = 0;
    while (readdir(folder))
        count++;
    closedir(folder);
    return count;
}

static void fds_return_to(pid_t pid, int expected)
{
    for (int i = 0; i < 5000 && count_fds(pid) != expected; i++)
        poll(NULL, 0, 2);
    assert_int_equal(count_fds(pid), expected);
}

FIXTURE(start)
{
    seed = test_seed();
    f.tcp = true;
    f.options.unread_bytes = 4 << 20;
    fixture_fork(&f, add_service);
    baseline = count_fds(f.process);
    return 0;
}

FIXTURE(stop)
{
    fixture_stop(&f);
    return 0;
}

/* ---- what the tests do again and again ------------------------------------------------------- */

/* A connection of the test's own; over TCP with TLS, or with garbage where TLS should be. */
typedef struct raw {
    int fd;
    dray__tls *tls;
} raw;

static raw connect_plain(const char *text)
{
    dray__address address;
    raw c = {-1, NULL};
    assert_int_equal(dray__address_parse(text, &address, NULL), DRAY_OK);
    assert_int_equal(
        dray__address_connect(&address, text, dray__deadline(10 * DRAY__SECOND), &c.fd, NULL),
        DRAY_OK);
    return c;
}

static raw connect_raw(const char *text)
{
    dray__address address;
    dray__token token;
    raw c = connect_plain(text);
    assert_int_equal(dray__address_parse(text, &address, NULL), DRAY_OK);
    if (address.local)
        return c;
    assert_int_equal(dray__token_find(&address, &token, NULL), DRAY_OK);
    assert_int_equal(dray__tls_connect(c.fd, &token, &c.tls, NULL), DRAY_OK);
    int status;
    while ((status = dray__tls_handshake(c.tls, NULL)) == DRAY_EAGAIN) {
        struct pollfd p = {.fd = c.fd, .events = dray__tls_events(c.tls)};
        assert_int_equal(poll(&p, 1, 30000), 1);
    }
    assert_int_equal(status, DRAY_OK);
    return c;
}

static void close_raw(raw *c)
{
    dray__tls_free(c->tls);
    close(c->fd);
}

/* Sends all, or as much as the other side takes before it closes. */
static bool send_raw(const raw *c, const uint8_t *data, size_t size, const int *fds,
                     uint32_t fd_count)
{
    while (size || (c->tls && dray__tls_unsent(c->tls))) {
        ssize_t n = size ? dray__link_send(c->fd, c->tls, data, size, fds, fd_count)
                         : dray__tls_flush(c->tls);
        if (n == -EAGAIN) {
            struct pollfd p = {.fd = c->fd, .events = POLLOUT};
            assert_int_equal(poll(&p, 1, 30000), 1);
            continue;
        }
        if (n < 0)
            return false;
        data += n;
        size -= (size_t)n;
        fd_count = 0;
    }
    return true;
}

/* Whether the other side closes within half a minute; what it sends is thrown away. */
static bool closes(const raw *c)
{
    char data[4096];
    struct pollfd p = {.fd = c->fd, .events = POLLIN};
    while (poll(&p, 1, 30000) == 1) {
        ssize_t n = recv(c->fd, data, sizeof data, 0);
        if (n == 0 || (n < 0 && errno != EAGAIN && errno != EINTR))
            return true;
    }
    return false;
}

static void still_serves(void)
{
    dray_context *context = fixture_open(&f, "healthy", "tool", 0);
    assert_int_equal(dray_barrier(context, "healthy", 1, 30 * DRAY__SECOND, NULL), DRAY_OK);
    dray_close(context);
}

static void put(dray__writer *out, uint16_t type, uint64_t id, dray__writer *payload)
{
    dray__frame frame = {
        .type = type, .id = id, .payload = payload->data, .size = (uint32_t)payload->size};
    assert_int_equal(dray__frame_put(out, &frame, NULL), DRAY_OK);
    dray__writer_reset(payload);
}

static void put_hello(dray__writer *out, dray__writer *payload)
{
    dray__put_u32(payload, DRAY__PROTOCOL_VERSION);
    dray__put_u32(payload, DRAY__PROTOCOL_VERSION);
    dray__put_string(payload, "raw");
    dray__put_string(payload, "task");
    dray__put_u32(payload, 0);
    dray__put_u64(payload, 1);
    dray__put_i64(payload, getpid());
    put(out, DRAY__MSG_HELLO, 1, payload);
}

/* ---- mutations ------------------------------------------------------------------------------- */

/* A conversation that is right, with where its frames begin. */
static size_t make_talk(dray__writer *out, size_t starts[16])
{
    dray__writer p = {0};
    size_t n = 0;
    starts[n++] = out->size;
    put_hello(out, &p);
    starts[n++] = out->size;
    dray__put_u64(&p, draw(20));
    dray__put_blob(&p, "0123456789abcdef", 16);
    put(out, DRAY__MSG_ATTACH, 2, &p);
    starts[n++] = out->size;
    dray__put_string(&p, "fuzzed");
    dray__put_u32(&p, 2);
    dray__put_i64(&p, (int64_t)draw(2000000));
    put(out, DRAY__MSG_BARRIER, 3, &p);
    starts[n++] = out->size;
    dray__put_string(&p, "fuzz");
    dray__put_string(&p, "{\"a\": [1, 2.5, null, {\"b\": \"c\"}]}");
    put(out, DRAY__MSG_REPORT_POST, 4, &p);
    starts[n++] = out->size;
    dray__put_string(&p, draw(2) ? "" : "fuzz");
    dray__put_u64(&p, draw(2) ? 0 : UINT64_MAX);
    dray__put_i64(&p, (int64_t)draw(2000000));
    put(out, DRAY__MSG_REPORT_WATCH, 5, &p);
    starts[n++] = out->size;
    put(out, DRAY__MSG_STATUS, 6, &p);
    starts[n++] = out->size;
    dray__put_u64(&p, draw(UINT64_MAX));
    put(out, draw(2) ? 0x7001 : 0x7003, 7, &p);
    starts[n] = out->size;
    dray__writer_free(&p);
    return n;
}

static void fix_checksum(uint8_t *frame, size_t room)
{
    uint32_t size;
    memcpy(&size, frame + 16, sizeof size);
    if (room < DRAY__FRAME_HEADER || size > room - DRAY__FRAME_HEADER)
        return;
    memset(frame + 24, 0, 8);
    uint64_t sum = dray__hash(frame, DRAY__FRAME_HEADER + size);
    memcpy(frame + 24, &sum, sizeof sum);
}

static void mutate(uint8_t *data, size_t size)
{
    static const uint64_t edges[] = {0,
                                     1,
                                     0x7F,
                                     0x80,
                                     0xFF,
                                     0x7FFFFFFF,
                                     0x80000000,
                                     0xFFFFFFFF,
                                     0x7FFFFFFFFFFFFFFF,
                                     0xFFFFFFFFFFFFFFFF,
                                     DRAY__FRAME_MAX,
                                     DRAY__FRAME_MAX + 1};
    size_t at = draw(size);
    switch (draw(4)) {
    case 0:
        data[at] ^= (uint8_t)(1u << draw(8));
        break;
    case 1:
        data[at] = (uint8_t)draw(256);
        break;
    case 2: { /* a number at its edge */
        uint64_t value = edges[draw(sizeof edges / sizeof *edges)];
        size_t width = (size_t)1 << draw(4);
        memcpy(data + at, &value, width < size - at ? width : size - at);
        break;
    }
    default: { /* a piece from elsewhere */
        size_t from = draw(size), length = draw(64);
        size_t most = size - (at > from ? at : from);
        memmove(data + at, data + from, length < most ? length : most);
    }
    }
}

/* A request to stop is not what is tested here, however it came about. */
static bool stops(const uint8_t *data, size_t size)
{
    for (size_t i = 0; i + 6 <= size; i++)
        if (memcmp(data + i, "DRAY\6\0", 6) == 0)
            return true;
    return false;
}

static void one_fuzzed_connection(int spare)
{
    dray__writer out = {0};
    size_t starts[16];
    size_t frames = make_talk(&out, starts);
    for (uint64_t i = draw(4); i; i--) {
        size_t n = draw(frames), size = starts[n + 1] - starts[n];
        mutate(out.data + starts[n], size);
        if (draw(4)) /* most must get beyond the checksum */
            fix_checksum(out.data + starts[n], out.size - starts[n]);
    }
    if (!stops(out.data, out.size)) {
        bool far = draw(4) == 0;
        raw c = far && draw(4) == 0 ? connect_plain(f.tcp_address)
                                    : connect_raw(far ? f.tcp_address : f.unix_address);
        size_t size = draw(4) ? out.size : draw(out.size);
        size_t first = draw(size + 1); /* in two pieces */
        int fds[3] = {spare, spare, spare};
        uint32_t count = !far && draw(4) == 0 ? (uint32_t)draw(4) : 0;
        if (send_raw(&c, out.data, first, fds, first ? count : 0))
            send_raw(&c, out.data + first, size - first, NULL, 0);
        if (draw(2)) {
            shutdown(c.fd, SHUT_WR);
            assert_true(closes(&c));
        }
        close_raw(&c);
    }
    dray__writer_free(&out);
}

TEST(mutated_frames_hurt_nobody)
{
    int spare = open("/dev/null", O_RDONLY | O_CLOEXEC);
    int runs = test_times(8000);
    for (int i = 0; i < runs; i++) {
        one_fuzzed_connection(spare);
        if (i % 200 == 0)
            still_serves();
    }
    still_serves();
    fds_return_to(f.process, baseline);
    close(spare);
}

/* What the server says before it closes the connection; its code. */
static int last_words(const raw *c, dray_error *told)
{
    dray__inbox inbox = {.tls = c->tls};
    dray__frame frame;
    int fds[DRAY__FRAME_FDS], status;
    while ((status = dray__inbox_take(&inbox, &frame, fds, NULL)) == DRAY_EAGAIN) {
        struct pollfd p = {.fd = c->fd, .events = POLLIN};
        assert_int_equal(poll(&p, 1, 30000), 1);
        int next = dray__inbox_fill(&inbox, c->fd, NULL);
        assert_true(next == DRAY_OK || (c->tls && next == DRAY_EAGAIN));
    }
    assert_int_equal(status, DRAY_OK);
    assert_int_equal(frame.flags, DRAY__FRAME_REPLY | DRAY__FRAME_ERROR);
    dray__frame_get_error(dray__reader_of(frame.payload, frame.size), told);
    dray__inbox_free(&inbox);
    return told->code;
}

TEST(unusable_streams_are_closed_with_a_reason)
{
    static const struct {
        size_t at; /* which byte of a HELLO is replaced */
        uint8_t value;
        bool fix;
        int code;
        const char *says;
    } cases[] = {
        {0, 'X', true, DRAY_EPROTO, "magic"},
        {19, 0xFF, true, DRAY_EPROTO, "bytes, at most"},
        {20, 1, true, DRAY_EPROTO, "a request expected"},
        {20, 2, true, DRAY_EPROTO, "a request expected"},
        {24, 0x55, false, DRAY_ECHECKSUM, "checksum"},
        {40, 0x55, false, DRAY_ECHECKSUM, "checksum"},
        {9, 0x55, false, DRAY_ECHECKSUM, "checksum"},
    };
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        dray__writer out = {0}, payload = {0};
        dray_error told;
        put_hello(&out, &payload);
        out.data[cases[i].at] = cases[i].value;
        if (cases[i].fix)
            fix_checksum(out.data, out.size);
        raw c = connect_raw(i % 2 ? f.unix_address : f.tcp_address);
        assert_true(send_raw(&c, out.data, out.size, NULL, 0));
        assert_int_equal(last_words(&c, &told), cases[i].code);
        assert_non_null(strstr(told.message, cases[i].says));
        assert_true(closes(&c));
        close_raw(&c);
        dray__writer_free(&out);
        dray__writer_free(&payload);
    }
}

/* A frame without a payload has a header that can be altered, too. */
TEST(empty_frames_have_a_checksum)
{
    for (size_t at = 4; at < DRAY__FRAME_HEADER; at++) {
        if (at == 6 || at == 7 || (at >= 16 && at < 20)) /* they say how much is to come */
            continue;
        dray__writer out = {0};
        dray__frame ping = {.type = DRAY__MSG_PING, .id = 7};
        dray_error told;
        assert_int_equal(dray__frame_put(&out, &ping, NULL), DRAY_OK);
        out.data[at] ^= 0x10;
        raw c = connect_raw(f.unix_address);
        assert_true(send_raw(&c, out.data, out.size, NULL, 0));
        assert_int_equal(last_words(&c, &told), DRAY_ECHECKSUM);
        close_raw(&c);
        dray__writer_free(&out);
    }
}

/* Requests that wait for their answers take memory: there is an end to them. */
TEST(waiting_requests_have_an_end)
{
    enum { KEPT = 4096 };
    dray__writer out = {0}, payload = {0};
    put_hello(&out, &payload);
    for (uint64_t id = 100; id < 100 + KEPT + 1; id++) {
        dray__frame frame = {.type = 0x7004, .id = id};
        assert_int_equal(dray__frame_put(&out, &frame, NULL), DRAY_OK);
    }
    raw c = connect_raw(f.unix_address);
    assert_true(send_raw(&c, out.data, out.size, NULL, 0));
    dray__inbox inbox = {.tls = c.tls};
    dray__frame frame;
    int fds[DRAY__FRAME_FDS], status;
    do { /* HELLO's reply comes before it */
        while ((status = dray__inbox_take(&inbox, &frame, fds, NULL)) == DRAY_EAGAIN) {
            struct pollfd p = {.fd = c.fd, .events = POLLIN};
            assert_int_equal(poll(&p, 1, 30000), 1);
            assert_int_equal(dray__inbox_fill(&inbox, c.fd, NULL), DRAY_OK);
        }
        assert_int_equal(status, DRAY_OK);
    } while (!(frame.flags & DRAY__FRAME_ERROR));
    dray_error told;
    dray__frame_get_error(dray__reader_of(frame.payload, frame.size), &told);
    assert_int_equal(frame.id, 100 + KEPT);
    assert_int_equal(told.code, DRAY_EFULL);
    dray__inbox_free(&inbox);
    close_raw(&c);
    dray__writer_free(&out);
    dray__writer_free(&payload);
    still_serves();
}

TEST(forged_lengths_take_no_memory)
{
    enum { CONNECTIONS = 200 };
    raw all[CONNECTIONS];
    dray__writer out = {0}, payload = {0};
    put_hello(&out, &payload);
    uint32_t size = DRAY__FRAME_MAX;
    memcpy(out.data + 16, &size, sizeof size);
    for (int i = 0; i < CONNECTIONS; i++) {
        all[i] = connect_raw(f.unix_address);
        assert_true(send_raw(&all[i], out.data, out.size, NULL, 0));
    }
    still_serves();
    char path[64], line[256];
    long kilobytes = 0;
    snprintf(path, sizeof path, "/proc/%d/status", f.process);
    FILE *file = fopen(path, "re");
    while (fgets(line, sizeof line, file))
        sscanf(line, "VmData: %ld kB", &kilobytes);
    fclose(file);
#if !defined(__SANITIZE_ADDRESS__) && !defined(__SANITIZE_THREAD__)
    assert_true(kilobytes > 0 && kilobytes < 512 << 10); /* 200 × 64 MiB were announced */
#endif
    for (int i = 0; i < CONNECTIONS; i++)
        close_raw(&all[i]);
    dray__writer_free(&out);
    dray__writer_free(&payload);
}

/* ---- descriptors ----------------------------------------------------------------------------- */

static bool same_file(int a, int b)
{
    struct stat sa, sb;
    assert_int_equal(fstat(a, &sa), 0);
    assert_int_equal(fstat(b, &sb), 0);
    return sa.st_dev == sb.st_dev && sa.st_ino == sb.st_ino;
}

TEST(descriptors_come_back)
{
    dray_context *context = fixture_open(&f, "fds", "task", 0);
    dray__channel *channel;
    dray_error error;
    assert_int_equal(dray__channel_open(context, &channel, NULL), DRAY_OK);
    int fds[DRAY__FRAME_FDS + 1], mine = count_fds(getpid());
    for (uint32_t i = 0; i <= DRAY__FRAME_FDS; i++)
        fds[i] = memfd_create("test", MFD_CLOEXEC);
    dray__writer w = {0};
    for (uint32_t count = 0; count <= DRAY__FRAME_FDS; count++) {
        /* Frames large and small, so that descriptors meet whole and partial reads. */
        size_t size = count % 3 ? count : 300000u;
        memset(dray__put_space(&w, size), 7, size);
        dray__reply reply;
        assert_int_equal(dray__call(channel, 0x7001, &w, fds, count,
                                    dray__deadline(30 * DRAY__SECOND), &reply, &error),
                         DRAY_OK);
        assert_int_equal(reply.payload.size, size);
        assert_int_equal(reply.fd_count, count);
        for (uint32_t i = 0; i < count; i++) {
            assert_true(same_file(reply.fds[i], fds[i]));
            assert_true(fcntl(reply.fds[i], F_GETFD) & FD_CLOEXEC);
        }
        dray__close_fds(reply.fds, reply.fd_count);
        assert_int_equal(dray__call(channel, 0x7002, &w, fds, count,
                                    dray__deadline(30 * DRAY__SECOND), NULL, &error),
                         DRAY_OK);
    }
    assert_int_equal(dray__call(channel, 0x7001, &w, fds, DRAY__FRAME_FDS + 1,
                                dray__deadline(DRAY__SECOND), NULL, &error),
                     DRAY_EINVALID);
    int bad = -1;
    assert_int_equal(
        dray__call(channel, 0x7001, &w, &bad, 1, dray__deadline(DRAY__SECOND), NULL, &error),
        DRAY_ESYS);
    assert_int_equal(
        dray__call(channel, 0x7001, &w, NULL, 0, dray__deadline(DRAY__SECOND), NULL, &error),
        DRAY_OK);
    for (uint32_t i = 0; i <= DRAY__FRAME_FDS; i++)
        close(fds[i]);
    assert_int_equal(count_fds(getpid()), mine);
    fds_return_to(f.process, baseline + 2);
    dray__writer_free(&w);
    dray__channel_close(channel);
    dray_close(context);
}

TEST(descriptors_that_nobody_announced_are_closed)
{
    int fds[DRAY__FRAME_FDS];
    for (uint32_t i = 0; i < DRAY__FRAME_FDS; i++)
        fds[i] = STDIN_FILENO;
    dray__writer hello = {0}, payload = {0};
    put_hello(&hello, &payload);
    for (uint32_t count = 1; count <= DRAY__FRAME_FDS; count += 21) {
        raw c = connect_raw(f.unix_address); /* with a frame that says none */
        assert_true(send_raw(&c, hello.data, hello.size, fds, count));
        assert_true(closes(&c));
        close_raw(&c);
        c = connect_raw(f.unix_address); /* with the first byte only */
        assert_true(send_raw(&c, hello.data, 1, fds, count));
        close_raw(&c);
        c = connect_raw(f.unix_address); /* again and again: more than a frame may have */
        for (int i = 0; i < 5 && send_raw(&c, hello.data + i, 1, fds, DRAY__FRAME_FDS); i++)
            poll(NULL, 0, 5);
        assert_true(closes(&c));
        close_raw(&c);
    }
    hello.data[6] = 2; /* announced, and not there */
    fix_checksum(hello.data, hello.size);
    raw c = connect_raw(f.unix_address);
    assert_true(send_raw(&c, hello.data, hello.size, fds, 1));
    assert_true(closes(&c));
    close_raw(&c);
    fds_return_to(f.process, baseline);
    dray__writer_free(&hello);
    dray__writer_free(&payload);
}

TEST(tcp_carries_no_descriptors)
{
    dray_context *context = fixture_open_at(f.tcp_address, "tcp", "task", 0);
    dray__channel *channel;
    dray_error error;
    int fd = STDIN_FILENO;
    assert_int_equal(dray__channel_open(context, &channel, NULL), DRAY_OK);
    assert_int_equal(
        dray__call(channel, 0x7001, NULL, &fd, 1, dray__deadline(DRAY__SECOND), NULL, &error),
        DRAY_EUNSUPPORTED);
    assert_int_equal(
        dray__call(channel, 0x7001, NULL, NULL, 0, dray__deadline(DRAY__SECOND), NULL, &error),
        DRAY_OK);
    dray__channel_close(channel);
    dray_close(context);
}

/* ---- slow and many --------------------------------------------------------------------------- */

TEST(who_does_not_read_is_closed)
{
    const char *addresses[] = {f.unix_address, f.tcp_address};
    for (int a = 0; a < 2; a++) {
        raw c = connect_raw(addresses[a]);
        dray__writer out = {0}, payload = {0};
        memset(dray__put_space(&payload, 64 << 10), 1, 64 << 10);
        put(&out, DRAY__MSG_PING, 9, &payload);
        size_t sent = 0;
        while (sent < (size_t)256 << 20 && send_raw(&c, out.data, out.size, NULL, 0))
            sent += out.size;
        assert_true(sent < (size_t)256 << 20); /* 4 MiB unread are too many */
        close_raw(&c);
        still_serves();
        dray__writer_free(&out);
        dray__writer_free(&payload);
    }
}

TEST(who_writes_slowly_is_heard)
{
    raw c = connect_raw(f.unix_address);
    dray__writer out = {0}, payload = {0};
    put_hello(&out, &payload);
    dray__put_u64(&payload, 77);
    put(&out, DRAY__MSG_PING, 2, &payload);
    for (size_t i = 0; i < out.size; i++) {
        assert_true(send_raw(&c, out.data + i, 1, NULL, 0));
        if (i % 20 == 0)
            still_serves();
    }
    dray__inbox inbox = {0};
    dray__frame frame;
    int fds[DRAY__FRAME_FDS];
    for (uint64_t id = 1; id <= 2; id++) {
        int status;
        while ((status = dray__inbox_take(&inbox, &frame, fds, NULL)) == DRAY_EAGAIN) {
            struct pollfd p = {.fd = c.fd, .events = POLLIN};
            assert_int_equal(poll(&p, 1, 30000), 1);
            assert_int_equal(dray__inbox_fill(&inbox, c.fd, NULL), DRAY_OK);
        }
        assert_int_equal(status, DRAY_OK);
        assert_true(frame.id == id && frame.flags == DRAY__FRAME_REPLY);
    }
    assert_int_equal(frame.size, 8);
    dray__inbox_free(&inbox);
    dray__writer_free(&out);
    dray__writer_free(&payload);
    close_raw(&c);
}

TEST(who_says_nothing_is_closed)
{
    coordinator_fixture quick = {.options = {.hello_ns = DRAY__SECOND}};
    fixture_fork(&quick, NULL);
    dray_context *context = fixture_open(&quick, "known", "task", 0);
    dray__channel *channel;
    assert_int_equal(dray__channel_open(context, &channel, NULL), DRAY_OK);
    raw c = connect_raw(quick.unix_address);
    assert_true(closes(&c));
    close_raw(&c);
    assert_int_equal(dray__call(channel, DRAY__MSG_PING, NULL, NULL, 0,
                                dray__deadline(30 * DRAY__SECOND), NULL, NULL),
                     DRAY_OK); /* those with a session stay */
    dray__channel_close(channel);
    dray_close(context);
    fixture_stop(&quick);
}

enum { CLIENTS = 64, CALLS = 100 };

static void *one_of_many(void *user)
{
    uint32_t number = (uint32_t)(uintptr_t)user;
    dray_context *context =
        fixture_open_at(number % 2 ? f.unix_address : f.tcp_address, "many", "task", number);
    dray__channel *channel;
    dray__writer w = {0};
    void *failed = user;
    if (dray_barrier(context, "all", CLIENTS, 120 * DRAY__SECOND, NULL) == DRAY_OK &&
        dray__channel_open(context, &channel, NULL) == DRAY_OK) {
        uint32_t right = 0;
        for (uint32_t i = 0; i < CALLS; i++) {
            dray__reply reply = {0};
            dray__put_u32(&w, number * CALLS + i);
            right += dray__call(channel, 0x7001, &w, NULL, 0, dray__deadline(120 * DRAY__SECOND),
                                &reply, NULL) == DRAY_OK &&
                     dray__get_u32(&reply.payload) == number * CALLS + i;
        }
        failed = right == CALLS ? NULL : user;
        dray__channel_close(channel);
    }
    dray__writer_free(&w);
    dray_close(context);
    return failed;
}

TEST(many_clients)
{
    int mine = count_fds(getpid());
    pthread_t threads[CLIENTS];
    for (uintptr_t i = 1; i <= CLIENTS; i++)
        assert_int_equal(pthread_create(&threads[i - 1], NULL, one_of_many, (void *)i), 0);
    for (int i = 0; i < CLIENTS; i++) {
        void *failed;
        pthread_join(threads[i], &failed);
        assert_null(failed);
    }
    fds_return_to(f.process, baseline);
    assert_int_equal(count_fds(getpid()), mine);
}

/* ---- a coordinator that hangs ---------------------------------------------------------------- */

TEST(deadlines_hold_when_nobody_answers)
{
    dray_context *context = fixture_open(&f, "patient", "task", 0), *none = NULL;
    dray__channel *channel;
    dray_error error;
    dray__reply reply;
    dray__writer w = {0};
    assert_int_equal(dray__channel_open(context, &channel, NULL), DRAY_OK);
    kill(f.process, SIGSTOP);
    dray_options options = DRAY_OPTIONS_INIT;
    options.address = f.unix_address;
    options.timeout_ns = 50 * DRAY__MILLISECOND;
    assert_int_equal(dray_open(&options, &none, &error), DRAY_ETIMEDOUT);
    assert_null(none);
    for (int i = 0; i < 3; i++) {
        dray__put_u32(&w, 1000);
        assert_int_equal(dray__call(channel, 0x7001, &w, NULL, 0,
                                    dray__deadline(20 * DRAY__MILLISECOND), NULL, &error),
                         DRAY_ETIMEDOUT);
    }
    /* More than the socket takes: the deadline passes in the middle of the frame. */
    memset(dray__put_space(&w, 2 << 20), 3, 2 << 20);
    assert_int_equal(dray__call(channel, 0x7001, &w, NULL, 0,
                                dray__deadline(20 * DRAY__MILLISECOND), NULL, &error),
                     DRAY_ETIMEDOUT);
    dray__put_u32(&w, 1);
    assert_int_equal(dray__call(channel, 0x7001, &w, NULL, 0,
                                dray__deadline(20 * DRAY__MILLISECOND), NULL, &error),
                     DRAY_ETIMEDOUT);
    kill(f.process, SIGCONT);
    dray__put_u32(&w, 2); /* the frame is finished, its reply dropped */
    assert_int_equal(
        dray__call(channel, 0x7001, &w, NULL, 0, dray__deadline(30 * DRAY__SECOND), &reply, &error),
        DRAY_OK);
    assert_int_equal(reply.payload.size, 4);
    assert_int_equal(dray__get_u32(&reply.payload), 2);
    dray__writer_free(&w);
    dray__channel_close(channel);
    dray_close(context);
}

SUITE(start, stop)
