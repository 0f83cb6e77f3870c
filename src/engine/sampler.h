/* Generation one token at a time: a sampler holds rows in slots, and a step gives each of them its
 * next token. Rows may be added between two steps, as prompts or with the response tokens that they
 * already have, and read and removed at any time. A row that is removed before it is finished is
 * cut. When it is added again with its tokens, it goes on as if it had not been cut.
 *
 * The random number of a token is drawn from (seed, the row's stream, the token's position in the
 * sequence counted from the prompt's start): it does not depend on the other rows, on the order of
 * calls, on the world or on cuts. (The logits themselves differ in their last bits with the shape
 * of the batch, as matrix products do: a token can differ where its random number is that near to a
 * boundary. Rows that are added together to an empty sampler and run to their ends get the same
 * bits every time.)
 *
 * A generator may have several samplers. All ranks of its group call the same functions with the
 * same inputs; a sampler belongs to the generator's thread. */
#pragma once

#include "engine/generator.h"

typedef struct dray__sampler dray__sampler;

typedef struct dray__sampler_options {
    uint32_t slots; /* the most rows at once */
    uint64_t seed;
    double temperature; /* 0 for greedy sampling */
    int32_t eos_token;  /* -1 for none */
} dray__sampler_options;

/* Rows take no memory before they are added. The generator must outlive the sampler. */
int dray__sampler_open(dray__generator *generator, const dray__sampler_options *options,
                       dray__sampler **out, dray_error *error);
void dray__sampler_close(dray__sampler *sampler);

typedef struct dray__sampler_rows {
    dray__sequences rows; /* response.offsets is NULL when no row has response tokens yet */
    /* One number for each row, which selects its random numbers. NULL means the row's index. */
    const uint64_t *streams;
    /* The most tokens of a response, including those that it already has. The model's positions may
     * end it earlier. */
    uint32_t max_new_tokens;
    /* One for each row instead; NULL when max_new_tokens is for all rows. */
    const uint32_t *row_max_new_tokens;
} dray__sampler_rows;

/* Adds all rows or none. slots[i] receives the slot of row i. Their tokens are computed in the
 * next step. Fails with DRAY_EFULL when fewer slots are free, and with DRAY_EINVALID, which
 * names the row, when a row is empty, ended or full. */
int dray__sampler_add(dray__sampler *sampler, const dray__sampler_rows *rows, uint32_t *slots,
                      dray_error *error);

/* Computes one more token for each row that is not finished. Does nothing when there are none. */
int dray__sampler_step(dray__sampler *sampler, dray_error *error);

/* Excludes a row that is not finished from the steps until it is given tokens. It keeps its slot
 * and its cache. */
void dray__sampler_hold(dray__sampler *sampler, uint32_t slot);
/* Continues a row that is held after these tokens, which were not sampled: their log-prob is 0
 * and their version -1. Tokens for which the row has no room are left out, and the row ends. */
void dray__sampler_give(dray__sampler *sampler, uint32_t slot, const int32_t *tokens,
                        uint64_t count);

/* Call it when the weights are those of `version` from now on. The cache was computed with the
 * former weights, so the next step computes it again. A new sampler has version 0. */
void dray__sampler_renew(dray__sampler *sampler, int32_t version);

/* Resets the row, finished or not, to the tokens that it had when it was added. */
void dray__sampler_restart(dray__sampler *sampler, uint32_t slot);

uint32_t dray__sampler_free_slots(const dray__sampler *sampler);
/* Returns the number of rows that are neither finished nor held. */
uint32_t dray__sampler_running(const dray__sampler *sampler);

/* The tokens of a row since it was added. They are borrowed until the next step, or until the
 * row is removed. */
typedef struct dray__sampled {
    const int32_t *tokens; /* eos included */
    const float *logprobs; /* as dray__generation's */
    /* The version of the weights that made each token; -1 for a token that was given. */
    const int32_t *versions;
    uint64_t count;
    uint8_t finish; /* dray__finish */
} dray__sampled;

dray__sampled dray__sampler_look(const dray__sampler *sampler, uint32_t slot);
/* Frees the slot. */
void dray__sampler_remove(dray__sampler *sampler, uint32_t slot);
/* Copies the tokens of all rows. The caller frees *out with dray__generation_free. */
int dray__sampler_collect(const dray__sampler *sampler, const uint32_t *slots, uint32_t rows,
                          dray__generation *out, dray_error *error);

/* Samples a continuation for every row, with a sampler of its own that takes all rows at once;
 * `slots` of the options is ignored. The caller frees *out with dray__generation_free. */
int dray__generate(dray__generator *generator, const dray__sampler_options *options,
                   const dray__sampler_rows *rows, dray__generation *out, dray_error *error);
