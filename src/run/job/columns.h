/* The tasks of one job with their columns: the built-in table (tasks.h), overridden by the job's
 * `tasks`. */
#pragma once

#include "run/job/tasks.h"

enum { DRAY__JOB_TASKS = 32, DRAY__TASK_COLUMNS = 16 };

typedef struct dray__task_view {
    const char *name;
    const dray__task_kind *kind; /* NULL for the job's own */
    const char *needs[DRAY__TASK_COLUMNS], *writes[DRAY__TASK_COLUMNS];
    uint32_t need_count, write_count;
} dray__task_view;

/* Writes the tasks that the job has, and returns how many. The driver is one of them: it writes the
 * columns that samples begin with. */
uint32_t dray__job_tasks(const dray__job *job, dray__task_view out[DRAY__JOB_TASKS]);
/* Returns the columns that the built-in program reads and writes for the task in this job, without
 * the job's `tasks`. */
dray__task_view dray__task_built_in(const dray__job *job, const dray__task_kind *kind);
/* Returns whether the task claims rows. The driver does not: it inserts them. */
bool dray__task_claims(const dray__task_view *task);
