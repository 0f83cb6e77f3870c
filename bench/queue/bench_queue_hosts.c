/* dray bench queue --hosts A,B: samples that are put on B and read on A, through B's keeper. The
 * limit is one TCP connection between the two. Every process is a child: the coordinator and the
 * reader are on A, the keeper and the producer on B. */
#include "bench/queue/bench_queue.h"
#include "bench/weights/bench_hosts.h"
#include "run/supervisor/coordinator.h"

#include <errno.h>
#include <signal.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>

enum { ROUNDS_MAX = 64, COLUMNS = 8, CHILDREN = 4 };

typedef struct state { /* shared by all processes */
    char folder[64], socket[96], keeper[96], far_keeper[96];
    size_t bytes;
    unsigned rounds;
    atomic_int keeping, failed;
    double seconds[ROUNDS_MAX];
    char why[200];
} state;

typedef struct hosts {
    bench *b;
    state *shared;
    char *const *names;
    pid_t children[CHILDREN];
    int count;
} hosts;

static void fail(state *s, const char *what, const dray_error *error)
{
    snprintf(s->why, sizeof s->why, "%s: %.150s", what, error->message);
    atomic_store(&s->failed, 1);
    _exit(1);
}

static void must(state *s, const char *what, int rc, const dray_error *error)
{
    if (rc)
        fail(s, what, error);
}

static void run(hosts *h, const char *host, void (*body)(state *s, const char *host))
{
    pid_t pid = bench_fork(h->b);
    if (pid == 0) {
        if (!bench_host_enter(host))
            _exit(1);
        body(h->shared, host);
        _exit(0);
    }
    h->children[h->count++] = pid;
}

static void coordinate(state *s, const char *host)
{
    dray_error error;
    (void)host;
    dray__serve_options options = {
        .unix_path = s->socket, .keeper_path = s->keeper, .start_keeper = true};
    must(s, "coordinator", dray__serve(&options, &error), &error);
}

static void on_keeping(void *user, const char *endpoint)
{
    (void)endpoint;
    atomic_store(&((state *)user)->keeping, 1);
}

static void keep(state *s, const char *host)
{
    dray_error error;
    char address[112];
    snprintf(address, sizeof address, "unix:%s", s->socket);
    setenv("DRAY_ADDRESS", address, 1);
    setenv("DRAY_HOST", host, 1);
    dray__keep_options options = {.path = s->far_keeper, .ready = on_keeping, .user = s};
    must(s, "keeper", dray__keep(&options, &error), &error);
}

static const char *const columns[COLUMNS] = {"c0", "c1", "c2", "c3", "c4", "c5", "c6", "c7"};

static dray_queue *enter(state *s, const char *host)
{
    dray_error error;
    dray_context *context;
    dray_queue *queue;
    char address[112];
    snprintf(address, sizeof address, "unix:%s", s->socket);
    dray_options options = DRAY_OPTIONS_INIT;
    options.address = address;
    options.host = host;
    dray_queue_options open = DRAY_QUEUE_OPTIONS_INIT;
    dray_queue_task task = {.name = "read", .needs = columns, .needs_count = COLUMNS};
    open.tasks = &task;
    open.task_count = 1;
    must(s, "session", dray_open(&options, &context, &error), &error);
    must(s, "queue", dray_queue_open(context, "hosts", &open, &queue, &error), &error);
    return queue;
}

static void produce(state *s, const char *host)
{
    dray_error error;
    dray_queue *queue = enter(s, host);
    size_t cell = s->bytes / COLUMNS / SAMPLES;
    uint8_t *values = malloc(s->bytes);
    if (values)
        queue_bench_values(values, s->bytes);
    for (unsigned r = 0; values && r < s->rounds; r++) {
        char name[16];
        dray_column_data data[COLUMNS];
        snprintf(name, sizeof name, "%u", r);
        for (int c = 0; c < COLUMNS; c++) {
            data[c] = (dray_column_data){.name = columns[c], .dtype = DRAY_U8, .ndim = 1};
            data[c].shape[0] = (int64_t)cell;
            data[c].values = values + (size_t)c * cell * SAMPLES;
        }
        dray_insert_options o = DRAY_INSERT_OPTIONS_INIT;
        o.partition = name;
        o.rows = SAMPLES;
        o.columns = data;
        o.column_count = COLUMNS;
        must(s, "insert", dray_queue_insert(queue, &o, NULL, &error), &error);
        must(s, "seal", dray_queue_seal(queue, name, SAMPLES, &error), &error);
        must(s, "wait", dray_queue_wait(queue, name, "read", DRAY_WAIT_DEFAULT, &error), &error);
        must(s, "clear", dray_queue_clear(queue, name, &error), &error);
    }
}

/* Reads each partition. Its seconds count from the claim's answer to the last byte of all
 * columns. */
static void consume(state *s, const char *host)
{
    dray_error error;
    dray_queue *queue = enter(s, host);
    size_t cell = s->bytes / COLUMNS / SAMPLES;
    for (unsigned r = 0; r < s->rounds; r++) {
        dray_batch *batch;
        dray_claim_options o = DRAY_CLAIM_OPTIONS_INIT;
        o.task = "read";
        o.count = SAMPLES;
        must(s, "claim", dray_queue_claim(queue, &o, &batch, &error), &error);
        double begin = bench_now();
        for (size_t c = 0; c < COLUMNS; c++) {
            dray_column column;
            must(s, "read", dray_batch_column(batch, columns[c], &column, &error), &error);
            size_t at = (c * SAMPLES + SAMPLES - 1) * cell; /* of the column's last row */
            if (*(const uint8_t *)column.cells[SAMPLES - 1] != (uint8_t)(at * 2654435761u >> 13)) {
                snprintf(error.message, sizeof error.message, "other bytes than were put");
                fail(s, "read", &error);
            }
        }
        s->seconds[r] = bench_now() - begin;
        must(s, "commit", dray_batch_commit(batch, &error), &error);
        dray_batch_free(batch);
    }
}

static void stop(hosts *h)
{
    for (int i = h->count - 1; i >= 0; i--) {
        kill(h->children[i], SIGTERM);
        waitpid(h->children[i], NULL, 0);
    }
    unlink(h->shared->socket);
    unlink(h->shared->keeper);
    unlink(h->shared->far_keeper);
    rmdir(h->shared->folder);
}

static void check(hosts *h)
{
    if (!atomic_load(&h->shared->failed))
        return;
    stop(h);
    bench_die(h->b, "%s", h->shared->why);
}

static void measure(hosts *h, const char *what, double limit, const char *how)
{
    state *s = h->shared;
    const char *tmp = getenv("TMPDIR");
    char name[96];
    snprintf(s->folder, sizeof s->folder, "%.40s/dray-bench-XXXXXX", tmp ? tmp : "/tmp");
    if (!mkdtemp(s->folder))
        bench_die(h->b, "a folder in %s: %s", tmp ? tmp : "/tmp", strerror(errno));
    snprintf(s->socket, sizeof s->socket, "%s/socket", s->folder);
    snprintf(s->keeper, sizeof s->keeper, "%s/keeper", s->folder);
    snprintf(s->far_keeper, sizeof s->far_keeper, "%s/far", s->folder);
    s->rounds = bench_repeats(h->b) + 1 < ROUNDS_MAX ? bench_repeats(h->b) + 1 : ROUNDS_MAX;
    atomic_store(&s->keeping, 0);
    h->count = 0;
    run(h, h->names[0], coordinate);
    run(h, h->names[1], keep);
    for (int i = 0; i < 1000 && !atomic_load(&s->keeping) && !atomic_load(&s->failed); i++)
        usleep(10000);
    check(h);
    run(h, h->names[1], produce);
    run(h, h->names[0], consume);
    bench_doing(h->b, "%s, %u rounds", what, s->rounds);
    waitpid(h->children[--h->count], NULL, 0);
    bench_doing(h->b, NULL);
    check(h);
    stop(h);
    double median = bench_percentile(s->seconds + 1, s->rounds - 1, 0.5);
    snprintf(name, sizeof name, "read from another host, %s", what);
    bench_more(h->b, json_pack("{s:s}", "limit_by", how));
    bench_row(h->b, name, (double)s->bytes / median, "B/s", limit, 0);
}

void queue_bench_hosts(bench *b, const char *pair)
{
    char text[256], *names[2];
    snprintf(text, sizeof text, "%s", pair);
    names[0] = text;
    names[1] = strchr(text, ',');
    if (!names[1])
        bench_refuse(b, "--hosts '%.200s': two expected, A,B", pair);
    *names[1]++ = 0;
    bench_hosts_check(b, names, 2);
    hosts h = {.b = b, .names = names, .shared = bench_shared(b, sizeof *h.shared)};
    h.shared->bytes = bench_quick(b) ? (size_t)16 << 20 : (size_t)256 << 20;
    const char *how;
    bench_doing(b, "TCP from %s to %s", names[1], names[0]);
    double limit = bench_hosts_rate(b, names[1], names[0], (double)h.shared->bytes * 2, &how);
    const char *transport = getenv("DRAY_TRANSPORT");
    if (transport && strcmp(transport, "ucx") == 0) {
        bench_skip(b, "read from another host, encrypted", "UCX does not encrypt");
    } else {
        setenv("DRAY_DATA_ENCRYPT", "always", 1);
        measure(&h, "encrypted", limit, how);
        unsetenv("DRAY_DATA_ENCRYPT");
    }
    setenv("DRAY_TRUSTED_NETWORKS", "0.0.0.0/0", 0);
    measure(&h, "on a trusted network", limit, how);
    munmap(h.shared, sizeof *h.shared);
}
