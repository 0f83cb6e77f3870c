#include "run/join/uplink.h"

#include "base/clock.h"
#include "base/error.h"
#include "base/hash.h"
#include "base/json.h"
#include "base/thread.h"
#include "control/context.h"
#include "control/relay.h"
#include "control/token.h"
#include "run/job/contract.h"
#include "run/join/files.h"
#include "run/join/hosts.h"
#include "run/paths.h"

#include <inttypes.h>
#include <limits.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/random.h>
#include <sys/socket.h>

enum {
    TOKENS = 8,
    ROLE = 16,
    PULSE_MS = 1000,
    ANSWER_SECONDS = 8,
    FRESH_MS = 2500,
    AGAIN_MS = 500,
    LOOK_MS = 50,
    HURRY_MS = 1000,
    DRIFT = 20000 /* two clocks may drift apart by 1 ns in this many */
};

typedef struct token_file {
    char role[ROLE];
    const char *path;
} token_file;

struct dray__uplink {
    dray__uplink_options o;
    token_file tokens[TOKENS];
    uint32_t token_count;
    char kept[PATH_MAX]; /* the file in which the token of the environment is put */
    char key[40];        /* the identity of this process, the same in all of its sessions */
    json_t *told;        /* the answer to "join"; NULL until there is one */
    dray_context *context;
    dray__channel *channel;
    dray__host_files *files;
    dray__host_files_part part;
    bool unread; /* the thread's: the files could not be read for the last pulse */
    /* The best comparison; clock_at_ns is 0 when there is none. */
    int64_t clock_ns, clock_error_ns, clock_at_ns;
    dray__worker worker; /* its lock protects the fields below */
    dray__uplink_sight sight;
    json_t *said; /* what the run has not answered yet, numbered from 1 */
    json_int_t said_count;
    bool busy, leaving, left; /* left: the thread has left, or could not */
    char failed[DRAY_ERROR_MESSAGE_MAX];
    int64_t leave_by_ns;
};

/* ---- tokens ---------------------------------------------------------------------------------- */

static int add_token(dray__uplink *link, const char *path, dray_error *error)
{
    dray__token token;
    int rc = dray__token_read(path, &token, error);
    if (rc)
        return rc;
    if (link->token_count == TOKENS)
        return dray__fail(error, DRAY_EINVALID, "at most %d files of tokens expected", TOKENS);
    token_file *to = &link->tokens[link->token_count++];
    snprintf(to->role, sizeof to->role, "%s", dray__token_role_of(token.identity));
    to->path = path;
    dray__forget_bytes(&token, sizeof token);
    return DRAY_OK;
}

const char *dray__uplink_token(const dray__uplink *link, const dray__job_role *role)
{
    const char *need = dray__role_token(role);
    for (uint32_t i = 0; i < link->token_count; i++)
        if (strcmp(link->tokens[i].role, need) == 0 || strcmp(link->tokens[i].role, "master") == 0)
            return link->tokens[i].path;
    return NULL;
}

static const dray__job_role *role_named(const dray__job *job, const char *name)
{
    for (uint32_t i = 0; i < job->role_count; i++)
        if (strcmp(job->roles[i].name, name) == 0)
            return &job->roles[i];
    return NULL;
}

static int find_tokens(dray__uplink *link, dray_error *error)
{
    const char *own = getenv("DRAY_TOKEN_FILE"), *name;
    int rc = DRAY_OK;
    for (uint32_t i = 0; i < link->o.token_count && !rc; i++)
        rc = add_token(link, link->o.tokens[i], error);
    dray__path(link->kept, sizeof link->kept, "%s/token", link->o.folder);
    const char *text = getenv("DRAY_TOKEN");
    if (!rc && !link->o.token_count && text && text[0]) {
        rc = dray__token_keep(link->kept, error);
        if (!rc)
            rc = add_token(link, link->kept, error);
    } else if (!rc && !link->o.token_count && own && own[0]) {
        rc = add_token(link, own, error);
    }
    if (!rc && !link->token_count)
        rc = dray__fail(error, DRAY_ENOENT,
                        "no token: `--token FILE`, or $DRAY_TOKEN_FILE; the run's are in `tokens` "
                        "of its folder, and `dray token` makes them");
    json_t *value;
    json_object_foreach(link->o.roles, name, value)
    {
        const dray__job_role *role = role_named(link->o.job, name);
        if (!rc && role && !dray__uplink_token(link, role))
            rc = dray__fail(error, DRAY_EPERM,
                            "role %s needs a token of the role %s; found one of the role %s (%s)",
                            name, dray__role_token(role), link->tokens[0].role,
                            link->tokens[0].path);
    }
    return rc;
}

/* ---- open and close -------------------------------------------------------------------------- */

int dray__uplink_open(const dray__uplink_options *options, dray__uplink **out, dray_error *error)
{
    uint64_t key[2];
    dray__uplink *link = calloc(1, sizeof *link);
    if (!link)
        return dray__nomem(error);
    dray__worker_init(&link->worker);
    link->o = *options;
    int rc = getrandom(key, sizeof key, 0) == (ssize_t)sizeof key
                 ? DRAY_OK
                 : dray__fail(error, DRAY_ESYS, "getrandom");
    if (!rc) {
        snprintf(link->key, sizeof link->key, "%016" PRIx64 "%016" PRIx64, key[0], key[1]);
        rc = find_tokens(link, error);
    }
    if (!rc)
        rc = dray__host_files_open(options->folder, &link->files, error);
    if (rc)
        dray__uplink_close(link);
    else
        *out = link;
    return rc;
}

void dray__uplink_end(dray__uplink *link)
{
    pthread_mutex_lock(&link->worker.lock);
    link->worker.ending = true;
    pthread_cond_signal(&link->worker.wake);
    pthread_mutex_unlock(&link->worker.lock);
    dray__thread_join(&link->worker.thread);
    link->worker.ending = false;
    dray__channel_close(link->channel);
    dray_close(link->context);
    link->channel = NULL;
    link->context = NULL;
}

void dray__uplink_close(dray__uplink *link)
{
    if (!link)
        return;
    dray__uplink_end(link);
    dray__worker_end(&link->worker);
    dray__host_files_part_free(&link->part);
    dray__host_files_close(link->files);
    json_decref(link->told);
    json_decref(link->said);
    free(link);
}

/* ---- joining --------------------------------------------------------------------------------- */

static int ask(dray__uplink *link, const char *what, json_t *json,
               const dray__host_files_part *part, int64_t deadline_ns, json_t **out,
               dray_error *error)
{
    char *text = json ? json_dumps(json, JSON_COMPACT) : NULL;
    json_decref(json);
    if (!text)
        return dray__nomem(error);
    const dray__host_ask message = {what, text, part ? part->bytes : NULL, strlen(text),
                                    part ? part->size : 0};
    dray__host_told told;
    dray__arena texts = {0};
    int rc = dray__ask(link->channel, DRAY__MSG_HOST_ASK, &dray__host_ask_fields, &message,
                       deadline_ns, &texts, &dray__host_told_fields, &told, error);
    if (!rc && out)
        rc = dray__json_parse(told.json, told.json_size, "the run's answer", out, error);
    dray__arena_free(&texts);
    free(text);
    return rc;
}

static int open_session(dray__uplink *link, int64_t deadline_ns, dray_error *error)
{
    dray_options options = DRAY_OPTIONS_INIT;
    char name[80];
    snprintf(name, sizeof name, "host %s", link->o.name);
    options.address = link->o.address;
    options.name = name;
    options.timeout_ns = (int64_t)dray__left(deadline_ns) + DRAY__MILLISECOND;
    setenv("DRAY_TOKEN_FILE", link->tokens[0].path, 1);
    unsetenv("DRAY_TOKEN");
    int rc = dray_open(&options, &link->context, error);
    return rc ? rc : dray__channel_open(link->context, &link->channel, error);
}

static int join_once(dray__uplink *link, int64_t deadline_ns, json_t **told, dray_error *error)
{
    struct sockaddr_storage own;
    char host[64] = "";
    int rc = link->channel ? DRAY_OK : open_session(link, deadline_ns, error);
    if (rc)
        return rc;
    const char *data = getenv("DRAY_DATA_ADDRESS");
    if (data && data[0])
        snprintf(host, sizeof host, "%.*s", (int)strcspn(data, ":"), data);
    else if (dray__context_find(link->context, false, &own))
        dray__address_host(&own, host, sizeof host, NULL);
    json_t *json =
        json_pack("{s:i, s:s, s:s, s:s, s:s, s:i, s:O}", "format", DRAY__JOIN_FORMAT, "key",
                  link->key, "name", link->o.name, "text", link->o.text, "address", host, "port",
                  (int)dray__free_port(), "roles", link->o.roles);
    if (json && link->told) {
        json_object_set(json, "id", json_object_get(link->told, "id"));
        json_object_set(json, "epoch", json_object_get(link->told, "epoch"));
    }
    int64_t until = dray__deadline(ANSWER_SECONDS * DRAY__SECOND);
    rc = ask(link, "join", json, NULL, until < deadline_ns ? until : deadline_ns, told, error);
    if (rc == DRAY_ECLOSED && dray__channel_broken(link->channel))
        dray__uplink_end(link); /* tries again with a new session */
    return rc;
}

int dray__uplink_join(dray__uplink *link, const json_t **told, dray_error *error)
{
    int64_t deadline = dray__deadline(link->o.wait_ns);
    json_t *answer = NULL;
    bool said = false;
    int rc;
    while ((rc = join_once(link, deadline, &answer, error)) != DRAY_OK) {
        bool later = rc == DRAY_EBUSY || rc == DRAY_ETIMEDOUT ||
                     (rc == DRAY_ECLOSED && (!link->channel || !link->context));
        if (!later || dray__now() > deadline || dray__interrupted())
            return rc;
        if (!said)
            link->o.say("waiting", error->message);
        said = true;
        poll(NULL, 0, AGAIN_MS);
    }
    json_decref(link->told);
    link->told = answer;
    link->sight = (dray__uplink_sight){.answered_ns = dray__now()};
    link->clock_at_ns = 0;
    *told = answer;
    return DRAY_OK;
}

/* ---- the thread ------------------------------------------------------------------------------ */

static void compare_clocks(dray__uplink *link)
{
    static const dray__field none = {.name = NULL};
    static const dray__fields nothing = {"HOST_CLOCK", 0, &none};
    uint64_t there = 0;
    int64_t sent = dray__now();
    int rc = dray__ask(link->channel, DRAY__MSG_HOST_CLOCK, &nothing, NULL,
                       dray__deadline(ANSWER_SECONDS * DRAY__SECOND), NULL, &dray__u64_fields,
                       &there, NULL);
    int64_t back = dray__now(), error_ns = (back - sent) / 2;
    int64_t best = link->clock_error_ns + (back - link->clock_at_ns) / DRIFT;
    if (rc || (link->clock_at_ns && best < error_ns))
        return;
    link->clock_ns = (int64_t)there - sent - error_ns;
    link->clock_error_ns = error_ns;
    link->clock_at_ns = back;
}

/* What a pulse tells: so many of the events, and whether processes compute. */
typedef struct telling {
    size_t said;
    bool busy;
} telling;

static json_t *tell(dray__uplink *link, json_t *files, telling *told)
{
    pthread_mutex_lock(&link->worker.lock);
    json_t *said = link->said ? json_copy(link->said) : json_array();
    *told = (telling){.said = json_array_size(said), .busy = link->busy};
    json_t *json = json_pack("{s:o, s:b, s:O}", "say", said, "busy", link->busy, "files", files);
    if (json && link->failed[0])
        json_object_set_new(json, "failed", json_string(link->failed));
    link->busy = false;
    pthread_mutex_unlock(&link->worker.lock);
    return json;
}

/* Forgets the events that the run has taken. Without an answer they are told again, and the run
 * knows by their numbers those that it has taken already. */
static void note_told(dray__uplink *link, const telling *told, bool answered)
{
    pthread_mutex_lock(&link->worker.lock);
    for (size_t i = 0; answered && i < told->said; i++)
        json_array_remove(link->said, 0);
    link->busy = link->busy || (told->busy && !answered);
    pthread_mutex_unlock(&link->worker.lock);
}

/* Takes the new bytes of the folder's files. A file that cannot be read now is tried at the next
 * pulse, and the run hears of this host all the same. Returns false when there is nothing to send.
 */
static bool take_files(dray__uplink *link, int64_t error_ns)
{
    dray_error error;
    int rc = dray__host_files_take(link->files, link->clock_ns, error_ns, &link->part, &error);
    if (rc && !link->unread)
        dray__uplink_say(link, "warning", error.message);
    link->unread = rc != DRAY_OK;
    if (rc) {
        json_array_clear(link->part.list);
        link->part.size = 0;
        link->part.more = false;
    }
    return !rc;
}

/* *more is true when there are more bytes to send. */
static int pulse(dray__uplink *link, bool *more, dray_error *error)
{
    json_t *answer = NULL;
    telling told = {0};
    compare_clocks(link);
    int64_t asked = dray__now();
    int64_t error_ns = link->clock_error_ns + (asked - link->clock_at_ns) / DRIFT;
    bool taken = take_files(link, error_ns);
    int rc = ask(link, "pulse", tell(link, link->part.list, &told), &link->part,
                 dray__deadline(ANSWER_SECONDS * DRAY__SECOND), &answer, error);
    note_told(link, &told, rc == DRAY_OK);
    if (rc)
        return rc;
    const json_t *unkept = json_object_get(answer, "unkept"); /* what the run could not write */
    if (taken)
        dray__host_files_took(link->files, unkept);
    *more = link->part.more;
    pthread_mutex_lock(&link->worker.lock);
    link->sight.progress = (uint64_t)dray__json_integer(answer, "progress");
    link->sight.answered_ns = dray__now();
    link->sight.asked_ns = asked;
    link->sight.ended = dray__json_true(answer, "ended");
    link->sight.over = dray__json_true(answer, "over");
    const char *why = dray__json_string(answer, "why");
    snprintf(link->sight.why, sizeof link->sight.why, "%s", why ? why : "");
    pthread_mutex_unlock(&link->worker.lock);
    json_decref(answer);
    return DRAY_OK;
}

static void lose(dray__uplink *link, const dray_error *error)
{
    pthread_mutex_lock(&link->worker.lock);
    link->sight.lost = true;
    snprintf(link->sight.why, sizeof link->sight.why, "%s", error->message);
    pthread_mutex_unlock(&link->worker.lock);
}

/* Returns whether the request is sent again, as after a late answer. A refusal or the session's end
 * ends the thread. */
static bool goes_on(int rc)
{
    return rc == DRAY_OK || rc == DRAY_ETIMEDOUT || rc == DRAY_EAGAIN;
}

static void *beat(void *user)
{
    dray__uplink *link = user;
    dray_error error = {0};
    bool ending = false, more = false;
    int rc = DRAY_OK;
    while (!ending && goes_on(rc)) {
        rc = pulse(link, &more, &error);
        pthread_mutex_lock(&link->worker.lock);
        bool sent = !rc && !more && !link->unread;
        if (link->unread || (!more && !link->worker.ending && !link->leaving))
            dray__cond_wait(&link->worker.wake, &link->worker.lock,
                            dray__deadline(PULSE_MS * DRAY__MILLISECOND));
        ending =
            link->worker.ending || (link->leaving && (dray__now() > link->leave_by_ns || sent));
        pthread_mutex_unlock(&link->worker.lock);
    }
    bool leave = link->leaving && goes_on(rc);
    if (leave) /* sends once more, for bytes that were written while the last part was sent */
        rc = pulse(link, &more, &error);
    if (leave && !rc)
        rc = ask(link, "leave", json_object(), NULL, dray__deadline(ANSWER_SECONDS * DRAY__SECOND),
                 NULL, &error);
    if (rc && !goes_on(rc))
        lose(link, &error);
    pthread_mutex_lock(&link->worker.lock);
    link->left = true;
    pthread_cond_broadcast(&link->worker.wake);
    pthread_mutex_unlock(&link->worker.lock);
    return NULL;
}

int dray__uplink_begin(dray__uplink *link, dray_error *error)
{
    link->left = false;
    return dray__thread_start(&link->worker.thread, beat, link, "a host", error);
}

/* ---- from the host's thread ------------------------------------------------------------------ */

void dray__uplink_look(dray__uplink *link, dray__uplink_sight *out)
{
    pthread_mutex_lock(&link->worker.lock);
    *out = link->sight;
    pthread_mutex_unlock(&link->worker.lock);
}

bool dray__uplink_fresh(dray__uplink *link)
{
    dray__uplink_sight sight;
    dray__uplink_look(link, &sight);
    return !sight.lost && dray__now() - sight.answered_ns < FRESH_MS * DRAY__MILLISECOND;
}

uint64_t dray__uplink_progress(dray__uplink *link)
{
    dray__uplink_sight sight;
    dray__uplink_look(link, &sight);
    return sight.progress;
}

void dray__uplink_say(dray__uplink *link, const char *event, const char *text)
{
    link->o.say(event, text);
    pthread_mutex_lock(&link->worker.lock);
    if (!link->said)
        link->said = json_array();
    dray__json_append(&link->said, json_pack("{s:s, s:s, s:I}", "event", event, "text", text,
                                             "number", ++link->said_count));
    pthread_mutex_unlock(&link->worker.lock);
}

void dray__uplink_busy(dray__uplink *link)
{
    pthread_mutex_lock(&link->worker.lock);
    link->busy = true;
    pthread_mutex_unlock(&link->worker.lock);
}

void dray__uplink_leave(dray__uplink *link, const char *failed, int64_t deadline_ns)
{
    pthread_mutex_lock(&link->worker.lock);
    link->leaving = true;
    link->leave_by_ns = deadline_ns;
    snprintf(link->failed, sizeof link->failed, "%s", failed ? failed : "");
    pthread_cond_broadcast(&link->worker.wake);
    int64_t hurry_ns = INT64_MAX;
    while (link->worker.thread.begun && !link->left && dray__now() < hurry_ns) {
        dray__cond_wait(&link->worker.wake, &link->worker.lock,
                        dray__deadline(LOOK_MS * DRAY__MILLISECOND));
        if (hurry_ns == INT64_MAX && link->o.hurries && link->o.hurries())
            hurry_ns = dray__deadline(HURRY_MS * DRAY__MILLISECOND);
    }
    if (!link->left && link->channel)
        shutdown(dray__channel_socket(link->channel), SHUT_RDWR); /* the thread waits there */
    pthread_mutex_unlock(&link->worker.lock);
    dray__thread_join(&link->worker.thread);
}

bool dray__uplink_master(const dray__uplink *link, const dray__job_role *role, char address[64],
                         uint16_t *port)
{
    const json_t *at = json_object_get(json_object_get(link->told, "masters"), role->name);
    const char *host = json_string_value(json_array_get(at, 0));
    snprintf(address, 64, "%s", host ? host : "");
    *port = (uint16_t)json_integer_value(json_array_get(at, 1));
    return host != NULL;
}
