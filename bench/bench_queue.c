/* The queue against what it stands on: put and read against two memcpys, claims against an echo on
 * a socket. Coordinator and keeper are processes of their own, as in a run. */
#include "bench.h"

#include "base/clock.h"
#include "control/channel.h"
#include "control/coordinator.h"
#include "queue/client.h"
#include "queue/controller.h"
#include "queue/keeper.h"

#include <dray/queue.h>
#include <event2/event.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <unistd.h>

enum { SAMPLES = 256, COLUMNS_MAX = 32, CLAIM = 32 };

typedef struct servers {
    char folder[64], socket[96], keeper[96], address[112];
    pid_t pids[2];
} servers;

typedef struct setup {
    bench *b;
    dray_context *context;
    dray_queue *queue;
    uint32_t columns;
    size_t cell; /* bytes of one sample in one column */
    uint8_t *source, *target;
    int round;
    char names[COLUMNS_MAX][8];
    const char *list[COLUMNS_MAX];
} setup;

static void must(const setup *s, int rc, const dray_error *error)
{
    if (rc)
        bench_die(s->b, "%s: %s", dray_error_name(rc), error->message);
}

/* ---- servers --------------------------------------------------------------------------------- */

static void serve(const servers *s, bool keeper, int ready)
{
    dray_error error;
    dray__keeper *k;
    dray__coordinator *c;
    prctl(PR_SET_PDEATHSIG, SIGKILL);
    struct event_base *base = event_base_new();
    dray__coordinator_options options = {.unix_path = s->socket, .keeper_path = s->keeper};
    int rc = keeper ? dray__keeper_new(base, s->keeper, 0, &k, &error)
                    : dray__coordinator_new(base, &options, &c, &error);
    if (!rc && !keeper)
        rc = dray__queue_add(c, base, s->keeper, &error);
    if (rc || write(ready, "x", 1) != 1)
        _exit(1);
    event_base_dispatch(base);
    _exit(0);
}

static void start_servers(const bench *b, servers *s)
{
    const char *tmp = getenv("TMPDIR");
    snprintf(s->folder, sizeof s->folder, "%.40s/dray-bench-XXXXXX", tmp ? tmp : "/tmp");
    if (!mkdtemp(s->folder))
        bench_die(b, "mkdtemp failed in %s", s->folder);
    snprintf(s->socket, sizeof s->socket, "%s/socket", s->folder);
    snprintf(s->keeper, sizeof s->keeper, "%s/keeper", s->folder);
    snprintf(s->address, sizeof s->address, "unix:%s", s->socket);
    for (int i = 0; i < 2; i++) {
        int ready[2];
        char byte;
        if (pipe(ready) < 0 || (s->pids[i] = fork()) < 0)
            bench_die(b, "cannot start a server");
        if (s->pids[i] == 0) {
            close(ready[0]);
            serve(s, i == 0, ready[1]);
        }
        close(ready[1]);
        if (read(ready[0], &byte, 1) != 1)
            bench_die(b, "a server did not start");
        close(ready[0]);
    }
}

static void stop_servers(servers *s)
{
    for (int i = 0; i < 2; i++) {
        kill(s->pids[i], SIGKILL);
        waitpid(s->pids[i], NULL, 0);
    }
    unlink(s->socket);
    unlink(s->keeper);
    rmdir(s->folder);
}

/* ---- bytes ----------------------------------------------------------------------------------- */

static void open_setup(setup *s, const char *name, uint32_t columns, size_t bytes)
{
    dray_error error;
    s->columns = columns;
    s->cell = bytes / columns / SAMPLES;
    for (uint32_t c = 0; c < columns; c++) {
        snprintf(s->names[c], sizeof s->names[c], "c%u", c % 1000);
        s->list[c] = s->names[c];
    }
    dray_queue_task tasks[] = {
        {.name = "write", .writes = s->list, .writes_count = columns},
        {.name = "read", .needs = s->list, .needs_count = columns},
    };
    dray_queue_options options = DRAY_QUEUE_OPTIONS_INIT;
    options.tasks = tasks;
    options.task_count = 2;
    must(s, dray_queue_open(s->context, name, &options, &s->queue, &error), &error);
}

static dray_batch *claim(setup *s, const char *task, uint32_t count)
{
    dray_error error;
    dray_batch *batch;
    dray_claim_options o = DRAY_CLAIM_OPTIONS_INIT;
    o.task = task;
    o.count = count;
    must(s, dray_claim(s->queue, &o, &batch, &error), &error);
    return batch;
}

/* Rows without values, then all columns put by one task and copied out by another. */
static double put_and_read(void *state)
{
    setup *s = state;
    dray_error error;
    char name[16];
    snprintf(name, sizeof name, "%d", s->round++);
    dray_insert_options o = DRAY_INSERT_OPTIONS_INIT;
    o.partition = name;
    o.rows = SAMPLES;
    double start = bench_now();
    must(s, dray_insert(s->queue, &o, NULL, &error), &error);
    dray_batch *batch = claim(s, "write", SAMPLES);
    for (uint32_t c = 0; c < s->columns; c++) {
        dray_column_data column = {.name = s->list[c], .dtype = DRAY_U8, .ndim = 1};
        column.shape[0] = (int64_t)s->cell;
        column.values = s->source + c * s->cell * SAMPLES;
        must(s, dray_batch_set(batch, &column, &error), &error);
    }
    must(s, dray_batch_commit(batch, &error), &error);
    dray_batch_free(batch);
    batch = claim(s, "read", SAMPLES);
    for (uint32_t c = 0; c < s->columns; c++)
        must(s,
             dray_batch_gather(batch, s->list[c], s->target + c * s->cell * SAMPLES,
                               s->cell * SAMPLES, NULL, &error),
             &error);
    must(s, dray_batch_commit(batch, &error), &error);
    dray_batch_free(batch);
    must(s, dray_clear(s->queue, name, &error), &error);
    return bench_now() - start;
}

static double bytes_row(setup *s, const char *what, uint32_t columns, size_t bytes, double limit,
                        double target)
{
    char name[64];
    snprintf(name, sizeof name, "b%u", columns);
    open_setup(s, name, columns, bytes);
    double cold = put_and_read(s);
    double rate = (double)bytes / bench_median_of(s->b, put_and_read, s);
    if (memcmp(s->source, s->target, bytes) != 0)
        bench_die(s->b, "what was read is not what was put");
    snprintf(name, sizeof name, "%s, fresh memory", what);
    bench_row(s->b, name, (double)bytes / cold, "B/s", limit, 0);
    bench_row(s->b, what, rate, "B/s", limit, target);
    dray_queue_close(s->queue);
    return rate;
}

static void bench_bytes(setup *s)
{
    size_t bytes = bench_quick(s->b) ? (size_t)16 << 20 : (size_t)256 << 20;
    s->source = malloc(bytes);
    s->target = malloc(bytes);
    if (!s->source || !s->target)
        bench_die(s->b, "no memory");
    for (size_t i = 0; i < bytes; i++)
        s->source[i] = (uint8_t)(i * 2654435761u >> 13);
    memset(s->target, 0, bytes);
    double limit = bench_memcpy(s->b, bytes) / 2;
    bytes_row(s, "put + read, 8 columns", 8, bytes, limit, 0.8);
    double one = bytes_row(s, "put + read, 1 column", 1, bytes, limit, 0);
    bytes_row(s, "put + read, 32 columns", 32, bytes, one, 0.9);
    free(s->source);
    free(s->target);
}

/* ---- claims ---------------------------------------------------------------------------------- */

/* A queue whose one partition has `rows` rows of `columns` columns, all ready for `tasks` tasks. */
static void open_ready(setup *s, const char *name, uint32_t rows, uint32_t columns, uint32_t tasks)
{
    dray_error error;
    static const char *const task_names[] = {"t0", "t1", "t2", "t3", "t4", "t5", "t6", "t7"};
    dray_queue_task table[8];
    dray_column_data data[COLUMNS_MAX];
    uint8_t *zeros = calloc(rows, 1);
    for (uint32_t c = 0; c < columns; c++) {
        snprintf(s->names[c], sizeof s->names[c], "c%u", c % 1000);
        s->list[c] = s->names[c];
        data[c] = (dray_column_data){.name = s->list[c], .dtype = DRAY_U8, .values = zeros};
    }
    for (uint32_t t = 0; t < tasks; t++)
        table[t] =
            (dray_queue_task){.name = task_names[t], .needs = s->list, .needs_count = columns};
    dray_queue_options options = DRAY_QUEUE_OPTIONS_INIT;
    options.tasks = table;
    options.task_count = tasks;
    must(s, dray_queue_open(s->context, name, &options, &s->queue, &error), &error);
    dray_insert_options o = DRAY_INSERT_OPTIONS_INIT;
    o.partition = "p";
    o.rows = rows;
    o.columns = data;
    o.column_count = columns;
    must(s, dray_insert(s->queue, &o, NULL, &error), &error);
    free(zeros);
}

/* The median time of a claim of 32; rows are given back, so that the table stays as it is. */
static double claim_seconds(setup *s, int rounds)
{
    double *times = malloc((size_t)rounds * sizeof *times);
    for (int i = 0; i < rounds; i++) {
        double start = bench_now();
        dray_batch *batch = claim(s, "t0", CLAIM);
        times[i] = bench_now() - start;
        dray_batch_free(batch);
    }
    double median = bench_percentile(times, (size_t)rounds, 0.5);
    free(times);
    return median;
}

static double ping_seconds(setup *s, int rounds)
{
    double *times = malloc((size_t)rounds * sizeof *times);
    for (int i = 0; i < rounds; i++) {
        uint8_t bytes[200] = {0};
        dray_error error;
        dray__writer w = {0};
        dray__reply reply;
        dray__put_bytes(&w, bytes, sizeof bytes);
        double start = bench_now();
        must(s,
             dray__call(s->queue->channel, DRAY__MSG_PING, &w, NULL, 0,
                        dray__deadline(10 * DRAY__SECOND), &reply, &error),
             &error);
        times[i] = bench_now() - start;
        dray__writer_free(&w);
    }
    double median = bench_percentile(times, (size_t)rounds, 0.5);
    free(times);
    return median;
}

/* Claim, acknowledge, free; samples per second. */
static double stream_rate(setup *s, uint32_t count, uint32_t rows, const char *task)
{
    dray_error error;
    double start = bench_now();
    for (uint32_t done = 0; done < rows; done += count) {
        dray_batch *batch = claim(s, task, count);
        must(s, dray_batch_commit(batch, &error), &error);
        dray_batch_free(batch);
    }
    return rows / (bench_now() - start);
}

static void bench_claims(setup *s)
{
    int rounds = bench_quick(s->b) ? 100 : 3000;
    double echo = bench_echo(s->b, 200);
    open_ready(s, "small", 1000, 1, 1);
    bench_row(s->b, "ping through the coordinator", ping_seconds(s, rounds), "s", echo, 0);
    bench_row(s->b, "claim of 32 of 1,000, p50", claim_seconds(s, rounds), "s", echo, 1.5);
    dray_queue_close(s->queue);
    uint32_t rows = bench_quick(s->b) ? 3200 : 320000;
    open_ready(s, "stream", rows, 1, 2);
    bench_row(s->b, "claim + commit, 32 at a time, samples", stream_rate(s, CLAIM, rows, "t0"),
              "1/s", 0, 200000);
    rows /= 16;
    bench_row(s->b, "claim + commit, 1 at a time, samples", stream_rate(s, 1, rows, "t1"), "1/s", 0,
              0);
    dray_queue_close(s->queue);
    open_ready(s, "thousand", 1000, 16, 8);
    double small = claim_seconds(s, rounds);
    dray_queue_close(s->queue);
    open_ready(s, "million", bench_quick(s->b) ? 10000 : 1000000, 16, 8);
    double large = claim_seconds(s, rounds);
    dray_queue_close(s->queue);
    bench_row(s->b, "claim of 32, 1,000 x 16 columns x 8 tasks, p50", small, "s", 0, 0);
    bench_row(s->b, "the same of 1,000,000: more by", large > small ? large - small : 0, "s", 0,
              40e-6);
}

int main(int argc, char **argv)
{
    setup s = {.b = bench_open(argc, argv, "queue")};
    servers both = {0};
    dray_error error;
    start_servers(s.b, &both);
    dray_options options = DRAY_OPTIONS_INIT;
    options.address = both.address;
    options.name = "bench";
    must(&s, dray_open(&options, &s.context, &error), &error);
    bench_bytes(&s);
    bench_claims(&s);
    dray_close(s.context);
    stop_servers(&both);
    return bench_close(s.b);
}
