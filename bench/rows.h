/* Rows of a benchmark: name, value, unit, limit, ratio, target, ok; its repeats and medians, and
 * the limits that figures are compared with. The limit of a figure (a memcpy of the same bytes, an
 * echo on a bare socket) is measured in the same run: absolute times on shared machines mean
 * nothing, ratios do. `dray bench` and the programs of bench/ print these rows. */
#pragma once

#include <dray/dray.h>
#include <jansson.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <sys/types.h>

typedef struct bench bench;

typedef struct bench_settings {
    bool json;       /* one object a line, as soon as it is measured; else a table at the end */
    bool strict;     /* exit status 1 when a target is missed */
    bool quick;      /* one repeat, small sizes: does it run at all? */
    int64_t repeats; /* of what is measured; 0: 7 */
} bench_settings;

/* part: what the rows are listed under; borrowed. Ends the program where memory is out. */
bench *bench_new(const char *part, const bench_settings *settings);
/* Prints the table and ends. The program's exit status. */
int bench_close(bench *b);
bool bench_quick(const bench *b); /* --quick: use small sizes */
unsigned bench_repeats(const bench *b);

/* One figure. Unit "B/s" or "1/s" means that more is better, "s" or "B" that less is.
 * limit: the same quantity of the bare operation, in the same unit; 0: none was measured.
 * target: with a limit, how near the value must come: value / limit >= target where more is
 * better, <= target where less is. Without a limit, the value itself is compared. 0: no target. */
void bench_row(bench *b, const char *name, double value, const char *unit, double limit,
               double target);
/* How far the next row's samples are apart: the middle half of them, as part of the median. Sorts
 * them. */
void bench_spread(bench *b, double *samples, size_t count);
/* More keys for the next row's JSON object. Takes `more`. */
void bench_more(bench *b, json_t *more);
/* A row that could not be measured here, with the reason. It misses no target. */
void bench_skip(bench *b, const char *name, const char *reason);
/* What is going on now; `format` NULL: nothing. On a terminal, from two seconds after the first row
 * was begun, a line on stderr says it and for how long; bench_tick, called while waiting, renews
 * it. */
void bench_doing(bench *b, const char *format, ...) __attribute__((format(printf, 2, 3)));
void bench_tick(bench *b);
/* Ends the program with the message on stderr: a benchmark whose work fails has no figures. */
void bench_die(const bench *b, const char *format, ...)
    __attribute__((format(printf, 2, 3), noreturn));
/* The same where an argument is wrong: exit status 2. */
void bench_refuse(const bench *b, const char *format, ...)
    __attribute__((format(printf, 2, 3), noreturn));

/* Ends the program with what the library said, unless rc is DRAY_OK. */
void bench_must(const bench *b, int rc, const dray_error *error);
/* The same for a call whose last argument is `error`. */
#define BENCH_MUST(b, call)                                                                        \
    do {                                                                                           \
        dray_error why, *error = &why;                                                             \
        bench_must(b, call, error);                                                                \
    } while (0)

/* ---- memory and processes: what cannot be had ends the program ---------------------------------
 */

void *bench_alloc(const bench *b, size_t count, size_t size); /* zeroed; for free() */
/* Zeroed memory that this process and its children share. */
void *bench_shared(const bench *b, size_t bytes);
/* 0 in the child, which dies with its parent. What was printed so far is printed once. */
pid_t bench_fork(const bench *b);
/* A child that has the other end of a socket, and ends when serve returns. *fd: this end. */
pid_t bench_serve(const bench *b, void (*serve)(void *state, int fd), void *state, int *fd);

/* ---- measuring ------------------------------------------------------------------------------- */

double bench_now(void); /* seconds, monotonic */
/* Calls run once to warm up, then `repeats` times; the median of its seconds. */
double bench_median(const bench *b, void (*run)(void *state), void *state);
/* The same for runs that time themselves and return seconds. */
double bench_median_of(const bench *b, double (*run)(void *state), void *state);
/* The value below which `part` (0 to 1) of the values are. Sorts them. */
double bench_percentile(double *values, size_t count, double part);

/* ---- limits ---------------------------------------------------------------------------------- */

/* Bytes/s of one core copying `bytes` between touched private buffers. */
double bench_memcpy(const bench *b, size_t bytes);
/* The same into shared memory (memfd) that is mapped and touched. */
double bench_memcpy_shared(const bench *b, size_t bytes);
/* Seconds of one round trip of `bytes` with another process over a Unix socket pair, median. */
double bench_echo(const bench *b, size_t bytes);
