/* The reference engine without its arithmetic. It sleeps for the time of the computation in a
 * table, and invents the results. Everything else is real: rows, slots, ends and cuts of responses,
 * gathered parameters, optimiser steps (with gradients of zero) and published bytes. So schedules
 * can be measured with more engines and trainers than there are cores. */
#pragma once

#include <stdint.h>

typedef struct dray__pace {
    double token_seconds;   /* one token for every row that a sampler holds */
    double prefill_seconds; /* one token of a prompt, or of a cache that is computed anew */
    double score_seconds;   /* the log-probs of a row, however many ranks share them */
    double train_seconds;   /* the gradients of a row, likewise */
    /* Tokens of a response: log-normal, of this mean and with this deviation over the mean. Of the
     * normal numbers' variance a part is that of the row's group. Beside that a share of the
     * responses is `tail` times as long. */
    double tokens, variation, correlation, tail, tail_share;
    uint64_t seed;
    /* The rows of a group are the streams whose numbers, divided by this, are equal. */
    uint32_t group;
} dray__pace;

/* Returns the length of the response that this stream draws (at least 1, for the end token). It
 * is the same for all parts of a response that is cut. The lower 24 bits of a stream's number
 * are a place in a batch. */
uint64_t dray__pace_length(const dray__pace *pace, uint64_t stream);
/* Sleeps. When one sleep took too long, the next sleeps of this thread are shorter. */
void dray__pace_spend(double seconds);
