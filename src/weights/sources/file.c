/* Files as a source. The needed ranges are read in the background (mover/disk.h), many at once,
 * into slots. Ranges that have arrived are moved to their destination while others are read. All
 * strategies are the same here: the slots are the bucket.
 *
 * Ranges are read in the order of the files. A slot holds one range, for one or several slices of
 * ops; short gaps between these are read, too. No other rank compares the elements that this rank
 * does not own in its group, so they are read and moved twice, as from memory.
 *
 * If the checkpoint is a delta, and this rank holds the base, or the result of another checkpoint
 * of the chain, it reads the entries of the later changes, level by level for each slice. A slot
 * holds the entries of one level. The rank reads the result back as a whole, as if all of it had
 * been read, because the checkpoint's sums are of whole tensors, not of deltas. */
#include "base/clock.h"
#include "base/error.h"
#include "memory/region.h"
#include "mover/disk.h"
#include "weights/checkpoint/overlay.h"
#include "weights/transfer/transfer.h"

#include <stdlib.h>
#include <string.h>

enum {
    SLOT_BYTES = 4 << 20, /* at most */
    SLOTS = 12,
    FEWEST_SLOTS = 4, /* if the ceiling allows two pages for each */
    GAP = 64 << 10,   /* shorter gaps are read, to avoid another range */
    MOST_WASTE = 8,   /* times the needed bytes, at most */
    SLICES = 256,     /* of a slot */
    ENTRY_SLOTS = 16,
    ENTRY_SLICE = 4 << 20 /* bytes: large, so that rows of a column share the entries read */
};

typedef struct file_slot {
    dray__io io;
    dray_error why;
    uint8_t *data;
    uint64_t begin, end; /* in the file: aligned begin; end of the last needed byte */
    bool owned, again;   /* again: the second time */
    bool came;
    uint32_t count, at; /* slices (0: the slot is free); slices moved so far */
    const dray__op *ops[SLICES];
    dray_copy copies[SLICES]; /* from the staging region */
    /* For entries: their level, and their elements of the tensor */
    uint32_t level;
    uint64_t first, past, skip; /* skip: bytes before them */
    bool last;                  /* the last level of its slice */
} file_slot;

struct opened {
    struct opened *next;
    const dray_region *region;
    dray__disk_file file;
};

typedef struct file_route {
    dray__route *route;
    dray__transfer *transfer;
    bool patches;
    uint64_t *order; /* the ops, sorted by the places of their bytes in the files */
    uint64_t count, next;
    dray__slicer slicer;
    bool in_op;
    dray__disk *disk;
    struct opened *files;
    dray_region *staging; /* of the copies */
    uint64_t slot_bytes;
    uint32_t slot_count;
    file_slot **slots;
    uint32_t busy, oldest; /* entries are applied in the order of their reads */
    dray__batch batch;
    /* The slice whose entries are read now, and the next level; 0 for the next slice */
    const dray__op *op;
    dray_copy piece;
    uint32_t level;
    uint64_t held; /* bytes of entries */
} file_route;

/* ---- opening --------------------------------------------------------------------------------- */

/* Returns the tensor's name in the checkpoint. */
static const char *name_of(const dray__transfer *h, const dray_copy *copy)
{
    return h->sources->names[copy->tensor];
}

static bool file_reaches(const dray__transfer *h, const dray__op *op,
                         const dray__placement *placement)
{
    const dray__source *source = &h->sources->sources[op->copy.source];
    const dray_region_info *info = dray_layout_region(source->layout, op->copy.source_region);
    return !source->local && info && info->kind == DRAY_REGION_FILE &&
           (placement != &dray__place_patch || dray__overlay_offered(h, op));
}

static const dray_copy *copy_of(const file_route *l, uint64_t index)
{
    return &l->transfer->sources->ops[l->order[index]].copy;
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

static uint64_t wanted_bytes(const file_route *l)
{
    uint64_t bytes = 0;
    for (uint64_t i = 0; i < l->count; i++) {
        dray__rect rect = dray__copy_rect(copy_of(l, i));
        bytes +=
            dray__rect_elements(&rect) * dray_dtype_size((dray_dtype)copy_of(l, i)->source_dtype);
    }
    return bytes;
}

static int make_slots(file_route *l, dray_error *error)
{
    l->slots = calloc((size_t)l->slot_count + 1, sizeof(file_slot *));
    if (!l->slots)
        return dray__nomem(error);
    for (uint32_t i = 0; i < l->slot_count; i++) {
        l->slots[i] = calloc(1, sizeof(file_slot));
        if (!l->slots[i])
            return dray__nomem(error);
        if (l->staging)
            l->slots[i]->data = (uint8_t *)dray_region_base(l->staging) + i * l->slot_bytes;
    }
    return DRAY_OK;
}

/* Allocates several slots of at most SLOT_BYTES, within the ceiling, and no more than the bytes to
 * read. */
static int make_staging(file_route *l, uint64_t ceiling, dray_error *error)
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
    l->route->held = l->slot_bytes * l->slot_count;
    return dray_region_alloc(DRAY_REGION_HOST, l->route->held, "staging of files", &l->staging,
                             error);
}

static void file_close(void *state)
{
    file_route *l = state;
    dray__disk_close(l->disk); /* waits for reads under way, which write to the slots */
    for (struct opened *file; (file = l->files); free(file)) {
        l->files = file->next;
        dray__disk_file_close(&file->file);
    }
    for (uint32_t i = 0; l->slots && i < l->slot_count; i++) {
        if (l->patches && l->slots[i])
            free(l->slots[i]->data);
        free(l->slots[i]);
    }
    free(l->slots);
    free(l->order);
    dray_region_free(l->staging);
}

/* Returns true when the files are in a store: a checkpoint is in one store. */
static bool any_object(const file_route *l)
{
    const dray__sources *sources = l->transfer->sources;
    const char *name = l->count ? sources->sources[copy_of(l, 0)->source].name : NULL;
    return !dray__store_is_local(name);
}

static int file_open(dray__route *route, dray_error *error)
{
    file_route *l = route->state;
    l->route = route;
    l->transfer = route->transfer;
    l->count = route->count;
    l->slot_count = ENTRY_SLOTS;
    l->patches = route->placement == &dray__place_patch;
    l->order = calloc((size_t)l->count + 1, sizeof *l->order);
    if (!l->order)
        return dray__nomem(error);
    memcpy(l->order, route->ops, l->count * sizeof *l->order);
    if (!l->patches)
        qsort_r(l->order, l->count, sizeof *l->order, by_place, l->transfer->sources->ops);
    int rc = l->patches ? DRAY_OK : make_staging(l, route->ceiling, error);
    if (rc == DRAY_OK)
        rc = make_slots(l, error);
    if (rc == DRAY_OK)
        rc = dray__disk_open(any_object(l) ? DRAY__DISK_THREADS : DRAY__DISK_ANY, &l->disk, error);
    route->fd = rc ? -1 : dray__disk_fd(l->disk);
    return rc;
}

/* ---- slices and their ranges ----------------------------------------------------------------- */

/* Returns the bytes in the file from a copy's first byte to the end of its last one. */
static uint64_t span_of(const dray_copy *copy)
{
    uint64_t span = dray_dtype_size((dray_dtype)copy->source_dtype);
    for (uint32_t d = 0; d < copy->ndim; d++)
        span += (uint64_t)(copy->extent[d] - 1) * (uint64_t)copy->source_stride[d];
    return span;
}

static bool too_wide(const file_route *l, const dray_copy *copy)
{
    dray__rect rect = dray__copy_rect(copy);
    uint64_t useful = dray__rect_elements(&rect) * dray_dtype_size((dray_dtype)copy->source_dtype);
    uint64_t span = span_of(copy);
    return span > l->slot_bytes - DRAY__IO_ALIGN ||
           (span > useful + GAP && span / MOST_WASTE > useful);
}

/* Cuts the next op into slices that fit a slot and are not mostly gaps. For entries, slices are so
 * large that reading entries pays. */
static void start_op(file_route *l, const dray_copy *copy)
{
    dray__rect whole = dray__copy_rect(copy), slice;
    size_t from = dray_dtype_size((dray_dtype)copy->source_dtype);
    size_t to = dray_dtype_size((dray_dtype)copy->destination_dtype);
    size_t element = from > to ? from : to;
    l->in_op = true;
    if (l->patches) {
        dray__slicer_start(&l->slicer, &whole, element, ENTRY_SLICE);
        return;
    }
    for (uint64_t limit = DRAY__SLICE_BYTES;; limit /= 2) {
        dray__slicer_start(&l->slicer, &whole, element, limit);
        if (limit <= element || !dray__slicer_peek(&l->slicer, &slice))
            break;
        dray_copy cut = dray__copy_cut(copy, &slice);
        if (!too_wide(l, &cut))
            break;
    }
}

static bool peek(file_route *l, dray_copy *out)
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

static void take(file_route *l)
{
    dray__slicer_next(&l->slicer);
    if (l->slicer.done) {
        l->in_op = false;
        l->next++;
    }
}

static int file_of(file_route *l, const dray_region *region, dray__disk_file **out,
                   dray_error *error)
{
    struct opened *file = l->files;
    while (file && file->region != region)
        file = file->next;
    if (!file) {
        file = calloc(1, sizeof *file);
        if (!file)
            return dray__nomem(error);
        *file = (struct opened){.next = l->files, .region = region};
        if (dray__store_is_local(dray_region_name(region)))
            dray__disk_file_open(&file->file, dray_region_fd(region), false,
                                 dray_region_name(region));
        else
            dray__disk_file_object(&file->file, region);
        l->files = file;
    }
    *out = &file->file;
    return DRAY_OK;
}

/* Returns the bytes from an aligned beginning to the aligned end of a range. */
static size_t aligned_bytes(uint64_t begin, uint64_t end)
{
    return (size_t)(end - begin + DRAY__IO_ALIGN - 1) & ~(size_t)(DRAY__IO_ALIGN - 1);
}

static int ask(file_route *l, file_slot *s, const dray_region *region, dray_error *error)
{
    s->io = (dray__io){.data = s->data,
                       .offset = s->begin,
                       .least = (size_t)(s->end - s->begin),
                       .bytes = aligned_bytes(s->begin, s->end),
                       .why = &s->why,
                       .user = s};
    int rc = file_of(l, region, &s->io.file, error);
    if (rc == DRAY_OK)
        dray__disk_submit(l->disk, &s->io);
    return rc;
}

static const dray_region *region_of(const file_route *l, const dray_copy *copy)
{
    return l->transfer->sources->sources[copy->source].regions[copy->source_region];
}

/* Can the slice be read together with those in the slot? */
static bool goes_along(const file_route *l, const file_slot *s, const dray_copy *copy, bool owned)
{
    return s->count < SLICES && region_of(l, &s->ops[0]->copy) == region_of(l, copy) &&
           s->owned == owned && copy->source_offset >= s->begin &&
           copy->source_offset <= s->end + GAP &&
           copy->source_offset + span_of(copy) - s->begin <= l->slot_bytes;
}

/* Gives the slot the next range, and starts to read it. */
static int fill(file_route *l, file_slot *s, dray_error *error)
{
    dray_copy copy;
    uint64_t base = (uint64_t)(s->data - (uint8_t *)dray_region_base(l->staging));
    s->again = false;
    while (peek(l, &copy)) {
        const dray__op *op = &l->transfer->sources->ops[l->order[l->next]];
        if (s->count && !goes_along(l, s, &copy, op->owned))
            break;
        if (!s->count) {
            s->begin = copy.source_offset & ~(uint64_t)(DRAY__IO_ALIGN - 1);
            s->end = 0;
            s->owned = op->owned;
        }
        uint64_t end = copy.source_offset + span_of(&copy);
        s->end = end > s->end ? end : s->end;
        s->ops[s->count] = op;
        s->copies[s->count] = copy;
        s->copies[s->count++].source_offset = base + (copy.source_offset - s->begin);
        take(l);
    }
    return s->count ? ask(l, s, region_of(l, &s->ops[0]->copy), error) : DRAY_OK;
}

/* ---- entries --------------------------------------------------------------------------------- */

static const dray__overlay *overlay_of(const file_route *l, const dray_copy *copy)
{
    return dray__overlay_of(&l->transfer->sources->sources[copy->source]);
}

/* Starts the read of one more level's entries for a slice, which may be none. */
static int fill_entries(file_route *l, file_slot *s, dray_error *error)
{
    if ((l->held && l->held >= l->route->ceiling / 2) || (l->level == 0 && !peek(l, &l->piece)))
        return DRAY_OK;
    if (l->level == 0) {
        l->op = &l->transfer->sources->ops[l->order[l->next]];
        take(l);
    }
    const dray_tensor_info *tensor = dray__transfer_tensor(l->transfer, &l->piece);
    const dray__overlay *overlay = overlay_of(l, &l->piece);
    s->count = 1;
    s->ops[0] = l->op;
    s->copies[0] = l->piece;
    s->level = l->level;
    s->first = s->past = 0;
    for (uint32_t d = 0; d < tensor->ndim; d++) {
        uint64_t shape = (uint64_t)tensor->shape[d];
        s->first = s->first * shape + (uint64_t)l->piece.start[d];
        s->past = s->past * shape + (uint64_t)(l->piece.start[d] + l->piece.extent[d] - 1);
    }
    s->past++;
    l->level = (l->level + 1) % dray__overlay_levels(overlay);
    s->last = l->level == 0;
    uint64_t at, bytes;
    const dray_region *file = dray__overlay_place(
        overlay, s->level, name_of(l->transfer, &l->piece), s->first, s->past, &at, &bytes);
    s->came = !file;
    s->begin = at & ~(uint64_t)(DRAY__IO_ALIGN - 1);
    s->end = at + bytes;
    s->skip = at - s->begin;
    l->transfer->told.delta_bytes += bytes;
    if (!file)
        return DRAY_OK;
    s->data = aligned_alloc(DRAY__IO_ALIGN, aligned_bytes(s->begin, s->end));
    if (!s->data)
        return dray__nomem(error);
    l->held += aligned_bytes(s->begin, s->end);
    l->route->held = l->held > l->route->held ? l->held : l->route->held;
    return ask(l, s, file, error);
}

typedef struct placing {
    const dray_tensor_info *tensor;
    const dray_copy *copy;
    uint8_t *base;
    size_t size;
} placing;

static void place(void *user, uint64_t position, const dray__change *change)
{
    const placing *p = user;
    uint8_t *at = p->base + p->copy->destination_offset;
    for (uint32_t d = p->tensor->ndim; d-- > 0;) {
        uint64_t shape = (uint64_t)p->tensor->shape[d];
        int64_t here = (int64_t)(position % shape) - p->copy->start[d];
        position /= shape;
        if (here < 0 || here >= p->copy->extent[d])
            return;
        at += here * p->copy->destination_stride[d];
    }
    dray__change_put(at, change, p->size, p->copy->destination_dtype);
}

/* Writes the entries that arrived. After the last level the slice is complete. */
static int apply(file_route *l, file_slot *s, dray_error *error)
{
    dray__transfer *h = l->transfer;
    const dray_copy *piece = &s->copies[0];
    placing p = {dray__transfer_tensor(h, piece), piece,
                 dray_region_base(h->destination->regions[piece->destination_region]),
                 dray_dtype_size((dray_dtype)piece->destination_dtype)};
    int64_t begin = dray__now();
    int rc = s->data ? dray__overlay_each(overlay_of(l, piece), s->level, name_of(h, piece),
                                          s->first, s->past, s->data + s->skip, place, &p, error)
                     : DRAY_OK;
    if (rc)
        return rc;
    h->move_ns += dray__now() - begin;
    if (s->last) {
        h->told.delta_covered_bytes += dray__copy_bytes(piece);
        dray__transfer_arrived(h, s->ops[0], piece, true);
    }
    if (s->data)
        l->held -= s->io.bytes;
    free(s->data);
    s->data = NULL;
    l->oldest = (l->oldest + 1) % l->slot_count;
    s->count = 0;
    l->busy--;
    return DRAY_OK;
}

/* ---- moving the ranges that have arrived ----------------------------------------------------- */

/* Moves the next slices, about DRAY__SLICE_BYTES, that go to one region. A slice that is read twice
 * is read back and compared after the first move, and enters the books after the second. */
static int move_some(file_route *l, file_slot *s, dray_error *error)
{
    dray__transfer *h = l->transfer;
    dray__batch *b = &l->batch;
    uint64_t bytes = 0;
    uint32_t to = s->copies[s->at].destination_region;
    bool verify = h->options.verify, first = verify && !s->owned && !s->again;
    for (b->count = 0; s->at < s->count && b->count < DRAY__BATCH && bytes < DRAY__SLICE_BYTES &&
                       s->copies[s->at].destination_region == to;
         b->count++, s->at++) {
        b->ops[b->count] = s->ops[s->at];
        b->copies[b->count] = s->copies[s->at];
        bytes += dray__copy_bytes(&s->copies[s->at]);
    }
    int rc = dray__batch_move(h, b, 0, b->count, l->staging, h->destination->regions[to],
                              verify && !s->again, error);
    if (rc)
        return rc;
    if (verify && !s->again)
        dray__batch_written(h, b);
    if (first)
        return dray__batch_compare(h, b, h->destination->regions[to], error);
    dray__batch_arrived(h, b, false);
    return DRAY_OK;
}

static int read_result(const file_route *l, const file_slot *s, dray_error *error)
{
    int rc = dray__io_result(&s->io, error);
    const dray_region *file = region_of(l, &s->ops[0]->copy);
    if (!rc && file->patch && !l->patches)
        rc = file->patch(file, s->io.data, s->begin, s->io.least, error);
    return rc ? dray__fail_prefix(error, rc, "tensor %s: ",
                                  dray__transfer_tensor(l->transfer, &s->copies[0])->name)
              : DRAY_OK;
}

/* Moves some slices of a slot. After its last slice, the slot is read a second time, or free. */
static int copy_some(file_route *l, file_slot *s, dray_error *error)
{
    int rc = move_some(l, s, error);
    if (rc || s->at < s->count)
        return rc;
    s->came = false;
    s->at = 0;
    if (l->transfer->options.verify && !s->owned && !s->again) {
        s->again = true;
        dray__disk_submit(l->disk, &s->io);
        return DRAY_OK;
    }
    s->count = 0;
    l->busy--;
    return DRAY_OK;
}

/* ---- the route ------------------------------------------------------------------------------- */

static file_slot *free_slot(const file_route *l)
{
    if (l->patches && l->busy < l->slot_count)
        return l->slots[(l->oldest + l->busy) % l->slot_count];
    for (uint32_t i = 0; !l->patches && i < l->slot_count; i++)
        if (!l->slots[i]->count)
            return l->slots[i];
    return NULL;
}

/* Returns a slot that has arrived; for entries, the oldest one. */
static file_slot *ready_slot(const file_route *l)
{
    uint32_t count = l->patches ? 1 : l->slot_count;
    for (uint32_t i = 0; i < count; i++) {
        file_slot *s = l->slots[l->oldest + i];
        if (s->count && s->came)
            return s;
    }
    return NULL;
}

static int ask_ahead(file_route *l, dray_error *error)
{
    file_slot *s;
    int rc = DRAY_OK;
    while (rc == DRAY_OK && (s = free_slot(l))) {
        rc = l->patches ? fill_entries(l, s, error) : fill(l, s, error);
        if (!s->count) /* nothing is left to read, or there is no room */
            break;
        l->busy++;
    }
    return rc;
}

static int route_step(dray__route *route, int64_t until_ns, dray_error *error)
{
    file_route *l = route->state;
    for (;;) {
        int rc = ask_ahead(l, error);
        for (dray__io *io; rc == DRAY_OK && (io = dray__disk_take(l->disk));) {
            ((file_slot *)io->user)->came = true;
            rc = read_result(l, io->user, error);
        }
        file_slot *s = rc ? NULL : ready_slot(l);
        if (s)
            rc = l->patches ? apply(l, s, error) : copy_some(l, s, error);
        if (rc || (!s && !l->busy))
            return rc;
        route->waits = !s;
        if (!s || (dray__now() >= until_ns && l->busy))
            return DRAY_EAGAIN;
    }
}

static void route_explain(const void *state, dray_error *error)
{
    const file_route *l = state;
    for (uint32_t i = 0; i < l->slot_count; i++) {
        const file_slot *s = l->slots[i];
        if (s->count && !s->came && error) {
            dray__fail_prefix(error, error->code,
                              "%.200s did not give its bytes: ", s->io.file->name);
            return;
        }
    }
}

const dray__source_type dray__source_file = {.name = "files",
                                             .bytes = sizeof(file_route),
                                             .reaches = file_reaches,
                                             .open = file_open,
                                             .step = route_step,
                                             .explain = route_explain,
                                             .close = file_close};
