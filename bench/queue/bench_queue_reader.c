/* The process that reads the bytes that `dray bench queue` puts. It is a client of its own, which
 * receives orders over a socket and answers each with the seconds that it took. */
#include "bench/queue/bench_queue.h"

#include <signal.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

enum { QUEUES_MAX = 8, NAME_MAX_BYTES = 64 };
enum what { READ, COPY, CHECK, END };

typedef struct order {
    enum what what;
    char socket[96], name[NAME_MAX_BYTES]; /* the coordinator's socket, the queue's name */
    int32_t durability;
    uint32_t columns;
    uint64_t bytes, piece;
} order;

/* ---- the reader ------------------------------------------------------------------------------ */

typedef struct reader {
    queue_bench s;
    uint8_t *values;
    struct {
        char name[NAME_MAX_BYTES];
        dray_queue *queue;
    } open[QUEUES_MAX];
} reader;

typedef struct served {
    bench *b;
    uint8_t *between;
    size_t bytes;
} served;

/* Opens the queue of the order, unless it is open. A queue stays open, because its mapped memory
 * does so too. */
static void open_queue(reader *r, const order *o)
{
    int i = 0;
    if (!r->s.context)
        r->s.context = queue_bench_context(r->s.b, o->socket, "dray bench queue, reader");
    queue_bench_columns(&r->s, o->columns);
    r->s.cell = o->bytes / o->columns / SAMPLES;
    while (i < QUEUES_MAX - 1 && r->open[i].queue && strcmp(r->open[i].name, o->name) != 0)
        i++;
    if (!r->open[i].queue) {
        memcpy(r->open[i].name, o->name, sizeof o->name);
        queue_bench_shape(&r->s, r->open[i].name, o->columns, o->durability);
        r->open[i].queue = r->s.queue;
    }
    r->s.queue = r->open[i].queue;
}

static double copy_out(const reader *r, const order *o)
{
    double begin = bench_now();
    for (uint64_t at = 0; at < o->bytes; at += o->piece)
        memcpy(r->s.target + at, r->s.reader.between + at, o->piece);
    return bench_now() - begin;
}

/* Returns 1 when the bytes that were read differ from those that were put, else 0. Clears the
 * bytes, so that the next check cannot pass with them. */
static double check(reader *r, const order *o)
{
    queue_bench_values(r->values, o->bytes);
    bool wrong = memcmp(r->values, r->s.target, o->bytes) != 0;
    memset(r->s.target, 0, o->bytes);
    return wrong;
}

static double carry_out(reader *r, const order *o)
{
    r->s.bytes = o->bytes;
    if (o->what == COPY)
        return copy_out(r, o);
    if (o->what == CHECK)
        return check(r, o);
    open_queue(r, o);
    return queue_bench_get(&r->s);
}

static void serve(void *state, int fd)
{
    const served *told = state;
    reader r = {.s = {.b = told->b, .reader = {.between = told->between}}};
    order o;
    r.s.target = bench_alloc(told->b, told->bytes, 1);
    r.values = bench_alloc(told->b, told->bytes, 1);
    memset(r.s.target, 0, told->bytes); /* touches its pages */
    while (recv(fd, &o, sizeof o, MSG_WAITALL) == (ssize_t)sizeof o && o.what != END) {
        double seconds = carry_out(&r, &o);
        if (send(fd, &seconds, sizeof seconds, MSG_NOSIGNAL) < 0)
            break;
    }
    for (int i = 0; i < QUEUES_MAX && r.open[i].queue; i++)
        dray_queue_close(r.open[i].queue);
    dray_close(r.s.context);
}

/* ---- the sender of orders -------------------------------------------------------------------- */

queue_reader queue_bench_reader(const queue_bench *s, size_t bytes)
{
    queue_reader r = {.between = bench_shared(s->b, bytes)};
    served told = {s->b, r.between, bytes};
    r.pid = bench_serve(s->b, serve, &told, &r.fd);
    return r;
}

static double send_order(const queue_bench *s, enum what what, size_t piece)
{
    double seconds;
    order o = {.what = what,
               .durability = s->durability,
               .columns = s->columns,
               .bytes = s->bytes,
               .piece = piece};
    memcpy(o.socket, s->socket, sizeof o.socket);
    snprintf(o.name, sizeof o.name, "%s", s->name ? s->name : "");
    if (send(s->reader.fd, &o, sizeof o, MSG_NOSIGNAL) != (ssize_t)sizeof o ||
        recv(s->reader.fd, &seconds, sizeof seconds, MSG_WAITALL) != (ssize_t)sizeof seconds)
        bench_die(s->b, "the reader ended");
    return seconds;
}

double queue_bench_read(const queue_bench *s)
{
    return send_order(s, READ, 0);
}

double queue_bench_copy_out(const queue_bench *s, size_t piece)
{
    return send_order(s, COPY, piece);
}

void queue_bench_check(const queue_bench *s)
{
    if (send_order(s, CHECK, 0) != 0)
        bench_die(s->b, "%s: what was read is not what was put", s->name);
}

void queue_bench_reader_end(const queue_bench *s)
{
    /* Closing the socket is not enough, because the coordinator has inherited it. */
    const order end = {.what = END};
    if (send(s->reader.fd, &end, sizeof end, MSG_NOSIGNAL) < 0)
        kill(s->reader.pid, SIGTERM);
    close(s->reader.fd);
    waitpid(s->reader.pid, NULL, 0);
}
