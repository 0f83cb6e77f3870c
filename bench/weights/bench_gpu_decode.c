/* Steps beside updates (bench_gpu_decode.h). */
#include "bench/weights/bench_gpu_decode.h"

#include "base/error.h"
#include "bench/rows.h"
#include "bench/weights/bench_gpu.h"
#include "memory/cuda_library.h"
#include "memory/region.h"

#include <pthread.h>
#include <stdatomic.h>
#include <stdlib.h>

enum { BLOCKS = 1056, THREADS = 256, LAUNCHES_MAX = 4096, CALIBRATE = 16, STEPS = 1 << 15 };
#define LAUNCH_BYTES ((uint64_t)128 << 20) /* about as much as a layer's weights */
#define BUFFER_BYTES (16 * LAUNCH_BYTES)   /* larger than the caches */
/* The size of the buffer when no kernel can be compiled, so that steps copy instead. */
#define SMALL_BYTES ((uint64_t)4 << 20)

struct bench_decode {
    dray_subscriber *subscriber;
    const dray__cuda *cuda;
    dray__cuda_device *device;
    CUfunction read; /* NULL when steps copy instead */
    CUdeviceptr buffer, sink;
    uint64_t bytes; /* of the buffer */
    CUstream stream;
    uint32_t launches; /* of a step */
    pthread_t thread;
    bool has_thread;
    atomic_bool ends;
    pthread_mutex_t lock; /* protects the ring of the last steps, which follows */
    uint64_t count;
    double ended[STEPS], took[STEPS];
};

static CUresult launch(const bench_decode *d, uint32_t number)
{
    uint64_t piece = d->bytes / 16, words = piece / 16;
    CUdeviceptr at = d->buffer + number % 16 * piece;
    void *parameters[] = {&at, &words, (void *)(uintptr_t)&d->sink};
    if (d->read)
        return d->cuda->cuLaunchKernel(d->read, BLOCKS, 1, 1, THREADS, 1, 1, 0, d->stream,
                                       parameters, NULL);
    return d->cuda->cuMemcpyDtoDAsync(d->sink, at, 256, d->stream);
}

/* Runs a step. Returns its seconds; negative when the GPU fails. */
static double step(const bench_decode *d, uint32_t launches)
{
    double begin = bench_now();
    CUresult result = CUDA_SUCCESS;
    for (uint32_t i = 0; i < launches && !result; i++)
        result = launch(d, i);
    if (!result)
        result = d->cuda->cuStreamSynchronize(d->stream);
    return result ? -1 : bench_now() - begin;
}

static void *run(void *user)
{
    bench_decode *d = user;
    if (dray__cuda_enter(d->device, NULL))
        return NULL;
    while (!atomic_load(&d->ends)) {
        double seconds = step(d, d->launches);
        if (seconds < 0)
            break;
        pthread_mutex_lock(&d->lock);
        d->took[d->count % STEPS] = seconds;
        d->ended[d->count++ % STEPS] = bench_now();
        pthread_mutex_unlock(&d->lock);
        dray_subscriber_note_step(d->subscriber, (int64_t)(seconds * 1e9) + 1, NULL);
    }
    dray__cuda_leave();
    return NULL;
}

void bench_decode_between(bench_decode *d, double begin, double end, bench_decoded *out)
{
    static double found[STEPS];
    size_t count = 0;
    double all = 0;
    pthread_mutex_lock(&d->lock);
    for (uint64_t i = 0; i < STEPS && i < d->count; i++)
        if (d->ended[i] - d->took[i] / 2 > begin && d->ended[i] - d->took[i] / 2 < end) {
            all += d->took[i];
            found[count++] = d->took[i];
        }
    pthread_mutex_unlock(&d->lock);
    *out = (bench_decoded){.steps = count,
                           .mean = count ? all / (double)count : 0,
                           .p99 = count ? bench_percentile(found, count, 0.99) : 0};
}

/* Chooses the number of launches of a step that takes about `seconds`. */
static int calibrate(bench_decode *d, double seconds, dray_error *error)
{
    double took = step(d, CALIBRATE);
    if (took >= 0)
        took = step(d, CALIBRATE);
    if (took < 0)
        return dray__fail(error, DRAY_EINTERNAL, "kernels on %s", d->device->name);
    double wanted = seconds / (took / CALIBRATE);
    d->launches = wanted < 1 ? 1 : wanted > LAUNCHES_MAX ? LAUNCHES_MAX : (uint32_t)wanted;
    return DRAY_OK;
}

static int prepare(bench_decode *d, double seconds, dray_error *error)
{
    d->read = bench_gpu_kernel(d->device->arch, "bench_read");
    d->bytes = d->read ? BUFFER_BYTES : SMALL_BYTES;
    CUresult result = d->cuda->cuMemAlloc(&d->buffer, d->bytes);
    if (!result)
        result = d->cuda->cuMemAlloc(&d->sink, 256);
    if (!result)
        result = d->cuda->cuStreamCreate(&d->stream, CU_STREAM_NON_BLOCKING);
    if (!result)
        result = d->cuda->cuMemsetD8Async(d->buffer, 0x5A, d->bytes, d->stream);
    if (result)
        return dray__fail_cuda(error, result, "memory to decode from on %s", d->device->name);
    return calibrate(d, seconds, error);
}

int bench_decode_start(dray_subscriber *subscriber, const dray_region *beside, double seconds,
                       bench_decode **out, dray_error *error)
{
    bench_decode *d = calloc(1, sizeof *d);
    if (!d)
        return dray__nomem(error);
    pthread_mutex_init(&d->lock, NULL);
    d->subscriber = subscriber;
    d->device = beside->device;
    d->cuda = dray__cuda_get(error);
    int rc = d->cuda ? dray__cuda_enter(d->device, error) : DRAY_EUNSUPPORTED;
    if (rc) {
        free(d);
        return rc;
    }
    rc = prepare(d, seconds, error);
    dray__cuda_leave();
    if (rc == DRAY_OK && pthread_create(&d->thread, NULL, run, d))
        rc = dray__fail(error, DRAY_ENOMEM, "a thread");
    d->has_thread = rc == DRAY_OK;
    if (rc)
        bench_decode_stop(d);
    else
        *out = d;
    return rc;
}

void bench_decode_stop(bench_decode *d)
{
    if (!d)
        return;
    atomic_store(&d->ends, true);
    if (d->has_thread)
        pthread_join(d->thread, NULL);
    if (dray__cuda_enter(d->device, NULL) == DRAY_OK) {
        if (d->stream)
            d->cuda->cuStreamDestroy(d->stream);
        if (d->buffer)
            d->cuda->cuMemFree(d->buffer);
        if (d->sink)
            d->cuda->cuMemFree(d->sink);
        dray__cuda_leave();
    }
    free(d);
}
