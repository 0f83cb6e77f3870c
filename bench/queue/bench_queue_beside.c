/* Measures claims while another process inserts many rows. The coordinator inserts them in steps,
 * and answers other requests between two steps. */
#include "bench/queue/bench_queue.h"

#include <stdlib.h>
#include <sys/wait.h>
#include <unistd.h>

typedef queue_bench setup;

enum { CLAIMS = 1 << 20 }; /* more than can be claimed in the time */

static void insert_many(const setup *s, uint32_t rows)
{
    dray_queue *queue;
    dray_context *context = queue_bench_context(s->b, s->socket, "dray bench queue, beside");
    BENCH_MUST(s->b, dray_queue_open(context, "beside", NULL, &queue, error));
    dray_insert_options o = DRAY_INSERT_OPTIONS_INIT;
    o.partition = "many";
    o.rows = rows;
    BENCH_MUST(s->b, dray_queue_insert(queue, &o, NULL, error));
    _exit(0);
}

/* Returns the p99 seconds of claims: of those until the child ends, or of `count` claims when there
 * is no child. */
static double claims_p99(const setup *s, pid_t child, size_t count)
{
    double *seconds = bench_alloc(s->b, CLAIMS, sizeof *seconds);
    size_t n = 0;
    while (n < CLAIMS && (child ? waitpid(child, NULL, WNOHANG) == 0 : n < count)) {
        double begin = bench_now();
        dray_batch_free(queue_bench_claim(s, "t0", CLAIM));
        seconds[n++] = bench_now() - begin;
    }
    double p99 = bench_percentile(seconds, n, 0.99);
    free(seconds);
    return p99;
}

void queue_bench_beside(queue_bench *s)
{
    uint32_t rows = bench_quick(s->b) ? 1 << 17 : 1 << 23;
    bench_doing(s->b, "claims beside an insert of %u rows", (unsigned)rows);
    dray_queue_options o = DRAY_QUEUE_OPTIONS_INIT;
    dray_queue_task task = {.name = "t0", .needs = s->list, .needs_count = 1};
    dray_queue *large;
    o.tasks = &task;
    o.task_count = 1;
    o.capacity_rows = rows;
    s->queue = queue_bench_ready(s, "asked", CLAIM, 1, 1, DRAY_DURABILITY_NONE);
    BENCH_MUST(s->b, dray_queue_open(s->context, "beside", &o, &large, error));
    double alone = claims_p99(s, 0, bench_quick(s->b) ? 1000 : 20000);
    pid_t child = bench_fork(s->b);
    if (child == 0)
        insert_many(s, rows);
    double beside = claims_p99(s, child, 0);
    bench_doing(s->b, NULL);
    char name[64];
    snprintf(name, sizeof name, "claim of 32 beside an insert of %u Ki rows, p99", rows >> 10);
    bench_row(s->b, name, beside, "s", alone, 0);
    BENCH_MUST(s->b, dray_queue_clear(large, "many", error));
    dray_queue_close(large);
    dray_queue_close(s->queue);
}
