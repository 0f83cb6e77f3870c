/* What a Redis server, or who stands in its place, answers. An input is all that it ever says, on
 * one connection; the first byte says what it is asked: 0 to put an object, 1 to give ranges of
 * some, 2 to drop, 3 to sweep. What is given lies in its place, and of what is not all there it is
 * said that it is lost. */
#include "fuzz/fuzz.h"

#ifdef DRAY_HIREDIS
#include "base/clock.h"
#include "queue/storage/backend.h"

#include <pthread.h>
#include <sys/socket.h>
#include <sys/un.h>

enum { BYTES = 64, GUARD = 16 };

static struct server {
    int listener;
    char address[128];
    const uint8_t *said;
    size_t size;
} s;

/* Says it to the first who comes, hears what it is told, and leaves: then nobody is there. */
static void *serve(void *user)
{
    char heard[4096];
    int fd = accept(s.listener, NULL, NULL);
    (void)user;
    MUST(fd >= 0);
    if (s.size)
        send(fd, s.said, s.size, MSG_NOSIGNAL);
    shutdown(fd, SHUT_WR);
    while (recv(fd, heard, sizeof heard, 0) > 0)
        continue;
    close(fd);
    return NULL;
}

static void listen_at(void)
{
    struct sockaddr_un name = {.sun_family = AF_UNIX};
    snprintf(name.sun_path, sizeof name.sun_path, "%s", fuzz_path("redis"));
    snprintf(s.address, sizeof s.address, "unix:%s", name.sun_path);
    unlink(name.sun_path);
    s.listener = socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0);
    MUST(bind(s.listener, (const struct sockaddr *)&name, sizeof name) == 0);
    MUST(listen(s.listener, 4) == 0);
}

static void get(dray__backend *backend, int64_t deadline)
{
    uint8_t bytes[2][BYTES + GUARD];
    dray__range ranges[2] = {{.object = 1, .offset = 3, .bytes = BYTES, .at = bytes[0]},
                             {.object = UINT64_C(2) << 32 | 7, .bytes = 5, .at = bytes[1]}};
    memset(bytes, 0xEE, sizeof bytes);
    dray__backend_redis.get(backend, ranges, 2, deadline, NULL);
    for (size_t i = 0; i < 2; i++)
        for (size_t at = ranges[i].bytes; at < sizeof bytes[i]; at++)
            MUST(bytes[i][at] == 0xEE);
}

static void ask(int what)
{
    static char value[100];
    static const uint64_t keep[] = {UINT64_C(1) << 32 | 4};
    const struct iovec parts[2] = {{value, 60}, {value + 60, 40}};
    const dray__object objects[2] = {{1, 100}, {2, 3 << 20}};
    int64_t deadline = dray__deadline(5 * DRAY__MILLISECOND);
    dray__backend *backend;
    dray_error error;
    MUST(dray__backend_redis.open(s.address, 0x1234, &backend, &error) == 0);
    if (what == 0)
        dray__backend_redis.put(backend, 1, parts, 2, deadline, &error);
    else if (what == 1)
        get(backend, deadline);
    else if (what == 2)
        dray__backend_redis.drop(backend, objects, 2, deadline, &error);
    else
        dray__backend_redis.sweep(backend, 1, keep, 1, deadline, &error);
    dray__backend_redis.close(backend);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    pthread_t thread;
    if (!size)
        return 0;
    listen_at();
    s.said = data + 1;
    s.size = size - 1;
    MUST(pthread_create(&thread, NULL, serve, NULL) == 0);
    ask(data[0] % 4);
    shutdown(s.listener, SHUT_RDWR); /* who was never asked need not wait */
    pthread_join(thread, NULL);
    close(s.listener);
    return 0;
}

void fuzz_seeds(fuzz_put put, void *user)
{
    static const struct {
        uint8_t what;
        const char *said;
    } seeds[] = {
        {0, "+OK\r\n"},
        {0, "-OOM command not allowed\r\n"},
        {1, "$64\r\n0123456789012345678901234567890123456789012345678901234567890123\r\n"
            "$5\r\nabcde\r\n"},
        {1, "$-1\r\n:7\r\n"},
        {2, ":1\r\n:1\r\n:1\r\n:0\r\n"},
        {3, "*2\r\n$1\r\n0\r\n*2\r\n$40\r\ndray:0000000000001234:00000001:00000004:0\r\n"
            "$40\r\ndray:0000000000001234:00000001:00000005:1\r\n:1\r\n"},
        {3, "*2\r\n$2\r\n17\r\n*0\r\n*2\r\n$1\r\n0\r\n*1\r\n*1\r\n$-1\r\n"},
    };
    for (size_t i = 0; i < sizeof seeds / sizeof *seeds; i++)
        fuzz_put_text(put, user, seeds[i].what, seeds[i].said);
}

const int fuzz_rounds = 100;
#else
int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    (void)data, (void)size;
    return 0;
}

void fuzz_seeds(fuzz_put put, void *user)
{
    (void)put, (void)user;
}
#endif
