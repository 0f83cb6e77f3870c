/* The seed of a suite's random cases. */
#pragma once

#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <time.h>

/* Returns $DRAY_TEST_SEED, or a new seed at every call. Prints it, so that a failure can be
 * repeated. */
static inline uint64_t test_seed(void)
{
    const char *given = getenv("DRAY_TEST_SEED");
    struct timespec now;
    clock_gettime(CLOCK_REALTIME, &now);
    uint64_t drawn = given ? strtoull(given, NULL, 0)
                           : (uint64_t)now.tv_sec * 1000003 + (uint64_t)now.tv_nsec % 1000003;
    printf("DRAY_TEST_SEED=%llu\n", (unsigned long long)drawn);
    fflush(stdout); /* so that forked servers do not print it again */
    return drawn;
}

#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
enum { TEST_IS_SLOW = 1 }; /* a sanitizer makes a case take three to ten times as long */
#else
enum { TEST_IS_SLOW = 0 };
#endif

/* Returns the factor of the numbers of cases: $DRAY_TEST_SCALE, 0 without it. */
static inline int test_scale(void)
{
    const char *text = getenv("DRAY_TEST_SCALE");
    return text && atoi(text) > 0 ? atoi(text) : 0;
}

/* Returns whether this run needs fewer cases: a sanitizer's, or one that repeats a suite from
 * version 0 (weights/numbers.h); unless $DRAY_TEST_SCALE asks for more. */
static inline bool test_is_short(void)
{
    return (TEST_IS_SLOW || getenv("DRAY_TEST_FIRST")) && !test_scale();
}

/* Returns a number of cases: `usual` times $DRAY_TEST_SCALE; in a short run a quarter of `usual`,
 * and at least one. */
static inline int test_times(int usual)
{
    if (test_is_short())
        return (usual + 3) / 4;
    return test_scale() ? usual * test_scale() : usual;
}

/* Returns the number of cases that a suite draws: $DRAY_TEST_CASES, or `usual`. With 1 and a seed,
 * a failed case is repeated alone. */
static inline uint64_t test_cases(uint64_t usual)
{
    const char *given = getenv("DRAY_TEST_CASES");
    return given ? strtoull(given, NULL, 0) : usual;
}
