/* The CUDA driver, opened at run time: its functions, the GPUs that this process sees, and their
 * primary contexts. */
#pragma once

#include "memory/cuda_abi.h"

#include <dray/dray.h>

typedef struct dray__cuda {
#define XX(name, symbol, parameters) CUresult(*name) parameters;
    DRAY__CUDA_FUNCTIONS(XX)
    DRAY__CUDA_OPTIONAL(XX)
#undef XX
    int version; /* of the CUDA that the driver supports: 13000 is 13.0 */
} dray__cuda;

/* Opens and initialises the driver at the first call: the library that $DRAY_CUDA_LIBRARY names,
 * else libcuda.so.1. Later calls return the same table. Returns NULL with DRAY_EUNSUPPORTED when
 * the variable is empty, there is no driver, it is too old, it sees no GPU, or this process was
 * forked after it was opened. The first call may take a second. Any thread may call it. */
const dray__cuda *dray__cuda_get(dray_error *error);

/* Fills in the error with the driver's name and text for the result, which becomes error->raw; the
 * origin is CUDA. Returns DRAY_OK when the result is CUDA_SUCCESS, else DRAY_ENOMEM, DRAY_EAGAIN
 * (not ready), DRAY_EUNSUPPORTED, or DRAY_ESYS. */
int dray__fail_cuda(dray_error *error, CUresult result, const char *format, ...)
    __attribute__((format(printf, 3, 4)));

#define DRAY__CUDA_UUID 16

/* A GPU that this process sees. The structs are valid until the process ends. */
typedef struct dray__cuda_device {
    uint8_t uuid[DRAY__CUDA_UUID]; /* its name for other processes */
    CUdevice ordinal;              /* its number in this process, by $CUDA_VISIBLE_DEVICES */
    int index;                     /* its place in this process's list, from 0 */
    int arch;                      /* 90: compute capability 9.0 */
    int multiprocessors;
    uint64_t bytes;
    char name[128];
    char pci[32];      /* "0000:1b:00.0" */
    CUcontext context; /* the primary context; NULL before it is entered for the first time */
} dray__cuda_device;

/* Returns the number of GPUs; 0 when there is no driver, or it sees none. */
int dray__cuda_device_count(void);
/* Gets the GPU at this index of the list, which is in the driver's order. */
int dray__cuda_device_at(int index, dray__cuda_device **out, dray_error *error);
/* Finds the GPU of a UUID. Returns 0, or DRAY_ENOENT when this process does not see it; the message
 * lists those that it sees. */
int dray__cuda_device_find(const uint8_t uuid[DRAY__CUDA_UUID], dray__cuda_device **out,
                           dray_error *error);
/* Finds the GPU that has an address mapped in its context. Returns 0, or DRAY_EINVALID when the
 * driver does not know the address. */
int dray__cuda_device_of(CUdeviceptr address, dray__cuda_device **out, dray_error *error);

/* Makes the GPU's primary context current in this thread; dray__cuda_leave restores the context
 * that was current before. Pairs may be nested. The first call for a GPU makes the context (up to a
 * second). */
int dray__cuda_enter(dray__cuda_device *device, dray_error *error);
void dray__cuda_leave(void);

/* Writes "GPU-2f4c..." to `out` of 41 bytes, and returns it. */
char *dray__cuda_uuid_text(const uint8_t uuid[DRAY__CUDA_UUID], char out[41]);
