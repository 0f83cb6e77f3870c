/* Application of deltas by GPUs (program.h). The destination's GPU reads slots and entries from the
 * publisher's store, which is pinned memory, and slices that changed too much from the block
 * itself. The updated elements are read back as a whole, as if all of them had been copied. */
#include "base/error.h"
#include "memory/cuda_memory.h"
#include "weights/delta/delta.h"
#include "weights/program/compile.h"

#include <string.h>

/* When at least one slice in so many is read whole, the op is copied instead. */
enum { FEW = 2 };

static const dray_region *store_of(const dray__source *source)
{
    return source->regions[dray_layout_region_count(source->layout)];
}

/* Returns true when few slices are full, by the slots of the delta. */
static bool is_sparse(const dray__transfer *h, const dray__op *op, uint32_t block)
{
    dray__rect rect = dray__copy_rect(&op->copy);
    dray__delta_walk walk;
    dray__delta_part part;
    uint64_t slices = 0, full = 0;
    dray__delta_start(dray__delta_of(&h->sources->sources[op->copy.source]), block, &rect, &walk);
    int rc;
    while ((rc = dray__delta_next(&walk, &part, NULL)) == DRAY_OK) {
        slices++;
        full += part.full ||
                (uint64_t)part.count * DRAY__DELTA_GPU_SPARSE > dray__rect_elements(&part.slice);
    }
    return rc == DRAY_EEND && full * FEW < slices;
}

bool dray__patch_takes(const dray__transfer *h, const dray__op *op)
{
    if (!h->options.has_base || op->transform)
        return false;
    const dray__source *source = &h->sources->sources[op->copy.source];
    const dray_region *to = h->destination->regions[op->copy.destination_region];
    int32_t from = dray_layout_region(source->layout, op->copy.source_region)->kind;
    if (!dray__delta_of(source) || !to || dray_region_get_kind(to) != DRAY_REGION_CUDA ||
        from != DRAY_REGION_CUDA || dray_region_get_kind(store_of(source)) != DRAY_REGION_PINNED ||
        !dray__delta_offered(h, op))
        return false;
    uint32_t block = dray__delta_block(h, op);
    return block != DRAY__DELTA_NO_BLOCK && is_sparse(h, op, block);
}

static dray__cuda_delta delta_of(const dray__transfer *h, const dray__op *op,
                                 const dray__ends *ends)
{
    const dray__source *source = &h->sources->sources[op->copy.source];
    const dray_copy *copy = &op->copy;
    const dray_region *store = store_of(source);
    uint32_t index = dray__delta_block(h, op);
    const dray_block *block = dray_layout_block(source->layout, index);
    dray__slicer slicer;
    dray__delta_cut(source->layout, index, &slicer);
    dray__cuda_delta d = {.kind = DRAY__CUDA_APPLY,
                          .dtype = copy->source_dtype,
                          .sent = copy->source_dtype,
                          .ndim = copy->ndim,
                          .source = ends->from->device_address + block->offset,
                          .table = store->device_address +
                                   dray__delta_slot(dray__delta_of(source), index),
                          .store = store->device_address,
                          .store_bytes = dray_region_bytes(store),
                          .destination = ends->to->device_address + copy->destination_offset,
                          .lane = ends->lane};
    for (uint32_t i = 0; i < copy->ndim; i++) {
        d.extent[i] = slicer.whole.extent[i];
        d.tile[i] = slicer.tile[i];
        d.source_stride[i] = copy->source_stride[i];
        d.low[i] = copy->start[i] - slicer.whole.start[i];
        d.wanted[i] = copy->extent[i];
        d.destination_stride[i] = copy->destination_stride[i];
    }
    return d;
}

/* Compiles an op. Its entries are counted and checked even without verification. */
static int compile_patch(dray__compiler *c, const dray__op *op, dray_error *error)
{
    const dray__transfer *h = c->transfer;
    const dray__source *source = &h->sources->sources[op->copy.source];
    dray__ends ends;
    int rc = dray__ends_of(c, &op->copy, h->destination->regions[op->copy.destination_region],
                           &ends, error);
    if (rc == DRAY_OK)
        rc = dray__region_reach(store_of(source), ends.device, error);
    if (rc)
        return rc;
    dray__rect rect = dray__copy_rect(&op->copy);
    dray__cuda_delta d = delta_of(h, op, &ends);
    dray__entry patched = {.kind = DRAY__ENTRY_PATCHED};
    dray__entry lies = {.elements = dray__rect_elements(&rect),
                        .block = op->block,
                        .tensor = op->copy.tensor,
                        .dtype = (uint8_t)op->copy.source_dtype,
                        .kind = DRAY__ENTRY_LIES,
                        .owned = op->owned};
    dray__cuda_item item = {.copy = op->copy, .source_base = ends.to->device_address};
    item.copy.source_offset = op->copy.destination_offset;
    memcpy(item.copy.source_stride, op->copy.destination_stride, sizeof item.copy.source_stride);
    const uint32_t sums = DRAY__CUDA_SUM_SOURCE | DRAY__CUDA_SUM_WRITTEN | DRAY__CUDA_SUM_BACK;
    bool pushed =
        dray__draft_add(dray__draft_of(c, ends.device, sums, 0), DRAY__DRAFT_DELTAS, &d,
                        &patched) &&
        (!h->options.verify ||
         dray__draft_push(dray__draft_of(c, ends.device, DRAY__CUDA_SUM_SOURCE, 1), &item, &lies));
    return pushed ? DRAY_OK : dray__nomem(error);
}

int dray__compile_patches(dray__compiler *c, dray_error *error)
{
    int rc = DRAY_OK;
    for (uint64_t i = 0; i < c->program->count && rc == DRAY_OK; i++)
        rc = compile_patch(c, &c->transfer->sources->ops[c->program->ops[i]], error);
    return rc;
}
