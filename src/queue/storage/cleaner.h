/* The controller's hand in a backend that is a store (backend.h): drops objects that nobody refers
 * to any more, in a thread of its own, so that a store that stands still holds nobody up. What it
 * could not drop yet it tries again; what is left when the queue ends it tries for a moment. */
#pragma once

#include "queue/storage/backend.h"

typedef struct dray__cleaner dray__cleaner;

int dray__cleaner_new(const dray__backend_kind *kind, const char *address, uint64_t space,
                      dray__cleaner **out, dray_error *error);
/* Drops everything of the space, waiting a few seconds for the store at most. NULL is fine. */
void dray__cleaner_free(dray__cleaner *cleaner);
/* The table's `drop`: key is the object's size, home always 0. */
void dray__cleaner_drop(void *cleaner, uint32_t home, uint64_t object, uint64_t size);
/* The owner is gone: drops what it wrote, but not `keep` (any order; then the cleaner's). */
void dray__cleaner_sweep(dray__cleaner *cleaner, uint32_t owner, uint64_t *keep,
                         uint32_t keep_count);
