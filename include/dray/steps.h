/* steps.h - which samples each step of a trainer takes.
 *
 * A schedule decides how far training may be behind generation. `dray run` writes the schedule as
 * numbers, the rules, to config.json in the run's folder ("rules"). The functions here apply the
 * rules in a trainer and an engine. v0 is the first version of the weights; step k makes version
 * vk. Since 0.1. */
#ifndef DRAY_STEPS_H
#define DRAY_STEPS_H

#include <dray/dray.h>
#include <dray/queue.h>

#ifdef __cplusplus
extern "C" {
#endif

typedef struct dray_steps_rules {
    size_t size;
    /* The oldest token of each sample of step k was made by one of the versions v(max(0, k -
     * oldest)) to v(max(0, k - newest)). */
    int64_t oldest, newest;
    int64_t open; /* steps whose prompts are in the queue at a time, the step that is trained
                   * included */
    int64_t kept; /* how many of the newest versions can be read */
    int64_t last; /* the job's last step; 0 when there is none */
    uint32_t rows, group; /* samples of a step; samples of a prompt */
    uint32_t fresh;       /* samples of a step that must be of the newest version that it may use */
    /* 1: engines take exactly the version that a step's samples need. 0: engines take the newest
     * version that is allowed, and never an older one than they have. */
    int32_t exact;
    /* 1: a step takes the samples that are complete first, in whole groups, from the prompts of any
     * step. 0: it takes the samples of its own prompts, whose partition is named step-00000k. */
    int32_t first_complete;
    int32_t in_turns; /* 1: engines take weights one after the other */
    int32_t tagged;   /* 1: every sample has the version that made it as a tag (DRAY_TAG_VERSION) */
} dray_steps_rules;

#define DRAY_STEPS_RULES_INIT                                                                      \
    {                                                                                              \
        sizeof(dray_steps_rules), 1, 1, 1, 1, 0, 0, 1, 0, 0, 0, 0, 0                               \
    }

typedef struct dray_steps dray_steps;

/* Begins the steps of a trainer after step `step`: 0, or the step of the checkpoint from which the
 * run resumes ($DRAY_STEP). folder: the run's folder, whose feed.json lists the trained prompts
 * where first_complete is 1; NULL: none are trained. The caller ends *out with dray_steps_close.
 * DRAY_EINVALID: the rules contradict each other. DRAY_EFORMAT, DRAY_ESYS: feed.json. Threads: one
 * at a time. Blocks for the file. */
int dray_steps_open(const dray_steps_rules *rules, const char *folder, int64_t step,
                    dray_steps **out, dray_error *error);
void dray_steps_close(dray_steps *steps); /* NULL is fine */

/* Fills *claim for the samples that the step takes next: partition (borrowed until the next step),
 * count, up_to, fresh, staleness and version, and the policy where the schedule decides it. most:
 * the most rows of a claim. Returns the count; 0: the step has all its samples. Does not block. */
uint32_t dray_steps_claim(const dray_steps *steps, uint32_t most, dray_claim_options *claim);
/* Records that the step has taken the batch. Every rank calls it for its batch. DRAY_EINTERNAL: the
 * samples do not belong to the step: they are of other versions, are not whole groups, were trained
 * before, or are too many. Does not block. */
int dray_steps_take(dray_steps *steps, const dray_batch *batch, dray_error *error);
/* Ends the step; the next one begins. Does not block. */
void dray_steps_next(dray_steps *steps);
/* Returns what the checkpoint of the last step must store about the prompts that are trained: the
 * JSON of member "feed" of its dray.json, malloc'ed, or NULL where there is nothing to store. */
int dray_steps_feed(const dray_steps *steps, char **out, dray_error *error);

/* Finds the versions with which an engine may generate a batch whose rows are of one step (tag
 * "step"): *oldest to *newest. The two are equal where the rows must be of the newest version
 * (`fresh`). DRAY_ENOENT: a row lacks the tag. Does not block. */
int dray_steps_versions(const dray_steps_rules *rules, const dray_batch *batch, uint64_t *oldest,
                        uint64_t *newest, dray_error *error);

#ifdef __cplusplus
}
#endif
#endif
