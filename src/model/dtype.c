/* The table of dtypes, and the names of regions' kinds. */
#include <dray/model.h>

#include <string.h>
#include <strings.h>

static const struct {
    const char *name, *safetensors, *torch;
    size_t bytes;
} dtypes[] = {
#define XX(name, value, bytes, safetensors, torch) [value] = {#name, safetensors, torch, bytes},
    DRAY_DTYPE_MAP(XX)
#undef XX
};

enum { DTYPE_COUNT = sizeof dtypes / sizeof *dtypes };

size_t dray_dtype_size(dray_dtype dtype)
{
    return (unsigned)dtype < DTYPE_COUNT ? dtypes[dtype].bytes : 0;
}

const char *dray_dtype_name(dray_dtype dtype)
{
    return dray_dtype_size(dtype) ? dtypes[dtype].safetensors : "?";
}

dray_dtype dray_dtype_parse(const char *name)
{
    if (!name)
        return DRAY_DTYPE_NONE;
    if (strncasecmp(name, "torch.", 6) == 0)
        name += 6;
    for (unsigned i = 1; i < DTYPE_COUNT; i++)
        if (strcasecmp(name, dtypes[i].safetensors) == 0 || strcasecmp(name, dtypes[i].name) == 0 ||
            strcasecmp(name, dtypes[i].torch) == 0)
            return (dray_dtype)i;
    return DRAY_DTYPE_NONE;
}

const char *dray_region_kind_name(dray_region_kind kind)
{
    static const char *const names[] = {[DRAY_REGION_HOST] = "host",
                                        [DRAY_REGION_SHARED] = "shared",
                                        [DRAY_REGION_PINNED] = "pinned",
                                        [DRAY_REGION_CUDA] = "cuda",
                                        [DRAY_REGION_FILE] = "file"};
    if (kind < DRAY_REGION_HOST || kind > DRAY_REGION_FILE)
        return "?";
    return names[kind];
}
