/* One run of a study, read from its folder. */
#pragma once

#include "run/job/job.h"
#include "run/study/statistics.h"

#include <jansson.h>

/* Held-out accuracy at one evaluation. seconds is the sum of step_seconds, so it excludes the
 * start, the warm-up, and the time between a stop and the resumption. */
typedef struct dray__study_point {
    double step, samples, seconds, accuracy;
} dray__study_point;

typedef struct dray__study_run {
    bool finished;    /* it has its last row with the evaluation; otherwise nothing below is set */
    json_t *measures; /* name: number */
    dray__study_point *points;
    uint32_t count;
    double samples, seconds; /* of the whole run */
    char diverged[96];       /* how it diverged; "" when it did not */
} dray__study_run;

/* A folder that does not exist, or whose run did not end, is no error. Returns 0, or DRAY_EFORMAT
 * when metrics.jsonl is wrong. */
int dray__study_read(const char *folder, const dray__job *job, dray__study_run *out,
                     dray_error *error);
void dray__study_run_free(dray__study_run *run);

/* Adds a row's `time` to sums. Rows before step 2 are ignored. */
void dray__study_add_time(json_t **sums, const json_t *row);
/* Puts busy.ROLE, transfer.ROLE, idle.ROLE, idle.ROLE.CAUSE and unaccounted.ROLE into `measures`,
 * as shares of the time of the role's processes. */
void dray__study_set_shares(const json_t *sums, json_t *measures);
