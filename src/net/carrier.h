/* src/net/: bytes to other processes, on this host and on others. Addresses of sockets (address.c);
 * a stream (stream.c), which is a socket and a carrier of its bytes; the carriers, a file each
 * (tcp.c, tls.c and so on) and a line each in their table, carriers.c. Nothing here knows the
 * meaning of the bytes. */

/* One way to carry the bytes of a stream. A new one is a file with one of these, and a line in
 * carriers.c. */
#pragma once

#include "net/stream.h"

struct dray__stream {
    const dray__carrier *carrier; /* NULL when accepted, and not recognised yet */
    const dray__stream_keys *keys;
    int socket;
    pid_t pid;
    bool server; /* it was accepted */
    bool connecting, started, open;
    bool trusted; /* the network in between: bytes may go in the clear */
    bool unfit;   /* the carrier failed, not the network */
    void *state;  /* the carrier's */
};

/* Memory that was registered for one-sided reads; each carrier's has more. */
typedef struct dray__net_memory {
    const dray__carrier *carrier;
} dray__net_memory;
typedef struct dray__net_key dray__net_key;

/* Reads that belong together. Stays where it is until none is pending, or the connection closed. */
typedef struct dray__net_reads {
    uint32_t pending;
    bool failed;
} dray__net_reads;

struct dray__carrier {
    const char *name;      /* of one carrier */
    const char *transport; /* the word by which users ask for it and its like */
    const char *scheme;    /* the beginning of the endpoints to which it leads: "tcp", "unix" */
    uint8_t first;         /* the first byte of its connections, by which servers recognise it; 0
                            * means any other */
    bool encrypts;
    bool blind; /* dray__stream_blind */

    /* Returns 0 when this process can use it, or DRAY_EUNSUPPORTED with advice in the message.
     * detail is its version. NULL when every process can. */
    int (*find)(char *detail, size_t size, dray_error *error);
    /* Checks the carrier's settings in the environment. NULL when it has none. */
    int (*check)(dray_error *error);
    /* May it carry bytes between two ends, over a network that is trusted or not, with these keys?
     * DRAY_EPERM, DRAY_EUNSUPPORTED. */
    int (*may)(const dray__stream_keys *keys, bool trusted, dray_error *error);

    /* Begin on a connected socket, at the reader's end and at the data server's (stream->server).
     */
    int (*connect)(dray__stream *stream, dray_error *error);
    int (*accept)(dray__stream *stream, dray_error *error);
    /* Comes to an agreement with the other side. Returns DRAY_OK, DRAY_EAGAIN, or an error when the
     * connection failed. NULL when there is nothing to agree on. */
    int (*ready)(dray__stream *stream, dray_error *error);
    /* As dray__stream_send and its neighbours. */
    ssize_t (*send)(dray__stream *stream, const void *data, size_t size, bool more);
    ssize_t (*recv)(dray__stream *stream, void *data, size_t size);
    int (*flush)(dray__stream *stream); /* NULL when it keeps no bytes */
    short (*events)(const dray__stream *stream, short wanted);
    bool (*pending)(const dray__stream *stream); /* NULL when it never has bytes of its own */
    int (*fd)(const dray__stream *stream);       /* NULL when it is the socket's */
    /* Ends all that is under way; the socket is closed after it. NULL when there is no state. */
    void (*close)(dray__stream *stream);

    /* One-sided reads: memory that its owner registered, read without him. All NULL: it has none.
     */

    /* Registers memory for the connections that share this one's devices; unregistered by any
     * thread, also after the connection was closed. remote: that the other side may read; else that
     * reads land in. */
    int (*map)(const dray__stream *stream, void *base, size_t bytes, bool remote,
               dray__net_memory **out, dray_error *error);
    void (*unmap)(dray__net_memory *memory);
    /* Packs the key that the other side needs to read the memory, in `*out`, which the caller
     * frees. */
    int (*pack_key)(const dray__net_memory *memory, void **out, size_t *size, dray_error *error);
    /* Such a key, for use on this connection; the connection's, until it is closed or forgets all,
     * while no read is under way. */
    int (*unpack_key)(dray__stream *stream, const void *packed, size_t size, dray__net_key **out,
                      dray_error *error);
    void (*forget_keys)(dray__stream *stream);
    /* Begins to read the other side's memory at `address` into `at`, which is in `into`. */
    int (*get)(dray__stream *stream, const dray__net_key *key, uint64_t address,
               const dray__net_memory *into, void *at, size_t bytes, dray__net_reads *reads,
               dray_error *error);
    /* Lets reads progress. Returns 0 when none is pending, -EAGAIN while some are, -errno on
     * failure. */
    int (*read)(dray__stream *stream, const dray__net_reads *reads);
};

/* ---- carriers.c */

enum { DRAY__CARRIERS_MAX = 16 };

/* In the order in which they are tried; NULL when there are no more. */
const dray__carrier *dray__carrier_at(uint32_t index);
/* Looks in the table from *index on for one that may carry bytes of this scheme, and that `avoid`
 * does not name. Fails as the last one that was asked does. */
int dray__carrier_choose(const char *scheme, const dray__stream_keys *keys, bool trusted,
                         uint32_t avoid, uint32_t *index, dray_error *error);
/* Returns the carrier whose connections begin with this byte; NULL when there is none. */
const dray__carrier *dray__carrier_of(const char *scheme, uint8_t first);
/* As dray_transport_find; the transport of this name goes into *out, NULL for "auto". */
int dray__transport_find(const char *name, const char **out, char *detail, size_t size,
                         dray_error *error);
/* Checks the settings of all carriers in the environment. */
int dray__carriers_check(dray_error *error);
/* May one-sided reads be had with these keys? */
bool dray__carriers_read(const dray__stream_keys *keys);

/* ---- plain sockets, of which more than one carrier is made: tcp.c */
#define DRAY__CARRIER_PLAIN                                                                        \
    .connect = dray__plain_begin, .accept = dray__plain_begin, .send = dray__plain_send,           \
    .recv = dray__plain_recv, .events = dray__plain_events
int dray__plain_begin(dray__stream *stream, dray_error *error); /* where it may */
ssize_t dray__plain_send(dray__stream *stream, const void *data, size_t size, bool more);
ssize_t dray__plain_recv(dray__stream *stream, void *data, size_t size);
short dray__plain_events(const dray__stream *stream, short wanted);
