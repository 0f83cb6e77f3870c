/* Arenas: memory for names and small records that is freed all at once. Its addresses do not change
 * while it grows. Also mappings of whole pages, and lists of objects that end together. */
#pragma once

#include <dray/dray.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>

typedef struct dray__arena_chunk dray__arena_chunk;

typedef struct dray__arena {
    dray__arena_chunk *chunks; /* newest first */
} dray__arena;

/* Returns `size` bytes, aligned for any object; NULL when out of memory. */
void *dray__arena_get(dray__arena *arena, size_t size);
/* Returns a copy of the text, unaligned; NULL when out of memory. */
char *dray__arena_text(dray__arena *arena, const char *text);
void dray__arena_free(dray__arena *arena);
/* Frees everything, but keeps the newest chunk for the next allocations. */
void dray__arena_reset(dray__arena *arena);

/* Returns the value rounded up to a multiple of `unit`. */
static inline uint64_t dray__round_up(uint64_t value, uint64_t unit)
{
    return (value + unit - 1) / unit * unit;
}

#define DRAY__HUGE_PAGE ((uint64_t)2 << 20)
/* Maps `bytes` of anonymous private memory, which are whole pages. From DRAY__HUGE_PAGE bytes on,
 * it begins at a multiple of them: kernels before 6.7 do not align large mappings on their own, and
 * an unaligned one gets no huge page at its ends. Returns NULL with errno on failure. */
uint8_t *dray__map_aligned(uint64_t bytes, int prot);

/* Private data that a source file attaches to another file's object. It is opaque to all other
 * files, found by the function that frees it, and freed with the object. */
typedef void dray__forget_fn(void *kept);
typedef struct dray__kept {
    struct dray__kept *next;
    dray__forget_fn *forget;
    void *what;
} dray__kept;
void *dray__kept_find(const dray__kept *kept, dray__forget_fn *forget); /* NULL when there is
                                                                         * none */
/* Takes `what`, also when it fails. Returns 0, or DRAY_ENOMEM. */
int dray__kept_add(dray__kept **kept, dray__forget_fn *forget, void *what, dray_error *error);
/* Returns the same data, or makes `size` zeroed bytes when there are none. Returns NULL when out of
 * memory. */
void *dray__kept_make(dray__kept **kept, dray__forget_fn *forget, size_t size);
void dray__kept_end(dray__kept **kept, dray__forget_fn *forget); /* with forget NULL, all */

/* ---- arrays that grow by doubling ------------------------------------------------------------ */

/* Makes room for `least` items; a capacity that is too small is at least doubled. items is the
 * address of the pointer to the first item, which is NULL at first. Returns false when out of
 * memory, with the array unchanged. */
bool dray__array_room(void *items, size_t size, uint64_t least, uint64_t *capacity);
/* Returns the address of one more item after `count` items of `size` bytes. items is the address of
 * the pointer to the first one, which is NULL at first and freed with free. The item is not
 * initialised. Returns NULL when out of memory, with the array unchanged. It is in the header
 * because a plan appends hundreds of thousands of items. */
static inline void *dray__append(void *items, size_t size, uint64_t count, uint64_t *capacity)
{
    if (count >= *capacity && !dray__array_room(items, size, count + 1, capacity))
        return NULL;
    unsigned char *first;
    memcpy(&first, items, sizeof first); /* for any type of pointer */
    return first + count * size;
}
