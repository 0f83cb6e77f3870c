/* Tests a carrier of src/net/carriers.c, which the program's argument names. Bytes arrive as they
 * were sent, every wait can be ended, the death of a peer is noticed, and the bytes of a stranger
 * do no harm. Without an argument, tests the table itself. */
#include "net/ends.h"

#include "base/random.h"
#include "seed.h"

#include <arpa/inet.h>
#include <netinet/in.h>
#include <signal.h>
#include <sys/prctl.h>
#include <sys/un.h>
#include <sys/wait.h>

static const dray__carrier *carrier;
static uint64_t seed;

/* Sends and receives as far as both go; false: nothing moved for a while. */
static bool move(dray__stream *stream, uint8_t *data, size_t size, size_t *at, bool send)
{
    if (*at == size)
        return false;
    ssize_t n = send ? dray__stream_send(stream, data + *at, size - *at, *at % 2)
                     : dray__stream_recv(stream, data + *at, size - *at);
    if (n == -EAGAIN)
        return false;
    if (n <= 0)
        fail_msg("%s: %s", send ? "send" : "recv", strerror((int)-n));
    *at += (size_t)n;
    return true;
}

static void fill(uint8_t *data, size_t size, uint64_t stream)
{
    for (size_t i = 0; i < size; i++)
        data[i] = (uint8_t)(dray__random_u64(seed, stream, i / 8) >> i % 8 * 8);
}

/* The next number below `below`. */
static size_t draw(size_t below)
{
    static uint64_t drawn;
    return (size_t)(dray__random_u64(seed, 99, drawn++) % below);
}

/* `size` bytes from the reader to the server and as many back, at once. */
static void exchange(ends *e, size_t size)
{
    uint8_t *there = malloc(size), *back = malloc(size), *a = malloc(size), *b = malloc(size);
    size_t at[4] = {0};
    fill(there, size, 2 * size);
    fill(back, size, 2 * size + 1);
    there[0] =
        'D'; /* as a frame begins: other carriers' connections are known by their first byte */
    int64_t until = dray__now() + 60 * DRAY__SECOND;
    while (at[2] < size || at[3] < size) {
        bool moved = move(e->reader, there, size, &at[0], true);
        moved |= move(e->server, back, size, &at[1], true);
        moved |= move(e->server, a, size, &at[2], false);
        moved |= move(e->reader, b, size, &at[3], false);
        dray__stream_flush(e->reader);
        dray__stream_flush(e->server);
        if (!moved && dray__now() > until)
            fail_msg("%zu bytes: %zu and %zu sent, %zu and %zu came", size, at[0], at[1], at[2],
                     at[3]);
    }
    assert_memory_equal(there, a, size);
    assert_memory_equal(back, b, size);
    free(there);
    free(back);
    free(a);
    free(b);
}

static void open_both(ends *e)
{
    ends_listen(e, carrier);
    ends_connect(e);
    ends_accept(e);
    exchange(e, 1);
    assert_ptr_equal(dray__stream_carrier(e->reader), carrier);
    assert_ptr_equal(dray__stream_carrier(e->server), carrier);
    assert_int_equal(dray__stream_encrypts(e->server), carrier->encrypts);
}

static void bytes_arrive_as_they_were_sent(void **state)
{
    (void)state;
    ends e;
    open_both(&e);
    for (size_t size = 2; size < 100000; size = size * 5 / 2)
        exchange(&e, size);
    ends_close(&e);
}

static void much_arrives_as_it_was_sent(void **state)
{
    (void)state;
    ends e;
    open_both(&e);
    exchange(&e, (16 << 20) + 7);
    ends_close(&e);
}

/* Nobody answers: nothing blocks, and the descriptor stays quiet. */
static void nothing_waits(void **state)
{
    (void)state;
    ends e;
    uint8_t byte;
    open_both(&e);
    int64_t begin = dray__now();
    assert_int_equal(dray__stream_recv(e.reader, &byte, 1), -EAGAIN);
    assert_int_equal(dray__stream_flush(e.reader), 0);
    struct pollfd p = {.fd = dray__stream_fd(e.reader),
                       .events = dray__stream_events(e.reader, POLLIN)};
    for (int i = 0; i < 50 && poll(&p, 1, 0); i++) /* what is left of the handshake */
        assert_int_equal(dray__stream_recv(e.reader, &byte, 1), -EAGAIN);
    assert_int_equal(poll(&p, 1, 50), 0);
    assert_false(dray__stream_pending(e.reader));
    assert_true(dray__now() - begin < 5 * DRAY__SECOND);
    /* and it wakes who waits */
    assert_int_equal(dray__stream_send(e.server, "x", 1, false), 1);
    for (int i = 0; i < 10000 && dray__stream_flush(e.server) == -EAGAIN; i++)
        usleep(100);
    ssize_t n = -EAGAIN;
    while (n == -EAGAIN) {
        assert_true(dray__stream_pending(e.reader) || poll(&p, 1, 10000) == 1);
        n = dray__stream_recv(e.reader, &byte, 1);
        dray__stream_flush(e.server);
    }
    assert_int_equal(n, 1);
    assert_int_equal(byte, 'x');
    ends_close(&e);
}

/* What the other end makes of an end. */
static ssize_t end_of(dray__stream *stream)
{
    uint8_t bytes[4096];
    int64_t until = dray__now() + 20 * DRAY__SECOND;
    ssize_t n;
    while (((n = dray__stream_recv(stream, bytes, sizeof bytes)) > 0 || n == -EAGAIN) &&
           dray__now() < until)
        if (n == -EAGAIN)
            usleep(200);
    return n;
}

static void an_end_is_noticed(void **state)
{
    (void)state;
    ends e;
    open_both(&e);
    dray__stream_close(e.server);
    e.server = NULL;
    ssize_t n = end_of(e.reader);
    if (n != 0 && n != -ECONNRESET && n != -EPIPE)
        fail_msg("closed: %zd", n);
    ends_close(&e);
}

/* The child serves, and is killed in the middle of what it sends. */
static void a_death_is_noticed(void **state)
{
    (void)state;
    ends e;
    uint8_t byte = 0;
    ends_listen(&e, carrier);
    pid_t pid = fork();
    if (pid == 0) {
        prctl(PR_SET_PDEATHSIG, SIGKILL);
        uint8_t *much = calloc(1, 1 << 20);
        struct pollfd p = {.fd = e.listener, .events = POLLIN};
        if (poll(&p, 1, 20000) != 1 ||
            dray__stream_accept(e.listener, &e.server_keys, &e.server, NULL))
            _exit(1);
        for (ssize_t n = 1; n > 0 || n == -EAGAIN; usleep(100))
            n = dray__stream_send(e.server, much, 1 << 20, false);
        _exit(2);
    }
    close(e.listener);
    e.listener = -1;
    ends_connect(&e);
    ssize_t n;
    while ((n = dray__stream_recv(e.reader, &byte, 1)) == -EAGAIN) {
        dray__stream_send(e.reader, "x", 1, false); /* a server knows it by its first byte */
        dray__stream_flush(e.reader);
        usleep(100);
    }
    assert_int_equal(n, 1);
    kill(pid, SIGKILL);
    int64_t begin = dray__now();
    n = end_of(e.reader);
    assert_true(n <= 0 && n != -EAGAIN);
    assert_true(dray__now() - begin < 10 * DRAY__SECOND);
    int status;
    assert_int_equal(waitpid(pid, &status, 0), pid);
    assert_true(WIFSIGNALED(status));
    ends_close(&e);
}

/* ---- strangers ------------------------------------------------------------------------------- */

static int raw_connect(const ends *e)
{
    int fd, rc;
    if (strncmp(e->endpoint, "unix:", 5) == 0) {
        struct sockaddr_un to = {.sun_family = AF_UNIX};
        snprintf(to.sun_path, sizeof to.sun_path, "%s", e->endpoint + 5);
        fd = socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0);
        rc = connect(fd, (struct sockaddr *)&to, sizeof to);
    } else {
        struct sockaddr_in to = {.sin_family = AF_INET, .sin_addr.s_addr = htonl(INADDR_LOOPBACK)};
        to.sin_port = htons((uint16_t)strtoul(strrchr(e->endpoint, ':') + 1, NULL, 10));
        fd = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
        rc = connect(fd, (struct sockaddr *)&to, sizeof to);
    }
    assert_int_equal(rc, 0);
    return fd;
}

/* Noise that begins as the carrier's connections do: it is refused, or, where everything is taken
 * as it comes, taken as it comes; it is never waited for, and the next one is served. */
static void noise_does_no_harm(void **state)
{
    (void)state;
    ends e;
    ends_listen(&e, carrier);
    for (int i = 0; i < 60; i++) {
        uint8_t noise[3000], heard[4096];
        size_t size = 1 + draw(sizeof noise), have = 0;
        fill(noise, size, 1000 + (uint64_t)i);
        noise[0] = carrier->first ? carrier->first : 'D';
        int fd = raw_connect(&e);
        assert_int_equal(send(fd, noise, size, MSG_NOSIGNAL), size);
        shutdown(fd, SHUT_WR);
        ends_accept(&e);
        ssize_t n;
        int64_t until = dray__now() + 20 * DRAY__SECOND;
        while (((n = dray__stream_recv(e.server, heard + have, sizeof heard - have)) > 0 ||
                n == -EAGAIN) &&
               dray__now() < until)
            have += n > 0 ? (size_t)n : 0;
        assert_true(n <= 0 && n != -EAGAIN);
        if (carrier->first)
            assert_int_equal(have, 0);
        else if (have != size || memcmp(heard, noise, size) != 0)
            fail_msg("seed %llu: %zu of %zu bytes", (unsigned long long)seed, have, size);
        dray__stream_close(e.server);
        e.server = NULL;
        close(fd);
    }
    ends_connect(&e);
    ends_accept(&e);
    exchange(&e, 1000);
    ends_close(&e);
}

/* Only what encrypts goes where nobody is trusted, and it does not without a key. */
static void networks_are_respected(void **state)
{
    (void)state;
    static const dray__tls_key nobody;
    dray__stream_keys keys = {.key = &ends_key, .trusted = &no_networks};
    const bool here = strcmp(carrier->scheme, "tcp") != 0; /* no network is in between */
    if (!here)
        assert_int_equal(carrier->may(&keys, false, NULL) == DRAY_OK, carrier->encrypts);
    keys.always = true;
    if (!here)
        assert_int_equal(carrier->may(&keys, true, NULL) == DRAY_OK, carrier->encrypts);
    keys.key = &nobody;
    if (!here)
        assert_int_equal(carrier->may(&keys, false, NULL), DRAY_EPERM);
}

/* ---- one-sided reads ------------------------------------------------------------------------- */

enum { SOURCE = 1 << 20 };

static void read_until(ends *e, dray__net_reads *reads)
{
    int rc;
    uint8_t byte;
    int64_t until = dray__now() + 20 * DRAY__SECOND;
    while ((rc = carrier->read(e->reader, reads)) == -EAGAIN && dray__now() < until)
        assert_int_equal(dray__stream_recv(e->server, &byte, 1), -EAGAIN); /* it may have to help */
    assert_int_equal(rc, 0);
}

static void memory_is_read_one_sidedly(void **state)
{
    (void)state;
    if (!carrier->get)
        skip();
    ends e;
    open_both(&e);
    uint8_t *source = malloc(SOURCE), *target = malloc(SOURCE);
    fill(source, SOURCE, 3);
    dray__net_memory *out, *into;
    dray__net_key *key, *wrong;
    void *packed;
    size_t size;
    assert_int_equal(carrier->map(e.server, source, SOURCE, true, &out, NULL), 0);
    assert_int_equal(carrier->map(e.reader, target, SOURCE, false, &into, NULL), 0);
    assert_int_equal(carrier->pack_key(out, &packed, &size, NULL), 0);
    assert_int_equal(carrier->unpack_key(e.reader, packed, size, &key, NULL), 0);
    assert_int_not_equal(carrier->unpack_key(e.reader, packed, 0, &wrong, NULL), 0);
    assert_int_not_equal(carrier->unpack_key(e.reader, source, SOURCE, &wrong, NULL), 0);
    for (int i = 0; i < 50; i++) {
        size_t from = draw(SOURCE - 1);
        size_t bytes = 1 + draw(SOURCE - from);
        dray__net_reads reads = {0};
        memset(target, 0, SOURCE);
        assert_int_equal(carrier->get(e.reader, key, (uint64_t)(uintptr_t)source + from, into,
                                      target + from, bytes, &reads, NULL),
                         0);
        read_until(&e, &reads);
        if (memcmp(target + from, source + from, bytes) != 0)
            fail_msg("seed %llu: %zu bytes from %zu", (unsigned long long)seed, bytes, from);
        assert_true(from == 0 || target[from - 1] == 0);
    }
    exchange(&e, 5000); /* between them the stream goes on */
    carrier->forget_keys(e.reader);
    carrier->unmap(into);
    free(packed);
    ends_close(&e);
    carrier->unmap(out); /* after its connection, too */
    free(source);
    free(target);
}

/* ---- the table ------------------------------------------------------------------------------- */

static void every_carrier_is_whole(void **state)
{
    (void)state;
    for (uint32_t i = 0; dray__carrier_at(i); i++) {
        const dray__carrier *c = dray__carrier_at(i);
        const char *transport;
        for (uint32_t k = 0; k < i; k++)
            assert_string_not_equal(c->name, dray__carrier_at(k)->name);
        assert_true(c->may && c->scheme);
        dray__transport_find(c->transport, &transport, NULL, 0, NULL);
        assert_string_equal(transport, c->transport);
        if (!c->find || c->find(NULL, 0, NULL) == DRAY_OK)
            assert_true(c->connect && c->accept && c->send && c->recv && c->events);
        assert_int_equal(c->get != NULL, c->map && c->unmap && c->pack_key && c->unpack_key &&
                                             c->forget_keys && c->read);
    }
}

/* A connection that fails is tried over the next one that may, unless only one was asked for. */
static void another_one_is_tried(void **state)
{
    (void)state;
    const dray__stream_keys plain = {.key = &ends_key, .trusted = &no_networks};
    const dray__stream_keys always = {.key = &ends_key, .trusted = &no_networks, .always = true};
    uint32_t avoid = 0, index = 0, tried = 0;
    while (dray__carrier_choose("tcp", &plain, true, avoid, &index, NULL) == DRAY_OK) {
        assert_false(dray__carrier_at(index)->encrypts);
        avoid |= 1u << index;
        tried++;
    }
    assert_true(tried >= 1);
    assert_string_equal(dray__carrier_at(index)->name, "tcp"); /* the last resort */
    assert_int_equal(dray__carrier_choose("tcp", &always, true, 0, &index, NULL), DRAY_OK);
    assert_true(dray__carrier_at(index)->encrypts);
    /* of a stream: only where the carrier failed, and not for good where it was asked for by name
     */
    dray__stream_keys named = plain;
    dray__stream stream = {.carrier = dray__carrier_at(index), .keys = &plain, .unfit = true};
    uint32_t others = 0;
    assert_int_equal(dray__carrier_choose("tcp", &plain, true, 0, &index, NULL), DRAY_OK);
    stream.carrier = dray__carrier_at(index);
    stream.trusted = true;
    assert_int_equal(dray__stream_avoid(&stream, true, &others), tried > 1);
    assert_int_equal(others, tried > 1 ? 1u << index : 0);
    stream.carrier = dray__carrier_at(0); /* some others of its transport are behind it */
    named.transport = stream.carrier->transport;
    stream.keys = &named;
    bool behind = dray__carrier_choose("tcp", &named, true, 1, &index, NULL) == DRAY_OK;
    others = 0;
    assert_false(dray__stream_avoid(&stream, true, &others));
    assert_int_equal(dray__stream_avoid(&stream, false, &others), behind);
    stream.unfit = false;
    others = 0;
    assert_false(dray__stream_avoid(&stream, false, &others));
    assert_int_not_equal(dray__carrier_choose("smoke", &plain, true, 0, &index, NULL), DRAY_OK);
}

int main(int argc, char **argv)
{
#if defined(__SANITIZE_THREAD__)
    setenv("UCX_MEM_EVENTS", "n", 1); /* UCX patches malloc and its like, as the sanitizer does */
#endif
    setenv("DRAY_UCX_READS", "always", 1);
    seed = argc > 2 ? strtoull(argv[2], NULL, 10) : test_seed();
    const struct CMUnitTest table[] = {cmocka_unit_test(every_carrier_is_whole),
                                       cmocka_unit_test(another_one_is_tried)};
    const struct CMUnitTest tests[] = {cmocka_unit_test(bytes_arrive_as_they_were_sent),
                                       cmocka_unit_test(a_death_is_noticed),
                                       cmocka_unit_test(much_arrives_as_it_was_sent),
                                       cmocka_unit_test(nothing_waits),
                                       cmocka_unit_test(an_end_is_noticed),
                                       cmocka_unit_test(noise_does_no_harm),
                                       cmocka_unit_test(networks_are_respected),
                                       cmocka_unit_test(memory_is_read_one_sidedly)};
    if (argc < 2)
        return cmocka_run_group_tests(table, NULL, NULL);
    for (uint32_t i = 0; !carrier || strcmp(carrier->name, argv[1]) != 0; i++)
        if (!(carrier = dray__carrier_at(i)))
            return fprintf(stderr, "no carrier is called %s\n", argv[1]), 2;
    if (carrier->find && carrier->find(NULL, 0, NULL))
        return 77; /* this machine has not got it */
    return cmocka_run_group_tests(tests, NULL, NULL);
}
