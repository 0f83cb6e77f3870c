/* A map from strings to 32-bit values: open addressing, XXH3, keys copied into the map. */
#ifndef DRAY_BASE_HASH_H
#define DRAY_BASE_HASH_H

#include <dray/dray.h>
#include <stdbool.h>

typedef struct dray__map_entry {
    char *key;
    uint64_t hash;
    uint32_t value;
} dray__map_entry;

typedef struct dray__map {
    dray__map_entry *entries;
    size_t capacity, count;
} dray__map;

uint64_t dray__hash(const void *data, size_t size);
void dray__map_free(dray__map *map);
bool dray__map_get(const dray__map *map, const char *key, uint32_t *value);
/* Adds or replaces. false: out of memory. */
bool dray__map_set(dray__map *map, const char *key, uint32_t value);

#endif
