/* The trainer's end of the weights: which versions engines can read, and from where.
 *
 * When trainer and engine alternate (schedule.h: one step open), the parameters themselves are
 * published without a copy, and the next write waits for the readers. Otherwise each version is
 * copied when it is published, and the newest ones stay readable. Then a sample that was lost, or
 * an engine that was restarted, can still get exactly the version that its step needs while the
 * trainer is ahead. Each copy has its own publisher: version v is in copy v % kept. */
#pragma once

#include "engine/trainer.h"
#include "run/host/host.h"

#include <dray/weights.h>

typedef struct dray__publication dray__publication;

/* Writes the name by which publishers and subscribers of a version find each other. */
enum { DRAY__MODEL_NAME_BYTES = 32 };
void dray__publication_name(const dray__job *job, int64_t version,
                            char out[DRAY__MODEL_NAME_BYTES]);

/* The prefix of the policy's names, of which there may be several. Other models have one name, and
 * only their newest version is kept. */
#define DRAY__POLICY "policy"

/* All of these are called on all ranks of the trainer. model is the name of its versions; phase is
 * the publication's name in reports. Both are borrowed. */
int dray__publication_open(dray__host *host, dray__trainer *trainer, const char *model,
                           const char *phase, dray__publication **out, dray_error *error);
void dray__publication_close(dray__publication *publication);
/* Lets engines read the trainer's parameters as `version`. */
int dray__publication_put(dray__publication *publication, int64_t version, dray_error *error);
/* Call it before the parameters of `version`, the last one that was published, change. */
int dray__publication_release(dray__publication *publication, int64_t version, dray_error *error);
/* Gets the part `previous` of a checkpoint. The checkpoint of step k has v_k; its part `previous`
 * has the version before, if samples of the next step are generated with that. Returns false when
 * there is none. */
bool dray__publication_previous(const dray__publication *publication, int64_t step,
                                dray_checkpoint_part *out);
/* Publishes the previous version again, from checkpoint `directory` of step `step`. */
int dray__publication_restore(dray__publication *publication, int64_t step, const char *directory,
                              dray_error *error);
/* Writes the path of the previous version in the checkpoint. */
void dray__publication_path(const char *directory, char *out, size_t capacity);
