/* A map from non-zero 64-bit numbers to pointers: open addressing, linear probing. */
#ifndef DRAY_BASE_IDMAP_H
#define DRAY_BASE_IDMAP_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

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

#endif
