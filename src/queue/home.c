/* The client's end of homes (homes.h): which keeper its own chunks go to, and reading what other
 * hosts keep. */
#include "base/clock.h"
#include "base/error.h"
#include "control/context.h"
#include "queue/client.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { TEXT_MAX = 4096 };

typedef struct home {
    uint32_t number;
    char *path, *endpoint;
    dray__tls_key key;
} home;

static void home_free(home *h)
{
    free(h->path);
    free(h->endpoint);
    dray__forget_bytes(&h->key, sizeof h->key);
}

static int ask(dray_queue *queue, uint32_t number, home *out, dray_error *error)
{
    dray__writer w = {0};
    dray__reply reply;
    size_t size;
    dray__put_u32(&w, number);
    int rc = dray__call(queue->channel, DRAY__MSG_QUEUE_HOME_FIND, &w, NULL, 0,
                        dray__context_deadline(queue->context, queue->timeout_ns), &reply, error);
    dray__writer_free(&w);
    if (rc)
        return rc;
    *out = (home){.number = dray__get_u32(&reply.payload)};
    out->path = dray__get_string(&reply.payload, TEXT_MAX);
    out->endpoint = dray__get_string(&reply.payload, TEXT_MAX);
    char *identity = dray__get_string(&reply.payload, sizeof out->key.identity - 1);
    const void *bytes = dray__get_blob(&reply.payload, &size);
    rc = dray__reader_finish(&reply.payload, "HOME_FIND", error);
    if (!rc && size != sizeof out->key.bytes)
        rc = dray__fail(error, DRAY_EPROTO, "HOME_FIND: a key of %zu bytes", size);
    if (!rc) {
        strcpy(out->key.identity, identity);
        memcpy(out->key.bytes, bytes, size);
    }
    free(identity);
    if (rc)
        home_free(out);
    return rc;
}

int dray__queue_find_home(dray_queue *queue, bool known, dray_error *error)
{
    home own;
    if (known && queue->at_home)
        return DRAY_OK;
    int rc = ask(queue, DRAY__NONE, &own, error);
    while (rc == DRAY_ECLOSED && dray__queue_come_back(queue) == DRAY_OK)
        rc = ask(queue, DRAY__NONE, &own, error);
    if (rc)
        return rc;
    if (own.number != queue->home || !queue->at_home || own.path[0])
        dray__keeper_link_break(&queue->keeper);
    if (own.path[0]) { /* else it is the one that the coordinator named */
        char *address = NULL;
        if (asprintf(&address, "unix:%s", own.path) < 0) {
            home_free(&own);
            return dray__nomem(error);
        }
        free(queue->keeper.address);
        queue->keeper.address = address;
    }
    queue->home = own.number;
    queue->at_home = true;
    queue->samples = own.key;
    queue->keys = *dray__context_keys(queue->context);
    queue->keys.key = &queue->samples;
    home_free(&own);
    return DRAY_OK;
}

int dray__queue_move(dray_queue *queue, dray_error *error)
{
    int rc = dray__queue_find_home(queue, false, error);
    if (!rc)
        dray__storage_lose(&queue->storage);
    return rc;
}

bool dray__queue_is_elsewhere(const dray_queue *queue, uint32_t number)
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
        dray__stream_print(&other, host);
    snprintf(out, size, strchr(host, ':') ? "tcp:[%s]%s" : "tcp:%s%s", host, port);
}

static int find(void *user, uint32_t number, char *endpoint, size_t size, dray_error *error)
{
    home found;
    int rc = ask(user, number, &found, error);
    if (rc)
        return rc;
    fill_address(user, found.endpoint, endpoint, size);
    home_free(&found);
    return DRAY_OK;
}

int dray__queue_get_remote(dray_queue *queue, dray__range *ranges, uint32_t count,
                           int64_t deadline_ns, dray_error *error)
{
    int rc = dray__queue_find_home(queue, true, error);
    if (!rc && !queue->distant)
        rc = dray__distant_new(&queue->keys, find, queue, &queue->distant, error);
    return rc ? rc : dray__distant_get(queue->distant, ranges, count, deadline_ns, error);
}
