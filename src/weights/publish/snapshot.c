/* A publisher's snapshot (snapshot.h). */
#include "weights/publish/snapshot.h"

#include "base/clock.h"
#include "base/error.h"
#include "memory/region.h"
#include "mover/cuda/cuda.h"
#include "mover/mover.h"

#include <inttypes.h>
#include <stdlib.h>
#include <string.h>

/* The blocks in one GPU's memory. */
struct dray__snapshot_gpu {
    dray__cuda_device *device;
    dray__cuda_job *job;
    dray__snapshot_gpu *next;
};

/* ---- regions --------------------------------------------------------------------------------- */

/* Allocates the region for the copy of `origin`: memory of the same GPU, or shared memory. */
static int make_region(const dray_region *origin, const dray_region_info *info, dray_region **out,
                       dray_error *error)
{
    if (!origin->device || dray_region_get_kind(origin) != DRAY_REGION_CUDA)
        return dray_region_alloc(DRAY_REGION_SHARED, info->bytes, info->name, out, error);
    int rc = dray__cuda_enter(origin->device, error);
    if (rc)
        return rc;
    rc = dray_region_alloc(DRAY_REGION_CUDA, info->bytes, info->name, out, error);
    dray__cuda_leave();
    return rc;
}

static void free_regions(dray_publisher *p, const dray_layout *layout)
{
    for (uint32_t i = 0; i < dray_layout_region_count(layout); i++) {
        dray_region_free(p->regions[i]);
        p->regions[i] = NULL;
    }
}

static int make_regions(dray_publisher *p, const dray_layout *layout, dray_error *error)
{
    int rc = DRAY_OK;
    for (uint32_t i = 0; i < dray_layout_region_count(layout) && rc == DRAY_OK; i++) {
        rc = make_region(p->origin[i], dray_layout_region(layout, i), &p->regions[i], error);
        if (rc)
            dray__fail_prefix(error, rc, "the snapshot of region %" PRIu32 ": ", i);
    }
    if (rc)
        free_regions(p, layout);
    return rc;
}

int dray__snapshot_make_regions(dray_publisher *p, dray_error *error)
{
    return make_regions(p, p->layout, error);
}

static void forget_jobs(dray_publisher *p)
{
    while (p->snapshot_gpus) {
        dray__snapshot_gpu *gpu = p->snapshot_gpus;
        p->snapshot_gpus = gpu->next;
        dray__cuda_job_close(gpu->job);
        free(gpu);
    }
}

void dray__snapshot_free_regions(dray_publisher *p)
{
    forget_jobs(p);
    free_regions(p, p->layout);
}

int dray__snapshot_open(dray_publisher *p, const dray_layout *layout, dray_region *const *regions,
                        dray__writer *packed, dray_error *error)
{
    dray_layout *made = NULL;
    uint32_t count = dray_layout_region_count(layout);
    p->origin = dray__regions_copy(layout, regions);
    p->regions = calloc((size_t)count + 2, sizeof(dray_region *));
    int rc = p->origin && p->regions ? make_regions(p, layout, error) : dray__nomem(error);
    if (rc)
        return rc;
    rc = dray__layout_in(layout, DRAY_REGION_SHARED, p->regions, &made, error);
    if (rc == DRAY_OK)
        rc = dray__layout_copy(made, p->regions, &p->layout, packed, error);
    dray_layout_free(made);
    if (rc) /* without a layout, closing would not free the regions */
        free_regions(p, layout);
    return rc;
}

int dray__snapshot_move(dray_publisher *p, dray_region *const *regions, dray_error *error)
{
    uint32_t count = dray_layout_region_count(p->layout);
    for (uint32_t i = 0; i < count; i++) {
        uint64_t wanted = dray_layout_region(p->layout, i)->bytes;
        if (!regions[i] || dray_region_bytes(regions[i]) < wanted)
            return dray__fail(error, DRAY_EINVALID,
                              "region %" PRIu32 ": expected %" PRIu64 " bytes, found %" PRIu64, i,
                              wanted, regions[i] ? dray_region_bytes(regions[i]) : 0);
    }
    forget_jobs(p);
    memcpy(p->origin, regions, count * sizeof *regions);
    return DRAY_OK;
}

/* ---- copies ---------------------------------------------------------------------------------- */

/* Returns the GPU that has both sides of the block's copy, or NULL. */
static dray__cuda_device *gpu_of(const dray_publisher *p, uint32_t block)
{
    uint32_t at = dray_layout_block(p->layout, block)->region;
    const dray_region *from = p->origin[at], *to = p->regions[at];
    bool near = dray_region_get_kind(from) == DRAY_REGION_CUDA &&
                dray_region_get_kind(to) == DRAY_REGION_CUDA && from->device == to->device;
    return near ? to->device : NULL;
}

/* Compiles the copies of all blocks on the GPU. */
static int add_gpu(dray_publisher *p, dray__cuda_device *device, dray_error *error)
{
    uint32_t blocks = dray_layout_block_count(p->layout), count = 0;
    dray__snapshot_gpu *gpu = calloc(1, sizeof *gpu);
    dray__cuda_item *items = calloc((size_t)blocks + 1, sizeof *items);
    int rc = gpu && items ? DRAY_OK : dray__nomem(error);
    for (uint32_t b = 0; b < blocks && rc == DRAY_OK; b++) {
        if (gpu_of(p, b) != device)
            continue;
        dray_copy copy = dray__block_copy(p->layout, b);
        items[count++] = (dray__cuda_item){
            .copy = copy,
            .source_base = dray_region_device_address(p->origin[copy.source_region]),
            .destination_base = dray_region_device_address(p->regions[copy.destination_region]),
            .near = true};
    }
    if (rc == DRAY_OK)
        rc = dray__cuda_job_new(device, p->layout, items, count, NULL, &gpu->job, error);
    free(items);
    if (rc) {
        free(gpu);
        return rc;
    }
    gpu->device = device;
    gpu->next = p->snapshot_gpus;
    p->snapshot_gpus = gpu;
    return DRAY_OK;
}

static const dray__snapshot_gpu *known_gpu(const dray_publisher *p, const dray__cuda_device *device)
{
    const dray__snapshot_gpu *gpu = p->snapshot_gpus;
    while (gpu && gpu->device != device)
        gpu = gpu->next;
    return gpu;
}

/* Starts the copies on all GPUs, copies all other blocks meanwhile, and waits for the GPUs. */
static int fill(dray_publisher *p, int64_t deadline_ns, dray_error *error)
{
    int rc = DRAY_OK;
    uint32_t blocks = dray_layout_block_count(p->layout);
    for (uint32_t b = 0; b < blocks && rc == DRAY_OK; b++) {
        dray__cuda_device *device = gpu_of(p, b);
        if (device && !known_gpu(p, device))
            rc = add_gpu(p, device, error);
    }
    for (dray__snapshot_gpu *gpu = p->snapshot_gpus; gpu && rc == DRAY_OK; gpu = gpu->next)
        rc = dray__cuda_job_start(gpu->job, NULL, 0, error);
    for (uint32_t b = 0; b < blocks && rc == DRAY_OK; b++) {
        dray_copy copy = dray__block_copy(p->layout, b);
        dray__move_options options = {.layout = p->layout};
        if (!gpu_of(p, b))
            rc = dray__move_all(p->origin[copy.source_region], p->regions[copy.destination_region],
                                &copy, 1, &options, error);
    }
    for (dray__snapshot_gpu *gpu = p->snapshot_gpus; gpu && rc == DRAY_OK; gpu = gpu->next) {
        rc = dray__cuda_job_wait(gpu->job, deadline_ns, error);
        if (rc == DRAY_EAGAIN)
            rc = dray__fail(error, DRAY_ETIMEDOUT,
                            "the snapshot was not copied on the GPU at the deadline");
    }
    if (rc) /* jobs that still run end here */
        forget_jobs(p);
    return rc;
}

int dray__snapshot_take(dray_publisher *p, int64_t deadline_ns, dray_error *error)
{
    int64_t left = (int64_t)dray__left(deadline_ns);
    int rc = p->has_published ? dray__publisher_drain(p, p->published, left, NULL, error) : DRAY_OK;
    return rc ? rc : fill(p, deadline_ns, error);
}

void dray__snapshot_close(dray_publisher *p)
{
    if (p->origin && p->regions && p->layout)
        dray__snapshot_free_regions(p);
    free(p->origin);
    p->origin = NULL;
}
