/* Writes files range by range, in order. A slot of the staging buffer collects consecutive slices
 * of a file. A stretch is a range without a gap. Its offset in the slot equals its offset in the
 * file modulo DRAY__IO_ALIGN, so that all of it but its unaligned ends is written with direct I/O.
 * A stretch that does not fit a slot is cut at a multiple of DRAY__IO_ALIGN, and its rest begins
 * the next slot. Other members' bytes are never written here. */
#include "weights/checkpoint/deposit.h"

#include "base/error.h"
#include "mover/disk.h"
#include "mover/mover.h"

#include <poll.h>
#include <stdlib.h>
#include <string.h>

enum {
    SLOT_BYTES = 4 << 20,
    SLOTS = 8,
    STRETCHES = 256,          /* of a slot */
    SHORT_STRETCH = 64 << 10, /* not worth being cut at multiples */
    WAIT_MS = 1000
};

typedef struct stretch {
    uint64_t offset, at; /* in the file, in the slot */
    size_t bytes;
} stretch;

typedef struct deposit_slot {
    uint64_t base; /* in the staging */
    size_t used;
    uint32_t file, count, ios, under_way;
    uint32_t tensor; /* for messages */
    stretch stretches[STRETCHES];
    dray__io io[3 * STRETCHES];
} deposit_slot;

typedef struct deposit {
    const dray_layout *files;
    dray_region *const *regions, *const *opened;
    const dray_copy *copies;
    uint64_t *order, count;
    dray__sums *sums;
    dray__disk *disk;
    dray__disk_file *targets;
    dray_region *staging;
    deposit_slot *slots[SLOTS];
    uint32_t free_count;
    deposit_slot *free_slots[SLOTS];
} deposit;

static int by_place(const void *a, const void *b, void *user)
{
    const dray_copy *copies = user;
    const dray_copy *x = &copies[*(const uint64_t *)a], *y = &copies[*(const uint64_t *)b];
    if (x->destination_region != y->destination_region)
        return x->destination_region < y->destination_region ? -1 : 1;
    return x->destination_offset < y->destination_offset
               ? -1
               : x->destination_offset > y->destination_offset;
}

/* ---- writing out ----------------------------------------------------------------------------- */

static int take_back(deposit *d, bool wait, dray_error *error)
{
    for (dray__io *io; (io = dray__disk_take(d->disk));) {
        deposit_slot *s = io->user;
        int rc = dray__io_result(io, error);
        if (rc)
            return dray__fail_prefix(
                error, rc, "tensor %.160s: ", dray_layout_tensor(d->files, s->tensor)->name);
        if (--s->under_way == 0)
            d->free_slots[d->free_count++] = s;
        wait = false;
    }
    struct pollfd p = {.fd = dray__disk_fd(d->disk), .events = POLLIN};
    if (wait)
        poll(&p, 1, WAIT_MS);
    return DRAY_OK;
}

static void add_io(deposit *d, deposit_slot *s, uint64_t offset, uint64_t at, size_t bytes)
{
    if (!bytes)
        return;
    s->io[s->ios++] = (dray__io){.file = &d->targets[s->file],
                                 .write = true,
                                 .data = (uint8_t *)dray_region_base(d->staging) + s->base + at,
                                 .offset = offset,
                                 .bytes = bytes,
                                 .user = s};
}

/* Adds the writes of a stretch: one range, or its unaligned ends and the range between them. */
static void add_stretch(deposit *d, deposit_slot *s, const stretch *part)
{
    uint64_t up = DRAY__IO_ALIGN - 1, end = part->offset + part->bytes;
    uint64_t from = (part->offset + up) & ~up, to = end & ~up;
    if (part->bytes < SHORT_STRETCH || to <= from) {
        add_io(d, s, part->offset, part->at, part->bytes);
        return;
    }
    add_io(d, s, part->offset, part->at, (size_t)(from - part->offset));
    add_io(d, s, from, part->at + (from - part->offset), (size_t)(to - from));
    add_io(d, s, to, part->at + (to - part->offset), (size_t)(end - to));
}

static void write_out(deposit *d, deposit_slot *s)
{
    s->ios = 0;
    for (uint32_t i = 0; i < s->count; i++)
        add_stretch(d, s, &s->stretches[i]);
    s->under_way = s->ios;
    for (uint32_t i = 0; i < s->ios; i++)
        dray__disk_submit(d->disk, &s->io[i]);
    if (!s->ios)
        d->free_slots[d->free_count++] = s;
}

static int free_slot(deposit *d, deposit_slot **out, dray_error *error)
{
    while (!d->free_count) {
        int rc = take_back(d, true, error);
        if (rc)
            return rc;
    }
    deposit_slot *s = d->free_slots[--d->free_count];
    s->count = 0;
    s->used = 0;
    *out = s;
    return DRAY_OK;
}

/* ---- filling slots --------------------------------------------------------------------------- */

/* Takes room for `bytes` at `offset` of the slot's file. Returns false when there is none. */
static bool room_for(deposit_slot *s, uint64_t offset, size_t bytes, uint64_t *at)
{
    stretch *last = s->count ? &s->stretches[s->count - 1] : NULL;
    if (last && last->offset + last->bytes == offset) {
        if (s->used + bytes > SLOT_BYTES)
            return false;
        *at = s->used;
        last->bytes += bytes;
    } else {
        uint64_t up = DRAY__IO_ALIGN - 1;
        uint64_t begin = ((s->used + up) & ~up) + (offset & up);
        if (s->count == STRETCHES || begin + bytes > SLOT_BYTES)
            return false;
        s->stretches[s->count++] = (stretch){offset, begin, bytes};
        *at = begin;
        s->used = begin;
    }
    s->used += bytes;
    return true;
}

/* Begins the next slot, with the unaligned end of the last one if its stretch continues. */
static int next_slot(deposit *d, deposit_slot **current, uint32_t file, uint64_t offset,
                     uint32_t tensor, dray_error *error)
{
    deposit_slot *before = *current, *s;
    int rc = free_slot(d, &s, error);
    if (rc)
        return rc;
    s->file = file;
    s->tensor = tensor;
    stretch *last = before && before->count ? &before->stretches[before->count - 1] : NULL;
    if (last && before->file == file && last->offset + last->bytes == offset) {
        size_t ragged = offset % DRAY__IO_ALIGN;
        uint8_t *staging = dray_region_base(d->staging);
        uint64_t at;
        if (ragged < last->bytes && room_for(s, offset - ragged, ragged, &at)) {
            memcpy(staging + s->base + at, staging + before->base + before->used - ragged, ragged);
            last->bytes -= ragged;
        }
    }
    if (before)
        write_out(d, before);
    *current = s;
    return DRAY_OK;
}

/* Returns the largest limit with which every slice of the copy is one run of bytes in the file. */
static uint64_t run_limit(const dray_copy *copy)
{
    uint64_t run = dray_dtype_size((dray_dtype)copy->destination_dtype);
    for (uint32_t d = copy->ndim; d-- > 0;) {
        if (copy->extent[d] > 1 && copy->destination_stride[d] != (int64_t)run)
            break;
        run *= (uint64_t)copy->extent[d];
    }
    return run < DRAY__SLICE_BYTES ? run : DRAY__SLICE_BYTES;
}

/* Computes the sum that the file must have from the source's own bits, so that a wrong copy is
 * detected. */
static int sum_of(const deposit *d, const dray_copy *copy, uint64_t *sum, dray_error *error)
{
    const dray_tensor_info *tensor = dray_layout_tensor(d->files, copy->tensor);
    dray__sum_part source = {copy->source_offset,
                             {copy->source_dtype, tensor->ndim, tensor->shape, copy->start,
                              copy->extent, copy->source_stride, NULL}};
    return dray__sum_region(d->regions[copy->source_region], &source, 1, sum, error);
}

static int put_slice(deposit *d, deposit_slot **current, const dray_copy *copy, dray_error *error)
{
    dray__rect rect = dray__copy_rect(copy);
    uint64_t elements = dray__rect_elements(&rect), at = 0, sum = 0;
    size_t bytes = elements * dray_dtype_size((dray_dtype)copy->destination_dtype);
    deposit_slot *s = *current;
    if (!s || s->file != copy->destination_region ||
        !room_for(s, copy->destination_offset, bytes, &at)) {
        int rc = next_slot(d, current, copy->destination_region, copy->destination_offset,
                           copy->tensor, error);
        if (rc)
            return rc;
        s = *current;
        room_for(s, copy->destination_offset, bytes, &at);
    }
    dray_copy in = *copy;
    dray__copy_to_dense(&in, copy->destination_dtype, s->base + at);
    dray__move_options options = {.layout = d->files};
    int rc = DRAY_OK;
    if (copy->source_dtype == copy->destination_dtype)
        rc = sum_of(d, copy, &sum, error);
    else
        options.sums = &sum;
    if (rc)
        return rc;
    rc = dray__move_all(d->regions[copy->source_region], d->staging, &in, 1, &options, error);
    if (!rc && !dray__sums_add(d->sums, dray_layout_tensor(d->files, copy->tensor)->name,
                               copy->destination_dtype, elements, sum))
        rc = dray__nomem(error);
    return rc;
}

static int put_copy(deposit *d, deposit_slot **current, const dray_copy *copy, dray_error *error)
{
    dray__rect whole = dray__copy_rect(copy), slice;
    dray__slicer slicer;
    int rc = DRAY_OK;
    dray__slicer_start(&slicer, &whole, dray_dtype_size((dray_dtype)copy->destination_dtype),
                       run_limit(copy));
    for (; !rc && dray__slicer_peek(&slicer, &slice); dray__slicer_next(&slicer)) {
        dray_copy part = dray__copy_cut(copy, &slice);
        rc = put_slice(d, current, &part, error);
        if (!rc)
            rc = take_back(d, false, error);
    }
    return rc;
}

/* ---- all of it ------------------------------------------------------------------------------- */

static int prepare(deposit *d, const dray_plan *plan, uint32_t self, dray_error *error)
{
    uint32_t files = dray_layout_region_count(d->files);
    uint64_t count = dray_plan_count(plan);
    d->copies = dray_plan_copies(plan);
    d->order = calloc((size_t)count + 1, sizeof *d->order);
    d->targets = calloc((size_t)files + 1, sizeof *d->targets);
    if (!d->order || !d->targets)
        return dray__nomem(error);
    for (uint32_t i = 0; i < files; i++)
        dray__disk_file_open(&d->targets[i], dray_region_fd(d->opened[i]), true,
                             dray_region_name(d->opened[i]));
    for (uint64_t i = 0; i < count; i++)
        if (d->copies[i].source == self)
            d->order[d->count++] = i;
    qsort_r(d->order, d->count, sizeof *d->order, by_place, (void *)d->copies);
    for (uint32_t i = 0; i < SLOTS; i++) {
        if (!(d->slots[i] = calloc(1, sizeof(deposit_slot))))
            return dray__nomem(error);
        d->slots[i]->base = (uint64_t)i * SLOT_BYTES;
        d->free_slots[d->free_count++] = d->slots[i];
    }
    int rc = dray_region_alloc(DRAY_REGION_HOST, (uint64_t)SLOTS * SLOT_BYTES, "staging of files",
                               &d->staging, error);
    return rc ? rc : dray__disk_open(DRAY__DISK_ANY, &d->disk, error);
}

static void end(deposit *d)
{
    dray__disk_close(d->disk);
    for (uint32_t i = 0; d->targets && i < dray_layout_region_count(d->files); i++)
        dray__disk_file_close(&d->targets[i]);
    for (uint32_t i = 0; i < SLOTS; i++)
        free(d->slots[i]);
    free(d->targets);
    free(d->order);
    dray_region_free(d->staging);
}

int dray__deposit(const dray_plan *plan, uint32_t self, dray_region *const *regions,
                  const dray_layout *files, dray_region *const *opened, dray__sums *sums,
                  dray_error *error)
{
    deposit d = {.files = files, .regions = regions, .opened = opened, .sums = sums};
    deposit_slot *current = NULL;
    int rc = prepare(&d, plan, self, error);
    for (uint64_t i = 0; i < d.count && !rc; i++)
        rc = put_copy(&d, &current, &d.copies[d.order[i]], error);
    if (!rc && current)
        write_out(&d, current);
    while (!rc && dray__disk_under_way(d.disk))
        rc = take_back(&d, true, error);
    end(&d);
    return rc;
}
