#include "engine/pace.h"

#include "base/clock.h"
#include "base/random.h"

#include <errno.h>
#include <math.h>
#include <time.h>

/* DRAWS: the first numbers of a stream that tokens do not use. */
enum { PLACE_BITS = 24, DRAWS = 1 << 20 };

/* A sleep that ended later than this was delayed by something else (the process was stopped), and
 * is not compensated. */
#define LATE_MOST (20 * DRAY__MILLISECOND)

uint64_t dray__pace_length(const dray__pace *p, uint64_t stream)
{
    uint64_t place = stream & ((1U << PLACE_BITS) - 1), batch = stream >> PLACE_BITS;
    uint64_t group = batch << PLACE_BITS | place / p->group;
    double own = dray__random_normal(p->seed, stream, DRAWS),
           shared = dray__random_normal(~p->seed, group, DRAWS),
           normal = sqrt(p->correlation) * shared + sqrt(1 - p->correlation) * own;
    /* variance of the logarithm of the log-normal. */
    double variance = log(1 + p->variation * p->variation);
    double length = p->tokens * exp(sqrt(variance) * normal - variance / 2);
    if (dray__random_unit(p->seed, stream, 4 * DRAWS) < p->tail_share)
        length *= p->tail;
    length = round(length);
    return length < 1 ? 1 : length > UINT32_MAX ? UINT32_MAX : (uint64_t)length;
}

void dray__pace_spend(double seconds)
{
    static _Thread_local int64_t late;
    int64_t begin = dray__now(), wanted = (int64_t)(seconds * (double)DRAY__SECOND);
    int64_t end = begin + wanted - late;
    if (wanted <= 0)
        return;
    struct timespec until = {end / DRAY__SECOND, end % DRAY__SECOND};
    while (end > begin && clock_nanosleep(CLOCK_MONOTONIC, TIMER_ABSTIME, &until, NULL) == EINTR) {
    }
    late = dray__now() - end;
    if (late > LATE_MOST)
        late = 0;
}
