/* Schedules: how far apart generating and training may be. A schedule is one line of schedule.c's
 * table; everything that depends on it asks here, and no other file knows a schedule by its name.
 * v0 is the first version of the weights; step k makes v_k. */
#ifndef DRAY_RUN_SCHEDULE_H
#define DRAY_RUN_SCHEDULE_H

#include "run/job.h"

enum { DRAY__KEPT_MOST = 2 };

typedef struct dray__schedule {
    const char *name;
    /* Samples of step k are of versions v_max(0, k - oldest) to v_max(0, k - newest). */
    int64_t newest, oldest;
    int64_t open; /* steps whose prompts are in the queue at once, with the one that is trained */
    int64_t kept; /* versions that can be read at once, the newest ones: from 1 to KEPT_MOST */
} dray__schedule;

/* The words of a job file, and the lines of the table that they stand for. */
#define DRAY__SCHEDULE_WORDS(WORD)                                                                 \
    WORD("sync", DRAY__SCHEDULE_SYNC)                                                              \
    WORD("one_step_async", DRAY__SCHEDULE_ONE_STEP)

enum { DRAY__SCHEDULE_SYNC = 0, DRAY__SCHEDULE_ONE_STEP };

/* The job's, with what its settings say of it. */
dray__schedule dray__schedule_of(const dray__job *job);

typedef struct dray__versions {
    int64_t oldest, newest;
} dray__versions;

/* The first step whose samples may be of the version: its evaluation comes before their prompts. */
int64_t dray__schedule_first_step(const dray__job *job, int64_t version);
/* Which versions may make samples of the step. */
dray__versions dray__schedule_versions(const dray__job *job, int64_t step);
/* How many versions a sample may be behind the one that its step begins with. */
int64_t dray__schedule_staleness(const dray__job *job);

#endif
