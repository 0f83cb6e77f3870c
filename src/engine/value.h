/* The loss of a value model (the critic of PPO), as a function of its values. Each response token
 * has one value, that of the state in which the token is chosen.
 *
 * The loss is the sum over response tokens of
 *
 *     a · ½ · max((V - R)², (min(max(V, V_old - clip), V_old + clip) - R)²)
 *
 * with R the return, V the value under the present parameters and V_old its value when the batch
 * was scored: Schulman et al. (2017), eq. 9, with the clipped values of OpenAI's baselines
 * (ppo2/model.py), as verl (compute_value_loss) and TRL (PPOTrainer) have it. Without clip, (V -
 * R)². `a`, and the divisor of a step's sum, are those of the policy's loss (policy.h:
 * dray__aggregate), and so are the tokens that count. */
#pragma once

#include "engine/policy.h"

/* One micro-batch. Arrays per response token are those of dray__sequences. */
typedef struct dray__value_batch {
    dray__sequences sequences;
    const float *returns; /* per response token */
    const float *values;  /* V_old; NULL for no clip */
    const bool *masked;   /* as in dray__policy_batch; so are aggregate and length */
    int32_t aggregate;
    double length;
    double clip; /* 0 for none */
} dray__value_batch;

/* Returns 0, or DRAY_EINVALID with the batch's error. */
int dray__value_check(const dray__value_batch *batch, dray_error *error);
/* Adds the loss of one response token, which has this value, to the sums (loss, clipped), and
 * returns its derivative by the value. `batch` must have been checked. */
double dray__value_token(const dray__value_batch *batch, uint64_t token, uint32_t row, double value,
                         dray__policy_sums *sums);
