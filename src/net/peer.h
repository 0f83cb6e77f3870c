/* A reader's connection to one data server: requests go out, answers come back in their order. It
 * is opened when it is first used, and again after it broke; nothing here waits. */
#pragma once

#include "net/messages.h"
#include "net/stream.h"

typedef struct dray__peer dray__peer;

/* keys: borrowed until free. */
int dray__peer_new(const char *endpoint, const dray__stream_keys *keys, dray__peer **out,
                   dray_error *error);
void dray__peer_free(dray__peer *peer); /* NULL is fine */

/* Begins to connect, unless it is connected. */
int dray__peer_open(dray__peer *peer, dray_error *error);
bool dray__peer_is_open(const dray__peer *peer);
/* Forgets the connection and all that was under way on it. */
void dray__peer_drop(dray__peer *peer);
int dray__peer_fd(const dray__peer *peer);       /* -1: not open */
short dray__peer_events(const dray__peer *peer); /* the events to poll its descriptor for */
/* Returns true when its descriptor shows only its end. The caller then looks for bytes every few
 * moments. */
bool dray__peer_is_blind(const dray__peer *peer);
bool dray__peer_encrypts(const dray__peer *peer);
/* Returns true when it is connected, and the carrier of its bytes is known. */
bool dray__peer_settled(const dray__peer *peer);
/* The stream for one-sided reads, once that is settled; NULL when there are none. */
dray__stream *dray__peer_reads(const dray__peer *peer);
/* touch notes that the peer has something to do from now on. moved is the time when it last made
 * progress, or was touched. */
void dray__peer_touch(dray__peer *peer);
int64_t dray__peer_moved(const dray__peer *peer);
/* Bytes that were read of it one-sidedly. */
void dray__peer_count(dray__peer *peer, uint64_t bytes);
/* Bytes sent and received since it was made. */
uint64_t dray__peer_wire_bytes(const dray__peer *peer);

/* Where requests are put; sent by dray__peer_send. */
dray__writer *dray__peer_out(dray__peer *peer);
bool dray__peer_owes(const dray__peer *peer); /* not all of it is out */
/* Returns DRAY_OK when all is sent, DRAY_EAGAIN while it is not, or an error when the connection
 * broke. */
int dray__peer_send(dray__peer *peer, dray_error *error);

typedef struct dray__arrival {
    dray__answer header;
    const uint8_t *head; /* until the next call */
} dray__arrival;

/* The header of the answer that is coming, once its header and head are here. */
int dray__peer_recv_head(dray__peer *peer, dray__arrival *out, dray_error *error);
/* Its data, into `data`, which stays the same until all is there. Then the next head may be asked
 * for. */
int dray__peer_recv_data(dray__peer *peer, uint8_t *data, dray_error *error);
