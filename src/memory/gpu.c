/* GPUs as callers see them (dray/gpu.h): the list, the links, their rates, the libraries. */
#include "base/clock.h"
#include "base/error.h"
#include "base/options.h"
#include "memory/cuda_memory.h"
#include "memory/gpu_library.h"

#include <dlfcn.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

int dray_gpu_count(int32_t *count, int32_t *version, dray_error *error)
{
    const dray__cuda *cuda = dray__cuda_get(error);
    if (!cuda)
        return DRAY_EUNSUPPORTED;
    *count = dray__cuda_device_count();
    if (version)
        *version = cuda->version;
    return DRAY_OK;
}

int dray_gpu_get(int32_t index, dray_gpu *out, dray_error *error)
{
    dray__cuda_device *device;
    dray_gpu gpu = DRAY_GPU_INIT;
    int rc = DRAY__OPTIONS_CHECK(dray_gpu, multiprocessors, out, error);
    if (rc == DRAY_OK)
        rc = dray__cuda_device_at(index, &device, error);
    if (rc)
        return rc;
    memcpy(gpu.uuid, device->uuid, sizeof gpu.uuid);
    dray__cuda_uuid_text(device->uuid, gpu.uuid_text);
    memcpy(gpu.name, device->name, sizeof gpu.name);
    memcpy(gpu.pci, device->pci, sizeof gpu.pci);
    gpu.bytes = device->bytes;
    gpu.ordinal = device->ordinal;
    gpu.arch = device->arch;
    gpu.multiprocessors = device->multiprocessors;
    dray__options_fill(out, &gpu, sizeof gpu);
    return DRAY_OK;
}

int dray_gpu_memory(int32_t index, uint64_t *unused, uint64_t *total, dray_error *error)
{
    dray__cuda_device *device;
    size_t left = 0, all = 0;
    int rc = dray__cuda_device_at(index, &device, error);
    if (rc == DRAY_OK)
        rc = dray__cuda_enter(device, error);
    if (rc)
        return rc;
    CUresult result = dray__cuda_get(NULL)->cuMemGetInfo(&left, &all);
    dray__cuda_leave();
    if (result)
        return dray__fail_cuda(error, result, "memory of %s", device->name);
    if (unused)
        *unused = left;
    if (total)
        *total = all;
    return DRAY_OK;
}

/* ---- links ----------------------------------------------------------------------------------- */

/* The driver does not return the kind of a link, but only NVLink supports atomic operations. */
int dray_gpu_get_link(int32_t from, int32_t to, int32_t *link, dray_error *error)
{
    dray__cuda_device *a, *b;
    int rc = dray__cuda_device_at(from, &a, error);
    if (rc == DRAY_OK)
        rc = dray__cuda_device_at(to, &b, error);
    if (rc)
        return rc;
    const dray__cuda *cuda = dray__cuda_get(NULL);
    int access = 0, atomics = 0;
    if (a == b) {
        *link = DRAY_GPU_LINK_SAME;
        return DRAY_OK;
    }
    CUresult result = cuda->cuDeviceCanAccessPeer(&access, a->ordinal, b->ordinal);
    if (result == CUDA_SUCCESS && access)
        result = cuda->cuDeviceGetP2PAttribute(
            &atomics, CU_DEVICE_P2P_ATTRIBUTE_NATIVE_ATOMIC_SUPPORTED, a->ordinal, b->ordinal);
    if (result)
        return dray__fail_cuda(error, result, "the link from %s %s to %s", a->name, a->pci, b->pci);
    *link = !access ? DRAY_GPU_LINK_NONE : atomics ? DRAY_GPU_LINK_NVLINK : DRAY_GPU_LINK_PCIE;
    return DRAY_OK;
}

enum { MEASURED_BYTES = 256 << 20, MEASURED_COPIES = 8, NOISE_WORDS = 1 << 18 };

/* Fills memory with noise, because copies of zeros are faster than those of real data. */
static void make_noise(uint32_t noise[NOISE_WORDS])
{
    uint32_t x = 2463534242u;
    for (size_t i = 0; i < NOISE_WORDS; i++) {
        x ^= x << 13, x ^= x >> 17, x ^= x << 5;
        noise[i] = x;
    }
}

static int fill(dray_region *region, dray_error *error)
{
    static const uint64_t piece = NOISE_WORDS * sizeof(uint32_t);
    uint32_t *noise = malloc(piece);
    if (!noise)
        return dray__nomem(error);
    make_noise(noise);
    int rc = DRAY_OK;
    for (uint64_t at = 0; at < MEASURED_BYTES && rc == DRAY_OK; at += piece)
        rc = dray_region_write(region, at, noise, piece, error);
    free(noise);
    return rc;
}

/* Makes one side of a measurement, a region of device memory or pinned host memory. */
static int side(int32_t index, dray_region **out, dray_error *error)
{
    dray__cuda_device *device;
    if (index < 0)
        return dray_region_alloc(DRAY_REGION_PINNED, MEASURED_BYTES, "measured", out, error);
    int rc = dray__cuda_device_at(index, &device, error);
    return rc ? rc : dray__region_alloc_cuda(device->uuid, MEASURED_BYTES, "measured", out, error);
}

static CUresult copy(const dray__cuda *cuda, const dray_region *from, const dray_region *to,
                     CUstream stream)
{
    return cuda->cuMemcpyAsync(dray_region_device_address(to), dray_region_device_address(from),
                               MEASURED_BYTES, stream);
}

static CUresult time_copies(const dray__cuda *cuda, const dray_region *from, const dray_region *to,
                            double *rate)
{
    CUstream stream;
    CUresult result = cuda->cuStreamCreate(&stream, CU_STREAM_NON_BLOCKING);
    if (result)
        return result;
    result = copy(cuda, from, to, stream);
    if (!result)
        result = cuda->cuStreamSynchronize(stream);
    int64_t began = dray__now();
    for (int i = 0; i < MEASURED_COPIES && !result; i++)
        result = copy(cuda, from, to, stream);
    CUresult synced = cuda->cuStreamSynchronize(stream);
    int64_t took = dray__now() - began;
    cuda->cuStreamDestroy(stream);
    *rate = (double)MEASURED_BYTES * MEASURED_COPIES * 1e9 / (double)(took > 0 ? took : 1);
    return result ? result : synced;
}

static int measure(dray_region *a, dray_region *b, dray__cuda_device *on, double *rate,
                   dray_error *error)
{
    int rc = fill(a, error);
    if (rc == DRAY_OK)
        rc = dray__region_reach(a, on, error);
    if (rc == DRAY_OK)
        rc = dray__region_reach(b, on, error);
    if (rc == DRAY_OK)
        rc = dray__cuda_enter(on, error);
    if (rc)
        return rc;
    CUresult result = time_copies(dray__cuda_get(NULL), a, b, rate);
    dray__cuda_leave();
    return dray__fail_cuda(error, result, "measuring copies");
}

int dray_gpu_measure(int32_t from, int32_t to, double *rate, dray_error *error)
{
    dray__cuda_device *on;
    int32_t link = DRAY_GPU_LINK_SAME;
    int rc = dray__cuda_device_at(from >= 0 ? from : to, &on, error);
    if (rc == DRAY_OK && from >= 0 && to >= 0)
        rc = dray_gpu_get_link(from, to, &link, error);
    if (rc == DRAY_OK && link == DRAY_GPU_LINK_NONE)
        rc = dray__fail(error, DRAY_EUNSUPPORTED, "GPU %d cannot reach memory of GPU %d", from, to);
    if (rc)
        return rc;
    dray_region *a = NULL, *b = NULL;
    rc = side(from, &a, error);
    if (rc == DRAY_OK)
        rc = side(to, &b, error);
    if (rc == DRAY_OK)
        rc = measure(a, b, on, rate, error);
    dray_region_free(a);
    dray_region_free(b);
    return rc;
}

/* ---- libraries ------------------------------------------------------------------------------- */

static int describe_driver(char *detail, size_t size, dray_error *error)
{
    const dray__cuda *cuda = dray__cuda_get(error);
    if (!cuda)
        return DRAY_EUNSUPPORTED;
    snprintf(detail, size, "for CUDA %d.%d", cuda->version / 1000, cuda->version % 1000 / 10);
    return DRAY_OK;
}

static void *look_up(dray__gpu_library which, const char *name, char *path, size_t size,
                     dray_error *error)
{
    void *library = dray__gpu_library_open(which);
    void *found = library ? dlsym(library, name) : NULL;
    Dl_info info;
    if (!library)
        dray__fail(error, DRAY_EUNSUPPORTED, "not found: install it, or set %s to its path",
                   dray__gpu_library_variable(which));
    else if (!found)
        dray__fail(error, DRAY_EUNSUPPORTED, "has no %s", name);
    snprintf(path, size, "%s",
             found && dladdr(found, &info) && info.dli_fname ? info.dli_fname : "");
    return found;
}

static int describe_nvrtc(char *detail, size_t size, dray_error *error)
{
    int major = 0, minor = 0;
    char path[512];
    int (*version)(int *, int *);
    *(void **)&version = look_up(DRAY__GPU_NVRTC, "nvrtcVersion", path, sizeof path, error);
    if (!version)
        return DRAY_EUNSUPPORTED;
    if (version(&major, &minor))
        return dray__fail(error, DRAY_EUNSUPPORTED, "%s does not say its version", path);
    snprintf(detail, size, "%d.%d, %s", major, minor, path);
    return DRAY_OK;
}

static int describe_nccl(char *detail, size_t size, dray_error *error)
{
    int v = 0;
    char path[512];
    int (*version)(int *);
    *(void **)&version = look_up(DRAY__GPU_NCCL, "ncclGetVersion", path, sizeof path, error);
    if (!version)
        return DRAY_EUNSUPPORTED;
    if (version(&v))
        return dray__fail(error, DRAY_EUNSUPPORTED, "%s does not say its version", path);
    snprintf(detail, size, "%d.%d.%d, %s", v / 10000, v / 100 % 100, v % 100, path);
    return DRAY_OK;
}

int dray_gpu_library(const char *which, char *detail, size_t size, dray_error *error)
{
    static const struct {
        const char *name;
        int (*describe)(char *detail, size_t size, dray_error *error);
    } all[] = {{"cuda", describe_driver}, {"nvrtc", describe_nvrtc}, {"nccl", describe_nccl}};
    for (size_t i = 0; i < sizeof all / sizeof *all && which; i++)
        if (strcmp(which, all[i].name) == 0)
            return all[i].describe(detail, size, error);
    return dray__fail(error, DRAY_EINVALID, "library %s: cuda, nvrtc and nccl are known",
                      which ? which : "(none)");
}
