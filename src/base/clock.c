#include "base/clock.h"

#include <dray/dray.h>
#include <errno.h>
#include <limits.h>
#include <pthread.h>
#include <stdatomic.h>
#include <time.h>

int64_t dray__now(void)
{
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (int64_t)t.tv_sec * DRAY__SECOND + t.tv_nsec;
}

int64_t dray__deadline(int64_t timeout_ns)
{
    int64_t now = dray__now();
    if (timeout_ns <= 0)
        return now;
    return timeout_ns > INT64_MAX - now ? INT64_MAX : now + timeout_ns;
}

uint64_t dray__left(int64_t deadline_ns)
{
    int64_t left = deadline_ns - dray__now();
    return left > 0 ? (uint64_t)left : 0;
}

int dray__left_ms(int64_t deadline_ns)
{
    int64_t left = deadline_ns - dray__now();
    if (left <= 0)
        return 0;
    int64_t ms = left / DRAY__MILLISECOND + (left % DRAY__MILLISECOND != 0);
    return ms > INT_MAX ? INT_MAX : (int)ms;
}

/* ---- waiting --------------------------------------------------------------------------------- */

static _Atomic(dray_interrupt_fn) asked;
static _Atomic(pthread_t) asking; /* the thread that set the interrupt function */

void dray_set_interrupt(dray_interrupt_fn ask)
{
    atomic_store(&asked, NULL);
    atomic_store(&asking, pthread_self());
    atomic_store(&asked, ask);
}

static dray_interrupt_fn mine(void)
{
    dray_interrupt_fn ask = atomic_load_explicit(&asked, memory_order_acquire);
    return ask && pthread_equal(atomic_load(&asking), pthread_self()) ? ask : NULL;
}

bool dray__interrupted(void)
{
    dray_interrupt_fn ask = mine();
    return ask && ask() != 0;
}

int dray__wait(struct pollfd *fds, nfds_t count, int64_t deadline_ns)
{
    for (;;) {
        int left = dray__left_ms(deadline_ns);
        int ready = poll(fds, count, mine() && left > DRAY__SLICE_MS ? DRAY__SLICE_MS : left);
        if (ready > 0 || (ready < 0 && errno != EINTR))
            return ready;
        if (!dray__left_ms(deadline_ns) || dray__interrupted())
            return 0;
    }
}
