/* NCCL between two GPUs of two processes: a communicator with two ranks, over which either sends
 * and receives slots of a bounded staging buffer of its own. NCCL is opened at run time, where
 * memory/gpu_library.h finds it. It neither encrypts nor authenticates: for trusted networks only.
 * Communicators are non-blocking. The caller polls after each call that begins something, applies
 * its own deadline, and aborts a transfer that hangs: NCCL often reports nothing when a peer dies.
 *
 *     dray__nccl_id(id);                     one side, which sends it to the other
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
    DRAY__NCCL_SLOTS = 8,      /* transfers under way at once, at most */
    DRAY__NCCL_OPERATIONS = 1, /* of a group: NCCL 2.30.4 and 2.30.7 hang in one of 24,000
                                  (github.com/NVIDIA/Megatron-LM, issue 7189) */
    DRAY__NCCL_CTAS = 32       /* thread blocks of a communicator, at most */
};

typedef struct dray__nccl_pair dray__nccl_pair;
struct dray__cuda_job;

/* Finds NCCL and its version (22809 is 2.28.9). Returns DRAY_EUNSUPPORTED when there is none, or it
 * is older than 2.18. */
int dray__nccl_find(int *version, dray_error *error);
/* Makes the id of a new communicator. The process that makes it must be one of the two ranks. */
int dray__nccl_id(uint8_t id[DRAY__NCCL_ID], dray_error *error);
/* Begins to make the communicator of ranks 0 and 1, and allocates DRAY__NCCL_SLOTS buffers of
 * slot_bytes on the GPU. ctas: thread blocks of NCCL's kernels, 1 to DRAY__NCCL_CTAS, the same on
 * both sides. */
int dray__nccl_open(dray__cuda_device *device, const uint8_t id[DRAY__NCCL_ID], int rank,
                    uint64_t slot_bytes, uint32_t ctas, dray__nccl_pair **out, dray_error *error);
/* Returns DRAY_EAGAIN until the other side has joined, and until all begun transfers are enqueued.
 */
int dray__nccl_ready(dray__nccl_pair *pair, dray_error *error);
/* Sends the first `bytes` of a slot, or receives into it, once the pair is ready. The transfer runs
 * behind all earlier ones, and behind `after`, an event that is recorded already, or NULL. */
int dray__nccl_begin(dray__nccl_pair *pair, uint32_t slot, uint64_t bytes, bool sends,
                     CUevent after, dray_error *error);
/* Returns DRAY_EAGAIN while the slot's transfer is under way. */
int dray__nccl_done(dray__nccl_pair *pair, uint32_t slot, dray_error *error);
uint64_t dray__nccl_slot(const dray__nccl_pair *pair, uint32_t slot); /* the slot's address */
dray__cuda_device *dray__nccl_device(const dray__nccl_pair *pair);
/* Aborts the transfers that are under way, closes the jobs that read or write the slots, and then
 * frees the slots. pair, jobs and each job may be NULL. */
void dray__nccl_close(dray__nccl_pair *pair, struct dray__cuda_job *jobs[DRAY__NCCL_SLOTS]);
