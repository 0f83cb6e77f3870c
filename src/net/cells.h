/* A data server that hands out ranges of bytes of what its process keeps by number (the queue's
 * keeper: chunks of samples), by requests of the type CELLS (messages.h).
 *
 *  answer   status 0: head u64 XXH3 of the data, of each range u8 (1: it is not here, and no bytes
 *           of it are in the data), else a string; then the ranges' bytes, one after the other
 *
 * A number is drawn at random and told to those alone who may read it. */
#pragma once

#include "net/server.h"

enum { DRAY__CELLS_MAX = 2048 }; /* ranges of a request */

typedef struct dray__cell {
    uint64_t number, offset, bytes;
} dray__cell;

/* ---- the server's side */

typedef struct dray__cells {
    /* Copies the range to `out`. DRAY_EGONE: there is no such number, or it is shorter. Called in
     * the server's thread. */
    int (*read)(void *user, const dray__cell *cell, void *out);
    void *user;
} dray__cells;

/* Listens at `address` ("10.0.0.1", "0.0.0.0:7001"). keys, cells: borrowed until the end.
 * *endpoint: "tcp:ADDRESS:PORT", the server's. */
int dray__cells_serve(const char *address, const dray__stream_keys *keys, const dray__cells *cells,
                      dray__server **out, const char **endpoint, dray_error *error);
/* Reads what the body asks for into `staging`, and puts header and head of the answer. What is
 * wrong with the request becomes the answer, with no data. */
void dray__cells_answer(const dray__cells *cells, const dray__data_request *request,
                        const uint8_t *body, dray_region *staging, dray__writer *out,
                        uint64_t *data_bytes);

/* ---- the reader's side */

extern const dray__fields dray__cells_fields; /* of the request's body */

void dray__cells_request(dray__writer *w, uint32_t id, const dray__cell *cells, uint32_t count);
