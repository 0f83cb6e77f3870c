/* quantization_config of engines: read from config.json, matched against modules, and its effect on
 * a weight's cut. After vLLM's and SGLang's quantization/fp8.py (validate_fp8_block_shape,
 * create_weights) and quant_utils.py (is_layer_skipped). */
#include "model/engine/engine.h"

#include "base/error.h"
#include "base/json.h"
#include "base/options.h"

#include <inttypes.h>
#include <limits.h>
#include <stdlib.h>
#include <string.h>

#define EXPERTS ".experts"

/* ---- the config ------------------------------------------------------------------------------ */

static const char *without_model(const char *module)
{
    return strncmp(module, "model.", 6) == 0 ? module + 6 : module;
}

/* Ignores a module. One of a layer's experts stands for all of them. */
static int ignore(dray__map *ignored, const char *module, dray_error *error)
{
    char *copy = strdup(without_model(module));
    if (!copy)
        return dray__nomem(error);
    bool ok = dray__map_set(ignored, copy, 0);
    char *experts = strstr(copy, EXPERTS);
    if (experts && experts[strlen(EXPERTS)] == '.') {
        experts[strlen(EXPERTS)] = 0;
        ok = ok && dray__map_set(ignored, copy, 0);
    }
    free(copy);
    return ok ? DRAY_OK : dray__nomem(error);
}

int dray__engine_quant_read(dray__engine *e, dray_error *error)
{
    dray_engine_quant *q = &e->quant;
    *q = (dray_engine_quant)DRAY_ENGINE_QUANT_INIT;
    if (!e->spec.quant)
        return DRAY_OK;
    int status = DRAY__OPTIONS_READ(dray_engine_quant, ignore_count, q, e->spec.quant, error);
    if (status)
        return status;
    const dray__quant_format *format = dray__quant_format_of(q->kind);
    if (!format)
        return dray__fail(error, DRAY_EINVALID, "engine: unknown quantisation %d", q->kind);
    bool groups = format->parts[DRAY__PART_VALUES].suffix && !format->columns;
    for (int d = 0; d < 2; d++) {
        q->block[d] = q->block[d] ? q->block[d] : groups && d == 0 ? 1 : 128;
        if (q->block[d] < 1 || q->block[d] > 1 << 20)
            return dray__fail(error, DRAY_EINVALID,
                              "engine: quantised in blocks of %" PRId64 " x %" PRId64, q->block[0],
                              q->block[1]);
    }
    if (q->kind > DRAY_QUANT_TENSOR && e->spec.transposed)
        return dray__fail(error, DRAY_EUNSUPPORTED,
                          "engine: %s of weights that are stored [in, out]: scales and packed "
                          "elements are along rows",
                          format->name);
    for (uint32_t i = 0; i < q->ignore_count && !status; i++)
        status = ignore(&e->ignored, q->ignore[i], error);
    return status;
}

const char *dray__engine_suffix(const dray__engine *e, int part)
{
    const dray__quant_format *format = dray__quant_format_of(e->quant.kind);
    const char *suffix = format ? format->parts[part].suffix : NULL;
    return suffix || part != DRAY__PART_VALUES ? suffix : "";
}

/* ---- which rows ------------------------------------------------------------------------------ */

static bool quantisable(const dray__engine *e, const dray__parameter *p)
{
    dray__part part = dray__engine_part(p);
    return p->ndim == 2 && part < DRAY__ROUTER &&
           !(part == DRAY__SHARED && e->spec.fuse_shared); /* a fused one is like the experts */
}

/* Returns whether the row's module is ignored. The module is the name before ".weight"; for experts
 * it is that of all of them. */
static bool is_ignored(const dray__engine *e, const dray__parameter *p, int64_t layer)
{
    char name[DRAY__PARAMETER_NAME];
    uint32_t unused;
    dray__parameter_name(p->name, layer, 0, name);
    char *end = strstr(name, EXPERTS ".");
    if (end)
        end[strlen(EXPERTS)] = 0;
    else if ((end = strrchr(name, '.')))
        *end = 0;
    return dray__map_get(&e->ignored, without_model(name), &unused);
}

int dray__engine_quantised(const dray__engine *e, uint64_t used, int64_t layer, uint64_t *mask,
                           dray_error *error)
{
    const dray__parameter *table = e->family->parameters;
    *mask = 0;
    if (e->quant.kind == DRAY_QUANT_NONE)
        return DRAY_OK;
    for (uint32_t i = 0; i < e->family->count; i++)
        if ((used >> i & 1) && quantisable(e, &table[i]) && !is_ignored(e, &table[i], layer))
            *mask |= UINT64_C(1) << i;
    for (uint32_t i = 0; i < e->family->count && e->quant.ignore_count; i++)
        for (uint32_t j = 0; j < i; j++) {
            if (!(used >> i & used >> j & 1) || !table[i].fused || !table[j].fused ||
                strcmp(table[i].fused, table[j].fused) || (*mask >> i & 1) == (*mask >> j & 1))
                continue;
            return dray__fail(error, DRAY_EINVALID,
                              "engine: of the fused %s of layer %" PRId64
                              ", %s is to be quantised and %s is not",
                              table[i].fused, layer, table[*mask >> i & 1 ? i : j].name,
                              table[*mask >> i & 1 ? j : i].name);
        }
    return DRAY_OK;
}

/* ---- effects on a cut ------------------------------------------------------------------------ */

static int64_t blocks(int64_t elements, int64_t block)
{
    return elements / block + (elements % block != 0);
}

/* Returns whether another part follows this one in a fused parameter. Then this one must also end
 * at the edge of a block. */
static bool is_followed(const dray__engine *e, const dray__parameter *p)
{
    const dray__parameter *end = e->family->parameters + e->family->count;
    for (const dray__parameter *q = p + 1; p->fused && q < end; q++)
        if (q->fused && strcmp(p->fused, q->fused) == 0 && dray__parameter_used(q, e->config))
            return true;
    return false;
}

/* Checks that cuts are at the edges of blocks that are quantised together, and that rows have whole
 * groups. */
static int check_cut(const dray__engine *e, const dray__parameter *parameter,
                     const dray__row_part *w, const int64_t *cell, dray_error *error)
{
    for (int d = 0; d < 2; d++) {
        bool cut = w->extent[d] < w->shape[d] || (d == 0 && is_followed(e, parameter)) ||
                   (d == 1 && e->quant.kind >= DRAY_QUANT_MXFP8);
        if (cut && w->extent[d] % cell[d])
            return dray__fail(error, DRAY_EINVALID,
                              "%s: %s: %" PRId64 " of %" PRId64 " %s on a rank are not a multiple "
                              "of the quantised block of %" PRId64,
                              dray__engine_name(parameter), parameter->name, w->extent[d],
                              w->shape[d], d ? "columns" : "rows", cell[d]);
    }
    return DRAY_OK;
}

/* DeepGEMM's exponents are in columns of four, each as long as all rows of the parameter, rounded
 * up to 16 bytes (get_mn_major_tma_aligned_packed_ue8m0_tensor). */
static void pack_exponents(dray__row_part *scales)
{
    scales->fours = blocks(scales->extent[1], 4);
    scales->columns = 4 * scales->fours;
}

int dray__engine_parts(const dray__engine *e, const dray__parameter *parameter,
                       const dray__row_part *w, dray__row *row, dray_error *error)
{
    const dray__quant_format *format = dray__quant_format_of(e->quant.kind);
    dray_tensor_info info = {.ndim = 2, .shape = {w->shape[0], w->shape[1]}};
    dray_quant quant = {.kind = e->quant.kind, .block = {e->quant.block[0], e->quant.block[1]}};
    int64_t cell[DRAY_MAX_DIMS];
    dray__quant_cell(&info, &quant, cell);
    int status =
        e->quant.kind == DRAY_QUANT_TENSOR ? DRAY_OK : check_cut(e, parameter, w, cell, error);
    for (int part = 0; part < DRAY__QUANT_PARTS && !status; part++) {
        dray__row_part *p = &row->parts[part];
        const struct dray__quant_part *of = &format->parts[part];
        if (!dray__quant_part_cell(&info, &quant, part, cell))
            continue;
        *p = *w;
        p->dtype = part ? e->dtype : DRAY_F8E4M3;
        if (of->dtype != DRAY_DTYPE_NONE)
            p->dtype = (dray_dtype)of->dtype;
        if (of->rows < 0) { /* one scale for the whole weight */
            *p = (dray__row_part){.dtype = p->dtype,
                                  .ndim = part == DRAY__PART_SECOND, /* a scalar, or [1] */
                                  .shape = {1},
                                  .extent = {1},
                                  .rows = 1,
                                  .columns = 1,
                                  .slots = w->slots};
            continue;
        }
        for (int d = 0; d < 2; d++) {
            p->shape[d] = blocks(w->shape[d], cell[d]);
            p->start[d] = w->start[d] / cell[d];
            p->extent[d] = blocks(w->extent[d], cell[d]);
        }
        p->rows = p->extent[0];
        p->columns = p->extent[1];
        if (e->quant.kind == DRAY_QUANT_DEEPGEMM && part == DRAY__PART_SCALES)
            pack_exponents(p);
    }
    return status;
}

/* ---- config.json ----------------------------------------------------------------------------- */

static int wrong(const char *path, const char *key, const char *expected, dray_error *error)
{
    return dray__fail(error, DRAY_EFORMAT, "%.200s: quantization_config: %s: expected %s", path,
                      key, expected);
}

static int read_block(const char *path, const json_t *config, dray_engine_quant *q,
                      dray_error *error)
{
    const json_t *block = json_object_get(config, "weight_block_size");
    q->kind = DRAY_QUANT_TENSOR;
    if (!block || json_is_null(block))
        return DRAY_OK;
    q->kind = DRAY_QUANT_BLOCK;
    for (size_t d = 0; d < 2; d++) {
        q->block[d] = json_integer_value(json_array_get(block, d));
        if (json_array_size(block) != 2 || q->block[d] < 1 || q->block[d] > 1 << 20)
            return wrong(path, "weight_block_size", "two sizes", error);
    }
    return DRAY_OK;
}

/* Copies the names into the allocation of the struct, after it. */
static int copy_names(const char *path, const char *key, const json_t *list,
                      dray_engine_quant **out, dray_error *error)
{
    size_t count = json_array_size(list), bytes = 0;
    for (size_t i = 0; i < count; i++) {
        const char *name = json_string_value(json_array_get(list, i));
        if (!name)
            return wrong(path, key, "a list of names", error);
        bytes += strlen(name) + 1;
    }
    dray_engine_quant *q = malloc(sizeof *q + count * sizeof(char *) + bytes);
    if (!q)
        return dray__nomem(error);
    *q = (dray_engine_quant)DRAY_ENGINE_QUANT_INIT;
    char **names = (char **)(q + 1), *text = (char *)(names + count);
    for (size_t i = 0; i < count; i++) {
        names[i] = text;
        text = stpcpy(text, json_string_value(json_array_get(list, i))) + 1;
    }
    q->ignore = (const char *const *)names;
    q->ignore_count = (uint32_t)count;
    *out = q;
    return DRAY_OK;
}

/* The names of the formats in compressed-tensors, and the settings of their weights. */
static const struct packed {
    const char *format, *type;
    int bits, symmetric, kind;
    int group; /* 0 when the config gives it */
} packed_formats[] = {
    {"mxfp8-quantized", "float", 8, 1, DRAY_QUANT_MXFP8, 32},
    {"mxfp4-pack-quantized", "float", 4, 1, DRAY_QUANT_MXFP4, 32},
    {"nvfp4-pack-quantized", "float", 4, 1, DRAY_QUANT_NVFP4, 16},
    {"pack-quantized", "int", 4, 1, DRAY_QUANT_INT4, 0},
    {"pack-quantized", "int", 4, 0, DRAY_QUANT_INT4_ZERO, 0},
};

/* Returns the only entry of config_groups; NULL when there are several, or none. */
static const json_t *only_group(const json_t *config)
{
    const json_t *groups = json_object_get(config, "config_groups");
    void *first =
        json_object_size(groups) == 1 ? json_object_iter((json_t *)(uintptr_t)groups) : NULL;
    return first ? json_object_iter_value(first) : NULL;
}

/* Returns the key of a setting that says that some modules stay as they are, that columns are in
 * another order, or that there are other tensors; NULL when there is none. */
static const char *other_tensors(const json_t *config, const json_t *group)
{
    const json_t *targets = json_object_get(group, "targets"), *target;
    const json_t *order = json_object_get(json_object_get(group, "weights"), "actorder");
    const char *word = json_string_value(order);
    const char *sparsity =
        json_string_value(json_object_get(json_object_get(config, "sparsity_config"), "format"));
    bool all = json_array_size(targets) > 0;
    size_t i;
    json_array_foreach(targets, i, target)
    {
        const char *name = json_string_value(target);
        all = all && name && strcmp(name, "Linear") == 0;
    }
    if (!all)
        return "targets";
    if (json_is_true(order) || (word && strcmp(word, "weight") && strcmp(word, "static")))
        return "actorder"; /* by groups: an index of each column's group */
    if (sparsity && strcmp(sparsity, "dense"))
        return "sparsity_config";
    return json_object_size(json_object_get(config, "transform_config")) ? "transform_config"
                                                                         : NULL;
}

static bool is_packed_so(const struct packed *p, const char *format, const json_t *weights)
{
    const char *type = json_string_value(json_object_get(weights, "type"));
    const json_t *symmetric = json_object_get(weights, "symmetric");
    json_int_t group = json_integer_value(json_object_get(weights, "group_size"));
    return strcmp(p->format, format) == 0 && type && strcmp(p->type, type) == 0 &&
           json_integer_value(json_object_get(weights, "num_bits")) == p->bits &&
           p->symmetric == !json_is_false(symmetric) && (p->group ? group == p->group : group > 0);
}

/* Reads quantization_config as compressed-tensors writes it (its QuantizationConfig). */
static int read_packed(const char *path, const json_t *config, const json_t *ignored,
                       dray_engine_quant *q, dray_error *error)
{
    const char *format = json_string_value(json_object_get(config, "format"));
    const json_t *group = only_group(config), *weights = json_object_get(group, "weights");
    const size_t count = sizeof packed_formats / sizeof *packed_formats;
    size_t at = 0;
    for (size_t i = 0; i < json_array_size(ignored); i++)
        if (strncmp(json_string_value(json_array_get(ignored, i)), "re:", 3) == 0)
            return dray__fail(error, DRAY_EUNSUPPORTED,
                              "%.200s: quantization_config: ignore: '%.80s' is a pattern: modules' "
                              "names expected",
                              path, json_string_value(json_array_get(ignored, i)));
    while (at < count && !(format && is_packed_so(&packed_formats[at], format, weights)))
        at++;
    if (at == count)
        return dray__fail(
            error, DRAY_EUNSUPPORTED,
            "%.200s: quantization_config: compressed-tensors, format '%.40s': expected "
            "one group of weights that are mxfp8-quantized, mxfp4-pack-quantized, "
            "nvfp4-pack-quantized, or pack-quantized in 4 bits and groups",
            path, format ? format : "");
    const char *other = other_tensors(config, group);
    if (other)
        return dray__fail(error, DRAY_EUNSUPPORTED,
                          "%.200s: quantization_config: %s: expected all Linear modules, with "
                          "columns in order, neither sparse nor transformed",
                          path, other);
    q->kind = packed_formats[at].kind;
    q->block[0] = 1;
    q->block[1] = json_integer_value(json_object_get(weights, "group_size"));
    return DRAY_OK;
}

static int read_quant(const char *path, const json_t *config, dray_engine_quant **out,
                      dray_error *error)
{
    static const char *const lists[] = {"modules_to_not_convert", "ignored_layers", "ignore"};
    const char *method = json_string_value(json_object_get(config, "quant_method"));
    const char *format = json_string_value(json_object_get(config, "fmt"));
    bool packed = method && strcmp(method, "compressed-tensors") == 0;
    if (!packed && (!method || strcmp(method, "fp8") || (format && strcmp(format, "e4m3"))))
        return dray__fail(
            error, DRAY_EUNSUPPORTED,
            "%.200s: quantization_config: quant_method '%.40s', fmt '%.40s': expected "
            "fp8, e4m3, or compressed-tensors",
            path, method ? method : "", format ? format : "");
    const json_t *list = NULL;
    const char *key = lists[0];
    for (size_t i = 0; i < sizeof lists / sizeof *lists && !json_array_size(list); i++) {
        key = lists[i];
        list = json_object_get(config, key);
        if (list && !json_is_null(list) && !json_is_array(list))
            return wrong(path, key, "a list of names", error);
    }
    dray_engine_quant *q = NULL;
    int status = copy_names(path, key, list, &q, error);
    if (status)
        return status;
    const char *scales = json_string_value(json_object_get(config, "scale_fmt"));
    q->scale_format = scales && strcmp(scales, "ue8m0") == 0 ? DRAY_SCALE_UE8M0 : DRAY_SCALE_F32;
    status =
        packed ? read_packed(path, config, list, q, error) : read_block(path, config, q, error);
    if (status)
        free(q);
    else
        *out = q;
    return status;
}

int dray_engine_quant_load(const char *path, dray_engine_quant **out, dray_error *error)
{
    enum { LARGEST = 16 << 20 };
    char file[PATH_MAX];
    json_t *json;
    int status = dray__config_path(path, file, error);
    if (!status)
        status = dray__json_load(file, LARGEST, &json, error);
    if (status)
        return status;
    const json_t *config = json_object_get(json, "quantization_config");
    if (!config || json_is_null(config)) /* of a model of text and images */
        config = json_object_get(json_object_get(json, "text_config"), "quantization_config");
    dray_engine_quant *q = NULL;
    if (config && !json_is_null(config))
        status = json_is_object(config) ? read_quant(file, config, &q, error)
                                        : wrong(file, "it", "an object", error);
    json_decref(json);
    if (!status)
        *out = q;
    return status;
}

void dray_engine_quant_free(dray_engine_quant *quant)
{
    free(quant);
}
