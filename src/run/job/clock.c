/* The clock job: `clock` of the job file as the engine's pace. */
#include "run/job/model.h"

bool dray__job_pace(const dray__job *job, dray__pace *out)
{
    const dray__job_clock *c = &job->clock;
    *out = (dray__pace){.token_seconds = c->token_seconds,
                        .prefill_seconds = c->prefill_seconds,
                        .score_seconds = c->log_prob_seconds,
                        .train_seconds = c->train_seconds,
                        .tokens = c->tokens,
                        .variation = c->variation,
                        .correlation = c->correlation,
                        .tail = c->tail,
                        .tail_share = c->tail_share,
                        .seed = (uint64_t)job->seed,
                        .group = (uint32_t)job->rollout.samples};
    return c->enabled;
}
