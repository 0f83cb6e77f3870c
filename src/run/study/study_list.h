/* The list of schedules of a study, and its job. */
#pragma once

#include "run/study/study.h"
#include "run/study/study_read.h"

typedef struct dray__study_trial {
    int64_t seed;
    char *folder;
    dray__study_run run;
    char error[DRAY_ERROR_MESSAGE_MAX]; /* why it failed; "" when it did not */
} dray__study_trial;

typedef struct dray__study_entry {
    char *text;     /* as in the list; the name of its folder */
    char *folder;   /* absolute */
    dray__job *job; /* resolved */
    char *resolved;
    dray__study_trial *trials; /* one for each seed */
} dray__study_entry;

typedef struct dray__study_plan {
    const dray__study_options *options;
    char *folder; /* absolute */
    dray__study_entry *entries;
    uint32_t entry_count, seed_count;
    bool stopped;
} dray__study_plan;

/* Reads the list and the job of every entry; makes nothing. Returns 0, DRAY_EINVALID when the list
 * is wrong, or the errors of dray__job_load. */
int dray__study_plan_open(const dray__study_options *options, dray__study_plan *out,
                          dray_error *error);
/* Makes the folders, or finds those of the same study. Returns 0, or DRAY_EEXIST when they are of
 * another job. */
int dray__study_plan_place(dray__study_plan *plan, dray_error *error);
void dray__study_plan_close(dray__study_plan *plan);

/* The whole result (docs/run.md). */
int dray__study_summary(const dray__study_plan *plan, json_t **out, dray_error *error);
