/* src/model/families/: what a model of a family consists of. families.c has a table for each
 * family (Llama, Qwen, Mixtral, DeepSeek and so on) of its parameters, with their shapes and how
 * engines fuse and cut them; family.c walks over it; config.c has the public models'
 * configurations and reads config.json. All builders of layouts, for trainers and for engines, are
 * loops over these tables. */

/* Model families as tables of parameters: what a checkpoint of a configuration holds, and how an
 * engine fuses and cuts it. A new family is a new table in families.c. */
#pragma once

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
    DRAY__SIZE_HEAD,  /* head_dim */
    DRAY__SIZE_EXPERTS,
    DRAY__SIZE_EXPERT,  /* moe_intermediate_size */
    DRAY__SIZE_SHARED,  /* shared_experts x moe_intermediate_size */
    DRAY__SIZE_Q_LORA,  /* q_lora_rank */
    DRAY__SIZE_KV_LORA, /* kv_lora_rank */
    DRAY__SIZE_KV_A,    /* kv_lora_rank + qk_rope_head_dim */
    DRAY__SIZE_KV_B,    /* heads x (qk_nope_head_dim + v_head_dim) */
    DRAY__SIZE_VALUE,   /* heads x v_head_dim */
    DRAY__SIZE_TWICE,   /* 2 x hidden_size */
    DRAY__SIZE_LABELS
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
    DRAY__WHEN_QK_NORM,
    DRAY__WHEN_Q_LORA,    /* the query projection has two steps */
    DRAY__WHEN_NO_Q_LORA, /* ... or one */
    DRAY__WHEN_SHARED,    /* there are shared experts */
    DRAY__WHEN_LANGUAGE,  /* the head gives logits of the next token */
    DRAY__WHEN_LABELS     /* ... or scores labels */
} dray__when;

/* Of a row inside layers: which layers have it. */
typedef enum dray__layers {
    DRAY__LAYERS_ALL = 0,
    DRAY__LAYERS_DENSE, /* those whose MLP is dense */
    DRAY__LAYERS_MOE,   /* those with experts */
    DRAY__LAYERS_MTP    /* those of multi-token prediction */
} dray__layers;

typedef struct dray__parameter {
    const char *name;  /* checkpoint name; '*' stands for the layer's, a second for the expert's
                          number */
    const char *fused; /* the engine's parameter; NULL: the same name */
    const char *tied;  /* the parameter it is another name of: when the configuration ties them;
                          of MTP rows always */
    dray__when when;
    dray__layers layers;
    dray__cut cut;
    dray__size shape[2]; /* second NONE: one dimension */
    dray_dtype dtype;    /* the only dtype it is ever stored in; NONE: any */
} dray__parameter;

/* A parameter of transformers' module where it is not the checkpoint's: a tensor under another
 * name, or, of patterns with the expert's number, all experts' tensors in one [experts, rows of
 * them one below the other, columns]. */
typedef struct dray__module {
    const char *name; /* '*' stands for the layer's number */
    const char *tensors[2];
} dray__module;

typedef struct dray__family {
    const char *name;
    /* In checkpoint order. Those of layers are neighbours, and so are those of experts among them.
     */
    const dray__parameter *parameters;
    uint32_t count;
    const dray__module *modules; /* the last has no name; NULL: none */
    /* What transformers takes where config.json is silent. */
    int64_t default_kv_heads;  /* 0: as many as heads */
    int64_t default_head_dim;  /* 0: hidden_size / heads */
    bool bias_key, o_bias_key; /* attention_bias gives biases to q, k and v; and to o */
    bool mlp_bias_key;         /* mlp_bias exists */
    bool qk_norm_key;          /* use_qk_norm exists */
    bool qkv_bias, qk_norm;    /* always there */
    bool moe, latent;          /* has experts; multi-head latent attention */
    bool dense_keys;           /* mlp_only_layers and decoder_sparse_step exist */
    bool mtp;                  /* may have layers of multi-token prediction */
    bool first_dense_key;      /* first_k_dense_replace exists */
    int64_t default_first_dense;
    double default_theta; /* 0: 10000 */
    /* Keys of config.json: how many experts (the first that is there counts), and the size of one;
     * NULL: intermediate_size. */
    const char *experts_keys[2], *expert_size_key;
} dray__family;

enum { DRAY__MOST_FAMILIES = 32, DRAY__FAMILY_HINT = 256 };
extern const dray__family dray__families[];
extern const uint32_t dray__family_count;

/* NULL for an unknown name. */
const dray__family *dray__family_find(const char *name);
/* "; did you mean 'x'? (known: a, b)" */
void dray__family_hint(const char *name, char *out, size_t capacity);

/* The path itself, or that of the folder's config.json, in `out` of PATH_MAX bytes. */
int dray__config_path(const char *path, char *out, dray_error *error);
/* Checks every field, so that products of sizes cannot overflow. */
int dray__config_check(const dray_model_config *config, const dray__family **family,
                       dray_error *error);
/* The tensor's shape; returns its dimensions. */
uint32_t dray__parameter_shape(const dray__parameter *parameter, const dray_model_config *config,
                               int64_t *shape);
/* Does the configuration have it, in some layer? */
bool dray__parameter_used(const dray__parameter *parameter, const dray_model_config *config);
/* ... and does this layer (of a row inside layers)? */
bool dray__parameter_in(const dray__parameter *parameter, const dray_model_config *config,
                        int64_t layer);
bool dray__parameter_tied(const dray__parameter *parameter, const dray_model_config *config);
bool dray__parameter_in_layer(const dray__parameter *parameter);
bool dray__parameter_of_expert(const dray__parameter *parameter);
/* The dtype it is stored in where the others are in `dtype`. */
dray_dtype dray__parameter_dtype(const dray__parameter *parameter, dray_dtype dtype);
/* Does layer `layer` (MTP layers included) have experts? */
bool dray__layer_is_moe(const dray_model_config *config, int64_t layer);

enum { DRAY__PARAMETER_NAME = 128, DRAY__MOST_PARAMETERS = 64 /* rows of a table */ };
/* The pattern with the numbers put in, in `out` of DRAY__PARAMETER_NAME bytes. */
const char *dray__parameter_name(const char *pattern, int64_t layer, int64_t expert, char *out);

/* Does the name follow the pattern? numbers: what stands for each '*', at most two. */
bool dray__name_matches(const char *pattern, const char *name, int64_t *numbers);
/* The number at the start of the text, of at most 2^32; returns what follows, or NULL where there
 * is none. */
const char *dray__read_number(const char *text, int64_t *out);

/* Walks all parameters of a configuration in checkpoint order; the layers of multi-token prediction
 * come last, behind what they share. Start with {config, family}. */
typedef struct dray__walk {
    const dray_model_config *config;
    const dray__family *family;
    uint32_t next;         /* row of the table */
    int64_t layer, expert; /* of what was returned; 0 outside layers and experts */
    uint32_t row;          /* of what was returned */
    int64_t next_layer, next_expert;
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
