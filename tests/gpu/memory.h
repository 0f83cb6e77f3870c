/* The bytes of a region of any kind, for tests that read and change them. A GPU's memory is copied
 * by the driver, and not by the code under test. */
#pragma once

#include "gpu/gpu.h"
#include "memory/cuda_library.h"

#include <dray/memory.h>
#include <sys/types.h>

static inline void memory_must(bool right, const dray_region *region, const char *what)
{
    if (right)
        return;
    fprintf(stderr, "%s of region %s\n", what, dray_region_name(region));
    abort();
}

static inline const dray__cuda *memory_enter(const dray_region *region)
{
    uint8_t uuid[DRAY__CUDA_UUID];
    dray__cuda_device *device;
    dray_error e = {0};
    memory_must(dray_region_device(region, uuid, &e) == DRAY_OK &&
                    dray__cuda_device_find(uuid, &device, &e) == DRAY_OK &&
                    dray__cuda_enter(device, &e) == DRAY_OK,
                region, e.message);
    return dray__cuda_get(NULL);
}

static inline void memory_get(const dray_region *region, uint64_t offset, void *out, size_t bytes)
{
    const uint8_t *base = dray_region_base(region);
    if (!bytes)
        return;
    if (base) {
        memcpy(out, base + offset, bytes);
    } else if (dray_region_get_kind(region) == DRAY_REGION_CUDA) {
        uint64_t at = dray_region_device_address(region) + offset;
        memory_must(!memory_enter(region)->cuMemcpyDtoH(out, at, bytes), region, "reading");
        dray__cuda_leave();
    } else {
        memory_must(pread(dray_region_fd(region), out, bytes, (off_t)offset) == (ssize_t)bytes,
                    region, "reading");
    }
}

static inline void memory_put(dray_region *region, uint64_t offset, const void *from, size_t bytes)
{
    uint8_t *base = dray_region_base(region);
    if (!bytes)
        return;
    if (base) {
        memcpy(base + offset, from, bytes);
    } else if (dray_region_get_kind(region) == DRAY_REGION_CUDA) {
        uint64_t at = dray_region_device_address(region) + offset;
        const dray__cuda *cuda = memory_enter(region);
        /* The copy returns before it is complete. */
        memory_must(!cuda->cuMemcpyHtoD(at, from, bytes) && !cuda->cuCtxSynchronize(), region,
                    "writing");
        dray__cuda_leave();
    } else {
        memory_must(pwrite(dray_region_fd(region), from, bytes, (off_t)offset) == (ssize_t)bytes,
                    region, "writing");
    }
}

/* Flips bits of one byte. */
static inline void memory_flip(dray_region *region, uint64_t offset, uint8_t bits)
{
    uint8_t byte;
    memory_get(region, offset, &byte, 1);
    byte ^= bits;
    memory_put(region, offset, &byte, 1);
}

/* Returns a region's bytes at an address of the host: the region's own bytes, or a copy, which
 * memory_close frees, and writes back if it was written. */
static inline uint8_t *memory_open(const dray_region *region)
{
    uint8_t *bytes = dray_region_base(region);
    if (bytes || !dray_region_bytes(region))
        return bytes;
    bytes = malloc(dray_region_bytes(region));
    memory_must(bytes, region, "a copy");
    memory_get(region, 0, bytes, dray_region_bytes(region));
    return bytes;
}

static inline void memory_close(dray_region *region, uint8_t *bytes, bool written)
{
    if (!bytes || bytes == dray_region_base(region))
        return;
    if (written)
        memory_put(region, 0, bytes, dray_region_bytes(region));
    free(bytes);
}
