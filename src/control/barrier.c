/* Barriers: kept requests under a name, all answered when the last one comes, or when a member that
 * had entered dies. A barrier is forgotten when it opens, so its name can be used again at once. */
#include "base/clock.h"
#include "base/error.h"
#include "control/internal.h"

#include <stdlib.h>
#include <string.h>

typedef struct barrier {
    struct barrier *next;
    char *name;
    uint32_t count, entered, capacity;
    dray__request **requests;
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

/* Takes over the name. */
static barrier *find_or_make(dray__barriers *barriers, char *name, uint32_t count)
{
    for (barrier *b = barriers->first; b; b = b->next)
        if (strcmp(b->name, name) == 0) {
            free(name);
            return b;
        }
    barrier *b = calloc(1, sizeof *b);
    if (!b) {
        free(name);
        return NULL;
    }
    b->name = name;
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
    if (b->entered == b->capacity) {
        uint32_t capacity = b->capacity ? 2 * b->capacity : 8;
        dray__request **requests = realloc(b->requests, capacity * sizeof(dray__request *));
        if (!requests)
            return -1;
        b->requests = requests;
        b->capacity = capacity;
    }
    b->requests[b->entered++] = request;
    dray__request_set_data(request, b);
    return 0;
}

static void enter(dray__barriers *barriers, dray__request *request, char *name, uint32_t count,
                  int64_t timeout_ns)
{
    dray_error error;
    barrier *b = find_or_make(barriers, name, count);
    int status = b ? check(b, count, dray__request_session(request), &error) : dray__nomem(&error);
    if (!status &&
        (dray__request_expire_at(request, dray__deadline(timeout_ns)) < 0 || add(b, request) < 0))
        status = dray__nomem(&error);
    if (status) {
        if (b && !b->entered)
            forget(barriers, b);
        dray__request_fail(request, &error);
    } else if (b->entered == b->count) {
        for (uint32_t i = 0; i < b->count; i++)
            dray__request_reply(b->requests[i], NULL, NULL, 0);
        forget(barriers, b);
    }
}

void dray__barriers_enter(dray__barriers *barriers, dray__request *request)
{
    dray_error error;
    dray__reader *r = dray__request_payload(request);
    char *name = dray__get_string(r, DRAY__NAME_MAX);
    uint32_t count = dray__get_u32(r);
    int64_t timeout_ns = dray__get_i64(r);
    int status = dray__reader_finish(r, "BARRIER", &error);
    if (!status && !dray__request_session(request))
        status = dray__fail(&error, DRAY_EPROTO, "BARRIER: HELLO expected first");
    if (!status && (!name[0] || !count || timeout_ns < 0))
        status = dray__fail(&error, DRAY_EINVALID,
                            "barrier '%s': a name, a count of at least 1 (found %u) and a timeout "
                            "expected",
                            name, count);
    if (status) {
        free(name);
        dray__request_fail(request, &error);
    } else {
        enter(barriers, request, name, count, timeout_ns);
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
