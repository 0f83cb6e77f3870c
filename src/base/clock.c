#include "base/clock.h"

#include <limits.h>
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

int dray__left_ms(int64_t deadline_ns)
{
    int64_t left = deadline_ns - dray__now();
    if (left <= 0)
        return 0;
    int64_t ms = left / DRAY__MILLISECOND + (left % DRAY__MILLISECOND != 0);
    return ms > INT_MAX ? INT_MAX : (int)ms;
}
