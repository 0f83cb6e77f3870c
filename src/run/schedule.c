#include "run/schedule.h"

#define NAME(word, line) [line] = word,
static const char *const names[] = {DRAY__SCHEDULE_WORDS(NAME)};

static const dray__schedule schedules[] = {
    [DRAY__SCHEDULE_SYNC] = {.newest = 1, .oldest = 1, .open = 1, .kept = 1},
    [DRAY__SCHEDULE_ONE_STEP] = {.newest = 2, .oldest = 2, .open = 2, .kept = 2},
};

dray__schedule dray__schedule_of(const dray__job *job)
{
    dray__schedule schedule = schedules[job->schedule];
    schedule.name = names[job->schedule];
    return schedule;
}

static int64_t version(int64_t number)
{
    return number > 0 ? number : 0;
}

dray__versions dray__schedule_versions(const dray__job *job, int64_t step)
{
    dray__schedule schedule = dray__schedule_of(job);
    return (dray__versions){version(step - schedule.oldest), version(step - schedule.newest)};
}

int64_t dray__schedule_first_step(const dray__job *job, int64_t version)
{
    return version == 0 ? 1 : version + dray__schedule_of(job).newest;
}

int64_t dray__schedule_staleness(const dray__job *job)
{
    return dray__schedule_of(job).oldest - 1;
}
