/* The fake driver's devices, contexts and errors; failures on demand. */
#include "fake.h"

#include <fcntl.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

enum { STACK = 64, FAILURES = 16 };

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static atomic_int opener; /* the process that called cuInit */
static int visible[MAX_DEVICES], visible_count;
static context contexts[MAX_DEVICES];

static _Thread_local context *stack[STACK];
static _Thread_local int depth;
_Thread_local bool fake_in_host_function;

uint64_t fake_number(const char *variable, uint64_t otherwise)
{
    const char *text = getenv(variable);
    return text && *text ? strtoull(text, NULL, 0) : otherwise;
}

/* ---- failures on demand ---------------------------------------------------------------------- */

typedef struct failure {
    char function[64];
    unsigned at;
    bool onward;
    CUresult result;
    atomic_uint calls;
} failure;

static failure failures[FAILURES];
static atomic_int failure_count;
static atomic_int spec_read;

/* What $FAKE_CUDA_FAIL says, for a process that is running; "" or NULL: no more of it. */
__attribute__((visibility("default"))) void fake_cuda_fail(const char *spec);

void fake_cuda_fail(const char *spec)
{
    int count = 0;
    atomic_store(&failure_count, 0);
    while (spec && *spec && count < FAILURES) {
        failure *f = &failures[count];
        char plus[2];
        int used = 0;
        atomic_store(&f->calls, 0);
        if (sscanf(spec, "%63[A-Za-z0-9_]:%u%1[+]:%d%n", f->function, &f->at, plus, &f->result,
                   &used) == 4)
            f->onward = true;
        else if (sscanf(spec, "%63[A-Za-z0-9_]:%u:%d%n", f->function, &f->at, &f->result, &used) ==
                 3)
            f->onward = false;
        else {
            fprintf(stderr, "fake CUDA: FAKE_CUDA_FAIL: cannot read '%s'\n", spec);
            abort();
        }
        count++;
        spec += used;
        spec += *spec == ',';
    }
    atomic_store(&spec_read, 1);
    atomic_store(&failure_count, count);
}

static CUresult wanted_failure(const char *function)
{
    if (!atomic_exchange(&spec_read, 1))
        fake_cuda_fail(getenv("FAKE_CUDA_FAIL"));
    for (int i = 0; i < atomic_load(&failure_count); i++) {
        failure *f = &failures[i];
        if (strcmp(f->function, function) != 0)
            continue;
        unsigned call = atomic_fetch_add(&f->calls, 1) + 1;
        if (call == f->at || (f->onward && call > f->at))
            return f->result;
    }
    return CUDA_SUCCESS;
}

CUresult fake_enter(const char *function)
{
    int pid = atomic_load(&opener);
    if (!pid || pid != getpid()) /* a forked child has no driver */
        return CUDA_ERROR_NOT_INITIALIZED;
    if (fake_in_host_function)
        return CUDA_ERROR_NOT_PERMITTED;
    return wanted_failure(function);
}

/* ---- devices --------------------------------------------------------------------------------- */

int fake_physical_count(void)
{
    uint64_t n = fake_number("FAKE_CUDA_DEVICES", 4);
    return n > MAX_DEVICES ? MAX_DEVICES : (int)n;
}

static void uuid_of(int physical, CUuuid *uuid)
{
    const char *host = getenv("FAKE_CUDA_HOST");
    uint64_t hash = 14695981039346656037ULL;
    for (const char *at = host ? host : ""; *at; at++)
        hash = (hash ^ (uint8_t)*at) * 1099511628211ULL;
    for (int i = 0; i < 16; i++) {
        hash = (hash ^ ((uint64_t)physical + 1)) * 1099511628211ULL;
        uuid->bytes[i] = (uint8_t)(hash >> 32);
    }
}

static void uuid_text(int physical, char out[41])
{
    static const int dashes[] = {4, 6, 8, 10};
    CUuuid uuid;
    uuid_of(physical, &uuid);
    char *at = out + sprintf(out, "GPU-");
    for (int i = 0, d = 0; i < 16; i++) {
        if (d < 4 && i == dashes[d]) {
            *at++ = '-';
            d++;
        }
        at += sprintf(at, "%02x", uuid.bytes[i]);
    }
}

/* One entry of CUDA_VISIBLE_DEVICES: an ordinal, or the beginning of one GPU's UUID alone. */
static int device_named(const char *name, size_t length)
{
    int found = -1, count = fake_physical_count();
    if (length > 4 && strncmp(name, "GPU-", 4) == 0) {
        for (int i = 0; i < count; i++) {
            char text[41];
            uuid_text(i, text);
            if (strncmp(text, name, length) == 0)
                found = found == -1 ? i : -2;
        }
        return found;
    }
    char *end;
    long n = strtol(name, &end, 10);
    return end == name + length && length && n >= 0 && n < count ? (int)n : -1;
}

static void choose_visible(void)
{
    const char *list = getenv("CUDA_VISIBLE_DEVICES");
    visible_count = 0;
    if (!list) {
        for (int i = 0; i < fake_physical_count(); i++)
            visible[visible_count++] = i;
        return;
    }
    while (*list) {
        size_t length = strcspn(list, ",");
        int found = device_named(list, length);
        if (found < 0) /* what comes after one that cannot be is not visible, either */
            return;
        for (int i = 0; i < visible_count; i++)
            if (visible[i] == found) {
                visible_count = 0;
                return;
            }
        visible[visible_count++] = found;
        list += length;
        list += *list == ',';
    }
}

CUresult cuInit(unsigned int flags)
{
    pthread_mutex_lock(&lock);
    CUresult rc = flags ? CUDA_ERROR_INVALID_VALUE : wanted_failure("cuInit");
    int pid = atomic_load(&opener);
    if (!rc && pid && pid != getpid())
        rc = CUDA_ERROR_NOT_INITIALIZED;
    if (!rc && !pid) {
        choose_visible();
        rc = visible_count ? CUDA_SUCCESS : CUDA_ERROR_NO_DEVICE;
        if (!rc)
            atomic_store(&opener, getpid());
    }
    pthread_mutex_unlock(&lock);
    return rc;
}

CUresult cuDriverGetVersion(int *version)
{
    *version = (int)fake_number("FAKE_CUDA_VERSION", 13000);
    return CUDA_SUCCESS;
}

CUresult cuDeviceGetCount(int *count)
{
    ENTER(cuDeviceGetCount);
    *count = visible_count;
    return CUDA_SUCCESS;
}

int fake_visible(void)
{
    return visible_count;
}

int fake_ordinal(int physical)
{
    for (int i = 0; i < visible_count; i++)
        if (visible[i] == physical)
            return i;
    return -1;
}

static bool is_device(CUdevice device)
{
    return device >= 0 && device < visible_count;
}

CUresult cuDeviceGet(CUdevice *device, int ordinal)
{
    ENTER(cuDeviceGet);
    if (!is_device(ordinal))
        return CUDA_ERROR_INVALID_DEVICE;
    *device = ordinal;
    return CUDA_SUCCESS;
}

CUresult cuDeviceGetUuid_v2(CUuuid *uuid, CUdevice device)
{
    ENTER(cuDeviceGetUuid);
    if (!is_device(device))
        return CUDA_ERROR_INVALID_DEVICE;
    uuid_of(visible[device], uuid);
    return CUDA_SUCCESS;
}

CUresult cuDeviceGetName(char *name, int size, CUdevice device)
{
    ENTER(cuDeviceGetName);
    if (!is_device(device) || size < 1)
        return CUDA_ERROR_INVALID_DEVICE;
    snprintf(name, (size_t)size, "Fake GPU");
    return CUDA_SUCCESS;
}

CUresult cuDeviceTotalMem_v2(size_t *bytes, CUdevice device)
{
    ENTER(cuDeviceTotalMem);
    if (!is_device(device))
        return CUDA_ERROR_INVALID_DEVICE;
    *bytes = fake_total();
    return CUDA_SUCCESS;
}

CUresult cuDeviceGetAttribute(int *value, int attribute, CUdevice device)
{
    ENTER(cuDeviceGetAttribute);
    if (!is_device(device))
        return CUDA_ERROR_INVALID_DEVICE;
    int arch = (int)fake_number("FAKE_CUDA_ARCH", 90);
    const struct {
        int attribute, value;
    } values[] = {
        {CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT, (int)fake_number("FAKE_CUDA_SMS", 4)},
        {CU_DEVICE_ATTRIBUTE_PCI_BUS_ID, 0x1b + visible[device]},
        {CU_DEVICE_ATTRIBUTE_MEMORY_CLOCK_RATE, 3201000},
        {CU_DEVICE_ATTRIBUTE_GLOBAL_MEMORY_BUS_WIDTH, 6144},
        {CU_DEVICE_ATTRIBUTE_L2_CACHE_SIZE, 60 << 20},
        {CU_DEVICE_ATTRIBUTE_MAX_THREADS_PER_MULTIPROCESSOR, 2048},
        {CU_DEVICE_ATTRIBUTE_ASYNC_ENGINE_COUNT, 3},
        {CU_DEVICE_ATTRIBUTE_UNIFIED_ADDRESSING, 1},
        {CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR, arch / 10},
        {CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR, arch % 10},
        {CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_MULTIPROCESSOR, 228 << 10},
        {CU_DEVICE_ATTRIBUTE_HOST_REGISTER_SUPPORTED, 1},
        {CU_DEVICE_ATTRIBUTE_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED, 1},
        {CU_DEVICE_ATTRIBUTE_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR_SUPPORTED, 1},
        {CU_DEVICE_ATTRIBUTE_IPC_EVENT_SUPPORTED, 1},
    };
    *value = 0;
    for (size_t i = 0; i < sizeof values / sizeof *values; i++)
        if (values[i].attribute == attribute)
            *value = values[i].value;
    return attribute < 1 ? CUDA_ERROR_INVALID_VALUE : CUDA_SUCCESS;
}

CUresult cuDeviceGetPCIBusId(char *text, int size, CUdevice device)
{
    ENTER(cuDeviceGetPCIBusId);
    if (!is_device(device) || size < 13)
        return CUDA_ERROR_INVALID_VALUE;
    snprintf(text, (size_t)size, "0000:%02X:00.0", 0x1bu + (unsigned)visible[device]);
    return CUDA_SUCCESS;
}

CUresult cuDeviceCanAccessPeer(int *can, CUdevice device, CUdevice peer)
{
    ENTER(cuDeviceCanAccessPeer);
    if (!is_device(device) || !is_device(peer))
        return CUDA_ERROR_INVALID_DEVICE;
    *can = device != peer;
    return CUDA_SUCCESS;
}

CUresult cuDeviceGetP2PAttribute(int *value, int attribute, CUdevice source, CUdevice destination)
{
    ENTER(cuDeviceGetP2PAttribute);
    if (!is_device(source) || !is_device(destination) || source == destination)
        return CUDA_ERROR_INVALID_DEVICE;
    *value = attribute != CU_DEVICE_P2P_ATTRIBUTE_PERFORMANCE_RANK;
    return attribute < 1 || attribute > 4 ? CUDA_ERROR_INVALID_VALUE : CUDA_SUCCESS;
}

/* ---- contexts -------------------------------------------------------------------------------- */

context *fake_context(int ordinal)
{
    return is_device(ordinal) ? &contexts[ordinal] : NULL;
}

void fake_break(context *c, CUresult result)
{
    int none = 0;
    __atomic_compare_exchange_n(&c->sticky, &none, result, false, __ATOMIC_SEQ_CST,
                                __ATOMIC_SEQ_CST);
}

context *fake_current(CUresult *result)
{
    context *c = depth ? stack[depth - 1] : NULL;
    *result = CUDA_ERROR_INVALID_CONTEXT;
    if (!c || !__atomic_load_n(&c->retained, __ATOMIC_SEQ_CST))
        return NULL;
    *result = __atomic_load_n(&c->sticky, __ATOMIC_SEQ_CST);
    return *result ? NULL : c;
}

static CUresult context_begin(context *c, int ordinal)
{
    char name[64];
    c->ordinal = ordinal;
    c->physical = visible[ordinal];
    c->sticky = 0;
    snprintf(name, sizeof name, "fake-cuda-heap-%d", c->physical);
    c->heap_fd = memfd_create(name, MFD_CLOEXEC);
    if (c->heap_fd < 0 || ftruncate(c->heap_fd, (off_t)HEAP_BYTES))
        return CUDA_ERROR_OUT_OF_MEMORY;
    if (!c->heap)
        c->heap = (uint8_t *)fake_reserve(HEAP_BYTES, GRANULE);
    return c->heap ? CUDA_SUCCESS : CUDA_ERROR_OUT_OF_MEMORY;
}

CUresult cuDevicePrimaryCtxRetain(CUcontext *out, CUdevice device)
{
    ENTER(cuDevicePrimaryCtxRetain);
    context *c = fake_context(device);
    if (!c)
        return CUDA_ERROR_INVALID_DEVICE;
    pthread_mutex_lock(&lock);
    CUresult rc = c->retained ? CUDA_SUCCESS : context_begin(c, device);
    if (!rc) {
        __atomic_add_fetch(&c->retained, 1, __ATOMIC_SEQ_CST);
        *out = (CUcontext)c;
    }
    pthread_mutex_unlock(&lock);
    return rc;
}

CUresult cuDevicePrimaryCtxRelease_v2(CUdevice device)
{
    ENTER(cuDevicePrimaryCtxRelease);
    context *c = fake_context(device);
    if (!c)
        return CUDA_ERROR_INVALID_DEVICE;
    pthread_mutex_lock(&lock);
    CUresult rc = c->retained ? CUDA_SUCCESS : CUDA_ERROR_INVALID_CONTEXT;
    if (c->retained == 1) {
        fake_streams_end(c);
        fake_memory_end(c);
        close(c->heap_fd);
    }
    if (!rc)
        __atomic_sub_fetch(&c->retained, 1, __ATOMIC_SEQ_CST);
    pthread_mutex_unlock(&lock);
    return rc;
}

static bool is_context(CUcontext given)
{
    context *c = (context *)given;
    return c >= contexts && c < contexts + visible_count &&
           __atomic_load_n(&c->retained, __ATOMIC_SEQ_CST);
}

CUresult cuCtxPushCurrent_v2(CUcontext given)
{
    ENTER(cuCtxPushCurrent);
    if (!is_context(given))
        return CUDA_ERROR_INVALID_CONTEXT;
    if (depth == STACK)
        return CUDA_ERROR_INVALID_VALUE;
    stack[depth++] = (context *)given;
    return CUDA_SUCCESS;
}

CUresult cuCtxPopCurrent_v2(CUcontext *out)
{
    ENTER(cuCtxPopCurrent);
    if (!depth)
        return CUDA_ERROR_INVALID_CONTEXT;
    context *c = stack[--depth];
    if (out)
        *out = (CUcontext)c;
    return CUDA_SUCCESS;
}

CUresult cuCtxSetCurrent(CUcontext given)
{
    ENTER(cuCtxSetCurrent);
    if (given && !is_context(given))
        return CUDA_ERROR_INVALID_CONTEXT;
    if (depth)
        depth--;
    if (given)
        stack[depth++] = (context *)given;
    return CUDA_SUCCESS;
}

CUresult cuCtxGetCurrent(CUcontext *out)
{
    ENTER(cuCtxGetCurrent);
    *out = (CUcontext)(depth ? stack[depth - 1] : NULL);
    return CUDA_SUCCESS;
}

CUresult cuCtxGetDevice(CUdevice *device)
{
    ENTER(cuCtxGetDevice);
    if (!depth)
        return CUDA_ERROR_INVALID_CONTEXT;
    *device = stack[depth - 1]->ordinal;
    return CUDA_SUCCESS;
}

CUresult cuCtxSynchronize(void)
{
    ENTER(cuCtxSynchronize);
    CURRENT(c);
    return fake_drain(c);
}

/* GPUs reach each other's allocations at once here; the call's rules are the driver's. */
static uint64_t peers[MAX_DEVICES];

CUresult cuCtxEnablePeerAccess(CUcontext peer, unsigned int flags)
{
    ENTER(cuCtxEnablePeerAccess);
    CURRENT(c);
    if (flags)
        return CUDA_ERROR_INVALID_VALUE;
    if (!is_context(peer) || (context *)peer == c)
        return CUDA_ERROR_INVALID_CONTEXT;
    uint64_t bit = UINT64_C(1) << ((context *)peer)->physical;
    uint64_t before = __atomic_fetch_or(&peers[c->ordinal], bit, __ATOMIC_SEQ_CST);
    return before & bit ? CUDA_ERROR_PEER_ACCESS_ALREADY_ENABLED : CUDA_SUCCESS;
}

/* ---- errors ---------------------------------------------------------------------------------- */

static const struct {
    CUresult result;
    const char *name;
} results[] = {
#define XX(name, value) {value, #name},
    DRAY__CUDA_RESULTS(XX)
#undef XX
};

CUresult cuGetErrorName(CUresult result, const char **text)
{
    for (size_t i = 0; i < sizeof results / sizeof *results; i++)
        if (results[i].result == result) {
            *text = results[i].name;
            return CUDA_SUCCESS;
        }
    *text = NULL;
    return CUDA_ERROR_INVALID_VALUE;
}

CUresult cuGetErrorString(CUresult result, const char **text)
{
    CUresult rc = cuGetErrorName(result, text);
    if (!rc)
        *text = "as the fake driver has it";
    return rc;
}
