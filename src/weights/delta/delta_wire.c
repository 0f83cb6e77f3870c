/* Deltas over a network (delta.h): positions as gaps, values in planes, both compressed where that
 * pays. */
#include "base/error.h"
#include "weights/delta/delta.h"

#include <stdlib.h>
#include <string.h>
#include <zstd.h>

enum {
    HEAD = 8,
    CHUNK = 1024,             /* entries that are written at once */
    LEVEL = 1,                /* of zstd */
    DECOMPRESSOR = 192 << 10, /* bytes, at most */
    TRIED = 256,              /* bytes; less says nothing of the pieces that follow */
    PAYS = 8,                 /* it must save an eighth, */
    REST_MAX = 64             /* or so many pieces are not tried then, at most */
};
#define PACKED ((uint32_t)1 << 31)

struct dray__delta_coder {
    ZSTD_CCtx *compressor;
    ZSTD_DCtx *decompressor;
    uint8_t *buffer;
    size_t room;
    uint32_t rest, last_rest; /* pieces that are not tried yet */
};

void dray__delta_coder_free(dray__delta_coder *coder)
{
    if (!coder)
        return;
    ZSTD_freeCCtx(coder->compressor);
    ZSTD_freeDCtx(coder->decompressor);
    free(coder->buffer);
    free(coder);
}

dray__delta_coder *dray__delta_coder_new(void)
{
    return calloc(1, sizeof(dray__delta_coder));
}

size_t dray__delta_coder_bytes(size_t piece)
{
    return piece + DECOMPRESSOR;
}

static bool reserve(dray__delta_coder *coder, size_t size)
{
    if (coder->room >= size)
        return true;
    uint8_t *buffer = realloc(coder->buffer, size);
    if (!buffer)
        return false;
    coder->buffer = buffer;
    coder->room = size;
    return true;
}

/* ---- encoding -------------------------------------------------------------------------------- */

/* Of a position within the slice, that within part->cross; UINT32_MAX: it lies outside. */
static uint32_t within(const dray__delta_part *part, uint32_t position)
{
    uint32_t at = 0, scale = 1;
    for (uint32_t d = DRAY_MAX_DIMS; d-- > 0;) {
        uint32_t extent = (uint32_t)part->slice.extent[d];
        int64_t here = part->slice.start[d] + position % extent - part->cross.start[d];
        position /= extent;
        if (here < 0 || here >= part->cross.extent[d])
            return UINT32_MAX;
        at += (uint32_t)here * scale;
        scale *= (uint32_t)part->cross.extent[d];
    }
    return at;
}

/* Entries of the part that lie in its rectangle; *gaps: the bytes of their gaps. */
static uint32_t count_entries(const dray__delta_part *part, bool whole, size_t *gaps)
{
    uint32_t count = 0, next = 0;
    *gaps = 0;
    for (uint32_t i = 0; i < part->count; i++) {
        uint32_t at = whole ? part->positions[i] : within(part, part->positions[i]);
        if (at == UINT32_MAX)
            continue;
        *gaps += dray__gap_bytes(at - next);
        next = at + 1;
        count++;
    }
    return count;
}

static void put_entries(const dray__delta_part *part, bool whole, size_t size, uint32_t count,
                        uint8_t *gaps, uint8_t *values)
{
    uint32_t next = 0, k = 0;
    for (uint32_t i = 0; i < part->count; i++) {
        uint32_t at = whole ? part->positions[i] : within(part, part->positions[i]);
        if (at == UINT32_MAX)
            continue;
        dray__gap_put(gaps, at - next);
        gaps += dray__gap_bytes(at - next);
        next = at + 1;
        for (size_t b = 0; b < size; b++)
            values[b * count + k] = part->values[(size_t)i * size + b];
        k++;
    }
}

/* Compresses what lies at `data`, where that pays; returns its new size. Values whose bits nobody
 * can foresee do not shrink: after a piece that did not, more and more are sent as they are. */
static size_t squeeze(dray__delta_coder *coder, uint8_t *data, size_t size, bool *packed)
{
    *packed = false;
    if (size < TRIED)
        return size;
    if (coder->rest) {
        coder->rest--;
        return size;
    }
    if (!coder->compressor)
        coder->compressor = ZSTD_createCCtx();
    if (!coder->compressor || !reserve(coder, size))
        return size;
    size_t most = size - size / PAYS;
    size_t less = ZSTD_compressCCtx(coder->compressor, coder->buffer, most, data, size, LEVEL);
    *packed = !ZSTD_isError(less);
    if (!*packed) {
        coder->last_rest =
            coder->last_rest * 2 + 1 < REST_MAX ? coder->last_rest * 2 + 1 : REST_MAX;
        coder->rest = coder->last_rest;
        return size;
    }
    coder->last_rest = 0;
    memcpy(data, coder->buffer, less);
    return less;
}

size_t dray__delta_encode(dray__delta_coder *coder, const dray__delta_view *view, uint32_t block,
                          const dray__rect *rect, int32_t dtype, uint8_t *out, size_t limit)
{
    dray__delta_part part;
    size_t size = dray_dtype_size((dray_dtype)dtype), gaps;
    if (!dray__delta_sends(view, block, dtype) || !dray__delta_slice(view, block, rect, &part) ||
        part.full)
        return 0;
    bool whole = memcmp(&part.slice, &part.cross, sizeof part.slice) == 0, packed;
    uint32_t count = count_entries(&part, whole, &gaps), gaps_said = (uint32_t)gaps;
    if (HEAD + gaps + count * size >= limit)
        return 0;
    put_entries(&part, whole, size, count, out + HEAD, out + HEAD + gaps);
    size_t bytes = HEAD + squeeze(coder, out + HEAD, gaps + count * size, &packed);
    if (packed)
        count |= PACKED;
    memcpy(out, &count, sizeof count);
    memcpy(out + 4, &gaps_said, sizeof gaps_said);
    return bytes;
}

/* ---- decoding -------------------------------------------------------------------------------- */

static int bad(size_t size, uint32_t count, dray_error *error)
{
    return dray__fail(error, DRAY_EFORMAT, "%zu bytes that are no delta of %u entries", size,
                      count);
}

/* Writes entries, a chunk after the other. */
static int apply_entries(const uint8_t *data, uint32_t count, size_t gaps, size_t size,
                         const dray_copy *copy, void *base, dray_error *error)
{
    uint16_t positions[CHUNK];
    uint8_t values[CHUNK * 8];
    dray__delta_part part = {.slice = dray__copy_rect(copy),
                             .cross = dray__copy_rect(copy),
                             .positions = positions,
                             .values = values};
    uint64_t elements = dray__rect_elements(&part.slice), position, bytes = 0;
    const uint8_t *planes = data + gaps;
    dray__gaps from = {.data = data, .bytes = gaps};
    for (uint32_t done = 0; done < count; done += part.count) {
        part.count = count - done < CHUNK ? count - done : CHUNK;
        for (uint32_t i = 0; i < part.count; i++) {
            if (!dray__gaps_next(&from, elements, &position))
                return bad(gaps, count, error);
            positions[i] = (uint16_t)position;
            for (size_t b = 0; b < size; b++)
                values[i * size + b] = planes[b * count + done + i];
        }
        int rc = dray__delta_apply(&part, copy, base, &bytes, error);
        if (rc)
            return rc;
    }
    return from.at == gaps ? DRAY_OK : bad(gaps, count, error);
}

static int unpack(dray__delta_coder *coder, const uint8_t **data, size_t size, size_t wanted,
                  dray_error *error)
{
    if (!coder->decompressor)
        coder->decompressor = ZSTD_createDCtx();
    if (!coder->decompressor || !reserve(coder, wanted))
        return dray__nomem(error);
    size_t found = ZSTD_decompressDCtx(coder->decompressor, coder->buffer, wanted, *data, size);
    if (ZSTD_isError(found) || found != wanted)
        return dray__fail(error, DRAY_EFORMAT, "a compressed delta: %zu bytes expected (%s)",
                          wanted, ZSTD_isError(found) ? ZSTD_getErrorName(found) : "fewer came");
    *data = coder->buffer;
    return DRAY_OK;
}

int dray__delta_decode(dray__delta_coder *coder, const uint8_t *data, size_t size,
                       const dray_copy *copy, void *base, dray_error *error)
{
    dray__rect rect = dray__copy_rect(copy);
    uint64_t elements = dray__rect_elements(&rect);
    size_t element = dray_dtype_size((dray_dtype)copy->destination_dtype);
    uint32_t count = 0, gaps = 0;
    if (size >= HEAD) {
        memcpy(&count, data, sizeof count);
        memcpy(&gaps, data + 4, sizeof gaps);
    }
    bool packed = count & PACKED;
    count &= ~PACKED;
    if (size < HEAD || elements > DRAY__DELTA_SLICE || count > elements || gaps < count ||
        gaps > count + elements / 255)
        return bad(size, count, error);
    size_t wanted = gaps + count * element;
    data += HEAD;
    size -= HEAD;
    if (packed ? !wanted : size != wanted)
        return bad(size, count, error);
    int rc = packed ? unpack(coder, &data, size, wanted, error) : DRAY_OK;
    return rc ? rc : apply_entries(data, count, gaps, element, copy, base, error);
}
