/* The launcher that started this process with others: Slurm (srun), torchrun, Open MPI or another
 * mpirun. Rank 0 is the run, and writes its address into its folder (run.json), which all of them
 * reach. The others join it there. */
#pragma once

#include <dray/dray.h>
#include <limits.h>
#include <stdbool.h>
#include <stdint.h>

typedef struct dray__launcher {
    const char *name; /* "Slurm" */
    uint32_t rank, size;
    const char *host; /* the launcher's name of this host; NULL when it has none */
    char launch[160]; /* the same in all processes that were started together, and in no others */
} dray__launcher;

/* Returns 0, DRAY_ENOENT when no known launcher started this process, or DRAY_EINVALID when its
 * variables are no numbers. */
int dray__launcher_find(dray__launcher *out, dray_error *error);
/* Sets $DRAY_LISTEN and $DRAY_LAUNCH for rank 0. A $DRAY_LISTEN that is set stays. Otherwise it is
 * `listen`, the job file's, or, when that is "", a free port of the address by which others know
 * this host. */
int dray__launcher_lead(const dray__launcher *launcher, const char *listen, dray_error *error);
/* Sets $DRAY_LISTEN for the other ranks from the folder's run.json. Waits until that file is there
 * and the run listens, at `address` or, when that is NULL, where the file says; returns
 * DRAY_ETIMEDOUT when it does not in time. */
int dray__launcher_follow(const dray__launcher *launcher, const char *folder, const char *address,
                          double wait_seconds, dray_error *error);
/* Finds out whether the rank is among those at the beginning of the text, as in "1-3=rollout:1".
 * *rest is the part after "=", or the text itself when it names no ranks. Returns 0, or
 * DRAY_EINVALID. */
int dray__launcher_is_for(const char *text, uint32_t rank, bool *is, const char **rest,
                          dray_error *error);
