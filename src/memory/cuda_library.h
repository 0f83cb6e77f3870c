/* The CUDA driver, opened at run time: its functions, the GPUs that this process sees, and their
 * primary contexts. */
#ifndef DRAY_MEMORY_CUDA_LIBRARY_H
#define DRAY_MEMORY_CUDA_LIBRARY_H

#include "memory/cuda_abi.h"

#include <dray/dray.h>

typedef struct dray__cuda {
#define XX(name, symbol, parameters) CUresult(*name) parameters;
    DRAY__CUDA_FUNCTIONS(XX)
    DRAY__CUDA_OPTIONAL(XX)
#undef XX
    int version; /* of the CUDA that the driver supports: 13000 is 13.0 */
} dray__cuda;

/* The driver of $DRAY_CUDA_LIBRARY (empty: none is wanted), or libcuda.so.1, opened and initialised
 * once; every later call is a look. NULL with DRAY_EUNSUPPORTED: there is none, it is too old, it
 * sees no GPU, or this process was forked after it was opened (its state does not survive that).
 * The first call may take a second. Threads: any. */
const dray__cuda *dray__cuda_get(dray_error *error);

/* Says what failed with the driver's name and text for it; origin CUDA, raw the result. Returns
 * DRAY_ENOMEM, DRAY_EAGAIN (not ready), DRAY_EUNSUPPORTED, or DRAY_ESYS. */
int dray__fail_cuda(dray_error *error, CUresult result, const char *format, ...)
    __attribute__((format(printf, 3, 4)));

#define DRAY__CUDA_UUID 16

/* One for each GPU that this process sees, for its life. */
typedef struct dray__cuda_device {
    uint8_t uuid[DRAY__CUDA_UUID]; /* what another process knows it by */
    CUdevice ordinal;              /* this process's own: $CUDA_VISIBLE_DEVICES decides it */
    int index;                     /* into this process's list: 0.. */
    int arch;                      /* 90: compute capability 9.0 */
    int multiprocessors;
    uint64_t bytes;
    char name[128];
    char pci[32];      /* "0000:1b:00.0" */
    CUcontext context; /* the primary one; NULL until it was entered for the first time */
} dray__cuda_device;

/* 0: no driver, or nothing that it shows. */
int dray__cuda_device_count(void);
/* By its place in the list, which is the driver's order. */
int dray__cuda_device_at(int index, dray__cuda_device **out, dray_error *error);
/* DRAY_ENOENT: this process does not see a GPU of that UUID (the message lists those it sees). */
int dray__cuda_device_find(const uint8_t uuid[DRAY__CUDA_UUID], dray__cuda_device **out,
                           dray_error *error);
/* The GPU whose memory, or into whose context, an address was mapped. DRAY_EINVALID: the driver
 * does not know the address. */
int dray__cuda_device_of(CUdeviceptr address, dray__cuda_device **out, dray_error *error);

/* Makes the GPU's primary context this thread's current one, until dray__cuda_leave gives back what
 * was current before. Pairs nest. The first on a GPU makes the context (up to a second). */
int dray__cuda_enter(dray__cuda_device *device, dray_error *error);
void dray__cuda_leave(void);

/* "GPU-2f4c...": room for 41 bytes. Returns out. */
char *dray__cuda_uuid_text(const uint8_t uuid[DRAY__CUDA_UUID], char out[41]);

#endif
