/* A version that waits beside the one that is served: staging with the layout of the destination,
 * allocated once. A commit is an update whose only source it is. */
#include "base/error.h"
#include "memory/region.h"
#include "mover/cuda/cuda.h"
#include "weights/update/subscriber.h"

#include <dray/gpu.h>
#include <stdlib.h>

void dray__stage_drop(dray_subscriber *s)
{
    uint32_t count = s->destination.layout ? dray_layout_region_count(s->destination.layout) : 0;
    for (uint32_t i = 0; s->staging && !s->staged && i < count; i++)
        dray_region_free(s->staging[i]);
    if (s->staged) /* which has the staging */
        dray__sources_free(s->staged);
    else
        free(s->staging);
    free(s->staged_sums);
    s->staged = NULL;
    s->staging = NULL;
    s->staged_sums = NULL;
    s->staging_bytes = 0;
    s->staged_version = s->staged_incarnation = 0;
    s->has_staged = false;
}

/* Beside memory of a GPU: memory of the same GPU, or pinned memory. */
static int stage_region(const dray_subscriber *s, uint32_t index, uint64_t bytes, dray_region **out,
                        dray_error *error)
{
    const dray_region *beside = s->destination.regions[index];
    if (dray_region_get_kind(beside) != DRAY_REGION_CUDA)
        return dray_region_alloc(DRAY_REGION_HOST, bytes, "staging", out, error);
    if (s->stage_kind != DRAY_REGION_PINNED)
        return dray__region_alloc_cuda(beside->device->uuid, bytes, "staging", out, error);
    int rc = dray__cuda_enter(beside->device, error);
    if (rc)
        return rc;
    rc = dray_region_alloc(DRAY_REGION_PINNED, bytes, "staging", out, error);
    dray__cuda_leave();
    return rc;
}

int dray__stage_open(dray_subscriber *s, dray_error *error)
{
    const dray_layout *layout = s->destination.layout;
    uint32_t count = dray_layout_region_count(layout);
    if (s->staged)
        return DRAY_OK;
    s->staging = calloc((size_t)count + DRAY__EXTRA_REGIONS, sizeof(dray_region *));
    int rc = s->staging ? DRAY_OK : dray__nomem(error);
    for (uint32_t i = 0; i < count && rc == DRAY_OK; i++) {
        uint64_t bytes = dray_layout_region(layout, i)->bytes;
        rc = stage_region(s, i, bytes, &s->staging[i], error);
        s->staging_bytes += bytes;
    }
    if (rc == DRAY_OK)
        rc = dray__sources_staged(&s->destination, s->staging, &s->staged, error);
    if (rc)
        dray__stage_drop(s);
    return rc;
}

int dray__stage_commit(dray_subscriber *s, dray_error *error)
{
    dray__transfer_options options = {
        .strategy = DRAY_STRATEGY_DIRECT,
        .bucket_bytes = DRAY__BUCKET_DEFAULT,
        .verify = s->staged_sums != NULL,
        /* What a kernel moves it reads back in the same pass; copy engines do better with PCIe. */
        .copy_engines = s->stage_kind == DRAY_REGION_PINNED ? 0 : DRAY__NO_COPY_ENGINES,
        .attempt = s->attempt};
    s->sources = s->staged;
    s->target = s->destination;
    int rc = dray__transfer_open(s->sources, &s->target, &options, &s->transfer, error);
    return rc ? rc : dray__waker_add(&s->waker, dray__transfer_fd(s->transfer), error);
}
