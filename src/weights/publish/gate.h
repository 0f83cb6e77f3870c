/* What a stream waits for until readers have released a version: a word of pinned memory that a
 * thread of the publisher's sets. The trainer's host goes on meanwhile. */
#pragma once

#include "base/thread.h"
#include "memory/cuda_library.h"
#include "memory/region.h"

typedef int dray__gate_fn(void *user, uint64_t version, int64_t timeout_ns, dray_error *error);

typedef struct dray__gate {
    dray_region *word; /* NULL: not needed yet */
    uint32_t value;    /* that opens it */
    dray__thread thread;
    dray__gate_fn *wait;
    void *user;
    uint64_t version;
    int64_t timeout_ns;
    dray_error outcome;
} dray__gate;

/* The stream, of the device, goes no further until `wait` has returned, whatever that says. */
int dray__gate_close(dray__gate *gate, dray__cuda_device *device, CUstream stream,
                     dray_error *error);
/* Waits for the thread, if there is one. What it came to, once. */
int dray__gate_join(dray__gate *gate, dray_error *error);
void dray__gate_free(dray__gate *gate); /* joins; no stream may wait any more */
