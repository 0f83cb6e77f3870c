#include "queue/storage.h"

#include "base/error.h"
#include "queue/schema.h"

#include <errno.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <sys/random.h>
#include <unistd.h>

#define CHUNK_MIN (UINT64_C(4) << 20)
#define CHUNK_MAX (UINT64_C(64) << 20)

static void close_if_done(dray__storage *storage, dray__written *chunk)
{
    if (chunk == storage->current || chunk->pending)
        return;
    chunk->state = DRAY__WRITTEN_CLOSED;
    chunk->told = 0;
}

static void set_current(dray__storage *storage, dray__written *chunk)
{
    dray__written *old = storage->current;
    storage->current = chunk;
    if (old) {
        old->state = DRAY__WRITTEN_FULL;
        close_if_done(storage, old);
    }
    if (!chunk)
        return;
    chunk->state = DRAY__WRITTEN_CURRENT;
    chunk->used = 0;
    chunk->kept = false;
    storage->clock++;
}

bool dray__storage_take(dray__storage *storage, uint64_t bytes, dray__span *out)
{
    dray__written *chunk = storage->current;
    uint64_t room = (bytes + DRAY__ALIGN - 1) / DRAY__ALIGN * DRAY__ALIGN;
    if (!chunk || room > chunk->size - chunk->used)
        return false;
    *out = (dray__span){.chunk = chunk, .offset = chunk->used, .at = chunk->base + chunk->used};
    chunk->used += room;
    chunk->pending++;
    return true;
}

/* The one longest free that is large enough, but not wasteful. */
bool dray__storage_reuse(dray__storage *storage, uint64_t bytes)
{
    dray__written *best = NULL;
    uint64_t limit = bytes > CHUNK_MIN ? bytes * 4 : UINT64_MAX;
    for (dray__written *chunk = storage->chunks; chunk; chunk = chunk->next)
        if (chunk->state == DRAY__WRITTEN_FREE && chunk->size >= bytes && chunk->size <= limit &&
            (!best || chunk->freed_at < best->freed_at))
            best = chunk;
    if (best)
        set_current(storage, best);
    return best != NULL;
}

/* A producer of much gets larger chunks; sizes are few, so that one chunk can replace another. */
static uint64_t chunk_size(const dray__storage *storage, uint64_t bytes)
{
    uint64_t size = CHUNK_MIN;
    while (size < CHUNK_MAX && size < storage->bytes / 8)
        size *= 2;
    while (size < bytes && size < UINT64_C(1) << 62)
        size *= 2;
    if (size > CHUNK_MAX && size - size / 4 >= bytes) /* large ones in quarter steps */
        size -= size / 4;
    return size;
}

int dray__storage_make(const dray__storage *storage, uint64_t bytes, dray__written **out, int *fd,
                       dray_error *error)
{
    uint64_t random[2] = {0, 0};
    if (getrandom(random, sizeof random, 0) != (ssize_t)sizeof random)
        return dray__fail_errno(error, errno, "getrandom");
    dray__written *chunk = calloc(1, sizeof *chunk);
    if (!chunk)
        return dray__nomem(error);
    chunk->id = random[0] | 1; /* never 0 */
    chunk->key = random[1];
    chunk->size = chunk_size(storage, bytes);
    void *base = NULL;
    int rc = dray__segment_new(chunk->size, &base, fd, error);
    if (rc) {
        free(chunk);
        return rc;
    }
    chunk->base = base;
    *out = chunk;
    return DRAY_OK;
}

void dray__storage_add(dray__storage *storage, dray__written *chunk)
{
    chunk->next = storage->chunks;
    storage->chunks = chunk;
    storage->count++;
    storage->bytes += chunk->size;
    set_current(storage, chunk);
}

void dray__storage_unmake(dray__written *chunk)
{
    munmap(chunk->base, chunk->size);
    free(chunk);
}

static dray__written **find(dray__storage *storage, uint64_t id)
{
    dray__written **at = &storage->chunks;
    while (*at && (*at)->id != id)
        at = &(*at)->next;
    return at;
}

static void unmap(dray__storage *storage, dray__written **at)
{
    dray__written *chunk = *at;
    *at = chunk->next;
    storage->count--;
    storage->bytes -= chunk->size;
    if (storage->pid == getpid()) /* a fork has no such mapping */
        munmap(chunk->base, chunk->size);
    free(chunk);
}

void dray__storage_done(dray__storage *storage, const dray__span *span, bool given_up)
{
    dray__written *chunk = span->chunk;
    chunk->pending--;
    chunk->kept |= !given_up;
    if (chunk == storage->current && !chunk->pending && !chunk->kept)
        chunk->used = 0; /* nothing in it was ever committed */
    if (chunk->state == DRAY__WRITTEN_FULL)
        close_if_done(storage, chunk);
    if (chunk->state == DRAY__WRITTEN_LOST && !chunk->pending)
        unmap(storage, find(storage, chunk->id));
}

void dray__storage_lose(dray__storage *storage)
{
    storage->current = NULL;
    for (dray__written **at = &storage->chunks; *at;) {
        (*at)->state = DRAY__WRITTEN_LOST;
        if ((*at)->pending)
            at = &(*at)->next;
        else
            unmap(storage, at);
    }
}

void dray__storage_recycled(dray__storage *storage, uint64_t id)
{
    dray__written *chunk = *find(storage, id);
    if (!chunk || chunk->state != DRAY__WRITTEN_CLOSED)
        return;
    chunk->state = DRAY__WRITTEN_FREE;
    chunk->freed_at = storage->clock;
}

void dray__storage_dropped(dray__storage *storage, uint64_t id)
{
    dray__written **at = find(storage, id);
    if (*at && (*at)->state == DRAY__WRITTEN_CLOSED)
        unmap(storage, at);
}

void dray__storage_put_closed(dray__storage *storage, dray__writer *w)
{
    uint32_t count = 0;
    storage->messages++;
    for (const dray__written *chunk = storage->chunks; chunk; chunk = chunk->next)
        count += chunk->state == DRAY__WRITTEN_CLOSED && !chunk->told;
    dray__put_u32(w, count);
    for (dray__written *chunk = storage->chunks; count && chunk; chunk = chunk->next) {
        if (chunk->state != DRAY__WRITTEN_CLOSED || chunk->told)
            continue;
        dray__put_u64(w, chunk->id);
        chunk->told = storage->messages;
    }
}

void dray__storage_untell(dray__storage *storage, bool all)
{
    for (dray__written *chunk = storage->chunks; chunk; chunk = chunk->next)
        if (all || chunk->told == storage->messages)
            chunk->told = 0;
}

void dray__storage_put_surplus(dray__storage *storage, dray__writer *w)
{
    uint64_t patience = 64 + 2 * storage->count;
    uint32_t count = 0;
    for (const dray__written *chunk = storage->chunks; chunk; chunk = chunk->next)
        count += chunk->state == DRAY__WRITTEN_FREE && storage->clock - chunk->freed_at > patience;
    dray__put_u32(w, count);
    for (dray__written **at = &storage->chunks; count && *at;) {
        dray__written *chunk = *at;
        if (chunk->state == DRAY__WRITTEN_FREE && storage->clock - chunk->freed_at > patience) {
            dray__put_u64(w, chunk->id);
            unmap(storage, at);
        } else {
            at = &chunk->next;
        }
    }
}

void dray__storage_free(dray__storage *storage)
{
    while (storage->chunks)
        unmap(storage, &storage->chunks);
    storage->current = NULL;
}
