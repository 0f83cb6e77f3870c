/* Inference of the reference engine: tensor parallel over a group, batched, with a KV cache.
 *
 * The parameters are in one SHARED region, laid out by dray_layout_engine (fused qkv_proj and
 * gate_up_proj, vocabulary-parallel embedding and head). Nothing is derived from them: a dray
 * subscriber that writes into the region between two calls has updated the model.
 *
 * All ranks of the group call the same functions with the same inputs and get the same results. A
 * generator belongs to one thread at a time. Functions that compute block; a dead peer or a passed
 * deadline ends them with the group's error (DRAY_EDEAD, DRAY_ETIMEDOUT), after which the generator
 * can only be closed. */
#pragma once

#include "engine/engine.h"
#include "engine/pace.h"
#include "group/group.h"

#include <dray/memory.h>

typedef struct dray__generator dray__generator;

/* The ranks of the group are the TP ranks. group is borrowed until close; NULL for one rank alone.
 * The parameters are zero until loaded or subscribed. The world must divide the model's sizes
 * (dray_layout_engine names a size that it does not divide). */
int dray__generator_open(const dray_model_config *config, dray__group *group, dray__generator **out,
                         dray_error *error);
void dray__generator_close(dray__generator *generator);

/* Return this rank's layout, and its regions in the layout's order, for dray_subscriber_open. Both
 * are borrowed. */
const dray_layout *dray__generator_layout(const dray__generator *generator);
dray_region *const *dray__generator_regions(const dray__generator *generator);

/* Makes samplers and log-probs sleep instead of compute from now on (pace.h): tokens are digits and
 * an end token, log-probs are -1. pace is borrowed until close. */
void dray__generator_pace(dray__generator *generator, const dray__pace *pace);

/* Reads this rank's part of a Hugging Face checkpoint folder. */
int dray__generator_load(dray__generator *generator, const char *directory, dray_error *error);

typedef enum dray__finish {
    DRAY__FINISH_LENGTH = 0, /* max_new_tokens (or the model's positions) reached */
    DRAY__FINISH_EOS,        /* the last token is eos */
    DRAY__FINISH_NOT_YET     /* a sampler's row that is not finished (sampler.h) */
} dray__finish;

/* The generated responses, row by row in the order of the prompts. */
typedef struct dray__generation {
    uint32_t rows;
    uint64_t *offsets; /* rows + 1, from 0 */
    int32_t *tokens;   /* offsets[rows]; eos included */
    float *logprobs;   /* of each token under the distribution it was sampled from, softmax(logits /
                          temperature) over the true vocabulary; greedy: at temperature 1 */
    uint8_t *finish;   /* dray__finish of each row */
} dray__generation;

void dray__generation_free(dray__generation *generation);

/* Computes log-probs of given responses: logprobs[i] = log softmax(logits / temperature)[token] for
 * each response token. temperature > 0. entropy (nats, of the same distribution) may be NULL. */
int dray__generator_logprobs(dray__generator *generator, const dray__sequences *sequences,
                             double temperature, float *logprobs, float *entropy,
                             dray_error *error);
