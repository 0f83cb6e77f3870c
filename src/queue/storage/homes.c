/* The controller's list of keepers (homes.h). */
#include "queue/storage/homes.h"

#include "base/arena.h"
#include "base/clock.h"
#include "base/error.h"
#include "base/log.h"
#include "control/context.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

int dray__homes_init(dray__homes *homes, const dray__coordinator *coordinator, dray_error *error)
{
    bool encrypt = false;
    pthread_mutex_init(&homes->lock, NULL);
    int rc = dray__networks_parse(getenv("DRAY_TRUSTED_NETWORKS"), &homes->trusted, error);
    if (!rc)
        rc = dray__data_encrypt(&encrypt, error);
    if (rc)
        return rc;
    homes->keys = (dray__stream_keys){
        .key = &homes->key, .trusted = &homes->trusted, .always = encrypt, .transport = "stream"};
    return dray__coordinator_key(coordinator, "samples", &homes->key) ? DRAY_OK
                                                                      : dray__nomem(error);
}

static void home_free(dray__home *home)
{
    free(home->pairs);
    free(home->path);
    free(home->endpoint);
    free(home);
}

void dray__homes_free(dray__homes *homes)
{
    for (uint32_t i = 0; i < homes->count; i++)
        home_free(homes->items[i]);
    free(homes->items);
    dray__forget_bytes(&homes->key, sizeof homes->key);
    pthread_mutex_destroy(&homes->lock);
}

static dray__home *find(const dray__homes *homes, uint32_t number)
{
    for (uint32_t i = 0; i < homes->count; i++)
        if (homes->items[i]->number == number)
            return homes->items[i];
    return NULL;
}

bool dray__homes_alive(const dray__homes *homes, uint32_t home)
{
    return !home || find(homes, home);
}

/* ---- joining --------------------------------------------------------------------------------- */

static void answer(const dray__homes *homes, dray__request *request, const dray__fields *of,
                   dray__home_told *told)
{
    dray__writer w = {0};
    told->identity = homes->key.identity;
    told->key = homes->key.bytes;
    told->key_size = sizeof homes->key.bytes;
    dray__put_fields(&w, of, told);
    dray__request_reply(request, &w, NULL, 0);
    dray__forget_bytes(w.data, w.size);
    dray__writer_free(&w);
}

/* Takes `home` over. */
static int add(dray__homes *homes, dray__home *home, dray_error *error)
{
    pthread_mutex_lock(&homes->lock);
    bool fits = homes->count < DRAY__HOMES_MAX &&
                dray__append(&homes->items, sizeof(dray__home *), homes->count, &homes->capacity);
    if (fits)
        homes->items[homes->count++] = home;
    pthread_mutex_unlock(&homes->lock);
    if (fits)
        return DRAY_OK;
    home_free(home);
    return dray__fail(error, DRAY_EFULL, "no more than %d keepers", DRAY__HOMES_MAX);
}

static int check_join(const dray__homes *homes, const dray__request *request,
                      const dray__home *home, dray_error *error)
{
    if (home->path[0] != '/' || strncmp(home->endpoint, "tcp:", 4) != 0)
        return dray__fail(error, DRAY_EINVALID,
                          "keeper: the absolute path of a socket and a data server's endpoint "
                          "expected, found '%s', '%s'",
                          home->path, home->endpoint);
    if (home->own && (!dray__request_master(request) || find(homes, 0)))
        return dray__fail(error, DRAY_EPERM, "keeper: it cannot be the coordinator's own");
    for (uint32_t i = 0; i < homes->count; i++)
        if (homes->items[i]->host == home->host)
            return dray__fail(error, DRAY_EEXIST, "keeper: this host has one already, at %s",
                              homes->items[i]->path);
    return DRAY_OK;
}

static int join(void *self, dray__request *request, const void *message, dray_error *error)
{
    dray__homes *homes = self;
    const dray__home_join *m = message;
    const dray__session *session = dray__request_session(request);
    if (!session)
        return dray__fail(error, DRAY_EPROTO, "HOME_JOIN without a session");
    dray__home *home = calloc(1, sizeof *home);
    if (!home)
        return dray__nomem(error);
    home->member = dray__session_member(session);
    home->host = dray__session_host(session);
    home->path = strdup(m->path);
    home->endpoint = strdup(m->endpoint);
    home->own = m->own;
    int rc =
        home->path && home->endpoint ? check_join(homes, request, home, error) : dray__nomem(error);
    if (rc) {
        home_free(home);
        return rc;
    }
    home->number = home->own ? 0 : ++homes->numbers;
    rc = add(homes, home, error);
    if (rc)
        return rc;
    dray__log(DRAY_LOG_INFO, "queue: keeper %u at %s, %s (%s)", home->number, home->path,
              home->endpoint, dray__session_name(session));
    answer(homes, request, &dray__home_joined_fields,
           &(dray__home_told){.number = home->number, .era = homes->era});
    return DRAY_OK;
}

/* ---- dropping -------------------------------------------------------------------------------- */

/* Pairs are kept until the keeper says that it has them. */
static void forget_told(dray__home *home, uint64_t seen)
{
    uint64_t told = seen - home->told;
    if (seen <= home->told || told > home->pair_count)
        return;
    home->told = seen;
    home->pair_count -= (uint32_t)told;
    memmove(home->pairs, home->pairs + told, home->pair_count * sizeof *home->pairs);
}

static void answer_waiting(dray__home *home)
{
    dray__request *request = home->waiting;
    home->waiting = NULL;
    dray__request_answer(request, &dray__chunk_keys_fields,
                         &(dray__chunk_keys){home->pairs, home->pair_count});
}

static int wait(void *homes, dray__request *request, const void *message, dray_error *error)
{
    const dray__session *session = dray__request_session(request);
    const dray__home_wait *m = message;
    dray__home *home = find(homes, m->number);
    if (!home || !session || home->member != dray__session_member(session))
        return dray__fail(error, DRAY_ENOENT, "HOME_WAIT: this session has no keeper number %u",
                          m->number);
    if (home->waiting)
        return dray__fail(error, DRAY_EBUSY, "HOME_WAIT: keeper %u waits already", m->number);
    if (dray__request_expire_at(request, dray__deadline(m->timeout_ns)))
        return dray__nomem(error);
    forget_told(home, m->seen);
    home->waiting = request;
    if (home->pair_count)
        answer_waiting(home);
    return DRAY_OK;
}

void dray__homes_expired(dray__homes *homes, dray__request *request)
{
    for (uint32_t i = 0; i < homes->count; i++)
        if (homes->items[i]->waiting == request) {
            answer_waiting(homes->items[i]); /* to nobody, where its channel is gone */
            return;
        }
}

void dray__homes_drop(dray__homes *homes, uint32_t number, uint64_t chunk, uint64_t key)
{
    dray__home *home = find(homes, number);
    dray__chunk_key *pair =
        home ? dray__append(&home->pairs, sizeof *pair, home->pair_count, &home->pair_capacity)
             : NULL;
    if (!pair) /* without memory it stays until the keeper ends */
        return;
    *pair = (dray__chunk_key){chunk, key};
    home->pair_count++;
}

void dray__homes_flush(dray__homes *homes)
{
    for (uint32_t i = 0; i < homes->count; i++)
        if (homes->items[i]->waiting && homes->items[i]->pair_count)
            answer_waiting(homes->items[i]);
}

/* Its number stays unknown for ever. */
static void take_out(dray__homes *homes, uint32_t at)
{
    pthread_mutex_lock(&homes->lock);
    memmove(&homes->items[at], &homes->items[at + 1],
            (homes->count - at - 1) * sizeof *homes->items);
    homes->count--;
    pthread_mutex_unlock(&homes->lock);
}

void dray__homes_ended(dray__homes *homes, uint64_t member, void (*lost)(void *user, uint32_t home),
                       void *user)
{
    for (uint32_t i = 0; i < homes->count;) {
        dray__home *home = homes->items[i];
        if (home->member != member) {
            i++;
            continue;
        }
        dray__log(DRAY_LOG_WARN, "queue: keeper %u at %s, %s, is gone", home->number, home->path,
                  home->endpoint);
        take_out(homes, i);
        if (home->waiting)
            answer_waiting(home);
        if (home->number)
            lost(user, home->number);
        home_free(home);
    }
}

/* ---- finding --------------------------------------------------------------------------------- */

/* Where a session's samples go: the keeper of its host, else the coordinator's own, if that is on
 * the same one. */
static const dray__home *own_of(const dray__homes *homes, const dray__request *request, bool *first)
{
    const dray__session *session = dray__request_session(request);
    const dray__home *own = find(homes, 0);
    uint64_t host = session ? dray__session_host(session) : 0;
    for (uint32_t i = 0; i < homes->count; i++)
        if (homes->items[i]->host == host)
            return homes->items[i];
    *first = dray__request_local(request) || !own;
    return NULL;
}

static int find_home(void *homes, dray__request *request, const void *message, dray_error *error)
{
    uint32_t number = *(const uint32_t *)message;
    bool first = false;
    const dray__home *home =
        number == UINT32_MAX ? own_of(homes, request, &first) : find(homes, number);
    if (!home && number && number != UINT32_MAX)
        return dray__fail(error, DRAY_EGONE,
                          "the keeper of samples number %u is gone, and what it "
                          "held",
                          number);
    if (!home && !number)
        return dray__fail(error, DRAY_EUNSUPPORTED,
                          "samples lie on the coordinator's host, which serves them to its own "
                          "processes alone: it does not listen for other hosts");
    answer(homes, request, &dray__home_found_fields,
           &(dray__home_told){.number = home    ? home->number
                                        : first ? 0
                                                : UINT32_MAX,
                              .path = home ? home->path : "",
                              .endpoint = home ? home->endpoint : ""});
    return DRAY_OK;
}

int dray__homes_endpoint(dray__homes *homes, uint32_t number, char *out, size_t size,
                         dray_error *error)
{
    pthread_mutex_lock(&homes->lock);
    const dray__home *home = find(homes, number);
    if (home)
        snprintf(out, size, "%s", home->endpoint);
    pthread_mutex_unlock(&homes->lock);
    if (home)
        return DRAY_OK;
    return dray__fail(error, DRAY_EGONE, "the keeper of samples number %u is gone", number);
}

int dray__homes_request(dray__homes *homes, dray__request *request, dray_error *error)
{
    static const dray__handler handlers[] = {
        {DRAY__MSG_QUEUE_HOME_JOIN, &dray__home_join_fields, join},
        {DRAY__MSG_QUEUE_HOME_WAIT, &dray__home_wait_fields, wait},
        {DRAY__MSG_QUEUE_HOME_FIND, &dray__u32_fields, find_home},
        {0},
    };
    return dray__request_handle(request, handlers, homes, error);
}
