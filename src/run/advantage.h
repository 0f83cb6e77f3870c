/* Advantages from rewards. One row of the table a method. */
#ifndef DRAY_RUN_ADVANTAGE_H
#define DRAY_RUN_ADVANTAGE_H

#include <stdbool.h>
#include <stdint.h>

/* Whole groups of `group` samples each, in order. */
typedef struct dray__rewarded {
    uint32_t rows, group;
    const float *rewards;
    const uint64_t *offsets; /* [rows + 1] of the responses' tokens */
    const bool *excluded;    /* these are in no mean, and get 0; NULL: none */
    bool divide;             /* by the group's standard deviation */
} dray__rewarded;

typedef struct dray__advantage {
    const char *name;
    uint32_t least_samples; /* a group needs */
    bool whole;             /* all samples of a step at once */
    /* advantages: one a row. */
    void (*compute)(const dray__rewarded *in, float *advantages);
} dray__advantage;

extern const dray__advantage dray__advantages[];

/* Generalised advantage estimation (Schulman et al., "High-Dimensional Continuous Control Using
 * Generalized Advantage Estimation", 2016, eq. 11 to 16), for rewards that come with the last
 * token, after which nothing is worth anything: with δ(t) = r(t) + gamma · V(t + 1) - V(t), the
 * advantage of token t is the sum over l of (gamma · lambda)^l · δ(t + l). values: V, one a
 * response token, of the state that the token is chosen in. advantages, returns: as many; returns
 * is advantage + V, what the value model is to learn. Tokens of excluded rows get 0 and their own
 * V. */
void dray__gae(const dray__rewarded *in, const float *values, double gamma, double lambda,
               float *advantages, float *returns);
enum { DRAY__ADVANTAGE_GRPO = 0, DRAY__ADVANTAGE_RLOO, DRAY__ADVANTAGE_REINFORCE };

#endif
