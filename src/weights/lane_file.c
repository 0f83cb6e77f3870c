/* The lane of sources in files: the ranges that are needed are read in the background
 * (mover/disk.h), many at once and in the order in which they lie in the files, into the slots of a
 * staging buffer; what has come is moved to its place and checked while the rest is on its way. All
 * strategies are the same here: the staging is the bucket.
 *
 * A slot holds one range, from which several slices of ops may come: short gaps between them are
 * read along. What this rank does not own in its group nobody else compares: it is read and moved
 * twice, as lane_memory.c does. */
#include "base/clock.h"
#include "base/error.h"
#include "memory/region.h"
#include "mover/disk.h"
#include "mover/mover.h"
#include "weights/haul.h"

#include <stdlib.h>
#include <string.h>

enum {
    SLOT_BYTES = 4 << 20, /* at most */
    SLOTS = 12,
    FEWEST_SLOTS = 4, /* so many while the ceiling allows pages of two */
    GAP = 64 << 10,   /* read along, rather than by a range of its own */
    MOST_WASTE = 8,   /* times the bytes that are wanted */
    SLICES = 256      /* of a slot */
};

typedef struct slot {
    dray__io io;
    uint32_t index;
    uint64_t begin, end; /* in the file: aligned; of the last byte that is wanted */
    bool owned, again;   /* again: the second time */
    bool came;
    uint32_t count, at; /* slices; those that were moved */
    uint64_t ops[SLICES];
    dray_copy copies[SLICES]; /* from the staging region */
} slot;

typedef struct file_lane {
    dray__haul *haul;
    uint64_t *order; /* of the ops: as their bytes lie in the files */
    uint64_t count, next;
    dray__slicer slicer;
    bool in_op;
    dray__disk *disk;
    dray__disk_file **files; /* by source and region; NULL: not opened yet */
    dray_region *staging;
    uint64_t slot_bytes;
    uint32_t slot_count;
    slot **slots;
    uint32_t busy;
} file_lane;

static const dray_copy *copy_of(const file_lane *l, uint64_t index)
{
    return &l->haul->sources->ops[l->order[index]].copy;
}

/* ---- opening --------------------------------------------------------------------------------- */

static bool lane_takes(const dray__haul *haul, const dray__op *op)
{
    const dray__source *source = &haul->sources->sources[op->copy.source];
    const dray_region_info *info = dray_layout_region(source->layout, op->copy.source_region);
    return !source->local && info && info->kind == DRAY_REGION_FILE;
}

static int by_place(const void *a, const void *b, void *user)
{
    const dray__op *ops = user;
    const dray_copy *x = &ops[*(const uint64_t *)a].copy, *y = &ops[*(const uint64_t *)b].copy;
    if (x->source != y->source)
        return x->source < y->source ? -1 : 1;
    if (x->source_region != y->source_region)
        return x->source_region < y->source_region ? -1 : 1;
    return x->source_offset < y->source_offset ? -1 : x->source_offset > y->source_offset;
}

static uint64_t wanted_bytes(const file_lane *l)
{
    uint64_t bytes = 0;
    for (uint64_t i = 0; i < l->count; i++) {
        dray__rect rect = dray__copy_rect(copy_of(l, i));
        bytes +=
            dray__rect_elements(&rect) * dray_dtype_size((dray_dtype)copy_of(l, i)->source_dtype);
    }
    return bytes;
}

/* Slots of at most SLOT_BYTES, but several of them, within the ceiling, and no more than there is
 * to read. */
static int make_slots(file_lane *l, uint64_t ceiling, dray_error *error)
{
    uint64_t bytes = ceiling / FEWEST_SLOTS < SLOT_BYTES ? ceiling / FEWEST_SLOTS : SLOT_BYTES;
    bytes &= ~(uint64_t)(DRAY__IO_ALIGN - 1);
    if (bytes < 2 * DRAY__IO_ALIGN)
        bytes = 2 * DRAY__IO_ALIGN;
    uint64_t fit = ceiling / bytes, need = wanted_bytes(l) / (bytes / 2) + 2;
    l->slot_bytes = bytes;
    l->slot_count = fit < 1 ? 1 : (fit > SLOTS ? SLOTS : (uint32_t)fit);
    if (need < l->slot_count)
        l->slot_count = (uint32_t)need;
    l->slots = calloc(l->slot_count, sizeof(slot *));
    if (!l->slots)
        return dray__nomem(error);
    for (uint32_t i = 0; i < l->slot_count; i++) {
        l->slots[i] = calloc(1, sizeof(slot));
        if (!l->slots[i])
            return dray__nomem(error);
        l->slots[i]->index = i;
    }
    return dray_region_alloc(DRAY_REGION_HOST, l->slot_bytes * l->slot_count, "staging of files",
                             &l->staging, error);
}

static void lane_close(void *lane)
{
    file_lane *l = lane;
    if (!l)
        return;
    dray__disk_close(l->disk); /* waits for what is under way: it writes to the staging */
    for (uint32_t s = 0; l->files && s < l->haul->sources->count; s++) {
        uint32_t regions = dray_layout_region_count(l->haul->sources->sources[s].layout);
        for (uint32_t r = 0; l->files[s] && r < regions; r++)
            dray__disk_file_close(&l->files[s][r]);
        free(l->files[s]);
    }
    for (uint32_t i = 0; l->slots && i < l->slot_count; i++)
        free(l->slots[i]);
    free(l->files);
    free(l->slots);
    free(l->order);
    dray_region_free(l->staging);
    free(l);
}

static int lane_open(dray__haul *haul, const uint64_t *ops, uint64_t count, uint64_t ceiling,
                     void **out, dray_error *error)
{
    file_lane *l = calloc(1, sizeof *l);
    if (!l)
        return dray__nomem(error);
    l->haul = haul;
    l->count = count;
    l->order = calloc((size_t)count + 1, sizeof *l->order);
    l->files = calloc((size_t)haul->sources->count + 1, sizeof *l->files);
    int rc = l->order && l->files ? DRAY_OK : dray__nomem(error);
    if (!rc) {
        memcpy(l->order, ops, count * sizeof *ops);
        qsort_r(l->order, count, sizeof *l->order, by_place, haul->sources->ops);
        rc = make_slots(l, ceiling, error);
    }
    if (!rc)
        rc = dray__disk_open(DRAY__DISK_ANY, &l->disk, error);
    if (rc)
        lane_close(l);
    else
        *out = l;
    return rc;
}

/* ---- slices and their ranges ----------------------------------------------------------------- */

/* From a copy's first byte to the end of its last, in the file. */
static uint64_t span_of(const dray_copy *copy)
{
    uint64_t span = dray_dtype_size((dray_dtype)copy->source_dtype);
    for (uint32_t d = 0; d < copy->ndim; d++)
        span += (uint64_t)(copy->extent[d] - 1) * (uint64_t)copy->source_stride[d];
    return span;
}

static bool too_wide(const file_lane *l, const dray_copy *copy)
{
    dray__rect rect = dray__copy_rect(copy);
    uint64_t useful = dray__rect_elements(&rect) * dray_dtype_size((dray_dtype)copy->source_dtype);
    uint64_t span = span_of(copy);
    return span > l->slot_bytes - DRAY__IO_ALIGN ||
           (span > useful + GAP && span / MOST_WASTE > useful);
}

/* Cuts the next op so that each slice fits a slot, and is not mostly gaps. */
static void start_op(file_lane *l, const dray_copy *copy)
{
    dray__rect whole = dray__copy_rect(copy), slice;
    size_t from = dray_dtype_size((dray_dtype)copy->source_dtype);
    size_t to = dray_dtype_size((dray_dtype)copy->destination_dtype);
    size_t element = from > to ? from : to;
    for (uint64_t limit = DRAY__SLICE_BYTES;; limit /= 2) {
        dray__slicer_start(&l->slicer, &whole, element, limit);
        if (limit <= element || !dray__slicer_peek(&l->slicer, &slice))
            break;
        dray_copy cut = dray__copy_cut(copy, &slice);
        if (!too_wide(l, &cut))
            break;
    }
    l->in_op = true;
}

static bool peek(file_lane *l, dray_copy *out)
{
    dray__rect slice;
    if (l->next == l->count)
        return false;
    const dray_copy *copy = copy_of(l, l->next);
    if (!l->in_op)
        start_op(l, copy);
    dray__slicer_peek(&l->slicer, &slice);
    *out = dray__copy_cut(copy, &slice);
    return true;
}

static void take(file_lane *l)
{
    dray__slicer_next(&l->slicer);
    if (l->slicer.done) {
        l->in_op = false;
        l->next++;
    }
}

static int file_of(file_lane *l, const dray_copy *copy, dray__disk_file **out, dray_error *error)
{
    const dray__source *source = &l->haul->sources->sources[copy->source];
    uint32_t regions = dray_layout_region_count(source->layout);
    dray__disk_file **files = &l->files[copy->source];
    if (!*files) {
        *files = calloc((size_t)regions + 1, sizeof **files);
        if (!*files)
            return dray__nomem(error);
        for (uint32_t r = 0; r < regions; r++)
            (*files)[r] = (dray__disk_file){-1, -1, NULL};
    }
    dray__disk_file *file = &(*files)[copy->source_region];
    if (!file->name) {
        const dray_region *region = source->regions[copy->source_region];
        dray__disk_file_open(file, dray_region_fd(region), false, dray_region_name(region));
    }
    *out = file;
    return DRAY_OK;
}

/* Does the slice come with those that the slot has? */
static bool goes_along(const file_lane *l, const slot *s, const dray_copy *copy, bool owned)
{
    const dray_copy *first = copy_of(l, s->ops[0]);
    return s->count < SLICES && first->source == copy->source &&
           first->source_region == copy->source_region && s->owned == owned &&
           copy->source_offset >= s->begin && copy->source_offset <= s->end + GAP &&
           copy->source_offset + span_of(copy) - s->begin <= l->slot_bytes;
}

/* Gives the slot the next range and asks for it. */
static int fill(file_lane *l, slot *s, dray_error *error)
{
    dray_copy copy;
    uint64_t base = (uint64_t)s->index * l->slot_bytes;
    s->count = s->at = 0;
    s->came = s->again = false;
    while (peek(l, &copy)) {
        bool owned = l->haul->sources->ops[l->order[l->next]].owned;
        if (s->count && !goes_along(l, s, &copy, owned))
            break;
        if (!s->count) {
            s->begin = copy.source_offset & ~(uint64_t)(DRAY__IO_ALIGN - 1);
            s->end = 0;
            s->owned = owned;
        }
        uint64_t end = copy.source_offset + span_of(&copy);
        s->end = end > s->end ? end : s->end;
        s->ops[s->count] = l->next;
        s->copies[s->count] = copy;
        s->copies[s->count++].source_offset = base + (copy.source_offset - s->begin);
        take(l);
    }
    if (!s->count)
        return DRAY_OK;
    s->io = (dray__io){.data = (uint8_t *)dray_region_base(l->staging) + base,
                       .offset = s->begin,
                       .least = (size_t)(s->end - s->begin),
                       .user = s};
    s->io.bytes = (s->io.least + DRAY__IO_ALIGN - 1) & ~(size_t)(DRAY__IO_ALIGN - 1);
    int rc = file_of(l, copy_of(l, s->ops[0]), &s->io.file, error);
    if (rc)
        return rc;
    l->busy++;
    dray__disk_submit(l->disk, &s->io);
    return DRAY_OK;
}

/* ---- moving what has come -------------------------------------------------------------------- */

static const dray__op *op_of(const file_lane *l, const slot *s, uint32_t slice)
{
    return &l->haul->sources->ops[l->order[s->ops[slice]]];
}

static int check(file_lane *l, const slot *s, uint32_t from, uint32_t count, const uint64_t *sums,
                 const uint64_t *source_sums, dray_error *error)
{
    dray__haul *h = l->haul;
    bool last = s->owned || s->again; /* of this slice's ways */
    for (uint32_t i = 0; i < count; i++) {
        const dray__op *op = op_of(l, s, from + i);
        const dray_copy *copy = &s->copies[from + i];
        if (!s->again)
            h->expected[op->block] += sums[i];
        if (op->owned)
            dray__haul_own(h, copy, source_sums[i]);
        uint64_t back =
            dray__haul_read_back(h, h->destination->regions[copy->destination_region], copy);
        if (last)
            h->found[op->block] += back;
        else if (back != sums[i])
            return dray__fail(error, DRAY_ECHECKSUM,
                              "tensor %s: memory does not hold what was copied there",
                              dray__haul_tensor(h, copy)->name);
    }
    return DRAY_OK;
}

/* The next slices, about DRAY__SLICE_BYTES, that go to one region. */
static int move_some(file_lane *l, slot *s, dray_error *error)
{
    enum { BATCH = 64 };
    uint64_t sums[BATCH] = {0}, source_sums[BATCH] = {0}, bytes = 0;
    dray__haul *h = l->haul;
    uint32_t from = s->at, count = 0, to = s->copies[from].destination_region;
    while (from + count < s->count && count < BATCH && bytes < DRAY__SLICE_BYTES &&
           s->copies[from + count].destination_region == to)
        bytes += dray__copy_bytes(&s->copies[from + count++]);
    dray__move_options options = {.layout = h->destination->layout};
    if (h->options.verify) {
        options.sums = sums;
        options.source_sums = source_sums;
    }
    int64_t begin = dray__now();
    int rc = dray__move_all(l->staging, h->destination->regions[to], s->copies + from, count,
                            &options, error);
    int64_t moved = dray__now();
    h->move_ns += moved - begin;
    if (rc)
        return rc;
    s->at += count;
    if (!s->again)
        h->bytes += bytes;
    if (h->options.verify)
        rc = check(l, s, from, count, sums, source_sums, error);
    h->verify_ns += dray__now() - moved;
    return rc;
}

static int read_result(const file_lane *l, const slot *s, dray_error *error)
{
    int rc = dray__io_result(&s->io, error);
    const dray_copy *first = copy_of(l, s->ops[0]);
    const dray_region *file =
        l->haul->sources->sources[first->source].regions[first->source_region];
    if (!rc && file->patch)
        rc = file->patch(file->patch_user, file->patch_index, s->io.data, s->begin, s->io.least,
                         error);
    return rc ? dray__fail_prefix(error, rc,
                                  "tensor %s: ", dray__haul_tensor(l->haul, &s->copies[0])->name)
              : DRAY_OK;
}

/* After a slot's last slice: once more, or the next range. */
static int next_range(file_lane *l, slot *s, dray_error *error)
{
    s->came = false;
    if (l->haul->options.verify && !s->owned && !s->again) {
        s->again = true;
        s->at = 0;
        dray__disk_submit(l->disk, &s->io);
        return DRAY_OK;
    }
    l->busy--;
    return fill(l, s, error);
}

static slot *slot_that_came(const file_lane *l)
{
    for (uint32_t i = 0; i < l->slot_count; i++)
        if (l->slots[i]->came)
            return l->slots[i];
    return NULL;
}

static int lane_step(void *lane, int64_t until_ns, bool *waits, dray_error *error)
{
    file_lane *l = lane;
    int rc = DRAY_OK;
    for (uint32_t i = 0; i < l->slot_count && !l->slots[i]->count && !rc && l->next < l->count; i++)
        rc = fill(l, l->slots[i], error); /* the first time */
    while (!rc && l->busy) {
        dray__io *io = dray__disk_take(l->disk);
        if (io) {
            ((slot *)io->user)->came = true;
            rc = read_result(l, io->user, error);
            continue;
        }
        slot *s = slot_that_came(l);
        if (!s) {
            *waits = true;
            return DRAY_EAGAIN;
        }
        rc = s->at < s->count ? move_some(l, s, error) : next_range(l, s, error);
        if (!rc && dray__now() >= until_ns && l->busy)
            return DRAY_EAGAIN;
    }
    if (!rc)
        dray__disk_take(l->disk); /* nothing is left: its descriptor is quiet from here on */
    return rc;
}

static int lane_fd(const void *lane)
{
    return dray__disk_fd(((const file_lane *)lane)->disk);
}

static uint64_t lane_held_bytes(const void *lane)
{
    const file_lane *l = lane;
    return l->slot_bytes * l->slot_count;
}

static void lane_explain(const void *lane, dray_error *error)
{
    const file_lane *l = lane;
    for (uint32_t i = 0; i < l->slot_count; i++) {
        const slot *s = l->slots[i];
        if (s->count && !s->came && error) {
            dray__fail_prefix(error, error->code,
                              "%.200s did not give its bytes: ", s->io.file->name);
            return;
        }
    }
}

const dray__lane_kind dray__lane_file = {.name = "file",
                                         .takes = lane_takes,
                                         .open = lane_open,
                                         .step = lane_step,
                                         .fd = lane_fd,
                                         .held_bytes = lane_held_bytes,
                                         .explain = lane_explain,
                                         .close = lane_close};
