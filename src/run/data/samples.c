#include "run/data/samples.h"

#include "base/error.h"
#include "run/job/tasks.h"

#include <stdlib.h>
#include <string.h>

void dray__ragged_free(dray__ragged *ragged)
{
    free(ragged->offsets);
    free(ragged->values);
    *ragged = (dray__ragged){0};
}

int dray__ragged_like(const dray__ragged *as, dray__ragged *out, dray_error *error)
{
    size_t offsets = ((size_t)as->rows + 1) * sizeof(*out->offsets);
    *out = (dray__ragged){.rows = as->rows,
                          .offsets = malloc(offsets),
                          .values = malloc(((size_t)as->offsets[as->rows] + 1) * 4)};
    if (!out->offsets || !out->values)
        return dray__nomem(error);
    memcpy(out->offsets, as->offsets, offsets);
    return DRAY_OK;
}

static int column_of(dray_batch *batch, const char *name, dray_dtype dtype, dray_column *out,
                     dray_error *error)
{
    int rc = dray_batch_column(batch, name, out, error);
    if (!rc && out->dtype != (int32_t)dtype)
        rc = dray__fail(error, DRAY_EFORMAT, "column %s: expected %s, found %s", name,
                        dray_dtype_name(dtype), dray_dtype_name((dray_dtype)out->dtype));
    return rc;
}

int dray__ragged_read(dray_batch *batch, const char *column, dray_dtype dtype, dray__ragged *out,
                      dray_error *error)
{
    dray_column from;
    int rc = column_of(batch, column, dtype, &from, error);
    if (rc)
        return rc;
    size_t width = dray_dtype_size(dtype);
    dray__ragged to = {.rows = dray_batch_rows(batch)};
    to.offsets = malloc(((size_t)to.rows + 1) * sizeof(*to.offsets));
    uint64_t total = 0;
    for (uint32_t i = 0; i < to.rows; i++)
        total += from.lengths[i];
    to.values = malloc(total * width + 1);
    if (!to.offsets || !to.values) {
        dray__ragged_free(&to);
        return dray__nomem(error);
    }
    to.offsets[0] = 0;
    for (uint32_t i = 0; i < to.rows; i++) {
        if (from.lengths[i])
            memcpy((char *)to.values + to.offsets[i] * width, from.cells[i],
                   from.lengths[i] * width);
        to.offsets[i + 1] = to.offsets[i] + from.lengths[i];
    }
    *out = to;
    return DRAY_OK;
}

int dray__text_read(dray_batch *batch, const char *column, uint32_t row, char **out,
                    dray_error *error)
{
    dray_column from;
    int rc = column_of(batch, column, DRAY_U8, &from, error);
    if (rc)
        return rc;
    char *text = malloc(from.lengths[row] + 1);
    if (!text)
        return dray__nomem(error);
    if (from.lengths[row])
        memcpy(text, from.cells[row], from.lengths[row]);
    text[from.lengths[row]] = 0;
    *out = text;
    return DRAY_OK;
}

int dray__scalars_read(dray_batch *batch, const char *column, float *out, dray_error *error)
{
    dray_column from;
    int rc = column_of(batch, column, DRAY_F32, &from, error);
    if (!rc && from.ndim)
        rc = dray__fail(error, DRAY_ESHAPE,
                        "column %s: expected one number a row (shape []), found %u dimension%s",
                        column, from.ndim, from.ndim == 1 ? "" : "s");
    for (uint32_t i = 0; !rc && i < dray_batch_rows(batch); i++)
        memcpy(&out[i], from.cells[i], sizeof(out[i]));
    return rc;
}

dray__tokens dray__ragged_tokens(const dray__ragged *ragged)
{
    return (dray__tokens){.values = ragged->values, .offsets = ragged->offsets};
}

dray_column_data dray__ragged_column(const char *name, dray_dtype dtype, const uint64_t *offsets,
                                     const void *values)
{
    return (dray_column_data){.name = name,
                              .dtype = (int32_t)dtype,
                              .content = DRAY_CONTENT_TENSOR,
                              .ndim = 1,
                              .offsets = offsets,
                              .values = values};
}

dray_column_data dray__scalar_column(const char *name, const float *values)
{
    return (dray_column_data){
        .name = name, .dtype = DRAY_F32, .content = DRAY_CONTENT_TENSOR, .values = values};
}

int dray__prompt_text(const dray__tokenizer *tokenizer, const int32_t *tokens, uint64_t count,
                      char **out, dray_error *error)
{
    char *text;
    size_t length;
    int rc = dray__tokenizer_decode(tokenizer, tokens, count, &text, &length, error);
    if (rc)
        return rc;
    for (size_t i = 0; i < length; i++)
        if (!text[i])
            text[i] = '\xff'; /* replaces zeroes, which would end the text; no answer contains this
                                 byte */
    *out = text;
    return DRAY_OK;
}

uint64_t dray__mask_turns(const int32_t *mask, uint64_t count)
{
    uint64_t turns = 0;
    for (uint64_t i = 0; i < count; i++)
        turns += !mask[i] && (i == 0 || mask[i - 1]);
    return turns;
}

bool dray__response_cut(const dray__tokenizer *tokenizer, const dray__ragged *responses,
                        uint32_t row)
{
    const int32_t *tokens = responses->values;
    uint64_t end = responses->offsets[row + 1];
    return end == responses->offsets[row] || tokens[end - 1] != dray__tokenizer_end(tokenizer);
}

bool *dray__responses_cut(const dray__tokenizer *tokenizer, const dray__ragged *responses)
{
    bool *cut = malloc(((size_t)responses->rows + 1) * sizeof(*cut));
    for (uint32_t i = 0; cut && i < responses->rows; i++)
        cut[i] = dray__response_cut(tokenizer, responses, i);
    return cut;
}

int dray__response_text(const dray__tokenizer *tokenizer, const int32_t *tokens, uint64_t count,
                        char **out, dray_error *error)
{
    uint64_t end = 0;
    while (end < count && tokens[end] != dray__tokenizer_end(tokenizer))
        end++;
    return dray__prompt_text(tokenizer, tokens, end, out, error);
}

int dray__prompt_tokens(const dray__tokenizer *tokenizer, const char *text, int32_t **out,
                        uint64_t *count, dray_error *error)
{
    return dray__tokenizer_encode(tokenizer, text, strlen(text), true, out, count, error);
}

int dray__answer_tokens(const dray__tokenizer *tokenizer, const char *text, int32_t **out,
                        uint64_t *count, dray_error *error)
{
    int32_t *tokens;
    size_t length;
    int rc = dray__tokenizer_encode(tokenizer, text, strlen(text), false, &tokens, &length, error);
    if (rc)
        return rc;
    *out = realloc(tokens, (length + 1) * sizeof(*tokens));
    if (!*out) {
        free(tokens);
        return dray__nomem(error);
    }
    (*out)[length] = dray__tokenizer_end(tokenizer);
    *count = length + 1;
    return DRAY_OK;
}

int dray__batch_step(const dray_batch *batch, int64_t *step, dray_error *error)
{
    double value;
    int rc = dray_batch_tag(batch, 0, DRAY__TAG_STEP, &value, error);
    if (!rc)
        *step = (int64_t)value;
    return rc;
}
