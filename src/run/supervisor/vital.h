/* Is a process alive in more than name? From /proc, with what it has started itself. */
#pragma once

#include <stdbool.h>
#include <stdint.h>
#include <sys/types.h>

typedef struct dray__vital {
    bool stopped;   /* one of them is (SIGSTOP); a debugger's hold does not count */
    bool on_disk;   /* a thread of theirs waits for a disk just now (uninterruptible sleep) */
    uint64_t ticks; /* of the CPU, all together */
    /* In which their threads had a core or waited in a queue for one; 0: the kernel does not count.
     */
    uint64_t wanted_ns;
} dray__vital;

/* false: it is gone. */
bool dray__vital_of(pid_t pid, dray__vital *out);
