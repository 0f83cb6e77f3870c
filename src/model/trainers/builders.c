/* Whole models: "full" (a Hugging Face state dict) and FSDP. Both are walks over the family's table
 * that place one tensor after another in one region; only a rank's share of a tensor differs. */
#include "model/families/family.h"
#include "model/layout/layout.h"

#include "base/error.h"

#include <inttypes.h>

/* The state of the walk, with the end of the region so far. */
typedef struct share {
    dray_mesh mesh;
    int64_t rank;
    uint64_t end;
} share;

/* Returns this rank's number of rows of a tensor under torch.chunk. */
static int64_t share_rows(const share *s, int64_t rows)
{
    int64_t world = s->mesh.shape[0], each = rows / world + (rows % world != 0);
    int64_t start = each * s->rank;
    if (start >= rows)
        return 0;
    return rows - start < each ? rows - start : each;
}

/* Places each tensor of the walk. With a layout it adds the tensors; with NULL it only counts
 * bytes. */
static int place_all(const dray_model_config *config, const dray__family *family, dray_dtype dtype,
                     share *s, dray_layout *layout, dray_error *error)
{
    dray__walk walk = {.config = config, .family = family};
    const dray__parameter *parameter;
    s->end = 0;
    while ((parameter = dray__walk_next(&walk))) {
        bool is_alias = dray__parameter_tied(parameter, config);
        uint32_t tensor;
        int64_t shape[DRAY_MAX_DIMS];
        if (layout) {
            int status = dray__walk_add(&walk, parameter, dtype, layout, &tensor, &is_alias, error);
            if (!status && !is_alias)
                status = dray_layout_add_dtensor(layout, tensor, 0, s->end, &s->mesh, &s->rank,
                                                 NULL, error);
            if (status)
                return status;
        }
        if (is_alias)
            continue;
        uint32_t ndim = dray__parameter_shape(parameter, config, shape);
        shape[0] = share_rows(s, shape[0]);
        if (!dray__dense_end(dray__parameter_dtype(parameter, dtype), ndim, shape, &s->end))
            return dray__fail(error, DRAY_EINVALID, "tensor %s: the model is too large", walk.name);
    }
    return DRAY_OK;
}

static int build(const dray_model_config *config, dray_dtype dtype, dray_region_kind kind, share *s,
                 dray_layout **out, dray_error *error)
{
    const dray__family *family;
    int status = dray__config_check(config, &family, error);
    if (!status)
        status = dray__builder_defaults(config, &dtype, &kind, error);
    if (!status)
        status = place_all(config, family, dtype, s, NULL, error);
    if (status)
        return status;
    dray_layout *layout = NULL;
    dray_region_info region = {.kind = (int32_t)kind, .bytes = s->end, .name = "weights"};
    status = dray_layout_new(&layout, error);
    if (!status)
        status = dray_layout_add_region(layout, &region, NULL, error);
    if (!status)
        status = place_all(config, family, dtype, s, layout, error);
    return dray__layout_give(layout, status, out);
}

int dray_layout_full(const dray_model_config *config, dray_dtype dtype, dray_region_kind kind,
                     dray_layout **out, dray_error *error)
{
    share whole = {.mesh = {.ndim = 1, .shape = {1}, .placements = {{.kind = DRAY_REPLICATE}}}};
    return build(config, dtype, kind, &whole, out, error);
}

int dray_layout_fsdp(const dray_model_config *config, dray_dtype dtype, uint32_t rank,
                     uint32_t world, dray_region_kind kind, dray_layout **out, dray_error *error)
{
    if (world < 1 || rank >= world)
        return dray__fail(error, DRAY_EINVALID, "fsdp: rank %u of %u", rank, world);
    share part = {.mesh = {.ndim = 1, .shape = {world}, .placements = {{.kind = DRAY_SHARD}}},
                  .rank = rank};
    return build(config, dtype, kind, &part, out, error);
}
