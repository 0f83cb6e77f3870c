/* Tests samples of another host's keeper that are altered on the way, while the rest of the answer
 * is right. A server in the keeper's place sends the altered bytes. */
#include "base/clock.h"
#include "base/hash.h"
#include "net/cells.h"
#include "queue/storage/distant.h"
#include "suite.h"

#include <fcntl.h>
#include <pthread.h>
#include <stdint.h>
#include <stdio.h>
#include <string.h>
#include <sys/socket.h>
#include <unistd.h>

enum { BYTES = 400 };

typedef struct server {
    int listener;
    char endpoint[DRAY__STREAM_ADDRESS];
    uint32_t ranges;
    size_t altered; /* the byte that is changed; BYTES: none */
} server;

/* Ranges of 7s, all in one answer. */
static void answer(const server *s, int fd)
{
    uint8_t data[BYTES];
    dray__writer w = {0};
    memset(data, 7, sizeof data);
    dray__answer_put(&w, DRAY_OK, 0, 8 + s->ranges, BYTES);
    dray__put_u64(&w, dray__hash(data, BYTES));
    for (uint32_t i = 0; i < s->ranges; i++)
        dray__put_u8(&w, 0);
    if (s->altered < BYTES)
        data[s->altered] ^= 1;
    dray__put_bytes(&w, data, BYTES);
    send(fd, w.data, w.size, MSG_NOSIGNAL);
    dray__writer_free(&w);
}

static void *serve(void *user)
{
    const server *s = user;
    char heard[4096];
    for (int fd; (fd = accept(s->listener, NULL, NULL)) >= 0; close(fd)) {
        if (recv(fd, heard, sizeof heard, 0) > 0)
            answer(s, fd);
        while (recv(fd, heard, sizeof heard, 0) > 0)
            continue;
    }
    return NULL;
}

static int find(void *user, uint32_t keeper, char *endpoint, size_t size, dray_error *error)
{
    (void)keeper, (void)error;
    snprintf(endpoint, size, "%s", ((const server *)user)->endpoint);
    return DRAY_OK;
}

/* Of one range the bytes come straight to their place, of several through a buffer. */
static int get(uint32_t count, size_t altered, uint8_t out[BYTES], dray_error *error)
{
    static const dray__networks none;
    static const dray__tls_key key;
    static const dray__stream_keys keys = {.key = &key, .trusted = &none, .transport = "stream"};
    server s = {.ranges = count, .altered = altered};
    dray__range ranges[2];
    dray__distant *distant;
    pthread_t thread;
    uint64_t each = BYTES / count;
    for (uint32_t i = 0; i < count; i++)
        ranges[i] =
            (dray__range){.object = 7 + i, .bytes = each, .at = out + i * each, .keeper = 1};
    assert_int_equal(dray__stream_listen("127.0.0.1", s.endpoint, &s.listener, NULL), 0);
    assert_int_equal(fcntl(s.listener, F_SETFL, 0), 0);
    assert_int_equal(pthread_create(&thread, NULL, serve, &s), 0);
    assert_int_equal(dray__distant_new(&keys, find, &s, &distant, NULL), 0);
    int rc = dray__distant_get(distant, ranges, count, dray__deadline(30 * DRAY__SECOND), error);
    dray__distant_free(distant);
    shutdown(s.listener, SHUT_RDWR);
    pthread_join(thread, NULL);
    close(s.listener);
    return rc;
}

TEST(samples_altered_on_the_way)
{
    uint8_t right[BYTES], out[BYTES];
    (void)state;
    memset(right, 7, sizeof right);
    for (uint32_t count = 1; count <= 2; count++) {
        dray_error error;
        memset(out, 0, sizeof out);
        assert_int_equal(get(count, BYTES, out, &error), DRAY_OK);
        assert_memory_equal(out, right, BYTES);
        for (size_t at = 0; at < BYTES; at += BYTES - 1) {
            assert_int_equal(get(count, at, out, &error), DRAY_ECHECKSUM);
            assert_non_null(strstr(error.message, "altered on the way"));
        }
    }
}

SUITE(NULL, NULL)
