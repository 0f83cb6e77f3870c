#include "queue/schema.h"

#include "base/error.h"

#include <stdio.h>
#include <string.h>

int dray__name_check(const char *name, const char *what, dray_error *error)
{
    size_t length = name ? strlen(name) : 0;
    if (!length || length > DRAY__WORD_MAX || !dray__utf8_plain(name, length))
        return dray__fail(error, DRAY_EINVALID,
                          "%s: a name is 1 to %u bytes of UTF-8 without control characters, found "
                          "%zu%s",
                          what, DRAY__WORD_MAX, length,
                          length && dray__utf8_valid(name, length) && length <= DRAY__WORD_MAX
                              ? ", and a control character"
                              : "");
    return DRAY_OK;
}

int dray__spec_check(const dray__column_spec *spec, const char *name, dray_error *error)
{
    if (!dray_dtype_size((dray_dtype)spec->dtype))
        return dray__fail(error, DRAY_EDTYPE, "column %s: unknown dtype %d", name, spec->dtype);
    if (spec->ndim > DRAY_MAX_DIMS)
        return dray__fail(error, DRAY_ESHAPE, "column %s: %u dimensions, at most %d", name,
                          spec->ndim, DRAY_MAX_DIMS);
    if (spec->ragged && spec->ndim == 0)
        return dray__fail(error, DRAY_ESHAPE, "column %s: ragged needs a dimension, found none",
                          name);
    if (spec->content < DRAY_CONTENT_TENSOR || spec->content > DRAY_CONTENT_BYTES)
        return dray__fail(error, DRAY_EINVALID, "column %s: unknown content %d", name,
                          spec->content);
    if (spec->content != DRAY_CONTENT_TENSOR &&
        (spec->dtype != DRAY_U8 || spec->ndim != 1 || !spec->ragged))
        return dray__fail(error, DRAY_EINVALID,
                          "column %s: strings and bytes are U8 of one ragged dimension, found %s "
                          "of %u dimensions, %s",
                          name, dray_dtype_name((dray_dtype)spec->dtype), spec->ndim,
                          spec->ragged ? "ragged" : "fixed");
    uint64_t bytes = dray_dtype_size((dray_dtype)spec->dtype);
    for (uint32_t d = spec->ragged ? 1 : 0; d < spec->ndim; d++)
        if (spec->shape[d] < 0 || __builtin_mul_overflow(bytes, (uint64_t)spec->shape[d], &bytes) ||
            bytes > INT64_MAX)
            return dray__fail(error, DRAY_ESHAPE,
                              "column %s: impossible extent %lld of dimension "
                              "%u",
                              name, (long long)spec->shape[d], d);
    return DRAY_OK;
}

int dray__spec_of(const dray_column_data *column, dray__column_spec *out, dray_error *error)
{
    int rc = dray__name_check(column->name, "column", error);
    if (rc)
        return rc;
    *out = (dray__column_spec){.dtype = column->dtype,
                               .content = column->content,
                               .ndim = column->ndim,
                               .ragged = column->offsets != NULL};
    for (uint32_t d = out->ragged ? 1 : 0; d < column->ndim && d < DRAY_MAX_DIMS; d++)
        out->shape[d] = column->shape[d];
    return dray__spec_check(out, column->name, error);
}

enum { SPEC_TEXT = 160 };

/* "F32 [?, 3]"; a ragged dimension is "?", one number a row is "[]". */
static const char *describe(const dray__column_spec *spec, char out[SPEC_TEXT])
{
    static const char *const contents[] = {"", " strings", " bytes"};
    int n = snprintf(out, SPEC_TEXT, "%s [", dray_dtype_name((dray_dtype)spec->dtype));
    if (spec->ragged)
        n += snprintf(out + n, SPEC_TEXT - (size_t)n, "?");
    for (uint32_t d = spec->ragged ? 1 : 0; d < spec->ndim; d++)
        n += snprintf(out + n, SPEC_TEXT - (size_t)n, "%s%lld", d ? ", " : "",
                      (long long)spec->shape[d]);
    snprintf(out + n, SPEC_TEXT - (size_t)n, "]%s", contents[spec->content]);
    return out;
}

int dray__spec_same(const dray__column_spec *column, const dray__column_spec *found,
                    const char *name, dray_error *error)
{
    char was[SPEC_TEXT], is[SPEC_TEXT];
    bool same = column->dtype == found->dtype && column->content == found->content;
    int code = same ? DRAY_ESHAPE : DRAY_EDTYPE;
    same &= column->ndim == found->ndim && column->ragged == found->ragged;
    for (uint32_t d = 0; same && d < column->ndim; d++)
        same = column->shape[d] == found->shape[d];
    return same ? DRAY_OK
                : dray__fail(error, code, "column %s: rows of %s expected, found %s", name,
                             describe(column, was), describe(found, is));
}

uint64_t dray__spec_elements(const dray__column_spec *spec)
{
    uint64_t elements = 1;
    for (uint32_t d = spec->ragged ? 1 : 0; d < spec->ndim; d++)
        elements *= (uint64_t)spec->shape[d];
    return elements;
}

uint64_t dray__spec_bytes(const dray__column_spec *spec)
{
    return dray__spec_elements(spec) * dray_dtype_size((dray_dtype)spec->dtype);
}

int dray__extent_check(const dray__extent *e, const dray__column_spec *spec, uint64_t items,
                       uint64_t size, const char *name, dray_error *error)
{
    uint64_t end, need;
    if (__builtin_add_overflow(e->values, e->bytes, &end) || end > size || e->values % DRAY__ALIGN)
        return dray__fail(error, DRAY_EFORMAT,
                          "column %s: %llu bytes at %llu do not lie (aligned to %u) within a chunk "
                          "of %llu bytes",
                          name, (unsigned long long)e->bytes, (unsigned long long)e->values,
                          DRAY__ALIGN, (unsigned long long)size);
    if (!spec->ragged) {
        if (e->offsets || __builtin_mul_overflow(items, dray__spec_bytes(spec), &need) ||
            need != e->bytes)
            return dray__fail(error, DRAY_EFORMAT,
                              "column %s: %llu items of %llu bytes, found %llu bytes", name,
                              (unsigned long long)items, (unsigned long long)dray__spec_bytes(spec),
                              (unsigned long long)e->bytes);
        return DRAY_OK;
    }
    if (__builtin_mul_overflow(items + 1, (uint64_t)8, &need) ||
        __builtin_add_overflow(e->offsets, need, &end) || end > size || e->offsets % DRAY__ALIGN)
        return dray__fail(error, DRAY_EFORMAT,
                          "column %s: %llu offsets at %llu do not lie within a chunk of %llu bytes",
                          name, (unsigned long long)items + 1, (unsigned long long)e->offsets,
                          (unsigned long long)size);
    return DRAY_OK;
}

uint64_t dray__extent_bytes(const dray__extent *extent, const dray__column_spec *spec,
                            uint64_t items)
{
    return extent->bytes + (spec->ragged ? (items + 1) * 8 : 0);
}

void dray__put_spec(dray__writer *w, const dray__column_spec *spec)
{
    dray__put_u32(w, (uint32_t)spec->dtype);
    dray__put_u32(w, (uint32_t)spec->content);
    dray__put_u32(w, spec->ndim);
    dray__put_u8(w, spec->ragged);
    for (int d = 0; d < DRAY_MAX_DIMS; d++)
        dray__put_i64(w, spec->shape[d]);
}

dray__column_spec dray__get_spec(dray__reader *r)
{
    dray__column_spec spec = {.dtype = (int32_t)dray__get_u32(r)};
    spec.content = (int32_t)dray__get_u32(r);
    spec.ndim = dray__get_u32(r);
    spec.ragged = dray__get_u8(r) != 0;
    for (int d = 0; d < DRAY_MAX_DIMS; d++)
        spec.shape[d] = dray__get_i64(r);
    return spec;
}

void dray__put_extent(dray__writer *w, const dray__extent *extent)
{
    dray__put_u64(w, extent->chunk);
    dray__put_u64(w, extent->values);
    dray__put_u64(w, extent->bytes);
    dray__put_u64(w, extent->offsets);
}

dray__extent dray__get_extent(dray__reader *r)
{
    dray__extent extent = {.chunk = dray__get_u64(r)};
    extent.values = dray__get_u64(r);
    extent.bytes = dray__get_u64(r);
    extent.offsets = dray__get_u64(r);
    return extent;
}
