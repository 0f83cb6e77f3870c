/* The controller's side of a backend that is a store (backend.h). */
#include "base/arena.h"
#include "base/error.h"
#include "queue/server/service.h"
#include "queue/storage/stores.h"

#include <dray/queue.h>
#include <errno.h>
#include <stdlib.h>
#include <string.h>
#include <sys/random.h>

/* Drops objects that the client wrote and may not have committed. Objects that the table does not
 * know were not committed. */
static int drop_abandoned(dray__served *q, dray__client *client, const dray__storing *m,
                          dray__stored *out, dray_error *error)
{
    (void)out, (void)error;
    for (uint32_t i = 0; i < m->wish_count; i++) {
        const dray__chunk_wish *object = &m->wishes[i];
        if (object->id >> 32 == client->id && object->size <= DRAY__OBJECT_MAX &&
            !dray__idmap_get(&q->table->chunks, object->id))
            dray__cleaner_drop(q->cleaner, 0, object->id, object->size);
    }
    return DRAY_OK;
}

/* Drops the objects that a client wrote and never committed. */
static void sweep(dray__served *q, uint32_t client)
{
    const dray__idmap *objects = &q->table->chunks;
    uint64_t *keep = malloc((objects->count + 1) * sizeof *keep);
    uint32_t count = 0;
    for (size_t i = 0; keep && i < objects->capacity; i++)
        if (objects->entries[i].key >> 32 == client)
            keep[count++] = objects->entries[i].key;
    if (keep) /* else they are dropped with the queue */
        dray__cleaner_sweep(q->cleaner, client, keep, count);
}

/* Prepares a queue whose bytes are in a store: it gets a space of its own there, and a cleaner that
 * drops unused objects. */
int dray__store_use(dray__served *q, dray_error *error)
{
    static const dray__served_bytes objects = {drop_abandoned, sweep};
    const dray__backend_kind *kind = NULL;
    const dray__settings *settings = &q->table->settings;
    int rc = dray__backend_find(settings->backend, &kind, error);
    if (rc || !kind)
        return rc;
    q->bytes = &objects;
    q->space = q->table->space;
    rc = dray__cleaner_new(kind, settings->backend_address, q->space, &q->cleaner, error);
    if (rc)
        return dray__fail_prefix(error, rc, "queue %s: ", q->table->name);
    q->table->drop = dray__cleaner_drop;
    q->table->user = q->cleaner;
    return DRAY_OK;
}

/* ---- the list of stores---------------------------------------------------------------------- */

static int add_store(dray__controller *self, const char *text, dray_error *error)
{
    const char *colon = strchr(text, ':');
    const dray__backend_kind *kind =
        colon ? dray__backend_named(text, (size_t)(colon - text)) : NULL;
    dray__backend *probe;
    if (!kind)
        return dray__fail(error, DRAY_EINVALID, "store '%.200s': " DRAY__STORE_WORDS "expected",
                          text);
    int rc = kind->open(colon + 1, 0, &probe, error); /* does not connect */
    if (rc)
        return dray__fail_prefix(error, rc, "store '%.200s': ", text);
    kind->close(probe);
    char **at = dray__append(&self->stores, sizeof *at, self->store_count, &self->store_capacity);
    if (!at || !(*at = strdup(text)))
        return dray__nomem(error);
    self->store_count++;
    return DRAY_OK;
}

int dray__store_list(dray__controller *self, const char *const *stores, dray_error *error)
{
    int32_t backend = DRAY_BACKEND_BUILTIN;
    const char *address = NULL, *own = getenv("DRAY_QUEUE_BACKEND");
    int rc = DRAY_OK;
    for (; !rc && stores && *stores; stores++)
        rc = add_store(self, *stores, error);
    if (!rc)
        rc = dray__backend_default(&backend, &address, error);
    return rc || backend == DRAY_BACKEND_BUILTIN ? rc : add_store(self, own, error);
}

void dray__store_list_free(dray__controller *self)
{
    for (uint32_t i = 0; i < self->store_count; i++)
        free(self->stores[i]);
    free(self->stores);
}

/* Returns how many stores of a kind are in the list. *only is the address of the last one. */
static uint32_t count_listed(const dray__controller *self, const char *kind, const char **only)
{
    size_t length = strlen(kind);
    uint32_t count = 0;
    for (uint32_t i = 0; i < self->store_count; i++) {
        const char *store = self->stores[i];
        if (strncmp(store, kind, length) != 0 || store[length] != ':')
            continue;
        *only = store + length + 1;
        count++;
    }
    return count;
}

static bool is_listed(void *user, const char *kind, const char *address)
{
    const dray__controller *self = user;
    size_t length = strlen(kind);
    for (uint32_t i = 0; i < self->store_count; i++)
        if (strncmp(self->stores[i], kind, length) == 0 && self->stores[i][length] == ':' &&
            strcmp(self->stores[i] + length + 1, address) == 0)
            return true;
    return false;
}

int dray__store_settle(const dray__controller *self, dray__settings *settings, const char *queue,
                       dray_error *error)
{
    const dray__backend_kind *kind = NULL;
    const char *only = NULL;
    int rc = dray__backend_find(settings->backend, &kind, error);
    if (rc || !kind)
        return rc;
    if (settings->backend_address[0]) {
        if (is_listed((void *)(uintptr_t)self, kind->name, settings->backend_address))
            return DRAY_OK;
        return dray__fail(error, DRAY_EPERM,
                          "queue %s: %s at %.300s is no store of this coordinator, which opens "
                          "those of its own list alone (dray serve --store %s:ADDRESS)",
                          queue, kind->name, settings->backend_address, kind->name);
    }
    uint32_t count = count_listed(self, kind->name, &only);
    if (count != 1)
        return dray__fail(
            error, DRAY_EINVALID,
            "queue %s: backend %s: its address is missing, and the coordinator's list "
            "has %u of them (dray serve --store %s:ADDRESS)",
            queue, kind->name, count, kind->name);
    settings->backend_address = only;
    return DRAY_OK;
}

/* ---- their spaces ---------------------------------------------------------------------------- */

int dray__store_draw(const dray__controller *self, dray__table *table, dray_error *error)
{
    const dray__backend_kind *kind = NULL;
    const dray__settings *settings = &table->settings;
    int rc = dray__backend_find(settings->backend, &kind, error);
    if (rc || !kind)
        return rc;
    if (getrandom(&table->space, sizeof table->space, 0) != (ssize_t)sizeof table->space)
        return dray__fail_errno(error, errno, "getrandom");
    return dray__stores_note(self->cleaned, kind->name, settings->backend_address, table->space,
                             error);
}

int dray__store_former(const dray__controller *self, const dray__table *table, dray_error *error)
{
    const dray__settings *settings = &table->settings;
    uint64_t space = table->ledger->former_space;
    if (!space)
        return DRAY_OK;
    return dray__stores_note(self->cleaned, dray__backend_name(settings->backend),
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
    return dray__stores_clean(self->cleaned, is_used, is_listed, self, error);
}
