/* Chunks (cuda_memory.h): physical memory by the driver's virtual-memory calls. */
#include "memory/cuda_memory.h"

#include "base/error.h"
#include "base/hook.h"

#include <errno.h>
#include <pthread.h>
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
    name[0] |= 1; /* never all zeros, which means no name */
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
    chunk->aliased = false;
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
    /* Several threads of a process may read one region for their GPUs, and the driver refuses two
     * such calls at once. */
    static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
    uint64_t bit = 1ull << device->index;
    int rc = DRAY_OK;
    pthread_mutex_lock(&lock);
    CUresult result = chunk->reach & bit ? CUDA_SUCCESS : allow(cuda, chunk, device);
    if (result)
        rc = dray__fail_cuda(error, result, "access of %s to memory of %s", device->name,
                             chunk->device->name);
    else
        chunk->reach |= bit;
    pthread_mutex_unlock(&lock);
    return rc;
}

/* ---- exchange -------------------------------------------------------------------------------- */

/* Returns the end of a run of adjacent chunks that the same GPUs can access. A run is mapped and
 * unmapped in one call. */
static uint32_t run_end(dray__cuda_chunk *const *chunks, uint32_t count, uint32_t from,
                        uint64_t *bytes)
{
    uint32_t end = from + 1;
    *bytes = chunks[from]->bytes;
    while (end < count && chunks[end]->address == chunks[from]->address + *bytes &&
           chunks[end]->device == chunks[from]->device && chunks[end]->reach == chunks[from]->reach)
        *bytes += chunks[end++]->bytes;
    return end;
}

/* Gives access again to all GPUs that had it. */
static CUresult allow_again(const dray__cuda *cuda, const dray__cuda_chunk *chunk, uint64_t bytes)
{
    CUmemAccessDesc access[64];
    size_t count = 0;
    dray__cuda_device *device;
    for (int i = 0; i < 64 && dray__cuda_device_at(i, &device, NULL) == DRAY_OK; i++)
        if (chunk->reach & 1ull << i)
            access[count++] =
                (CUmemAccessDesc){.location = {CU_MEM_LOCATION_TYPE_DEVICE, device->ordinal},
                                  .flags = CU_MEM_ACCESS_FLAGS_PROT_READWRITE};
    return cuda->cuMemSetAccess(chunk->address, bytes, access, count);
}

static CUresult unmap_live(const dray__cuda *cuda, dray__cuda_chunk *const *live, uint32_t count,
                           uint32_t *unmapped)
{
    CUresult result = CUDA_SUCCESS;
    for (uint64_t bytes; *unmapped < count && !result;) {
        uint32_t end = run_end(live, count, *unmapped, &bytes);
        result = cuda->cuMemUnmap(live[*unmapped]->address, bytes);
        *unmapped = result ? *unmapped : end;
    }
    return result;
}

static CUresult map_spare(const dray__cuda *cuda, dray__cuda_chunk *const *live,
                          dray__cuda_chunk *const *spare, uint32_t count, uint32_t *mapped)
{
    CUresult result = CUDA_SUCCESS;
    while (*mapped < count && !result) {
        result = cuda->cuMemMap(live[*mapped]->address, live[*mapped]->bytes, 0,
                                spare[*mapped]->handle, 0);
        *mapped += !result;
    }
    for (uint32_t i = 0; i < count && !result;) {
        uint64_t bytes;
        uint32_t end = run_end(live, count, i, &bytes);
        result = allow_again(cuda, live[i], bytes);
        i = end;
    }
    return result;
}

/* Maps the old memory again. Returns false when a chunk has lost its memory. */
static bool map_back(const dray__cuda *cuda, dray__cuda_chunk *const *live, uint32_t unmapped,
                     uint32_t mapped)
{
    bool all = true;
    for (uint32_t i = 0; i < unmapped; i++) {
        if (i < mapped)
            cuda->cuMemUnmap(live[i]->address, live[i]->bytes);
        CUresult result = cuda->cuMemMap(live[i]->address, live[i]->bytes, 0, live[i]->handle, 0);
        if (!result)
            result = allow_again(cuda, live[i], live[i]->bytes);
        live[i]->resident = !result;
        all = all && !result;
    }
    return all;
}

/* Swaps the memory of two chunks, with its names. */
static void trade(dray__cuda_chunk *live, dray__cuda_chunk *spare)
{
    const dray__cuda_chunk was = *live;
    live->handle = spare->handle;
    live->allocation = spare->allocation;
    live->fd = spare->fd;
    live->exports = spare->exports;
    memcpy(live->name, spare->name, sizeof live->name);
    spare->handle = was.handle;
    spare->allocation = was.allocation;
    spare->fd = was.fd;
    spare->exports = was.exports;
    memcpy(spare->name, was.name, sizeof spare->name);
    spare->aliased = !spare->aliased;
}

int dray__chunks_swap(dray__cuda_chunk *const *live, dray__cuda_chunk *const *spare, uint32_t count,
                      dray_error *error)
{
    const dray__cuda *cuda = dray__cuda_get(error);
    uint32_t unmapped = 0, mapped = 0;
    if (!cuda)
        return DRAY_EUNSUPPORTED;
    CUresult result = unmap_live(cuda, live, count, &unmapped);
    dray__hook_step("unmapped");
    if (!result)
        result = map_spare(cuda, live, spare, count, &mapped);
    if (result && !map_back(cuda, live, unmapped, mapped))
        return dray__fail_cuda(error, result,
                               "exchanging memory of %s: its addresses have no memory any more",
                               live[0]->device->name);
    if (result)
        return dray__fail_cuda(error, result, "exchanging memory of %s", live[0]->device->name);
    for (uint32_t i = 0; i < count; i++)
        trade(live[i], spare[i]);
    return DRAY_OK;
}

int dray__chunk_settle(dray__cuda_chunk *chunk, dray_error *error)
{
    const dray__cuda *cuda = dray__cuda_get(error);
    if (!cuda || !chunk->aliased)
        return cuda ? DRAY_OK : DRAY_EUNSUPPORTED;
    CUresult result = cuda->cuMemUnmap(chunk->address, chunk->bytes);
    if (!result)
        result = cuda->cuMemMap(chunk->address, chunk->bytes, 0, chunk->handle, 0);
    if (!result)
        result = allow_again(cuda, chunk, chunk->bytes);
    chunk->aliased = result != CUDA_SUCCESS;
    return dray__fail_cuda(error, result, "%llu bytes of spare memory of %s",
                           (unsigned long long)chunk->bytes, chunk->device->name);
}
