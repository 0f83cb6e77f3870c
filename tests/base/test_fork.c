/* Tests that a process may fork while its threads allocate: tests do so everywhere. Under the
 * address sanitizer that needs tests/house/fork_locks.c. */
#include "base/clock.h"
#include "suite.h"

#include <pthread.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stdlib.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <unistd.h>

enum { THREADS = 3, FORKS = 60, SIZES = 64, LARGEST = 1 << 16 };

static atomic_bool over;

/* Allocates many sizes, and frees them: most of an allocator's locks are one for each size. */
static void allocate_all(void)
{
    void *held[SIZES];
    for (size_t i = 0; i < SIZES; i++)
        held[i] = malloc(LARGEST / (i + 1));
    for (size_t i = 0; i < SIZES; i++)
        free(held[i]);
}

static void *allocating(void *user)
{
    while (!over)
        allocate_all();
    return user;
}

static bool ends(pid_t pid)
{
    int64_t deadline = dray__deadline(30 * DRAY__SECOND);
    int status;
    while (waitpid(pid, &status, WNOHANG) == 0) {
        if (dray__now() > deadline) {
            kill(pid, SIGKILL);
            waitpid(pid, &status, 0);
            return false;
        }
        usleep(200);
    }
    return WIFEXITED(status) && WEXITSTATUS(status) == 0;
}

TEST(test_children_allocate)
{
#ifdef __SANITIZE_THREAD__
    skip(); /* gcc 12's leaves locks to the child, too, and takes a preloaded allocator for a race
             */
#endif
    pthread_t threads[THREADS];
    for (size_t i = 0; i < THREADS; i++)
        assert_int_equal(pthread_create(&threads[i], NULL, allocating, NULL), 0);
    bool all_end = true;
    for (int i = 0; i < FORKS && all_end; i++) {
        pid_t pid = fork();
        assert_true(pid >= 0);
        if (pid == 0) {
            prctl(PR_SET_PDEATHSIG, SIGKILL);
            allocate_all();
            _exit(0);
        }
        all_end = ends(pid);
    }
    over = true;
    for (size_t i = 0; i < THREADS; i++)
        pthread_join(threads[i], NULL);
    assert_true(all_end);
}

SUITE(NULL, NULL)
