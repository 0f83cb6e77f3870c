/* The rules of a trainer's steps (dray/steps.h) that the library and the built-in programs share,
 * as pure functions. */
#pragma once

#include "queue/client/feed.h"

#include <dray/steps.h>
#include <stdbool.h>

/* Returns the oldest, or newest, version that the step's samples may have. */
int64_t dray__rules_oldest(const dray_steps_rules *rules, int64_t step);
int64_t dray__rules_newest(const dray_steps_rules *rules, int64_t step);
/* dray__rules_consume makes the claim drop samples that are too old for the step.
 * dray__rules_leave_old makes it leave in place all but those of the newest version. */
void dray__rules_consume(const dray_steps_rules *rules, int64_t step, dray_claim_options *claim);
void dray__rules_leave_old(dray_claim_options *claim);

/* For steps that take complete groups first. groups returns the number of rows to claim now, in
 * whole groups: at most `most`, of the `left` that the step still takes. bind does the same for a
 * step that must have some rows of the newest version, and has `old` rows of older ones.
 * newest_only returns true when the step may take no more older ones. */
uint32_t dray__rules_groups(const dray_steps_rules *rules, uint32_t most, uint32_t left);
uint32_t dray__rules_bind(const dray_steps_rules *rules, int64_t step, uint32_t old, uint32_t most,
                          uint32_t left);
bool dray__rules_newest_only(const dray_steps_rules *rules, int64_t step, uint32_t old);

/* Returns 0, or DRAY_EINTERNAL when rows have versions that the step may not have. */
int dray__rules_check(const dray_steps_rules *rules, int64_t step, const dray_batch *batch,
                      dray_error *error);
/* Returns how many rows are of older versions than the newest one that the step may have. */
uint32_t dray__rules_count_old(int64_t step, const dray_batch *batch);
/* Marks the batch's groups as trained. */
int dray__feed_take(dray__feed *feed, const dray_steps_rules *rules, const dray_batch *batch,
                    dray_error *error);
