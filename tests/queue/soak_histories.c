/* A million operations of several processes. */
#include "queue/histories.h"

TEST_WITHIN(test_histories, up, down)
{
    run_histories(1000000);
}

SUITE(NULL, NULL)
