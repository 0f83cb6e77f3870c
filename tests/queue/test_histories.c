#include "queue/histories.h"

TEST_WITHIN(test_histories, up, down)
{
    run_histories(20000 * (uint64_t)test_scale());
}

SUITE(NULL, NULL)
