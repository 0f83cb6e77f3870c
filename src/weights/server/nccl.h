/* GPU memory between hosts by NCCL: the definitions that the reader (remote_nccl.c) and the data
 * server (nccl_serve.c) share.
 *
 * Each pair of a reader and a publisher's process has a communicator of its own. It is made when it
 * is first needed, and made again after it failed, so that a process that joins, leaves or dies
 * affects only its own pairs. The data server packs the rectangles of a request into a slot of a
 * bounded buffer on its GPU. The reader receives them in the slot of the same number on its own
 * GPU. Requests and sums go over the connection of pull.h. As many requests as there are slots may
 * be without an answer, so that packing, sending and placing overlap. */
#pragma once

#include "mover/cuda/cuda.h"
#include "mover/cuda/nccl.h"
#include "weights/server/pull.h"

enum {
    DRAY__NCCL_SLOT_MAX = 256 << 20,
    DRAY__NCCL_SLOT_MIN = 64 << 10,
    /* A launch that fills or empties slots writes so many bytes, and leaves NCCL's thread blocks
     * multiprocessors of their own: one that fills the GPU would hold up a transfer until it ends.
     */
    DRAY__NCCL_LAUNCH = 12 << 20,
    DRAY__NCCL_CELL_MIN = 512, /* bytes of a cell that is quantised into a slot; each is a tile */
    DRAY__NCCL_JOIN = 0,       /* the kinds of requests */
    DRAY__NCCL_FETCH = 1
};

/* Returns a region's GPU; NULL when the region is not in memory of a GPU that this process sees. */
dray__cuda_device *dray__nccl_device_of(const dray_region *region);

/* The bytes of GPU memory, and of pinned memory, that the job of a slot needs for the descriptors
 * of any request. Cells of 512 bytes make the most tiles. */
#define DRAY__NCCL_RESERVE(slot_bytes) (((uint64_t)512 << 10) + (slot_bytes) / 64)

/* ---- nccl_serve.c: a data server's end of one pair, with a thread of its own ----------------- */
typedef struct dray__nccl_session dray__nccl_session;

/* wake: an eventfd of the caller, which is written to when an answer is there. */
dray__nccl_session *dray__nccl_session_new(int wake); /* NULL when there is no memory, or no
                                                       * thread */
/* Tells the session's thread to abort its work and to end, and adds the session to the list
 * `ending`. The end of a session frees GPU memory. The driver then waits for all work of the GPU,
 * which includes the data for other readers, so that the thread that serves them must not wait for
 * it. NULL is fine. */
void dray__nccl_session_leave(dray__nccl_session *session, dray__nccl_session **ending);
/* Frees the sessions of the list that have ended. all: waits for the others, too. */
void dray__nccl_sessions_free(dray__nccl_session **ending, bool all);
/* Gives the session a request. Requests are answered in their order. Returns -ENOMEM, or -EPROTO
 * when more requests have no answer than there are slots. */
int dray__nccl_session_ask(dray__nccl_session *session, const dray__data_request *header,
                           const uint8_t *body);
bool dray__nccl_session_answered(dray__nccl_session *session); /* the oldest request is answered */
/* Takes the answer to the oldest request. */
bool dray__nccl_session_answer(dray__nccl_session *session, dray__writer *out);
