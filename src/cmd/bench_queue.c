/* dray bench queue: the queue against what it stands on: put and read against two memcpys, claims
 * against an echo on a socket of the same kind. The coordinator is a process of its own. */
#include "cmd/bench_queue.h"
#include "run/coordinator.h"

#include <dirent.h>
#include <errno.h>
#include <signal.h>
#include <stdlib.h>
#include <string.h>
#include <sys/prctl.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

enum { ECHO_BYTES = 200, BLOCKS = 10 };

typedef queue_bench setup;

void queue_bench_must(const setup *s, int rc, const dray_error *error)
{
    if (rc)
        bench_die(s->b, "%s: %s", dray_error_name(rc), error->message);
}

/* ---- the coordinator ------------------------------------------------------------------------- */

static void serve(const setup *s)
{
    dray_error error;
    prctl(PR_SET_PDEATHSIG, SIGKILL);
    dray__serve_options options = {.unix_path = s->socket,
                                   .keeper_path = s->keeper,
                                   .start_keeper = true,
                                   .journal = s->journal};
    if (dray__serve(&options, &error))
        fprintf(stderr, "dray bench queue: coordinator: %s\n", error.message);
    _exit(0);
}

static void start(setup *s)
{
    const char *tmp = getenv("TMPDIR");
    dray_options options = DRAY_OPTIONS_INIT;
    char address[112];
    dray_error error;
    snprintf(s->folder, sizeof s->folder, "%.40s/dray-bench-XXXXXX", tmp ? tmp : "/tmp");
    if (!mkdtemp(s->folder))
        bench_die(s->b, "a folder in %s: %s", tmp ? tmp : "/tmp", strerror(errno));
    snprintf(s->socket, sizeof s->socket, "%s/socket", s->folder);
    snprintf(s->keeper, sizeof s->keeper, "%s/keeper", s->folder);
    snprintf(s->journal, sizeof s->journal, "%s/journal", s->folder);
    fflush(NULL);
    s->coordinator = fork();
    if (s->coordinator < 0)
        bench_die(s->b, "fork: %s", strerror(errno));
    if (s->coordinator == 0)
        serve(s);
    snprintf(address, sizeof address, "unix:%s", s->socket);
    options.address = address;
    options.name = "dray bench queue";
    queue_bench_must(s, dray_open(&options, &s->context, &error), &error);
}

static void empty_folder(const char *path)
{
    DIR *dir = opendir(path);
    for (struct dirent *entry; dir && (entry = readdir(dir));)
        unlinkat(dirfd(dir), entry->d_name, 0);
    if (dir)
        closedir(dir);
    rmdir(path);
}

static void stop(setup *s)
{
    dray_close(s->context);
    kill(s->coordinator, SIGTERM);
    waitpid(s->coordinator, NULL, 0);
    unlink(s->socket);
    unlink(s->keeper);
    empty_folder(s->journal);
    rmdir(s->folder);
}

/* ---- bytes ----------------------------------------------------------------------------------- */

void queue_bench_columns(setup *s, uint32_t columns)
{
    s->columns = columns;
    for (uint32_t c = 0; c < columns; c++) {
        snprintf(s->names[c], sizeof s->names[c], "c%u", c % 1000);
        s->list[c] = s->names[c];
    }
}

dray_queue *queue_bench_open(const setup *s, const char *name, const dray_queue_task *tasks,
                             uint32_t count, int32_t durability)
{
    dray_queue *queue;
    dray_error error;
    dray_queue_options options = DRAY_QUEUE_OPTIONS_INIT;
    options.tasks = tasks;
    options.task_count = count;
    options.durability = durability;
    queue_bench_must(s, dray_queue_open(s->context, name, &options, &queue, &error), &error);
    return queue;
}

static dray_batch *claim(const setup *s, const char *task, uint32_t count)
{
    dray_error error;
    dray_batch *batch;
    dray_claim_options o = DRAY_CLAIM_OPTIONS_INIT;
    o.task = task;
    o.count = count;
    queue_bench_must(s, dray_claim(s->queue, &o, &batch, &error), &error);
    return batch;
}

/* All columns of all samples put by one task. */
static void put(const setup *s)
{
    dray_error error;
    dray_batch *batch = claim(s, "write", SAMPLES);
    for (uint32_t c = 0; c < s->columns; c++) {
        dray_column_data column = {.name = s->list[c], .dtype = DRAY_U8, .ndim = 1};
        column.shape[0] = (int64_t)s->cell;
        column.values = s->source + c * s->cell * SAMPLES;
        queue_bench_must(s, dray_batch_set(batch, &column, &error), &error);
    }
    queue_bench_must(s, dray_batch_commit(batch, &error), &error);
    dray_batch_free(batch);
}

/* And copied out by another. */
static void get(const setup *s)
{
    dray_error error;
    dray_batch *batch = claim(s, "read", SAMPLES);
    for (uint32_t c = 0; c < s->columns; c++)
        queue_bench_must(s,
                         dray_batch_gather(batch, s->list[c], s->target + c * s->cell * SAMPLES,
                                           s->cell * SAMPLES, NULL, &error),
                         &error);
    queue_bench_must(s, dray_batch_commit(batch, &error), &error);
    dray_batch_free(batch);
}

double queue_bench_put_and_read(setup *s)
{
    dray_error error;
    char name[16];
    snprintf(name, sizeof name, "%d", s->round++);
    dray_insert_options o = DRAY_INSERT_OPTIONS_INIT;
    o.partition = name;
    o.rows = SAMPLES;
    double begin = bench_now();
    queue_bench_must(s, dray_insert(s->queue, &o, NULL, &error), &error);
    put(s);
    get(s);
    queue_bench_must(s, dray_clear(s->queue, name, &error), &error);
    return bench_now() - begin;
}

/* Two memcpys of as many bytes, out of the one buffer and into the other. */
static double copy_twice(const setup *s, uint8_t *between)
{
    double begin = bench_now();
    memcpy(between, s->source, s->bytes);
    __asm__ volatile("" : : "r"(between) : "memory"); /* the copy is wanted */
    memcpy(s->target, between, s->bytes);
    __asm__ volatile("" : : "r"(s->target) : "memory");
    return bench_now() - begin;
}

typedef struct shape {
    const char *what;
    uint32_t columns;
    double target;
    dray_queue *queue;
    double cold, *seconds;
} shape;

/* One more round of a shape. */
static double once(setup *s, const shape *of)
{
    queue_bench_columns(s, of->columns);
    s->queue = of->queue;
    s->cell = s->bytes / of->columns / SAMPLES;
    return queue_bench_put_and_read(s);
}

static void open_shape(setup *s, shape *of)
{
    queue_bench_columns(s, of->columns);
    const dray_queue_task tasks[] = {
        {.name = "write", .writes = s->list, .writes_count = of->columns},
        {.name = "read", .needs = s->list, .needs_count = of->columns}};
    of->queue = queue_bench_open(s, of->what, tasks, 2, DRAY_DURABILITY_NONE);
    of->seconds = calloc(bench_repeats(s->b), sizeof *of->seconds);
    if (!of->seconds)
        bench_die(s->b, "no memory");
    of->cold = once(s, of);
    once(s, of); /* the second round is the first in recycled memory */
    if (memcmp(s->source, s->target, s->bytes) != 0)
        bench_die(s->b, "%s: what was read is not what was put", of->what);
    memset(s->target, 0, s->bytes);
}

static double rate_of(const setup *s, double *seconds)
{
    return (double)s->bytes / bench_percentile(seconds, bench_repeats(s->b), 0.5);
}

/* Shapes and limit in turns, so that what else the machine does meets all of them. */
static void bench_bytes(setup *s)
{
    shape shapes[] = {{"put + read, 8 columns", 8, 0.8, NULL, 0, NULL},
                      {"put + read, 1 column", 1, 0, NULL, 0, NULL},
                      {"put + read, 32 columns", 32, 0.9, NULL, 0, NULL}};
    enum { SHAPES = sizeof shapes / sizeof shapes[0] };
    s->bytes = bench_quick(s->b) ? (size_t)16 << 20 : (size_t)1 << 30;
    uint8_t *between = malloc(s->bytes);
    double *limits = calloc(bench_repeats(s->b), sizeof *limits);
    s->source = malloc(s->bytes);
    s->target = malloc(s->bytes);
    if (!s->source || !s->target || !between || !limits)
        bench_die(s->b, "no memory for %zu bytes, three times", s->bytes);
    for (size_t i = 0; i < s->bytes; i++)
        s->source[i] = (uint8_t)(i * 2654435761u >> 13);
    memset(s->target, 0, s->bytes);
    for (int i = 0; i < SHAPES; i++) {
        bench_doing(s->b, "%s, for the first time", shapes[i].what);
        open_shape(s, &shapes[i]);
    }
    copy_twice(s, between);
    for (unsigned r = 0; r < bench_repeats(s->b); r++) {
        bench_doing(s->b, "put and read, round %u of %u", r + 1, bench_repeats(s->b));
        limits[r] = copy_twice(s, between);
        for (int i = 0; i < SHAPES; i++)
            shapes[i].seconds[r] = once(s, &shapes[i]);
    }
    bench_doing(s->b, NULL);
    double limit = rate_of(s, limits), one = rate_of(s, shapes[1].seconds);
    for (int i = 0; i < SHAPES; i++) {
        char name[64];
        snprintf(name, sizeof name, "%s, fresh memory", shapes[i].what);
        bench_row(s->b, name, (double)s->bytes / shapes[i].cold, "B/s", limit, 0);
        bool all = shapes[i].columns == COLUMNS_MAX;
        snprintf(name, sizeof name, "%s%s", shapes[i].what, all ? ", against 1 column" : "");
        bench_row(s->b, name, rate_of(s, shapes[i].seconds), "B/s", all ? one : limit,
                  shapes[i].target);
        dray_queue_close(shapes[i].queue);
        free(shapes[i].seconds);
    }
    free(s->source);
    free(s->target);
    free(between);
    free(limits);
}

/* ---- claims ---------------------------------------------------------------------------------- */

/* A queue whose one partition has `rows` rows of `columns` columns, all ready for `tasks` tasks. */
dray_queue *queue_bench_ready(setup *s, const char *name, uint32_t rows, uint32_t columns,
                              uint32_t tasks, int32_t durability)
{
    static const char *const task_names[] = {"t0", "t1", "t2", "t3", "t4", "t5", "t6", "t7"};
    dray_error error;
    dray_queue_task table[8];
    dray_column_data data[COLUMNS_MAX];
    uint8_t *zeros = calloc(rows, 1);
    if (!zeros)
        bench_die(s->b, "no memory");
    queue_bench_columns(s, columns);
    for (uint32_t c = 0; c < columns; c++)
        data[c] = (dray_column_data){.name = s->list[c], .dtype = DRAY_U8, .values = zeros};
    for (uint32_t t = 0; t < tasks; t++)
        table[t] =
            (dray_queue_task){.name = task_names[t], .needs = s->list, .needs_count = columns};
    dray_queue *queue = queue_bench_open(s, name, table, tasks, durability);
    dray_insert_options o = DRAY_INSERT_OPTIONS_INIT;
    o.partition = "p";
    o.rows = rows;
    o.columns = data;
    o.column_count = columns;
    queue_bench_must(s, dray_insert(queue, &o, NULL, &error), &error);
    free(zeros);
    return queue;
}

/* Another process that sends back what it gets, over a socket as the coordinator's. */
typedef struct echo {
    int fd;
    pid_t pid;
} echo;

static void echo_serve(int fd)
{
    char data[ECHO_BYTES];
    prctl(PR_SET_PDEATHSIG, SIGKILL);
    while (recv(fd, data, sizeof data, MSG_WAITALL) == (ssize_t)sizeof data &&
           send(fd, data, sizeof data, MSG_NOSIGNAL) == (ssize_t)sizeof data)
        ;
    _exit(0);
}

static echo echo_start(const setup *s)
{
    int ends[2];
    if (socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, ends) < 0)
        bench_die(s->b, "socketpair: %s", strerror(errno));
    fflush(NULL);
    echo e = {ends[0], fork()};
    if (e.pid < 0)
        bench_die(s->b, "fork: %s", strerror(errno));
    if (e.pid == 0) {
        close(ends[0]);
        echo_serve(ends[1]);
    }
    close(ends[1]);
    return e;
}

static void echo_once(const setup *s, const echo *e)
{
    char data[ECHO_BYTES] = {0};
    if (send(e->fd, data, sizeof data, MSG_NOSIGNAL) != (ssize_t)sizeof data ||
        recv(e->fd, data, sizeof data, MSG_WAITALL) != (ssize_t)sizeof data)
        bench_die(s->b, "echo: %s", strerror(errno));
}

/* CPU seconds that a process has used. */
static double cpu_of(pid_t pid)
{
    clockid_t clock;
    struct timespec t;
    if (clock_getcpuclockid(pid, &clock) || clock_gettime(clock, &t))
        return 0;
    return (double)t.tv_sec + 1e-9 * (double)t.tv_nsec;
}

/* Seconds and the server's CPU seconds of single operations; rounds go in blocks. */
typedef struct sampled {
    double *seconds, cpu;
    size_t count;
} sampled;

static void claims_block(const setup *s, sampled *out, int rounds)
{
    double cpu = cpu_of(s->coordinator);
    for (int i = 0; i < rounds; i++) {
        double begin = bench_now();
        dray_batch *batch = claim(s, "t0", CLAIM);
        out->seconds[out->count++] = bench_now() - begin;
        dray_batch_free(batch); /* rows are given back: the table stays as it is */
    }
    out->cpu += cpu_of(s->coordinator) - cpu;
}

static void echoes_block(const setup *s, const echo *e, sampled *out, int rounds)
{
    double cpu = cpu_of(e->pid);
    for (int i = 0; i < rounds; i++) {
        double begin = bench_now();
        echo_once(s, e);
        out->seconds[out->count++] = bench_now() - begin;
    }
    out->cpu += cpu_of(e->pid) - cpu;
}

static sampled sampled_new(const setup *s, int rounds)
{
    sampled out = {calloc((size_t)rounds, sizeof(double)), 0, 0};
    if (!out.seconds)
        bench_die(s->b, "no memory");
    return out;
}

static double median_of(sampled *of)
{
    return bench_percentile(of->seconds, of->count, 0.5);
}

static void bench_claim(setup *s, const echo *e)
{
    int rounds = bench_quick(s->b) ? 20 : 500;
    sampled claims = sampled_new(s, rounds * BLOCKS), echoes = sampled_new(s, rounds * BLOCKS);
    s->queue = queue_bench_ready(s, "thousand of one column", 1000, 1, 1, DRAY_DURABILITY_NONE);
    for (int i = 0; i < BLOCKS; i++) {
        bench_doing(s->b, "claims and echoes, %d of %d", i + 1, BLOCKS);
        echoes_block(s, e, &echoes, rounds);
        claims_block(s, &claims, rounds);
    }
    bench_doing(s->b, NULL);
    double all = rounds * BLOCKS;
    bench_row(s->b, "claim of 32 of 1,000, p50, against an echo", median_of(&claims), "s",
              median_of(&echoes), 1.5);
    bench_row(s->b, "the coordinator's CPU a claim, against an echo's + 3 us", claims.cpu / all,
              "s", echoes.cpu / all + 3e-6, 1);
    free(claims.seconds);
    free(echoes.seconds);
    dray_queue_close(s->queue);
}

/* Claims whose commit rides on the next one; samples per second. */
double queue_bench_stream(const setup *s, uint32_t count, uint32_t rows, const char *task)
{
    dray_error error;
    dray_claim_options o = DRAY_CLAIM_OPTIONS_INIT;
    o.task = task;
    o.count = count;
    double begin = bench_now();
    dray_batch *batch = claim(s, task, count);
    for (uint32_t done = count; done < rows; done += count) {
        dray_batch *next;
        queue_bench_must(s, dray_batch_commit_claim(batch, &o, 1, NULL, &next, &error), &error);
        dray_batch_free(batch);
        batch = next;
    }
    queue_bench_must(s, dray_batch_commit(batch, &error), &error);
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

/* Small and large table in turns. */
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

/* ---- the command line ------------------------------------------------------------------------ */

typedef struct arguments {
    bench_settings settings;
    const char *suite, *hosts;
} arguments;

static error_t parse(int key, char *text, struct argp_state *state)
{
    arguments *a = state->input;
    if (key == ARGP_KEY_INIT)
        state->child_inputs[0] = &a->settings;
    else if (key == 'S' && strcmp(text, "targets") != 0)
        argp_error(state, "unknown suite '%s'; known: targets", text);
    else if (key == 'S')
        a->suite = text;
    else if (key == 'H')
        a->hosts = text;
    else if (key == ARGP_KEY_ARG)
        argp_error(state, "expected no arguments, found '%s'", text);
    else
        return ARGP_ERR_UNKNOWN;
    return 0;
}

int bench_queue(int argc, char **argv)
{
    static const struct argp_option options[] = {
        {"suite", 'S', "targets", 0, "Measure the project's own targets (which is all there is)",
         0},
        {"hosts", 'H', "A,B", 0,
         "Only this: samples that are put on host B and read on A, against TCP between them. Hosts "
         "are network namespaces, or ~NAME, this machine under another name",
         0},
        {0}};
    static const struct argp_child children[] = {{&bench_argp, 0, NULL, 0}, {0}};
    static const struct argp argp = {
        .options = options,
        .parser = parse,
        .children = children,
        .doc = "Puts and reads samples, claims and commits them, through a coordinator of its own."
               "\vBytes are compared with two memcpys of as many, claims with an echo of 200 bytes "
               "by another process over a Unix socket, a journal with appending as many bytes to a "
               "file "
               "beside it, with as many fdatasyncs; all measured in turns with the work."};
    arguments a = {0};
    cmd_parse(&argp, argc, argv, &a);
    setup s = {.b = bench_new("queue", &a.settings)};
    if (a.hosts) {
        queue_bench_hosts(s.b, a.hosts);
        return bench_close(s.b);
    }
    echo e = echo_start(&s); /* first: it inherits nothing */
    start(&s);
    bench_bytes(&s);
    bench_claim(&s, &e);
    bench_streams(&s);
    bench_sizes(&s);
    queue_bench_journal(&s);
    stop(&s);
    close(e.fd);
    waitpid(e.pid, NULL, 0);
    return bench_close(s.b);
}
