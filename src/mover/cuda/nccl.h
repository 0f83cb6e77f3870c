/* NCCL between two GPUs of two processes: a communicator of the two, over which either sends what
 * is in its half of a bounded staging buffer. NCCL is opened at run time, where
 * memory/gpu_library.h finds it. It encrypts and authenticates nothing: for trusted
 * networks only.
 *
 * Communicators do not block: each call that begins something is followed by polling, so that every
 * wait has its caller's deadline, and what hangs is aborted. NCCL's own symptom of a peer that died
 * is, as often as not, silence.
 *
 *     dray__nccl_id(id);                     one side, which tells the other
 *     dray__nccl_open(device, id, rank, ...); both
 *     while ((rc = dray__nccl_ready(pair)) == DRAY_EAGAIN) ...
 *     dray__nccl_begin(pair, slot, bytes, sends);
 *     while ((rc = dray__nccl_done(pair, slot)) == DRAY_EAGAIN) ...
 *
 * One pair: one thread at a time. */
#pragma once

#include "memory/cuda_library.h"

#include <stdbool.h>

enum {
    DRAY__NCCL_ID = 128,
    DRAY__NCCL_SLOTS = 8,      /* so many transfers may be under way */
    DRAY__NCCL_OPERATIONS = 1, /* of a group: NCCL 2.30.4 and 2.30.7 hang in one of 24,000
                                  (github.com/NVIDIA/Megatron-LM, issue 7189) */
    DRAY__NCCL_CTAS = 32       /* thread blocks of a communicator, at most */
};

typedef struct dray__nccl_pair dray__nccl_pair;
struct dray__cuda_job;

/* DRAY_EUNSUPPORTED: there is none, or it is older than 2.18; *version: 22809 is 2.28.9. */
int dray__nccl_find(int *version, dray_error *error);
/* Of a communicator that is to be. Whoever asks for it must take part. */
int dray__nccl_id(uint8_t id[DRAY__NCCL_ID], dray_error *error);
/* Begins to make the communicator of ranks 0 and 1, and allocates DRAY__NCCL_SLOTS buffers of
 * slot_bytes on the GPU. ctas: thread blocks of NCCL's kernels, 1 to DRAY__NCCL_CTAS, the same on
 * both sides. */
int dray__nccl_open(dray__cuda_device *device, const uint8_t id[DRAY__NCCL_ID], int rank,
                    uint64_t slot_bytes, uint32_t ctas, dray__nccl_pair **out, dray_error *error);
/* DRAY_EAGAIN: the other side has not come yet, or what was begun is not in the stream yet. */
int dray__nccl_ready(dray__nccl_pair *pair, dray_error *error);
/* Once it is ready: sends the first `bytes` of a slot, or receives into it, behind all that was
 * begun before, and behind `after` (NULL: nothing more), an event that is recorded already. */
int dray__nccl_begin(dray__nccl_pair *pair, uint32_t slot, uint64_t bytes, bool sends,
                     CUevent after, dray_error *error);
/* DRAY_EAGAIN: not yet. */
int dray__nccl_done(dray__nccl_pair *pair, uint32_t slot, dray_error *error);
uint64_t dray__nccl_slot(const dray__nccl_pair *pair, uint32_t slot); /* its address */
dray__cuda_device *dray__nccl_device(const dray__nccl_pair *pair);
/* Closing aborts the transfers that are under way, closes the jobs that read or write the slots,
 * and then frees the slots. A pair that is NULL, jobs that are, and no jobs (NULL) are fine. */
void dray__nccl_close(dray__nccl_pair *pair, struct dray__cuda_job *jobs[DRAY__NCCL_SLOTS]);
