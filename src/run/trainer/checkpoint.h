/* Checkpoints of a run: versions that the library keeps (dray_checkpoint_save). */
#pragma once

#include "engine/trainer.h"
#include "queue/client/feed.h"
#include "run/host/host.h"
#include "run/trainer/publication.h"

/* Before anything is published or saved. */
void dray__checkpoint_open(dray__host *host);
/* Written by the trainer's ranks together, in the run's folder: checkpoints/step-N: a Hugging Face
 * checkpoint, optimizer/ (the trainer's state), dray.json, and the queue's cursor. Commits up to
 * the cursor are covered then, and the queue lets them go. With a publication, previous/ has its
 * former weights. It is NULL for step 0, which has nothing before it. feed lists the trained
 * groups; NULL for those of the steps up to this one. The newest `checkpoint.keep` and step 0 (the
 * reference) are kept. */
int dray__checkpoint_save(dray__host *host, dray__trainer *trainer,
                          const dray__publication *publication, const dray__feed *feed,
                          int64_t step, dray_error *error);
/* The step is trained, and no checkpoint is due. When the queue's journal would give them back
 * (queue.durability: journal), its rows are kept for a run that goes on from the checkpoint before.
 * Else such a run makes those samples anew, and the queue lets them go at once. */
int dray__checkpoint_pass(const dray__host *host, int64_t step, dray_error *error);
/* critic/step-N: the same of the value model, without the cursor. It is there before
 * checkpoints/step-N is, and one more is kept, so that a run goes on with both of one step. */
#define DRAY__CRITIC_FOLDER "critic"
int dray__checkpoint_critic(dray__host *host, dray__trainer *trainer, int64_t step,
                            dray_error *error);
void dray__critic_path(const char *folder, int64_t step, char *out, size_t capacity);
/* weights/step-N, for engines that update from disk; the newest two are kept. */
int dray__checkpoint_weights(dray__host *host, dray__trainer *trainer, int64_t version,
                             dray_error *error);

/* The cursor of the queue's trainer when checkpoint `step` was written, freed with dray_free; NULL
 * when there is no such checkpoint. */
int dray__checkpoint_cursor(const char *folder, int64_t step, void **out, size_t *size,
                            dray_error *error);
/* The trained groups on its card (feed.h), the caller's; NULL when it has none. */
int dray__checkpoint_feed(const char *folder, int64_t step, json_t **out, dray_error *error);
/* Where the queue's samples are that belong to checkpoint `step` (queue.durability: checkpoint). */
void dray__checkpoint_queue(const char *folder, int64_t step, char *out, size_t capacity);
