/* Reads checkpoints that are deltas on a base. The base may be a delta itself; then its changes are
 * applied first. The format is in overlay.h. */
#include "weights/checkpoint/overlay.h"

#include "base/error.h"
#include "base/hash.h"
#include "base/io.h"
#include "base/json.h"
#include "base/wire.h"
#include "memory/region.h"
#include "model/layout/layout.h"

#include <errno.h>
#include <fcntl.h>
#include <inttypes.h>
#include <jansson.h>
#include <limits.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>

enum { SLICE = DRAY__OVERLAY_SLICE, JSON_MAX = 256 << 20 };

/* A tensor that is in the base, too. */
typedef struct patch {
    char *name;
    uint32_t region; /* of the layout */
    uint64_t at, elements, size;
    int32_t dtype;
    uint32_t *table; /* NULL: unchanged */
    uint64_t *data;  /* file offsets of each slice's data, and of the end */
    dray_region *file;
} patch;

struct dray__overlay {
    char base[PATH_MAX];
    uint64_t base_sum;
    dray__overlay *inner; /* the base's, if that is a delta itself */
    uint32_t levels; /* the number of deltas from the held version to the result; the outermost is
                      * this one */
    bool advised;    /* the kernel was told to read its files ahead */
    json_t *json;
    dray_layout *changes; /* the delta's own files */
    dray_region **files;
    patch *patches; /* sorted by region and offset */
    uint32_t count;
    dray__map by_name;
};

/* ---- the folder ------------------------------------------------------------------------------ */

/* Reads delta.json. *out is NULL for a whole checkpoint. */
static int load(const char *folder, json_t **out, dray_error *error)
{
    char path[PATH_MAX], *text;
    size_t size;
    *out = NULL;
    if (snprintf(path, sizeof path, "%s/" DRAY__OVERLAY_FILE, folder) >= (int)sizeof path)
        return DRAY_OK;
    int rc = dray__store_text(path, JSON_MAX, &text, &size, error);
    if (rc)
        return rc == DRAY_ENOENT ? DRAY_OK : rc;
    rc = dray__json_parse(text, size, path, out, error);
    free(text);
    if (rc)
        return rc;
    const char *base = json_string_value(json_object_get(*out, "base"));
    json_int_t version = json_integer_value(json_object_get(*out, "version"));
    if (version >= 1 && version <= 3 && base && base[0] && strlen(base) < 64 && base[0] != '.' &&
        !strchr(base, '/') && json_integer_value(json_object_get(*out, "slice")) == SLICE &&
        json_integer_value(json_object_get(*out, "number")) > 0 &&
        json_integer_value(json_object_get(*out, "number")) < UINT32_MAX &&
        json_is_string(json_object_get(*out, "base_sum")) &&
        json_is_object(json_object_get(*out, "tensors")))
        return DRAY_OK;
    json_decref(*out);
    *out = NULL;
    return dray__fail(
        error, DRAY_EFORMAT,
        "%.300s: expected version 1 to 3, base, base_sum, slice %d, number and tensors", path,
        SLICE);
}

int dray__overlay_base_name(const char *folder, char out[64], uint32_t *number, dray_error *error)
{
    json_t *json;
    int rc = load(folder, &json, error);
    snprintf(out, 64, "%s", json ? json_string_value(json_object_get(json, "base")) : "");
    if (number)
        *number = (uint32_t)json_integer_value(json_object_get(json, "number"));
    json_decref(json);
    return rc;
}

static int by_sum_name(const void *a, const void *b)
{
    const dray__named_sum *const *x = a, *const *y = b;
    return strcmp((*x)->name, (*y)->name);
}

int dray__overlay_sum_of(const dray_layout *layout, const dray__sums *sums, uint64_t *out,
                         dray_error *error)
{
    *out = 0;
    for (uint32_t t = 0; t < dray_layout_tensor_count(layout); t++) {
        const dray_tensor_info *info = dray_layout_tensor(layout, t);
        if (dray__tensor_elements(info) && !dray__sums_find(sums, info->name))
            return DRAY_OK;
    }
    const dray__named_sum **order = calloc((size_t)sums->count + 1, sizeof *order);
    const dray__named_sum *items = dray__sums_items(sums);
    dray__writer w = {0};
    if (!order || (sums->count && !items)) {
        free(order);
        return dray__nomem(error);
    }
    for (uint32_t i = 0; i < sums->count; i++)
        order[i] = &items[i];
    qsort(order, sums->count, sizeof *order, by_sum_name);
    for (uint32_t i = 0; i < sums->count; i++) {
        char sum[24];
        snprintf(sum, sizeof sum, "=%016" PRIx64 "\n", order[i]->sum);
        dray__put_bytes(&w, order[i]->name, strlen(order[i]->name));
        dray__put_bytes(&w, sum, strlen(sum));
    }
    int rc = dray__writer_check(&w, error);
    if (!rc)
        *out = dray__hash(w.data, w.size);
    dray__writer_free(&w);
    free(order);
    return rc;
}

/* ---- joining base and delta ------------------------------------------------------------------ */

typedef struct joining {
    dray__overlay *o;
    const dray_layout *base;
    dray_layout *out;
    uint32_t base_regions;
} joining;

static int bad(const dray__overlay *o, const char *name, const char *what, dray_error *error)
{
    return dray__fail(error, DRAY_EFORMAT, "%.200s: tensor %.160s: %s",
                      dray_layout_region(o->changes, 0)->name, name, what);
}

static int find_change(const joining *j, const char *name, const char *tail,
                       const dray_block **block, const dray_tensor_info **info, dray_error *error)
{
    char *full = NULL;
    uint32_t index;
    if (asprintf(&full, "%s%s", name, tail) < 0)
        return dray__nomem(error);
    int rc = dray_layout_find(j->o->changes, full, &index, NULL);
    free(full);
    if (rc)
        return DRAY_ENOENT;
    *info = dray_layout_tensor(j->o->changes, index);
    *block = dray__layout_first_block(j->o->changes, index);
    return *block ? DRAY_OK : bad(j->o, name, "an empty table or data", error);
}

/* Returns the bytes of a slice's data by its row of the table; UINT64_MAX when that row is
 * impossible for a slice of so many elements. */
static uint64_t bytes_of(const dray__overlay *o, const patch *p, uint64_t slice, uint64_t in)
{
    uint64_t entries = p->table[2 * slice] & ~DRAY__OVERLAY_CODES, bytes = p->table[2 * slice + 1];
    bool codes = p->table[2 * slice] & DRAY__OVERLAY_CODES;
    uint64_t least = entries + (codes ? dray__codes_least(entries) : 0);
    uint64_t most = entries + in / 255 + (codes ? dray__codes_most(entries, p->size) : 0);
    if (entries > in || bytes < least || bytes > most ||
        (codes && json_integer_value(json_object_get(o->json, "version")) < 3))
        return UINT64_MAX;
    return bytes + (codes ? 0 : entries * p->size);
}

/* Reads a tensor's table, and computes the offset of each slice's data. */
static int read_table(const joining *j, patch *p, dray_error *error)
{
    const dray_block *table, *data;
    const dray_tensor_info *table_info, *data_info;
    int rc = find_change(j, p->name, DRAY__OVERLAY_TABLE, &table, &table_info, error);
    if (rc)
        return rc == DRAY_ENOENT ? DRAY_OK : rc;
    rc = find_change(j, p->name, DRAY__OVERLAY_DATA, &data, &data_info, error);
    if (rc)
        return rc == DRAY_ENOENT ? bad(j->o, p->name, "a table without data", error) : rc;
    uint64_t slices = (p->elements + SLICE - 1) / SLICE;
    if (table_info->dtype != DRAY_U32 || data_info->dtype != DRAY_U8 || data_info->ndim != 1 ||
        dray__tensor_elements(table_info) != 2 * slices)
        return bad(j->o, p->name, "a table or data of another shape or dtype", error);
    p->table = calloc(2 * slices, sizeof *p->table);
    p->data = calloc(slices + 1, sizeof *p->data);
    if (!p->table || !p->data)
        return dray__nomem(error);
    rc = dray_region_read(j->o->files[table->region], table->offset, p->table,
                          2 * slices * sizeof *p->table, error);
    if (rc)
        return rc;
    p->file = j->o->files[data->region];
    p->data[0] = data->offset;
    for (uint64_t s = 0; s < slices; s++) {
        uint64_t in = s + 1 < slices ? SLICE : p->elements - s * SLICE;
        uint64_t bytes = bytes_of(j->o, p, s, in);
        if (bytes == UINT64_MAX)
            return dray__fail(error, DRAY_EFORMAT,
                              "%.200s: tensor %.160s: slice %" PRIu64 " of its table: %" PRIx32
                              ", %" PRIu32 " cannot be",
                              dray_layout_region(j->o->changes, 0)->name, p->name, s,
                              p->table[2 * s], p->table[2 * s + 1]);
        p->data[s + 1] = p->data[s] + bytes;
    }
    return p->data[slices] - p->data[0] == dray__tensor_elements(data_info)
               ? DRAY_OK
               : bad(j->o, p->name, "data of another size than its table says", error);
}

/* Adds one tensor to the result. */
static int join_tensor(joining *j, const char *name, dray_error *error)
{
    const int64_t zero[DRAY_MAX_DIMS] = {0};
    dray__overlay *o = j->o;
    uint32_t index, tensor;
    bool full = dray_layout_find(o->changes, name, &index, NULL) == DRAY_OK;
    if (!full && dray_layout_find(j->base, name, &index, NULL))
        return bad(o, name, "neither here nor in the base", error);
    const dray_layout *from = full ? o->changes : j->base;
    const dray_tensor_info *info = dray_layout_tensor(from, index);
    /* The only block of a tensor in a file; NULL when it has no elements. */
    const dray_block *block = dray__layout_first_block(from, index);
    int rc = dray_layout_add_tensor(j->out, name, (dray_dtype)info->dtype, info->ndim, info->shape,
                                    &tensor, error);
    if (rc || !block)
        return rc;
    uint32_t region = block->region + (full ? j->base_regions : 0);
    rc = dray_layout_add_dense(j->out, tensor, region, zero, info->shape, block->offset, error);
    if (rc || full)
        return rc;
    patch *p = &o->patches[o->count];
    *p = (patch){.name = strdup(name),
                 .region = region,
                 .at = block->offset,
                 .elements = dray__tensor_elements(info),
                 .size = dray_dtype_size((dray_dtype)info->dtype),
                 .dtype = info->dtype};
    if (!p->name)
        return dray__nomem(error);
    o->count++;
    return read_table(j, p, error);
}

static int by_place(const void *a, const void *b)
{
    const patch *x = a, *y = b;
    if (x->region != y->region)
        return x->region < y->region ? -1 : 1;
    return x->at < y->at ? -1 : x->at > y->at;
}

static int join_regions(joining *j, dray_error *error)
{
    j->base_regions = dray_layout_region_count(j->base);
    for (uint32_t i = 0; i < j->base_regions + dray_layout_region_count(j->o->changes); i++) {
        const dray_region_info *info = i < j->base_regions
                                           ? dray_layout_region(j->base, i)
                                           : dray_layout_region(j->o->changes, i - j->base_regions);
        int rc = dray_layout_add_region(j->out, info, NULL, error);
        if (rc)
            return rc;
    }
    return DRAY_OK;
}

static int join(joining *j, dray_error *error)
{
    dray__overlay *o = j->o;
    const char *name;
    json_t *sum;
    json_t *tensors = json_object_get(o->json, "tensors");
    o->patches = calloc(json_object_size(tensors) + 1, sizeof *o->patches);
    if (!o->patches)
        return dray__nomem(error);
    int rc = join_regions(j, error);
    if (rc)
        return rc;
    json_object_foreach(tensors, name, sum)
    {
        rc = join_tensor(j, name, error);
        if (rc)
            return rc;
    }
    qsort(o->patches, o->count, sizeof *o->patches, by_place);
    for (uint32_t i = 0; i < o->count; i++)
        if (!dray__map_set(&o->by_name, o->patches[i].name, i))
            return dray__nomem(error);
    return DRAY_OK;
}

/* Opens the base, and checks that it is the one that the delta was made against. */
static int open_base(dray__overlay *o, const char *folder, dray_layout **out, dray_error *error)
{
    char name[64];
    const char *slash = strrchr(folder, '/');
    snprintf(o->base, sizeof o->base, "%.*s/%s", (int)(slash - folder), folder,
             json_string_value(json_object_get(o->json, "base")));
    uint32_t number, own = (uint32_t)json_integer_value(json_object_get(o->json, "number"));
    bool chained = json_integer_value(json_object_get(o->json, "version")) > 1;
    int rc = dray__overlay_base_name(o->base, name, &number, error);
    if (!rc && name[0] && (!chained || number != own - 1 || own > DRAY__OVERLAY_CHAIN))
        rc = dray__fail(error, DRAY_EFORMAT, "delta %u on %s, below delta %u of version %d", number,
                        name, own, (int)json_integer_value(json_object_get(o->json, "version")));
    if (!rc) /* numbers decrease, so that the chain ends */
        rc = dray__checkpoint_layout(o->base, out, &o->inner, error);
    dray__sums sums = {0};
    uint64_t sum = 0;
    if (!rc)
        rc = dray__overlay_sums(o->inner, *out, &sums, error);
    if (!rc)
        rc = dray__overlay_sum_of(*out, &sums, &sum, error);
    if (!rc &&
        (!dray__sum_parse(json_string_value(json_object_get(o->json, "base_sum")), &o->base_sum) ||
         sum != o->base_sum))
        rc = dray__fail(error, DRAY_ECHECKSUM, "another checkpoint than the one it was written on");
    dray__sums_free(&sums);
    return rc ? dray__fail_prefix(error, rc, "%.200s, base %.200s: ", folder, o->base) : DRAY_OK;
}

static int open_changes(dray__overlay *o, const char *folder, dray_error *error)
{
    int rc = dray_layout_safetensors(folder, &o->changes, error);
    if (!rc)
        o->files = dray__files_open(o->changes, 0, &rc, error);
    return rc;
}

int dray__checkpoint_layout(const char *path, dray_layout **layout, dray__overlay **overlay,
                            dray_error *error)
{
    char folder[PATH_MAX];
    json_t *json = NULL;
    *overlay = NULL;
    int rc = dray__store_of(path)->resolve(path, folder, error);
    if (rc == DRAY_ENOMEM) /* continuing would ignore the delta's base */
        return rc;
    bool local = dray__store_is_local(path);
    if (rc && !local)
        return rc;
    rc = rc ? DRAY_OK : load(folder, &json, error);
    if (rc || !json)
        return rc ? rc : dray_layout_safetensors(path, layout, error);
    dray__overlay *o = calloc(1, sizeof *o);
    dray_layout *base = NULL, *out = NULL;
    if (!o) {
        json_decref(json);
        return dray__nomem(error);
    }
    o->json = json;
    rc = open_base(o, folder, &base, error);
    if (!rc)
        rc = open_changes(o, folder, error);
    if (!rc)
        rc = dray_layout_new(&out, error);
    joining j = {.o = o, .base = base, .out = out};
    if (!rc)
        rc = join(&j, error);
    dray_layout_free(base);
    if (rc) {
        dray_layout_free(out);
        dray__overlay_free(o);
        return rc;
    }
    *layout = out;
    *overlay = o;
    return DRAY_OK;
}

void dray__overlay_free(dray__overlay *o)
{
    if (!o)
        return;
    for (uint32_t i = 0; i < o->count; i++) {
        free(o->patches[i].name);
        free(o->patches[i].table);
        free(o->patches[i].data);
    }
    dray__files_close(o->files, o->changes);
    free(o->patches);
    dray__map_free(&o->by_name);
    dray__overlay_free(o->inner);
    dray_layout_free(o->changes);
    json_decref(o->json);
    free(o);
}

void dray__overlay_forget(void *overlay)
{
    dray__overlay_free(overlay);
}

const char *dray__overlay_base(const dray__overlay *o)
{
    return o->base;
}

bool dray__overlay_hold(dray__overlay *o, uint64_t sum)
{
    o->levels = 0;
    uint32_t levels = 1;
    for (const dray__overlay *level = o; level && sum; level = level->inner, levels++)
        if (level->base_sum == sum) {
            o->levels = levels;
            return true;
        }
    return false;
}

uint32_t dray__overlay_levels(const dray__overlay *o)
{
    return o->levels;
}

int dray__overlay_sums(const dray__overlay *o, const dray_layout *layout, dray__sums *out,
                       dray_error *error)
{
    if (!o)
        return dray__stored_sums(layout, out, error);
    for (uint32_t t = 0; t < dray_layout_tensor_count(layout); t++) {
        const dray_tensor_info *info = dray_layout_tensor(layout, t);
        uint64_t sum;
        if (!dray__tensor_elements(info))
            continue;
        if (!dray__sum_parse(
                json_string_value(json_object_get(json_object_get(o->json, "tensors"), info->name)),
                &sum))
            return bad(o, info->name, "expected a sum of 16 hexadecimal digits", error);
        if (!dray__sums_add(out, info->name, info->dtype, dray__tensor_elements(info), sum))
            return dray__nomem(error);
    }
    return DRAY_OK;
}

int dray__overlay_result_sum(const char *path, uint64_t *out, dray_error *error)
{
    dray_layout *layout;
    dray__overlay *o;
    dray__sums sums = {0};
    int rc = dray__checkpoint_layout(path, &layout, &o, error);
    if (rc)
        return rc;
    rc = dray__overlay_sums(o, layout, &sums, error);
    if (!rc)
        rc = dray__overlay_sum_of(layout, &sums, out, error);
    dray__sums_free(&sums);
    dray__overlay_free(o);
    dray_layout_free(layout);
    return rc;
}

/* ---- changes of a tensor --------------------------------------------------------------------- */

/* Returns the level that is applied as number `number`; the innermost is applied first. */
static const dray__overlay *level_of(const dray__overlay *o, uint32_t number)
{
    const dray__overlay *level = o;
    for (uint32_t i = number + 1; i < o->levels; i++)
        level = level->inner;
    return level;
}

dray__overlay_way dray__overlay_way_of(const dray__overlay *o, const char *tensor)
{
    dray__overlay_way way = DRAY__OVERLAY_SAME;
    for (uint32_t i = 0; i < o->levels; i++) {
        const dray__overlay *level = level_of(o, i);
        uint32_t index;
        if (!dray__map_get(&level->by_name, tensor, &index))
            return DRAY__OVERLAY_FULL;
        if (level->patches[index].table)
            way = DRAY__OVERLAY_PATCHED;
    }
    return way;
}

static int torn(const patch *p, uint64_t slice, dray_error *error)
{
    return dray__fail(error, DRAY_EFORMAT,
                      "%.200s: tensor %.160s: the entries of slice %" PRIu64
                      " do not fit its table",
                      p->file->name, p->name, slice);
}

/* Returns the end of the gaps of so many entries. */
static size_t gaps_end(const uint8_t *data, size_t bytes, uint32_t entries)
{
    size_t at = 0;
    for (; entries && at < bytes; at++)
        entries -= data[at] != 255;
    return at;
}

/* Calls fn for the entries of one slice. With fn NULL, checks them only. */
static int each_in_slice(const patch *p, uint64_t slice, const uint8_t *data, uint64_t first,
                         uint64_t end, dray__overlay_fn fn, void *user, dray_error *error)
{
    uint32_t entries = p->table[2 * slice] & ~DRAY__OVERLAY_CODES;
    bool coded = p->table[2 * slice] & DRAY__OVERLAY_CODES;
    size_t bytes = p->table[2 * slice + 1], begin = coded ? gaps_end(data, bytes, entries) : bytes;
    dray__gaps gaps = {.data = data, .bytes = begin, .next = slice * SLICE};
    dray__codes codes = {.data = data + begin, .bytes = bytes - begin};
    uint64_t last = gaps.next + SLICE < p->elements ? gaps.next + SLICE : p->elements, position;
    for (uint32_t i = 0; i < entries; i++) {
        dray__change change = {0};
        if (!dray__gaps_next(&gaps, last, &position) ||
            (coded && !dray__codes_next(&codes, p->size, &change)))
            return torn(p, slice, error);
        if (!fn || position < first || position >= end)
            continue;
        if (!coded)
            memcpy(&change.bits, data + bytes + (size_t)i * p->size, p->size);
        fn(user, position, &change);
    }
    return gaps.at == begin && dray__codes_ended(&codes) ? DRAY_OK : torn(p, slice, error);
}

/* Gives the place of some elements' entries in their file. */
static void place_of(const patch *p, uint64_t first, uint64_t end, uint64_t *at, uint64_t *bytes)
{
    *at = p->data[first / SLICE];
    *bytes = p->data[(end + SLICE - 1) / SLICE] - *at;
}

static int each(const patch *p, uint64_t first, uint64_t end, const uint8_t *data,
                dray__overlay_fn fn, void *user, dray_error *error)
{
    uint64_t from = first / SLICE, to = (end + SLICE - 1) / SLICE;
    int rc = DRAY_OK;
    for (int look = 1; look >= 0; look--)
        for (uint64_t s = from; s < to && !rc; s++)
            rc = each_in_slice(p, s, data + (p->data[s] - p->data[from]), first, end,
                               look ? NULL : fn, user, error);
    return rc;
}

static int read_each(const patch *p, uint64_t first, uint64_t end, dray__overlay_fn fn, void *user,
                     dray_error *error)
{
    uint64_t at, size;
    if (!p->table || first >= end)
        return DRAY_OK;
    place_of(p, first, end, &at, &size);
    uint8_t *data = malloc((size_t)size + 1);
    int rc = data ? DRAY_OK : dray__nomem(error);
    if (!rc)
        rc = dray_region_read(p->file, at, data, size, error);
    if (!rc)
        rc = each(p, first, end, data, fn, user, error);
    free(data);
    return rc;
}

static const patch *patch_of(const dray__overlay *o, uint32_t level, const char *tensor)
{
    const dray__overlay *of = level_of(o, level);
    uint32_t index;
    return dray__map_get(&of->by_name, tensor, &index) && of->patches[index].table
               ? &of->patches[index]
               : NULL;
}

const dray_region *dray__overlay_place(const dray__overlay *o, uint32_t level, const char *tensor,
                                       uint64_t first, uint64_t end, uint64_t *at, uint64_t *bytes)
{
    const patch *p = first < end ? patch_of(o, level, tensor) : NULL;
    *at = *bytes = 0;
    if (!p)
        return NULL;
    place_of(p, first, end, at, bytes);
    return *bytes ? p->file : NULL;
}

int dray__overlay_each(const dray__overlay *o, uint32_t level, const char *tensor, uint64_t first,
                       uint64_t end, const uint8_t *data, dray__overlay_fn fn, void *user,
                       dray_error *error)
{
    return each(patch_of(o, level, tensor), first, end, data, fn, user, error);
}

/* ---- ranges of the base's files -------------------------------------------------------------- */

typedef struct range {
    const dray__overlay *overlay;
    const dray_region *file;
    uint8_t *data;
    uint64_t begin, end; /* in the file */
    const patch *patch;
    int rc; /* the result of reading elements that are only partly in the range */
    dray_error *error;
} range;

static int patch_level(const dray__overlay *o, const dray_region *file, void *data, uint64_t offset,
                       uint64_t bytes, dray_error *error);

/* Patches an element that is only partly in the range: reads its old value as a whole. */
static void put_part(range *r, uint64_t at, const dray__change *change)
{
    uint8_t element[8];
    const patch *p = r->patch;
    r->rc = dray_region_read(r->file, at, element, p->size, r->error);
    if (!r->rc && r->overlay->inner)
        r->rc = patch_level(r->overlay->inner, r->file, element, at, p->size, r->error);
    if (r->rc)
        return;
    dray__change_put(element, change, p->size, p->dtype);
    for (uint64_t i = 0; i < p->size; i++)
        if (at + i >= r->begin && at + i < r->end)
            r->data[at + i - r->begin] = element[i];
}

static void put(void *user, uint64_t position, const dray__change *change)
{
    range *r = user;
    uint64_t at = r->patch->at + position * r->patch->size;
    if (at >= r->begin && at + r->patch->size <= r->end)
        dray__change_put(r->data + (at - r->begin), change, r->patch->size, r->patch->dtype);
    else if (!r->rc)
        put_part(r, at, change);
}

static int patch_level(const dray__overlay *o, const dray_region *file, void *data, uint64_t offset,
                       uint64_t bytes, dray_error *error)
{
    uint32_t index = file->patch_index;
    uint64_t end = offset + bytes;
    int inner = o->inner ? patch_level(o->inner, file, data, offset, bytes, error) : DRAY_OK;
    if (inner)
        return inner;
    uint32_t low = 0, high = o->count;
    while (low < high) { /* the first patch that ends behind the range's beginning */
        uint32_t middle = (low + high) / 2;
        const patch *p = &o->patches[middle];
        bool before =
            p->region != index ? p->region < index : p->at + p->elements * p->size <= offset;
        low = before ? middle + 1 : low;
        high = before ? high : middle;
    }
    for (; low < o->count && o->patches[low].region == index && o->patches[low].at < end; low++) {
        const patch *p = &o->patches[low];
        uint64_t last = (end - p->at + p->size - 1) / p->size;
        range r = {o, file, data, offset, end, p, DRAY_OK, error};
        int rc = read_each(p, offset > p->at ? (offset - p->at) / p->size : 0,
                           last < p->elements ? last : p->elements, put, &r, error);
        if (rc || r.rc)
            return rc ? rc : r.rc;
    }
    return DRAY_OK;
}

static int patch_range(const dray_region *file, void *data, uint64_t offset, uint64_t bytes,
                       dray_error *error)
{
    return patch_level(file->patch_user, file, data, offset, bytes, error);
}

void dray__overlay_attach(dray__overlay *o, uint32_t index, dray_region *region)
{
    if (!o)
        return;
    for (dray__overlay *level = o; level && !level->advised; level = level->inner) {
        for (uint32_t i = 0; i < dray_layout_region_count(level->changes); i++)
            if (level->files[i]->fd >= 0)
                posix_fadvise(level->files[i]->fd, 0, 0, POSIX_FADV_WILLNEED);
        level->advised = true;
    }
    region->patch = patch_range;
    region->patch_user = o;
    region->patch_index = index;
}

dray_region **dray__overlay_open(dray__overlay *o, const dray_layout *layout, int *rc,
                                 dray_error *error)
{
    dray_region **opened = dray__files_open(layout, 0, rc, error);
    for (uint32_t i = 0; opened && i < dray_layout_region_count(layout); i++)
        dray__overlay_attach(o, i, opened[i]);
    return opened;
}
