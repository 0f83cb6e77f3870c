/* GPU memory between hosts by NCCL: what reader (remote_nccl.c) and data server (nccl_serve.c)
 * share.
 *
 * Each pair of a reader and a publisher's process has a communicator of its own, made when it is
 * first needed and anew after it failed: who joins, leaves or dies is nobody else's business. The
 * data server packs what a request names into a bounded buffer on its GPU, the reader takes it from
 * one on its own; requests and sums go over the connection that readers have anyway (pull.h). */
#pragma once

#include "mover/cuda/cuda.h"
#include "mover/cuda/nccl.h"
#include "weights/server/pull.h"

enum {
    DRAY__NCCL_SLOT_MAX = 256 << 20,
    DRAY__NCCL_SLOT_MIN = 64 << 10,
    DRAY__NCCL_JOIN = 0, /* what a request asks for */
    DRAY__NCCL_FETCH = 1
};

/* A region's GPU; NULL: it is not GPU memory that this process sees. */
dray__cuda_device *dray__nccl_device_of(const dray_region *region);

/* ---- nccl_jobs.c: what moves between slots and regions, compiled once -------------------------
 */
typedef struct dray__nccl_kept dray__nccl_kept;
typedef struct dray__nccl_jobs {
    dray__nccl_kept *kept;
    uint32_t count; /* that were ever made */
    uint64_t token;
} dray__nccl_jobs;

/* One for these items and sums, from an earlier call or new; stays the list's, and is kept for a
 * thousand others. token: of whose regions they are: another one, and all jobs are dropped.
 * may_make false: DRAY_EAGAIN instead of a new one. Making one allocates, and dropping one frees
 * GPU memory, and the driver may wait for all kernels of the GPU then: for a transfer of NCCL's,
 * too, whose other side may never come. So neither is done while one is under way. */
int dray__nccl_jobs_get(dray__nccl_jobs *jobs, uint64_t token, dray__cuda_device *device,
                        const dray_layout *layout, const dray__cuda_item *items, uint64_t count,
                        uint32_t sums, bool may_make, dray__cuda_job **out, dray_error *error);
/* Ends what runs. After the pair was closed. */
void dray__nccl_jobs_clear(dray__nccl_jobs *jobs);

/* ---- nccl_serve.c: a data server's end of one pair, with a thread of its own ----------------- */
typedef struct dray__nccl_session dray__nccl_session;

/* wake: an eventfd that is written to when an answer is there; the caller's. */
dray__nccl_session *dray__nccl_session_new(int wake); /* NULL: no memory, or no thread */
/* Aborts what is under way. NULL is fine. */
void dray__nccl_session_free(dray__nccl_session *session);
/* Hands a request over. One at a time. false: out of memory. */
bool dray__nccl_session_ask(dray__nccl_session *session, const dray__data_request *header,
                            const uint8_t *body);
bool dray__nccl_session_asked(dray__nccl_session *session); /* one is under way */
bool dray__nccl_session_answered(dray__nccl_session *session);
/* Its answer, once it is there. */
bool dray__nccl_session_answer(dray__nccl_session *session, dray__writer *out);

/* ---- remote_nccl.c -----------------------------------------------------------------------------
 */
