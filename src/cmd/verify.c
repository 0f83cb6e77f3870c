/* dray verify: compares two holders of a model bit for bit. Each is a checkpoint, or a model of a
 * running session: the version that its publishers announced, or that a group of engines committed.
 * It compares checksums that do not depend on how either side is sharded. */
#include "cmd/cmd.h"

#include "base/json.h"

#include <dray/weights.h>
#include <inttypes.h>
#include <stdlib.h>
#include <string.h>

typedef struct arguments {
    cmd_list what;
    bool json;
} arguments;

/* One of the two sides. */
typedef struct side {
    dray_checksums *sums;
    dray_layout *layout; /* for a checkpoint, the layout with its shapes; else NULL */
    uint32_t compared;   /* for a checkpoint, the number of tensors with sums in its files */
} side;

typedef struct entry {
    const char *name;
    int32_t dtype;
    uint64_t elements, sum;
    const dray_tensor_info *tensor; /* NULL when its shape is not known */
} entry;

/* ---- reading -------------------------------------------------------------------------------- */

static int read_checkpoint(const char *path, side *out, dray_error *error)
{
    int status = dray_checkpoint_layout(path, &out->layout, NULL, error);
    if (status)
        return status;
    return dray_checksums_of_checkpoint(path, &out->compared, &out->sums, error);
}

/* Reads ADDRESS#MODEL or ADDRESS#MODEL@GROUP. Names of models may contain slashes and "@". When the
 * coordinator knows no such model, the group is the part after the last "@". */
static int read_session(const char *text, side *out, dray_error *error)
{
    char *address = strdup(text);
    if (!address)
        abort();
    char *model = strchr(address, '#');
    *model++ = 0;
    dray_options options = DRAY_OPTIONS_INIT;
    options.address = address;
    options.name = "dray verify";
    options.role = "tool";
    options.timeout_ns = 2000000000; /* A running session answers at once. */
    dray_context *context;
    int status = dray_open(&options, &context, error);
    if (status) {
        free(address);
        return status;
    }
    status = dray_checksums_fetch(context, model, NULL, &out->sums, error);
    char *group = strrchr(model, '@');
    if (status == DRAY_ENOENT && group && group[1]) {
        *group++ = 0;
        status = dray_checksums_fetch_group(context, model, group, NULL, &out->sums, error);
    }
    dray_close(context);
    free(address);
    return status;
}

static int read_side(const char *what, side *out, dray_error *error)
{
    bool session = strncmp(what, "unix:", 5) == 0 || strncmp(what, "tcp:", 4) == 0;
    const char *model = strchr(what, '#');
    if (session && !(model && model[1])) {
        *error = (dray_error){.code = DRAY_EINVALID};
        snprintf(error->message, sizeof error->message,
                 "%.300s: which model? expected ADDRESS#MODEL or ADDRESS#MODEL@GROUP", what);
        return DRAY_EINVALID;
    }
    return session ? read_session(what, out, error) : read_checkpoint(what, out, error);
}

static void close_side(side *s)
{
    dray_checksums_free(s->sums);
    dray_layout_free(s->layout);
}

/* ---- comparing ------------------------------------------------------------------------------ */

static int by_name(const void *a, const void *b)
{
    return strcmp(((const entry *)a)->name, ((const entry *)b)->name);
}

static entry *entries_of(const side *s, uint32_t *count)
{
    *count = dray_checksums_count(s->sums);
    entry *list = calloc((size_t)*count + 1, sizeof *list);
    if (!list)
        abort();
    for (uint32_t i = 0; i < *count; i++) {
        entry *e = &list[i];
        uint32_t index;
        dray_checksums_entry(s->sums, i, &e->name, &e->dtype, &e->elements, &e->sum, NULL);
        if (s->layout && dray_layout_find(s->layout, e->name, &index, NULL) == DRAY_OK)
            e->tensor = dray_layout_tensor(s->layout, index);
    }
    qsort(list, *count, sizeof *list, by_name);
    return list;
}

static bool same_shape(const entry *a, const entry *b)
{
    if (a->elements != b->elements)
        return false;
    if (!a->tensor || !b->tensor)
        return true;
    if (a->tensor->ndim != b->tensor->ndim)
        return false;
    for (uint32_t d = 0; d < a->tensor->ndim; d++)
        if (a->tensor->shape[d] != b->tensor->shape[d])
            return false;
    return true;
}

static const char *shape_text(const entry *e, char *out, size_t capacity)
{
    if (!e->tensor) {
        snprintf(out, capacity, "%" PRIu64 " elements", e->elements);
        return out;
    }
    size_t used = (size_t)snprintf(out, capacity, "[");
    for (uint32_t d = 0; d < e->tensor->ndim && used < capacity; d++)
        used += (size_t)snprintf(out + used, capacity - used, "%s%" PRId64, d ? "," : "",
                                 e->tensor->shape[d]);
    if (used < capacity)
        snprintf(out + used, capacity - used, "]");
    return out;
}

static void note(json_t *list, const char *tensor, const char *what, const char *a, const char *b)
{
    json_t *row =
        json_pack("{s:s, s:s, s:s?, s:s?}", "tensor", tensor, "difference", what, "a", a, "b", b);
    if (!row || json_array_append_new(list, row))
        abort();
}

static void compare_entry(const entry *a, const entry *b, json_t *list)
{
    char text[2][128];
    if (a->dtype != b->dtype) {
        note(list, a->name, "dtype", dray_dtype_name((dray_dtype)a->dtype),
             dray_dtype_name((dray_dtype)b->dtype));
    } else if (!same_shape(a, b)) {
        note(list, a->name, "shape", shape_text(a, text[0], sizeof text[0]),
             shape_text(b, text[1], sizeof text[1]));
    } else if (a->sum != b->sum) {
        snprintf(text[0], sizeof text[0], "%016" PRIx64, a->sum);
        snprintf(text[1], sizeof text[1], "%016" PRIx64, b->sum);
        note(list, a->name, "content", text[0], text[1]);
    }
}

/* Lists the differences by name. *common receives the number of tensors that are on both sides. */
static json_t *compare(const side *left, const side *right, uint64_t *common)
{
    uint32_t counts[2], i = 0, j = 0;
    entry *a = entries_of(left, &counts[0]), *b = entries_of(right, &counts[1]);
    json_t *list = json_array();
    *common = 0;
    while (i < counts[0] || j < counts[1]) {
        int order = i == counts[0] ? 1 : j == counts[1] ? -1 : strcmp(a[i].name, b[j].name);
        if (order < 0) {
            note(list, a[i++].name, "missing", "there", NULL);
        } else if (order > 0) {
            note(list, b[j++].name, "missing", NULL, "there");
        } else {
            compare_entry(&a[i++], &b[j++], list);
            ++*common;
        }
    }
    free(a);
    free(b);
    return list;
}

/* ---- printing ------------------------------------------------------------------------------- */

static void print_text(const arguments *a, const json_t *list, uint64_t common)
{
    size_t index;
    json_t *row;
    if (json_array_size(list) == 0) {
        printf("equal: %" PRIu64 " tensors\n", common);
        return;
    }
    printf("%zu tensor%s\nA: %s\nB: %s\n", json_array_size(list),
           json_array_size(list) == 1 ? " differs" : "s differ", a->what.items[0],
           a->what.items[1]);
    static const char *const headings[] = {"tensor", "difference", "A", "B", NULL};
    cmd_table *table = cmd_table_new(headings);
    json_array_foreach(list, index, row)
    {
        const char *left = dray__json_string(row, "a");
        const char *right = dray__json_string(row, "b");
        cmd_cell(table, "%s", dray__json_string(row, "tensor"));
        cmd_cell(table, "%s", dray__json_string(row, "difference"));
        cmd_cell(table, "%s", left ? left : "-");
        cmd_cell(table, "%s", right ? right : "-");
    }
    cmd_table_print(table, stdout);
}

/* Compares one checkpoint with the sums in its own files. */
static int verify_alone(const arguments *a)
{
    side s = {0};
    dray_error error;
    if (read_side(a->what.items[0], &s, &error)) {
        close_side(&s);
        return cmd_fail("verify", &error);
    }
    uint32_t tensors = dray_checksums_count(s.sums), compared = s.compared;
    bool checkpoint = s.layout != NULL;
    close_side(&s);
    if (!checkpoint)
        return cmd_failf("verify",
                         "%s: expected a checkpoint, or a second argument to compare it with",
                         a->what.items[0]);
    if (compared < tensors)
        return cmd_failf("verify",
                         "%s: %" PRIu32 " of %" PRIu32
                         " tensors have sums in its files' metadata: it was not written by dray",
                         a->what.items[0], compared, tensors);
    if (a->json)
        cmd_json_line(json_pack("{s:b, s:s, s:I}", "sound", 1, "a", a->what.items[0], "tensors",
                                (json_int_t)tensors));
    else
        printf("sound: %" PRIu32 " tensors are what was written\n", tensors);
    return CMD_OK;
}

int cmd_verify(int argc, char **argv)
{
    static const cmd_option options[] = {CMD_FLAG(arguments, json, "json", 'j', "Print one object"),
                                         CMD_END};
    static const cmd_usage usage = {
        .options = options,
        .arguments = "A [B]",
        .words = "a checkpoint, or two things to compare",
        .words_at = offsetof(arguments, what),
        .least = 1,
        .most = 2,
        .doc =
            "Compare the weights that A and B hold, and list the tensors that differ; or compare a "
            "checkpoint with the sums that its writer put into it.\vA and B: a checkpoint (a "
            "folder or a file of safetensors), ADDRESS#MODEL (what the publishers of a running "
            "session announced last) or ADDRESS#MODEL@GROUP (what a group of engines committed "
            "last), as in unix:/run/dray.socket#policy@engine0. Exit status 1 when they differ."};
    arguments a = {0};
    cmd_parse(&usage, argc, argv, &a);
    if (!a.what.items[1])
        return verify_alone(&a);
    side sides[2] = {{0}, {0}};
    dray_error error;
    for (int i = 0; i < 2; i++)
        if (read_side(a.what.items[i], &sides[i], &error)) {
            close_side(&sides[0]);
            close_side(&sides[1]);
            return cmd_fail("verify", &error);
        }
    uint64_t common;
    json_t *list = compare(&sides[0], &sides[1], &common);
    bool equal = json_array_size(list) == 0;
    if (a.json)
        cmd_json_line(json_pack("{s:b, s:s, s:s, s:I, s:O}", "equal", equal, "a", a.what.items[0],
                                "b", a.what.items[1], "tensors", (json_int_t)common, "differences",
                                list));
    else
        print_text(&a, list, common);
    json_decref(list);
    close_side(&sides[0]);
    close_side(&sides[1]);
    return equal ? CMD_OK : CMD_FAILED;
}
