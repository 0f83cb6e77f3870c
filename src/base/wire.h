/* Growing byte buffers and the little-endian encoding of everything that leaves the process:
 * messages, packed layouts, batch descriptions.
 *
 * An error of writing (out of memory) is kept in the writer, and is checked once at the end. An
 * error of reading (short or malformed input) is kept in the reader, and values that are read after
 * it are zero. */
#pragma once

#include "base/arena.h"

#include <dray/dray.h>
#include <endian.h>
#include <stdbool.h>
#include <stddef.h>
#include <string.h>

typedef struct dray__writer {
    uint8_t *data;
    size_t size, capacity;
    bool failed;
} dray__writer;

void dray__writer_free(dray__writer *w);
void dray__writer_reset(dray__writer *w);
void *dray__put_space(dray__writer *w, size_t size); /* NULL when out of memory */
void dray__put_bytes(dray__writer *w, const void *data, size_t size);
void dray__put_u32_at(dray__writer *w, size_t at, uint32_t value); /* overwrites one that was put */
void dray__put_i64(dray__writer *w, int64_t value);
void dray__put_f64(dray__writer *w, double value);
void dray__put_string(dray__writer *w, const char *text); /* u32 length, bytes; NULL = "" */
void dray__put_blob(dray__writer *w, const void *data, size_t size); /* u32 length, bytes */
int dray__writer_check(const dray__writer *w, dray_error *error);    /* DRAY_ENOMEM */

typedef struct dray__reader {
    const uint8_t *data;
    size_t size, at;
    bool failed;
    const char *why; /* the reason of the failure; NULL when the input is short or malformed */
} dray__reader;

dray__reader dray__reader_of(const void *data, size_t size);
const void *dray__get_bytes(dray__reader *r, size_t size); /* borrowed; NULL when short */
/* dray__put_u32(w, value), dray__get_u32(r) and so on. They are inline, because a claim's answer
 * has hundreds of them. */
#define DRAY__WIRE_NUMBER(name, type, to_little, from_little)                                      \
    static inline void dray__put_##name(dray__writer *w, type value)                               \
    {                                                                                              \
        value = to_little(value);                                                                  \
        if (w->failed || w->capacity - w->size < sizeof value) {                                   \
            dray__put_bytes(w, &value, sizeof value);                                              \
            return;                                                                                \
        }                                                                                          \
        memcpy(w->data + w->size, &value, sizeof value);                                           \
        w->size += sizeof value;                                                                   \
    }                                                                                              \
    static inline type dray__get_##name(dray__reader *r)                                           \
    {                                                                                              \
        type value = 0;                                                                            \
        r->failed |= r->size - r->at < sizeof value;                                               \
        if (r->failed)                                                                             \
            return 0;                                                                              \
        memcpy(&value, r->data + r->at, sizeof value);                                             \
        r->at += sizeof value;                                                                     \
        return from_little(value);                                                                 \
    }
DRAY__WIRE_NUMBER(u8, uint8_t, , )
DRAY__WIRE_NUMBER(u16, uint16_t, htole16, le16toh)
DRAY__WIRE_NUMBER(u32, uint32_t, htole32, le32toh)
DRAY__WIRE_NUMBER(u64, uint64_t, htole64, le64toh)
#undef DRAY__WIRE_NUMBER
int64_t dray__get_i64(dray__reader *r);
/* Returns a name or another single line as a terminated, malloc'ed copy. Fails on control
 * characters (which end lines of files, and control terminals), on more than max bytes, and on
 * invalid UTF-8. */
char *dray__get_string(dray__reader *r, size_t max);
/* The same for text that may have several lines: reasons, messages, JSON. Fails on zeros. */
char *dray__get_prose(dray__reader *r, size_t max);
const void *dray__get_blob(dray__reader *r, size_t *size); /* borrowed */
/* Reads a count of items of at least `item_bytes` each. Fails when the input is too short for them,
 * so that no allocation has the size of a forged count. */
uint32_t dray__get_count(dray__reader *r, size_t item_bytes);
/* Returns 0, or DRAY_EFORMAT naming `what` when the input was short, malformed, or has bytes left
 * over. */
int dray__reader_finish(const dray__reader *r, const char *what, dray_error *error);

bool dray__utf8_valid(const void *data, size_t size);
/* Returns whether the text is valid UTF-8 without control characters (U+0000 to U+001F, U+007F to
 * U+009F). */
bool dray__utf8_plain(const void *data, size_t size);

/* ---- tables of fields ------------------------------------------------------------------------ */

/* Messages and records as tables of fields. One table describes how a struct is written in
 * base/wire.h's encoding, how it is read, and how docs/wire.md lists it. Numbers are little-endian;
 * a text is u32 bytes and the bytes; a list is u32 items and the items.
 *
 *     typedef struct point {
 *         int64_t x, y;
 *         const char *name;
 *     } point;
 *     static const dray__fields point_fields =
 *         DRAY__FIELDS(point, DRAY__NUMBERS(point, x, y), DRAY__FIELD_TEXT(point, name, 255));
 *
 * Reading checks lengths, counts and texts. The caller checks the values of numbers. */

typedef enum dray__field_kind {
    DRAY__FIELD_U8,
    DRAY__FIELD_BOOL,
    DRAY__FIELD_U16,
    DRAY__FIELD_U32,
    DRAY__FIELD_I32,
    DRAY__FIELD_U64,
    DRAY__FIELD_I64,
    DRAY__FIELD_F64,
    DRAY__FIELD_TEXT_KIND,  /* const char *: one line */
    DRAY__FIELD_PROSE_KIND, /* const char *: may have lines */
    DRAY__FIELD_BLOB_KIND,  /* const void *, and a size_t with the number of bytes */
    DRAY__FIELD_GUARD_KIND, /* bool: when it is false, the struct's other fields are left out */
    DRAY__FIELD_STRUCT_KIND,
    DRAY__FIELD_LIST_KIND /* a pointer, and a uint32_t with the number of items */
} dray__field_kind;

typedef struct dray__fields dray__fields;

typedef struct dray__field {
    const char *name; /* NULL at the end of the table */
    uint8_t kind;
    uint16_t times;        /* the number of consecutive numbers */
    uint32_t most;         /* bytes of a text */
    uint32_t at, count_at; /* offsets in the struct of the value, and of a list's or blob's count */
    const dray__fields *of; /* a struct's, or a list's items' */
} dray__field;

struct dray__fields {
    const char *name;
    size_t size; /* of the struct */
    const dray__field *list;
};

#define DRAY__FIELD_KIND(lvalue)                                                                   \
    _Generic((lvalue), bool                                                                        \
             : DRAY__FIELD_BOOL, char                                                              \
             : DRAY__FIELD_U8, uint8_t                                                             \
             : DRAY__FIELD_U8, uint16_t                                                            \
             : DRAY__FIELD_U16, uint32_t                                                           \
             : DRAY__FIELD_U32, int32_t                                                            \
             : DRAY__FIELD_I32, uint64_t                                                           \
             : DRAY__FIELD_U64, int64_t                                                            \
             : DRAY__FIELD_I64, double                                                             \
             : DRAY__FIELD_F64)
#define DRAY__FIELD(type, member)                                                                  \
    {                                                                                              \
        .name = #member, .kind = DRAY__FIELD_KIND(((type *)0)->member), .times = 1,                \
        .at = offsetof(type, member)                                                               \
    }
/* Several numbers by their names: DRAY__NUMBERS(point, x, y). */
#define DRAY__NUMBERS(...)                                                                         \
    DRAY__NUMBERS_AS(__VA_ARGS__, 16, 15, 14, 13, 12, 11, 10, 9, 8, 7, 6, 5, 4, 3, 2, 1)           \
    (__VA_ARGS__)
/* clang-format off */
#define DRAY__NUMBERS_AS(t, a, b, c, d, e, f, g, h, i, j, k, l, m, n, o, p, count, ...) DRAY__NUMBERS_##count
#define DRAY__NUMBERS_1(t, a) DRAY__FIELD(t, a)
#define DRAY__NUMBERS_2(t, a, ...) DRAY__FIELD(t, a), DRAY__NUMBERS_1(t, __VA_ARGS__)
#define DRAY__NUMBERS_3(t, a, ...) DRAY__FIELD(t, a), DRAY__NUMBERS_2(t, __VA_ARGS__)
#define DRAY__NUMBERS_4(t, a, ...) DRAY__FIELD(t, a), DRAY__NUMBERS_3(t, __VA_ARGS__)
#define DRAY__NUMBERS_5(t, a, ...) DRAY__FIELD(t, a), DRAY__NUMBERS_4(t, __VA_ARGS__)
#define DRAY__NUMBERS_6(t, a, ...) DRAY__FIELD(t, a), DRAY__NUMBERS_5(t, __VA_ARGS__)
#define DRAY__NUMBERS_7(t, a, ...) DRAY__FIELD(t, a), DRAY__NUMBERS_6(t, __VA_ARGS__)
#define DRAY__NUMBERS_8(t, a, ...) DRAY__FIELD(t, a), DRAY__NUMBERS_7(t, __VA_ARGS__)
#define DRAY__NUMBERS_9(t, a, ...) DRAY__FIELD(t, a), DRAY__NUMBERS_8(t, __VA_ARGS__)
#define DRAY__NUMBERS_10(t, a, ...) DRAY__FIELD(t, a), DRAY__NUMBERS_9(t, __VA_ARGS__)
#define DRAY__NUMBERS_11(t, a, ...) DRAY__FIELD(t, a), DRAY__NUMBERS_10(t, __VA_ARGS__)
#define DRAY__NUMBERS_12(t, a, ...) DRAY__FIELD(t, a), DRAY__NUMBERS_11(t, __VA_ARGS__)
#define DRAY__NUMBERS_13(t, a, ...) DRAY__FIELD(t, a), DRAY__NUMBERS_12(t, __VA_ARGS__)
#define DRAY__NUMBERS_14(t, a, ...) DRAY__FIELD(t, a), DRAY__NUMBERS_13(t, __VA_ARGS__)
#define DRAY__NUMBERS_15(t, a, ...) DRAY__FIELD(t, a), DRAY__NUMBERS_14(t, __VA_ARGS__)
#define DRAY__NUMBERS_16(t, a, ...) DRAY__FIELD(t, a), DRAY__NUMBERS_15(t, __VA_ARGS__)
/* clang-format on */
#define DRAY__FIELD_ARRAY(type, member)                                                            \
    {                                                                                              \
        .name = #member, .kind = DRAY__FIELD_KIND(((type *)0)->member[0]),                         \
        .times = sizeof(((type *)0)->member) / sizeof(((type *)0)->member[0]),                     \
        .at = offsetof(type, member)                                                               \
    }
#define DRAY__FIELD_GUARD(type, member)                                                            \
    {                                                                                              \
        .name = #member, .kind = DRAY__FIELD_GUARD_KIND, .at = offsetof(type, member)              \
    }
#define DRAY__FIELD_TEXT(type, member, max)                                                        \
    {                                                                                              \
        .name = #member, .kind = DRAY__FIELD_TEXT_KIND, .most = max, .at = offsetof(type, member)  \
    }
#define DRAY__FIELD_PROSE(type, member, max)                                                       \
    {                                                                                              \
        .name = #member, .kind = DRAY__FIELD_PROSE_KIND, .most = max, .at = offsetof(type, member) \
    }
#define DRAY__FIELD_BLOB(type, member, size)                                                       \
    {                                                                                              \
        .name = #member, .kind = DRAY__FIELD_BLOB_KIND, .at = offsetof(type, member),              \
        .count_at = offsetof(type, size)                                                           \
    }
#define DRAY__FIELD_STRUCT(type, member, fields)                                                   \
    {                                                                                              \
        .name = #member, .kind = DRAY__FIELD_STRUCT_KIND, .at = offsetof(type, member),            \
        .of = &(fields)                                                                            \
    }
#define DRAY__FIELD_LIST(type, member, count, fields)                                              \
    {                                                                                              \
        .name = #member, .kind = DRAY__FIELD_LIST_KIND, .at = offsetof(type, member),              \
        .count_at = offsetof(type, count), .of = &(fields)                                         \
    }
/* clang-format off */
#define DRAY__FIELDS(type, ...) {#type, sizeof(type), (const dray__field[]){__VA_ARGS__, {.name = NULL}}}
/* clang-format on */

extern const dray__fields dray__u8_fields, dray__u32_fields, dray__u64_fields; /* of numbers, */
extern const dray__fields dray__name_fields; /* and names of at most 255 bytes */

void dray__put_fields(dray__writer *w, const dray__fields *of, const void *from);
/* Fills *to. Texts and lists are in the arena (NULL when there are none), blobs stay in the input.
 * The reader fails on malformed input and when out of memory. Fields that were not read are then
 * zero, and their lists are empty. A field that a guard leaves out is not changed; in items of
 * lists it is zero. */
void dray__get_fields(dray__reader *r, dray__arena *arena, const dray__fields *of, void *to);
/* Return the fewest bytes of an encoded struct, and the bytes of a field of numbers. */
size_t dray__fields_least(const dray__fields *of);
size_t dray__field_bytes(const dray__field *of);

/* ---- envelopes of data that are stored or passed on by themselves
 * ------------------------------------
 *
 * u32 magic, u32 version, the content, and u64 XXH3 of all before it. */

typedef struct dray__envelope {
    const char *what; /* the name of the data in messages */
    uint32_t magic, version;
} dray__envelope;

void dray__envelope_begin(const dray__envelope *envelope, dray__writer *w);
void dray__envelope_sum(dray__writer *w);
/* Adds the sum, and hands over the writer's bytes, malloc'ed. rc is the result of writing the
 * content. When it is not DRAY_OK, it is returned. The writer is freed on failure. */
int dray__envelope_end(dray__writer *w, int rc, void **out, size_t *size, dray_error *error);
/* Checks the data. *out is a reader of the content, from after the version to before the sum.
 * Returns 0, DRAY_EFORMAT, DRAY_EVERSION, or DRAY_ECHECKSUM. */
int dray__envelope_open(const dray__envelope *envelope, const void *data, size_t size,
                        dray__reader *out, dray_error *error);
