/* Columns of a batch as the engine takes them (ragged arrays back to back), and the other way. */
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
/* As many values of 4 bytes for each row as another has. */
int dray__ragged_like(const dray__ragged *as, dray__ragged *out, dray_error *error);
/* Copies a column out of the batch. DRAY_EFORMAT when its dtype is another. */
int dray__ragged_read(dray_batch *batch, const char *column, dray_dtype dtype, dray__ragged *out,
                      dray_error *error);
/* Row i of a text column as a terminated string, malloc'ed. */
int dray__text_read(dray_batch *batch, const char *column, uint32_t row, char **out,
                    dray_error *error);
/* One float a row (shape []): as many as the batch has rows, into `out`. DRAY_ESHAPE. */
int dray__scalars_read(dray_batch *batch, const char *column, float *out, dray_error *error);

dray__tokens dray__ragged_tokens(const dray__ragged *ragged);
dray_column_data dray__ragged_column(const char *name, dray_dtype dtype, const uint64_t *offsets,
                                     const void *values);
dray_column_data dray__scalar_column(const char *name, const float *values);

/* How many answers of a tool are in a response with this mask: runs of zeroes. */
uint64_t dray__mask_turns(const int32_t *mask, uint64_t count);
/* The response ends without the end token: it was cut. */
bool dray__response_cut(const dray__tokenizer *tokenizer, const dray__ragged *responses,
                        uint32_t row);
/* One flag a row, for all rows; malloc'ed. Returns NULL when out of memory. */
bool *dray__responses_cut(const dray__tokenizer *tokenizer, const dray__ragged *responses);
/* Decodes tokens into text without special tokens; terminated, malloc'ed. Of a response: those
 * before the end token. */
int dray__prompt_text(const dray__tokenizer *tokenizer, const int32_t *tokens, uint64_t count,
                      char **out, dray_error *error);
int dray__response_text(const dray__tokenizer *tokenizer, const int32_t *tokens, uint64_t count,
                        char **out, dray_error *error);
/* Encodes text: a prompt with the begin token, if there is one; an answer with the end token.
 * malloc'ed. */
int dray__prompt_tokens(const dray__tokenizer *tokenizer, const char *text, int32_t **out,
                        uint64_t *count, dray_error *error);
int dray__answer_tokens(const dray__tokenizer *tokenizer, const char *text, int32_t **out,
                        uint64_t *count, dray_error *error);

/* The rows' step, from the tag that the driver gave them. */
int dray__batch_step(const dray_batch *batch, int64_t *step, dray_error *error);
