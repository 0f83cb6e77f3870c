/* src/run/join/: hosts that join a run (`dray join`). hosts.c belongs to the supervisor: it knows
 * which hosts have joined, and which processes they run. guest.c is a joined host's own supervisor,
 * uplink.c is its connection with the run, and files.c copies its files to the run. launcher.c
 * reads the variables of Slurm, torchrun and mpirun, and manifest.c writes a job for others.
 * Requests of hosts go through control/relay.h. */

/* The hosts that have joined a run, as its supervisor knows them. A thread takes their requests
 * from the coordinator (control/relay.h) and answers them; the supervisor's loop reads the results.
 *
 * The part of a role that other hosts run is its places: the instances from `local` on, or the
 * ranks when they are spread. A place is free, or it belongs to a host from its "join" to its
 * "leave", or to the end of its session. */
#pragma once

#include "run/report/reporter.h"
#include "run/supervisor/folder.h"

#define DRAY__JOIN_FORMAT 1 /* the version of the messages between joined hosts and supervisors */

typedef struct dray__hosts dray__hosts;

typedef struct dray__hosts_options {
    const dray__folder *folder;
    const dray__job *job;
    const char *text;    /* the resolved job file */
    const char *address; /* the coordinator's address for this host */
    const char *listen;  /* and for others, numeric: "10.0.0.1" */
    dray__reporter *reporter;
} dray__hosts_options;

typedef struct dray__hosts_sight {
    dray_error failure; /* the error that ends the run; code 0 when there is none */
    int64_t moved_ns;   /* when a process of a joined host last computed, or a host last joined */
    uint32_t count;     /* the number of hosts that are here */
    /* Since when places are free that the run needs to go on; 0 when there are none. */
    int64_t missing_ns;
    char missing[300];   /* which */
    char described[400]; /* the hosts, their processes, and when each was last heard of */
} dray__hosts_sight;

/* Everything that the options point at must outlive it. */
int dray__hosts_start(const dray__hosts_options *options, dray__hosts **out, dray_error *error);
void dray__hosts_look(dray__hosts *hosts, dray__hosts_sight *out);
/* Tells hosts from now on that the queue has ended, so that their processes end. */
void dray__hosts_queue_ended(dray__hosts *hosts);
/* Tells hosts from now on that the run is over, with the reason. They send their last files and
 * leave. Waits for them until the deadline. */
void dray__hosts_end(dray__hosts *hosts, const char *why, int64_t deadline_ns);
void dray__hosts_free(dray__hosts *hosts); /* NULL is allowed. */

/* Returns the host where the ranks of a spread role meet, which is the host of rank 0. Returns
 * false when rank 0 has no place yet. */
bool dray__hosts_master(dray__hosts *hosts, const dray__job_role *role, char address[64],
                        uint16_t *port);
