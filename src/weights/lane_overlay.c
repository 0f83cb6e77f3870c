/* The lane of checkpoints that are deltas: a rank that holds the base writes the elements that
 * changed. What it had and what it wrote it reads back as a whole, as if all of it had been read:
 * the sums that are compared with what the checkpoint says of itself say nothing of deltas. */
#include "base/clock.h"
#include "mover/mover.h"
#include "weights/haul.h"
#include "weights/overlay.h"

#include "base/error.h"

#include <stdlib.h>
#include <string.h>

struct overlay_lane {
    dray__haul *haul;
    const uint64_t *ops;
    uint64_t count, next; /* of ops */
    bool in_op;
    dray__slicer slicer;
    uint64_t entry_bytes, covered_bytes;
};

/* Of the tensor's name in the checkpoint. */
static const char *name_of(const dray__haul *h, const dray_copy *copy)
{
    return h->sources->names[copy->tensor];
}

/* Only what is compared with the checkpoint's sums in the end: nothing else tells whether the
 * memory still held the base. */
static bool overlay_takes(const dray__haul *h, const dray__op *op)
{
    const dray__overlay *overlay = h->sources->sources[op->copy.source].overlay;
    const dray_region *to =
        op->transform ? NULL : h->destination->regions[op->copy.destination_region];
    return h->options.has_disk_base && h->options.verify && overlay && !op->transform &&
           op->owned && to && dray_region_base(to) &&
           op->copy.source_dtype == op->copy.destination_dtype &&
           dray__sums_find(&h->sources->stored, name_of(h, &op->copy)) &&
           dray__overlay_way_of(overlay, name_of(h, &op->copy)) != DRAY__OVERLAY_FULL;
}

static void overlay_close(void *lane)
{
    free(lane);
}

static int overlay_open(dray__haul *haul, const uint64_t *ops, uint64_t count, uint64_t ceiling,
                        void **out, dray_error *error)
{
    (void)ceiling; /* holds the entries of a slice */
    struct overlay_lane *lane = malloc(sizeof *lane);
    if (!lane)
        return dray__nomem(error);
    *lane = (struct overlay_lane){.haul = haul, .ops = ops, .count = count};
    *out = lane;
    return DRAY_OK;
}

typedef struct placing {
    const dray_tensor_info *tensor;
    const dray_copy *copy;
    uint8_t *base;
    size_t size;
} placing;

static void place(void *user, uint64_t position, const uint8_t *value)
{
    const placing *p = user;
    uint8_t *at = p->base + p->copy->destination_offset;
    for (uint32_t d = p->tensor->ndim; d-- > 0;) {
        uint64_t shape = (uint64_t)p->tensor->shape[d];
        int64_t here = (int64_t)(position % shape) - p->copy->start[d];
        position /= shape;
        if (here < 0 || here >= p->copy->extent[d])
            return;
        at += here * p->copy->destination_stride[d];
    }
    memcpy(at, value, p->size);
}

static int do_slice(struct overlay_lane *lane, const dray__op *op, const dray__rect *slice,
                    dray_error *error)
{
    dray__haul *h = lane->haul;
    const dray_tensor_info *tensor = dray__haul_tensor(h, &op->copy);
    dray_copy piece = dray__copy_cut(&op->copy, slice);
    dray_region *to = h->destination->regions[piece.destination_region];
    placing p = {tensor, &piece, dray_region_base(to),
                 dray_dtype_size((dray_dtype)piece.destination_dtype)};
    uint64_t first = 0, last = 0;
    for (uint32_t d = 0; d < tensor->ndim; d++) {
        first = first * (uint64_t)tensor->shape[d] + (uint64_t)piece.start[d];
        last = last * (uint64_t)tensor->shape[d] + (uint64_t)(piece.start[d] + piece.extent[d] - 1);
    }
    int64_t begin = dray__now();
    int rc = dray__overlay_each(h->sources->sources[piece.source].overlay, name_of(h, &piece),
                                first, last + 1, place, &p, &lane->entry_bytes, error);
    if (rc)
        return rc;
    int64_t filled = dray__now();
    h->bytes += dray__copy_bytes(&piece);
    lane->covered_bytes += dray__copy_bytes(&piece);
    h->move_ns += filled - begin;
    uint64_t sum = dray__haul_read_back(h, to, &piece);
    h->found[op->block] += sum;
    h->expected[op->block] += sum;
    dray__haul_own(h, &piece, sum);
    h->verify_ns += dray__now() - filled;
    return DRAY_OK;
}

/* So many that a column's rows share the entries that are read for them. */
enum { SLICE_BYTES = 4 << 20 };

static int overlay_step(void *state, int64_t until_ns, bool *waits, dray_error *error)
{
    struct overlay_lane *lane = state;
    (void)waits;
    while (lane->next < lane->count) {
        const dray__op *op = &lane->haul->sources->ops[lane->ops[lane->next]];
        dray__rect whole = dray__copy_rect(&op->copy), slice;
        if (!lane->in_op)
            dray__slicer_start(&lane->slicer, &whole,
                               dray_dtype_size((dray_dtype)op->copy.destination_dtype),
                               SLICE_BYTES);
        lane->in_op = dray__slicer_peek(&lane->slicer, &slice);
        if (!lane->in_op) {
            lane->next++;
            continue;
        }
        dray__slicer_next(&lane->slicer);
        int rc = do_slice(lane, op, &slice, error);
        if (rc)
            return rc;
        if (dray__now() >= until_ns)
            return DRAY_EAGAIN;
    }
    return DRAY_OK;
}

static void overlay_report(const void *state, dray_update_report *report)
{
    const struct overlay_lane *lane = state;
    report->delta_bytes += lane->entry_bytes;
    report->delta_covered_bytes += lane->covered_bytes;
}

static uint64_t overlay_held(const void *state)
{
    (void)state;
    return 0;
}

const dray__lane_kind dray__lane_overlay = {
    .name = "overlay",
    .takes = overlay_takes,
    .open = overlay_open,
    .step = overlay_step,
    .report = overlay_report,
    .held_bytes = overlay_held,
    .close = overlay_close,
};
