/* `dray join`: this host's part of a run that another host began. Its processes are started, and
 * started again, by a supervisor of this host's own (run/supervisor/roles.c), from this host's own
 * job file; the run says which instances and ranks they are, and when the queue has ended. */
#pragma once

#include <dray/dray.h>
#include <stdbool.h>

typedef struct dray__guest_options {
    const char *address;         /* of the run, "tcp:HOST:PORT"; NULL: the job file's `listen` */
    const char *job;             /* this host's job file */
    const char *const *settings; /* "key=value", as the run was started with */
    uint32_t setting_count;
    const char *const *roles; /* "rollout:2", "grader" */
    uint32_t role_count;
    const char *const *tokens; /* files; none: $DRAY_TOKEN_FILE */
    uint32_t token_count;
    const char *name;   /* of this host; NULL: its hostname */
    const char *folder; /* of its logs and spans; NULL: one in $TMPDIR, removed at the end */
    const char *shared; /* the run's folder, where this host can reach it; NULL: it cannot */
    bool launched; /* by Slurm, torchrun or mpirun (launcher.h): `shared` says where the run is */
    double wait_seconds; /* for the run, for places, and for a link that is down */
    bool json;
} dray__guest_options;

/* Until the run is over, or SIGTERM or SIGINT: then it takes no more rows, commits what is whole or
 * may be committed in part, and leaves; a second signal ends it at once. *left: by a signal. Call
 * it on the main thread of a process that has no other children. */
int dray__guest(const dray__guest_options *options, bool *left, dray_error *error);
