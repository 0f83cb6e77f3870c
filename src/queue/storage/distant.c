/* Ranges from other hosts (distant.h). The ranges of each host are cut into pieces, the pieces are
 * put into requests of at most DATA bytes, and WINDOW requests are under way. Received bytes are
 * copied to their places. The bytes of a request of one piece are received in place. */
#include "queue/storage/distant.h"

#include "base/arena.h"
#include "base/clock.h"
#include "base/error.h"
#include "base/hash.h"
#include "net/cells.h"
#include "net/peer.h"

#include <poll.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum {
    DATA = 256 << 10, /* bytes of an answer */
    WINDOW = 16,
    PIECES = 256, /* of a request */
    SPINS = 200,  /* polls of a carrier without a descriptor before its reader sleeps */
    RETRY_MS = 20
};
#define SILENT_NS (10 * DRAY__SECOND) /* after which the connection is made again */

typedef struct range_piece {
    uint32_t range;
    uint64_t at, bytes; /* within the range */
} range_piece;

typedef struct pulling { /* a request under way: pieces first to end */
    uint32_t first, end;
} pulling;

typedef struct host {
    uint32_t keeper;
    char endpoint[DRAY__STREAM_ADDRESS];
    dray__peer *peer;
    uint8_t *buffer;
    range_piece *pieces; /* of this call */
    uint32_t piece_count, next;
    uint64_t capacity;
    pulling window[WINDOW];
    uint32_t oldest, flying;
    bool in_data; /* the head of the oldest answer is received, its data are not */
    dray__answer header;
    uint64_t sum;
    uint8_t gone[PIECES];
    struct host *other;
} host;

struct dray__distant {
    const dray__stream_keys *keys;
    dray__distant_find find;
    void *user;
    host *hosts;
};

int dray__distant_new(const dray__stream_keys *keys, dray__distant_find find, void *user,
                      dray__distant **out, dray_error *error)
{
    dray__distant *distant = calloc(1, sizeof *distant);
    if (!distant)
        return dray__nomem(error);
    distant->keys = keys;
    distant->find = find;
    distant->user = user;
    *out = distant;
    return DRAY_OK;
}

void dray__distant_free(dray__distant *distant)
{
    while (distant && distant->hosts) {
        host *h = distant->hosts;
        distant->hosts = h->other;
        dray__peer_free(h->peer);
        free(h->buffer);
        free(h->pieces);
        free(h);
    }
    free(distant);
}

/* ---- pieces ---------------------------------------------------------------------------------- */

static int host_of(dray__distant *distant, uint32_t keeper, host **out, dray_error *error)
{
    for (host *h = distant->hosts; h; h = h->other)
        if (h->keeper == keeper) {
            *out = h;
            return DRAY_OK;
        }
    host *h = calloc(1, sizeof *h);
    uint8_t *buffer = malloc(DATA);
    if (!h || !buffer) {
        free(h);
        free(buffer);
        return dray__nomem(error);
    }
    h->keeper = keeper;
    h->buffer = buffer;
    h->other = distant->hosts;
    *out = distant->hosts = h;
    return DRAY_OK;
}

static int add_piece(host *h, uint32_t range, uint64_t at, uint64_t bytes, dray_error *error)
{
    if (!dray__append(&h->pieces, sizeof *h->pieces, h->piece_count, &h->capacity))
        return dray__nomem(error);
    h->pieces[h->piece_count++] = (range_piece){range, at, bytes};
    return DRAY_OK;
}

static int cut(dray__distant *distant, dray__range *ranges, uint32_t count, dray_error *error)
{
    for (host *h = distant->hosts; h; h = h->other)
        h->piece_count = h->next = 0;
    for (uint32_t i = 0; i < count; i++) {
        host *h = NULL;
        int rc = host_of(distant, ranges[i].keeper, &h, error);
        ranges[i].lost = false;
        for (uint64_t at = 0; !rc && at < ranges[i].bytes; at += DATA) {
            uint64_t left = ranges[i].bytes - at;
            rc = add_piece(h, i, at, left < DATA ? left : DATA, error);
        }
        if (rc)
            return rc;
    }
    return DRAY_OK;
}

/* ---- one host -------------------------------------------------------------------------------- */

/* Closes the connection. Requests that were under way are sent again. */
static void drop(host *h)
{
    if (h->flying)
        h->next = h->window[h->oldest].first;
    h->flying = h->oldest = 0;
    h->in_data = false;
    if (h->peer)
        dray__peer_drop(h->peer);
}

static int open_host(dray__distant *distant, host *h, dray_error *error)
{
    char endpoint[DRAY__STREAM_ADDRESS];
    int rc = distant->find(distant->user, h->keeper, endpoint, sizeof endpoint, error);
    if (!rc && h->peer && strcmp(endpoint, h->endpoint) != 0) {
        dray__peer_free(h->peer);
        h->peer = NULL;
    }
    if (!rc && !h->peer) {
        snprintf(h->endpoint, sizeof h->endpoint, "%s", endpoint);
        rc = dray__peer_new(endpoint, distant->keys, &h->peer, error);
    }
    return rc ? rc : dray__peer_open(h->peer, error);
}

static void ask(host *h, const dray__range *ranges)
{
    while (h->flying < WINDOW && h->next < h->piece_count) {
        dray__cell cells[PIECES];
        uint32_t slot = (h->oldest + h->flying) % WINDOW, count = 0;
        uint64_t bytes = 0;
        h->window[slot].first = h->next;
        while (h->next < h->piece_count && count < PIECES &&
               bytes + h->pieces[h->next].bytes <= DATA) {
            const range_piece *p = &h->pieces[h->next++];
            const dray__range *range = &ranges[p->range];
            cells[count++] = (dray__cell){range->object, range->offset + p->at, p->bytes};
            bytes += p->bytes;
        }
        h->window[slot].end = h->next;
        if (!h->flying)
            dray__peer_touch(h->peer);
        h->flying++;
        dray__cells_request(dray__peer_out(h->peer), slot, cells, count);
    }
}

static int take_head(host *h, dray_error *error)
{
    const pulling *a = &h->window[h->oldest];
    uint32_t count = a->end - a->first;
    dray__arrival arrival;
    int rc = dray__peer_recv_head(h->peer, &arrival, error);
    if (rc)
        return rc;
    dray__reader r = dray__reader_of(arrival.head, arrival.header.head_bytes);
    h->header = arrival.header;
    if (arrival.header.status) {
        char *message = dray__get_prose(&r, DRAY__HEAD_MAX);
        rc = dray__fail(error, arrival.header.status, "%s: %s", h->endpoint,
                        message ? message : "refused");
        free(message);
        return rc;
    }
    h->sum = dray__get_u64(&r);
    const uint8_t *gone = dray__get_bytes(&r, count);
    uint64_t expected = 0;
    for (uint32_t i = 0; gone && i < count; i++)
        expected += gone[i] ? 0 : h->pieces[a->first + i].bytes;
    if (dray__reader_finish(&r, "answer", NULL) || expected != arrival.header.data_bytes ||
        arrival.header.id != h->oldest)
        return dray__fail(error, DRAY_EPROTO, "%s: an answer to another request", h->endpoint);
    memcpy(h->gone, gone, count);
    h->in_data = true;
    return DRAY_OK;
}

static int take_data(host *h, dray__range *ranges, dray_error *error)
{
    const pulling *a = &h->window[h->oldest];
    const range_piece *first = &h->pieces[a->first];
    bool alone = a->end - a->first == 1 && !h->gone[0];
    uint8_t *data = alone ? (uint8_t *)ranges[first->range].at + first->at : h->buffer;
    int rc = dray__peer_recv_data(h->peer, data, error);
    if (rc)
        return rc;
    if (dray__hash(data, h->header.data_bytes) != h->sum)
        return dray__fail(error, DRAY_ECHECKSUM, "%s: bytes were altered on the way", h->endpoint);
    for (uint32_t i = a->first; i < a->end; i++) {
        const range_piece *p = &h->pieces[i];
        dray__range *range = &ranges[p->range];
        range->lost |= h->gone[i - a->first] != 0;
        if (alone || h->gone[i - a->first])
            continue;
        memcpy((uint8_t *)range->at + p->at, data, p->bytes);
        data += p->bytes;
    }
    h->in_data = false;
    h->oldest = (h->oldest + 1) % WINDOW;
    h->flying--;
    return DRAY_OK;
}

/* Sends and receives as much as possible without waiting. Returns DRAY_OK when all bytes are
 * received, else DRAY_EAGAIN. */
static int work(dray__distant *distant, host *h, dray__range *ranges, dray_error *error)
{
    while (h->flying || h->next < h->piece_count) {
        int rc = h->peer && dray__peer_is_open(h->peer) ? DRAY_OK : open_host(distant, h, error);
        if (rc)
            return rc;
        ask(h, ranges);
        rc = dray__peer_send(h->peer, error);
        if (rc && rc != DRAY_EAGAIN)
            return rc;
        rc = h->in_data ? DRAY_OK : take_head(h, error);
        if (!rc)
            rc = take_data(h, ranges, error);
        if (rc == DRAY_EAGAIN && dray__now() - dray__peer_moved(h->peer) > SILENT_NS)
            rc = dray__fail(error, DRAY_ETIMEDOUT, "%s was silent for %lld s", h->endpoint,
                            (long long)(SILENT_NS / DRAY__SECOND));
        if (rc)
            return rc;
    }
    return DRAY_OK;
}

static void lose_rest(host *h, dray__range *ranges)
{
    drop(h);
    for (; h->next < h->piece_count; h->next++)
        ranges[h->pieces[h->next].range].lost = true;
}

/* Returns true for errors that trying again cannot help. */
static bool is_final(int rc)
{
    return rc == DRAY_EPERM || rc == DRAY_ENOMEM || rc == DRAY_EINVALID ||
           rc == DRAY_EUNSUPPORTED || rc == DRAY_ECHECKSUM || rc == DRAY_EVERSION;
}

/* ---- all hosts ------------------------------------------------------------------------------- */

static void pause_for(dray__distant *distant, bool broken, uint32_t *idle, int64_t deadline_ns)
{
    struct pollfd fds[64];
    nfds_t count = 0;
    bool blind = false;
    for (const host *h = distant->hosts; h && count < 64; h = h->other) {
        if (!h->flying || !h->peer || !dray__peer_is_open(h->peer))
            continue;
        fds[count].fd = dray__peer_fd(h->peer);
        fds[count++].events = dray__peer_events(h->peer);
        blind |= dray__peer_is_blind(h->peer);
    }
    int left = dray__left_ms(deadline_ns), wait = broken ? RETRY_MS : 1000;
    if (blind)
        wait = ++*idle > SPINS ? 1 : 0;
    poll(fds, broken && !count ? 0 : count, wait < left ? wait : left);
}

int dray__distant_get(dray__distant *distant, dray__range *ranges, uint32_t count,
                      int64_t deadline_ns, dray_error *error)
{
    int rc = cut(distant, ranges, count, error);
    dray_error found = {0}, why = {0};
    for (uint32_t idle = 0; !rc;) {
        bool busy = false, broken = false;
        for (host *h = distant->hosts; h && !rc; h = h->other) {
            uint32_t before = h->next + h->oldest;
            int one = work(distant, h, ranges, &found);
            idle = h->next + h->oldest != before ? 0 : idle;
            if (one == DRAY_EGONE) /* the keeper is dead */
                lose_rest(h, ranges);
            else if (one == DRAY_EAGAIN)
                busy = true;
            else if (one && is_final(one))
                rc = dray__fail(error, one, "samples of another host: %s", found.message);
            else if (one) {
                why = found;
                drop(h);
                busy = broken = true;
            }
        }
        if (rc || !busy)
            break;
        if (dray__now() >= deadline_ns || dray__interrupted()) {
            rc = dray__fail(error, DRAY_ETIMEDOUT, "samples of another host: %s",
                            why.code ? why.message : "they did not come in time");
            break;
        }
        pause_for(distant, broken, &idle, deadline_ns);
    }
    for (host *h = distant->hosts; h && rc; h = h->other)
        drop(h); /* no answer to this call may arrive in a later one */
    return rc;
}
