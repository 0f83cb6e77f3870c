/* The arguments that the programs bench/bench_<part>.c share. Their rows are those of rows.h.
 *
 * A program calls bench_open first, measures, calls bench_row for each figure, and returns the
 * result of bench_close:
 *
 *     bench *b = bench_open(argc, argv, "plan");
 *     double limit = bench_memcpy(b, bytes);
 *     double rate = bytes / bench_median(b, update, &state);
 *     bench_row(b, "update, direct", rate, "B/s", limit, 0.8);
 *     return bench_close(b);
 *
 * Every program takes --json (one object a line), --strict (exit status 1 when a target is
 * missed), --repeat N (5 by default) and --quick (1 repeat and small sizes). A measurement that
 * users run is a part of `dray bench` instead. */
#pragma once

#include "bench/rows.h"

/* Reads the arguments. Wrong arguments end the program with exit status 2. `part` is the name under
 * which the rows are listed; it is borrowed. */
bench *bench_open(int argc, char **argv, const char *part);
