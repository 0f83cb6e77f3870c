/* Columns in chunks of shared memory, which keepers hold (holder.h). */
#include "queue/storage/holder.h"

#include "base/error.h"
#include "base/hook.h"
#include "queue/storage/copy.h"

#include <string.h>
#include <unistd.h>

int dray__holder_chunk(dray__values_holder *self, uint64_t id, uint64_t key, uint64_t size,
                       dray_error *error)
{
    dray__written *chunk = NULL;
    int fd = -1, rc = dray__storage_make(id, key, size, &chunk, &fd, error);
    if (rc)
        return rc;
    rc = dray__keeper_put(&self->keeper, id, key, size, fd, error);
    close(fd);
    dray__hook_step("kept");
    if (rc)
        dray__storage_unmake(chunk);
    else
        dray__storage_add(&self->storage, chunk);
    return rc;
}

static int take_room(dray__values_holder *self, uint64_t bytes, dray__storage_room *out,
                     dray_error *error)
{
    if (dray__storage_take(&self->storage, bytes, out))
        return DRAY_OK;
    dray__storage_set_aside(&self->storage); /* the chunk given back may be the current one */
    int rc = self->uses->more(self->user, bytes, error);
    if (!rc && !dray__storage_take(&self->storage, bytes, out))
        rc = dray__fail(error, DRAY_EINTERNAL, "no room for %llu bytes in a new chunk",
                        (unsigned long long)bytes);
    return rc;
}

static int put(dray__values_holder *self, const dray__values *v, dray__extent *extent,
               dray__storage_room *room, dray_error *error)
{
    int rc = take_room(self, v->room, room, error);
    if (rc)
        return rc;
    *extent = (dray__extent){.chunk = room->chunk->id,
                             .values = room->offset + v->head,
                             .bytes = v->bytes,
                             .offsets = v->head ? room->offset : 0};
    if (v->head)
        dray__values_head(v, room->at);
    if (v->bytes)
        dray__copy_away(room->at + v->head, v->values, v->bytes);
    dray__hook_step("wrote");
    return DRAY_OK;
}

static void done(dray__values_holder *self, const dray__storage_room *room, bool committed,
                 bool maybe)
{
    dray__storage_done(&self->storage, room, !committed && !maybe);
}

static int ahead(dray__values_holder *self, const uint64_t *rooms, uint32_t count, uint64_t *bytes,
                 dray_error *error)
{
    return dray__storage_ahead(&self->storage, rooms, count, bytes, error);
}

/* A keeper that was started anew may have the number of the one before, and has none of its
 * chunks. */
static bool is_kept(dray__values_holder *self)
{
    int rc = DRAY_EGONE; /* as it is of a closed chunk that was dropped */
    for (const dray__written *w = self->storage.chunks; w && rc == DRAY_EGONE; w = w->next)
        rc = dray__keeper_has(&self->keeper, w->id, NULL);
    return rc == DRAY_OK;
}

/* Something is gone. It may be our keeper, and then its chunks are not used again. It may be one
 * chunk, or the rows of a commit: then the other chunks stay, and the next values go to another
 * one. */
static int move(dray__values_holder *self, dray_error *error)
{
    uint32_t before = self->keeper_number;
    int rc = self->uses->settle(self->user, true, error);
    if (rc)
        return rc;
    if (self->keeper_number == before && is_kept(self))
        dray__storage_set_aside(&self->storage);
    else
        dray__storage_lose(&self->storage);
    return DRAY_OK;
}

static int prepare(dray__values_holder *self, dray_error *error)
{
    return self->keeper_known ? DRAY_OK : self->uses->settle(self->user, false, error);
}

static bool is_elsewhere(const dray__values_holder *self, uint32_t keeper)
{
    return !self->keeper_known || keeper != self->keeper_number;
}

static int copy_range(dray__values_holder *self, const dray__range *range, dray_error *error)
{
    dray__mapping *mapping = NULL;
    int rc = dray__mapping_get(&self->keeper, range->object, &mapping, error);
    if (rc)
        return rc;
    if (range->offset > mapping->size || range->bytes > mapping->size - range->offset)
        rc = dray__fail(error, DRAY_EFORMAT, "chunk %016llx is shorter than was said",
                        (unsigned long long)range->object);
    else
        memcpy(range->at, mapping->base + range->offset, range->bytes);
    dray__mapping_put(mapping);
    return rc;
}

static int get(dray__values_holder *self, dray__range *ranges, uint32_t count, int64_t deadline_ns,
               dray_error *error)
{
    int rc = prepare(self, error);
    if (!rc && self->keys && is_elsewhere(self, ranges->keeper)) {
        if (!self->distant)
            rc = dray__distant_new(self->keys, self->uses->find, self->user, &self->distant, error);
        return rc ? rc : dray__distant_get(self->distant, ranges, count, deadline_ns, error);
    }
    for (uint32_t i = 0; i < count && !rc; i++)
        rc = copy_range(self, &ranges[i], error);
    return rc;
}

const dray__holder_kind dray__holder_chunks = {.put = put,
                                               .done = done,
                                               .ahead = ahead,
                                               .move = move,
                                               .prepare = prepare,
                                               .is_elsewhere = is_elsewhere,
                                               .get = get,
                                               .lost = ", which ended"};
