/* Compares the part of the published weights that a group holds, as counted from layouts, with a
 * count of every single element. Names through aliases count, and weights that cannot be counted
 * are refused. */
#include "base/random.h"
#include "seed.h"
#include "suite.h"
#include "weights/registry/coverage.h"

#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

enum { SIDE = 9, CELLS = SIDE * SIDE * SIDE * SIDE, MOST_RANKS = 5 };

static uint64_t seed, stream;

static uint64_t draw(uint64_t below)
{
    static uint64_t count;
    return dray__random_u64(seed, stream, count++) % below;
}

static dray__packed_layout pack(dray_layout *layout)
{
    void *data;
    size_t size;
    assert_int_equal(dray_layout_pack(layout, &data, &size, NULL), 0);
    dray_layout_free(layout);
    return (dray__packed_layout){data, size};
}

/* A layout of one tensor with random blocks; their cells are marked. */
static dray__packed_layout random_rank(uint32_t ndim, uint8_t *marks)
{
    dray_layout *layout;
    int64_t shape[DRAY_MAX_DIMS] = {SIDE, SIDE, SIDE, SIDE};
    uint32_t tensor, region, blocks = (uint32_t)draw(7);
    dray_region_info info = {.kind = DRAY_REGION_HOST, .bytes = 1 << 20};
    assert_int_equal(dray_layout_new(&layout, NULL), 0);
    assert_int_equal(dray_layout_add_region(layout, &info, &region, NULL), 0);
    assert_int_equal(dray_layout_add_tensor(layout, "w", DRAY_U8, ndim, shape, &tensor, NULL), 0);
    for (uint32_t b = 0; b < blocks; b++) {
        int64_t start[DRAY_MAX_DIMS] = {0}, extent[DRAY_MAX_DIMS] = {1, 1, 1, 1};
        for (uint32_t d = 0; d < ndim; d++) {
            start[d] = (int64_t)draw(SIDE);
            extent[d] = 1 + (int64_t)draw((uint64_t)(SIDE - start[d]));
            if (draw(3) == 0)
                start[d] = 0, extent[d] = SIDE;
        }
        assert_int_equal(
            dray_layout_add_dense(layout, tensor, region, start, extent, (uint64_t)b * CELLS, NULL),
            0);
        for (int64_t i = 0; i < CELLS; i++) {
            int64_t at[4] = {i / SIDE / SIDE / SIDE, i / SIDE / SIDE % SIDE, i / SIDE % SIDE,
                             i % SIDE};
            bool inside = true;
            for (uint32_t d = 0; d < DRAY_MAX_DIMS; d++)
                inside &= d < ndim ? at[d] >= start[d] && at[d] < start[d] + extent[d] : at[d] == 0;
            marks[i] |= inside;
        }
    }
    return pack(layout);
}

static uint64_t count(const uint8_t *marks)
{
    uint64_t n = 0;
    for (int i = 0; i < CELLS; i++)
        n += marks[i];
    return n;
}

TEST(test_random_ranks)
{
    for (int n = 0; n < 300; n++) {
        static uint8_t held[CELLS], covered[CELLS];
        dray__packed_layout sources[MOST_RANKS], ranks[MOST_RANKS];
        uint32_t ndim = 1 + (uint32_t)draw(4), a = 1 + (uint32_t)draw(MOST_RANKS),
                 b = 1 + (uint32_t)draw(MOST_RANKS);
        memset(held, 0, sizeof held);
        memset(covered, 0, sizeof covered);
        for (uint32_t i = 0; i < a; i++)
            sources[i] = random_rank(ndim, held);
        for (uint32_t i = 0; i < b; i++)
            ranks[i] = random_rank(ndim, covered);
        dray__coverage c = {0};
        dray_error error;
        assert_int_equal(dray__coverage_of_layouts(sources, a, ranks, b, &c, &error), 0);
        assert_int_equal(c.count, 1);
        assert_string_equal(c.items[0].name, "w");
        assert_int_equal(c.items[0].held, count(held));
        assert_int_equal(c.items[0].covered, count(covered));
        dray__coverage_free(&c);
        for (uint32_t i = 0; i < a; i++)
            free((void *)sources[i].data);
        for (uint32_t i = 0; i < b; i++)
            free((void *)ranks[i].data);
    }
}

/* tied: the head is another name of the embedding; else a tensor of its own. */
static dray__packed_layout model(bool tied, int32_t head_dtype)
{
    dray_layout *layout;
    const int64_t shape[2] = {6, 4}, zero[2] = {0, 0};
    dray_region_info info = {.kind = DRAY_REGION_HOST, .bytes = 4096};
    uint32_t embed, head, region;
    assert_int_equal(dray_layout_new(&layout, NULL), 0);
    assert_int_equal(dray_layout_add_region(layout, &info, &region, NULL), 0);
    assert_int_equal(dray_layout_add_tensor(layout, "embed", DRAY_F32, 2, shape, &embed, NULL), 0);
    assert_int_equal(dray_layout_add_dense(layout, embed, region, zero, shape, 0, NULL), 0);
    if (tied) {
        assert_int_equal(dray_layout_add_alias(layout, "head", embed, &head, NULL), 0);
    } else {
        assert_int_equal(
            dray_layout_add_tensor(layout, "head", (dray_dtype)head_dtype, 2, shape, &head, NULL),
            0);
        assert_int_equal(dray_layout_add_dense(layout, head, region, zero, shape, 1024, NULL), 0);
    }
    return pack(layout);
}

/* An engine with a head of its own, fed by a tied trainer: both are the embedding. */
TEST(test_tied_names)
{
    dray__packed_layout tied = model(true, 0), own = model(false, DRAY_F32);
    dray__coverage c = {0};
    assert_int_equal(dray__coverage_of_layouts(&tied, 1, &own, 1, &c, NULL), 0);
    assert_int_equal(c.count, 1);
    assert_string_equal(c.items[0].name, "embed");
    assert_int_equal(c.items[0].held, 24);
    assert_int_equal(c.items[0].covered, 24);
    dray__coverage_free(&c);
    assert_int_equal(dray__coverage_of_layouts(&own, 1, &tied, 1, &c, NULL), 0);
    assert_int_equal(c.count, 2);
    assert_int_equal(c.items[0].covered, 24);
    assert_int_equal(c.items[1].covered, 0); /* the tied engine reads the embedding alone */
    dray__coverage_free(&c);
    /* a checkpoint that has the head under its other name only */
    dray__sums sums = {0};
    assert_true(dray__sums_add(&sums, "head", DRAY_F32, 24, 1));
    assert_int_equal(dray__coverage_of_sums(&sums, &tied, 1, &c, NULL), 0);
    assert_int_equal(c.count, 1);
    assert_string_equal(c.items[0].name, "head");
    assert_int_equal(c.items[0].covered, 24);
    dray__coverage_free(&c);
    dray__sums_free(&sums);
    free((void *)tied.data);
    free((void *)own.data);
}

/* Announces the two tensors with these sums, to a group that has read the embedding. */
static int compare_two(dray__coverage *c, uint64_t embed, uint64_t head, dray_error *error)
{
    dray__sums announced = {0}, found = {0};
    dray__compared compared;
    assert_true(dray__sums_add(&announced, "embed", DRAY_F32, 24, embed));
    assert_true(dray__sums_add(&announced, "head", DRAY_F32, 24, head));
    assert_true(dray__sums_add(&found, "embed", DRAY_F32, 24, embed));
    int rc = dray__coverage_compare(c, &announced, &found, "the test", &compared, error);
    dray__sums_free(&announced);
    dray__sums_free(&found);
    return rc;
}

/* A trainer's two tensors are one for a tied engine: they must have the same values. */
TEST(test_tied_values)
{
    dray__packed_layout tied = model(true, 0), own = model(false, DRAY_F32);
    dray__coverage c = {0};
    dray_error error;
    assert_int_equal(dray__coverage_of_layouts(&own, 1, &tied, 1, &c, NULL), 0);
    for (int i = 0; i < 2; i++) {
        assert_int_equal(compare_two(&c, 7, 7, &error), 0);
        assert_int_equal(compare_two(&c, 7, 8, &error), DRAY_ECHECKSUM);
        assert_string_equal(error.message, "tensors embed and head are one in the group's memory, "
                                           "and have different values in the test");
    }
    dray__coverage_free(&c);
    free((void *)tied.data);
    free((void *)own.data);
}

TEST(test_several_dtypes)
{
    dray__packed_layout two[2] = {model(false, DRAY_F32), model(false, DRAY_BF16)};
    dray__coverage c = {0};
    assert_int_equal(dray__coverage_of_layouts(two, 2, two, 1, &c, NULL), 0);
    assert_int_equal(c.count, 2);
    assert_true(dray__coverage_whole(&c.items[0]));
    assert_false(dray__coverage_whole(&c.items[1])); /* "head": in f32 and in bf16 */
    dray__coverage_free(&c);
    two[0].size--;
    dray_error error;
    assert_int_equal(dray__coverage_of_layouts(two, 2, two, 1, &c, &error), DRAY_EFORMAT);
    two[0].size++;
    free((void *)two[0].data);
    free((void *)two[1].data);
}

/* Thousands of blocks, each across all the others, in four dimensions: not worth the coordinator's
 * time. */
TEST(test_confusion_is_refused)
{
    enum { BLOCKS = 3000, WIDE = 1 << 14 };
    dray_layout *layout;
    int64_t shape[4] = {WIDE, WIDE, WIDE, WIDE};
    dray_region_info info = {.kind = DRAY_REGION_FILE, .bytes = UINT64_C(1) << 62, .name = "/f"};
    uint32_t tensor, region;
    assert_int_equal(dray_layout_new(&layout, NULL), 0);
    assert_int_equal(dray_layout_add_region(layout, &info, &region, NULL), 0);
    assert_int_equal(dray_layout_add_tensor(layout, "w", DRAY_U8, 4, shape, &tensor, NULL), 0);
    for (int64_t i = 0; i < BLOCKS; i++) {
        int64_t start[4] = {i, i * 7 % 3001, i * 11 % 3001, i * 13 % 3001}, extent[4];
        for (int d = 0; d < 4; d++)
            extent[d] = WIDE / 2;
        dray_block block = {.tensor = tensor, .region = region};
        memcpy(block.start, start, sizeof start);
        memcpy(block.extent, extent, sizeof extent);
        assert_int_equal(dray_layout_add_block(layout, &block, NULL), 0);
    }
    dray__packed_layout packed = pack(layout);
    dray__coverage c = {0};
    dray_error error;
    assert_int_equal(dray__coverage_of_layouts(&packed, 1, &packed, 1, &c, &error),
                     DRAY_EUNSUPPORTED);
    assert_non_null(strstr(error.message, "tensor w"));
    free((void *)packed.data);
}

int main(void)
{
    seed = test_seed();
    return suite_run(NULL, NULL);
}
