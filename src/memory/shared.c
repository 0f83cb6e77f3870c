/* Shared memory: a mapped memfd. Another process reaches it through the descriptor; the handle has
 * the descriptor's inode.
 *
 * The size is sealed, because a peer that shrinks the file would kill every process that maps it
 * (SIGBUS). Import refuses descriptors without the seal. */
#include "base/error.h"
#include "memory/region.h"

#include <endian.h>
#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

int dray__shared_alloc(dray_region *region, dray_error *error)
{
    if (region->bytes > INT64_MAX)
        return dray__fail(error, DRAY_ENOMEM, "region %s: %llu bytes is more than a file can hold",
                          region->name, (unsigned long long)region->bytes);
    char name[200]; /* memfd_create refuses more than 249 bytes */
    snprintf(name, sizeof name, "dray-%s", region->name);
    region->fd = memfd_create(name, MFD_CLOEXEC | MFD_ALLOW_SEALING);
    if (region->fd < 0)
        return dray__fail_errno(error, errno, "region %s: memfd_create", region->name);
    if (ftruncate(region->fd, (off_t)region->bytes))
        return dray__fail_errno(error, errno, "region %s: sizing to %llu bytes", region->name,
                                (unsigned long long)region->bytes);
    if (fcntl(region->fd, F_ADD_SEALS, F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_SEAL))
        return dray__fail_errno(error, errno, "region %s: sealing its size", region->name);
    return dray__region_map(region, region->fd, error);
}

int dray__shared_describe(const dray_region *region, dray_handle *handle, dray_error *error)
{
    struct stat st;
    if (fstat(region->fd, &st))
        return dray__fail_errno(error, errno, "region %s: fstat", region->name);
    uint64_t key[2] = {htole64((uint64_t)st.st_dev), htole64((uint64_t)st.st_ino)};
    memcpy(handle->key, key, sizeof key);
    return DRAY_OK;
}

static int check_descriptor(const dray_handle *handle, int fd, dray_error *error)
{
    unsigned long long owner = handle->owner_member;
    struct stat st;
    if (fd < 0 || fstat(fd, &st))
        return dray__fail(error, DRAY_EINVALID,
                          "shared handle of member %llu: no valid descriptor came with it", owner);
    uint64_t key[2];
    memcpy(key, handle->key, sizeof key);
    unsigned long long dev = le64toh(key[0]), ino = le64toh(key[1]);
    if (dev != st.st_dev || ino != st.st_ino)
        return dray__fail(error, DRAY_EINVALID,
                          "shared handle of member %llu: names device %llu inode %llu, but the "
                          "descriptor is device %llu inode %llu",
                          owner, dev, ino, (unsigned long long)st.st_dev,
                          (unsigned long long)st.st_ino);
    if (st.st_size < 0 || (uint64_t)st.st_size < handle->storage_bytes)
        return dray__fail(error, DRAY_EINVALID,
                          "shared handle of member %llu: storage_bytes is %llu, but the descriptor "
                          "has %lld",
                          owner, (unsigned long long)handle->storage_bytes, (long long)st.st_size);
    int seals = fcntl(fd, F_GET_SEALS);
    if (seals < 0 || !(seals & F_SEAL_SHRINK))
        return dray__fail(error, DRAY_EINVALID,
                          "shared handle of member %llu: the descriptor's size is not sealed",
                          owner);
    return DRAY_OK;
}

int dray__shared_import(dray_region *region, const dray_handle *handle, int fd, dray_error *error)
{
    int rc = check_descriptor(handle, fd, error);
    if (rc)
        return rc;
    region->fd = fcntl(fd, F_DUPFD_CLOEXEC, 3);
    if (region->fd < 0)
        return dray__fail_errno(error, errno, "shared handle of member %llu: dup",
                                (unsigned long long)handle->owner_member);
    return dray__region_map(region, region->fd, error);
}

void dray__shared_release(dray_region *region)
{
    dray__region_unmap(region);
    if (region->fd >= 0)
        close(region->fd);
}

const dray__region_ops dray__region_shared = {.kind = DRAY_REGION_SHARED,
                                              .alloc = dray__shared_alloc,
                                              .describe = dray__shared_describe,
                                              .import = dray__shared_import,
                                              .release = dray__shared_release};
