/* The trainer's end of the weights: which versions engines can read, and where from.
 *
 * Where trainer and engine take turns (schedule.h: one step open) the parameters themselves are
 * published, and nothing is copied; the next write waits for the readers. Else each version is
 * copied when it is published, and the newest ones stay readable: a sample that was lost, or an
 * engine that is started anew, gets exactly the version again that its step needs, while the
 * trainer is ahead. Each copy has its own publisher: version v is in copy v % kept. */
#pragma once

#include "engine/trainer.h"
#include "run/host/host.h"

#include <dray/weights.h>

typedef struct dray__publication dray__publication;

/* The name under which publishers and subscribers of a version meet. */
enum { DRAY__MODEL_NAME_BYTES = 32 };
void dray__publication_name(const dray__job *job, int64_t version,
                            char out[DRAY__MODEL_NAME_BYTES]);

/* The policy's names, of which there may be several. Others have one name, and of them only the
 * newest version is kept. */
#define DRAY__POLICY "policy"

/* All of these are called on all ranks of the trainer. model is the name of its versions; phase is
 * the publication's name in reports. Both are borrowed. */
int dray__publication_open(dray__host *host, dray__trainer *trainer, const char *model,
                           const char *phase, dray__publication **out, dray_error *error);
void dray__publication_close(dray__publication *publication);
/* The trainer's parameters are `version`: engines may read them. */
int dray__publication_put(dray__publication *publication, int64_t version, dray_error *error);
/* Before the parameters of `version`, the one published last, change. */
int dray__publication_release(dray__publication *publication, int64_t version, dray_error *error);
/* Checkpoints of step k hold v_k; the version before it, if samples of the next step are made by
 * that, is their part `previous`. false: there is none. */
bool dray__publication_previous(const dray__publication *publication, int64_t step,
                                dray_checkpoint_part *out);
/* From checkpoint `directory`, of step `step`: publishes it again. */
int dray__publication_restore(dray__publication *publication, int64_t step, const char *directory,
                              dray_error *error);
/* Where the checkpoint has it. */
void dray__publication_path(const char *directory, char *out, size_t capacity);
