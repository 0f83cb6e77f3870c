/* What the files of src/plan share. */
#ifndef DRAY_PLAN_PLANNER_H
#define DRAY_PLAN_PLANNER_H

#include "plan/index.h"
#include "plan/rects.h"

typedef struct dray__copies {
    dray_copy *items;
    size_t count, capacity;
} dray__copies;

dray_copy *dray__copies_next(dray__copies *copies); /* NULL: out of memory */

struct dray_plan {
    dray__copies copies;
    uint32_t source_count;
    uint64_t *source_bytes;
    int32_t *source_link; /* dray_link */
    uint64_t link_bytes[DRAY_LINK_COUNT];
    uint64_t total_bytes, largest;
};

/* DRAY_EOVERLAP when two blocks of the layout, or one with itself, write the same bytes. */
int dray__plan_check_memory(const dray_plan_member *destination, dray_error *error);

/* Joins the copies from index `from` on, all of one destination block, where two of them are one
 * rectangle in both memories. */
void dray__plan_merge(dray__copies *copies, size_t from);
/* Source, then source region, then source offset, then destination. */
int dray__plan_sort(dray__copies *copies, dray_error *error);

/* "trainer-3" or "member 3". */
const char *dray__member_text(const dray_plan_member *member, char *out, size_t capacity);

#endif
