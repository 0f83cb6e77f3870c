/* A data server is one thread that answers the requests of readers (messages.h), in order within
 * each connection. The service makes the answers. */
#pragma once

#include "base/callers.h"
#include "memory/region.h"
#include "net/messages.h"
#include "net/stream.h"

typedef struct dray__server dray__server;

/* The reason why a request that was answered with -EAGAIN waits. */
enum {
    DRAY__WAITS_FOR_BUFFER, /* for one of the server's buffers */
    /* For a slot of an arena; meanwhile the server reads on, for messages that need no answer. */
    DRAY__WAITS_IN_LINE
};

/* A connection as the service sees it. */
typedef struct dray__data_reader dray__data_reader;
struct dray__data_reader {
    dray__data_reader *next, **link; /* the list of all connections of the server */
    dray__server *server;
    dray__stream *stream;
    /* The service's own state: state_bytes bytes, which are zero at first. */
    void *state;
    dray__data_request request; /* the request that is to be answered */
    const uint8_t *body;
    dray__writer head; /* the header and head of the answer, which is empty at first */
    dray_region *data; /* the answer's data; NULL when it has none */
    uint64_t data_bytes;
    int waits;
    uint32_t taken; /* the number of requests that the service has taken and not answered yet */
};

typedef struct dray__data_service {
    void *user;
    size_t state_bytes;
    /* Puts the answer. Returns 0; -EAGAIN when it must be called again later; -EINPROGRESS when
     * the service has taken the request, `later` will answer it, and the server may read the
     * next one; -ENOTSUP when the service answers no requests of this type; another -errno when
     * the connection is over. */
    int (*answer)(void *user, dray__data_reader *reader);
    /* Puts the answer of the oldest request that was taken. Returns 0, or -EAGAIN while it is
     * not ready. NULL when the service never takes requests. */
    int (*later)(void *user, dray__data_reader *reader);
    /* The functions below may be NULL; then there is nothing to do. */
    /* Handles a message that needs no answer, in order or while a request waits in line. Returns
     * 0 or -errno. */
    int (*told)(void *user, dray__data_reader *reader, const dray__data_request *told);
    /* Returns true when an answer that needs no buffer is ready. */
    bool (*ready)(void *user, const dray__data_reader *reader);
    /* Acquires the service's locks while the connection works. Returns false when the connection is
     * over. */
    bool (*enter)(const dray__data_reader *reader);
    void (*leave)(void);
    /* Returns true when the connection has kept a resource for too long. */
    bool (*overdue)(const dray__data_reader *reader, int64_t now_ns);
    void (*end)(void *user, dray__data_reader *reader);
} dray__data_service;

/* Listens at `address` ("10.0.0.1", "0.0.0.0:7001", "unix:/path"). `keys` is borrowed until the
 * server is freed. */
int dray__server_new(const char *address, const dray__stream_keys *keys,
                     const dray__data_service *service, dray__server **out, dray_error *error);
void dray__server_free(dray__server *server);                  /* NULL is allowed. */
const char *dray__server_endpoint(const dray__server *server); /* "tcp:ADDRESS:PORT" */

/* The functions below are for the service. */
/* The first connection of the list. */
dray__data_reader *dray__server_readers(const dray__server *server);
/* Gives the connection a buffer of DRAY__DATA_MAX bytes for the answer's data. Returns false
 * when none is free; the service then answers -EAGAIN. */
bool dray__server_buffer(dray__data_reader *reader);
/* An eventfd. The service writes to it when an answer may be ready. */
int dray__server_wake(const dray__server *server);
