/* What an update in progress has brought already, so that others who need the same may take it from
 * here: of each block of the destination, the rectangles that landed and were found right, each
 * with two checksums, that of the publisher's bits and that of the bits that lie here. Written by
 * the update, read by the data server's thread. */
#pragma once

#include "weights/internal.h"

typedef struct dray__shares dray__shares;

/* run: names the update among those of its cohort. layout and regions are borrowed until free. */
int dray__shares_new(uint64_t run, const dray_layout *layout, dray_region *const *regions,
                     dray__shares **out, dray_error *error);
void dray__shares_free(dray__shares *shares); /* NULL is fine */
/* This rectangle will come. What nobody said will come may never be here. Before it is shared. */
bool dray__shares_expect(dray__shares *shares, uint32_t block, const dray__rect *rect);
/* false: out of memory; nobody will find it. */
bool dray__shares_enter(dray__shares *shares, uint32_t block, const dray__rect *rect,
                        uint64_t source_sum, uint64_t sum);

uint64_t dray__shares_run(const dray__shares *shares);
dray_region *dray__shares_region(const dray__shares *shares, uint32_t index);
dray_region *const *dray__shares_regions(const dray__shares *shares);
/* The sums of a rectangle that lies in the block. *cut: it came in rectangles that do not add up to
 * this one; its sums are those of what lies here, if dray__shares_intact says so afterwards.
 * DRAY_EAGAIN: not all of it is here yet; DRAY_EUNSUPPORTED: it will not come, or it is cut and the
 * publisher's bits were others. */
int dray__shares_find(dray__shares *shares, uint32_t block, const dray__rect *rect, bool *cut,
                      uint64_t *source_sum, uint64_t *sum);
/* Is all that came of the rectangle, and in one piece with a part of it, as it came? DRAY_ESTALE.
 */
int dray__shares_intact(dray__shares *shares, const dray_layout *layout, uint32_t block,
                        const dray__rect *rect, dray_error *error);
