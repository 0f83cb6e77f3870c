/* A data server for numbered memory, such as the chunks of samples of the queue's keeper. It
 * answers requests of the type CELLS (messages.h) for ranges of bytes of this memory.
 *
 *  answer   status 0: head u64 XXH3 of the data, for each range u8 (1: the range is not here, and
 *           the data have no bytes of it); then the ranges' bytes, one after the other.
 *           Other status: a string
 *
 * Numbers are random, and only processes that may read the memory get its number. */
#pragma once

#include "net/server.h"

enum { DRAY__CELLS_MAX = 2048 }; /* ranges of a request */

typedef struct dray__cell {
    uint64_t number, offset, bytes;
} dray__cell;

/* ---- the server's side */

typedef struct dray__cells {
    /* Copies the range to `out`, in the server's thread. Returns 0, or DRAY_EGONE when there is no
     * such number, or its memory is shorter. Any other error is the answer to the request. */
    int (*read)(void *user, const dray__cell *cell, void *out);
    void *user;
} dray__cells;

/* Listens at `address` ("10.0.0.1", "0.0.0.0:7001"). keys and cells are borrowed until the server
 * is closed. *endpoint is "tcp:ADDRESS:PORT", owned by the server. */
int dray__cells_serve(const char *address, const dray__stream_keys *keys, const dray__cells *cells,
                      dray__server **out, const char **endpoint, dray_error *error);
/* Copies the ranges of the request into `staging`, and writes header and head of the answer. An
 * error in the request becomes the answer, without data. */
void dray__cells_answer(const dray__cells *cells, const dray__data_request *request,
                        const uint8_t *body, dray_region *staging, dray__writer *out,
                        uint64_t *data_bytes);

/* ---- the reader's side */

extern const dray__fields dray__cells_fields; /* of the request's body */

void dray__cells_request(dray__writer *w, uint32_t id, const dray__cell *cells, uint32_t count);
