/* A cleaner drops the objects of a store (backend.h) that no row refers to any more. It does so in
 * a thread of its own, so that a store that does not answer does not stop the controller. Drops
 * that failed are tried again. When the queue ends, the remaining ones are tried for a few seconds.
 */
#pragma once

#include "queue/storage/backend.h"

typedef struct dray__cleaner dray__cleaner;

int dray__cleaner_new(const dray__backend_kind *kind, const char *address, uint64_t space,
                      dray__cleaner **out, dray_error *error);
/* Drops all objects of the space, and waits at most a few seconds for the store. NULL is fine. */
void dray__cleaner_free(dray__cleaner *cleaner);
/* The function `drop` of a table. key is the object's size; keeper is always 0. */
void dray__cleaner_drop(void *cleaner, uint32_t keeper, uint64_t object, uint64_t size);
/* Drops the objects of an owner that is gone, except those in `keep` (in any order), which is taken
 * over. */
void dray__cleaner_sweep(dray__cleaner *cleaner, uint32_t owner, uint64_t *keep,
                         uint32_t keep_count);
