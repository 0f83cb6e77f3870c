/* A gate stops a GPU's stream until readers have released a version, without stopping the trainer's
 * thread: the stream waits for a word of pinned memory, which a thread of the publisher sets. */
#pragma once

#include "base/thread.h"
#include "memory/cuda_library.h"
#include "memory/region.h"

typedef int dray__gate_fn(void *user, uint64_t version, int64_t timeout_ns, dray_error *error);

typedef struct dray__gate {
    dray_region *word; /* NULL until it is needed */
    uint32_t value;    /* the value that opens it */
    dray__thread thread;
    dray__gate_fn *wait;
    void *user;
    uint64_t version;
    int64_t timeout_ns;
    dray_error outcome;
} dray__gate;

/* Stops the stream, of the device, until `wait` has returned, with success or an error. */
int dray__gate_close(dray__gate *gate, dray__cuda_device *device, CUstream stream,
                     dray_error *error);
/* Waits for the thread, if there is one. Returns the result of `wait` at the first call. */
int dray__gate_join(dray__gate *gate, dray_error *error);
void dray__gate_free(dray__gate *gate); /* joins; a stream may come to its wait later */
