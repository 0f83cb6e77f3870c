/* One-sided reads in the source of data servers (remote.h). When the connection's carrier supports
 * them (net/carrier.h), the route requests the keys of the publisher's registered regions once an
 * update, and reads its parts into its slots without the publisher's help.
 *
 * Then there are no sums from the source. So only tensors that are compared as a whole with
 * announced sums are read in this way: a reader that was dropped, and reads bytes of a later
 * version, detects that. All other tensors are requested. */
#include "base/error.h"
#include "base/log.h"
#include "weights/sources/remote.h"

#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define RUN_MIN ((uint64_t)4 << 10) /* bytes: for shorter runs, messages are faster */
#define SPIN_NS (DRAY__MILLISECOND / 10)

struct remote_key {
    uint64_t address;   /* of the region, in the publisher */
    dray__net_key *key; /* NULL when it cannot be read one-sidedly */
};

/* ---- keys ------------------------------------------------------------------------------------ */

bool dray__remote_keys_settled(struct remote_route *l, struct source *s)
{
    if (s->staged || !l->transfer->options.verify || s->keys == KEYS_HERE || s->keys == KEYS_NONE)
        return true;
    if (s->keys == KEYS_ASKED || !dray__peer_settled(s->link))
        return false;
    if (s->cohort ? !dray__remote_may_map(l, s) : !dray__peer_reads(s->link)) {
        s->keys = KEYS_NONE;
        return true;
    }
    dray__writer *out = dray__peer_out(s->link);
    s->keys_id = ++l->last_id;
    dray__request_end(out, dray__pull_begin(out, s->cohort ? DRAY__DATA_REGIONS : DRAY__DATA_KEYS,
                                            s->keys_id, s->of->token,
                                            s->cohort ? 0 : l->transfer->options.attempt));
    dray__peer_touch(s->link);
    s->keys = KEYS_ASKED;
    return false;
}

static int get_keys(struct source *s, const uint8_t *data, uint64_t size, dray_error *error)
{
    dray__reader in = dray__reader_of(data, size);
    uint32_t count = dray__get_u32(&in);
    if (in.failed || count != dray_layout_region_count(s->of->layout))
        return dray__fail(error, DRAY_EPROTO, "publisher %s at %s: keys of %u regions", s->of->name,
                          s->of->endpoint, count);
    dray__stream *stream = dray__peer_reads(s->link);
    const dray__carrier *carrier = dray__stream_carrier(stream);
    s->key_of = calloc((size_t)count + 1, sizeof *s->key_of);
    if (!s->key_of)
        return dray__nomem(error);
    for (uint32_t i = 0; i < count; i++) {
        struct remote_key *key = &s->key_of[i];
        key->address = dray__get_u64(&in);
        if (dray__get_u64(&in) < dray_layout_region(s->of->layout, i)->bytes)
            return dray__fail(error, DRAY_EPROTO, "publisher %s at %s: region %u is too small",
                              s->of->name, s->of->endpoint, i);
        size_t packed_size;
        const void *packed = dray__get_blob(&in, &packed_size);
        int rc = DRAY_OK;
        if (!in.failed && packed_size)
            rc = carrier->unpack_key(stream, packed, packed_size, &key->key, error);
        if (rc)
            return rc;
    }
    return dray__reader_finish(&in, "keys of regions", error);
}

static int map_slots(struct remote_route *l, struct source *s, dray_error *error)
{
    const dray__stream *stream = dray__peer_reads(s->link);
    int rc = DRAY_OK;
    for (uint32_t i = 0; i < l->slot_count && rc == DRAY_OK; i++)
        rc = dray__stream_carrier(stream)->map(stream, dray_region_base(l->all_slots[i]),
                                               l->segment, false, &s->slot_memory[i], error);
    return rc;
}

/* Without one-sided reads, the parts are requested. */
int dray__remote_take_keys(struct remote_route *l, struct source *s, dray_error *error)
{
    dray__arrival arrival;
    int rc = dray__peer_recv_head(s->link, &arrival, error);
    if (rc)
        return rc;
    if (arrival.header.id != s->keys_id)
        return dray__fail(error, DRAY_EPROTO, "publisher %s at %s: not the answer that was due",
                          s->of->name, s->of->endpoint);
    int status = arrival.header.status;
    dray_error why = {.code = status};
    snprintf(why.message, sizeof why.message, "%s", dray_error_name(status));
    if (arrival.header.data_bytes > DRAY__VALUES_MAX)
        return dray__fail(error, DRAY_EPROTO,
                          "publisher %s at %s: at most %d bytes of keys expected, found %llu",
                          s->of->name, s->of->endpoint, DRAY__VALUES_MAX,
                          (unsigned long long)arrival.header.data_bytes);
    if (!s->key_data && !(s->key_data = malloc(DRAY__VALUES_MAX)))
        return dray__nomem(error);
    rc = dray__peer_recv_data(s->link, s->key_data, error);
    if (rc)
        return rc;
    if (status == DRAY_OK)
        status = s->cohort ? dray__remote_take_maps(s, s->key_data, arrival.header.data_bytes, &why)
                           : get_keys(s, s->key_data, arrival.header.data_bytes, &why);
    if (status == DRAY_OK && !s->cohort)
        status = map_slots(l, s, &why);
    s->keys = status ? KEYS_NONE : KEYS_HERE;
    if (status)
        dray__log(DRAY_LOG_INFO, "%s cannot be read directly: %s", s->of->name, why.message);
    else
        dray__log(DRAY_LOG_DEBUG, "%s is read directly", s->of->name);
    free(s->key_data);
    s->key_data = NULL;
    return DRAY_OK;
}

void dray__remote_forget_keys(struct source *s, bool dropped)
{
    if (s->keys == KEYS_HERE && !s->cohort && !dropped) {
        dray__stream *stream = dray__peer_reads(s->link);
        dray__stream_carrier(stream)->forget_keys(stream);
        dray__request_begin(dray__peer_out(s->link), DRAY__DATA_KEYS_DONE, 0);
        dray__peer_send(s->link, NULL);
    }
    for (uint32_t i = 0; i < SLOTS; i++)
        if (s->slot_memory[i])
            s->slot_memory[i]->carrier->unmap(s->slot_memory[i]);
    memset(s->slot_memory, 0, sizeof s->slot_memory);
    dray__remote_unmap(s);
    free(s->key_of);
    free(s->key_data);
    s->key_of = NULL;
    s->key_data = NULL;
    s->keys = KEYS_UNKNOWN;
}

/* ---- reads ----------------------------------------------------------------------------------- */

/* Returns the contiguous bytes of a rectangle. *outer is the number of dimensions over which such
 * runs are spread. */
static uint64_t run_of(const dray_block *block, const dray__rect *rect, uint32_t ndim, size_t size,
                       uint32_t *outer)
{
    uint64_t run = size;
    uint32_t d = ndim;
    while (d > 0 && (rect->extent[d - 1] == 1 || (uint64_t)block->stride[d - 1] == run))
        run *= (uint64_t)rect->extent[--d];
    *outer = d;
    return run;
}

bool dray__remote_reads(const struct remote_route *l, const struct source *s,
                        const struct part *part, const dray__op *op)
{
    const dray_copy *copy = &op->copy;
    const bool *compared = l->transfer->options.compared;
    const dray_block *block = dray_layout_block(s->of->layout, part->block);
    const dray_tensor_info *tensor = dray_layout_tensor(s->of->layout, block->tensor);
    if (s->keys == KEYS_HERE && s->cohort)
        return !op->prequantised && s->maps[block->region] != NULL;
    if (s->keys != KEYS_HERE || op->prequantised || !op->owned || !compared ||
        !compared[copy->tensor] || dray__remote_dtype(s, copy) != tensor->dtype ||
        !s->key_of[block->region].key)
        return false;
    uint32_t outer;
    size_t size = dray_dtype_size((dray_dtype)tensor->dtype);
    return run_of(block, &part->rect, tensor->ndim, size, &outer) >= RUN_MIN || outer == 0;
}

static int read_slice(struct source *s, const struct slice *slice, struct request *request,
                      const dray__net_memory *memory, uint64_t *at, dray_error *error)
{
    const dray_block *block = dray_layout_block(s->of->layout, s->parts[slice->part].block);
    const dray_tensor_info *tensor = dray_layout_tensor(s->of->layout, block->tensor);
    const struct remote_key *key = &s->key_of[block->region];
    const dray__rect *rect = &slice->rect;
    uint32_t outer;
    uint64_t run =
        run_of(block, rect, tensor->ndim, dray_dtype_size((dray_dtype)tensor->dtype), &outer);
    dray__stream *stream = dray__peer_reads(s->link);
    int64_t index[DRAY_MAX_DIMS] = {0};
    for (bool more = true; more;) {
        uint64_t offset = block->offset;
        for (uint32_t d = 0; d < tensor->ndim; d++)
            offset += (uint64_t)(rect->start[d] - block->start[d] + index[d]) *
                      (uint64_t)block->stride[d];
        int rc = dray__stream_carrier(stream)->get(stream, key->key, key->address + offset, memory,
                                                   (uint8_t *)dray_region_base(request->slot) + *at,
                                                   run, &request->reads, error);
        if (rc)
            return rc;
        *at += run;
        more = false;
        for (uint32_t d = outer; d-- > 0 && !more;) {
            more = ++index[d] < rect->extent[d];
            if (!more)
                index[d] = 0;
        }
    }
    return DRAY_OK;
}

void dray__remote_read(struct remote_route *l, struct source *s, struct request *request)
{
    uint32_t number = 0;
    while (l->all_slots[number] != request->slot)
        number++;
    uint64_t at = 0;
    request->reads = (dray__net_reads){0};
    for (uint32_t i = 0; i < request->count && !request->reads.failed; i++)
        if (read_slice(s, &request->slices[i], request, s->slot_memory[number], &at, NULL))
            request->reads.failed = true; /* handled like a later failure */
}

int dray__remote_read_done(struct source *s, struct request *request, dray_error *error)
{
    int64_t until = dray__now() + SPIN_NS;
    uint32_t before = request->reads.pending;
    dray__stream *stream = dray__peer_reads(s->link);
    int rc;
    do
        rc = dray__stream_carrier(stream)->read(stream, &request->reads);
    while (rc == -EAGAIN && dray__now() < until);
    if (rc && rc != -EAGAIN)
        return dray__fail_errno(error, -rc, "one-sided reads from %s", s->of->endpoint);
    if (request->reads.pending < before || rc == 0)
        dray__peer_touch(s->link);
    if (rc)
        return DRAY_EAGAIN;
    dray__peer_count(s->link, request->bytes);
    return DRAY_OK;
}
