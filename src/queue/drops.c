/* Telling the keeper which chunks nobody needs any more, without ever waiting for it. */
#include "base/clock.h"
#include "base/log.h"
#include "queue/internal.h"

#include <stdlib.h>

void dray__drops_add(void *user, uint64_t chunk, uint64_t key)
{
    dray__drops *drops = user;
    if (!drops->address)
        return;
    dray__put_u64(&drops->pairs, chunk);
    dray__put_u64(&drops->pairs, key);
    drops->count++;
}

static void disconnect(dray__drops *drops)
{
    dray__channel_close(drops->channel);
    drops->channel = NULL;
    drops->outstanding = false;
    drops->retry_ns = dray__deadline(DRAY__SECOND);
}

void dray__drops_flush(dray__drops *drops)
{
    dray_error error;
    if (!drops->count && !drops->outstanding)
        return;
    if (!drops->channel) {
        if (dray__now() < drops->retry_ns)
            return;
        if (dray__channel_connect(drops->address, dray__now(), &drops->channel, &error)) {
            drops->retry_ns = dray__deadline(DRAY__SECOND);
            dray__log(DRAY_LOG_WARN, "queue: keeper: %s", error.message);
            return;
        }
    }
    if (drops->outstanding) {
        dray__reply reply;
        int rc = dray__call_poll(drops->channel, &reply, &error);
        if (rc == DRAY_EAGAIN)
            return;
        drops->outstanding = false;
        if (rc == DRAY_ECLOSED) {
            disconnect(drops);
            return;
        }
        if (rc)
            dray__log(DRAY_LOG_WARN, "queue: keeper: %s", error.message);
    }
    if (!drops->count)
        return;
    dray__writer message = {0};
    dray__put_u32(&message, drops->count);
    dray__put_bytes(&message, drops->pairs.data, drops->pairs.size);
    int rc = dray__call_start(drops->channel, DRAY__MSG_KEEPER_DROP, &message, NULL, 0, &error);
    dray__writer_free(&message);
    if (rc == DRAY_OK) {
        drops->outstanding = true;
        drops->count = 0;
        dray__writer_reset(&drops->pairs);
    } else if (rc != DRAY_EAGAIN) {
        disconnect(drops);
    }
}

void dray__drops_free(dray__drops *drops)
{
    dray__channel_close(drops->channel);
    dray__writer_free(&drops->pairs);
    free(drops->address);
}
