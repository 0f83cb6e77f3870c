/* Checksums of blocks, whole tensors and running sessions. */
#include "base/clock.h"
#include "base/error.h"
#include "model/layout/layout.h"
#include "mover/mover.h"
#include "weights/messages.h"
#include "weights/source_sums.h"

#include <inttypes.h>
#include <stdlib.h>
#include <unistd.h>

enum { ASK_AGAIN_US = 1000 };

/* Sums a rectangle in a file, which is read slice by slice into scratch. */
static int sum_file(const dray_layout *layout, dray_region *source, const dray_block *block,
                    const dray__rect *rect, dray_region **scratch, uint64_t *sum, dray_error *error)
{
    const dray_tensor_info *tensor = dray_layout_tensor(layout, block->tensor);
    if (!*scratch) {
        int rc = dray_region_alloc(DRAY_REGION_HOST, DRAY__FILE_SLICE_BYTES, "checksum scratch",
                                   scratch, error);
        if (rc)
            return rc;
    }
    dray_copy whole = dray__block_copy(layout, dray__layout_block_index(layout, block));
    whole.ndim = tensor->ndim ? tensor->ndim : 1;
    dray__slicer slicer;
    dray__rect slice;
    dray__slicer_start(&slicer, rect, dray_dtype_size((dray_dtype)tensor->dtype),
                       DRAY__FILE_SLICE_BYTES);
    for (; dray__slicer_peek(&slicer, &slice); dray__slicer_next(&slicer)) {
        dray_copy copy = dray__copy_cut(&whole, &slice);
        dray__copy_to_dense(&copy, tensor->dtype, 0);
        int rc = dray__move_all(source, *scratch, &copy, 1, NULL, error);
        if (rc)
            return rc;
        dray__sum_of part = {tensor->dtype,
                             tensor->ndim,
                             tensor->shape,
                             slice.start,
                             slice.extent,
                             copy.destination_stride,
                             dray_region_base(*scratch)};
        *sum += dray__sum(&part);
    }
    return DRAY_OK;
}

int dray__sum_rect(const dray_layout *layout, dray_region *const *regions, uint32_t index,
                   const dray__rect *rect, dray_region **scratch, uint64_t *sum, dray_error *error)
{
    const dray_block *block = dray_layout_block(layout, index);
    const dray_tensor_info *tensor = dray_layout_tensor(layout, block->tensor);
    dray_region *region = regions[block->region];
    if (dray_region_get_kind(region) == DRAY_REGION_FILE)
        return sum_file(layout, region, block, rect, scratch, sum, error);
    uint64_t offset = block->offset;
    for (uint32_t d = 0; d < tensor->ndim; d++)
        offset += (uint64_t)(rect->start[d] - block->start[d]) * (uint64_t)block->stride[d];
    uint64_t found = 0;
    dray__sum_part part = {offset,
                           {tensor->dtype, tensor->ndim, tensor->shape, rect->start, rect->extent,
                            block->stride, NULL}};
    int rc = dray__sum_region(region, &part, 1, &found, error);
    *sum += found;
    return rc;
}

/* Sums the pieces that the CPU reads. */
static int sum_here(const dray_layout *layout, dray_region *const *regions,
                    const dray__pieces *pieces, dray__patience *patience, dray__sums *out,
                    dray_error *error)
{
    dray_region *scratch = NULL;
    int rc = DRAY_OK;
    for (uint32_t i = 0; i < pieces->count && rc == DRAY_OK; i++) {
        if ((rc = dray__patience_ends(patience, error)))
            break;
        const dray__piece *piece = &pieces->items[i];
        const dray_block *block = dray_layout_block(layout, piece->block);
        if (!piece->owned || dray__sums_by_gpu(regions[block->region]))
            continue;
        const dray_tensor_info *tensor = dray_layout_tensor(layout, block->tensor);
        uint64_t sum = 0;
        rc = dray__sum_rect(layout, regions, piece->block, &piece->rect, &scratch, &sum, error);
        if (rc == DRAY_OK && !dray__sums_add(out, tensor->name, tensor->dtype,
                                             dray__rect_elements(&piece->rect), sum))
            rc = dray__nomem(error);
    }
    dray_region_free(scratch);
    return rc;
}

int dray__sum_started(const dray_layout *layout, dray_region *const *regions,
                      const dray__pieces *pieces, dray__source_sums *gpus, dray__patience *patience,
                      dray__sums *out, dray_error *error)
{
    int rc = sum_here(layout, regions, pieces, patience, out, error);
    if (rc == DRAY_OK && gpus)
        return dray__source_sums_finish(gpus, patience, out, error);
    if (gpus)
        dray__source_sums_abort(gpus);
    return rc;
}

int dray__sum_pieces(const dray_layout *layout, dray_region *const *regions,
                     const dray__pieces *pieces, dray__sums *out, dray_error *error)
{
    dray__source_sums *gpus = NULL;
    dray__patience patience = {.deadline_ns = INT64_MAX};
    int rc = dray__source_sums_new(layout, regions, pieces, &gpus, error);
    if (rc == DRAY_OK && gpus)
        rc = dray__source_sums_start(gpus, NULL, &patience, error);
    if (rc == DRAY_OK)
        rc = dray__sum_started(layout, regions, pieces, gpus, &patience, out, error);
    dray__source_sums_free(gpus);
    return rc;
}

int dray_checksums_compute(const dray_layout *layout, dray_region *const *regions,
                           dray_checksums **out, dray_error *error)
{
    if (!layout || !out)
        return dray__fail(error, DRAY_EINVALID, "layout and out must be given");
    int rc = dray__regions_check(layout, regions, error);
    if (rc)
        return rc;
    dray_checksums *sums = calloc(1, sizeof *sums);
    if (!sums)
        return dray__nomem(error);
    dray__holder self = {layout, NULL};
    dray__pieces pieces;
    rc = dray__pieces_make(&self, 0, &pieces, error);
    if (rc == DRAY_OK) {
        rc = dray__sum_pieces(layout, regions, &pieces, &sums->sums, error);
        dray__pieces_free(&pieces);
    }
    if (rc)
        dray_checksums_free(sums);
    else
        *out = sums;
    return rc;
}

/* Asks for sums, and repeats while publishers still compute them. */
static int ask_for_sums(dray__channel *channel, const dray__sums_asked *asked, int64_t deadline_ns,
                        dray__reply *reply, dray_error *error)
{
    int rc = DRAY_EAGAIN;
    while (rc == DRAY_EAGAIN) {
        dray__writer w = {0};
        dray__put_fields(&w, &dray__sums_asked_fields, asked);
        rc = dray__call(channel, DRAY__MSG_CHECKSUMS_GET, &w, NULL, 0, deadline_ns, reply, error);
        dray__writer_free(&w);
        if (rc == DRAY_EAGAIN && dray__now() >= deadline_ns)
            return DRAY_EAGAIN;
        if (rc == DRAY_EAGAIN)
            usleep(ASK_AGAIN_US);
    }
    return rc;
}

int dray_checksums_fetch_group(dray_context *context, const char *model, const char *group,
                               uint64_t *version, dray_checksums **out, dray_error *error)
{
    if (!context || !model || !out)
        return dray__fail(error, DRAY_EINVALID, "context, model and out must be given");
    dray__channel *channel;
    int rc = dray__channel_open(context, &channel, error);
    if (rc)
        return rc;
    const dray__sums_asked asked = {model, group};
    dray__reply reply;
    dray_checksums *sums = calloc(1, sizeof *sums);
    rc = sums ? ask_for_sums(channel, &asked, dray__context_deadline(context, DRAY_WAIT_DEFAULT),
                             &reply, error)
              : dray__nomem(error);
    if (rc == DRAY_OK) {
        dray__sums_told told;
        dray__get_fields(&reply.payload, NULL, &dray__sums_told_fields, &told);
        rc = dray__sums_get(&reply.payload, &sums->sums, NULL)
                 ? dray__reader_finish(&reply.payload, "checksums", error)
                 : dray__nomem(error);
        if (rc == DRAY_OK && version)
            *version = told.version;
    }
    dray__channel_close(channel);
    if (rc)
        dray_checksums_free(sums);
    else
        *out = sums;
    return rc;
}

int dray_checksums_fetch(dray_context *context, const char *model, uint64_t *version,
                         dray_checksums **out, dray_error *error)
{
    return dray_checksums_fetch_group(context, model, NULL, version, out, error);
}

uint32_t dray_checksums_count(const dray_checksums *sums)
{
    return sums ? sums->sums.count : 0;
}

int dray_checksums_entry(const dray_checksums *sums, uint32_t index, const char **name,
                         int32_t *dtype, uint64_t *elements, uint64_t *sum, dray_error *error)
{
    if (!sums || index >= sums->sums.count)
        return dray__fail(error, DRAY_EINVALID, "entry %" PRIu32 " of %" PRIu32, index,
                          dray_checksums_count(sums));
    const dray__named_sum *items = dray__sums_items(&sums->sums);
    if (!items)
        return dray__nomem(error);
    const dray__named_sum *item = &items[index];
    if (name)
        *name = item->name;
    if (dtype)
        *dtype = item->dtype;
    if (elements)
        *elements = item->elements;
    if (sum)
        *sum = item->sum;
    return DRAY_OK;
}

void dray_checksums_free(dray_checksums *sums)
{
    if (!sums)
        return;
    dray__sums_free(&sums->sums);
    free(sums);
}
