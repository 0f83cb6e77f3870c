/* The books of an update (transfer.h): entries for the bytes that each source has brought, and
 * their final check. */
#include "base/clock.h"
#include "base/error.h"
#include "base/hash.h"
#include "mover/kernels/checksum.h"
#include "mover/mover.h"
#include "weights/transfer/transfer.h"

#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

const dray_tensor_info *dray__transfer_tensor(const dray__transfer *h, const dray_copy *copy)
{
    return dray_layout_tensor(h->destination->layout, copy->tensor);
}

uint64_t dray__copy_bytes(const dray_copy *copy)
{
    dray__rect rect = dray__copy_rect(copy);
    return dray__rect_elements(&rect) * dray_dtype_size((dray_dtype)copy->destination_dtype);
}

void dray__transfer_add(dray__transfer *h, uint32_t tensor, const struct dray__tensor_sum *sum)
{
    struct dray__tensor_sum *t = &h->tensors[tensor];
    if (!sum->elements)
        return;
    t->mixed |= sum->mixed || (t->elements && t->dtype != sum->dtype);
    t->dtype = sum->dtype;
    t->elements += sum->elements;
    t->sum += sum->sum;
}

void dray__transfer_own(dray__transfer *h, const dray__op *op, const dray_copy *copy, uint64_t sum)
{
    dray__rect rect = dray__copy_rect(copy);
    struct dray__tensor_sum of = {op->copy.source_dtype, false, dray__rect_elements(&rect), sum};
    if (op->owned)
        dray__transfer_add(h, copy->tensor, &of);
}

void dray__transfer_read_back(const dray__transfer *h, const dray_region *region,
                              const dray_copy *copies, uint32_t count, uint64_t *sums)
{
    dray__sum_part parts[DRAY__BATCH];
    for (uint32_t first = 0, n; first < count; first += n) {
        n = count - first < DRAY__BATCH ? count - first : DRAY__BATCH;
        for (uint32_t i = 0; i < n; i++) {
            const dray_copy *copy = &copies[first + i];
            const dray_tensor_info *tensor = dray__transfer_tensor(h, copy);
            parts[i] =
                (dray__sum_part){copy->destination_offset,
                                 {copy->destination_dtype, tensor->ndim, tensor->shape, copy->start,
                                  copy->extent, copy->destination_stride, NULL}};
        }
        if (dray__sum_region(region, parts, n, sums + first, NULL))
            for (uint32_t i = first; i < first + n; i++)
                sums[i] = dray__hash(&copies[i], sizeof copies[i]);
    }
}

/* ---- batches --------------------------------------------------------------------------------- */

int dray__batch_move(dray__transfer *h, dray__batch *b, uint32_t first, uint32_t count,
                     const dray_region *from, dray_region *to, bool sums, dray_error *error)
{
    dray__move_options options = {.layout = h->destination->layout,
                                  .staging = b->scratch,
                                  .staging_bytes = b->scratch_bytes,
                                  .sums = sums ? b->written + first : NULL,
                                  .source_sums = sums ? b->read + first : NULL};
    int64_t begin = dray__now();
    memset(b->written + first, 0, count * sizeof *b->written);
    memset(b->read + first, 0, count * sizeof *b->read);
    int rc = dray__move_all(from, to, b->copies + first, count, &options, error);
    h->move_ns += dray__now() - begin;
    return rc;
}

int dray__batch_compare(const dray__transfer *h, const dray__batch *b, const dray_region *to,
                        dray_error *error)
{
    uint64_t found[DRAY__BATCH];
    dray__transfer_read_back(h, to, b->copies, b->count, found);
    for (uint32_t i = 0; i < b->count; i++)
        if (found[i] != b->written[i])
            return dray__fail(error, DRAY_ECHECKSUM,
                              "tensor %s: memory does not hold the bytes that were copied there",
                              dray__transfer_tensor(h, &b->copies[i])->name);
    return DRAY_OK;
}

void dray__transfer_written(dray__transfer *h, const dray__op *op, const dray_copy *copy,
                            uint64_t read, uint64_t written)
{
    if (!h->options.verify)
        return;
    h->expected[op->block] += written;
    dray__transfer_own(h, op, copy, read);
}

void dray__batch_written(dray__transfer *h, const dray__batch *b)
{
    for (uint32_t i = 0; i < b->count; i++)
        dray__transfer_written(h, b->ops[i], &b->copies[i], b->read[i], b->written[i]);
}

void dray__transfer_found(dray__transfer *h, const dray__op *op, const dray_copy *copy,
                          uint64_t sum)
{
    h->bytes += dray__copy_bytes(copy);
    if (h->options.verify)
        h->found[op->block] += sum;
}

/* Enters parts that have their destinations in one region. */
static void arrived(dray__transfer *h, const dray__op *const *ops, const dray_copy *copies,
                    uint32_t count, bool counts)
{
    uint64_t sums[DRAY__BATCH] = {0};
    int64_t begin = dray__now();
    if (h->options.verify) {
        const dray_region *to = h->destination->regions[copies->destination_region];
        dray__transfer_read_back(h, to, copies, count, sums);
        h->verify_ns += dray__now() - begin;
    }
    for (uint32_t i = 0; i < count; i++) {
        dray__transfer_found(h, ops[i], &copies[i], sums[i]);
        if (counts)
            dray__transfer_written(h, ops[i], &copies[i], sums[i], sums[i]);
    }
}

void dray__transfer_arrived(dray__transfer *h, const dray__op *op, const dray_copy *copy,
                            bool counts)
{
    arrived(h, &op, copy, 1, counts);
}

void dray__batch_arrived(dray__transfer *h, const dray__batch *b, bool counts)
{
    for (uint32_t i = 0, end; i < b->count; i = end) {
        uint32_t region = b->copies[i].destination_region;
        for (end = i + 1; end < b->count && b->copies[end].destination_region == region; end++)
            ;
        arrived(h, b->ops + i, b->copies + i, end - i, counts);
    }
}

/* ---- results --------------------------------------------------------------------------------- */

int dray__transfer_check(const dray__transfer *h, dray_error *error)
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

int dray__transfer_compare(const dray__transfer *h, const uint64_t *sums, dray_error *error)
{
    const dray_layout *layout = h->destination->layout;
    for (uint32_t b = 0; sums && h->found && b < dray_layout_block_count(layout); b++)
        if (sums[b] != h->found[b] && !(h->options.in_place && h->options.in_place[b]))
            return dray__fail(
                error, DRAY_ECHECKSUM,
                "tensor %s: block %" PRIu32 " holds %016" PRIx64 " after the commit's copy, "
                "%016" PRIx64 " was prefetched",
                dray_layout_tensor(layout, dray_layout_block(layout, b)->tensor)->name, b,
                h->found[b], sums[b]);
    return DRAY_OK;
}

/* ---- the sums of a vote -------------------------------------------------------------------------
 * They have the form of the last vote. The item of each destination tensor is kept, so that the
 * next table is made without comparing names. */

struct votes {
    dray__sums_form *form;
    struct dray__tensor_sum *tensors; /* as in the last vote, but for the sums */
    uint32_t *at;                     /* [tensor]: its item */
    bool looked, plain, quantised;
};

static void forget_form(struct votes *v)
{
    dray__sums_form_drop(v->form);
    free(v->tensors);
    free(v->at);
    v->form = NULL;
    v->tensors = NULL;
    v->at = NULL;
}

static void forget(void *votes)
{
    forget_form(votes);
    free(votes);
}

static bool is_alike(const struct votes *v, const struct dray__tensor_sum *tensors, uint32_t count)
{
    bool is = v->form != NULL;
    for (uint32_t i = 0; i < count && is; i++)
        is = v->tensors[i].elements == tensors[i].elements &&
             (!tensors[i].elements ||
              (v->tensors[i].dtype == tensors[i].dtype && v->tensors[i].mixed == tensors[i].mixed));
    return is;
}

static bool fill_by_name(const dray__transfer *h, uint32_t count, dray__sums *out)
{
    for (uint32_t i = 0; i < count; i++) {
        const struct dray__tensor_sum *sum = &h->tensors[i];
        dray__named_sum item = {h->sources->names[i], sum->dtype, sum->mixed, sum->elements,
                                sum->sum};
        if (sum->elements && !dray__sums_add_item(out, &item))
            return false;
    }
    return true;
}

/* Remembers the items of the tensors. Without memory they are looked up again the next time. */
static void remember(struct votes *v, const dray__transfer *h, uint32_t count, dray__sums *out)
{
    forget_form(v);
    dray__sums_form *form = out->count ? dray__sums_form_of(out) : NULL;
    v->tensors = malloc(((size_t)count + 1) * sizeof *v->tensors);
    v->at = calloc((size_t)count + 1, sizeof *v->at);
    if (!form || !v->tensors || !v->at) {
        forget_form(v);
        return;
    }
    memcpy(v->tensors, h->tensors, count * sizeof *v->tensors);
    for (uint32_t i = 0; i < count; i++)
        if (v->tensors[i].elements)
            v->at[i] = dray__sums_form_find(form, h->sources->names[i]);
    v->form = dray__sums_form_keep(form);
}

int dray__transfer_sums(const dray__transfer *h, dray__sums *out, dray_error *error)
{
    uint32_t count = dray_layout_tensor_count(h->destination->layout);
    if (!h->options.verify)
        return DRAY_OK;
    struct votes *v = dray__kept_make(&h->sources->kept, forget, sizeof *v);
    if (!v)
        return dray__nomem(error);
    if (!is_alike(v, h->tensors, count)) {
        if (!fill_by_name(h, count, out))
            return dray__nomem(error);
        remember(v, h, count, out);
        return DRAY_OK;
    }
    uint64_t *plain = calloc((size_t)dray__sums_form_count(v->form) + 1, sizeof *plain);
    if (!plain)
        return dray__nomem(error);
    for (uint32_t i = 0; i < count; i++)
        if (h->tensors[i].elements)
            plain[v->at[i]] += h->tensors[i].sum;
    dray__sums_of_form(out, v->form, plain);
    return DRAY_OK;
}

/* Does this rank use the sources' names for all its tensors? Also finds out whether any is
 * quantised.
 */
static bool is_plain(struct votes *v, const dray_layout *layout, const char *const *names)
{
    if (v->looked)
        return v->plain;
    v->looked = v->plain = true;
    for (uint32_t i = 0; i < dray_layout_tensor_count(layout); i++) {
        const dray_tensor_info *tensor = dray_layout_tensor(layout, i);
        v->quantised |= dray_layout_quant(layout, i) != NULL;
        v->plain &= tensor->alias_of >= 0 || strcmp(names[i], tensor->name) == 0;
    }
    return v->plain;
}

/* For each destination block: whether this rank owns its elements. */
enum owned { OWNED_UNKNOWN, OWNED_NOT, OWNED_WHOLE, OWNED_IN_PART };

static uint8_t *owned_blocks(const dray__transfer *h)
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

int dray__transfer_resident(const dray__transfer *h, bool *as_read, dray__sums *out,
                            dray_error *error)
{
    const dray_layout *layout = h->destination->layout;
    if (!h->options.verify || !h->found)
        return dray__fail(error, DRAY_EUNSUPPORTED, "nothing was verified");
    struct votes *v = dray__kept_make(&h->sources->kept, forget, sizeof *v);
    if (!v)
        return dray__nomem(error);
    *as_read = is_plain(v, layout, h->sources->names) && !h->sources->casts;
    if (v->quantised)
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

uint64_t *dray__transfer_take_blocks(dray__transfer *h)
{
    uint64_t *blocks = h->found;
    h->found = NULL;
    return blocks;
}
