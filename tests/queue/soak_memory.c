/* A thousand rounds of mixed shapes, for queues of several sizes. */
#include "queue/memory.h"
#include "seed.h"

static void test_rounds(void **state)
{
    (void)state;
    uint64_t seed = test_seed();
    for (uint64_t capacity = 4 * MIB; capacity <= 256 * MIB; capacity *= 8)
        memory_rounds(capacity, 1000, seed + capacity);
}

int main(void)
{
    const struct CMUnitTest tests[] = {cmocka_unit_test(test_rounds)};
    return cmocka_run_group_tests(tests, NULL, NULL);
}
