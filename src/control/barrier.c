/* Barriers: requests that are kept under a name. All are answered when the last one comes, or when
 * a member that had entered dies. A barrier is dropped when it opens, so its name can be used again
 * at once.
 *
 * The answer lists the members, so that members that meet again can name each other. Then the death
 * of a member in between is noticed at once, not at the deadline. */
#include "base/array.h"
#include "base/clock.h"
#include "base/error.h"
#include "control/internal.h"

#include <stdlib.h>
#include <string.h>

typedef struct barrier {
    struct barrier *next;
    char *name;
    uint32_t count, entered;
    uint64_t capacity;
    dray__request **requests;
    uint64_t *awaited; /* members; NULL when any may come */
    uint32_t awaited_count;
} barrier;

struct dray__barriers {
    barrier *first;
};

dray__barriers *dray__barriers_new(void)
{
    return calloc(1, sizeof(dray__barriers));
}

static void forget(dray__barriers *barriers, barrier *b)
{
    barrier **link = &barriers->first;
    while (*link != b)
        link = &(*link)->next;
    *link = b->next;
    free(b->awaited);
    free(b->requests);
    free(b->name);
    free(b);
}

void dray__barriers_free(dray__barriers *barriers)
{
    while (barriers && barriers->first)
        forget(barriers, barriers->first);
    free(barriers);
}

/* Finds the barrier of this name, or makes one. */
static barrier *find_or_make(dray__barriers *barriers, const char *name, uint32_t count)
{
    for (barrier *b = barriers->first; b; b = b->next)
        if (strcmp(b->name, name) == 0)
            return b;
    barrier *b = calloc(1, sizeof *b);
    char *copy = strdup(name);
    if (!b || !copy) {
        free(b);
        free(copy);
        return NULL;
    }
    b->name = copy;
    b->count = count;
    b->next = barriers->first;
    return barriers->first = b;
}

static int check(const barrier *b, uint32_t count, const dray__session *session, dray_error *error)
{
    if (b->count != count)
        return dray__fail(error, DRAY_EINVALID,
                          "barrier '%s': entered for %u members, others entered for %u", b->name,
                          count, b->count);
    for (uint32_t i = 0; i < b->entered; i++)
        if (dray__request_session(b->requests[i]) == session)
            return dray__fail(error, DRAY_EBUSY, "barrier '%s': this session is waiting at it",
                              b->name);
    return DRAY_OK;
}

static int add(barrier *b, dray__request *request)
{
    if (!DRAY__PUSH(b->requests, b->entered, b->capacity, request))
        return -1;
    dray__request_set_data(request, b);
    return 0;
}

/* Answers all requests with an error. */
static void fail_all(dray__barriers *barriers, barrier *b, const dray_error *error)
{
    for (uint32_t i = 0; i < b->entered; i++)
        dray__request_fail(b->requests[i], error);
    forget(barriers, b);
}

/* Answers all requests with the list of members. */
static void open_barrier(dray__barriers *barriers, barrier *b)
{
    uint64_t *members = calloc(b->count, sizeof *members);
    const dray__meeting met = {.members = members, .member_count = b->count};
    for (uint32_t i = 0; members && i < b->count; i++)
        members[i] = dray__request_session(b->requests[i])->member;
    for (uint32_t i = 0; i < b->count; i++) {
        dray__writer w = {.failed = !members};
        if (members)
            dray__put_fields(&w, &dray__met_fields, &met);
        dray__request_reply(b->requests[i], &w, NULL, 0);
        dray__writer_free(&w);
    }
    free(members);
    forget(barriers, b);
}

/* Takes the list of awaited members from the first request that has one. */
static int take_awaited(barrier *b, const dray__meeting *m, dray_error *error)
{
    if (!m->member_count || b->awaited)
        return DRAY_OK;
    b->awaited = calloc(m->member_count, sizeof *b->awaited);
    if (!b->awaited)
        return dray__nomem(error);
    memcpy(b->awaited, m->members, m->member_count * sizeof *b->awaited);
    b->awaited_count = m->member_count;
    return DRAY_OK;
}

/* Fails when an awaited member is gone for good. A member that an earlier coordinator knew may
 * still come back. */
static int check_awaited(const barrier *b, const dray__coordinator *coordinator, dray_error *error)
{
    uint64_t generation = dray__coordinator_generation(coordinator);
    for (uint32_t i = 0; i < b->awaited_count; i++) {
        if (b->awaited[i] >> DRAY__GENERATION_SHIFT != (generation ? generation - 1 : 0))
            continue;
        const dray__session *s = coordinator->sessions;
        while (s && (s->member != b->awaited[i] || s->ended))
            s = s->next;
        if (!s)
            return dray__fail(error, DRAY_EDEAD, "barrier '%s': member %llu left before it",
                              b->name, (unsigned long long)b->awaited[i]);
    }
    return DRAY_OK;
}

int dray__barriers_enter(dray__barriers *barriers, dray__request *request, const dray__meeting *m,
                         dray_error *error)
{
    if (!dray__request_session(request))
        return dray__fail(error, DRAY_EPROTO, "BARRIER: HELLO expected first");
    if (!m->name[0] || !m->count || m->timeout_ns < 0)
        return dray__fail(error, DRAY_EINVALID,
                          "barrier '%s': a name, a count of at least 1 (found %u) and a timeout "
                          "expected",
                          m->name, m->count);
    barrier *b = find_or_make(barriers, m->name, m->count);
    int status = b ? check(b, m->count, dray__request_session(request), error) : dray__nomem(error);
    if (!status)
        status = take_awaited(b, m, error);
    if (!status && (dray__request_expire_at(request, dray__deadline(m->timeout_ns)) < 0 ||
                    add(b, request) < 0))
        status = dray__nomem(error);
    if (status && b && !b->entered)
        forget(barriers, b);
    if (!status && b->entered == b->count)
        open_barrier(barriers, b);
    else if (!status && check_awaited(b, dray__request_session(request)->coordinator, error))
        fail_all(barriers, b, error);
    return status;
}

void dray__barriers_ended(dray__barriers *barriers, const dray__session *session)
{
    dray_error error;
    for (barrier *b = barriers->first, *next; b; b = next) {
        next = b->next;
        bool awaited = false;
        for (uint32_t i = 0; i < b->awaited_count; i++)
            awaited |= b->awaited[i] == session->member;
        if (!awaited)
            continue;
        dray__fail(&error, DRAY_EDEAD, "barrier '%s': member %llu (%s %s, rank %u) left before it",
                   b->name, (unsigned long long)session->member, session->role, session->name,
                   session->rank);
        fail_all(barriers, b, &error);
    }
}

static void leave(barrier *b, const dray__request *request)
{
    for (uint32_t i = 0; i < b->entered; i++)
        if (b->requests[i] == request) {
            b->requests[i] = b->requests[--b->entered];
            return;
        }
}

/* A channel that closes inside a barrier is a death, even while other connections of the session
 * are still open: the kernel closes those of a killed process one by one. */
void dray__barriers_expired(dray__barriers *barriers, dray__request *request, int channel_gone)
{
    dray_error error;
    barrier *b = dray__request_data(request);
    const dray__session *dead = dray__request_session(request);
    uint32_t entered = b->entered;
    leave(b, request);
    if (channel_gone) {
        dray__fail(&error, DRAY_EDEAD, "barrier '%s': member %llu (%s %s, rank %u) died in it",
                   b->name, (unsigned long long)dead->member, dead->role, dead->name, dead->rank);
        for (uint32_t i = 0; i < b->entered; i++)
            dray__request_fail(b->requests[i], &error);
        b->entered = 0;
    } else {
        dray__fail(&error, DRAY_ETIMEDOUT, "barrier '%s': deadline passed with %u of %u members in",
                   b->name, entered, b->count);
    }
    if (!b->entered)
        forget(barriers, b);
    dray__request_fail(request, &error);
}

void dray__barriers_status(dray__barriers *barriers, json_t *object)
{
    json_t *list = json_array();
    for (barrier *b = barriers->first; b; b = b->next)
        json_array_append_new(list,
                              json_pack("{s:s, s:I, s:I}", "name", b->name, "count",
                                        (json_int_t)b->count, "entered", (json_int_t)b->entered));
    json_object_set_new(object, "barriers", list);
}
