/* A mark is a publisher's GPU event that other processes can wait for. When it is complete, the
 * published bytes are in memory. It is recorded before the version is announced, and so before any
 * reader looks at it, because waiting for an event that was never recorded returns at once. */
#pragma once

#include "memory/cuda_event.h"

enum { DRAY__MARK_HANDLE = 64 };

typedef struct dray__mark {
    dray__event *event;
    dray__cuda_device *device;
    CUstream stream; /* its own stream, which waits for the events of others */
    uint8_t handle[DRAY__MARK_HANDLE];
} dray__mark;

/* Makes a mark that is complete. */
int dray__mark_new(dray__cuda_device *device, dray__mark **out, dray_error *error);
void dray__mark_free(dray__mark *mark); /* NULL is fine */
/* Record the mark behind an event, or behind the work that a stream (of the mark's GPU) has so far.
 * Neither call waits. */
int dray__mark_after_event(dray__mark *mark, CUevent event, dray_error *error);
int dray__mark_after_stream(dray__mark *mark, CUstream stream, dray_error *error);
CUevent dray__mark_event(const dray__mark *mark);
