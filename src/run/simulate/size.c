#include "base/error.h"
#include "run/job/schedule.h"
#include "run/simulate/simulate.h"

#include <stdlib.h>
#include <string.h>

enum { FEW = 3, DEVICES_MOST = 1024 };

void dray__size_roles(const dray__job *job, uint32_t *engine, uint32_t *trainer)
{
    *engine = (uint32_t)(dray__job_role_of(job, "rollout") - job->roles);
    *trainer = (uint32_t)(dray__job_role_of(job, "actor") - job->roles);
}

static int try(const dray__job *job, const dray__services *services, dray__sizing *split,
               uint32_t runs, dray_error *error)
{
    dray__job changed = *job;
    dray__job_role roles[64];
    uint32_t engine, trainer;
    dray__size_roles(job, &engine, &trainer);
    memcpy(roles, job->roles, job->role_count * sizeof(*roles));
    roles[engine].instances = split->instances;
    roles[trainer].ranks = split->ranks;
    changed.roles = roles;
    return dray__simulate(&changed, services, runs, &split->made, error);
}

static bool better(const dray__sizing *a, const dray__sizing *b)
{
    double x = a->made.samples_per_s.mean, y = b->made.samples_per_s.mean;
    /* When both are nearly equal, the one with fresher samples comes first. */
    if (x > y * 0.999 && y > x * 0.999)
        return a->made.staleness_mean.mean < b->made.staleness_mean.mean;
    return x > y;
}

static void keep(dray__sizing *list, uint32_t *count, const dray__sizing *new)
{
    uint32_t at = *count;
    if (at == DRAY__SPLITS && !better(new, &list[at - 1]))
        return;
    at = at == DRAY__SPLITS ? at - 1 : (*count)++;
    for (; at && better(new, &list[at - 1]); at--)
        list[at] = list[at - 1];
    list[at] = *new;
}

int dray__size(const dray__job *job, const dray__services *services, int64_t devices,
               double staleness, dray__sizing out[DRAY__SPLITS], uint32_t *count,
               double *engine_more, double *trainer_more, dray_error *error)
{
    uint32_t engine, trainer;
    *count = 0;
    *engine_more = *trainer_more = 1;
    if (job->role_count > 16 || devices > DEVICES_MOST)
        return dray__fail(error, DRAY_EINVALID, "expected at most 16 roles and %d devices",
                          DEVICES_MOST);
    dray__size_roles(job, &engine, &trainer);
    if (engine == trainer)
        return dray__fail(error, DRAY_EINVALID,
                          "roles: expected one that generates and another one that trains");
    int64_t ranks = job->roles[engine].ranks, most = 64;
    int rc = DRAY_OK;
    for (int64_t n = 1; n * ranks < devices && !rc; n++) {
        dray__sizing split = {.instances = n, .ranks = devices - n * ranks};
        split.ranks = split.ranks > most ? most : split.ranks;
        if (dray__schedule_of(job).in_turns && n < 2) /* one generates while another updates */
            continue;
        rc = try(job, services, &split, FEW, error);
        if (!rc && (staleness < 0 || split.made.staleness_mean.mean <= staleness))
            keep(out, count, &split);
    }
    if (!rc && !*count)
        return dray__fail(error, DRAY_EINVALID,
                          "expected a split of %lld devices between engines of %lld ranks and the "
                          "trainer whose mean staleness is at most %g, found none",
                          (long long)devices, (long long)ranks, staleness);
    dray__sizing more = {0};
    for (int side = 0; side < 2 && !rc; side++) {
        more = (dray__sizing){.instances = out[0].instances + (side == 0),
                              .ranks = out[0].ranks + (side == 1)};
        rc = try(job, services, &more, FEW, error);
        *(side ? trainer_more : engine_more) =
            more.made.samples_per_s.mean / out[0].made.samples_per_s.mean;
    }
    return rc;
}
