/* Where prompts and answers come from: a source is one file, data_*.c, with one of these structs,
 * and one line of DRAY__SOURCES (job.h). */
#ifndef DRAY_RUN_DATA_SOURCE_H
#define DRAY_RUN_DATA_SOURCE_H

#include "engine/tokenizer.h"
#include "run/data.h"

typedef struct dray__data_source {
    size_t size; /* of its state, which begins as zeroes */
    int (*open)(void *state, const dray__job *job, dray_error *error);
    void (*close)(void *state); /* NULL: nothing to do */
    int (*get)(const void *state, dray__split split, uint64_t index, char **prompt, char **answer,
               dray_error *error);
    uint64_t (*eval_count)(const void *state); /* NULL: as many as one likes */
    /* What the job's settings say of the longest ones; NULL: nothing. */
    dray__data_bytes (*longest)(const dray__job *job);
    /* Is all of it such as a job with this tokenizer, and so many positions, can train on? NULL:
     * what the settings say is all. */
    int (*check)(const void *state, const dray__job *job, const dray__tokenizer *tokenizer,
                 uint64_t positions, dray_error *error);
} dray__data_source;

#define SOURCE(upper, lower) extern const dray__data_source dray__source_##lower;
DRAY__SOURCES(SOURCE)
#undef SOURCE

/* Streams of random numbers. What is held out is no matter of the job's seed: SPLIT_SEED's. */
enum {
    DRAY__STREAM_TRAIN = 11,
    DRAY__STREAM_WARMUP = 12,
    DRAY__STREAM_EVAL = 13,
    DRAY__STREAM_SPLIT = 14
};
enum { DRAY__SPLIT_SEED = 1 };

uint64_t dray__data_stream(dray__split split);

/* Draws a prompt and its answer, of words of the stream from `first` on. */
typedef void (*dray__data_draw)(const void *state, uint64_t seed, uint64_t stream, uint64_t first,
                                char *prompt, char *answer);
/* For sources that draw what they give: the first that is drawn for the index and belongs to the
 * split. A draw takes `words` numbers of a stream; sizes: of the longest texts, with their ends. */
int dray__data_find(const void *state, dray__data_draw draw, uint64_t words, uint64_t seed,
                    dray__split split, uint64_t index, dray__data_bytes sizes, char **prompt,
                    char **answer, dray_error *error);
/* Is the thing with this number, of a source that makes its own, among the eighth held out? */
bool dray__data_held_out(uint64_t number);

#endif
