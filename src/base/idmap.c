#include "base/idmap.h"

#include <stdlib.h>

typedef struct dray__idmap_entry entry_t;

/* The finaliser of SplitMix64 (Steele, Lea, Flood, OOPSLA 2014): every bit reaches every bit. */
static size_t home_of(const dray__idmap *map, uint64_t key)
{
    key = (key ^ (key >> 30)) * UINT64_C(0xbf58476d1ce4e5b9);
    key = (key ^ (key >> 27)) * UINT64_C(0x94d049bb133111eb);
    return (size_t)(key ^ (key >> 31)) & (map->capacity - 1);
}

/* The entry of the key, or the free one where it belongs. The table is never full. */
static entry_t *find(const dray__idmap *map, uint64_t key)
{
    for (size_t i = home_of(map, key);; i = (i + 1) & (map->capacity - 1)) {
        entry_t *entry = &map->entries[i];
        if (!entry->key || entry->key == key)
            return entry;
    }
}

void dray__idmap_free(dray__idmap *map)
{
    free(map->entries);
    *map = (dray__idmap){0};
}

void *dray__idmap_get(const dray__idmap *map, uint64_t key)
{
    if (!map->count || !key)
        return NULL;
    entry_t *entry = find(map, key);
    return entry->key ? entry->value : NULL;
}

static bool grow(dray__idmap *map)
{
    dray__idmap bigger = {.capacity = map->capacity ? map->capacity * 2 : 16, .count = map->count};
    bigger.entries = calloc(bigger.capacity, sizeof *bigger.entries);
    if (!bigger.entries)
        return false;
    for (size_t i = 0; i < map->capacity; i++)
        if (map->entries[i].key)
            *find(&bigger, map->entries[i].key) = map->entries[i];
    free(map->entries);
    *map = bigger;
    return true;
}

bool dray__idmap_set(dray__idmap *map, uint64_t key, void *value)
{
    if (map->count * 4 >= map->capacity * 3 && !grow(map))
        return false;
    entry_t *entry = find(map, key);
    map->count += entry->key == 0;
    *entry = (entry_t){.key = key, .value = value};
    return true;
}

void *dray__idmap_remove(dray__idmap *map, uint64_t key)
{
    if (!map->count || !key)
        return NULL;
    entry_t *entry = find(map, key);
    if (!entry->key)
        return NULL;
    void *value = entry->value;
    size_t mask = map->capacity - 1, hole = (size_t)(entry - map->entries);
    map->entries[hole] = (entry_t){0};
    map->count--;
    /* Backward-shift deletion: what probed past the hole moves into it. */
    for (size_t i = (hole + 1) & mask; map->entries[i].key; i = (i + 1) & mask) {
        size_t home = home_of(map, map->entries[i].key);
        if (((i - home) & mask) >= ((i - hole) & mask)) {
            map->entries[hole] = map->entries[i];
            map->entries[i] = (entry_t){0};
            hole = i;
        }
    }
    return value;
}
