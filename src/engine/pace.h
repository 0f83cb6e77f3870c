/* The reference engine without its arithmetic. It sleeps for the times below, and makes up the
 * results. Everything else is real: rows, slots, ends and cuts of responses, gathered parameters,
 * optimiser steps (with gradients of zero) and published bytes. So schedules can be measured with
 * more engines and trainers than there are cores. */
#pragma once

#include <stdint.h>

typedef struct dray__pace {
    double token_seconds;   /* one token for every row that a sampler holds */
    double prefill_seconds; /* one token of a prompt, or of a cache that is recomputed */
    double score_seconds;   /* the log-probs of a row, however many ranks share them */
    double train_seconds;   /* the gradients of a row, likewise */
    /* The number of a response's tokens is log-normal, with mean `tokens` and a standard deviation
     * of `variation` times the mean. `correlation` is the share of the variance of the normal
     * numbers that the rows of a group have in common. A share `tail_share` of the responses is
     * also `tail` times as long. */
    double tokens, variation, correlation, tail, tail_share;
    uint64_t seed;
    /* Rows are of one group when their streams' numbers, divided by this, are equal. */
    uint32_t group;
} dray__pace;

/* Returns the length of the response that this stream draws (at least 1, for the end token). It
 * is the same for all parts of a response that is cut. The lower 24 bits of a stream's number
 * are a place in a batch. */
uint64_t dray__pace_length(const dray__pace *pace, uint64_t stream);
/* Sleeps. When one sleep took too long, the next sleeps of this thread are shorter. */
void dray__pace_spend(double seconds);
