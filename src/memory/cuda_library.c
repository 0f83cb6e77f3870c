/* Opening the CUDA driver, and its GPUs (cuda_library.h). */
#include "memory/cuda_library.h"

#include "base/error.h"
#include "base/library.h"

#include <dlfcn.h>
#include <pthread.h>
#include <stdarg.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#define MAX_DEVICES 64
#define OLDEST 11040 /* the first driver that returns a GPU's UUID also under MIG */

static dray__cuda cuda;
static dray__cuda_device devices[MAX_DEVICES];
static int device_count;
static pthread_mutex_t contexts_lock = PTHREAD_MUTEX_INITIALIZER;
static bool opened;
static pid_t opener;
static char trouble[DRAY_ERROR_MESSAGE_MAX];
static CUresult trouble_raw;
static pthread_once_t once = PTHREAD_ONCE_INIT;

/* ---- the library ----------------------------------------------------------------------------- */

static const dray__symbol functions[] = {
#define XX(name, symbol, parameters) {#symbol, offsetof(dray__cuda, name), false},
    DRAY__CUDA_FUNCTIONS(XX)
#undef XX
#define XX(name, symbol, parameters) {#symbol, offsetof(dray__cuda, name), true},
        DRAY__CUDA_OPTIONAL(XX)
#undef XX
};

static const char *result_name(CUresult result)
{
    const char *name = NULL;
    return cuda.cuGetErrorName && cuda.cuGetErrorName(result, &name) == CUDA_SUCCESS && name
               ? name
               : "CUDA_ERROR_?";
}

static const char *result_text(CUresult result)
{
    const char *text = NULL;
    return cuda.cuGetErrorString && cuda.cuGetErrorString(result, &text) == CUDA_SUCCESS && text
               ? text
               : "no text";
}

static bool describe_device(int ordinal, dray__cuda_device *device)
{
    int major = 0, minor = 0;
    size_t bytes = 0;
    CUuuid uuid;
    memset(device, 0, sizeof *device);
    if (cuda.cuDeviceGet(&device->ordinal, ordinal) || cuda.cuDeviceGetUuid(&uuid, device->ordinal))
        return false;
    memcpy(device->uuid, uuid.bytes, sizeof device->uuid);
    CUdevice d = device->ordinal;
    cuda.cuDeviceGetName(device->name, (int)sizeof device->name - 1, d);
    cuda.cuDeviceGetPCIBusId(device->pci, (int)sizeof device->pci - 1, d);
    cuda.cuDeviceTotalMem(&bytes, d);
    cuda.cuDeviceGetAttribute(&major, CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR, d);
    cuda.cuDeviceGetAttribute(&minor, CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR, d);
    cuda.cuDeviceGetAttribute(&device->multiprocessors, CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT,
                              d);
    device->bytes = bytes;
    device->arch = major * 10 + minor;
    return true;
}

static CUresult list_devices(void)
{
    int count = 0;
    CUresult result = cuda.cuDeviceGetCount(&count);
    for (int i = 0; i < count && device_count < MAX_DEVICES && !result; i++) {
        if (!describe_device(i, &devices[device_count]))
            continue;
        devices[device_count].index = device_count;
        device_count++;
    }
    return result ? result : device_count ? CUDA_SUCCESS : CUDA_ERROR_NO_DEVICE;
}

static void open_library(void)
{
    const char *path = getenv("DRAY_CUDA_LIBRARY");
    opener = getpid();
    if (path && !*path) {
        snprintf(trouble, sizeof trouble, "DRAY_CUDA_LIBRARY is empty: no driver is wanted");
        return;
    }
    void *library = dlopen(path ? path : "libcuda.so.1", RTLD_NOW | RTLD_LOCAL);
    if (!library) {
        snprintf(trouble, sizeof trouble, "no driver: %s", dlerror());
        return;
    }
    const char *absent =
        dray__symbols_load(library, functions, sizeof functions / sizeof *functions, &cuda);
    if (absent) {
        snprintf(trouble, sizeof trouble, "the driver is too old: it has no %s", absent);
        return;
    }
    cuda.cuDriverGetVersion(&cuda.version);
    if (cuda.version < OLDEST) {
        snprintf(trouble, sizeof trouble, "the driver is of CUDA %d.%d: %d.%d or newer is needed",
                 cuda.version / 1000, cuda.version % 1000 / 10, OLDEST / 1000, OLDEST % 1000 / 10);
        return;
    }
    CUresult result = cuda.cuInit(0);
    if (result == CUDA_SUCCESS)
        result = list_devices();
    trouble_raw = result;
    opened = result == CUDA_SUCCESS;
    if (!opened)
        snprintf(trouble, sizeof trouble, "the driver cannot be used: %s (%s)%s",
                 result_name(result), result_text(result),
                 result == CUDA_ERROR_NOT_INITIALIZED ? ": was this process forked from one that "
                                                        "uses GPUs? Start it anew instead"
                                                      : "");
}

const dray__cuda *dray__cuda_get(dray_error *error)
{
    pthread_once(&once, open_library);
    if (!opened) {
        dray__fail_library(error, DRAY_EUNSUPPORTED,
                           trouble_raw ? DRAY_ORIGIN_CUDA : DRAY_ORIGIN_DRAY, trouble_raw,
                           "CUDA is not usable here; %s", trouble);
        return NULL;
    }
    if (opener != getpid()) {
        dray__fail(error, DRAY_EUNSUPPORTED,
                   "CUDA was in use when this process was forked: it is not usable in it; start "
                   "the process anew (exec, or multiprocessing's \"spawn\")");
        return NULL;
    }
    return &cuda;
}

static int code_of(CUresult result)
{
    static const struct {
        CUresult result;
        int code;
    } codes[] = {{CUDA_ERROR_OUT_OF_MEMORY, DRAY_ENOMEM},
                 {CUDA_ERROR_NOT_READY, DRAY_EAGAIN},
                 {CUDA_ERROR_NOT_SUPPORTED, DRAY_EUNSUPPORTED},
                 {CUDA_ERROR_PEER_ACCESS_UNSUPPORTED, DRAY_EUNSUPPORTED}};
    for (size_t i = 0; i < sizeof codes / sizeof *codes; i++)
        if (codes[i].result == result)
            return codes[i].code;
    return DRAY_ESYS;
}

int dray__fail_cuda(dray_error *error, CUresult result, const char *format, ...)
{
    if (result == CUDA_SUCCESS)
        return DRAY_OK;
    char what[DRAY_ERROR_MESSAGE_MAX];
    va_list arguments;
    va_start(arguments, format);
    vsnprintf(what, sizeof what, format, arguments);
    va_end(arguments);
    return dray__fail_library(error, code_of(result), DRAY_ORIGIN_CUDA, result, "CUDA: %s: %s (%s)",
                              what, result_name(result), result_text(result));
}

/* ---- GPUs ------------------------------------------------------------------------------------ */

char *dray__cuda_uuid_text(const uint8_t uuid[DRAY__CUDA_UUID], char out[41])
{
    char *at = out + sprintf(out, "GPU-");
    for (int i = 0; i < DRAY__CUDA_UUID; i++)
        at += sprintf(at, i == 4 || i == 6 || i == 8 || i == 10 ? "-%02x" : "%02x", uuid[i]);
    return out;
}

int dray__cuda_device_count(void)
{
    return dray__cuda_get(NULL) ? device_count : 0;
}

int dray__cuda_device_at(int index, dray__cuda_device **out, dray_error *error)
{
    if (!dray__cuda_get(error))
        return DRAY_EUNSUPPORTED;
    if (index < 0 || index >= device_count)
        return dray__fail(error, DRAY_ENOENT, "GPU %d: this process sees %d", index, device_count);
    *out = &devices[index];
    return DRAY_OK;
}

int dray__cuda_device_find(const uint8_t uuid[DRAY__CUDA_UUID], dray__cuda_device **out,
                           dray_error *error)
{
    if (!dray__cuda_get(error))
        return DRAY_EUNSUPPORTED;
    char wanted[41], seen[256] = "", text[41];
    size_t used = 0;
    for (int i = 0; i < device_count; i++) {
        if (memcmp(devices[i].uuid, uuid, DRAY__CUDA_UUID) == 0) {
            *out = &devices[i];
            return DRAY_OK;
        }
        if (used < sizeof seen - 1)
            used += (size_t)snprintf(seen + used, sizeof seen - used, "%s%s", i ? ", " : "",
                                     dray__cuda_uuid_text(devices[i].uuid, text));
    }
    return dray__fail(error, DRAY_ENOENT,
                      "%s is not among the GPUs that this process sees (CUDA_VISIBLE_DEVICES "
                      "chooses them): %s",
                      dray__cuda_uuid_text(uuid, wanted), seen);
}

int dray__cuda_device_of(CUdeviceptr address, dray__cuda_device **out, dray_error *error)
{
    if (!dray__cuda_get(error))
        return DRAY_EUNSUPPORTED;
    int ordinal = -1;
    CUresult result =
        cuda.cuPointerGetAttribute(&ordinal, CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL, address);
    for (int i = 0; i < device_count && !result; i++)
        if (devices[i].ordinal == ordinal) {
            *out = &devices[i];
            return DRAY_OK;
        }
    return dray__fail(error, DRAY_EINVALID,
                      "address 0x%llx is no GPU memory that the driver knows in this process",
                      (unsigned long long)address);
}

static CUresult retain(dray__cuda_device *device)
{
    CUresult result = CUDA_SUCCESS;
    pthread_mutex_lock(&contexts_lock);
    if (!device->context) {
        CUcontext context = NULL;
        result = cuda.cuDevicePrimaryCtxRetain(&context, device->ordinal);
        if (!result)
            __atomic_store_n(&device->context, context, __ATOMIC_RELEASE);
    }
    pthread_mutex_unlock(&contexts_lock);
    return result;
}

int dray__cuda_enter(dray__cuda_device *device, dray_error *error)
{
    if (!dray__cuda_get(error))
        return DRAY_EUNSUPPORTED;
    CUresult result = CUDA_SUCCESS;
    if (!__atomic_load_n(&device->context, __ATOMIC_ACQUIRE))
        result = retain(device);
    if (!result)
        result = cuda.cuCtxPushCurrent(device->context);
    char text[41];
    return dray__fail_cuda(error, result, "primary context of %s (%s)", device->name,
                           dray__cuda_uuid_text(device->uuid, text));
}

void dray__cuda_leave(void)
{
    CUcontext context;
    cuda.cuCtxPopCurrent(&context);
}
