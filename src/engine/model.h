/* The transformer itself, which generator and trainer both compute with. A model is a set of
 * pointers into the caller's parameters in the engine layout (fused qkv_proj and gate_up_proj); the
 * trainer uses that of one tensor-parallel rank.
 *
 * Batches are packed: the tokens of all rows are back to back, one matrix row for each token,
 * without padding. */
#pragma once

#include "engine/engine.h"
#include "engine/kernels/kernels.h"
#include "engine/pace.h"
#include "group/group.h"

#include <stdbool.h>

typedef struct dray__layer {
    float *input_norm;      /* [hidden] */
    float *qkv, *qkv_bias;  /* [q + 2 kv, hidden], [q + 2 kv] or NULL */
    float *q_norm, *k_norm; /* [head_dim] or NULL */
    float *o;               /* [hidden, q] */
    float *post_norm;       /* [hidden] */
    float *gate_up, *down;  /* [2 ffn, hidden], [hidden, ffn] */
} dray__layer;

/* Parameters, or gradients at the same offsets. */
typedef struct dray__weights {
    float *embed, *norm; /* [vocab, hidden], [hidden] */
    /* [vocab, hidden] (= embed when tied) and NULL; of a value model [1, hidden] and [1] */
    float *head, *head_bias;
    dray__layer *layers;
} dray__weights;

typedef struct dray__model {
    dray_model_config config;
    dray__group *group; /* NULL for one rank */
    uint32_t rank, world;
    /* this rank's sizes */
    int64_t q_heads, kv_heads, q_width, kv_width, qkv_width, ffn;
    int64_t vocab_share;             /* rows a rank, padding included */
    int64_t vocab_start, vocab_rows; /* true vocabulary, padding left out */
    float *cos, *sin;                /* [positions, head_dim / 2] */
    int64_t positions;               /* rows of the tables filled so far */
    dray__weights weights;
    const dray__pace *pace; /* NULL when the model computes */
    const dray__arithmetic *kernels;
} dray__model;

/* Opens a model on the parameters at `base`, which are in the layout of dray_layout_engine with tp
 * = the group's world. */
int dray__model_open(const dray_model_config *config, dray__group *group, void *base,
                     dray__model *model, dray_error *error);
void dray__model_close(dray__model *model);
/* Maps the same offsets from another base, for gradients. The caller frees weights->layers. */
int dray__model_map(const dray__model *model, void *base, dray__weights *weights,
                    dray_error *error);
/* Gets the vocabulary rows of each rank, without padding. */
void dray__model_shares(const dray__model *model, uint64_t *rows);
/* Fills the rotary tables for positions [0, count). */
int dray__model_reach(dray__model *model, int64_t count, dray_error *error);

/* ---- packed batches -------------------------------------------------------------------------- */

typedef struct dray__packed {
    uint32_t rows;
    int64_t tokens;
    const int32_t *ids;      /* [tokens] */
    const uint64_t *offsets; /* [rows + 1], from 0, of the rows' new tokens */
    const uint64_t *past;    /* [rows], number of tokens in the row's cache; NULL for none */
} dray__packed;

/* The KV cache of one row. */
typedef struct dray__cache {
    float *k, *v;    /* [layers, entries, kv_width] */
    int64_t entries; /* tokens that it has room for */
} dray__cache;

/* The values of a forward pass. Each layer has its own set for a backward pass; otherwise all
 * layers share one. */
typedef struct dray__layer_state {
    float *x;        /* [tokens, hidden]: the layer's input */
    float *normed;   /* input_norm(x) */
    float *qkv;      /* [tokens, qkv_width], with positions applied */
    float *raw;      /* q and k before their norms, for the backward pass; otherwise NULL */
    float *attended; /* [tokens, q_width] */
    float *middle;   /* x + attention */
    float *middle_normed;
    float *gate_up, *activated;  /* [tokens, 2 ffn], [tokens, ffn] */
    float *scale, *middle_scale; /* [tokens]: the norms' factors */
    float *head_scale;           /* [tokens, q_heads + kv_heads] of q_norm, k_norm */
    float *log_sum;              /* [tokens, q_heads]: log Σ exp of the attention scores */
} dray__layer_state;

typedef struct dray__state {
    bool keep; /* keeps every layer's values, for a backward pass */
    float *memory;
    int64_t capacity; /* tokens */
    dray__layer_state *layers;
    float *last, *hidden, *last_scale; /* output of the layers, [tokens, hidden]; the same normed;
                                          the norm's factors */
    float *partial;                    /* [tokens, hidden] */
    float *scores;                     /* one head's [n, past + n] */
    int64_t scores_capacity;
} dray__state;

void dray__state_free(dray__state *state);
/* Computes the hidden states of all tokens, after the last norm, into state->hidden. caches has one
 * cache for each row, to which new keys and values are added; NULL for none. Token ids must be
 * within the vocabulary. */
int dray__forward(const dray__model *model, const dray__packed *batch, dray__cache *const *caches,
                  dray__state *state, dray_error *error);

/* Memory of a backward pass. */
typedef struct dray__backward {
    float *memory;
    int64_t capacity;
    float *dx, *dmiddle, *dnormed, *dqkv, *dattended, *dgate_up, *dactivated;
    float *scores; /* two heads' */
    int64_t scores_capacity;
} dray__backward;

void dray__backward_free(dray__backward *backward);
/* Adds to the gradients of all parameters but the head. dhidden is the gradient of state->hidden.
 * The state must be that of a forward pass with `keep` and without caches, of a model with one
 * rank. */
int dray__backward_run(const dray__model *model, const dray__packed *batch,
                       const dray__state *state, const float *dhidden, dray__weights *gradients,
                       dray__backward *backward, dray_error *error);

/* ---- the head -------------------------------------------------------------------------------- */

/* Computes logits[i] = head · hidden[i], count × this rank's vocab_rows. */
void dray__head(const dray__model *model, const float *hidden, int64_t count, float *logits);

/* Describes the distribution softmax(logits / temperature) over the whole vocabulary: its
 * probabilities are exp(z - max) / sum with z = logit / temperature. */
typedef struct dray__summary {
    float max;
    float target;    /* z of the target token; -inf when another rank has it */
    double sum;      /* Σ exp(z - max) */
    double weighted; /* Σ exp(z - max) · z, for the entropy */
} dray__summary;

/* Computes the summaries of this rank's columns. targets has one token for each row, or is NULL.
 * exps (count × vocab_rows) gets exp(z - max). */
void dray__summarise(const dray__model *model, const float *logits, int64_t count,
                     const int32_t *targets, double inverse_temperature, float *exps,
                     dray__summary *summaries);
/* Gathers the summaries of all ranks: all[rank * count + i]. */
int dray__summaries_gather(const dray__model *model, const dray__summary *own, int64_t count,
                           dray__summary *all, dray_error *error);
/* Returns entry i over the whole vocabulary: the ranks' parts combined in rank order. */
dray__summary dray__summary_join(const dray__summary *all, uint32_t world, int64_t count,
                                 int64_t i);
/* to[i] = from[rows[i]], rows of `width` floats. */
void dray__pick_rows(const float *from, const int64_t *rows, int64_t count, int64_t width,
                     float *to);

/* ---- sequences in, packed chunks out --------------------------------------------------------- */

/* Rows of at most this many tokens together (or one longer row) are computed at a time, which keeps
 * the state in the CPU's cache. */
#define DRAY__CHUNK_TOKENS 256

typedef struct dray__row_chunk {
    uint32_t rows; /* that have a response */
    int64_t tokens;
    int32_t *ids; /* prompt + response without its last token */
    uint64_t *offsets;
    int64_t targets_count;
    int64_t *positions; /* [targets_count]: packed index of the token that predicts the target */
    int32_t *targets;   /* response tokens in order */
    uint32_t *row_of;   /* [targets_count]: row within the sequences */
    uint64_t first;     /* index of the first target among all response tokens */
} dray__row_chunk;

/* Checks that offsets ascend, and that every row has at least `least` tokens, all within the
 * vocabulary. */
int dray__tokens_check(const dray__tokens *tokens, uint32_t rows, int64_t vocabulary,
                       uint64_t least, const char *what, dray_error *error);
/* Checks that offsets ascend, prompts are not empty, ids are within the vocabulary, and rows fit
 * the model's positions. Returns 0, or DRAY_EINVALID, which names the row. */
int dray__sequences_check(const dray_model_config *config, const dray__sequences *sequences,
                          dray_error *error);
/* Returns the number of tokens of the longest row. */
int64_t dray__sequences_longest(const dray__sequences *sequences);
uint64_t dray__response_tokens(const dray__sequences *sequences); /* returns the number of response
                                                                     tokens that the model made */
/* Packs rows [*row, end) as far as one chunk goes, and advances *row. */
int dray__chunk_next(const dray__sequences *sequences, uint32_t end, uint32_t *row,
                     dray__row_chunk *chunk, dray_error *error);
void dray__chunk_free(dray__row_chunk *chunk);

/* Computes log-probs and entropies (entropy may be NULL) of the response tokens of rows [begin,
 * end) to logprobs[0..), as generator.h and trainer.h define them. */
int dray__score(dray__model *model, dray__state *state, const dray__sequences *sequences,
                uint32_t begin, uint32_t end, double temperature, float *logprobs, float *entropy,
                dray_error *error);
/* Returns the value model's value of the state in which a token is chosen; hidden is that
 * state's. */
float dray__value(const dray__model *model, const float *hidden);
/* The same for the response tokens of rows [begin, end), to values[0..). */
int dray__values(dray__model *model, dray__state *state, const dray__sequences *sequences,
                 uint32_t begin, uint32_t end, float *values, dray_error *error);
