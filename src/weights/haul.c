/* Moves the bytes of one update by one of three strategies, in batches of slices that stay in cache
 * between the copy and its checksums, and holds the declared ceiling of extra memory.
 *
 * What is checked, per slice: `found`, the destination's bits as they can be read back, against
 * `expected`, what the mover meant to write; and the source's bits of the elements that this rank
 * owns in its group, which add up to what the publishers announced (see enum way). */
#include "base/clock.h"
#include "base/error.h"
#include "mover/checksum.h"
#include "mover/mover.h"
#include "weights/internal.h"

#include <inttypes.h>
#include <stdio.h>
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

struct tensor_sum {
    int32_t dtype;
    bool mixed;
    uint64_t elements, sum;
};

struct dray__haul {
    const dray__sources *sources;
    const dray__destination *destination;
    dray__haul_options options;
    uint64_t *order; /* of the ops; NULL: as they are */
    uint64_t next;   /* op */
    dray__slicer slicer;
    bool in_op;
    uint64_t slice_bytes;
    dray__local **held; /* one a source, while a step runs */

    dray_copy copies[BATCH];
    uint64_t ops[BATCH], sums[BATCH], source_sums[BATCH];
    uint32_t batch;
    enum way way; /* of the batch */

    dray_region *bucket;
    uint64_t bucket_used, bucket_size;
    struct staged *staged;
    uint64_t staged_count, staged_capacity, flushed;
    bool flushing;

    void *scratch;
    size_t scratch_bytes;

    struct tensor_sum *tensors;
    uint64_t *expected, *found; /* one a destination block */
    uint64_t bytes;
    int64_t move_ns, verify_ns;
};

/* ---- opening --------------------------------------------------------------------------------- */

/* Copies by tensor, otherwise in the plan's order (counting sort). */
static uint64_t *order_by_tensor(const dray__sources *s, uint32_t tensors)
{
    uint64_t *at = calloc((size_t)tensors + 2, sizeof *at);
    uint64_t *order = calloc((size_t)s->op_count + 1, sizeof *order);
    if (!at || !order) {
        free(at);
        free(order);
        return NULL;
    }
    for (uint64_t i = 0; i < s->op_count; i++)
        at[s->ops[i].copy.tensor + 1]++;
    for (uint32_t t = 0; t < tensors; t++)
        at[t + 1] += at[t];
    for (uint64_t i = 0; i < s->op_count; i++)
        order[at[s->ops[i].copy.tensor]++] = i;
    free(at);
    return order;
}

static int open_bucket(dray__haul *h, dray_error *error)
{
    uint64_t ceiling = h->options.bucket_bytes;
    if (ceiling < DRAY__BUCKET_MIN)
        return dray__fail(error, DRAY_EINVALID,
                          "bucket_bytes %" PRIu64 ": at least %" PRIu64 " expected", ceiling,
                          DRAY__BUCKET_MIN);
    /* Here one core fills the bucket and empties it: one that stays in its cache is the fastest,
     * whatever more is allowed. */
    uint64_t best = h->sources->files ? BUCKET_OF_FILE : BUCKET_OF_MEMORY;
    ceiling -= h->scratch_bytes;
    h->bucket_size = (ceiling < best ? ceiling : best) & ~(uint64_t)4095;
    if (h->slice_bytes > h->bucket_size)
        h->slice_bytes = h->bucket_size;
    return dray_region_alloc(DRAY_REGION_HOST, h->bucket_size, "bucket", &h->bucket, error);
}

/* What the movers need on the way, within the ceiling of the strategies that have one. */
static int open_scratch(dray__haul *h, dray_error *error)
{
    if (!h->sources->files && !h->sources->casts)
        return DRAY_OK;
    uint64_t bytes = h->sources->files ? DRAY__MOVE_STAGING : DRAY__SLICE_BYTES;
    if (h->options.strategy != DRAY_STRATEGY_DIRECT && bytes > h->options.bucket_bytes / 4)
        bytes = h->options.bucket_bytes / 4;
    if (bytes < DRAY__MOVE_STAGING_MIN)
        bytes = DRAY__MOVE_STAGING_MIN;
    h->scratch_bytes = (size_t)bytes & ~(size_t)4095;
    h->scratch = aligned_alloc(4096, h->scratch_bytes);
    return h->scratch ? DRAY_OK : dray__nomem(error);
}

static int haul_init(dray__haul *h, dray_error *error)
{
    const dray_layout *layout = h->destination->layout;
    uint32_t tensors = dray_layout_tensor_count(layout), blocks = dray_layout_block_count(layout);
    h->slice_bytes = h->sources->files ? DRAY__FILE_SLICE_BYTES : DRAY__SLICE_BYTES;
    h->held = calloc((size_t)h->sources->count + 1, sizeof(dray__local *));
    if (!h->held)
        return dray__nomem(error);
    if (h->options.verify) {
        h->tensors = calloc((size_t)tensors + 1, sizeof *h->tensors);
        h->expected = calloc((size_t)blocks + 1, sizeof *h->expected);
        h->found = calloc((size_t)blocks + 1, sizeof *h->found);
        if (!h->tensors || !h->expected || !h->found)
            return dray__nomem(error);
    }
    int rc = open_scratch(h, error);
    if (rc || h->options.strategy == DRAY_STRATEGY_DIRECT)
        return rc;
    if (h->options.strategy == DRAY_STRATEGY_PARAMETER) {
        h->order = order_by_tensor(h->sources, tensors);
        if (!h->order)
            return dray__nomem(error);
    }
    return open_bucket(h, error);
}

void dray__haul_close(dray__haul *h)
{
    if (!h)
        return;
    free(h->order);
    free(h->held);
    dray_region_free(h->bucket);
    free(h->staged);
    free(h->scratch);
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
    int rc = haul_init(h, error);
    if (rc) {
        dray__haul_close(h);
        return rc;
    }
    *out = h;
    return DRAY_OK;
}

/* ---- batches --------------------------------------------------------------------------------- */

static const dray__op *op_at(const dray__haul *h, uint64_t index)
{
    return &h->sources->ops[h->order ? h->order[index] : index];
}

static const dray_tensor_info *tensor_of(const dray__haul *h, const dray_copy *copy)
{
    return dray_layout_tensor(h->destination->layout, copy->tensor);
}

/* The next slice, without taking it; false at the end. */
static bool peek(dray__haul *h, dray_copy *out)
{
    if (h->next == h->sources->op_count)
        return false;
    const dray_copy *copy = &op_at(h, h->next)->copy;
    if (!h->in_op) {
        dray__rect whole = dray__copy_rect(copy);
        size_t from = dray_dtype_size((dray_dtype)copy->source_dtype);
        size_t to = dray_dtype_size((dray_dtype)copy->destination_dtype);
        dray__slicer_start(&h->slicer, &whole, from > to ? from : to, h->slice_bytes);
        h->in_op = true;
    }
    dray__rect slice;
    dray__slicer_peek(&h->slicer, &slice);
    *out = dray__copy_cut(copy, &slice);
    return true;
}

static void take(dray__haul *h)
{
    dray__slicer_next(&h->slicer);
    if (h->slicer.done) {
        h->in_op = false;
        h->next++;
    }
}

static uint64_t copy_bytes(const dray_copy *copy)
{
    dray__rect rect = dray__copy_rect(copy);
    return dray__rect_elements(&rect) * dray_dtype_size((dray_dtype)copy->destination_dtype);
}

static dray_region *source_region(const dray__haul *h, const dray_copy *copy)
{
    return h->held[copy->source] ? dray__local_region(h->held[copy->source], copy->source_region)
                                 : h->sources->sources[copy->source].regions[copy->source_region];
}

/* ---- checksums of what was moved ------------------------------------------------------------ */

static void own(dray__haul *h, const dray_copy *copy, uint64_t sum)
{
    struct tensor_sum *t = &h->tensors[copy->tensor];
    dray__rect rect = dray__copy_rect(copy);
    t->mixed |= t->elements && t->dtype != copy->source_dtype;
    t->dtype = copy->source_dtype;
    t->elements += dray__rect_elements(&rect);
    t->sum += sum;
}

static enum way way_of(const dray__haul *h, const dray__op *op)
{
    const dray_copy *copy = &op->copy;
    bool memory = dray_region_base(source_region(h, copy)) != NULL;
    bool compared = h->options.compared && h->options.compared[copy->tensor];
    if (!h->options.verify)
        return UNCHECKED;
    if (!op->owned || (memory && h->options.compared && !compared))
        return TWICE;
    return memory && copy->source_dtype == copy->destination_dtype ? READ_BACK : ON_THE_WAY;
}

/* What the mover said of slice i of its batch. */
static void left(dray__haul *h, uint32_t i)
{
    const dray__op *op = &h->sources->ops[h->ops[i]];
    if (h->way == UNCHECKED || h->way == READ_BACK)
        return;
    h->expected[op->block] += h->sums[i];
    if (op->owned)
        own(h, &h->copies[i], h->source_sums[i]);
}

/* The sum of what lies at the destination of a copy now. */
static uint64_t read_back(const dray__haul *h, const dray_region *region, const dray_copy *copy)
{
    const dray_tensor_info *tensor = tensor_of(h, copy);
    const uint8_t *base = dray_region_base(region);
    dray__sum_of destination = {copy->destination_dtype,
                                tensor->ndim,
                                tensor->shape,
                                copy->start,
                                copy->extent,
                                copy->destination_stride,
                                base + copy->destination_offset};
    return dray__sum(&destination);
}

static void arrived(dray__haul *h, const dray__op *op, const dray_copy *copy)
{
    uint64_t sum = read_back(h, h->destination->regions[copy->destination_region], copy);
    h->found[op->block] += sum;
    if (way_of(h, op) != READ_BACK)
        return;
    own(h, copy, sum);
    h->expected[op->block] += sum;
}

/* ---- moving ---------------------------------------------------------------------------------- */

static int move_batch(dray__haul *h, const dray_region *source, dray_region *destination,
                      enum way way, dray_error *error)
{
    dray__move_options options = {
        .layout = h->destination->layout, .staging = h->scratch, .staging_bytes = h->scratch_bytes};
    if (way == ON_THE_WAY || way == TWICE) {
        memset(h->sums, 0, sizeof h->sums);
        memset(h->source_sums, 0, sizeof h->source_sums);
        options.sums = h->sums;
        options.source_sums = h->source_sums;
    }
    int64_t begin = dray__now();
    int rc = dray__move_all(source, destination, h->copies, h->batch, &options, error);
    for (uint32_t i = 0; i < h->batch && rc == DRAY_OK && way == TWICE; i++)
        if (read_back(h, destination, &h->copies[i]) != h->sums[i])
            rc = dray__fail(error, DRAY_ECHECKSUM,
                            "tensor %s: memory does not hold what was copied there",
                            tensor_of(h, &h->copies[i])->name);
    if (rc == DRAY_OK && way == TWICE) {
        options.sums = options.source_sums = NULL;
        rc = dray__move_all(source, destination, h->copies, h->batch, &options, error);
    }
    h->move_ns += dray__now() - begin;
    return rc;
}

/* Can the next slice go with those in the batch: up to about a slice's bytes out of one region? */
static bool goes_along(dray__haul *h, const dray_copy *copy, uint64_t bytes)
{
    const dray_copy *first = &h->copies[0];
    enum way way = way_of(h, op_at(h, h->next));
    if (h->batch == 0) {
        h->way = way;
        return true;
    }
    return copy->source == first->source && copy->source_region == first->source_region &&
           way == h->way && bytes <= h->slice_bytes;
}

/* Takes slices that go from one region to one region. */
static void gather(dray__haul *h)
{
    uint64_t bytes = 0;
    dray_copy copy;
    for (h->batch = 0; h->batch < BATCH && peek(h, &copy); h->batch++) {
        uint64_t more = copy_bytes(&copy);
        if (!goes_along(h, &copy, bytes + more) ||
            (h->batch && copy.destination_region != h->copies[0].destination_region))
            return;
        bytes += more;
        h->ops[h->batch] = h->order ? h->order[h->next] : h->next;
        h->copies[h->batch] = copy;
        take(h);
    }
}

static int step_direct(dray__haul *h, dray_error *error)
{
    gather(h);
    if (!h->batch)
        return DRAY_OK;
    const dray_region *source = source_region(h, &h->copies[0]);
    int rc = move_batch(h, source, h->destination->regions[h->copies[0].destination_region], h->way,
                        error);
    if (rc)
        return rc;
    int64_t begin = dray__now();
    for (uint32_t i = 0; i < h->batch; i++) {
        h->bytes += copy_bytes(&h->copies[i]);
        left(h, i);
        if (h->options.verify)
            arrived(h, &h->sources->ops[h->ops[i]], &h->copies[i]);
    }
    h->verify_ns += dray__now() - begin;
    return DRAY_EAGAIN;
}

/* The way from the bucket to the destination, of a copy whose way into the bucket is dense at
 * `offset`. */
static dray_copy out_of_bucket(const dray_copy *copy, const dray_copy *in)
{
    dray_copy out = *copy;
    out.source_dtype = copy->destination_dtype;
    out.source_offset = in->destination_offset;
    memcpy(out.source_stride, in->destination_stride, sizeof out.source_stride);
    return out;
}

static bool stage(dray__haul *h, uint64_t op, const dray_copy *copy)
{
    if (h->staged_count == h->staged_capacity) {
        uint64_t capacity = h->staged_capacity ? h->staged_capacity * 2 : 256;
        struct staged *staged = realloc(h->staged, capacity * sizeof *staged);
        if (!staged)
            return false;
        h->staged = staged;
        h->staged_capacity = capacity;
    }
    h->staged[h->staged_count++] = (struct staged){op, *copy};
    return true;
}

/* As gather, into what is left of the bucket. false: nothing fits any more. */
static int gather_into_bucket(dray__haul *h, dray_error *error)
{
    uint64_t bytes = 0;
    uint32_t tensor = h->staged_count ? h->staged[0].copy.tensor : UINT32_MAX;
    dray_copy copy;
    for (h->batch = 0; h->batch < BATCH && peek(h, &copy); h->batch++) {
        uint64_t more = copy_bytes(&copy);
        if (tensor == UINT32_MAX)
            tensor = copy.tensor;
        if (h->bucket_used + more > h->bucket_size ||
            (h->options.strategy == DRAY_STRATEGY_PARAMETER && copy.tensor != tensor))
            break;
        if (!goes_along(h, &copy, bytes + more))
            break;
        bytes += more;
        dray_copy in = copy;
        dray__copy_to_dense(&in, copy.destination_dtype, h->bucket_used);
        h->bucket_used = (h->bucket_used + more + 63) & ~(uint64_t)63;
        dray_copy out = out_of_bucket(&copy, &in);
        h->ops[h->batch] = h->order ? h->order[h->next] : h->next;
        h->copies[h->batch] = in;
        if (!stage(h, h->ops[h->batch], &out))
            return dray__nomem(error);
        take(h);
    }
    return DRAY_OK;
}

static int step_fill(dray__haul *h, dray_error *error)
{
    int rc = gather_into_bucket(h, error);
    if (rc)
        return rc;
    if (!h->batch) {
        h->flushing = true;
        return h->staged_count ? DRAY_EAGAIN : DRAY_OK;
    }
    rc = move_batch(h, source_region(h, &h->copies[0]), h->bucket, h->way, error);
    for (uint32_t i = 0; i < h->batch && rc == DRAY_OK; i++)
        left(h, i);
    return rc ? rc : DRAY_EAGAIN;
}

static int step_flush(dray__haul *h, dray_error *error)
{
    uint64_t bytes = 0, from = h->flushed;
    for (h->batch = 0; h->batch < BATCH && h->flushed < h->staged_count; h->batch++) {
        const dray_copy *copy = &h->staged[h->flushed].copy;
        uint64_t more = copy_bytes(copy);
        if (h->batch && (copy->destination_region != h->copies[0].destination_region ||
                         bytes + more > h->slice_bytes))
            break;
        bytes += more;
        h->copies[h->batch] = *copy;
        h->flushed++;
    }
    int rc = move_batch(h, h->bucket, h->destination->regions[h->copies[0].destination_region],
                        UNCHECKED, error); /* sums were taken on the way in */
    if (rc)
        return rc;
    h->bytes += bytes;
    int64_t begin = dray__now();
    for (uint32_t i = 0; i < h->batch && h->options.verify; i++) {
        const dray__op *op = &h->sources->ops[h->staged[from + i].op];
        dray_copy origin = h->copies[i];
        origin.source_dtype = op->copy.source_dtype;
        arrived(h, op, &origin);
    }
    h->verify_ns += dray__now() - begin;
    if (h->flushed == h->staged_count) {
        h->flushed = h->staged_count = h->bucket_used = 0;
        h->flushing = false;
    }
    return DRAY_EAGAIN;
}

static int step(dray__haul *h, dray_error *error)
{
    if (h->options.strategy == DRAY_STRATEGY_DIRECT)
        return step_direct(h, error);
    return h->flushing && h->staged_count ? step_flush(h, error) : step_fill(h, error);
}

static int hold(dray__haul *h, dray_error *error)
{
    for (uint32_t i = 0; i < h->sources->count; i++) {
        const dray__source *source = &h->sources->sources[i];
        if (!source->local)
            continue;
        h->held[i] = dray__local_hold(source->token);
        if (!h->held[i])
            return dray__fail(error, DRAY_EDEAD, "publisher %s (member %" PRIu64 ") closed",
                              source->name, source->member);
    }
    return DRAY_OK;
}

static void release(dray__haul *h)
{
    for (uint32_t i = 0; i < h->sources->count; i++) {
        dray__local_release(h->held[i]);
        h->held[i] = NULL;
    }
}

int dray__haul_step(dray__haul *h, int64_t budget_ns, dray_error *error)
{
    int64_t until = dray__now() + budget_ns;
    int rc = hold(h, error);
    while (rc == DRAY_OK || rc == DRAY_EAGAIN) {
        rc = step(h, error);
        if (rc != DRAY_EAGAIN || dray__now() >= until)
            break;
    }
    release(h);
    return rc;
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
    for (uint32_t t = 0; h->options.verify && t < dray_layout_tensor_count(h->destination->layout);
         t++) {
        const struct tensor_sum *sum = &h->tensors[t];
        if (!sum->elements)
            continue;
        if (!dray__sums_add(out, h->sources->names[t], sum->dtype, sum->elements, sum->sum) ||
            (sum->mixed && !dray__sums_add(out, h->sources->names[t], DRAY_DTYPE_NONE, 0, 0)))
            return dray__nomem(error);
    }
    return DRAY_OK;
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
    report->verify_ns = h->options.verify ? h->verify_ns : 0;
    report->peak_extra_bytes = h->bucket_size + h->scratch_bytes;
    report->bytes_per_s = h->move_ns > 0 ? (double)h->bytes / ((double)h->move_ns * 1e-9) : 0;
    report->source_bytes = 0;
    for (uint32_t i = 0; i < h->sources->count; i++)
        report->source_bytes += dray_plan_source_bytes(h->sources->plan, i);
    for (int link = 0; link < DRAY_LINK_COUNT; link++)
        report->link_bytes[link] = dray_plan_bytes(h->sources->plan, (dray_link)link);
}
