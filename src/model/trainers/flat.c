/* FSDP1's flat parameters: ranges of flattened tensors as rectangles. A FlatParameter is the
 * concatenation of a module's parameters, each flattened, cut into equal shares without regard to
 * rows; its metadata say which elements of which parameter a rank's share has. After
 * torch/distributed/fsdp/_flat_param.py (FlatParamHandle: _init_flat_param_and_metadata, _get_shard
 * and _get_shard_metadata). */
#include "model/layout/layout.h"

#include "base/error.h"
#include "base/options.h"

#include <inttypes.h>
#include <stdlib.h>
#include <string.h>

/* A range of a tensor that is being cut; `block` has the coordinates of the dimensions before the
 * current one, and the tensor's own strides. */
typedef struct ranging {
    dray_layout *layout;
    dray_block block;
    uint64_t offset;               /* of the range's first element */
    int64_t first;                 /* the range's first element */
    uint32_t ndim;                 /* of the tensor */
    int64_t below[DRAY_MAX_DIMS];  /* elements of one step along each dimension */
    int64_t extent[DRAY_MAX_DIMS]; /* the tensor's shape */
    dray_error *error;
} ranging;

static int add_rectangle(ranging *r, uint32_t d, int64_t start, int64_t count)
{
    dray_block *b = &r->block;
    int64_t at = 0;
    b->start[d] = start;
    b->extent[d] = count;
    for (uint32_t k = d + 1; k < r->ndim; k++) {
        b->start[k] = 0;
        b->extent[k] = r->extent[k];
    }
    for (uint32_t k = 0; k < r->ndim; k++)
        at += b->start[k] * r->below[k];
    b->offset = r->offset + (uint64_t)((at - r->first) * (b->stride[r->ndim - 1]));
    return dray_layout_add_block(r->layout, b, r->error);
}

/* Adds elements [a, b) of the part below the fixed dimensions, as an incomplete first row, whole
 * rows, and an incomplete last row. An incomplete first row reaches its end, and an incomplete last
 * row begins at its start, so there are at most 2 x ndim - 1 rectangles. */
static int add_elements(ranging *r, uint32_t d, int64_t a, int64_t b)
{
    int64_t row = r->below[d], first = a / row, last = b / row;
    int status = DRAY_OK;
    r->block.extent[d] = 1;
    if (first == last) {
        r->block.start[d] = first;
        return add_elements(r, d + 1, a - first * row, b - first * row);
    }
    if (a % row) {
        r->block.start[d] = first;
        status = add_elements(r, d + 1, a % row, row);
        first++;
    }
    if (!status && first < last)
        status = add_rectangle(r, d, first, last - first);
    if (!status && b % row) {
        r->block.start[d] = last;
        r->block.extent[d] = 1;
        status = add_elements(r, d + 1, 0, b % row);
    }
    return status;
}

static bool range_ends(uint64_t offset, int64_t count, size_t element, uint64_t *end)
{
    return !__builtin_mul_overflow((uint64_t)count, element, end) &&
           !__builtin_add_overflow(*end, offset, end);
}

int dray_layout_add_range(dray_layout *layout, uint32_t tensor, uint32_t region, uint64_t offset,
                          int64_t first, int64_t count, dray_error *error)
{
    const dray_tensor_info *info = dray_layout_tensor(layout, tensor);
    const dray_region_info *where = dray_layout_region(layout, region);
    if (!info || info->alias_of >= 0)
        return dray__fail(error, DRAY_EINVALID, "tensor %u does not exist or is an alias", tensor);
    if (!where)
        return dray__fail(error, DRAY_EINVALID, "tensor %.200s: region %u does not exist",
                          info->name, region);
    ranging r = {.layout = layout,
                 .block = {.tensor = tensor, .region = region},
                 .offset = offset,
                 .first = first,
                 .ndim = info->ndim ? info->ndim : 1, /* a scalar is a row of one */
                 .error = error};
    size_t element = dray_dtype_size((dray_dtype)info->dtype);
    int64_t numel = 1;
    uint64_t end;
    for (uint32_t d = r.ndim; d-- > 0;) {
        r.below[d] = numel;
        r.extent[d] = info->ndim ? info->shape[d] : 1;
        r.block.stride[d] = numel * (int64_t)element;
        numel *= r.extent[d];
    }
    if (first < 0 || count < 0 || first > numel || count > numel - first)
        return dray__fail(error, DRAY_EINVALID,
                          "tensor %.200s: elements [%" PRId64 ", %" PRId64 " + %" PRId64
                          ") of %" PRId64,
                          info->name, first, first, count, numel);
    if (!range_ends(offset, count, element, &end) || end > where->bytes)
        return dray__fail(error, DRAY_EINVALID,
                          "tensor %.160s: %" PRId64 " elements at byte %" PRIu64
                          " end outside region '%.160s' of %" PRIu64 " bytes",
                          info->name, count, offset, where->name, where->bytes);
    return count ? add_elements(&r, 0, first, first + count) : DRAY_OK;
}

/* Prefixes that wrappers of modules (FSDP, activation checkpointing, torch.compile) add to
 * parameters' names. */
static const char *const wrappers[] = {"_fsdp_wrapped_module.", "_checkpoint_wrapped_module.",
                                       "_orig_mod."};

/* Returns prefix + name without the wrappers' parts, malloc'ed. */
static char *clean_name(const char *prefix, const char *name)
{
    char *text = malloc(strlen(prefix) + strlen(name) + 1);
    if (!text)
        return NULL;
    strcpy(stpcpy(text, prefix), name);
    for (size_t i = 0; i < sizeof wrappers / sizeof *wrappers; i++)
        for (char *at = text; (at = strstr(at, wrappers[i]));) {
            const char *rest = at + strlen(wrappers[i]);
            if (at == text || at[-1] == '.')
                memmove(at, rest, strlen(rest) + 1);
            else
                at++;
        }
    return text;
}

static bool in_shard(const dray_flat_piece *piece)
{
    return piece->last >= piece->first;
}

/* Checks a piece. *end is the earliest offset at which it may begin in the shard, and becomes its
 * end. */
static int check_piece(const dray_flat_parameter *flat, const dray_flat_piece *piece, int64_t *end,
                       dray_error *error)
{
    char text[DRAY__SHAPE_TEXT];
    int64_t bytes, room = flat->numel - flat->padding;
    if (piece->ndim > DRAY_MAX_DIMS ||
        !dray__dense_bytes((dray_dtype)flat->dtype, piece->ndim, piece->shape, &bytes))
        return dray__fail(error, DRAY_EINVALID, "flat parameter: %.200s: %u dimensions of shape %s",
                          piece->name, piece->ndim,
                          dray__shape_text(piece->ndim, piece->shape, text));
    if (!in_shard(piece))
        return DRAY_OK;
    int64_t numel = bytes / (int64_t)dray_dtype_size((dray_dtype)flat->dtype);
    if (piece->first < 0 || piece->last >= numel)
        return dray__fail(error, DRAY_EINVALID,
                          "flat parameter: %.200s: elements %" PRId64 " to %" PRId64 " of %" PRId64,
                          piece->name, piece->first, piece->last, numel);
    int64_t count = piece->last - piece->first + 1;
    if (piece->offset < *end || piece->offset > room || count > room - piece->offset)
        return dray__fail(error, DRAY_EINVALID,
                          "flat parameter: %.200s: %" PRId64 " elements at %" PRId64
                          " of the shard, expected between %" PRId64 " and %" PRId64,
                          piece->name, count, piece->offset, *end, room);
    *end = piece->offset + count;
    return DRAY_OK;
}

static int check_flat(const dray_layout *layout, uint32_t region, uint64_t offset,
                      const dray_flat_parameter *flat, dray_error *error)
{
    const dray_region_info *where = dray_layout_region(layout, region);
    size_t element = dray_dtype_size((dray_dtype)flat->dtype);
    uint64_t end;
    if (!element)
        return dray__fail(error, DRAY_EINVALID, "flat parameter: unknown dtype %d", flat->dtype);
    if (!where)
        return dray__fail(error, DRAY_EINVALID, "flat parameter: region %u does not exist", region);
    if (flat->numel < 0 || flat->padding < 0 || flat->padding > flat->numel)
        return dray__fail(error, DRAY_EINVALID,
                          "flat parameter: %" PRId64 " elements of which %" PRId64 " are padding",
                          flat->numel, flat->padding);
    if (!range_ends(offset, flat->numel, element, &end) || end > where->bytes)
        return dray__fail(error, DRAY_EINVALID,
                          "flat parameter: %" PRId64 " elements at byte %" PRIu64
                          " end outside region '%.160s' of %" PRIu64 " bytes",
                          flat->numel, offset, where->name, where->bytes);
    if (!flat->count && flat->numel > flat->padding)
        return dray__fail(error, DRAY_EINVALID,
                          "flat parameter of %" PRId64
                          " elements without metadata: which parameters they belong to is not in a "
                          "local state dict; give FlatParameter's _fqns, _shapes and "
                          "_shard_param_infos, or use StateDictType.SHARDED_STATE_DICT",
                          flat->numel);
    int64_t at = 0;
    for (uint32_t i = 0; i < flat->count; i++) {
        int status = check_piece(flat, &flat->pieces[i], &at, error);
        if (status)
            return status;
    }
    return DRAY_OK;
}

static int add_named(dray_layout *layout, uint32_t region, uint64_t offset,
                     const dray_flat_parameter *flat, const dray_flat_piece *piece,
                     const char *name, dray_error *error)
{
    uint32_t tensor;
    int64_t count = in_shard(piece) ? piece->last - piece->first + 1 : 0;
    int64_t first = count ? piece->first : 0;
    if (count)
        offset += (uint64_t)piece->offset * dray_dtype_size((dray_dtype)flat->dtype);
    if (flat->config) {
        dray__module_range range = {.name = name,
                                    .dtype = (dray_dtype)flat->dtype,
                                    .ndim = piece->ndim,
                                    .shape = piece->shape,
                                    .first = first,
                                    .count = count};
        return dray__layout_add_module_range(layout, flat->config, &range, region, offset, error);
    }
    int status = dray__layout_need_tensor(layout, name, (dray_dtype)flat->dtype, piece->ndim,
                                          piece->shape, "the flat parameter", &tensor, error);
    return status || !count
               ? status
               : dray_layout_add_range(layout, tensor, region, offset, first, count, error);
}

static int add_piece(dray_layout *layout, uint32_t region, uint64_t offset,
                     const dray_flat_parameter *flat, const dray_flat_piece *piece,
                     dray_error *error)
{
    char *name = clean_name(flat->prefix ? flat->prefix : "", piece->name);
    if (!name)
        return dray__nomem(error);
    int status = add_named(layout, region, offset, flat, piece, name, error);
    free(name);
    return status;
}

int dray_layout_add_flat(dray_layout *layout, uint32_t region, uint64_t offset,
                         const dray_flat_parameter *given, dray_error *error)
{
    dray_flat_parameter flat = DRAY_FLAT_PARAMETER_INIT;
    int status = DRAY__OPTIONS_READ(dray_flat_parameter, count, &flat, given, error);
    if (!status)
        status = check_flat(layout, region, offset, &flat, error);
    if (status)
        return status;
    const dray__layout_state before = dray__layout_state_of(layout);
    for (uint32_t i = 0; i < flat.count && !status; i++)
        status = add_piece(layout, region, offset, &flat, &flat.pieces[i], error);
    if (status)
        dray__layout_restore(layout, &before);
    return status;
}
