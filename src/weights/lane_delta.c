/* The lane of deltas: a rank that holds the version before writes the elements that changed, and
 * copies only slices in which too many did. What it filled it reads back as a whole, as if all of
 * it had been copied: the sums that are compared with what was announced say nothing of deltas. */
#include "base/clock.h"
#include "base/error.h"
#include "model/layout.h"
#include "mover/mover.h"
#include "weights/delta.h"
#include "weights/haul.h"
#include "weights/wired.h"

#include <stdlib.h>

struct delta_lane {
    dray__haul *haul;
    const uint64_t *ops;
    uint64_t count, next; /* of ops */
    uint32_t
        *blocks; /* for each op: the source's block that it reads; DRAY__DELTA_NO_BLOCK: several */
    bool in_op;
    dray__delta_walk walk;
    dray__slicer slicer; /* of an op without a block */
    uint64_t entry_bytes, covered_bytes;
};

bool dray__delta_offered(const dray__haul *h, const dray__op *op)
{
    const dray__haul_options *o = &h->options;
    const dray__source *source = &h->sources->sources[op->copy.source];
    if (!source->delta || !o->has_base || op->transform ||
        op->copy.source_dtype != op->copy.destination_dtype ||
        dray__delta_sent(source->delta, op->copy.source_dtype) != op->copy.destination_dtype ||
        dray__source_remote(source, op->copy.source_region, h->destination->host) ||
        !dray__delta_leads(source->delta, o->incarnation, o->base, o->version))
        return false;
    return !o->verify || (op->owned && o->compared && o->compared[op->copy.tensor]);
}

static bool delta_takes(const dray__haul *h, const dray__op *op)
{
    return dray_region_base(h->destination->regions[op->copy.destination_region]) &&
           dray__delta_offered(h, op);
}

uint32_t dray__delta_block(const dray_layout *layout, const char *name, const dray_copy *copy)
{
    uint32_t tensor;
    dray__rect whole = dray__copy_rect(copy), cross;
    if (dray_layout_find(layout, name, &tensor, NULL))
        return DRAY__DELTA_NO_BLOCK;
    for (const dray_block *block = dray__layout_first_block(layout, tensor); block;
         block = dray__layout_next_block(layout, block)) {
        uint32_t index = (uint32_t)(block - dray_layout_block(layout, 0));
        dray__rect rect = dray__rect_of(layout, index);
        if (dray__rect_cross(&whole, &rect, &cross) &&
            dray__rect_elements(&cross) == dray__rect_elements(&whole) &&
            dray__copy_reads(copy, block, &cross))
            return index;
    }
    return DRAY__DELTA_NO_BLOCK;
}

static void find_blocks(struct delta_lane *lane)
{
    const dray__sources *s = lane->haul->sources;
    for (uint64_t i = 0; i < lane->count; i++) {
        const dray_copy *copy = &s->ops[lane->ops[i]].copy;
        lane->blocks[i] =
            dray__delta_block(s->sources[copy->source].layout, s->names[copy->tensor], copy);
    }
}

static void delta_close(void *state)
{
    struct delta_lane *lane = state;
    if (!lane)
        return;
    free(lane->blocks);
    free(lane);
}

static int delta_open(dray__haul *haul, const uint64_t *ops, uint64_t count, uint64_t ceiling,
                      void **out, dray_error *error)
{
    (void)ceiling; /* nothing is staged */
    struct delta_lane *lane = calloc(1, sizeof *lane);
    if (!lane)
        return dray__nomem(error);
    *lane = (struct delta_lane){.haul = haul, .ops = ops, .count = count};
    lane->blocks = calloc((size_t)count + 1, sizeof *lane->blocks);
    if (!lane->blocks) {
        delta_close(lane);
        return dray__nomem(error);
    }
    find_blocks(lane);
    *out = lane;
    return DRAY_OK;
}

static void start_op(struct delta_lane *lane, const dray_copy *copy)
{
    const dray__source *source = &lane->haul->sources->sources[copy->source];
    uint32_t block = lane->blocks[lane->next];
    dray__rect rect = dray__copy_rect(copy);
    if (block == DRAY__DELTA_NO_BLOCK)
        dray__slicer_start(&lane->slicer, &rect, 1, DRAY__DELTA_SLICE);
    else
        dray__delta_start(source->delta, block, &rect, &lane->walk);
    lane->in_op = true;
}

/* In memory, writing single elements costs about as much as copying SPARSE times as many. */
enum { SPARSE = 8 };

static int next_part(struct delta_lane *lane, dray__delta_part *part, dray_error *error)
{
    if (lane->blocks[lane->next] != DRAY__DELTA_NO_BLOCK) {
        int rc = dray__delta_next(&lane->walk, part, error);
        if (rc == DRAY_OK && (uint64_t)part->count * SPARSE > dray__rect_elements(&part->slice))
            part->full = true;
        return rc;
    }
    *part = (dray__delta_part){.full = true};
    if (!dray__slicer_peek(&lane->slicer, &part->cross))
        return DRAY_EEND;
    dray__slicer_next(&lane->slicer);
    return DRAY_OK;
}

static int fill(struct delta_lane *lane, const dray__delta_part *part, const dray_copy *piece,
                dray_error *error)
{
    const dray__haul *h = lane->haul;
    dray_region *to = h->destination->regions[piece->destination_region];
    if (part->full) {
        dray__move_options options = {.layout = h->destination->layout};
        return dray__move_all(h->sources->sources[piece->source].regions[piece->source_region], to,
                              piece, 1, &options, error);
    }
    lane->covered_bytes += dray__copy_bytes(piece);
    return dray__delta_apply(part, piece, dray_region_base(to), &lane->entry_bytes, error);
}

static int do_part(struct delta_lane *lane, const dray__op *op, const dray__delta_part *part,
                   dray_error *error)
{
    dray__haul *h = lane->haul;
    dray_copy piece = dray__copy_cut(&op->copy, &part->cross);
    int64_t begin = dray__now();
    int rc = fill(lane, part, &piece, error);
    if (rc)
        return rc;
    int64_t filled = dray__now();
    h->bytes += dray__copy_bytes(&piece);
    h->move_ns += filled - begin;
    if (!h->options.verify)
        return DRAY_OK;
    uint64_t sum =
        dray__haul_read_back(h, h->destination->regions[piece.destination_region], &piece);
    h->found[op->block] += sum;
    h->expected[op->block] += sum;
    dray__haul_own(h, &piece, sum);
    h->verify_ns += dray__now() - filled;
    return DRAY_OK;
}

static int delta_step(void *state, int64_t until_ns, bool *waits, dray_error *error)
{
    struct delta_lane *lane = state;
    (void)waits;
    while (lane->next < lane->count) {
        const dray__op *op = &lane->haul->sources->ops[lane->ops[lane->next]];
        dray__delta_part part;
        if (!lane->in_op)
            start_op(lane, &op->copy);
        int rc = next_part(lane, &part, error);
        if (rc == DRAY_EEND) {
            lane->in_op = false;
            lane->next++;
            continue;
        }
        if (rc == DRAY_OK)
            rc = do_part(lane, op, &part, error);
        if (rc)
            return rc;
        if (dray__now() >= until_ns)
            return DRAY_EAGAIN;
    }
    return DRAY_OK;
}

static void delta_report(const void *state, dray_update_report *report)
{
    const struct delta_lane *lane = state;
    report->delta_bytes += lane->entry_bytes;
    report->delta_covered_bytes += lane->covered_bytes;
}

static uint64_t delta_held(const void *state)
{
    (void)state;
    return 0;
}

const dray__lane_kind dray__lane_delta = {
    .name = "delta",
    .takes = delta_takes,
    .open = delta_open,
    .step = delta_step,
    .report = delta_report,
    .held_bytes = delta_held,
    .close = delta_close,
};
