/* Columns as objects of a store (holder.h). */
#include "queue/storage/holder.h"

#include "base/arena.h"
#include "base/array.h"
#include "base/clock.h"
#include "base/error.h"

#include <stdlib.h>
#include <unistd.h>

#define GIVEN_UP_MAX 65536u

/* Reports the objects that were given up. Only the controller knows whether one was committed after
 * all; it drops the others. */
static void tell_given_up(dray__values_holder *self)
{
    if (self->given_up_count && self->uses->abandon &&
        self->uses->abandon(self->user, self->given_up, self->given_up_count) == DRAY_OK)
        self->given_up_count = 0;
}

static void leave(dray__values_holder *self)
{
    if (self->store && self->storage.pid == getpid())
        tell_given_up(self);
    if (self->store)
        self->store->kind->close(self->store);
    self->store = NULL;
    free(self->given_up);
    self->given_up = NULL;
    self->given_up_count = 0;
    self->given_up_capacity = 0;
}

/* Adds an object to the list. Objects that do not fit it are dropped when the queue ends. */
static void give_up(dray__values_holder *self, uint64_t object, uint64_t size)
{
    if (self->given_up_count < GIVEN_UP_MAX &&
        dray__append(&self->given_up, sizeof *self->given_up, self->given_up_count,
                     &self->given_up_capacity))
        self->given_up[self->given_up_count++] = (dray__chunk_wish){.id = object, .size = size};
}

static void done(dray__values_holder *self, const dray__storage_room *room, bool committed,
                 bool maybe)
{
    (void)maybe;
    if (!committed)
        give_up(self, room->object, room->offset);
}

static int put(dray__values_holder *self, const dray__values *v, dray__extent *extent,
               dray__storage_room *room, dray_error *error)
{
    if (self->objects == UINT32_MAX)
        return dray__fail(error, DRAY_EFULL, "queue %s: no more than %u objects of one client",
                          self->queue, UINT32_MAX);
    void *head = v->head ? malloc(v->head) : NULL;
    if (v->head && !head)
        return dray__nomem(error);
    if (head)
        dray__values_head(v, head);
    const struct iovec parts[2] = {{head, v->head}, {(void *)(uintptr_t)v->values, v->bytes}};
    uint64_t object = (uint64_t)self->owner << 32 | ++self->objects;
    tell_given_up(self);
    int rc = self->store->kind->put(self->store, object, parts, 2,
                                    dray__deadline(self->patience_ns), error);
    free(head);
    if (rc) {
        give_up(self, object, v->room);
        return dray__fail_prefix(error, rc, "column %s: ", v->column);
    }
    *extent = (dray__extent){.chunk = object, .values = v->head, .bytes = v->bytes};
    *room = (dray__storage_room){.object = object, .offset = v->room};
    return DRAY_OK;
}

static int get(dray__values_holder *self, dray__range *ranges, uint32_t count, int64_t deadline_ns,
               dray_error *error)
{
    return self->store->kind->get(self->store, ranges, count, deadline_ns, error);
}

const dray__holder_kind dray__holder_objects = {
    .put = put,
    .done = done,
    .get = get,
    .close = leave,
    .lost = "; it was restarted without its data, or evicts keys"};
