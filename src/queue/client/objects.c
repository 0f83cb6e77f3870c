/* Columns as objects of a store. */
#include "base/arena.h"
#include "base/clock.h"
#include "base/error.h"
#include "queue/client/bytes.h"

#include <stdlib.h>
#include <unistd.h>

#define GIVEN_UP_MAX 65536u
#define SWEEP_NS (2 * DRAY__SECOND)

int dray__bytes_open(dray_queue *queue, uint32_t former, const dray__welcome *welcome,
                     dray_error *error)
{
    const dray__backend_kind *kind = NULL;
    if (queue->store && former) /* what was put there after the new controller had cleaned it */
        queue->store->kind->sweep(queue->store, former, NULL, 0, dray__deadline(SWEEP_NS), NULL);
    if (queue->store)
        queue->store->kind->close(queue->store);
    queue->store = NULL;
    queue->given_up_count = 0; /* what was written as who we were, the controller drops */
    queue->storage.capacity = welcome->capacity_bytes;
    int rc = dray__backend_find(welcome->backend, &kind, error);
    if (rc || !kind)
        return rc;
    queue->bytes = &dray__bytes_objects;
    return kind->open(welcome->address, welcome->space, &queue->store, error);
}

/* Whether what was given up was committed after all, only the controller knows: it drops the rest.
 */
static void tell_given_up(dray_queue *queue)
{
    if (!queue->given_up_count)
        return;
    dray__reply reply;
    const dray__storing message = {.wishes = queue->given_up, .wish_count = queue->given_up_count};
    if (dray__queue_command(queue, DRAY__MSG_QUEUE_CHUNK, &dray__storing_fields, &message, &reply,
                            NULL))
        return;
    dray__queue_read_dropped(queue, &reply.payload);
    queue->given_up_count = 0;
}

static void leave(dray_queue *queue)
{
    if (!queue->store)
        return;
    if (queue->storage.pid == getpid())
        tell_given_up(queue);
    queue->store->kind->close(queue->store);
    queue->store = NULL;
    free(queue->given_up);
    queue->given_up = NULL;
    queue->given_up_count = 0;
    queue->given_up_capacity = 0;
}

/* ---- writing --------------------------------------------------------------------------------- */

/* What finds no place is dropped when the queue ends. */
static void give_up(dray_queue *queue, uint64_t object, uint64_t size)
{
    if (queue->given_up_count < GIVEN_UP_MAX &&
        dray__append(&queue->given_up, sizeof *queue->given_up, queue->given_up_count,
                     &queue->given_up_capacity))
        queue->given_up[queue->given_up_count++] = (dray__chunk_wish){.id = object, .size = size};
}

static void done(dray_queue *queue, const dray__storage_room *room, bool committed, bool maybe)
{
    (void)maybe;
    if (!committed)
        give_up(queue, room->object, room->offset);
}

static int put(dray_queue *queue, const dray__values *v, dray__extent *extent,
               dray__storage_room *room, dray_error *error)
{
    if (queue->objects == UINT32_MAX)
        return dray__fail(error, DRAY_EFULL, "queue %s: no more than %u objects of one client",
                          queue->name, UINT32_MAX);
    uint64_t *offsets = v->head ? calloc(1, v->head) : NULL;
    if (v->head && !offsets)
        return dray__nomem(error);
    const uint8_t *values = v->column->values;
    if (v->head)
        dray__values_offsets(v, offsets);
    if (v->head && v->bytes)
        values += v->column->offsets[0] * v->unit;
    struct iovec parts[2] = {{offsets, v->head}, {(void *)(uintptr_t)values, v->bytes}};
    uint64_t object = (uint64_t)queue->id << 32 | ++queue->objects;
    int64_t deadline = dray__context_deadline(queue->context, queue->timeout_ns);
    tell_given_up(queue);
    int rc = queue->store->kind->put(queue->store, object, parts, 2, deadline, error);
    free(offsets);
    if (rc) {
        give_up(queue, object, v->room);
        return dray__fail_prefix(error, rc, "column %s: ", v->column->name);
    }
    *extent = (dray__extent){.chunk = object, .values = v->head, .bytes = v->bytes};
    *room = (dray__storage_room){.object = object, .offset = v->room};
    return DRAY_OK;
}

static int get(dray_queue *queue, dray__range *ranges, uint32_t count, int64_t deadline_ns,
               dray_error *error)
{
    return queue->store->kind->get(queue->store, ranges, count, deadline_ns, error);
}

const dray__bytes dray__bytes_objects = {.put = put,
                                         .done = done,
                                         .get = get,
                                         .close = leave,
                                         .lost =
                                             "; it was restarted without its data, or evicts keys"};
