/* Pinned memory: shared memory that every process that maps it registers with its GPUs, so that
 * their copy engines and kernels reach it. A process without a driver may import it as plain shared
 * memory. */
#include "memory/cuda_memory.h"

/* Registers the memory. A region of zero bytes cannot be registered, and needs no address. */
static int enlist(dray_region *region, dray__cuda_device *device, dray_error *error)
{
    if (!region->bytes)
        return DRAY_OK;
    int rc = dray__cuda_enter(device, error);
    if (rc)
        return rc;
    CUdeviceptr address = 0;
    CUresult result =
        dray__host_register(region->base, region->mapped_bytes, region->writable, &address);
    dray__cuda_leave();
    if (result)
        return dray__fail_cuda(error, result, "region %s: registering %llu bytes of host memory",
                               region->name, (unsigned long long)region->mapped_bytes);
    region->device_address = address;
    region->device = device;
    return DRAY_OK;
}

static int alloc(dray_region *region, dray_error *error)
{
    dray__cuda_device *device;
    int rc = dray__cuda_device_here(NULL, &device, error);
    if (rc == DRAY_OK)
        rc = dray__shared_alloc(region, error);
    if (rc)
        return rc;
    dray__populate(region->base, region->mapped_bytes);
    return enlist(region, device, error);
}

static int import(dray_region *region, const dray_handle *handle, int fd, dray_error *error)
{
    dray__cuda_device *device;
    int rc = dray__shared_import(region, handle, fd, error);
    if (rc || dray__cuda_device_here(NULL, &device, NULL))
        return rc;
    return enlist(region, device, error);
}

static void release(dray_region *region)
{
    const dray__cuda *cuda = dray__cuda_get(NULL);
    if (cuda && region->device_address && dray__cuda_enter(region->device, NULL) == DRAY_OK) {
        cuda->cuMemHostUnregister(region->base);
        dray__cuda_leave();
    }
    dray__shared_release(region);
}

const dray__region_ops dray__region_pinned = {.kind = DRAY_REGION_PINNED,
                                              .alloc = alloc,
                                              .describe = dray__shared_describe,
                                              .import = import,
                                              .release = release};
