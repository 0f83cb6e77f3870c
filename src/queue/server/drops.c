/* Sends the keeper the chunks to drop, without ever waiting for it. */
#include "base/clock.h"
#include "base/log.h"
#include "queue/server/internal.h"

#include <event2/event.h>
#include <stdlib.h>

void dray__drops_add(void *user, uint32_t keeper, uint64_t chunk, uint64_t key)
{
    dray__drops *drops = user;
    if (keeper || !drops->address)
        return;
    dray__chunk_key *pair =
        dray__append(&drops->pairs, sizeof *pair, drops->count, &drops->capacity);
    if (!pair) /* without memory the chunk stays until the keeper ends */
        return;
    *pair = (dray__chunk_key){chunk, key};
    drops->count++;
}

static void on_answer(evutil_socket_t fd, short what, void *drops)
{
    (void)fd, (void)what;
    dray__drops_flush(drops);
}

static void disconnect(dray__drops *drops)
{
    if (drops->answered)
        event_free(drops->answered);
    drops->answered = NULL;
    dray__channel_close(drops->channel);
    drops->channel = NULL;
    drops->outstanding = false;
    drops->retry_ns = dray__deadline(DRAY__SECOND);
}

static bool connected(dray__drops *drops)
{
    dray_error error;
    if (drops->channel)
        return true;
    if (dray__now() < drops->retry_ns)
        return false;
    if (dray__channel_connect(drops->address, dray__now(), &drops->channel, &error)) {
        drops->retry_ns = dray__deadline(DRAY__SECOND);
        dray__log(DRAY_LOG_WARN, "queue: keeper: %s", error.message);
        return false;
    }
    drops->answered =
        event_new(drops->base, dray__channel_fd(drops->channel), EV_READ, on_answer, drops);
    return true;
}

static void take_answer(dray__drops *drops)
{
    dray_error error;
    dray__reply reply;
    int rc = dray__call_poll(drops->channel, &reply, &error);
    if (rc == DRAY_EAGAIN) {
        if (drops->answered)
            event_add(drops->answered, NULL);
        return;
    }
    drops->outstanding = false;
    if (rc)
        dray__log(DRAY_LOG_WARN, "queue: keeper: %s", error.message);
    if (rc == DRAY_ECLOSED)
        disconnect(drops);
}

void dray__drops_flush(dray__drops *drops)
{
    dray_error error;
    if (drops->outstanding)
        take_answer(drops);
    if (drops->outstanding || !drops->count || !connected(drops))
        return;
    int rc = dray__ask_start(drops->channel, DRAY__MSG_KEEPER_DROP, &dray__chunk_keys_fields,
                             &(dray__chunk_keys){drops->pairs, drops->count}, &error);
    if (rc && rc != DRAY_EAGAIN)
        disconnect(drops);
    if (rc)
        return;
    drops->outstanding = true;
    drops->count = 0;
    if (drops->answered)
        event_add(drops->answered, NULL);
}

void dray__drops_free(dray__drops *drops)
{
    if (drops->channel)
        disconnect(drops);
    free(drops->pairs);
    free(drops->address);
}
