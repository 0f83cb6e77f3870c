/* What started this process beside others: Slurm (srun), torchrun, Open MPI or another mpirun. Rank
 * 0 is the run, and writes into its folder (run.json), which all of them reach, where it listens;
 * the others join it there. */
#pragma once

#include <dray/dray.h>
#include <limits.h>
#include <stdbool.h>
#include <stdint.h>

typedef struct dray__launcher {
    const char *name; /* "Slurm" */
    uint32_t rank, size;
    const char *host; /* what it calls this host; NULL: nothing */
    char launch[160]; /* the same in all processes that were started together, and in no others */
} dray__launcher;

/* DRAY_ENOENT: nothing that is known started this process; DRAY_EINVALID: its variables are no
 * numbers. */
int dray__launcher_find(dray__launcher *out, dray_error *error);
/* $DRAY_LISTEN and $DRAY_LAUNCH for rank 0: at a free port of the address by which others know this
 * host. listen: the job file's, which is taken as it is; "": none. */
int dray__launcher_lead(const dray__launcher *launcher, const char *listen, dray_error *error);
/* The same for the others, from the folder's run.json, which is waited for. DRAY_ETIMEDOUT. */
int dray__launcher_follow(const dray__launcher *launcher, const char *folder, double wait_seconds,
                          dray_error *error);
/* Is the rank among those that the text begins with, "1-3=rollout:1"? *rest: what is behind "=";
 * the text itself where it names no ranks. DRAY_EINVALID. */
int dray__launcher_is_for(const char *text, uint32_t rank, bool *is, const char **rest,
                          dray_error *error);
