/* src/run/study/: `dray study`. study.c runs a job under several schedules and seeds, study_list.c
 * reads which, study_read.c what each run left behind, study_summary.c and study_idle.c make the
 * tables, and statistics.c computes means and their intervals.
 *
 * `dray study`: one job under several schedules and seeds, run after run, and what comes out.
 *
 * In the study's folder:
 *   SCHEDULE/job.yaml   the job as resolved for this entry of the list
 *   SCHEDULE/seed-N/    a run's folder (run/supervisor/folder.h), and run.log: what `dray run` said
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
    double accuracy; /* held out, to which steps and seconds are counted */
    const char *out; /* NULL: studies/NAME */
    /* Tells of the study as it goes: "start", "begin" (a run), "run" (its end), "stopping". The
     * object is the caller's for the time of the call. */
    void (*tell)(void *user, const char *event, const json_t *object);
    void *user;
} dray__study_options;

/* Runs what is not done yet, seed by seed over the schedules, and summarises all. A run that fails
 * is part of the result, and is tried again by the next call. Takes over SIGINT, SIGTERM and SIGHUP
 * while it runs: the first ends the study after the step and the checkpoint of the run that is
 * going on, the second at once. Call it on the main thread of a process that has no other children.
 * *folder: malloc'ed. */
int dray__study(const dray__study_options *options, dray__run_end *end, json_t **result,
                char **folder, dray_error *error);
