/* Arenas (dray/gpu.h): addresses reserved once, physical memory in chunks, allocations in the
 * smallest gap that has room. */
#include "memory/cuda_arena.h"

#include "base/arena.h"
#include "base/error.h"
#include "base/options.h"

#include <stdlib.h>
#include <string.h>

#define ALIGNMENT 512
#define DEFAULT_CHUNK ((uint64_t)1 << 30)

static pthread_rwlock_t list_lock = PTHREAD_RWLOCK_INITIALIZER;
static dray_arena *list;

/* ---- the list of arenas
 * -------------------------------------------------------------------------- */

dray_arena *dray__gpu_arena_of(CUdeviceptr address)
{
    pthread_rwlock_rdlock(&list_lock);
    dray_arena *a = list;
    while (a && (address < a->base || address - a->base >= a->address_bytes))
        a = a->next;
    if (a)
        __atomic_add_fetch(&a->refs, 1, __ATOMIC_RELAXED);
    pthread_rwlock_unlock(&list_lock);
    return a;
}

static void end(dray_arena *a)
{
    const dray__cuda *cuda = dray__cuda_get(NULL);
    if (cuda && a->base)
        cuda->cuMemAddressFree(a->base, a->address_bytes);
    free(a->parts);
    pthread_mutex_destroy(&a->lock);
    free(a);
}

/* Drops a reference. The addresses of a closed arena stay reserved while regions use it, so that no
 * other memory gets them while an address may be looked up. */
void dray__gpu_arena_put(dray_arena *arena)
{
    if (!arena)
        return;
    pthread_rwlock_wrlock(&list_lock);
    bool last = __atomic_sub_fetch(&arena->refs, 1, __ATOMIC_ACQ_REL) == 0;
    if (last) {
        dray_arena **link = &list;
        while (*link && *link != arena)
            link = &(*link)->next;
        if (*link)
            *link = arena->next;
    }
    pthread_rwlock_unlock(&list_lock);
    if (last)
        end(arena);
}

int dray__gpu_arenas(const char *tag, dray_arena ***out, uint32_t *count, dray_error *error)
{
    uint32_t n = 0;
    pthread_rwlock_rdlock(&list_lock);
    for (const dray_arena *a = list; a; a = a->next)
        n++;
    dray_arena **found = calloc((size_t)n + 1, sizeof(dray_arena *));
    *count = 0;
    for (dray_arena *a = list; a && found; a = a->next)
        if (!__atomic_load_n(&a->closed, __ATOMIC_RELAXED) && (!tag || strcmp(a->tag, tag) == 0)) {
            __atomic_add_fetch(&a->refs, 1, __ATOMIC_RELAXED);
            found[(*count)++] = a;
        }
    pthread_rwlock_unlock(&list_lock);
    if (!found)
        return dray__nomem(error);
    *out = found;
    if (*count)
        return DRAY_OK;
    free(found);
    return dray__fail(error, DRAY_ENOENT, "this process has no arena%s%s", tag ? " of tag " : "",
                      tag ? tag : "");
}

/* ---- opening and closing --------------------------------------------------------------------- */

static int read_options(const dray_arena_options *given, dray_arena_options *out, dray_error *error)
{
    int rc = DRAY__OPTIONS_READ(dray_arena_options, peers, out, given, error);
    if (rc)
        return rc;
    out->tag = out->tag ? out->tag : "weights";
    size_t length = strlen(out->tag);
    if (!length || length > 63)
        return dray__fail(error, DRAY_EINVALID, "an arena's tag of %zu bytes: 1 to 63 are possible",
                          length);
    if (out->address_bytes > INT64_MAX || out->chunk_bytes > INT64_MAX)
        return dray__fail(error, DRAY_EINVALID, "an arena of %llu bytes in chunks of %llu",
                          (unsigned long long)out->address_bytes,
                          (unsigned long long)out->chunk_bytes);
    return DRAY_OK;
}

static int reserve(dray_arena *a, dray_error *error)
{
    const dray__cuda *cuda = dray__cuda_get(NULL);
    int rc = dray__cuda_enter(a->device, error);
    if (rc)
        return rc;
    CUresult result = cuda->cuMemAddressReserve(&a->base, a->address_bytes, 0, 0, 0);
    dray__cuda_leave();
    if (result)
        a->base = 0;
    return dray__fail_cuda(error, result, "arena %s: %llu bytes of addresses", a->tag,
                           (unsigned long long)a->address_bytes);
}

int dray_arena_open(const dray_arena_options *given, dray_arena **out, dray_error *error)
{
    static const uint8_t none[16];
    dray_arena_options options = DRAY_ARENA_OPTIONS_INIT;
    dray__cuda_device *device;
    int rc = read_options(given, &options, error);
    if (rc == DRAY_OK)
        rc = memcmp(options.uuid, none, sizeof none)
                 ? dray__cuda_device_find(options.uuid, &device, error)
                 : dray__cuda_device_here(NULL, &device, error);
    if (rc)
        return rc;
    uint64_t unit = dray__chunk_granularity(device, error);
    if (!unit)
        return DRAY_EUNSUPPORTED;
    dray_arena *a = calloc(1, sizeof *a);
    if (!a)
        return dray__nomem(error);
    pthread_mutex_init(&a->lock, NULL);
    a->refs = 1;
    a->device = device;
    a->unit = unit;
    a->peers = options.peers != 0;
    a->address_bytes =
        dray__round_up(options.address_bytes ? options.address_bytes : 4 * device->bytes, unit);
    a->chunk_bytes =
        dray__round_up(options.chunk_bytes ? options.chunk_bytes : DEFAULT_CHUNK, unit);
    memcpy(a->tag, options.tag, strlen(options.tag));
    rc = reserve(a, error);
    if (rc) {
        end(a);
        return rc;
    }
    pthread_rwlock_wrlock(&list_lock);
    a->next = list;
    list = a;
    pthread_rwlock_unlock(&list_lock);
    *out = a;
    return DRAY_OK;
}

void dray_arena_close(dray_arena *a)
{
    if (!a)
        return;
    const dray__cuda *cuda = dray__cuda_get(NULL);
    pthread_mutex_lock(&a->lock);
    __atomic_store_n(&a->closed, true, __ATOMIC_RELAXED);
    if (cuda && dray__cuda_enter(a->device, NULL) == DRAY_OK) {
        if (a->stream) {
            cuda->cuStreamSynchronize(a->stream);
            cuda->cuStreamDestroy(a->stream);
            a->stream = NULL;
        }
        while (a->count) {
            dray__chunk_drop(&a->parts[a->count - 1]->chunk);
            dray__arena_remove(a, a->count - 1);
        }
        dray__pinned_pieces_free(&a->pinned);
        dray__cuda_leave();
    }
    a->used_bytes = 0;
    a->allocations = 0;
    pthread_mutex_unlock(&a->lock);
    dray__gpu_arena_put(a);
}

/* ---- chunks ---------------------------------------------------------------------------------- */

void dray__arena_remove(dray_arena *a, uint32_t index)
{
    dray__arena_part *part = a->parts[index];
    a->count--;
    memmove(a->parts + index, a->parts + index + 1,
            (a->count - index) * sizeof(dray__arena_part *));
    dray__extents_free(&part->used);
    dray__extents_free(&part->kept);
    free(part);
}

static void reach_all(const dray_arena *a, dray__cuda_chunk *chunk, uint64_t who)
{
    dray__cuda_device *device;
    for (int i = 0; dray__cuda_device_at(i, &device, NULL) == DRAY_OK; i++)
        if (device != a->device && (a->peers || who & 1ull << i))
            dray__chunk_reach(chunk, device, NULL); /* without a link, copies take another path */
}

int dray__arena_back(const dray_arena *arena, dray__arena_part *part, dray_error *error)
{
    int rc = dray__chunk_back(&part->chunk, error);
    if (rc == DRAY_OK && (arena->peers || part->reach))
        reach_all(arena, &part->chunk, part->reach);
    return rc;
}

/* Returns the first address range with room; UINT64_MAX when there is none. */
static uint64_t place(const dray_arena *a, uint64_t bytes, uint32_t *index)
{
    uint64_t from = 0;
    for (uint32_t i = 0; i <= a->count; i++) {
        uint64_t to = i < a->count ? a->parts[i]->chunk.address - a->base : a->address_bytes;
        if (to - from >= bytes) {
            *index = i;
            return from;
        }
        if (i < a->count)
            from = to + a->parts[i]->chunk.bytes;
    }
    return UINT64_MAX;
}

static int add_part(dray_arena *a, uint64_t bytes, dray__arena_part **out, dray_error *error)
{
    uint32_t index = 0;
    uint64_t offset = place(a, bytes, &index);
    if (offset == UINT64_MAX)
        return dray__fail(error, DRAY_EFULL,
                          "arena %s: no %llu bytes of its %llu bytes of addresses are left", a->tag,
                          (unsigned long long)bytes, (unsigned long long)a->address_bytes);
    if (!dray__append(&a->parts, sizeof *a->parts, a->count, &a->capacity))
        return dray__nomem(error);
    dray__arena_part *part = calloc(1, sizeof *part);
    if (!part)
        return dray__nomem(error);
    part->chunk = (dray__cuda_chunk){
        .device = a->device, .address = a->base + offset, .bytes = bytes, .fd = -1};
    part->content = ++a->contents;
    int rc = dray__arena_back(a, part, error);
    if (rc) {
        free(part);
        return rc;
    }
    memmove(a->parts + index + 1, a->parts + index,
            (a->count - index) * sizeof(dray__arena_part *));
    a->parts[index] = part;
    a->count++;
    *out = part;
    return DRAY_OK;
}

/* Returns NULL when no chunk has the address. */
static dray__arena_part *part_of(const dray_arena *a, CUdeviceptr address)
{
    uint32_t low = 0, high = a->count;
    while (low < high) {
        uint32_t middle = low + (high - low) / 2;
        const dray__cuda_chunk *c = &a->parts[middle]->chunk;
        if (address < c->address)
            high = middle;
        else if (address - c->address >= c->bytes)
            low = middle + 1;
        else
            return a->parts[middle];
    }
    return NULL;
}

/* ---- allocations ----------------------------------------------------------------------------- */

static bool take(const dray_arena *a, uint64_t bytes, CUdeviceptr *address)
{
    for (uint32_t i = 0; i < a->count; i++) {
        dray__arena_part *part = a->parts[i];
        uint64_t offset;
        if (dray__extents_take(&part->used, part->chunk.bytes, bytes, &offset)) {
            *address = part->chunk.address + offset;
            return true;
        }
    }
    return false;
}

static int grow(dray_arena *a, uint64_t bytes, dray_error *error)
{
    uint64_t least = dray__round_up(bytes, a->unit);
    dray__arena_part *part;
    int rc = dray__cuda_enter(a->device, error);
    if (rc)
        return rc;
    rc = add_part(a, least > a->chunk_bytes ? least : a->chunk_bytes, &part, error);
    if ((rc == DRAY_ENOMEM || rc == DRAY_EFULL) && least < a->chunk_bytes)
        rc = add_part(a, least, &part, error);
    dray__cuda_leave();
    return rc;
}

int dray_arena_alloc(dray_arena *a, uint64_t bytes, uint64_t *address, dray_error *error)
{
    if (bytes > a->address_bytes)
        return dray__fail(error, DRAY_EFULL, "arena %s: %llu bytes of its %llu bytes of addresses",
                          a->tag, (unsigned long long)bytes, (unsigned long long)a->address_bytes);
    bytes = dray__round_up(bytes ? bytes : 1, ALIGNMENT);
    pthread_mutex_lock(&a->lock);
    int rc = DRAY_OK;
    if (a->released)
        rc = dray__fail(error, DRAY_EBUSY, "arena %s is released: resume it first", a->tag);
    else if (!take(a, bytes, address)) {
        rc = grow(a, bytes, error);
        if (rc == DRAY_OK && !take(a, bytes, address))
            rc = dray__nomem(error);
    }
    if (rc == DRAY_OK) {
        a->used_bytes += bytes;
        a->allocations++;
    }
    pthread_mutex_unlock(&a->lock);
    return rc;
}

static void drop_empty(dray_arena *a, const dray__arena_part *part)
{
    for (uint32_t i = 0; i < a->count; i++)
        if (a->parts[i] == part && dray__cuda_enter(a->device, NULL) == DRAY_OK) {
            dray__chunk_drop(&a->parts[i]->chunk);
            dray__cuda_leave();
            dray__arena_remove(a, i);
            return;
        }
}

int dray_arena_free(dray_arena *a, uint64_t address, dray_error *error)
{
    int rc = DRAY_OK;
    pthread_mutex_lock(&a->lock);
    dray__arena_part *part = part_of(a, address);
    uint64_t bytes = part ? dray__extents_give(&part->used, address - part->chunk.address) : 0;
    if (bytes) {
        a->used_bytes -= bytes;
        a->allocations--;
        if (part->used.count == 0)
            drop_empty(a, part);
    } else {
        rc = dray__fail(error, DRAY_ENOENT, "arena %s: no allocation begins at 0x%llx", a->tag,
                        (unsigned long long)address);
    }
    pthread_mutex_unlock(&a->lock);
    return rc;
}

int dray_arena_get_status(dray_arena *a, dray_arena_status *out, dray_error *error)
{
    dray_arena_status s = DRAY_ARENA_STATUS_INIT;
    int rc = DRAY__OPTIONS_CHECK(dray_arena_status, released, out, error);
    if (rc)
        return rc;
    pthread_mutex_lock(&a->lock);
    s.base = a->base;
    s.address_bytes = a->address_bytes;
    s.used_bytes = a->used_bytes;
    s.allocations = a->allocations;
    s.chunks = a->count;
    s.pinned_bytes = a->pinned.bytes;
    s.released = a->released;
    for (uint32_t i = 0; i < a->count; i++) {
        const dray__cuda_chunk *c = &a->parts[i]->chunk;
        s.resident_bytes += c->resident ? c->bytes : 0;
        s.exported += c->exports;
    }
    pthread_mutex_unlock(&a->lock);
    dray__options_fill(out, &s, sizeof s);
    return DRAY_OK;
}

/* ---- regions over it ------------------------------------------------------------------------- */

static int stale(const dray_arena *a, CUdeviceptr address, dray_error *error)
{
    return dray__fail(error, DRAY_ESTALE, "arena %s: nothing is resident at 0x%llx%s", a->tag,
                      (unsigned long long)address,
                      a->closed     ? ": it is closed"
                      : a->released ? ": it is released"
                                    : "");
}

int dray__gpu_arena_storage(dray_arena *a, CUdeviceptr address, dray__cuda_storage *out,
                            dray_error *error)
{
    int rc = DRAY_OK;
    pthread_mutex_lock(&a->lock);
    const dray__arena_part *part = part_of(a, address);
    if (part && part->chunk.resident)
        *out = (dray__cuda_storage){a->device, part->chunk.address, part->chunk.bytes,
                                    part->chunk.allocation, DRAY_CUDA_FORM_VMM};
    else
        rc = stale(a, address, error);
    pthread_mutex_unlock(&a->lock);
    return rc;
}

uint64_t dray__gpu_arena_content(dray_arena *a, CUdeviceptr address)
{
    pthread_mutex_lock(&a->lock);
    const dray__arena_part *part = part_of(a, address);
    uint64_t content = part && part->chunk.resident ? part->content : 0;
    pthread_mutex_unlock(&a->lock);
    return content;
}

int dray__gpu_arena_export(dray_arena *a, CUdeviceptr address, uint8_t key[64],
                           uint64_t *allocation, dray_error *error)
{
    pthread_mutex_lock(&a->lock);
    dray__arena_part *part = part_of(a, address);
    int rc = part && part->chunk.resident ? dray__chunk_export(&part->chunk, error)
                                          : stale(a, address, error);
    if (rc == DRAY_OK) {
        part->chunk.exports++;
        memcpy(key, part->chunk.name, sizeof part->chunk.name);
        *allocation = part->chunk.allocation;
    }
    pthread_mutex_unlock(&a->lock);
    return rc;
}

static dray__cuda_chunk *chunk_still(const dray_arena *a, CUdeviceptr address, uint64_t allocation)
{
    dray__arena_part *part = part_of(a, address);
    return part && part->chunk.resident && part->chunk.allocation == allocation ? &part->chunk
                                                                                : NULL;
}

void dray__gpu_arena_unexport(dray_arena *a, CUdeviceptr address, uint64_t allocation)
{
    pthread_mutex_lock(&a->lock);
    dray__cuda_chunk *chunk = chunk_still(a, address, allocation);
    if (chunk && chunk->exports && --chunk->exports == 0)
        dray__chunk_unexport(chunk);
    pthread_mutex_unlock(&a->lock);
}

int dray__gpu_arena_fd(dray_arena *a, CUdeviceptr address, uint64_t allocation)
{
    pthread_mutex_lock(&a->lock);
    const dray__cuda_chunk *chunk = chunk_still(a, address, allocation);
    int fd = chunk ? chunk->fd : -1;
    pthread_mutex_unlock(&a->lock);
    return fd;
}

int dray__gpu_arena_reach(dray_arena *a, CUdeviceptr address, dray__cuda_device *device,
                          dray_error *error)
{
    pthread_mutex_lock(&a->lock);
    dray__arena_part *part = part_of(a, address);
    int rc = part && part->chunk.resident ? dray__chunk_reach(&part->chunk, device, error)
                                          : stale(a, address, error);
    pthread_mutex_unlock(&a->lock);
    return rc;
}

/* ---- exchange -------------------------------------------------------------------------------- */

void dray__gpu_arena_lock(dray_arena *arena)
{
    pthread_mutex_lock(&arena->lock);
}

void dray__gpu_arena_unlock(dray_arena *arena)
{
    pthread_mutex_unlock(&arena->lock);
}

dray__cuda_chunk *dray__gpu_arena_chunk(const dray_arena *arena, CUdeviceptr address,
                                        const dray__extents **used)
{
    dray__arena_part *part = part_of(arena, address);
    if (!part || !part->chunk.resident)
        return NULL;
    if (used)
        *used = &part->used;
    return &part->chunk;
}
