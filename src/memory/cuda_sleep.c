/* Release and resume of arenas: chunk by chunk, so that memory is given back while the rest is
 * still being copied, on a stream of the arena's own. */
#include "memory/cuda_arena.h"

#include "base/clock.h"
#include "base/error.h"
#include "base/options.h"

#include <stdlib.h>
#include <time.h>

#define DEFAULT_TIMEOUT (60 * DRAY__SECOND)

typedef struct sleep_call {
    const dray__cuda *cuda;
    const dray_arena_release_options *release;
    const dray_arena_resume_options *resume;
    int64_t deadline;
    dray_arena_report report;
} sleep_call;

/* ---- waiting and copying --------------------------------------------------------------------- */

/* Polls the event, because the driver's own waits have no deadline. */
static int wait_event(sleep_call *c, CUevent event, const char *what, dray_error *error)
{
    for (int64_t pause = 20000;; pause = pause < 500000 ? 2 * pause : pause) {
        CUresult result = c->cuda->cuEventQuery(event);
        if (result == CUDA_SUCCESS)
            return DRAY_OK;
        if (result != CUDA_ERROR_NOT_READY)
            return dray__fail_cuda(error, result, "%s", what);
        if (dray__now() > c->deadline)
            return dray__fail(error, DRAY_ETIMEDOUT, "%s was not complete at the deadline", what);
        nanosleep(&(struct timespec){.tv_nsec = pause}, NULL);
    }
}

typedef CUresult sleep_copy_fn(const dray__cuda *cuda, CUdeviceptr device, uint8_t *host,
                               uint64_t bytes, CUstream stream);

static CUresult to_host(const dray__cuda *cuda, CUdeviceptr device, uint8_t *host, uint64_t bytes,
                        CUstream stream)
{
    return cuda->cuMemcpyDtoHAsync(host, device, bytes, stream);
}

static CUresult to_device(const dray__cuda *cuda, CUdeviceptr device, uint8_t *host, uint64_t bytes,
                          CUstream stream)
{
    return cuda->cuMemcpyHtoDAsync(device, host, bytes, stream);
}

/* Copies `bytes` of device memory from or to the pieces, from offset `at` of these on. */
static CUresult copy_run(const sleep_call *c, const dray_arena *a, sleep_copy_fn *copy,
                         CUdeviceptr device, uint64_t at, uint64_t bytes)
{
    CUresult result = CUDA_SUCCESS;
    uint64_t begin = 0;
    for (uint32_t i = 0; i < a->pinned.count && bytes && !result; i++) {
        const struct dray__pinned_piece *piece = &a->pinned.pieces[i];
        if (at < begin + piece->bytes) {
            uint64_t n = begin + piece->bytes - at;
            n = n < bytes ? n : bytes;
            result = copy(c->cuda, device, piece->base + (at - begin), n, a->stream);
            device += n;
            at += n;
            bytes -= n;
        }
        begin += piece->bytes;
    }
    return result;
}

/* Copies all that is kept of a part. Adjacent extents are copied at once. */
static int copy_part(sleep_call *c, const dray_arena *a, const dray__arena_part *part,
                     sleep_copy_fn *copy, dray_error *error)
{
    uint64_t at = part->kept_from;
    for (uint32_t i = 0; i < part->kept.count;) {
        uint64_t from = part->kept.list[i].offset, to = from;
        for (; i < part->kept.count && part->kept.list[i].offset == to; i++)
            to += part->kept.list[i].bytes;
        CUresult result = copy_run(c, a, copy, part->chunk.address + from, at, to - from);
        if (result)
            return dray__fail_cuda(error, result, "arena %s: copying %llu bytes of content", a->tag,
                                   (unsigned long long)(to - from));
        at += to - from;
        c->report.copied_bytes += to - from;
    }
    return DRAY_OK;
}

static int need_stream(const sleep_call *c, dray_arena *a, dray_error *error)
{
    CUresult result =
        a->stream ? CUDA_SUCCESS : c->cuda->cuStreamCreate(&a->stream, CU_STREAM_NON_BLOCKING);
    return dray__fail_cuda(error, result, "arena %s: a stream", a->tag);
}

static int new_event(const sleep_call *c, const dray_arena *a, CUevent *out, dray_error *error)
{
    CUresult result = c->cuda->cuEventCreate(out, CU_EVENT_DISABLE_TIMING);
    return dray__fail_cuda(error, result, "arena %s: an event", a->tag);
}

/* Records the event on the stream; wait_event waits for it. */
static int record(const sleep_call *c, const dray_arena *a, CUevent event, dray_error *error)
{
    CUresult result = c->cuda->cuEventRecord(event, a->stream);
    return dray__fail_cuda(error, result, "arena %s: an event", a->tag);
}

/* ---- release --------------------------------------------------------------------------------- */

/* Assigns each part its place in the pieces, after those that an unfinished earlier release has
 * kept. */
static int plan_content(dray_arena *a, bool drop, dray_error *error)
{
    uint64_t bytes = 0;
    for (uint32_t i = 0; i < a->count; i++) {
        const dray__arena_part *part = a->parts[i];
        uint64_t end = part->kept_from + dray__extents_bytes(&part->kept);
        bytes = part->released && end > bytes ? end : bytes;
    }
    for (uint32_t i = 0; i < a->count; i++) {
        dray__arena_part *part = a->parts[i];
        if (part->released)
            continue;
        if (drop)
            dray__extents_free(&part->kept);
        else if (!dray__extents_copy(&part->kept, &part->used))
            return dray__nomem(error);
        part->kept_from = bytes;
        bytes += dray__extents_bytes(&part->kept);
    }
    return DRAY_OK;
}

static void drop_part(sleep_call *c, dray__arena_part *part)
{
    part->reach = part->chunk.reach;
    dray__chunk_drop(&part->chunk);
    part->released = true;
    c->report.chunks++;
    c->report.bytes += part->chunk.bytes;
}

/* Releases the parts. The next part is copied while the memory of the last one is given back. */
static int release_parts(sleep_call *c, dray_arena *a, dray_error *error)
{
    CUevent events[2] = {NULL, NULL};
    int rc = new_event(c, a, &events[0], error);
    if (rc == DRAY_OK)
        rc = new_event(c, a, &events[1], error);
    dray__arena_part *before = NULL;
    int64_t began = dray__now();
    for (uint32_t i = 0; i <= a->count && rc == DRAY_OK; i++) {
        dray__arena_part *part = i < a->count ? a->parts[i] : NULL;
        if (part && part->released)
            part = NULL;
        if (part) {
            uint64_t end = part->kept_from + dray__extents_bytes(&part->kept);
            int64_t pinning = dray__now();
            rc = dray__pinned_pieces_grow(&a->pinned, end, error);
            c->report.pin_ns += dray__now() - pinning;
            if (rc == DRAY_OK)
                rc = copy_part(c, a, part, to_host, error);
            if (rc == DRAY_OK)
                rc = record(c, a, events[i & 1], error);
        }
        if (rc == DRAY_OK && before) {
            rc = wait_event(c, events[(i - 1) & 1], "copying an arena's content out", error);
            if (rc == DRAY_OK)
                drop_part(c, before);
        }
        before = part;
    }
    if (rc) /* the memory may be freed next, and must not be read then */
        c->cuda->cuStreamSynchronize(a->stream);
    c->report.copy_ns += dray__now() - began;
    for (int i = 0; i < 2; i++)
        if (events[i])
            c->cuda->cuEventDestroy(events[i]);
    return rc;
}

static bool all_released(const dray_arena *a)
{
    uint32_t i = 0;
    while (i < a->count && a->parts[i]->released)
        i++;
    return a->released && i == a->count;
}

static int release_arena(sleep_call *c, dray_arena *a, dray_error *error)
{
    if (a->closed || all_released(a))
        return DRAY_OK;
    int rc = dray__cuda_enter(a->device, error);
    if (rc)
        return rc;
    rc = need_stream(c, a, error);
    if (rc == DRAY_OK)
        rc = plan_content(a, c->release->drop != 0, error);
    if (rc == DRAY_OK) {
        rc = release_parts(c, a, error);
        for (uint32_t i = 0; i < a->count; i++)
            a->released |= a->parts[i]->released;
        /* Releasing an empty arena succeeds. Later allocations fail until it is resumed. */
        a->released |= rc == DRAY_OK;
        c->report.arenas += a->released;
    }
    dray__cuda_leave();
    return rc;
}

static int check_exports(const dray_arena *a, dray_error *error)
{
    uint32_t exports = 0;
    for (uint32_t i = 0; i < a->count; i++)
        exports += a->parts[i]->chunk.exports;
    return exports ? dray__fail(error, DRAY_EBUSY,
                                "arena %s: %u regions over it were exported: take them back first "
                                "(dray_publisher_release, or dray_region_unexport)",
                                a->tag, exports)
                   : DRAY_OK;
}

/* ---- resume ---------------------------------------------------------------------------------- */

static int resume_parts(sleep_call *c, dray_arena *a, CUevent done, dray_error *error)
{
    int rc = DRAY_OK;
    int64_t began = dray__now();
    for (uint32_t i = 0; i < a->count && rc == DRAY_OK; i++) {
        dray__arena_part *part = a->parts[i];
        if (!part->released || !part->used.count)
            continue;
        rc = dray__arena_back(a, part, error);
        if (rc == DRAY_OK)
            rc = copy_part(c, a, part, to_device, error);
    }
    if (rc == DRAY_OK)
        rc = record(c, a, done, error);
    if (rc == DRAY_OK)
        rc = wait_event(c, done, "copying an arena's content back", error);
    c->report.copy_ns += dray__now() - began;
    return rc;
}

/* Ends a resume of an arena as a whole. After a failure the content is still in host memory. */
static void settle(sleep_call *c, dray_arena *a, bool resumed)
{
    if (!resumed)
        c->cuda->cuStreamSynchronize(a->stream);
    for (uint32_t i = a->count; i-- > 0;) {
        dray__arena_part *part = a->parts[i];
        if (!part->released)
            continue;
        if (!resumed) {
            dray__chunk_drop(&part->chunk);
        } else if (!part->used.count) { /* freed meanwhile */
            dray__arena_remove(a, i);
        } else {
            part->released = false;
            if (!part->kept.count)
                part->content = ++a->contents;
            dray__extents_free(&part->kept);
            c->report.chunks++;
            c->report.bytes += part->chunk.bytes;
        }
    }
    if (!resumed)
        return;
    a->released = false;
    c->report.arenas++;
    if (c->resume->free_pinned)
        dray__pinned_pieces_free(&a->pinned);
}

static int resume_arena(sleep_call *c, dray_arena *a, dray_error *error)
{
    CUevent done = NULL;
    if (!a->released || a->closed)
        return DRAY_OK;
    int rc = dray__cuda_enter(a->device, error);
    if (rc)
        return rc;
    rc = need_stream(c, a, error);
    if (rc == DRAY_OK)
        rc = new_event(c, a, &done, error);
    if (rc == DRAY_OK) {
        uint64_t copied = c->report.copied_bytes;
        rc = resume_parts(c, a, done, error);
        if (rc)
            c->report.copied_bytes = copied;
        settle(c, a, rc == DRAY_OK);
    }
    if (done)
        c->cuda->cuEventDestroy(done);
    dray__cuda_leave();
    return rc;
}

/* ---- calls ----------------------------------------------------------------------------------- */

typedef int arena_fn(sleep_call *c, dray_arena *a, dray_error *error);

static int check_report(const dray_arena_report *report, dray_error *error)
{
    return report ? DRAY__OPTIONS_CHECK(dray_arena_report, total_ns, report, error) : DRAY_OK;
}

/* Begins each call. rc is the result of reading the options. */
static int begin_call(sleep_call *c, int rc, int64_t timeout_ns, const dray_arena_report *report,
                      dray_error *error)
{
    if (rc == DRAY_OK)
        rc = check_report(report, error);
    if (rc)
        return rc;
    c->cuda = dray__cuda_get(error);
    c->report = (dray_arena_report)DRAY_ARENA_REPORT_INIT;
    c->deadline = dray__deadline(timeout_ns > 0 ? timeout_ns : DEFAULT_TIMEOUT);
    return c->cuda ? DRAY_OK : DRAY_EUNSUPPORTED;
}

/* Locks all arenas of the tag, in the order of their addresses, and calls `work` for each if
 * `check` succeeds for all. */
static int for_arenas(sleep_call *c, const char *tag,
                      int (*check)(const dray_arena *, dray_error *), arena_fn *work,
                      dray_arena_report *report, dray_error *error)
{
    dray_arena **arenas;
    uint32_t count;
    int64_t began = dray__now();
    int rc = dray__gpu_arenas(tag, &arenas, &count, error);
    if (rc)
        return rc;
    for (uint32_t i = 1; i < count; i++)
        for (uint32_t j = i; j && arenas[j]->base < arenas[j - 1]->base; j--) {
            dray_arena *other = arenas[j];
            arenas[j] = arenas[j - 1];
            arenas[j - 1] = other;
        }
    for (uint32_t i = 0; i < count; i++)
        pthread_mutex_lock(&arenas[i]->lock);
    for (uint32_t i = 0; i < count && check && rc == DRAY_OK; i++)
        rc = check(arenas[i], error);
    for (uint32_t i = 0; i < count && rc == DRAY_OK; i++)
        rc = work(c, arenas[i], error);
    for (uint32_t i = 0; i < count; i++)
        pthread_mutex_unlock(&arenas[i]->lock);
    for (uint32_t i = 0; i < count; i++)
        dray__gpu_arena_put(arenas[i]);
    free(arenas);
    c->report.total_ns = dray__now() - began;
    if (report)
        dray__options_fill(report, &c->report, sizeof c->report);
    return rc;
}

int dray_arena_release(const char *tag, const dray_arena_release_options *given,
                       dray_arena_report *report, dray_error *error)
{
    dray_arena_release_options options = DRAY_ARENA_RELEASE_OPTIONS_INIT;
    int rc = DRAY__OPTIONS_READ(dray_arena_release_options, timeout_ns, &options, given, error);
    sleep_call c = {.release = &options};
    rc = begin_call(&c, rc, options.timeout_ns, report, error);
    const dray_fence *after = options.after;
    if (rc == DRAY_OK && after && after->kind == DRAY_FENCE_CUDA_EVENT)
        rc = wait_event(&c, after->event, "the fence before the release", error);
    else if (rc == DRAY_OK && after && after->kind != DRAY_FENCE_NONE)
        rc = dray__fail(error, DRAY_EINVALID, "fence kind %d: a release comes after an event",
                        after->kind);
    return rc ? rc
              : for_arenas(&c, tag, options.force ? NULL : check_exports, release_arena, report,
                           error);
}

int dray_arena_resume(const char *tag, const dray_arena_resume_options *given,
                      dray_arena_report *report, dray_error *error)
{
    dray_arena_resume_options options = DRAY_ARENA_RESUME_OPTIONS_INIT;
    int rc = DRAY__OPTIONS_READ(dray_arena_resume_options, timeout_ns, &options, given, error);
    sleep_call c = {.resume = &options};
    rc = begin_call(&c, rc, options.timeout_ns, report, error);
    return rc ? rc : for_arenas(&c, tag, NULL, resume_arena, report, error);
}

static int prepare_arena(sleep_call *c, dray_arena *a, dray_error *error)
{
    if (a->released || a->closed)
        return DRAY_OK;
    uint64_t before = a->pinned.bytes;
    int rc = dray__cuda_enter(a->device, error);
    if (rc)
        return rc;
    int64_t began = dray__now();
    rc = dray__pinned_pieces_grow(&a->pinned, a->used_bytes, error);
    c->report.pin_ns += dray__now() - began;
    c->report.arenas++;
    c->report.bytes += a->pinned.bytes - before;
    dray__cuda_leave();
    return rc;
}

int dray_arena_prepare(const char *tag, dray_arena_report *report, dray_error *error)
{
    sleep_call c = {0};
    int rc = begin_call(&c, DRAY_OK, 0, report, error);
    return rc ? rc : for_arenas(&c, tag, NULL, prepare_arena, report, error);
}
