/* A thousand rounds of mixed shapes, for queues of several sizes. */
#include "queue/memory.h"
#include "seed.h"

TEST(test_rounds)
{
    uint64_t seed = test_seed();
    for (uint64_t capacity = 4 * MIB; capacity <= 256 * MIB; capacity *= 8)
        memory_rounds(capacity, 1000, seed + capacity);
}

SUITE(NULL, NULL)
