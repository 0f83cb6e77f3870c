/* The contract between `dray run` and the processes of a role, built in or not: environment
 * variables (docs/roles.md). The supervisor writes them, `dray host` reads them as any program
 * does. */
#pragma once

#include "run/job/job.h"

enum { DRAY__LABEL_BYTES = 48 };
/* The name of an instance in logs and messages: "engine", or "engine.1" where there are several.
 * Returns out. */
char *dray__role_label(const dray__job_role *role, uint32_t instance, char out[DRAY__LABEL_BYTES]);

/* The content of the variables for one process. */
typedef struct dray__orders {
    const dray__job_role *role;
    const char *job;     /* its name */
    const char *folder;  /* the run's */
    const char *config;  /* the resolved job, as JSON */
    const char *address; /* of the coordinator */
    const char *leases;  /* for devices that other roles have, too (devices.h); "" for none */
    uint32_t instance, rank, epoch, restarts;
    int64_t first_step;
    int64_t eval_from;
    bool redis;             /* a Redis server holds the samples: roles that claim them need its
                             * password */
    int group_fd;           /* its number in the process; -1 for none */
    uint16_t port;          /* a free port at which the ranks may meet, */
    const char *master;     /* on this host; NULL means the own host */
    uint32_t first, here;   /* ranks of the instance that are on this host */
    const char *token_file; /* of the role, when the coordinator is on another host; NULL when there
                             * is none */
} dray__orders;

/* Returns this process's environment without secrets, overridden by the role's `env` and then by
 * the contract; ended by NULL. Free it with dray__environment_free. Returns NULL when out of
 * memory. */
char **dray__contract_write(const dray__orders *orders);
void dray__environment_free(char **environment);
/* Returns whether the contract sets this variable ("NAME=..."). */
bool dray__contract_sets(const char *variable);

/* The content of the variables for this process. */
typedef struct dray__host_options {
    const char *folder;  /* the run's */
    const char *name;    /* of the role, as in the job file */
    const char *address; /* of the coordinator */
    const char *leases;  /* for devices that other roles have, too; NULL or "" for none */
    uint32_t instance, rank, epoch;
    int group_fd;       /* -1 when there is only one rank */
    int64_t first_step; /* the step before the first one to make: 0, or the resumed checkpoint's */
    int64_t eval_from;  /* the first version whose held-out accuracy is still to be measured */
} dray__host_options;

/* Reads the variables. Texts point into the environment. Returns 0, or DRAY_EINVALID, which names
 * the variable. */
int dray__contract_read(dray__host_options *out, dray_error *error);

/* Returns true for variables that hold proofs of identity, or the names of their files. Commands of
 * a job do not get them. */
bool dray__is_secret(const char *variable);

/* Returns a free port of this host; 0 when there is none. */
uint16_t dray__free_port(void);
