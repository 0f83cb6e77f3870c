/* Requests for rectangles and their answers (pull.h): encoding, checking, packing. */
#include "weights/server/pull.h"

#include "base/error.h"
#include "mover/kernels/checksum.h"
#include "mover/mover.h"
#include "weights/delta/delta.h"
#include "weights/server/pull_quant.h"
#include "weights/server/shares.h"

#include <inttypes.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

const dray__fields dray__pull_ticket_fields =
    DRAY__FIELDS(dray__pull_ticket, DRAY__NUMBERS(dray__pull_ticket, token, attempt));
const dray__fields dray__pull_base_fields =
    DRAY__FIELDS(dray__pull_base, DRAY__NUMBERS(dray__pull_base, incarnation, base, version));

/* ---- the reader's side ----------------------------------------------------------------------- */

void dray__pull_put_rects(dray__writer *w, const dray__pull_rect *rects, uint32_t count)
{
    dray__put_u32(w, count);
    for (uint32_t i = 0; i < count; i++) {
        const dray__pull_rect *rect = &rects[i];
        dray__put_u32(w, rect->block);
        dray__put_u8(w, (uint8_t)rect->dtype);
        dray__put_u8(w, (uint8_t)((rect->twice ? DRAY__PULL_TWICE : 0) |
                                  (rect->quantised ? DRAY__PULL_QUANTISED : 0)));
        for (uint32_t d = 0; d < rect->ndim; d++) {
            dray__put_i64(w, rect->rect.start[d]);
            dray__put_i64(w, rect->rect.extent[d]);
        }
        if (rect->quantised)
            dray__pull_put_quant(w, &rect->quant, rect->ndim);
    }
}

size_t dray__pull_begin(dray__writer *w, uint16_t type, uint32_t id, uint64_t token,
                        uint64_t attempt)
{
    size_t begun = dray__request_begin(w, type, id);
    dray__put_fields(w, &dray__pull_ticket_fields, &(dray__pull_ticket){token, attempt});
    return begun;
}

void dray__pull_put_request(dray__writer *w, uint32_t id, uint16_t options, uint64_t token,
                            uint64_t attempt, const dray__pull_base *base,
                            const dray__pull_rect *rects, uint32_t count)
{
    size_t begun = dray__pull_begin(w, DRAY__DATA_RECTS, id, token, attempt);
    dray__put_u16(w, (uint16_t)(options | (base ? DRAY__PULL_BASE : 0)));
    if (base)
        dray__put_fields(w, &dray__pull_base_fields, base);
    dray__pull_put_rects(w, rects, count);
    dray__request_end(w, begun);
}

uint32_t dray__pull_head_bytes(bool sums, bool base)
{
    return (sums ? 16u : 0u) + (base ? 4u : 0u);
}

/* ---- the server's side ----------------------------------------------------------------------- */

uint64_t dray__pull_token(const dray__data_reader *reader)
{
    dray__reader in = dray__reader_of(reader->body, reader->request.body_bytes);
    dray__pull_ticket said;
    dray__get_fields(&in, NULL, &dray__pull_ticket_fields, &said);
    return said.token;
}

uint16_t dray__pull_options(const dray__data_request *request, const uint8_t *body)
{
    dray__reader in = dray__reader_of(body, request->body_bytes);
    dray__pull_ticket said;
    dray__get_fields(&in, NULL, &dray__pull_ticket_fields, &said);
    return dray__get_u16(&in);
}

struct dray__packer {
    dray_copy copies[DRAY__PULL_RECTS_MAX];
    bool twice[DRAY__PULL_RECTS_MAX], quantised[DRAY__PULL_RECTS_MAX];
    /* True when the tensor is stored quantised already, and is not quantised for the answer. */
    bool held;
    dray_copy scales[DRAY__PULL_RECTS_MAX]; /* the places of each rectangle's scales */
    dray__pull_quant quants[DRAY__PULL_RECTS_MAX];
    uint32_t blocks[DRAY__PULL_RECTS_MAX], sizes[DRAY__PULL_RECTS_MAX];
    uint32_t changes[DRAY__PULL_RECTS_MAX]; /* bytes of entries sent in its place; 0 for elements */
    uint64_t sums[DRAY__PULL_RECTS_MAX], source_sums[DRAY__PULL_RECTS_MAX];
    uint32_t count;
    uint64_t data_bytes, room, room_of_quant; /* bytes of the staging, of a quantised rectangle */
    uint8_t *scratch;
    dray__delta_coder *coder;
    /* The region for elements that are to be quantised; NULL before the first one. */
    dray_region *floats;
};

dray__packer *dray__packer_new(void)
{
    dray__packer *packer = calloc(1, sizeof *packer);
    if (packer) {
        packer->scratch = aligned_alloc(4096, DRAY__MOVE_STAGING);
        packer->coder = dray__delta_coder_new();
    }
    if (packer && packer->scratch && packer->coder)
        return packer;
    dray__packer_free(packer);
    return NULL;
}

void dray__packer_free(dray__packer *packer)
{
    if (!packer)
        return;
    dray_region_free(packer->floats);
    dray__delta_coder_free(packer->coder);
    free(packer->scratch);
    free(packer);
}

/* Reads a rectangle and checks that it is inside its block. */
static int get_rect(dray__packer *p, const dray_layout *layout, dray__reader *in, dray_error *error)
{
    uint32_t index = dray__get_u32(in);
    int32_t dtype = dray__get_u8(in);
    uint8_t flags = dray__get_u8(in);
    if (in->failed || index >= dray_layout_block_count(layout))
        return dray__fail(error, DRAY_EINVALID, "block %" PRIu32 " of %" PRIu32, index,
                          dray_layout_block_count(layout));
    const dray_block *block = dray_layout_block(layout, index);
    const dray_tensor_info *tensor = dray_layout_tensor(layout, block->tensor);
    dray_copy *copy = &p->copies[p->count];
    *copy = (dray_copy){.source_region = block->region,
                        .tensor = block->tensor,
                        .ndim = tensor->ndim ? tensor->ndim : 1,
                        .source_dtype = tensor->dtype,
                        .source_offset = block->offset};
    copy->extent[0] = 1;
    uint64_t bytes = dray_dtype_size((dray_dtype)dtype);
    bool inside = bytes > 0;
    for (uint32_t d = 0; d < tensor->ndim && inside; d++) {
        int64_t start = dray__get_i64(in), extent = dray__get_i64(in), skip;
        inside = !in->failed && extent > 0 && start >= block->start[d] &&
                 !__builtin_sub_overflow(start, block->start[d], &skip) &&
                 skip <= block->extent[d] && extent <= block->extent[d] - skip &&
                 !__builtin_mul_overflow(bytes, (uint64_t)extent, &bytes) && bytes <= p->room;
        if (!inside)
            break;
        copy->start[d] = start;
        copy->extent[d] = extent;
        copy->source_stride[d] = block->stride[d];
        copy->source_offset += (uint64_t)skip * (uint64_t)block->stride[d];
    }
    if (!inside || p->data_bytes + bytes > p->room)
        return dray__fail(error, DRAY_EINVALID,
                          "a rectangle that does not lie in block %" PRIu32
                          " of tensor %s, of no dtype, or more than %" PRIu64 " bytes at once",
                          index, tensor->name, p->room);
    for (uint32_t d = tensor->ndim; d < DRAY_MAX_DIMS; d++)
        copy->extent[d] = 1;
    p->quantised[p->count] = flags & DRAY__PULL_QUANTISED;
    if (p->quantised[p->count]) {
        dray__rect rect = dray__copy_rect(copy);
        uint64_t scales_at = p->data_bytes + dray__pull_quant_scales_at(&rect);
        int rc = p->held
                     ? dray__pull_get_held(in, layout, block->tensor, &rect, dtype, scales_at,
                                           &p->quants[p->count], &p->scales[p->count], error)
                     : dray__pull_get_quant(in, tensor, &rect, dtype, &p->quants[p->count], error);
        if (rc)
            return rc;
        bytes = dray__pull_quant_bytes(&p->quants[p->count], &rect);
        if (bytes > p->room_of_quant || p->data_bytes + bytes > p->room)
            return dray__fail(error, DRAY_EINVALID, "tensor %s: too many bytes at once",
                              tensor->name);
    }
    dray__copy_to_dense(copy, dtype, p->data_bytes);
    p->blocks[p->count] = index;
    p->sizes[p->count] = (uint32_t)bytes;
    p->twice[p->count++] = flags & DRAY__PULL_TWICE;
    p->data_bytes += bytes;
    return DRAY_OK;
}

/* For rectangles that are not converted, writes the changes since the base in the place of the
 * elements, so that the elements need not be read: from a GPU, reading takes longer than sending.
 */
static void pack_changes(dray__packer *p, const dray__delta_view *view, dray_region *staging)
{
    uint8_t *data = dray_region_base(staging);
    memset(p->changes, 0, p->count * sizeof *p->changes);
    for (uint32_t i = 0; i < p->count && view; i++) {
        const dray_copy *copy = &p->copies[i];
        dray__rect rect = dray__copy_rect(copy);
        if (copy->source_dtype == copy->destination_dtype && !p->quantised[i])
            p->changes[i] = (uint32_t)dray__delta_encode(
                p->coder, view, p->blocks[i], &rect, copy->destination_dtype,
                data + copy->destination_offset, p->sizes[i]);
    }
}

/* Returns the source of a copy as a rectangle to sum. base: of its region, NULL for GPU memory. */
static dray__sum_of source_of(const dray_layout *layout, const dray_copy *copy, const uint8_t *base)
{
    const dray_tensor_info *tensor = dray_layout_tensor(layout, copy->tensor);
    return (dray__sum_of){copy->source_dtype,
                          tensor->ndim,
                          tensor->shape,
                          copy->start,
                          copy->extent,
                          copy->source_stride,
                          base ? base + copy->source_offset : NULL};
}

/* Sums elements that are not moved: of the rectangles from `first` to `end`, which are of one
 * region. */
static int sum_sources(dray__packer *p, uint32_t first, uint32_t end, const dray_layout *layout,
                       const dray_region *region, dray_error *error)
{
    dray__sum_part parts[DRAY__PULL_RECTS_MAX];
    for (uint32_t i = first; i < end; i++)
        parts[i - first] =
            (dray__sum_part){p->copies[i].source_offset, source_of(layout, &p->copies[i], NULL)};
    int rc = dray__sum_region(region, parts, end - first, p->source_sums + first, error);
    memcpy(p->sums + first, p->source_sums + first, (end - first) * sizeof *p->sums);
    return rc;
}

/* Reads the source's bits a second time, in another way than the mover does, and compares the
 * sums. */
static int read_again(const dray__packer *p, uint32_t i, const dray_layout *layout,
                      const dray_region *region, dray_error *error)
{
    const dray_copy *copy = &p->copies[i];
    const uint8_t *base = dray_region_base(region);
    if (!p->twice[i] || !base)
        return DRAY_OK;
    dray__sum_of source = source_of(layout, copy, base);
    if (dray__sum(&source) == p->source_sums[i])
        return DRAY_OK;
    return dray__fail(error, DRAY_ECHECKSUM, "tensor %s: two readings of its memory differ",
                      dray_layout_tensor(layout, copy->tensor)->name);
}

/* Copies the scales of a tensor that an update brought quantised behind its elements, and
 * computes the sum of both. */
static int pack_scales(dray__packer *p, uint32_t i, const dray__shares *shares,
                       const dray_layout *layout, bool sums, dray_region *staging,
                       dray_error *error)
{
    dray__move_options options = {.layout = layout};
    dray__rect rect = dray__copy_rect(&p->copies[i]);
    int rc = dray__move_all(dray__shares_region(shares, p->scales[i].source_region), staging,
                            &p->scales[i], 1, &options, error);
    uint8_t *data = (uint8_t *)dray_region_base(staging) + p->copies[i].destination_offset;
    if (rc == DRAY_OK)
        dray__pull_quant_fill(&p->quants[i], &rect, data);
    if (rc == DRAY_OK && sums)
        p->sums[i] = dray__pull_quant_sum(dray_layout_tensor(layout, p->copies[i].tensor),
                                          &p->quants[i], &rect, data);
    return rc;
}

/* Replaces a quantised rectangle by its changes since the base, if these take fewer bytes. */
static void pack_quant_changes(dray__packer *p, uint32_t i, const dray__delta_view *view,
                               dray_region *staging)
{
    size_t bytes = dray__pull_quant_changes(p->coder, view, p->blocks[i], p->floats, &p->copies[i],
                                            &p->quants[i], staging, p->scratch, p->sizes[i]);
    memcpy((uint8_t *)dray_region_base(staging) + p->copies[i].destination_offset, p->scratch,
           bytes);
    p->changes[i] = (uint32_t)bytes;
}

/* Moves the rectangles into staging. Rectangles of one region are moved together. view: of the
 * changes that the reader can use; else NULL. */
static int pack(dray__packer *p, const dray__local *local, const dray__shares *shares,
                const dray__delta_view *view, const dray_layout *layout, bool sums,
                dray_region *staging, dray_error *error)
{
    memset(p->sums, 0, p->count * sizeof *p->sums);
    memset(p->source_sums, 0, p->count * sizeof *p->source_sums);
    for (uint32_t i = 0, end; i < p->count; i = end) {
        for (end = i + 1; end < p->count && !p->quantised[i] && !p->quantised[end] &&
                          !p->changes[i] == !p->changes[end] &&
                          p->copies[end].source_region == p->copies[i].source_region;
             end++)
            ;
        uint32_t index = p->copies[i].source_region;
        dray_region *region =
            shares ? dray__shares_region(shares, index) : dray__local_region(local, index);
        dray__move_options options = {.layout = layout,
                                      .staging = p->scratch,
                                      .staging_bytes = DRAY__MOVE_STAGING,
                                      .sums = sums ? p->sums + i : NULL,
                                      .source_sums = sums ? p->source_sums + i : NULL};
        int rc =
            p->changes[i] ? (sums ? sum_sources(p, i, end, layout, region, error) : DRAY_OK)
            : p->quantised[i] && !p->held
                ? dray__pull_quantise(layout, region, &p->floats, p->copies + i, p->quants + i,
                                      staging, p->source_sums + i, sums ? p->sums + i : NULL, error)
                : dray__move_all(region, staging, p->copies + i, end - i, &options, error);
        if (rc == DRAY_OK && p->quantised[i] && p->held)
            rc = pack_scales(p, i, shares, layout, sums, staging, error);
        else if (rc == DRAY_OK && p->quantised[i] && view)
            pack_quant_changes(p, i, view, staging);
        for (uint32_t k = i; k < end && rc == DRAY_OK && sums; k++)
            rc = read_again(p, k, layout, region, error);
        if (rc)
            return rc;
    }
    return DRAY_OK;
}

/* For converted rectangles that are not quantised, replaces the dense elements by the changes since
 * the base if these take fewer bytes. Then moves all data together, without gaps. */
static void shorten(dray__packer *p, const dray__delta_view *view, dray_region *staging)
{
    uint8_t *data = dray_region_base(staging);
    uint64_t to = 0, from = 0;
    for (uint32_t i = 0; i < p->count; i++) {
        const dray_copy *copy = &p->copies[i];
        uint32_t dense = p->sizes[i];
        dray__rect rect = dray__copy_rect(copy);
        bool converted = copy->source_dtype != copy->destination_dtype && !p->quantised[i];
        size_t bytes = p->changes[i];
        if (converted)
            bytes = dray__delta_encode(p->coder, view, p->blocks[i], &rect, copy->destination_dtype,
                                       p->scratch, dense);
        if (converted && bytes)
            memcpy(data + to, p->scratch, bytes);
        else
            memmove(data + to, data + from, bytes ? bytes : dense);
        p->sizes[i] = bytes ? (uint32_t)bytes : dense;
        to += p->sizes[i];
        from += dense;
    }
    p->data_bytes = to;
}

/* Computes the sums of a rectangle that arrived in other pieces, from this process's memory, which
 * is unchanged since. */
static int sum_cut(dray__packer *p, dray__shares *shares, const dray_layout *layout, uint32_t i,
                   dray_error *error)
{
    dray_region *scratch = NULL;
    dray__rect rect = dray__copy_rect(&p->copies[i]);
    p->source_sums[i] = 0;
    int rc = dray__sum_rect(layout, dray__shares_regions(shares), p->blocks[i], &rect, &scratch,
                            &p->source_sums[i], error);
    dray_region_free(scratch);
    p->sums[i] = p->source_sums[i];
    return rc ? rc : dray__shares_intact(shares, layout, p->blocks[i], &rect, error);
}

/* Finds the publisher's own sums of the rectangles. They are sent once all bytes have
 * arrived, and are unchanged since. `after`: the memory has been read. `mapped`: the
 * reader reads the memory itself. */
static int find_shares(dray__packer *p, dray__shares *shares, const dray_layout *layout, bool after,
                       bool mapped, bool sums, dray_error *error)
{
    for (uint32_t i = 0; i < p->count && shares; i++) {
        dray__rect rect = dray__copy_rect(&p->copies[i]);
        const char *name = dray_layout_tensor(layout, p->copies[i].tensor)->name;
        uint64_t source_sum, sum;
        bool cut;
        int rc = dray__shares_find(shares, p->blocks[i], &rect, &cut, &source_sum, &sum);
        if (rc == DRAY_EAGAIN)
            return dray__fail(error, rc, "tensor %s is not here yet", name);
        if (rc)
            return dray__fail(error, rc, "tensor %s came here in other pieces", name);
        if (p->quantised[i] && (cut || mapped))
            return dray__fail(error, DRAY_EUNSUPPORTED, "tensor %s came here in other pieces",
                              name);
        if (cut && mapped)
            rc = sum_cut(p, shares, layout, i, error);
        else if (cut && after && sums)
            rc = dray__shares_intact(shares, layout, p->blocks[i], &rect, error);
        if (rc)
            return dray__fail_prefix(error, rc, "tensor %s: ", name);
        if (cut)
            continue;
        if (after && sums && sum != (p->quantised[i] ? p->sums[i] : p->source_sums[i]))
            return dray__fail(error, DRAY_ESTALE, "tensor %s was changed after it came here", name);
        if (after || mapped)
            p->source_sums[i] = source_sum;
        if (mapped)
            p->sums[i] = sum;
    }
    return DRAY_OK;
}

/* Returns 0 when the reader may read. *shares is the part of the update that this member has
 * received, or NULL when the reader reads the member's memory itself. */
static int may_read(const dray__local *local, bool cohort, uint64_t attempt, dray__shares **shares,
                    dray_error *error)
{
    *shares = cohort ? dray__local_shares(local) : NULL;
    if (!cohort)
        return dray__local_check(local, attempt, error);
    if (*shares && dray__shares_run(*shares) == attempt)
        return DRAY_OK;
    return dray__local_has_begun(local, attempt)
               ? dray__fail(error, DRAY_ESTALE,
                            "member: run %llu expected, found that the member takes no part in it "
                            "(any more)",
                            (unsigned long long)attempt)
               : dray__fail(error, DRAY_EAGAIN, "its update has not begun yet");
}

int dray__pull_get_rects(dray__packer *p, dray__reader *in, uint64_t room, uint64_t room_of_quant,
                         const dray_layout *layout, const dray_copy **copies, uint32_t *count,
                         uint64_t *bytes, dray_error *error)
{
    uint32_t wanted = dray__get_u32(in);
    p->count = 0;
    p->data_bytes = 0;
    p->room = room;
    p->room_of_quant = room_of_quant;
    if (in->failed || wanted == 0 || wanted > DRAY__PULL_RECTS_MAX)
        return dray__fail(error, DRAY_EFORMAT, "a request for %" PRIu32 " rectangles: 1 to %d",
                          wanted, DRAY__PULL_RECTS_MAX);
    int rc = DRAY_OK;
    for (uint32_t i = 0; i < wanted && rc == DRAY_OK; i++)
        rc = get_rect(p, layout, in, error);
    if (rc == DRAY_OK)
        rc = dray__reader_finish(in, "a request for weights", error);
    *copies = p->copies;
    *count = p->count;
    *bytes = p->data_bytes;
    return rc;
}

uint32_t dray__pull_quants(const dray__packer *p, const dray__pull_quant **quants)
{
    uint32_t count = 0;
    for (uint32_t i = 0; i < p->count; i++)
        count += p->quantised[i];
    *quants = p->quants;
    return count;
}

static int read_request(dray__packer *p, dray__reader in, uint16_t *options, dray_region *staging,
                        dray_error *error)
{
    dray__pull_ticket said;
    dray__get_fields(&in, NULL, &dray__pull_ticket_fields, &said);
    *options = dray__get_u16(&in);
    bool sums = *options & DRAY__PULL_SUMS, has_base = *options & DRAY__PULL_BASE;
    bool mapped = *options & DRAY__PULL_MAPPED;
    dray__pull_base base = {0};
    if (*options > DRAY__PULL_OPTIONS ||
        (mapped && *options != (DRAY__PULL_MAPPED | DRAY__PULL_SUMS | DRAY__PULL_COHORT)))
        return dray__fail(error, DRAY_EVERSION, "a request with the options %x", *options);
    if (has_base)
        dray__get_fields(&in, NULL, &dray__pull_base_fields, &base);
    const dray_copy *copies;
    uint32_t count;
    uint64_t bytes;
    dray__local *local;
    int rc = dray__local_hold_ticket(said.token, &local, error);
    if (rc)
        return rc;
    dray__shares *shares;
    if (*options & DRAY__PULL_ARENA && !dray__local_arena(local)) {
        dray__local_release(local);
        return dray__fail(error, DRAY_EINVALID, "member: a staging arena expected, found none");
    }
    rc = may_read(local, *options & DRAY__PULL_COHORT, said.attempt, &shares, error);
    p->held = shares != NULL;
    if (rc == DRAY_OK)
        rc = dray__pull_get_rects(p, &in, dray_region_bytes(staging), DRAY__PULL_QUANT_MAX,
                                  dray__local_layout(local), &copies, &count, &bytes, error);
    if (rc == DRAY_OK)
        rc = find_shares(p, shares, dray__local_layout(local), false, mapped, sums, error);
    const dray__delta_view *view = has_base && !shares ? dray__local_delta(local) : NULL;
    if (view && !dray__delta_leads(view, base.incarnation, base.base, base.version))
        view = NULL;
    if (rc == DRAY_OK)
        pack_changes(p, view, staging);
    if (rc == DRAY_OK && !mapped)
        rc = pack(p, local, shares, view, dray__local_layout(local), sums, staging, error);
    if (rc == DRAY_OK && !mapped)
        rc = find_shares(p, shares, dray__local_layout(local), true, false, sums, error);
    if (mapped)
        p->data_bytes = 0;
    if (rc == DRAY_OK && view)
        shorten(p, view, staging);
    dray__local_release(local);
    return rc;
}

int dray__pull_regions(uint64_t token, size_t room, dray__writer *out, dray_error *error)
{
    dray__local *local;
    int rc = dray__local_hold_ticket(token, &local, error);
    if (rc)
        return rc;
    uint32_t count = dray_layout_region_count(dray__local_layout(local));
    dray__put_u64(out, (uint64_t)getpid());
    dray__put_u32(out, count);
    for (uint32_t i = 0; i < count && rc == DRAY_OK; i++) {
        const dray_region *region = dray__local_region(local, i);
        uint8_t packed[DRAY__HANDLE_PACKED];
        bool shared = dray_region_get_kind(region) == DRAY_REGION_SHARED;
        if (shared)
            rc = dray__region_handle(region, 0, 0, NULL, packed, error);
        dray__put_u32(out, shared ? (uint32_t)dray_region_fd(region) : UINT32_MAX);
        dray__put_blob(out, packed, shared ? dray_handle_packed_size() : 0);
    }
    dray__local_release(local);
    if (rc == DRAY_OK && out->size > room)
        rc = dray__fail(error, DRAY_EUNSUPPORTED, "its %u regions are too many to name", count);
    return rc ? rc : dray__writer_check(out, error);
}

bool dray__pull_answer(dray__packer *p, const dray__data_request *request, const uint8_t *body,
                       dray_region *staging, uint64_t arena_at, dray__writer *out,
                       uint64_t *data_bytes)
{
    dray_error error;
    uint16_t options = 0;
    dray__reader in = dray__reader_of(body, request->body_bytes);
    int rc = read_request(p, in, &options, staging, &error);
    bool sums = options & DRAY__PULL_SUMS, base = options & DRAY__PULL_BASE;
    bool arena = options & DRAY__PULL_ARENA;
    dray__writer_reset(out);
    if (rc) {
        dray__answer_refuse(out, request->id, &error);
        *data_bytes = 0;
        return !out->failed;
    }
    dray__answer_put(out, 0, request->id,
                     (arena ? 8 : 0) + p->count * dray__pull_head_bytes(sums, base),
                     arena ? 0 : p->data_bytes);
    if (arena)
        dray__put_u64(out, arena_at);
    for (uint32_t i = 0; i < p->count; i++) {
        if (sums) {
            dray__put_u64(out, p->source_sums[i]);
            dray__put_u64(out, p->sums[i]);
        }
        if (base)
            dray__put_u32(out, p->sizes[i]);
    }
    *data_bytes = p->data_bytes;
    return !out->failed;
}
