/* The holders of each tensor: all blocks of all sources, by tensor name, equal rectangles beside
 * each other. */
#pragma once

#include "base/hash.h"

#include <dray/plan.h>
#include <stdbool.h>

typedef struct dray__plan_holder {
    uint32_t source; /* of the index's sources */
    uint32_t tensor; /* of that source's layout: the one that has the blocks */
    const dray_block *block;
} dray__plan_holder;

struct dray_plan_index {
    const dray_plan_member *sources;
    uint32_t source_count;
    bool quants; /* a source has quantised tensors */
    dray__index names;
    const char **name; /* by place in the index */
    uint64_t name_capacity;
    uint64_t *first; /* names.count + 1: where each name's holders begin */
    dray__plan_holder *holders;
};

/* Like dray_plan_index_new, but with `only` not NULL of the tensors that this layout names. */
int dray__plan_index_new(const dray_plan_member *sources, uint32_t count, const dray_layout *only,
                         dray_plan_index **out, dray_error *error);
/* The holders of a name, sorted by rectangle, then source; 0 when there are none. */
size_t dray__plan_holders(const dray_plan_index *index, const char *name,
                          const dray__plan_holder **out);
bool dray__same_box(const dray_block *a, const dray_block *b);
