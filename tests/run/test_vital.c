/* Tests whether /proc shows that a process is alive: one that computes, with however small a share
 * of a core, and one that sleeps. */
#include "run/supervisor/vital.h"
#include "suite.h"

#include <sched.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/wait.h>
#include <unistd.h>

enum { RIVALS = 8 };

static pid_t begin(bool spins, int nice_value)
{
    cpu_set_t one;
    CPU_ZERO(&one);
    CPU_SET(0, &one);
    pid_t parent = getpid(), pid = fork();
    assert_true(pid >= 0);
    if (pid)
        return pid;
    sched_setaffinity(0, sizeof(one), &one);
    if (nice_value && nice(nice_value) < 0)
        _exit(1);
    while (getppid() == parent)
        if (!spins)
            usleep(1000000);
    _exit(0);
}

static dray__vital of(pid_t pid)
{
    dray__vital v;
    assert_true(dray__vital_of(pid, &v));
    return v;
}

static void end(const pid_t *pids, int count)
{
    for (int i = 0; i < count; i++)
        kill(pids[i], SIGKILL);
    for (int i = 0; i < count; i++)
        waitpid(pids[i], NULL, 0);
}

/* One shares a core with others that go before it; the other one wakes up now and then. */
TEST(who_waits_for_a_core_wants_it)
{
    pid_t pids[2 + RIVALS] = {begin(true, 19), begin(false, 0)};
    for (int i = 0; i < RIVALS; i++)
        pids[2 + i] = begin(true, 0);
    dray__vital busy = of(pids[0]);
    /* Where the kernel does not count, a test's time limit ends it. */
    while (busy.wanted_ns < 2000000000) {
        usleep(10000);
        busy = of(pids[0]);
    }
    dray__vital idle = of(pids[1]);
    end(pids, 2 + RIVALS);
    assert_true((double)busy.ticks / (double)sysconf(_SC_CLK_TCK) < 1);
    assert_true(idle.wanted_ns < busy.wanted_ns / 2);
    assert_false(dray__vital_of(pids[0], &busy));
}

/* One that waits for a disk is in an uninterruptible sleep, as the parent of vfork(2) is. */
TEST(who_waits_for_a_disk_is_seen)
{
#ifdef __SANITIZE_THREAD__
    skip(); /* its vfork is a fork */
#endif
    pid_t pid = fork();
    if (!pid) {
        if (!vfork()) { /* NOLINT: it is what is tested */
            pause();
            _exit(0);
        }
        _exit(0);
    }
    while (!of(pid).on_disk)
        usleep(10000);
    char path[64], child[32] = "";
    snprintf(path, sizeof(path), "/proc/%ld/task/%ld/children", (long)pid, (long)pid);
    FILE *file = fopen(path, "re");
    bool found = file && fgets(child, sizeof(child), file);
    if (file)
        fclose(file);
    pid_t pids[] = {pid, begin(false, 0)};
    dray__vital idle = of(pids[1]);
    if (found) /* first: its parent cannot end before */
        kill((pid_t)strtol(child, NULL, 10), SIGKILL);
    end(pids, 2);
    assert_true(found);
    assert_false(idle.on_disk);
}

SUITE(NULL, NULL)
