#include "base/hash.h"

#include <stdlib.h>
#include <string.h>

#define XXH_INLINE_ALL
#include <xxhash.h>

uint64_t dray__hash(const void *data, size_t size)
{
    return XXH3_64bits(data, size);
}

void dray__map_free(dray__map *map)
{
    for (size_t i = 0; i < map->capacity; i++)
        free(map->entries[i].key);
    free(map->entries);
    *map = (dray__map){0};
}

/* The entry of the key, or the free one where it belongs. The table is never full. */
static dray__map_entry *find(const dray__map *map, const char *key, uint64_t hash)
{
    size_t mask = map->capacity - 1;
    for (size_t i = hash & mask;; i = (i + 1) & mask) {
        dray__map_entry *entry = &map->entries[i];
        if (!entry->key || (entry->hash == hash && strcmp(entry->key, key) == 0))
            return entry;
    }
}

bool dray__map_get(const dray__map *map, const char *key, uint32_t *value)
{
    if (!map->count)
        return false;
    const dray__map_entry *entry = find(map, key, dray__hash(key, strlen(key)));
    if (!entry->key)
        return false;
    *value = entry->value;
    return true;
}

static bool grow(dray__map *map)
{
    dray__map bigger = {.capacity = map->capacity ? map->capacity * 2 : 16, .count = map->count};
    bigger.entries = calloc(bigger.capacity, sizeof *bigger.entries);
    if (!bigger.entries)
        return false;
    for (size_t i = 0; i < map->capacity; i++)
        if (map->entries[i].key)
            *find(&bigger, map->entries[i].key, map->entries[i].hash) = map->entries[i];
    free(map->entries);
    *map = bigger;
    return true;
}

bool dray__map_set(dray__map *map, const char *key, uint32_t value)
{
    if (map->count * 4 >= map->capacity * 3 && !grow(map))
        return false;
    uint64_t hash = dray__hash(key, strlen(key));
    dray__map_entry *entry = find(map, key, hash);
    if (!entry->key) {
        char *copy = strdup(key);
        if (!copy)
            return false;
        *entry = (dray__map_entry){.key = copy, .hash = hash};
        map->count++;
    }
    entry->value = value;
    return true;
}
