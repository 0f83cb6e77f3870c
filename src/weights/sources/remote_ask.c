/* Requests of the source of data servers (remote.h): chooses the slices of a request, and how many
 * requests are under way. */
#include "base/error.h"
#include "weights/placements/prequantised.h"
#include "weights/server/pull_quant.h"
#include "weights/sources/remote.h"

#include <stdlib.h>

const dray__op *dray__remote_op(const struct remote_route *l, const struct source *s,
                                const struct slice *slice)
{
    return &l->transfer->sources->ops[s->parts[slice->part].op];
}

int32_t dray__remote_dtype(const struct source *s, const dray_copy *copy)
{
    return s->cohort || dray_dtype_size((dray_dtype)copy->destination_dtype) <=
                            dray_dtype_size((dray_dtype)copy->source_dtype)
               ? copy->destination_dtype
               : copy->source_dtype;
}

dray__pull_rect dray__remote_rect(const struct remote_route *l, const struct source *s,
                                  const struct slice *slice)
{
    const dray__op *op = dray__remote_op(l, s, slice);
    uint32_t block = s->parts[slice->part].block;
    uint32_t tensor = dray_layout_block(s->of->layout, block)->tensor;
    dray__pull_rect out = {.block = block,
                           .ndim = dray_layout_tensor(s->of->layout, tensor)->ndim,
                           .dtype = dray__remote_dtype(s, &op->copy),
                           .quantised = op->prequantised,
                           .rect = slice->rect};
    if (out.quantised) {
        out.quant = dray__prequantised_quant(l->transfer, op);
        out.dtype = out.quant.dtype;
    }
    return out;
}

uint64_t dray__remote_bytes(const struct remote_route *l, const struct source *s,
                            const dray__op *op, const dray__rect *rect)
{
    const dray_copy *copy = &op->copy;
    if (op->prequantised)
        return dray__prequantised_bytes(l->transfer, op, rect);
    return dray__rect_elements(rect) * dray_dtype_size((dray_dtype)dray__remote_dtype(s, copy));
}

/* Returns true when a slice's changes can be written at the copy's destination. */
static bool takes_deltas(const struct remote_route *l, const struct source *s, const dray__op *op)
{
    const dray_copy *copy = &op->copy;
    if (s->cohort || s->over_nccl || !s->of->has_delta || !l->coder_bytes)
        return false;
    if (op->prequantised)
        return l->patched && dray__prequantised_is_here(l->transfer, op);
    const dray_region *to = l->transfer->destination->regions[copy->destination_region];
    return to && dray__delta_writes(to) && dray__remote_dtype(s, copy) == copy->destination_dtype &&
           DRAY__DELTA_SLICE * dray_dtype_size((dray_dtype)dray__remote_dtype(s, copy)) <=
               s->segment;
}

static void start_part(struct remote_route *l, struct source *s, const struct part *part,
                       const dray__op *op)
{
    bool deltas = takes_deltas(l, s, op);
    s->in_part = true;
    s->has_ahead = deltas && !op->prequantised;
    if (op->prequantised) {
        uint64_t most = deltas ? DRAY__DELTA_SLICE : s->over_nccl ? s->segment : SEGMENT;
        most = s->segment < most ? s->segment : most;
        dray__rect cells = dray__prequantised_cells(l->transfer, op, &part->rect);
        dray__slicer_start(&s->slicer, &cells, dray__prequantised_cell_bytes(l->transfer, op),
                           most - 2 * DRAY__PULL_QUANT_ALIGN);
    } else if (s->has_ahead) {
        dray__delta_grid(s->of->layout, part->block, &part->rect, &s->walk);
        dray__delta_grid_next(&s->walk, &s->ahead);
    } else {
        dray__slicer_start(&s->slicer, &part->rect,
                           dray_dtype_size((dray_dtype)dray__remote_dtype(s, &op->copy)),
                           s->segment);
    }
}

bool dray__remote_next_slice(struct remote_route *l, struct source *s, uint64_t room,
                             struct slice *out)
{
    if (s->next == s->count)
        return false;
    const struct part *part = &s->parts[s->next];
    const dray__op *op = &l->transfer->sources->ops[part->op];
    if (!s->in_part)
        start_part(l, s, part, op);
    if (s->has_ahead)
        out->rect = s->ahead;
    else
        dray__slicer_peek(&s->slicer, &out->rect);
    if (op->prequantised)
        out->rect = dray__prequantised_elements(l->transfer, op, &out->rect);
    if (dray__remote_bytes(l, s, op, &out->rect) > room)
        return false;
    out->part = s->next;
    bool more;
    if (s->has_ahead) {
        more = dray__delta_grid_next(&s->walk, &s->ahead);
    } else {
        dray__slicer_next(&s->slicer);
        more = !s->slicer.done;
    }
    if (!more) {
        s->in_part = false;
        s->next++;
    }
    return true;
}

static struct request *request_new(struct remote_route *l)
{
    struct request *request = l->spare;
    l->spare = NULL;
    if (!request)
        request = malloc(sizeof *request + RECTS * sizeof *request->slices);
    if (request) {
        request->next = NULL;
        request->count = 0;
        request->bytes = 0;
        request->direct = false;
        request->slot = NULL;
        request->plain = !l->transfer->options.has_base;
    }
    return request;
}

void dray__remote_end(struct remote_route *l, struct request *request)
{
    if (l->spare)
        free(request);
    else
        l->spare = request;
}

/* Is the next slice read one-sidedly? */
static bool next_is_direct(const struct remote_route *l, const struct source *s)
{
    if (s->next == s->count)
        return false;
    const struct part *part = &s->parts[s->next];
    const dray__op *op = &l->transfer->sources->ops[part->op];
    return !takes_deltas(l, s, op) && dray__remote_reads(l, s, part, op);
}

/* Gives the next request to a source: one to be sent again, or a new one. *out is NULL when none is
 * left. */
static int next_request(struct remote_route *l, struct source *s, struct request **out,
                        dray_error *error)
{
    struct request *request = s->again.first;
    if (request) {
        s->again.first = request->next;
        if (!s->again.first)
            s->again.last = &s->again.first;
        request->next = NULL;
        request->direct &= s->keys == KEYS_HERE;
        *out = request;
        return DRAY_OK;
    }
    request = request_new(l);
    if (!request)
        return dray__nomem(error);
    struct slice *slice = request->slices;
    request->direct = next_is_direct(l, s);
    uint64_t patched = 0; /* bytes */
    while (request->count < RECTS && next_is_direct(l, s) == request->direct &&
           patched <= PATCHED - DRAY__DELTA_SLICE - 2 * DRAY__PULL_QUANT_ALIGN &&
           dray__remote_next_slice(l, s, s->segment - request->bytes, slice)) {
        const dray__op *op = dray__remote_op(l, s, slice);
        uint64_t bytes = dray__remote_bytes(l, s, op, &slice->rect);
        request->bytes += bytes;
        patched += op->prequantised && l->patched ? bytes : 0;
        request->plain |= !takes_deltas(l, s, op);
        request->count++;
        slice++;
    }
    *out = request->count ? request : NULL;
    if (!request->count)
        dray__remote_end(l, request);
    return DRAY_OK;
}

bool dray__remote_wants(const struct source *s)
{
    return s->again.first || s->next < s->count;
}

/* Returns true when the server must read the source twice, because neither another rank nor the sum
 * of a whole tensor would detect a misread source. */
static bool twice(const struct remote_route *l, const dray__op *op)
{
    const bool *compared = l->transfer->options.compared;
    return !op->owned || (compared && !compared[op->copy.tensor]);
}

static void put_request(const struct remote_route *l, struct source *s,
                        const struct request *request)
{
    dray__pull_rect rects[RECTS];
    for (uint32_t i = 0; i < request->count; i++) {
        const struct slice *slice = &request->slices[i];
        rects[i] = dray__remote_rect(l, s, slice);
        rects[i].twice = !s->cohort && twice(l, dray__remote_op(l, s, slice));
    }
    const dray__transfer_options *o = &l->transfer->options;
    dray__pull_base base = {o->incarnation, o->base, o->version};
    uint16_t flags =
        (uint16_t)((o->verify ? DRAY__PULL_SUMS : 0) | (s->cohort ? DRAY__PULL_COHORT : 0) |
                   (s->staged ? DRAY__PULL_ARENA : 0) | (request->direct ? DRAY__PULL_MAPPED : 0));
    dray__pull_put_request(dray__peer_out(s->link), request->id, flags, s->of->token,
                           s->cohort ? o->run : o->attempt,
                           s->cohort || request->plain ? NULL : &base, rects, request->count);
}

static void put(struct remote_route *l, struct source *s, struct request *request)
{
    request->id = ++l->last_id;
    request->asked_ns = dray__now();
    if (request->direct && !s->cohort) {
        request->slot = l->slots[--l->free_slots];
        dray__remote_read(l, s, request);
    } else {
        put_request(l, s, request);
    }
    if (!s->flying.first)
        dray__peer_touch(s->link);
    *s->flying.last = request;
    s->flying.last = &request->next;
    s->flying_bytes += request->bytes;
    l->in_flight += request->bytes;
    uint64_t held =
        l->in_flight + l->slot_count * l->segment + l->coder_bytes + (l->patched ? PATCHED : 0);
    if (held > l->peak)
        l->peak = held;
}

/* For a source with an arena: returns true when an answer is due, besides the one that is being
 * copied out. */
static bool unanswered(const struct source *s)
{
    return s->flying.first && (!s->copying || s->flying.first->next);
}

/* May the request be sent now? One-sided reads and messages are not under way at the same time, and
 * a read needs a slot from the start. */
static bool may_put(const struct remote_route *l, const struct source *s,
                    const struct request *request)
{
    return (!s->flying.first || s->flying.first->direct == request->direct) &&
           (!request->direct || s->cohort || l->free_slots);
}

int dray__remote_ask(struct remote_route *l, struct source *s, dray_error *error)
{
    uint64_t share = s->probing ? 0 : l->window / (l->active ? l->active : 1);
    if (dray__now() < s->asleep_ns || !dray__remote_keys_settled(l, s))
        return DRAY_OK;
    while (dray__remote_wants(s)) {
        bool first = !s->flying.first;
        if (l->in_flight + s->segment > l->window ||
            (!first && s->flying_bytes + s->segment > share) || (s->staged && unanswered(s)))
            break;
        struct request *request = NULL;
        int rc = next_request(l, s, &request, error);
        if (rc)
            return rc;
        if (!request)
            break;
        if (!may_put(l, s, request)) {
            request->next = s->again.first;
            if (!request->next)
                s->again.last = &request->next;
            s->again.first = request;
            break;
        }
        put(l, s, request);
    }
    return DRAY_OK;
}

struct request *dray__remote_landed(struct remote_route *l, struct source *s)
{
    struct request *request = s->flying.first;
    s->flying.first = request->next;
    if (!s->flying.first)
        s->flying.last = &s->flying.first;
    s->flying_bytes -= request->bytes;
    l->in_flight -= request->bytes;
    request->next = NULL;
    return request;
}
