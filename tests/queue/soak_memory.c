/* A thousand rounds of mixed shapes, for queues of several sizes. */
#include "queue/memory.h"

static void test_rounds(void **state)
{
    (void)state;
    const char *given = getenv("DRAY_TEST_SEED");
    uint64_t seed = given ? strtoull(given, NULL, 0) : (uint64_t)dray__now();
    printf("seed %llu\n", (unsigned long long)seed);
    fflush(stdout); /* servers are forks */
    for (uint64_t capacity = 4 * MIB; capacity <= 256 * MIB; capacity *= 8)
        memory_rounds(capacity, 1000, seed + capacity);
}

int main(void)
{
    const struct CMUnitTest tests[] = {cmocka_unit_test(test_rounds)};
    return cmocka_run_group_tests(tests, NULL, NULL);
}
