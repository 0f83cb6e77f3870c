/* Checkpoints of a run: versions that the library keeps (dray_checkpoint_save). */
#pragma once

#include "engine/trainer.h"
#include "queue/client/feed.h"
#include "run/host/host.h"
#include "run/trainer/publication.h"

/* Call it before anything is published or saved. */
void dray__checkpoint_open(dray__host *host);
/* Writes checkpoints/step-N in the run's folder, by all ranks of the trainer together: a Hugging
 * Face checkpoint, optimizer/ (the trainer's state), dray.json, and the queue's cursor. It covers
 * the commits up to the cursor, and the queue drops them. With a publication, previous/ has the
 * weights of the version before. publication is NULL for step 0, which has no such version. feed
 * lists the trained groups; NULL for those of the steps up to this one. The newest
 * `checkpoint.keep` and step 0 (the reference) are kept. */
int dray__checkpoint_save(dray__host *host, dray__trainer *trainer,
                          const dray__publication *publication, const dray__feed *feed,
                          int64_t step, dray_error *error);
/* Is called when a step is trained and no checkpoint is due. With queue.durability `journal`, the
 * step's rows are kept for a run that resumes from the previous checkpoint. Otherwise such a run
 * generates these samples again, and the queue drops them at once. */
int dray__checkpoint_pass(const dray__host *host, int64_t step, dray_error *error);
/* Writes critic/step-N, the same for the value model, without the cursor. It is written before
 * checkpoints/step-N, and one more is kept, so that a run always finds both of one step. */
#define DRAY__CRITIC_FOLDER "critic"
int dray__checkpoint_critic(dray__host *host, dray__trainer *trainer, int64_t step,
                            dray_error *error);
void dray__critic_path(const char *folder, int64_t step, char *out, size_t capacity);
/* Writes weights/step-N, for engines that update from disk. The newest two are kept. */
int dray__checkpoint_weights(dray__host *host, dray__trainer *trainer, int64_t version,
                             dray_error *error);

/* Gets the cursor of the queue's trainer when checkpoint `step` was written; free it with
 * dray_free. It is NULL when there is no such checkpoint. */
int dray__checkpoint_cursor(const char *folder, int64_t step, void **out, size_t *size,
                            dray_error *error);
/* Gets a new list of the trained groups in the checkpoint's dray.json (feed.h); NULL when it has
 * none. */
int dray__checkpoint_feed(const char *folder, int64_t step, json_t **out, dray_error *error);
/* Writes the path of the queue's samples that belong to checkpoint `step` (queue.durability:
 * checkpoint). */
void dray__checkpoint_queue(const char *folder, int64_t step, char *out, size_t capacity);
