/* Takes answers in the source of data servers (remote.h): moves them to their destination, and
 * enters their sums in the books. */
#include "weights/placements/prequantised.h"
#include "weights/server/pull_quant.h"
#include "weights/sources/remote.h"

/* Returns the copy from the slot, which has the slice dense at `offset`, to the destination. */
static dray_copy out_of_slot(const struct source *s, const dray_copy *op, const dray__rect *rect,
                             uint64_t offset)
{
    dray_copy out = dray__copy_cut(op, rect);
    dray__copy_from_box(&out, rect, dray__remote_dtype(s, op), offset);
    return out;
}

/* The fields of an answer's head for rectangle i. */
struct told {
    uint64_t source_sum, sum;
    uint64_t bytes; /* of the data */
};

size_t dray__remote_head_start(const struct source *s)
{
    return s->staged ? sizeof(uint64_t) : 0;
}

static uint64_t place_of(const struct source *s, const uint8_t *head)
{
    dray__reader in = dray__reader_of(head, dray__remote_head_start(s));
    return s->staged ? dray__get_u64(&in) : 0;
}

/* The region that a slice is copied from: an arena, a slot, or a mapped region of another
 * member. */
static const dray_region *landing(const struct source *s, const struct request *request,
                                  const dray_copy *copy)
{
    if (s->cohort && request->direct)
        return s->maps[copy->source_region];
    return s->staged ? s->of->arena : s->slot;
}

/* The region in which a quantised rectangle is, at l->at. */
static const dray_region *quantised_in(const struct remote_route *l, const struct source *s,
                                       const struct request *request, uint32_t i)
{
    return l->sparse[i] ? l->patched : landing(s, request, &l->batch.copies[i]);
}

static struct told told_of(const struct remote_route *l, const struct source *s,
                           const struct request *request, const uint8_t *head, uint32_t i)
{
    bool verify = l->transfer->options.verify;
    if (request->direct && !s->cohort) { /* the source sent no sums: its bits are those received */
        const struct slice *slice = &request->slices[i];
        return (struct told){l->batch.read[i], l->batch.read[i],
                             dray__remote_bytes(l, s, dray__remote_op(l, s, slice), &slice->rect)};
    }
    size_t size = dray__pull_head_bytes(verify, !request->plain);
    dray__reader in = dray__reader_of(head + dray__remote_head_start(s) + i * size, size);
    struct told told = {0};
    if (verify) {
        told.source_sum = dray__get_u64(&in);
        told.sum = dray__get_u64(&in);
    }
    const struct slice *slice = &request->slices[i];
    told.bytes = request->plain
                     ? dray__remote_bytes(l, s, dray__remote_op(l, s, slice), &slice->rect)
                     : dray__get_u32(&in);
    return told;
}

/* Finds the data of each rectangle in the slot, and which of them are deltas. */
static void look(struct remote_route *l, const struct source *s, const struct request *request,
                 const uint8_t *head)
{
    uint64_t offset = place_of(s, head);
    for (uint32_t i = 0; i < request->count; i++) {
        const struct slice *slice = &request->slices[i];
        const dray__op *op = dray__remote_op(l, s, slice);
        uint64_t bytes = told_of(l, s, request, head, i).bytes;
        l->batch.copies[i] =
            s->cohort && request->direct
                ? dray__remote_out_of_map(s, &s->parts[slice->part], &op->copy, &slice->rect)
                : out_of_slot(s, &op->copy, &slice->rect, offset);
        l->sparse[i] = bytes < dray__remote_bytes(l, s, op, &slice->rect);
        l->prequantised[i] = op->prequantised;
        l->at[i] = offset;
        l->batch.ops[i] = op;
        l->batch.written[i] = l->batch.read[i] = 0;
        offset += bytes;
    }
}

/* Applies the rectangles from `first` on that came as deltas for one region. *end: behind the last.
 */
static int place_deltas(struct remote_route *l, const struct source *s,
                        const struct request *request, const uint8_t *head, uint32_t first,
                        uint32_t *end, dray_error *error)
{
    dray__transfer *h = l->transfer;
    dray__delta_message messages[RECTS];
    uint32_t region = l->batch.copies[first].destination_region, count = 0;
    dray_region *to = h->destination->regions[region];
    uint32_t i = first;
    for (; i < request->count && l->sparse[i] && !l->prequantised[i] &&
           l->batch.copies[i].destination_region == region;
         i++) {
        const dray_copy *copy = &l->batch.copies[i];
        const uint8_t *data = dray_region_base(landing(s, request, copy));
        size_t bytes = told_of(l, s, request, head, i).bytes;
        messages[count++] = (dray__delta_message){data + copy->source_offset, bytes, copy};
        h->told.delta_bytes += bytes;
        h->told.delta_covered_bytes += dray__copy_bytes(copy);
    }
    *end = i;
    int64_t begin = dray__now();
    int rc = dray__delta_decode_all(l->coder, messages, count, to, error);
    h->move_ns += dray__now() - begin;
    return rc;
}

/* Makes whole a quantised rectangle that came as changes: what this rank has, at offset `at` of
 * l->patched, with the changes. */
static int patch(struct remote_route *l, const struct source *s, const struct request *request,
                 const uint8_t *head, uint32_t i, uint64_t at, dray_error *error)
{
    dray__transfer *h = l->transfer;
    const struct slice *slice = &request->slices[i];
    const dray__op *op = dray__remote_op(l, s, slice);
    dray__rect cells = dray__prequantised_cells(h, op, &slice->rect);
    dray_copy elements = dray__copy_cut(&op->copy, &slice->rect), scales = {.ndim = op->copy.ndim};
    memcpy(scales.start, cells.start, sizeof scales.start);
    memcpy(scales.extent, cells.extent, sizeof scales.extent);
    dray__copy_to_dense(&elements, dray__prequantised_quant(h, op).dtype, at);
    dray__copy_to_dense(&scales, DRAY_F32, at + dray__pull_quant_scales_at(&slice->rect));
    const uint8_t *data = dray_region_base(landing(s, request, &l->batch.copies[i]));
    size_t bytes = told_of(l, s, request, head, i).bytes;
    int rc = dray__prequantised_read(h, op, &slice->rect, l->patched, at, error);
    if (!rc)
        rc = dray__pull_quant_apply(l->coder, data + l->at[i], bytes, &elements, &scales,
                                    dray_region_base(l->patched), error);
    l->at[i] = at;
    h->told.delta_bytes += bytes;
    h->told.delta_covered_bytes += dray__remote_bytes(l, s, op, &slice->rect);
    return rc;
}

/* Reads back, at the destination, the rectangles that came as deltas, or those that came whole, but
 * not quantised ones. sums[i]: of rectangle i. */
static void read_back(struct remote_route *l, uint32_t count, bool deltas, uint64_t *sums)
{
    dray__transfer *h = l->transfer;
    const dray_copy *copies = l->batch.copies;
    int64_t begin = dray__now();
    for (uint32_t i = 0, end; i < count; i = end) {
        uint32_t region = copies[i].destination_region;
        for (end = i; end < count && l->sparse[end] == deltas && !l->prequantised[end] &&
                      copies[end].destination_region == region;
             end++)
            ;
        if (end == i)
            end++;
        else
            dray__transfer_read_back(h, h->destination->regions[region], copies + i, end - i,
                                     sums + i);
    }
    h->verify_ns += dray__now() - begin;
}

int dray__remote_place(struct remote_route *l, struct source *s, const struct request *request,
                       const uint8_t *head, dray_error *error)
{
    const dray__destination *to = l->transfer->destination;
    bool verify = l->transfer->options.verify;
    look(l, s, request, head);
    uint64_t patched = 0;
    for (uint32_t i = 0, end; i < request->count; i = end) {
        uint32_t region = l->batch.copies[i].destination_region;
        end = i + 1;
        if (l->prequantised[i]) { /* placed after the whole answer was checked */
            const struct slice *slice = &request->slices[i];
            const dray__op *op = dray__remote_op(l, s, slice);
            int rc = l->sparse[i] ? patch(l, s, request, head, i, patched, error) : DRAY_OK;
            if (rc)
                return rc;
            patched += l->sparse[i] ? dray__remote_bytes(l, s, op, &slice->rect) : 0;
            const uint8_t *data = dray_region_base(quantised_in(l, s, request, i));
            if (verify)
                l->batch.read[i] =
                    dray__prequantised_sum(l->transfer, op, &slice->rect, data + l->at[i]);
            continue;
        }
        if (l->sparse[i]) {
            int rc = place_deltas(l, s, request, head, i, &end, error);
            if (rc)
                return rc;
            continue;
        }
        while (end < request->count && !l->sparse[end] && !l->prequantised[end] &&
               l->batch.copies[end].destination_region == region &&
               l->batch.copies[end].source_region == l->batch.copies[i].source_region)
            end++;
        int rc = dray__batch_move(l->transfer, &l->batch, i, end - i,
                                  landing(s, request, &l->batch.copies[i]), to->regions[region],
                                  verify, error);
        if (rc)
            return rc;
    }
    if (verify) /* the whole answer is in its place */
        read_back(l, request->count, true, l->batch.read);
    for (uint32_t i = 0; i < request->count; i++)
        if (l->sparse[i])
            l->batch.written[i] = l->batch.read[i];
    return DRAY_OK;
}

int dray__remote_place_prequantised(struct remote_route *l, struct source *s,
                                    const struct request *request, dray_error *error)
{
    int rc = DRAY_OK;
    for (uint32_t i = 0; i < request->count && rc == DRAY_OK; i++)
        if (l->prequantised[i])
            rc = dray__prequantised_place(l->transfer, dray__remote_op(l, s, &request->slices[i]),
                                          &request->slices[i].rect, quantised_in(l, s, request, i),
                                          l->at[i], error);
    return rc;
}

/* When nothing is converted, the source's sum must be that of the received bits: otherwise wrong
 * data could pass for the published ones. */
bool dray__remote_unchanged(const struct remote_route *l, const struct source *s,
                            const struct request *request, const uint8_t *head)
{
    for (uint32_t i = 0; i < request->count; i++) {
        struct told told = told_of(l, s, request, head, i);
        const dray_copy *copy = &dray__remote_op(l, s, &request->slices[i])->copy;
        bool as_it_is = !l->prequantised[i] && dray__remote_dtype(s, copy) == copy->source_dtype;
        if (told.sum != l->batch.read[i] || (as_it_is && told.source_sum != told.sum))
            return false;
    }
    return true;
}

void dray__remote_share(struct remote_route *l, const dray__op *op, const dray__rect *rect,
                        uint64_t source_sum, uint64_t sum)
{
    uint32_t block;
    if (l->shares && dray__remote_block(l->transfer, op, rect, &block) &&
        dray__cohort_shared(l->cohort, block))
        dray__shares_enter(l->shares, block, rect, source_sum, sum);
}

void dray__remote_enter(struct remote_route *l, struct source *s, const struct request *request,
                        const uint8_t *head)
{
    dray__transfer *h = l->transfer;
    uint64_t found[RECTS]; /* for deltas, the sums read back when they were applied */
    memcpy(found, l->batch.written, request->count * sizeof *found);
    if (h->options.verify)
        read_back(l, request->count, false, found);
    for (uint32_t i = 0; i < request->count; i++) {
        const dray__op *op = l->batch.ops[i];
        const dray__rect *rect = &request->slices[i].rect;
        dray_copy origin = dray__copy_cut(&op->copy, rect);
        uint64_t read = told_of(l, s, request, head, i).source_sum;
        uint64_t sum = l->prequantised[i] ? l->batch.read[i] : l->batch.written[i];
        if (l->prequantised[i]) { /* its written bytes are in the books already */
            if (h->options.verify)
                dray__transfer_own(h, op, &origin, read);
        } else {
            dray__transfer_written(h, op, &origin, read, sum);
            dray__transfer_found(h, op, &l->batch.copies[i], found[i]);
        }
        dray__remote_share(l, op, rect, read, sum);
    }
}

bool dray__remote_fits(const struct remote_route *l, const struct source *s,
                       const struct request *request, const dray__arrival *arrival)
{
    uint64_t bytes = 0;
    for (uint32_t i = 0; i < request->count; i++) {
        const struct slice *slice = &request->slices[i];
        uint64_t part = told_of(l, s, request, arrival->head, i).bytes;
        if (part > dray__remote_bytes(l, s, dray__remote_op(l, s, slice), &slice->rect))
            return false;
        bytes += part;
    }
    if (s->cohort && request->direct)
        return arrival->header.data_bytes == 0;
    if (!s->staged)
        return bytes == arrival->header.data_bytes;
    uint64_t at = place_of(s, arrival->head), size = dray_region_bytes(s->of->arena);
    return !arrival->header.data_bytes && at % 64 == 0 && at <= size && bytes <= size - at;
}
