/* Sums by GPUs (source_sums.h): an item without a destination for each piece. */
#include "weights/source_sums.h"

#include "base/arena.h"
#include "base/clock.h"
#include "base/error.h"
#include "mover/cuda/cuda.h"

#include <stdlib.h>

/* A waiting caller checks at this interval whether the sums are still wanted. */
#define LOOK_NS (20 * DRAY__MILLISECOND)

struct summed { /* by one GPU */
    dray__cuda_device *device;
    dray__cuda_job *job;
    uint32_t *pieces; /* of each item */
    dray__cuda_item *items;
    uint64_t count;
};

struct dray__source_sums {
    const dray_layout *layout;
    const dray__pieces *pieces;
    struct summed *gpus;
    uint32_t count;
    uint64_t capacity;
};

bool dray__sums_by_gpu(const dray_region *region)
{
    return region->device_address && region->device;
}

void dray__source_sums_free(dray__source_sums *s)
{
    if (!s)
        return;
    for (uint32_t i = 0; i < s->count; i++) {
        dray__cuda_job_close(s->gpus[i].job);
        free(s->gpus[i].pieces);
        free(s->gpus[i].items);
    }
    free(s->gpus);
    free(s);
}

static struct summed *summed_of(dray__source_sums *s, dray__cuda_device *device)
{
    for (uint32_t i = 0; i < s->count; i++)
        if (s->gpus[i].device == device)
            return &s->gpus[i];
    struct summed *last = dray__append(&s->gpus, sizeof *last, s->count, &s->capacity);
    if (!last)
        return NULL;
    *last = (struct summed){.device = device};
    last->pieces = calloc((size_t)s->pieces->count + 1, sizeof *last->pieces);
    last->items = calloc((size_t)s->pieces->count + 1, sizeof *last->items);
    s->count++;
    return last->pieces && last->items ? last : NULL;
}

static dray_copy piece_copy(const dray_layout *layout, const dray__piece *piece)
{
    dray_copy whole = dray__block_copy(layout, piece->block);
    if (!whole.ndim) { /* a scalar is one row of one column */
        whole.ndim = 1;
        whole.extent[0] = 1;
    }
    return dray__copy_cut(&whole, &piece->rect);
}

static int add_pieces(dray__source_sums *s, dray_region *const *regions, dray_error *error)
{
    for (uint32_t i = 0; i < s->pieces->count; i++) {
        const dray__piece *piece = &s->pieces->items[i];
        const dray_region *region = regions[dray_layout_block(s->layout, piece->block)->region];
        if (!piece->owned || !dray__sums_by_gpu(region))
            continue;
        struct summed *gpu = summed_of(s, region->device);
        if (!gpu)
            return dray__nomem(error);
        gpu->pieces[gpu->count] = i;
        gpu->items[gpu->count++] =
            (dray__cuda_item){.copy = piece_copy(s->layout, piece),
                              .source_base = region->device_address,
                              .near = dray_region_get_kind(region) == DRAY_REGION_CUDA,
                              .host = dray_region_get_kind(region) == DRAY_REGION_PINNED};
    }
    return DRAY_OK;
}

int dray__source_sums_new(const dray_layout *layout, dray_region *const *regions,
                          const dray__pieces *pieces, dray__source_sums **out, dray_error *error)
{
    dray__source_sums *s = calloc(1, sizeof *s);
    if (!s)
        return dray__nomem(error);
    s->layout = layout;
    s->pieces = pieces;
    int rc = add_pieces(s, regions, error);
    for (uint32_t i = 0; i < s->count && rc == DRAY_OK; i++) {
        struct summed *gpu = &s->gpus[i];
        dray__cuda_job_options options = {.sums = DRAY__CUDA_SUM_SOURCE};
        rc = dray__cuda_job_new(gpu->device, layout, gpu->items, gpu->count, &options, &gpu->job,
                                error);
        free(gpu->items);
        gpu->items = NULL;
    }
    if (rc || !s->count) {
        dray__source_sums_free(s);
        s = NULL;
    }
    if (rc == DRAY_OK)
        *out = s;
    return rc;
}

int dray__patience_ends(dray__patience *patience, dray_error *error)
{
    if (atomic_load(&patience->ended))
        return dray__fail(error, DRAY_ECANCELED, "nobody waits for the checksums any more");
    if (dray__now() < patience->deadline_ns)
        return DRAY_OK;
    return dray__fail(error, DRAY_ETIMEDOUT, "the checksums took until the deadline");
}

static int wait_for(struct summed *gpu, dray__patience *patience, dray_error *error)
{
    int rc = DRAY_EAGAIN;
    while (rc == DRAY_EAGAIN) {
        int64_t look_ns = dray__deadline(LOOK_NS);
        rc = dray__cuda_job_wait(
            gpu->job, look_ns < patience->deadline_ns ? look_ns : patience->deadline_ns, error);
        int ended = rc == DRAY_EAGAIN ? dray__patience_ends(patience, error) : DRAY_OK;
        if (ended == DRAY_ETIMEDOUT)
            return dray__fail(
                error, ended,
                "sums on %s: the published version is not complete (its fence), or the "
                "GPU is busy",
                gpu->device->name);
        if (ended)
            return ended;
    }
    return rc;
}

/* Waits for the last run, which a caller may have given up: it goes on until its fence is complete.
 * Its results are dropped. */
static int end_last(struct summed *gpu, dray__patience *patience, dray_error *error)
{
    if (!dray__cuda_job_is_running(gpu->job))
        return DRAY_OK;
    wait_for(gpu, patience, error);
    return dray__cuda_job_is_running(gpu->job) ? dray__patience_ends(patience, error) : DRAY_OK;
}

void dray__source_sums_abort(dray__source_sums *s)
{
    for (uint32_t i = 0; i < s->count; i++)
        dray__cuda_job_abort(s->gpus[i].job);
}

bool dray__source_sums_end(dray__source_sums *s, int64_t deadline_ns)
{
    dray__patience patience = {.deadline_ns = deadline_ns};
    bool ended = true;
    dray__source_sums_abort(s);
    for (uint32_t i = 0; i < s->count; i++)
        ended = end_last(&s->gpus[i], &patience, NULL) == DRAY_OK && ended;
    return ended;
}

int dray__source_sums_start(dray__source_sums *s, CUevent ready, dray__patience *patience,
                            dray_error *error)
{
    int rc = DRAY_OK;
    for (uint32_t i = 0; i < s->count && rc == DRAY_OK; i++)
        rc = end_last(&s->gpus[i], patience, error);
    for (uint32_t i = 0; i < s->count && rc == DRAY_OK; i++)
        rc = dray__cuda_job_start(s->gpus[i].job, &ready, ready != NULL, error);
    if (rc)
        dray__source_sums_abort(s);
    return rc;
}

int dray__source_sums_finish(dray__source_sums *s, dray__patience *patience, dray__sums *out,
                             dray_error *error)
{
    int rc = DRAY_OK;
    for (uint32_t i = 0; i < s->count && rc == DRAY_OK; i++)
        rc = wait_for(&s->gpus[i], patience, error);
    if (rc)
        dray__source_sums_abort(s);
    for (uint32_t i = 0; i < s->count && rc == DRAY_OK; i++) {
        const struct summed *gpu = &s->gpus[i];
        const uint64_t *sums = dray__cuda_job_sums(gpu->job, DRAY__CUDA_SUM_SOURCE);
        for (uint64_t k = 0; k < gpu->count && rc == DRAY_OK; k++) {
            const dray__piece *piece = &s->pieces->items[gpu->pieces[k]];
            const dray_tensor_info *tensor =
                dray_layout_tensor(s->layout, dray_layout_block(s->layout, piece->block)->tensor);
            if (!dray__sums_add(out, tensor->name, tensor->dtype, dray__rect_elements(&piece->rect),
                                sums[k]))
                rc = dray__nomem(error);
        }
    }
    return rc;
}
