/* The sums of a checkpoint's tensors in its files: in each header's __metadata__, under
 * "dray.sums", a JSON object of tensor -> 16 hexadecimal digits (the checksum of
 * mover/kernels/checksum.h). Other readers of safetensors see one more string. */
#include "base/error.h"
#include "base/io.h"
#include "base/json.h"
#include "model/layout/layout.h"
#include "model/safetensors/safetensors.h"
#include "weights/checkpoint/overlay.h"

#include <errno.h>
#include <fcntl.h>
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

bool dray__sum_parse(const char *text, uint64_t *out)
{
    *out = 0;
    if (!text || strlen(text) != 16)
        return false;
    for (; *text; text++) {
        const char *digits = "0123456789abcdef", *at = strchr(digits, *text);
        if (!at)
            return false;
        *out = *out << 4 | (uint64_t)(at - digits);
    }
    return true;
}

static int add_sums(const char *path, const dray__stored_file *file, const json_t *said,
                    dray__sums *out, dray_error *error)
{
    size_t expected = 0;
    for (uint32_t i = 0; i < file->count; i++) {
        const dray__file_tensor *t = &file->tensors[i];
        uint64_t sum;
        if (t->end == t->start)
            continue;
        expected++;
        if (!dray__sum_parse(json_string_value(json_object_get(said, t->name)), &sum))
            return dray__fail(error, DRAY_EFORMAT,
                              "%.200s: " DRAY__SUMS_KEY ": tensor %.160s: expected 16 hexadecimal "
                              "digits",
                              path, t->name);
        if (!dray__sums_add(out, t->name, (int32_t)t->dtype,
                            (t->end - t->start) / dray_dtype_size(t->dtype), sum))
            return dray__nomem(error);
    }
    if (json_object_size(said) != expected)
        return dray__fail(error, DRAY_EFORMAT,
                          "%.200s: " DRAY__SUMS_KEY ": sums of %zu tensors, the file has %zu", path,
                          json_object_size(said), expected);
    return DRAY_OK;
}

static int add_file(const char *path, dray__sums *out, dray_error *error)
{
    dray__stored_file file;
    int rc = dray__safetensors_read(path, &file, error);
    if (rc)
        return rc;
    const json_t *metadata = json_object_get(file.header, "__metadata__");
    const char *text = json_string_value(json_object_get(metadata, DRAY__SUMS_KEY));
    json_t *said = NULL;
    if (text)
        rc = dray__json_parse(text, strlen(text), path, &said, error);
    if (rc == DRAY_OK && text)
        rc = add_sums(path, &file, said, out, error);
    json_decref(said);
    dray__stored_file_free(&file);
    return rc;
}

int dray__stored_sums(const dray_layout *files, dray__sums *out, dray_error *error)
{
    int rc = DRAY_OK;
    for (uint32_t i = 0; i < dray_layout_region_count(files) && rc == DRAY_OK; i++)
        rc = add_file(dray_layout_region(files, i)->name, out, error);
    return rc;
}

static const char *file_of(const dray_layout *files, const char *tensor)
{
    uint32_t index;
    if (dray_layout_find(files, tensor, &index, NULL))
        return "?";
    for (uint32_t b = 0; b < dray_layout_block_count(files); b++)
        if (dray_layout_block(files, b)->tensor == index)
            return dray_layout_region(files, dray_layout_block(files, b)->region)->name;
    return "?";
}

int dray__stored_compare(const dray_layout *files, const dray__sums *stored,
                         const dray__sums *found, dray_error *error)
{
    const char *first = NULL;
    uint32_t wrong = 0;
    char names[240] = "";
    const dray__named_sum *wanted = dray__sums_items(stored);
    if (stored->count && !wanted)
        return dray__nomem(error);
    for (uint32_t i = 0; i < stored->count; i++) {
        const dray__named_sum *want = &wanted[i], *got = dray__sums_find(found, want->name);
        if (got && got->sum == want->sum && got->elements == want->elements)
            continue;
        if (wrong++ == 0)
            first = want->name;
        size_t used = strlen(names);
        if (wrong <= 4)
            snprintf(names + used, sizeof names - used, "%s%s", used ? ", " : "", want->name);
    }
    if (!first)
        return DRAY_OK;
    return dray__fail(error, DRAY_ECHECKSUM,
                      "%.200s: %" PRIu32 " tensors differ from the written ones (%s%s)",
                      file_of(files, first), wrong, names, wrong > 4 ? ", ..." : "");
}

int dray_checksums_of_checkpoint(const char *path, uint32_t *compared, dray_checksums **out,
                                 dray_error *error)
{
    if (!path || !out)
        return dray__fail(error, DRAY_EINVALID, "path and out must be given");
    dray_layout *files;
    dray__overlay *overlay;
    int rc = dray__checkpoint_layout(path, &files, &overlay, error);
    if (rc)
        return rc;
    dray__sums stored = {0};
    dray_checksums *sums = NULL;
    dray_region **regions = dray__overlay_open(overlay, files, &rc, error);
    if (rc == DRAY_OK)
        rc = dray__overlay_sums(overlay, files, &stored, error);
    if (rc == DRAY_OK)
        rc = dray_checksums_compute(files, regions, &sums, error);
    if (rc == DRAY_OK)
        rc = dray__stored_compare(files, &stored, &sums->sums, error);
    dray__files_close(regions, files);
    dray__overlay_free(overlay);
    dray_layout_free(files);
    if (rc) {
        dray_checksums_free(sums);
    } else {
        *out = sums;
        if (compared)
            *compared = stored.count;
    }
    dray__sums_free(&stored);
    return rc;
}

int dray_checkpoint_layout(const char *path, dray_layout **out, char **base, dray_error *error)
{
    dray__overlay *overlay;
    dray_layout *layout;
    if (!path || !out)
        return dray__fail(error, DRAY_EINVALID, "path and out must be given");
    int rc = dray__checkpoint_layout(path, &layout, &overlay, error);
    if (rc)
        return rc;
    char *name = overlay && base ? strdup(dray__overlay_base(overlay)) : NULL;
    bool failed = overlay && base && !name;
    dray__overlay_free(overlay);
    if (failed) {
        dray_layout_free(layout);
        return dray__nomem(error);
    }
    if (base)
        *base = name;
    *out = layout;
    return DRAY_OK;
}

/* ---- writing --------------------------------------------------------------------------------- */

void dray__values_free(char **values, const dray_layout *layout)
{
    for (uint32_t t = 0; values && t < dray_layout_tensor_count(layout); t++)
        free(values[t]);
    free(values);
}

/* Returns the text of each tensor's sum, as in the files; NULL when out of memory. */
static char **values_of(const dray_layout *layout, const dray__sums *sums)
{
    uint32_t count = dray_layout_tensor_count(layout);
    char **values = calloc((size_t)count + 1, sizeof *values);
    for (uint32_t t = 0; values && t < count; t++) {
        const dray__named_sum *sum = dray__sums_find(sums, dray_layout_tensor(layout, t)->name);
        if (sum && asprintf(&values[t], "%016" PRIx64, sum->sum) < 0) {
            values[t] = NULL;
            dray__values_free(values, layout);
            return NULL;
        }
    }
    return values;
}

char **dray__values_later(const dray_layout *layout)
{
    dray__sums zeros = {0};
    bool ok = true;
    for (uint32_t t = 0; t < dray_layout_tensor_count(layout) && ok; t++) {
        const dray_tensor_info *info = dray_layout_tensor(layout, t);
        int64_t elements = info->alias_of < 0 && !dray__layout_name_only(layout, t);
        for (uint32_t d = 0; d < info->ndim && elements; d++)
            elements = info->shape[d] > 0;
        ok = !elements || dray__sums_add(&zeros, info->name, info->dtype, 0, 0);
    }
    char **values = ok ? values_of(layout, &zeros) : NULL;
    dray__sums_free(&zeros);
    return values;
}

/* Returns the header's text with the sums in it. Its length does not change, because all sums have
 * the same length. */
static char *header_text(const dray__stored_file *file, const dray__sums *sums,
                         const char **missing)
{
    json_t *metadata = json_object_get(file->header, "__metadata__"), *values = json_object();
    for (uint32_t i = 0; i < file->count && !*missing; i++) {
        const dray__file_tensor *t = &file->tensors[i];
        const dray__named_sum *sum = dray__sums_find(sums, t->name);
        char text[32];
        if (t->end == t->start)
            continue;
        if (!sum)
            *missing = t->name;
        else if (snprintf(text, sizeof text, "%016" PRIx64, sum->sum) > 0)
            dray__json_set(&values, t->name, json_string(text));
    }
    char *text = dray__json_text(values, JSON_COMPACT);
    json_decref(values);
    if (!text || json_object_set_new(metadata, DRAY__SUMS_KEY, json_string(text)) < 0) {
        free(text);
        return NULL;
    }
    free(text);
    return dray__json_text(file->header, JSON_COMPACT);
}

static int set_file(const char *path, const dray__sums *sums, dray_error *error)
{
    dray__stored_file file;
    const char *missing = NULL;
    int rc = dray__safetensors_read(path, &file, error);
    if (rc)
        return rc;
    uint64_t body = file.bytes;
    for (uint32_t i = 0; i < file.count; i++)
        body = file.tensors[i].start < body ? file.tensors[i].start : body;
    char *text = header_text(&file, sums, &missing);
    size_t length = text ? strlen(text) : 0;
    if (missing)
        rc = dray__fail(error, DRAY_EHOLE, "%.200s: tensor %.160s: nobody wrote it", path, missing);
    else if (!text)
        rc = dray__nomem(error);
    else if (length > body - 8 || body - 8 - length >= 8)
        rc = dray__fail(error, DRAY_EFORMAT, "%.200s: a header of %zu bytes does not take the sums",
                        path, length);
    int fd = rc ? -1 : open(path, O_WRONLY | O_CLOEXEC);
    if (!rc && (fd < 0 || lseek(fd, 8, SEEK_SET) < 0 || dray__write_all(fd, text, length) < 0))
        rc = dray__fail_errno(error, errno, "writing the header of %.300s", path);
    if (fd >= 0 && close(fd) && !rc)
        rc = dray__fail_errno(error, errno, "writing the header of %.300s", path);
    free(text);
    dray__stored_file_free(&file);
    return rc;
}

int dray__values_set(const dray_layout *files, const dray__sums *sums, dray_error *error)
{
    int rc = DRAY_OK;
    for (uint32_t i = 0; i < dray_layout_region_count(files) && rc == DRAY_OK; i++)
        rc = set_file(dray_layout_region(files, i)->name, sums, error);
    return rc;
}
