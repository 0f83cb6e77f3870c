/* The controller's side of a backend that is a store (backend.h). */
#include "base/error.h"
#include "queue/service.h"
#include "queue/stores.h"

#include <errno.h>
#include <stdlib.h>
#include <sys/random.h>

/* Where a store holds the bytes: a space of its own there, and who drops what is not needed. */
int dray__store_use(dray__served *q, dray_error *error)
{
    const dray__backend_kind *kind = NULL;
    const dray__settings *settings = &q->table->settings;
    int rc = dray__backend_find(settings->backend, &kind, error);
    if (rc || !kind)
        return rc;
    q->space = q->table->space;
    rc = dray__cleaner_new(kind, settings->backend_address, q->space, &q->cleaner, error);
    if (rc)
        return dray__fail_prefix(error, rc, "queue %s: ", q->table->name);
    q->table->drop = dray__cleaner_drop;
    q->table->user = q->cleaner;
    return DRAY_OK;
}

int dray__store_draw(const dray__controller *self, dray__table *table, dray_error *error)
{
    const dray__backend_kind *kind = NULL;
    const dray__settings *settings = &table->settings;
    int rc = dray__backend_find(settings->backend, &kind, error);
    if (rc || !kind)
        return rc;
    if (getrandom(&table->space, sizeof table->space, 0) != (ssize_t)sizeof table->space)
        return dray__fail_errno(error, errno, "getrandom");
    return dray__stores_note(self->folder, kind->name, settings->backend_address, table->space,
                             error);
}

int dray__store_former(const dray__controller *self, const dray__table *table, dray_error *error)
{
    const dray__settings *settings = &table->settings;
    uint64_t space = table->ledger->former_space;
    if (!space)
        return DRAY_OK;
    return dray__stores_note(self->folder, dray__backend_name(settings->backend),
                             settings->backend_address, space, error);
}

static bool is_used(void *user, uint64_t space)
{
    const dray__controller *self = user;
    for (const dray__served *q = self->queues; q; q = q->next)
        if (q->cleaner && q->space == space)
            return true;
    return false;
}

int dray__store_clean(dray__controller *self, dray_error *error)
{
    return dray__stores_clean(self->folder, is_used, self, error);
}

void dray__object_abandoned(dray__served *q, const dray__client *client, uint64_t id, uint64_t size)
{
    if (id >> 32 == client->id && size <= DRAY__OBJECT_MAX &&
        !dray__idmap_get(&q->table->chunks, id))
        dray__cleaner_drop(q->cleaner, 0, id, size);
}

/* What a client wrote and never committed. */
void dray__store_sweep(dray__served *q, uint32_t client)
{
    const dray__idmap *objects = &q->table->chunks;
    uint64_t *keep = malloc((objects->count + 1) * sizeof *keep);
    uint32_t count = 0;
    for (size_t i = 0; keep && i < objects->capacity; i++)
        if (objects->entries[i].key >> 32 == client)
            keep[count++] = objects->entries[i].key;
    if (keep) /* else it goes with the queue */
        dray__cleaner_sweep(q->cleaner, client, keep, count);
}
