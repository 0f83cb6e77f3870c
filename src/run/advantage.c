#include "run/advantage.h"

#include <math.h>

static double mean_of(const float *rewards, uint32_t count)
{
    double sum = 0;
    for (uint32_t i = 0; i < count; i++)
        sum += (double)rewards[i];
    return sum / count;
}

/* GRPO: reward - group mean (Shao et al., "DeepSeekMath", 2024), divided by the group's standard
 * deviation only where asked: leaving it out is Dr. GRPO (Liu et al., 2025). */
static void grpo(const float *rewards, uint32_t count, bool divide, float *advantages)
{
    double mean = mean_of(rewards, count), squares = 0;
    for (uint32_t i = 0; i < count; i++)
        squares += ((double)rewards[i] - mean) * ((double)rewards[i] - mean);
    double scale = divide ? 1 / (sqrt(squares / count) + 1e-6) : 1;
    for (uint32_t i = 0; i < count; i++)
        advantages[i] = (float)(((double)rewards[i] - mean) * scale);
}

/* RLOO: reward - mean of the others (Ahmadian et al., "Back to Basics", 2024). */
static void rloo(const float *rewards, uint32_t count, bool divide, float *advantages)
{
    grpo(rewards, count, divide, advantages);
    if (divide)
        return;
    for (uint32_t i = 0; i < count; i++)
        advantages[i] = (float)((double)advantages[i] * count / (count - 1));
}

const dray__advantage dray__advantages[] = {
    [DRAY__ADVANTAGE_GRPO] = {"grpo", 1, grpo},
    [DRAY__ADVANTAGE_RLOO] = {"rloo", 2, rloo},
};
