/* One update's bytes: divides the ops among routes, and steps the routes in turn (transfer.h). */
#include "weights/transfer/transfer.h"
#include "weights/placements/load.h"

#include "base/clock.h"
#include "base/error.h"
#include "base/words.h"
#include "weights/delta/delta.h"
#include "weights/mark.h"
#include "weights/sources/upload.h"

#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

/* Each op goes to the first pair that takes it. A new kind of source is one file and its lines
 * here.
 */
#define PAIRS(PAIR)                                                                                \
    PAIR(gpu, patch)                                                                               \
    PAIR(upload, compiled)                                                                         \
    PAIR(gpu, compiled)                                                                            \
    PAIR(gathered, convert)                                                                        \
    PAIR(memory, patch)                                                                            \
    PAIR(file, patch)                                                                              \
    PAIR(server, copy)                                                                             \
    PAIR(file, copy)                                                                               \
    PAIR(memory, copy)
#define DECLARE(source, placement) extern const dray__source_type dray__source_##source;
#define ENTER(source, placement) {&dray__source_##source, &dray__place_##placement},
PAIRS(DECLARE)

static const struct pair {
    const dray__source_type *source;
    const dray__placement *placement;
} pairs[] = {PAIRS(ENTER)};

enum { ROUTES = sizeof pairs / sizeof *pairs };

/* ---- the division of ops --------------------------------------------------------------------- */

/* The ops by route. The values that they depend on, besides the ops themselves, come first. */
struct dray__deal {
    uint64_t kinds, bucket_bytes; /* kinds: of the destination's regions */
    int32_t strategy;
    bool shares; /* with ranks that upload for each other */
    uint64_t *ops, first[ROUTES + 1];
};

static void deal_free(void *deal)
{
    if (deal)
        free(((struct dray__deal *)deal)->ops);
    free(deal);
}

/* Indices below `count`, sorted by their group, each group in order. NULL when out of memory. */
static uint64_t *sort_by(const uint32_t *group, uint64_t count, uint32_t groups, uint64_t *first)
{
    uint64_t *sorted = calloc((size_t)count + 1, sizeof *sorted);
    for (uint64_t i = 0; i < count; i++)
        first[group[i] + 1]++;
    for (uint32_t g = 0; g < groups; g++)
        first[g + 1] += first[g];
    for (uint64_t i = count; sorted && i-- > 0;)
        sorted[--first[group[i] + 1]] = i;
    for (uint32_t g = 0; g < groups; g++)
        first[g] = first[g + 1];
    first[groups] = count;
    return sorted;
}

/* Sorts the ops by the round of the bucket that they fill. */
static int order_by_round(dray__transfer *h, dray_error *error)
{
    const dray__sources *s = h->sources;
    uint32_t rounds = dray__load_rounds(h->options.load);
    uint32_t *round_of = calloc((size_t)s->op_count + 1, sizeof *round_of);
    h->round_first = calloc((size_t)rounds + 1, sizeof *h->round_first);
    for (uint64_t i = 0; round_of && i < s->op_count; i++)
        round_of[i] = s->ops[i].copy.destination_region;
    if (round_of && h->round_first)
        h->by_round = sort_by(round_of, s->op_count, rounds, h->round_first);
    free(round_of);
    return h->by_round ? DRAY_OK : dray__nomem(error);
}

/* Leaves out the ops of blocks that are in place already: all others are one round. */
static int leave_out(dray__transfer *h, dray_error *error)
{
    const dray__sources *s = h->sources;
    h->by_round = calloc((size_t)s->op_count + 1, sizeof *h->by_round);
    h->round_first = calloc(2, sizeof *h->round_first);
    if (!h->by_round || !h->round_first)
        return dray__nomem(error);
    for (uint64_t i = 0; i < s->op_count; i++)
        if (!h->options.in_place[s->ops[i].block])
            h->by_round[h->round_first[1]++] = i;
    return DRAY_OK;
}

/* Return the number of ops to divide now, and the i-th of them. */
static uint64_t dealt_count(const dray__transfer *h)
{
    return h->by_round ? h->round_first[h->round + 1] - h->round_first[h->round]
                       : h->sources->op_count;
}

static uint64_t dealt(const dray__transfer *h, uint64_t i)
{
    return h->by_round ? h->by_round[h->round_first[h->round] + i] : i;
}

/* Returns true when ops may go to the patch placement. Such a division is not kept, because the
 * changes differ in the next update. */
static bool is_patched(const dray__transfer *h)
{
    const dray__transfer_options *o = &h->options;
    bool any = o->has_disk_base;
    for (uint32_t i = 0; i < h->sources->count && o->has_base && !any; i++) {
        const dray__source *source = &h->sources->sources[i];
        const dray__delta_view *delta = source->has_delta ? dray__delta_of(source) : NULL;
        any = delta && dray__delta_leads(delta, o->incarnation, o->base, o->version);
    }
    return any;
}

static struct dray__deal deal_for(const dray__transfer *h)
{
    struct dray__deal deal = {.kinds = 1,
                              .bucket_bytes = h->options.bucket_bytes,
                              .strategy = h->options.strategy,
                              .shares = h->options.progress && h->options.run &&
                                        dray__upload_of(h->sources)};
    for (uint32_t i = 0; i < dray_layout_region_count(h->destination->layout); i++) {
        const dray_region *region = h->destination->regions[i];
        deal.kinds = deal.kinds * 31 + (region ? (uint64_t)dray_region_get_kind(region) : 17);
    }
    return deal;
}

static uint32_t route_of(const dray__transfer *h, const dray__op *op)
{
    uint32_t route = 0;
    while (!pairs[route].placement->takes(h, op) ||
           !pairs[route].source->reaches(h, op, pairs[route].placement))
        route++;
    return route;
}

static struct dray__deal *deal_new(const dray__transfer *h)
{
    uint64_t count = dealt_count(h);
    struct dray__deal *deal = calloc(1, sizeof *deal);
    uint32_t *routes = calloc((size_t)count + 1, sizeof *routes);
    if (deal && routes) {
        *deal = deal_for(h);
        for (uint64_t i = 0; i < count; i++)
            routes[i] = route_of(h, &h->sources->ops[dealt(h, i)]);
        deal->ops = sort_by(routes, count, ROUTES, deal->first);
        for (uint64_t i = 0; deal->ops && i < count; i++)
            deal->ops[i] = dealt(h, deal->ops[i]);
    }
    free(routes);
    if (deal && deal->ops)
        return deal;
    deal_free(deal);
    return NULL;
}

/* Divides the ops among routes. Uses the division of the last update if it is still valid. */
static int deal(dray__transfer *h, dray_error *error)
{
    dray__kept **kept = &h->sources->kept;
    bool keeps = !h->by_round && !h->options.once && !is_patched(h);
    struct dray__deal now = deal_for(h), *d = keeps ? dray__kept_find(*kept, deal_free) : NULL;
    if (d && (d->kinds != now.kinds || d->bucket_bytes != now.bucket_bytes ||
              d->strategy != now.strategy || d->shares != now.shares)) {
        dray__kept_end(kept, deal_free);
        d = NULL;
    }
    if (!d) {
        d = deal_new(h);
        if (!d || (keeps && dray__kept_add(kept, deal_free, d, NULL)))
            return dray__nomem(error);
        h->own = keeps ? NULL : d;
    }
    for (uint32_t l = 0; l < ROUTES; l++)
        h->routes[l] = (dray__route){.transfer = h,
                                     .placement = pairs[l].placement,
                                     .ops = d->ops + d->first[l],
                                     .count = d->first[l + 1] - d->first[l],
                                     .fd = -1,
                                     .done = d->first[l + 1] == d->first[l]};
    return DRAY_OK;
}

/* ---- fences ------------------------------------------------------------------------------------
 *
 * Publishers without checksums do not wait for their GPUs when they publish; readers do. They wait
 * here, and not on a stream, because a waiting stream cannot be cancelled, so that a trainer that
 * hangs would make the engine miss its deadline. Also, the publisher that caused the wait is known.
 */

#define LOOK_NS 50000

/* Returns DRAY_EAGAIN while the source's fence has not passed. */
static int look(const dray__source *source, dray_error *error)
{
    dray__local *local = source->local ? dray__local_hold(source->token) : NULL;
    dray__event *mark = local ? dray__local_mark(local) : source->mark;
    int rc = mark ? dray__event_sync(mark, 0, error) : DRAY_OK;
    dray__local_release(local);
    return rc == DRAY_ETIMEDOUT ? DRAY_EAGAIN : rc;
}

/* Updates the list of fences that have not passed. */
static int look_at_fences(dray__transfer *h, dray_error *error)
{
    uint32_t count = h->sources->count;
    int rc = DRAY_OK;
    for (uint32_t i = 0; i < count && (rc == DRAY_OK || rc == DRAY_EAGAIN); i++) {
        rc = look(&h->sources->sources[i], error);
        if (rc != DRAY_EAGAIN)
            continue;
        if (!h->held_by)
            h->held_by = calloc(count, sizeof *h->held_by);
        if (!h->held_by)
            return dray__nomem(error);
        h->held_by[i] = true;
        h->held_count++;
    }
    if (rc && rc != DRAY_EAGAIN)
        return rc;
    return h->held_count ? dray__waker_open(&h->waker, true, error) : DRAY_OK;
}

/* Returns DRAY_EAGAIN while a fence has not passed; then nothing can be done until the transfer's
 * descriptor is readable. */
static int wait_for_fences(dray__transfer *h, dray_error *error)
{
    if (!h->held_count)
        return DRAY_OK;
    for (uint32_t i = 0; i < h->sources->count; i++) {
        int rc = h->held_by[i] ? look(&h->sources->sources[i], error) : DRAY_EAGAIN;
        if (rc == DRAY_EAGAIN)
            continue;
        if (rc)
            return rc;
        h->held_by[i] = false;
        h->held_last = i;
        h->held_count--;
    }
    dray__waker_after(&h->waker, h->held_count ? LOOK_NS : 0);
    h->held_ns = dray__now() - h->opened_ns;
    for (uint32_t l = 0; h->held_count && l < h->route_count; l++)
        h->routes[l].waits = true;
    return h->held_count ? DRAY_EAGAIN : DRAY_OK;
}

void dray__source_who(const dray__source *source, char *out, size_t size)
{
    static const uint8_t none[16];
    char gpu[41], name[65];
    size_t used =
        (size_t)snprintf(out, size, "%s", dray__take_line(name, sizeof name, source->name));
    for (uint32_t i = 0; source->layout && i < dray_layout_region_count(source->layout); i++) {
        const dray_region_info *info = dray_layout_region(source->layout, i);
        if (info->kind == DRAY_REGION_CUDA && memcmp(info->device, none, sizeof none) != 0) {
            snprintf(out + used, size - used, " on %s", dray__cuda_uuid_text(info->device, gpu));
            return;
        }
    }
}

static void explain_fences(const dray__transfer *h, dray_error *error)
{
    char who[128];
    for (uint32_t i = 0; i < h->sources->count; i++)
        if (h->held_by[i]) {
            dray__source_who(&h->sources->sources[i], who, sizeof who);
            dray__fail_prefix(error, error->code, "the fence of %s has not come: ", who);
            return;
        }
}

/* ---- opening --------------------------------------------------------------------------------- */

/* The routes share the ceiling evenly. */
static int open_routes(dray__transfer *h, dray_error *error)
{
    uint32_t busy = 0;
    int rc = DRAY_OK;
    for (uint32_t l = 0; l < ROUTES; l++)
        busy += !h->routes[l].done;
    for (uint32_t l = 0; l < ROUTES && rc == DRAY_OK; l++) {
        dray__route *route = &h->routes[l];
        if (route->done)
            continue;
        route->source = pairs[l].source;
        route->ceiling = h->options.bucket_bytes / busy;
        route->state = calloc(1, route->source->bytes);
        rc = route->state ? route->source->open(route, error) : dray__nomem(error);
        if (rc == DRAY_OK)
            rc = dray__waker_add(&h->waker, route->fd, error);
    }
    return rc;
}

static int transfer_init(dray__transfer *h, dray_error *error)
{
    const dray_layout *layout = h->destination->layout;
    uint32_t tensors = dray_layout_tensor_count(layout), blocks = dray_layout_block_count(layout);
    if (h->options.bucket_bytes < DRAY__BUCKET_MIN)
        return dray__fail(error, DRAY_EINVALID,
                          "bucket_bytes %" PRIu64 ": at least %" PRIu64 " expected",
                          h->options.bucket_bytes, DRAY__BUCKET_MIN);
    if (h->options.verify) {
        h->tensors = calloc((size_t)tensors + 1, sizeof *h->tensors);
        h->expected = calloc((size_t)blocks + 1, sizeof *h->expected);
        h->found = calloc((size_t)blocks + 1, sizeof *h->found);
        if (!h->tensors || !h->expected || !h->found)
            return dray__nomem(error);
    }
    int rc = DRAY_OK;
    if (h->options.load) {
        h->options.strategy = DRAY_STRATEGY_DIRECT; /* into the bucket */
        h->options.bucket_bytes = dray__load_staging(h->options.load);
        rc = dray__load_begin(h->options.load, h->destination, error);
        h->loading = true;
        if (rc == DRAY_OK)
            rc = order_by_round(h, error);
    }
    if (rc == DRAY_OK && h->options.in_place)
        rc = leave_out(h, error);
    if (rc == DRAY_OK)
        rc = deal(h, error);
    return rc ? rc : open_routes(h, error);
}

static void close_routes(dray__transfer *h)
{
    for (uint32_t l = 0; l < h->route_count; l++) {
        if (h->routes[l].state)
            h->routes[l].source->close(h->routes[l].state);
        free(h->routes[l].state);
        h->routes[l] = (dray__route){0};
    }
    deal_free(h->own);
    h->own = NULL;
}

void dray__transfer_close(dray__transfer *h)
{
    if (!h)
        return;
    close_routes(h);
    free(h->routes);
    if (h->loading)
        dray__load_end(h->options.load, h->destination);
    free(h->by_round);
    free(h->round_first);
    dray__waker_close(&h->waker);
    free(h->held_by);
    free(h->tensors);
    free(h->expected);
    free(h->found);
    free(h);
}

int dray__transfer_open(dray__sources *sources, const dray__destination *destination,
                        const dray__transfer_options *options, dray__transfer **out,
                        dray_error *error)
{
    dray__transfer *h = calloc(1, sizeof *h);
    if (!h)
        return dray__nomem(error);
    h->sources = sources;
    h->destination = destination;
    h->options = *options;
    h->waker = DRAY__WAKER_CLOSED;
    h->opened_ns = dray__now();
    h->routes = calloc(ROUTES, sizeof *h->routes);
    h->route_count = h->routes ? ROUTES : 0;
    int rc = h->routes ? transfer_init(h, error) : dray__nomem(error);
    if (rc == DRAY_OK)
        rc = look_at_fences(h, error);
    if (rc)
        dray__transfer_close(h);
    else
        *out = h;
    return rc;
}

/* ---- moving ---------------------------------------------------------------------------------- */

/* The time of a route's turn, short so that no route starves the others. */
#define TURN_NS (DRAY__MILLISECOND / 2)

/* Returns the next route that has work; NULL when none has. */
static dray__route *next_route(dray__transfer *h)
{
    for (uint32_t i = 0; i < ROUTES; i++) {
        dray__route *route = &h->routes[h->turn++ % ROUTES];
        if (!route->done && !route->waits)
            return route;
    }
    return NULL;
}

static uint64_t held_bytes(const dray__transfer *h)
{
    uint64_t held = 0;
    for (uint32_t l = 0; l < ROUTES; l++)
        held += h->routes[l].held;
    return held;
}

/* The same as dray__transfer_check, for the blocks that this round filled. */
static int check_round(const dray__transfer *h, dray_error *error)
{
    for (uint64_t i = 0; h->options.verify && i < dealt_count(h); i++) {
        uint32_t block = h->sources->ops[dealt(h, i)].block;
        if (h->expected[block] != h->found[block])
            return dray__transfer_check(h, error);
    }
    return DRAY_OK;
}

/* Called when the routes are done: gives the bucket to the engine, and begins the next round. */
static int next_round(dray__transfer *h, dray_error *error)
{
    if (!h->options.load)
        return DRAY_OK;
    int rc = check_round(h, error);
    if (rc == DRAY_OK)
        rc = dray__load_deliver(h->options.load, h->destination, h->round, h->options.version,
                                error);
    if (rc || h->round + 1 == dray__load_rounds(h->options.load))
        return rc;
    uint64_t held = held_bytes(h);
    h->held_most = held > h->held_most ? held : h->held_most;
    for (uint32_t l = 0; l < ROUTES; l++)
        if (h->routes[l].state && h->routes[l].source->report)
            h->routes[l].source->report(h->routes[l].state, &h->told);
    close_routes(h);
    h->round++;
    rc = deal(h, error);
    if (rc == DRAY_OK)
        rc = open_routes(h, error);
    return rc ? rc : DRAY_EAGAIN;
}

int dray__transfer_step(dray__transfer *h, int64_t budget_ns, dray_error *error)
{
    int64_t until = dray__now() + budget_ns;
    for (uint32_t l = 0; l < ROUTES; l++)
        h->routes[l].waits = false;
    int held = wait_for_fences(h, error);
    if (held)
        return held;
    for (int64_t now = until - budget_ns; now < until; now = dray__now()) {
        dray__route *route = next_route(h);
        if (!route)
            break;
        int64_t turn = now + TURN_NS < until ? now + TURN_NS : until;
        int rc = route->source->step(route, turn, error);
        if (rc && rc != DRAY_EAGAIN)
            return rc;
        route->done = rc == DRAY_OK;
    }
    for (uint32_t l = 0; l < ROUTES; l++)
        if (!h->routes[l].done)
            return DRAY_EAGAIN;
    return next_round(h, error);
}

bool dray__transfer_waits(const dray__transfer *h)
{
    for (uint32_t l = 0; l < ROUTES; l++)
        if (!h->routes[l].done && !h->routes[l].waits)
            return false;
    return true;
}

bool dray__transfer_uploads(const dray__transfer *h)
{
    for (uint32_t l = 0; l < ROUTES; l++)
        if (pairs[l].source == &dray__source_upload && h->routes[l].count)
            return true;
    return false;
}

int dray__transfer_fd(const dray__transfer *h)
{
    return h->waker.fd;
}

void dray__transfer_explain(const dray__transfer *h, dray_error *error)
{
    if (h->held_count)
        explain_fences(h, error);
    for (uint32_t l = 0; l < ROUTES; l++)
        if (!h->routes[l].done && h->routes[l].source->explain)
            h->routes[l].source->explain(h->routes[l].state, error);
}

/* ---- results --------------------------------------------------------------------------------- */

void dray__transfer_report(const dray__transfer *h, dray_update_report *report)
{
    report->bytes = h->bytes;
    report->copies = dray_plan_count(h->sources->plan);
    report->move_ns = h->move_ns;
    report->device_ns = h->device_ns;
    report->verify_ns = h->options.verify ? h->verify_ns : 0;
    report->bytes_per_s = h->move_ns > 0 ? (double)h->bytes / ((double)h->move_ns * 1e-9) : 0;
    report->source_bytes = 0;
    if (h->held_ns) {
        report->held_ns = h->held_ns;
        dray__source_who(&h->sources->sources[h->held_last], report->held_by,
                         sizeof report->held_by);
    }
    for (uint32_t i = 0; i < h->sources->count; i++)
        report->source_bytes += dray_plan_source_bytes(h->sources->plan, i);
    for (int link = 0; link < DRAY_LINK_COUNT; link++)
        report->link_bytes[link] = dray_plan_bytes(h->sources->plan, (dray_link)link);
    report->peak_extra_bytes = held_bytes(h) > h->held_most ? held_bytes(h) : h->held_most;
    if (h->options.load)
        report->peak_extra_bytes += dray__load_held_bytes(h->options.load);
    report->retries += h->told.retries;
    report->wire_bytes += h->told.wire_bytes;
    report->nccl_bytes += h->told.nccl_bytes;
    report->delta_bytes += h->told.delta_bytes;
    report->delta_covered_bytes += h->told.delta_covered_bytes;
    for (uint32_t l = 0; l < ROUTES; l++)
        if (h->routes[l].state && h->routes[l].source->report)
            h->routes[l].source->report(h->routes[l].state, report);
}
