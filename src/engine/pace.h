/* The reference engine without its arithmetic: what would be computed is slept instead, for as long
 * as a table says, and what would come of it is made up. Everything around it is real: rows, slots,
 * ends and cuts of responses, gathered parameters, optimiser steps (of gradients that are zero),
 * published bytes. So schedules can be measured with more engines and trainers than there are
 * cores. */
#pragma once

#include <stdint.h>

typedef struct dray__pace {
    double token_seconds;   /* a token for every row that a sampler holds */
    double prefill_seconds; /* a token of a prompt, or of a cache that is made anew */
    double score_seconds;   /* log-probs of a row, whatever the ranks that share them */
    double train_seconds;   /* gradients of a row, the same */
    /* Tokens of a response: log-normal, of this mean and with this deviation over the mean. Of the
     * normal numbers' variance a part is that of the row's group. Beside that a share of the
     * responses is `tail` times as long. */
    double tokens, variation, correlation, tail, tail_share;
    uint64_t seed;
    uint32_t group; /* rows of a group: streams whose numbers, divided by this, are equal */
} dray__pace;

/* How long the response is that this stream draws (at least 1, the end token), the same for all
 * parts of a response that is cut. Of streams' numbers the lower 24 bits are a place in a batch. */
uint64_t dray__pace_length(const dray__pace *pace, uint64_t stream);
/* Sleeps. What one sleep was too long, the next ones of this thread are shorter. */
void dray__pace_spend(double seconds);
