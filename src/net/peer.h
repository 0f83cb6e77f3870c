/* A reader's connection to one data server. Answers come in the order of the requests. It is opened
 * at its first use, and again after it broke. Nothing here waits. */
#pragma once

#include "net/messages.h"
#include "net/stream.h"

typedef struct dray__peer dray__peer;

/* keys are borrowed until dray__peer_free. */
int dray__peer_new(const char *endpoint, const dray__stream_keys *keys, dray__peer **out,
                   dray_error *error);
void dray__peer_free(dray__peer *peer); /* NULL is fine */

/* Begins to connect, unless it is connected. */
int dray__peer_open(dray__peer *peer, dray_error *error);
bool dray__peer_is_open(const dray__peer *peer);
/* Drops the connection and all requests under way on it. */
void dray__peer_drop(dray__peer *peer);
int dray__peer_fd(const dray__peer *peer);       /* -1 when it is not open */
short dray__peer_events(const dray__peer *peer); /* the events to poll its descriptor for */
/* Returns true when its descriptor shows only the connection's end. The caller must then look for
 * bytes regularly. */
bool dray__peer_is_blind(const dray__peer *peer);
bool dray__peer_encrypts(const dray__peer *peer);
/* Returns true when it is connected, and the carrier of its bytes is known. */
bool dray__peer_settled(const dray__peer *peer);
/* Returns the stream for one-sided reads once it is settled; NULL when there are none. */
dray__stream *dray__peer_reads(const dray__peer *peer);
/* dray__peer_touch notes that the peer has something to do from now on. dray__peer_moved returns
 * when it last made progress, or was touched. */
void dray__peer_touch(dray__peer *peer);
int64_t dray__peer_moved(const dray__peer *peer);
/* Counts bytes that were read from it one-sidedly. */
void dray__peer_count(dray__peer *peer, uint64_t bytes);
/* Returns the bytes sent and received since it was made. */
uint64_t dray__peer_wire_bytes(const dray__peer *peer);

/* Returns the writer for requests; dray__peer_send sends them. */
dray__writer *dray__peer_out(dray__peer *peer);
bool dray__peer_owes(const dray__peer *peer); /* some of it is not sent yet */
/* Returns DRAY_OK when all is sent, DRAY_EAGAIN while it is not, or an error when the connection
 * broke. */
int dray__peer_send(dray__peer *peer, dray_error *error);

typedef struct dray__arrival {
    dray__answer header;
    const uint8_t *head; /* until the next call */
} dray__arrival;

/* Gets the header of the next answer. Returns DRAY_EAGAIN until its header and head have
 * arrived. */
int dray__peer_recv_head(dray__peer *peer, dray__arrival *out, dray_error *error);
/* Receives the answer's data into `data`, which must be the same in all calls until they are
 * complete. Then the next head may be received. */
int dray__peer_recv_data(dray__peer *peer, uint8_t *data, dray_error *error);
