/* Advantages from rewards. The table has one row for each method. */
#pragma once

#include <stdbool.h>
#include <stdint.h>

/* Whole groups of `group` samples each, in order. */
typedef struct dray__rewarded {
    uint32_t rows, group;
    const float *rewards;
    const uint64_t *offsets; /* [rows + 1] of the responses' tokens */
    const bool *excluded;    /* rows that are in no mean, and get 0; NULL when there are none */
    bool divide;             /* by the group's standard deviation */
    /* For methods by the token: the value V of the state in which a token is chosen. */
    const float *values;
    const int32_t *mask; /* for methods by the token: 0 for tokens that the model did not make; NULL
                          * when there are none */
    double gamma, lambda; /* for methods by the token */
} dray__rewarded;

typedef struct dray__advantage {
    const char *name;
    uint32_t least_samples; /* the fewest samples that a group may have */
    bool whole;             /* computed over all samples of a step at once */
    bool divides;           /* may divide by the group's deviation */
    bool by_token;          /* one advantage for each response token, from a value model's values */
    /* advantages gets one number for each row or, for methods by the token, each response token.
     * returns gets as many, for methods by the token only: advantage + V, the value model's
     * target. */
    void (*compute)(const dray__rewarded *in, float *advantages, float *returns);
} dray__advantage;

extern const dray__advantage dray__advantages[];
enum {
    DRAY__ADVANTAGE_GRPO = 0,
    DRAY__ADVANTAGE_RLOO,
    DRAY__ADVANTAGE_REINFORCE,
    DRAY__ADVANTAGE_GAE
};
