/* The lane of sources in mapped memory and in files: moves by one of three strategies, in batches
 * of slices that stay in cache between the copy and its checksums, and holds the declared ceiling
 * of extra memory.
 *
 * What is checked, per slice: `found`, the destination's bits as they can be read back, against
 * `expected`, what the mover meant to write; and the source's bits of the elements that this rank
 * owns in its group, which add up to what the publishers announced (see enum way). */
#include "base/clock.h"
#include "base/error.h"
#include "mover/mover.h"
#include "weights/haul.h"

#include <inttypes.h>
#include <stdlib.h>
#include <string.h>

enum { BATCH = 64, BUCKET_OF_MEMORY = 512 << 10, BUCKET_OF_FILE = 4 << 20 };

/* How a slice is checked. */
enum way {
    UNCHECKED,
    /* Not converted, and its tensor will be compared as a whole with what was announced: the sum of
     * the destination's bits, read back, is the one that counts. */
    READ_BACK,
    /* The mover sums source and result on the way; the source's sum is compared with what was
     * announced, the result's with what is read back. */
    ON_THE_WAY,
    /* Nobody else will compare it (a replica, a tensor that the group holds in part): the mover
     * sums what it means to write, which is read back, and then moves it again: a source that was
     * misread once gives two results. */
    TWICE
};

struct staged { /* a slice in the bucket */
    uint64_t op;
    dray_copy copy; /* from the bucket to the destination */
};
struct memory_lane {
    dray__haul *haul;
    const uint64_t *ops;
    uint64_t *order; /* of the ops, for the strategy parameter; NULL: as they are */
    uint64_t count;
    uint64_t next; /* of ops */
    dray__slicer slicer;
    bool in_op;
    uint64_t slice_bytes;
    dray__local **held; /* one a source, while a step runs */

    dray_copy copies[BATCH];
    uint64_t batch_ops[BATCH], sums[BATCH], source_sums[BATCH];
    uint32_t batch;
    enum way way; /* of the batch */

    dray_region *bucket;
    uint64_t bucket_used, bucket_size;
    struct staged *staged;
    uint64_t staged_count, staged_capacity, flushed;
    bool flushing;

    void *scratch;
    size_t scratch_bytes;
};

/* ---- opening --------------------------------------------------------------------------------- */

/* The ops by tensor, otherwise in their order (counting sort). */
static uint64_t *order_by_tensor(const struct memory_lane *m, uint32_t tensors)
{
    const dray__op *ops = m->haul->sources->ops;
    uint64_t *at = calloc((size_t)tensors + 2, sizeof *at);
    uint64_t *order = calloc((size_t)m->count + 1, sizeof *order);
    if (!at || !order) {
        free(at);
        free(order);
        return NULL;
    }
    for (uint64_t i = 0; i < m->count; i++)
        at[ops[m->ops[i]].copy.tensor + 1]++;
    for (uint32_t t = 0; t < tensors; t++)
        at[t + 1] += at[t];
    for (uint64_t i = 0; i < m->count; i++)
        order[at[ops[m->ops[i]].copy.tensor]++] = m->ops[i];
    free(at);
    return order;
}

static int open_bucket(struct memory_lane *m, uint64_t ceiling, dray_error *error)
{
    /* One core fills the bucket and empties it again: one that stays in its cache is the fastest,
     * whatever more is allowed. A second one for a thread beside it would only pass bytes from
     * cache to cache (bench/bench_bucket.c: two cores that take turns at two buckets move less than
     * one alone); a core that is free is another rank's. Where something else brings the bytes, a
     * disk or a network, the lanes of files and hosts read ahead. */
    uint64_t best = m->haul->sources->files ? BUCKET_OF_FILE : BUCKET_OF_MEMORY;
    ceiling -= ceiling < m->scratch_bytes ? ceiling : m->scratch_bytes;
    m->bucket_size = (ceiling < best ? ceiling : best) & ~(uint64_t)4095;
    if (!m->bucket_size)
        return dray__fail(error, DRAY_EINVALID,
                          "bucket_bytes %" PRIu64 ": files and other hosts at once need 256 KiB",
                          m->haul->options.bucket_bytes);
    if (m->slice_bytes > m->bucket_size)
        m->slice_bytes = m->bucket_size;
    return dray_region_alloc(DRAY_REGION_HOST, m->bucket_size, "bucket", &m->bucket, error);
}

/* What the movers need on the way, within the ceiling of the strategies that have one. */
static int open_scratch(struct memory_lane *m, uint64_t ceiling, dray_error *error)
{
    if (!m->haul->sources->files) /* memory is converted from one place to the other */
        return DRAY_OK;
    uint64_t bytes = DRAY__MOVE_STAGING;
    if (m->haul->options.load && bytes > ceiling)
        bytes = ceiling;
    else if (m->haul->options.strategy != DRAY_STRATEGY_DIRECT && bytes > ceiling / 4)
        bytes = ceiling / 4;
    if (bytes < DRAY__MOVE_STAGING_MIN)
        bytes = DRAY__MOVE_STAGING_MIN;
    m->scratch_bytes = (size_t)bytes & ~(size_t)4095;
    m->scratch = aligned_alloc(4096, m->scratch_bytes);
    return m->scratch ? DRAY_OK : dray__nomem(error);
}

static int lane_init(struct memory_lane *m, uint64_t ceiling, dray_error *error)
{
    m->slice_bytes = m->haul->sources->files ? DRAY__FILE_SLICE_BYTES : DRAY__SLICE_BYTES;
    m->held = calloc((size_t)m->haul->sources->count + 1, sizeof(dray__local *));
    if (!m->held)
        return dray__nomem(error);
    int rc = open_scratch(m, ceiling, error);
    if (rc || m->haul->options.strategy == DRAY_STRATEGY_DIRECT)
        return rc;
    if (m->haul->options.strategy == DRAY_STRATEGY_PARAMETER) {
        m->order = order_by_tensor(m, dray_layout_tensor_count(m->haul->destination->layout));
        if (!m->order)
            return dray__nomem(error);
    }
    return open_bucket(m, ceiling, error);
}

static void lane_close(void *lane)
{
    struct memory_lane *m = lane;
    if (!m)
        return;
    free(m->order);
    free(m->held);
    dray_region_free(m->bucket);
    free(m->staged);
    free(m->scratch);
    free(m);
}

static int lane_open(dray__haul *haul, const uint64_t *ops, uint64_t count, uint64_t ceiling,
                     void **out, dray_error *error)
{
    struct memory_lane *m = calloc(1, sizeof *m);
    if (!m)
        return dray__nomem(error);
    m->haul = haul;
    m->ops = ops;
    m->count = count;
    int rc = lane_init(m, ceiling, error);
    if (rc) {
        lane_close(m);
        return rc;
    }
    *out = m;
    return DRAY_OK;
}

/* What no other lane wants. */
static bool lane_takes(const dray__haul *haul, const dray__op *op)
{
    (void)haul;
    (void)op;
    return true;
}
/* ---- batches --------------------------------------------------------------------------------- */

/* Of all ops, the one that is the lane's `index`th. */
static uint64_t index_at(const struct memory_lane *m, uint64_t index)
{
    return m->order ? m->order[index] : m->ops[index];
}

static const dray__op *op_at(const struct memory_lane *m, uint64_t index)
{
    return &m->haul->sources->ops[index_at(m, index)];
}

/* The next slice, without taking it; false at the end. */
static bool peek(struct memory_lane *m, dray_copy *out)
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

static void take(struct memory_lane *m)
{
    dray__slicer_next(&m->slicer);
    if (m->slicer.done) {
        m->in_op = false;
        m->next++;
    }
}

static dray_region *source_region(const struct memory_lane *m, const dray_copy *copy)
{
    return m->held[copy->source]
               ? dray__local_region(m->held[copy->source], copy->source_region)
               : m->haul->sources->sources[copy->source].regions[copy->source_region];
}

/* ---- checksums of what was moved ------------------------------------------------------------- */

static enum way way_of(const struct memory_lane *m, const dray__op *op)
{
    const dray_copy *copy = &op->copy;
    bool memory = dray_region_base(source_region(m, copy)) != NULL;
    bool compared = m->haul->options.compared && m->haul->options.compared[copy->tensor];
    if (!m->haul->options.verify)
        return UNCHECKED;
    if (!op->owned || (memory && m->haul->options.compared && !compared))
        return TWICE;
    return memory && copy->source_dtype == copy->destination_dtype ? READ_BACK : ON_THE_WAY;
}

/* What the mover said of slice i of its batch. */
static void left(struct memory_lane *m, uint32_t i)
{
    const dray__op *op = &m->haul->sources->ops[m->batch_ops[i]];
    if (m->way == UNCHECKED || m->way == READ_BACK)
        return;
    m->haul->expected[op->block] += m->sums[i];
    if (op->owned)
        dray__haul_own(m->haul, &m->copies[i], m->source_sums[i]);
}

static void arrived(struct memory_lane *m, const dray__op *op, const dray_copy *copy)
{
    uint64_t sum = dray__haul_read_back(
        m->haul, m->haul->destination->regions[copy->destination_region], copy);
    m->haul->found[op->block] += sum;
    if (way_of(m, op) != READ_BACK)
        return;
    dray__haul_own(m->haul, copy, sum);
    m->haul->expected[op->block] += sum;
}

/* ---- moving ---------------------------------------------------------------------------------- */

static int move_batch(struct memory_lane *m, const dray_region *source, dray_region *destination,
                      enum way way, dray_error *error)
{
    dray__move_options options = {.layout = m->haul->destination->layout,
                                  .staging = m->scratch,
                                  .staging_bytes = m->scratch_bytes};
    if (way == ON_THE_WAY || way == TWICE) {
        memset(m->sums, 0, sizeof m->sums);
        memset(m->source_sums, 0, sizeof m->source_sums);
        options.sums = m->sums;
        options.source_sums = m->source_sums;
    }
    int64_t begin = dray__now();
    int rc = dray__move_all(source, destination, m->copies, m->batch, &options, error);
    for (uint32_t i = 0; i < m->batch && rc == DRAY_OK && way == TWICE; i++)
        if (dray__haul_read_back(m->haul, destination, &m->copies[i]) != m->sums[i])
            rc = dray__fail(error, DRAY_ECHECKSUM,
                            "tensor %s: memory does not hold what was copied there",
                            dray__haul_tensor(m->haul, &m->copies[i])->name);
    if (rc == DRAY_OK && way == TWICE) {
        options.sums = options.source_sums = NULL;
        rc = dray__move_all(source, destination, m->copies, m->batch, &options, error);
    }
    m->haul->move_ns += dray__now() - begin;
    return rc;
}

/* Can the next slice go with those in the batch: up to about a slice's bytes out of one region? */
static bool goes_along(struct memory_lane *m, const dray_copy *copy, uint64_t bytes)
{
    const dray_copy *first = &m->copies[0];
    enum way way = way_of(m, op_at(m, m->next));
    if (m->batch == 0) {
        m->way = way;
        return true;
    }
    return copy->source == first->source && copy->source_region == first->source_region &&
           way == m->way && bytes <= m->slice_bytes;
}

/* Takes slices that go from one region to one region. */
static void gather(struct memory_lane *m)
{
    uint64_t bytes = 0;
    dray_copy copy;
    for (m->batch = 0; m->batch < BATCH && peek(m, &copy); m->batch++) {
        uint64_t more = dray__copy_bytes(&copy);
        if (!goes_along(m, &copy, bytes + more) ||
            (m->batch && copy.destination_region != m->copies[0].destination_region))
            return;
        bytes += more;
        m->batch_ops[m->batch] = index_at(m, m->next);
        m->copies[m->batch] = copy;
        take(m);
    }
}

static int step_direct(struct memory_lane *m, dray_error *error)
{
    gather(m);
    if (!m->batch)
        return DRAY_OK;
    const dray_region *source = source_region(m, &m->copies[0]);
    int rc = move_batch(m, source, m->haul->destination->regions[m->copies[0].destination_region],
                        m->way, error);
    if (rc)
        return rc;
    int64_t begin = dray__now();
    for (uint32_t i = 0; i < m->batch; i++) {
        m->haul->bytes += dray__copy_bytes(&m->copies[i]);
        left(m, i);
        if (m->haul->options.verify)
            arrived(m, &m->haul->sources->ops[m->batch_ops[i]], &m->copies[i]);
    }
    m->haul->verify_ns += dray__now() - begin;
    return DRAY_EAGAIN;
}

static bool stage(struct memory_lane *m, uint64_t op, const dray_copy *copy)
{
    if (m->staged_count == m->staged_capacity) {
        uint64_t capacity = m->staged_capacity ? m->staged_capacity * 2 : 256;
        struct staged *staged = realloc(m->staged, capacity * sizeof *staged);
        if (!staged)
            return false;
        m->staged = staged;
        m->staged_capacity = capacity;
    }
    m->staged[m->staged_count++] = (struct staged){op, *copy};
    return true;
}

/* As gather, into what is left of the bucket. false: nothing fits any more. */
static int gather_into_bucket(struct memory_lane *m, dray_error *error)
{
    uint64_t bytes = 0;
    uint32_t tensor = m->staged_count ? m->staged[0].copy.tensor : UINT32_MAX;
    dray_copy copy;
    for (m->batch = 0; m->batch < BATCH && peek(m, &copy); m->batch++) {
        uint64_t more = dray__copy_bytes(&copy);
        if (tensor == UINT32_MAX)
            tensor = copy.tensor;
        if (m->bucket_used + more > m->bucket_size ||
            (m->haul->options.strategy == DRAY_STRATEGY_PARAMETER && copy.tensor != tensor))
            break;
        if (!goes_along(m, &copy, bytes + more))
            break;
        bytes += more;
        dray_copy in = copy;
        dray__copy_to_dense(&in, copy.destination_dtype, m->bucket_used);
        m->bucket_used = (m->bucket_used + more + 63) & ~(uint64_t)63;
        dray_copy out = dray__copy_onwards(&copy, &in);
        m->batch_ops[m->batch] = index_at(m, m->next);
        m->copies[m->batch] = in;
        if (!stage(m, m->batch_ops[m->batch], &out))
            return dray__nomem(error);
        take(m);
    }
    return DRAY_OK;
}

static int step_fill(struct memory_lane *m, dray_error *error)
{
    int rc = gather_into_bucket(m, error);
    if (rc)
        return rc;
    if (!m->batch) {
        m->flushing = true;
        return m->staged_count ? DRAY_EAGAIN : DRAY_OK;
    }
    rc = move_batch(m, source_region(m, &m->copies[0]), m->bucket, m->way, error);
    for (uint32_t i = 0; i < m->batch && rc == DRAY_OK; i++)
        left(m, i);
    return rc ? rc : DRAY_EAGAIN;
}

static int step_flush(struct memory_lane *m, dray_error *error)
{
    uint64_t bytes = 0, from = m->flushed;
    for (m->batch = 0; m->batch < BATCH && m->flushed < m->staged_count; m->batch++) {
        const dray_copy *copy = &m->staged[m->flushed].copy;
        uint64_t more = dray__copy_bytes(copy);
        if (m->batch && (copy->destination_region != m->copies[0].destination_region ||
                         bytes + more > m->slice_bytes))
            break;
        bytes += more;
        m->copies[m->batch] = *copy;
        m->flushed++;
    }
    int rc =
        move_batch(m, m->bucket, m->haul->destination->regions[m->copies[0].destination_region],
                   UNCHECKED, error); /* sums were taken on the way in */
    if (rc)
        return rc;
    m->haul->bytes += bytes;
    int64_t begin = dray__now();
    for (uint32_t i = 0; i < m->batch && m->haul->options.verify; i++) {
        const dray__op *op = &m->haul->sources->ops[m->staged[from + i].op];
        dray_copy origin = m->copies[i];
        origin.source_dtype = op->copy.source_dtype;
        arrived(m, op, &origin);
    }
    m->haul->verify_ns += dray__now() - begin;
    if (m->flushed == m->staged_count) {
        m->flushed = m->staged_count = m->bucket_used = 0;
        m->flushing = false;
    }
    return DRAY_EAGAIN;
}

static int step(struct memory_lane *m, dray_error *error)
{
    if (m->haul->options.strategy == DRAY_STRATEGY_DIRECT)
        return step_direct(m, error);
    return m->flushing && m->staged_count ? step_flush(m, error) : step_fill(m, error);
}

static int hold(struct memory_lane *m, dray_error *error)
{
    for (uint32_t i = 0; i < m->haul->sources->count; i++) {
        const dray__source *source = &m->haul->sources->sources[i];
        if (!source->local)
            continue;
        m->held[i] = dray__local_hold(source->token);
        if (!m->held[i])
            return dray__fail(error, DRAY_EDEAD, "publisher %s (member %" PRIu64 ") closed",
                              source->name, source->member);
    }
    return DRAY_OK;
}

static void release(struct memory_lane *m)
{
    for (uint32_t i = 0; i < m->haul->sources->count; i++) {
        dray__local_release(m->held[i]);
        m->held[i] = NULL;
    }
}

static int lane_step(void *lane, int64_t until_ns, bool *waits, dray_error *error)
{
    struct memory_lane *m = lane;
    *waits = false;
    int rc = hold(m, error);
    while (rc == DRAY_OK || rc == DRAY_EAGAIN) {
        rc = step(m, error);
        if (rc != DRAY_EAGAIN || dray__now() >= until_ns)
            break;
    }
    release(m);
    return rc;
}

static uint64_t lane_held_bytes(const void *lane)
{
    const struct memory_lane *m = lane;
    return m->bucket_size + m->scratch_bytes;
}

const dray__lane_kind dray__lane_memory = {.name = "memory",
                                           .takes = lane_takes,
                                           .open = lane_open,
                                           .step = lane_step,
                                           .held_bytes = lane_held_bytes,
                                           .close = lane_close};
