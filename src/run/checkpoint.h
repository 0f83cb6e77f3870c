/* Checkpoints of a run: folders that are whole or not there. */
#ifndef DRAY_RUN_CHECKPOINT_H
#define DRAY_RUN_CHECKPOINT_H

#include "engine/trainer.h"
#include "run/host.h"

/* Written by the trainer's ranks together, in the run's folder:
 * checkpoints/step-N: a Hugging Face checkpoint, optimizer/ (the trainer's state) and dray.json.
 * The newest `checkpoint.keep` and step 0 (the reference) are kept. */
int dray__checkpoint_save(dray__host *host, dray__trainer *trainer, int64_t step,
                          dray_error *error);
/* Forgets the optimiser's state, keeping the parameters. */
int dray__checkpoint_reset(dray__host *host, dray__trainer *trainer, dray_error *error);
/* weights/version-N, for engines that update from disk; the newest two are kept. */
int dray__checkpoint_weights(dray__host *host, dray__trainer *trainer, int64_t version,
                             dray_error *error);

/* Where the queue's samples are that belong to checkpoint `step` (queue.durability: checkpoint). */
void dray__checkpoint_queue(const char *folder, int64_t step, char *out, size_t capacity);

/* The newest whole checkpoint at or before step `most`. DRAY_ENOENT: there is none. */
int dray__checkpoint_newest(const char *folder, int64_t most, int64_t *step, dray_error *error);
/* Removes a folder and all that is in it; that it is not there is fine. */
int dray__remove_tree(const char *path, dray_error *error);

#endif
