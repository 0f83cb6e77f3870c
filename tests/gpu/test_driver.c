/* Tests the rules of the driver that the library relies on, with the fake driver and, with
 * DRAY_TEST_CUDA=real, with the real one. Where they differ, the fake is wrong. Every test is a
 * process, or two, because a process that called the driver must not fork. */
#include "gpu/gpu.h"
#include "gpu/pair.h"

#include "memory/cuda_library.h"

#include <sys/mman.h>

enum { MIB = 1 << 20, BYTES = 3 * MIB + 4 };

static const dray__cuda *cu;
static dray__cuda_device *gpu;

#define GIVES(code, call)                                                                          \
    do {                                                                                           \
        CUresult got = (call);                                                                     \
        if (got != (code)) {                                                                       \
            fprintf(stderr, "%s:%d: %s: %d, expected %d\n", __FILE__, __LINE__, #call, got, code); \
            _exit(1);                                                                              \
        }                                                                                          \
    } while (0)
#define OK(call) GIVES(CUDA_SUCCESS, call)

static void enter(int index)
{
    dray_error e = {0};
    cu = dray__cuda_get(&e);
    if (!cu || dray__cuda_device_at(index, &gpu, &e) || dray__cuda_enter(gpu, &e)) {
        fprintf(stderr, "%s\n", e.message);
        _exit(1);
    }
}

/* ---- bytes ----------------------------------------------------------------------------------- */

static uint8_t pattern[BYTES], found[BYTES];

static void draw(uint64_t seed)
{
    for (size_t i = 0; i < BYTES; i++) {
        seed = seed * 6364136223846793005u + 1442695040888963407u;
        pattern[i] = (uint8_t)(seed >> 56);
    }
}

static void expect(CUdeviceptr at)
{
    memset(found, 0, BYTES);
    OK(cu->cuMemcpyDtoH(found, at, BYTES));
    CHECK(memcmp(found, pattern, BYTES) == 0);
}

/* ---- one process ----------------------------------------------------------------------------- */

static void contexts(void)
{
    CUcontext context;
    CUdeviceptr at;
    enter(0);
    dray__cuda_leave();
    GIVES(CUDA_ERROR_INVALID_CONTEXT, cu->cuMemAlloc(&at, 4096));
    OK(cu->cuDevicePrimaryCtxRetain(&context, gpu->ordinal));
    OK(cu->cuCtxPushCurrent(context));
    OK(cu->cuMemAlloc(&at, 4096));
    CUcontext popped = NULL;
    OK(cu->cuCtxPopCurrent(&popped));
    CHECK(popped == context);
    GIVES(CUDA_ERROR_INVALID_CONTEXT, cu->cuCtxSynchronize());
    OK(cu->cuDevicePrimaryCtxRelease(gpu->ordinal));
    fflush(NULL);
    pid_t child = fork(); /* its driver is not to be used */
    if (child == 0)
        _exit(cu->cuInit(0) == CUDA_SUCCESS && cu->cuCtxPushCurrent(context) == CUDA_SUCCESS);
    int status;
    CHECK(waitpid(child, &status, 0) == child && status == 0);
}

TEST(test_contexts)
{
    alone(contexts);
}

static void addresses(void)
{
    CUdeviceptr at, base;
    size_t bytes;
    unsigned type = 0;
    int ordinal = -1, legacy = -1;
    unsigned long long first = 0, second = 0;
    enter(0);
    OK(cu->cuMemAlloc(&at, BYTES));
    OK(cu->cuMemGetAddressRange(&base, &bytes, at + 1000));
    CHECK(base == at && bytes >= BYTES);
    OK(cu->cuPointerGetAttribute(&type, CU_POINTER_ATTRIBUTE_MEMORY_TYPE, at + 5));
    OK(cu->cuPointerGetAttribute(&ordinal, CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL, at + 5));
    OK(cu->cuPointerGetAttribute(&first, CU_POINTER_ATTRIBUTE_BUFFER_ID, at + 5));
    CHECK(type == CU_MEMORYTYPE_DEVICE && ordinal == gpu->ordinal);
    (void)legacy;
    OK(cu->cuMemFree(at));
    GIVES(CUDA_ERROR_INVALID_VALUE,
          cu->cuPointerGetAttribute(&type, CU_POINTER_ATTRIBUTE_MEMORY_TYPE, at));
    GIVES(CUDA_ERROR_INVALID_VALUE, cu->cuMemFree(at));
    OK(cu->cuMemAlloc(&at, BYTES)); /* perhaps where the other was */
    OK(cu->cuPointerGetAttribute(&second, CU_POINTER_ATTRIBUTE_BUFFER_ID, at));
    CHECK(first != second);
}

TEST(test_addresses)
{
    alone(addresses);
}

static volatile int slept;

static void sleep_a_while(void *user)
{
    usleep(30000);
    slept = 1;
    if (user)
        *(CUresult *)user = cu->cuMemAlloc(&(CUdeviceptr){0}, 4096);
}

static void streams(void)
{
    CUdeviceptr a, b;
    CUstream one, two;
    CUevent ready, never;
    CUresult inside = CUDA_SUCCESS;
    enter(0);
    draw(1);
    OK(cu->cuMemAlloc(&a, BYTES));
    OK(cu->cuMemAlloc(&b, BYTES));
    OK(cu->cuStreamCreate(&one, CU_STREAM_NON_BLOCKING));
    OK(cu->cuStreamCreate(&two, CU_STREAM_NON_BLOCKING));
    OK(cu->cuEventCreate(&ready, CU_EVENT_DISABLE_TIMING));
    OK(cu->cuEventCreate(&never, CU_EVENT_DISABLE_TIMING));
    OK(cu->cuEventQuery(never));
    OK(cu->cuLaunchHostFunc(one, sleep_a_while, &inside));
    GIVES(CUDA_ERROR_NOT_READY, cu->cuStreamQuery(one));
    OK(cu->cuMemcpyHtoDAsync(a, pattern, BYTES, one));
    OK(cu->cuEventRecord(ready, one));
    OK(cu->cuStreamWaitEvent(two, ready, 0));
    OK(cu->cuStreamWaitEvent(two, never, 0));
    OK(cu->cuMemcpyAsync(b, a, BYTES, two));
    OK(cu->cuStreamSynchronize(two));
    CHECK(slept && inside == CUDA_ERROR_NOT_PERMITTED);
    OK(cu->cuEventQuery(ready));
    expect(b);
    /* the default stream waits for blocking ones, and they for it */
    CUstream blocking;
    OK(cu->cuStreamCreate(&blocking, CU_STREAM_DEFAULT));
    slept = 0;
    OK(cu->cuLaunchHostFunc(blocking, sleep_a_while, NULL));
    OK(cu->cuMemsetD8(a, 7, BYTES));
    OK(cu->cuStreamSynchronize(NULL));
    CHECK(slept);
    OK(cu->cuStreamDestroy(one));
    OK(cu->cuStreamDestroy(two));
    OK(cu->cuStreamDestroy(blocking));
    OK(cu->cuEventDestroy(ready));
    OK(cu->cuEventDestroy(never));
    GIVES(CUDA_ERROR_INVALID_VALUE, cu->cuEventCreate(&ready, CU_EVENT_INTERPROCESS));
}

TEST(test_streams)
{
    alone(streams);
}

static void batches(void)
{
    CUdeviceptr a;
    CUstream stream;
    enter(0);
    draw(2);
    OK(cu->cuMemAlloc(&a, BYTES));
    OK(cu->cuStreamCreate(&stream, CU_STREAM_NON_BLOCKING));
    if (cu->cuMemcpyBatchAsync) {
        CUdeviceptr to[] = {a, a + 2 * MIB}, from[] = {a + MIB, a};
        size_t bytes[] = {1000, 500}, first = 0;
        CUmemcpyAttributes attributes = {.srcAccessOrder = CU_MEMCPY_SRC_ACCESS_ORDER_STREAM};
        OK(cu->cuMemcpyHtoD(a, pattern, BYTES));
        OK(cu->cuCtxSynchronize());
        from[1] = a + MIB + 2000;
        OK(cu->cuMemcpyBatchAsync(to, from, bytes, 2, &attributes, &first, 1, stream));
        OK(cu->cuStreamSynchronize(stream));
        OK(cu->cuMemcpyDtoH(found, a, BYTES));
        CHECK(memcmp(found, pattern + MIB, 1000) == 0);
        CHECK(memcmp(found + 2 * MIB, pattern + MIB + 2000, 500) == 0);
        CHECK(cu->cuMemcpyBatchAsync(to, from, bytes, 2, &attributes, &first, 1, NULL) !=
              CUDA_SUCCESS);
    }
}

TEST(test_batches)
{
    alone(batches);
}

static void registered(void)
{
    CUdeviceptr a, device;
    enter(0);
    draw(3);
    size_t bytes = 4 * (size_t)MIB;
    uint8_t *host = mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    CHECK(host != MAP_FAILED);
    memcpy(host, pattern, BYTES);
    GIVES(CUDA_ERROR_HOST_MEMORY_NOT_REGISTERED, cu->cuMemHostUnregister(host));
    OK(cu->cuMemHostRegister(host, bytes, CU_MEMHOSTREGISTER_PORTABLE));
    GIVES(CUDA_ERROR_HOST_MEMORY_ALREADY_REGISTERED,
          cu->cuMemHostRegister(host, bytes, CU_MEMHOSTREGISTER_PORTABLE));
    OK(cu->cuMemHostGetDevicePointer(&device, host, 0));
    unsigned type = 0;
    OK(cu->cuPointerGetAttribute(&type, CU_POINTER_ATTRIBUTE_MEMORY_TYPE, device));
    CHECK(type == CU_MEMORYTYPE_HOST);
    OK(cu->cuMemAlloc(&a, BYTES));
    OK(cu->cuMemcpyDtoD(a, device, BYTES));
    expect(a);
    OK(cu->cuMemHostUnregister(host));
    CHECK(cu->cuMemHostGetDevicePointer(&device, host, 0) != CUDA_SUCCESS);
}

TEST(test_registered_host_memory)
{
    alone(registered);
}

/* ---- virtual memory -------------------------------------------------------------------------- */

static size_t arena_bytes;

static CUmemAllocationProp arena_prop(void)
{
    return (CUmemAllocationProp){.type = CU_MEM_ALLOCATION_TYPE_PINNED,
                                 .requestedHandleTypes = CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR,
                                 .location = {CU_MEM_LOCATION_TYPE_DEVICE, gpu->ordinal}};
}

static void map_arena(CUdeviceptr *at, CUmemGenericAllocationHandle handle, int flags)
{
    const CUmemAccessDesc access = {{CU_MEM_LOCATION_TYPE_DEVICE, gpu->ordinal}, flags};
    OK(cu->cuMemAddressReserve(at, arena_bytes, 0, 0, 0));
    OK(cu->cuMemMap(*at, arena_bytes, 0, handle, 0));
    OK(cu->cuMemSetAccess(*at, arena_bytes, &access, 1));
}

static void size_arena(void)
{
    const CUmemAllocationProp prop = arena_prop();
    size_t granule;
    OK(cu->cuMemGetAllocationGranularity(&granule, &prop, CU_MEM_ALLOC_GRANULARITY_MINIMUM));
    arena_bytes = (BYTES + granule - 1) / granule * granule;
}

static void virtual_memory(void)
{
    CUdeviceptr at;
    CUmemGenericAllocationHandle handle, again;
    enter(0);
    draw(4);
    size_arena();
    const CUmemAllocationProp prop = arena_prop();
    const CUmemAccessDesc access = {{CU_MEM_LOCATION_TYPE_DEVICE, gpu->ordinal},
                                    CU_MEM_ACCESS_FLAGS_PROT_READWRITE};
    CHECK(cu->cuMemCreate(&handle, arena_bytes + 1, &prop, 0) == CUDA_ERROR_INVALID_VALUE);
    OK(cu->cuMemCreate(&handle, arena_bytes, &prop, 0));
    OK(cu->cuMemAddressReserve(&at, arena_bytes, 0, 0, 0));
    CHECK(cu->cuMemcpyHtoD(at, pattern, BYTES) != CUDA_SUCCESS); /* nothing is mapped */
    CHECK(cu->cuMemSetAccess(at, arena_bytes, &access, 1) != CUDA_SUCCESS);
    OK(cu->cuMemMap(at, arena_bytes, 0, handle, 0));
    CHECK(cu->cuMemMap(at, arena_bytes, 0, handle, 0) != CUDA_SUCCESS);
    OK(cu->cuMemSetAccess(at, arena_bytes, &access, 1));
    OK(cu->cuMemcpyHtoD(at, pattern, BYTES));
    expect(at);
    OK(cu->cuMemRetainAllocationHandle(&again, (void *)(uintptr_t)at));
    OK(cu->cuMemRelease(again));
    OK(cu->cuMemRelease(handle)); /* the mapping keeps it */
    expect(at);
    uint64_t types = 0;
    OK(cu->cuPointerGetAttribute(&types, CU_POINTER_ATTRIBUTE_ALLOWED_HANDLE_TYPES, at));
    CHECK(types & CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR);
    CUipcMemHandle legacy;
    CHECK(cu->cuIpcGetMemHandle(&legacy, at) != CUDA_SUCCESS);
    OK(cu->cuMemUnmap(at, arena_bytes));
    CHECK(cu->cuMemcpyDtoH(found, at, BYTES) != CUDA_SUCCESS);
    OK(cu->cuMemAddressFree(at, arena_bytes));
}

TEST(test_virtual_memory)
{
    alone(virtual_memory);
}

static void exports_arena(void)
{
    CUdeviceptr at;
    CUmemGenericAllocationHandle handle;
    int fd = -1;
    enter(0);
    draw(5);
    size_arena();
    const CUmemAllocationProp prop = arena_prop();
    OK(cu->cuMemCreate(&handle, arena_bytes, &prop, 0));
    map_arena(&at, handle, CU_MEM_ACCESS_FLAGS_PROT_READWRITE);
    OK(cu->cuMemcpyHtoD(at, pattern, BYTES));
    OK(cu->cuCtxSynchronize());
    OK(cu->cuMemExportToShareableHandle(&fd, handle, CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR, 0));
    pid_t self = getpid();
    tell(&self, sizeof self, fd);
    pause();
}

/* What was imported stays after its owner's death. */
static void imports_arena(void)
{
    CUdeviceptr at;
    CUmemGenericAllocationHandle handle;
    pid_t owner;
    int fd = hear(&owner, sizeof owner);
    enter(0);
    draw(5);
    size_arena();
    OK(cu->cuMemImportFromShareableHandle(&handle, (void *)(intptr_t)fd,
                                          CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR));
    close(fd);
    map_arena(&at, handle, CU_MEM_ACCESS_FLAGS_PROT_READWRITE);
    expect(at);
    kill(owner, SIGKILL);
    usleep(200000);
    expect(at);
    OK(cu->cuMemUnmap(at, arena_bytes));
    OK(cu->cuMemRelease(handle));
}

TEST(test_arenas_outlive_their_owner)
{
    together(exports_arena, imports_arena);
}

/* ---- legacy handles -------------------------------------------------------------------------- */

typedef struct offer {
    CUipcMemHandle memory;
    CUipcEventHandle event;
    uint8_t uuid[DRAY__CUDA_UUID];
} offer;

static void exports_legacy(void)
{
    CUdeviceptr at, opened;
    CUevent event;
    CUstream stream;
    offer o;
    char byte;
    enter(0);
    draw(6);
    OK(cu->cuMemAlloc(&at, BYTES));
    OK(cu->cuMemsetD8(at, 1, BYTES));
    OK(cu->cuCtxSynchronize()); /* the stream below waits for nobody */
    OK(cu->cuIpcGetMemHandle(&o.memory, at));
    CHECK(cu->cuIpcOpenMemHandle(&opened, o.memory, CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS) ==
          CUDA_ERROR_INVALID_CONTEXT);
    OK(cu->cuEventCreate(&event, CU_EVENT_INTERPROCESS | CU_EVENT_DISABLE_TIMING));
    OK(cu->cuIpcGetEventHandle(&o.event, event));
    memcpy(o.uuid, gpu->uuid, sizeof o.uuid);
    OK(cu->cuStreamCreate(&stream, CU_STREAM_NON_BLOCKING));
    tell(&o, sizeof o, -1);
    hear(&byte, 1); /* the event never was recorded until now */
    OK(cu->cuLaunchHostFunc(stream, sleep_a_while, NULL));
    OK(cu->cuMemcpyHtoDAsync(at, pattern, BYTES, stream));
    OK(cu->cuEventRecord(event, stream));
    tell(&byte, 1, -1);
    hear(&byte, 1);
    OK(cu->cuStreamSynchronize(stream));
    tell(&byte, 1, -1);
    pause();
}

static void imports_legacy(void)
{
    CUdeviceptr at, again;
    CUevent event;
    CUstream stream;
    offer o;
    char byte = 0;
    hear(&o, sizeof o);
    enter(0);
    draw(6);
    CHECK(memcmp(o.uuid, gpu->uuid, sizeof o.uuid) == 0);
    OK(cu->cuIpcOpenMemHandle(&at, o.memory, CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS));
    OK(cu->cuIpcOpenMemHandle(&again, o.memory, CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS));
    CHECK(at == again);
    OK(cu->cuIpcOpenEventHandle(&event, o.event));
    OK(cu->cuStreamCreate(&stream, CU_STREAM_NON_BLOCKING));
    OK(cu->cuStreamWaitEvent(stream, event, 0));
    OK(cu->cuStreamSynchronize(stream)); /* an event that never was recorded holds nobody up */
    tell(&byte, 1, -1);
    hear(&byte, 1);
    OK(cu->cuStreamWaitEvent(stream, event, 0)); /* this one was */
    OK(cu->cuMemcpyDtoHAsync(found, at, BYTES, stream));
    OK(cu->cuStreamSynchronize(stream));
    CHECK(memcmp(found, pattern, BYTES) == 0);
    OK(cu->cuIpcCloseMemHandle(again));
    expect(at);
    OK(cu->cuIpcCloseMemHandle(at));
    CHECK(cu->cuIpcCloseMemHandle(at) != CUDA_SUCCESS);
    OK(cu->cuEventDestroy(event));
    tell(&byte, 1, -1);
    hear(&byte, 1);
}

TEST(test_legacy_handles_and_events)
{
    together(exports_legacy, imports_legacy);
}

/* ---- several GPUs ---------------------------------------------------------------------------- */

static uint8_t (*uuids)[DRAY__CUDA_UUID];

static void write_uuids(void)
{
    enter(0);
    for (int i = 0; i < 2; i++) {
        dray__cuda_device *device;
        CHECK(dray__cuda_device_at(i, &device, NULL) == DRAY_OK);
        memcpy(uuids[i], device->uuid, DRAY__CUDA_UUID);
    }
}

static void sees_the_second(void)
{
    enter(0);
    CHECK(dray__cuda_device_count() == 1);
    CHECK(memcmp(gpu->uuid, uuids[1], DRAY__CUDA_UUID) == 0);
}

static void sees_them_turned(void)
{
    enter(0);
    CHECK(dray__cuda_device_count() == 2);
    CHECK(memcmp(gpu->uuid, uuids[1], DRAY__CUDA_UUID) == 0);
    draw(7);
    dray__cuda_device *other;
    CUdeviceptr a, b;
    OK(cu->cuMemAlloc(&a, BYTES));
    OK(cu->cuMemcpyHtoD(a, pattern, BYTES));
    OK(cu->cuCtxSynchronize()); /* the other GPU's context does not wait for this one's */
    CHECK(dray__cuda_device_at(1, &other, NULL) == DRAY_OK);
    CHECK(dray__cuda_enter(other, NULL) == DRAY_OK);
    OK(cu->cuMemAlloc(&b, BYTES));
    OK(cu->cuMemcpyDtoD(b, a, BYTES));
    expect(b);
    CUstream stream;
    OK(cu->cuStreamCreate(&stream, CU_STREAM_NON_BLOCKING));
    dray__cuda_leave();
    CUevent event; /* belongs to the first GPU's context, the stream does not */
    OK(cu->cuEventCreate(&event, CU_EVENT_DISABLE_TIMING));
    CHECK(cu->cuEventRecord(event, stream) != CUDA_SUCCESS);
}

TEST(test_visible_devices)
{
    char text[41];
    if (gpu_is_real() && gpu_real_count() < 2)
        skip();
    uuids = mmap(NULL, 4096, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    alone(write_uuids);
    assert_memory_not_equal(uuids[0], uuids[1], DRAY__CUDA_UUID);
    setenv("CUDA_VISIBLE_DEVICES", "1", 1);
    alone(sees_the_second);
    setenv("CUDA_VISIBLE_DEVICES", dray__cuda_uuid_text(uuids[1], text), 1);
    alone(sees_the_second);
    setenv("CUDA_VISIBLE_DEVICES", "1,77,0", 1);
    alone(sees_the_second);
    setenv("CUDA_VISIBLE_DEVICES", "1,0", 1);
    alone(sees_them_turned);
    unsetenv("CUDA_VISIBLE_DEVICES");
    munmap(uuids, 4096);
}

/* ---- what only the fake does ----------------------------------------------------------------- */

static void exhausts(void)
{
    CUdeviceptr a, b;
    size_t left, total;
    setenv("FAKE_CUDA_BYTES", "8388608", 1);
    enter(0);
    OK(cu->cuMemAlloc(&a, 6 * MIB));
    GIVES(CUDA_ERROR_OUT_OF_MEMORY, cu->cuMemAlloc(&b, 4 * MIB));
    OK(cu->cuMemGetInfo(&left, &total));
    CHECK(left == 2 * MIB && total == 8 * MIB);
    OK(cu->cuMemFree(a));
    OK(cu->cuMemAlloc(&b, 4 * MIB));
}

static void fails_when_told(void)
{
    CUdeviceptr a;
    enter(0);
    gpu_fail("cuMemAlloc:2:700,cuMemFree:1+:1");
    OK(cu->cuMemAlloc(&a, 4096));
    GIVES(CUDA_ERROR_ILLEGAL_ADDRESS, cu->cuMemAlloc(&a, 4096));
    OK(cu->cuMemAlloc(&a, 4096));
    GIVES(CUDA_ERROR_INVALID_VALUE, cu->cuMemFree(a));
    GIVES(CUDA_ERROR_INVALID_VALUE, cu->cuMemFree(a));
    gpu_fail(NULL);
    OK(cu->cuMemFree(a));
}

static void breaks(void)
{
    CUdeviceptr a;
    CUmemGenericAllocationHandle handle;
    CUstream stream;
    enter(0);
    size_arena();
    const CUmemAllocationProp prop = arena_prop();
    OK(cu->cuMemCreate(&handle, arena_bytes, &prop, 0));
    map_arena(&a, handle, CU_MEM_ACCESS_FLAGS_PROT_READ);
    CHECK(cu->cuMemcpyHtoD(a, pattern, BYTES) != CUDA_SUCCESS); /* may be read alone */
    OK(cu->cuStreamCreate(&stream, CU_STREAM_NON_BLOCKING));
    OK(cu->cuLaunchHostFunc(stream, sleep_a_while, NULL));
    OK(cu->cuMemcpyDtoHAsync(found, a, BYTES, stream));
    OK(cu->cuMemUnmap(a, arena_bytes)); /* too early */
    GIVES(CUDA_ERROR_ILLEGAL_ADDRESS, cu->cuStreamSynchronize(stream));
    GIVES(CUDA_ERROR_ILLEGAL_ADDRESS, cu->cuMemAlloc(&a, 4096)); /* nothing works any more */
}

TEST(test_failures)
{
    if (gpu_is_real())
        skip();
    alone(exhausts);
    alone(fails_when_told);
    alone(breaks);
}

int main(void)
{
    gpu_begin(gpu_is_real() ? 1 : 2);
    return suite_run(NULL, NULL);
}
