/* The functions that a holder of bytes calls for its queue. They find this host's keeper and those
 * of other hosts (keepers.h), and report new chunks, and objects to be dropped, to the controller.
 */
#include "base/error.h"
#include "base/hook.h"
#include "control/context.h"
#include "queue/client/client.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

/* ---- keepers --------------------------------------------------------------------------------- */

/* Asks the controller about a keeper. The answer's strings are allocated in `texts`. */
static int ask(dray_queue *queue, uint32_t number, dray__arena *texts, dray__keeper_told *out,
               dray_error *error)
{
    return dray__ask(queue->channel, DRAY__MSG_QUEUE_KEEPER_FIND, &dray__u32_fields, &number,
                     dray__context_deadline(queue->context, queue->timeout_ns), texts,
                     &dray__keeper_found_fields, out, error);
}

/* Sets the keeper that this client's chunks are put to. */
static int go_to(dray_queue *queue, const dray__keeper_told *own, dray_error *error)
{
    char *address = NULL;
    int rc = dray__keeper_key(own, "KEEPER_FIND", &queue->samples, error);
    if (!rc && own->path[0] && asprintf(&address, "unix:%s", own->path) < 0)
        rc = dray__nomem(error);
    if (rc)
        return rc;
    if (own->number != queue->holder.keeper_number || !queue->holder.keeper_known || own->path[0])
        dray__keeper_link_break(&queue->holder.keeper);
    if (own->path[0]) { /* else the keeper is the one that the coordinator named */
        free(queue->holder.keeper.address);
        queue->holder.keeper.address = address;
    }
    queue->holder.keeper_number = own->number;
    queue->holder.keeper_known = true;
    queue->keys = *dray__context_keys(queue->context);
    queue->keys.key = &queue->samples;
    queue->holder.keys = &queue->keys;
    return DRAY_OK;
}

/* Asks for the keeper of this client's chunks, and for the key of other hosts' data servers. */
static int settle(void *user, bool again, dray_error *error)
{
    dray_queue *queue = user;
    dray__keeper_told own;
    dray__arena texts = {0};
    if (!again && queue->holder.keeper_known)
        return DRAY_OK;
    int rc = ask(queue, DRAY__NONE, &texts, &own, error);
    while (rc == DRAY_ECLOSED && dray__queue_come_back(queue) == DRAY_OK)
        rc = ask(queue, DRAY__NONE, &texts, &own, error);
    if (!rc)
        rc = go_to(queue, &own, error);
    dray__arena_free(&texts);
    return rc;
}

/* Writes a keeper's endpoint to `out`. A keeper that listens at all addresses is on the
 * coordinator's host, and gets the address at which this process finds the coordinator. */
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
    dray__keeper_told found;
    dray__arena texts = {0};
    int rc = ask(user, number, &texts, &found, error);
    if (!rc)
        fill_address(user, found.endpoint, endpoint, size);
    dray__arena_free(&texts);
    return rc;
}

/* ---- this client's
 * chunks------------------------------------------------------------------------------ */

/* Tells the controller of a chunk that the client would add, or of objects. The controller may make
 * the chunk smaller, or answer with a spare chunk of the client's instead. give_up names a chunk
 * that the client gives up; NULL when there is none. */
static int tell_storage(dray_queue *queue, const dray__chunk_wish *wishes, uint32_t count,
                        const uint64_t *give_up, dray__stored *out, dray_error *error)
{
    const dray__storing message = {.keeper = queue->holder.keeper_number,
                                   .wishes = wishes,
                                   .wish_count = count,
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

/* Makes a chunk of the size that was reported to the controller, and puts it to the keeper. */
static int make_chunk(dray_queue *queue, const dray__chunk_wish *wish, dray_error *error)
{
    queue->holder.keeper.era = queue->era;
    int rc = dray__holder_chunk(&queue->holder, wish->id, wish->key, wish->size, error);
    if (rc)
        tell_storage(queue, NULL, 0, &wish->id, NULL, NULL);
    if (rc == DRAY_ECLOSED && queue->era && queue->refused_era == queue->era)
        rc =
            dray__fail(error, DRAY_EGONE,
                       "queue %s: the keeper of this host serves another coordinator", queue->name);
    else if (rc == DRAY_ECLOSED) /* the caller attaches again, and retries */
        queue->refused_era = queue->era;
    return rc;
}

/* Asks for the chunk that is wished for. What the controller gives instead may have been lost with
 * an earlier keeper: that chunk is given up. */
static int ask_chunk(dray_queue *queue, const dray__chunk_wish *wish, dray__stored *answer,
                     dray_error *error)
{
    uint64_t lost = 0;
    int rc;
    do {
        rc = tell_storage(queue, wish, 1, lost ? &lost : NULL, answer, error);
        dray__hook_step("told");
        lost = answer->given;
    } while (!rc && lost && !dray__storage_reuse(&queue->holder.storage, lost));
    return rc;
}

/* A chunk is reported to the controller before its memory is allocated and put to the keeper. So
 * when the client dies at any point, the controller has the keeper drop the chunk. The keeper takes
 * no chunk that was reported to an earlier controller. */
static int more(void *user, uint64_t bytes, dray_error *error)
{
    dray_queue *queue = user;
    dray__chunk_wish wish = {0};
    dray__stored answer = {0};
    int rc = settle(queue, false, error);
    if (!rc && queue->holder.keeper_number == DRAY__NONE)
        rc = dray__fail(error, DRAY_EUNSUPPORTED,
                        "queue %s: there is no keeper on this host to hold samples: start one, "
                        "dray keeper",
                        queue->name);
    if (!rc)
        rc = dray__storage_name(&wish.id, &wish.key, error);
    dray__storage_size(&queue->holder.storage, bytes, &wish.least, &wish.size);
    if (!rc)
        rc = ask_chunk(queue, &wish, &answer, error);
    if (rc || answer.given)
        return rc;
    wish.size = answer.size;
    return make_chunk(queue, &wish, error);
}

static int abandon(void *user, const dray__chunk_wish *objects, uint32_t count)
{
    return tell_storage(user, objects, count, NULL, NULL, NULL);
}

void dray__chunks_tell(dray_queue *queue)
{
    tell_storage(queue, NULL, 0, NULL, NULL, NULL);
}

const dray__holder_uses dray__queue_uses = {
    .more = more, .settle = settle, .find = find, .abandon = abandon};
