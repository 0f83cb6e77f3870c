/* Rectangles of elements: the arithmetic of the planner. Unused dimensions have start 0, extent 1
 * (as dray_layout_add_block leaves them), so that all loops go over all dimensions. */
#ifndef DRAY_PLAN_RECTS_H
#define DRAY_PLAN_RECTS_H

#include <dray/model.h>
#include <stdbool.h>

typedef struct dray__box {
    int64_t start[DRAY_MAX_DIMS], extent[DRAY_MAX_DIMS];
} dray__box;

dray__box dray__box_of(const dray_block *block);
/* False when they have no element in common. */
bool dray__box_intersect(const dray__box *a, const dray__box *b, dray__box *out);
uint64_t dray__box_volume(const dray__box *box);
/* "[0:512, 1024:2048]" in `out` of DRAY__BOX_TEXT bytes, which it returns. */
#define DRAY__BOX_TEXT 192
char *dray__box_text(const dray__box *box, uint32_t ndim, char *out);

/* A growing list of boxes. */
typedef struct dray__boxes {
    dray__box *items;
    size_t count, capacity;
} dray__boxes;

bool dray__boxes_add(dray__boxes *boxes, const dray__box *box); /* false: out of memory */
/* Adds what is left of `whole` without `part`, which lies inside it: at most 2 · DRAY_MAX_DIMS. */
bool dray__boxes_add_rest(dray__boxes *boxes, const dray__box *whole, const dray__box *part);
void dray__boxes_free(dray__boxes *boxes);

#endif
