/* Schedules: how far apart generating and training may be. A schedule is one line of schedule.c's
 * table. All code that depends on the schedule asks here, and no other file knows a schedule by its
 * name. v0 is the first version of the weights; step k makes v_k. */
#pragma once

#include "run/job/job.h"
#include "run/job/settings.h"

#include <dray/steps.h>
#include <jansson.h>

enum { DRAY__KEPT_MOST = 2 };

typedef struct dray__schedule {
    const char *name;
    /* Samples of step k are of versions v_max(0, k - oldest) to v_max(0, k - newest). */
    int64_t newest, oldest;
    int64_t open; /* steps whose prompts are in the queue at once, with the one that is trained */
    int64_t kept; /* versions that can be read at once, the newest ones: from 1 to KEPT_MOST */
    /* Engines take exactly the version that a step's samples need. Otherwise they take any allowed
     * version, the newest one as soon as possible, and never an older one than they have. */
    bool exact;
    /* A step trains the samples that are complete first, in whole groups, of any step's prompts.
     * Otherwise it trains those of its own prompts. */
    bool first_complete;
    /* The number of engines that take weights at once is limited, so that the others make as many
     * samples as are trained. */
    bool in_turns;
} dray__schedule;

/* The words of a job file, and their rows of the table. */
#define DRAY__SCHEDULE_WORDS(WORD)                                                                 \
    WORD("sync", DRAY__SCHEDULE_SYNC)                                                              \
    WORD("one_step_async", DRAY__SCHEDULE_ONE_STEP)                                                \
    WORD("rolling", DRAY__SCHEDULE_ROLLING)                                                        \
    WORD("async", DRAY__SCHEDULE_ASYNC)

enum {
    DRAY__SCHEDULE_SYNC = 0,
    DRAY__SCHEDULE_ONE_STEP,
    DRAY__SCHEDULE_ROLLING,
    DRAY__SCHEDULE_ASYNC
};

/* The job's schedule, with its settings. */
dray__schedule dray__schedule_of(const dray__job *job);

/* The same rules as trainers and engines take them, the user's own included; and as a new JSON
 * object of numbers (NULL when out of memory). */
dray_steps_rules dray__schedule_rules(const dray__job *job);
json_t *dray__schedule_rules_json(const dray__job *job);

typedef struct dray__versions {
    int64_t oldest, newest;
} dray__versions;

/* Returns the first step whose samples may be of the version. The version's evaluation comes before
 * the step's prompts. */
int64_t dray__schedule_first_step(const dray__job *job, int64_t version);
/* Returns which versions may make samples of the step. */
dray__versions dray__schedule_versions(const dray__job *job, int64_t step);
/* Returns how many versions a sample may be behind the one that its step begins with. */
int64_t dray__schedule_staleness(const dray__job *job);
/* The number of steps whose prompts the queue must have room for: the open ones, and one more when
 * a step may wait for samples that only other prompts can bring (fresh_share). */
int64_t dray__schedule_steps(const dray__job *job);
/* Returns the number of instances of roles that generate. */
int64_t dray__schedule_engines(const dray__job *job);

/* Sets the defaults that depend on the schedule. */
void dray__schedule_settle(dray__job *job, const dray__places *at);
/* Checks the settings that belong to the schedule. Returns 0, or DRAY_EINVALID with the line. */
int dray__rule_schedule(const dray__job *job, const dray__places *at, dray_error *error);
