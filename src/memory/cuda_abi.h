/* The part of the CUDA driver's binary interface that this library uses, declared here, so that one
 * build runs with and without it and no header of CUDA is needed. Names, values and layouts are
 * those of the CUDA driver API reference (docs.nvidia.com/cuda/cuda-driver-api);
 * tests/memory/test_cuda_abi.sh compares them with cuda.h where there is one. Enumerations of the
 * driver are int here, because newer drivers return values that a list would not have. */
#pragma once

#include <stddef.h>
#include <stdint.h>

typedef int CUresult;
typedef int CUdevice;
typedef uint64_t CUdeviceptr;
typedef uint64_t CUmemGenericAllocationHandle;
typedef struct CUctx_st *CUcontext;
typedef struct CUmod_st *CUmodule;
typedef struct CUfunc_st *CUfunction;
typedef struct CUstream_st *CUstream;
typedef struct CUevent_st *CUevent;
typedef void (*CUhostFn)(void *user);
typedef void (*CUstreamCallback)(CUstream stream, CUresult result, void *user);

typedef struct CUuuid {
    uint8_t bytes[16];
} CUuuid;

typedef struct CUipcMemHandle {
    uint8_t reserved[64];
} CUipcMemHandle;

typedef struct CUipcEventHandle {
    uint8_t reserved[64];
} CUipcEventHandle;

/* XX(name, value) */
#define DRAY__CUDA_RESULTS(XX)                                                                     \
    XX(CUDA_SUCCESS, 0)                                                                            \
    XX(CUDA_ERROR_INVALID_VALUE, 1)                                                                \
    XX(CUDA_ERROR_OUT_OF_MEMORY, 2)                                                                \
    XX(CUDA_ERROR_NOT_INITIALIZED, 3)                                                              \
    XX(CUDA_ERROR_DEINITIALIZED, 4)                                                                \
    XX(CUDA_ERROR_NO_DEVICE, 100)                                                                  \
    XX(CUDA_ERROR_INVALID_DEVICE, 101)                                                             \
    XX(CUDA_ERROR_INVALID_IMAGE, 200)                                                              \
    XX(CUDA_ERROR_INVALID_CONTEXT, 201)                                                            \
    XX(CUDA_ERROR_MAP_FAILED, 205)                                                                 \
    XX(CUDA_ERROR_ALREADY_MAPPED, 208)                                                             \
    XX(CUDA_ERROR_NO_BINARY_FOR_GPU, 209)                                                          \
    XX(CUDA_ERROR_NOT_MAPPED, 211)                                                                 \
    XX(CUDA_ERROR_PEER_ACCESS_UNSUPPORTED, 217)                                                    \
    XX(CUDA_ERROR_OPERATING_SYSTEM, 304)                                                           \
    XX(CUDA_ERROR_INVALID_HANDLE, 400)                                                             \
    XX(CUDA_ERROR_NOT_FOUND, 500)                                                                  \
    XX(CUDA_ERROR_NOT_READY, 600)                                                                  \
    XX(CUDA_ERROR_ILLEGAL_ADDRESS, 700)                                                            \
    XX(CUDA_ERROR_PEER_ACCESS_ALREADY_ENABLED, 704)                                                \
    XX(CUDA_ERROR_HOST_MEMORY_ALREADY_REGISTERED, 712)                                             \
    XX(CUDA_ERROR_HOST_MEMORY_NOT_REGISTERED, 713)                                                 \
    XX(CUDA_ERROR_LAUNCH_FAILED, 719)                                                              \
    XX(CUDA_ERROR_NOT_PERMITTED, 800)                                                              \
    XX(CUDA_ERROR_NOT_SUPPORTED, 801)                                                              \
    XX(CUDA_ERROR_UNKNOWN, 999)

/* Flags, attributes and kinds, each the value of the driver's constant of that name. */
#define DRAY__CUDA_CONSTANTS(XX)                                                                   \
    XX(CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT, 16)                                               \
    XX(CU_DEVICE_ATTRIBUTE_PCI_BUS_ID, 33)                                                         \
    XX(CU_DEVICE_ATTRIBUTE_MEMORY_CLOCK_RATE, 36)                                                  \
    XX(CU_DEVICE_ATTRIBUTE_GLOBAL_MEMORY_BUS_WIDTH, 37)                                            \
    XX(CU_DEVICE_ATTRIBUTE_L2_CACHE_SIZE, 38)                                                      \
    XX(CU_DEVICE_ATTRIBUTE_MAX_THREADS_PER_MULTIPROCESSOR, 39)                                     \
    XX(CU_DEVICE_ATTRIBUTE_ASYNC_ENGINE_COUNT, 40)                                                 \
    XX(CU_DEVICE_ATTRIBUTE_UNIFIED_ADDRESSING, 41)                                                 \
    XX(CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR, 75)                                           \
    XX(CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR, 76)                                           \
    XX(CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_MULTIPROCESSOR, 81)                               \
    XX(CU_DEVICE_ATTRIBUTE_HOST_REGISTER_SUPPORTED, 99)                                            \
    XX(CU_DEVICE_ATTRIBUTE_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED, 102)                               \
    XX(CU_DEVICE_ATTRIBUTE_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR_SUPPORTED, 103)                       \
    XX(CU_DEVICE_ATTRIBUTE_IPC_EVENT_SUPPORTED, 125)                                               \
    XX(CU_DEVICE_P2P_ATTRIBUTE_PERFORMANCE_RANK, 1)                                                \
    XX(CU_DEVICE_P2P_ATTRIBUTE_NATIVE_ATOMIC_SUPPORTED, 3)                                         \
    XX(CU_POINTER_ATTRIBUTE_CONTEXT, 1)                                                            \
    XX(CU_POINTER_ATTRIBUTE_MEMORY_TYPE, 2)                                                        \
    XX(CU_POINTER_ATTRIBUTE_BUFFER_ID, 7)                                                          \
    XX(CU_POINTER_ATTRIBUTE_IS_MANAGED, 8)                                                         \
    XX(CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL, 9)                                                     \
    XX(CU_POINTER_ATTRIBUTE_IS_LEGACY_CUDA_IPC_CAPABLE, 10)                                        \
    XX(CU_POINTER_ATTRIBUTE_RANGE_START_ADDR, 11)                                                  \
    XX(CU_POINTER_ATTRIBUTE_RANGE_SIZE, 12)                                                        \
    XX(CU_POINTER_ATTRIBUTE_MAPPED, 13)                                                            \
    XX(CU_POINTER_ATTRIBUTE_ALLOWED_HANDLE_TYPES, 14)                                              \
    XX(CU_POINTER_ATTRIBUTE_MEMPOOL_HANDLE, 17)                                                    \
    XX(CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES, 8)                                         \
    XX(CU_MEMORYTYPE_HOST, 1)                                                                      \
    XX(CU_MEMORYTYPE_DEVICE, 2)                                                                    \
    XX(CU_STREAM_DEFAULT, 0)                                                                       \
    XX(CU_STREAM_NON_BLOCKING, 1)                                                                  \
    XX(CU_EVENT_DEFAULT, 0)                                                                        \
    XX(CU_EVENT_DISABLE_TIMING, 2)                                                                 \
    XX(CU_EVENT_INTERPROCESS, 4)                                                                   \
    XX(CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS, 1)                                                      \
    XX(CU_MEMHOSTREGISTER_PORTABLE, 1)                                                             \
    XX(CU_MEMHOSTREGISTER_DEVICEMAP, 2)                                                            \
    XX(CU_MEMHOSTREGISTER_READ_ONLY, 8)                                                            \
    XX(CU_MEM_ALLOCATION_TYPE_PINNED, 1)                                                           \
    XX(CU_MEM_LOCATION_TYPE_DEVICE, 1)                                                             \
    XX(CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR, 1)                                                \
    XX(CU_MEM_ACCESS_FLAGS_PROT_READ, 1)                                                           \
    XX(CU_MEM_ACCESS_FLAGS_PROT_READWRITE, 3)                                                      \
    XX(CU_MEM_ALLOC_GRANULARITY_MINIMUM, 0)                                                        \
    XX(CU_MEM_ALLOC_GRANULARITY_RECOMMENDED, 1)                                                    \
    XX(CU_MEMCPY_SRC_ACCESS_ORDER_STREAM, 1)                                                       \
    XX(CU_STREAM_WAIT_VALUE_GEQ, 0)

enum {
#define XX(name, value) name = value,
    DRAY__CUDA_RESULTS(XX) DRAY__CUDA_CONSTANTS(XX)
#undef XX
};

typedef struct CUmemLocation {
    int type; /* CU_MEM_LOCATION_TYPE_... */
    int id;   /* the device's ordinal */
} CUmemLocation;

typedef struct CUmemAllocationProp {
    int type; /* CU_MEM_ALLOCATION_TYPE_PINNED */
    int requestedHandleTypes;
    CUmemLocation location;
    void *win32HandleMetaData;
    struct {
        uint8_t compressionType;
        uint8_t gpuDirectRDMACapable;
        uint16_t usage;
        uint8_t reserved[4];
    } allocFlags;
} CUmemAllocationProp;

typedef struct CUmemAccessDesc {
    CUmemLocation location;
    int flags; /* CU_MEM_ACCESS_FLAGS_... */
} CUmemAccessDesc;

typedef struct CUmemcpyAttributes {
    int srcAccessOrder; /* CU_MEMCPY_SRC_ACCESS_ORDER_... */
    CUmemLocation srcLocHint, dstLocHint;
    unsigned int flags;
} CUmemcpyAttributes;

/* The driver's functions: XX(name, symbol, parameters). The name is that of the documentation; the
 * symbol is the version of the function with these parameters. Every supported driver has the
 * functions of the first list; a function of the second is NULL when the driver lacks it. */
#define DRAY__CUDA_FUNCTIONS(XX)                                                                   \
    XX(cuInit, cuInit, (unsigned int flags))                                                       \
    XX(cuDriverGetVersion, cuDriverGetVersion, (int *version))                                     \
    XX(cuGetErrorName, cuGetErrorName, (CUresult result, const char **text))                       \
    XX(cuGetErrorString, cuGetErrorString, (CUresult result, const char **text))                   \
    XX(cuDeviceGetCount, cuDeviceGetCount, (int *count))                                           \
    XX(cuDeviceGet, cuDeviceGet, (CUdevice * device, int ordinal))                                 \
    XX(cuDeviceGetUuid, cuDeviceGetUuid_v2, (CUuuid * uuid, CUdevice device))                      \
    XX(cuDeviceGetName, cuDeviceGetName, (char *name, int size, CUdevice device))                  \
    XX(cuDeviceTotalMem, cuDeviceTotalMem_v2, (size_t * bytes, CUdevice device))                   \
    XX(cuDeviceGetAttribute, cuDeviceGetAttribute, (int *value, int attribute, CUdevice device))   \
    XX(cuDeviceGetPCIBusId, cuDeviceGetPCIBusId, (char *text, int size, CUdevice device))          \
    XX(cuDeviceCanAccessPeer, cuDeviceCanAccessPeer, (int *can, CUdevice device, CUdevice peer))   \
    XX(cuDeviceGetP2PAttribute, cuDeviceGetP2PAttribute,                                           \
       (int *value, int attribute, CUdevice source, CUdevice destination))                         \
    XX(cuDevicePrimaryCtxRetain, cuDevicePrimaryCtxRetain, (CUcontext * context, CUdevice device)) \
    XX(cuDevicePrimaryCtxRelease, cuDevicePrimaryCtxRelease_v2, (CUdevice device))                 \
    XX(cuCtxPushCurrent, cuCtxPushCurrent_v2, (CUcontext context))                                 \
    XX(cuCtxPopCurrent, cuCtxPopCurrent_v2, (CUcontext * context))                                 \
    XX(cuCtxSetCurrent, cuCtxSetCurrent, (CUcontext context))                                      \
    XX(cuCtxGetCurrent, cuCtxGetCurrent, (CUcontext * context))                                    \
    XX(cuCtxGetDevice, cuCtxGetDevice, (CUdevice * device))                                        \
    XX(cuCtxSynchronize, cuCtxSynchronize, (void))                                                 \
    XX(cuCtxEnablePeerAccess, cuCtxEnablePeerAccess, (CUcontext peer, unsigned int flags))         \
    XX(cuMemAlloc, cuMemAlloc_v2, (CUdeviceptr * address, size_t bytes))                           \
    XX(cuMemFree, cuMemFree_v2, (CUdeviceptr address))                                             \
    XX(cuMemGetInfo, cuMemGetInfo_v2, (size_t * free, size_t * total))                             \
    XX(cuMemGetAddressRange, cuMemGetAddressRange_v2,                                              \
       (CUdeviceptr * base, size_t * bytes, CUdeviceptr address))                                  \
    XX(cuMemAddressReserve, cuMemAddressReserve,                                                   \
       (CUdeviceptr * address, size_t bytes, size_t alignment, CUdeviceptr wanted,                 \
        unsigned long long flags))                                                                 \
    XX(cuMemAddressFree, cuMemAddressFree, (CUdeviceptr address, size_t bytes))                    \
    XX(cuMemCreate, cuMemCreate,                                                                   \
       (CUmemGenericAllocationHandle * handle, size_t bytes, const CUmemAllocationProp *prop,      \
        unsigned long long flags))                                                                 \
    XX(cuMemRelease, cuMemRelease, (CUmemGenericAllocationHandle handle))                          \
    XX(cuMemMap, cuMemMap,                                                                         \
       (CUdeviceptr address, size_t bytes, size_t offset, CUmemGenericAllocationHandle handle,     \
        unsigned long long flags))                                                                 \
    XX(cuMemUnmap, cuMemUnmap, (CUdeviceptr address, size_t bytes))                                \
    XX(cuMemSetAccess, cuMemSetAccess,                                                             \
       (CUdeviceptr address, size_t bytes, const CUmemAccessDesc *access, size_t count))           \
    XX(cuMemExportToShareableHandle, cuMemExportToShareableHandle,                                 \
       (void *out, CUmemGenericAllocationHandle handle, int type, unsigned long long flags))       \
    XX(cuMemImportFromShareableHandle, cuMemImportFromShareableHandle,                             \
       (CUmemGenericAllocationHandle * handle, void *given, int type))                             \
    XX(cuMemGetAllocationGranularity, cuMemGetAllocationGranularity,                               \
       (size_t * bytes, const CUmemAllocationProp *prop, int option))                              \
    XX(cuMemRetainAllocationHandle, cuMemRetainAllocationHandle,                                   \
       (CUmemGenericAllocationHandle * handle, void *address))                                     \
    XX(cuIpcGetMemHandle, cuIpcGetMemHandle, (CUipcMemHandle * handle, CUdeviceptr address))       \
    XX(cuIpcOpenMemHandle, cuIpcOpenMemHandle_v2,                                                  \
       (CUdeviceptr * address, CUipcMemHandle handle, unsigned int flags))                         \
    XX(cuIpcCloseMemHandle, cuIpcCloseMemHandle, (CUdeviceptr address))                            \
    XX(cuIpcGetEventHandle, cuIpcGetEventHandle, (CUipcEventHandle * handle, CUevent event))       \
    XX(cuIpcOpenEventHandle, cuIpcOpenEventHandle, (CUevent * event, CUipcEventHandle handle))     \
    XX(cuEventCreate, cuEventCreate, (CUevent * event, unsigned int flags))                        \
    XX(cuEventRecord, cuEventRecord, (CUevent event, CUstream stream))                             \
    XX(cuEventQuery, cuEventQuery, (CUevent event))                                                \
    XX(cuEventDestroy, cuEventDestroy_v2, (CUevent event))                                         \
    XX(cuEventElapsedTime, cuEventElapsedTime, (float *milliseconds, CUevent from, CUevent to))    \
    XX(cuStreamCreate, cuStreamCreate, (CUstream * stream, unsigned int flags))                    \
    XX(cuStreamDestroy, cuStreamDestroy_v2, (CUstream stream))                                     \
    XX(cuStreamSynchronize, cuStreamSynchronize, (CUstream stream))                                \
    XX(cuStreamQuery, cuStreamQuery, (CUstream stream))                                            \
    XX(cuStreamWaitEvent, cuStreamWaitEvent, (CUstream stream, CUevent event, unsigned int flags)) \
    XX(cuLaunchHostFunc, cuLaunchHostFunc, (CUstream stream, CUhostFn function, void *user))       \
    XX(cuMemcpyHtoD, cuMemcpyHtoD_v2, (CUdeviceptr to, const void *from, size_t bytes))            \
    XX(cuMemcpyDtoH, cuMemcpyDtoH_v2, (void *to, CUdeviceptr from, size_t bytes))                  \
    XX(cuMemcpyDtoD, cuMemcpyDtoD_v2, (CUdeviceptr to, CUdeviceptr from, size_t bytes))            \
    XX(cuMemcpyHtoDAsync, cuMemcpyHtoDAsync_v2,                                                    \
       (CUdeviceptr to, const void *from, size_t bytes, CUstream stream))                          \
    XX(cuMemcpyDtoHAsync, cuMemcpyDtoHAsync_v2,                                                    \
       (void *to, CUdeviceptr from, size_t bytes, CUstream stream))                                \
    XX(cuMemcpyDtoDAsync, cuMemcpyDtoDAsync_v2,                                                    \
       (CUdeviceptr to, CUdeviceptr from, size_t bytes, CUstream stream))                          \
    XX(cuMemcpyAsync, cuMemcpyAsync,                                                               \
       (CUdeviceptr to, CUdeviceptr from, size_t bytes, CUstream stream))                          \
    XX(cuMemsetD8, cuMemsetD8_v2, (CUdeviceptr to, unsigned char value, size_t count))             \
    XX(cuMemsetD8Async, cuMemsetD8Async,                                                           \
       (CUdeviceptr to, unsigned char value, size_t count, CUstream stream))                       \
    XX(cuMemsetD32Async, cuMemsetD32Async,                                                         \
       (CUdeviceptr to, unsigned int value, size_t count, CUstream stream))                        \
    XX(cuMemHostRegister, cuMemHostRegister_v2, (void *memory, size_t bytes, unsigned int flags))  \
    XX(cuMemHostUnregister, cuMemHostUnregister, (void *memory))                                   \
    XX(cuMemHostGetDevicePointer, cuMemHostGetDevicePointer_v2,                                    \
       (CUdeviceptr * address, void *memory, unsigned int flags))                                  \
    XX(cuPointerGetAttribute, cuPointerGetAttribute,                                               \
       (void *value, int attribute, CUdeviceptr address))                                          \
    XX(cuModuleLoadData, cuModuleLoadData, (CUmodule * module, const void *image))                 \
    XX(cuModuleUnload, cuModuleUnload, (CUmodule module))                                          \
    XX(cuModuleGetFunction, cuModuleGetFunction,                                                   \
       (CUfunction * function, CUmodule module, const char *name))                                 \
    XX(cuFuncSetAttribute, cuFuncSetAttribute, (CUfunction function, int attribute, int value))    \
    XX(cuLaunchKernel, cuLaunchKernel,                                                             \
       (CUfunction function, unsigned int grid_x, unsigned int grid_y, unsigned int grid_z,        \
        unsigned int block_x, unsigned int block_y, unsigned int block_z,                          \
        unsigned int shared_bytes, CUstream stream, void **parameters, void **extra))              \
    XX(cuOccupancyMaxActiveBlocksPerMultiprocessor, cuOccupancyMaxActiveBlocksPerMultiprocessor,   \
       (int *blocks, CUfunction function, int block_size, size_t shared_bytes))

/* Batched copies came with CUDA 12.8 and lost a parameter in 13.0. Callbacks are to go one day. */
#define DRAY__CUDA_OPTIONAL(XX)                                                                    \
    XX(cuStreamCreateWithPriority, cuStreamCreateWithPriority,                                     \
       (CUstream * stream, unsigned int flags, int priority))                                      \
    XX(cuCtxGetStreamPriorityRange, cuCtxGetStreamPriorityRange, (int *least, int *greatest))      \
    XX(cuStreamAddCallback, cuStreamAddCallback,                                                   \
       (CUstream stream, CUstreamCallback function, void *user, unsigned int flags))               \
    XX(cuMemcpyBatchAsync, cuMemcpyBatchAsync_v2,                                                  \
       (CUdeviceptr * to, CUdeviceptr * from, size_t * bytes, size_t count,                        \
        CUmemcpyAttributes * attributes, size_t * attribute_from, size_t attribute_count,          \
        CUstream stream))                                                                          \
    XX(cuMemcpyBatchAsync_v1, cuMemcpyBatchAsync,                                                  \
       (CUdeviceptr * to, CUdeviceptr * from, size_t * bytes, size_t count,                        \
        CUmemcpyAttributes * attributes, size_t * attribute_from, size_t attribute_count,          \
        size_t * failed, CUstream stream))                                                         \
    XX(cuStreamWaitValue32, cuStreamWaitValue32_v2,                                                \
       (CUstream stream, CUdeviceptr address, unsigned int value, unsigned int flags))
