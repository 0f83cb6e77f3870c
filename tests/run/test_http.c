/* The small server of HTTP, without a run: what readers get who behave in other ways than browsers
 * do. */
#include "run/report/http.h"
#include "suite.h"

#include <arpa/inet.h>
#include <errno.h>
#include <event2/event.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <unistd.h>

enum { BODY = 16 << 20 /* more than the buffers of a socket hold */ };

static void answer(void *user, const char *path, dray__http_answer *out)
{
    (void)user;
    assert_string_equal(path, "/");
    out->status = "200 OK";
    out->size = BODY;
    out->body = malloc(BODY);
    assert_non_null(out->body);
    memset(out->body, 'x', BODY);
}

static int connect_to(const char *url)
{
    struct sockaddr_in at = {.sin_family = AF_INET, .sin_addr = {htonl(INADDR_LOOPBACK)}};
    int fd = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
    at.sin_port = htons((uint16_t)atoi(strrchr(url, ':') + 1));
    assert_true(fd >= 0);
    assert_int_equal(connect(fd, (const struct sockaddr *)&at, sizeof at), 0);
    return fd;
}

/* Turns the loop, and reads what has come, to the end. Returns the number of bytes. */
static size_t read_all(struct event_base *base, int fd)
{
    static char block[1 << 16];
    size_t all = 0;
    for (;;) {
        event_base_loop(base, EVLOOP_NONBLOCK);
        ssize_t n = recv(fd, block, sizeof block, MSG_DONTWAIT);
        if (n == 0)
            return all;
        assert_true(n > 0 || errno == EAGAIN);
        all += n > 0 ? (size_t)n : 0;
    }
}

/* A reader who says with the request that no other one will come gets all of the answer, as does
 * one who says nothing. */
TEST(the_whole_answer)
{
    static const char ask[] = "GET / HTTP/1.1\r\nHost: h\r\n\r\n";
    const dray__http_options options = {.path = "/", .answer = answer};
    struct event_base *base = event_base_new();
    dray__http *http = NULL;
    const char *url = NULL;
    assert_non_null(base);
    assert_int_equal(dray__http_new(base, "0", &options, &http, &url, NULL), DRAY_OK);
    for (int half = 0; half < 2; half++) {
        int fd = connect_to(url);
        assert_int_equal(send(fd, ask, sizeof ask - 1, MSG_NOSIGNAL), sizeof ask - 1);
        if (half)
            assert_int_equal(shutdown(fd, SHUT_WR), 0);
        size_t got = read_all(base, fd);
        if (got < BODY)
            fail_msg("%s: %zu bytes of %d", half ? "half closed" : "open", got, BODY);
        close(fd);
        event_base_loop(base, EVLOOP_NONBLOCK);
    }
    dray__http_free(http);
    event_base_free(base);
}

SUITE(NULL, NULL)
