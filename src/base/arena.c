#include "base/arena.h"

#include "base/error.h"

#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>

/* Most arenas stay small; larger ones grow fast. The first chunk has a size that malloc serves
 * quickly. */
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

uint8_t *dray__map_aligned(uint64_t bytes, int prot)
{
    uint64_t slack = bytes >= DRAY__HUGE_PAGE ? DRAY__HUGE_PAGE : 0;
    uint8_t *room =
        mmap(NULL, bytes + slack, prot, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (room == MAP_FAILED)
        return NULL;
    uint8_t *base = slack ? room + (-(uintptr_t)room & (DRAY__HUGE_PAGE - 1)) : room;
    if (base > room)
        munmap(room, (size_t)(base - room));
    if (base < room + slack)
        munmap(base + bytes, (size_t)(room + slack - base));
    return base;
}

/* ---- memory that ends with another object ---------------------------------------------------- */

void *dray__kept_find(const dray__kept *kept, dray__forget_fn *forget)
{
    while (kept && kept->forget != forget)
        kept = kept->next;
    return kept ? kept->what : NULL;
}

int dray__kept_add(dray__kept **kept, dray__forget_fn *forget, void *what, dray_error *error)
{
    dray__kept *new = malloc(sizeof *new);
    if (!new) {
        forget(what);
        return dray__nomem(error);
    }
    *new = (dray__kept){*kept, forget, what};
    *kept = new;
    return DRAY_OK;
}

void *dray__kept_make(dray__kept **kept, dray__forget_fn *forget, size_t size)
{
    void *what = dray__kept_find(*kept, forget);
    if (!what && (what = calloc(1, size)) && dray__kept_add(kept, forget, what, NULL))
        what = NULL;
    return what;
}

void dray__kept_end(dray__kept **kept, dray__forget_fn *forget)
{
    for (dray__kept *k; (k = *kept);) {
        if (forget && k->forget != forget) {
            kept = &k->next;
            continue;
        }
        *kept = k->next;
        k->forget(k->what);
        free(k);
    }
}

/* ---- arrays that grow by doubling ------------------------------------------------------------ */

bool dray__array_room(void *items, size_t size, uint64_t least, uint64_t *capacity)
{
    void *first;
    uint64_t more = *capacity ? *capacity * 2 : 4;
    if (least <= *capacity)
        return true;
    if (more < least)
        more = least;
    memcpy(&first, items, sizeof first);
    void *grown = reallocarray(first, more, size);
    if (!grown)
        return false;
    memcpy(items, &grown, sizeof grown);
    *capacity = more;
    // cppcheck-suppress memleak
    return true; /* *items points to it */
}
