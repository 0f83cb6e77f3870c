/* The lane of sources on other hosts: asks their data servers (pull.h) for slices of what the plan
 * wants, many requests in flight but never more bytes than the ceiling, takes each answer into a
 * slot that stays in cache, and moves it from there to its place.
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
 * A connection that breaks, or is silent for STALL_NS, is opened again: answers that arrived are
 * kept, the rest is asked for again, until the update's deadline. */
#include "base/clock.h"
#include "base/error.h"
#include "mover/checksum.h"
#include "mover/mover.h"
#include "weights/delta.h"
#include "weights/haul.h"
#include "weights/peer.h"

#include <errno.h>
#include <inttypes.h>
#include <poll.h>
#include <stdlib.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/timerfd.h>
#include <unistd.h>

enum {
    SEGMENT = 256 << 10, /* of data in one answer */
    SEGMENT_MIN = 8 << 10,
    RECTS = 64, /* in one request */
    SLOTS = 4,
    WRONG_MAX = 3 /* answers that were changed on the way, one after the other */
};
#define WINDOW_MAX ((uint64_t)32 << 20)
#define STALL_NS (3 * DRAY__SECOND)
#define REFUSED_NS (3 * DRAY__SECOND)
#define PAUSE_MIN_NS (50 * DRAY__MILLISECOND)
#define PAUSE_MAX_NS DRAY__SECOND
#define TICK_NS (100 * DRAY__MILLISECOND)

/* A part of an op that lies in one block of its source. */
struct part {
    uint64_t op;
    uint32_t block;
    dray__rect rect;
};

struct slice {
    uint64_t part;
    dray__rect rect;
};

struct request {
    struct request *next;
    uint32_t id, count;
    uint64_t bytes;
    bool plain; /* deltas are not wanted */
    struct slice slices[];
};

struct queue {
    struct request *first, **last;
};

struct source {
    dray__source *of;
    struct part *parts;
    uint64_t count, capacity, next;
    dray__slicer slicer;   /* of the part, */
    dray__delta_walk walk; /* or this one: along the slices of deltas */
    dray__rect ahead;      /* its next slice */
    bool in_part, has_ahead;
    struct queue again, flying; /* to be asked for again; asked for, in order */
    uint64_t flying_bytes;
    dray_region *slot; /* its answer is coming into it */
    uint32_t wrong;    /* answers in a row that were changed on the way */
    int64_t retry_ns, pause_ns, broken_ns;
    bool broken;
    short events; /* 0: not watched */
    dray_error trouble;
};

struct remote_lane {
    dray__haul *haul;
    struct source *sources; /* those that have parts */
    uint32_t count, turn;
    uint32_t last_id;
    uint64_t segment, window, in_flight, peak, left; /* left: ops' bytes still to come */
    dray_region *slots[SLOTS];                       /* free ones */
    uint32_t free_slots, slot_count;
    int poll_fd, timer_fd;
    uint64_t wire_before;
    uint32_t retries;

    /* the answer that is being put in its place */
    dray_copy copies[RECTS];
    uint64_t sums[RECTS], slot_sums[RECTS];
    bool sparse[RECTS]; /* it was entries of a delta */
    uint64_t delta_bytes, delta_covered_bytes;
    struct request *spare;
};

/* ---- opening --------------------------------------------------------------------------------- */

static bool lane_takes(const dray__haul *haul, const dray__op *op)
{
    const dray__source *source = &haul->sources->sources[op->copy.source];
    return dray__source_remote(source, op->copy.source_region, haul->destination->host);
}

static bool push_part(struct source *s, const struct part *part)
{
    if (s->count == s->capacity) {
        uint64_t capacity = s->capacity ? s->capacity * 2 : 64;
        struct part *parts = realloc(s->parts, capacity * sizeof *parts);
        if (!parts)
            return false;
        s->parts = parts;
        s->capacity = capacity;
    }
    s->parts[s->count++] = *part;
    return true;
}

/* Does the copy read this part of the block? Two blocks may hold the same elements. */
static bool reads(const dray_copy *copy, const dray_block *block, uint32_t ndim,
                  const dray__rect *cross)
{
    if (copy->source_region != block->region)
        return false;
    uint64_t copy_at = copy->source_offset, block_at = block->offset;
    for (uint32_t d = 0; d < ndim; d++) {
        copy_at += (uint64_t)(cross->start[d] - copy->start[d]) * (uint64_t)copy->source_stride[d];
        block_at += (uint64_t)(cross->start[d] - block->start[d]) * (uint64_t)block->stride[d];
        if (cross->extent[d] > 1 && copy->source_stride[d] != block->stride[d])
            return false;
    }
    return copy_at == block_at;
}

/* The blocks of each tensor of a source, in CSR form. */
struct blocks {
    uint32_t *first, *order;
};

static void blocks_free(struct blocks *b)
{
    free(b->first);
    free(b->order);
}

static bool blocks_make(const dray_layout *layout, struct blocks *out)
{
    uint32_t tensors = dray_layout_tensor_count(layout), count = dray_layout_block_count(layout);
    out->first = calloc((size_t)tensors + 2, sizeof *out->first);
    out->order = calloc((size_t)count + 1, sizeof *out->order);
    if (!out->first || !out->order)
        return false;
    for (uint32_t b = 0; b < count; b++)
        out->first[dray_layout_block(layout, b)->tensor + 2]++;
    for (uint32_t t = 0; t < tensors; t++)
        out->first[t + 2] += out->first[t + 1];
    for (uint32_t b = 0; b < count; b++)
        out->order[out->first[dray_layout_block(layout, b)->tensor + 1]++] = b;
    return true;
}

/* Cuts an op along the blocks of its source. */
static int cut(struct remote_lane *l, struct source *s, const struct blocks *blocks, uint64_t op,
               dray_error *error)
{
    const dray_copy *copy = &l->haul->sources->ops[op].copy;
    const dray_layout *layout = s->of->layout;
    dray__rect whole = dray__copy_rect(copy);
    uint64_t left = dray__rect_elements(&whole);
    uint32_t tensor;
    int rc = dray_layout_find(layout, l->haul->sources->names[copy->tensor], &tensor, error);
    if (rc)
        return rc;
    uint32_t ndim = dray_layout_tensor(layout, tensor)->ndim;
    for (uint32_t i = blocks->first[tensor]; i < blocks->first[tensor + 1] && left; i++) {
        struct part part = {.op = op, .block = blocks->order[i]};
        dray__rect held = dray__rect_of(layout, part.block);
        if (!dray__rect_cross(&whole, &held, &part.rect) ||
            !reads(copy, dray_layout_block(layout, part.block), ndim, &part.rect))
            continue;
        if (!push_part(s, &part))
            return dray__nomem(error);
        left -= dray__rect_elements(&part.rect);
    }
    if (left)
        return dray__fail(error, DRAY_EINTERNAL,
                          "tensor %s: a planned copy reads %" PRIu64 " elements outside any block",
                          dray__haul_tensor(l->haul, copy)->name, left);
    return DRAY_OK;
}

static int open_source(struct remote_lane *l, uint32_t index, const uint64_t *ops, uint64_t count,
                       dray_error *error)
{
    struct source *s = &l->sources[l->count];
    *s = (struct source){.of = &l->haul->sources->sources[index], .pause_ns = PAUSE_MIN_NS};
    s->again.last = &s->again.first;
    s->flying.last = &s->flying.first;
    struct blocks blocks = {0};
    int rc = blocks_make(s->of->layout, &blocks) ? DRAY_OK : dray__nomem(error);
    for (uint64_t i = 0; i < count && rc == DRAY_OK; i++)
        if (l->haul->sources->ops[ops[i]].copy.source == index)
            rc = cut(l, s, &blocks, ops[i], error);
    blocks_free(&blocks);
    l->count++;
    if (rc == DRAY_OK && !s->of->peer)
        rc = dray__peer_new(s->of->endpoint, l->haul->options.keys, &s->of->peer, error);
    if (rc == DRAY_OK)
        l->wire_before += dray__peer_wire_bytes(s->of->peer);
    return rc;
}

/* The ceiling holds the slots and what is in flight. */
static int open_slots(struct remote_lane *l, uint64_t ceiling, dray_error *error)
{
    uint64_t segment = ceiling / 8;
    l->segment = segment > SEGMENT ? SEGMENT : segment < SEGMENT_MIN ? SEGMENT_MIN : segment;
    l->slot_count = l->count < SLOTS ? l->count : SLOTS;
    l->window = ceiling - l->slot_count * l->segment;
    if (l->window > WINDOW_MAX)
        l->window = WINDOW_MAX;
    for (uint32_t i = 0; i < l->slot_count; i++) {
        int rc = dray_region_alloc(DRAY_REGION_HOST, l->segment, "slot", &l->slots[i], error);
        if (rc)
            return rc;
        l->free_slots++;
    }
    return DRAY_OK;
}

static int lane_init(struct remote_lane *l, const uint64_t *ops, uint64_t count, uint64_t ceiling,
                     dray_error *error)
{
    const dray__sources *all = l->haul->sources;
    bool *has = calloc((size_t)all->count + 1, sizeof *has);
    l->sources = calloc((size_t)all->count + 1, sizeof *l->sources);
    int rc = has && l->sources ? DRAY_OK : dray__nomem(error);
    for (uint64_t i = 0; i < count && rc == DRAY_OK; i++)
        has[all->ops[ops[i]].copy.source] = true;
    for (uint32_t i = 0; i < all->count && rc == DRAY_OK; i++)
        if (has[i])
            rc = open_source(l, i, ops, count, error);
    free(has);
    if (rc == DRAY_OK)
        rc = open_slots(l, ceiling, error);
    if (rc)
        return rc;
    l->poll_fd = epoll_create1(EPOLL_CLOEXEC);
    l->timer_fd = timerfd_create(CLOCK_MONOTONIC, TFD_CLOEXEC | TFD_NONBLOCK);
    struct epoll_event event = {.events = EPOLLIN};
    if (l->poll_fd < 0 || l->timer_fd < 0 ||
        epoll_ctl(l->poll_fd, EPOLL_CTL_ADD, l->timer_fd, &event))
        return dray__fail_errno(error, errno, "descriptors of an update");
    return DRAY_OK;
}

static void free_queue(struct queue *queue)
{
    while (queue->first) {
        struct request *next = queue->first->next;
        free(queue->first);
        queue->first = next;
    }
}

static void lane_close(void *lane)
{
    struct remote_lane *l = lane;
    if (!l)
        return;
    for (uint32_t i = 0; i < l->count; i++) {
        struct source *s = &l->sources[i];
        if (s->of->peer && s->flying.first)
            dray__peer_drop(s->of->peer); /* its answers are nobody's */
        free_queue(&s->again);
        free_queue(&s->flying);
        dray_region_free(s->slot);
        free(s->parts);
    }
    for (uint32_t i = 0; i < l->free_slots; i++)
        dray_region_free(l->slots[i]);
    if (l->poll_fd >= 0)
        close(l->poll_fd);
    if (l->timer_fd >= 0)
        close(l->timer_fd);
    free(l->sources);
    free(l->spare);
    free(l);
}

static int lane_open(dray__haul *haul, const uint64_t *ops, uint64_t count, uint64_t ceiling,
                     void **out, dray_error *error)
{
    struct remote_lane *l = calloc(1, sizeof *l);
    if (!l)
        return dray__nomem(error);
    l->haul = haul;
    l->poll_fd = l->timer_fd = -1;
    int rc = lane_init(l, ops, count, ceiling, error);
    if (rc) {
        lane_close(l);
        return rc;
    }
    *out = l;
    return DRAY_OK;
}

/* ---- asking ---------------------------------------------------------------------------------- */

static const dray__op *op_of(const struct remote_lane *l, const struct source *s,
                             const struct slice *slice)
{
    return &l->haul->sources->ops[s->parts[slice->part].op];
}

/* The dtype on the wire: the smaller one. */
static int32_t wire_dtype(const dray_copy *copy)
{
    return dray_dtype_size((dray_dtype)copy->destination_dtype) <=
                   dray_dtype_size((dray_dtype)copy->source_dtype)
               ? copy->destination_dtype
               : copy->source_dtype;
}

static uint64_t wire_bytes(const dray_copy *copy, const dray__rect *rect)
{
    return dray__rect_elements(rect) * dray_dtype_size((dray_dtype)wire_dtype(copy));
}

/* Can what changed in a slice be written where the copy leads? */
static bool takes_deltas(const struct remote_lane *l, const struct source *s, const dray_copy *copy)
{
    return s->of->has_delta && l->haul->options.has_base &&
           wire_dtype(copy) == copy->destination_dtype &&
           DRAY__DELTA_SLICE * dray_dtype_size((dray_dtype)wire_dtype(copy)) <= l->segment;
}

static void start_part(struct remote_lane *l, struct source *s, const struct part *part,
                       const dray_copy *copy)
{
    s->in_part = true;
    s->has_ahead = takes_deltas(l, s, copy);
    if (s->has_ahead) {
        dray__delta_grid(s->of->layout, part->block, &part->rect, &s->walk);
        dray__delta_grid_next(&s->walk, &s->ahead);
    } else {
        dray__slicer_start(&s->slicer, &part->rect, dray_dtype_size((dray_dtype)wire_dtype(copy)),
                           l->segment);
    }
}

/* Takes the next slice of the source's parts, if it has at most `room` bytes. */
static bool next_slice(struct remote_lane *l, struct source *s, uint64_t room, struct slice *out)
{
    if (s->next == s->count)
        return false;
    const struct part *part = &s->parts[s->next];
    const dray_copy *copy = &l->haul->sources->ops[part->op].copy;
    if (!s->in_part)
        start_part(l, s, part, copy);
    if (s->has_ahead)
        out->rect = s->ahead;
    else
        dray__slicer_peek(&s->slicer, &out->rect);
    if (wire_bytes(copy, &out->rect) > room)
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
    while (request->count < RECTS && next_slice(l, s, l->segment - request->bytes, slice)) {
        const dray_copy *copy = &op_of(l, s, slice)->copy;
        request->bytes += wire_bytes(copy, &slice->rect);
        request->plain |= !takes_deltas(l, s, copy);
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
                                     .dtype = wire_dtype(&op->copy),
                                     .twice = twice(l, op),
                                     .rect = slice->rect};
    }
    const dray__haul_options *o = &l->haul->options;
    dray__pull_base base = {o->incarnation, o->base, o->version};
    request->id = ++l->last_id;
    dray__pull_put_request(dray__peer_out(s->of->peer), request->id, o->verify, s->of->token,
                           o->attempt, request->plain ? NULL : &base, rects, request->count);
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

/* Fills the source's share of the window. */
static int ask(struct remote_lane *l, struct source *s, dray_error *error)
{
    uint64_t share = l->window / l->count;
    while (wants_more(s)) {
        bool first = !s->flying.first;
        if (l->in_flight + l->segment > l->window ||
            (!first && s->flying_bytes + l->segment > share))
            break;
        struct request *request;
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
static dray_copy out_of_slot(const dray_copy *op, const dray__rect *rect, uint64_t offset)
{
    dray_copy out = dray__copy_cut(op, rect), dense = out;
    dray__copy_to_dense(&dense, wire_dtype(op), offset);
    out.source_region = 0;
    out.source_dtype = wire_dtype(op);
    out.source_offset = offset;
    memcpy(out.source_stride, dense.destination_stride, sizeof out.source_stride);
    return out;
}

/* What the head of an answer says of rectangle i. */
struct told {
    uint64_t source_sum, sum;
    uint64_t bytes; /* of the data */
};

static struct told told_of(const struct remote_lane *l, const struct source *s,
                           const struct request *request, const uint8_t *head, uint32_t i)
{
    bool verify = l->haul->options.verify;
    size_t size = dray__pull_head_bytes(verify, !request->plain);
    dray__reader in = dray__reader_of(head + i * size, size);
    struct told told = {0};
    if (verify) {
        told.source_sum = dray__get_u64(&in);
        told.sum = dray__get_u64(&in);
    }
    const struct slice *slice = &request->slices[i];
    told.bytes =
        request->plain ? wire_bytes(&op_of(l, s, slice)->copy, &slice->rect) : dray__get_u32(&in);
    return told;
}

/* Where each rectangle's data are in the slot, and which are deltas. */
static void look(struct remote_lane *l, const struct source *s, const struct request *request,
                 const uint8_t *head)
{
    uint64_t offset = 0;
    for (uint32_t i = 0; i < request->count; i++) {
        const struct slice *slice = &request->slices[i];
        const dray_copy *copy = &op_of(l, s, slice)->copy;
        uint64_t bytes = told_of(l, s, request, head, i).bytes;
        l->copies[i] = out_of_slot(copy, &slice->rect, offset);
        l->sparse[i] = bytes < wire_bytes(copy, &slice->rect);
        l->sums[i] = l->slot_sums[i] = 0;
        offset += bytes;
    }
}

static int place_delta(struct remote_lane *l, const struct source *s, uint32_t i, uint64_t bytes,
                       dray_error *error)
{
    const dray_copy *copy = &l->copies[i];
    dray_region *to = l->haul->destination->regions[copy->destination_region];
    const uint8_t *data = dray_region_base(s->slot);
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
        if (l->sparse[i]) {
            int rc = place_delta(l, s, i, told_of(l, s, request, head, i).bytes, error);
            if (rc)
                return rc;
            continue;
        }
        while (end < request->count && !l->sparse[end] &&
               l->copies[end].destination_region == region)
            end++;
        dray__move_options options = {.layout = to->layout,
                                      .sums = verify ? l->sums + i : NULL,
                                      .source_sums = verify ? l->slot_sums + i : NULL};
        int rc =
            dray__move_all(s->slot, to->regions[region], l->copies + i, end - i, &options, error);
        if (rc)
            return rc;
    }
    return DRAY_OK;
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
        h->expected[op->block] += l->sums[i];
        h->found[op->block] += dray__haul_read_back(
            h, h->destination->regions[l->copies[i].destination_region], &l->copies[i]);
        dray_copy origin = l->copies[i];
        origin.source_dtype = op->copy.source_dtype;
        if (op->owned)
            dray__haul_own(h, &origin, source_sum);
    }
}

static void landed(struct remote_lane *l, struct source *s)
{
    struct request *request = s->flying.first;
    s->flying.first = request->next;
    if (!s->flying.first)
        s->flying.last = &s->flying.first;
    s->flying_bytes -= request->bytes;
    l->in_flight -= request->bytes;
    request->next = NULL;
}

static int break_off(struct remote_lane *l, struct source *s, const dray_error *why,
                     dray_error *error);

/* A whole answer lies in the slot. */
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
        if (++s->wrong < WRONG_MAX)
            return break_off(l, s, &why, error);
        if (error)
            *error = why;
        return why.code;
    }
    s->wrong = 0;
    for (uint32_t i = 0; i < request->count; i++)
        l->haul->bytes += dray__copy_bytes(&l->copies[i]);
    if (l->haul->options.verify)
        enter(l, s, request, head);
    l->haul->verify_ns += dray__now() - placed;
    landed(l, s);
    request_end(l, request);
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
        if (part > wire_bytes(&op_of(l, s, slice)->copy, &slice->rect))
            return false;
        bytes += part;
    }
    return bytes == arrival->header.data_bytes;
}

/* Does the answer belong to the oldest request, and is it of the right size? */
static int check_answer(const struct remote_lane *l, const struct source *s,
                        const dray__arrival *arrival, dray_error *error)
{
    const struct request *request = s->flying.first;
    const dray__answer_header *header = &arrival->header;
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
            request->count * dray__pull_head_bytes(l->haul->options.verify, !request->plain) ||
        !sizes_fit(l, s, request, arrival))
        return dray__fail(error, DRAY_EPROTO, "publisher %s at %s: not the answer that was due",
                          s->of->name, s->of->endpoint);
    return DRAY_OK;
}

/* One answer. */
static int receive(struct remote_lane *l, struct source *s, bool *fatal, dray_error *error)
{
    dray__arrival arrival;
    int rc = dray__peer_recv_head(s->of->peer, &arrival, error);
    if (rc)
        return rc;
    rc = check_answer(l, s, &arrival, error);
    *fatal = rc != DRAY_OK;
    if (rc)
        return rc;
    if (!s->slot && !l->free_slots)
        return DRAY_EAGAIN; /* until another source's answer is complete */
    if (!s->slot)
        s->slot = l->slots[--l->free_slots];
    rc = dray__peer_recv_data(s->of->peer, dray_region_base(s->slot), error);
    if (rc)
        return rc;
    s->broken = false;
    s->pause_ns = PAUSE_MIN_NS;
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

static int watch(struct remote_lane *l, struct source *s, dray_error *error)
{
    if (!dray__peer_is_open(s->of->peer))
        return DRAY_OK; /* the tick wakes us when it is time to try again */
    short events = dray__peer_events(s->of->peer);
    if (s->slot == NULL && !l->free_slots)
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

/* Does what can be done for one source now. *moved: something was. */
static int serve(struct remote_lane *l, struct source *s, bool *moved, dray_error *error)
{
    dray_error why;
    bool fatal = false;
    if (!wants_more(s) && !s->flying.first)
        return DRAY_OK;
    if (s->broken && !dray__peer_is_open(s->of->peer) && dray__now() < s->retry_ns)
        return DRAY_OK;
    int rc = dray__peer_open(s->of->peer, &why);
    if (rc == DRAY_OK)
        rc = ask(l, s, error);
    if (rc)
        return rc;
    rc = dray__peer_send(s->of->peer, &why);
    if (rc == DRAY_OK || rc == DRAY_EAGAIN)
        rc = receive(l, s, &fatal, &why);
    if (fatal) {
        if (error)
            *error = why;
        return rc;
    }
    *moved |= rc == DRAY_OK;
    if (rc == DRAY_EAGAIN && dray__now() - dray__peer_moved(s->of->peer) > STALL_NS)
        rc = dray__fail(&why, DRAY_ETIMEDOUT, "%s has been silent for %d s", s->of->endpoint,
                        (int)(STALL_NS / DRAY__SECOND));
    if (rc && rc != DRAY_EAGAIN)
        return break_off(l, s, &why, error);
    return watch(l, s, error);
}

/* ---- the lane -------------------------------------------------------------------------------- */

static bool finished(const struct remote_lane *l)
{
    for (uint32_t i = 0; i < l->count; i++)
        if (wants_more(&l->sources[i]) || l->sources[i].flying.first)
            return false;
    return true;
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
    struct itimerspec tick = {.it_value = {.tv_nsec = TICK_NS}}; /* silence is looked for, too */
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
    for (uint32_t i = 0; i < l->count; i++)
        report->wire_bytes += dray__peer_wire_bytes(l->sources[i].of->peer);
    report->wire_bytes -= l->wire_before;
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
                                           .takes = lane_takes,
                                           .open = lane_open,
                                           .step = lane_step,
                                           .fd = lane_fd,
                                           .report = lane_report,
                                           .held_bytes = lane_held_bytes,
                                           .explain = lane_explain,
                                           .close = lane_close};
