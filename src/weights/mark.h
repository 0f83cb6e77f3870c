/* An event of a publisher's that other processes can wait for: what is published is there when the
 * GPU has come to it. It is recorded before the coordinator hears of the version, and so before any
 * reader looks: one that was never recorded would hold nobody back. */
#pragma once

#include "memory/cuda_event.h"

enum { DRAY__MARK_HANDLE = 64 };

typedef struct dray__mark {
    dray__event *event;
    dray__cuda_device *device;
    CUstream stream; /* of its own: takes over what others' events say */
    uint8_t handle[DRAY__MARK_HANDLE];
} dray__mark;

/* Recorded already. */
int dray__mark_new(dray__cuda_device *device, dray__mark **out, dray_error *error);
void dray__mark_free(dray__mark *mark); /* NULL is fine */
/* From now on it is complete when the event is, or what the stream (of the mark's GPU) was told so
 * far. Neither waits. */
int dray__mark_after_event(dray__mark *mark, CUevent event, dray_error *error);
int dray__mark_after_stream(dray__mark *mark, CUstream stream, dray_error *error);
CUevent dray__mark_event(const dray__mark *mark);
