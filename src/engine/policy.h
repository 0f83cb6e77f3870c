/* The losses of policy optimisation, as functions of log-probs: a batch, and the derivatives of its
 * loss by the log-prob and the entropy of each response token. losses.c propagates them through the
 * network.
 *
 * With π the policy that is trained, π_prox the proximal policy (the denominator of ratios), and
 * π_behav the one that sampled, the loss is the sum over response tokens of
 *
 *     a · (-w · min(r · A, clip(r) · A) + kl_coefficient · k3 - entropy_coefficient · entropy)
 *
 *     r = π / π_prox, clip(r) = min(max(r, 1 - clip_low), 1 + clip_high)
 *
 * which is PPO's (Schulman et al., "Proximal Policy Optimization Algorithms", 2017), with two
 * bounds for clip-higher (Yu et al., "DAPO", 2025). With dual_clip = c, min(…) is not less than c ·
 * A where A < 0 (Ye et al., "Mastering Complex Control in MOBA Games", 2020, eq. 5).
 *
 *     w = 1 with DRAY__LOSS_PPO, and
 *     w = π_prox / π_behav with DRAY__LOSS_DECOUPLED
 *
 * (Hilton et al., "Batch size-invariance for policy optimization", 2022; for samples of older
 * versions Fu et al., "AReaL", 2025); with truncate = C, under either, w = min(π_prox / π_behav, C)
 * (truncated importance sampling: Ionides 2008). No gradient goes through w.
 *
 * k3 = exp(d) - d - 1 with d = log π_ref - log π (Schulman, "Approximating KL Divergence", 2020).
 *
 * `a` and the divisor of a step's sums determine over which tokens or rows the mean is taken: see
 * dray__aggregate. Response tokens are those that count (dray__sequences.mask). */
#pragma once

#include "engine/engine.h"

#include <stdbool.h>

typedef enum dray__loss { DRAY__LOSS_PPO = 0, DRAY__LOSS_DECOUPLED } dray__loss;

typedef enum dray__aggregate {
    DRAY__AGGREGATE_TOKEN = 0, /* a = 1; by the tokens that count: DAPO */
    DRAY__AGGREGATE_SAMPLE,    /* a = 1 / tokens of the row; by the rows that count: GRPO (Shao et
                                  al., "DeepSeekMath", 2024) */
    DRAY__AGGREGATE_LENGTH     /* a = 1; by all rows times a constant: Dr. GRPO (Liu et al.,
                                  "Understanding R1-Zero-Like Training", 2025) */
} dray__aggregate;

/* Returns 0, or DRAY_EINVALID for DRAY__AGGREGATE_LENGTH without a constant length. */
int dray__aggregate_check(int32_t aggregate, double length, dray_error *error);
/* Returns the factor `a` of a row's tokens. */
double dray__aggregate_share(int32_t aggregate, const dray__sequences *sequences, uint32_t row);
/* Returns the number by which the sums of these rows are divided, and how many response tokens
 * count. `masked` has one flag a row; NULL when no row is masked. */
double dray__aggregate_divisor(int32_t aggregate, const dray__sequences *sequences,
                               const bool *masked, double length, uint64_t *tokens);

/* One micro-batch of policy optimisation. Arrays per response token are those of dray__sequences.
 * Only rows that have tokens and are not masked count. */
typedef struct dray__policy_batch {
    dray__sequences sequences;
    double temperature;        /* the temperature at which the responses were sampled; 0 means 1 */
    const float *advantages;   /* one for each row or, with token_advantages, each response token */
    int32_t token_advantages;  /* 1: advantages are per response token */
    const float *old_logprobs; /* per response token, of π_prox; NULL for those of the present
                                  policy (r = 1, gradient of REINFORCE) */
    const float *behaviour_logprobs; /* per response token, of π_behav; NULL for π_prox's */
    const float *ref_logprobs;       /* per response token; NULL for no KL */
    /* One for each row; true leaves it out of all sums; NULL when no row is masked. */
    const bool *masked;
    int32_t loss;               /* dray__loss */
    int32_t aggregate;          /* dray__aggregate; the same for all batches of a step */
    double length;              /* with DRAY__AGGREGATE_LENGTH: the constant */
    double truncate;            /* 0 when weights are not truncated */
    double clip_low, clip_high; /* 0 means 0.2 */
    double dual_clip;           /* more than 1; 0 for none */
    double kl_coefficient, entropy_coefficient;
} dray__policy_batch;

/* Sums over response tokens. */
typedef struct dray__policy_sums {
    double loss, entropy, clipped, dual_clipped, truncated, kl, ratio, ratio_max;
    double behaviour, behaviour_square, behaviour_max; /* of π_prox / π_behav */
} dray__policy_sums;

void dray__policy_sums_add(dray__policy_sums *to, const dray__policy_sums *from);

/* Fills *out with the batch and its defaults. Returns 0, or DRAY_EINVALID with a message that names
 * the error. */
int dray__policy_check(const dray__policy_batch *batch, dray__policy_batch *out, dray_error *error);

/* The derivatives of the loss by a response token's log-prob and entropy. */
typedef struct dray__slopes {
    double logprob, entropy;
} dray__slopes;

/* Adds the loss of one response token, which has this log-prob and entropy under π, to the sums.
 * `policy` must have been checked. */
dray__slopes dray__policy_token(const dray__policy_batch *policy, uint64_t token, uint32_t row,
                                double logprob, double entropy, dray__policy_sums *sums);
