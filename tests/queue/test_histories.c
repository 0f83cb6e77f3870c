#include "queue/histories.h"

TEST_WITHIN(test_histories, up, down)
{
    run_histories((uint64_t)test_times(20000));
}

SUITE(NULL, NULL)
