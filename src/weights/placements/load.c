/* Divides the tensors of a load_weights engine into rounds that fit a bucket, and delivers them. */
#include "weights/placements/load.h"

#include "base/arena.h"
#include "base/array.h"
#include "base/error.h"
#include "base/hash.h"

#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { ALIGNMENT = 64 }; /* of tensors in the bucket: at least every dtype's */

#define STAGING_MOST ((uint64_t)4 << 20)

/* A tensor, or a slice of its rows, in a round. */
typedef struct load_item {
    uint32_t tensor; /* of our layout */
    int64_t first_row, rows;
    uint64_t offset, bytes;
} load_item;

struct dray__load {
    int32_t kind; /* of the bucket */
    dray_load_fn fn;
    void *user;
    uint64_t ceiling, staging, capacity; /* capacity: of the bucket, from ceiling and staging */
    load_item *items;                    /* round by round */
    uint32_t item_count;
    uint64_t item_capacity, round_capacity;
    uint32_t *first; /* of each round, one more than rounds */
    uint32_t rounds;
    uint64_t used, largest; /* bytes of the last round, of the fullest one */
    dray_load_tensor *told; /* as long as the longest round */
    dray_region *bucket;
};

/* ---- tensors that arrive together ------------------------------------------------------------ */

static const char *const usual[] = {"q_a_proj,kv_a_proj_with_mqa"};

/* Returns the offset in `name` of one of the comma-separated parts, as a whole component between
 * dots; 0 when there is none. */
static size_t part_at(const char *name, const char *parts)
{
    for (const char *part = parts; *part; part += strspn(part, ",")) {
        size_t length = strcspn(part, ",");
        for (const char *at = name; (at = strchr(at, '.'));)
            if (strncmp(++at, part, length) == 0 && at[length] == '.')
                return (size_t)(at - name);
        part += length;
    }
    return 0;
}

/* Returns a key that a tensor's name shares with those that it must arrive with. Returns NULL when
 * it may arrive alone, or without memory (*nomem). */
static char *unit_key(const char *name, const char *const *together, uint32_t count, bool *nomem)
{
    for (uint32_t i = 0; i < count; i++) {
        size_t at = part_at(name, together[i]);
        char *key;
        if (!at)
            continue;
        *nomem = asprintf(&key, "%" PRIu32 " %.*s", i, (int)at, name) < 0;
        return *nomem ? NULL : key;
    }
    return NULL;
}

/* Links the tensors that must arrive together in rings: next[i] is the next tensor of the unit, or
 * i.
 */
static int find_units(const dray_layout *layout, const dray_load_options *options, uint32_t *next,
                      dray_error *error)
{
    const char *const *together = options->together ? options->together : usual;
    uint32_t count = options->together ? options->together_count : 1, other;
    dray__map last = {0};
    bool nomem = false;
    for (uint32_t t = 0; t < dray_layout_tensor_count(layout) && !nomem; t++) {
        next[t] = t;
        char *key = unit_key(dray_layout_tensor(layout, t)->name, together, count, &nomem);
        if (key && dray__map_get(&last, key, &other)) {
            next[t] = next[other];
            next[other] = t;
        }
        nomem |= key && !dray__map_set(&last, key, t);
        free(key);
    }
    dray__map_free(&last);
    return nomem ? dray__nomem(error) : DRAY_OK;
}

/* ---- rounds ---------------------------------------------------------------------------------- */

static uint64_t aligned(uint64_t bytes)
{
    return (bytes + ALIGNMENT - 1) & ~(uint64_t)(ALIGNMENT - 1);
}

static uint64_t bytes_of(const dray_tensor_info *tensor)
{
    return dray__tensor_elements(tensor) * dray_dtype_size((dray_dtype)tensor->dtype);
}

static int64_t rows_of(const dray_tensor_info *tensor)
{
    return tensor->ndim ? tensor->shape[0] : 1;
}

static int next_round(dray__load *l, dray_error *error)
{
    /* One more entry: the end of the last round. */
    if (!dray__append(&l->first, sizeof *l->first, (uint64_t)l->rounds + 1, &l->round_capacity))
        return dray__nomem(error);
    l->first[l->rounds++] = l->item_count;
    l->used = 0;
    return DRAY_OK;
}

static int put(dray__load *l, uint32_t tensor, int64_t first_row, int64_t rows, uint64_t bytes,
               dray_error *error)
{
    if (!DRAY__PUSH(l->items, l->item_count, l->item_capacity,
                    (load_item){tensor, first_row, rows, l->used, bytes}))
        return dray__nomem(error);
    l->used += aligned(bytes);
    l->largest = l->used > l->largest ? l->used : l->largest;
    return DRAY_OK;
}

static int too_large(const dray__load *l, const char *what, const char *name, uint64_t bytes,
                     const char *fix, dray_error *error)
{
    return dray__fail(error, DRAY_EFULL,
                      "%s %s: %" PRIu64 " bytes; bucket_bytes %" PRIu64 " less %" PRIu64
                      " of staging holds %" PRIu64 ": give at least %" PRIu64 "%s",
                      what, name, bytes, l->ceiling, l->staging, l->capacity,
                      bytes + ALIGNMENT + (bytes / 7 < STAGING_MOST ? bytes / 7 : STAGING_MOST) +
                          DRAY__BUCKET_MIN,
                      fix);
}

/* Adds a tensor that is larger than the bucket: slices of as many rows as fit. */
static int put_slices(dray__load *l, uint32_t index, const dray_tensor_info *tensor,
                      dray_error *error)
{
    int64_t rows = rows_of(tensor);
    uint64_t row = bytes_of(tensor) / (uint64_t)rows;
    if (row > l->capacity)
        return too_large(l, "one row of tensor", tensor->name, row, "", error);
    int rc = DRAY_OK;
    for (int64_t at = 0; at < rows && rc == DRAY_OK;) {
        int64_t fit = (int64_t)((l->capacity - l->used) / row);
        if (fit == 0) {
            rc = next_round(l, error);
            continue;
        }
        fit = fit < rows - at ? fit : rows - at;
        rc = put(l, index, at, fit, (uint64_t)fit * row, error);
        at += fit;
    }
    return rc;
}

/* Adds all tensors of a ring. */
static int put_unit(dray__load *l, const dray_layout *layout, uint32_t head, const uint32_t *next,
                    bool slices, dray_error *error)
{
    const dray_tensor_info *first = dray_layout_tensor(layout, head);
    bool alone = next[head] == head;
    uint64_t total = 0;
    uint32_t t = head;
    do {
        total += aligned(bytes_of(dray_layout_tensor(layout, t)));
        t = next[t];
    } while (t != head);
    if (total > l->capacity && alone && slices)
        return put_slices(l, head, first, error);
    if (total > l->capacity)
        return too_large(l, alone ? "tensor" : "tensors that must arrive together, of which",
                         first->name, total, alone ? ", or accept slices of rows (slices = 1)" : "",
                         error);
    int rc = l->used + total > l->capacity ? next_round(l, error) : DRAY_OK;
    do {
        const dray_tensor_info *tensor = dray_layout_tensor(layout, t);
        if (rc == DRAY_OK)
            rc = put(l, t, 0, rows_of(tensor), bytes_of(tensor), error);
        t = next[t];
    } while (t != head);
    return rc;
}

static int make_rounds(dray__load *l, const dray_layout *layout, const dray_load_options *options,
                       dray_error *error)
{
    uint32_t count = dray_layout_tensor_count(layout);
    uint32_t *next = calloc((size_t)count + 1, sizeof *next);
    bool *placed = calloc((size_t)count + 1, sizeof *placed);
    int rc = next && placed ? find_units(layout, options, next, error) : dray__nomem(error);
    if (rc == DRAY_OK)
        rc = next_round(l, error);
    for (uint32_t t = 0; t < count && rc == DRAY_OK; t++) {
        if (placed[t])
            continue;
        rc = put_unit(l, layout, t, next, options->slices != 0, error);
        for (uint32_t i = t; !placed[i]; i = next[i])
            placed[i] = true;
    }
    if (rc == DRAY_OK)
        l->first[l->rounds] = l->item_count;
    free(next);
    free(placed);
    return rc;
}

/* ---- the layout ------------------------------------------------------------------------------ */

static int add_tensors(const dray_layout *given, dray_layout *layout, dray_error *error)
{
    int rc = DRAY_OK;
    for (uint32_t t = 0; t < dray_layout_tensor_count(given) && rc == DRAY_OK; t++) {
        const dray_tensor_info *tensor = dray_layout_tensor(given, t);
        if (tensor->alias_of < 0)
            rc = dray_layout_add_tensor(layout, tensor->name, (dray_dtype)tensor->dtype,
                                        tensor->ndim, tensor->shape, NULL, error);
    }
    return rc;
}

static int add_blocks(const dray__load *l, dray_layout *layout, dray_error *error)
{
    int rc = DRAY_OK;
    for (uint32_t r = 0; r < l->rounds && rc == DRAY_OK; r++) {
        dray_region_info info = {.kind = l->kind, .bytes = l->largest, .name = "bucket"};
        rc = dray_layout_add_region(layout, &info, NULL, error);
        for (uint32_t i = l->first[r]; i < l->first[r + 1] && rc == DRAY_OK; i++) {
            const load_item *it = &l->items[i];
            const dray_tensor_info *tensor = dray_layout_tensor(layout, it->tensor);
            int64_t start[DRAY_MAX_DIMS] = {it->first_row}, extent[DRAY_MAX_DIMS];
            memcpy(extent, tensor->shape, sizeof extent);
            extent[0] = it->rows;
            if (it->bytes)
                rc = dray_layout_add_dense(layout, it->tensor, r, start, extent, it->offset, error);
        }
    }
    return rc;
}

static int make(dray__load *l, const dray_layout *given, const dray_load_options *options,
                dray_layout *layout, dray_error *error)
{
    uint32_t longest = 0;
    int rc = add_tensors(given, layout, error);
    if (rc == DRAY_OK)
        rc = make_rounds(l, layout, options, error);
    if (rc == DRAY_OK)
        rc = add_blocks(l, layout, error);
    for (uint32_t r = 0; r < l->rounds && rc == DRAY_OK; r++)
        if (l->first[r + 1] - l->first[r] > longest)
            longest = l->first[r + 1] - l->first[r];
    l->told = calloc((size_t)longest + 1, sizeof *l->told);
    return rc || l->told ? rc : dray__nomem(error);
}

static int check(const dray_load_options *options, dray_error *error)
{
    if (!options->load)
        return dray__fail(error, DRAY_EINVALID, "load options without a function");
    if (options->bucket_bytes && options->bucket_bytes < DRAY__LOAD_MIN)
        return dray__fail(error, DRAY_EINVALID,
                          "bucket_bytes %" PRIu64 ": 0 or at least %" PRIu64 " expected",
                          options->bucket_bytes, DRAY__LOAD_MIN);
    if (options->memory && options->memory != DRAY_REGION_CUDA)
        return dray__fail(error, DRAY_EINVALID, "memory %d: 0 or DRAY_REGION_CUDA",
                          options->memory);
    for (uint32_t i = 0; options->together && i < options->together_count; i++)
        if (!options->together[i] || !options->together[i][0])
            return dray__fail(error, DRAY_EINVALID, "together[%" PRIu32 "] is empty", i);
    return DRAY_OK;
}

int dray__load_open(const dray_layout *given, const dray_load_options *options, dray__load **out,
                    dray_layout **layout, dray_error *error)
{
    int rc = check(options, error);
    if (rc)
        return rc;
    dray__load *l = calloc(1, sizeof *l);
    dray_layout *made = NULL;
    if (!l)
        return dray__nomem(error);
    l->fn = options->load;
    l->user = options->user;
    l->kind = options->memory ? options->memory : DRAY_REGION_HOST;
    l->ceiling = options->bucket_bytes ? options->bucket_bytes : DRAY__BUCKET_DEFAULT;
    l->staging = l->ceiling / 8 < STAGING_MOST ? l->ceiling / 8 : STAGING_MOST;
    l->staging = l->staging < DRAY__BUCKET_MIN ? DRAY__BUCKET_MIN : l->staging;
    l->capacity = (l->ceiling - l->staging) & ~(uint64_t)(ALIGNMENT - 1);
    rc = dray_layout_new(&made, error);
    if (rc == DRAY_OK)
        rc = make(l, given, options, made, error);
    if (rc) {
        dray_layout_free(made);
        dray__load_close(l);
        return rc;
    }
    *out = l;
    *layout = made;
    return DRAY_OK;
}

void dray__load_close(dray__load *l)
{
    if (!l)
        return;
    dray_region_free(l->bucket);
    free(l->items);
    free(l->first);
    free(l->told);
    free(l);
}

uint32_t dray__load_rounds(const dray__load *l)
{
    return l->rounds;
}

uint64_t dray__load_staging(const dray__load *l)
{
    return l->staging;
}

/* ---- an update ------------------------------------------------------------------------------- */

int dray__load_begin(dray__load *l, const dray__destination *destination, dray_error *error)
{
    int rc = dray_region_alloc((dray_region_kind)l->kind, l->largest, "bucket", &l->bucket, error);
    for (uint32_t r = 0; r < l->rounds && rc == DRAY_OK; r++)
        destination->regions[r] = l->bucket;
    return rc;
}

void dray__load_end(dray__load *l, const dray__destination *destination)
{
    for (uint32_t r = 0; r < l->rounds; r++)
        destination->regions[r] = NULL;
    dray_region_free(l->bucket);
    l->bucket = NULL;
}

uint64_t dray__load_held_bytes(const dray__load *l)
{
    return l->largest;
}

int dray__load_deliver(dray__load *l, const dray__destination *destination, uint32_t round,
                       uint64_t version, dray_error *error)
{
    dray_load_bucket bucket = {.size = sizeof bucket,
                               .version = version,
                               .data = l->kind == DRAY_REGION_HOST
                                           ? dray_region_base(l->bucket)
                                           : (const void *)dray_region_device_address(l->bucket),
                               .tensors = l->told,
                               .count = l->first[round + 1] - l->first[round],
                               .index = round,
                               .buckets = l->rounds};
    for (uint32_t i = 0; i < bucket.count; i++) {
        const load_item *it = &l->items[l->first[round] + i];
        const dray_tensor_info *tensor = dray_layout_tensor(destination->layout, it->tensor);
        dray_load_tensor *t = &l->told[i];
        *t = (dray_load_tensor){.name = tensor->name,
                                .dtype = tensor->dtype,
                                .ndim = tensor->ndim,
                                .first_row = it->first_row,
                                .rows = it->rows,
                                .start = it->offset,
                                .end = it->offset + it->bytes,
                                .numel = it->bytes / dray_dtype_size((dray_dtype)tensor->dtype)};
        memcpy(t->shape, tensor->shape, sizeof t->shape);
        bucket.bytes = t->end > bucket.bytes ? t->end : bucket.bytes;
    }
    dray_error said = {0};
    int rc = l->fn(l->user, &bucket, &said);
    if (rc == 0)
        return DRAY_OK;
    return dray__fail(error, rc < 0 ? rc : DRAY_EINVALID,
                      "load_weights, bucket %" PRIu32 " of %" PRIu32 " (from %s): %s", round + 1,
                      l->rounds, bucket.count ? bucket.tensors[0].name : "nothing",
                      said.message[0] ? said.message : dray_strerror(rc));
}
