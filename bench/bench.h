/* What the programs bench/bench_<part>.c share: arguments, and the rows of rows.h.
 *
 * A program calls bench_open first, measures, calls bench_row for each figure, and returns
 * bench_close():
 *
 *     bench *b = bench_open(argc, argv, "plan");
 *     double limit = bench_memcpy(b, bytes);
 *     double rate = bytes / bench_median(b, update, &state);
 *     bench_row(b, "update, direct", rate, "B/s", limit, 0.8);
 *     return bench_close(b);
 *
 * Arguments of every one: --json (one object a line), --strict (exit 1 when a target is missed),
 * --repeat N (default 5), --quick (1 repeat: does it run at all?). What users measure is a part of
 * `dray bench` instead. */
#pragma once

#include "bench/rows.h"

/* Reads the arguments; wrong ones end the program with 2. part: what the rows are listed under. */
bench *bench_open(int argc, char **argv, const char *part);
