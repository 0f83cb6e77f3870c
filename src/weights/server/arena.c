/* Slots of a staging arena (arena.h). */
#include "weights/server/arena.h"

#include "base/error.h"

#include <pthread.h>
#include <stdlib.h>

struct dray__staging {
    pthread_mutex_t lock; /* of the fields below */
    uint32_t references, free_slots;
    dray_region **free; /* a stack, because the slot that was given back last is in the cache */
    dray_region *region;
    uint64_t slot_bytes;
    uint32_t slots;
};

static void arena_free(dray__staging *a)
{
    for (uint32_t i = 0; a->free && i < a->free_slots; i++)
        dray_region_free(a->free[i]);
    free(a->free);
    dray_region_free(a->region);
    pthread_mutex_destroy(&a->lock);
    free(a);
}

/* Returns the size of a slot: four slots if they are large enough then, for two readers at once. */
static uint64_t slot_for(uint64_t bytes)
{
    uint64_t slot = (bytes / 4) & ~(uint64_t)4095;
    return slot > DRAY__ARENA_SLOT_MAX ? DRAY__ARENA_SLOT_MAX : slot;
}

int dray__arena_new(uint64_t bytes, dray__staging **out, dray_error *error)
{
    dray__staging *a = calloc(1, sizeof *a);
    if (!a)
        return dray__nomem(error);
    pthread_mutex_init(&a->lock, NULL);
    a->references = 1;
    a->slot_bytes = slot_for(bytes);
    a->slots = (uint32_t)(bytes / a->slot_bytes);
    a->free = calloc(a->slots, sizeof *a->free);
    int rc = a->free
                 ? dray_region_alloc(DRAY_REGION_SHARED, bytes, "staging arena", &a->region, error)
                 : dray__nomem(error);
    for (uint32_t i = a->slots; i-- > 0 && rc == DRAY_OK;) {
        uint8_t *at = (uint8_t *)dray_region_base(a->region) + i * a->slot_bytes;
        rc = dray_region_wrap(at, a->slot_bytes, "slot", &a->free[a->free_slots], error);
        a->free_slots += rc == DRAY_OK;
    }
    if (rc)
        arena_free(a);
    else
        *out = a;
    return rc;
}

void dray__arena_release(dray__staging *a)
{
    if (!a)
        return;
    pthread_mutex_lock(&a->lock);
    bool last = --a->references == 0;
    pthread_mutex_unlock(&a->lock);
    if (last)
        arena_free(a);
}

dray_region *dray__arena_region(const dray__staging *a)
{
    return a->region;
}

uint64_t dray__arena_slot_bytes(const dray__staging *a)
{
    return a->slot_bytes;
}

dray_region *dray__arena_take(dray__staging *a, uint64_t *at)
{
    dray_region *slot = NULL;
    pthread_mutex_lock(&a->lock);
    if (a->free_slots) {
        slot = a->free[--a->free_slots];
        a->references++;
    }
    pthread_mutex_unlock(&a->lock);
    if (slot)
        *at =
            (uint64_t)((uint8_t *)dray_region_base(slot) - (uint8_t *)dray_region_base(a->region));
    return slot;
}

bool dray__arena_has_free(dray__staging *a)
{
    pthread_mutex_lock(&a->lock);
    bool has = a->free_slots > 0;
    pthread_mutex_unlock(&a->lock);
    return has;
}

void dray__arena_give(dray__staging *a, dray_region *slot)
{
    pthread_mutex_lock(&a->lock);
    a->free[a->free_slots++] = slot;
    pthread_mutex_unlock(&a->lock);
    dray__arena_release(a);
}
