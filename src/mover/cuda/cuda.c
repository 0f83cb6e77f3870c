/* Jobs: compiled lists of rectangles, and their replay (cuda.h).
 * A job has four streams. Kernel launches alternate between two, so that blocks of the next launch
 * start as those of the last one end; with a limit on thread blocks each launch gets half of it.
 * The third stream is for copy engines. The fourth reads back the bytes that the engines wrote,
 * behind them. At the end the first stream waits for the others. Everything that a run needs,
 * except its sums, stays in the GPU's memory between runs. */
#include "mover/cuda/cuda.h"

#include "base/arena.h"
#include "base/clock.h"
#include "base/error.h"
#include "mover/cuda/cuda_internal.h"

#include <errno.h>
#include <poll.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <string.h>
#include <sys/eventfd.h>
#include <unistd.h>

enum { KERNEL, SECOND, ENGINE, CHECK, STREAMS };
enum { BEGUN, MOVED, FINISHED, JOINED, PHASE, SENT, EVENTS };
enum {
    BATCH = 1024, /* runs of one call to the copy engines, at most */
    LOOK_MS = 100 /* between polls: without callbacks a driver does not report a failed kernel */
};
#define BATCH_BYTES ((uint64_t)512 << 20)

struct dray__cuda_job {
    dray__gpu *gpu;
    dray__gpu_program program;
    uint32_t sums, ctas, spared;
    uint64_t launch_bytes;
    uint64_t sum_count;
    dray__gpu_memory *memory; /* pieces | quants | deltas | tiles | sums | most | cursors | stop */
    uint64_t quants_at, deltas_at, tiles_at, sums_at, most_at, cursors_at, stop_at;
    dray__gpu_memory *back; /* of the host: sums | source of the stop word | given maxima */
    uint64_t stop_word_at;
    dray__gpu_memory *drafts; /* of the host: descriptors being uploaded; NULL without a reserve */
    CUstream streams[STREAMS], control;
    CUevent events[EVENTS];
    int fd;
    bool running, reserved; /* reserved: it may be remade */
    bool paced;
    uint64_t released; /* of a paced job: launches of the run that are enqueued */
    atomic_bool stopped;
    uint32_t launches;
    int64_t device_ns;
};

/* ---- making -----------------------------------------------------------------------------------
 */

/* Computes the offsets of all parts of the job's memory. */
static void place_all(dray__cuda_job *job)
{
    const dray__gpu_program *p = &job->program;
    uint64_t sums = job->sum_count * DRAY__GPU_SUMS * sizeof(uint64_t);
    job->quants_at = dray__round_up(p->piece_count * sizeof *p->pieces, 256);
    job->deltas_at = job->quants_at + dray__round_up(p->quant_count * sizeof *p->quants, 256);
    job->tiles_at = job->deltas_at + dray__round_up(p->delta_count * sizeof *p->deltas, 256);
    job->sums_at = job->tiles_at + dray__round_up(p->tile_count * sizeof *p->tiles, 256);
    job->most_at = job->sums_at + dray__round_up(sums, 256);
    job->cursors_at = job->most_at + dray__round_up(p->most_count * sizeof(uint32_t), 256);
    job->stop_at = job->cursors_at + dray__round_up(p->step_count * sizeof(uint32_t), 256);
    job->stop_word_at = dray__round_up(sums, 256);
}

static void write_stop_word(dray__cuda_job *job)
{
    const uint32_t stop = 1;
    memcpy(job->back->host + job->stop_word_at, &stop, sizeof stop);
}

static void give_memory(dray__cuda_job *job)
{
    dray__gpu_memory **all[] = {&job->memory, &job->back, &job->drafts};
    for (size_t i = 0; i < sizeof all / sizeof *all; i++) {
        dray__gpu_give(job->gpu, *all[i]);
        *all[i] = NULL;
    }
}

/* reserve: bytes of descriptors that a later remake may need; 0 when the job is never remade. */
static int make_memory(dray__cuda_job *job, uint64_t reserve, dray_error *error)
{
    uint64_t most = job->sums_at > reserve ? job->sums_at : reserve;
    uint64_t rest = job->stop_at + 256 - job->sums_at; /* sums and all parts behind them */
    uint64_t back = job->stop_word_at + 256 + job->program.given_most * sizeof(uint32_t);
    if (reserve) { /* other rectangles may need more room for sums */
        rest = rest > reserve / 2 ? rest : reserve / 2;
        back = back > reserve / 2 ? back : reserve / 2;
    }
    int rc = dray__gpu_take(job->gpu, most + rest, false, &job->memory, error);
    if (!rc)
        rc = dray__gpu_take(job->gpu, back, true, &job->back, error);
    if (!rc && reserve)
        rc = dray__gpu_take(job->gpu, most, true, &job->drafts, error);
    if (!rc)
        write_stop_word(job);
    return rc;
}

static int make_streams(dray__cuda_job *job, dray_error *error)
{
    const dray__cuda *cuda = job->gpu->cuda;
    CUresult result = CUDA_SUCCESS;
    for (int i = 0; !result && i < STREAMS; i++)
        result = cuda->cuStreamCreate(&job->streams[i], CU_STREAM_NON_BLOCKING);
    if (!result)
        result = cuda->cuStreamCreate(&job->control, CU_STREAM_NON_BLOCKING);
    for (int i = 0; !result && i < EVENTS; i++)
        result = cuda->cuEventCreate(&job->events[i],
                                     i <= MOVED ? CU_EVENT_DEFAULT : CU_EVENT_DISABLE_TIMING);
    return dray__fail_cuda(error, result, "streams on %s", job->gpu->device->name);
}

/* Uploads the descriptors through `drafts` if the job has it. Else it uploads from the program's
 * memory and waits for its own stream, because that memory is freed afterwards. */
static int upload(dray__cuda_job *job, dray_error *error)
{
    const dray__cuda *cuda = job->gpu->cuda;
    const dray__gpu_program *p = &job->program;
    const struct {
        uint64_t at, bytes;
        const void *data;
    } parts[] = {{0, p->piece_count * sizeof *p->pieces, p->pieces},
                 {job->quants_at, p->quant_count * sizeof *p->quants, p->quants},
                 {job->deltas_at, p->delta_count * sizeof *p->deltas, p->deltas},
                 {job->tiles_at, p->tile_count * sizeof *p->tiles, p->tiles}};
    CUresult result = CUDA_SUCCESS;
    for (size_t i = 0; i < sizeof parts / sizeof *parts; i++) {
        if (parts[i].bytes && job->drafts)
            memcpy(job->drafts->host + parts[i].at, parts[i].data, parts[i].bytes);
        else if (parts[i].bytes && !result)
            result = cuda->cuMemcpyHtoDAsync(job->memory->device + parts[i].at, parts[i].data,
                                             parts[i].bytes, job->streams[KERNEL]);
    }
    if (job->drafts && job->sums_at)
        result = cuda->cuMemcpyHtoDAsync(job->memory->device, job->drafts->host, job->sums_at,
                                         job->streams[KERNEL]);
    else if (!result)
        result = cuda->cuStreamSynchronize(job->streams[KERNEL]);
    return dray__fail_cuda(error, result, "descriptors to %s", job->gpu->device->name);
}

/* Frees the descriptors on the host: the GPU or `drafts` has a copy. */
static void forget_uploaded(dray__cuda_job *job)
{
    free(job->program.tiles);
    free(job->program.pieces);
    job->program.tiles = NULL;
    job->program.pieces = NULL;
}

static int make_job(dray__cuda_job *job, dray__cuda_device *device, const dray_layout *layout,
                    const dray__cuda_item *items, uint64_t count,
                    const dray__cuda_job_options *options, dray_error *error)
{
    int rc = dray__gpu_get(device, &job->gpu, error);
    if (!rc)
        rc = dray__gpu_compile(layout, items, count, options, &job->program, error);
    if (!rc) {
        place_all(job);
        rc = make_memory(job, options->reserve_bytes, error);
    }
    if (!rc)
        rc = make_streams(job, error);
    if (!rc)
        rc = upload(job, error);
    if (!rc && (job->fd = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK)) < 0)
        rc = dray__fail_errno(error, errno, "a descriptor for %s", device->name);
    forget_uploaded(job);
    return rc;
}

int dray__cuda_job_new(dray__cuda_device *device, const dray_layout *layout,
                       const dray__cuda_item *items, uint64_t count,
                       const dray__cuda_job_options *options, dray__cuda_job **out,
                       dray_error *error)
{
    dray__cuda_job_options own = options ? *options : (dray__cuda_job_options){0};
    if (own.paced)
        own.engine_bytes = UINT64_MAX;
    options = &own;
    dray__cuda_job *job = calloc(1, sizeof *job);
    if (!job)
        return dray__nomem(error);
    job->fd = -1;
    job->sums = options->sums;
    job->ctas = options->ctas;
    job->spared = options->spared;
    job->launch_bytes = options->launch_bytes;
    job->reserved = options->reserve_bytes > 0;
    job->paced = options->paced;
    job->sum_count = count + options->quant_count + options->delta_count;
    int rc = dray__cuda_enter(device, error);
    if (rc) {
        free(job);
        return rc;
    }
    rc = make_job(job, device, layout, items, count, options, error);
    dray__cuda_leave();
    if (rc)
        dray__cuda_job_close(job);
    else
        *out = job;
    return rc;
}

/* ---- remaking ---------------------------------------------------------------------------------
 */

static bool has_room(const dray__cuda_job *job)
{
    return job->memory && job->back && job->drafts && job->stop_at + 256 <= job->memory->bytes &&
           job->stop_word_at + 256 <= job->back->bytes && job->sums_at <= job->drafts->bytes;
}

/* The context is current. */
static int remake(dray__cuda_job *job, dray__gpu_program *made, uint64_t count, bool may_allocate,
                  dray_error *error)
{
    dray__gpu_program_free(&job->program);
    job->program = *made;
    job->sum_count = count;
    place_all(job);
    if (!has_room(job) && !may_allocate)
        return DRAY_EAGAIN;
    /* The upload of a job that was never started may still be under way. */
    job->gpu->cuda->cuStreamSynchronize(job->streams[KERNEL]);
    if (has_room(job)) {
        write_stop_word(job);
    } else {
        give_memory(job);
        int rc = make_memory(job, job->sums_at, error);
        if (rc)
            return rc;
    }
    return upload(job, error);
}

int dray__cuda_job_remake(dray__cuda_job *job, const dray_layout *layout,
                          const dray__cuda_item *items, uint64_t count,
                          const dray__cuda_quant *quants, uint64_t quant_count, bool may_allocate,
                          dray_error *error)
{
    const dray__cuda_job_options options = {.sums = job->sums,
                                            .launch_bytes = job->launch_bytes,
                                            .quants = quants,
                                            .quant_count = quant_count};
    dray__gpu_program made;
    if (job->running || !job->reserved)
        return dray__fail(error, DRAY_EBUSY, "the job on %s is under way, or has no reserve",
                          job->gpu->device->name);
    int rc = dray__cuda_enter(job->gpu->device, error);
    if (rc)
        return rc;
    rc = dray__gpu_compile(layout, items, count, &options, &made, error);
    if (!rc)
        rc = remake(job, &made, count + quant_count, may_allocate, error);
    if (rc)
        dray__gpu_program_free(&job->program);
    forget_uploaded(job);
    dray__cuda_leave();
    return rc;
}

/* ---- running ----------------------------------------------------------------------------------
 */

static CUresult move_runs(const dray__cuda *cuda, const dray__gpu_run *runs, uint64_t count,
                          CUstream stream)
{
    CUdeviceptr to[BATCH], from[BATCH];
    size_t bytes[BATCH], first = 0, failed;
    CUmemcpyAttributes attributes = {.srcAccessOrder = CU_MEMCPY_SRC_ACCESS_ORDER_STREAM};
    CUresult result = CUDA_SUCCESS;
    for (uint64_t i = 0; i < count; i++) {
        to[i] = runs[i].destination;
        from[i] = runs[i].source;
        bytes[i] = runs[i].bytes;
    }
    if (cuda->cuMemcpyBatchAsync && count > 1)
        return cuda->cuMemcpyBatchAsync(to, from, bytes, count, &attributes, &first, 1, stream);
    if (cuda->cuMemcpyBatchAsync_v1 && count > 1)
        return cuda->cuMemcpyBatchAsync_v1(to, from, bytes, count, &attributes, &first, 1, &failed,
                                           stream);
    for (uint64_t i = 0; !result && i < count; i++)
        result = cuda->cuMemcpyAsync(to[i], from[i], bytes[i], stream);
    return result;
}

/* Starts the runs of a phase from runs[*at] on, up to `end`. */
static CUresult start_runs(dray__cuda_job *job, uint32_t phase, uint64_t *at, uint64_t end)
{
    const dray__gpu_program *p = &job->program;
    const dray__cuda *cuda = job->gpu->cuda;
    CUresult result = CUDA_SUCCESS;
    while (!result && *at < end && p->runs[*at].phase == phase) {
        uint64_t n = 0, bytes = 0;
        while (n < BATCH && bytes < BATCH_BYTES && *at + n < end && p->runs[*at + n].phase == phase)
            bytes += p->runs[*at + n++].bytes;
        result = move_runs(cuda, p->runs + *at, n, job->streams[ENGINE]);
        job->launches++;
        *at += n;
    }
    return result;
}

/* half: another launch runs at the same time, and shares the limit on thread blocks. */
static int start_step(dray__cuda_job *job, const dray__gpu_step *step, int stream, bool half,
                      dray_error *error)
{
    CUdeviceptr base = job->memory->device;
    uint32_t kinds = job->sums, blocks = job->gpu->blocks[step->kernel];
    uint64_t sums = base + job->sums_at;
    uint32_t all = (uint32_t)job->gpu->device->multiprocessors;
    if (job->spared < all)
        blocks -= blocks / all * job->spared;
    if (job->ctas && job->ctas < blocks) {
        blocks = job->ctas;
        if (half && blocks > 1)
            blocks /= 2;
    }
    if (step->count < blocks)
        blocks = (uint32_t)step->count;
    if (step->back) { /* its source is the engines' destination */
        sums += 2 * job->sum_count * sizeof(uint64_t);
        kinds = DRAY__CUDA_SUM_SOURCE;
    }
    dray__gpu_launch launch = {
        .pieces = (const dray__gpu_piece *)base,
        .quants = (const dray__gpu_quant *)(base + job->quants_at),
        .deltas = (const dray__gpu_delta *)(base + job->deltas_at),
        .tiles = (const dray__gpu_tile *)(base + job->tiles_at) + step->first,
        .sums = (uint64_t *)sums,
        .sum_count = job->sum_count,
        .most = (uint32_t *)(base + job->most_at),
        .stop = (const uint32_t *)(base + job->stop_at),
        .cursor = (uint32_t *)(base + job->cursors_at) + (step - job->program.steps),
        .count = (uint32_t)step->count,
        .wanted = kinds};
    job->launches++;
    return dray__gpu_launch_kernel(job->gpu, step->kernel, blocks, step->shared, &launch,
                                   job->streams[stream], error);
}

/* Makes stream `to` wait for everything that is enqueued on `from` so far. */
static CUresult follow(dray__cuda_job *job, int to, int from, int event)
{
    const dray__cuda *cuda = job->gpu->cuda;
    CUresult result = cuda->cuEventRecord(job->events[event], job->streams[from]);
    return result ? result : cuda->cuStreamWaitEvent(job->streams[to], job->events[event], 0);
}

/* May this launch overlap the next one? Launches of boxes keep their order, because the maxima of
 * cells that are read twice must be known before the cells are quantised. */
static bool may_alternate(const dray__gpu_step *step)
{
    return step->kernel < DRAY__GPU_dray_most;
}

/* Is steps[at] of the phase, and of this kind? */
static bool is_step(const dray__gpu_program *p, uint64_t at, uint32_t phase, bool back)
{
    return at < p->step_count && p->steps[at].phase == phase && p->steps[at].back == back;
}

/* Starts the launches of a phase that move data, from steps[*at] on. */
static int start_steps(dray__cuda_job *job, uint32_t phase, uint64_t *at, dray_error *error)
{
    const dray__gpu_program *p = &job->program;
    uint64_t pieces = 0, turn = 0;
    int rc = DRAY_OK;
    for (uint64_t i = *at; is_step(p, i, phase, false); i++)
        pieces += may_alternate(&p->steps[i]);
    CUresult result = pieces > 1 ? follow(job, SECOND, KERNEL, PHASE) : CUDA_SUCCESS;
    for (; !rc && !result && is_step(p, *at, phase, false); ++*at) {
        const dray__gpu_step *step = &p->steps[*at];
        bool alternate = pieces > 1 && may_alternate(step);
        int stream = alternate && turn++ % 2 ? SECOND : KERNEL;
        rc = start_step(job, step, stream, alternate, error);
    }
    if (!rc && !result && pieces > 1)
        result = follow(job, KERNEL, SECOND, PHASE);
    return result ? dray__fail_cuda(error, result, "copies on %s", job->gpu->device->name) : rc;
}

/* Starts the copy engines' runs of a phase. Runs are read back while later ones are under way. */
static int start_engines(dray__cuda_job *job, uint32_t phase, uint64_t *step, uint64_t *run,
                         dray_error *error)
{
    const dray__gpu_program *p = &job->program;
    CUresult result = CUDA_SUCCESS;
    int rc = DRAY_OK;
    for (; !rc && !result && is_step(p, *step, phase, true); ++*step) {
        result = start_runs(job, phase, run, p->steps[*step].behind);
        if (!result)
            result = follow(job, CHECK, ENGINE, JOINED);
        if (!result)
            rc = start_step(job, &p->steps[*step], CHECK, false, error);
    }
    if (!rc && !result)
        result = start_runs(job, phase, run, p->run_count);
    if (!rc && !result)
        result = follow(job, CHECK, ENGINE, JOINED);
    return rc ? rc : dray__fail_cuda(error, result, "copies on %s", job->gpu->device->name);
}

static int start_phase(dray__cuda_job *job, uint32_t phase, uint64_t *step, uint64_t *run,
                       dray_error *error)
{
    const dray__gpu_program *p = &job->program;
    bool engines = *run < p->run_count && p->runs[*run].phase == phase;
    CUresult result = engines ? follow(job, ENGINE, KERNEL, PHASE) : CUDA_SUCCESS;
    int rc = result ? DRAY_OK : start_steps(job, phase, step, error);
    if (!rc && !result && engines)
        rc = start_engines(job, phase, step, run, error);
    if (!rc && !result && engines)
        result = follow(job, KERNEL, CHECK, JOINED);
    return rc ? rc : dray__fail_cuda(error, result, "copies on %s", job->gpu->device->name);
}

static void wake(void *user)
{
    const dray__cuda_job *job = user;
    uint64_t one = 1;
    ssize_t n = write(job->fd, &one, sizeof one);
    (void)n; /* when this fails, it is readable already */
}

static void wake_in_any_case(CUstream stream, CUresult result, void *user)
{
    (void)stream;
    (void)result; /* dray__cuda_job_poll queries it */
    wake(user);
}

/* Drivers do not call host functions after a kernel failed, but they call callbacks, which newer
 * drivers may not have. */
static CUresult wake_behind(dray__cuda_job *job, CUstream stream)
{
    const dray__cuda *cuda = job->gpu->cuda;
    return cuda->cuStreamAddCallback ? cuda->cuStreamAddCallback(stream, wake_in_any_case, job, 0)
                                     : cuda->cuLaunchHostFunc(stream, wake, job);
}

static void make_unreadable(const dray__cuda_job *job)
{
    uint64_t count;
    while (read(job->fd, &count, sizeof count) > 0)
        ;
}

/* Offset of the given maxima, behind the stop word. */
static uint64_t most_given_at(const dray__cuda_job *job)
{
    return job->stop_word_at + 256;
}

void dray__cuda_job_set_most(dray__cuda_job *job, const uint32_t *most)
{
    memcpy(job->back->host + most_given_at(job), most, job->program.given_most * sizeof *most);
}

static CUresult begin(dray__cuda_job *job, const CUevent *events, uint32_t event_count)
{
    const dray__cuda *cuda = job->gpu->cuda;
    CUstream stream = job->streams[KERNEL];
    uint64_t words = (job->stop_at + 256 - job->sums_at) / sizeof(uint32_t);
    CUresult result = CUDA_SUCCESS;
    for (uint32_t i = 0; !result && i < event_count; i++)
        result = cuda->cuStreamWaitEvent(stream, events[i], 0);
    if (!result) /* sums, maxima, cursors, the stop word */
        result = cuda->cuMemsetD32Async(job->memory->device + job->sums_at, 0, words, stream);
    if (!result && job->program.given_most)
        result = cuda->cuMemcpyHtoDAsync(job->memory->device + job->most_at,
                                         job->back->host + most_given_at(job),
                                         job->program.given_most * sizeof(uint32_t), stream);
    return result ? result : cuda->cuEventRecord(job->events[BEGUN], stream);
}

static CUresult end(dray__cuda_job *job)
{
    const dray__cuda *cuda = job->gpu->cuda;
    CUstream stream = job->streams[KERNEL];
    CUresult result = cuda->cuEventRecord(job->events[MOVED], stream);
    if (!result && job->program.run_count)
        result = cuda->cuEventRecord(job->events[SENT], job->streams[ENGINE]);
    uint64_t bytes = job->sum_count * sizeof(uint64_t);
    for (uint32_t i = 0; i < DRAY__GPU_SUMS; i++)
        if (!result && job->sums >> i & 1)
            result = cuda->cuMemcpyDtoHAsync(job->back->host + i * bytes,
                                             job->memory->device + job->sums_at + i * bytes, bytes,
                                             stream);
    if (!result)
        result = cuda->cuEventRecord(job->events[FINISHED], stream);
    return result ? result : wake_behind(job, stream);
}

/* Has the paced job launches that are not enqueued yet? */
static bool holds_back(const dray__cuda_job *job)
{
    return job->paced && job->released < job->program.step_count;
}

static int start_all(dray__cuda_job *job, const CUevent *events, uint32_t event_count,
                     dray_error *error)
{
    uint64_t step = 0, run = 0;
    int rc = DRAY_OK;
    job->launches = 0;
    CUresult result = begin(job, events, event_count);
    job->released = 0;
    for (uint32_t phase = 0; !result && !rc && !job->paced && phase < job->program.phases; phase++)
        rc = start_phase(job, phase, &step, &run, error);
    if (!result && !rc && !holds_back(job))
        result = end(job);
    return result ? dray__fail_cuda(error, result, "starting on %s", job->gpu->device->name) : rc;
}

int dray__cuda_job_start(dray__cuda_job *job, const CUevent *events, uint32_t event_count,
                         dray_error *error)
{
    if (job->running)
        return dray__fail(error, DRAY_EBUSY, "the job on %s is under way", job->gpu->device->name);
    int rc = dray__cuda_enter(job->gpu->device, error);
    if (rc)
        return rc;
    atomic_store(&job->stopped, false);
    rc = start_all(job, events, event_count, error);
    if (rc) /* everything enqueued must end before the job may be changed */
        for (int i = 0; i < STREAMS; i++)
            job->gpu->cuda->cuStreamSynchronize(job->streams[i]);
    dray__cuda_leave();
    job->running = rc == DRAY_OK;
    return rc;
}

uint64_t dray__cuda_job_launch_count(const dray__cuda_job *job)
{
    return job->program.step_count;
}

/* All launches go to one stream, which keeps the order of phases. */
int dray__cuda_job_release(dray__cuda_job *job, uint64_t count, dray_error *error)
{
    const dray__gpu_program *p = &job->program;
    if (!job->running || !holds_back(job))
        return DRAY_OK;
    int rc = dray__cuda_enter(job->gpu->device, error);
    if (rc)
        return rc;
    for (; !rc && count && holds_back(job); count--)
        rc = start_step(job, &p->steps[job->released++], KERNEL, false, error);
    if (!rc && !holds_back(job))
        rc = dray__fail_cuda(error, end(job), "copies on %s", job->gpu->device->name);
    dray__cuda_leave();
    return rc;
}

/* The context is current. */
static int look(dray__cuda_job *job, dray_error *error)
{
    const dray__cuda *cuda = job->gpu->cuda;
    bool stopped = atomic_load(&job->stopped);
    float ms = 0;
    /* Before the query: the callback that makes it readable runs after the event. */
    if (!stopped)
        make_unreadable(job);
    if (holds_back(job))
        return DRAY_EAGAIN;
    CUresult result = cuda->cuEventQuery(job->events[FINISHED]);
    /* The stop word must not arrive after the next run has begun. */
    if (result == CUDA_SUCCESS && stopped)
        result = cuda->cuStreamQuery(job->control);
    if (result == CUDA_ERROR_NOT_READY)
        return DRAY_EAGAIN;
    job->running = false;
    make_unreadable(job);
    if (result)
        return dray__fail_cuda(error, result, "moving on %s", job->gpu->device->name);
    if (cuda->cuEventElapsedTime(&ms, job->events[BEGUN], job->events[MOVED]) == CUDA_SUCCESS)
        job->device_ns = (int64_t)((double)ms * 1e6);
    if (atomic_load(&job->stopped))
        return dray__fail(error, DRAY_ECANCELED, "the copies on %s were stopped",
                          job->gpu->device->name);
    return DRAY_OK;
}

int dray__cuda_job_poll(dray__cuda_job *job, dray_error *error)
{
    if (!job->running)
        return dray__fail(error, DRAY_EINVALID, "the job on %s was not started",
                          job->gpu->device->name);
    int rc = dray__cuda_enter(job->gpu->device, error);
    if (rc)
        return rc;
    rc = look(job, error);
    dray__cuda_leave();
    return rc;
}

int dray__cuda_job_wait(dray__cuda_job *job, int64_t deadline_ns, dray_error *error)
{
    struct pollfd p = {.fd = job->fd, .events = POLLIN};
    int rc;
    while ((rc = dray__cuda_job_poll(job, error)) == DRAY_EAGAIN && dray__now() < deadline_ns) {
        int left = dray__left_ms(deadline_ns);
        poll(&p, 1, left < LOOK_MS ? left + 1 : LOOK_MS);
    }
    return rc;
}

bool dray__cuda_job_is_running(const dray__cuda_job *job)
{
    return job->running;
}

CUevent dray__cuda_job_moved(const dray__cuda_job *job)
{
    return job->events[job->program.run_count ? SENT : MOVED];
}

int dray__cuda_job_fd(const dray__cuda_job *job)
{
    return job->fd;
}

void dray__cuda_job_abort(dray__cuda_job *job)
{
    if (!job->running || atomic_exchange(&job->stopped, true) ||
        dray__cuda_enter(job->gpu->device, NULL))
        return;
    const dray__cuda *cuda = job->gpu->cuda;
    /* The run begins by clearing the stop word, so this write waits for that. */
    if (cuda->cuStreamWaitEvent(job->control, job->events[BEGUN], 0) == CUDA_SUCCESS)
        cuda->cuMemcpyHtoDAsync(job->memory->device + job->stop_at,
                                job->back->host + job->stop_word_at, sizeof(uint32_t),
                                job->control);
    if (holds_back(job)) { /* launches that are not enqueued are left out */
        job->released = job->program.step_count;
        end(job);
    }
    dray__cuda_leave();
}

/* ---- results ----------------------------------------------------------------------------------
 */

const uint64_t *dray__cuda_job_sums(const dray__cuda_job *job, uint32_t which)
{
    for (uint32_t i = 0; i < DRAY__GPU_SUMS; i++)
        if (which == 1u << i && (job->sums & which))
            return (const uint64_t *)(const void *)job->back->host + i * job->sum_count;
    return NULL;
}

void dray__cuda_job_times_of(const dray__cuda_job *job, dray__cuda_job_times *out)
{
    *out = (dray__cuda_job_times){.device_ns = job->device_ns,
                                  .kernel_bytes = job->program.kernel_bytes,
                                  .engine_bytes = job->program.engine_bytes,
                                  .launches = job->launches};
}

static void end_streams(dray__cuda_job *job)
{
    const dray__cuda *cuda = job->gpu->cuda;
    for (int i = 0; i < STREAMS; i++)
        if (job->streams[i]) {
            cuda->cuStreamSynchronize(job->streams[i]);
            cuda->cuStreamDestroy(job->streams[i]);
        }
    if (job->control) {
        cuda->cuStreamSynchronize(job->control);
        cuda->cuStreamDestroy(job->control);
    }
    for (int i = 0; i < EVENTS; i++)
        if (job->events[i])
            cuda->cuEventDestroy(job->events[i]);
}

void dray__cuda_job_close(dray__cuda_job *job)
{
    if (!job)
        return;
    if (job->running)
        dray__cuda_job_abort(job);
    if (job->gpu && job->gpu->cuda && dray__cuda_enter(job->gpu->device, NULL) == DRAY_OK) {
        end_streams(job);
        give_memory(job);
        dray__cuda_leave();
    }
    dray__gpu_program_free(&job->program);
    if (job->fd >= 0)
        close(job->fd);
    free(job);
}
