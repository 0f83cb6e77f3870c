/* The engine's layout: fused parameters under tensor parallelism. All layers are alike, so the
 * arithmetic is done once per row of the family's table; a layer is an offset. The cuts are those
 * of vLLM's model_executor/layers/linear.py and vocab_parallel_embedding.py (SGLang's are the
 * same). */
#include "model/family.h"
#include "model/layout.h"

#include "base/error.h"
#include "base/options.h"

#include <inttypes.h>
#include <stdlib.h>
#include <string.h>

enum { BEFORE, LAYER, AFTER, SECTIONS };

/* One row of the family's table on this rank. */
typedef struct placed {
    bool used, tied;
    uint32_t ndim, section;
    int64_t start[2], extent[2]; /* of the checkpoint tensor; extent[0] may be 0 (only padding) */
    int64_t rows;                /* local rows, padding included */
    int64_t columns;             /* local columns; 1 for vectors */
    int64_t fused_rows;          /* of the whole parameter */
    uint64_t offset;             /* from the section's start */
    uint64_t parameter;          /* offset of the fused parameter */
} placed;

typedef struct engine {
    const dray_model_config *config;
    const dray__family *family;
    dray_engine_spec spec;
    dray_dtype dtype;
    dray_region_kind kind;
    placed rows[DRAY__MOST_PARAMETERS];
    uint64_t bytes[SECTIONS];
} engine;

static const char *engine_name(const dray__parameter *p)
{
    return p->fused ? p->fused : p->name;
}

static int indivisible(const dray__parameter *p, const char *what, int64_t value, uint32_t tp,
                       dray_error *error)
{
    return dray__fail(error, DRAY_EINVALID, "%s: %s %" PRId64 " is not divisible by tp %u",
                      engine_name(p), what, value, tp);
}

/* KV heads: tp / kv_heads neighbouring ranks share one where there are fewer heads than ranks. */
static int cut_kv(const engine *e, const dray__parameter *p, placed *row, dray_error *error)
{
    int64_t heads = e->config->kv_heads, dim = e->config->head_dim, tp = e->spec.tp;
    if (heads >= tp && heads % tp)
        return indivisible(p, "num_key_value_heads", heads, e->spec.tp, error);
    if (heads < tp && tp % heads)
        return dray__fail(error, DRAY_EINVALID,
                          "%s: tp %u is not a multiple of num_key_value_heads %" PRId64,
                          engine_name(p), e->spec.tp, heads);
    int64_t each = heads >= tp ? heads / tp : 1, share = heads >= tp ? 1 : tp / heads;
    row->extent[0] = row->rows = each * dim;
    row->start[0] = e->spec.tp_rank / share * each * dim;
    return DRAY_OK;
}

static int cut_vocab(const engine *e, const dray__parameter *p, placed *row, dray_error *error)
{
    int64_t multiple = e->spec.vocab_multiple, size = e->config->vocab_size, tp = e->spec.tp;
    int64_t padded = (size + multiple - 1) / multiple * multiple;
    if (padded % tp)
        return dray__fail(error, DRAY_EINVALID,
                          "%s: vocabulary %" PRId64 " padded to %" PRId64 " (a multiple of %" PRId64
                          ") is not divisible by tp %u",
                          engine_name(p), size, padded, multiple, e->spec.tp);
    row->rows = padded / tp;
    row->start[0] = row->rows * e->spec.tp_rank;
    int64_t left = size - row->start[0];
    row->extent[0] = left < 0 ? 0 : left < row->rows ? left : row->rows;
    return DRAY_OK;
}

/* This rank's equal part of dimension d; `count` is what must be divisible (heads, or elements). */
static int cut_even(const engine *e, const dray__parameter *p, uint32_t d, const char *what,
                    int64_t count, placed *row, dray_error *error)
{
    if (count % e->spec.tp)
        return indivisible(p, what, count, e->spec.tp, error);
    row->extent[d] /= e->spec.tp;
    row->start[d] = row->extent[d] * e->spec.tp_rank;
    row->rows = row->extent[0];
    return DRAY_OK;
}

static int cut_row(const engine *e, const dray__parameter *p, placed *row, dray_error *error)
{
    int64_t inner = e->config->intermediate_size;
    row->ndim = dray__parameter_shape(p, e->config, row->extent);
    row->rows = row->extent[0];
    switch (p->cut) {
    case DRAY__CUT_NONE:
        return DRAY_OK;
    case DRAY__CUT_COLUMN:
        return cut_even(e, p, 0, "intermediate_size", inner, row, error);
    case DRAY__CUT_ROW:
        return cut_even(e, p, 1, "intermediate_size", inner, row, error);
    case DRAY__CUT_HEADS:
        return cut_even(e, p, 0, "num_attention_heads", e->config->heads, row, error);
    case DRAY__CUT_HEADS_ROW:
        return cut_even(e, p, 1, "num_attention_heads", e->config->heads, row, error);
    case DRAY__CUT_KV_HEADS:
        return cut_kv(e, p, row, error);
    case DRAY__CUT_VOCAB:
        return cut_vocab(e, p, row, error);
    }
    return dray__fail(error, DRAY_EINTERNAL, "%s: unknown cut", p->name);
}

/* Gives row i its place: at the end of its section if it begins a parameter, else behind the rows
 * that are fused in front of it. */
static int place_row(engine *e, uint32_t i, dray_error *error)
{
    const dray__parameter *table = e->family->parameters;
    placed *row = &e->rows[i];
    uint64_t *end = &e->bytes[row->section], bytes;
    uint64_t row_bytes = (uint64_t)row->columns * dray_dtype_size(e->dtype);
    int64_t before = 0, total = 0;
    const placed *first = NULL;
    for (uint32_t j = 0; j < e->family->count; j++) {
        const placed *other = &e->rows[j];
        if (!other->used || other->tied || strcmp(engine_name(&table[j]), engine_name(&table[i])))
            continue;
        first = first ? first : other;
        before += j < i ? other->rows : 0;
        total += other->rows;
    }
    row->fused_rows = total;
    row->parameter = first == row ? *end : first->parameter;
    row->offset = row->parameter + (uint64_t)before * row_bytes;
    if (first == row && (__builtin_mul_overflow((uint64_t)total, row_bytes, &bytes) ||
                         __builtin_add_overflow(*end, bytes, end) || !dray__align(end)))
        return dray__fail(error, DRAY_EINVALID, "%s: the model is too large", engine_name(table));
    return DRAY_OK;
}

static int place_rows(engine *e, dray_error *error)
{
    const dray__parameter *table = e->family->parameters;
    uint32_t section = BEFORE;
    for (uint32_t i = 0; i < e->family->count; i++) {
        placed *row = &e->rows[i];
        bool inside = dray__parameter_in_layer(&table[i]);
        section = inside ? LAYER : section == BEFORE ? BEFORE : AFTER;
        *row = (placed){.used = dray__parameter_used(&table[i], e->config),
                        .tied = dray__parameter_tied(&table[i], e->config),
                        .section = section};
        if (!row->used)
            continue;
        int status = cut_row(e, &table[i], row, error);
        if (status)
            return status;
        row->columns = row->ndim == 2 ? row->extent[1] : 1;
    }
    for (uint32_t i = 0; i < e->family->count; i++) {
        if (!e->rows[i].used || e->rows[i].tied)
            continue;
        int status = place_row(e, i, error);
        if (status)
            return status;
    }
    return DRAY_OK;
}

static int check_spec(const dray_engine_spec *given, dray_engine_spec *spec, dray_error *error)
{
    *spec = (dray_engine_spec)DRAY_ENGINE_SPEC_INIT;
    int status = dray__options_read(spec, sizeof *spec, dray__end_of(dray_engine_spec, kind), given,
                                    "dray_engine_spec", error);
    if (status)
        return status;
    if (spec->tp == 0)
        spec->tp = 1;
    if (spec->vocab_multiple == 0)
        spec->vocab_multiple = 64;
    if (spec->tp_rank >= spec->tp)
        return dray__fail(error, DRAY_EINVALID, "engine: tp rank %u of %u", spec->tp_rank,
                          spec->tp);
    if (spec->vocab_multiple < 1 || spec->vocab_multiple > INT64_C(1) << 30)
        return dray__fail(error, DRAY_EINVALID, "engine: vocabulary multiple %" PRId64,
                          spec->vocab_multiple);
    return DRAY_OK;
}

static int engine_init(engine *e, const dray_model_config *config, const dray_engine_spec *spec,
                       dray_error *error)
{
    *e = (engine){.config = config};
    int status = check_spec(spec, &e->spec, error);
    if (!status)
        status = dray__config_check(config, &e->family, error);
    if (!status && (e->family->moe || e->family->latent))
        status = dray__fail(error, DRAY_EUNSUPPORTED,
                            "engine: no layout for %s, which has experts or latent attention",
                            e->family->name);
    e->dtype = (dray_dtype)e->spec.dtype;
    e->kind = (dray_region_kind)e->spec.kind;
    if (!status)
        status = dray__builder_defaults(config, &e->dtype, &e->kind, error);
    return status ? status : place_rows(e, error);
}

static uint64_t section_start(const engine *e, uint32_t section, int64_t layer)
{
    uint64_t layers = (uint64_t)(section == AFTER ? e->config->layers : layer);
    return (section == BEFORE ? 0 : e->bytes[BEFORE]) +
           (section == BEFORE ? 0 : layers * e->bytes[LAYER]);
}

static bool total_bytes(const engine *e, uint64_t *bytes)
{
    uint64_t layers;
    return !__builtin_mul_overflow(e->bytes[LAYER], (uint64_t)e->config->layers, &layers) &&
           !__builtin_add_overflow(layers, e->bytes[BEFORE], bytes) &&
           !__builtin_add_overflow(*bytes, e->bytes[AFTER], bytes);
}

static int add_all(const engine *e, dray_layout *layout, dray_error *error)
{
    dray__walk walk = {.config = e->config, .family = e->family};
    const dray__parameter *parameter;
    while ((parameter = dray__walk_next(&walk))) {
        const placed *row = &e->rows[walk.row];
        dray_block block = {.extent = {row->extent[0], row->extent[1]},
                            .start = {row->start[0], row->start[1]}};
        bool is_alias;
        int status =
            dray__walk_add(&walk, parameter, e->dtype, layout, &block.tensor, &is_alias, error);
        if (status)
            return status;
        if (is_alias || row->extent[0] == 0)
            continue;
        block.offset = section_start(e, row->section, walk.layer) + row->offset;
        dray__dense_strides(e->dtype, row->ndim, row->extent, block.stride);
        status = dray_layout_add_block(layout, &block, error);
        if (status)
            return status;
    }
    return DRAY_OK;
}

int dray_layout_engine(const dray_model_config *config, const dray_engine_spec *spec,
                       dray_layout **out, dray_error *error)
{
    engine e;
    int status = engine_init(&e, config, spec, error);
    if (status)
        return status;
    dray_region_info region = {.kind = (int32_t)e.kind, .name = "weights"};
    if (!total_bytes(&e, &region.bytes))
        return dray__fail(error, DRAY_EINVALID, "engine: the model is too large");
    dray_layout *layout = NULL;
    status = dray_layout_new(&layout, error);
    if (!status)
        status = dray_layout_add_region(layout, &region, NULL, error);
    if (!status)
        status = add_all(&e, layout, error);
    if (status) {
        dray_layout_free(layout);
        return status;
    }
    *out = layout;
    return DRAY_OK;
}

/* Does `name` follow the pattern? *layer is the number in place of its star. */
static bool matches(const char *pattern, const char *name, int64_t layers, int64_t *layer)
{
    const char *star = strchr(pattern, '*');
    *layer = 0;
    if (!star)
        return strcmp(pattern, name) == 0;
    size_t head = (size_t)(star - pattern);
    if (strncmp(pattern, name, head) != 0)
        return false;
    const char *digits = name + head, *at = digits;
    for (; *at >= '0' && *at <= '9' && *layer < layers; at++)
        *layer = *layer * 10 + (*at - '0');
    if (at == digits || (digits[0] == '0' && at > digits + 1) || *layer >= layers)
        return false;
    return strcmp(star + 1, at) == 0;
}

int dray_engine_parameter(const dray_model_config *config, const dray_engine_spec *spec,
                          const char *name, uint64_t *offset, uint32_t *ndim, int64_t *shape,
                          dray_error *error)
{
    engine e;
    int64_t layer;
    int status = engine_init(&e, config, spec, error);
    if (status)
        return status;
    const dray__parameter *table = e.family->parameters;
    for (uint32_t i = 0; i < e.family->count; i++)
        if (e.rows[i].tied && strcmp(name, table[i].name) == 0)
            name = table[i].tied;
    for (uint32_t i = 0; i < e.family->count; i++) {
        const placed *row = &e.rows[i];
        if (!row->used || row->tied ||
            !matches(engine_name(&table[i]), name, config->layers, &layer))
            continue;
        *offset = section_start(&e, row->section, layer) + row->parameter;
        *ndim = row->ndim;
        shape[0] = row->fused_rows;
        if (row->ndim == 2)
            shape[1] = row->columns;
        return DRAY_OK;
    }
    return dray__fail(error, DRAY_ENOENT, "%s of %" PRId64 " layers has no parameter %.200s",
                      config->family, config->layers, name);
}
