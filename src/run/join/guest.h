/* `dray join`: this host's part of a run that another host began. Its processes are started, and
 * started again, by a supervisor of this host's own (run/supervisor/roles.c), from this host's own
 * job file. The run decides which instances and ranks they are, and says when the queue has
 * ended. */
#pragma once

#include <dray/dray.h>
#include <stdbool.h>

typedef struct dray__guest_options {
    const char *address;         /* of the run, "tcp:HOST:PORT"; NULL for the job file's `listen` */
    const char *job;             /* this host's job file */
    const char *const *settings; /* "key=value", as the run was started with */
    uint32_t setting_count;
    const char *const *roles; /* "rollout:2", "grader" */
    uint32_t role_count;
    const char *const *tokens; /* files; none: $DRAY_TOKEN_FILE */
    uint32_t token_count;
    const char *name;   /* this host's name; NULL for its hostname */
    const char *folder; /* of its logs and spans; NULL for one in $TMPDIR, removed at the end */
    const char *shared; /* the run's folder, if this host can reach it; else NULL */
    bool launched; /* by Slurm, torchrun or mpirun (launcher.h); `shared` has the run's address */
    double wait_seconds; /* how long to wait for the run, for places, and for a connection that is
                            down */
    bool json;
} dray__guest_options;

/* Runs until the run is over, or SIGTERM or SIGINT. After a signal it claims no more rows, commits
 * those that are complete or may be committed in part, and leaves. A second signal ends it at once.
 * *left is true after a signal. Call it on the main thread of a process that has no other
 * children. */
int dray__guest(const dray__guest_options *options, bool *left, dray_error *error);
