#include "run/job/schedule.h"

#include "queue/client/training.h"

#include <math.h>

#define NAME(word, line) [line] = word,
static const char *const names[] = {DRAY__SCHEDULE_WORDS(NAME)};

/* `async`: job.staleness is added (schedule_of). */
static const dray__schedule schedules[] = {
    [DRAY__SCHEDULE_SYNC] = {.newest = 1, .oldest = 1, .open = 1, .kept = 1, .exact = true},
    [DRAY__SCHEDULE_ONE_STEP] = {.newest = 2, .oldest = 2, .open = 2, .kept = 2, .exact = true},
    [DRAY__SCHEDULE_ROLLING] = {.newest = 1, .oldest = 2, .open = 2, .kept = 1, .in_turns = true},
    [DRAY__SCHEDULE_ASYNC] =
        {.newest = 1, .oldest = 1, .open = 2, .kept = 1, .first_complete = true},
};

dray__schedule dray__schedule_of(const dray__job *job)
{
    dray__schedule schedule = schedules[job->schedule];
    schedule.name = names[job->schedule];
    if (schedule.first_complete) {
        schedule.oldest += job->staleness;
        /* As many again for samples that are complete late, and more, so that engines have prompts
         * while a few samples of an old step become too old and are generated again. */
        schedule.open += (job->staleness > 0 ? 2 : 0) + 2 * job->staleness;
    }
    return schedule;
}

void dray__schedule_settle(dray__job *job, const dray__places *at)
{
    if (schedules[job->schedule].first_complete && !dray__setting_given(at, "staleness"))
        job->staleness = 1;
}

dray_steps_rules dray__schedule_rules(const dray__job *job)
{
    dray__schedule schedule = dray__schedule_of(job);
    dray_steps_rules rules = DRAY_STEPS_RULES_INIT;
    rules.oldest = schedule.oldest;
    rules.newest = schedule.newest;
    rules.open = schedule.open;
    rules.kept = schedule.kept;
    rules.last = job->steps;
    rules.rows = (uint32_t)dray__job_batch(job);
    rules.group = (uint32_t)job->rollout.samples;
    rules.fresh = (uint32_t)ceil(job->fresh_share * rules.rows - 1e-9);
    rules.exact = schedule.exact;
    rules.first_complete = schedule.first_complete;
    rules.in_turns = schedule.in_turns;
    rules.tagged = 1;
    return rules;
}

json_t *dray__schedule_rules_json(const dray__job *job)
{
    dray_steps_rules r = dray__schedule_rules(job);
    return json_pack("{s:I, s:I, s:I, s:I, s:I, s:I, s:I, s:I, s:i, s:i, s:i, s:i}", "oldest",
                     (json_int_t)r.oldest, "newest", (json_int_t)r.newest, "open",
                     (json_int_t)r.open, "kept", (json_int_t)r.kept, "last", (json_int_t)r.last,
                     "rows", (json_int_t)r.rows, "group", (json_int_t)r.group, "fresh",
                     (json_int_t)r.fresh, "exact", r.exact, "first_complete", r.first_complete,
                     "in_turns", r.in_turns, "tagged", r.tagged);
}

dray__versions dray__schedule_versions(const dray__job *job, int64_t step)
{
    dray_steps_rules rules = dray__schedule_rules(job);
    return (dray__versions){dray__rules_oldest(&rules, step), dray__rules_newest(&rules, step)};
}

int64_t dray__schedule_first_step(const dray__job *job, int64_t version)
{
    return version == 0 ? 1 : version + dray__schedule_of(job).newest;
}

int64_t dray__schedule_staleness(const dray__job *job)
{
    return dray__schedule_of(job).oldest - 1;
}

int64_t dray__schedule_steps(const dray__job *job)
{
    dray__schedule schedule = dray__schedule_of(job);
    return schedule.open + (schedule.first_complete && job->fresh_share > 0);
}

int64_t dray__schedule_engines(const dray__job *job)
{
    int64_t count = 0;
    for (uint32_t i = 0; i < job->role_count; i++)
        count += dray__role_has(&job->roles[i], "rollout") ? job->roles[i].instances : 0;
    return count;
}

/* ---- rules ----------------------------------------------------------------------------------- */

static int rule_versions(const dray__job *job, const dray__places *at, dray_error *error)
{
    dray__schedule schedule = dray__schedule_of(job);
    if (!schedule.first_complete && job->staleness)
        return dray__setting_fail(at, "staleness", error,
                                  "expected 0 with schedule %s, which says itself how old samples "
                                  "may be (it is for schedule %s), found %lld",
                                  schedule.name, names[DRAY__SCHEDULE_ASYNC],
                                  (long long)job->staleness);
    if (job->fresh_share > 0 && schedule.oldest == schedule.newest)
        return dray__setting_fail(
            at, "fresh_share", error,
            "expected 0 with schedule %s, whose samples of a step are all of one version, found %g",
            schedule.name, job->fresh_share);
    if (schedule.in_turns && dray__schedule_engines(job) < 2)
        return dray__setting_fail(at, "schedule", error,
                                  "expected two instances with the task rollout or more with "
                                  "schedule %s (roles.NAME.instances), as one makes samples while "
                                  "the other takes weights, found %lld",
                                  schedule.name, (long long)dray__schedule_engines(job));
    return DRAY_OK;
}

static int rule_update(const dray__job *job, const dray__places *at, dray_error *error)
{
    dray__schedule schedule = dray__schedule_of(job);
    static const char *const words[] = {[DRAY__UPDATE_BOUNDARY] = "boundary",
                                        [DRAY__UPDATE_IN_FLIGHT] = "in_flight",
                                        [DRAY__UPDATE_ANEW] = "anew"};
    bool under_way = job->update != DRAY__UPDATE_BOUNDARY;
    if (under_way && schedule.exact)
        return dray__setting_fail(
            at, "update", error,
            "expected boundary with schedule %s, whose samples are each of one version, found %s",
            schedule.name, words[job->update]);
    if (under_way && job->rollout.batching != DRAY__BATCHING_CONTINUOUS)
        return dray__setting_fail(at, "update rollout.batching", error,
                                  "expected rollout.batching continuous with update %s: a closed "
                                  "micro-batch is made by one version",
                                  words[job->update]);
    return DRAY_OK;
}

static int rule_tasks(const dray__job *job, const dray__places *at, dray_error *error)
{
    dray__schedule schedule = dray__schedule_of(job);
    if (!job->stream && schedule.open > 1)
        return dray__setting_fail(at, "stream", error,
                                  "expected true with schedule %s, which has samples of several "
                                  "steps under way, found false",
                                  schedule.name);
    if (job->rollout.partial_tokens && schedule.open == 1)
        return dray__setting_fail(at, "rollout.partial_tokens", error,
                                  "expected 0 with schedule %s, which waits for all samples of a "
                                  "step in any case, found %lld",
                                  schedule.name, (long long)job->rollout.partial_tokens);
    if (schedule.first_complete && job->queue.policy != DRAY_POLICY_ORDERED)
        return dray__setting_fail(
            at, "queue.policy", error,
            "expected none with schedule %s, which takes what is complete first, in whole groups",
            schedule.name);
    return DRAY_OK;
}

int dray__rule_schedule(const dray__job *job, const dray__places *at, dray_error *error)
{
    int rc = rule_versions(job, at, error);
    if (!rc)
        rc = rule_update(job, at, error);
    return rc ? rc : rule_tasks(job, at, error);
}
