/* Benchmarks: rows of name, value, unit, limit, ratio, target, ok.
 *
 * A program bench/bench_<part>.c calls bench_open first, measures, calls bench_row for each figure,
 * and returns bench_close(). The limit of a figure (a memcpy of the same bytes, an echo on a bare
 * socket) is measured in the same run: absolute times on shared machines mean nothing, ratios do.
 *
 *     bench *b = bench_open(argc, argv, "plan");
 *     double limit = bench_memcpy(b, bytes);
 *     double rate = bytes / bench_median(b, update, &state);
 *     bench_row(b, "update, direct", rate, "B/s", limit, 0.8);
 *     return bench_close(b);
 *
 * Arguments of every benchmark: --json (one object a line), --strict (exit 1 when a target is
 * missed), --repeats N (default 5), --quick (1 repeat: does it run at all?). */
#ifndef DRAY_BENCH_H
#define DRAY_BENCH_H

#include <stdbool.h>
#include <stddef.h>

typedef struct bench bench;

/* Reads the arguments; wrong ones end the program with 2. part: what the rows are listed under. */
bench *bench_open(int argc, char **argv, const char *part);
/* Prints the table and ends. The program's exit status. */
int bench_close(bench *b);
bool bench_quick(const bench *b); /* --quick: use small sizes */

/* One figure. Unit "B/s" or "1/s" means that more is better, "s" or "B" that less is.
 * limit: the same quantity of the bare operation, in the same unit; 0: none was measured.
 * target: with a limit, how near the value must come: value / limit >= target where more is
 * better, <= target where less is. Without a limit, the value itself is compared. 0: no target. */
void bench_row(bench *b, const char *name, double value, const char *unit, double limit,
               double target);
/* A row that could not be measured here, with the reason. It misses no target. */
void bench_skip(bench *b, const char *name, const char *reason);
/* Ends the program with the message on stderr: a benchmark whose work fails has no figures. */
void bench_die(const bench *b, const char *format, ...)
    __attribute__((format(printf, 2, 3), noreturn));

/* ---- measuring ------------------------------------------------------------------------------- */

double bench_now(void); /* seconds, monotonic */
/* Calls run once to warm up, then `repeats` times; the median of its seconds. */
double bench_median(const bench *b, void (*run)(void *state), void *state);
/* The same for runs that time themselves and return seconds. */
double bench_median_of(const bench *b, double (*run)(void *state), void *state);
/* The value below which `part` (0 to 1) of the values lie. Sorts them. */
double bench_percentile(double *values, size_t count, double part);

/* ---- limits ---------------------------------------------------------------------------------- */

/* Bytes/s of one core copying `bytes` between touched private buffers. */
double bench_memcpy(const bench *b, size_t bytes);
/* The same into shared memory (memfd) that is mapped and touched. */
double bench_memcpy_shared(const bench *b, size_t bytes);
/* Seconds of one round trip of `bytes` with another process over a Unix socket pair, median. */
double bench_echo(const bench *b, size_t bytes);

#endif
