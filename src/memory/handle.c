/* Handles: the packed form by which another process reaches a region. Version 2, little-endian, all
 * fields always there:
 *
 *   magic u32, version u32, kind i32, dtype i32, ndim u32, form i32, shape i64[4], stride i64[4],
 *   offset u64, storage_bytes u64, base_offset u64, base_bytes u64, allocation u64, device u8[16],
 *   owner_member u64, owner_epoch u64, key u8[64], event u8[64], path u8[256],
 *   checksum u64 (XXH3 of all bytes before it)
 *
 * It replaces the arguments of PyTorch's rebuild_cuda_tensor (torch/multiprocessing/reductions.py),
 * which travel pickled. */
#include "base/error.h"
#include "base/hash.h"
#include "base/options.h"
#include "base/wire.h"
#include "memory/region.h"

#include <string.h>

#define FIRST dray__end_of(dray_handle, path)

static const dray__envelope form = {"handle", 0x48595244u /* "DRYH" */, 2};

static const dray__fields fields = DRAY__FIELDS(
    dray_handle, DRAY__NUMBERS(dray_handle, kind, dtype, ndim, form),
    DRAY__FIELD_ARRAY(dray_handle, shape), DRAY__FIELD_ARRAY(dray_handle, stride),
    DRAY__NUMBERS(dray_handle, offset, storage_bytes, base_offset, base_bytes, allocation),
    DRAY__FIELD_ARRAY(dray_handle, device), DRAY__NUMBERS(dray_handle, owner_member, owner_epoch),
    DRAY__FIELD_ARRAY(dray_handle, key), DRAY__FIELD_ARRAY(dray_handle, event),
    DRAY__FIELD_ARRAY(dray_handle, path));

enum { HEAD_BYTES = 8, SUM_BYTES = 8 };

size_t dray_handle_packed_size(void)
{
    return HEAD_BYTES + dray__fields_least(&fields) + SUM_BYTES;
}

static bool all_zero(const void *data, size_t size)
{
    const uint8_t *bytes = data;
    for (size_t i = 0; i < size; i++)
        if (bytes[i])
            return false;
    return true;
}

int dray__handle_read(const dray_handle *given, dray_handle *out, dray_error *error)
{
    return dray__options_read(out, sizeof *out, FIRST, given, "dray_handle", error);
}

int dray_handle_describe(const dray_region *region, dray_handle *handle, dray_error *error)
{
    if (!region->ops->describe)
        return dray__fail(error, DRAY_EUNSUPPORTED,
                          "region %s: %s memory cannot be reached from another process",
                          region->name, dray_region_kind_name(region->ops->kind));
    dray_handle filled = DRAY_HANDLE_INIT;
    int rc = dray__handle_read(handle, &filled, error);
    if (rc)
        return rc;
    filled.kind = (int32_t)region->ops->kind;
    filled.storage_bytes = region->bytes;
    memset(filled.key, 0, sizeof filled.key);
    memset(filled.device, 0, sizeof filled.device);
    memset(filled.path, 0, sizeof filled.path);
    filled.base_offset = filled.base_bytes = filled.allocation = 0;
    filled.form = DRAY_CUDA_FORM_NONE;
    rc = region->ops->describe(region, &filled, error);
    if (!rc)
        dray__options_fill(handle, &filled, sizeof filled);
    return rc;
}

static int bad(dray_error *error, const char *field, const char *why)
{
    return dray__fail(error, DRAY_EFORMAT, "handle: field %s %s", field, why);
}

/* The fields that each kind uses. Unused fields must be zero, and required ones must be set. */
static const struct {
    dray_region_kind kind;
    bool device, event, path;
} uses[] = {
    {DRAY_REGION_SHARED, false, false, false},
    {DRAY_REGION_PINNED, false, true, false},
    {DRAY_REGION_CUDA, true, true, false},
    {DRAY_REGION_FILE, false, false, true},
};

static int check_kind(const dray_handle *h, dray_error *error)
{
    for (size_t i = 0; i < sizeof uses / sizeof *uses; i++) {
        if ((int32_t)uses[i].kind != h->kind)
            continue;
        if (all_zero(h->device, sizeof h->device) == uses[i].device)
            return bad(error, "device", uses[i].device ? "is not set" : "is set for host memory");
        if (!uses[i].event && !all_zero(h->event, sizeof h->event))
            return bad(error, "event", "is set for memory that has no events");
        if (all_zero(h->key, sizeof h->key))
            return bad(error, "key", "is not set");
        size_t length = strnlen(h->path, sizeof h->path);
        if (length == sizeof h->path)
            return bad(error, "path", "is not terminated");
        if (!all_zero(h->path + length, sizeof h->path - length))
            return bad(error, "path", "has bytes after its end");
        if (uses[i].path ? h->path[0] != '/' : h->path[0] != 0)
            return bad(error, "path", uses[i].path ? "is not absolute" : "is set for memory");
        return DRAY_OK;
    }
    return dray__fail(error, DRAY_EFORMAT,
                      "handle: field kind is %d, which no other process can reach", (int)h->kind);
}

static int check_rectangle(const dray_handle *h, dray_error *error)
{
    uint64_t element = dray_dtype_size((dray_dtype)h->dtype);
    if (h->dtype != DRAY_DTYPE_NONE && !element)
        return dray__fail(error, DRAY_EFORMAT, "handle: field dtype is %d, unknown", (int)h->dtype);
    if (h->ndim > DRAY_MAX_DIMS || (h->dtype == DRAY_DTYPE_NONE && h->ndim))
        return dray__fail(error, DRAY_EFORMAT, "handle: field ndim is %u, at most %d is possible",
                          (unsigned)h->ndim, h->dtype == DRAY_DTYPE_NONE ? 0 : DRAY_MAX_DIMS);
    uint64_t end = element;
    bool empty = false;
    for (uint32_t d = 0; d < DRAY_MAX_DIMS; d++) {
        if (h->shape[d] < 0 || (d >= h->ndim && h->shape[d]))
            return dray__fail(error, DRAY_EFORMAT, "handle: field shape[%u] is %lld", d,
                              (long long)h->shape[d]);
        if (h->stride[d] < 0 || (d >= h->ndim && h->stride[d]))
            return dray__fail(error, DRAY_EFORMAT, "handle: field stride[%u] is %lld", d,
                              (long long)h->stride[d]);
        if (d >= h->ndim)
            continue;
        empty = empty || h->shape[d] == 0;
        uint64_t last;
        uint64_t steps = h->shape[d] ? (uint64_t)h->shape[d] - 1 : 0;
        if (__builtin_mul_overflow(steps, (uint64_t)h->stride[d], &last) ||
            __builtin_add_overflow(end, last, &end))
            return dray__fail(error, DRAY_EFORMAT,
                              "handle: field stride[%u] is %lld: with shape %lld it overflows", d,
                              (long long)h->stride[d], (long long)h->shape[d]);
    }
    if (empty)
        end = 0;
    if (h->offset > h->storage_bytes)
        return dray__fail(error, DRAY_EFORMAT,
                          "handle: field offset is %llu, beyond the storage's "
                          "%llu bytes",
                          (unsigned long long)h->offset, (unsigned long long)h->storage_bytes);
    if (end > h->storage_bytes - h->offset)
        return dray__fail(
            error, DRAY_EFORMAT,
            "handle: fields shape and stride reach byte %llu past offset %llu, beyond "
            "the storage's %llu",
            (unsigned long long)end, (unsigned long long)h->offset,
            (unsigned long long)h->storage_bytes);
    return DRAY_OK;
}

/* Checks the place of the storage in the allocation that a CUDA handle exports. */
static int check_base(const dray_handle *h, dray_error *error)
{
    bool cuda = h->kind == DRAY_REGION_CUDA;
    if (cuda ? h->form != DRAY_CUDA_FORM_VMM && h->form != DRAY_CUDA_FORM_IPC
             : h->form != DRAY_CUDA_FORM_NONE)
        return dray__fail(error, DRAY_EFORMAT, "handle: field form is %d, which %s memory has not",
                          (int)h->form, dray_region_kind_name((dray_region_kind)h->kind));
    if (!cuda && (h->base_bytes || h->base_offset || h->allocation))
        return bad(error,
                   h->base_bytes    ? "base_bytes"
                   : h->base_offset ? "base_offset"
                                    : "allocation",
                   "is set for memory that is exported alone");
    if (cuda &&
        (h->base_offset > h->base_bytes || h->storage_bytes > h->base_bytes - h->base_offset))
        return dray__fail(error, DRAY_EFORMAT,
                          "handle: field base_offset is %llu: with the storage's %llu bytes it "
                          "ends beyond the allocation's %llu",
                          (unsigned long long)h->base_offset, (unsigned long long)h->storage_bytes,
                          (unsigned long long)h->base_bytes);
    return DRAY_OK;
}

int dray__handle_check(const dray_handle *handle, dray_error *error)
{
    int rc = check_kind(handle, error);
    if (!rc)
        rc = check_base(handle, error);
    return rc ? rc : check_rectangle(handle, error);
}

int dray_handle_pack(const dray_handle *given, void *out, size_t capacity, dray_error *error)
{
    dray_handle own = DRAY_HANDLE_INIT, *handle = &own;
    int rc = dray__handle_read(given, handle, error);
    if (!rc)
        rc = dray__handle_check(handle, error);
    if (rc)
        return rc;
    size_t size = dray_handle_packed_size();
    if (capacity < size)
        return dray__fail(error, DRAY_EFULL, "handle: %zu bytes of room, %zu needed", capacity,
                          size);
    dray__writer w = {0};
    dray__envelope_begin(&form, &w);
    dray__put_fields(&w, &fields, handle);
    dray__envelope_sum(&w);
    rc = dray__writer_check(&w, error);
    if (!rc)
        memcpy(out, w.data, w.size);
    dray__writer_free(&w);
    return rc;
}

/* Returns the name of the field in which an incomplete handle ends. */
static const char *last_field(size_t size)
{
    size_t end = HEAD_BYTES;
    if (size < HEAD_BYTES)
        return size < HEAD_BYTES / 2 ? "magic" : "version";
    for (const dray__field *f = fields.list; f->name; f++)
        if (size < (end += dray__field_bytes(f)))
            return f->name;
    return "checksum";
}

static int check_head(dray__reader *r, dray_error *error)
{
    size_t size = r->size, whole = dray_handle_packed_size();
    uint32_t magic = dray__get_u32(r), version = dray__get_u32(r);
    if (size >= 4 && magic != form.magic)
        return bad(error, "magic", "is not that of a handle");
    if (size >= HEAD_BYTES && version != form.version)
        return dray__fail(error, DRAY_EVERSION,
                          "handle: field version is %u, this library reads %u", version,
                          form.version);
    if (size < whole)
        return dray__fail(error, DRAY_EFORMAT, "handle: truncated in field %s (%zu bytes of %zu)",
                          last_field(size), size, whole);
    if (size > whole)
        return dray__fail(error, DRAY_EFORMAT, "handle: %zu bytes after field checksum",
                          size - whole);
    return DRAY_OK;
}

int dray_handle_unpack(const void *data, size_t size, dray_handle *out, dray_error *error)
{
    int rc = dray__options_check(out, FIRST, "dray_handle", error);
    dray__reader r = dray__reader_of(data, size);
    if (!rc)
        rc = check_head(&r, error);
    if (rc)
        return rc;
    dray_handle h = DRAY_HANDLE_INIT;
    dray__get_fields(&r, NULL, &fields, &h);
    size_t covered = r.at;
    uint64_t checksum = dray__get_u64(&r);
    rc = dray__reader_finish(&r, "handle", error);
    /* The fields are checked first, because an error that names a field helps more than one about
     * the sum. */
    if (!rc)
        rc = dray__handle_check(&h, error);
    if (!rc && checksum != dray__hash(data, covered))
        rc =
            bad(error, "checksum", "differs from that of the other fields: the handle was altered");
    if (!rc)
        dray__options_fill(out, &h, sizeof h);
    return rc;
}
