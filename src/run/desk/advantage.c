#include "run/desk/advantage.h"

#include <math.h>

static bool excluded(const dray__rewarded *in, uint32_t row)
{
    return in->excluded && in->excluded[row];
}

/* Mean and deviation of the rows [first, first + in->group) that are not excluded. */
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

/* Sets factor · (reward - group mean). The factor depends on the number of samples in the mean. */
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

/* r - mean of the others = (r - mean) · n / (n - 1). A sample without others has advantage 0. */
static double without_itself(uint32_t count)
{
    return count > 1 ? count / (count - 1.0) : 0;
}

/* GRPO: reward - group mean (Shao et al., "DeepSeekMath", 2024), divided by the group's standard
 * deviation if the job asks for it. Without the division it is Dr. GRPO (Liu et al., 2025). */
static void grpo(const dray__rewarded *in, float *advantages, float *returns)
{
    (void)returns;
    centre(in, one, advantages);
}

/* RLOO: reward - mean of the others (Ahmadian et al., "Back to Basics", 2024). */
static void rloo(const dray__rewarded *in, float *advantages, float *returns)
{
    (void)returns;
    centre(in, without_itself, advantages);
}

/* REINFORCE++ (Hu, "REINFORCE++", 2025, eq. 9): all tokens of a response have the same advantage,
 * and advantages are whitened over all tokens of the global batch. The paper has the KL penalty in
 * the reward; here it is in the loss (actor.kl). */
static void reinforce(const dray__rewarded *in, float *advantages, float *returns)
{
    (void)returns;
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

/* Generalised advantage estimation (Schulman et al., "High-Dimensional Continuous Control Using
 * Generalized Advantage Estimation", 2016, eq. 11 to 16), for rewards that come with the last
 * token, after which all values are 0: with δ(t) = r(t) + gamma · V(t + 1) - V(t), the advantage of
 * token t is the sum over l of (gamma · lambda)^l · δ(t + l). Tokens that the model did not make
 * are not steps: the token after them follows the one before them. They, and tokens of excluded
 * rows, get 0 and their own V. */
static void gae(const dray__rewarded *in, float *advantages, float *returns)
{
    for (uint32_t row = 0; row < in->rows; row++) {
        double next = 0, sum = 0, reward = (double)in->rewards[row];
        for (uint64_t t = in->offsets[row + 1]; t-- > in->offsets[row];) {
            double value = (double)in->values[t];
            bool counts = !in->mask || in->mask[t];
            if (counts) {
                sum = reward + in->gamma * next - value + in->gamma * in->lambda * sum;
                next = value;
                reward = 0;
            }
            counts = counts && !excluded(in, row);
            advantages[t] = counts ? (float)sum : 0;
            returns[t] = counts ? (float)(sum + value) : in->values[t];
        }
    }
}

const dray__advantage dray__advantages[] = {
    [DRAY__ADVANTAGE_GRPO] = {"grpo", 1, .divides = true, .compute = grpo},
    [DRAY__ADVANTAGE_RLOO] = {"rloo", 2, .divides = true, .compute = rloo},
    [DRAY__ADVANTAGE_REINFORCE] = {"reinforce++", 1, .whole = true, .compute = reinforce},
    [DRAY__ADVANTAGE_GAE] = {"gae", 1, .by_token = true, .compute = gae},
};
