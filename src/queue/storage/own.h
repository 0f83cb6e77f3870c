/* Private, writable mappings of chunks: a page is copied before it is written to, so that no other
 * process sees the new bytes. Any thread may call. */
#pragma once

#include "queue/storage/storage.h"

/* Maps the bytes at `at` of the chunk's mapping, until dray_own_free. `of` is the batch that keeps
 * the chunk unchanged; dray__owned_leave is called before it ends. Returns NULL when the bytes
 * cannot be mapped. */
void *dray__own(dray__keeper_link *link, dray__mapping *mapping, const void *at, uint64_t bytes,
                const void *of);
/* Call before the batch's chunks may change. Copies, in place, the pages of its mappings that are
 * still the chunk's. */
void dray__owned_leave(const void *of);
