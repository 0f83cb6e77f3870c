/* A file in another store than the file system, such as an object of a bucket: a region that is
 * read and never written. */
#include "base/error.h"
#include "memory/region.h"

static int open_object(dray_region *region, dray_error *error)
{
    const dray__store *store = dray__store_of(region->name);
    if (region->writable)
        return dray__fail(error, DRAY_EUNSUPPORTED,
                          "%.300s: objects are not written in place; dray_checkpoint_save places "
                          "whole versions",
                          region->name);
    int rc = store->open(region->name, &region->stored, error);
    if (rc)
        region->stored = (dray__store_file){0};
    else
        region->bytes = region->stored.bytes;
    return rc;
}

int dray__region_object_read(const dray_region *region, uint64_t offset, void *data, uint64_t bytes,
                             const atomic_bool *stop, dray_error *error)
{
    return region->stored.store->read(&region->stored, data, bytes, offset, stop, error);
}

static int transfer(const dray_region *region, uint64_t offset, void *data, uint64_t bytes,
                    bool write, dray_error *error)
{
    (void)write; /* the region is not writable */
    return dray__region_object_read(region, offset, data, bytes, NULL, error);
}

static void release(dray_region *region)
{
    if (region->stored.store)
        region->stored.store->close(&region->stored);
}

const dray__region_ops dray__region_object = {
    .kind = DRAY_REGION_FILE, .open = open_object, .release = release, .transfer = transfer};
