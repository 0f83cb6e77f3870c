#include "base/arena.h"

#include <stdint.h>
#include <stdlib.h>
#include <string.h>

/* Most arenas stay small; those that do not grow fast. The first chunk is one that malloc has at
 * hand. */
enum { FIRST_BYTES = 960, GROWTH = 8, CHUNK_BYTES = 60 << 10 };

struct dray__arena_chunk {
    dray__arena_chunk *next;
    size_t used, capacity;
    max_align_t data[];
};

static void *get(dray__arena *arena, size_t size, size_t align)
{
    dray__arena_chunk *chunk = arena->chunks;
    size_t at = chunk ? (chunk->used + align - 1) & ~(align - 1) : 0;
    if (!chunk || at > chunk->capacity || size > chunk->capacity - at) {
        if (size > SIZE_MAX / 2)
            return NULL;
        size_t capacity = chunk ? GROWTH * chunk->capacity : FIRST_BYTES;
        capacity = capacity < CHUNK_BYTES ? capacity : CHUNK_BYTES;
        capacity = size > capacity ? size : capacity;
        chunk = malloc(sizeof *chunk + capacity);
        if (!chunk)
            return NULL;
        *chunk = (dray__arena_chunk){.next = arena->chunks, .capacity = capacity};
        arena->chunks = chunk;
        at = 0;
    }
    chunk->used = at + size;
    return (char *)chunk->data + at;
}

void *dray__arena_get(dray__arena *arena, size_t size)
{
    return get(arena, size, _Alignof(max_align_t));
}

char *dray__arena_text(dray__arena *arena, const char *text)
{
    size_t size = strlen(text) + 1;
    char *copy = get(arena, size, 1);
    return copy ? memcpy(copy, text, size) : NULL;
}

void dray__arena_free(dray__arena *arena)
{
    for (dray__arena_chunk *chunk = arena->chunks; chunk;) {
        dray__arena_chunk *next = chunk->next;
        free(chunk);
        chunk = next;
    }
    arena->chunks = NULL;
}

void dray__arena_reset(dray__arena *arena)
{
    dray__arena_chunk *newest = arena->chunks;
    if (!newest)
        return;
    dray__arena older = {newest->next};
    dray__arena_free(&older);
    newest->next = NULL;
    newest->used = 0;
}
