/* A file as a region. The movers read and write it at offsets. It is never mapped, because a file
 * that shrinks under a mapping causes a signal, and only an error under pread. */
#include "base/error.h"
#include "memory/region.h"

#include <endian.h>
#include <errno.h>
#include <fcntl.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

static int open_regular(dray_region *region, struct stat *st, dray_error *error)
{
    /* With O_NONBLOCK, a path that is a pipe is refused without a wait. */
    int flags = (region->writable ? O_RDWR : O_RDONLY) | O_CLOEXEC | O_NONBLOCK | O_NOCTTY;
    region->fd = open(region->name, flags);
    if (region->fd < 0) {
        int rc = dray__fail_errno(error, errno, "opening %s", region->name);
        if (errno != ENOENT)
            return rc;
        if (error)
            error->code = DRAY_ENOENT;
        return DRAY_ENOENT;
    }
    if (fstat(region->fd, st))
        return dray__fail_errno(error, errno, "fstat of %s", region->name);
    if (!S_ISREG(st->st_mode))
        return dray__fail(error, DRAY_EINVALID, "%s is not a regular file", region->name);
    return DRAY_OK;
}

static int open_file(dray_region *region, dray_error *error)
{
    struct stat st;
    int rc = open_regular(region, &st, error);
    if (!rc)
        region->bytes = (uint64_t)st.st_size;
    return rc;
}

static int describe(const dray_region *region, dray_handle *handle, dray_error *error)
{
    char *path = realpath(region->name, NULL);
    if (!path)
        return dray__fail_errno(error, errno, "resolving %s", region->name);
    struct stat st;
    int rc = DRAY_OK;
    if (strlen(path) >= sizeof handle->path)
        rc =
            dray__fail(error, DRAY_EUNSUPPORTED, "%s: path of %zu bytes, a handle has room for %zu",
                       region->name, strlen(path), sizeof handle->path - 1);
    else if (fstat(region->fd, &st))
        rc = dray__fail_errno(error, errno, "fstat of %s", region->name);
    else {
        memset(handle->path, 0, sizeof handle->path);
        memcpy(handle->path, path, strlen(path));
        /* The key is the inode alone, because device numbers differ between hosts that mount the
         * same file system. */
        uint64_t key = htole64((uint64_t)st.st_ino);
        memcpy(handle->key, &key, sizeof key);
    }
    free(path);
    return rc;
}

static int import(dray_region *region, const dray_handle *handle, int fd, dray_error *error)
{
    (void)fd;
    struct stat st;
    int rc = open_regular(region, &st, error);
    if (rc)
        return rc;
    uint64_t key;
    memcpy(&key, handle->key, sizeof key);
    if (le64toh(key) != (uint64_t)st.st_ino)
        return dray__fail(error, DRAY_EINVALID,
                          "file handle: %s is inode %llu, the handle names %llu (replaced since?)",
                          region->name, (unsigned long long)st.st_ino,
                          (unsigned long long)le64toh(key));
    if ((uint64_t)st.st_size < handle->storage_bytes)
        return dray__fail(error, DRAY_EINVALID,
                          "file handle: storage_bytes is %llu, but %s has %llu",
                          (unsigned long long)handle->storage_bytes, region->name,
                          (unsigned long long)st.st_size);
    return DRAY_OK;
}

static int transfer(const dray_region *region, uint64_t offset, void *data, uint64_t bytes,
                    bool write, dray_error *error)
{
    uint8_t *at = data;
    while (bytes) {
        ssize_t n = write ? pwrite(region->fd, at, bytes, (off_t)offset)
                          : pread(region->fd, at, bytes, (off_t)offset);
        if (n < 0 && errno == EINTR)
            continue;
        if (n < 0 || (n == 0 && write))
            return dray__fail_errno(error, n < 0 ? errno : ENOSPC, "%s %llu bytes at %llu of %s",
                                    write ? "writing" : "reading", (unsigned long long)bytes,
                                    (unsigned long long)offset, region->name);
        if (n == 0)
            return dray__fail(error, DRAY_EFORMAT, "%s ends at byte %llu, %llu more expected",
                              region->name, (unsigned long long)offset, (unsigned long long)bytes);
        at += n;
        offset += (uint64_t)n;
        bytes -= (uint64_t)n;
    }
    return DRAY_OK;
}

static void release(dray_region *region)
{
    if (region->fd >= 0)
        close(region->fd);
}

const dray__region_ops dray__region_file = {.kind = DRAY_REGION_FILE,
                                            .open = open_file,
                                            .describe = describe,
                                            .import = import,
                                            .release = release,
                                            .transfer = transfer};
