/* Builds the engine's layout, unit by unit, and finds its parameters by name. */
#include "model/engine/engine.h"
#include "model/layout/layout.h"

#include "base/arena.h"
#include "base/error.h"

#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

/* ---- units ----------------------------------------------------------------------------------- */

static void engine_free(dray__engine *e)
{
    dray__map_free(&e->ignored);
    free(e->patterns);
    free(e->units);
}

static bool on_last_stage(const dray__engine *e)
{
    return e->spec.pp_rank + 1 == e->spec.pp;
}

static bool has_draft(const dray__engine *e)
{
    return e->config->mtp_layers > 0 && e->spec.draft != DRAY_DRAFT_NONE;
}

/* Returns whether this rank has the unit of the layer. The last stage has the embedding, too, for a
 * tied head and for a draft model. */
static bool is_here(const dray__engine *e, int64_t layer)
{
    if (layer == DRAY__BEFORE_LAYERS)
        return e->spec.pp_rank == 0 || (on_last_stage(e) && (e->config->tied || has_draft(e)));
    if (layer == DRAY__BEHIND_LAYERS)
        return on_last_stage(e);
    if (layer >= e->config->layers)
        return on_last_stage(e) && has_draft(e);
    return layer >= e->first_layer && layer < e->end_layer;
}

/* Sets the rows of a unit; `aliases` are those that are other names of parameters. */
static void rows_of(const dray__engine *e, int64_t layer, dray__pattern *pattern)
{
    const dray__parameter *table = e->family->parameters;
    bool behind = false;
    for (uint32_t i = 0; i < e->family->count; i++) {
        bool inside = dray__parameter_in_layer(&table[i]);
        behind |= inside;
        int64_t place = behind ? DRAY__BEHIND_LAYERS : DRAY__BEFORE_LAYERS;
        bool here =
            inside ? layer >= 0 && dray__parameter_in(&table[i], e->config, layer) : layer == place;
        if (!here || !dray__parameter_used(&table[i], e->config))
            continue;
        pattern->used |= UINT64_C(1) << i;
        bool copied = inside && e->spec.draft == DRAY_DRAFT_COPIES;
        if (dray__parameter_tied(&table[i], e->config) && !copied)
            pattern->aliases |= UINT64_C(1) << i;
    }
}

/* Finds the pattern of a unit, or makes a new one. */
static int pattern_of(dray__engine *e, int64_t layer, uint32_t *index, dray_error *error)
{
    dray__pattern wanted = {0};
    rows_of(e, layer, &wanted);
    int status = dray__engine_quantised(e, wanted.used, layer, &wanted.quantised, error);
    if (status)
        return status;
    for (*index = 0; *index < e->pattern_count; ++*index)
        if (e->patterns[*index].used == wanted.used &&
            e->patterns[*index].quantised == wanted.quantised)
            return DRAY_OK;
    if (!dray__append(&e->patterns, sizeof *e->patterns, e->pattern_count, &e->pattern_capacity))
        return dray__nomem(error);
    e->patterns[*index] = wanted;
    e->pattern_count++;
    return dray__engine_pattern(e, &e->patterns[*index], error);
}

static int make_unit(dray__engine *e, int64_t layer, dray_error *error)
{
    dray__unit *unit = &e->units[e->unit_count++];
    *unit = (dray__unit){.layer = layer, .pattern = UINT32_MAX, .offset = e->bytes};
    if (!is_here(e, layer))
        return DRAY_OK;
    int status = pattern_of(e, layer, &unit->pattern, error);
    if (!status && (__builtin_add_overflow(e->bytes, e->patterns[unit->pattern].bytes, &e->bytes) ||
                    e->bytes > INT64_MAX))
        status = dray__fail(error, DRAY_EINVALID, "engine: the model is too large");
    return status;
}

static int engine_init(dray__engine *e, const dray_model_config *config,
                       const dray_engine_spec *spec, dray_error *error)
{
    int status = dray__engine_read(e, config, spec, error);
    int64_t layers = status ? 0 : config->layers, all = status ? 0 : layers + config->mtp_layers;
    if (!status)
        e->units = calloc((size_t)all + 2, sizeof *e->units);
    if (!status && !e->units)
        status = dray__nomem(error);
    if (!status)
        status = make_unit(e, DRAY__BEFORE_LAYERS, error);
    for (int64_t layer = 0; layer < layers && !status; layer++)
        status = make_unit(e, layer, error);
    if (!status)
        status = make_unit(e, DRAY__BEHIND_LAYERS, error);
    for (int64_t layer = layers; layer < all && !status; layer++)
        status = make_unit(e, layer, error);
    if (status)
        engine_free(e);
    return status;
}

/* ---- the layout ------------------------------------------------------------------------------ */

/* A slot of this rank and its expert. */
typedef struct held_expert {
    int32_t expert;
    uint32_t slot;
} held_expert;

/* The layout while it is built. */
typedef struct building {
    const dray__engine *e;
    dray_layout *layout;
    const dray__unit *unit;
    const dray__pattern *pattern;
    held_expert *held; /* of the unit's layer, by expert */
    uint32_t *named;   /* the tensor of each quantised row of the unit, or of each expert */
    dray_error *error;
} building;

/* Places a block. The parameter's rows are contiguous or, when it is transposed, its columns. */
static void place_block(const dray__row_part *piece, bool transposed, dray_block *block)
{
    int64_t element = (int64_t)dray_dtype_size(piece->dtype);
    int64_t down = transposed ? element : piece->columns * element;
    memcpy(block->start, piece->start, sizeof piece->start);
    memcpy(block->extent, piece->extent, sizeof piece->extent);
    block->stride[0] = down;
    block->stride[1] = transposed ? piece->total * element : element;
    block->offset += (uint64_t)(piece->before * down);
}

static int add_block(const building *b, const dray__row_part *piece, bool transposed,
                     uint32_t tensor, uint32_t slot)
{
    uint64_t element = dray_dtype_size(piece->dtype);
    dray_block block = {.tensor = tensor, .offset = b->unit->offset + piece->offset};
    block.offset += (uint64_t)slot * (uint64_t)(piece->total * piece->columns) * element;
    if (piece->ndim > 0 && piece->extent[0] == 0)
        return DRAY_OK;
    place_block(piece, transposed, &block);
    return dray_layout_add_block(b->layout, &block, b->error);
}

/* Adds DeepGEMM's exponents: columns of four bytes, one block for each. */
static int add_fours(const building *b, const dray__row_part *piece, uint32_t tensor, uint32_t slot)
{
    int64_t column = 4 * piece->total;
    dray_block block = {.tensor = tensor, .stride = {4, 1}};
    int status = DRAY_OK;
    for (int64_t i = 0; i < piece->fours && !status; i++) {
        int64_t left = piece->extent[1] - 4 * i;
        block.offset = b->unit->offset + piece->offset +
                       (uint64_t)((slot * piece->fours + i) * column + 4 * piece->before);
        block.start[0] = piece->start[0];
        block.start[1] = piece->start[1] + 4 * i;
        block.extent[0] = piece->extent[0];
        block.extent[1] = left < 4 ? left : 4;
        status = dray_layout_add_block(b->layout, &block, b->error);
    }
    return status;
}

/* The tensors of a row: the one with its name and shape, and its parts. */
typedef struct row_tensors {
    uint32_t named, parts[DRAY__QUANT_PARTS];
} row_tensors;

static int add_slot(const building *b, const dray__row *row, const row_tensors *tensors,
                    uint32_t slot)
{
    int status = DRAY_OK;
    for (int part = 0; part < DRAY__QUANT_PARTS && !status; part++) {
        const dray__row_part *piece = &row->parts[part];
        if (part != DRAY__PART_VALUES && !(row->quantised && dray__engine_suffix(b->e, part)))
            continue;
        status = piece->fours ? add_fours(b, piece, tensors->parts[part], slot)
                              : add_block(b, piece, row->transposed, tensors->parts[part], slot);
    }
    return status;
}

/* Returns the first of the rows that are fused with row i. */
static uint32_t first_fused(const dray__engine *e, uint64_t used, uint32_t i)
{
    const dray__parameter *table = e->family->parameters;
    for (uint32_t j = 0; j < i; j++)
        if ((used >> j & 1) &&
            strcmp(dray__engine_name(&table[i]), dray__engine_name(&table[j])) == 0)
            return j;
    return i;
}

/* Adds the tensors of row i. */
static int add_tensors(const building *b, uint32_t i, const char *name, row_tensors *tensors)
{
    const dray__row *row = &b->pattern->rows[i];
    const dray__row_part *w = &row->parts[DRAY__PART_VALUES];
    const dray_engine_quant *q = &b->e->quant;
    bool packed = row->quantised && dray__engine_suffix(b->e, DRAY__PART_VALUES)[0];
    int status = dray_layout_add_tensor(b->layout, name, packed ? b->e->dtype : w->dtype, w->ndim,
                                        packed ? row->shape : w->shape, &tensors->named, b->error);
    tensors->parts[DRAY__PART_VALUES] = tensors->named;
    for (int part = packed ? 0 : 1; part < DRAY__QUANT_PARTS && row->quantised && !status; part++) {
        const dray__row_part *p = &row->parts[part];
        const char *suffix = dray__engine_suffix(b->e, part);
        char own[DRAY__PARAMETER_NAME + 16];
        if (!suffix)
            continue;
        snprintf(own, sizeof own, "%s%s", name, suffix);
        status = dray_layout_add_tensor(b->layout, own, p->dtype, p->ndim, p->shape,
                                        &tensors->parts[part], b->error);
    }
    if (status || !row->quantised)
        return status;
    b->named[i] = tensors->named;
    dray_quant quant = {.kind = q->kind,
                        .scale_format = q->scale_format,
                        .values = tensors->parts[DRAY__PART_VALUES],
                        .scales = tensors->parts[DRAY__PART_SCALES],
                        .second = tensors->parts[DRAY__PART_SECOND],
                        .shared = b->named[first_fused(b->e, b->pattern->used, i)],
                        .block = {q->block[0], q->block[1]}};
    return dray_layout_set_quant(b->layout, tensors->named, &quant, b->error);
}

/* Adds a row that this rank has one part of, as it has of all rows but experts. */
static int add_row(const building *b, uint32_t i)
{
    const dray__parameter *p = &b->e->family->parameters[i];
    const dray__row *row = &b->pattern->rows[i];
    char name[DRAY__PARAMETER_NAME];
    row_tensors tensors = {0};
    dray__parameter_name(p->name, b->unit->layer, 0, name);
    if (dray__parameter_tied(p, b->e->config)) {
        uint32_t *named = &tensors.parts[DRAY__PART_VALUES];
        int status = dray_layout_find(b->layout, p->tied, named, b->error);
        if (!status)
            status = dray_layout_add_alias(b->layout, name, *named, NULL, b->error);
        bool copied = !(b->pattern->aliases >> i & 1);
        const dray_tensor_info *info = dray_layout_tensor(b->layout, *named);
        if (!status && info->alias_of >= 0)
            *named = (uint32_t)info->alias_of;
        return status || !copied ? status : add_slot(b, row, &tensors, 0);
    }
    bool fused = row->part == DRAY__SHARED && row->parts[DRAY__PART_VALUES].slots;
    int status = add_tensors(b, i, name, &tensors);
    return status ? status : add_slot(b, row, &tensors, fused ? (uint32_t)b->e->local_slots : 0);
}

static int by_expert(const void *a, const void *b)
{
    const held_expert *x = a, *y = b;
    if (x->expert != y->expert)
        return x->expert < y->expert ? -1 : 1;
    return x->slot < y->slot ? -1 : 1;
}

/* Adds the experts of this rank, each with all its slots, for rows [first, end). */
static int add_experts(const building *b, uint32_t first, uint32_t end)
{
    const dray__engine *e = b->e;
    uint32_t count = (uint32_t)e->local_slots, next;
    char name[DRAY__PARAMETER_NAME];
    for (uint32_t slot = 0; slot < count; slot++)
        b->held[slot] =
            (held_expert){dray__engine_expert(e, b->unit->layer, e->first_slot + slot), slot};
    qsort(b->held, count, sizeof *b->held, by_expert);
    for (uint32_t h = 0; h < count; h = next) {
        for (next = h; next < count && b->held[next].expert == b->held[h].expert;)
            next++;
        for (uint32_t i = first; i < end; i++) {
            const dray__row *row = &b->pattern->rows[i];
            row_tensors tensors = {0};
            dray__parameter_name(e->family->parameters[i].name, b->unit->layer, b->held[h].expert,
                                 name);
            int status = add_tensors(b, i, name, &tensors);
            for (uint32_t k = h; k < next && !status; k++)
                status = add_slot(b, row, &tensors, b->held[k].slot);
            if (status)
                return status;
        }
    }
    return DRAY_OK;
}

static int add_unit(const building *b)
{
    const dray__parameter *table = b->e->family->parameters;
    uint32_t count = b->e->family->count;
    int status = DRAY_OK;
    for (uint32_t i = 0; i < count && !status; i++) {
        uint32_t end = i;
        while (end < count && (b->pattern->used >> end & 1) &&
               dray__parameter_of_expert(&table[end]))
            end++;
        if (end > i) {
            status = add_experts(b, i, end);
            i = end - 1;
        } else if (b->pattern->used >> i & 1) {
            status = add_row(b, i);
        }
    }
    return status;
}

static int add_all(const dray__engine *e, dray_layout *layout, dray_error *error)
{
    char name[64] = "weights";
    dray_region_info region = {.kind = (int32_t)e->kind, .bytes = e->bytes, .name = name};
    if (e->spec.experts)
        snprintf(name, sizeof name, "weights, expert map %" PRIu64, e->map.version);
    building b = {.e = e, .layout = layout, .error = error};
    uint32_t named[DRAY__MOST_PARAMETERS] = {0};
    b.named = named;
    b.held = calloc((size_t)e->local_slots + 1, sizeof *b.held);
    int status = b.held ? DRAY_OK : dray__nomem(error);
    if (!status)
        status = dray_layout_add_region(layout, &region, NULL, error);
    for (uint32_t i = 0; i < e->unit_count && !status; i++) {
        b.unit = &e->units[i];
        if (b.unit->pattern == UINT32_MAX)
            continue;
        b.pattern = &e->patterns[b.unit->pattern];
        status = add_unit(&b);
    }
    free(b.held);
    return status;
}

int dray_layout_engine(const dray_model_config *config, const dray_engine_spec *spec,
                       dray_layout **out, dray_error *error)
{
    dray__engine e;
    dray_layout *layout = NULL;
    int status = engine_init(&e, config, spec, error);
    if (status)
        return status;
    status = dray_layout_new(&layout, error);
    if (!status)
        status = add_all(&e, layout, error);
    engine_free(&e);
    return dray__layout_give(layout, status, out);
}

/* ---- parameters ------------------------------------------------------------------------------ */

/* Returns true when `name` follows the pattern. *layer is the number at its star; *tail is the part
 * after the pattern. */
static bool matches(const char *pattern, const char *name, int64_t layers, int64_t *layer,
                    const char **tail)
{
    const char *star = strchr(pattern, '*');
    size_t head = star ? (size_t)(star - pattern) : strlen(pattern);
    if (strncmp(pattern, name, head) != 0)
        return false;
    *tail = name + head;
    if (!star)
        return true;
    const char *digits = *tail, *at = digits;
    for (*layer = 0; *at >= '0' && *at <= '9' && *layer < layers; at++)
        *layer = *layer * 10 + (*at - '0');
    size_t rest = strlen(star) - 1; /* length of the pattern after the star */
    if (at == digits || (digits[0] == '0' && at > digits + 1) || *layer >= layers ||
        strncmp(star + 1, at, rest) != 0)
        return false;
    *tail = at + rest;
    return true;
}

/* Gets the shape in memory: [slots,] rows, columns; for DeepGEMM's exponents columns of four, rows,
 * 4. */
static uint32_t shape_of(const dray__row_part *piece, bool transposed, int64_t *shape)
{
    uint32_t ndim = 0;
    if (piece->slots)
        shape[ndim++] = piece->slots;
    if (piece->slots && piece->ndim == 0 && piece->total == 1)
        return ndim; /* one scale for each slot */
    if (piece->fours) {
        memcpy(shape + ndim, (int64_t[3]){piece->fours, piece->total, 4}, 3 * sizeof *shape);
        return ndim + 3;
    }
    transposed = transposed && piece->ndim == 2;
    shape[ndim] = transposed ? piece->columns : piece->total;
    if (piece->ndim < 2)
        return ndim + 1;
    shape[ndim + 1] = transposed ? piece->total : piece->columns;
    return ndim + 2;
}

static const dray__unit *unit_of(const dray__engine *e, int64_t layer)
{
    for (uint32_t i = 0; i < e->unit_count; i++)
        if (e->units[i].layer == layer)
            return &e->units[i];
    return NULL;
}

/* Returns the part with this suffix; NULL when the row has none. */
static const dray__row_part *find_part(const dray__engine *e, const dray__row *row,
                                       const char *tail)
{
    for (int part = 0; part < DRAY__QUANT_PARTS; part++) {
        const char *suffix = row->quantised ? dray__engine_suffix(e, part) : part ? NULL : "";
        if (suffix && strcmp(suffix, tail) == 0)
            return &row->parts[part];
    }
    return NULL;
}

/* Finds the unit, row and piece of `name`. Returns false when this rank does not have it. */
static bool find_parameter(const dray__engine *e, const char *name, const dray__unit **unit,
                           const dray__row **row, const dray__row_part **piece)
{
    const dray__parameter *table = e->family->parameters;
    int64_t layers = e->config->layers + e->config->mtp_layers, layer = 0;
    const char *tail;
    bool behind = false;
    for (uint32_t i = 0; i < e->family->count; i++) {
        bool inside = dray__parameter_in_layer(&table[i]);
        behind |= inside;
        if (!matches(dray__engine_name(&table[i]), name, layers, &layer, &tail))
            continue;
        *unit = unit_of(e, inside ? layer : behind ? DRAY__BEHIND_LAYERS : DRAY__BEFORE_LAYERS);
        if (!*unit || (*unit)->pattern == UINT32_MAX)
            continue;
        const dray__pattern *pattern = &e->patterns[(*unit)->pattern];
        *row = &pattern->rows[i];
        *piece = find_part(e, *row, tail);
        bool in_slots = (*row)->part == DRAY__SHARED && *piece && (*piece)->slots;
        if (!(pattern->used >> i & 1) || !*piece || in_slots)
            continue;
        if (!(pattern->aliases >> i & 1))
            return true;
        return find_parameter(e, table[i].tied, unit, row, piece);
    }
    return false;
}

int dray_engine_parameter(const dray_model_config *config, const dray_engine_spec *spec,
                          const char *name, uint64_t *offset, uint32_t *ndim, int64_t *shape,
                          dray_error *error)
{
    dray__engine e;
    const dray__unit *unit;
    const dray__row *row;
    const dray__row_part *piece;
    int status = engine_init(&e, config, spec, error);
    if (status)
        return status;
    if (find_parameter(&e, name, &unit, &row, &piece)) {
        *offset = unit->offset + piece->offset;
        *ndim = shape_of(piece, row->transposed, shape);
    } else {
        status = dray__fail(error, DRAY_ENOENT,
                            "%s of %" PRId64 " layers has no parameter %.200s on tp rank %u of "
                            "stage %u",
                            config->family, config->layers, name, e.spec.tp_rank, e.spec.pp_rank);
    }
    engine_free(&e);
    return status;
}
