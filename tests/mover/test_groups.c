/* Tests the codes that the GPU's kernels give eight numbers of bf16 at once, without a division
 * each. They are those of the formats' definitions (mover/kernels/formats.h), or the kernels say
 * that the definitions must decide. */
#include "mover/cuda/cuda_groups.h"
#include "suite.h"

#include "base/random.h"
#include "seed.h"

#include <math.h>

static uint64_t seed, drawn;

static uint32_t below(uint32_t most)
{
    return (uint32_t)(dray__random_u64(seed, 7, drawn++) % most);
}

static float sign(void)
{
    return below(2) ? -1 : 1;
}

/* Returns a number for a group of magnitude `scale`. Kinds: any number; multiples and halves of
 * codes of both kinds, among them zeros of both signs; numbers far smaller; zeros; any bits. */
static float number(uint32_t kind, float scale)
{
    static const float codes[] = {0.0f, 0.25f, 0.5f, 0.75f, 1.0f, 1.25f, 1.5f, 1.75f,
                                  2.0f, 2.5f,  3.0f, 3.5f,  4.0f, 5.0f,  6.0f, 7.0f};
    float any = scale * ((float)below(20001) - 10000) / 10000;
    switch (kind) {
    case 0:
        return any;
    case 1:
        return sign() * scale * codes[below(16)];
    case 2:
        return sign() * scale * (float)below(16) / 2;
    case 3:
        return sign() * ldexpf(scale, -(int)below(140));
    case 4:
        return below(4) ? sign() * 0.0f : scale;
    default:
        return below(3) ? any : BITS_FLOAT(below(1 << 16) << 16);
    }
}

static group draw(void)
{
    group g = ZEROS;
    uint32_t kind = below(6), wide = kind == 5 ? 125 : 18;
    float scale = ldexpf(1 + (float)below(1000) / 1000, (int)below(2 * wide) - (int)wide);
    for (uint32_t i = 0; i < 8; i++)
        place(&g, i, narrow(FLOAT_BITS(number(kind, scale)), BF16), 2);
    return g;
}

/* Returns NVFP4's global scale of a tensor whose largest magnitude is that of the group, or larger,
 * or, which the kernels take as well, smaller. */
static uint32_t draw_global(uint32_t most)
{
    float factor = (float)(1 + below(5000)) / (below(8) ? 1 : 1000);
    uint32_t larger_most = FLOAT_BITS(BITS_FLOAT(most) * (below(2) ? factor : 1));
    return global_scale_of(larger_most < INFINITE ? larger_most : most, BF16);
}

/* Compares one group. Returns true if the kernels gave codes of their own. */
static bool compare(uint32_t format)
{
    group g = draw();
    extremes e = {0, 0}, one_by_one = {0, 0};
    add_extremes(&e, &g, format, BF16);
    for (uint32_t i = 0; i < 8; i++)
        add_extreme(&one_by_one, widen(pick(&g, i, 2), BF16));
    if (format != INT4_ZERO)
        one_by_one = (extremes){larger(one_by_one.up, one_by_one.down), 0};
    assert_int_equal(e.up, one_by_one.up);
    assert_int_equal(e.down, one_by_one.down);

    uint32_t as = format <= MXFP4 ? 0 : BF16, doubt, inverses[128];
    uint32_t global = format == NVFP4 ? draw_global(e.up) : 0;
    for (uint32_t i = 0; i < 128; i++)
        inverses[i] = inverse_of_nvfp4(i, global);
    format_scale s = {0, 0, 0};
    float by = pairs_scale(&s, &e, format, global, inverses);
    uint64_t codes = pairs_codes(&g, format, by, s.zero, &doubt);
    if (by == 0 || doubt)
        return false;
    defined d = define_all(g, format, BF16, e, as, global);
    if (codes != d.codes || s.stored != d.s.stored || s.zero != d.s.zero)
        fail_msg("format %u, %08x %08x %08x %08x, global %08x: codes %llx, scale %x, zero %g; by "
                 "definition %llx, %x, %g",
                 format, g.v[0], g.v[1], g.v[2], g.v[3], global, (unsigned long long)codes,
                 s.stored, (double)s.zero, (unsigned long long)d.codes, d.s.stored,
                 (double)d.s.zero);
    return true;
}

TEST(test_codes_are_those_of_the_definitions)
{
    static const uint32_t formats[] = {MXFP8, MXFP4, NVFP4, INT4, INT4_ZERO};
    const uint32_t cases = TEST_IS_SLOW ? 20000 : 60000;
    for (size_t i = 0; i < sizeof formats / sizeof *formats; i++) {
        uint32_t own = 0;
        for (uint32_t k = 0; k < cases; k++)
            own += compare(formats[i]);
        assert_true(own > cases / 2); /* else the kernels would be slow */
    }
}

/* Numbers that quotients make zero have no sign in NVFP4. */
TEST(test_tiny_numbers_are_left_to_the_definition)
{
    group g = ZEROS;
    place(&g, 0, 0x3F80, 2);
    for (uint32_t bits = 0x8001; bits < 0x9000; bits++) {
        uint32_t doubt;
        g.v[3] = bits;
        pairs_codes(&g, NVFP4, 0.7f, 0, &doubt);
        assert_int_equal(doubt & 1, bits < 0x8D80);
    }
}

/* Sums of bytes by dot products are those of the checksum. */
TEST(test_sums_of_bytes)
{
    for (uint32_t k = 0; k < 10000; k++) {
        uint32_t factors[8], v[2] = {below(UINT32_MAX), below(UINT32_MAX)};
        uint64_t wanted = 0;
        for (uint32_t i = 0; i < 8; i++) {
            factors[i] = column_factor(8 * k + i);
            wanted += (uint64_t)factors[i] * (v[i / 4] >> 8 * (i % 4) & 0xFF);
        }
        turn_factors(factors);
        turn_factors(factors + 4);
        assert_true(bytes_sum(v, factors, 2) == wanted);
    }
}

int main(void)
{
    seed = test_seed();
    return suite_run(NULL, NULL);
}
