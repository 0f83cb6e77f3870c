/* Which prompts the partition of a step holds. All of the step's, in their order, but for a run
 * that goes on from a checkpoint of a schedule whose steps train what is complete first: there,
 * groups of several steps were trained already, and are not made again. The supervisor writes down
 * at the start which ones (feed.json in the run's folder), as it alone knows what the queue still
 * has; the driver and what replaces lost samples read it; the trainer adds what it trains, and puts
 * that into its checkpoints.
 *
 * A group is known by its number among the prompts of its step, from 0. */
#pragma once

#include <dray/steps.h>
#include <jansson.h>

/* Partitions: "step-000007" and "eval-000007". */
#define DRAY__PARTITION_STEP "step"
enum { DRAY__PARTITION_BYTES = 32 };
void dray__partition_name(const char *kind, int64_t step, char out[DRAY__PARTITION_BYTES]);
/* -1: not a partition of that kind. */
int64_t dray__partition_step(const char *kind, const char *name);

typedef struct dray__feed dray__feed;

/* Reads the run's feed.json; without one, or a folder (NULL), everything is held and nothing was
 * trained. rules: borrowed. */
int dray__feed_open(const dray_steps_rules *rules, const char *folder, int64_t first_step,
                    dray__feed **out, dray_error *error);
void dray__feed_close(dray__feed *feed);

/* The first step whose prompts are not all trained. */
int64_t dray__feed_first(const dray__feed *feed);
/* The groups that the step's partition holds, in its order; returns how many, all of them below the
 * prompts of a step. *groups: borrowed until the next call; NULL: all, each at its own place. */
uint32_t dray__feed_groups(const dray__feed *feed, int64_t step, const uint32_t **groups);
/* The group that is at place `at` of the step's partition. */
uint32_t dray__feed_group(const dray__feed *feed, int64_t step, uint32_t at);

/* The group at place `at` of the step's partition is trained. */
int dray__feed_trained(dray__feed *feed, int64_t step, uint32_t at, dray_error *error);
/* What a checkpoint says of it; NULL: out of memory. */
json_t *dray__feed_card(const dray__feed *feed);

/* Writes feed.json for a run that goes on from the checkpoint whose card is `card` (borrowed; NULL:
 * from nothing): what of it the queue still has, by its state, is taken from there. */
int dray__feed_begin(const dray_steps_rules *rules, const char *folder, const json_t *card,
                     const json_t *queue_state, dray_error *error);
