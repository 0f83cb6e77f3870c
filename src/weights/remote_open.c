/* Opening the lane of sources behind data servers: what is to be read, cut along the blocks that
 * hold it, and dealt to publishers and to the members of the cohort; the slots; the connections. */
#include "base/error.h"
#include "model/layout.h"
#include "weights/remote.h"
#include "weights/wired.h"

#include <errno.h>
#include <inttypes.h>
#include <stdlib.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/timerfd.h>
#include <unistd.h>

bool dray__remote_takes(const dray__haul *haul, const dray__op *op)
{
    const dray__source *source = &haul->sources->sources[op->copy.source];
    return (!op->transform || op->wired) &&
           dray__source_remote(source, op->copy.source_region, haul->destination->host);
}

bool dray__remote_push(struct source *s, const struct part *part)
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

bool dray__remote_block(const dray__haul *h, const dray__op *op, const dray__rect *rect,
                        uint32_t *block)
{
    *block = op->block;
    return !op->wired || dray__wired_block(h, op, rect, block);
}

/* Deals a part to the publisher, or, stripe by stripe, to the members of the cohort. */
static bool deal_part(struct remote_lane *l, struct source *home, const struct part *part)
{
    const dray__op *op = &l->haul->sources->ops[part->op];
    uint32_t block;
    if (!l->cohort || !dray__remote_block(l->haul, op, &part->rect, &block) ||
        !dray__cohort_shared(l->cohort, block))
        return dray__remote_push(home, part);
    for (uint32_t i = 0; i < dray__cohort_stripes(l->cohort, block); i++) {
        struct part piece = *part;
        dray__rect stripe = dray__cohort_stripe(l->cohort, block, i);
        if (op->wired) /* whole cells */
            stripe = dray__wired_aligned(l->haul, op, &stripe);
        if (!dray__rect_cross(&part->rect, &stripe, &piece.rect))
            continue;
        uint32_t member = dray__cohort_from(l->cohort, block, i, home->of->host, &piece.block);
        struct source *from =
            member == DRAY__FROM_PUBLISHER ? home : &l->sources[l->homes + member];
        if (member == DRAY__FROM_PUBLISHER)
            piece.block = part->block;
        if (!dray__remote_push(from, &piece))
            return false;
    }
    return true;
}

/* Cuts an op along the blocks of its source. */
static int cut(struct remote_lane *l, struct source *s, uint64_t op, dray_error *error)
{
    const dray_copy *copy = &l->haul->sources->ops[op].copy;
    const dray_layout *layout = s->of->layout;
    dray__rect whole = dray__copy_rect(copy);
    uint64_t left = dray__rect_elements(&whole);
    uint32_t tensor;
    int rc = dray_layout_find(layout, l->haul->sources->names[copy->tensor], &tensor, error);
    if (rc)
        return rc;
    const dray_block *block = dray__layout_first_block(layout, tensor);
    for (; block && left; block = dray__layout_next_block(layout, block)) {
        uint32_t index = dray__layout_block_index(layout, block);
        struct part part = {.op = op, .block = index, .home_block = index};
        dray__rect held = dray__rect_of(layout, index);
        if (!dray__rect_cross(&whole, &held, &part.rect) ||
            !dray__copy_reads(copy, block, &part.rect))
            continue;
        part.home = (uint32_t)(s - l->sources);
        if (!deal_part(l, s, &part))
            return dray__nomem(error);
        left -= dray__rect_elements(&part.rect);
    }
    if (left)
        return dray__fail(error, DRAY_EINTERNAL,
                          "tensor %s: a planned copy reads %" PRIu64 " elements outside any block",
                          dray__haul_tensor(l->haul, copy)->name, left);
    return DRAY_OK;
}

static void source_init(struct source *s, dray__source *of, bool peer)
{
    *s = (struct source){.of = of, .peer = peer, .pause_ns = PAUSE_MIN_NS};
    s->again.last = &s->again.first;
    s->flying.last = &s->flying.first;
    s->brought_ns = dray__now();
}

static int cut_source(struct remote_lane *l, uint32_t index, const uint64_t *ops, uint64_t count,
                      dray_error *error)
{
    struct source *s = &l->sources[index];
    int rc = DRAY_OK;
    for (uint64_t i = 0; i < count && rc == DRAY_OK; i++)
        if (l->haul->sources->ops[ops[i]].copy.source == index)
            rc = cut(l, s, ops[i], error);
    return rc;
}

/* Less than a share of the whole comes then. */
static bool expects_deltas(const dray__haul *h)
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

/* Others of the cohort take from here what this rank has; not being able to is no failure. */
static int open_cohort(struct remote_lane *l, const uint64_t *ops, uint64_t count,
                       dray_error *error)
{
    const dray__haul *h = l->haul;
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

static int open_sources(struct remote_lane *l, const uint64_t *ops, uint64_t count,
                        dray_error *error)
{
    const dray__sources *all = l->haul->sources;
    bool *has = calloc((size_t)all->count + 1, sizeof *has);
    l->homes = all->count;
    l->count = all->count + (l->cohort ? all->cohort_count : 0);
    l->sources = calloc((size_t)l->count + 1, sizeof *l->sources);
    int rc = has && l->sources ? DRAY_OK : dray__nomem(error);
    for (uint32_t i = 0; i < l->count && rc == DRAY_OK; i++)
        source_init(&l->sources[i], i < l->homes ? &all->sources[i] : &all->cohort[i - l->homes],
                    i >= l->homes);
    for (uint64_t i = 0; i < count && rc == DRAY_OK; i++)
        has[all->ops[ops[i]].copy.source] = true;
    for (uint32_t i = 0; i < l->homes && rc == DRAY_OK; i++)
        if (has[i])
            rc = cut_source(l, i, ops, count, error);
    free(has);
    for (uint32_t i = 0; i < l->count && rc == DRAY_OK; i++) {
        struct source *s = &l->sources[i];
        l->active += s->count > 0;
        if (s->of->endpoint && s->of->endpoint[0] && !s->of->peer)
            rc = dray__peer_new(s->of->endpoint, l->haul->options.keys, &s->of->peer, error);
        if (rc == DRAY_OK && s->of->peer)
            l->wire_before +=
                s->of->host == l->haul->destination->host ? 0 : dray__peer_wire_bytes(s->of->peer);
    }
    return rc;
}

/* What a source may answer at once: in an arena a slot, of which there are two under way. */
static void open_segments(struct remote_lane *l)
{
    for (uint32_t i = 0; i < l->count; i++) {
        struct source *s = &l->sources[i];
        uint64_t most = l->window / (DRAY__ARENA_HELD * (l->active ? l->active : 1));
        s->staged = !s->peer && s->of->arena;
        s->segment = s->staged ? s->of->slot_bytes : l->segment;
        if (s->staged && s->segment > most)
            s->segment = most > l->segment ? most : l->segment;
        if (s->staged && s->segment > s->of->slot_bytes)
            s->segment = s->of->slot_bytes;
    }
}

/* More than this the lane never holds beside what NCCL has. */
#define LANE_MAX (WINDOW_MAX + (uint64_t)SLOTS * SEGMENT)

/* The ceiling holds the slots and what is in flight. segment: of one answer, the same with and
 * without NCCL, so that the members of a cohort cut alike. */
static int open_slots(struct remote_lane *l, uint64_t segment, uint64_t ceiling, dray_error *error)
{
    l->segment = segment > SEGMENT ? SEGMENT : segment < SEGMENT_MIN ? SEGMENT_MIN : segment;
    uint32_t needing = 0;
    for (uint32_t i = 0; i < l->homes; i++)
        needing += l->sources[i].count > 0 && !l->sources[i].of->arena;
    l->slot_count = needing < SLOTS ? needing : SLOTS;
    if (l->cohort || l->nccl || dray__ucx_wants_reads())
        l->slot_count =
            SLOTS; /* a part may go back to a publisher that had none; reads have one each */
    l->coder = expects_deltas(l->haul) ? dray__delta_coder_new() : NULL;
    if (expects_deltas(l->haul) && !l->coder)
        return dray__nomem(error);
    l->coder_bytes = l->coder ? dray__delta_coder_bytes(l->segment) : 0;
    l->window = ceiling - l->slot_count * l->segment;
    if (l->coder_bytes <= l->window / 2)
        l->window -= l->coder_bytes;
    else
        l->coder_bytes = 0; /* nor will there be deltas */
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

static int lane_init(struct remote_lane *l, const uint64_t *ops, uint64_t count, uint64_t ceiling,
                     dray_error *error)
{
    uint64_t own = ceiling / 4 * 3 < LANE_MAX ? ceiling / 4 * 3 : LANE_MAX;
    int rc = open_cohort(l, ops, count, error);
    if (rc == DRAY_OK)
        rc = open_sources(l, ops, count, error);
    if (rc == DRAY_OK)
        rc = dray__remote_nccl_open(l, ceiling - own, error);
    if (rc == DRAY_OK)
        rc = open_slots(l, ceiling / 8, l->nccl ? own : ceiling, error);
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

void dray__remote_free(struct queue *queue)
{
    while (queue->first) {
        struct request *next = queue->first->next;
        free(queue->first);
        queue->first = next;
    }
}

void dray__remote_close(void *lane)
{
    struct remote_lane *l = lane;
    if (!l)
        return;
    for (uint32_t i = 0; i < l->count; i++) {
        struct source *s = &l->sources[i];
        bool dropped = s->of->peer && (s->flying.first || s->keys == KEYS_ASKED);
        if (dropped)
            dray__peer_drop(s->of->peer); /* its answers are nobody's */
        dray__remote_forget_keys(s, dropped);
        dray__remote_free(&s->again);
        dray__remote_free(&s->flying);
        free(s->parts);
    }
    for (uint32_t i = 0; i < SLOTS; i++)
        dray_region_free(l->all_slots[i]);
    if (l->poll_fd >= 0)
        close(l->poll_fd);
    if (l->timer_fd >= 0)
        close(l->timer_fd);
    dray__remote_nccl_close(l->nccl);
    dray__cohort_free(l->cohort);
    dray__delta_coder_free(l->coder);
    free(l->sources);
    free(l->spare);
    free(l);
}

int dray__remote_open(dray__haul *haul, const uint64_t *ops, uint64_t count, uint64_t ceiling,
                      void **out, dray_error *error)
{
    struct remote_lane *l = calloc(1, sizeof *l);
    if (!l)
        return dray__nomem(error);
    l->haul = haul;
    l->poll_fd = l->timer_fd = -1;
    int rc = lane_init(l, ops, count, ceiling, error);
    if (rc) {
        dray__remote_close(l);
        return rc;
    }
    *out = l;
    return DRAY_OK;
}
