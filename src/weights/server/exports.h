/* Exports: regions of a member that a reader may read one-sidedly (net/carrier.h). An export is
 * for the update of one reader, over one connection. When that update may not read any more, the
 * export is revoked: its regions are unmapped, and the connection ends. */
#pragma once

#include "base/wire.h"
#include "net/carrier.h"
#include "weights/internal.h"

typedef struct dray__export dray__export;

/* Lets a reader's update read the member's regions through `stream`, and writes their addresses and
 * keys to `out`: u32 count, and for each region of the layout u64 address, u64 bytes, blob key
 * (empty: the region cannot be read one-sidedly). Regions that *export has registered for the same
 * member are used again. Fails with DRAY_EDEAD, DRAY_ESTALE, or with DRAY_EUNSUPPORTED when the
 * keys have more than `room` bytes. */
int dray__export_give(dray__export **export, dray__stream *stream, uint64_t token, uint64_t attempt,
                      size_t room, dray__writer *out, dray_error *error);
/* Ends the update that the export was given for. Revoking that update has no effect any more. */
void dray__export_done(dray__export *export);
void dray__export_free(dray__export *export); /* NULL is fine */

/* Keeps the export from being revoked until dray__export_leave. Returns false, and keeps nothing,
 * when it is revoked already. NULL is fine. */
bool dray__export_enter(const dray__export *export);
void dray__export_leave(void);

/* Revokes the member's exports of updates older than `attempt`. UINT64_MAX: revokes all of its
 * exports, because the memory is about to be freed. Threads: any. */
void dray__exports_revoke(uint64_t token, uint64_t attempt);
