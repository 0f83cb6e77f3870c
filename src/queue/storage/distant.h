/* Reading ranges of bytes that keepers of other hosts hold, through their data servers
 * (net/cells.h): many ranges a request, many requests under way, from several hosts at
 * once. */
#pragma once

#include "net/stream.h"
#include "queue/storage/backend.h"

typedef struct dray__distant dray__distant;

/* Asks where a home's data server is: "tcp:ADDRESS:PORT". DRAY_EGONE: it is dead, and its bytes are
 * lost. */
typedef int (*dray__distant_find)(void *user, uint32_t home, char *endpoint, size_t size,
                                  dray_error *error);

/* keys and user: borrowed until free. */
int dray__distant_new(const dray__stream_keys *keys, dray__distant_find find, void *user,
                      dray__distant **out, dray_error *error);
void dray__distant_free(dray__distant *distant); /* NULL is fine */
/* Fills the ranges, or sets them `lost`: their home is dead, or has not got them. A connection that
 * breaks is made again until the deadline. DRAY_ETIMEDOUT says whom it waited for; no further bytes
 * arrive after it. */
int dray__distant_get(dray__distant *distant, dray__range *ranges, uint32_t count,
                      int64_t deadline_ns, dray_error *error);
