/* What data servers let readers read one-sidedly (net/carrier.h): the registered regions of a
 * member, for the update of one reader, over one connection. Revoked when that update may not read
 * any more: the regions are unmapped, and the connection is over. */
#pragma once

#include "base/wire.h"
#include "net/carrier.h"
#include "weights/internal.h"

typedef struct dray__export dray__export;

/* Lets a reader's update read the member's regions through `stream`, and puts what it needs for
 * that: u32 count, of each region of the layout u64 address, u64 bytes, a blob: its key (empty:
 * this one is not read so). Regions that *export has registered for the same member stay so.
 * DRAY_EDEAD, DRAY_ESTALE; DRAY_EUNSUPPORTED: its keys have more than `room` bytes. */
int dray__export_give(dray__export **export, dray__stream *stream, uint64_t token, uint64_t attempt,
                      size_t room, dray__writer *out, dray_error *error);
/* The update that it was given for is over: it revokes nothing any more. */
void dray__export_done(dray__export *export);
void dray__export_free(dray__export *export); /* NULL is fine */

/* Holds revocation off while the connection works; false: it is revoked. NULL is fine. */
bool dray__export_enter(const dray__export *export);
void dray__export_leave(void);

/* Takes from updates older than `attempt` what they were given; UINT64_MAX: from all that ever
 * were: the memory goes away. Any thread. */
void dray__exports_revoke(uint64_t token, uint64_t attempt);
