/* The time that a run's roles spent in each state between two looks, from the accounts that their
 * processes keep (trace/account.h). */
#pragma once

#include <dray/dray.h>
#include <jansson.h>
#include <stdint.h>

typedef struct dray__spent dray__spent;

/* folder is the run's. */
int dray__spent_open(const char *folder, dray__spent **out, dray_error *error);
void dray__spent_close(dray__spent *spent); /* NULL is fine */
/* Adds to `row` the time since the last look, in seconds:
 *   "time": {ROLE: {"processes": N, "cpu": S, "busy": S, "transfer": S, "wait": {CAUSE: S}}}
 *     and "starting": S for processes that were not there at the last look;
 *   "seconds": {NAME: S}, by the spans of ranks 0, without waits.
 * With row NULL it only looks. Processes that record no spans are left out. *now_ns is the end of
 * the time. */
int dray__spent_look(dray__spent *spent, json_t *row, int64_t *now_ns, dray_error *error);

/* Writes the path of the file of spans of a process of the run. */
void dray__spans_path(const char *folder, const char *label, uint32_t rank, uint32_t epoch,
                      char *out, size_t capacity);
