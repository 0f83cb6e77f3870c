/* Growing byte buffers and the little-endian encoding of everything that leaves the process:
 * messages, packed layouts, batch descriptions.
 *
 * Writing: errors stick to the writer (out of memory), asked once at the end.
 * Reading: errors stick to the reader (short or malformed input); values read after one are zero.
 */
#ifndef DRAY_BASE_WIRE_H
#define DRAY_BASE_WIRE_H

#include <dray/dray.h>
#include <endian.h>
#include <stdbool.h>
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
void dray__put_u8(dray__writer *w, uint8_t value);
void dray__put_u16(dray__writer *w, uint16_t value);
/* A claim's answer is some hundreds of these. */
static inline void dray__put_u32(dray__writer *w, uint32_t value)
{
    value = htole32(value);
    if (w->failed || w->capacity - w->size < sizeof value) {
        dray__put_bytes(w, &value, sizeof value);
        return;
    }
    memcpy(w->data + w->size, &value, sizeof value);
    w->size += sizeof value;
}
void dray__put_u32_at(dray__writer *w, size_t at, uint32_t value); /* over one that was put */
static inline void dray__put_u64(dray__writer *w, uint64_t value)
{
    value = htole64(value);
    if (w->failed || w->capacity - w->size < sizeof value) {
        dray__put_bytes(w, &value, sizeof value);
        return;
    }
    memcpy(w->data + w->size, &value, sizeof value);
    w->size += sizeof value;
}
void dray__put_i64(dray__writer *w, int64_t value);
void dray__put_f64(dray__writer *w, double value);
void dray__put_string(dray__writer *w, const char *text); /* u32 length, bytes; NULL = "" */
void dray__put_blob(dray__writer *w, const void *data, size_t size); /* u32 length, bytes */
int dray__writer_check(const dray__writer *w, dray_error *error);    /* DRAY_ENOMEM */

typedef struct dray__reader {
    const uint8_t *data;
    size_t size, at;
    bool failed;
    const char *why; /* it failed; NULL: short or malformed */
} dray__reader;

dray__reader dray__reader_of(const void *data, size_t size);
const void *dray__get_bytes(dray__reader *r, size_t size); /* borrowed; NULL when short */
uint8_t dray__get_u8(dray__reader *r);
uint16_t dray__get_u16(dray__reader *r);
static inline uint32_t dray__get_u32(dray__reader *r)
{
    uint32_t value = 0;
    r->failed |= r->size - r->at < sizeof value;
    if (r->failed)
        return 0;
    memcpy(&value, r->data + r->at, sizeof value);
    r->at += sizeof value;
    return le32toh(value);
}
static inline uint64_t dray__get_u64(dray__reader *r)
{
    uint64_t value = 0;
    r->failed |= r->size - r->at < sizeof value;
    if (r->failed)
        return 0;
    memcpy(&value, r->data + r->at, sizeof value);
    r->at += sizeof value;
    return le64toh(value);
}
int64_t dray__get_i64(dray__reader *r);
double dray__get_f64(dray__reader *r);
/* A malloc'ed copy, terminated: a name, or another single line. Fails on control characters (they
 * end lines of files, and command terminals), on more than max bytes, and on invalid UTF-8. */
char *dray__get_string(dray__reader *r, size_t max);
/* The same of text for people, which may have lines: reasons, messages, JSON. Fails on zeros. */
char *dray__get_prose(dray__reader *r, size_t max);
const void *dray__get_blob(dray__reader *r, size_t *size); /* borrowed */
/* A count of items that take at least `item_bytes` each: fails when they cannot be there, so that a
 * forged count never sizes an allocation. */
uint32_t dray__get_count(dray__reader *r, size_t item_bytes);
/* DRAY_EFORMAT naming `what` when the input was short, malformed, or has bytes left over. */
int dray__reader_finish(const dray__reader *r, const char *what, dray_error *error);

bool dray__utf8_valid(const void *data, size_t size);
/* Valid, and without control characters (U+0000 to U+001F, U+007F to U+009F). */
bool dray__utf8_plain(const void *data, size_t size);

#endif
