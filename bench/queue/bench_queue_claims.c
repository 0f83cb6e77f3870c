/* Compares claims with an echo on a socket of the same kind, in three placements: as the kernel
 * places the two processes, both on one CPU, and each on a CPU of its own. The CPU on which a
 * sleeping process is woken decides most of the time of a round trip. If it is another CPU, which
 * first leaves its idle state, the round trip takes several times as long as on the same CPU.
 * Therefore claims are compared only with echoes in the same placement. */
#include "bench/queue/bench_queue.h"

#include <errno.h>
#include <sched.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <time.h>
#include <unistd.h>

enum { BLOCKS = 10 };

/* The bytes on the socket of a claim of CLAIM rows of one column: the request and the answer. */
enum { ASK = 111, ANSWER = 922 };

#define POLL_SECONDS 50e-6

typedef queue_bench setup;

/* ---- the echo -------------------------------------------------------------------------------- */

static void echo_serve(void *state, int fd)
{
    static char data[ANSWER];
    (void)state;
    while (recv(fd, data, ASK, MSG_WAITALL) == ASK &&
           send(fd, data, ANSWER, MSG_NOSIGNAL) == ANSWER)
        ;
}

queue_echo queue_bench_echo(const setup *s)
{
    queue_echo e;
    e.pid = bench_serve(s->b, echo_serve, NULL, &e.fd);
    return e;
}

/* Sends a request and receives the answer. With `polls`, it polls for as long as an answer usually
 * takes before it sleeps, as clients of the queue do. */
static void echo_once(const setup *s, const queue_echo *e, bool polls)
{
    char data[ANSWER] = {0};
    ssize_t got = 0;
    if (send(e->fd, data, ASK, MSG_NOSIGNAL) != ASK)
        bench_die(s->b, "echo: %s", strerror(errno));
    for (double until = polls ? bench_now() + POLL_SECONDS : 0; polls && got <= 0;) {
        got = recv(e->fd, data, ANSWER, MSG_DONTWAIT);
        polls = bench_now() < until;
    }
    got = got > 0 ? got : 0;
    if (got < ANSWER &&
        recv(e->fd, data + got, (size_t)(ANSWER - got), MSG_WAITALL) != ANSWER - got)
        bench_die(s->b, "echo: %s", strerror(errno));
}

/* ---- where the processes run ----------------------------------------------------------------- */

typedef struct placement {
    const char *what;
    int client, server; /* indices of CPUs; -1 means any */
} placement;

/* The placement by the kernel is a property of the run, and not of the queue. Therefore its figures
 * have no target. */
static const placement placements[] = {
    {"", -1, -1}, {", on one CPU", 0, 0}, {", on a CPU each", 0, 1}};

enum { PLACEMENTS = sizeof placements / sizeof placements[0] };

/* Returns the set of the CPU number `at` of those that this process may use; the empty set when
 * there are fewer. */
static cpu_set_t one_cpu(const cpu_set_t *all, int at)
{
    cpu_set_t one;
    CPU_ZERO(&one);
    for (size_t cpu = 0; cpu < CPU_SETSIZE; cpu++)
        if (CPU_ISSET(cpu, all) && at-- == 0)
            CPU_SET(cpu, &one);
    return one;
}

/* Binds a process to a CPU, or with at < 0 to all of them. The system may refuse that, which is
 * ignored. */
static void put_on(pid_t pid, const cpu_set_t *all, int at)
{
    cpu_set_t one = one_cpu(all, at);
    sched_setaffinity(pid, sizeof one, at < 0 ? all : &one);
}

/* ---- claims ---------------------------------------------------------------------------------- */

/* Returns the CPU seconds that a process has used; 0 when they are unknown. */
static double cpu_of(pid_t pid)
{
    clockid_t clock;
    struct timespec t;
    if (clock_getcpuclockid(pid, &clock) || clock_gettime(clock, &t))
        return 0;
    return (double)t.tv_sec + 1e-9 * (double)t.tv_nsec;
}

/* The seconds of single operations, and the server's CPU seconds. Rounds are added in blocks. */
typedef struct sampled {
    double *seconds, cpu;
    size_t count;
} sampled;

static void claims_block(const setup *s, sampled *out, int rounds)
{
    double cpu = cpu_of(s->coordinator);
    for (int i = 0; i < rounds; i++) {
        double begin = bench_now();
        dray_batch *batch = queue_bench_claim(s, "t0", CLAIM);
        out->seconds[out->count++] = bench_now() - begin;
        dray_batch_free(batch); /* the rows are given back, so that the table stays the same */
    }
    out->cpu += cpu_of(s->coordinator) - cpu;
}

static void echoes_block(const setup *s, const queue_echo *e, sampled *out, int rounds, bool polls)
{
    double cpu = cpu_of(e->pid);
    for (int i = 0; i < rounds; i++) {
        double begin = bench_now();
        echo_once(s, e, polls);
        out->seconds[out->count++] = bench_now() - begin;
    }
    out->cpu += cpu_of(e->pid) - cpu;
}

static sampled sampled_new(const setup *s, int rounds)
{
    return (sampled){bench_alloc(s->b, (size_t)rounds, sizeof(double)), 0, 0};
}

static double median_of(sampled *of)
{
    return bench_percentile(of->seconds, of->count, 0.5);
}

/* Measures claims and echoes in one placement. Their blocks are interleaved. */
static void bench_placed(setup *s, const queue_echo *e, const placement *at, const cpu_set_t *cpus)
{
    int rounds = bench_quick(s->b) ? 20 : 500;
    char name[96];
    sampled claims = sampled_new(s, rounds * BLOCKS), echoes = sampled_new(s, rounds * BLOCKS),
            polls = sampled_new(s, rounds * BLOCKS);
    put_on(0, cpus, at->client);
    put_on(e->pid, cpus, at->server);
    put_on(s->coordinator, cpus, at->server);
    for (int i = 0; i < BLOCKS; i++) {
        bench_doing(s->b, "claims and echoes%s, %d of %d", at->what, i + 1, BLOCKS);
        echoes_block(s, e, &echoes, rounds, false);
        echoes_block(s, e, &polls, rounds, true);
        claims_block(s, &claims, rounds);
    }
    bench_doing(s->b, NULL);
    put_on(0, cpus, -1);
    put_on(e->pid, cpus, -1);
    put_on(s->coordinator, cpus, -1);
    double all = rounds * BLOCKS;
    snprintf(name, sizeof name, "claim of 32 of 1,000, p50, against an echo%s", at->what);
    double sleeping = median_of(&echoes), polling = median_of(&polls);
    bench_spread(s->b, claims.seconds, claims.count);
    bench_row(s->b, name, median_of(&claims), "s", sleeping < polling ? sleeping : polling,
              at->server < 0 ? 0 : 1.5);
    double least = echoes.cpu < polls.cpu ? echoes.cpu : polls.cpu;
    snprintf(name, sizeof name, "the coordinator's CPU a claim, more than an echo's%s", at->what);
    bench_row(s->b, name, claims.cpu > least ? (claims.cpu - least) / all : 0, "s", 0,
              at->server < 0 ? 0 : 3e-6);
    free(claims.seconds);
    free(echoes.seconds);
    free(polls.seconds);
}

static void bench_claim(setup *s, const queue_echo *e)
{
    cpu_set_t cpus;
    if (sched_getaffinity(0, sizeof cpus, &cpus) < 0)
        bench_die(s->b, "sched_getaffinity: %s", strerror(errno));
    s->queue = queue_bench_ready(s, "thousand of one column", 1000, 1, 1, DRAY_DURABILITY_NONE);
    for (int i = 0; i < PLACEMENTS && placements[i].server < CPU_COUNT(&cpus); i++)
        bench_placed(s, e, &placements[i], &cpus);
    dray_queue_close(s->queue);
}

double queue_bench_stream(const setup *s, uint32_t count, uint32_t rows, const char *task)
{
    dray_claim_options o = DRAY_CLAIM_OPTIONS_INIT;
    o.task = task;
    o.count = count;
    double begin = bench_now();
    dray_batch *batch = queue_bench_claim(s, task, count);
    for (uint32_t done = count; done < rows; done += count) {
        dray_batch *next;
        BENCH_MUST(s->b, dray_batch_commit_claim(batch, &o, 1, NULL, &next, error));
        dray_batch_free(batch);
        batch = next;
    }
    BENCH_MUST(s->b, dray_batch_commit(batch, error));
    dray_batch_free(batch);
    return rows / (bench_now() - begin);
}

static void bench_streams(setup *s)
{
    uint32_t rows = bench_quick(s->b) ? 3200 : 320000;
    bench_doing(s->b, "claims and commits of %u rows", (unsigned)rows);
    s->queue = queue_bench_ready(s, "stream", rows, 1, 2, DRAY_DURABILITY_NONE);
    bench_row(s->b, "claims of 32 with their commits, samples",
              queue_bench_stream(s, CLAIM, rows, "t0"), "1/s", 0, 200000);
    bench_row(s->b, "claims of 1 with their commits, samples",
              queue_bench_stream(s, 1, rows / 16, "t1"), "1/s", 0, 0);
    dray_queue_close(s->queue);
}

/* Measures claims of a small and of a large table. Their blocks are interleaved. */
static void bench_sizes(setup *s)
{
    int rounds = bench_quick(s->b) ? 20 : 300;
    sampled small = sampled_new(s, rounds * BLOCKS), large = sampled_new(s, rounds * BLOCKS);
    bench_doing(s->b, "a table of a million rows");
    dray_queue *thousand = queue_bench_ready(s, "thousand", 1000, 16, 8, DRAY_DURABILITY_NONE);
    dray_queue *million = queue_bench_ready(s, "million", bench_quick(s->b) ? 10000 : 1000000, 16,
                                            8, DRAY_DURABILITY_NONE);
    for (int i = 0; i < BLOCKS; i++) {
        s->queue = thousand;
        claims_block(s, &small, rounds);
        s->queue = million;
        claims_block(s, &large, rounds);
    }
    bench_doing(s->b, NULL);
    double more = median_of(&large) - median_of(&small);
    bench_row(s->b, "claim of 32, 1,000 x 16 columns x 8 tasks, p50", median_of(&small), "s", 0, 0);
    bench_row(s->b, "the same of 1,000,000: more by", more > 0 ? more : 0, "s", 0, 40e-6);
    dray_queue_close(thousand);
    dray_queue_close(million);
    free(small.seconds);
    free(large.seconds);
}

void queue_bench_claims(setup *s, const queue_echo *e)
{
    bench_claim(s, e);
    bench_streams(s);
    bench_sizes(s);
}
