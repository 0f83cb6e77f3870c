/* Tests that the arithmetic of every instruction set of this machine gives the same bits as the
 * portable one. */
#include "engine/kernels/kernels.h"
#include "suite.h"

#include "base/random.h"
#include "seed.h"

#include <math.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { ROWS = 3, WIDEST = 70, CASES = 300 };

typedef struct values {
    float x[ROWS * 2 * WIDEST], y[ROWS * 2 * WIDEST], z[ROWS * 2 * WIDEST], scales[ROWS], sum, most;
} values;

static float draw(uint64_t seed, uint64_t i)
{
    double u = (double)(dray__random_u64(seed, 0, i) >> 11) / 9007199254740992.0 - 0.5;
    return (float)(i % 7 ? 8 * u : 200 * u); /* some far out, where exp is cut */
}

/* Everything once, each upon the results of those before it. */
static values compute(const dray__arithmetic *k, uint64_t seed, int64_t width)
{
    values v = {0};
    float w[2 * WIDEST];
    for (uint64_t i = 0; i < ROWS * 2 * WIDEST; i++) {
        v.x[i] = draw(seed, i);
        v.y[i] = draw(seed, i + 1000);
        w[i % (2 * WIDEST)] = draw(seed, i + 2000);
    }
    k->swiglu_backward(v.x, v.y, v.z, ROWS, width);
    k->swiglu(v.x, v.y, ROWS, width);
    k->rms_norm(v.x, w, v.y, ROWS, width, 2 * width, 2 * width, 1e-6F, v.scales);
    k->rms_norm_backward(v.x, w, v.scales, v.y, v.z, w, ROWS, width, 2 * width, 2 * width);
    k->rotate(v.y, w, w + width, width & ~1, -1);
    k->axpy(0.37F, v.y, v.z, ROWS * width);
    v.most = k->max(v.z, ROWS * width);
    v.sum = k->dot(v.y, v.z, ROWS * width) + k->exp_sum(v.y, 0.7F, v.most, v.x, width);
    return v;
}

TEST(same_bits)
{
    const dray__arithmetic *const *all = dray__arithmetic_all();
    assert_string_equal(all[0]->name, "portable");
    uint64_t first = test_seed();
    for (uint64_t i = 0; i < CASES; i++) {
        int64_t width = 1 + (int64_t)(dray__random_u64(first + i, 1, 0) % WIDEST);
        values plain = compute(all[0], first + i, width);
        assert_true(isfinite(plain.sum));
        for (uint32_t k = 1; all[k]; k++) {
            values other = compute(all[k], first + i, width);
            if (memcmp(&plain, &other, sizeof(plain)) != 0)
                fail_msg("%s differs, DRAY_TEST_SEED=%llu, width %lld", all[k]->name,
                         (unsigned long long)(first + i), (long long)width);
        }
    }
}

SUITE(NULL, NULL)
