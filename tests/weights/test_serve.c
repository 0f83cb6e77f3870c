/* Tests the data server when resources are short. Without descriptors, a new reader waits, and is
 * served as soon as there are some. A reader that leaves while it waits for a buffer is dropped. No
 * thread spins. */

#include "base/clock.h"
#include "base/error.h"
#include "net/cells.h"
#include "suite.h"

#include <arpa/inet.h>
#include <poll.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

static int read_nothing(void *user, const dray__cell *cell, void *out)
{
    (void)user, (void)cell, (void)out;
    return DRAY_EGONE;
}

/* Connects at once, and gets an answer in the end. */
static int ask(int port, int connected)
{
    struct sockaddr_in to = {.sin_family = AF_INET, .sin_port = htons((uint16_t)port)};
    struct timeval patience = {.tv_sec = 20};
    uint8_t head[DRAY__ANSWER_HEADER];
    dray__writer w = {0};
    dray__cells_request(&w, 7, &(dray__cell){1, 0, 1}, 1);
    to.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    int fd = socket(AF_INET, SOCK_STREAM, 0);
    setsockopt(fd, SOL_SOCKET, SO_RCVTIMEO, &patience, sizeof patience);
    bool sent = connect(fd, (struct sockaddr *)&to, sizeof to) == 0 &&
                send(fd, w.data, w.size, MSG_NOSIGNAL) == (ssize_t)w.size;
    bool told = write(connected, "", 1) == 1;
    bool answered = recv(fd, head, sizeof head, MSG_WAITALL) == (ssize_t)sizeof head;
    return sent && told && answered ? 0 : 1;
}

static double processor_seconds(void)
{
    struct rusage used;
    getrusage(RUSAGE_SELF, &used);
    return (double)(used.ru_utime.tv_sec + used.ru_stime.tv_sec) +
           (double)(used.ru_utime.tv_usec + used.ru_stime.tv_usec) * 1e-6;
}

TEST(test_without_descriptors)
{
    enum { READERS = 3 };
    dray_error error;
    dray__server *server;
    const char *endpoint;
    dray__tls_key key = {{0}, {0}};
    dray__networks trusted = {.count = 0};
    const dray__stream_keys keys = {.key = &key, .trusted = &trusted};
    const dray__cells cells = {.read = read_nothing};
    int ports[2], connected[2];
    pid_t readers[READERS];
    assert_int_equal(pipe(ports), 0);
    assert_int_equal(pipe(connected), 0);
    for (int i = 0; i < READERS; i++) { /* before the server has its thread */
        int port;
        if ((readers[i] = fork()) == 0)
            _exit(read(ports[0], &port, sizeof port) == sizeof port ? ask(port, connected[1]) : 1);
    }
    if (dray__cells_serve("127.0.0.1", &keys, &cells, &server, &endpoint, &error))
        fail_msg("%s", error.message);
    int next = dup(0), port = atoi(strrchr(endpoint, ':') + 1); /* next: the first that is free */
    close(next);
    struct rlimit before, none;
    getrlimit(RLIMIT_NOFILE, &before);
    none = before;
    none.rlim_cur = (rlim_t)next;
    assert_int_equal(setrlimit(RLIMIT_NOFILE, &none), 0);
    for (int i = 0; i < READERS; i++) {
        char one;
        assert_int_equal(write(ports[1], &port, sizeof port), sizeof port);
        assert_int_equal(read(connected[0], &one, 1), 1);
    }
    double used = processor_seconds();
    poll(NULL, 0, 600);
    used = processor_seconds() - used;
    assert_true(used < 0.3);
    setrlimit(RLIMIT_NOFILE, &before);
    for (int i = 0; i < READERS; i++) {
        int status;
        assert_int_equal(waitpid(readers[i], &status, 0), readers[i]);
        assert_int_equal(status, 0);
    }
    dray__server_free(server);
    for (int i = 0; i < 2; i++) {
        close(ports[i]);
        close(connected[i]);
    }
}

static int read_much(void *user, const dray__cell *cell, void *out)
{
    (void)user;
    memset(out, 7, cell->bytes);
    return DRAY_OK;
}

/* Asks for much more than its socket takes. */
static int connect_and_ask(int port)
{
    enum { REQUESTS = 40 };
    struct sockaddr_in to = {.sin_family = AF_INET, .sin_port = htons((uint16_t)port)};
    int little = 4096;
    dray__writer w = {0};
    for (uint32_t i = 0; i < REQUESTS; i++)
        dray__cells_request(&w, i, &(dray__cell){1, 0, DRAY__VALUES_MAX}, 1);
    to.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    int fd = socket(AF_INET, SOCK_STREAM, 0);
    setsockopt(fd, SOL_SOCKET, SO_RCVBUF, &little, sizeof little);
    assert_int_equal(connect(fd, (struct sockaddr *)&to, sizeof to), 0);
    assert_int_equal(send(fd, w.data, w.size, MSG_NOSIGNAL), w.size);
    dray__writer_free(&w);
    return fd;
}

TEST(test_gone_while_waiting)
{
    enum { HOLDERS = 64 }; /* a buffer each */
    const struct linger reset = {.l_onoff = 1};
    dray_error error;
    dray__server *server;
    const char *endpoint;
    dray__tls_key key = {{0}, {0}};
    dray__networks trusted = {.count = 0};
    const dray__stream_keys keys = {.key = &key, .trusted = &trusted};
    const dray__cells cells = {.read = read_much};
    int asked[2 * HOLDERS], count = 0;
    if (dray__cells_serve("127.0.0.1", &keys, &cells, &server, &endpoint, &error))
        fail_msg("%s", error.message);
    int port = atoi(strrchr(endpoint, ':') + 1);
    for (bool answered = true; answered; count++) { /* until one gets nothing */
        assert_true(count < 2 * HOLDERS);
        asked[count] = connect_and_ask(port);
        struct pollfd p = {.fd = asked[count], .events = POLLIN};
        answered = poll(&p, 1, count < HOLDERS ? 20000 : 300) == 1;
    }
    int waits = asked[--count];
    setsockopt(waits, SOL_SOCKET, SO_LINGER, &reset, sizeof reset);
    close(waits);
    double used = processor_seconds();
    poll(NULL, 0, 1000);
    used = processor_seconds() - used;
    assert_true(used < 0.1);
    while (count)
        close(asked[--count]);
    dray__server_free(server);
}

/* ---- room for new connections ------------------------------------------------------------------
 */

enum { SLOW = 2 };
static atomic_bool begun, goes_on;

static int read_slowly(void *user, const dray__cell *cell, void *out)
{
    (void)user, (void)out;
    int64_t until = dray__now() + 20 * DRAY__SECOND;
    if (cell->number != SLOW)
        return DRAY_EGONE;
    atomic_store(&begun, true);
    while (!atomic_load(&goes_on) && dray__now() < until)
        poll(NULL, 0, 1);
    return DRAY_EGONE;
}

static int connect_to(int port)
{
    struct sockaddr_in to = {.sin_family = AF_INET, .sin_port = htons((uint16_t)port)};
    struct timeval patience = {.tv_sec = 20};
    to.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    int fd = socket(AF_INET, SOCK_STREAM, 0);
    setsockopt(fd, SOL_SOCKET, SO_RCVTIMEO, &patience, sizeof patience);
    assert_int_equal(connect(fd, (struct sockaddr *)&to, sizeof to), 0);
    return fd;
}

static void send_request(int fd, uint64_t number)
{
    dray__writer w = {0};
    dray__cells_request(&w, 7, &(dray__cell){number, 0, 1}, 1);
    assert_int_equal(send(fd, w.data, w.size, MSG_NOSIGNAL), w.size);
    dray__writer_free(&w);
}

static bool is_answered(int fd)
{
    uint8_t answer[DRAY__ANSWER_HEADER + 9]; /* with a sum, and a byte for the range */
    return recv(fd, answer, sizeof answer, MSG_WAITALL) == (ssize_t)sizeof answer;
}

/* The first request of a new connection closes the one that was silent longest. That one asks at
 * the same moment, so that the server learns of both at once. */
TEST(test_closed_for_another)
{
    enum { KNOWN = 8, DESCRIPTORS = 4 * KNOWN };
    dray_error error;
    dray__server *server;
    const char *endpoint;
    dray__tls_key key = {{0}, {0}};
    dray__networks trusted = {.count = 0};
    const dray__stream_keys keys = {.key = &key, .trusted = &trusted};
    const dray__cells cells = {.read = read_slowly};
    struct rlimit before, few;
    int fds[KNOWN + 1];
    if (dray__cells_serve("127.0.0.1", &keys, &cells, &server, &endpoint, &error))
        fail_msg("%s", error.message);
    int port = atoi(strrchr(endpoint, ':') + 1);
    for (int i = 0; i < KNOWN; i++) {
        fds[i] = connect_to(port);
        send_request(fds[i], 1);
        assert_true(is_answered(fds[i]));
    }
    fds[KNOWN] = connect_to(port);
    for (int i = 0; i < 2; i++) { /* it is accepted before the second is answered */
        send_request(fds[KNOWN - 1], 1);
        assert_true(is_answered(fds[KNOWN - 1]));
    }
    getrlimit(RLIMIT_NOFILE, &before);
    few = before;
    few.rlim_cur = DESCRIPTORS;
    assert_int_equal(setrlimit(RLIMIT_NOFILE, &few), 0);
    send_request(fds[KNOWN / 2], SLOW);
    while (!atomic_load(&begun))
        poll(NULL, 0, 1);
    send_request(fds[KNOWN], 1);
    send_request(fds[0], 1);
    atomic_store(&goes_on, true);
    assert_true(is_answered(fds[KNOWN / 2]));
    assert_true(is_answered(fds[KNOWN]));
    assert_false(is_answered(fds[0]));
    for (int i = 1; i <= KNOWN; i++) {
        send_request(fds[i], 1);
        assert_true(is_answered(fds[i]));
    }
    setrlimit(RLIMIT_NOFILE, &before);
    for (int i = 0; i <= KNOWN; i++)
        close(fds[i]);
    dray__server_free(server);
}

SUITE(NULL, NULL)
