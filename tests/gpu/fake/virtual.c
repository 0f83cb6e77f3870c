/* The fake driver's virtual memory: reservations, physical allocations (each a memfd, so that it is
 * exported as a descriptor), mappings and access rights. */
#include "fake.h"

#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

struct allocation {
    allocation *next;
    uint64_t id;
    int fd, physical;
    size_t bytes;
    CUmemAllocationProp prop;
    unsigned handles, mappings;
};

typedef struct reservation {
    struct reservation *next;
    uintptr_t at;
    size_t bytes;
} reservation;

static allocation *allocations;
static reservation *reservations;

int fake_handle_types(const allocation *backing)
{
    return backing->prop.requestedHandleTypes;
}

/* ---- reservations ---------------------------------------------------------------------------- */

CUresult cuMemAddressReserve(CUdeviceptr *address, size_t bytes, size_t alignment,
                             CUdeviceptr wanted, unsigned long long flags)
{
    ENTER(cuMemAddressReserve);
    (void)wanted; /* a hint */
    if (!bytes || bytes % GRANULE || (alignment & (alignment - 1)) || flags)
        return CUDA_ERROR_INVALID_VALUE;
    reservation *r = calloc(1, sizeof *r);
    uintptr_t at = r ? fake_reserve(bytes, alignment) : 0;
    if (!at) {
        free(r);
        return CUDA_ERROR_OUT_OF_MEMORY;
    }
    pthread_mutex_lock(&fake_lock);
    *r = (reservation){reservations, at, bytes};
    reservations = r;
    pthread_mutex_unlock(&fake_lock);
    *address = at;
    return CUDA_SUCCESS;
}

static bool any_range(uintptr_t at, size_t bytes)
{
    for (size_t i = 0; i < bytes; i += GRANULE)
        if (fake_range_at(at + i))
            return true;
    return false;
}

CUresult cuMemAddressFree(CUdeviceptr address, size_t bytes)
{
    ENTER(cuMemAddressFree);
    pthread_mutex_lock(&fake_lock);
    reservation **link = &reservations;
    while (*link && ((*link)->at != address || (*link)->bytes != bytes))
        link = &(*link)->next;
    reservation *r = *link;
    bool free_now = r && !any_range(address, bytes);
    if (free_now) {
        *link = r->next;
        fake_unreserve(address, bytes);
        free(r);
    }
    pthread_mutex_unlock(&fake_lock);
    return free_now ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
}

static bool is_reserved(uintptr_t at, size_t bytes)
{
    for (const reservation *r = reservations; r; r = r->next)
        if (at >= r->at && at - r->at < r->bytes && bytes <= r->bytes - (at - r->at))
            return true;
    return false;
}

/* ---- physical memory ------------------------------------------------------------------------- */

static allocation *allocation_of(CUmemGenericAllocationHandle handle)
{
    for (allocation *a = allocations; a; a = a->next)
        if ((uintptr_t)a == handle && a->handles)
            return a;
    return NULL;
}

static allocation *add(uint64_t id, int fd, int physical, size_t bytes,
                       const CUmemAllocationProp *prop)
{
    allocation *a = calloc(1, sizeof *a);
    if (!a)
        return NULL;
    *a = (allocation){
        .id = id, .fd = fd, .physical = physical, .bytes = bytes, .prop = *prop, .handles = 1};
    pthread_mutex_lock(&fake_lock);
    a->next = allocations;
    allocations = a;
    pthread_mutex_unlock(&fake_lock);
    return a;
}

/* Under the lock. */
static void end_if_unused(allocation *a)
{
    if (a->handles || a->mappings)
        return;
    allocation **link = &allocations;
    while (*link != a)
        link = &(*link)->next;
    *link = a->next;
    close(a->fd);
    fake_drop(a->id);
    free(a);
}

static CUresult check_prop(const CUmemAllocationProp *prop)
{
    if (prop->type != CU_MEM_ALLOCATION_TYPE_PINNED ||
        prop->location.type != CU_MEM_LOCATION_TYPE_DEVICE)
        return CUDA_ERROR_INVALID_VALUE;
    if (!fake_context(prop->location.id))
        return CUDA_ERROR_INVALID_DEVICE;
    return prop->requestedHandleTypes & ~CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR
               ? CUDA_ERROR_NOT_SUPPORTED
               : CUDA_SUCCESS;
}

/* Never zeros, where tests would not see that nobody wrote. */
static void fill_fresh(int fd, size_t bytes)
{
    uint8_t page[4096];
    memset(page, POISON_FRESH, sizeof page);
    for (size_t at = 0; at < bytes && at < FRESH_MAX; at += sizeof page)
        if (pwrite(fd, page, sizeof page, (off_t)at) < 0)
            return;
}

CUresult cuMemCreate(CUmemGenericAllocationHandle *handle, size_t bytes,
                     const CUmemAllocationProp *prop, unsigned long long flags)
{
    ENTER(cuMemCreate);
    CUresult rc = check_prop(prop);
    if (!bytes || bytes % GRANULE || flags)
        rc = CUDA_ERROR_INVALID_VALUE;
    if (rc)
        return rc;
    int physical = -1;
    for (int i = 0; i < MAX_DEVICES; i++)
        if (fake_ordinal(i) == prop->location.id)
            physical = i;
    uint64_t id = fake_id();
    if (!fake_hold(id, physical, bytes, true))
        return CUDA_ERROR_OUT_OF_MEMORY;
    char name[64];
    snprintf(name, sizeof name, "fake-cuda-%d-%llu", physical, (unsigned long long)id);
    int fd = memfd_create(name, MFD_CLOEXEC);
    allocation *a =
        fd >= 0 && ftruncate(fd, (off_t)bytes) == 0 ? add(id, fd, physical, bytes, prop) : NULL;
    if (!a) {
        if (fd >= 0)
            close(fd);
        fake_drop(id);
        return CUDA_ERROR_OUT_OF_MEMORY;
    }
    fill_fresh(fd, bytes);
    *handle = (uintptr_t)a;
    return CUDA_SUCCESS;
}

CUresult cuMemRelease(CUmemGenericAllocationHandle handle)
{
    ENTER(cuMemRelease);
    pthread_mutex_lock(&fake_lock);
    allocation *a = allocation_of(handle);
    if (a) {
        a->handles--;
        end_if_unused(a);
    }
    pthread_mutex_unlock(&fake_lock);
    return a ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
}

CUresult cuMemRetainAllocationHandle(CUmemGenericAllocationHandle *handle, void *address)
{
    ENTER(cuMemRetainAllocationHandle);
    pthread_mutex_lock(&fake_lock);
    range *r = fake_range_at((uintptr_t)address);
    allocation *a = r && r->kind == RANGE_MAPPING ? r->backing : NULL;
    if (a) {
        a->handles++;
        *handle = (uintptr_t)a;
    }
    pthread_mutex_unlock(&fake_lock);
    return a ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
}

CUresult cuMemGetAllocationGranularity(size_t *bytes, const CUmemAllocationProp *prop, int option)
{
    ENTER(cuMemGetAllocationGranularity);
    CUresult rc = check_prop(prop);
    if (!rc && option != CU_MEM_ALLOC_GRANULARITY_MINIMUM &&
        option != CU_MEM_ALLOC_GRANULARITY_RECOMMENDED)
        rc = CUDA_ERROR_INVALID_VALUE;
    if (!rc)
        *bytes = GRANULE;
    return rc;
}

/* ---- export and import ----------------------------------------------------------------------- */

CUresult cuMemExportToShareableHandle(void *out, CUmemGenericAllocationHandle handle, int type,
                                      unsigned long long flags)
{
    ENTER(cuMemExportToShareableHandle);
    CUresult rc = CUDA_ERROR_INVALID_VALUE;
    pthread_mutex_lock(&fake_lock);
    const allocation *a = allocation_of(handle);
    if (a && !flags && type == CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR &&
        (a->prop.requestedHandleTypes & type)) {
        int fd = fcntl(a->fd, F_DUPFD_CLOEXEC, 3);
        rc = fd < 0 ? CUDA_ERROR_OPERATING_SYSTEM : CUDA_SUCCESS;
        if (!rc)
            memcpy(out, &fd, sizeof fd);
    }
    pthread_mutex_unlock(&fake_lock);
    return rc;
}

CUresult cuMemImportFromShareableHandle(CUmemGenericAllocationHandle *handle, void *given, int type)
{
    ENTER(cuMemImportFromShareableHandle);
    int fd = (int)(intptr_t)given, physical;
    char path[64], name[128] = "";
    unsigned long long id;
    struct stat st;
    snprintf(path, sizeof path, "/proc/self/fd/%d", fd);
    if (type != CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR || fstat(fd, &st) ||
        readlink(path, name, sizeof name - 1) < 0 ||
        sscanf(name, "/memfd:fake-cuda-%d-%llu", &physical, &id) != 2)
        return CUDA_ERROR_INVALID_VALUE;
    /* The file lives for as long as somebody has it: its descriptor is all that is needed. */
    const CUmemAllocationProp prop = {
        .type = CU_MEM_ALLOCATION_TYPE_PINNED,
        .requestedHandleTypes = CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR,
        .location = {CU_MEM_LOCATION_TYPE_DEVICE, fake_ordinal(physical)}};
    int own = fcntl(fd, F_DUPFD_CLOEXEC, 3);
    allocation *a = own >= 0 && fake_hold(id, physical, (uint64_t)st.st_size, false)
                        ? add(id, own, physical, (size_t)st.st_size, &prop)
                        : NULL;
    if (!a) {
        if (own >= 0)
            close(own);
        return CUDA_ERROR_OUT_OF_MEMORY;
    }
    *handle = (uintptr_t)a;
    return CUDA_SUCCESS;
}

/* ---- mappings -------------------------------------------------------------------------------- */

CUresult cuMemMap(CUdeviceptr address, size_t bytes, size_t offset,
                  CUmemGenericAllocationHandle handle, unsigned long long flags)
{
    ENTER(cuMemMap);
    CUresult rc = CUDA_ERROR_INVALID_VALUE;
    pthread_mutex_lock(&fake_lock);
    allocation *a = allocation_of(handle);
    if (a && !flags && !offset && bytes && address % GRANULE == 0 && bytes % GRANULE == 0 &&
        bytes <= a->bytes && is_reserved(address, bytes) && !any_range(address, bytes)) {
        const range made = {.at = address,
                            .bytes = bytes,
                            .asked = bytes,
                            .kind = RANGE_MAPPING,
                            .physical = a->physical,
                            .id = a->id,
                            .backing = a};
        /* Nobody may touch it before cuMemSetAccess. */
        rc = fake_map_fixed(address, bytes, PROT_NONE, a->fd, 0) && fake_range_add(&made)
                 ? CUDA_SUCCESS
                 : CUDA_ERROR_OUT_OF_MEMORY;
        a->mappings += rc == CUDA_SUCCESS;
    }
    pthread_mutex_unlock(&fake_lock);
    return rc;
}

/* Are these addresses whole mappings, without holes? */
static bool are_mappings(uintptr_t at, size_t bytes)
{
    uintptr_t end = at + bytes;
    while (at < end) {
        const range *r = fake_range_at(at);
        if (!r || r->kind != RANGE_MAPPING || r->at != at || r->bytes > end - at)
            return false;
        at += r->bytes;
    }
    return bytes != 0;
}

CUresult cuMemUnmap(CUdeviceptr address, size_t bytes)
{
    ENTER(cuMemUnmap);
    pthread_mutex_lock(&fake_lock);
    bool right = are_mappings(address, bytes);
    for (uintptr_t at = address; right && at < address + bytes;) {
        range *r = fake_range_at(at);
        allocation *a = r->backing;
        fake_map_fixed(r->at, r->bytes, PROT_NONE, -1, 0);
        at += r->bytes;
        fake_range_remove(r);
        a->mappings--;
        end_if_unused(a);
    }
    pthread_mutex_unlock(&fake_lock);
    return right ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
}

CUresult cuMemSetAccess(CUdeviceptr address, size_t bytes, const CUmemAccessDesc *access,
                        size_t count)
{
    ENTER(cuMemSetAccess);
    for (size_t i = 0; i < count; i++)
        if (access[i].location.type != CU_MEM_LOCATION_TYPE_DEVICE ||
            !fake_context(access[i].location.id) ||
            (access[i].flags & ~CU_MEM_ACCESS_FLAGS_PROT_READWRITE) || access[i].flags == 2)
            return CUDA_ERROR_INVALID_VALUE;
    pthread_mutex_lock(&fake_lock);
    bool right = are_mappings(address, bytes) && count;
    for (uintptr_t at = address; right && at < address + bytes;) {
        range *r = fake_range_at(at);
        for (size_t i = 0; i < count; i++) {
            int physical = 0;
            while (fake_ordinal(physical) != access[i].location.id)
                physical++;
            uint64_t bit = UINT64_C(1) << physical;
            r->read = access[i].flags ? r->read | bit : r->read & ~bit;
            r->write = access[i].flags == CU_MEM_ACCESS_FLAGS_PROT_READWRITE ? r->write | bit
                                                                             : r->write & ~bit;
        }
        int protection = (r->read ? PROT_READ : PROT_NONE) | (r->write ? PROT_WRITE : PROT_NONE);
        right = mprotect((void *)r->at, r->bytes, protection) == 0;
        at += r->bytes;
    }
    pthread_mutex_unlock(&fake_lock);
    return right ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
}
