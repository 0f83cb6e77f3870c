/* The service that every coordinator has: sessions (HELLO, ATTACH, PING), barriers and status.
 */
#include "base/clock.h"
#include "base/error.h"
#include "base/json.h"
#include "base/log.h"
#include "control/internal.h"

#include <errno.h>
#include <event2/event.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/random.h>
#include <unistd.h>

typedef struct sessions {
    dray__coordinator *coordinator;
    dray__barriers *barriers;
} sessions;

/* ---- HELLO, RETURN, ATTACH, PING ------------------------------------------------------------- */

static void epoch_key(const dray__session *session, char *out, size_t capacity)
{
    snprintf(out, capacity, "%s/%u/%s", session->role, session->rank, session->name);
}

/* Counts the sessions of this role, name and rank. */
static int next_epoch(dray__coordinator *coordinator, const dray__session *session, uint64_t *epoch)
{
    char key[DRAY__NAME_MAX + DRAY__ROLE_MAX + 32];
    epoch_key(session, key, sizeof key);
    uint32_t begun = 0;
    dray__map_get(&coordinator->epochs, key, &begun);
    *epoch = (uint64_t)begun + 1;
    return dray__map_set(&coordinator->epochs, key, begun + 1) ? 0 : -1;
}

/* Reads HELLO or RETURN. The session's texts are copies. */
static int read_hello(dray__reader *r, dray__session *session, dray__session_claim *returns,
                      dray_error *error)
{
    dray__arena texts = {0};
    dray__spoken spoken;
    dray__hello who;
    dray__get_fields(r, NULL, &dray__spoken_fields, &spoken);
    if (r->failed)
        return dray__reader_finish(r, "HELLO", error);
    if (spoken.oldest > spoken.newest || spoken.oldest > DRAY__PROTOCOL_VERSION ||
        spoken.newest < DRAY__PROTOCOL_OLDEST)
        return dray__fail(error, DRAY_EVERSION,
                          "protocol: the coordinator speaks versions %u to %u, the client %u to %u",
                          DRAY__PROTOCOL_OLDEST, DRAY__PROTOCOL_VERSION, spoken.oldest,
                          spoken.newest);
    dray__get_fields(r, &texts, &dray__hello_fields, &who);
    session->name = r->failed ? NULL : strdup(who.name);
    session->role = r->failed ? NULL : strdup(who.role);
    session->rank = who.rank;
    session->host = who.host;
    session->told_pid = who.pid;
    dray__arena_free(&texts);
    if (returns)
        dray__get_fields(r, NULL, &dray__return_fields, returns);
    uint32_t may = session->first->may;
    /* Every token may read the status. */
    bool tool = session->role && strcmp(session->role, "tool") == 0;
    session->may = may != DRAY__MAY_ALL && tool ? DRAY__MAY_TOOL : may;
    if (!r->failed && (!session->name || !session->role))
        return dray__nomem(error);
    if (!r->failed && may != DRAY__MAY_ALL && !tool && dray__role_bits(session->role) != may)
        return dray__fail(error, DRAY_EPERM, "HELLO: the role %s, but the token is for the role %s",
                          session->role,
                          dray__token_role_of(dray__tls_identity(session->first->tls)));
    /* A newer client may send more fields than this version knows. */
    if (spoken.newest > DRAY__PROTOCOL_VERSION && !r->failed)
        return DRAY_OK;
    return dray__reader_finish(r, returns ? "RETURN" : "HELLO", error);
}

/* Makes the secret of the session, which proves that a connection belongs to it. With a state file,
 * only the next coordinator can compute it again. */
static int make_token(const dray__coordinator *coordinator, dray__session *session,
                      dray_error *error)
{
    char text[DRAY__NAME_MAX + DRAY__ROLE_MAX + 160];
    uint8_t key[DRAY__TLS_KEY];
    if (!coordinator->generation) {
        if (getrandom(session->token, sizeof session->token, 0) != (ssize_t)sizeof session->token)
            return dray__fail_errno(error, errno, "HELLO: getrandom");
        return DRAY_OK;
    }
    snprintf(text, sizeof text, "dray1 session %llu %llu %u %llu %u %s/%s",
             (unsigned long long)session->member, (unsigned long long)session->epoch, session->may,
             (unsigned long long)session->host, session->rank, session->role, session->name);
    if (!dray__derive_key(coordinator->state.bytes, text, key))
        return dray__nomem(error);
    memcpy(session->token, key, sizeof session->token);
    return DRAY_OK;
}

/* Checks that one token does not have more sessions than the limit. */
static int check_count(const dray__coordinator *coordinator, const dray__session *session,
                       dray_error *error)
{
    const char *token = dray__session_token(session);
    uint64_t count = dray__coordinator_sessions(coordinator, token);
    if (count < coordinator->limits.sessions)
        return DRAY_OK;
    return dray__fail(error, DRAY_EFULL,
                      "HELLO: the token %s has %llu sessions, the coordinator allows %llu", token,
                      (unsigned long long)count, (unsigned long long)coordinator->limits.sessions);
}

static dray__session *find_session(const dray__coordinator *coordinator, uint64_t member);

/* Takes back a session of an earlier coordinator under its id. */
static int take_back(dray__coordinator *coordinator, dray__session *session,
                     const dray__session_claim *given, dray_error *error)
{
    unsigned long long member = given->member;
    uint64_t from = (given->member >> DRAY__GENERATION_SHIFT) + 1;
    session->member = given->member;
    session->epoch = given->epoch;
    int status = make_token(coordinator, session, error);
    if (status)
        return status;
    if (!coordinator->generation || given->token_size != DRAY__TOKEN ||
        !dray__same_bytes(given->token, session->token, DRAY__TOKEN))
        return dray__fail(error, DRAY_EPERM,
                          "RETURN: this coordinator does not know member %llu: open a session anew",
                          member);
    if (from >= coordinator->generation)
        return dray__fail(error, DRAY_ECLOSED, "RETURN: the session of member %llu has ended",
                          member);
    if (find_session(coordinator, given->member))
        return dray__fail(error, DRAY_EBUSY, "RETURN: member %llu is here already", member);
    char key[DRAY__NAME_MAX + DRAY__ROLE_MAX + 32];
    uint32_t begun = 0;
    epoch_key(session, key, sizeof key);
    dray__map_get(&coordinator->epochs, key, &begun);
    if (given->epoch > begun && !dray__map_set(&coordinator->epochs, key, (uint32_t)given->epoch))
        return dray__nomem(error);
    return DRAY_OK;
}

static int begin_anew(dray__coordinator *coordinator, dray__session *session, dray_error *error)
{
    if (next_epoch(coordinator, session, &session->epoch) < 0)
        return dray__nomem(error);
    session->member = ++coordinator->members;
    return make_token(coordinator, session, error);
}

static void admit(dray__connection *connection, dray__session *session)
{
    connection->session = session;
    connection->inbox.most = 0;
}

static int begin_session(dray__coordinator *coordinator, dray__request *request,
                         dray__session *session, dray_error *error)
{
    if (request->connection->session)
        return dray__fail(error, DRAY_EPROTO, "HELLO: this connection has a session");
    dray__session_claim given = {0};
    bool returns = request->type == DRAY__MSG_RETURN;
    session->first = request->connection;
    int status = read_hello(&request->reader, session, returns ? &given : NULL, error);
    if (!status && !returns) /* members that come back have been counted before */
        status = check_count(coordinator, session, error);
    if (!status)
        status = returns ? take_back(coordinator, session, &given, error)
                         : begin_anew(coordinator, session, error);
    if (status)
        return status;
    session->coordinator = coordinator;
    session->since_ns = dray__now();
    session->pid = request->connection->pid;
    session->next = coordinator->sessions;
    coordinator->sessions = session;
    admit(request->connection, session);
    dray__log(DRAY_LOG_INFO, "control: member %llu (%s %s, rank %u) came%s",
              (unsigned long long)session->member, session->role, session->name, session->rank,
              returns ? " back" : "");
    return DRAY_OK;
}

static int hello(void *self, dray__request *request, const void *message, dray_error *error)
{
    (void)message;
    dray__coordinator *coordinator = ((const sessions *)self)->coordinator;
    dray__session *session = calloc(1, sizeof *session);
    if (!session)
        return dray__nomem(error);
    int status = begin_session(coordinator, request, session, error);
    if (status) {
        free(session->name);
        free(session->role);
        free(session);
        return status;
    }
    bool moves =
        session->may & (DRAY__MAY_TRAINER | DRAY__MAY_ENGINE); /* they connect to each other */
    const dray__hello_told told = {
        .version = DRAY__PROTOCOL_VERSION,
        .claim = {session->member, session->epoch, session->token, sizeof session->token},
        .keeper = coordinator->keeper_path,
        .identity = moves ? coordinator->data.identity : "",
        .key = coordinator->data.bytes,
        .key_size = moves ? sizeof coordinator->data.bytes : 0,
        .takes_back = coordinator->generation != 0};
    dray__request_answer(request, &dray__hello_told_fields, &told);
    return DRAY_OK;
}

static dray__session *find_session(const dray__coordinator *coordinator, uint64_t member)
{
    for (dray__session *s = coordinator->sessions; s; s = s->next)
        if (s->member == member && !s->ended)
            return s;
    return NULL;
}

/* Attaches a connection to a session. A client with another secret had this number at an earlier
 * coordinator. */
static int attach(void *self, dray__request *request, const void *message, dray_error *error)
{
    const dray__session_claim *m = message;
    dray__session *session = find_session(((const sessions *)self)->coordinator, m->member);
    if (request->connection->session)
        return dray__fail(error, DRAY_EPROTO, "ATTACH: this connection has a session");
    if (m->token_size != DRAY__TOKEN)
        return dray__fail(error, DRAY_EPERM, "ATTACH: a token of %zu bytes", m->token_size);
    if (!session || session->first->doomed ||
        !dray__same_bytes(m->token, session->token, m->token_size))
        return dray__fail(error, DRAY_ECLOSED, "ATTACH: this session of member %llu has ended",
                          (unsigned long long)m->member);
    if (request->connection->may != session->first->may)
        return dray__fail(error, DRAY_EPERM, "ATTACH: member %llu came with another role",
                          (unsigned long long)m->member);
    admit(request->connection, session);
    dray__request_reply(request, NULL, NULL, 0);
    return DRAY_OK;
}

static int ping(void *self, dray__request *request, const void *message, dray_error *error)
{
    (void)self, (void)message, (void)error;
    dray__writer w = {0};
    dray__put_bytes(&w, request->reader.data, request->reader.size);
    dray__request_reply(request, &w, NULL, 0);
    dray__writer_free(&w);
    return DRAY_OK;
}

/* ---- STATUS, BARRIER ------------------------------------------------------------------------ */

static json_t *session_json(const dray__session *s, int64_t now)
{
    uint32_t connections = 0;
    for (const dray__connection *c = s->coordinator->connections; c; c = c->next)
        connections += c->session == s;
    return json_pack(
        "{s:I, s:I, s:s, s:s, s:I, s:I, s:b, s:f, s:I}", "member", (json_int_t)s->member, "epoch",
        (json_int_t)s->epoch, "name", s->name, "role", s->role, "rank", (json_int_t)s->rank, "pid",
        (json_int_t)(s->pid ? s->pid : s->told_pid), "local", s->pid > 0, "age_seconds",
        (double)(now - s->since_ns) / (double)DRAY__SECOND, "connections", (json_int_t)connections);
}

static void add_sessions(void *user, json_t *object)
{
    sessions *self = user;
    const dray__coordinator *coordinator = self->coordinator;
    int64_t now = dray__now();
    json_t *listening = json_array(), *list = json_array();
    for (uint32_t i = 0; i < coordinator->listener_count; i++)
        json_array_append_new(listening, json_string(coordinator->listeners[i].text));
    for (const dray__session *s = coordinator->sessions; s; s = s->next)
        json_array_insert_new(list, 0, session_json(s, now)); /* the oldest first */
    json_object_set_new(object, "version", json_string(dray_version()));
    json_object_set_new(object, "pid", json_integer(getpid()));
    json_object_set_new(object, "age_seconds",
                        json_real((double)(now - coordinator->since_ns) / (double)DRAY__SECOND));
    json_object_set_new(object, "listening", listening);
    json_object_set_new(object, "sessions", list);
    dray__barriers_status(self->barriers, object);
}

json_t *dray__coordinator_status(const dray__coordinator *coordinator)
{
    json_t *object = json_object();
    for (uint32_t i = 0; i < coordinator->service_count; i++) {
        const dray__registered *r = &coordinator->services[i];
        if (r->service.status)
            r->service.status(r->self, object);
    }
    return object;
}

static int status_request(void *self, dray__request *request, const void *message,
                          dray_error *error)
{
    (void)message, (void)error;
    json_t *object = dray__coordinator_status(((const sessions *)self)->coordinator);
    char *text = object ? dray__json_text(object, JSON_COMPACT) : NULL;
    json_decref(object);
    dray__writer w = {0};
    dray__put_string(&w, text);
    w.failed = w.failed || !text;
    dray__request_reply(request, &w, NULL, 0);
    dray__writer_free(&w);
    free(text);
    return DRAY_OK;
}

static int barrier_request(void *self, dray__request *request, const void *message,
                           dray_error *error)
{
    return dray__barriers_enter(((const sessions *)self)->barriers, request, message, error);
}

static const dray__handler handlers[] = {
    {DRAY__MSG_HELLO, NULL, hello},
    {DRAY__MSG_ATTACH, &dray__attach_fields, attach},
    {DRAY__MSG_PING, NULL, ping},
    {DRAY__MSG_BARRIER, &dray__meeting_fields, barrier_request},
    {DRAY__MSG_STATUS, NULL, status_request},
    {DRAY__MSG_RETURN, NULL, hello},
    {0},
};

static void expired(void *user, dray__request *request, int channel_gone)
{
    sessions *self = user;
    dray__barriers_expired(self->barriers, request, channel_gone);
}

static void session_ended(void *user, dray__session *session)
{
    sessions *self = user;
    dray__barriers_ended(self->barriers, session);
}

static void free_sessions(void *user)
{
    sessions *self = user;
    dray__barriers_free(self->barriers);
    free(self);
}

int dray__sessions_add(dray__coordinator *coordinator, dray_error *error)
{
    static const dray__service service = {.name = "sessions",
                                          .first = 0x0000,
                                          .last = 0x00FF,
                                          .handlers = handlers,
                                          .expired = expired,
                                          .session_ended = session_ended,
                                          .status = add_sessions,
                                          .free = free_sessions};
    sessions *self = calloc(1, sizeof *self);
    if (!self)
        return dray__nomem(error);
    self->coordinator = coordinator;
    self->barriers = dray__barriers_new();
    int status = self->barriers ? dray__coordinator_add(coordinator, &service, self, error)
                                : dray__nomem(error);
    if (status)
        free_sessions(self);
    return status;
}

/* ---- functions for services ------------------------------------------------------------------ */

uint64_t dray__session_member(const dray__session *session)
{
    return session->member;
}

const char *dray__session_token(const dray__session *session)
{
    uint32_t may = session->first->may;
    if (may == DRAY__MAY_ALL)
        return "master";
    return session->first->tls ? dray__token_role_of(dray__tls_identity(session->first->tls)) : "?";
}

uint64_t dray__coordinator_sessions(const dray__coordinator *coordinator, const char *token)
{
    uint64_t count = 0;
    for (const dray__session *s = coordinator->sessions; s; s = s->next)
        count += !s->ended && strcmp(dray__session_token(s), token) == 0;
    return count;
}

const dray__limits *dray__coordinator_limits(const dray__coordinator *coordinator)
{
    return &coordinator->limits;
}

const char *dray__session_name(const dray__session *session)
{
    return session->name;
}

uint64_t dray__session_host(const dray__session *session)
{
    return session->host;
}

int64_t dray__session_pid(const dray__session *session)
{
    return session->pid;
}

bool dray__request_local(const dray__request *request)
{
    return request->connection && request->connection->local;
}

bool dray__request_master(const dray__request *request)
{
    return request->connection && request->connection->may == DRAY__MAY_ALL;
}

bool dray__coordinator_key(const dray__coordinator *coordinator, const char *use,
                           dray__tls_key *out)
{
    const dray__token *data = &coordinator->data;
    const char *role = dray__token_role_of(data->identity);
    char text[DRAY__TLS_IDENTITY];
    snprintf(text, sizeof text, "dray1 use %s", use);
    snprintf(out->identity, sizeof out->identity, "%.*s%s", (int)(role - data->identity),
             data->identity, use);
    return dray__derive_key(data->bytes, text, out->bytes);
}
