/* Private memory of the process, allocated here or by the caller. */
#include "memory/region.h"

static int alloc(dray_region *region, dray_error *error)
{
    return dray__region_map(region, -1, error);
}

const dray__region_ops dray__region_host = {
    .kind = DRAY_REGION_HOST, .alloc = alloc, .release = dray__region_unmap};
