/* Regions: the code that all kinds share. */
#include "memory/region.h"

#include "base/arena.h"
#include "base/error.h"
#include "base/hash.h"
#include "store/store.h"

#include <errno.h>
#include <pthread.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

static const dray__region_ops *const kinds[] = {&dray__region_host, &dray__region_shared,
                                                &dray__region_pinned, &dray__region_cuda,
                                                &dray__region_file};

/* Returns NULL when this build has no regions of that kind. */
static const dray__region_ops *region_ops_of(int32_t kind)
{
    for (size_t i = 0; i < sizeof kinds / sizeof *kinds; i++)
        if ((int32_t)kinds[i]->kind == kind)
            return kinds[i];
    return NULL;
}

/* ---- the list of live regions
 * ------------------------------------------------------------------------------ */

static pthread_mutex_t living_lock = PTHREAD_MUTEX_INITIALIZER;
static dray__idmap living; /* live regions by serial number */
static uint64_t last_serial;

/* Enters a region into the list. One that could not be entered counts as freed. */
static void enter(dray_region *region)
{
    pthread_mutex_lock(&living_lock);
    region->serial = ++last_serial;
    dray__idmap_set(&living, region->serial, region);
    pthread_mutex_unlock(&living_lock);
}

static void leave(const dray_region *region)
{
    pthread_mutex_lock(&living_lock);
    dray__idmap_remove(&living, region->serial);
    if (living.count == 0)
        dray__idmap_free(&living);
    pthread_mutex_unlock(&living_lock);
}

bool dray__region_is(const dray_region *region, uint64_t serial)
{
    pthread_mutex_lock(&living_lock);
    bool is = serial && dray__idmap_get(&living, serial) == region;
    pthread_mutex_unlock(&living_lock);
    return is;
}

int dray__region_map(dray_region *region, int fd, dray_error *error)
{
    uint64_t page = (uint64_t)sysconf(_SC_PAGESIZE);
    if (region->bytes > INT64_MAX - 2 * DRAY__HUGE_PAGE)
        return dray__fail(error, DRAY_ENOMEM, "region %s: %llu bytes cannot be mapped",
                          region->name, (unsigned long long)region->bytes);
    uint64_t bytes = dray__round_up(region->bytes ? region->bytes : 1, page);
    /* Reserves addresses first, and then maps inside them. */
    uint8_t *base = dray__map_aligned(bytes, PROT_NONE);
    if (!base)
        return dray__fail_errno(error, errno, "region %s: %llu bytes of addresses", region->name,
                                (unsigned long long)bytes);
    region->base = base;
    region->mapped_bytes = bytes;
    int prot = region->writable ? PROT_READ | PROT_WRITE : PROT_READ;
    int flags = MAP_FIXED | (fd < 0 ? MAP_PRIVATE | MAP_ANONYMOUS : MAP_SHARED);
    if (mmap(base, bytes, prot, flags, fd, 0) == MAP_FAILED)
        return dray__fail_errno(error, errno, "region %s: mapping of %llu bytes", region->name,
                                (unsigned long long)bytes);
    if (bytes >= DRAY__HUGE_PAGE) /* a hint, which kernels without huge pages refuse */
        madvise(base, bytes, MADV_HUGEPAGE);
    return DRAY_OK;
}

void dray__region_unmap(dray_region *region)
{
    if (region->mapped_bytes)
        munmap(region->base, region->mapped_bytes);
}

dray_region *dray__region_new(const dray__region_ops *ops, const char *name, uint64_t bytes,
                              bool writable, dray_error *error)
{
    dray_region *region = calloc(1, sizeof *region);
    char *copy = strdup(name ? name : "");
    if (!region || !copy) {
        free(region);
        free(copy);
        dray__nomem(error);
        return NULL;
    }
    *region =
        (dray_region){.ops = ops, .name = copy, .bytes = bytes, .fd = -1, .writable = writable};
    enter(region);
    return region;
}

/* Ends every constructor: returns the region, or frees it and returns the error. */
static int finish(int rc, dray_region *region, dray_region **out)
{
    if (rc)
        dray_region_free(region);
    else
        *out = region;
    return rc;
}

int dray_region_alloc(dray_region_kind kind, uint64_t bytes, const char *name, dray_region **out,
                      dray_error *error)
{
    const dray__region_ops *ops = region_ops_of((int32_t)kind);
    if (!ops || !ops->alloc)
        return dray__fail(error, DRAY_EUNSUPPORTED,
                          "region %s: kind %d cannot be allocated in this build (host, shared, "
                          "pinned and cuda can)",
                          name ? name : "", (int)kind);
    dray_region *region = dray__region_new(ops, name, bytes, true, error);
    if (!region)
        return DRAY_ENOMEM;
    return finish(ops->alloc(region, error), region, out);
}

int dray_region_wrap(void *base, uint64_t bytes, const char *name, dray_region **out,
                     dray_error *error)
{
    if (!base && bytes)
        return dray__fail(error, DRAY_EINVALID, "region %s: memory to wrap is NULL",
                          name ? name : "");
    if (bytes > UINTPTR_MAX - (uintptr_t)base)
        return dray__fail(error, DRAY_EINVALID, "region %s: %llu bytes go past all addresses",
                          name ? name : "", (unsigned long long)bytes);
    dray_region *region = dray__region_new(&dray__region_host, name, bytes, true, error);
    if (!region)
        return DRAY_ENOMEM;
    region->base = base;
    *out = region;
    return DRAY_OK;
}

int dray_region_open(const char *path, int writable, dray_region **out, dray_error *error)
{
    if (!path || !*path)
        return dray__fail(error, DRAY_EINVALID, "file region: path is empty");
    const dray__region_ops *ops =
        dray__store_is_local(path) ? &dray__region_file : &dray__region_object;
    dray_region *region = dray__region_new(ops, path, 0, writable != 0, error);
    if (!region)
        return DRAY_ENOMEM;
    return finish(region->ops->open(region, error), region, out);
}

int dray_region_import(const dray_handle *given, int fd, int writable, dray_region **out,
                       dray_error *error)
{
    dray_handle own = DRAY_HANDLE_INIT, *handle = &own;
    int rc = dray__handle_read(given, handle, error);
    if (!rc)
        rc = dray__handle_check(handle, error);
    if (rc)
        return rc;
    const dray__region_ops *ops = region_ops_of(handle->kind);
    if (!ops || !ops->import)
        return dray__fail(error, DRAY_EUNSUPPORTED,
                          "handle of member %llu: kind %d cannot be imported in this build",
                          (unsigned long long)handle->owner_member, (int)handle->kind);
    dray_region *region =
        dray__region_new(ops, handle->path, handle->storage_bytes, writable != 0, error);
    if (!region)
        return DRAY_ENOMEM;
    return finish(ops->import(region, handle, fd, error), region, out);
}

void dray_region_free(dray_region *region)
{
    if (!region)
        return;
    leave(region);
    region->ops->release(region);
    free(region->name);
    free(region);
}

void *dray_region_base(const dray_region *region)
{
    return region->base;
}

uint64_t dray_region_bytes(const dray_region *region)
{
    return region->bytes;
}

dray_region_kind dray_region_get_kind(const dray_region *region)
{
    return region->ops->kind;
}

const char *dray_region_name(const dray_region *region)
{
    return region->name;
}

int dray_region_fd(const dray_region *region)
{
    return region->ops->descriptor ? region->ops->descriptor(region) : region->fd;
}

uint64_t dray_region_device_address(const dray_region *region)
{
    return region->device_address;
}

int dray_region_device(const dray_region *region, uint8_t uuid[16], dray_error *error)
{
    if (region->ops->kind != DRAY_REGION_CUDA)
        return dray__fail(error, DRAY_EINVALID, "region %s: %s memory is of no GPU", region->name,
                          dray_region_kind_name(region->ops->kind));
    memcpy(uuid, region->device_uuid, sizeof region->device_uuid);
    return DRAY_OK;
}

static int transfer(const dray_region *region, uint64_t offset, void *data, uint64_t bytes,
                    bool write, dray_error *error)
{
    if (offset > region->bytes || bytes > region->bytes - offset)
        return dray__fail(error, DRAY_EINVALID,
                          "region %s: %llu bytes from %llu on are not in its %llu", region->name,
                          (unsigned long long)bytes, (unsigned long long)offset,
                          (unsigned long long)region->bytes);
    if (write && !region->writable)
        return dray__fail(error, DRAY_EINVALID, "region %s was opened for reading", region->name);
    if (!bytes) /* without bytes, no address is needed */
        return DRAY_OK;
    if (region->ops->transfer)
        return region->ops->transfer(region, offset, data, bytes, write, error);
    if (write)
        memcpy(region->base + offset, data, bytes);
    else
        memcpy(data, region->base + offset, bytes);
    return DRAY_OK;
}

int dray_region_read(const dray_region *region, uint64_t offset, void *data, uint64_t bytes,
                     dray_error *error)
{
    return transfer(region, offset, data, bytes, false, error);
}

int dray_region_write(dray_region *region, uint64_t offset, const void *data, uint64_t bytes,
                      dray_error *error)
{
    return transfer(region, offset, (void *)(uintptr_t)data, bytes, true, error);
}

int dray_region_check(const dray_region *region, dray_error *error)
{
    return region->ops->check ? region->ops->check(region, error) : DRAY_OK;
}

void dray_region_unexport(dray_region *region)
{
    if (region->ops->unexport)
        region->ops->unexport(region);
}
