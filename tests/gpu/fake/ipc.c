/* The fake driver's legacy handles: one exports the whole allocation that the address begins. */
#include "fake.h"

#include <fcntl.h>
#include <stdio.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

enum { MAGIC = 0x4D454D31 };

typedef struct memory_handle {
    uint32_t magic;
    int32_t pid;
    uint64_t start, id, offset, bytes, asked;
    int32_t fd, physical;
    uint64_t sum;
} memory_handle;

_Static_assert(sizeof(memory_handle) == sizeof(CUipcMemHandle), "64 bytes");

static uint64_t sum_of(const memory_handle *h)
{
    const uint8_t *bytes = (const uint8_t *)h;
    uint64_t sum = 14695981039346656037ULL;
    for (size_t i = 0; i < offsetof(memory_handle, sum); i++)
        sum = (sum ^ bytes[i]) * 1099511628211ULL;
    return sum;
}

CUresult cuIpcGetMemHandle(CUipcMemHandle *handle, CUdeviceptr address)
{
    ENTER(cuIpcGetMemHandle);
    CURRENT(c);
    (void)c;
    pthread_mutex_lock(&fake_lock);
    range *r = fake_range_at(address);
    bool right = r && r->kind == RANGE_HEAP && r->at == address;
    if (right) {
        memory_handle h = {.magic = MAGIC,
                           .pid = getpid(),
                           .start = fake_start_of(getpid()),
                           .id = r->id,
                           .offset = r->offset,
                           .bytes = r->bytes,
                           .asked = r->asked,
                           .fd = r->owner->heap_fd,
                           .physical = r->physical};
        h.sum = sum_of(&h);
        memcpy(handle, &h, sizeof h);
        r->exported = true;
    }
    pthread_mutex_unlock(&fake_lock);
    return right ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
}

static CUresult map(const memory_handle *h, context *c, CUdeviceptr *address)
{
    char path[64];
    snprintf(path, sizeof path, "/proc/%d/fd/%d", (int)h->pid, (int)h->fd);
    int fd = open(path, O_RDWR | O_CLOEXEC);
    if (fd < 0)
        return CUDA_ERROR_INVALID_VALUE;
    uintptr_t at = fake_reserve(h->bytes, GRANULE);
    CUresult rc = at && fake_map_fixed(at, h->bytes, PROT_READ | PROT_WRITE, fd, h->offset)
                      ? CUDA_SUCCESS
                      : CUDA_ERROR_MAP_FAILED;
    close(fd);
    const range made = {.at = at,
                        .bytes = h->bytes,
                        .asked = h->asked,
                        .kind = RANGE_IMPORT,
                        .physical = h->physical,
                        .owner = c,
                        .id = h->id,
                        .read = UINT64_MAX,
                        .write = UINT64_MAX,
                        .from = h->pid,
                        .from_start = h->start,
                        .opens = 1};
    if (!rc && !fake_range_add(&made))
        rc = CUDA_ERROR_OUT_OF_MEMORY;
    if (!rc)
        *address = at;
    else if (at)
        fake_unreserve(at, h->bytes);
    return rc;
}

CUresult cuIpcOpenMemHandle_v2(CUdeviceptr *address, CUipcMemHandle handle, unsigned int flags)
{
    ENTER(cuIpcOpenMemHandle);
    CURRENT(c);
    memory_handle h;
    memcpy(&h, &handle, sizeof h);
    if (h.magic != MAGIC || h.sum != sum_of(&h) || flags != CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS)
        return CUDA_ERROR_INVALID_VALUE;
    if (h.pid == getpid())
        return CUDA_ERROR_INVALID_CONTEXT; /* one's own export */
    pthread_mutex_lock(&fake_lock);
    range *known = fake_range_import(h.id, c);
    CUresult rc = CUDA_SUCCESS;
    if (known) {
        known->opens++;
        *address = known->at;
    } else if (!fake_held(h.id, h.pid, h.start)) {
        rc = CUDA_ERROR_INVALID_VALUE; /* freed, or its owner is dead */
    } else {
        rc = map(&h, c, address);
    }
    pthread_mutex_unlock(&fake_lock);
    return rc;
}

CUresult cuIpcCloseMemHandle(CUdeviceptr address)
{
    ENTER(cuIpcCloseMemHandle);
    CURRENT(c);
    pthread_mutex_lock(&fake_lock);
    range *r = fake_range_at(address);
    CUresult rc = r && r->kind == RANGE_IMPORT && r->at == address && r->owner == c
                      ? CUDA_SUCCESS
                      : CUDA_ERROR_INVALID_VALUE;
    if (!rc && --r->opens == 0) {
        fake_unreserve(r->at, r->bytes);
        fake_range_remove(r);
    }
    pthread_mutex_unlock(&fake_lock);
    return rc;
}
