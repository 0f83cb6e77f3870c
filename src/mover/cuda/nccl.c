/* Opens NCCL, and makes pairs (nccl.h). The declarations are our own; names, values and layouts are
 * those of its user guide (docs.nvidia.com/deeplearning/nccl/user-guide/docs/api). */
#include "mover/cuda/nccl.h"

#include "base/error.h"
#include "base/library.h"
#include "memory/gpu_library.h"
#include "mover/cuda/cuda.h"

#include <limits.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum {
    REGISTERED = 512 << 20,
    OLDEST = 21800,
    SUCCESS = 0,
    IN_PROGRESS = 7,
    INT8 = 0,
    MAGIC = (int)0xcafebeefu
};

typedef struct nccl_id {
    uint8_t bytes[DRAY__NCCL_ID];
} nccl_id;

/* The struct of 2.18; newer releases read `size` bytes of it. */
typedef struct nccl_config {
    size_t size;
    int magic, version;
    int blocking, cga_cluster_size, least_ctas, most_ctas;
    const char *network;
    int split_share;
} nccl_config;

typedef struct nccl_comm nccl_comm;

#define FUNCTIONS(XX)                                                                              \
    XX(ncclGetVersion, (int *version))                                                             \
    XX(ncclGetUniqueId, (nccl_id * id))                                                            \
    XX(ncclCommInitRankConfig,                                                                     \
       (nccl_comm * *comm, int count, nccl_id id, int rank, nccl_config *config))                  \
    XX(ncclCommGetAsyncError, (nccl_comm * comm, int *state))                                      \
    XX(ncclCommAbort, (nccl_comm * comm))                                                          \
    XX(ncclGroupStart, (void))                                                                     \
    XX(ncclGroupEnd, (void))                                                                       \
    XX(ncclSend,                                                                                   \
       (const void *from, size_t count, int type, int peer, nccl_comm *comm, CUstream stream))     \
    XX(ncclRecv, (void *to, size_t count, int type, int peer, nccl_comm *comm, CUstream stream))

/* Since 2.19. */
#define NEWER_FUNCTIONS(XX)                                                                        \
    XX(ncclMemAlloc, (void **at, size_t bytes))                                                    \
    XX(ncclMemFree, (void *at))                                                                    \
    XX(ncclCommRegister, (nccl_comm * comm, void *at, size_t bytes, void **handle))

typedef struct nccl_library {
#define XX(name, parameters) int(*name) parameters;
    FUNCTIONS(XX)
    NEWER_FUNCTIONS(XX)
#undef XX
    const char *(*ncclGetErrorString)(int result);
} nccl_library;

static nccl_library nccl;
static int found_version;
static atomic_bool cannot_register; /* later pairs are refused, so that neither side waits */
static char trouble[256];
static pthread_once_t once = PTHREAD_ONCE_INIT;

/* ---- the library ----------------------------------------------------------------------------- */

static const dray__symbol symbols[] = {
#define XX(name, parameters) {#name, offsetof(nccl_library, name), false},
    FUNCTIONS(XX)
#undef XX
#define XX(name, parameters) {#name, offsetof(nccl_library, name), true},
        NEWER_FUNCTIONS(XX)
#undef XX
            {"ncclGetErrorString", offsetof(nccl_library, ncclGetErrorString), false},
};

static void open_library(void)
{
    const char *variable = dray__gpu_library_variable(DRAY__GPU_NCCL), *path = getenv(variable);
    int version = 0;
    void *library = dray__gpu_library_open(DRAY__GPU_NCCL);
    if (!library) {
        snprintf(trouble, sizeof trouble,
                 path && !*path ? "%s is empty: none is wanted"
                                : "not found: install it, or set %s to its path",
                 variable);
        return;
    }
    const char *absent =
        dray__symbols_load(library, symbols, sizeof symbols / sizeof *symbols, &nccl);
    if (absent)
        snprintf(trouble, sizeof trouble, "2.18 or newer expected, found a library without %s",
                 absent);
    else if (nccl.ncclGetVersion(&version) || version < OLDEST)
        snprintf(trouble, sizeof trouble, "2.18 or newer expected, found version %d", version);
    else
        found_version = version;
}

int dray__nccl_find(int *version, dray_error *error)
{
    pthread_once(&once, open_library);
    if (!found_version)
        return dray__fail(error, DRAY_EUNSUPPORTED, "NCCL is not usable here; %s", trouble);
    *version = found_version;
    return DRAY_OK;
}

static int fail_nccl(dray_error *error, int result, const char *what)
{
    return dray__fail_library(error, DRAY_ESYS, DRAY_ORIGIN_NCCL, result, "NCCL: %s: %s", what,
                              nccl.ncclGetErrorString(result));
}

int dray__nccl_id(uint8_t id[DRAY__NCCL_ID], dray_error *error)
{
    int version;
    int rc = dray__nccl_find(&version, error);
    if (rc)
        return rc;
    nccl_id made;
    int result = nccl.ncclGetUniqueId(&made);
    if (result)
        return fail_nccl(error, result, "an id for a communicator");
    memcpy(id, made.bytes, sizeof made.bytes);
    return DRAY_OK;
}

/* ---- pairs ----------------------------------------------------------------------------------- */

struct dray__nccl_pair {
    const dray__cuda *cuda;
    dray__cuda_device *device;
    nccl_comm *comm;
    CUstream stream;
    CUdeviceptr memory;
    bool is_nccl_memory; /* of ncclMemAlloc */
    bool is_registered;  /* or cannot be */
    uint64_t slot_bytes;
    CUevent events[DRAY__NCCL_SLOTS];
    uint32_t entering; /* 1 + the slot of the transfer that NCCL is still enqueuing, or 0 */
    int rank;
};

/* Allocates slots that NCCL can register. From registered memory one GPU writes directly into the
 * other's; else NCCL copies through its own buffers on either side. Both sides must register, or
 * neither: both have the same release and slots of the same size. On GPUs with multicast NCCL
 * rounds allocations up to REGISTERED bytes, so smaller slots are not allocated by NCCL. */
static int make_slots(dray__nccl_pair *p, dray_error *error)
{
    size_t bytes = DRAY__NCCL_SLOTS * p->slot_bytes;
    p->is_nccl_memory =
        bytes % REGISTERED == 0 && nccl.ncclMemAlloc && nccl.ncclMemFree && nccl.ncclCommRegister;
    p->is_registered = !p->is_nccl_memory;
    if (p->is_nccl_memory && atomic_load(&cannot_register))
        return dray__fail(error, DRAY_EUNSUPPORTED,
                          "NCCL: registering staging failed in this process before");
    if (!p->is_nccl_memory)
        return dray__fail_cuda(error, p->cuda->cuMemAlloc(&p->memory, bytes), "staging for NCCL");
    void *at = NULL;
    int result = nccl.ncclMemAlloc(&at, bytes);
    p->memory = (CUdeviceptr)(uintptr_t)at;
    return result ? fail_nccl(error, result, "staging for it") : DRAY_OK;
}

/* Transfers go before the kernels that fill and empty slots: what waits for a transfer waits for
 * the link. */
static CUresult make_stream(dray__nccl_pair *p)
{
    int least = 0, greatest = 0;
    if (p->cuda->cuStreamCreateWithPriority && p->cuda->cuCtxGetStreamPriorityRange &&
        p->cuda->cuCtxGetStreamPriorityRange(&least, &greatest) == CUDA_SUCCESS)
        return p->cuda->cuStreamCreateWithPriority(&p->stream, CU_STREAM_NON_BLOCKING, greatest);
    return p->cuda->cuStreamCreate(&p->stream, CU_STREAM_NON_BLOCKING);
}

static int make_memory(dray__nccl_pair *p, dray_error *error)
{
    int rc = make_slots(p, error);
    if (rc)
        return rc;
    CUresult result = make_stream(p);
    for (uint32_t i = 0; i < DRAY__NCCL_SLOTS && !result; i++)
        result = p->cuda->cuEventCreate(&p->events[i], CU_EVENT_DISABLE_TIMING);
    return dray__fail_cuda(error, result, "a stream for NCCL");
}

static int begin_communicator(dray__nccl_pair *p, const uint8_t id[DRAY__NCCL_ID], uint32_t ctas,
                              dray_error *error)
{
    nccl_config config = {.size = sizeof config,
                          .magic = MAGIC,
                          .version = OLDEST,
                          .blocking = 0,
                          .cga_cluster_size = INT_MIN,
                          .least_ctas = 1,
                          .most_ctas = (int)ctas,
                          .split_share = INT_MIN};
    nccl_id copy;
    memcpy(copy.bytes, id, sizeof copy.bytes);
    int result = nccl.ncclCommInitRankConfig(&p->comm, 2, copy, p->rank, &config);
    return result && result != IN_PROGRESS ? fail_nccl(error, result, "making a communicator")
                                           : DRAY_OK;
}

int dray__nccl_open(dray__cuda_device *device, const uint8_t id[DRAY__NCCL_ID], int rank,
                    uint64_t slot_bytes, uint32_t ctas, dray__nccl_pair **out, dray_error *error)
{
    int version;
    int rc = dray__nccl_find(&version, error);
    const dray__cuda *cuda = rc ? NULL : dray__cuda_get(error);
    if (!cuda)
        return DRAY_EUNSUPPORTED;
    dray__nccl_pair *p = calloc(1, sizeof *p);
    if (!p)
        return dray__nomem(error);
    *p = (dray__nccl_pair){.cuda = cuda, .device = device, .slot_bytes = slot_bytes, .rank = rank};
    /* Allocated now: later an allocation would wait for transfers, some of which wait for threads
     * that need this memory. */
    rc = dray__cuda_bounce_reserve(device, error);
    if (rc == DRAY_OK)
        rc = dray__cuda_enter(device, error);
    if (rc == DRAY_OK) {
        rc = make_memory(p, error);
        if (rc == DRAY_OK)
            rc = begin_communicator(p, id, ctas, error);
        dray__cuda_leave();
    }
    if (rc)
        dray__nccl_close(p, NULL);
    else
        *out = p;
    return rc;
}

/* Registers the slots, when the communicator is ready and before the first transfer. */
static int register_slots(dray__nccl_pair *p, dray_error *error)
{
    int rc = dray__cuda_enter(p->device, error);
    if (rc)
        return rc;
    void *handle; /* aborting the communicator releases it */
    int result = nccl.ncclCommRegister(p->comm, (void *)(uintptr_t)p->memory,
                                       DRAY__NCCL_SLOTS * p->slot_bytes, &handle);
    dray__cuda_leave();
    p->is_registered = result == SUCCESS;
    if (result)
        atomic_store(&cannot_register, true);
    return result ? fail_nccl(error, result, "registering its staging") : DRAY_OK;
}

/* The transfer is enqueued: records the event behind it that shows its end. */
static int entered(dray__nccl_pair *p, dray_error *error)
{
    uint32_t slot = p->entering - 1;
    int rc = dray__cuda_enter(p->device, error);
    if (rc)
        return rc;
    CUresult result = p->cuda->cuEventRecord(p->events[slot], p->stream);
    dray__cuda_leave();
    p->entering = 0;
    return dray__fail_cuda(error, result, "after a transfer of NCCL's");
}

int dray__nccl_ready(dray__nccl_pair *p, dray_error *error)
{
    int state = SUCCESS, result = nccl.ncclCommGetAsyncError(p->comm, &state);
    if (result || (state && state != IN_PROGRESS))
        return fail_nccl(error, result ? result : state, "its communicator");
    if (state == IN_PROGRESS)
        return DRAY_EAGAIN;
    if (!p->is_registered)
        return register_slots(p, error);
    return p->entering ? entered(p, error) : DRAY_OK;
}

int dray__nccl_begin(dray__nccl_pair *p, uint32_t slot, uint64_t bytes, bool sends, CUevent after,
                     dray_error *error)
{
    if (bytes > p->slot_bytes || slot >= DRAY__NCCL_SLOTS || p->entering)
        return dray__fail(error, DRAY_EINTERNAL, "NCCL: slot %u, %llu bytes", slot,
                          (unsigned long long)bytes);
    int rc = dray__cuda_enter(p->device, error);
    if (rc)
        return rc;
    CUresult waits = after ? p->cuda->cuStreamWaitEvent(p->stream, after, 0) : CUDA_SUCCESS;
    if (waits) {
        dray__cuda_leave();
        return dray__fail_cuda(error, waits, "before a transfer of NCCL's");
    }
    void *at = (void *)(uintptr_t)dray__nccl_slot(p, slot);
    int result = nccl.ncclGroupStart(); /* of DRAY__NCCL_OPERATIONS */
    if (!result)
        result = sends ? nccl.ncclSend(at, bytes, INT8, 1 - p->rank, p->comm, p->stream)
                       : nccl.ncclRecv(at, bytes, INT8, 1 - p->rank, p->comm, p->stream);
    int ended = nccl.ncclGroupEnd();
    dray__cuda_leave();
    if (!result || result == IN_PROGRESS)
        result = ended;
    if (result && result != IN_PROGRESS)
        return fail_nccl(error, result, sends ? "sending" : "receiving");
    p->entering = slot + 1;
    return DRAY_OK;
}

int dray__nccl_done(dray__nccl_pair *p, uint32_t slot, dray_error *error)
{
    int rc = dray__nccl_ready(p, error);
    if (rc && (rc != DRAY_EAGAIN || p->entering == slot + 1))
        return rc;
    rc = dray__cuda_enter(p->device, error);
    if (rc)
        return rc;
    CUresult result = p->cuda->cuEventQuery(p->events[slot]);
    dray__cuda_leave();
    if (result == CUDA_ERROR_NOT_READY)
        return DRAY_EAGAIN;
    return dray__fail_cuda(error, result, "a transfer of NCCL's");
}

uint64_t dray__nccl_slot(const dray__nccl_pair *p, uint32_t slot)
{
    return p->memory + slot * p->slot_bytes;
}

dray__cuda_device *dray__nccl_device(const dray__nccl_pair *p)
{
    return p->device;
}

void dray__nccl_close(dray__nccl_pair *p, dray__cuda_job *jobs[DRAY__NCCL_SLOTS])
{
    bool entered = p && dray__cuda_enter(p->device, NULL) == DRAY_OK;
    if (entered && p->comm)
        nccl.ncclCommAbort(p->comm);
    for (uint32_t i = 0; i < DRAY__NCCL_SLOTS && jobs; i++) {
        dray__cuda_job_close(jobs[i]); /* waits for its work in the slots */
        jobs[i] = NULL;
    }
    if (entered) {
        if (p->stream)
            p->cuda->cuStreamDestroy(p->stream);
        for (uint32_t i = 0; i < DRAY__NCCL_SLOTS; i++)
            if (p->events[i])
                p->cuda->cuEventDestroy(p->events[i]);
        if (p->memory && p->is_nccl_memory)
            nccl.ncclMemFree((void *)(uintptr_t)p->memory);
        else if (p->memory)
            p->cuda->cuMemFree(p->memory);
        dray__cuda_leave();
    }
    free(p);
}
