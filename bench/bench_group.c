/* Measures the collectives of a group: the seconds of a barrier, and the bytes/s of an
 * all-reduce. */
#include "base/clock.h"
#include "bench.h"
#include "group/group.h"

#include <sched.h>
#include <stdlib.h>
#include <sys/wait.h>
#include <unistd.h>

enum { MEETINGS = 5000, FLOATS = 1 << 20 };

typedef struct work {
    const bench *b;
    uint32_t world;
    int one_core;    /* all ranks share a core, as those of an asynchronous job do */
    uint32_t floats; /* 0 means a barrier */
    uint32_t times;
} work;

static double run_rank(const work *w, int fd, uint32_t rank)
{
    dray__group *group;
    dray_error error;
    if (w->one_core) {
        cpu_set_t set;
        CPU_ZERO(&set);
        CPU_SET(0, &set);
        sched_setaffinity(0, sizeof set, &set);
    }
    int code = dray__group_open(fd, rank, w->world, 0, &group, &error);
    float *data = calloc(w->floats + 1, sizeof *data);
    if (code == DRAY_OK)
        code = dray__group_barrier(group, -1, &error);
    int64_t from = dray__now();
    for (uint32_t i = 0; code == DRAY_OK && i < w->times; i++)
        code = w->floats ? dray__group_all_reduce_f32(group, data, w->floats, -1, &error)
                         : dray__group_barrier(group, -1, &error);
    double seconds = (double)(dray__now() - from) / 1e9;
    if (code != DRAY_OK)
        bench_die(w->b, "rank %u: %s", rank, error.message);
    free(data);
    dray__group_close(group);
    return seconds / w->times;
}

/* Returns the seconds of one operation. All ranks are children, so that their CPU affinity does not
 * outlast them. */
static double run(void *state)
{
    const work *w = state;
    double seconds = 0;
    int fd, results[2], status;
    if (dray__group_create(w->world, 0, &fd, NULL) != DRAY_OK || pipe(results) != 0)
        bench_die(w->b, "no group");
    for (uint32_t rank = 0; rank < w->world; rank++)
        if (fork() == 0) {
            double own = run_rank(w, fd, rank);
            _exit(rank == 0 && write(results[1], &own, sizeof own) != sizeof own);
        }
    while (wait(&status) > 0)
        if (status != 0)
            bench_die(w->b, "a rank failed");
    if (read(results[0], &seconds, sizeof seconds) != sizeof seconds)
        bench_die(w->b, "no result");
    close(results[0]);
    close(results[1]);
    close(fd);
    return seconds;
}

int main(int argc, char **argv)
{
    bench *b = bench_open(argc, argv, "group");
    double echo = bench_echo(b, 8), copy = bench_memcpy(b, FLOATS * sizeof(float));
    work two = {b, 2, 0, 0, MEETINGS}, pinned = {b, 2, 1, 0, MEETINGS},
         four = {b, 4, 0, 0, MEETINGS};
    bench_row(b, "barrier, 2 ranks", bench_median_of(b, run, &two), "s", echo, 1);
    bench_row(b, "barrier, 2 ranks on one core", bench_median_of(b, run, &pinned), "s", echo, 1);
    bench_row(b, "barrier, 4 ranks", bench_median_of(b, run, &four), "s", echo, 4);
    work reduce = {b, 2, 0, FLOATS, 50};
    double seconds = bench_median_of(b, run, &reduce);
    bench_row(b, "all_reduce of 4 MiB, 2 ranks", FLOATS * sizeof(float) / seconds, "B/s", copy, 0);
    return bench_close(b);
}
