#include "base/callers.h"

#include "base/clock.h"
#include "base/log.h"

#include <stddef.h>
#include <sys/resource.h>

enum { LEAST = 8 };
#define TELL_NS (10 * DRAY__SECOND) /* between two lines of the log */

static void ring_init(dray__caller *ring)
{
    ring->next = ring->before = ring;
}

static void ring_add(dray__caller *ring, dray__caller *caller)
{
    caller->next = ring;
    caller->before = ring->before;
    ring->before->next = caller;
    ring->before = caller;
}

void dray__callers_init(dray__callers *callers, const char *name, uint32_t part,
                        int64_t patience_ns, void (*end)(void *user, dray__caller *caller),
                        void *user)
{
    *callers = (dray__callers){
        .name = name, .part = part, .patience_ns = patience_ns, .end = end, .user = user};
    ring_init(&callers->strangers);
    ring_init(&callers->known);
}

void dray__callers_leave(dray__callers *callers, dray__caller *caller)
{
    if (!caller->next)
        return;
    caller->before->next = caller->next;
    caller->next->before = caller->before;
    caller->next = caller->before = NULL;
    if (caller->known)
        callers->known_count--;
    else
        callers->stranger_count--;
}

static void end(dray__callers *callers, dray__caller *caller)
{
    dray__callers_leave(callers, caller);
    callers->end(callers->user, caller);
}

/* Returns the known connection that has been silent longest. */
static dray__caller *find_silent(const dray__callers *callers)
{
    dray__caller *c = callers->known.next;
    while (c != &callers->known && c->busy)
        c = c->next;
    return c == &callers->known ? NULL : c;
}

static void tell(dray__callers *callers, const char *done)
{
    int64_t now = dray__now();
    if (callers->told_ns && now - callers->told_ns < TELL_NS)
        return;
    callers->told_ns = now;
    dray__log(DRAY_LOG_WARN,
              "%s: %u connections, and %u that have asked nothing yet: %s (more are "
              "taken where the limit of open files, ulimit -n, is higher)",
              callers->name, callers->known_count, callers->stranger_count, done);
}

bool dray__callers_make_room(dray__callers *callers)
{
    dray__caller *oldest = callers->strangers.next;
    if (oldest == &callers->strangers)
        oldest = find_silent(callers);
    if (oldest)
        end(callers, oldest);
    return oldest != NULL;
}

/* The limit may change while a program runs. */
static uint32_t part_of_descriptors(uint32_t part)
{
    struct rlimit limit = {.rlim_cur = 1024};
    getrlimit(RLIMIT_NOFILE, &limit);
    uint64_t most = limit.rlim_cur / part;
    return most < LEAST ? LEAST : most > INT32_MAX ? INT32_MAX : (uint32_t)most;
}

bool dray__callers_enter(dray__callers *callers, dray__caller *caller, void *owner)
{
    uint32_t strangers = part_of_descriptors(DRAY__STRANGERS_PART);
    if (callers->stranger_count >=
        (strangers < DRAY__STRANGERS_MAX ? strangers : DRAY__STRANGERS_MAX)) {
        tell(callers, "each new connection ends the oldest of these");
        end(callers, callers->strangers.next);
    }
    if (callers->known_count >= part_of_descriptors(callers->part) && !find_silent(callers)) {
        tell(callers, "no more are taken");
        return false;
    }
    *caller = (dray__caller){.owner = owner, .since_ns = dray__now()};
    ring_add(&callers->strangers, caller);
    callers->stranger_count++;
    return true;
}

void dray__callers_heard(dray__callers *callers, dray__caller *caller)
{
    if (!caller->next) /* it is being closed */
        return;
    bool is_new = !caller->known;
    dray__callers_leave(callers, caller);
    if (is_new && callers->known_count >= part_of_descriptors(callers->part)) {
        dray__caller *silent = find_silent(callers);
        tell(callers, "each new connection ends the one that was silent longest");
        if (silent)
            end(callers, silent);
    }
    caller->known = true;
    caller->since_ns = dray__now();
    ring_add(&callers->known, caller);
    callers->known_count++;
}

void dray__callers_sweep(dray__callers *callers)
{
    int64_t over = dray__now() - callers->patience_ns;
    while (callers->strangers.next != &callers->strangers &&
           callers->strangers.next->since_ns <= over)
        end(callers, callers->strangers.next);
}
