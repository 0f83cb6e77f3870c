/* What a keeper's data server, or who stands in its place, answers to who reads samples of another
 * host (queue/storage/distant.h). An input is all that it says; the first byte: 1: the answer's sum
 * is put right. Ranges that were got hold what was said, the others are lost, and nothing lies
 * behind them.
 */
#include "fuzz/fuzz.h"

#include "base/clock.h"
#include "base/hash.h"
#include "net/cells.h"
#include "queue/storage/distant.h"

#include <fcntl.h>
#include <pthread.h>
#include <sys/socket.h>

const int fuzz_rounds = 60;

enum { RANGES = 3, BYTES = 40, GUARD = 16, SUM_AT = DRAY__ANSWER_HEADER };

static struct server {
    int listener;
    char endpoint[DRAY__STREAM_ADDRESS];
    const uint8_t *said;
    size_t size;
} s;

/* To whoever comes; then it hears until the other side leaves. */
static void *serve(void *user)
{
    char heard[4096];
    for (int fd; (fd = accept(s.listener, NULL, NULL)) >= 0; close(fd)) {
        if (recv(fd, heard, sizeof heard, 0) > 0 && s.size)
            send(fd, s.said, s.size, MSG_NOSIGNAL);
        shutdown(fd, SHUT_WR);
        while (recv(fd, heard, sizeof heard, 0) > 0)
            continue;
    }
    return user;
}

static int find(void *user, uint32_t keeper, char *endpoint, size_t size, dray_error *error)
{
    (void)user, (void)keeper, (void)error;
    snprintf(endpoint, size, "%s", s.endpoint);
    return DRAY_OK;
}

static void put_right(uint8_t *said, size_t size)
{
    dray__answer answer;
    if (size < SUM_AT + 8 || dray__answer_get(said, &answer, NULL) || answer.head_bytes < 8 ||
        size - SUM_AT < answer.head_bytes)
        return;
    size_t at = SUM_AT + answer.head_bytes, bytes = size - at;
    uint64_t sum = htole64(
        dray__hash(said + at, bytes < answer.data_bytes ? bytes : (size_t)answer.data_bytes));
    memcpy(said + SUM_AT, &sum, 8);
}

static void get(void)
{
    static const dray__networks none;
    static const dray__tls_key key;
    static const dray__stream_keys keys = {.key = &key, .trusted = &none, .transport = "stream"};
    uint8_t bytes[RANGES][BYTES + GUARD];
    dray__range ranges[RANGES];
    dray__distant *distant;
    dray_error error;
    memset(bytes, 0xEE, sizeof bytes);
    for (uint32_t i = 0; i < RANGES; i++)
        ranges[i] = (dray__range){
            .object = 7 + i, .offset = i, .bytes = BYTES - i, .at = bytes[i], .keeper = 1};
    MUST(dray__distant_new(&keys, find, NULL, &distant, NULL) == 0);
    dray__distant_get(distant, ranges, RANGES, dray__deadline(5 * DRAY__MILLISECOND), &error);
    for (uint32_t i = 0; i < RANGES; i++)
        for (size_t at = BYTES - i; at < sizeof bytes[i]; at++)
            MUST(bytes[i][at] == 0xEE);
    dray__distant_free(distant);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    pthread_t thread;
    uint8_t *copy = malloc(size + !size);
    if (!size || !copy) {
        free(copy);
        return 0;
    }
    memcpy(copy, data + 1, size - 1);
    if (data[0] & 1)
        put_right(copy, size - 1);
    MUST(dray__stream_listen("127.0.0.1", s.endpoint, &s.listener, NULL) == 0);
    MUST(fcntl(s.listener, F_SETFL, 0) == 0);
    s.said = copy;
    s.size = size - 1;
    MUST(pthread_create(&thread, NULL, serve, NULL) == 0);
    get();
    shutdown(s.listener, SHUT_RDWR);
    pthread_join(thread, NULL);
    close(s.listener);
    free(copy);
    return 0;
}

void fuzz_seeds(fuzz_put put, void *user)
{
    const uint8_t gone[2][RANGES] = {{0, 0, 0}, {0, 1, 0}};
    const uint64_t bytes[2] = {3 * BYTES - 3, 2 * BYTES - 2};
    const dray_error error = {.code = DRAY_EUNSUPPORTED, .message = "no samples are kept here"};
    uint8_t data[RANGES * BYTES];
    dray__writer w = {0};
    memset(data, 9, sizeof data);
    for (int i = 0; i < 2; i++) {
        dray__writer_reset(&w);
        dray__answer_put(&w, DRAY_OK, 0, 8 + RANGES, bytes[i]);
        dray__put_u64(&w, 0);
        dray__put_bytes(&w, gone[i], RANGES);
        dray__put_bytes(&w, data, bytes[i]);
        fuzz_put_kind(put, user, 1, &w);
    }
    dray__writer_reset(&w);
    dray__answer_refuse(&w, 0, &error);
    fuzz_put_kind(put, user, 0, &w);
    dray__writer_free(&w);
}
