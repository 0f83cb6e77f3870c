/* src/run/engine/: the built-in program that generates. engine.c decides which version of the
 * weights makes the next samples, intake.c fetches it and puts it in place, engine_turns.c asks
 * whether this engine may be out for an update now, rollout.c moves rows through the sampler, and
 * calls.c lets rows call the job's tool (tool.c).
 *
 * Generation for the task `rollout`. The rows of claimed batches enter the engine's sampler. A
 * batch leaves it when each of its rows is finished or has got as many tokens as one claim may give
 * it (rollout.partial_tokens). Rows that are not finished by then stay open, and are claimed again
 * before new ones.
 *
 * With batching `closed` (rollout.batching), a batch is generated completely before the next
 * begins. Then the rows that are computed together, and so every bit of the results, depend on the
 * claims alone. With `continuous`, rows are claimed whenever there is room, while others go on. */
#pragma once

#include "engine/generator.h"
#include "run/host/host.h"

typedef struct dray__rollout dray__rollout;

/* The generator must outlive the rollout. */
int dray__rollout_open(dray__host *host, dray__generator *generator, dray__rollout **out,
                       dray_error *error);
/* Gives back the claims of rows under way. */
void dray__rollout_close(dray__rollout *rollout);

/* Returns how many rows to claim now. */
uint32_t dray__rollout_room(const dray__rollout *rollout);
/* Returns how many samples were finished so far. */
uint64_t dray__rollout_finished(const dray__rollout *rollout);
/* Returns whether rows are under way. */
bool dray__rollout_busy(const dray__rollout *rollout);
/* Is called when the generator's weights are those of `version`. Rows under way go on with them. */
void dray__rollout_renew(dray__rollout *rollout, int64_t version);

/* The following are called on all ranks. */

/* Adds the rows of a batch of the step. The batch must exist until its rows have left the
 * sampler. */
int dray__rollout_take(dray__rollout *rollout, dray_batch *batch, int64_t step, dray_error *error);
/* Samples one token for each row. Rank 0 sets the outputs of batches that leave; with batching
 * `continuous` it also commits and frees them. */
int dray__rollout_turn(dray__rollout *rollout, dray_error *error);
/* Calls dray__rollout_turn until no row is under way. */
int dray__rollout_drain(dray__rollout *rollout, dray_error *error);
/* Commits the tokens that rows under way have got so far and removes these rows. They stay open,
 * and are claimed again before new ones. For batching `continuous`. */
int dray__rollout_cut(dray__rollout *rollout, dray_error *error);
/* Removes all rows under way and gives them back as they were claimed. For batching
 * `continuous`. */
void dray__rollout_drop(dray__rollout *rollout);

/* Restarts all rows under way from the state in which they were claimed. For batching
 * `continuous`. */
int dray__rollout_restart(dray__rollout *rollout, dray_error *error);

/* Returns the number of each row's stream of random numbers, malloc'ed. Every sample has a stream
 * of its own, by step and slot (less than 2^24); so does a sample that replaces a lost one. */
uint64_t *dray__rollout_streams(const dray_batch *batch, int64_t step);
