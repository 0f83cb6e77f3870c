/* Prompts of a partition, as the driver inserts them and as refill.c replaces them. */
#pragma once

#include "engine/tokenizer.h"
#include "run/data/data.h"

#include <dray/queue.h>

typedef struct dray__partition_kind {
    const char *kind, *prompt, *answer;
    dray__split split;
} dray__partition_kind;

extern const dray__partition_kind dray__partition_of_step, dray__partition_of_eval;

typedef struct dray__prompts {
    uint32_t count;
    uint64_t *prompt_offsets, *answer_offsets;
    int32_t *prompt;
    char *answer;
    uint64_t longest; /* bytes of a prompt and its answer */
} dray__prompts;

/* Returns the number of the prompt of a group of the partition. */
uint64_t dray__prompt_index(const dray__job *job, const dray__partition_kind *kind, int64_t step,
                            uint32_t group);
/* Makes `count` prompts: those numbered first + groups[i], or first + i when groups is NULL. */
int dray__prompts_make(const dray__data *data, const dray__tokenizer *tokenizer, dray__split split,
                       uint64_t first, const uint32_t *groups, uint32_t count, dray__prompts *out,
                       dray_error *error);
void dray__prompts_free(dray__prompts *prompts);
/* Returns the prompt and answer columns, which point into `prompts`. */
void dray__prompts_columns(const dray__prompts *prompts, const dray__partition_kind *kind,
                           dray_column_data out[2]);
