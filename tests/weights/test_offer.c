/* Offers to go on over UCX: only who knows the session's key can make or answer one, and only for
 * the connection on which it is made. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>

#include <cmocka.h>

#include "weights/cluster.h"
#include "weights/offer.h"

#include <poll.h>

static const dray__networks none;
static dray__tls_key key = {.identity = "dray1.session.data",
                            .bytes = "thirty-two bytes of a session's"};
static dray__tls_key other_key = {.identity = "dray1.session.data", .bytes = "another"};
static dray__tls_key no_key;

/* Both ends of a connection, and what each knows of the offer that is made on it. */
typedef struct ends {
    dray__stream_keys reader_keys, server_keys;
    dray__stream *reader, *server;
    dray__offer asks, answers;
    dray__ucx *ucx, *accepted;
    dray__writer out, in;
} ends;

static void ends_open(ends *e, const dray__tls_key *reader, const dray__tls_key *server)
{
    char endpoint[DRAY__STREAM_ADDRESS];
    int listener;
    *e = (ends){.reader_keys = {reader, &none, false, DRAY__TRANSPORT_UCX},
                .server_keys = {server, &none, false, DRAY__TRANSPORT_UCX}};
    MUST(dray__stream_listen("127.0.0.1", endpoint, &listener, error));
    MUST(dray__stream_connect(endpoint, &e->reader_keys, &e->reader, error));
    struct pollfd p = {.fd = listener, .events = POLLIN};
    CHECK(poll(&p, 1, 10000) == 1);
    MUST(dray__stream_accept(listener, &e->server_keys, &e->server, error));
    while (dray__stream_ready(e->reader) == -EAGAIN)
        usleep(100);
    close(listener);
    MUST(dray__ucx_open(dray__stream_socket(e->reader), false, &e->ucx, error));
}

static void ends_close(ends *e)
{
    dray__ucx_close(e->ucx);
    dray__ucx_close(e->accepted);
    dray__stream_close(e->reader);
    dray__stream_close(e->server);
    dray__writer_free(&e->out);
    dray__writer_free(&e->in);
}

/* What the server says to `request`: the status, with its head at *head. */
static int say(ends *e, const dray__writer *request, const uint8_t **head, uint32_t *size)
{
    dray__pull_header header;
    dray__answer_header answer;
    MUST(dray__pull_get_request(request->data, &header, error));
    CHECK(header.flags == DRAY__PULL_UCX &&
          header.body_bytes == request->size - DRAY__PULL_REQUEST_HEADER);
    dray__ucx_close(e->accepted);
    CHECK(dray__offer_answer(&e->answers, &e->server_keys, e->server, &header,
                             request->data + DRAY__PULL_REQUEST_HEADER, &e->in, &e->accepted));
    MUST(dray__pull_get_answer(e->in.data, &answer, error));
    *head = e->in.data + DRAY__PULL_ANSWER_HEADER;
    *size = answer.head_bytes;
    CHECK(e->in.size == DRAY__PULL_ANSWER_HEADER + answer.head_bytes);
    CHECK((e->accepted != NULL) == (answer.status == 0 && e->answers.greeted == false));
    return answer.status;
}

/* Up to an offer that is ready to be sent. */
static void make_offer(ends *e)
{
    const uint8_t *head;
    uint32_t size;
    MUST(dray__offer_greet(&e->asks, false, &e->out, error));
    CHECK(say(e, &e->out, &head, &size) == 0);
    MUST(dray__offer_greeted(&e->asks, head, size, error));
    MUST(dray__offer_put(&e->asks, &e->reader_keys, e->ucx, &e->out, error));
}

static void test_both_agree(void **state)
{
    (void)state;
    ends e;
    const uint8_t *head;
    uint32_t size;
    ends_open(&e, &key, &key);
    make_offer(&e);
    assert_int_equal(say(&e, &e.out, &head, &size), 0);
    MUST(dray__offer_taken(&e.asks, &e.reader_keys, head, size, e.ucx, error));
    ends_close(&e);
}

static void test_other_keys(void **state)
{
    (void)state;
    ends e;
    const uint8_t *head;
    uint32_t size;
    dray_error said;
    ends_open(&e, &other_key, &key); /* the reader is of another session */
    make_offer(&e);
    assert_int_equal(say(&e, &e.out, &head, &size), DRAY_EPERM);
    assert_null(e.accepted);
    ends_close(&e);

    ends_open(&e, &key, &key); /* the server is */
    make_offer(&e);
    assert_int_equal(say(&e, &e.out, &head, &size), 0);
    e.reader_keys.key = &other_key;
    assert_int_equal(dray__offer_taken(&e.asks, &e.reader_keys, head, size, e.ucx, &said),
                     DRAY_EPERM);
    ends_close(&e);

    bool wanted;
    ends_open(&e, &no_key, &key);
    assert_int_equal(dray__offer_wanted(&e.reader_keys, e.reader, &wanted, &said), DRAY_EPERM);
    assert_false(wanted);
    ends_close(&e);
}

/* Every bit of what either side says is proven. */
static void test_changed(void **state)
{
    (void)state;
    ends e;
    const uint8_t *head;
    uint32_t size;
    ends_open(&e, &key, &key);
    make_offer(&e);
    dray__offer before = e.answers;
    for (size_t i = DRAY__PULL_REQUEST_HEADER; i < e.out.size; i++) {
        e.out.data[i] ^= 0x10;
        e.answers = before;
        assert_int_equal(say(&e, &e.out, &head, &size), DRAY_EPERM);
        e.out.data[i] ^= 0x10;
    }
    e.answers = before;
    e.answers.reads = !before.reads; /* as if the greeting had asked for the other */
    assert_int_equal(say(&e, &e.out, &head, &size), DRAY_EPERM);
    e.answers = before;
    assert_int_equal(say(&e, &e.out, &head, &size), 0);
    for (uint32_t i = 0; i < size; i++) {
        e.in.data[DRAY__PULL_ANSWER_HEADER + i] ^= 1;
        assert_int_equal(dray__offer_taken(&e.asks, &e.reader_keys, head, size, e.ucx, NULL),
                         DRAY_EPERM);
        e.in.data[DRAY__PULL_ANSWER_HEADER + i] ^= 1;
    }
    for (uint32_t shorter = 0; shorter < size; shorter++)
        assert_int_not_equal(dray__offer_taken(&e.asks, &e.reader_keys, head, shorter, e.ucx, NULL),
                             DRAY_OK);
    ends_close(&e);
}

static void test_replayed(void **state)
{
    (void)state;
    ends e, later;
    const uint8_t *head;
    uint32_t size;
    ends_open(&e, &key, &key);
    make_offer(&e);
    assert_int_equal(say(&e, &e.out, &head, &size), 0);
    /* on the same connection, and on another one: without a greeting, and with the old one */
    dray__writer answer = {0};
    dray__put_bytes(&answer, head, size);
    assert_int_equal(say(&e, &e.out, &head, &size), DRAY_EPERM);
    ends_open(&later, &key, &key);
    assert_int_equal(say(&later, &e.out, &head, &size), DRAY_EPERM);
    dray__writer greeting = {0};
    MUST(dray__offer_greet(&later.asks, false, &greeting, error));
    memcpy(greeting.data + DRAY__PULL_REQUEST_HEADER, e.asks.reader, sizeof e.asks.reader);
    assert_int_equal(say(&later, &greeting, &head, &size), 0);
    assert_int_equal(say(&later, &e.out, &head, &size), DRAY_EPERM);
    assert_null(later.accepted);
    /* an answer of an earlier connection, to a reader that greets anew */
    make_offer(&later);
    assert_int_equal(dray__offer_taken(&later.asks, &later.reader_keys, answer.data,
                                       (uint32_t)answer.size, later.ucx, NULL),
                     DRAY_EPERM);
    memcpy(later.asks.server, e.asks.server, sizeof e.asks.server);
    assert_int_equal(dray__offer_taken(&later.asks, &later.reader_keys, answer.data,
                                       (uint32_t)answer.size, later.ucx, NULL),
                     DRAY_EPERM);
    dray__writer_free(&greeting);
    dray__writer_free(&answer);
    ends_close(&later);
    ends_close(&e);
}

int main(void)
{
#if defined(__SANITIZE_THREAD__)
    setenv("UCX_MEM_EVENTS", "n", 1); /* UCX patches malloc and its like, as the sanitizer does */
#endif
    dray__ucx_version version;
    if (dray__ucx_find(&version, NULL))
        return 77;
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_both_agree),
        cmocka_unit_test(test_other_keys),
        cmocka_unit_test(test_changed),
        cmocka_unit_test(test_replayed),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
