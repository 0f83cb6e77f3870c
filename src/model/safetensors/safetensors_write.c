/* Writes safetensors checkpoints in two steps: begin lays out the files and creates them with their
 * headers, the caller fills them, and finish makes them the folder's checkpoint. A reader that
 * opens the folder at any moment finds the old checkpoint or the new one, never a mixture. */
#include "model/layout/layout.h"
#include "model/safetensors/safetensors.h"

#include "base/error.h"
#include "base/io.h"
#include "base/json.h"
#include "base/options.h"
#include "base/wire.h"

#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <inttypes.h>
#include <limits.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#define PARTIAL ".partial"
#define DEFAULT_FILE_BYTES (UINT64_C(5) << 30)

/* The order of the data in a file is that of the reference implementation (its Dtype enum,
 * largest alignment first, then names), so that every tensor is aligned to its element. */
static const dray_dtype storage_order[] = {
    DRAY_U64, DRAY_I64, DRAY_F64,    DRAY_F32,    DRAY_U32, DRAY_I32, DRAY_BF16, DRAY_F16,
    DRAY_U16, DRAY_I16, DRAY_F8E4M3, DRAY_F8E5M2, DRAY_I8,  DRAY_U8,  DRAY_BOOL,
};

static unsigned storage_rank(int32_t dtype)
{
    unsigned i = 0;
    while (i < sizeof storage_order / sizeof *storage_order && (int32_t)storage_order[i] != dtype)
        i++;
    return i;
}

/* One tensor that is to be written into a file. */
typedef struct file_tensor {
    const dray_tensor_info *info;
    uint32_t tensor; /* index in the new layout */
    uint32_t file;
    uint64_t bytes;
    uint64_t at;       /* offset from the end of the header */
    const char *value; /* NULL when there is none */
} file_tensor;

typedef struct writing {
    char folder[PATH_MAX];
    json_t *metadata;
    const char *values_key; /* NULL when there is none */
    const char *const *values;
    uint64_t max_file_bytes;
    file_tensor *items;
    uint32_t count, files;
    uint32_t created; /* the files that exist as partials, which are removed when begin fails */
    dray_layout *layout;
} writing;

/* The possible beginnings of shards' names. The one that the folder's present index does not use is
 * taken, so that old and new shards exist side by side until the index is replaced. */
static const char *const stems[] = {"model", "model-b"};
enum { STEMS = sizeof stems / sizeof *stems };

static void file_name(const char *stem, uint32_t file, uint32_t files, char *out, size_t capacity)
{
    if (files == 1)
        snprintf(out, capacity, DRAY__SAFETENSORS_SINGLE);
    else
        snprintf(out, capacity, "%s-%05u-of-%05u.safetensors", stem, file + 1, files);
}

static int partial_path(const writing *w, uint32_t file, char *out, dray_error *error)
{
    char name[64];
    file_name(stems[0], file, w->files, name, sizeof name);
    return dray__safetensors_path(w->folder, name, PARTIAL, out, error);
}

static int read_options(const dray_safetensors_options *given, writing *w, dray_error *error)
{
    dray_safetensors_options options = DRAY_SAFETENSORS_OPTIONS_INIT;
    int status =
        DRAY__OPTIONS_READ(dray_safetensors_options, metadata_json, &options, given, error);
    if (status)
        return status;
    w->max_file_bytes = options.max_file_bytes ? options.max_file_bytes : DEFAULT_FILE_BYTES;
    if ((options.values_key != NULL) != (options.tensor_values != NULL))
        return dray__fail(error, DRAY_EINVALID,
                          "values_key and tensor_values: both or neither must be given");
    w->values_key = options.values_key;
    w->values = options.tensor_values;
    const char *text = options.metadata_json ? options.metadata_json : "{\"format\":\"pt\"}";
    status = dray__json_parse(text, strlen(text), "metadata_json", &w->metadata, error);
    return status ? status
                  : dray__safetensors_check_metadata(w->metadata, "metadata_json", DRAY_EINVALID,
                                                     error);
}

static int open_folder(const char *directory, writing *w, dray_error *error)
{
    struct stat st;
    char parent[PATH_MAX];
    bool made = mkdir(directory, 0777) == 0;
    if (!made && errno != EEXIST)
        return dray__fail_errno(error, errno, "%.300s", directory);
    if (!realpath(directory, w->folder) || stat(w->folder, &st) < 0)
        return dray__fail_errno(error, errno, "%.300s", directory);
    if (!S_ISDIR(st.st_mode))
        return dray__fail(error, DRAY_EINVALID, "%.300s: not a folder", directory);
    if (!made)
        return DRAY_OK;
    const char *slash = strrchr(w->folder, '/');
    snprintf(parent, sizeof parent, "%.*s/", (int)(slash - w->folder), w->folder);
    return dray__sync_folder(parent, error);
}

/* Returns an upper bound of the bytes of the tensor's entry in the header. */
static uint64_t entry_bytes(const char *name)
{
    enum { FIXED = 160 }; /* keys, a dtype, two offsets and four sizes of at most 19 digits */
    uint64_t bytes = FIXED;
    for (; *name; name++)
        bytes += (unsigned char)*name < 0x20 ? 6 : *name == '"' || *name == '\\' ? 2 : 1;
    return bytes;
}

/* Fills files one after the other, in the layout's order. A tensor that is larger than a file
 * may be gets a file of its own. */
static int assign_files(const dray_layout *like, writing *w, dray_error *error)
{
    uint32_t count = dray_layout_tensor_count(like);
    uint64_t fixed = 64, used;
    char *metadata = dray__json_text(w->metadata, JSON_COMPACT);
    w->items = calloc(count + 1, sizeof *w->items);
    if (!w->items || !metadata) {
        free(metadata);
        return dray__nomem(error);
    }
    fixed += strlen(metadata) + (w->values_key ? entry_bytes(w->values_key) : 0);
    free(metadata);
    used = fixed;
    w->files = 1;
    for (uint32_t i = 0; i < count; i++) {
        const dray_tensor_info *info = dray_layout_tensor(like, i);
        int64_t bytes = 0;
        if (info->alias_of >= 0 || dray__layout_name_only(like, i))
            continue;
        if (strcmp(info->name, "__metadata__") == 0)
            return dray__fail(error, DRAY_EINVALID, "a tensor cannot be called __metadata__");
        dray__dense_bytes((dray_dtype)info->dtype, info->ndim, info->shape, &bytes);
        const char *value = w->values ? w->values[i] : NULL;
        uint64_t more = (uint64_t)bytes + entry_bytes(info->name);
        if (value) /* It is quoted twice, as an object in a string. */
            more += 2 * (entry_bytes(info->name) + entry_bytes(value));
        if (used > fixed && (used > w->max_file_bytes || more > w->max_file_bytes - used)) {
            w->files++;
            used = fixed;
        }
        used += more;
        w->items[w->count++] = (file_tensor){
            .info = info, .file = w->files - 1, .bytes = (uint64_t)bytes, .value = value};
    }
    if (w->files > 99999)
        return dray__fail(error, DRAY_EINVALID, "%u files are too many: raise max_file_bytes",
                          w->files);
    return DRAY_OK;
}

static int by_storage(const void *a, const void *b)
{
    const file_tensor *x = a, *y = b;
    if (x->file != y->file)
        return x->file < y->file ? -1 : 1;
    unsigned i = storage_rank(x->info->dtype), j = storage_rank(y->info->dtype);
    if (i != j)
        return i < j ? -1 : 1;
    return strcmp(x->info->name, y->info->name);
}

static json_t *header_entry(const file_tensor *it)
{
    json_t *shape = json_array();
    for (uint32_t d = 0; d < it->info->ndim; d++)
        dray__json_append(&shape, json_integer(it->info->shape[d]));
    uint64_t end = it->at + it->bytes;
    return json_pack("{s:s, s:o, s:[I, I]}", "dtype", dray_dtype_name((dray_dtype)it->info->dtype),
                     "shape", shape, "data_offsets", (json_int_t)it->at, (json_int_t)end);
}

/* Returns the metadata of the file whose items are [first, end), or NULL when out of memory. */
static json_t *file_metadata(const writing *w, uint32_t first, uint32_t end)
{
    if (!w->values_key)
        return json_incref(w->metadata);
    json_t *metadata = json_copy(w->metadata), *values = json_object();
    for (uint32_t i = first; i < end; i++)
        if (w->items[i].value)
            dray__json_set(&values, w->items[i].info->name, json_string(w->items[i].value));
    char *text = dray__json_text(values, JSON_COMPACT);
    if (!text || json_object_set_new(metadata, w->values_key, json_string(text)) < 0) {
        json_decref(metadata);
        metadata = NULL;
    }
    free(text);
    json_decref(values);
    return metadata;
}

/* Writes the header of the file whose items are [first, end), with its length in front, padded
 * to 8 bytes. Sets the items' places. */
static int make_header(writing *w, uint32_t first, uint32_t end, dray__writer *out,
                       dray_error *error)
{
    json_t *header = json_object();
    uint64_t at = 0;
    json_t *metadata = file_metadata(w, first, end);
    bool ok = metadata && json_object_set_new(header, "__metadata__", metadata) == 0;
    for (uint32_t i = first; i < end && ok; i++) {
        w->items[i].at = at;
        if (__builtin_add_overflow(at, w->items[i].bytes, &at) || at > INT64_MAX / 2) {
            json_decref(header);
            return dray__fail(error, DRAY_EINVALID, "tensor %.200s: the checkpoint is too large",
                              w->items[i].info->name);
        }
        ok = json_object_set_new(header, w->items[i].info->name, header_entry(&w->items[i])) == 0;
    }
    char *text = ok ? dray__json_text(header, JSON_COMPACT) : NULL;
    json_decref(header);
    if (!text)
        return dray__nomem(error);
    size_t length = strlen(text), padded = (length + 7) / 8 * 8;
    dray__put_u64(out, padded);
    dray__put_bytes(out, text, length);
    for (; length < padded; length++)
        dray__put_u8(out, ' ');
    free(text);
    if (padded > DRAY__SAFETENSORS_HEADER_MAX)
        return dray__fail(error, DRAY_EINVALID,
                          "a header of %zu bytes exceeds the format's limit of %d: lower "
                          "max_file_bytes",
                          padded, DRAY__SAFETENSORS_HEADER_MAX);
    return dray__writer_check(out, error);
}

/* Allocates the file's blocks, so that a full disk is noticed now. Where the file system cannot
 * do so, only the size is set. */
static int set_size(int fd, uint64_t bytes)
{
    if (fallocate(fd, 0, 0, (off_t)bytes) == 0)
        return 0;
    return errno == EOPNOTSUPP || errno == ENOSYS ? ftruncate(fd, (off_t)bytes) : -1;
}

static int create_file(writing *w, const char *path, const dray__writer *header, uint64_t bytes,
                       dray_error *error)
{
    if (unlink(path) < 0 && errno != ENOENT) /* A killed writer left this file. */
        return dray__fail_errno(error, errno, "%.300s", path);
    int fd = open(path, O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC, 0666);
    if (fd < 0)
        return dray__fail_errno(error, errno, "%.300s", path);
    w->created++;
    int status = DRAY_OK;
    if (dray__write_all(fd, header->data, header->size) < 0 || set_size(fd, bytes) < 0)
        status = dray__fail_errno(error, errno, "%.300s: %" PRIu64 " bytes", path, bytes);
    if (close(fd) < 0 && !status)
        status = dray__fail_errno(error, errno, "%.300s", path);
    return status;
}

/* Creates file number `file`, and adds its region, tensors and blocks. */
static int begin_file(writing *w, uint32_t file, uint32_t first, uint32_t end, dray_error *error)
{
    char path[PATH_MAX];
    dray__writer header = {0};
    uint64_t bytes = 0;
    int status = partial_path(w, file, path, error);
    if (!status)
        status = make_header(w, first, end, &header, error);
    if (!status) {
        bytes = header.size + (end > first ? w->items[end - 1].at + w->items[end - 1].bytes : 0);
        status = create_file(w, path, &header, bytes, error);
    }
    uint32_t region;
    dray_region_info info = {.kind = DRAY_REGION_FILE, .bytes = bytes, .name = path};
    if (!status)
        status = dray_layout_add_region(w->layout, &info, &region, error);
    for (uint32_t i = first; i < end && !status; i++) {
        const int64_t zero[DRAY_MAX_DIMS] = {0};
        file_tensor *it = &w->items[i];
        status = dray_layout_add_tensor(w->layout, it->info->name, (dray_dtype)it->info->dtype,
                                        it->info->ndim, it->info->shape, &it->tensor, error);
        if (!status && it->bytes > 0)
            status = dray_layout_add_dense(w->layout, it->tensor, region, zero, it->info->shape,
                                           header.size + it->at, error);
    }
    dray__writer_free(&header);
    return status;
}

static int begin_files(writing *w, dray_error *error)
{
    uint32_t first = 0;
    qsort(w->items, w->count, sizeof *w->items, by_storage);
    for (uint32_t file = 0; file < w->files; file++) {
        uint32_t end = first;
        while (end < w->count && w->items[end].file == file)
            end++;
        int status = begin_file(w, file, first, end, error);
        if (status)
            return status;
        first = end;
    }
    return DRAY_OK;
}

static void remove_partials(const writing *w)
{
    char path[PATH_MAX];
    for (uint32_t file = 0; file < w->created; file++)
        if (partial_path(w, file, path, NULL) == DRAY_OK)
            unlink(path);
}

int dray_safetensors_begin(const char *directory, const dray_layout *like,
                           const dray_safetensors_options *options, dray_layout **out,
                           dray_error *error)
{
    writing w = {0};
    int status = read_options(options, &w, error);
    if (!status)
        status = assign_files(like, &w, error);
    if (!status)
        status = open_folder(directory, &w, error);
    if (!status)
        status = dray_layout_new(&w.layout, error);
    if (!status)
        status = begin_files(&w, error);
    json_decref(w.metadata);
    if (status) {
        remove_partials(&w);
        dray_layout_free(w.layout);
    } else {
        *out = w.layout;
    }
    free(w.items);
    return status;
}

/* ---- finish ---------------------------------------------------------------------------------- */

typedef struct finishing {
    char folder[PATH_MAX];
    int fd; /* of the folder */
    const dray_layout *layout;
    uint32_t files;
    const char *stem;
    json_t *weight_map;
    uint64_t total_size;
} finishing;

static int sync_fd(int fd, const char *path, dray_error *error)
{
    return fsync(fd) < 0 ? dray__fail_errno(error, errno, "%.300s: fsync", path) : DRAY_OK;
}

/* Checks that a partial file is still as begin made it (same path, size and tensors), syncs it to
 * the disk, and adds its tensors to the index. */
static int finish_partial(finishing *f, uint32_t file, dray_error *error)
{
    char name[64], path[PATH_MAX];
    file_name(stems[0], file, f->files, name, sizeof name);
    int status = dray__safetensors_path(f->folder, name, PARTIAL, path, error);
    if (status)
        return status;
    const dray_region_info *region = dray_layout_region(f->layout, file);
    if (region->kind != DRAY_REGION_FILE || strcmp(region->name, path) != 0)
        return dray__fail(error, DRAY_EINVALID,
                          "%.200s: region %u is '%.160s': not a layout begun in this folder", path,
                          file, region->name);
    dray__stored_file stored;
    file_name(f->stem, file, f->files, name, sizeof name);
    status = dray__safetensors_read(path, &stored, error);
    if (status)
        return status;
    if (stored.bytes != region->bytes)
        status = dray__fail(error, DRAY_EFORMAT, "%.300s: %" PRIu64 " bytes, %" PRIu64 " begun",
                            path, stored.bytes, region->bytes);
    for (uint32_t i = 0; i < stored.count && !status; i++) {
        uint32_t tensor;
        const dray__file_tensor *t = &stored.tensors[i];
        status = dray_layout_find(f->layout, t->name, &tensor, error);
        f->total_size += t->end - t->start;
        if (!status && json_object_set_new(f->weight_map, t->name, json_string(name)) < 0)
            status = dray__nomem(error);
    }
    dray__stored_file_free(&stored);
    int fd = status ? -1 : open(path, O_RDONLY | O_CLOEXEC);
    if (!status && fd < 0)
        status = dray__fail_errno(error, errno, "%.300s", path);
    if (!status)
        status = sync_fd(fd, path, error);
    if (fd >= 0)
        close(fd);
    return status;
}

static int rename_in(const finishing *f, const char *from, const char *to, dray_error *error)
{
    if (renameat(f->fd, from, f->fd, to) < 0)
        return dray__fail_errno(error, errno, "%.200s: rename %s to %s", f->folder, from, to);
    return DRAY_OK;
}

static int write_index(const finishing *f, dray_error *error)
{
    json_t *index = json_pack("{s:{s:I}, s:O}", "metadata", "total_size", (json_int_t)f->total_size,
                              "weight_map", f->weight_map);
    char *text = index ? dray__json_text(index, JSON_INDENT(2) | JSON_SORT_KEYS) : NULL;
    json_decref(index);
    if (!text)
        return dray__nomem(error);
    int status = DRAY_OK;
    int fd = openat(f->fd, DRAY__SAFETENSORS_INDEX PARTIAL,
                    O_WRONLY | O_CREAT | O_TRUNC | O_NOFOLLOW | O_CLOEXEC, 0666);
    if (fd < 0 || dray__write_all(fd, text, strlen(text)) < 0 || fsync(fd) < 0)
        status =
            dray__fail_errno(error, errno, "%.200s/%s", f->folder, DRAY__SAFETENSORS_INDEX PARTIAL);
    free(text);
    if (fd >= 0 && close(fd) < 0 && !status)
        status =
            dray__fail_errno(error, errno, "%.200s/%s", f->folder, DRAY__SAFETENSORS_INDEX PARTIAL);
    if (!status)
        status = rename_in(f, DRAY__SAFETENSORS_INDEX PARTIAL, DRAY__SAFETENSORS_INDEX, error);
    return status ? status : sync_fd(f->fd, f->folder, error);
}

static int remove_index(const finishing *f, dray_error *error)
{
    if (unlinkat(f->fd, DRAY__SAFETENSORS_INDEX, 0) < 0)
        return errno == ENOENT ? DRAY_OK
                               : dray__fail_errno(error, errno, "%.200s/%s", f->folder,
                                                  DRAY__SAFETENSORS_INDEX);
    return sync_fd(f->fd, f->folder, error);
}

/* Reads the stem and the numbers of a shard's name, "model-00001-of-00002.safetensors". Returns
 * NULL when it is not one of ours. */
static const char *stem_of(const char *name, unsigned *number, unsigned *count)
{
    size_t tail = strlen("-00001-of-00002.safetensors"), length = strlen(name);
    if (length <= tail || !dray__safetensors_is_shard(name, number, count))
        return NULL;
    for (size_t i = 0; i < STEMS; i++)
        if (strlen(stems[i]) == length - tail && strncmp(stems[i], name, length - tail) == 0)
            return stems[i];
    return NULL;
}

/* Takes the first stem of which the present index names no file, or NULL when it names files of
 * every stem. An index that cannot be read is no checkpoint, so nothing is lost with its files. */
static int choose_stem(finishing *f, dray_error *error)
{
    char path[PATH_MAX];
    const char *tensor;
    json_t *index = NULL, *value;
    bool used[STEMS] = {false};
    int status = dray__safetensors_path(f->folder, DRAY__SAFETENSORS_INDEX, "", path, error);
    if (status)
        return status;
    if (f->files > 1)
        status = dray__json_load(path, DRAY__SAFETENSORS_INDEX_MAX, &index, error);
    if (status == DRAY_ENOMEM || status == DRAY_ESYS)
        return status;
    json_object_foreach(json_object_get(index, "weight_map"), tensor, value)
    {
        unsigned number, count;
        const char *name = json_string_value(value);
        const char *stem = name ? stem_of(name, &number, &count) : NULL;
        for (size_t i = 0; i < STEMS; i++)
            used[i] |= stem == stems[i] && count == f->files;
    }
    json_decref(index);
    for (size_t i = STEMS; i-- > 0;)
        if (!used[i])
            f->stem = stems[i];
    return DRAY_OK;
}

/* Removes files of an earlier checkpoint of ours that the new one does not mention. */
static int remove_stale(const finishing *f, dray_error *error)
{
    int copy = openat(f->fd, ".", O_RDONLY | O_DIRECTORY | O_CLOEXEC);
    DIR *dir = copy < 0 ? NULL : fdopendir(copy);
    if (!dir) {
        int problem = errno;
        if (copy >= 0)
            close(copy);
        return dray__fail_errno(error, problem, "%.300s", f->folder);
    }
    for (struct dirent *entry; (entry = readdir(dir));) {
        char name[NAME_MAX + 1], ours[64];
        unsigned number, count;
        snprintf(name, sizeof name, "%s", entry->d_name);
        size_t length = strlen(name), tail = strlen(PARTIAL);
        bool partial = length > tail && strcmp(name + length - tail, PARTIAL) == 0;
        if (partial)
            name[length - tail] = 0;
        const char *stem = stem_of(name, &number, &count);
        bool single = strcmp(name, DRAY__SAFETENSORS_SINGLE) == 0;
        if (partial && strcmp(name, DRAY__SAFETENSORS_INDEX) == 0)
            unlinkat(f->fd, entry->d_name, 0); /* A killed writer left it. */
        if (!stem && !single)
            continue;
        file_name(f->stem, stem ? number - 1 : 0, f->files, ours, sizeof ours);
        bool keep = !partial && (f->files == 1 ? single : stem && count == f->files);
        if (!keep || strcmp(name, ours) != 0)
            /* A file that cannot be removed does no harm, as no reader opens it. */
            unlinkat(f->fd, entry->d_name, 0);
    }
    closedir(dir);
    return sync_fd(f->fd, f->folder, error);
}

/* The order of these steps makes the change atomic. A single file replaces model.safetensors,
 * and only then an older index is removed. Shards are put in place beside an older
 * model.safetensors, or beside the older index and its shards, and become visible with their
 * index. */
static int put_in_place(const finishing *f, dray_error *error)
{
    int status = DRAY_OK;
    for (uint32_t i = 0; i < f->files && !status; i++) {
        char name[64], begun[64], partial[80];
        file_name(f->stem, i, f->files, name, sizeof name);
        file_name(stems[0], i, f->files, begun, sizeof begun);
        snprintf(partial, sizeof partial, "%s" PARTIAL, begun);
        status = rename_in(f, partial, name, error);
    }
    if (!status)
        status = sync_fd(f->fd, f->folder, error);
    if (!status)
        status = f->files == 1 ? remove_index(f, error) : write_index(f, error);
    return status ? status : remove_stale(f, error);
}

static int finish_all(finishing *f, dray_error *error)
{
    int status = choose_stem(f, error);
    if (!status && !f->stem)
        status = dray__fail(error, DRAY_EEXIST,
                            "%.200s: its index names files of both %s-* and %s-*; remove it first",
                            f->folder, stems[0], stems[1]);
    for (uint32_t i = 0; i < f->files && !status; i++)
        status = finish_partial(f, i, error);
    if (!status && json_object_size(f->weight_map) != dray_layout_tensor_count(f->layout))
        status = dray__fail(error, DRAY_EINVALID,
                            "%.200s: %zu tensors in the files, %u in the layout", f->folder,
                            json_object_size(f->weight_map), dray_layout_tensor_count(f->layout));
    return status ? status : put_in_place(f, error);
}

int dray_safetensors_finish(const char *directory, const dray_layout *layout, dray_error *error)
{
    finishing f = {.fd = -1, .layout = layout, .files = dray_layout_region_count(layout)};
    if (f.files < 1 || f.files > 99999)
        return dray__fail(error, DRAY_EINVALID, "%.300s: a layout of %u files", directory, f.files);
    if (!realpath(directory, f.folder))
        return dray__fail_errno(error, errno, "%.300s", directory);
    f.fd = open(f.folder, O_RDONLY | O_DIRECTORY | O_CLOEXEC);
    if (f.fd < 0)
        return dray__fail_errno(error, errno, "%.300s", directory);
    f.weight_map = json_object();
    int status = f.weight_map ? finish_all(&f, error) : dray__nomem(error);
    json_decref(f.weight_map);
    close(f.fd);
    return status;
}
