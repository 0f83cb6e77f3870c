/* A data server that hands out ranges of bytes of what its process keeps by number (the queue's
 * keeper: chunks of samples), over the connections of serve.h.
 *
 *  request  a request's header (pull.h) with the flag 256 alone; body: u32 count, of each range u64
 *           number, u64 offset, u64 bytes
 *  answer   status 0: head u64 XXH3 of the data, of each range u8 (1: it is not here, and no bytes
 *           of it are in the data), else a string; then the ranges' bytes, one after the other
 *
 * A number is drawn at random and told to those alone who may read it. */
#ifndef DRAY_WEIGHTS_CELLS_H
#define DRAY_WEIGHTS_CELLS_H

#include "mover/stream.h"
#include "weights/pull.h"

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

typedef struct server dray__server;

/* Listens at `address` ("10.0.0.1", "0.0.0.0:7001"). keys, cells->user: borrowed until the end.
 * *endpoint: "tcp:ADDRESS:PORT", the server's. */
int dray__cells_serve(const char *address, const dray__stream_keys *keys, const dray__cells *cells,
                      dray__server **out, const char **endpoint, dray_error *error);
void dray__server_end(dray__server *server); /* NULL is fine */
/* As dray__pull_answer. */
bool dray__cells_answer(const dray__cells *cells, const dray__pull_header *header,
                        const uint8_t *body, dray_region *staging, dray__writer *out,
                        uint64_t *data_bytes);
/* Where the context's process listens for other hosts: $DRAY_DATA_ADDRESS, or its own address
 * towards the coordinator. Not *elsewhere: nowhere, and *out is this host's loopback. */
int dray__data_address(dray_context *context, char out[DRAY__STREAM_ADDRESS], bool *elsewhere,
                       dray_error *error);

/* ---- the reader's side */

void dray__cells_request(dray__writer *w, uint32_t id, const dray__cell *cells, uint32_t count);

#endif
