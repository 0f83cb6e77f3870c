/* A producer stopped after its put, superseded and continued: 10,000 times. */
#include "queue/stopped.h"

TEST_WITHIN(test_superseded_producer, up, down)
{
    supersede(10000);
}

SUITE(NULL, NULL)
