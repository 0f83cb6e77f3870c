/* The members of this process. A subscriber of the same process reads their regions directly,
 * private memory included. The data server reads them for other hosts. Members are found by a
 * random token that travels with their description. */
#include "base/error.h"
#include "weights/server/exports.h"
#include "weights/server/shares.h"

#include <inttypes.h>
#include <pthread.h>
#include <stdlib.h>
#include <sys/random.h>
#include <unistd.h>

struct dray__local {
    dray__local *next;
    uint64_t token;
    /* A forked child inherits the list, but its memory differs from the parent's from then on. */
    pid_t pid;
    uint32_t readers;
    uint64_t floor; /* attempts below this number are revoked */
    dray__shares *shares;
    uint64_t run; /* the newest attempt that has begun */
    const dray_layout *layout;
    dray_region *const *regions;
    uint32_t count;
    const struct dray__delta_view *delta;
    struct dray__staging *arena;
    struct dray__event *mark;
    dray__guest *guests;
    bool exported;
};

/* Guards the list and the counts of readers. */
static pthread_mutex_t list_lock = PTHREAD_MUTEX_INITIALIZER;
static pthread_cond_t released = PTHREAD_COND_INITIALIZER;
static dray__local *list;

uint64_t dray__local_token(void)
{
    uint64_t token = 0;
    while (token == 0)
        if (getrandom(&token, sizeof token, 0) != (ssize_t)sizeof token)
            token = 0;
    return token;
}

/* Takes the lock before a fork, so that a child never inherits it locked by another thread. */
static void before_fork(void)
{
    pthread_mutex_lock(&list_lock);
}

static void after_fork(void)
{
    pthread_mutex_unlock(&list_lock);
}

static void watch_forks(void)
{
    pthread_atfork(before_fork, after_fork, after_fork);
}

int dray__local_add(uint64_t token, const dray_layout *layout, dray_region *const *regions,
                    uint32_t count, const struct dray__delta_view *delta,
                    struct dray__staging *arena, dray_error *error)
{
    static pthread_once_t once = PTHREAD_ONCE_INIT;
    dray__local *local = calloc(1, sizeof *local);
    if (!local)
        return dray__nomem(error);
    pthread_once(&once, watch_forks);
    local->token = token;
    local->pid = getpid();
    local->layout = layout;
    local->regions = regions;
    local->count = count;
    local->delta = delta;
    local->arena = arena;
    pthread_mutex_lock(&list_lock);
    local->next = list;
    list = local;
    pthread_mutex_unlock(&list_lock);
    return DRAY_OK;
}

/* The caller holds the lock. */
static dray__local *find(uint64_t token)
{
    dray__local *local = list;
    while (local && local->token != token)
        local = local->next;
    return local;
}

void dray__local_set_mark(uint64_t token, struct dray__event *mark)
{
    pthread_mutex_lock(&list_lock);
    dray__local *local = find(token);
    if (local)
        local->mark = mark;
    pthread_mutex_unlock(&list_lock);
}

struct dray__event *dray__local_mark(const dray__local *local)
{
    pthread_mutex_lock(&list_lock);
    struct dray__event *mark = local->mark;
    pthread_mutex_unlock(&list_lock);
    return mark;
}

void dray__local_export(dray__local *local)
{
    pthread_mutex_lock(&list_lock);
    local->exported = true;
    pthread_mutex_unlock(&list_lock);
}

/* Waits until no reader is inside. In a forked child they are threads of its parent, which never
 * leave. */
static void await_readers(const dray__local *local)
{
    while (local && local->pid == getpid() && local->readers)
        pthread_cond_wait(&released, &list_lock);
}

/* ---- guests: readers that go on between their calls ------------------------------------------ */

void dray__local_enter(dray__local *local, dray__guest *guest)
{
    pthread_mutex_lock(&list_lock);
    guest->next = local->guests;
    guest->of = local;
    local->guests = guest;
    pthread_mutex_unlock(&list_lock);
}

static void depart(dray__guest *guest)
{
    dray__guest **at = &guest->of->guests;
    while (*at != guest)
        at = &(*at)->next;
    *at = guest->next;
    guest->of = NULL;
}

void dray__local_depart(dray__guest *guest)
{
    pthread_mutex_lock(&list_lock);
    if (guest->of)
        depart(guest);
    pthread_mutex_unlock(&list_lock);
}

/* Ends the reading of older attempts. */
static void see_off(dray__local *local, uint64_t attempt)
{
    for (dray__guest *guest = local ? local->guests : NULL, *next; guest; guest = next) {
        next = guest->next;
        if (guest->attempt >= attempt)
            continue;
        depart(guest);
        guest->stop(guest->user);
    }
}

void dray__local_remove(uint64_t token)
{
    dray__local *local = NULL;
    pthread_mutex_lock(&list_lock);
    for (dray__local **at = &list; *at; at = &(*at)->next)
        if ((*at)->token == token) {
            local = *at;
            *at = local->next;
            break;
        }
    /* No new readers can enter. Those inside copy one slice each and leave. */
    await_readers(local);
    see_off(local, UINT64_MAX);
    pthread_mutex_unlock(&list_lock);
    if (local && local->exported)
        dray__exports_revoke(token, UINT64_MAX);
    if (local)
        dray__shares_free(local->shares);
    free(local);
}

dray__local *dray__local_hold(uint64_t token)
{
    pthread_mutex_lock(&list_lock);
    dray__local *found = find(token);
    if (found && found->pid != getpid())
        found = NULL;
    if (found)
        found->readers++;
    pthread_mutex_unlock(&list_lock);
    return found;
}

int dray__local_hold_ticket(uint64_t token, dray__local **out, dray_error *error)
{
    if ((*out = dray__local_hold(token)))
        return DRAY_OK;
    return dray__fail(error, DRAY_EDEAD,
                      "ticket %#" PRIx64 ": not known to this server (the publisher closed, or the "
                      "ticket is not its own)",
                      token);
}

void dray__local_release(dray__local *local)
{
    if (!local)
        return;
    pthread_mutex_lock(&list_lock);
    if (--local->readers == 0)
        pthread_cond_broadcast(&released);
    pthread_mutex_unlock(&list_lock);
}

dray_region *dray__local_region(const dray__local *local, uint32_t index)
{
    return index < local->count ? local->regions[index] : NULL;
}

const struct dray__delta_view *dray__local_delta(const dray__local *local)
{
    return local->delta;
}

struct dray__staging *dray__local_arena(const dray__local *local)
{
    return local->arena;
}

const dray_layout *dray__local_layout(const dray__local *local)
{
    return local->layout;
}

void dray__local_revoke(uint64_t token, uint64_t attempt)
{
    pthread_mutex_lock(&list_lock);
    dray__local *local = find(token);
    if (local && local->floor < attempt)
        local->floor = attempt;
    await_readers(local); /* These entered before, and leave soon. */
    see_off(local, attempt);
    bool exported = local && local->exported;
    pthread_mutex_unlock(&list_lock);
    if (exported)
        dray__exports_revoke(token, attempt);
}

void dray__local_share(uint64_t token, dray__shares *shares)
{
    pthread_mutex_lock(&list_lock);
    dray__local *local = find(token);
    await_readers(local);
    dray__shares *old = local ? local->shares : shares;
    if (local)
        local->shares = shares;
    pthread_mutex_unlock(&list_lock);
    if (old)
        dray__shares_free(old);
}

void dray__local_began(uint64_t token, uint64_t run)
{
    pthread_mutex_lock(&list_lock);
    dray__local *local = find(token);
    if (local && local->run < run)
        local->run = run;
    pthread_mutex_unlock(&list_lock);
}

bool dray__local_has_begun(const dray__local *local, uint64_t run)
{
    pthread_mutex_lock(&list_lock);
    bool begun = local->run >= run;
    pthread_mutex_unlock(&list_lock);
    return begun;
}

dray__shares *dray__local_shares(const dray__local *local)
{
    return local->shares;
}

int dray__local_check(const dray__local *local, uint64_t attempt, dray_error *error)
{
    pthread_mutex_lock(&list_lock);
    bool revoked = attempt < local->floor;
    pthread_mutex_unlock(&list_lock);
    return revoked ? dray__fail(error, DRAY_ESTALE,
                                "update %" PRIu64 " is over: the memory may change again", attempt)
                   : DRAY_OK;
}

int dray__sources_hold(const dray__sources *s, dray__local **held, dray_error *error)
{
    for (uint32_t i = 0; i < s->count; i++)
        if (s->sources[i].local && !(held[i] = dray__local_hold(s->sources[i].token)))
            return dray__fail(error, DRAY_EDEAD, "publisher %s (member %" PRIu64 ") closed",
                              s->sources[i].name, s->sources[i].member);
    return DRAY_OK;
}

void dray__sources_release(const dray__sources *s, dray__local **held)
{
    for (uint32_t i = 0; held && i < s->count; i++) {
        dray__local_release(held[i]);
        held[i] = NULL;
    }
}
