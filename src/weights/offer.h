/* A reader's offer to its data server, the first thing on a connection, to go on over UCX:
 *
 *  offer    a request's header (pull.h) with the flag 8 alone; body: u32 major, u32 minor, u32
 *           release of the reader's UCX, u64 the number that messages to it carry, bytes its
 * address answer   an answer's header; status 0: head u64, bytes the same of the server; else a
 * string
 *
 * After the answer 0 requests and answers go over UCX; after another, over the socket as before.
 * UCX's versions do not speak with each other: they must be equal. */
#ifndef DRAY_WEIGHTS_OFFER_H
#define DRAY_WEIGHTS_OFFER_H

#include "mover/stream.h"
#include "weights/pull.h"

/* Should a reader make the offer? DRAY_EPERM, DRAY_EUNSUPPORTED: it must, by `keys`, and cannot. */
int dray__offer_wanted(const dray__stream_keys *keys, const dray__stream *stream, bool *wanted,
                       dray_error *error);
void dray__offer_put(dray__writer *w, const dray__ucx *ucx);
/* Of an answer with status 0. */
int dray__offer_taken(const uint8_t *head, uint32_t size, dray__ucx *ucx, dray_error *error);

/* The server's side: puts the answer; *out: what the stream goes on with when that is sent; NULL:
 * refused. false: out of memory. */
bool dray__offer_answer(const dray__stream_keys *keys, const dray__stream *stream,
                        const dray__pull_header *header, const uint8_t *body, dray__writer *w,
                        dray__ucx **out);

#endif
