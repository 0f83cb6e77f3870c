/* src/run/join/: hosts that join a run (`dray join`). hosts.c is the supervisor's: who has joined,
 * which processes are theirs. guest.c is a joined host's own supervisor, uplink.c its connection
 * with the run, files.c what it brings home. launcher.c reads what Slurm, torchrun and mpirun tell
 * a process, manifest.c writes a job for others. What hosts ask goes through control/relay.h. */

/* The hosts that have joined a run, as its supervisor knows them. A thread takes what they ask from
 * the coordinator (control/relay.h) and answers it; the supervisor's loop looks at what came of it.
 *
 * What a role leaves to other hosts are its places: instances from `local` on, or, where its ranks
 * are spread, ranks. A place is free, or a host's, from its "join" to its "leave", or to its
 * session's end. */
#pragma once

#include "run/report/reporter.h"
#include "run/supervisor/folder.h"

#define DRAY__JOIN_FORMAT 1 /* of what joined hosts and supervisors say to each other */

typedef struct dray__hosts dray__hosts;

typedef struct dray__hosts_options {
    const dray__folder *folder;
    const dray__job *job;
    const char *text;    /* the resolved job file */
    const char *address; /* of the coordinator, for this host */
    const char *listen;  /* and for others, numeric: "10.0.0.1" */
    dray__reporter *reporter;
} dray__hosts_options;

typedef struct dray__hosts_sight {
    dray_error failure;  /* code 0: none; the run ends with it */
    int64_t moved_ns;    /* when a process of a joined host computed, or a host came */
    uint32_t count;      /* hosts that are here */
    int64_t missing_ns;  /* since when places are free that the run cannot do without; 0: none */
    char missing[300];   /* which */
    char described[400]; /* the hosts, what they run, when they were heard */
} dray__hosts_sight;

/* What is pointed at must outlive it. */
int dray__hosts_start(const dray__hosts_options *options, dray__hosts **out, dray_error *error);
void dray__hosts_look(dray__hosts *hosts, dray__hosts_sight *out);
/* From now on hosts are told that the queue has ended: their processes come to their end. */
void dray__hosts_queue_ended(dray__hosts *hosts);
/* From now on hosts are told that the run is over, and why; they bring home what is left and leave.
 * Waits for them until the deadline. */
void dray__hosts_end(dray__hosts *hosts, const char *why, int64_t deadline_ns);
void dray__hosts_free(dray__hosts *hosts); /* NULL is fine */

/* Where ranks of a spread role meet: the host of rank 0. false: it has no place yet. */
bool dray__hosts_master(dray__hosts *hosts, const dray__job_role *role, char address[64],
                        uint16_t *port);
