/* Generation a token at a time: a sampler holds rows in slots, and a step gives each of them its
 * next token. Rows may be added between two steps, as prompts or with the response tokens that they
 * have already, and looked at and removed at any time: one that is removed before it is finished is
 * cut, and goes on as if uncut where it is added again with what it had.
 *
 * The random number of a token is drawn from (seed, the row's stream, the token's position in the
 * sequence counted from the prompt's start): it does not depend on the other rows, on the order of
 * calls, on the world or on cuts. (The logits themselves differ in their last bits with the shape
 * of the batch, as matrix products do: a token can differ where its random number is that near to
 * a boundary. Rows that are added together to an empty sampler and run to their ends get the same
 * bits every time.)
 *
 * A generator may have several samplers. All ranks of its group call the same functions with the
 * same inputs; a sampler belongs to the generator's thread. */
#pragma once

#include "engine/generator.h"

typedef struct dray__sampler dray__sampler;

typedef struct dray__sampler_options {
    uint32_t slots; /* rows at once */
    uint64_t seed;
    double temperature; /* 0: greedy */
    int32_t eos_token;  /* -1: none */
} dray__sampler_options;

/* Its rows take no memory before they are there. The generator must outlive it. */
int dray__sampler_open(dray__generator *generator, const dray__sampler_options *options,
                       dray__sampler **out, dray_error *error);
void dray__sampler_close(dray__sampler *sampler);

typedef struct dray__sampler_rows {
    dray__sequences rows; /* response.offsets NULL: no row has response tokens yet */
    /* One for each row: names its random numbers. NULL: the row's index. */
    const uint64_t *streams;
    /* Of the response, with the tokens that are there already; the model's positions end it
     * earlier. */
    uint32_t max_new_tokens;
    const uint32_t *row_max_new_tokens; /* one for each row instead; NULL: max_new_tokens for all */
} dray__sampler_rows;

/* Adds all rows or none; slots[i] gets the slot of row i. Their tokens are computed with the next
 * step's. DRAY_EFULL: fewer slots are free. DRAY_EINVALID names the row that is empty, ended or
 * full. */
int dray__sampler_add(dray__sampler *sampler, const dray__sampler_rows *rows, uint32_t *slots,
                      dray_error *error);

/* One more token for each row that is not finished; without such rows nothing is done. */
int dray__sampler_step(dray__sampler *sampler, dray_error *error);

/* Takes a row that is not finished out of the steps, until it is given tokens. Its slot and its
 * cache stay its own. */
void dray__sampler_hold(dray__sampler *sampler, uint32_t slot);
/* A row that is held goes on behind these tokens, which were not sampled: their log-prob is 0,
 * their version -1. Those that it has no room for are left out, and it ends. */
void dray__sampler_give(dray__sampler *sampler, uint32_t slot, const int32_t *tokens,
                        uint64_t count);

/* The weights are those of `version` from now on. What the cache holds of the rows' tokens is of
 * the weights before: it is computed anew with the next step. A new sampler has version 0. */
void dray__sampler_renew(dray__sampler *sampler, int32_t version);

/* The row, finished or not, begins anew behind what it had when it was added. */
void dray__sampler_restart(dray__sampler *sampler, uint32_t slot);

uint32_t dray__sampler_free_slots(const dray__sampler *sampler);
/* Rows that are not finished, and not held. */
uint32_t dray__sampler_running(const dray__sampler *sampler);

/* What a row has got since it was added. Borrowed until the next step, or until it is removed. */
typedef struct dray__sampled {
    const int32_t *tokens;   /* eos included */
    const float *logprobs;   /* as dray__generation's */
    const int32_t *versions; /* of the weights that made each token; -1: it was given */
    uint64_t count;
    uint8_t finish; /* dray__finish */
} dray__sampled;

dray__sampled dray__sampler_look(const dray__sampler *sampler, uint32_t slot);
/* Frees the slot. */
void dray__sampler_remove(dray__sampler *sampler, uint32_t slot);
/* All that rows have got, copied; *out is the caller's: end it with dray__generation_free. */
int dray__sampler_collect(const dray__sampler *sampler, const uint32_t *slots, uint32_t rows,
                          dray__generation *out, dray_error *error);

/* Samples a continuation for every row, with a sampler of its own, which takes all rows
 * at once: `slots` of the options does not count. *out is the caller's: end it with
 * dray__generation_free. */
int dray__generate(dray__generator *generator, const dray__sampler_options *options,
                   const dray__sampler_rows *rows, dray__generation *out, dray_error *error);
