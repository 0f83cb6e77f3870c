/* Checks and copies layouts and regions of callers. */
#include "base/error.h"
#include "base/hash.h"
#include "control/frame.h"
#include "memory/region.h"
#include "model/layout/layout.h"
#include "plan/planner.h"
#include "weights/internal.h"
#include "weights/messages.h"

#include <errno.h>
#include <fcntl.h>
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

bool dray__region_offered(const dray_region *region)
{
    dray_region_kind kind = dray_region_get_kind(region);
    return kind == DRAY_REGION_SHARED || kind == DRAY_REGION_PINNED || kind == DRAY_REGION_CUDA;
}

int dray__regions_check(const dray_layout *layout, dray_region *const *regions, dray_error *error)
{
    for (uint32_t i = 0; i < dray_layout_region_count(layout); i++) {
        const dray_region_info *info = dray_layout_region(layout, i);
        const dray_region *region = regions ? regions[i] : NULL;
        if (!region)
            return dray__fail(error, DRAY_EINVALID, "region %" PRIu32 " (%s) is not given", i,
                              info->name);
        if (dray_region_get_kind(region) != (dray_region_kind)info->kind)
            return dray__fail(error, DRAY_EINVALID,
                              "region %" PRIu32 " (%s): the layout says %s, the live region is %s",
                              i, info->name, dray_region_kind_name((dray_region_kind)info->kind),
                              dray_region_kind_name(dray_region_get_kind(region)));
        if (dray_region_bytes(region) < info->bytes)
            return dray__fail(error, DRAY_EINVALID,
                              "region %" PRIu32 " (%s): the layout says %" PRIu64
                              " bytes, the live region has %" PRIu64,
                              i, info->name, info->bytes, dray_region_bytes(region));
    }
    return DRAY_OK;
}

typedef struct place {
    uint64_t address, end;
} place;

static int by_address(const void *left, const void *right)
{
    const place *a = left, *b = right;
    return a->address < b->address ? -1 : a->address > b->address;
}

int dray__regions_apart(const dray_plan_member *destination, dray_region *const *regions,
                        dray_error *error)
{
    uint32_t count = dray_layout_region_count(destination->layout);
    uint64_t *addresses = calloc((size_t)count + 1, sizeof *addresses);
    place *places = calloc((size_t)count + 1, sizeof *places);
    int rc = addresses && places ? DRAY_OK : dray__nomem(error);
    for (uint32_t i = 0; rc == DRAY_OK && i < count; i++) {
        const dray_region *region = regions[i];
        addresses[i] = region->base ? (uint64_t)(uintptr_t)region->base : region->device_address;
        places[i] = (place){addresses[i], addresses[i] + (addresses[i] ? region->bytes : 0)};
    }
    if (rc == DRAY_OK)
        qsort(places, count, sizeof *places, by_address);
    bool meet = false;
    for (uint64_t i = 0, end = 0; rc == DRAY_OK && i < count; i++) {
        meet |= places[i].address < end;
        end = places[i].end > end ? places[i].end : end;
    }
    if (meet)
        rc = dray__plan_check_addresses(destination, addresses, error);
    free(addresses);
    free(places);
    return rc;
}

dray_region **dray__files_open(const dray_layout *files, int writable, int *rc, dray_error *error)
{
    dray_region **opened =
        calloc((size_t)dray_layout_region_count(files) + 1, sizeof(dray_region *));
    *rc = opened ? dray_regions_for_layout(files, writable, opened, error) : dray__nomem(error);
    if (*rc == DRAY_OK)
        return opened;
    free(opened);
    return NULL;
}

void dray__files_close(dray_region **opened, const dray_layout *files)
{
    for (uint32_t i = 0; opened && i < dray_layout_region_count(files); i++)
        dray_region_free(opened[i]);
    free(opened);
}

int dray__files_sync(dray_region *const *opened, const dray_layout *files, dray_error *error)
{
    for (uint32_t i = 0; i < dray_layout_region_count(files); i++)
        if (fsync(dray_region_fd(opened[i])))
            return dray__fail_errno(error, errno, "%.300s: fsync", dray_region_name(opened[i]));
    return DRAY_OK;
}

/* Puts the GPU of each region into the layout, because the planner prefers near memory. Returns
 * true when that changed the layout. */
static bool say_devices(dray_layout *layout, dray_region *const *regions)
{
    bool said = false;
    for (uint32_t i = 0; regions && i < dray_layout_region_count(layout); i++) {
        const dray_region_info *info = dray_layout_region(layout, i);
        uint8_t device[sizeof info->device];
        if (info->kind != DRAY_REGION_CUDA || !regions[i] ||
            dray_region_device(regions[i], device, NULL) ||
            memcmp(device, info->device, sizeof device) == 0)
            continue;
        dray__layout_set_device(layout, i, device);
        said = true;
    }
    return said;
}

/* Copies the caller's layout, which may change or be freed, by packing and unpacking it. */
int dray__layout_copy(const dray_layout *layout, dray_region *const *regions, dray_layout **out,
                      dray__writer *packed, dray_error *error)
{
    dray_layout *copy;
    void *data;
    size_t size;
    int rc = dray_layout_pack(layout, &data, &size, error);
    if (rc)
        return rc;
    rc = dray_layout_unpack(data, size, &copy, error);
    if (rc == DRAY_OK && say_devices(copy, regions)) {
        free(data);
        data = NULL;
        rc = dray_layout_pack(copy, &data, &size, error);
        if (rc)
            dray_layout_free(copy);
    }
    if (rc == DRAY_OK && packed)
        dray__put_bytes(packed, data, size);
    free(data);
    if (rc == DRAY_OK)
        *out = copy;
    return rc;
}

uint64_t dray__layout_device(const dray_layout *layout)
{
    static const uint8_t none[sizeof((dray_region_info *)0)->device];
    for (uint32_t i = 0; i < dray_layout_region_count(layout); i++) {
        const dray_region_info *info = dray_layout_region(layout, i);
        if (info->kind == DRAY_REGION_CUDA && memcmp(info->device, none, sizeof none) != 0)
            return dray__hash(info->device, sizeof info->device) | 1;
    }
    return 0;
}

dray_region **dray__regions_copy(const dray_layout *layout, dray_region *const *regions)
{
    uint32_t count = dray_layout_region_count(layout);
    dray_region **copy = calloc((size_t)count + 1, sizeof *copy);
    if (copy && count)
        memcpy(copy, regions, count * sizeof *copy);
    return copy;
}

/* Opens a descriptor that readers cannot map for writing, so that a faulty reader damages no other
 * process. Without /proc, and for memory that the reader registers with a GPU, returns the
 * descriptor itself. Returns -1 with *none when the region has no descriptor. */
static int open_for_readers(const dray_region *region, bool *none)
{
    char path[64];
    *none = dray_region_fd(region) < 0;
    if (*none)
        return -1;
    if (dray_region_get_kind(region) != DRAY_REGION_SHARED)
        return fcntl(dray_region_fd(region), F_DUPFD_CLOEXEC, 0);
    snprintf(path, sizeof path, "/proc/self/fd/%d", dray_region_fd(region));
    int fd = open(path, O_RDONLY | O_CLOEXEC);
    return fd < 0 && errno == ENOENT ? fcntl(dray_region_fd(region), F_DUPFD_CLOEXEC, 0) : fd;
}

int dray__region_handle(const dray_region *region, uint64_t member, uint64_t epoch,
                        const uint8_t *event, uint8_t out[DRAY__HANDLE_PACKED], dray_error *error)
{
    dray_handle handle = DRAY_HANDLE_INIT;
    handle.dtype = DRAY_U8;
    handle.ndim = 1;
    handle.shape[0] = (int64_t)dray_region_bytes(region);
    handle.stride[0] = 1;
    handle.owner_member = member;
    handle.owner_epoch = epoch;
    if (event)
        memcpy(handle.event, event, sizeof handle.event);
    int rc = dray_handle_describe(region, &handle, error);
    return rc ? rc : dray_handle_pack(&handle, out, DRAY__HANDLE_PACKED, error);
}

int dray__region_put(dray__channel *channel, const dray_context *context, uint64_t key,
                     uint32_t index, const dray_region *region, const uint8_t *event,
                     int64_t deadline_ns, dray_error *error)
{
    uint8_t packed[DRAY__HANDLE_PACKED];
    bool none;
    int rc = dray__region_handle(region, dray_context_member(context), dray_context_epoch(context),
                                 event, packed, error);
    if (rc)
        return rc;
    dray__writer w = {0};
    dray__put_fields(&w, &dray__region_given_fields,
                     &(dray__region_given){key, index, packed, dray_handle_packed_size()});
    int fd = open_for_readers(region, &none);
    if (fd < 0 && !none)
        rc = dray__fail_errno(error, errno, "region %s: opening it for readers",
                              dray_region_name(region));
    else
        rc = dray__call(channel, DRAY__MSG_REGION_PUT, &w, &fd, !none, deadline_ns, NULL, error);
    dray__close_fds(&fd, !none);
    dray__writer_free(&w);
    return rc;
}

dray_copy dray__block_copy(const dray_layout *layout, uint32_t index)
{
    const dray_block *block = dray_layout_block(layout, index);
    const dray_tensor_info *tensor = dray_layout_tensor(layout, block->tensor);
    dray_copy copy = {.destination_region = block->region,
                      .tensor = block->tensor,
                      .ndim = tensor->ndim,
                      .destination_dtype = tensor->dtype,
                      .destination_offset = block->offset};
    memcpy(copy.start, block->start, sizeof copy.start);
    memcpy(copy.extent, block->extent, sizeof copy.extent);
    dray__copy_from_block(&copy, layout, index);
    memcpy(copy.destination_stride, copy.source_stride, sizeof copy.source_stride);
    return copy;
}

static int copy_tensor(const dray_layout *layout, uint32_t t, dray_layout *out, dray_error *error)
{
    const dray_tensor_info *tensor = dray_layout_tensor(layout, t);
    uint32_t at;
    if (tensor->alias_of >= 0)
        return dray_layout_add_alias(out, tensor->name, (uint32_t)tensor->alias_of, &at, error);
    return dray_layout_add_tensor(out, tensor->name, (dray_dtype)tensor->dtype, tensor->ndim,
                                  tensor->shape, &at, error);
}

int dray__layout_in(const dray_layout *layout, dray_region_kind kind, dray_region *const *regions,
                    dray_layout **out, dray_error *error)
{
    dray_layout *copy;
    uint32_t at;
    int rc = dray_layout_new(&copy, error);
    if (rc)
        return rc;
    for (uint32_t i = 0; i < dray_layout_region_count(layout) && rc == DRAY_OK; i++) {
        dray_region_info info = *dray_layout_region(layout, i);
        info.kind = (int32_t)(regions ? dray_region_get_kind(regions[i]) : kind);
        rc = dray_layout_add_region(copy, &info, &at, error);
    }
    for (uint32_t t = 0; t < dray_layout_tensor_count(layout) && rc == DRAY_OK; t++)
        rc = copy_tensor(layout, t, copy, error);
    for (uint32_t b = 0; b < dray_layout_block_count(layout) && rc == DRAY_OK; b++)
        rc = dray_layout_add_block(copy, dray_layout_block(layout, b), error);
    for (uint32_t t = 0; t < dray_layout_tensor_count(layout) && rc == DRAY_OK; t++)
        if (dray_layout_tensor(layout, t)->alias_of < 0 && dray_layout_quant(layout, t))
            rc = dray_layout_set_quant(copy, t, dray_layout_quant(layout, t), error);
    if (rc)
        dray_layout_free(copy);
    else
        *out = copy;
    return rc;
}

bool dray__source_remote(const dray__source *source, uint32_t region, uint64_t host)
{
    int32_t kind = dray_layout_region(source->layout, region)->kind;
    return !source->local && source->endpoint && source->endpoint[0] &&
           (source->host != host || kind == DRAY_REGION_HOST ||
            (kind == DRAY_REGION_FILE ? source->staged : !source->mapped));
}
