/* Reads ranges of bytes that keepers of other hosts hold, through their data servers (net/cells.h):
 * many ranges in a request, and many requests under way, to several hosts at once. */
#pragma once

#include "net/stream.h"
#include "queue/storage/backend.h"

typedef struct dray__distant dray__distant;

/* Finds the address of a keeper's data server: "tcp:ADDRESS:PORT". Returns 0, or DRAY_EGONE when
 * the keeper is dead, and its bytes are lost. */
typedef int (*dray__distant_find)(void *user, uint32_t keeper, char *endpoint, size_t size,
                                  dray_error *error);

/* keys and user are borrowed until dray__distant_free. */
int dray__distant_new(const dray__stream_keys *keys, dray__distant_find find, void *user,
                      dray__distant **out, dray_error *error);
void dray__distant_free(dray__distant *distant); /* NULL is fine */
/* Fills the ranges. A range whose keeper is dead, or does not have it, is set `lost`. Broken
 * connections are made again until the deadline. The message of DRAY_ETIMEDOUT names the keeper
 * that did not answer; after it no further bytes arrive. */
int dray__distant_get(dray__distant *distant, dray__range *ranges, uint32_t count,
                      int64_t deadline_ns, dray_error *error);
