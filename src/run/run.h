/* src/run/: the loop of reinforcement learning that `dray run` carries out. A job file (job_load.c,
 * settings_read.c) lists the roles and their tasks. The supervisor starts a process for each role,
 * and restarts it if the job can go on without it. The tasks of the roles generate samples, give
 * rewards and train; schedule.h decides in which order and with which versions of the weights. */

/* `dray run`: one job from its file to its last checkpoint. */
#pragma once

#include <dray/dray.h>
#include <stdbool.h>

typedef struct dray__run_options {
    const char *job; /* the job file; NULL with `resume`, which reads the folder's config.yaml */
    const char *const *settings; /* "key=value" */
    uint32_t setting_count;
    const char *out;    /* the run's folder; NULL for runs/NAME, or runs/NAME-2, ... */
    const char *resume; /* the folder of an earlier run to go on with; NULL for a new run */
    bool json;          /* one object a line on stdout instead of text */
} dray__run_options;

typedef enum dray__run_end {
    DRAY__RUN_DONE = 0,
    DRAY__RUN_STOPPED, /* by Ctrl-C, after a checkpoint */
    DRAY__RUN_KILLED   /* by a second Ctrl-C, or by one before training began */
} dray__run_end;

/* Supervises the job's processes until the job has ended; none of them outlives the call. Prints to
 * stdout. Takes over SIGINT, SIGTERM and SIGHUP while it runs. Call it on the main thread of a
 * process that has no other children. Errors are those of the job file, or say why the run ended
 * and how to resume it. */
int dray__run(const dray__run_options *options, dray__run_end *end, dray_error *error);
