/* Tests GPU memory between processes through the public functions, with the fake driver or, with
 * DRAY_TEST_CUDA=real, on GPUs: regions of both forms, exports and refusals, identity by UUID,
 * pinned memory, events. */
#include "memory/cuda_event.h"
#include "memory/gpu_memory.h"
#include "memory/region.h"

#include <fcntl.h>
#include <poll.h>
#include <sys/mman.h>
#include <sys/syscall.h>

enum { OUTER = 8 * MIB, SHIFT = MIB + 256, INNER = 3 * MIB };

/* ---- own memory, by descriptor --------------------------------------------------------------- */

static void owner_of_region(void)
{
    start(NULL);
    dray_region *r;
    OK(dray_region_alloc(DRAY_REGION_CUDA, BYTES, "weights", &r, &error));
    CHECK(!dray_region_base(r) && dray_region_bytes(r) == BYTES);
    CHECK(dray_region_get_kind(r) == DRAY_REGION_CUDA && dray_region_fd(r) == -1);
    uint64_t at = dray_region_device_address(r);
    memset(pattern, 0, sizeof pattern);
    CHECK(has(at, pattern, BYTES));
    draw(1);
    put(at, pattern, BYTES);
    hand(r);
    CHECK(dray_region_fd(r) >= 0);
    signed_();
    pattern[3] ^= 0xFF; /* what the other one wrote */
    CHECK(has(at, pattern, BYTES));
    dray_region_unexport(r);
    CHECK(dray_region_fd(r) == -1);
    dray_region_free(r);
    sign();
}

static void importer_of_region(void)
{
    start(NULL);
    draw(1);
    int fd;
    dray_handle h = handed(&fd);
    CHECK(h.form == DRAY_CUDA_FORM_VMM && fd >= 0 && h.base_offset == 0);
    dray_region *one, *two, *three;
    GIVES(DRAY_EINVALID, dray_region_import(&h, -1, 0, &one, &error));
    SAYS("descriptor");
    OK(dray_region_import(&h, fd, 0, &one, &error));
    OK(dray_region_import(&h, fd, 0, &two, &error));
    uint64_t at = dray_region_device_address(one);
    CHECK(at && at == dray_region_device_address(two)); /* opened once */
    CHECK(has(at, pattern, BYTES));
    CHECK(cu->cuMemsetD8(at, 1, 4)); /* it was asked for reading */
    OK(dray_region_import(&h, fd, 1, &three, &error));
    CHECK(dray_region_device_address(three) == at);
    close(fd);
    pattern[3] ^= 0xFF;
    put(at + 3, &pattern[3], 1);
    dray_handle again = DRAY_HANDLE_INIT;
    GIVES(DRAY_EUNSUPPORTED, dray_handle_describe(one, &again, &error));
    dray_region_free(one);
    dray_region_free(three);
    sign();
    signed_(); /* the owner has freed it */
    CHECK(has(at, pattern, BYTES));
    OK(dray_region_check(two, &error));
    dray_region_free(two);
    CHECK(cu->cuMemcpyDtoH(found, at, 4)); /* and closed with the last */
}

TEST(regions_reach_other_processes)
{
    together(owner_of_region, importer_of_region);
}

/* ---- somebody else's memory, by IPC handle --------------------------------------------------- */

static void owner_of_foreign(void)
{
    start(NULL);
    CUdeviceptr outer;
    CHECK(cu->cuMemAlloc(&outer, OUTER) == 0);
    draw(2);
    put(outer + SHIFT, pattern, INNER);
    dray_region *r, *s;
    GIVES(DRAY_EINVALID, dray_region_wrap_cuda(outer + SHIFT, OUTER, "p", &r, &error));
    SAYS("beyond");
    OK(dray_region_wrap_cuda(outer + SHIFT, INNER, "p", &r, &error));
    OK(dray_region_wrap_cuda(outer + SHIFT + INNER, MIB, "q", &s, &error));
    hand(r);
    hand(s);
    CHECK(dray_region_fd(r) == -1);
    signed_();
    OK(dray_region_check(r, &error));
    CHECK(cu->cuMemFree(outer) == 0);
    GIVES(DRAY_ESTALE, dray_region_check(r, &error));
    dray_handle h = DRAY_HANDLE_INIT;
    GIVES(DRAY_ESTALE, dray_handle_describe(r, &h, &error));
    CUdeviceptr other; /* at the same address, often */
    CHECK(cu->cuMemAlloc(&other, OUTER) == 0);
    GIVES(DRAY_ESTALE, dray_region_check(r, &error));
    dray_region_free(r);
    dray_region_free(s);
    CHECK(cu->cuMemFree(other) == 0);
    sign();
}

static void importer_of_foreign(void)
{
    start(NULL);
    draw(2);
    int fd;
    dray_handle h = handed(&fd), k = handed(&fd), m;
    CHECK(h.form == DRAY_CUDA_FORM_IPC && fd == -1 && h.base_offset == SHIFT);
    CHECK(h.base_bytes >= OUTER && h.allocation == k.allocation);
    dray_region *r, *s, *again = NULL;
    OK(dray_region_import(&h, -1, 0, &r, &error));
    OK(dray_region_import(&k, -1, 0, &s, &error));
    uint64_t at = dray_region_device_address(r);
    CHECK(dray_region_device_address(s) == at + INNER);
    CHECK(has(at, pattern, INNER));
    /* What it imported, a process cannot export: the driver says so, and we what to do. */
    OK(dray_region_wrap_cuda(at, INNER, "mine?", &again, &error));
    m = (dray_handle)DRAY_HANDLE_INIT;
    GIVES(DRAY_EUNSUPPORTED, dray_handle_describe(again, &m, &error));
    SAYS("staging");
    dray_region_free(again);
    dray_region_free(r);
    CHECK(has(at, pattern, INNER)); /* the other region keeps it open */
    dray_region_free(s);
    CHECK(cu->cuMemcpyDtoH(found, at, 4));
    sign();
    signed_(); /* freed by its owner */
    GIVES(DRAY_ESYS, dray_region_import(&h, -1, 0, &again, &error));
    SAYS("IPC handle");
}

TEST(foreign_memory_by_its_base)
{
    together(owner_of_foreign, importer_of_foreign);
}

/* ---- what a process exported itself ---------------------------------------------------------- */

static void own_exports(void)
{
    start(NULL);
    CUdeviceptr outer;
    CHECK(cu->cuMemAlloc(&outer, OUTER) == 0);
    dray_region *r[2], *in;
    OK(dray_region_alloc(DRAY_REGION_CUDA, BYTES, "own", &r[0], &error));
    OK(dray_region_wrap_cuda(outer + SHIFT, INNER, "own", &r[1], &error));
    for (int i = 0; i < 2; i++) {
        dray_handle h = described(r[i]);
        OK(dray_region_import(&h, dray_region_fd(r[i]), 0, &in, &error));
        CHECK(dray_region_device_address(in) == dray_region_device_address(r[i]));
        dray_region_free(in);
        OK(dray_region_check(r[i], &error));
        draw(3);
        put(dray_region_device_address(r[i]), pattern, 100); /* still there */
        dray_region_free(r[i]);
    }
    CHECK(cu->cuMemFree(outer) == 0);
}

TEST(own_exports_are_used_in_place)
{
    alone(own_exports);
}

/* ---- refusals -------------------------------------------------------------------------------- */

static void refuse(dray_handle h, int fd, const char *field)
{
    uint8_t packed[1024];
    dray_region *r = NULL;
    GIVES(DRAY_EFORMAT, dray_handle_pack(&h, packed, sizeof packed, &error));
    SAYS(field);
    GIVES(DRAY_EFORMAT, dray_region_import(&h, fd, 0, &r, &error));
    CHECK(!r);
}

static void forge(void)
{
    start(NULL);
    dray_region *r, *in = NULL;
    OK(dray_region_alloc(DRAY_REGION_CUDA, BYTES, "w", &r, &error));
    const dray_handle good = described(r);
    dray_handle h = good;
    int fd = fcntl(dray_region_fd(r), F_DUPFD_CLOEXEC, 3);
    h.form = 0, refuse(h, fd, "form");
    h.form = 3, refuse(h, fd, "form");
    h = good, h.base_offset = h.base_bytes, refuse(h, fd, "base_offset");
    h = good, h.base_offset = UINT64_MAX, refuse(h, fd, "base_offset");
    h = good, h.base_bytes = 0, refuse(h, fd, "base_offset");
    h = good, memset(h.device, 0, sizeof h.device), refuse(h, fd, "device");
    h = good, memset(h.key, 0, sizeof h.key), refuse(h, fd, "key");
    h = good, h.path[0] = '/', refuse(h, fd, "path");
    h = good, h.kind = DRAY_REGION_SHARED, refuse(h, fd, "device");
    h = good, h.kind = DRAY_REGION_SHARED, memset(h.device, 0, sizeof h.device);
    refuse(h, fd, "form");
    h.form = 0, refuse(h, fd, "base_bytes");
    uint64_t before = free_bytes();
    h = good, h.key[5] ^= 1; /* nobody's: opened, not taken for our own */
    h.base_bytes *= 2;
    GIVES(DRAY_EINVALID, dray_region_import(&h, fd, 0, &in, &error));
    SAYS("base_bytes");
    int memfd = memfd_create("no GPU memory", MFD_CLOEXEC);
    h.base_bytes = good.base_bytes;
    GIVES(DRAY_EINVALID, dray_region_import(&h, memfd, 0, &in, &error));
    SAYS("descriptor");
    h.form = DRAY_CUDA_FORM_IPC;
    CHECK(dray_region_import(&h, -1, 0, &in, &error) < 0 && !in);
    CHECK(gpu_is_real() || free_bytes() == before);
    GIVES(DRAY_EINVALID, dray_region_wrap_cuda(0, 1, "n", &in, &error));
    GIVES(DRAY_EINVALID, dray_region_wrap_cuda(4096, 1, "n", &in, &error));
    GIVES(DRAY_ENOMEM, dray_region_alloc(DRAY_REGION_CUDA, (uint64_t)1 << 60, "n", &in, &error));
    GIVES(DRAY_ENOMEM, dray_region_alloc(DRAY_REGION_CUDA, UINT64_MAX, "n", &in, &error));
    CHECK(!in);
    close(memfd);
    close(fd);
    dray_region_free(r);
}

TEST(forged_handles_are_refused)
{
    alone(forge);
}

static void fork_after_use(void)
{
    start(NULL);
    pid_t child = fork();
    int status;
    if (child == 0) {
        dray_region *r;
        GIVES(DRAY_EUNSUPPORTED, dray_region_alloc(DRAY_REGION_CUDA, 1, "n", &r, &error));
        SAYS("forked");
        _exit(0);
    }
    CHECK(waitpid(child, &status, 0) == child && status == 0);
}

static void no_driver(void)
{
    dray_region *r = NULL;
    int32_t count = 77;
    setenv("DRAY_CUDA_LIBRARY", "", 1);
    GIVES(DRAY_EUNSUPPORTED, dray_region_alloc(DRAY_REGION_CUDA, 1, "n", &r, &error));
    SAYS("not usable");
    GIVES(DRAY_EUNSUPPORTED, dray_region_alloc(DRAY_REGION_PINNED, 1, "n", &r, &error));
    GIVES(DRAY_EUNSUPPORTED, dray_region_wrap_cuda(1 << 20, 1, "n", &r, &error));
    GIVES(DRAY_EUNSUPPORTED, dray_gpu_count(&count, NULL, &error));
    CHECK(!r && count == 77);
}

static void another_library(void)
{
    int32_t count;
    setenv("DRAY_CUDA_LIBRARY", "libm.so.6", 1);
    GIVES(DRAY_EUNSUPPORTED, dray_gpu_count(&count, NULL, &error));
    SAYS("cuInit");
}

TEST(processes_without_a_driver_are_told)
{
    alone(fork_after_use);
    alone(no_driver);
    alone(another_library);
}

/* ---- other GPUs ------------------------------------------------------------------------------ */

static void owner_on_second(void)
{
    start("1");
    dray_region *r;
    dray_gpu gpu = DRAY_GPU_INIT;
    OK(dray_gpu_get(0, &gpu, &error));
    GIVES(DRAY_ENOENT, dray_gpu_get(1, &gpu, &error));
    OK(dray__region_alloc_cuda(gpu.uuid, BYTES, "w", &r, &error));
    draw(5);
    put(dray_region_device_address(r), pattern, BYTES);
    hand(r);
    signed_();
    dray_region_free(r);
}

static void importer_on_first(void)
{
    start("0");
    int fd;
    dray_region *r;
    uint8_t uuid[16], own[16];
    dray_gpu gpu = DRAY_GPU_INIT;
    dray_handle h = handed(&fd);
    OK(dray_region_import(&h, fd, 0, &r, &error));
    OK(dray_region_device(r, uuid, &error));
    CHECK(memcmp(uuid, h.device, 16) == 0);
    OK(dray_gpu_get(0, &gpu, &error));
    memcpy(own, gpu.uuid, 16);
    CHECK(memcmp(uuid, own, 16) != 0);
    draw(5);
    CHECK(has(dray_region_device_address(r), pattern, BYTES));
    dray_region_free(r);
    close(fd);
    sign();
}

static int gpus(void)
{
    return gpu_is_real() ? gpu_real_count() : 2;
}

TEST(gpus_are_known_by_uuid)
{
    if (gpus() < 2)
        skip();
    together(owner_on_second, importer_on_first);
}

static void list_gpus(void)
{
    start(NULL);
    int32_t count, version, link;
    OK(dray_gpu_count(&count, &version, &error));
    CHECK(count >= 1 && version >= 11040);
    for (int32_t i = 0; i < count; i++) {
        dray_gpu gpu = DRAY_GPU_INIT;
        OK(dray_gpu_get(i, &gpu, &error));
        CHECK(gpu.bytes && *gpu.name && *gpu.pci && strncmp(gpu.uuid_text, "GPU-", 4) == 0);
        OK(dray_gpu_get_link(i, i, &link, &error));
        CHECK(link == DRAY_GPU_LINK_SAME);
    }
    GIVES(DRAY_ENOENT, dray_gpu_get_link(0, count, &link, &error));
    char detail[256];
    OK(dray_gpu_library("cuda", detail, sizeof detail, &error));
    GIVES(DRAY_EINVALID, dray_gpu_library("cublas", detail, sizeof detail, &error));
    double rate = 0;
    OK(dray_gpu_measure(-1, 0, &rate, &error));
    CHECK(rate > 1e6);
}

TEST(gpus_are_listed)
{
    alone(list_gpus);
}

/* ---- pinned memory --------------------------------------------------------------------------- */

static void owner_of_pinned(void)
{
    start(NULL);
    dray_region *r;
    OK(dray_region_alloc(DRAY_REGION_PINNED, BYTES, "p", &r, &error));
    CHECK(dray_region_base(r) && dray_region_device_address(r));
    draw(6);
    memcpy(dray_region_base(r), pattern, BYTES);
    hand(r);
    signed_();
    CHECK(((uint8_t *)dray_region_base(r))[9] == 99);
    dray_region_free(r);
}

static void read_pinned(bool driver)
{
    int fd;
    dray_region *r;
    dray_handle h = handed(&fd);
    CHECK(h.kind == DRAY_REGION_PINNED);
    OK(dray_region_import(&h, fd, 1, &r, &error));
    close(fd);
    draw(6);
    CHECK(memcmp(dray_region_base(r), pattern, BYTES) == 0);
    CHECK(driver == (dray_region_device_address(r) != 0));
    if (driver)
        CHECK(has(dray_region_device_address(r), pattern, BYTES));
    ((uint8_t *)dray_region_base(r))[9] = 99;
    dray_region_free(r);
    sign();
}

static void importer_of_pinned(void)
{
    start(NULL);
    read_pinned(true);
}

static void importer_without_driver(void)
{
    setenv("DRAY_CUDA_LIBRARY", "", 1);
    read_pinned(false);
}

TEST(pinned_memory_is_shared_and_registered)
{
    together(owner_of_pinned, importer_of_pinned);
    together(owner_of_pinned, importer_without_driver);
}

/* ---- events ---------------------------------------------------------------------------------- */

static void owner_of_event(void)
{
    start(NULL);
    dray__event *e;
    uint8_t handle[64];
    CUstream stream;
    CHECK(cu->cuStreamCreate(&stream, CU_STREAM_NON_BLOCKING) == 0);
    OK(dray__event_new(NULL, &e, &error));
    CHECK(!dray__event_handle(e));
    GIVES(DRAY_EINVALID, dray__event_export(e, handle, &error));
    GIVES(DRAY_EINVALID, dray__event_sync(e, 0, &error));
    OK(dray__event_record(e, stream, &error));
    CHECK(dray__event_handle(e) != NULL);
    OK(dray__event_export(e, handle, &error));
    OK(dray__event_sync(e, 5000000000, &error));
    tell(handle, sizeof handle, -1);
    signed_();
    dray__event_free(e);
    cu->cuStreamDestroy(stream);
}

static void importer_of_event(void)
{
    start(NULL);
    dray__event *e;
    uint8_t handle[64];
    hear(handle, sizeof handle);
    OK(dray__event_import(NULL, handle, &e, &error));
    CHECK(cu->cuStreamWaitEvent(NULL, dray__event_handle(e), 0) == CUDA_SUCCESS);
    OK(dray__event_sync(e, 5000000000, &error));
    dray__event_free(e);
    dray__event_free(NULL);
    sign();
}

TEST(events_cross_processes)
{
    together(owner_of_event, importer_of_event);
}

/* ---- owners that die, drivers that fail ------------------------------------------------------ */

static void dying_owner(void)
{
    start(NULL);
    dray_region *r;
    OK(dray_region_alloc(DRAY_REGION_CUDA, BYTES, "w", &r, &error));
    draw(8);
    put(dray_region_device_address(r), pattern, BYTES);
    hand(r);
    pid_t self = getpid();
    tell(&self, sizeof self, -1);
    pause();
}

static void survivor(void)
{
    start(NULL);
    int fd;
    pid_t owner;
    dray_region *r;
    dray_handle h = handed(&fd);
    OK(dray_region_import(&h, fd, 0, &r, &error));
    close(fd);
    hear(&owner, sizeof owner);
    struct pollfd death = {.fd = (int)syscall(SYS_pidfd_open, owner, 0), .events = POLLIN};
    kill(owner, SIGKILL);
    CHECK(poll(&death, 1, 30000) == 1);
    close(death.fd);
    draw(8);
    CHECK(has(dray_region_device_address(r), pattern, BYTES));
    dray_region_free(r);
}

TEST(memory_outlives_a_killed_owner)
{
    together(dying_owner, survivor);
}

static void fail_calls(void)
{
    static const char *const calls[] = {
        "cuMemCreate",    "cuMemMap",        "cuMemSetAccess",          "cuMemAddressReserve",
        "cuStreamCreate", "cuMemsetD8Async", "cuDevicePrimaryCtxRetain"};
    start(NULL);
    uint64_t before = free_bytes();
    for (size_t i = 0; i < sizeof calls / sizeof *calls; i++) {
        char spec[64];
        dray_region *r = NULL;
        snprintf(spec, sizeof spec, "%s:1:999", calls[i]);
        if (!gpu_fail(spec))
            return;
        int rc = dray_region_alloc(DRAY_REGION_CUDA, BYTES, "w", &r, &error);
        if (strcmp(calls[i], "cuDevicePrimaryCtxRetain")) { /* done long ago */
            GIVES(DRAY_ESYS, rc);
            SAYS("CUDA_ERROR_UNKNOWN");
            CHECK(error.origin == DRAY_ORIGIN_CUDA && error.raw == 999 && !r);
        } else {
            OK(rc);
            dray_region_free(r);
        }
        gpu_fail(NULL);
        CHECK(free_bytes() == before);
    }
}

TEST(failing_calls_leave_nothing)
{
    alone(fail_calls);
}

int main(void)
{
    gpu_begin(gpu_is_real() ? 1 : 2);
    return suite_run(NULL, NULL);
}
