#include "base/error.h"
#include "run/job/settings.h"
#include "run/simulate/simulate.h"

#include <stdlib.h>
#include <string.h>

/* Dense bf16 operations and bytes of memory per second, by the data sheets (NVIDIA H100 SXM, H200
 * SXM, B200), and the shares of both that training and generation commonly reach. */
static const struct device {
    const char *name;
    double operations, bytes;
} devices[] = {{"h100", 989e12, 3.35e12}, {"h200", 989e12, 4.8e12}, {"b200", 2250e12, 8e12}};
#define SHARE_OF_OPERATIONS 0.4
#define SHARE_OF_BYTES 0.6

static double parameters_of(const dray__job_model *m)
{
    double h = (double)m->hidden_size, head = h / (double)m->heads;
    double attention = h * h * 2 + 2 * h * head * (double)m->kv_heads,
           forward = 3 * h * (double)m->intermediate_size;
    return (double)m->layers * (attention + forward) + 2 * h * 259;
}

/* Operations are 2 for each parameter and token in a forward pass, 6 with gradients (Kaplan et al.
 * 2020, arXiv 2001.08361, 2.1). Generating one token of all rows takes the longer of reading all
 * parameters once and computing. Lengths are not known; all are taken as half of their limit. */
int dray__services_estimate(const char *device, const dray__job *job, dray__services *out,
                            dray_error *error)
{
    const struct device *is = NULL;
    *out = (dray__services){.estimated = true, .by_ranks = true};
    for (size_t i = 0; i < sizeof(devices) / sizeof(devices[0]); i++)
        if (strcmp(devices[i].name, device) == 0)
            is = &devices[i];
    if (!is)
        return dray__fail(error, DRAY_EINVALID,
                          "--device: expected one of h100, h200, b200, found '%s'", device);
    double parameters = parameters_of(&job->model), per = is->operations * SHARE_OF_OPERATIONS;
    out->token_fixed = 2 * parameters / (is->bytes * SHARE_OF_BYTES);
    out->token_row = 2 * parameters / per;
    out->tasks[DRAY__SIM_REFERENCE].token = out->tasks[DRAY__SIM_OLD].token = 2 * parameters / per;
    out->tasks[DRAY__SIM_ACTOR].token = 6 * parameters / per;
    out->take = 2 * parameters / (is->bytes * SHARE_OF_BYTES);
    out->engine_ranks = out->trainer_ranks = 1;
    out->group = (uint32_t)job->rollout.samples;
    out->groups = 1;
    out->lengths = calloc(out->group, sizeof(*out->lengths));
    if (!out->lengths)
        return dray__nomem(error);
    for (uint32_t i = 0; i < out->group; i++)
        out->lengths[i] = (uint32_t)(job->rollout.max_new_tokens / 2 + 1);
    return DRAY_OK;
}
