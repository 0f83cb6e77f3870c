/* src/model/engine/: the layouts of inference engines, as vLLM and SGLang hold a model: parameters
 * fused, cut over tensor, pipeline and expert parallel ranks, and quantised. engine_spec.c reads
 * the engine's specification, engine_pattern.c places the parameters of one layer, engine.c repeats
 * that for all layers, and engine_quant.c reads quantisation's configuration. */

/* The declarations that the files of the engine builder share. A layout is made of units: the
 * parameters before the layers, each layer (those of multi-token prediction included), and the
 * parameters after the layers. Units with the same rows of the family's table, quantised in the
 * same way, share one pattern. The arithmetic is done once for each pattern; a unit is a pattern
 * and an offset.
 *   engine.c the public functions; assemble the units
 *   engine_spec.c     reads the spec: groups of ranks, stages, slots
 *   engine_pattern.c  cuts rows, fuses them into parameters, places these
 *   engine_quant.c    quantization_config: which modules are quantised */
#pragma once

#include "model/families/family.h"
#include "model/layout/layout.h"

#include "base/hash.h"

/* Classes of rows. The first ones are in the order of the bits DRAY_PART_... */
typedef enum dray__part {
    DRAY__ATTENTION,
    DRAY__DENSE,
    DRAY__SHARED,
    DRAY__EXPERTS,
    DRAY__ROUTER,
    DRAY__EMBED,
    DRAY__HEAD,
    DRAY__OTHER,
    DRAY__PARTS
} dray__part;

/* The ranks that a class of parameters is cut over. */
typedef struct dray__cut_group {
    uint32_t size, rank;
} dray__cut_group;

/* One row's share of a parameter, which holds plain weights or one part of a quantised weight
 * (layout.h). */
typedef struct dray__row_part {
    uint32_t ndim; /* of the checkpoint tensor: 0 to 2 */
    dray_dtype dtype;
    int64_t shape[2]; /* of the checkpoint tensor */
    /* This rank's part of it; extent[0] is 0 when the rank has only padding. */
    int64_t start[2], extent[2];
    int64_t rows, columns; /* the size in memory, padding included; vectors have one column */
    /* The number of the parameter's rows before this part, and of all its rows. */
    int64_t before, total;
    int64_t slots;   /* the number of stacked experts; 0 when not stacked */
    uint64_t offset; /* the offset of the parameter from the unit's start */
    int64_t fours;   /* number of columns of four, for DeepGEMM's exponents; else 0 */
} dray__row_part;

typedef struct dray__row {
    dray__part part;
    bool transposed;
    bool quantised;
    int64_t shape[2];                        /* of the checkpoint tensor, unpacked */
    dray__row_part parts[DRAY__QUANT_PARTS]; /* only `values` is used when it is not quantised */
} dray__row;

/* Bit i of a mask is row i of the family's table. */
typedef struct dray__pattern {
    uint64_t used, quantised, aliases;
    dray__row rows[DRAY__MOST_PARAMETERS];
    uint64_t bytes;
} dray__pattern;

typedef struct dray__unit {
    int64_t layer;    /* -1 before the layers, -2 after them */
    uint32_t pattern; /* UINT32_MAX when it is not on this rank */
    uint64_t offset;
} dray__unit;

enum { DRAY__BEFORE_LAYERS = -1, DRAY__BEHIND_LAYERS = -2 };

typedef struct dray__engine {
    const dray_model_config *config;
    const dray__family *family;
    dray_engine_spec spec;
    dray_engine_quant quant; /* kind NONE: not quantised */
    dray_expert_map map;     /* has no rows when none was given */
    dray_dtype dtype;
    dray_region_kind kind;
    dray__cut_group groups[DRAY__PARTS];
    uint32_t expert_group;          /* of `ep` */
    int64_t first_layer, end_layer; /* of this stage */
    int64_t all_slots;              /* the slots of all groups */
    /* The slots of this rank's group; shared experts are not counted. */
    int64_t first_slot, local_slots;
    dray__map ignored; /* names of modules, without the prefix "model." */
    dray__pattern *patterns;
    uint32_t pattern_count;
    uint64_t pattern_capacity;
    dray__unit *units;
    uint32_t unit_count;
    uint64_t bytes;
} dray__engine;

/* engine_spec.c. Reads and checks everything that does not need the patterns. */
int dray__engine_read(dray__engine *e, const dray_model_config *config,
                      const dray_engine_spec *spec, dray_error *error);
dray__part dray__engine_part(const dray__parameter *parameter);
/* Writes the ranks over which a class is cut into `out` of 48 bytes: "tp 8", or "4 (tp 8 / 2)". */
const char *dray__engine_group_text(const dray__engine *e, dray__part part, char *out);
/* Returns the expert in a slot, counted over all groups. */
int32_t dray__engine_expert(const dray__engine *e, int64_t layer, int64_t slot);
/* Returns the engine's name of a row's parameter. */
const char *dray__engine_name(const dray__parameter *parameter);

/* engine_quant.c */
int dray__engine_quant_read(dray__engine *e, dray_error *error);
/* Gets the rows of a unit that are quantised, as a mask. */
int dray__engine_quantised(const dray__engine *e, uint64_t used, int64_t layer, uint64_t *mask,
                           dray_error *error);
/* Returns the suffix of a weight's name that names one of its parts; NULL when it has no such part,
 * "" when the part has the weight's name. */
const char *dray__engine_suffix(const dray__engine *e, int part);
/* Makes the parts of a quantised row from this rank's part of the weight. */
int dray__engine_parts(const dray__engine *e, const dray__parameter *parameter,
                       const dray__row_part *weight, dray__row *row, dray_error *error);

/* engine_pattern.c. Fills rows, parameters and bytes of a pattern whose masks are set. */
int dray__engine_pattern(const dray__engine *e, dray__pattern *pattern, dray_error *error);
