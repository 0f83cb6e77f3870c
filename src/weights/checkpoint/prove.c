/* Compares an engine's memory with the engine's description of it. After the engine's own load of a
 * checkpoint, every block is compared with the checkpoint's elements: the planner and the movers
 * read these into scratch, slice by slice, as they would write them. */
#include "base/error.h"
#include "mover/mover.h"
#include "weights/checkpoint/overlay.h"

#include <inttypes.h>
#include <string.h>

enum { SCRATCH_BYTES = 8 << 20 };

typedef struct proving {
    const dray_layout *layout;
    dray_region *const *regions;
    dray_plan_index *checkpoint;
    dray_region **files;
    dray_region *scratch;
} proving;

/* Returns the number of elements that are contiguous in memory as in scratch: those of the
 * dimensions from *outer on. */
static uint64_t run_of(const dray_block *block, size_t element, const dray__rect *slice,
                       uint32_t *outer)
{
    uint64_t run = 1;
    for (*outer = DRAY_MAX_DIMS; *outer > 0; --*outer) {
        uint32_t d = *outer - 1;
        if (slice->extent[d] > 1 && (uint64_t)block->stride[d] != run * element)
            break;
        run *= (uint64_t)slice->extent[d];
    }
    return run;
}

static uint64_t differing_in(const uint8_t *a, const uint8_t *b, uint64_t run, size_t element)
{
    uint64_t differing = 0;
    if (memcmp(a, b, run * element) != 0)
        for (uint64_t i = 0; i < run; i++)
            differing += memcmp(a + i * element, b + i * element, element) != 0;
    return differing;
}

/* Returns how many elements of the slice differ from the dense ones in scratch. */
static uint64_t compare_slice(const proving *p, const dray_block *block, size_t element,
                              const dray__rect *slice)
{
    const uint8_t *expected = dray_region_base(p->scratch);
    const uint8_t *base = dray_region_base(p->regions[block->region]);
    uint32_t outer;
    uint64_t differing = 0, run = run_of(block, element, slice, &outer);
    int64_t at[DRAY_MAX_DIMS] = {0};
    for (bool more = true; more; expected += run * element) {
        uint64_t offset = block->offset;
        for (uint32_t d = 0; d < DRAY_MAX_DIMS; d++)
            offset +=
                (uint64_t)(slice->start[d] + at[d] - block->start[d]) * (uint64_t)block->stride[d];
        differing += differing_in(base + offset, expected, run, element);
        more = false;
        for (uint32_t d = outer; d-- > 0 && !more;) {
            more = ++at[d] < slice->extent[d];
            at[d] = more ? at[d] : 0;
        }
    }
    return differing;
}

/* Makes a layout of the slice alone, dense in scratch. */
static int slice_layout(const dray_tensor_info *tensor, const dray__rect *slice, dray_layout **out,
                        dray_error *error)
{
    dray_region_info region = {
        .kind = DRAY_REGION_HOST, .bytes = SCRATCH_BYTES, .name = "the checkpoint's elements"};
    uint32_t index;
    int rc = dray_layout_new(out, error);
    if (rc)
        return rc;
    rc = dray_layout_add_region(*out, &region, NULL, error);
    if (!rc)
        rc = dray_layout_add_tensor(*out, tensor->name, (dray_dtype)tensor->dtype, tensor->ndim,
                                    tensor->shape, &index, error);
    if (!rc)
        rc = dray_layout_add_dense(*out, index, 0, slice->start, slice->extent, 0, error);
    if (rc)
        dray_layout_free(*out);
    return rc;
}

static int read_slice(const proving *p, const dray_tensor_info *tensor, const dray__rect *slice,
                      dray_error *error)
{
    dray_layout *layout;
    dray_plan *plan = NULL;
    int rc = slice_layout(tensor, slice, &layout, error);
    if (rc)
        return rc;
    dray_plan_member member = {.layout = layout, .name = "the engine", .host = 1, .process = 1};
    rc = dray_plan_from_index(p->checkpoint, &member, NULL, &plan, error);
    const dray_copy *copies = rc ? NULL : dray_plan_copies(plan);
    for (uint64_t i = 0; !rc && i < dray_plan_count(plan); i++)
        rc = dray__move_all(p->files[copies[i].source_region], p->scratch, &copies[i], 1, NULL,
                            error);
    dray_plan_free(plan);
    dray_layout_free(layout);
    return rc;
}

static int prove_block(const proving *p, uint32_t index, uint64_t *differing, dray_error *error)
{
    const dray_block *block = dray_layout_block(p->layout, index);
    const dray_tensor_info *tensor = dray_layout_tensor(p->layout, block->tensor);
    size_t element = dray_dtype_size((dray_dtype)tensor->dtype);
    dray__rect whole = dray__rect_of(p->layout, index), slice;
    dray__slicer slicer;
    *differing = 0;
    dray__slicer_start(&slicer, &whole, element, SCRATCH_BYTES);
    for (; dray__slicer_peek(&slicer, &slice); dray__slicer_next(&slicer)) {
        int rc = read_slice(p, tensor, &slice, error);
        if (rc)
            return rc;
        *differing += compare_slice(p, block, element, &slice);
    }
    return DRAY_OK;
}

static int prove_all(const proving *p, dray_prove_fn differs, void *user, dray_error *error)
{
    uint32_t count = dray_layout_block_count(p->layout), blocks = 0, first = 0;
    uint64_t first_elements = 0;
    for (uint32_t b = 0; b < count; b++) {
        uint64_t differing;
        int rc = prove_block(p, b, &differing, error);
        if (rc)
            return rc;
        if (!differing)
            continue;
        if (differs)
            differs(user, b, differing);
        if (!blocks++) {
            first = b;
            first_elements = differing;
        }
    }
    if (!blocks)
        return DRAY_OK;
    uint32_t tensor = dray_layout_block(p->layout, first)->tensor;
    return dray__fail(error, DRAY_ECHECKSUM,
                      "tensor %.200s: block %u differs from the checkpoint in %" PRIu64
                      " elements, and so do %u other blocks of %u: the layout does not describe "
                      "this memory",
                      dray_layout_tensor(p->layout, tensor)->name, first, first_elements,
                      blocks - 1, count);
}

static int open_and_prove(proving *p, const dray_layout *files, dray__overlay *overlay,
                          dray_prove_fn differs, void *user, dray_error *error)
{
    dray_plan_member member = {.layout = files, .name = "the checkpoint", .host = 1, .process = 1};
    int rc;
    p->files = dray__overlay_open(overlay, files, &rc, error);
    if (!rc)
        rc = dray_region_alloc(DRAY_REGION_HOST, SCRATCH_BYTES, "checkpoint scratch", &p->scratch,
                               error);
    if (!rc)
        rc = dray_plan_index_new(&member, 1, &p->checkpoint, error);
    if (!rc)
        rc = prove_all(p, differs, user, error);
    dray_plan_index_free(p->checkpoint);
    dray_region_free(p->scratch);
    dray__files_close(p->files, files);
    return rc;
}

int dray_layout_prove(const dray_layout *layout, dray_region *const *regions,
                      const char *checkpoint, dray_prove_fn differs, void *user, dray_error *error)
{
    if (!layout || !checkpoint)
        return dray__fail(error, DRAY_EINVALID, "layout and checkpoint must be given");
    int rc = dray__regions_check(layout, regions, error);
    for (uint32_t i = 0; i < dray_layout_region_count(layout) && !rc; i++)
        if (!dray_region_base(regions[i]) && dray_region_bytes(regions[i]))
            rc = dray__fail(error, DRAY_EUNSUPPORTED, "region %u (%s) is no memory", i,
                            dray_layout_region(layout, i)->name);
    dray_layout *files = NULL;
    dray__overlay *overlay = NULL;
    if (!rc)
        rc = dray__checkpoint_layout(checkpoint, &files, &overlay, error);
    if (rc)
        return rc;
    proving p = {.layout = layout, .regions = regions};
    rc = open_and_prove(&p, files, overlay, differs, user, error);
    dray__overlay_free(overlay);
    dray_layout_free(files);
    return rc;
}
