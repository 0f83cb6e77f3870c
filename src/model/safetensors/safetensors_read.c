/* Reads safetensors checkpoints: one file, or files with an index. Everything is checked: a file is
 * accepted only if every byte after its header belongs to exactly one tensor. */
#include "model/layout/layout.h"
#include "model/safetensors/safetensors.h"

#include "base/error.h"
#include "base/io.h"
#include "base/json.h"
#include "base/words.h"
#include "store/store.h"

#include <endian.h>
#include <errno.h>
#include <inttypes.h>
#include <limits.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

enum { MOST_DIMS = 8 }; /* of a tensor in a file */

/* Reads the header's text. *size is the bytes of the header, *bytes those of the file. */
static int read_header(const dray__store_file *file, const char *path, char **text, uint64_t *size,
                       uint64_t *bytes, dray_error *error)
{
    *bytes = file->bytes;
    if (*bytes < 8)
        return dray__fail(error, DRAY_EFORMAT,
                          "%.300s: %" PRIu64 " bytes, too short for a safetensors header", path,
                          *bytes);
    int rc = file->store->read(file, size, 8, 0, NULL, error);
    if (rc)
        return rc;
    *size = le64toh(*size);
    if (*size > DRAY__SAFETENSORS_HEADER_MAX || *size > *bytes - 8)
        return dray__fail(error, DRAY_EFORMAT,
                          "%.300s: header length %" PRIu64 " exceeds %s (%" PRIu64 " bytes)", path,
                          *size, *size > *bytes - 8 ? "the file" : "the format's limit",
                          *size > *bytes - 8 ? *bytes : (uint64_t)DRAY__SAFETENSORS_HEADER_MAX);
    *text = malloc(*size + 1);
    if (!*text)
        return dray__nomem(error);
    rc = file->store->read(file, *text, *size, 8, NULL, error);
    if (rc)
        return rc;
    if (*size < 1 || **text != '{')
        return dray__fail(error, DRAY_EFORMAT, "%.300s: the header does not begin with '{'", path);
    return DRAY_OK;
}

static int bad_tensor(dray_error *error, const char *path, const char *name, const char *problem)
{
    return dray__fail(error, DRAY_EFORMAT, "%.200s: tensor %.160s: %s", path, name, problem);
}

/* Reads a list of at most `most` non-negative integers. */
static int read_numbers(const json_t *list, size_t most, int64_t *out)
{
    if (!json_is_array(list) || json_array_size(list) > most)
        return -1;
    for (size_t i = 0; i < json_array_size(list); i++) {
        const json_t *item = json_array_get(list, i);
        if (!json_is_integer(item) || json_integer_value(item) < 0)
            return -1;
        out[i] = json_integer_value(item);
    }
    return (int)json_array_size(list);
}

/* Joins the dimensions from the last of DRAY_MAX_DIMS on to one, because the kernels of
 * convolutions may have five. Returns false when the product is too large. */
static bool fold(const int64_t *sizes, uint32_t ndim, dray__file_tensor *out)
{
    out->ndim = ndim < DRAY_MAX_DIMS ? ndim : DRAY_MAX_DIMS;
    for (uint32_t d = 0; d < out->ndim; d++)
        out->shape[d] = sizes[d];
    for (uint32_t d = DRAY_MAX_DIMS; d < ndim; d++)
        if (__builtin_mul_overflow(out->shape[DRAY_MAX_DIMS - 1], sizes[d],
                                   &out->shape[DRAY_MAX_DIMS - 1]))
            return false;
    return true;
}

/* Reads one entry of the header. The header ends at `data`, the file at `bytes`. */
static int read_tensor(const char *path, const char *name, const json_t *entry, uint64_t data,
                       uint64_t bytes, dray__file_tensor *out, dray_error *error)
{
    const char *key;
    json_t *value;
    if (!json_is_object(entry))
        return bad_tensor(error, path, name, "expected an object");
    json_object_foreach((json_t *)entry, key, value)
    {
        if (strcmp(key, "dtype") && strcmp(key, "shape") && strcmp(key, "data_offsets"))
            return dray__fail(error, DRAY_EFORMAT, "%.200s: tensor %.160s: unknown key '%.60s'",
                              path, name, key);
    }
    const char *dtype = json_string_value(json_object_get(entry, "dtype"));
    if (!dtype)
        return bad_tensor(error, path, name, "dtype: expected a string");
    *out = (dray__file_tensor){.name = name, .dtype = dray_dtype_parse(dtype)};
    if (out->dtype == DRAY_DTYPE_NONE || strcmp(dtype, dray_dtype_name(out->dtype)) != 0)
        return dray__fail(error, DRAY_EUNSUPPORTED, "%.200s: tensor %.160s: unknown dtype '%.40s'",
                          path, name, dtype);
    const json_t *shape = json_object_get(entry, "shape");
    if (json_array_size(shape) > MOST_DIMS)
        return dray__fail(error, DRAY_EUNSUPPORTED,
                          "%.200s: tensor %.160s: %zu dimensions, at most %d are supported", path,
                          name, json_array_size(shape), MOST_DIMS);
    int64_t sizes[MOST_DIMS];
    int ndim = read_numbers(shape, MOST_DIMS, sizes);
    if (ndim < 0)
        return bad_tensor(error, path, name, "shape: expected a list of integers from 0");
    if (!fold(sizes, (uint32_t)ndim, out))
        return bad_tensor(error, path, name, "the shape's bytes overflow");
    int64_t offsets[2], size;
    if (read_numbers(json_object_get(entry, "data_offsets"), 2, offsets) != 2)
        return bad_tensor(error, path, name, "data_offsets: expected two integers from 0");
    if (!dray__dense_bytes(out->dtype, out->ndim, out->shape, &size))
        return bad_tensor(error, path, name, "the shape's bytes overflow");
    if (offsets[1] < offsets[0] || (uint64_t)offsets[1] > bytes - data)
        return bad_tensor(error, path, name, "data_offsets lie outside the file");
    if (offsets[1] - offsets[0] != size)
        return dray__fail(error, DRAY_EFORMAT,
                          "%.200s: tensor %.160s: data_offsets span %" PRId64
                          " bytes, its shape and dtype need %" PRId64,
                          path, name, offsets[1] - offsets[0], size);
    out->start = data + (uint64_t)offsets[0];
    out->end = data + (uint64_t)offsets[1];
    return DRAY_OK;
}

static int by_place(const void *a, const void *b)
{
    const dray__file_tensor *x = a, *y = b;
    if (x->start != y->start)
        return x->start < y->start ? -1 : 1;
    if (x->end != y->end)
        return x->end < y->end ? -1 : 1;
    return strcmp(x->name, y->name);
}

/* Checks that every byte from the header's end to the file's belongs to one tensor. */
static int check_cover(const char *path, const dray__stored_file *file, uint64_t data,
                       dray_error *error)
{
    uint64_t at = data;
    for (uint32_t i = 0; i < file->count; i++) {
        const dray__file_tensor *t = &file->tensors[i];
        if (t->start != at)
            return dray__fail(
                error, DRAY_EFORMAT,
                "%.200s: tensor %.160s begins at byte %" PRIu64 ", %s at %" PRIu64, path, t->name,
                t->start, t->start < at ? "inside the one that ends" : "after a hole that begins",
                at);
        at = t->end;
    }
    if (at != file->bytes)
        return dray__fail(error, DRAY_EFORMAT,
                          "%.300s: %" PRIu64 " bytes, its tensors end at %" PRIu64, path,
                          file->bytes, at);
    return DRAY_OK;
}

int dray__safetensors_path(const char *folder, const char *name, const char *tail, char *out,
                           dray_error *error)
{
    int n = snprintf(out, PATH_MAX, "%s/%s%s", strcmp(folder, "/") ? folder : "", name, tail);
    if (n < 0 || n >= PATH_MAX)
        return dray__fail(error, DRAY_EINVALID, "%.300s...: path too long", folder);
    return DRAY_OK;
}

int dray__safetensors_check_metadata(const json_t *metadata, const char *what, int code,
                                     dray_error *error)
{
    const char *key;
    json_t *value;
    if (!json_is_object(metadata))
        return dray__fail(error, code, "%s: expected an object", what);
    json_object_foreach((json_t *)metadata, key, value)
    {
        if (!json_is_string(value))
            return dray__fail(error, code, "%s: %.60s is not a string", what, key);
    }
    return DRAY_OK;
}

static int read_tensors(const char *path, dray__stored_file *file, uint64_t data, dray_error *error)
{
    const char *name;
    json_t *entry;
    file->tensors = calloc(json_object_size(file->header) + 1, sizeof *file->tensors);
    if (!file->tensors)
        return dray__nomem(error);
    json_object_foreach(file->header, name, entry)
    {
        bool metadata = strcmp(name, "__metadata__") == 0;
        int status = metadata ? dray__safetensors_check_metadata(entry, name, DRAY_EFORMAT, error)
                              : read_tensor(path, name, entry, data, file->bytes,
                                            &file->tensors[file->count++], error);
        if (status && metadata)
            dray__fail_prefix(error, status, "%.300s: ", path);
        if (status)
            return status;
    }
    qsort(file->tensors, file->count, sizeof *file->tensors, by_place);
    return check_cover(path, file, data, error);
}

int dray__safetensors_read(const char *path, dray__stored_file *out, dray_error *error)
{
    dray__store_file stored;
    dray__stored_file file = {0};
    char *text = NULL;
    uint64_t size = 0;
    int status = dray__store_of(path)->open(path, &stored, error);
    if (status)
        return status;
    status = read_header(&stored, path, &text, &size, &file.bytes, error);
    stored.store->close(&stored);
    if (!status)
        status = dray__json_parse(text, size, path, &file.header, error);
    free(text);
    if (!status)
        status = read_tensors(path, &file, 8 + size, error);
    if (status)
        dray__stored_file_free(&file);
    else
        *out = file;
    return status;
}

void dray__stored_file_free(dray__stored_file *file)
{
    json_decref(file->header);
    free(file->tensors);
    *file = (dray__stored_file){0};
}

int dray__safetensors_is_shard(const char *name, unsigned *number, unsigned *count)
{
    const char tail[] = "-00000-of-00000.safetensors";
    size_t length = strlen(name), tail_length = sizeof tail - 1;
    if (length <= tail_length)
        return 0;
    const char *at = name + length - tail_length;
    for (size_t i = 0; i < tail_length; i++)
        if (tail[i] == '0' ? at[i] < '0' || at[i] > '9' : at[i] != tail[i])
            return 0;
    return sscanf(at, "-%5u-of-%5u", number, count) == 2;
}

/* Adds one file's region, tensors and blocks. weight_map is NULL when the file is in no index. */
static int add_file(dray_layout *layout, const char *folder, const char *name,
                    const json_t *weight_map, dray_error *error)
{
    char path[PATH_MAX];
    dray__stored_file file;
    int status = dray__safetensors_path(folder, name, "", path, error);
    if (!status)
        status = dray__safetensors_read(path, &file, error);
    if (status)
        return status;
    uint32_t region, tensor;
    dray_region_info info = {.kind = DRAY_REGION_FILE, .bytes = file.bytes, .name = path};
    status = dray_layout_add_region(layout, &info, &region, error);
    for (uint32_t i = 0; i < file.count && !status; i++) {
        const dray__file_tensor *t = &file.tensors[i];
        const int64_t zero[DRAY_MAX_DIMS] = {0};
        const char *said = json_string_value(json_object_get(weight_map, t->name));
        if (weight_map && (!said || strcmp(said, name) != 0)) {
            status = dray__fail(error, DRAY_EFORMAT,
                                "%.200s: tensor %.160s is not what the index says of this file",
                                path, t->name);
            break;
        }
        status =
            dray_layout_add_tensor(layout, t->name, t->dtype, t->ndim, t->shape, &tensor, error);
        if (status)
            dray__fail_prefix(error, status, "%.200s: ", path);
        else if (t->end > t->start)
            status = dray_layout_add_dense(layout, tensor, region, zero, t->shape, t->start, error);
    }
    dray__stored_file_free(&file);
    return status;
}

static int by_text(const void *a, const void *b)
{
    return strcmp(*(const char *const *)a, *(const char *const *)b);
}

/* Lists the index's files, each once, sorted. The caller frees *out; its names belong to the
 * JSON. */
static int index_files(const char *path, const json_t *weight_map, const char ***out, size_t *count,
                       dray_error *error)
{
    const char *tensor;
    json_t *value;
    size_t n = 0, kept = 0;
    if (!json_is_object(weight_map) || json_object_size(weight_map) == 0)
        return dray__fail(error, DRAY_EFORMAT,
                          "%.300s: weight_map: expected an object with the file of every tensor",
                          path);
    const char **files = malloc(json_object_size(weight_map) * sizeof *files);
    if (!files)
        return dray__nomem(error);
    json_object_foreach((json_t *)weight_map, tensor, value)
    {
        const char *name = json_string_value(value);
        if (!name || !*name || strchr(name, '/') || strcmp(name, "..") == 0 ||
            strcmp(name, ".") == 0) {
            free(files);
            return dray__fail(error, DRAY_EFORMAT,
                              "%.200s: weight_map: tensor %.100s: '%.80s' is not a file name "
                              "beside the index",
                              path, tensor, name ? name : "(not a string)");
        }
        files[n++] = name;
    }
    qsort(files, n, sizeof *files, by_text);
    for (size_t i = 0; i < n; i++)
        if (kept == 0 || strcmp(files[kept - 1], files[i]) != 0)
            files[kept++] = files[i];
    *out = files;
    *count = kept;
    return DRAY_OK;
}

static int add_index(dray_layout *layout, const char *folder, const char *name, dray_error *error)
{
    char path[PATH_MAX];
    json_t *json = NULL;
    const char **files = NULL;
    char *text = NULL;
    size_t count = 0, size;
    int status = dray__safetensors_path(folder, name, "", path, error);
    if (!status)
        status = dray__store_text(path, DRAY__SAFETENSORS_INDEX_MAX, &text, &size, error);
    if (!status)
        status = dray__json_parse(text, size, path, &json, error);
    free(text);
    const json_t *weight_map = json_object_get(json, "weight_map");
    if (!status)
        status = index_files(path, weight_map, &files, &count, error);
    for (size_t i = 0; i < count && !status; i++)
        status = add_file(layout, folder, files[i], weight_map, error);
    const char *tensor;
    json_t *value;
    if (!status && dray_layout_tensor_count(layout) != json_object_size(weight_map))
        json_object_foreach((json_t *)weight_map, tensor, value)
        {
            uint32_t index;
            if (dray_layout_find(layout, tensor, &index, NULL) == DRAY_OK)
                continue;
            status = dray__fail(error, DRAY_EFORMAT, "%.200s: tensor %.160s is not in %.80s", path,
                                tensor, json_string_value(value));
            break;
        }
    free(files);
    json_decref(json);
    return status;
}

typedef struct choosing {
    bool index, single;
    unsigned others;
    char *out;
    size_t capacity;
} choosing;

static void look_at_name(void *user, const char *name)
{
    choosing *c = user;
    c->index |= strcmp(name, DRAY__SAFETENSORS_INDEX) == 0;
    c->single |= strcmp(name, DRAY__SAFETENSORS_SINGLE) == 0;
    if (dray__ends_with(name, ".safetensors") && c->others++ == 0)
        snprintf(c->out, c->capacity, "%s", name);
}

/* Chooses the checkpoint file of a folder: the index, else model.safetensors, else the only
 * file. */
static int choose_file(const char *folder, char *out, size_t capacity, dray_error *error)
{
    choosing c = {.out = out, .capacity = capacity};
    int rc = dray__store_of(folder)->names(folder, look_at_name, &c, error);
    if (rc)
        return rc;
    unsigned others = c.others;
    if (c.index || c.single) {
        snprintf(out, capacity, "%s", c.index ? DRAY__SAFETENSORS_INDEX : DRAY__SAFETENSORS_SINGLE);
        return DRAY_OK;
    }
    if (others == 0)
        return dray__fail(error, DRAY_ENOENT, "%.300s: no .safetensors file in this folder",
                          folder);
    if (others > 1)
        return dray__fail(error, DRAY_EFORMAT, "%.300s: %u .safetensors files, but no %s", folder,
                          others, DRAY__SAFETENSORS_INDEX);
    unsigned number, count;
    if (dray__safetensors_is_shard(out, &number, &count) && count > 1)
        return dray__fail(error, DRAY_EFORMAT,
                          "%.200s: %.100s is one of %u files, but there is no %s", folder, out,
                          count, DRAY__SAFETENSORS_INDEX);
    return DRAY_OK;
}

/* In stores without folders the name's ending distinguishes files from folders. */
static int split_object(const char *path, char *folder, char *name, dray_error *error)
{
    int rc = dray__store_of(path)->resolve(path, folder, error);
    char *slash = rc ? NULL : strrchr(folder, '/');
    if (rc || (!dray__ends_with(folder, ".safetensors") && !dray__ends_with(folder, ".json")))
        return rc ? rc : choose_file(folder, name, NAME_MAX + 1, error);
    snprintf(name, NAME_MAX + 1, "%s", slash + 1);
    *slash = 0;
    return DRAY_OK;
}

/* Splits a path into the folder, absolute, and the file's name. */
static int split_path(const char *path, char *folder, char *name, dray_error *error)
{
    struct stat st;
    if (!dray__store_is_local(path))
        return split_object(path, folder, name, error);
    if (stat(path, &st) < 0)
        return errno == ENOENT || errno == ENOTDIR
                   ? dray__fail(error, DRAY_ENOENT, "%.300s: no such file or folder", path)
                   : dray__fail_errno(error, errno, "%.300s", path);
    if (S_ISDIR(st.st_mode)) {
        if (!realpath(path, folder))
            return dray__fail_errno(error, errno, "%.300s", path);
        return choose_file(folder, name, NAME_MAX + 1, error);
    }
    const char *slash = strrchr(path, '/');
    char parent[PATH_MAX];
    int n = slash ? snprintf(parent, sizeof parent, "%.*s/", (int)(slash - path), path)
                  : snprintf(parent, sizeof parent, ".");
    if (n < 0 || (size_t)n >= sizeof parent || !realpath(parent, folder))
        return dray__fail_errno(error, (size_t)n >= sizeof parent ? ENAMETOOLONG : errno, "%.300s",
                                path);
    snprintf(name, NAME_MAX + 1, "%s", slash ? slash + 1 : path);
    return DRAY_OK;
}

int dray_layout_safetensors(const char *path, dray_layout **out, dray_error *error)
{
    char folder[PATH_MAX], name[NAME_MAX + 1] = "";
    int status = split_path(path, folder, name, error);
    if (status)
        return status;
    dray_layout *layout;
    status = dray_layout_new(&layout, error);
    if (status)
        return status;
    status = dray__ends_with(name, ".json") ? add_index(layout, folder, name, error)
                                            : add_file(layout, folder, name, NULL, error);
    return dray__layout_give(layout, status, out);
}
