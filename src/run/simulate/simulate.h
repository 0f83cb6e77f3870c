/* src/run/simulate/: how long the steps of a job would take. services.c fits, from the trace of a
 * run, how long each task takes; estimate.c estimates it from a model's shape and a device's
 * figures; loop.c is a discrete-event model of the loop over the schedule's own rules
 * (job/schedule.h, dray/steps.h); simulate.c runs it several times and adds up; size.c searches
 * splits of devices.
 *
 * Times are seconds. */
#pragma once

#include "run/job/job.h"

#include <dray/dray.h>
#include <jansson.h>
#include <stdbool.h>

/* The tasks that rows go through, in the order of the built-in table. */
typedef enum dray__sim_task {
    DRAY__SIM_ROLLOUT = 0,
    DRAY__SIM_REWARD,
    DRAY__SIM_REFERENCE,
    DRAY__SIM_OLD,
    DRAY__SIM_ADVANTAGE,
    DRAY__SIM_ACTOR,
    DRAY__SIM_TASKS
} dray__sim_task;
extern const char *const dray__sim_names[DRAY__SIM_TASKS];

enum { DRAY__SIM_CAUSES = 11 }; /* of waits: dray_wait_cause */

/* The time of a batch of a task, from its claim to the end of its commit, and the share of each
 * cause of waiting in it (the coordinator's answer, a tool, other ranks). */
typedef struct dray__cost {
    double fixed, row, token;
    double wait[DRAY__SIM_CAUSES]; /* shares of the whole */
} dray__cost;

typedef struct dray__services {
    dray__cost tasks[DRAY__SIM_TASKS]; /* rollout has `fixed` alone, the time of a claim */
    double token_fixed, token_row;     /* of generating one token of all rows in the batch */
    double step_end;                   /* from the last gradients to the published version */
    /* Of a version: the time until it can be taken, and the engine's pause. */
    double prefetch, take;
    double insert; /* from a published version to the prompts of one more step */
    /* The lengths of responses in whole groups, because the lengths of a prompt's samples are
     * correlated. */
    uint32_t *lengths, groups, group;
    double measured; /* seconds of a step of the fitted run after its third; 0 when there are too
                        few steps */
    int64_t engine_ranks, trainer_ranks; /* of the fitted run */
    bool by_ranks;                       /* the trainer's work is divided among its ranks */
    bool estimated;
} dray__services;

/* Fits services from the run in `folder` (a run's folder, or its trace.json) for the job. Returns
 * 0; DRAY_EINVALID when the run is of another job (names the first setting that differs) or its job
 * has a part that is not modelled; or DRAY_EFORMAT with the file when the run is truncated, too
 * short or without tokens. */
int dray__services_fit(const char *folder, const dray__job *job, dray__services *out,
                       dray_error *error);
/* The same from several runs, whose times are averaged. each, if not NULL, gets those of every run;
 * the caller frees them after success. */
int dray__services_fit_all(const char *const *folders, uint32_t count, const dray__job *job,
                           dray__services *out, dray__services *each, dray_error *error);
/* Finds the model's error for the run itself: simulates the run's job with the services that were
 * fitted from it alone. *simulated is the seconds of a step, to be compared with own->measured.
 * Returns 0, DRAY_ENOENT when the run has too few steps, or the errors of loading its job and of
 * dray__simulate. */
int dray__services_check(const char *folder, const dray__services *own, double *simulated,
                         dray_error *error);
/* Estimates services from the figures of a device ("h100", "h200", "b200") and the job's model
 * alone. */
int dray__services_estimate(const char *device, const dray__job *job, dray__services *out,
                            dray_error *error);
void dray__services_free(dray__services *services);

/* One run of the loop. */
typedef struct dray__simulated {
    double step_seconds, staleness_mean, staleness_max, samples_per_s;
    double made_anew; /* samples per step that became too old and are generated again */
    uint32_t roles;
    double idle[16][DRAY__SIM_CAUSES], transfer[16]; /* by role, as shares of its time */
    int64_t first, last;                             /* the steps that were counted */
} dray__simulated;

/* steps is the number of simulated steps. seed is for drawing response lengths. Returns 0, or
 * DRAY_EINVALID when the job cannot make progress, or has a part that is not modelled. */
int dray__simulate_once(const dray__job *job, const dray__services *services, int64_t steps,
                        uint64_t seed, dray__simulated *out, dray_error *error);

/* Mean and standard deviation over several runs. */
typedef struct dray__spread {
    double mean, deviation;
} dray__spread;

typedef struct dray__prediction {
    dray__spread step_seconds, samples_per_s, staleness_mean, staleness_max, made_anew;
    uint32_t roles;
    dray__spread waits[16]; /* by role */
    dray__simulated one;    /* means of values without a spread here */
} dray__prediction;

enum { DRAY__SIM_RUNS = 10, DRAY__SIM_STEPS = 48 };
int dray__simulate(const dray__job *job, const dray__services *services, uint32_t runs,
                   dray__prediction *out, dray_error *error);

/* ---- size.c ---------------------------------------------------------------------------------- */

typedef struct dray__sizing {
    /* Instances of the role that generates, ranks of the one that trains. */
    int64_t instances, ranks;
    dray__prediction made;
} dray__sizing;

enum { DRAY__SPLITS = 5 };
/* Finds the splits of `devices` between the job's engines and its trainer with the most samples a
 * second, whose mean staleness is at most `staleness` (negative means any), the best first.
 * *engine_more and *trainer_more are the samples a second of the best split with one more device
 * for that role, divided by those without. Returns 0, or DRAY_EINVALID when no split is
 * possible. */
int dray__size(const dray__job *job, const dray__services *services, int64_t devices,
               double staleness, dray__sizing out[DRAY__SPLITS], uint32_t *count,
               double *engine_more, double *trainer_more, dray_error *error);
/* Gets the roles of the job that dray__size would size, as indices into job->roles. */
void dray__size_roles(const dray__job *job, uint32_t *engine, uint32_t *trainer);
