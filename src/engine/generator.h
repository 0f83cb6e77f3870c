/* Inference of the reference engine: tensor parallel over a group, batched, with a KV cache.
 *
 * The parameters lie in one SHARED region, laid out by dray_layout_engine (fused qkv_proj and
 * gate_up_proj, vocabulary-parallel embedding and head). Nothing is derived from them: whoever
 * writes into the region between two calls - a dray subscriber - has updated the model.
 *
 * All ranks of the group call the same functions with the same inputs and get the same results. A
 * generator belongs to one thread at a time. Functions that compute block; a dead peer or a passed
 * deadline ends them with the group's error (DRAY_EDEAD, DRAY_ETIMEDOUT), after which the
 * generator can only be closed. */
#ifndef DRAY_ENGINE_GENERATOR_H
#define DRAY_ENGINE_GENERATOR_H

#include "engine/engine.h"
#include "engine/pace.h"
#include "group/group.h"

#include <dray/memory.h>

typedef struct dray__generator dray__generator;

/* group: its ranks are the TP ranks; borrowed until close; NULL: one rank alone. The parameters are
 * zero until loaded or subscribed. The model must be cut evenly by the world (dray_layout_engine
 * says what is not). */
int dray__generator_open(const dray_model_config *config, dray__group *group, dray__generator **out,
                         dray_error *error);
void dray__generator_close(dray__generator *generator);

/* This rank's blocks and its live regions in the layout's order (for dray_subscriber_open);
 * borrowed: the generator's. */
const dray_layout *dray__generator_layout(const dray__generator *generator);
dray_region *const *dray__generator_regions(const dray__generator *generator);
const dray_model_config *dray__generator_config(const dray__generator *generator);

/* From here on samplers and log-probs sleep (pace.h): tokens are digits and an end token, log-probs
 * -1. Borrowed until close. */
void dray__generator_pace(dray__generator *generator, const dray__pace *pace);

/* Reads this rank's part of a Hugging Face checkpoint folder. */
int dray__generator_load(dray__generator *generator, const char *directory, dray_error *error);

typedef enum dray__finish {
    DRAY__FINISH_LENGTH = 0, /* max_new_tokens (or the model's positions) reached */
    DRAY__FINISH_EOS,        /* the last token is eos */
    DRAY__FINISH_NOT_YET     /* of a sampler's row that goes on (sampler.h) */
} dray__finish;

typedef struct dray__generate_options {
    size_t size;
    uint32_t rows;
    dray__tokens prompt;     /* each at least one token */
    const uint64_t *streams; /* one for each row: names its random numbers; NULL: the row's index */
    uint64_t seed;
    double temperature;                 /* 0: greedy */
    uint32_t max_new_tokens;            /* a row; at least 1 */
    const uint32_t *row_max_new_tokens; /* one for each row instead; NULL: max_new_tokens for all */
    int32_t eos_token;                  /* -1: none */
} dray__generate_options;

#define DRAY__GENERATE_OPTIONS_INIT                                                                \
    {                                                                                              \
        .size = sizeof(dray__generate_options), .temperature = 1, .eos_token = -1                  \
    }

/* What was generated, row by row in the order of the prompts. */
typedef struct dray__generation {
    uint32_t rows;
    uint64_t *offsets; /* rows + 1, from 0 */
    int32_t *tokens;   /* offsets[rows]; eos included */
    float *logprobs;   /* of each token under the distribution it was sampled from, softmax(logits /
                          temperature) over the true vocabulary; greedy: at temperature 1 */
    uint8_t *finish;   /* dray__finish of each row */
} dray__generation;

/* Samples a continuation for every prompt, with a sampler of its own (sampler.h), which takes all
 * rows at once. *out is the caller's: end it with dray__generation_free. */
int dray__generate(dray__generator *generator, const dray__generate_options *options,
                   dray__generation *out, dray_error *error);
void dray__generation_free(dray__generation *generation);

/* Log-probs of given responses: logprobs[i] = log softmax(logits / temperature)[token] for each
 * response token. temperature > 0. entropy (nats, of the same distribution) may be NULL. */
int dray__generator_logprobs(dray__generator *generator, const dray__sequences *sequences,
                             double temperature, float *logprobs, float *entropy,
                             dray_error *error);

/* All logits of one sequence: out has count × vocab_size floats. For tests and tools. */
int dray__generator_logits(dray__generator *generator, const int32_t *tokens, uint64_t count,
                           float *out, dray_error *error);

#endif
