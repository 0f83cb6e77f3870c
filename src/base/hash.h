/* Hash tables with open addressing and linear probing: from numbers to pointers; and for items in
 * arrays, such as strings, which are found by their XXH3. */
#pragma once

#include <dray/dray.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

uint64_t dray__hash(const void *data, size_t size);
uint64_t dray__name_hash(const char *name);

/* ---- non-zero 64-bit numbers ----------------------------------------------------------------- */

typedef struct dray__idmap {
    struct dray__idmap_entry {
        uint64_t key; /* 0 in a free slot */
        void *value;
    } * entries;
    size_t capacity, count;
} dray__idmap;

void dray__idmap_free(dray__idmap *map);
void *dray__idmap_get(const dray__idmap *map, uint64_t key); /* NULL when there is no such key */
/* Adds or replaces. Returns false when out of memory, with nothing changed. */
bool dray__idmap_set(dray__idmap *map, uint64_t key, void *value);
void *dray__idmap_remove(dray__idmap *map, uint64_t key); /* the removed value, or NULL */

/* ---- items of an array ------------------------------------------------------------- */

/* Finds items by name in a caller's array that only grows. A layout has many thousands of names, so
 * a slot takes 4 bytes instead of an entry of a map. */
typedef struct dray__index {
    uint64_t *hashes; /* [place] */
    uint32_t *slots;  /* place + 1, probed from the low bits of the hash on; 0 in a free slot */
    uint32_t count, slot_count;
    uint64_t capacity;
} dray__index;

/* Returns whether the item at this place of the owner's array is the one that is searched for. */
typedef bool dray__same_fn(const void *owner, uint32_t place, const void *key);

enum { DRAY__NO_PLACE = UINT32_MAX };

/* In the header, so that `same` is compiled into it. */
static inline uint32_t dray__index_find(const dray__index *index, uint64_t hash,
                                        dray__same_fn *same, const void *owner, const void *key)
{
    uint32_t mask = index->slot_count - 1;
    for (uint32_t i = (uint32_t)hash & mask; index->count && index->slots[i]; i = (i + 1) & mask)
        if (index->hashes[index->slots[i] - 1] == hash && same(owner, index->slots[i] - 1, key))
            return index->slots[i] - 1;
    return DRAY__NO_PLACE;
}

/* Adds the item at place `count`. Returns false when out of memory, with nothing changed. */
bool dray__index_add(dray__index *index, uint64_t hash);
/* Removes the item that was added last. */
void dray__index_pop(dray__index *index);
void dray__index_free(dray__index *index);

/* ---- a map from strings to 32-bit values; it copies the keys --------------------------------- */

typedef struct dray__map_entry {
    char *key;
    uint32_t value;
} dray__map_entry;

typedef struct dray__map {
    dray__index index;
    dray__map_entry *entries;
    uint64_t capacity;
} dray__map;

void dray__map_free(dray__map *map);
bool dray__map_get(const dray__map *map, const char *key, uint32_t *value);
/* Adds or replaces. Returns false when out of memory. */
bool dray__map_set(dray__map *map, const char *key, uint32_t value);
