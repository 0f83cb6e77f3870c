/* src/run/study/: `dray study`. study.c runs a job under several schedules and seeds, study_list.c
 * reads the list of them, study_read.c each run's files, study_summary.c and study_idle.c make the
 * tables, and statistics.c computes means and their intervals.
 *
 * `dray study`: one job under several schedules and seeds, run after run, and the results.
 *
 * In the study's folder:
 *   SCHEDULE/job.yaml   the job as resolved for this entry of the list
 *   SCHEDULE/seed-N/    a run's folder (run/supervisor/folder.h), and run.log: `dray run`'s output
 *   study.json          the result */
#pragma once

#include "run/run.h"

#include <jansson.h>

typedef struct dray__study_options {
    const char *job;
    const char *const *settings; /* "key=value", of all runs */
    uint32_t setting_count;
    const char *schedules; /* SCHEDULE[:KEY=VALUE...],... */
    uint32_t seeds;
    double accuracy; /* the held-out accuracy up to which steps and seconds are counted */
    const char *out; /* NULL for studies/NAME */
    /* Reports the study's progress: "start", "begin" (a run begins), "run" (a run ended),
     * "stopping". The object is valid during the call only. */
    void (*tell)(void *user, const char *event, const json_t *object);
    void *user;
} dray__study_options;

/* Makes the runs that are not done yet, for each seed all schedules, and summarises all runs. A run
 * that fails is part of the result, and is tried again by the next call. Takes over SIGINT, SIGTERM
 * and SIGHUP while it runs: the first ends the study after the current step and its checkpoint, the
 * second at once. Call it on the main thread of a process that has no other children. *folder is
 * malloc'ed. */
int dray__study(const dray__study_options *options, dray__run_end *end, json_t **result,
                char **folder, dray_error *error);
