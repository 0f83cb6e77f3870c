#include "weights/update/exchange.h"

#include "base/array.h"
#include "base/error.h"
#include "memory/cuda_memory.h"
#include "memory/extents.h"
#include "mover/cuda/cuda.h"
#include "weights/internal.h"

#include <stdlib.h>
#include <string.h>

enum { NOWHERE = UINT32_MAX };
/* The gaps of a chunk are at most this part of its blocks, else copying the blocks is cheaper. */
enum { GAPS_OF = 4 };
/* The most runs of blocks; a layout with more is copied. */
enum { RUNS_MAX = 1 << 22 };
/* Bytes that are copied at once: a tenth of a millisecond beside decoding. */
#define REFILL_BYTES ((uint64_t)128 << 20)

typedef struct span {
    uint64_t from, to; /* bytes of the chunk */
} span;

typedef struct arena_chunk {   /* a chunk of the engine's memory */
    dray_arena *arena;         /* NULL for a region's own chunk */
    const dray_region *region; /* the first in it */
    uint64_t address, bytes, allocation;
    uint64_t needed;    /* bytes of the layout's regions in it */
    uint32_t number;    /* its index before sorting */
    uint32_t ours;      /* exports of it by the layout's regions */
    dray__extents used; /* the allocations in it, for an arena */
    dray__cuda_chunk spare;
    span *filled, *gaps; /* filled: by blocks; gaps: allocated, but not filled */
    uint64_t filled_count, filled_capacity, gap_count, gap_capacity;
} arena_chunk;

struct dray__exchange {
    const dray_layout *layout;
    dray_region *const *regions;
    arena_chunk *chunks; /* by address */
    uint32_t count;
    uint64_t capacity;
    uint32_t *chunk_of; /* each region's; NOWHERE when it is copied */
    bool *blocks;
    uint64_t bytes;
    dray__cuda_job **gap_jobs; /* one for each chunk; NULL when it has none */
    bool swapped;
    CUstream stream;                  /* of refills; NULL before the first */
    dray__cuda_device *stream_device; /* the first chunk may be left out, and have none */
};

/* ---- the chunks ------------------------------------------------------------------------------ */

/* Returns the live chunk; NULL when it has changed. Call it with the arena's lock. */
static dray__cuda_chunk *live_of(const arena_chunk *c, const dray__extents **used)
{
    dray__cuda_chunk *live = c->arena ? dray__gpu_arena_chunk(c->arena, c->address, used)
                                      : dray__region_chunk(c->region);
    bool same = live && live->resident && live->address == c->address && live->bytes == c->bytes;
    return same ? live : NULL;
}

static void lock(const arena_chunk *c)
{
    if (c->arena)
        dray__gpu_arena_lock(c->arena);
}

static void unlock(const arena_chunk *c)
{
    if (c->arena)
        dray__gpu_arena_unlock(c->arena);
}

/* Finds the chunk of the region's memory. Returns false when it cannot be exchanged. */
static bool find_chunk(const dray_region *region, arena_chunk *out)
{
    const dray__cuda_chunk *own = dray__region_chunk(region);
    *out = (arena_chunk){.arena = own ? NULL : dray__region_arena(region), .region = region};
    if (!own && !out->arena)
        return false;
    lock(out);
    const dray__cuda_chunk *live =
        own ? own : dray__gpu_arena_chunk(out->arena, region->device_address, NULL);
    if (live) {
        out->address = live->address;
        out->bytes = live->bytes;
        out->allocation = live->allocation;
        out->spare = (dray__cuda_chunk){.device = live->device, .bytes = live->bytes, .fd = -1};
    }
    unlock(out);
    return live && live->resident;
}

static int add_region(dray__exchange *x, uint32_t index, dray_error *error)
{
    arena_chunk found;
    const dray_region *region = x->regions[index];
    x->chunk_of[index] = NOWHERE;
    if (dray_region_get_kind(region) != DRAY_REGION_CUDA || !find_chunk(region, &found))
        return DRAY_OK;
    uint32_t at = 0;
    while (at < x->count && x->chunks[at].address != found.address)
        at++;
    found.number = at;
    if (at == x->count && !DRAY__PUSH(x->chunks, x->count, x->capacity, found))
        return dray__nomem(error);
    x->chunk_of[index] = at;
    x->chunks[at].needed += region->bytes;
    return DRAY_OK;
}

static int by_address(const void *left, const void *right)
{
    const arena_chunk *a = left, *b = right;
    return a->address < b->address ? -1 : a->address > b->address;
}

static int sort_chunks(dray__exchange *x, dray_error *error)
{
    uint32_t *now = calloc((size_t)x->count + 1, sizeof *now);
    if (!now)
        return dray__nomem(error);
    if (x->count)
        qsort(x->chunks, x->count, sizeof *x->chunks, by_address);
    for (uint32_t i = 0; i < x->count; i++)
        now[x->chunks[i].number] = i;
    for (uint32_t i = 0; i < dray_layout_region_count(x->layout); i++)
        if (x->chunk_of[i] != NOWHERE)
            x->chunk_of[i] = now[x->chunk_of[i]];
    free(now);
    return DRAY_OK;
}

/* ---- the filled parts of chunks -------------------------------------------------------------- */

/* Adds every contiguous run of a block. Returns false when out of memory, or when there are too
 * many.
 */
static bool fill_block(dray__exchange *x, uint32_t number)
{
    const dray_block *block = dray_layout_block(x->layout, number);
    const dray_tensor_info *tensor = dray_layout_tensor(x->layout, block->tensor);
    if (x->chunk_of[block->region] == NOWHERE)
        return true;
    arena_chunk *c = &x->chunks[x->chunk_of[block->region]];
    uint64_t begin = x->regions[block->region]->device_address - c->address + block->offset;
    uint64_t run = dray_dtype_size((dray_dtype)tensor->dtype);
    int64_t at[DRAY_MAX_DIMS] = {0};
    uint32_t outer = tensor->ndim;
    while (outer && (block->extent[outer - 1] == 1 || block->stride[outer - 1] == (int64_t)run))
        run *= (uint64_t)block->extent[--outer];
    for (;;) {
        uint64_t from = begin;
        for (uint32_t d = 0; d < outer; d++)
            from += (uint64_t)(at[d] * block->stride[d]);
        const span s = {from, from + run};
        if (run && (c->filled_count >= RUNS_MAX ||
                    !DRAY__PUSH(c->filled, c->filled_count, c->filled_capacity, s)))
            return false;
        uint32_t d = outer;
        while (d > 0 && ++at[d - 1] >= block->extent[d - 1])
            at[--d] = 0;
        if (d == 0)
            return true;
    }
}

static int by_from(const void *left, const void *right)
{
    const span *a = left, *b = right;
    return a->from < b->from ? -1 : a->from > b->from;
}

/* Finds the parts that are allocated and not filled by blocks. */
static bool find_gaps(arena_chunk *c, const dray__extents *used)
{
    const struct dray__extent own = {c->region->device_address - c->address, c->region->bytes};
    const struct dray__extent *list = used ? used->list : &own;
    uint32_t count = used ? used->count : 1;
    if (c->filled_count)
        qsort(c->filled, c->filled_count, sizeof *c->filled, by_from);
    uint64_t next = 0;
    for (uint32_t i = 0; i < count; i++) {
        uint64_t at = list[i].offset, end = list[i].offset + list[i].bytes;
        while (at < end) {
            while (next < c->filled_count && c->filled[next].to <= at)
                next++;
            uint64_t from = next < c->filled_count ? c->filled[next].from : end;
            const span gap = {at, from < end ? from : end};
            if (gap.to > gap.from && !DRAY__PUSH(c->gaps, c->gap_count, c->gap_capacity, gap))
                return false;
            at = from >= end ? end : c->filled[next].to;
        }
    }
    return true;
}

static uint64_t bytes_of(const span *spans, uint64_t count)
{
    uint64_t bytes = 0, end = 0;
    for (uint64_t i = 0; i < count; i++) {
        uint64_t from = spans[i].from > end ? spans[i].from : end;
        bytes += spans[i].to > from ? spans[i].to - from : 0;
        end = spans[i].to > end ? spans[i].to : end;
    }
    return bytes;
}

/* ---- spare memory ---------------------------------------------------------------------------- */

static int take_spare(arena_chunk *c, dray_error *error)
{
    const dray__cuda *cuda = dray__cuda_get(error);
    int rc = cuda ? dray__cuda_enter(c->spare.device, error) : DRAY_EUNSUPPORTED;
    if (rc)
        return rc;
    CUresult result = cuda->cuMemAddressReserve(&c->spare.address, c->bytes, 0, 0, 0);
    if (result) {
        c->spare.address = 0;
        rc =
            dray__fail_cuda(error, result, "%llu bytes of addresses", (unsigned long long)c->bytes);
    } else {
        rc = dray__chunk_back(&c->spare, error);
    }
    dray__cuda_leave();
    return rc;
}

static void chunk_end(arena_chunk *c)
{
    const dray__cuda *cuda = dray__cuda_get(NULL);
    if (cuda && c->spare.address && dray__cuda_enter(c->spare.device, NULL) == DRAY_OK) {
        dray__chunk_drop(&c->spare);
        cuda->cuMemAddressFree(c->spare.address, c->bytes);
        dray__cuda_leave();
    }
    free(c->filled);
    free(c->gaps);
    dray__extents_free(&c->used);
    *c = (arena_chunk){0};
}

/* Makes the job that copies the gaps from the live memory to the spare memory. It uses virtual
 * addresses, which do not change. */
static int make_gap_job(const arena_chunk *c, dray__cuda_job **out, dray_error *error)
{
    dray__cuda_item *items = calloc((size_t)c->gap_count + 1, sizeof *items);
    if (!items)
        return dray__nomem(error);
    for (uint64_t i = 0; i < c->gap_count; i++)
        items[i] =
            (dray__cuda_item){.copy = {.ndim = 1,
                                       .source_dtype = DRAY_I8,
                                       .destination_dtype = DRAY_I8,
                                       .extent = {(int64_t)(c->gaps[i].to - c->gaps[i].from)},
                                       .source_stride = {1},
                                       .destination_stride = {1},
                                       .source_offset = c->gaps[i].from,
                                       .destination_offset = c->gaps[i].from},
                              .source_base = c->address,
                              .destination_base = c->spare.address,
                              .near = true};
    const dray__cuda_job_options options = {.engine_bytes = UINT64_MAX};
    int rc = dray__cuda_job_new(c->spare.device, NULL, items, c->gap_count, &options, out, error);
    free(items);
    return rc;
}

/* Excludes the chunk: its regions are copied. */
static void leave_out(dray__exchange *x, uint32_t number)
{
    for (uint32_t i = 0; i < dray_layout_region_count(x->layout); i++)
        if (x->chunk_of[i] == number)
            x->chunk_of[i] = NOWHERE;
    chunk_end(&x->chunks[number]);
}

static int prepare_chunk(dray__exchange *x, uint32_t number, dray_error *error)
{
    arena_chunk *c = &x->chunks[number];
    const dray__extents *used = NULL;
    lock(c);
    bool fine = live_of(c, &used) != NULL;
    bool found = fine && find_gaps(c, used) && (!used || dray__extents_copy(&c->used, used));
    unlock(c);
    if (fine && !found)
        return dray__nomem(error);
    if (!fine || bytes_of(c->gaps, c->gap_count) > bytes_of(c->filled, c->filled_count) / GAPS_OF) {
        leave_out(x, number);
        return DRAY_OK;
    }
    int rc = take_spare(c, error);
    if (rc == DRAY_OK && c->gap_count)
        rc = make_gap_job(c, &x->gap_jobs[number], error);
    free(c->filled);
    c->filled = NULL;
    c->filled_count = 0;
    if (rc != DRAY_ENOMEM)
        return rc;
    leave_out(x, number); /* staging for the regions alone may need less memory */
    return DRAY_OK;
}

static int prepare(dray__exchange *x, dray_error *error)
{
    uint32_t regions = dray_layout_region_count(x->layout);
    x->chunk_of = calloc((size_t)regions + 1, sizeof *x->chunk_of);
    x->blocks = calloc((size_t)dray_layout_block_count(x->layout) + 1, sizeof *x->blocks);
    int rc = x->chunk_of && x->blocks ? DRAY_OK : dray__nomem(error);
    for (uint32_t i = 0; i < regions && rc == DRAY_OK; i++)
        rc = add_region(x, i, error);
    if (rc == DRAY_OK)
        rc = sort_chunks(x, error);
    x->gap_jobs = rc ? NULL : calloc((size_t)x->count + 1, sizeof(dray__cuda_job *));
    if (rc == DRAY_OK && !x->gap_jobs)
        rc = dray__nomem(error);
    for (uint32_t b = 0; b < dray_layout_block_count(x->layout) && rc == DRAY_OK; b++)
        if (!fill_block(x, b))
            rc = dray__nomem(error);
    for (uint32_t i = 0; i < x->count && rc == DRAY_OK; i++)
        rc = prepare_chunk(x, i, error);
    for (uint32_t b = 0; b < dray_layout_block_count(x->layout) && rc == DRAY_OK; b++) {
        const dray_block *block = dray_layout_block(x->layout, b);
        dray__rect rect = dray__block_rect(block);
        int32_t dtype = dray_layout_tensor(x->layout, block->tensor)->dtype;
        x->blocks[b] = x->chunk_of[block->region] != NOWHERE;
        if (x->blocks[b])
            x->bytes += (uint64_t)dray__rect_elements(&rect) * dray_dtype_size((dray_dtype)dtype);
    }
    return rc;
}

int dray__exchange_new(const dray_layout *layout, dray_region *const *regions, dray__exchange **out,
                       dray_error *error)
{
    dray__exchange *x = calloc(1, sizeof *x);
    if (!x)
        return dray__nomem(error);
    x->layout = layout;
    x->regions = regions;
    int rc = prepare(x, error);
    if (rc || !x->bytes) {
        dray__exchange_free(x);
        x = NULL;
    }
    *out = x;
    return rc;
}

void dray__exchange_free(dray__exchange *x)
{
    if (!x)
        return;
    if (x->stream && dray__cuda_enter(x->stream_device, NULL) == DRAY_OK) {
        dray__cuda_get(NULL)->cuStreamDestroy(x->stream);
        dray__cuda_leave();
    }
    for (uint32_t i = 0; i < x->count; i++) {
        if (x->gap_jobs)
            dray__cuda_job_close(x->gap_jobs[i]);
        chunk_end(&x->chunks[i]);
    }
    free(x->gap_jobs);
    free(x->chunks);
    free(x->chunk_of);
    free(x->blocks);
    free(x);
}

int dray__exchange_region(dray__exchange *x, uint32_t index, dray_region **out, dray_error *error)
{
    uint32_t at = x ? x->chunk_of[index] : NOWHERE;
    *out = NULL;
    if (at == NOWHERE)
        return DRAY_OK;
    const dray_region *live = x->regions[index];
    return dray__region_over_chunk(&x->chunks[at].spare,
                                   live->device_address - x->chunks[at].address, live->bytes,
                                   "staging", out, error);
}

uint64_t dray__exchange_spare_bytes(const dray__exchange *x)
{
    uint64_t bytes = 0;
    for (uint32_t i = 0; x && i < x->count; i++)
        bytes += x->chunks[i].bytes;
    return bytes;
}

uint64_t dray__exchange_waste_bytes(const dray__exchange *x)
{
    uint64_t bytes = 0;
    for (uint32_t i = 0; x && i < x->count; i++)
        bytes +=
            x->chunks[i].bytes > x->chunks[i].needed ? x->chunks[i].bytes - x->chunks[i].needed : 0;
    return bytes;
}

uint64_t dray__exchange_bytes(const dray__exchange *x)
{
    return x->bytes;
}

const bool *dray__exchange_blocks(const dray__exchange *x)
{
    return x->blocks;
}

/* ---- exchanging ------------------------------------------------------------------------------ */

/* Returns true when the chunk has the same allocations. The content of new ones would be lost. */
static bool same_use(const arena_chunk *c, const dray__extents *used)
{
    if (!used)
        return true;
    return used->count == c->used.count &&
           memcmp(used->list, c->used.list, used->count * sizeof *used->list) == 0;
}

/* Takes or releases the locks of all arenas, in the order of the chunks' addresses. */
static void lock_all(const dray__exchange *x, bool take)
{
    const dray_arena *last = NULL;
    for (uint32_t i = 0; i < x->count; i++) {
        const arena_chunk *c = &x->chunks[i];
        if (!c->bytes || !c->arena || c->arena == last)
            continue;
        last = c->arena;
        if (take)
            lock(c);
        else
            unlock(c);
    }
}

/* Returns the live chunk if it has the same memory and allocations, else NULL. Call it with the
 * lock.
 */
static dray__cuda_chunk *unchanged(const arena_chunk *c)
{
    const dray__extents *used = NULL;
    dray__cuda_chunk *live = live_of(c, &used);
    return live && live->allocation == c->allocation && same_use(c, used) ? live : NULL;
}

/* The exports of a chunk that count: all, those of other regions than these, or none. */
enum exports { ALL, OTHERS, NONE };

/* Collects the chunks to exchange. Call it with the locks. */
static int look(dray__exchange *x, enum exports counts, dray__cuda_chunk **live,
                dray__cuda_chunk **spare, uint32_t *count)
{
    *count = 0;
    for (uint32_t i = 0; i < x->count; i++) {
        arena_chunk *c = &x->chunks[i];
        if (!c->bytes)
            continue;
        dray__cuda_chunk *found = unchanged(c);
        uint32_t others = found && counts != NONE ? found->exports : 0;
        if (counts == OTHERS)
            others -= others < c->ours ? others : c->ours;
        if (!found || others)
            return DRAY_ESTALE;
        if (live) {
            live[*count] = found;
            spare[*count] = &c->spare;
        }
        ++*count;
    }
    return DRAY_OK;
}

/* Counts the exports by the layout's regions. Call it before the arenas' locks are taken. */
static void count_ours(dray__exchange *x)
{
    for (uint32_t i = 0; i < x->count; i++)
        x->chunks[i].ours = 0;
    for (uint32_t r = 0; r < dray_layout_region_count(x->layout); r++) {
        arena_chunk *c = x->chunk_of[r] == NOWHERE ? NULL : &x->chunks[x->chunk_of[r]];
        if (c && c->arena)
            c->ours += dray__region_exported(x->regions[r]);
    }
}

bool dray__exchange_possible(dray__exchange *x)
{
    uint32_t count;
    count_ours(x);
    lock_all(x, true);
    int rc = look(x, OTHERS, NULL, NULL, &count);
    lock_all(x, false);
    return rc == DRAY_OK && count;
}

bool dray__exchange_fits(dray__exchange *x)
{
    uint32_t count;
    lock_all(x, true);
    int rc = look(x, NONE, NULL, NULL, &count);
    lock_all(x, false);
    return rc == DRAY_OK;
}

static int copy_gaps(dray__exchange *x, int64_t deadline_ns, dray_error *error)
{
    int rc = DRAY_OK;
    for (uint32_t i = 0; i < x->count && rc == DRAY_OK; i++)
        if (x->gap_jobs[i])
            rc = dray__cuda_job_start(x->gap_jobs[i], NULL, 0, error);
    for (uint32_t i = 0; i < x->count; i++) {
        if (!x->gap_jobs[i] || !dray__cuda_job_is_running(x->gap_jobs[i]))
            continue;
        if (rc)
            dray__cuda_job_abort(x->gap_jobs[i]);
        int ended = dray__cuda_job_wait(x->gap_jobs[i], rc ? INT64_MAX : deadline_ns, error);
        if (ended == DRAY_EAGAIN) {
            dray__cuda_job_abort(x->gap_jobs[i]);
            dray__cuda_job_wait(x->gap_jobs[i], INT64_MAX, NULL);
            ended = dray__fail(error, DRAY_ETIMEDOUT, "the deadline passed in an exchange");
        }
        rc = rc ? rc : ended;
    }
    return rc;
}

/* ---- refilling ------------------------------------------------------------------------------- */

/* Returns the chunk with byte `at` of all chunks; *within is the offset in it. NULL behind the
 * last.
 */
static arena_chunk *chunk_at(dray__exchange *x, uint64_t at, uint64_t *within)
{
    for (uint32_t i = 0; i < x->count; i++) {
        *within = at;
        if (at < x->chunks[i].bytes)
            return &x->chunks[i];
        at -= x->chunks[i].bytes;
    }
    return NULL;
}

static int copy_piece(dray__exchange *x, const arena_chunk *c, uint64_t from, uint64_t bytes,
                      dray_error *error)
{
    const dray__cuda *cuda = dray__cuda_get(error);
    int rc = cuda ? dray__cuda_enter(c->spare.device, error) : DRAY_EUNSUPPORTED;
    if (rc)
        return rc;
    CUresult result = CUDA_SUCCESS;
    if (!x->stream) {
        result = cuda->cuStreamCreate(&x->stream, CU_STREAM_NON_BLOCKING);
        x->stream_device = c->spare.device;
    }
    if (!result)
        result =
            cuda->cuMemcpyDtoDAsync(c->spare.address + from, c->address + from, bytes, x->stream);
    if (!result)
        result = cuda->cuStreamSynchronize(x->stream);
    dray__cuda_leave();
    return dray__fail_cuda(error, result, "copying %llu bytes of the engine's memory",
                           (unsigned long long)bytes);
}

/* The arena's lock is held while a piece is copied, so that its memory is not released. */
int dray__exchange_refill(dray__exchange *x, uint64_t *at, dray_error *error)
{
    uint64_t from;
    arena_chunk *c = chunk_at(x, *at, &from);
    if (!c)
        return DRAY_OK;
    uint64_t bytes = c->bytes - from < REFILL_BYTES ? c->bytes - from : REFILL_BYTES;
    lock(c);
    int rc = unchanged(c) ? copy_piece(x, c, from, bytes, error)
                          : dray__fail(error, DRAY_ESTALE,
                                       "the memory that is to be exchanged was freed or released");
    unlock(c);
    *at += bytes;
    return rc ? rc : chunk_at(x, *at, &from) ? DRAY_EAGAIN : DRAY_OK;
}

bool dray__exchange_is_whole(const dray__exchange *x)
{
    for (uint32_t i = 0; i < dray_layout_region_count(x->layout); i++)
        if (x->chunk_of[i] == NOWHERE)
            return false;
    return true;
}

static int swap_all(dray__exchange *x, dray_error *error)
{
    dray__cuda_chunk **live = calloc((size_t)x->count + 1, sizeof *live);
    dray__cuda_chunk **spare = calloc((size_t)x->count + 1, sizeof *spare);
    uint32_t count = 0;
    int rc = live && spare ? DRAY_OK : dray__nomem(error);
    if (rc == DRAY_OK) {
        lock_all(x, true);
        rc = look(x, ALL, live, spare, &count);
        if (rc)
            dray__fail(error, rc,
                       "the memory that is to be exchanged was freed, released or exported");
        else if (count && (rc = dray__cuda_enter(live[0]->device, error)) == DRAY_OK) {
            rc = dray__chunks_swap(live, spare, count, error);
            dray__cuda_leave();
        }
        uint32_t next = 0;
        for (uint32_t i = 0; i < x->count && rc == DRAY_OK; i++)
            if (x->chunks[i].bytes)
                x->chunks[i].allocation = live[next++]->allocation;
        lock_all(x, false);
    }
    free(live);
    free(spare);
    return rc;
}

int dray__exchange_swap(dray__exchange *x, int64_t deadline_ns, dray_error *error)
{
    int rc = x->swapped ? DRAY_OK : copy_gaps(x, deadline_ns, error);
    for (uint32_t r = 0; r < dray_layout_region_count(x->layout) && rc == DRAY_OK; r++)
        if (x->chunk_of[r] != NOWHERE)
            dray_region_unexport(x->regions[r]);
    if (rc == DRAY_OK)
        rc = swap_all(x, error);
    if (rc == DRAY_OK)
        x->swapped = !x->swapped;
    return rc;
}

int dray__exchange_settle(dray__exchange *x, dray_error *error)
{
    int rc = DRAY_OK;
    for (uint32_t i = 0; i < x->count && rc == DRAY_OK; i++) {
        arena_chunk *c = &x->chunks[i];
        if (!c->bytes || (rc = dray__cuda_enter(c->spare.device, error)))
            continue;
        rc = dray__chunk_settle(&c->spare, error);
        dray__cuda_leave();
    }
    if (rc == DRAY_OK)
        x->swapped = false;
    return rc;
}
