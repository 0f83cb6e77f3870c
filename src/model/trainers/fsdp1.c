/* Whole models under FSDP1: the parameters of each flat parameter, its padding, and each rank's
 * share. After torch/distributed/fsdp/_flat_param.py. */
#include "model/families/family.h"
#include "model/layout/layout.h"

#include "base/arena.h"
#include "base/error.h"
#include "base/options.h"

#include <inttypes.h>
#include <stdlib.h>
#include <string.h>

enum { FLAT_ALIGN = 16 }; /* bytes, _get_aligned_numel: "comes from TorchInductor" */
/* The most elements of a flat parameter. Adding any tensor that a configuration allows to this does
 * not overflow. */
#define MOST_ELEMENTS (INT64_C(1) << 59)
#define ALIAS UINT32_MAX
#define BUFFER (UINT32_MAX - 1) /* both are in no unit */

/* The model's tensors by unit: the tensors of one flat parameter. Unit 0 is the root. */
typedef struct units {
    dray_fsdp1_spec spec;
    dray_dtype dtype;
    dray_region_kind kind;
    int64_t align;           /* elements; 0 for none */
    uint32_t *unit_of;       /* of each tensor; ALIAS or BUFFER */
    uint32_t *tensors;       /* grouped by unit, in checkpoint order within each */
    uint32_t *first;         /* of each unit, and the end */
    uint32_t count;          /* units */
    dray_flat_piece *pieces; /* room for the largest unit's */
} units;

static int check_spec(const dray_fsdp1_spec *given, units *u, dray_error *error)
{
    u->spec = (dray_fsdp1_spec)DRAY_FSDP1_SPEC_INIT;
    dray_fsdp1_spec *spec = &u->spec;
    int status = DRAY__OPTIONS_READ(dray_fsdp1_spec, kind, spec, given, error);
    if (status)
        return status;
    if (spec->world < 1 || spec->rank >= spec->world)
        return dray__fail(error, DRAY_EINVALID, "fsdp1: rank %u of %u", spec->rank, spec->world);
    u->dtype = (dray_dtype)spec->dtype;
    u->kind = (dray_region_kind)spec->kind;
    return DRAY_OK;
}

static int check_compute_dtype(units *u, dray_error *error)
{
    dray_dtype compute = (dray_dtype)u->spec.compute_dtype;
    size_t bytes = dray_dtype_size(compute == DRAY_DTYPE_NONE ? u->dtype : compute);
    if (!bytes)
        return dray__fail(error, DRAY_EINVALID, "fsdp1: unknown compute dtype %d", compute);
    u->align = u->spec.use_orig_params ? (int64_t)(FLAT_ALIGN / bytes) : 0;
    return DRAY_OK;
}

/* Adds all tensors. Those with a dtype of their own are buffers, which FSDP does not shard. */
static int add_tensors(units *u, const dray_model_config *config, const dray__family *family,
                       dray_layout *layout, dray_error *error)
{
    dray__walk walk = {.config = config, .family = family};
    const dray__parameter *parameter;
    uint32_t tensor;
    uint64_t capacity = 0;
    bool is_alias;
    while ((parameter = dray__walk_next(&walk))) {
        int status = dray__walk_add(&walk, parameter, u->dtype, layout, &tensor, &is_alias, error);
        if (!status && parameter->each)
            status =
                dray__fail(error, DRAY_EUNSUPPORTED,
                           "fsdp1: %s: expected units that are the model's layers, found layers "
                           "of their own",
                           walk.name);
        if (status)
            return status;
        if (!dray__append(&u->unit_of, sizeof *u->unit_of, tensor, &capacity))
            return dray__nomem(error);
        uint32_t unit = dray__parameter_in_layer(parameter) ? 1 + (uint32_t)walk.layer : 0;
        u->unit_of[tensor] = is_alias ? ALIAS : parameter->dtype != DRAY_DTYPE_NONE ? BUFFER : unit;
        if (u->unit_of[tensor] == unit && unit >= u->count)
            u->count = unit + 1;
    }
    return DRAY_OK;
}

/* Sorts the tensors by unit (counting sort). */
static int group(units *u, const dray_layout *layout, dray_error *error)
{
    uint32_t all = dray_layout_tensor_count(layout), most = 0;
    u->tensors = calloc(all, sizeof *u->tensors);
    u->first = calloc((size_t)u->count + 2, sizeof *u->first);
    if (!u->tensors || !u->first)
        return dray__nomem(error);
    for (uint32_t i = 0; i < all; i++)
        if (u->unit_of[i] < u->count)
            u->first[u->unit_of[i] + 2]++;
    for (uint32_t unit = 0; unit < u->count; unit++) {
        most = u->first[unit + 2] > most ? u->first[unit + 2] : most;
        u->first[unit + 2] += u->first[unit + 1];
    }
    for (uint32_t i = 0; i < all; i++)
        if (u->unit_of[i] < u->count)
            u->tensors[u->first[u->unit_of[i] + 1]++] = i;
    u->pieces = calloc(most ? most : 1, sizeof *u->pieces);
    return u->pieces ? DRAY_OK : dray__nomem(error);
}

/* Counts the elements of a unit's tensors and the padding between and after them (-1 when there are
 * too many). With `pieces`, also fills in those in the share [start, end). */
static int64_t lay_out(const units *u, uint32_t unit, const dray_layout *layout, int64_t start,
                       int64_t end, dray_flat_piece *pieces)
{
    int64_t at = 0, world = u->spec.world;
    for (uint32_t i = u->first[unit]; i < u->first[unit + 1]; i++) {
        const dray_tensor_info *t = dray_layout_tensor(layout, u->tensors[i]);
        int64_t numel = 1;
        for (uint32_t d = 0; d < t->ndim; d++)
            numel *= t->shape[d];
        if (u->align)
            at += (u->align - at % u->align) % u->align;
        if (pieces) {
            dray_flat_piece *piece = &pieces[i - u->first[unit]];
            int64_t from = start > at ? start - at : 0, to = end - at < numel ? end - at : numel;
            *piece = (dray_flat_piece){.name = t->name, .ndim = t->ndim};
            memcpy(piece->shape, t->shape, sizeof t->shape);
            piece->first = from;
            piece->last = to > from ? to - 1 : from - 1;
            piece->offset = at + from - start;
        }
        at += numel;
        if (at > MOST_ELEMENTS)
            return -1;
    }
    if (u->align)
        at += (world - at % world) % world;
    return at;
}

/* Computes one unit's share: chunk() of the flat parameter, padded to the first rank's size.
 * Returns false when it is too large. */
static bool share_of(const units *u, uint32_t unit, const dray_layout *layout,
                     dray_flat_parameter *flat)
{
    int64_t total = lay_out(u, unit, layout, 0, 0, NULL), world = u->spec.world;
    if (total < 0)
        return false;
    int64_t each = total / world + (total % world != 0), start = each * u->spec.rank;
    start = start < total ? start : total;
    int64_t end = total - start < each ? total : start + each;
    *flat = (dray_flat_parameter){.size = sizeof *flat,
                                  .dtype = (int32_t)u->dtype,
                                  .numel = each,
                                  .padding = each - (end - start),
                                  .pieces = u->pieces,
                                  .count = u->first[unit + 1] - u->first[unit]};
    lay_out(u, unit, layout, start, end, u->pieces);
    return true;
}

/* Places the whole buffers at *end of the region: advances *end by their bytes and, with `add`,
 * adds their blocks. */
static int place_buffers(const units *u, dray_layout *layout, bool add, uint64_t *end,
                         dray_error *error)
{
    static const int64_t origin[DRAY_MAX_DIMS];
    for (uint32_t i = 0; i < dray_layout_tensor_count(layout); i++) {
        const dray_tensor_info *t = dray_layout_tensor(layout, i);
        if (u->unit_of[i] != BUFFER)
            continue;
        int status = add ? dray_layout_add_dense(layout, i, 0, origin, t->shape, *end, error) : 0;
        if (status)
            return status;
        if (!dray__dense_end((dray_dtype)t->dtype, t->ndim, t->shape, end))
            return dray__fail(error, DRAY_EINVALID, "fsdp1: the model is too large");
    }
    return DRAY_OK;
}

static int place_units(const units *u, dray_layout *layout, dray_error *error)
{
    dray_region_info region = {.kind = (int32_t)u->kind, .name = "weights"};
    dray_flat_parameter flat;
    uint64_t element = dray_dtype_size(u->dtype), offset = 0;
    for (uint32_t unit = 0; unit < u->count; unit++) {
        bool fits = share_of(u, unit, layout, &flat);
        region.bytes += fits ? (uint64_t)flat.numel * element : 0;
        if (!fits || region.bytes > INT64_MAX || !dray__align(&region.bytes))
            return dray__fail(error, DRAY_EINVALID, "fsdp1: the model is too large");
    }
    int status = place_buffers(u, layout, false, &region.bytes, error);
    if (!status)
        status = dray_layout_add_region(layout, &region, NULL, error);
    for (uint32_t unit = 0; unit < u->count && !status; unit++) {
        share_of(u, unit, layout, &flat);
        status = dray_layout_add_flat(layout, 0, offset, &flat, error);
        offset += (uint64_t)flat.numel * element;
        dray__align(&offset);
    }
    return status ? status : place_buffers(u, layout, true, &offset, error);
}

int dray_layout_fsdp1(const dray_model_config *config, const dray_fsdp1_spec *spec,
                      dray_layout **out, dray_error *error)
{
    units u = {0};
    const dray__family *family;
    dray_layout *layout = NULL;
    int status = check_spec(spec, &u, error);
    if (!status)
        status = dray__config_check(config, &family, error);
    if (!status)
        status = dray__builder_defaults(config, &u.dtype, &u.kind, error);
    if (!status)
        status = check_compute_dtype(&u, error);
    if (!status)
        status = dray_layout_new(&layout, error);
    if (!status)
        status = add_tensors(&u, config, family, layout, error);
    if (!status)
        status = group(&u, layout, error);
    if (!status)
        status = place_units(&u, layout, error);
    free(u.unit_of);
    free(u.tensors);
    free(u.first);
    free(u.pieces);
    return dray__layout_give(layout, status, out);
}
