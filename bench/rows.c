/* The rows of a benchmark, its repeats and medians, and the limits that figures are compared with
 * (rows.h). */
#include "bench/rows.h"

#include <errno.h>
#include <jansson.h>
#include <signal.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

typedef struct row {
    char *name, *skipped;
    const char *unit;
    double value, limit, ratio, target; /* 0 means none */
    double spread;
    size_t samples; /* 0 when no spread was given */
    bool ok;
} row;

struct bench {
    const char *part;
    bool json, strict, quick;
    unsigned repeats;
    json_t *more;  /* the keys of the next row */
    double spread; /* the spread of the next row, and the number of its samples */
    size_t samples;
    char doing[160];
    double began, doing_since, shown; /* seconds of bench_now; 0 means not yet */
    row *rows;
    size_t count, capacity;
};

/* ---- progress -------------------------------------------------------------------------------- */

static void clear_line(bench *b)
{
    if (b->shown > 0)
        fputs("\r\033[K", stderr);
    b->shown = 0;
}

void bench_doing(bench *b, const char *format, ...)
{
    double now = bench_now();
    b->began = b->began > 0 ? b->began : now;
    b->doing_since = now;
    b->doing[0] = 0;
    if (!format) {
        clear_line(b);
        return;
    }
    va_list arguments;
    va_start(arguments, format);
    vsnprintf(b->doing, sizeof(b->doing), format, arguments);
    va_end(arguments);
    bench_tick(b);
}

void bench_tick(bench *b)
{
    double now = bench_now();
    if (!b->doing[0] || now < b->began + 2 || now < b->shown + 0.2 || !isatty(STDERR_FILENO))
        return;
    fprintf(stderr, "\r\033[K%s (%.0f s)", b->doing, now - b->doing_since);
    fflush(stderr);
    b->shown = now;
}

static void say(const bench *b, const char *format, va_list arguments)
{
    fprintf(stderr, "%sdray bench %s: ", b->shown > 0 ? "\r\033[K" : "", b->part);
    vfprintf(stderr, format, arguments);
    fputc('\n', stderr);
}

void bench_die(const bench *b, const char *format, ...)
{
    va_list arguments;
    va_start(arguments, format);
    say(b, format, arguments);
    va_end(arguments);
    exit(1);
}

void bench_refuse(const bench *b, const char *format, ...)
{
    va_list arguments;
    va_start(arguments, format);
    say(b, format, arguments);
    va_end(arguments);
    exit(2);
}

static void *need(const bench *b, void *pointer)
{
    if (!pointer)
        bench_die(b, "out of memory");
    return pointer;
}

void bench_must(const bench *b, int rc, const dray_error *error)
{
    if (rc)
        bench_die(b, "%s: %s", dray_error_name(rc), error->message);
}

void *bench_alloc(const bench *b, size_t count, size_t size)
{
    return need(b, calloc(count ? count : 1, size));
}

void *bench_shared(const bench *b, size_t bytes)
{
    void *at = mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    return need(b, at == MAP_FAILED ? NULL : at);
}

pid_t bench_fork(const bench *b)
{
    fflush(NULL);
    pid_t pid = fork();
    if (pid < 0)
        bench_die(b, "fork: %s", strerror(errno));
    if (pid == 0)
        prctl(PR_SET_PDEATHSIG, SIGKILL);
    return pid;
}

pid_t bench_serve(const bench *b, void (*serve)(void *state, int fd), void *state, int *fd)
{
    int ends[2];
    if (socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, ends) < 0)
        bench_die(b, "socketpair: %s", strerror(errno));
    pid_t pid = bench_fork(b);
    if (pid == 0) {
        close(ends[0]);
        serve(state, ends[1]);
        _exit(0);
    }
    close(ends[1]);
    *fd = ends[0];
    return pid;
}

bench *bench_new(const char *part, const bench_settings *settings)
{
    bench *b = calloc(1, sizeof(*b));
    if (!b)
        exit(1);
    *b = (bench){.part = part,
                 .json = settings->json,
                 .strict = settings->strict,
                 .quick = settings->quick,
                 .repeats = settings->quick     ? 1
                            : settings->repeats ? (unsigned)settings->repeats
                                                : 7};
    return b;
}

bool bench_quick(const bench *b)
{
    return b->quick;
}

unsigned bench_repeats(const bench *b)
{
    return b->repeats;
}

void bench_more(bench *b, json_t *more)
{
    json_decref(b->more);
    b->more = need(b, more);
}

/* ---- rows ------------------------------------------------------------------------------------ */

static row *add_row(bench *b, const char *name)
{
    clear_line(b);
    if (b->count == b->capacity) {
        b->capacity = b->capacity ? 2 * b->capacity : 32;
        b->rows = need(b, reallocarray(b->rows, b->capacity, sizeof(*b->rows)));
    }
    row *r = &b->rows[b->count++];
    *r = (row){
        .name = need(b, strdup(name)), .spread = b->spread, .samples = b->samples, .ok = true};
    b->samples = 0;
    return r;
}

static void print_row_json(bench *b, const row *r)
{
    json_t *line = json_pack("{s:s, s:s}", "bench", b->part, "name", r->name);
    if (r->skipped)
        json_object_set_new(line, "skipped", json_string(r->skipped));
    else
        json_object_update_new(line, json_pack("{s:f, s:s}", "value", r->value, "unit", r->unit));
    /* Every row has every key, so that a table can be made of them. A missing figure is null. */
    json_object_set_new(line, "limit", r->limit > 0 ? json_real(r->limit) : json_null());
    json_object_set_new(line, "ratio", r->limit > 0 ? json_real(r->ratio) : json_null());
    json_object_set_new(line, "target", r->target > 0 ? json_real(r->target) : json_null());
    json_object_set_new(line, "ok", json_boolean(r->ok));
    json_object_set_new(line, "samples",
                        r->samples ? json_integer((json_int_t)r->samples) : json_null());
    json_object_set_new(line, "spread", r->samples ? json_real(r->spread) : json_null());
    if (b->more)
        json_object_update(line, b->more);
    json_decref(b->more);
    b->more = NULL;
    char *text = need(b, json_dumps(line, JSON_COMPACT));
    puts(text);
    fflush(stdout);
    free(text);
    json_decref(line);
}

static bool more_is_better(const char *unit)
{
    size_t length = strlen(unit);
    return length > 2 && strcmp(unit + length - 2, "/s") == 0;
}

void bench_row(bench *b, const char *name, double value, const char *unit, double limit,
               double target)
{
    row *r = add_row(b, name);
    r->unit = unit;
    r->value = value;
    r->limit = limit;
    r->ratio = limit > 0 ? value / limit : 0;
    r->target = target;
    double compared = limit > 0 ? r->ratio : value;
    if (target > 0)
        r->ok = more_is_better(unit) ? compared >= target : compared <= target;
    if (b->json)
        print_row_json(b, r);
}

void bench_skip(bench *b, const char *name, const char *reason)
{
    row *r = add_row(b, name);
    r->skipped = need(b, strdup(reason));
    if (b->json)
        print_row_json(b, r);
}

typedef struct text {
    char s[32];
} text;

/* Writes a figure with a prefix of its unit: 1.23 GB/s, 45.6 us, 725 k/s for 725,000 1/s, 22 k
 * copies. */
static text human(double value, const char *unit)
{
    static const char *const large[] = {"", "k", "M", "G", "T", "P"};
    static const char *const small[] = {"", "m", "u", "n", "p"};
    text t;
    size_t i = 0;
    if (value > 0 && value < 0.9995 && strcmp(unit, "s") == 0) {
        for (; value < 0.9995 && i < 4; i++)
            value *= 1000;
        snprintf(t.s, sizeof(t.s), "%.3g %s%s", value, small[i], unit);
    } else {
        for (; value >= 999.5 && i < 5; i++)
            value /= 1000;
        bool word = strlen(unit) > 3 && !strchr(unit, '/');
        snprintf(t.s, sizeof(t.s), "%.3g %s%s%s", value, large[i], word ? " " : "",
                 strncmp(unit, "1/", 2) == 0 ? unit + 1 : unit);
    }
    return t;
}

static void print_table(const bench *b)
{
    int width = 8;
    for (size_t i = 0; i < b->count; i++)
        width = (int)strlen(b->rows[i].name) > width ? (int)strlen(b->rows[i].name) : width;
    printf("%-*s  %12s  %7s  %12s  %7s  %9s\n", width, b->part, "value", "spread", "limit", "ratio",
           "target");
    for (size_t i = 0; i < b->count; i++) {
        const row *r = &b->rows[i];
        if (r->skipped) {
            printf("%-*s  skipped: %s\n", width, r->name, r->skipped);
            continue;
        }
        char ratio[32] = "-", target[64] = "-", spread[32] = "-";
        if (r->samples)
            snprintf(spread, sizeof(spread), "%.0f %%", 100 * r->spread);
        if (r->limit > 0)
            snprintf(ratio, sizeof(ratio), "%.3g", r->ratio);
        if (r->target > 0)
            snprintf(target, sizeof(target), "%s %s", more_is_better(r->unit) ? ">=" : "<=",
                     r->limit > 0 ? human(r->target, "").s : human(r->target, r->unit).s);
        printf("%-*s  %12s  %7s  %12s  %7s  %9s  %s\n", width, r->name, human(r->value, r->unit).s,
               spread, r->limit > 0 ? human(r->limit, r->unit).s : "-", ratio, target,
               r->target <= 0 ? ""
               : r->ok        ? "ok"
                              : "MISSED");
    }
}

int bench_close(bench *b)
{
    size_t missed = 0;
    for (size_t i = 0; i < b->count; i++)
        missed += !b->rows[i].ok;
    if (!b->json) {
        print_table(b);
        if (missed)
            printf("%zu target%s missed\n", missed, missed == 1 ? "" : "s");
    }
    for (size_t i = 0; i < b->count; i++) {
        free(b->rows[i].name);
        free(b->rows[i].skipped);
    }
    int status = missed && b->strict;
    json_decref(b->more);
    free(b->rows);
    free(b);
    return status;
}

/* ---- measuring ------------------------------------------------------------------------------- */

double bench_now(void)
{
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (double)t.tv_sec + 1e-9 * (double)t.tv_nsec;
}

static int compare(const void *a, const void *b)
{
    double x = *(const double *)a, y = *(const double *)b;
    return (x > y) - (x < y);
}

double bench_percentile(double *values, size_t count, double part)
{
    if (count == 0)
        return 0;
    qsort(values, count, sizeof(*values), compare);
    size_t index = (size_t)(part * (double)(count - 1) + 0.5);
    return values[index < count ? index : count - 1];
}

void bench_spread(bench *b, double *samples, size_t count)
{
    double median = bench_percentile(samples, count, 0.5);
    double half = bench_percentile(samples, count, 0.75) - bench_percentile(samples, count, 0.25);
    b->samples = count;
    b->spread = median > 0 ? half / median : 0;
}

double bench_median_of(const bench *b, double (*run)(void *state), void *state)
{
    double *seconds = bench_alloc(b, b->repeats, sizeof(*seconds));
    run(state);
    for (unsigned i = 0; i < b->repeats; i++)
        seconds[i] = run(state);
    double median = bench_percentile(seconds, b->repeats, 0.5);
    free(seconds);
    return median;
}

typedef struct untimed {
    void (*run)(void *state);
    void *state;
} untimed;

static double time_it(void *state)
{
    const untimed *u = state;
    double begin = bench_now();
    u->run(u->state);
    return bench_now() - begin;
}

double bench_median(const bench *b, void (*run)(void *state), void *state)
{
    untimed u = {run, state};
    return bench_median_of(b, time_it, &u);
}

/* ---- limits ---------------------------------------------------------------------------------- */

typedef struct copy {
    char *to, *from;
    size_t bytes;
} copy;

static void run_copy(void *state)
{
    copy *c = state;
    memcpy(c->to, c->from, c->bytes);
    __asm__ volatile("" : : "r"(c->to) : "memory"); /* keeps the compiler from removing the copy */
}

static double copy_rate(const bench *b, copy *c)
{
    memset(c->from, 1, c->bytes);
    memset(c->to, 2, c->bytes);
    return (double)c->bytes / bench_median(b, run_copy, c);
}

double bench_memcpy(const bench *b, size_t bytes)
{
    copy c = {need(b, malloc(bytes)), need(b, malloc(bytes)), bytes};
    double rate = copy_rate(b, &c);
    free(c.to);
    free(c.from);
    return rate;
}

double bench_memcpy_shared(const bench *b, size_t bytes)
{
    int fd = memfd_create("bench", MFD_CLOEXEC);
    if (fd < 0 || ftruncate(fd, (off_t)bytes) < 0)
        bench_die(b, "memfd of %zu bytes: %s", bytes, strerror(errno));
    void *to = mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
    if (to == MAP_FAILED)
        bench_die(b, "mmap of %zu bytes: %s", bytes, strerror(errno));
    copy c = {to, need(b, malloc(bytes)), bytes};
    double rate = copy_rate(b, &c);
    free(c.from);
    munmap(to, bytes);
    close(fd);
    return rate;
}

static bool whole(int fd, char *data, size_t bytes, bool sending)
{
    for (size_t done = 0; done < bytes;) {
        ssize_t n = sending ? send(fd, data + done, bytes - done, MSG_NOSIGNAL)
                            : recv(fd, data + done, bytes - done, 0);
        if (n < 0 && errno == EINTR)
            continue;
        if (n <= 0)
            return false;
        done += (size_t)n;
    }
    return true;
}

typedef struct echo {
    char *data;
    size_t bytes;
} echo;

static void echo_server(void *state, int fd)
{
    const echo *e = state;
    while (whole(fd, e->data, e->bytes, false) && whole(fd, e->data, e->bytes, true))
        ;
}

double bench_echo(const bench *b, size_t bytes)
{
    enum { WARM = 200, ROUNDS = 4000, QUICK = 400 };
    size_t rounds = b->quick ? QUICK : ROUNDS;
    double *seconds = bench_alloc(b, rounds, sizeof(*seconds));
    echo e = {bench_alloc(b, 1, bytes), bytes};
    int fd;
    pid_t child = bench_serve(b, echo_server, &e, &fd);
    for (size_t i = 0; i < WARM + rounds; i++) {
        double begin = bench_now();
        if (!whole(fd, e.data, bytes, true) || !whole(fd, e.data, bytes, false))
            bench_die(b, "echo: %s", strerror(errno));
        if (i >= WARM)
            seconds[i - WARM] = bench_now() - begin;
    }
    close(fd);
    waitpid(child, NULL, 0);
    double median = bench_percentile(seconds, rounds, 0.5);
    free(e.data);
    free(seconds);
    return median;
}
