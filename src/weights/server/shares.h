/* The rectangles that an update in progress has received, so that other members of its cohort can
 * read them from this process. For each block of the destination, the list has the rectangles that
 * are in place and were verified, each with two checksums: of the publisher's bits, and of the bits
 * in this process's memory. The update writes the list; the data server's thread reads it. */
#pragma once

#include "weights/internal.h"

typedef struct dray__shares dray__shares;

/* run: the number of the update, the same for all of its cohort. layout and regions are borrowed
 * until dray__shares_free. */
int dray__shares_new(uint64_t run, const dray_layout *layout, dray_region *const *regions,
                     dray__shares **out, dray_error *error);
void dray__shares_free(dray__shares *shares); /* NULL is fine */
/* Adds a rectangle that will arrive. Readers wait only for such rectangles. Call it before the list
 * is given to the data server. Returns false when out of memory. */
bool dray__shares_expect(dray__shares *shares, uint32_t block, const dray__rect *rect);
/* Adds a rectangle that has arrived. Returns false when memory runs out; then readers do not find
 * it. */
bool dray__shares_enter(dray__shares *shares, uint32_t block, const dray__rect *rect,
                        uint64_t source_sum, uint64_t sum);

uint64_t dray__shares_run(const dray__shares *shares);
dray_region *dray__shares_region(const dray__shares *shares, uint32_t index);
dray_region *const *dray__shares_regions(const dray__shares *shares);
/* Returns the sums of a rectangle of the block. *cut is true when it arrived in rectangles that do
 * not add up to this one, so that its sums have to be computed from the memory and confirmed by
 * dray__shares_intact afterwards. Returns 0, DRAY_EAGAIN while not all of it has arrived, or
 * DRAY_EUNSUPPORTED when it will not arrive, or it is cut and its bits differ from the
 * publisher's. */
int dray__shares_find(dray__shares *shares, uint32_t block, const dray__rect *rect, bool *cut,
                      uint64_t *source_sum, uint64_t *sum);
/* Checks that the memory of all rectangles that overlap with this one still has their sums. Fails
 * with DRAY_ESTALE. */
int dray__shares_intact(dray__shares *shares, const dray_layout *layout, uint32_t block,
                        const dray__rect *rect, dray_error *error);
