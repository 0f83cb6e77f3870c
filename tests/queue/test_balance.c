/* Compares the balancer with all divisions of small sets, and with the bounds of large ones. */
#include "base/random.h"
#include "queue/table/balance.h"
#include "seed.h"
#include "suite.h"

#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <time.h>

static uint64_t seed, draws;

static uint32_t draw(uint32_t below)
{
    return (uint32_t)(dray__random_u64(seed, 1, draws++) % below);
}

static uint64_t fullest(const uint64_t *costs, uint32_t count, uint32_t bins, const uint32_t *of)
{
    uint64_t sums[64] = {0}, most = 0;
    for (uint32_t i = 0; i < count; i++) {
        assert_true(of[i] < bins);
        sums[of[i]] += costs[i];
        most = sums[of[i]] > most ? sums[of[i]] : most;
    }
    return most;
}

static uint64_t best(const uint64_t *costs, uint32_t count, uint32_t bins)
{
    uint32_t of[8] = {0};
    uint64_t least = UINT64_MAX;
    for (;;) {
        uint64_t most = fullest(costs, count, bins, of);
        least = most < least ? most : least;
        uint32_t i = 0;
        while (i < count && ++of[i] == bins)
            of[i++] = 0;
        if (i == count)
            return least;
    }
}

TEST(test_balance)
{
    for (int round = 0; round < 3000; round++) {
        bool small = round % 3 == 0;
        uint32_t count = 1 + draw(small ? 7 : 300), bins = 1 + draw(small ? 3 : 32), of[300];
        uint64_t costs[300], sum = 0, largest = 0;
        uint32_t items[64] = {0}, empty = 0;
        for (uint32_t i = 0; i < count; i++) {
            sum += costs[i] = draw(4) ? draw(1000) : 0;
            largest = costs[i] > largest ? costs[i] : largest;
        }
        assert_int_equal(dray__balance(costs, count, bins, of, NULL), DRAY_OK);
        uint64_t most = fullest(costs, count, bins, of);
        for (uint32_t i = 0; i < count; i++)
            items[of[i]]++;
        for (uint32_t b = 0; b < bins; b++)
            empty += !items[b];
        assert_int_equal(empty, count < bins ? bins - count : 0);
        assert_true(most <= sum / bins + largest + 1);
        if (small) /* the method is no worse than 4/3 - 1/(3 bins) times the best */
            assert_true(most * 3 <= best(costs, count, bins) * 4 + 3);
    }
}

TEST(test_pack)
{
    for (int round = 0; round < 3000; round++) {
        uint32_t count = draw(200), of[200], bins, limit = draw(2) ? 1 + draw(9) : 0;
        uint64_t costs[200], sums[200] = {0}, cap = draw(3) ? 500 + draw(500) : 0;
        uint32_t items[200] = {0};
        for (uint32_t i = 0; i < count; i++)
            costs[i] = draw(501);
        assert_int_equal(dray__pack(costs, count, cap, limit, of, &bins, NULL), DRAY_OK);
        for (uint32_t i = 0; i < count; i++) {
            assert_true(of[i] < bins);
            sums[of[i]] += costs[i];
            items[of[i]]++;
        }
        for (uint32_t b = 0; b < bins; b++)
            assert_true(items[b] && (!cap || sums[b] <= cap) && (!limit || items[b] <= limit));
        for (uint32_t b = 1; b < bins && cap && !limit; b++) /* no two of them would fit in one */
            assert_true(sums[b - 1] + sums[b] > cap || bins < 2);
    }
}

int main(void)
{
    seed = test_seed();
    return suite_run(NULL, NULL);
}
