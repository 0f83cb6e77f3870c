/* Reports: JSON objects that any session posts (dray_report_post) and any session may watch. The
 * coordinator keeps the last 8 MiB, so a watcher that keeps asking from its cursor loses nothing in
 * practice. A watcher that loses reports gets their number. */
#pragma once

#include "control/channel.h"

#include <jansson.h>

#define DRAY__REPORTS_NOW UINT64_MAX /* a cursor for reports that are posted from now on */

/* Returns the next reports of `kind` (NULL for every kind) from *cursor on (0 for the oldest that
 * is kept), as an array of objects, in the order in which they were posted. Waits for the first
 * one. Each object has the posted members and "kind", "member", "name", "time_ns" (since 1970).
 * When reports were dropped before this watcher asked for them, the first object is {"kind":
 * "lost", "lost": N}. *out is a new array; *cursor is advanced. Returns 0, or DRAY_ETIMEDOUT when
 * none came. */
int dray__reports_watch(dray__channel *channel, const char *kind, uint64_t *cursor,
                        int64_t deadline_ns, json_t **out, dray_error *error);
