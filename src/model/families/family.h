/* src/model/families/: the parameters of a model of each family. NAME.json has all that dray knows
 * of the family NAME: how config.json gives its sizes, and a table of its parameters, with their
 * shapes and how engines fuse and cut them; parts.json has parts that tables share. find.c finds
 * files, the built-in ones and those of the folder that DRAY_FAMILIES names; read.c reads them;
 * family.c walks over a table; config.c has the public models' configurations and reads
 * config.json. All builders of layouts, for trainers and for engines, are loops over these tables.
 * docs/families.md describes the file. */
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
    DRAY__CUT_KV_HEADS,  /* rows, by KV heads; replicated where tp > kv_heads */
    DRAY__CUT_HEADS_ROW, /* columns, by whole attention heads */
    DRAY__CUT_VOCAB      /* rows, after padding the vocabulary */
} dray__cut;

/* Of a row inside layers: which layers have it. */
typedef enum dray__layers {
    DRAY__LAYERS_ALL = 0,
    DRAY__LAYERS_DENSE, /* those with a dense MLP */
    DRAY__LAYERS_MOE,   /* those with experts */
    DRAY__LAYERS_MTP,   /* those of multi-token prediction */
    DRAY__LAYERS_KIND,  /* those of kind `kind` of the family */
    DRAY__LAYERS_NOT_KIND
} dray__layers;

/* Arithmetic on the configuration's values, such as "heads * (qk_nope_head_dim + v_head_dim)": its
 * steps on a stack. */
enum { DRAY__MOST_STEPS = 16 };
typedef struct dray__expression {
    const char *text;
    uint32_t count;
    struct {
        char what; /* 'n': the number, 'v': the value of that number, or an operator */
        int64_t value;
    } steps[DRAY__MOST_STEPS];
} dray__expression;

typedef struct dray__parameter {
    const char *name;  /* checkpoint name; '*' stands for the layer's, a second for the expert's
                          number */
    const char *fused; /* the engine's parameter; NULL for the same name */
    const char *tied;  /* the parameter it is another name of: when the configuration ties them;
                          of MTP rows always */
    const dray__expression *when; /* the configuration has it when this is not 0 (`unless`: when it
                                   * is); NULL for always */
    bool unless;
    dray__layers layers;
    uint32_t kind;
    const dray__expression *each; /* how many "layers" there are; NULL for those of the model */
    dray__cut cut;
    uint32_t ndim;
    const dray__expression *shape[DRAY_MAX_DIMS];
    dray_dtype dtype; /* the only dtype it is ever stored in; NONE for any */
} dray__parameter;

/* A parameter of transformers' module where it is not the checkpoint's: a tensor under another
 * name, or, of patterns with the expert's number, all experts' tensors in one [experts, rows of
 * them one below the other, columns]. */
typedef struct dray__module {
    const char *name; /* '*' stands for the layer's number */
    const char *tensors[2];
} dray__module;

/* How config.json gives a value. */
typedef struct dray__config_rule {
    uint32_t value;      /* which */
    const char *keys[3]; /* the first that is there counts; none: the value is `absent` */
    bool is_flag;        /* true or false; else a number */
    bool is_list;        /* the length of a list */
    const dray__expression *absent, *null; /* absent: NULL when the key must be there. null: NULL
                                            * when it is as where the key is absent */
} dray__config_rule;

/* The layers of a kind, by all of the keys that define it. */
typedef struct dray__kind {
    const char *name;
    const char *numbers, *others; /* a list of their numbers; of those of all other layers */
    const char *each, *is; /* a list of one word a layer, and the word; it counts before `every` */
    const char *signs, *sign; /* a text of one sign a layer, or a list of numbers, and the one */
    const char *every;        /* N: all but layers N - 1, 2N - 1, ... */
    const char *first;        /* N: layers 0 to N - 1 */
    int64_t absent;           /* N where neither key is there */
} dray__kind;

enum { DRAY__DENSE_KIND = DRAY_MODEL_KINDS, DRAY__MOST_KINDS };

typedef struct dray__family {
    const char *name, *path; /* path: of its file, for messages */
    /* In checkpoint order. Those of layers are neighbours, and so are those of experts among them.
     */
    const dray__parameter *parameters;
    uint32_t count;
    const dray__module *modules;    /* the last has no name */
    const dray__config_rule *rules; /* each behind the rules that it needs */
    uint32_t rule_count;
    dray__kind kinds[DRAY__MOST_KINDS]; /* no name: there is none; the last: of dense layers */
    const char *layer;     /* the beginning of layers' names, such as "model.layers.*." */
    const char *within;    /* the object of config.json that is looked into first; NULL when there
                            * is none */
    const json_t *refused; /* keys that must not be set */
    double default_theta;
    bool moe, latent, mtp; /* has experts; latent attention; may have multi-token prediction */
    bool engine, megatron; /* dray knows how engines, how Megatron-Core hold it */
} dray__family;

/* The family of this model_type: from DRAY_FAMILIES' folder, or a built-in one. It is valid until
 * the process ends. Returns 0, DRAY_EUNSUPPORTED when there is none (the message has the nearest),
 * or DRAY_EFORMAT when a file is wrong. */
int dray__family_find(const char *name, const dray__family **out, dray_error *error);

/* The value that a rule gives: a field of the configuration, or one of the family's own. */
/* Its name, for those that files may speak of: NULL past the last field. */
const char *dray__value_name(uint32_t value);
void dray__value_set(dray_model_config *config, uint32_t value, int64_t number);
/* Returns 0, or DRAY_EINVALID when it overflows, or divides with a rest. */
int dray__evaluate(const dray__expression *expression, const dray_model_config *config,
                   int64_t *out, dray_error *error);

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
/* How many layers a row inside layers has, without those of multi-token prediction. */
int64_t dray__parameter_layers(const dray__parameter *parameter, const dray_model_config *config);
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

enum {
    DRAY__PARAMETER_NAME = 128,
    DRAY__MOST_PARAMETERS = 64, /* rows of a table that engines hold */
    DRAY__MOST_ROWS = 512
};
/* The pattern with the numbers put in, in `out` of DRAY__PARAMETER_NAME bytes. */
const char *dray__parameter_name(const char *pattern, int64_t layer, int64_t expert, char *out);

/* Returns true when the name follows the pattern. numbers gets the number in place of each '*', at
 * most two. */
bool dray__name_matches(const char *pattern, const char *name, int64_t *numbers);
/* Reads the number at the start of the text, of at most 2^32. Returns the text behind it, or NULL
 * when there is none. */
const char *dray__read_number(const char *text, int64_t *out);

/* Walks all parameters of a configuration in checkpoint order; the layers of multi-token prediction
 * come last, behind the parameters that they share. Start with {config, family}. */
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

/* The next parameter that the configuration has; NULL at the end. */
const dray__parameter *dray__walk_next(dray__walk *walk);

/* Adds the tensor of the walk's current parameter, or the alias. *is_alias is true for an alias. */
int dray__walk_add(const dray__walk *walk, const dray__parameter *parameter, dray_dtype dtype,
                   dray_layout *layout, uint32_t *tensor, bool *is_alias, dray_error *error);

/* Checks and defaults shared by the whole-model builders. */
int dray__builder_defaults(const dray_model_config *config, dray_dtype *dtype,
                           dray_region_kind *kind, dray_error *error);
