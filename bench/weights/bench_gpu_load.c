/* The load_weights of a benchmark's engines (bench_gpu_load.h). */
#include "bench/weights/bench_gpu_load.h"

#include "base/error.h"
#include "bench/weights/bench_gpu.h"
#include "bench/weights/bench_values.h"
#include "memory/cuda_library.h"
#include "memory/region.h"

#include <stdlib.h>
#include <string.h>

enum { BLOCKS = 528, THREADS = 256 };

struct bench_loader {
    const dray_layout *layout;
    dray_region *const *regions;
    uint32_t *first, *blocks; /* the blocks ordered by tensor, and the first one of each tensor */
    const dray__cuda *cuda;   /* NULL for host memory */
    dray__cuda_device *device;
    CUstream stream;
    CUfunction rows; /* NULL when single rows are copied instead */
};

/* Rows of the same length that are copied from one place to another. */
typedef struct rows {
    uint64_t to, from, bytes, count, to_step, from_step;
} rows;

static int copy_rows(const bench_loader *l, rows r, dray_error *error)
{
    CUresult result = CUDA_SUCCESS;
    void *parameters[] = {&r};
    for (uint64_t i = 0; i < r.count && !l->cuda; i++)
        memcpy((uint8_t *)(uintptr_t)r.to + i * r.to_step,
               (const uint8_t *)(uintptr_t)r.from + i * r.from_step, r.bytes);
    if (!l->cuda)
        return DRAY_OK;
    bool even = (r.to | r.from | r.bytes | r.to_step | r.from_step) % 16 == 0;
    if (r.count > 1 && even && l->rows)
        result = l->cuda->cuLaunchKernel(l->rows, BLOCKS, 1, 1, THREADS, 1, 1, 0, l->stream,
                                         parameters, NULL);
    else
        for (uint64_t i = 0; i < r.count && !result; i++)
            result = l->cuda->cuMemcpyDtoDAsync(r.to + i * r.to_step, r.from + i * r.from_step,
                                                r.bytes, l->stream);
    return dray__fail_cuda(error, result, "an engine's own copies");
}

/* Copies the rows of a slice of a full tensor that a block of the engine holds. The slice is dense
 * at address `data`. */
static int cut_out(const bench_loader *l, const dray_block *block, const dray_load_tensor *t,
                   uint64_t data, dray_error *error)
{
    const dray_region *region = l->regions[block->region];
    uint64_t size = dray_dtype_size((dray_dtype)t->dtype), inner = 1, at = 0, run = 1;
    uint64_t base = l->cuda ? dray_region_device_address(region)
                            : (uint64_t)(uintptr_t)dray_region_base(region);
    int64_t first = block->start[0] > t->first_row ? block->start[0] : t->first_row;
    int64_t end = block->start[0] + block->extent[0], last = t->first_row + t->rows;
    end = end < last ? end : last;
    if (first >= end)
        return DRAY_OK;
    for (uint32_t d = t->ndim; d-- > 1;) {
        at += inner * (uint64_t)block->start[d];
        inner *= (uint64_t)t->shape[d];
        run *= (uint64_t)block->extent[d];
        if (d > 1 && block->extent[d] != t->shape[d])
            return dray__fail(error, DRAY_EUNSUPPORTED,
                              "tensor %s is cut in dimension %u: this engine cuts two", t->name, d);
    }
    uint64_t skipped = (uint64_t)(first - t->first_row), into = (uint64_t)(first - block->start[0]);
    rows r = {.to = base + block->offset + into * (uint64_t)block->stride[0],
              .from = data + (skipped * inner + at) * size,
              .bytes = run * size,
              .count = (uint64_t)(end - first),
              .to_step = (uint64_t)block->stride[0],
              .from_step = inner * size};
    if (r.to_step == r.bytes && r.from_step == r.bytes) {
        r.bytes *= r.count;
        r.count = 1;
    }
    return copy_rows(l, r, error);
}

static int load_all(const bench_loader *l, const dray_load_bucket *bucket, dray_error *error)
{
    int rc = DRAY_OK;
    for (uint32_t i = 0; i < bucket->count; i++) {
        const dray_load_tensor *t = &bucket->tensors[i];
        uint32_t index;
        if (dray_layout_find(l->layout, t->name, &index, NULL))
            continue;
        for (uint32_t b = l->first[index]; b < l->first[index + 1] && !rc; b++)
            rc = cut_out(l, dray_layout_block(l->layout, l->blocks[b]), t,
                         (uint64_t)(uintptr_t)bucket->data + t->start, error);
    }
    return rc;
}

int bench_load(void *user, const dray_load_bucket *bucket, dray_error *error)
{
    const bench_loader *l = user;
    if (!l->cuda)
        return load_all(l, bucket, error);
    int rc = dray__cuda_enter(l->device, error);
    if (rc)
        return rc;
    rc = load_all(l, bucket, error);
    CUresult result = l->cuda->cuStreamSynchronize(l->stream);
    dray__cuda_leave();
    return rc ? rc : dray__fail_cuda(error, result, "an engine's own copies");
}

int bench_loader_new(const dray_layout *layout, dray_region *const *regions, bool cuda,
                     bench_loader **out, dray_error *error)
{
    bench_loader *l = calloc(1, sizeof *l);
    if (!l)
        return dray__nomem(error);
    *out = l;
    l->layout = layout;
    l->regions = regions;
    l->blocks = bench_blocks_by_tensor(layout, &l->first);
    if (!cuda)
        return DRAY_OK;
    l->cuda = dray__cuda_get(error);
    l->device = regions[0]->device;
    int rc = l->cuda ? dray__cuda_enter(l->device, error) : DRAY_EUNSUPPORTED;
    if (rc)
        return rc;
    l->rows = bench_gpu_kernel(l->device->arch, "bench_rows");
    rc = dray__fail_cuda(error, l->cuda->cuStreamCreate(&l->stream, CU_STREAM_NON_BLOCKING),
                         "a stream");
    dray__cuda_leave();
    return rc;
}
