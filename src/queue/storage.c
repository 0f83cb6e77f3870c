#include "queue/storage.h"

#include "base/error.h"
#include "queue/schema.h"

#include <errno.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <sys/random.h>
#include <unistd.h>

#define CHUNK_LEAST (UINT64_C(64) << 10) /* where the capacity is small */
#define CHUNK_MIN (UINT64_C(4) << 20)
#define CHUNK_MAX (UINT64_C(64) << 20)

static dray__written **find(dray__storage *storage, uint64_t id)
{
    dray__written **at = &storage->chunks;
    while (*at && (*at)->id != id)
        at = &(*at)->next;
    return at;
}

static uint64_t aligned(uint64_t bytes)
{
    return bytes / DRAY__ALIGN * DRAY__ALIGN + (bytes % DRAY__ALIGN ? DRAY__ALIGN : 0);
}

/* Of all chunks, a small part: many producers may have one that is not full. */
static uint64_t part_of(uint64_t capacity, uint64_t parts)
{
    uint64_t size = CHUNK_LEAST;
    while (size < CHUNK_MAX && size * 2 <= capacity / parts)
        size *= 2;
    return size;
}

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
}

bool dray__storage_take(dray__storage *storage, uint64_t bytes, dray__span *out)
{
    dray__written *chunk = storage->current;
    uint64_t room = aligned(bytes);
    if (!chunk || room > chunk->size - chunk->used)
        return false;
    *out = (dray__span){.chunk = chunk, .offset = chunk->used, .at = chunk->base + chunk->used};
    chunk->used += room;
    chunk->pending++;
    return true;
}

void dray__storage_set_aside(dray__storage *storage)
{
    set_current(storage, NULL);
}

bool dray__storage_reuse(dray__storage *storage, uint64_t id)
{
    dray__written *chunk = *find(storage, id);
    if (!chunk || chunk->state != DRAY__WRITTEN_CLOSED)
        return false;
    set_current(storage, chunk);
    return true;
}

/* As many of the columns that come as go into one chunk, without anything left over. */
static uint64_t next_bytes(const dray__storage *storage, const uint64_t *rooms, uint32_t count,
                           uint32_t *taken)
{
    uint64_t most = part_of(storage->capacity, 16), bytes = 0;
    for (*taken = 0; *taken < count; ++*taken) {
        uint64_t room = aligned(rooms[*taken]);
        if (*taken && (room > most || bytes > most - room))
            break;
        bytes += room;
    }
    return bytes;
}

/* A producer of much gets larger chunks; sizes are few, so that one chunk can replace another. */
void dray__storage_size(const dray__storage *storage, uint64_t bytes, uint64_t *least,
                        uint64_t *size)
{
    uint32_t taken;
    uint64_t most = part_of(storage->capacity, 64), standard = most < CHUNK_MIN ? most : CHUNK_MIN;
    *least = next_bytes(storage, storage->rooms, storage->room_count, &taken);
    *least = *least < aligned(bytes) ? aligned(bytes) : *least;
    while (standard < most && standard < storage->bytes / 8)
        standard *= 2;
    *size = standard;
    while (*size < *least && *size < UINT64_C(1) << 62)
        *size *= 2;
    if (*size > standard && *size - *size / 4 >= *least) /* in quarter steps */
        *size -= *size / 4;
}

int dray__storage_ahead(dray__storage *storage, const uint64_t *rooms, uint32_t count,
                        uint64_t *bytes, dray_error *error)
{
    const dray__written *current = storage->current;
    uint64_t all = 0, left = current ? current->size - current->used : 0;
    uint32_t fits = 0;
    *bytes = 0;
    for (uint32_t i = 0; i < count; i++)
        if (__builtin_add_overflow(all, aligned(rooms[i]), &all) || all > INT64_MAX)
            return dray__fail(error, DRAY_EINVALID, "column %u: sizes overflow", i);
    for (; fits < count && aligned(rooms[fits]) <= left; fits++)
        left -= aligned(rooms[fits]);
    if (fits == count)
        return DRAY_OK;
    if (!fits || all > storage->capacity / 4) { /* what it has is worth less than its memory */
        set_current(storage, NULL);
        fits = 0;
    }
    for (; fits < count; fits++)
        *bytes += aligned(rooms[fits]);
    *bytes += !*bytes;
    return DRAY_OK;
}

int dray__storage_name(uint64_t *id, uint64_t *key, dray_error *error)
{
    uint64_t random[2] = {0, 0};
    if (getrandom(random, sizeof random, 0) != (ssize_t)sizeof random)
        return dray__fail_errno(error, errno, "getrandom");
    *id = random[0] | 1; /* never 0 */
    *key = random[1];
    return DRAY_OK;
}

int dray__storage_make(uint64_t id, uint64_t key, uint64_t size, dray__written **out, int *fd,
                       dray_error *error)
{
    dray__written *chunk = calloc(1, sizeof *chunk);
    if (!chunk)
        return dray__nomem(error);
    chunk->id = id;
    chunk->key = key;
    chunk->size = size;
    void *base = NULL;
    int rc = dray__segment_new(size, &base, fd, error);
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
    else if (chunk == storage->current && !chunk->pending &&
             (chunk->used == chunk->size || chunk->size > part_of(storage->capacity, 16)))
        set_current(storage, NULL); /* much memory waits for nobody who may come */
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

bool dray__storage_has_news(const dray__storage *storage)
{
    for (const dray__written *chunk = storage->chunks; chunk; chunk = chunk->next)
        if (chunk->state == DRAY__WRITTEN_CLOSED && !chunk->told)
            return true;
    return false;
}

void dray__storage_free(dray__storage *storage)
{
    while (storage->chunks)
        unmap(storage, &storage->chunks);
    storage->current = NULL;
}
