/* Blocks of objects that were fetched: the last few in memory, and more of them in files, within a
 * bound that all processes of this user on this machine keep together (DRAY_CACHE_BYTES, in
 * DRAY_CACHE). A block that is fetched by one thread is waited for by the others. */
#pragma once

#include <dray/dray.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stdint.h>

/* Fills `data` with the whole block. */
typedef int (*dray__block_fetch_fn)(void *user, uint64_t block, void *data, uint64_t bytes,
                                    dray_error *error);

/* Copies `bytes` from `from` on, of a block of `size` bytes, to `out`; fetches it where it is not
 * kept. key: of the object with this content. */
int dray__blocks_read(uint64_t key, uint64_t block, uint64_t size, uint64_t from, uint64_t bytes,
                      void *out, dray__block_fetch_fn fetch, void *user, dray_error *error);
