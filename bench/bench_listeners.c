/* Measures how fast a data server answers a new reader while other readers hold as many silent
 * connections as they may. The limit is its time without those connections. */
#include "bench.h"

#include "net/cells.h"

#include <arpa/inet.h>
#include <netinet/in.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <unistd.h>

enum { ASKED = 50, CROWD = 300 };

typedef struct reader {
    const bench *b;
    struct sockaddr_in to;
} reader;

static int read_nothing(void *user, const dray__cell *cell, void *out)
{
    (void)user, (void)cell, (void)out;
    return DRAY_EGONE;
}

static int connect_to(const reader *r)
{
    int fd = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
    if (fd < 0 || connect(fd, (const struct sockaddr *)&r->to, sizeof r->to))
        bench_die(r->b, "the data server does not accept connections");
    return fd;
}

static double ask(void *state)
{
    const reader *r = state;
    dray__writer w = {0};
    uint8_t head[DRAY__ANSWER_HEADER];
    dray__cells_request(&w, 7, &(dray__cell){1, 0, 1}, 1);
    double begin = bench_now();
    for (int i = 0; i < ASKED; i++) {
        int fd = connect_to(r);
        if (send(fd, w.data, w.size, MSG_NOSIGNAL) != (ssize_t)w.size ||
            recv(fd, head, sizeof head, MSG_WAITALL) != (ssize_t)sizeof head)
            bench_die(r->b, "the data server does not answer");
        close(fd);
    }
    double seconds = (bench_now() - begin) / ASKED;
    dray__writer_free(&w);
    return seconds;
}

int main(int argc, char **argv)
{
    bench *b = bench_open(argc, argv, "listeners");
    reader r = {.b = b, .to = {.sin_family = AF_INET}};
    dray__tls_key key = {{0}, {0}};
    dray__networks trusted = {.count = 0};
    const dray__stream_keys keys = {.key = &key, .trusted = &trusted};
    const dray__cells cells = {.read = read_nothing};
    dray__server *server;
    const char *endpoint;
    dray_error error;
    int crowd[CROWD];
    if (dray__cells_serve("127.0.0.1", &keys, &cells, &server, &endpoint, &error))
        bench_die(b, "%s", error.message);
    r.to.sin_port = htons((uint16_t)atoi(strrchr(endpoint, ':') + 1));
    r.to.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    double alone = bench_median_of(b, ask, &r);
    for (int i = 0; i < CROWD; i++)
        crowd[i] = connect_to(&r);
    double beside = bench_median_of(b, ask, &r);
    bench_row(b, "connection and answer of a data server", alone, "s", 0, 0);
    bench_row(b, "the same beside silent connections", beside, "s", alone, 2);
    for (int i = 0; i < CROWD; i++)
        close(crowd[i]);
    dray__server_free(server);
    return bench_close(b);
}
