/* Deltas over a network (delta.h): positions as gaps, and codes or, in planes, values; both
 * compressed where that pays. */
#include "base/error.h"
#include "memory/cuda_memory.h"
#include "mover/cuda/cuda.h"
#include "weights/delta/delta.h"

#include <inttypes.h>
#include <stdlib.h>
#include <string.h>
#include <zstd.h>

enum {
    HEAD = 8,
    CHUNK = 1024,             /* entries that are written at once */
    LEVEL = 1,                /* of zstd */
    DECOMPRESSOR = 192 << 10, /* bytes, at most */
    TRIED = 256,              /* bytes; smaller pieces do not predict later ones */
    PAYS = 8,                 /* compression must save an eighth, */
    REST_MAX = 64             /* else up to so many pieces are sent uncompressed */
};
#define PACKED ((uint32_t)1 << 31)
#define CODED ((uint32_t)1 << 30)

struct dray__delta_coder {
    ZSTD_CCtx *compressor;
    ZSTD_DCtx *decompressor;
    uint8_t *buffer, *entries; /* entries: of a GPU's patches, DRAY__CUDA_PATCH_BYTES */
    uint8_t *found; /* positions, values and steps of what dray__delta_encode_between finds */
    size_t room, found_room;
    uint32_t rest, last_rest; /* pieces to send without trying to compress */
};

void dray__delta_coder_free(dray__delta_coder *coder)
{
    if (!coder)
        return;
    ZSTD_freeCCtx(coder->compressor);
    ZSTD_freeDCtx(coder->decompressor);
    free(coder->buffer);
    free(coder->entries);
    free(coder->found);
    free(coder);
}

dray__delta_coder *dray__delta_coder_new(void)
{
    return calloc(1, sizeof(dray__delta_coder));
}

size_t dray__delta_coder_bytes(size_t piece, bool gpus)
{
    return piece + DECOMPRESSOR + (gpus ? DRAY__CUDA_PATCH_BYTES : 0);
}

static bool grow(uint8_t **buffer, size_t *room, size_t size)
{
    if (*room >= size)
        return true;
    uint8_t *grown = realloc(*buffer, size);
    if (!grown)
        return false;
    *buffer = grown;
    *room = size;
    return true;
}

static bool reserve(dray__delta_coder *coder, size_t size)
{
    return grow(&coder->buffer, &coder->room, size);
}

/* ---- encoding -------------------------------------------------------------------------------- */

/* Converts a position within the slice to one within part->cross; UINT32_MAX when it is outside. */
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

/* The part's entries in its rectangle, as they are sent. */
struct outgoing {
    const dray__delta_part *part;
    size_t size;
    bool whole; /* the rectangle is the slice */
    uint32_t count;
    size_t gaps;     /* bytes of them */
    uint8_t *values; /* when not whole: the values, dense, then the steps */
    int8_t *steps;
};

static uint32_t place_in(const struct outgoing *s, uint32_t i)
{
    return s->whole ? s->part->positions[i] : within(s->part, s->part->positions[i]);
}

static bool gather(dray__delta_coder *coder, const dray__delta_part *part, size_t size,
                   struct outgoing *s)
{
    *s = (struct outgoing){.part = part, .size = size};
    s->whole = memcmp(&part->slice, &part->cross, sizeof part->slice) == 0;
    if (!s->whole && !reserve(coder, part->count * (size + 1)))
        return false;
    s->values = s->whole ? (uint8_t *)part->values : coder->buffer;
    s->steps = s->whole ? (int8_t *)part->steps : (int8_t *)coder->buffer + part->count * size;
    uint32_t next = 0;
    for (uint32_t i = 0; i < part->count; i++) {
        uint32_t at = place_in(s, i);
        if (at == UINT32_MAX)
            continue;
        if (!s->whole) {
            memcpy(s->values + s->count * size, part->values + (size_t)i * size, size);
            s->steps[s->count] = part->steps[i];
        }
        s->gaps += dray__gap_bytes(at - next);
        next = at + 1;
        s->count++;
    }
    return true;
}

static void put_gaps(const struct outgoing *s, uint8_t *to)
{
    uint32_t next = 0;
    for (uint32_t i = 0; i < s->part->count; i++) {
        uint32_t at = place_in(s, i);
        if (at == UINT32_MAX)
            continue;
        dray__gap_put(to, at - next);
        to += dray__gap_bytes(at - next);
        next = at + 1;
    }
}

static void put_planes(const struct outgoing *s, uint8_t *to)
{
    for (uint32_t i = 0; i < s->count; i++)
        for (size_t b = 0; b < s->size; b++)
            to[b * s->count + i] = s->values[(size_t)i * s->size + b];
}

/* Compresses `data` in place if that pays, and returns its new size. After a piece that did not
 * shrink, pieces are sent uncompressed without a try, more of them each time: values with random
 * bits do not compress. */
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

/* Writes the part's entries. Returns their bytes; 0 when they would be `limit` or more. */
static size_t encode(dray__delta_coder *coder, const dray__delta_part *part, size_t size,
                     uint8_t *out, size_t limit)
{
    struct outgoing s;
    if (!gather(coder, part, size, &s))
        return 0;
    size_t values = s.count * size, codes = dray__codes_bytes(s.steps, s.count, size);
    bool coded = codes < values, packed;
    size_t body = s.gaps + (coded ? codes : values);
    if (HEAD + body >= limit)
        return 0;
    put_gaps(&s, out + HEAD);
    if (coded)
        dray__codes_put(out + HEAD + s.gaps, s.steps, s.values, s.count, size);
    else
        put_planes(&s, out + HEAD + s.gaps);
    size_t bytes = HEAD + squeeze(coder, out + HEAD, body, &packed);
    uint32_t head[2] = {s.count | (packed ? PACKED : 0) | (coded ? CODED : 0), (uint32_t)s.gaps};
    memcpy(out, head, sizeof head);
    return bytes;
}

size_t dray__delta_encode(dray__delta_coder *coder, const dray__delta_view *view, uint32_t block,
                          const dray__rect *rect, int32_t dtype, uint8_t *out, size_t limit)
{
    dray__delta_part part;
    if (!dray__delta_sends(view, block, dtype) || !dray__delta_slice(view, block, rect, &part) ||
        part.full)
        return 0;
    return encode(coder, &part, dray_dtype_size((dray_dtype)dtype), out, limit);
}

size_t dray__delta_encode_between(dray__delta_coder *coder, const void *was, const void *now,
                                  uint64_t count, int32_t dtype, uint8_t *out, size_t limit)
{
    size_t size = dray_dtype_size((dray_dtype)dtype);
    const uint8_t *old = was, *new = now;
    if (count > DRAY__DELTA_SLICE ||
        !grow(&coder->found, &coder->found_room, count * (sizeof(uint16_t) + size + 1)))
        return 0;
    uint16_t *positions = (uint16_t *)(void *)coder->found;
    uint8_t *values = coder->found + count * sizeof *positions;
    int8_t *steps = (int8_t *)values + count * size;
    const dray__rect all = {.extent = {(int64_t)count, 1, 1, 1}};
    dray__delta_part part = {
        .slice = all, .cross = all, .positions = positions, .values = values, .steps = steps};
    for (uint64_t i = 0; i < count; i++, old += size, new += size) {
        if (memcmp(old, new, size) == 0)
            continue;
        positions[part.count] = (uint16_t)i;
        memcpy(values + part.count * size, new, size);
        steps[part.count++] = dray__step_of(old, new, size, dtype);
    }
    return encode(coder, &part, size, out, limit);
}

/* ---- the version before ---------------------------------------------------------------------- */

/* Takes one part of the rectangle back. */
static bool undo_part(const dray__delta_part *part, const dray_copy *copy, void *dense)
{
    int8_t back[CHUNK];
    dray__delta_part some = *part;
    uint64_t bytes = 0;
    some.stepping = true;
    some.steps = back;
    for (uint32_t done = 0; done < part->count; done += some.count) {
        some.count = part->count - done < CHUNK ? part->count - done : CHUNK;
        some.positions = part->positions + done;
        some.values = part->values + done * dray_dtype_size((dray_dtype)copy->destination_dtype);
        for (uint32_t i = 0; i < some.count; i++) {
            back[i] = (int8_t)-part->steps[done + i];
            if (!back[i] && within(part, some.positions[i]) != UINT32_MAX)
                return false;
        }
        if (dray__delta_apply(&some, copy, dense, &bytes, NULL))
            return false;
    }
    return true;
}

bool dray__delta_undo(const dray__delta_view *view, uint32_t block, const dray_copy *copy,
                      void *dense)
{
    dray__rect rect = dray__copy_rect(copy);
    dray_copy to = *copy;
    dray__delta_walk walk;
    dray__delta_part part;
    if (!dray__delta_sends(view, block, copy->source_dtype))
        return false;
    dray__copy_to_dense(&to, copy->source_dtype, 0);
    dray__delta_start(view, block, &rect, &walk);
    int rc;
    while ((rc = dray__delta_next(&walk, &part, NULL)) == DRAY_OK)
        if (part.full || !undo_part(&part, &to, dense))
            return false;
    return rc == DRAY_EEND;
}

/* ---- decoding -------------------------------------------------------------------------------- */

static int bad(size_t size, uint32_t count, dray_error *error)
{
    return dray__fail(error, DRAY_EFORMAT, "%zu bytes that are no delta of %u entries", size,
                      count);
}

/* A message with a valid head. Its entries are read chunk by chunk. */
struct incoming {
    uint32_t count, done;
    size_t size, bytes; /* of an element; of the message, for errors */
    uint64_t elements;
    bool coded;
    dray__gaps gaps;
    dray__codes codes;
    const uint8_t *planes;
};

/* Each of these reads one field of the next `count` entries, and returns how many entries had it.
 */

static uint32_t get_positions(struct incoming *r, uint32_t count, uint16_t *positions)
{
    dray__gaps gaps = r->gaps;
    uint64_t position;
    uint32_t i = 0;
    for (; i < count && dray__gaps_next(&gaps, r->elements, &position); i++)
        positions[i] = (uint16_t)position;
    r->gaps = gaps;
    return i;
}

static uint32_t get_codes(struct incoming *r, uint32_t count, uint8_t *values, int8_t *steps)
{
    dray__codes codes = r->codes;
    dray__change change;
    uint32_t i = 0;
    for (; i < count && dray__codes_next(&codes, r->size, &change); i++) {
        steps[i] = change.step;
        memcpy(values + i * r->size, &change.bits, r->size);
    }
    r->codes = codes;
    return i;
}

static uint32_t get_planes(const struct incoming *r, uint32_t count, uint8_t *values, int8_t *steps)
{
    memset(steps, 0, count);
    if (r->size == 2) {
        const uint8_t *low = r->planes + r->done, *high = low + r->count;
        for (uint32_t i = 0; i < count; i++) {
            uint16_t value = (uint16_t)(low[i] | high[i] << 8);
            memcpy(values + i * sizeof value, &value, sizeof value);
        }
        return count;
    }
    for (size_t b = 0; b < r->size; b++) {
        const uint8_t *plane = r->planes + b * r->count + r->done;
        for (uint32_t i = 0; i < count; i++)
            values[i * r->size + b] = plane[i];
    }
    return count;
}

/* Reads at most `most` entries: positions, and values or steps. */
static int next_chunk(struct incoming *r, uint32_t most, uint16_t *positions, uint8_t *values,
                      int8_t *steps, uint32_t *count, dray_error *error)
{
    *count = r->count - r->done < most ? r->count - r->done : most;
    uint32_t got = get_positions(r, *count, positions);
    got = r->coded ? get_codes(r, got, values, steps) : get_planes(r, got, values, steps);
    r->done += got;
    if (got < *count)
        return dray__fail(error, DRAY_EFORMAT,
                          "entry %" PRIu32 " of a delta of %" PRIu32 ": expected one of %" PRIu64
                          " elements and what it became",
                          r->done, r->count, r->elements);
    if (r->done == r->count && (r->gaps.at < r->gaps.bytes || !dray__codes_ended(&r->codes)))
        return bad(r->bytes, r->count, error);
    return DRAY_OK;
}

/* Checks all entries first, then writes them. */
static int apply_entries(const struct incoming *all, const dray_copy *copy, void *base,
                         dray_error *error)
{
    uint16_t positions[CHUNK];
    uint8_t values[CHUNK * 8];
    int8_t steps[CHUNK];
    dray__delta_part part = {.slice = dray__copy_rect(copy),
                             .cross = dray__copy_rect(copy),
                             .positions = positions,
                             .values = values,
                             .steps = steps,
                             .stepping = all->coded};
    uint64_t bytes = 0;
    int rc = DRAY_OK;
    for (int look = 1; look >= 0; look--) {
        struct incoming r = *all;
        do {
            rc = next_chunk(&r, CHUNK, positions, values, steps, &part.count, error);
            if (!rc && !look)
                rc = dray__delta_apply(&part, copy, base, &bytes, error);
        } while (!rc && r.done < r.count);
        if (rc)
            return rc;
    }
    return DRAY_OK;
}

static int unpack(dray__delta_coder *coder, const uint8_t **data, size_t *size, size_t least,
                  size_t most, dray_error *error)
{
    unsigned long long wanted = ZSTD_getFrameContentSize(*data, *size);
    if (wanted == 0 || wanted > most || wanted < least) /* or the size is unknown */
        return dray__fail(error, DRAY_EFORMAT,
                          "a compressed delta: expected one of %zu to %zu bytes, found %lld", least,
                          most, (long long)wanted);
    if (!coder->decompressor)
        coder->decompressor = ZSTD_createDCtx();
    if (!coder->decompressor || !reserve(coder, (size_t)wanted))
        return dray__nomem(error);
    size_t found =
        ZSTD_decompressDCtx(coder->decompressor, coder->buffer, (size_t)wanted, *data, *size);
    if (ZSTD_isError(found) || found != wanted)
        return dray__fail(error, DRAY_EFORMAT, "a compressed delta: expected %llu bytes, found %s",
                          wanted, ZSTD_isError(found) ? ZSTD_getErrorName(found) : "fewer");
    *data = coder->buffer;
    *size = found;
    return DRAY_OK;
}

/* Checks the head of a message, and decompresses it. */
static int begin_reading(dray__delta_coder *coder, const uint8_t *data, size_t size,
                         uint64_t elements, size_t element, struct incoming *out, dray_error *error)
{
    uint32_t head[2] = {0, 0}, bytes = (uint32_t)size;
    if (size >= HEAD)
        memcpy(head, data, sizeof head);
    uint32_t count = head[0] & ~(PACKED | CODED), gaps = head[1];
    bool coded = head[0] & CODED;
    if (size < HEAD || elements > DRAY__DELTA_SLICE || count > elements || gaps < count ||
        gaps > count + elements / 255)
        return bad(size, count, error);
    size_t values = count * element;
    size_t least = gaps + (coded ? (size_t)dray__codes_least(count) : values);
    size_t most = gaps + values; /* larger codes would not have been sent */
    data += HEAD;
    size -= HEAD;
    int rc = head[0] & PACKED ? unpack(coder, &data, &size, least, most, error) : DRAY_OK;
    if (rc)
        return rc;
    if (size < least || size > most)
        return bad(bytes, count, error);
    *out = (struct incoming){.count = count,
                             .size = element,
                             .bytes = bytes,
                             .elements = elements,
                             .coded = coded,
                             .gaps = {.data = data, .bytes = gaps},
                             .planes = data + gaps};
    if (coded)
        out->codes = (dray__codes){.data = data + gaps, .bytes = size - gaps};
    return DRAY_OK;
}

int dray__delta_decode(dray__delta_coder *coder, const uint8_t *data, size_t size,
                       const dray_copy *copy, void *base, dray_error *error)
{
    dray__rect rect = dray__copy_rect(copy);
    struct incoming in;
    int rc = begin_reading(coder, data, size, dray__rect_elements(&rect),
                           dray_dtype_size((dray_dtype)copy->destination_dtype), &in, error);
    return rc ? rc : apply_entries(&in, copy, base, error);
}

/* ---- into memory of GPUs --------------------------------------------------------------------- */

bool dray__delta_writes(const dray_region *to)
{
    return dray_region_base(to) ||
           (dray_region_get_kind(to) == DRAY_REGION_CUDA && to->device && to->device_address);
}

static size_t up8(size_t bytes)
{
    return (bytes + 7) & ~(size_t)7;
}

/* The patches that are launched next. */
struct batch {
    dray__cuda_patch patches[DRAY__CUDA_PATCHES];
    uint32_t count;
    size_t bytes;
};

static int flush(dray__delta_coder *coder, struct batch *b, const dray_region *to,
                 dray_error *error)
{
    int rc = b->count
                 ? dray__cuda_patch_all(to, b->patches, b->count, coder->entries, b->bytes, error)
                 : DRAY_OK;
    b->count = 0;
    b->bytes = 0;
    return rc;
}

static int add_patch(dray__delta_coder *coder, struct batch *b, const dray__delta_message *message,
                     const dray_region *to, dray_error *error)
{
    const dray_copy *copy = message->copy;
    dray__rect rect = dray__copy_rect(copy);
    size_t element = dray_dtype_size((dray_dtype)copy->destination_dtype);
    struct incoming in;
    int rc = begin_reading(coder, message->data, message->size, dray__rect_elements(&rect), element,
                           &in, error);
    if (rc)
        return rc;
    size_t positions = up8(in.count * sizeof(uint16_t)), values = up8(in.count * element);
    size_t all = positions + values + up8(in.count);
    if (b->count == DRAY__CUDA_PATCHES || b->bytes + all > DRAY__CUDA_PATCH_BYTES)
        rc = flush(coder, b, to, error);
    uint8_t *at = coder->entries + b->bytes;
    uint32_t count;
    if (!rc)
        rc = next_chunk(&in, in.count, (uint16_t *)(void *)at, at + positions,
                        (int8_t *)at + positions + values, &count, error);
    if (rc)
        return rc;
    dray__cuda_patch *p = &b->patches[b->count++];
    *p = (dray__cuda_patch){.place = {copy->destination_dtype, copy->ndim, copy->extent,
                                      copy->destination_stride, copy->destination_offset},
                            .stepping = in.coded,
                            .count = in.count,
                            .offset = b->bytes};
    b->bytes += all;
    return DRAY_OK;
}

int dray__delta_decode_all(dray__delta_coder *coder, const dray__delta_message *messages,
                           uint32_t count, dray_region *to, dray_error *error)
{
    struct batch batch = {.count = 0};
    int rc = DRAY_OK;
    uint8_t *base = dray_region_base(to);
    if (!base && !coder->entries)
        coder->entries = malloc(DRAY__CUDA_PATCH_BYTES);
    if (!base && !coder->entries)
        return dray__nomem(error);
    for (uint32_t i = 0; i < count && rc == DRAY_OK; i++)
        rc = base ? dray__delta_decode(coder, messages[i].data, messages[i].size, messages[i].copy,
                                       base, error)
                  : add_patch(coder, &batch, &messages[i], to, error);
    return rc ? rc : flush(coder, &batch, to, error);
}
