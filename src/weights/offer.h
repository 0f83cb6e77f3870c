/* A reader's offer to its data server, the first thing on a connection, to go on over UCX. Two
 * requests with the flag DRAY__PULL_UCX alone, each with its answer:
 *
 *  greeting  16 random bytes, u8 1: it wants     answer, status 0: 16 random bytes, u8 1: both
 *            one-sided reads                     want them, and UCX is opened for them
 *  offer     u32 major, u32 minor, u32 release   answer, status 0: u64 number, bytes the address,
 *            of the reader's UCX, u64 the        32 bytes of proof
 *            number that messages to it carry,
 *            bytes its address, 32 of proof
 *
 * A proof is HMAC-SHA256 with the session's data key over the name of the side that gives it, the
 * random bytes of both, what they agreed on, and all of the body or head before it: so each side
 * knows that the other is of the session, that it means what came, and that it says so now; what
 * was recorded earlier proves nothing. An offer without a greeting of this connection, and a second
 * one, are refused.
 *
 * After the answer 0 to the offer requests and answers go over UCX; after another, over the socket
 * as before. UCX's versions do not speak with each other: they must be equal. */
#ifndef DRAY_WEIGHTS_OFFER_H
#define DRAY_WEIGHTS_OFFER_H

#include "mover/stream.h"
#include "weights/pull.h"

enum { DRAY__OFFER_RANDOM = 16, DRAY__OFFER_PROOF = 32 };

/* What one side knows of an offer that is being made on a connection; all zeros at first. */
typedef struct dray__offer {
    bool greeted, reads;
    uint8_t reader[DRAY__OFFER_RANDOM], server[DRAY__OFFER_RANDOM];
} dray__offer;

/* Should a reader make the offer? DRAY_EPERM, DRAY_EUNSUPPORTED: it must, by `keys`, and cannot. */
int dray__offer_wanted(const dray__stream_keys *keys, const dray__stream *stream, bool *wanted,
                       dray_error *error);
/* reads: one-sided ones are wanted. */
int dray__offer_greet(dray__offer *offer, bool reads, dray__writer *w, dray_error *error);
/* Of the answer to the greeting. */
int dray__offer_greeted(dray__offer *offer, const uint8_t *head, uint32_t size, dray_error *error);
/* Then, with a `ucx` opened for what was agreed on. */
int dray__offer_put(const dray__offer *offer, const dray__stream_keys *keys, const dray__ucx *ucx,
                    dray__writer *w, dray_error *error);
/* Of the answer to the offer. DRAY_EPERM: it does not prove that it is of this session. */
int dray__offer_taken(const dray__offer *offer, const dray__stream_keys *keys, const uint8_t *head,
                      uint32_t size, dray__ucx *ucx, dray_error *error);

/* The server's side: puts the answer; *out: what the stream goes on with when that is sent; NULL:
 * nothing yet, or refused. false: out of memory. */
bool dray__offer_answer(dray__offer *offer, const dray__stream_keys *keys,
                        const dray__stream *stream, const dray__pull_header *header,
                        const uint8_t *body, dray__writer *w, dray__ucx **out);

#endif
