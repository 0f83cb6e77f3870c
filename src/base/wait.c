#include "base/wait.h"

#include "base/clock.h"

#include <dray/dray.h>
#include <errno.h>
#include <pthread.h>
#include <stdatomic.h>

static _Atomic(dray_interrupt_fn) asked;
static _Atomic(pthread_t) asking; /* the thread that set it */

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
