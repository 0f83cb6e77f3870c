/* Bytes of chunks as memory of this process alone: mapped so that what is written is copied first,
 * and nobody else sees it. Any thread may call. */
#pragma once

#include "queue/storage/storage.h"

/* Maps the bytes at `at` of the chunk's mapping, until dray_own_free. `of` stands for who keeps the
 * chunk as it is, and calls dray__owned_leave before it ends. NULL: they cannot be mapped. */
void *dray__own(dray__keeper_link *link, dray__mapping *mapping, const void *at, uint64_t bytes,
                const void *of);
/* The chunk may change from now on: what is left of the mappings of `of` is copied, in place. */
void dray__owned_leave(const void *of);
