/* State of a GPU that all jobs share: its kernels, and memory that one job leaves to the next. */
#include "base/error.h"
#include "memory/cuda_memory.h"
#include "mover/cuda/cuda_internal.h"

#include <errno.h>
#include <stdlib.h>
#include <sys/mman.h>

enum { LEAST_MEMORY = 64 << 10, MOST_GPUS = 64, STAGED = DRAY__GPU_CELL * 4 };

static dray__gpu gpus[MOST_GPUS]; /* by the device's index; cuda is NULL until first use */
static pthread_mutex_t gpus_lock = PTHREAD_MUTEX_INITIALIZER;

static int find_kernels(dray__gpu *gpu, CUmodule module, dray_error *error)
{
    static const char *const names[] = {
#define XX(name) #name,
        DRAY__GPU_KERNELS(XX)
#undef XX
    };
    const dray__cuda *cuda = gpu->cuda;
    for (int k = 0; k < DRAY__GPU_KERNEL_COUNT; k++) {
        int blocks = 1, shared = k == DRAY__GPU_dray_quantise ? STAGED : 0;
        CUresult result = cuda->cuModuleGetFunction(&gpu->kernels[k], module, names[k]);
        if (!result && shared)
            result = cuda->cuFuncSetAttribute(
                gpu->kernels[k], CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES, shared);
        if (!result)
            result = cuda->cuOccupancyMaxActiveBlocksPerMultiprocessor(
                &blocks, gpu->kernels[k], DRAY__GPU_THREADS, (size_t)shared / 2);
        if (result)
            return dray__fail_cuda(error, result, "kernel %s", names[k]);
        gpu->blocks[k] = (uint32_t)(gpu->device->multiprocessors * (blocks > 0 ? blocks : 1));
    }
    return DRAY_OK;
}

static int open_gpu(dray__gpu *gpu, dray__cuda_device *device, dray_error *error)
{
    const dray__cuda *cuda = dray__cuda_get(error);
    if (!cuda)
        return DRAY_EUNSUPPORTED;
    dray__gpu made = {.cuda = cuda, .device = device};
    CUmodule module; /* never unloaded */
    int rc = dray__gpu_module(cuda, device, &module, error);
    if (rc)
        return rc;
    rc = find_kernels(&made, module, error);
    CUresult result =
        rc ? CUDA_SUCCESS : cuda->cuStreamCreate(&made.bounce_stream, CU_STREAM_NON_BLOCKING);
    if (result)
        rc = dray__fail_cuda(error, result, "a stream on %s", device->name);
    if (rc) {
        cuda->cuModuleUnload(module);
        return rc;
    }
    pthread_mutex_init(&made.lock, NULL);
    pthread_mutex_init(&made.bounce_lock, NULL);
    *gpu = made;
    return DRAY_OK;
}

int dray__gpu_get(dray__cuda_device *device, dray__gpu **out, dray_error *error)
{
    if (device->index < 0 || device->index >= MOST_GPUS)
        return dray__fail(error, DRAY_EUNSUPPORTED, "GPU %d: at most %d are used", device->index,
                          MOST_GPUS);
    dray__gpu *gpu = &gpus[device->index];
    int rc = DRAY_OK;
    pthread_mutex_lock(&gpus_lock);
    if (!gpu->cuda)
        rc = open_gpu(gpu, device, error);
    pthread_mutex_unlock(&gpus_lock);
    *out = gpu;
    return rc;
}

/* ---- memory -----------------------------------------------------------------------------------
 */

static dray__gpu_memory *take_spare(dray__gpu *gpu, uint64_t bytes, bool host)
{
    dray__gpu_memory **best = NULL;
    pthread_mutex_lock(&gpu->lock);
    for (dray__gpu_memory **at = &gpu->spare[host]; *at; at = &(*at)->next)
        if ((*at)->bytes >= bytes && (*at)->bytes <= 4 * bytes &&
            (!best || (*at)->bytes < (*best)->bytes))
            best = at;
    dray__gpu_memory *found = best ? *best : NULL;
    if (found)
        *best = found->next;
    pthread_mutex_unlock(&gpu->lock);
    return found;
}

static int make_host(dray__gpu_memory *m, dray_error *error)
{
    void *memory = mmap(NULL, m->bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (memory == MAP_FAILED)
        return dray__fail_errno(error, errno, "%llu bytes of pinned memory",
                                (unsigned long long)m->bytes);
    CUresult result = dray__host_register(memory, m->bytes, true, &m->device);
    if (result)
        munmap(memory, m->bytes);
    else
        m->host = memory;
    return dray__fail_cuda(error, result, "%llu bytes of pinned memory",
                           (unsigned long long)m->bytes);
}

int dray__gpu_take(dray__gpu *gpu, uint64_t bytes, bool host, dray__gpu_memory **out,
                   dray_error *error)
{
    uint64_t size = LEAST_MEMORY;
    while (size < bytes)
        size += size < ((uint64_t)64 << 20) ? size : (uint64_t)64 << 20;
    dray__gpu_memory *m = take_spare(gpu, size, host);
    int rc = DRAY_OK;
    if (m) {
        *out = m;
        return DRAY_OK;
    }
    m = calloc(1, sizeof *m);
    if (!m)
        return dray__nomem(error);
    m->bytes = size;
    if (host) {
        rc = make_host(m, error);
    } else {
        CUresult result = gpu->cuda->cuMemAlloc(&m->device, size);
        if (result)
            rc = dray__fail_cuda(error, result, "%llu bytes of GPU memory for descriptors",
                                 (unsigned long long)size);
    }
    if (rc)
        free(m);
    else
        *out = m;
    return rc;
}

void dray__gpu_give(dray__gpu *gpu, dray__gpu_memory *memory)
{
    if (!memory)
        return;
    bool host = memory->host != NULL;
    pthread_mutex_lock(&gpu->lock);
    memory->next = gpu->spare[host];
    gpu->spare[host] = memory;
    pthread_mutex_unlock(&gpu->lock);
}

int dray__gpu_launch_kernel(const dray__gpu *gpu, int kernel, uint32_t blocks, uint32_t shared,
                            const dray__gpu_launch *launch, CUstream stream, dray_error *error)
{
    dray__gpu_launch copy = *launch;
    void *parameters[] = {&copy};
    CUresult result =
        gpu->cuda->cuLaunchKernel(gpu->kernels[kernel], blocks, 1, 1, DRAY__GPU_THREADS, 1, 1,
                                  shared, stream, parameters, NULL);
    return dray__fail_cuda(error, result, "launching on %s", gpu->device->name);
}
