#include "store/deadline.h"

#include "base/clock.h"

static _Thread_local int64_t until;

void dray__store_until(int64_t deadline_ns)
{
    until = deadline_ns;
}

int64_t dray__store_deadline(void)
{
    return until ? until : INT64_MAX;
}

bool dray__store_is_late(void)
{
    return until && !dray__left(until);
}
