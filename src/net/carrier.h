/* src/net/: bytes to other processes, on this host and on others. Addresses of sockets (address.c);
 * a stream (stream.c), which is a socket and a carrier of its bytes; the carriers, a file each
 * (tcp.c, tls.c and so on) and a line each in their table, carriers.c. Nothing here knows what the
 * bytes mean. */

/* One way to carry the bytes of a stream. A new one is a file with one of these, and a line in
 * carriers.c. */
#pragma once

#include "net/stream.h"

struct dray__stream {
    const dray__carrier *carrier; /* NULL: accepted, and nothing seen of it yet */
    const dray__stream_keys *keys;
    int socket;
    pid_t pid;
    bool server; /* it was accepted */
    bool connecting, started, open;
    bool trusted; /* the network in between: bytes may go in the clear */
    bool unfit;   /* the carrier failed, not the network */
    void *state;  /* a pointer of the carrier */
};

/* Memory that was registered for one-sided reads. Each carrier's own struct begins with this. */
typedef struct dray__net_memory {
    const dray__carrier *carrier;
} dray__net_memory;
typedef struct dray__net_key dray__net_key;

/* Reads that belong together. The struct must stay at its address until none of them is pending, or
 * the connection is closed. */
typedef struct dray__net_reads {
    uint32_t pending;
    bool failed;
} dray__net_reads;

struct dray__carrier {
    const char *name;      /* the carrier's name, which no other has */
    const char *transport; /* the word by which users choose it and similar ones */
    const char *scheme;    /* the scheme of its endpoints: "tcp", "unix" */
    uint8_t first;         /* the first byte of its connections, for servers; 0: any other byte */
    bool encrypts;
    bool blind; /* dray__stream_blind */

    /* Checks that this process can use the carrier. detail gets its version. The message of
     * DRAY_EUNSUPPORTED says how to make it usable. NULL: every process can use it. */
    int (*find)(char *detail, size_t size, dray_error *error);
    /* Checks the carrier's environment variables. NULL: it has none. */
    int (*check)(dray_error *error);
    /* Checks that it may carry bytes between two ends with these keys, over a network that is
     * trusted or not. Fails with DRAY_EPERM or DRAY_EUNSUPPORTED. */
    int (*may)(const dray__stream_keys *keys, bool trusted, dray_error *error);

    /* Begin on a connected socket, at the reader's end and at the data server's (stream->server).
     */
    int (*connect)(dray__stream *stream, dray_error *error);
    int (*accept)(dray__stream *stream, dray_error *error);
    /* Carries out the handshake with the other end. Returns DRAY_OK, DRAY_EAGAIN, or the error with
     * which the connection failed. NULL: there is no handshake. */
    int (*ready)(dray__stream *stream, dray_error *error);
    /* These do the work of dray__stream_send and the functions after it. */
    ssize_t (*send)(dray__stream *stream, const void *data, size_t size, bool more);
    ssize_t (*recv)(dray__stream *stream, void *data, size_t size);
    int (*flush)(dray__stream *stream); /* NULL: nothing is kept */
    short (*events)(const dray__stream *stream, short wanted);
    bool (*pending)(const dray__stream *stream); /* NULL: never */
    int (*fd)(const dray__stream *stream);       /* NULL: the socket */
    /* Ends the carrier's work, also in the middle of it. The socket is closed afterwards. NULL:
     * there is no state. */
    void (*close)(dray__stream *stream);

    /* One-sided reads: one process reads memory that another has registered, without the other's
     * help. All NULL: the carrier has none. */

    /* Registers memory for the connections that share this one's devices. Any thread may unregister
     * it, also after the connection was closed. remote: the other end may read it; otherwise reads
     * write into it. */
    int (*map)(const dray__stream *stream, void *base, size_t bytes, bool remote,
               dray__net_memory **out, dray_error *error);
    void (*unmap)(dray__net_memory *memory);
    /* Returns the key with which the other end reads it, in `*out`, which the caller frees. */
    int (*pack_key)(const dray__net_memory *memory, void **out, size_t *size, dray_error *error);
    /* Makes such a key usable on this connection, which owns it until it is closed or forgets its
     * keys. */
    int (*unpack_key)(dray__stream *stream, const void *packed, size_t size, dray__net_key **out,
                      dray_error *error);
    void (*forget_keys)(dray__stream *stream); /* no read may be under way */
    /* Begins to read the other side's memory at `address` into `at`, which is in `into`. */
    int (*get)(dray__stream *stream, const dray__net_key *key, uint64_t address,
               const dray__net_memory *into, void *at, size_t bytes, dray__net_reads *reads,
               dray_error *error);
    /* Works on the reads. Returns 0 when none is pending, -EAGAIN when some are, or -errno. */
    int (*read)(dray__stream *stream, const dray__net_reads *reads);
};

/* ---- carriers.c */

enum { DRAY__CARRIERS_MAX = 16 };

/* Returns the carrier at a place of the table, which is in the order in which carriers are tried;
 * NULL: the table has no such place. */
const dray__carrier *dray__carrier_at(uint32_t index);
/* Finds the first carrier of this scheme that may carry the bytes and whose bit in `avoid` is not
 * set. Fails with the error of the last one that was tried. */
int dray__carrier_choose(const char *scheme, const dray__stream_keys *keys, bool trusted,
                         uint32_t avoid, uint32_t *index, dray_error *error);
/* Returns the carrier whose connections begin with this byte; NULL: there is none. */
const dray__carrier *dray__carrier_of(const char *scheme, uint8_t first);
/* Does the same as dray_transport_find. *out gets the transport of this name; NULL for "auto". */
int dray__transport_find(const char *name, const char **out, char *detail, size_t size,
                         dray_error *error);
/* Checks the environment variables of all carriers. */
int dray__carriers_check(dray_error *error);
/* Returns true when a carrier has one-sided reads with these keys. */
bool dray__carriers_read(const dray__stream_keys *keys);

/* ---- plain sockets, which several carriers use: tcp.c */
#define DRAY__CARRIER_PLAIN                                                                        \
    .connect = dray__plain_begin, .accept = dray__plain_begin, .send = dray__plain_send,           \
    .recv = dray__plain_recv, .events = dray__plain_events
int dray__plain_begin(dray__stream *stream, dray_error *error); /* calls `may` */
ssize_t dray__plain_send(dray__stream *stream, const void *data, size_t size, bool more);
ssize_t dray__plain_recv(dray__stream *stream, void *data, size_t size);
short dray__plain_events(const dray__stream *stream, short wanted);
