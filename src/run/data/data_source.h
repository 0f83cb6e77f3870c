/* Where prompts and answers come from: a source is one file, data_*.c, with one of these structs,
 * and one line of DRAY__SOURCES (job.h). */
#pragma once

#include "engine/tokenizer.h"
#include "run/data/data.h"

/* Draws a prompt of `steps` steps, and its answer. Uses 1 + steps random words of the stream, from
 * word `first` on: one for the start value and one for each step. */
typedef void dray__chains_draw(uint64_t steps, uint64_t seed, uint64_t stream, uint64_t first,
                               char *prompt, char *answer);

typedef struct dray__data_source {
    /* For sources of chains of at most `data.steps` steps, of which short ones are more frequent.
     * They need only these two functions: the size of the longest chain's texts, and the draw of
     * one chain. */
    dray__data_bytes (*longest_chain)(int64_t steps);
    dray__chains_draw *draw; /* NULL for other kinds of sources, which have the functions below */
    size_t size;             /* of its state, which begins as zeroes */
    int (*open)(void *state, const dray__job *job, dray_error *error);
    void (*close)(void *state); /* NULL when there is nothing to do */
    int (*get)(const void *state, dray__split split, uint64_t index, char **prompt, char **answer,
               dray_error *error);
    /* The sizes of the longest texts by the job's settings; NULL when these do not limit them. */
    dray__data_bytes (*longest)(const dray__job *job);
    /* Checks that a job with this tokenizer and this number of positions can train on all of the
     * source's data. NULL when the settings alone decide. */
    int (*check)(const void *state, const dray__job *job, const dray__tokenizer *tokenizer,
                 uint64_t positions, dray_error *error);
} dray__data_source;

#define SOURCE(upper, lower) extern const dray__data_source dray__source_##lower;
DRAY__SOURCES(SOURCE)
#undef SOURCE

/* Streams of random numbers. SPLIT_SEED alone decides which data are held out: the job's seed
 * does not change that. */
enum {
    DRAY__STREAM_TRAIN = 11,
    DRAY__STREAM_WARMUP = 12,
    DRAY__STREAM_EVAL = 13,
    DRAY__STREAM_SPLIT = 14
};
enum { DRAY__SPLIT_SEED = 1 };

uint64_t dray__data_stream(dray__split split);

/* Returns whether this number is in the eighth that is held out, for sources that make their own
 * prompts. */
bool dray__data_held_out(uint64_t number);
