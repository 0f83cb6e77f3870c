/* The service of messages 0x0500..0x05FF: names that one session at a time holds (dray/lease.h).
 *
 * Each name has a queue of turns, in the order in which they were asked for. A turn is in the
 * queues of all of its names, and holds them when it is the first in each. It ends with its
 * session, and with the connection over which it was asked for: a client that gave up before the
 * answer came holds nothing. Each coordinator numbers turns from a range of its own. */
#include "base/clock.h"
#include "base/error.h"
#include "base/log.h"
#include "control/internal.h"

#include <dray/lease.h>
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { GENERATION_SHIFT = 40, WHO = 320 };

typedef struct turn turn;
typedef struct line line;

/* A turn's place in the queue of one of its names. */
typedef struct line_place {
    turn *turn;
    line *line;
    struct line_place *next, **at;
} line_place;

struct line {
    line *next;
    line_place *first, **last;
    char name[];
};

struct turn {
    turn *next;
    dray__request *request; /* NULL when it holds its names */
    const dray__session *session;
    uint64_t channel, number;
    int64_t deadline_ns; /* of the wait */
    int64_t term_ns, since_ns;
    int64_t until_ns; /* end of the term of a silent holder */
    uint32_t count;
    line_place places[];
};

typedef struct leases {
    line *lines; /* the oldest first */
    turn *turns;
    uint64_t first_number, next_number;
} leases;

/* ---- queues ---------------------------------------------------------------------------------- */

static line *find_line(const leases *self, const char *name)
{
    line *at = self->lines;
    while (at && strcmp(at->name, name) != 0)
        at = at->next;
    return at;
}

static line *find_or_make_line(leases *self, const char *name)
{
    line *found = find_line(self, name), **link = &self->lines;
    if (found)
        return found;
    line *new = malloc(sizeof *new + strlen(name) + 1);
    if (!new)
        return NULL;
    strcpy(new->name, name);
    new->next = NULL;
    new->first = NULL;
    new->last = &new->first;
    while (*link)
        link = &(*link)->next;
    return *link = new;
}

static void drop_lane_if_empty(leases *self, const line *empty)
{
    line **link = &self->lines;
    if (empty->first)
        return;
    while (*link != empty)
        link = &(*link)->next;
    line *gone = *link;
    *link = gone->next;
    free(gone);
}

static void enqueue(line_place *p)
{
    p->at = p->line->last;
    *p->at = p;
    p->line->last = &p->next;
}

static void dequeue(line_place *p)
{
    *p->at = p->next;
    if (p->next)
        p->next->at = p->at;
    else
        p->line->last = p->at;
}

/* Returns the first place that has another turn before it in the queue. Returns NULL when the turn
 * holds all of its names, or may. */
static const line_place *behind(const turn *t)
{
    for (uint32_t i = 0; i < t->count; i++)
        if (t->places[i].line->first != &t->places[i])
            return &t->places[i];
    return NULL;
}

static const char *who_is(const dray__session *session, char out[WHO])
{
    snprintf(out, WHO, "member %" PRIu64 " (%s %.200s, rank %" PRIu32 ")", session->member,
             session->role, session->name, session->rank);
    return out;
}

/* ---- turns ----------------------------------------------------------------------------------- */

/* Sets the request's timer. It was made when the request came, so setting it to another time needs
 * no memory. */
static void wake_at_next_chance(const turn *t)
{
    int64_t at = t->deadline_ns;
    for (uint32_t i = 0; i < t->count; i++) {
        const turn *holder = t->places[i].line->first->turn;
        at = !holder->request && holder->until_ns < at ? holder->until_ns : at;
    }
    dray__request_expire_at(t->request, at);
}

static void grant(leases *self, turn *t)
{
    t->number = self->next_number++;
    t->since_ns = dray__now();
    t->until_ns = t->term_ns ? dray__deadline(t->term_ns) : INT64_MAX;
    dray__request_answer(t->request, &dray__u64_fields, &t->number);
    t->request = NULL;
    for (uint32_t i = 0; t->term_ns && i < t->count; i++)
        for (const line_place *p = t->places[i].next; p; p = p->next)
            wake_at_next_chance(p->turn);
}

/* Ends a turn, and tries the requests that waited for it. */
static void leave(leases *self, turn *t)
{
    turn *next[DRAY_LEASE_NAMES], **link = &self->turns;
    for (uint32_t i = 0; i < t->count; i++) {
        dequeue(&t->places[i]);
        next[i] = t->places[i].line->first ? t->places[i].line->first->turn : NULL;
        drop_lane_if_empty(self, t->places[i].line);
    }
    while (*link != t)
        link = &(*link)->next;
    *link = t->next;
    for (uint32_t i = 0; i < t->count; i++)
        if (next[i] && next[i]->request && !behind(next[i]))
            grant(self, next[i]);
    free(t);
}

static void refuse(leases *self, turn *t, const dray_error *error)
{
    dray__request *request = t->request;
    leave(self, t);
    dray__request_fail(request, error);
}

/* ---- requests -------------------------------------------------------------------------------- */

typedef struct lease_names {
    const char *const *text;
    uint32_t count;
} lease_names;

/* Returns whether `role` is in a name such as "engine+trainer/...". */
static bool lists_role(const char *name, const char *role)
{
    const char *end = strchr(name, '/');
    for (const char *at = name; end && at < end;) {
        size_t length = strcspn(at, "+/");
        if (strlen(role) == length && strncmp(at, role, length) == 0)
            return true;
        at += length + 1;
    }
    return false;
}

static int check_names(const lease_names *n, const dray__session *session, dray_error *error)
{
    const char *token = dray__session_token(session);
    if (!n->count || n->count > DRAY_LEASE_NAMES)
        return dray__fail(error, DRAY_EINVALID, "lease: expected 1 to %d names, found %" PRIu32,
                          DRAY_LEASE_NAMES, n->count);
    for (uint32_t i = 0; i < n->count; i++) {
        if (!n->text[i][0])
            return dray__fail(error, DRAY_EINVALID, "lease: a name is empty");
        for (uint32_t j = 0; j < i; j++)
            if (strcmp(n->text[i], n->text[j]) == 0)
                return dray__fail(error, DRAY_EINVALID, "lease '%.256s': the name is there twice",
                                  n->text[i]);
        if (strcmp(token, "master") != 0 && !lists_role(n->text[i], token))
            return dray__fail(error, DRAY_EPERM,
                              "lease '%.200s': the token is for the role %s, which may take names "
                              "that begin with %s/ or with a list of roles that has it",
                              n->text[i], token, token);
    }
    return DRAY_OK;
}

static int check_limit(const leases *self, const lease_names *n, const dray__session *session,
                       dray_error *error)
{
    const char *token = dray__session_token(session);
    uint64_t most = dray__coordinator_limits(session->coordinator)->leases, count = n->count;
    for (const turn *t = self->turns; t; t = t->next)
        count += strcmp(dray__session_token(t->session), token) == 0 ? t->count : 0;
    return count <= most ? DRAY_OK
                         : dray__fail(error, DRAY_EFULL,
                                      "lease '%.200s': the token %s would have %" PRIu64
                                      " leases, held and waited for; the coordinator allows "
                                      "%" PRIu64,
                                      n->text[0], token, count, most);
}

static int check_own(const leases *self, const lease_names *n, const dray__session *session,
                     dray_error *error)
{
    for (uint32_t i = 0; i < n->count; i++) {
        const line *at = find_line(self, n->text[i]);
        for (const line_place *p = at ? at->first : NULL; p; p = p->next)
            if (p->turn->session == session)
                return dray__fail(error, DRAY_EBUSY, "lease '%.256s': this session %s it", at->name,
                                  p->turn->request ? "waits for" : "holds");
    }
    return DRAY_OK;
}

/* Adds a turn at the ends of all its queues. */
static turn *add_turn(leases *self, const lease_names *n, dray__request *request)
{
    turn *t = calloc(1, sizeof *t + n->count * sizeof *t->places);
    if (!t)
        return NULL;
    t->request = request;
    t->session = dray__request_session(request);
    t->channel = dray__request_channel(request);
    t->next = self->turns;
    self->turns = t;
    for (bool whole = true; whole && t->count < n->count;) {
        line_place *p = &t->places[t->count];
        p->turn = t;
        p->line = find_or_make_line(self, n->text[t->count]);
        whole = p->line != NULL;
        t->count += whole;
        if (whole)
            enqueue(p);
    }
    if (t->count == n->count)
        return t;
    leave(self, t);
    return NULL;
}

static int take_turn(leases *self, dray__request *request, const lease_names *n, int64_t timeout_ns,
                     int64_t term_ns, dray_error *error)
{
    const dray__session *session = dray__request_session(request);
    int status = check_names(n, session, error);
    if (!status && (timeout_ns < 0 || term_ns < 0))
        status = dray__fail(error, DRAY_EINVALID,
                            "lease '%.200s': expected times from 0 ns, found a timeout of %" PRId64
                            " and a term of %" PRId64,
                            n->text[0], timeout_ns, term_ns);
    if (!status)
        status = check_limit(self, n, session, error);
    if (!status)
        status = check_own(self, n, session, error);
    if (!status && dray__request_expire_at(request, dray__deadline(timeout_ns)))
        status = dray__nomem(error);
    turn *t = status ? NULL : add_turn(self, n, request);
    if (!status && !t)
        status = dray__nomem(error);
    if (status)
        return status;
    t->deadline_ns = dray__deadline(timeout_ns);
    t->term_ns = term_ns;
    dray__request_set_data(request, t);
    if (!behind(t))
        grant(self, t);
    else
        wake_at_next_chance(t);
    return DRAY_OK;
}

static int take(void *self, dray__request *request, const void *message, dray_error *error)
{
    const dray__lease_wish *m = message;
    const lease_names n = {m->names, m->count};
    return take_turn(self, request, &n, m->timeout_ns, m->term_ns, error);
}

static turn *held_by(const leases *self, const dray__session *session, uint64_t number)
{
    turn *t = self->turns;
    while (t && (t->request || t->number != number || t->session != session))
        t = t->next;
    return t;
}

static int lost(uint64_t number, dray_error *error)
{
    return dray__fail(error, DRAY_ESTALE,
                      "turn %" PRIu64 ": this session does not hold it any more", number);
}

/* Returns the number of turns that wait in the longest of its queues. */
static uint32_t count_waiting(const turn *t)
{
    uint32_t most = 0;
    for (uint32_t i = 0; i < t->count; i++) {
        uint32_t count = 0;
        for (const line_place *p = t->places[i].next; p; p = p->next)
            count++;
        most = count > most ? count : most;
    }
    return most;
}

/* Takes back a lease that an earlier coordinator granted. It succeeds if no other session has asked
 * for its names since. */
static int take_back(leases *self, dray__request *request, const lease_names *n, uint64_t number,
                     turn **out, dray_error *error)
{
    const dray__session *session = dray__request_session(request);
    int status = check_names(n, session, error);
    if (!status)
        status = check_limit(self, n, session, error);
    for (uint32_t i = 0; i < n->count && !status; i++)
        if (number >= self->first_number || find_line(self, n->text[i]))
            status = lost(number, error);
    if (!status && !(*out = add_turn(self, n, request)))
        status = dray__nomem(error);
    if (status)
        return status;
    (*out)->request = NULL;
    (*out)->number = number;
    (*out)->since_ns = dray__now();
    (*out)->until_ns = INT64_MAX;
    return DRAY_OK;
}

static int check(void *self, dray__request *request, const void *message, dray_error *error)
{
    const dray__lease_held *m = message;
    const lease_names n = {m->names, m->count};
    turn *t = held_by(self, dray__request_session(request), m->number);
    int status = t         ? DRAY_OK
                 : m->back ? take_back(self, request, &n, m->number, &t, error)
                           : lost(m->number, error);
    if (status)
        return status;
    if (t->term_ns)
        t->until_ns = dray__deadline(t->term_ns);
    dray__request_answer(request, &dray__u32_fields, &(uint32_t){count_waiting(t)});
    return DRAY_OK;
}

static int give(void *self, dray__request *request, const void *message, dray_error *error)
{
    uint64_t number = *(const uint64_t *)message;
    turn *t = held_by(self, dray__request_session(request), number);
    if (!t)
        return lost(number, error);
    leave(self, t);
    dray__request_reply(request, NULL, NULL, 0);
    return DRAY_OK;
}

/* ---- the service ----------------------------------------------------------------------------- */

static const dray__handler handlers[] = {
    {DRAY__MSG_LEASE_TAKE, &dray__lease_wish_fields, take},
    {DRAY__MSG_LEASE_CHECK, &dray__lease_held_fields, check},
    {DRAY__MSG_LEASE_GIVE, &dray__u64_fields, give},
    {0},
};

/* Returns a holder before the turn that has been silent for its term. */
static turn *overdue(const turn *t, int64_t now)
{
    for (uint32_t i = 0; i < t->count; i++) {
        turn *holder = t->places[i].line->first->turn;
        if (!holder->request && now >= holder->until_ns)
            return holder;
    }
    return NULL;
}

static void time_out(leases *self, turn *t)
{
    char who[WHO];
    dray_error error;
    const line_place *at = behind(t);
    const turn *holder = at->line->first->turn;
    if (holder->request)
        dray__fail(&error, DRAY_ETIMEDOUT, "lease '%.160s': %s came before, and waits",
                   at->line->name, who_is(holder->session, who));
    else
        dray__fail(&error, DRAY_ETIMEDOUT, "lease '%.160s': %s has held it for %.1f s",
                   at->line->name, who_is(holder->session, who),
                   (double)(dray__now() - holder->since_ns) / (double)DRAY__SECOND);
    refuse(self, t, &error);
}

static void expired(void *user, dray__request *request, int channel_gone)
{
    leases *self = user;
    turn *t = dray__request_data(request), *late;
    char who[WHO];
    int64_t now = dray__now();
    if (channel_gone) {
        dray_error error;
        dray__fail(&error, DRAY_ECLOSED, "lease: the session that waited for it is gone");
        refuse(self, t, &error);
        return;
    }
    while (t->request && (late = overdue(t, now))) {
        dray__log(DRAY_LOG_WARN, "lease '%s': %s is silent, and loses it",
                  late->places[0].line->name, who_is(late->session, who));
        leave(self, late);
    }
    if (!t->request)
        return;
    if (now >= t->deadline_ns)
        time_out(self, t);
    else
        wake_at_next_chance(t);
}

static void channel_ended(void *user, uint64_t channel)
{
    leases *self = user;
    for (turn *t = self->turns, *next; t; t = next) {
        next = t->next;
        if (!t->request && t->channel == channel)
            leave(self, t);
    }
}

static void session_ended(void *user, dray__session *session)
{
    leases *self = user;
    for (turn *t = self->turns, *next; t; t = next) {
        next = t->next;
        if (t->session == session)
            leave(self, t);
    }
}

static json_t *name_json(const line *l, int64_t now)
{
    char who[WHO];
    const turn *holder = l->first->turn;
    json_t *waiting = json_array();
    for (const line_place *p = holder->request ? l->first : l->first->next; p; p = p->next)
        json_array_append_new(waiting, json_string(who_is(p->turn->session, who)));
    if (holder->request) /* it still waits for another of its names */
        return json_pack("{s:s, s:n, s:n, s:n, s:n, s:o}", "name", l->name, "holder", "member",
                         "number", "held_seconds", "waiting", waiting);
    return json_pack("{s:s, s:s, s:I, s:I, s:f, s:o}", "name", l->name, "holder",
                     who_is(holder->session, who), "member", (json_int_t)holder->session->member,
                     "number", (json_int_t)holder->number, "held_seconds",
                     (double)(now - holder->since_ns) / (double)DRAY__SECOND, "waiting", waiting);
}

static void add_status(void *user, json_t *object)
{
    const leases *self = user;
    json_t *list = json_array();
    for (const line *l = self->lines; l; l = l->next)
        json_array_append_new(list, name_json(l, dray__now()));
    json_object_set_new(object, "leases", list);
}

static void free_leases(void *user)
{
    leases *self = user;
    while (self->turns)
        leave(self, self->turns);
    free(self);
}

int dray__leases_add(dray__coordinator *coordinator, dray_error *error)
{
    static const dray__service service = {.name = "leases",
                                          .first = 0x0500,
                                          .last = 0x05FF,
                                          .handlers = handlers,
                                          .expired = expired,
                                          .channel_ended = channel_ended,
                                          .session_ended = session_ended,
                                          .status = add_status,
                                          .free = free_leases};
    leases *self = calloc(1, sizeof *self);
    if (!self)
        return dray__nomem(error);
    self->first_number = (dray__coordinator_generation(coordinator) << GENERATION_SHIFT) + 1;
    self->next_number = self->first_number;
    int status = dray__coordinator_add(coordinator, &service, self, error);
    if (status)
        free(self);
    return status;
}
