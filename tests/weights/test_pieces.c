/* Tests ownership with random members whose blocks overlap. The oracle finds for every element the
 * member that holds it first. */
#include "seed.h"
#include "suite.h"
#include "weights/internal.h"

#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

enum { MEMBERS = 4, SIDE = 7, ELEMENTS = SIDE * SIDE * SIDE };

static int below(int n)
{
    return (int)(random() % n);
}

/* A layout with `blocks` random blocks of two 3-D tensors (or scalars). */
static dray_layout *random_layout(int blocks)
{
    static const int64_t shape[3] = {SIDE, SIDE, SIDE};
    dray_layout *layout;
    dray_region_info region = {.kind = DRAY_REGION_HOST, .bytes = 1 << 20, .name = "r"};
    uint32_t index;
    assert_int_equal(dray_layout_new(&layout, NULL), 0);
    assert_int_equal(dray_layout_add_region(layout, &region, &index, NULL), 0);
    assert_int_equal(dray_layout_add_tensor(layout, "a", DRAY_U8, 3, shape, &index, NULL), 0);
    assert_int_equal(dray_layout_add_tensor(layout, "b", DRAY_U8, 3, shape, &index, NULL), 0);
    for (int i = 0; i < blocks; i++) {
        int64_t start[3], extent[3];
        for (int d = 0; d < 3; d++) {
            start[d] = below(SIDE);
            extent[d] = 1 + below(SIDE - (int)start[d]);
        }
        assert_int_equal(dray_layout_add_dense(layout, (uint32_t)below(2), 0, start, extent,
                                               (uint64_t)i * ELEMENTS, NULL),
                         0);
    }
    return layout;
}

/* Calls mark for every element of the rectangle. */
static void each(const dray__rect *rect, int *grid, int value)
{
    for (int64_t x = 0; x < rect->extent[0]; x++)
        for (int64_t y = 0; y < rect->extent[1]; y++)
            for (int64_t z = 0; z < rect->extent[2]; z++)
                grid[((rect->start[0] + x) * SIDE + rect->start[1] + y) * SIDE + rect->start[2] +
                     z] += value;
}

static void check_member(const dray__holder *members, uint32_t self, int owned[2][ELEMENTS])
{
    dray__pieces pieces;
    const dray_layout *layout = members[self].layout;
    assert_int_equal(dray__pieces_make(members, self, &pieces, NULL), 0);
    for (uint32_t b = 0; b < dray_layout_block_count(layout); b++) {
        int grid[ELEMENTS] = {0}, expected[ELEMENTS] = {0};
        uint32_t tensor = dray_layout_block(layout, b)->tensor;
        dray__rect rect = dray__rect_of(layout, b);
        each(&rect, expected, 1);
        for (uint32_t p = pieces.first[b]; p < pieces.first[b + 1]; p++) {
            assert_int_equal(pieces.items[p].block, b);
            each(&pieces.items[p].rect, grid, 1);
            if (pieces.items[p].owned)
                each(&pieces.items[p].rect, owned[tensor], 1 + (int)self * 1000 + (int)b * 10);
        }
        assert_memory_equal(grid, expected, sizeof grid);
    }
    dray__pieces_free(&pieces);
}

TEST(test_first_holder_owns)
{
    unsigned seed = (unsigned)test_seed();
    srandom(seed);
    for (int round = 0; round < 200; round++) {
        dray_layout *layouts[MEMBERS];
        dray__holder members[MEMBERS];
        int owned[2][ELEMENTS] = {0}, expected[2][ELEMENTS] = {0};
        for (uint32_t m = 0; m < MEMBERS; m++) {
            layouts[m] = random_layout(below(6));
            members[m] = (dray__holder){layouts[m], NULL};
            for (uint32_t b = 0; b < dray_layout_block_count(layouts[m]); b++) {
                int grid[ELEMENTS] = {0};
                dray__rect rect = dray__rect_of(layouts[m], b);
                uint32_t tensor = dray_layout_block(layouts[m], b)->tensor;
                each(&rect, grid, 1);
                for (int i = 0; i < ELEMENTS; i++)
                    if (grid[i] && !expected[tensor][i])
                        expected[tensor][i] = 1 + (int)m * 1000 + (int)b * 10;
            }
        }
        for (uint32_t m = 0; m < MEMBERS; m++)
            check_member(members, m, owned);
        assert_memory_equal(owned, expected, sizeof owned);
        for (uint32_t m = 0; m < MEMBERS; m++)
            dray_layout_free(layouts[m]);
    }
}

/* Slices cover a rectangle once, within the limit. */
TEST(test_slices)
{
    for (int round = 0; round < 2000; round++) {
        dray__rect whole = {{0}, {1, 1, 1, 1}}, slice;
        for (int d = 0; d < 3; d++) {
            whole.start[d] = below(SIDE);
            whole.extent[d] = 1 + below(SIDE - (int)whole.start[d]);
        }
        uint64_t bytes = 1u << below(4), limit = 1 + (uint64_t)below(500);
        int grid[ELEMENTS] = {0}, expected[ELEMENTS] = {0};
        each(&whole, expected, 1);
        dray__slicer slicer;
        dray__slicer_start(&slicer, &whole, bytes, limit);
        for (; dray__slicer_peek(&slicer, &slice); dray__slicer_next(&slicer)) {
            uint64_t elements = dray__rect_elements(&slice);
            assert_true(elements == 1 || elements * bytes <= limit);
            each(&slice, grid, 1);
        }
        assert_memory_equal(grid, expected, sizeof grid);
    }
}

SUITE(NULL, NULL)
