/* The holders of each tensor: all blocks of all sources, by tensor name. Blocks with equal
 * rectangles are adjacent. */
#pragma once

#include "base/hash.h"

#include <dray/plan.h>
#include <stdbool.h>

typedef struct dray__plan_holder {
    uint32_t source; /* index of the source */
    uint32_t tensor; /* in that source's layout: the tensor that has the blocks (never an alias) */
    const dray_block *block;
} dray__plan_holder;

struct dray_plan_index {
    const dray_plan_member *sources;
    uint32_t source_count;
    bool quants; /* a source has quantised tensors */
    dray__index names;
    const char **name; /* by position in the index */
    uint64_t name_capacity;
    uint64_t *first; /* names.count + 1: where each name's holders begin */
    dray__plan_holder *holders;
};

/* Like dray_plan_index_new. With `only`, the index has only the tensors that this layout names. */
int dray__plan_index_new(const dray_plan_member *sources, uint32_t count, const dray_layout *only,
                         dray_plan_index **out, dray_error *error);
/* Gets the holders of a name, sorted by rectangle, then source. Returns their number. */
size_t dray__plan_holders(const dray_plan_index *index, const char *name,
                          const dray__plan_holder **out);
bool dray__same_box(const dray_block *a, const dray_block *b);
