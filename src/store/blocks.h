/* A cache of fetched blocks of objects: the last few in memory, more in files (in DRAY_CACHE),
 * within a limit that all processes of this user on this machine share (DRAY_CACHE_BYTES). When one
 * thread fetches a block, others wait for it. */
#pragma once

#include <dray/dray.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stdint.h>

/* Fills `data` with the whole block. */
typedef int (*dray__block_fetch_fn)(void *user, uint64_t block, void *data, uint64_t bytes,
                                    dray_error *error);

/* Copies `bytes` from offset `from` of a block of `size` bytes to `out`. Fetches the block if it is
 * not in the cache. key identifies the object with this content. */
int dray__blocks_read(uint64_t key, uint64_t block, uint64_t size, uint64_t from, uint64_t bytes,
                      void *out, dray__block_fetch_fn fetch, void *user, dray_error *error);
