/* A data server: one thread that answers the requests of readers (messages.h), each connection's in
 * their order. What it answers is its service's to say. */
#pragma once

#include "base/callers.h"
#include "memory/region.h"
#include "net/messages.h"
#include "net/stream.h"

typedef struct dray__server dray__server;

/* What a request that was answered with -EAGAIN waits for. */
enum {
    DRAY__WAITS_FOR_BUFFER, /* of the server's */
    DRAY__WAITS_IN_LINE     /* meanwhile the server reads on, for what is only told */
};

/* A connection, as the service sees it. */
typedef struct dray__data_reader dray__data_reader;
struct dray__data_reader {
    dray__data_reader *next, **link; /* all of the server's */
    dray__server *server;
    dray__stream *stream;
    void *state;                /* the service's: state_bytes, zeros at first */
    dray__data_request request; /* the one that is to be answered */
    const uint8_t *body;
    dray__writer head; /* header and head of the answer, empty at first */
    dray_region *data; /* and its data; NULL: none */
    uint64_t data_bytes;
    int waits;
    uint32_t taken; /* requests that the service has, and has not answered yet */
};

typedef struct dray__data_service {
    void *user;
    size_t state_bytes;
    /* Puts the answer. 0; -EAGAIN: not now: is asked again; -EINPROGRESS: the service has taken the
     * request, `later` will answer it, and the server reads the next one; -ENOTSUP: it answers
     * nothing of this type; another -errno: the connection is over. */
    int (*answer)(void *user, dray__data_reader *reader);
    /* Puts the answer of the oldest request that was taken. 0; -EAGAIN: it is not there yet. NULL:
     * none is ever taken. */
    int (*later)(void *user, dray__data_reader *reader);
    /* Of those below NULL means that there is nothing to do. */
    /* Takes what was told, in its order or while a request waits in the line. 0, or -errno. */
    int (*told)(void *user, dray__data_reader *reader, const dray__data_request *told);
    /* Would an answer that does not wait for a buffer come now? */
    bool (*ready)(void *user, const dray__data_reader *reader);
    /* Holds what the service needs while the connection works; false: the connection is over. */
    bool (*enter)(const dray__data_reader *reader);
    void (*leave)(void);
    bool (*overdue)(const dray__data_reader *reader,
                    int64_t now_ns); /* it kept something for too long */
    void (*end)(void *user, dray__data_reader *reader);
} dray__data_service;

/* Listens at `address` ("10.0.0.1", "0.0.0.0:7001", "unix:/path"). keys: borrowed until the end. */
int dray__server_new(const char *address, const dray__stream_keys *keys,
                     const dray__data_service *service, dray__server **out, dray_error *error);
void dray__server_free(dray__server *server);                  /* NULL is fine */
const char *dray__server_endpoint(const dray__server *server); /* "tcp:ADDRESS:PORT" */

/* For its service. */
dray__data_reader *dray__server_readers(const dray__server *server); /* the first of all */
/* A buffer of DRAY__DATA_MAX bytes for the answer's data. false: none is free: -EAGAIN. */
bool dray__server_buffer(dray__data_reader *reader);
/* An eventfd: written to when an answer may be there that was waited for. */
int dray__server_wake(const dray__server *server);
