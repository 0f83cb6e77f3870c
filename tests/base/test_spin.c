/* Tests how polling adapts (base/spin.h). After failed polls, twice as many are left out each time,
 * up to a bound. After a successful one, the next is not left out. A poll during which the process
 * was taken off the CPU counts as a failed one. */
#include "base/clock.h"
#include "base/spin.h"
#include "suite.h"

/* How many looks are left out before the next one. */
static uint32_t left_out(dray__spin *spin)
{
    uint32_t count = 0;
    while (!dray__spin_begin(spin, INT64_MAX))
        count++;
    return count;
}

TEST(test_rests)
{
    dray__spin spin = {0};
    uint32_t expected = 0;
    for (int i = 0; i < 20; i++) {
        assert_int_equal(left_out(&spin), expected);
        dray__spin_end(&spin, 0);
        if (expected < DRAY__SPIN_REST)
            expected = 2 * expected + 1;
    }
    left_out(&spin);
    dray__spin_end(&spin, spin.last_ns + DRAY__SPIN_GAP_NS / 2);
    assert_int_equal(left_out(&spin), 0);
    dray__spin_end(&spin, spin.last_ns + 2 * DRAY__SPIN_GAP_NS); /* it was put off the CPU */
    assert_int_equal(left_out(&spin), 1);
}

TEST(test_ends)
{
    dray__spin spin = {0};
    assert_false(dray__spin_begin(&spin, dray__now())); /* no time for it */
    assert_true(dray__spin_begin(&spin, INT64_MAX));
    int64_t begin = dray__now();
    while (dray__spin_again(&spin))
        assert_true(dray__now() - begin < DRAY__SECOND);
}

SUITE(NULL, NULL)
