/* The hash table, from numbers to pointers: open addressing, linear probing. Names, and things that
 * lie in arrays, are looked up in it by their XXH3. */
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
        uint64_t key; /* 0: free */
        void *value;
    } * entries;
    size_t capacity, count;
} dray__idmap;

void dray__idmap_free(dray__idmap *map);
void *dray__idmap_get(const dray__idmap *map, uint64_t key); /* NULL: not there */
/* Adds or replaces. false: out of memory (nothing changed). */
bool dray__idmap_set(dray__idmap *map, uint64_t key, void *value);
void *dray__idmap_remove(dray__idmap *map, uint64_t key); /* what was there, or NULL */

/* Where the key is looked for first: the finaliser of SplitMix64 (Steele, Lea, Flood, OOPSLA 2014),
 * in which every bit reaches every bit. */
size_t dray__idmap_first(const dray__idmap *map, uint64_t key);

/* ---- things that are in an array ------------------------------------------------------------- */

/* Finds the place of a thing in somebody's array, whose things are added one behind the other. */
typedef struct dray__index {
    uint64_t *hashes;   /* [place] */
    dray__idmap places; /* hash -> place + 1; a hash may be there several times */
    uint32_t count;
    uint64_t capacity;
} dray__index;

/* Is the thing at this place of the owner's array the one that is looked for? */
typedef bool dray__same_fn(const void *owner, uint32_t place, const void *key);

enum { DRAY__NO_PLACE = UINT32_MAX };

/* In the header, so that `same` is compiled into it: layouts have many thousands of names. */
static inline uint32_t dray__index_find(const dray__index *index, uint64_t hash,
                                        dray__same_fn *same, const void *owner, const void *key)
{
    const dray__idmap *map = &index->places;
    hash += !hash;
    for (size_t i = map->count ? dray__idmap_first(map, hash) : 0;
         map->count && map->entries[i].key; i = (i + 1) & (map->capacity - 1)) {
        uint32_t place = (uint32_t)(uintptr_t)map->entries[i].value - 1;
        if (map->entries[i].key == hash && same(owner, place, key))
            return place;
    }
    return DRAY__NO_PLACE;
}

/* The thing at place `count`, which is not there yet. false: out of memory, and nothing changed. */
bool dray__index_add(dray__index *index, uint64_t hash);
/* Forgets the thing that was added last. */
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
/* Adds or replaces. false: out of memory. */
bool dray__map_set(dray__map *map, const char *key, uint32_t value);
