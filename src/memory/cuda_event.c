/* Events that other processes can open (cuda_event.h). */
#include "memory/cuda_event.h"

#include "base/clock.h"
#include "base/error.h"
#include "memory/cuda_memory.h"

#include <stdlib.h>
#include <string.h>
#include <time.h>

struct dray__event {
    dray__cuda_device *device;
    CUevent event;
    bool recorded; /* by this process, or by the one that exported it */
};

static int on_device(const uint8_t *uuid, dray__event **out, dray_error *error)
{
    dray__cuda_device *device;
    int rc = uuid ? dray__cuda_device_find(uuid, &device, error)
                  : dray__cuda_device_here(NULL, &device, error);
    if (rc)
        return rc;
    dray__event *e = calloc(1, sizeof *e);
    if (!e)
        return dray__nomem(error);
    e->device = device;
    rc = dray__cuda_enter(device, error);
    if (rc)
        free(e);
    else
        *out = e;
    return rc;
}

static int finish(dray__event *e, CUresult result, const char *what, dray__event **out,
                  dray_error *error)
{
    dray__cuda_leave();
    if (result) {
        int rc = dray__fail_cuda(error, result, "%s on %s", what, e->device->name);
        free(e);
        return rc;
    }
    *out = e;
    return DRAY_OK;
}

int dray__event_new(const uint8_t uuid[16], dray__event **out, dray_error *error)
{
    dray__event *e = NULL;
    int rc = on_device(uuid, &e, error);
    if (rc)
        return rc;
    CUresult result = dray__cuda_get(NULL)->cuEventCreate(&e->event, CU_EVENT_INTERPROCESS |
                                                                         CU_EVENT_DISABLE_TIMING);
    return finish(e, result, "an event", out, error);
}

int dray__event_import(const uint8_t uuid[16], const uint8_t handle[64], dray__event **out,
                       dray_error *error)
{
    dray__event *e = NULL;
    CUipcEventHandle ipc;
    int rc = on_device(uuid, &e, error);
    if (rc)
        return rc;
    memcpy(ipc.reserved, handle, sizeof ipc.reserved);
    CUresult result = dray__cuda_get(NULL)->cuIpcOpenEventHandle(&e->event, ipc);
    e->recorded = true;
    return finish(e, result, "opening another process's event", out, error);
}

void dray__event_free(dray__event *event)
{
    const dray__cuda *cuda = dray__cuda_get(NULL);
    if (event && cuda && dray__cuda_enter(event->device, NULL) == DRAY_OK) {
        cuda->cuEventDestroy(event->event);
        dray__cuda_leave();
    }
    free(event);
}

static int check_recorded(const dray__event *event, dray_error *error)
{
    return event->recorded ? DRAY_OK
                           : dray__fail(error, DRAY_EINVALID,
                                        "an event that was never recorded holds nobody back: "
                                        "record it first, and then tell others of it");
}

/* The result of a driver's call inside the event's context. */
typedef CUresult event_fn(const dray__cuda *cuda, dray__event *event, void *argument);

static int inside(dray__event *event, event_fn *function, void *argument, const char *what,
                  dray_error *error)
{
    const dray__cuda *cuda = dray__cuda_get(error);
    int rc = cuda ? dray__cuda_enter(event->device, error) : DRAY_EUNSUPPORTED;
    if (rc)
        return rc;
    CUresult result = function(cuda, event, argument);
    dray__cuda_leave();
    return dray__fail_cuda(error, result, "%s", what);
}

static CUresult record(const dray__cuda *cuda, dray__event *event, void *stream)
{
    return cuda->cuEventRecord(event->event, stream);
}

static CUresult query(const dray__cuda *cuda, dray__event *event, void *complete)
{
    CUresult result = cuda->cuEventQuery(event->event);
    *(bool *)complete = result == CUDA_SUCCESS;
    return result == CUDA_ERROR_NOT_READY ? CUDA_SUCCESS : result;
}

static CUresult handle_of(const dray__cuda *cuda, dray__event *event, void *ipc)
{
    return cuda->cuIpcGetEventHandle(ipc, event->event);
}

int dray__event_record(dray__event *event, void *stream, dray_error *error)
{
    int rc = inside(event, record, stream, "recording an event", error);
    event->recorded |= rc == DRAY_OK;
    return rc;
}

CUevent dray__event_handle(const dray__event *event)
{
    return event->recorded ? event->event : NULL;
}

int dray__event_export(const dray__event *event, uint8_t handle[64], dray_error *error)
{
    CUipcEventHandle ipc;
    int rc = check_recorded(event, error);
    if (rc == DRAY_OK)
        rc = inside((dray__event *)event, handle_of, &ipc, "exporting an event", error);
    if (rc == DRAY_OK)
        memcpy(handle, ipc.reserved, sizeof ipc.reserved);
    return rc;
}

int dray__event_sync(dray__event *event, int64_t timeout_ns, dray_error *error)
{
    int64_t deadline = dray__deadline(timeout_ns);
    bool complete = false;
    int rc = check_recorded(event, error);
    for (int64_t pause = 10000; rc == DRAY_OK; pause = pause < 500000 ? 2 * pause : pause) {
        rc = inside(event, query, &complete, "asking for an event", error);
        if (rc || complete)
            break;
        if (dray__now() >= deadline)
            return dray__fail(error, DRAY_ETIMEDOUT, "the event was not complete at the deadline");
        nanosleep(&(struct timespec){.tv_nsec = pause}, NULL);
    }
    return rc;
}
