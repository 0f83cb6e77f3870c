/* What is said over a socket to agree on UCX (net/ucx.c), both ways. The first byte: 0: what comes
 * is a reader's, to a server; 1: that follows a greeting; 2: the same, in a message with a right
 * proof (of another version of UCX: what it says is read, and refused); 3: a server's, to a reader.
 * Nothing that is not proven makes a connection. */
#include "fuzz/fuzz.h"

#include "net/address.h"
#include "net/carrier.h"

#include <poll.h>
#include <string.h>
#include <sys/socket.h>
#include <unistd.h>

enum { HEADER = 12, RANDOM = 16, PROOF = 32, MAGIC = 0x31584355 };

const int fuzz_rounds = 60;

static const dray__networks none;
static const dray__tls_key key = {.identity = "dray1.session.data", .bytes = "a session's key"};
static const dray__stream_keys keys = {.key = &key, .trusted = &none, .transport = "ucx"};
static char endpoint[DRAY__STREAM_ADDRESS];
static int listener = -1;

static int next(void)
{
    struct pollfd p = {.fd = listener, .events = POLLIN};
    MUST(poll(&p, 1, 10000) == 1);
    return 0;
}

/* The stream of a server, and the socket of who speaks with it. */
static dray__stream *serve(int *out)
{
    dray__address to;
    dray__stream *stream;
    MUST(dray__address_parse(endpoint, &to, NULL) == 0);
    MUST(dray__address_begin(&to, endpoint, out, NULL) == 0);
    next();
    MUST(dray__stream_accept(listener, &keys, &stream, NULL) == 0);
    return stream;
}

static void put_greeting(dray__writer *w, const char random[RANDOM])
{
    dray__put_u32(w, MAGIC);
    dray__put_u32(w, 0);
    dray__put_u32(w, RANDOM + 1);
    dray__put_bytes(w, random, RANDOM);
    dray__put_u8(w, 0);
}

static void say(int fd, const void *data, size_t size)
{
    MUST(size == 0 || send(fd, data, size, MSG_NOSIGNAL) == (ssize_t)size);
}

/* The proof that the server would want of this body. */
static void prove(const uint8_t *greeted, uint8_t *body, size_t size)
{
    static const char side[] = "dray1 ucx offer", random[RANDOM] = "r";
    dray__writer said = {0};
    dray__put_bytes(&said, side, sizeof side);
    dray__put_bytes(&said, random, RANDOM);
    dray__put_bytes(&said, greeted, RANDOM + 1);
    dray__put_bytes(&said, body, size - PROOF);
    MUST(dray__keyed_hash(key.bytes, said.data, said.size, body + size - PROOF));
    dray__writer_free(&said);
}

/* Until it failed. */
static void end(dray__stream *stream, int fd)
{
    int rc;
    shutdown(fd, SHUT_WR);
    struct pollfd p = {.fd = dray__stream_socket(stream), .events = POLLIN};
    for (int i = 0; i < 1000 && (rc = dray__stream_ready(stream, NULL)) == DRAY_EAGAIN; i++)
        poll(&p, 1, 10);
    MUST(rc != DRAY_OK && rc != DRAY_EAGAIN);
    dray__stream_close(stream);
    close(fd);
}

static void to_server(const uint8_t *data, size_t size, int kind)
{
    static const char random[RANDOM] = "r";
    int fd;
    if (kind == 0 && (size == 0 || data[0] != 'U'))
        return; /* another carrier's */
    dray__stream *stream = serve(&fd);
    uint8_t greeted[HEADER + RANDOM + 1];
    dray__writer w = {0};
    if (kind > 0) {
        put_greeting(&w, random);
        say(fd, w.data, w.size);
        for (size_t have = 0; have < sizeof greeted;) {
            MUST(dray__stream_ready(stream, NULL) == DRAY_EAGAIN);
            ssize_t n = recv(fd, greeted + have, sizeof greeted - have, MSG_DONTWAIT);
            have += n > 0 ? (size_t)n : 0;
        }
        dray__writer_reset(&w);
    }
    if (kind == 2 && size > PROOF + 20 && size < 8000) {
        dray__put_u32(&w, MAGIC);
        dray__put_u32(&w, 0);
        dray__put_u32(&w, (uint32_t)size);
        dray__put_bytes(&w, data, size);
        w.data[HEADER] = 99; /* no such version: no foreign address reaches UCX */
        prove(greeted + HEADER, w.data + HEADER, size);
        say(fd, w.data, w.size);
    } else {
        say(fd, data, size);
    }
    dray__writer_free(&w);
    end(stream, fd);
}

static void to_reader(const uint8_t *data, size_t size)
{
    dray__stream *stream;
    MUST(dray__stream_connect(endpoint, &keys, 0, &stream, NULL) == 0);
    next();
    int fd = accept(listener, NULL, NULL);
    MUST(fd >= 0);
    say(fd, data, size);
    end(stream, fd);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    if (listener < 0) {
        setenv("UCX_MEM_EVENTS", "n",
               1); /* UCX patches malloc and its like, as the sanitizer does */
        MUST(dray__stream_listen("127.0.0.1", endpoint, &listener, NULL) == 0);
    }
    if (size == 0 || size > 60000 || dray_transport_find("ucx", NULL, 0, NULL))
        return 0;
    int kind = data[0] % 4;
    if (kind < 3)
        to_server(data + 1, size - 1, kind);
    else
        to_reader(data + 1, size - 1);
    return 0;
}

void fuzz_seeds(fuzz_put put, void *user)
{
    static const char random[RANDOM] = "other";
    dray__writer body = {0};
    uint8_t noise[200];
    memset(noise, 7, sizeof noise);
    put_greeting(&body, random);
    fuzz_put_kind(put, user, 0, &body);
    dray__put_u32(&body, MAGIC);
    dray__put_u32(&body, 0);
    dray__put_u32(&body, 150);
    dray__put_bytes(&body, noise, 150);
    fuzz_put_kind(put, user, 0, &body);
    fuzz_put_kind(put, user, 3, &body);
    dray__writer_reset(&body);
    dray__put_u32(&body, MAGIC);
    dray__put_u32(&body, (uint32_t)DRAY_EPERM);
    dray__put_u32(&body, 9);
    dray__put_string(&body, "never");
    fuzz_put_kind(put, user, 3, &body);
    dray__writer_reset(&body);
    dray__put_bytes(&body, noise, 150);
    for (uint8_t kind = 1; kind < 3; kind++)
        fuzz_put_kind(put, user, kind, &body);
    dray__writer_free(&body);
}
