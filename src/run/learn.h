/* What trainer.c (the trainer: its tasks and their order), learn.c (one step of learning) and
 * warmup.c share. */
#ifndef DRAY_RUN_LEARN_H
#define DRAY_RUN_LEARN_H

#include "engine/trainer.h"
#include "run/feed.h"
#include "run/host.h"
#include "run/publication.h"
#include "run/samples.h"

/* A micro-batch of the actor, copied out of the queue. */
typedef struct dray__micro {
    uint32_t rows;
    dray__ragged prompt, response, rollout, versions; /* versions: i32, of each response token */
    dray__ragged
        mask; /* i32, where a tool may have made response tokens: 0 for those that it did */
    dray__ragged old, reference, each; /* where the job has them; each: of several rewards */
    float *advantages, *rewards;
} dray__micro;

void dray__micro_free(dray__micro *micro);
/* Its sequences, borrowed. */
dray__sequences dray__micro_sequences(const dray__micro *micro);
int dray__micro_read(dray_batch *batch, const dray__job *job, dray__micro *out, dray_error *error);
/* Rows [first, first + rows) of it, copied. */
int dray__micro_slice(const dray__micro *from, uint32_t first, uint32_t rows, dray__micro *out,
                      dray_error *error);

enum { DRAY__STALENESS_BINS = 16, DRAY__REWARDS_MAX = 16 };

/* Sums over the step that is being made. */
typedef struct dray__step_sums {
    double reward, staleness, staleness_max, gap, gap_max, each[DRAY__REWARDS_MAX];
    uint64_t histogram[DRAY__STALENESS_BINS]; /* tokens by staleness; the last: and more */
    double behind, behind_max;                /* optimiser steps, as tokens were trained */
    double loss, gradient_norm, clip_fraction, dual_clip_fraction, truncated_fraction, kl, entropy;
    double ratio_max, behaviour, behaviour_square, behaviour_max, learning_rate;
    uint64_t samples, cut, tokens, used_tokens, trained_tokens; /* used: masked ones, too */
    uint64_t turns;                                             /* answers of a tool */
    int64_t oldest_version, newest_version;                     /* of tokens */
    uint32_t steps;                                             /* of the optimiser */
} dray__step_sums;

typedef struct dray__learner {
    dray__trainer *trainer;
    dray__publication *publication;
    int64_t step;                          /* being made; version step - 1 is published */
    char partition[DRAY__PARTITION_BYTES]; /* of its samples */
    uint32_t rows;                         /* of the step, accumulated */
    bool settled;      /* all that is left of the step is ready: nothing more can be lost */
    bool step_due;     /* a part is in, and waits for the step to be settled */
    bool written;      /* the step has changed the parameters */
    bool finished;     /* the step is done; its last commit is not */
    bool stopped;      /* the run was asked to end, and the step that was made is saved */
    int64_t saved;     /* step of the newest checkpoint */
    dray__micro *kept; /* the step's micro-batches: for several epochs, or until all are there */
    uint32_t kept_count, kept_room;
    /* Of a step that trains what is complete first (late.c). */
    dray__feed *feed;
    uint32_t learned; /* of `kept`, accumulated */
    uint32_t old;     /* samples of older versions than the newest */
    dray__step_sums sums;
} dray__learner;

uint32_t dray__learner_part(const dray__job *job);  /* samples of an optimiser step */
uint32_t dray__learner_micro(const dray__job *job); /* samples of a micro-batch */
double dray__learning_rate(const dray__job *job, int64_t step, uint32_t optimiser_step);

/* Takes the optimiser's step for the part that was accumulated. */
int dray__learner_step(dray__host *host, dray_error *error);
int dray__learner_accumulate(dray__host *host, const dray__micro *micro, dray_error *error);
/* What the samples themselves say, before anything is learned from them. */
void dray__learner_measure(dray__host *host, const dray__micro *micro);
/* The sums of the step as a row for metrics.jsonl; NULL: out of memory. */
json_t *dray__learner_row(const dray__host *host);
/* The other epochs over what was kept. */
int dray__learner_repeat(dray__host *host, dray_error *error);

/* Keeps a micro-batch until the step is made; takes what it has. */
int dray__learner_keep(dray__host *host, dray__micro *micro, dray_error *error);
/* Samples of other versions than the schedule's are refused, whatever made them. */
int dray__learner_check(dray__host *host, const dray_batch *batch, dray_error *error);

/* Steps that train the samples that are complete first (late.c). Samples to claim now, whether
 * only those of the newest version, and what is done with a batch of them: its log-probs by the
 * parameters that the step begins with are computed, and as much is accumulated as the first
 * optimiser step takes; the batch that completes the step takes all optimiser steps of the first
 * epoch. */
uint32_t dray__late_count(const dray__host *host);
bool dray__late_newest(const dray__host *host);
int dray__late_run(dray__host *host, dray_batch *batch, dray_error *error);

/* Supervised training on right answers until sampling them is likely enough. With `reward`: no
 * training, only the reward that samples would get now, and the answers' mean length in tokens. */
int dray__warmup(dray__host *host, double *reward, double *length, dray_error *error);

#endif
