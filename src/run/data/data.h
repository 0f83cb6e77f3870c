/* src/run/data/: prompts and samples. data.c finds the source of prompts by its name, and each
 * data_*.c is one source (data_source.h); prompts.c makes the columns that a step's prompts are
 * inserted as, and samples.c reads and writes the columns of samples.
 *
 * Prompts and their right answers. The numbering of prompts depends on the job alone, so a
 * restarted or resumed run gets the same ones. Training never sees a held-out prompt. */
#pragma once

#include "run/job/job.h"

typedef struct dray__data dray__data;

typedef enum dray__split {
    DRAY__SPLIT_TRAIN = 0, /* prompts of the steps; the numbering continues from step to step */
    DRAY__SPLIT_WARMUP,    /* training prompts in another order */
    DRAY__SPLIT_EVAL       /* held out */
} dray__split;

/* Before anything of a job starts, checks that its tokenizer fits its model, and that it can train
 * on the lines of its files: every prompt and answer must fit, with the tokens that are generated.
 * Returns 0, or DRAY_EFORMAT with file and line. */
int dray__data_check(const dray__job *job, dray_error *error);
/* job is borrowed until close. Returns 0, or DRAY_EFORMAT with file and line. */
int dray__data_open(const dray__job *job, dray__data **out, dray_error *error);
void dray__data_close(dray__data *data);
/* Gets prompt number `index` of a split. Both texts are UTF-8, terminated, and malloc'ed. Eval
 * prompts repeat when a source has few of them. */
int dray__data_get(const dray__data *data, dray__split split, uint64_t index, char **prompt,
                   char **answer, dray_error *error);

typedef struct dray__data_bytes {
    int64_t prompt, answer;
} dray__data_bytes;
/* Returns the sizes of the longest possible prompt and answer; 0 when the job's settings do not
 * limit them. */
dray__data_bytes dray__data_longest(const dray__job *job);
