/* The lane of sources behind data servers: those on other hosts, and stores on this one: asks their
 * data servers (pull.h) for slices of what the plan wants, many requests in flight but never more
 * bytes than the ceiling, takes each answer into a slot that stays in cache, and moves it from
 * there to its place.
 *
 * Checked, per slice: what came against the sum of what was sent; what the mover wrote against what
 * can be read back; and the source's own bits, as the server summed them, against what was
 * announced. What narrows is converted by the server, what widens here, so that the wire carries
 * the smaller form.
 *
 * From a source that keeps deltas, a rank that holds the version before asks in the deltas' slices,
 * and may get what changed in one instead of all of it; the sum that came with it is compared with
 * all of the slice as it then is, and one that differs is fetched whole.
 *
 * A publisher on this host that has a staging arena (arena.h) answers into it: the next request is
 * on its way while what has come is copied out, so that both sides are busy.
 *
 * A connection that breaks, or is silent for STALL_NS, is opened again: answers that arrived are
 * kept, the rest is asked for again, until the update's deadline. */
#include "base/error.h"
#include "base/log.h"
#include "mover/checksum.h"
#include "mover/mover.h"
#include "weights/remote.h"
#include "weights/wired.h"

#include <errno.h>
#include <inttypes.h>
#include <poll.h>
#include <stdlib.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/timerfd.h>

/* ---- asking ---------------------------------------------------------------------------------- */

static const dray__op *op_of(const struct remote_lane *l, const struct source *s,
                             const struct slice *slice)
{
    return &l->haul->sources->ops[s->parts[slice->part].op];
}

/* The dtype on the wire: the smaller one; of a member of the cohort, what lies there. */
static int32_t wire_dtype(const struct source *s, const dray_copy *copy)
{
    return s->peer || dray_dtype_size((dray_dtype)copy->destination_dtype) <=
                          dray_dtype_size((dray_dtype)copy->source_dtype)
               ? copy->destination_dtype
               : copy->source_dtype;
}

static uint64_t wire_bytes(const struct remote_lane *l, const struct source *s, const dray__op *op,
                           const dray__rect *rect)
{
    const dray_copy *copy = &op->copy;
    if (op->wired)
        return dray__wired_bytes(l->haul, op, rect);
    return dray__rect_elements(rect) * dray_dtype_size((dray_dtype)wire_dtype(s, copy));
}

/* Can what changed in a slice be written where the copy leads? */
static bool takes_deltas(const struct remote_lane *l, const struct source *s, const dray__op *op)
{
    const dray_copy *copy = &op->copy;
    return !op->wired && !s->peer && s->of->has_delta && l->haul->options.has_base &&
           wire_dtype(s, copy) == copy->destination_dtype &&
           DRAY__DELTA_SLICE * dray_dtype_size((dray_dtype)wire_dtype(s, copy)) <= s->segment;
}

static void start_part(struct remote_lane *l, struct source *s, const struct part *part,
                       const dray__op *op)
{
    s->in_part = true;
    s->has_ahead = takes_deltas(l, s, op);
    if (op->wired) {
        dray__rect cells = dray__wired_cells(l->haul, op, &part->rect);
        dray__slicer_start(&s->slicer, &cells, dray__wired_cell_bytes(l->haul, op), s->segment);
    } else if (s->has_ahead) {
        dray__delta_grid(s->of->layout, part->block, &part->rect, &s->walk);
        dray__delta_grid_next(&s->walk, &s->ahead);
    } else {
        dray__slicer_start(&s->slicer, &part->rect,
                           dray_dtype_size((dray_dtype)wire_dtype(s, &op->copy)), s->segment);
    }
}

/* Takes the next slice of the source's parts, if it has at most `room` bytes. */
static bool next_slice(struct remote_lane *l, struct source *s, uint64_t room, struct slice *out)
{
    if (s->next == s->count)
        return false;
    const struct part *part = &s->parts[s->next];
    const dray__op *op = &l->haul->sources->ops[part->op];
    if (!s->in_part)
        start_part(l, s, part, op);
    if (s->has_ahead)
        out->rect = s->ahead;
    else
        dray__slicer_peek(&s->slicer, &out->rect);
    if (op->wired)
        out->rect = dray__wired_elements(l->haul, op, &out->rect);
    if (wire_bytes(l, s, op, &out->rect) > room)
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

static struct request *request_new(struct remote_lane *l)
{
    struct request *request = l->spare;
    l->spare = NULL;
    if (!request)
        request = malloc(sizeof *request + RECTS * sizeof *request->slices);
    if (request) {
        request->next = NULL;
        request->count = 0;
        request->bytes = 0;
        request->plain = !l->haul->options.has_base;
    }
    return request;
}

static void request_end(struct remote_lane *l, struct request *request)
{
    if (l->spare)
        free(request);
    else
        l->spare = request;
}

/* The next request to a source: one to be asked again, or a new one. *out NULL: none is left. */
static int next_request(struct remote_lane *l, struct source *s, struct request **out,
                        dray_error *error)
{
    struct request *request = s->again.first;
    if (request) {
        s->again.first = request->next;
        if (!s->again.first)
            s->again.last = &s->again.first;
        request->next = NULL;
        *out = request;
        return DRAY_OK;
    }
    request = request_new(l);
    if (!request)
        return dray__nomem(error);
    struct slice *slice = request->slices;
    while (request->count < RECTS && next_slice(l, s, s->segment - request->bytes, slice)) {
        const dray__op *op = op_of(l, s, slice);
        request->bytes += wire_bytes(l, s, op, &slice->rect);
        request->plain |= !takes_deltas(l, s, op);
        request->count++;
        slice++;
    }
    *out = request->count ? request : NULL;
    if (!request->count)
        request_end(l, request);
    return DRAY_OK;
}

static bool wants_more(const struct source *s)
{
    return s->again.first || s->next < s->count;
}

/* Nobody else in the group, and no whole tensor's sum, will find a misread source. */
static bool twice(const struct remote_lane *l, const dray__op *op)
{
    const bool *compared = l->haul->options.compared;
    return !op->owned || (compared && !compared[op->copy.tensor]);
}

static void put(struct remote_lane *l, struct source *s, struct request *request)
{
    dray__pull_rect rects[RECTS];
    for (uint32_t i = 0; i < request->count; i++) {
        const struct slice *slice = &request->slices[i];
        const struct part *part = &s->parts[slice->part];
        const dray__op *op = op_of(l, s, slice);
        uint32_t tensor = dray_layout_block(s->of->layout, part->block)->tensor;
        rects[i] = (dray__pull_rect){.block = part->block,
                                     .ndim = dray_layout_tensor(s->of->layout, tensor)->ndim,
                                     .dtype = wire_dtype(s, &op->copy),
                                     .twice = !s->peer && twice(l, op),
                                     .rect = slice->rect};
        if (op->wired) {
            rects[i].quantised = true;
            rects[i].quant = dray__wired_quant(l->haul, op);
            rects[i].dtype = rects[i].quant.dtype;
        }
    }
    const dray__haul_options *o = &l->haul->options;
    dray__pull_base base = {o->incarnation, o->base, o->version};
    request->id = ++l->last_id;
    request->asked_ns = dray__now();
    uint16_t flags =
        (uint16_t)((o->verify ? DRAY__PULL_SUMS : 0) | (s->peer ? DRAY__PULL_COHORT : 0) |
                   (s->staged ? DRAY__PULL_ARENA : 0));
    dray__pull_put_request(dray__peer_out(s->of->peer), request->id, flags, s->of->token,
                           s->peer ? o->run : o->attempt, s->peer || request->plain ? NULL : &base,
                           rects, request->count);
    if (!s->flying.first)
        dray__peer_touch(s->of->peer);
    *s->flying.last = request;
    s->flying.last = &request->next;
    s->flying_bytes += request->bytes;
    l->in_flight += request->bytes;
    uint64_t held = l->in_flight + l->slot_count * l->segment;
    if (held > l->peak)
        l->peak = held;
}

/* Of a source with an arena: is an answer due, beside the one that is being copied out? */
static bool unanswered(const struct source *s)
{
    return s->flying.first && (!s->copying || s->flying.first->next);
}

/* Fills the source's share of the window. */
static int ask(struct remote_lane *l, struct source *s, dray_error *error)
{
    uint64_t share = s->probing ? 0 : l->window / (l->active ? l->active : 1);
    if (dray__now() < s->asleep_ns)
        return DRAY_OK;
    while (wants_more(s)) {
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
        put(l, s, request);
    }
    return DRAY_OK;
}

/* ---- taking ---------------------------------------------------------------------------------- */

/* From the slot, where the slice lies dense at `offset`, to its place. */
static dray_copy out_of_slot(const struct source *s, const dray_copy *op, const dray__rect *rect,
                             uint64_t offset)
{
    dray_copy out = dray__copy_cut(op, rect), dense = out;
    dray__copy_to_dense(&dense, wire_dtype(s, op), offset);
    out.source_region = 0;
    out.source_dtype = wire_dtype(s, op);
    out.source_offset = offset;
    memcpy(out.source_stride, dense.destination_stride, sizeof out.source_stride);
    return out;
}

/* What the head of an answer says of rectangle i. */
struct told {
    uint64_t source_sum, sum;
    uint64_t bytes; /* of the data */
};

/* Before what it says of rectangles: where in the arena they are. */
static size_t head_start(const struct source *s)
{
    return s->staged ? sizeof(uint64_t) : 0;
}

static uint64_t place_of(const struct source *s, const uint8_t *head)
{
    dray__reader in = dray__reader_of(head, head_start(s));
    return s->staged ? dray__get_u64(&in) : 0;
}

static const dray_region *landing(const struct source *s)
{
    return s->staged ? s->of->arena : s->slot;
}

static struct told told_of(const struct remote_lane *l, const struct source *s,
                           const struct request *request, const uint8_t *head, uint32_t i)
{
    bool verify = l->haul->options.verify;
    size_t size = dray__pull_head_bytes(verify, !request->plain);
    dray__reader in = dray__reader_of(head + head_start(s) + i * size, size);
    struct told told = {0};
    if (verify) {
        told.source_sum = dray__get_u64(&in);
        told.sum = dray__get_u64(&in);
    }
    const struct slice *slice = &request->slices[i];
    told.bytes =
        request->plain ? wire_bytes(l, s, op_of(l, s, slice), &slice->rect) : dray__get_u32(&in);
    return told;
}

/* Where each rectangle's data landed, and which are deltas. */
static void look(struct remote_lane *l, const struct source *s, const struct request *request,
                 const uint8_t *head)
{
    uint64_t offset = place_of(s, head);
    for (uint32_t i = 0; i < request->count; i++) {
        const struct slice *slice = &request->slices[i];
        const dray__op *op = op_of(l, s, slice);
        uint64_t bytes = told_of(l, s, request, head, i).bytes;
        l->copies[i] = out_of_slot(s, &op->copy, &slice->rect, offset);
        l->sparse[i] = bytes < wire_bytes(l, s, op, &slice->rect);
        l->wired[i] = op->wired;
        l->at[i] = offset;
        l->sums[i] = l->slot_sums[i] = 0;
        offset += bytes;
    }
}

static int place_delta(struct remote_lane *l, const struct source *s, uint32_t i, uint64_t bytes,
                       dray_error *error)
{
    const dray_copy *copy = &l->copies[i];
    dray_region *to = l->haul->destination->regions[copy->destination_region];
    const uint8_t *data = dray_region_base(landing(s));
    int rc =
        dray__delta_decode(data + copy->source_offset, bytes, copy, dray_region_base(to), error);
    if (rc == DRAY_OK && l->haul->options.verify)
        l->sums[i] = l->slot_sums[i] = dray__haul_read_back(l->haul, to, copy);
    l->delta_bytes += bytes;
    l->delta_covered_bytes += dray__copy_bytes(copy);
    return rc;
}

static int place(struct remote_lane *l, struct source *s, const struct request *request,
                 const uint8_t *head, dray_error *error)
{
    const dray__destination *to = l->haul->destination;
    bool verify = l->haul->options.verify;
    look(l, s, request, head);
    for (uint32_t i = 0, end; i < request->count; i = end) {
        uint32_t region = l->copies[i].destination_region;
        end = i + 1;
        if (l->wired[i]) { /* placed when all of the answer is known to be right */
            const uint8_t *data = dray_region_base(landing(s));
            const struct slice *slice = &request->slices[i];
            if (verify)
                l->slot_sums[i] =
                    dray__wired_sum(l->haul, op_of(l, s, slice), &slice->rect, data + l->at[i]);
            continue;
        }
        if (l->sparse[i]) {
            int rc = place_delta(l, s, i, told_of(l, s, request, head, i).bytes, error);
            if (rc)
                return rc;
            continue;
        }
        while (end < request->count && !l->sparse[end] && !l->wired[end] &&
               l->copies[end].destination_region == region)
            end++;
        dray__move_options options = {.layout = to->layout,
                                      .sums = verify ? l->sums + i : NULL,
                                      .source_sums = verify ? l->slot_sums + i : NULL};
        int rc = dray__move_all(landing(s), to->regions[region], l->copies + i, end - i, &options,
                                error);
        if (rc)
            return rc;
    }
    return DRAY_OK;
}

/* What was quantised, once it is known to be right. */
static int place_wired(struct remote_lane *l, struct source *s, const struct request *request,
                       dray_error *error)
{
    int rc = DRAY_OK;
    for (uint32_t i = 0; i < request->count && rc == DRAY_OK; i++)
        if (l->wired[i])
            rc = dray__wired_place(l->haul, op_of(l, s, &request->slices[i]),
                                   &request->slices[i].rect, landing(s), l->at[i], error);
    return rc;
}

/* Is what came what was sent? */
static bool unchanged(const struct remote_lane *l, const struct source *s,
                      const struct request *request, const uint8_t *head)
{
    for (uint32_t i = 0; i < request->count; i++)
        if (told_of(l, s, request, head, i).sum != l->slot_sums[i])
            return false;
    return true;
}

static void enter(struct remote_lane *l, struct source *s, const struct request *request,
                  const uint8_t *head)
{
    dray__haul *h = l->haul;
    for (uint32_t i = 0; i < request->count; i++) {
        const dray__op *op = op_of(l, s, &request->slices[i]);
        uint64_t source_sum = told_of(l, s, request, head, i).source_sum;
        if (l->wired[i]) {
            dray_copy origin = dray__copy_cut(&op->copy, &request->slices[i].rect);
            if (op->owned)
                dray__haul_own(h, &origin, source_sum);
            continue;
        }
        h->expected[op->block] += l->sums[i];
        h->found[op->block] += dray__haul_read_back(
            h, h->destination->regions[l->copies[i].destination_region], &l->copies[i]);
        dray_copy origin = l->copies[i];
        origin.source_dtype = op->copy.source_dtype;
        if (op->owned)
            dray__haul_own(h, &origin, source_sum);
        if (l->shares && dray__cohort_shared(l->cohort, op->block))
            dray__shares_enter(l->shares, op->block, &request->slices[i].rect, source_sum,
                               l->sums[i]);
    }
}

/* The same without verification: that it is here. */
static void enter_unchecked(struct remote_lane *l, struct source *s, const struct request *request)
{
    for (uint32_t i = 0; i < request->count && l->shares; i++) {
        const dray__op *op = op_of(l, s, &request->slices[i]);
        if (!l->wired[i] && dray__cohort_shared(l->cohort, op->block))
            dray__shares_enter(l->shares, op->block, &request->slices[i].rect, 0, 0);
    }
}

/* Takes the oldest request off those in flight. */
static struct request *landed(struct remote_lane *l, struct source *s)
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

static int break_off(struct remote_lane *l, struct source *s, const dray_error *why,
                     dray_error *error);

/* The server may fill the slot again. A connection that broke shows the next time. */
static void hand_back(struct source *s, uint32_t id)
{
    dray__pull_put_taken(dray__peer_out(s->of->peer), id);
    dray__peer_send(s->of->peer, NULL);
}

/* Has it lain in the arena for longer than the server leaves it there? */
static bool too_late(const struct source *s, const struct request *request)
{
    return s->staged && dray__now() - request->asked_ns > DRAY__ARENA_LEASE_NS;
}

/* A whole answer landed. */
static int take(struct remote_lane *l, struct source *s, const uint8_t *head, dray_error *error)
{
    struct request *request = s->flying.first;
    int64_t begin = dray__now();
    int rc = place(l, s, request, head, error);
    int64_t placed = dray__now();
    l->haul->move_ns += placed - begin;
    if (rc)
        return rc;
    if (l->haul->options.verify && !unchanged(l, s, request, head)) {
        dray_error why;
        request->plain = true; /* or what was held is not what it was */
        dray__fail(&why, DRAY_ECHECKSUM, "what came from %s is not what it sent", s->of->name);
        if (++s->wrong < WRONG_MAX && !s->peer)
            return break_off(l, s, &why, error);
        if (error)
            *error = why;
        return why.code;
    }
    if (too_late(s, request)) {
        dray_error why;
        dray__fail(&why, DRAY_ETIMEDOUT, "what %s put into its arena was not copied out in %d s",
                   s->of->name, (int)(DRAY__ARENA_LEASE_NS / DRAY__SECOND));
        return break_off(l, s, &why, error);
    }
    s->wrong = 0;
    for (uint32_t i = 0; i < request->count; i++)
        if (!l->wired[i])
            l->haul->bytes += dray__copy_bytes(&l->copies[i]);
    rc = place_wired(l, s, request, error);
    if (rc)
        return rc;
    if (l->haul->options.verify)
        enter(l, s, request, head);
    else
        enter_unchecked(l, s, request);
    if (s->peer && s->of->host == l->haul->destination->host)
        l->fanned_bytes += request->bytes;
    s->probing = false;
    s->brought_ns = dray__now();
    l->haul->verify_ns += dray__now() - placed;
    uint32_t id = request->id;
    request_end(l, landed(l, s));
    if (s->staged)
        hand_back(s, id);
    else
        l->slots[l->free_slots++] = s->slot;
    s->slot = NULL;
    return DRAY_OK;
}

/* Do the rectangles' data add up to what came, none with more than its elements take? */
static bool sizes_fit(const struct remote_lane *l, const struct source *s,
                      const struct request *request, const dray__arrival *arrival)
{
    uint64_t bytes = 0;
    for (uint32_t i = 0; i < request->count; i++) {
        const struct slice *slice = &request->slices[i];
        uint64_t part = told_of(l, s, request, arrival->head, i).bytes;
        if (part > wire_bytes(l, s, op_of(l, s, slice), &slice->rect))
            return false;
        bytes += part;
    }
    if (!s->staged)
        return bytes == arrival->header.data_bytes;
    uint64_t at = place_of(s, arrival->head), size = dray_region_bytes(s->of->arena);
    return !arrival->header.data_bytes && at % 64 == 0 && at <= size && bytes <= size - at;
}

/* Does the answer belong to the oldest request, and is it of the right size? */
static int check_answer(const struct remote_lane *l, const struct source *s,
                        const dray__arrival *arrival, dray_error *error)
{
    const struct request *request = s->flying.first;
    const dray__answer_header *header = &arrival->header;
    if (s->peer && request && request->id == header->id &&
        (header->status == DRAY_EAGAIN || header->status == DRAY_EUNSUPPORTED))
        return header->status;
    if (header->status) {
        dray__reader in = dray__reader_of(arrival->head, header->head_bytes);
        char *message = dray__get_string(&in, DRAY__PULL_HEAD_MAX);
        int rc = dray__fail(error, header->status, "publisher %s at %s: %s", s->of->name,
                            s->of->endpoint, message ? message : "?");
        free(message);
        return rc;
    }
    if (!request || request->id != header->id ||
        header->head_bytes !=
            head_start(s) +
                request->count * dray__pull_head_bytes(l->haul->options.verify, !request->plain) ||
        !sizes_fit(l, s, request, arrival))
        return dray__fail(error, DRAY_EPROTO, "publisher %s at %s: not the answer that was due",
                          s->of->name, s->of->endpoint);
    return DRAY_OK;
}

/* The member of the cohort has not got it yet: asked again in a moment. */
static int not_yet(struct remote_lane *l, struct source *s, dray_error *error)
{
    int rc = dray__peer_recv_data(s->of->peer, NULL, error); /* there is none */
    if (rc)
        return rc;
    struct request *request = landed(l, s);
    *s->again.last = request;
    s->again.last = &request->next;
    s->probing = true;
    s->asleep_ns = dray__now() + NOT_YET_NS;
    if (s->asleep_ns - s->brought_ns > PATIENCE_NS)
        return dray__fail(error, DRAY_ETIMEDOUT, "%s has had nothing new for a while", s->of->name);
    return DRAY_EAGAIN;
}

static bool go_home(struct remote_lane *l, const struct source *s, const struct slice *slice)
{
    struct part part = s->parts[slice->part];
    part.block = part.home_block;
    part.rect = slice->rect;
    return dray__remote_push(&l->sources[part.home], &part);
}

/* The member of the cohort will not have it in this form: the publishers do. */
static int never(struct remote_lane *l, struct source *s, dray_error *error)
{
    int rc = dray__peer_recv_data(s->of->peer, NULL, error);
    if (rc)
        return rc;
    struct request *request = landed(l, s);
    bool kept = true;
    for (uint32_t i = 0; i < request->count; i++)
        kept &= go_home(l, s, &request->slices[i]);
    request_end(l, request);
    return kept ? DRAY_OK : dray__nomem(error);
}

static bool needs_slot(const struct source *s)
{
    return !s->staged && !s->slot;
}

/* So that the server fills one slot while the other is copied out. */
static int ask_ahead(struct remote_lane *l, struct source *s, dray_error *error)
{
    s->copying = true;
    int rc = ask(l, s, error);
    s->copying = false;
    if (rc == DRAY_OK)
        dray__peer_send(s->of->peer, NULL); /* what is wrong with it shows the next time */
    return rc;
}

/* One answer. */
static int receive(struct remote_lane *l, struct source *s, bool *fatal, dray_error *error)
{
    dray__arrival arrival;
    int rc = dray__peer_recv_head(s->of->peer, &arrival, error);
    if (rc)
        return rc;
    rc = check_answer(l, s, &arrival, error);
    if (rc == DRAY_EAGAIN)
        return not_yet(l, s, error);
    if (rc == DRAY_EUNSUPPORTED && s->peer)
        return never(l, s, error);
    *fatal = rc != DRAY_OK;
    if (rc)
        return rc;
    if (needs_slot(s) && !l->free_slots)
        return DRAY_EAGAIN; /* until another source's answer is complete */
    if (needs_slot(s))
        s->slot = l->slots[--l->free_slots];
    rc = dray__peer_recv_data(s->of->peer, s->slot ? dray_region_base(s->slot) : NULL, error);
    if (rc)
        return rc;
    s->broken = false;
    s->pause_ns = PAUSE_MIN_NS;
    rc = s->staged ? ask_ahead(l, s, error) : DRAY_OK;
    if (rc == DRAY_OK)
        rc = take(l, s, arrival.head, error);
    *fatal = rc != DRAY_OK;
    return rc;
}

/* ---- connections that break ------------------------------------------------------------------ */

/* Asks again for what was under way, over a new connection, after a pause. */
static int break_off(struct remote_lane *l, struct source *s, const dray_error *why,
                     dray_error *error)
{
    int64_t now = dray__now();
    dray__peer_drop(s->of->peer);
    s->events = 0;
    if (s->slot)
        l->slots[l->free_slots++] = s->slot;
    s->slot = NULL;
    if (s->flying.first) {
        *s->flying.last = s->again.first;
        if (!s->again.first)
            s->again.last = s->flying.last;
        s->again.first = s->flying.first;
        s->flying.first = NULL;
        s->flying.last = &s->flying.first;
    }
    l->in_flight -= s->flying_bytes;
    s->flying_bytes = 0;
    l->retries++;
    s->trouble = *why;
    if (!s->broken)
        s->broken_ns = now;
    s->broken = true;
    s->retry_ns = now + s->pause_ns;
    s->pause_ns = s->pause_ns * 2 < PAUSE_MAX_NS ? s->pause_ns * 2 : PAUSE_MAX_NS;
    /* Its host is there, and nobody listens: it will not come back. */
    if (why->raw == ECONNREFUSED && now - s->broken_ns > REFUSED_NS)
        return dray__fail(error, DRAY_EDEAD, "publisher %s is gone: %s", s->of->name, why->message);
    return DRAY_OK;
}

/* A member of the cohort failed: what it owes comes from the publishers. */
static int desert(struct remote_lane *l, struct source *s, const dray_error *why, dray_error *error)
{
    dray__log(DRAY_LOG_INFO, "%s of the cohort is left, the publishers bring the rest: %s",
              s->of->name, why->message);
    dray__peer_drop(s->of->peer);
    s->events = 0;
    if (s->slot)
        l->slots[l->free_slots++] = s->slot;
    s->slot = NULL;
    l->in_flight -= s->flying_bytes;
    s->flying_bytes = 0;
    l->retries++;
    bool kept = true;
    struct queue *queues[] = {&s->flying, &s->again};
    for (size_t q = 0; q < 2; q++)
        for (const struct request *r = queues[q]->first; r; r = r->next)
            for (uint32_t i = 0; i < r->count; i++)
                kept &= go_home(l, s, &r->slices[i]);
    struct slice slice;
    while (next_slice(l, s, UINT64_MAX, &slice))
        kept &= go_home(l, s, &slice);
    for (size_t q = 0; q < 2; q++) {
        dray__remote_free(queues[q]);
        queues[q]->last = &queues[q]->first;
    }
    return kept ? DRAY_OK : dray__nomem(error);
}

static int watch(struct remote_lane *l, struct source *s, dray_error *error)
{
    if (!dray__peer_is_open(s->of->peer))
        return DRAY_OK; /* the tick wakes us when it is time to try again */
    short events = dray__peer_events(s->of->peer);
    if (needs_slot(s) && !l->free_slots)
        events = (short)(events & ~POLLIN); /* another source's answer wakes us */
    if (events == s->events)
        return DRAY_OK;
    struct epoll_event event = {.events = (uint32_t)events};
    int fd = dray__peer_fd(s->of->peer);
    if (epoll_ctl(l->poll_fd, s->events ? EPOLL_CTL_MOD : EPOLL_CTL_ADD, fd, &event))
        return dray__fail_errno(error, errno, "descriptors of an update");
    s->events = events;
    return DRAY_OK;
}

/* Is there anything to ask, to get, or to hand back? */
static bool is_busy(const struct source *s)
{
    return wants_more(s) || s->flying.first || (s->staged && dray__peer_owes(s->of->peer));
}

/* The two sides do not agree on how to speak: trying again changes nothing. */
static bool hopeless(int rc)
{
    return rc == DRAY_EPERM || rc == DRAY_EVERSION || rc == DRAY_EUNSUPPORTED ||
           rc == DRAY_EINVALID || rc == DRAY_ENOMEM;
}

/* Does what can be done for one source now. *moved: something was. */
static int serve(struct remote_lane *l, struct source *s, bool *moved, dray_error *error)
{
    dray_error why;
    bool fatal = false;
    if (!is_busy(s))
        return DRAY_OK;
    if (s->broken && !dray__peer_is_open(s->of->peer) && dray__now() < s->retry_ns)
        return DRAY_OK;
    int rc = dray__peer_open(s->of->peer, &why);
    if (rc == DRAY_OK) {
        rc = ask(l, s, error);
        if (rc)
            return rc;
        rc = dray__peer_send(s->of->peer, &why);
    }
    fatal = hopeless(rc);
    if (rc == DRAY_OK || rc == DRAY_EAGAIN)
        rc = receive(l, s, &fatal, &why);
    if (s->peer && rc && rc != DRAY_EAGAIN) {
        *moved = true;
        return desert(l, s, &why, error);
    }
    if (fatal) {
        if (error)
            *error = why;
        return rc;
    }
    *moved |= rc == DRAY_OK;
    if (rc == DRAY_EAGAIN && dray__now() - dray__peer_moved(s->of->peer) > STALL_NS)
        rc = dray__fail(&why, DRAY_ETIMEDOUT, "%s has been silent for %d s", s->of->endpoint,
                        (int)(STALL_NS / DRAY__SECOND));
    if (rc && rc != DRAY_EAGAIN && s->peer)
        return desert(l, s, &why, error);
    if (rc && rc != DRAY_EAGAIN)
        return break_off(l, s, &why, error);
    return watch(l, s, error);
}

/* ---- the lane -------------------------------------------------------------------------------- */

static bool finished(const struct remote_lane *l)
{
    for (uint32_t i = 0; i < l->count; i++)
        if (is_busy(&l->sources[i]))
            return false;
    return true;
}

/* How long nothing need show before it is looked again; silence is looked for, too. */
static int64_t patience(const struct remote_lane *l)
{
    for (uint32_t i = 0; i < l->count; i++)
        if (l->sources[i].flying.first && dray__peer_is_blind(l->sources[i].of->peer))
            return BLIND_NS;
    return l->cohort ? NOT_YET_NS : TICK_NS;
}

static int lane_step(void *lane, int64_t until_ns, bool *waits, dray_error *error)
{
    struct remote_lane *l = lane;
    bool moved = true;
    *waits = false;
    while (moved && dray__now() < until_ns) {
        moved = false;
        for (uint32_t i = 0; i < l->count; i++) {
            int rc = serve(l, &l->sources[i], &moved, error);
            if (rc)
                return rc;
        }
    }
    if (finished(l))
        return DRAY_OK;
    *waits = !moved;
    struct itimerspec tick = {.it_value = {.tv_nsec = patience(l)}};
    timerfd_settime(l->timer_fd, 0, &tick, NULL);
    return DRAY_EAGAIN;
}

static int lane_fd(const void *lane)
{
    const struct remote_lane *l = lane;
    return l->poll_fd;
}

static void lane_report(const void *lane, dray_update_report *report)
{
    const struct remote_lane *l = lane;
    report->retries += l->retries;
    report->delta_bytes += l->delta_bytes;
    report->delta_covered_bytes += l->delta_covered_bytes;
    for (uint32_t i = 0; i < l->count; i++) {
        const dray__source *of = l->sources[i].of;
        if (of->peer && of->host != l->haul->destination->host)
            report->wire_bytes += dray__peer_wire_bytes(of->peer);
    }
    report->wire_bytes -= l->wire_before;
    report->link_bytes[DRAY_LINK_NETWORK] -= l->fanned_bytes;
    report->link_bytes[DRAY_LINK_HOST] += l->fanned_bytes;
}

static uint64_t lane_held_bytes(const void *lane)
{
    const struct remote_lane *l = lane;
    return l->peak;
}

/* Names those who did not answer. */
static void lane_explain(const void *lane, dray_error *error)
{
    const struct remote_lane *l = lane;
    for (uint32_t i = 0; i < l->count; i++) {
        const struct source *s = &l->sources[i];
        if (!wants_more(s) && !s->flying.first)
            continue;
        dray__fail_prefix(error, error->code, "publisher %s at %s%s%s: ", s->of->name,
                          s->of->endpoint, s->broken ? " cannot be reached, " : " answers slowly",
                          s->broken ? s->trouble.message : "");
        return;
    }
}

const dray__lane_kind dray__lane_remote = {.name = "remote",
                                           .takes = dray__remote_takes,
                                           .open = dray__remote_open,
                                           .step = lane_step,
                                           .fd = lane_fd,
                                           .report = lane_report,
                                           .held_bytes = lane_held_bytes,
                                           .explain = lane_explain,
                                           .close = dray__remote_close};
