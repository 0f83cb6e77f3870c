/* src/net/: sends bytes to other processes, on this host and on others. It has addresses of sockets
 * (address.c); streams (stream.c), which are a socket and a carrier of its bytes; and the carriers,
 * each with a file (tcp.c, tls.c and so on) and a line in the table of carriers.c. Nothing here
 * knows the meaning of the bytes. */

/* One way to carry the bytes of a stream. A new one is a file with one of these, and a line in
 * carriers.c. */
#pragma once

#include "net/stream.h"

struct dray__stream {
    const dray__carrier *carrier; /* NULL for an accepted stream that is not recognised yet */
    const dray__stream_keys *keys;
    int socket;
    pid_t pid;
    bool server; /* it was accepted */
    bool connecting, started, open;
    bool trusted; /* the network is trusted, so bytes need no encryption */
    bool unfit;   /* the carrier failed, not the network */
    void *state;  /* the carrier's */
};

/* Memory that was registered for one-sided reads. Each carrier's struct has more fields. */
typedef struct dray__net_memory {
    const dray__carrier *carrier;
} dray__net_memory;
typedef struct dray__net_key dray__net_key;

/* Reads that belong together. The struct must not move until none is pending, or the connection is
 * closed. */
typedef struct dray__net_reads {
    uint32_t pending;
    bool failed;
} dray__net_reads;

struct dray__carrier {
    const char *name;      /* of this carrier */
    const char *transport; /* the word by which users choose it and similar carriers */
    const char *scheme;    /* the beginning of the endpoints that it connects to: "tcp", "unix" */
    uint8_t first;         /* the first byte of its connections, by which servers recognise it; 0
                            * means any other */
    bool encrypts;
    bool blind; /* dray__stream_blind */

    /* Returns 0 when this process can use it, or DRAY_EUNSUPPORTED with advice in the message.
     * detail is its version. NULL when every process can. */
    int (*find)(char *detail, size_t size, dray_error *error);
    /* Checks the carrier's settings in the environment. NULL when it has none. */
    int (*check)(dray_error *error);
    /* Checks whether it may carry bytes over a network that is trusted or not, with these keys.
     * Returns 0, DRAY_EPERM, or DRAY_EUNSUPPORTED. */
    int (*may)(const dray__stream_keys *keys, bool trusted, dray_error *error);

    /* Begin on a connected socket, at the reader's end and at the data server's (stream->server).
     */
    int (*connect)(dray__stream *stream, dray_error *error);
    int (*accept)(dray__stream *stream, dray_error *error);
    /* Goes on with the handshake. Returns DRAY_OK when done, DRAY_EAGAIN while it is not, or an
     * error when the connection failed. NULL when there is no handshake. */
    int (*ready)(dray__stream *stream, dray_error *error);
    /* As dray__stream_send and its neighbours. */
    ssize_t (*send)(dray__stream *stream, const void *data, size_t size, bool more);
    ssize_t (*recv)(dray__stream *stream, void *data, size_t size);
    int (*flush)(dray__stream *stream); /* NULL when it keeps no bytes */
    short (*events)(const dray__stream *stream, short wanted);
    bool (*pending)(const dray__stream *stream); /* NULL when it never has bytes of its own */
    int (*fd)(const dray__stream *stream);       /* NULL when it is the socket's */
    /* Ends all transfers under way. The socket is closed afterwards. NULL when there is no
     * state. */
    void (*close)(dray__stream *stream);

    /* One-sided reads of memory that its owner registered. All are NULL for a carrier without
     * them. */

    /* Registers memory for the connections that share this one's devices. Any thread may unregister
     * it, also after the connection was closed. With `remote` the other side may read the memory;
     * otherwise it is the destination of reads. */
    int (*map)(const dray__stream *stream, void *base, size_t bytes, bool remote,
               dray__net_memory **out, dray_error *error);
    void (*unmap)(dray__net_memory *memory);
    /* Packs the key that the other side needs to read the memory, in `*out`, which the caller
     * frees. */
    int (*pack_key)(const dray__net_memory *memory, void **out, size_t *size, dray_error *error);
    /* Unpacks such a key for this connection, which owns it until the connection is closed or
     * forget_keys is called, when no read is under way. */
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

/* Returns the carriers in the order in which they are tried; NULL after the last. */
const dray__carrier *dray__carrier_at(uint32_t index);
/* Searches the table from *index on for a carrier that may carry bytes of this scheme and is not in
 * `avoid`. Fails with the error of the last one that was tried. */
int dray__carrier_choose(const char *scheme, const dray__stream_keys *keys, bool trusted,
                         uint32_t avoid, uint32_t *index, dray_error *error);
/* Returns the carrier whose connections begin with this byte; NULL when there is none. */
const dray__carrier *dray__carrier_of(const char *scheme, uint8_t first);
/* As dray_transport_find. *out is the transport of this name; NULL for "auto". */
int dray__transport_find(const char *name, const char **out, char *detail, size_t size,
                         dray_error *error);
/* Checks the settings of all carriers in the environment. */
int dray__carriers_check(dray_error *error);
/* Returns whether one-sided reads are possible with these keys. */
bool dray__carriers_read(const dray__stream_keys *keys);

/* ---- plain sockets, which more than one carrier uses: tcp.c */
#define DRAY__CARRIER_PLAIN                                                                        \
    .connect = dray__plain_begin, .accept = dray__plain_begin, .send = dray__plain_send,           \
    .recv = dray__plain_recv, .events = dray__plain_events
/* Fails when the carrier may not be used. */
int dray__plain_begin(dray__stream *stream, dray_error *error);
ssize_t dray__plain_send(dray__stream *stream, const void *data, size_t size, bool more);
ssize_t dray__plain_recv(dray__stream *stream, void *data, size_t size);
short dray__plain_events(const dray__stream *stream, short wanted);
