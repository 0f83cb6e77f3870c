/* src/model/trainers/: the layouts of trainers. Each file is one way in which a training framework
 * holds parameters: whole tensors and FSDP2 (builders.c), DTensor placements, FSDP1's flat
 * parameters, transformers' modules, and Megatron-Core with its tensor, pipeline and expert
 * parallelism. They say which rectangle of which tensor of the checkpoint a rank holds, and where
 * it is. */

/* Megatron-Core's parameters as a table over Hugging Face names, shared by the builder of whole
 * models and the function that adds one parameter by name. */
#pragma once

#include "model/families/family.h"

/* How a parameter is made of its tensors, and the part of it that a rank has. */
typedef enum dray__megatron_cut {
    DRAY__MEGATRON_WHOLE = 0, /* the same on all ranks */
    DRAY__MEGATRON_COLUMN,    /* equal parts of the rows */
    DRAY__MEGATRON_DOWN,      /* whole, or equal parts of the rows; the local shape decides */
    DRAY__MEGATRON_HEADS,     /* rows, by attention heads */
    DRAY__MEGATRON_ROW,       /* equal parts of the columns */
    DRAY__MEGATRON_HEADS_ROW, /* columns, by attention heads */
    DRAY__MEGATRON_VOCAB,     /* rows, after padding the vocabulary */
    DRAY__MEGATRON_GATED,     /* [gate; up] of the rank's part of each */
    DRAY__MEGATRON_QKV,       /* rows of [q of a group; k; v] group after group, in equal parts */
    DRAY__MEGATRON_PACKED_IN, /* all local experts' [gate; up] transposed, seen as a matrix */
    DRAY__MEGATRON_PACKED_OUT /* all local experts' down transposed, one below the other */
} dray__megatron_cut;

typedef enum dray__megatron_scope {
    DRAY__MEGATRON_FIRST = 0, /* of the model's first chunk */
    DRAY__MEGATRON_LAST,      /* of its last chunk */
    DRAY__MEGATRON_LAYER,     /* of a layer, also of one inside multi-token prediction */
    DRAY__MEGATRON_MTP        /* of multi-token prediction, around its layer */
} dray__megatron_scope;

typedef enum dray__megatron_form {
    DRAY__MEGATRON_ALWAYS = 0,
    DRAY__MEGATRON_BY_NAME, /* another name of a parameter: accepted by name, not built for whole
                               models */
    DRAY__MEGATRON_IF_GROUPED,
    DRAY__MEGATRON_IF_PACKED,
    DRAY__MEGATRON_IF_SEQUENTIAL
} dray__megatron_form;

enum { DRAY__MEGATRON_TENSORS = 3 };

typedef struct dray__megatron_row {
    const char *name; /* within its scope; '*' stands for the local expert's number */
    dray__megatron_cut cut;
    dray__megatron_scope scope;
    dray__megatron_form form;
    dray__layers layers; /* which layers have it */
    enum { DRAY__ANY_ATTENTION, DRAY__GROUPED_QUERY, DRAY__LATENT } attention;
    const char *tensors[DRAY__MEGATRON_TENSORS]; /* checkpoint names; in layers without
                                                    "model.layers.*." */
} dray__megatron_row;

extern const dray__megatron_row dray__megatron_rows[];
extern const uint32_t dray__megatron_count;

typedef struct dray__megatron {
    const dray_model_config *config;
    const dray__family *family;
    dray_megatron_spec spec; /* sizes that were 0 have their defaults */
    dray_dtype dtype;
    dray_region_kind kind;
} dray__megatron;

/* A row of the table for a configuration. */
typedef struct dray__megatron_parameter {
    const dray__megatron_row *row;
    const dray__parameter *tensors[DRAY__MEGATRON_TENSORS];
    uint32_t count; /* of tensors */
    uint32_t ndim;
    int64_t shape[2]; /* local */
    bool cut_rows;    /* for DOWN: whether it is cut */
} dray__megatron_parameter;

/* Where a parameter is. Layer and expert are numbered as in the checkpoint. */
typedef struct dray__megatron_site {
    int64_t layer, expert; /* for packed experts, the first one */
    uint32_t region;
    uint64_t offset;
    dray_dtype dtype;
} dray__megatron_site;

int dray__megatron_init(dray__megatron *m, const dray_model_config *config,
                        const dray_megatron_spec *spec, dray_error *error);
/* Finds the row's tensors. Returns false when the configuration has no such parameter. */
bool dray__megatron_resolve(const dray__megatron *m, const dray__megatron_row *row,
                            dray__megatron_parameter *out);
/* Returns whether this layer of the checkpoint has the parameter. */
bool dray__megatron_in(const dray__megatron *m, const dray__megatron_row *row, int64_t layer);
/* Computes the local shape, and checks that sizes are divisible. */
int dray__megatron_shape(const dray__megatron *m, dray__megatron_parameter *p, dray_error *error);
/* Adds tensors, aliases and blocks. */
int dray__megatron_add(const dray__megatron *m, const dray__megatron_parameter *p,
                       const dray__megatron_site *site, dray_layout *layout, dray_error *error);

int64_t dray__megatron_local_experts(const dray__megatron *m);
/* Returns the number of layers in a chunk of this rank's stage; *first is the number of the
 * first. */
int64_t dray__megatron_layers(const dray__megatron *m, uint32_t vp_stage, int64_t *first);
