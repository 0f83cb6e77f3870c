/* What callers hand in with a layout: checked, copied. */
#include "base/error.h"
#include "weights/internal.h"

#include <inttypes.h>
#include <stdlib.h>
#include <string.h>

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

/* A layout of the caller's may change or go: the wire form makes a copy. */
int dray__layout_copy(const dray_layout *layout, dray_layout **out, dray__writer *packed,
                      dray_error *error)
{
    void *data;
    size_t size;
    int rc = dray_layout_pack(layout, &data, &size, error);
    if (rc)
        return rc;
    rc = dray_layout_unpack(data, size, out, error);
    if (rc == DRAY_OK && packed)
        dray__put_blob(packed, data, size);
    free(data);
    return rc;
}

dray_region **dray__regions_copy(const dray_layout *layout, dray_region *const *regions)
{
    uint32_t count = dray_layout_region_count(layout);
    dray_region **copy = calloc((size_t)count + 1, sizeof *copy);
    if (copy && count)
        memcpy(copy, regions, count * sizeof *copy);
    return copy;
}
