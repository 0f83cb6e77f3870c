/* For programs whose tests have a coordinator and a keeper each, or share one of each. */
#pragma once

#include "queue/fixture.h"

static queue_fixture f;

static inline int up(void **state)
{
    (void)state;
    fixture_up(&f);
    return 0;
}

static inline int down(void **state)
{
    (void)state;
    fixture_down(&f);
    return 0;
}
