/* Writes a checkpoint as a delta on another one. The format is in overlay.h. */
#include "weights/checkpoint/overlay.h"

#include "base/error.h"
#include "base/io.h"
#include "base/json.h"
#include "base/words.h"
#include "memory/region.h"
#include "model/layout/layout.h"
#include "weights/checkpoint/deposit.h"

#include <errno.h>
#include <fcntl.h>
#include <inttypes.h>
#include <jansson.h>
#include <limits.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

enum { SLICE = DRAY__OVERLAY_SLICE, ROOM = SLICE * 9 + SLICE / 255 + 1 };

typedef struct change {
    dray__overlay_way way;
    uint32_t *table;
    uint64_t slices, spooled, bytes; /* spooled: its offset in the spool */
    const dray_block *block;         /* of the new files; NULL without elements */
} change;

typedef struct overlay_writing {
    const char *folder;
    const dray_layout *files, *base;
    dray__overlay *overlay; /* of the checkpoint that is read; NULL when it is whole */
    bool chained;           /* the base is a delta itself */
    dray_region *const *opened;
    dray_region **old;
    change *changes; /* by tensor of the new files */
    int spool;
    uint64_t spooled;
    bool has_codes;
    uint8_t *was, *is, *out, *values;
    int8_t *steps;
} overlay_writing;

static int read_range(const dray_region *file, void *data, uint64_t bytes, uint64_t at,
                      dray_error *error)
{
    int rc = dray_region_read(file, at, data, bytes, error);
    if (rc)
        return rc;
    return file->patch ? file->patch(file, data, at, bytes, error) : DRAY_OK;
}

/* Encodes a slice to w->out: gaps, then values or codes. */
static size_t encode(overlay_writing *w, uint64_t count, size_t size, int32_t dtype,
                     uint32_t table[2])
{
    uint32_t gaps = 0, entries = 0;
    uint64_t next = 0;
    for (uint64_t i = 0; i < count; i++) {
        const uint8_t *now = w->is + i * size;
        if (memcmp(now, w->was + i * size, size) == 0)
            continue;
        dray__gap_put(w->out + gaps, i - next);
        gaps += (uint32_t)dray__gap_bytes(i - next);
        w->steps[entries] = dray__step_of(w->was + i * size, now, size, dtype);
        memcpy(w->values + entries++ * size, now, size);
        next = i + 1;
    }
    size_t codes = dray__codes_bytes(w->steps, entries, size);
    if (codes < entries * size) {
        dray__codes_put(w->out + gaps, w->steps, w->values, entries, size);
        table[0] = entries | DRAY__OVERLAY_CODES;
        table[1] = gaps + (uint32_t)codes;
        w->has_codes = true;
        return table[1];
    }
    memcpy(w->out + gaps, w->values, entries * size);
    table[0] = entries;
    table[1] = gaps;
    return gaps + entries * size;
}

/* Writes the changes of a tensor to the spool, unless they take more than half of its bytes. */
static int compare(overlay_writing *w, change *c, const dray_region *old, const dray_block *was,
                   uint64_t elements, int32_t dtype, dray_error *error)
{
    size_t size = dray_dtype_size((dray_dtype)dtype);
    const dray_region *new = w->opened[c->block->region];
    c->slices = (elements + SLICE - 1) / SLICE;
    c->spooled = w->spooled;
    c->table = calloc(2 * c->slices, sizeof *c->table);
    if (!c->table)
        return dray__nomem(error);
    for (uint64_t s = 0; s < c->slices; s++) {
        uint64_t at = s * SLICE * size, count = elements - s * SLICE;
        count = count < SLICE ? count : SLICE;
        int rc = read_range(old, w->was, count * size, was->offset + at, error);
        if (!rc)
            rc = read_range(new, w->is, count * size, c->block->offset + at, error);
        if (rc)
            return rc;
        if (memcmp(w->was, w->is, count * size) == 0)
            continue;
        size_t bytes = encode(w, count, size, dtype, c->table + 2 * s);
        if (dray__write_all(w->spool, w->out, bytes) < 0)
            return dray__fail_errno(error, errno, "%.300s: spool", w->folder);
        w->spooled += bytes;
        c->bytes += bytes;
        if (c->bytes + 8 * c->slices > elements * size / 2)
            return DRAY_OK; /* full */
    }
    c->way = c->bytes ? DRAY__OVERLAY_PATCHED : DRAY__OVERLAY_SAME;
    return DRAY_OK;
}

static int compare_tensor(overlay_writing *w, uint32_t tensor, dray_error *error)
{
    const dray_tensor_info *info = dray_layout_tensor(w->files, tensor);
    change *c = &w->changes[tensor];
    uint32_t old;
    c->block = dray__layout_first_block(w->files, tensor);
    if (dray_layout_find(w->base, info->name, &old, NULL) ||
        !dray__tensor_like(info, dray_layout_tensor(w->base, old)))
        return DRAY_OK;
    if (!c->block) {
        c->way = DRAY__OVERLAY_SAME;
        return DRAY_OK;
    }
    const dray_block *was = dray__layout_first_block(w->base, old);
    return compare(w, c, w->old[was->region], was, dray__tensor_elements(info), info->dtype, error);
}

/* ---- the files ------------------------------------------------------------------------------- */

static int add(dray_layout *like, const char *name, const char *tail, dray_dtype dtype,
               uint32_t ndim, const int64_t *shape, dray_error *error)
{
    char *full = NULL;
    if (asprintf(&full, "%s%s", name, tail) < 0)
        return dray__nomem(error);
    int rc = dray_layout_add_tensor(like, full, dtype, ndim, shape, NULL, error);
    free(full);
    return rc;
}

static int list_changes(const overlay_writing *w, dray_layout *like, dray_error *error)
{
    int rc = DRAY_OK;
    for (uint32_t t = 0; t < dray_layout_tensor_count(w->files) && !rc; t++) {
        const dray_tensor_info *info = dray_layout_tensor(w->files, t);
        const change *c = &w->changes[t];
        int64_t table[2] = {(int64_t)c->slices, 2}, data = (int64_t)c->bytes;
        if (c->way == DRAY__OVERLAY_FULL)
            rc = add(like, info->name, "", (dray_dtype)info->dtype, info->ndim, info->shape, error);
        if (c->way != DRAY__OVERLAY_PATCHED)
            continue;
        rc = add(like, info->name, DRAY__OVERLAY_TABLE, DRAY_U32, 2, table, error);
        if (!rc)
            rc = add(like, info->name, DRAY__OVERLAY_DATA, DRAY_U8, 1, &data, error);
    }
    return rc;
}

static int write_at(const dray_region *to, const void *data, uint64_t bytes, uint64_t offset,
                    dray_error *error)
{
    if (lseek(dray_region_fd(to), (off_t)offset, SEEK_SET) < 0 ||
        dray__write_all(dray_region_fd(to), data, (size_t)bytes) < 0)
        return dray__fail_errno(error, errno, "%.300s", dray_region_name(to));
    return DRAY_OK;
}

static int copy_range(overlay_writing *w, int from, uint64_t at, uint64_t bytes,
                      const dray_region *to, uint64_t offset, dray_error *error)
{
    uint8_t *buffer = w->is; /* SLICE * 8 bytes */
    for (uint64_t done = 0, n; done < bytes; done += n) {
        n = bytes - done < SLICE * 8 ? bytes - done : SLICE * 8;
        if (dray__read_at(from, buffer, (size_t)n, (off_t)(at + done)))
            return dray__fail_errno(error, errno, "%.300s: reading the changes", w->folder);
        int rc = write_at(to, buffer, n, offset + done, error);
        if (rc)
            return rc;
    }
    return DRAY_OK;
}

/* Fills one tensor of the delta's files: a whole tensor, a table, or data. */
static int fill(overlay_writing *w, const dray_layout *made, dray_region *const *regions,
                uint32_t block, dray_error *error)
{
    const dray_block *b = dray_layout_block(made, block);
    const dray_tensor_info *info = dray_layout_tensor(made, b->tensor);
    const dray_region *to = regions[b->region];
    bool table = dray__ends_with(info->name, DRAY__OVERLAY_TABLE);
    const char *tail = table                                             ? DRAY__OVERLAY_TABLE
                       : dray__ends_with(info->name, DRAY__OVERLAY_DATA) ? DRAY__OVERLAY_DATA
                                                                         : "";
    char *name = strndup(info->name, strlen(info->name) - strlen(tail));
    uint32_t index;
    int rc = name ? dray_layout_find(w->files, name, &index, error) : dray__nomem(error);
    free(name);
    if (rc)
        return rc;
    const change *c = &w->changes[index];
    uint64_t bytes = dray__tensor_elements(info) * dray_dtype_size((dray_dtype)info->dtype);
    if (!tail[0])
        return copy_range(w, dray_region_fd(w->opened[c->block->region]), c->block->offset, bytes,
                          to, b->offset, error);
    if (!table)
        return copy_range(w, w->spool, c->spooled, bytes, to, b->offset, error);
    return write_at(to, c->table, bytes, b->offset, error);
}

static int write_files(overlay_writing *w, dray_error *error)
{
    dray_layout *like, *made = NULL;
    int rc = dray_layout_new(&like, error);
    if (rc)
        return rc;
    rc = list_changes(w, like, error);
    if (!rc)
        rc = dray_safetensors_begin(w->folder, like, NULL, &made, error);
    dray_layout_free(like);
    if (rc)
        return rc;
    dray_region **regions = dray__files_open(made, 1, &rc, error);
    for (uint32_t b = 0; b < dray_layout_block_count(made) && !rc; b++)
        rc = fill(w, made, regions, b, error);
    if (!rc)
        rc = dray__files_sync(regions, made, error);
    dray__files_close(regions, made);
    if (!rc)
        rc = dray_safetensors_finish(w->folder, made, error);
    dray_layout_free(made);
    return rc;
}

static int write_json(const overlay_writing *w, const char *base, uint32_t number,
                      uint64_t base_sum, const dray__sums *sums, dray_error *error)
{
    char text[32];
    int version = w->has_codes ? 3 : w->chained ? 2 : 1;
    snprintf(text, sizeof text, "%016" PRIx64, base_sum);
    json_t *tensors = json_object();
    json_t *json =
        json_pack("{s:i, s:s, s:s, s:i, s:I}", "version", version, "base", strrchr(base, '/') + 1,
                  "base_sum", text, "slice", SLICE, "number", (json_int_t)number);
    bool kept = true; /* false: out of memory, and a tensor is missing from the list */
    for (uint32_t t = 0; t < dray_layout_tensor_count(w->files) && kept; t++) {
        const char *name = dray_layout_tensor(w->files, t)->name;
        const dray__named_sum *sum = dray__sums_find(sums, name);
        snprintf(text, sizeof text, "%016" PRIx64, sum ? sum->sum : 0);
        kept = json_object_set_new(tensors, name, json_string(text)) == 0;
    }
    kept &= json_object_set_new(json, "tensors", tensors) == 0;
    char *all = kept ? dray__json_text(json, JSON_INDENT(1)) : NULL;
    json_decref(json);
    if (!all)
        return dray__nomem(error);
    int rc = dray__checkpoint_file(w->folder, DRAY__OVERLAY_FILE, all, strlen(all), error);
    free(all);
    return rc;
}

static int compare_all(overlay_writing *w, dray_error *error)
{
    char path[PATH_MAX];
    snprintf(path, sizeof path, "%.*s/.spool", PATH_MAX - 16, w->folder);
    w->spool = open(path, O_RDWR | O_CREAT | O_EXCL | O_CLOEXEC, 0600);
    if (w->spool < 0 || unlink(path))
        return dray__fail_errno(error, errno, "%.300s", path);
    w->changes = calloc((size_t)dray_layout_tensor_count(w->files) + 1, sizeof *w->changes);
    w->was = malloc(SLICE * 8);
    w->is = malloc(SLICE * 8);
    w->values = malloc(SLICE * 8);
    w->steps = malloc(SLICE);
    w->out = malloc(ROOM);
    if (!w->changes || !w->was || !w->is || !w->values || !w->steps || !w->out)
        return dray__nomem(error);
    int rc;
    w->old = dray__overlay_open(w->overlay, w->base, &rc, error);
    for (uint32_t t = 0; t < dray_layout_tensor_count(w->files) && !rc; t++)
        rc = compare_tensor(w, t, error);
    return rc;
}

static void end(overlay_writing *w)
{
    for (uint32_t t = 0; w->changes && t < dray_layout_tensor_count(w->files); t++)
        free(w->changes[t].table);
    dray__files_close(w->old, w->base);
    void *all[] = {w->changes, w->was, w->is, w->out, w->values, w->steps};
    for (size_t i = 0; i < sizeof all / sizeof *all; i++)
        free(all[i]);
    if (w->spool >= 0)
        close(w->spool);
}

int dray__overlay_write(const char *folder, const char *base, const char *held, uint32_t number,
                        const dray_layout *files, dray_region *const *opened,
                        const dray__sums *sums, dray_error *error)
{
    dray_layout *old;
    dray__overlay *overlay;
    uint64_t base_sum = 0, held_sum;
    char name[64];
    int rc = dray__overlay_result_sum(base, &base_sum, error);
    if (!rc)
        rc = dray__overlay_base_name(base, name, NULL, error);
    if (rc)
        return rc;
    bool is_held =
        held && dray__overlay_result_sum(held, &held_sum, NULL) == DRAY_OK && held_sum == base_sum;
    rc = dray__checkpoint_layout(is_held ? held : base, &old, &overlay, error);
    if (rc)
        return rc;
    overlay_writing w = {.folder = folder,
                         .files = files,
                         .base = old,
                         .overlay = overlay,
                         .chained = name[0] != 0,
                         .opened = opened,
                         .spool = -1};
    rc = compare_all(&w, error);
    if (!rc)
        rc = write_files(&w, error);
    if (!rc)
        rc = write_json(&w, base, number, base_sum, sums, error);
    end(&w);
    dray__overlay_free(overlay);
    dray_layout_free(old);
    return rc;
}
