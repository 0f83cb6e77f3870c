#include "run/simulate/simulate.h"

#include "base/error.h"

#include <math.h>

typedef struct summed {
    double sum, squares;
} summed;

static void add(summed *s, double value)
{
    s->sum += value;
    s->squares += value * value;
}

static dray__spread spread_of(const summed *s, uint32_t runs)
{
    double mean = s->sum / runs,
           variance = runs > 1 ? (s->squares - s->sum * mean) / (runs - 1) : 0;
    return (dray__spread){mean, sqrt(fmax(variance, 0))};
}

static double waits_of(const dray__simulated *one, uint32_t role)
{
    double all = 0;
    for (int c = 0; c < DRAY__SIM_CAUSES; c++)
        all += one->idle[role][c];
    return all;
}

int dray__simulate(const dray__job *job, const dray__services *services, uint32_t runs,
                   dray__prediction *out, dray_error *error)
{
    summed step = {0}, rate = {0}, stale = {0}, oldest = {0}, anew = {0}, waits[16] = {{0}};
    dray__simulated mean = {0}, one;
    int64_t steps = job->steps < DRAY__SIM_STEPS ? job->steps : DRAY__SIM_STEPS;
    for (uint32_t i = 0; i < runs; i++) {
        int rc = dray__simulate_once(job, services, steps, (uint64_t)job->seed + i, &one, error);
        if (rc)
            return rc;
        add(&step, one.step_seconds);
        add(&rate, one.samples_per_s);
        add(&stale, one.staleness_mean);
        add(&oldest, one.staleness_max);
        add(&anew, one.made_anew);
        for (uint32_t r = 0; r < one.roles; r++) {
            add(&waits[r], waits_of(&one, r));
            for (int c = 0; c < DRAY__SIM_CAUSES; c++)
                mean.idle[r][c] += one.idle[r][c] / runs;
            mean.transfer[r] += one.transfer[r] / runs;
        }
        mean.first = one.first;
        mean.last = one.last;
        mean.roles = one.roles;
    }
    *out = (dray__prediction){.step_seconds = spread_of(&step, runs),
                              .samples_per_s = spread_of(&rate, runs),
                              .staleness_mean = spread_of(&stale, runs),
                              .staleness_max = spread_of(&oldest, runs),
                              .made_anew = spread_of(&anew, runs),
                              .roles = mean.roles,
                              .one = mean};
    for (uint32_t r = 0; r < mean.roles; r++)
        out->waits[r] = spread_of(&waits[r], runs);
    return DRAY_OK;
}
