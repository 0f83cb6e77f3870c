/* src/control/: the coordinator of a job and its clients. The coordinator (coordinator.c,
 * connection.c, request.c, session.c) knows which processes are alive and hands their requests to
 * services; those that come with this folder are sessions, barriers, reports and leases. The
 * clients' end is context.c and channel.c. The registry of weights and the queue are services,
 * too, which this folder knows nothing of. */

/* The coordinator: one libevent loop that owns sessions and hands requests to services.
 *
 * A session says that its process lives: it begins with HELLO on a connection, may have further
 * connections attached, and ends when its first connection closes. Services (the registry of
 * layouts and versions, the queue's controller, reports) register a range of message types, keep
 * their own state, and get a callback when a session ends. A bad request gets an error reply and
 * affects no other request. Everything runs on the loop's thread. */
#pragma once

#include "base/tls.h"
#include "base/wire.h"
#include "control/limits.h"
#include "control/protocol.h"

#include <dray/dray.h>
#include <jansson.h>

struct event_base;
typedef struct dray__coordinator dray__coordinator;
typedef struct dray__session dray__session;
typedef struct dray__request dray__request;

/* A service's function for the messages of a type. */
typedef struct dray__handler {
    uint16_t type; /* 0 at the end of the table */
    /* NULL when `handle` reads the payload itself, or there is no payload. */
    const dray__fields *fields;
    /* Answers the request now, or keeps it and answers later. A returned error becomes the answer.
     * The message's pointers are valid until this returns. */
    int (*handle)(void *self, dray__request *request, const void *message, dray_error *error);
} dray__handler;

typedef struct dray__service {
    const char *name;
    uint16_t first, last;          /* message types */
    const dray__handler *handlers; /* NULL when `handle` below handles all of them */
    /* Handles one request: answers it now (dray__request_reply / _fail), or keeps it and answers
     * later. Every request is answered exactly once. Payload and descriptors are valid until then.
     */
    void (*handle)(void *self, dray__request *request);
    /* Called for a kept request when its deadline passed or its channel is gone. The service must
     * forget it and answer it: after a deadline usually with DRAY_ETIMEDOUT. For a channel that is
     * gone the answer is not sent, but it frees the request. NULL for services that keep no
     * request. */
    void (*expired)(void *self, dray__request *request, int channel_gone);
    /* Called when a connection ended but its session, if it had one, goes on; after `expired` of
     * the connection's kept requests. May be NULL. */
    void (*channel_ended)(void *self, uint64_t channel);
    /* Called after `expired` of all the session's kept requests; the session is then freed. May be
     * NULL, like status and free. */
    void (*session_ended)(void *self, dray__session *session);
    /* Adds its part to `dray status --json`. */
    void (*status)(void *self, json_t *object);
    void (*free)(void *self);
} dray__service;

typedef struct dray__coordinator_options {
    const char *unix_path;   /* socket to listen at, mode 0600; NULL when there is none */
    const char *tcp_address; /* "127.0.0.1:0", "[::]:7000"; NULL when there is none */
    /* The master token's file, which is made if it does not exist, and stays. With NULL, a new one
     * is made at dray__token_path, and removed at the end. */
    const char *token_path;
    const char *keeper_path; /* sent to clients in the answer to HELLO; NULL when there is none */
    /* The file by which the next coordinator knows the members if this one is killed. It is removed
     * at an orderly end. With NULL, members must open everything again. */
    const char *state_path;
    /* Serve requests on connections without HELLO too (dray__channel_connect), as the queue's
     * keeper needs it. Their session is NULL. */
    int sessionless;
    const char *limits;  /* control/limits.h; NULL means the defaults */
    size_t unread_bytes; /* replies that a client may leave unread; 0 means 128 MiB */
    int64_t hello_ns;    /* a connection without HELLO or ATTACH (sessionless: without a request) is
                          * closed after it; 0 means 30 s, and at most 10 s for TCP */
} dray__coordinator_options;

/* base is the caller's event loop. */
int dray__coordinator_new(struct event_base *base, const dray__coordinator_options *options,
                          dray__coordinator **out, dray_error *error);
/* service is copied. service->free frees self. */
int dray__coordinator_add(dray__coordinator *coordinator, const dray__service *service, void *self,
                          dray_error *error);
void dray__coordinator_free(dray__coordinator *coordinator);
/* Frees a coordinator that could not begin to serve. The state that the one before left stays for
 * the next one. NULL is fine. */
void dray__coordinator_give_up(dray__coordinator *coordinator);
/* Returns the address with the port that was bound, "tcp:127.0.0.1:41234"; NULL without TCP. */
const char *dray__coordinator_tcp(const dray__coordinator *coordinator);

/* Makes a key of the coordinator's own for `use`, from the key that members of its session show
 * each other. It is the same after a restart that keeps the session. Returns false when out of
 * memory. */
bool dray__coordinator_key(const dray__coordinator *coordinator, const char *use,
                           dray__tls_key *out);

/* Returns the state of all services, as STATUS answers it, as a new object; NULL when out of
 * memory. */
json_t *dray__coordinator_status(const dray__coordinator *coordinator);

/* The number of coordinators with this state, this one included; 0 when it keeps none. */
uint64_t dray__coordinator_generation(const dray__coordinator *coordinator);

/* ---- for services ---------------------------------------------------------------------------- */

/* Returns NULL for a connection without HELLO (sessionless). */
dray__session *dray__request_session(const dray__request *request);
uint64_t dray__request_channel(const dray__request *request); /* the connection's; 0 when it is
                                                               * gone */
uint16_t dray__request_type(const dray__request *request);
dray__reader *dray__request_payload(dray__request *request);
uint32_t dray__request_fd_count(const dray__request *request);
int dray__request_take_fd(dray__request *request, uint32_t index); /* now the service's to close */
/* Has `expired` called at the deadline. Requests without a deadline are kept until they are
 * answered. */
int dray__request_expire_at(dray__request *request, int64_t deadline_ns);
/* Return whether the request came over the Unix socket, or with the master token. */
bool dray__request_local(const dray__request *request);
bool dray__request_master(const dray__request *request);
/* A slot for the service's own bookkeeping of a kept request. */
void dray__request_set_data(dray__request *request, void *data);
void *dray__request_data(const dray__request *request);
/* Both free the request. payload may be NULL for an empty one; it is reset, not freed. fds stay the
 * caller's. */
void dray__request_reply(dray__request *request, dray__writer *payload, const int *fds,
                         uint32_t fd_count);
void dray__request_fail(dray__request *request, const dray_error *error);
/* Replies with these fields. */
void dray__request_answer(dray__request *request, const dray__fields *of, const void *answer);
/* Reads the request by its row of the table and calls its handler. Does not answer an error;
 * returns it. */
int dray__request_handle(dray__request *request, const dray__handler *handlers, void *self,
                         dray_error *error);

/* The role of the session's token, such as "task". "master" for the master's token, and for this
 * user's processes. */
const char *dray__session_token(const dray__session *session);
uint64_t dray__coordinator_sessions(const dray__coordinator *coordinator, const char *token);
const dray__limits *dray__coordinator_limits(const dray__coordinator *coordinator);
uint64_t dray__session_member(const dray__session *session);
const char *dray__session_name(const dray__session *session);
uint64_t dray__session_host(const dray__session *session);
int64_t dray__session_pid(const dray__session *session); /* by SO_PEERCRED; 0 over TCP */

/* Posts a report, a JSON object, as REPORT_POST does. */
int dray__session_report(const dray__session *session, const char *kind, const char *text,
                         size_t size, dray_error *error);

/* The services that come with control. */
int dray__reports_add(dray__coordinator *coordinator, dray_error *error);
int dray__leases_add(dray__coordinator *coordinator, dray_error *error);
