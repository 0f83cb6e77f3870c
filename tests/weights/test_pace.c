/* Tests the times at which the launches of a program are due when it is spread over a time. */
#include "seed.h"
#include "suite.h"
#include "weights/program/program.h"

#include <stdint.h>
#include <stdlib.h>

static uint64_t draw(uint64_t below)
{
    return (uint64_t)random() % below;
}

/* The first at once, each at its time and none before, evenly, and the last one well before the
 * end; who looks late finds all that are due. */
TEST(test_schedule)
{
    srandom((unsigned)test_seed());
    for (int i = 0; i < 2000; i++) {
        uint64_t count = 1 + draw(5000);
        int64_t within = 1 + (int64_t)draw(UINT64_C(10000000000));
        uint64_t index = draw(count);
        int64_t at = dray__pace_at(count, within, index);
        assert_int_equal(dray__pace_due(count, within, 0), 1);
        assert_int_equal(dray__pace_due(count, within, -1), 1);
        assert_int_equal(dray__pace_due(count, within, within), count);
        assert_int_equal(dray__pace_due(count, within, INT64_MAX), count);
        double even = (double)within * (double)index / (double)count;
        assert_true((double)at <= even + 1 && (double)at >= even * 0.93 - 1);
        if (within < 1000000)
            continue; /* launches that are less than some ns apart */
        assert_int_equal(dray__pace_due(count, within, within / 16 * 15 + 16), count);
        assert_true(dray__pace_due(count, within, at) > index);
        assert_true(index == 0 || dray__pace_due(count, within, at - 3) <= index);
    }
}

/* Launches are small, and few. */
TEST(test_sizes)
{
    const uint64_t MiB = 1 << 20, GiB = 1 << 30;
    assert_int_equal(dray__pace_bytes(0), 64 << 10);
    assert_int_equal(dray__pace_bytes(MiB), 64 << 10);
    assert_int_equal(dray__pace_bytes(GiB), 4 * MiB);
    assert_int_equal(dray__pace_bytes(16 * GiB), 32 * MiB);
}

SUITE(NULL, NULL)
