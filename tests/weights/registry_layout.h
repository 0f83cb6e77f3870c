/* The layout of the members in the registry's tests. */
#pragma once

#include "base/wire.h"
#include "suite.h"

#include <dray/model.h>
#include <stdlib.h>

/* Puts a packed layout of elements [from, to) of "w", which has 20. */
static inline void put_layout(dray__writer *w, int64_t from, int64_t to)
{
    dray_layout *layout;
    const int64_t shape[1] = {20};
    dray_region_info region = {.kind = DRAY_REGION_HOST, .bytes = 80};
    uint32_t at, tensor;
    void *data;
    size_t size;
    assert_int_equal(dray_layout_new(&layout, NULL), 0);
    assert_int_equal(dray_layout_add_region(layout, &region, &at, NULL), 0);
    assert_int_equal(dray_layout_add_tensor(layout, "w", DRAY_F32, 1, shape, &tensor, NULL), 0);
    dray_block block = {
        .tensor = tensor, .region = at, .start = {from}, .extent = {to - from}, .stride = {4}};
    if (to > from)
        assert_int_equal(dray_layout_add_block(layout, &block, NULL), 0);
    assert_int_equal(dray_layout_pack(layout, &data, &size, NULL), 0);
    dray__put_blob(w, data, size);
    free(data);
    dray_layout_free(layout);
}
