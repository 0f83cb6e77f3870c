/* src/run/supervisor/: the process that the user starts. supervisor.c takes a run from its start to
 * its end, roles.c starts the processes of the roles and starts them again, spawn.c makes a child,
 * watch.c looks at the queue, probe.c and vital.c find out whether a role is ready and a process
 * alive. folder.c knows the files of a run's folder. coordinator.c is the process that every run
 * and `dray serve` need, sandbox.c restricts it. */

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
    off_t log_begin; /* before it wrote there */
    uint32_t rank;
    bool left, done;    /* ended with status 0; and that was right */
    int64_t left_ns;    /* when */
    int64_t stopped_ns; /* the time since which it has been stopped; 0 when it is not */
    uint64_t ticks;     /* CPU time, in clock ticks */
    uint64_t wanted_ns; /* of which it had a core, or waited for one */
    /* The time since which it has held the same claims, used no CPU and reported no wait; 0 when it
     * does not. */
    int64_t idle_ns;
    uint64_t claims;
    bool named; /* it was said to */
} dray__process;

struct dray__instance {
    const dray__job_role *role;
    uint32_t number, epoch;
    dray__process *ranks;
    uint32_t first, count; /* the ranks that are this host's; count 0: the instance is not here */
    bool held;             /* it is started when the run can be reached again */
    uint32_t deaths;       /* in a row without progress */
    uint64_t progress;     /* when it was started */
    int64_t asked_ns;      /* when SIGTERM was sent, after the queue's end; 0 until then */
};

typedef struct dray__role_state {
    const dray__job_role *role;
    dray__instance *instances;
    bool started, ready;
    int64_t started_ns;
    struct timespec started_at; /* wall clock: of files */
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
    dray__join *join;   /* by which other hosts read this host's samples; NULL when there are
                         * none */
    dray__uplink *link; /* of a joined host; NULL on the run's own */
    bool waiting_said;  /* for hosts */
    char *text; /* of the job as resolved, which hosts that join must have, too; NULL when none
                 * may */
    char address[128], keeper_path[112];
    struct event *signals[3], *tick, *sight;
    int64_t ticked_ns, awake_ns; /* the last tick; since when ticks have come in time */
    int64_t looked_ns;           /* at processes */
    int64_t moved_ns, step_ns;   /* when something was seen to move; when the step began */
    int64_t ended_ns;            /* when the queue's end was seen; 0 until then */
    bool leaving;                /* this host leaves the run: processes that end are not started
                                  * again */
    uint64_t progress;
    int interrupts;
    bool over; /* the loop is to end */
    int code;
    dray_error failure;
};

/* ---- supervisor.c ---------------------------------------------------------------------------- */

void dray__supervisor_end(dray__supervisor *s); /* the loop */
/* The run fails with this reason, unless it has one already. */
void dray__supervisor_fail(dray__supervisor *s, int code, const char *format, ...)
    __attribute__((format(printf, 3, 4)));
/* A line for people, on the run's own host. */
void dray__supervisor_say(dray__supervisor *s, const char *event, const char *format, ...)
    __attribute__((format(printf, 3, 4)));
uint64_t dray__supervisor_progress(const dray__supervisor *s); /* steps that the run has done */
/* "dray run --resume FOLDER", as the person may type it. */
enum { DRAY__ADVICE_BYTES = PATH_MAX + 96 };
char *dray__supervisor_advice(const dray__supervisor *s, char out[DRAY__ADVICE_BYTES]);

/* ---- roles.c --------------------------------------------------------------------------------- */

/* `start` but for its log, which is p->log. */
int dray__process_start(dray__supervisor *s, dray__process *p, dray__child_start start,
                        dray_error *error);

/* The processes that are this host's: of a run's own host all that its roles do not leave to
 * others; of a joined host none, before dray__roles_place. */
int dray__roles_open(dray__supervisor *s, dray_error *error);
/* A joined host has got this place of the role: its instance, or a rank. Starts are counted from
 * `epoch` on. */
void dray__roles_place(dray__supervisor *s, uint32_t role, uint32_t place, uint32_t epoch);
/* Asks all processes of this host to end. */
void dray__roles_leave(dray__supervisor *s);
/* The run is over where the queue has ended, and all processes have. */
void dray__roles_check_end(dray__supervisor *s);
/* Starts the roles whose `after` is ready. */
int dray__roles_advance(dray__supervisor *s, dray_error *error);
/* Called at every tick: finds processes that are stopped, or late. */
void dray__roles_tick(dray__supervisor *s, int64_t now);
/* Nothing has moved for long: ends the processes that hold rows and do nothing. false: none does.
 */
bool dray__roles_end_idle(dray__supervisor *s, int64_t now);
/* After a look at the queue. */
void dray__roles_judge(dray__supervisor *s, const dray__sight *sight);
void dray__roles_free(dray__supervisor *s);
