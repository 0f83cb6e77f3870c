/* The functions that `dray simulate` and `dray size` share; predict.h describes them. */
#include "cmd/predict/predict.h"

static const cmd_option options[] = {
    CMD_LIST(cmd_predict, traces, "trace", 't', "RUN",
             "The folder of a run of the same job, under whatever schedule and split; given again, "
             "their times are averaged"),
    CMD_TEXT(cmd_predict, device, "device", 'd', "NAME",
             "Without a trace: estimate from the model's shape and the figures of h100, h200 or "
             "b200"),
    CMD_SET(cmd_predict, settings, "Change a setting of the job, as in --set schedule=async"),
    CMD_JSON(cmd_predict, json), CMD_END};
const cmd_usage cmd_predict_usage = {.options = options};

void cmd_predict_check(const struct argp_state *state, const void *to)
{
    const cmd_predict *p = to;
    if (!p->traces.count == !p->device)
        argp_error(state, "expected --trace RUN, the folder of a run of this job, or --device NAME "
                          "for an estimate");
}

int cmd_predict_load(const char *name, const cmd_predict *p, dray__job **job,
                     dray__services *services, dray__services *each)
{
    dray_error error;
    if (dray__job_load(p->job.items[0], p->settings.items, p->settings.count, job, NULL, &error))
        return cmd_refuse_job(name, &error);
    int rc = p->traces.count ? dray__services_fit_all(p->traces.items, p->traces.count, *job,
                                                      services, each, &error)
                             : dray__services_estimate(p->device, *job, services, &error);
    if (!rc)
        return CMD_OK;
    dray__services_free(services);
    dray__job_free(*job);
    return cmd_refuse(name, &error);
}
