/* The seed of a suite's random cases. */
#pragma once

#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <time.h>

/* $DRAY_TEST_SEED, or a new one at every call. Prints it, so that a failure can be repeated. */
static inline uint64_t test_seed(void)
{
    const char *given = getenv("DRAY_TEST_SEED");
    struct timespec now;
    clock_gettime(CLOCK_REALTIME, &now);
    uint64_t drawn = given ? strtoull(given, NULL, 0)
                           : (uint64_t)now.tv_sec * 1000003 + (uint64_t)now.tv_nsec % 1000003;
    printf("DRAY_TEST_SEED=%llu\n", (unsigned long long)drawn);
    fflush(stdout); /* servers are forks */
    return drawn;
}

/* How many times as many cases: $DRAY_TEST_SCALE, 1 without it. */
static inline int test_scale(void)
{
    const char *text = getenv("DRAY_TEST_SCALE");
    int scale = text ? atoi(text) : 1;
    return scale > 0 ? scale : 1;
}

/* How many cases a suite draws: $DRAY_TEST_CASES, or `usual`. With 1 and a seed, a failed case is
 * repeated alone. */
static inline uint64_t test_cases(uint64_t usual)
{
    const char *given = getenv("DRAY_TEST_CASES");
    return given ? strtoull(given, NULL, 0) : usual;
}
