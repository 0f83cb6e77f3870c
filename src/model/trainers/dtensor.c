/* DTensor placements as blocks. Along one dimension of the tensor, a rank's shard is a list of
 * segments of the global index range, in the order in which they are in local memory. Each
 * placement on that dimension replaces the list by parts of it; the blocks are the cross product of
 * the dimensions' lists. After torch/distributed/tensor/placement_types.py (Shard and
 * _StridedShard: _split_tensor) and _utils.py (compute_local_shape_and_global_offset). */
#include "model/layout/layout.h"

#include "base/array.h"
#include "base/error.h"

#include <inttypes.h>
#include <stdlib.h>
#include <string.h>

typedef struct segment {
    int64_t start, length;
} segment;

typedef struct segments {
    segment *items;
    size_t count, capacity;
    int64_t total; /* elements of all segments */
} segments;

/* More pieces than this come from a forged split factor, not from a placement. */
enum { MOST_PIECES = 1 << 20 };

/* Appends a segment, merged with its predecessor if they are adjacent. */
static bool append(segments *list, int64_t start, int64_t length)
{
    segment *last = list->count ? &list->items[list->count - 1] : NULL;
    list->total += length;
    if (last && last->start + last->length == start) {
        last->length += length;
        return true;
    }
    return DRAY__PUSH(list->items, list->count, list->capacity, (segment){start, length});
}

/* torch.chunk: all pieces have ceil(size / count) elements but the last ones, which may have fewer
 * or none. Piece i of [0, size) is [*start, *start + *length). */
static void chunk(int64_t size, int64_t count, int64_t i, int64_t *start, int64_t *length)
{
    int64_t each = size / count + (size % count != 0);
    if (__builtin_mul_overflow(each, i, start) || *start > size)
        *start = size;
    *length = size - *start < each ? size - *start : each;
}

/* A cursor into the local order of a list; slices must ascend. */
typedef struct cursor {
    size_t index;   /* segment */
    int64_t before; /* elements of all segments before it */
} cursor;

/* Appends the elements [start, start + length) of `from`, in local order, to `to`. */
static bool slice(const segments *from, cursor *at, int64_t start, int64_t length, segments *to)
{
    while (length > 0) {
        const segment *s = &from->items[at->index];
        int64_t skip = start - at->before;
        if (skip >= s->length) {
            at->before += s->length;
            at->index++;
            continue;
        }
        int64_t take = s->length - skip < length ? s->length - skip : length;
        if (!append(to, s->start + skip, take))
            return false;
        start += take;
        length -= take;
    }
    return true;
}

/* Shard is _StridedShard with one split: chunk into split_factor pieces, each of them into as many
 * as the mesh dimension has ranks, and take this rank's piece of each. */
static int cut(segments *list, int64_t splits, int64_t ranks, int64_t rank, dray_error *error)
{
    if (splits > list->total)
        splits = list->total; /* the rest are empty pieces; chunk sizes stay one */
    if (splits > MOST_PIECES)
        return dray__fail(error, DRAY_EUNSUPPORTED, "split factor %" PRId64 ", at most %d expected",
                          splits, MOST_PIECES);
    segments next = {0};
    cursor at = {0};
    for (int64_t i = 0; i < splits; i++) {
        int64_t first, size, start, length;
        chunk(list->total, splits, i, &first, &size);
        chunk(size, ranks, rank, &start, &length);
        if (!slice(list, &at, first + start, length, &next)) {
            free(next.items);
            return dray__nomem(error);
        }
    }
    free(list->items);
    *list = next;
    return DRAY_OK;
}

static int check_mesh(const dray_mesh *mesh, const int64_t *coordinate,
                      const dray_tensor_info *tensor, dray_error *error)
{
    if (mesh->ndim < 1 || mesh->ndim > 8)
        return dray__fail(error, DRAY_EINVALID, "mesh of %u dimensions, expected 1 to 8",
                          mesh->ndim);
    for (uint32_t m = 0; m < mesh->ndim; m++) {
        const dray_placement *p = &mesh->placements[m];
        if (mesh->shape[m] < 1 || coordinate[m] < 0 || coordinate[m] >= mesh->shape[m])
            return dray__fail(error, DRAY_EINVALID,
                              "mesh dimension %u: coordinate %" PRId64 " of %" PRId64, m,
                              coordinate[m], mesh->shape[m]);
        if (p->kind == DRAY_REPLICATE)
            continue;
        if (p->kind == DRAY_PARTIAL)
            return dray__fail(error, DRAY_EUNSUPPORTED,
                              "tensor %.200s: Partial on mesh dimension %u: the value exists on no "
                              "rank; redistribute it first",
                              tensor->name, m);
        if (p->kind != DRAY_SHARD && p->kind != DRAY_STRIDED_SHARD)
            return dray__fail(error, DRAY_EINVALID, "mesh dimension %u: unknown placement %d", m,
                              p->kind);
        if (p->dim < 0 || (uint32_t)p->dim >= tensor->ndim)
            return dray__fail(error, DRAY_EINVALID,
                              "tensor %.200s has %u dimensions; mesh dimension %u shards "
                              "dimension %d",
                              tensor->name, tensor->ndim, m, p->dim);
        if (p->kind == DRAY_STRIDED_SHARD && p->split_factor < 1)
            return dray__fail(error, DRAY_EINVALID,
                              "mesh dimension %u: split factor %" PRId64 ", at least 1 expected", m,
                              p->split_factor);
    }
    return DRAY_OK;
}

static int cut_all(segments *lists, const dray_tensor_info *tensor, const dray_mesh *mesh,
                   const int64_t *coordinate, dray_error *error)
{
    for (uint32_t d = 0; d < tensor->ndim; d++)
        if (tensor->shape[d] > 0 && !append(&lists[d], 0, tensor->shape[d]))
            return dray__nomem(error);
    for (uint32_t m = 0; m < mesh->ndim; m++) {
        const dray_placement *p = &mesh->placements[m];
        if (p->kind == DRAY_REPLICATE)
            continue;
        int64_t splits = p->kind == DRAY_SHARD ? 1 : p->split_factor;
        int status = cut(&lists[p->dim], splits, mesh->shape[m], coordinate[m], error);
        if (status)
            return dray__fail_prefix(error, status, "tensor %.200s: ", tensor->name);
    }
    return DRAY_OK;
}

/* Adds blocks for all combinations of the dimensions' segments. Local memory is dense over
 * `local`. */
static int add_product(dray_layout *layout, uint32_t tensor, uint32_t region, uint64_t offset,
                       const segments *lists, const int64_t *local, dray_error *error)
{
    const dray_tensor_info *info = dray_layout_tensor(layout, tensor);
    uint32_t ndim = info->ndim;
    dray_block block = {.tensor = tensor, .region = region};
    size_t at[DRAY_MAX_DIMS] = {0};
    int64_t place[DRAY_MAX_DIMS] = {0}; /* local position of the current segments */
    dray__dense_strides((dray_dtype)info->dtype, ndim, local, block.stride);
    for (;;) {
        block.offset = offset;
        for (uint32_t d = 0; d < ndim; d++) {
            block.start[d] = lists[d].items[at[d]].start;
            block.extent[d] = lists[d].items[at[d]].length;
            block.offset += (uint64_t)(place[d] * block.stride[d]);
        }
        int status = dray_layout_add_block(layout, &block, error);
        if (status)
            return status;
        uint32_t d = ndim;
        for (; d > 0; d--) {
            place[d - 1] += block.extent[d - 1];
            if (++at[d - 1] < lists[d - 1].count)
                break;
            at[d - 1] = 0;
            place[d - 1] = 0;
        }
        if (d == 0)
            return DRAY_OK;
    }
}

/* Checks that the whole shard fits, before the first of its blocks is added. */
static int check_room(const dray_layout *layout, const dray_tensor_info *tensor, uint32_t region,
                      uint64_t offset, const segments *lists, const int64_t *local, int64_t *bytes,
                      dray_error *error)
{
    const dray_region_info *info = dray_layout_region(layout, region);
    char text[DRAY__SHAPE_TEXT];
    uint64_t end, pieces = 1;
    if (!info)
        return dray__fail(error, DRAY_EINVALID, "tensor %.200s: region %u does not exist",
                          tensor->name, region);
    dray__dense_bytes((dray_dtype)tensor->dtype, tensor->ndim, local, bytes);
    if (__builtin_add_overflow(offset, (uint64_t)*bytes, &end) || end > info->bytes)
        return dray__fail(error, DRAY_EINVALID,
                          "tensor %.160s: local shard %s at byte %" PRIu64
                          " ends outside region '%.160s' of %" PRIu64 " bytes",
                          tensor->name, dray__shape_text(tensor->ndim, local, text), offset,
                          info->name, info->bytes);
    for (uint32_t d = 0; d < tensor->ndim && *bytes; d++)
        if (__builtin_mul_overflow(pieces, lists[d].count, &pieces) || pieces > MOST_PIECES)
            return dray__fail(error, DRAY_EUNSUPPORTED,
                              "tensor %.200s: the shard has more than %d pieces", tensor->name,
                              MOST_PIECES);
    return DRAY_OK;
}

int dray_layout_add_dtensor(dray_layout *layout, uint32_t tensor, uint32_t region, uint64_t offset,
                            const dray_mesh *mesh, const int64_t *coordinate, int64_t *local_shape,
                            dray_error *error)
{
    const dray_tensor_info *found = dray_layout_tensor(layout, tensor);
    if (!found || found->alias_of >= 0)
        return dray__fail(error, DRAY_EINVALID, "tensor %u does not exist or is an alias", tensor);
    const dray_tensor_info info = *found;
    int status = check_mesh(mesh, coordinate, &info, error);
    if (status)
        return status;
    segments lists[DRAY_MAX_DIMS] = {0};
    int64_t local[DRAY_MAX_DIMS] = {0}, bytes = 0;
    status = cut_all(lists, &info, mesh, coordinate, error);
    for (uint32_t d = 0; d < info.ndim; d++)
        local[d] = lists[d].total;
    if (!status)
        status = check_room(layout, &info, region, offset, lists, local, &bytes, error);
    if (!status && bytes > 0)
        status = add_product(layout, tensor, region, offset, lists, local, error);
    for (uint32_t d = 0; d < DRAY_MAX_DIMS; d++)
        free(lists[d].items);
    if (!status && local_shape)
        memcpy(local_shape, local, info.ndim * sizeof *local);
    return status;
}
