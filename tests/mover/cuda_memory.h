/* Helpers of the tests of a GPU's mover: GPU memory whose content the host knows, and jobs that are
 * run to their end. */
#pragma once

#include "mover/cuda/cuda.h"
#include "suite.h"

#include "base/random.h"
#include "gpu/gpu.h"
#include "seed.h"

#include <poll.h>
#include <stdint.h>

static const dray__cuda *cu;
static dray__cuda_device *gpu;
static uint64_t seed, drawn;

static inline uint64_t draw(uint64_t below)
{
    return dray__random_u64(seed, 0, drawn++) % below;
}

static inline void cuda_is(CUresult result, int line)
{
    if (result)
        fail_msg("line %d: the driver says %d", line, result);
}
#define CUDA(call) cuda_is((call), __LINE__)

FIXTURE(set_up)
{
    dray_error e = {0};
    seed = test_seed();
    cu = dray__cuda_get(&e);
    if (!cu || dray__cuda_device_at(0, &gpu, &e) || dray__cuda_enter(gpu, &e)) {
        fprintf(stderr, "%s\n", e.message);
        return -1;
    }
    return 0;
}

FIXTURE(tear_down)
{
    dray__cuda_leave();
    return 0;
}

/* ---- memory on both sides -------------------------------------------------------------------- */

typedef struct both {
    uint8_t *host;
    CUdeviceptr device;
    size_t bytes;
} both;

static inline both both_new(size_t bytes)
{
    both b = {malloc(bytes + 8), 0, bytes};
    assert_non_null(b.host);
    for (size_t i = 0; i < bytes; i += 8) {
        uint64_t word = dray__random_u64(seed, 1, drawn++);
        memcpy(b.host + i, &word, 8);
    }
    CUDA(cu->cuMemAlloc(&b.device, bytes));
    CUDA(cu->cuMemcpyHtoD(b.device, b.host, bytes));
    CUDA(cu->cuCtxSynchronize()); /* the copy returns before it is complete */
    return b;
}

static inline void both_free(both *b)
{
    CUDA(cu->cuMemFree(b->device));
    free(b->host);
}

/* Fails unless the GPU's bytes are those that the host expects. */
static inline void both_agree(const both *b, const char *what)
{
    uint8_t *found = malloc(b->bytes);
    assert_non_null(found);
    CUDA(cu->cuMemcpyDtoH(found, b->device, b->bytes));
    for (size_t i = 0; i < b->bytes; i++)
        if (found[i] != b->host[i])
            fail_msg("%s: byte %zu of %zu is %02x, expected %02x", what, i, b->bytes, found[i],
                     b->host[i]);
    free(found);
}

/* ---- jobs ------------------------------------------------------------------------------------ */

static inline int run(dray__cuda_job *job, dray_error *e)
{
    int rc = dray__cuda_job_start(job, NULL, 0, e);
    if (rc)
        return rc;
    while ((rc = dray__cuda_job_poll(job, e)) == DRAY_EAGAIN) {
        struct pollfd p = {.fd = dray__cuda_job_fd(job), .events = POLLIN};
        if (poll(&p, 1, 30000) == 0)
            fail_msg("the job does not end");
    }
    return rc;
}

static inline void done(dray__cuda_job *job, const dray_error *e, int rc)
{
    (void)job;
    if (rc)
        fail_msg("%d: %s", rc, e->message);
}
