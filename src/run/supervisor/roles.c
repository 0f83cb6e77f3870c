/* Starts the processes of a run's roles, watches them, restarts them when they die, and asks them
 * to end when the queue has ended and they have not. This file knows no task by its name. */
#include "base/clock.h"
#include "base/error.h"
#include "group/group.h"
#include "run/job/contract.h"
#include "run/job/devices.h"
#include "run/report/spent.h"
#include "run/supervisor/supervisor.h"
#include "run/supervisor/vital.h"
#include "trace/account.h"

#include <dray/queue.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

enum {
    LOOK_MS = 1000, /* the longest time between looks at the processes */
    BUSY_MS = 500   /* a process that uses one tick (10 ms) of CPU time in this time computes; one
                       that only waits uses less */
};

/* ---- one process ----------------------------------------------------------------------------- */

static void on_end(evutil_socket_t fd, short what, void *user);

static void process_end(dray__process *p)
{
    if (p->event)
        event_free(p->event);
    p->event = NULL;
    dray__child_end(&p->child);
}

int dray__process_start(dray__supervisor *s, dray__process *p, dray__child_start start,
                        dray_error *error)
{
    struct stat st;
    start.log = p->log;
    p->log_begin = stat(p->log, &st) == 0 ? st.st_size : 0;
    p->claims = 0;
    p->named = false;
    int rc = dray__child_begin(&start, &p->child, error);
    if (rc)
        return rc;
    p->event = event_new(s->base, p->child.pidfd, EV_READ, on_end, p);
    if (p->event && event_add(p->event, NULL) == 0)
        return DRAY_OK;
    process_end(p);
    return dray__fail(error, DRAY_ESYS, "supervisor: cannot watch a process");
}

/* Writes how a process ended: "failed with status 1: why". */
static void process_describe(const dray__process *p, int status, char *out, size_t capacity)
{
    char why[320] = "";
    if (WIFSIGNALED(status)) {
        snprintf(out, capacity, "was killed by signal %d (%s)", WTERMSIG(status),
                 strsignal(WTERMSIG(status)));
        return;
    }
    dray__log_last(p->log, p->log_begin, "error: ", true, why, sizeof(why));
    snprintf(out, capacity, "failed with status %d%s%s", WEXITSTATUS(status), why[0] ? ": " : "",
             why[0] ? why : "");
}

/* ---- starting -------------------------------------------------------------------------------- */

static int start_rank(dray__supervisor *s, dray__instance *i, const dray__orders *orders, int group,
                      dray_error *error)
{
    char parent[32], nice[16], name[96], label[DRAY__LABEL_BYTES];
    const dray__job_role *role = i->role;
    dray__process *p = &i->ranks[orders->rank];
    snprintf(parent, sizeof(parent), "--parent=%ld", (long)getpid());
    snprintf(nice, sizeof(nice), "--nice=%d", (int)role->nice);
    const char *arguments[] = {"host",        parent, nice, role->command[0] ? "--exec" : NULL,
                               role->command, NULL};
    char **environment = dray__contract_write(orders);
    if (!environment)
        return dray__nomem(error);
    *p = (dray__process){.instance = i, .owner = s, .rank = orders->rank, .child.pidfd = -1};
    snprintf(name, sizeof(name), "logs/%s-%u.log", dray__role_label(role, i->number, label),
             orders->rank);
    dray__folder_path(&s->folder, name, p->log);
    const dray__child_start start = {.arguments = arguments,
                                     .environment = environment,
                                     .folder = role->cwd[0] ? role->cwd : NULL,
                                     .fd = group};
    int rc = dray__process_start(s, p, start, error);
    dray__environment_free(environment);
    return rc;
}

/* Finds where the ranks of a role that is spread over hosts meet. */
static int find_master(dray__supervisor *s, const dray__job_role *role, char master[64],
                       dray__orders *orders, dray_error *error)
{
    bool found = s->link ? dray__uplink_master(s->link, role, master, &orders->port)
                         : s->hosts && dray__hosts_master(s->hosts, role, master, &orders->port);
    orders->master = master;
    return found ? DRAY_OK
                 : dray__fail(error, DRAY_EINTERNAL, "role %s: rank 0 has no host", role->name);
}

static int start_instance(dray__supervisor *s, dray__instance *i, dray_error *error)
{
    int group = -1, rc = DRAY_OK;
    char config[PATH_MAX], leases[DRAY__LEASES_BYTES], master[64];
    const dray__job_role *role = i->role;
    i->epoch++;
    i->asked_ns = 0;
    i->progress = dray__supervisor_progress(s);
    dray__folder_path(&s->folder, "config.json", config);
    dray__devices_leases(s->job, role, i->number, leases);
    if (role->ranks > 1 && !role->spread)
        rc = dray__group_create((uint32_t)role->ranks, 0, &group, error);
    dray__orders orders = {.role = role,
                           .job = s->job->name,
                           .folder = s->folder.path,
                           .config = config,
                           .address = s->address,
                           .leases = leases,
                           .instance = i->number,
                           .epoch = i->epoch,
                           .restarts = (uint32_t)s->job->limits.restarts - 1,
                           .first_step = s->folder.first_step,
                           .eval_from = s->folder.eval_from,
                           .redis = s->job->queue.backend > DRAY_BACKEND_BUILTIN,
                           .group_fd = group < 0 ? -1 : DRAY__CHILD_FD,
                           .rank = i->first,
                           .first = i->first,
                           .here = i->count,
                           .token_file = s->link ? dray__uplink_token(s->link, role) : NULL,
                           .port = dray__free_port()};
    if (!rc && role->spread)
        rc = find_master(s, role, master, &orders, error);
    for (; orders.rank < i->first + i->count && !rc; orders.rank++)
        rc = start_rank(s, i, &orders, group, error);
    if (group >= 0)
        close(group);
    return rc;
}

static int start_role(dray__supervisor *s, dray__role_state *r, dray_error *error)
{
    int rc = DRAY_OK;
    dray__probe_begin(&r->probe, r->role->ready, s->folder.path);
    r->started_ns = dray__now();
    r->started = true;
    r->ready = !r->role->ready[0];
    for (uint32_t i = 0; i < r->role->instances && !rc; i++)
        if (r->instances[i].count)
            rc = start_instance(s, &r->instances[i], error);
    return rc;
}

static bool is_here(const dray__role_state *r)
{
    for (uint32_t i = 0; i < r->role->instances; i++)
        if (r->instances[i].count)
            return true;
    return false;
}

static bool may_start(const dray__supervisor *s, const dray__job_role *role)
{
    for (uint32_t i = 0; i < role->after_count; i++)
        for (uint32_t r = 0; r < s->job->role_count; r++)
            if (strcmp(s->roles[r].role->name, role->after[i]) == 0 && !s->roles[r].ready &&
                is_here(&s->roles[r]))
                return false;
    return true;
}

static int look_whether_ready(dray__supervisor *s, dray__role_state *r, dray_error *error)
{
    int64_t waited = dray__now() - (r->started_ns > s->awake_ns ? r->started_ns : s->awake_ns);
    r->ready = dray__probe_ask(&r->probe, r->role->ready, s->folder.path);
    if (r->ready || waited < dray__job_wait_ns(s->job))
        return DRAY_OK;
    return dray__fail(error, DRAY_ETIMEDOUT,
                      "role %s is not ready after %.0f s (limits.wait_seconds): %s; logs: %s/logs",
                      r->role->name, s->job->limits.wait_seconds, r->role->ready, s->folder.path);
}

int dray__roles_advance(dray__supervisor *s, dray_error *error)
{
    int rc = DRAY_OK;
    for (bool again = true; again && !rc;) {
        again = false;
        for (uint32_t i = 0; i < s->job->role_count && !rc; i++) {
            dray__role_state *r = &s->roles[i];
            if (!r->started && is_here(r) && may_start(s, r->role)) {
                rc = start_role(s, r, error);
                again = true;
            } else if (r->started && !r->ready) {
                rc = look_whether_ready(s, r, error);
                again = again || r->ready;
            }
        }
    }
    return rc;
}

/* ---- deaths ---------------------------------------------------------------------------------- */

static bool instance_done(const dray__instance *i)
{
    for (uint32_t rank = i->first; rank < i->first + i->count; rank++)
        if (!i->ranks[rank].done)
            return false;
    return true;
}

/* Returns whether all roles (with `servers`), or all that have tasks, are done. A role that was
 * never started is done. */
static bool all_done(const dray__supervisor *s, bool servers)
{
    for (uint32_t r = 0; r < s->job->role_count; r++)
        for (uint32_t i = 0; s->roles[r].started && i < s->roles[r].role->instances; i++)
            if ((servers || s->roles[r].role->task_count) &&
                !instance_done(&s->roles[r].instances[i]))
                return false;
    return true;
}

/* Joined hosts end their own processes, and leave before this host's loop ends. */
void dray__roles_check_end(dray__supervisor *s)
{
    if ((s->ended_ns || s->leaving) && !s->elsewhere.count && all_done(s, true))
        dray__supervisor_end(s);
}

static void mark_done(dray__supervisor *s, dray__instance *i)
{
    for (uint32_t rank = i->first; rank < i->first + i->count; rank++)
        i->ranks[rank].done = true;
    dray__roles_check_end(s);
}

/* Ends the accounts of the ranks, which from now on wait for their restart. */
static void end_accounts(const dray__supervisor *s, const dray__instance *i, const char *label)
{
    char path[PATH_MAX];
    for (uint32_t rank = i->first; rank < i->first + i->count; rank++) {
        dray__spans_path(s->folder.path, label, rank, i->epoch, path, sizeof(path));
        dray__account_end(path, dray__now());
    }
}

static void restart(dray__supervisor *s, dray__instance *i, uint32_t rank, const char *how)
{
    dray_error error;
    char label[DRAY__LABEL_BYTES];
    dray__role_label(i->role, i->number, label);
    end_accounts(s, i, label);
    i->deaths = dray__supervisor_progress(s) > i->progress ? 1 : i->deaths + 1;
    if (i->deaths >= (uint32_t)s->job->limits.restarts) {
        dray__supervisor_fail(s, DRAY_EDEAD,
                              "%s died %u times in a row without a step done; last: rank %u %s",
                              label, i->deaths, rank, how);
        return;
    }
    dray__supervisor_say(s, "restart", "%s rank %u %s: starting %s anew", label, rank, how, label);
    i->held = s->link && !dray__uplink_fresh(s->link);
    if (!i->held && start_instance(s, i, &error))
        dray__supervisor_fail(s, error.code, "%s", error.message);
}

/* Starts the instances that were held while the connection with the run was lost, which may have
 * ended them. */
static void start_held(dray__supervisor *s)
{
    dray_error error;
    for (uint32_t r = 0; s->link && dray__uplink_fresh(s->link) && r < s->job->role_count; r++)
        for (uint32_t i = 0; i < s->roles[r].role->instances; i++) {
            dray__instance *instance = &s->roles[r].instances[i];
            if (!instance->held || s->leaving)
                continue;
            instance->held = false;
            if (start_instance(s, instance, &error))
                dray__supervisor_fail(s, error.code, "%s", error.message);
        }
}

/* Is called when a process died. All ranks of an instance end with the first one. After the queue's
 * end a role that may be restarted is done, because it has nothing left to do. */
static void died(dray__process *p, const char *how)
{
    dray__instance *i = p->instance;
    dray__supervisor *s = p->owner;
    char label[DRAY__LABEL_BYTES], advice[DRAY__ADVICE_BYTES];
    uint32_t rank = p->rank;
    dray__role_label(i->role, i->number, label);
    for (uint32_t r = i->first; r < i->first + i->count; r++)
        process_end(&i->ranks[r]);
    if (s->leaving) {
        mark_done(s, i);
    } else if (s->ended_ns && (i->asked_ns || i->role->on_death == DRAY__ON_DEATH_RESTART)) {
        if (!i->asked_ns)
            dray__supervisor_say(s, "warning", "%s rank %u %s, after the queue's end", label, rank,
                                 how);
        mark_done(s, i);
    } else if (i->role->on_death == DRAY__ON_DEATH_END) {
        dray__supervisor_fail(s, DRAY_EDEAD, "%s rank %u %s; %s", label, rank, how,
                              dray__supervisor_advice(s, advice));
    } else {
        restart(s, i, rank, how);
    }
}

/* Takes the end of a process. Status 0 is right only after the queue's end (dray__roles_judge). */
static void take_end(dray__process *p)
{
    dray__supervisor *s = p->owner;
    int status = 0;
    char how[400];
    if (!dray__child_ended(&p->child, &status)) {
        event_add(p->event, NULL);
        return;
    }
    event_free(p->event);
    p->event = NULL;
    if (p->instance && WIFEXITED(status) && WEXITSTATUS(status) == 0) {
        p->left = true;
        p->left_ns = dray__now();
        if (s->watch)
            dray__watch_look(s->watch);
        if (s->leaving)
            p->done = true;
        dray__roles_check_end(s);
        return;
    }
    process_describe(p, status, how, sizeof(how));
    if (p->instance)
        died(p, how);
    else
        dray__supervisor_fail(s, DRAY_EDEAD, "the coordinator %s; %s", how,
                              dray__supervisor_advice(s, (char[DRAY__ADVICE_BYTES]){0}));
}

typedef void (*process_fn)(dray__process *p, const void *with);

static void each_rank(dray__instance *i, process_fn call, const void *with)
{
    for (uint32_t rank = i->first; rank < i->first + i->count; rank++)
        if (!i->ranks[rank].owner || !i->ranks[rank].owner->code)
            call(&i->ranks[rank], with);
}

static void each_process(dray__supervisor *s, process_fn call, const void *with)
{
    for (uint32_t r = 0; r < s->job->role_count; r++)
        for (uint32_t i = 0; s->roles[r].started && i < s->roles[r].role->instances; i++)
            each_rank(&s->roles[r].instances[i], call, with);
}

static void take_killed(dray__process *p, const void *with)
{
    (void)with;
    if (p->event && dray__child_was_killed(&p->child))
        take_end(p);
}

/* Is called when a process ended. When one failed because another was killed, the error names the
 * killed one, even if its end is seen later. */
static void on_end(evutil_socket_t fd, short what, void *user)
{
    (void)fd, (void)what;
    dray__process *p = user;
    dray__supervisor *s = p->owner;
    take_killed(&s->coordinator, NULL);
    each_process(s, take_killed, NULL);
    if (p->event && !s->code)
        take_end(p);
}

static void judge(dray__process *p, const void *with)
{
    const dray__sight *sight = with;
    if (!p->left || p->done)
        return;
    if (sight->ended)
        p->done = true;
    else if (sight->begun_ns > p->left_ns)
        died(p, "exited with status 0 before the queue's end");
}

void dray__roles_judge(dray__supervisor *s, const dray__sight *sight)
{
    if (sight->ended && !s->ended_ns)
        s->ended_ns = dray__now();
    if (sight->begun_ns)
        each_process(s, judge, sight);
    dray__roles_check_end(s);
}

/* ---- stopped processes, and processes that do not end
 * -------------------------------------------- */

/* Returns true when the process reports that it waits for others of the run. A wait for something
 * outside the run may never end. */
static bool waits_for_others(const dray__process *p)
{
    const dray__instance *i = p->instance;
    char label[DRAY__LABEL_BYTES], path[PATH_MAX];
    dray__accounted is;
    dray__role_label(i->role, i->number, label);
    dray__spans_path(p->owner->folder.path, label, p->rank, i->epoch, path, sizeof(path));
    if (!dray__account_read(path, dray__now(), &is) || is.state < DRAY__STATE_WAIT)
        return false;
    int cause = is.state - DRAY__STATE_WAIT;
    return cause != DRAY_CAUSE_UNKNOWN && cause != DRAY_CAUSE_TOOL;
}

static void describe_idle(const dray__process *p, int64_t now, char *out, size_t capacity)
{
    char holds[256];
    dray__watch_holds(p->owner->watch, p->child.pid, holds, sizeof(holds));
    snprintf(out, capacity, "has used no CPU for %.1f s, and holds %s",
             (double)(now - p->idle_ns) / (double)DRAY__SECOND, holds);
}

/* Warns of a process that holds rows and is idle. It may wait for a GPU, or for a server outside
 * the run, so it is not ended while others go on (check_standstill). */
static void check_idle(dray__process *p, int64_t now, bool busy)
{
    dray__supervisor *s = p->owner;
    char how[400], label[DRAY__LABEL_BYTES];
    uint64_t claims = busy || !s->watch ? 0 : dray__watch_claims(s->watch, p->child.pid);
    if (!claims || claims != p->claims || p->idle_ns < s->awake_ns || waits_for_others(p)) {
        p->idle_ns = now;
        p->named = false;
    }
    p->claims = claims;
    if (!claims || p->named || now - p->idle_ns < dray__job_wait_ns(s->job) / 2)
        return;
    p->named = true;
    describe_idle(p, now, how, sizeof(how));
    dray__supervisor_say(s, "warning", "%s rank %u %s: it hangs, or waits for a device or a server",
                         dray__role_label(p->instance->role, p->instance->number, label), p->rank,
                         how);
}

/* Returns whether the process computes. On a machine that many share it may get very little CPU
 * time although it wants a core all the time, so waiting for a core counts, too. */
static bool computes(const dray__process *p, const dray__vital *v, int64_t elapsed)
{
    int64_t ticks = (int64_t)(v->ticks - p->ticks), wanted = (int64_t)(v->wanted_ns - p->wanted_ns);
    bool ran = ticks > 0 && ticks * BUSY_MS * DRAY__MILLISECOND >= elapsed;
    return ran || v->on_disk || 2 * wanted >= elapsed;
}

/* Looks at a process. One that computes is only slow. One that has been stopped for too long is
 * treated as dead, because it will not answer. (A session of a remote process ends by its own
 * rules, docs/security.md; its role's rows are claimed again.) */
static void check_life(dray__process *p, const void *with)
{
    dray__supervisor *s = p->owner;
    int64_t now = *(const int64_t *)with, limit = dray__job_wait_ns(s->job) / 2;
    char how[400], holds[256];
    dray__vital v;
    if (p->child.pid <= 0 || !dray__vital_of(p->child.pid, &v))
        return;
    bool busy = computes(p, &v, now - s->looked_ns);
    if (busy)
        s->moved_ns = now;
    check_idle(p, now, busy || v.stopped);
    p->ticks = v.ticks;
    p->wanted_ns = v.wanted_ns;
    if (!v.stopped) {
        p->stopped_ns = 0;
        return;
    }
    p->stopped_ns = p->stopped_ns > s->awake_ns ? p->stopped_ns : now;
    if (now - p->stopped_ns < limit)
        return;
    if (s->watch)
        dray__watch_holds(s->watch, p->child.pid, holds, sizeof(holds));
    else
        snprintf(holds, sizeof(holds), "rows that the run knows of");
    snprintf(how, sizeof(how), "has been stopped for %.1f s (limits.wait_seconds), and holds %s",
             (double)(now - p->stopped_ns) / (double)DRAY__SECOND, holds);
    died(p, how);
}

typedef struct idle {
    int64_t now;
    int on_death; /* of the processes that are ended */
    bool *any;
} idle;

static void end_idle(dray__process *p, const void *with)
{
    const idle *of = with;
    char how[400], all[480];
    if (p->child.pid <= 0 || !p->claims || !p->named || p->instance->role->on_death != of->on_death)
        return;
    *of->any = true;
    describe_idle(p, of->now, how, sizeof(how));
    snprintf(all, sizeof(all), "%s, while nothing moved (limits.wait_seconds)", how);
    died(p, all);
}

/* Ends first those that the run can restart. */
bool dray__roles_end_idle(dray__supervisor *s, int64_t now)
{
    bool any = false;
    each_process(s, end_idle, &(idle){now, DRAY__ON_DEATH_RESTART, &any});
    if (!any)
        each_process(s, end_idle, &(idle){now, DRAY__ON_DEATH_END, &any});
    return any;
}

static void end_late(dray__supervisor *s, dray__instance *i, int64_t now)
{
    int64_t grace = (int64_t)(i->role->grace_seconds * (double)DRAY__SECOND);
    bool server = !i->role->task_count;
    char label[DRAY__LABEL_BYTES];
    if (!i->asked_ns && (server ? all_done(s, false) : now > s->ended_ns + grace)) {
        i->asked_ns = now;
        for (uint32_t rank = i->first; rank < i->first + i->count; rank++)
            dray__child_signal(&i->ranks[rank].child, SIGTERM);
    } else if (i->asked_ns && now > i->asked_ns + grace) {
        dray__role_label(i->role, i->number, label);
        if (i->role->on_death == DRAY__ON_DEATH_END && !s->leaving) {
            dray__supervisor_fail(
                s, DRAY_ETIMEDOUT,
                "%s did not end within twice its grace_seconds (%g) of the queue's end", label,
                i->role->grace_seconds);
            return;
        }
        dray__supervisor_say(s, "warning", "%s did not end on SIGTERM: killed", label);
        for (uint32_t rank = i->first; rank < i->first + i->count; rank++)
            process_end(&i->ranks[rank]);
        mark_done(s, i);
    }
}

/* Whether the child is a process of a role, or the coordinator. */
static bool is_own(const void *user, pid_t pid)
{
    const dray__supervisor *s = user;
    if (s->coordinator.child.pid == pid)
        return true;
    for (uint32_t r = 0; r < s->job->role_count; r++)
        for (uint32_t i = 0; i < s->roles[r].role->instances; i++)
            for (uint32_t rank = 0; rank < s->roles[r].role->ranks; rank++)
                if (s->roles[r].instances[i].ranks[rank].child.pid == pid)
                    return true;
    return false;
}

void dray__roles_tick(dray__supervisor *s, int64_t now)
{
    dray_error error;
    if (!s->ended_ns && !s->leaving && dray__roles_advance(s, &error))
        dray__supervisor_fail(s, error.code, "%s", error.message);
    start_held(s);
    int64_t every = dray__job_wait_ns(s->job) / 10, most = LOOK_MS * DRAY__MILLISECOND;
    if (now - s->looked_ns >= (every < most ? every : most)) {
        each_process(s, check_life, &now);
        dray__orphans_reap(is_own, s);
        s->looked_ns = now;
    }
    for (uint32_t r = 0; (s->ended_ns || s->leaving) && r < s->job->role_count; r++)
        for (uint32_t i = 0; s->roles[r].started && i < s->roles[r].role->instances; i++)
            if (!s->code && !instance_done(&s->roles[r].instances[i]))
                end_late(s, &s->roles[r].instances[i], now);
}

/* ---- all of them ----------------------------------------------------------------------------- */

static int open_instance(dray__instance *i, const dray__job_role *role, uint32_t number,
                         dray_error *error)
{
    *i = (dray__instance){.role = role, .number = number};
    i->ranks = calloc((size_t)role->ranks, sizeof(*i->ranks));
    if (!i->ranks)
        return dray__nomem(error);
    for (uint32_t rank = 0; rank < role->ranks; rank++)
        i->ranks[rank].child.pidfd = -1;
    return DRAY_OK;
}

/* Sets the places of the run's own host, which are the first ones. */
static void place_own(dray__supervisor *s)
{
    for (uint32_t r = 0; r < s->job->role_count; r++)
        for (uint32_t i = 0; i < s->job->roles[r].local; i++)
            dray__roles_place(s, r, i, 0);
}

void dray__roles_place(dray__supervisor *s, uint32_t role, uint32_t place, uint32_t epoch)
{
    dray__role_state *at = &s->roles[role];
    bool spread = at->role->spread;
    dray__instance *i = &at->instances[spread ? 0 : place];
    i->first = spread && !i->count ? place : i->first;
    i->count = spread ? place + 1 - i->first : (uint32_t)at->role->ranks;
    i->epoch = epoch;
}

void dray__roles_leave(dray__supervisor *s)
{
    s->leaving = true;
    for (uint32_t r = 0; r < s->job->role_count; r++)
        for (uint32_t i = 0; s->roles[r].started && i < s->roles[r].role->instances; i++) {
            dray__instance *instance = &s->roles[r].instances[i];
            instance->asked_ns = dray__now();
            for (uint32_t k = instance->first; k < instance->first + instance->count; k++) {
                dray__process *p = &instance->ranks[k];
                p->done = p->done || p->left || p->child.pid <= 0;
                dray__child_signal(&p->child, SIGTERM);
            }
        }
}

int dray__roles_open(dray__supervisor *s, dray_error *error)
{
    s->roles = calloc(s->job->role_count, sizeof(*s->roles));
    int rc = s->roles ? DRAY_OK : dray__nomem(error);
    for (uint32_t r = 0; r < s->job->role_count && !rc; r++) {
        dray__role_state *at = &s->roles[r];
        at->role = &s->job->roles[r];
        at->probe.fd = -1;
        at->instances = calloc((size_t)at->role->instances, sizeof(*at->instances));
        rc = at->instances ? DRAY_OK : dray__nomem(error);
        for (uint32_t i = 0; i < at->role->instances && !rc; i++)
            rc = open_instance(&at->instances[i], at->role, i, error);
    }
    if (!rc && !s->link)
        place_own(s);
    return rc;
}

void dray__roles_free(dray__supervisor *s)
{
    for (uint32_t r = 0; s->roles && r < s->job->role_count; r++) {
        dray__role_state *at = &s->roles[r];
        for (uint32_t i = 0; at->instances && i < at->role->instances; i++) {
            dray__instance *instance = &at->instances[i];
            for (uint32_t rank = 0; instance->ranks && rank < at->role->ranks; rank++)
                process_end(&instance->ranks[rank]);
            free(instance->ranks);
        }
        if (at->role)
            dray__probe_end(&at->probe);
        free(at->instances);
    }
    free(s->roles);
    s->roles = NULL;
}
