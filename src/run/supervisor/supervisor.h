/* src/run/supervisor/: the process that the user starts. supervisor.c takes a run from its start to
 * its end, roles.c starts the processes of the roles and starts them again, spawn.c makes a child,
 * watch.c looks at the queue, probe.c finds out whether a role is ready, and vital.c whether a
 * process makes progress. folder.c knows the files of a run's folder. coordinator.c is the process
 * that every run and `dray serve` need, sandbox.c restricts it. */

/* The declarations that supervisor.c (a run from its start to its end) and roles.c (the processes
 * of its roles) share. */
#pragma once

#include "queue/storage/join.h"
#include "queue/storage/keeper.h"
#include "run/join/hosts.h"
#include "run/join/uplink.h"
#include "run/report/reporter.h"
#include "run/supervisor/folder.h"
#include "run/supervisor/probe.h"
#include "run/supervisor/spawn.h"
#include "run/supervisor/watch.h"

#include <event2/event.h>

typedef struct dray__supervisor dray__supervisor;
typedef struct dray__instance dray__instance;

typedef struct dray__process {
    dray__instance *instance; /* NULL for the coordinator */
    dray__supervisor *owner;
    dray__child child;
    struct event *event; /* its end */
    char log[PATH_MAX];
    off_t log_begin; /* the log's size before the process wrote to it */
    uint32_t rank;
    bool left, done;    /* ended with status 0; and was expected to */
    int64_t left_ns;    /* when */
    int64_t stopped_ns; /* the time since which it has been stopped; 0 when it is not */
    uint64_t ticks;     /* CPU time, in clock ticks */
    uint64_t wanted_ns; /* time in which it had a core or waited for one */
    /* The time since which it has held the same claims, used no CPU and reported no wait; 0 when it
     * does not. */
    int64_t idle_ns;
    uint64_t claims;
    bool named; /* a warning has named it as idle */
} dray__process;

struct dray__instance {
    const dray__job_role *role;
    uint32_t number, epoch;
    dray__process *ranks;
    uint32_t first, count; /* the ranks on this host; count is 0 when the instance is not here */
    bool held;             /* its start waits until the run can be reached again */
    uint32_t deaths;       /* in a row without progress */
    uint64_t progress;     /* of the run when the instance was started */
    int64_t asked_ns;      /* when SIGTERM was sent, after the queue's end; 0 until then */
};

typedef struct dray__role_state {
    const dray__job_role *role;
    dray__instance *instances;
    bool started, ready;
    int64_t started_ns;
    dray__probe probe;
} dray__role_state;

struct dray__supervisor {
    const dray__run_options *options;
    dray__folder folder;
    dray__job *job;
    struct event_base *base;
    dray__keeper *keeper;
    dray__process coordinator;
    dray__role_state *roles;
    dray__watch *watch;       /* NULL on a joined host */
    dray__reporter *reporter; /* the same */
    dray__hosts *hosts;       /* that have joined; NULL when none may */
    dray__hosts_sight elsewhere;
    /* Through which other hosts read this host's samples; NULL when there are none. */
    dray__join *join;
    dray__uplink *link; /* of a joined host; NULL on the run's own host */
    bool waiting_said;  /* for hosts */
    char *text; /* the resolved job file, which joining hosts must have, too; NULL when none may
                   join */
    char address[128], keeper_path[112];
    struct event *signals[3], *tick, *sight;
    int64_t ticked_ns, awake_ns; /* the last tick; the time since which ticks have been in time */
    int64_t looked_ns;           /* when the processes were last looked at */
    int64_t moved_ns, step_ns;   /* when progress was last seen; when the step began */
    int64_t ended_ns;            /* when the queue's end was seen; 0 until then */
    bool leaving;                /* this host leaves the run: processes that end are not started
                                  * again */
    uint64_t progress;
    int interrupts;
    bool over; /* the loop must end */
    int code;
    dray_error failure;
};

/* ---- supervisor.c ---------------------------------------------------------------------------- */

void dray__supervisor_end(dray__supervisor *s); /* the loop */
/* Ends the run with this error, unless it has one already. */
void dray__supervisor_fail(dray__supervisor *s, int code, const char *format, ...)
    __attribute__((format(printf, 3, 4)));
/* Prints a line for the user, on the run's own host. */
void dray__supervisor_say(dray__supervisor *s, const char *event, const char *format, ...)
    __attribute__((format(printf, 3, 4)));
uint64_t dray__supervisor_progress(const dray__supervisor *s); /* steps that the run has done */
/* Writes "dray run --resume FOLDER" as the user may type it. Returns out. */
enum { DRAY__ADVICE_BYTES = PATH_MAX + 96 };
char *dray__supervisor_advice(const dray__supervisor *s, char out[DRAY__ADVICE_BYTES]);

/* ---- roles.c --------------------------------------------------------------------------------- */

/* Starts a process by `start`, with p->log as its log. */
int dray__process_start(dray__supervisor *s, dray__process *p, dray__child_start start,
                        dray_error *error);

/* Sets up the processes of this host. On the run's own host these are all that its roles do not
 * leave to other hosts; on a joined host there are none before dray__roles_place. */
int dray__roles_open(dray__supervisor *s, dray_error *error);
/* Gives a joined host this place of the role, an instance or a rank. Its starts are counted from
 * `epoch` on. */
void dray__roles_place(dray__supervisor *s, uint32_t role, uint32_t place, uint32_t epoch);
/* Asks all processes of this host to end. */
void dray__roles_leave(dray__supervisor *s);
/* Ends the loop when the queue and all processes have ended. */
void dray__roles_check_end(dray__supervisor *s);
/* Starts the roles whose `after` is ready. */
int dray__roles_advance(dray__supervisor *s, dray_error *error);
/* Called at every tick: finds processes that are stopped (SIGSTOP) or late. */
void dray__roles_tick(dray__supervisor *s, int64_t now);
/* Is called when there was no progress for long. Ends the processes that hold rows and are idle.
 * Returns false when there are none. */
bool dray__roles_end_idle(dray__supervisor *s, int64_t now);
/* Is called after each look at the queue. */
void dray__roles_judge(dray__supervisor *s, const dray__sight *sight);
void dray__roles_free(dray__supervisor *s);
