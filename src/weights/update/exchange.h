/* What was prefetched takes the place of what is served by an exchange of physical memory: spare
 * chunks get the addresses of the engine's, so that nothing is copied and addresses stay. It is
 * possible for chunks of the engine's GPU memory (an arena's, or a region's own) that the blocks of
 * its layout fill, but for a few gaps whose bytes are copied. */
#pragma once

#include <dray/memory.h>
#include <dray/model.h>
#include <stdbool.h>

typedef struct dray__exchange dray__exchange;

/* Takes spare memory for the chunks of the layout's regions that can be exchanged. The regions and
 * the layout are borrowed. *out NULL: there are none, or no memory for them. */
int dray__exchange_new(const dray_layout *layout, dray_region *const *regions, dray__exchange **out,
                       dray_error *error);
/* Nothing may run on the spare memory. NULL is fine. */
void dray__exchange_free(dray__exchange *exchange);
/* A region of the spare memory in the place of region `index`; *out NULL: that one is not
 * exchanged. */
int dray__exchange_region(dray__exchange *exchange, uint32_t index, dray_region **out,
                          dray_error *error);
uint64_t dray__exchange_spare_bytes(const dray__exchange *exchange);
/* Of those that no region of ours needs, because chunks are exchanged as a whole. */
uint64_t dray__exchange_waste_bytes(const dray__exchange *exchange);
uint64_t dray__exchange_bytes(const dray__exchange *exchange);     /* of the blocks */
const bool *dray__exchange_blocks(const dray__exchange *exchange); /* which blocks those are */
/* Are the chunks still those that spare memory was taken for, with the same allocations in them? */
bool dray__exchange_fits(dray__exchange *exchange);
/* And exported by nobody but these regions? */
bool dray__exchange_possible(dray__exchange *exchange);
/* Exchanges; a second time: back. The regions' exports end. Whoever uses the engine's memory on a
 * GPU must have ended. After an error all is as it was. */
int dray__exchange_swap(dray__exchange *exchange, int64_t deadline_ns, dray_error *error);
/* Makes the spare memory usable again. It may take longer than the exchange. */
int dray__exchange_settle(dray__exchange *exchange, dray_error *error);
