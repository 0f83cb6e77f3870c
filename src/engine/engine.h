/* src/engine/: a reference engine: a transformer with generator, trainer, tokenizer and losses, on
 * CPUs, in 32-bit floats. The tests and runs of this project train with it, and other engines'
 * results can be compared with its own. It uses dray as any other engine would: a generator's
 * memory is filled by a subscriber, and a trainer's is published. */

/* The types that generator and trainer share: ragged batches, and model configurations as the
 * reference engine takes them. The engine computes in float32 on one core a rank (OpenBLAS on one
 * thread). It is deterministic: the same calls with the same inputs on the same world give the same
 * bits. */
#pragma once

#include <dray/model.h>
#include <stdbool.h>

/* Token rows of different length back to back: row i is values[offsets[i] .. offsets[i + 1]).
 * offsets has rows + 1 entries and need not start at 0, so that a slice of a bigger array (or a
 * queue column as it is) is a batch, too. The pointers are borrowed. */
typedef struct dray__tokens {
    const int32_t *values;
    const uint64_t *offsets;
} dray__tokens;

/* Sequences as prompt and response. The prompt has at least one token, the response may be empty.
 * Everything "per response token" is an array in the order of response.values with
 * response.offsets[rows] - response.offsets[0] entries, first entry = first token of row 0. */
typedef struct dray__sequences {
    uint32_t rows;
    dray__tokens prompt, response;
    /* Per response token: 0 when the model did not make it (a tool did). The token is then in no
     * loss and in no count. NULL when the model made all of them. */
    const int32_t *mask;
} dray__sequences;

static inline bool dray__token_counts(const dray__sequences *sequences, uint64_t token)
{
    return !sequences->mask || sequences->mask[token];
}
/* Returns the number of the row's response tokens that the model made. */
static inline uint64_t dray__row_tokens(const dray__sequences *sequences, uint32_t row)
{
    const uint64_t *offsets = sequences->response.offsets;
    uint64_t count = 0;
    for (uint64_t i = offsets[row]; i < offsets[row + 1]; i++)
        count += dray__token_counts(sequences, i - offsets[0]);
    return count;
}

/* Reads `path` (a config.json, or a folder that has one; or a name of the built-in table) for the
 * engine. DRAY_EUNSUPPORTED names the first key with a value that the engine does not support
 * (rope_scaling, sliding_window in use, hidden_act other than silu, ...); other errors as
 * dray_model_config_load. */
int dray__engine_config_load(const char *path, dray_model_config *out, dray_error *error);
/* Checks that the engine can compute this model: sizes positive and divisible, family known, no
 * o_proj or mlp bias, at most one label. Returns 0, or DRAY_EUNSUPPORTED or DRAY_EINVALID, which
 * names the field. */
int dray__engine_config_check(const dray_model_config *config, dray_error *error);
/* Makes the config.json of a float32 checkpoint of this model, as transformers reads it. *out is
 * malloc'ed. eos_token is -1 for none. */
int dray__engine_config_json(const dray_model_config *config, int32_t eos_token, char **out,
                             dray_error *error);
