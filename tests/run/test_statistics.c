/* Compares the figures that a study computes from runs with other ways to compute them: intervals
 * with all possible resamples, and curves with their own definition. */
#include "run/study/statistics.h"
#include "suite.h"

#include "base/random.h"

#include <math.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

static void near(double value, double expected, double within)
{
    if (!(fabs(value - expected) <= within))
        fail_msg("%.9g, expected %.9g", value, expected);
}

/* The share of all n^n resamples whose statistic is below `value`, plus half of those at it. */
static double share_below(const double *values, const double *below, uint32_t n, double value)
{
    uint32_t all = 1, index[8] = {0};
    double under = 0;
    for (uint32_t i = 0; i < n; i++)
        all *= n;
    for (uint32_t k = 0; k < all; k++) {
        double a = 0, b = 0;
        for (uint32_t i = 0; i < n; i++) {
            a += values[index[i]];
            b += below ? below[index[i]] : 1;
        }
        double got = a / b;
        under += fabs(got - value) < 1e-12 ? 0.5 : got < value;
        for (uint32_t i = 0; i < n && ++index[i] == n; i++)
            index[i] = 0;
    }
    return under / all;
}

/* Against every resample that there is, not against our own random numbers. */
TEST(intervals)
{
    for (uint64_t seed = 1; seed <= 20; seed++) {
        double values[6], below[6];
        for (uint32_t i = 0; i < 6; i++) {
            values[i] = dray__random_normal(seed, 1, i) + 3;
            below[i] = dray__random_unit(seed, 2, i) + 0.5;
        }
        const double *const kinds[] = {NULL, below};
        for (uint32_t k = 0; k < 2; k++) {
            dray__interval got;
            assert_int_equal(dray__bootstrap(values, kinds[k], 6, DRAY__RESAMPLES, &got, NULL), 0);
            assert_int_equal(got.n, 6);
            assert_true(got.low < got.mean && got.mean < got.high);
            double low = share_below(values, kinds[k], 6, got.low);
            double high = share_below(values, kinds[k], 6, got.high);
            /* five deviations of a share of 10,000, and the weight of one of 46,656 */
            if (fabs(low - 0.025) > 0.009 || fabs(high - 0.975) > 0.009)
                fail_msg("seed %d: the interval holds %.4f to %.4f of all resamples", (int)seed,
                         low, high);
        }
    }
}

TEST(means)
{
    const double values[] = {1, 2, 3, 6}, below[] = {2, 2, 1, 1};
    dray__interval got, again;
    assert_int_equal(dray__bootstrap(values, NULL, 4, 1000, &got, NULL), 0);
    near(got.mean, 3, 0);
    assert_int_equal(dray__bootstrap(values, NULL, 4, 1000, &again, NULL), 0);
    assert_true(got.n == again.n && got.mean == again.mean && got.low == again.low &&
                got.high == again.high);
    assert_int_equal(dray__bootstrap(values, below, 4, 1000, &got, NULL), 0);
    near(got.mean, 2, 0); /* of the means, not the mean of ratios: 3 */
    assert_int_equal(dray__bootstrap(values, NULL, 1, 1000, &got, NULL), 0);
    assert_true(got.n == 1 && got.mean == 1 && isnan(got.low) && isnan(got.high));
    const double same[] = {0.5, 0.5, 0.5};
    assert_int_equal(dray__bootstrap(same, NULL, 3, 1000, &got, NULL), 0);
    assert_true(got.low == 0.5 && got.high == 0.5);
}

TEST(curves)
{
    const dray__point points[] = {{0, 0.1}, {10, 0.5}, {20, 0.4}, {40, 1}};
    near(dray__curve_at(points, 4, 0), 0.1, 0);
    near(dray__curve_at(points, 4, 5), 0.3, 1e-12);
    near(dray__curve_at(points, 4, 15), 0.45, 1e-12);
    near(dray__curve_at(points, 4, 40), 1, 0);
    assert_true(isnan(dray__curve_at(points, 4, 40.5)));
    assert_true(isnan(dray__curve_at(points, 4, -1)));
    assert_true(isnan(dray__curve_at(points, 0, 0)));
    near(dray__curve_reach(points, 4, 0.3), 5, 1e-12);
    near(dray__curve_reach(points, 4, 0.5), 10, 0);
    near(dray__curve_reach(points, 4, 0.7), 30, 1e-12);
    near(dray__curve_reach(points, 4, 0.05), 0, 0);
    assert_true(isnan(dray__curve_reach(points, 4, 1.01)));
}

SUITE(NULL, NULL)
