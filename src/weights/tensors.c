/* Lists of handles: for each name, one handle for each rank. The wire form, little-endian:
 *
 *   magic u32, version u32, flush_cache u32, ranks u32, load_format string, tensors u32,
 *   for each: name string, for each rank: descriptor u32 (2^32 - 1: none), the packed handle;
 *   checksum u64 (XXH3 of all bytes before it)
 *
 * It replaces SGLang's LocalSerializedTensor, whose values are pickled (base64 of ForkingPickler,
 * one a TP rank). */
#include "base/arena.h"
#include "base/error.h"
#include "base/hash.h"
#include "weights/internal.h"

#include <errno.h>
#include <fcntl.h>
#include <inttypes.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

static const dray__envelope form = {"list of handles", 0x4c595244u /* "DRYL" */, 1};
#define NO_FD UINT32_MAX

enum { FORMAT_MAX = 255, HANDLE_ROOM = 1024, RANKS_MAX = 1 << 16 };

typedef struct rank_entry { /* of one rank */
    dray_handle handle;
    uint32_t fd; /* index into the list's descriptors */
} rank_entry;

typedef struct tensor {
    char *name;
    rank_entry *entries;
} tensor;

struct dray_tensor_list {
    char *load_format;
    int32_t flush_cache;
    uint32_t ranks;
    dray__map names;
    tensor *tensors;
    uint32_t count;
    uint64_t capacity;
    int *fds;
    uint32_t fd_count;
    uint64_t fd_capacity;
    bool owns_fds; /* when it was unpacked */
    /* storages that were opened: by descriptor, then those without one */
    struct storage {
        dray_handle handle;
        dray_region *region;
    } * storages;
    uint32_t storage_count;
    uint64_t storage_capacity;
};

/* ---- making ---------------------------------------------------------------------------------- */

int dray_tensor_list_new(const char *load_format, int32_t flush_cache, dray_tensor_list **out,
                         dray_error *error)
{
    const char *format = load_format ? load_format : "";
    if (!out || strlen(format) > FORMAT_MAX || !dray__utf8_valid(format, strlen(format)))
        return dray__fail(error, DRAY_EINVALID,
                          "out must be given, load_format be UTF-8 of at most %d bytes",
                          FORMAT_MAX);
    dray_tensor_list *l = calloc(1, sizeof *l);
    if (!l || !(l->load_format = strdup(format))) {
        free(l);
        return dray__nomem(error);
    }
    l->flush_cache = flush_cache != 0;
    *out = l;
    return DRAY_OK;
}

void dray_tensor_list_free(dray_tensor_list *l)
{
    if (!l)
        return;
    for (uint32_t i = 0; i < l->count; i++) {
        free(l->tensors[i].name);
        free(l->tensors[i].entries);
    }
    for (uint32_t i = 0; i < l->storage_count; i++)
        dray_region_free(l->storages[i].region);
    for (uint32_t i = 0; l->owns_fds && i < l->fd_count; i++)
        close(l->fds[i]);
    dray__map_free(&l->names);
    free(l->load_format);
    free(l->tensors);
    free(l->storages);
    free(l->fds);
    free(l);
}

/* Makes room for one more tensor with its entries; the caller counts it once it is complete.
 * Returns NULL when out of memory. */
static tensor *add_tensor(dray_tensor_list *l, char *name, uint32_t ranks)
{
    tensor *t = dray__append(&l->tensors, sizeof *t, l->count, &l->capacity);
    if (!t)
        return NULL;
    *t = (tensor){.name = name, .entries = calloc(ranks, sizeof *t->entries)};
    return t->entries ? t : NULL;
}

static bool same_storage(const dray_handle *a, const dray_handle *b)
{
    return a->kind == b->kind && a->storage_bytes == b->storage_bytes &&
           memcmp(a->key, b->key, sizeof a->key) == 0 &&
           memcmp(a->device, b->device, sizeof a->device) == 0 && strcmp(a->path, b->path) == 0;
}

/* Finds the descriptor in the list, or adds it, so that each storage's is sent once. Nearly always
 * the previous tensor has the same one. */
static int place_fd(dray_tensor_list *l, rank_entry *e, int fd, uint32_t rank, dray_error *error)
{
    e->fd = NO_FD;
    if (fd < 0)
        return DRAY_OK;
    for (uint32_t i = l->count; i-- > 0;)
        for (uint32_t r = 0; r < l->ranks; r++) {
            const rank_entry *known = &l->tensors[i].entries[(rank + r) % l->ranks];
            if (known->fd != NO_FD && same_storage(&known->handle, &e->handle)) {
                e->fd = known->fd;
                return DRAY_OK;
            }
        }
    if (!dray__append(&l->fds, sizeof *l->fds, l->fd_count, &l->fd_capacity))
        return dray__nomem(error);
    l->fds[l->fd_count] = fd;
    e->fd = l->fd_count++;
    return DRAY_OK;
}

static int take_entry(dray_tensor_list *l, rank_entry *e, const dray_handle *given, int fd,
                      uint32_t rank, dray_error *error)
{
    uint8_t packed[HANDLE_ROOM];
    int rc = dray_handle_pack(given, packed, sizeof packed, error); /* this checks the handle */
    e->handle = (dray_handle)DRAY_HANDLE_INIT;
    if (rc == DRAY_OK)
        rc = dray_handle_unpack(packed, dray_handle_packed_size(), &e->handle, error);
    if (rc == DRAY_OK && e->handle.kind == DRAY_REGION_SHARED && fd < 0)
        rc = dray__fail(error, DRAY_EINVALID, "a shared handle goes with its descriptor");
    return rc ? rc : place_fd(l, e, fd, rank, error);
}

int dray_tensor_list_add(dray_tensor_list *l, const char *name, const dray_handle *handles,
                         const int *fds, uint32_t ranks, dray_error *error)
{
    uint32_t known;
    if (!l || !name || !handles || !fds || ranks < 1 || ranks > RANKS_MAX)
        return dray__fail(error, DRAY_EINVALID,
                          "list, name, handles, descriptors and 1 to %d ranks", RANKS_MAX);
    if (!name[0] || strlen(name) > DRAY__TENSOR_NAME_MAX || !dray__utf8_valid(name, strlen(name)))
        return dray__fail(error, DRAY_EINVALID, "tensor names are UTF-8 of 1 to %d bytes",
                          DRAY__TENSOR_NAME_MAX);
    if (dray__map_get(&l->names, name, &known))
        return dray__fail(error, DRAY_EEXIST, "tensor %s is in the list", name);
    if (l->count && l->ranks != ranks)
        return dray__fail(error, DRAY_EINVALID,
                          "tensor %s: %" PRIu32 " handles, the others have %" PRIu32, name, ranks,
                          l->ranks);
    char *own = strdup(name);
    tensor *t = own ? add_tensor(l, own, ranks) : NULL;
    uint32_t fds_before = l->fd_count;
    int rc = t ? DRAY_OK : dray__nomem(error);
    l->ranks = ranks;
    for (uint32_t r = 0; r < ranks && rc == DRAY_OK; r++) {
        rc = take_entry(l, &t->entries[r], &handles[r], fds[r], r, error);
        if (rc == DRAY_OK && t->entries[r].handle.dtype != t->entries[0].handle.dtype)
            rc = dray__fail(error, DRAY_EINVALID, "handles of several dtypes");
        if (rc)
            dray__fail_prefix(error, rc, "tensor %s, rank %" PRIu32 ": ", name, r);
    }
    if (rc == DRAY_OK && !dray__map_set(&l->names, name, l->count))
        rc = dray__nomem(error);
    if (rc) {
        l->fd_count = fds_before;
        if (t)
            free(t->entries);
        free(own);
        return rc;
    }
    l->count++;
    return DRAY_OK;
}

/* ---- the wire form --------------------------------------------------------------------------- */

int dray_tensor_list_pack(const dray_tensor_list *l, void **out, size_t *size, const int **fds,
                          uint32_t *fd_count, dray_error *error)
{
    if (!l || !out || !size || !fds || !fd_count)
        return dray__fail(error, DRAY_EINVALID, "list and outputs must be given");
    dray__writer w = {0};
    dray__envelope_begin(&form, &w);
    dray__put_u32(&w, (uint32_t)l->flush_cache);
    dray__put_u32(&w, l->ranks);
    dray__put_string(&w, l->load_format);
    dray__put_u32(&w, l->count);
    int rc = DRAY_OK;
    for (uint32_t i = 0; i < l->count && rc == DRAY_OK; i++) {
        dray__put_string(&w, l->tensors[i].name);
        for (uint32_t r = 0; r < l->ranks && rc == DRAY_OK; r++) {
            dray__put_u32(&w, l->tensors[i].entries[r].fd);
            void *room = dray__put_space(&w, dray_handle_packed_size());
            rc = room ? dray_handle_pack(&l->tensors[i].entries[r].handle, room,
                                         dray_handle_packed_size(), error)
                      : dray__nomem(error);
        }
    }
    rc = dray__envelope_end(&w, rc, out, size, error);
    if (rc)
        return rc;
    *fds = l->fds;
    *fd_count = l->fd_count;
    return DRAY_OK;
}

static int get_entry(dray__reader *r, uint32_t fd_count, rank_entry *e, dray_error *error)
{
    e->fd = dray__get_u32(r);
    const void *packed = dray__get_bytes(r, dray_handle_packed_size());
    if (!packed)
        return dray__reader_finish(r, "list of handles", error);
    e->handle = (dray_handle)DRAY_HANDLE_INIT;
    int rc = dray_handle_unpack(packed, dray_handle_packed_size(), &e->handle, error);
    if (rc)
        return rc;
    bool needs = e->handle.kind == DRAY_REGION_SHARED;
    if (needs != (e->fd != NO_FD))
        return dray__fail(error, DRAY_EFORMAT,
                          "list of handles: a descriptor where none belongs, or "
                          "none where one does");
    return !needs || e->fd < fd_count
               ? DRAY_OK
               : dray__fail(error, DRAY_EINVALID,
                            "list of handles: descriptor %" PRIu32 " of %" PRIu32 " that came",
                            e->fd, fd_count);
}

static int get_tensor(dray__reader *r, dray_tensor_list *l, uint32_t fd_count, dray_error *error)
{
    uint32_t known;
    char *name = dray__get_string(r, DRAY__TENSOR_NAME_MAX);
    if (!name || r->failed || !name[0]) {
        free(name);
        return dray__fail(error, DRAY_EFORMAT, "list of handles: a tensor without a name");
    }
    bool twice = dray__map_get(&l->names, name, &known);
    tensor *t = twice ? NULL : add_tensor(l, name, l->ranks);
    int rc = twice ? dray__fail(error, DRAY_EFORMAT, "list of handles: %s twice", name)
             : t   ? DRAY_OK
                   : dray__nomem(error);
    for (uint32_t i = 0; i < l->ranks && rc == DRAY_OK; i++)
        rc = get_entry(r, fd_count, &t->entries[i], error);
    if (rc == DRAY_OK && !dray__map_set(&l->names, name, l->count))
        rc = dray__nomem(error);
    if (rc) {
        if (t)
            free(t->entries);
        free(name);
        return rc;
    }
    l->count++;
    return DRAY_OK;
}

static int keep_fds(dray_tensor_list *l, const int *fds, uint32_t fd_count, dray_error *error)
{
    l->fds = calloc((size_t)fd_count + 1, sizeof *l->fds);
    if (!l->fds)
        return dray__nomem(error);
    l->fd_capacity = fd_count + UINT64_C(1);
    l->owns_fds = true;
    for (; l->fd_count < fd_count; l->fd_count++) {
        l->fds[l->fd_count] = fcntl(fds[l->fd_count], F_DUPFD_CLOEXEC, 3);
        if (l->fds[l->fd_count] < 0)
            return dray__fail_errno(error, errno, "descriptor %" PRIu32 " of a list of handles",
                                    l->fd_count);
    }
    return DRAY_OK;
}

static int unpack(dray__reader *r, dray_tensor_list *l, const int *fds, uint32_t fd_count,
                  dray_error *error)
{
    uint32_t flush = dray__get_u32(r);
    l->ranks = dray__get_u32(r);
    l->load_format = dray__get_string(r, FORMAT_MAX);
    size_t least = sizeof(uint32_t) + (sizeof(uint32_t) + dray_handle_packed_size()) *
                                          (l->ranks < RANKS_MAX ? l->ranks : RANKS_MAX);
    uint32_t count = dray__get_count(r, least);
    l->flush_cache = flush == 1;
    if (r->failed || !l->load_format || flush > 1 || l->ranks > RANKS_MAX || (count && !l->ranks))
        return dray__fail(error, DRAY_EFORMAT, "list of handles: not one");
    int rc = keep_fds(l, fds, fd_count, error);
    for (uint32_t i = 0; i < count && rc == DRAY_OK; i++)
        rc = get_tensor(r, l, fd_count, error);
    return rc ? rc : dray__reader_finish(r, "list of handles", error);
}

int dray_tensor_list_unpack(const void *data, size_t size, const int *fds, uint32_t fd_count,
                            dray_tensor_list **out, dray_error *error)
{
    if (!data || !out || (fd_count && !fds))
        return dray__fail(error, DRAY_EINVALID, "data, descriptors and out must be given");
    dray__reader r;
    int rc = dray__envelope_open(&form, data, size, &r, error);
    if (rc)
        return rc;
    dray_tensor_list *l = calloc(1, sizeof *l);
    rc = l ? unpack(&r, l, fds, fd_count, error) : dray__nomem(error);
    if (rc)
        dray_tensor_list_free(l);
    else
        *out = l;
    return rc;
}

/* ---- reading --------------------------------------------------------------------------------- */

uint32_t dray_tensor_list_count(const dray_tensor_list *l)
{
    return l ? l->count : 0;
}

uint32_t dray_tensor_list_ranks(const dray_tensor_list *l)
{
    return l && l->count ? l->ranks : 0;
}

const char *dray_tensor_list_load_format(const dray_tensor_list *l)
{
    return l ? l->load_format : "";
}

int32_t dray_tensor_list_flush_cache(const dray_tensor_list *l)
{
    return l ? l->flush_cache : 0;
}

/* Gives the index of an entry's storage, which is opened once. */
static int open_storage(dray_tensor_list *l, const rank_entry *e, uint32_t *index,
                        dray_error *error)
{
    for (uint32_t i = l->storage_count; i-- > 0;)
        if (same_storage(&l->storages[i].handle, &e->handle)) {
            *index = i;
            return DRAY_OK;
        }
    struct storage *s =
        dray__append(&l->storages, sizeof *s, l->storage_count, &l->storage_capacity);
    if (!s)
        return dray__nomem(error);
    s->handle = e->handle;
    int rc =
        dray_region_import(&e->handle, e->fd == NO_FD ? -1 : l->fds[e->fd], 0, &s->region, error);
    if (rc == DRAY_OK)
        *index = l->storage_count++;
    return rc;
}

static int entry_of(const dray_tensor_list *l, uint32_t index, uint32_t rank,
                    const rank_entry **out, dray_error *error)
{
    if (!l || index >= l->count || rank >= l->ranks)
        return dray__fail(error, DRAY_EINVALID,
                          "entry %" PRIu32 " of tensor %" PRIu32 ": the list has %" PRIu32
                          " tensors for %" PRIu32 " ranks",
                          rank, index, dray_tensor_list_count(l), dray_tensor_list_ranks(l));
    *out = &l->tensors[index].entries[rank];
    return DRAY_OK;
}

int dray_tensor_list_open(dray_tensor_list *l, uint32_t index, uint32_t rank, const char **name,
                          dray_handle *handle, dray_region **region, dray_error *error)
{
    const rank_entry *e = NULL;
    uint32_t storage = 0;
    int rc = entry_of(l, index, rank, &e, error);
    if (rc == DRAY_OK && handle)
        rc = DRAY__OPTIONS_CHECK(dray_handle, path, handle, error);
    if (rc == DRAY_OK)
        rc = open_storage(l, e, &storage, error);
    if (rc)
        return dray__fail_prefix(error, rc, "list of handles: ");
    if (name)
        *name = l->tensors[index].name;
    if (handle)
        dray__options_fill(handle, &e->handle, sizeof e->handle);
    if (region)
        *region = l->storages[storage].region;
    return DRAY_OK;
}

/* ---- loading --------------------------------------------------------------------------------- */

/* Adds the regions that l's storages are, or those of another layout. */
static int add_source(dray_tensor_list *l, uint32_t index, uint32_t rank, dray_layout *source,
                      dray_error *error)
{
    const rank_entry *e = &l->tensors[index].entries[rank];
    uint32_t storage = 0, tensor_index;
    int rc = open_storage(l, e, &storage, error);
    while (rc == DRAY_OK && dray_layout_region_count(source) < l->storage_count) {
        const dray_region *region = l->storages[dray_layout_region_count(source)].region;
        dray_region_info info = {.kind = (int32_t)dray_region_get_kind(region),
                                 .bytes = dray_region_bytes(region),
                                 .name = dray_region_name(region)};
        rc = dray_layout_add_region(source, &info, NULL, error);
    }
    if (rc == DRAY_OK)
        rc = dray_layout_add_tensor(source, l->tensors[index].name, (dray_dtype)e->handle.dtype,
                                    e->handle.ndim, e->handle.shape, &tensor_index, error);
    if (rc)
        return rc;
    dray_block block = {.tensor = tensor_index, .region = storage, .offset = e->handle.offset};
    for (uint32_t d = 0; d < e->handle.ndim; d++) {
        block.extent[d] = e->handle.shape[d];
        block.stride[d] = e->handle.stride[d];
        if (e->handle.shape[d] == 0)
            return DRAY_OK; /* no elements */
    }
    return dray_layout_add_block(source, &block, error);
}

/* Makes the part of a layout that has the tensors in the list, with the same regions. wanted:
 * [tensor of the layout], with aliases resolved. */
static int add_wanted(const dray_layout *layout, const bool *wanted, dray_layout *part,
                      dray_error *error)
{
    uint32_t tensors = dray_layout_tensor_count(layout);
    uint32_t *index = calloc((size_t)tensors + 1, sizeof *index);
    int rc = index ? DRAY_OK : dray__nomem(error);
    for (uint32_t r = 0; r < dray_layout_region_count(layout) && rc == DRAY_OK; r++)
        rc = dray_layout_add_region(part, dray_layout_region(layout, r), NULL, error);
    for (uint32_t t = 0; t < tensors && rc == DRAY_OK; t++) {
        const dray_tensor_info *tensor_info = dray_layout_tensor(layout, t);
        if (wanted[t])
            rc = dray_layout_add_tensor(part, tensor_info->name, (dray_dtype)tensor_info->dtype,
                                        tensor_info->ndim, tensor_info->shape, &index[t], error);
    }
    for (uint32_t b = 0; b < dray_layout_block_count(layout) && rc == DRAY_OK; b++) {
        dray_block block = *dray_layout_block(layout, b);
        if (!wanted[block.tensor])
            continue;
        block.tensor = index[block.tensor];
        rc = dray_layout_add_block(part, &block, error);
    }
    free(index);
    return rc;
}

/* Makes layouts of both sides. An alias stands for its tensor; the first of the two names is used.
 */
static int make_sides(dray_tensor_list *l, uint32_t rank, const dray_layout *layout,
                      dray_layout *source, dray_layout *part, dray_error *error)
{
    bool *wanted = calloc((size_t)dray_layout_tensor_count(layout) + 1, sizeof *wanted);
    int rc = wanted ? DRAY_OK : dray__nomem(error);
    for (uint32_t i = 0; i < l->count && rc == DRAY_OK; i++) {
        uint32_t t;
        rc = dray_layout_find(layout, l->tensors[i].name, &t, error);
        if (rc)
            break;
        int32_t alias = dray_layout_tensor(layout, t)->alias_of;
        if (alias >= 0 &&
            dray__map_get(&l->names, dray_layout_tensor(layout, (uint32_t)alias)->name, &t))
            continue; /* the list has the tensor itself */
        if (alias >= 0) {
            rc = dray__fail(error, DRAY_ENOENT,
                            "tensor %s is another name of %s, which is not in the list",
                            l->tensors[i].name, dray_layout_tensor(layout, (uint32_t)alias)->name);
            break;
        }
        wanted[t] = true;
        rc = add_source(l, i, rank, source, error);
    }
    if (rc == DRAY_OK)
        rc = add_wanted(layout, wanted, part, error);
    free(wanted);
    return rc;
}

int dray_tensor_list_load(dray_tensor_list *l, uint32_t rank, const dray_layout *layout,
                          dray_region *const *regions, dray_error *error)
{
    if (!l || !layout || (l->count && rank >= l->ranks))
        return dray__fail(error, DRAY_EINVALID,
                          "list, layout and a rank below %" PRIu32 " expected",
                          dray_tensor_list_ranks(l));
    int rc = dray__regions_check(layout, regions, error);
    dray_layout *source = NULL, *part = NULL;
    if (rc == DRAY_OK)
        rc = dray_layout_new(&source, error);
    if (rc == DRAY_OK)
        rc = dray_layout_new(&part, error);
    if (rc == DRAY_OK)
        rc = make_sides(l, rank, layout, source, part, error);
    dray_region **opened = calloc((size_t)l->storage_count + 1, sizeof *opened);
    if (rc == DRAY_OK && !opened)
        rc = dray__nomem(error);
    for (uint32_t i = 0; rc == DRAY_OK && i < l->storage_count; i++)
        opened[i] = l->storages[i].region;
    if (rc == DRAY_OK)
        rc = dray__copy_all(source, opened, "the list of handles", part, regions, error);
    free(opened);
    dray_layout_free(source);
    dray_layout_free(part);
    return rc;
}
