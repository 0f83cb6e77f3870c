/* Helpers of the tests of GPU memory: a pattern, device memory that is read and written through the
 * driver, and handles that are sent between two processes. */
#pragma once

#include "gpu/gpu.h"
#include "gpu/pair.h"

#include "memory/cuda_library.h"

#include <dray/gpu.h>

enum { MIB = 1 << 20, BYTES = 5 * MIB + 100 };

static uint8_t pattern[BYTES], found[BYTES];

static inline void draw(uint32_t seed)
{
    for (size_t i = 0; i < sizeof pattern; i++)
        pattern[i] = (uint8_t)((seed = seed * 1664525u + 1013904223u) >> 24);
}

static inline void check_(int line, int rc, int expected, const dray_error *e)
{
    if (rc == expected)
        return;
    fprintf(stderr, "line %d: %s, expected %s: %s\n", line, dray_error_name(rc),
            dray_error_name(expected), rc ? e->message : "");
    _exit(1);
}
static dray_error error;
#define GIVES(code, call) check_(__LINE__, (call), (code), &error)
#define OK(call) GIVES(DRAY_OK, call)
#define SAYS(text)                                                                                 \
    do {                                                                                           \
        if (!strstr(error.message, text)) {                                                        \
            fprintf(stderr, "%s:%d: '%s' is not in '%s'\n", __FILE__, __LINE__, text,              \
                    error.message);                                                                \
            _exit(1);                                                                              \
        }                                                                                          \
    } while (0)

static const dray__cuda *cu;

/* Makes the first visible GPU current. `visible` says which GPUs the process sees; NULL leaves that
 * as it is. */
static inline void start(const char *visible)
{
    dray__cuda_device *device;
    if (visible)
        setenv("CUDA_VISIBLE_DEVICES", visible, 1);
    cu = dray__cuda_get(&error);
    CHECK(cu);
    OK(dray__cuda_device_at(0, &device, &error));
    OK(dray__cuda_enter(device, &error));
}

static inline void put(uint64_t address, const void *data, size_t bytes)
{
    CHECK(cu->cuMemcpyHtoD(address, data, bytes) == 0);
    CHECK(cu->cuCtxSynchronize() == 0); /* the copy returns before it is complete */
}

static inline bool has(uint64_t address, const void *data, size_t bytes)
{
    memset(found, 0xEE, bytes);
    CHECK(cu->cuMemcpyDtoH(found, address, bytes) == 0);
    return memcmp(found, data, bytes) == 0;
}

static inline uint64_t free_bytes(void)
{
    size_t left, total;
    CHECK(cu->cuMemGetInfo(&left, &total) == 0);
    return left;
}

/* ---- handles over the line ------------------------------------------------------------------- */

static inline dray_handle described(const dray_region *region)
{
    dray_handle h = DRAY_HANDLE_INIT;
    h.dtype = DRAY_U8;
    h.ndim = 1;
    h.shape[0] = (int64_t)dray_region_bytes(region);
    h.stride[0] = 1;
    h.owner_member = 7;
    h.owner_epoch = 2;
    OK(dray_handle_describe(region, &h, &error));
    return h;
}

static inline void hand(const dray_region *region)
{
    uint8_t packed[1024];
    dray_handle h = described(region);
    OK(dray_handle_pack(&h, packed, sizeof packed, &error));
    tell(packed, dray_handle_packed_size(), dray_region_fd(region));
}

static inline dray_handle handed(int *fd)
{
    uint8_t packed[1024];
    dray_handle h = DRAY_HANDLE_INIT;
    *fd = hear(packed, dray_handle_packed_size());
    OK(dray_handle_unpack(packed, dray_handle_packed_size(), &h, &error));
    return h;
}

static inline void sign(void)
{
    tell("x", 1, -1);
}

static inline void signed_(void)
{
    char c;
    hear(&c, 1);
}
