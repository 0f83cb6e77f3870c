#include "model/names.h"

#include "base/hash.h"

#include <stdlib.h>
#include <string.h>

void dray__tensor_names_free(dray__tensor_names *names)
{
    free(names->hashes);
    free(names->slots);
    *names = (dray__tensor_names){0};
}

uint64_t dray__name_hash(const char *name)
{
    return dray__hash(name, strlen(name));
}

bool dray__tensor_names_find(const dray__tensor_names *names, const dray_tensor_info *tensors,
                             const char *name, uint64_t hash, uint32_t *index)
{
    uint32_t mask = names->slot_count - 1;
    if (!names->count)
        return false;
    for (uint32_t i = (uint32_t)hash & mask; names->slots[i]; i = (i + 1) & mask) {
        uint32_t at = names->slots[i] - 1;
        if (names->hashes[at] == hash && strcmp(tensors[at].name, name) == 0) {
            *index = at;
            return true;
        }
    }
    return false;
}

/* Into the first free slot: those of an earlier index are taken before. */
static void put(dray__tensor_names *names, uint32_t index)
{
    uint32_t mask = names->slot_count - 1, i = (uint32_t)names->hashes[index] & mask;
    while (names->slots[i])
        i = (i + 1) & mask;
    names->slots[i] = index + 1;
}

static bool grow(dray__tensor_names *names)
{
    uint32_t capacity = names->capacity ? names->capacity * 2 : 32;
    uint64_t *hashes = realloc(names->hashes, capacity * sizeof *hashes);
    if (!hashes)
        return false;
    names->hashes = hashes;
    uint32_t *slots = calloc((size_t)capacity * 2, sizeof *slots);
    if (!slots)
        return false;
    free(names->slots);
    names->slots = slots;
    names->slot_count = capacity * 2;
    names->capacity = capacity;
    for (uint32_t i = 0; i < names->count; i++)
        put(names, i);
    return true;
}

bool dray__tensor_names_add(dray__tensor_names *names, uint64_t hash)
{
    if (names->count == names->capacity && !grow(names))
        return false;
    names->hashes[names->count] = hash;
    put(names, names->count++);
    return true;
}

/* Slots are filled in the order of indices, so that nothing probed past the last one's. */
void dray__tensor_names_pop(dray__tensor_names *names)
{
    uint32_t mask = names->slot_count - 1, i = (uint32_t)names->hashes[--names->count] & mask;
    while (names->slots[i] != names->count + 1)
        i = (i + 1) & mask;
    names->slots[i] = 0;
}
