/* src/run/engine/: the built-in program that generates. engine.c decides which version of the
 * weights makes the next samples, intake.c fetches it and puts it in place, engine_turns.c asks
 * whether this engine may be out for an update now, rollout.c moves rows through the sampler, and
 * calls.c lets rows call the job's tool (tool.c).
 *
 * Generation for the task `rollout`: the rows of claimed batches enter the engine's sampler, and
 * leave it as the outputs of their batch when all of them are finished, or have got as many tokens
 * as a claim may give them (rollout.partial_tokens). In the second case the rows that are not
 * finished are left open, and are claimed again before new ones.
 *
 * Batching `closed` (rollout.batching): a batch is made from begin to end, and then the next. The
 * rows that are computed together, and with them every bit, depend on the claims alone.
 * `continuous`: rows are claimed whenever there is room, while others go on. */
#pragma once

#include "engine/generator.h"
#include "run/host/host.h"

typedef struct dray__rollout dray__rollout;

/* The generator must outlive it. */
int dray__rollout_open(dray__host *host, dray__generator *generator, dray__rollout **out,
                       dray_error *error);
/* Gives back the rows under way. */
void dray__rollout_close(dray__rollout *rollout);

/* Rows to claim now. */
uint32_t dray__rollout_room(const dray__rollout *rollout);
/* Samples that were finished so far. */
uint64_t dray__rollout_finished(const dray__rollout *rollout);
/* Rows are under way. */
bool dray__rollout_busy(const dray__rollout *rollout);
/* The generator's weights are those of `version` now: rows under way go on with them. */
void dray__rollout_renew(dray__rollout *rollout, int64_t version);

/* The following are called on all ranks. */

/* Adds the rows of a batch of the step: the batch must live until they have left. */
int dray__rollout_take(dray__rollout *rollout, dray_batch *batch, int64_t step, dray_error *error);
/* A token for each row. Rank 0 sets the outputs of batches that leave; with batching continuous it
 * commits and frees them, too. */
int dray__rollout_turn(dray__rollout *rollout, dray_error *error);
/* Turns until no row is under way. */
int dray__rollout_drain(dray__rollout *rollout, dray_error *error);
/* Puts all rows that are under way back as far as they are: they stay open, and are claimed again
 * before new ones. With batching continuous. */
int dray__rollout_cut(dray__rollout *rollout, dray_error *error);

/* Begins all rows that are under way anew, as they were when they were claimed. With batching
 * continuous. */
int dray__rollout_restart(dray__rollout *rollout, dray_error *error);

/* Each sample draws from a stream of its own, named by step and slot (less than 2^24); so does one
 * that takes the place of a lost one. malloc'ed. */
uint64_t *dray__rollout_streams(const dray_batch *batch, int64_t step);
