/* Training with the reference engine: parameters sharded over a group, cut as FSDP2 (fully_shard)
 * cuts them.
 *
 * Each rank owns the Shard(0) piece of every parameter (float32) in one SHARED region laid out by
 * dray_layout_fsdp, with its AdamW moments beside it. For computing, the ranks gather the
 * parameters, each takes its part of the rows of a batch, and the summed gradients are scattered
 * back to the pieces. All of the model is gathered at once, not a layer at a time: each rank keeps
 * whole parameters and whole gradients from open to close.
 *
 * All ranks of the group call the same functions with the same inputs; results that are handed out
 * are the same on all ranks. A trainer belongs to one thread at a time. Functions that compute
 * block; a dead peer or a passed deadline ends them with the group's error (DRAY_EDEAD,
 * DRAY_ETIMEDOUT), after which the trainer can only be closed.
 *
 * A region that was published must not change before dray_publisher_wait: call that before
 * dray__trainer_step, _init, _load and _restore, the only functions that write it. */
#pragma once

#include "engine/engine.h"
#include "engine/pace.h"
#include "engine/policy.h"
#include "engine/value.h"
#include "group/group.h"

#include <dray/memory.h>
#include <dray/weights.h>
#include <stdbool.h>

typedef struct dray__trainer dray__trainer;

typedef struct dray__trainer_options {
    double beta1, beta2; /* AdamW; 0 means 0.9 and 0.95 */
    double epsilon;      /* 0 means 1e-8 */
    double weight_decay; /* decoupled, on every parameter, as torch.optim.AdamW; default 0 */
    int32_t eos_token;   /* written to checkpoints' config.json; -1 for none */
} dray__trainer_options;

/* config is that of a language model or, with labels 1, of a value model, whose head gives each
 * token one number. The ranks of the group are the FSDP ranks. group is borrowed until close; NULL
 * for one rank alone. The parameters are zero until _init, _load or _restore. */
int dray__trainer_open(const dray_model_config *config, dray__group *group,
                       const dray__trainer_options *options, dray__trainer **out,
                       dray_error *error);
void dray__trainer_close(dray__trainer *trainer);

/* Return this rank's layout, and its regions in the layout's order, for dray_publisher_open. Both
 * are borrowed. */
const dray_layout *dray__trainer_layout(const dray__trainer *trainer);
dray_region *const *dray__trainer_regions(const dray__trainer *trainer);
/* Makes log-probs (all -1) and gradients (all 0) sleep instead of compute from now on (pace.h).
 * pace is borrowed until close. */
void dray__trainer_pace(dray__trainer *trainer, const dray__pace *pace);

/* Sets random parameters as transformers initialises them: weights are normal with these deviations
 * (of the token embeddings and of the other weights; transformers has 0.02 for both), biases 0,
 * norms 1; a value model's head is 0. They depend on the seed alone, not on the world. Resets the
 * optimiser. */
int dray__trainer_init(dray__trainer *trainer, double embeddings, double weights, uint64_t seed,
                       dray_error *error);
/* Loads parameters from a Hugging Face checkpoint folder (any dtype that can be converted). Resets
 * the optimiser. */
int dray__trainer_load(dray__trainer *trainer, const char *directory, dray_error *error);

/* Loads a value model from a checkpoint of a language model with the same trunk. The head becomes
 * 0. */
int dray__trainer_load_trunk(dray__trainer *trainer, const char *directory, dray_error *error);

/* Computes log-probs of given responses under the present parameters, and entropy (may be NULL),
 * per response token: log softmax(logits / temperature), temperature > 0. Without gradients. */
int dray__trainer_logprobs(dray__trainer *trainer, const dray__sequences *sequences,
                           double temperature, float *logprobs, float *entropy, dray_error *error);

/* Computes a value model's values of the states in which response tokens are chosen, per response
 * token. */
int dray__trainer_values(dray__trainer *trainer, const dray__sequences *sequences, float *values,
                         dray_error *error);

/* Adds the gradients of -Σ log p(response token) to those accumulated. */
int dray__trainer_accumulate_sft(dray__trainer *trainer, const dray__sequences *sequences,
                                 dray_error *error);

/* Adds the gradients of the batch's loss (policy.h), as a sum, to those accumulated. */
int dray__trainer_accumulate_policy(dray__trainer *trainer, const dray__policy_batch *batch,
                                    dray_error *error);

/* The same for a value model (value.h). */
int dray__trainer_accumulate_value(dray__trainer *trainer, const dray__value_batch *batch,
                                   dray_error *error);

/* Discards the sums that were accumulated since the last step. */
void dray__trainer_discard(dray__trainer *trainer);

typedef struct dray__step_options {
    double learning_rate;
    double max_norm; /* global gradient norm is clipped to this; 0 for no clipping */
} dray__step_options;

/* Means over the accumulated response tokens of all ranks, without those of masked rows. */
typedef struct dray__step_stats {
    uint64_t step;                /* number of this step, from 1 */
    uint64_t tokens;              /* over which the means are taken */
    double loss;                  /* the accumulated sum over the divisor of the gradients */
    double gradient_norm;         /* before clipping */
    double entropy;               /* nats */
    double clip_fraction;         /* share of tokens for which the clipped term was used */
    double dual_clip_fraction;    /* share of tokens that dual clip bounded */
    double truncated_fraction;    /* share of tokens with a weight cut to `truncate` */
    double kl;                    /* k3 to the reference; 0 without one */
    double ratio_mean, ratio_max; /* importance ratio new / old; 1 without old log-probs */
    double behaviour_mean, behaviour_square, behaviour_max; /* ratio proximal / behaviour, its
                                                               square; 1 without behaviour */
} dray__step_stats;

/* Divides the accumulated sums by the batches' `aggregate` (supervised: by the tokens), clips, and
 * takes one AdamW step. Because sums are accumulated, cutting a batch into micro-batches in another
 * way gives the same step up to rounding. Without accumulated sums it returns DRAY_EINVALID; when
 * all rows were masked, the gradient is 0. A gradient that is not finite is DRAY_EINVALID, too:
 * parameters and optimiser are unchanged, and the sums are discarded. stats may be NULL. */
int dray__trainer_step(dray__trainer *trainer, const dray__step_options *options,
                       dray__step_stats *stats, dray_error *error);

/* Discards the optimiser's state and the accumulated sums. The parameters stay. */
void dray__trainer_forget(dray__trainer *trainer);

/* Writes a version into DIRECTORY (dray_checkpoint_save): the parameters as a Hugging Face
 * checkpoint (config.json and safetensors, float32), each rank its own pieces; with `optimizer`,
 * also the moments and the step, in optimizer/, which is the full state for a resume. Gradients
 * that were accumulated but not stepped are not part of it. There is no random state, because the
 * trainer draws no random numbers after _init. The trainer sets ranks, config and parts of `how`.
 * context may be NULL for one rank. */
int dray__trainer_save(dray__trainer *trainer, dray_context *context, const char *directory,
                       const dray_checkpoint_options *how, bool optimizer, dray_error *error);
/* Restores the state that _save wrote (the version's folder), in any world; in the same world
 * bit-identically. */
int dray__trainer_restore(dray__trainer *trainer, const char *directory, dray_error *error);
