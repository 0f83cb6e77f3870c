/* Policy optimisation on log-probs (policy.h has the formulas and their sources). */
#include "engine/policy.h"

#include "base/error.h"

#include <math.h>

void dray__policy_sums_add(dray__policy_sums *to, const dray__policy_sums *from)
{
    to->loss += from->loss;
    to->entropy += from->entropy;
    to->clipped += from->clipped;
    to->dual_clipped += from->dual_clipped;
    to->truncated += from->truncated;
    to->kl += from->kl;
    to->ratio += from->ratio;
    to->ratio_max = fmax(to->ratio_max, from->ratio_max);
    to->behaviour += from->behaviour;
    to->behaviour_square += from->behaviour_square;
    to->behaviour_max = fmax(to->behaviour_max, from->behaviour_max);
}

int dray__policy_check(const dray__policy_batch *batch, dray__policy_batch *out, dray_error *error)
{
    dray__policy_batch p = *batch;
    p.temperature = p.temperature == 0 ? 1 : p.temperature;
    p.clip_low = p.clip_low == 0 ? 0.2 : p.clip_low;
    p.clip_high = p.clip_high == 0 ? 0.2 : p.clip_high;
    if (!(p.temperature > 0) || isinf(p.temperature))
        return dray__fail(error, DRAY_EINVALID, "policy batch: temperature %g", p.temperature);
    if (!(p.clip_low > 0 && p.clip_low <= 1 && p.clip_high > 0))
        return dray__fail(error, DRAY_EINVALID, "policy batch: clip range -%g +%g", p.clip_low,
                          p.clip_high);
    if (p.dual_clip != 0 && !(p.dual_clip > 1))
        return dray__fail(error, DRAY_EINVALID,
                          "policy batch: dual clip of more than 1 expected, found %g", p.dual_clip);
    if (!(p.truncate >= 0))
        return dray__fail(error, DRAY_EINVALID, "policy batch: weights truncated at %g",
                          p.truncate);
    if (!p.advantages)
        return dray__fail(error, DRAY_EINVALID, "policy batch: no advantages");
    if ((p.loss == DRAY__LOSS_DECOUPLED || p.truncate > 0) && !p.behaviour_logprobs)
        return dray__fail(error, DRAY_EINVALID,
                          "policy batch: weights of proximal to behaviour policy, and no log-probs "
                          "of the latter");
    *out = p;
    return dray__aggregate_check(p.aggregate, p.length, error);
}

/* ---- aggregation ----------------------------------------------------------------------------- */

int dray__aggregate_check(int32_t aggregate, double length, dray_error *error)
{
    return aggregate == DRAY__AGGREGATE_LENGTH && !(length > 0)
               ? dray__fail(error, DRAY_EINVALID,
                            "loss: constant length of more than 0 expected, found %g", length)
               : DRAY_OK;
}

double dray__aggregate_share(int32_t aggregate, const dray__sequences *sequences, uint32_t row)
{
    return aggregate == DRAY__AGGREGATE_SAMPLE ? 1 / (double)dray__row_tokens(sequences, row) : 1;
}

double dray__aggregate_divisor(int32_t aggregate, const dray__sequences *sequences,
                               const bool *masked, double length, uint64_t *tokens)
{
    uint64_t rows = 0;
    *tokens = 0;
    for (uint32_t row = 0; row < sequences->rows; row++) {
        uint64_t made = masked && masked[row] ? 0 : dray__row_tokens(sequences, row);
        rows += made > 0;
        *tokens += made;
    }
    const double divisors[] = {[DRAY__AGGREGATE_TOKEN] = (double)*tokens,
                               [DRAY__AGGREGATE_SAMPLE] = (double)rows,
                               [DRAY__AGGREGATE_LENGTH] = (double)sequences->rows * length};
    return divisors[aggregate];
}

/* ---- the loss -------------------------------------------------------------------------------- */

/* Adds the policy term, -w · min(…), to *loss, and returns its derivative by the log-prob. */
static double surrogate(const dray__policy_batch *p, double advantage, double ratio,
                        double behaviour, double *loss, dray__policy_sums *sums)
{
    bool weighted = p->loss == DRAY__LOSS_DECOUPLED || p->truncate > 0;
    bool truncated = p->truncate > 0 && behaviour > p->truncate;
    double weight = !weighted ? 1 : truncated ? p->truncate : behaviour;
    double bounded = fmin(fmax(ratio, 1 - p->clip_low), 1 + p->clip_high);
    bool clipped = bounded * advantage < ratio * advantage;
    double term = clipped ? bounded * advantage : ratio * advantage;
    bool dual = p->dual_clip > 0 && advantage < 0 && p->dual_clip * advantage > term;
    sums->clipped += clipped;
    sums->dual_clipped += dual;
    sums->truncated += truncated;
    *loss -= weight * (dual ? p->dual_clip * advantage : term);
    return clipped || dual ? 0 : -weight * ratio * advantage;
}

dray__slopes dray__policy_token(const dray__policy_batch *p, uint64_t token, uint32_t row,
                                double logprob, double entropy, dray__policy_sums *sums)
{
    if ((p->masked && p->masked[row]) || !dray__token_counts(&p->sequences, token))
        return (dray__slopes){0};
    double share = dray__aggregate_share(p->aggregate, &p->sequences, row);
    double old = p->old_logprobs ? p->old_logprobs[token] : logprob;
    double ratio = exp(logprob - old), loss = 0;
    double behaviour = p->behaviour_logprobs ? exp(old - p->behaviour_logprobs[token]) : 1;
    double advantage = p->advantages[p->token_advantages ? token : row];
    double slope = surrogate(p, advantage, ratio, behaviour, &loss, sums);
    if (p->ref_logprobs) {
        double difference = p->ref_logprobs[token] - logprob;
        double k3 = expm1(difference) - difference;
        sums->kl += k3;
        if (p->kl_coefficient != 0) { /* a term that is only measured may be infinite */
            loss += p->kl_coefficient * k3;
            slope -= p->kl_coefficient * expm1(difference);
        }
    }
    sums->loss += share * (loss - p->entropy_coefficient * entropy);
    sums->entropy += entropy;
    sums->ratio += ratio;
    sums->ratio_max = fmax(sums->ratio_max, ratio);
    sums->behaviour += behaviour;
    sums->behaviour_square += behaviour * behaviour;
    sums->behaviour_max = fmax(sums->behaviour_max, behaviour);
    return (dray__slopes){share * slope, -share * p->entropy_coefficient};
}
