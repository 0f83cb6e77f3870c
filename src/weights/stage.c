/* A version that waits beside the one that is served: staging with the layout of the destination,
 * allocated once, and the copy that a commit makes of it. */
#include "base/clock.h"
#include "base/error.h"
#include "memory/region.h"
#include "mover/cuda.h"
#include "mover/mover.h"
#include "weights/subscriber.h"

#include <dray/gpu.h>
#include <errno.h>
#include <inttypes.h>
#include <stdlib.h>
#include <string.h>
#include <sys/epoll.h>
#include <unistd.h>

/* The blocks of one GPU's regions, copied by it. */
struct dray__stage_job {
    dray__cuda_device *device;
    dray__cuda_job *job;
    dray__cuda_item *items; /* until it is compiled */
    uint32_t *blocks;       /* of each item */
    uint32_t count;
    bool running;
};

/* ---- staging --------------------------------------------------------------------------------- */

void dray__stage_drop(dray_subscriber *s)
{
    uint32_t count = s->destination.layout ? dray_layout_region_count(s->destination.layout) : 0;
    for (uint32_t i = 0; i < s->stage_job_count; i++) {
        dray__cuda_job_close(s->stage_jobs[i].job);
        free(s->stage_jobs[i].items);
        free(s->stage_jobs[i].blocks);
    }
    free(s->stage_jobs);
    s->stage_jobs = NULL;
    s->stage_job_count = 0;
    for (uint32_t i = 0; s->staging && i < count; i++)
        dray_region_free(s->staging[i]);
    free(s->staging);
    free(s->staged_sums);
    s->staging = NULL;
    s->staged_sums = NULL;
    s->staging_bytes = 0;
    s->staged_version = s->staged_incarnation = 0;
    s->has_staged = false;
}

/* Beside memory of a GPU: memory of the same GPU, or pinned memory. */
static int stage_region(const dray_subscriber *s, uint32_t index, uint64_t bytes, dray_region **out,
                        dray_error *error)
{
    const dray_region *beside = s->destination.regions[index];
    if (dray_region_get_kind(beside) != DRAY_REGION_CUDA)
        return dray_region_alloc(DRAY_REGION_HOST, bytes, "staging", out, error);
    if (s->stage_kind != DRAY_REGION_PINNED)
        return dray_region_alloc_cuda(beside->device->uuid, bytes, "staging", out, error);
    int rc = dray__cuda_enter(beside->device, error);
    if (rc)
        return rc;
    rc = dray_region_alloc(DRAY_REGION_PINNED, bytes, "staging", out, error);
    dray__cuda_leave();
    return rc;
}

static bool copied_by_gpu(const dray_subscriber *s, uint32_t block)
{
    uint32_t region = dray_layout_block(s->destination.layout, block)->region;
    return dray_region_get_kind(s->destination.regions[region]) == DRAY_REGION_CUDA;
}

static struct dray__stage_job *job_of(dray_subscriber *s, dray__cuda_device *device)
{
    uint32_t blocks = dray_layout_block_count(s->destination.layout);
    for (uint32_t i = 0; i < s->stage_job_count; i++)
        if (s->stage_jobs[i].device == device)
            return &s->stage_jobs[i];
    struct dray__stage_job *jobs =
        reallocarray(s->stage_jobs, s->stage_job_count + 1, sizeof *jobs);
    if (!jobs)
        return NULL;
    s->stage_jobs = jobs;
    struct dray__stage_job *job = &jobs[s->stage_job_count++];
    *job = (struct dray__stage_job){.device = device};
    job->items = calloc((size_t)blocks + 1, sizeof *job->items);
    job->blocks = calloc((size_t)blocks + 1, sizeof *job->blocks);
    return job->items && job->blocks ? job : NULL;
}

/* Compiles what commits do on GPUs. */
static int compile(dray_subscriber *s, dray_error *error)
{
    const dray_layout *layout = s->destination.layout;
    for (uint32_t b = 0; b < dray_layout_block_count(layout); b++) {
        dray_copy copy = dray__block_copy(layout, b);
        const dray_region *from = s->staging[copy.source_region];
        const dray_region *to = s->destination.regions[copy.destination_region];
        if (!copied_by_gpu(s, b))
            continue;
        struct dray__stage_job *job = job_of(s, to->device);
        if (!job)
            return dray__nomem(error);
        if (!copy.ndim)
            copy.ndim = 1, copy.extent[0] = 1;
        job->blocks[job->count] = b;
        job->items[job->count++] =
            (dray__cuda_item){.copy = copy,
                              .source_base = from->device_address,
                              .destination_base = to->device_address,
                              .host = dray_region_get_kind(from) == DRAY_REGION_PINNED};
    }
    for (uint32_t i = 0; i < s->stage_job_count; i++) {
        struct dray__stage_job *job = &s->stage_jobs[i];
        /* What a kernel moves it reads back in the same pass; copy engines do better with PCIe. */
        dray__cuda_job_options options = {.sums = DRAY__CUDA_SUM_BACK,
                                          .engine_bytes =
                                              s->stage_kind == DRAY_REGION_PINNED ? 0 : UINT64_MAX};
        int rc = dray__cuda_job_new(job->device, layout, job->items, job->count, &options,
                                    &job->job, error);
        if (rc)
            return rc;
        free(job->items);
        job->items = NULL;
    }
    return DRAY_OK;
}

int dray__stage_open(dray_subscriber *s, dray_error *error)
{
    const dray_layout *layout = s->destination.layout;
    uint32_t count = dray_layout_region_count(layout);
    if (s->staging)
        return DRAY_OK;
    s->staging = calloc((size_t)count + 1, sizeof(dray_region *));
    int rc = s->staging ? DRAY_OK : dray__nomem(error);
    for (uint32_t i = 0; i < count && rc == DRAY_OK; i++) {
        uint64_t bytes = dray_layout_region(layout, i)->bytes;
        rc = stage_region(s, i, bytes, &s->staging[i], error);
        s->staging_bytes += bytes;
    }
    if (rc == DRAY_OK)
        rc = compile(s, error);
    if (rc)
        dray__stage_drop(s);
    return rc;
}

/* ---- the copy -------------------------------------------------------------------------------- */

struct dray__swap {
    const dray__destination *destination;
    dray_region *const *staging;
    struct dray__stage_job *jobs;
    uint32_t job_count;
    const dray_subscriber *of;
    int poll_fd; /* readable when a GPU is done; -1: none takes part */
    bool started, waits;
    int64_t started_ns;
    const uint64_t *expected; /* NULL: the prefetch was not verified */
    uint64_t *found;          /* one a block */
    uint32_t block;
    bool in_block;
    dray__slicer slicer;
    dray_copy copy; /* of the block */
    uint64_t bytes, copies;
    int64_t move_ns, verify_ns;
};

static int watch_jobs(dray__swap *swap, dray_error *error)
{
    if (!swap->job_count)
        return DRAY_OK;
    swap->poll_fd = epoll_create1(EPOLL_CLOEXEC);
    int rc = swap->poll_fd < 0 ? -1 : 0;
    for (uint32_t i = 0; i < swap->job_count && rc == 0; i++) {
        struct epoll_event event = {.events = EPOLLIN};
        rc = epoll_ctl(swap->poll_fd, EPOLL_CTL_ADD, dray__cuda_job_fd(swap->jobs[i].job), &event);
    }
    return rc ? dray__fail_errno(error, errno, "descriptors of a commit") : DRAY_OK;
}

int dray__swap_fd(const dray__swap *swap)
{
    return swap->poll_fd;
}

bool dray__swap_waits(const dray__swap *swap)
{
    return swap->waits;
}

int dray__swap_open(const dray_subscriber *s, dray__swap **out, dray_error *error)
{
    dray__swap *swap = calloc(1, sizeof *swap);
    if (!swap)
        return dray__nomem(error);
    swap->destination = &s->destination;
    swap->staging = s->staging;
    swap->jobs = s->stage_jobs;
    swap->job_count = s->stage_job_count;
    swap->of = s;
    swap->poll_fd = -1;
    swap->expected = s->staged_sums;
    swap->found =
        calloc((size_t)dray_layout_block_count(s->destination.layout) + 1, sizeof *swap->found);
    int rc = swap->found ? watch_jobs(swap, error) : dray__nomem(error);
    if (rc) {
        dray__swap_close(swap);
        return rc;
    }
    *out = swap;
    return DRAY_OK;
}

void dray__swap_close(dray__swap *swap)
{
    if (!swap)
        return;
    for (uint32_t i = 0; i < swap->job_count; i++) {
        struct dray__stage_job *job = &swap->jobs[i];
        if (job->running) {
            dray__cuda_job_abort(job->job);
            dray__cuda_job_wait(job->job, INT64_MAX, NULL);
        }
        job->running = false;
    }
    if (swap->poll_fd >= 0)
        close(swap->poll_fd);
    free(swap->found);
    free(swap);
}

static void begin_block(dray__swap *swap)
{
    const dray_layout *layout = swap->destination->layout;
    dray__rect whole = dray__rect_of(layout, swap->block);
    swap->copy = dray__block_copy(layout, swap->block);
    dray__slicer_start(&swap->slicer, &whole,
                       dray_dtype_size((dray_dtype)swap->copy.destination_dtype),
                       DRAY__SLICE_BYTES);
    swap->copies++;
    swap->in_block = true;
}

static int copy_slice(dray__swap *swap, const dray__rect *rect, dray_error *error)
{
    const dray_layout *layout = swap->destination->layout;
    dray_copy part = dray__copy_cut(&swap->copy, rect);
    dray__move_options options = {.layout = layout};
    int64_t begin = dray__now();
    int rc = dray__move_all(swap->staging[part.source_region],
                            swap->destination->regions[part.destination_region], &part, 1, &options,
                            error);
    int64_t moved = dray__now();
    swap->move_ns += moved - begin;
    swap->bytes += dray__rect_elements(rect) * dray_dtype_size((dray_dtype)part.destination_dtype);
    if (rc || !swap->expected)
        return rc;
    dray_region *scratch = NULL; /* stays NULL: all of it is addressable */
    rc = dray__sum_rect(layout, swap->destination->regions, swap->block, rect, &scratch,
                        &swap->found[swap->block], error);
    swap->verify_ns += dray__now() - moved;
    return rc;
}

/* The block is copied: is it what was staged? */
static int check_block(const dray__swap *swap, uint32_t block, dray_error *error)
{
    const dray_layout *layout = swap->destination->layout;
    if (!swap->expected || swap->expected[block] == swap->found[block])
        return DRAY_OK;
    return dray__fail(error, DRAY_ECHECKSUM,
                      "tensor %s: block %" PRIu32 " holds %016" PRIx64 " after the commit's copy, "
                      "%016" PRIx64 " was prefetched",
                      dray_layout_tensor(layout, dray_layout_block(layout, block)->tensor)->name,
                      block, swap->found[block], swap->expected[block]);
}

static int start_jobs(dray__swap *swap, dray_error *error)
{
    swap->started = true;
    swap->started_ns = dray__now();
    for (uint32_t i = 0; i < swap->job_count; i++) {
        int rc = dray__cuda_job_start(swap->jobs[i].job, NULL, 0, error);
        if (rc)
            return rc;
        swap->jobs[i].running = true;
    }
    return DRAY_OK;
}

static int end_job(dray__swap *swap, struct dray__stage_job *job, dray_error *error)
{
    const dray_layout *layout = swap->destination->layout;
    const uint64_t *sums = dray__cuda_job_sums(job->job, DRAY__CUDA_SUM_BACK);
    int rc = DRAY_OK;
    job->running = false;
    swap->move_ns = dray__now() - swap->started_ns;
    for (uint32_t i = 0; i < job->count && rc == DRAY_OK; i++) {
        dray__rect rect = dray__rect_of(layout, job->blocks[i]);
        uint32_t tensor = dray_layout_block(layout, job->blocks[i])->tensor;
        swap->copies++;
        swap->bytes += dray__rect_elements(&rect) *
                       dray_dtype_size((dray_dtype)dray_layout_tensor(layout, tensor)->dtype);
        swap->found[job->blocks[i]] = sums[i];
        rc = check_block(swap, job->blocks[i], error);
    }
    return rc;
}

/* DRAY_OK: all GPUs are done, and what they copied is right. */
static int poll_jobs(dray__swap *swap, dray_error *error)
{
    bool all = true;
    for (uint32_t i = 0; i < swap->job_count; i++) {
        struct dray__stage_job *job = &swap->jobs[i];
        int rc = job->running ? dray__cuda_job_poll(job->job, error) : DRAY_OK;
        if (rc == DRAY_OK && job->running)
            rc = end_job(swap, job, error);
        if (rc && rc != DRAY_EAGAIN)
            return rc;
        all = all && rc == DRAY_OK;
    }
    return all ? DRAY_OK : DRAY_EAGAIN;
}

/* One slice, or the end of a block, of those that no GPU copies. */
static int step_block(dray__swap *swap, dray_error *error)
{
    dray__rect rect;
    if (!swap->in_block && copied_by_gpu(swap->of, swap->block)) {
        swap->block++;
        return DRAY_OK;
    }
    if (!swap->in_block)
        begin_block(swap);
    if (dray__slicer_peek(&swap->slicer, &rect)) {
        dray__slicer_next(&swap->slicer);
        return copy_slice(swap, &rect, error);
    }
    swap->in_block = false;
    return check_block(swap, swap->block++, error);
}

int dray__swap_step(dray__swap *swap, int64_t budget_ns, dray_error *error)
{
    uint32_t count = dray_layout_block_count(swap->destination->layout);
    int64_t until = dray__now() + budget_ns;
    int rc = swap->started ? DRAY_OK : start_jobs(swap, error);
    while (rc == DRAY_OK && swap->block < count && dray__now() < until)
        rc = step_block(swap, error);
    if (rc)
        return rc;
    rc = poll_jobs(swap, error);
    swap->waits = rc == DRAY_EAGAIN && swap->block == count;
    return rc ? rc : swap->block < count ? DRAY_EAGAIN : DRAY_OK;
}

void dray__swap_report(const dray__swap *swap, dray_update_report *report)
{
    report->bytes = report->source_bytes = swap->bytes;
    report->link_bytes[DRAY_LINK_PROCESS] = swap->bytes;
    report->copies = swap->copies;
    report->move_ns = swap->move_ns;
    report->verify_ns = swap->verify_ns;
    report->bytes_per_s =
        swap->move_ns > 0 ? (double)swap->bytes / ((double)swap->move_ns * 1e-9) : 0;
}
