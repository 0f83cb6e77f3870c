/* dray bench queue: the queue against what it stands on: put and read against two memcpys, here;
 * claims against an echo (bench_queue_claims.c), a journal against fdatasync
 * (bench_queue_journal.c). The coordinator is a process of its own. */
#include "cmd/bench_queue.h"
#include "run/coordinator.h"

#include <dirent.h>
#include <errno.h>
#include <signal.h>
#include <stdlib.h>
#include <string.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <unistd.h>

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

dray_batch *queue_bench_claim(const setup *s, const char *task, uint32_t count)
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
    dray_batch *batch = queue_bench_claim(s, "write", SAMPLES);
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
    dray_batch *batch = queue_bench_claim(s, "read", SAMPLES);
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

/* ---- rows ---------------------------------------------------------------------------------- */

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

/* ---- the command line ------------------------------------------------------------------------ */

typedef struct arguments {
    bench_settings settings;
    const char *suite, *only, *hosts;
} arguments;

static const char *const parts[] = {"bytes", "claims", "journal"};

enum { PARTS = sizeof parts / sizeof parts[0] };

static bool wanted(const arguments *a, const char *part)
{
    return !a->only || strcmp(a->only, part) == 0;
}

/* One of `parts`. */
static bool is_part(const char *text)
{
    bool known = false;
    for (int i = 0; i < PARTS; i++)
        known |= strcmp(text, parts[i]) == 0;
    return known;
}

static error_t parse(int key, char *text, struct argp_state *state)
{
    arguments *a = state->input;
    if (key == ARGP_KEY_INIT)
        state->child_inputs[0] = &a->settings;
    else if (key == 'S' && strcmp(text, "targets") != 0)
        argp_error(state, "unknown suite '%s'; known: targets", text);
    else if (key == 'S')
        a->suite = text;
    else if (key == 'O' && !is_part(text))
        argp_error(state, "unknown part '%s'; known: bytes, claims, journal", text);
    else if (key == 'O')
        a->only = text;
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
        {"only", 'O', "bytes|claims|journal", 0, "Only this part of it", 0},
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
               "\vBytes are compared with two memcpys of as many, claims with an echo of as many "
               "bytes by another process over a Unix socket, wherever the kernel places the two, "
               "both on one CPU and on a CPU each, a journal with appending as many bytes to a "
               "file "
               "beside it, with as many fdatasyncs; all measured in turns with the work."};
    arguments a = {0};
    cmd_parse(&argp, argc, argv, &a);
    setup s = {.b = bench_new("queue", &a.settings)};
    if (a.hosts) {
        queue_bench_hosts(s.b, a.hosts);
        return bench_close(s.b);
    }
    queue_echo e = queue_bench_echo(&s); /* first: it inherits nothing */
    start(&s);
    if (wanted(&a, "bytes"))
        bench_bytes(&s);
    if (wanted(&a, "claims"))
        queue_bench_claims(&s, &e);
    if (wanted(&a, "journal"))
        queue_bench_journal(&s);
    stop(&s);
    close(e.fd);
    waitpid(e.pid, NULL, 0);
    return bench_close(s.b);
}
