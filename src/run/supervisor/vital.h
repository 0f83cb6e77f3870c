/* Signs of life of a process, from /proc, including the processes that it has started itself. */
#pragma once

#include <stdbool.h>
#include <stdint.h>
#include <sys/types.h>

typedef struct dray__vital {
    bool stopped;   /* one of them is (SIGSTOP); a debugger's hold does not count */
    bool on_disk;   /* a thread of theirs waits for a disk just now (uninterruptible sleep) */
    uint64_t ticks; /* of the CPU, all together */
    /* The time in which their threads had a core or waited in a queue for one; 0 when the kernel
     * does not count it. */
    uint64_t wanted_ns;
} dray__vital;

/* false: it is gone. */
bool dray__vital_of(pid_t pid, dray__vital *out);
