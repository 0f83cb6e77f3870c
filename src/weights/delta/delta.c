/* Deltas between two versions of a publisher's blocks: finds, stores, reads and applies them. The
 * format is in delta.h. */
#include "weights/delta/delta.h"

#include "base/error.h"
#include "mover/mover.h"
#include "weights/delta/delta_gpu.h"

#include <inttypes.h>
#include <stdlib.h>
#include <string.h>

#define MAGIC UINT64_C(0x32746c6479617264) /* "draydlt2" */

struct head {
    uint64_t magic, base, version, incarnation, slices, used;
    uint32_t dtype, blocks;
};

struct delta_slot {
    uint64_t offset;
    uint32_t count, zero;
};

_Static_assert(sizeof(struct head) == 56 && sizeof(struct delta_slot) == 16, "the format's sizes");

/* ---- slices of a layout ---------------------------------------------------------------------- */

/* Returns the dtype in which elements are compared and sent. */
static int32_t sent_as(int32_t dtype, int32_t wanted)
{
    bool is_float = dtype >= DRAY_F64 && dtype <= DRAY_F16;
    return wanted && is_float ? wanted : dtype;
}

int32_t dray__delta_dtype(const dray_layout *layout, uint32_t block, int32_t wanted)
{
    const dray_block *b = dray_layout_block(layout, block);
    return sent_as(dray_layout_tensor(layout, b->tensor)->dtype, wanted);
}

void dray__delta_cut(const dray_layout *layout, uint32_t block, dray__slicer *slicer)
{
    dray__rect rect = dray__rect_of(layout, block);
    dray__slicer_start(slicer, &rect, 1, DRAY__DELTA_SLICE);
}

uint64_t dray__delta_slices(const dray_layout *layout, uint32_t block)
{
    dray__slicer slicer;
    dray__delta_cut(layout, block, &slicer);
    uint64_t count = 1;
    for (uint32_t d = 0; d < DRAY_MAX_DIMS; d++)
        count *= ((uint64_t)slicer.whole.extent[d] + (uint64_t)slicer.tile[d] - 1) /
                 (uint64_t)slicer.tile[d];
    return count;
}

/* Returns the index of each block's first slice, followed by the number of slices. */
static uint64_t *first_slices(const dray_layout *layout)
{
    uint32_t blocks = dray_layout_block_count(layout);
    uint64_t *first = calloc((size_t)blocks + 1, sizeof *first);
    for (uint32_t b = 0; first && b < blocks; b++)
        first[b + 1] = first[b] + dray__delta_slices(layout, b);
    return first;
}

static uint64_t up8(uint64_t bytes)
{
    return (bytes + 7) & ~(uint64_t)7;
}

/* ---- the publisher's side -------------------------------------------------------------------- */

struct dray__delta {
    const dray_layout *layout;
    dray_region *const *regions;
    int32_t dtype;
    uint64_t *first;   /* slice of each block */
    uint64_t *base_at; /* offset of each block's kept bits */
    dray_region *base, *store, *scratch;
    dray__delta_gpu *gpu; /* for blocks in GPU memory; NULL when there are none */
    bool has_base;
    uint64_t version, incarnation; /* of the kept bits */
};

static bool in_memory(const dray__delta *delta, uint32_t block)
{
    return dray_region_base(delta->regions[dray_layout_block(delta->layout, block)->region]);
}

/* Returns the most entries of a slice. Positions and values take at most half of the bytes of its
 * elements; beyond that, reading all elements is as cheap. */
static uint64_t most_entries(uint64_t elements, uint64_t size)
{
    return elements * size / 2 / (size + sizeof(uint16_t));
}

static void size_up(dray__delta *delta, uint64_t *base_bytes, uint64_t *store_bytes)
{
    uint32_t blocks = dray_layout_block_count(delta->layout);
    uint64_t base = 0, entries = 0;
    for (uint32_t b = 0; b < blocks; b++) {
        delta->base_at[b] = base;
        if (!in_memory(delta, b))
            continue;
        dray__rect rect = dray__rect_of(delta->layout, b);
        uint64_t size =
            dray_dtype_size((dray_dtype)dray__delta_dtype(delta->layout, b, delta->dtype));
        uint64_t bytes = dray__rect_elements(&rect) * size;
        base += up8(bytes);
        entries += bytes / 2 + most_entries(dray__rect_elements(&rect), size) +
                   24 * (delta->first[b + 1] - delta->first[b]);
    }
    *base_bytes = base;
    *store_bytes = sizeof(struct head) + delta->first[blocks] * sizeof(struct delta_slot) + entries;
}

static int make(dray__delta *delta, dray_error *error)
{
    uint32_t blocks = dray_layout_block_count(delta->layout);
    delta->first = first_slices(delta->layout);
    delta->base_at = calloc((size_t)blocks + 1, sizeof *delta->base_at);
    if (!delta->first || !delta->base_at)
        return dray__nomem(error);
    uint64_t base, store, room;
    size_up(delta, &base, &store);
    room = dray__delta_gpu_room(delta->layout, delta->regions, delta->dtype);
    dray_region_kind kind = room ? DRAY_REGION_PINNED : DRAY_REGION_SHARED;
    uint64_t begin = up8(store);
    int rc = dray_region_alloc(DRAY_REGION_HOST, base, "last published bits", &delta->base, error);
    if (rc == DRAY_OK)
        rc = dray_region_alloc(kind, begin + room, "delta", &delta->store, error);
    if (rc == DRAY_OK)
        rc = dray_region_alloc(DRAY_REGION_HOST, DRAY__DELTA_SLICE * 8, "delta scratch",
                               &delta->scratch, error);
    if (rc)
        return rc;
    struct head *head = dray_region_base(delta->store);
    *head = (struct head){.magic = MAGIC,
                          .slices = delta->first[blocks],
                          .dtype = (uint32_t)delta->dtype,
                          .blocks = blocks};
    if (!room)
        return DRAY_OK;
    return dray__delta_gpu_new(delta->layout, delta->regions, delta->dtype, delta->store,
                               sizeof *head, delta->first, begin, &delta->gpu, error);
}

int dray__delta_new(const dray_layout *layout, dray_region *const *regions, int32_t dtype,
                    dray__delta **out, dray_error *error)
{
    dray__delta *delta = calloc(1, sizeof *delta);
    if (!delta)
        return dray__nomem(error);
    delta->layout = layout;
    delta->regions = regions;
    delta->dtype = dtype;
    int rc = make(delta, error);
    if (rc)
        dray__delta_free(delta);
    else
        *out = delta;
    return rc;
}

void dray__delta_free(dray__delta *delta)
{
    if (!delta)
        return;
    free(delta->first);
    free(delta->base_at);
    dray__delta_gpu_free(delta->gpu);
    dray_region_free(delta->base);
    dray_region_free(delta->store);
    dray_region_free(delta->scratch);
    free(delta);
}

dray_region *dray__delta_region(const dray__delta *delta)
{
    return delta->store;
}

/* Gives the slice's present bits, dense, in the dtype that is sent: in place, or copied to scratch.
 */
static int bits_now(dray__delta *delta, uint32_t b, const dray__rect *slice, const uint8_t **out,
                    dray_error *error)
{
    const dray_block *block = dray_layout_block(delta->layout, b);
    const dray_tensor_info *tensor = dray_layout_tensor(delta->layout, block->tensor);
    int32_t dtype = dray__delta_dtype(delta->layout, b, delta->dtype);
    dray_copy copy = {.ndim = tensor->ndim ? tensor->ndim : 1};
    bool dense = dtype == tensor->dtype;
    int64_t stride = (int64_t)dray_dtype_size((dray_dtype)dtype);
    memcpy(copy.start, slice->start, sizeof copy.start);
    memcpy(copy.extent, slice->extent, sizeof copy.extent);
    dray__copy_from_block(&copy, delta->layout, b);
    for (uint32_t d = copy.ndim; d-- > 0;) {
        dense &= copy.extent[d] == 1 || copy.source_stride[d] == stride;
        stride *= copy.extent[d];
    }
    const dray_region *region = delta->regions[block->region];
    if (dense) {
        *out = (const uint8_t *)dray_region_base(region) + copy.source_offset;
        return DRAY_OK;
    }
    dray__copy_to_dense(&copy, dtype, 0);
    *out = dray_region_base(delta->scratch);
    return dray__move_all(region, delta->scratch, &copy, 1, NULL, error);
}

/* Finds the positions at which `now` differs from `base`. Returns their number; it stops once that
 * exceeds `most`. Compares eight bytes at a time: in a word that differs, the lowest bit of the
 * difference is in the first element that differs. Inlined into its callers, each of which has
 * another constant size. */
static inline uint32_t differ(const uint8_t *base, const uint8_t *now, uint64_t count,
                              uint32_t size, uint32_t most, uint16_t *positions)
{
    const uint32_t per_word = 8 / size, bits = size * 8;
    const uint64_t element = bits == 64 ? UINT64_MAX : (UINT64_C(1) << bits % 64) - 1;
    uint32_t found = 0;
    for (uint64_t i = 0; i < count;) {
        uint64_t old = 0, new = 0;
        if (i + per_word * 8 <= count && memcmp(base + i * size, now + i * size, 64) == 0) {
            i += per_word * 8;
            continue;
        }
        for (uint32_t word = 0; word < 8 && i < count; word++, i += per_word) {
            size_t bytes = i + per_word <= count ? 8 : (size_t)(count - i) * size;
            memcpy(&old, base + i * size, bytes);
            memcpy(&new, now + i * size, bytes);
            for (uint64_t x = bytes == 8 ? old ^ new : 0; x;) {
                uint32_t at = (uint32_t)__builtin_ctzll(x) / bits;
                if (found == most)
                    return most + 1;
                positions[found++] = (uint16_t)(i + at);
                x &= ~(element << at * bits);
            }
            for (uint64_t j = i; bytes < 8 && j < count; j++) {
                if (memcmp(base + j * size, now + j * size, size) == 0)
                    continue;
                if (found == most)
                    return most + 1;
                positions[found++] = (uint16_t)j;
            }
        }
    }
    return found;
}

static uint32_t differ_sized(const uint8_t *base, const uint8_t *now, uint64_t count, size_t size,
                             uint32_t most, uint16_t *positions)
{
    switch (size) {
    case 1:
        return differ(base, now, count, 1, most, positions);
    case 2:
        return differ(base, now, count, 2, most, positions);
    case 4:
        return differ(base, now, count, 4, most, positions);
    default:
        return differ(base, now, count, 8, most, positions);
    }
}

/* Appends the slice's entries at *used, and updates the kept bits. */
static void compare(dray__delta *delta, uint8_t *kept, const uint8_t *now, uint64_t elements,
                    int32_t dtype, uint64_t *used, struct delta_slot *slot)
{
    size_t size = dray_dtype_size((dray_dtype)dtype);
    uint32_t most = (uint32_t)most_entries(elements, size);
    uint8_t *store = dray_region_base(delta->store);
    uint16_t *positions = (uint16_t *)(store + *used);
    uint32_t count = differ_sized(kept, now, elements, size, most, positions);
    if (count > most) {
        *slot = (struct delta_slot){.count = DRAY__DELTA_FULL};
        memcpy(kept, now, elements * size);
        return;
    }
    *slot = (struct delta_slot){.offset = *used, .count = count};
    uint8_t *values = store + *used + up8(count * sizeof *positions);
    int8_t *steps = (int8_t *)values + up8(count * size);
    for (uint32_t i = 0; i < count; i++) {
        steps[i] =
            dray__step_of(kept + positions[i] * size, now + positions[i] * size, size, dtype);
        memcpy(values + i * size, now + positions[i] * size, size);
        memcpy(kept + positions[i] * size, now + positions[i] * size, size);
    }
    *used = (uint64_t)((uint8_t *)steps - store) + up8(count);
}

static int compare_block(dray__delta *delta, uint32_t b, uint64_t *used, dray_error *error)
{
    struct delta_slot *table =
        (struct delta_slot *)((uint8_t *)dray_region_base(delta->store) + sizeof(struct head)) +
        delta->first[b];
    uint8_t *kept = (uint8_t *)dray_region_base(delta->base) + delta->base_at[b];
    int32_t dtype = dray__delta_dtype(delta->layout, b, delta->dtype);
    size_t size = dray_dtype_size((dray_dtype)dtype);
    dray__slicer slicer;
    dray__rect slice;
    for (dray__delta_cut(delta->layout, b, &slicer); dray__slicer_peek(&slicer, &slice);
         dray__slicer_next(&slicer)) {
        uint64_t elements = dray__rect_elements(&slice);
        const uint8_t *now;
        *table = (struct delta_slot){.count = DRAY__DELTA_FULL};
        if (in_memory(delta, b)) {
            int rc = bits_now(delta, b, &slice, &now, error);
            if (rc)
                return rc;
            if (delta->has_base)
                compare(delta, kept, now, elements, dtype, used, table);
            else
                memcpy(kept, now, elements * size);
        }
        kept += elements * size;
        table++;
    }
    return DRAY_OK;
}

int dray__delta_publish(dray__delta *delta, uint64_t incarnation, uint64_t version,
                        int64_t deadline_ns, dray_error *error)
{
    struct head *head = dray_region_base(delta->store);
    bool follows = delta->has_base && delta->incarnation == incarnation;
    head->incarnation = 0; /* so that the delta is not used if this fails midway */
    uint64_t used = sizeof *head + head->slices * sizeof(struct delta_slot);
    uint64_t by_gpu = 0;
    int rc = delta->gpu ? dray__delta_gpu_find(delta->gpu, deadline_ns, &by_gpu, error) : DRAY_OK;
    for (uint32_t b = 0; b < head->blocks && rc == DRAY_OK; b++)
        if (!dray__delta_by_gpu(delta->layout, delta->regions, b))
            rc = compare_block(delta, b, &used, error);
    if (rc) {
        delta->has_base = false;
        return rc;
    }
    head->base = follows ? delta->version : version;
    head->version = version;
    head->used = used + by_gpu;
    head->incarnation = incarnation;
    delta->has_base = true;
    delta->version = version;
    delta->incarnation = incarnation;
    return DRAY_OK;
}

void dray__delta_forgo(dray__delta *delta)
{
    delta->has_base = false;
}

/* ---- the reader's side ----------------------------------------------------------------------- */

struct dray__delta_view {
    const dray_layout *layout;
    const uint8_t *data;
    const struct head *head;
    const struct delta_slot *table;
    uint64_t *first;
    uint64_t bytes;
    int32_t dtype;
};

bool dray__delta_is(const dray_region *region)
{
    const struct head *head = dray_region_base(region);
    return head && dray_region_bytes(region) >= sizeof *head && head->magic == MAGIC;
}

int dray__delta_open(const dray_layout *layout, const dray_region *region, dray__delta_view **out,
                     dray_error *error)
{
    const struct head *head = dray_region_base(region);
    uint64_t bytes = dray_region_bytes(region), *first = first_slices(layout);
    dray__delta_view *view = calloc(1, sizeof *view);
    int rc = first && view ? DRAY_OK : dray__nomem(error);
    uint32_t blocks = dray_layout_block_count(layout);
    if (rc == DRAY_OK && !dray__delta_is(region))
        rc = dray__fail(error, DRAY_EFORMAT, "region %s holds no delta", dray_region_name(region));
    if (rc == DRAY_OK && (head->blocks != blocks || head->slices != first[blocks] ||
                          bytes < sizeof *head + first[blocks] * sizeof(struct delta_slot)))
        rc = dray__fail(error, DRAY_EFORMAT,
                        "a delta of %" PRIu64 " slices of %" PRIu32 " blocks in %" PRIu64
                        " bytes: %" PRIu64 " of %" PRIu32 " expected",
                        head->slices, head->blocks, bytes, first[blocks], blocks);
    if (rc) {
        free(first);
        free(view);
        return rc;
    }
    *view = (dray__delta_view){.layout = layout,
                               .data = (const uint8_t *)head,
                               .head = head,
                               .table = (const struct delta_slot *)(head + 1),
                               .first = first,
                               .bytes = bytes,
                               .dtype = (int32_t)head->dtype};
    *out = view;
    return DRAY_OK;
}

void dray__delta_close(dray__delta_view *view)
{
    if (!view)
        return;
    free(view->first);
    free(view);
}

void dray__delta_forget(void *view)
{
    dray__delta_close(view);
}

uint64_t dray__delta_slot(const dray__delta_view *view, uint32_t block)
{
    return sizeof(struct head) + view->first[block] * sizeof(struct delta_slot);
}

bool dray__delta_leads(const dray__delta_view *view, uint64_t incarnation, uint64_t base,
                       uint64_t version)
{
    const struct head *head = view->head;
    return head->incarnation == incarnation && head->base == base && head->version == version &&
           base != version;
}

int32_t dray__delta_sent(const dray__delta_view *view, int32_t dtype)
{
    return sent_as(dtype, view->dtype);
}

void dray__delta_grid(const dray_layout *layout, uint32_t block, const dray__rect *rect,
                      dray__delta_walk *walk)
{
    *walk = (dray__delta_walk){.rect = *rect, .block = block};
    dray__slicer *s = &walk->slicer;
    dray__delta_cut(layout, block, s);
    for (uint32_t d = 0; d < DRAY_MAX_DIMS; d++) { /* the first slice that may overlap it */
        int64_t tile = s->tile[d], skip = rect->start[d] - s->whole.start[d];
        int64_t at = skip > 0 ? skip / tile : 0;
        walk->next = walk->next * (uint64_t)((s->whole.extent[d] + tile - 1) / tile) + (uint64_t)at;
        s->at[d] += at * tile;
    }
}

void dray__delta_start(const dray__delta_view *view, uint32_t block, const dray__rect *rect,
                       dray__delta_walk *walk)
{
    dray__delta_grid(view->layout, block, rect, walk);
    walk->view = view;
    walk->next += view->first[block];
}

/* Returns true when this slice and all after it are behind the rectangle's last element. */
static bool is_behind(const dray__rect *slice, const dray__rect *rect)
{
    for (uint32_t d = 0; d < DRAY_MAX_DIMS; d++) {
        int64_t last = rect->start[d] + rect->extent[d] - 1;
        if (slice->start[d] > last)
            return true;
        if (slice->start[d] + slice->extent[d] <= last)
            return false;
    }
    return false;
}

/* Finds the next slice that overlaps the rectangle, and its index. */
static bool walk_on(dray__delta_walk *walk, dray__rect *slice, dray__rect *cross, uint64_t *index)
{
    while (dray__slicer_peek(&walk->slicer, slice)) {
        if (is_behind(slice, &walk->rect))
            return false;
        *index = walk->next++;
        dray__slicer_next(&walk->slicer);
        if (dray__rect_cross(slice, &walk->rect, cross))
            return true;
    }
    return false;
}

bool dray__delta_grid_next(dray__delta_walk *walk, dray__rect *out)
{
    dray__rect slice;
    uint64_t index;
    return walk_on(walk, &slice, out, &index);
}

static int part_at(const dray__delta_view *view, uint32_t block, uint64_t index,
                   dray__delta_part *out, dray_error *error)
{
    struct delta_slot slot = view->table[index];
    size_t size = dray_dtype_size((dray_dtype)dray__delta_dtype(view->layout, block, view->dtype));
    out->full = slot.count == DRAY__DELTA_FULL;
    out->count = out->full ? 0 : slot.count;
    uint64_t positions = up8(out->count * sizeof(uint16_t)), values = up8(out->count * size);
    uint64_t all = positions + values + out->count;
    if (out->count > dray__rect_elements(&out->slice) || slot.offset % 8 ||
        slot.offset > view->bytes || all > view->bytes - slot.offset)
        return dray__fail(error, DRAY_EFORMAT,
                          "delta: %" PRIu32 " entries of slice %" PRIu64 " at %" PRIu64
                          " of %" PRIu64 " bytes",
                          slot.count, index, slot.offset, view->bytes);
    out->positions = (const uint16_t *)(view->data + slot.offset);
    out->values = view->data + slot.offset + positions;
    out->steps = (const int8_t *)out->values + values;
    out->stepping = false;
    return DRAY_OK;
}

int dray__delta_next(dray__delta_walk *walk, dray__delta_part *out, dray_error *error)
{
    uint64_t index;
    if (!walk_on(walk, &out->slice, &out->cross, &index))
        return DRAY_EEND;
    return part_at(walk->view, walk->block, index, out, error);
}

/* A row of the slice, and the destination of its elements. */
struct delta_row {
    uint32_t begin, end; /* positions of the slice */
    uint32_t from, to;   /* the positions among them that are in the rectangle */
    size_t at;           /* the destination of the element at `from` */
};

static struct delta_row row_of(const dray__delta_part *part, const dray_copy *copy,
                               uint32_t position)
{
    uint32_t inner = copy->ndim - 1, length = (uint32_t)part->slice.extent[inner];
    uint32_t rest = position / length;
    struct delta_row row = {.begin = rest * length, .end = rest * length + length};
    bool inside = true;
    row.at = copy->destination_offset;
    for (uint32_t d = inner; d-- > 0;) {
        uint32_t extent = (uint32_t)part->slice.extent[d];
        int64_t here = part->slice.start[d] + (int64_t)(rest % extent);
        rest /= extent;
        inside &=
            here >= part->cross.start[d] && here < part->cross.start[d] + part->cross.extent[d];
        row.at += (size_t)(here - copy->start[d]) * (size_t)copy->destination_stride[d];
    }
    row.from = row.begin + (uint32_t)(part->cross.start[inner] - part->slice.start[inner]);
    row.to = row.from + (inside ? (uint32_t)part->cross.extent[inner] : 0);
    row.at += (size_t)(part->cross.start[inner] - copy->start[inner]) *
              (size_t)copy->destination_stride[inner];
    return row;
}

/* Inlined into its callers, each of which has another constant size. */
static inline int apply(const dray__delta_part *part, const dray_copy *copy, uint8_t *base,
                        uint32_t size, dray_error *error)
{
    uint64_t elements = dray__rect_elements(&part->slice);
    size_t stride = (size_t)copy->destination_stride[copy->ndim - 1];
    struct delta_row row = {0};
    int64_t last = -1;
    for (uint32_t i = 0; i < part->count; i++) {
        uint32_t position = part->positions[i];
        if ((int64_t)position <= last || position >= elements)
            return dray__fail(error, DRAY_EFORMAT,
                              "delta: position %" PRIu32 " of %" PRIu64 " elements after %" PRId64,
                              position, elements, last);
        last = position;
        if (position >= row.end)
            row = row_of(part, copy, position);
        if (position < row.from || position >= row.to)
            continue;
        uint8_t *at = base + row.at + (position - row.from) * stride;
        if (part->stepping && part->steps[i])
            dray__change_put(at, &(dray__change){.step = part->steps[i]}, size,
                             copy->destination_dtype);
        else
            memcpy(at, part->values + (size_t)i * size, size);
    }
    return DRAY_OK;
}

int dray__delta_apply(const dray__delta_part *part, const dray_copy *copy, void *base,
                      uint64_t *bytes, dray_error *error)
{
    size_t size = dray_dtype_size((dray_dtype)copy->destination_dtype);
    *bytes += part->count * (size + sizeof(uint16_t));
    switch (size) {
    case 1:
        return apply(part, copy, base, 1, error);
    case 2:
        return apply(part, copy, base, 2, error);
    case 4:
        return apply(part, copy, base, 4, error);
    default:
        return apply(part, copy, base, 8, error);
    }
}

bool dray__delta_slice(const dray__delta_view *view, uint32_t block, const dray__rect *rect,
                       dray__delta_part *out)
{
    dray__delta_walk walk;
    dray__delta_start(view, block, rect, &walk);
    return dray__slicer_peek(&walk.slicer, &out->slice) &&
           dray__rect_cross(&out->slice, rect, &out->cross) &&
           memcmp(&out->cross, rect, sizeof *rect) == 0 &&
           part_at(view, block, walk.next, out, NULL) == DRAY_OK;
}

bool dray__delta_sends(const dray__delta_view *view, uint32_t block, int32_t dtype)
{
    return dray__delta_dtype(view->layout, block, view->dtype) == dtype;
}
