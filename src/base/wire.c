#include "base/wire.h"

#include "base/error.h"

#include <endian.h>
#include <stdlib.h>
#include <string.h>

void dray__writer_free(dray__writer *w)
{
    free(w->data);
    *w = (dray__writer){0};
}

void dray__writer_reset(dray__writer *w)
{
    w->size = 0;
    w->failed = false;
}

void *dray__put_space(dray__writer *w, size_t size)
{
    if (w->failed)
        return NULL;
    if (!w->data || size > w->capacity - w->size) {
        size_t capacity = w->capacity ? w->capacity : 256;
        while (capacity - w->size < size) {
            if (capacity > SIZE_MAX / 2) {
                w->failed = true;
                return NULL;
            }
            capacity *= 2;
        }
        uint8_t *data = realloc(w->data, capacity);
        if (!data) {
            w->failed = true;
            return NULL;
        }
        w->data = data;
        w->capacity = capacity;
    }
    void *at = w->data + w->size;
    w->size += size;
    return at;
}

void dray__put_bytes(dray__writer *w, const void *data, size_t size)
{
    void *at = dray__put_space(w, size);
    if (at && size)
        memcpy(at, data, size);
}

void dray__put_u8(dray__writer *w, uint8_t value)
{
    dray__put_bytes(w, &value, sizeof value);
}

void dray__put_u16(dray__writer *w, uint16_t value)
{
    value = htole16(value);
    dray__put_bytes(w, &value, sizeof value);
}

void dray__put_u32_at(dray__writer *w, size_t at, uint32_t value)
{
    for (size_t byte = 0; byte < 4 && !w->failed; byte++)
        w->data[at + byte] = (uint8_t)(value >> (8 * byte));
}

void dray__put_i64(dray__writer *w, int64_t value)
{
    dray__put_u64(w, (uint64_t)value);
}

void dray__put_f64(dray__writer *w, double value)
{
    uint64_t bits;
    memcpy(&bits, &value, sizeof bits);
    dray__put_u64(w, bits);
}

void dray__put_blob(dray__writer *w, const void *data, size_t size)
{
    if (size > UINT32_MAX) {
        w->failed = true;
        return;
    }
    dray__put_u32(w, (uint32_t)size);
    dray__put_bytes(w, data, size);
}

void dray__put_string(dray__writer *w, const char *text)
{
    dray__put_blob(w, text, text ? strlen(text) : 0);
}

int dray__writer_check(const dray__writer *w, dray_error *error)
{
    return w->failed ? dray__nomem(error) : DRAY_OK;
}

dray__reader dray__reader_of(const void *data, size_t size)
{
    return (dray__reader){.data = data, .size = size};
}

const void *dray__get_bytes(dray__reader *r, size_t size)
{
    if (r->failed || size > r->size - r->at) {
        r->failed = true;
        return NULL;
    }
    const void *at = r->data + r->at;
    r->at += size;
    return at;
}

static void get(dray__reader *r, void *out, size_t size)
{
    const void *at = dray__get_bytes(r, size);
    if (at)
        memcpy(out, at, size);
    else
        memset(out, 0, size);
}

uint8_t dray__get_u8(dray__reader *r)
{
    uint8_t value;
    get(r, &value, sizeof value);
    return value;
}

uint16_t dray__get_u16(dray__reader *r)
{
    uint16_t value;
    get(r, &value, sizeof value);
    return le16toh(value);
}

int64_t dray__get_i64(dray__reader *r)
{
    return (int64_t)dray__get_u64(r);
}

double dray__get_f64(dray__reader *r)
{
    uint64_t bits = dray__get_u64(r);
    double value;
    memcpy(&value, &bits, sizeof value);
    return value;
}

const void *dray__get_blob(dray__reader *r, size_t *size)
{
    uint32_t length = dray__get_u32(r);
    const void *at = dray__get_bytes(r, length);
    *size = at ? length : 0;
    return at;
}

static char *get_text(dray__reader *r, size_t max, bool plain)
{
    size_t size;
    const char *at = dray__get_blob(r, &size), *why = NULL;
    if (!at)
        return NULL;
    if (size > max)
        why = "too long a text";
    else if (memchr(at, 0, size) || !dray__utf8_valid(at, size))
        why = "a text that is not UTF-8";
    else if (plain && !dray__utf8_plain(at, size))
        why = "a control character in a name";
    char *copy = why ? NULL : malloc(size + 1);
    if (!copy) {
        r->why = why ? why : "no memory";
        r->failed = true;
        return NULL;
    }
    memcpy(copy, at, size);
    copy[size] = 0;
    return copy;
}

char *dray__get_string(dray__reader *r, size_t max)
{
    return get_text(r, max, true);
}

char *dray__get_prose(dray__reader *r, size_t max)
{
    return get_text(r, max, false);
}

uint32_t dray__get_count(dray__reader *r, size_t item_bytes)
{
    uint32_t count = dray__get_u32(r);
    if (r->failed || (item_bytes && count > (r->size - r->at) / item_bytes)) {
        r->failed = true;
        return 0;
    }
    return count;
}

int dray__reader_finish(const dray__reader *r, const char *what, dray_error *error)
{
    if (r->failed)
        return dray__fail(error, DRAY_EFORMAT, "%s: %s at byte %zu of %zu", what,
                          r->why ? r->why : "short or malformed", r->at, r->size);
    if (r->at != r->size)
        return dray__fail(error, DRAY_EFORMAT, "%s: expected %zu bytes, found %zu", what, r->at,
                          r->size);
    return DRAY_OK;
}

/* The second row of controls, U+0080 to U+009F, is C2 80 to C2 9F. */
bool dray__utf8_plain(const void *data, size_t size)
{
    const uint8_t *p = data;
    for (size_t i = 0; i < size; i++)
        if (p[i] < 0x20 || p[i] == 0x7F || (p[i] == 0xC2 && i + 1 < size && p[i + 1] < 0xA0))
            return false;
    return dray__utf8_valid(data, size);
}

/* RFC 3629: no overlong forms, no surrogates, nothing above U+10FFFF. */
bool dray__utf8_valid(const void *data, size_t size)
{
    const uint8_t *p = data, *end = p + size;
    while (p < end) {
        uint8_t lead = *p++;
        if (lead < 0x80)
            continue;
        uint32_t point;
        unsigned more;
        if (lead >= 0xC2 && lead < 0xE0) {
            point = lead & 0x1Fu;
            more = 1;
        } else if (lead >= 0xE0 && lead < 0xF0) {
            point = lead & 0x0Fu;
            more = 2;
        } else if (lead >= 0xF0 && lead < 0xF5) {
            point = lead & 0x07u;
            more = 3;
        } else {
            return false;
        }
        if ((size_t)(end - p) < more)
            return false;
        for (unsigned i = 0; i < more; i++, p++) {
            if ((*p & 0xC0) != 0x80)
                return false;
            point = point << 6 | (*p & 0x3Fu);
        }
        if ((more == 2 && point < 0x800) || (more == 3 && (point < 0x10000 || point > 0x10FFFF)) ||
            (point >= 0xD800 && point < 0xE000))
            return false;
    }
    return true;
}
