/* One update's bytes: the ops dealt to lanes, the lanes stepped in turns, and the books in which
 * they enter what they found (haul.h). */
#include "weights/haul.h"
#include "weights/load.h"

#include "base/clock.h"
#include "base/error.h"
#include "base/hash.h"
#include "mover/cuda.h"
#include "weights/program.h"
#include "weights/vote_table.h"

#include <errno.h>
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/epoll.h>
#include <unistd.h>

static const dray__lane_kind *const kinds[DRAY__LANES] = {
    &dray__lane_patch,   &dray__lane_fan,    &dray__lane_cuda, &dray__lane_quant, &dray__lane_delta,
    &dray__lane_overlay, &dray__lane_remote, &dray__lane_file, &dray__lane_memory};

/* ---- opening --------------------------------------------------------------------------------- */

/* The ops by the round whose bucket they fill (counting sort). */
static int order_by_round(dray__haul *h, dray_error *error)
{
    const dray__sources *s = h->sources;
    uint32_t rounds = dray__load_rounds(h->options.load);
    h->round_first = calloc((size_t)rounds + 2, sizeof *h->round_first);
    h->by_round = calloc((size_t)s->op_count + 1, sizeof *h->by_round);
    if (!h->round_first || !h->by_round)
        return dray__nomem(error);
    uint64_t *at = h->round_first + 1;
    for (uint64_t i = 0; i < s->op_count; i++)
        at[s->ops[i].copy.destination_region + 1]++;
    for (uint32_t r = 0; r < rounds; r++)
        at[r + 1] += at[r];
    for (uint64_t i = 0; i < s->op_count; i++)
        h->by_round[at[s->ops[i].copy.destination_region]++] = i;
    return DRAY_OK;
}

/* How many ops there are to deal now, and which the i-th is. */
static uint64_t dealt_count(const dray__haul *h)
{
    return h->by_round ? h->round_first[h->round + 1] - h->round_first[h->round]
                       : h->sources->op_count;
}

static uint64_t dealt(const dray__haul *h, uint64_t i)
{
    return h->by_round ? h->by_round[h->round_first[h->round] + i] : i;
}

/* GPUs take all ops, as they did before. */
static bool deal_all(dray__haul *h)
{
    const uint64_t *all = h->by_round ? NULL : dray__program_all(h);
    for (uint32_t l = 0; l < DRAY__LANES && all; l++) {
        bool takes = kinds[l] == &dray__lane_cuda;
        h->lanes[l].kind = kinds[l];
        h->lanes[l].done = !takes;
        h->lanes[l].ops = takes ? (uint64_t *)all : NULL;
        h->lanes[l].count = takes ? h->sources->op_count : 0;
    }
    return all != NULL;
}

/* Deals the ops: each to the first lane that takes it. */
static int deal(dray__haul *h, dray_error *error)
{
    if (deal_all(h))
        return DRAY_OK;
    uint64_t count = dealt_count(h);
    uint8_t *lane_of = malloc((size_t)count + 1);
    if (!lane_of)
        return dray__nomem(error);
    for (uint64_t i = 0; i < count; i++) {
        uint8_t lane = 0;
        while (!kinds[lane]->takes(h, &h->sources->ops[dealt(h, i)]))
            lane++;
        lane_of[i] = lane;
        h->lanes[lane].count++;
    }
    int rc = DRAY_OK;
    for (uint32_t l = 0; l < DRAY__LANES && rc == DRAY_OK; l++) {
        struct dray__lane *lane = &h->lanes[l];
        lane->kind = kinds[l];
        lane->done = lane->count == 0;
        lane->ops = calloc((size_t)lane->count + 1, sizeof *lane->ops);
        lane->owns = true;
        if (kinds[l] == &dray__lane_cuda && count && lane->count == count && !h->by_round)
            dray__program_note_all(h);
        if (!lane->ops)
            rc = dray__nomem(error);
        lane->count = 0;
    }
    for (uint64_t i = 0; i < count && rc == DRAY_OK; i++) {
        struct dray__lane *lane = &h->lanes[lane_of[i]];
        lane->ops[lane->count++] = dealt(h, i);
    }
    free(lane_of);
    return rc;
}

static int watch(dray__haul *h, struct dray__lane *lane, dray_error *error)
{
    if (!lane->kind->fd)
        return DRAY_OK;
    if (h->poll_fd < 0)
        h->poll_fd = epoll_create1(EPOLL_CLOEXEC);
    struct epoll_event event = {.events = EPOLLIN};
    if (h->poll_fd < 0 || epoll_ctl(h->poll_fd, EPOLL_CTL_ADD, lane->kind->fd(lane->state), &event))
        return dray__fail_errno(error, errno, "descriptors of an update");
    return DRAY_OK;
}

/* The lanes share the ceiling evenly. */
static int open_lanes(dray__haul *h, dray_error *error)
{
    uint32_t busy = 0;
    int rc = DRAY_OK;
    for (uint32_t l = 0; l < DRAY__LANES; l++)
        busy += !h->lanes[l].done;
    for (uint32_t l = 0; l < DRAY__LANES && rc == DRAY_OK; l++) {
        struct dray__lane *lane = &h->lanes[l];
        if (lane->done)
            continue;
        rc = lane->kind->open(h, lane->ops, lane->count, h->options.bucket_bytes / busy,
                              &lane->state, error);
        if (rc == DRAY_OK)
            rc = watch(h, lane, error);
    }
    return rc;
}

static int haul_init(dray__haul *h, dray_error *error)
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
    if (rc == DRAY_OK)
        rc = deal(h, error);
    return rc ? rc : open_lanes(h, error);
}

static void close_lanes(dray__haul *h)
{
    for (uint32_t l = 0; l < DRAY__LANES; l++) {
        if (h->lanes[l].state)
            h->lanes[l].kind->close(h->lanes[l].state);
        if (h->lanes[l].owns)
            free(h->lanes[l].ops);
        h->lanes[l] = (struct dray__lane){0};
    }
}

void dray__haul_close(dray__haul *h)
{
    if (!h)
        return;
    close_lanes(h);
    if (h->loading)
        dray__load_end(h->options.load, h->destination);
    free(h->by_round);
    free(h->round_first);
    if (h->poll_fd >= 0)
        close(h->poll_fd);
    if (h->timer_fd >= 0)
        close(h->timer_fd);
    free(h->held_by);
    free(h->tensors);
    free(h->expected);
    free(h->found);
    free(h);
}

int dray__haul_open(const dray__sources *sources, const dray__destination *destination,
                    const dray__haul_options *options, dray__haul **out, dray_error *error)
{
    dray__haul *h = calloc(1, sizeof *h);
    if (!h)
        return dray__nomem(error);
    h->sources = sources;
    h->destination = destination;
    h->options = *options;
    h->poll_fd = -1;
    h->timer_fd = -1;
    h->opened_ns = dray__now();
    int rc = haul_init(h, error);
    if (rc == DRAY_OK)
        rc = dray__haul_hold(h, error);
    if (rc) {
        dray__haul_close(h);
        return rc;
    }
    *out = h;
    return DRAY_OK;
}

/* ---- the books ------------------------------------------------------------------------------- */

const dray_tensor_info *dray__haul_tensor(const dray__haul *h, const dray_copy *copy)
{
    return dray_layout_tensor(h->destination->layout, copy->tensor);
}

uint64_t dray__copy_bytes(const dray_copy *copy)
{
    dray__rect rect = dray__copy_rect(copy);
    return dray__rect_elements(&rect) * dray_dtype_size((dray_dtype)copy->destination_dtype);
}

void dray__haul_add(dray__haul *h, uint32_t tensor, const struct dray__tensor_sum *sum)
{
    dray__tensor_sum_add(&h->tensors[tensor], sum);
}

void dray__haul_own(dray__haul *h, const dray_copy *copy, uint64_t sum)
{
    dray__rect rect = dray__copy_rect(copy);
    struct dray__tensor_sum of = {copy->source_dtype, false, dray__rect_elements(&rect), sum};
    dray__haul_add(h, copy->tensor, &of);
}

uint64_t dray__haul_read_back(const dray__haul *h, const dray_region *region, const dray_copy *copy)
{
    const dray_tensor_info *tensor = dray__haul_tensor(h, copy);
    dray__sum_of destination = {
        copy->destination_dtype,  tensor->ndim, tensor->shape, copy->start, copy->extent,
        copy->destination_stride, NULL};
    uint64_t sum = 0;
    if (dray__sum_region(region, copy->destination_offset, &destination, &sum, NULL))
        return dray__hash(copy, sizeof *copy);
    return sum;
}

/* ---- moving ---------------------------------------------------------------------------------- */

/* A lane's turn is short, so that none starves the others. */
#define TURN_NS (DRAY__MILLISECOND / 2)

/* The next lane that can do something; NULL: none. */
static struct dray__lane *next_lane(dray__haul *h)
{
    for (uint32_t i = 0; i < DRAY__LANES; i++) {
        struct dray__lane *lane = &h->lanes[h->turn++ % DRAY__LANES];
        if (!lane->done && !lane->waits)
            return lane;
    }
    return NULL;
}

static uint64_t held_bytes(const dray__haul *h)
{
    uint64_t held = 0;
    for (uint32_t l = 0; l < DRAY__LANES; l++)
        if (h->lanes[l].state)
            held += h->lanes[l].kind->held_bytes(h->lanes[l].state);
    return held;
}

/* As dray__haul_check, of the blocks that this round filled. */
static int check_round(const dray__haul *h, dray_error *error)
{
    for (uint64_t i = 0; h->options.verify && i < dealt_count(h); i++) {
        uint32_t block = h->sources->ops[dealt(h, i)].block;
        if (h->expected[block] != h->found[block])
            return dray__haul_check(h, error);
    }
    return DRAY_OK;
}

/* The lanes are done: what they filled is handed over, and the next round begins. */
static int next_round(dray__haul *h, dray_error *error)
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
    for (uint32_t l = 0; l < DRAY__LANES; l++)
        if (h->lanes[l].state && h->lanes[l].kind->report)
            h->lanes[l].kind->report(h->lanes[l].state, &h->told);
    close_lanes(h);
    h->round++;
    rc = deal(h, error);
    if (rc == DRAY_OK)
        rc = open_lanes(h, error);
    return rc ? rc : DRAY_EAGAIN;
}

int dray__haul_step(dray__haul *h, int64_t budget_ns, dray_error *error)
{
    int64_t until = dray__now() + budget_ns;
    for (uint32_t l = 0; l < DRAY__LANES; l++)
        h->lanes[l].waits = false;
    int held = dray__haul_held(h, error);
    if (held)
        return held;
    for (int64_t now = until - budget_ns; now < until; now = dray__now()) {
        struct dray__lane *lane = next_lane(h);
        if (!lane)
            break;
        int64_t turn = now + TURN_NS < until ? now + TURN_NS : until;
        int rc = lane->kind->step(lane->state, turn, &lane->waits, error);
        if (rc && rc != DRAY_EAGAIN)
            return rc;
        lane->done = rc == DRAY_OK;
    }
    for (uint32_t l = 0; l < DRAY__LANES; l++)
        if (!h->lanes[l].done)
            return DRAY_EAGAIN;
    return next_round(h, error);
}

bool dray__haul_waits(const dray__haul *h)
{
    for (uint32_t l = 0; l < DRAY__LANES; l++)
        if (!h->lanes[l].done && !h->lanes[l].waits)
            return false;
    return true;
}

bool dray__haul_fans(const dray__haul *h)
{
    for (uint32_t l = 0; l < DRAY__LANES; l++)
        if (h->lanes[l].kind == &dray__lane_fan && h->lanes[l].count)
            return true;
    return false;
}

int dray__haul_fd(const dray__haul *h)
{
    return h->poll_fd;
}

void dray__haul_explain(const dray__haul *h, dray_error *error)
{
    if (h->held_count)
        dray__haul_explain_held(h, error);
    for (uint32_t l = 0; l < DRAY__LANES; l++)
        if (!h->lanes[l].done && h->lanes[l].kind->explain)
            h->lanes[l].kind->explain(h->lanes[l].state, error);
}

/* ---- what came of it ------------------------------------------------------------------------- */

int dray__haul_check(const dray__haul *h, dray_error *error)
{
    const dray_layout *layout = h->destination->layout;
    uint32_t wrong = 0, first = 0;
    char names[240] = "";
    for (uint32_t b = 0; h->options.verify && b < dray_layout_block_count(layout); b++) {
        if (h->expected[b] == h->found[b])
            continue;
        if (wrong++ == 0)
            first = b;
        size_t used = strlen(names);
        if (wrong <= 4)
            snprintf(names + used, sizeof names - used, "%s%s", used ? ", " : "",
                     dray_layout_tensor(layout, dray_layout_block(layout, b)->tensor)->name);
    }
    if (!wrong)
        return DRAY_OK;
    return dray__fail(error, DRAY_ECHECKSUM,
                      "tensor %s%s: memory holds %016" PRIx64 " after the copy, %016" PRIx64
                      " expected (%" PRIu32 " blocks differ)",
                      names, wrong > 4 ? ", ..." : "", h->found[first], h->expected[first], wrong);
}

int dray__haul_sums(const dray__haul *h, dray__sums *out, dray_error *error)
{
    uint32_t count = dray_layout_tensor_count(h->destination->layout);
    return !h->options.verify || dray__vote_table_fill(h->sources->table, h->tensors,
                                                       h->sources->names, count, out)
               ? DRAY_OK
               : dray__nomem(error);
}

/* Of each destination block: are its elements this rank's to count? */
enum owned { OWNED_UNKNOWN, OWNED_NOT, OWNED_WHOLE, OWNED_IN_PART };

static uint8_t *owned_blocks(const dray__haul *h)
{
    const dray__sources *s = h->sources;
    uint8_t *owned = calloc((size_t)dray_layout_block_count(h->destination->layout) + 1, 1);
    for (uint64_t i = 0; owned && i < s->op_count; i++) {
        uint8_t *at = &owned[s->ops[i].block];
        uint8_t now = s->ops[i].owned ? OWNED_WHOLE : OWNED_NOT;
        *at = *at == OWNED_UNKNOWN || *at == now ? now : OWNED_IN_PART;
    }
    return owned;
}

int dray__haul_lies(const dray__haul *h, bool *as_read, dray__sums *out, dray_error *error)
{
    const dray_layout *layout = h->destination->layout;
    if (!h->options.verify || !h->found)
        return dray__fail(error, DRAY_EUNSUPPORTED, "nothing was verified");
    bool quantised;
    *as_read = dray__vote_table_plain(h->sources->table, layout, h->sources->names, &quantised) &&
               !h->sources->casts;
    if (quantised)
        return dray__fail(error, DRAY_EUNSUPPORTED, "quantised on the way");
    if (*as_read)
        return DRAY_OK;
    uint8_t *owned = owned_blocks(h);
    int rc = owned ? DRAY_OK : dray__nomem(error);
    for (uint32_t b = 0; rc == DRAY_OK && b < dray_layout_block_count(layout); b++) {
        const dray_tensor_info *tensor =
            dray_layout_tensor(layout, dray_layout_block(layout, b)->tensor);
        dray__rect rect = dray__rect_of(layout, b);
        if (owned[b] == OWNED_IN_PART)
            rc = dray__fail(error, DRAY_EUNSUPPORTED, "tensor %s: a block is owned in part",
                            tensor->name);
        else if (owned[b] == OWNED_WHOLE &&
                 !dray__sums_add(out, tensor->name, tensor->dtype, dray__rect_elements(&rect),
                                 h->found[b]))
            rc = dray__nomem(error);
    }
    free(owned);
    return rc;
}

uint64_t *dray__haul_take_blocks(dray__haul *h)
{
    uint64_t *blocks = h->found;
    h->found = NULL;
    return blocks;
}

void dray__haul_report(const dray__haul *h, dray_update_report *report)
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
    for (uint32_t l = 0; l < DRAY__LANES; l++)
        if (h->lanes[l].state && h->lanes[l].kind->report)
            h->lanes[l].kind->report(h->lanes[l].state, report);
}
