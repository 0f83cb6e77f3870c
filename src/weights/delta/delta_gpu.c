#include "weights/delta/delta_gpu.h"

#include "base/error.h"
#include "memory/cuda_memory.h"
#include "mover/cuda/cuda.h"

#include <stdlib.h>

enum { SLOT = 16, ALIGN = 256 };

struct dray__delta_gpu {
    dray_region *kept;
    dray__cuda_job *job;
};

bool dray__delta_by_gpu(const dray_layout *layout, dray_region *const *regions, uint32_t block)
{
    const dray_region *region = regions[dray_layout_block(layout, block)->region];
    return dray_region_get_kind(region) == DRAY_REGION_CUDA;
}

uint64_t dray__delta_gpu_room(const dray_layout *layout, dray_region *const *regions, int32_t dtype)
{
    uint64_t room = 0;
    for (uint32_t b = 0; b < dray_layout_block_count(layout); b++) {
        if (!dray__delta_by_gpu(layout, regions, b))
            continue;
        uint64_t size = dray_dtype_size((dray_dtype)dray__delta_dtype(layout, b, dtype));
        dray__rect rect = dray__rect_of(layout, b);
        room += dray__rect_elements(&rect) / DRAY__DELTA_GPU_SPARSE *
                    (sizeof(uint16_t) + size + sizeof(int8_t)) +
                24 * dray__delta_slices(layout, b);
    }
    return room;
}

/* Fills all but the addresses of the kept bits and of the store. */
static dray__cuda_delta find_of(const dray_layout *layout, dray_region *const *regions,
                                uint32_t block, int32_t dtype)
{
    const dray_block *b = dray_layout_block(layout, block);
    const dray_tensor_info *tensor = dray_layout_tensor(layout, b->tensor);
    dray__slicer slicer;
    dray__delta_cut(layout, block, &slicer);
    dray__cuda_delta d = {.kind = DRAY__CUDA_FIND,
                          .dtype = tensor->dtype,
                          .sent = dray__delta_dtype(layout, block, dtype),
                          .ndim = tensor->ndim ? tensor->ndim : 1,
                          .source = regions[b->region]->device_address + b->offset};
    for (uint32_t i = 0; i < d.ndim; i++) {
        d.extent[i] = slicer.whole.extent[i];
        d.tile[i] = slicer.tile[i];
        d.source_stride[i] = i < tensor->ndim ? b->stride[i] : 0;
    }
    return d;
}

static int make(dray__delta_gpu *g, const dray_layout *layout, dray_region *const *regions,
                int32_t dtype, dray_region *store, uint64_t table, const uint64_t *first,
                uint64_t begin, dray__cuda_delta *deltas, dray_error *error)
{
    dray__cuda_device *device = NULL;
    uint64_t kept = 0, count = 0;
    for (uint32_t b = 0; b < dray_layout_block_count(layout); b++) {
        const dray_region *region = regions[dray_layout_block(layout, b)->region];
        if (!dray__delta_by_gpu(layout, regions, b))
            continue;
        if (device && region->device != device)
            return dray__fail(error, DRAY_EUNSUPPORTED, "deltas of blocks on several GPUs");
        device = region->device;
        deltas[count] = find_of(layout, regions, b, dtype);
        deltas[count].table = table + first[b] * SLOT;
        deltas[count].base = kept;
        kept += (dray__cuda_delta_kept(&deltas[count++]) + ALIGN - 1) / ALIGN * ALIGN;
    }
    int rc = dray__region_reach(store, device, error);
    if (rc == DRAY_OK)
        rc = dray__cuda_enter(device, error);
    if (rc)
        return rc;
    rc = dray_region_alloc(DRAY_REGION_CUDA, kept, "last published bits", &g->kept, error);
    dray__cuda_leave();
    for (uint64_t i = 0; i < count && rc == DRAY_OK; i++) {
        deltas[i].base += g->kept->device_address;
        deltas[i].table += store->device_address;
        deltas[i].store = store->device_address;
        deltas[i].store_bytes = dray_region_bytes(store);
        deltas[i].begin = begin;
    }
    dray__cuda_job_options options = {
        .sums = DRAY__CUDA_SUM_SOURCE, .deltas = deltas, .delta_count = count};
    return rc ? rc : dray__cuda_job_new(device, layout, NULL, 0, &options, &g->job, error);
}

int dray__delta_gpu_new(const dray_layout *layout, dray_region *const *regions, int32_t dtype,
                        dray_region *store, uint64_t table, const uint64_t *first, uint64_t begin,
                        dray__delta_gpu **out, dray_error *error)
{
    dray__delta_gpu *g = calloc(1, sizeof *g);
    dray__cuda_delta *deltas = calloc((size_t)dray_layout_block_count(layout) + 1, sizeof *deltas);
    int rc = g && deltas
                 ? make(g, layout, regions, dtype, store, table, first, begin, deltas, error)
                 : dray__nomem(error);
    free(deltas);
    if (rc)
        dray__delta_gpu_free(g);
    else
        *out = g;
    return rc;
}

int dray__delta_gpu_find(dray__delta_gpu *g, int64_t deadline_ns, uint64_t *used, dray_error *error)
{
    int rc = DRAY_OK;
    if (dray__cuda_job_is_running(g->job) && /* aborted by the last publish */
        dray__cuda_job_wait(g->job, deadline_ns, NULL) == DRAY_EAGAIN)
        rc = DRAY_EAGAIN;
    if (rc == DRAY_OK)
        rc = dray__cuda_job_start(g->job, NULL, 0, error);
    if (rc == DRAY_OK)
        rc = dray__cuda_job_wait(g->job, deadline_ns, error);
    if (rc == DRAY_EAGAIN) {
        dray__cuda_job_abort(g->job);
        return dray__fail(error, DRAY_ETIMEDOUT,
                          "the GPU did not find what changed by the deadline");
    }
    if (rc == DRAY_OK)
        *used = dray__cuda_job_sums(g->job, DRAY__CUDA_SUM_SOURCE)[0];
    return rc;
}

void dray__delta_gpu_free(dray__delta_gpu *g)
{
    if (!g)
        return;
    dray__cuda_job_close(g->job);
    dray_region_free(g->kept);
    free(g);
}
