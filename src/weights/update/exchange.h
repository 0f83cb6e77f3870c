/* An exchange puts a prefetched version in the place of the served one without a copy: the spare
 * chunks of physical memory that hold it are mapped at the engine's addresses, and the engine's
 * chunks become the spare ones. It is possible for chunks of the engine's GPU memory (an arena's,
 * or a region's own) that are filled by blocks of its layout. The bytes in small gaps between
 * blocks are copied. */
#pragma once

#include <dray/memory.h>
#include <dray/model.h>
#include <stdbool.h>

typedef struct dray__exchange dray__exchange;

/* Takes spare memory for the chunks of the layout's regions that can be exchanged. The regions and
 * the layout are borrowed. *out NULL: there are none, or no memory for them. */
int dray__exchange_new(const dray_layout *layout, dray_region *const *regions, dray__exchange **out,
                       dray_error *error);
/* No GPU work may use the spare memory during this call. NULL is fine. */
void dray__exchange_free(dray__exchange *exchange);
/* Returns the region of spare memory that is exchanged with region `index`. *out NULL: that region
 * is not exchanged. */
int dray__exchange_region(dray__exchange *exchange, uint32_t index, dray_region **out,
                          dray_error *error);
uint64_t dray__exchange_spare_bytes(const dray__exchange *exchange);
/* Returns the spare bytes that none of these regions needs: chunks are exchanged as a whole. */
uint64_t dray__exchange_waste_bytes(const dray__exchange *exchange);
uint64_t dray__exchange_bytes(const dray__exchange *exchange);     /* of the exchanged blocks */
const bool *dray__exchange_blocks(const dray__exchange *exchange); /* [block]: it is exchanged */
/* Returns true when the engine's chunks, and the allocations in them, are the same as when the
 * spare memory was allocated. */
bool dray__exchange_fits(dray__exchange *exchange);
/* Returns true when, besides, only these regions have exported the chunks. */
bool dray__exchange_possible(dray__exchange *exchange);
/* Exchanges the memory. A second call undoes the first. The regions' exports end. All GPU work that
 * uses the engine's memory must have ended. An error leaves everything as it was. */
int dray__exchange_swap(dray__exchange *exchange, int64_t deadline_ns, dray_error *error);
/* Makes the spare memory usable again. It may take longer than the exchange. */
int dray__exchange_settle(dray__exchange *exchange, dray_error *error);
/* Copies a piece of the engine's memory into the spare memory: from byte *at of all chunks on,
 * which is counted up. Waits for the GPU. An arena cannot be released meanwhile. Returns
 * DRAY_EAGAIN while more is left. Fails with DRAY_ESTALE when the engine's memory has changed. */
int dray__exchange_refill(dray__exchange *exchange, uint64_t *at, dray_error *error);
/* Returns true when every region of the layout is exchanged. */
bool dray__exchange_is_whole(const dray__exchange *exchange);
