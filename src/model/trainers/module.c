/* Adds parameters of transformers' modules as blocks over the checkpoint's names. A parameter is
 * the same tensor, one under another name, or experts packed into one parameter with the expert as
 * the outermost dimension. */
#include "model/families/family.h"
#include "model/layout/layout.h"

#include "base/error.h"

#include <inttypes.h>
#include <string.h>

enum { PIECES = 2 };

/* The tensors of a module's parameter. */
typedef struct found {
    const dray__parameter *pieces[PIECES];
    uint32_t count;
    bool packed; /* the parameter packs all experts */
    int64_t layer, expert;
    uint32_t ndim;
    int64_t shape[DRAY_MAX_DIMS]; /* the module's */
} found;

typedef struct module_adding {
    dray_layout *layout;
    const dray_model_config *config;
    const dray__family *family;
    const char *name;
    dray_dtype dtype;
    dray_error *error;
} module_adding;

/* Finds the row that matches the name, if the model has its layer and expert. */
static const dray__parameter *find_row(const module_adding *a, const char *name, int64_t *numbers)
{
    const dray_model_config *c = a->config;
    for (uint32_t i = 0; i < a->family->count; i++) {
        const dray__parameter *p = &a->family->parameters[i];
        numbers[0] = numbers[1] = 0;
        if (!dray__name_matches(p->name, name, numbers) || !dray__parameter_used(p, c))
            continue;
        if (!dray__parameter_in_layer(p))
            return p;
        int64_t layers = dray__parameter_layers(p, c) + (p->each ? 0 : c->mtp_layers);
        if (numbers[0] < layers && dray__parameter_in(p, c, numbers[0]) &&
            (!dray__parameter_of_expert(p) || numbers[1] < c->experts))
            return p;
    }
    return NULL;
}

/* Computes the module's shape from those of its pieces: experts outermost, rows concatenated. */
static void set_shape(const module_adding *a, found *f)
{
    int64_t shape[DRAY_MAX_DIMS];
    f->ndim = dray__parameter_shape(f->pieces[0], a->config, f->shape);
    if (!f->packed)
        return;
    memcpy(shape, f->shape, sizeof shape);
    f->shape[0] = a->config->experts;
    f->shape[1] = shape[0] * f->count;
    f->shape[2] = shape[1];
    f->ndim++;
}

static bool find_module(const module_adding *a, const dray__module *module, found *f)
{
    int64_t numbers[2] = {0}, of[2];
    char name[DRAY__PARAMETER_NAME];
    if (!dray__name_matches(module->name, a->name, numbers))
        return false;
    *f = (found){.layer = numbers[0]};
    for (; f->count < PIECES && module->tensors[f->count]; f->count++) {
        dray__parameter_name(module->tensors[f->count], numbers[0], 0, name);
        f->pieces[f->count] = find_row(a, name, of);
        if (!f->pieces[f->count])
            return false;
    }
    f->packed = dray__parameter_of_expert(f->pieces[0]);
    return true;
}

/* Finds the parameter's tensors by its name, after checking the configuration. */
static int find(module_adding *a, found *f)
{
    int64_t numbers[2];
    int status = dray__config_check(a->config, &a->family, a->error);
    if (status)
        return status;
    const dray__module *m = a->family->modules;
    while (m && m->name && !find_module(a, m, f))
        m++;
    if (!m || !m->name) {
        const dray__parameter *p = find_row(a, a->name, numbers);
        if (!p)
            return dray__fail(a->error, DRAY_ENOENT,
                              "%s of %" PRId64 " layers has no parameter %.200s", a->config->family,
                              a->config->layers, a->name);
        *f = (found){.pieces = {p}, .count = 1, .layer = numbers[0], .expert = numbers[1]};
    }
    set_shape(a, f);
    if (dray__parameter_dtype(f->pieces[0], a->dtype) != a->dtype)
        return dray__fail(a->error, DRAY_EINVALID, "%.200s: expected %s, found %s", a->name,
                          dray_dtype_name(f->pieces[0]->dtype), dray_dtype_name(a->dtype));
    return DRAY_OK;
}

/* Finds the piece's tensor in the layout, or adds it. */
static int tensor_of(const module_adding *a, const found *f, uint32_t piece, int64_t expert,
                     uint32_t *tensor)
{
    char name[DRAY__PARAMETER_NAME];
    int64_t shape[DRAY_MAX_DIMS];
    uint32_t ndim = dray__parameter_shape(f->pieces[piece], a->config, shape);
    dray__parameter_name(f->pieces[piece]->name, f->layer, expert, name);
    return dray__layout_need_tensor(a->layout, name, a->dtype, ndim, shape, a->name, tensor,
                                    a->error);
}

/* Adds the expert's part of a block of the packed parameter. */
static int add_expert(const module_adding *a, const found *f, const dray_block *block,
                      int64_t expert)
{
    int64_t rows = f->shape[1] / f->count, end = block->start[1] + block->extent[1];
    for (uint32_t piece = 0; piece < f->count; piece++) {
        int64_t at = piece * rows; /* offset of the piece in the packed rows */
        int64_t from = block->start[1] > at ? block->start[1] : at;
        int64_t to = end < at + rows ? end : at + rows;
        if (from >= to)
            continue;
        dray_block part = {.region = block->region,
                           .start = {from - at, block->start[2]},
                           .extent = {to - from, block->extent[2]},
                           .stride = {block->stride[1], block->stride[2]}};
        part.offset = block->offset +
                      (uint64_t)(expert - block->start[0]) * (uint64_t)block->stride[0] +
                      (uint64_t)(from - block->start[1]) * (uint64_t)block->stride[1];
        int status = tensor_of(a, f, piece, expert, &part.tensor);
        if (!status)
            status = dray_layout_add_block(a->layout, &part, a->error);
        if (status)
            return status;
    }
    return DRAY_OK;
}

static int add_packed(const module_adding *a, const found *f, const dray_layout *shard,
                      uint32_t region)
{
    for (uint32_t b = 0; b < dray_layout_block_count(shard); b++) {
        dray_block block = *dray_layout_block(shard, b);
        block.region = region;
        for (int64_t e = block.start[0]; e < block.start[0] + block.extent[0]; e++) {
            int status = add_expert(a, f, &block, e);
            if (status)
                return status;
        }
    }
    return DRAY_OK;
}

/* Places the module's parameter in a temporary layout, as if it were a tensor. */
static int place_shard(const module_adding *a, const found *f, uint32_t region, uint64_t offset,
                       const dray_mesh *mesh, const int64_t *coordinate, int64_t *local_shape,
                       dray_layout **out)
{
    const dray_region_info *info = dray_layout_region(a->layout, region);
    uint32_t tensor, index;
    dray_layout *shard;
    if (!info)
        return dray__fail(a->error, DRAY_EINVALID, "%.200s in region %u: there are %u", a->name,
                          region, dray_layout_region_count(a->layout));
    int status = dray_layout_new(&shard, a->error);
    if (status)
        return status;
    status = dray_layout_add_region(shard, info, &index, a->error);
    if (!status)
        status =
            dray_layout_add_tensor(shard, a->name, a->dtype, f->ndim, f->shape, &tensor, a->error);
    if (!status)
        status = dray_layout_add_dtensor(shard, tensor, index, offset, mesh, coordinate,
                                         local_shape, a->error);
    if (status)
        dray_layout_free(shard);
    else
        *out = shard;
    return status;
}

/* Adds an alias of a parameter that must be in the layout. Does nothing when the alias is there
 * already. */
static int add_tied(const module_adding *a, const dray__parameter *p)
{
    uint32_t target, there;
    if (dray_layout_find(a->layout, a->name, &there, NULL) == DRAY_OK)
        return DRAY_OK;
    int status = dray_layout_find(a->layout, p->tied, &target, a->error);
    return status ? status : dray_layout_add_alias(a->layout, a->name, target, NULL, a->error);
}

static int add_shard(const module_adding *a, const found *f, const dray_layout *shard,
                     uint32_t region)
{
    if (f->packed)
        return add_packed(a, f, shard, region);
    uint32_t tensor;
    int status = tensor_of(a, f, 0, f->expert, &tensor);
    for (uint32_t b = 0; b < dray_layout_block_count(shard) && !status; b++) {
        dray_block block = *dray_layout_block(shard, b);
        block.tensor = tensor;
        block.region = region;
        status = dray_layout_add_block(a->layout, &block, a->error);
    }
    return status;
}

/* ---- ranges of flattened parameters ---------------------------------------------------------- */

/* Adds the part of the range in elements [begin, begin + numel) of the parameter, which are one
 * whole tensor. */
static int add_part(const module_adding *a, uint32_t tensor, const dray__module_range *range,
                    uint32_t region, uint64_t offset, int64_t begin, int64_t numel)
{
    int64_t end = range->first + range->count, to = begin + numel < end ? begin + numel : end;
    int64_t from = begin > range->first ? begin : range->first;
    if (from >= to)
        return DRAY_OK;
    offset += (uint64_t)(from - range->first) * dray_dtype_size(a->dtype);
    return dray_layout_add_range(a->layout, tensor, region, offset, from - begin, to - from,
                                 a->error);
}

static int add_parts(const module_adding *a, const found *f, const dray__module_range *range,
                     uint32_t region, uint64_t offset)
{
    int64_t experts = f->packed ? f->shape[0] : 1, numel = 1;
    for (uint32_t d = f->packed ? 1 : 0; d < f->ndim; d++)
        numel *= f->shape[d];
    numel /= f->count;
    for (int64_t e = 0; e < experts; e++)
        for (uint32_t piece = 0; piece < f->count; piece++) {
            uint32_t tensor;
            int status = tensor_of(a, f, piece, f->packed ? e : f->expert, &tensor);
            if (!status)
                status = add_part(a, tensor, range, region, offset, (e * f->count + piece) * numel,
                                  numel);
            if (status)
                return status;
        }
    return DRAY_OK;
}

int dray__layout_add_module_range(dray_layout *layout, const dray_model_config *config,
                                  const dray__module_range *range, uint32_t region, uint64_t offset,
                                  dray_error *error)
{
    module_adding a = {layout, config, NULL, range->name, range->dtype, error};
    found f;
    char here[DRAY__SHAPE_TEXT], there[DRAY__SHAPE_TEXT];
    int status = find(&a, &f);
    if (status)
        return status;
    if (f.ndim != range->ndim || memcmp(f.shape, range->shape, f.ndim * sizeof *f.shape) != 0)
        return dray__fail(error, DRAY_EINVALID, "%.200s: shape %s expected, found %s", range->name,
                          dray__shape_text(f.ndim, f.shape, here),
                          dray__shape_text(range->ndim, range->shape, there));
    if (dray__parameter_tied(f.pieces[0], config))
        return add_tied(&a, f.pieces[0]);
    const dray__layout_state before = dray__layout_state_of(layout);
    status = add_parts(&a, &f, range, region, offset);
    if (status)
        dray__layout_restore(layout, &before);
    return status;
}

int dray_layout_add_module(dray_layout *layout, const dray_model_config *config, const char *name,
                           dray_dtype dtype, uint32_t region, uint64_t offset,
                           const dray_mesh *mesh, const int64_t *coordinate, int64_t *local_shape,
                           dray_error *error)
{
    static const dray_mesh whole = {.ndim = 1, .shape = {1}, .placements = {{0}}};
    static const int64_t origin[1] = {0};
    module_adding a = {layout, config, NULL, name, dtype, error};
    found f;
    dray_layout *shard = NULL;
    int64_t local[DRAY_MAX_DIMS];
    int status = find(&a, &f);
    if (status)
        return status;
    if (dray__parameter_tied(f.pieces[0], config))
        return add_tied(&a, f.pieces[0]);
    status = place_shard(&a, &f, region, offset, mesh ? mesh : &whole, mesh ? coordinate : origin,
                         local, &shard);
    if (status)
        return status;
    const dray__layout_state before = dray__layout_state_of(layout);
    status = add_shard(&a, &f, shard, region);
    if (status)
        dray__layout_restore(layout, &before);
    else if (local_shape)
        memcpy(local_shape, local, f.ndim * sizeof *local);
    dray_layout_free(shard);
    return status;
}
