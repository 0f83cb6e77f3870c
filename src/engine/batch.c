/* Sequences: checking them, and packing them into chunks. */
#include "engine/model.h"

#include "base/error.h"

#include <inttypes.h>
#include <stdlib.h>
#include <string.h>

int dray__tokens_check(const dray__tokens *tokens, uint32_t rows, int64_t vocabulary,
                       uint64_t least, const char *what, dray_error *error)
{
    if (!tokens->offsets)
        return dray__fail(error, DRAY_EINVALID, "%s: no offsets given", what);
    for (uint32_t row = 0; row < rows; row++) {
        uint64_t from = tokens->offsets[row], to = tokens->offsets[row + 1];
        if (to < from || to - from > INT32_MAX)
            return dray__fail(error, DRAY_EINVALID,
                              "%s of row %" PRIu32 ": offsets %" PRIu64 " to %" PRIu64, what, row,
                              from, to);
        if (to > from && !tokens->values)
            return dray__fail(error, DRAY_EINVALID, "%s: no tokens given", what);
        if (to - from < least)
            return dray__fail(error, DRAY_EINVALID, "%s of row %" PRIu32 " is empty", what, row);
        for (uint64_t i = from; i < to; i++)
            if (tokens->values[i] < 0 || tokens->values[i] >= vocabulary)
                return dray__fail(error, DRAY_EINVALID,
                                  "%s of row %" PRIu32 ": token %" PRId32
                                  " is outside the vocabulary of %" PRId64,
                                  what, row, tokens->values[i], vocabulary);
    }
    return DRAY_OK;
}

static uint64_t length(const dray__tokens *tokens, uint32_t row)
{
    return tokens->offsets[row + 1] - tokens->offsets[row];
}

int dray__sequences_check(const dray_model_config *config, const dray__sequences *sequences,
                          dray_error *error)
{
    uint32_t rows = sequences->rows;
    int code = dray__tokens_check(&sequences->prompt, rows, config->vocab_size, 1, "prompt", error);
    if (code == DRAY_OK)
        code = dray__tokens_check(&sequences->response, rows, config->vocab_size, 0, "response",
                                  error);
    for (uint32_t row = 0; code == DRAY_OK && row < rows; row++) {
        uint64_t tokens = length(&sequences->prompt, row) + length(&sequences->response, row);
        if (tokens > (uint64_t)config->max_positions)
            code = dray__fail(error, DRAY_EINVALID,
                              "row %" PRIu32 " has %" PRIu64 " tokens, the model %" PRId64
                              " positions",
                              row, tokens, config->max_positions);
    }
    return code;
}

int64_t dray__sequences_longest(const dray__sequences *sequences)
{
    uint64_t longest = 0;
    for (uint32_t row = 0; row < sequences->rows; row++) {
        uint64_t tokens = length(&sequences->prompt, row) + length(&sequences->response, row);
        longest = tokens > longest ? tokens : longest;
    }
    return (int64_t)longest;
}

uint64_t dray__response_tokens(const dray__sequences *sequences)
{
    uint64_t count = 0;
    for (uint32_t row = 0; row < sequences->rows; row++)
        count += dray__row_tokens(sequences, row);
    return count;
}

void dray__chunk_free(dray__row_chunk *chunk)
{
    free(chunk->ids);
    free(chunk->offsets);
    free(chunk->positions);
    free(chunk->targets);
    free(chunk->row_of);
    *chunk = (dray__row_chunk){0};
}

/* Returns the end of the rows from `row` on that go into one chunk, and fills in the chunk's
 * sizes. */
static uint32_t measure(const dray__sequences *s, uint32_t row, uint32_t end,
                        dray__row_chunk *chunk)
{
    for (; row < end; row++) {
        uint64_t response = length(&s->response, row);
        if (response == 0) /* rows without a response are not computed */
            continue;
        int64_t tokens = (int64_t)(length(&s->prompt, row) + response - 1);
        if (chunk->rows > 0 && chunk->tokens + tokens > DRAY__CHUNK_TOKENS)
            break;
        chunk->rows++;
        chunk->tokens += tokens;
        chunk->targets_count += (int64_t)response;
    }
    return row;
}

static void pack_row(const dray__sequences *s, uint32_t row, dray__row_chunk *chunk, int64_t *token,
                     int64_t *target)
{
    uint64_t prompt = length(&s->prompt, row), response = length(&s->response, row);
    const int32_t *words = s->response.values + s->response.offsets[row];
    memcpy(chunk->ids + *token, s->prompt.values + s->prompt.offsets[row], prompt * sizeof *words);
    memcpy(chunk->ids + *token + prompt, words, (response - 1) * sizeof *words);
    for (uint64_t i = 0; i < response; i++, (*target)++) {
        chunk->positions[*target] = *token + (int64_t)(prompt - 1 + i);
        chunk->targets[*target] = words[i];
        chunk->row_of[*target] = row;
    }
    *token += (int64_t)(prompt + response - 1);
}

int dray__chunk_next(const dray__sequences *sequences, uint32_t end, uint32_t *row,
                     dray__row_chunk *chunk, dray_error *error)
{
    dray__row_chunk c = {.first =
                             sequences->response.offsets[*row] - sequences->response.offsets[0]};
    uint32_t stop = measure(sequences, *row, end, &c);
    size_t tokens = (size_t)c.tokens, targets = (size_t)c.targets_count;
    c.ids = malloc((tokens + 1) * sizeof *c.ids);
    c.offsets = malloc((c.rows + (size_t)1) * sizeof *c.offsets);
    c.positions = malloc((targets + 1) * sizeof *c.positions);
    c.targets = malloc((targets + 1) * sizeof *c.targets);
    c.row_of = malloc((targets + 1) * sizeof *c.row_of);
    if (!c.ids || !c.offsets || !c.positions || !c.targets || !c.row_of) {
        dray__chunk_free(&c);
        return dray__nomem(error);
    }
    int64_t token = 0, target = 0;
    uint32_t packed = 0;
    for (uint32_t at = *row; at < stop; at++) {
        if (length(&sequences->response, at) == 0)
            continue;
        c.offsets[packed++] = (uint64_t)token;
        pack_row(sequences, at, &c, &token, &target);
    }
    c.offsets[packed] = (uint64_t)token;
    *row = stop;
    *chunk = c;
    return DRAY_OK;
}
