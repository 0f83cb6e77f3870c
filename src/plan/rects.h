/* Rectangles of elements: the arithmetic of the planner. Unused dimensions have start 0, extent 1
 * (as dray_layout_add_block leaves them), so that all loops go over all dimensions. */
#pragma once

#include <dray/model.h>
#include <stdbool.h>

typedef struct dray__rect {
    int64_t start[DRAY_MAX_DIMS], extent[DRAY_MAX_DIMS];
} dray__rect;

dray__rect dray__block_rect(const dray_block *block);
/* Gets the intersection of two rectangles. Returns false when it is empty. */
bool dray__rect_cross(const dray__rect *a, const dray__rect *b, dray__rect *out);
uint64_t dray__rect_elements(const dray__rect *box);
/* Writes "[0:512, 1024:2048]" to `out` of DRAY__RECT_TEXT bytes, and returns it. */
#define DRAY__RECT_TEXT 192
char *dray__rect_text(const dray__rect *box, uint32_t ndim, char *out);

/* A growing list of boxes. */
typedef struct dray__rects {
    dray__rect *items;
    size_t count;
    uint64_t capacity;
} dray__rects;

/* Returns false when out of memory. */
bool dray__rects_add(dray__rects *boxes, const dray__rect *box);
enum { DRAY__RECT_SIDES = 2 * DRAY_MAX_DIMS };
/* Cuts `whole` without `part`, which is inside it, into rectangles. Returns their number. */
uint32_t dray__rect_rest(const dray__rect *whole, const dray__rect *part,
                         dray__rect out[DRAY__RECT_SIDES]);
/* Adds those rectangles. Returns false when out of memory. */
bool dray__rects_add_rest(dray__rects *boxes, const dray__rect *whole, const dray__rect *part);
/* Removes the elements of `taken` from all boxes. Returns false when out of memory. */
bool dray__rects_take(dray__rects *boxes, const dray__rect *taken);
void dray__rects_free(dray__rects *boxes);
