/* The state and CPU time of a process and of the processes that it has started, from /proc. */
#pragma once

#include <stdbool.h>
#include <stdint.h>
#include <sys/types.h>

typedef struct dray__vital {
    bool stopped;   /* one of them is stopped (SIGSTOP); a stop by a debugger does not count */
    bool on_disk;   /* one of their threads waits for a disk (uninterruptible sleep) */
    uint64_t ticks; /* CPU time of all of them */
    /* The time in which their threads had a core or waited in a queue for one; 0 when the kernel
     * does not count it. */
    uint64_t wanted_ns;
} dray__vital;

/* Returns false when the process has ended. */
bool dray__vital_of(pid_t pid, dray__vital *out);
