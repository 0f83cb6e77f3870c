/* The parts of `dray bench`, and the arguments that all of them take. A part is one file
 * bench/<folder>/bench_<name>.c with one function, and one line in BENCH_MAP. */
#pragma once

#include "bench/rows.h"
#include "cmd/cmd.h"

/* XX(name, summary), in the order in which `dray bench --help` lists them. */
#define BENCH_MAP(XX)                                                                              \
    XX(weights, "updates of weights, each rank a process, against a memcpy of as many bytes")      \
    XX(compare, "every way to update one model: time, bytes, memory, what each needs")             \
    XX(queue, "samples: put and read against two memcpys, claims against an echo")                 \
    XX(disk, "writing and reading checkpoints, against direct I/O of as many bytes")               \
    XX(arena, "GPU memory released and resumed, against copies to pinned memory")                  \
    XX(plan, "planning: time and memory, up to a trillion parameters on 384 ranks")

#define XX(name, summary) int bench_##name(int argc, char **argv);
BENCH_MAP(XX)
#undef XX

/* Options --json, --strict, --quick and --repeat, for parts that have a bench_settings at the
 * beginning of their struct. */
extern const cmd_usage bench_usage;

/* The same and --model, --from and --to, for parts that have a bench_update at the beginning of
 * their struct. */
typedef struct bench_update {
    bench_settings settings;
    const char *model, *from, *to;
} bench_update;

extern const cmd_usage bench_update_usage;
