/* The fence of a publish, which must be complete before the version may be read (mark.h). */
#include "base/clock.h"
#include "base/error.h"
#include "memory/region.h"
#include "weights/publish/publisher.h"

#include <unistd.h>

static bool is_cuda(const dray_publisher *p, uint32_t index)
{
    const dray_region *region = dray__publisher_region(p, index);
    return region && dray_region_get_kind(region) == DRAY_REGION_CUDA;
}

/* Returns true when an event can hold back every reader of the memory: all are on this host, and
 * this process reads it only by its GPUs. */
static bool can_be_marked(const dray_publisher *p, const char *endpoint)
{
    bool all = !p->origin && !p->delta && !p->arena && !endpoint &&
               dray__channel_passes_fds(p->channel) && dray_layout_region_count(p->layout);
    for (uint32_t i = 0; i < dray_layout_region_count(p->layout); i++)
        all = all && is_cuda(p, i);
    return all;
}

static dray__cuda_device *device_of(const dray_publisher *p)
{
    dray__cuda_device *device = NULL;
    for (uint32_t i = 0; i < dray_layout_region_count(p->layout) && !device; i++) {
        const dray_region *region = dray__publisher_region(p, i);
        device = region ? region->device : NULL;
    }
    return device;
}

/* Makes the mark when it is first needed. */
static int have_mark(dray_publisher *p, dray_error *error)
{
    dray__cuda_device *device = device_of(p);
    if (p->mark)
        return DRAY_OK;
    if (!device)
        return dray__fail(error, DRAY_EINVALID,
                          "a fence of a stream, of weights that lie on no GPU: say an event");
    return dray__mark_new(device, &p->mark, error);
}

int dray__publisher_marked(dray_publisher *p, const char *endpoint, dray_error *error)
{
    p->marked = can_be_marked(p, endpoint);
    int rc = p->marked ? have_mark(p, error) : DRAY_OK;
    if (rc == DRAY_OK && p->marked && p->local)
        dray__local_set_mark(p->token, p->mark->event);
    return rc;
}

const uint8_t *dray__publisher_event_of(dray_publisher *p)
{
    for (uint32_t i = 0; i < dray_layout_region_count(p->layout); i++)
        p->marked = p->marked && is_cuda(p, i);
    return p->marked ? p->mark->handle : NULL;
}

static int wait_here(CUevent event, int64_t deadline_ns, dray_error *error)
{
    const dray__cuda *cuda = dray__cuda_get(error);
    if (!cuda)
        return DRAY_EUNSUPPORTED;
    CUresult result = cuda->cuEventQuery(event);
    for (; result == CUDA_ERROR_NOT_READY && dray__now() < deadline_ns; usleep(50))
        result = cuda->cuEventQuery(event);
    if (result == CUDA_ERROR_NOT_READY)
        return dray__fail(error, DRAY_ETIMEDOUT, "the fence of the published version has not come");
    return dray__fail_cuda(error, result, "the fence of the published version");
}

/* Readers, and the GPUs that compute sums, wait for the mark, so that this call need not wait.
 * Without a mark it waits for the event. */
int dray__publisher_fence(dray_publisher *p, const dray_fence *fence, int64_t deadline_ns,
                          dray_error *error)
{
    bool stream = fence->kind == DRAY_FENCE_CUDA_STREAM;
    CUevent event = fence->event;
    p->fence = NULL;
    if (fence->kind == DRAY_FENCE_NONE)
        return DRAY_OK;
    if (!stream && (fence->kind != DRAY_FENCE_CUDA_EVENT || !event))
        return dray__fail(error, DRAY_EINVALID, "fence kind %d, event %p", fence->kind,
                          fence->event);
    int rc = stream ? have_mark(p, error) : DRAY_OK;
    if (rc == DRAY_OK && stream)
        rc = dray__mark_after_stream(p->mark, fence->event, error);
    if (rc == DRAY_OK && p->marked && !stream)
        rc = dray__mark_after_event(p->mark, event, error);
    if (rc)
        return rc;
    if (!p->marked)
        return wait_here(stream ? dray__mark_event(p->mark) : event, deadline_ns, error);
    p->fence = dray__mark_event(p->mark);
    return DRAY_OK;
}

/* ---- after readers --------------------------------------------------------------------------- */

static int drain(void *publisher, uint64_t version, int64_t timeout_ns, dray_error *error)
{
    return dray__publisher_drain(publisher, version, timeout_ns, NULL, error);
}

int dray_publisher_wait_stream(dray_publisher *p, uint64_t version, void *stream,
                               int64_t timeout_ns, dray_error *error)
{
    int rc = dray__publisher_check(p, version, timeout_ns, error);
    if (rc)
        return rc;
    dray__cuda_device *device = device_of(p);
    if (p->origin)
        return DRAY_OK; /* readers use the snapshot */
    if (!device)
        return dray__fail(error, DRAY_EUNSUPPORTED, "weights that lie on no GPU: wait here");
    p->gate.wait = drain;
    p->gate.user = p;
    p->gate.version = version;
    p->gate.timeout_ns = timeout_ns;
    return dray__gate_close(&p->gate, device, stream, error);
}
