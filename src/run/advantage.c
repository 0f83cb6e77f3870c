#include "run/advantage.h"

#include <math.h>

static bool excluded(const dray__rewarded *in, uint32_t row)
{
    return in->excluded && in->excluded[row];
}

/* Of rows [first, first + in->group) that are not excluded. */
typedef struct moments {
    double mean, deviation;
    uint32_t count;
} moments;

static moments of_group(const dray__rewarded *in, uint32_t first)
{
    moments m = {0};
    double sum = 0, squares = 0;
    for (uint32_t i = first; i < first + in->group; i++)
        if (!excluded(in, i)) {
            sum += (double)in->rewards[i];
            m.count++;
        }
    if (!m.count)
        return m;
    m.mean = sum / m.count;
    for (uint32_t i = first; i < first + in->group; i++)
        if (!excluded(in, i))
            squares += pow((double)in->rewards[i] - m.mean, 2);
    m.deviation = sqrt(squares / m.count);
    return m;
}

/* factor · (reward - group mean), the factor from the number of samples that the mean is of. */
static void centre(const dray__rewarded *in, double (*factor)(uint32_t count), float *advantages)
{
    for (uint32_t first = 0; first < in->rows; first += in->group) {
        moments m = of_group(in, first);
        double scale = factor(m.count) / (in->divide ? m.deviation + 1e-6 : 1);
        for (uint32_t i = first; i < first + in->group; i++)
            advantages[i] =
                excluded(in, i) ? 0 : (float)(((double)in->rewards[i] - m.mean) * scale);
    }
}

static double one(uint32_t count)
{
    (void)count;
    return 1;
}

/* r - mean of the others = (r - mean) · n / (n - 1); one that has no others learns nothing. */
static double without_itself(uint32_t count)
{
    return count > 1 ? count / (count - 1.0) : 0;
}

/* GRPO: reward - group mean (Shao et al., "DeepSeekMath", 2024), divided by the group's standard
 * deviation only where asked: leaving it out is Dr. GRPO (Liu et al., 2025). */
static void grpo(const dray__rewarded *in, float *advantages)
{
    centre(in, one, advantages);
}

/* RLOO: reward - mean of the others (Ahmadian et al., "Back to Basics", 2024). */
static void rloo(const dray__rewarded *in, float *advantages)
{
    centre(in, without_itself, advantages);
}

/* REINFORCE++ (Hu, "REINFORCE++", 2025, eq. 9): advantages, of which every token of a response has
 * the same, are whitened over all tokens of the global batch. The KL penalty, which it has in the
 * reward, is in the loss here (actor.kl). */
static void reinforce(const dray__rewarded *in, float *advantages)
{
    double tokens = 0, sum = 0, squares = 0;
    for (int pass = 0; pass < 2; pass++)
        for (uint32_t i = 0; i < in->rows; i++) {
            double weight = excluded(in, i) ? 0 : (double)(in->offsets[i + 1] - in->offsets[i]);
            double reward = (double)in->rewards[i];
            if (pass == 0) {
                tokens += weight;
                sum += weight * reward;
            } else if (weight > 0) {
                squares += weight * pow(reward - sum / tokens, 2);
            }
        }
    for (uint32_t i = 0; i < in->rows; i++)
        advantages[i] =
            excluded(in, i) || !(tokens > 0)
                ? 0
                : (float)(((double)in->rewards[i] - sum / tokens) / sqrt(squares / tokens + 1e-8));
}

void dray__gae(const dray__rewarded *in, const float *values, double gamma, double lambda,
               float *advantages, float *returns)
{
    for (uint32_t row = 0; row < in->rows; row++) {
        double next = 0, sum = 0, reward = (double)in->rewards[row];
        for (uint64_t t = in->offsets[row + 1]; t-- > in->offsets[row]; reward = 0) {
            double value = (double)values[t];
            sum = reward + gamma * next - value + gamma * lambda * sum;
            next = value;
            advantages[t] = excluded(in, row) ? 0 : (float)sum;
            returns[t] = excluded(in, row) ? values[t] : (float)(sum + value);
        }
    }
}

const dray__advantage dray__advantages[] = {
    [DRAY__ADVANTAGE_GRPO] = {"grpo", 1, false, grpo},
    [DRAY__ADVANTAGE_RLOO] = {"rloo", 2, false, rloo},
    [DRAY__ADVANTAGE_REINFORCE] = {"reinforce++", 1, true, reinforce},
};
