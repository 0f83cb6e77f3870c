/* src/run/trainer/: the built-in programs that learn. trainer.c has the tasks of the policy's
 * trainer, critic.c those of the value model's, learn.c one step of learning, late.c a step that
 * trains the samples that are complete first, warmup.c the steps before the first, and measure.c
 * the metrics of a step. publication.c publishes versions, checkpoint.c writes checkpoints.
 *
 * This header has the declarations that trainer.c (a trainer: its tasks and their order), learn.c
 * (one step of learning), critic.c (the value model's part) and warmup.c share. */
#pragma once

#include "engine/trainer.h"
#include "queue/client/training.h"
#include "run/data/samples.h"
#include "run/host/host.h"
#include "run/trainer/publication.h"

/* A micro-batch of the task `actor` or `critic`, copied out of the queue: the columns that the task
 * needs. */
typedef struct dray__micro {
    uint32_t rows;
    dray__ragged prompt, response, rollout, versions; /* versions: i32, of each response token */
    dray__ragged mask; /* i32, for jobs with a tool: 0 for response tokens that the tool made */
    /* If the job has them; each has the parts of several rewards. */
    dray__ragged old, reference, each;
    dray__ragged values, returns; /* of each response token; then advantages are, too */
    dray__ragged token_advantages;
    float *advantages, *rewards;
} dray__micro;

void dray__micro_free(dray__micro *micro);
/* Returns the micro-batch's sequences, borrowed. */
dray__sequences dray__micro_sequences(const dray__micro *micro);
int dray__micro_read(dray_batch *batch, const dray__job *job, const char *task, dray__micro *out,
                     dray_error *error);
/* Copies rows [first, first + rows). */
int dray__micro_slice(const dray__micro *from, uint32_t first, uint32_t rows, dray__micro *out,
                      dray_error *error);

enum { DRAY__STALENESS_BINS = 16, DRAY__REWARDS_MAX = 16 };

/* Sums over the step that is being made. */
typedef struct dray__step_sums {
    double reward, staleness, staleness_max, gap, gap_max, each[DRAY__REWARDS_MAX];
    uint64_t histogram[DRAY__STALENESS_BINS]; /* tokens by staleness; the last bin has all that is
                                                 staler */
    double behind, behind_max; /* optimiser steps between a token's policy and its training */
    double loss, gradient_norm, clip_fraction, dual_clip_fraction, truncated_fraction, kl, entropy;
    double ratio_max, behaviour, behaviour_square, behaviour_max, learning_rate;
    /* used_tokens includes masked ones. */
    uint64_t samples, cut, tokens, used_tokens, trained_tokens;
    uint64_t turns;                                                /* answers of a tool */
    int64_t oldest_version, newest_version;                        /* of tokens */
    uint32_t steps;                                                /* of the optimiser */
    double values, returns, returns_square, errors, errors_square; /* errors: return - value */
} dray__step_sums;

/* The model of a trainer: the policy (trainer.c) or the value model (critic.c). */
typedef struct dray__learned {
    const char *task, *model;        /* the task that trains it, the name that it is published by */
    const char *optimiser, *publish; /* names of its phases */
    double (*rate)(const dray__job *job); /* learning rate before warm-up and decay */
    int64_t (*epochs)(const dray__job *job);
    /* Completes a micro-batch by the parameters that the step begins with (late.c); NULL when there
     * is nothing to add. */
    int (*complete)(dray__host *host, dray__micro *micro, dray_error *error);
    /* Adds the gradients of a micro-batch. masked has one flag a row, or is NULL. */
    int (*accumulate)(dray__host *host, const dray__micro *micro, const bool *masked,
                      dray_error *error);
    /* Measures the samples before anything is learned from them. */
    void (*measure)(dray__host *host, const dray__micro *micro);
    /* Reports a step that is made and published, by rank 0. */
    int (*tell)(dray__host *host, dray_error *error);
    /* Writes the step's checkpoint, or begins to wait for its prerequisites. */
    int (*checkpoint)(dray__host *host, int64_t step, dray_error *error);
    /* The same at the end of the run. */
    int (*last_checkpoint)(dray__host *host, int64_t step, dray_error *error);
} dray__learned;

extern const dray__learned dray__learned_policy, dray__learned_value;

typedef struct dray__learner {
    const dray__learned *what;
    dray_steps_rules rules;
    dray__trainer *trainer;
    dray__publication *publication;
    int64_t step;                          /* the step being made; version step - 1 is published */
    char partition[DRAY__PARTITION_BYTES]; /* of its samples */
    uint32_t rows;                         /* of the step, accumulated */
    bool settled;  /* all remaining samples of the step are ready, so none can be lost any more */
    bool step_due; /* a part is accumulated, and waits for the step to be settled */
    bool written;  /* the step has changed the parameters */
    bool finished; /* the step is done except for its last commit */
    bool stopped;  /* the run was asked to stop, and the step that was made is saved */
    int64_t saved; /* step of the newest checkpoint */
    /* The step's micro-batches, kept for several epochs or until all are there. */
    dray__micro *kept;
    uint32_t kept_count;
    uint64_t kept_room;
    /* For steps that train the samples that are complete first (late.c). */
    bool late;
    dray__feed *feed; /* the policy's */
    uint32_t learned; /* number of `kept` that are accumulated */
    uint32_t old;     /* samples of older versions than the newest */
    /* Nothing is claimed before the file `awaited` exists (or, when it is "", the policy has
     * awaited_version) and `then` has been called. */
    char awaited[4096];
    int64_t awaited_version;
    int (*then)(dray__host *host, dray_error *error);
    dray__step_sums sums;
} dray__learner;

uint32_t dray__learner_part(const dray__job *job);  /* samples of an optimiser step */
uint32_t dray__learner_micro(const dray__job *job); /* samples of a micro-batch */
double dray__learning_rate(const dray__job *job, const dray__learned *what, int64_t step,
                           uint32_t optimiser_step);

/* Opens a trainer without parameters, which makes the step after first_step. labels is the width of
 * its model's head. */
int dray__learner_open(dray__host *host, const dray__learned *what, int64_t labels,
                       dray_error *error);
/* Publishes the parameters as the version that the first step begins with. */
int dray__learner_publish(dray__host *host, dray_error *error);
/* Called on all ranks. Has `then` called on all ranks once `path` exists; nothing is claimed before
 * that. */
void dray__learner_await(dray__host *host, const char *path,
                         int (*then)(dray__host *host, dray_error *error));
/* Is called when nothing more has to be done for the step. Begins the next step, or ends the
 * run. */
int dray__learner_go_on(dray__host *host, dray_error *error);
/* Computes one number for each response token with the parameters that the step begins with, and
 * puts them into this column. */
int dray__learner_score(dray__host *host, dray_batch *batch, const char *column,
                        dray__score_fn *score, dray_error *error);
/* The value model (critic.c). */
int dray__critic_open(dray__host *host, dray_error *error);

/* Takes the optimiser's step for the part that was accumulated. */
int dray__learner_step(dray__host *host, dray_error *error);
int dray__learner_accumulate(dray__host *host, const dray__micro *micro, dray_error *error);
/* Measures the samples before anything is learned from them. */
void dray__learner_measure(dray__host *host, const dray__micro *micro);
/* The policy's gradients: dray__learned.accumulate. */
int dray__learner_accumulate_policy(dray__host *host, const dray__micro *micro, const bool *masked,
                                    dray_error *error);
/* Returns the sums of the step as a row for metrics.jsonl; NULL when out of memory. */
json_t *dray__learner_row(const dray__host *host);
/* Adds one number, or null when JSON cannot hold it. Returns false when out of memory. */
bool dray__row_add(json_t *row, const char *key, double value);
/* Runs the remaining epochs over the kept micro-batches. */
int dray__learner_repeat(dray__host *host, dray_error *error);

/* Keeps a micro-batch until the step is made; takes its arrays over. */
int dray__learner_keep(dray__host *host, dray__micro *micro, dray_error *error);

/* For steps that train the samples that are complete first (late.c). The first claim binds samples
 * to the step: the actor's, or, with a value model, that of the task `value`. Returns true when
 * this learner's does. */
bool dray__late_binds(const dray__host *host);
/* dray__late_bind returns how many samples to bind now: at most `most`, of the `left` that the step
 * has room for. dray__late_newest returns whether only those of the newest version may be bound. */
uint32_t dray__late_bind(const dray__host *host, uint32_t most, uint32_t left);
bool dray__late_newest(const dray__host *host);
/* Gets how many more samples the step has room for, besides those that are bound to it. */
int dray__late_left(const dray__host *host, uint32_t *left, dray_error *error);
void dray__late_bound(dray__learner *self, const dray_batch *batch);
/* dray__late_count returns how many samples the actor or critic claims now. dray__late_run works on
 * a batch of them: it computes the policy's log-probs with the parameters that the step begins
 * with, and accumulates the samples of the first optimiser step. With the batch that completes the
 * step it takes all optimiser steps of the first epoch. */
uint32_t dray__late_count(const dray__host *host);
int dray__late_run(dray__host *host, dray_batch *batch, dray_error *error);
/* Computes the policy's log-probs at the beginning of the step; used as dray__learned.complete. */
int dray__late_proximal(dray__host *host, dray__micro *micro, dray_error *error);

/* Supervised training on right answers until sampling them is likely enough. When reward is not
 * NULL, it does not train: it only measures the reward that samples would get now, and the answers'
 * mean length in tokens. */
int dray__warmup(dray__host *host, double *reward, double *length, dray_error *error);

/* ---- critic.c: its task `value` -------------------------------------------------------------- */

uint32_t dray__value_count(const dray__host *host);
bool dray__value_newest(const dray__host *host);
int dray__value_run(dray__host *host, dray_batch *batch, int64_t step, dray_error *error);
