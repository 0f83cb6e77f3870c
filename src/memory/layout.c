/* Makes the live regions of a layout. */
#include "base/error.h"
#include "memory/region.h"

static int make_live(const dray_region_info *info, int writable, dray_region **out,
                     dray_error *error)
{
    if (info->kind != DRAY_REGION_FILE)
        return dray_region_alloc((dray_region_kind)info->kind, info->bytes, info->name, out, error);
    dray_region *region;
    int rc = dray_region_open(info->name, writable, &region, error);
    if (rc)
        return rc;
    if (region->bytes < info->bytes) {
        rc = dray__fail(error, DRAY_EFORMAT, "%s has %llu bytes, its layout needs %llu", info->name,
                        (unsigned long long)region->bytes, (unsigned long long)info->bytes);
        dray_region_free(region);
        return rc;
    }
    *out = region;
    return DRAY_OK;
}

int dray_regions_for_layout(const dray_layout *layout, int writable, dray_region **out,
                            dray_error *error)
{
    uint32_t count = dray_layout_region_count(layout);
    for (uint32_t i = 0; i < count; i++) {
        dray_region *region;
        int rc = make_live(dray_layout_region(layout, i), writable, &region, error);
        if (rc) {
            while (i > 0) {
                dray_region_free(out[--i]);
                out[i] = NULL;
            }
            return rc;
        }
        out[i] = region;
    }
    return DRAY_OK;
}
