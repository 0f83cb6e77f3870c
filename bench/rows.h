/* The rows of a benchmark (name, value, unit, limit, ratio, target, ok), its repeats and medians,
 * and the limits that figures are compared with. The limit of a figure, such as a memcpy of the
 * same bytes or an echo on a bare socket, is measured in the same run. On a shared machine,
 * absolute times mean nothing, but ratios do. `dray bench` and the programs of bench/ print these
 * rows. */
#pragma once

#include <dray/dray.h>
#include <jansson.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <sys/types.h>

typedef struct bench bench;

typedef struct bench_settings {
    bool json;       /* prints an object a line, each when measured; otherwise a table at the end */
    bool strict;     /* the exit status is 1 when a target is missed */
    bool quick;      /* one repeat and small sizes, to test that the benchmark runs */
    int64_t repeats; /* the number of repeats of each measurement; 0 means 7 */
} bench_settings;

/* Returns a benchmark, which bench_close frees. `part` is the name under which the rows are listed;
 * it is borrowed. The program ends when memory runs out. */
bench *bench_new(const char *part, const bench_settings *settings);
/* Prints the table (unless `json` is set), frees the benchmark, and returns the program's exit
 * status. */
int bench_close(bench *b);
bool bench_quick(const bench *b); /* returns true when sizes should be small */
unsigned bench_repeats(const bench *b);

/* Adds one figure. With the unit "B/s" or "1/s" a larger value is better; with "s" or "B" a smaller
 * one is better. `unit` is borrowed. `limit` is the same quantity of the bare operation, in the
 * same unit; 0 means that none was measured. `target` bounds value / limit, from below where a
 * larger value is better, and from above otherwise. Without a limit, it bounds the value itself. 0
 * means that there is no target. */
void bench_row(bench *b, const char *name, double value, const char *unit, double limit,
               double target);
/* Sets the spread of the next row to the interquartile range of its samples, as a fraction of their
 * median. Sorts the samples. */
void bench_spread(bench *b, double *samples, size_t count);
/* Adds the keys of `more` to the next row's JSON object. Takes ownership of `more`. */
void bench_more(bench *b, json_t *more);
/* Adds a row that could not be measured here, with the reason. It misses no target. */
void bench_skip(bench *b, const char *name, const char *reason);
/* Sets the text that says what the benchmark is doing; with `format` NULL there is none. On a
 * terminal, a line on stderr shows the text and for how long it has been true, from two seconds
 * after the first call on. bench_tick renews that line; callers call it while they wait. */
void bench_doing(bench *b, const char *format, ...) __attribute__((format(printf, 2, 3)));
void bench_tick(bench *b);
/* Ends the program with the message on stderr and exit status 1, because a benchmark whose work
 * fails has no figures. */
void bench_die(const bench *b, const char *format, ...)
    __attribute__((format(printf, 2, 3), noreturn));
/* Ends the program with the message on stderr and exit status 2, because an argument is wrong. */
void bench_refuse(const bench *b, const char *format, ...)
    __attribute__((format(printf, 2, 3), noreturn));

/* Ends the program with the library's message, unless rc is DRAY_OK. */
void bench_must(const bench *b, int rc, const dray_error *error);
/* Calls bench_must with the result of a call whose last argument is `error`. */
#define BENCH_MUST(b, call)                                                                        \
    do {                                                                                           \
        dray_error why, *error = &why;                                                             \
        bench_must(b, call, error);                                                                \
    } while (0)

/* ---- memory and processes: a failure ends the program ---------------------------------------- */

void *bench_alloc(const bench *b, size_t count,
                  size_t size); /* zeroed; the caller frees it with free() */
/* Returns zeroed memory that this process and its children share. */
void *bench_shared(const bench *b, size_t bytes);
/* Returns 0 in the child, which is killed when its parent ends. Buffered output is written before
 * the fork, so that it is printed once. */
pid_t bench_fork(const bench *b);
/* Starts a child that calls `serve` with one end of a socket, and ends when `serve` returns. *fd is
 * the other end. */
pid_t bench_serve(const bench *b, void (*serve)(void *state, int fd), void *state, int *fd);

/* ---- measuring ------------------------------------------------------------------------------- */

double bench_now(void); /* monotonic, in seconds */
/* Calls `run` once to warm up, then `repeats` times. Returns the median of its seconds. */
double bench_median(const bench *b, void (*run)(void *state), void *state);
/* The same for a function that times itself and returns seconds. */
double bench_median_of(const bench *b, double (*run)(void *state), void *state);
/* Returns the value below which the fraction `part` (0 to 1) of the values lies. Sorts the
 * values. */
double bench_percentile(double *values, size_t count, double part);

/* ---- limits ---------------------------------------------------------------------------------- */

/* Returns the bytes/s of one core that copies `bytes` between private buffers whose pages are
 * touched. */
double bench_memcpy(const bench *b, size_t bytes);
/* The same for a copy into shared memory (a memfd) that is mapped and touched. */
double bench_memcpy_shared(const bench *b, size_t bytes);
/* Returns the median seconds of one round trip of `bytes` with another process over a Unix socket
 * pair. */
double bench_echo(const bench *b, size_t bytes);
