/* Parts that other ranks of a cohort on this host have fetched are not sent over a socket again
 * (remote.h). Their shared regions are mapped for the update. They are opened through /proc, which
 * needs the permission to trace the other process. Data servers of such ranks send only the sums of
 * a part that has arrived. The copied bytes are summed here and compared, so that a change of the
 * memory meanwhile is detected. */
#include "base/error.h"
#include "weights/sources/remote.h"

#include <errno.h>
#include <fcntl.h>
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <unistd.h>

bool dray__remote_may_map(const struct remote_route *l, const struct source *s)
{
    return s->cohort && s->of->host == l->transfer->destination->host && s->of->pid != getpid();
}

static int map_region(int64_t pid, uint32_t number, const void *packed, size_t size,
                      dray_region **out, dray_error *error)
{
    char path[64];
    dray_handle handle = DRAY_HANDLE_INIT;
    int rc = dray_handle_unpack(packed, size, &handle, error);
    if (rc)
        return rc;
    snprintf(path, sizeof path, "/proc/%" PRId64 "/fd/%" PRIu32, pid, number);
    int fd = open(path, O_RDONLY | O_CLOEXEC | O_NONBLOCK);
    if (fd < 0)
        return dray__fail_errno(error, errno, "%s", path);
    rc = dray_region_import(&handle, fd, 0, out, error);
    close(fd);
    return rc;
}

int dray__remote_take_maps(struct source *s, const uint8_t *data, uint64_t size, dray_error *error)
{
    dray__reader in = dray__reader_of(data, size);
    int64_t pid = (int64_t)dray__get_u64(&in);
    uint32_t count = dray__get_u32(&in);
    if (in.failed || pid != s->of->pid || count != dray_layout_region_count(s->of->layout))
        return dray__fail(error, DRAY_EPROTO, "%s: not its regions", s->of->name);
    s->maps = calloc((size_t)count + 1, sizeof *s->maps);
    if (!s->maps)
        return dray__nomem(error);
    s->map_count = count;
    for (uint32_t i = 0; i < count; i++) {
        uint32_t number = dray__get_u32(&in);
        size_t packed_size;
        const void *packed = dray__get_blob(&in, &packed_size);
        if (in.failed || number == UINT32_MAX)
            continue;
        int rc = map_region(pid, number, packed, packed_size, &s->maps[i], error);
        if (rc == DRAY_OK &&
            dray_region_bytes(s->maps[i]) < dray_layout_region(s->of->layout, i)->bytes)
            rc = dray__fail(error, DRAY_EFORMAT, "%s: region %" PRIu32 " is too small", s->of->name,
                            i);
        if (rc)
            return rc;
    }
    return dray__reader_finish(&in, "regions", error);
}

void dray__remote_unmap(struct source *s)
{
    for (uint32_t i = 0; i < s->map_count; i++)
        dray_region_free(s->maps[i]);
    free(s->maps);
    s->maps = NULL;
    s->map_count = 0;
}

dray_copy dray__remote_out_of_map(const struct source *s, const struct part *part,
                                  const dray_copy *op, const dray__rect *rect)
{
    dray_copy out = dray__copy_cut(op, rect);
    dray__copy_from_block(&out, s->of->layout, part->block);
    return out;
}
