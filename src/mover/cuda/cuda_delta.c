/* Converts deltas to the kernels' form (cuda_delta.h): four dimensions, the tensor's last ones
 * last, and the number of elements, or bytes, that may be processed at once. */
#include "base/arena.h"
#include "base/error.h"
#include "mover/cuda/cuda_internal.h"

enum { GROUP = 8, WORD = 16 };

static uint64_t pitch_of(const dray__cuda_delta *d)
{
    uint64_t bytes = dray_dtype_size((dray_dtype)d->sent);
    for (uint32_t i = 0; i < d->ndim; i++)
        bytes *= (uint64_t)d->tile[i];
    return dray__round_up(bytes, 16);
}

static uint64_t slices_of(const dray__cuda_delta *d, uint32_t dimension)
{
    return (uint64_t)((d->extent[dimension] - 1) / d->tile[dimension] + 1);
}

uint64_t dray__cuda_delta_kept(const dray__cuda_delta *d)
{
    uint64_t bytes = pitch_of(d);
    for (uint32_t i = 0; i < d->ndim; i++)
        bytes *= slices_of(d, i);
    return bytes;
}

/* Are rows contiguous, and their lengths and addresses multiples of `of` bytes? */
static bool all_multiples(const dray__gpu_delta *g, bool find, uint32_t of)
{
    uint64_t bits = g->source, size = g->in;
    bool dense = g->source_stride[3] == (int64_t)size;
    for (int i = 0; i < 3; i++)
        bits |= (uint64_t)g->source_stride[i];
    bits |= g->extent[3] * size | g->tile[3] * size;
    if (find)
        return dense && bits % of == 0;
    dense = dense && g->destination_stride[3] == (int64_t)size;
    for (int i = 0; i < 3; i++)
        bits |= (uint64_t)g->destination_stride[i];
    bits |= g->destination | g->low[3] * size | g->wanted[3] * size;
    return dense && bits % of == 0;
}

/* Returns how many elements kernels compare at once: eight, four or one. */
static uint16_t together(const dray__gpu_delta *g)
{
    bool narrows = g->from == DRAY_F32 && g->to == DRAY_BF16, same = g->from == g->to;
    uint32_t each = g->in <= 2 ? GROUP : 4;
    if (!(narrows || (same && g->in <= 4)) || !all_multiples(g, true, each * g->in))
        return 1;
    return (uint16_t)each;
}

static uint16_t word_of(const dray__gpu_delta *g)
{
    uint32_t word = WORD;
    while (word > g->in && !all_multiples(g, false, word))
        word /= 2;
    return (uint16_t)(word > g->in ? word : g->in);
}

int dray__gpu_delta_of(const dray__cuda_delta *d, uint32_t sum, dray__gpu_delta *out,
                       dray_error *error)
{
    bool find = d->kind == DRAY__CUDA_FIND;
    dray__gpu_delta g = {.source = d->source,
                         .table = d->table,
                         .store = d->store,
                         .store_bytes = d->store_bytes,
                         .begin = d->begin,
                         .base = d->base,
                         .pitch = pitch_of(d),
                         .destination = d->destination,
                         .sum = sum,
                         .stepping = d->stepping,
                         .from = (uint16_t)d->dtype,
                         .to = (uint16_t)d->sent,
                         .in = (uint16_t)dray_dtype_size((dray_dtype)d->dtype),
                         .out = (uint16_t)dray_dtype_size((dray_dtype)d->sent)};
    if (!g.in || !g.out || d->ndim < 1 || d->ndim > DRAY_MAX_DIMS || (!find && d->dtype != d->sent))
        return dray__fail(error, DRAY_EINVALID, "a delta of dtypes %d and %d, %u dimensions",
                          (int)d->dtype, (int)d->sent, d->ndim);
    for (uint32_t k = 0; k < 4; k++) {
        uint32_t front = DRAY_MAX_DIMS - d->ndim, i = k - front;
        bool used = k >= front;
        g.source_stride[k] = used ? d->source_stride[i] : 0;
        g.destination_stride[k] = used && !find ? d->destination_stride[i] : 0;
        g.extent[k] = used ? (uint32_t)d->extent[i] : 1;
        g.tile[k] = used ? (uint32_t)d->tile[i] : 1;
        g.slices[k] = used ? (uint32_t)slices_of(d, i) : 1;
        g.low[k] = used && !find ? (uint32_t)d->low[i] : 0;
        g.wanted[k] = used && !find ? (uint32_t)d->wanted[i] : 1;
        g.first[k] = g.low[k] / g.tile[k];
        g.crossed[k] = (g.low[k] + g.wanted[k] - 1) / g.tile[k] + 1 - g.first[k];
        if (used && (d->extent[i] < 1 || d->extent[i] > UINT32_MAX || d->tile[i] < 1 ||
                     (!find && (d->low[i] < 0 || d->wanted[i] < 1 ||
                                d->low[i] + d->wanted[i] > d->extent[i]))))
            return dray__fail(error, DRAY_EINVALID, "a delta's dimension %u: %lld elements", i,
                              (long long)d->extent[i]);
    }
    g.word = find ? together(&g) : word_of(&g);
    *out = g;
    return DRAY_OK;
}
