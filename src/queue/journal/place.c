#include "queue/journal/place.h"

#include "base/clock.h"
#include "base/error.h"

#define CHUNK_MIN (UINT64_C(256) << 10) /* each chunk is twice as large as the last, up to: */
#define CHUNK_MAX (UINT64_C(16) << 20)
#define PUT_PATIENCE (30 * DRAY__SECOND)
#define GET_PATIENCE (10 * DRAY__SECOND) /* after which it is tried again */

void dray__place_close(dray__placer *placer)
{
    dray__storage *storage = &placer->holder.storage;
    dray__storage_set_aside(storage);
    while (storage->chunks) {
        uint64_t id = storage->chunks->id;
        dray__storage_dropped(storage, id);
        if (placer->filled)
            placer->filled(placer->user, id);
    }
}

static int more(void *user, uint64_t bytes, dray_error *error)
{
    dray__placer *placer = user;
    uint64_t id, key, size = placer->size ? 2 * placer->size : CHUNK_MIN;
    size = size > CHUNK_MAX ? CHUNK_MAX : size;
    size = size < bytes ? dray__round_up(bytes, DRAY__ALIGN) : size;
    dray__place_close(placer);
    int rc = dray__storage_name(&id, &key, error);
    if (!rc)
        rc = dray__holder_chunk(&placer->holder, id, key, size, error);
    if (rc)
        return rc;
    placer->size = size;
    rc = placer->made(placer->user, id, key, size, error);
    if (rc)
        dray__storage_lose(&placer->holder.storage);
    return rc;
}

static int find(void *user, uint32_t keeper, char *endpoint, size_t size, dray_error *error)
{
    const dray__placer *placer = user;
    return dray__keepers_endpoint(placer->keepers, keeper, endpoint, size, error);
}

int dray__placer_open(dray__placer *placer, const dray__settings *settings, uint64_t space,
                      const char *keeper_path, uint64_t era, dray_error *error)
{
    static const dray__holder_uses uses = {.more = more, .find = find};
    *placer = (dray__placer){0};
    int rc = dray__holder_init(&placer->holder, &uses, placer, keeper_path, DRAY__KEEPER_PATIENCE,
                               error);
    placer->holder.keeper_known = true; /* keeper 0, the coordinator's own */
    placer->holder.keeper.era = era;
    placer->holder.patience_ns = PUT_PATIENCE;
    placer->holder.storage.capacity = INT64_MAX;
    if (!rc)
        rc = dray__holder_open(&placer->holder, settings->backend, settings->backend_address, space,
                               error);
    return rc;
}

void dray__placer_free(dray__placer *placer)
{
    dray__holder_free(&placer->holder);
}

void dray__placer_reach(dray__placer *placer, dray__keepers *keepers)
{
    placer->keepers = keepers;
    placer->holder.keys = &keepers->keys;
}

int dray__place_column(dray__placer *placer, dray__reader *r, dray__new_column *column,
                       uint64_t items, dray_error *error)
{
    dray__values_holder *holder = &placer->holder;
    uint64_t head = column->spec.ragged ? (items + 1) * 8 : 0, bytes = column->extent.bytes;
    r->failed |= bytes > r->size || head > r->size;
    const void *offsets = dray__get_bytes(r, head), *values = dray__get_bytes(r, bytes);
    if (r->failed)
        return dray__fail(error, DRAY_EFORMAT, "column %s: its bytes are missing", column->name);
    head = dray__round_up(head, DRAY__ALIGN);
    const dray__values of = {.column = column->name,
                             .offsets = offsets,
                             .items = items,
                             .values = values,
                             .head = head,
                             .bytes = bytes,
                             .room = head + bytes};
    dray__storage_room room;
    int rc = holder->kind->put(holder, &of, &column->extent, &room, error);
    if (!rc)
        holder->kind->done(holder, &room, true, false);
    return rc;
}

int dray__placer_get(dray__placer *placer, dray__range *range, dray_error *error)
{
    dray__values_holder *holder = &placer->holder;
    int rc = holder->kind->get(holder, range, 1, dray__deadline(GET_PATIENCE), error);
    if (!rc && range->lost)
        rc = dray__fail(error, DRAY_EGONE, "bytes of %016llx are gone",
                        (unsigned long long)range->object);
    return rc;
}
