/* dray bench queue: the queue against the bare operations beneath it. Bytes that are put here and
 * read by another process (bench_queue_reader.c) are compared with two memcpys by the same two
 * processes, claims with an echo (bench_queue_claims.c), and a journal with fdatasync
 * (bench_queue_journal.c). The coordinator is a process of its own. */
#include "bench/queue/bench_queue.h"
#include "run/supervisor/coordinator.h"

#include <dirent.h>
#include <errno.h>
#include <signal.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

typedef queue_bench setup;

#define BYTES(b) (bench_quick(b) ? (size_t)16 << 20 : (size_t)1 << 30)

dray_context *queue_bench_context(const bench *b, const char *socket, const char *name)
{
    dray_options options = DRAY_OPTIONS_INIT;
    dray_context *context;
    char address[112];
    snprintf(address, sizeof address, "unix:%s", socket);
    options.address = address;
    options.name = name;
    BENCH_MUST(b, dray_open(&options, &context, error));
    return context;
}

/* ---- the coordinator ------------------------------------------------------------------------- */

static void serve(const setup *s)
{
    dray_error error;
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
    snprintf(s->folder, sizeof s->folder, "%.40s/dray-bench-XXXXXX", tmp ? tmp : "/tmp");
    if (!mkdtemp(s->folder))
        bench_die(s->b, "a folder in %s: %s", tmp ? tmp : "/tmp", strerror(errno));
    snprintf(s->socket, sizeof s->socket, "%s/socket", s->folder);
    snprintf(s->keeper, sizeof s->keeper, "%s/keeper", s->folder);
    snprintf(s->journal, sizeof s->journal, "%s/journal", s->folder);
    s->coordinator = bench_fork(s->b);
    if (s->coordinator == 0)
        serve(s);
    s->context = queue_bench_context(s->b, s->socket, "dray bench queue");
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
    dray_queue_options options = DRAY_QUEUE_OPTIONS_INIT;
    options.tasks = tasks;
    options.task_count = count;
    options.durability = durability;
    BENCH_MUST(s->b, dray_queue_open(s->context, name, &options, &queue, error));
    return queue;
}

dray_batch *queue_bench_claim(const setup *s, const char *task, uint32_t count)
{
    dray_batch *batch;
    dray_claim_options o = DRAY_CLAIM_OPTIONS_INIT;
    o.task = task;
    o.count = count;
    BENCH_MUST(s->b, dray_queue_claim(s->queue, &o, &batch, error));
    return batch;
}

/* Puts all columns of all samples as one task. */
static void put(const setup *s)
{
    dray_batch *batch = queue_bench_claim(s, "write", SAMPLES);
    for (uint32_t c = 0; c < s->columns; c++) {
        dray_column_data column = {.name = s->list[c], .dtype = DRAY_U8, .ndim = 1};
        column.shape[0] = (int64_t)s->cell;
        column.values = s->source + c * s->cell * SAMPLES;
        column.bytes = s->cell * SAMPLES;
        BENCH_MUST(s->b, dray_batch_set(batch, &column, error));
    }
    BENCH_MUST(s->b, dray_batch_commit(batch, error));
    dray_batch_free(batch);
}

double queue_bench_get(const setup *s)
{
    double begin = bench_now();
    dray_batch *batch = queue_bench_claim(s, "read", SAMPLES);
    for (uint32_t c = 0; c < s->columns; c++)
        BENCH_MUST(s->b, dray_batch_gather(batch, s->list[c], s->target + c * s->cell * SAMPLES,
                                           s->cell * SAMPLES, NULL, error));
    BENCH_MUST(s->b, dray_batch_commit(batch, error));
    dray_batch_free(batch);
    return bench_now() - begin;
}

double queue_bench_put_and_read(setup *s)
{
    char name[16];
    snprintf(name, sizeof name, "%d", s->round++);
    dray_insert_options o = DRAY_INSERT_OPTIONS_INIT;
    o.partition = name;
    o.rows = SAMPLES;
    double begin = bench_now();
    BENCH_MUST(s->b, dray_queue_insert(s->queue, &o, NULL, error));
    put(s);
    double seconds = bench_now() - begin + queue_bench_read(s);
    begin = bench_now();
    BENCH_MUST(s->b, dray_queue_clear(s->queue, name, error));
    return seconds + bench_now() - begin;
}

void queue_bench_shape(setup *s, const char *name, uint32_t columns, int32_t durability)
{
    queue_bench_columns(s, columns);
    const dray_queue_task tasks[] = {{.name = "write", .writes = s->list, .writes_count = columns},
                                     {.name = "read", .needs = s->list, .needs_count = columns}};
    s->name = name;
    s->durability = durability;
    s->cell = s->bytes / columns / SAMPLES;
    s->queue = queue_bench_open(s, name, tasks, 2, durability);
}

void queue_bench_values(uint8_t *data, size_t bytes)
{
    for (size_t i = 0; i < bytes; i++)
        data[i] = (uint8_t)(i * 2654435761u >> 13);
}

/* Returns the seconds of two bare memcpys of as many bytes: into shared memory by this process, and
 * out of it by the reader, in pieces of `piece` bytes. */
static double copy_twice(const setup *s, size_t piece)
{
    double begin = bench_now();
    for (size_t at = 0; at < s->bytes; at += piece)
        memcpy(s->reader.between + at, s->source + at, piece);
    return bench_now() - begin + queue_bench_copy_out(s, piece);
}

/* Returns the seconds of the faster of two ways to copy: all bytes at once, or one sample of one of
 * 8 columns at a time. */
static double copies(const setup *s)
{
    double whole = copy_twice(s, s->bytes), pieces = copy_twice(s, s->bytes / 8 / SAMPLES);
    return whole < pieces ? whole : pieces;
}

typedef struct shape {
    const char *what;
    uint32_t columns;
    double target;
    dray_queue *queue;
    double cold, *seconds;
} shape;

/* Runs one more round of a shape. Returns its seconds. */
static double once(setup *s, const shape *of)
{
    queue_bench_columns(s, of->columns);
    s->queue = of->queue;
    s->name = of->what;
    s->durability = DRAY_DURABILITY_NONE;
    s->cell = s->bytes / of->columns / SAMPLES;
    return queue_bench_put_and_read(s);
}

/* Returns the number of rounds. It is larger than in other parts, because a round takes a second at
 * most, and the times of rounds differ. */
static unsigned turns_of(const setup *s)
{
    return bench_quick(s->b) ? 1 : 3 * bench_repeats(s->b);
}

static void open_shape(setup *s, shape *of)
{
    queue_bench_shape(s, of->what, of->columns, DRAY_DURABILITY_NONE);
    of->queue = s->queue;
    of->seconds = bench_alloc(s->b, turns_of(s), sizeof *of->seconds);
    of->cold = once(s, of);
    once(s, of); /* the second round is the first in recycled memory */
    queue_bench_check(s);
}

static double rate_of(const setup *s, double *seconds)
{
    return (double)s->bytes / bench_percentile(seconds, turns_of(s), 0.5);
}

static void shape_rows(setup *s, shape *of, double limit)
{
    char name[64];
    snprintf(name, sizeof name, "%s, fresh memory", of->what);
    bench_row(s->b, name, (double)s->bytes / of->cold, "B/s", limit, 0);
    bench_spread(s->b, of->seconds, turns_of(s));
    bench_row(s->b, of->what, rate_of(s, of->seconds), "B/s", limit, of->target);
}

/* Shapes and limit are interleaved, so that the machine's other load affects all of them alike. */
static void bench_bytes(setup *s)
{
    shape shapes[] = {{"put + read, 8 columns", 8, 0.8, NULL, 0, NULL},
                      {"put + read, 1 column", 1, 0, NULL, 0, NULL},
                      {"put + read, 32 columns", 32, 0, NULL, 0, NULL}};
    enum { SHAPES = sizeof shapes / sizeof shapes[0] };
    s->bytes = BYTES(s->b);
    double *limits = bench_alloc(s->b, turns_of(s), sizeof *limits);
    s->source = bench_alloc(s->b, s->bytes, 1);
    queue_bench_values(s->source, s->bytes);
    for (int i = 0; i < SHAPES; i++) {
        bench_doing(s->b, "%s, for the first time", shapes[i].what);
        open_shape(s, &shapes[i]);
    }
    copies(s);
    for (unsigned r = 0; r < turns_of(s); r++) {
        bench_doing(s->b, "put and read, round %u of %u", r + 1, turns_of(s));
        limits[r] = copies(s);
        for (int i = 0; i < SHAPES; i++)
            shapes[i].seconds[r] = once(s, &shapes[i]);
    }
    bench_doing(s->b, NULL);
    double limit = rate_of(s, limits);
    for (int i = 0; i < SHAPES; i++)
        shape_rows(s, &shapes[i], limit);
    bench_row(s->b, "32 columns, in times of 1 column",
              rate_of(s, shapes[1].seconds) / rate_of(s, shapes[2].seconds), "x", 0, 1 / 0.9);
    for (int i = 0; i < SHAPES; i++) {
        dray_queue_close(shapes[i].queue);
        free(shapes[i].seconds);
    }
    free(s->source);
    free(limits);
}

/* ---- rows ------------------------------------------------------------------------------------ */

dray_queue *queue_bench_ready(setup *s, const char *name, uint32_t rows, uint32_t columns,
                              uint32_t tasks, int32_t durability)
{
    static const char *const task_names[] = {"t0", "t1", "t2", "t3", "t4", "t5", "t6", "t7"};
    dray_queue_task table[8];
    dray_column_data data[COLUMNS_MAX];
    uint8_t *zeros = bench_alloc(s->b, rows, 1);
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
    BENCH_MUST(s->b, dray_queue_insert(queue, &o, NULL, error));
    free(zeros);
    return queue;
}

/* ---- the command line ------------------------------------------------------------------------ */

typedef struct arguments {
    bench_settings settings;
    const char *hosts;
    int suite, only; /* indices of words; -1 means all of them */
} arguments;

static const char *const suites[] = {"targets", NULL};
static const char *const parts[] = {"bytes", "claims", "journal", NULL};

static bool wanted(const arguments *a, const char *part)
{
    return a->only < 0 || strcmp(parts[a->only], part) == 0;
}

int bench_queue(int argc, char **argv)
{
    static const cmd_option options[] = {
        CMD_WORD(arguments, suite, "suite", 'S', suites, "suite", "targets",
                 "Measure the project's own targets (which is all there is)"),
        CMD_WORD(arguments, only, "only", 'O', parts, "part", "bytes|claims|journal",
                 "Only this part of it"),
        CMD_TEXT(arguments, hosts, "hosts", 'H', "A,B",
                 "Only this: samples that are put on host B and read on A, against TCP between "
                 "them. Hosts are network namespaces, or ~NAME, this machine under another name"),
        CMD_END};
    static const cmd_usage usage = {
        .options = options,
        .also = &bench_usage,
        .doc = "Puts and reads samples, claims and commits them, through a coordinator of its "
               "own.\vBytes that one process puts and another reads are compared with two memcpys "
               "of as many by the same two through shared memory, claims with an echo of as many "
               "bytes by another process over a Unix socket (of a client that sleeps meanwhile, or "
               "of one that looks: whichever is faster), wherever the kernel places the two, both "
               "on one CPU and on a CPU each, a journal with appending as many bytes to a file "
               "beside it, with as many fdatasyncs; all measured in turns with the work."};
    arguments a = {.only = -1};
    cmd_parse(&usage, argc, argv, &a);
    setup s = {.b = bench_new("queue", &a.settings)};
    if (a.hosts) {
        queue_bench_hosts(s.b, a.hosts);
        return bench_close(s.b);
    }
    queue_echo e = queue_bench_echo(&s); /* first, so that the process inherits nothing */
    s.reader = queue_bench_reader(&s, BYTES(s.b));
    start(&s);
    if (wanted(&a, "bytes"))
        bench_bytes(&s);
    if (wanted(&a, "claims")) {
        queue_bench_claims(&s, &e);
        queue_bench_beside(&s);
    }
    if (wanted(&a, "journal"))
        queue_bench_journal(&s);
    queue_bench_reader_end(&s);
    stop(&s);
    close(e.fd);
    waitpid(e.pid, NULL, 0);
    return bench_close(s.b);
}
