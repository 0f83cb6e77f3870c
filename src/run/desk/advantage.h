/* Advantages from rewards. One row of the table a method. */
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
    const float *values;     /* of a method by the token: V, of the state a token is chosen in */
    const int32_t *mask; /* for methods by the token: 0 for tokens that the model did not make; NULL
                          * when there are none */
    double gamma, lambda; /* of such a method */
} dray__rewarded;

typedef struct dray__advantage {
    const char *name;
    uint32_t least_samples; /* a group needs */
    bool whole;             /* all samples of a step at once */
    bool divides;           /* may divide by the group's deviation */
    bool by_token;          /* one a response token, from a value model's values */
    /* advantages: one a row, or one a response token. returns: as many, for a method by the token:
     * advantage + V, the value model's target. */
    void (*compute)(const dray__rewarded *in, float *advantages, float *returns);
} dray__advantage;

extern const dray__advantage dray__advantages[];
enum {
    DRAY__ADVANTAGE_GRPO = 0,
    DRAY__ADVANTAGE_RLOO,
    DRAY__ADVANTAGE_REINFORCE,
    DRAY__ADVANTAGE_GAE
};
