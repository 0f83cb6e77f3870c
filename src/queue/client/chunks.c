/* Columns in chunks of shared memory: ours, which the controller knows of and a keeper holds; which
 * keeper that is (homes.h), and reading what those of other hosts hold. */
#include "base/error.h"
#include "base/hook.h"
#include "control/context.h"
#include "queue/client/bytes.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

/* ---- whose they are -------------------------------------------------------------------------- */

/* `texts` has those of the answer. */
static int ask(dray_queue *queue, uint32_t number, dray__arena *texts, dray__home_told *out,
               dray_error *error)
{
    return dray__ask(queue->channel, DRAY__MSG_QUEUE_HOME_FIND, &dray__u32_fields, &number,
                     dray__context_deadline(queue->context, queue->timeout_ns), texts,
                     &dray__home_found_fields, out, error);
}

/* Our chunks go to this keeper. */
static int settle(dray_queue *queue, const dray__home_told *own, dray_error *error)
{
    char *address = NULL;
    int rc = dray__home_key(own, "HOME_FIND", &queue->samples, error);
    if (!rc && own->path[0] && asprintf(&address, "unix:%s", own->path) < 0)
        rc = dray__nomem(error);
    if (rc)
        return rc;
    if (own->number != queue->home || !queue->at_home || own->path[0])
        dray__keeper_link_break(&queue->keeper);
    if (own->path[0]) { /* else it is the one that the coordinator named */
        free(queue->keeper.address);
        queue->keeper.address = address;
    }
    queue->home = own->number;
    queue->at_home = true;
    queue->keys = *dray__context_keys(queue->context);
    queue->keys.key = &queue->samples;
    return DRAY_OK;
}

/* Learns where our chunks go, and the key of other hosts' data servers; known: unless it is known
 * already. */
static int queue_find_home(dray_queue *queue, bool known, dray_error *error)
{
    dray__home_told own;
    dray__arena texts = {0};
    if (known && queue->at_home)
        return DRAY_OK;
    int rc = ask(queue, DRAY__NONE, &texts, &own, error);
    while (rc == DRAY_ECLOSED && dray__queue_come_back(queue) == DRAY_OK)
        rc = ask(queue, DRAY__NONE, &texts, &own, error);
    if (!rc)
        rc = settle(queue, &own, error);
    dray__arena_free(&texts);
    return rc;
}

/* Our keeper is gone, and another one may be there: chunks of the past are not used again. */
static int queue_move(dray_queue *queue, dray_error *error)
{
    int rc = queue_find_home(queue, false, error);
    if (!rc)
        dray__storage_lose(&queue->storage);
    return rc;
}

/* Not in a chunk that can be mapped here? */
static bool queue_is_elsewhere(const dray_queue *queue, uint32_t number)
{
    return !queue->at_home || number != queue->home;
}

/* A keeper that listens at all addresses of the coordinator's host is where that is found. */
static void fill_address(const dray_queue *queue, const char *endpoint, char *out, size_t size)
{
    const char *port = strrchr(endpoint, ':');
    struct sockaddr_storage other;
    char host[DRAY__STREAM_ADDRESS] = "127.0.0.1";
    bool any = strncmp(endpoint, "tcp:0.0.0.0:", 12) == 0 || strncmp(endpoint, "tcp:[::]:", 9) == 0;
    if (!any) {
        snprintf(out, size, "%s", endpoint);
        return;
    }
    if (dray__context_find(queue->context, true, &other))
        dray__address_host(&other, host, sizeof host, NULL);
    snprintf(out, size, strchr(host, ':') ? "tcp:[%s]%s" : "tcp:%s%s", host, port);
}

static int find(void *user, uint32_t number, char *endpoint, size_t size, dray_error *error)
{
    dray__home_told found;
    dray__arena texts = {0};
    int rc = ask(user, number, &texts, &found, error);
    if (!rc)
        fill_address(user, found.endpoint, endpoint, size);
    dray__arena_free(&texts);
    return rc;
}

/* As a backend's get, of chunks of other hosts. */
static int queue_get_remote(dray_queue *queue, dray__range *ranges, uint32_t count,
                            int64_t deadline_ns, dray_error *error)
{
    int rc = queue_find_home(queue, true, error);
    if (!rc && !queue->distant)
        rc = dray__distant_new(&queue->keys, find, queue, &queue->distant, error);
    return rc ? rc : dray__distant_get(queue->distant, ranges, count, deadline_ns, error);
}

/* ---- ours ------------------------------------------------------------------------------------ */

/* Tells the controller of a chunk that we would add, which it may replace by one of ours that is
 * free, or make smaller, and of one that we give up; NULL: of none. */
static int tell_storage(dray_queue *queue, const dray__chunk_wish *add, const uint64_t *give_up,
                        dray__stored *out, dray_error *error)
{
    const dray__storing message = {.home = queue->home,
                                   .wishes = add,
                                   .wish_count = add != NULL,
                                   .given_up = give_up,
                                   .given_up_count = give_up != NULL};
    dray__reply reply;
    int rc = dray__queue_command(queue, DRAY__MSG_QUEUE_CHUNK, &dray__storing_fields, &message,
                                 &reply, error);
    if (rc)
        return rc;
    dray__queue_read_dropped(queue, &reply.payload);
    dray__stored answer;
    dray__get_fields(&reply.payload, NULL, &dray__stored_fields, &answer);
    if (out)
        *out = answer;
    return dray__reader_finish(&reply.payload, "QUEUE_CHUNK", error);
}

/* Memory of the size that the controller knows of, for the keeper. */
static int make_chunk(dray_queue *queue, const dray__chunk_wish *wish, dray_error *error)
{
    dray__written *chunk = NULL;
    int fd = -1, rc = dray__storage_make(wish->id, wish->key, wish->size, &chunk, &fd, error);
    if (!rc) {
        queue->keeper.era = queue->era;
        rc = dray__keeper_put(&queue->keeper, chunk->id, chunk->key, chunk->size, fd, error);
        close(fd);
    }
    if (rc)
        tell_storage(queue, NULL, &wish->id, NULL, NULL);
    if (rc == DRAY_ECLOSED && queue->era && queue->refused_era == queue->era)
        rc =
            dray__fail(error, DRAY_EGONE,
                       "queue %s: the keeper of this host serves another coordinator", queue->name);
    else if (rc == DRAY_ECLOSED) /* the caller comes back, and tries again */
        queue->refused_era = queue->era;
    dray__hook_step("kept");
    if (rc && chunk)
        dray__storage_unmake(chunk);
    else if (!rc)
        dray__storage_add(&queue->storage, chunk);
    return rc;
}

/* The controller learns of a chunk before there is memory for it, and before the keeper gets it:
 * whenever we die, one of them forgets it for both. The keeper takes none that was told to a
 * controller of the past. */
static int add_chunk(dray_queue *queue, uint64_t bytes, dray_error *error)
{
    dray__chunk_wish wish = {0};
    dray__stored answer = {0};
    int rc = queue_find_home(queue, true, error);
    if (!rc && queue->home == DRAY__NONE)
        rc = dray__fail(error, DRAY_EUNSUPPORTED,
                        "queue %s: there is no keeper on this host to hold samples: start one, "
                        "dray keeper",
                        queue->name);
    if (!rc)
        rc = dray__storage_name(&wish.id, &wish.key, error);
    dray__storage_size(&queue->storage, bytes, &wish.least, &wish.size);
    if (!rc)
        rc = tell_storage(queue, &wish, NULL, &answer, error);
    dray__hook_step("told");
    if (!rc && answer.given && !dray__storage_reuse(&queue->storage, answer.given))
        rc = dray__fail(error, DRAY_EINTERNAL, "queue %s: chunk %016llx is none of ours",
                        queue->name, (unsigned long long)answer.given);
    if (rc || answer.given)
        return rc;
    wish.size = answer.size;
    return make_chunk(queue, &wish, error);
}

static int take_room(dray_queue *queue, uint64_t bytes, dray__storage_room *out, dray_error *error)
{
    if (dray__storage_take(&queue->storage, bytes, out))
        return DRAY_OK;
    dray__storage_set_aside(&queue->storage); /* it may be what is given back */
    int rc = add_chunk(queue, bytes, error);
    if (!rc && !dray__storage_take(&queue->storage, bytes, out))
        rc = dray__fail(error, DRAY_EINTERNAL, "no room for %llu bytes in a new chunk",
                        (unsigned long long)bytes);
    return rc;
}

static int put(dray_queue *queue, const dray__values *v, dray__extent *extent,
               dray__storage_room *room, dray_error *error)
{
    int rc = take_room(queue, v->room, room, error);
    if (rc)
        return rc;
    *extent = (dray__extent){
        .chunk = room->chunk->id, .values = room->offset + v->head, .bytes = v->bytes};
    const uint8_t *values = v->column->values;
    if (v->head) {
        extent->offsets = room->offset;
        dray__values_offsets(v, (uint64_t *)(void *)room->at);
        values = v->bytes ? values + v->column->offsets[0] * v->unit : values;
    }
    if (v->bytes)
        memcpy(room->at + v->head, values, v->bytes);
    dray__hook_step("wrote");
    return DRAY_OK;
}

static void done(dray_queue *queue, const dray__storage_room *room, bool committed, bool maybe)
{
    dray__storage_done(&queue->storage, room, !committed && !maybe);
}

static int ahead(dray_queue *queue, const uint64_t *rooms, uint32_t count, uint64_t *bytes,
                 dray_error *error)
{
    return dray__storage_ahead(&queue->storage, rooms, count, bytes, error);
}

static int prepare(dray_queue *queue, dray_error *error)
{
    return queue_find_home(queue, true, error);
}

void dray__chunks_tell(dray_queue *queue)
{
    if (dray__storage_has_news(&queue->storage))
        tell_storage(queue, NULL, NULL, NULL, NULL);
}

const dray__bytes dray__bytes_chunks = {.put = put,
                                        .done = done,
                                        .ahead = ahead,
                                        .move = queue_move,
                                        .prepare = prepare,
                                        .is_elsewhere = queue_is_elsewhere,
                                        .get = queue_get_remote,
                                        .holder = "the keeper of another host",
                                        .lost = ", which ended"};
