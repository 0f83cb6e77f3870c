#include "control/relay.h"

#include "base/array.h"
#include "base/clock.h"
#include "base/error.h"

#include <stdlib.h>
#include <string.h>

enum { WHAT_BYTES = 32, MESSAGE_BYTES = DRAY_ERROR_MESSAGE_MAX, ROLE_BYTES = 64 };

const dray__fields dray__host_ask_fields =
    DRAY__FIELDS(dray__host_ask, DRAY__FIELD_TEXT(dray__host_ask, what, WHAT_BYTES),
                 DRAY__FIELD_BLOB(dray__host_ask, json, json_size),
                 DRAY__FIELD_BLOB(dray__host_ask, bytes, size));
const dray__fields dray__host_told_fields =
    DRAY__FIELDS(dray__host_told, DRAY__FIELD_BLOB(dray__host_told, json, json_size));
static const dray__fields answer_fields =
    DRAY__FIELDS(dray__host_answer, DRAY__NUMBERS(dray__host_answer, number, code),
                 DRAY__FIELD_PROSE(dray__host_answer, message, MESSAGE_BYTES),
                 DRAY__FIELD_BLOB(dray__host_answer, json, json_size));
const dray__fields dray__host_next_fields =
    DRAY__FIELDS(dray__host_next, DRAY__NUMBERS(dray__host_next, timeout_ns),
                 DRAY__FIELD_LIST(dray__host_next, answers, count, answer_fields));
static const dray__fields asked_fields =
    DRAY__FIELDS(dray__host_asked, DRAY__NUMBERS(dray__host_asked, number, member),
                 DRAY__FIELD_TEXT(dray__host_asked, token, ROLE_BYTES),
                 DRAY__FIELD_STRUCT(dray__host_asked, ask, dray__host_ask_fields));
const dray__fields dray__host_asks_fields =
    DRAY__FIELDS(dray__host_asks, DRAY__FIELD_LIST(dray__host_asks, items, count, asked_fields));

typedef struct asked {
    struct asked *next;
    dray__request *request;
    uint64_t number, member;
    bool given; /* it was sent to the supervisor */
    char *what, *token;
    void *json, *bytes;
    size_t json_size, size;
} asked;

typedef struct relay {
    asked *first; /* the oldest first */
    uint64_t numbers;
    dray__request *next; /* the supervisor's waiting request; NULL when it does not wait */
    uint64_t *members;   /* members that have asked */
    uint64_t member_count, member_room;
    uint64_t *gone; /* members of these with an ended session that the supervisor does not know
                       about yet */
    uint64_t gone_count, gone_room;
} relay;

/* ---- requests of hosts ----------------------------------------------------------------------- */

static void asked_free(asked *a)
{
    free(a->what);
    free(a->token);
    free(a->json);
    free(a->bytes);
    free(a);
}

static asked *take_out(relay *self, const dray__request *request, uint64_t number)
{
    for (asked **at = &self->first; *at; at = &(*at)->next)
        if (request ? (*at)->request == request : (*at)->number == number && (*at)->given) {
            asked *found = *at;
            *at = found->next;
            return found;
        }
    return NULL;
}

static bool copy(void **out, const void *bytes, size_t size)
{
    *out = malloc(size + 1);
    if (*out && size)
        memcpy(*out, bytes, size);
    return *out != NULL;
}

static bool know(relay *self, uint64_t member)
{
    for (uint64_t i = 0; i < self->member_count; i++)
        if (self->members[i] == member)
            return true;
    if (!dray__append(&self->members, sizeof *self->members, self->member_count,
                      &self->member_room))
        return false;
    self->members[self->member_count++] = member;
    return true;
}

static void tell_supervisor(relay *self);

static int ask(void *user, dray__request *request, const void *message, dray_error *error)
{
    relay *self = user;
    const dray__host_ask *m = message;
    const dray__session *session = dray__request_session(request);
    if (m->json_size > DRAY__HOST_JSON_MOST || m->size > DRAY__HOST_ASK_MOST - m->json_size)
        return dray__fail(error, DRAY_EINVALID,
                          "HOST_ASK: at most %d bytes expected, found %zu and %zu",
                          DRAY__HOST_ASK_MOST, m->json_size, m->size);
    asked *a = calloc(1, sizeof *a), **end = &self->first;
    bool whole = a && copy(&a->json, m->json, m->json_size) && copy(&a->bytes, m->bytes, m->size) &&
                 (a->what = strdup(m->what)) && (a->token = strdup(dray__session_token(session))) &&
                 know(self, dray__session_member(session));
    if (!whole) {
        if (a)
            asked_free(a);
        return dray__nomem(error);
    }
    a->json_size = m->json_size;
    a->size = m->size;
    a->request = request;
    a->number = ++self->numbers;
    a->member = dray__session_member(session);
    while (*end)
        end = &(*end)->next;
    *end = a;
    tell_supervisor(self);
    return DRAY_OK;
}

static int say_clock(void *user, dray__request *request, const void *message, dray_error *error)
{
    (void)user, (void)message, (void)error;
    uint64_t now = (uint64_t)dray__now();
    dray__request_answer(request, &dray__u64_fields, &now);
    return DRAY_OK;
}

/* ---- the supervisor -------------------------------------------------------------------------- */

enum { AT_ONCE = 256, BYTES_AT_ONCE = 24 << 20 };

/* Sends the requests that were not given yet, if the supervisor waits for them. */
static void tell_supervisor(relay *self)
{
    static dray__host_asked items[AT_ONCE]; /* static, as the loop has one thread */
    uint32_t count = 0;
    size_t bytes = 0;
    if (!self->next)
        return;
    /* Requests first, because a member's request came before its end. */
    for (asked *a = self->first; a && count < AT_ONCE && bytes < BYTES_AT_ONCE; a = a->next) {
        if (a->given)
            continue;
        a->given = true;
        bytes += a->size + a->json_size;
        items[count++] =
            (dray__host_asked){.number = a->number,
                               .member = a->member,
                               .token = a->token,
                               .ask = {a->what, a->json, a->bytes, a->json_size, a->size}};
    }
    while (self->gone_count && count < AT_ONCE)
        items[count++] = (dray__host_asked){
            .member = self->gone[--self->gone_count], .token = "", .ask = {.what = "gone"}};
    if (!count)
        return;
    dray__request *next = self->next;
    self->next = NULL;
    dray__request_answer(next, &dray__host_asks_fields, &(dray__host_asks){items, count});
}

static void answer(relay *self, const dray__host_answer *with)
{
    asked *a = take_out(self, NULL, with->number);
    dray_error error;
    if (!a) /* the host that asked is gone */
        return;
    if (with->code) {
        dray__fail(&error, with->code, "%s", with->message);
        dray__request_fail(a->request, &error);
    } else {
        dray__request_answer(a->request, &dray__host_told_fields,
                             &(dray__host_told){with->json, with->json_size});
    }
    asked_free(a);
}

static int next(void *user, dray__request *request, const void *message, dray_error *error)
{
    relay *self = user;
    const dray__host_next *m = message;
    for (uint32_t i = 0; i < m->count; i++)
        answer(self, &m->answers[i]);
    if (self->next)
        return dray__fail(error, DRAY_EBUSY, "HOST_NEXT: a supervisor is here already");
    if (dray__request_expire_at(request, dray__deadline(m->timeout_ns)))
        return dray__nomem(error);
    self->next = request;
    tell_supervisor(self);
    return DRAY_OK;
}

static void expired(void *user, dray__request *request, int channel_gone)
{
    relay *self = user;
    if (request == self->next) {
        self->next = NULL;
        dray__request_answer(request, &dray__host_asks_fields, &(dray__host_asks){0});
        return;
    }
    (void)channel_gone; /* a host's request has no deadline here */
    asked *a = take_out(self, request, 0);
    dray__request_reply(request, NULL, NULL, 0);
    if (a)
        asked_free(a);
}

static void session_ended(void *user, dray__session *session)
{
    relay *self = user;
    uint64_t member = dray__session_member(session);
    for (uint64_t i = 0; i < self->member_count; i++) {
        if (self->members[i] != member)
            continue;
        self->members[i] = self->members[--self->member_count];
        if (dray__append(&self->gone, sizeof *self->gone, self->gone_count, &self->gone_room))
            self->gone[self->gone_count++] = member;
        tell_supervisor(self);
        return;
    }
}

static void relay_free(void *user)
{
    relay *self = user;
    while (self->first) {
        asked *a = self->first;
        self->first = a->next;
        asked_free(a);
    }
    free(self->members);
    free(self->gone);
    free(self);
}

int dray__relay_add(dray__coordinator *coordinator, dray_error *error)
{
    static const dray__handler handlers[] = {
        {DRAY__MSG_HOST_ASK, &dray__host_ask_fields, ask},
        {DRAY__MSG_HOST_NEXT, &dray__host_next_fields, next},
        {DRAY__MSG_HOST_CLOCK, NULL, say_clock},
        {0},
    };
    static const dray__service service = {.name = "hosts",
                                          .first = 0x0600,
                                          .last = 0x06FF,
                                          .handlers = handlers,
                                          .expired = expired,
                                          .session_ended = session_ended,
                                          .free = relay_free};
    relay *self = calloc(1, sizeof *self);
    int rc = self ? dray__coordinator_add(coordinator, &service, self, error) : dray__nomem(error);
    if (rc && self)
        relay_free(self);
    return rc;
}
