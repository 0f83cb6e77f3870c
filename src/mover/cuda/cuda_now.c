/* Calls that do one operation on a GPU and wait for it: copies between a GPU and host memory, for
 * movers, patches, and sums of regions that the CPU cannot address. */
#include "base/error.h"
#include "model/layout/layout.h"
#include "mover/cuda/cuda_internal.h"

#include <string.h>

/* The layout of the host's memory: data | pieces | tiles | sums; of the GPU's: pieces | tiles |
 * sums | stop. */
enum {
    PIECES = 3, /* of one rectangle */
    SUMS = 64,  /* rectangles that are summed at once */
    PIECES_BYTES = 64 << 10,
    TILES = 16384, /* of all launches between two waits */
    TILES_BYTES = TILES * sizeof(dray__gpu_tile),
    HOST_PIECES = DRAY__CUDA_BOUNCE,
    HOST_TILES = HOST_PIECES + PIECES_BYTES,
    HOST_SUM = HOST_TILES + TILES_BYTES,
    HOST_BYTES = HOST_SUM + SUMS * sizeof(uint64_t),
    GPU_TILES = PIECES_BYTES,
    GPU_SUMS = GPU_TILES + TILES_BYTES,
    GPU_CURSOR = GPU_SUMS + SUMS * sizeof(uint64_t),
    GPU_STOP = GPU_CURSOR + 128,
    GPU_BYTES = GPU_STOP + 128
};
_Static_assert(SUMS *PIECES * sizeof(dray__gpu_piece) <= PIECES_BYTES, "no room for the pieces");
_Static_assert(DRAY__CUDA_PATCHES *(sizeof(dray__gpu_delta) + DRAY__GPU_SLOT) <= PIECES_BYTES,
               "no room for deltas and their slots");

static int begin(dray__cuda_device *device, dray__gpu **out, dray_error *error)
{
    int rc = dray__cuda_enter(device, error);
    if (rc)
        return rc;
    rc = dray__gpu_get(device, out, error);
    if (rc) {
        dray__cuda_leave();
        return rc;
    }
    dray__gpu *gpu = *out;
    pthread_mutex_lock(&gpu->bounce_lock);
    if (!gpu->bounce)
        rc = dray__gpu_take(gpu, HOST_BYTES, true, &gpu->bounce, error);
    if (!rc && !gpu->bounce_memory)
        rc = dray__gpu_take(gpu, GPU_BYTES, false, &gpu->bounce_memory, error);
    if (rc) {
        pthread_mutex_unlock(&gpu->bounce_lock);
        dray__cuda_leave();
    }
    return rc;
}

static void end(dray__gpu *gpu)
{
    pthread_mutex_unlock(&gpu->bounce_lock);
    dray__cuda_leave();
}

int dray__cuda_bounce_reserve(dray__cuda_device *device, dray_error *error)
{
    dray__gpu *gpu;
    int rc = begin(device, &gpu, error);
    if (rc == DRAY_OK)
        end(gpu);
    return rc;
}

/* Uploads the tiles from `first` on and launches `kernel` on them. summed: the number of sums of
 * sources. Does not wait. */
static int launch(dray__gpu *gpu, int kernel, uint32_t first, uint32_t tiles, uint32_t summed,
                  dray_error *error)
{
    const dray__cuda *cuda = gpu->cuda;
    CUdeviceptr base = gpu->bounce_memory->device;
    const uint64_t at = first * sizeof(dray__gpu_tile);
    dray__gpu_launch l = {.pieces = (const dray__gpu_piece *)base,
                          .deltas = (const dray__gpu_delta *)base,
                          .tiles = (const dray__gpu_tile *)(base + GPU_TILES + at),
                          .sums = (uint64_t *)(base + GPU_SUMS),
                          .sum_count = summed ? summed : 1,
                          .stop = (const uint32_t *)(base + GPU_STOP),
                          .cursor = (uint32_t *)(base + GPU_CURSOR),
                          .count = tiles,
                          .wanted = summed ? DRAY__CUDA_SUM_SOURCE : 0};
    CUresult result =
        cuda->cuMemcpyHtoDAsync(base + GPU_TILES + at, gpu->bounce->host + HOST_TILES + at,
                                tiles * sizeof(dray__gpu_tile), gpu->bounce_stream);
    if (!result)
        result = cuda->cuMemsetD32Async(base + GPU_CURSOR, 0, 1, gpu->bounce_stream);
    if (result)
        return dray__fail_cuda(error, result, "descriptors to %s", gpu->device->name);
    uint32_t blocks = tiles < gpu->blocks[kernel] ? tiles : gpu->blocks[kernel];
    return dray__gpu_launch_kernel(gpu, kernel, blocks, 0, &l, gpu->bounce_stream, error);
}

/* Waits for all launches, also after a failure (rc), and reads back the first `count` sums. */
static int finish(dray__gpu *gpu, int rc, uint64_t *sums, uint32_t count, dray_error *error)
{
    uint8_t *host = gpu->bounce->host + HOST_SUM;
    CUresult result = CUDA_SUCCESS;
    if (count && !rc)
        result = gpu->cuda->cuMemcpyDtoHAsync(host, gpu->bounce_memory->device + GPU_SUMS,
                                              count * sizeof *sums, gpu->bounce_stream);
    CUresult synced = gpu->cuda->cuStreamSynchronize(gpu->bounce_stream);
    if (rc)
        return rc;
    if (result || synced)
        return dray__fail_cuda(error, result ? result : synced, "copies on %s", gpu->device->name);
    if (count)
        memcpy(sums, host, count * sizeof *sums);
    return DRAY_OK;
}

/* Zeroes the sums and uploads the descriptors from the host's bounce memory. */
static int upload(dray__gpu *gpu, size_t bytes, dray_error *error)
{
    const dray__cuda *cuda = gpu->cuda;
    CUdeviceptr base = gpu->bounce_memory->device;
    CUresult result = cuda->cuMemsetD32Async(
        base + GPU_SUMS, 0, (GPU_BYTES - GPU_SUMS) / sizeof(uint32_t), gpu->bounce_stream);
    if (!result)
        result = cuda->cuMemcpyHtoDAsync(base, gpu->bounce->host + HOST_PIECES, bytes,
                                         gpu->bounce_stream);
    return dray__fail_cuda(error, result, "descriptors to %s", gpu->device->name);
}

/* Moves or sums pieces that are uploaded. Tiles of pieces of one kernel are launched together.
 * summed: the number of sums, or 0. */
static int run_pieces(dray__gpu *gpu, const dray__gpu_piece *pieces, const int *kernels,
                      uint32_t count, uint32_t summed, dray_error *error)
{
    dray__gpu_tile *tiles = (dray__gpu_tile *)(void *)(gpu->bounce->host + HOST_TILES);
    uint32_t first = 0, n = 0; /* the tiles from `first` on are not launched yet */
    int rc = DRAY_OK;
    for (uint32_t i = 0; i < count && !rc; i++) {
        uint64_t all = dray__gpu_tiles_of(&pieces[i]);
        for (uint64_t t = 0; t < all && !rc; t++) {
            if (n == TILES || (n > first && kernels[i] != kernels[tiles[first].piece])) {
                rc = launch(gpu, kernels[tiles[first].piece], first, n - first, summed, error);
                first = n;
            }
            if (!rc && n == TILES) {
                rc = finish(gpu, DRAY_OK, NULL, 0, error); /* their memory is used again */
                first = n = 0;
            }
            if (rc)
                break;
            tiles[n++] = (dray__gpu_tile){i, (uint32_t)t};
        }
    }
    return rc || n == first
               ? rc
               : launch(gpu, kernels[tiles[first].piece], first, n - first, summed, error);
}

static int check_place(const dray_region *region, const dray__cuda_place *place, uint64_t *bytes,
                       dray_error *error)
{
    *bytes = dray_dtype_size((dray_dtype)place->dtype);
    for (uint32_t d = 0; d < place->ndim; d++)
        *bytes *= (uint64_t)place->extent[d];
    if (!region->device || !region->device_address)
        return dray__fail(error, DRAY_EUNSUPPORTED, "region %s lies on no GPU of this process",
                          region->name);
    return *bytes <= DRAY__CUDA_BOUNCE
               ? DRAY_OK
               : dray__fail(error, DRAY_EINVALID, "%llu bytes at once, at most %d expected",
                            (unsigned long long)*bytes, DRAY__CUDA_BOUNCE);
}

int dray__cuda_bounce(const dray_region *region, const dray__cuda_place *place, void *host,
                      bool to_gpu, dray_error *error)
{
    dray__cuda_item item = {.copy = {.ndim = place->ndim,
                                     .source_dtype = place->dtype,
                                     .destination_dtype = place->dtype}};
    dray_copy *copy = &item.copy;
    uint64_t bytes;
    dray__gpu *gpu;
    int rc = check_place(region, place, &bytes, error);
    if (!rc)
        rc = begin(region->device, &gpu, error);
    if (rc)
        return rc;
    if (to_gpu)
        memcpy(gpu->bounce->host, host, bytes);
    memcpy(copy->extent, place->extent, place->ndim * sizeof *place->extent);
    memcpy(to_gpu ? copy->destination_stride : copy->source_stride, place->stride,
           place->ndim * sizeof *place->stride);
    dray__dense_strides((dray_dtype)place->dtype, place->ndim, place->extent,
                        to_gpu ? copy->source_stride : copy->destination_stride);
    *(to_gpu ? &copy->destination_offset : &copy->source_offset) = place->offset;
    item.source_base = to_gpu ? gpu->bounce->device : region->device_address;
    item.destination_base = to_gpu ? region->device_address : gpu->bounce->device;
    int kernels[PIECES];
    dray__gpu_piece *pieces = (dray__gpu_piece *)(void *)(gpu->bounce->host + HOST_PIECES);
    uint32_t count = dray__gpu_pieces_of(&item, NULL, DRAY__CUDA_BOUNCE, pieces, kernels);
    rc = upload(gpu, count * sizeof *pieces, error);
    if (!rc)
        rc = run_pieces(gpu, pieces, kernels, count, 0, error);
    rc = finish(gpu, rc, NULL, 0, error);
    if (!rc && !to_gpu)
        memcpy(host, gpu->bounce->host, bytes);
    end(gpu);
    return rc;
}

/* ---- deltas ---------------------------------------------------------------------------------- */

/* Entries are in the place of data; slots are behind the descriptors, in the place of pieces. */
static int patch(dray__gpu *gpu, const dray_region *region, const dray__cuda_patch *patches,
                 uint32_t count, size_t bytes, dray_error *error)
{
    const uint64_t slots = HOST_PIECES + DRAY__CUDA_PATCHES * sizeof(dray__gpu_delta);
    dray__gpu_delta *deltas = (dray__gpu_delta *)(void *)(gpu->bounce->host + HOST_PIECES);
    dray__gpu_tile *tiles = (dray__gpu_tile *)(void *)(gpu->bounce->host + HOST_TILES);
    uint64_t sums[3];
    for (uint32_t i = 0; i < count; i++) {
        const dray__cuda_patch *p = &patches[i];
        const uint64_t slot[2] = {p->offset, p->count};
        dray__cuda_delta d = {.kind = DRAY__CUDA_APPLY,
                              .dtype = p->place.dtype,
                              .sent = p->place.dtype,
                              .ndim = p->place.ndim,
                              .table = gpu->bounce->device + slots + i * DRAY__GPU_SLOT,
                              .store = gpu->bounce->device,
                              .store_bytes = bytes,
                              .destination = region->device_address + p->place.offset,
                              .stepping = p->stepping};
        size_t dims = p->place.ndim * sizeof *d.extent;
        memcpy(d.extent, p->place.extent, dims);
        memcpy(d.tile, p->place.extent, dims);
        memcpy(d.wanted, p->place.extent, dims);
        memcpy(d.destination_stride, p->place.stride, dims);
        memcpy(gpu->bounce->host + slots + i * DRAY__GPU_SLOT, slot, sizeof slot);
        tiles[i] = (dray__gpu_tile){i, 0};
        int rc = dray__gpu_delta_of(&d, 0, &deltas[i], error);
        if (rc)
            return rc;
    }
    int rc = upload(gpu, count * sizeof *deltas, error);
    if (!rc)
        rc = launch(gpu, DRAY__GPU_dray_delta_apply, 0, count, 0, error);
    rc = finish(gpu, rc, sums, 3, error);
    if (rc)
        return rc;
    return sums[2]
               ? dray__fail(error, DRAY_EFORMAT, "region %s: %llu entries of deltas lead outside",
                            region->name, (unsigned long long)sums[2])
               : DRAY_OK;
}

int dray__cuda_patch_all(const dray_region *region, const dray__cuda_patch *patches, uint32_t count,
                         const void *entries, size_t bytes, dray_error *error)
{
    dray__gpu *gpu;
    if (!region->device || !region->device_address)
        return dray__fail(error, DRAY_EUNSUPPORTED, "region %s lies on no GPU of this process",
                          region->name);
    if (count > DRAY__CUDA_PATCHES || bytes > DRAY__CUDA_PATCH_BYTES)
        return dray__fail(error, DRAY_EINVALID,
                          "%u deltas of %zu bytes at once, at most %d of %d expected", count, bytes,
                          DRAY__CUDA_PATCHES, DRAY__CUDA_PATCH_BYTES);
    int rc = begin(region->device, &gpu, error);
    if (rc)
        return rc;
    memcpy(gpu->bounce->host, entries, bytes);
    rc = patch(gpu, region, patches, count, bytes, error);
    end(gpu);
    return rc;
}

/* ---- sums -------------------------------------------------------------------------------------
 */

static int item_of(const dray_region *region, const dray__sum_part *part, dray__cuda_item *item,
                   dray_tensor_info *tensor, dray_error *error)
{
    const dray__sum_of *of = &part->of;
    *item = (dray__cuda_item){.copy = {.ndim = of->ndim ? of->ndim : 1,
                                       .source_dtype = of->dtype,
                                       .destination_dtype = of->dtype,
                                       .extent = {1},
                                       .source_offset = part->offset},
                              .source_base = region->device_address};
    *tensor = (dray_tensor_info){.name = region->name, .dtype = of->dtype, .ndim = of->ndim};
    memcpy(tensor->shape, of->shape, of->ndim * sizeof *of->shape);
    memcpy(item->copy.start, of->start, of->ndim * sizeof *of->start);
    memcpy(item->copy.extent, of->extent, of->ndim * sizeof *of->extent);
    memcpy(item->copy.source_stride, of->stride, of->ndim * sizeof *of->stride);
    return dray__gpu_check(item, tensor, true, 0, error);
}

/* Sums at most SUMS parts: their pieces are uploaded at once, and the sums come back at once. */
static int sum_some(dray__gpu *gpu, const dray_region *region, const dray__sum_part *parts,
                    uint32_t count, uint64_t *sums, dray_error *error)
{
    enum { TILE = 32 << 10 };
    int kernels[SUMS * PIECES];
    dray__gpu_piece *pieces = (dray__gpu_piece *)(void *)(gpu->bounce->host + HOST_PIECES);
    uint32_t made = 0;
    for (uint32_t i = 0; i < count; i++) {
        dray__cuda_item item;
        dray_tensor_info tensor;
        int rc = item_of(region, &parts[i], &item, &tensor, error);
        if (rc)
            return rc;
        uint32_t first = made;
        made += dray__gpu_pieces_of(&item, &tensor, TILE, pieces + made, kernels + made);
        for (uint32_t k = first; k < made; k++)
            pieces[k].sum = i;
    }
    int rc = upload(gpu, made * sizeof *pieces, error);
    if (!rc)
        rc = run_pieces(gpu, pieces, kernels, made, count, error);
    return finish(gpu, rc, sums, count, error);
}

int dray__cuda_sum(const dray_region *region, const dray__sum_part *parts, uint32_t count,
                   uint64_t *sums, dray_error *error)
{
    dray__gpu *gpu;
    if (!region->device || !region->device_address)
        return dray__fail(error, DRAY_EUNSUPPORTED, "region %s is no memory of this process",
                          region->name);
    int rc = begin(region->device, &gpu, error);
    if (rc)
        return rc;
    for (uint32_t first = 0, n; first < count && rc == DRAY_OK; first += n) {
        n = count - first < SUMS ? count - first : SUMS;
        rc = sum_some(gpu, region, parts + first, n, sums + first, error);
    }
    end(gpu);
    return rc;
}
