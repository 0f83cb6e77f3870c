/* The thread of a keeper that joined (join.h). */
#include "queue/storage/join.h"

#include "base/clock.h"
#include "base/error.h"
#include "base/log.h"
#include "base/thread.h"
#include "control/context.h"
#include "net/cells.h"
#include "queue/messages.h"

#include <poll.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>

enum { WAIT_MS = 5000, PAUSE_MS = 200, ATTEMPT_MS = 1000, ATTEMPT_MOST_MS = 8000 };
#define ANSWER_NS (60 * DRAY__SECOND)

struct dray__join {
    dray__keeper *keeper;
    char *address, *path, *listen, *host;
    bool own;
    bool leaving; /* atomic */
    int socket;   /* of the channel that the thread waits for, or -1; atomic */
    dray__thread thread;
    dray_context *context;
    dray__channel *channel;
    dray__server *server;
    dray__cells cells;
    const char *endpoint;
    dray__tls_key key;
    dray__stream_keys keys;
    bool changed; /* the session is another one than that for which chunks were kept */
    bool joined;  /* the coordinator of this session knows the keeper, by this number: */
    uint32_t number;
    uint64_t seen; /* number of pairs received so far */
};

static bool leaving(const dray__join *j)
{
    return __atomic_load_n(&j->leaving, __ATOMIC_SEQ_CST);
}

static int read_cell(void *user, const dray__cell *cell, void *out)
{
    return dray__keeper_read(user, cell->number, cell->offset, cell->bytes, out);
}

static int serve(dray__join *j, dray_error *error)
{
    char address[DRAY__STREAM_ADDRESS];
    bool elsewhere;
    int rc = DRAY_OK;
    if (!j->listen)
        rc = dray__data_address(j->context, address, &elsewhere, error);
    else if ((size_t)snprintf(address, sizeof address, "%s", j->listen) >= sizeof address)
        rc = dray__fail(error, DRAY_EINVALID, "a keeper's address: at most %zu bytes expected",
                        sizeof address - 1);
    if (rc)
        return rc;
    j->keys = *dray__context_keys(j->context);
    j->keys.key = &j->key;
    j->cells = (dray__cells){read_cell, j->keeper};
    return dray__cells_serve(address, &j->keys, &j->cells, &j->server, &j->endpoint, error);
}

/* Sends KEEPER_JOIN, and gets the key that readers must have from now on. */
static int introduce(dray__join *j, dray_error *error)
{
    const dray__keeper_join message = {j->path, j->endpoint, j->own};
    dray__keeper_told told;
    dray__arena texts = {0};
    int rc =
        dray__ask(j->channel, DRAY__MSG_QUEUE_KEEPER_JOIN, &dray__keeper_join_fields, &message,
                  dray__deadline(ANSWER_NS), &texts, &dray__keeper_joined_fields, &told, error);
    if (!rc)
        rc = dray__keeper_key(&told, "KEEPER_JOIN", &j->key, error);
    if (!rc) {
        j->number = told.number;
        j->seen = 0;
        j->joined = true;
        if (!j->own) /* the controller resets its own keeper */
            dray__keeper_enter_era(j->keeper, told.era);
    }
    dray__arena_free(&texts);
    return rc;
}

/* Opens the session within `timeout_ns` (0: the library's default), and joins. */
static int enter(dray__join *j, int64_t timeout_ns, dray_error *error)
{
    dray_options options = DRAY_OPTIONS_INIT;
    options.address = j->address;
    options.name = "keeper";
    options.host = j->host;
    options.timeout_ns = timeout_ns;
    int rc = j->context ? DRAY_OK : dray_open(&options, &j->context, error);
    if (!rc && !j->channel)
        rc = dray__channel_open_until(
            j->context, dray__deadline(ATTEMPT_MOST_MS * DRAY__MILLISECOND), &j->channel, error);
    if (!rc) /* from now on dray__join_leave ends what the thread waits for */
        __atomic_store_n(&j->socket, dray__channel_socket(j->channel), __ATOMIC_SEQ_CST);
    if (!rc && leaving(j))
        rc = dray__fail(error, DRAY_ECANCELED, "it leaves");
    if (!rc && !j->server)
        rc = serve(j, error);
    if (!rc && !j->joined)
        rc = introduce(j, error);
    return rc;
}

/* ---- the thread ------------------------------------------------------------------------------ */

static int drop_some(dray__join *j, dray_error *error)
{
    const dray__keeper_wait message = {j->number, j->seen, WAIT_MS * DRAY__MILLISECOND};
    dray__chunk_keys told;
    dray__arena items = {0};
    int rc = dray__ask(j->channel, DRAY__MSG_QUEUE_KEEPER_WAIT, &dray__keeper_wait_fields, &message,
                       dray__deadline(2 * WAIT_MS * DRAY__MILLISECOND), &items,
                       &dray__chunk_keys_fields, &told, error);
    for (uint32_t i = 0; !rc && i < told.count; i++)
        dray__keeper_drop(j->keeper, told.items[i].id, told.items[i].key);
    j->seen += rc ? 0 : told.count;
    dray__arena_free(&items);
    return rc;
}

typedef struct session_of { /* differs between two sessions, and between two coordinators */
    uint8_t token[sizeof(((dray_context *)0)->token)];
    uint64_t returns;
} session_of;

static session_of session_now(dray_context *context)
{
    session_of now = {.returns = dray__context_returns(context)};
    pthread_mutex_lock(&context->lock);
    memcpy(now.token, context->token, sizeof now.token);
    pthread_mutex_unlock(&context->lock);
    return now;
}

/* Opens the channel again. If the session ended, the next coordinator does not know the chunks that
 * are kept here. If the connection alone ended, this coordinator still counts on them. */
static int reopen(dray__join *j, dray_error *error)
{
    dray__channel *channel = NULL;
    session_of before = session_now(j->context);
    int rc = dray__context_come_back(j->context, dray__deadline(DRAY__SECOND), &channel, error);
    session_of now = session_now(j->context);
    bool same =
        before.returns == now.returns && memcmp(before.token, now.token, sizeof now.token) == 0;
    j->joined &= same;
    j->changed |= !same;
    if (rc)
        return rc;
    __atomic_store_n(&j->socket, -1, __ATOMIC_SEQ_CST);
    dray__channel_close(j->channel);
    j->channel = channel;
    if (j->changed)
        dray__keeper_reset_all(j->keeper);
    j->changed = false;
    return DRAY_OK;
}

/* Joins the next coordinator, or goes on with this one. Attempts are short, because the thread does
 * not see during one that the keeper leaves; they become longer for a machine that is slow. */
static void come_back(dray__join *j)
{
    dray_error error;
    int rc = DRAY_ECLOSED, attempt_ms = ATTEMPT_MS;
    __atomic_store_n(&j->socket, -1, __ATOMIC_RELEASE);
    for (bool told = false; rc && !leaving(j); poll(NULL, 0, rc ? PAUSE_MS : 0)) {
        rc = j->context && j->channel ? reopen(j, &error) : DRAY_OK;
        if (!rc)
            rc = enter(j, attempt_ms * DRAY__MILLISECOND, &error);
        attempt_ms = attempt_ms < ATTEMPT_MOST_MS ? 2 * attempt_ms : ATTEMPT_MOST_MS;
        if (rc && !told && !leaving(j))
            dray__log(DRAY_LOG_WARN, "keeper %s: %s", j->path, error.message);
        told = true;
    }
}

static void *run(void *user)
{
    dray__join *j = user;
    dray_error error;
    if (!j->channel)
        come_back(j);
    while (!leaving(j)) {
        int rc = drop_some(j, &error);
        if (rc == DRAY_EBUSY) /* the coordinator has not seen yet that the last connection ended */
            poll(NULL, 0, PAUSE_MS);
        else if (rc && rc != DRAY_ETIMEDOUT && !leaving(j)) {
            j->joined &= rc != DRAY_ENOENT;
            dray__log(DRAY_LOG_WARN, "keeper %s: %s", j->path, error.message);
            come_back(j);
        }
    }
    return NULL;
}

static bool copy(char **out, const char *text)
{
    *out = text ? strdup(text) : NULL;
    return *out || !text;
}

int dray__join_start(dray__keeper *keeper, const dray__join_options *o, dray__join **out,
                     dray_error *error)
{
    dray__join *j = calloc(1, sizeof *j);
    if (!j)
        return dray__nomem(error);
    j->keeper = keeper;
    j->own = o->own;
    j->socket = -1;
    bool copied = copy(&j->address, o->address) && copy(&j->path, o->path) &&
                  copy(&j->listen, o->listen) && copy(&j->host, o->host);
    int rc = copied ? DRAY_OK : dray__nomem(error);
    if (!rc && !o->later)
        rc = enter(j, 0, error);
    if (!rc)
        rc = dray__thread_start(&j->thread, run, j, "a keeper", error);
    if (rc)
        dray__join_free(j);
    else
        *out = j;
    return rc;
}

const char *dray__join_endpoint(const dray__join *join)
{
    return join->endpoint;
}

void dray__join_leave(dray__join *j)
{
    __atomic_store_n(&j->leaving, true, __ATOMIC_SEQ_CST);
    int fd = __atomic_load_n(&j->socket, __ATOMIC_SEQ_CST);
    if (fd >= 0)
        shutdown(fd, SHUT_RDWR); /* the thread waits there */
}

void dray__join_free(dray__join *j)
{
    if (!j)
        return;
    dray__join_leave(j);
    dray__thread_join(&j->thread);
    dray__server_free(j->server);
    dray__channel_close(j->channel);
    dray_close(j->context);
    dray__forget_bytes(&j->key, sizeof j->key);
    free(j->address);
    free(j->path);
    free(j->listen);
    free(j->host);
    free(j);
}
