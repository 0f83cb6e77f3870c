/* The prompts that the partition of a step holds. A partition holds all of its step's prompts in
 * their order. The exception is a run that goes on from a checkpoint of a schedule whose steps
 * train complete groups first: there, groups of several steps were trained already, and are not
 * made again. The supervisor writes these down at the start (feed.json in the run's folder),
 * because only the supervisor knows the queue's state. The driver and the role that replaces lost
 * samples read the file. The trainer adds the groups that it trains, and puts them into its
 * checkpoints.
 *
 * A group is known by its number among the prompts of its step, from 0. */
#pragma once

#include <dray/steps.h>
#include <jansson.h>

/* Partitions: "step-000007" and "eval-000007". */
#define DRAY__PARTITION_STEP "step"
enum { DRAY__PARTITION_BYTES = 32 };
void dray__partition_name(const char *kind, int64_t step, char out[DRAY__PARTITION_BYTES]);
/* Returns the step, or -1 when the name is not of a partition of that kind. */
int64_t dray__partition_step(const char *kind, const char *name);

typedef struct dray__feed dray__feed;

/* Reads the run's feed.json. Without the file, or without a folder (NULL), partitions hold all
 * groups and none is trained. rules are borrowed. */
int dray__feed_open(const dray_steps_rules *rules, const char *folder, int64_t first_step,
                    dray__feed **out, dray_error *error);
void dray__feed_close(dray__feed *feed);

/* Returns the first step whose prompts are not all trained. */
int64_t dray__feed_first(const dray__feed *feed);
/* Lists the groups that the step's partition holds, in its order, and returns their number, which
 * is below the prompts of a step. *groups is borrowed until the next call. It is NULL when all
 * groups are held, each at its own place. */
uint32_t dray__feed_groups(const dray__feed *feed, int64_t step, const uint32_t **groups);
/* Returns the group at place `at` of the step's partition. */
uint32_t dray__feed_group(const dray__feed *feed, int64_t step, uint32_t at);

/* Marks the group at place `at` of the step's partition as trained. */
int dray__feed_trained(dray__feed *feed, int64_t step, uint32_t at, dray_error *error);
/* Returns the feed's part of a checkpoint's card; NULL when out of memory. */
json_t *dray__feed_card(const dray__feed *feed);

/* Writes feed.json for a run that goes on from the checkpoint with this card (borrowed; NULL for a
 * run from nothing). Steps that the queue still has, by its state, are taken from there. */
int dray__feed_begin(const dray_steps_rules *rules, const char *folder, const json_t *card,
                     const json_t *queue_state, dray_error *error);
