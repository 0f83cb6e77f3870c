/* The functions that both kinds of holders share (holder.h). */
#include "queue/storage/holder.h"

#include "base/clock.h"

#include <string.h>
#include <unistd.h>

#define SWEEP_NS (2 * DRAY__SECOND)

void dray__values_head(const dray__values *v, void *to)
{
    uint8_t *at = to;
    uint64_t offset;
    for (uint64_t i = 0; i <= v->items; i++, at += sizeof offset) {
        memcpy(&offset, (const uint8_t *)v->offsets + i * sizeof offset, sizeof offset);
        offset -= v->first;
        memcpy(at, &offset, sizeof offset);
    }
    memset(at, 0, v->head - (v->items + 1) * sizeof offset);
}

int dray__holder_init(dray__values_holder *holder, const dray__holder_uses *uses, void *user,
                      const char *keeper_path, int64_t patience_ns, dray_error *error)
{
    *holder = (dray__values_holder){.kind = &dray__holder_chunks,
                                    .uses = uses,
                                    .user = user,
                                    .name = "the keeper of another host",
                                    .patience_ns = patience_ns,
                                    .storage = {.pid = getpid()}};
    return dray__keeper_link_init(&holder->keeper, keeper_path, patience_ns, error);
}

static void close_kind(dray__values_holder *holder)
{
    if (holder->kind->close)
        holder->kind->close(holder);
}

void dray__holder_free(dray__values_holder *holder)
{
    if (!holder->kind) /* dray__holder_init was not called */
        return;
    close_kind(holder);
    dray__distant_free(holder->distant);
    dray__keeper_link_free(&holder->keeper);
    dray__storage_free(&holder->storage);
}

int dray__holder_open(dray__values_holder *holder, int32_t backend, const char *address,
                      uint64_t space, dray_error *error)
{
    const dray__backend_kind *kind = NULL;
    holder->given_up_count = 0; /* objects that were put under the previous client's number are
                                 * dropped by the controller */
    close_kind(holder);
    int rc = dray__backend_find(backend, &kind, error);
    if (rc || !kind)
        return rc;
    holder->kind = &dray__holder_objects;
    holder->name = kind->name;
    return kind->open(address, space, &holder->store, error);
}

void dray__holder_sweep(dray__values_holder *holder, uint32_t owner)
{
    if (holder->store)
        holder->store->kind->sweep(holder->store, owner, NULL, 0, dray__deadline(SWEEP_NS), NULL);
}
