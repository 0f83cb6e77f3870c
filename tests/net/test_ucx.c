/* Tests how two ends agree on UCX. Only an end that knows the session's key can offer or accept it,
 * and only for the connection on which the message is sent. All messages pass through this test,
 * between two ends that believe that they are connected directly. */
#include "net/ends.h"

#include "base/random.h"
#include "net/address.h"
#include "net/ucx.h"
#include "seed.h"

static const dray__tls_key other_key = {.identity = "dray1.session.data", .bytes = "another"};

enum { ROOM = 20000, HEADER = 12, RANDOM = 16, BACK = 1 };

/* What one side says: all of it so far; the byte at `at` is changed on the way. */
typedef struct speech {
    uint8_t said[ROOM];
    size_t size, at;
    uint8_t change;
    const struct speech *instead; /* said instead, from `from` on */
    size_t from;
} speech;

typedef struct scene {
    const dray__tls_key *reader, *server;
    speech sides[2];
    int ends[2]; /* what becomes of the reader and of the server */
    dray_error error;
    bool stuck; /* both may wait for each other, which their callers would end */
} scene;

/* Passes on what lies in one socket. */
static void pass(int from, int to, speech *side)
{
    uint8_t bytes[4096];
    ssize_t n = recv(from, bytes, sizeof bytes, MSG_DONTWAIT);
    if (n == 0 && side->instead && side->size < side->instead->size) /* all of it, all the same */
        n = send(to, side->instead->said + side->size, side->instead->size - side->size,
                 MSG_NOSIGNAL) < 0;
    if (n == 0) {
        side->instead = NULL;
        shutdown(to, SHUT_WR);
    }
    for (ssize_t i = 0; i < n; i++, side->size++) {
        assert_true(side->size < ROOM);
        side->said[side->size] = bytes[i];
        if (side->size == side->at)
            bytes[i] ^= side->change;
        if (side->instead && side->size >= side->from)
            bytes[i] = side->instead->said[side->size];
    }
    if (n > 0)
        assert_int_equal(send(to, bytes, (size_t)n, MSG_NOSIGNAL), n);
}

static void play(scene *s)
{
    ends e;
    char between[DRAY__STREAM_ADDRESS];
    int listener, inner, outer;
    ends_listen(&e, &dray__carrier_ucx_reads);
    e.reader_keys.key = s->reader ? s->reader : &ends_key;
    e.server_keys.key = s->server ? s->server : &ends_key;
    assert_int_equal(dray__stream_listen("127.0.0.1", between, &listener, NULL), 0);
    dray__address to;
    assert_int_equal(dray__address_parse(e.endpoint, &to, NULL), 0);
    assert_int_equal(dray__address_begin(&to, e.endpoint, &inner, NULL), 0);
    ends_accept(&e);
    snprintf(e.endpoint, sizeof e.endpoint, "%s", between);
    ends_connect(&e);
    struct pollfd p = {.fd = listener, .events = POLLIN};
    assert_int_equal(poll(&p, 1, 20000), 1);
    outer = accept(listener, NULL, NULL);
    dray__stream *streams[2] = {e.reader, e.server};
    s->ends[0] = s->ends[1] = DRAY_EAGAIN;
    int64_t until = dray__now() + (s->stuck ? DRAY__SECOND / 2 : 20 * DRAY__SECOND);
    while ((s->ends[0] == DRAY_EAGAIN || s->ends[1] == DRAY_EAGAIN) && dray__now() < until) {
        for (int i = 0; i < 2; i++) {
            if (s->ends[i] == DRAY_EAGAIN)
                s->ends[i] = dray__stream_ready(streams[i], i ? NULL : &s->error);
            if (s->ends[i] && s->ends[i] != DRAY_EAGAIN) /* it goes, and the other one sees it */
                shutdown(dray__stream_socket(streams[i]), SHUT_RDWR);
        }
        pass(outer, inner, &s->sides[0]);
        pass(inner, outer, &s->sides[BACK]);
    }
    close(outer);
    close(inner);
    close(listener);
    ends_close(&e);
}

TEST(both_agree)
{
    scene s = {0};
    play(&s);
    assert_int_equal(s.ends[0], DRAY_OK);
    assert_int_equal(s.ends[1], DRAY_OK);
}

TEST(strangers_do_not)
{
    scene reader = {.reader = &other_key}, server = {.server = &other_key};
    play(&reader);
    assert_int_equal(reader.ends[0], DRAY_EPERM); /* it is told so */
    assert_int_equal(reader.ends[1], DRAY_EPERM);
    assert_non_null(strstr(reader.error.message, "another session"));
    play(&server);
    assert_int_equal(server.ends[1], DRAY_EPERM);
}

/* The end that is said something else than was meant does not go on. */
TEST(every_byte_is_proven)
{
    const uint64_t seed = test_seed();
    scene whole = {0};
    play(&whole);
    for (int direction = 0; direction < 2; direction++) {
        size_t size = whole.sides[direction].size;
        /* whether there are to be reads, the last byte of the proof, and others behind the first
         * header; the reader's wish to read alone is not proven, what is agreed on is */
        size_t places[24] = {direction ? HEADER + RANDOM : size - 1, size - 1, size - 17};
        for (size_t i = 3; i < 24; i++)
            places[i] =
                HEADER + (size_t)(dray__random_u64(seed, (uint64_t)direction, i) % (size - HEADER));
        for (size_t i = 0; i < 24; i++) {
            scene s = {.stuck = true};
            if (direction == 0 && places[i] == HEADER + RANDOM)
                continue;
            s.sides[direction].at = places[i];
            s.sides[direction].change = 1;
            play(&s);
            if (s.ends[!direction] == DRAY_OK && s.ends[direction] == DRAY_OK)
                fail_msg("byte %zu of %zu of side %d", places[i], size, direction);
            if (direction == 0)
                assert_int_not_equal(s.ends[1], DRAY_OK);
            else
                assert_int_not_equal(s.ends[0], DRAY_OK);
        }
    }
}

/* What was said on an earlier connection, to a server and to a reader of a later one. */
TEST(what_was_said_before_proves_nothing)
{
    for (int direction = 0; direction < 2; direction++) {
        scene before = {0}, later = {0};
        play(&before);
        later.sides[direction].instead = &before.sides[direction];
        later.sides[direction].from = 0; /* the old greeting, too */
        play(&later);
        assert_int_equal(later.ends[!direction], DRAY_EPERM);
        scene half = {0};
        half.sides[direction].instead = &before.sides[direction];
        half.sides[direction].from = HEADER + RANDOM + 1;
        play(&half);
        assert_int_equal(half.ends[!direction], DRAY_EPERM);
    }
}

int main(void)
{
#if defined(__SANITIZE_THREAD__)
    setenv("UCX_MEM_EVENTS", "n", 1); /* UCX patches malloc and its like, as the sanitizer does */
#endif
    setenv("DRAY_UCX_READS", "always", 1);
    if (dray_transport_find("ucx", NULL, 0, NULL))
        return 77;
    return suite_run(NULL, NULL);
}
