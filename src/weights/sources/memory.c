/* Mapped memory as a source, and memory and files of a publisher in this process. It moves by one
 * of three strategies, in batches of slices that stay in cache between the copy and its checksums,
 * and keeps within the declared ceiling of extra memory. When a publisher has a delta, only the
 * changes are written.
 *
 * For each slice, `found`, the sum of the destination's bits read back, is checked against
 * `expected`, the sum of the bits that the mover computed. The sum of the source's bits of the
 * elements that this rank owns in its group is compared with the publishers' (see enum way). */
#include "base/clock.h"
#include "base/error.h"
#include "mover/mover.h"
#include "weights/delta/delta.h"
#include "weights/transfer/transfer.h"

#include <inttypes.h>
#include <stdlib.h>
#include <string.h>

enum { BUCKET_OF_MEMORY = 512 << 10, BUCKET_OF_FILE = 4 << 20 };

/* How a slice is checked. */
enum way {
    UNCHECKED,
    /* It is not converted, and its tensor is compared as a whole with the announced sum. The sum of
     * the destination's bits, read back, counts for source and destination. */
    READ_BACK,
    /* The mover sums source and result on the way; the source's sum is compared with the announced
     * one, the result's with the bytes that are read back. */
    ON_THE_WAY,
    /* No other rank compares it (a replica, or a tensor that the group holds in part). The mover
     * sums the bits that it writes, which are read back, and then moves it again: if the source was
     * misread once, the results differ. */
    TWICE
};

struct memory_route {
    dray__transfer *transfer;
    const uint64_t *ops;
    uint64_t *order; /* the ops' order for the strategy parameter; NULL for their own order */
    uint64_t count;
    uint64_t next; /* of ops */
    dray__slicer slicer;
    bool in_op;
    uint64_t slice_bytes;
    dray__local **held; /* one a source, while a step runs */

    dray__batch batch;
    enum way way; /* of the batch */

    dray_region *bucket; /* NULL when the strategy is direct */
    uint64_t bucket_size;
    dray_copy onwards[DRAY__BATCH]; /* of the batch, from the bucket to the destination */

    dray__delta_walk walk; /* of the op, when only its changes are written */
};

/* ---- opening --------------------------------------------------------------------------------- */

static int open_bucket(struct memory_route *m, uint64_t ceiling, dray_error *error)
{
    /* One core fills the bucket and empties it again. A bucket that fits the core's cache is the
     * fastest, even if the ceiling allows more. A second bucket, for a second thread, would only
     * move bytes from cache to cache: two cores that alternated between two buckets moved less
     * than one alone, and other ranks use the free cores. For disks and networks, the routes of
     * files and data servers read ahead. */
    uint64_t best = m->transfer->sources->files ? BUCKET_OF_FILE : BUCKET_OF_MEMORY;
    ceiling -= ceiling < m->batch.scratch_bytes ? ceiling : m->batch.scratch_bytes;
    m->bucket_size = (ceiling < best ? ceiling : best) & ~(uint64_t)4095;
    if (m->bucket_size < 2 * 4096)
        return dray__fail(error, DRAY_EINVALID,
                          "bucket_bytes %" PRIu64 ": files and other hosts at once need 256 KiB",
                          m->transfer->options.bucket_bytes);
    if (m->slice_bytes > m->bucket_size / 2)
        m->slice_bytes = m->bucket_size / 2;
    return dray_region_alloc(DRAY_REGION_HOST, m->bucket_size, "bucket", &m->bucket, error);
}

/* Allocates the movers' scratch, within the ceiling, if the strategy has one. */
static int open_scratch(struct memory_route *m, uint64_t ceiling, dray_error *error)
{
    if (!m->transfer->sources->files) /* conversions between memory need no scratch */
        return DRAY_OK;
    uint64_t bytes = DRAY__MOVE_STAGING;
    if (m->transfer->options.load && bytes > ceiling)
        bytes = ceiling;
    else if (m->transfer->options.strategy != DRAY_STRATEGY_DIRECT && bytes > ceiling / 4)
        bytes = ceiling / 4;
    if (bytes < DRAY__MOVE_STAGING_MIN)
        bytes = DRAY__MOVE_STAGING_MIN;
    m->batch.scratch_bytes = (size_t)bytes & ~(size_t)4095;
    m->batch.scratch = aligned_alloc(4096, m->batch.scratch_bytes);
    return m->batch.scratch ? DRAY_OK : dray__nomem(error);
}

static int route_open(dray__route *route, dray_error *error)
{
    struct memory_route *m = route->state;
    m->transfer = route->transfer;
    m->ops = route->ops;
    m->count = route->count;
    if (route->placement == &dray__place_patch) /* nothing is staged */
        return DRAY_OK;
    m->slice_bytes = m->transfer->sources->files ? DRAY__FILE_SLICE_BYTES : DRAY__SLICE_BYTES;
    m->held = calloc((size_t)m->transfer->sources->count + 1, sizeof(dray__local *));
    if (!m->held)
        return dray__nomem(error);
    int32_t strategy = m->transfer->options.strategy;
    int rc = open_scratch(m, route->ceiling, error);
    if (rc == DRAY_OK && strategy == DRAY_STRATEGY_PARAMETER) {
        m->order = dray__ops_by_tensor(m->transfer->sources, m->ops, m->count);
        rc = m->order ? DRAY_OK : dray__nomem(error);
    }
    if (rc == DRAY_OK && strategy != DRAY_STRATEGY_DIRECT)
        rc = open_bucket(m, route->ceiling, error);
    route->held = m->bucket_size + m->batch.scratch_bytes;
    return rc;
}

static void route_close(void *state)
{
    struct memory_route *m = state;
    free(m->order);
    free(m->held);
    dray_region_free(m->bucket);
    free(m->batch.scratch);
}

/* Returns true for ops that no other source reaches. */
static bool memory_reaches(const dray__transfer *h, const dray__op *op,
                           const dray__placement *placement)
{
    return placement != &dray__place_patch ||
           (dray__delta_offered(h, op) &&
            dray_region_base(h->destination->regions[op->copy.destination_region]) &&
            dray__delta_block(h, op) != DRAY__DELTA_NO_BLOCK);
}

/* ---- batches --------------------------------------------------------------------------------- */

static const dray__op *op_at(const struct memory_route *m, uint64_t index)
{
    return &m->transfer->sources->ops[m->order ? m->order[index] : m->ops[index]];
}

/* Gives the next slice without taking it. Returns false at the end. */
static bool peek(struct memory_route *m, dray_copy *out)
{
    if (m->next == m->count)
        return false;
    const dray_copy *copy = &op_at(m, m->next)->copy;
    if (!m->in_op) {
        dray__slicer_start_copy(&m->slicer, copy, m->slice_bytes);
        m->in_op = true;
    }
    dray__rect slice;
    dray__slicer_peek(&m->slicer, &slice);
    *out = dray__copy_cut(copy, &slice);
    return true;
}

static void take(struct memory_route *m)
{
    dray__slicer_next(&m->slicer);
    if (m->slicer.done) {
        m->in_op = false;
        m->next++;
    }
}

static dray_region *source_region(const struct memory_route *m, const dray_copy *copy)
{
    return m->held[copy->source]
               ? dray__local_region(m->held[copy->source], copy->source_region)
               : m->transfer->sources->sources[copy->source].regions[copy->source_region];
}

/* ---- checksums of moved bytes ---------------------------------------------------------------- */

static enum way way_of(const struct memory_route *m, const dray__op *op)
{
    const dray_copy *copy = &op->copy;
    bool memory = dray_region_base(source_region(m, copy)) != NULL;
    bool compared = m->transfer->options.compared && m->transfer->options.compared[copy->tensor];
    if (!m->transfer->options.verify)
        return UNCHECKED;
    if (!op->owned || (memory && m->transfer->options.compared && !compared))
        return TWICE;
    return memory && copy->source_dtype == copy->destination_dtype ? READ_BACK : ON_THE_WAY;
}

/* ---- moving ---------------------------------------------------------------------------------- */

static bool is_summed(enum way way)
{
    return way == ON_THE_WAY || way == TWICE;
}

/* Moves the batch, and enters the mover's sums. */
static int move_batch(struct memory_route *m, dray_region *to, dray_error *error)
{
    dray__transfer *h = m->transfer;
    dray__batch *b = &m->batch;
    const dray_region *from = source_region(m, &b->copies[0]);
    int rc = dray__batch_move(h, b, 0, b->count, from, to, is_summed(m->way), error);
    if (rc || !is_summed(m->way))
        return rc;
    dray__batch_written(h, b);
    if (m->way == ON_THE_WAY)
        return DRAY_OK;
    rc = dray__batch_compare(h, b, to, error);
    return rc ? rc : dray__batch_move(h, b, 0, b->count, from, to, false, error);
}

/* Can the next slice be added to the batch? A batch has about DRAY__SLICE_BYTES of one region. */
static bool goes_along(struct memory_route *m, const dray_copy *copy, uint64_t bytes)
{
    const dray_copy *first = &m->batch.copies[0];
    enum way way = way_of(m, op_at(m, m->next));
    if (m->batch.count == 0) {
        m->way = way;
        return true;
    }
    return copy->source == first->source && copy->source_region == first->source_region &&
           way == m->way && bytes <= m->slice_bytes;
}

static void add(struct memory_route *m, const dray_copy *copy)
{
    m->batch.ops[m->batch.count] = op_at(m, m->next);
    m->batch.copies[m->batch.count++] = *copy;
    take(m);
}

/* Fills the batch with slices between the same two regions; with the strategy parameter, of one
 * tensor. */
static void gather(struct memory_route *m)
{
    bool parameter = m->transfer->options.strategy == DRAY_STRATEGY_PARAMETER;
    uint64_t bytes = 0;
    dray_copy copy;
    for (m->batch.count = 0; m->batch.count < DRAY__BATCH && peek(m, &copy);) {
        const dray_copy *first = &m->batch.copies[0];
        bytes += dray__copy_bytes(&copy);
        if (!goes_along(m, &copy, bytes) ||
            (m->batch.count && (copy.destination_region != first->destination_region ||
                                (parameter && copy.tensor != first->tensor))))
            return;
        add(m, &copy);
    }
}

/* Assigns the batch's slices consecutive places in the bucket. */
static void stage(struct memory_route *m)
{
    dray__batch *b = &m->batch;
    uint64_t used = 0;
    for (uint32_t i = 0; i < b->count; i++) {
        dray_copy in = b->copies[i];
        dray__copy_to_dense(&in, in.destination_dtype, used);
        m->onwards[i] = dray__copy_onwards(&b->copies[i], &in);
        used = (used + dray__copy_bytes(&in) + 63) & ~(uint64_t)63;
        b->copies[i] = in;
    }
}

/* Moves a batch. With a bucket, sums are computed in the copy into the bucket. */
static int step(struct memory_route *m, dray_error *error)
{
    dray__batch *b = &m->batch;
    gather(m);
    if (!b->count)
        return DRAY_OK;
    dray_region *to = m->transfer->destination->regions[b->copies[0].destination_region];
    if (m->bucket)
        stage(m);
    int rc = move_batch(m, m->bucket ? m->bucket : to, error);
    if (rc == DRAY_OK && m->bucket) {
        memcpy(b->copies, m->onwards, b->count * sizeof *b->copies);
        rc = dray__batch_move(m->transfer, b, 0, b->count, m->bucket, to, false, error);
    }
    if (rc)
        return rc;
    dray__batch_arrived(m->transfer, b, m->way == READ_BACK);
    return DRAY_EAGAIN;
}

/* ---- changes -----------------------------------------------------------------------------------
 * A rank that holds the delta's base writes the elements that changed, and copies only slices in
 * which too many changed. It reads the result back as a whole, as if all of it had been copied,
 * because the announced sums are of whole tensors, not of deltas. */

/* In memory, writing single elements costs about as much as copying SPARSE times as many. */
enum { SPARSE = 8 };

static int patch(struct memory_route *m, const dray__op *op, const dray__delta_part *part,
                 dray_error *error)
{
    dray__transfer *h = m->transfer;
    dray_copy piece = dray__copy_cut(&op->copy, &part->cross);
    dray_region *to = h->destination->regions[piece.destination_region];
    dray__move_options options = {.layout = h->destination->layout};
    int64_t begin = dray__now();
    int rc;
    if (part->full || (uint64_t)part->count * SPARSE > dray__rect_elements(&part->slice)) {
        rc = dray__move_all(h->sources->sources[piece.source].regions[piece.source_region], to,
                            &piece, 1, &options, error);
    } else {
        h->told.delta_covered_bytes += dray__copy_bytes(&piece);
        rc = dray__delta_apply(part, &piece, dray_region_base(to), &h->told.delta_bytes, error);
    }
    h->move_ns += dray__now() - begin;
    if (rc == DRAY_OK)
        dray__transfer_arrived(h, op, &piece, true);
    return rc;
}

static int step_patches(struct memory_route *m, int64_t until_ns, dray_error *error)
{
    while (m->next < m->count) {
        const dray__op *op = op_at(m, m->next);
        dray__delta_part part;
        if (!m->in_op) {
            dray__rect rect = dray__copy_rect(&op->copy);
            dray__delta_start(dray__delta_of(&m->transfer->sources->sources[op->copy.source]),
                              dray__delta_block(m->transfer, op), &rect, &m->walk);
        }
        m->in_op = true;
        int rc = dray__delta_next(&m->walk, &part, error);
        if (rc == DRAY_OK)
            rc = patch(m, op, &part, error);
        if (rc == DRAY_EEND) {
            m->in_op = false;
            m->next++;
        } else if (rc) {
            return rc;
        }
        if (dray__now() >= until_ns)
            return m->next < m->count ? DRAY_EAGAIN : DRAY_OK;
    }
    return DRAY_OK;
}

/* ---- the route ------------------------------------------------------------------------------- */

static int route_step(dray__route *route, int64_t until_ns, dray_error *error)
{
    struct memory_route *m = route->state;
    if (route->placement == &dray__place_patch)
        return step_patches(m, until_ns, error);
    int rc = dray__sources_hold(m->transfer->sources, m->held, error);
    while (rc == DRAY_OK || rc == DRAY_EAGAIN) {
        rc = step(m, error);
        if (rc != DRAY_EAGAIN || dray__now() >= until_ns)
            break;
    }
    dray__sources_release(m->transfer->sources, m->held);
    return rc;
}

const dray__source_type dray__source_memory = {.name = "memory",
                                               .bytes = sizeof(struct memory_route),
                                               .reaches = memory_reaches,
                                               .open = route_open,
                                               .step = route_step,
                                               .close = route_close};
