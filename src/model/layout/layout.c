/* The layout: growing arrays of regions, tensors and blocks, and a map from names to tensors.
 * Everything is checked when it is added, so that all later users (planner, movers) can trust
 * it. */
#include "model/layout/layout.h"

#include "base/arena.h"
#include "base/error.h"
#include "base/hash.h"
#include "base/wire.h"
#include "base/words.h"

#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <strings.h>

typedef struct array {
    void *items;
    uint32_t count;
    uint64_t capacity;
} array;

typedef struct block_ends {
    uint32_t first, last;
} block_ends;

struct dray_layout {
    array regions, tensors, blocks;
    array quants; /* of quant_slot, by tensor, up to the last that has one */
    /* Blocks of one tensor, chained in the order in which they were added; numbers are index +
     * 1. */
    array ends;   /* of block_ends, by tensor */
    array behind; /* of uint32_t, by block: the next block of the same tensor; 0 for none */
    dray__index names;
    dray__arena arena; /* names of tensors and regions */
    uint64_t bytes;
};

/* Makes room for one more item; the caller counts it once nothing can fail any more. Indices are
 * also stored as int32 (alias_of), so there are fewer than 2^31 items. */
static void *array_next(array *a, size_t item)
{
    return a->count < INT32_MAX ? dray__append(&a->items, item, a->count, &a->capacity) : NULL;
}

static bool same_name(const void *tensors, uint32_t place, const void *name)
{
    return strcmp(((const dray_tensor_info *)tensors)[place].name, name) == 0;
}

static uint32_t place_of(const dray_layout *layout, const char *name, uint64_t hash)
{
    return dray__index_find(&layout->names, hash, same_name, layout->tensors.items, name);
}

int dray_layout_new(dray_layout **out, dray_error *error)
{
    dray_layout *layout = calloc(1, sizeof *layout);
    if (!layout)
        return dray__nomem(error);
    *out = layout;
    return DRAY_OK;
}

void dray_layout_free(dray_layout *layout)
{
    if (!layout)
        return;
    free(layout->regions.items);
    free(layout->tensors.items);
    free(layout->blocks.items);
    free(layout->ends.items);
    free(layout->behind.items);
    free(layout->quants.items);
    dray__index_free(&layout->names);
    dray__arena_free(&layout->arena);
    free(layout);
}

bool dray__dense_bytes(dray_dtype dtype, uint32_t ndim, const int64_t *extent, int64_t *bytes)
{
    /* Zeros count as ones here, so that partial products cannot overflow later either. */
    int64_t product = (int64_t)dray_dtype_size(dtype);
    bool empty = false;
    for (uint32_t d = 0; d < ndim; d++) {
        empty |= extent[d] == 0;
        if (extent[d] < 0 || __builtin_mul_overflow(product, extent[d] ? extent[d] : 1, &product))
            return false;
    }
    *bytes = empty ? 0 : product;
    return true;
}

bool dray__dense_end(dray_dtype dtype, uint32_t ndim, const int64_t *extent, uint64_t *end)
{
    int64_t bytes;
    return dray__dense_bytes(dtype, ndim, extent, &bytes) &&
           !__builtin_add_overflow(*end, (uint64_t)bytes, end) && dray__align(end);
}

void dray__dense_strides(dray_dtype dtype, uint32_t ndim, const int64_t *extent, int64_t *stride)
{
    int64_t step = (int64_t)dray_dtype_size(dtype);
    for (uint32_t d = DRAY_MAX_DIMS; d-- > 0;) {
        stride[d] = d < ndim ? step : 0;
        if (d < ndim && extent[d] > 0)
            step *= extent[d];
    }
}

char *dray__shape_text(uint32_t ndim, const int64_t *shape, char *out)
{
    size_t at = (size_t)snprintf(out, DRAY__SHAPE_TEXT, "[");
    for (uint32_t d = 0; d < ndim && d < DRAY_MAX_DIMS; d++)
        at += (size_t)snprintf(out + at, DRAY__SHAPE_TEXT - at, "%s%" PRId64, d ? ", " : "",
                               shape[d]);
    snprintf(out + at, DRAY__SHAPE_TEXT - at, "]");
    return out;
}

bool dray__align(uint64_t *at)
{
    uint64_t end;
    if (__builtin_add_overflow(*at, DRAY__PARAMETER_ALIGN - 1, &end))
        return false;
    *at = end & ~(uint64_t)(DRAY__PARAMETER_ALIGN - 1);
    return true;
}

/* Checks a name. It must be UTF-8, because names are sent in messages and JSON. */
static int check_name(const char *what, const char *name, dray_error *error)
{
    size_t size = strlen(name);
    if (size > DRAY__NAME_MAX)
        return dray__fail(error, DRAY_EINVALID, "%s name of %zu bytes, at most %d expected: %.64s",
                          what, size, DRAY__NAME_MAX, name);
    if (!dray__utf8_plain(name, size))
        return dray__fail(error, DRAY_EINVALID,
                          "%s name: UTF-8 without control characters expected", what);
    return DRAY_OK;
}

int dray_layout_add_region(dray_layout *layout, const dray_region_info *region, uint32_t *index,
                           dray_error *error)
{
    const char *name = region->name ? region->name : "";
    int status = check_name("region", name, error);
    if (status)
        return status;
    if (region->kind < DRAY_REGION_HOST || region->kind > DRAY_REGION_FILE)
        return dray__fail(error, DRAY_EINVALID, "region '%.200s': unknown kind %d", name,
                          region->kind);
    if (region->kind == DRAY_REGION_FILE && !*name)
        return dray__fail(error, DRAY_EINVALID, "a file region needs the file's path as its name");
    if (region->bytes > INT64_MAX)
        return dray__fail(error, DRAY_EINVALID, "region '%.200s': %" PRIu64 " bytes are too many",
                          name, region->bytes);
    dray_region_info *slot = array_next(&layout->regions, sizeof *slot);
    const char *copy = slot ? dray__arena_text(&layout->arena, name) : NULL;
    if (!copy)
        return dray__nomem(error);
    *slot = *region;
    slot->name = copy;
    if (region->kind != DRAY_REGION_CUDA)
        memset(slot->device, 0, sizeof slot->device);
    if (index)
        *index = layout->regions.count;
    layout->regions.count++;
    return DRAY_OK;
}

void dray__layout_set_device(dray_layout *layout, uint32_t region, const uint8_t device[16])
{
    dray_region_info *info = (dray_region_info *)layout->regions.items + region;
    if (info->kind == DRAY_REGION_CUDA)
        memcpy(info->device, device, sizeof info->device);
}

static int add_tensor(dray_layout *layout, const char *name, const dray_tensor_info *info,
                      uint32_t *index, dray_error *error)
{
    int status = check_name("tensor", name, error);
    if (status)
        return status;
    if (!*name)
        return dray__fail(error, DRAY_EINVALID, "a tensor needs a name");
    uint64_t hash = dray__name_hash(name);
    if (place_of(layout, name, hash) != DRAY__NO_PLACE)
        return dray__fail(error, DRAY_EEXIST, "tensor %.200s is in the layout already", name);
    dray_tensor_info *slot = array_next(&layout->tensors, sizeof *slot);
    block_ends *ends = array_next(&layout->ends, sizeof *ends);
    const char *copy = slot && ends ? dray__arena_text(&layout->arena, name) : NULL;
    if (!copy || !dray__index_add(&layout->names, hash))
        return dray__nomem(error);
    *slot = *info;
    slot->name = copy;
    if (index)
        *index = layout->tensors.count;
    *ends = (block_ends){0, 0};
    layout->tensors.count++;
    layout->ends.count++;
    return DRAY_OK;
}

int dray_layout_add_tensor(dray_layout *layout, const char *name, dray_dtype dtype, uint32_t ndim,
                           const int64_t *shape, uint32_t *index, dray_error *error)
{
    char text[DRAY__SHAPE_TEXT];
    int64_t bytes;
    if (!dray_dtype_size(dtype))
        return dray__fail(error, DRAY_EINVALID, "tensor %.200s: unknown dtype %d", name, dtype);
    if (ndim > DRAY_MAX_DIMS)
        return dray__fail(error, DRAY_EINVALID, "tensor %.200s: %u dimensions, at most %d expected",
                          name, ndim, DRAY_MAX_DIMS);
    if (!dray__dense_bytes(dtype, ndim, shape, &bytes))
        return dray__fail(error, DRAY_EINVALID,
                          "tensor %.200s: shape %s is negative or too large for %s", name,
                          dray__shape_text(ndim, shape, text), dray_dtype_name(dtype));
    dray_tensor_info info = {.dtype = (int32_t)dtype, .ndim = ndim, .alias_of = -1};
    for (uint32_t d = 0; d < ndim; d++)
        info.shape[d] = shape[d];
    return add_tensor(layout, name, &info, index, error);
}

int dray__layout_need_tensor(dray_layout *layout, const char *name, dray_dtype dtype, uint32_t ndim,
                             const int64_t *shape, const char *giver, uint32_t *tensor,
                             dray_error *error)
{
    char there[DRAY__SHAPE_TEXT], here[DRAY__SHAPE_TEXT];
    if (dray_layout_find(layout, name, tensor, NULL))
        return dray_layout_add_tensor(layout, name, dtype, ndim, shape, tensor, error);
    const dray_tensor_info *info = dray_layout_tensor(layout, *tensor);
    if (info->alias_of < 0 && info->ndim == ndim && info->dtype == (int32_t)dtype &&
        memcmp(info->shape, shape, ndim * sizeof *shape) == 0)
        return DRAY_OK;
    return dray__fail(error, DRAY_EINVALID,
                      "tensor %.160s is in the layout as %s %s, but %.160s gives %s %s", name,
                      dray_dtype_name((dray_dtype)info->dtype),
                      dray__shape_text(info->ndim, info->shape, there), giver,
                      dray_dtype_name(dtype), dray__shape_text(ndim, shape, here));
}

int dray__layout_give(dray_layout *layout, int status, dray_layout **out)
{
    if (status)
        dray_layout_free(layout);
    else
        *out = layout;
    return status;
}

int dray_layout_add_alias(dray_layout *layout, const char *name, uint32_t target, uint32_t *index,
                          dray_error *error)
{
    const dray_tensor_info *of = dray_layout_tensor(layout, target);
    if (!of)
        return dray__fail(error, DRAY_EINVALID, "alias %.200s: tensor %u of %u does not exist",
                          name, target, layout->tensors.count);
    dray_tensor_info info = *of;
    if (info.alias_of < 0)
        info.alias_of = (int32_t)target; /* an alias of an alias names the target of that one */
    return add_tensor(layout, name, &info, index, error);
}

static int outside_tensor(const dray_tensor_info *tensor, const dray_block *block,
                          dray_error *error)
{
    char start[DRAY__SHAPE_TEXT], extent[DRAY__SHAPE_TEXT], shape[DRAY__SHAPE_TEXT];
    return dray__fail(error, DRAY_EINVALID,
                      "tensor %.160s of shape %s: block at %s of extent %s lies outside or is "
                      "empty",
                      tensor->name, dray__shape_text(tensor->ndim, tensor->shape, shape),
                      dray__shape_text(tensor->ndim, block->start, start),
                      dray__shape_text(tensor->ndim, block->extent, extent));
}

/* Computes the bytes from the region's start to the end of the block's last element. Returns false
 * on overflow. */
static bool block_end(const dray_block *block, uint32_t ndim, uint64_t element, uint64_t *end)
{
    uint64_t at = block->offset;
    for (uint32_t d = 0; d < ndim; d++) {
        uint64_t step;
        if (__builtin_mul_overflow((uint64_t)block->extent[d] - 1, (uint64_t)block->stride[d],
                                   &step) ||
            __builtin_add_overflow(at, step, &at))
            return false;
    }
    return !__builtin_add_overflow(at, element, end);
}

static int check_block(const dray_layout *layout, const dray_block *block, dray_error *error)
{
    const dray_tensor_info *tensor = dray_layout_tensor(layout, block->tensor);
    const dray_region_info *region = dray_layout_region(layout, block->region);
    if (!tensor)
        return dray__fail(error, DRAY_EINVALID, "block of tensor %u: the layout has %u",
                          block->tensor, layout->tensors.count);
    if (tensor->alias_of >= 0)
        return dray__fail(error, DRAY_EINVALID,
                          "tensor %.200s is another name of %.200s and has no blocks of its own",
                          tensor->name,
                          dray_layout_tensor(layout, (uint32_t)tensor->alias_of)->name);
    if (!region)
        return dray__fail(error, DRAY_EINVALID, "block of tensor %.200s in region %u: there are %u",
                          tensor->name, block->region, layout->regions.count);
    for (uint32_t d = 0; d < tensor->ndim; d++) {
        if (block->start[d] < 0 || block->extent[d] <= 0 || block->start[d] > tensor->shape[d] ||
            block->extent[d] > tensor->shape[d] - block->start[d])
            return outside_tensor(tensor, block, error);
        if (block->stride[d] < 0)
            return dray__fail(error, DRAY_EINVALID,
                              "tensor %.200s: stride %" PRId64 " of dimension %u is negative",
                              tensor->name, block->stride[d], d);
    }
    uint64_t end;
    if (!block_end(block, tensor->ndim, dray_dtype_size((dray_dtype)tensor->dtype), &end) ||
        end > region->bytes)
        return dray__fail(error, DRAY_EINVALID,
                          "tensor %.160s: block at byte %" PRIu64
                          " ends outside region '%.160s' of %" PRIu64 " bytes",
                          tensor->name, block->offset, region->name, region->bytes);
    return DRAY_OK;
}

/* Appends a block to its tensor's chain. */
static void chain_block(dray_layout *layout, uint32_t block)
{
    uint32_t *behind = layout->behind.items;
    const dray_block *blocks = layout->blocks.items;
    block_ends *ends = (block_ends *)layout->ends.items + blocks[block].tensor;
    behind[block] = 0;
    if (ends->last)
        behind[ends->last - 1] = block + 1;
    else
        ends->first = block + 1;
    ends->last = block + 1;
}

int dray_layout_add_block(dray_layout *layout, const dray_block *block, dray_error *error)
{
    int status = check_block(layout, block, error);
    if (status)
        return status;
    const dray_tensor_info *tensor = dray_layout_tensor(layout, block->tensor);
    dray_block copy = *block; /* it may be in the array that grows */
    uint64_t bytes = dray_dtype_size((dray_dtype)tensor->dtype);
    for (uint32_t d = 0; d < DRAY_MAX_DIMS; d++) {
        if (d >= tensor->ndim) {
            copy.start[d] = 0;
            copy.extent[d] = 1;
            copy.stride[d] = 0;
        }
        bytes *= (uint64_t)copy.extent[d]; /* at most the tensor's bytes, which fit */
    }
    if (__builtin_add_overflow(layout->bytes, bytes, &bytes))
        return dray__fail(error, DRAY_EINVALID, "tensor %.200s: the layout's bytes overflow",
                          tensor->name);
    dray_block *slot = array_next(&layout->blocks, sizeof *slot);
    if (!slot || !array_next(&layout->behind, sizeof(uint32_t)))
        return dray__nomem(error);
    *slot = copy;
    layout->blocks.count++;
    layout->behind.count++;
    chain_block(layout, layout->blocks.count - 1);
    layout->bytes = bytes;
    return DRAY_OK;
}

int dray_layout_add_dense(dray_layout *layout, uint32_t tensor, uint32_t region,
                          const int64_t *start, const int64_t *extent, uint64_t offset,
                          dray_error *error)
{
    dray_block block = {.tensor = tensor, .region = region, .offset = offset};
    const dray_tensor_info *info = dray_layout_tensor(layout, tensor);
    int64_t bytes;
    if (info) {
        for (uint32_t d = 0; d < info->ndim; d++) {
            block.start[d] = start[d];
            block.extent[d] = extent[d];
        }
        if (!dray__dense_bytes((dray_dtype)info->dtype, info->ndim, extent, &bytes))
            return outside_tensor(info, &block, error);
        dray__dense_strides((dray_dtype)info->dtype, info->ndim, extent, block.stride);
    }
    return dray_layout_add_block(layout, &block, error);
}

uint32_t dray_layout_tensor_count(const dray_layout *layout)
{
    return layout->tensors.count;
}

uint32_t dray_layout_region_count(const dray_layout *layout)
{
    return layout->regions.count;
}

uint32_t dray_layout_block_count(const dray_layout *layout)
{
    return layout->blocks.count;
}

const dray_tensor_info *dray_layout_tensor(const dray_layout *layout, uint32_t index)
{
    return index < layout->tensors.count ? (const dray_tensor_info *)layout->tensors.items + index
                                         : NULL;
}

const dray_region_info *dray_layout_region(const dray_layout *layout, uint32_t index)
{
    return index < layout->regions.count ? (const dray_region_info *)layout->regions.items + index
                                         : NULL;
}

const dray_block *dray_layout_block(const dray_layout *layout, uint32_t index)
{
    return index < layout->blocks.count ? (const dray_block *)layout->blocks.items + index : NULL;
}

uint64_t dray_layout_bytes(const dray_layout *layout)
{
    return layout->bytes;
}

const uint64_t *dray__layout_hashes(const dray_layout *layout)
{
    return layout->names.hashes;
}

const dray_block *dray__layout_first_block(const dray_layout *layout, uint32_t tensor)
{
    const block_ends *ends = layout->ends.items;
    return ends[tensor].first ? dray_layout_block(layout, ends[tensor].first - 1) : NULL;
}

uint32_t dray__layout_block_index(const dray_layout *layout, const dray_block *block)
{
    return (uint32_t)(block - (const dray_block *)layout->blocks.items);
}

const dray_block *dray__layout_next_block(const dray_layout *layout, const dray_block *block)
{
    const uint32_t *behind = layout->behind.items;
    uint32_t next = behind[dray__layout_block_index(layout, block)];
    return next ? dray_layout_block(layout, next - 1) : NULL;
}

dray__layout_state dray__layout_state_of(const dray_layout *layout)
{
    return (dray__layout_state){layout->tensors.count, layout->blocks.count, layout->bytes};
}

void dray__layout_restore(dray_layout *layout, const dray__layout_state *before)
{
    for (; layout->tensors.count > before->tensors; layout->tensors.count--)
        dray__index_pop(&layout->names);
    layout->ends.count = layout->tensors.count;
    layout->blocks.count = layout->behind.count = before->blocks;
    layout->bytes = before->bytes;
    if (layout->ends.count)
        memset(layout->ends.items, 0, layout->ends.count * sizeof(block_ends));
    for (uint32_t block = 0; block < before->blocks; block++)
        chain_block(layout, block);
}

enum { NEAREST = 3 };

/* Gets the layout's nearest names, best first, and returns their number. */
static size_t nearest_names(const dray_layout *layout, const char *name, const char **near)
{
    size_t count = 0, distances[NEAREST], limit = 1 + strlen(name) / 3;
    for (uint32_t i = 0; i < layout->tensors.count; i++) {
        const char *other = dray_layout_tensor(layout, i)->name;
        size_t distance = dray__word_distance(name, other);
        if (distance > limit || distance == DRAY__WORD_FAR ||
            (count == NEAREST && distance >= distances[count - 1]))
            continue;
        size_t at = count < NEAREST ? count++ : count - 1;
        for (; at > 0 && distances[at - 1] > distance; at--) {
            distances[at] = distances[at - 1];
            near[at] = near[at - 1];
        }
        distances[at] = distance;
        near[at] = other;
    }
    return count;
}

int dray_layout_find(const dray_layout *layout, const char *name, uint32_t *index,
                     dray_error *error)
{
    uint32_t place = place_of(layout, name, dray__name_hash(name));
    if (place != DRAY__NO_PLACE) {
        *index = place;
        return DRAY_OK;
    }
    if (!error)
        return DRAY_ENOENT;
    const char *near[NEAREST];
    size_t count = nearest_names(layout, name, near);
    char list[256] = "";
    for (size_t i = 0, at = 0; i < count && at < sizeof list; i++)
        at += (size_t)snprintf(list + at, sizeof list - at, "%s%s",
                               i ? ", " : "; nearest: ", near[i]);
    return dray__fail(error, DRAY_ENOENT, "no tensor %.160s among %u%s", name,
                      layout->tensors.count, list);
}

/* ---- quantised tensors ----------------------------------------------------------------------- */

typedef struct quant_slot {
    dray_quant quant; /* kind NONE: not quantised */
    uint32_t owner;   /* for a part, 1 + the tensor that it belongs to; else 0 */
    int32_t part;
} quant_slot;

static quant_slot *slot_of(const dray_layout *layout, uint32_t tensor)
{
    return tensor < layout->quants.count ? (quant_slot *)layout->quants.items + tensor : NULL;
}

const dray_quant *dray_layout_quant(const dray_layout *layout, uint32_t tensor)
{
    const dray_tensor_info *info = dray_layout_tensor(layout, tensor);
    if (info && info->alias_of >= 0)
        tensor = (uint32_t)info->alias_of;
    const quant_slot *slot = slot_of(layout, tensor);
    return slot && slot->quant.kind != DRAY_QUANT_NONE ? &slot->quant : NULL;
}

bool dray__layout_part_of(const dray_layout *layout, uint32_t index, uint32_t *tensor, int *part)
{
    const quant_slot *slot = slot_of(layout, index);
    if (!slot || !slot->owner)
        return false;
    *tensor = slot->owner - 1;
    *part = slot->part;
    return true;
}

/* Sets or clears the owner of all parts of a quantised tensor. */
static void own_parts(dray_layout *layout, uint32_t tensor, bool owned)
{
    int64_t cell[DRAY_MAX_DIMS];
    uint32_t index;
    for (int part = 0; part < DRAY__QUANT_PARTS; part++)
        if (dray__quant_part(layout, tensor, part, &index, cell)) {
            slot_of(layout, index)->owner = owned ? tensor + 1 : 0;
            slot_of(layout, index)->part = part;
        }
}

bool dray__layout_put_quant(dray_layout *layout, uint32_t tensor, const dray_quant *quant)
{
    while (quant && layout->quants.count < layout->tensors.count) {
        quant_slot *next = array_next(&layout->quants, sizeof *next);
        if (!next)
            return false;
        *next = (quant_slot){0};
        layout->quants.count++;
    }
    quant_slot *slot = slot_of(layout, tensor);
    if (!slot)
        return true;
    own_parts(layout, tensor, false);
    slot->quant = quant ? *quant : (dray_quant){0};
    own_parts(layout, tensor, true);
    return true;
}

bool dray__layout_quantised(const dray_layout *layout)
{
    return layout->quants.count > 0;
}

/* ---- dtypes, and the names of regions' kinds ------------------------------------------------- */

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

bool dray__is_float(int32_t dtype)
{
    return dtype >= DRAY_F64 && dtype <= DRAY_F16;
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
