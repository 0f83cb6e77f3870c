#include "run/job/job.h"

#include "base/clock.h"
#include "run/job/tasks.h"

#include <string.h>

const dray__job_role *dray__job_role_of(const dray__job *job, const char *task)
{
    for (uint32_t i = 0; i < job->role_count; i++)
        if (dray__role_has(&job->roles[i], task))
            return &job->roles[i];
    return NULL;
}

bool dray__role_has(const dray__job_role *role, const char *task)
{
    for (uint32_t i = 0; i < role->task_count; i++)
        if (strcmp(role->tasks[i], task) == 0)
            return true;
    return false;
}

int64_t dray__role_places(const dray__job_role *role)
{
    return role->spread ? role->ranks : role->instances;
}

const char *dray__role_token(const dray__job_role *role)
{
    static const char *const trainers[] = {"actor", "critic"}, *const engines[] = {"rollout",
                                                                                   "eval"};
    for (size_t i = 0; i < 2; i++)
        if (dray__role_has(role, trainers[i]))
            return "trainer";
    for (size_t i = 0; i < 2; i++)
        if (dray__role_has(role, engines[i]))
            return "engine";
    return role->task_count ? "task" : "engine"; /* a server's ranks subscribe */
}

int64_t dray__job_batch(const dray__job *job)
{
    return job->rollout.prompts * job->rollout.samples;
}

int64_t dray__job_token_bytes(const dray__job *job)
{
    /* response, its versions, three log-probs; if the job has them its mask; value, advantage and
     * returns */
    return 4 * (5 + (dray__job_has(job, "response_mask") ? 1 : 0) +
                (dray__job_has(job, "value") ? 3 : 0));
}

int64_t dray__job_wait_ns(const dray__job *job)
{
    return (int64_t)(job->limits.wait_seconds * (double)DRAY__SECOND);
}
