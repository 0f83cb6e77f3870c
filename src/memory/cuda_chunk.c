/* Chunks (cuda_memory.h): physical memory by the driver's virtual-memory calls. */
#include "memory/cuda_memory.h"

#include "base/error.h"

#include <errno.h>
#include <string.h>
#include <sys/random.h>
#include <unistd.h>

static atomic_ullong last_allocation;

static CUmemAllocationProp properties(const dray__cuda_device *device)
{
    return (CUmemAllocationProp){
        .type = CU_MEM_ALLOCATION_TYPE_PINNED,
        .requestedHandleTypes = CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR,
        .location = {.type = CU_MEM_LOCATION_TYPE_DEVICE, .id = device->ordinal}};
}

static int check_device(const dray__cuda *cuda, const dray__cuda_device *device, dray_error *error)
{
    static const struct {
        int attribute;
        const char *what;
    } needs[] = {
        {CU_DEVICE_ATTRIBUTE_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED, "virtual memory management"},
        {CU_DEVICE_ATTRIBUTE_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR_SUPPORTED,
         "export of memory as descriptors"}};
    for (size_t i = 0; i < sizeof needs / sizeof *needs; i++) {
        int has = 0;
        CUresult result = cuda->cuDeviceGetAttribute(&has, needs[i].attribute, device->ordinal);
        if (result)
            return dray__fail_cuda(error, result, "asking %s for %s", device->name, needs[i].what);
        if (!has)
            return dray__fail(error, DRAY_EUNSUPPORTED,
                              "%s has no %s: wrap memory of cudaMalloc instead", device->name,
                              needs[i].what);
    }
    return DRAY_OK;
}

uint64_t dray__chunk_granularity(dray__cuda_device *device, dray_error *error)
{
    const dray__cuda *cuda = dray__cuda_get(error);
    if (!cuda || check_device(cuda, device, error))
        return 0;
    CUmemAllocationProp prop = properties(device);
    size_t bytes = 0;
    CUresult result =
        cuda->cuMemGetAllocationGranularity(&bytes, &prop, CU_MEM_ALLOC_GRANULARITY_MINIMUM);
    if (result)
        dray__fail_cuda(error, result, "granularity of memory of %s", device->name);
    return result ? 0 : bytes;
}

static CUresult allow(const dray__cuda *cuda, const dray__cuda_chunk *chunk,
                      const dray__cuda_device *device)
{
    CUmemAccessDesc access = {.location = {CU_MEM_LOCATION_TYPE_DEVICE, device->ordinal},
                              .flags = CU_MEM_ACCESS_FLAGS_PROT_READWRITE};
    return cuda->cuMemSetAccess(chunk->address, chunk->bytes, &access, 1);
}

int dray__chunk_back(dray__cuda_chunk *chunk, dray_error *error)
{
    const dray__cuda *cuda = dray__cuda_get(error);
    if (!cuda)
        return DRAY_EUNSUPPORTED;
    uint8_t name[sizeof chunk->name];
    if (getrandom(name, sizeof name, 0) != (ssize_t)sizeof name)
        return dray__fail_errno(error, errno, "getrandom");
    name[0] |= 1; /* never all zero, which is no name */
    CUmemAllocationProp prop = properties(chunk->device);
    CUresult result = cuda->cuMemCreate(&chunk->handle, chunk->bytes, &prop, 0);
    if (result)
        return dray__fail_cuda(error, result, "%llu bytes of %s", (unsigned long long)chunk->bytes,
                               chunk->device->name);
    result = cuda->cuMemMap(chunk->address, chunk->bytes, 0, chunk->handle, 0);
    if (result) {
        cuda->cuMemRelease(chunk->handle);
        return dray__fail_cuda(error, result, "mapping %llu bytes of %s at 0x%llx",
                               (unsigned long long)chunk->bytes, chunk->device->name,
                               (unsigned long long)chunk->address);
    }
    result = allow(cuda, chunk, chunk->device);
    if (result) {
        cuda->cuMemUnmap(chunk->address, chunk->bytes);
        cuda->cuMemRelease(chunk->handle);
        return dray__fail_cuda(error, result, "access of %s to its memory", chunk->device->name);
    }
    memcpy(chunk->name, name, sizeof name);
    chunk->allocation = atomic_fetch_add(&last_allocation, 1) + 1;
    chunk->reach = 1ull << chunk->device->index;
    chunk->resident = true;
    chunk->fd = -1;
    return DRAY_OK;
}

void dray__chunk_drop(dray__cuda_chunk *chunk)
{
    const dray__cuda *cuda = dray__cuda_get(NULL);
    if (!cuda || !chunk->resident)
        return;
    dray__chunk_unexport(chunk);
    cuda->cuMemUnmap(chunk->address, chunk->bytes);
    cuda->cuMemRelease(chunk->handle);
    chunk->resident = false;
    chunk->allocation = 0;
    chunk->reach = 0;
    chunk->exports = 0;
    memset(chunk->name, 0, sizeof chunk->name);
}

int dray__chunk_export(dray__cuda_chunk *chunk, dray_error *error)
{
    const dray__cuda *cuda = dray__cuda_get(error);
    if (!cuda)
        return DRAY_EUNSUPPORTED;
    if (chunk->fd >= 0)
        return DRAY_OK;
    CUresult result = cuda->cuMemExportToShareableHandle(
        &chunk->fd, chunk->handle, CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR, 0);
    if (result)
        chunk->fd = -1;
    return dray__fail_cuda(error, result, "exporting %llu bytes of %s",
                           (unsigned long long)chunk->bytes, chunk->device->name);
}

void dray__chunk_unexport(dray__cuda_chunk *chunk)
{
    if (chunk->fd >= 0)
        close(chunk->fd);
    chunk->fd = -1;
}

int dray__chunk_reach(dray__cuda_chunk *chunk, dray__cuda_device *device, dray_error *error)
{
    const dray__cuda *cuda = dray__cuda_get(error);
    if (!cuda)
        return DRAY_EUNSUPPORTED;
    uint64_t bit = 1ull << device->index;
    if (chunk->reach & bit)
        return DRAY_OK;
    CUresult result = allow(cuda, chunk, device);
    if (result)
        return dray__fail_cuda(error, result, "access of %s to memory of %s", device->name,
                               chunk->device->name);
    chunk->reach |= bit;
    return DRAY_OK;
}
