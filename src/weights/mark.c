/* A publisher's event (mark.h). */
#include "weights/mark.h"

#include "base/error.h"

#include <stdlib.h>

int dray__mark_new(dray__cuda_device *device, dray__mark **out, dray_error *error)
{
    dray__mark *m = calloc(1, sizeof *m);
    if (!m)
        return dray__nomem(error);
    m->device = device;
    int rc = dray__event_new(device->uuid, &m->event, error);
    if (rc == DRAY_OK)
        rc = dray__cuda_enter(device, error);
    if (rc == DRAY_OK) {
        CUresult result = dray__cuda_get(NULL)->cuStreamCreate(&m->stream, CU_STREAM_NON_BLOCKING);
        if (result)
            rc = dray__fail_cuda(error, result, "a stream on %s", device->name);
        dray__cuda_leave();
    }
    if (rc == DRAY_OK)
        rc = dray__event_record(m->event, m->stream, error);
    if (rc == DRAY_OK)
        rc = dray__event_export(m->event, m->handle, error);
    if (rc)
        dray__mark_free(m);
    else
        *out = m;
    return rc;
}

void dray__mark_free(dray__mark *m)
{
    if (!m)
        return;
    dray__event_free(m->event);
    if (m->stream && dray__cuda_enter(m->device, NULL) == DRAY_OK) {
        dray__cuda_get(NULL)->cuStreamDestroy(m->stream);
        dray__cuda_leave();
    }
    free(m);
}

int dray__mark_after_event(dray__mark *m, CUevent event, dray_error *error)
{
    int rc = dray__cuda_enter(m->device, error);
    if (rc)
        return rc;
    CUresult result = dray__cuda_get(NULL)->cuStreamWaitEvent(m->stream, event, 0);
    dray__cuda_leave();
    return result ? dray__fail_cuda(error, result, "the fence of the published version")
                  : dray__event_record(m->event, m->stream, error);
}

int dray__mark_after_stream(dray__mark *m, CUstream stream, dray_error *error)
{
    return dray__event_record(m->event, stream, error);
}

CUevent dray__mark_event(const dray__mark *m)
{
    return dray__event_handle(m->event);
}
