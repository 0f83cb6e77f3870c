/* src/model/families/: the parameters of a model of each family. NAME.json describes the family
 * NAME: how config.json gives its sizes, and a table of its parameters, with their shapes and how
 * engines fuse and cut them. parts.json has parts that tables share. find.c finds files, the
 * built-in ones and those of the folder that DRAY_FAMILIES names; read.c reads them; family.c walks
 * over a table; config.c has the public models' configurations and reads config.json. All builders
 * of layouts, for trainers and for engines, are loops over these tables. docs/families.md describes
 * the file. */
#pragma once

#include "base/json.h"

#include <dray/model.h>
#include <stdbool.h>

/* How tensor parallelism cuts a parameter. */
typedef enum dray__cut {
    DRAY__CUT_NONE = 0,  /* replicated */
    DRAY__CUT_COLUMN,    /* rows of the weight: [out / tp, in] */
    DRAY__CUT_ROW,       /* columns of the weight: [out, in / tp] */
    DRAY__CUT_HEADS,     /* rows, by whole attention heads */
    DRAY__CUT_KV_HEADS,  /* rows, by KV heads; replicated when tp > kv_heads */
    DRAY__CUT_HEADS_ROW, /* columns, by whole attention heads */
    DRAY__CUT_VOCAB      /* rows, after padding the vocabulary */
} dray__cut;

/* Which layers have a row that is inside layers. */
typedef enum dray__layers {
    DRAY__LAYERS_ALL = 0,
    DRAY__LAYERS_DENSE, /* those with a dense MLP */
    DRAY__LAYERS_MOE,   /* those with experts */
    DRAY__LAYERS_MTP,   /* those of multi-token prediction */
    DRAY__LAYERS_KIND,  /* those of kind `kind` of the family */
    DRAY__LAYERS_NOT_KIND
} dray__layers;

/* Arithmetic on the configuration's values, such as "heads * (qk_nope_head_dim + v_head_dim)", as
 * steps of a stack machine. */
enum { DRAY__MOST_STEPS = 16 };
typedef struct dray__expression {
    const char *text;
    uint32_t count;
    struct {
        char what; /* 'n' for a number, 'v' for the configuration's value of that number, or an
                      operator */
        int64_t value;
    } steps[DRAY__MOST_STEPS];
} dray__expression;

typedef struct dray__parameter {
    const char *name;  /* checkpoint name; the first '*' stands for the layer's number, the second
                          for the expert's */
    const char *fused; /* the engine's parameter; NULL for the same name */
    const char *tied; /* the parameter that it is an alias of, when the configuration ties them; for
                         MTP rows always */
    const dray__expression *when; /* the configuration has it when this is not 0 (`unless`: when it
                                   * is); NULL for always */
    bool unless;
    dray__layers layers;
    uint32_t kind;
    /* The number of "layers"; NULL for the model's number of layers. */
    const dray__expression *each;
    dray__cut cut;
    uint32_t ndim;
    const dray__expression *shape[DRAY_MAX_DIMS];
    dray_dtype dtype; /* the only dtype that it is stored in; NONE for any */
} dray__parameter;

/* A parameter of a transformers module that differs from the checkpoint's: a tensor under another
 * name or, for patterns with the expert's number, all experts' tensors in one [experts, rows of
 * both tensors, columns]. */
typedef struct dray__module {
    const char *name; /* '*' stands for the layer's number */
    const char *tensors[2];
} dray__module;

/* How config.json gives a value. */
typedef struct dray__config_rule {
    uint32_t value;      /* which */
    const char *keys[3]; /* the first key that exists is used; without one, the value is `absent` */
    bool is_flag;        /* the key is a boolean; else a number */
    bool is_list;        /* the value is the length of the key's list */
    /* absent is NULL when a key is required. null is the value of a JSON null; NULL when that
     * counts as absent. */
    const dray__expression *absent, *null;
} dray__config_rule;

/* The layers of a kind, with all the keys that may define it. */
typedef struct dray__kind {
    const char *name;
    /* A list of their numbers; a list of the numbers of all other layers. */
    const char *numbers, *others;
    const char *each, *is;    /* a list of one word for each layer, and this kind's word; has
                                 precedence over `every` */
    const char *signs, *sign; /* a text of one character for each layer, or a list of numbers, and
                                 this kind's one */
    const char *every;        /* N: all but layers N - 1, 2N - 1, ... */
    const char *first;        /* N: layers 0 to N - 1 */
    int64_t absent;           /* N when neither key exists */
} dray__kind;

enum { DRAY__DENSE_KIND = DRAY_MODEL_KINDS, DRAY__MOST_KINDS };

typedef struct dray__family {
    const char *name, *path; /* path: of its file, for messages */
    /* In checkpoint order. Those of layers are neighbours, and so are those of experts among them.
     */
    const dray__parameter *parameters;
    uint32_t count;
    const dray__module *modules;    /* the last has no name */
    const dray__config_rule *rules; /* each after the rules that it needs */
    uint32_t rule_count;
    dray__kind kinds[DRAY__MOST_KINDS]; /* those without a name are unused; the last one is that of
                                           dense layers */
    const char *layer; /* the beginning of layers' names, such as "model.layers.*." */
    /* The object of config.json that is searched first; NULL when there is none. */
    const char *within;
    const json_t *refused; /* keys that must not be set */
    double default_theta;
    bool moe, latent, mtp; /* has experts; latent attention; may have multi-token prediction */
    bool engine, megatron; /* dray knows how engines hold it; how Megatron-Core does */
} dray__family;

/* Finds the family of this model_type, in DRAY_FAMILIES' folder or built in. It is valid until the
 * process ends. Returns 0, DRAY_EUNSUPPORTED when there is none (the message has the nearest name),
 * or DRAY_EFORMAT when a file is wrong. */
int dray__family_find(const char *name, const dray__family **out, dray_error *error);

/* The value that a rule gives: a field of the configuration, or one of the family's own. */
/* Returns the name by which files refer to it; NULL past the last field. */
const char *dray__value_name(uint32_t value);
void dray__value_set(dray_model_config *config, uint32_t value, int64_t number);
/* Returns 0, or DRAY_EINVALID when it overflows, or a division has a remainder. */
int dray__evaluate(const dray__expression *expression, const dray_model_config *config,
                   int64_t *out, dray_error *error);

/* Writes the path itself, or that of the folder's config.json, to `out` of PATH_MAX bytes. */
int dray__config_path(const char *path, char *out, dray_error *error);
/* Checks every field, so that products of sizes cannot overflow. */
int dray__config_check(const dray_model_config *config, const dray__family **family,
                       dray_error *error);
/* Gets the tensor's shape, and returns its number of dimensions. */
uint32_t dray__parameter_shape(const dray__parameter *parameter, const dray_model_config *config,
                               int64_t *shape);
/* Returns whether the configuration has the parameter in some layer. */
bool dray__parameter_used(const dray__parameter *parameter, const dray_model_config *config);
/* Returns the number of layers of a row inside layers, without those of multi-token prediction. */
int64_t dray__parameter_layers(const dray__parameter *parameter, const dray_model_config *config);
/* Returns whether this layer has the parameter (of a row inside layers). */
bool dray__parameter_in(const dray__parameter *parameter, const dray_model_config *config,
                        int64_t layer);
bool dray__parameter_tied(const dray__parameter *parameter, const dray_model_config *config);
bool dray__parameter_in_layer(const dray__parameter *parameter);
bool dray__parameter_of_expert(const dray__parameter *parameter);
/* Returns the dtype that it is stored in when the other parameters are in `dtype`. */
dray_dtype dray__parameter_dtype(const dray__parameter *parameter, dray_dtype dtype);
/* Returns whether the layer (MTP layers included) has experts. */
bool dray__layer_is_moe(const dray_model_config *config, int64_t layer);

enum {
    DRAY__PARAMETER_NAME = 128,
    DRAY__MOST_PARAMETERS = 64, /* rows of a table that engines hold */
    DRAY__MOST_ROWS = 512
};
/* Writes the pattern with the numbers filled in to `out` of DRAY__PARAMETER_NAME bytes. */
const char *dray__parameter_name(const char *pattern, int64_t layer, int64_t expert, char *out);

/* Returns true when the name follows the pattern. numbers gets the number at each '*', at most
 * two. */
bool dray__name_matches(const char *pattern, const char *name, int64_t *numbers);
/* Reads the number at the start of the text, at most 2^32. Returns the text after it, or NULL when
 * there is none. */
const char *dray__read_number(const char *text, int64_t *out);

/* Walks all parameters of a configuration in checkpoint order; the layers of multi-token prediction
 * come last, after the parameters that they share. Start with {config, family}. */
typedef struct dray__walk {
    const dray_model_config *config;
    const dray__family *family;
    uint32_t next;         /* row of the table */
    int64_t layer, expert; /* of the returned parameter; 0 outside layers and experts */
    uint32_t row;          /* of the returned parameter */
    int64_t next_layer, next_expert;
    bool beyond; /* in the layers of multi-token prediction */
    char name[DRAY__PARAMETER_NAME];
} dray__walk;

/* Returns the next parameter of the configuration; NULL at the end. */
const dray__parameter *dray__walk_next(dray__walk *walk);

/* Adds the tensor of the walk's current parameter, or the alias. *is_alias is true for an alias. */
int dray__walk_add(const dray__walk *walk, const dray__parameter *parameter, dray_dtype dtype,
                   dray_layout *layout, uint32_t *tensor, bool *is_alias, dray_error *error);

/* Checks and defaults shared by the whole-model builders. */
int dray__builder_defaults(const dray_model_config *config, dray_dtype *dtype,
                           dray_region_kind *kind, dray_error *error);
