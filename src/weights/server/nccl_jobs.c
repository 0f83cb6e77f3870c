/* Jobs between a region and NCCL's slots, kept from one update to the next (nccl.h). */
#include "base/error.h"
#include "base/hash.h"
#include "weights/server/nccl.h"

#include <stdlib.h>
#include <string.h>

enum { KEPT_MAX = 1024 };

struct dray__nccl_kept {
    uint64_t hash, count;
    uint32_t sums;
    dray__cuda_item *items;
    dray__cuda_job *job;
};

/* Without the bytes between the members, which are anything. */
static dray__cuda_item *copy_of(const dray__cuda_item *items, uint64_t count)
{
    dray__cuda_item *out = calloc(count ? count : 1, sizeof *out);
    for (uint64_t i = 0; i < count && out; i++) {
        const dray_copy *from = &items[i].copy;
        dray_copy *to = &out[i].copy;
        out[i].source_base = items[i].source_base;
        out[i].destination_base = items[i].destination_base;
        to->tensor = from->tensor;
        to->ndim = from->ndim;
        to->source_dtype = from->source_dtype;
        to->destination_dtype = from->destination_dtype;
        to->source_offset = from->source_offset;
        to->destination_offset = from->destination_offset;
        for (uint32_t d = 0; d < from->ndim && d < DRAY_MAX_DIMS; d++) {
            to->start[d] = from->start[d];
            to->extent[d] = from->extent[d];
            to->source_stride[d] = from->source_stride[d];
            to->destination_stride[d] = from->destination_stride[d];
        }
    }
    return out;
}

static void drop(dray__nccl_kept *kept)
{
    dray__cuda_job_close(kept->job);
    free(kept->items);
    *kept = (dray__nccl_kept){0};
}

void dray__nccl_jobs_clear(dray__nccl_jobs *jobs)
{
    for (uint32_t i = 0; jobs->kept && i < jobs->count && i < KEPT_MAX; i++)
        drop(&jobs->kept[i]);
    free(jobs->kept);
    *jobs = (dray__nccl_jobs){0};
}

static const dray__nccl_kept *find(const dray__nccl_jobs *jobs, const dray__nccl_kept *like)
{
    for (uint32_t i = 0; i < jobs->count && i < KEPT_MAX; i++) {
        const dray__nccl_kept *kept = &jobs->kept[i];
        if (kept->hash == like->hash && kept->count == like->count && kept->sums == like->sums &&
            memcmp(kept->items, like->items, like->count * sizeof *like->items) == 0)
            return kept;
    }
    return NULL;
}

int dray__nccl_jobs_get(dray__nccl_jobs *jobs, uint64_t token, dray__cuda_device *device,
                        const dray_layout *layout, const dray__cuda_item *items, uint64_t count,
                        uint32_t sums, bool may_make, dray__cuda_job **out, dray_error *error)
{
    if (jobs->token != token && jobs->kept && !may_make)
        return DRAY_EAGAIN;
    if (jobs->token != token)
        dray__nccl_jobs_clear(jobs);
    jobs->token = token;
    if (!jobs->kept)
        jobs->kept = calloc(KEPT_MAX, sizeof *jobs->kept);
    dray__nccl_kept made = {.count = count, .sums = sums, .items = copy_of(items, count)};
    if (!jobs->kept || !made.items) {
        free(made.items);
        return dray__nomem(error);
    }
    made.hash = dray__hash(made.items, count * sizeof *made.items);
    const dray__nccl_kept *kept = find(jobs, &made);
    if (kept || !may_make) {
        free(made.items);
        *out = kept ? kept->job : NULL;
        return kept ? DRAY_OK : DRAY_EAGAIN;
    }
    const dray__cuda_job_options options = {.sums = sums};
    int rc = dray__cuda_job_new(device, layout, items, count, &options, &made.job, error);
    if (rc) {
        free(made.items);
        return rc;
    }
    dray__nccl_kept *place =
        &jobs->kept[jobs->count++ % KEPT_MAX]; /* the oldest, when it is full */
    drop(place);
    *place = made;
    *out = made.job;
    return DRAY_OK;
}
