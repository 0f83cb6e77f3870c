/* The placement of changes (transfer.h): ops that can be updated by a delta of their source. */
#include "weights/checkpoint/overlay.h"
#include "weights/delta/delta.h"
#include "weights/transfer/transfer.h"

bool dray__delta_offered(const dray__transfer *h, const dray__op *op)
{
    const dray__transfer_options *o = &h->options;
    const dray__source *source = &h->sources->sources[op->copy.source];
    const dray__delta_view *delta = dray__delta_of(source);
    if (!delta || !o->has_base || op->transform ||
        op->copy.source_dtype != op->copy.destination_dtype ||
        dray__delta_sent(delta, op->copy.source_dtype) != op->copy.destination_dtype ||
        dray__source_remote(source, op->copy.source_region, h->destination->host) ||
        !dray__delta_leads(delta, o->incarnation, o->base, o->version))
        return false;
    return !o->verify || (op->owned && o->compared && o->compared[op->copy.tensor]);
}

uint32_t dray__delta_block(const dray__transfer *h, const dray__op *op)
{
    const dray_layout *layout = h->sources->sources[op->copy.source].layout;
    dray__rect whole = dray__copy_rect(&op->copy);
    uint32_t tensor;
    if (dray_layout_find(layout, h->sources->names[op->copy.tensor], &tensor, NULL))
        return DRAY__DELTA_NO_BLOCK;
    dray__blocks held = dray__blocks_of(layout, tensor, &whole);
    while (dray__blocks_next(&held))
        if (held.all && dray__copy_reads(&op->copy, held.block, &held.cross))
            return held.index;
    return DRAY__DELTA_NO_BLOCK;
}

bool dray__overlay_offered(const dray__transfer *h, const dray__op *op)
{
    const dray__overlay *overlay = dray__overlay_of(&h->sources->sources[op->copy.source]);
    if (!h->options.has_disk_base || !h->options.verify || !overlay || op->transform)
        return false;
    const char *name = h->sources->names[op->copy.tensor];
    const dray_region *to = h->destination->regions[op->copy.destination_region];
    return op->owned && to && dray_region_base(to) &&
           op->copy.source_dtype == op->copy.destination_dtype &&
           dray__sums_find(&h->sources->stored, name) &&
           dray__overlay_way_of(overlay, name) != DRAY__OVERLAY_FULL;
}

static bool takes(const dray__transfer *h, const dray__op *op)
{
    return (h->options.has_base || h->options.has_disk_base) && !op->transform;
}

const dray__placement dray__place_patch = {"patch", takes};
