#include "control/sums.h"

#include <stdlib.h>
#include <string.h>

void dray__sums_free(dray__sums *sums)
{
    for (uint32_t i = 0; i < sums->count; i++)
        free(sums->items[i].name);
    free(sums->items);
    dray__map_free(&sums->by_name);
    *sums = (dray__sums){0};
}

static dray__named_sum *append(dray__sums *sums, const char *name, int32_t dtype)
{
    if (sums->count == sums->capacity) {
        if (sums->capacity > UINT32_MAX / 2)
            return NULL;
        uint32_t capacity = sums->capacity ? sums->capacity * 2 : 64;
        dray__named_sum *items = realloc(sums->items, capacity * sizeof *items);
        if (!items)
            return NULL;
        sums->items = items;
        sums->capacity = capacity;
    }
    char *copy = strdup(name);
    if (!copy || !dray__map_set(&sums->by_name, name, sums->count)) {
        free(copy);
        return NULL;
    }
    dray__named_sum *item = &sums->items[sums->count++];
    *item = (dray__named_sum){.name = copy, .dtype = dtype};
    return item;
}

bool dray__sums_add(dray__sums *sums, const char *name, int32_t dtype, uint64_t elements,
                    uint64_t sum)
{
    uint32_t index;
    dray__named_sum *item = dray__map_get(&sums->by_name, name, &index) ? &sums->items[index]
                                                                        : append(sums, name, dtype);
    if (!item)
        return false;
    item->mixed |= item->dtype != dtype;
    item->elements += elements;
    item->sum += sum;
    return true;
}

bool dray__sums_add_all(dray__sums *sums, const dray__sums *more)
{
    for (uint32_t i = 0; i < more->count; i++) {
        const dray__named_sum *item = &more->items[i];
        if (!dray__sums_add(sums, item->name, item->dtype, item->elements, item->sum))
            return false;
    }
    return true;
}

const dray__named_sum *dray__sums_find(const dray__sums *sums, const char *name)
{
    uint32_t index;
    return dray__map_get(&sums->by_name, name, &index) ? &sums->items[index] : NULL;
}

void dray__sums_put(dray__writer *w, const dray__sums *sums)
{
    dray__put_u32(w, sums->count);
    for (uint32_t i = 0; i < sums->count; i++) {
        const dray__named_sum *item = &sums->items[i];
        dray__put_string(w, item->name);
        dray__put_u32(w, (uint32_t)item->dtype);
        dray__put_u64(w, item->elements);
        dray__put_u64(w, item->sum);
    }
}

bool dray__sums_get(dray__reader *r, dray__sums *sums)
{
    uint32_t count = dray__get_count(r, 24);
    for (uint32_t i = 0; i < count && !r->failed; i++) {
        char *name = dray__get_string(r, DRAY__TENSOR_NAME_MAX);
        int32_t dtype = (int32_t)dray__get_u32(r);
        uint64_t elements = dray__get_u64(r), sum = dray__get_u64(r);
        bool added = r->failed || !name || dray__sums_add(sums, name, dtype, elements, sum);
        free(name);
        if (!added)
            return false;
    }
    return true;
}
