/* A version that waits beside the one that is served: staging with the layout of the destination,
 * allocated once, and the copy that a commit makes of it. */
#include "base/clock.h"
#include "base/error.h"
#include "mover/mover.h"
#include "weights/subscriber.h"

#include <inttypes.h>
#include <stdlib.h>

/* ---- staging ----------------------------------------------------------------------------------
 */

void dray__stage_drop(dray_subscriber *s)
{
    uint32_t count = s->destination.layout ? dray_layout_region_count(s->destination.layout) : 0;
    for (uint32_t i = 0; s->staging && i < count; i++)
        dray_region_free(s->staging[i]);
    free(s->staging);
    free(s->staged_sums);
    s->staging = NULL;
    s->staged_sums = NULL;
    s->staging_bytes = 0;
    s->staged_version = s->staged_incarnation = 0;
    s->has_staged = false;
}

int dray__stage_open(dray_subscriber *s, dray_error *error)
{
    const dray_layout *layout = s->destination.layout;
    uint32_t count = dray_layout_region_count(layout);
    if (s->staging)
        return DRAY_OK;
    s->staging = calloc((size_t)count + 1, sizeof(dray_region *));
    if (!s->staging)
        return dray__nomem(error);
    for (uint32_t i = 0; i < count; i++) {
        uint64_t bytes = dray_layout_region(layout, i)->bytes;
        int rc = dray_region_alloc(DRAY_REGION_HOST, bytes, "staging", &s->staging[i], error);
        if (rc) {
            dray__stage_drop(s);
            return rc;
        }
        s->staging_bytes += bytes;
    }
    return DRAY_OK;
}

/* ---- the copy ---------------------------------------------------------------------------------
 */

struct dray__swap {
    const dray__destination *destination;
    dray_region *const *staging;
    const uint64_t *expected; /* NULL: the prefetch was not verified */
    uint64_t *found;          /* one a block */
    uint32_t block;
    bool in_block;
    dray__slicer slicer;
    dray_copy copy; /* of the block */
    uint64_t bytes, copies;
    int64_t move_ns, verify_ns;
};

int dray__swap_open(const dray_subscriber *s, dray__swap **out, dray_error *error)
{
    dray__swap *swap = calloc(1, sizeof *swap);
    if (!swap)
        return dray__nomem(error);
    swap->destination = &s->destination;
    swap->staging = s->staging;
    swap->expected = s->staged_sums;
    swap->found =
        calloc((size_t)dray_layout_block_count(s->destination.layout) + 1, sizeof *swap->found);
    if (!swap->found) {
        dray__swap_close(swap);
        return dray__nomem(error);
    }
    *out = swap;
    return DRAY_OK;
}

void dray__swap_close(dray__swap *swap)
{
    if (!swap)
        return;
    free(swap->found);
    free(swap);
}

static void begin_block(dray__swap *swap)
{
    const dray_layout *layout = swap->destination->layout;
    dray__rect whole = dray__rect_of(layout, swap->block);
    swap->copy = dray__block_copy(layout, swap->block);
    dray__slicer_start(&swap->slicer, &whole,
                       dray_dtype_size((dray_dtype)swap->copy.destination_dtype),
                       DRAY__SLICE_BYTES);
    swap->copies++;
    swap->in_block = true;
}

static int copy_slice(dray__swap *swap, const dray__rect *rect, dray_error *error)
{
    const dray_layout *layout = swap->destination->layout;
    dray_copy part = dray__copy_cut(&swap->copy, rect);
    dray__move_options options = {.layout = layout};
    int64_t begin = dray__now();
    int rc = dray__move_all(swap->staging[part.source_region],
                            swap->destination->regions[part.destination_region], &part, 1, &options,
                            error);
    int64_t moved = dray__now();
    swap->move_ns += moved - begin;
    swap->bytes += dray__rect_elements(rect) * dray_dtype_size((dray_dtype)part.destination_dtype);
    if (rc || !swap->expected)
        return rc;
    dray_region *scratch = NULL; /* stays NULL: all of it is addressable */
    rc = dray__sum_rect(layout, swap->destination->regions, swap->block, rect, &scratch,
                        &swap->found[swap->block], error);
    swap->verify_ns += dray__now() - moved;
    return rc;
}

/* The block is copied: is it what was staged? */
static int end_block(dray__swap *swap, dray_error *error)
{
    const dray_layout *layout = swap->destination->layout;
    uint32_t block = swap->block++;
    swap->in_block = false;
    if (!swap->expected || swap->expected[block] == swap->found[block])
        return DRAY_OK;
    return dray__fail(error, DRAY_ECHECKSUM,
                      "tensor %s: block %" PRIu32 " holds %016" PRIx64 " after the commit's copy, "
                      "%016" PRIx64 " was prefetched",
                      dray_layout_tensor(layout, dray_layout_block(layout, block)->tensor)->name,
                      block, swap->found[block], swap->expected[block]);
}

int dray__swap_step(dray__swap *swap, int64_t budget_ns, dray_error *error)
{
    uint32_t count = dray_layout_block_count(swap->destination->layout);
    int64_t until = dray__now() + budget_ns;
    int rc = DRAY_OK;
    while (rc == DRAY_OK && swap->block < count && dray__now() < until) {
        dray__rect rect;
        if (!swap->in_block)
            begin_block(swap);
        if (dray__slicer_peek(&swap->slicer, &rect)) {
            rc = copy_slice(swap, &rect, error);
            dray__slicer_next(&swap->slicer);
        } else {
            rc = end_block(swap, error);
        }
    }
    return rc ? rc : swap->block < count ? DRAY_EAGAIN : DRAY_OK;
}

void dray__swap_report(const dray__swap *swap, dray_update_report *report)
{
    report->bytes = report->source_bytes = swap->bytes;
    report->link_bytes[DRAY_LINK_PROCESS] = swap->bytes;
    report->copies = swap->copies;
    report->move_ns = swap->move_ns;
    report->verify_ns = swap->verify_ns;
    report->bytes_per_s =
        swap->move_ns > 0 ? (double)swap->bytes / ((double)swap->move_ns * 1e-9) : 0;
}
