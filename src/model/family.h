/* Model families as tables of parameters: what a checkpoint of a configuration holds, and how an
 * engine fuses and cuts it. A new family is a new table in family.c. */
#ifndef DRAY_MODEL_FAMILY_H
#define DRAY_MODEL_FAMILY_H

#include <dray/model.h>
#include <stdbool.h>

/* Sizes that follow from a configuration. */
typedef enum dray__size {
    DRAY__SIZE_NONE = 0,
    DRAY__SIZE_VOCAB,
    DRAY__SIZE_HIDDEN,
    DRAY__SIZE_INTERMEDIATE,
    DRAY__SIZE_QUERY, /* heads x head_dim */
    DRAY__SIZE_KV,    /* kv_heads x head_dim */
    DRAY__SIZE_HEAD   /* head_dim */
} dray__size;

/* How tensor parallelism cuts a parameter. */
typedef enum dray__cut {
    DRAY__CUT_NONE = 0,  /* replicated */
    DRAY__CUT_COLUMN,    /* rows of the weight: [out / tp, in] */
    DRAY__CUT_ROW,       /* columns of the weight: [out, in / tp] */
    DRAY__CUT_HEADS,     /* rows, by whole attention heads */
    DRAY__CUT_KV_HEADS,  /* rows, by KV heads; replicated where tp > kv_heads */
    DRAY__CUT_HEADS_ROW, /* columns, by whole attention heads */
    DRAY__CUT_VOCAB      /* rows, after padding the vocabulary */
} dray__cut;

/* Which flag of the configuration a parameter needs. */
typedef enum dray__when {
    DRAY__WHEN_ALWAYS = 0,
    DRAY__WHEN_QKV_BIAS,
    DRAY__WHEN_O_BIAS,
    DRAY__WHEN_MLP_BIAS,
    DRAY__WHEN_QK_NORM
} dray__when;

typedef struct dray__parameter {
    const char *name;  /* checkpoint name; '*' stands for the layer's number */
    const char *fused; /* the engine's parameter; NULL: the same name */
    const char *tied;  /* the parameter it is another name of when the configuration ties them */
    dray__when when;
    dray__cut cut;
    dray__size shape[2]; /* second NONE: one dimension */
} dray__parameter;

typedef struct dray__family {
    const char *name;
    const dray__parameter *parameters; /* in checkpoint order; those of layers are neighbours */
    uint32_t count;
    /* What transformers takes where config.json is silent. */
    int64_t default_kv_heads; /* 0: as many as heads */
    int64_t default_head_dim; /* 0: hidden_size / heads */
    bool bias_keys;           /* attention_bias gives biases to q, k, v and o */
    bool mlp_bias_key;        /* mlp_bias exists */
    bool qkv_bias, qk_norm;   /* always there */
} dray__family;

/* NULL for an unknown name. */
const dray__family *dray__family_find(const char *name);
/* "; did you mean 'x'? (known: a, b)" */
void dray__family_hint(const char *name, char *out, size_t capacity);

/* Checks every field, so that products of sizes cannot overflow. */
int dray__config_check(const dray_model_config *config, const dray__family **family,
                       dray_error *error);
/* The tensor's shape; returns its dimensions. */
uint32_t dray__parameter_shape(const dray__parameter *parameter, const dray_model_config *config,
                               int64_t *shape);
bool dray__parameter_used(const dray__parameter *parameter, const dray_model_config *config);
bool dray__parameter_tied(const dray__parameter *parameter, const dray_model_config *config);
bool dray__parameter_in_layer(const dray__parameter *parameter);

enum { DRAY__PARAMETER_NAME = 128, DRAY__MOST_PARAMETERS = 64 /* rows of a table */ };
/* The pattern with the layer's number put in, in `out` of DRAY__PARAMETER_NAME bytes. */
const char *dray__parameter_name(const char *pattern, int64_t layer, char *out);

/* Walks all parameters of a configuration in checkpoint order. Start with {config, family}. */
typedef struct dray__walk {
    const dray_model_config *config;
    const dray__family *family;
    uint32_t next; /* row of the table */
    int64_t layer; /* of what was returned; 0 outside layers */
    uint32_t row;  /* of what was returned */
    int64_t next_layer;
    char name[DRAY__PARAMETER_NAME];
} dray__walk;

/* The next parameter that the configuration has; NULL at the end. */
const dray__parameter *dray__walk_next(dray__walk *walk);

/* Adds the tensor of the walk's current parameter, or the alias. *is_alias says which. */
int dray__walk_add(const dray__walk *walk, const dray__parameter *parameter, dray_dtype dtype,
                   dray_layout *layout, uint32_t *tensor, bool *is_alias, dray_error *error);

/* Checks and defaults shared by the whole-model builders. */
int dray__builder_defaults(const dray_model_config *config, dray_dtype *dtype,
                           dray_region_kind *kind, dray_error *error);

#endif
