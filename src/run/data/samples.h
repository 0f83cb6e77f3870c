/* Converts columns of a batch to the ragged arrays that the engine takes, and back. */
#pragma once

#include "engine/engine.h"
#include "engine/tokenizer.h"

#include <dray/queue.h>
#include <stdbool.h>

/* Values of one column, back to back: row i is values[offsets[i] .. offsets[i + 1]). */
typedef struct dray__ragged {
    uint32_t rows;
    uint64_t *offsets;
    void *values; /* of the column's dtype */
} dray__ragged;

void dray__ragged_free(dray__ragged *ragged);
/* Allocates an array with the same offsets as `as`, for values of 4 bytes. */
int dray__ragged_like(const dray__ragged *as, dray__ragged *out, dray_error *error);
/* Copies a column out of the batch. Returns DRAY_EFORMAT when its dtype is not `dtype`. */
int dray__ragged_read(dray_batch *batch, const char *column, dray_dtype dtype, dray__ragged *out,
                      dray_error *error);
/* Reads a row of a text column as a terminated, malloc'ed string. */
int dray__text_read(dray_batch *batch, const char *column, uint32_t row, char **out,
                    dray_error *error);
/* Reads a column of one float a row (shape []) into `out`, which has room for the batch's rows.
 * Returns DRAY_ESHAPE when the column has another shape. */
int dray__scalars_read(dray_batch *batch, const char *column, float *out, dray_error *error);

dray__tokens dray__ragged_tokens(const dray__ragged *ragged);
dray_column_data dray__ragged_column(const char *name, dray_dtype dtype, const uint64_t *offsets,
                                     const void *values);
dray_column_data dray__scalar_column(const char *name, const float *values);

/* Returns the number of tool answers in a response with this mask, which is its number of runs of
 * zeroes. */
uint64_t dray__mask_turns(const int32_t *mask, uint64_t count);
/* Returns whether the response has no end token at its end, which means that it was cut short. */
bool dray__response_cut(const dray__tokenizer *tokenizer, const dray__ragged *responses,
                        uint32_t row);
/* One flag a row, for all rows; malloc'ed. Returns NULL when out of memory. */
bool *dray__responses_cut(const dray__tokenizer *tokenizer, const dray__ragged *responses);
/* Decodes tokens into terminated, malloc'ed text without special tokens. A response is decoded up
 * to its end token. */
int dray__prompt_text(const dray__tokenizer *tokenizer, const int32_t *tokens, uint64_t count,
                      char **out, dray_error *error);
int dray__response_text(const dray__tokenizer *tokenizer, const int32_t *tokens, uint64_t count,
                        char **out, dray_error *error);
/* Encodes text into malloc'ed tokens. A prompt begins with the begin token, if there is one; an
 * answer ends with the end token. */
int dray__prompt_tokens(const dray__tokenizer *tokenizer, const char *text, int32_t **out,
                        uint64_t *count, dray_error *error);
int dray__answer_tokens(const dray__tokenizer *tokenizer, const char *text, int32_t **out,
                        uint64_t *count, dray_error *error);

/* Reads the step of the batch's rows from the tag that the driver gave them. */
int dray__batch_step(const dray_batch *batch, int64_t *step, dray_error *error);
