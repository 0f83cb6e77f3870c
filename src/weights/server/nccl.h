/* GPU memory between hosts by NCCL: what reader (remote_nccl.c) and data server (nccl_serve.c)
 * share.
 *
 * Each pair of a reader and a publisher's process has a communicator of its own, made when it is
 * first needed and anew after it failed: who joins, leaves or dies is nobody else's business. The
 * data server packs what a request names into a slot of a bounded buffer on its GPU, the reader
 * takes it from the slot of that number on its own; requests and sums go over the connection that
 * readers have anyway (pull.h). As many requests as there are slots are under way at once, so that
 * packing, sending and placing go on beside each other. */
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

/* GPU and pinned memory that the job of a slot needs for the descriptors of any request: rows of
 * two bytes make tiles of 1 KiB. */
#define DRAY__NCCL_RESERVE(slot_bytes) (((uint64_t)512 << 10) + (slot_bytes) / 64)

/* ---- nccl_serve.c: a data server's end of one pair, with a thread of its own ----------------- */
typedef struct dray__nccl_session dray__nccl_session;

/* wake: an eventfd that is written to when an answer is there; the caller's. */
dray__nccl_session *dray__nccl_session_new(int wake); /* NULL: no memory, or no thread */
/* Has the session's thread abort what is under way and end, and puts the session into the list of
 * those that end. Ending frees GPU memory, for which the driver waits for the GPU, and so for what
 * other readers are to receive: a thread that serves them must not wait for that. NULL is fine. */
void dray__nccl_session_leave(dray__nccl_session *session, dray__nccl_session **ending);
/* Frees those of the list that have ended; all: waits for the others, too. */
void dray__nccl_sessions_free(dray__nccl_session **ending, bool all);
/* Hands a request over; they are answered in their order. -ENOMEM; -EPROTO: more are under way than
 * there are slots. */
int dray__nccl_session_ask(dray__nccl_session *session, const dray__data_request *header,
                           const uint8_t *body);
bool dray__nccl_session_answered(dray__nccl_session *session); /* the oldest one is */
/* Its answer, once it is there. */
bool dray__nccl_session_answer(dray__nccl_session *session, dray__writer *out);
