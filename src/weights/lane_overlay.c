/* The lane of checkpoints that are deltas: a rank that holds the base, or what one of the chain
 * results in, writes the elements that changed since. The entries are read ahead in the background
 * (mover/disk.h), level by level of each slice, within the ceiling but for the one that is next.
 * What it had and what it wrote it reads back as a whole, as if all of it had been read: the sums
 * that are compared with what the checkpoint says of itself say nothing of deltas. */
#include "base/clock.h"
#include "mover/disk.h"
#include "mover/mover.h"
#include "weights/haul.h"
#include "weights/overlay.h"

#include "base/error.h"

#include <stdlib.h>
#include <string.h>

enum {
    JOBS = 16, /* at most, in turn */
    SLICE_BYTES =
        4 << 20, /* so many that a column's rows share the entries that are read for them */
    FILES = 256  /* of all deltas, of 5 GiB each */
};

/* The entries that one level has for a slice of an op, on their way; applied in turn. */
struct job {
    dray__io io;
    uint64_t op;
    dray__rect slice;
    uint32_t level;
    uint64_t first, end; /* positions in the tensor */
    uint8_t *buffer;     /* NULL: the level changed nothing here */
    size_t skip;         /* bytes before the entries: reads begin at DRAY__IO_ALIGN */
    uint64_t bytes;      /* of the entries */
    bool reads, came, last;
};

struct overlay_lane {
    dray__haul *haul;
    const uint64_t *ops;
    uint64_t count, next; /* of ops */
    bool in_op;
    dray__slicer slicer;
    dray__rect slice; /* the one of which levels are being read */
    uint32_t level;   /* the next of them; 0: of the next slice */
    struct job jobs[JOBS];
    uint32_t first_job, job_count;
    dray__disk *disk;
    struct {
        const dray_region *region;
        dray__disk_file file;
    } files[FILES];
    uint32_t file_count;
    uint64_t ceiling, held, most; /* bytes of buffers */
    uint64_t entry_bytes, covered_bytes;
};

/* Of the tensor's name in the checkpoint. */
static const char *name_of(const dray__haul *h, const dray_copy *copy)
{
    return h->sources->names[copy->tensor];
}

/* Only what is compared with the checkpoint's sums in the end: nothing else tells whether the
 * memory still held the base. */
static bool overlay_takes(const dray__haul *h, const dray__op *op)
{
    const dray__overlay *overlay = h->sources->sources[op->copy.source].overlay;
    const dray_region *to =
        op->transform ? NULL : h->destination->regions[op->copy.destination_region];
    return h->options.has_disk_base && h->options.verify && overlay && !op->transform &&
           op->owned && to && dray_region_base(to) &&
           op->copy.source_dtype == op->copy.destination_dtype &&
           dray__sums_find(&h->sources->stored, name_of(h, &op->copy)) &&
           dray__overlay_way_of(overlay, name_of(h, &op->copy)) != DRAY__OVERLAY_FULL;
}

static void overlay_close(void *state)
{
    struct overlay_lane *lane = state;
    if (!lane)
        return;
    dray__disk_close(lane->disk); /* waits for what is under way: it writes to the buffers */
    for (uint32_t i = 0; i < JOBS; i++)
        free(lane->jobs[i].buffer);
    for (uint32_t i = 0; i < lane->file_count; i++)
        dray__disk_file_close(&lane->files[i].file);
    free(lane);
}

static int overlay_open(dray__haul *haul, const uint64_t *ops, uint64_t count, uint64_t ceiling,
                        void **out, dray_error *error)
{
    struct overlay_lane *lane = calloc(1, sizeof *lane);
    if (!lane)
        return dray__nomem(error);
    lane->haul = haul;
    lane->ops = ops;
    lane->count = count;
    lane->ceiling = ceiling;
    int rc = dray__disk_open(DRAY__DISK_ANY, &lane->disk, error);
    if (rc)
        overlay_close(lane);
    else
        *out = lane;
    return rc;
}

/* ---- reading ahead --------------------------------------------------------------------------- */

static const dray__op *op_of(const struct overlay_lane *lane, const struct job *job)
{
    return &lane->haul->sources->ops[lane->ops[job->op]];
}

static const dray__overlay *overlay_of(const struct overlay_lane *lane, const dray_copy *copy)
{
    return lane->haul->sources->sources[copy->source].overlay;
}

static int file_of(struct overlay_lane *lane, const dray_region *region, dray__disk_file **out,
                   dray_error *error)
{
    uint32_t i = 0;
    while (i < lane->file_count && lane->files[i].region != region)
        i++;
    if (i == FILES)
        return dray__fail(error, DRAY_EUNSUPPORTED, "a delta in more than %d files", FILES);
    if (i == lane->file_count) {
        lane->files[lane->file_count++].region = region;
        dray__disk_file_open(&lane->files[i].file, dray_region_fd(region), false,
                             dray_region_name(region));
    }
    *out = &lane->files[i].file;
    return DRAY_OK;
}

/* The next slice of an op; false: there is none. */
static bool next_slice(struct overlay_lane *lane)
{
    while (lane->next < lane->count) {
        const dray__op *op = &lane->haul->sources->ops[lane->ops[lane->next]];
        dray__rect whole = dray__copy_rect(&op->copy);
        if (!lane->in_op)
            dray__slicer_start(&lane->slicer, &whole,
                               dray_dtype_size((dray_dtype)op->copy.destination_dtype),
                               SLICE_BYTES);
        lane->in_op = dray__slicer_peek(&lane->slicer, &lane->slice);
        if (lane->in_op) {
            dray__slicer_next(&lane->slicer);
            return true;
        }
        lane->next++;
    }
    return false;
}

/* Asks for a job's entries. */
static int read_job(struct overlay_lane *lane, struct job *job, const dray_region *file,
                    uint64_t at, dray_error *error)
{
    uint64_t begin = at & ~(uint64_t)(DRAY__IO_ALIGN - 1);
    job->skip = (size_t)(at - begin);
    job->io = (dray__io){.offset = begin, .least = job->skip + (size_t)job->bytes, .user = job};
    job->io.bytes = (job->io.least + DRAY__IO_ALIGN - 1) & ~(size_t)(DRAY__IO_ALIGN - 1);
    job->buffer = aligned_alloc(DRAY__IO_ALIGN, job->io.bytes);
    if (!job->buffer)
        return dray__nomem(error);
    job->io.data = job->buffer;
    lane->held += job->io.bytes;
    lane->most = lane->held > lane->most ? lane->held : lane->most;
    int rc = file_of(lane, file, &job->io.file, error);
    if (rc)
        return rc;
    job->reads = true;
    dray__disk_submit(lane->disk, &job->io);
    return DRAY_OK;
}

/* One more job; *out false: there is nothing more, or no room. */
static int ask(struct overlay_lane *lane, bool *out, dray_error *error)
{
    const dray__haul *h = lane->haul;
    *out = false;
    if (lane->job_count == JOBS || (lane->held && lane->held >= lane->ceiling / 2) ||
        (lane->level == 0 && !next_slice(lane)))
        return DRAY_OK;
    struct job *job = &lane->jobs[(lane->first_job + lane->job_count) % JOBS];
    *job = (struct job){.op = lane->next, .slice = lane->slice, .level = lane->level};
    const dray_copy *copy = &op_of(lane, job)->copy;
    const dray_tensor_info *tensor = dray__haul_tensor(h, copy);
    const dray__overlay *overlay = overlay_of(lane, copy);
    for (uint32_t d = 0; d < tensor->ndim; d++) {
        uint64_t shape = (uint64_t)tensor->shape[d];
        job->first = job->first * shape + (uint64_t)job->slice.start[d];
        job->end = job->end * shape + (uint64_t)(job->slice.start[d] + job->slice.extent[d] - 1);
    }
    job->end++;
    lane->level++;
    job->last = lane->level == dray__overlay_levels(overlay);
    if (job->last)
        lane->level = 0;
    lane->job_count++;
    *out = true;
    uint64_t at;
    const dray_region *file = dray__overlay_place(overlay, job->level, name_of(h, copy), job->first,
                                                  job->end, &at, &job->bytes);
    return file ? read_job(lane, job, file, at, error) : DRAY_OK;
}

/* ---- writing --------------------------------------------------------------------------------- */

typedef struct placing {
    const dray_tensor_info *tensor;
    const dray_copy *copy;
    uint8_t *base;
    size_t size;
} placing;

static void place(void *user, uint64_t position, const uint8_t *value)
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
    memcpy(at, value, p->size);
}

/* All levels' entries of a slice are in their places. */
static void enter(struct overlay_lane *lane, const dray__op *op, const dray_copy *piece)
{
    dray__haul *h = lane->haul;
    int64_t begin = dray__now();
    h->bytes += dray__copy_bytes(piece);
    lane->covered_bytes += dray__copy_bytes(piece);
    uint64_t sum =
        dray__haul_read_back(h, h->destination->regions[piece->destination_region], piece);
    h->found[op->block] += sum;
    h->expected[op->block] += sum;
    dray__haul_own(h, piece, sum);
    h->verify_ns += dray__now() - begin;
}

static int do_job(struct overlay_lane *lane, struct job *job, dray_error *error)
{
    dray__haul *h = lane->haul;
    const dray__op *op = op_of(lane, job);
    dray_copy piece = dray__copy_cut(&op->copy, &job->slice);
    dray_region *to = h->destination->regions[piece.destination_region];
    placing p = {dray__haul_tensor(h, &op->copy), &piece, dray_region_base(to),
                 dray_dtype_size((dray_dtype)piece.destination_dtype)};
    int64_t begin = dray__now();
    int rc = job->reads ? dray__io_result(&job->io, error) : DRAY_OK;
    if (!rc && job->reads)
        rc = dray__overlay_each(overlay_of(lane, &piece), job->level, name_of(h, &piece),
                                job->first, job->end, job->buffer + job->skip, place, &p, error);
    if (rc)
        return rc;
    h->move_ns += dray__now() - begin;
    lane->entry_bytes += job->bytes;
    if (job->last)
        enter(lane, op, &piece);
    lane->held -= job->io.bytes;
    free(job->buffer);
    job->buffer = NULL;
    lane->first_job = (lane->first_job + 1) % JOBS;
    lane->job_count--;
    return DRAY_OK;
}

static int overlay_step(void *state, int64_t until_ns, bool *waits, dray_error *error)
{
    struct overlay_lane *lane = state;
    do {
        bool asked = true;
        while (asked) {
            int rc = ask(lane, &asked, error);
            if (rc)
                return rc;
        }
        for (dray__io *io; (io = dray__disk_take(lane->disk));)
            ((struct job *)io->user)->came = true;
        struct job *job = &lane->jobs[lane->first_job];
        if (!lane->job_count)
            return DRAY_OK;
        *waits = job->reads && !job->came;
        int rc = *waits ? DRAY_EAGAIN : do_job(lane, job, error);
        if (rc)
            return rc;
    } while (dray__now() < until_ns);
    return DRAY_EAGAIN;
}

static int overlay_fd(const void *state)
{
    const struct overlay_lane *lane = state;
    return dray__disk_fd(lane->disk);
}

static void overlay_report(const void *state, dray_update_report *report)
{
    const struct overlay_lane *lane = state;
    report->delta_bytes += lane->entry_bytes;
    report->delta_covered_bytes += lane->covered_bytes;
}

static uint64_t overlay_held(const void *state)
{
    const struct overlay_lane *lane = state;
    return lane->most;
}

const dray__lane_kind dray__lane_overlay = {
    .name = "overlay",
    .takes = overlay_takes,
    .open = overlay_open,
    .step = overlay_step,
    .fd = overlay_fd,
    .report = overlay_report,
    .held_bytes = overlay_held,
    .close = overlay_close,
};
