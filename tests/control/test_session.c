/* Tests sessions, attached channels, status, deadlines, forks and addresses. */
#include "control/fixture.h"
#include "suite.h"

#include "base/error.h"
#include "control/channel.h"
#include "control/reports.h"

#include <fcntl.h>
#include <poll.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/un.h>

static coordinator_fixture f;

/* A service for the tests: 0x7001 echoes payload and descriptors, 0x7002 is kept until 0x7003 comes
 * (any session) or its deadline (first i64 of the payload) passes. */
enum { ECHO = 0x7001, KEEP = 0x7002, RELEASE = 0x7003 };

typedef struct test_service {
    dray__request *kept[256];
    int count, ended;
} test_service;

static void forget(test_service *s, const dray__request *request)
{
    for (int i = 0; i < s->count; i++)
        if (s->kept[i] == request)
            s->kept[i] = s->kept[--s->count];
}

static void echo(dray__request *request)
{
    int fds[DRAY__FRAME_FDS];
    uint32_t count = dray__request_fd_count(request);
    for (uint32_t i = 0; i < count; i++)
        fds[i] = dray__request_take_fd(request, i);
    dray__reader *r = dray__request_payload(request);
    dray__writer w = {0};
    dray__put_bytes(&w, r->data, r->size);
    dray__request_reply(request, &w, fds, count);
    dray__writer_free(&w);
    for (uint32_t i = 0; i < count; i++)
        close(fds[i]);
}

static void handle(void *self, dray__request *request)
{
    test_service *s = self;
    uint16_t type = dray__request_type(request);
    if (type == ECHO) {
        echo(request);
    } else if (type == KEEP) {
        int64_t ns = dray__get_i64(dray__request_payload(request));
        dray__request_expire_at(request, dray__deadline(ns));
        s->kept[s->count++] = request;
    } else {
        while (s->count) {
            dray__writer w = {0};
            dray__put_string(&w, "released");
            dray__request_reply(s->kept[--s->count], &w, NULL, 0);
            dray__writer_free(&w);
        }
        dray__request_reply(request, NULL, NULL, 0);
    }
}

static void expired(void *self, dray__request *request, int channel_gone)
{
    (void)channel_gone;
    dray_error error;
    forget(self, request);
    dray__fail(&error, DRAY_ETIMEDOUT, "kept too long");
    dray__request_fail(request, &error);
}

static void ended(void *self, dray__session *session)
{
    (void)session;
    ((test_service *)self)->ended++;
}

static void status(void *self, json_t *object)
{
    const test_service *s = self;
    json_object_set_new(object, "test",
                        json_pack("{s:i, s:i}", "kept", s->count, "ended", s->ended));
}

static int add_test_service(dray__coordinator *coordinator, dray_error *error)
{
    static const dray__service service = {.name = "test",
                                          .first = ECHO,
                                          .last = RELEASE,
                                          .handle = handle,
                                          .expired = expired,
                                          .session_ended = ended,
                                          .status = status,
                                          .free = free};
    return dray__coordinator_add(coordinator, &service, calloc(1, sizeof(test_service)), error);
}

FIXTURE(start)
{
    f.tcp = true;
    fixture_start(&f, add_test_service);
    return 0;
}

FIXTURE(stop)
{
    fixture_stop(&f);
    return 0;
}

static json_t *read_status(dray_context *context)
{
    char *text;
    assert_int_equal(dray_context_status(context, &text, NULL), DRAY_OK);
    json_t *object = json_loads(text, 0, NULL);
    assert_non_null(object);
    dray_free(text);
    return object;
}

/* Polls the status until the test service's number is `expected`. */
static void wait_for_number(dray_context *context, const char *key, int expected)
{
    int found = -1;
    for (int i = 0; i < 2000 && found != expected; i++) {
        json_t *object = read_status(context);
        found = (int)json_integer_value(json_object_get(json_object_get(object, "test"), key));
        json_decref(object);
        if (found != expected)
            poll(NULL, 0, 5);
    }
    assert_int_equal(found, expected);
}

TEST(members_and_epochs)
{
    dray_context *a = fixture_open(&f, "one", "trainer", 0);
    dray_context *b = fixture_open(&f, "one", "trainer", 1);
    assert_true(dray_context_member(a) != dray_context_member(b));
    assert_int_equal(dray_context_epoch(a), 1);
    assert_int_equal(dray_context_epoch(b), 1);
    uint64_t before = dray_context_member(b);
    dray_close(a);
    a = fixture_open(&f, "one", "trainer", 0);
    assert_int_equal(dray_context_epoch(a), 2);
    assert_true(dray_context_member(a) > before);
    dray_close(a);
    dray_close(b);
}

TEST(status_lists_sessions)
{
    dray_context *a = fixture_open(&f, "größe", "engine", 3);
    dray_context *b = fixture_open_at(f.tcp_address, "two", "tool", 0);
    json_t *object = read_status(a), *entry;
    json_t *sessions = json_object_get(object, "sessions");
    size_t i;
    int found = 0;
    json_array_foreach(sessions, i, entry)
    {
        const char *name = json_string_value(json_object_get(entry, "name"));
        if (strcmp(name, "größe") != 0 && strcmp(name, "two") != 0)
            continue;
        found++;
        assert_int_equal(json_integer_value(json_object_get(entry, "pid")), getpid());
        assert_true(json_number_value(json_object_get(entry, "age_seconds")) >= 0);
        if (strcmp(name, "größe") == 0) {
            assert_int_equal(json_integer_value(json_object_get(entry, "rank")), 3);
            assert_string_equal(json_string_value(json_object_get(entry, "role")), "engine");
            assert_int_equal(json_integer_value(json_object_get(entry, "member")),
                             dray_context_member(a));
        }
    }
    assert_int_equal(found, 2);
    assert_int_equal(json_array_size(json_object_get(object, "listening")), 2);
    json_decref(object);
    dray_close(a);
    dray_close(b);
}

TEST(sessions_end_with_their_first_connection)
{
    dray_context *watcher = fixture_open(&f, "watcher", "tool", 0);
    json_t *object = read_status(watcher);
    int before = (int)json_integer_value(json_object_get(json_object_get(object, "test"), "ended"));
    json_decref(object);
    dray_context *a = fixture_open(&f, "a", "task", 0);
    dray__channel *channel;
    assert_int_equal(dray__channel_open(a, &channel, NULL), DRAY_OK);
    dray__writer w = {0};
    dray__put_i64(&w, 60 * DRAY__SECOND);
    assert_int_equal(dray__call_start(channel, KEEP, &w, NULL, 0, NULL), DRAY_OK);
    wait_for_number(watcher, "kept", 1);
    dray_close(a); /* not its channels first: they must end with it */
    wait_for_number(watcher, "kept", 0);
    wait_for_number(watcher, "ended", before + 1);
    dray_error error;
    assert_int_equal(
        dray__call(channel, ECHO, &w, NULL, 0, dray__deadline(5 * DRAY__SECOND), NULL, &error),
        DRAY_ECLOSED);
    assert_true(dray__channel_broken(channel));
    dray__channel_close(channel);
    dray__writer_free(&w);
    dray_close(watcher);
}

TEST(attach_needs_the_token)
{
    dray_context *a = fixture_open(&f, "a", "task", 0);
    dray__channel *channel;
    dray_error error;
    int64_t deadline = dray__deadline(10 * DRAY__SECOND);
    assert_int_equal(dray__channel_connect(f.unix_address, deadline, &channel, NULL), DRAY_OK);
    dray__writer w = {0};
    uint8_t token[16] = {0};
    assert_int_equal(dray__call(channel, ECHO, &w, NULL, 0, deadline, NULL, &error), DRAY_EPROTO);
    dray__put_u64(&w, dray_context_member(a));
    dray__put_blob(&w, token, sizeof token);
    assert_int_equal(dray__call(channel, DRAY__MSG_ATTACH, &w, NULL, 0, deadline, NULL, &error),
                     DRAY_ECLOSED);
    assert_int_equal(dray__call(channel, ECHO, &w, NULL, 0, deadline, NULL, &error), DRAY_EPROTO);
    dray__put_u64(&w, UINT64_MAX);
    dray__put_blob(&w, token, sizeof token);
    assert_int_equal(dray__call(channel, DRAY__MSG_ATTACH, &w, NULL, 0, deadline, NULL, &error),
                     DRAY_ECLOSED);
    dray__put_u64(&w, dray_context_member(a));
    dray__put_blob(&w, token, 3);
    assert_int_equal(dray__call(channel, DRAY__MSG_ATTACH, &w, NULL, 0, deadline, NULL, &error),
                     DRAY_EPERM);
    dray__channel_close(channel);
    dray__writer_free(&w);
    dray_close(a);
}

/* The session ends with its coordinator, also where another one has given the number away. */
TEST(numbers_are_given_again)
{
    static coordinator_fixture first, second;
    char link[160], address[192];
    fixture_start(&first, NULL);
    fixture_start(&second, NULL);
    snprintf(link, sizeof link, "%s/link", second.folder);
    snprintf(address, sizeof address, "unix:%s", link);
    assert_int_equal(symlink(first.path, link), 0);
    dray_context *a = fixture_open_at(address, "a", "task", 0);
    dray_context *b = fixture_open(&second, "b", "task", 0);
    assert_int_equal(dray_context_member(a), dray_context_member(b));
    fixture_stop(&first);
    unlink(link);
    assert_int_equal(symlink(second.path, link), 0);
    dray__channel *channel;
    dray_error error;
    assert_int_equal(dray__channel_open(a, &channel, &error), DRAY_ECLOSED);
    unlink(link);
    dray_close(a);
    dray_close(b);
    fixture_stop(&second);
}

TEST(versions_without_overlap_are_refused)
{
    dray__channel *channel;
    dray_error error;
    int64_t deadline = dray__deadline(10 * DRAY__SECOND);
    assert_int_equal(dray__channel_connect(f.unix_address, deadline, &channel, NULL), DRAY_OK);
    dray__writer w = {0};
    dray__put_u32(&w, 7);
    dray__put_u32(&w, 9);
    dray__put_string(&w, "what later versions say is not looked at");
    assert_int_equal(dray__call(channel, DRAY__MSG_HELLO, &w, NULL, 0, deadline, NULL, &error),
                     DRAY_EVERSION);
    assert_non_null(strstr(error.message, "7 to 9"));
    dray__put_u32(&w, DRAY__PROTOCOL_VERSION); /* a newer client that still speaks this one */
    dray__put_u32(&w, 9);
    dray__put_string(&w, "name");
    dray__put_string(&w, "task");
    dray__put_u32(&w, 0);
    dray__put_u64(&w, 0);
    dray__put_i64(&w, 1);
    dray__put_string(&w, "something new");
    assert_int_equal(dray__call(channel, DRAY__MSG_HELLO, &w, NULL, 0, deadline, NULL, &error), 0);
    assert_int_equal(dray__call(channel, DRAY__MSG_HELLO, &w, NULL, 0, deadline, NULL, &error),
                     DRAY_EPROTO);
    dray__channel_close(channel);
    dray__writer_free(&w);
}

TEST(payloads_come_back)
{
    static const size_t sizes[] = {0, 1, 31, 4096, 16384, 16385, 1 << 20, 9000001, DRAY__FRAME_MAX};
    const char *addresses[] = {f.unix_address, f.tcp_address};
    uint8_t *data = malloc(DRAY__FRAME_MAX);
    for (uint32_t k = 0; k < DRAY__FRAME_MAX; k += 4) {
        uint32_t word = k * 2654435761u;
        memcpy(data + k, &word, sizeof word);
    }
    for (int a = 0; a < 2; a++) {
        dray_context *context = fixture_open_at(addresses[a], "echo", "task", 0);
        dray__channel *channel;
        assert_int_equal(dray__channel_open(context, &channel, NULL), DRAY_OK);
        dray__writer w = {0};
        /* The largest one takes a sanitizer seconds, and says over TLS what smaller ones do. */
        bool all = a == 0 || getenv("DRAY_TEST_SCALE");
        for (size_t i = 0; i < sizeof sizes / sizeof *sizes - !all; i++) {
            dray__put_bytes(&w, data, sizes[i]);
            dray__reply reply;
            int64_t deadline = dray__deadline(200 * DRAY__SECOND);
            assert_int_equal(dray__call(channel, ECHO, &w, NULL, 0, deadline, &reply, NULL),
                             DRAY_OK);
            assert_int_equal(reply.payload.size, sizes[i]);
            assert_true(sizes[i] == 0 || memcmp(reply.payload.data, data, sizes[i]) == 0);
        }
        dray_error error;
        assert_non_null(dray__put_space(&w, (size_t)DRAY__FRAME_MAX + 1));
        assert_int_equal(dray__call(channel, ECHO, &w, NULL, 0, 0, NULL, &error), DRAY_EINVALID);
        assert_int_equal(w.size, 0);
        dray__writer_free(&w);
        dray__channel_close(channel);
        dray_close(context);
    }
    free(data);
}

/* What is kept is answered when the caller has given up: before its next request, or behind it. */
TEST(late_replies_are_dropped)
{
    dray_context *context = fixture_open(&f, "late", "task", 0);
    dray__channel *channel, *other;
    dray_error error;
    assert_int_equal(dray__channel_open(context, &channel, NULL), DRAY_OK);
    assert_int_equal(dray__channel_open(context, &other, NULL), DRAY_OK);
    dray__writer w = {0};
    for (int i = 0; i < 20; i++) {
        int64_t deadline = dray__deadline(i % 2 ? 0 : DRAY__MILLISECOND);
        dray__put_i64(&w, 300 * DRAY__SECOND);
        assert_int_equal(dray__call(channel, KEEP, &w, NULL, 0, deadline, NULL, &error),
                         DRAY_ETIMEDOUT);
        for (int step = 0; step < 2; step++) {
            dray__reply reply;
            deadline = dray__deadline(60 * DRAY__SECOND);
            if (step == i / 2 % 2) {
                assert_int_equal(dray__call(other, RELEASE, &w, NULL, 0, deadline, NULL, &error),
                                 DRAY_OK);
                continue;
            }
            dray__put_u32(&w, (uint32_t)i);
            assert_int_equal(dray__call(channel, ECHO, &w, NULL, 0, deadline, &reply, &error),
                             DRAY_OK);
            assert_int_equal(reply.payload.size, 4);
            assert_int_equal(dray__get_u32(&reply.payload), i);
        }
    }
    dray__writer_free(&w);
    dray__channel_close(other);
    dray__channel_close(channel);
    dray_close(context);
}

static bool is_readable(int fd, int ms)
{
    struct pollfd p = {.fd = fd, .events = POLLIN};
    return poll(&p, 1, ms) == 1;
}

TEST(started_requests_do_not_block_others)
{
    dray_context *context = fixture_open(&f, "started", "task", 0);
    dray__channel *channel;
    dray__reply reply;
    dray_error error;
    dray__writer w = {0};
    assert_int_equal(dray__channel_open(context, &channel, NULL), DRAY_OK);
    int fd = dray__channel_fd(channel);
    assert_true(fd >= 0);
    assert_int_equal(dray__call_poll(channel, &reply, &error), DRAY_EINVALID);
    for (int i = 0; i < 10; i++) {
        dray__put_i64(&w, 60 * DRAY__SECOND);
        assert_int_equal(dray__call_start(channel, KEEP, &w, NULL, 0, &error), DRAY_OK);
        assert_int_equal(dray__call_poll(channel, &reply, &error), DRAY_EAGAIN);
        assert_int_equal(dray__call_start(channel, KEEP, &w, NULL, 0, &error), DRAY_EBUSY);
        assert_false(is_readable(fd, 0));
        dray__put_u32(&w, 5);
        assert_int_equal(dray__call(channel, ECHO, &w, NULL, 0, dray__deadline(30 * DRAY__SECOND),
                                    &reply, &error),
                         DRAY_OK);
        /* The release's own call finds the kept request's reply first, and puts it aside. */
        assert_int_equal(dray__call(channel, RELEASE, &w, NULL, 0,
                                    dray__deadline(30 * DRAY__SECOND), &reply, &error),
                         DRAY_OK);
        assert_true(is_readable(fd, 10000));
        assert_int_equal(dray__call_poll(channel, &reply, &error), DRAY_OK);
        char *text = dray__get_string(&reply.payload, 100);
        assert_string_equal(text, "released");
        free(text);
        assert_false(is_readable(fd, 0));
    }
    dray__put_i64(&w, DRAY__MILLISECOND);
    assert_int_equal(dray__call_start(channel, KEEP, &w, NULL, 0, &error), DRAY_OK);
    assert_true(is_readable(fd, 10000));
    assert_int_equal(dray__call_poll(channel, &reply, &error), DRAY_ETIMEDOUT);
    assert_string_equal(error.message, "kept too long");
    dray__writer_free(&w);
    dray__channel_close(channel);
    dray_close(context);
}

TEST(large_started_requests_are_finished_by_poll)
{
    dray_context *context = fixture_open(&f, "large", "task", 0);
    dray__channel *channel;
    dray__reply reply;
    dray_error error;
    dray__writer w = {0};
    assert_int_equal(dray__channel_open(context, &channel, NULL), DRAY_OK);
    int fd = dray__channel_fd(channel);
    memset(dray__put_space(&w, 20 << 20), 0x5A, 20 << 20);
    assert_int_equal(dray__call_start(channel, ECHO, &w, NULL, 0, &error), DRAY_OK);
    int status;
    while ((status = dray__call_poll(channel, &reply, &error)) == DRAY_EAGAIN)
        assert_true(is_readable(fd, 30000));
    assert_int_equal(status, DRAY_OK);
    assert_int_equal(reply.payload.size, 20 << 20);
    assert_int_equal(reply.payload.data[reply.payload.size - 1], 0x5A);
    dray__writer_free(&w);
    dray__channel_close(channel);
    dray_close(context);
}

/* A call that gave up leaves a part of its frame unsent. A request cannot start before the rest is
 * sent, and must not count as started. */
TEST(nothing_starts_behind_an_unfinished_frame)
{
    static char bytes[1 << 20];
    char address[200];
    struct sockaddr_un un = {.sun_family = AF_UNIX};
    snprintf(un.sun_path, sizeof un.sun_path, "%.90s/slow", f.folder);
    snprintf(address, sizeof address, "unix:%s", un.sun_path);
    int slow = socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0); /* it reads when the test does */
    assert_int_equal(bind(slow, (struct sockaddr *)&un, sizeof un), 0);
    assert_int_equal(listen(slow, 1), 0);
    dray__channel *channel;
    dray__reply reply;
    dray_error error;
    dray__writer w = {0};
    int64_t deadline = dray__deadline(30 * DRAY__SECOND);
    assert_int_equal(dray__channel_connect(address, deadline, &channel, NULL), DRAY_OK);
    memset(dray__put_space(&w, 4 << 20), 0x5A, 4 << 20);
    assert_int_equal(dray__call(channel, DRAY__MSG_PING, &w, NULL, 0,
                                dray__deadline(50 * DRAY__MILLISECOND), &reply, &error),
                     DRAY_ETIMEDOUT);
    dray__put_u32(&w, 7);
    assert_int_equal(dray__call_start(channel, DRAY__MSG_PING, &w, NULL, 0, &error), DRAY_EAGAIN);
    assert_int_equal(dray__call_poll(channel, &reply, &error), DRAY_EINVALID);
    int peer = accept(slow, NULL, NULL), status = DRAY_EAGAIN;
    while (status == DRAY_EAGAIN && dray__now() < deadline) {
        while (recv(peer, bytes, sizeof bytes, MSG_DONTWAIT) > 0)
            continue;
        dray__put_u32(&w, 7);
        status = dray__call_start(channel, DRAY__MSG_PING, &w, NULL, 0, &error);
    }
    assert_int_equal(status, DRAY_OK);
    dray__writer_free(&w);
    dray__channel_close(channel);
    close(peer);
    close(slow);
    unlink(un.sun_path);
}

TEST(notifications_have_no_answer)
{
    dray_context *context = fixture_open(&f, "notify", "task", 0);
    dray__channel *channel;
    assert_int_equal(dray__channel_open(context, &channel, NULL), DRAY_OK);
    dray__writer w = {0};
    dray__put_u32(&w, 1);
    assert_int_equal(dray__notify(channel, ECHO, &w, NULL), DRAY_OK);
    assert_int_equal(dray__notify(channel, 0x7FFF, &w, NULL), DRAY_OK); /* unknown: no answer */
    dray__reply reply;
    dray__put_u32(&w, 2);
    assert_int_equal(
        dray__call(channel, ECHO, &w, NULL, 0, dray__deadline(30 * DRAY__SECOND), &reply, NULL),
        DRAY_OK);
    assert_int_equal(dray__get_u32(&reply.payload), 2);
    assert_int_equal(
        dray__call(channel, 0x7FFF, &w, NULL, 0, dray__deadline(30 * DRAY__SECOND), &reply, NULL),
        DRAY_EUNSUPPORTED);
    dray__writer_free(&w);
    dray__channel_close(channel);
    dray_close(context);
}

TEST(forks_are_told)
{
    dray_context *watcher = fixture_open(&f, "watcher", "tool", 0);
    dray_context *context = fixture_open(&f, "parent", "task", 0);
    json_t *object = read_status(watcher);
    int before = (int)json_integer_value(json_object_get(json_object_get(object, "test"), "ended"));
    json_decref(object);
    int ready[2];
    char byte;
    assert_int_equal(pipe(ready), 0);
    pid_t child = fork();
    if (child == 0) {
        dray_error error;
        char *text;
        int bad = 0;
        bad |= dray_barrier(context, "x", 1, 0, &error) != DRAY_ECLOSED;
        bad |= !strstr(error.message, "fork");
        bad |= dray_context_status(context, &text, &error) != DRAY_ECLOSED;
        bad |= dray_report_post(context, "x", "{}", &error) != DRAY_ECLOSED;
        dray_close(context); /* the copy only */
        if (write(ready[1], bad ? "1" : "0", 1) != 1)
            _exit(2);
        pause(); /* a child that lives on must not keep its parent's session alive */
        _exit(0);
    }
    assert_int_equal(read(ready[0], &byte, 1), 1);
    assert_int_equal(byte, '0');
    assert_int_equal(dray_barrier(context, "x", 1, 10 * DRAY__SECOND, NULL), DRAY_OK);
    dray_close(context);
    wait_for_number(watcher, "ended", before + 1);
    kill(child, SIGKILL);
    waitpid(child, NULL, 0);
    close(ready[0]);
    close(ready[1]);
    dray_close(watcher);
}

TEST(bad_options_are_refused)
{
    static const struct {
        const char *address;
        int code;
    } cases[] = {
        {"", DRAY_EINVALID},
        {"nonsense", DRAY_EINVALID},
        {"unix:", DRAY_EINVALID},
        {"unix:/nowhere/at/all", DRAY_ECLOSED},
        {"tcp:127.0.0.1", DRAY_EINVALID},
        {"tcp:127.0.0.1:", DRAY_EINVALID},
        {"tcp:127.0.0.1:65536", DRAY_EINVALID},
        {"tcp:127.0.0.1:-1", DRAY_EINVALID},
        {"tcp:127.0.0.1:1x", DRAY_EINVALID},
        {"tcp:127.0.0.1:1", DRAY_ECLOSED},
        {"tcp:::1:80", DRAY_EINVALID},
        {"tcp:[]:80", DRAY_EINVALID},
        {"tcp:[::1]", DRAY_EINVALID},
        {"tcp:[::1]:1", DRAY_ECLOSED},
        {"tcp:no-such-host.invalid:80", DRAY_ENOENT},
    };
    dray_context *context = NULL;
    dray_error error;
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        dray_options options = DRAY_OPTIONS_INIT;
        options.address = cases[i].address;
        options.timeout_ns = 20 * DRAY__MILLISECOND;
        int code = dray_open(&options, &context, &error);
        if (code != cases[i].code)
            fail_msg("%s: %s: %s", cases[i].address, dray_error_name(code), error.message);
    }
    unsetenv("DRAY_ADDRESS");
    assert_int_equal(dray_open(NULL, &context, &error), DRAY_EINVALID);
    dray_options options = DRAY_OPTIONS_INIT;
    options.address = f.unix_address;
    options.name = "\xff";
    assert_int_equal(dray_open(&options, &context, &error), DRAY_EINVALID);
    options.name = NULL;
    options.size = 3;
    assert_int_equal(dray_open(&options, &context, &error), DRAY_EINVALID);
    assert_null(context);
    setenv("DRAY_ADDRESS", f.unix_address, 1);
    static const char *const wrong[][2] = {{"DRAY_DATA_ENCRYPT", "Always"},
                                           {"DRAY_DATA_ENCRYPT", "never"},
                                           {"DRAY_UCX_READS", "Never"},
                                           {"DRAY_TRUSTED_NETWORKS", "10.0.0.1/8"}};
    for (size_t i = 0; i < sizeof wrong / sizeof *wrong; i++) {
        setenv(wrong[i][0], wrong[i][1], 1);
        assert_int_equal(dray_open(NULL, &context, &error), DRAY_EINVALID);
        assert_non_null(strstr(error.message, wrong[i][1]));
        unsetenv(wrong[i][0]);
    }
    assert_null(context);
    setenv("DRAY_DATA_ENCRYPT", "", 1);
    assert_int_equal(dray_open(NULL, &context, &error), DRAY_OK);
    dray_close(context);
    unsetenv("DRAY_DATA_ENCRYPT");
    unsetenv("DRAY_ADDRESS");
}

static void *open_early(void *address)
{
    dray_context *context = fixture_open_at(address, "early", "task", 0);
    int status = dray_barrier(context, "up", 1, 30 * DRAY__SECOND, NULL);
    dray_close(context);
    return status ? address : NULL;
}

TEST(start_order_does_not_matter)
{
    coordinator_fixture later = {0};
    char address[sizeof later.unix_address];
    fixture_start(&later, NULL); /* to have a name */
    memcpy(address, later.unix_address, sizeof address);
    fixture_stop(&later);
    char folder[sizeof address];
    snprintf(folder, sizeof folder, "%s", address + strlen("unix:"));
    *strrchr(folder, '/') = 0;
    pthread_t thread;
    assert_int_equal(pthread_create(&thread, NULL, open_early, address), 0);
    poll(NULL, 0, 30);
    assert_int_equal(mkdir(folder, 0700), 0);
    struct event_base *base = event_base_new();
    dray__coordinator *coordinator;
    dray__coordinator_options options = {.unix_path = address + strlen("unix:")};
    assert_int_equal(dray__coordinator_new(base, &options, &coordinator, NULL), DRAY_OK);
    void *failed = address;
    while (pthread_tryjoin_np(thread, &failed) != 0)
        event_base_loop(base, EVLOOP_NONBLOCK);
    assert_null(failed);
    dray__coordinator_free(coordinator);
    event_base_free(base);
    assert_int_equal(rmdir(folder), 0);
}

static void *ask_often(void *user)
{
    dray_error error;
    for (int i = 0; i < 3000; i++) {
        char *text = NULL;
        if (dray_context_status(user, &text, &error))
            return "no answer";
        dray_free(text);
    }
    return NULL;
}

/* Two threads must not read the session's connection at once: each would take what the other waits
 * for. */
TEST(a_look_for_the_end_takes_no_replies)
{
    void *failed = NULL;
    pthread_t thread;
    dray_options options = DRAY_OPTIONS_INIT;
    dray_context *context;
    options.address = f.unix_address;
    options.timeout_ns = 5 * DRAY__SECOND;
    assert_int_equal(dray_open(&options, &context, NULL), DRAY_OK);
    assert_int_equal(pthread_create(&thread, NULL, ask_often, context), 0);
    while (pthread_tryjoin_np(thread, &failed) != 0)
        assert_false(dray__context_ended(context));
    assert_null(failed);
    dray_close(context);
}

TEST(socket_files)
{
    struct stat st;
    assert_int_equal(stat(f.path, &st), 0);
    assert_int_equal(st.st_mode & 07777, 0600);
    struct event_base *base = event_base_new();
    dray__coordinator *coordinator = NULL;
    dray__coordinator_options options = {.unix_path = f.path};
    dray_error error;
    assert_int_equal(dray__coordinator_new(base, &options, &coordinator, &error), DRAY_EBUSY);

    char path[160];
    snprintf(path, sizeof path, "%s/stale", f.folder); /* what a killed server leaves */
    int fd = socket(AF_UNIX, SOCK_STREAM, 0);
    struct sockaddr_un un = {.sun_family = AF_UNIX};
    snprintf(un.sun_path, sizeof un.sun_path, "%.100s", path);
    assert_int_equal(bind(fd, (struct sockaddr *)&un, sizeof un), 0);
    close(fd);
    options.unix_path = path;
    assert_int_equal(dray__coordinator_new(base, &options, &coordinator, &error), DRAY_OK);
    dray__coordinator_free(coordinator);
    assert_int_equal(stat(path, &st), -1);

    FILE *file = fopen(path, "w"); /* somebody's file is not removed */
    fclose(file);
    assert_int_equal(dray__coordinator_new(base, &options, &coordinator, &error), DRAY_EEXIST);
    assert_int_equal(unlink(path), 0);
    options.unix_path = "/nowhere/at/all";
    assert_int_equal(dray__coordinator_new(base, &options, &coordinator, &error), DRAY_ESYS);
    options = (dray__coordinator_options){0};
    assert_int_equal(dray__coordinator_new(base, &options, &coordinator, &error), DRAY_EINVALID);
    event_base_free(base);
}

static void write_token(const char *path, const char *text, mode_t mode)
{
    unlink(path);
    int fd = open(path, O_WRONLY | O_CREAT | O_EXCL, mode);
    assert_true(fd >= 0 && fchmod(fd, mode) == 0);
    assert_int_equal(write(fd, text, strlen(text)), strlen(text));
    close(fd);
}

static int open_with_token(const char *address, const char *path)
{
    dray_options options = DRAY_OPTIONS_INIT;
    dray_context *context = NULL;
    options.address = address;
    if (path)
        setenv("DRAY_TOKEN_FILE", path, 1);
    int code = dray_open(&options, &context, NULL);
    unsetenv("DRAY_TOKEN_FILE");
    dray_close(context);
    return code;
}

/* Only who can read the server's file gets in over TCP. */
TEST(tcp_needs_the_token)
{
    char path[200], wrong[160], text[200];
    const char *port = strrchr(f.tcp_address, ':') + 1;
    snprintf(path, sizeof path, "%.100s/dray-tcp-%s.token", getenv("XDG_RUNTIME_DIR"), port);
    struct stat st;
    assert_int_equal(stat(path, &st), 0);
    assert_int_equal(st.st_mode & 0777, 0600);
    assert_int_equal(open_with_token(f.tcp_address, NULL), DRAY_OK);
    assert_int_equal(open_with_token(f.tcp_address, path), DRAY_OK);
    assert_int_equal(open_with_token(f.tcp_address, "/nowhere"), DRAY_ENOENT);
    snprintf(wrong, sizeof wrong, "%s/token", f.folder);
    int fd = open(path, O_RDONLY | O_CLOEXEC);
    ssize_t size = read(fd, text, sizeof text - 1);
    assert_true(size > 70);
    text[size] = 0;
    close(fd);
    write_token(wrong, text, 0600);
    assert_int_equal(open_with_token(f.tcp_address, wrong), DRAY_OK);
    static const mode_t modes[] = {0640, 0620, 0604};
    for (size_t i = 0; i < sizeof modes / sizeof *modes; i++) {
        write_token(wrong, text, modes[i]);
        assert_int_equal(open_with_token(f.tcp_address, wrong), DRAY_EPERM);
    }
    text[size - 2] = text[size - 2] == 'a' ? 'b' : 'a'; /* of the key */
    write_token(wrong, text, 0600);
    assert_int_equal(open_with_token(f.tcp_address, wrong), DRAY_EPERM);
    assert_int_equal(open_with_token(f.unix_address, wrong), DRAY_OK);
    text[6] = text[6] == 'a' ? 'b' : 'a'; /* of the session */
    write_token(wrong, text, 0600);
    assert_int_equal(open_with_token(f.tcp_address, wrong), DRAY_EPERM);
    write_token(wrong, "too short", 0600);
    assert_int_equal(open_with_token(f.tcp_address, wrong), DRAY_EFORMAT);
    assert_int_equal(unlink(wrong), 0);
}

/* Before HELLO there is nothing to learn, or to fill memory with. */
TEST(strangers_are_told_nothing)
{
    const char *addresses[] = {f.unix_address, f.tcp_address};
    static const uint16_t types[] = {DRAY__MSG_STATUS, DRAY__MSG_BARRIER};
    for (int a = 0; a < 2; a++) {
        dray__channel *channel;
        int64_t deadline = dray__deadline(10 * DRAY__SECOND);
        dray__writer w = {0};
        assert_int_equal(dray__channel_connect(addresses[a], deadline, &channel, NULL), DRAY_OK);
        for (size_t i = 0; i < sizeof types / sizeof *types; i++)
            assert_int_equal(dray__call(channel, types[i], NULL, NULL, 0, deadline, NULL, NULL),
                             DRAY_EPROTO);
        memset(dray__put_space(&w, 5000), 0, 5000);
        assert_int_equal(dray__call(channel, DRAY__MSG_PING, &w, NULL, 0, deadline, NULL, NULL),
                         a ? DRAY_EPROTO : DRAY_OK);
        dray__channel_close(channel);
        dray__writer_free(&w);
    }
}

SUITE(start, stop)
