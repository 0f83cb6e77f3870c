/* Faults that tests order: DRAY_FAULT="ROLE:RANK:POINT:STEP:ACTION[,...]", for example
 * "trainer:0:after_step:7:kill". ACTION is kill (SIGKILL), exit (status 1), stop (SIGSTOP). Only
 * the first start of a role has the fault; with "!" after the action every start does. The points
 * are listed in docs/run.md. */
#pragma once

#include <dray/queue.h>

/* Reads the variable. Returns 0, or DRAY_EINVALID with the error in it. */
int dray__fault_open(const char *role, uint32_t rank, uint32_t epoch, dray_error *error);
/* Is called when the process is at `point` of `step`; carries out the fault that is ordered
 * there. */
void dray__fault_at(const char *point, int64_t step);
/* For tests that count samples: appends the committed rows (rows NULL: all of the batch) as a line
 * to the file $DRAY_RECORD. The line is an object {"task", "pid", "from", "step", "partition",
 * "rows": [[slot, version, prompt, oldest, newest], ...]}. from is the step that the run resumed
 * from; version is the tag, or -1; prompt is its tokens, for tasks that read them; oldest and
 * newest are the versions of the response's tokens, or -1 for tasks that do not read them. */
void dray__fault_record(const char *task, dray_batch *batch, const uint32_t *rows, uint32_t count,
                        int64_t step, int64_t from);
