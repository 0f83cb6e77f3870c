/* Opens the source of data servers: cuts the ops into parts along their sources' blocks, divides
 * the parts among publishers and members of the cohort, and opens slots and connections. */
#include "base/array.h"
#include "base/error.h"
#include "weights/placements/prequantised.h"
#include "weights/sources/remote.h"

#include <inttypes.h>
#include <stdlib.h>

bool dray__remote_reaches(const dray__transfer *transfer, const dray__op *op,
                          const dray__placement *placement)
{
    (void)placement;
    const dray__source *source = &transfer->sources->sources[op->copy.source];
    return dray__source_remote(source, op->copy.source_region, transfer->destination->host);
}

bool dray__remote_push(struct source *s, const struct part *part)
{
    return DRAY__PUSH(s->parts, s->count, s->capacity, *part);
}

bool dray__remote_block(const dray__transfer *h, const dray__op *op, const dray__rect *rect,
                        uint32_t *block)
{
    *block = op->block;
    return !op->prequantised || dray__prequantised_block(h, op, rect, block);
}

/* Gives a part to the publisher, or, stripe by stripe, to the members of the cohort. */
static bool deal_part(struct remote_route *l, struct source *publisher, const struct part *part)
{
    const dray__op *op = &l->transfer->sources->ops[part->op];
    uint32_t block;
    if (!l->cohort || !dray__remote_block(l->transfer, op, &part->rect, &block) ||
        !dray__cohort_shared(l->cohort, block))
        return dray__remote_push(publisher, part);
    for (uint32_t i = 0; i < dray__cohort_stripes(l->cohort, block); i++) {
        struct part piece = *part;
        dray__rect stripe = dray__cohort_stripe(l->cohort, block, i);
        if (op->prequantised) /* whole cells */
            stripe = dray__prequantised_aligned(l->transfer, op, &stripe);
        if (!dray__rect_cross(&part->rect, &stripe, &piece.rect))
            continue;
        uint32_t member = dray__cohort_from(l->cohort, block, i, publisher->of->host, &piece.block);
        struct source *from =
            member == DRAY__FROM_PUBLISHER ? publisher : &l->sources[l->publishers + member];
        if (member == DRAY__FROM_PUBLISHER)
            piece.block = part->block;
        if (!dray__remote_push(from, &piece))
            return false;
    }
    return true;
}

/* Cuts an op along the blocks of its source. */
static int cut(struct remote_route *l, struct source *s, uint64_t op, dray_error *error)
{
    const dray_copy *copy = &l->transfer->sources->ops[op].copy;
    const dray_layout *layout = s->of->layout;
    dray__rect whole = dray__copy_rect(copy);
    uint64_t left = dray__rect_elements(&whole);
    uint32_t tensor;
    int rc = dray_layout_find(layout, l->transfer->sources->names[copy->tensor], &tensor, error);
    if (rc)
        return rc;
    dray__blocks held = dray__blocks_of(layout, tensor, &whole);
    while (left && dray__blocks_next(&held)) {
        struct part part = {.op = op,
                            .block = held.index,
                            .publisher = (uint32_t)(s - l->sources),
                            .publisher_block = held.index,
                            .rect = held.cross};
        if (!dray__copy_reads(copy, held.block, &held.cross))
            continue;
        if (!deal_part(l, s, &part))
            return dray__nomem(error);
        left -= dray__rect_elements(&part.rect);
    }
    if (left)
        return dray__fail(error, DRAY_EINTERNAL,
                          "tensor %s: a planned copy reads %" PRIu64 " elements outside any block",
                          dray__transfer_tensor(l->transfer, copy)->name, left);
    return DRAY_OK;
}

static void source_init(struct source *s, dray__source *of, bool cohort)
{
    *s = (struct source){.of = of, .cohort = cohort, .pause_ns = PAUSE_MIN_NS};
    s->again.last = &s->again.first;
    s->flying.last = &s->flying.first;
    s->brought_ns = dray__now();
}

static int cut_source(struct remote_route *l, uint32_t index, const uint64_t *ops, uint64_t count,
                      dray_error *error)
{
    struct source *s = &l->sources[index];
    int rc = DRAY_OK;
    for (uint64_t i = 0; i < count && rc == DRAY_OK; i++)
        if (l->transfer->sources->ops[ops[i]].copy.source == index)
            rc = cut(l, s, ops[i], error);
    return rc;
}

/* Returns true when deltas are likely, so that few bytes arrive. */
static bool expects_deltas(const dray__transfer *h)
{
    bool any = false;
    for (uint32_t i = 0; i < h->sources->count; i++)
        any |= h->sources->sources[i].has_delta;
    return any && h->options.has_base;
}

static bool has_server(const dray__source *member, const dray__destination *destination)
{
    (void)destination;
    return member->endpoint[0] != 0;
}

/* Lets other members of the cohort read this rank's parts. It is not an error when they cannot. */
static int open_cohort(struct remote_route *l, const uint64_t *ops, uint64_t count,
                       dray_error *error)
{
    const dray__transfer *h = l->transfer;
    dray_error why;
    if (!h->options.run || !h->sources->cohort_count || expects_deltas(h))
        return DRAY_OK;
    int rc = dray__cohort_new(h->sources, h->destination, has_server, &l->cohort, &why);
    if (rc == DRAY_ENOENT)
        return DRAY_OK;
    if (rc == DRAY_OK)
        rc = dray__shares_new(h->options.run, h->destination->layout, h->destination->regions,
                              &l->shares, &why);
    for (uint64_t i = 0; i < count && rc == DRAY_OK; i++) {
        const dray__op *op = &h->sources->ops[ops[i]];
        dray__rect rect = dray__copy_rect(&op->copy);
        uint32_t block;
        if (dray__remote_block(h, op, &rect, &block) &&
            !dray__shares_expect(l->shares, block, &rect))
            rc = dray__nomem(&why);
    }
    if (rc == DRAY_OK)
        dray__local_share(h->destination->token, l->shares);
    else
        dray__shares_free(l->shares);
    if (rc && error)
        *error = why;
    return rc;
}

static void forget_link(void *link)
{
    dray__peer_free(link);
}

static int open_link(const dray__transfer *transfer, dray__source *of, dray__peer **out,
                     dray_error *error)
{
    *out = dray__kept_find(of->kept, forget_link);
    if (*out)
        return DRAY_OK;
    int rc = dray__peer_new(of->endpoint, transfer->options.keys, out, error);
    return rc ? rc : dray__kept_add(&of->kept, forget_link, *out, error);
}

static int open_sources(struct remote_route *l, const uint64_t *ops, uint64_t count,
                        dray_error *error)
{
    const dray__sources *all = l->transfer->sources;
    bool *has = calloc((size_t)all->count + 1, sizeof *has);
    l->publishers = all->count;
    l->count = all->count + (l->cohort ? all->cohort_count : 0);
    l->sources = calloc((size_t)l->count + 1, sizeof *l->sources);
    int rc = has && l->sources ? DRAY_OK : dray__nomem(error);
    for (uint32_t i = 0; i < l->count && rc == DRAY_OK; i++)
        source_init(&l->sources[i],
                    i < l->publishers ? &all->sources[i] : &all->cohort[i - l->publishers],
                    i >= l->publishers);
    for (uint64_t i = 0; i < count && rc == DRAY_OK; i++)
        has[all->ops[ops[i]].copy.source] = true;
    for (uint32_t i = 0; i < l->publishers && rc == DRAY_OK; i++)
        if (has[i])
            rc = cut_source(l, i, ops, count, error);
    free(has);
    for (uint32_t i = 0; i < l->count && rc == DRAY_OK; i++) {
        struct source *s = &l->sources[i];
        l->active += s->count > 0;
        if (s->of->endpoint && s->of->endpoint[0])
            rc = open_link(l->transfer, s->of, &s->link, error);
        if (rc == DRAY_OK && s->link)
            l->wire_before +=
                s->of->host == l->transfer->destination->host ? 0 : dray__peer_wire_bytes(s->link);
    }
    return rc;
}

/* Sets the bytes of one answer of each source: those of an arena's slot, of which two are under
 * way.
 */
static void open_segments(struct remote_route *l)
{
    for (uint32_t i = 0; i < l->count; i++) {
        struct source *s = &l->sources[i];
        uint64_t most = l->window / (DRAY__ARENA_HELD * (l->active ? l->active : 1));
        s->staged = !s->cohort && s->of->arena;
        s->segment = s->staged ? s->of->slot_bytes : l->segment;
        if (s->staged && s->segment > most)
            s->segment = most > l->segment ? most : l->segment;
        if (s->staged && s->segment > s->of->slot_bytes)
            s->segment = s->of->slot_bytes;
    }
}

static bool has_gpus(const struct remote_route *l)
{
    const dray__destination *to = l->transfer->destination;
    bool any = false;
    for (uint32_t i = 0; i < dray_layout_region_count(to->layout); i++)
        any |= to->regions[i] && dray_region_get_kind(to->regions[i]) == DRAY_REGION_CUDA;
    return any;
}

/* Returns the most bytes that a coder holds: an answer's data, or all of a slice's entries if that
 * is less. */
static uint64_t coder_bytes_of(const struct remote_route *l, uint64_t segment)
{
    uint64_t entries = DRAY__DELTA_SLICE * 9;
    return dray__delta_coder_bytes(segment < entries ? segment : entries, has_gpus(l));
}

/* Returns the bytes of one answer when slices come as deltas, such that each publisher can have a
 * few requests under way. */
static uint64_t deltas_at_once(const struct remote_route *l, uint64_t segment)
{
    uint64_t share = WINDOW_MAX / (4 * (uint64_t)(l->active ? l->active : 1));
    uint64_t most = share < SEGMENT_DELTA ? share : SEGMENT_DELTA;
    return segment < most ? segment : most;
}

static bool has_prequantised(const struct remote_route *l)
{
    bool any = false;
    for (uint32_t i = 0; i < l->publishers; i++)
        for (uint64_t p = 0; p < l->sources[i].count; p++)
            any |= l->transfer->sources->ops[l->sources[i].parts[p].op].prequantised;
    return any;
}

/* Divides the ceiling among the slots and the bytes in flight. segment is the size of one answer,
 * the same with and without NCCL, so that all members of a cohort cut in the same way. When deltas
 * are likely, there is no cohort, and answers hold many slices, which a GPU patches in one launch
 * and sums in another. */
static int open_slots(struct remote_route *l, uint64_t segment, uint64_t ceiling, dray_error *error)
{
    bool deltas = expects_deltas(l->transfer);
    l->segment = segment > SEGMENT ? SEGMENT : segment < SEGMENT_MIN ? SEGMENT_MIN : segment;
    uint32_t needing = 0;
    for (uint32_t i = 0; i < l->publishers; i++)
        needing += l->sources[i].count > 0 && !l->sources[i].of->arena;
    l->slot_count = needing < SLOTS ? needing : SLOTS;
    if (l->cohort || l->nccl || dray__carriers_read(l->transfer->options.keys))
        l->slot_count =
            SLOTS; /* parts may move to a publisher that had none; each read needs a slot */
    l->coder = deltas ? dray__delta_coder_new() : NULL;
    if (deltas && !l->coder)
        return dray__nomem(error);
    uint64_t large = deltas_at_once(l, segment);
    if (deltas && large > l->segment &&
        coder_bytes_of(l, large) <= (ceiling - l->slot_count * large) / 2)
        l->segment = large; /* slots and coder fit */
    l->coder_bytes = deltas ? coder_bytes_of(l, l->segment) : 0;
    /* A small share of the ceiling has fewer slots: the window holds an answer at least, where the
     * share holds two. */
    while (l->slot_count > 1 && (l->slot_count + 1) * l->segment > ceiling)
        l->slot_count--;
    l->window = ceiling - l->slot_count * l->segment;
    if (l->coder_bytes <= l->window / 2)
        l->window -= l->coder_bytes;
    else
        l->coder_bytes = 0; /* there are no deltas then */
    bool patches = l->coder_bytes && has_prequantised(l) && l->window / 4 >= PATCHED;
    if (patches) {
        int rc = dray_region_alloc(DRAY_REGION_HOST, PATCHED, "patched", &l->patched, error);
        if (rc)
            return rc;
        l->window -= PATCHED;
    }
    if (l->window > WINDOW_MAX)
        l->window = WINDOW_MAX;
    open_segments(l);
    for (uint32_t i = 0; i < l->slot_count; i++) {
        int rc = dray_region_alloc(DRAY_REGION_HOST, l->segment, "slot", &l->slots[i], error);
        if (rc)
            return rc;
        l->all_slots[i] = l->slots[i];
        l->free_slots++;
    }
    return DRAY_OK;
}

int dray__remote_open(dray__route *route, dray_error *error)
{
    struct remote_route *l = route->state;
    uint64_t ceiling = route->ceiling;
    l->transfer = route->transfer;
    l->waker = DRAY__WAKER_CLOSED;
    int rc = open_cohort(l, route->ops, route->count, error);
    if (rc == DRAY_OK)
        rc = open_sources(l, route->ops, route->count, error);
    if (rc == DRAY_OK)
        rc = dray__remote_nccl_open(l, error);
    if (rc == DRAY_OK)
        rc = open_slots(l, ceiling / 8, ceiling, error);
    if (rc == DRAY_OK)
        rc = dray__waker_open(&l->waker, true, error);
    route->fd = l->waker.fd;
    return rc;
}

void dray__remote_free(struct queue *queue)
{
    while (queue->first) {
        struct request *next = queue->first->next;
        free(queue->first);
        queue->first = next;
    }
}

void dray__remote_close(void *state)
{
    struct remote_route *l = state;
    for (uint32_t i = 0; l->sources && i < l->count; i++) {
        struct source *s = &l->sources[i];
        bool dropped = s->link && (s->flying.first || s->keys == KEYS_ASKED);
        if (dropped)
            dray__peer_drop(s->link); /* its answers are not needed */
        dray__remote_forget_keys(s, dropped);
        dray__remote_free(&s->again);
        dray__remote_free(&s->flying);
        free(s->parts);
    }
    for (uint32_t i = 0; i < SLOTS; i++)
        dray_region_free(l->all_slots[i]);
    dray__waker_close(&l->waker);
    dray__remote_nccl_close(l->nccl);
    dray__cohort_free(l->cohort);
    dray__delta_coder_free(l->coder);
    dray_region_free(l->patched);
    free(l->sources);
    free(l->spare);
}
