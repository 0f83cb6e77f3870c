/* The fake driver's addresses: what lies where, whose it is, who may touch it. Allocations of
 * cuMemAlloc, registered host memory, pointers' attributes. */
#include "fake.h"

#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <unistd.h>

pthread_mutex_t fake_lock = PTHREAD_MUTEX_INITIALIZER;

/* ---- addresses ------------------------------------------------------------------------------- */

typedef struct space {
    struct space *next;
    uintptr_t mapped, at;
    size_t mapped_bytes, bytes;
} space;

static space *spaces;
static pthread_mutex_t spaces_lock = PTHREAD_MUTEX_INITIALIZER;

/* Past the sanitizers: they would shadow all of a range that nobody touches. */
static void *raw_map(uintptr_t at, size_t bytes, int protection, int flags, int fd, size_t offset)
{
    long mapped = syscall(SYS_mmap, at, bytes, protection, flags, fd, offset);
    return mapped == -1 ? NULL : (void *)mapped;
}

void *fake_map_fixed(uintptr_t at, size_t bytes, int protection, int fd, size_t offset)
{
    int flags = MAP_FIXED | (fd < 0 ? MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE : MAP_SHARED);
    void *mapped = raw_map(at, bytes, protection, flags, fd, offset);
    if (mapped)
        madvise(mapped, bytes, MADV_DONTFORK); /* a child has none of it */
    return mapped;
}

uintptr_t fake_reserve(size_t bytes, size_t alignment)
{
    space *s = calloc(1, sizeof *s);
    if (!s)
        return 0;
    alignment = alignment < GRANULE ? GRANULE : alignment;
    s->mapped_bytes = bytes + alignment + 2 * (size_t)GRANULE;
    s->mapped = (uintptr_t)raw_map(0, s->mapped_bytes, PROT_NONE,
                                   MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (!s->mapped) {
        free(s);
        return 0;
    }
    s->at = (s->mapped + GRANULE + alignment - 1) & ~(alignment - 1);
    s->bytes = bytes;
    pthread_mutex_lock(&spaces_lock);
    s->next = spaces;
    spaces = s;
    pthread_mutex_unlock(&spaces_lock);
    return s->at;
}

void fake_unreserve(uintptr_t at, size_t bytes)
{
    pthread_mutex_lock(&spaces_lock);
    space **link = &spaces;
    while (*link && ((*link)->at != at || (*link)->bytes != bytes))
        link = &(*link)->next;
    space *s = *link;
    if (s) {
        *link = s->next;
        syscall(SYS_munmap, s->mapped, s->mapped_bytes);
        free(s);
    }
    pthread_mutex_unlock(&spaces_lock);
}

bool fake_is_device_space(uintptr_t at)
{
    bool found = false;
    pthread_mutex_lock(&spaces_lock);
    for (const space *s = spaces; s && !found; s = s->next)
        found = at >= s->mapped && at - s->mapped < s->mapped_bytes;
    pthread_mutex_unlock(&spaces_lock);
    return found;
}

/* ---- ranges, in order of their addresses ----------------------------------------------------- */

static range **ranges;
static size_t range_count, range_room;
static uint64_t serials;

/* The first range that ends after the address. */
static size_t first_after(uintptr_t at)
{
    size_t low = 0, high = range_count;
    while (low < high) {
        size_t middle = low + (high - low) / 2;
        if (ranges[middle]->at + ranges[middle]->bytes > at)
            high = middle;
        else
            low = middle + 1;
    }
    return low;
}

range *fake_range_at(uintptr_t at)
{
    size_t i = first_after(at);
    return i < range_count && ranges[i]->at <= at ? ranges[i] : NULL;
}

range *fake_range_add(const range *given)
{
    if (range_count == range_room) {
        size_t room = range_room ? 2 * range_room : 64;
        range **grown = realloc(ranges, room * sizeof *grown);
        if (!grown)
            return NULL;
        ranges = grown;
        range_room = room;
    }
    range *r = malloc(sizeof *r);
    if (!r)
        return NULL;
    *r = *given;
    r->serial = ++serials;
    size_t i = first_after(r->at);
    memmove(ranges + i + 1, ranges + i, (range_count - i) * sizeof *ranges);
    ranges[i] = r;
    range_count++;
    return r;
}

void fake_range_remove(range *r)
{
    size_t i = first_after(r->at);
    for (; i + 1 < range_count; i++)
        ranges[i] = ranges[i + 1];
    range_count--;
    free(r);
    if (!range_count) {
        free(ranges);
        ranges = NULL;
        range_room = 0;
    }
}

range *fake_range_import(uint64_t id, const context *owner)
{
    for (size_t i = 0; i < range_count; i++)
        if (ranges[i]->kind == RANGE_IMPORT && ranges[i]->id == id && ranges[i]->owner == owner)
            return ranges[i];
    return NULL;
}

/* ---- who may --------------------------------------------------------------------------------- */

static bool death_is_a_fault(void)
{
    const char *text = getenv("FAKE_CUDA_LEGACY_DEATH");
    return text && strcmp(text, "fault") == 0;
}

/* Takes away what dead processes had exported by legacy handles, where a test wants that. */
void fake_imports_check(void)
{
    if (!death_is_a_fault())
        return;
    pthread_mutex_lock(&fake_lock);
    for (size_t i = 0; i < range_count; i++) {
        range *r = ranges[i];
        if (r->kind == RANGE_IMPORT && r->read && !fake_alive(r->from, r->from_start)) {
            r->read = r->write = 0;
            fake_map_fixed(r->at, r->bytes, PROT_NONE, -1, 0);
        }
    }
    pthread_mutex_unlock(&fake_lock);
}

static CUresult may(context *c, uintptr_t at, size_t bytes, bool write, bool device)
{
    uint64_t bit = UINT64_C(1) << c->physical;
    const range *r = fake_range_at(at);
    if (!r)
        return device || fake_is_device_space(at) ? CUDA_ERROR_INVALID_VALUE : CUDA_SUCCESS;
    if (!device && r->kind != RANGE_HOST)
        return CUDA_ERROR_INVALID_VALUE;
    for (;;) {
        if (!((write ? r->write : r->read) & bit))
            return CUDA_ERROR_INVALID_VALUE;
        size_t left = r->at + (r->kind == RANGE_MAPPING ? r->bytes : r->asked) - at;
        if (at - r->at >= r->bytes || left > r->bytes)
            return CUDA_ERROR_INVALID_VALUE;
        if (bytes <= left)
            return CUDA_SUCCESS;
        at += left;
        bytes -= left;
        const range *next = fake_range_at(at);
        if (r->kind != RANGE_MAPPING || !next || next->kind != RANGE_MAPPING)
            return CUDA_ERROR_INVALID_VALUE;
        r = next;
    }
}

CUresult fake_may(context *c, uintptr_t at, size_t bytes, bool write, bool device)
{
    if (!bytes)
        return CUDA_SUCCESS;
    pthread_mutex_lock(&fake_lock);
    CUresult rc = may(c, at, bytes, write, device);
    pthread_mutex_unlock(&fake_lock);
    return rc;
}

/* ---- cuMemAlloc ------------------------------------------------------------------------------ */

static size_t round_up(size_t bytes)
{
    return (bytes + GRANULE - 1) & ~((size_t)GRANULE - 1);
}

/* The first gap of the GPU's addresses that leaves a guard on both sides; 0: none. */
static uintptr_t find_gap(const context *c, size_t bytes)
{
    uintptr_t at = (uintptr_t)c->heap, end = at + HEAP_BYTES;
    for (size_t i = first_after(at); i < range_count && ranges[i]->at < end; i++) {
        if (ranges[i]->at - at >= bytes + GRANULE)
            return at;
        at = ranges[i]->at + ranges[i]->bytes + GRANULE;
    }
    return end - at >= bytes + GRANULE ? at : 0;
}

CUresult cuMemAlloc_v2(CUdeviceptr *address, size_t asked)
{
    ENTER(cuMemAlloc);
    CURRENT(c);
    if (!asked)
        return CUDA_ERROR_INVALID_VALUE;
    if (asked > HEAP_BYTES)
        return CUDA_ERROR_OUT_OF_MEMORY;
    fake_drain(c); /* the driver may wait for the GPU, and on real ones does now and then */
    size_t bytes = round_up(asked);
    uint64_t id = fake_id(), all = UINT64_MAX;
    if (!fake_hold(id, c->physical, bytes, true))
        return CUDA_ERROR_OUT_OF_MEMORY;
    pthread_mutex_lock(&fake_lock);
    range *made = NULL;
    uintptr_t at = find_gap(c, bytes);
    size_t offset = at - (uintptr_t)c->heap;
    if (at && fake_map_fixed(at, bytes, PROT_READ | PROT_WRITE, c->heap_fd, offset))
        made = fake_range_add(&(range){.at = at,
                                       .bytes = bytes,
                                       .asked = asked,
                                       .kind = RANGE_HEAP,
                                       .physical = c->physical,
                                       .owner = c,
                                       .id = id,
                                       .read = all,
                                       .write = all,
                                       .offset = offset});
    if (made)
        memset((void *)at, POISON_FRESH, asked < FRESH_MAX ? asked : FRESH_MAX);
    pthread_mutex_unlock(&fake_lock);
    if (!made) {
        fake_drop(id);
        return CUDA_ERROR_OUT_OF_MEMORY;
    }
    *address = at;
    return CUDA_SUCCESS;
}

/* What other processes still map reads as poison; the rest of it goes back. */
static void forget(range *r)
{
    if (r->exported)
        memset((void *)r->at, POISON_FREED, r->asked < FRESH_MAX ? r->asked : FRESH_MAX);
    else
        fallocate(r->owner->heap_fd, FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE, (off_t)r->offset,
                  (off_t)r->bytes);
    fake_map_fixed(r->at, r->bytes, PROT_NONE, -1, 0);
    fake_drop(r->id);
    fake_range_remove(r);
}

CUresult cuMemFree_v2(CUdeviceptr address)
{
    ENTER(cuMemFree);
    CURRENT(current);
    (void)current;
    if (!address)
        return CUDA_SUCCESS;
    pthread_mutex_lock(&fake_lock);
    range *r = fake_range_at(address);
    context *owner = r && r->kind == RANGE_HEAP && r->at == address ? r->owner : NULL;
    pthread_mutex_unlock(&fake_lock);
    if (!owner)
        return CUDA_ERROR_INVALID_VALUE;
    fake_drain(owner); /* the driver waits for the GPU here, too */
    pthread_mutex_lock(&fake_lock);
    r = fake_range_at(address);
    CUresult rc = r && r->kind == RANGE_HEAP ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
    if (!rc)
        forget(r);
    pthread_mutex_unlock(&fake_lock);
    return rc;
}

void fake_memory_end(context *c)
{
    pthread_mutex_lock(&fake_lock);
    for (size_t i = range_count; i-- > 0;) {
        range *r = ranges[i];
        if (r->owner != c || r->kind == RANGE_MAPPING)
            continue;
        if (r->kind == RANGE_HEAP) {
            forget(r);
            continue;
        }
        if (r->kind == RANGE_IMPORT)
            fake_unreserve(r->at, r->bytes);
        fake_range_remove(r);
    }
    pthread_mutex_unlock(&fake_lock);
}

CUresult cuMemGetInfo_v2(size_t *available, size_t *total)
{
    ENTER(cuMemGetInfo);
    CURRENT(c);
    *total = fake_total();
    *available = *total - fake_used(c->physical);
    return CUDA_SUCCESS;
}

CUresult cuMemGetAddressRange_v2(CUdeviceptr *base, size_t *bytes, CUdeviceptr address)
{
    ENTER(cuMemGetAddressRange);
    CURRENT(c);
    (void)c;
    pthread_mutex_lock(&fake_lock);
    const range *r = fake_range_at(address);
    CUresult rc = r && r->kind != RANGE_HOST ? CUDA_SUCCESS : CUDA_ERROR_NOT_FOUND;
    if (!rc && base)
        *base = r->at;
    if (!rc && bytes)
        *bytes = r->kind == RANGE_MAPPING ? r->bytes : r->asked;
    pthread_mutex_unlock(&fake_lock);
    return rc;
}

/* ---- registered host memory ------------------------------------------------------------------ */

/* Is all of it mapped, and writable where that is asked? */
static bool is_mapped(uintptr_t at, size_t bytes, bool writable)
{
    FILE *maps = fopen("/proc/self/maps", "re");
    char line[512], permissions[8];
    unsigned long from, to;
    uintptr_t end = at + bytes;
    while (maps && at < end && fgets(line, sizeof line, maps)) {
        if (sscanf(line, "%lx-%lx %7s", &from, &to, permissions) != 3 || to <= at)
            continue;
        if (from > at || permissions[0] != 'r' || (writable && permissions[1] != 'w'))
            break;
        at = to;
    }
    if (maps)
        fclose(maps);
    return at >= end;
}

CUresult cuMemHostRegister_v2(void *memory, size_t bytes, unsigned int flags)
{
    ENTER(cuMemHostRegister);
    CURRENT(c);
    uintptr_t at = (uintptr_t)memory;
    bool read_only = flags & CU_MEMHOSTREGISTER_READ_ONLY;
    if (!at || !bytes || flags & ~0xfu || !is_mapped(at, bytes, !read_only) ||
        fake_is_device_space(at))
        return CUDA_ERROR_INVALID_VALUE;
    fake_drain(c); /* as cuMemAlloc */
    pthread_mutex_lock(&fake_lock);
    size_t i = first_after(at);
    CUresult rc = i < range_count && ranges[i]->at < at + bytes
                      ? CUDA_ERROR_HOST_MEMORY_ALREADY_REGISTERED
                      : CUDA_SUCCESS;
    if (!rc && !fake_range_add(&(range){.at = at,
                                        .bytes = bytes,
                                        .asked = bytes,
                                        .kind = RANGE_HOST,
                                        .physical = -1,
                                        .owner = c,
                                        .read = UINT64_MAX,
                                        .write = read_only ? 0 : UINT64_MAX}))
        rc = CUDA_ERROR_OUT_OF_MEMORY;
    pthread_mutex_unlock(&fake_lock);
    return rc;
}

CUresult cuMemHostUnregister(void *memory)
{
    ENTER(cuMemHostUnregister);
    CURRENT(c);
    (void)c;
    pthread_mutex_lock(&fake_lock);
    range *r = fake_range_at((uintptr_t)memory);
    CUresult rc = r && r->kind == RANGE_HOST && r->at == (uintptr_t)memory
                      ? CUDA_SUCCESS
                      : CUDA_ERROR_HOST_MEMORY_NOT_REGISTERED;
    if (!rc)
        fake_range_remove(r);
    pthread_mutex_unlock(&fake_lock);
    return rc;
}

CUresult cuMemHostGetDevicePointer_v2(CUdeviceptr *address, void *memory, unsigned int flags)
{
    ENTER(cuMemHostGetDevicePointer);
    CURRENT(c);
    (void)c;
    pthread_mutex_lock(&fake_lock);
    const range *r = fake_range_at((uintptr_t)memory);
    CUresult rc = !flags && r && r->kind == RANGE_HOST ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
    if (!rc)
        *address = (uintptr_t)memory;
    pthread_mutex_unlock(&fake_lock);
    return rc;
}

/* ---- pointers' attributes -------------------------------------------------------------------- */

static CUresult attribute_of(const range *r, CUdeviceptr address, int attribute, void *value)
{
    bool host = r->kind == RANGE_HOST;
    size_t bytes = r->kind == RANGE_MAPPING ? r->bytes : r->asked;
    switch (attribute) {
    case CU_POINTER_ATTRIBUTE_CONTEXT:
        *(void **)value = r->kind == RANGE_MAPPING ? NULL : (void *)r->owner;
        return CUDA_SUCCESS;
    case CU_POINTER_ATTRIBUTE_MEMORY_TYPE:
        *(unsigned *)value = host ? CU_MEMORYTYPE_HOST : CU_MEMORYTYPE_DEVICE;
        return CUDA_SUCCESS;
    case 3: /* the address for the GPU */
        *(CUdeviceptr *)value = address;
        return CUDA_SUCCESS;
    case 4: /* the address for the host */
        *(CUdeviceptr *)value = host ? address : 0;
        return host ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
    case CU_POINTER_ATTRIBUTE_BUFFER_ID:
        *(unsigned long long *)value = r->serial;
        return CUDA_SUCCESS;
    case CU_POINTER_ATTRIBUTE_IS_MANAGED:
        *(int *)value = 0;
        return CUDA_SUCCESS;
    case CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL:
        *(int *)value = host ? r->owner->ordinal : fake_ordinal(r->physical);
        return CUDA_SUCCESS;
    case CU_POINTER_ATTRIBUTE_IS_LEGACY_CUDA_IPC_CAPABLE:
        *(int *)value = r->kind == RANGE_HEAP;
        return CUDA_SUCCESS;
    case CU_POINTER_ATTRIBUTE_RANGE_START_ADDR:
        *(CUdeviceptr *)value = r->at;
        return CUDA_SUCCESS;
    case CU_POINTER_ATTRIBUTE_RANGE_SIZE:
        *(size_t *)value = bytes;
        return CUDA_SUCCESS;
    case CU_POINTER_ATTRIBUTE_MAPPED:
        *(int *)value = 1;
        return CUDA_SUCCESS;
    case CU_POINTER_ATTRIBUTE_ALLOWED_HANDLE_TYPES:
        *(uint64_t *)value = r->backing ? (uint64_t)fake_handle_types(r->backing) : 0;
        return CUDA_SUCCESS;
    case CU_POINTER_ATTRIBUTE_MEMPOOL_HANDLE:
        *(void **)value = NULL;
        return CUDA_SUCCESS;
    default:
        return CUDA_ERROR_INVALID_VALUE;
    }
}

CUresult cuPointerGetAttribute(void *value, int attribute, CUdeviceptr address)
{
    ENTER(cuPointerGetAttribute);
    pthread_mutex_lock(&fake_lock);
    const range *r = fake_range_at(address);
    CUresult rc = r ? attribute_of(r, address, attribute, value) : CUDA_ERROR_INVALID_VALUE;
    pthread_mutex_unlock(&fake_lock);
    return rc;
}
