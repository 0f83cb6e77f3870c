#include "base/hash.h"

#include "base/arena.h"

#include <stdlib.h>
#include <string.h>

#define XXH_INLINE_ALL
#include <xxhash.h>

uint64_t dray__hash(const void *data, size_t size)
{
    return XXH3_64bits(data, size);
}

uint64_t dray__name_hash(const char *name)
{
    return dray__hash(name, strlen(name));
}

/* Returns the entry at which the search for a key begins: the finaliser of SplitMix64 (Steele, Lea,
 * Flood, OOPSLA 2014), in which every bit reaches every bit. */
static size_t first_place(const dray__idmap *map, uint64_t key)
{
    key = (key ^ (key >> 30)) * UINT64_C(0xbf58476d1ce4e5b9);
    key = (key ^ (key >> 27)) * UINT64_C(0x94d049bb133111eb);
    return (size_t)(key ^ (key >> 31)) & (map->capacity - 1);
}

/* ---- non-zero 64-bit numbers ----------------------------------------------------------------- */

typedef struct dray__idmap_entry entry_t;

/* Returns the entry of the key, or the free entry where it belongs. The table is never full. */
static entry_t *find(const dray__idmap *map, uint64_t key)
{
    for (size_t i = first_place(map, key);; i = (i + 1) & (map->capacity - 1)) {
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

/* Returns the first free entry from the place at which the search for the key begins. */
static entry_t *free_of(const dray__idmap *map, uint64_t key)
{
    size_t i = first_place(map, key);
    while (map->entries[i].key)
        i = (i + 1) & (map->capacity - 1);
    return &map->entries[i];
}

/* Makes room for one more entry. */
static bool grow(dray__idmap *map)
{
    if (map->count * 4 < map->capacity * 3)
        return true;
    dray__idmap bigger = {.capacity = map->capacity ? map->capacity * 2 : 16, .count = map->count};
    bigger.entries = calloc(bigger.capacity, sizeof *bigger.entries);
    if (!bigger.entries)
        return false;
    for (size_t i = 0; i < map->capacity; i++)
        if (map->entries[i].key)
            *free_of(&bigger, map->entries[i].key) = map->entries[i];
    free(map->entries);
    *map = bigger;
    return true;
}

bool dray__idmap_set(dray__idmap *map, uint64_t key, void *value)
{
    entry_t *entry = map->capacity ? find(map, key) : NULL;
    if (!entry || !entry->key) {
        if (!grow(map))
            return false;
        entry = find(map, key);
    }
    map->count += entry->key == 0;
    *entry = (entry_t){.key = key, .value = value};
    return true;
}

static void drop(dray__idmap *map, size_t hole)
{
    size_t mask = map->capacity - 1;
    map->entries[hole] = (entry_t){0};
    map->count--;
    /* Backward-shift deletion: an entry that was probed past the hole moves into it. */
    for (size_t i = (hole + 1) & mask; map->entries[i].key; i = (i + 1) & mask) {
        size_t home = first_place(map, map->entries[i].key);
        if (((i - home) & mask) >= ((i - hole) & mask)) {
            map->entries[hole] = map->entries[i];
            map->entries[i] = (entry_t){0};
            hole = i;
        }
    }
}

void *dray__idmap_remove(dray__idmap *map, uint64_t key)
{
    entry_t *entry = map->count && key ? find(map, key) : NULL;
    if (!entry || !entry->key)
        return NULL;
    void *value = entry->value;
    drop(map, (size_t)(entry - map->entries));
    return value;
}

/* ---- items of an array ------------------------------------------------------------- */

void dray__index_free(dray__index *index)
{
    free(index->hashes);
    free(index->slots);
    *index = (dray__index){0};
}

static uint32_t *slot_of(const dray__index *index, uint64_t hash, uint32_t holds)
{
    uint32_t i = (uint32_t)hash & (index->slot_count - 1);
    while (index->slots[i] != holds)
        i = (i + 1) & (index->slot_count - 1);
    return &index->slots[i];
}

/* Makes sure that there is a slot for one more item. */
static bool add_slots(dray__index *index)
{
    if (index->count < index->slot_count / 2)
        return true;
    uint32_t more = index->slot_count ? index->slot_count * 2 : 16;
    uint32_t *slots = more ? calloc(more, sizeof *slots) : NULL;
    if (!slots)
        return false;
    free(index->slots);
    index->slots = slots;
    index->slot_count = more;
    for (uint32_t i = 0; i < index->count; i++)
        *slot_of(index, index->hashes[i], 0) = i + 1;
    return true;
}

bool dray__index_add(dray__index *index, uint64_t hash)
{
    uint64_t *at = dray__append(&index->hashes, sizeof *at, index->count, &index->capacity);
    if (!at || !add_slots(index))
        return false;
    *at = hash;
    *slot_of(index, hash, 0) = ++index->count;
    return true;
}

/* No item was added after the last one, so its slot can simply become free again. */
void dray__index_pop(dray__index *index)
{
    *slot_of(index, index->hashes[index->count - 1], index->count) = 0;
    index->count--;
}

/* ---- maps ------------------------------------------------------------------------------------ */

void dray__map_free(dray__map *map)
{
    for (uint32_t i = 0; i < map->index.count; i++)
        free(map->entries[i].key);
    free(map->entries);
    dray__index_free(&map->index);
    *map = (dray__map){0};
}

static bool same_key(const void *owner, uint32_t place, const void *key)
{
    return strcmp(((const dray__map *)owner)->entries[place].key, key) == 0;
}

bool dray__map_get(const dray__map *map, const char *key, uint32_t *value)
{
    uint32_t place = dray__index_find(&map->index, dray__name_hash(key), same_key, map, key);
    if (place != DRAY__NO_PLACE)
        *value = map->entries[place].value;
    return place != DRAY__NO_PLACE;
}

bool dray__map_set(dray__map *map, const char *key, uint32_t value)
{
    uint64_t hash = dray__name_hash(key);
    uint32_t place = dray__index_find(&map->index, hash, same_key, map, key);
    if (place != DRAY__NO_PLACE) {
        map->entries[place].value = value;
        return true;
    }
    dray__map_entry *entry =
        dray__append(&map->entries, sizeof *entry, map->index.count, &map->capacity);
    char *copy = entry ? strdup(key) : NULL;
    if (!copy || !dray__index_add(&map->index, hash)) {
        free(copy);
        return false;
    }
    *entry = (dray__map_entry){copy, value};
    return true;
}
