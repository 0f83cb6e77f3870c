/* dray inspect: the contents of a checkpoint, and whether it is complete: its files fit together,
 * and when a config.json is beside them, all tensors of that model are there. */
#include "cmd/cmd.h"

#include "base/json.h"

#include <dray/weights.h>
#include <limits.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>

typedef struct arguments {
    cmd_list path;
    bool json, tensors;
} arguments;

enum { MOST_DTYPES = 32, MOST_PROBLEMS = 20, MOST_FILES = 16 /* as text */ };

typedef struct sums {
    uint64_t tensors, elements, bytes;
} sums;

/* One checkpoint. */
typedef struct checkpoint {
    dray_layout *layout;
    char *base;       /* the folder that it is a delta on; NULL when it is whole */
    uint32_t *region; /* region of each tensor; UINT32_MAX for tensors without elements, which are
                         in none */
    uint64_t *offset;
    sums dtypes[MOST_DTYPES], all;
    bool has_config;
    dray_model_config config;
    dray_error unknown; /* why dray does not know the model of config.json; code 0: it does */
    json_t *problems;   /* tensors that the files lack, or hold otherwise than the configuration */
} checkpoint;

static uint64_t elements_of(const dray_tensor_info *tensor)
{
    uint64_t n = 1;
    for (uint32_t d = 0; d < tensor->ndim; d++)
        n *= (uint64_t)tensor->shape[d];
    return n;
}

static bool count_all(checkpoint *c)
{
    uint32_t count = dray_layout_tensor_count(c->layout);
    c->region = malloc((count + 1) * sizeof *c->region);
    c->offset = calloc(count + 1, sizeof *c->offset);
    if (!c->region || !c->offset)
        return false;
    memset(c->region, 0xff, (count + 1) * sizeof *c->region);
    for (uint32_t i = 0; i < dray_layout_block_count(c->layout); i++) {
        const dray_block *block = dray_layout_block(c->layout, i);
        c->region[block->tensor] = block->region;
        c->offset[block->tensor] = block->offset;
    }
    for (uint32_t i = 0; i < count; i++) {
        const dray_tensor_info *tensor = dray_layout_tensor(c->layout, i);
        uint64_t n = elements_of(tensor), bytes = n * dray_dtype_size((dray_dtype)tensor->dtype);
        sums *both[] = {&c->dtypes[tensor->dtype % MOST_DTYPES], &c->all};
        for (int k = 0; k < 2; k++) {
            both[k]->tensors++;
            both[k]->elements += n;
            both[k]->bytes += bytes;
        }
    }
    return true;
}

static void problem(checkpoint *c, const char *kind, const char *tensor)
{
    json_array_append_new(c->problems, json_pack("{s:s, s:s}", "problem", kind, "tensor", tensor));
}

static void compare_shapes(checkpoint *c, const dray_tensor_info *want,
                           const dray_tensor_info *have)
{
    bool same = want->ndim == have->ndim;
    for (uint32_t d = 0; same && d < want->ndim; d++)
        same = want->shape[d] == have->shape[d];
    if (!same)
        problem(c, "other shape", want->name);
}

/* Returns whether the tensor has the scales of a quantised tensor of the model. */
static bool is_scales(const dray_layout *model, const char *name)
{
    static const char *const suffixes[] = {"_scale_inv", "_scale"};
    for (size_t i = 0; i < sizeof suffixes / sizeof *suffixes; i++) {
        size_t size = strlen(name), tail = strlen(suffixes[i]);
        char weight[512];
        uint32_t at;
        if (size <= tail || size - tail >= sizeof weight || strcmp(name + size - tail, suffixes[i]))
            continue;
        snprintf(weight, sizeof weight, "%.*s", (int)(size - tail), name);
        return dray_layout_find(model, weight, &at, NULL) == DRAY_OK;
    }
    return false;
}

/* Compares the checkpoint with the model that config.json describes. */
static int compare_model(checkpoint *c, dray_error *error)
{
    dray_layout *model;
    uint32_t i, at;
    int status = dray_layout_full(&c->config, DRAY_DTYPE_NONE, DRAY_REGION_HOST, &model, error);
    if (status)
        return status;
    for (i = 0; i < dray_layout_tensor_count(model); i++) {
        const dray_tensor_info *want = dray_layout_tensor(model, i);
        if (dray_layout_find(c->layout, want->name, &at, NULL) == DRAY_OK)
            compare_shapes(c, want, dray_layout_tensor(c->layout, at));
        else if (want->alias_of < 0)
            problem(c, "missing", want->name);
    }
    for (i = 0; i < dray_layout_tensor_count(c->layout); i++) {
        const char *name = dray_layout_tensor(c->layout, i)->name;
        if (dray_layout_find(model, name, &at, NULL) != DRAY_OK && !is_scales(model, name))
            problem(c, "not of the model", name);
    }
    dray_layout_free(model);
    return DRAY_OK;
}

/* Reads the config.json beside the checkpoint, if there is one. */
static int load_config(checkpoint *c, const char *path, dray_error *error)
{
    struct stat st;
    char config[PATH_MAX];
    const char *slash = strrchr(path, '/');
    bool folder = stat(path, &st) == 0 && S_ISDIR(st.st_mode);
    int n = folder ? snprintf(config, sizeof config, "%s/config.json", path)
                   : snprintf(config, sizeof config, "%.*sconfig.json",
                              slash ? (int)(slash - path) + 1 : 0, path);
    if (n < 0 || (size_t)n >= sizeof config || stat(config, &st) != 0)
        return DRAY_OK;
    int status = dray_model_config_load(config, &c->config, error);
    c->has_config = !status;
    if (status != DRAY_EUNSUPPORTED)
        return status;
    c->unknown = *error;
    return DRAY_OK;
}

static json_t *shape_json(const dray_tensor_info *tensor)
{
    json_t *shape = json_array();
    for (uint32_t d = 0; d < tensor->ndim; d++)
        json_array_append_new(shape, json_integer(tensor->shape[d]));
    return shape;
}

static const char *file_of(const checkpoint *c, uint32_t region)
{
    const dray_region_info *info = dray_layout_region(c->layout, region);
    const char *slash = info ? strrchr(info->name, '/') : NULL;
    return slash ? slash + 1 : info ? info->name : "-";
}

static void print_tensors(const checkpoint *c, bool json)
{
    static const char *const headings[] = {"tensor", "dtype", "shape", ">bytes", "file", NULL};
    cmd_table *table = json ? NULL : cmd_table_new(headings);
    for (uint32_t i = 0; i < dray_layout_tensor_count(c->layout); i++) {
        const dray_tensor_info *t = dray_layout_tensor(c->layout, i);
        const char *dtype = dray_dtype_name((dray_dtype)t->dtype);
        uint64_t bytes = elements_of(t) * dray_dtype_size((dray_dtype)t->dtype);
        json_t *shape = shape_json(t);
        if (json) {
            cmd_json_line(json_pack("{s:s, s:s, s:o, s:I, s:s, s:I}", "tensor", t->name, "dtype",
                                    dtype, "shape", shape, "bytes", (json_int_t)bytes, "file",
                                    file_of(c, c->region[i]), "offset", (json_int_t)c->offset[i]));
            continue;
        }
        char *text = json_dumps(shape, JSON_COMPACT);
        cmd_cell(table, "%s", t->name);
        cmd_cell(table, "%s", dtype);
        cmd_cell(table, "%s", text ? text : "?");
        cmd_cell(table, "%llu", (unsigned long long)bytes);
        cmd_cell(table, "%s", file_of(c, c->region[i]));
        free(text);
        json_decref(shape);
    }
    if (table)
        cmd_table_print(table, stdout);
}

static json_t *model_json(const checkpoint *c)
{
    const dray_model_config *m = &c->config;
    if (!c->has_config)
        return json_null();
    return json_pack("{s:s, s:I, s:I, s:I, s:I, s:I, s:I, s:I, s:b, s:s}", "family", m->family,
                     "layers", (json_int_t)m->layers, "hidden_size", (json_int_t)m->hidden_size,
                     "intermediate_size", (json_int_t)m->intermediate_size, "heads",
                     (json_int_t)m->heads, "kv_heads", (json_int_t)m->kv_heads, "head_dim",
                     (json_int_t)m->head_dim, "vocab_size", (json_int_t)m->vocab_size, "tied",
                     m->tied, "dtype", dray_dtype_name((dray_dtype)m->dtype));
}

static void print_json(const checkpoint *c, const char *path, bool complete)
{
    json_t *files = json_array(), *dtypes = json_object();
    for (uint32_t i = 0; i < dray_layout_region_count(c->layout); i++)
        json_array_append_new(files,
                              json_pack("{s:s, s:I}", "name", file_of(c, i), "bytes",
                                        (json_int_t)dray_layout_region(c->layout, i)->bytes));
    for (int i = 0; i < MOST_DTYPES; i++)
        if (c->dtypes[i].tensors)
            json_object_set_new(dtypes, dray_dtype_name((dray_dtype)i),
                                json_pack("{s:I, s:I, s:I}", "tensors",
                                          (json_int_t)c->dtypes[i].tensors, "parameters",
                                          (json_int_t)c->dtypes[i].elements, "bytes",
                                          (json_int_t)c->dtypes[i].bytes));
    cmd_json_line(
        json_pack("{s:s, s:s?, s:o, s:I, s:I, s:I, s:o, s:o, s:o, s:O}", "checkpoint", path, "base",
                  c->base, "files", files, "tensors", (json_int_t)c->all.tensors, "parameters",
                  (json_int_t)c->all.elements, "bytes", (json_int_t)c->all.bytes, "dtypes", dtypes,
                  "model", model_json(c), "complete",
                  c->unknown.code ? json_null() : json_boolean(complete), "problems", c->problems));
}

static void print_text(const checkpoint *c, bool complete)
{
    uint32_t files = dray_layout_region_count(c->layout);
    for (uint32_t i = 0; i < files; i++) {
        if (files > MOST_FILES && i == MOST_FILES - 2) {
            printf("%-11s ... (%u files; --json has all)\n", "", files);
            i = files - 1;
        }
        printf("%-11s %s, %s\n", i ? "" : "files", file_of(c, i),
               dray__say_bytes((double)dray_layout_region(c->layout, i)->bytes).s);
    }
    if (c->base)
        printf("%-11s a delta on %s\n", "kept as", c->base);
    printf("%-11s %llu\n", "tensors", (unsigned long long)c->all.tensors);
    printf("%-11s %s (%llu)\n", "parameters", dray__say_count((double)c->all.elements).s,
           (unsigned long long)c->all.elements);
    printf("%-11s %s", "bytes", dray__say_bytes((double)c->all.bytes).s);
    for (int i = 0, n = 0; i < MOST_DTYPES; i++)
        if (c->dtypes[i].tensors)
            printf("%s%s %s", n++ ? ", " : ": ", dray_dtype_name((dray_dtype)i),
                   dray__say_bytes((double)c->dtypes[i].bytes).s);
    const dray_model_config *m = &c->config;
    if (c->has_config)
        printf("\n%-11s %s, %lld layers, hidden %lld, MLP %lld, %lld heads of %lld (%lld KV), "
               "vocabulary %lld%s",
               "model", m->family, (long long)m->layers, (long long)m->hidden_size,
               (long long)m->intermediate_size, (long long)m->heads, (long long)m->head_dim,
               (long long)m->kv_heads, (long long)m->vocab_size, m->tied ? ", tied" : "");
    printf("\n%-11s %s", "complete", c->unknown.code ? "not known" : complete ? "yes" : "no");
    if (!c->has_config && !c->unknown.code)
        printf(" as far as the files say: there is no config.json beside them");
    printf("\n");
    size_t i, all = json_array_size(c->problems);
    json_t *item;
    json_array_foreach(c->problems, i, item)
    {
        if (i == MOST_PROBLEMS)
            break;
        printf("  %s: %s\n", dray__json_string(item, "problem"), dray__json_string(item, "tensor"));
    }
    if (all > MOST_PROBLEMS)
        printf("  and %zu more (--json has all)\n", all - MOST_PROBLEMS);
}

static int inspect(checkpoint *c, const arguments *a)
{
    dray_error error;
    if (dray_checkpoint_layout(a->path.items[0], &c->layout, &c->base, &error) ||
        load_config(c, a->path.items[0], &error) || (c->has_config && compare_model(c, &error)))
        return cmd_fail("inspect", &error);
    if (!count_all(c))
        return cmd_failf("inspect", "out of memory");
    bool complete = json_array_size(c->problems) == 0;
    if (a->tensors)
        print_tensors(c, a->json);
    if (a->tensors && !a->json)
        printf("\n");
    if (a->json)
        print_json(c, a->path.items[0], complete);
    else
        print_text(c, complete);
    if (c->unknown.code)
        return cmd_fail("inspect", &c->unknown);
    return complete ? CMD_OK : CMD_FAILED;
}

int cmd_inspect(int argc, char **argv)
{
    static const cmd_option options[] = {
        CMD_JSON(arguments, json),
        CMD_FLAG(arguments, tensors, "tensors", 't',
                 "Print every tensor with dtype, shape, bytes and file"),
        CMD_END};
    static const cmd_usage usage = {
        .options = options,
        .arguments = "CHECKPOINT",
        .words = "a checkpoint",
        .words_at = offsetof(arguments, path),
        .least = 1,
        .most = 1,
        .doc = "Prints what a safetensors checkpoint holds: a file, an index, or a folder with "
               "either.\vFails when the files are not sound, or when a config.json is beside "
               "them and they do not hold exactly that model's tensors, or dray does not know "
               "the model."};
    arguments a = {0};
    cmd_parse(&usage, argc, argv, &a);
    checkpoint c = {.problems = json_array()};
    int status = inspect(&c, &a);
    dray_layout_free(c.layout);
    dray_free(c.base);
    json_decref(c.problems);
    free(c.region);
    free(c.offset);
    return status;
}
