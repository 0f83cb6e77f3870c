#include "base/wire.h"

#include "base/error.h"
#include "base/hash.h"

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

int64_t dray__get_i64(dray__reader *r)
{
    return (int64_t)dray__get_u64(r);
}

const void *dray__get_blob(dray__reader *r, size_t *size)
{
    uint32_t length = dray__get_u32(r);
    const void *at = dray__get_bytes(r, length);
    *size = at ? length : 0;
    return at;
}

/* Reads text, borrowed and not terminated; with `plain`, a single line. */
static const char *get_text_view(dray__reader *r, size_t max, bool plain, size_t *size)
{
    const char *at = dray__get_blob(r, size), *why = NULL;
    if (!at)
        return NULL;
    if (*size > max)
        why = "too long a text";
    else if (memchr(at, 0, *size) || !dray__utf8_valid(at, *size))
        why = "a text that is not UTF-8";
    else if (plain && !dray__utf8_plain(at, *size))
        why = "a control character in a name";
    if (!why)
        return at;
    r->why = why;
    r->failed = true;
    return NULL;
}

static char *get_text(dray__reader *r, size_t max, bool plain)
{
    size_t size;
    const char *at = get_text_view(r, max, plain, &size);
    char *copy = at ? malloc(size + 1) : NULL;
    if (at && !copy)
        r->why = "no memory";
    r->failed |= !copy;
    if (!copy)
        return NULL;
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

/* The second range of control characters, U+0080 to U+009F, is encoded as C2 80 to C2 9F. */
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

/* ---- tables of fields ------------------------------------------------------------------------ */

static const uint8_t widths[] = {1, 1, 2, 4, 4, 8, 8, 8}; /* of numbers, by kind */

typedef struct name_item {
    const char *name;
} name_item;

/* clang-format off */
#define NUMBER(type, of_kind)                                                                      \
    {#type, sizeof(type), (const dray__field[]){{.name = "number", .kind = of_kind, .times = 1}, {.name = NULL}}}
/* clang-format on */
const dray__fields dray__u8_fields = NUMBER(uint8_t, DRAY__FIELD_U8);
const dray__fields dray__u32_fields = NUMBER(uint32_t, DRAY__FIELD_U32);
const dray__fields dray__u64_fields = NUMBER(uint64_t, DRAY__FIELD_U64);
const dray__fields dray__name_fields =
    DRAY__FIELDS(name_item, DRAY__FIELD_TEXT(name_item, name, 255));

static bool is_number(const dray__field *f)
{
    return f->kind <= DRAY__FIELD_F64;
}

size_t dray__field_bytes(const dray__field *of)
{
    return (size_t)widths[of->kind] * of->times;
}

/* The number of bytes at the struct's beginning that are numbers with the same form in memory as on
 * the wire, which are copied at once. */
static size_t flat_bytes(const dray__fields *of)
{
    size_t at = 0;
    for (const dray__field *f = of->list; f->name; f++) {
        if (!is_number(f) || f->kind == DRAY__FIELD_BOOL || f->at != at)
            return 0;
        at += dray__field_bytes(f);
    }
    return __BYTE_ORDER__ == __ORDER_LITTLE_ENDIAN__ ? at : 0;
}

size_t dray__fields_least(const dray__fields *of)
{
    size_t bytes = 0;
    for (const dray__field *f = of->list; f->name; f++) {
        if (f->kind == DRAY__FIELD_GUARD_KIND)
            return bytes + 1;
        bytes += is_number(f)                         ? dray__field_bytes(f)
                 : f->kind == DRAY__FIELD_STRUCT_KIND ? dray__fields_least(f->of)
                                                      : 4;
    }
    return bytes;
}

/* ---- they are written ------------------------------------------------------------------------ */

static inline void put_number(dray__writer *w, uint8_t kind, const uint8_t *from)
{
    uint16_t tiny;
    uint32_t small;
    uint64_t large;
    switch (kind) {
    case DRAY__FIELD_U32:
    case DRAY__FIELD_I32:
        memcpy(&small, from, sizeof small);
        dray__put_u32(w, small);
        break;
    case DRAY__FIELD_U16:
        memcpy(&tiny, from, sizeof tiny);
        dray__put_u16(w, tiny);
        break;
    case DRAY__FIELD_U8:
    case DRAY__FIELD_BOOL:
        dray__put_u8(w, *from);
        break;
    default:
        memcpy(&large, from, sizeof large);
        dray__put_u64(w, large);
    }
}

static void put_list(dray__writer *w, const dray__field *f, const uint8_t *from)
{
    const uint8_t *items;
    uint32_t count;
    memcpy(&items, from + f->at, sizeof items);
    memcpy(&count, from + f->count_at, sizeof count);
    dray__put_u32(w, count);
    size_t flat = flat_bytes(f->of);
    if (flat == f->of->size)
        dray__put_bytes(w, items, count * flat);
    for (uint32_t i = 0; i < count && flat < f->of->size; i++, items += f->of->size)
        if (flat)
            dray__put_bytes(w, items, flat);
        else
            dray__put_fields(w, f->of, items);
}

void dray__put_fields(dray__writer *w, const dray__fields *of, const void *from)
{
    const uint8_t *base = from;
    const void *data;
    size_t size;
    for (const dray__field *f = of->list; f->name; f++) {
        if (is_number(f)) {
            for (uint32_t i = 0; i < f->times; i++)
                put_number(w, f->kind, base + f->at + i * widths[f->kind]);
        } else if (f->kind == DRAY__FIELD_GUARD_KIND) {
            dray__put_u8(w, base[f->at]);
            if (!base[f->at])
                return;
        } else if (f->kind == DRAY__FIELD_STRUCT_KIND) {
            dray__put_fields(w, f->of, base + f->at);
        } else if (f->kind == DRAY__FIELD_LIST_KIND) {
            put_list(w, f, base);
        } else {
            memcpy(&data, base + f->at, sizeof data);
            if (f->kind == DRAY__FIELD_BLOB_KIND) {
                memcpy(&size, base + f->count_at, sizeof size);
                dray__put_blob(w, data, size);
            } else {
                dray__put_string(w, data);
            }
        }
    }
}

/* ---- and read -------------------------------------------------------------------------------- */

static inline void get_number(dray__reader *r, uint8_t kind, uint8_t *to)
{
    uint16_t tiny;
    uint32_t small;
    uint64_t large;
    uint8_t byte;
    switch (kind) {
    case DRAY__FIELD_U32:
    case DRAY__FIELD_I32:
        small = dray__get_u32(r);
        memcpy(to, &small, sizeof small);
        break;
    case DRAY__FIELD_U16:
        tiny = dray__get_u16(r);
        memcpy(to, &tiny, sizeof tiny);
        break;
    case DRAY__FIELD_U8:
    case DRAY__FIELD_BOOL:
        byte = dray__get_u8(r);
        *to = kind == DRAY__FIELD_BOOL ? byte != 0 : byte;
        break;
    default:
        large = dray__get_u64(r);
        memcpy(to, &large, sizeof large);
    }
}

static const char *field_text(dray__reader *r, dray__arena *arena, const dray__field *f)
{
    size_t size;
    const char *text = get_text_view(r, f->most, f->kind == DRAY__FIELD_TEXT_KIND, &size);
    char *copy = text ? dray__arena_get(arena, size + 1) : NULL;
    r->failed |= !copy;
    if (!copy)
        return NULL;
    memcpy(copy, text, size);
    copy[size] = 0;
    return copy;
}

static void get_list(dray__reader *r, dray__arena *arena, const dray__field *f, uint8_t *to)
{
    /* An allocation for every empty list would make a long-lived arena grow. */
    static max_align_t none;
    size_t size = f->of->size, flat = flat_bytes(f->of);
    uint32_t count = dray__get_count(r, flat ? flat : dray__fields_least(f->of));
    uint8_t *items = r->failed ? NULL
                     : count   ? dray__arena_get(arena, count * size)
                               : (void *)&none;
    r->failed |= !items;
    count = items ? count : 0;
    memcpy(to + f->at, &items, sizeof items);
    memcpy(to + f->count_at, &count, sizeof count);
    if (count && flat == size)
        memcpy(items, dray__get_bytes(r, count * size),
               count * size); /* get_count checked that they are there */
    else if (count)
        memset(items, 0, count * size);
    for (uint32_t i = 0; i < count && flat < size && !r->failed; i++, items += size)
        if (flat)
            memcpy(items, dray__get_bytes(r, flat), flat);
        else
            dray__get_fields(r, arena, f->of, items);
}

void dray__get_fields(dray__reader *r, dray__arena *arena, const dray__fields *of, void *to)
{
    uint8_t *base = to;
    for (const dray__field *f = of->list; f->name; f++) {
        if (is_number(f)) {
            for (uint32_t i = 0; i < f->times; i++)
                get_number(r, f->kind, base + f->at + i * widths[f->kind]);
        } else if (f->kind == DRAY__FIELD_GUARD_KIND) {
            base[f->at] = dray__get_u8(r) != 0;
            if (!base[f->at])
                return;
        } else if (f->kind == DRAY__FIELD_STRUCT_KIND) {
            dray__get_fields(r, arena, f->of, base + f->at);
        } else if (f->kind == DRAY__FIELD_LIST_KIND) {
            get_list(r, arena, f, base);
        } else if (f->kind == DRAY__FIELD_BLOB_KIND) {
            size_t size = 0;
            const void *data = dray__get_blob(r, &size);
            memcpy(base + f->at, &data, sizeof data);
            memcpy(base + f->count_at, &size, sizeof size);
        } else {
            const char *text = field_text(r, arena, f);
            memcpy(base + f->at, &text, sizeof text);
        }
    }
}

/* ---- envelopes ------------------------------------------------------------------------------- */

enum { SUM_BYTES = 8, LEAST = 8 + SUM_BYTES };

void dray__envelope_begin(const dray__envelope *envelope, dray__writer *w)
{
    dray__put_u32(w, envelope->magic);
    dray__put_u32(w, envelope->version);
}

void dray__envelope_sum(dray__writer *w)
{
    dray__put_u64(w, w->failed ? 0 : dray__hash(w->data, w->size));
}

int dray__envelope_end(dray__writer *w, int rc, void **out, size_t *size, dray_error *error)
{
    dray__envelope_sum(w);
    if (!rc)
        rc = dray__writer_check(w, error);
    if (rc) {
        dray__writer_free(w);
        return rc;
    }
    *out = w->data;
    *size = w->size;
    return DRAY_OK;
}

int dray__envelope_open(const dray__envelope *envelope, const void *data, size_t size,
                        dray__reader *out, dray_error *error)
{
    if (size < LEAST)
        return dray__fail(error, DRAY_EFORMAT, "%s: %zu bytes are too few", envelope->what, size);
    *out = dray__reader_of(data, size - SUM_BYTES);
    dray__reader tail = dray__reader_of(out->data + out->size, SUM_BYTES);
    uint32_t magic = dray__get_u32(out), version = dray__get_u32(out);
    if (magic != envelope->magic)
        return dray__fail(error, DRAY_EFORMAT, "%s: expected magic %08x, found %08x",
                          envelope->what, envelope->magic, magic);
    if (version != envelope->version)
        return dray__fail(error, DRAY_EVERSION, "%s: version %u expected, found %u", envelope->what,
                          envelope->version, version);
    if (dray__get_u64(&tail) != dray__hash(out->data, out->size))
        return dray__fail(error, DRAY_ECHECKSUM, "%s: it was altered", envelope->what);
    return DRAY_OK;
}
