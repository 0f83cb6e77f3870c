/* Events of GPUs that other processes can wait for. When an event is complete, so is all work that
 * was put into its stream before it was recorded. The driver treats an event that was never
 * recorded as complete, so such an event is not exported. An event is used by one thread at a
 * time. */
#pragma once

#include "memory/cuda_library.h"

#include <dray/dray.h>

typedef struct dray__event dray__event;

/* uuid NULL means the GPU of the thread's context, else the first. The caller owns *out. */
int dray__event_new(const uint8_t uuid[16], dray__event **out, dray_error *error);
void dray__event_free(dray__event *event); /* NULL is fine */
int dray__event_record(dray__event *event, void *stream, dray_error *error);
/* Borrowed from the event. NULL when it was never recorded. */
CUevent dray__event_handle(const dray__event *event);
/* Gets the handle with which another process opens it. Returns 0, or DRAY_EINVALID when it was
 * never recorded. */
int dray__event_export(const dray__event *event, uint8_t handle[64], dray_error *error);
int dray__event_import(const uint8_t uuid[16], const uint8_t handle[64], dray__event **out,
                       dray_error *error);
/* Waits for the event. Fails with DRAY_ETIMEDOUT, or with DRAY_EINVALID when it was never recorded.
 */
int dray__event_sync(dray__event *event, int64_t timeout_ns, dray_error *error);
