/* The controller's list of keepers (keepers.h). */
#include "queue/storage/keepers.h"

#include "base/arena.h"
#include "base/clock.h"
#include "base/error.h"
#include "base/log.h"
#include "control/context.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

int dray__keepers_init(dray__keepers *keepers, const dray__coordinator *coordinator,
                       dray_error *error)
{
    bool encrypt = false;
    pthread_mutex_init(&keepers->lock, NULL);
    int rc = dray__networks_parse(getenv("DRAY_TRUSTED_NETWORKS"), &keepers->trusted, error);
    if (!rc)
        rc = dray__data_encrypt(&encrypt, error);
    if (rc)
        return rc;
    keepers->keys = (dray__stream_keys){.key = &keepers->key,
                                        .trusted = &keepers->trusted,
                                        .always = encrypt,
                                        .transport = "stream"};
    return dray__coordinator_key(coordinator, "samples", &keepers->key) ? DRAY_OK
                                                                        : dray__nomem(error);
}

static void known_free(dray__known_keeper *keeper)
{
    free(keeper->pairs);
    free(keeper->path);
    free(keeper->endpoint);
    free(keeper);
}

void dray__keepers_free(dray__keepers *keepers)
{
    for (uint32_t i = 0; i < keepers->count; i++)
        known_free(keepers->items[i]);
    free(keepers->items);
    dray__forget_bytes(&keepers->key, sizeof keepers->key);
    pthread_mutex_destroy(&keepers->lock);
}

static dray__known_keeper *find(const dray__keepers *keepers, uint32_t number)
{
    for (uint32_t i = 0; i < keepers->count; i++)
        if (keepers->items[i]->number == number)
            return keepers->items[i];
    return NULL;
}

bool dray__keepers_alive(const dray__keepers *keepers, uint32_t keeper)
{
    return !keeper || find(keepers, keeper);
}

/* ---- joining --------------------------------------------------------------------------------- */

static void answer(const dray__keepers *keepers, dray__request *request, const dray__fields *of,
                   dray__keeper_told *told)
{
    dray__writer w = {0};
    told->identity = keepers->key.identity;
    told->key = keepers->key.bytes;
    told->key_size = sizeof keepers->key.bytes;
    dray__put_fields(&w, of, told);
    dray__request_reply(request, &w, NULL, 0);
    dray__forget_bytes(w.data, w.size);
    dray__writer_free(&w);
}

/* Adds a keeper, and takes ownership of it. */
static int add(dray__keepers *keepers, dray__known_keeper *keeper, dray_error *error)
{
    pthread_mutex_lock(&keepers->lock);
    bool fits = keepers->count < DRAY__KEEPERS_MAX &&
                dray__append(&keepers->items, sizeof(dray__known_keeper *), keepers->count,
                             &keepers->capacity);
    if (fits)
        keepers->items[keepers->count++] = keeper;
    pthread_mutex_unlock(&keepers->lock);
    if (fits)
        return DRAY_OK;
    known_free(keeper);
    return dray__fail(error, DRAY_EFULL, "no more than %d keepers", DRAY__KEEPERS_MAX);
}

static int check_join(const dray__keepers *keepers, const dray__request *request,
                      const dray__known_keeper *keeper, dray_error *error)
{
    if (keeper->path[0] != '/' || strncmp(keeper->endpoint, "tcp:", 4) != 0)
        return dray__fail(error, DRAY_EINVALID,
                          "keeper: the absolute path of a socket and a data server's endpoint "
                          "expected, found '%s', '%s'",
                          keeper->path, keeper->endpoint);
    if (keeper->own && (!dray__request_master(request) || find(keepers, 0)))
        return dray__fail(error, DRAY_EPERM, "keeper: it cannot be the coordinator's own");
    for (uint32_t i = 0; i < keepers->count; i++)
        if (keepers->items[i]->host == keeper->host)
            return dray__fail(error, DRAY_EEXIST, "keeper: this host has one already, at %s",
                              keepers->items[i]->path);
    return DRAY_OK;
}

/* Returns the keeper that has joined with the same message, whose answer was lost; NULL when there
 * is none. */
static dray__known_keeper *joined_before(const dray__keepers *keepers, uint64_t member,
                                         const dray__keeper_join *m)
{
    for (uint32_t i = 0; i < keepers->count; i++) {
        dray__known_keeper *k = keepers->items[i];
        if (k->member == member && k->own == m->own && strcmp(k->path, m->path) == 0 &&
            strcmp(k->endpoint, m->endpoint) == 0)
            return k;
    }
    return NULL;
}

static int join(void *self, dray__request *request, const void *message, dray_error *error)
{
    dray__keepers *keepers = self;
    const dray__keeper_join *m = message;
    const dray__session *session = dray__request_session(request);
    if (!session)
        return dray__fail(error, DRAY_EPROTO, "KEEPER_JOIN without a session");
    dray__known_keeper *keeper = joined_before(keepers, dray__session_member(session), m);
    if (keeper) {
        keeper->told = 0; /* it counts anew */
        answer(keepers, request, &dray__keeper_joined_fields,
               &(dray__keeper_told){.number = keeper->number, .era = keepers->era});
        return DRAY_OK;
    }
    keeper = calloc(1, sizeof *keeper);
    if (!keeper)
        return dray__nomem(error);
    keeper->member = dray__session_member(session);
    keeper->host = dray__session_host(session);
    keeper->path = strdup(m->path);
    keeper->endpoint = strdup(m->endpoint);
    keeper->own = m->own;
    int rc = keeper->path && keeper->endpoint ? check_join(keepers, request, keeper, error)
                                              : dray__nomem(error);
    if (rc) {
        known_free(keeper);
        return rc;
    }
    keeper->number = keeper->own ? 0 : ++keepers->numbers;
    rc = add(keepers, keeper, error);
    if (rc)
        return rc;
    dray__log(DRAY_LOG_INFO, "queue: keeper %u at %s, %s (%s)", keeper->number, keeper->path,
              keeper->endpoint, dray__session_name(session));
    answer(keepers, request, &dray__keeper_joined_fields,
           &(dray__keeper_told){.number = keeper->number, .era = keepers->era});
    return DRAY_OK;
}

/* ---- dropping -------------------------------------------------------------------------------- */

/* Forgets the pairs that the keeper has confirmed. */
static void forget_told(dray__known_keeper *keeper, uint64_t seen)
{
    uint64_t told = seen - keeper->told;
    if (seen <= keeper->told || told > keeper->pair_count)
        return;
    keeper->told = seen;
    keeper->pair_count -= (uint32_t)told;
    memmove(keeper->pairs, keeper->pairs + told, keeper->pair_count * sizeof *keeper->pairs);
}

static void answer_waiting(dray__known_keeper *keeper)
{
    dray__request *request = keeper->waiting;
    keeper->waiting = NULL;
    dray__request_answer(request, &dray__chunk_keys_fields,
                         &(dray__chunk_keys){keeper->pairs, keeper->pair_count});
}

static int wait(void *keepers, dray__request *request, const void *message, dray_error *error)
{
    const dray__session *session = dray__request_session(request);
    const dray__keeper_wait *m = message;
    dray__known_keeper *keeper = find(keepers, m->number);
    if (!keeper || !session || keeper->member != dray__session_member(session))
        return dray__fail(error, DRAY_ENOENT, "KEEPER_WAIT: this session has no keeper number %u",
                          m->number);
    if (keeper->waiting)
        return dray__fail(error, DRAY_EBUSY, "KEEPER_WAIT: keeper %u waits already", m->number);
    if (dray__request_expire_at(request, dray__deadline(m->timeout_ns)))
        return dray__nomem(error);
    forget_told(keeper, m->seen);
    keeper->waiting = request;
    if (keeper->pair_count)
        answer_waiting(keeper);
    return DRAY_OK;
}

void dray__keepers_expired(dray__keepers *keepers, dray__request *request)
{
    for (uint32_t i = 0; i < keepers->count; i++)
        if (keepers->items[i]->waiting == request) {
            answer_waiting(keepers->items[i]); /* dropped when its channel is closed */
            return;
        }
}

void dray__keepers_drop(dray__keepers *keepers, uint32_t number, uint64_t chunk, uint64_t key)
{
    dray__known_keeper *keeper = find(keepers, number);
    dray__chunk_key *pair = keeper ? dray__append(&keeper->pairs, sizeof *pair, keeper->pair_count,
                                                  &keeper->pair_capacity)
                                   : NULL;
    if (!pair) /* without memory the chunk stays until the keeper ends */
        return;
    *pair = (dray__chunk_key){chunk, key};
    keeper->pair_count++;
}

void dray__keepers_flush(dray__keepers *keepers)
{
    for (uint32_t i = 0; i < keepers->count; i++)
        if (keepers->items[i]->waiting && keepers->items[i]->pair_count)
            answer_waiting(keepers->items[i]);
}

/* Removes a keeper. Its number is never used again. */
static void take_out(dray__keepers *keepers, uint32_t at)
{
    pthread_mutex_lock(&keepers->lock);
    memmove(&keepers->items[at], &keepers->items[at + 1],
            (keepers->count - at - 1) * sizeof *keepers->items);
    keepers->count--;
    pthread_mutex_unlock(&keepers->lock);
}

void dray__keepers_ended(dray__keepers *keepers, uint64_t member,
                         void (*lost)(void *user, uint32_t keeper), void *user)
{
    for (uint32_t i = 0; i < keepers->count;) {
        dray__known_keeper *keeper = keepers->items[i];
        if (keeper->member != member) {
            i++;
            continue;
        }
        dray__log(DRAY_LOG_WARN, "queue: keeper %u at %s, %s, is gone", keeper->number,
                  keeper->path, keeper->endpoint);
        take_out(keepers, i);
        if (keeper->waiting)
            answer_waiting(keeper);
        if (keeper->number)
            lost(user, keeper->number);
        known_free(keeper);
    }
}

/* ---- finding --------------------------------------------------------------------------------- */

/* Returns the keeper of the session's host, or NULL. Then *first is true when the coordinator's own
 * keeper can be used, because it is on the same host. */
static const dray__known_keeper *own_of(const dray__keepers *keepers, const dray__request *request,
                                        bool *first)
{
    const dray__session *session = dray__request_session(request);
    const dray__known_keeper *own = find(keepers, 0);
    uint64_t host = session ? dray__session_host(session) : 0;
    for (uint32_t i = 0; i < keepers->count; i++)
        if (keepers->items[i]->host == host)
            return keepers->items[i];
    *first = dray__request_local(request) || !own;
    return NULL;
}

static int find_keeper(void *keepers, dray__request *request, const void *message,
                       dray_error *error)
{
    uint32_t number = *(const uint32_t *)message;
    bool first = false;
    const dray__known_keeper *keeper =
        number == UINT32_MAX ? own_of(keepers, request, &first) : find(keepers, number);
    if (!keeper && number && number != UINT32_MAX)
        return dray__fail(error, DRAY_EGONE,
                          "the keeper of samples number %u is gone, with its samples", number);
    if (!keeper && !number)
        return dray__fail(error, DRAY_EUNSUPPORTED,
                          "samples lie on the coordinator's host, which serves them to its own "
                          "processes alone: it does not listen for other hosts");
    answer(keepers, request, &dray__keeper_found_fields,
           &(dray__keeper_told){.number = keeper  ? keeper->number
                                          : first ? 0
                                                  : UINT32_MAX,
                                .path = keeper ? keeper->path : "",
                                .endpoint = keeper ? keeper->endpoint : ""});
    return DRAY_OK;
}

int dray__keepers_endpoint(dray__keepers *keepers, uint32_t number, char *out, size_t size,
                           dray_error *error)
{
    pthread_mutex_lock(&keepers->lock);
    const dray__known_keeper *keeper = find(keepers, number);
    if (keeper)
        snprintf(out, size, "%s", keeper->endpoint);
    pthread_mutex_unlock(&keepers->lock);
    if (keeper)
        return DRAY_OK;
    return dray__fail(error, DRAY_EGONE, "the keeper of samples number %u is gone", number);
}

int dray__keepers_request(dray__keepers *keepers, dray__request *request, dray_error *error)
{
    static const dray__handler handlers[] = {
        {DRAY__MSG_QUEUE_KEEPER_JOIN, &dray__keeper_join_fields, join},
        {DRAY__MSG_QUEUE_KEEPER_WAIT, &dray__keeper_wait_fields, wait},
        {DRAY__MSG_QUEUE_KEEPER_FIND, &dray__u32_fields, find_keeper},
        {0},
    };
    return dray__request_handle(request, handlers, keepers, error);
}
