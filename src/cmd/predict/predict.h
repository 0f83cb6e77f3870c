/* src/cmd/predict/: `dray simulate` and `dray size`, which predict a job's steps. Both have the
 * arguments that are declared here, and load the job and the trace that these name. */
#pragma once

#include "run/simulate/simulate.h"

#include "cmd/cmd.h"

/* The beginning of each command's struct. */
typedef struct cmd_predict {
    cmd_list job, settings, traces;
    const char *device;
    bool json;
} cmd_predict;

/* --trace, --device, --set and --json. */
extern const cmd_usage cmd_predict_usage;

/* Ends with a usage error unless there is either a trace or a device. */
void cmd_predict_check(const struct argp_state *state, const void *to);
/* Loads the job, and how long its tasks take. `each` is as for dray__services_fit_all. Returns
 * CMD_OK, or an exit status after it has printed the error. The caller frees the job and the
 * services after CMD_OK. */
int cmd_predict_load(const char *name, const cmd_predict *p, dray__job **job,
                     dray__services *services, dray__services *each);
